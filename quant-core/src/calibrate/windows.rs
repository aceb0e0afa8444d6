//! Token windows: the batch that calibration and evaluation run on.
//!
//! # The sampling rule
//!
//! 1. Every document is tokenized by itself, with the special tokens the tokenizer adds.
//! 2. The documents' tokens are joined in order, and the stream is cut into windows of equal
//!    length; what is left at the end is dropped.
//! 3. If there are more windows than asked for, a selection is drawn without replacement by
//!    [`SplitMix64`] from the seed, and taken in stream order. Fewer are an error.
//!
//! The rule uses nothing but the documents, the tokenizer and the three numbers of [`Sampling`].

use std::path::Path;

use sha2::{Digest, Sha256};

use super::TextTokenizer;
use crate::digest::hex;
use crate::{Error, Result};

/// How many windows of what length, and the seed of their selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampling {
    /// Windows.
    pub samples: usize,
    /// Tokens of one window.
    pub length: usize,
    /// Seed of the selection.
    pub seed: u64,
}

impl Sampling {
    /// Whether there is anything to calibrate on.
    ///
    /// # Errors
    /// [`Error::Usage`] for no windows, or windows of fewer than two tokens.
    pub fn check(self) -> Result<()> {
        if self.samples > 0 && self.length >= 2 {
            return Ok(());
        }
        Err(Error::usage(
            format!("{} windows of {} tokens are no calibration batch", self.samples, self.length),
            "ask for at least one window of at least two tokens",
        ))
    }
}

impl Default for Sampling {
    /// 64 windows of 512 tokens, seed 0.
    fn default() -> Self {
        Self { samples: 64, length: 512, seed: 0 }
    }
}

/// Windows of equal length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenWindows {
    length: usize,
    tokens: Vec<u32>,
}

impl TokenWindows {
    /// Cuts a stream into windows of `length` tokens and drops the rest.
    ///
    /// # Panics
    /// When `length` is 0.
    pub fn cut(mut tokens: Vec<u32>, length: usize) -> Self {
        assert!(length > 0, "windows cannot be empty");
        tokens.truncate(tokens.len() - tokens.len() % length);
        Self { length, tokens }
    }

    /// Samples windows by the rule of this module; `origin` names the text in messages.
    ///
    /// # Errors
    /// When the text gives fewer windows than asked for, or tokenizing fails.
    pub fn sample(
        tokenizer: &TextTokenizer,
        documents: &[String],
        sampling: Sampling,
        origin: &Path,
    ) -> Result<Self> {
        sampling.check()?;
        let mut stream = Vec::new();
        for document in documents {
            stream.extend(tokenizer.encode(document)?);
        }
        let total = stream.len();
        let all = Self::cut(stream, sampling.length);
        if all.len() < sampling.samples {
            return Err(Error::Text {
                path: origin.to_owned(),
                line: None,
                reason: format!(
                    "gives {total} tokens, that is {} windows of {}; {} are needed",
                    all.len(),
                    sampling.length,
                    sampling.samples
                ),
            });
        }
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

    /// Draws `count` of the windows without replacement and keeps them in order.
    pub fn select(self, count: usize, seed: u64) -> Self {
        if count >= self.len() {
            return self;
        }
        let mut indices: Vec<usize> = (0..self.len()).collect();
        let mut random = SplitMix64(seed);
        for i in 0..count {
            let j = i + random.below(indices.len() - i);
            indices.swap(i, j);
        }
        indices.truncate(count);
        indices.sort_unstable();
        let tokens = indices.iter().flat_map(|&i| self.window(i)).copied().collect();
        Self { length: self.length, tokens }
    }

    /// Keeps only the first `count` windows.
    pub fn truncate(&mut self, count: usize) {
        self.tokens.truncate(count.saturating_mul(self.length));
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

/// Steele, Lea and Flood's generator: tiny, portable, and fixed for good, so that a seed means the
/// same windows in every version.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, by the high half of the product: its bias is below `bound / 2⁶⁴`.
    fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_the_published_one() {
        let mut random = SplitMix64(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }

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
}
