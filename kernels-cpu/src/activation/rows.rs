//! The inner loops along one row, written once over [`RowLanes`].
//!
//! Squares are added in the order that [`reference::rms_norm`](crate::reference::rms_norm) defines, so results are
//! bit-identical on all instruction sets.
//!
//! # Safety
//! The processor must have the instructions of `L`, for every unsafe function of this module.

use super::RowLayout;
use super::element::{Element, sealed::Kind};
use super::tiles::Tiling;
use crate::layout::STEP;
use crate::simd::elementwise::RowLanes;

/// Values per register.
const LANES: usize = 16;
/// Registers per sum.
const SUMS: usize = 4;

/// The grid that a row is quantized to.
#[derive(Clone, Copy)]
pub(crate) struct Grid {
    pub(super) scale: f32,
    pub(super) inverse: f32,
    pub(super) zero: f32,
}

/// The destination of a row: row `r` of the `rows` rows of a strip.
pub(crate) struct RowDestination<'a> {
    pub(super) layout: RowLayout,
    pub(super) r: usize,
    pub(super) rows: usize,
    pub(super) codes: &'a mut [i8],
    pub(super) sums: &'a mut [i32],
}

/// Loads up to sixteen values, padded with zeros.
#[inline(always)]
unsafe fn load<L: RowLanes, E: Element>(x: &[E], at: usize) -> L::F {
    let left = &x[at..];
    let mut part = [E::ZERO; LANES];
    let from = if left.len() >= LANES {
        left.as_ptr()
    } else {
        part[..left.len()].copy_from_slice(left);
        part.as_ptr()
    };
    // SAFETY: `from` is valid for sixteen values of the type of `E::KIND`; the caller guarantees that the processor has
    // the instructions of `L`.
    unsafe {
        match E::KIND {
            Kind::F32 => L::load_f32(from.cast()),
            Kind::F16 => L::load_f16(from.cast()),
            Kind::Bf16 => L::load_bf16(from.cast()),
        }
    }
}

#[inline(always)]
unsafe fn store<L: RowLanes, E: Element>(x: &mut [E], at: usize, a: L::F) {
    let left = &mut x[at..];
    let mut part = [E::ZERO; LANES];
    let whole = left.len() >= LANES;
    let to = if whole { left.as_mut_ptr() } else { part.as_mut_ptr() };
    // SAFETY: `to` is valid for sixteen values of the type of `E::KIND`; the caller guarantees that the processor has
    // the instructions of `L`.
    unsafe {
        match E::KIND {
            Kind::F32 => L::store_f32(to.cast(), a),
            Kind::F16 => L::store_f16(to.cast(), a),
            Kind::Bf16 => L::store_bf16(to.cast(), a),
        }
    }
    if !whole {
        left.copy_from_slice(&part[..left.len()]);
    }
}

/// Returns the bits of the magnitudes. Compared as integers, they have the same order as the magnitudes, with infinity
/// and NaN above all finite values.
#[inline(always)]
unsafe fn magnitude<L: RowLanes>(a: L::F) -> L::I {
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe { L::and(L::as_i32(a), L::splat(0x7fff_ffff)) }
}

/// The largest magnitude; infinite or NaN if any value is.
#[inline(always)]
pub(super) unsafe fn largest<L: RowLanes>(row: &[f32]) -> f32 {
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe {
        let mut max = [L::splat(0); SUMS];
        let mut at = 0;
        while at + SUMS * LANES <= row.len() {
            for (i, max) in max.iter_mut().enumerate() {
                *max = L::max_i32(*max, magnitude::<L>(L::load_f32(row.as_ptr().add(at + i * LANES).cast())));
            }
            at += SUMS * LANES;
        }
        while at < row.len() {
            max[0] = L::max_i32(max[0], magnitude::<L>(load::<L, f32>(row, at)));
            at += LANES;
        }
        let max = L::max_i32(L::max_i32(max[0], max[1]), L::max_i32(max[2], max[3]));
        f32::from_bits(L::largest(max) as u32)
    }
}

#[inline(always)]
pub(super) unsafe fn widen<L: RowLanes, E: Element>(x: &[E], out: &mut [f32]) -> f32 {
    assert_eq!(x.len(), out.len());
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe {
        let mut max = L::splat(0);
        for at in (0..x.len()).step_by(LANES) {
            let v = load::<L, E>(x, at);
            max = L::max_i32(max, magnitude::<L>(v));
            store::<L, f32>(out, at, v);
        }
        f32::from_bits(L::largest(max) as u32)
    }
}

#[inline(always)]
pub(super) unsafe fn narrow<L: RowLanes, E: Element>(x: &[f32], out: &mut [E]) {
    assert_eq!(x.len(), out.len());
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe {
        for at in (0..x.len()).step_by(LANES) {
            store::<L, E>(out, at, load::<L, f32>(x, at));
        }
    }
}

/// `out = x / √(mean x² + ε) · γ`. If there is a residual, `x` is first added to it and then replaced by the sum.
/// Returns the largest magnitude of `out`.
#[inline(always)]
pub(super) unsafe fn rms_norm<L: RowLanes, E: Element>(
    x: &[E],
    mut residual: Option<&mut [E]>,
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) -> f32 {
    let k = x.len();
    assert!(weight.len() == k && out.len() == k && residual.as_ref().is_none_or(|r| r.len() == k));
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe {
        let mut sums = [L::zero(); SUMS];
        for (i, at) in (0..k).step_by(LANES).enumerate() {
            let mut v = load::<L, E>(x, at);
            if let Some(residual) = residual.as_deref_mut() {
                // The norm is computed from the residual as it was stored, after rounding.
                store::<L, E>(residual, at, L::add_f32(v, load::<L, E>(residual, at)));
                v = load::<L, E>(residual, at);
            }
            sums[i % SUMS] = L::fma(v, v, sums[i % SUMS]);
            store::<L, f32>(out, at, v);
        }
        let mut lanes = [0.0_f32; SUMS * LANES];
        for (i, sum) in sums.into_iter().enumerate() {
            L::store_f32(lanes.as_mut_ptr().add(i * LANES), sum);
        }
        let by = L::splat_f32(inverse_root(&mut lanes, k, eps));
        let mut max = L::splat(0);
        for at in (0..k).step_by(LANES) {
            let v = L::mul_f32(L::mul_f32(load::<L, f32>(out, at), by), load::<L, f32>(weight, at));
            max = L::max_i32(max, magnitude::<L>(v));
            store::<L, f32>(out, at, v);
        }
        f32::from_bits(L::largest(max) as u32)
    }
}

/// Computes `1 / √(mean + ε)` from the lanes of a sum of squares; NaN if the sum overflows `f32`.
fn inverse_root(lanes: &mut [f32; 64], k: usize, eps: f32) -> f32 {
    let mut half = lanes.len() / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    if lanes[0].is_finite() { 1.0 / (lanes[0] / k as f32 + eps).sqrt() } else { f32::NAN }
}

/// `out = silu(gate) · up`; returns the largest magnitude of `out`.
#[inline(always)]
pub(super) unsafe fn silu_mul<L: RowLanes, E: Element>(gate: &[E], up: &[E], out: &mut [f32]) -> f32 {
    assert!(gate.len() == up.len() && gate.len() == out.len());
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe {
        let mut max = L::splat(0);
        for at in (0..out.len()).step_by(LANES) {
            let v = L::mul_f32(silu::<L>(load::<L, E>(gate, at)), load::<L, E>(up, at));
            max = L::max_i32(max, magnitude::<L>(v));
            store::<L, f32>(out, at, v);
        }
        f32::from_bits(L::largest(max) as u32)
    }
}

/// `out = gelu(gate) · up` in the tanh approximation, see [`crate::reference::gelu_tanh`].
#[inline(always)]
pub(super) unsafe fn gelu_tanh_mul<L: RowLanes>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    use crate::reference::GELU;
    assert!(gate.len() == up.len() && gate.len() == out.len());
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe {
        for at in (0..out.len()).step_by(LANES) {
            let g = load::<L, f32>(gate, at);
            let inner = L::fma(L::mul_f32(g, g), L::splat_f32(GELU[1]), L::splat_f32(GELU[0]));
            let v = L::mul_f32(g, sigmoid::<L>(L::mul_f32(g, inner)));
            store::<L, f32>(out, at, L::mul_f32(v, load::<L, f32>(up, at)));
        }
    }
}

/// `out = g σ(alpha g) (u + 1)` of clamped inputs, see [`crate::reference::clamped_gate`].
#[inline(always)]
pub(super) unsafe fn clamped_mul<L: RowLanes>(
    gate: &[f32],
    up: &[f32],
    [alpha, limit]: [f32; 2],
    out: &mut [f32],
) {
    assert!(gate.len() == up.len() && gate.len() == out.len());
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe {
        let (max, one) = (L::splat_f32(limit), L::splat_f32(1.0));
        for at in (0..out.len()).step_by(LANES) {
            // If either operand is NaN, `min_f32` and `max_f32` return the second, so the input comes second.
            let g = L::min_f32(max, load::<L, f32>(gate, at));
            let u = L::max_f32(L::splat_f32(-limit), L::min_f32(max, load::<L, f32>(up, at)));
            let v = L::mul_f32(g, sigmoid::<L>(L::mul_f32(L::splat_f32(alpha), g)));
            store::<L, f32>(out, at, L::mul_f32(v, L::add_f32(u, one)));
        }
    }
}

/// Computes `sum += weight · y`; the product is rounded before it is added.
#[inline(always)]
pub(super) unsafe fn add_weighted<L: RowLanes>(sum: &mut [f32], weight: f32, y: &[f32]) {
    assert_eq!(sum.len(), y.len());
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe {
        let weight = L::splat_f32(weight);
        for at in (0..y.len()).step_by(LANES) {
            let term = L::mul_f32(weight, load::<L, f32>(y, at));
            let v = L::add_f32(load::<L, f32>(sum, at), term);
            store::<L, f32>(sum, at, v);
        }
    }
}

/// `g / (1 + e^−g)`, see [`crate::reference::silu`].
#[inline(always)]
unsafe fn silu<L: RowLanes>(g: L::F) -> L::F {
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe { L::mul_f32(g, sigmoid::<L>(g)) }
}

/// `1 / (1 + e^−g)`, but 0 for `g` below `−SILU_END`, where it is negligible.
#[inline(always)]
unsafe fn sigmoid<L: RowLanes>(g: L::F) -> L::F {
    use crate::reference::{EXP_TERMS, LN_2, LOG2_E, SILU_END};
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe {
        let end = L::splat_f32(SILU_END);
        let z = L::sub_f32(L::zero(), g);
        let z = L::min_f32(L::max_f32(z, L::splat_f32(-SILU_END)), end);
        let n = L::round(L::mul_f32(z, L::splat_f32(LOG2_E)));
        let r = L::fma(n, L::splat_f32(-LN_2[0]), z);
        let r = L::fma(n, L::splat_f32(-LN_2[1]), r);
        let mut p = L::splat_f32(EXP_TERMS[0]);
        for &term in &EXP_TERMS[1..] {
            p = L::fma(p, r, L::splat_f32(term));
        }
        let one = L::splat_f32(1.0);
        let sigmoid = L::div_f32(one, L::add_f32(one, L::times_power(p, n)));
        L::unless_below(g, L::splat_f32(-SILU_END), sigmoid)
    }
}

/// Quantizes a row and sums its codes per group. With `STATIC`, the zero point is added and the result is clamped to
/// eight bits; otherwise the codes always fit.
#[inline(always)]
pub(super) unsafe fn quantize<L: RowLanes, const STATIC: bool>(
    row: &[f32],
    grid: Grid,
    to: RowDestination<'_>,
) {
    let RowDestination { layout, r, rows, codes, sums } = to;
    let (size, steps) = (layout.group_size, layout.steps);
    assert!(r < rows && row.len() == layout.k);
    assert!(codes.len() == layout.padded() * rows && sums.len() == layout.groups() * rows);
    let finite = grid.scale.is_finite();
    // SAFETY: the caller guarantees that the processor has the instructions of `L`. A step of the row begins at `(step
    // · rows + r) · STEP` with `step < groups · steps`, so its eight codes are within `codes` by the assertion above.
    unsafe {
        let (inverse, zero) = (L::splat_f32(grid.inverse), L::splat_f32(grid.zero));
        let code = |v: L::F| -> L::I {
            let v = L::round(L::mul_f32(v, inverse));
            if !STATIC {
                return L::to_i32(v);
            }
            let v = L::add_f32(v, zero);
            L::to_i32(L::min_f32(L::max_f32(v, L::splat_f32(-128.0)), L::splat_f32(127.0)))
        };
        for (g, group) in row.chunks_exact(size).enumerate() {
            let stride = rows * STEP;
            let mut to = codes.as_mut_ptr().add((g * steps * rows + r) * STEP);
            if !finite {
                for s in 0..steps {
                    to.add(s * stride).write_bytes(0, STEP);
                }
                sums[g * rows + r] = 0;
                continue;
            }
            let mut sum = L::splat(0);
            let whole = size / LANES * LANES;
            for at in (0..whole).step_by(LANES) {
                let codes = code(L::load_f32(group.as_ptr().add(at).cast()));
                sum = L::add(sum, codes);
                L::store_codes(codes, to, to.wrapping_add(stride));
                to = to.wrapping_add(2 * stride);
            }
            let mut sum = L::total(sum);
            let left = size - whole;
            if left > 0 {
                let mut last = [0_i8; LANES];
                let at = last.as_mut_ptr();
                L::store_codes(code(load::<L, f32>(group, whole)), at, at.add(STEP));
                // Padding codes are 0, even if the zero point is not.
                last[left..].fill(0);
                sum += last.iter().map(|&c| i32::from(c)).sum::<i32>();
                for step in last.chunks_exact(STEP).take(left.div_ceil(STEP)) {
                    step.as_ptr().copy_to_nonoverlapping(to, STEP);
                    to = to.wrapping_add(stride);
                }
            }
            sums[g * rows + r] = sum;
        }
    }
}

/// Packs a row of floats, see [`FloatRows`](super::FloatRows). The code is portable, but compiled for the instructions
/// of `L`.
#[inline(always)]
pub(super) unsafe fn pack_row<L: RowLanes>(
    row: &[f32],
    layout: RowLayout,
    place: [usize; 2],
    words: &mut [u32],
    sums: &mut [f32],
) {
    super::float::pack_row(row, layout, place, words, sums);
}

/// Packs a row of floats as pairs of bf16, see [`FloatRows`](super::FloatRows).
#[inline(always)]
pub(super) unsafe fn pack_pairs<L: RowLanes, const EXACT: bool>(
    row: &[f32],
    layout: RowLayout,
    place: [usize; 2],
    words: &mut [u32],
    sums: &mut [f32],
) {
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe {
        match EXACT {
            true => super::float::pack_pairs::<L, 1>(row, layout, place, words, sums),
            false => super::float::pack_pairs::<L, 2>(row, layout, place, words, sums),
        }
    }
}

/// Packs a row of floats into its tiles, see [`tiles`](super::tiles).
#[inline(always)]
pub(super) unsafe fn pack_tiles<L: RowLanes>(
    row: &[f32],
    layout: RowLayout,
    tiling: Tiling,
    r: usize,
    words: &mut [u32],
    sums: &mut [f32],
) {
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe {
        match tiling.parts {
            1 => super::float::pack_tiles::<L, 1>(row, layout, tiling, r, words, sums),
            2 => super::float::pack_tiles::<L, 2>(row, layout, tiling, r, words, sums),
            _ => super::float::pack_tiles::<L, 3>(row, layout, tiling, r, words, sums),
        }
    }
}
