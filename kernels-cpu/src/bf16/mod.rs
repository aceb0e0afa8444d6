//! Dense products in bfloat16: `out[m, n] = left[m, k] · right[n, k]ᵀ`, operands rounded to bf16 (half to even), sums
//! in `f32`.
//!
//! The operands are packed once and used often: [`LeftBf16`] in strips of [`LEFT_ROWS`] rows, [`RightBf16`] in panels
//! of [`RIGHT_ROWS`] rows. Both store two neighbouring values of a row in a 32-bit word, the first in the low half, as
//! the instruction `vdpbf16ps` requires. Missing values and rows are padded with zero.
//!
//! Error bound per element: each operand has a relative error of at most `2⁻⁸`, so the result has an error of at most
//! `(2⁻⁷ + 2⁻¹⁶ + k · 2⁻²⁴) Σ |left · right|`. The instruction treats subnormal operands as zero and flushes subnormal
//! sums.
//!
//! Each element is summed over `k` in order, so results do not depend on how callers split the work.

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "vector loads and stores")]
mod avx512;

use crate::Isa;

/// Rows per strip of the left operand.
pub const LEFT_ROWS: usize = 12;
/// Rows per panel of the right operand.
pub const RIGHT_ROWS: usize = 32;

/// A token that proves that the processor has `avx512bf16`.
#[derive(Debug, Clone, Copy)]
pub struct Bf16Token(());

impl Bf16Token {
    /// Returns the token if the processor has the instructions, and `QUANT_ISA` names their path or, if it is not set,
    /// they are not slower than products in `f32`, as they are on Intel's processors since Sapphire Rapids.
    pub fn detect() -> Option<Self> {
        Isa::dense_bf16().then_some(Self(()))
    }

    /// Returns the token if the processor has the instructions, even if they are slow, for tests.
    pub fn available() -> Option<Self> {
        Isa::Avx512Bf16.is_available().then_some(Self(()))
    }
}

/// The left operand `[m, k]`, packed.
#[derive(Debug, Clone)]
pub struct LeftBf16(Packed<LEFT_ROWS>);

/// The right operand `[n, k]`, packed.
#[derive(Debug, Clone)]
pub struct RightBf16(Packed<RIGHT_ROWS>);

/// A packed operand: strips of `R` rows, `[⌈rows / R⌉, ⌈k / 2⌉, R]` pairs.
#[derive(Debug, Clone)]
struct Packed<const R: usize> {
    rows: usize,
    k: usize,
    pairs: usize,
    words: Vec<u32>,
}

impl<const R: usize> Packed<R> {
    fn zeros(rows: usize, k: usize) -> Self {
        let pairs = k.div_ceil(2);
        Self { rows, k, pairs, words: vec![0; rows.div_ceil(R) * pairs * R] }
    }

    fn strip(&self, index: usize) -> &[u32] {
        let size = self.pairs * R;
        &self.words[index * size..(index + 1) * size]
    }
}

/// Packs up to `R` rows of width `k` into a zeroed strip.
fn pack_strip<const R: usize>(rows: &[f32], k: usize, strip: &mut [u32]) {
    for (r, row) in rows.chunks_exact(k).enumerate() {
        let mut words = strip[r..].iter_mut().step_by(R);
        let mut pairs = row.chunks_exact(2);
        for (pair, word) in (&mut pairs).zip(&mut words) {
            *word = to_bf16(pair[0]) | to_bf16(pair[1]) << 16;
        }
        if let ([last], Some(word)) = (pairs.remainder(), words.next()) {
            *word = to_bf16(*last);
        }
    }
}

/// Returns the 16 bits of a value rounded to bf16, half to even. NaN stays NaN.
fn to_bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if value.is_nan() { 0x7fc0 } else { rounded }
}

macro_rules! operand {
    ($name:ident, $rows:expr, $what:literal) => {
        impl $name {
            #[doc = concat!("Packs ", $what, " from rows of width `k`, row-major.")]
            ///
            /// # Panics
            /// When `values` is not whole rows.
            pub fn pack(values: &[f32], k: usize) -> Self {
                let rows = values.len().checked_div(k).unwrap_or(0);
                assert_eq!(rows * k, values.len(), "not whole rows");
                let mut packed = Self::zeros(rows, k);
                for (rows, strip) in values.chunks(($rows * k).max(1)).zip(packed.strips_mut()) {
                    Self::pack_rows(rows, k, strip);
                }
                packed
            }

            #[doc = concat!("Room for ", $what, " `[rows, k]`, zero until [`Self::pack_rows`] fills it.")]
            pub fn zeros(rows: usize, k: usize) -> Self {
                Self(Packed::zeros(rows, k))
            }

            /// The strips (of a right operand, the panels), for callers that pack them in parallel.
            pub fn strips_mut(&mut self) -> std::slice::ChunksMut<'_, u32> {
                self.0.words.chunks_mut((self.0.pairs * $rows).max(1))
            }

            /// Packs rows of width `k` into a zeroed strip.
            ///
            /// # Panics
            /// When the length of `rows` is not a multiple of `k`, there are more rows than a strip holds, or the strip
            /// is one of an operand of a different width.
            pub fn pack_rows(rows: &[f32], k: usize, strip: &mut [u32]) {
                assert!(k > 0 && rows.len().is_multiple_of(k), "not whole rows");
                assert!(rows.len() / k <= $rows, "more rows than a strip has");
                assert_eq!(strip.len(), k.div_ceil(2) * $rows, "the width of the strip differs");
                pack_strip::<$rows>(rows, k, strip);
            }

            /// The number of rows.
            pub fn rows(&self) -> usize {
                self.0.rows
            }
        }
    };
}

operand!(LeftBf16, LEFT_ROWS, "a left operand");
operand!(RightBf16, RIGHT_ROWS, "a right operand");

/// Computes rows of `left · rightᵀ`, beginning with the first row of strip `first` of `left`, as many as `out` holds.
///
/// `out` is `[rows, n]`, row-major; it is overwritten. Allocates nothing and spawns no threads.
///
/// # Panics
/// When the operands have different widths, `right` has no rows, the length of `out` is not a multiple of `n`, or
/// `left` has too few rows.
pub fn bf16_gemm(token: Bf16Token, left: &LeftBf16, first: usize, right: &RightBf16, out: &mut [f32]) {
    check(left, first, right, out.len());
    let (left, right) = (&left.0, &right.0);
    let n = right.rows;
    // Panels are the outer loop, so that a panel stays in the L1 cache while all strips are multiplied by it.
    for panel in 0..n.div_ceil(RIGHT_ROWS) {
        let columns = panel * RIGHT_ROWS..((panel + 1) * RIGHT_ROWS).min(n);
        for (i, out) in out.chunks_mut(LEFT_ROWS * n).enumerate() {
            let tile = multiply(token, left.strip(first + i), right.strip(panel));
            for (row, values) in out.chunks_exact_mut(n).zip(&tile) {
                row[columns.clone()].copy_from_slice(&values[..columns.len()]);
            }
        }
    }
}

fn check(left: &LeftBf16, first: usize, right: &RightBf16, out: usize) {
    let (left, right) = (&left.0, &right.0);
    assert_eq!(left.k, right.k, "operands have different widths");
    assert!(right.rows > 0 && out.is_multiple_of(right.rows), "out is not whole rows");
    let rows = first.checked_mul(LEFT_ROWS).and_then(|first| first.checked_add(out / right.rows));
    assert!(rows.is_some_and(|rows| rows <= left.rows), "rows leave the left operand");
}

type Tile = [[f32; RIGHT_ROWS]; LEFT_ROWS];

#[cfg(target_arch = "x86_64")]
fn multiply(token: Bf16Token, strip: &[u32], panel: &[u32]) -> Tile {
    avx512::multiply(token, strip, panel)
}

/// Never called: `Bf16Token` cannot be created on this architecture.
#[cfg(not(target_arch = "x86_64"))]
fn multiply(_: Bf16Token, _: &[u32], _: &[u32]) -> Tile {
    [[0.0; RIGHT_ROWS]; LEFT_ROWS]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rounded(value: f32) -> f64 {
        f64::from(f32::from_bits(to_bf16(value) << 16))
    }

    #[test]
    fn rounding_is_half_to_even() {
        for (value, bits) in [
            (1.0_f32, 0x3f80),
            (-1.0, 0xbf80),
            (0.0, 0),
            (f32::from_bits(0x3f80_8000), 0x3f80),
            (f32::from_bits(0x3f81_8000), 0x3f82),
            (f32::from_bits(0x3f80_8001), 0x3f81),
            (f32::INFINITY, 0x7f80),
            (f32::MAX, 0x7f80),
        ] {
            assert_eq!(to_bf16(value), bits, "{value:e}");
        }
    }

    fn exact(left: &[f32], right: &[f32], k: usize) -> Vec<(f64, f64)> {
        let row = |l: &[f32], r: &[f32]| {
            let terms = l.iter().zip(r).map(|(a, b)| rounded(*a) * rounded(*b));
            (terms.clone().sum::<f64>(), terms.map(f64::abs).sum::<f64>())
        };
        left.chunks_exact(k).flat_map(|l| right.chunks_exact(k).map(move |r| row(l, r))).collect()
    }

    fn values(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed | 1;
        (0..len)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                let scale = 2.0_f32.powi((state >> 28) as i32 - 8);
                (state as f32 / u32::MAX as f32 - 0.5) * scale
            })
            .collect()
    }

    proptest! {
        #[test]
        fn products_are_within_their_bound(m in 1usize..40, n in 1usize..70, k in 1usize..70, seed: u32) {
            let Some(token) = Bf16Token::available() else { return Ok(()) };
            let (left, right) = (values(m * k, seed), values(n * k, seed ^ 0x9e37));
            let (packed_left, packed_right) = (LeftBf16::pack(&left, k), RightBf16::pack(&right, k));
            let mut out = vec![f32::NAN; m * n];
            bf16_gemm(token, &packed_left, 0, &packed_right, &mut out);
            for (got, (exact, magnitude)) in out.iter().zip(exact(&left, &right, k)) {
                let bound = (k as f64 + 2.0) * 2.0_f64.powi(-24) * magnitude + 1e-37;
                prop_assert!((f64::from(*got) - exact).abs() <= bound, "{got} {exact}");
            }
            // A part of the product is bit-identical to the same part of the whole product.
            let strips = m.div_ceil(LEFT_ROWS);
            let first = seed as usize % strips;
            let rows = (m - first * LEFT_ROWS).min(1 + seed as usize % 30);
            let mut part = vec![f32::NAN; rows * n];
            bf16_gemm(token, &packed_left, first, &packed_right, &mut part);
            let from = first * LEFT_ROWS * n;
            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&part), bits(&out[from..from + rows * n]));
        }
    }

    #[test]
    fn what_is_not_finite_stays_so() {
        let Some(token) = Bf16Token::available() else { return };
        let patterns = [0x7fff_ffff, 0xffff_ffff, 0x7f80_0001].map(f32::from_bits);
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN].into_iter().chain(patterns) {
            let mut left = vec![1.0; 6];
            left[4] = bad;
            let mut out = [0.0; 4];
            let right = RightBf16::pack(&[1.0; 6], 3);
            bf16_gemm(token, &LeftBf16::pack(&left, 3), 0, &right, &mut out);
            assert_eq!(out[..2], [3.0; 2]);
            assert!(out[2..].iter().all(|v| !v.is_finite()), "{out:?}");
        }
    }

    /// The widths are checked before any instruction is used, so this panics on all processors.
    #[test]
    #[should_panic(expected = "different widths")]
    fn operands_of_different_widths_panic() {
        check(&LeftBf16::pack(&[1.0; 4], 4), 0, &RightBf16::pack(&[1.0; 2], 2), 1);
    }

    /// Both operands have two pairs, but widths of three and four.
    #[test]
    #[should_panic(expected = "different widths")]
    fn operands_with_the_same_pairs_panic() {
        check(&LeftBf16::pack(&[1.0; 3], 3), 0, &RightBf16::pack(&[1.0; 4], 4), 1);
    }

    #[test]
    #[should_panic(expected = "not whole rows")]
    fn a_row_too_short_panics() {
        LeftBf16::pack(&[1.0; 7], 4);
    }

    #[test]
    #[should_panic(expected = "not whole rows")]
    fn rows_without_width_panic() {
        RightBf16::pack(&[1.0; 7], 0);
    }

    #[test]
    #[should_panic(expected = "leave the left operand")]
    fn rows_that_are_not_there_panic() {
        check(&LeftBf16::pack(&[1.0; 8], 4), usize::MAX, &RightBf16::pack(&[1.0; 4], 4), 1);
    }
}
