//! Scales that several rows share: computed from the whole weight, before any of it is rounded.
//!
//! Three kinds of schemes have them, with `a` the largest magnitude:
//!
//! | | shared | group scale |
//! |---|---|---|
//! | `-tensor` | `s = round(a / 448)` per tensor | `s` |
//! | `-b128` | `s = round(a / 448)` per block of 128 × 128 | that of its block |
//! | `-nv` (NVFP4) | the global scale `g = 2688 / a` per tensor, a divisor | `E4M3(g · a / 6) / g`, from the group's own `a` |
//!
//! 2688 is 448 · 6: the largest weight has the largest scale and the largest code. With [`ScaleSearch::FourOverSix`],
//! `g` is `1536 / a` (256 · 6), so that scales can still be multiplied by 1.5. Linears that engines fuse into one need
//! a common `s` or `g`, so callers may pass the largest magnitude of all of them.
//!
//! In memory, a scale is stored for every row and group ([`QuantizedTensor::scales`](super::QuantizedTensor)); formats
//! write each shared scale once.

use std::str::FromStr;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::grid::{Grid, GridError, GridRule};
use super::rows::{RowsError, SourceRows, group_size};
use crate::checkpoint::Dtype;
use crate::names::unknown;
use crate::scheme::{BLOCK, FloatFormat, Granularity, LinearScheme, ScaleFormat};
use crate::{Error, Result};

const LARGEST_SCALE: f32 = 448.0;
/// The largest group scale if scales may still be multiplied by 1.5.
const SCALE_WITH_ROOM: f32 = 256.0;
/// Replaces a scale that rounds to 0, as in compressed-tensors.
pub(super) const SMALLEST_SCALE: f32 = 0.125;
/// The scale codes that a sweep tries, relative to that of the largest magnitude.
const SWEEP: std::ops::RangeInclusive<i16> = -4..=8;

/// How the E4M3 scale of a group is chosen (NVFP4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ScaleSearch {
    /// From the largest magnitude, which gets the largest code.
    Amax,
    /// The largest magnitude gets the code of 6 or that of 4, whichever leaves the smaller squared error
    /// (arXiv 2512.02010).
    FourOverSix,
    /// Of 13 neighboring E4M3 values, from 4 below to 8 above that of the largest magnitude, the one that leaves the
    /// smallest squared error.
    #[default]
    Sweep,
}

impl ScaleSearch {
    /// The global scale of a tensor with this largest magnitude; 1 if it would overflow.
    pub fn global_scale(self, amax: f32) -> f32 {
        let reach = match self {
            Self::FourOverSix => SCALE_WITH_ROOM,
            Self::Amax | Self::Sweep => LARGEST_SCALE,
        };
        let global = reach * FloatFormat::E2m1.largest() / amax.max(f32::MIN_POSITIVE);
        if global.is_finite() { global } else { 1.0 }
    }
}

impl FromStr for ScaleSearch {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "amax" => Ok(Self::Amax),
            "four-over-six" => Ok(Self::FourOverSix),
            "sweep" => Ok(Self::Sweep),
            _ => Err(unknown("scale search", text, "searches", &["amax", "four-over-six", "sweep"])),
        }
    }
}

/// The parameters of a weight's grids, besides the weight itself.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ScaleContext {
    /// How group scales are chosen, if there is a choice.
    pub search: ScaleSearch,
    /// The largest magnitude of all linears that share a scale with this one; `None` to use only this linear's.
    pub amax: Option<f32>,
}

/// The scales that rows of a weight share.
#[derive(Debug, Clone, PartialEq)]
pub enum SharedScales {
    /// Every group has its own scale.
    None,
    /// One scale per `height` rows and one group: `[⌈n / height⌉, k / group_size]`.
    Blocks {
        /// Row-major.
        scales: Vec<f32>,
        /// Groups per row.
        groups: usize,
        /// Rows per block.
        height: usize,
    },
    /// NVFP4's global scale, a divisor, and how group scales are chosen.
    Global {
        /// Positive and finite.
        scale: f32,
        /// How group scales are chosen.
        search: ScaleSearch,
    },
}

/// The largest magnitudes that determine shared scales.
#[derive(Debug, Clone)]
pub struct SharedExtents {
    scheme: LinearScheme,
    columns: usize,
    group_size: usize,
    height: usize,
    /// The largest magnitudes `[blocks, groups]`, or a single one for the whole tensor.
    amax: Vec<f32>,
}

impl SharedExtents {
    /// Finds the largest magnitudes of a weight `[rows, columns]`, without values that are not finite. `load` writes a
    /// row to its second argument. `None` if rows share no scales.
    ///
    /// # Errors
    /// When the group size does not divide the width; errors of `load`.
    pub fn of(
        scheme: LinearScheme,
        [rows, columns]: [usize; 2],
        load: impl Fn(usize, &mut [f32]) -> Result<(), RowsError> + Sync,
    ) -> Result<Option<Self>, RowsError> {
        let group_size = group_size(scheme, columns)?;
        let over_tensor = scheme.shares_over_tensor();
        if !over_tensor && scheme.granularity != Granularity::Block {
            return Ok(None);
        }
        let width = if over_tensor { columns } else { BLOCK };
        let blocks: Vec<Result<Vec<f32>, RowsError>> = (0..rows.div_ceil(BLOCK))
            .into_par_iter()
            .map_init(
                || vec![0.0; columns],
                |row, block| {
                    let mut amax = vec![0.0_f32; columns.div_ceil(width)];
                    for at in block * BLOCK..rows.min((block + 1) * BLOCK) {
                        load(at, row)?;
                        for (kept, part) in amax.iter_mut().zip(row.chunks(width)) {
                            *kept = kept.max(largest_magnitude(part));
                        }
                    }
                    Ok(amax)
                },
            )
            .collect();
        let blocks = blocks.into_iter().collect::<Result<Vec<_>, _>>()?;
        let amax = match over_tensor {
            true => vec![blocks.iter().flatten().copied().fold(0.0, f32::max)],
            false => {
                let groups = columns / group_size;
                let of_block =
                    |block: &Vec<f32>| (0..groups).map(|g| block[g * group_size / BLOCK]).collect::<Vec<_>>();
                blocks.iter().flat_map(of_block).collect()
            }
        };
        let height = if over_tensor { rows.max(1) } else { BLOCK };
        Ok(Some(Self { scheme, columns, group_size, height, amax }))
    }

    /// The overall largest magnitude.
    pub fn amax(&self) -> f32 {
        self.amax.iter().copied().fold(0.0, f32::max)
    }

    /// Computes the scales.
    ///
    /// # Errors
    /// When one overflows its stored dtype.
    pub fn scales(&self, scale_dtype: Dtype, context: ScaleContext) -> Result<SharedScales, RowsError> {
        let own = self.amax();
        let all = context.amax.map_or(own, |amax| amax.max(own));
        if self.scheme.has_global_scale() {
            let scale = context.search.global_scale(all);
            return Ok(SharedScales::Global { scale, search: context.search });
        }
        let format = ScaleFormat::of(scale_dtype).map_err(|e| RowsError::Scheme(e.to_string()))?;
        let rule = GridRule::new(self.scheme, format).map_err(|e| RowsError::Scheme(e.to_string()))?;
        let groups = self.columns / self.group_size;
        let scale = |(i, amax): (usize, f32)| {
            let (row, group) = (i / groups.max(1) * self.height, i % groups.max(1));
            rule.fit_amax(amax).map(Grid::scale).map_err(|source| RowsError::Grid { row, group, source })
        };
        let amax = match self.scheme.granularity {
            Granularity::Tensor => vec![all; groups],
            _ => self.amax.clone(),
        };
        let scales = amax.into_iter().enumerate().map(scale).collect::<Result<_, _>>()?;
        Ok(SharedScales::Blocks { scales, groups, height: self.height })
    }
}

impl SharedScales {
    /// Computes the scales of a whole weight.
    ///
    /// # Errors
    /// See [`SharedExtents::scales`].
    pub fn of(
        rows: SourceRows<'_>,
        columns: usize,
        (scheme, scale_dtype): (LinearScheme, Dtype),
        context: ScaleContext,
    ) -> Result<Self, RowsError> {
        let count = rows.count(columns)?;
        let load = |at: usize, row: &mut [f32]| {
            rows.load(at, row);
            Ok(())
        };
        match SharedExtents::of(scheme, [count, columns], load)? {
            Some(extents) => extents.scales(scale_dtype, context),
            None => Ok(Self::None),
        }
    }

    /// NVFP4's global scale.
    pub fn global(&self) -> Option<f32> {
        match self {
            Self::Global { scale, .. } => Some(*scale),
            _ => None,
        }
    }

    /// The shared scale of a group of a row, if there is one.
    #[inline(always)]
    pub(super) fn at(&self, row: usize, group: usize) -> Option<f32> {
        match self {
            Self::Blocks { scales, groups, height } => Some(scales[row / height * groups + group]),
            _ => None,
        }
    }
}

fn largest_magnitude(values: &[f32]) -> f32 {
    values.iter().map(|w| w.abs()).filter(|w| w.is_finite()).fold(0.0, |a, b| if b > a { b } else { a })
}

impl GridRule {
    /// The grid of an NVFP4 group with this range and these weights, for a global scale.
    ///
    /// # Errors
    /// [`GridError::Overflow`] when the largest value of the grid is infinite.
    #[inline(always)]
    pub(super) fn fit_below(
        self,
        amax: f32,
        weights: &[f32],
        global: f32,
        search: ScaleSearch,
    ) -> Result<Grid, GridError> {
        let exact = global * (amax / FloatFormat::E2m1.largest());
        let stored = |exact: f32| match FloatFormat::E4m3.round(exact) {
            0.0 => SMALLEST_SCALE,
            scale => scale,
        };
        let base = stored(exact);
        let grid = |scale: f32| self.at_scale(scale / global);
        let mut best = grid(base);
        if !(best.scale() * FloatFormat::E2m1.largest()).is_finite() {
            let extent = super::grid::Extent { min: -amax, max: amax };
            return Err(GridError::Overflow { extent, exact: amax / 6.0, dtype: Dtype::F32 });
        }
        if amax == 0.0 || search == ScaleSearch::Amax {
            return Ok(best);
        }
        let mut least = best.squared_error(weights);
        let mut consider = |scale: f32| {
            let candidate = grid(scale);
            let error = candidate.squared_error(weights);
            if error < least {
                (best, least) = (candidate, error);
            }
        };
        match search {
            ScaleSearch::Amax => {}
            ScaleSearch::FourOverSix => consider(stored(1.5 * exact)),
            ScaleSearch::Sweep => {
                let code = i16::from(FloatFormat::E4m3.code(base));
                let largest = i16::from(FloatFormat::E4m3.code(LARGEST_SCALE));
                for offset in SWEEP.filter(|offset| *offset != 0) {
                    if (1..=largest).contains(&(code + offset)) {
                        consider(FloatFormat::E4m3.value((code + offset) as u8));
                    }
                }
            }
        }
        Ok(best)
    }
}

#[cfg(test)]
#[path = "shared_tests.rs"]
mod tests;
