//! The path itself: one block at a time, read, observed, rewritten, rounded, packed, written.
//!
//! Memory holds one block, the hidden states of the batch, and one linear widened to `f32`,
//! whatever the number of layers. Of a block it holds what was needed: a weight is read when something
//! first needs it, once, and goes when it was written. Methods that look at no block have their linears
//! stream through one at a time.

mod batch;
mod conveyor;
mod decision;
mod finish;
mod gptq;
mod program;
mod read_back;
mod report;
mod search;
mod source;
mod states;
mod tensor;

use std::sync::Mutex;

pub use decision::GptqRecord;
pub use finish::{REPORT, add_companions, companion_bytes, fingerprint, quantized_config};
pub use program::Program;
pub use report::{CalibrationReport, InputReport, QuantReport, SourceDigest, TensorReport, WeightError};
pub use states::{SavedStates, StateFiles};

use self::batch::{Batch, BlockDone};
use self::conveyor::{Conveyor, SpanWork};
use self::decision::Decision;
use self::source::{Hashes, ReadWeights};
use self::states::Saver;
use crate::calibrate::{ChannelMaxima, TokenWindows};
use crate::model::Model;
use crate::recipe::{Plan, Rounding};
use crate::{CancelToken, Error, Event, Observer, Result, TensorSink};
use quant_formats::timed;

/// The step of rounding what is not rounded yet, packing it, and writing it.
const WRITE: &str = "round and write";

/// Everything a run is made of, but for where the result goes.
pub struct Job<'a> {
    /// What is quantized.
    pub model: &'a Model,
    /// What happens to each of its tensors.
    pub plan: &'a Plan,
    /// The calibration batch; required by plans that look at one.
    pub windows: Option<&'a TokenWindows>,
    /// Where the maxima of what linears read are kept, of every block that the batch goes through in the float model.
    pub maxima: Option<&'a Mutex<ChannelMaxima>>,
    /// Receives an event for every block.
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
    let mut reports = quantize_each(std::slice::from_ref(job), vec![sink])?;
    reports.pop().ok_or_else(|| Error::Internal("a run without a report".into()))
}

/// Runs several plans for one model, such as those of several containers, each into the sink at the
/// same position. The batch goes through the model once, and each result is what
/// [`quantize`] gives alone, byte for byte.
///
/// # Errors
/// As [`quantize`], and [`Error::Internal`] unless the jobs have model, batch, method and search in
/// common and there is a sink for each.
pub fn quantize_each(jobs: &[Job<'_>], sinks: Vec<&mut dyn TensorSink>) -> Result<Vec<QuantReport>> {
    quantize_each_with(jobs, sinks, &StateFiles::default())
}

/// Runs a plan over some of a model's blocks ([`Plan::part`]): hidden states come from the file that the job over the
/// blocks before it wrote, and those after its last block are written where the next job finds them.
///
/// The jobs over the parts of a plan, one after the other, write what [`quantize`] writes, byte for byte.
///
/// # Errors
/// As [`quantize`]; [`Error::Usage`] when a job that begins inside the model has no states; [`Error::InputFile`] when
/// the states are of another run or damaged.
pub fn quantize_part(job: &Job<'_>, sink: &mut dyn TensorSink, states: &StateFiles) -> Result<QuantReport> {
    let mut reports = quantize_each_with(std::slice::from_ref(job), vec![sink], states)?;
    reports.pop().ok_or_else(|| Error::Internal("a run without a report".into()))
}

/// Like [`quantize_each`], with control over where hidden states are kept: in files instead of memory, and saved between
/// blocks for a resumed run. The output does not depend on it.
///
/// # Errors
/// As [`quantize_each`] and [`quantize_part`].
pub fn quantize_each_with(
    jobs: &[Job<'_>],
    sinks: Vec<&mut dyn TensorSink>,
    states: &StateFiles,
) -> Result<Vec<QuantReport>> {
    let Some(job) = jobs.first() else { return Ok(Vec::new()) };
    if sinks.len() != jobs.len() || !jobs.iter().all(|other| other.shares_pass_with(job)) {
        return Err(Error::Internal("jobs of one run differ in more than their grids".into()));
    }
    if job.plan.method.rounding == Rounding::Gptq && jobs.len() > 1 {
        // What comes out of a block depends on its grids.
        let jobs = jobs
            .iter()
            .zip(sinks)
            .map(|(job, sink)| quantize_each_with(std::slice::from_ref(job), vec![sink], states));
        return Ok(jobs.collect::<Result<Vec<_>>>()?.concat());
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
    let looks = jobs.iter().any(|job| job.plan.needs_text());
    let incomplete = blocks.clone().find(|layer| conveyors.iter().any(|c| !c.is_complete(layer + 1)));
    let (mut hidden, first) = match (job.plan.needs_blocks(), job.windows) {
        (false, _) => (None, 0),
        (true, windows) if windows.is_some() || !looks => {
            let incomplete = incomplete.unwrap_or(blocks.end);
            let (batch, first) = timed(job.observer, "embed", || Batch::new(job, states, incomplete))?;
            (Some(batch), first)
        }
        (true, _) => {
            return Err(Error::usage(
                format!("method `{}` needs a calibration text", job.plan.method.name),
                "give one with ‹calibration›",
            ));
        }
    };
    // Past the last block that is left to do, hidden states are of no use.
    let last_incomplete = match (job.maxima, &states.after) {
        (None, None) => blocks.clone().rev().find(|l| conveyors.iter().any(|c| !c.is_complete(l + 1))),
        _ => blocks.clone().last(),
    };
    let mut saver = Saver::new(states, job.cancel)?;
    for span in 0..layers + 2 {
        let layer = span.checked_sub(1).filter(|l| *l < layers);
        let hashes = Hashes::default();
        let Some(batch) = &mut hidden else {
            let nothing = Decision::default();
            let work = SpanWork::new(&nothing, ReadWeights::of(None, false, &hashes));
            timed(job.observer, WRITE, || {
                conveyors.iter_mut().try_for_each(|c| c.take(span, layer, &work, layers + 1))
            })?;
            continue;
        };
        // A search takes long: what was done before it should survive it.
        timed(job.observer, WRITE, || conveyors.iter_mut().try_for_each(Conveyor::drain))?;
        let BlockDone { block, mut decisions } = match layer {
            Some(layer) if layer >= first && blocks.contains(&layer) && Some(layer) <= last_incomplete => {
                if layer > first && !conveyors.iter().any(|c| c.is_complete(span)) {
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
        })?;
    }
    if let (Some(path), Some(batch)) = (&states.after, &hidden) {
        batch.save(job, blocks.end, path, &states.depends_on)?;
    }
    let reports = timed(job.observer, WRITE, || {
        conveyors.into_iter().map(Conveyor::finish).collect::<Result<Vec<_>>>()
    })?;
    job.observer.event(&Event::StageDone);
    Ok(reports)
}

impl Job<'_> {
    /// Whether two jobs may run on one pass of a batch.
    fn shares_pass_with(&self, other: &Self) -> bool {
        std::ptr::eq(self.model, other.model)
            && self.plan.method == other.plan.method
            && self.plan.settings == other.plan.settings
            && self.plan.needs_ranges() == other.plan.needs_ranges()
            && self.plan.gptq == other.plan.gptq
            && self.plan.blocks() == other.plan.blocks()
            && self.windows.map(std::ptr::from_ref) == other.windows.map(std::ptr::from_ref)
    }
}
