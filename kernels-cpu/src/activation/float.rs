//! Floating-point activations in the order in which the kernels read them.
#![allow(unsafe_code, reason = "threads fill parts of one vector")]

use super::element::{Element, sealed::Kind};
use super::segments::{Extent, Segment};
use super::source::{GateUp, Gated, Norm, Plain, RmsNorm, Source};
use super::split::{in_pairs, split_in_pairs};
use super::tiles::{TILE_ROWS, Tiling};
use super::{RowLayout, dispatch, resize, strip};
use crate::layout::{LINE, Line, STEP};
use crate::parallel::Disjoint;
use crate::simd::elementwise::RowLanes;
use crate::{Isa, IsaToken, KernelError, Parallel};

/// The number of bf16 values whose sum represents an activation, on paths that multiply bf16. The first is the rounded
/// value, and each further one the rounded remainder. The work grows with the number of parts.
///
/// Only a tile unit lets the caller choose, and it does not multiply super-blocks.
/// [`Isa::Avx512Bf16`](crate::Isa::Avx512Bf16) always uses two parts. Activations of type bf16 need only one part. All
/// other products use the `f32` itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Bf16Parts {
    /// Relative error at most `2⁻⁸`.
    One,
    /// Relative error at most `2⁻¹⁶`; exact for f16.
    #[default]
    Two,
    /// Relative error at most `2⁻²⁴`: as precise as `f32`.
    Three,
}

/// Rows `[m, k]` of floats, packed for one instruction set.
///
/// Values are stored as `f32`, or as sums of bf16 ([`Bf16Parts`]) if the instruction set multiplies bf16. Rows are
/// multiplied on the instruction set that they were packed for.
///
/// ```
/// use quant_kernels_cpu::{FloatRows, PackedLinear, RowLayout, Serial, WeightView};
///
/// let view = WeightView::new([1, 8], 4, 8, &[9; 8], &[0.5], None)?;
/// let weight = PackedLinear::pack(&view, None, false, &Serial)?;
/// let (mut rows, mut out) = (FloatRows::default(), [0.0]);
/// rows.pack(&[0.25f32; 8], RowLayout::of(weight.layout()), &Serial)?;
/// weight.multiply_float(&rows, &mut out, &Serial)?;
/// assert_eq!(out, [1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct FloatRows {
    pub(crate) m: usize,
    pub(crate) layout: Option<RowLayout>,
    pub(crate) token: IsaToken,
    parts: Bf16Parts,
    /// `[strips][padded_k / STEP][rows of the strip][STEP]`: bits of an `f32`, or a pair of bf16. If the packed rows
    /// were bf16 and are stored as such, a step has half as many words, and the rest of each strip is unused. Unused
    /// if rows are stored in tiles.
    pub(crate) words: Vec<u32>,
    /// `[strips][groups][rows of the strip]`; in tiles `[row tiles][groups][rows]`.
    pub(crate) sums: Vec<f32>,
    /// The tiling for the tile unit, if rows are stored in tiles.
    pub(crate) tiling: Option<Tiling>,
    pub(crate) tiles: Vec<Line>,
    pub(crate) exact_in_bf16: bool,
    /// `[strips][k]` or `[row tiles][k]`: scratch for rows that are computed before they are packed.
    computed: Vec<f32>,
}

impl Default for FloatRows {
    /// An empty buffer for the instruction set of [`IsaToken::detect`].
    fn default() -> Self {
        Self::new(IsaToken::detect())
    }
}

impl FloatRows {
    /// Creates an empty buffer for this instruction set, with the default number of bf16 parts.
    pub fn new(token: IsaToken) -> Self {
        Self::in_parts(token, Bf16Parts::default())
    }

    /// Creates an empty buffer with a given number of bf16 parts.
    pub fn in_parts(token: IsaToken, parts: Bf16Parts) -> Self {
        let (words, sums, computed) = (Vec::new(), Vec::new(), Vec::new());
        let (tiling, tiles) = (None, Vec::new());
        Self { m: 0, layout: None, token, parts, words, sums, tiling, tiles, exact_in_bf16: false, computed }
    }

    /// The number of rows.
    pub fn m(&self) -> usize {
        self.m
    }

    /// Whether the packed rows were bf16. Always `false` for norms and gates, which are computed in `f32`.
    pub fn exact_in_bf16(&self) -> bool {
        self.exact_in_bf16
    }

    /// Packs rows `[m, k]`, row-major. Replaces the previous rows and reuses their memory. If `parallel` unwinds or
    /// memory allocation fails, the buffer is left empty.
    ///
    /// # Errors
    /// When the length of `x` is not a multiple of the layout's row width, or memory allocation fails.
    pub fn pack<E: Element>(
        &mut self,
        x: &[E],
        layout: RowLayout,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let source = Plain::new(self.token, x, layout.k)?;
        self.fill(&source, E::KIND == Kind::Bf16, layout, parallel)
    }

    /// Packs the RMSNorm of rows `[m, k]`. A residual is handled as in
    /// [`Int8Rows::quantize_rms_norm`](super::Int8Rows::quantize_rms_norm).
    ///
    /// # Errors
    /// When a length is wrong, the norm's ε is not positive and finite, or memory allocation fails.
    pub fn pack_rms_norm<E: Element>(
        &mut self,
        x: &[E],
        norm: RmsNorm<'_>,
        residual: Option<&mut [E]>,
        layout: RowLayout,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let source = Norm::new(self.token, x, residual, norm, layout.k)?;
        self.fill(&source, false, layout, parallel)
    }

    /// Packs `silu(gate) · up`, with [`silu`](crate::reference::silu) as defined in the reference.
    ///
    /// # Errors
    /// When a length is wrong, or memory allocation fails.
    pub fn pack_silu_mul<E: Element>(
        &mut self,
        x: GateUp<'_, E>,
        layout: RowLayout,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let source = Gated::new(self.token, x, layout.k)?;
        self.fill(&source, false, layout, parallel)
    }

    fn fill(
        &mut self,
        source: &dyn Source,
        in_bf16: bool,
        layout: RowLayout,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let m = source.m();
        let buffer_len = if source.is_computed() { layout.k } else { 0 };
        // Leave the buffer empty until all rows are written, because the caller's threads may unwind.
        (self.m, self.layout, self.tiling) = (0, None, None);
        let tiling = self.tiling_of(m, layout, in_bf16);
        let mut extent = Extent::default();
        let all = extent.add(m, layout, tiling, tiling.is_none(), buffer_len);
        let all = all.ok_or(KernelError::TooLarge("the activation buffer"))?;
        self.reserve(&extent)?;
        self.exact_in_bf16 = in_bf16;
        let memory = self.memory();
        if m > 0 {
            // SAFETY: `reserve` made room for the segment, and `Parallel` calls each unit at most once.
            parallel.for_each(all.units(tiling.is_none()), &|i| unsafe { memory.unit(&all, i, source) });
        }
        (self.m, self.layout, self.tiling) = (m, Some(layout), tiling);
        Ok(())
    }

    pub(crate) fn parts(&self) -> Bf16Parts {
        self.parts
    }

    pub(crate) fn stores_pairs(&self) -> bool {
        self.token.isa() == Isa::Avx512Bf16
    }

    pub(crate) fn all(&self) -> Option<Segment> {
        self.layout.map(|layout| Segment::standalone(self.m, layout, self.tiling))
    }

    pub(crate) fn tiling_of(&self, m: usize, layout: RowLayout, in_bf16: bool) -> Option<Tiling> {
        let parts = if in_bf16 { 1 } else { 1 + self.parts as usize };
        (self.token.has_tiles() && layout.is_tiled()).then(|| Tiling::new(m, layout, 2 * STEP, parts))
    }

    /// Makes room for rows.
    pub(crate) fn reserve(&mut self, extent: &Extent) -> Result<(), KernelError> {
        resize(&mut self.words, Some(extent.codes))?;
        resize(&mut self.tiles, Some(extent.tiles))?;
        // The sums of strips and of tiles share one buffer, since only one of the two is used.
        resize(&mut self.sums, Some(extent.sums.max(extent.tile_sums)))?;
        let computed = extent.computed.max(self.computed.len());
        resize(&mut self.computed, Some(computed))
    }

    pub(crate) fn room(&self) -> Extent {
        Extent {
            rows: usize::MAX,
            codes: self.words.len(),
            sums: self.sums.len(),
            tiles: self.tiles.len(),
            tile_sums: self.sums.len(),
            computed: self.computed.len(),
        }
    }

    pub(crate) fn memory(&mut self) -> FloatMemory<'_> {
        let lines = &mut self.tiles[..];
        let words = lines.len() * (LINE / 4);
        // SAFETY: a line is 64 bytes without padding, aligned for `u32`; the slice borrows `self.tiles` mutably for its
        // lifetime.
        let tiles = unsafe { core::slice::from_raw_parts_mut(lines.as_mut_ptr().cast::<u32>(), words) };
        FloatMemory {
            token: self.token,
            pairs: self.token.isa() == Isa::Avx512Bf16,
            exact_in_bf16: self.exact_in_bf16,
            words: Disjoint::new(&mut self.words),
            sums: Disjoint::new(&mut self.sums),
            tiles: Disjoint::new(tiles),
            computed: Disjoint::new(&mut self.computed),
        }
    }
}

/// The buffers of [`FloatRows`], which threads write to concurrently.
pub(crate) struct FloatMemory<'a> {
    token: IsaToken,
    pairs: bool,
    exact_in_bf16: bool,
    words: Disjoint<'a, u32>,
    sums: Disjoint<'a, f32>,
    tiles: Disjoint<'a, u32>,
    computed: Disjoint<'a, f32>,
}

impl FloatMemory<'_> {
    /// Packs strip `i` of a segment, or row tile `i` if it is stored in tiles. Its rows are read from the source,
    /// starting at the segment's first row.
    ///
    /// # Safety
    /// Segments must not overlap, and each strip or tile may be packed only once.
    pub(crate) unsafe fn unit(&self, all: &Segment, i: usize, source: &dyn Source) {
        let (layout, token) = (all.layout, self.token);
        let buffer_len = if source.is_computed() { layout.k } else { 0 };
        // SAFETY: strips are disjoint, and the caller guarantees that each is packed once.
        let computed = unsafe {
            self.computed.part(all.at.computed + i * buffer_len..all.at.computed + (i + 1) * buffer_len)
        };
        let Some(tiling) = all.tiling else {
            let (strip, groups, padded) = (strip(all.m, i), layout.groups(), layout.padded());
            let words = all.at.codes + strip.start * padded..all.at.codes + strip.end * padded;
            let sums = all.at.sums + strip.start * groups..all.at.sums + strip.end * groups;
            // SAFETY: strips are disjoint, and the caller guarantees that each is packed once.
            let (words, sums) = unsafe { (self.words.part(words), self.sums.part(sums)) };
            for r in 0..strip.len() {
                // SAFETY: each row is in exactly one strip, and the caller guarantees that each strip is packed once.
                let (row, _) = unsafe { source.row(all.row + strip.start + r, computed) };
                let place = [r, strip.len()];
                match (self.pairs, self.exact_in_bf16) {
                    (true, true) => dispatch::pack_pairs::<true>(token, row, layout, place, words, sums),
                    (true, false) => dispatch::pack_pairs::<false>(token, row, layout, place, words, sums),
                    (false, _) => dispatch::pack_row(token, row, layout, place, words, sums),
                }
            }
            return;
        };
        let across = tiling.bytes_across().unwrap_or(0) / 4;
        let sums_across = tiling.groups * tiling.rows;
        let words = all.at.tiles * (LINE / 4) + i * across;
        let sums = all.at.tile_sums + i * sums_across;
        // SAFETY: row tiles are disjoint, and the caller guarantees that each is packed once.
        let (words, sums) =
            unsafe { (self.tiles.part(words..words + across), self.sums.part(sums..sums + sums_across)) };
        for (r, row) in (i * TILE_ROWS..all.m).take(tiling.rows).enumerate() {
            // SAFETY: each row is in exactly one row tile, and the caller guarantees that each is packed once.
            let (row, _) = unsafe { source.row(all.row + row, computed) };
            dispatch::pack_tiles(token, row, layout, tiling, r, words, sums);
        }
    }
}

/// Packs row `r` of a tile.
///
/// # Safety
/// The processor must have the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn pack_tiles<L: RowLanes, const PARTS: usize>(
    row: &[f32],
    layout: RowLayout,
    tiling: Tiling,
    r: usize,
    words: &mut [u32],
    sums: &mut [f32],
) {
    const WORDS: usize = STEP / 2;
    let Tiling { rows, blocks, steps, .. } = tiling;
    let (row_words, part) = (steps * WORDS, rows * steps * WORDS);
    assert!(r < rows && words.len() == tiling.groups * blocks * PARTS * part);
    for (g, group) in row.chunks_exact(layout.group_size).enumerate() {
        let mut sum = [0.0_f32; STEP];
        for block in 0..blocks {
            let to = &mut words[((g * blocks + block) * PARTS * rows + r) * row_words..];
            // Every block begins within its group; the last one may end beyond it.
            let x = &group[block * steps * STEP..];
            let whole = (x.len() / STEP).min(steps);
            // SAFETY: the caller guarantees that the processor has the instructions of `L`. `x` holds `whole` steps.
            // The parts are `part` words apart, and each has room for `whole` steps in this row, within `words` by the
            // assertion above.
            unsafe { L::split_steps::<PARTS>(x.as_ptr(), whole, to.as_mut_ptr(), part, &mut sum) };
            for step in whole..steps {
                let mut values = [0.0; STEP];
                let left = x.get(step * STEP..).unwrap_or_default();
                values[..left.len()].copy_from_slice(left);
                sum.iter_mut().zip(values).for_each(|(sum, v)| *sum += v);
                for (p, words) in split_in_pairs::<PARTS>(values).into_iter().enumerate() {
                    to[p * part + step * WORDS..][..WORDS].copy_from_slice(&words);
                }
            }
        }
        sums[g * rows + r] = sum.iter().sum();
    }
}

/// Packs row `r` of a strip of `rows` rows.
#[inline(always)]
pub(super) fn pack_row(
    row: &[f32],
    layout: RowLayout,
    [r, rows]: [usize; 2],
    words: &mut [u32],
    sums: &mut [f32],
) {
    for (g, group) in row.chunks_exact(layout.group_size).enumerate() {
        let mut sum = [0.0_f32; STEP];
        for (s, step) in group.chunks(STEP).enumerate() {
            let at = ((g * layout.steps + s) * rows + r) * STEP;
            let mut values = [0.0; STEP];
            values[..step.len()].copy_from_slice(step);
            sum.iter_mut().zip(values).for_each(|(sum, v)| *sum += v);
            words[at..at + STEP].iter_mut().zip(values).for_each(|(w, v)| *w = v.to_bits());
        }
        sums[g * rows + r] = sum.iter().sum();
    }
}

/// Packs row `r` of a strip of `rows` rows as `PARTS` bf16 per value: for each pair of values, the pair of their first
/// parts, then that of the remainders.
///
/// # Safety
/// The processor must have the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn pack_pairs<L: RowLanes, const PARTS: usize>(
    row: &[f32],
    layout: RowLayout,
    [r, rows]: [usize; 2],
    words: &mut [u32],
    sums: &mut [f32],
) {
    let step_words = const { STEP / 2 * PARTS };
    assert!(
        r < rows
            && row.len() == layout.k
            && words.len() >= rows * layout.groups() * layout.steps * step_words
    );
    for (g, group) in row.chunks_exact(layout.group_size).enumerate() {
        let mut sum = [0.0_f32; STEP];
        let whole = group.len() / STEP;
        let at = (g * layout.steps * rows + r) * step_words;
        // SAFETY: the caller guarantees that the processor has the instructions of `L`. `group` holds `whole` steps;
        // those of a row are `rows · step_words` words apart, and the last step of the last row ends within `words` by
        // the assertion above.
        unsafe {
            let to = words.as_mut_ptr().add(at);
            L::pair_steps::<PARTS>(group.as_ptr(), whole, to, rows * step_words, &mut sum);
        }
        if whole < layout.steps {
            let (mut values, left) = ([0.0; STEP], &group[whole * STEP..]);
            values[..left.len()].copy_from_slice(left);
            sum.iter_mut().zip(values).for_each(|(sum, v)| *sum += v);
            let at = at + whole * rows * step_words;
            in_pairs::<PARTS>(values, &mut words[at..at + step_words]);
        }
        sums[g * rows + r] = sum.iter().sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activation::split::PAIRS;

    #[test]
    fn rows_lie_in_tiles() {
        // Two groups of five steps, each stored in two blocks of three steps.
        let layout = RowLayout { k: 72, group_size: 36, steps: 5, tiled: true };
        let x: Vec<f32> = (0..3 * 72).map(|i| i as f32 / 7.0).collect();
        let mut rows = FloatRows::new(crate::Isa::AmxEmulated.token().unwrap());
        rows.pack(&x, layout, &crate::Serial).unwrap();
        let tiling = rows.tiling.unwrap();
        assert_eq!((tiling.rows, tiling.blocks, tiling.steps, tiling.parts), (3, 2, 3, 2));
        let half = |at: usize| {
            let bytes = &rows.tiles[at / 32].0[2 * (at % 32)..][..2];
            f64::from(half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32())
        };
        for (r, g, i) in (0..3).flat_map(|r| (0..2).flat_map(move |g| (0..48).map(move |i| (r, g, i)))) {
            let (step, feature) = (i / STEP, i % STEP);
            let (block, step) = (step / 3, step % 3);
            let pair = PAIRS.iter().position(|p| *p == feature || *p + 2 == feature).unwrap();
            let within = step * STEP + 2 * pair + usize::from(PAIRS[pair] != feature);
            let at = |part: usize| (((g * 2 + block) * 2 + part) * 3 + r) * 3 * STEP + within;
            let expected = if i < 36 { f64::from(x[r * 72 + g * 36 + i]) } else { 0.0 };
            let got = half(at(0)) + half(at(1));
            assert!((got - expected).abs() <= expected * 2.0_f64.powi(-16), "{r} {g} {i}: {got} {expected}");
        }
        for (r, row) in x.chunks(72).enumerate() {
            for g in 0..2 {
                let sum: f32 = row[36 * g..36 * (g + 1)].iter().sum();
                assert!((rows.sums[g * 3 + r] - sum).abs() <= 1e-3);
            }
        }
    }

    /// The vector code packs the same bits as the definition, for values of any kind and groups that do not fill steps.
    #[test]
    fn rows_lie_in_pairs() {
        let Ok(token) = Isa::Avx512Bf16.token() else { return };
        let layout = RowLayout { k: 4 * 36, group_size: 36, steps: 5, tiled: false };
        let special =
            [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, -0.0, 1e-41];
        let (m, mut bits) = (18, 1_u32);
        let x: Vec<f32> = (0..m * layout.k)
            .map(|i| {
                bits = bits.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
                if i % 13 == 0 { special[i / 13 % special.len()] } else { f32::from_bits(bits) }
            })
            .collect();
        let exact: Vec<half::bf16> =
            x.iter().map(|&v| half::bf16::from_bits((v.to_bits() >> 16) as u16)).collect();
        let (mut rows, mut exact_rows) = (FloatRows::new(token), FloatRows::new(token));
        rows.pack(&x, layout, &crate::Serial).unwrap();
        exact_rows.pack(&exact, layout, &crate::Serial).unwrap();
        for (strip, r) in (0..2).flat_map(|i| strip(m, i).map(move |r| (strip(m, i), r))) {
            for (g, s) in (0..4).flat_map(|g| (0..5).map(move |s| (g, s))) {
                let step = |values: &dyn Fn(usize) -> f32| {
                    std::array::from_fn(|i| {
                        let feature = s * STEP + i;
                        if feature < 36 { values(r * layout.k + g * 36 + feature) } else { 0.0 }
                    })
                };
                let place = |words: usize| {
                    strip.start * layout.padded() + ((g * 5 + s) * strip.len() + r - strip.start) * words
                };
                let mut expected = [0; STEP];
                in_pairs::<2>(step(&|i| x[i]), &mut expected);
                assert_eq!(rows.words[place(STEP)..][..STEP], expected, "{r} {g} {s}");
                let mut expected = [0; STEP / 2];
                in_pairs::<1>(step(&|i| exact[i].to_f32()), &mut expected);
                assert_eq!(exact_rows.words[place(STEP / 2)..][..STEP / 2], expected, "{r} {g} {s}");
            }
        }
    }
}
