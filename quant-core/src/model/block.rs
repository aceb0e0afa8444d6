//! One decoder block: its weights, and the full or partial evaluation of its graph.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use candle_core::{D, Device, Tensor};
use quant_kernels_cpu::candle::Runner;

use super::arch::{AttentionShape, BlockGraph, LayerNormParameters, NodeId, Op};
use super::attention::{activate, add, cached_attention, causal_attention, gated};
use super::fused::{self, FusedReaders};
use super::grouped::{GroupedExperts, grouped};
use super::tap::Tap;
use super::tensor_values::with_slices;
use super::{
    CudaRunner, KvCaching, KvScales, LayerCache, Linear, Norm, RopeTable, RopeTables, Segments, StoredWeight,
    TokenRows,
};
use super::{OpParameters, experts, gates, norm, paged, recurrent};
use crate::scheme::CachePart;
use crate::{Error, Result};

/// A block graph with its weights.
#[derive(Debug, Clone)]
pub struct Block {
    graph: Arc<BlockGraph>,
    norms: BTreeMap<NodeId, Norm>,
    linears: BTreeMap<NodeId, Linear>,
    parameters: BTreeMap<NodeId, OpParameters>,
    ropes: BTreeMap<NodeId, Arc<RopeTable>>,
    caching: KvCaching,
    /// Experts that run on all tokens, each identified by the node that selects its rows.
    pub(super) unrouted: Arc<BTreeSet<NodeId>>,
    kv_scales: KvScales,
    /// Experts that run in one call, by the nodes that sum them.
    grouped: BTreeMap<NodeId, GroupedExperts>,
    /// Norms and gates that the kernels compute while packing rows.
    fused: FusedReaders,
}

impl Block {
    /// Creates a block from the parameters of each norm that has any, a [`Linear`] for each linear of the graph, the
    /// parameters of other operations, and the tables of its rotary embeddings.
    ///
    /// # Errors
    /// [`Error::Internal`] when a norm, linear, parameter or table of the graph is missing, or only one of norm and
    /// graph has a bias.
    pub fn new(
        graph: Arc<BlockGraph>,
        mut norms: BTreeMap<NodeId, Norm>,
        linears: BTreeMap<NodeId, Linear>,
        parameters: BTreeMap<NodeId, OpParameters>,
        ropes: &RopeTables,
    ) -> Result<Self> {
        let mut tables = BTreeMap::new();
        for (id, node) in graph.nodes().iter().enumerate() {
            if let Op::LayerNorm { width, parameters: LayerNormParameters::None, .. } = node.op {
                norms.insert(id, Norm::plain(width)?);
            }
            if let Op::Rope(rope) = &node.op {
                let table =
                    ropes.get(rope).ok_or_else(|| Error::Internal("a block lacks a rotation".into()))?;
                tables.insert(id, table.clone());
            }
        }
        let has_its_own =
            |id: NodeId| norms.get(&id).is_some_and(|norm| norm.bias.is_some() == graph.has_bias(id));
        let complete = graph.norms().all(|(id, ..)| has_its_own(id))
            && graph.linears().all(|(id, ..)| linears.contains_key(&id))
            && graph.parametrized().all(|(id, _)| parameters.contains_key(&id));
        if !complete {
            return Err(Error::Internal("a block lacks some of its weights".into()));
        }
        let (caching, unrouted, kv_scales) = (KvCaching::Float, Arc::default(), KvScales::new());
        let (ropes, grouped, fused) = (tables, BTreeMap::new(), FusedReaders::new());
        Ok(Self { graph, norms, linears, parameters, ropes, caching, unrouted, kv_scales, grouped, fused })
    }

    /// Returns the block with a different cache of keys and values. A new block has [`KvCaching::Float`], because
    /// searches and calibration use float keys and values.
    pub fn with_caching(mut self, caching: KvCaching) -> Self {
        self.caching = caching;
        self
    }

    /// Returns the block with static scales for an FP8 cache of keys and values; a missing scale is 1.
    pub fn with_kv_scales(mut self, scales: KvScales) -> Self {
        self.kv_scales = scales;
        self
    }

    /// Returns how the block caches keys and values.
    pub fn caching(&self) -> KvCaching {
        self.caching
    }

    /// Returns the block's graph.
    pub fn graph(&self) -> &Arc<BlockGraph> {
        &self.graph
    }

    /// Returns a linear's weight and bias.
    ///
    /// # Panics
    /// When the node is not a linear.
    pub fn linear(&self, id: NodeId) -> &Linear {
        &self.linears[&id]
    }

    /// Reads all weights that are not yet in memory.
    ///
    /// # Errors
    /// When a weight cannot be read or is not finite.
    pub fn load(&self) -> Result<()> {
        self.linears.values().try_for_each(|linear| linear.weight().load())
    }

    /// Returns the float weights that are read on first use.
    pub fn stored_weights(&self) -> impl Iterator<Item = &StoredWeight> {
        self.linears.values().filter_map(|linear| linear.weight().as_stored())
    }

    /// Drops the bytes of an expert's weights. They are read again when they are used again. `selects` is the node that
    /// selects the expert's rows.
    pub(crate) fn release_expert(&self, selects: NodeId) {
        let own = self.linears.iter().filter(|(id, _)| self.graph.expert_of(**id) == Some(selects));
        own.filter_map(|(_, linear)| linear.weight().as_stored()).for_each(|weight| drop(weight.release()));
    }

    /// Returns a norm's weight, `[width]`.
    ///
    /// # Panics
    /// When the node is not a norm.
    pub fn norm(&self, id: NodeId) -> &Tensor {
        &self.norms[&id].weight
    }

    /// Returns a norm's bias, `[width]`, if it has one.
    ///
    /// # Panics
    /// When the node is not a norm.
    pub fn norm_bias(&self, id: NodeId) -> Option<&Tensor> {
        self.norms[&id].bias.as_ref()
    }

    /// Replaces a linear. Operations of the block that were fused are run separately again.
    pub fn replace_linear(&mut self, id: NodeId, linear: Linear) {
        self.grouped.clear();
        self.fused.clear();
        self.linears.insert(id, linear);
    }

    /// Returns the block with its quantized linears packed for the kernels. Experts run in one call if their linears
    /// allow it.
    ///
    /// # Errors
    /// As [`WeightBody::packed`](super::WeightBody::packed), and when the shapes of experts do not match.
    pub fn packed(mut self, runner: &Runner) -> Result<Self> {
        for linear in self.linears.values_mut() {
            *linear = linear.packed(runner)?;
        }
        self.grouped = grouped(&self.graph, &self.linears)?;
        self.fused = fused::readers(&self.graph, &self.linears, &self.norms);
        Ok(self)
    }

    /// Returns the block with all its quantized linears on a GPU.
    ///
    /// # Errors
    /// As [`WeightBody::on_cuda`](super::WeightBody::on_cuda).
    pub fn on_cuda(mut self, runner: &CudaRunner) -> Result<Self> {
        for linear in self.linears.values_mut() {
            *linear = linear.on_cuda(runner)?;
        }
        Ok(self)
    }

    /// Returns the number of experts that run in one kernel call.
    pub fn experts_in_one_call(&self) -> usize {
        self.grouped.values().map(GroupedExperts::count).sum()
    }

    /// Returns the number of norms and gates that the kernels compute while packing rows.
    pub fn fused_operations(&self) -> usize {
        self.fused.len()
    }

    /// Replaces the parameters of a norm.
    pub fn replace_norm(&mut self, id: NodeId, norm: Norm) {
        self.norms.insert(id, norm);
    }

    /// Runs the whole block on `hidden` `[batch, positions, width]`. `start` is the position of the first row: 0
    /// without a cache, the number of cached positions with one.
    ///
    /// # Errors
    /// When shapes do not match, the block cannot be computed for these values or positions, a weight cannot be read,
    /// or the tap stops the run.
    pub fn forward(
        &self,
        hidden: &Tensor,
        start: usize,
        cache: Option<&mut LayerCache>,
        tap: &mut dyn Tap,
    ) -> Result<Tensor> {
        let mut run =
            Run { block: self, start, cache, segments: Segments::whole(), tap, selected: BTreeMap::new() };
        run.output(hidden)
    }

    /// Runs the whole block on windows `[batch, positions, width]` of several segments each, without a cache.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and when the segments do not match the batch.
    pub fn forward_packed(
        &self,
        hidden: &Tensor,
        segments: Segments<'_>,
        tap: &mut dyn Tap,
    ) -> Result<Tensor> {
        Run { block: self, start: 0, cache: None, segments, tap, selected: BTreeMap::new() }.output(hidden)
    }

    /// Computes the values of some nodes from known ones, without a cache and from position 0.
    ///
    /// # Errors
    /// When a target cannot be computed from the known values, or shapes do not match.
    pub fn evaluate(
        &self,
        known: &[(NodeId, Tensor)],
        targets: &[NodeId],
        tap: &mut dyn Tap,
    ) -> Result<Vec<Tensor>> {
        self.evaluate_packed(known, targets, Segments::whole(), tap)
    }

    /// Computes the values of some nodes from known ones, for windows of several segments each.
    ///
    /// # Errors
    /// As [`evaluate`](Self::evaluate), and when the segments do not match the batch.
    pub fn evaluate_packed(
        &self,
        known: &[(NodeId, Tensor)],
        targets: &[NodeId],
        segments: Segments<'_>,
        tap: &mut dyn Tap,
    ) -> Result<Vec<Tensor>> {
        Run { block: self, start: 0, cache: None, segments, tap, selected: BTreeMap::new() }
            .evaluate(known, targets)
    }

    /// Computes one node's value. If the value has rows for only some tokens, also returns the indices of these tokens
    /// in the known values.
    ///
    /// # Errors
    /// As [`evaluate_packed`](Self::evaluate_packed).
    pub fn evaluate_rows(
        &self,
        known: &[(NodeId, Tensor)],
        target: NodeId,
        segments: Segments<'_>,
        tap: &mut dyn Tap,
    ) -> Result<(Tensor, Option<Vec<u32>>)> {
        let mut run = Run { block: self, start: 0, cache: None, segments, tap, selected: BTreeMap::new() };
        let value = run.evaluate(known, &[target])?.swap_remove(0);
        let selects = self.graph.rows_selected_by(target);
        Ok((value, selects.and_then(|node| run.selected.remove(&node))))
    }
}

struct Run<'a> {
    block: &'a Block,
    start: usize,
    cache: Option<&'a mut LayerCache>,
    segments: Segments<'a>,
    tap: &'a mut dyn Tap,
    /// The selected tokens, by the node that selects them.
    selected: BTreeMap<NodeId, Vec<u32>>,
}

impl<'a> Run<'a> {
    fn output(&mut self, hidden: &Tensor) -> Result<Tensor> {
        let graph = &self.block.graph;
        let mut values = self.evaluate(&[(graph.input(), hidden.clone())], &[graph.output()])?;
        values.pop().ok_or_else(|| Error::Internal("a block has no output".into()))
    }

    /// Returns the experts that node `id` sums, if this run computes them in one call.
    fn grouped(&self, id: NodeId) -> Option<&GroupedExperts> {
        let whole = !self.tap.watches() && self.block.unrouted.is_empty();
        self.block.grouped.get(&id).filter(|_| whole)
    }

    /// Returns the nodes that are read to compute a node.
    fn inputs(&self, id: NodeId) -> &[NodeId] {
        self.grouped(id).map_or(self.block.graph.needed_by(id), |experts| experts.inputs())
    }

    fn evaluate(&mut self, known: &[(NodeId, Tensor)], targets: &[NodeId]) -> Result<Vec<Tensor>> {
        let nodes = self.block.graph.nodes();
        let mut values: Vec<Option<Tensor>> = vec![None; nodes.len()];
        for (id, value) in known {
            values[*id] = Some(value.clone());
        }
        // The nodes that must be computed, and how often each value will be read.
        let mut uses = vec![0_usize; nodes.len()];
        let mut needed = vec![false; nodes.len()];
        for &target in targets {
            uses[target] += 1;
            needed[target] = true;
        }
        for id in (0..nodes.len()).rev() {
            if needed[id] && values[id].is_none() {
                for &input in self.inputs(id) {
                    uses[input] += 1;
                    needed[input] = true;
                }
            }
        }
        for id in 0..nodes.len() {
            if !needed[id] || values[id].is_some() {
                continue;
            }
            if let Some(together) = self.together(id, &needed, &values) {
                let input = nodes[id].inputs[0];
                let x = values[input]
                    .clone()
                    .ok_or_else(|| Error::Internal(format!("node {input} is not known")))?;
                for (&id, y) in together.iter().zip(self.multiply_each(&together, &x)?) {
                    uses[input] -= 1;
                    values[id] = Some(y);
                }
                if uses[input] == 0 {
                    values[input] = None;
                }
                continue;
            }
            let mut inputs = Vec::new();
            for &input in self.inputs(id) {
                uses[input] -= 1;
                // The last node that reads a value takes ownership of it, so that memory is freed as early as possible.
                let value = if uses[input] == 0 { values[input].take() } else { values[input].clone() };
                inputs.push(value.ok_or_else(|| Error::Internal(format!("node {input} is not known")))?);
            }
            if let Some(readers) = self.fused_readers(id, &uses, &values, &inputs) {
                for (&reader, y) in readers.iter().zip(self.run_fused(id, readers, &inputs)?) {
                    values[reader] = Some(y);
                }
                uses[id] = 0;
                continue;
            }
            values[id] = Some(self.compute(id, inputs)?);
        }
        targets
            .iter()
            .map(|&t| values[t].clone().ok_or_else(|| Error::Internal(format!("node {t} is not known"))))
            .collect()
    }

    /// Returns this linear and later ones that can run with it in one kernel call, if there are any.
    fn together(&self, id: NodeId, needed: &[bool], values: &[Option<Tensor>]) -> Option<Vec<NodeId>> {
        let first = self.block.linears.get(&id)?;
        let goes = |other: &NodeId| {
            let linear = self.block.linears.get(other).filter(|_| *other > id);
            needed[*other]
                && values[*other].is_none()
                && linear.is_some_and(|linear| first.shares_input_with(linear))
        };
        let readers = self.block.graph.users(self.block.graph.nodes()[id].inputs[0]);
        let others: Vec<NodeId> = readers.map(|(reader, _)| reader).filter(goes).collect();
        (!others.is_empty()).then(|| [vec![id], others].concat())
    }

    /// Returns the linears that compute the node's value while packing it, if it is fused and this run needs its value
    /// nowhere else.
    fn fused_readers(
        &self,
        id: NodeId,
        uses: &[usize],
        values: &[Option<Tensor>],
        inputs: &[Tensor],
    ) -> Option<&'a [NodeId]> {
        let readers = self.block.fused.get(&id).filter(|_| !self.tap.watches())?;
        let alone = uses[id] == readers.len() && readers.iter().all(|&reader| values[reader].is_none());
        (alone && inputs.iter().all(|x| x.elem_count() > 0)).then_some(readers.as_slice())
    }

    fn run_fused(&mut self, id: NodeId, readers: &[NodeId], inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        // A tap that observes nothing may still stop the run.
        readers.iter().try_for_each(|&reader| self.watch_linear(reader, &inputs[0]))?;
        let linears: Vec<&Linear> = readers.iter().map(|&reader| self.block.linear(reader)).collect();
        fused::run(&self.block.graph.nodes()[id].op, self.block.norms.get(&id), inputs, &linears)
    }

    fn multiply_each(&mut self, ids: &[NodeId], x: &Tensor) -> Result<Vec<Tensor>> {
        ids.iter().try_for_each(|&id| self.watch_linear(id, x))?;
        if x.elem_count() == 0 {
            return ids.iter().map(|&id| self.no_rows(id)).collect();
        }
        let linears: Vec<&Linear> = ids.iter().map(|&id| self.block.linear(id)).collect();
        Linear::forward_each(&linears, x)
    }

    fn watch_linear(&mut self, id: NodeId, x: &Tensor) -> Result<()> {
        let graph = &self.block.graph;
        let selects = graph.rows_selected_by(graph.nodes()[id].inputs[0]);
        let tokens = match selects.and_then(|node| self.selected.get(&node)) {
            Some(tokens) => TokenRows::indices(tokens),
            None => tokens_of(x)?,
        };
        self.tap.linear_input(id, x, tokens)
    }

    fn no_rows(&self, id: NodeId) -> Result<Tensor> {
        Ok(Tensor::from_vec(Vec::<f32>::new(), (1, 0, self.block.graph.width(id)), &Device::Cpu)?)
    }

    fn compute(&mut self, id: NodeId, inputs: Vec<Tensor>) -> Result<Tensor> {
        match (&self.block.graph.nodes()[id].op, inputs.as_slice()) {
            (op, [x]) if op.is_norm() => self.block.norms[&id].apply(op, x),
            (Op::Linear { .. }, [x]) => {
                self.watch_linear(id, x)?;
                match x.elem_count() {
                    0 => self.no_rows(id),
                    _ => self.block.linear(id).forward(x),
                }
            }
            (Op::Route(routing), [logits]) => {
                experts::route(logits, *routing, self.block.parameters.get(&id).and_then(OpParameters::first))
                    .map_err(|e| match e {
                        Error::Logits { .. } => {
                            let router = self.block.graph.name(self.block.graph.nodes()[id].inputs[0]);
                            Error::Logits {
                                reason: format!("a logit of the router `{router}.weight` is NaN or infinite"),
                            }
                        }
                        other => other,
                    })
            }
            (Op::ExpertInput { expert, .. }, [x, weights, logits @ ..]) => {
                let tokens = match self.block.takes_all_rows(id) {
                    true => (0..tokens_of(x)?.count() as u32).collect(),
                    false => experts::tokens_of_expert(weights, *expert)?,
                };
                let mut rows = experts::rows(x, &tokens)?;
                if let [logits] = logits
                    && !tokens.is_empty()
                {
                    rows = experts::scale_rows(&rows, logits, &tokens, *expert)?;
                }
                self.selected.insert(id, tokens);
                Ok(rows)
            }
            (Op::Experts { .. }, [weights, x]) if let Some(experts) = self.grouped(id) => {
                experts.run(weights, x)
            }
            (Op::Experts { .. }, [weights, outputs @ ..]) => experts::sum(weights, outputs),
            (Op::Gated(_) | Op::ClampedGated { .. }, [gate, _]) if gate.elem_count() == 0 => self.no_rows(id),
            (Op::ClampedGated { alpha, limit }, [gate, up]) => gates::clamped(*alpha, *limit, gate, up),
            (Op::TokenGate, [x, gate]) => gates::by_token(x, gate),
            (Op::SelectKeys, [queries]) => Ok(queries.clone()),
            (Op::JoinHeads { heads, widths }, [a, b]) => join_heads([a, b], *heads, *widths),
            (Op::Rope(_), [x]) => {
                let table = &self.block.ropes[&id];
                match self.segments.is_whole() {
                    true => table.apply(x, self.start),
                    false => table.apply_packed(x, self.segments),
                }
            }
            (Op::Attention(shape), [q, k, v]) => {
                self.tap.attention_input(id, q, k, tokens_of(q)?)?;
                self.attend(id, *shape, [q, k, v])
            }
            (Op::Recurrent(op), inputs) => {
                let state = self.cache.as_deref_mut().map(|cache| cache.state(id, op.state_len()));
                recurrent::run(op, &self.block.parameters[&id], inputs, self.segments, state)
            }
            (Op::Normalize { width, eps }, [x]) => norm::normalize(x, *width, *eps),
            (Op::Multiply, [a, b]) => Ok((a * b)?),
            (Op::ScaleBy { width: 1, .. }, [x]) => Ok((x * f64::from(self.block.parameters[&id].number()?))?),
            (Op::ScaleBy { .. }, [x]) => {
                let stored = self.block.parameters[&id].first().unwrap_or_default();
                Ok(x.broadcast_mul(&Tensor::from_slice(stored, stored.len(), &Device::Cpu)?)?)
            }
            (Op::Concatenate, inputs) => Ok(Tensor::cat(inputs, D::Minus1)?),
            (Op::PositionScale(scale), [x]) => {
                let (batch, positions, _) = x.dims3()?;
                let factors: Vec<f32> = match self.segments.positions(positions) {
                    Some(places) => places.iter().map(|&place| scale.at(place as usize)).collect(),
                    None => {
                        (0..batch * positions).map(|row| scale.at(self.start + row % positions)).collect()
                    }
                };
                Ok(x.broadcast_mul(&Tensor::from_vec(factors, (batch, positions, 1), &Device::Cpu)?)?)
            }
            (Op::Gated(activation), [gate, up]) => gated(*activation, gate, up),
            (Op::Activation(activation), [x]) => activate(*activation, x),
            (Op::Slice { period, start, width }, [x]) => {
                let (batch, positions, features) = x.dims3()?;
                let periods = x.reshape((batch, positions, features / period, *period))?;
                let taken = periods.narrow(3, *start, *width)?.contiguous()?;
                Ok(taken.reshape((batch, positions, self.block.graph.width(id)))?)
            }
            (Op::Scale(factor), [x]) => Ok((x * f64::from(*factor))?),
            (Op::Add, [a, b]) => add(a, b),
            (op, inputs) => Err(Error::Internal(format!("{op:?} with {} inputs", inputs.len()))),
        }
    }

    fn attend(&mut self, id: NodeId, shape: AttentionShape, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
        let block = self.block;
        let sinks = block.parameters.get(&id).and_then(OpParameters::first);
        let rounded = |x: &Tensor, part: CachePart, width: usize| -> Result<Tensor> {
            let KvCaching::Simulated(scheme) = block.caching else { return Ok(x.clone()) };
            let mut values = x.flatten_all()?.to_vec1::<f32>()?;
            let scale = block.kv_scales.get(&(id, part)).copied().unwrap_or(1.0);
            super::kv::round_cached(scheme, &mut values, width, scale)?;
            Ok(Tensor::from_vec(values, x.shape(), x.device())?)
        };
        let float = |[k, v]: [&Tensor; 2]| {
            let keys = rounded(k, CachePart::Keys, shape.head_dim)?;
            Ok::<_, Error>((keys, rounded(v, CachePart::Values, shape.value_dim)?))
        };
        let Some(cache) = self.cache.as_deref_mut() else {
            return match block.caching {
                KvCaching::Kernels(kind) => paged::prefill(kind, shape, [q, k, v], self.segments),
                _ => {
                    let (k, v) = float([k, v])?;
                    causal_attention(q, &k, &v, shape, sinks, self.segments)
                }
            };
        };
        if let KvCaching::Kernels(kind) = block.caching {
            return paged::decode(kind, shape, cache, [q, k, v]);
        }
        let (batch, positions, k_width) = k.dims3()?;
        let v_width = v.dim(D::Minus1)?;
        if batch != 1 {
            return Err(Error::Internal(format!("got {batch} sequences for a cache of one")));
        }
        let (k, v) = float([k, v])?;
        let out = with_slices([q, &k, &v], |[q, k, v]| {
            let (k, v) = cache.append([k, v], [k_width, v_width])?;
            cached_attention([q, k, v], k_width, shape, sinks)
        })?;
        Ok(Tensor::from_vec(out, (batch, positions, self.block.graph.width(id)), &Device::Cpu)?)
    }
}

/// Concatenates the features of two values `[batch, positions, features]` within each head. A value with a single head
/// is repeated for all `heads`.
fn join_heads(values: [&Tensor; 2], heads: usize, widths: [usize; 2]) -> Result<Tensor> {
    let (batch, positions, _) = values[0].dims3()?;
    let split = |i: usize| -> Result<Tensor> {
        let (value, width) = (values[i], widths[i]);
        let own = value.dim(D::Minus1)? / width.max(1);
        let split = value.reshape((batch, positions, own, width))?;
        Ok(if own == heads { split } else { split.broadcast_as((batch, positions, heads, width))? })
    };
    let joined = Tensor::cat(&[split(0)?, split(1)?], 3)?;
    Ok(joined.reshape((batch, positions, heads * (widths[0] + widths[1])))?)
}

fn tokens_of(value: &Tensor) -> Result<TokenRows<'static>> {
    let features = value.dim(D::Minus1)?;
    Ok(TokenRows::range(0, value.elem_count().checked_div(features).unwrap_or(0)))
}
