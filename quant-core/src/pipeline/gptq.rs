//! GPTQ through a block: which linears are rounded when, and on what inputs.
//!
//! Linears that read the same value are a *stage*: they share a Hessian. With the inputs of the quantized model
//! stages come one after the other, and each sees the outputs of those before it as they will be when the model
//! runs; with the inputs of the float model all Hessians are gathered in one pass.

use std::collections::BTreeMap;

use quant_kernels_cpu::StaticScale;

use super::decision::{BlockRounded, GptqRecord, Rounded, stored};
use crate::calibrate::{HiddenStates, StatisticsPass};
use crate::format::Container;
use crate::model::{Block, BlockGraph, NodeId, WeightBody};
use crate::quantize::Rows;
use crate::quantize::gptq::{Factor, FactorError, GptqSettings, Hessian, Solved, solve};
use crate::recipe::States;
use crate::transform::{Grid, Rewrite};
use crate::{CancelToken, Error, Result};

/// A block that is to be rounded.
pub(super) struct GptqTask<'a> {
    /// Prefix of the block's modules, for messages.
    pub(super) prefix: &'a str,
    /// The block with the rewrite applied to it.
    pub(super) block: Block,
    /// The grids of the linears that will be quantized.
    pub(super) grids: &'a BTreeMap<NodeId, Grid>,
    /// What a transform decided; its clip bounds limit the ranges of grids.
    pub(super) rewrite: &'a Rewrite,
    /// The grids of inputs that are the same for all tokens.
    pub(super) inputs: &'a BTreeMap<NodeId, StaticScale>,
    pub(super) settings: GptqSettings,
    /// Where the quantized linears are going to stand.
    pub(super) container: &'static dyn Container,
    pub(super) cancel: &'a CancelToken,
}

impl GptqTask<'_> {
    /// Rounds the block's linears on the states before it. Those of the quantized model are moved on to what comes out
    /// of the rounded block, where `advance` is set; those of the float model to what comes out of the float block; a
    /// copy of the latter stays as it is.
    pub(super) fn run(
        mut self,
        which: States,
        states: &mut HiddenStates,
        advance: bool,
    ) -> Result<BlockRounded> {
        match which {
            States::Quantized => self.stage_by_stage(states, advance),
            States::Float => self.all_at_once(states, true),
            States::Copy => self.all_at_once(states, false),
        }
    }

    /// Gathers the Hessians of all stages in one pass of the block as it is, then solves them.
    fn all_at_once(&self, states: &mut HiddenStates, advance: bool) -> Result<BlockRounded> {
        let stages = stages(self.block.graph(), self.grids);
        let mut hessians: Vec<_> = stages.values().map(|linears| self.hessian(linears)).collect();
        let mut pass = StatisticsPass::new(&self.block, states.layout(), self.cancel);
        for (value, hessian) in stages.keys().zip(&mut hessians) {
            pass.gather(*value, hessian)?;
        }
        pass.run(states, advance)?;
        let mut rounded = BlockRounded::new();
        for (linears, mut hessian) in stages.values().zip(hessians) {
            hessian.finish();
            self.solve_stage(&hessian, linears, &mut rounded)?;
        }
        Ok(rounded)
    }

    /// The Hessian of a stage, nothing seen yet.
    fn hessian(&self, linears: &[NodeId]) -> Hessian {
        Hessian::new(self.block.linear(linears[0]).weight().shape()[1])
    }

    fn stage_by_stage(&mut self, states: &mut HiddenStates, advance: bool) -> Result<BlockRounded> {
        let graph = self.block.graph().clone();
        let mut rounded = BlockRounded::new();
        // The states are the values of this node.
        let mut from = graph.input();
        for (value, linears) in stages(&graph, self.grids) {
            if let Some(cut) = (from + 1..=value).rev().find(|&c| graph.is_cut(c)) {
                states.advance_between(&self.block, [from, cut], self.cancel)?;
                from = cut;
            }
            let mut hessian = self.hessian(&linears);
            states.gather_between(&self.block, [from, value], self.cancel, &mut hessian)?;
            hessian.finish();
            self.solve_stage(&hessian, &linears, &mut rounded)?;
            for &node in &linears {
                let linear = self.block.linear(node).clone();
                let tensor = rounded[&node].tensor.clone();
                self.block.replace_linear(node, linear.with_weight(WeightBody::Quantized(tensor)));
            }
        }
        if advance {
            states.advance_between(&self.block, [from, graph.output()], self.cancel)?;
        }
        Ok(rounded)
    }

    /// Factors the Hessian of what `tensor` reads.
    fn factor(&self, hessian: &Hessian, columns: Vec<usize>, tensor: &str) -> Result<Factor> {
        let factor = Factor::new(hessian, columns, self.settings.damping).map_err(|e| match e {
            FactorError::NonFinite { channel } => Error::Calibration {
                tensor: tensor.to_owned(),
                what: format!("channel {channel} of its input"),
            },
            FactorError::Indefinite { .. } => {
                Error::Numeric { tensor: tensor.to_owned(), reason: e.to_string() }
            }
        })?;
        if factor.escalations() > 0 {
            tracing::warn!(
                "`{tensor}`: its Hessian is not positive definite; damping {:e} of its mean in place of {:e}",
                factor.damping(),
                self.settings.damping
            );
        }
        Ok(factor)
    }

    /// Rounds linears that read the same value.
    fn solve_stage(&self, hessian: &Hessian, linears: &[NodeId], rounded: &mut BlockRounded) -> Result<()> {
        let diagonal = hessian.diagonal();
        let mut latest: Option<Factor> = None;
        for &node in linears {
            self.cancel.check()?;
            let tensor = format!("{}{}.weight", self.prefix, self.block.graph().name(node));
            let Grid { scheme, scale_dtype } = self.grids[&node];
            let weight = self.block.linear(node).weight();
            let shape = weight.shape();
            let columns = self.settings.act_order.columns(&diagonal, scheme.granularity.group_size(shape[1]));
            let factor = match latest.take().filter(|f| f.columns() == columns) {
                Some(factor) => factor,
                None => self.factor(hessian, columns, &tensor)?,
            };
            let rows = match &**weight {
                WeightBody::F32 { values, .. } => Rows::Floats(values),
                WeightBody::Raw { dtype, bytes, .. } => Rows::Bytes(bytes, *dtype),
                _ => return Err(Error::Internal(format!("`{tensor}` is quantized already"))),
            };
            let clip = self.rewrite.clips.get(&node).map(Vec::as_slice);
            let Solved { tensor: mut quantized, loss } =
                solve(rows, shape, scheme, scale_dtype, clip, &factor, self.settings)
                    .map_err(|e| e.within(&tensor, None))?;
            quantized.input = self.inputs.get(&node).copied();
            let quantized = stored(quantized, self.container, scale_dtype, &tensor)?;
            let record = GptqRecord {
                loss,
                damping: factor.damping(),
                dead_channels: factor.dead(),
                act_order: self.settings.act_order,
            };
            tracing::debug!(tensor, loss, damping = record.damping, dead = record.dead_channels, "rounded");
            rounded.insert(node, Rounded { tensor: quantized, record, tokens: hessian.tokens() });
            latest = Some(factor);
        }
        Ok(())
    }
}

/// The linears that are quantized, by the value that they read, in order of evaluation.
fn stages(graph: &BlockGraph, grids: &BTreeMap<NodeId, Grid>) -> BTreeMap<NodeId, Vec<NodeId>> {
    let mut stages: BTreeMap<NodeId, Vec<NodeId>> = BTreeMap::new();
    for &node in grids.keys() {
        stages.entry(graph.nodes()[node].inputs[0]).or_default().push(node);
    }
    stages
}
