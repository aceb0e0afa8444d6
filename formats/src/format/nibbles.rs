//! Codes of four bits, two per byte.

/// The bytes of codes, the first of two in the low bits.
pub(super) fn pack_nibbles(codes: &[u8]) -> Vec<u8> {
    codes.chunks(2).map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 4)).collect()
}

/// The codes of such bytes.
pub(super) fn unpack_nibbles(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect()
}
