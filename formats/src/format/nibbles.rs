//! 4-bit codes, two per byte.

use crate::Result;
use crate::allocate::collected;

/// Packs codes; the first code of each pair is in the low nibble.
pub(super) fn pack_nibbles(codes: &[u8]) -> Vec<u8> {
    codes.chunks(2).map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 4)).collect()
}

/// Unpacks the codes of all bytes.
///
/// # Errors
/// [`Error::Memory`](crate::Error::Memory) when they cannot be allocated.
pub(super) fn unpack_nibbles(bytes: &[u8]) -> Result<Vec<u8>> {
    collected(2 * bytes.len(), bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]), "the codes of a weight")
}
