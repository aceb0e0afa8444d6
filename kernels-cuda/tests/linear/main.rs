//! The linear kernels on the interpreter, compared with the reference: results, independence, cost.

mod budgets;
#[path = "../cases/mod.rs"]
mod cases;
mod experts;
mod floating_point;
mod independence;
mod machine;
mod packing;
mod planted;
mod problem;
mod results;
#[path = "../support/mod.rs"]
mod support;

use quant_kernels_cuda::linear::PlanLimits;

/// An A10: its small shared memory allows only a short ring, which wraps around early.
const DEVICE: PlanLimits =
    PlanLimits { shared_of_block: 101_376, shared_of_multiprocessor: 102_400, multiprocessors: 72 };
