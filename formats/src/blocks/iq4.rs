//! 4-bit codes for sixteen levels that are denser near zero.
//!
//! IQ4_NL: 32 codes and a scale. IQ4_XS: 256 codes, a scale, and a 6-bit factor per 32 elements: `d`, the high two bits
//! of the eight factors in one 16-bit word, their low four bits in four bytes, then the codes.

use super::grid::{Fields, Grid, Scales, Steps};
use super::search::{
    LANES, Lanes, largest, level_code, level_scales, load, nearest, square_sums, squares, weigh_lanes,
};
use super::{BlockType, SUPER, f16_bits};
use crate::vector::vectorized;

/// 4 bits on levels, `d·T[q]`.
pub static IQ4_NL: BlockType = BlockType {
    name: "IQ4_NL",
    id: 20,
    elements: 32,
    bytes: 18,
    needs_importance: false,
    uses_importance: true,
    fallback: Some(&super::F16),
    grid: Some(&Grid {
        steps: Steps::Uneven,
        scales: Scales::Multiples,
        part: 32,
        factors: [1, 1],
        pack: pack_nl,
    }),
    encode: encode_nl,
    decode: decode_nl,
};

/// 4 bits on levels with factors, `d·(ls − 32)·T[q]`.
pub static IQ4_XS: BlockType = BlockType {
    name: "IQ4_XS",
    id: 23,
    elements: SUPER,
    bytes: 136,
    needs_importance: false,
    uses_importance: true,
    fallback: Some(&IQ4_NL),
    grid: Some(&Grid {
        steps: Steps::Uneven,
        scales: Scales::Multiples,
        part: 32,
        factors: [-32, 31],
        pack: pack_xs,
    }),
    encode: encode_xs,
    decode: decode_xs,
};

pub(super) const LEVELS: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

#[inline(always)]
fn put_codes(bytes: &mut [u8], x: &[f32], scale: f32) {
    let inverse = if scale != 0.0 { 1.0 / scale } else { 0.0 };
    let mut codes = [0; 32];
    for (code, x) in codes.iter_mut().zip(x) {
        *code = level_code(inverse * x);
    }
    join_codes(bytes, &codes);
}

/// Byte `j` holds code `j` in its low nibble and code `j + 16` in its high nibble.
#[inline(always)]
fn join_codes(bytes: &mut [u8], codes: &[u8]) {
    for (j, byte) in bytes.iter_mut().enumerate() {
        *byte = codes[j] | codes[j + 16] << 4;
    }
}

fn pack_nl(fields: &Fields, block: &mut [u8]) {
    f16_bits::put(block, 0, fields.d);
    join_codes(&mut block[2..], &fields.codes[..32]);
}

fn pack_xs(fields: &Fields, block: &mut [u8]) {
    block.fill(0);
    f16_bits::put(block, 0, fields.d);
    for (j, codes) in fields.codes.chunks_exact(32).enumerate() {
        put_factor(block, j, fields.factors[j]);
        join_codes(&mut block[8 + 16 * j..][..16], codes);
    }
}

/// Writes the factor of 32 elements, from −32 to 31, into bits that are zero.
#[inline(always)]
fn put_factor(block: &mut [u8], j: usize, factor: i32) {
    let factor = (factor + 32) as u8;
    block[4 + j / 2] |= (factor & 15) << (4 * (j % 2));
    block[2 + j / 4] |= (factor >> 4) << (2 * (j % 4));
}

fn get_codes(bytes: &[u8], scale: f32, out: &mut [f32]) {
    for (i, o) in out.iter_mut().enumerate() {
        let code = bytes[i % 16] >> (4 * (i / 16)) & 15;
        *o = scale * f32::from(LEVELS[usize::from(code)]);
    }
}

fn encode_nl(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    const BATCH: usize = 32 * LANES;
    for (i, (x, out)) in row.chunks(BATCH).zip(out.chunks_mut(18 * LANES)).enumerate() {
        let importance = importance.map(|importance| &importance[BATCH * i..][..x.len()]);
        vectorized(
            #[inline(always)]
            || encode_nl_batch(x, importance, out),
        );
    }
}

#[inline(always)]
fn encode_nl_batch(values: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    let x = load::<32>(values);
    let plain = squares(&x);
    let mut scales = match importance {
        None => level_scales(&x, &plain),
        Some(importance) => {
            let importance = load::<32>(importance);
            let mut sigma2 = [0.0; LANES];
            for squares in &plain {
                for i in 0..LANES {
                    sigma2[i] += squares[i];
                }
            }
            // The product rounds like the reference; the quotient would not.
            sigma2.iter_mut().for_each(|sum| *sum *= 2.0 / 32.0);
            level_scales(&x, &weigh_lanes(&importance, &sigma2, &x))
        }
    };
    // The scale of the reference is NaN if all importances of a block are 0. Here, such importances are ignored.
    if scales.iter().any(|scale| !scale.is_finite()) {
        let without = level_scales(&x, &plain);
        for (scale, without) in scales.iter_mut().zip(without) {
            *scale = if scale.is_finite() { *scale } else { without };
        }
    }
    for ((x, block), scale) in values.chunks_exact(32).zip(out.chunks_exact_mut(18)).zip(scales) {
        f16_bits::put(block, 0, scale);
        put_codes(&mut block[2..], x, scale);
    }
}

fn decode_nl(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(18).zip(out.chunks_exact_mut(32)) {
        get_codes(&block[2..], f16_bits::get(block, 0), out);
    }
}

fn encode_xs(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    const BATCH: usize = SUPER * LANES;
    for (i, (x, out)) in row.chunks(BATCH).zip(out.chunks_mut(136 * LANES)).enumerate() {
        let importance = importance.map(|importance| &importance[BATCH * i..][..x.len()]);
        vectorized(
            #[inline(always)]
            || encode_xs_batch(x, importance, out),
        );
    }
}

#[inline(always)]
fn encode_xs_batch(values: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    let mut scales = [[0.0; 8]; LANES];
    let sums = if importance.is_some() { square_sums(values) } else { [0.0; LANES] };
    for (g, (values, found)) in values.chunks(32 * LANES).zip(scales.chunks_mut(2)).enumerate() {
        let x = load::<32>(values);
        let weights = match importance {
            None => squares(&x),
            Some(importance) => {
                let importance = load::<32>(&importance[32 * LANES * g..][..values.len()]);
                // The product rounds like the reference; the quotient would not.
                let sigma2: Lanes = std::array::from_fn(|i| sums[2 * g + i / 8] * (2.0 / SUPER as f32));
                weigh_lanes(&importance, &sigma2, &x)
            }
        };
        found.as_flattened_mut().copy_from_slice(&level_scales(&x, &weights));
    }
    for ((x, block), scales) in values.chunks_exact(SUPER).zip(out.chunks_exact_mut(136)).zip(&scales) {
        block.fill(0);
        let d = -largest(scales) / 32.0;
        f16_bits::put(block, 0, d);
        let inverse = if d != 0.0 { 1.0 / d } else { 0.0 };
        for (j, (scale, x)) in scales.iter().zip(x.chunks_exact(32)).enumerate() {
            let factor = nearest(inverse * scale).clamp(-32, 31);
            put_codes(&mut block[8 + 16 * j..][..16], x, d * factor as f32);
            put_factor(block, j, factor);
        }
    }
}

fn decode_xs(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(136).zip(out.chunks_exact_mut(SUPER)) {
        let d = f16_bits::get(block, 0);
        let high = u16::from_le_bytes([block[2], block[3]]);
        for (j, out) in out.chunks_exact_mut(32).enumerate() {
            let low = block[4 + j / 2] >> (4 * (j % 2)) & 15;
            let factor = i32::from(low) | i32::from(high >> (2 * j) & 3) << 4;
            get_codes(&block[8 + 16 * j..], d * (factor - 32) as f32, out);
        }
    }
}
