//! What travels from block to block beside the residual stream: inputs of blocks that depend on the token alone, and
//! keys and values that later blocks read.
//!
//! Between two blocks stands one value a token: the residual stream, then the inputs of the blocks to come, then keys and
//! values. A block takes its own parts of it with slices and puts out the parts that blocks after it read, so that nothing
//! but the widths of blocks' inputs tells the rest of the path of it.

use super::parts::{DecoderBlock, linear};
use super::{Activation, GraphBuilder, NodeId, Op};

/// What a block's input holds after the residual stream, and what its output does.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Beside {
    /// The input of this block alone.
    pub(super) own: Option<OwnInput>,
    /// Features of those of all later blocks.
    pub(super) later: usize,
    /// Keys and values that blocks share: one pair for each kind of layer.
    pub(super) shared: [SharedKeys; 2],
}

/// An input of one block: `x + norm(projection(activation(gate(x)) · input))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct OwnInput {
    pub(super) width: usize,
    pub(super) activation: Activation,
    /// Module names of gate, projection and norm.
    pub(super) names: [&'static str; 3],
}

/// Keys and values on their way from the block that makes them to those that read them.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct SharedKeys {
    /// Features of keys, and as many of values.
    pub(super) width: usize,
    /// Whether an earlier block has made them, so that they are a part of the input.
    pub(super) enter: bool,
    /// Whether a later block reads them, so that they are a part of the output.
    pub(super) leave: bool,
}

/// What an attention has to do with shared keys and values: the place of the pair among [`Beside::shared`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sharing {
    /// It makes them.
    Makes(usize),
    /// It reads them, and has none of its own.
    Reads(usize),
}

/// The parts of a block's input.
pub(super) struct Parts {
    /// The residual stream.
    pub(super) stream: NodeId,
    own: Option<NodeId>,
    later: Option<NodeId>,
    /// Keys and values, once there are any.
    pub(super) shared: [Option<[NodeId; 2]>; 2],
}

impl Beside {
    /// Whether there is nothing beside the residual stream.
    fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// Adds the block's input and takes it apart.
    pub(super) fn enter(&self, g: &mut GraphBuilder, hidden: usize) -> Parts {
        if self.is_nothing() {
            let stream = g.add(Op::Input { width: hidden }, &[]);
            return Parts { stream, own: None, later: None, shared: [None; 2] };
        }
        let own = self.own.map_or(0, |own| own.width);
        let keys: usize =
            self.shared.iter().filter(|shared| shared.enter).map(|shared| 2 * shared.width).sum();
        let period = hidden + own + self.later + keys;
        let input = g.add(Op::Input { width: period }, &[]);
        let mut start = 0;
        let mut take = |width: usize| {
            let slice = (width > 0).then(|| g.add(Op::Slice { period, start, width }, &[input]));
            start += width;
            slice
        };
        let stream = take(hidden).unwrap_or(input);
        let (own, later) = (take(own), take(self.later));
        let mut pair = |of: SharedKeys| take(of.width).zip(take(of.width)).map(|(k, v)| [k, v]);
        let shared = self.shared.map(|of| if of.enter { pair(of) } else { None });
        Parts { stream, own, later, shared }
    }

    /// Adds what the block's own input gives to the residual stream.
    pub(super) fn add_own(
        &self,
        g: &mut GraphBuilder,
        stream: NodeId,
        parts: &Parts,
        block: &DecoderBlock,
    ) -> NodeId {
        let (Some(OwnInput { width, activation, names }), Some(input)) = (self.own, parts.own) else {
            return stream;
        };
        let [gate, projection, norm] = names;
        let gate = g.add(linear(gate, [width, block.hidden], false), &[stream]);
        let product = g.add(Op::Gated(activation), &[gate, input]);
        let projected = g.add(linear(projection, [block.hidden, width], false), &[product]);
        let normed = g.add(block.norm.op(norm, block.hidden), &[projected]);
        g.add(Op::Add, &[stream, normed])
    }

    /// Adds what later blocks read to the block's output.
    pub(super) fn leave(&self, g: &mut GraphBuilder, stream: NodeId, parts: &Parts) {
        let shared = self.shared.iter().zip(parts.shared).filter(|(of, _)| of.leave);
        let keys = shared.filter_map(|(_, pair)| pair).flatten();
        let values: Vec<NodeId> = [stream].into_iter().chain(parts.later).chain(keys).collect();
        if values.len() > 1 {
            g.add(Op::Concatenate, &values);
        }
    }
}
