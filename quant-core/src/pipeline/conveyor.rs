//! Tensors on their way to the sink: while one is rounded, the next is read and hashed and the one
//! before is written.

use std::ops::Range;

use serde_json::json;

use super::Job;
use super::report::QuantReport;
use super::tensor::{Finished, Source, copy, recalled, remembered, transformed};
use crate::recipe::{Action, PlanEntry};
use crate::transform::Rewrite;
use crate::{Event, Result, TensorSink};

/// Takes the entries of a plan to the sink, span after span, and gathers the report.
///
/// At the end of a span everything is committed. That too happens while the next span's first
/// tensor is worked on, unless [`drain`](Self::drain) asks for it before.
pub(super) struct Conveyor<'a, 'j> {
    job: &'a Job<'j>,
    sink: &'a mut dyn TensorSink,
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
    pub(super) fn new(job: &'a Job<'j>, sink: &'a mut dyn TensorSink) -> Result<Self> {
        let report = QuantReport::new(job)?;
        Ok(Self { job, sink, report, ahead: None, behind: None, spare: Vec::new() })
    }

    /// Whether everything that these entries write, and what was to be reported of it, is there
    /// from an earlier run.
    pub(super) fn is_complete(&self, entries: &[PlanEntry]) -> bool {
        entries.iter().all(|entry| {
            remembered(entry, self.sink).is_some()
                && entry.outputs.iter().all(|o| self.sink.is_complete(&o.name))
        })
    }

    /// Takes the entries of one span, those of block `layer` if it is one. Reads ahead up to the
    /// entry `horizon`.
    pub(super) fn take(
        &mut self,
        span: Range<usize>,
        layer: Option<usize>,
        rewrite: &Rewrite,
        horizon: usize,
    ) -> Result<()> {
        for i in span.clone() {
            self.job.cancel.check()?;
            let tensor = self.tensor(i, rewrite, horizon)?;
            let end = (i + 1 == span.end).then_some(SpanEnd { layer });
            self.behind = Some(Behind { tensor, end });
        }
        Ok(())
    }

    fn tensor(&mut self, index: usize, rewrite: &Rewrite, horizon: usize) -> Result<Finished> {
        let (job, entries) = (self.job, &self.job.plan.entries);
        let entry = &entries[index];
        if self.is_complete(std::slice::from_ref(entry)) {
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
        let next = entries[..horizon]
            .get(index + 1)
            .filter(|e| e.action != Action::Copy && !self.is_complete(std::slice::from_ref(e)));
        let (behind, spare) = (self.behind.take(), std::mem::take(&mut self.spare));
        let end = behind.as_ref().and_then(|b| b.end);
        let (done, (ahead, flushed)) = rayon::join(
            || transformed(job, entry, source, rewrite),
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
            self.job.observer.event(&Event::UnitDone { detail: format!("block {layer}") });
        }
    }

    /// Writes and commits the last of it.
    pub(super) fn finish(mut self) -> Result<QuantReport> {
        self.drain()?;
        self.report.finish();
        Ok(self.report)
    }
}
