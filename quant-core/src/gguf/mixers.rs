//! Metadata of blocks with state-space operations or short convolutions.

use super::families::{GgufFamily, Mixer};
use super::file::{Array, Value};
use super::layout;
use super::metadata::unfit;
use super::specials::count;
use crate::Result;
use crate::model::{Activation, Architecture, AttentionShape, BlockGraph, Convolution, Op, RecurrentKind};

fn convolution(graph: &BlockGraph) -> Option<Convolution> {
    graph.nodes().iter().find_map(|node| match &node.op {
        Op::Recurrent(recurrent) => match recurrent.kind {
            RecurrentKind::Convolution(convolution) => Some(convolution),
            _ => None,
        },
        _ => None,
    })
}

/// The kernel size of convolutions; 0 if there are none.
pub(super) fn kernel(a: &Architecture) -> usize {
    (0..a.layers).find_map(|layer| convolution(a.graph(layer))).map_or(0, |convolution| convolution.kernel)
}

/// The number of key heads: one for all blocks, or, if only some blocks have attention, one per block.
pub(super) fn key_heads(a: &Architecture, family: &GgufFamily, shape: AttentionShape) -> Result<Value> {
    let attends = |layer: usize| a.graph(layer).attentions().next().is_some();
    match family.mixer.is_some() && !(0..a.layers).all(attends) {
        true => per_block(a, family, |layer| if attends(layer) { shape.kv_heads } else { 0 }),
        false => count(family, shape.kv_heads),
    }
}

/// The width of the MLP or of an expert of each block, 0 in other blocks.
pub(super) fn mlps(a: &Architecture, family: &GgufFamily) -> Result<Value> {
    let experts = |layer: usize| a.graph(layer).nodes().iter().any(|node| node.op.routing().is_some());
    let is_mlp = |name: &str| family.module(name) == Some("ffn_down");
    let is_expert = |name: &str| family.expert(name).is_some_and(|(_, stored)| stored == "ffn_down_exps");
    let dense = |layer: usize| a.graph(layer).linears().any(|(_, name, ..)| is_mlp(name));
    if (0..a.layers).any(dense) && (0..a.layers).any(experts) {
        return Err(unfit(family, "some blocks are MLPs and others have experts".into()));
    }
    let width = |layer: usize| {
        let mut linears = a.graph(layer).linears();
        linears.find(|(_, name, ..)| is_mlp(name) || is_expert(name)).map_or(0, |(_, _, [_, k], _)| k)
    };
    per_block(a, family, width)
}

fn per_block(a: &Architecture, family: &GgufFamily, number: impl Fn(usize) -> usize) -> Result<Value> {
    let numbers = (0..a.layers).map(|layer| match count(family, number(layer))? {
        Value::U32(n) => Ok(i32::try_from(n).unwrap_or(i32::MAX)),
        _ => Ok(0),
    });
    Ok(Value::Array(Array::I32(numbers.collect::<Result<_>>()?)))
}

/// Writes the keys of the family's operation, after checking that llama.cpp computes the same.
pub(super) fn keys(a: &Architecture, family: &GgufFamily, put: &mut impl FnMut(&str, Value)) -> Result<()> {
    let count = |n: usize| count(family, n);
    match family.mixer {
        None => Ok(()),
        Some(Mixer::ShortConvolution) => {
            let biased = (0..a.layers).filter_map(|layer| convolution(a.graph(layer)));
            if biased.clone().any(|convolution| convolution.bias) {
                return Err(unfit(family, "its convolutions have biases".into()));
            }
            if kernel(a) < 2 {
                return Err(unfit(family, "it has no convolutions over several tokens".into()));
            }
            put("shortconv.l_cache", count(kernel(a))?);
            Ok(())
        }
        Some(Mixer::StateSpace { expand, norm }) => {
            let spaces = (0..a.layers).filter_map(|layer| layout::state_space(a.graph(layer)));
            let Some(space) = spaces.clone().next() else {
                return Err(unfit(family, "it has no state-space operation".into()));
            };
            if spaces.clone().any(|other| other != space) {
                return Err(unfit(family, "the shapes of its state-space operations differ".into()));
            }
            if space.steps[0] > 0.0 || space.steps[1] != f32::INFINITY {
                return Err(unfit(family, format!("its time steps are limited to {:?}", space.steps)));
            }
            if let Some(ratio) = expand.filter(|ratio| space.width() != ratio * a.hidden) {
                let reason = format!(
                    "its state-space operations have {} channels; only {ratio} times the hidden size is supported",
                    space.width()
                );
                return Err(unfit(family, reason));
            }
            for graph in (0..a.layers).map(|layer| a.graph(layer)) {
                check_state_space(graph, family, norm)?;
            }
            put("ssm.conv_kernel", count(kernel(a))?);
            put("ssm.inner_size", count(space.width())?);
            put("ssm.state_size", count(space.state_dim)?);
            put("ssm.time_step_rank", count(space.heads)?);
            put("ssm.group_count", count(space.groups)?);
            let mut linears = (0..a.layers).flat_map(|layer| a.graph(layer).linears());
            let is_latent = |name: &str| family.module(name) == Some("ffn_latent_down");
            if let Some((_, _, [width, _], _)) = linears.find(|(_, name, ..)| is_latent(name)) {
                put("moe_latent_size", count(width)?);
            }
            Ok(())
        }
    }
}

fn check_state_space(graph: &BlockGraph, family: &GgufFamily, needs_norm: bool) -> Result<()> {
    if layout::state_space(graph).is_none() {
        return Ok(());
    }
    if !convolution(graph).is_some_and(|convolution| convolution.bias) {
        return Err(unfit(family, "the convolutions of its state-space operations have no biases".into()));
    }
    let norms: Vec<usize> = (0..graph.nodes().len())
        .filter(|node| matches!(graph.nodes()[*node].op, Op::Normalize { .. }))
        .collect();
    if norms.is_empty() && needs_norm {
        return Err(unfit(family, "the outputs of its state-space operations are not normalized".into()));
    }
    let is_gate = |node: usize| graph.nodes()[node].op == Op::Gated(Activation::Silu);
    match norms.iter().any(|norm| !is_gate(graph.nodes()[*norm].inputs[0])) {
        true => Err(unfit(family, "its state-space operations are normalized before their gate".into())),
        false => Ok(()),
    }
}
