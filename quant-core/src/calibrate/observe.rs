//! The hidden states of the calibration batch, which pass through the model block by block.

use std::borrow::Cow;

use candle_core::{D, Device, Tensor};

use super::{BatchLayout, BatchValues, InputRows, Spill, Statistic, TokenWindows};
use crate::model::{Block, CancelTap, Model, NodeId, Segments, Tap, TokenRows, with_values};
use crate::{CancelToken, Error, Result, allocate};

/// Tokens that go through a block at a time: enough for full speed, few enough that intermediate values stay small.
pub(super) const CHUNK_TOKENS: usize = 2048;

/// The number of windows of this length that go through a block at a time. A batch that is split at multiples of it
/// passes through the model in the same pieces as the whole.
pub(crate) fn windows_per_piece(length: usize) -> usize {
    (CHUNK_TOKENS / length.max(1)).max(1)
}

/// Adapts a tap on the whole batch to a piece.
pub(super) struct PieceTap<'a, 't> {
    pub(super) tap: &'a mut (dyn Tap + 't),
    /// The first token of the piece.
    pub(super) first: usize,
}

impl Tap for PieceTap<'_, '_> {
    fn linear_input(&mut self, linear: NodeId, x: &Tensor, tokens: TokenRows<'_>) -> Result<()> {
        self.tap.linear_input(linear, x, tokens.shifted(self.first))
    }

    fn attention_input(
        &mut self,
        attention: NodeId,
        q: &Tensor,
        k: &Tensor,
        tokens: TokenRows<'_>,
    ) -> Result<()> {
        self.tap.attention_input(attention, q, k, tokens.shifted(self.first))
    }
}

/// The hidden states of the calibration batch before a block, each followed by the other values that later blocks read:
/// `[windows, length, width]`. The width may differ from block to block. The states are in memory or in a
/// [file](Spill).
#[derive(Debug)]
pub struct HiddenStates {
    layout: BatchLayout,
    hidden: usize,
    values: BatchValues,
}

impl HiddenStates {
    /// Creates states `[windows, length, hidden]` of a batch with this layout, row-major.
    ///
    /// # Errors
    /// [`Error::Internal`] when the number of values is not `tokens · hidden`.
    pub fn new(layout: BatchLayout, hidden: usize, values: impl Into<BatchValues>) -> Result<Self> {
        let values = values.into();
        if layout.tokens().checked_mul(hidden) != Some(values.len()) {
            let (got, tokens) = (values.len(), layout.tokens());
            return Err(Error::Internal(format!(
                "got {got} values for {tokens} hidden states of width {hidden}"
            )));
        }
        Ok(Self { layout, hidden, values })
    }

    /// The embeddings of the windows: the input of the first block.
    ///
    /// # Errors
    /// When a token is outside the vocabulary, the model has fewer positions than a window, or a row cannot be read or
    /// is not finite.
    pub fn embed(model: &Model, windows: &TokenWindows) -> Result<Self> {
        Self::embed_in(model, windows, None)
    }

    /// Embeds the windows, into a file if `spill` is given. The states of later blocks then stay in files too.
    ///
    /// # Errors
    /// As [`embed`](Self::embed), and when the disk is full.
    pub fn embed_in(model: &Model, windows: &TokenWindows, spill: Option<&Spill>) -> Result<Self> {
        let width = model.architecture().state_width(0);
        let mut values = BatchValues::zeros(spill, windows.tokens().len() * width)?;
        write_embeddings(model, windows, &mut values)?;
        Self::new(windows.layout(), width, values)
    }

    /// Replaces the states with the embeddings of the windows, for another pass through the model. They take the place
    /// of the old states in memory.
    ///
    /// # Errors
    /// As [`embed_in`](Self::embed_in).
    pub fn restart(&mut self, model: &Model, windows: &TokenWindows) -> Result<()> {
        let (width, tokens) = (model.architecture().state_width(0), windows.tokens().len());
        if self.values.len() != tokens * width {
            let spill = self.spill().cloned();
            // The old states are dropped before there are new ones.
            self.values = Vec::new().into();
            self.values = BatchValues::zeros(spill.as_ref(), tokens * width)?;
        }
        (self.layout, self.hidden) = (windows.layout(), width);
        write_embeddings(model, windows, &mut self.values)
    }

    /// Copies the states to the same kind of storage.
    ///
    /// # Errors
    /// When there is not enough memory or disk space.
    pub fn try_clone(&self) -> Result<Self> {
        Ok(Self { layout: self.layout.clone(), hidden: self.hidden, values: self.values.try_clone()? })
    }

    /// The storage for values in files; `None` if the states are in memory.
    pub fn spill(&self) -> Option<&Spill> {
        self.values.spill()
    }

    /// Returns the layout of the batch: its shape, its documents, and which tokens count.
    pub fn layout(&self) -> &BatchLayout {
        &self.layout
    }

    /// Returns the states, `[windows, length, width]` row-major.
    pub fn values(&self) -> &BatchValues {
        &self.values
    }

    /// The number of features of a token's state.
    pub fn width(&self) -> usize {
        self.hidden
    }

    /// The number of tokens in all windows.
    pub fn tokens(&self) -> usize {
        self.layout.tokens()
    }

    /// The number of windows, and the number of tokens per window.
    pub fn shape(&self) -> [usize; 2] {
        [self.layout.windows(), self.layout.length()]
    }

    fn chunk_windows(&self) -> usize {
        windows_per_piece(self.layout.length())
    }

    /// Returns the batch in pieces `[windows, length, width]` of whole windows, in order, each with the index of its
    /// first token.
    pub fn chunks(&self) -> impl Iterator<Item = Result<(usize, Tensor)>> {
        let (length, piece) = (self.layout.length(), self.chunk_windows() * self.layout.length());
        self.pieces(piece).map(move |piece| {
            let (first, values) = piece?;
            let shape = (values.len() / (length * self.hidden), length, self.hidden);
            Ok((first, Tensor::from_slice(&values, shape, &Device::Cpu)?))
        })
    }

    fn pieces(&self, tokens: usize) -> impl Iterator<Item = Result<(usize, Cow<'_, [f32]>)>> {
        (0..self.tokens()).step_by(tokens.max(1)).map(move |first| {
            let end = (first + tokens).min(self.tokens());
            Ok((first, self.values.read(first * self.hidden..end * self.hidden)?))
        })
    }

    /// The states of these tokens, `[1, tokens, width]`.
    ///
    /// # Errors
    /// [`Error::Internal`] when a token is outside the batch.
    pub fn rows(&self, tokens: &[u32]) -> Result<Tensor> {
        let mut values = allocate::room(tokens.len() * self.hidden, "the hidden states of some tokens")?;
        for run in tokens.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
            let (first, width) = (run[0] as usize, self.hidden);
            values.extend_from_slice(&self.values.read(first * width..(first + run.len()) * width)?);
        }
        Ok(Tensor::from_vec(values, (1, tokens.len(), self.hidden), &Device::Cpu)?)
    }

    /// Returns the segments of a piece that begins with token `first`.
    pub fn segments(&self, first: usize, piece: &Tensor) -> Segments<'_> {
        let tokens = piece.elem_count().checked_div(self.hidden).unwrap_or(0);
        self.layout.segments(first..first + tokens)
    }

    /// Replaces the states with the output of `block`.
    ///
    /// # Errors
    /// When the block fails or the run is cancelled.
    pub fn advance(&mut self, block: &Block, cancel: &CancelToken) -> Result<()> {
        self.advance_watched(block, cancel, &mut CancelTap(cancel))
    }

    /// Replaces the states with the output of `block` while `tap` observes the evaluation. The tap is called for each
    /// piece of the batch, with token indices of the whole batch.
    ///
    /// # Errors
    /// As [`advance`](Self::advance), and when the tap stops the run. Some states may then already be replaced.
    pub fn advance_watched(&mut self, block: &Block, cancel: &CancelToken, tap: &mut dyn Tap) -> Result<()> {
        let (graph, length) = (block.graph(), self.layout.length());
        let (layout, piece) = (self.layout.clone(), self.chunk_windows() * length);
        self.replace(graph.width(graph.output()), piece, |first, states, width, put| {
            cancel.check()?;
            let before = piece_of(states, width, length, piece)?;
            run_piece(block, &layout, first, &before, tap, put)
        })
    }

    pub(super) fn window_piece(&self) -> usize {
        self.chunk_windows() * self.layout.length()
    }

    /// Replaces the states with states of `width` features, in pieces of `piece` tokens. `run` gets the index of a
    /// piece's first token, its states, their width, and a function that writes new rows, given the offset of the first
    /// one in the piece.
    pub(super) fn replace(
        &mut self,
        width: usize,
        piece: usize,
        mut run: impl FnMut(usize, &[f32], usize, &mut dyn FnMut(usize, &Tensor) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let (old, tokens) = (self.hidden, self.tokens());
        // If the width stays the same, new rows overwrite the old ones.
        let mut moved = match old == width {
            true => None,
            false => Some(self.values.zeros_like(tokens * width)?),
        };
        for first in (0..tokens).step_by(piece.max(1)) {
            let end = (first + piece).min(tokens);
            let states = self.values.read(first * old..end * old)?.into_owned();
            let target = moved.as_mut().unwrap_or(&mut self.values);
            run(first, &states, old, &mut |at, rows| {
                with_values(rows, |rows| target.write((first + at) * width, rows))
            })?;
        }
        self.hidden = width;
        if let Some(moved) = moved {
            self.values = moved;
        }
        Ok(())
    }

    /// Runs the batch through `block` while `tap` observes the evaluation. The states do not change.
    ///
    /// # Errors
    /// As [`advance_watched`](Self::advance_watched).
    pub fn watch(&self, block: &Block, cancel: &CancelToken, tap: &mut dyn Tap) -> Result<()> {
        for chunk in self.chunks() {
            cancel.check()?;
            let (first, before) = chunk?;
            run_piece(block, &self.layout, first, &before, tap, &mut |_, _| Ok(()))?;
        }
        Ok(())
    }

    /// Same as [`watch`](Self::watch), for what some nodes of the block need, in the same pieces. Other weights are not
    /// read.
    pub(super) fn watch_nodes(
        &self,
        block: &Block,
        nodes: &[NodeId],
        cancel: &CancelToken,
        tap: &mut dyn Tap,
    ) -> Result<()> {
        for chunk in self.chunks() {
            cancel.check()?;
            let (first, before) = chunk?;
            run_piece_for(block, &self.layout, (first, &before), nodes, tap, &mut |_, _| Ok(()))?;
        }
        Ok(())
    }
}

/// Writes the embeddings of all tokens, in pieces. These are a multiple of the pieces in which per-layer inputs are
/// computed, so that matrix products have the same shapes for any storage.
fn write_embeddings(model: &Model, windows: &TokenWindows, values: &mut BatchValues) -> Result<()> {
    let piece = 4 * CHUNK_TOKENS;
    let (layout, width) = (windows.layout(), model.architecture().state_width(0));
    let (table, per_layer) = (model.position_table(layout.length())?, model.per_layer_inputs()?);
    for (i, tokens) in windows.tokens().chunks(piece).enumerate() {
        let first = i * piece;
        let mut embedded = model.embed_streamed(tokens)?;
        if let Some(table) = &table {
            table.add_to(&mut embedded, |token| layout.place(first + token))?;
        }
        if let Some(inputs) = &per_layer {
            embedded = inputs.append_inputs(tokens, &embedded)?;
        }
        values.write(first * width, &embedded)?;
    }
    Ok(())
}

impl HiddenStates {
    /// Replaces the states, which are the values of the first of `nodes`, with the values of the second. Nodes after
    /// the second may depend on earlier nodes only through it.
    ///
    /// # Errors
    /// When the block fails, the second node does not depend on the first, or the run is cancelled. Some states may
    /// then already be replaced.
    pub fn advance_between(&mut self, block: &Block, nodes: [NodeId; 2], cancel: &CancelToken) -> Result<()> {
        let (layout, piece) = (self.layout.clone(), self.piece_between(block, nodes));
        self.replace(block.graph().width(nodes[1]), piece, |first, states, width, put| {
            let before = piece_of(states, width, layout.length(), piece)?;
            run_between(block, &layout, first, &before, nodes, cancel, |at, value, _| put(at, value))
        })
    }

    /// Gathers a statistic of the values of the second of `nodes`, which may have any width. The states are the values
    /// of the first.
    ///
    /// # Errors
    /// As [`advance_between`](Self::advance_between), and those of the statistic.
    pub fn gather_between(
        &self,
        block: &Block,
        nodes: [NodeId; 2],
        cancel: &CancelToken,
        statistic: &mut dyn Statistic,
    ) -> Result<()> {
        let (width, piece) = (self.hidden, self.piece_between(block, nodes));
        for states in self.pieces(piece) {
            let (first, states) = states?;
            let before = piece_of(&states, width, self.layout.length(), piece)?;
            run_between(block, &self.layout, first, &before, nodes, cancel, |at, value, rows| {
                let width = value.dim(D::Minus1)?;
                with_values(value, |values| {
                    let tokens = match rows {
                        Some(tokens) => TokenRows::indices(tokens),
                        None => TokenRows::range(0, values.len().checked_div(width).unwrap_or(0)),
                    };
                    if tokens.count() == 0 {
                        return Ok(());
                    }
                    let tokens = tokens.shifted(first + at);
                    statistic.take(&InputRows::new(values, width, tokens, &self.layout)?)
                })
            })?;
        }
        Ok(())
    }

    /// Passes the values of the two `targets` to `take`, piece by piece. The states are the values of `from`, and the
    /// targets must have a row for every token. If only one of the targets depends on several tokens, it must come
    /// second.
    ///
    /// # Errors
    /// As [`advance_between`](Self::advance_between), and those of `take`.
    pub fn values_between(
        &self,
        block: &Block,
        from: NodeId,
        targets: [NodeId; 2],
        cancel: &CancelToken,
        take: &mut dyn FnMut(&[Tensor]) -> Result<()>,
    ) -> Result<()> {
        let (width, piece) = (self.hidden, self.piece_between(block, [from, targets[1]]));
        for states in self.pieces(piece) {
            cancel.check()?;
            let (first, states) = states?;
            let before = piece_of(&states, width, self.layout.length(), piece)?;
            let (windows, length, _) = before.dims3()?;
            let segments = match block.graph().mixes_tokens(from, targets[1]) {
                true => self.layout.segments(first..first + windows * length),
                false => Segments::whole(),
            };
            let tap = &mut CancelTap(cancel);
            take(&block.evaluate_packed(&[(from, before)], &targets, segments, tap)?)?;
        }
        Ok(())
    }

    /// Replaces the states, which are the values of `from`, with the output of the block, given the values of another
    /// node, `[tokens, features]`. The rest of the block must process each token independently.
    ///
    /// # Errors
    /// As [`advance_between`](Self::advance_between).
    pub fn advance_with(
        &mut self,
        block: &Block,
        from: NodeId,
        (node, values): (NodeId, &BatchValues),
        cancel: &CancelToken,
    ) -> Result<()> {
        let (graph, output) = (block.graph(), block.graph().output());
        let features = graph.width(node);
        self.replace(graph.width(output), CHUNK_TOKENS, |first, states, width, put| {
            cancel.check()?;
            let tokens = states.len() / width;
            let tensor =
                |rows: &[f32], width: usize| Tensor::from_slice(rows, (1, tokens, width), &Device::Cpu);
            let known = values.read(first * features..(first + tokens) * features)?;
            let known = [(from, tensor(states, width)?), (node, tensor(&known, features)?)];
            let after = block.evaluate(&known, &[output], &mut CancelTap(cancel))?.swap_remove(0);
            put(0, &after)
        })
    }

    /// The number of tokens that go through a part of a block at a time: whole windows if the part mixes tokens.
    fn piece_between(&self, block: &Block, nodes: [NodeId; 2]) -> usize {
        match block.graph().mixes_tokens(nodes[0], nodes[1]) {
            true => self.chunk_windows() * self.layout.length(),
            false => CHUNK_TOKENS,
        }
    }
}

/// The rows of a piece: `[windows, length, width]` if it consists of whole windows, otherwise `[1, tokens, width]`.
pub(super) fn piece_of(rows: &[f32], width: usize, length: usize, piece: usize) -> Result<Tensor> {
    let tokens = rows.len() / width.max(1);
    let length = if piece.is_multiple_of(length) && tokens.is_multiple_of(length) { length } else { tokens };
    Ok(Tensor::from_slice(rows, (tokens / length.max(1), length, width), &Device::Cpu)?)
}

/// Evaluates a block from the values of one node to those of another, for a piece of the batch whose first token is
/// `first`. Passes the result to `take` in one or more parts, each with the offset of its first token in the piece, and
/// with the tokens of its rows relative to that offset; `None` means one row per token.
fn run_between(
    block: &Block,
    layout: &BatchLayout,
    first: usize,
    before: &Tensor,
    [from, to]: [NodeId; 2],
    cancel: &CancelToken,
    mut take: impl FnMut(usize, &Tensor, Option<&[u32]>) -> Result<()>,
) -> Result<()> {
    cancel.check()?;
    let mut tap = CancelTap(cancel);
    let (windows, length, _) = before.dims3()?;
    let known = [(from, before.clone())];
    if !block.graph().mixes_tokens(from, to) {
        let (value, tokens) = block.evaluate_rows(&known, to, Segments::whole(), &mut tap)?;
        return take(0, &value, tokens.as_deref());
    }
    let segments = layout.segments(first..first + windows * length);
    let split = block.graph().only_mixing().filter(|&a| length > CHUNK_TOKENS && from < a && a < to);
    let Some(attention) = split else {
        let (value, tokens) = block.evaluate_rows(&known, to, segments, &mut tap)?;
        return take(0, &value, tokens.as_deref());
    };
    let attended = block.evaluate_packed(&known, &[attention], segments, &mut tap)?.swap_remove(0);
    for at in (0..length).step_by(CHUNK_TOKENS) {
        let rows = |whole: &Tensor| whole.narrow(1, at, CHUNK_TOKENS.min(length - at))?.contiguous();
        let known = [(from, rows(before)?), (attention, rows(&attended)?)];
        let (value, tokens) = block.evaluate_rows(&known, to, Segments::whole(), &mut tap)?;
        take(at, &value, tokens.as_deref())?;
    }
    Ok(())
}

/// Runs a piece `[windows, length, width]` of the batch, whose first token is `first`, through a block. Passes the
/// output to `take` in one or more parts, each with the offset of its first token in the piece.
///
/// Attention always processes whole windows. If a window is long and only one node of the block mixes tokens, the nodes
/// after it run on parts of the window.
fn run_piece(
    block: &Block,
    layout: &BatchLayout,
    first: usize,
    before: &Tensor,
    tap: &mut dyn Tap,
    take: &mut dyn FnMut(usize, &Tensor) -> Result<()>,
) -> Result<()> {
    run_piece_to(block, layout, first, before, block.graph().output(), tap, take)
}

/// Same as [`run_piece`], up to a node that comes after all operations that mix tokens.
pub(super) fn run_piece_to(
    block: &Block,
    layout: &BatchLayout,
    first: usize,
    before: &Tensor,
    to: NodeId,
    tap: &mut dyn Tap,
    take: &mut dyn FnMut(usize, &Tensor) -> Result<()>,
) -> Result<()> {
    run_piece_for(block, layout, (first, before), &[to], tap, &mut |at, values| {
        values.iter().try_for_each(|value| take(at, value))
    })
}

/// Same as [`run_piece`], for what some nodes need. `take` gets the values of those that come after all operations that
/// mix tokens.
fn run_piece_for(
    block: &Block,
    layout: &BatchLayout,
    (first, before): (usize, &Tensor),
    nodes: &[NodeId],
    tap: &mut dyn Tap,
    take: &mut dyn FnMut(usize, &[Tensor]) -> Result<()>,
) -> Result<()> {
    let (windows, length, _) = before.dims3()?;
    let segments = layout.segments(first..first + windows * length);
    let graph = block.graph();
    let mut tap = PieceTap { tap, first };
    let Some(attention) = graph.only_mixing().filter(|_| length > CHUNK_TOKENS) else {
        let known = [(graph.input(), before.clone())];
        let after = block.evaluate_packed(&known, nodes, segments, &mut tap)?;
        return take(0, &after);
    };
    let known = [(graph.input(), before.clone())];
    let attended = block.evaluate_packed(&known, &[attention], segments, &mut tap)?.swap_remove(0);
    // These were evaluated together with the attention.
    let done = graph.needed_for(attention);
    let is_left = |node: &NodeId| *node == attention || !done.contains(node);
    let nodes: Vec<NodeId> = nodes.iter().copied().filter(is_left).collect();
    for at in (0..length).step_by(CHUNK_TOKENS) {
        tap.first = first + at;
        let rows = |whole: &Tensor| whole.narrow(1, at, CHUNK_TOKENS.min(length - at))?.contiguous();
        let known = [(graph.input(), rows(before)?), (attention, rows(&attended)?)];
        let after = block.evaluate(&known, &nodes, &mut tap)?;
        take(at, &after)?;
    }
    Ok(())
}
