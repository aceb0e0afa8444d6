//! 256 2-bit codes: sixteen sub-blocks of 16, each with a 4-bit scale and a 4-bit minimum.
//!
//! A block holds 16 bytes, each with a scale in its low nibble and a minimum in its high nibble; then 64 bytes of
//! codes, `d` and `dmin`. Every 128 elements take 32 bytes of codes: byte `j` holds elements `j`, `j + 32`, `j + 64`
//! and `j + 96`.

use super::grid::{Fields, Grid, Scales, Steps};
use super::minimum_blocks::MinimumBlocks;
use super::search::Offsets;
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

const REFERENCE: MinimumBlocks = MinimumBlocks {
    plain: Offsets { top: 3, first: -0.5, step: 0.1, steps: 15, absolute: true },
    rms: false,
    sigma2: 1.0,
    top: 15,
};

/// Byte and shift of the two low bits of element `e`, in Q2_K and Q3_K.
pub(super) fn place(e: usize) -> (usize, usize) {
    (32 * (e / 128) + e % 32, 2 * (e % 128 / 32))
}

fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    REFERENCE.encode::<16, 16>(row, importance, (out, 84), |found, block| {
        block[80..82].copy_from_slice(&found.d.to_le_bytes());
        block[82..84].copy_from_slice(&found.dmin.to_le_bytes());
        for (byte, (s, m)) in block.iter_mut().zip(found.scales.iter().zip(&found.minimums)) {
            *byte = s | m << 4;
        }
        put_codes(found.codes, block);
    });
}

/// Writes all codes into bytes that must be zero before the call.
fn put_codes(codes: &[u8], block: &mut [u8]) {
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
