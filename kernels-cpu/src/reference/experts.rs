//! The experts of a layer as a loop of separate products.

use super::{clamped_gate, gelu_tanh, silu};
use crate::experts::{ExpertGate, ExpertRows, ExpertWeight, Experts, NO_EXPERT, Routing};
use crate::{FloatRows, Int8Rows, IsaToken, KernelError, RowLayout, Serial};

/// Computes the results that [`Experts::run`] must match bit for bit: for each expert, in order, three separate
/// products of the rows that are routed to it, whose results are multiplied by their weights, rounded, and added.
///
/// # Errors
/// When a length is wrong, or an expert does not support rows of this kind.
///
/// # Panics
/// When `x` is not whole rows, or an expert does not exist.
pub fn experts(
    experts: &Experts<'_>,
    token: IsaToken,
    rows: ExpertRows,
    gate: ExpertGate,
    x: &[f32],
    routing: &Routing<'_>,
) -> Result<Vec<f32>, KernelError> {
    let width = experts.hidden();
    assert!(x.len().is_multiple_of(width), "not whole rows");
    assert!(
        routing.experts.iter().all(|&e| e == NO_EXPERT || (e as usize) < experts.count()),
        "no such expert"
    );
    let mut out = vec![0.0; x.len()];
    for number in 0..experts.count() {
        let expert = experts.get(number);
        let slots = (0..routing.experts.len()).filter(|&slot| routing.experts[slot] == number as u32);
        let slots: Vec<usize> = slots.collect();
        let own: Vec<f32> =
            slots.iter().flat_map(|slot| &x[slot / routing.top_k * width..][..width]).copied().collect();
        let (g, u) = (single(expert.gate, token, rows, &own)?, single(expert.up, token, rows, &own)?);
        let inner: Vec<f32> = g.iter().zip(&u).map(|(&g, &u)| gated(gate, g, u)).collect();
        let y = single(expert.down, token, rows, &inner)?;
        for (y, slot) in y.chunks_exact(width).zip(slots) {
            let sums = &mut out[slot / routing.top_k * width..][..width];
            sums.iter_mut().zip(y).for_each(|(sum, y)| *sum += routing.weights[slot] * y);
        }
    }
    Ok(out)
}

fn gated(gate: ExpertGate, g: f32, u: f32) -> f32 {
    match gate {
        ExpertGate::Silu => silu(g) * u,
        ExpertGate::GeluTanh => gelu_tanh(g) * u,
        ExpertGate::Clamped { alpha, limit } => clamped_gate(g, u, alpha, limit),
    }
}

fn single(
    of: ExpertWeight<'_>,
    token: IsaToken,
    rows: ExpertRows,
    x: &[f32],
) -> Result<Vec<f32>, KernelError> {
    let layout = of.weight.layout();
    let mut out = vec![0.0; x.len() / layout.k() * layout.n()];
    match rows {
        ExpertRows::Int8 => {
            let mut rows = Int8Rows::new(token);
            rows.quantize(x, RowLayout::of(layout), &Serial)?;
            of.weight.multiply(token, &rows, of.bias, &mut out, &Serial)?;
        }
        ExpertRows::Float(parts) => {
            let mut rows = FloatRows::in_parts(token, parts);
            rows.pack(x, RowLayout::of(layout), &Serial)?;
            of.weight.multiply_float(&rows, of.bias, &mut out, &Serial)?;
        }
    }
    Ok(out)
}
