//! 256 4-bit codes: eight sub-blocks of 32, each with a 6-bit scale and a 6-bit minimum.
//!
//! A block holds `d`, `dmin`, 12 bytes of scales and minimums, and 128 bytes of codes. Every 64 elements take 32 bytes
//! of codes: the first 32 elements are in the low nibbles, the others in the high nibbles.

use super::grid::{Fields, Grid, Scales, Steps};
use super::search::{Offsets, mean_square, nearest, positive, weigh, with_minimum};
use super::{BlockType, SUPER, f16_bits, scales_6bit};

/// 4 bits, `d·sc·q − dmin·m`.
pub static Q4_K: BlockType = BlockType {
    name: "Q4_K",
    id: 12,
    elements: SUPER,
    bytes: 144,
    needs_importance: false,
    uses_importance: true,
    fallback: Some(&super::Q5_0),
    grid: Some(&Grid {
        steps: Steps::Minimum { top: 15 },
        scales: Scales::Multiples,
        part: 32,
        factors: [0, 63],
        pack,
    }),
    encode,
    decode,
};

const PLAIN: Offsets = Offsets { top: 15, first: -1.0, step: 0.1, steps: 20, absolute: false };

fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    for (i, (x, block)) in row.chunks_exact(SUPER).zip(out.chunks_exact_mut(144)).enumerate() {
        let importance = importance.map(|importance| &importance[SUPER * i..][..SUPER]);
        let mut codes = [0; SUPER];
        block.fill(0);
        super_block(x, importance, PLAIN, &mut codes, block);
        put_codes(&codes, block);
    }
}

fn put_codes(codes: &[u8; SUPER], block: &mut [u8]) {
    for (codes, bytes) in codes.chunks_exact(64).zip(block[16..].chunks_exact_mut(32)) {
        for (l, byte) in bytes.iter_mut().enumerate() {
            *byte = codes[l] | codes[l + 32] << 4;
        }
    }
}

fn pack(fields: &Fields, block: &mut [u8]) {
    block.fill(0);
    put_scales(fields, block);
    put_codes(&fields.codes, block);
}

/// Writes the first 16 bytes of a block, which must be zero.
pub(super) fn put_scales(fields: &Fields, block: &mut [u8]) {
    f16_bits::put(block, 0, fields.d);
    f16_bits::put(block, 2, fields.dmin);
    let (mut s, mut m) = ([0; 8], [0; 8]);
    s.iter_mut().zip(fields.factors).for_each(|(s, f)| *s = f as u8);
    m.iter_mut().zip(fields.minimums).for_each(|(m, f)| *m = f as u8);
    scales_6bit::put(&mut block[4..16], &s, &m);
}

/// Finds scales, minimums and codes of a super-block; writes scales and minimums into the first 16 bytes, which must be
/// zero.
pub(super) fn super_block(
    x: &[f32],
    importance: Option<&[f32]>,
    plain: Offsets,
    codes: &mut [u8; SUPER],
    block: &mut [u8],
) {
    let (mut scales, mut minimums, mut sums) = ([0.0_f32; 8], [0.0_f32; 8], [0.0_f32; 8]);
    let sigma2 = 2.0 * mean_square(x);
    let mut weights = [0.0; 32];
    for j in 0..8 {
        let x = &x[32 * j..][..32];
        match importance {
            Some(importance) => weigh(&importance[32 * j..][..32], sigma2, x, &mut weights),
            None => {
                let rms = mean_square(x).sqrt();
                weights.iter_mut().zip(x).for_each(|(w, x)| *w = rms + x.abs());
            }
        }
        for w in weights {
            sums[j] += w;
        }
        let search = if importance.is_some() { Offsets::weighted(plain.top) } else { plain };
        (scales[j], minimums[j]) = with_minimum(search, x, &weights, &mut codes[32 * j..][..32]);
    }
    let (mut s, mut m) = ([0_u8; 8], [0_u8; 8]);
    let (d, dmin) = match importance {
        Some(_) => (positive(63, &scales, &sums, &mut s), positive(63, &minimums, &sums, &mut m)),
        None => (by_largest(63, &scales, &mut s), by_largest(63, &minimums, &mut m)),
    };
    scales_6bit::put(&mut block[4..16], &s, &m);
    let (d, dmin) = (f16_bits::put(block, 0, d), f16_bits::put(block, 2, dmin));
    for (j, (x, codes)) in x.chunks_exact(32).zip(codes.chunks_exact_mut(32)).enumerate() {
        round_again(d * f32::from(s[j]), dmin * f32::from(m[j]), plain.top, x, codes);
    }
}

/// Recomputes the codes with the stored scale. If the stored scale is 0, the codes that the search found are kept.
pub(super) fn round_again(scale: f32, minimum: f32, top: i32, x: &[f32], codes: &mut [u8]) {
    if scale == 0.0 {
        return;
    }
    for (code, x) in codes.iter_mut().zip(x) {
        *code = nearest((x + minimum) / scale).clamp(0, top) as u8;
    }
}

/// Returns the common scale of nonnegative values and writes their codes; the largest value gets the code `top`.
pub(super) fn by_largest(top: u8, values: &[f32], codes: &mut [u8]) -> f32 {
    let mut max = 0.0_f32;
    for &v in values {
        if v > max {
            max = v;
        }
    }
    let inverse = if max > 0.0 { f32::from(top) / max } else { 0.0 };
    for (code, v) in codes.iter_mut().zip(values) {
        *code = nearest(inverse * v).min(i32::from(top)) as u8;
    }
    max / f32::from(top)
}

fn decode(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(144).zip(out.chunks_exact_mut(SUPER)) {
        let (d, dmin) = (f16_bits::get(block, 0), f16_bits::get(block, 2));
        for (j, out) in out.chunks_exact_mut(32).enumerate() {
            let (s, m) = scales_6bit::get(&block[4..16], j);
            let (scale, minimum) = (d * f32::from(s), dmin * f32::from(m));
            let codes = &block[16 + 32 * (j / 2)..][..32];
            for (o, byte) in out.iter_mut().zip(codes) {
                *o = scale * f32::from(byte >> (4 * (j % 2)) & 15) - minimum;
            }
        }
    }
}
