//! Activations become whole numbers of 8 bits, in the order in which the kernels read them.
//!
//! Per token: `s = max |x| / 127`, `a = round(x · (127 / max |x|))` half to even, so `x ≈ s · a` with `a` from
//! −127 to 127. A row of zeros, or whose largest magnitude is below [`SMALLEST`], has `s = 0`; a row that
//! holds NaN or an infinity has `s = NaN`, and so has all that is computed from it.
//!
//! Static: one scale and one zero for all tokens, found beforehand: `a = clamp(round(x · (1 / s)) + a₀, −128, 127)`,
//! `x ≈ s · (a − a₀)`.
//!
//! Beside the codes stand the sums over the groups of the weights, which a grid's zeros are multiplied with.
//!
//! Rows lie in strips of up to twelve, as many as a tile takes; of a strip step by step the eight codes of
//! every row: a kernel reads from beginning to end.
#![allow(unsafe_code, reason = "threads fill parts of one vector")]

mod float;

pub use self::float::FloatRows;
use crate::layout::STEP;
use crate::linear::MAX_ROWS;
use crate::parallel::Disjoint;
use crate::{KernelError, Layout, Parallel};

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

/// Rows `[m, k]` as whole numbers.
#[derive(Debug, Clone, Default)]
pub struct Int8Rows {
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
}

/// Where the rows of strip `i` begin and end: strips differ by at most one row.
pub(crate) fn strip(m: usize, i: usize) -> core::ops::Range<usize> {
    let count = strips(m);
    let start = |i: usize| i * (m / count) + i.min(m % count);
    start(i)..start(i + 1)
}

pub(crate) fn strips(m: usize) -> usize {
    m.div_ceil(MAX_ROWS).max(1)
}

impl Int8Rows {
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
        &self.scales
    }

    /// Quantizes rows `[m, k]`, row-major, each by its own largest magnitude. What was held is replaced, and
    /// its memory used again.
    ///
    /// # Errors
    /// When `x` is not whole rows of the width that the layout says.
    pub fn quantize(
        &mut self,
        x: &[f32],
        layout: RowLayout,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        self.fill(x, layout, 0, parallel, &|row| {
            let (largest, finite) = largest(row);
            match finite && largest >= SMALLEST {
                true => Grid { scale: largest / 127.0, inverse: 127.0 / largest, zero: 0.0 },
                // All codes are zero.
                false => Grid { scale: if finite { 0.0 } else { f32::NAN }, inverse: 0.0, zero: 0.0 },
            }
        })
    }

    /// Quantizes rows `[m, k]` by one scale and zero.
    ///
    /// # Errors
    /// When `x` is not whole rows, or the scale or its inverse is no number above zero.
    pub fn quantize_static(
        &mut self,
        x: &[f32],
        layout: RowLayout,
        by: StaticScale,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let inverse = 1.0 / by.scale;
        if !(by.scale > 0.0 && by.scale.is_finite() && inverse.is_finite()) {
            return Err(KernelError::Scheme("an activation scale that is not above zero"));
        }
        self.fill(x, layout, i32::from(by.zero), parallel, &|row| {
            let scale = if largest(row).1 { by.scale } else { f32::NAN };
            Grid { scale, inverse, zero: f32::from(by.zero) }
        })
    }

    fn fill(
        &mut self,
        x: &[f32],
        layout: RowLayout,
        zero: i32,
        parallel: &dyn Parallel,
        grid: &(dyn Fn(&[f32]) -> Grid + Sync),
    ) -> Result<(), KernelError> {
        let (k, groups, padded) = (layout.k, layout.groups(), layout.padded());
        let m = x.len() / k;
        KernelError::length("activations", m * k, x.len())?;
        (self.m, self.layout, self.zero) = (m, Some(layout), zero);
        self.codes.clear();
        self.codes.resize(m * padded, 0);
        self.sums.clear();
        self.sums.resize(m * groups, 0);
        self.eights.clear();
        self.scales.clear();
        self.scales.resize(m, 0.0);
        if m == 0 {
            return Ok(());
        }
        let (codes, sums) = (Disjoint::new(&mut self.codes), Disjoint::new(&mut self.sums));
        let scales = Disjoint::new(&mut self.scales);
        parallel.for_each(strips(m), &|i| {
            let strip = strip(m, i);
            // SAFETY: strips are disjoint, and each is asked for once.
            let codes = unsafe { codes.part(strip.start * padded..strip.end * padded) };
            // SAFETY: as above.
            let sums = unsafe { sums.part(strip.start * groups..strip.end * groups) };
            // SAFETY: as above.
            let scales = unsafe { scales.part(strip.clone()) };
            for (r, scale) in scales.iter_mut().enumerate() {
                let row = &x[(strip.start + r) * k..][..k];
                let grid = grid(row);
                *scale = grid.scale;
                quantize_row(row, layout, grid, [r, strip.len()], codes, sums);
            }
        });
        self.eights.extend(self.sums.iter().map(|sum| -8 * sum));
        Ok(())
    }

    /// The codes of a row in logical order, for those who want to look.
    pub fn row(&self, row: usize) -> Vec<i8> {
        let Some(layout) = self.layout.filter(|_| row < self.m) else { return Vec::new() };
        let strip = (0..strips(self.m)).map(|i| strip(self.m, i)).find(|s| s.contains(&row));
        let Some(strip) = strip else { return Vec::new() };
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

/// How a row becomes whole numbers.
#[derive(Clone, Copy)]
struct Grid {
    scale: f32,
    inverse: f32,
    zero: f32,
}

/// The largest magnitude, and whether all are finite.
fn largest(row: &[f32]) -> (f32, bool) {
    const LANES: usize = 16;
    let mut lanes = [0_u32; LANES];
    let chunks = row.chunks_exact(LANES);
    for v in chunks.remainder() {
        lanes[0] = lanes[0].max(v.to_bits() & 0x7fff_ffff);
    }
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            // Magnitudes are in the order of their bits, and what is not finite is above all that is.
            *lane = (*lane).max(v.to_bits() & 0x7fff_ffff);
        }
    }
    let largest = f32::from_bits(lanes.into_iter().fold(0, u32::max));
    (largest, largest.is_finite())
}

/// Row `r` of the `rows` of a strip.
fn quantize_row(
    row: &[f32],
    layout: RowLayout,
    grid: Grid,
    [r, rows]: [usize; 2],
    codes: &mut [i8],
    sums: &mut [i32],
) {
    let finite = grid.scale.is_finite();
    for (g, group) in row.chunks_exact(layout.group_size).enumerate() {
        let mut sum = 0;
        for (s, step) in group.chunks(STEP).enumerate() {
            let at = ((g * layout.steps + s) * rows + r) * STEP;
            let codes = &mut codes[at..at + step.len()];
            for (code, v) in codes.iter_mut().zip(step) {
                let rounded = (v * grid.inverse).round_ties_even() + grid.zero;
                *code = if finite { rounded.clamp(-128.0, 127.0) as i8 } else { 0 };
            }
            sum += codes.iter().map(|&c| i32::from(c)).sum::<i32>();
        }
        sums[g * rows + r] = sum;
    }
}
