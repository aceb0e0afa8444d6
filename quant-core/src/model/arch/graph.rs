//! A decoder block as a graph of producers and consumers, and the folds that it allows.
//!
//! AWQ, SmoothQuant and QoQ all rest on one identity: divide an output channel of a producer (a norm's weight, a
//! linear's row) by `s` and multiply the matching input column of *every* linear that reads it by `s`. Balance lists
//! are computed from the graph, so no consumer can be forgotten. [`Op::scale_pass`] says how a scale passes through
//! each operation. Scales are positive, since a ReLU only commutes with positive scales.

use std::collections::BTreeSet;
use std::ops::Range;

use super::AttentionShape;
use super::op::{AttentionInput, ChannelOrder, Computes, Op, Reach, RowCoverage, ScalePass};

/// Index of a [`Node`] in its [`BlockGraph`]; nodes are in evaluation order.
pub type NodeId = usize;

/// One step of a block.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Node {
    /// The operation.
    pub op: Op,
    /// The nodes whose values the node reads, in the order of the operation's inputs.
    pub inputs: Vec<NodeId>,
}

/// A block's computation.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockGraph {
    nodes: Vec<Node>,
    users: Vec<Vec<(NodeId, usize)>>,
    widths: Vec<usize>,
    /// For each node whose value has rows for only some tokens, the node that selects them.
    rows: Vec<Option<NodeId>>,
}

/// A producer whose output channels may be rescaled, and everything that must be rescaled with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoldGroup {
    /// A norm or a linear; its output channels are divided by the scale.
    pub producer: NodeId,
    /// The output channels that are scaled: all, or the rows of one value of a fused linear.
    pub rows: Range<usize>,
    /// The balance list: every linear that reads these channels. Their columns are multiplied by the scale.
    pub consumers: Vec<NodeId>,
    /// The node whose value the consumers read; experts read only the rows of their tokens.
    pub input: NodeId,
    /// The node whose output a scale search observes: the only consumer, or the node where the outputs of all consumers
    /// meet.
    pub inspected: NodeId,
    /// How many times each producer channel is repeated in the consumers' input, because of grouped-query attention or
    /// a norm with one weight for all heads.
    pub repeat: usize,
    /// Number of adjacent channels that are repeated together.
    pub run: usize,
    /// The exponent with which a scale of the producer reaches the consumers. The consumers' columns are multiplied by
    /// the scale itself, and the producer's channels are divided by its `exponent`-th root.
    pub exponent: u32,
}

impl FoldGroup {
    /// Returns the divisors of the producer's channels for these scales of the consumers' columns.
    pub fn roots(&self, scales: &[f32]) -> Vec<f32> {
        let root = |&scale: &f32| match self.exponent {
            1 => scale,
            2 => scale.sqrt(),
            degree => scale.powf(1.0 / degree as f32),
        };
        scales.iter().map(root).collect()
    }

    /// Returns the factors of the consumers' columns if the producer's channels are divided by `roots`.
    pub fn powers(&self, roots: &[f32]) -> Vec<f32> {
        roots.iter().map(|root| (1..self.exponent).fold(*root, |power, _| power * root)).collect()
    }

    /// Returns the producer channel of a consumer column.
    pub fn channel(&self, column: usize) -> usize {
        column / self.run / self.repeat * self.run + column % self.run
    }

    /// Expands one value per producer channel to one value per consumer column.
    pub fn spread(&self, channels: &[f32]) -> Vec<f32> {
        (0..channels.len() * self.repeat).map(|column| channels[self.channel(column)]).collect()
    }

    /// Reduces one value per consumer column to the maximum per producer channel.
    pub fn gather_largest(&self, columns: &[f32]) -> Vec<f32> {
        let mut channels = vec![f32::NEG_INFINITY; columns.len() / self.repeat];
        for (column, value) in columns.iter().enumerate() {
            let channel = &mut channels[self.channel(column)];
            *channel = channel.max(*value);
        }
        channels
    }
}

/// Channels between linears that may be permuted, and everything that must be permuted with them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OrderGroup {
    /// The linears whose rows are permuted: all linears that compute the channels.
    pub producers: Vec<NodeId>,
    /// The linear whose columns are permuted.
    pub consumer: NodeId,
    /// The node whose value the consumer reads.
    pub input: NodeId,
    /// How many times each producer channel is repeated in the consumer's input.
    pub repeat: usize,
    /// The head width, if channels must stay within their heads.
    pub head: Option<usize>,
}

/// Builds a [`BlockGraph`] in evaluation order.
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

    /// Returns the finished block; its output is the last node.
    pub fn finish(self) -> BlockGraph {
        let nodes = self.nodes;
        let mut users = vec![Vec::new(); nodes.len()];
        let mut widths: Vec<usize> = Vec::with_capacity(nodes.len());
        let mut rows: Vec<Option<NodeId>> = Vec::with_capacity(nodes.len());
        for (id, node) in nodes.iter().enumerate() {
            let inputs: Vec<usize> = node.inputs.iter().map(|&input| widths[input]).collect();
            widths.push(node.op.width(&inputs));
            rows.push(match node.op.rows() {
                RowCoverage::All => None,
                RowCoverage::OfInputs => node.inputs.iter().find_map(|&input| rows[input]),
                RowCoverage::Selected { .. } => Some(id),
            });
            for (port, &input) in node.inputs.iter().enumerate() {
                users[input].push((id, port));
            }
        }
        BlockGraph { nodes, users, widths, rows }
    }
}

impl BlockGraph {
    /// Returns the nodes in evaluation order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the nodes whose values are needed to compute a node from its inputs.
    pub fn needed_by(&self, id: NodeId) -> &[NodeId] {
        let Node { op, inputs } = &self.nodes[id];
        &inputs[..op.needed_inputs().unwrap_or(inputs.len()).min(inputs.len())]
    }

    /// Returns the node and all nodes whose values are needed to compute it.
    pub fn needed_for(&self, id: NodeId) -> BTreeSet<NodeId> {
        let mut needed = BTreeSet::from([id]);
        for earlier in (0..=id).rev() {
            if needed.contains(&earlier) {
                needed.extend(self.needed_by(earlier));
            }
        }
        needed
    }

    /// Returns the node that is the block's input.
    pub fn input(&self) -> NodeId {
        self.nodes.iter().position(|n| matches!(n.op, Op::Input { .. })).unwrap_or(0)
    }

    /// Returns the node that is the block's output.
    pub fn output(&self) -> NodeId {
        self.nodes.len() - 1
    }

    /// Returns whether all later nodes depend only on this node's value, so that the block can be split there.
    pub fn is_cut(&self, id: NodeId) -> bool {
        let alone = self.nodes[id + 1..].iter().all(|n| n.inputs.iter().all(|&i| i >= id));
        alone && self.nodes[id].op == Op::Add
    }

    /// Returns the number of features of a node's value.
    pub fn width(&self, id: NodeId) -> usize {
        self.widths[id]
    }

    /// Returns the node that selects the rows of a node's value, if the value only has rows for some tokens.
    pub fn rows_selected_by(&self, id: NodeId) -> Option<NodeId> {
        self.rows[id]
    }

    /// Returns the expert that a node belongs to, as the node that selects the rows it reads.
    pub fn expert_of(&self, id: NodeId) -> Option<NodeId> {
        self.nodes[id].inputs.first().and_then(|&input| self.rows[input])
    }

    /// Returns the number of the expert that a node belongs to, from 0.
    pub fn expert_number(&self, id: NodeId) -> Option<usize> {
        self.nodes[self.expert_of(id)?].op.selected_expert()
    }

    /// Returns the number of the block's experts that each run on some of the tokens.
    pub fn experts(&self) -> usize {
        self.nodes.iter().filter(|node| node.op.selected_expert().is_some()).count()
    }

    /// Returns the bytes per token of the two buffers that are kept while the experts of a block are evaluated in
    /// sequence: the sum of their outputs, and the indices and weights of the token's experts. Both are 0 for blocks
    /// without experts.
    pub fn expert_sum_bytes(&self) -> (usize, usize) {
        let of = |(id, node): (NodeId, &Node)| {
            let share = node.inputs[1..].first().map_or(0.0, |&output| self.share_of_tokens(output));
            let routed = (self.widths[node.inputs[0]] as f64 * share).ceil() as usize;
            (4 * self.widths[id], 8 * routed)
        };
        let sums = self.nodes.iter().enumerate().filter(|(_, node)| node.op.sums_experts());
        sums.map(of).max().unwrap_or_default()
    }

    /// The bytes per token of the outputs of all experts, which exist together if the block runs as a whole. `share`
    /// returns the share of tokens on which an expert runs, given the share that is routed to it.
    pub(crate) fn expert_output_bytes(&self, share: impl Fn(f64) -> f64) -> f64 {
        let of = |(id, node): (NodeId, &Node)| {
            let outputs = &node.inputs[1..];
            let routed = outputs.first().map_or(0.0, |&output| self.share_of_tokens(output));
            share(routed) * (4 * outputs.len() * self.widths[id]) as f64
        };
        let sums = self.nodes.iter().enumerate().filter(|(_, node)| node.op.sums_experts());
        sums.map(of).sum()
    }

    /// Returns the fraction of all tokens that a node's value has rows for, if tokens are distributed evenly.
    pub fn share_of_tokens(&self, id: NodeId) -> f64 {
        match self.rows[id].map(|selects| self.nodes[selects].op.rows()) {
            Some(RowCoverage::Selected { share, .. }) => share,
            _ => 1.0,
        }
    }

    /// Returns the node whose value has a row for every token and the same channels as the value of `id`.
    pub fn all_rows_of(&self, id: NodeId) -> NodeId {
        match self.nodes[id].op.rows() {
            RowCoverage::Selected { port, .. } => self.nodes[id].inputs[port],
            RowCoverage::All | RowCoverage::OfInputs => id,
        }
    }

    /// Returns the last node that mixes tokens, if each token's output depends only on the token's own block input and
    /// on its own row of that node's value.
    pub fn only_mixing(&self) -> Option<NodeId> {
        let mixing = (0..self.nodes.len()).rfind(|id| self.nodes[*id].op.reach() == Reach::Window)?;
        let mut needed = vec![false; self.nodes.len()];
        needed[self.output()] = true;
        for id in (0..self.nodes.len()).rev().filter(|id| *id != mixing) {
            if needed[id] {
                self.needed_by(id).iter().for_each(|&input| needed[input] = true);
            }
        }
        let alone = |id: NodeId| id == mixing || !needed[id] || self.nodes[id].op.reach() == Reach::Token;
        (0..self.nodes.len()).all(alone).then_some(mixing)
    }

    /// Returns whether a token's value at `to` depends on other tokens' values at `from`, or on the token's position.
    pub fn mixes_tokens(&self, from: NodeId, to: NodeId) -> bool {
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

    /// Returns the attentions, in evaluation order.
    pub fn attentions(&self) -> impl Iterator<Item = AttentionShape> {
        self.nodes.iter().filter_map(|node| node.op.cached())
    }

    /// Returns the linears in evaluation order: id, name inside the block, `[out, in]`, whether there is a bias.
    pub fn linears(&self) -> impl Iterator<Item = (NodeId, &str, [usize; 2], bool)> {
        self.nodes.iter().enumerate().filter_map(|(id, node)| match node.op.computes() {
            Computes::Linear { name, shape, bias } => Some((id, name, shape, bias)),
            _ => None,
        })
    }

    /// Returns the norms with parameters in evaluation order: id, name inside the block, width.
    pub fn norms(&self) -> impl Iterator<Item = (NodeId, &str, usize)> {
        self.nodes.iter().enumerate().filter_map(|(id, node)| {
            let (name, width, _) = node.op.stored_norm()?;
            Some((id, name, width))
        })
    }

    /// Returns the operations with parameters that are neither norms nor linears, in evaluation order.
    pub fn parametrized(&self) -> impl Iterator<Item = (NodeId, &Op)> {
        let nodes = self.nodes.iter().enumerate().map(|(id, node)| (id, &node.op));
        nodes.filter(|(_, op)| !op.is_norm() && op.linear_shape().is_none() && !op.parameters().is_empty())
    }

    /// Returns whether a norm or a linear has a bias.
    pub fn has_bias(&self, id: NodeId) -> bool {
        let op = &self.nodes[id].op;
        match op.computes() {
            Computes::Linear { bias, .. } => bias,
            _ => op.stored_norm().is_some_and(|(.., bias)| bias),
        }
    }

    /// Returns a node's name inside the block, or an empty string if it is not a module.
    pub fn name(&self, id: NodeId) -> &str {
        self.nodes[id].op.name()
    }

    /// Returns whether a linear's output becomes a query or key. Its error then passes through a softmax, so weight
    /// clipping, which minimizes the error of the linear's own output, does not apply to it.
    pub fn feeds_queries_or_keys(&self, id: NodeId) -> bool {
        self.feeds(id, &|input| input != AttentionInput::Values)
    }

    /// Returns whether a linear's output becomes a query, key or value.
    pub fn feeds_attention(&self, id: NodeId) -> bool {
        self.feeds(id, &|_| true)
    }

    /// Returns whether a linear's output, or part of it, is normalized and then read by another linear: a latent
    /// vector, which engines do not split.
    pub fn makes_latents(&self, id: NodeId) -> bool {
        self.users(id).any(|(user, _)| match &self.nodes[user].op {
            Op::Slice { .. } => self.makes_latents(user),
            op => {
                op.is_norm()
                    && self.users(user).any(|(reader, _)| self.nodes[reader].op.linear_shape().is_some())
            }
        })
    }

    /// Returns the number of rows of a linear per head of the attention that it feeds.
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

    /// Returns the groups of all producers that can be rescaled, in evaluation order. If several values are multiplied,
    /// the first one carries the scale.
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

    fn heads_of(&self, producer: NodeId) -> usize {
        let norm = self.nodes[producer].op.stored_norm();
        norm.map_or(1, |(_, width, _)| self.widths[producer] / width.max(1))
    }

    /// `value` is the node whose value consists of exactly the channels `rows`.
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

    /// Returns all channels between linears that may be permuted, in evaluation order of their consumers.
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

    /// Collects the linears whose rows produce the channels of `value`. Returns `None` if the channels cannot be
    /// permuted.
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

    /// Collects the linears that read `value`'s channels; returns `None` if something stops the scale.
    fn follow(&self, value: NodeId, repeat: usize, exponent: u32, walk: &mut Walk) -> Option<()> {
        for (user, port) in self.users(value) {
            match &self.nodes[user].op {
                Op::Linear { .. } => {
                    // All consumers must read the channels in the same order, though not necessarily the same rows.
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
                        // After two repetitions, the channels would no longer form runs of one width.
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

    fn follows_from(&self, id: NodeId, from: NodeId) -> bool {
        let mut needed = vec![false; id + 1];
        needed[id] = true;
        for node in (0..=id).rev().filter(|node| *node != from) {
            if needed[node] {
                if self.nodes[node].inputs.is_empty() {
                    return false;
                }
                self.needed_by(node).iter().for_each(|&input| needed[input] = true);
            }
        }
        true
    }

    /// Returns the nodes that read a value, in evaluation order, each with the input port.
    pub fn users(&self, value: NodeId) -> impl Iterator<Item = (NodeId, usize)> {
        self.users[value].iter().copied()
    }

    /// Returns the first linear that depends on all `sources`, or else the first node of any kind. A node that depends
    /// on anything but `input` does not qualify, such as the sum of experts that are chosen by a router with a
    /// different input.
    fn meeting_node(&self, sources: &[NodeId], input: NodeId) -> Option<NodeId> {
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
