//! 256 4-bit codes: eight sub-blocks of 32, each with a 6-bit scale and a 6-bit minimum.
//!
//! A block holds `d`, `dmin`, 12 bytes of scales and minimums, and 128 bytes of codes. Every 64 elements take 32 bytes
//! of codes: the first 32 elements are in the low nibbles, the others in the high nibbles.

use super::grid::{Fields, Grid, Scales, Steps};
use super::minimum_blocks::{MinimumBlock, MinimumBlocks};
use super::search::Offsets;
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

const REFERENCE: MinimumBlocks = MinimumBlocks {
    plain: Offsets { top: 15, first: -1.0, step: 0.1, steps: 20, absolute: false },
    rms: true,
    sigma2: 2.0,
    top: 63,
};

fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    REFERENCE.encode::<32, 8>(row, importance, (out, 144), |found, block| {
        put_found(found, block);
        put_codes(found.codes, block);
    });
}

/// Writes the first 16 bytes of a block, which must be zero before the call.
pub(super) fn put_found(found: &MinimumBlock<'_, 8>, block: &mut [u8]) {
    block[..2].copy_from_slice(&found.d.to_le_bytes());
    block[2..4].copy_from_slice(&found.dmin.to_le_bytes());
    scales_6bit::put(&mut block[4..16], &found.scales, &found.minimums);
}

fn put_codes(codes: &[u8], block: &mut [u8]) {
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

/// Writes the first 16 bytes of a block, which must be zero before the call.
pub(super) fn put_scales(fields: &Fields, block: &mut [u8]) {
    f16_bits::put(block, 0, fields.d);
    f16_bits::put(block, 2, fields.dmin);
    let (mut s, mut m) = ([0; 8], [0; 8]);
    s.iter_mut().zip(fields.factors).for_each(|(s, f)| *s = f as u8);
    m.iter_mut().zip(fields.minimums).for_each(|(m, f)| *m = f as u8);
    scales_6bit::put(&mut block[4..16], &s, &m);
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
