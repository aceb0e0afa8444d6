//! The plain definition of every result: scalar, portable, in an order anyone can follow.
//!
//! Faster variants are held to these functions.

use std::ops::Range;

use crate::WeightView;

/// Dequantizes some rows: `out[o − rows.start, i] = (code − zero) · scale`, one rounding each.
///
/// `out` is `[rows.len(), k]` row-major.
///
/// # Panics
/// When `rows` leaves the matrix or `out` has another length.
pub fn dequantize_rows(weight: &WeightView<'_>, rows: Range<usize>, out: &mut [f32]) {
    let k = weight.k();
    assert_eq!(out.len(), rows.len() * k, "output length does not match the rows");
    if k == 0 {
        return;
    }
    let codes = weight.codes(rows.clone());
    let scales = weight.scales(rows.clone());
    for (r, row) in rows.enumerate() {
        let groups = weight.groups();
        for g in 0..groups {
            let zero = i32::from(weight.zero(row, g));
            let scale = scales[r * groups + g];
            let span = r * k + g * weight.group_size()..r * k + (g + 1) * weight.group_size();
            for (o, &c) in out[span.clone()].iter_mut().zip(&codes[span]) {
                *o = (i32::from(c) - zero) as f32 * scale;
            }
        }
    }
}
