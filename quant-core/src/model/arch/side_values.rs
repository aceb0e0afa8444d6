//! Values that travel from block to block in addition to the residual stream: per-block inputs that depend only on the
//! token, and keys and values that later blocks read.
//!
//! Blocks exchange a single value per token: the residual stream, then the inputs of the remaining blocks, then the
//! shared keys and values. The rest of the pipeline only sees wider block inputs.

use super::parts::{DecoderBlock, linear};
use super::{Activation, GraphBuilder, NodeId, Op};

#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct SideValues {
    /// The input that only this block reads.
    pub(super) own: Option<OwnInput>,
    /// Total features of the inputs of all later blocks.
    pub(super) later: usize,
    /// Keys and values shared between blocks: one pair per kind of layer.
    pub(super) shared: [SharedKeys; 2],
}

/// An input that only one block reads: `x + norm(projection(activation(gate(x)) · input))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct OwnInput {
    pub(super) width: usize,
    pub(super) activation: Activation,
    /// Module names of the gate, the projection and the norm.
    pub(super) names: [&'static str; 3],
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct SharedKeys {
    /// Features of the keys, and of the values.
    pub(super) width: usize,
    /// Whether they are part of the block's input.
    pub(super) enter: bool,
    /// Whether they are part of the block's output.
    pub(super) leave: bool,
}

/// The role of an attention with respect to shared keys and values, with the index of the pair in
/// [`SideValues::shared`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sharing {
    Makes(usize),
    /// The attention has no projections of its own for keys and values.
    Reads(usize),
}

pub(super) struct Parts {
    pub(super) stream: NodeId,
    own: Option<NodeId>,
    later: Option<NodeId>,
    /// The shared keys and values, once they are available.
    pub(super) shared: [Option<[NodeId; 2]>; 2],
}

impl SideValues {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn enter(&self, g: &mut GraphBuilder, hidden: usize) -> Parts {
        if self.is_empty() {
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

    pub(super) fn leave(&self, g: &mut GraphBuilder, stream: NodeId, parts: &Parts) {
        let shared = self.shared.iter().zip(parts.shared).filter(|(of, _)| of.leave);
        let keys = shared.filter_map(|(_, pair)| pair).flatten();
        let values: Vec<NodeId> = [stream].into_iter().chain(parts.later).chain(keys).collect();
        if values.len() > 1 {
            g.add(Op::Concatenate, &values);
        }
    }
}
