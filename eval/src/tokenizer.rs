//! The tokenizers that texts are cut with: those of models on disk, and those of engines.

use std::fmt;
use std::ops::Range;

use quant_formats::{Error, Result};

/// The tokens of a text, each with its byte range in the text.
pub type EncodedText = Vec<(u32, Range<usize>)>;

/// A tokenizer, as [`EvaluationText::new`](crate::EvaluationText::new) uses it.
///
/// ```
/// use quant_evaluator::{EncodedText, EvaluationText, Profile, Result, Tokenizer};
///
/// /// Bytes as tokens.
/// #[derive(Debug)]
/// struct Bytes;
///
/// impl Tokenizer for Bytes {
///     fn encode(&self, texts: &[&str]) -> Result<Vec<EncodedText>> {
///         let one = |text: &&str| text.bytes().enumerate().map(|(i, b)| (b.into(), i..i + 1)).collect();
///         Ok(texts.iter().map(one).collect())
///     }
/// }
///
/// let document = "abcd".repeat(40);
/// let text = EvaluationText::new(&Bytes, &[document], Profile::gptq(64)?.into(), None, "letters".as_ref())?;
/// assert_eq!((text.windows.len(), text.scored_bytes), (2, 2 * 63));
/// # Ok::<(), quant_evaluator::Error>(())
/// ```
pub trait Tokenizer: fmt::Debug {
    /// Returns the tokens of each text, including special tokens that the tokenizer adds. Those have an empty byte
    /// range.
    ///
    /// # Errors
    /// When the tokenizer fails on a text.
    fn encode(&self, texts: &[&str]) -> Result<Vec<EncodedText>>;

    /// The token that profiles for whole documents (`lmeval-rolling`) put before each: BOS, or else EOS.
    ///
    /// # Errors
    /// By default, because the tokenizer names no such token.
    fn document_prefix(&self) -> Result<u32> {
        Err(Error::usage(
            "lmeval-rolling needs a BOS or EOS token, which the tokenizer does not name",
            "implement `Tokenizer::document_prefix`, or choose a different ‹profile›",
        ))
    }

    /// Whether the tokenizer's configuration requests a BOS token at the start of every text, if it says so. If
    /// [`encode`](Self::encode) adds none, there is a warning.
    fn adds_bos(&self) -> Option<bool> {
        None
    }

    /// SHA-256 of the tokenizer's file in hexadecimal, which results store; empty without a file.
    fn sha256(&self) -> &str {
        ""
    }
}
