//! The transform of one row over [`RowLanes`].
//!
//! # Safety
//! The processor must have the instructions of `L`, for every unsafe function of this module.

use core::mem::MaybeUninit;

use super::Factor;
use super::construct::MAX_ORDER;
use crate::simd::elementwise::RowLanes;

const LANES: usize = 16;

/// The signs of lanes for additions at `distance`: −1 for the lanes that are subtracted from their partner.
const fn signs(distance: usize) -> [f32; LANES] {
    let mut signs = [1.0; LANES];
    let mut i = 0;
    while i < LANES {
        if i & distance != 0 {
            signs[i] = -1.0;
        }
        i += 1;
    }
    signs
}
static SIGNS: [[f32; LANES]; 4] = [signs(1), signs(2), signs(4), signs(8)];

/// Loads up to sixteen values, padded with zeros.
#[inline(always)]
unsafe fn load<L: RowLanes>(x: &[f32]) -> L::F {
    let mut part = [0.0; LANES];
    let from = if x.len() >= LANES {
        x.as_ptr()
    } else {
        part[..x.len()].copy_from_slice(x);
        part.as_ptr()
    };
    // SAFETY: the pointer is valid for the sixteen values that are loaded; the caller guarantees that the processor has
    // the instructions of `L`.
    unsafe { L::load_f32(from.cast()) }
}

#[inline(always)]
unsafe fn store<L: RowLanes>(x: &mut [f32], a: L::F) {
    if x.len() >= LANES {
        // SAFETY: the pointer is valid for the sixteen values that are stored; the caller guarantees that the processor
        // has the instructions of `L`.
        return unsafe { L::store_f32(x.as_mut_ptr(), a) };
    }
    let mut part = [0.0; LANES];
    // SAFETY: `part` holds the sixteen values that are stored; the caller guarantees that the processor has the
    // instructions of `L`.
    unsafe { L::store_f32(part.as_mut_ptr(), a) };
    x.copy_from_slice(&part[..x.len()]);
}

/// Transforms a row, in the order that the module documentation of [`hadamard`](super) defines.
#[inline(always)]
pub(super) unsafe fn transform<L: RowLanes>(x: &mut [f32], power: u32, factors: &[Factor], scale: f32) {
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe {
        sylvester::<L>(x, 1 << power);
        let mut stride = 1 << power;
        for factor in factors.iter().rev() {
            for part in x.chunks_exact_mut(stride * factor.order) {
                // Accumulate as many rows as fit in registers, which also hides the latency of an addition.
                if L::WIDE {
                    multiply::<L, 8>(part, factor, stride);
                } else {
                    multiply::<L, 4>(part, factor, stride);
                }
            }
            stride *= factor.order;
        }
        let scale = L::splat_f32(scale);
        for part in x.chunks_mut(LANES) {
            store::<L>(part, L::mul_f32(load::<L>(part), scale));
        }
    }
}

/// Replaces each pair `(a, b)` of lanes at `DISTANCE` by `(a + b, a − b)`.
#[inline(always)]
unsafe fn within<L: RowLanes, const DISTANCE: usize>(v: L::F, signs: L::F) -> L::F {
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe { L::add_f32(L::partner::<DISTANCE>(v), L::flip(v, signs)) }
}

/// Transforms every block of `order` values, `order` a power of two, at distances 1, 2, 4 and so on.
#[inline(always)]
unsafe fn sylvester<L: RowLanes>(x: &mut [f32], order: usize) {
    // SAFETY: the caller guarantees that the processor has the instructions of `L`; all offsets are within the
    // block, which is whole registers.
    unsafe {
        let signs = SIGNS.map(|s| L::load_f32(s.as_ptr().cast()));
        for part in x.chunks_mut(LANES) {
            let mut v = load::<L>(part);
            if order > 1 {
                v = within::<L, 1>(v, signs[0]);
            }
            if order > 2 {
                v = within::<L, 2>(v, signs[1]);
            }
            if order > 4 {
                v = within::<L, 4>(v, signs[2]);
            }
            if order > 8 {
                v = within::<L, 8>(v, signs[3]);
            }
            store::<L>(part, v);
        }
        let mut distance = LANES;
        // Handle two distances per pass over memory.
        while 2 * distance < order {
            for block in x.chunks_exact_mut(4 * distance) {
                let at = block.as_mut_ptr();
                for i in (0..distance).step_by(LANES) {
                    let at = [0, 1, 2, 3].map(|part| at.add(part * distance + i));
                    let [a, b, c, d] = at.map(|at| L::load_f32(at.cast_const().cast()));
                    let (a, b) = (L::add_f32(a, b), L::sub_f32(a, b));
                    let (c, d) = (L::add_f32(c, d), L::sub_f32(c, d));
                    L::store_f32(at[0], L::add_f32(a, c));
                    L::store_f32(at[1], L::add_f32(b, d));
                    L::store_f32(at[2], L::sub_f32(a, c));
                    L::store_f32(at[3], L::sub_f32(b, d));
                }
            }
            distance *= 4;
        }
        if distance < order {
            for block in x.chunks_exact_mut(2 * distance) {
                let at = block.as_mut_ptr();
                for i in (0..distance).step_by(LANES) {
                    let at = [at.add(i), at.add(distance + i)];
                    let [a, b] = at.map(|at| L::load_f32(at.cast_const().cast()));
                    L::store_f32(at[0], L::add_f32(a, b));
                    L::store_f32(at[1], L::sub_f32(a, b));
                }
            }
        }
    }
}

/// Multiplies a factor by the `order` vectors of `stride` values in `x`, `ROWS` rows of the factor at a time.
#[inline(always)]
unsafe fn multiply<L: RowLanes, const ROWS: usize>(x: &mut [f32], factor: &Factor, stride: usize) {
    let order = factor.order;
    assert!((ROWS..=MAX_ORDER).contains(&order) && x.len() == order * stride);
    assert!(factor.signs.len() == order * order);
    let mut column = [const { MaybeUninit::<[f32; LANES]>::uninit() }; MAX_ORDER];
    for first in (0..stride).step_by(LANES) {
        let width = LANES.min(stride - first);
        // SAFETY: the caller guarantees that the processor has the instructions of `L`; rows and columns of the factor
        // are below its order; all `order` values of the column are written before they are read.
        unsafe {
            for (a, column) in column[..order].iter_mut().enumerate() {
                L::store_f32(column.as_mut_ptr().cast(), load::<L>(&x[a * stride + first..][..width]));
            }
            for at in (0..order).step_by(ROWS) {
                // If `ROWS` does not divide the order, the last group starts earlier and computes some rows again.
                let at = at.min(order - ROWS);
                let signs = factor.signs.as_ptr().add(at * order);
                let mut sums = [L::zero(); ROWS];
                for (a, column) in column[..order].iter().enumerate() {
                    let v = L::load_f32(column.as_ptr().cast());
                    for (r, sum) in sums.iter_mut().enumerate() {
                        *sum = L::fma(L::splat_f32(*signs.add(r * order + a)), v, *sum);
                    }
                }
                for (r, sum) in sums.into_iter().enumerate() {
                    store::<L>(&mut x[(at + r) * stride + first..][..width], sum);
                }
            }
        }
    }
}
