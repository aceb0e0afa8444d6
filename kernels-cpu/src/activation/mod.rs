//! Activations become integers of 8 bits, in the order in which the kernels read them.
//!
//! Per token: `s = max |x| / 127`, `a = round(x · (127 / max |x|))` half to even, so `x ≈ s · a` with `a` from
//! −127 to 127. A row of zeros, or whose largest magnitude is below [`SMALLEST`], has `s = 0`; a row that
//! holds NaN or an infinity has `s = NaN`, and so has all that is computed from it.
//!
//! Static: one scale and one zero for all tokens, found beforehand: `a = clamp(round(x · (1 / s)) + a₀, −128, 127)`,
//! `x ≈ s · (a − a₀)`. Such codes reach −128, with a zero of 0 too: the widths that [`Layout::of`] takes allow for it.
//!
//! Beside the codes stand the sums over the groups of the weights, which a grid's zeros are multiplied with.
//!
//! What is rounded may be the activations themselves, their RMSNorm, or `silu(gate) · up`: a row is made in memory
//! that stays in the first caches, and rounded from there. Activations are `f32`, f16 or bf16 ([`Element`]); all
//! arithmetic is in `f32`, in the order that [`reference`](crate::reference) has, and every instruction set, split and
//! number of threads gives the same bits.
//!
//! Rows lie in strips of as many as a tile takes, up to twelve or, where that is all, sixteen; of a strip step by step the eight codes of
//! every row: a kernel reads from beginning to end. For a tile unit they lie in tiles as well.
#![allow(unsafe_code, reason = "vector instructions, and threads that fill parts of one vector")]

mod dispatch;
mod element;
pub(crate) mod float;
mod forms;
mod rows;
mod source;
pub(crate) mod tiles;

pub use self::element::Element;
pub use self::float::{Bf16Parts, FloatRows};
pub use self::forms::{narrow, rms_norm, silu_mul};
use self::rows::{Grid, Place};
pub use self::source::{GateUp, RmsNorm};
use self::source::{Gated, Norm, Plain, Source};
use self::tiles::{TILE_ROWS, Tiling, resize_lines};
use crate::layout::{Line, STEP};
use crate::linear::{MAX_ROWS, ONE_STRIP, TILED_ROWS, UNTILED_GROUP};
use crate::parallel::Disjoint;
use crate::{IsaToken, KernelError, Layout, Parallel};

/// Rows whose largest magnitude is below are taken for zero: `127 / SMALLEST` is still a number.
pub const SMALLEST: f32 = 1e-36;

/// How the `k` input features of a row are cut, which is up to the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowLayout {
    k: usize,
    group_size: usize,
    steps: usize,
}

impl RowLayout {
    /// That of the rows which these weights are multiplied with.
    pub fn of(weights: &Layout) -> Self {
        Self { k: weights.k(), group_size: weights.group_size(), steps: weights.steps() }
    }

    pub(crate) fn group_size(self) -> usize {
        self.group_size
    }

    fn groups(self) -> usize {
        self.k / self.group_size
    }

    fn padded(self) -> usize {
        self.groups() * self.steps * STEP
    }
}

/// One scale and zero for all tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StaticScale {
    /// Above zero and finite.
    pub scale: f32,
    /// −128 to 127.
    pub zero: i8,
}

/// Rows `[m, k]` as integers.
#[derive(Debug, Clone)]
pub struct Int8Rows {
    token: IsaToken,
    pub(crate) m: usize,
    pub(crate) layout: Option<RowLayout>,
    /// `[strips][padded_k / STEP][rows of the strip][STEP]`
    pub(crate) codes: Vec<i8>,
    /// `[strips][groups][rows of the strip]`
    pub(crate) sums: Vec<i32>,
    /// `−8 · sums`: what codes of 4 bits without a zero of their own count too much.
    pub(crate) eights: Vec<i32>,
    /// `[m]`
    pub(crate) scales: Vec<f32>,
    pub(crate) zero: i32,
    /// The same in the order of a tile unit, where the token has one and there are rows enough for it.
    pub(crate) tiling: Option<Tiling>,
    pub(crate) tiles: Vec<Line>,
    pub(crate) tile_sums: Vec<i32>,
    /// `[strips][k]`, where rows are made before they are rounded.
    made: Vec<f32>,
}

impl Default for Int8Rows {
    /// No rows yet, on the widest instructions there are.
    fn default() -> Self {
        Self::new(IsaToken::detect())
    }
}

/// Where the rows of strip `i` begin and end: strips differ by at most one row.
pub(crate) fn strip(m: usize, i: usize) -> core::ops::Range<usize> {
    let count = strips(m);
    let start = |i: usize| i * (m / count) + i.min(m % count);
    start(i)..start(i + 1)
}

pub(crate) fn strips(m: usize) -> usize {
    if m <= ONE_STRIP { 1 } else { m.div_ceil(MAX_ROWS) }
}

/// So many values, of which those that were there stay.
pub(crate) fn resize<T: Copy + Default>(values: &mut Vec<T>, len: Option<usize>) -> Result<(), KernelError> {
    let len = len.ok_or(KernelError::TooLarge("the activations"))?;
    let missing = len.saturating_sub(values.len());
    values.try_reserve(missing).map_err(|_| KernelError::Memory("the activations"))?;
    values.resize(len, T::default());
    Ok(())
}

impl Int8Rows {
    /// No rows yet. Which instructions make them changes no bit.
    pub fn new(token: IsaToken) -> Self {
        let (codes, scales, made) = (Vec::new(), Vec::new(), Vec::new());
        let (sums, eights) = (Vec::new(), Vec::new());
        let (tiling, tiles, tile_sums) = (None, Vec::new(), Vec::new());
        Self {
            token,
            m: 0,
            layout: None,
            codes,
            sums,
            eights,
            scales,
            zero: 0,
            tiling,
            tiles,
            tile_sums,
            made,
        }
    }

    /// Rows.
    pub fn m(&self) -> usize {
        self.m
    }

    /// The zero of all codes; 0 where each row has a scale of its own.
    pub fn zero(&self) -> i32 {
        self.zero
    }

    /// The scale of every row.
    pub fn scales(&self) -> &[f32] {
        &self.scales[..self.m]
    }

    /// Quantizes rows `[m, k]`, row-major, each by its own largest magnitude. What was held is replaced, and
    /// its memory used again. Where `parallel` unwinds, or memory is short, there are no rows.
    ///
    /// # Errors
    /// When `x` is not whole rows of the width that the layout says, or memory is short.
    pub fn quantize<E: Element>(
        &mut self,
        x: &[E],
        layout: RowLayout,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        self.fill(&Plain::new(self.token, x, layout.k)?, layout, None, parallel)
    }

    /// Quantizes rows `[m, k]` by one scale and zero.
    ///
    /// # Errors
    /// When `x` is not whole rows, or the scale or its inverse is no number above zero.
    pub fn quantize_static<E: Element>(
        &mut self,
        x: &[E],
        layout: RowLayout,
        by: StaticScale,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        self.fill(&Plain::new(self.token, x, layout.k)?, layout, Some(by), parallel)
    }

    /// Quantizes the RMSNorm of rows `[m, k]`, per token or `by` one scale and zero.
    ///
    /// With a residual, `[m, k]`, each row is added to it first: `residual += x`, rounded to its type, and what
    /// stands there then is normed. A row whose sum of squares leaves `f32` counts as one that is not finite.
    ///
    /// # Errors
    /// As [`quantize_static`](Self::quantize_static), and when a length or the norm's ε is none.
    pub fn quantize_rms_norm<E: Element>(
        &mut self,
        x: &[E],
        norm: RmsNorm<'_>,
        residual: Option<&mut [E]>,
        layout: RowLayout,
        by: Option<StaticScale>,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        // Before the residual changes.
        by.map_or(Ok(0.0), StaticScale::inverse)?;
        self.fill(&Norm::new(self.token, x, residual, norm, layout.k)?, layout, by, parallel)
    }

    /// Quantizes `silu(gate) · up`, per token or `by` one scale and zero; see
    /// [`reference::silu`](crate::reference::silu).
    ///
    /// # Errors
    /// As [`quantize_static`](Self::quantize_static), and when the two differ in length.
    pub fn quantize_silu_mul<E: Element>(
        &mut self,
        x: GateUp<'_, E>,
        layout: RowLayout,
        by: Option<StaticScale>,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        self.fill(&Gated::new(self.token, x, layout.k)?, layout, by, parallel)
    }

    fn fill(
        &mut self,
        source: &dyn Source,
        layout: RowLayout,
        by: Option<StaticScale>,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let fixed = by.map(|by| Ok((by, by.inverse()?))).transpose()?;
        let (k, groups, padded, m) = (layout.k, layout.groups(), layout.padded(), source.m());
        let lent = if source.is_made() { k } else { 0 };
        // No rows until all are there: threads of the caller may unwind.
        (self.m, self.layout, self.tiling) = (0, None, None);
        self.scales.clear();
        let tiled = self.token.has_tiles() && m >= TILED_ROWS && layout.group_size > UNTILED_GROUP;
        let tiling = tiled.then(|| Tiling::new(m, layout, STEP, 1));
        if let Some(tiling) = tiling {
            resize_lines(&mut self.tiles, tiling.bytes(m))?;
            resize(&mut self.tile_sums, tiling.sums(m))?;
        }
        // All that stays is overwritten.
        resize(&mut self.codes, m.checked_mul(padded))?;
        resize(&mut self.sums, m.checked_mul(groups))?;
        resize(&mut self.eights, m.checked_mul(groups))?;
        resize(&mut self.scales, Some(m))?;
        let made = strips(m).checked_mul(lent).map(|made| made.max(self.made.len()));
        resize(&mut self.made, made)?;
        let (codes, sums) = (Disjoint::new(&mut self.codes), Disjoint::new(&mut self.sums));
        let (eights, scales) = (Disjoint::new(&mut self.eights), Disjoint::new(&mut self.scales));
        let (made, token) = (Disjoint::new(&mut self.made), self.token);
        let (tiles, tile_sums) = (Disjoint::new(&mut self.tiles), Disjoint::new(&mut self.tile_sums));
        let quantize = |i| {
            let strip = strip(m, i);
            let at = strip.start * groups..strip.end * groups;
            // SAFETY: strips are disjoint, and each is asked for once.
            let codes = unsafe { codes.part(strip.start * padded..strip.end * padded) };
            // SAFETY: as above.
            let (sums, eights) = unsafe { (sums.part(at.clone()), eights.part(at)) };
            // SAFETY: as above.
            let (scales, made) = unsafe { (scales.part(strip.clone()), made.part(i * lent..(i + 1) * lent)) };
            let rows = strip.len();
            for (r, scale) in scales.iter_mut().enumerate() {
                // SAFETY: each row is in one strip.
                let (row, largest) = unsafe { source.row(strip.start + r, made) };
                let grid = match fixed {
                    Some((by, inverse)) => Grid::fixed(by, inverse, largest),
                    None => Grid::of(largest),
                };
                *scale = grid.scale;
                let place = Place { layout, r, rows, codes: &mut *codes, sums: &mut *sums };
                match fixed {
                    Some(_) => dispatch::quantize::<true>(token, row, grid, place),
                    None => dispatch::quantize::<false>(token, row, grid, place),
                }
                if let Some(tiling) = tiling {
                    let (tile, at) = ((strip.start + r) / TILE_ROWS, (strip.start + r) % TILE_ROWS);
                    // SAFETY: the vectors were resized for all rows of this tiling; each row is in one strip, and writes
                    // to its own places only.
                    unsafe {
                        let across = tiling.rows * tiling.groups * tiling.blocks * tiling.row_bytes();
                        let to = tiles.pointer().cast::<i8>().add(tile * across);
                        tiles::copy_row(tiling, layout, codes, [r, rows], at, to);
                        for g in 0..groups {
                            let sum = (tile * groups + g) * tiling.rows + at;
                            tile_sums.pointer().add(sum).write(sums[g * rows + r]);
                        }
                    }
                }
            }
            eights.iter_mut().zip(sums).for_each(|(eight, sum)| *eight = -8 * *sum);
        };
        if m > 0 {
            parallel.for_each(strips(m), &quantize);
        }
        (self.m, self.layout, self.zero) = (m, Some(layout), by.map_or(0, |by| i32::from(by.zero)));
        self.tiling = tiling;
        Ok(())
    }

    /// The strip of a row, with its layout.
    fn strip_of(&self, row: usize) -> Option<(RowLayout, core::ops::Range<usize>)> {
        let layout = self.layout.filter(|_| row < self.m)?;
        let strip = (0..strips(self.m)).map(|i| strip(self.m, i)).find(|s| s.contains(&row))?;
        Some((layout, strip))
    }

    /// The sums over the groups of a row, for those who want to look.
    pub fn sums(&self, row: usize) -> Vec<i32> {
        let Some((layout, strip)) = self.strip_of(row) else { return Vec::new() };
        let sums = &self.sums[strip.start * layout.groups() + row - strip.start..];
        sums.iter().step_by(strip.len()).take(layout.groups()).copied().collect()
    }

    /// The codes of a row in logical order, for those who want to look.
    pub fn row(&self, row: usize) -> Vec<i8> {
        let Some((layout, strip)) = self.strip_of(row) else { return Vec::new() };
        let codes = &self.codes[strip.start * layout.padded()..];
        (0..layout.k)
            .map(|k| {
                let (g, i) = (k / layout.group_size, k % layout.group_size);
                let step = g * layout.steps + i / STEP;
                codes[(step * strip.len() + row - strip.start) * STEP + i % STEP]
            })
            .collect()
    }
}

impl StaticScale {
    fn inverse(self) -> Result<f32, KernelError> {
        let inverse = 1.0 / self.scale;
        match self.scale > 0.0 && self.scale.is_finite() && inverse.is_finite() {
            true => Ok(inverse),
            false => Err(KernelError::Scheme("an activation scale that is not above zero")),
        }
    }
}

impl Grid {
    /// That of a row with this largest magnitude.
    fn of(largest: f32) -> Self {
        match largest.is_finite() && largest >= SMALLEST {
            true => Self { scale: largest / 127.0, inverse: 127.0 / largest, zero: 0.0 },
            // All codes are zero.
            false => {
                let scale = if largest.is_finite() { 0.0 } else { f32::NAN };
                Self { scale, inverse: 0.0, zero: 0.0 }
            }
        }
    }

    fn fixed(by: StaticScale, inverse: f32, largest: f32) -> Self {
        let scale = if largest.is_finite() { by.scale } else { f32::NAN };
        Self { scale, inverse, zero: f32::from(by.zero) }
    }
}
