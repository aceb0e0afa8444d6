//! A checkpoint as engines see it.

use std::collections::BTreeSet;

use crate::model::{AttentionShape, BlockGraph, Model, NodeId};
use crate::recipe::Plan;
use crate::scheme::LinearScheme;

/// How a linear is split over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerKind {
    /// Queries, keys and values: by heads of this width.
    Attention(usize),
    /// Not at all: every rank has the whole of it.
    Whole,
    /// By outputs.
    Column,
    /// By inputs.
    Row,
}

/// A linear of the model, as a part of what an engine runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Its module.
    pub module: String,
    /// Output features.
    pub n: usize,
    /// Its scheme; `None` where it is float.
    pub scheme: Option<LinearScheme>,
}

/// One matrix of an engine: a linear, or several that it runs as one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FusedLayer {
    /// How it is split.
    pub kind: LayerKind,
    /// Its parts: queries, keys, values; gate, up; or a single linear.
    pub parts: Vec<Part>,
    /// Input features.
    pub k: usize,
}

impl FusedLayer {
    /// The scheme that all parts have in common.
    ///
    /// # Errors
    /// The names of two parts that differ.
    pub fn scheme(&self) -> Result<Option<LinearScheme>, (&str, &str)> {
        let Some(first) = self.parts.first() else { return Ok(None) };
        match self.parts.iter().find(|part| part.scheme != first.scheme) {
            None => Ok(first.scheme),
            Some(other) => Err((&first.module, &other.module)),
        }
    }
}

/// What engines must know of a checkpoint to tell whether they load it.
#[derive(Debug, Clone, PartialEq)]
pub struct Outline {
    /// The container's name.
    pub container: &'static str,
    /// The model's family.
    pub family: &'static str,
    /// The class of vision-language models whose text tower it is, if it is one.
    pub wrapper: Option<&'static str>,
    /// The distinct attentions of all blocks.
    pub attentions: Vec<AttentionShape>,
    /// The different schemes of the linears of experts, `None` of those that stay float; empty without experts.
    pub experts: BTreeSet<Option<LinearScheme>>,
    /// The linears of all blocks.
    pub layers: Vec<FusedLayer>,
    /// The head's scheme, where it is quantized.
    pub head: Option<LinearScheme>,
    /// The embedding's scheme, where it is quantized.
    pub embedding: Option<LinearScheme>,
}

impl Outline {
    /// What a plan will write.
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
            // Routers are whole on every rank.
            let mut open: Vec<(NodeId, &str, [usize; 2])> = (graph.linears())
                .filter(|(id, ..)| graph.nodes()[*id].op.is_quantizable())
                .map(|(id, name, shape, _)| (id, name, shape))
                .collect();
            while let Some(&(id, name, [_, k])) = open.first() {
                let alone = [name];
                let fused = architecture.fused.iter().map(|(_, parts)| *parts);
                let parts = fused.into_iter().find(|parts| parts.contains(&name)).unwrap_or(&alone);
                let together: Vec<Part> = (open.iter().filter(|(_, name, _)| parts.contains(name)))
                    .map(|(_, name, [n, _])| {
                        let module = architecture.in_block(layer, name);
                        let scheme = quantized.get(module.as_str()).copied();
                        Part { module, n: *n, scheme }
                    })
                    .collect();
                open.retain(|(_, name, _)| !parts.contains(name));
                layers.push(FusedLayer { kind: kind(graph, id), parts: together, k });
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
        }
    }

    /// The different schemes of the linears in the blocks.
    pub fn schemes(&self) -> Vec<LinearScheme> {
        let parts = self.layers.iter().flat_map(|layer| &layer.parts);
        let schemes: BTreeSet<_> = parts.filter_map(|part| part.scheme).collect();
        schemes.into_iter().collect()
    }
}

/// Engines split what reads the residual stream by outputs, and what writes it by inputs, so that
/// nothing is exchanged between the two.
fn kind(graph: &BlockGraph, id: NodeId) -> LayerKind {
    if graph.makes_latents(id) {
        return LayerKind::Whole;
    }
    if let Some(shape) = graph.attentions().next().filter(|_| graph.feeds_attention(id)) {
        return LayerKind::Attention(graph.head_width(id, shape));
    }
    // An expert reads the stream too, but the rows of its own tokens alone.
    let input = graph.all_rows_of(graph.nodes()[id].inputs[0]);
    match graph.nodes()[input].op.gives_stream() {
        true => LayerKind::Column,
        false => LayerKind::Row,
    }
}
