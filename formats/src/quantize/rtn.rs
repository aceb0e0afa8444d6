//! Round to nearest: every group of a matrix gets its [`Grid`](super::grid::Grid) and codes.
//!
//! The baseline method, and the last step of those that rewrite weights first (AWQ, clipping).
//! Work is split into runs of whole rows whose size depends on the width alone, and nothing is
//! summed across rows, so results do not depend on the number of threads. A thread needs one row in
//! `f32` beside its inputs and outputs. Rows are spread over the rayon pool the caller installed.

use rayon::prelude::*;

use super::error_stats::ErrorStats;
use super::grid::{self, Extent, GridRule};
use super::progressive::Levels;
use super::rows::{Rows, RowsError, group_size};
use super::shared::{ScaleContext, SharedScales};
use super::tensor::QuantizedTensor;
use crate::Result;
use crate::checkpoint::Dtype;
use crate::scheme::{LinearScheme, ScaleFormat};
use crate::vector::vectorized;

/// Weights in one unit of parallel work: large beside the cost of a hand-over, small beside a
/// matrix.
const TASK_ELEMENTS: usize = 1 << 16;

/// Where [`quantize_rows`] puts what it computes, for `r` rows of `k` weights.
#[derive(Debug)]
pub struct QuantizedRows<'a> {
    /// `[r, k]` row-major, one code a byte.
    pub codes: &'a mut [u8],
    /// `[r, k / group_size]` row-major.
    pub scales: &'a mut [f32],
    /// As `scales`, for asymmetric schemes; symmetric ones have none.
    pub zeros: Option<&'a mut [u8]>,
    /// `[r]`, for progressive schemes, whose `scales` are multiples of these; others have none.
    pub rows: Option<&'a mut [f32]>,
}

/// Quantizes a weight `[n, k]`, row-major, to the nearest codes.
///
/// * `scale_dtype`: F16, BF16 or F32. Scales are rounded to it before codes are computed.
/// * `clip`: a bound `m ≥ 0` for each row and group, `[n, k / group_size]` row-major: weights are
///   clamped to `[−m, m]` first. Infinity leaves a group as it is.
///
/// # Errors
/// When the group size does not divide `k`, a weight is not finite, or a scale overflows its type:
/// the error names the tensor, the row and the group.
pub fn quantize_rtn(
    name: &str,
    weights: &[f32],
    shape: [usize; 2],
    scheme: LinearScheme,
    scale_dtype: Dtype,
    clip: Option<&[f32]>,
) -> Result<QuantizedTensor> {
    quantize_tensor(Rows::Floats(weights), shape, scheme, scale_dtype, clip)
        .map(|(tensor, _)| tensor)
        .map_err(|e| e.within(name, None))
}

/// Quantizes a whole weight `[n, k]`, from values or straight from a file's bytes, and says what
/// was lost by it: equal bit for bit to [`ErrorStats::of`].
///
/// # Errors
/// As [`quantize_rows`].
pub fn quantize_tensor(
    rows: Rows<'_>,
    shape: [usize; 2],
    scheme: LinearScheme,
    scale_dtype: Dtype,
    clip: Option<&[f32]>,
) -> Result<(QuantizedTensor, ErrorStats), RowsError> {
    quantize_within(rows, shape, (scheme, scale_dtype), clip, ScaleContext::default())
}

/// The same for a weight that shares a scale with others, or whose scales are chosen in another way.
///
/// # Errors
/// As [`quantize_rows`].
pub fn quantize_within(
    rows: Rows<'_>,
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
        codes: vec![0; n * k],
        scales: vec![0.0; groups],
        scale_dtype,
        zeros: (!scheme.is_symmetric()).then(|| vec![0; groups]),
        levels: None,
        global: None,
        input: None,
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
    let work = Work::new(k, scheme, scale_dtype, clip, rows.count(k)?)?.sharing(&shared, 0);
    let stats = quantize_with(&work, rows, out)?;
    tensor.levels = row_scales.map(|rows| Levels::of(&tensor.scales, rows));
    Ok((tensor, stats))
}

/// Quantizes rows of width `columns` into the caller's slices: [`quantize_tensor`] for a weight that
/// is taken in parts. What comes back is the error of these rows, against the weights before
/// clipping. Of a scheme whose rows share scales, these must be all rows.
///
/// # Errors
/// As [`quantize_rtn`]; also [`RowsError::Layout`] when slices do not fit each other. Of several
/// faults, non-finite weights are reported first, with the count over all rows given. `out` then
/// holds nothing of use.
pub fn quantize_rows(
    rows: Rows<'_>,
    columns: usize,
    scheme: LinearScheme,
    scale_dtype: Dtype,
    clip: Option<&[f32]>,
    out: QuantizedRows<'_>,
) -> Result<ErrorStats, RowsError> {
    let shared = SharedScales::of(rows, columns, (scheme, scale_dtype), ScaleContext::default())?;
    let work = Work::new(columns, scheme, scale_dtype, clip, rows.count(columns)?)?.sharing(&shared, 0);
    quantize_with(&work, rows, out)
}

fn quantize_with(work: &Work<'_>, rows: Rows<'_>, out: QuantizedRows<'_>) -> Result<ErrorStats, RowsError> {
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

/// Replaces weights, row-major in rows of width `columns`, by what quantizing them to `scheme` and
/// back would give: equal bit for bit to [`quantize_rtn`] and
/// [`dequantize`](QuantizedTensor::dequantize). The searches for scales and clips run on it.
///
/// # Errors
/// As [`quantize_rows`]; the weights then hold nothing of use.
pub fn fake_quantize(
    weights: &mut [f32],
    columns: usize,
    scheme: LinearScheme,
    scale_dtype: Dtype,
    clip: Option<&[f32]>,
) -> Result<(), RowsError> {
    let shared =
        SharedScales::of(Rows::Floats(weights), columns, (scheme, scale_dtype), ScaleContext::default())?;
    fake_quantize_within(weights, columns, (scheme, scale_dtype), clip, (&shared, 0))
}

/// The same for rows of a weight of which these begin at the row `first`, with the scales that its rows share.
///
/// # Errors
/// As [`fake_quantize`].
pub fn fake_quantize_within(
    weights: &mut [f32],
    columns: usize,
    (scheme, scale_dtype): (LinearScheme, Dtype),
    clip: Option<&[f32]>,
    (shared, first): (&SharedScales, usize),
) -> Result<(), RowsError> {
    let count = Rows::Floats(weights).count(columns)?;
    let work = Work::new(columns, scheme, scale_dtype, clip, count)?.sharing(shared, first);
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

/// The first level's scales of rows `[n, columns]`, where a scheme has two.
///
/// # Errors
/// As [`quantize_rows`].
pub fn row_scales(
    weights: &[f32],
    columns: usize,
    scheme: LinearScheme,
) -> Result<Option<Vec<f32>>, RowsError> {
    if !scheme.is_progressive() {
        return Ok(None);
    }
    let count = Rows::Floats(weights).count(columns)?;
    let work = Work::new(columns, scheme, Dtype::F32, None, count)?;
    let mut faults = Faults::default();
    let rows = weights.chunks_exact(columns).enumerate();
    let scales =
        rows.map(|(at, row)| work.row_scale(row, at, &mut faults).ok().flatten().unwrap_or(1.0)).collect();
    Faults::verdict(vec![faults])?;
    Ok(Some(scales))
}

/// [`fake_quantize`] of one group of every row, `[rows, group_size]`: rounded as it is where it stands, in rows that
/// have these scales if the scheme has two levels.
///
/// # Errors
/// As [`quantize_rows`].
pub fn fake_quantize_group(
    weights: &mut [f32],
    group_size: usize,
    (scheme, scale_dtype): (LinearScheme, Dtype),
    bounds: &[f32],
    row_scales: Option<&[f32]>,
) -> Result<(), RowsError> {
    let count = Rows::Floats(weights).count(group_size)?;
    let rule = rule(scheme, scale_dtype)?;
    let work = Work::of(group_size, group_size, rule, Some(bounds), count)?;
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

/// A checked request: how rows are cut and rounded.
struct Work<'a> {
    rows: usize,
    columns: usize,
    group_size: usize,
    rule: GridRule,
    clip: Option<&'a [f32]>,
    /// What rows share, and the place of the first of these in the weight.
    shared: &'a SharedScales,
    first: usize,
}

impl<'a> Work<'a> {
    fn new(
        columns: usize,
        scheme: LinearScheme,
        scale_dtype: Dtype,
        clip: Option<&'a [f32]>,
        rows: usize,
    ) -> Result<Self, RowsError> {
        Self::of(columns, group_size(scheme, columns)?, rule(scheme, scale_dtype)?, clip, rows)
    }

    /// Of rows that are cut into groups of this size, which divides them, whatever the scheme's own is.
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
                return Err(RowsError::Layout(format!("clip bound {m} is not a magnitude")));
            }
        }
        Ok(Self { rows, columns, group_size, rule, clip, shared: &SharedScales::None, first: 0 })
    }

    /// The same for rows that share scales and begin at the row `first`.
    fn sharing(self, shared: &'a SharedScales, first: usize) -> Self {
        Self { shared, first, ..self }
    }

    fn groups(&self) -> usize {
        self.columns / self.group_size
    }

    /// Rows in one unit of parallel work.
    fn task_rows(&self) -> usize {
        (TASK_ELEMENTS / self.columns).max(1)
    }

    /// Codes, scales and zeros of row `at`, and the row's error. `buffers` are as long as a row.
    #[inline(always)]
    fn quantize_row(
        &self,
        rows: Rows<'_>,
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
            grid.encode(part, codes);
            grid.decode(codes, &mut rounded[g * size..(g + 1) * size]);
            out.scales[g] = grid.scale();
            if let Some(zeros) = &mut out.zeros {
                zeros[g] = grid.zero();
            }
        }
        if self.clip.is_some() {
            // What clipping took off is lost too.
            rows.load(at, row);
        }
        ErrorStats::of_row(row, rounded)
    }

    /// The first level's scale of a row, where there are two; of all of it: clipping narrows the second level alone, so
    /// that a bound can be judged by itself. Notes why it has none.
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

    /// Clips a group of a row with this scale and finds its grid, or notes why it has none.
    #[inline(always)]
    fn fit(
        &self,
        part: &mut [f32],
        scale: Option<f32>,
        at: (usize, usize),
        faults: &mut Faults,
    ) -> Option<grid::Grid> {
        // Looked at before clipping, which would turn infinity into a bound.
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

/// The rule of a scheme with scales of this type.
fn rule(scheme: LinearScheme, scale_dtype: Dtype) -> Result<GridRule, RowsError> {
    let rule = ScaleFormat::of(scale_dtype).and_then(|scale| GridRule::new(scheme, scale));
    rule.map_err(|e| RowsError::Scheme(e.to_string()))
}

fn check_len(what: &str, got: usize, expected: usize) -> Result<(), RowsError> {
    if got == expected {
        return Ok(());
    }
    Err(RowsError::Layout(format!("{what}: {got} elements, {expected} expected")))
}

/// What went wrong in some rows, gathered so that the report is the same for any number of threads.
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

    /// The verdict over all rows, from the faults of their parts in order.
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
