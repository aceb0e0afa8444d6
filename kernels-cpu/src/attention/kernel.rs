//! The inner loops: a few query rows and the pages of one chunk.
//!
//! The first pass over a chunk computes all scores, the second their maximum, exponentials and sums, and the third
//! accumulates the values. A row's result does not depend on the other rows.
#![allow(clippy::needless_range_loop, reason = "rows and panels index several arrays at once")]

use core::mem::MaybeUninit;

use super::exp::exp;
use super::layout::{KvLayout, PAGE_TOKENS};
use super::prefetcher::{KEY_LINES, Prefetcher, SCORE_LINES, VALUE_LINES};
use crate::layout::{PANEL_ROWS, STEP};
use crate::simd::{Lanes, ValueLanes};

/// Pages per chunk.
pub(super) const CHUNK_PAGES: usize = 16;
pub(super) const CHUNK: usize = CHUNK_PAGES * PAGE_TOKENS;
pub(super) const TILE_ROWS: usize = 4;

/// The inputs and outputs of a tile.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    pub(super) layout: KvLayout,
    /// The bytes of all pages.
    pub(super) bytes: *const u8,
    /// The pages of the chunk, at most [`CHUNK_PAGES`].
    pub(super) pages: &'a [u32],
    /// The pages that will most likely be read next.
    pub(super) next: &'a [u32],
    /// Whether this is the first tile to read the chunk.
    pub(super) is_first: bool,
    /// The number of tokens at the beginning of the chunk that no row sees.
    pub(super) first: usize,
    /// For each row, the number of the chunk's tokens up to the last that the row sees.
    pub(super) seen: [usize; TILE_ROWS],
    /// Each row's query, `[head_dim]`: `i8` codes, or `f32` for pages of f16.
    pub(super) q: [*const u8; TILE_ROWS],
    /// For each row, the factor of its scores: the scale of attention, for quantized pages times the scale of its
    /// codes.
    pub(super) factor: [f32; TILE_ROWS],
    /// The sum of each row's codes.
    pub(super) sum: [f32; TILE_ROWS],
    /// Output `[rows][head_dim]`: `Σ exp(score − largest) · value`.
    pub(super) out: *mut f32,
}

/// The softmax statistics of a query row over some tokens: the largest score, and the sum of `exp(score − largest)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Mass {
    pub(super) max: f32,
    pub(super) total: f32,
}

impl Mass {
    /// The mass of an empty set of tokens.
    pub(super) const NONE: Self = Self { max: f32::NEG_INFINITY, total: 0.0 };
}

/// For each row, the scores of a chunk's tokens. Probabilities later overwrite them.
#[repr(C, align(64))]
struct Scores<const MR: usize>([[f32; CHUNK]; MR]);

/// Computes attention for the rows of a tile.
///
/// # Safety
/// The processor must have the instructions of `L`. Pages must lie within `bytes`, and `first` and `seen` within the
/// pages; `MR` rows of `q` and `out` must be valid as their fields describe, and no other thread may access these parts
/// of `out` during the call. `BITS` must be those of the layout.
#[inline(always)]
pub(super) unsafe fn attend<L: ValueLanes, const BITS: usize, const MR: usize>(
    t: &Tile<'_>,
) -> [Mass; TILE_ROWS] {
    let mut scores = MaybeUninit::<Scores<MR>>::uninit();
    let at = scores.as_mut_ptr().cast::<f32>();
    let end = (0..MR).fold(0, |end, m| end.max(t.seen[m]));
    let mut masses = [Mass::NONE; TILE_ROWS];
    // SAFETY: all reads and writes are within the memory that the caller guarantees to be valid: pages and tokens stay
    // below their counts, offsets are those of the layout, and scores are written before they are read.
    unsafe {
        let d = t.layout.head_dim();
        if end <= t.first {
            core::slice::from_raw_parts_mut(t.out, MR * d).fill(0.0);
            return masses;
        }
        let (start, pages) = (t.first / PAGE_TOKENS, end.div_ceil(PAGE_TOKENS));
        let page = |i: usize| t.bytes.wrapping_add(t.pages[i] as usize * t.layout.page_bytes());
        let mut ahead = Prefetcher::new(t, &t.pages[start..pages]);
        for i in start..pages {
            let out = at.add(i * PAGE_TOKENS);
            if L::WIDE {
                keys::<L, BITS, MR, 4>(t, page(i), &mut ahead, 0, out);
            } else {
                for panel in 0..PAGE_TOKENS / PANEL_ROWS {
                    keys::<L, BITS, MR, 1>(t, page(i), &mut ahead, panel, out.add(panel * PANEL_ROWS));
                }
            }
        }
        let offsets = weigh::<L, BITS, MR>(t, at, end, &mut ahead, &mut masses);
        for m in 0..MR {
            let offset = L::splat_f32(offsets[m]);
            for f in 0..d / PANEL_ROWS {
                L::store_f32(t.out.add(m * d + f * PANEL_ROWS), offset);
            }
        }
        for i in start..pages {
            let tokens = [t.first.saturating_sub(i * PAGE_TOKENS), (end - i * PAGE_TOKENS).min(PAGE_TOKENS)];
            let values = page(i).wrapping_add(t.layout.values_at());
            let p = at.cast::<u8>().add(i * PAGE_TOKENS / STEP * step_bytes::<L, BITS>());
            let groups = d / PANEL_ROWS;
            let mut f = 0;
            if L::WIDE {
                if MR <= 2 {
                    while f + 8 <= groups {
                        weighted::<L, BITS, MR, 8>(t, values, &mut ahead, f, tokens, p);
                        f += 8;
                    }
                }
                while f + 4 <= groups {
                    weighted::<L, BITS, MR, 4>(t, values, &mut ahead, f, tokens, p);
                    f += 4;
                }
            }
            while f < groups {
                weighted::<L, BITS, MR, 1>(t, values, &mut ahead, f, tokens, p);
                f += 1;
            }
        }
    }
    masses
}

/// Bytes per step of the probabilities.
const fn step_bytes<L: ValueLanes, const BITS: usize>() -> usize {
    if BITS == 16 { 32 } else { L::STEP_BYTES }
}

/// Computes the scores of `NP` panels of a page: `factor · (scale · Σ q·code + zero · Σ q)`, or `factor · Σ q·k`.
///
/// # Safety
/// See [`attend`]; `out` must have room for `NP · 16` scores per row.
#[inline(always)]
unsafe fn keys<L: ValueLanes, const BITS: usize, const MR: usize, const NP: usize>(
    t: &Tile<'_>,
    page: *const u8,
    ahead: &mut Prefetcher<'_>,
    panel: usize,
    out: *mut f32,
) {
    let d = t.layout.head_dim();
    // SAFETY: steps and features stay within the panels, panels within the page, and the caller guarantees that the
    // page and `out` are valid.
    unsafe {
        let mut scores = [[L::zero(); NP]; MR];
        if BITS == 16 {
            let row = 2 * PANEL_ROWS;
            let at = page.add(panel * d * row);
            for i in 0..d {
                let mut k = [L::zero(); NP];
                for p in 0..NP {
                    k[p] = L::load_f16(at.add((p * d + i) * row));
                }
                if i % STEP == 0 {
                    ahead.prefetch::<L>(KEY_LINES[2] * NP / 4);
                }
                for m in 0..MR {
                    let q = L::splat_f32(t.q[m].cast::<f32>().add(i).read_unaligned());
                    for p in 0..NP {
                        scores[m][p] = L::fma(k[p], q, scores[m][p]);
                    }
                }
            }
        } else {
            let (steps, bytes) = (d / STEP, PANEL_ROWS * STEP * BITS / 8);
            let at = page.add(panel * steps * bytes);
            let mut sums = [[L::splat(0); NP]; MR];
            if BITS == 8 && L::OFFSET != 0 {
                // Start with the offset that was subtracted from every code, times the row's sum: at most 128 · 127 ·
                // 512.
                sums = core::array::from_fn(|m| [L::splat(L::OFFSET * t.sum[m] as i32); NP]);
            }
            for s in 0..steps {
                let mut codes = [L::codes4(at); NP];
                for p in 0..NP {
                    let line = (p * steps + s) * bytes;
                    codes[p] = if BITS == 4 { L::codes4(at.add(line)) } else { L::codes8(at.add(line)) };
                }
                ahead.prefetch::<L>(KEY_LINES[BITS / 8] * NP / 4);
                for m in 0..MR {
                    let q = L::activations(t.q[m].cast::<i8>().add(s * STEP));
                    for p in 0..NP {
                        sums[m][p] = match BITS {
                            4 => L::dot4(sums[m][p], codes[p], q),
                            _ => L::dot8(sums[m][p], codes[p], q),
                        };
                    }
                }
            }
            for p in 0..NP {
                let row = 2 * (panel + p) * PANEL_ROWS;
                let scale = L::load_f16(page.add(t.layout.scales_at(true) + row));
                let zero = L::load_f16(page.add(t.layout.zeros_at(true) + row));
                for m in 0..MR {
                    let zeros = L::mul_f32(zero, L::splat_f32(t.sum[m]));
                    scores[m][p] = L::fma(scale, L::to_f32(sums[m][p]), zeros);
                }
            }
        }
        for m in 0..MR {
            let factor = L::splat_f32(t.factor[m]);
            for p in 0..NP {
                L::store_f32(out.add(m * CHUNK + p * PANEL_ROWS), L::mul_f32(scores[m][p], factor));
            }
        }
    }
}

/// Converts scores to probabilities that are not yet divided by their sum. Unless pages are f16, also multiplies them
/// by the scales of the values. Returns each row's constant part, `Σ p · (zero + centre · scale)`; 0 for f16.
///
/// # Safety
/// See [`attend`]; `rows` must hold the scores of all tokens from `first`'s page to `end`'s.
#[inline(always)]
unsafe fn weigh<L: ValueLanes, const BITS: usize, const MR: usize>(
    t: &Tile<'_>,
    rows: *mut f32,
    end: usize,
    ahead: &mut Prefetcher<'_>,
    masses: &mut [Mass; TILE_ROWS],
) -> [f32; MR] {
    let start = t.first / PAGE_TOKENS * (PAGE_TOKENS / PANEL_ROWS);
    let panels = start..end.div_ceil(PANEL_ROWS);
    // Panels whose tokens are seen by all rows.
    let min = (0..MR).fold(end, |min, m| min.min(t.seen[m]));
    let whole = t.first.div_ceil(PANEL_ROWS)..min / PANEL_ROWS;
    let bytes = 2 * step_bytes::<L, BITS>();
    // SAFETY: the caller guarantees that the scores of these panels exist, and panels are those of the chunk's pages.
    unsafe {
        let mut minus = [L::zero(); MR];
        for m in 0..MR {
            let row = rows.add(m * CHUNK);
            let mut max = L::splat_f32(f32::NEG_INFINITY);
            for v in panels.clone() {
                let mut scores = L::load_f32(row.add(v * PANEL_ROWS).cast());
                if !whole.contains(&v) {
                    scores = keep::<L>(scores, v, [t.first, t.seen[m]], f32::NEG_INFINITY);
                }
                max = L::max_f32(scores, max);
            }
            let max = array::<L>(max).into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a });
            masses[m].max = max;
            minus[m] = L::splat_f32(if max == f32::NEG_INFINITY { 0.0 } else { -max });
        }
        let (one, centre) = (L::splat_f32(1.0), L::splat_f32(centre::<BITS>() as f32));
        let (mut totals, mut offsets) = ([L::zero(); MR], [L::zero(); MR]);
        for v in panels {
            ahead.prefetch::<L>(SCORE_LINES[BITS / 8]);
            let is_whole = whole.contains(&v);
            let (mut scale, mut zero) = (one, one);
            if BITS != 16 {
                let page = t.pages[v * PANEL_ROWS / PAGE_TOKENS] as usize * t.layout.page_bytes();
                let grids = t.bytes.add(page + v * PANEL_ROWS % PAGE_TOKENS * 2);
                scale = L::load_f16(grids.add(t.layout.scales_at(false)));
                zero = L::load_f16(grids.add(t.layout.zeros_at(false)));
                if !is_whole {
                    // Slots that were never written may hold any bytes, including NaN.
                    scale = keep::<L>(scale, v, [t.first, end], 0.0);
                    zero = keep::<L>(zero, v, [t.first, end], 0.0);
                }
            }
            for m in 0..MR {
                let row = rows.add(m * CHUNK);
                let scores = L::load_f32(row.add(v * PANEL_ROWS).cast());
                let mut p = exp::<L>(L::fma(scores, one, minus[m]));
                // `max_f32` and `exp` do not propagate NaN. Adding zero times the score does, since zero times NaN or
                // infinity is NaN.
                p = L::fma(scores, L::zero(), p);
                if !is_whole {
                    p = keep::<L>(p, v, [t.first, t.seen[m]], 0.0);
                }
                totals[m] = L::fma(p, one, totals[m]);
                if BITS != 16 {
                    offsets[m] = L::fma(p, zero, offsets[m]);
                    p = L::mul_f32(p, scale);
                    offsets[m] = L::fma(p, centre, offsets[m]);
                }
                store::<L, BITS>(row.cast::<u8>().add(v * bytes), p);
            }
        }
        for m in 0..MR {
            masses[m].total = sum(array::<L>(totals[m]));
        }
        offsets.map(|offset| sum(array::<L>(offset)))
    }
}

/// The midpoint of the codes. It is subtracted from the codes of values, which minimizes the error that rounding a
/// probability causes.
const fn centre<const BITS: usize>() -> i32 {
    if BITS == 16 { 0 } else { 1 << (BITS - 1) }
}

/// # Safety
/// See [`attend`]; `to` must have room for the probabilities of two steps.
#[inline(always)]
unsafe fn store<L: ValueLanes, const BITS: usize>(to: *mut u8, p: L::F) {
    // SAFETY: the caller guarantees that the processor has the instructions of `L` and that `to` has room for the
    // result.
    unsafe { if BITS == 16 { L::store_f32(to.cast(), p) } else { L::store_probabilities(to, p) } }
}

/// Keeps the visible lanes of a panel, `first..end`, and sets the others to `other`.
///
/// # Safety
/// See [`attend`].
#[inline(always)]
unsafe fn keep<L: Lanes>(lanes: L::F, panel: usize, [first, end]: [usize; 2], other: f32) -> L::F {
    // SAFETY: the caller guarantees that the processor has the instructions of `L`; the array holds the sixteen values
    // that are loaded.
    unsafe {
        let mut kept = array::<L>(lanes);
        for (i, lane) in kept.iter_mut().enumerate() {
            if !(first..end).contains(&(panel * PANEL_ROWS + i)) {
                *lane = other;
            }
        }
        L::load_f32(kept.as_ptr().cast())
    }
}

/// # Safety
/// See [`attend`].
#[inline(always)]
unsafe fn array<L: Lanes>(lanes: L::F) -> [f32; PANEL_ROWS] {
    let mut array = [0.0; PANEL_ROWS];
    // SAFETY: the caller guarantees that the processor has the instructions of `L`; the array holds the sixteen values
    // that are stored.
    unsafe { L::store_f32(array.as_mut_ptr(), lanes) };
    array
}

/// Adds all lanes. Each step adds the upper half to the lower half, so the order is the same on all instruction sets.
#[inline(always)]
fn sum(mut lanes: [f32; PANEL_ROWS]) -> f32 {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// Adds the weighted values of tokens `first..last` of a page to the output, in `NF` panels of features starting at
/// `f`, token after token.
///
/// # Safety
/// See [`attend`]; `p` must point to the probabilities of the page.
#[inline(always)]
unsafe fn weighted<L: ValueLanes, const BITS: usize, const MR: usize, const NF: usize>(
    t: &Tile<'_>,
    values: *const u8,
    ahead: &mut Prefetcher<'_>,
    f: usize,
    [first, last]: [usize; 2],
    p: *const u8,
) {
    let d = t.layout.head_dim();
    let bytes = PANEL_ROWS * STEP * BITS / 8;
    let panel = PAGE_TOKENS / STEP * bytes;
    let row = CHUNK * size_of::<f32>();
    // SAFETY: steps stay within the page, and panels of features within the head; the probabilities of a row are stored
    // in the memory of its scores. The caller guarantees that the page, `p` and `out` are valid.
    unsafe {
        let out = |m: usize, g: usize| t.out.add(m * d + (f + g) * PANEL_ROWS);
        let mut sums = [[L::zero(); NF]; MR];
        for m in 0..MR {
            for g in 0..NF {
                sums[m][g] = L::load_f32(out(m, g).cast());
            }
        }
        let table = L::centre(centre::<BITS>());
        for s in first / STEP..last.div_ceil(STEP) {
            let at = values.add(f * panel + s * bytes);
            ahead.prefetch::<L>(VALUE_LINES[BITS / 8] * NF / 4);
            let p = p.add(s * step_bytes::<L, BITS>());
            if BITS == 16 {
                // Unwritten slots are skipped in f16 pages, where they may be NaN. In pages of codes they are finite,
                // and a probability of 0 cancels them.
                for i in first.saturating_sub(s * STEP)..STEP.min(last - s * STEP) {
                    let mut v = [L::zero(); NF];
                    for g in 0..NF {
                        v[g] = L::load_f16(at.add(g * panel + i * 2 * PANEL_ROWS));
                    }
                    for m in 0..MR {
                        let p = L::splat_f32(p.add(m * row).cast::<f32>().add(i).read_unaligned());
                        for g in 0..NF {
                            sums[m][g] = L::fma(v[g], p, sums[m][g]);
                        }
                    }
                }
                continue;
            }
            for part in 0..L::PARTS {
                let mut w = [L::weights::<4>(at, part, table); NF];
                for g in 0..NF {
                    w[g] = match BITS {
                        4 => L::weights::<4>(at.add(g * panel), part, table),
                        _ => L::weights::<8>(at.add(g * panel), part, table),
                    };
                }
                for m in 0..MR {
                    let p = p.add(m * row);
                    for g in 0..NF {
                        sums[m][g] = L::dot_probabilities(sums[m][g], w[g], p, part);
                    }
                }
            }
        }
        for m in 0..MR {
            for g in 0..NF {
                L::store_f32(out(m, g), sums[m][g]);
            }
        }
    }
}

/// Merges a partial result into `out` and returns the mass of both. `out` and `part` are `[head_dim]`, not yet divided
/// by their totals.
///
/// # Safety
/// The processor must have the instructions of `L`; `out` and `part` must be valid for `head_dim` values, a multiple of
/// 16, and no other thread may access `out` or write to `part` during the call.
#[inline(always)]
pub(super) unsafe fn join<L: ValueLanes>(
    head_dim: usize,
    out: *mut f32,
    mass: Mass,
    part: *const f32,
    other: Mass,
) -> Mass {
    if other.total == 0.0 {
        return mass;
    }
    // SAFETY: features are below `head_dim`, for which the caller guarantees that both pointers are valid.
    unsafe {
        if mass.total == 0.0 {
            out.copy_from_nonoverlapping(part, head_dim);
            return other;
        }
        let max = if other.max > mass.max { other.max } else { mass.max };
        let (left, right) = (exp::<L>(L::splat_f32(mass.max - max)), exp::<L>(L::splat_f32(other.max - max)));
        for i in (0..head_dim).step_by(PANEL_ROWS) {
            let (a, b) = (L::load_f32(out.add(i).cast()), L::load_f32(part.add(i).cast()));
            L::store_f32(out.add(i), L::fma(a, left, L::mul_f32(b, right)));
        }
        let [left, right] = [left, right].map(|lanes| array::<L>(lanes)[0]);
        Mass { max, total: left.mul_add(mass.total, right * other.total) }
    }
}
