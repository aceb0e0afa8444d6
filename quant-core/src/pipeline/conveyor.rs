//! Tensors on their way to the sink: while one is rounded, the next is read and hashed and the one
//! before is written.

use std::ops::Range;

use serde_json::json;

use super::Job;
use super::decision::Decision;
use super::report::QuantReport;
use super::tensor::{Finished, Source, apply_rewrite, copy, recalled, remembered};
use crate::recipe::{Action, Plan, PlanEntry};
use crate::{Event, Result, TensorSink};

/// Takes the entries of a plan to the sink, span after span, and gathers the report.
///
/// At the end of a span everything is committed. That too happens while the next span's first
/// tensor is worked on, unless [`drain`](Self::drain) asks for it before.
pub(super) struct Conveyor<'a, 'j> {
    job: &'a Job<'j>,
    sink: &'a mut dyn TensorSink,
    /// The entries before the blocks, of each block, and after them.
    spans: Vec<Range<usize>>,
    /// Whether others work on the same blocks.
    among_others: bool,
    report: QuantReport,
    /// The next entry's position and what was read of it.
    ahead: Option<(usize, Result<Source>)>,
    behind: Option<Behind>,
    spare: Vec<u8>,
}

/// A tensor to be written, and the end of the span after it, if it is the last.
struct Behind {
    tensor: Finished,
    end: Option<SpanEnd>,
}

/// The end of the entries of one block, or of those that belong to none.
#[derive(Clone, Copy)]
struct SpanEnd {
    layer: Option<usize>,
}

impl<'a, 'j> Conveyor<'a, 'j> {
    pub(super) fn new(job: &'a Job<'j>, sink: &'a mut dyn TensorSink, among_others: bool) -> Result<Self> {
        let report = QuantReport::new(job)?;
        let spans = spans(job.plan, job.model.architecture().layers);
        Ok(Self { job, sink, spans, among_others, report, ahead: None, behind: None, spare: Vec::new() })
    }

    pub(super) fn job(&self) -> &'a Job<'j> {
        self.job
    }

    /// The entries of a span: 0 is what stands before the blocks, `l + 1` block `l`, the last what
    /// stands after them.
    pub(super) fn entries(&self, span: usize) -> &'a [PlanEntry] {
        &self.job.plan.entries[self.spans[span].clone()]
    }

    /// Whether everything that a span's entries write, and what was to be reported of it, is there
    /// from an earlier run.
    pub(super) fn is_complete(&self, span: usize) -> bool {
        self.entries(span).iter().all(|entry| self.is_written(entry))
    }

    fn is_written(&self, entry: &PlanEntry) -> bool {
        remembered(entry, self.sink).is_some() && entry.outputs.iter().all(|o| self.sink.is_complete(&o.name))
    }

    /// The bytes of a tensor that was written, where the sink gives them back.
    pub(super) fn written(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.sink.read_back(name)
    }

    /// Takes the entries of one span, those of block `layer` if it is one. Reads ahead up to the end
    /// of the span `horizon`.
    pub(super) fn take(
        &mut self,
        span: usize,
        layer: Option<usize>,
        decision: &Decision,
        horizon: usize,
    ) -> Result<()> {
        let (span, horizon) = (self.spans[span].clone(), self.spans[horizon].end);
        for i in span.clone() {
            self.job.cancel.check()?;
            let tensor = self.tensor(i, decision, horizon)?;
            let end = (i + 1 == span.end).then_some(SpanEnd { layer });
            self.behind = Some(Behind { tensor, end });
        }
        Ok(())
    }

    fn tensor(&mut self, index: usize, decision: &Decision, horizon: usize) -> Result<Finished> {
        let (job, entries) = (self.job, &self.job.plan.entries);
        let entry = &entries[index];
        if self.is_written(entry) {
            self.drain()?;
            return Ok(Finished::written(recalled(job, entry, self.sink)?));
        }
        if entry.action == Action::Copy {
            self.drain()?;
            return Ok(Finished::written(copy(job, entry, self.sink)?));
        }
        let source = match self.ahead.take() {
            Some((ahead, source)) if ahead == index => source?,
            _ => Source::read(job, entry, std::mem::take(&mut self.spare))?,
        };
        let next =
            entries[..horizon].get(index + 1).filter(|e| e.action != Action::Copy && !self.is_written(e));
        let (behind, spare) = (self.behind.take(), std::mem::take(&mut self.spare));
        let end = behind.as_ref().and_then(|b| b.end);
        let (done, (ahead, flushed)) = rayon::join(
            || apply_rewrite(job, entry, source, decision),
            || rayon::join(|| next.map(|e| Source::read(job, e, spare)), || self.flush(behind)),
        );
        flushed?;
        self.tell(end);
        let mut done = done?;
        self.ahead = ahead.map(|source| (index + 1, source));
        self.spare = std::mem::take(&mut done.spare);
        Ok(done)
    }

    /// Writes what is not written yet, and commits it at the end of a span.
    pub(super) fn drain(&mut self) -> Result<()> {
        let behind = self.behind.take();
        let end = behind.as_ref().and_then(|b| b.end);
        self.flush(behind)?;
        self.tell(end);
        Ok(())
    }

    fn flush(&mut self, behind: Option<Behind>) -> Result<()> {
        let Some(Behind { tensor: Finished { report, outputs, .. }, end }) = behind else { return Ok(()) };
        for (name, bytes) in outputs {
            self.sink.write(&name, 0, &bytes)?;
        }
        self.sink.remember(&report.tensor, &json!(report))?;
        self.report.push(report);
        if end.is_some() { self.sink.commit() } else { Ok(()) }
    }

    fn tell(&self, end: Option<SpanEnd>) {
        if let Some(SpanEnd { layer: Some(layer) }) = end {
            let container = self.job.plan.container.name();
            let detail = match self.among_others {
                true => format!("block {layer}, {container}"),
                false => format!("block {layer}"),
            };
            self.job.observer.event(&Event::UnitDone { detail });
        }
    }

    /// Writes and commits the last of it.
    pub(super) fn finish(mut self) -> Result<QuantReport> {
        self.drain()?;
        self.report.finish();
        Ok(self.report)
    }
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
