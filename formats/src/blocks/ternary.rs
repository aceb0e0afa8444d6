//! 256 codes of −1, 0 and 1, and a scale, for models trained with ternary weights.
//!
//! TQ1_0: a byte holds five codes as the digits of a base-3 number `n`, first code first, and is stored as `⌈256·n /
//! 243⌉`. The first 160 codes are in 32 bytes, with code `i` in byte `i mod 32`. In the same way, the next 80 codes are
//! in 16 bytes, and the last 16 codes in 4 bytes, whose last digit is 0; then `d`. TQ2_0: a byte holds four 2-bit
//! codes. Every 128 codes are in 32 bytes, with code `i` in byte `i mod 32`; then `d`.

use super::grid::{Fields, Grid, Scales, Steps};
use super::{BlockType, Q4_0, SUPER, f16_bits};

/// 1.625 bits per code, `d·(q − 1)`.
pub static TQ1_0: BlockType = BlockType {
    name: "TQ1_0",
    id: 34,
    bytes: 54,
    grid: Some(&GRID_1),
    encode: encode_1,
    decode: decode_1,
    ..COMMON
};

/// 2 bits, `d·(q − 1)`.
pub static TQ2_0: BlockType = BlockType {
    name: "TQ2_0",
    id: 35,
    bytes: 66,
    grid: Some(&GRID_2),
    encode: encode_2,
    decode: decode_2,
    ..COMMON
};

const COMMON: BlockType = BlockType {
    name: "",
    id: 0,
    elements: SUPER,
    bytes: 0,
    needs_importance: false,
    uses_importance: true,
    fallback: Some(&Q4_0),
    grid: None,
    encode: |_, _, _| {},
    decode: |_, _| {},
};

const GRID_1: Grid = grid(pack_1);
const GRID_2: Grid = grid(pack_2);

const fn grid(pack: fn(&Fields, &mut [u8])) -> Grid {
    Grid { steps: Steps::Ternary, scales: Scales::Multiples, part: SUPER, factors: [1, 1], pack }
}

/// The byte of a TQ1_0 block that holds a code, and the index of its digit.
fn place(e: usize) -> (usize, usize) {
    match e {
        0..160 => (e % 32, e / 32),
        160..240 => (32 + e % 16, (e - 160) / 16),
        _ => (48 + e % 4, (e - 240) / 4),
    }
}

fn put_1(codes: &[u8], d: f32, block: &mut [u8]) {
    let mut numbers = [0_u16; 52];
    const PLACES: [u16; 5] = [81, 27, 9, 3, 1];
    for (e, code) in codes.iter().enumerate() {
        let (byte, digit) = place(e);
        numbers[byte] += u16::from(*code) * PLACES[digit];
    }
    for (byte, number) in block.iter_mut().zip(numbers) {
        *byte = (number * 256).div_ceil(243) as u8;
    }
    f16_bits::put(block, 52, d);
}

fn put_2(codes: &[u8], d: f32, block: &mut [u8]) {
    block.fill(0);
    for (e, code) in codes.iter().enumerate() {
        block[32 * (e / 128) + e % 32] |= code << (2 * (e % 128 / 32));
    }
    f16_bits::put(block, 64, d);
}

fn pack_1(fields: &Fields, block: &mut [u8]) {
    put_1(&fields.codes[..SUPER], fields.d, block);
}

fn pack_2(fields: &Fields, block: &mut [u8]) {
    put_2(&fields.codes[..SUPER], fields.d, block);
}

/// Returns the codes of 256 values and their scale, the largest magnitude.
fn codes(x: &[f32]) -> ([u8; SUPER], f32) {
    let d = x.iter().fold(0.0_f32, |max, v| max.max(v.abs()));
    let inverse = if d != 0.0 { 1.0 / d } else { 0.0 };
    let mut codes = [1; SUPER];
    for (code, x) in codes.iter_mut().zip(x) {
        // Rounds half away from zero. Other products, infinite or NaN after an overflow of `inverse`, become the value
        // 0.
        *code = match (x * inverse).round() {
            1.0 => 2,
            -1.0 => 0,
            _ => 1,
        };
    }
    (codes, d)
}

fn encode_1(row: &[f32], _importance: Option<&[f32]>, out: &mut [u8]) {
    for (x, block) in row.chunks_exact(SUPER).zip(out.chunks_exact_mut(54)) {
        let (codes, d) = codes(x);
        put_1(&codes, d, block);
    }
}

fn encode_2(row: &[f32], _importance: Option<&[f32]>, out: &mut [u8]) {
    for (x, block) in row.chunks_exact(SUPER).zip(out.chunks_exact_mut(66)) {
        let (codes, d) = codes(x);
        put_2(&codes, d, block);
    }
}

fn decode_1(bytes: &[u8], out: &mut [f32]) {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    for (block, out) in bytes.chunks_exact(54).zip(out.chunks_exact_mut(SUPER)) {
        let d = f16_bits::get(block, 52);
        for (e, o) in out.iter_mut().enumerate() {
            let (byte, digit) = place(e);
            // The wrapping multiplication removes the digits before this one. Three times the result, divided by 256,
            // then has this digit as its integer part.
            let rest = block[byte].wrapping_mul(POWERS[digit]);
            *o = (((i32::from(rest) * 3) >> 8) - 1) as f32 * d;
        }
    }
}

fn decode_2(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(66).zip(out.chunks_exact_mut(SUPER)) {
        let d = f16_bits::get(block, 64);
        for (e, o) in out.iter_mut().enumerate() {
            let code = block[32 * (e / 128) + e % 32] >> (2 * (e % 128 / 32)) & 3;
            *o = (i32::from(code) - 1) as f32 * d;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_are_ternary_come_back_as_they_were() {
        let mut state = 9_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % 3
        };
        let row: Vec<f32> = (0..512).map(|_| (next() as f32 - 1.0) * 0.375).collect();
        for kind in [&TQ1_0, &TQ2_0] {
            for search in [super::super::BlockSearch::Reference, super::super::BlockSearch::Refined] {
                let mut bytes = vec![0xa5; kind.row_bytes(512).unwrap()];
                kind.encode_by(search, &row, None, &mut bytes);
                let mut back = vec![f32::NAN; 512];
                kind.decode(&bytes, &mut back);
                assert_eq!(back, row, "{kind:?}, {search:?}");
            }
        }
    }

    /// Blocks computed by hand, with a first element of `d` and all others `−d`.
    #[test]
    fn bytes_of_a_block() {
        let mut row = [-2.0; 256];
        row[0] = 2.0;
        let mut bytes = [0; 54];
        TQ1_0.encode(&row, None, &mut bytes);
        // 162 in decimal is 20000 in base 3, and 162·256 / 243 is 170.67.
        assert_eq!(bytes[0], 171);
        assert!(bytes[1..52].iter().all(|b| *b == 0));
        assert_eq!(bytes[52..], half::f16::from_f32(2.0).to_le_bytes());
        let mut bytes = [0; 66];
        TQ2_0.encode(&row, None, &mut bytes);
        assert_eq!(bytes[0], 2);
        assert!(bytes[1..64].iter().all(|b| *b == 0));
    }
}
