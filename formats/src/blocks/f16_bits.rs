//! Scales as little-endian `f16`.

use half::f16;

pub(super) fn get(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Writes the rounded value at offset `at`, and returns it.
pub(super) fn put(bytes: &mut [u8], at: usize, value: f32) -> f32 {
    let half = f16::from_f32(value);
    bytes[at..at + 2].copy_from_slice(&half.to_le_bytes());
    half.to_f32()
}
