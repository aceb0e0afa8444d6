//! The calibration batch as it passes through the blocks, with the passes that the plan requires in each.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::PoisonError;

use serde_json::Value;

use super::conveyor::{Conveyor, SpanWork};
use super::decision::Decision;
use super::findings::KeptFindings;
use super::read_back::{Written, finished_linears};
use super::search::{Context, InputRanges, Searched, grids, input_ranges, norm_dtypes, search_rewrites};
use super::source::{Hashes, ReadWeights};
use super::states::{self, StateFiles, Streams};
use super::{Job, Program, WRITE};
use crate::calibrate::{CachedMaxima, HiddenStates, Spill, StatisticsPass, routed_to_linears, watched};
use crate::digest::sha256_hex;
use crate::model::{Block, ExpertOrder, NodeId, Preparation, RopeTables, cached_values};
use crate::recipe::{FirstPass, PassPlan};
use crate::round::{RoundingTask, StagedRounding, States};
use crate::transform::{LinearGrid, Rewrite, Transform};
use crate::{Category, Error, Event, Result};
use quant_formats::timed;

#[derive(Default)]
pub(super) struct BlockDone {
    /// The block with the weights that were read; `None` if nothing needed it.
    pub(super) block: Option<Block>,
    /// The decisions about the block, by job position.
    pub(super) decisions: BTreeMap<usize, Decision>,
}

pub(super) struct Batch {
    passes: PassPlan,
    transforms: Vec<&'static dyn Transform>,
    states: BatchStates,
    ropes: RopeTables,
    /// The block before which the quantized model has the states of the float model already.
    is_float_before: Option<usize>,
    /// The hashes of weights that a part of a job has read, but does not write, by name.
    sources: BTreeMap<String, String>,
    experts_apart: bool,
}

/// All `None` if the plan needs no calibration text.
#[derive(Default)]
struct BatchStates {
    float: Option<HiddenStates>,
    /// A copy of the float model's states before the block.
    copy: Option<HiddenStates>,
    quantized: Option<HiddenStates>,
}

impl BatchStates {
    fn of(&mut self, which: States) -> Option<&mut HiddenStates> {
        match which {
            States::Float => self.float.as_mut(),
            States::Copy => self.copy.as_mut(),
            States::Quantized => self.quantized.as_mut(),
        }
    }
}

impl Batch {
    /// Creates the batch before the block at which the passes begin, and returns that block's index. A run that
    /// continues begins at a block whose input states were saved, at the latest at `incomplete`.
    pub(super) fn new(job: &Job<'_>, files: &StateFiles, incomplete: usize) -> Result<(Self, usize)> {
        let Job { model, plan, windows, maxima, .. } = *job;
        let transforms = plan.transforms();
        let passes = PassPlan::new(plan, maxima.is_some() && windows.is_some());
        let first = plan.blocks().start;
        let experts_apart = files.spill.as_ref().is_some_and(Spill::experts_apart);
        let Some(windows) = windows else {
            let (states, ropes) = (BatchStates::default(), model.rope(1)?);
            return Ok((Self::with(passes, transforms, states, ropes, None, experts_apart), first));
        };
        let wanted = [passes.follow_float(), passes.follow_quantized()];
        let ropes = model.rope(windows.length())?;
        if let Some((streams, layer)) = saved_states(job, files, wanted, first + 1..incomplete + 1)? {
            let [float, quantized] = streams;
            let states = BatchStates { float, copy: None, quantized };
            return Ok((Self::with(passes, transforms, states, ropes, None, experts_apart), layer));
        }
        let spill = files.spill.as_ref();
        let [float, quantized] = match &files.before[..] {
            _ if wanted == [false; 2] => [None, None],
            // The quantized model begins a span with the states of the float model.
            paths if !paths.is_empty() && wanted[1] && plan.begins_span(first) => {
                let [float, _] = states::load(paths, job, first, &files.depends_on, [true, false], spill)?;
                match wanted[0] {
                    true => [float.as_ref().map(HiddenStates::try_clone).transpose()?, float],
                    false => [None, float],
                }
            }
            paths if !paths.is_empty() => states::load(paths, job, first, &files.depends_on, wanted, spill)?,
            _ if first == 0 => {
                let states = HiddenStates::embed_in(model, windows, spill)?;
                match wanted {
                    [true, true] => [Some(states.try_clone()?), Some(states)],
                    [float, quantized] => {
                        let mut states = Some(states);
                        [states.take_if(|_| float), states.take_if(|_| quantized)]
                    }
                }
            }
            _ => {
                return Err(Error::usage(
                    format!("a job that starts at block {first} needs the hidden states before that block"),
                    "pass the file that the job on the preceding blocks wrote",
                ));
            }
        };
        let states = BatchStates { float, copy: None, quantized };
        Ok((Self::with(passes, transforms, states, ropes, Some(first), experts_apart), first))
    }

    fn with(
        passes: PassPlan,
        transforms: Vec<&'static dyn Transform>,
        states: BatchStates,
        ropes: RopeTables,
        is_float_before: Option<usize>,
        experts_apart: bool,
    ) -> Self {
        Self { passes, transforms, states, ropes, is_float_before, sources: BTreeMap::new(), experts_apart }
    }

    pub(super) fn into_sources(self) -> BTreeMap<String, String> {
        self.sources
    }

    pub(super) fn streams(&self) -> Streams<&HiddenStates> {
        [self.states.float.as_ref(), self.states.quantized.as_ref()]
    }

    pub(super) fn save(&self, job: &Job<'_>, layer: usize, path: &Path, depends_on: &Value) -> Result<()> {
        let program = Program::current(job.cancel)?;
        let go_on = || job.cancel.check().map(|()| true);
        let about = (depends_on, &program, &self.sources);
        states::save(path, job, layer, about, self.streams(), &go_on).map(|_| ())
    }

    /// Makes the decisions about block `layer` for the jobs at the positions `open`, whose results are still missing,
    /// and moves the states to the next block if `advance` is set. Linears are passed to the conveyors as soon as a
    /// stage has rounded them.
    pub(super) fn block(
        &mut self,
        conveyors: &mut [Conveyor<'_, '_>],
        span: usize,
        layer: usize,
        open: &[usize],
        advance: bool,
    ) -> Result<BlockDone> {
        let job = conveyors[0].job();
        if open.is_empty() && !advance && job.maxima.is_none() {
            return Ok(BlockDone::default());
        }
        self.begin_span(job, layer)?;
        let block = timed(job.observer, reading(job), || job.model.stored_block(layer, &self.ropes))?;
        let prefix = job.model.architecture().in_block(layer, "");
        if open.is_empty() && self.pass_by(&conveyors[0], span, &prefix, &block, advance)? {
            if job.plan.is_forward() {
                self.record_sources(&block, |_| true);
            }
            return Ok(BlockDone { block: Some(block), decisions: BTreeMap::new() });
        }
        // If nothing is missing, the sink cannot read back what it holds, so the decisions are recomputed.
        let open = if open.is_empty() { &[0][..] } else { open };
        let copied = self.states.float.as_ref().filter(|_| self.passes.copy_float());
        self.states.copy = copied.map(HiddenStates::try_clone).transpose()?;
        let cached = match self.passes.cache {
            Some(States::Float) => self.cached(job, &prefix, &block, States::Float)?,
            _ => CachedMaxima::new(),
        };
        let unrouted = self.unrouted(job, &block)?;
        let watched = watched(&block, &unrouted);
        let ranges = match self.passes.first {
            Some(pass) => self.float_pass(job, &prefix, [&block, &watched], pass)?,
            None => InputRanges::default(),
        };
        let norm_dtypes = norm_dtypes(job.model, layer)?;
        let grids: Vec<_> =
            open.iter().map(|&i| grids(conveyors[i].job().plan, conveyors[i].entries(span))).collect();
        let experts_apart = self.order(job, &block).is_some();
        let context = Context {
            prefix: &prefix,
            settings: &job.plan.settings,
            smoothing: job.model.architecture().smoothing,
            norm_dtypes: &norm_dtypes,
            ranges: &ranges.of,
            block_grids: &BTreeMap::new(),
            experts_apart,
            observer: job.observer,
            cancel: job.cancel,
        };
        let rewrites = {
            let hashes = Hashes::default();
            let searching = conveyors.iter_mut().enumerate().filter(|(i, _)| open.contains(i));
            let stores = searching.zip(&grids).map(|((_, conveyor), grids)| {
                KeptFindings::new(conveyor, span, ReadWeights::of(Some(&block), true, &hashes), grids)
            });
            let stores: Vec<_> = stores.collect();
            let searched =
                grids.iter().zip(&stores).map(|(grids, store)| Searched { grids, findings: Some(store) });
            self.search(job, &context, [&block, &watched], &searched.collect::<Vec<_>>())?
        };
        let mut decisions = BTreeMap::new();
        for ((&i, grids), rewrite) in open.iter().zip(&grids).zip(rewrites) {
            let inputs = context.input_grids(&block, grids, &rewrite)?;
            let cached = match self.passes.cache {
                Some(which) if which != States::Float => {
                    self.cached(job, &prefix, &rewrite.apply(&block)?, which)?
                }
                _ => cached.clone(),
            };
            let routed = routed_to_linears(block.graph(), &unrouted);
            let seen = ranges.tokens.clone();
            let decision = Decision { rewrite, inputs, seen, routed, cached };
            if let Some(which) = self.passes.rounding {
                let finished = finished_linears(&conveyors[i], span)?;
                let known = (&decision, &unrouted, finished);
                if which != States::Quantized && !job.plan.is_expert_part() {
                    // If the block is rounded stage by stage, each weight is read in its own stage; if only a part of it
                    // is rounded, others are not read.
                    timed(job.observer, reading(job), || block.load())?;
                }
                let rewritten = context.applied(&decision.rewrite, &block)?;
                let run = self.rounding((job, &prefix), rewritten, grids, known, which, advance)?;
                round(job, run, &mut conveyors[i], span, &decision, (&block, grids))?;
            }
            if job.plan.is_expert_part() {
                let own: BTreeSet<&str> = conveyors[i].entries(span).iter().map(|e| &*e.stored).collect();
                self.record_sources(&block, |name| !own.contains(name));
            }
            decisions.insert(i, decision);
        }
        self.states.copy = None;
        Ok(BlockDone { block: Some(block), decisions })
    }

    /// Keeps the hashes of weights that are in memory.
    fn record_sources(&mut self, block: &Block, is_recorded: impl Fn(&str) -> bool) {
        let read = block.stored_weights().filter(|weight| is_recorded(weight.name()));
        let read = read.filter_map(|w| Some((w.name().to_owned(), sha256_hex(&*w.held()?))));
        self.sources.extend(read);
    }

    fn begin_span(&mut self, job: &Job<'_>, layer: usize) -> Result<()> {
        if self.is_float_before == Some(layer) || !job.plan.begins_span(layer) {
            return Ok(());
        }
        if let (Some(float), Some(quantized)) = (&self.states.float, &mut self.states.quantized) {
            *quantized = float.try_clone()?;
        }
        Ok(())
    }

    /// `None` if all experts are in memory.
    fn order(&self, job: &Job<'_>, block: &Block) -> Option<ExpertOrder> {
        let graph = Some(block.graph()).filter(|_| self.experts_apart)?;
        ExpertOrder::of(graph).filter(|_| job.plan.takes_experts_apart(graph))
    }

    /// Returns the experts of the block that are calibrated on all tokens, and how many tokens are routed to each in
    /// the float model.
    fn unrouted(&self, job: &Job<'_>, block: &Block) -> Result<BTreeMap<NodeId, u64>> {
        let sampling = job.plan.sampling.experts;
        match &self.states.float {
            Some(states) if !sampling.is_routed() => {
                let input = block.graph().input();
                timed(job.observer, "count", || sampling.unrouted(states, block, input, job.cancel))
            }
            _ => Ok(BTreeMap::new()),
        }
    }

    /// The states advance through `block`; statistics are gathered in `watched`, in which some experts may run on all
    /// tokens.
    fn search(
        &mut self,
        job: &Job<'_>,
        context: &Context<'_>,
        [block, watched]: [&Block; 2],
        searched: &[Searched<'_>],
    ) -> Result<Vec<Rewrite>> {
        let states = self.passes.search.and_then(|which| self.states.of(which));
        if states.is_some() && !context.experts_apart {
            timed(job.observer, reading(job), || block.load())?;
        }
        let advance = self.passes.search == Some(States::Float);
        // One expert at a time, only the tap of an expert sees all tokens.
        let is_watched = watched.runs_unrouted() && !context.experts_apart;
        let rewrites =
            search_rewrites(&self.transforms, context, watched, searched, states, advance && !is_watched)?;
        if let (Some(float), true) = (&mut self.states.float, advance && is_watched) {
            timed(job.observer, "forward", || float.advance(block, job.cancel))?;
        }
        Ok(rewrites)
    }

    /// Returns the largest magnitudes of the keys and values that the block's attentions cache for these states.
    fn cached(&mut self, job: &Job<'_>, prefix: &str, block: &Block, which: States) -> Result<CachedMaxima> {
        let states = self.states.of(which);
        let states =
            states.ok_or_else(|| Error::Internal("cache scales were requested without a batch".into()))?;
        timed(job.observer, reading(job), || block.load())?;
        let values = cached_values(block.graph()).unwrap_or_default();
        let found = timed(job.observer, "cache", || states.cached_maxima(block, &values, job.cancel));
        found.map_err(|e| match e {
            Error::Calibration { tensor, what } => {
                Error::Calibration { tensor: format!("{prefix}{tensor}"), what }
            }
            other => other,
        })
    }

    /// Moves the states past a finished block if `advance` is set, and gathers channel maxima if the job records them.
    /// Returns `false` if the states of the quantized model cannot be moved because the sink does not read back what
    /// was written.
    fn pass_by(
        &mut self,
        conveyor: &Conveyor<'_, '_>,
        span: usize,
        prefix: &str,
        block: &Block,
        advance: bool,
    ) -> Result<bool> {
        let job = conveyor.job();
        let written = match self.passes.follow_quantized() {
            true => Written::new(conveyor, span)?.block(conveyor, block)?,
            false => None,
        };
        if self.passes.follow_quantized() && written.is_none() {
            return Ok(false);
        }
        self.float_pass(job, prefix, [block; 2], FirstPass { ranges: job.maxima.is_some(), advance })?;
        if let (Some(quantized), Some(written), true) = (&mut self.states.quantized, written, advance) {
            timed(job.observer, "forward", || quantized.advance(&written, job.cancel))?;
        }
        Ok(true)
    }

    /// Gathers the ranges of linears' inputs in `watched`, and advances the float states through `block`, as the plan
    /// requires.
    fn float_pass(
        &mut self,
        job: &Job<'_>,
        prefix: &str,
        [block, watched]: [&Block; 2],
        FirstPass { ranges, advance }: FirstPass,
    ) -> Result<InputRanges> {
        let order = self.order(job, block);
        let Some(float) = self.states.float.as_mut().filter(|_| ranges || advance) else {
            return Ok(InputRanges::default());
        };
        if order.is_none() {
            timed(job.observer, reading(job), || block.load())?;
        } else if !ranges {
            let pass = StatisticsPass::new(block, float.layout(), job.cancel);
            run_pass(job, pass, float, true, order.as_ref())?;
            return Ok(InputRanges::default());
        }
        if !ranges {
            timed(job.observer, "forward", || float.advance(block, job.cancel))?;
            return Ok(InputRanges::default());
        }
        let together = advance && (order.is_some() || !watched.runs_unrouted());
        let ranges = timed(job.observer, "ranges", || {
            input_ranges(prefix, watched, float, job.cancel, |pass, states| {
                run_pass(job, pass, states, together, order.as_ref())
            })
        })?;
        if advance && !together {
            timed(job.observer, "forward", || float.advance(block, job.cancel))?;
        }
        if let Some(kept) = job.maxima {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            for (node, name, ..) in block.graph().linears() {
                let ranges = &ranges.of[&block.graph().nodes()[node].inputs[0]];
                kept.insert(format!("{prefix}{name}"), ranges.maxima());
            }
        }
        Ok(ranges)
    }

    /// Begins to round a rewritten block on these states.
    fn rounding<'a>(
        &'a mut self,
        (job, prefix): (&'a Job<'_>, &'a str),
        block: Block,
        grids: &'a BTreeMap<NodeId, LinearGrid>,
        (decision, unrouted, finished): (&'a Decision, &'a BTreeMap<NodeId, u64>, BTreeSet<NodeId>),
        which: States,
        advance: bool,
    ) -> Result<Box<dyn StagedRounding + 'a>> {
        let states = self.states.of(which);
        let states =
            states.ok_or_else(|| Error::Internal("a rounding needs states, but there is no batch".into()))?;
        let task = RoundingTask {
            prefix,
            block,
            grids,
            rewrite: &decision.rewrite,
            inputs: &decision.inputs,
            settings: &job.plan.settings,
            experts: job.plan.sampling.experts,
            unrouted,
            finished,
            container: job.plan.container,
            cancel: job.cancel,
        };
        let rounding = job.plan.method.rounding;
        timed(job.observer, rounding.name(), || rounding.begin(task, (which, states), advance))
    }
}

/// Loads the saved input states of a block, with the block's index, if they belong to this job.
fn saved_states(
    job: &Job<'_>,
    files: &StateFiles,
    wanted: [bool; 2],
    blocks: Range<usize>,
) -> Result<Option<(Streams<HiddenStates>, usize)>> {
    // Channel maxima are gathered in every block, so none may be skipped.
    let saved = files.saved.as_ref().filter(|_| job.maxima.is_none());
    let found = saved.and_then(|saved| Some((saved, states::saved_before(&saved.path, blocks)?)));
    let Some((saved, layer)) = found else { return Ok(None) };
    let paths = std::slice::from_ref(&saved.path);
    let loaded = states::load(paths, job, layer, &files.depends_on, wanted, files.spill.as_ref());
    match loaded {
        Ok(streams) => Ok(Some((streams, layer))),
        Err(error) if error.category() == Category::Input => {
            let message = format!("the saved hidden states cannot be used and will be recomputed: {error}");
            job.observer.event(&Event::Warning { message });
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Rounds a block stage by stage. The conveyor takes each stage before the next one begins. Stages that an interrupted
/// run has finished are read back.
///
/// # Errors
/// [`Error::Usage`] when the rounding leaves out a linear of `grids`, or returns another or one of them twice.
fn round(
    job: &Job<'_>,
    mut run: Box<dyn StagedRounding + '_>,
    conveyor: &mut Conveyor<'_, '_>,
    span: usize,
    decision: &Decision,
    (block, grids): (&Block, &BTreeMap<NodeId, LinearGrid>),
) -> Result<()> {
    let step = job.plan.method.rounding.name();
    let wrong = |what: &str, node: NodeId| {
        let name =
            block.graph().linears().find(|(id, ..)| *id == node).map_or("a node", |(_, name, ..)| name);
        Error::usage(
            format!("the rounding `{step}` {what} `{name}` of a block"),
            "its stages must contain every linear that it is given, once",
        )
    };
    let mut left: BTreeSet<NodeId> = grids.keys().copied().collect();
    let hashes = Hashes::default();
    let mut written: Option<Written<'_>> = None;
    loop {
        if let Some(finished) = run.finished_stage() {
            let written = match &mut written {
                Some(written) => written,
                none => none.insert(Written::new(conveyor, span)?),
            };
            let mut read = |node| written.linear(conveyor, node);
            timed(job.observer, step, || run.skip_stage(&mut read))?;
            left.retain(|node| !finished.contains(node));
            continue;
        }
        let Some(rounded) = timed(job.observer, step, || run.next_stage())? else { break };
        if let Some(&node) = rounded.keys().find(|node| !left.remove(node)) {
            return Err(wrong("returned an unexpected result for", node));
        }
        let work =
            SpanWork { rounded, ..SpanWork::new(decision, ReadWeights::of(Some(block), false, &hashes)) };
        timed(job.observer, WRITE, || conveyor.take_rounded(span, &work))?;
    }
    if let Some(&node) = left.first() {
        return Err(wrong("left out", node));
    }
    timed(job.observer, step, || run.finish())
}

fn reading(job: &Job<'_>) -> &'static str {
    match job.model.preparation() {
        Some(Preparation::Rotate) => "read and rotate",
        Some(Preparation::FoldNorms) => "read and fold",
        None => "read",
    }
}

/// Runs a pass of the batch through a block, one expert at a time if `order` is given, and returns the number of tokens
/// of each linear.
fn run_pass(
    job: &Job<'_>,
    pass: StatisticsPass<'_>,
    states: &mut HiddenStates,
    advance: bool,
    order: Option<&ExpertOrder>,
) -> Result<BTreeMap<NodeId, u64>> {
    match order {
        Some(order) => timed(job.observer, "forward", || pass.run_by_expert(states, advance, order)),
        None => pass.run(states, advance),
    }
}
