//! The linear kernels on the interpreter, against the reference: results, what they may not depend on, what they cost.

mod budgets;
#[path = "../cases/mod.rs"]
mod cases;
mod floating_point;
mod independence;
mod machine;
mod packing;
mod planted;
mod problem;
mod results;
#[path = "../support/mod.rs"]
mod support;

use quant_kernels_cuda::linear::LinearLimits;

/// An A10: with little shared memory a ring is short, and goes round soon.
const DEVICE: LinearLimits =
    LinearLimits { shared_of_block: 101_376, shared_of_multiprocessor: 102_400, multiprocessors: 72 };
