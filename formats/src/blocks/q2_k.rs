//! 256 2-bit codes: sixteen sub-blocks of 16, each with a 4-bit scale and a 4-bit minimum.
//!
//! A block holds 16 bytes, each with a scale in its low nibble and a minimum in its high nibble; then 64 bytes of
//! codes, `d` and `dmin`. Every 128 elements take 32 bytes of codes: byte `j` holds elements `j`, `j + 32`, `j + 64`
//! and `j + 96`.

use super::grid::{Fields, Grid, Scales, Steps};
use super::q4_k::{by_largest, round_again};
use super::search::{Offsets, mean_square, positive, weigh, with_minimum};
use super::{BlockType, SUPER, f16_bits};

/// 2 bits, `d·sc·q − dmin·m`.
pub static Q2_K: BlockType = BlockType {
    name: "Q2_K",
    id: 10,
    elements: SUPER,
    bytes: 84,
    needs_importance: false,
    uses_importance: true,
    fallback: Some(&super::Q4_0),
    grid: Some(&Grid {
        steps: Steps::Minimum { top: 3 },
        scales: Scales::Multiples,
        part: 16,
        factors: [0, 15],
        pack,
    }),
    encode,
    decode,
};

const PLAIN: Offsets = Offsets { top: 3, first: -0.5, step: 0.1, steps: 15, absolute: true };

/// Byte and shift of the two low bits of element `e`, in Q2_K and Q3_K.
pub(super) fn place(e: usize) -> (usize, usize) {
    (32 * (e / 128) + e % 32, 2 * (e % 128 / 32))
}

fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    for (i, (x, block)) in row.chunks_exact(SUPER).zip(out.chunks_exact_mut(84)).enumerate() {
        let importance = importance.map(|importance| &importance[SUPER * i..][..SUPER]);
        block.fill(0);
        let mut codes = [0_u8; SUPER];
        let (mut scales, mut minimums, mut sums) = ([0.0_f32; 16], [0.0_f32; 16], [0.0_f32; 16]);
        let sigma2 = mean_square(x);
        let mut weights = [0.0; 16];
        for j in 0..16 {
            let part = 16 * j..16 * (j + 1);
            let x = &x[part.clone()];
            let search = match importance {
                Some(importance) => {
                    weigh(&importance[part.clone()], sigma2, x, &mut weights);
                    Offsets::weighted(PLAIN.top)
                }
                None => {
                    weights.iter_mut().zip(x).for_each(|(w, x)| *w = x.abs());
                    PLAIN
                }
            };
            for w in weights {
                sums[j] += w;
            }
            (scales[j], minimums[j]) = with_minimum(search, x, &weights, &mut codes[part]);
        }
        let (mut s, mut m) = ([0_u8; 16], [0_u8; 16]);
        let (d, dmin) = match importance {
            Some(_) => (positive(15, &scales, &sums, &mut s), positive(15, &minimums, &sums, &mut m)),
            None => (by_largest(15, &scales, &mut s), by_largest(15, &minimums, &mut m)),
        };
        let (d, dmin) = (f16_bits::put(block, 80, d), f16_bits::put(block, 82, dmin));
        for j in 0..16 {
            block[j] = s[j] | m[j] << 4;
            let part = 16 * j..16 * (j + 1);
            let (scale, minimum) = (d * f32::from(s[j]), dmin * f32::from(m[j]));
            round_again(scale, minimum, PLAIN.top, &x[part.clone()], &mut codes[part]);
        }
        put_codes(&codes, block);
    }
}

/// Writes all codes into bytes that are zero.
fn put_codes(codes: &[u8; SUPER], block: &mut [u8]) {
    for (e, code) in codes.iter().enumerate() {
        let (byte, shift) = place(e);
        block[16 + byte] |= code << shift;
    }
}

fn pack(fields: &Fields, block: &mut [u8]) {
    block.fill(0);
    f16_bits::put(block, 80, fields.d);
    f16_bits::put(block, 82, fields.dmin);
    for (j, byte) in block[..16].iter_mut().enumerate() {
        *byte = (fields.factors[j] | fields.minimums[j] << 4) as u8;
    }
    put_codes(&fields.codes, block);
}

fn decode(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(84).zip(out.chunks_exact_mut(SUPER)) {
        let (d, dmin) = (f16_bits::get(block, 80), f16_bits::get(block, 82));
        for (e, o) in out.iter_mut().enumerate() {
            let (byte, shift) = place(e);
            let sub = block[e / 16];
            let (scale, minimum) = (d * f32::from(sub & 15), dmin * f32::from(sub >> 4));
            *o = scale * f32::from(block[16 + byte] >> shift & 3) - minimum;
        }
    }
}
