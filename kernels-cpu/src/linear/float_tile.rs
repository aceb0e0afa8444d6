//! The inner loop of float activations: codes become floats in registers, exactly.
//!
//! Of integers what is multiplied is `code − c` with `c` the zero of a symmetric grid, or 8 or 128: small integers,
//! exact in bf16 and `f32`. A group's own zero then costs `(z − c) Σ x`, and the scale one multiply-add.
//!
//! Of floating-point codes it is their value, which is exact in both, too.
//!
//! A group's products are added in order, those of pairs of bf16 in blocks of 256 features that are added in order: a
//! row's bits are the same alone and among others. Of one or two rows such sums are too few in flight where a product
//! takes longer than the next one takes to begin, and where values are two bf16 that shows: these take two groups, or
//! blocks, side by side. More than two are more places of memory to read at once, and slower; groups without blocks
//! leave the processor nothing to begin before it has ended.
#![allow(clippy::needless_range_loop, reason = "rows and panels index several arrays at once")]

use crate::layout::{Layout, PANEL_ROWS, STEP, ScaleType};
use crate::simd::{FloatLanes, codes};

use super::ahead::{Ahead, next_parameters};
use super::tile::{Tile, finish, scales_of};

/// Steps of a block.
const BLOCK: usize = 256 / STEP;

/// Multiplies.
///
/// # Safety
/// As [`multiply`](super::tile::multiply), with activations as [`FloatLanes`] takes them.
#[inline(always)]
pub(crate) unsafe fn multiply<
    L: FloatLanes,
    const CODES: usize,
    const REST: bool,
    const MR: usize,
    const NP: usize,
>(
    t: &Tile<'_>,
) {
    let layout = t.layout;
    let (groups, steps) = (layout.groups(), layout.steps());
    // SAFETY: all reads are within what the caller guarantees, as in the tile of integers.
    unsafe {
        let table = table_of::<L, CODES>(layout);
        let mut totals = [[L::zero(); NP]; MR];
        let mut g = 0;
        if L::ORDERED || steps <= BLOCK {
            if !L::ORDERED && REST && MR <= 2 {
                while g + 2 <= groups {
                    let both = add_steps::<L, CODES, REST, MR, NP, 2>(
                        t,
                        table_of::<L, CODES>(layout),
                        g * steps,
                        steps,
                    );
                    // Through memory once, or the compiler keeps them there in the inner loop.
                    let [first, second] = core::hint::black_box(both);
                    join::<L, CODES, MR, NP>(t, first, g, &mut totals);
                    join::<L, CODES, MR, NP>(t, second, g + 1, &mut totals);
                    g += 2;
                }
            }
            while g < groups {
                let [sums] = add_steps::<L, CODES, REST, MR, NP, 1>(t, table, g * steps, steps);
                join::<L, CODES, MR, NP>(t, sums, g, &mut totals);
                g += 1;
            }
        }
        // Of wide groups, block after block.
        while g < groups {
            let (mut sums, mut at) = ([[L::zero(); NP]; MR], 0);
            if !L::ORDERED && REST && MR <= 2 {
                while at + 2 * BLOCK <= steps {
                    let both = add_steps::<L, CODES, REST, MR, NP, 2>(
                        t,
                        table_of::<L, CODES>(layout),
                        g * steps + at,
                        BLOCK,
                    );
                    let [first, second] = core::hint::black_box(both);
                    plus::<L, MR, NP>(&mut sums, first);
                    plus::<L, MR, NP>(&mut sums, second);
                    at += 2 * BLOCK;
                }
            }
            while at < steps {
                let count = BLOCK.min(steps - at);
                let [block] = add_steps::<L, CODES, REST, MR, NP, 1>(t, table, g * steps + at, count);
                plus::<L, MR, NP>(&mut sums, block);
                at += count;
            }
            join::<L, CODES, MR, NP>(t, sums, g, &mut totals);
            g += 1;
        }
        debug_assert!(t.zero == 0 && t.scales.is_null() || layout.scales() == ScaleType::Progressive);
        finish::<L, MR, NP>(t, totals);
    }
}

/// What turns codes into floats.
///
/// # Safety
/// The processor must have `L`'s instructions.
#[inline(always)]
unsafe fn table_of<L: FloatLanes, const CODES: usize>(layout: &Layout) -> L::Table {
    // SAFETY: the caller has the instructions.
    unsafe {
        match CODES {
            codes::E2M1 | codes::E4M3 => L::values::<CODES>(),
            _ => L::centre(centre::<CODES>(layout)),
        }
    }
}

/// What is taken off every code that is an integer.
fn centre<const CODES: usize>(layout: &Layout) -> i32 {
    layout.middle().map_or(1 << (codes::bits(CODES) - 1), i32::from)
}

/// `sums += block`.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn plus<L: FloatLanes, const MR: usize, const NP: usize>(
    sums: &mut [[L::F; NP]; MR],
    block: [[L::F; NP]; MR],
) {
    for m in 0..MR {
        for p in 0..NP {
            // SAFETY: the caller has the instructions.
            sums[m][p] = unsafe { L::fma(block[m][p], L::splat_f32(1.0), sums[m][p]) };
        }
    }
}

/// The sums over `count` steps from `first` on, and with `NG` of 2 those over the `count` steps behind them, side
/// by side.
///
/// # Safety
/// As [`multiply`]; the steps must be there.
#[inline(always)]
unsafe fn add_steps<
    L: FloatLanes,
    const CODES: usize,
    const REST: bool,
    const MR: usize,
    const NP: usize,
    const NG: usize,
>(
    t: &Tile<'_>,
    table: L::Table,
    first: usize,
    count: usize,
) -> [[[L::F; NP]; MR]; NG] {
    let panel = t.layout.panel_bytes();
    let step_bytes = PANEL_ROWS * STEP * codes::bits(CODES) / 8;
    // Of two side by side what is asked for comes after both.
    let waits = MR <= 4;
    let ahead = Ahead::new(t.layout, NP, (NG * count * step_bytes).clamp(2048, 8192));
    let ahead_of = |at: *const u8| if waits { ahead.of(at.addr() - t.weights.addr()) } else { 0 };
    // SAFETY: this function's own `# Safety`; steps and rows stay below their counts.
    unsafe {
        let mut at = t.weights.wrapping_add(first * step_bytes);
        let mut x = t.activations.wrapping_add(first * t.strip * FLOAT_STEP);
        let mut sums = [[[L::zero(); NP]; MR]; NG];
        for _ in 0..count {
            // One by one and not in a loop: all sums stay in registers.
            add_step::<L, CODES, REST, MR, NP>(&mut sums[0], (at, x), table, panel, ahead_of(at));
            if NG > 1 {
                let behind =
                    (at.wrapping_add(count * step_bytes), x.wrapping_add(count * t.strip * FLOAT_STEP));
                let ahead = ahead_of(behind.0);
                add_step::<L, CODES, REST, MR, NP>(&mut sums[1], behind, table, panel, ahead);
            }
            // After the last step these point behind what is there, and are not followed.
            at = at.wrapping_add(step_bytes);
            x = x.wrapping_add(t.strip * FLOAT_STEP);
        }
        sums
    }
}

/// Adds the sums of a group to the totals, times its scale.
///
/// # Safety
/// As [`multiply`]; the group must be there.
#[inline(always)]
unsafe fn join<L: FloatLanes, const CODES: usize, const MR: usize, const NP: usize>(
    t: &Tile<'_>,
    mut sums: [[L::F; NP]; MR],
    g: usize,
    totals: &mut [[L::F; NP]; MR],
) {
    let layout = t.layout;
    let (panel, zeros_at) = (layout.panel_bytes(), layout.zeros_at());
    // SAFETY: this function's own `# Safety`.
    unsafe {
        if MR <= 4 {
            next_parameters::<L, NP>(layout, t.weights, g);
        }
        let scales = t.weights.add(layout.scales_at());
        let scales = scales_of::<L, NP>(layout.scales(), scales, panel, g * PANEL_ROWS);
        for p in 0..NP {
            if layout.middle().is_none() {
                let zeros = t.weights.add(p * panel + zeros_at + g * PANEL_ROWS * codes::bits(CODES) / 8);
                let zeros = if codes::bits(CODES) == 4 { L::load_u4(zeros) } else { L::load_u8(zeros) };
                // Minus the zero, counted from the centre.
                let zeros = L::to_f32(L::sub(L::splat(centre::<CODES>(layout)), zeros));
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
}

/// Adds the products of a step to the sums of its group; `at` is where its codes begin and `x` the activations.
///
/// # Safety
/// As [`multiply`]; `at` must be a step of `NP` panels that are `panel` bytes apart, `x` that of `MR` rows.
#[inline(always)]
unsafe fn add_step<L: FloatLanes, const CODES: usize, const REST: bool, const MR: usize, const NP: usize>(
    sums: &mut [[L::F; NP]; MR],
    (at, x): (*const u8, *const u8),
    table: L::Table,
    panel: usize,
    ahead: usize,
) {
    // SAFETY: this function's own `# Safety`; prefetched addresses need not be mapped.
    unsafe {
        if ahead > 0 {
            for p in 0..NP {
                L::prefetch(at.wrapping_add(p * panel + ahead));
                if codes::bits(CODES) == 8 {
                    L::prefetch(at.wrapping_add(p * panel + ahead + 64));
                }
            }
        }
        for part in 0..L::PARTS {
            let mut w = [L::weights::<CODES>(at, part, table); NP];
            for p in 1..NP {
                w[p] = L::weights::<CODES>(at.add(p * panel), part, table);
            }
            for m in 0..MR {
                let row = x.add(m * FLOAT_STEP);
                for p in 0..NP {
                    sums[m][p] = L::dot_float::<REST>(sums[m][p], w[p], row, part);
                }
            }
        }
    }
}

/// Bytes of a step of a row: eight floats, or eight pairs of bf16.
pub(crate) const FLOAT_STEP: usize = 32;
