//! 256 5-bit codes: stored like Q4_K, with the highest bits of the codes in 32 bytes before the low bits. Bit `j` of
//! byte `l` belongs to element `l` of sub-block `j`.

use super::grid::{Fields, Grid, Scales, Steps};
use super::minimum_blocks::MinimumBlocks;
use super::q4_k::{put_found, put_scales};
use super::search::Offsets;
use super::{BlockType, SUPER, f16_bits, scales_6bit};

/// 5 bits, `d·sc·q − dmin·m`.
pub static Q5_K: BlockType = BlockType {
    name: "Q5_K",
    id: 13,
    elements: SUPER,
    bytes: 176,
    needs_importance: false,
    uses_importance: true,
    fallback: Some(&super::Q5_1),
    grid: Some(&Grid {
        steps: Steps::Minimum { top: 31 },
        scales: Scales::Multiples,
        part: 32,
        factors: [0, 63],
        pack,
    }),
    encode,
    decode,
};

const REFERENCE: MinimumBlocks = MinimumBlocks {
    plain: Offsets { top: 31, first: -0.5, step: 0.1, steps: 15, absolute: false },
    rms: true,
    sigma2: 2.0,
    top: 63,
};

fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    REFERENCE.encode::<32, 8>(row, importance, (out, 176), |found, block| {
        put_found(found, block);
        put_codes(found.codes, block);
    });
}

/// Writes all codes into bytes that must be zero before the call.
fn put_codes(codes: &[u8], block: &mut [u8]) {
    let (high, low) = block[16..].split_at_mut(32);
    for (e, code) in codes.iter().enumerate() {
        let (j, l) = (e / 32, e % 32);
        high[l] |= (code >> 4) << j;
        low[32 * (j / 2) + l] |= (code & 15) << (4 * (j % 2));
    }
}

fn pack(fields: &Fields, block: &mut [u8]) {
    block.fill(0);
    put_scales(fields, block);
    put_codes(&fields.codes, block);
}

fn decode(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(176).zip(out.chunks_exact_mut(SUPER)) {
        let (d, dmin) = (f16_bits::get(block, 0), f16_bits::get(block, 2));
        let (high, low) = block[16..].split_at(32);
        for (j, out) in out.chunks_exact_mut(32).enumerate() {
            let (s, m) = scales_6bit::get(&block[4..16], j);
            let (scale, minimum) = (d * f32::from(s), dmin * f32::from(m));
            for (l, o) in out.iter_mut().enumerate() {
                let code = low[32 * (j / 2) + l] >> (4 * (j % 2)) & 15 | (high[l] >> j & 1) << 4;
                *o = scale * f32::from(code) - minimum;
            }
        }
    }
}
