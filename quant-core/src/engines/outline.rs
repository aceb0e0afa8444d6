//! A checkpoint as engines see it.

use std::collections::BTreeSet;

use crate::model::{AttentionShape, BlockGraph, Model, NodeId};
use crate::recipe::Plan;
use crate::scheme::LinearScheme;

/// The way in which a linear is split over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerKind {
    /// By heads of this width: queries, keys and values.
    Attention(usize),
    /// Not split: every rank has the whole matrix.
    Whole,
    /// By outputs.
    Column,
    /// By inputs.
    Row,
}

/// A linear of the model, as part of a [`FusedLayer`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FusedPart {
    /// The name of its module.
    pub module: String,
    /// The number of output features.
    pub n: usize,
    /// Its scheme; `None` if it is float.
    pub scheme: Option<LinearScheme>,
}

/// A matrix as an engine runs it: one linear, or several fused.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FusedLayer {
    /// How it is split.
    pub kind: LayerKind,
    /// The linears that it consists of: queries, keys, values; gate, up; or a single linear.
    pub parts: Vec<FusedPart>,
    /// The number of input features.
    pub k: usize,
    /// Whether it is a linear of an expert, which reads only the rows of the expert's tokens.
    pub of_expert: bool,
}

impl FusedLayer {
    /// Returns the scheme of all parts; `None` if they are float.
    ///
    /// # Errors
    /// If the schemes of two parts differ; returns the names of these parts.
    pub fn scheme(&self) -> Result<Option<LinearScheme>, (&str, &str)> {
        let Some(first) = self.parts.first() else { return Ok(None) };
        match self.parts.iter().find(|part| part.scheme != first.scheme) {
            None => Ok(first.scheme),
            Some(other) => Err((&first.module, &other.module)),
        }
    }
}

/// The properties of a checkpoint that decide whether an engine loads it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Outline {
    /// The format's name.
    pub container: &'static str,
    /// The model's family.
    pub family: &'static str,
    /// The class of the vision-language model that contains the decoder, if there is one.
    pub wrapper: Option<&'static str>,
    /// The distinct attention shapes of all blocks.
    pub attentions: Vec<AttentionShape>,
    /// The distinct schemes of the experts' linears, with `None` for float linears; empty for models without experts.
    pub experts: BTreeSet<Option<LinearScheme>>,
    /// The linears of all blocks, except routers and gates.
    pub layers: Vec<FusedLayer>,
    /// The head's scheme, if it is quantized.
    pub head: Option<LinearScheme>,
    /// The embedding's scheme, if it is quantized.
    pub embedding: Option<LinearScheme>,
    /// Whether the checkpoint has scales for an FP8 cache of keys and values.
    pub fp8_cache: bool,
    /// Whether router scores multiply the inputs of experts instead of their outputs.
    pub scales_expert_inputs: bool,
}

impl Outline {
    /// Describes the checkpoint that a plan will write.
    pub fn new(plan: &Plan, model: &Model) -> Self {
        let architecture = model.architecture();
        let stored = |(module, scheme)| (module, plan.container.stored_scheme(scheme));
        let quantized: std::collections::BTreeMap<&str, LinearScheme> =
            plan.entries.iter().filter_map(|e| e.quantized()).map(stored).collect();
        let (mut layers, mut experts) = (Vec::new(), BTreeSet::new());
        for layer in 0..architecture.layers {
            let graph = architecture.graph(layer);
            let of_experts = graph.linears().filter(|(id, ..)| graph.rows_selected_by(*id).is_some());
            experts
                .extend(of_experts.map(|(_, name, ..)| {
                    quantized.get(architecture.in_block(layer, name).as_str()).copied()
                }));
            // Routers are not split over ranks.
            let mut open: Vec<(NodeId, &str, [usize; 2])> = (graph.linears())
                .filter(|(id, ..)| graph.nodes()[*id].op.is_quantizable())
                .map(|(id, name, shape, _)| (id, name, shape))
                .collect();
            while let Some(&(id, name, [_, k])) = open.first() {
                let alone = [name];
                let fused = architecture.fused.iter().map(|(_, parts)| *parts);
                let parts = fused.into_iter().find(|parts| parts.contains(&name)).unwrap_or(&alone);
                let together: Vec<FusedPart> = (open.iter().filter(|(_, name, _)| parts.contains(name)))
                    .map(|(_, name, [n, _])| {
                        let module = architecture.in_block(layer, name);
                        let scheme = quantized.get(module.as_str()).copied();
                        FusedPart { module, n: *n, scheme }
                    })
                    .collect();
                open.retain(|(_, name, _)| !parts.contains(name));
                let of_expert = graph.rows_selected_by(id).is_some();
                layers.push(FusedLayer { kind: kind(graph, id), parts: together, k, of_expert });
            }
        }
        let scheme = |module: &str| quantized.get(module).copied();
        Self {
            container: plan.container.name(),
            family: architecture.family,
            wrapper: architecture.wrapper.as_ref().map(|wrapper| wrapper.class),
            attentions: architecture.attentions(),
            experts,
            layers,
            head: scheme(&architecture.head),
            embedding: scheme(&architecture.embedding_module()),
            fp8_cache: plan.module_schemes().fp8_cache,
            scales_expert_inputs: (0..architecture.layers).any(|layer| {
                let nodes = architecture.graph(layer).nodes();
                nodes.iter().any(|node| node.op.routing().is_some_and(|routing| routing.on_inputs))
            }),
        }
    }

    /// Returns the distinct schemes of the linears in the blocks.
    pub fn schemes(&self) -> Vec<LinearScheme> {
        let parts = self.layers.iter().flat_map(|layer| &layer.parts);
        let schemes: BTreeSet<_> = parts.filter_map(|part| part.scheme).collect();
        schemes.into_iter().collect()
    }
}

/// Engines split linears that read the residual stream by outputs and linears that write to it by inputs, so that ranks
/// exchange nothing between the two.
fn kind(graph: &BlockGraph, id: NodeId) -> LayerKind {
    if graph.makes_latents(id) {
        return LayerKind::Whole;
    }
    if let Some(shape) = graph.attentions().next().filter(|_| graph.feeds_attention(id)) {
        return LayerKind::Attention(graph.head_width(id, shape));
    }
    // An expert also reads the stream, but only the rows of its own tokens.
    let input = graph.all_rows_of(graph.nodes()[id].inputs[0]);
    match graph.nodes()[input].op.gives_stream() {
        true => LayerKind::Column,
        false => LayerKind::Row,
    }
}
