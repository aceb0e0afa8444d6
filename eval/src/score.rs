//! Runs windows through models and passes the sums of every scored position to a measurement.

use std::ops::Range;

use quant_formats::wording::counted;
use quant_formats::{CancelToken, Error, Event, Observer, Result};

use crate::Window;
use crate::vocabulary::{Output, Source, Sums, pass};

/// Maximum number of tokens that go through a decoder at a time. A single window may exceed it.
const BATCH_TOKENS: usize = 2048;
#[cfg(feature = "decoders")]
const NOISE_WINDOWS: usize = 8;
#[cfg(feature = "decoders")]
const NOISE_SEED: u64 = 0;

/// A model as a panel runs it.
pub(crate) trait Runner<'a> {
    /// Returns the output stage.
    fn output(&self) -> Result<Box<dyn Output + 'a>>;

    /// Runs windows that have the same length, and returns the inputs of the output stage at every scored position.
    fn run(
        &self,
        output: &dyn Output,
        windows: &[Window],
        batch: &[usize],
    ) -> Result<Box<dyn StageInputs + 'a>>;

    fn max_windows(&self, length: usize) -> usize {
        BATCH_TOKENS / length.max(1)
    }

    /// The same model with noise from this seed on its blocks' outputs; `None` for a model without blocks.
    #[cfg(feature = "decoders")]
    fn disturbed(&self, _seed: u64) -> Option<Origin<'a>> {
        None
    }
}

pub(crate) type Origin<'a> = Box<dyn Runner<'a> + 'a>;

/// The inputs of an output stage at the scored positions of some windows, one window after the other.
pub(crate) trait StageInputs {
    /// Maximum number of positions that [`at`](Self::at) returns in one call.
    fn max_positions(&self) -> usize {
        usize::MAX
    }

    /// Returns the inputs at these positions, `[positions, width]`.
    fn at(&mut self, positions: Range<usize>) -> Result<&[f32]>;
}

#[cfg(feature = "decoders")]
pub(crate) struct InMemory(pub(crate) Vec<f32>, pub(crate) usize);

#[cfg(feature = "decoders")]
impl StageInputs for InMemory {
    fn at(&mut self, positions: Range<usize>) -> Result<&[f32]> {
        Ok(&self.0[positions.start * self.1..positions.end * self.1])
    }
}

type Member<'a> = (Origin<'a>, Box<dyn Output + 'a>);

/// Models that run over the same windows.
pub(crate) struct Panel<'a> {
    members: Vec<Member<'a>>,
    /// The first model with noise, whose divergence is measured on some of the windows.
    floor: Option<Origin<'a>>,
    noisy: Vec<usize>,
    /// Whether to keep the most likely tokens.
    ranked: bool,
}

impl<'a> Panel<'a> {
    /// Creates a panel of one model, or of a reference and the models to compare with it.
    ///
    /// # Errors
    /// When an output stage cannot be read, an engine's vocabulary is empty, or the vocabularies differ.
    pub(crate) fn new(origins: impl IntoIterator<Item = Origin<'a>>) -> Result<Self> {
        let with_output = |origin: Origin<'a>| {
            let output = origin.output()?;
            Ok((origin, output))
        };
        let members = origins.into_iter().map(with_output).collect::<Result<Vec<Member<'a>>>>()?;
        for (_, output) in &members[1..] {
            let [reference, model] = [members[0].1.vocab(), output.vocab()];
            if reference != model {
                return Err(Error::usage(
                    format!(
                        "the reference has a vocabulary of {reference} tokens, but the model has {model}"
                    ),
                    "compare a model with the checkpoint that it was quantized from",
                ));
            }
        }
        let ranked = members.len() > 1;
        Ok(Self { members, floor: None, noisy: Vec::new(), ranked })
    }

    #[cfg(feature = "decoders")]
    pub(crate) fn with_ranks(mut self) -> Self {
        self.ranked = true;
        self
    }

    /// Also measures the noise floor of the first model, unless it has no blocks, on some of the `windows` windows.
    #[cfg(feature = "decoders")]
    pub(crate) fn with_floor(mut self, windows: usize) -> Self {
        if let Some(disturbed) = self.members[0].0.disturbed(NOISE_SEED) {
            let some = windows.min(NOISE_WINDOWS);
            self.floor = Some(disturbed);
            self.noisy = (0..some).map(|i| i * windows / some).collect();
        }
        self
    }

    fn output(&self) -> &(dyn Output + 'a) {
        &*self.members[0].1
    }

    fn measure<T>(
        &self,
        windows: &[Window],
        batch: &[usize],
        cancel: &CancelToken,
        measure: &impl Fn(&[Sums], Option<&Sums>) -> T,
        states: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<Vec<Vec<T>>> {
        let mut inputs = Vec::with_capacity(self.members.len() + 1);
        for (origin, output) in &self.members {
            cancel.check()?;
            inputs.push(origin.run(&**output, windows, batch)?);
        }
        let scored: Vec<usize> = batch.iter().map(|&n| windows[n].scored()).collect();
        let (mut all, mut first, mut position) = (Vec::with_capacity(batch.len()), 0, 0);
        // Windows with noise run one at a time.
        for run in batch.chunk_by(|a, b| !self.noisy.contains(a) && !self.noisy.contains(b)) {
            let counts = &scored[first..first + run.len()];
            let positions: usize = counts.iter().sum();
            let floor = self.floor.as_ref().filter(|_| self.noisy.contains(&run[0]));
            let mut noise = match floor {
                Some(disturbed) => Some(disturbed.run(self.output(), windows, run)?),
                None => None,
            };
            let next: Vec<u32> =
                run.iter().flat_map(|&n| windows[n].tokens[windows[n].first..].iter().copied()).collect();
            let most = inputs.iter().map(|inputs| inputs.max_positions()).min().unwrap_or(usize::MAX);
            let mut results = Vec::with_capacity(positions);
            for start in (0..positions).step_by(most.min(positions).max(1)) {
                let some = start..positions.min(start + most);
                let mut sources = Vec::with_capacity(inputs.len() + 1);
                for ((_, output), inputs) in self.members.iter().zip(&mut inputs) {
                    let inputs = inputs.at(position + some.start..position + some.end)?;
                    sources.push(Source { output: &**output, inputs });
                }
                if let Some(noise) = &mut noise {
                    sources.push(Source { output: self.output(), inputs: noise.at(some.clone())? });
                }
                let sums = pass(&sources, &next[some], self.ranked, cancel)?;
                results.extend(sums.chunks_exact(sources.len()).map(|sums| {
                    let (models, noise) = sums.split_at(self.members.len());
                    measure(models, noise.first())
                }));
            }
            let (mut results, mut row) = (results.into_iter(), position);
            for (&number, &count) in run.iter().zip(counts) {
                if most == usize::MAX {
                    states(number, inputs[0].at(row..row + count)?)?;
                }
                all.push(results.by_ref().take(count).collect());
                row += count;
            }
            first += run.len();
            position += positions;
        }
        Ok(all)
    }

    /// Measures a range of the windows that [begins a batch](consecutive). `known` holds the results of its first windows
    /// from an earlier run. `keep` receives the results of every new batch, and `states` the inputs of the first model's output stage for each new window, if
    /// they are in memory.
    ///
    /// # Errors
    /// [`Error::Usage`] for a window without a token before its first scored one, and for a token that the models do not
    /// have; when a model, `keep` or `states` fails, or when cancelled.
    pub(crate) fn run<T>(
        &self,
        (windows, range): (&[Window], Range<usize>),
        mut known: Vec<Vec<T>>,
        (observer, cancel): (&dyn Observer, &CancelToken),
        measure: impl Fn(&[Sums], Option<&Sums>) -> T,
        mut keep: impl FnMut(&[Vec<T>]) -> Result<()>,
        states: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<Vec<Vec<T>>> {
        check_windows(windows, self.output().vocab())?;
        let units = range.len() as u64;
        observer.event(&Event::StageStarted { stage: "evaluate", unit: "window", units });
        let resumed = range.start + known.len();
        let most =
            |length| self.members.iter().map(|(origin, _)| origin.max_windows(length)).min().unwrap_or(1);
        for mut batch in batches(&windows[range.clone()], most) {
            batch.iter_mut().for_each(|number| *number += range.start);
            cancel.check()?;
            // An engine may have had a different number of windows per batch.
            let missing: Vec<usize> = batch.iter().copied().filter(|&number| number >= resumed).collect();
            if !missing.is_empty() {
                let results = self.measure(windows, &missing, cancel, &measure, states)?;
                keep(&results)?;
                known.extend(results);
            }
            for _ in batch {
                observer.event(&Event::UnitDone { detail: String::new() });
            }
        }
        observer.event(&Event::StageDone);
        Ok(known)
    }
}

/// Fails if a window cannot be scored by models with this vocabulary. The fields of a text are public, so it may have
/// been changed since it was checked.
fn check_windows(windows: &[Window], vocab: usize) -> Result<()> {
    if let Some(number) = windows.iter().position(|w| !(1..=w.tokens.len()).contains(&w.first)) {
        return Err(Error::usage(
            format!("window {number} of the text has no token before the first scored one"),
            "give windows with at least one token before the first scored one",
        ));
    }
    match windows.iter().flat_map(|window| &window.tokens).find(|&&token| token as usize >= vocab) {
        Some(token) => Err(Error::usage(
            format!("the text has token {token}, but the model has a vocabulary of {vocab} tokens"),
            "cut the text with the model's own tokenizer",
        )),
        None => Ok(()),
    }
}

/// Ignores hidden states.
pub(crate) fn dropped(_: usize, _: &[f32]) -> Result<()> {
    Ok(())
}

/// Groups adjacent windows of equal length that run together, at most `most` of a length. The composition of a batch
/// can change results in the last bits, but the same text always gives the same batches.
fn batches(windows: &[Window], most: impl Fn(usize) -> usize) -> Vec<Vec<usize>> {
    let mut batches: Vec<Vec<usize>> = Vec::new();
    for (number, window) in windows.iter().enumerate() {
        let length = window.input().len();
        let max = most(length).max(1);
        match batches.last_mut() {
            Some(batch) if batch.len() < max && windows[batch[0]].input().len() == length => {
                batch.push(number)
            }
            _ => batches.push(vec![number]),
        }
    }
    batches
}

/// The windows at which a batch of a decoder begins, and the number of windows. Between two of them, batches are the
/// same whether the other windows are measured or not.
pub(crate) fn consecutive(windows: &[Window]) -> Vec<usize> {
    let batches = batches(windows, |length| BATCH_TOKENS / length.max(1));
    batches.iter().map(|batch| batch[0]).chain([windows.len()]).collect()
}

pub(crate) fn require_finite(values: impl Iterator<Item = f64>) -> Result<()> {
    let bad = values.filter(|v| !v.is_finite()).count();
    if bad == 0 {
        return Ok(());
    }
    Err(Error::Logits {
        reason: format!(
            "{} computed from them {} NaN or infinite",
            counted(bad, "value"),
            if bad == 1 { "is" } else { "are" }
        ),
    })
}
