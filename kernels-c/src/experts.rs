//! The experts of a layer in one call, through a handle that holds the plan and its memory.

use half::{bf16, f16};
use quant_kernels_cpu::experts::{
    Expert, ExpertGate, ExpertRows, ExpertWeight, Experts, ExpertsPlan, ExpertsWorkspace, Routing,
};
use quant_kernels_cpu::{Bf16Parts, Element, PackedView};

use crate::features::token;
use crate::memory::{self, Scope, fields};
use crate::parallel::{Threads, qz1_parallel};
use crate::rows::{QZ1_TYPE_BF16, QZ1_TYPE_F16, QZ1_TYPE_F32, by_kind, qz1_values};
use crate::status::{Fault, call, qz1_message, qz1_status};
use crate::weights::{layout_of_many, qz1_layout};

/// Weights are multiplied by 8-bit integers, with one scale per row.
pub const QZ1_EXPERT_ROWS_INT8: u32 = 1;
/// Weights are multiplied by floats.
pub const QZ1_EXPERT_ROWS_FLOAT: u32 = 2;

/// `silu(gate) · up`
pub const QZ1_GATE_SILU: u32 = 1;
/// `gelu(gate) · up`, in the tanh approximation.
pub const QZ1_GATE_GELU_TANH: u32 = 2;
/// `g · σ(alpha · g) · (u + 1)` with `g = min(gate, limit)` and `u` = `up` clamped to `[−limit, limit]`.
pub const QZ1_GATE_CLAMPED: u32 = 3;

/// Marks a token's slot that has no expert.
pub const QZ1_NO_EXPERT: u32 = u32::MAX;

/// The plan for calls of a layer's experts, with the memory that they need.
pub struct qz1_experts {
    plan: ExpertsPlan,
    workspace: ExpertsWorkspace,
}

/// One expert: packed weights of its gate and up projections `[inner, hidden]` and its down projection `[hidden,
/// inner]`. Each may have its own bits, groups, scales and zero points, but gate and up must have the same groups.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_expert {
    /// `sizeof(qz1_expert)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Layout of the gate projection.
    pub gate_layout: *const qz1_layout,
    /// The packed bytes that `qz1_pack` writes.
    pub gate: *const u8,
    /// Bytes of `gate`.
    pub gate_len: usize,
    /// `[inner]`, or null.
    pub gate_bias: *const f32,
    /// Elements of `gate_bias`.
    pub gate_bias_len: usize,
    /// Layout of the up projection.
    pub up_layout: *const qz1_layout,
    /// The packed bytes that `qz1_pack` writes.
    pub up: *const u8,
    /// Bytes of `up`.
    pub up_len: usize,
    /// `[inner]`, or null.
    pub up_bias: *const f32,
    /// Elements of `up_bias`.
    pub up_bias_len: usize,
    /// Layout of the down projection.
    pub down_layout: *const qz1_layout,
    /// The packed bytes that `qz1_pack` writes.
    pub down: *const u8,
    /// Bytes of `down`.
    pub down_len: usize,
    /// `[hidden]`, or null.
    pub down_bias: *const f32,
    /// Elements of `down_bias`.
    pub down_bias_len: usize,
}

/// The configuration for calls of a layer's experts.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_experts_config {
    /// `sizeof(qz1_experts_config)`
    pub struct_size: u32,
    /// `QZ1_ISA_…`
    pub isa: u32,
    /// `QZ1_EXPERT_ROWS_…`
    pub rows: u32,
    /// `QZ1_GATE_…`
    pub gate: u32,
    /// `alpha` of a clamped gate.
    pub alpha: f32,
    /// `limit` of a clamped gate, not negative.
    pub limit: f32,
    /// `QZ1_TYPE_…` of the activations.
    pub kind: u32,
    /// 0
    pub reserved: u32,
    /// Maximum number of tokens per call.
    pub tokens: usize,
    /// Maximum number of experts per token.
    pub top_k: usize,
}

/// The experts that each token is routed to.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_routing {
    /// `sizeof(qz1_routing)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Slots per token.
    pub top_k: usize,
    /// Expert indices, or `QZ1_NO_EXPERT`, `[tokens, top_k]`.
    pub experts: *const u32,
    /// Elements of `experts`.
    pub experts_len: usize,
    /// The weight of each expert's output, `[tokens, top_k]`.
    pub weights: *const f32,
    /// Elements of `weights`.
    pub weights_len: usize,
}

fields!(qz1_expert, down_bias_len, reserved);
fields!(qz1_experts_config, top_k, reserved);
fields!(qz1_routing, weights_len, reserved);

/// Reads the experts; memory that is written must have been entered before.
///
/// # Safety
/// Same as for [`Scope::read`] and [`Scope::slice`], for all memory that the structures point to.
unsafe fn experts(scope: &Scope, at: *const qz1_expert, count: usize) -> Result<Vec<Expert<'_>>, Fault> {
    let mut experts = memory::room(count, "the experts")?;
    // SAFETY: this function has the safety contract of the functions that it calls.
    unsafe {
        scope.each(at, count, "the experts", |_, e: qz1_expert| {
            let of = |layout, bytes, len, bias: *const f32, bias_len| -> Result<ExpertWeight<'_>, Fault> {
                let layout = layout_of_many(scope, layout)?;
                let bytes = scope.one_of_many(bytes, len, "the packed weights")?;
                let weight = PackedView::new(layout, layout.id(), bytes)?;
                let bias = match bias.is_null() && bias_len == 0 {
                    true => None,
                    false => Some(scope.one_of_many(bias, bias_len, "the bias")?),
                };
                Ok(ExpertWeight { weight, bias })
            };
            experts.push(Expert {
                gate: of(e.gate_layout, e.gate, e.gate_len, e.gate_bias, e.gate_bias_len)?,
                up: of(e.up_layout, e.up, e.up_len, e.up_bias, e.up_bias_len)?,
                down: of(e.down_layout, e.down, e.down_len, e.down_bias, e.down_bias_len)?,
            });
            Ok(())
        })?;
    }
    Ok(experts)
}

/// The gate of a `QZ1_GATE_…`, with the numbers of a clamped one.
pub(crate) fn gate(kind: u32, [alpha, limit]: [f32; 2]) -> Result<ExpertGate, Fault> {
    match kind {
        QZ1_GATE_SILU => Ok(ExpertGate::Silu),
        QZ1_GATE_GELU_TANH => Ok(ExpertGate::GeluTanh),
        QZ1_GATE_CLAMPED => Ok(ExpertGate::Clamped { alpha, limit }),
        _ => Err(Fault::new(qz1_status::Scheme, "unknown kind of gate (expected a QZ1_GATE_ constant)")),
    }
}

fn plan_of<E: Element>(experts: &Experts<'_>, of: &qz1_experts_config) -> Result<ExpertsPlan, Fault> {
    let rows = match of.rows {
        QZ1_EXPERT_ROWS_INT8 => ExpertRows::Int8,
        QZ1_EXPERT_ROWS_FLOAT => ExpertRows::Float(Bf16Parts::default()),
        _ => {
            return Err(Fault::new(
                qz1_status::Scheme,
                "unknown kind of expert rows (expected a QZ1_EXPERT_ROWS_ constant)",
            ));
        }
    };
    let gate = gate(of.gate, [of.alpha, of.limit])?;
    Ok(ExpertsPlan::new::<E>(experts, token(of.isa)?, rows, gate, of.tokens, of.top_k)?)
}

/// Creates a handle for calls of these experts, with all the memory that they need for any routing. It must be freed by
/// `qz1_experts_free`. If `workspace_bytes` is not null, the size of that memory is written there. On error, `out` is
/// set to null. The handle keeps no reference to the experts, so weights with the same layouts but different values may
/// be passed to `qz1_experts_run`.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_experts_new(
    experts: *const qz1_expert,
    count: usize,
    config: *const qz1_experts_config,
    workspace_bytes: *mut usize,
    out: *mut *mut qz1_experts,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        memory::make(scope, out, || {
            let bytes = match workspace_bytes.is_null() {
                true => None,
                false => Some(scope.value(workspace_bytes, "the size of the workspace")?),
            };
            let config = scope.read(config, "the configuration")?;
            let experts = self::experts(scope, experts, count)?;
            let experts = Experts::new(&experts)?;
            let plan = by_kind!(config.kind, plan_of(&experts, &config))?;
            let mut workspace = ExpertsWorkspace::default();
            workspace.reserve(&plan)?;
            if let Some(bytes) = bytes {
                bytes.put(plan.workspace_bytes());
            }
            Ok(qz1_experts { plan, workspace })
        })
    })
}

/// Frees a handle; null is allowed.
///
/// # Safety
/// The handle must come from `qz1_experts_new` and be freed only once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_experts_free(handle: *mut qz1_experts) {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { memory::free(handle) }
}

/// `out[t] = Σ_e w[t, e] · down_e(act(gate_e(x[t]), up_e(x[t])))`, summed in the order of expert indices. `x` is
/// `[tokens, hidden]`; `out` has the same shape, is f32 and is overwritten; tokens without experts get zeros. Results
/// are bit-identical to separate products, for any number of threads. If `for_each` fails, `out` may be partly written.
///
/// # Safety
/// Same as for `qz1_layout_of`; no other thread may use the handle during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_experts_run(
    handle: *mut qz1_experts,
    experts: *const qz1_expert,
    count: usize,
    x: *const qz1_values,
    routing: *const qz1_routing,
    out: *mut f32,
    out_len: usize,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let handle = scope.handle(handle, "the handle")?;
        let out = scope.output(out, out_len, "the output")?;
        let (x, routing) = (scope.read(x, "the activations")?, scope.read(routing, "the routing")?);
        let numbers = scope.slice(routing.experts, routing.experts_len, "the expert numbers")?;
        let weights = scope.slice(routing.weights, routing.weights_len, "the expert weights")?;
        let routing = Routing { top_k: routing.top_k, experts: numbers, weights };
        let threads = Threads::new(scope, parallel)?;
        let experts = self::experts(scope, experts, count)?;
        let experts = Experts::new(&experts)?;
        by_kind!(x.kind, run_of(scope, handle, &experts, x, &routing, out.slice(), &threads))?;
        threads.finish()
    })
}

/// # Safety
/// Same as for [`Scope::slice`]; the values are of type `E`.
unsafe fn run_of<E: Element>(
    scope: &Scope,
    handle: &mut qz1_experts,
    experts: &Experts<'_>,
    x: qz1_values,
    routing: &Routing<'_>,
    out: &mut [f32],
    threads: &Threads,
) -> Result<(), Fault> {
    // SAFETY: the safety contract of this function covers the values.
    let x = unsafe { scope.one_of_many(x.data.cast::<E>(), x.len, "the activations")? };
    Ok(experts.run(&handle.plan, x, routing, &mut handle.workspace, out, threads)?)
}
