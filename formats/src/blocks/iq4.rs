//! 4-bit codes for sixteen levels that are denser near zero.
//!
//! IQ4_NL: 32 codes and a scale. IQ4_XS: 256 codes, a scale, and a 6-bit factor per 32 elements: `d`, the high two bits
//! of the eight factors in one 16-bit word, their low four bits in four bytes, then the codes.

use super::grid::{Fields, Grid, Scales, Steps};
use super::search::{NEGLIGIBLE, largest, nearest, weigh};
use super::{BlockType, SUPER, f16_bits};

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
/// Candidates on each side of the scale that maps the value of largest magnitude to the first level.
const TRIES: i32 = 7;

/// The code of the nearest level; the upper one on ties.
fn code(x: f32) -> u8 {
    let level = |i: usize| f32::from(LEVELS[i]);
    if x <= level(0) {
        return 0;
    }
    if x >= level(15) {
        return 15;
    }
    let above = (1..16).find(|&i| x < level(i)).unwrap_or(15);
    (if x - level(above - 1) < level(above) - x { above - 1 } else { above }) as u8
}

/// Finds the scale of 32 elements.
fn scale(x: &[f32], importance: Option<&[f32]>, sigma2: f32) -> f32 {
    let max = largest(x);
    if max.abs() < NEGLIGIBLE {
        return 0.0;
    }
    let mut weights = [0.0; 32];
    match importance {
        Some(importance) => weigh(importance, sigma2, x, &mut weights),
        None => weights.iter_mut().zip(x).for_each(|(w, x)| *w = x * x),
    }
    let fit = |inverse: f32| {
        let (mut qx, mut qq) = (0.0, 0.0);
        for (&x, &w) in x.iter().zip(&weights) {
            let q = f32::from(LEVELS[usize::from(code(inverse * x))]);
            qx += w * q * x;
            qq += w * q * q;
        }
        (qx, qq)
    };
    let first = f32::from(LEVELS[0]);
    let (qx, qq) = fit(1.0 / (-max / first));
    let mut scale = qx / qq;
    let mut best = scale * qx;
    for step in -TRIES..=TRIES {
        let (qx, qq) = fit((step as f32 + first) / max);
        if qq > 0.0 && qx * qx > best * qq {
            scale = qx / qq;
            best = scale * qx;
        }
    }
    scale
}

/// Rounds 32 elements and writes their codes.
fn put_codes(bytes: &mut [u8], x: &[f32], scale: f32) {
    let inverse = if scale != 0.0 { 1.0 / scale } else { 0.0 };
    for (j, byte) in bytes.iter_mut().enumerate() {
        *byte = code(inverse * x[j]) | code(inverse * x[j + 16]) << 4;
    }
}

/// Writes 32 codes: byte `j` holds code `j` in its low nibble and code `j + 16` in its high nibble.
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
    for (i, (x, block)) in row.chunks_exact(32).zip(out.chunks_exact_mut(18)).enumerate() {
        // If all importances of a block are 0, the reference stores NaN as the scale. Such importances are ignored
        // here.
        let weights = importance.map(|im| &im[32 * i..][..32]).filter(|im| im.iter().any(|w| *w > 0.0));
        let scale = scale(x, weights, sigma2(x));
        let scale = if scale.is_finite() { scale } else { self::scale(x, None, sigma2(x)) };
        f16_bits::put(block, 0, scale);
        put_codes(&mut block[2..], x, scale);
    }
}

/// Twice the mean square, computed as the sum of squares times `2 / n`, which rounds as in the reference.
fn sigma2(x: &[f32]) -> f32 {
    let mut sum = 0.0;
    for &x in x {
        sum += x * x;
    }
    sum * (2.0 / x.len() as f32)
}

fn decode_nl(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(18).zip(out.chunks_exact_mut(32)) {
        get_codes(&block[2..], f16_bits::get(block, 0), out);
    }
}

fn encode_xs(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    for (i, (x, block)) in row.chunks_exact(SUPER).zip(out.chunks_exact_mut(136)).enumerate() {
        block.fill(0);
        let sigma2 = sigma2(x);
        let mut scales = [0.0; 8];
        for (j, (found, x)) in scales.iter_mut().zip(x.chunks_exact(32)).enumerate() {
            *found = scale(x, importance.map(|im| &im[SUPER * i + 32 * j..][..32]), sigma2);
        }
        let d = -largest(&scales) / 32.0;
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
