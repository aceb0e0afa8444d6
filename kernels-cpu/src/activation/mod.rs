//! Activations quantized to int8, in the order in which the kernels read them.
//!
//! Per token: `s = max |x| / 127`, `a = round(x · (127 / max |x|))`, ties to even, so `x ≈ s · a` with `|a| ≤ 127`. A
//! row whose largest magnitude is below [`SMALLEST`] has `s = 0`.
//!
//! Static: one scale and one zero point for all tokens, from calibration:
//! `a = clamp(round(x · (1 / s)) + a₀, −128, 127)`, `x ≈ s · (a − a₀)`. Such codes can be −128; the widths that
//! [`Layout::of`] accepts allow for it.
//!
//! A row that contains NaN or an infinity has `s = NaN`, and everything computed from it is NaN.
//!
//! The codes are stored with their sums over the groups of the weights. Kernels multiply the sums by the weights' zero
//! points.
//!
//! The input may be the activations themselves, their RMSNorm, or `silu(gate) · up`; these are computed row by row and
//! quantized while they are in the cache. All arithmetic is in `f32`, in the order of [`reference`](crate::reference),
//! and results are bit-identical for every instruction set, division of work and number of threads.
//!
//! Rows are divided into strips of at most sixteen. A strip is stored step by step, with the eight codes of each of its
//! rows, so that a kernel reads it sequentially. For a tile unit, rows are stored in tiles as well.
#![allow(unsafe_code, reason = "vector instructions, and threads that fill parts of one vector")]

pub(crate) mod dispatch;
mod element;
pub(crate) mod float;
mod forms;
mod rows;
pub(crate) mod segments;
pub(crate) mod source;
pub(crate) mod split;
pub(crate) mod tiles;

pub use self::element::Element;
pub(crate) use self::element::sealed;
pub use self::float::{Bf16Parts, FloatRows};
pub use self::forms::{narrow, rms_norm, silu_mul};
use self::rows::{Grid, RowDestination};
use self::segments::{Extent, Segment};
pub use self::source::{GateUp, RmsNorm};
use self::source::{Gated, Norm, Plain, Source};
use self::tiles::{TILE_ROWS, Tiling};
use crate::layout::{Line, STEP};
use crate::linear::{MAX_ROWS, ONE_STRIP, TILED_ROWS, UNTILED_GROUP};
use crate::parallel::Disjoint;
use crate::{IsaToken, KernelError, Layout, Parallel};

/// Rows whose largest magnitude is below this are treated as zero, since `127 / max |x|` could overflow.
pub const SMALLEST: f32 = 1e-36;

/// How the `k` input features of a row are grouped and padded, as required by the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowLayout {
    k: usize,
    group_size: usize,
    steps: usize,
    /// Whether a tile unit may multiply these rows.
    tiled: bool,
}

impl RowLayout {
    /// Returns the layout that rows must have to be multiplied by these weights.
    pub fn of(weights: &Layout) -> Self {
        let tiled = weights.has_tiles();
        Self { k: weights.k(), group_size: weights.group_size(), steps: weights.steps(), tiled }
    }

    pub(crate) fn group_size(self) -> usize {
        self.group_size
    }

    pub(crate) fn is_tiled(self) -> bool {
        self.tiled
    }

    pub(crate) fn k(self) -> usize {
        self.k
    }

    pub(crate) fn groups(self) -> usize {
        self.k / self.group_size
    }

    pub(crate) fn padded(self) -> usize {
        self.groups() * self.steps * STEP
    }
}

/// One scale and zero point for all tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StaticScale {
    /// Positive and finite, and so is its inverse.
    pub scale: f32,
    /// −128 to 127.
    pub zero: i8,
}

/// The form of the activations that weights are multiplied by, on the CPU and on GPUs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activations {
    /// Floats (W4A16, W8A16, FP4 and FP8 weights).
    Float,
    /// Int8 with one scale per token (W4A8, W8A8).
    PerToken,
    /// Int8 with one scale and zero point. A zero point other than 0 requires weights packed with sums.
    Static(StaticScale),
}

/// Rows `[m, k]` quantized to int8.
///
/// ```
/// use quant_kernels_cpu::{GateUp, Int8Rows, PackedLinear, RmsNorm, RowLayout, Serial, WeightView};
///
/// let view = WeightView::new([1, 8], 4, 8, &[9; 8], &[0.5], None)?;
/// let weight = PackedLinear::pack(&view, None, false, &Serial)?;
/// let layout = RowLayout::of(weight.layout());
/// let (mut rows, mut out) = (Int8Rows::default(), [0.0]);
///
/// // A norm before the linear layer, quantized in the same pass.
/// let norm = RmsNorm { weight: &[2.0; 8], eps: 1e-6 };
/// rows.quantize_rms_norm(&[3.0f32; 8], norm, None, layout, None, &Serial)?;
/// weight.multiply(&rows, &mut out, &Serial)?;
/// assert!((out[0] - 8.0).abs() < 0.1);
///
/// // The gate of an MLP, also quantized in the same pass.
/// let (gate, up) = (&[20.0f32; 8][..], &[0.5f32; 8][..]);
/// rows.quantize_silu_mul(GateUp::Apart { gate, up }, layout, None, &Serial)?;
/// weight.multiply(&rows, &mut out, &Serial)?;
/// assert!((out[0] - 40.0).abs() < 0.5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Int8Rows {
    token: IsaToken,
    pub(crate) m: usize,
    pub(crate) layout: Option<RowLayout>,
    /// `[strips][padded_k / STEP][rows of the strip][STEP]`
    pub(crate) codes: Vec<i8>,
    /// `[strips][groups][rows of the strip]`
    pub(crate) sums: Vec<i32>,
    /// `−8 · sums`: corrects for the offset of 8 in 4-bit codes without a stored zero point.
    pub(crate) eights: Vec<i32>,
    /// `[m]`
    pub(crate) scales: Vec<f32>,
    pub(crate) zero: i32,
    /// The tiling of the rows for the tile unit, if it multiplies them. They are then stored in tiles as well.
    pub(crate) tiling: Option<Tiling>,
    pub(crate) tiles: Vec<Line>,
    pub(crate) tile_sums: Vec<i32>,
    /// `[strips][k]`: scratch for rows that are computed before they are quantized.
    computed: Vec<f32>,
}

impl Default for Int8Rows {
    /// An empty buffer for the instruction set of [`IsaToken::detect`].
    fn default() -> Self {
        Self::new(IsaToken::detect())
    }
}

pub(crate) fn strip(m: usize, i: usize) -> core::ops::Range<usize> {
    let count = strips(m);
    let start = |i: usize| i * (m / count) + i.min(m % count);
    start(i)..start(i + 1)
}

pub(crate) fn strips(m: usize) -> usize {
    if m <= ONE_STRIP { 1 } else { m.div_ceil(MAX_ROWS) }
}

pub(crate) fn resize<T: Copy + Default>(values: &mut Vec<T>, len: Option<usize>) -> Result<(), KernelError> {
    let len = len.ok_or(KernelError::TooLarge("the activation buffer"))?;
    let missing = len.saturating_sub(values.len());
    values.try_reserve(missing).map_err(|_| KernelError::Memory("the activation buffer"))?;
    values.resize(len, T::default());
    Ok(())
}

impl Int8Rows {
    /// Creates an empty buffer. The instruction set does not affect the results.
    pub fn new(token: IsaToken) -> Self {
        let (codes, scales, computed) = (Vec::new(), Vec::new(), Vec::new());
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
            computed,
        }
    }

    /// The number of rows.
    pub fn m(&self) -> usize {
        self.m
    }

    /// The zero point of all codes; 0 if each row has its own scale.
    pub fn zero(&self) -> i32 {
        self.zero
    }

    /// The scale of every row.
    pub fn scales(&self) -> &[f32] {
        &self.scales[..self.m]
    }

    /// Quantizes rows `[m, k]`, row-major, each by its own largest magnitude. Replaces the previous rows and reuses
    /// their memory. If `parallel` unwinds or memory allocation fails, the buffer is left empty.
    ///
    /// # Errors
    /// When the length of `x` is not a multiple of the layout's row width, or memory allocation fails.
    pub fn quantize<E: Element>(
        &mut self,
        x: &[E],
        layout: RowLayout,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        self.fill(&Plain::new(self.token, x, layout.k)?, layout, None, parallel)
    }

    /// Quantizes rows `[m, k]` with the same scale and zero point for all rows.
    ///
    /// # Errors
    /// When the length of `x` is not a multiple of `k`, the scale or its inverse is not positive and finite, or memory
    /// allocation fails.
    pub fn quantize_static<E: Element>(
        &mut self,
        x: &[E],
        layout: RowLayout,
        by: StaticScale,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        self.fill(&Plain::new(self.token, x, layout.k)?, layout, Some(by), parallel)
    }

    /// Quantizes the RMSNorm of rows `[m, k]`: with the scale and zero point `by` for all rows, or if `by` is `None`,
    /// each row by its own largest magnitude.
    ///
    /// With a residual `[m, k]`, each row is first added to it, `residual += x`, rounded to the residual's type, and
    /// the norm is computed from the result. A row whose sum of squares overflows `f32` is treated as not finite.
    ///
    /// # Errors
    /// See [`quantize_static`](Self::quantize_static); also when a length is wrong, or the norm's ε is not positive and
    /// finite.
    pub fn quantize_rms_norm<E: Element>(
        &mut self,
        x: &[E],
        norm: RmsNorm<'_>,
        residual: Option<&mut [E]>,
        layout: RowLayout,
        by: Option<StaticScale>,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        // Fail on an invalid scale before the residual is modified.
        by.map_or(Ok(0.0), StaticScale::inverse)?;
        self.fill(&Norm::new(self.token, x, residual, norm, layout.k)?, layout, by, parallel)
    }

    /// Quantizes `silu(gate) · up` ([`reference::silu`](crate::reference::silu)): with the scale and zero point `by`
    /// for all rows, or if `by` is `None`, each row by its own largest magnitude.
    ///
    /// # Errors
    /// See [`quantize_static`](Self::quantize_static); also when the two inputs differ in length.
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
        let m = source.m();
        let buffer_len = if source.is_computed() { layout.k } else { 0 };
        // Leave the buffer empty until all rows are written, because the caller's threads may unwind.
        (self.m, self.layout, self.tiling) = (0, None, None);
        let tiling = self.tiling_of(m, layout);
        let mut extent = Extent::default();
        let all = extent.add(m, layout, tiling, true, buffer_len);
        let all = all.ok_or(KernelError::TooLarge("the activation buffer"))?;
        self.reserve(&extent)?;
        let memory = self.memory();
        if m > 0 {
            // SAFETY: `reserve` made room for the segment, and `Parallel` calls each strip at most once.
            parallel.for_each(strips(m), &|i| unsafe { memory.strip(&all, i, source, fixed) });
        }
        (self.m, self.layout, self.zero) = (m, Some(layout), by.map_or(0, |by| i32::from(by.zero)));
        self.tiling = tiling;
        Ok(())
    }

    pub(crate) fn token(&self) -> IsaToken {
        self.token
    }

    pub(crate) fn all(&self) -> Option<Segment> {
        self.layout.map(|layout| Segment::standalone(self.m, layout, self.tiling))
    }

    pub(crate) fn tiling_of(&self, m: usize, layout: RowLayout) -> Option<Tiling> {
        let tiled = self.token.has_tiles() && layout.tiled;
        let tiled = tiled && m >= TILED_ROWS && layout.group_size > UNTILED_GROUP;
        tiled.then(|| Tiling::new(m, layout, STEP, 1))
    }

    /// Makes room for rows.
    pub(crate) fn reserve(&mut self, extent: &Extent) -> Result<(), KernelError> {
        if extent.tiles > 0 {
            resize(&mut self.tiles, Some(extent.tiles))?;
            resize(&mut self.tile_sums, Some(extent.tile_sums))?;
        }
        resize(&mut self.codes, Some(extent.codes))?;
        resize(&mut self.sums, Some(extent.sums))?;
        resize(&mut self.eights, Some(extent.sums))?;
        resize(&mut self.scales, Some(extent.rows))?;
        let computed = extent.computed.max(self.computed.len());
        resize(&mut self.computed, Some(computed))
    }

    pub(crate) fn room(&self) -> Extent {
        Extent {
            rows: self.scales.len(),
            codes: self.codes.len(),
            sums: self.sums.len().min(self.eights.len()),
            tiles: self.tiles.len(),
            tile_sums: self.tile_sums.len(),
            computed: self.computed.len(),
        }
    }

    pub(crate) fn memory(&mut self) -> Int8Memory<'_> {
        Int8Memory {
            token: self.token,
            codes: Disjoint::new(&mut self.codes),
            sums: Disjoint::new(&mut self.sums),
            eights: Disjoint::new(&mut self.eights),
            scales: Disjoint::new(&mut self.scales),
            tiles: Disjoint::new(&mut self.tiles),
            tile_sums: Disjoint::new(&mut self.tile_sums),
            computed: Disjoint::new(&mut self.computed),
        }
    }

    fn strip_of(&self, row: usize) -> Option<(RowLayout, core::ops::Range<usize>)> {
        let layout = self.layout.filter(|_| row < self.m)?;
        let strip = (0..strips(self.m)).map(|i| strip(self.m, i)).find(|s| s.contains(&row))?;
        Some((layout, strip))
    }

    /// The sums of a row's codes per group, for inspection; empty if there is no such row.
    pub fn sums(&self, row: usize) -> Vec<i32> {
        let Some((layout, strip)) = self.strip_of(row) else { return Vec::new() };
        let sums = &self.sums[strip.start * layout.groups() + row - strip.start..];
        sums.iter().step_by(strip.len()).take(layout.groups()).copied().collect()
    }

    /// The codes of a row in logical order, for inspection; empty if there is no such row.
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

/// The buffers of [`Int8Rows`], which threads write to concurrently.
pub(crate) struct Int8Memory<'a> {
    token: IsaToken,
    codes: Disjoint<'a, i8>,
    sums: Disjoint<'a, i32>,
    eights: Disjoint<'a, i32>,
    scales: Disjoint<'a, f32>,
    tiles: Disjoint<'a, Line>,
    tile_sums: Disjoint<'a, i32>,
    computed: Disjoint<'a, f32>,
}

impl Int8Memory<'_> {
    /// Quantizes strip `i` of a segment. Its rows are read from the source, starting at the segment's first row.
    ///
    /// # Safety
    /// There must be [room](Int8Rows::room) for the segment, segments must not overlap, and each strip may be quantized
    /// only once.
    pub(crate) unsafe fn strip(
        &self,
        all: &Segment,
        i: usize,
        source: &dyn Source,
        fixed: Option<(StaticScale, f32)>,
    ) {
        let (layout, token) = (all.layout, self.token);
        let (k, groups, padded) = (layout.k, layout.groups(), layout.padded());
        let buffer_len = if source.is_computed() { k } else { 0 };
        let strip = strip(all.m, i);
        let codes = all.at.codes + strip.start * padded..all.at.codes + strip.end * padded;
        let at = all.at.sums + strip.start * groups..all.at.sums + strip.end * groups;
        let computed = all.at.computed + i * buffer_len..all.at.computed + (i + 1) * buffer_len;
        // SAFETY: strips are disjoint, and the caller guarantees that each is quantized once.
        let (codes, scales) =
            unsafe { (self.codes.part(codes), self.scales.part(all.row + strip.start..all.row + strip.end)) };
        // SAFETY: strips are disjoint, and the caller guarantees that each is quantized once.
        let (sums, eights, computed) =
            unsafe { (self.sums.part(at.clone()), self.eights.part(at), self.computed.part(computed)) };
        let rows = strip.len();
        for (r, scale) in scales.iter_mut().enumerate() {
            // SAFETY: each row is in exactly one strip, and the caller guarantees that each strip is quantized once.
            let (row, largest) = unsafe { source.row(all.row + strip.start + r, computed) };
            let grid = match fixed {
                Some((by, inverse)) => Grid::fixed(by, inverse, largest),
                None => Grid::of(largest),
            };
            *scale = grid.scale;
            let place = RowDestination { layout, r, rows, codes: &mut *codes, sums: &mut *sums };
            match fixed {
                Some(_) => dispatch::quantize::<true>(token, row, grid, place),
                None => dispatch::quantize::<false>(token, row, grid, place),
            }
            if let Some(tiling) = all.tiling {
                let (tile, at) = ((strip.start + r) / TILE_ROWS, (strip.start + r) % TILE_ROWS);
                // SAFETY: the caller guarantees room for all rows of this tiling; each row is in exactly one strip, and
                // writes only to its own bytes of the tiles.
                unsafe {
                    let across = tiling.rows * tiling.groups * tiling.blocks * tiling.row_bytes();
                    let to = self.tiles.pointer().add(all.at.tiles).cast::<i8>().add(tile * across);
                    tiles::copy_row(tiling, layout, codes, [r, rows], at, to);
                    for g in 0..groups {
                        let sum = all.at.tile_sums + (tile * groups + g) * tiling.rows + at;
                        self.tile_sums.pointer().add(sum).write(sums[g * rows + r]);
                    }
                }
            }
        }
        eights.iter_mut().zip(sums).for_each(|(eight, sum)| *eight = -8 * *sum);
    }
}

impl StaticScale {
    fn inverse(self) -> Result<f32, KernelError> {
        let inverse = 1.0 / self.scale;
        match self.scale > 0.0 && self.scale.is_finite() && inverse.is_finite() {
            true => Ok(inverse),
            false => Err(KernelError::Scheme(
                "the activation scale and its reciprocal must be positive and finite",
            )),
        }
    }
}

impl Grid {
    fn of(largest: f32) -> Self {
        match largest.is_finite() && largest >= SMALLEST {
            true => Self { scale: largest / 127.0, inverse: 127.0 / largest, zero: 0.0 },
            // With an inverse of 0, all codes are zero.
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
