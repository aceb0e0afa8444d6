//! The inner loop for super-blocks: an integer scale per group, and a float per super-block.
//!
//! Within a super-block, the sums of groups times their scales are added exactly, as integers, so a super-block costs
//! one multiply-add in `f32`. Its minima, each times the group's sum of activations, cost another.
#![allow(clippy::needless_range_loop, reason = "rows and panels index several arrays at once")]

use super::prefetcher::{self, Prefetcher, next_parameters};
use super::tile::{Tile, finish, group_sums, prefetch_out};
use crate::layout::{PANEL_ROWS, SUPER_BLOCK};
use crate::simd::{IQ4_OFFSET, Lanes, codes};

/// Multiplies a tile.
///
/// # Safety
/// See [`multiply`](super::tile::multiply).
#[inline(always)]
pub(crate) unsafe fn multiply<L: Lanes, const CODES: usize, const MR: usize, const NP: usize>(t: &Tile<'_>) {
    let layout = t.layout;
    let panel = layout.panel_bytes();
    // Other codes have minima instead of a zero point.
    let centred = const { codes::bits(CODES) == 6 || CODES == codes::IQ4 };
    let (groups, blocks) = (SUPER_BLOCK / layout.group_size(), layout.blocks());
    let (scales_at, mins_at, channels_at) = (layout.scales_at(), layout.zeros_at(), layout.channels_at());
    let ahead = Prefetcher::new(layout, NP, prefetcher::distance(MR, const { codes::bits(CODES) }));
    // SAFETY: all reads are within the memory that the caller guarantees to be valid: block, group and row stay below
    // their counts, and the offsets are those of the layout.
    unsafe {
        let zero = match CODES {
            codes::IQ4 => L::splat(IQ4_OFFSET - L::OFFSET),
            _ => L::splat(layout.zero_point().map_or(0, i32::from)),
        };
        let mut totals = [[L::zero(); NP]; MR];
        let mut at = (t.weights, t.activations.cast::<i8>());
        prefetch_out::<L, MR, NP>(t);
        for b in 0..blocks {
            let mut block = [[L::splat(0); NP]; MR];
            for g in b * groups..(b + 1) * groups {
                let sums = group_sums::<L, CODES, MR, NP>(t, &mut at, ahead);
                next_parameters::<L, NP>(layout, t.weights, g);
                let row_sums = t.sums.cast::<i32>().add(g * t.strip);
                let mut scales = [L::splat(0); NP];
                for p in 0..NP {
                    scales[p] = L::load_i8(t.weights.add(p * panel + scales_at + g * PANEL_ROWS));
                }
                for m in 0..MR {
                    let off = if centred { L::mul(zero, L::splat(*row_sums.add(m))) } else { zero };
                    for p in 0..NP {
                        let sum = if centred { L::sub(sums[m][p], off) } else { sums[m][p] };
                        block[m][p] = L::add(block[m][p], L::mul(sum, scales[p]));
                    }
                }
            }
            for p in 0..NP {
                let of_block = t.weights.add(p * panel + channels_at + 2 * b * PANEL_ROWS);
                let scale = L::load_f16(of_block);
                for m in 0..MR {
                    totals[m][p] = L::fma(L::to_f32(block[m][p]), scale, totals[m][p]);
                }
                if centred {
                    continue;
                }
                let mut mins = [L::splat(0); MR];
                for g in b * groups..(b + 1) * groups {
                    let min = L::load_u8(t.weights.add(p * panel + mins_at + g * PANEL_ROWS));
                    let row_sums = t.sums.cast::<i32>().add(g * t.strip);
                    for m in 0..MR {
                        mins[m] = L::sub(mins[m], L::mul(min, L::splat(*row_sums.add(m))));
                    }
                }
                let scale = L::load_f16(of_block.add(2 * blocks * PANEL_ROWS));
                for m in 0..MR {
                    totals[m][p] = L::fma(L::to_f32(mins[m]), scale, totals[m][p]);
                }
            }
        }
        finish::<L, MR, NP>(t, totals);
    }
}
