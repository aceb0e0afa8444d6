//! Digests: SHA-256 for users, who can compute it with the tools of their system, and the faster BLAKE3 where a run
//! verifies its own output.

use sha2::Digest;

/// A digest of either kind.
pub type Digest256 = [u8; 32];

/// Returns the SHA-256 of bytes in hexadecimal digits.
pub fn sha256_hex(bytes: impl AsRef<[u8]>) -> String {
    hex(&sha2::Sha256::digest(bytes))
}

/// Formats bytes as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: [char; 16] =
        ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f'];
    bytes.iter().flat_map(|b| [DIGITS[usize::from(b >> 4)], DIGITS[usize::from(b & 15)]]).collect()
}

/// Parses a digest of 64 hexadecimal digits; `None` if it is malformed.
pub fn from_hex(text: &str) -> Option<Digest256> {
    if text.len() != 64 {
        return None;
    }
    bytes_from_hex(text)?.try_into().ok()
}

/// Parses bytes, each of two hexadecimal digits; `None` if they are malformed.
pub fn bytes_from_hex(text: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let value = |digit: u8| char::from(digit).to_digit(16);
    let byte = |[high, low]: &[u8; 2]| u8::try_from(value(*high)? << 4 | value(*low)?).ok();
    rest.is_empty().then(|| pairs.iter().map(byte).collect())?
}
