//! One pass over the vocabulary: measures models at each position without storing a matrix of their logits.
//!
//! ```text
//! hidden states ─► head, a tile of columns at a time ─► sums, ranks ─► joined in the order of columns
//! ```
//!
//! The vocabulary is split into stripes of whole tiles, and positions into parts if there are few stripes. The split
//! depends only on sizes, and a thread takes one part of the positions through one stripe, so results do not depend on
//! the number of threads. Sums are accumulated in f64.

mod exp;
mod sums;
#[cfg(test)]
mod tests;

use std::ops::Range;

use quant_core::model::{HEAD_TILE, Head};
use quant_core::vector::vectorized;
use quant_core::{CancelToken, Result};
use rayon::prelude::*;

pub(crate) use sums::Sums;

/// The approximate number of work items per pass.
const PIECES: usize = 32;
/// Number of positions per pass: large enough that converting a tile of the head to `f32` is a small part of the work.
const POSITIONS: usize = 2048;
/// Number of positions per pass for a head that cannot compute single tiles: the logits of all these positions are in
/// memory.
const WHOLE_POSITIONS: usize = 64;

/// The output stage of a model: how logits are obtained.
pub(crate) enum Output<'a> {
    /// A head multiplies hidden states.
    Head(Box<Head<'a>>),
    /// The inputs are the logits, for a vocabulary of this size.
    Logits(usize),
}

impl Output<'_> {
    /// Number of tokens in the vocabulary.
    pub(crate) fn vocab(&self) -> usize {
        match self {
            Self::Head(head) => head.vocab(),
            Self::Logits(vocab) => *vocab,
        }
    }

    /// Number of input values per position.
    pub(crate) fn width(&self) -> usize {
        match self {
            Self::Head(head) => head.width(),
            Self::Logits(vocab) => *vocab,
        }
    }

    fn is_whole(&self) -> bool {
        matches!(self, Self::Head(head) if head.is_whole())
    }
}

/// Inputs of the output stage, `[positions, width]`: the head's inputs as [`Head::inputs`] returns them, or logits.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) output: &'a Output<'a>,
    pub(crate) inputs: &'a [f32],
}

impl Source<'_> {
    fn part(&self, positions: Range<usize>) -> &[f32] {
        let width = self.output.width();
        &self.inputs[positions.start * width..positions.end * width]
    }

    /// Computes the logits of these tokens at these positions. For a head that cannot compute single tiles, `whole`
    /// holds the logits of the whole vocabulary, starting at position `first`.
    fn tile(
        &self,
        (rows, first): (Range<usize>, usize),
        columns: Range<usize>,
        whole: &[f32],
        weight: &mut Vec<f32>,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        let vocab = self.output.vocab();
        let (logits, rows) = match self.output {
            Output::Head(head) if !head.is_whole() => {
                return head.logits(self.part(rows), columns, weight, out);
            }
            Output::Head(_) => (whole, rows.start - first..rows.end - first),
            Output::Logits(_) => (self.inputs, rows),
        };
        out.clear();
        for row in rows {
            out.extend_from_slice(&logits[row * vocab..][..vocab][columns.clone()]);
        }
        Ok(())
    }
}

/// Buffers that a thread reuses for every tile.
#[derive(Default)]
struct Scratch {
    weight: Vec<f32>,
    tiles: Vec<Vec<f32>>,
    terms: Vec<f64>,
}

/// Accumulates the statistics of every source over the whole vocabulary. All sources have the same vocabulary, and the
/// first one is the reference of the others. `next` is the token that follows each position. With `ranked`, the most
/// likely tokens are kept. In the result, the sums for one position are adjacent, in the order of sources.
///
/// # Errors
/// When a head fails, or when cancelled.
pub(crate) fn pass(
    sources: &[Source<'_>],
    next: &[u32],
    ranked: bool,
    cancel: &CancelToken,
) -> Result<Vec<Sums>> {
    let max = match sources.iter().any(|s| s.output.is_whole()) {
        true => WHOLE_POSITIONS,
        false => POSITIONS,
    };
    let mut all = Vec::with_capacity(next.len() * sources.len());
    for start in (0..next.len()).step_by(max) {
        let positions = start..next.len().min(start + max);
        all.extend(some_positions(sources, next, positions, ranked, cancel)?);
    }
    Ok(all)
}

fn some_positions(
    sources: &[Source<'_>],
    next: &[u32],
    positions: Range<usize>,
    ranked: bool,
    cancel: &CancelToken,
) -> Result<Vec<Sums>> {
    let vocab = sources.first().map_or(0, |s| s.output.vocab());
    // Heads that cannot compute single tiles compute all logits in advance.
    let whole = sources.iter().map(|source| {
        let mut logits = Vec::new();
        if let Output::Head(head) = source.output
            && head.is_whole()
        {
            head.all_logits(source.part(positions.clone()), &mut logits)?;
        }
        Ok(logits)
    });
    let whole: Vec<Vec<f32>> = whole.collect::<Result<_>>()?;
    let stripe = vocab.div_ceil(HEAD_TILE).div_ceil(PIECES).max(1) * HEAD_TILE;
    let stripes = vocab.div_ceil(stripe);
    let part = positions.len().div_ceil(PIECES.div_ceil(stripes.max(1))).max(1);
    let parts = positions.len().div_ceil(part);
    let pieces: Vec<Vec<Sums>> = (0..parts * stripes)
        .into_par_iter()
        .map_init(Scratch::default, |scratch, piece| {
            cancel.check()?;
            let (first, column) = (positions.start + piece / stripes * part, piece % stripes * stripe);
            let rows = first..positions.end.min(first + part);
            let mut sums = vec![Sums::NONE; rows.len() * sources.len()];
            for start in (column..vocab.min(column + stripe)).step_by(HEAD_TILE) {
                let columns = start..vocab.min(start + HEAD_TILE);
                scratch.tiles.resize(sources.len(), Vec::new());
                for ((source, whole), tile) in sources.iter().zip(&whole).zip(&mut scratch.tiles) {
                    let rows = (rows.clone(), positions.start);
                    source.tile(rows, columns.clone(), whole, &mut scratch.weight, tile)?;
                }
                accumulate(
                    &mut sums,
                    &scratch.tiles,
                    &next[rows.clone()],
                    columns,
                    ranked,
                    &mut scratch.terms,
                );
            }
            Ok(sums)
        })
        .collect::<Result<_>>()?;
    let mut all = Vec::with_capacity(positions.len() * sources.len());
    for stripes in pieces.chunks_exact(stripes.max(1)) {
        let mut sums = stripes[0].clone();
        for behind in &stripes[1..] {
            let positions = sums.chunks_exact_mut(sources.len()).zip(behind.chunks_exact(sources.len()));
            positions.for_each(|(sums, behind)| sums::join(sums, behind));
        }
        all.append(&mut sums);
    }
    Ok(all)
}

/// Accumulates a tile of every source: `[positions, columns]`, with as many positions as `next` has.
fn accumulate(
    sums: &mut [Sums],
    tiles: &[Vec<f32>],
    next: &[u32],
    columns: Range<usize>,
    ranked: bool,
    terms: &mut Vec<f64>,
) {
    let width = columns.len();
    terms.resize(2 * width, 0.0);
    let mut rows: Vec<&[f32]> = Vec::with_capacity(tiles.len());
    for (i, (&next, sums)) in next.iter().zip(sums.chunks_exact_mut(tiles.len())).enumerate() {
        rows.clear();
        rows.extend(tiles.iter().map(|tile| &tile[i * width..(i + 1) * width]));
        vectorized(
            #[inline(always)]
            || sums::accumulate(sums, &rows, (columns.start as u32, next), ranked, terms),
        );
    }
}
