//! Models to score: decoders of `quant-core`, and models that an engine runs itself.

use std::error::Error;

use quant_core::model::Decoder;

/// A model that an engine runs, scored by its logits, with the same windows, statistics and gate as a [`Decoder`].
///
/// ```
/// use quant_core::{CancelToken, Silent};
/// use quant_evaluator::{EvaluationText, Journal, LogitsModel, Profile, Window, perplexity};
///
/// /// Predicts that every token is followed by the next one of the vocabulary.
/// struct Successor;
///
/// impl LogitsModel for Successor {
///     fn vocab(&self) -> usize {
///         512
///     }
///
///     fn logits(
///         &self,
///         tokens: &[u32],
///         first: usize,
///         out: &mut Vec<f32>,
///     ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
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
/// # Ok::<(), quant_core::Error>(())
/// ```
pub trait LogitsModel {
    /// Number of tokens in the vocabulary, which is the length of a row of logits.
    fn vocab(&self) -> usize;

    /// Appends the logits for the token after each of `tokens[first..]`, given all tokens before it:
    /// `[tokens.len() - first, vocab]`, row-major. The first token has position 0; calls are independent of each other.
    ///
    /// # Errors
    /// Any error of the engine; it ends the evaluation.
    fn logits(
        &self,
        tokens: &[u32],
        first: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), Box<dyn Error + Send + Sync>>;
}

/// A model to score.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub enum Scored<'a> {
    /// A decoder of `quant-core`.
    Decoder(&'a Decoder),
    /// A model that an engine runs. All logits of a window are in memory: `4 · positions · vocab` bytes.
    Engine(&'a dyn LogitsModel),
}

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
