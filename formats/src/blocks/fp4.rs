//! 4-bit floats, E2M1: a sign, and a magnitude of 0, 0.5, 1, 1.5, 2, 3, 4 or 6.
//!
//! MXFP4: a shared E8M0 exponent for 32 elements, then 16 bytes: byte `j` holds element `j` in its low nibble and
//! `j + 16` in its high nibble. NVFP4: for 64 elements, one unsigned E4M3 scale per 16 elements, then 8 bytes for each
//! 16 elements: byte `j` holds element `j` in its low nibble and `j + 8` in its high nibble. As in ggml, decoded levels
//! are twice the E2M1 values, and decoded scales are half of the stored ones.

use super::grid::{Fields, Grid, Scales, Steps};
use super::{BlockType, F16};

/// 4 bits on the levels of E2M1, with a power-of-two scale.
pub static MXFP4: BlockType = BlockType {
    name: "MXFP4",
    id: 39,
    elements: 32,
    bytes: 17,
    needs_importance: false,
    uses_importance: true,
    fallback: Some(&F16),
    grid: Some(&Grid {
        steps: Steps::Fp4,
        scales: Scales::Own(half_of_e8m0),
        part: 32,
        // Code 255 is NaN.
        factors: [0, 254],
        pack: pack_mx,
    }),
    encode: encode_mx,
    decode: decode_mx,
};

/// 4 bits on the levels of E2M1, with an 8-bit scale.
pub static NVFP4: BlockType = BlockType {
    name: "NVFP4",
    id: 40,
    elements: 64,
    bytes: 36,
    needs_importance: false,
    uses_importance: true,
    fallback: Some(&MXFP4),
    grid: Some(&Grid {
        steps: Steps::Fp4,
        scales: Scales::Own(half_of_e4m3),
        part: 16,
        factors: [0, 126],
        pack: pack_nv,
    }),
    encode: encode_nv,
    decode: decode_nv,
};

/// Twice the values of E2M1, without a negative zero.
const LEVELS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `2^(code − 128)`.
fn half_of_e8m0(code: u8) -> f32 {
    f32::from_bits(match code {
        0 | 1 => 0x0020_0000 << code,
        _ => u32::from(code - 1) << 23,
    })
}

/// Half of the code's E4M3 value, without its sign. As in ggml, `0x7f` becomes 0.
fn half_of_e4m3(code: u8) -> f32 {
    if code == 0x7f {
        return 0.0;
    }
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let power = |exponent: i32| f32::from_bits(((exponent + 127) as u32) << 23);
    match exponent {
        0 => mantissa * power(-10),
        _ => (1.0 + mantissa / 8.0) * power(exponent - 8),
    }
}

/// The code of a scale, rounded to nearest, ties up. As in the reference, scales that round to 256 or more get the code
/// of 448.
fn e4m3(x: f32) -> u8 {
    if x.is_nan() || x <= 0.0 {
        return 0;
    }
    let bits = x.min(448.0).to_bits();
    let exponent = (bits >> 23) as i32 - 127 + 7;
    if exponent <= 0 {
        // Subnormal codes are at most 7.
        return ((x * 512.0 + 0.5) as u8).min(7);
    }
    // If rounding up overflows the mantissa, the carry correctly increments the exponent.
    match ((exponent as u32) << 3 | bits >> 20 & 7) + (bits >> 19 & 1) {
        code @ 0..0x78 => code as u8,
        _ => 0x7e,
    }
}

/// The code of the level nearest to `x`; the first one on ties.
fn nearest(x: f32, scale: f32) -> u8 {
    let (mut best, mut least) = (0, x.abs());
    for (code, level) in LEVELS.iter().enumerate() {
        let off = (f32::from(*level) * scale - x).abs();
        if off < least {
            (best, least) = (code as u8, off);
        }
    }
    best
}

fn largest(x: &[f32]) -> f32 {
    x.iter().fold(0.0_f32, |max, v| if max < v.abs() { v.abs() } else { max })
}

/// Writes codes; the low nibbles hold the first half.
fn put_codes(bytes: &mut [u8], code: impl Fn(usize) -> u8) {
    let half = bytes.len();
    for (j, byte) in bytes.iter_mut().enumerate() {
        *byte = code(j) | code(j + half) << 4;
    }
}

fn get_codes(bytes: &[u8], scale: f32, out: &mut [f32]) {
    let half = bytes.len();
    for (i, o) in out.iter_mut().enumerate() {
        let code = bytes[i % half] >> (4 * (i / half)) & 15;
        *o = f32::from(LEVELS[usize::from(code)]) * scale;
    }
}

fn pack_mx(fields: &Fields, block: &mut [u8]) {
    block[0] = fields.factors[0] as u8;
    put_codes(&mut block[1..], |e| fields.codes[e]);
}

/// The E8M0 code of the scale that brings the largest magnitude `max` into 4 to 8.
fn exponent(max: f32) -> u8 {
    // As in the reference, the logarithm is rounded to single precision.
    let below = f64::from(max).log2() as f32;
    match max > 0.0 {
        // In the reference, a negative exponent wraps around, and all codes become 0.
        true if below.is_finite() => match (below.floor() as i32 - 2 + 127) as u8 {
            255 => 0,
            exponent => exponent,
        },
        _ => 0,
    }
}

fn encode_mx(row: &[f32], _importance: Option<&[f32]>, out: &mut [u8]) {
    for (x, block) in row.chunks_exact(32).zip(out.chunks_exact_mut(17)) {
        let code = exponent(largest(x));
        let scale = half_of_e8m0(code);
        block[0] = code;
        put_codes(&mut block[1..], |e| nearest(x[e], scale));
    }
}

fn decode_mx(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(17).zip(out.chunks_exact_mut(32)) {
        get_codes(&block[1..], half_of_e8m0(block[0]), out);
    }
}

fn pack_nv(fields: &Fields, block: &mut [u8]) {
    let (scales, codes) = block.split_at_mut(4);
    for (s, (scale, codes)) in scales.iter_mut().zip(codes.chunks_exact_mut(8)).enumerate() {
        *scale = fields.factors[s] as u8;
        put_codes(codes, |e| fields.codes[16 * s + e]);
    }
}

fn encode_nv(row: &[f32], _importance: Option<&[f32]>, out: &mut [u8]) {
    for (x, block) in row.chunks_exact(64).zip(out.chunks_exact_mut(36)) {
        let (scales, codes) = block.split_at_mut(4);
        for ((x, scale), codes) in x.chunks_exact(16).zip(scales).zip(codes.chunks_exact_mut(8)) {
            *scale = e4m3(largest(x) / 6.0);
            let of_levels = half_of_e4m3(*scale);
            put_codes(codes, |e| nearest(x[e], of_levels));
        }
    }
}

fn decode_nv(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(36).zip(out.chunks_exact_mut(64)) {
        let (scales, codes) = block.split_at(4);
        for ((scale, codes), out) in scales.iter().zip(codes.chunks_exact(8)).zip(out.chunks_exact_mut(16)) {
            get_codes(codes, half_of_e4m3(*scale), out);
        }
    }
}

/// Builds a block of MXFP4 from an exponent and 16 bytes of codes as in checkpoints, two neighboring columns per byte.
pub fn repack_mxfp4(exponent: u8, codes: &[u8], block: &mut [u8]) {
    block[0] = exponent;
    put_codes(&mut block[1..], |e| codes[e / 2] >> (4 * (e % 2)) & 15);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_halves_of_what_they_stand_for() {
        for code in 0..=254_u8 {
            assert_eq!(f64::from(half_of_e8m0(code)), 2.0_f64.powi(i32::from(code) - 128));
        }
        for code in 0..=0x7e_u8 {
            let (exponent, mantissa) = (i32::from(code >> 3), f64::from(code & 7));
            let value = match exponent {
                0 => mantissa * 2.0_f64.powi(-9),
                _ => (1.0 + mantissa / 8.0) * 2.0_f64.powi(exponent - 7),
            };
            assert_eq!(f64::from(half_of_e4m3(code)), value / 2.0);
            // Every number below 256 has its own code.
            assert_eq!(e4m3(value as f32), if code < 0x78 { code } else { 0x7e });
        }
        assert_eq!((half_of_e4m3(0x7f), e4m3(1e9), e4m3(-1.0), e4m3(f32::NAN)), (0.0, 0x7e, 0, 0));
    }

    #[test]
    fn blocks_on_the_grid_come_back_as_they_were() {
        for kind in [&MXFP4, &NVFP4] {
            let values: Vec<f32> = (0..64).map(|i| f32::from(LEVELS[i * 7 % 16]) * 0.125).collect();
            for search in [super::super::BlockSearch::Reference, super::super::BlockSearch::Refined] {
                let mut bytes = vec![0; kind.row_bytes(64).unwrap()];
                kind.encode_by(search, &values, None, &mut bytes);
                let mut back = [f32::NAN; 64];
                kind.decode(&bytes, &mut back);
                assert_eq!(back[..], values, "{kind:?}, {search:?}");
            }
        }
    }

    #[test]
    fn codes_of_checkpoints_change_their_places_alone() {
        let codes: Vec<u8> = (0..16).map(|i: u8| i.wrapping_mul(37)).collect();
        let mut block = [0; 17];
        repack_mxfp4(120, &codes, &mut block);
        assert_eq!(block[0], 120);
        for e in 0..32 {
            let stored = block[1 + e % 16] >> (4 * (e / 16)) & 15;
            assert_eq!(stored, codes[e / 2] >> (4 * (e % 2)) & 15, "element {e}");
        }
    }
}
