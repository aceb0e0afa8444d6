//! QServe's progressive group quantization (Lin et al., MLSys 2025, §4.1): two levels of scales for each code.
//!
//! The first level maps a row to int8 values, with a float scale per row. The second maps each group of those to 4-bit
//! codes, with an integer scale and an integer zero point. So a kernel needs floats only once per row:
//!
//! ```text
//! s₁ = f16(max |w| / 119)                      per row; 1 for a row of zeros
//! x  = clamp(w / s₁, −119, 119)                not rounded: only codes are
//! s₂ = max(1, round((max x − min x) / 15))     per group; symmetric: round(max |x| / 7.5)
//! z  = clamp(round(−min x / s₂), 0, 15)        symmetric: 8
//! q  = clamp(round(x / s₂) + z, 0, 15)
//! ŵ  = (q − z) · s₂ · s₁
//! ```
//!
//! # The protective range
//!
//! `(q − z) · s₂` must fit int8 for every stored code, or the kernel's bytes wrap around. With rows that extend to ±127
//! it may not: a group from −113 to 120 has `s₂ = 16` and `z = 7`, and its 120 becomes `(15 − 7) · 16 = 128`. Within
//! ±119, it does. GPTQ can move weights beyond the range, so the [`Grid`] of a progressive group has no codes there:
//! such weights saturate.

use super::grid::{Extent, Grid, GridError, GridRule, round_even, smallest_positive};
use crate::checkpoint::Dtype;

/// The range of the first level, less than 127, which keeps the second level within int8.
pub const PROTECTIVE_RANGE: f32 = 119.0;

/// The dtype of row scales.
pub const ROW_SCALE_DTYPE: Dtype = Dtype::F16;

/// The two levels of scales: integers per group, and a float per row.
#[derive(Debug, Clone, PartialEq)]
pub struct Levels {
    /// `[n, k / group_size]`, from 1 to 16.
    pub groups: Vec<u8>,
    /// `[n]`, exact in F16.
    pub rows: Vec<f32>,
}

impl Levels {
    /// Splits scales `[n, groups]` into two levels. Each scale is a multiple of its row's scale in `rows`.
    pub fn of(scales: &[f32], rows: Vec<f32>) -> Self {
        let groups = scales.len() / rows.len().max(1);
        let group = |(i, scale): (usize, &f32)| (scale / rows[i / groups.max(1)]) as u8;
        Self { groups: scales.iter().enumerate().map(group).collect(), rows }
    }

    /// The products of the levels, `[n, groups]`, exact in `f32`.
    pub fn products(&self) -> Vec<f32> {
        let groups = self.groups.len() / self.rows.len().max(1);
        let rows = self.rows.iter().zip(self.groups.chunks_exact(groups.max(1)));
        rows.flat_map(|(row, groups)| groups.iter().map(move |&group| row * f32::from(group))).collect()
    }
}

impl GridRule {
    /// The first-level scale of a row with largest magnitude `abs_max`; `None` if the rule has only one level.
    ///
    /// # Errors
    /// [`GridError::Overflow`] when it overflows F16.
    pub fn row_scale(self, abs_max: f32) -> Result<Option<f32>, GridError> {
        if !self.progressive {
            return Ok(None);
        }
        let exact = abs_max / PROTECTIVE_RANGE;
        match ROW_SCALE_DTYPE.round(exact) {
            _ if abs_max == 0.0 => Ok(Some(1.0)),
            0.0 => Ok(Some(smallest_positive(ROW_SCALE_DTYPE))),
            scale if scale.is_finite() => Ok(Some(scale)),
            _ => {
                let extent = Extent { min: -abs_max, max: abs_max };
                Err(GridError::Overflow { extent, exact, dtype: ROW_SCALE_DTYPE })
            }
        }
    }

    /// Returns the grid for weights of this range in a row with this scale; [`fit`](Self::fit) if scales have one
    /// level.
    ///
    /// # Errors
    /// As `fit`.
    #[inline(always)]
    pub fn fit_in_row(self, extent: Extent, row: Option<f32>) -> Result<Grid, GridError> {
        match row {
            None => self.fit(extent),
            Some(row) => self.fit_second_level(extent, row),
        }
    }

    fn fit_second_level(self, extent: Extent, row: f32) -> Result<Grid, GridError> {
        if !(extent.min.is_finite() && extent.max.is_finite()) {
            return Err(GridError::NonFinite);
        }
        let max_code = f32::from(self.max_code);
        let low = (extent.min / row).max(-PROTECTIVE_RANGE);
        let high = (extent.max / row).min(PROTECTIVE_RANGE);
        let width = if self.symmetric { 2.0 * high.max(-low) } else { high - low };
        let group = round_even(width / max_code).max(1.0);
        let zero = match self.symmetric {
            true => (max_code + 1.0) / 2.0,
            false => round_even((-low / group).min(max_code)),
        };
        let steps = round_even(PROTECTIVE_RANGE / group);
        let codes = ((zero - steps).max(0.0) as u8, (zero + steps).min(max_code) as u8);
        // The product is exact: the factors have at most 11 and 5 significant bits.
        Ok(Grid::of_integers(row * group, zero as u8, codes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantize::{SourceRows, quantize_tensor};
    use crate::scheme::{LinearScheme, ScaleFormat};
    use proptest::prelude::*;

    fn rule(scheme: &str) -> GridRule {
        GridRule::new(scheme.parse().unwrap(), ScaleFormat::F16).unwrap()
    }

    fn integer(grid: Grid, row: f32, code: u8) -> f32 {
        (f32::from(code) - f32::from(grid.zero())) * (grid.scale() / row)
    }

    #[test]
    fn integers_of_every_group_have_8_bits() {
        let mut furthest = [0.0_f32; 2];
        for (i, scheme) in ["w4a8-g128-asym-progressive", "w4a8-g128-sym-progressive"].iter().enumerate() {
            let rule = rule(scheme);
            for low in 0..=4 * 119 {
                for high in 0..=4 * 119 {
                    let extent = Extent { min: -(low as f32) / 4.0, max: high as f32 / 4.0 };
                    let grid = rule.fit_in_row(extent, Some(1.0)).unwrap();
                    assert!((1.0..=16.0).contains(&grid.scale()) && grid.scale().fract() == 0.0);
                    for w in [extent.min, extent.max, f32::MAX, f32::MIN] {
                        let integer = integer(grid, 1.0, grid.code(w));
                        assert!((-128.0..=127.0).contains(&integer), "{extent:?}: {w} becomes {integer}");
                        furthest[i] = furthest[i].max(integer.abs());
                    }
                }
            }
        }
        // Asymmetric: 11 steps of 11, because 119 / 11 rounds to 11. Symmetric: 8 steps of 15 on the negative side.
        assert_eq!(furthest, [121.0, 120.0]);
    }

    /// The paper's example, which overflows with the full int8 range.
    #[test]
    fn a_range_of_127_would_overflow() {
        let rule = rule("w4a8-g128-asym-progressive");
        let grid = rule.fit_in_row(Extent { min: -113.0, max: 120.0 }, Some(1.0)).unwrap();
        assert_eq!((grid.scale(), grid.zero()), (15.0, 8));
        let group = (233.0_f32 / 15.0).round_ties_even();
        assert_eq!((group, (113.0 / group).round_ties_even()), (16.0, 7.0));
        assert_eq!((15.0 - 7.0) * group, 128.0);
    }

    #[test]
    fn rows_at_the_edges() {
        let rule = rule("w4a8-g128-asym-progressive");
        assert_eq!(rule.row_scale(0.0), Ok(Some(1.0)));
        assert_eq!(rule.row_scale(1e-30), Ok(Some(2.0_f32.powi(-24))));
        assert!(matches!(rule.row_scale(1e7), Err(GridError::Overflow { .. })), "119 times the largest F16");
        let flat = rule.fit_in_row(Extent { min: 0.0, max: 0.0 }, Some(1.0)).unwrap();
        assert_eq!((flat.scale(), flat.value(flat.code(0.0))), (1.0, 0.0));
        let nan = Extent { min: f32::NAN, max: 0.0 };
        assert_eq!(rule.fit_in_row(nan, Some(1.0)), Err(GridError::NonFinite));
    }

    proptest! {
        #[test]
        fn rows_are_rounded_by_the_definition(
            weights in prop::collection::vec(-2.0_f32..2.0, 128),
            symmetric: bool,
        ) {
            let scheme = "w4a8-g32-progressive".parse::<LinearScheme>().unwrap().with_symmetry(symmetric);
            let (tensor, _) =
                quantize_tensor(SourceRows::Floats(&weights), [1, 128], scheme, Dtype::Bf16, None).unwrap();
            let levels = tensor.levels.as_ref().unwrap();
            let largest = weights.iter().fold(0.0_f32, |m, w| m.max(w.abs()));
            let row = half::f16::from_f32(largest / 119.0).to_f32();
            prop_assert_eq!(&levels.rows, &vec![row]);
            for (g, group) in weights.chunks(32).enumerate() {
                let x: Vec<f64> =
                    group.iter().map(|w| (f64::from(*w) / f64::from(row)).clamp(-119.0, 119.0)).collect();
                let (low, high) = x.iter().fold((0.0_f64, 0.0_f64), |(l, h), x| (l.min(*x), h.max(*x)));
                let width = if symmetric { 2.0 * high.max(-low) } else { high - low };
                let s = (width / 15.0).round_ties_even().max(1.0);
                let z = if symmetric { 8.0 } else { (-low / s).round_ties_even().clamp(0.0, 15.0) };
                prop_assert_eq!(f64::from(levels.groups[g]), s);
                prop_assert_eq!(tensor.scales[g], row * s as f32);
                if let Some(zeros) = &tensor.zeros {
                    prop_assert_eq!(f64::from(zeros[g]), z);
                }
                for (x, code) in x.iter().zip(&tensor.codes[g * 32..]) {
                    let exact = (x / s + z).clamp(0.0, 15.0);
                    // Single precision may round ties differently.
                    prop_assert!((f64::from(*code) - exact).abs() <= 0.5 + 1e-4, "{} of {}", code, exact);
                    prop_assert!(((f64::from(*code) - z) * s).abs() <= 127.0);
                }
            }
        }
    }
}
