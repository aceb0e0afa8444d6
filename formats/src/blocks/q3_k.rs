//! 256 3-bit codes: sixteen sub-blocks of 16 with 6-bit scales.
//!
//! A block holds 32 bytes with the high bits of the codes, 64 bytes with their two low bits, 12 bytes of scales, and
//! `d`. Byte `j` of the first 8 bytes of scales holds the low four bits of scales `j` and `j + 8`. Byte `j` of the
//! other 4 bytes holds the two high bits of scales `j`, `j + 4`, `j + 8` and `j + 12`.

use super::grid::{Fields, Grid, Scales, Steps};
use super::q2_k::place;
use super::search::{
    LANES, largest, load, nearest, square_sums, symmetric, symmetric_by_descent, weigh_lanes,
};
use super::{BlockType, SUPER, f16_bits};
use crate::vector::vectorized;

/// 3 bits, `d·(sc − 32)·(q − 4)`.
pub static Q3_K: BlockType = BlockType {
    name: "Q3_K",
    id: 11,
    elements: SUPER,
    bytes: 110,
    needs_importance: false,
    uses_importance: true,
    fallback: Some(&super::Q4_0),
    grid: Some(&Grid {
        steps: Steps::Even { half: 4 },
        scales: Scales::Multiples,
        part: 16,
        factors: [-32, 31],
        pack,
    }),
    encode,
    decode,
};

/// Byte offsets of the low bits, the scales and `d` in a block.
const LOW: usize = 32;
pub(super) const SCALES: usize = 96;
pub(super) const D: usize = 108;

fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    const BATCH: usize = SUPER * LANES;
    out.fill(0);
    for (i, (x, out)) in row.chunks(BATCH).zip(out.chunks_mut(110 * LANES)).enumerate() {
        let importance = importance.map(|importance| &importance[BATCH * i..][..x.len()]);
        vectorized(
            #[inline(always)]
            || encode_batch(x, importance, out),
        );
    }
}

/// Encodes up to [`LANES`] blocks into bytes that must be zero before the call.
#[inline(always)]
fn encode_batch(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    let mut codes = [0_u8; SUPER * LANES];
    // One entry per part, with one block per lane.
    let (mut scales, mut weights) = ([[0.0; LANES]; 16], [[0.0; LANES]; 16]);
    let sums = if importance.is_some() { square_sums(row) } else { [0.0; LANES] };
    for (b, (values, codes)) in row.chunks_exact(SUPER).zip(codes.chunks_exact_mut(SUPER)).enumerate() {
        let x = load::<16>(values);
        let parts = values.chunks_exact(16).zip(codes.chunks_exact_mut(16)).enumerate();
        let Some(importance) = importance else {
            let mut found = [[0.0; LANES]; 16];
            let scale = symmetric_by_descent(4, &x, &mut found);
            for (j, (_, codes)) in parts {
                scales[j][b] = scale[j];
                codes.iter_mut().zip(&found).for_each(|(code, found)| *code = found[j] as u8);
            }
            continue;
        };
        let importance = load::<16>(&importance[SUPER * b..][..SUPER]);
        let w = weigh_lanes(&importance, &[2.0 * (sums[b] / SUPER as f32); LANES], &x);
        let found = symmetric(4, &x, &w);
        let mut of_parts = [0.0; LANES];
        for w in &w {
            for j in 0..LANES {
                of_parts[j] += w[j];
            }
        }
        for (j, (values, codes)) in parts {
            (scales[j][b], weights[j][b]) = (found.scale[j], of_parts[j]);
            found.codes(j, values, codes);
        }
    }
    let units = importance.map(|_| symmetric(32, &scales, &weights));
    let blocks = row.chunks_exact(SUPER).zip(codes.chunks_exact_mut(SUPER)).zip(out.chunks_exact_mut(110));
    for (b, ((x, codes), block)) in blocks.enumerate() {
        let scales: [f32; 16] = std::array::from_fn(|j| scales[j][b]);
        let mut s = [0_u8; 16];
        let d = match &units {
            Some(units) => {
                units.codes(b, &scales, &mut s);
                units.scale[b]
            }
            None => by_largest(&scales, &mut s),
        };
        // As in the reference, the bytes of the scales stay zero if all scales are zero, unless there is an importance.
        if importance.is_some() || largest(&scales) != 0.0 {
            put_scales(&mut block[SCALES..D], &s);
        }
        let d = f16_bits::put(block, D, d);
        for (j, (x, codes)) in x.chunks_exact(16).zip(codes.chunks_exact_mut(16)).enumerate() {
            let scale = d * f32::from(get_scale(&block[SCALES..D], j));
            if scale == 0.0 {
                continue;
            }
            for (code, x) in codes.iter_mut().zip(x) {
                *code = (nearest(x / scale).clamp(-4, 3) + 4) as u8;
            }
        }
        put_codes(codes, block);
    }
}

/// Writes all codes into bytes that must be zero before the call.
fn put_codes(codes: &[u8], block: &mut [u8]) {
    for (e, code) in codes.iter().enumerate() {
        let (byte, shift) = place(e);
        block[e % 32] |= (code >> 2) << (e / 32);
        block[LOW + byte] |= (code & 3) << shift;
    }
}

fn pack(fields: &Fields, block: &mut [u8]) {
    block.fill(0);
    f16_bits::put(block, D, fields.d);
    put_scales(&mut block[SCALES..D], &fields.factors.map(|f| (f + 32) as u8));
    put_codes(&fields.codes, block);
}

/// Returns the common scale of the sub-block scales and writes their codes, offset by 32; the scale of largest
/// magnitude gets −32.
fn by_largest(scales: &[f32; 16], codes: &mut [u8; 16]) -> f32 {
    let max = largest(scales);
    if max == 0.0 {
        return 0.0;
    }
    let inverse = -32.0 / max;
    for (code, scale) in codes.iter_mut().zip(scales) {
        *code = (nearest(inverse * scale).clamp(-32, 31) + 32) as u8;
    }
    1.0 / inverse
}

fn put_scales(bytes: &mut [u8], scales: &[u8; 16]) {
    for (j, s) in scales.iter().enumerate() {
        bytes[j % 8] |= (s & 15) << (4 * (j / 8));
        bytes[8 + j % 4] |= (s >> 4) << (2 * (j / 4));
    }
}

pub(super) fn get_scale(bytes: &[u8], j: usize) -> i8 {
    let low = bytes[j % 8] >> (4 * (j / 8)) & 15;
    let high = bytes[8 + j % 4] >> (2 * (j / 4)) & 3;
    (low | high << 4) as i8 - 32
}

pub(super) fn get_code(block: &[u8], e: usize) -> u8 {
    let (byte, shift) = place(e);
    block[LOW + byte] >> shift & 3 | (block[e % 32] >> (e / 32) & 1) << 2
}

fn decode(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(110).zip(out.chunks_exact_mut(SUPER)) {
        let d = f16_bits::get(block, D);
        for (e, o) in out.iter_mut().enumerate() {
            let scale = d * f32::from(get_scale(&block[SCALES..D], e / 16));
            *o = scale * f32::from(get_code(block, e) as i8 - 4);
        }
    }
}
