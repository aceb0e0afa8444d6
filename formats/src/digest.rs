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
    let digits = text.as_bytes();
    if digits.len() != 64 {
        return None;
    }
    let mut digest = [0; 32];
    for (byte, pair) in digest.iter_mut().zip(digits.chunks_exact(2)) {
        let value = |d: u8| char::from(d).to_digit(16);
        *byte = u8::try_from(value(pair[0])? << 4 | value(pair[1])?).ok()?;
    }
    Some(digest)
}
