//! The path itself: one block at a time, read, observed, rewritten, rounded, packed, written.
//!
//! Memory holds one block, the hidden states of the batch, and one linear widened to `f32`,
//! whatever the number of layers. Methods without a transform need not even the block: their
//! linears stream through one at a time.

mod conveyor;
mod finish;
mod report;
mod tensor;

use std::collections::BTreeMap;
use std::ops::Range;

pub use finish::{REPORT, add_companions, companion_bytes, fingerprint, quantized_config};
pub use report::{CalibrationReport, QuantReport, SourceDigest, TensorReport, WeightError};

use self::conveyor::Conveyor;
use crate::calibrate::{HiddenStates, TokenWindows};
use crate::model::{Model, NodeId};
use crate::recipe::{Action, Plan, PlanEntry};
use crate::transform::{BlockTask, Grid, Rewrite, Transform};
use crate::{CancelToken, Error, Event, Observer, Result, TensorSink};

/// Everything a run is made of, but for where the result goes.
pub struct Job<'a> {
    /// What is quantized.
    pub model: &'a Model,
    /// What happens to each of its tensors.
    pub plan: &'a Plan,
    /// The calibration batch; required by methods with a transform.
    pub windows: Option<&'a TokenWindows>,
    /// Told of every block.
    pub observer: &'a dyn Observer,
    /// Stops the run between tensors.
    pub cancel: &'a CancelToken,
}

/// Runs a plan: every tensor it names goes to `sink`, which must expect [`Plan::outputs`].
///
/// What `sink` has complete from an interrupted run is not computed again, and the result is the
/// same, byte for byte.
///
/// # Errors
/// When a tensor cannot be read or written, holds values that cannot be quantized, or the token
/// pulls ([`Error::Interrupted`]; what was committed stays).
pub fn quantize(job: &Job<'_>, sink: &mut dyn TensorSink) -> Result<QuantReport> {
    let layers = job.model.architecture().layers;
    let spans = spans(job.plan, layers);
    job.observer.event(&Event::StageStarted { stage: "quantize", unit: "block", units: layers as u64 });
    let mut conveyor = Conveyor::new(job, sink)?;
    let mut hidden = match (job.plan.method.transform, job.windows) {
        (None, _) => None,
        (Some(transform), Some(windows)) => Some(Batch {
            transform,
            states: HiddenStates::embed(job.model, windows)?,
            rope: job.model.rope(windows.length())?,
        }),
        (Some(_), None) => {
            return Err(Error::usage(
                format!("method `{}` needs a calibration text", job.plan.method.name),
                "give one with --calibration",
            ));
        }
    };
    let last_incomplete =
        (0..layers).rev().find(|&l| !conveyor.is_complete(&job.plan.entries[spans[l + 1].clone()]));
    for (index, span) in spans.iter().enumerate() {
        let entries = &job.plan.entries[span.clone()];
        let layer = index.checked_sub(1).filter(|l| *l < layers);
        let Some(batch) = &mut hidden else {
            conveyor.take(span.clone(), layer, &Rewrite::default(), job.plan.entries.len())?;
            continue;
        };
        // A search takes long: what was done before it should survive it.
        conveyor.drain()?;
        let rewrite = match layer {
            // Past the last block that is left to do, hidden states are of no use.
            Some(layer) if Some(layer) <= last_incomplete => {
                let advance = Some(layer) < last_incomplete;
                batch.block(job, layer, entries, conveyor.is_complete(entries), advance)?
            }
            _ => Rewrite::default(),
        };
        conveyor.take(span.clone(), layer, &rewrite, span.end)?;
    }
    let report = conveyor.finish()?;
    job.observer.event(&Event::StageDone);
    Ok(report)
}

/// The entries before the blocks, of each block, and after them.
fn spans(plan: &Plan, layers: usize) -> Vec<Range<usize>> {
    let layer_of = |entry: &PlanEntry| entry.layer;
    let first = plan.entries.iter().position(|e| layer_of(e).is_some()).unwrap_or(plan.entries.len());
    let mut spans = Vec::with_capacity(layers + 2);
    spans.push(0..first);
    let mut at = first;
    for layer in 0..layers {
        let end = plan.entries[at..].iter().position(|e| layer_of(e) != Some(layer));
        let end = end.map_or(plan.entries.len(), |offset| at + offset);
        spans.push(at..end);
        at = end;
    }
    spans.push(at..plan.entries.len());
    spans
}

/// The calibration batch on its way through the blocks.
struct Batch {
    transform: &'static dyn Transform,
    states: HiddenStates,
    rope: std::sync::Arc<crate::model::RopeTable>,
}

impl Batch {
    /// Searches block `layer` unless its result is there already, and moves on to the next one.
    fn block(
        &mut self,
        job: &Job<'_>,
        layer: usize,
        entries: &[PlanEntry],
        complete: bool,
        advance: bool,
    ) -> Result<Rewrite> {
        let block = job.model.block(layer, &self.rope)?;
        if !complete {
            let prefix = job.model.architecture().in_block(layer, "");
            let task = BlockTask {
                prefix: &prefix,
                block: &block,
                grids: &grids(entries),
                norm_dtypes: &norm_dtypes(job.model, layer)?,
                search: job.plan.search,
                cancel: job.cancel,
            };
            return self.transform.search(&task, &mut self.states);
        }
        if advance {
            self.states.advance(&block, job.cancel)?;
        }
        Ok(Rewrite::default())
    }
}

fn grids(entries: &[PlanEntry]) -> BTreeMap<NodeId, Grid> {
    let of = |entry: &PlanEntry| match entry.action {
        Action::Quantize { node, scheme, scale_dtype, .. } => Some((node, Grid { scheme, scale_dtype })),
        _ => None,
    };
    entries.iter().filter_map(of).collect()
}

fn norm_dtypes(model: &Model, layer: usize) -> Result<BTreeMap<NodeId, crate::checkpoint::Dtype>> {
    let architecture = model.architecture();
    architecture
        .block
        .norms()
        .map(|(node, name, _)| {
            let tensor = format!("{}.weight", architecture.in_block(layer, name));
            Ok((node, model.source().require(&tensor)?.dtype))
        })
        .collect()
}
