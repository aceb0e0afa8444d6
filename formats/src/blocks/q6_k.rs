//! 256 6-bit codes: sixteen sub-blocks of 16 with 8-bit scales.
//!
//! A block holds 128 bytes with the low four bits of the codes, 64 bytes with the high two bits, 16 scales, and `d`.
//! Every 128 elements form four runs of 32. The first and third run share 32 bytes for their low bits, in the low and
//! high nibbles; the second and fourth run share the next 32. The high bits of all four runs share 32 bytes.

use super::grid::{Fields, Grid, Scales, Steps};
use super::search::{NEGLIGIBLE, largest, load, nearest, squares, symmetric};
use super::{BlockType, SUPER, f16_bits};
use crate::vector::vectorized;

/// 6 bits, `d·sc·(q − 32)`.
pub static Q6_K: BlockType = BlockType {
    name: "Q6_K",
    id: 14,
    elements: SUPER,
    bytes: 210,
    needs_importance: false,
    uses_importance: true,
    fallback: Some(&super::Q8_0),
    grid: Some(&Grid {
        steps: Steps::Even { half: 32 },
        scales: Scales::Multiples,
        part: 16,
        factors: [-128, 127],
        pack,
    }),
    encode,
    decode,
};

/// Location of the bits of element `e`: byte and shift of the low four, byte and shift of the high two.
fn place(e: usize) -> (usize, usize, usize, usize) {
    let (half, l, part) = (e / 128, e % 32, e % 128 / 32);
    (64 * half + l + 32 * (part & 1), 4 * (part >> 1), 32 * half + l, 2 * part)
}

fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    out.fill(0);
    for (i, (x, block)) in row.chunks_exact(SUPER).zip(out.chunks_exact_mut(210)).enumerate() {
        let importance = importance.map(|importance| &importance[SUPER * i..][..SUPER]);
        vectorized(
            #[inline(always)]
            || encode_block(x, importance, block),
        );
    }
}

/// Encodes a block into bytes that must be zero before the call.
#[inline(always)]
fn encode_block(values: &[f32], importance: Option<&[f32]>, block: &mut [u8]) {
    let x = load::<16>(values);
    let weights = match importance {
        Some(importance) => load::<16>(importance),
        None => squares(&x),
    };
    let found = symmetric(32, &x, &weights);
    let max = largest(&found.scale);
    if max.abs() < NEGLIGIBLE {
        return;
    }
    let inverse = -128.0 / max;
    let d = f16_bits::put(block, 208, 1.0 / inverse);
    let mut codes = [0_u8; SUPER];
    let parts = values.chunks_exact(16).zip(codes.chunks_exact_mut(16));
    for (j, (x, codes)) in parts.enumerate() {
        let scale = nearest(inverse * found.scale[j]).min(127) as i8;
        block[192 + j] = scale as u8;
        let scale = d * f32::from(scale);
        if scale == 0.0 {
            found.codes(j, x, codes);
            continue;
        }
        for (code, x) in codes.iter_mut().zip(x) {
            *code = (nearest(x / scale).clamp(-32, 31) + 32) as u8;
        }
    }
    put_codes(&codes, block);
}

/// Writes all codes into bytes that must be zero before the call.
fn put_codes(codes: &[u8; SUPER], block: &mut [u8]) {
    for (e, code) in codes.iter().enumerate() {
        let (low, low_shift, high, high_shift) = place(e);
        block[low] |= (code & 15) << low_shift;
        block[128 + high] |= (code >> 4) << high_shift;
    }
}

fn pack(fields: &Fields, block: &mut [u8]) {
    block.fill(0);
    f16_bits::put(block, 208, fields.d);
    for (byte, factor) in block[192..208].iter_mut().zip(fields.factors) {
        *byte = factor as i8 as u8;
    }
    put_codes(&fields.codes, block);
}

pub(super) fn get_code(block: &[u8], e: usize) -> u8 {
    let (low, low_shift, high, high_shift) = place(e);
    block[low] >> low_shift & 15 | (block[128 + high] >> high_shift & 3) << 4
}

fn decode(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(210).zip(out.chunks_exact_mut(SUPER)) {
        let d = f16_bits::get(block, 208);
        for (e, o) in out.iter_mut().enumerate() {
            let scale = d * f32::from(block[192 + e / 16] as i8);
            *o = scale * f32::from(get_code(block, e) as i8 - 32);
        }
    }
}
