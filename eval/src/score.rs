//! Runs windows through models and passes the sums of every scored position to a measurement.

use candle_core::Tensor;
use quant_core::model::Decoder;
use quant_core::wording::counted;
use quant_core::{CancelToken, Error, Event, Observer, Result};

use crate::noise::disturb;
use crate::vocabulary::{Output, Source, Sums, pass};
use crate::{LogitsModel, Scored, StoredReference, Window};

/// Maximum number of tokens that go through a model at a time, unless a single window is longer.
const BATCH_TOKENS: usize = 2048;
/// Maximum number of windows on which the noise floor is measured.
const NOISE_WINDOWS: usize = 8;
/// Seed of the noise.
const NOISE_SEED: u64 = 0;

/// The source of the output stage's inputs.
#[derive(Clone, Copy)]
pub(crate) enum Origin<'a> {
    /// A model.
    Model(&'a Decoder),
    /// A model whose blocks' outputs are disturbed by noise from this seed.
    Noisy(&'a Decoder, u64),
    /// A stored reference.
    Stored(&'a StoredReference),
    /// A model that an engine runs.
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
            Self::Model(decoder) | Self::Noisy(decoder, _) => Ok(Output::Head(Box::new(decoder.head()?))),
            Self::Stored(stored) => Ok(Output::Head(Box::new(stored.head()?))),
            Self::Engine(engine) => match engine.vocab() {
                0 => Err(Error::Logits { reason: "the engine reports a vocabulary of 0 tokens".into() }),
                vocab => Ok(Output::Logits(vocab)),
            },
        }
    }

    /// Returns the inputs of the output stage at every scored position of windows that have the same length:
    /// `[positions, width]`.
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
            // The position before a token predicts it.
            let start = row * length + windows[number].first - 1;
            scored.extend_from_slice(&all[start * width..(row + 1) * length * width]);
        }
        match output {
            Output::Head(head) => head.inputs(scored),
            Output::Logits(_) => Err(Error::Internal("the decoder has no head".into())),
        }
    }
}

/// Requests the logits at all scored positions of some windows from an engine.
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
                "the engine returned {} logits for {} positions and a vocabulary of {vocab}",
                all.len().saturating_sub(before),
                window.scored()
            )));
        }
    }
    Ok(all)
}

/// Models that run over the same windows.
pub(crate) struct Panel<'a> {
    origins: Vec<(Origin<'a>, Output<'a>)>,
    /// The model whose noise floor is measured on some of the windows.
    floor: Option<&'a Decoder>,
    /// Indices of the windows on which the noise floor is measured.
    noisy: Vec<usize>,
    /// Whether to keep the most likely tokens.
    ranked: bool,
}

impl<'a> Panel<'a> {
    /// Creates a panel of one model, or of a reference and the models to compare with it.
    ///
    /// # Errors
    /// When a head cannot be read, an engine's vocabulary is empty, or the vocabularies differ.
    pub(crate) fn new(origins: impl IntoIterator<Item = Origin<'a>>) -> Result<Self> {
        let with_output = |origin: Origin<'a>| Ok((origin, origin.output()?));
        let origins = origins.into_iter().map(with_output).collect::<Result<Vec<_>>>()?;
        for (_, output) in &origins[1..] {
            let [reference, model] = [origins[0].1.vocab(), output.vocab()];
            if reference != model {
                return Err(Error::usage(
                    format!(
                        "the reference has a vocabulary of {reference} tokens, but the model has {model}"
                    ),
                    "compare a model with the checkpoint that it was quantized from",
                ));
            }
        }
        let ranked = origins.len() > 1;
        Ok(Self { origins, floor: None, noisy: Vec::new(), ranked })
    }

    /// Keeps the most likely tokens even for a single model.
    pub(crate) fn with_ranks(mut self) -> Self {
        self.ranked = true;
        self
    }

    /// Measures the noise floor of the first model as well, on some of the `windows` windows, spread over the text. If
    /// the first model is not a [`Decoder`], this has no effect.
    pub(crate) fn with_floor(mut self, windows: usize) -> Self {
        if let Some((Origin::Model(decoder), _)) = self.origins.first() {
            let some = windows.min(NOISE_WINDOWS);
            self.floor = Some(decoder);
            self.noisy = (0..some).map(|i| i * windows / some).collect();
        }
        self
    }

    /// The output stage of the first model.
    pub(crate) fn output(&self) -> &Output<'a> {
        &self.origins[0].1
    }

    /// Groups windows that run together; an engine gets single windows, since all their logits are in memory.
    fn batches(&self, windows: &[Window]) -> Vec<Vec<usize>> {
        match self.origins.iter().any(|(origin, _)| matches!(origin, Origin::Engine(_))) {
            true => (0..windows.len()).map(|number| vec![number]).collect(),
            false => batches(windows),
        }
    }

    /// Measures every scored position of a batch's windows; the results of each window are in order of positions.
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
        // Windows without noise run together, those with noise one at a time.
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

    /// Measures all windows. `known` holds the results of the first windows from an earlier run. `keep` receives the
    /// results of every new batch, and `states` the inputs of the first model's head for each new window. The results
    /// do not depend on where the earlier run ended.
    ///
    /// # Errors
    /// When a model, `keep` or `states` fails, or when cancelled.
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
        // Only complete batches were kept.
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

/// Ignores hidden states.
pub(crate) fn dropped(_: usize, _: &[f32]) -> Result<()> {
    Ok(())
}

/// Groups adjacent windows of equal length that run through a model together. The composition of a batch can change a
/// window's results in the last bits, but the same text always gives the same batches.
fn batches(windows: &[Window]) -> Vec<Vec<usize>> {
    let mut batches: Vec<Vec<usize>> = Vec::new();
    for (number, window) in windows.iter().enumerate() {
        let length = window.input().len();
        let max = (BATCH_TOKENS / length.max(1)).max(1);
        match batches.last_mut() {
            Some(batch) if batch.len() < max && windows[batch[0]].input().len() == length => {
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
        reason: format!(
            "{} computed from them {} NaN or infinite",
            counted(bad, "value"),
            if bad == 1 { "is" } else { "are" }
        ),
    })
}
