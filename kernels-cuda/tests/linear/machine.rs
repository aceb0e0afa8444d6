//! Runs the compiled PTX of a variant on the interpreter, with the bytes of a problem.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use half::{bf16, f16};
use quant_kernels_cuda::compile::Source;
use quant_kernels_cuda::layout::Section;
use quant_kernels_cuda::linear::{LinearPlan, LinearVariant, Output};

use crate::problem::Problem;
use crate::support::machine::{Argument, Error, Launch, Memory, Module, Options, Report, ptx_of};

#[track_caller]
pub fn ready() -> bool {
    crate::support::has_nvrtc()
}

pub struct Outcome {
    /// `[m, n]`
    pub values: Vec<f32>,
    pub report: Report,
}

static MODULES: Mutex<Option<HashMap<String, Arc<Module>>>> = Mutex::new(None);

/// Compiled only once.
pub fn module(variant: &LinearVariant) -> Arc<Module> {
    let name = variant.name() + &format!("{:?}", variant.shape);
    let find = |made: Option<Arc<Module>>| {
        let mut modules = MODULES.lock().unwrap_or_else(PoisonError::into_inner);
        let modules = modules.get_or_insert_default();
        if let Some(made) = made {
            modules.insert(name.clone(), made);
        }
        modules.get(&name).cloned()
    };
    find(None).or_else(|| find(Some(Arc::new(compiled(variant, None))))).unwrap()
}

pub fn compiled(variant: &LinearVariant, source: Option<&'static Source>) -> Module {
    let mut kernel = variant.compiled();
    if let Some(source) = source {
        kernel.source = source;
    }
    Module::parse(&ptx_of(&kernel)).unwrap()
}

pub fn launch(problem: &Problem, plan: &LinearPlan) -> Vec<f32> {
    run(problem, plan, &module(&plan.work.variant), &Options::default()).unwrap().values
}

pub fn launch_with(problem: &Problem, plan: &LinearPlan, options: &Options) -> Outcome {
    run(problem, plan, &module(&plan.work.variant), options).unwrap()
}

/// The addresses of the sections. Each section is a separate buffer, so that reads beyond one are detected.
pub fn sections(memory: &mut Memory, problem: &Problem) -> [u64; 5] {
    let names = ["codes", "parameters", "row scales", "row zeros", "row sums"];
    let all = [Section::Codes, Section::Parameters, Section::RowScales, Section::RowZeros, Section::RowSums];
    std::array::from_fn(|i| {
        let end = all.get(i + 1).map_or(problem.layout.bytes(), |&to| problem.layout.section(to));
        let bytes = &problem.packed[problem.layout.section(all[i])..end];
        if bytes.is_empty() { 0 } else { memory.buffer_from(names[i], bytes, 256) }
    })
}

/// The address of f32 values, or 0 if there are none.
pub fn floats(memory: &mut Memory, name: &str, values: &[f32]) -> u64 {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    if bytes.is_empty() { 0 } else { memory.buffer_from(name, &bytes, 4) }
}

pub fn values_of(bytes: &[u8], output: Output) -> Vec<f32> {
    let each = if output == Output::F32 { 4 } else { 2 };
    let values = bytes.chunks_exact(each).map(|b| match (output, b) {
        (Output::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (Output::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (_, b) => f32::from_le_bytes(b.try_into().unwrap()),
    });
    values.collect()
}

/// If there is a workspace, runs the module twice: it must be reusable as the first launch left it.
pub fn run(
    problem: &Problem,
    plan: &LinearPlan,
    module: &Module,
    options: &Options,
) -> Result<Outcome, Error> {
    let mut memory = Memory::new();
    let [n, k] = problem.case.shape;
    let [codes, parameters, row_scales, row_zeros, row_sums] = sections(&mut memory, problem);
    let x = memory.buffer_from("x", &problem.x, 16);
    let x_scales = floats(&mut memory, "x scales", &problem.x_scales);
    let bias = floats(&mut memory, "bias", problem.bias.as_deref().unwrap_or_default());
    let each = plan.work.variant.scheme.output_bytes();
    let (mut partials, mut tickets) = (0, 0);
    if plan.work.workspace_bytes > 0 {
        partials = memory.buffer("partials", plan.work.workspace_bytes, 256);
        tickets = memory.buffer_from("tickets", &vec![0; plan.work.ticket_bytes], 256);
    }
    let mut outcome = None;
    for _ in 0..if plan.work.workspace_bytes > 0 { 2 } else { 1 } {
        let out = memory.buffer("out", problem.m * n * each, each);
        let launch = Launch {
            grid: plan.work.launch.grid,
            block: [plan.work.launch.block, 1, 1],
            dynamic_shared: plan.work.launch.shared_bytes,
            arguments: vec![
                Argument::U64(codes),
                Argument::U64(parameters),
                Argument::U64(row_scales),
                Argument::U64(row_zeros),
                Argument::U64(row_sums),
                Argument::U64(x),
                Argument::U64(x_scales),
                Argument::U64(bias),
                Argument::U64(out),
                Argument::U64(partials),
                Argument::U64(tickets),
                Argument::U32(problem.m as u32),
                Argument::U32(n as u32),
                Argument::U32(k as u32),
                Argument::U32(problem.x_stride as u32),
                Argument::U32(n as u32),
                Argument::U32(plan.work.chunks),
                Argument::U32(u32::from(problem.layout.zero_point().unwrap_or(0))),
                Argument::U32(problem.x_zero as u32),
            ],
        };
        let report = module.launch("linear", &launch, &mut memory, options)?;
        // Fails if a result was not written.
        let bytes = memory.bytes(out)?;
        let values = values_of(&bytes, problem.output);
        if let Some(Outcome { values: before, .. }) = &outcome {
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(before), bits(&values), "the second launch gives different results");
        }
        outcome = Some(Outcome { values, report });
    }
    if plan.work.workspace_bytes > 0 {
        assert!(memory.bytes(tickets)?.iter().all(|&b| b == 0), "tickets were not reset to 0");
    }
    Ok(outcome.unwrap())
}
