//! 4-bit codes, two per byte.

/// Packs codes; the first code of each pair is in the low nibble.
pub(super) fn pack_nibbles(codes: &[u8]) -> Vec<u8> {
    codes.chunks(2).map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 4)).collect()
}

pub(super) fn unpack_nibbles(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect()
}
