//! 32 4-bit or 5-bit codes with a scale, and a minimum in the types whose names end in 1.
//!
//! A block holds `d`; `m` if there is one; the fifth bits of 5-bit codes as one little-endian 32-bit word; then 16
//! bytes: byte `j` holds element `j` in its low nibble and `j + 16` in its high nibble.

use super::grid::{Fields, Grid, Scales, Steps};
use super::search::{
    LANES, Offsets, largest, load, mean_square, symmetric, truncate, weigh_lanes, with_minimum,
};
use super::{BlockType, f16_bits};
use crate::vector::vectorized;

/// 4 bits, `d·(q − 8)`.
pub static Q4_0: BlockType = BlockType { name: "Q4_0", id: 2, ..kind::<4, false>() };
/// 4 bits, `d·q + m`.
pub static Q4_1: BlockType = BlockType { name: "Q4_1", id: 3, ..kind::<4, true>() };
/// 5 bits, `d·(q − 16)`.
pub static Q5_0: BlockType = BlockType { name: "Q5_0", id: 6, ..kind::<5, false>() };
/// 5 bits, `d·q + m`.
pub static Q5_1: BlockType = BlockType { name: "Q5_1", id: 7, ..kind::<5, true>() };

const fn kind<const BITS: usize, const MINIMUM: bool>() -> BlockType {
    BlockType {
        name: "",
        id: 0,
        elements: 32,
        bytes: head(BITS, MINIMUM) + 16,
        needs_importance: false,
        uses_importance: true,
        fallback: Some(&super::F16),
        grid: Some(
            const {
                &Grid {
                    steps: match MINIMUM {
                        true => Steps::Minimum { top: (1 << BITS) - 1 },
                        false => Steps::Even { half: 1 << (BITS - 1) },
                    },
                    scales: Scales::Multiples,
                    part: 32,
                    factors: [1, 1],
                    pack: pack::<BITS, MINIMUM>,
                }
            },
        ),
        encode: encode::<BITS, MINIMUM>,
        decode: decode::<BITS, MINIMUM>,
    }
}

const fn head(bits: usize, minimum: bool) -> usize {
    2 + if minimum { 2 } else { 0 } + if bits == 5 { 4 } else { 0 }
}

fn pack<const BITS: usize, const MINIMUM: bool>(fields: &Fields, block: &mut [u8]) {
    f16_bits::put(block, 0, fields.d);
    if MINIMUM {
        f16_bits::put(block, 2, -fields.dmin);
    }
    let mut codes = [0; 32];
    codes.copy_from_slice(&fields.codes[..32]);
    put_codes::<BITS, MINIMUM>(block, &codes);
}

fn encode<const BITS: usize, const MINIMUM: bool>(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    const BATCH: usize = 32 * LANES;
    let bytes = head(BITS, MINIMUM) + 16;
    let Some(importance) = importance else {
        for (x, block) in row.chunks_exact(32).zip(out.chunks_exact_mut(bytes)) {
            let mut codes = [0_u8; 32];
            let (scale, minimum) = match MINIMUM {
                false => plain_symmetric::<BITS>(x, &mut codes),
                true => plain_minimum::<BITS>(x, &mut codes),
            };
            put::<BITS, MINIMUM>(block, scale, minimum, &codes);
        }
        return;
    };
    let sigma2 = mean_square(row);
    for (i, (x, out)) in row.chunks(BATCH).zip(out.chunks_mut(bytes * LANES)).enumerate() {
        let importance = &importance[BATCH * i..][..x.len()];
        vectorized(
            #[inline(always)]
            || encode_batch::<BITS, MINIMUM>(x, importance, sigma2, out),
        );
    }
}

#[inline(always)]
fn encode_batch<const BITS: usize, const MINIMUM: bool>(
    values: &[f32],
    importance: &[f32],
    sigma2: f32,
    out: &mut [u8],
) {
    let x = load::<32>(values);
    let weights = weigh_lanes(&load::<32>(importance), &[sigma2; LANES], &x);
    let blocks = values.chunks_exact(32).zip(out.chunks_exact_mut(head(BITS, MINIMUM) + 16)).enumerate();
    let mut codes = [0_u8; 32];
    if MINIMUM {
        let found = with_minimum(Offsets::weighted((1 << BITS) - 1), &x, &weights);
        for (i, (x, block)) in blocks {
            found.codes(i, x, &mut codes);
            put::<BITS, MINIMUM>(block, found.scale[i], -found.minimum[i], &codes);
        }
    } else {
        let found = symmetric(1 << (BITS - 1), &x, &weights);
        for (i, (x, block)) in blocks {
            found.codes(i, x, &mut codes);
            put::<BITS, MINIMUM>(block, found.scale[i], 0.0, &codes);
        }
    }
}

#[inline(always)]
fn put<const BITS: usize, const MINIMUM: bool>(block: &mut [u8], scale: f32, minimum: f32, codes: &[u8; 32]) {
    f16_bits::put(block, 0, scale);
    if MINIMUM {
        f16_bits::put(block, 2, minimum);
    }
    put_codes::<BITS, MINIMUM>(block, codes);
}

/// The element of largest magnitude gets code 0. Returns the scale, and 0 as the minimum.
fn plain_symmetric<const BITS: usize>(x: &[f32], codes: &mut [u8; 32]) -> (f32, f32) {
    let half = (1 << (BITS - 1)) as f32;
    let d = largest(x) / -half;
    let inverse = if d != 0.0 { 1.0 / d } else { 0.0 };
    for (code, x) in codes.iter_mut().zip(x) {
        *code = truncate(x * inverse + (half + 0.5)).min((1 << BITS) - 1) as u8;
    }
    (d, 0.0)
}

/// Spreads codes evenly from the smallest element to the largest; returns the scale and the minimum.
fn plain_minimum<const BITS: usize>(x: &[f32], codes: &mut [u8; 32]) -> (f32, f32) {
    let (mut min, mut max) = (f32::MAX, f32::MIN);
    for &v in x {
        if v < min {
            min = v;
        }
        if v > max {
            max = v;
        }
    }
    let top = (1 << BITS) - 1;
    let d = (max - min) / top as f32;
    let inverse = if d != 0.0 { 1.0 / d } else { 0.0 };
    for (code, x) in codes.iter_mut().zip(x) {
        *code = truncate((x - min) * inverse + 0.5).min(top) as u8;
    }
    (d, min)
}

fn put_codes<const BITS: usize, const MINIMUM: bool>(block: &mut [u8], codes: &[u8; 32]) {
    let head = head(BITS, MINIMUM);
    if BITS == 5 {
        let high = codes.iter().enumerate().fold(0_u32, |bits, (i, c)| bits | (u32::from(c >> 4) & 1) << i);
        block[head - 4..head].copy_from_slice(&high.to_le_bytes());
    }
    for (j, byte) in block[head..].iter_mut().enumerate() {
        *byte = codes[j] & 15 | (codes[j + 16] & 15) << 4;
    }
}

fn decode<const BITS: usize, const MINIMUM: bool>(bytes: &[u8], out: &mut [f32]) {
    let head = head(BITS, MINIMUM);
    for (block, out) in bytes.chunks_exact(head + 16).zip(out.chunks_exact_mut(32)) {
        let (d, m) = (f16_bits::get(block, 0), if MINIMUM { f16_bits::get(block, 2) } else { 0.0 });
        let high = match BITS {
            5 => u32::from_le_bytes([block[head - 4], block[head - 3], block[head - 2], block[head - 1]]),
            _ => 0,
        };
        for (i, o) in out.iter_mut().enumerate() {
            let low = block[head + i % 16] >> (4 * (i / 16)) & 15;
            let code = i32::from(low) | ((high >> i & 1) as i32) << 4;
            *o = match MINIMUM {
                true => code as f32 * d + m,
                false => (code - (1 << (BITS - 1))) as f32 * d,
            };
        }
    }
}

/// Writes a block of Q4_0 from its scale `d` and its codes `q`, which are below 16: its values are `d·(q − 8)`.
pub fn pack_q4_0(scale: half::f16, codes: &[u8; 32], block: &mut [u8]) {
    block[..2].copy_from_slice(&scale.to_le_bytes());
    put_codes::<4, false>(block, codes);
}
