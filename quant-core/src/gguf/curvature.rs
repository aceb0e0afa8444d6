//! The Hessian factors of linears' inputs, which GPTQ needs, gathered block by block while tensors are written.
//!
//! Hidden states are those of the float model, or of the model rewritten by earlier steps, which is equal to it:
//! quantizing earlier blocks does not affect later ones.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::plan::PlannedTensor;
use super::saved;
use crate::calibrate::{HiddenStates, StatisticsPass};
use crate::model::{Block, Model, NodeId, RopeTables};
use crate::quantize::gptq::{Factor, FactorError, GptqSettings, Hessian};
use crate::{CancelToken, Error, Result, TensorSink};

/// Computes the factors of one block at a time.
pub struct Curvature<'a> {
    model: &'a Model,
    cancel: &'a CancelToken,
    damping: f64,
    ropes: RopeTables,
    states: HiddenStates,
    /// Whether `model` has the weights of the checkpoint.
    is_original: bool,
    next: usize,
    /// The factors of the block before `next`, by the names of weights in the checkpoint.
    factors: BTreeMap<String, Arc<Factor>>,
}

impl<'a> Curvature<'a> {
    /// Prepares the computation of factors. `states` are the embeddings of the batch. `is_original` says whether `model`
    /// has the weights of the checkpoint; those of a rewritten model have been compared with the interrupted run's.
    ///
    /// # Errors
    /// [`Error::Usage`] when settings are invalid.
    pub fn new(
        model: &'a Model,
        states: HiddenStates,
        is_original: bool,
        settings: GptqSettings,
        cancel: &'a CancelToken,
    ) -> Result<Self> {
        settings.check()?;
        let ropes = model.rope(states.shape()[1])?;
        let damping = settings.damping;
        Ok(Self { model, cancel, damping, ropes, states, is_original, next: 0, factors: BTreeMap::new() })
    }

    /// Returns the factors for the matrices of a tensor of the file: one, or one per expert. Tensors that GPTQ does not
    /// quantize, and experts that no token reached, have none. Blocks must come in ascending order; those that are left
    /// out cost only a pass of the batch.
    pub(super) fn of(
        &mut self,
        tensor: &PlannedTensor,
        sink: &mut dyn TensorSink,
    ) -> Result<Vec<Option<Arc<Factor>>>> {
        let Some(layer) = tensor.layer().filter(|_| !tensor.kind.is_float()) else { return Ok(Vec::new()) };
        while self.next < layer {
            let block = self.block(sink)?;
            self.states.advance(&block, self.cancel)?;
            self.next += 1;
        }
        if self.next == layer {
            self.advance(sink)?;
        }
        // The factor is for the checkpoint's column order. If the file has a different order, only the scale search
        // uses statistics.
        let sources = tensor.sources().into_iter().filter(|_| tensor.keeps_columns());
        Ok(sources.map(|name| self.factors.get(name).cloned()).collect())
    }

    /// Reads the next block.
    fn block(&mut self, sink: &mut dyn TensorSink) -> Result<Block> {
        self.factors.clear();
        let block = self.model.block(self.next, &self.ropes)?;
        if self.is_original {
            saved::check_block(sink, self.model, self.next, &block)?;
        }
        Ok(block)
    }

    fn advance(&mut self, sink: &mut dyn TensorSink) -> Result<()> {
        let a = self.model.architecture();
        let layer = self.next;
        let block = self.block(sink)?;
        let graph = block.graph().clone();
        let values: BTreeSet<(NodeId, usize)> =
            graph.linears().map(|(id, _, [_, k], _)| (graph.nodes()[id].inputs[0], k)).collect();
        let mut hessians: BTreeMap<NodeId, Hessian> =
            values.into_iter().map(|(id, k)| Ok((id, Hessian::new(k)?))).collect::<Result<_>>()?;
        let mut pass = StatisticsPass::new(&block, self.states.layout(), self.cancel);
        for (value, hessian) in &mut hessians {
            pass.gather(*value, hessian)?;
        }
        pass.run(&mut self.states, layer + 1 < a.layers)?;
        let mut known: BTreeMap<NodeId, Arc<Factor>> = BTreeMap::new();
        for (id, name, ..) in graph.linears() {
            self.cancel.check()?;
            let value = graph.nodes()[id].inputs[0];
            let tensor = format!("{}.weight", a.in_block(layer, name));
            if let Some(mut hessian) = hessians.remove(&value).filter(|hessian| hessian.tokens() > 0) {
                hessian.finish();
                known.insert(value, Arc::new(factor(&hessian, self.damping, &tensor)?));
            }
            if let Some(factor) = known.get(&value) {
                self.factors.insert(tensor, factor.clone());
            }
        }
        self.next += 1;
        Ok(())
    }
}

fn factor(hessian: &Hessian, damping: f64, tensor: &str) -> Result<Factor> {
    let tensor = tensor.to_owned();
    Factor::new(hessian, (0..hessian.channels()).collect(), damping).map_err(|e| match e {
        FactorError::NonFinite { channel } => {
            Error::Calibration { tensor, what: format!("the sum of squares of input channel {channel}") }
        }
        FactorError::Indefinite { .. } => Error::Numeric { tensor, reason: e.to_string() },
        FactorError::Memory { bytes } => {
            Error::Memory { what: format!("the Hessian of `{tensor}`"), bytes: Some(bytes) }
        }
    })
}
