//! Models to score: decoders of `quant-core`, and models that an engine runs itself.

use std::error::Error;

use quant_core::model::Decoder;

/// A model that an engine runs, scored by its logits, with the same windows, statistics and gate as a [`Decoder`].
///
/// ```
/// use quant_evaluator::LogitsModel;
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
/// let mut out = Vec::new();
/// Successor.logits(&[5, 6, 7], 1, &mut out).unwrap();
/// assert_eq!(out.len(), 2 * 512);
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
