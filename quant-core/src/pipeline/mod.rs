//! The pipeline: each block in turn is read, observed, rewritten, rounded, packed and written.
//!
//! Memory holds at most one block and the hidden states of the batch, however many layers the model has. Methods that
//! do not need whole blocks stream their linears through one at a time.

mod batch;
mod conveyor;
mod decision;
mod findings;
mod finish;
mod program;
mod read_back;
mod records;
mod report;
mod search;
mod source;
mod states;
mod tensor;

use std::collections::BTreeMap;
use std::sync::Mutex;

pub use crate::round::GptqRecord;
pub use findings::SharedSearches;
pub use finish::{REPORT, add_companions, companion_bytes, fingerprint, quantized_config};
pub use program::Program;
pub use report::{CalibrationReport, InputReport, QuantReport, SourceDigest, TensorReport, WeightError};
pub(crate) use search::{Context as SearchContext, InputRanges, Searched, input_ranges, search_rewrites};
pub(crate) use source::report_of;
pub use states::{SavedStates, StateFiles};
pub(crate) use states::{check_states, sources_of};

use self::batch::{Batch, BlockDone};
use self::conveyor::{Conveyor, SpanWork};
use self::decision::Decision;
use self::source::{Hashes, ReadWeights};
use self::states::Saver;
use crate::calibrate::{ChannelMaxima, TokenWindows};
use crate::model::Model;
use crate::recipe::Plan;
use crate::{CancelToken, Error, Event, Observer, Result, TensorSink};
use quant_formats::timed;

/// The name of the step that rounds the remaining weights, and packs and writes all tensors.
const WRITE: &str = "round and write";

/// A run, except for the destination of its output.
pub struct Job<'a> {
    /// The model to quantize.
    pub model: &'a Model,
    /// The plan, which determines the action for each of the model's tensors.
    pub plan: &'a Plan,
    /// The calibration batch; required by plans that use one.
    pub windows: Option<&'a TokenWindows>,
    /// Receives the channel maxima of the linears' inputs in the float model.
    pub maxima: Option<&'a Mutex<ChannelMaxima>>,
    /// What earlier runs on this model and batch have found, and where this run adds what it finds.
    pub searches: Option<&'a SharedSearches<'a>>,
    /// Receives the events of the run.
    pub observer: &'a dyn Observer,
    /// Cancels the run: checked between tensors, and during searches.
    pub cancel: &'a CancelToken,
}

/// Runs a plan: every tensor it names is written to `sink`, which must expect [`Plan::outputs`].
///
/// Tensors that an interrupted run has completed in `sink` are not recomputed, and the result is byte-identical.
///
/// # Errors
/// When a tensor cannot be read or written, holds values that cannot be quantized, or the run is cancelled
/// ([`Error::Interrupted`]; committed tensors stay).
pub fn quantize_job(job: &Job<'_>, sink: &mut dyn TensorSink) -> Result<QuantReport> {
    let mut reports = quantize_each(std::slice::from_ref(job), vec![sink])?;
    reports.pop().ok_or_else(|| Error::Internal("the run produced no report".into()))
}

/// Runs several plans for one model, such as those for several formats, each into the sink at the same position. The
/// result of each is byte-identical to that of [`quantize_job`] alone. The batch passes through the model only once, unless
/// the rounding [needs states](crate::round::Rounding::inputs).
///
/// # Errors
/// As [`quantize_job`], and [`Error::Internal`] unless all jobs have the same model, batch, method and search, and one sink
/// each.
pub fn quantize_each(jobs: &[Job<'_>], sinks: Vec<&mut dyn TensorSink>) -> Result<Vec<QuantReport>> {
    quantize_each_with(jobs, sinks, &StateFiles::default())
}

/// Runs a plan over some of a model's blocks ([`Plan::part`]). The hidden states come from the file that the job over
/// the preceding blocks wrote, and those after the last block are written for the next job.
///
/// The jobs over the parts of a plan, run in order, write the same bytes as [`quantize_job`].
///
/// # Errors
/// As [`quantize_job`]; [`Error::Usage`] when a job that begins inside the model has no states; [`Error::InputFile`] if the
/// states belong to a different run or are damaged.
pub fn quantize_part(job: &Job<'_>, sink: &mut dyn TensorSink, states: &StateFiles) -> Result<QuantReport> {
    let mut reports = quantize_each_with(std::slice::from_ref(job), vec![sink], states)?;
    reports.pop().ok_or_else(|| Error::Internal("the run produced no report".into()))
}

/// Same as [`quantize_part`]. Returns the SHA-256 of the weights that a [part of a block](Plan::only_experts) has read,
/// but does not write, by name.
pub(crate) fn quantize_unit(
    job: &Job<'_>,
    sink: &mut dyn TensorSink,
    states: &StateFiles,
) -> Result<BTreeMap<String, String>> {
    Ok(run_each(std::slice::from_ref(job), vec![sink], states)?.1)
}

/// Like [`quantize_each`], with control over where hidden states are kept: in files instead of memory, and saved
/// between blocks so that a run can be resumed. The output does not depend on it.
///
/// # Errors
/// As [`quantize_each`] and [`quantize_part`].
pub fn quantize_each_with(
    jobs: &[Job<'_>],
    sinks: Vec<&mut dyn TensorSink>,
    states: &StateFiles,
) -> Result<Vec<QuantReport>> {
    Ok(run_each(jobs, sinks, states)?.0)
}

/// The reports, and the hashes of weights that a part has read, but does not write.
type Finished = (Vec<QuantReport>, BTreeMap<String, String>);

fn run_each(jobs: &[Job<'_>], sinks: Vec<&mut dyn TensorSink>, states: &StateFiles) -> Result<Finished> {
    let Some(job) = jobs.first() else { return Ok(Finished::default()) };
    if sinks.len() != jobs.len() || !jobs.iter().all(|other| other.shares_pass_with(job)) {
        return Err(Error::Internal("the jobs of a run differ in more than their grids".into()));
    }
    if job.plan.method.rounding.inputs(&job.plan.settings).is_some() && jobs.len() > 1 {
        // If blocks are rounded in stages, the states depend on the grids, so jobs cannot share a pass of the batch.
        let jobs = jobs
            .iter()
            .zip(sinks)
            .map(|(job, sink)| quantize_each_with(std::slice::from_ref(job), vec![sink], states));
        return Ok((jobs.collect::<Result<Vec<_>>>()?.concat(), BTreeMap::new()));
    }
    let layers = job.model.architecture().layers;
    let blocks = job.plan.blocks();
    let units = (blocks.len() * jobs.len()) as u64;
    job.observer.event(&Event::StageStarted { stage: "quantize", unit: "block", units });
    let conveyors = jobs.iter().zip(sinks).map(|(job, sink)| Conveyor::new(job, sink, jobs.len() > 1));
    let mut conveyors = conveyors.collect::<Result<Vec<_>>>()?;
    let resumed =
        conveyors.iter().map(|c| blocks.clone().filter(|layer| c.is_complete(layer + 1)).count() as u64);
    match resumed.sum() {
        0 => {}
        units => job.observer.event(&Event::Resumed { units }),
    }
    let needs_text = jobs.iter().any(|job| job.plan.needs_text());
    let incomplete = blocks.clone().find(|layer| conveyors.iter().any(|c| !c.is_complete(layer + 1)));
    let is_done = incomplete.is_none() && job.maxima.is_none() && states.after.is_none();
    let (mut hidden, first) = match (job.plan.needs_blocks(), job.windows) {
        (false, _) => (None, 0),
        (true, Some(_)) if is_done => (None, 0),
        (true, windows) if windows.is_some() || !needs_text => {
            // If all blocks are complete, a pass for channel maxima or for the states after the blocks begins at the
            // first.
            let incomplete = incomplete.unwrap_or(blocks.start);
            let (batch, first) = timed(job.observer, "embed", || Batch::new(job, states, incomplete))?;
            (Some(batch), first)
        }
        (true, _) => {
            return Err(Error::usage(
                format!("method `{}` needs a calibration text", job.plan.method.name),
                "set ‹calibration›",
            ));
        }
    };
    // Hidden states are not needed after the last incomplete block.
    let last_incomplete = match (job.maxima, &states.after) {
        (None, None) => blocks.clone().rev().find(|l| conveyors.iter().any(|c| !c.is_complete(l + 1))),
        _ => blocks.clone().last(),
    };
    let mut saver = Saver::new(states, job.cancel)?;
    let outcome = (0..layers + 2).try_for_each(|span| {
        let layer = span.checked_sub(1).filter(|l| *l < layers);
        let hashes = Hashes::default();
        let Some(batch) = &mut hidden else {
            let nothing = Decision::default();
            let work = SpanWork::new(&nothing, ReadWeights::of(None, false, &hashes));
            timed(job.observer, WRITE, || {
                conveyors.iter_mut().try_for_each(|c| c.take(span, layer, &work, layers + 1))
            })?;
            return Ok(());
        };
        // A search takes long, so earlier results are written first in case it is interrupted.
        timed(job.observer, WRITE, || conveyors.iter_mut().try_for_each(Conveyor::drain))?;
        let BlockDone { block, mut decisions } = match layer {
            Some(layer) if layer >= first && blocks.contains(&layer) && Some(layer) <= last_incomplete => {
                if layer > first && conveyors.iter().any(|c| !c.is_complete(span)) {
                    timed(job.observer, "save", || saver.save(job, layer, batch.streams()));
                }
                let open: Vec<usize> = (0..jobs.len()).filter(|&i| !conveyors[i].is_complete(span)).collect();
                let advance = Some(layer) < last_incomplete || states.after.is_some();
                batch.block(&mut conveyors, span, layer, &open, advance)?
            }
            _ => BlockDone::default(),
        };
        timed(job.observer, WRITE, || {
            conveyors.iter_mut().enumerate().try_for_each(|(i, conveyor)| {
                let decision = decisions.remove(&i).unwrap_or_default();
                let is_last = i + 1 == jobs.len();
                let work = SpanWork::new(&decision, ReadWeights::of(block.as_ref(), !is_last, &hashes));
                conveyor.take(span, layer, &work, span)
            })
        })
    });
    if let Err(error) = outcome {
        if matches!(error, Error::Interrupted) {
            conveyors.iter_mut().for_each(Conveyor::keep);
        }
        return Err(error);
    }
    if let (Some(path), Some(batch)) = (&states.after, &hidden) {
        batch.save(job, blocks.end, path, &states.depends_on)?;
    }
    let reports = timed(job.observer, WRITE, || {
        conveyors.into_iter().map(Conveyor::finish).collect::<Result<Vec<_>>>()
    })?;
    if let Some(saved) = &states.saved {
        // The saved states take disk space and cannot be used by another job.
        let _ = std::fs::remove_file(&saved.path);
    }
    job.observer.event(&Event::StageDone);
    Ok((reports, hidden.map(Batch::into_sources).unwrap_or_default()))
}

impl Job<'_> {
    fn shares_pass_with(&self, other: &Self) -> bool {
        std::ptr::eq(self.model, other.model)
            && self.plan.method == other.plan.method
            && self.plan.settings == other.plan.settings
            && self.plan.needs_ranges() == other.plan.needs_ranges()
            && self.plan.blocks() == other.plan.blocks()
            && self.windows.map(std::ptr::from_ref) == other.windows.map(std::ptr::from_ref)
    }
}
