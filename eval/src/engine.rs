//! Models to score: models that an engine runs itself, and decoders of `quant-core`.

use std::error::Error as StdError;
use std::ops::Range;

#[cfg(feature = "decoders")]
use quant_core::model::Decoder;
use quant_formats::{Error, Result};

use crate::Window;
use crate::score::{Origin, Runner, StageInputs};
use crate::vocabulary::{Given, Output};

/// Maximum number of bytes of logits that are requested at a time. A single position may exceed it.
const MAX_LOGITS_BYTES: usize = 64 << 20;

/// An error of an engine. An evaluation returns an [`Error`] as it is, so its category and remedy are kept. Any other error
/// becomes the source of an [`Error::Engine`].
pub type EngineError = Box<dyn StdError + Send + Sync>;

/// A model that an engine runs, scored by its logits in the same way as a decoder of `quant-core`.
///
/// [`logits`](Self::logits) suffices. An engine with a batch dimension, or with too little memory for the logits of a
/// whole window, also implements [`start`](Self::start).
///
/// ```
/// use quant_evaluator::{CancelToken, EngineError, EvaluationText, Journal, LogitsModel, Profile, Silent, Window, perplexity};
///
/// /// Predicts that every token is followed by the next one of the vocabulary.
/// struct Successor;
///
/// impl LogitsModel for Successor {
///     fn vocab(&self) -> usize {
///         512
///     }
///
///     fn logits(&self, tokens: &[u32], first: usize, out: &mut Vec<f32>) -> Result<(), EngineError> {
///         for &token in &tokens[first..] {
///             out.extend((0..512).map(|next| if next == token + 1 { 3.0 } else { 0.0 }));
///         }
///         Ok(())
///     }
/// }
///
/// // Windows that the engine has tokenized itself; with a tokenizer.json, use `EvaluationText::new`.
/// let windows = [0, 64].map(|begin| Window { tokens: (begin..begin + 64).collect(), first: 1 });
/// let text = EvaluationText::of_windows(windows.into(), Profile::gptq(64)?)?;
/// let (model, cancel): (&dyn LogitsModel, _) = (&Successor, CancelToken::new());
/// let scores = perplexity(model, &text, &mut Journal::none(), &Silent, &cancel)?;
/// // The next token has a logit of 3, the other 511 have 0.
/// let expected = (3.0_f64.exp() + 511.0) / 3.0_f64.exp();
/// assert!((scores.perplexity.mean / expected - 1.0).abs() < 1e-6);
/// # Ok::<(), quant_evaluator::Error>(())
/// ```
pub trait LogitsModel {
    /// Number of tokens in the vocabulary, which is the length of a row of logits.
    fn vocab(&self) -> usize;

    /// Appends, for each of `tokens[first..]`, the logits of the next token, given all tokens up to this one:
    /// `[tokens.len() - first, vocab]`, row-major. The first token has position 0; calls are independent of each other.
    ///
    /// # Errors
    /// Any [error of the engine](EngineError); it ends the evaluation.
    fn logits(
        &self,
        tokens: &[u32],
        first: usize,
        out: &mut Vec<f32>,
    ) -> std::result::Result<(), EngineError>;

    /// Maximum number of windows that [`start`](Self::start) accepts; 1 by default. All have the same number of tokens.
    fn max_windows(&self) -> usize {
        1
    }

    /// Runs windows, and returns an object that computes their logits for some positions at a time. By default, it
    /// calls [`logits`](Self::logits) for each window, and all logits of these windows are in memory: `4 · positions ·
    /// vocab` bytes.
    ///
    /// ```
    /// use std::ops::Range;
    /// use quant_evaluator::{EngineError, LogitsBatch, LogitsModel, UnscoredWindow};
    ///
    /// /// An engine that runs 8 windows at a time, and keeps their hidden states.
    /// struct Engine;
    /// struct HiddenStates(Vec<Vec<u32>>);
    ///
    /// impl LogitsModel for Engine {
    ///     fn vocab(&self) -> usize {
    ///         512
    ///     }
    ///
    ///     fn logits(&self, tokens: &[u32], first: usize, out: &mut Vec<f32>) -> Result<(), EngineError> {
    ///         let mut batch = self.start(&[UnscoredWindow::new(tokens, first)])?;
    ///         batch.logits(0, 0..tokens.len() - first, out)
    ///     }
    ///
    ///     fn max_windows(&self) -> usize {
    ///         8
    ///     }
    ///
    ///     fn start<'a>(&'a self, windows: &[UnscoredWindow<'_>]) -> Result<Box<dyn LogitsBatch + 'a>, EngineError> {
    ///         // Here the engine would run its blocks on all windows together.
    ///         Ok(Box::new(HiddenStates(windows.iter().map(|w| w.tokens[w.first..].to_vec()).collect())))
    ///     }
    /// }
    ///
    /// impl LogitsBatch for HiddenStates {
    ///     fn logits(&mut self, window: usize, positions: Range<usize>, out: &mut Vec<f32>) -> Result<(), EngineError> {
    ///         // Here the engine would multiply some hidden states with its head.
    ///         for &token in &self.0[window][positions] {
    ///             out.extend((0..512).map(|next| if next == token + 1 { 3.0 } else { 0.0 }));
    ///         }
    ///         Ok(())
    ///     }
    /// }
    /// # let mut out = Vec::new();
    /// # Engine.logits(&[3, 4, 5], 1, &mut out).unwrap();
    /// # assert_eq!((out.len(), out[512 + 6]), (2 * 512, 3.0));
    /// ```
    ///
    /// # Errors
    /// Any [error of the engine](EngineError); it ends the evaluation.
    fn start<'a>(
        &'a self,
        windows: &[UnscoredWindow<'_>],
    ) -> std::result::Result<Box<dyn LogitsBatch + 'a>, EngineError> {
        let vocab = self.vocab();
        let each = windows.iter().map(|window| {
            let mut logits = Vec::new();
            self.logits(window.tokens, window.first, &mut logits)?;
            let positions = window.tokens.len().saturating_sub(window.first);
            match positions.checked_mul(vocab) == Some(logits.len()) {
                true => Ok(logits),
                false => Err(Miscounted { logits: logits.len(), positions }.into()),
            }
        });
        Ok(Box::new(AllLogits(each.collect::<std::result::Result<_, EngineError>>()?, vocab)))
    }
}

/// A window as an engine runs it.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct UnscoredWindow<'a> {
    /// The tokens that the model reads; the first has position 0.
    pub tokens: &'a [u32],
    /// The first position whose logits are needed: they predict the token after `tokens[first]`.
    pub first: usize,
}

impl<'a> UnscoredWindow<'a> {
    /// Creates a window.
    pub fn new(tokens: &'a [u32], first: usize) -> Self {
        Self { tokens, first }
    }
}

/// Windows that an engine has run. Logits are requested for some positions at a time, in order.
pub trait LogitsBatch {
    /// Appends the logits of a window at these positions, `[positions.len(), vocab]`, row-major. Positions count from
    /// the window's [`first`](UnscoredWindow::first).
    ///
    /// # Errors
    /// Any [error of the engine](EngineError); it ends the evaluation.
    fn logits(
        &mut self,
        window: usize,
        positions: Range<usize>,
        out: &mut Vec<f32>,
    ) -> std::result::Result<(), EngineError>;
}

/// All logits of some windows, and the size of the vocabulary.
struct AllLogits(Vec<Vec<f32>>, usize);

impl LogitsBatch for AllLogits {
    fn logits(
        &mut self,
        window: usize,
        positions: Range<usize>,
        out: &mut Vec<f32>,
    ) -> std::result::Result<(), EngineError> {
        out.extend_from_slice(&self.0[window][positions.start * self.1..positions.end * self.1]);
        Ok(())
    }
}

#[derive(Debug)]
struct Miscounted {
    logits: usize,
    positions: usize,
}

impl std::fmt::Display for Miscounted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} logits for {} positions", self.logits, self.positions)
    }
}

impl StdError for Miscounted {}

fn failed(error: EngineError, vocab: usize) -> Error {
    match error.downcast::<Error>() {
        Ok(error) => *error,
        Err(error) => match error.downcast_ref::<Miscounted>() {
            Some(count) => {
                Error::Logits { reason: format!("the engine returned {count} and a vocabulary of {vocab}") }
            }
            None => Error::Engine(error),
        },
    }
}

impl<'a> Runner<'a> for &'a dyn LogitsModel {
    fn output(&self) -> Result<Box<dyn Output + 'a>> {
        match self.vocab() {
            0 => Err(Error::Logits { reason: "the engine reports a vocabulary of 0 tokens".into() }),
            vocab => Ok(Box::new(Given(vocab))),
        }
    }

    fn run(
        &self,
        output: &dyn Output,
        windows: &[Window],
        batch: &[usize],
    ) -> Result<Box<dyn StageInputs + 'a>> {
        let vocab = output.vocab();
        let asked = batch.iter().map(|&n| UnscoredWindow::new(windows[n].input(), windows[n].first - 1));
        let asked: Vec<UnscoredWindow<'_>> = asked.collect();
        let batch_logits = self.start(&asked).map_err(|e| failed(e, vocab))?;
        let scored = batch.iter().map(|&n| windows[n].scored()).collect();
        Ok(Box::new(OfEngine { batch: batch_logits, scored, vocab, logits: Vec::new() }))
    }

    fn max_windows(&self, _length: usize) -> usize {
        (**self).max_windows()
    }
}

struct OfEngine<'a> {
    batch: Box<dyn LogitsBatch + 'a>,
    /// Number of positions per window.
    scored: Vec<usize>,
    vocab: usize,
    /// The last ones requested.
    logits: Vec<f32>,
}

impl StageInputs for OfEngine<'_> {
    fn max_positions(&self) -> usize {
        (MAX_LOGITS_BYTES / 4 / self.vocab).max(1)
    }

    fn at(&mut self, positions: Range<usize>) -> Result<&[f32]> {
        self.logits.clear();
        let mut start = 0;
        for (window, &scored) in self.scored.iter().enumerate() {
            let some = positions.start.max(start)..positions.end.min(start + scored);
            if some.start < some.end {
                let (before, count) = (self.logits.len(), some.len());
                let asked = some.start - start..some.end - start;
                let asked = self.batch.logits(window, asked, &mut self.logits);
                asked.map_err(|e| failed(e, self.vocab))?;
                let got = self.logits.len().saturating_sub(before);
                if count.checked_mul(self.vocab) != Some(got) {
                    return Err(failed(Miscounted { logits: got, positions: count }.into(), self.vocab));
                }
            }
            start += scored;
        }
        Ok(&self.logits)
    }
}

/// A model to score.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub enum Scored<'a> {
    /// A decoder of `quant-core`.
    #[cfg(feature = "decoders")]
    Decoder(&'a Decoder),
    /// A model that an engine runs.
    Engine(&'a dyn LogitsModel),
}

impl<'a> Scored<'a> {
    pub(crate) fn origin(self) -> Origin<'a> {
        match self {
            #[cfg(feature = "decoders")]
            Self::Decoder(decoder) => Box::new(crate::decoder::Blocks(decoder, None)),
            Self::Engine(engine) => Box::new(engine),
        }
    }
}

#[cfg(feature = "decoders")]
impl<'a> From<&'a Decoder> for Scored<'a> {
    fn from(decoder: &'a Decoder) -> Self {
        Self::Decoder(decoder)
    }
}

impl<'a> From<&'a dyn LogitsModel> for Scored<'a> {
    fn from(engine: &'a dyn LogitsModel) -> Self {
        Self::Engine(engine)
    }
}
