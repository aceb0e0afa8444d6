//! Estimates how long a plan will take: operations counted from shapes, divided by rates that are measured on this
//! machine.

use std::time::Instant;

use super::{Action, PassPlan, Plan};
use crate::checkpoint::Dtype;
use crate::digest::sha256_hex;
use crate::model::{Model, WeightBody, multiply};
use crate::quantize::{SourceRows, quantize_tensor};
use crate::round::LayerInputs;
use crate::transform::Workload;
use crate::{Error, Result};

/// The cost of reading, hashing, writing and reading back a byte, relative to that of hashing it once.
pub(crate) const PASSES: f64 = 2.0;

/// The rates of this machine per second, on the threads of the current rayon pool.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Floating-point operations of a large matrix product.
    pub operations: f64,
    /// Weights rounded to nearest.
    pub rounded: f64,
    /// Bytes hashed by one thread.
    pub hashed: f64,
}

impl Rates {
    /// Measures the rates, which takes a fraction of a second.
    ///
    /// # Errors
    /// [`Error::Internal`] if this crate has a bug.
    pub fn measure() -> Result<Self> {
        const SIDE: usize = 1024;
        const WEIGHTS: [usize; 2] = [SIDE, 2048];
        let values: Vec<f32> = (0..SIDE * SIDE).map(|i| (i % 251) as f32 * 1e-3 - 0.1).collect();
        let weight = WeightBody::F32 { shape: [SIDE, SIDE], values: values.clone() };
        let mut out = vec![0.0; SIDE * SIDE];
        let product = best(3, || multiply(&values, &weight, SIDE, &mut out))?;
        let rows: Vec<f32> = values.iter().chain(&values).copied().collect();
        let rounding = best(3, || {
            let scheme = crate::scheme::LinearScheme::default();
            quantize_tensor(SourceRows::Floats(&rows), WEIGHTS, scheme, Dtype::F16, None)
                .map(drop)
                .map_err(|e| Error::Internal(e.to_string()))
        })?;
        let bytes = vec![0x5a; 4 << 20];
        let hashing = best(2, || {
            std::hint::black_box(sha256_hex(&bytes));
            Ok(())
        })?;
        Ok(Self {
            operations: 2.0 * (SIDE * SIDE * SIDE) as f64 / product,
            rounded: (WEIGHTS[0] * WEIGHTS[1]) as f64 / rounding,
            hashed: bytes.len() as f64 / hashing,
        })
    }
}

/// The duration of the fastest run in seconds, after a warm-up run.
fn best(runs: usize, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    run()?;
    let mut best = f64::INFINITY;
    for _ in 0..runs {
        let started = Instant::now();
        run()?;
        best = best.min(started.elapsed().as_secs_f64());
    }
    Ok(best.max(1e-9))
}

impl Plan {
    /// The approximate duration in seconds of one run of all these plans for a model, on an otherwise idle machine
    /// whose disk keeps up.
    pub fn seconds(plans: &[Self], model: &Model, rates: Rates) -> f64 {
        let Some(first) = plans.first() else { return 0.0 };
        let mut operations = 0.0;
        let mut rounded = 0.0;
        if first.needs_text() {
            // Ranges are gathered in a separate pass, before the pass of a search.
            let needs_states = first.transforms().iter().any(|t| t.needs(&first.settings).states);
            let again = if first.needs_ranges() && needs_states && !first.is_forward() { 2.0 } else { 1.0 };
            operations += again * first.forward_operations(model);
        }
        for plan in plans.iter().filter(|plan| !plan.is_forward()) {
            for transform in plan.transforms() {
                operations += plan.in_all_blocks(model, |work| transform.work(work).operations);
                rounded += plan.in_all_blocks(model, |work| transform.work(work).rounded);
            }
            if let Some(inputs) = plan.method.rounding.inputs(&plan.settings) {
                operations += plan.rounding_operations(model, inputs);
            }
        }
        let mut bytes = 0.0;
        for plan in plans {
            let weights = |e: &&super::PlanEntry| matches!(e.action, Action::Quantize { .. });
            rounded += plan.entries.iter().filter(weights).map(|e| e.info.elements() as f64).sum::<f64>();
            bytes += (plan.input_bytes() + plan.output_bytes()) as f64;
        }
        operations / rates.operations + rounded / rates.rounded + PASSES * bytes / rates.hashed
    }

    /// The operations for rounding all blocks, and for running a block in stages instead of one pass.
    fn rounding_operations(&self, model: &Model, inputs: LayerInputs) -> f64 {
        let again = match inputs {
            // Spans need a pass of the float model too.
            LayerInputs::Quantized if PassPlan::new(self, false).first.is_some() => 1.75,
            LayerInputs::Quantized => 0.75,
            LayerInputs::Float => 0.0,
        };
        let of_block = |work: &Workload<'_>| self.method.rounding.operations(work);
        self.in_all_blocks(model, of_block) + again * self.forward_operations(model)
    }

    fn forward_operations(&self, model: &Model) -> f64 {
        self.in_all_blocks(model, |work| work.operations_of(|node| self.passes_through(work.graph, node)))
    }

    fn in_all_blocks(&self, model: &Model, of_block: impl Fn(&Workload<'_>) -> f64) -> f64 {
        let kinds = model.architecture().blocks.kinds_in(self.blocks());
        kinds.map(|kind| kind.layers as f64 * of_block(&self.workload(kind))).sum()
    }
}
