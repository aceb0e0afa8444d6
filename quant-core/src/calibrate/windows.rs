//! Token windows: the batch that calibration and evaluation run on.
//!
//! # The sampling rule
//!
//! 1. Every document is tokenized by itself: a text with the special tokens that the tokenizer adds,
//!    a conversation as the model's chat template renders it, which writes them itself.
//! 2. Documents become windows of equal length. By [`Packing::Stream`] their tokens are joined in
//!    order, and the stream is cut; what is left at the end is dropped. By [`Packing::Documents`]
//!    they are laid into windows by [the rule of `packing`](super::packing).
//! 3. Windows none of whose tokens count are left out.
//! 4. If there are more windows than asked for, a selection is drawn without replacement by
//!    [`SplitMix64`](crate::random::SplitMix64) from the seed, and taken in order. Fewer are an error.
//!
//! The rule uses nothing but the documents, the tokenizer, the template and what [`Sampling`] says.

use std::path::Path;

use sha2::{Digest, Sha256};

use super::packing::{Document, Packed, pack, stream};
use super::{BatchLayout, ExpertSampling, Mask, Packing, TextTokenizer, TokenUse};
use crate::digest::hex;
use crate::model::Segments;
use crate::random::SplitMix64;
use crate::{Error, Result};

/// The largest number of calibration windows that can be asked for.
const MAX_SAMPLES: usize = 1 << 20;
/// Tokens of the longest calibration window that can be asked for.
const MAX_LENGTH: usize = 1 << 20;

/// How many windows of what length, the seed of their selection, and how documents go into them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampling {
    /// Windows.
    pub samples: usize,
    /// Tokens of one window.
    pub length: usize,
    /// Seed of the selection.
    pub seed: u64,
    /// How documents become windows.
    pub packing: Packing,
    /// Which tokens a search looks at.
    pub mask: Mask,
    /// Which of these an expert is calibrated on.
    pub experts: ExpertSampling,
}

impl Sampling {
    /// Whether there is anything to calibrate on.
    ///
    /// # Errors
    /// [`Error::Usage`] for no windows, windows of fewer than two tokens, or as [`ExpertSampling::check`].
    pub fn check(self) -> Result<()> {
        if self.length > MAX_LENGTH || self.samples > MAX_SAMPLES {
            return Err(Error::usage(
                format!("{} calibration windows of {} tokens", self.samples, self.length),
                format!("ask for at most {MAX_SAMPLES} windows of at most {MAX_LENGTH} tokens"),
            ));
        }
        if self.samples > 0 && self.length >= 2 {
            return self.experts.check();
        }
        Err(Error::usage(
            format!("calibration with {} windows of {} tokens", self.samples, self.length),
            "ask for at least one window of at least two tokens",
        ))
    }
}

impl Default for Sampling {
    /// 64 windows of 512 tokens, seed 0, packed as the data asks for, all tokens counted, by experts those that are routed
    /// to them.
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
/// let windows = TokenWindows::cut((0..10).collect(), 4); // what is left at the end is dropped
/// assert_eq!((windows.len(), windows.window(1)), (2, &[4, 5, 6, 7][..]));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenWindows {
    length: usize,
    tokens: Vec<u32>,
    /// What each token is there for; nothing where all count.
    uses: Option<Vec<TokenUse>>,
    /// Where in its window each token's document begins; nothing where windows are of one piece.
    starts: Option<Vec<u32>>,
}

impl TokenWindows {
    /// Cuts a stream into windows of `length` tokens and drops the rest.
    ///
    /// # Panics
    /// When `length` is 0.
    pub fn cut(mut tokens: Vec<u32>, length: usize) -> Self {
        assert!(length > 0, "windows cannot be empty");
        tokens.truncate(tokens.len() - tokens.len() % length);
        Self { length, tokens, uses: None, starts: None }
    }

    /// The same windows with what is known of each token, for whoever lays documents into windows
    /// themselves: what it is there for, and where in its window its document begins. Either may be
    /// left out: then all count, or every window is of one piece.
    ///
    /// # Errors
    /// [`Error::Usage`] when they are not one a token, or documents do not begin where they say.
    pub fn with_layout(self, uses: Option<Vec<TokenUse>>, starts: Option<Vec<u32>>) -> Result<Self> {
        let all = self.tokens.len();
        let sized = uses.as_ref().is_none_or(|u| u.len() == all)
            && starts.as_ref().is_none_or(|s| Segments::new(s).fit(self.len(), self.length));
        if !sized {
            return Err(Error::usage(
                format!("uses or document starts do not fit {} windows of {}", self.len(), self.length),
                "give one a token; a document's start is the place of its first token in the window",
            ));
        }
        Ok(Self { uses, starts, ..self })
    }

    /// Samples windows of texts by the rule of this module; `origin` names the text in messages.
    ///
    /// # Errors
    /// When the text gives fewer windows than asked for, or tokenizing fails; [`Error::Usage`] when
    /// prompts are to be masked, which a text has not.
    pub fn sample(
        tokenizer: &TextTokenizer,
        documents: &[String],
        sampling: Sampling,
        origin: &Path,
    ) -> Result<Self> {
        sampling.check()?;
        if sampling.mask == Mask::Prompts {
            return Err(Error::usage(
                format!("{} is plain text, in which no prompts can be masked", origin.display()),
                "give conversations (.jsonl with `messages`) with ‹calibration›, or leave the mask out",
            ));
        }
        let texts: Vec<&str> = documents.iter().map(String::as_str).collect();
        let encoded = tokenizer.encode_all(&texts)?.into_iter();
        let documents = encoded.map(|tokens| Document { tokens, uses: None }).collect();
        Self::of_documents(documents, sampling, origin)
    }

    /// Windows of tokenized documents; [`Packing::Auto`] means the stream.
    pub(super) fn of_documents(documents: Vec<Document>, sampling: Sampling, origin: &Path) -> Result<Self> {
        let length = sampling.length;
        let total: usize = documents.iter().map(|d| d.tokens.len()).sum();
        let all = match sampling.packing {
            Packing::Auto | Packing::Stream => {
                let (tokens, uses) = stream(documents, length);
                Self { length, tokens, uses, starts: None }
            }
            Packing::Documents => {
                let Packed { tokens, uses, starts } = pack(&documents, length);
                let plain = uses.iter().all(|u| *u == TokenUse::Counted);
                Self { length, tokens, uses: (!plain).then_some(uses), starts: Some(starts) }
            }
        };
        let useful: Vec<usize> = (0..all.len()).filter(|&i| all.counts(i)).collect();
        let left_out = all.len() - useful.len();
        if useful.len() < sampling.samples {
            let idle = match left_out {
                0 => String::new(),
                some => format!(" and {some} in which no token counts"),
            };
            return Err(Error::Text {
                path: origin.to_owned(),
                line: None,
                reason: format!(
                    "gives {total} tokens, that is {} windows of {length}{idle}; {} are needed",
                    useful.len(),
                    sampling.samples
                ),
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

    /// The SHA-256 of what is known of every token beside itself: a byte for its use (0 counted, 1
    /// context, 2 padding) and where its document begins in the window, as a little-endian `u32`.
    /// `None` where windows are of one piece and all tokens count.
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

    /// How documents became these windows, [`Packing::Stream`] or [`Packing::Documents`].
    pub fn packing(&self) -> Packing {
        if self.starts.is_some() { Packing::Documents } else { Packing::Stream }
    }

    /// What the tokens are to a search.
    pub fn layout(&self) -> BatchLayout {
        BatchLayout::new(self.len(), self.length, self.starts.as_deref(), self.uses.as_deref())
    }

    /// Tokens of each use: those that count, context, padding.
    pub fn uses(&self) -> [usize; 3] {
        let Some(uses) = &self.uses else { return [self.tokens.len(), 0, 0] };
        [TokenUse::Counted, TokenUse::Context, TokenUse::Padding]
            .map(|kind| uses.iter().filter(|u| **u == kind).count())
    }

    /// Whether some token of a window counts.
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

    /// Only these windows.
    fn keep(&self, indices: &[usize]) -> Self {
        fn of<T: Copy>(all: &[T], length: usize, indices: &[usize]) -> Vec<T> {
            indices.iter().flat_map(|i| &all[i * length..(i + 1) * length]).copied().collect()
        }
        Self {
            length: self.length,
            tokens: of(&self.tokens, self.length, indices),
            uses: self.uses.as_ref().map(|u| of(u, self.length, indices)),
            starts: self.starts.as_ref().map(|s| of(s, self.length, indices)),
        }
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

    /// Number of windows.
    pub fn len(&self) -> usize {
        self.tokens.len() / self.length
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Tokens of one window.
    pub fn length(&self) -> usize {
        self.length
    }

    /// All tokens, window after window.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// One window.
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
            assert!(error.contains("1 windows of 4 and 2 in which no token counts; 2"), "{error}");
        }
    }

    #[test]
    fn a_layout_has_a_hash_where_it_says_something() {
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
