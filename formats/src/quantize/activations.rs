//! Input grids of linears: the rounding of `a8`, `af8` and `af4` schemes before the multiplication.
//!
//! Integers have a scale per token, or one scale and zero point for all tokens, as defined by
//! [`Int8Rows`](quant_kernels_cpu::Int8Rows): the integers here are those that the kernels multiply.
//!
//! Floating-point grids match compressed-tensors, bit for bit. Every operation is in `f32`, and `a` is the largest
//! magnitude of the inputs that share a scale:
//!
//! | grid | scale | value |
//! |---|---|---|
//! | [`Fp8Token`](InputGrid::Fp8Token), [`Fp8Group`](InputGrid::Fp8Group) | `s = a / 448`; 2⁻²³ if that is 0 | `E4M3(x / s) · s` |
//! | [`Fp8Static`](InputGrid::Fp8Static) | `s`, calibrated | `E4M3(x / s) · s` |
//! | [`Mxfp8`](InputGrid::Mxfp8) | `s = 2^(⌊log₂ a⌋ − 8)`, twice that if the mantissa of `a` is at least 1.75 | `E4M3(x / s) · s` |
//! | [`Nvfp4`](InputGrid::Nvfp4) | `s = e / g` with `e = E4M3(g · (a / 6))`, or 0.125 if that is 0; `g` calibrated | `E2M1(x / s) · s` |

use quant_kernels_cpu::activation::SMALLEST;
use quant_kernels_cpu::{StaticScale, e8m0_value};
use rayon::prelude::*;

use super::grid::ROUND_UP_FROM_1_75;
use super::shared::SMALLEST_SCALE;
use crate::scheme::{BLOCK, FloatFormat, MX_GROUP, NV_GROUP};

const TASK: usize = 1 << 14;

/// The grid of a linear's input.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum InputGrid {
    /// Int8, scale `max |x| / 127` per token.
    Token,
    /// Int8, the same scale and zero point for all tokens.
    Static(StaticScale),
    /// E4M3, scale `max |x| / 448` per token.
    Fp8Token,
    /// E4M3, scale `max |x| / 448` per token and 128 inputs.
    Fp8Group,
    /// E4M3, the same scale for all tokens.
    Fp8Static {
        /// Positive and finite.
        scale: f32,
    },
    /// E4M3, a power of two per token and 32 inputs.
    Mxfp8,
    /// E2M1, an E4M3 scale per token and 16 inputs.
    Nvfp4 {
        /// The divisor of the group scales: positive and finite.
        global: f32,
    },
}

impl InputGrid {
    /// Replaces rows `x` `[tokens, k]` by their rounded values. If a token or group with its own scale holds NaN or an
    /// infinity, all of it becomes NaN. Groups at the end of a row may be smaller.
    pub fn round(self, x: &mut [f32], k: usize) {
        let k = k.max(1);
        let rows = (TASK / k).max(1);
        x.par_chunks_mut(rows * k).for_each(|part| match self {
            Self::Token => part.chunks_mut(k).for_each(round_token),
            Self::Fp8Token => part.chunks_mut(k).for_each(|row| round_fp8(row, fp8_scale(largest(row)))),
            Self::Fp8Group => {
                let groups = part.chunks_mut(k).flat_map(|row| row.chunks_mut(BLOCK));
                groups.for_each(|group| round_fp8(group, fp8_scale(largest(group))));
            }
            Self::Fp8Static { scale } => round_fp8(part, scale),
            Self::Mxfp8 => {
                let groups = part.chunks_mut(k).flat_map(|row| row.chunks_mut(MX_GROUP));
                groups.for_each(|group| round_fp8(group, mxfp8_scale(largest(group))));
            }
            Self::Nvfp4 { global } => {
                let groups = part.chunks_mut(k).flat_map(|row| row.chunks_mut(NV_GROUP));
                groups.for_each(|group| {
                    round_floats(group, nvfp4_scale(largest(group), global), FloatFormat::E2m1)
                });
            }
            Self::Static(by) => {
                let (inverse, zero) = (1.0 / by.scale, f32::from(by.zero));
                for x in part {
                    let code = ((*x * inverse).round_ties_even() + zero).clamp(-128.0, 127.0);
                    *x = by.scale * (code - zero);
                }
            }
        });
    }
}

/// The largest magnitude; NaN if any value is NaN.
fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0_f32, |max, x| if x.abs() > max || x.is_nan() { x.abs() } else { max })
}

fn fp8_scale(amax: f32) -> f32 {
    match amax / FloatFormat::E4m3.largest() {
        0.0 => f32::EPSILON,
        scale => scale,
    }
}

fn mxfp8_scale(amax: f32) -> f32 {
    if !amax.is_finite() {
        return amax;
    }
    let exponent = ((amax.to_bits() + ROUND_UP_FROM_1_75) >> 23) as i32 - 8;
    e8m0_value(exponent.clamp(0, 254) as u8)
}

fn nvfp4_scale(amax: f32, global: f32) -> f32 {
    if !amax.is_finite() {
        return amax;
    }
    match FloatFormat::E4m3.round(global * (amax / FloatFormat::E2m1.largest())) {
        0.0 => SMALLEST_SCALE / global,
        scale => scale / global,
    }
}

fn round_fp8(values: &mut [f32], scale: f32) {
    round_floats(values, scale, FloatFormat::E4m3);
}

/// Rounds values to numbers of a format times the scale. NaN stays NaN; without a finite scale, all values become NaN.
fn round_floats(values: &mut [f32], scale: f32, format: FloatFormat) {
    if !scale.is_finite() {
        return values.fill(f32::NAN);
    }
    for x in values {
        let number = *x / scale;
        *x = if number.is_nan() { number } else { format.round(number) * scale };
    }
}

fn round_token(row: &mut [f32]) {
    let largest = row.iter().fold(0.0_f32, |max, x| if x.is_nan() { f32::NAN } else { max.max(x.abs()) });
    let largest = if row.iter().all(|x| x.is_finite()) { largest } else { f32::NAN };
    if largest.is_nan() {
        return row.fill(f32::NAN);
    }
    if largest < SMALLEST {
        return row.fill(0.0);
    }
    let (scale, inverse) = (largest / 127.0, 127.0 / largest);
    for x in row {
        *x = scale * (*x * inverse).round_ties_even();
    }
}

/// Returns the grid of inputs from `lowest` to `highest`.
///
/// Symmetric: `s = max(|lowest|, |highest|) / 127`, zero point 0. Otherwise, with the range widened to include 0, `s =
/// (highest − lowest) / 255` and `zero = round(−128 − lowest / s)`. The scale is 1 if `1 / s` would overflow.
pub fn static_grid([lowest, highest]: [f32; 2], symmetric: bool) -> StaticScale {
    let (lowest, highest) = (lowest.min(0.0), highest.max(0.0));
    let scale = match symmetric {
        true => highest.max(-lowest) / 127.0,
        // The difference may overflow.
        false => (highest / 255.0) - (lowest / 255.0),
    };
    if scale < SMALLEST {
        return StaticScale { scale: 1.0, zero: if symmetric { 0 } else { -128 } };
    }
    let zero = if symmetric { 0.0 } else { (-128.0 - lowest / scale).round_ties_even().clamp(-128.0, 127.0) };
    StaticScale { scale, zero: zero as i8 }
}

/// Returns the scale of FP8 inputs from `lowest` to `highest`: `max |x| / 448`, rounded to BF16; 1 if the scale or its
/// inverse would be 0 or infinite.
pub fn fp8_static_scale([lowest, highest]: [f32; 2]) -> f32 {
    let exact = highest.max(-lowest) / FloatFormat::E4m3.largest();
    let scale = half::bf16::from_f32(exact).to_f32();
    if scale < SMALLEST || !scale.is_finite() { 1.0 } else { scale }
}

/// Returns the global scale of NVFP4 inputs from `lowest` to `highest`, a divisor: `448 · 6 / max |x|`; 1 if this
/// overflows.
pub fn nvfp4_input_scale([lowest, highest]: [f32; 2]) -> f32 {
    super::ScaleSearch::Amax.global_scale(highest.max(-lowest))
}

#[cfg(test)]
mod tests {
    use quant_kernels_cpu::{Int8Rows, Layout, RowLayout, Serial, WeightView};

    use super::*;

    fn by_kernels(x: &[f32], k: usize, grid: InputGrid) -> Vec<f32> {
        let (codes, scales) = (vec![8; k], [1.0]);
        let view = WeightView::new([1, k], 4, k, &codes, &scales, None).unwrap();
        let layout = RowLayout::of(&Layout::of(&view, true).unwrap());
        let mut rows = Int8Rows::default();
        match grid {
            InputGrid::Token => rows.quantize(x, layout, &Serial).unwrap(),
            InputGrid::Static(by) => rows.quantize_static(x, layout, by, &Serial).unwrap(),
            other => panic!("{other:?} is not a grid of integers"),
        }
        let zero = rows.zero();
        (0..rows.m())
            .flat_map(|r| {
                let scale = rows.scales()[r];
                rows.row(r).into_iter().map(move |a| scale * (i32::from(a) - zero) as f32)
            })
            .collect()
    }

    #[test]
    fn integers_are_those_of_the_kernels() {
        let (m, k) = (37, 100);
        let mut x: Vec<f32> = (0..m * k).map(|i| ((i * i) as f32 * 0.013).sin() * (i % 29) as f32).collect();
        x[5 * k..6 * k].fill(0.0);
        x[6 * k..7 * k].fill(1e-37);
        x[7 * k] = 3e4;
        for grid in [
            InputGrid::Token,
            InputGrid::Static(static_grid([-20.0, 25.0], true)),
            InputGrid::Static(static_grid([-3.0, 25.0], false)),
        ] {
            let mut rounded = x.clone();
            grid.round(&mut rounded, k);
            assert_eq!(rounded, by_kernels(&x, k, grid), "{grid:?}");
        }
        x[8 * k + 3] = f32::INFINITY;
        x[9 * k + 3] = f32::NAN;
        let mut rounded = x.clone();
        InputGrid::Token.round(&mut rounded, k);
        assert!(rounded[8 * k..10 * k].iter().all(|x| x.is_nan()));
        assert!(rounded[10 * k..].iter().all(|x| x.is_finite()));
    }

    #[test]
    fn static_grids_hold_their_range_and_zero() {
        for range in [[-3.0, 5.0], [1.0, 2.0], [-7.0, -2.0], [0.0, 9.0], [-1e38, 3e38], [-1e-30, 1e-30]] {
            for symmetric in [true, false] {
                let grid = static_grid(range, symmetric);
                assert!(grid.scale > 0.0 && grid.scale.is_finite(), "{range:?}");
                let mut x = [range[0], range[1], 0.0];
                InputGrid::Static(grid).round(&mut x, 3);
                assert_eq!(x[2], 0.0);
                for (got, asked) in x.iter().zip(range) {
                    let distance = (f64::from(*got) - f64::from(asked)).abs();
                    assert!(distance <= f64::from(grid.scale) * 1.001, "{range:?} {got}");
                }
            }
        }
        assert_eq!(static_grid([0.0, 0.0], true), StaticScale { scale: 1.0, zero: 0 });
        assert_eq!(static_grid([0.0, 255.0], false), StaticScale { scale: 1.0, zero: -128 });
        assert_eq!(static_grid([-127.0, 5.0], true), StaticScale { scale: 1.0, zero: 0 });
    }

    /// The nonnegative E4M3 values, by definition.
    fn e4m3() -> Vec<f64> {
        (0..0x7f)
            .map(|code| match (code >> 3, f64::from(code & 7)) {
                (0, mantissa) => mantissa / 512.0,
                (exponent, mantissa) => (1.0 + mantissa / 8.0) * 2.0_f64.powi(exponent - 7),
            })
            .collect()
    }

    /// Whether every value is the nearest to the original among the products of `scale` and `numbers`, up to rounding.
    fn is_nearest(x: &[f32], rounded: &[f32], scale: f64, numbers: &[f64]) -> bool {
        x.iter().zip(rounded).all(|(x, got)| {
            let exact = f64::from(*x).abs() / scale;
            let distance = numbers.iter().map(|n| (n - exact).abs()).fold(f64::MAX, f64::min);
            let same_sign = x.is_sign_negative() == got.is_sign_negative();
            let got = f64::from(*got).abs() / scale;
            same_sign && (got - exact).abs() <= distance + 1e-6 * exact
        })
    }

    #[test]
    fn floating_point_inputs_are_the_nearest_numbers_of_their_grids() {
        let (m, k) = (5, 256);
        let mut x: Vec<f32> = (0..m * k).map(|i| ((i * i) as f32 * 0.013).sin() * (i % 29) as f32).collect();
        x[k..2 * k].fill(0.0);
        x[2 * k] = 3e4;
        let numbers = e4m3();
        let fours = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let amax = |part: &[f32]| part.iter().fold(0.0_f64, |max, x| max.max(f64::from(*x).abs()));
        for (grid, width) in [(InputGrid::Fp8Token, k), (InputGrid::Fp8Group, 128), (InputGrid::Mxfp8, 32)] {
            let mut rounded = x.clone();
            grid.round(&mut rounded, k);
            for (x, rounded) in x.chunks(width).zip(rounded.chunks(width)) {
                let amax = amax(x);
                if amax == 0.0 {
                    assert!(rounded.iter().all(|x| *x == 0.0));
                    continue;
                }
                let scale = match grid {
                    InputGrid::Mxfp8 => {
                        let mut exponent = amax.log2().floor();
                        exponent += f64::from(u8::from(amax / exponent.exp2() >= 1.75));
                        (exponent - 8.0).exp2()
                    }
                    _ => f64::from((amax / 448.0) as f32),
                };
                assert!(is_nearest(x, rounded, scale, &numbers), "{grid:?}");
            }
        }
        let global = nvfp4_input_scale([-20.0, 28.0]);
        assert_eq!(global, 96.0);
        let mut rounded = x.clone();
        InputGrid::Nvfp4 { global }.round(&mut rounded, k);
        for (x, rounded) in x.chunks(16).zip(rounded.chunks(16)) {
            let exact = (96.0 * amax(x) / 6.0).min(448.0);
            let nearest =
                numbers.iter().copied().min_by(|a, b| (a - exact).abs().total_cmp(&(b - exact).abs()));
            let scale = nearest.unwrap().max(1.0 / 512.0) / 96.0;
            assert!(is_nearest(x, rounded, f64::from(scale as f32), &fours) || amax(x) == 0.0);
        }
    }

    #[test]
    fn a_calibrated_scale_saturates_and_is_exact_in_bf16() {
        let scale = fp8_static_scale([-3.0, 5.0]);
        assert_eq!(scale, half::bf16::from_f32(5.0 / 448.0).to_f32());
        let mut x = [5.0, 1e6, -1e6, 0.0, -0.0, f32::NAN];
        InputGrid::Fp8Static { scale }.round(&mut x, 6);
        assert_eq!(x[..4], [448.0 * scale, 448.0 * scale, -448.0 * scale, 0.0]);
        assert!(x[5].is_nan());
        assert_eq!((fp8_static_scale([0.0, 0.0]), nvfp4_input_scale([0.0, 0.0])), (1.0, 1.0));
    }

    #[test]
    fn what_is_not_finite_stays_within_its_group() {
        for (grid, width) in [
            (InputGrid::Fp8Token, 256),
            (InputGrid::Fp8Group, 128),
            (InputGrid::Mxfp8, 32),
            (InputGrid::Nvfp4 { global: 10.0 }, 16),
        ] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = vec![1.0; 512];
                x[3] = bad;
                grid.round(&mut x, 256);
                assert!(x[..width].iter().all(|x| x.is_nan()), "{grid:?} {bad}");
                assert!(x[width..].iter().all(|x| x.is_finite()), "{grid:?} {bad}");
            }
        }
    }
}
