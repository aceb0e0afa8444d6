//! Token windows: the batch on which calibration and evaluation run.
//!
//! # The sampling rule
//!
//! 1. Every document is tokenized separately. A text gets the special tokens that the tokenizer adds; a conversation is
//!    rendered by the model's chat template, which writes them itself.
//! 2. Documents become windows of equal length. With [`Packing::Stream`], their tokens are concatenated in order and
//!    the stream is cut; the remainder at the end is dropped. With [`Packing::Documents`], they are packed by [the rule
//!    of `packing`](super::packing).
//! 3. Windows without any counted token are left out.
//! 4. If there are more windows than requested, a selection is drawn without replacement by
//!    [`SplitMix64`](crate::random::SplitMix64) from the seed, and kept in order. Too few windows are an error.
//!
//! The result depends only on the documents, the tokenizer, the template and [`Sampling`].

use std::ops::Range;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::packing::{Document, Packed, pack, stream};
use super::{BatchLayout, ExpertSampling, Mask, Packing, TextTokenizer, TokenUse};
use crate::digest::hex;
use crate::model::Segments;
use crate::random::SplitMix64;
use crate::wording::counted;
use crate::{Error, Result};

/// The largest number of calibration windows that can be requested.
const MAX_SAMPLES: usize = 1 << 20;
const MAX_LENGTH: usize = 1 << 20;

/// The number and length of windows, the seed of their selection, and how documents are packed into them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampling {
    /// The number of windows.
    pub samples: usize,
    /// Tokens per window.
    pub length: usize,
    /// Seed of the selection.
    pub seed: u64,
    /// How documents are packed into windows.
    pub packing: Packing,
    /// Which tokens the statistics of calibration include.
    pub mask: Mask,
    /// The tokens on which experts are calibrated.
    pub experts: ExpertSampling,
}

impl Sampling {
    /// Checks the number and length of windows, and the settings for experts.
    ///
    /// # Errors
    /// [`Error::Usage`] unless there are 1 to 2²⁰ windows of 2 to 2²⁰ tokens; as [`ExpertSampling::check`].
    pub fn check(self) -> Result<()> {
        if self.length > MAX_LENGTH || self.samples > MAX_SAMPLES {
            return Err(Error::usage(
                format!(
                    "{} calibration windows of {} tokens are too many or too long",
                    self.samples, self.length
                ),
                format!("request at most {MAX_SAMPLES} windows of at most {MAX_LENGTH} tokens"),
            ));
        }
        if self.samples > 0 && self.length >= 2 {
            return self.experts.check();
        }
        Err(Error::usage(
            format!(
                "{} calibration windows of {} tokens are too few or too short",
                self.samples, self.length
            ),
            "request at least one window of at least two tokens",
        ))
    }
}

impl Default for Sampling {
    /// 64 windows of 512 tokens, seed 0, default packing for the kind of data, all tokens counted, experts calibrated
    /// on the tokens routed to them.
    fn default() -> Self {
        let (packing, mask, experts) = (Packing::Auto, Mask::None, ExpertSampling::default());
        Self { samples: 64, length: 512, seed: 0, packing, mask, experts }
    }
}

/// Windows of equal length.
///
/// ```
/// use quant_core::calibrate::TokenWindows;
///
/// let windows = TokenWindows::cut((0..10).collect(), 4); // the remainder is dropped
/// assert_eq!((windows.len(), windows.window(1)), (2, &[4, 5, 6, 7][..]));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenWindows {
    length: usize,
    tokens: Vec<u32>,
    /// The role of each token; `None` if all tokens count.
    uses: Option<Vec<TokenUse>>,
    /// The start of each token's document in its window; `None` if every window is a single segment.
    starts: Option<Vec<u32>>,
    text: Option<Box<str>>,
}

impl TokenWindows {
    /// Cuts a stream into windows of `length` tokens and drops the remainder.
    ///
    /// # Panics
    /// When `length` is 0.
    pub fn cut(mut tokens: Vec<u32>, length: usize) -> Self {
        assert!(length > 0, "windows cannot be empty");
        tokens.truncate(tokens.len() - tokens.len() % length);
        Self { length, tokens, uses: None, starts: None, text: None }
    }

    /// Adds the name of the text, if it is one that every program has.
    pub fn named(self, text: Option<&str>) -> Self {
        Self { text: text.map(Into::into), ..self }
    }

    /// The name of the text.
    pub fn text(&self) -> Option<&str> {
        self.text.as_deref()
    }

    /// Adds information on tokens, for callers that pack documents themselves: the role of each token, and the start of
    /// its document in its window. Without roles, all tokens count; without starts, every window is a single segment.
    ///
    /// # Errors
    /// [`Error::Usage`] when either does not have one entry per token, or the starts are inconsistent.
    pub fn with_layout(self, uses: Option<Vec<TokenUse>>, starts: Option<Vec<u32>>) -> Result<Self> {
        let all = self.tokens.len();
        let sized = uses.as_ref().is_none_or(|u| u.len() == all)
            && starts.as_ref().is_none_or(|s| Segments::new(s).fit(self.len(), self.length));
        if !sized {
            return Err(Error::usage(
                format!(
                    "the token uses or document starts do not match {} windows of {} tokens",
                    self.len(),
                    self.length
                ),
                "pass one use and one start per token; a start is the index in the window of the document's \
                first token",
            ));
        }
        Ok(Self { uses, starts, ..self })
    }

    /// Samples windows from texts by the rule of this module; `origin` names the text in messages.
    ///
    /// # Errors
    /// If the text yields fewer windows than requested, or tokenizing fails; [`Error::Usage`] if [`Sampling::check`]
    /// fails, or prompts are masked, because a text has no prompts.
    pub fn sample(
        tokenizer: &TextTokenizer,
        documents: &[String],
        sampling: Sampling,
        origin: &Path,
    ) -> Result<Self> {
        sampling.check()?;
        if sampling.mask == Mask::Prompts {
            return Err(Error::usage(
                format!("{} is plain text, which has no prompts to mask", origin.display()),
                "set ‹calibration› to conversations (.jsonl with `messages`), or omit ‹mask›",
            ));
        }
        let texts: Vec<&str> = documents.iter().map(String::as_str).collect();
        let encoded = tokenizer.encode_all(&texts)?.into_iter();
        let documents = encoded.map(|tokens| Document { tokens, uses: None }).collect();
        Self::of_documents(documents, sampling, origin)
    }

    /// Creates windows from tokenized documents. [`Packing::Auto`] means [`Packing::Stream`] here.
    pub(super) fn of_documents(documents: Vec<Document>, sampling: Sampling, origin: &Path) -> Result<Self> {
        let length = sampling.length;
        let total: usize = documents.iter().map(|d| d.tokens.len()).sum();
        let all = match sampling.packing {
            Packing::Auto | Packing::Stream => {
                let (tokens, uses) = stream(documents, length);
                Self { length, tokens, uses, starts: None, text: None }
            }
            Packing::Documents => {
                let Packed { tokens, uses, starts } = pack(&documents, length);
                let plain = uses.iter().all(|u| *u == TokenUse::Counted);
                Self { length, tokens, uses: (!plain).then_some(uses), starts: Some(starts), text: None }
            }
        };
        let useful: Vec<usize> = (0..all.len()).filter(|&i| all.counts(i)).collect();
        let left_out = all.len() - useful.len();
        if useful.len() < sampling.samples {
            let idle = match left_out {
                0 => String::new(),
                some => format!(" (and {some} without counted tokens)"),
            };
            let (has, fill) = (counted(total, "token"), if total == 1 { "fills" } else { "fill" });
            let (filled, needed) = (counted(useful.len(), "window"), counted(sampling.samples, "window"));
            let are = if sampling.samples == 1 { "is" } else { "are" };
            return Err(Error::InputFile {
                path: origin.to_owned(),
                line: None,
                reason: format!("has {has}, which {fill} {filled} of {length}{idle}; {needed} {are} needed"),
                remedy: "give a longer text, or request fewer or shorter windows (‹samples›, ‹seq_len›)"
                    .into(),
            });
        }
        let all = if left_out > 0 { all.keep(&useful) } else { all };
        Ok(all.select(sampling.samples, sampling.seed))
    }

    /// The SHA-256 of all tokens, each as a little-endian `u32`, in hexadecimal digits.
    pub fn sha256(&self) -> String {
        let mut hash = Sha256::new();
        for token in &self.tokens {
            hash.update(token.to_le_bytes());
        }
        hex(&hash.finalize())
    }

    /// The SHA-256 of the information on every token: a byte for its use (0 counted, 1 context, 2 padding) and the
    /// start of its document in the window as a little-endian `u32`. `None` if the windows have no such information:
    /// they were cut from a stream of tokens that all count.
    pub fn layout_sha256(&self) -> Option<String> {
        if self.uses.is_none() && self.starts.is_none() {
            return None;
        }
        let mut hash = Sha256::new();
        for i in 0..self.tokens.len() {
            hash.update([self.uses.as_ref().map_or(0, |u| u[i] as u8)]);
            hash.update(self.starts.as_ref().map_or(0, |s| s[i]).to_le_bytes());
        }
        Some(hex(&hash.finalize()))
    }

    /// How documents were packed into these windows: [`Packing::Stream`] or [`Packing::Documents`].
    pub fn packing(&self) -> Packing {
        if self.starts.is_some() { Packing::Documents } else { Packing::Stream }
    }

    /// The layout of the batch: its shape, its documents, and which tokens count.
    pub fn layout(&self) -> BatchLayout {
        BatchLayout::new(self.len(), self.length, self.starts.as_deref(), self.uses.as_deref())
    }

    /// The number of tokens by use: counted, context, padding.
    pub fn uses(&self) -> [usize; 3] {
        let Some(uses) = &self.uses else { return [self.tokens.len(), 0, 0] };
        [TokenUse::Counted, TokenUse::Context, TokenUse::Padding]
            .map(|kind| uses.iter().filter(|u| **u == kind).count())
    }

    fn counts(&self, window: usize) -> bool {
        let span = window * self.length..(window + 1) * self.length;
        self.uses.as_ref().is_none_or(|u| u[span].contains(&TokenUse::Counted))
    }

    /// Draws `count` of the windows without replacement and keeps them in order.
    pub fn select(self, count: usize, seed: u64) -> Self {
        if count >= self.len() {
            return self;
        }
        self.keep(&SplitMix64(seed).choose(count, self.len()))
    }

    fn keep(&self, indices: &[usize]) -> Self {
        fn of<T: Copy>(all: &[T], length: usize, indices: &[usize]) -> Vec<T> {
            indices.iter().flat_map(|i| &all[i * length..(i + 1) * length]).copied().collect()
        }
        Self {
            length: self.length,
            tokens: of(&self.tokens, self.length, indices),
            uses: self.uses.as_ref().map(|u| of(u, self.length, indices)),
            starts: self.starts.as_ref().map(|s| of(s, self.length, indices)),
            text: self.text.clone(),
        }
    }

    /// Returns some consecutive windows.
    ///
    /// # Panics
    /// When there are no such windows.
    pub fn slice(&self, windows: Range<usize>) -> Self {
        self.keep(&windows.collect::<Vec<_>>())
    }

    /// The role of each token; `None` if all count.
    pub fn token_uses(&self) -> Option<&[TokenUse]> {
        self.uses.as_deref()
    }

    /// The start of each token's document in its window; `None` if every window is a single segment.
    pub fn document_starts(&self) -> Option<&[u32]> {
        self.starts.as_deref()
    }

    /// Keeps only the first `count` windows.
    pub fn truncate(&mut self, count: usize) {
        let tokens = count.saturating_mul(self.length);
        self.tokens.truncate(tokens);
        if let Some(uses) = &mut self.uses {
            uses.truncate(tokens);
        }
        if let Some(starts) = &mut self.starts {
            starts.truncate(tokens);
        }
    }

    /// The number of windows.
    pub fn len(&self) -> usize {
        self.tokens.len() / self.length
    }

    /// Whether there are no windows.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Tokens per window.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The tokens of all windows, concatenated.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The tokens of one window.
    ///
    /// # Panics
    /// When there is no such window.
    pub fn window(&self, index: usize) -> &[u32] {
        &self.tokens[index * self.length..(index + 1) * self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_and_selects() {
        let windows = TokenWindows::cut((0..107).collect(), 10);
        assert_eq!((windows.len(), windows.window(9)), (10, (90..100).collect::<Vec<_>>().as_slice()));
        let chosen = windows.clone().select(4, 7);
        assert_eq!(chosen.len(), 4);
        let firsts: Vec<u32> = (0..4).map(|i| chosen.window(i)[0]).collect();
        assert!(firsts.windows(2).all(|w| w[0] < w[1]), "{firsts:?}");
        assert_eq!(chosen, windows.clone().select(4, 7));
        assert_ne!(chosen, windows.clone().select(4, 8));
        assert_eq!(windows.clone().select(99, 7), windows);
    }

    #[test]
    fn windows_in_which_nothing_counts_are_left_out() {
        use TokenUse::{Context, Counted};
        let documents = |uses: [TokenUse; 3]| -> Vec<Document> {
            let of = |(i, u): (u32, &TokenUse)| Document {
                tokens: (10 * i..10 * i + 4).collect(),
                uses: Some(vec![*u; 4]),
            };
            (1..).zip(&uses).map(of).collect()
        };
        let sampling = |samples, packing| Sampling { samples, length: 4, packing, ..Sampling::default() };
        for packing in [Packing::Stream, Packing::Documents] {
            let make = |samples, uses| {
                TokenWindows::of_documents(documents(uses), sampling(samples, packing), Path::new("x"))
            };
            let windows = make(2, [Counted, Context, Counted]).unwrap();
            assert_eq!(windows.tokens(), [10, 11, 12, 13, 30, 31, 32, 33]);
            assert_eq!(windows.uses(), [8, 0, 0]);
            assert_eq!(windows.layout().counted(), 8);
            let error = make(2, [Counted, Context, Context]).unwrap_err().to_string();
            assert!(error.contains("1 window of 4 (and 2 without counted tokens); 2"), "{error}");
        }
    }

    #[test]
    fn a_layout_has_a_hash_unless_it_is_trivial() {
        let documents = |uses| vec![Document { tokens: (1..9).collect(), uses }];
        let hash = |uses, packing| {
            let sampling = Sampling { samples: 2, length: 4, packing, ..Sampling::default() };
            let windows = TokenWindows::of_documents(documents(uses), sampling, Path::new("x")).unwrap();
            (windows.sha256(), windows.layout_sha256())
        };
        let plain = hash(None, Packing::Stream);
        let mut uses = vec![TokenUse::Counted; 8];
        uses[5] = TokenUse::Context;
        let masked = hash(Some(uses), Packing::Stream);
        assert_eq!(plain.1, None);
        assert_eq!((&plain.0, masked.1.is_some()), (&masked.0, true));
        assert_ne!(hash(None, Packing::Documents).1, masked.1);
    }
}
