//! The tensors on their way to the sink: while one tensor is rounded, the next is read and hashed and the previous one
//! is written.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Job;
use super::decision::Decision;
use super::report::{QuantReport, TensorReport};
use super::source::{ReadWeights, Source, copy, stored_report, unchanged_report};
use super::tensor::{Finished, apply_rewrite, cache_scales, largest_magnitude};
use crate::recipe::{Action, Plan, PlanEntry};
use crate::round::{Rounded, StageRounded};
use crate::{Error, Event, Result, TensorSink};

/// The minimum time between two commits within a span.
const COMMIT_EVERY: Duration = Duration::from_secs(1);
/// The time for commits within spans is limited to `1 / SHARE_OF_RUN` of the run time.
const SHARE_OF_RUN: u32 = 20;

pub(super) struct SpanWork<'a> {
    pub(super) decision: &'a Decision,
    /// Linears that have already been rounded.
    pub(super) rounded: StageRounded,
    /// The weights of the block that have been read.
    pub(super) held: ReadWeights<'a>,
}

impl<'a> SpanWork<'a> {
    pub(super) fn new(decision: &'a Decision, held: ReadWeights<'a>) -> Self {
        Self { decision, rounded: StageRounded::new(), held }
    }

    fn rounded(&self, entry: &PlanEntry) -> Option<&Rounded> {
        match entry.action {
            Action::Quantize { node: Some(node), .. } => self.rounded.get(&node),
            _ => None,
        }
    }
}

/// Processes the entries of a plan, passes the results to the sink, and collects the report. Entries are processed span
/// by span, except that linears may be processed earlier, as soon as they are rounded.
///
/// The tensors of a span are committed when the last one is written, and in between from time to time: the experts of a
/// block can take an hour.
pub(super) struct Conveyor<'a, 'j> {
    job: &'a Job<'j>,
    sink: &'a mut dyn TensorSink,
    /// The entries before the blocks, those of each block, and those after the blocks.
    spans: Vec<Range<usize>>,
    /// Whether other conveyors process the same blocks.
    is_shared: bool,
    report: QuantReport,
    /// The reports of the entries that have been written, by position.
    tensors: Vec<Option<TensorReport>>,
    /// The position of the next entry, and the source read for it.
    prefetched: Option<(usize, Result<Source>)>,
    pending: Option<PendingWrite>,
    spare: Vec<u8>,
    /// The time of the last commit, and how long it took.
    committed: (Instant, Duration),
    /// The span of which something was committed before its end.
    begun: Option<Begun>,
    /// The keys of what searches have found in the current span.
    found: BTreeSet<String>,
    /// The largest magnitudes of linears that share a scale.
    shared: BTreeMap<String, f32>,
}

/// A span of which a part was committed, and the hashes of its weights by position.
struct Begun {
    span: usize,
    /// What an interrupted run has recorded.
    known: Vec<Option<String>>,
    /// The hashes of the weights that results so far depend on.
    used: Vec<Option<String>>,
    /// Whether the sink has these hashes.
    is_recorded: bool,
}

/// A tensor that is still to be written, and the end of its span if it is the last one.
struct PendingWrite {
    index: usize,
    tensor: Finished,
    end: Option<SpanEnd>,
}

/// The end of a span. `layer` is its block, if the span is one.
#[derive(Clone, Copy)]
struct SpanEnd {
    span: usize,
    layer: Option<usize>,
}

impl<'a, 'j> Conveyor<'a, 'j> {
    pub(super) fn new(job: &'a Job<'j>, sink: &'a mut dyn TensorSink, is_shared: bool) -> Result<Self> {
        let report = QuantReport::new(job)?;
        let spans = spans(job.plan, job.model.architecture().layers);
        let tensors = std::iter::repeat_with(|| None).take(job.plan.entries.len()).collect();
        let (prefetched, pending, spare, shared) = (None, None, Vec::new(), BTreeMap::new());
        let committed = (Instant::now(), Duration::ZERO);
        Ok(Self {
            job,
            sink,
            spans,
            is_shared,
            report,
            tensors,
            prefetched,
            pending,
            spare,
            committed,
            begun: None,
            found: BTreeSet::new(),
            shared,
        })
    }

    pub(super) fn job(&self) -> &'a Job<'j> {
        self.job
    }

    /// Returns the entries of a span. Span 0 precedes the blocks, span `l + 1` is block `l`, and the last span follows
    /// the blocks.
    pub(super) fn entries(&self, span: usize) -> &'a [PlanEntry] {
        &self.job.plan.entries[self.spans[span].clone()]
    }

    pub(super) fn is_complete(&self, span: usize) -> bool {
        self.entries(span).iter().all(|entry| self.is_written(entry))
    }

    pub(super) fn is_written(&self, entry: &PlanEntry) -> bool {
        stored_report(entry, self.sink).is_some()
            && entry.outputs.iter().all(|o| self.sink.is_complete(&o.name))
    }

    pub(super) fn written(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.sink.read_back(name)
    }

    /// Processes the remaining entries of a span. `layer` is its block, if the span is a block. Reads ahead up to the
    /// end of the span `horizon`.
    pub(super) fn take(
        &mut self,
        span: usize,
        layer: Option<usize>,
        work: &SpanWork<'_>,
        horizon: usize,
    ) -> Result<()> {
        let (entries, horizon) = (self.spans[span].clone(), self.spans[horizon].end);
        if entries.is_empty() {
            return Ok(());
        }
        for i in entries {
            if !self.is_taken(i) {
                let next = (i + 1..horizon).find(|&next| !self.is_taken(next));
                self.entry(span, i, work, next)?;
            }
        }
        self.end_span(SpanEnd { span, layer })
    }

    /// Processes the entries of a span whose linears have been rounded.
    pub(super) fn take_rounded(&mut self, span: usize, work: &SpanWork<'_>) -> Result<()> {
        let entries = &self.job.plan.entries;
        let ready = |&i: &usize| !self.is_taken(i) && work.rounded(&entries[i]).is_some();
        let ready: Vec<usize> = self.spans[span].clone().filter(ready).collect();
        let nexts = ready.iter().skip(1).copied().map(Some).chain([None]);
        ready.iter().zip(nexts).try_for_each(|(&i, next)| self.entry(span, i, work, next))
    }

    fn is_taken(&self, index: usize) -> bool {
        self.tensors[index].is_some() || self.pending.as_ref().is_some_and(|b| b.index == index)
    }

    fn entry(&mut self, span: usize, index: usize, work: &SpanWork<'_>, next: Option<usize>) -> Result<()> {
        self.job.cancel.check()?;
        let tensor = self.tensor(index, work, next)?;
        self.pending = Some(PendingWrite { index, tensor, end: None });
        self.note_used(span, &work.held)?;
        self.commit_at_times(span, &work.held)
    }

    /// Returns what an interrupted run has found in a search of a block.
    pub(super) fn recall_finding(&mut self, key: &str) -> Option<Value> {
        let value = self.sink.recall(key)?;
        self.found.insert(key.to_owned());
        Some(value)
    }

    /// Keeps what a search has found in the block of a span until the block is written.
    pub(super) fn remember_finding(
        &mut self,
        span: usize,
        (key, value): (&str, &Value),
        held: &ReadWeights<'_>,
    ) -> Result<()> {
        if !self.sink.is_resumable() {
            return Ok(());
        }
        self.note_used(span, held)?;
        self.sink.remember(key, value)?;
        self.found.insert(key.to_owned());
        self.commit_at_times(span, held)
    }

    fn commit_at_times(&mut self, span: usize, held: &ReadWeights<'_>) -> Result<()> {
        let (last, cost) = self.committed;
        match last.elapsed() >= COMMIT_EVERY.max(SHARE_OF_RUN * cost) {
            true => self.commit_within(span, held),
            false => Ok(()),
        }
    }

    /// Commits a part of a span. If results depend on other weights of the span, the hashes of those that have been used
    /// are recorded: a resumed run must not mix results of different weights.
    fn commit_within(&mut self, span: usize, held: &ReadWeights<'_>) -> Result<()> {
        if !self.sink.is_resumable() {
            return Ok(());
        }
        let started = Instant::now();
        if self.begun.as_ref().is_none_or(|begun| begun.span != span) {
            let known = self.recorded(span);
            self.begun = Some(Begun { span, used: vec![None; known.len()], known, is_recorded: true });
        }
        self.note_used(span, held)?;
        self.remember_used()?;
        self.sink.commit()?;
        self.committed = (Instant::now(), started.elapsed());
        Ok(())
    }

    /// Notes the hashes of the weights that results of a span depend on, if a part of it was committed: what follows is
    /// kept if the run is interrupted. A weight that has not been read yet is noted later, so that it is not read only
    /// for its hash.
    fn note_used(&mut self, span: usize, held: &ReadWeights<'_>) -> Result<()> {
        let Some(mut begun) = self.begun.take_if(|begun| begun.span == span) else { return Ok(()) };
        if self.has_dependences(span) {
            for (at, index) in self.spans[span].clone().enumerate() {
                if begun.used[at].is_none() {
                    begun.used[at] = self.used_sha256(index, begun.known[at].is_some(), held)?;
                    begun.is_recorded &= begun.used[at].is_none();
                }
            }
            self.require_unchanged(span, &begun.used, &begun.known)?;
        }
        self.begun = Some(begun);
        Ok(())
    }

    /// Records the hashes that were noted, so that the next commit contains them.
    fn remember_used(&mut self) -> Result<()> {
        if let Some(begun) = self.begun.as_mut().filter(|begun| !begun.is_recorded) {
            self.sink.remember(&weights_of(begun.span), &json!(begun.used))?;
            begun.is_recorded = true;
        }
        Ok(())
    }

    /// The hash of an entry's bytes. `None` if no result depends on them, neither in this run nor, according to
    /// `is_known`, in an interrupted one.
    fn used_sha256(&self, index: usize, is_known: bool, held: &ReadWeights<'_>) -> Result<Option<String>> {
        if let Some(report) = &self.tensors[index] {
            return Ok(Some(report.source_sha256.clone()));
        }
        match (&self.pending, &self.prefetched) {
            (Some(pending), _) if pending.index == index => {
                return Ok(Some(pending.tensor.report.source_sha256.clone()));
            }
            (_, Some((prefetched, Ok(source)))) if *prefetched == index => {
                return Ok(Some(source.sha256().to_owned()));
            }
            _ => {}
        }
        let entry = &self.job.plan.entries[index];
        let is_used = is_known || shares_scale(entry) || held.may_be_used(entry);
        is_used.then(|| held.peek_sha256(self.job, entry)).transpose()
    }

    /// Whether the results of a span depend on more than the weight that each is made of.
    fn has_dependences(&self, span: usize) -> bool {
        self.job.plan.needs_blocks() || self.entries(span).iter().any(shares_scale)
    }

    /// The hashes of a span's weights that have been recorded, none if there is no record. A record that cannot be read
    /// matches no weight.
    fn recorded(&self, span: usize) -> Vec<Option<String>> {
        let count = self.spans[span].len();
        let Some(known) = self.sink.recall(&weights_of(span)) else { return vec![None; count] };
        let known = serde_json::from_value::<Vec<_>>(known).ok().filter(|known| known.len() == count);
        known.unwrap_or_else(|| vec![Some(String::new()); count])
    }

    /// Compares the hashes of a span's weights with those of an interrupted run that committed a part of the span.
    fn require_unchanged(
        &self,
        span: usize,
        hashes: &[Option<String>],
        known: &[Option<String>],
    ) -> Result<()> {
        match hashes.iter().zip(known).position(|(hash, known)| known.is_some() && hash != known) {
            Some(at) => Err(Error::InputChanged { tensor: self.entries(span)[at].tensor.clone() }),
            None => Ok(()),
        }
    }

    fn commit_span(&mut self, span: usize) -> Result<()> {
        let reports = self.tensors[self.spans[span].clone()].iter().flatten();
        let hashes: Vec<_> = reports.map(|report| Some(report.source_sha256.clone())).collect();
        self.require_unchanged(span, &hashes, &self.recorded(span))?;
        for key in std::mem::take(&mut self.found) {
            self.sink.remember(&key, &Value::Null)?;
        }
        self.begun = None;
        self.commit()
    }

    fn commit(&mut self) -> Result<()> {
        let started = Instant::now();
        self.sink.commit()?;
        self.committed = (Instant::now(), started.elapsed());
        Ok(())
    }

    /// Keeps what was written of a block before the run was interrupted, if a part of it was committed already.
    pub(super) fn keep(&mut self) {
        if self.begun.is_none() {
            return;
        }
        let kept = self.drain().and_then(|()| self.remember_used()).and_then(|()| self.commit());
        if let Err(error) = kept {
            tracing::warn!("the last results are lost: {error}");
        }
    }

    fn tensor(&mut self, index: usize, work: &SpanWork<'_>, next: Option<usize>) -> Result<Finished> {
        let (job, entries) = (self.job, &self.job.plan.entries);
        let entry = &entries[index];
        if self.is_written(entry) {
            self.drain()?;
            return Ok(Finished::written(unchanged_report(job, entry, &work.held, self.sink)?));
        }
        if entry.action == Action::Copy {
            self.drain()?;
            let mut report = copy(job, entry, &work.held, self.sink)?;
            for (name, bytes) in cache_scales(entry, work.decision, &mut report)? {
                self.sink.write(&name, 0, &bytes)?;
            }
            return Ok(Finished::written(report));
        }
        // Before the first linear that shares the scale takes its bytes from the block.
        let amax = self.shared_amax(entry, work)?;
        let source = match self.prefetched.take() {
            Some((prefetched, source)) if prefetched == index => source?,
            _ => Source::read(job, entry, &work.held, std::mem::take(&mut self.spare))?,
        };
        let next = next.filter(|&i| entries[i].action != Action::Copy && !self.is_written(&entries[i]));
        if let Some(i) = next.filter(|&i| entries[i].layer == entry.layer) {
            self.shared_amax(&entries[i], work)?;
        }
        let (pending, spare) = (self.pending.take(), std::mem::take(&mut self.spare));
        let end = pending.as_ref().and_then(|b| b.end);
        let (done, (prefetched, flushed)) = rayon::join(
            || apply_rewrite(job, entry, source, (work.decision, amax), work.rounded(entry)),
            || {
                rayon::join(
                    || next.map(|i| (i, Source::read(job, &entries[i], &work.held, spare))),
                    || self.flush(pending),
                )
            },
        );
        flushed?;
        self.report_progress(end);
        let mut done = done?;
        let scales = cache_scales(entry, work.decision, &mut done.report)?;
        done.outputs.extend(scales);
        self.prefetched = prefetched;
        self.spare = std::mem::take(&mut done.spare);
        Ok(done)
    }

    /// The largest magnitude over all linears that share a scale with this one; `None` if it is not needed.
    fn shared_amax(&mut self, entry: &PlanEntry, work: &SpanWork<'_>) -> Result<Option<f32>> {
        let Action::Quantize { module, scheme, .. } = &entry.action else { return Ok(None) };
        if !scheme.shares_over_tensor() || work.rounded(entry).is_some() {
            return Ok(None);
        }
        let Some(layer) = entry.layer else { return Ok(None) };
        let Some(parts) = self.job.plan.shares_scale_with(module) else { return Ok(None) };
        let key = format!("{} {scheme}", parts[0]);
        if let Some(&known) = self.shared.get(&key) {
            return Ok(Some(known));
        }
        let shares = |other: &&PlanEntry| match &other.action {
            Action::Quantize { module, scheme: its, .. } => its == scheme && parts.contains(module),
            _ => false,
        };
        let mut amax = 0.0_f32;
        for other in self.entries(layer + 1).iter().filter(shares) {
            amax = amax.max(largest_magnitude(self.job, other, work.decision, &work.held)?);
        }
        self.shared.insert(key, amax);
        Ok(Some(amax))
    }

    /// Marks the end of a span: what was written is committed together with its last tensor.
    fn end_span(&mut self, end: SpanEnd) -> Result<()> {
        if let Some(pending) = &mut self.pending {
            pending.end = Some(end);
            return Ok(());
        }
        self.commit_span(end.span)?;
        self.report_progress(Some(end));
        Ok(())
    }

    pub(super) fn drain(&mut self) -> Result<()> {
        let pending = self.pending.take();
        let end = pending.as_ref().and_then(|b| b.end);
        self.flush(pending)?;
        self.report_progress(end);
        Ok(())
    }

    fn flush(&mut self, pending: Option<PendingWrite>) -> Result<()> {
        let Some(PendingWrite { index, tensor: Finished { report, outputs, .. }, end }) = pending else {
            return Ok(());
        };
        for (name, bytes) in outputs {
            self.sink.write(&name, 0, &bytes)?;
        }
        self.sink.remember(&report.tensor, &json!(report))?;
        self.tensors[index] = Some(report);
        end.map_or(Ok(()), |end| self.commit_span(end.span))
    }

    fn report_progress(&self, end: Option<SpanEnd>) {
        if let Some(SpanEnd { layer: Some(layer), .. }) = end {
            let container = self.job.plan.container.name();
            let detail = match self.is_shared {
                true => format!("block {layer}, {container}"),
                false => format!("block {layer}"),
            };
            self.job.observer.event(&Event::UnitDone { detail });
        }
    }

    pub(super) fn finish(mut self) -> Result<QuantReport> {
        self.drain()?;
        let missing = || Error::Internal("a tensor has no report".into());
        // `collect` reuses the memory of the vector.
        let reports = self.tensors.into_iter().map(|report| report.ok_or_else(missing));
        self.report.finish(reports.collect::<Result<_>>()?);
        Ok(self.report)
    }
}

/// Whether a linear's scale also depends on other weights.
fn shares_scale(entry: &PlanEntry) -> bool {
    match &entry.action {
        Action::Quantize { scheme, .. } => scheme.shares_over_tensor(),
        _ => false,
    }
}

/// The key of the record with the hashes of a span's weights.
fn weights_of(span: usize) -> String {
    format!("weights of span {span}")
}

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
