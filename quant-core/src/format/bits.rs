//! Codes of a few bits as a dense little-endian bit stream in 32-bit words.

/// Words that `count` codes of `bits` bits occupy.
pub fn words_for(count: usize, bits: u8) -> usize {
    (count * bits as usize).div_ceil(32)
}

/// Packs codes.
pub fn pack_words(_codes: &[u8], _bits: u8) -> Vec<u32> {
    Vec::new()
}

/// Unpacks codes.
pub fn unpack_words(_words: &[u32], _bits: u8, _count: usize) -> Vec<u8> {
    Vec::new()
}
