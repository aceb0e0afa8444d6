//! A weight and its scheme, before its output tensors are known.

use std::collections::BTreeSet;

use super::{Action, PlanEntry};
use crate::checkpoint::TensorSpec;
use crate::format::Container;
use crate::model::{Architecture, Model, NodeId};
use crate::scheme::SchemeRequest;
use crate::transform::{Transform, TransformSettings};
use crate::{Error, Result};
use quant_formats::Indivisible;

/// The norms and linears of each layer whose stored parameters a method may rewrite.
#[derive(Debug, Default)]
pub(in crate::recipe) struct FoldedNodes {
    layers: Vec<BTreeSet<NodeId>>,
}

impl FoldedNodes {
    pub(super) fn new(
        architecture: &Architecture,
        transforms: &[&dyn Transform],
        settings: &TransformSettings,
    ) -> Self {
        let of = |layer: usize| {
            let graph = architecture.graph(layer);
            transforms.iter().flat_map(|t| t.folded_nodes(graph, settings)).collect()
        };
        Self { layers: (0..architecture.layers).map(of).collect() }
    }

    pub(super) fn contains(&self, layer: usize, node: NodeId) -> bool {
        self.layers.get(layer).is_some_and(|nodes| nodes.contains(&node))
    }
}

pub(super) struct Draft {
    pub(super) layer: Option<usize>,
    pub(super) node: Option<NodeId>,
    pub(super) module: String,
    pub(super) shape: [usize; 2],
    /// The tensor in the input.
    pub(super) stored: String,
    /// The name if it stays float.
    pub(super) name: String,
    pub(super) scheme: Option<SchemeRequest>,
    /// The action for the weight if it is not quantized.
    pub(super) float: Action,
}

pub(super) enum Drafted {
    Entry(Box<PlanEntry>),
    Indivisible(Indivisible),
    /// The format cannot store the weight: its error.
    Unfit(Error),
}

/// Removes the advice to leave linears float from a format's error, because it applies to no linear alone.
pub(super) fn without_ignoring(error: Error) -> Error {
    match error {
        Error::Usage { message, remedy } => {
            let shorter = remedy.marked().replace(", leave it float with ‹ignore›, or ", ", or ");
            Error::usage(message, shorter.replace("leave it float with ‹ignore›, or ", ""))
        }
        other => other,
    }
}

impl Draft {
    pub(super) fn entry(self, model: &Model, container: &dyn Container) -> Result<Drafted> {
        let Self { layer, node, module, shape, stored, name: tensor, scheme, float } = self;
        let info = model.source().require(&stored)?.clone();
        let Some(request) = scheme else {
            let outputs = vec![TensorSpec { name: tensor.clone(), info: info.clone() }];
            return Ok(Drafted::Entry(Box::new(PlanEntry {
                tensor,
                stored,
                layer,
                info,
                modified: false,
                by_columns: false,
                action: float,
                outputs,
                cache: Vec::new(),
            })));
        };
        let scheme = request.resolve(|bits| container.symmetric_by_default(bits));
        let (columns, group_size) = (shape[1], scheme.needed_divisor(shape[1]));
        if !columns.is_multiple_of(group_size) {
            return Ok(Drafted::Indivisible(Indivisible { tensor, columns, group_size }));
        }
        let scale_dtype = container.scale_dtype(scheme, info.dtype);
        let outputs = match container.layout(&module, shape, container.stored_scheme(scheme), scale_dtype) {
            Ok(outputs) => outputs,
            Err(error @ Error::Usage { .. }) => return Ok(Drafted::Unfit(error)),
            Err(error) => return Err(error),
        };
        let action = Action::Quantize { node, module, scheme, scale_dtype };
        let cache = Vec::new();
        let by_columns = false;
        let entry =
            PlanEntry { tensor, stored, layer, info, modified: false, by_columns, action, outputs, cache };
        Ok(Drafted::Entry(Box::new(entry)))
    }
}
