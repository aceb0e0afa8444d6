//! A decoder block as a graph of producers and consumers, and what may be folded in it.
//!
//! AWQ, SmoothQuant and QoQ all rest on one identity: divide an output channel of a producer (a
//! norm's weight, a linear's row) by `s` and multiply the matching input column of *every* linear
//! that reads it by `s`. Which producers and consumers these are follows from the graph: a
//! channel's scale passes unchanged through the `up` side of a gated product, a rectifier and the
//! value side of attention, squared through a squared rectifier, and is stopped by everything else. Balance lists are therefore computed,
//! never typed by hand, and a consumer cannot be forgotten. Scales are positive: a rectifier lets no
//! others through.

use std::ops::Range;

use super::AttentionShape;
use super::op::{AttentionInput, ChannelOrder, Computes, Op, Reach, Rows, ScalePass};
use crate::model::rope::Rope;

/// Index of a [`Node`] in its [`BlockGraph`]; nodes stand in an order of evaluation.
pub type NodeId = usize;

/// One step of a block.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// What it computes.
    pub op: Op,
    /// From which values, in the order the operation names them.
    pub inputs: Vec<NodeId>,
}

/// A block's computation.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockGraph {
    nodes: Vec<Node>,
    /// Of each node, the nodes that read its value, with the input that it is to them.
    users: Vec<Vec<(NodeId, usize)>>,
    /// Of each node, the features of its value.
    widths: Vec<usize>,
    /// Of each node whose value has rows for some tokens only, the node that selects them.
    rows: Vec<Option<NodeId>>,
}

/// A producer whose output channels may be rescaled, and everything that must be rescaled with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoldGroup {
    /// A norm or a linear; its output channels are divided by the scale.
    pub producer: NodeId,
    /// Which of its output channels: all, or of a fused linear the rows of one value.
    pub rows: Range<usize>,
    /// The balance list: every linear that reads these channels; their columns are multiplied.
    pub consumers: Vec<NodeId>,
    /// The node whose value all consumers read, experts the rows of their tokens.
    pub input: NodeId,
    /// The node whose output a scale search should watch: the single consumer, or the node in which all
    /// consumers' outputs meet (the attention's or MLP's output projection, the sum of experts).
    pub inspected: NodeId,
    /// How many times a producer's channels stand repeated in the consumers' input: 1, or the
    /// query heads per key head where values pass through grouped-query attention.
    pub repeat: usize,
    /// Neighbouring channels that are repeated together: a head's, where [`repeat`](Self::repeat) is not 1.
    pub run: usize,
    /// Scales are those of the consumers' columns. The producer's channels are divided by the root of this degree of them:
    /// what passes a square between the two comes out squared.
    pub exponent: u32,
}

impl FoldGroup {
    /// Of scales of the consumers' columns, what the producer's channels are divided by.
    pub fn roots(&self, scales: &[f32]) -> Vec<f32> {
        let root = |&scale: &f32| match self.exponent {
            1 => scale,
            2 => scale.sqrt(),
            degree => scale.powf(1.0 / degree as f32),
        };
        scales.iter().map(root).collect()
    }

    /// What the consumers' columns are multiplied by where the producer's channels are divided by `roots`.
    pub fn powers(&self, roots: &[f32]) -> Vec<f32> {
        roots.iter().map(|root| (1..self.exponent).fold(*root, |power, _| power * root)).collect()
    }

    /// The producer's channel that stands in a column of the consumers.
    pub fn channel(&self, column: usize) -> usize {
        column / self.run / self.repeat * self.run + column % self.run
    }

    /// Of one value for each of the producer's channels, those of the consumers' columns.
    pub fn spread(&self, channels: &[f32]) -> Vec<f32> {
        (0..channels.len() * self.repeat).map(|column| channels[self.channel(column)]).collect()
    }

    /// Of one value for each of the consumers' columns, the largest of every channel of the producer.
    pub fn gather_largest(&self, columns: &[f32]) -> Vec<f32> {
        let mut channels = vec![f32::NEG_INFINITY; columns.len() / self.repeat];
        for (column, value) in columns.iter().enumerate() {
            let channel = &mut channels[self.channel(column)];
            *channel = channel.max(*value);
        }
        channels
    }
}

/// Channels between linears that may stand in any order, and everything that must be reordered with them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrderGroup {
    /// The linears whose rows are reordered: all whose outputs the channels are made of.
    pub producers: Vec<NodeId>,
    /// The linear whose columns are.
    pub consumer: NodeId,
    /// The node whose value it reads.
    pub input: NodeId,
    /// How many times a producer's channels stand repeated in the consumer's input.
    pub repeat: usize,
    /// The width of heads, where channels may not leave theirs.
    pub head: Option<usize>,
}

/// The place of an attention and what turns, norms and makes its queries and keys.
#[derive(Debug, Clone, PartialEq)]
pub struct QueryKey {
    /// The attention.
    pub attention: NodeId,
    /// What queries and keys come from: a linear each, or a norm of heads each.
    pub producers: [NodeId; 2],
    /// Query heads per key head.
    pub repeat: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// How both are rotated to their positions, if they are: a channel that turns is mixed with its partner, and both must
    /// have one scale.
    pub rope: Option<Rope>,
}

/// Builds a [`BlockGraph`] in order of evaluation.
#[derive(Debug, Default)]
pub struct GraphBuilder {
    nodes: Vec<Node>,
}

impl GraphBuilder {
    /// Adds a node and returns its id.
    pub fn add(&mut self, op: Op, inputs: &[NodeId]) -> NodeId {
        debug_assert!(inputs.iter().all(|&i| i < self.nodes.len()), "inputs must come first");
        self.nodes.push(Node { op, inputs: inputs.to_vec() });
        self.nodes.len() - 1
    }

    /// The finished block; its output is the last node.
    pub fn finish(self) -> BlockGraph {
        let nodes = self.nodes;
        let mut users = vec![Vec::new(); nodes.len()];
        let mut widths: Vec<usize> = Vec::with_capacity(nodes.len());
        let mut rows: Vec<Option<NodeId>> = Vec::with_capacity(nodes.len());
        for (id, node) in nodes.iter().enumerate() {
            let inputs: Vec<usize> = node.inputs.iter().map(|&input| widths[input]).collect();
            widths.push(node.op.width(&inputs));
            rows.push(match node.op.rows() {
                Rows::All => None,
                Rows::OfInputs => node.inputs.iter().find_map(|&input| rows[input]),
                Rows::Selected { .. } => Some(id),
            });
            for (port, &input) in node.inputs.iter().enumerate() {
                users[input].push((id, port));
            }
        }
        BlockGraph { nodes, users, widths, rows }
    }
}

impl BlockGraph {
    /// The nodes in order of evaluation.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node that is the block's input.
    pub fn input(&self) -> NodeId {
        self.nodes.iter().position(|n| matches!(n.op, Op::Input { .. })).unwrap_or(0)
    }

    /// The node that is the block's output.
    pub fn output(&self) -> NodeId {
        self.nodes.len() - 1
    }

    /// Whether everything after a node is computed from its value alone: the block falls in two there. Its value is as
    /// wide as the block's input.
    pub fn is_cut(&self, id: NodeId) -> bool {
        let alone = self.nodes[id + 1..].iter().all(|n| n.inputs.iter().all(|&i| i >= id));
        alone && self.nodes[id].op == Op::Add
    }

    /// Features of a node's value.
    pub fn width(&self, id: NodeId) -> usize {
        self.widths[id]
    }

    /// The node that selects the rows of a node's value, where these are some of the tokens' only.
    pub fn rows_selected_by(&self, id: NodeId) -> Option<NodeId> {
        self.rows[id]
    }

    /// The expert that a node belongs to, as the node that selects the rows it reads.
    pub fn expert_of(&self, id: NodeId) -> Option<NodeId> {
        self.nodes[id].inputs.first().and_then(|&input| self.rows[input])
    }

    /// Features of a token that have to be kept while a block's experts run one after the other: what they read,
    /// their weights, and the sum of their outputs. 0 without experts.
    pub fn expert_features(&self) -> usize {
        let of = |(id, node): (NodeId, &Node)| {
            let outputs = node.inputs[1..].iter().filter_map(|&output| self.rows[output]);
            let read = outputs.map(|selects| self.widths[selects]).max().unwrap_or(0);
            read + self.widths[node.inputs[0]] + self.widths[id]
        };
        let sums = self.nodes.iter().enumerate().filter(|(_, node)| node.op.sums_experts());
        sums.map(of).max().unwrap_or(0)
    }

    /// The share of all tokens that a node's value has rows for, if tokens are spread evenly.
    pub fn share_of_tokens(&self, id: NodeId) -> f64 {
        match self.rows[id].map(|selects| self.nodes[selects].op.rows()) {
            Some(Rows::Selected { share, .. }) => share,
            _ => 1.0,
        }
    }

    /// The node whose value has the same channels as that of `id`, and all rows.
    pub fn all_rows_of(&self, id: NodeId) -> NodeId {
        match self.nodes[id].op.rows() {
            Rows::Selected { port, .. } => self.nodes[id].inputs[port],
            Rows::All | Rows::OfInputs => id,
        }
    }

    /// The last node that reaches across tokens, where each token's output is computed from the block's input and from
    /// that node's value by itself: nothing else that the output depends on reaches further.
    pub fn only_mixing(&self) -> Option<NodeId> {
        let mixing = (0..self.nodes.len()).rfind(|id| self.nodes[*id].op.reach() == Reach::Window)?;
        let mut needed = vec![false; self.nodes.len()];
        needed[self.output()] = true;
        for id in (0..self.nodes.len()).rev().filter(|id| *id != mixing) {
            if needed[id] {
                self.nodes[id].inputs.iter().for_each(|&input| needed[input] = true);
            }
        }
        let alone = |id: NodeId| id == mixing || !needed[id] || self.nodes[id].op.reach() == Reach::Token;
        (0..self.nodes.len()).all(alone).then_some(mixing)
    }

    /// Whether a token's value at `to` depends on other tokens' values at `from`, or on where it stands.
    pub fn mixes_tokens(&self, from: NodeId, to: NodeId) -> bool {
        // Of each node from `from` on: whether it depends on it, and whether that passes through such an operation.
        let mut depends = vec![false; to + 1 - from.min(to)];
        let mut mixes = depends.clone();
        depends[0] = true;
        for id in from + 1..=to {
            let node = &self.nodes[id];
            let mut inputs = node.inputs.iter().filter(|&&i| i >= from).map(|i| i - from);
            mixes[id - from] = inputs.clone().any(|i| mixes[i]);
            depends[id - from] = inputs.any(|i| depends[i]);
            mixes[id - from] |= depends[id - from] && node.op.reach() != Reach::Token;
        }
        mixes.last().copied().unwrap_or(false)
    }

    /// The attentions, in order of evaluation.
    pub fn attentions(&self) -> impl Iterator<Item = AttentionShape> {
        self.nodes.iter().filter_map(|node| node.op.cached())
    }

    /// Linears in order of evaluation: id, name inside the block, `[out, in]`, whether biased.
    pub fn linears(&self) -> impl Iterator<Item = (NodeId, &str, [usize; 2], bool)> {
        self.nodes.iter().enumerate().filter_map(|(id, node)| match node.op.computes() {
            Computes::Linear { name, shape, bias } => Some((id, name, shape, bias)),
            _ => None,
        })
    }

    /// Norms with parameters in order of evaluation: id, name inside the block, width.
    pub fn norms(&self) -> impl Iterator<Item = (NodeId, &str, usize)> {
        self.nodes.iter().enumerate().filter_map(|(id, node)| {
            let (name, width, _) = node.op.stored_norm()?;
            Some((id, name, width))
        })
    }

    /// Operations with parameters that are neither norms nor linears, in order of evaluation.
    pub fn parametrized(&self) -> impl Iterator<Item = (NodeId, &Op)> {
        let nodes = self.nodes.iter().enumerate().map(|(id, node)| (id, &node.op));
        nodes.filter(|(_, op)| !op.is_norm() && op.linear_shape().is_none() && !op.parameters().is_empty())
    }

    /// Whether a norm or a linear has a bias.
    pub fn has_bias(&self, id: NodeId) -> bool {
        let op = &self.nodes[id].op;
        match op.computes() {
            Computes::Linear { bias, .. } => bias,
            _ => op.stored_norm().is_some_and(|(.., bias)| bias),
        }
    }

    /// A node's name inside the block, if it is a module.
    pub fn name(&self, id: NodeId) -> &str {
        self.nodes[id].op.name()
    }

    /// Whether a linear's output becomes a query or key: its error passes through a softmax, so
    /// weight clipping, which minimizes the error of the linear's own output, leaves it alone.
    pub fn feeds_queries_or_keys(&self, id: NodeId) -> bool {
        self.feeds(id, &|input| input != AttentionInput::Values)
    }

    /// Whether a linear's output becomes a query, key or value.
    pub fn feeds_attention(&self, id: NodeId) -> bool {
        self.feeds(id, &|_| true)
    }

    /// Whether a linear's output, or a part of it, is normed and then read by another linear: a vector that stands for
    /// several heads, and that engines do not split.
    pub fn makes_latents(&self, id: NodeId) -> bool {
        self.users(id).any(|(user, _)| match &self.nodes[user].op {
            Op::Slice { .. } => self.makes_latents(user),
            op => {
                op.is_norm()
                    && self.users(user).any(|(reader, _)| self.nodes[reader].op.linear_shape().is_some())
            }
        })
    }

    /// Rows of a linear that belong to one head of the attention that it feeds: those of a query or key, or of a key and
    /// its value where it makes both.
    pub fn head_width(&self, id: NodeId, shape: AttentionShape) -> usize {
        let makes_both = self.feeds(id, &|input| input == AttentionInput::Keys)
            && self.feeds(id, &|input| input == AttentionInput::Values)
            && !self.feeds(id, &|input| input == AttentionInput::Queries);
        match makes_both {
            true => self.widths[id] / shape.kv_heads.max(1),
            false => shape.head_dim,
        }
    }

    fn feeds(&self, id: NodeId, wanted: &dyn Fn(AttentionInput) -> bool) -> bool {
        self.users(id).any(|(user, port)| {
            let op = &self.nodes[user].op;
            match op.attention_input(port) {
                Some(input) => wanted(input),
                None => op.keeps_heads() && self.feeds(user, wanted),
            }
        })
    }

    /// Every producer that can be rescaled, in order of evaluation. Where several values are multiplied with each other,
    /// any of them may carry the scale: the first does.
    pub fn fold_groups(&self) -> Vec<FoldGroup> {
        let mut groups: Vec<FoldGroup> = Vec::new();
        for group in (0..self.nodes.len()).flat_map(|id| self.fold_groups_of(id)) {
            if !groups.iter().any(|g| g.input == group.input && g.consumers == group.consumers) {
                groups.push(group);
            }
        }
        groups
    }

    fn fold_groups_of(&self, producer: NodeId) -> Vec<FoldGroup> {
        let op = &self.nodes[producer].op;
        let Some(width) = op.stored_norm().map(|(_, width, _)| width).or(op.linear_shape().map(|s| s[0]))
        else {
            return Vec::new();
        };
        // The rows that each value of a fused linear is made of.
        let slice = |(user, _): (NodeId, usize)| match self.nodes[user].op {
            Op::Slice { period, start, width: taken } if period == width => {
                Some((user, start..start + taken))
            }
            _ => None,
        };
        let slices: Option<Vec<(NodeId, Range<usize>)>> = self.users(producer).map(slice).collect();
        match slices.filter(|slices| !slices.is_empty() && op.linear_shape().is_some()) {
            Some(slices) => {
                let alone = |user: NodeId, rows: &Range<usize>| {
                    slices.iter().all(|(u, r)| *u == user || r.end <= rows.start || rows.end <= r.start)
                };
                let own = slices.iter().filter(|(user, rows)| alone(*user, rows));
                own.filter_map(|(user, rows)| self.fold_group(producer, *user, rows.clone())).collect()
            }
            None => self.fold_group(producer, producer, 0..width).into_iter().collect(),
        }
    }

    /// How often a producer's channels stand in its own value: as often as there are heads, where a norm has one weight
    /// for all of them.
    fn heads_of(&self, producer: NodeId) -> usize {
        let norm = self.nodes[producer].op.stored_norm();
        norm.map_or(1, |(_, width, _)| self.widths[producer] / width.max(1))
    }

    /// The group of some of a producer's channels, which are the value of the node `value`.
    fn fold_group(&self, producer: NodeId, value: NodeId, rows: Range<usize>) -> Option<FoldGroup> {
        let mut walk = Walk::default();
        let heads = self.heads_of(producer);
        if heads != 1 {
            walk.run = rows.len();
        }
        self.follow(value, heads, 1, &mut walk)?;
        let (input, repeat, exponent) = (walk.input?, walk.repeat, walk.exponent);
        let run = walk.run.max(1);
        let inspected = match walk.consumers.as_slice() {
            [] => return None,
            [single] => *single,
            several => self.meeting_node(several, input)?,
        };
        Some(FoldGroup { producer, rows, consumers: walk.consumers, input, inspected, repeat, run, exponent })
    }

    /// All channels between linears that may be reordered, in order of evaluation of their consumers.
    pub fn order_groups(&self) -> Vec<OrderGroup> {
        self.linears().filter_map(|(id, ..)| self.order_group(id)).collect()
    }

    fn order_group(&self, consumer: NodeId) -> Option<OrderGroup> {
        let input = self.nodes[consumer].inputs[0];
        if self.users(input).count() != 1 {
            return None;
        }
        let mut group = OrderGroup { producers: Vec::new(), consumer, input, repeat: 1, head: None };
        self.trace(input, &mut group)?;
        Some(group)
    }

    /// Collects the linears that a value's channels are made of, channel by channel, and nothing else is.
    fn trace(&self, value: NodeId, group: &mut OrderGroup) -> Option<()> {
        let node = &self.nodes[value];
        let inputs = match node.op.channel_order() {
            ChannelOrder::OfRows => {
                group.producers.push(value);
                &[]
            }
            ChannelOrder::OfInputs => &node.inputs[..],
            ChannelOrder::OfHeads { port, shape } if group.head.is_none() => {
                (group.repeat, group.head) = (shape.repeat, Some(shape.value_dim));
                node.inputs.get(port..=port)?
            }
            ChannelOrder::OfHeads { .. } | ChannelOrder::Fixed => return None,
        };
        for &input in inputs {
            (self.users(input).count() == 1).then_some(())?;
            self.trace(input, group)?;
        }
        Some(())
    }

    /// Every attention whose queries and keys can be scaled against each other.
    pub fn query_keys(&self) -> Vec<QueryKey> {
        let of = |(attention, node): (NodeId, &Node)| {
            let Op::Attention(AttentionShape { repeat, head_dim, .. }) = node.op else { return None };
            let [queries, keys] = [self.made_by(node.inputs[0])?, self.made_by(node.inputs[1])?];
            let rope = queries.1;
            let producers = [queries.0, keys.0];
            // Norms of queries and keys are scaled only where powers of two are exact in what they store.
            let exact = producers.iter().all(|&id| self.nodes[id].op.weight_offset() == 0.0);
            (keys.1 == rope && exact).then(|| QueryKey {
                attention,
                producers,
                repeat,
                head_dim,
                rope: rope.cloned(),
            })
        };
        self.nodes.iter().enumerate().filter_map(of).collect()
    }

    /// What can scale a query or key, and how it is rotated after that.
    fn made_by(&self, value: NodeId) -> Option<(NodeId, Option<&Rope>)> {
        if self.users(value).count() != 1 {
            return None;
        }
        match &self.nodes[value].op {
            Op::Rope(rope) => self.made_by(self.nodes[value].inputs[0]).map(|(id, _)| (id, Some(rope))),
            // One factor for all channels of a token.
            Op::PositionScale(_) => self.made_by(self.nodes[value].inputs[0]),
            Op::Linear { .. } => Some((value, None)),
            op if op.stored_norm().is_some() => Some((value, None)),
            _ => None,
        }
    }

    /// Collects the linears that read `value`'s channels; `None` if something stops the scale.
    fn follow(&self, value: NodeId, repeat: usize, exponent: u32, walk: &mut Walk) -> Option<()> {
        for (user, port) in self.users(value) {
            match &self.nodes[user].op {
                Op::Linear { .. } => {
                    // All consumers must see the channels in one arrangement, if not all of them the same rows.
                    let value = self.all_rows_of(value);
                    if walk.input.is_some_and(|i| i != value) {
                        return None;
                    }
                    walk.input = Some(value);
                    (walk.repeat, walk.exponent) = (repeat, exponent);
                    walk.consumers.push(user);
                }
                op => match op.scale_pass(port) {
                    ScalePass::Passed { exponent: power, repeat: times, run } => {
                        // Repeated again, channels would no longer stand in runs of one width.
                        if times != 1 && repeat != 1 {
                            return None;
                        }
                        if run != 1 {
                            walk.run = run;
                        }
                        self.follow(user, repeat * times, exponent * power, walk)?;
                    }
                    ScalePass::Stopped => return None,
                },
            }
        }
        Some(())
    }

    /// Whether a node's value is computed from that of `from` and from nothing else.
    fn follows_from(&self, id: NodeId, from: NodeId) -> bool {
        let mut needed = vec![false; id + 1];
        needed[id] = true;
        for node in (0..=id).rev().filter(|node| *node != from) {
            if needed[node] {
                if self.nodes[node].inputs.is_empty() {
                    return false;
                }
                self.nodes[node].inputs.iter().for_each(|&input| needed[input] = true);
            }
        }
        true
    }

    /// The nodes that read a value, in order of evaluation, each with the input that the value is to it.
    pub fn users(&self, value: NodeId) -> impl Iterator<Item = (NodeId, usize)> {
        self.users[value].iter().copied()
    }

    /// The first linear that depends on all of these, or the first node of any kind where no linear does. A search computes
    /// it from the value that all of these read, so that it must follow from that: experts that a router with another input
    /// chooses do not.
    fn meeting_node(&self, sources: &[NodeId], input: NodeId) -> Option<NodeId> {
        // Of each node, how many of the sources it depends on.
        let mut reached = vec![0_usize; self.nodes.len()];
        for &source in sources {
            let mut depends = vec![false; self.nodes.len()];
            depends[source] = true;
            for id in source..self.nodes.len() {
                depends[id] |= self.nodes[id].inputs.iter().any(|&i| depends[i]);
                reached[id] += usize::from(depends[id]);
            }
        }
        let meets = |id: &NodeId| !sources.contains(id) && reached[*id] == sources.len();
        let linear = self.linears().map(|(id, ..)| id).find(meets);
        let any = || (0..self.nodes.len()).find(meets).filter(|id| self.follows_from(*id, input));
        linear.filter(|id| self.follows_from(*id, input)).or_else(any)
    }
}

#[derive(Default)]
struct Walk {
    consumers: Vec<NodeId>,
    input: Option<NodeId>,
    repeat: usize,
    run: usize,
    exponent: u32,
}
