//! GPTQ through a block: which linears are rounded when, and on what inputs.
//!
//! Linears that read the same value are a *stage*: they share a Hessian. With the inputs of the quantized model
//! stages come one after the other, and each sees the outputs of those before it as they will be when the model
//! runs; with the inputs of the float model all Hessians are gathered in one pass.

use std::collections::BTreeMap;

use quant_kernels_cpu::StaticScale;
use serde::{Deserialize, Serialize};

use crate::calibrate::{HiddenStates, StatisticsPass};
use crate::format::Container;
use crate::model::{Block, BlockGraph, NodeId, WeightBody};
use crate::quantize::gptq::{
    ActOrder, Factor, FactorError, GptqSettings, Hessian, LayerInputs, Solved, solve,
};
use crate::quantize::{QuantizedTensor, Rows};
use crate::transform::{Grid, Rewrite};
use crate::{CancelToken, Error, Result};

/// What GPTQ did to a linear.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GptqRecord {
    /// The mean over outputs and tokens of the squared error that is left in the linear's output, with what damping
    /// adds to it.
    pub loss: f64,
    /// The damping that was used: more than was asked for where the Hessian was not positive definite with that, or
    /// is so wide that it is factored in `f32`.
    pub damping: f64,
    /// Input channels that were always 0.
    pub dead_channels: usize,
    /// The order in which columns were rounded.
    pub act_order: ActOrder,
}

/// A linear that is quantized already when its tensor is due.
#[derive(Debug)]
pub(super) struct Rounded {
    pub(super) tensor: QuantizedTensor,
    pub(super) record: GptqRecord,
    /// Tokens that the Hessian is a sum over.
    pub(super) tokens: u64,
}

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

/// What came of a block.
pub(super) type BlockRounded = BTreeMap<NodeId, Rounded>;

impl GptqTask<'_> {
    /// Rounds the block's linears. `states` is what enters it, and afterwards what comes out of it: with
    /// [`LayerInputs::Quantized`] of the quantized block, and only where `advance` is set; with
    /// [`LayerInputs::Float`] of the float block.
    pub(super) fn run(mut self, states: &mut HiddenStates, advance: bool) -> Result<BlockRounded> {
        match self.settings.inputs {
            LayerInputs::Quantized => self.stage_by_stage(states, advance),
            LayerInputs::Float => self.all_at_once(states, true),
        }
    }

    /// The same from one pass of float states, which stay as they are.
    pub(super) fn run_beside(self, states: &mut HiddenStates) -> Result<BlockRounded> {
        self.all_at_once(states, false)
    }

    /// Gathers the Hessians of all stages in one pass, then solves them.
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
            let quantized = super::tensor::stored(quantized, self.container, scale_dtype, &tensor)?;
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
