//! Eight 6-bit scales and eight 6-bit minimums in 12 bytes, as in Q4_K and Q5_K. The first four scales and the first
//! four minimums have one byte each; the two upper bits of these bytes hold the upper bits of the other scales and
//! minimums. The lower four bits of each other scale and minimum share one of the last four bytes.

pub(super) fn get(bytes: &[u8], j: usize) -> (u8, u8) {
    match j {
        0..4 => (bytes[j] & 63, bytes[j + 4] & 63),
        _ => (bytes[j + 4] & 15 | bytes[j - 4] >> 6 << 4, bytes[j + 4] >> 4 | bytes[j] >> 6 << 4),
    }
}

/// `bytes` must be zero before the call.
pub(super) fn put(bytes: &mut [u8], scales: &[u8], minimums: &[u8]) {
    for (j, (&s, &m)) in scales.iter().zip(minimums).enumerate() {
        match j {
            0..4 => {
                bytes[j] |= s;
                bytes[j + 4] |= m;
            }
            _ => {
                bytes[j + 4] |= s & 15 | (m & 15) << 4;
                bytes[j - 4] |= s >> 4 << 6;
                bytes[j] |= m >> 4 << 6;
            }
        }
    }
}
