//! GPTQ as a rounding: what other stages need to know about it. [`quantize::gptq`](crate::quantize::gptq) has the
//! algorithm.

mod run;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{BlockRounding, LayerInputs, Rounding, RoundingMemory, RoundingTask, StagedRounding, States};
use crate::Result;
use crate::calibrate::HiddenStates;
use crate::keys::StepKey;
use crate::model::NodeId;
use crate::quantize::gptq::{ActOrder, GptqSettings, Hessian};
use crate::transform::{TransformSettings, Workload};

/// Rows of a weight that a thread of the solver processes at a time.
const SOLVED_ROWS: usize = 128;

/// Rounds column by column; later columns compensate the errors of earlier ones. Its settings are [`GptqSettings`].
#[derive(Debug, Clone, Copy)]
pub struct Gptq;

/// The result of GPTQ for a linear.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GptqRecord {
    /// The mean squared error of the linear's output after rounding, over outputs and tokens, including the damping
    /// term.
    pub loss: f64,
    /// The damping that was used, as a fraction of the mean of the Hessian's diagonal. It exceeds the requested damping
    /// if the Hessian was not positive definite with that, or if a wide Hessian, which is factored in `f32`, needs
    /// more.
    pub damping: f64,
    /// The number of input channels that were always 0.
    pub dead_channels: usize,
    /// The order in which columns were rounded.
    pub act_order: ActOrder,
}

fn settings(all: &TransformSettings) -> GptqSettings {
    all.steps.get()
}

/// The linears that are rounded, with their shapes.
fn rounded<'a>(work: &'a Workload<'_>) -> impl Iterator<Item = (NodeId, [usize; 2])> + 'a {
    let linears = work.graph.linears().map(|(id, _, shape, _)| (id, shape));
    linears.filter(|(id, _)| work.schemes.contains_key(id))
}

/// Linears that read the same value, for the estimate of memory.
#[derive(Default)]
struct Stage {
    width: u64,
    /// The largest memory for a linear of the stage while it is solved.
    solved: u64,
    linears: Vec<NodeId>,
}

impl Rounding for Gptq {
    fn name(&self) -> &'static str {
        "gptq"
    }

    fn summary(&self) -> &'static str {
        "rounds column by column, and compensates each error in the remaining columns, on a calibration text"
    }

    fn keys(&self) -> Vec<StepKey> {
        GptqSettings::keys()
    }

    fn set(&self, key: &str, value: &Value, all: &mut TransformSettings) -> Result<()> {
        let mut own = settings(all);
        own.set(key, value)?;
        all.steps.set(own);
        Ok(())
    }

    fn reset(&self, all: &mut TransformSettings) {
        all.steps.set(GptqSettings::default());
    }

    fn described(&self, all: &TransformSettings) -> Map<String, Value> {
        settings(all).described().into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    }

    fn check(&self, all: &TransformSettings) -> Result<()> {
        settings(all).check()
    }

    fn inputs(&self, all: &TransformSettings) -> Option<LayerInputs> {
        Some(settings(all).inputs)
    }

    fn span_blocks(&self, all: &TransformSettings) -> Option<usize> {
        settings(all).span_blocks
    }

    fn independent_blocks(&self) -> Option<&'static str> {
        Some("set ‹span_blocks›, for example to 4, or ‹layer_inputs=float›")
    }

    /// On the inputs of the quantized model, experts are processed one at a time.
    fn takes_experts_apart(&self, all: &TransformSettings) -> bool {
        settings(all).inputs == LayerInputs::Quantized
    }

    fn rounds_experts_apart(&self) -> bool {
        true
    }

    fn memory(&self, work: &Workload<'_>) -> Vec<RoundingMemory> {
        // Codes, packed codes, and the rows that each thread is processing.
        let solved =
            |[n, k]: [usize; 2]| (2 * n * k + rayon::current_num_threads() * SOLVED_ROWS * 5 * k) as u64;
        let mut stages: BTreeMap<NodeId, Stage> = BTreeMap::new();
        for (id, shape) in rounded(work) {
            let stage = stages.entry(work.graph.nodes()[id].inputs[0]).or_default();
            stage.width = shape[1] as u64;
            stage.solved = stage.solved.max(solved(shape));
            stage.linears.push(id);
        }
        let kept = |stage: &Stage| Hessian::kept_bytes(stage.width);
        let peak = |stage: &Stage| Hessian::peak_bytes(stage.width);
        match settings(work.settings).inputs {
            LayerInputs::Quantized => {
                let of = |stage: Stage| RoundingMemory {
                    gathering: kept(&stage),
                    solving: peak(&stage).saturating_add(stage.solved),
                    rounds: Some(stage.linears),
                };
                stages.into_values().map(of).collect()
            }
            LayerInputs::Float => {
                let all: u64 = stages.values().map(kept).sum();
                let largest = |bytes: &dyn Fn(&Stage) -> u64| stages.values().map(bytes).max().unwrap_or(0);
                let factor = largest(&peak).saturating_sub(largest(&kept));
                let solving = all.saturating_add(factor).saturating_add(largest(&|stage| stage.solved));
                vec![RoundingMemory { gathering: all, solving, rounds: None }]
            }
        }
    }

    /// The operations for Hessians, their factors and the solves.
    fn operations(&self, work: &Workload<'_>) -> f64 {
        let graph = work.graph;
        let mut widths = BTreeMap::new();
        let mut operations = 0.0;
        for (id, [n, k]) in rounded(work) {
            widths.insert(graph.nodes()[id].inputs[0], k as f64);
            operations += n as f64 * (k as f64).powi(2);
        }
        for (&value, k) in &widths {
            // The operations of the factorization count twice, because f64 has half the throughput.
            operations += work.tokens() * work.share_of_tokens(value) * k * k + 4.0 / 3.0 * k.powi(3);
        }
        operations
    }

    fn blocks(&self, all: &TransformSettings) -> BlockRounding {
        BlockRounding::Compensated { keys: GptqSettings::KEYS_OF_BLOCKS, settings: settings(all) }
    }

    fn begin<'a>(
        &self,
        task: RoundingTask<'a>,
        (which, states): (States, &'a mut HiddenStates),
        advance: bool,
    ) -> Result<Box<dyn StagedRounding + 'a>> {
        Ok(Box::new(run::GptqRun::new(task, which, states, advance)?))
    }
}
