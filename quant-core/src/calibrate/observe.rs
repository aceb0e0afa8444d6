//! What is kept of the inputs of linears: the hidden states of the batch, and their statistics.
//!
//! Sums run over fixed pieces in a fixed order, so they do not depend on the number of threads.

use candle_core::{Device, Tensor};
use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

use super::{BatchLayout, TokenWindows};
use crate::model::{Block, CancelTap, Model, NodeId, Segments, Tap};
use crate::{CancelToken, Result};

/// Tokens that go through a block at a time: enough for full speed, few enough that a block's
/// intermediate values stay small.
const CHUNK_TOKENS: usize = 2048;

/// A [`Tap`] on a batch that comes in pieces.
pub trait BatchTap: Tap {
    /// The inputs to come are those of a new piece, whose first token is `first` of the batch. A
    /// value comes once in pieces that cover the batch, but not all values in the same ones.
    fn piece(&mut self, _first: usize) {}

    /// The same tap, as a block knows it.
    fn as_tap(&mut self) -> &mut dyn Tap;
}

impl BatchTap for CancelTap<'_> {
    fn as_tap(&mut self) -> &mut dyn Tap {
        self
    }
}

/// The hidden states of the calibration batch before some block, `[windows, length, hidden]`.
#[derive(Debug, Clone)]
pub struct HiddenStates {
    layout: BatchLayout,
    hidden: usize,
    values: Vec<f32>,
}

impl HiddenStates {
    /// The embeddings of the windows: what enters the first block.
    ///
    /// # Errors
    /// When a token is outside the vocabulary, the model has fewer positions than a window, or a row
    /// cannot be read or is not finite.
    pub fn embed(model: &Model, windows: &TokenWindows) -> Result<Self> {
        let mut values = model.embed_streamed(windows.tokens())?;
        let layout = windows.layout();
        if let Some(table) = model.position_table(layout.length())? {
            table.add_to(&mut values, |token| layout.place(token))?;
        }
        Ok(Self { layout, hidden: model.architecture().hidden, values })
    }

    /// The shape of the batch, its documents, and which of its tokens count.
    pub fn layout(&self) -> &BatchLayout {
        &self.layout
    }

    /// Tokens in all windows.
    pub fn tokens(&self) -> usize {
        self.layout.tokens()
    }

    /// Windows, and tokens of each.
    pub fn shape(&self) -> [usize; 2] {
        [self.layout.windows(), self.layout.length()]
    }

    /// Windows in one chunk: at least one.
    fn chunk_windows(&self) -> usize {
        (CHUNK_TOKENS / self.layout.length()).max(1)
    }

    /// The batch in pieces `[some windows, length, hidden]`, in order, with each one's first token.
    pub fn chunks(&self) -> impl Iterator<Item = Result<(usize, Tensor)>> {
        let length = self.layout.length();
        let size = self.chunk_windows() * length * self.hidden;
        self.values.chunks(size.max(1)).enumerate().map(move |(i, chunk)| {
            let windows = chunk.len() / (length * self.hidden);
            let shape = (windows, length, self.hidden);
            Ok((i * self.chunk_windows() * length, Tensor::from_slice(chunk, shape, &Device::Cpu)?))
        })
    }

    /// The segments of a piece that begins with token `first`.
    pub fn segments(&self, first: usize, piece: &Tensor) -> Segments<'_> {
        let tokens = piece.elem_count().checked_div(self.hidden).unwrap_or(0);
        self.layout.segments(first..first + tokens)
    }

    /// Replaces the states by what comes out of `block`.
    ///
    /// # Errors
    /// When the block fails or the token pulls.
    pub fn advance(&mut self, block: &Block, cancel: &CancelToken) -> Result<()> {
        self.advance_watched(block, cancel, &mut CancelTap(cancel))
    }

    /// The same, while a tap watches; it is told the first token of every piece.
    ///
    /// # Errors
    /// As [`advance`](Self::advance), and when the tap stops the run. Some of the states may then
    /// be replaced already.
    pub fn advance_watched(
        &mut self,
        block: &Block,
        cancel: &CancelToken,
        tap: &mut dyn BatchTap,
    ) -> Result<()> {
        let length = self.layout.length();
        let piece = self.chunk_windows() * length;
        for (i, chunk) in self.values.chunks_mut((piece * self.hidden).max(1)).enumerate() {
            cancel.check()?;
            let tokens = chunk.len() / self.hidden;
            let before = Tensor::from_slice(chunk, (tokens / length, length, self.hidden), &Device::Cpu)?;
            run_piece(block, &self.layout, i * piece, &before, tap, |at, rows| {
                chunk[at * self.hidden..at * self.hidden + rows.len()].copy_from_slice(rows);
            })?;
        }
        Ok(())
    }

    /// Runs the batch through `block` for what a tap sees of it, and leaves it where it is.
    ///
    /// # Errors
    /// As [`advance_watched`](Self::advance_watched).
    pub fn watch(&self, block: &Block, cancel: &CancelToken, tap: &mut dyn BatchTap) -> Result<()> {
        for chunk in self.chunks() {
            cancel.check()?;
            let (first, before) = chunk?;
            run_piece(block, &self.layout, first, &before, tap, |_, _| ())?;
        }
        Ok(())
    }
}

/// Parts of a block: from the values of one node to those of another.
impl HiddenStates {
    /// Takes the states for the values of a node and replaces them by those of a later one, which are as wide and
    /// from which all that follows is computed.
    ///
    /// # Errors
    /// When one does not follow from the other, or the token pulls. Some states may then be replaced already.
    pub fn advance_between(&mut self, block: &Block, nodes: [NodeId; 2], cancel: &CancelToken) -> Result<()> {
        let (width, piece) = (self.hidden, self.piece_between(block, nodes));
        let length = self.layout.length();
        for (i, chunk) in self.values.chunks_mut((piece * width).max(1)).enumerate() {
            let before = piece_of(chunk, width, length, piece)?;
            run_between(block, &self.layout, i * piece, &before, nodes, cancel, &mut |at, rows| {
                chunk[at * width..at * width + rows.len()].copy_from_slice(rows);
            })?;
        }
        Ok(())
    }

    /// Takes the states for the values of a node and hands over those of a later one: rows of any width, with the
    /// place of the first of them in the batch.
    ///
    /// # Errors
    /// As [`advance_between`](Self::advance_between).
    pub fn values_between(
        &self,
        block: &Block,
        nodes: [NodeId; 2],
        cancel: &CancelToken,
        take: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        let (width, piece) = (self.hidden, self.piece_between(block, nodes));
        for (i, chunk) in self.values.chunks((piece * width).max(1)).enumerate() {
            let before = piece_of(chunk, width, self.layout.length(), piece)?;
            let first = i * piece;
            run_between(block, &self.layout, first, &before, nodes, cancel, &mut |at, rows| {
                take(first + at, rows);
            })?;
        }
        Ok(())
    }

    /// Tokens that go through a part of a block at a time: whole windows where tokens look at each other.
    fn piece_between(&self, block: &Block, nodes: [NodeId; 2]) -> usize {
        match block.graph().mixes_tokens(nodes[0], nodes[1]) {
            true => self.chunk_windows() * self.layout.length(),
            false => CHUNK_TOKENS,
        }
    }
}

/// Rows of states as whole windows, where a piece is made of them, else as one.
fn piece_of(rows: &[f32], width: usize, length: usize, piece: usize) -> Result<Tensor> {
    let tokens = rows.len() / width.max(1);
    let length = if piece.is_multiple_of(length) && tokens.is_multiple_of(length) { length } else { tokens };
    Ok(Tensor::from_slice(rows, (tokens / length.max(1), length, width), &Device::Cpu)?)
}

/// Runs a piece of a batch, whose first token is `first`, from the values of one node to those of another, and hands
/// these over: rows, and the place of the first of them in the piece.
fn run_between(
    block: &Block,
    layout: &BatchLayout,
    first: usize,
    before: &Tensor,
    [from, to]: [NodeId; 2],
    cancel: &CancelToken,
    take: &mut dyn FnMut(usize, &[f32]),
) -> Result<()> {
    cancel.check()?;
    let mut tap = CancelTap(cancel);
    let (windows, length, _) = before.dims3()?;
    let whole = |value: &Tensor| -> Result<Vec<f32>> { Ok(value.flatten_all()?.to_vec1::<f32>()?) };
    let known = [(from, before.clone())];
    if !block.graph().mixes_tokens(from, to) {
        let value = block.evaluate(&known, &[to], &mut tap)?.swap_remove(0);
        take(0, &whole(&value)?);
        return Ok(());
    }
    let segments = layout.segments(first..first + windows * length);
    let split = block.graph().only_mixing().filter(|&a| length > CHUNK_TOKENS && from < a && a < to);
    let Some(attention) = split else {
        let value = block.evaluate_packed(&known, &[to], segments, &mut tap)?.swap_remove(0);
        take(0, &whole(&value)?);
        return Ok(());
    };
    let attended = block.evaluate_packed(&known, &[attention], segments, &mut tap)?.swap_remove(0);
    for at in (0..length).step_by(CHUNK_TOKENS) {
        let rows = |whole: &Tensor| whole.narrow(1, at, CHUNK_TOKENS.min(length - at))?.contiguous();
        let known = [(from, rows(before)?), (attention, rows(&attended)?)];
        let value = block.evaluate(&known, &[to], &mut tap)?.swap_remove(0);
        take(at, &whole(&value)?);
    }
    Ok(())
}

/// Runs a piece `[windows, length, hidden]` of a batch, whose first token is `first`, through a block,
/// and hands over what comes out: rows, and the place of the first of them in the piece.
///
/// A window that is longer than a piece should be goes through attention whole, and then through
/// the rest of the block, which looks at every token by itself, in pieces.
fn run_piece(
    block: &Block,
    layout: &BatchLayout,
    first: usize,
    before: &Tensor,
    tap: &mut dyn BatchTap,
    mut take: impl FnMut(usize, &[f32]),
) -> Result<()> {
    let (windows, length, _) = before.dims3()?;
    let segments = layout.segments(first..first + windows * length);
    let graph = block.graph();
    tap.piece(first);
    let Some(attention) = graph.only_mixing().filter(|_| length > CHUNK_TOKENS) else {
        let after = block.forward_packed(before, segments, tap.as_tap())?;
        take(0, &after.flatten_all()?.to_vec1::<f32>()?);
        return Ok(());
    };
    let known = [(graph.input(), before.clone())];
    let attended = block.evaluate_packed(&known, &[attention], segments, tap.as_tap())?.swap_remove(0);
    for at in (0..length).step_by(CHUNK_TOKENS) {
        tap.piece(first + at);
        let rows = |whole: &Tensor| whole.narrow(1, at, CHUNK_TOKENS.min(length - at))?.contiguous();
        let known = [(graph.input(), rows(before)?), (attention, rows(&attended)?)];
        let after = block.evaluate(&known, &[graph.output()], tap.as_tap())?.swap_remove(0);
        take(at, &after.flatten_all()?.to_vec1::<f32>()?);
    }
    Ok(())
}

/// `mean over tokens of |x[:, c]|` of every channel: AWQ's activation statistic.
#[derive(Debug, Clone)]
pub struct AbsMean {
    sums: Vec<f64>,
    tokens: usize,
}

impl AbsMean {
    /// Nothing seen yet of an input with `channels` features.
    pub fn new(channels: usize) -> Self {
        Self { sums: vec![0.0; channels], tokens: 0 }
    }

    /// Features of the input.
    pub fn channels(&self) -> usize {
        self.sums.len()
    }

    /// Adds rows `[tokens, channels]`.
    pub fn add(&mut self, x: &[f32]) {
        for row in x.chunks_exact(self.sums.len().max(1)) {
            for (sum, v) in self.sums.iter_mut().zip(row) {
                *sum += f64::from(v.abs());
            }
            self.tokens += 1;
        }
    }

    /// The means.
    pub fn means(&self) -> Vec<f32> {
        self.sums.iter().map(|s| (s / self.tokens.max(1) as f64) as f32).collect()
    }
}

/// Every `stride`-th row of an input: the tokens that the clip search looks at.
#[derive(Debug, Clone)]
pub struct SampledRows {
    channels: usize,
    stride: usize,
    values: Vec<f32>,
}

impl SampledRows {
    /// Keeps about `wanted` of `tokens` rows with `channels` features.
    pub fn new(channels: usize, tokens: usize, wanted: usize) -> Self {
        Self { channels, stride: (tokens / wanted.max(1)).max(1), values: Vec::new() }
    }

    /// Adds rows `[tokens, channels]`, the first of which is token `first` of the batch.
    pub fn add(&mut self, first: usize, x: &[f32]) {
        for (i, row) in x.chunks_exact(self.channels.max(1)).enumerate() {
            if (first + i).is_multiple_of(self.stride) {
                self.values.extend_from_slice(row);
            }
        }
    }

    /// Divides every channel by a scale, as folding does to the input.
    pub fn divide(&mut self, scales: &[f32]) {
        for row in self.values.chunks_exact_mut(self.channels.max(1)) {
            for (v, s) in row.iter_mut().zip(scales) {
                *v /= s;
            }
        }
    }

    /// The kept rows, `[rows, channels]`.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// How many rows were kept.
    pub fn rows(&self) -> usize {
        self.values.len() / self.channels.max(1)
    }
}

/// Rows of a Gram matrix that one task computes.
const GRAM_TILE: usize = 128;

/// Adds `xᵀx` of rows `x` `[tokens, channels]` to the lower triangle (in tiles) of `sum`
/// `[channels, channels]`; tiles above the diagonal are left alone.
///
/// # Panics
/// When the slices are not of these shapes.
pub fn gram(x: &[f32], channels: usize, sum: &mut [f32]) {
    assert_eq!(sum.len(), channels * channels, "sum is not [channels, channels]");
    let tokens = x.len().checked_div(channels).unwrap_or(0);
    let x = MatRef::from_row_major_slice(x, tokens, channels);
    sum.par_chunks_mut((GRAM_TILE * channels).max(1)).enumerate().for_each(|(i, rows)| {
        let first = i * GRAM_TILE;
        let height = rows.len() / channels;
        let tile = MatMut::from_row_major_slice_mut(rows, height, channels);
        let lower = tile.subcols_mut(0, first + height);
        let left = x.subcols(first, height).transpose();
        matmul(lower, Accum::Add, left, x.subcols(0, first + height), 1.0_f32, Par::Seq);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gram_matches_its_definition_for_any_number_of_threads() {
        let (tokens, channels) = (37, 300);
        let x: Vec<f32> = (0..tokens * channels).map(|i| (i as f32 * 0.7).sin()).collect();
        let run = |threads| {
            let mut sum = vec![0.0; channels * channels];
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                gram(&x[..20 * channels], channels, &mut sum);
                gram(&x[20 * channels..], channels, &mut sum);
            });
            sum
        };
        let sum = run(1);
        assert_eq!(sum, run(3));
        for i in 0..channels {
            for j in 0..=i {
                let exact: f64 = (0..tokens)
                    .map(|t| f64::from(x[t * channels + i]) * f64::from(x[t * channels + j]))
                    .sum();
                assert!((f64::from(sum[i * channels + j]) - exact).abs() < 1e-4);
            }
        }
    }

    #[test]
    fn statistics_do_not_depend_on_how_rows_arrive() {
        let x: Vec<f32> = (0..60).map(|i| i as f32 - 30.0).collect();
        let (mut whole, mut parts) = (AbsMean::new(3), AbsMean::new(3));
        let (mut all, mut some) = (SampledRows::new(3, 20, 7), SampledRows::new(3, 20, 7));
        whole.add(&x);
        all.add(0, &x);
        for (i, part) in x.chunks(15).enumerate() {
            parts.add(part);
            some.add(i * 5, part);
        }
        assert_eq!(whole.means(), parts.means());
        assert_eq!(whole.means()[0], (0..20).map(|t| (3 * t - 30_i32).abs() as f32).sum::<f32>() / 20.0);
        assert_eq!(all.values(), some.values());
        assert_eq!(all.rows(), 10);
    }
}
