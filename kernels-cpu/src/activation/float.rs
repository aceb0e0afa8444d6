//! Float activations in the order in which the kernels read them.
#![allow(unsafe_code, reason = "threads fill parts of one vector")]

use super::element::{Element, sealed::Kind};
use super::source::{GateUp, Gated, Norm, Plain, RmsNorm, Source};
use super::{RowLayout, dispatch, resize, strip, strips};
use crate::layout::STEP;
use crate::parallel::Disjoint;
use crate::{IsaToken, KernelError, Parallel};

/// Features of a step in the order in which pairs of bf16 are multiplied: (0, 2), (4, 6), (1, 3), (5, 7).
const PAIRS: [usize; 4] = [0, 4, 1, 5];

/// Rows `[m, k]` of floats, packed for one instruction set.
///
/// Where that has dot products of bf16, each value is two of them, the value rounded and what that left over,
/// together within `2⁻¹⁶` of it; elsewhere it is itself. Of bf16 activations nothing is left over; f16 has 11
/// significant bits, 8 and 3, so that two halves are exact.
#[derive(Debug, Clone)]
pub struct FloatRows {
    pub(crate) m: usize,
    pub(crate) layout: Option<RowLayout>,
    pub(crate) token: IsaToken,
    /// `[strips][padded_k / STEP][rows of the strip][STEP]`: bits of an `f32`, or of two pairs of bf16.
    pub(crate) words: Vec<u32>,
    /// `[strips][groups][rows of the strip]`
    pub(crate) sums: Vec<f32>,
    /// Whether all values are of bf16 by their type: every second half is zero.
    pub(crate) exact_in_bf16: bool,
    /// `[strips][k]`, where rows are made before they are packed.
    made: Vec<f32>,
}

impl FloatRows {
    /// No rows yet, for these instructions.
    pub fn new(token: IsaToken) -> Self {
        let (words, sums, made) = (Vec::new(), Vec::new(), Vec::new());
        Self { m: 0, layout: None, token, words, sums, exact_in_bf16: false, made }
    }

    /// Rows.
    pub fn m(&self) -> usize {
        self.m
    }

    /// Whether all values are of bf16 by their type.
    pub fn exact_in_bf16(&self) -> bool {
        self.exact_in_bf16
    }

    /// Packs rows `[m, k]`, row-major. What was held is replaced, and its memory used again. Where `parallel`
    /// unwinds, or memory is short, there are no rows.
    ///
    /// # Errors
    /// When `x` is not whole rows of the width that the layout says, or memory is short.
    pub fn pack<E: Element>(
        &mut self,
        x: &[E],
        layout: RowLayout,
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let source = Plain::new(self.token, x, layout.k)?;
        self.fill(&source, E::KIND == Kind::Bf16, layout, parallel)
    }

    /// Packs the RMSNorm of rows `[m, k]`; with a residual as
    /// [`Int8Rows::quantize_rms_norm`](super::Int8Rows::quantize_rms_norm).
    ///
    /// # Errors
    /// When a length or the norm's ε is none.
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

    /// Packs `silu(gate) · up`, see [`reference::silu`](crate::reference::silu).
    ///
    /// # Errors
    /// When a length is wrong.
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
        let (k, groups, padded, m) = (layout.k, layout.groups(), layout.padded(), source.m());
        let lent = if source.is_made() { k } else { 0 };
        // No rows until all are there: threads of the caller may unwind.
        (self.m, self.layout) = (0, None);
        // All that stays is overwritten.
        resize(&mut self.words, m.checked_mul(padded))?;
        resize(&mut self.sums, m.checked_mul(groups))?;
        let made = strips(m).checked_mul(lent).map(|made| made.max(self.made.len()));
        resize(&mut self.made, made)?;
        let (words, sums) = (Disjoint::new(&mut self.words), Disjoint::new(&mut self.sums));
        let (made, token) = (Disjoint::new(&mut self.made), self.token);
        let pack = |i| {
            let strip = strip(m, i);
            // SAFETY: strips are disjoint, and each is asked for once.
            let words = unsafe { words.part(strip.start * padded..strip.end * padded) };
            // SAFETY: as above.
            let (sums, made) = unsafe {
                (sums.part(strip.start * groups..strip.end * groups), made.part(i * lent..(i + 1) * lent))
            };
            for r in 0..strip.len() {
                // SAFETY: each row is in one strip.
                let (row, _) = unsafe { source.row(strip.start + r, made) };
                dispatch::pack(token, row, layout, [r, strip.len()], words, sums);
            }
        };
        if m > 0 {
            parallel.for_each(strips(m), &pack);
        }
        (self.m, self.layout, self.exact_in_bf16) = (m, Some(layout), in_bf16);
        Ok(())
    }
}

/// Packs row `r` of a strip of `rows`.
#[inline(always)]
pub(super) fn pack_row<const SPLIT: bool>(
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
            let words = &mut words[at..at + STEP];
            if SPLIT {
                in_pairs(values, words);
            } else {
                words.iter_mut().zip(values).for_each(|(w, v)| *w = v.to_bits());
            }
        }
        sums[g * rows + r] = sum.iter().sum();
    }
}

/// Each pair rounded, then what is left over of it.
#[inline(always)]
fn in_pairs(values: [f32; STEP], words: &mut [u32]) {
    let high = values.map(round_within);
    let mut low = [0; STEP];
    for i in 0..STEP {
        // What is infinite has no rest.
        let rest = values[i] - f32::from_bits(high[i]);
        low[i] = if values[i].is_infinite() { 0 } else { round(rest) };
    }
    for (pair, &i) in words.chunks_exact_mut(2).zip(&PAIRS) {
        pair[0] = high[i] >> 16 | high[i + 2];
        pair[1] = low[i] >> 16 | low[i + 2];
    }
}

/// A value rounded to bf16, half to even; only the upper half of the bits is set. NaN stays NaN.
#[inline(always)]
fn round(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    if value.is_nan() { 0x7fc0_0000 } else { rounded }
}

/// The same, but the largest values are cut, for they would become infinite.
#[inline(always)]
fn round_within(value: f32) -> u32 {
    let rounded = round(value);
    let overflows = rounded & 0x7fff_ffff == 0x7f80_0000 && value.is_finite();
    if overflows { value.to_bits() & 0xffff_0000 } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(value: f32) -> [f64; 2] {
        let mut words = [0; STEP];
        in_pairs([0.0, value, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], &mut words);
        [words[4], words[5]].map(|w| f64::from(f32::from_bits(w << 16)))
    }

    #[test]
    fn two_halves_are_within_their_bound() {
        let mut bits = 1_u32;
        for _ in 0..20_000 {
            bits = bits.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            let value = f32::from_bits(bits);
            if !value.is_finite() || value.abs() < 1e-30 {
                continue;
            }
            let [high, low] = split(value);
            let off = (high + low - f64::from(value)).abs();
            assert!(off <= f64::from(value).abs() * 2.0_f64.powi(-16), "{value}");
        }
        let [high, low] = split(f32::MAX);
        assert!(high.is_finite() && (high + low) / f64::from(f32::MAX) > 0.999_98);
        assert_eq!(split(f32::INFINITY)[0], f64::INFINITY);
        assert!(split(f32::NAN)[0].is_nan());
        for (value, bits) in
            [(1.0_f32, 0x3f80), (f32::from_bits(0x3f80_8000), 0x3f80), (f32::from_bits(0x3f81_8000), 0x3f82)]
        {
            assert_eq!(round(value) >> 16, bits);
        }
    }

    #[test]
    fn pairs_lie_in_their_order() {
        let mut words = [0; STEP];
        in_pairs([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], &mut words);
        let halves = |w: u32| [f32::from_bits(w << 16), f32::from_bits(w & 0xffff_0000)];
        let order = [words[0], words[2], words[4], words[6]].map(halves);
        assert_eq!(order, [[0.0, 2.0], [4.0, 6.0], [1.0, 3.0], [5.0, 7.0]]);
        assert_eq!([words[1], words[3], words[5], words[7]], [0; 4]);
    }
}
