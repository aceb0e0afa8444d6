//! The search for exponents: the error of the block's output on a piece of the batch, when its linears and their inputs
//! are quantized.
//!
//! If experts are processed one at a time, all exponents of a producer are tried together, so that each expert is read
//! once. The outputs of the experts are kept while the exponents of single experts are searched. All values are those of
//! a search with the whole block in memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::{Migration, SmoothSearch, TriedScales, folded};
use crate::calibrate::{ChannelRanges, HiddenStates, InputRows};
use crate::model::{
    Block, CancelTap, ExpertOrder, Linear, NodeId, TokenRows, WeightBody, add_expert, with_values,
};
use crate::quantize::{ScaleContext, SourceRows, quantize_within};
use crate::transform::awq_by_expert::part_of;
use crate::transform::{BlockTask, Rewrite};
use crate::{Error, Result};

type Alphas = Vec<Option<f32>>;

pub(super) struct BlockSearch<'a> {
    task: &'a BlockTask<'a>,
    hidden: &'a HiddenStates,
    migrations: &'a [Migration],
    /// Given if experts are processed one at a time.
    order: Option<ExpertOrder>,
    /// The first token of the piece, the input of the block, and the output of the float block.
    first: usize,
    x: Tensor,
    y: Vec<f32>,
    /// Quantized linears, each with the exponents for which it was quantized.
    rounded: BTreeMap<NodeId, (Alphas, Linear)>,
    /// The experts for the exponents that have been chosen, while exponents inside experts are searched.
    chosen: Option<Chosen>,
}

/// The values of a block with certain exponents.
struct Chosen {
    split: Split,
    /// The rows of each expert.
    outputs: Vec<Option<Tensor>>,
}

/// The value at which a block is split, and the router's weights.
#[derive(Clone)]
struct Split {
    from: Tensor,
    weights: Tensor,
}

/// A version of the block: exponents, and what they change.
struct Version {
    alphas: Alphas,
    rewrite: Rewrite,
    ranges: BTreeMap<NodeId, ChannelRanges>,
}

impl<'a> BlockSearch<'a> {
    pub(super) fn new(
        task: &'a BlockTask<'a>,
        hidden: &'a HiddenStates,
        migrations: &'a [Migration],
    ) -> Result<Self> {
        let (first, x) = hidden
            .chunks()
            .find(|piece| !matches!(piece, Ok((first, x)) if counted(hidden, *first, x) == 0))
            .ok_or_else(|| Error::Internal("a search on a batch without counted tokens".into()))??;
        let (order, y, rounded) = (task.order(), Vec::new(), BTreeMap::new());
        let mut search = Self { task, hidden, migrations, order, first, x, y, rounded, chosen: None };
        search.y = match search.order.clone() {
            None => search.output(task.block)?,
            Some(order) => {
                let split = search.split(task.block, &order)?;
                let mut sum = search.no_sum(&order)?;
                for (expert, nodes) in order.experts.iter().enumerate() {
                    let rows = search.expert(task.block, &order, &split, *nodes)?;
                    search.add(&mut sum, (&order, expert), &split, rows.as_ref())?;
                    task.block.release_expert(nodes.0);
                }
                search.after(task.block, &order, &split, sum)?
            }
        };
        Ok(search)
    }

    /// Tries the exponents for a group; those of other groups do not change.
    pub(super) fn tried(
        &mut self,
        alphas: &[Option<f32>],
        group: usize,
        exponents: impl Iterator<Item = f32>,
    ) -> Result<SmoothSearch> {
        let tokens = counted(self.hidden, self.first, &self.x) as u64;
        let ratios: Alphas = std::iter::once(None).chain(exponents.map(Some)).collect();
        let with = |ratio: Option<f32>| {
            let mut alphas = alphas.to_vec();
            alphas[group] = ratio;
            alphas
        };
        let tried = |errors: Vec<f64>| {
            let tried = ratios.iter().zip(errors).map(|(&ratio, error)| TriedScales { ratio, error, tokens });
            SmoothSearch { tried: tried.collect() }
        };
        let Some(order) = self.order.clone() else {
            let mut errors = Vec::with_capacity(ratios.len());
            for &ratio in &ratios {
                let block = self.block(&self.version(with(ratio))?, &|_| true)?;
                errors.push(self.error(&self.output(&block)?));
            }
            return Ok(tried(errors));
        };
        let versions = ratios.iter().map(|&ratio| self.version(with(ratio))).collect::<Result<Vec<_>>>()?;
        let own = part_of(self.task.block.graph(), &self.migrations[group].group);
        let Some(expert) = order.experts.iter().position(|(selects, _)| Some(*selects) == own) else {
            self.chosen = None;
            return Ok(tried(self.errors(&versions, &order)?));
        };
        let chosen = match self.chosen.take() {
            Some(chosen) => chosen,
            None => self.chosen(&self.version(alphas.to_vec())?, &order)?,
        };
        let (errors, outputs) = self.errors_of_expert(&versions, &order, &chosen, expert)?;
        let search = tried(errors);
        let best = ratios.iter().position(|ratio| *ratio == search.best());
        let mut all = chosen.outputs;
        all[expert] = best.and_then(|best| outputs.into_iter().nth(best)).flatten();
        self.chosen = Some(Chosen { split: chosen.split, outputs: all });
        Ok(search)
    }

    /// Forgets what depends on exponents that were not chosen by [`tried`](Self::tried).
    pub(super) fn skip(&mut self) {
        self.chosen = None;
    }

    fn version(&self, alphas: Alphas) -> Result<Version> {
        let rewrite = folded(self.task, self.migrations, &alphas)?;
        let ranges = rewrite.ranges(self.task.block.graph(), self.task.ranges.clone());
        Ok(Version { alphas, rewrite, ranges })
    }

    /// A version of the block in which those linears are rewritten and quantized for which `which` returns true. The
    /// others must not be used.
    fn block(&mut self, version: &Version, which: &dyn Fn(NodeId) -> bool) -> Result<Block> {
        let (task, Version { alphas, rewrite, ranges }) = (self.task, version);
        let mut block = rewrite.applied(task.block, |node| which(node) && !task.grids.contains_key(&node))?;
        for (&node, &grid) in task.grids.iter().filter(|(node, _)| which(**node)) {
            task.cancel.check()?;
            // The weights depend on the exponents of the groups that contain the linear.
            let touches = |m: &Migration| m.group.producer == node || m.group.consumers.contains(&node);
            let key: Alphas =
                self.migrations.iter().zip(alphas).filter(|(m, _)| touches(m)).map(|(_, a)| *a).collect();
            if let Some((known, linear)) = self.rounded.get(&node)
                && *known == key
            {
                block.replace_linear(node, linear.clone());
                continue;
            }
            let linear = task.block.linear(node);
            let shape = linear.weight().shape();
            let values = rewrite.weight(node, &linear.weight().read()?)?;
            let tensor = format!("{}.weight", task.module(node));
            // Scales are not shared with other linears here: sharing changes little, and all candidates are treated
            // alike.
            let context = ScaleContext { search: task.settings.scale_search, amax: None };
            let target = (grid.scheme, grid.scale_dtype);
            let (mut quantized, _) =
                quantize_within(SourceRows::Floats(&values), shape, target, None, context)
                    .map_err(|e| e.within(&tensor, None))?;
            quantized.input = task.input_grid(node, ranges)?;
            let bias = rewrite.rewritten_bias(node, linear)?;
            let linear = Linear::new(Arc::new(WeightBody::Quantized(quantized)), bias);
            self.rounded.insert(node, (key, linear.clone()));
            block.replace_linear(node, linear);
        }
        Ok(block)
    }

    /// The block with only the linears of an expert, or only those outside of all experts.
    fn part(&mut self, version: &Version, part: Option<NodeId>) -> Result<Block> {
        let graph = self.task.block.graph().clone();
        self.rounded.retain(|node, _| [None, part].contains(&graph.expert_of(*node)));
        self.block(version, &|node| graph.expert_of(node) == part)
    }

    fn error(&self, output: &[f32]) -> f64 {
        let squares = output.iter().zip(&self.y).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
        let error = squares / self.y.len().max(1) as f64;
        // An output that is not finite is worse than any finite error.
        if error.is_finite() { error } else { f64::INFINITY }
    }

    /// The output of a block for the counted tokens.
    fn output(&self, block: &Block) -> Result<Vec<f32>> {
        let segments = self.hidden.segments(self.first, &self.x);
        let y = block.routed().forward_packed(&self.x, segments, &mut CancelTap(self.task.cancel))?;
        self.counted_values(&y)
    }

    fn counted_values(&self, y: &Tensor) -> Result<Vec<f32>> {
        let (windows, length, width) = y.dims3()?;
        let tokens = TokenRows::range(self.first, windows * length);
        with_values(y, |y| {
            Ok(InputRows::new(y, width, tokens, self.hidden.layout())?.counted_values().to_vec())
        })
    }

    /// The errors of several versions, for each of which every expert runs.
    fn errors(&mut self, versions: &[Version], order: &ExpertOrder) -> Result<Vec<f64>> {
        let mut splits = Vec::with_capacity(versions.len());
        for version in versions {
            let block = self.part(version, None)?;
            splits.push(self.split(&block, order)?);
        }
        let mut sums = versions.iter().map(|_| self.no_sum(order)).collect::<Result<Vec<_>>>()?;
        for (expert, nodes) in order.experts.iter().enumerate() {
            for ((version, split), sum) in versions.iter().zip(&splits).zip(&mut sums) {
                let block = self.part(version, Some(nodes.0))?;
                let rows = self.expert(&block, order, split, *nodes)?;
                self.add(sum, (order, expert), split, rows.as_ref())?;
            }
            self.task.block.release_expert(nodes.0);
        }
        let mut errors = Vec::with_capacity(versions.len());
        for ((version, split), sum) in versions.iter().zip(&splits).zip(sums) {
            let block = self.part(version, None)?;
            let output = self.after(&block, order, split, sum)?;
            errors.push(self.error(&output));
        }
        Ok(errors)
    }

    /// Runs all experts of a version, and keeps their outputs.
    fn chosen(&mut self, version: &Version, order: &ExpertOrder) -> Result<Chosen> {
        let block = self.part(version, None)?;
        let split = self.split(&block, order)?;
        let mut outputs = Vec::with_capacity(order.experts.len());
        for nodes in &order.experts {
            let block = self.part(version, Some(nodes.0))?;
            outputs.push(self.expert(&block, order, &split, *nodes)?);
            self.task.block.release_expert(nodes.0);
        }
        Ok(Chosen { split, outputs })
    }

    /// The errors of versions that differ in one expert only, and the outputs of that expert.
    fn errors_of_expert(
        &mut self,
        versions: &[Version],
        order: &ExpertOrder,
        chosen: &Chosen,
        expert: usize,
    ) -> Result<(Vec<f64>, Vec<Option<Tensor>>)> {
        let (mut errors, mut outputs) = (Vec::new(), Vec::new());
        for version in versions {
            let block = self.part(version, Some(order.experts[expert].0))?;
            let own = self.expert(&block, order, &chosen.split, order.experts[expert])?;
            let mut sum = self.no_sum(order)?;
            for (at, rows) in chosen.outputs.iter().enumerate() {
                let rows = if at == expert { &own } else { rows };
                self.add(&mut sum, (order, at), &chosen.split, rows.as_ref())?;
            }
            let block = self.part(version, None)?;
            let output = self.after(&block, order, &chosen.split, sum)?;
            errors.push(self.error(&output));
            outputs.push(own);
        }
        self.task.block.release_expert(order.experts[expert].0);
        Ok((errors, outputs))
    }

    fn split(&self, block: &Block, order: &ExpertOrder) -> Result<Split> {
        let input = self.task.block.graph().input();
        let from = match order.from == input {
            true => self.x.clone(),
            false => self.evaluate(block, &[(input, self.x.clone())], order.from)?,
        };
        let weights = self.evaluate(block, &[(order.from, from.clone())], order.weights)?;
        Ok(Split { from, weights })
    }

    /// The output of an expert for its tokens; `None` if it has none.
    fn expert(
        &self,
        block: &Block,
        order: &ExpertOrder,
        Split { from, weights }: &Split,
        (selects, output): (NodeId, NodeId),
    ) -> Result<Option<Tensor>> {
        let known = [(order.from, from.clone()), (order.weights, weights.clone())];
        let rows = self.evaluate(&block.routed(), &known, selects)?;
        if rows.elem_count() == 0 {
            return Ok(None);
        }
        let tap = &mut CancelTap(self.task.cancel);
        Ok(Some(block.evaluate(&[(selects, rows)], &[output], tap)?.swap_remove(0)))
    }

    fn no_sum(&self, order: &ExpertOrder) -> Result<Vec<f32>> {
        let (windows, length, _) = self.x.dims3()?;
        Ok(vec![0.0; windows * length * self.task.block.graph().width(order.sum)])
    }

    fn add(
        &self,
        sum: &mut [f32],
        (order, expert): (&ExpertOrder, usize),
        split: &Split,
        rows: Option<&Tensor>,
    ) -> Result<()> {
        let Some(rows) = rows else { return Ok(()) };
        let (width, experts) = (self.task.block.graph().width(order.sum), order.experts.len());
        with_values(&split.weights, |weights| {
            let weight = |token: usize| weights[token * experts + expert];
            with_values(rows, |rows| add_expert(sum, width, weight, rows))
        })
    }

    /// The output of the block for the counted tokens, given the sum of the experts.
    fn after(&self, block: &Block, order: &ExpertOrder, split: &Split, sum: Vec<f32>) -> Result<Vec<f32>> {
        let graph = self.task.block.graph();
        let (windows, length, _) = self.x.dims3()?;
        let sum = Tensor::from_vec(sum, (windows, length, graph.width(order.sum)), &Device::Cpu)?;
        let known = [(order.from, split.from.clone()), (order.sum, sum)];
        let y = self.evaluate(block, &known, graph.output())?;
        self.counted_values(&y)
    }

    fn evaluate(&self, block: &Block, known: &[(NodeId, Tensor)], target: NodeId) -> Result<Tensor> {
        let segments = self.hidden.segments(self.first, &self.x);
        let tap = &mut CancelTap(self.task.cancel);
        Ok(block.evaluate_packed(known, &[target], segments, tap)?.swap_remove(0))
    }
}

fn counted(hidden: &HiddenStates, first: usize, x: &Tensor) -> usize {
    let [_, length] = hidden.shape();
    hidden.layout().count(TokenRows::range(first, x.dim(0).unwrap_or(0) * length))
}
