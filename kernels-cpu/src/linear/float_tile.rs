//! The inner loop of float activations: codes become floats in registers, exactly.
//!
//! What is multiplied is `code − c` with `c` the zero of a symmetric grid, or 8 or 128: small whole numbers,
//! exact in bf16 and `f32`. A group's own zero then costs `(z − c) Σ x`, and the scale one multiply-add.
#![allow(clippy::needless_range_loop, reason = "rows and panels index several arrays at once")]

use crate::layout::{PANEL_ROWS, STEP, ScaleType};
use crate::simd::FloatLanes;

use super::tile::{Tile, finish, scales_of};

/// Sums that one output has at most.
const CHAINS: usize = 4;

/// Multiplies.
///
/// # Safety
/// As [`multiply`](super::tile::multiply), with activations as [`FloatLanes`] takes them.
#[inline(always)]
pub(crate) unsafe fn multiply<
    L: FloatLanes,
    const BITS: usize,
    const REST: bool,
    const MR: usize,
    const NP: usize,
>(
    t: &Tile<'_>,
) {
    let layout = t.layout;
    let (groups, steps, panel) = (layout.groups(), layout.steps(), layout.panel_bytes());
    let step_bytes = PANEL_ROWS * STEP * BITS / 8;
    let (scales_at, zeros_at) = (layout.scales_at(), layout.zeros_at());
    let centre = layout.middle().map_or(1 << (BITS - 1), i32::from);
    let ahead = if MR <= 4 { 2048 } else { 0 };
    // A product takes longer than the next one takes to begin: few rows need several sums in flight.
    let chains = if L::ORDERED || MR > 2 { 1 } else { CHAINS / MR };
    // SAFETY: all reads are within what the caller vouches for, as in the tile of whole numbers.
    unsafe {
        let table = L::centre(centre);
        let mut totals = [[L::zero(); NP]; MR];
        let (mut at, mut x) = (t.weights, t.activations);
        for g in 0..groups {
            let mut acc = [[[L::zero(); CHAINS]; NP]; MR];
            for _ in 0..steps {
                for p in 0..NP {
                    if ahead > 0 {
                        L::prefetch(at.wrapping_add(p * panel + ahead));
                        if BITS == 8 {
                            L::prefetch(at.wrapping_add(p * panel + ahead + 64));
                        }
                    }
                }
                for part in 0..L::PARTS {
                    let mut w = [L::weights::<BITS>(at, part, table); NP];
                    for p in 1..NP {
                        w[p] = L::weights::<BITS>(at.add(p * panel), part, table);
                    }
                    for m in 0..MR {
                        let row = x.add(m * FLOAT_STEP);
                        for p in 0..NP {
                            let sum = &mut acc[m][p][part % chains];
                            *sum = L::dot_float::<REST>(*sum, w[p], row, part);
                        }
                    }
                }
                // After the last step these point behind what is there, and are not followed.
                at = at.wrapping_add(step_bytes);
                x = x.wrapping_add(t.strip * FLOAT_STEP);
            }
            let mut sums = [[L::zero(); NP]; MR];
            for m in 0..MR {
                for p in 0..NP {
                    let one = L::splat_f32(1.0);
                    sums[m][p] = acc[m][p][0];
                    for c in 1..chains {
                        sums[m][p] = L::fma(acc[m][p][c], one, sums[m][p]);
                    }
                }
            }
            let scales = t.weights.add(scales_at);
            let scales = scales_of::<L, NP>(layout.scales(), scales, panel, g * PANEL_ROWS);
            for p in 0..NP {
                if layout.middle().is_none() {
                    let zeros = t.weights.add(p * panel + zeros_at + g * PANEL_ROWS * BITS / 8);
                    let zeros = if BITS == 4 { L::load_u4(zeros) } else { L::load_u8(zeros) };
                    // Minus the zero, counted from the centre.
                    let zeros = L::to_f32(L::sub(L::splat(centre), zeros));
                    for m in 0..MR {
                        let sum = *t.sums.cast::<f32>().add(g * t.strip + m);
                        sums[m][p] = L::fma(zeros, L::splat_f32(sum), sums[m][p]);
                    }
                }
                let progressive = layout.scales() == ScaleType::Progressive;
                let scale = if progressive { L::to_f32(L::as_i32(scales[p])) } else { scales[p] };
                for m in 0..MR {
                    totals[m][p] = L::fma(sums[m][p], scale, totals[m][p]);
                }
            }
        }
        debug_assert!(t.zero == 0 && t.scales.is_null() || layout.scales() == ScaleType::Progressive);
        finish::<L, MR, NP>(t, totals);
    }
}

/// Bytes of a step of a row: eight floats, or eight pairs of bf16.
pub(crate) const FLOAT_STEP: usize = 32;
