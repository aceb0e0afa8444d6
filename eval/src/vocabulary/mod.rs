//! One pass over the vocabulary: measures models at each position.
//!
//! ```text
//! hidden states ─► head, a tile of columns at a time ─► sums, ranks ─► joined in the order of columns
//! ```
//!
//! The vocabulary is split into stripes of whole tiles, and positions into parts if there are few stripes. The split
//! depends only on sizes, so results do not depend on the number of threads. Sums are accumulated in f64.

mod exp;
mod sums;
#[cfg(all(test, feature = "decoders"))]
mod tests;

use std::ops::Range;

use quant_formats::vector::vectorized;
use quant_formats::{CancelToken, Error, Result};
use rayon::prelude::*;

pub(crate) use sums::Sums;

const PIECES: usize = 32;
/// Number of positions per pass.
const POSITIONS: usize = 2048;
/// Number of positions per pass if all their logits must be in memory.
const WHOLE_POSITIONS: usize = 64;

/// Number of columns per tile, also of a decoder's head.
pub(crate) const TILE: usize = 256;

/// The output stage of a model: how logits are obtained from the inputs of the stage.
pub(crate) trait Output: Sync {
    /// Number of tokens in the vocabulary.
    fn vocab(&self) -> usize;

    /// Number of input values per position.
    fn width(&self) -> usize;

    /// Converts hidden states to the inputs of this stage.
    #[cfg(feature = "decoders")]
    fn inputs(&self, hidden: Vec<f32>) -> Result<Vec<f32>> {
        Ok(hidden)
    }

    /// Whether the stage can only compute all logits at once, with [`all_logits`](Self::all_logits).
    fn is_whole(&self) -> bool {
        false
    }

    /// Prepares inputs `[positions, width]` for the logits of several ranges of tokens.
    fn at<'s>(&'s self, inputs: &'s [f32]) -> Result<Box<dyn Positions + 's>>;

    /// Computes the logits of all tokens, `[positions, vocabulary]`.
    fn all_logits(&self, _inputs: &[f32], _out: &mut Vec<f32>) -> Result<()> {
        Err(Error::Internal("this output stage computes tiles".into()))
    }
}

/// Inputs of an output stage, which threads share.
pub(crate) trait Positions: Sync {
    /// Computes the logits of the tokens `columns`, `[positions, columns]`, on this thread.
    fn tile(&self, columns: Range<usize>, buffers: &mut Buffers, out: &mut Vec<f32>) -> Result<()>;
}

/// Buffers of a thread for the weights of an output stage.
#[derive(Default)]
pub(crate) struct Buffers {
    #[cfg(feature = "decoders")]
    pub(crate) head: quant_core::model::HeadBuffers,
}

/// The output stage of a model whose inputs are the logits, for a vocabulary of this size.
pub(crate) struct Given(pub(crate) usize);

impl Output for Given {
    fn vocab(&self) -> usize {
        self.0
    }

    fn width(&self) -> usize {
        self.0
    }

    fn at<'s>(&'s self, inputs: &'s [f32]) -> Result<Box<dyn Positions + 's>> {
        Ok(Box::new(Logits { rows: inputs, vocab: self.0 }))
    }
}

/// Logits that are in memory, `[positions, vocabulary]`.
struct Logits<'a> {
    rows: &'a [f32],
    vocab: usize,
}

impl Positions for Logits<'_> {
    fn tile(&self, columns: Range<usize>, _: &mut Buffers, out: &mut Vec<f32>) -> Result<()> {
        columns_of(self.rows, self.vocab, columns, out);
        Ok(())
    }
}

fn columns_of(logits: &[f32], vocab: usize, columns: Range<usize>, out: &mut Vec<f32>) {
    out.clear();
    for row in logits.chunks_exact(vocab) {
        out.extend_from_slice(&row[columns.clone()]);
    }
}

/// Inputs of an output stage, `[positions, width]`.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) output: &'a dyn Output,
    pub(crate) inputs: &'a [f32],
}

impl Source<'_> {
    fn part(&self, positions: Range<usize>) -> &[f32] {
        let width = self.output.width();
        &self.inputs[positions.start * width..positions.end * width]
    }

    /// Prepares these positions. For a stage that [cannot compute tiles](Output::is_whole), `whole` holds the logits of
    /// the whole vocabulary, starting at position `first`.
    fn at<'s>(
        &'s self,
        rows: Range<usize>,
        first: usize,
        whole: &'s [f32],
    ) -> Result<Box<dyn Positions + 's>> {
        if !self.output.is_whole() {
            return self.output.at(self.part(rows));
        }
        let vocab = self.output.vocab();
        let rows = &whole[(rows.start - first) * vocab..(rows.end - first) * vocab];
        Ok(Box::new(Logits { rows, vocab }))
    }
}

#[derive(Default)]
struct Scratch {
    buffers: Buffers,
    tiles: Vec<Vec<f32>>,
    terms: Vec<f64>,
}

/// Accumulates the statistics of every source over the whole vocabulary. All sources have the same vocabulary, and the
/// first one is the reference of the others. `next` is the token that follows each position. With `ranked`, the most
/// likely tokens are kept. Results are in the order of positions, then of sources.
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
    let whole = sources.iter().map(|source| {
        let mut logits = Vec::new();
        if source.output.is_whole() {
            source.output.all_logits(source.part(positions.clone()), &mut logits)?;
        }
        Ok(logits)
    });
    let whole: Vec<Vec<f32>> = whole.collect::<Result<_>>()?;
    let stripe = vocab.div_ceil(TILE).div_ceil(PIECES).max(1) * TILE;
    let stripes = vocab.div_ceil(stripe);
    let part = positions.len().div_ceil(PIECES.div_ceil(stripes.max(1))).max(1);
    let parts = positions.len().div_ceil(part);
    let rows_of = |index: usize| {
        let first = positions.start + index * part;
        first..positions.end.min(first + part)
    };
    let prepare = |index: usize| {
        let sources = sources.iter().zip(&whole);
        sources
            .map(|(source, whole)| source.at(rows_of(index), positions.start, whole))
            .collect::<Result<Vec<_>>>()
    };
    let prepared = (0..parts).map(prepare).collect::<Result<Vec<_>>>()?;
    let pieces: Vec<Vec<Sums>> = (0..parts * stripes)
        .into_par_iter()
        .map_init(Scratch::default, |scratch, piece| {
            cancel.check()?;
            let (rows, column) = (rows_of(piece / stripes), piece % stripes * stripe);
            let mut sums = vec![Sums::NONE; rows.len() * sources.len()];
            for start in (column..vocab.min(column + stripe)).step_by(TILE) {
                let columns = start..vocab.min(start + TILE);
                scratch.tiles.resize(sources.len(), Vec::new());
                for (source, tile) in prepared[piece / stripes].iter().zip(&mut scratch.tiles) {
                    source.tile(columns.clone(), &mut scratch.buffers, tile)?;
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
