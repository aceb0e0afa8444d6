//! The blocked solver: rows in tiles, columns in blocks.
//!
//! A tile is stored transposed, with columns in the order of rounding, so that an operation on a column covers many
//! rows. Columns are rounded in runs. One matrix product propagates the errors of a run to the rest of its block, and
//! another one the errors of a block to the rest of the row. If a group's grid is computed when the group is reached,
//! all its weights then include the updates of all earlier columns.

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

use super::super::grid::{Extent, GridError, GridRule, nearest};
use super::super::{
    Levels, QuantizedTensor, RowsError, ScaleContext, SourceRows, group_size, quantize_within, zeroed,
};
use super::{ActOrder, Factor, GptqSettings};
use crate::checkpoint::Dtype;
use crate::scheme::{LinearScheme, ScaleFormat};
use crate::vector::vectorized;

const TILE: usize = 128;
const RUN: usize = 32;

/// A weight quantized by GPTQ.
#[derive(Debug)]
#[non_exhaustive]
pub struct Solved {
    /// Codes, scales and zero points.
    pub tensor: QuantizedTensor,
    /// The mean squared error of the linear's output over outputs and tokens, plus the contribution of damping.
    pub loss: f64,
}

type TileOutcome = Result<TileEnd, RowsError>;

struct TileEnd {
    zeros: Vec<u8>,
    losses: Vec<f64>,
    rows: Vec<f32>,
}

/// Quantizes a weight `[n, k]`, row-major, with the factor of its input's Hessian.
///
/// * `scale_dtype`: F16, BF16 or F32, or the scheme's own dtype if its scales have a fixed format. Scales are rounded
///   to it before codes are computed.
/// * `clip`: bounds `[n, k / group_size]` on the ranges from which grids are computed.
///
/// The factor's columns must be in the order of `settings.act_order`.
///
/// # Errors
/// If the scheme or the scale dtype is not supported, an argument does not match the shape, the group size does not
/// divide `k`, a weight is or becomes NaN or infinite, or a scale overflows its dtype.
pub fn solve(
    rows: SourceRows<'_>,
    shape: [usize; 2],
    scheme: LinearScheme,
    scale_dtype: Dtype,
    clip: Option<&[f32]>,
    factor: &Factor,
    settings: GptqSettings,
) -> Result<Solved, RowsError> {
    solve_within(rows, shape, (scheme, scale_dtype), (clip, ScaleContext::default()), factor, settings)
}

/// [`solve`] for a weight that shares a scale with others, or whose scales are chosen by a different method.
///
/// # Errors
/// As [`solve`].
pub fn solve_within(
    rows: SourceRows<'_>,
    shape: [usize; 2],
    (scheme, scale_dtype): (LinearScheme, Dtype),
    (clip, context): (Option<&[f32]>, ScaleContext),
    factor: &Factor,
    settings: GptqSettings,
) -> Result<Solved, RowsError> {
    let [n, k] = shape;
    let rule = ScaleFormat::of(scale_dtype).and_then(|scale| GridRule::new(scheme, scale));
    let rule = rule.map_err(|e| RowsError::Scheme(e.to_string()))?;
    let group_size = group_size(scheme, k)?;
    let groups = k / group_size;
    let layout = |what: &str| Err(RowsError::Layout(what.to_owned()));
    if rows.count(k)? != n || factor.columns().len() != k {
        return layout("weights or the factor do not match the shape");
    }
    if clip.is_some_and(|clip| clip.len() != n * groups || clip.iter().any(|m| m.is_nan() || *m < 0.0)) {
        return layout("clip bounds are not one magnitude per group");
    }
    // Grids of floating-point codes are computed from the float weights, because a scale that is shared by rows or
    // searched for must be known before the first column.
    let settled = match rule.float_format() {
        Some(_) => Some(quantize_within(rows, shape, (scheme, scale_dtype), clip, context)?.0),
        None => None,
    };
    let work = SolveArguments {
        rows,
        k,
        group_size,
        rule,
        clip,
        factor,
        block: settings.block_size.max(1),
        is_static: settings.act_order == ActOrder::StaticGroups || settled.is_some(),
        settled: settled.as_ref().map(|tensor| &tensor.scales[..]),
    };
    let (codes, scales) = (zeroed(n * k)?, zeroed(n * groups)?);
    let mut tensor = QuantizedTensor::new(shape, scheme, codes, scales, scale_dtype);
    tensor.zeros = (!scheme.is_symmetric()).then(|| zeroed(n * groups)).transpose()?;
    tensor.global = settled.as_ref().and_then(|tensor| tensor.global);
    let codes = tensor.codes.par_chunks_mut(TILE * k);
    let scales = tensor.scales.par_chunks_mut(TILE * groups);
    let tiles = codes.zip(scales).enumerate();
    let outcomes: Vec<TileOutcome> = tiles
        .map_init(Tile::default, |tile, (i, (codes, scales))| {
            tile.start(&work, i * TILE, codes.len() / k)?;
            tile.solve(&work)?;
            let zeros = tile.store(&work, codes, scales);
            let rows = tile.rows.iter().copied().flatten().collect();
            Ok(TileEnd { zeros, losses: tile.losses.clone(), rows })
        })
        .collect();
    let (mut loss, mut row_scales) = (0.0, Vec::new());
    for (outcome, row) in outcomes.into_iter().zip((0..).step_by(TILE)) {
        let TileEnd { zeros, losses, rows } = outcome?;
        row_scales.extend(rows);
        if let Some(all) = &mut tensor.zeros {
            all[row * groups..row * groups + zeros.len()].copy_from_slice(&zeros);
        }
        if let Some(at) = losses.iter().position(|l| !l.is_finite()) {
            return Err(RowsError::Grid { row: row + at, group: 0, source: GridError::NonFinite });
        }
        loss += losses.iter().sum::<f64>();
    }
    tensor.levels = scheme.is_progressive().then(|| Levels::of(&tensor.scales, row_scales));
    // Each loss is the sum over a row of ((w − q) / U_cc)² / 2. With H = 2/N Σ x xᵀ, this is the mean squared error of
    // the row's output.
    Ok(Solved { tensor, loss: loss / n.max(1) as f64 })
}

struct SolveArguments<'a> {
    rows: SourceRows<'a>,
    k: usize,
    group_size: usize,
    rule: GridRule,
    clip: Option<&'a [f32]>,
    factor: &'a Factor,
    block: usize,
    is_static: bool,
    settled: Option<&'a [f32]>,
}

impl SolveArguments<'_> {
    fn groups(&self) -> usize {
        self.k / self.group_size
    }

    /// The first-level scale of a row, computed before any of its columns change; `None` if there is only one level.
    fn row_scale(&self, row: &[f32], at: usize) -> Result<Option<f32>, RowsError> {
        if !self.rule.is_progressive() {
            return Ok(None);
        }
        let mut abs_max = 0.0_f32;
        for (group, part) in row.chunks_exact(self.group_size).enumerate() {
            let fault = |source| RowsError::Grid { row: at, group, source };
            let extent = Extent::of(part).ok_or(fault(GridError::NonFinite))?;
            abs_max = abs_max.max(extent.abs_max());
        }
        self.rule.row_scale(abs_max).map_err(|source| RowsError::Grid { row: at, group: 0, source })
    }

    /// The end of the run or block that starts at `at` and has at most `max` columns. If grids are computed when groups
    /// are reached, it consists of whole groups, or is part of one group.
    fn step(&self, at: usize, max: usize, end: usize) -> usize {
        let step = match self.is_static {
            true => max,
            false if self.group_size <= max => max / self.group_size * self.group_size,
            false => max.min(self.group_size - at % self.group_size),
        };
        end.min(at + step)
    }
}

/// The state of some rows. In arrays `[k, r]` or `[groups, r]`, the values of a column or group for the `r` rows are
/// contiguous.
#[derive(Default)]
struct Tile {
    first: usize,
    r: usize,
    /// `[k, r]`, in the order in which columns are rounded.
    weights: Vec<f32>,
    /// Codes, `[k, r]`, in the same order.
    codes: Vec<u8>,
    /// The errors of a block's columns, `[block, r]`.
    errors: Vec<f32>,
    /// Grids, `[groups, r]`: the scale, and the lowest and the highest code relative to the zero point.
    scales: Vec<f32>,
    lows: Vec<f32>,
    highs: Vec<f32>,
    zeros: Vec<u8>,
    rows: Vec<Option<f32>>,
    losses: Vec<f64>,
}

impl Tile {
    fn start(&mut self, work: &SolveArguments<'_>, first: usize, r: usize) -> Result<(), RowsError> {
        let (k, groups) = (work.k, work.groups());
        (self.first, self.r) = (first, r);
        self.weights.resize(k * r, 0.0);
        self.codes.resize(k * r, 0);
        self.errors.resize(work.block.min(k) * r, 0.0);
        for grid in [&mut self.scales, &mut self.lows, &mut self.highs] {
            grid.resize(groups * r, 0.0);
        }
        self.zeros.resize(groups * r, 0);
        self.losses.clear();
        self.losses.resize(r, 0.0);
        self.rows.clear();
        let mut row = vec![0.0; k];
        for i in 0..r {
            work.rows.load(first + i, &mut row);
            self.rows.push(work.row_scale(&row, first + i)?);
            for (at, &column) in work.factor.columns().iter().enumerate() {
                self.weights[at * r + i] = row[column];
            }
        }
        Ok(())
    }

    fn solve(&mut self, work: &SolveArguments<'_>) -> Result<(), RowsError> {
        let k = work.k;
        if let Some(scales) = work.settled {
            let (r, groups) = (self.r, work.groups());
            for (i, row) in scales[self.first * groups..].chunks_exact(groups).take(r).enumerate() {
                for (group, scale) in row.iter().enumerate() {
                    self.scales[group * r + i] = *scale;
                }
            }
        } else if work.is_static {
            let columns = work.factor.columns();
            let mut places = vec![0; k];
            for (at, &column) in columns.iter().enumerate() {
                places[column] = at;
            }
            for (group, places) in places.chunks_exact(work.group_size).enumerate() {
                self.find_grids(work, group, places.iter().copied())?;
            }
        }
        let mut at = 0;
        while at < k {
            let end = work.step(at, work.block, k);
            let mut run = at;
            while run < end {
                let run_end = work.step(run, RUN, end);
                self.round(work, at, run..run_end)?;
                self.update(work, run..run_end, at, end);
                run = run_end;
            }
            self.update(work, at..end, at, k);
            at = end;
        }
        Ok(())
    }

    fn find_grids(
        &mut self,
        work: &SolveArguments<'_>,
        group: usize,
        places: impl Iterator<Item = usize>,
    ) -> Result<(), RowsError> {
        let r = self.r;
        let (mut min, mut max, mut check) = (vec![0.0_f32; r], vec![0.0_f32; r], vec![0.0_f32; r]);
        let weights = &self.weights;
        for place in places {
            let column = &weights[place * r..(place + 1) * r];
            vectorized(
                #[inline(always)]
                || {
                    for (i, &w) in column.iter().enumerate() {
                        min[i] = if w < min[i] { w } else { min[i] };
                        max[i] = if w > max[i] { w } else { max[i] };
                        check[i] += w * 0.0;
                    }
                },
            );
        }
        for i in 0..r {
            let row = self.first + i;
            let fault = |source| RowsError::Grid { row, group, source };
            if check[i] != 0.0 {
                return Err(fault(GridError::NonFinite));
            }
            let mut extent = Extent { min: min[i], max: max[i] };
            if let Some(clip) = work.clip {
                let bound = clip[row * work.groups() + group];
                extent.min = extent.min.max(-bound);
                extent.max = extent.max.min(bound);
            }
            let grid = work.rule.fit_in_row(extent, self.rows[i]).map_err(fault)?;
            let at = group * r + i;
            (self.lows[at], self.highs[at]) = grid.limits();
            self.scales[at] = grid.scale();
            self.zeros[at] = grid.zero();
        }
        Ok(())
    }

    /// Rounds a run of columns of the block that starts at `block`, and propagates each column's errors within the run.
    fn round(
        &mut self,
        work: &SolveArguments<'_>,
        block: usize,
        run: std::ops::Range<usize>,
    ) -> Result<(), RowsError> {
        let (r, size) = (self.r, work.group_size);
        let factor = work.factor;
        for c in run.clone() {
            let group = factor.columns()[c] / size;
            if !work.is_static && c.is_multiple_of(size) {
                self.find_grids(work, group, c..c + size)?;
            }
            let grids = group * r..(group + 1) * r;
            let (scales, zeros) = (&self.scales[grids.clone()], &self.zeros[grids.clone()]);
            let (lows, highs) = (&self.lows[grids.clone()], &self.highs[grids]);
            let (now, later) = self.weights[c * r..run.end * r].split_at_mut(r);
            let codes = &mut self.codes[c * r..(c + 1) * r];
            let errors = &mut self.errors[(c - block) * r..(c - block + 1) * r];
            let ratios = factor.ratios().row(c, c + 1..run.end);
            let (weight, losses) = (factor.weights()[c] / 2.0, &mut self.losses);
            vectorized(
                #[inline(always)]
                || {
                    match work.rule.float_format() {
                        None => {
                            for i in 0..r {
                                let steps = nearest(now[i], scales[i], (lows[i], highs[i]));
                                codes[i] = (steps as i32 + i32::from(zeros[i])) as u8;
                                errors[i] = now[i] - steps * scales[i];
                            }
                        }
                        Some(format) => {
                            for i in 0..r {
                                let number = now[i] / scales[i];
                                codes[i] = format.code(number);
                                errors[i] = now[i] - format.round(number) * scales[i];
                            }
                        }
                    }
                    for i in 0..r {
                        let error = f64::from(errors[i]);
                        losses[i] += error * error * weight;
                    }
                    for (column, &ratio) in later.chunks_exact_mut(r).zip(ratios) {
                        for (w, e) in column.iter_mut().zip(&*errors) {
                            *w -= e * ratio;
                        }
                    }
                },
            );
        }
        Ok(())
    }

    /// Propagates the errors of `columns`, which are in the block that starts at `block`, to the columns after them, up
    /// to `end`.
    fn update(
        &mut self,
        work: &SolveArguments<'_>,
        columns: std::ops::Range<usize>,
        block: usize,
        end: usize,
    ) {
        let r = self.r;
        let (depth, width) = (columns.len(), end - columns.end);
        if width == 0 {
            return;
        }
        let errors = &self.errors[(columns.start - block) * r..(columns.end - block) * r];
        let weights = &mut self.weights[columns.end * r..end * r];
        let errors = MatRef::from_column_major_slice(errors, r, depth);
        let weights = MatMut::from_column_major_slice_mut(weights, r, width);
        let later = columns.end..end;
        work.factor.ratios().with_panel(columns, later, |ratios| {
            matmul(weights, Accum::Add, errors, ratios, -1.0_f32, Par::Seq);
        });
    }

    fn store(&self, work: &SolveArguments<'_>, codes: &mut [u8], scales: &mut [f32]) -> Vec<u8> {
        let (k, r, groups) = (work.k, self.r, work.groups());
        for (i, row) in codes.chunks_exact_mut(k).enumerate() {
            for (at, &column) in work.factor.columns().iter().enumerate() {
                row[column] = self.codes[at * r + i];
            }
        }
        let mut zeros = vec![0; r * groups];
        for i in 0..r {
            for group in 0..groups {
                scales[i * groups + group] = self.scales[group * r + i];
                zeros[i * groups + group] = self.zeros[group * r + i];
            }
        }
        zeros
    }
}
