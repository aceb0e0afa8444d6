//! Runs windows through models and hands every scored position's sums to a measurement.

use candle_core::Tensor;
use quant_core::model::Decoder;
use quant_core::{CancelToken, Error, Event, Observer, Result};

use crate::noise::disturb;
use crate::vocabulary::{Output, Source, Sums, pass};
use crate::{LogitsModel, Scored, StoredReference, Window};

/// Tokens that go through a model at a time.
const BATCH_TOKENS: usize = 2048;
/// Windows on which the noise floor is measured, at most.
const NOISE_WINDOWS: usize = 8;
/// Where the noise of the floor begins.
const NOISE_SEED: u64 = 0;

/// Where hidden states come from.
#[derive(Clone, Copy)]
pub(crate) enum Origin<'a> {
    /// A model.
    Model(&'a Decoder),
    /// A model that is disturbed from this seed.
    Noisy(&'a Decoder, u64),
    /// What was kept of one.
    Stored(&'a StoredReference),
    /// A model that is run elsewhere.
    Engine(&'a dyn LogitsModel),
}

impl<'a> From<Scored<'a>> for Origin<'a> {
    fn from(model: Scored<'a>) -> Self {
        match model {
            Scored::Decoder(decoder) => Self::Model(decoder),
            Scored::Engine(engine) => Self::Engine(engine),
        }
    }
}

impl<'a> Origin<'a> {
    fn output(self) -> Result<Output<'a>> {
        match self {
            Self::Model(decoder) | Self::Noisy(decoder, _) => Ok(Output::Head(decoder.head()?)),
            Self::Stored(stored) => Ok(Output::Head(stored.head()?)),
            Self::Engine(engine) => match engine.vocab() {
                0 => Err(Error::Logits { reason: "the engine has a vocabulary without tokens".into() }),
                vocab => Ok(Output::Logits(vocab)),
            },
        }
    }

    /// What stands for every scored position of windows of equal length, `[positions, width]`.
    fn inputs(self, output: &Output<'_>, windows: &[Window], batch: &[usize]) -> Result<Vec<f32>> {
        let tokens: Vec<&[u32]> = batch.iter().map(|&n| windows[n].input()).collect();
        let hidden: Tensor = match self {
            Self::Model(decoder) => decoder.hidden(&tokens)?,
            Self::Noisy(decoder, seed) => decoder
                .hidden_through(&tokens, &mut |block, hidden| disturb(&hidden, seed, block, batch[0]))?,
            Self::Stored(stored) => return stored.inputs(batch),
            Self::Engine(engine) => return engine_logits(engine, output.vocab(), windows, batch),
        };
        let (_, length, width) = hidden.dims3()?;
        let all = hidden.flatten_all()?.to_vec1::<f32>()?;
        let mut scored = Vec::with_capacity(all.len());
        for (row, &number) in batch.iter().enumerate() {
            // A token is predicted at the position before it.
            let start = row * length + windows[number].first - 1;
            scored.extend_from_slice(&all[start * width..(row + 1) * length * width]);
        }
        match output {
            Output::Head(head) => head.inputs(scored),
            Output::Logits(_) => Err(Error::Internal("a decoder without a head".into())),
        }
    }
}

/// Asks an engine for the logits at all scored positions of some windows.
fn engine_logits(
    engine: &dyn LogitsModel,
    vocab: usize,
    windows: &[Window],
    batch: &[usize],
) -> Result<Vec<f32>> {
    let mut all = Vec::new();
    for window in batch.iter().map(|&n| &windows[n]) {
        let before = all.len();
        let failed = |reason| Error::Logits { reason };
        engine
            .logits(window.input(), window.first - 1, &mut all)
            .map_err(|e| failed(format!("the engine failed: {e}")))?;
        let (got, wanted) = (all.len().checked_sub(before), window.scored().checked_mul(vocab));
        if got != wanted {
            return Err(failed(format!(
                "the engine gave {} numbers for {} positions and {vocab} tokens",
                all.len().saturating_sub(before),
                window.scored()
            )));
        }
    }
    Ok(all)
}

/// Models that are run over the same windows.
pub(crate) struct Panel<'a> {
    origins: Vec<(Origin<'a>, Output<'a>)>,
    /// The model whose noise floor is measured on some of the windows.
    floor: Option<&'a Decoder>,
    /// Windows, by number, on which it is.
    noisy: Vec<usize>,
    /// Whether the most likely tokens are kept.
    ranked: bool,
}

impl<'a> Panel<'a> {
    /// One model, or a reference and those that are compared with it.
    ///
    /// # Errors
    /// When a head cannot be read, or two have different vocabularies.
    pub(crate) fn new(origins: impl IntoIterator<Item = Origin<'a>>) -> Result<Self> {
        let with_output = |origin: Origin<'a>| Ok((origin, origin.output()?));
        let origins = origins.into_iter().map(with_output).collect::<Result<Vec<_>>>()?;
        for (_, output) in &origins[1..] {
            let [reference, model] = [origins[0].1.vocab(), output.vocab()];
            if reference != model {
                return Err(Error::usage(
                    format!("the reference has {reference} tokens, the model {model}"),
                    "compare a model with the checkpoint it was made from",
                ));
            }
        }
        let ranked = origins.len() > 1;
        Ok(Self { origins, floor: None, noisy: Vec::new(), ranked })
    }

    /// The same, which keeps the most likely tokens of a single model too.
    pub(crate) fn with_ranks(mut self) -> Self {
        self.ranked = true;
        self
    }

    /// The same, which also measures the noise floor of its first model, on some of so many windows, spread over the
    /// text; only of a model that is at hand.
    pub(crate) fn with_floor(mut self, windows: usize) -> Self {
        if let Some((Origin::Model(decoder), _)) = self.origins.first() {
            let some = windows.min(NOISE_WINDOWS);
            self.floor = Some(decoder);
            self.noisy = (0..some).map(|i| i * windows / some).collect();
        }
        self
    }

    /// How logits follow from what is known of the first model.
    pub(crate) fn output(&self) -> &Output<'a> {
        &self.origins[0].1
    }

    /// Windows that pass together: of an engine one by one, since all their logits are in memory.
    fn batches(&self, windows: &[Window]) -> Vec<Vec<usize>> {
        match self.origins.iter().any(|(origin, _)| matches!(origin, Origin::Engine(_))) {
            true => (0..windows.len()).map(|number| vec![number]).collect(),
            false => batches(windows),
        }
    }

    /// Measures every scored position of a batch's windows; the results of each window in order of positions.
    fn measure<T>(
        &self,
        windows: &[Window],
        batch: &[usize],
        cancel: &CancelToken,
        measure: &impl Fn(&[Sums], Option<&Sums>) -> T,
        states: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<Vec<Vec<T>>> {
        let mut inputs = Vec::with_capacity(self.origins.len());
        for (origin, output) in &self.origins {
            cancel.check()?;
            inputs.push(origin.inputs(output, windows, batch)?);
        }
        let scored: Vec<usize> = batch.iter().map(|&n| windows[n].scored()).collect();
        let (mut all, mut first, mut position) = (Vec::with_capacity(batch.len()), 0, 0);
        // Windows without noise pass together, those with it one by one.
        for run in batch.chunk_by(|a, b| !self.noisy.contains(a) && !self.noisy.contains(b)) {
            let counts = &scored[first..first + run.len()];
            let positions: usize = counts.iter().sum();
            let span = |width: usize| position * width..(position + positions) * width;
            let noise = match self.floor.filter(|_| self.noisy.contains(&run[0])) {
                Some(decoder) => {
                    Some(Origin::Noisy(decoder, NOISE_SEED).inputs(self.output(), windows, run)?)
                }
                None => None,
            };
            let mut sources: Vec<Source<'_>> = self
                .origins
                .iter()
                .zip(&inputs)
                .map(|((_, output), inputs)| Source { output, inputs: &inputs[span(output.width())] })
                .collect();
            sources.extend(noise.as_ref().map(|inputs| Source { output: self.output(), inputs }));
            let next: Vec<u32> =
                run.iter().flat_map(|&n| windows[n].tokens[windows[n].first..].iter().copied()).collect();
            let sums = pass(&sources, &next, self.ranked, cancel)?;
            let mut results = sums.chunks_exact(sources.len()).map(|sums| {
                let (models, noise) = sums.split_at(self.origins.len());
                measure(models, noise.first())
            });
            let mut row = 0;
            for (&number, &count) in run.iter().zip(counts) {
                let width = self.output().width();
                states(number, &sources[0].inputs[row * width..(row + count) * width])?;
                all.push(results.by_ref().take(count).collect());
                row += count;
            }
            first += run.len();
            position += positions;
        }
        Ok(all)
    }

    /// Measures all windows. `known` are the results of the first ones from an earlier run; `keep` is given those of every
    /// batch that is new, `states` what the head of the first model multiplies in each window that is new. What comes
    /// out does not depend on where the earlier run ended.
    ///
    /// # Errors
    /// When a model, `keep` or `states` fails, or the token pulls.
    pub(crate) fn run<T>(
        &self,
        windows: &[Window],
        mut known: Vec<Vec<T>>,
        (observer, cancel): (&dyn Observer, &CancelToken),
        measure: impl Fn(&[Sums], Option<&Sums>) -> T,
        mut keep: impl FnMut(&[Vec<T>]) -> Result<()>,
        states: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<Vec<Vec<T>>> {
        let units = windows.len() as u64;
        observer.event(&Event::StageStarted { stage: "evaluate", unit: "window", units });
        // Only whole batches were kept.
        let resumed = known.len();
        for batch in self.batches(windows) {
            cancel.check()?;
            if batch[0] >= resumed {
                let results = self.measure(windows, &batch, cancel, &measure, states)?;
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

/// What is done with hidden states that nobody keeps.
pub(crate) fn dropped(_: usize, _: &[f32]) -> Result<()> {
    Ok(())
}

/// Windows that go through a model together: equally long ones that stand side by side. What a window gives does not
/// depend on which others it is with beyond rounding, but may in its last bits; a text always makes the same batches.
fn batches(windows: &[Window]) -> Vec<Vec<usize>> {
    let mut batches: Vec<Vec<usize>> = Vec::new();
    for (number, window) in windows.iter().enumerate() {
        let length = window.input().len();
        let most = (BATCH_TOKENS / length.max(1)).max(1);
        match batches.last_mut() {
            Some(batch) if batch.len() < most && windows[batch[0]].input().len() == length => {
                batch.push(number)
            }
            _ => batches.push(vec![number]),
        }
    }
    batches
}

/// Fails when a value that was measured is not finite.
pub(crate) fn require_finite(values: impl Iterator<Item = f64>) -> Result<()> {
    let bad = values.filter(|v| !v.is_finite()).count();
    if bad == 0 {
        return Ok(());
    }
    Err(Error::Logits {
        reason: format!("{bad} scored position(s) are NaN or infinite; the model's numbers overflow"),
    })
}
