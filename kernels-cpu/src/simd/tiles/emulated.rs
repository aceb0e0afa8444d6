//! A bit-exact emulation of the tile unit in portable code: the reference for the hardware, and the unit for tests
//! without it.

use half::bf16;

use super::{ROW, Shape, TileUnit};
use crate::FloatFormat;
use crate::activation::split::PAIRS;
use crate::float_format::e4m3_packed;
use crate::simd::scalar::Scalar;
use crate::simd::{E2M1_OFFSET, Lanes, codes};

pub(crate) struct Emulated {
    shape: Shape,
    tiles: [[[u8; ROW]; 16]; 8],
}

impl Emulated {
    /// The rows of a tile, and the bytes of each.
    fn size(&self, tile: usize) -> [usize; 2] {
        match tile {
            t if super::RIGHT.contains(&t) => [self.shape.depth, ROW],
            t if super::LEFT.contains(&t) => [self.shape.rows, 4 * self.shape.depth],
            t => {
                debug_assert!(super::SUMS.contains(&t));
                [self.shape.rows, ROW]
            }
        }
    }

    /// The 32 bits of a tile at `[row, column]`.
    fn word(&self, tile: usize, row: usize, column: usize) -> [u8; 4] {
        let bytes = &self.tiles[tile][row][4 * column..][..4];
        [bytes[0], bytes[1], bytes[2], bytes[3]]
    }

    /// Replaces each sum by the result of `of`, which receives the sum, and the words of its row of the left operand
    /// paired with those of its column of the right operand.
    fn each(&mut self, [sum, left, right]: [usize; 3], of: impl Fn([u8; 4], &[[[u8; 4]; 2]]) -> [u8; 4]) {
        for row in 0..self.shape.rows {
            for column in 0..16 {
                let mut terms = [[[0; 4]; 2]; 16];
                for (k, term) in terms.iter_mut().enumerate().take(self.shape.depth) {
                    *term = [self.word(left, row, k), self.word(right, k, column)];
                }
                let new = of(self.word(sum, row, column), &terms[..self.shape.depth]);
                self.tiles[sum][row][4 * column..][..4].copy_from_slice(&new);
            }
        }
    }
}

/// `sum + Σ left · right` over four bytes of each pair.
fn integers(sum: [u8; 4], terms: &[[[u8; 4]; 2]], right: fn(u8) -> i32) -> [u8; 4] {
    let products = terms.iter().flat_map(|[l, r]| (0..4).map(move |i| i32::from(l[i] as i8) * right(r[i])));
    products.fold(i32::from_le_bytes(sum), i32::wrapping_add).to_le_bytes()
}

fn flush(value: f32) -> f32 {
    if value.is_subnormal() { 0.0_f32.copysign(value) } else { value }
}

fn widen(bytes: [u8; 2]) -> f32 {
    flush(bf16::from_le_bytes(bytes).to_f32())
}

/// `left · right + sum`, rounded once. The product of two bf16 is exact in `f32` unless it is very large or small, so an
/// addition gives the same result faster: without the instruction, `mul_add` is a call.
fn add_product(left: f32, right: f32, sum: f32) -> f32 {
    let product = left * right;
    let is_exact = (f32::MIN_POSITIVE..=f32::MAX).contains(&product.abs()) || left == 0.0 || right == 0.0;
    if is_exact { product + sum } else { left.mul_add(right, sum) }
}

/// `sum + (Σ even + Σ odd)`, as the instruction rounds it.
fn floats(sum: [u8; 4], terms: &[[[u8; 4]; 2]]) -> [u8; 4] {
    let mut parts = [0.0_f32; 2];
    for [l, r] in terms {
        for (i, part) in parts.iter_mut().enumerate() {
            let (l, r) = (widen([l[2 * i], l[2 * i + 1]]), widen([r[2 * i], r[2 * i + 1]]));
            *part = flush(add_product(l, r, *part));
        }
    }
    let both = flush(parts[0] + parts[1]);
    flush(flush(f32::from_le_bytes(sum)) + both).to_le_bytes()
}

#[allow(unsafe_code, reason = "reads and writes through pointers that the caller guarantees to be valid")]
impl TileUnit for Emulated {
    type Lanes = Scalar;
    /// The centre that is subtracted from integer codes.
    type Table = i32;

    unsafe fn configure(shape: Shape) -> Self {
        assert!((1..=16).contains(&shape.rows) && (1..=16).contains(&shape.depth));
        Self { shape, tiles: [[[0; ROW]; 16]; 8] }
    }
    unsafe fn zero<const T: usize>(&mut self) {
        self.tiles[T] = [[0; ROW]; 16];
    }
    unsafe fn load<const T: usize>(&mut self, at: *const u8, stride: usize) {
        let [rows, bytes] = self.size(T);
        self.tiles[T] = [[0; ROW]; 16];
        for (r, row) in self.tiles[T].iter_mut().enumerate().take(rows) {
            // SAFETY: the caller guarantees that the pointer is valid for the tile's rows, `stride` apart; a row of the
            // tile has room for `bytes`.
            unsafe { at.add(r * stride).copy_to_nonoverlapping(row.as_mut_ptr(), bytes) };
        }
    }
    unsafe fn store<const SUM: usize>(&mut self, at: *mut u8) {
        for (r, row) in self.tiles[SUM].iter().enumerate().take(self.shape.rows) {
            // SAFETY: the caller guarantees that the pointer is valid for the tile's rows.
            unsafe { at.add(r * ROW).copy_from_nonoverlapping(row.as_ptr(), ROW) };
        }
    }
    unsafe fn add_signed<const SUM: usize, const LEFT: usize, const RIGHT: usize>(&mut self) {
        self.each([SUM, LEFT, RIGHT], |sum, terms| integers(sum, terms, |byte| i32::from(byte as i8)));
    }
    unsafe fn add_unsigned<const SUM: usize, const LEFT: usize, const RIGHT: usize>(&mut self) {
        self.each([SUM, LEFT, RIGHT], |sum, terms| integers(sum, terms, i32::from));
    }
    unsafe fn add_bf16<const SUM: usize, const LEFT: usize, const RIGHT: usize>(&mut self) {
        self.each([SUM, LEFT, RIGHT], floats);
    }

    unsafe fn expand_signed(step: *const u8, minus: [i32; 16], to: *mut u8) {
        // SAFETY: the caller guarantees that the pointer is valid for the bytes of the step.
        let codes = unsafe { Scalar::codes4(step) };
        for (half, codes) in codes.into_iter().enumerate() {
            for (i, code) in codes.into_iter().enumerate() {
                let code = code.wrapping_sub(minus[i / 4].to_le_bytes()[i % 4]);
                // SAFETY: the caller guarantees that the pointer is valid for 128 bytes.
                unsafe { to.add(64 * half + i).write(code) };
            }
        }
    }
    unsafe fn expand_e2m1(step: *const u8, to: *mut u8) {
        // SAFETY: the caller guarantees that the pointer is valid for the bytes of the step.
        let codes = unsafe { Scalar::codes_e2m1(step) };
        for (i, code) in codes.into_iter().flatten().enumerate() {
            // SAFETY: the caller guarantees that the pointer is valid for 128 bytes.
            unsafe { to.add(i).write(code.wrapping_sub(E2M1_OFFSET as u8)) };
        }
    }
    unsafe fn table<const CODES: usize>(centre: i32) -> i32 {
        centre
    }
    unsafe fn expand_bf16<const CODES: usize>(step: *const u8, centre: i32, to: *mut u8) {
        if CODES == codes::BF16 {
            // SAFETY: the caller guarantees that the pointers are valid for 256 bytes.
            return unsafe { step.copy_to_nonoverlapping(to, 256) };
        }
        for (part, first) in PAIRS.into_iter().enumerate() {
            for (half, feature) in [first, first + 2].into_iter().enumerate() {
                // SAFETY: the caller guarantees that the pointer is valid for the bytes of the step.
                let codes = unsafe {
                    if codes::bits(CODES) == 4 {
                        Scalar::code::<4>(step, feature)
                    } else {
                        Scalar::code::<8>(step, feature)
                    }
                };
                for (r, code) in codes.into_iter().enumerate() {
                    let value = match CODES {
                        codes::E2M1 => FloatFormat::E2m1.value(code as u8),
                        codes::E4M3 => e4m3_packed(code as u8),
                        _ => (code - centre) as f32,
                    };
                    let value = bf16::from_f32(value).to_le_bytes();
                    // SAFETY: the caller guarantees that the pointer is valid for 256 bytes.
                    unsafe { to.add(64 * part + 4 * r + 2 * half).cast::<[u8; 2]>().write(value) };
                }
            }
        }
    }
}
