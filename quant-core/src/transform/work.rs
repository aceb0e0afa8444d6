//! The workload of a transform, derived from shapes alone: the basis for estimates of memory and time.

use std::collections::BTreeMap;

use crate::blocks::BlockType;
use crate::calibrate::{Residence, Sampling};
use crate::model::{Architecture, BlockGraph, NodeId, Reach};
use crate::scheme::LinearScheme;
use crate::transform::{Transform, TransformSettings};

/// A block, and the batch that a transform uses.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Workload<'a> {
    /// The block.
    pub graph: &'a BlockGraph,
    /// The batch.
    pub sampling: Sampling,
    /// Settings of transforms.
    pub settings: &'a TransformSettings,
    /// The schemes of the block's linears that are quantized.
    pub schemes: BTreeMap<NodeId, LinearScheme>,
    /// The storage for samples of the batch.
    pub residence: Residence,
    /// Whether the experts of the block are processed one at a time.
    pub experts_apart: bool,
}

/// The operations of a search.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SearchWork {
    /// Floating-point operations of matrix products.
    pub operations: f64,
    /// Weights rounded, counted once per rounding.
    pub rounded: f64,
}

impl Workload<'_> {
    /// The number of tokens in the batch.
    pub fn tokens(&self) -> f64 {
        self.sampling.samples as f64 * self.sampling.length as f64
    }

    /// The smallest fraction of all tokens for which a value is computed when statistics are gathered, if tokens are
    /// distributed evenly over experts.
    pub fn share_of_tokens(&self, id: usize) -> f64 {
        self.sampling.experts.shares(self.graph.share_of_tokens(id))[0]
    }

    /// The operations for running the batch through the block.
    pub fn block_operations(&self) -> f64 {
        self.operations_of(|_| true)
    }

    /// The operations for running the batch through some nodes of the block.
    pub(crate) fn operations_of(&self, is_run: impl Fn(NodeId) -> bool) -> f64 {
        let length = self.sampling.length as f64;
        let nodes = self.graph.nodes().iter().enumerate().filter(|(id, _)| is_run(*id));
        nodes.map(|(id, n)| n.op.product_operations(self.tokens() * self.share_of_tokens(id), length)).sum()
    }

    /// The operations of nodes that mix tokens (attentions), for the whole batch.
    pub fn mixing_operations(&self) -> f64 {
        let attentions = self.graph.nodes().iter().filter(|node| node.op.reach() == Reach::Window);
        let length = self.sampling.length as f64;
        attentions.map(|node| node.op.product_operations(self.tokens(), length)).sum()
    }

    pub(crate) fn shape(&self, id: usize) -> [usize; 2] {
        self.graph.nodes()[id].op.linear_shape().unwrap_or_default()
    }

    pub(crate) fn weights(&self, id: usize) -> f64 {
        self.shape(id).map(|s| s as f64).iter().product()
    }
}

/// The request of a plan, as a step [checks](crate::transform::Transform::check) it.
#[non_exhaustive]
pub struct StepContext<'a> {
    /// The model.
    pub architecture: &'a Architecture,
    /// The name of the method.
    pub method: &'a str,
    /// The names of the steps before this one, in order.
    pub earlier: Vec<&'static str>,
    /// The other transforms of the method, in order.
    pub others: Vec<&'static dyn Transform>,
    /// Settings of transforms.
    pub settings: &'a TransformSettings,
    /// The schemes of all weights that are quantized to a scheme.
    pub schemes: Vec<LinearScheme>,
    /// The types of all tensors of a GGUF file that are rounded to blocks.
    pub block_types: Vec<&'static BlockType>,
    /// The linears in blocks whose inputs are rounded, each with its layer.
    pub rounded_inputs: std::collections::BTreeSet<(usize, NodeId)>,
    /// Whether the inputs of any weight in a block are rounded.
    pub rounds_in_blocks: bool,
    /// Whether static scales of cached keys and values are computed.
    pub calibrates_cache: bool,
}

impl<'a> StepContext<'a> {
    /// The context of a method's first step, when nothing is quantized.
    pub(crate) fn new(
        architecture: &'a Architecture,
        method: &'a str,
        settings: &'a TransformSettings,
    ) -> Self {
        Self {
            architecture,
            method,
            earlier: Vec::new(),
            others: Vec::new(),
            settings,
            schemes: Vec::new(),
            block_types: Vec::new(),
            rounded_inputs: Default::default(),
            rounds_in_blocks: false,
            calibrates_cache: false,
        }
    }
}
