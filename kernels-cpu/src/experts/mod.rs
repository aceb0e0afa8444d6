//! The experts of a layer, run in one call.
//!
//! `y[t] = Σ_e w[t, e] · down_e(act(gate_e(x[t]), up_e(x[t])))` over the experts that token `t` is routed to.
//!
//! The result is bit-identical to a loop of separate products ([`multiply_each`](crate::multiply_each),
//! [`multiply_float_each`](crate::multiply_float_each)) on the same path, for any routing, division of work and number
//! of threads. A token's terms are added in the order of experts (if a token lists an expert twice, in the order of its
//! slots); each term is rounded before it is added. [`reference::experts`](crate::reference::experts) is the
//! definition.
//!
//! Experts may differ in codes, groups, scales and zero points. An [`ExpertsPlan`] describes a call and the maximum
//! memory that it needs for any routing. An [`ExpertsWorkspace`] holds this memory, so that a call allocates nothing.
//!
//! A call has four steps. Threads share the work of each step, and synchronize at its end:
//!
//! 1. The rows of each expert are gathered and quantized or packed.
//! 2. The products with gate and up are computed in pieces of some rows and panels. The activation is applied to each
//!    piece while its results are in the L1 cache.
//! 3. The result is quantized or packed.
//! 4. The products with `down` are divided by columns, so that work is balanced even if one expert has most of the
//!    tokens. Each row is added to its token as soon as it is computed.

mod plan;
mod routing;
mod run;

pub use self::plan::{ExpertsPlan, ExpertsWorkspace};
pub use self::routing::{NO_EXPERT, Routing};
use crate::activation::{RowLayout, dispatch};
use crate::{Bf16Parts, FloatFormat, IsaToken, KernelError, PackedView};

/// The packed weights `[n, k]` of an expert, and their bias.
#[derive(Debug, Clone, Copy)]
pub struct ExpertWeight<'a> {
    /// The weights.
    pub weight: PackedView<'a>,
    /// The bias `[n]`, if any.
    pub bias: Option<&'a [f32]>,
}

impl<'a> From<PackedView<'a>> for ExpertWeight<'a> {
    fn from(weight: PackedView<'a>) -> Self {
        Self { weight, bias: None }
    }
}

impl<'a> From<&'a crate::PackedLinear> for ExpertWeight<'a> {
    fn from(linear: &'a crate::PackedLinear) -> Self {
        Self { weight: linear.view(), bias: linear.bias() }
    }
}

/// The weights of one expert, each with its own bits, groups, scales and zero points. `gate` and `up` must have the
/// same groups, since they read the same rows.
#[derive(Debug, Clone, Copy)]
pub struct Expert<'a> {
    /// `[inner, hidden]`
    pub gate: ExpertWeight<'a>,
    /// `[inner, hidden]`
    pub up: ExpertWeight<'a>,
    /// `[hidden, inner]`
    pub down: ExpertWeight<'a>,
}

/// The function that combines the outputs of gate and up.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub enum ExpertGate {
    /// `silu(gate) · up`, see [`reference::silu`](crate::reference::silu).
    #[default]
    Silu,
    /// `gelu(gate) · up`, see [`reference::gelu_tanh`](crate::reference::gelu_tanh).
    GeluTanh,
    /// The clamped gate of gpt-oss, see [`reference::clamped_gate`](crate::reference::clamped_gate).
    Clamped {
        /// The factor of the gate inside the sigmoid.
        alpha: f32,
        /// The upper bound of the gate, and the bound of the magnitude of up; not negative.
        limit: f32,
    },
}

impl ExpertGate {
    fn apply(self, token: IsaToken, gate: &[f32], up: &[f32], out: &mut [f32]) {
        match self {
            Self::Silu => {
                dispatch::silu_mul(token, gate, up, out);
            }
            Self::GeluTanh => dispatch::gelu_tanh_mul(token, gate, up, out),
            Self::Clamped { alpha, limit } => dispatch::clamped_mul(token, gate, up, [alpha, limit], out),
        }
    }
}

/// The form of the rows that the weights are multiplied by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExpertRows {
    /// Int8 with one scale per row (W4A8, W8A8), see [`Int8Rows`](crate::Int8Rows).
    Int8,
    /// Floats (W4A16, W8A16), see [`FloatRows`](crate::FloatRows).
    Float(Bf16Parts),
}

/// The experts of a layer, with matching shapes.
///
/// ```
/// use quant_kernels_cpu::experts::{
///     Expert, ExpertGate, ExpertRows, Experts, ExpertsPlan, ExpertsWorkspace, Routing,
/// };
/// use quant_kernels_cpu::{IsaToken, PackedLinear, Serial, WeightView};
///
/// // For brevity, both experts use the same matrix for gate, up and down.
/// let view = WeightView::new([8, 8], 4, 8, &[9; 64], &[0.125; 8], None)?;
/// let weight = PackedLinear::pack(&view, None, false, &Serial)?;
/// let part = || (&weight).into();
/// let all = [0, 1].map(|_| Expert { gate: part(), up: part(), down: part() });
/// let experts = Experts::new(&all)?;
///
/// // A plan for calls of up to four tokens with two experts each.
/// let (token, rows) = (IsaToken::detect(), ExpertRows::Int8);
/// let plan = ExpertsPlan::new::<f32>(&experts, token, rows, ExpertGate::Silu, 4, 2)?;
/// let mut workspace = ExpertsWorkspace::default();
/// workspace.reserve(&plan)?;
///
/// let routing = Routing { top_k: 2, experts: &[0, 1], weights: &[0.75, 0.25] };
/// let mut out = [0.0; 8];
/// experts.run(&plan, &[1.0f32; 8], &routing, &mut workspace, &mut out, &Serial)?;
/// assert!(out.iter().all(|value| (value - 0.731).abs() < 0.01)); // silu(1)
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Experts<'a> {
    experts: &'a [Expert<'a>],
    hidden: usize,
    inner: usize,
}

impl<'a> Experts<'a> {
    /// Creates the experts of a layer and checks that they match.
    ///
    /// # Errors
    /// When there are no experts or 2³² or more, a shape differs from that of the first expert, gate and up have
    /// different groups, or a bias has the wrong length.
    pub fn new(experts: &'a [Expert<'a>]) -> Result<Self, KernelError> {
        let first = experts.first().ok_or(KernelError::Scheme("a layer must have at least one expert"))?;
        if experts.len() > NO_EXPERT as usize {
            return Err(KernelError::TooLarge("the number of experts"));
        }
        let (hidden, inner) = (first.gate.weight.layout().k(), first.gate.weight.layout().n());
        for expert in experts {
            for (what, of, [n, k]) in [
                (
                    "the gate projections of all experts must have the same shape: expected",
                    &expert.gate,
                    [inner, hidden],
                ),
                (
                    "the up projections of all experts must have the same shape: expected",
                    &expert.up,
                    [inner, hidden],
                ),
                (
                    "the down projections of all experts must have the same shape: expected",
                    &expert.down,
                    [hidden, inner],
                ),
            ] {
                let layout = of.weight.layout();
                for (expected, got) in [(n, layout.n()), (k, layout.k())] {
                    if expected != got {
                        return Err(KernelError::Mismatch { what, expected, got });
                    }
                }
                of.bias.map_or(Ok(()), |bias| KernelError::length("bias", n, bias.len()))?;
            }
            let [gate, up] = [&expert.gate, &expert.up].map(|of| of.weight.layout());
            if RowLayout::of(gate) != RowLayout::of(up) {
                let (expected, got) = (gate.group_size(), up.group_size());
                return Err(KernelError::Mismatch {
                    what: "gate and up projections must have the same groups: expected size",
                    expected,
                    got,
                });
            }
        }
        Ok(Self { experts, hidden, inner })
    }

    #[cfg(feature = "candle")]
    pub(crate) fn checked(experts: &'a [Expert<'a>], [hidden, inner]: [usize; 2]) -> Self {
        Self { experts, hidden, inner }
    }

    /// The number of experts.
    pub fn count(&self) -> usize {
        self.experts.len()
    }

    /// Features per token.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// The intermediate size: the output features of gate and up, and the input features of `down`.
    pub fn inner(&self) -> usize {
        self.inner
    }

    pub(crate) fn get(&self, expert: usize) -> &'a Expert<'a> {
        &self.experts[expert]
    }

    fn require(&self, rows: ExpertRows) -> Result<(), KernelError> {
        let all = self.experts.iter().flat_map(|e| [e.gate, e.up, e.down]);
        let mut layouts = all.map(|of| *of.weight.layout());
        match rows {
            ExpertRows::Int8 if layouts.clone().any(|of| of.is_bf16()) => {
                Err(KernelError::Scheme("bf16 weights cannot be multiplied with int8 activations"))
            }
            ExpertRows::Int8 if layouts.any(|of| of.float_format() == Some(FloatFormat::E4m3)) => {
                Err(KernelError::Scheme("FP8 (E4M3) weights cannot be multiplied with int8 activations"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::reference::{clamped_gate, gelu_tanh, silu};

    fn pairs() -> (Vec<f32>, Vec<f32>) {
        let special = [0.0, -0.0, 1e-40, -1e-30, 87.1, -87.1, 3e20, -3e20, f32::MAX, f32::INFINITY, f32::NAN];
        let ordinary = (-300..300).map(|i| i as f32 * 0.037);
        let values: Vec<f32> = ordinary.chain(special).chain([f32::NEG_INFINITY]).collect();
        let others = [0.7, -6.9, 7.0, 9.5, -1e30, f32::NAN, f32::INFINITY];
        values.iter().flat_map(|&g| others.map(|u| (g, u))).unzip()
    }

    #[test]
    fn gates_are_the_definition_on_every_path() {
        let (gate, up) = pairs();
        let limits = ExpertGate::Clamped { alpha: 1.702, limit: 7.0 };
        type Definition = fn(f32, f32) -> f32;
        let definitions: [(ExpertGate, Definition); 3] = [
            (ExpertGate::Silu, |g, u| silu(g) * u),
            (ExpertGate::GeluTanh, |g, u| gelu_tanh(g) * u),
            (limits, |g, u| clamped_gate(g, u, 1.702, 7.0)),
        ];
        for isa in Isa::runnable() {
            for (kind, definition) in definitions {
                let mut out = vec![1.0; gate.len()];
                kind.apply(isa.token().unwrap(), &gate, &up, &mut out);
                for ((&g, &u), &got) in gate.iter().zip(&up).zip(&out) {
                    let expected = definition(g, u);
                    let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
                    assert!(same, "{isa:?}, {kind:?} of {g} and {u}: {got}, not {expected}");
                }
            }
        }
    }

    #[test]
    fn definitions_are_the_formulas() {
        for i in -400_000..400_000 {
            let g = i as f32 * 2.3e-5;
            let x = f64::from(g);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            let exact = 0.5 * x * (1.0 + inner.tanh());
            let off = (f64::from(gelu_tanh(g)) - exact).abs();
            assert!(off <= x.abs() * 2.0_f64.powi(-20), "gelu of {g}");
            let u = 0.6_f32;
            let exact = x.min(7.0) / (1.0 + (-1.702 * x.min(7.0)).exp()) * 1.6;
            let off = (f64::from(clamped_gate(g, u, 1.702, 7.0)) - exact).abs();
            // Rounding 1.702 · g changes the exponential by up to this share.
            assert!(off <= exact.abs() * 2.0_f64.powi(-18), "clamped gate of {g}");
        }
        assert_eq!((gelu_tanh(100.0), gelu_tanh(-100.0)), (100.0, 0.0));
    }
}
