//! Inputs of linears on their integer grids: what `a8` schemes do to them before they are multiplied.
//!
//! Per token, and with one scale and zero for all tokens, as
//! [`Int8Rows`](quant_kernels_cpu::Int8Rows) defines them: the integers here are those that the kernels multiply.

use quant_kernels_cpu::StaticScale;
use quant_kernels_cpu::activation::SMALLEST;
use rayon::prelude::*;

/// Values that one task rounds, about.
const TASK: usize = 1 << 14;

/// The grid of a linear's input.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum InputGrid {
    /// `max |x| / 127` of every token.
    Token,
    /// The same for all tokens.
    Static(StaticScale),
}

impl InputGrid {
    /// Replaces rows `x` `[tokens, k]` by the values that their integers stand for. A row that holds NaN or an
    /// infinity becomes NaN where its scale is its own.
    pub fn round(self, x: &mut [f32], k: usize) {
        let k = k.max(1);
        let rows = (TASK / k).max(1);
        x.par_chunks_mut(rows * k).for_each(|part| match self {
            Self::Token => part.chunks_mut(k).for_each(round_token),
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

/// The grid of inputs from `lowest` to `highest`.
///
/// Symmetric: `s = max(|lowest|, |highest|) / 127`, zero 0. Otherwise, with the range widened to hold 0,
/// `s = (highest − lowest) / 255` and `zero = round(−128 − lowest / s)`. An input that was always 0 says nothing of its
/// scale, which is 1 then.
pub fn static_grid([lowest, highest]: [f32; 2], symmetric: bool) -> StaticScale {
    let (lowest, highest) = (lowest.min(0.0), highest.max(0.0));
    let scale = match symmetric {
        true => highest.max(-lowest) / 127.0,
        // Halves, since the whole may leave the type.
        false => (highest / 255.0) - (lowest / 255.0),
    };
    // The inverse, too, has to be a number.
    if scale < SMALLEST {
        return StaticScale { scale: 1.0, zero: if symmetric { 0 } else { -128 } };
    }
    let zero = if symmetric { 0.0 } else { (-128.0 - lowest / scale).round_ties_even().clamp(-128.0, 127.0) };
    StaticScale { scale, zero: zero as i8 }
}

#[cfg(test)]
mod tests {
    use quant_kernels_cpu::{Int8Rows, Layout, RowLayout, Serial, WeightView};

    use super::*;

    /// Rows as the kernels round them, times their scale.
    fn by_kernels(x: &[f32], k: usize, grid: InputGrid) -> Vec<f32> {
        let (codes, scales) = (vec![8; k], [1.0]);
        let view = WeightView::new([1, k], 4, k, &codes, &scales, None).unwrap();
        let layout = RowLayout::of(&Layout::of(&view, true).unwrap());
        let mut rows = Int8Rows::default();
        match grid {
            InputGrid::Token => rows.quantize(x, layout, &Serial).unwrap(),
            InputGrid::Static(by) => rows.quantize_static(x, layout, by, &Serial).unwrap(),
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
                // The ends are met to half a step; where the zero is rounded, to a whole one.
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
}
