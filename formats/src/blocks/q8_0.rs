//! 32 8-bit codes and a scale: `d`, then the codes.

use super::grid::{Fields, Grid, Scales, Steps};
use super::search::truncate;
use super::{BlockType, f16_bits};

/// 8 bits, `d·q`.
pub static Q8_0: BlockType = BlockType {
    name: "Q8_0",
    id: 8,
    elements: 32,
    bytes: 34,
    needs_importance: false,
    uses_importance: false,
    fallback: Some(&super::F16),
    grid: Some(&GRID),
    encode,
    decode,
};

const GRID: Grid =
    Grid { steps: Steps::Even { half: 128 }, scales: Scales::Multiples, part: 32, factors: [1, 1], pack };

fn pack(fields: &Fields, block: &mut [u8]) {
    f16_bits::put(block, 0, fields.d);
    for (q, code) in block[2..].iter_mut().zip(fields.codes) {
        // From unsigned with offset 128 to two's complement.
        *q = code ^ 0x80;
    }
}

fn encode(row: &[f32], _importance: Option<&[f32]>, out: &mut [u8]) {
    for (x, block) in row.chunks_exact(32).zip(out.chunks_exact_mut(34)) {
        let d = x.iter().fold(0.0_f32, |max, v| max.max(v.abs())) / 127.0;
        let inverse = if d != 0.0 { 1.0 / d } else { 0.0 };
        f16_bits::put(block, 0, d);
        for (q, v) in block[2..].iter_mut().zip(x) {
            *q = truncate((v * inverse).round()) as u8;
        }
    }
}

fn decode(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(34).zip(out.chunks_exact_mut(32)) {
        let d = f16_bits::get(block, 0);
        for (o, q) in out.iter_mut().zip(&block[2..]) {
            *o = f32::from(*q as i8) * d;
        }
    }
}
