//! Compares a model with its reference, position by position. Text that is difficult for both cancels out.

use std::ops::Range;

#[cfg(feature = "decoders")]
use quant_core::model::Decoder;
use quant_formats::{CancelToken, Error, Observer, Result};
use serde::{Deserialize, Serialize};

use crate::score::{Origin, Panel, dropped, require_finite};
use crate::statistics::{Histogram, Quantile, quantiles};
use crate::{Estimate, EvaluationText, Journal, LogitsModel, Position, Scored, Scores};
#[cfg(feature = "decoders")]
use crate::{StoredReference, decoder::Blocks};

const CONFIDENCE: [f64; 6] = [0.0, 0.25, 0.5, 0.75, 0.9, 1.0];
pub(crate) const AT_FLOOR: f64 = 3.0;
const LEVEL: f64 = 0.05;

/// The divergence of a model from its reference.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Divergence {
    /// The reference's own scores.
    pub reference: Scores,
    /// Mean difference of negative log-likelihood, model minus reference, in nats per token.
    pub delta_nll: Estimate,
    /// `exp` of `delta_nll`: the ratio of the perplexities.
    pub perplexity_ratio: Estimate,
    /// The smallest increase of the perplexity that this many windows can detect, as a fraction of the reference's
    /// perplexity, at a one-sided level of 5 % and with a power of 80 %.
    pub minimum_detectable_increase: Option<f64>,
    /// `KL(reference ‖ model)` over the full vocabulary, in nats per token.
    pub kl: Estimate,
    /// Quantiles of the divergence over positions.
    pub kl_quantiles: KlQuantiles,
    /// Histogram of the divergence over positions.
    pub kl_histogram: Histogram,
    /// The divergence by the reference's confidence.
    pub kl_by_confidence: Vec<ConfidenceBucket>,
    /// Each window's mean divergence.
    pub window_kl: Vec<f64>,
    /// Fraction of positions at which both models have the same most likely token.
    pub top1_agreement: Estimate,
    /// Fraction of the reference's five most likely tokens that are among the model's five, averaged.
    pub top5_overlap: Estimate,
    /// Root mean square change of the probability of the next token.
    pub rms_delta_p: Estimate,
    /// The divergence of a numerically equivalent model, if it was measured.
    pub noise_floor: Option<NoiseFloor>,
    /// Whether the mean divergence is below three times the noise floor, and therefore no evidence of a difference;
    /// absent if the noise floor was not measured.
    pub at_noise_floor: Option<bool>,
}

/// Quantiles of a divergence over positions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct KlQuantiles {
    /// The 50th percentile.
    pub median: Quantile,
    /// The 90th percentile.
    pub p90: Quantile,
    /// The 99th percentile.
    pub p99: Quantile,
    /// The 99.9th percentile.
    pub p999: Quantile,
    /// The largest value.
    pub max: Quantile,
}

/// Positions at which the reference has a similar confidence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ConfidenceBucket {
    /// Lower bound of the reference's largest probability, inclusive.
    pub from: f64,
    /// Upper bound of the reference's largest probability: exclusive, except for 1.
    pub to: f64,
    /// Number of positions in this bucket.
    pub positions: usize,
    /// Mean divergence over the positions of this bucket; absent if the bucket is empty.
    pub kl: Option<Estimate>,
}

/// The divergence of the reference from itself when every value of every block's output is multiplied by a random
/// factor within 1 ± 2⁻⁹. This simulates the rounding of a different kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct NoiseFloor {
    /// `KL(reference ‖ disturbed reference)`, in nats per token.
    pub kl: Estimate,
    /// Histogram of this divergence over positions.
    pub kl_histogram: Histogram,
    /// Number of windows, spread over the text, on which the noise floor was measured.
    pub windows: usize,
}

/// The reference of a comparison.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub enum Reference<'a> {
    /// A model that runs in the same process.
    #[cfg(feature = "decoders")]
    Model {
        /// The model.
        decoder: &'a Decoder,
        /// Whether to measure its noise floor.
        floor: bool,
    },
    /// A stored reference, including its noise floor.
    #[cfg(feature = "decoders")]
    Stored(&'a StoredReference),
    /// A model that an engine runs. Its noise floor is not measured.
    Engine(&'a dyn LogitsModel),
}

impl<'a> Reference<'a> {
    #[cfg_attr(
        not(feature = "decoders"),
        expect(unused_variables, reason = "only decoders have a noise floor")
    )]
    fn with(self, models: &[Scored<'a>], windows: usize) -> Result<Panel<'a>> {
        let own: Origin<'a> = match self {
            #[cfg(feature = "decoders")]
            Self::Model { decoder, .. } => Box::new(Blocks(decoder, None)),
            #[cfg(feature = "decoders")]
            Self::Stored(stored) => Box::new(stored),
            Self::Engine(engine) => Box::new(engine),
        };
        let panel = Panel::new([own].into_iter().chain(models.iter().map(|model| model.origin())))?;
        match self {
            #[cfg(feature = "decoders")]
            Self::Model { floor: true, .. } => Ok(panel.with_floor(windows)),
            _ => Ok(panel),
        }
    }

    /// Returns the stored noise floor, or computes it from these positions.
    fn floor(self, positions: &[Vec<Position>]) -> Option<NoiseFloor> {
        match self {
            #[cfg(feature = "decoders")]
            Self::Stored(stored) => Some(stored.noise_floor().clone()),
            _ => NoiseFloor::of(positions, |p| p.floor),
        }
    }
}

/// Runs a model and its reference over the same windows. The returned scores are the model's.
///
/// # Errors
/// When a model or the journal fails, the vocabularies differ, a value is not finite, or when cancelled.
///
#[cfg_attr(feature = "decoders", doc = "```")]
#[cfg_attr(not(feature = "decoders"), doc = "```ignore")]
/// use quant_core::calibrate::{TextTokenizer, TokenizerSettings};
/// use quant_core::checkpoint::ModelDirectory;
/// use quant_core::model::{Decoder, Model};
/// use quant_core::{CancelToken, Silent};
/// use quant_evaluator::{EvaluationText, Journal, Profile, Reference, Tokenization, compare};
/// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../quant-core/examples/support/tiny.rs")); }
/// # let temporary = tempfile::tempdir().unwrap();
/// # tiny::tiny_llama(temporary.path()).unwrap();
/// # let directory = ModelDirectory::open(temporary.path())?;
/// # let tokenizer = TextTokenizer::open(&directory.tokenizer_path().unwrap())?;
/// # let settings = TokenizerSettings::open(&directory)?;
/// # let tokenization = Tokenization { tokenizer: &tokenizer, settings: &settings, sha256: String::new() };
/// # let document: String = (0..400).map(|i| format!("w{} ", i * i % 61)).collect();
/// # let profile = Profile::gptq(64)?;
/// # let text = EvaluationText::new(&tokenization, &[document], profile.into(), None, "numbers".as_ref())?;
///
/// let cancel = CancelToken::new();
/// let decoder = Decoder::load(&Model::open(&directory)?, 64, &Silent, &cancel)?;
/// // A model against itself: nothing diverges.
/// let reference = Reference::Model { decoder: &decoder, floor: false };
/// let (_, divergence) = compare(reference, &decoder, &text, &mut Journal::none(), &Silent, &cancel)?;
/// assert_eq!((divergence.kl.mean, divergence.top1_agreement.mean), (0.0, 1.0));
/// # Ok::<(), quant_core::Error>(())
/// ```
pub fn compare<'a>(
    reference: Reference<'a>,
    model: impl Into<Scored<'a>>,
    text: &EvaluationText,
    journal: &mut Journal<Position>,
    observer: &dyn Observer,
    cancel: &CancelToken,
) -> Result<(Scores, Divergence)> {
    let all = 0..text.windows.len();
    let positions = measure_positions(reference, model.into(), text, all, journal, (observer, cancel))?;
    summarize(text, &positions, reference.floor(&positions))
}

pub(crate) fn measure_positions<'a>(
    reference: Reference<'a>,
    model: Scored<'a>,
    text: &EvaluationText,
    windows: Range<usize>,
    journal: &mut Journal<Position>,
    progress: (&dyn Observer, &CancelToken),
) -> Result<Vec<Vec<Position>>> {
    reference.with(&[model], text.windows.len())?.run(
        (&text.windows, windows),
        journal.take(),
        progress,
        |models, noise| Position::new(&models[0], &models[1], noise),
        |windows| {
            require_finite(windows.iter().flatten().flat_map(Position::numbers))?;
            journal.keep(windows)
        },
        &mut dropped,
    )
}

/// Compares several models with one reference, which runs only once.
///
/// # Errors
/// See [`compare`].
pub fn compare_all<'a>(
    reference: Reference<'a>,
    models: &[Scored<'a>],
    text: &EvaluationText,
    observer: &dyn Observer,
    cancel: &CancelToken,
) -> Result<Vec<(Scores, Divergence)>> {
    let all = reference.with(models, text.windows.len())?.run(
        (&text.windows, 0..text.windows.len()),
        Vec::new(),
        (observer, cancel),
        |models, noise| -> Vec<Position> {
            models[1..].iter().map(|model| Position::new(&models[0], model, noise)).collect()
        },
        |windows| require_finite(windows.iter().flatten().flatten().flat_map(Position::numbers)),
        &mut dropped,
    )?;
    let of = |model: usize| -> Vec<Vec<Position>> {
        all.iter().map(|window| window.iter().map(|position| position[model]).collect()).collect()
    };
    (0..models.len())
        .map(|model| {
            let positions = of(model);
            summarize(text, &positions, reference.floor(&positions))
        })
        .collect()
}

impl NoiseFloor {
    /// Computes the noise floor from the windows for which it was measured; `None` if it was measured for none.
    pub(crate) fn of<P>(windows: &[Vec<P>], floor: impl Fn(&P) -> Option<f64>) -> Option<Self> {
        let measured = windows.iter().map(|w| w.iter().filter_map(&floor).collect::<Vec<f64>>());
        let kl: Vec<Vec<f64>> = measured.filter(|w| !w.is_empty()).collect();
        let totals: Vec<f64> = kl.iter().map(|w| w.iter().sum()).collect();
        let counts: Vec<usize> = kl.iter().map(Vec::len).collect();
        (!kl.is_empty()).then(|| Self {
            kl: Estimate::clustered(&totals, &counts),
            kl_histogram: Histogram::of(kl.iter().flatten().copied()),
            windows: kl.len(),
        })
    }
}

pub(crate) fn summarize(
    text: &EvaluationText,
    positions: &[Vec<Position>],
    noise_floor: Option<NoiseFloor>,
) -> Result<(Scores, Divergence)> {
    let column = |of: fn(&Position) -> f64| -> Vec<Vec<f64>> {
        positions.iter().map(|w| w.iter().map(of).collect()).collect()
    };
    let estimate = |of: &dyn Fn(&Position) -> f64| {
        let totals: Vec<f64> = positions.iter().map(|w| w.iter().map(of).sum()).collect();
        let counts: Vec<usize> = positions.iter().map(Vec::len).collect();
        Estimate::clustered(&totals, &counts)
    };
    let model = Scores::new(text, &column(|p| p.model_nll))?;
    let reference = Scores::new(text, &column(|p| p.reference_nll))?;
    let kl = column(|p| p.kl);
    let delta_nll = estimate(&|p| p.model_nll - p.reference_nll);
    let squares = estimate(&|p| p.delta_p().powi(2));
    let [median, p90, p99, p999, max] = quantiles(&kl, &[0.5, 0.9, 0.99, 0.999, 1.0])[..] else {
        return Err(Error::Internal("quantiles were lost".into()));
    };
    let detectable = delta_nll.minimum_detectable(LEVEL, &positions.iter().map(Vec::len).collect::<Vec<_>>());
    let mean_kl = estimate(&|p| p.kl);
    let divergence = Divergence {
        reference,
        delta_nll,
        perplexity_ratio: delta_nll.exp(),
        minimum_detectable_increase: detectable.map(f64::exp_m1),
        kl: mean_kl,
        kl_quantiles: KlQuantiles { median, p90, p99, p999, max },
        kl_histogram: Histogram::of(kl.iter().flatten().copied()),
        kl_by_confidence: by_confidence(positions),
        window_kl: kl.iter().map(|w| w.iter().sum::<f64>() / w.len() as f64).collect(),
        top1_agreement: estimate(&|p| f64::from(u8::from(p.top1))),
        top5_overlap: estimate(&|p| p.top5),
        rms_delta_p: squares.sqrt(),
        at_noise_floor: noise_floor.as_ref().map(|floor| mean_kl.mean < AT_FLOOR * floor.kl.mean),
        noise_floor,
    };
    Ok((model, divergence))
}

fn by_confidence(positions: &[Vec<Position>]) -> Vec<ConfidenceBucket> {
    let bucket = |edges: &[f64]| {
        let (from, to) = (edges[0], edges[1]);
        let inside = |p: &&Position| p.confidence >= from && (p.confidence < to || to == 1.0);
        let (totals, counts): (Vec<f64>, Vec<usize>) = positions
            .iter()
            .map(|w| w.iter().filter(inside).fold((0.0, 0), |(sum, n), p| (sum + p.kl, n + 1)))
            .filter(|(_, n)| *n > 0)
            .unzip();
        let count = counts.iter().sum();
        ConfidenceBucket {
            from,
            to,
            positions: count,
            kl: (count > 0).then(|| Estimate::clustered(&totals, &counts)),
        }
    };
    CONFIDENCE.windows(2).map(bucket).collect()
}
