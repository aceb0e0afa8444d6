//! Experts of a block that the kernels run in one call, instead of three products per expert.
//!
//! Packing a block finds them in its graph. If the kernels do not support the linears of an expert, or a tap observes
//! the inputs of linears, the experts are evaluated node by node.

use std::collections::BTreeMap;

use candle_core::{D, Device, Tensor};
use quant_kernels_cpu::RowLayout;
use quant_kernels_cpu::candle::{Activations, ExpertLinear, QuantizedExperts, QuantizedLinear};
use quant_kernels_cpu::experts::{ExpertGate, NO_EXPERT, Routing};

use super::arch::{Activation, BlockGraph, NodeId, Op};
use super::linear::kernel_error;
use super::tensor_values::with_values;
use super::{Linear, WeightBody};
use crate::{Error, Result};

#[derive(Debug, Clone)]
pub(super) struct GroupedExperts {
    /// The node of the expert weights per token, and the node of the experts' input.
    inputs: [NodeId; 2],
    top_k: usize,
    experts: QuantizedExperts,
}

impl GroupedExperts {
    pub(super) fn inputs(&self) -> &[NodeId] {
        &self.inputs
    }

    pub(super) fn count(&self) -> usize {
        self.experts.count()
    }

    /// Computes the sum of the experts for weights `[…, experts]` and `x` `[…, width]`.
    pub(super) fn run(&self, weights: &Tensor, x: &Tensor) -> Result<Tensor> {
        let (count, width) = (self.experts.count(), self.experts.hidden());
        if weights.dim(D::Minus1)? != count || x.dim(D::Minus1)? != width {
            return Err(Error::Internal(format!(
                "routing weights {:?} do not match hidden states {:?}",
                weights.dims(),
                x.dims()
            )));
        }
        let (mut numbers, mut own) = (Vec::new(), Vec::new());
        with_values(weights, |weights| {
            for row in weights.chunks_exact(count) {
                let chosen = row.iter().enumerate().filter(|(_, weight)| **weight != 0.0);
                let before = numbers.len();
                for (expert, &weight) in chosen {
                    numbers.push(expert as u32);
                    own.push(weight);
                }
                let (got, max) = (numbers.len() - before, self.top_k);
                if got > max {
                    return Err(Error::Internal(format!(
                        "a token is routed to {got} experts; the limit is \
                        {max}"
                    )));
                }
                // Weights that underflow to 0 leave a token with fewer experts than `max`.
                numbers.resize(before + max, NO_EXPERT);
                own.resize(before + max, 0.0);
            }
            Ok(())
        })?;
        let routing = Routing { top_k: self.top_k, experts: &numbers, weights: &own };
        let mut out = vec![0.0; x.elem_count()];
        with_values(x, |x| self.experts.run(x, &routing, &mut out).map_err(kernel_error))?;
        Ok(Tensor::from_vec(out, x.dims(), &Device::Cpu)?)
    }
}

/// Returns the experts of a block that run in one call, by the nodes that sum them.
pub(super) fn grouped(
    graph: &BlockGraph,
    linears: &BTreeMap<NodeId, Linear>,
) -> Result<BTreeMap<NodeId, GroupedExperts>> {
    let sums = graph.nodes().iter().enumerate();
    let sums = sums.filter(|(_, node)| node.op.sums_experts());
    let mut found = BTreeMap::new();
    for (id, node) in sums {
        if let Some((&weights, outputs)) = node.inputs.split_first()
            && let Some(experts) = experts_of(graph, linears, weights, outputs)?
        {
            found.insert(id, experts);
        }
    }
    Ok(found)
}

#[derive(Clone, Copy)]
struct Parts {
    linears: [NodeId; 3],
    gate: ExpertGate,
    top_k: usize,
    input: NodeId,
}

/// Returns the nodes of expert `number`, whose result is the node `output`.
fn parts_of(graph: &BlockGraph, number: usize, weights: NodeId, output: NodeId) -> Option<Parts> {
    let nodes = graph.nodes();
    let &[product] = nodes[output].inputs.as_slice() else { return None };
    let gate = match nodes[product].op {
        Op::Gated(Activation::Silu) => ExpertGate::Silu,
        Op::Gated(Activation::GeluTanh) => ExpertGate::GeluTanh,
        Op::ClampedGated { alpha, limit } => ExpertGate::Clamped { alpha, limit },
        _ => return None,
    };
    let &[gated, raised] = nodes[product].inputs.as_slice() else { return None };
    let &[rows] = nodes[gated].inputs.as_slice() else { return None };
    let Op::ExpertInput { expert, routing } = nodes[rows].op else { return None };
    let &[input, by] = nodes[rows].inputs.as_slice() else { return None };
    let same = nodes[raised].inputs == [rows] && expert == number && by == weights;
    same.then_some(Parts { linears: [gated, raised, output], gate, top_k: routing.top_k, input })
}

fn experts_of(
    graph: &BlockGraph,
    linears: &BTreeMap<NodeId, Linear>,
    weights: NodeId,
    outputs: &[NodeId],
) -> Result<Option<GroupedExperts>> {
    let mut experts = Vec::with_capacity(outputs.len());
    let mut shared: Option<(Parts, &QuantizedLinear)> = None;
    for (number, &output) in outputs.iter().enumerate() {
        let Some(parts) = parts_of(graph, number, weights, output) else { return Ok(None) };
        let mut own = Vec::with_capacity(3);
        for linear in parts.linears.iter().map(|id| linears.get(id)) {
            let Some((packed, part)) = linear.map(packed).transpose()?.flatten() else { return Ok(None) };
            let first = shared.as_ref().map_or(packed.activations(), |(_, first)| first.activations());
            if packed.activations() != first || matches!(first, Activations::Static(_)) {
                return Ok(None);
            }
            own.push(part);
            if shared.is_none() {
                shared = Some((parts, packed));
            }
        }
        let Some((first, _)) = &shared else { return Ok(None) };
        if (first.gate, first.top_k, first.input) != (parts.gate, parts.top_k, parts.input) {
            return Ok(None);
        }
        let Ok(own) = <[ExpertLinear; 3]>::try_from(own) else { return Ok(None) };
        experts.push(own);
    }
    let Some((parts, linear)) = shared else { return Ok(None) };
    // The kernels compute gate and up from the same quantized rows, so both need the same groups.
    let different = |[gate, up, _]: &[ExpertLinear; 3]| {
        RowLayout::of(gate.weight.layout()) != RowLayout::of(up.weight.layout())
    };
    if experts.iter().any(different) {
        return Ok(None);
    }
    let experts = QuantizedExperts::new(experts, linear.activations(), parts.gate, linear.runner());
    let inputs = [weights, parts.input];
    Ok(Some(GroupedExperts { inputs, top_k: parts.top_k, experts: experts.map_err(kernel_error)? }))
}

/// `None` if the linear is not packed or its input has a floating-point grid.
fn packed(linear: &Linear) -> Result<Option<(&QuantizedLinear, ExpertLinear)>> {
    let WeightBody::Packed { linear: packed, grid: None } = &**linear.weight() else { return Ok(None) };
    let bias = linear.bias().map(|bias| bias.flatten_all()?.to_vec1::<f32>()).transpose()?;
    let weight = packed.weight().clone();
    Ok(Some((packed, ExpertLinear { weight, bias: bias.map(Into::into) })))
}
