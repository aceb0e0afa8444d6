//! The experts of a layer as one operation on candle tensors.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, DType, Device, Error, Result, Storage, Tensor, bail};
use half::{bf16, f16};

use super::{Activations, Runner, part};
use crate::activation::resize;
use crate::experts::{Expert, ExpertGate, ExpertRows, ExpertWeight, Experts, ExpertsPlan, Routing};
use crate::{Bf16Parts, Element, IsaToken, KernelError, PackedLinear, narrow};

/// The maximum number of tokens that are processed at a time.
const TOKENS: usize = 1024;

/// A linear layer of an expert.
#[derive(Debug, Clone)]
pub struct ExpertLinear {
    /// The weights `[n, k]`.
    pub weight: Arc<PackedLinear>,
    /// The bias `[n]`, if it differs from the one that the weights were packed with.
    pub bias: Option<Arc<[f32]>>,
}

impl ExpertLinear {
    fn view(&self) -> ExpertWeight<'_> {
        ExpertWeight { weight: self.weight.view(), bias: self.bias.as_deref().or(self.weight.bias()) }
    }
}

impl From<Arc<PackedLinear>> for ExpertLinear {
    fn from(weight: Arc<PackedLinear>) -> Self {
        Self { weight, bias: None }
    }
}

/// The experts of a layer in one call: `y[t] = Σ_e w[t, e] · down_e(act(gate_e(x[t]), up_e(x[t])))`, see
/// [`experts`](crate::experts). Clones share the weights and the runner.
///
/// The [`Runner`] keeps as much memory as the largest call needed. Inputs of more than 1024 tokens are processed 1024
/// tokens at a time, which does not change the results.
#[derive(Debug, Clone)]
pub struct QuantizedExperts {
    experts: Arc<[[ExpertLinear; 3]]>,
    shape: [usize; 2],
    rows: ExpertRows,
    gate: ExpertGate,
    runner: Runner,
    /// The plan of the last call, reused because successive calls often have the same number of tokens.
    plan: Arc<Mutex<Option<ExpertsPlan>>>,
}

impl QuantizedExperts {
    /// Creates the operation from the gate, up and down layers of each expert.
    ///
    /// # Errors
    /// When the experts do not match each other (see [`Experts::new`]) or do not support these activations, or
    /// when the limit of the gate is negative or NaN. Static activations are not supported.
    pub fn new(
        experts: Vec<[ExpertLinear; 3]>,
        activations: Activations,
        gate: ExpertGate,
        runner: &Runner,
    ) -> std::result::Result<Self, KernelError> {
        let rows = match activations {
            Activations::Float => ExpertRows::Float(Bf16Parts::default()),
            Activations::PerToken => ExpertRows::Int8,
            Activations::Static(_) => {
                return Err(KernelError::Scheme("experts do not support static activation scales"));
            }
        };
        let shape = {
            let views = views(&experts);
            let all = Experts::new(&views)?;
            ExpertsPlan::new::<f32>(&all, IsaToken::detect(), rows, gate, 1, 1)?;
            [all.hidden(), all.inner()]
        };
        let (experts, runner) = (experts.into(), runner.clone());
        Ok(Self { experts, shape, rows, gate, runner, plan: Arc::default() })
    }

    /// Features per token.
    pub fn hidden(&self) -> usize {
        self.shape[0]
    }

    /// The number of experts.
    pub fn count(&self) -> usize {
        self.experts.len()
    }

    /// Runs the experts on slices: `x` is `[tokens, hidden]`; `out` has the same shape and is overwritten.
    ///
    /// # Errors
    /// See [`Experts::run`]; also when memory allocation fails.
    pub fn run<E: Element>(
        &self,
        x: &[E],
        routing: &Routing<'_>,
        out: &mut [f32],
    ) -> std::result::Result<(), KernelError> {
        let views = views(&self.experts);
        let experts = Experts::checked(&views, self.shape);
        let hidden = self.shape[0];
        let tokens = KernelError::parts("activations", hidden, x.len())?;
        KernelError::length("output", x.len(), out.len())?;
        let slots =
            tokens.checked_mul(routing.top_k).ok_or(KernelError::TooLarge("the number of expert rows"))?;
        KernelError::length("expert numbers", slots, routing.experts.len())?;
        KernelError::length("expert weights", slots, routing.weights.len())?;
        let plan = self.plan::<E>(&experts, tokens.min(TOKENS), routing.top_k)?;
        self.runner.with_memory(|rows, parallel| {
            rows.experts.reserve(&plan)?;
            let parts = x.chunks(TOKENS * hidden).zip(out.chunks_mut(TOKENS * hidden)).enumerate();
            for (i, (x, out)) in parts {
                let first = i * TOKENS * routing.top_k;
                let slots = first..first + x.len() / hidden * routing.top_k;
                let (top_k, experts_of, weights) =
                    (routing.top_k, &routing.experts[slots.clone()], &routing.weights[slots]);
                let routing = Routing { top_k, experts: experts_of, weights };
                experts.run(&plan, x, &routing, &mut rows.experts, out, parallel)?;
            }
            Ok(())
        })
    }

    fn plan<E: Element>(
        &self,
        experts: &Experts<'_>,
        tokens: usize,
        top_k: usize,
    ) -> std::result::Result<ExpertsPlan, KernelError> {
        let mut last = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = last.filter(|plan| plan.is_of::<E>(tokens, top_k)) {
            return Ok(plan);
        }
        let plan = ExpertsPlan::new::<E>(experts, IsaToken::detect(), self.rows, self.gate, tokens, top_k)?;
        Ok(*last.insert(plan))
    }

    /// Runs the experts on `x` `[.., hidden]` in f32, f16 or bf16, with `experts` `[.., top_k]` in u32 and `weights`
    /// `[.., top_k]` in f32, all on the CPU. The result is `[.., hidden]` in the type of `x`. Gradients are not
    /// supported.
    ///
    /// # Errors
    /// When a type, device or shape is wrong, or an index of an expert is out of range.
    pub fn forward(&self, x: &Tensor, experts: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let name = "quantized-experts";
        let dims = x.dims();
        let (Some((&hidden, tokens)), Some((&top_k, slots))) =
            (dims.split_last(), experts.dims().split_last())
        else {
            bail!("{name}: the activations and the expert numbers must have at least one dimension");
        };
        if hidden != self.shape[0] || tokens != slots || experts.dims() != weights.dims() {
            let (experts, weights) = (experts.dims(), weights.dims());
            bail!(
                "{name}: expected inputs of shapes [.., {}], [.., k] and [.., k], got {dims:?}, {experts:?} and {weights:?}",
                self.shape[0]
            );
        }
        if [x, experts, weights].iter().any(|input| !input.device().is_cpu()) {
            bail!("{name} runs on the CPU only: move its inputs to the CPU first");
        }
        let (x, experts, weights) = (x.contiguous()?, experts.contiguous()?, weights.contiguous()?);
        let experts = experts.flatten_all()?.to_vec1::<u32>()?;
        let weights = weights.flatten_all()?.to_vec1::<f32>()?;
        let routing = Routing { top_k, experts: &experts, weights: &weights };
        let (storage, layout) = x.storage_and_layout();
        let (count, start) = (x.elem_count(), layout.start_offset());
        match &*storage {
            Storage::Cpu(CpuStorage::F32(values)) => {
                let mut out = vec![0.0; count];
                self.run(part(values, start, count)?, &routing, &mut out).map_err(Error::wrap)?;
                Tensor::from_vec(out, dims, &Device::Cpu)
            }
            Storage::Cpu(CpuStorage::F16(values)) => {
                let mut out = vec![f16::ZERO; count];
                self.run_narrow(part(values, start, count)?, &routing, &mut out).map_err(Error::wrap)?;
                Tensor::from_vec(out, dims, &Device::Cpu)
            }
            Storage::Cpu(CpuStorage::BF16(values)) => {
                let mut out = vec![bf16::ZERO; count];
                self.run_narrow(part(values, start, count)?, &routing, &mut out).map_err(Error::wrap)?;
                Tensor::from_vec(out, dims, &Device::Cpu)
            }
            _ => bail!("{name}: expected f32, f16 or bf16, got {}", DType::as_str(&x.dtype())),
        }
    }

    /// Runs the experts as [`run`](Self::run) does, and rounds the results to the type of `x`.
    fn run_narrow<E: Element>(
        &self,
        x: &[E],
        routing: &Routing<'_>,
        out: &mut [E],
    ) -> std::result::Result<(), KernelError> {
        let mut sums = Vec::new();
        resize(&mut sums, Some(out.len()))?;
        self.run(x, routing, &mut sums)?;
        self.runner.with_memory(|_, parallel| narrow(IsaToken::detect(), &sums, out, parallel))
    }
}

fn views(experts: &[[ExpertLinear; 3]]) -> Vec<Expert<'_>> {
    experts
        .iter()
        .map(|[gate, up, down]| Expert { gate: gate.view(), up: up.view(), down: down.view() })
        .collect()
}
