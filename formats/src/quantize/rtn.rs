//! Round to nearest: assigns a [`Grid`](super::grid::Grid) and codes to every group of a matrix.
//!
//! Results do not depend on the number of threads. Work is distributed over the current rayon pool.

use rayon::prelude::*;

use super::error_stats::ErrorStats;
use super::grid::{self, Extent, GridRule};
use super::progressive::Levels;
use super::rows::{RowsError, SourceRows, group_size, zeroed};
use super::shared::{ScaleContext, SharedScales};
use super::tensor::QuantizedTensor;
use crate::Result;
use crate::checkpoint::Dtype;
use crate::scheme::{LinearScheme, ScaleFormat};
use crate::vector::vectorized;

const TASK_ELEMENTS: usize = 1 << 16;

/// The output of [`quantize_rows`], for `r` rows of `k` weights.
#[derive(Debug)]
pub struct QuantizedRows<'a> {
    /// `[r, k]` row-major, one code per byte.
    pub codes: &'a mut [u8],
    /// `[r, k / group_size]` row-major.
    pub scales: &'a mut [f32],
    /// Like `scales`, for asymmetric schemes; absent for symmetric ones.
    pub zeros: Option<&'a mut [u8]>,
    /// `[r]`, for progressive schemes, whose `scales` are multiples of these.
    pub rows: Option<&'a mut [f32]>,
}

/// Quantizes a weight `[n, k]`, row-major, to the nearest codes.
///
/// * `scale_dtype`: F16, BF16 or F32, or the type that the scheme
///   [prescribes](LinearScheme::fixed_scales). Scales are rounded to it before codes are computed.
/// * `clip`: a bound `m ≥ 0` for each row and group, `[n, k / group_size]` row-major: weights are clamped to `[−m, m]`
///   first.
///
/// # Errors
/// When the scheme or the dtype of scales is not supported, the group size does not divide `k`, a weight is not finite,
/// or a scale overflows its dtype.
pub fn quantize_rtn(
    name: &str,
    weights: &[f32],
    shape: [usize; 2],
    scheme: LinearScheme,
    scale_dtype: Dtype,
    clip: Option<&[f32]>,
) -> Result<QuantizedTensor> {
    quantize_tensor(SourceRows::Floats(weights), shape, scheme, scale_dtype, clip)
        .map(|(tensor, _)| tensor)
        .map_err(|e| e.within(name, None))
}

/// Quantizes a whole weight `[n, k]`, and returns the error, bit-identical to [`ErrorStats::of`].
///
/// # Errors
/// See [`quantize_rows`].
pub fn quantize_tensor(
    rows: SourceRows<'_>,
    shape: [usize; 2],
    scheme: LinearScheme,
    scale_dtype: Dtype,
    clip: Option<&[f32]>,
) -> Result<(QuantizedTensor, ErrorStats), RowsError> {
    quantize_within(rows, shape, (scheme, scale_dtype), clip, ScaleContext::default())
}

/// Quantizes a weight that shares a scale with others, or with a different search for scales.
///
/// # Errors
/// See [`quantize_rows`].
pub fn quantize_within(
    rows: SourceRows<'_>,
    shape: [usize; 2],
    (scheme, scale_dtype): (LinearScheme, Dtype),
    clip: Option<&[f32]>,
    context: ScaleContext,
) -> Result<(QuantizedTensor, ErrorStats), RowsError> {
    let [n, k] = shape;
    let groups = n * (k / group_size(scheme, k)?);
    let mut tensor = QuantizedTensor {
        shape,
        scheme,
        codes: zeroed(n * k)?,
        scales: zeroed(groups)?,
        scale_dtype,
        zeros: (!scheme.is_symmetric()).then(|| zeroed(groups)).transpose()?,
        levels: None,
        global: None,
        input: None,
        input_order: None,
    };
    let shared = SharedScales::of(rows, k, (scheme, scale_dtype), context)?;
    tensor.global = shared.global();
    let mut row_scales = scheme.is_progressive().then(|| vec![0.0; n]);
    let out = QuantizedRows {
        codes: &mut tensor.codes,
        scales: &mut tensor.scales,
        zeros: tensor.zeros.as_deref_mut(),
        rows: row_scales.as_deref_mut(),
    };
    let work = RowQuantizer::new(k, scheme, scale_dtype, clip, rows.count(k)?)?.sharing(&shared, 0);
    let stats = quantize_with(&work, rows, out)?;
    tensor.levels = row_scales.map(|rows| Levels::of(&tensor.scales, rows));
    Ok((tensor, stats))
}

/// Quantizes rows of width `columns` into the caller's slices. Returns the error of these rows, relative to the weights
/// before clipping. For a scheme whose rows share scales, the slice must contain all rows.
///
/// # Errors
/// As [`quantize_rtn`]; also [`RowsError::Layout`] when the lengths of slices are inconsistent. Non-finite weights are
/// reported first, with their count over all rows. The contents of `out` are then unspecified.
pub fn quantize_rows(
    rows: SourceRows<'_>,
    columns: usize,
    scheme: LinearScheme,
    scale_dtype: Dtype,
    clip: Option<&[f32]>,
    out: QuantizedRows<'_>,
) -> Result<ErrorStats, RowsError> {
    let shared = SharedScales::of(rows, columns, (scheme, scale_dtype), ScaleContext::default())?;
    let work =
        RowQuantizer::new(columns, scheme, scale_dtype, clip, rows.count(columns)?)?.sharing(&shared, 0);
    quantize_with(&work, rows, out)
}

fn quantize_with(
    work: &RowQuantizer<'_>,
    rows: SourceRows<'_>,
    out: QuantizedRows<'_>,
) -> Result<ErrorStats, RowsError> {
    let columns = work.columns;
    let groups = work.rows * work.groups();
    check_len("codes", out.codes.len(), work.rows * columns)?;
    check_len("scales", out.scales.len(), groups)?;
    check_len(
        "zeros",
        out.zeros.as_ref().map_or(0, |z| z.len()),
        if work.rule.symmetric { 0 } else { groups },
    )?;
    check_len(
        "row scales",
        out.rows.as_ref().map_or(0, |r| r.len()),
        if work.rule.progressive { work.rows } else { 0 },
    )?;
    let codes = out.codes.chunks_mut(work.task_rows() * columns);
    let scales = out.scales.chunks_mut(work.task_rows() * work.groups());
    let mut zeros = out.zeros.map(|z| z.chunks_mut(work.task_rows() * work.groups()));
    let mut levels = out.rows.map(|r| r.chunks_mut(work.task_rows()));
    let tasks: Vec<_> = codes
        .zip(scales)
        .map(|(codes, scales)| QuantizedRows {
            codes,
            scales,
            zeros: zeros.as_mut().and_then(Iterator::next),
            rows: levels.as_mut().and_then(Iterator::next),
        })
        .collect();

    let (faults, stats): (Vec<Faults>, Vec<Vec<ErrorStats>>) = tasks
        .into_par_iter()
        .enumerate()
        .map_init(
            || (vec![0.0; columns], vec![0.0; columns]),
            |(row, rounded), (task, out)| {
                let mut faults = Faults::default();
                let QuantizedRows { codes, scales, mut zeros, rows: mut levels } = out;
                let stats = codes.chunks_exact_mut(columns).enumerate().map(|(r, codes)| {
                    let groups = r * work.groups()..(r + 1) * work.groups();
                    let out = QuantizedRows {
                        codes,
                        scales: &mut scales[groups.clone()],
                        zeros: zeros.as_mut().map(|z| &mut z[groups]),
                        rows: levels.as_mut().map(|l| &mut l[r..r + 1]),
                    };
                    let at = task * work.task_rows() + r;
                    vectorized(
                        #[inline(always)]
                        || work.quantize_row(rows, at, out, (row, rounded), &mut faults),
                    )
                });
                let stats = stats.collect();
                (faults, stats)
            },
        )
        .unzip();
    Faults::verdict(faults)?;
    Ok(stats.iter().flatten().fold(ErrorStats::default(), |sum, row| sum.plus(row)))
}

/// Quantizes weights, row-major in rows of width `columns`, to `scheme`, and dequantizes them in place. The result is
/// bit-identical to that of [`quantize_rtn`] and [`dequantize`](QuantizedTensor::dequantize).
///
/// # Errors
/// As [`quantize_rows`]; the weights are then unspecified.
pub fn fake_quantize(
    weights: &mut [f32],
    columns: usize,
    scheme: LinearScheme,
    scale_dtype: Dtype,
    clip: Option<&[f32]>,
) -> Result<(), RowsError> {
    let shared = SharedScales::of(
        SourceRows::Floats(weights),
        columns,
        (scheme, scale_dtype),
        ScaleContext::default(),
    )?;
    fake_quantize_within(weights, columns, (scheme, scale_dtype), clip, (&shared, 0))
}

/// Applies [`fake_quantize`] to rows from `first` on, with the scales that all rows of the weight share.
///
/// # Errors
/// See [`fake_quantize`].
pub fn fake_quantize_within(
    weights: &mut [f32],
    columns: usize,
    (scheme, scale_dtype): (LinearScheme, Dtype),
    clip: Option<&[f32]>,
    (shared, first): (&SharedScales, usize),
) -> Result<(), RowsError> {
    let count = SourceRows::Floats(weights).count(columns)?;
    let work = RowQuantizer::new(columns, scheme, scale_dtype, clip, count)?.sharing(shared, first);
    let outcomes: Vec<Faults> = weights
        .par_chunks_mut(work.task_rows() * columns)
        .enumerate()
        .map(|(task, rows)| {
            let mut faults = Faults::default();
            vectorized(
                #[inline(always)]
                || {
                    for (i, row) in rows.chunks_exact_mut(columns).enumerate() {
                        let at = task * work.task_rows() + i;
                        let Ok(scale) = work.row_scale(row, at, &mut faults) else { continue };
                        for (g, part) in row.chunks_exact_mut(work.group_size).enumerate() {
                            if let Some(grid) = work.fit(part, scale, (at, g), &mut faults) {
                                grid.fake_quantize(part);
                            }
                        }
                    }
                },
            );
            faults
        })
        .collect();
    Faults::verdict(outcomes)
}

/// The first-level scales of rows `[n, columns]`, if the scheme has two levels.
///
/// # Errors
/// See [`quantize_rows`].
pub fn row_scales(
    weights: &[f32],
    columns: usize,
    scheme: LinearScheme,
) -> Result<Option<Vec<f32>>, RowsError> {
    if !scheme.is_progressive() {
        return Ok(None);
    }
    let count = SourceRows::Floats(weights).count(columns)?;
    let work = RowQuantizer::new(columns, scheme, Dtype::F32, None, count)?;
    let mut faults = Faults::default();
    let rows = weights.chunks_exact(columns).enumerate();
    let scales =
        rows.map(|(at, row)| work.row_scale(row, at, &mut faults).ok().flatten().unwrap_or(1.0)).collect();
    Faults::verdict(vec![faults])?;
    Ok(Some(scales))
}

/// Applies [`fake_quantize`] to one group of every row, `[rows, group_size]`, with the same result as in complete rows.
/// `bounds` are the clip bounds of these groups, `[rows]`; `row_scales` are the first-level scales, if the scheme has
/// two levels.
///
/// # Errors
/// See [`quantize_rows`].
pub fn fake_quantize_group(
    weights: &mut [f32],
    group_size: usize,
    (scheme, scale_dtype): (LinearScheme, Dtype),
    bounds: &[f32],
    row_scales: Option<&[f32]>,
) -> Result<(), RowsError> {
    let count = SourceRows::Floats(weights).count(group_size)?;
    let rule = rule(scheme, scale_dtype)?;
    let work = RowQuantizer::of(group_size, group_size, rule, Some(bounds), count)?;
    check_len(
        "row scales",
        row_scales.map_or(0, <[f32]>::len),
        if scheme.is_progressive() { count } else { 0 },
    )?;
    let mut faults = Faults::default();
    vectorized(
        #[inline(always)]
        || {
            for (at, part) in weights.chunks_exact_mut(group_size).enumerate() {
                if let Some(grid) = work.fit(part, row_scales.map(|s| s[at]), (at, 0), &mut faults) {
                    grid.fake_quantize(part);
                }
            }
        },
    );
    Faults::verdict(vec![faults])
}

struct RowQuantizer<'a> {
    rows: usize,
    columns: usize,
    group_size: usize,
    rule: GridRule,
    clip: Option<&'a [f32]>,
    /// The scales that rows share, and the position in the weight of the first of these rows.
    shared: &'a SharedScales,
    first: usize,
}

impl<'a> RowQuantizer<'a> {
    fn new(
        columns: usize,
        scheme: LinearScheme,
        scale_dtype: Dtype,
        clip: Option<&'a [f32]>,
        rows: usize,
    ) -> Result<Self, RowsError> {
        Self::of(columns, group_size(scheme, columns)?, rule(scheme, scale_dtype)?, clip, rows)
    }

    /// Ignores the scheme's group size.
    fn of(
        columns: usize,
        group_size: usize,
        rule: GridRule,
        clip: Option<&'a [f32]>,
        rows: usize,
    ) -> Result<Self, RowsError> {
        if let Some(clip) = clip {
            check_len("clip bounds", clip.len(), rows * (columns / group_size))?;
            if let Some(m) = clip.iter().find(|m| m.is_nan() || **m < 0.0) {
                return Err(RowsError::Layout(format!(
                    "the clip bound is {m}; it must be at least 0, or infinite for no clipping"
                )));
            }
        }
        Ok(Self { rows, columns, group_size, rule, clip, shared: &SharedScales::None, first: 0 })
    }

    fn sharing(self, shared: &'a SharedScales, first: usize) -> Self {
        Self { shared, first, ..self }
    }

    fn groups(&self) -> usize {
        self.columns / self.group_size
    }

    fn task_rows(&self) -> usize {
        (TASK_ELEMENTS / self.columns).max(1)
    }

    /// Computes codes, scales and zero points of row `at`, and returns the row's error. The buffers hold one row.
    #[inline(always)]
    fn quantize_row(
        &self,
        rows: SourceRows<'_>,
        at: usize,
        mut out: QuantizedRows<'_>,
        (row, rounded): (&mut [f32], &mut [f32]),
        faults: &mut Faults,
    ) -> ErrorStats {
        rows.load(at, row);
        let size = self.group_size;
        let Ok(scale) = self.row_scale(row, at, faults) else { return ErrorStats::default() };
        if let (Some(rows), Some(scale)) = (&mut out.rows, scale) {
            rows[0] = scale;
        }
        for (g, (part, codes)) in row.chunks_exact_mut(size).zip(out.codes.chunks_exact_mut(size)).enumerate()
        {
            let Some(grid) = self.fit(part, scale, (at, g), faults) else { continue };
            grid.quantize(part, codes, &mut rounded[g * size..(g + 1) * size]);
            out.scales[g] = grid.scale();
            if let Some(zeros) = &mut out.zeros {
                zeros[g] = grid.zero();
            }
        }
        if self.clip.is_some() {
            // The error includes clipping.
            rows.load(at, row);
        }
        ErrorStats::of_row(row, rounded, size)
    }

    /// The first-level scale of a row, if there are two levels; records the fault if there is no scale. Clipping
    /// affects only the second level, so that each bound can be evaluated independently.
    #[inline(always)]
    fn row_scale(&self, row: &[f32], at: usize, faults: &mut Faults) -> Result<Option<f32>, ()> {
        if !self.rule.progressive {
            return Ok(None);
        }
        let mut abs_max = 0.0_f32;
        for (g, part) in row.chunks_exact(self.group_size).enumerate() {
            let Some(extent) = Extent::of(part) else {
                faults.non_finite(part, (at * self.groups() + g) * self.group_size);
                return Err(());
            };
            abs_max = abs_max.max(extent.abs_max());
        }
        self.rule.row_scale(abs_max).map_err(|source| faults.grid((at, 0), source))
    }

    /// Clips a group if there are clip bounds, and finds its grid; records the fault if there is no grid. `scale` is
    /// the row's first-level scale, if there are two levels.
    #[inline(always)]
    fn fit(
        &self,
        part: &mut [f32],
        scale: Option<f32>,
        at: (usize, usize),
        faults: &mut Faults,
    ) -> Option<grid::Grid> {
        // Before clipping, which would replace infinity by the bound.
        let Some(mut extent) = Extent::of(part) else {
            faults.non_finite(part, (at.0 * self.groups() + at.1) * self.group_size);
            return None;
        };
        if let Some(clip) = self.clip {
            let bound = clip[at.0 * self.groups() + at.1];
            grid::clip(part, bound);
            extent = Extent { min: extent.min.max(-bound), max: extent.max.min(bound) };
        }
        let fitted = match self.shared {
            SharedScales::None => self.rule.fit_in_row(extent, scale),
            SharedScales::Global { scale, search } => {
                self.rule.fit_below(extent.abs_max(), part, *scale, *search)
            }
            SharedScales::Blocks { .. } => {
                return self.shared.at(self.first + at.0, at.1).map(|scale| self.rule.at_scale(scale));
            }
        };
        fitted.map_err(|source| faults.grid(at, source)).ok()
    }
}

fn rule(scheme: LinearScheme, scale_dtype: Dtype) -> Result<GridRule, RowsError> {
    let rule = ScaleFormat::of(scale_dtype).and_then(|scale| GridRule::new(scheme, scale));
    rule.map_err(|e| RowsError::Scheme(e.to_string()))
}

fn check_len(what: &str, got: usize, expected: usize) -> Result<(), RowsError> {
    if got == expected {
        return Ok(());
    }
    Err(RowsError::Layout(format!("{what}: expected {expected} elements, got {got}")))
}

/// Faults of some rows. The report does not depend on the number of threads.
#[derive(Debug, Default)]
struct Faults {
    non_finite: u64,
    first_index: Option<u64>,
    grid: Option<RowsError>,
}

impl Faults {
    #[cold]
    fn non_finite(&mut self, part: &[f32], start: usize) {
        for (i, _) in part.iter().enumerate().filter(|(_, w)| !w.is_finite()) {
            self.non_finite += 1;
            self.first_index.get_or_insert((start + i) as u64);
        }
    }

    #[cold]
    fn grid(&mut self, (row, group): (usize, usize), source: grid::GridError) {
        self.grid.get_or_insert(RowsError::Grid { row, group, source });
    }

    fn verdict(parts: Vec<Self>) -> Result<(), RowsError> {
        let count = parts.iter().map(|p| p.non_finite).sum();
        if let Some(first_index) = parts.iter().find_map(|p| p.first_index) {
            return Err(RowsError::NonFinite { count, first_index });
        }
        parts.into_iter().find_map(|p| p.grid).map_or(Ok(()), Err)
    }
}

#[cfg(test)]
#[path = "rtn_tests.rs"]
mod tests;
