//! Norms and gates that the kernels compute while packing the rows of linears, instead of as separate operations.
//!
//! They are computed separately if something else needs their values, such as a tap that observes the inputs of
//! linears.

use std::collections::BTreeMap;

use candle_core::Tensor;
use quant_kernels_cpu::candle::Fused;

use super::arch::{Activation, BlockGraph, NodeId, Op};
use super::{Linear, Norm};
use crate::{Error, Result};

pub(super) type FusedReaders = BTreeMap<NodeId, Vec<NodeId>>;

/// Returns the nodes of a block that can be fused, with the linears that read them.
pub(super) fn readers(
    graph: &BlockGraph,
    linears: &BTreeMap<NodeId, Linear>,
    norms: &BTreeMap<NodeId, Norm>,
) -> FusedReaders {
    let fused = graph.nodes().iter().enumerate().filter(|(id, node)| {
        let width = graph.width(*id);
        match &node.op {
            Op::RmsNorm { width: own, eps, .. } => {
                *own == width && *eps as f32 > 0.0 && norms.get(id).is_some_and(|norm| norm.bias.is_none())
            }
            Op::Gated(Activation::Silu) => true,
            _ => false,
        }
    });
    let with_readers = fused.filter_map(|(id, _)| {
        let readers: Vec<NodeId> = graph.users(id).map(|(reader, _)| reader).collect();
        let own: Option<Vec<&Linear>> = readers.iter().map(|reader| linears.get(reader)).collect();
        let own = own?;
        let first = own.first()?;
        let all = first.takes_fused() && own.iter().all(|linear| first.shares_input_with(linear));
        (all && id != graph.output()).then_some((id, readers))
    });
    with_readers.collect()
}

pub(super) fn run(
    op: &Op,
    norm: Option<&Norm>,
    inputs: &[Tensor],
    linears: &[&Linear],
) -> Result<Vec<Tensor>> {
    match (op, norm, inputs) {
        (Op::RmsNorm { eps, .. }, Some(norm), [x]) => {
            let weight = norm.factors(op)?.to_vec1::<f32>()?;
            Linear::forward_fused(linears, Fused::RmsNorm { x, weight: &weight, eps: *eps as f32 })
        }
        (Op::Gated(Activation::Silu), _, [gate, up]) => {
            Linear::forward_fused(linears, Fused::SiluMul { gate, up })
        }
        (op, ..) => Err(Error::Internal(format!("the kernels do not support {op:?}"))),
    }
}
