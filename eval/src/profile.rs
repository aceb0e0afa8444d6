//! How a text becomes scored tokens. Every result names its profile.
//!
//! `gptq-L` is the rule of the GPTQ paper's code: the whole text is tokenized once, with the special
//! tokens that the tokenizer itself adds; it is cut into windows of `L` tokens that do not overlap,
//! and the remainder is dropped; in each window every token but the first is scored, given those
//! before it; perplexity is `exp` of the mean over all scored tokens. `wt2-gptq-2048`, the headline
//! of the literature, is this rule at `L = 2048` (on WikiText-2's test set, rows joined by two
//! newlines).

use std::path::Path;
use std::str::FromStr;

use quant_core::calibrate::{TextTokenizer, TokenWindows};
use quant_core::digest::sha256_hex;
use quant_core::{Error, Result};

/// A rule for scoring a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// Tokens of one window.
    pub window: usize,
}

impl Profile {
    /// The GPTQ rule with windows of this many tokens.
    ///
    /// # Errors
    /// When a window would score nothing.
    pub fn gptq(window: usize) -> Result<Self> {
        if window < 2 {
            return Err(Error::usage(
                format!("windows of {window} tokens score nothing"),
                "choose --window 2 or more; 512 and 2048 are usual",
            ));
        }
        Ok(Self { window })
    }

    /// The name that results carry.
    pub fn id(&self) -> String {
        match self.window {
            2048 => "wt2-gptq-2048".into(),
            window => format!("gptq-{window}"),
        }
    }
}

impl FromStr for Profile {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let window = text
            .strip_prefix("wt2-gptq-")
            .or_else(|| text.strip_prefix("gptq-"))
            .and_then(|length| length.parse().ok());
        match window {
            Some(window) => Self::gptq(window),
            None => Err(Error::usage(
                format!("unknown profile `{text}`"),
                "known profiles: wt2-gptq-2048, and gptq-L with windows of L tokens",
            )),
        }
    }
}

/// A text cut into windows, with what identifies it.
#[derive(Debug, Clone)]
pub struct EvaluationText {
    /// The windows that are scored.
    pub windows: TokenWindows,
    /// The rule they were cut by.
    pub profile: Profile,
    /// SHA-256 of the text's bytes.
    pub text_sha256: String,
    /// SHA-256 of the scored windows' token ids, as little-endian 32-bit integers.
    pub tokens_sha256: String,
}

impl EvaluationText {
    /// Tokenizes and cuts `text`; `windows` limits how many are kept, from the start. `origin` names
    /// the text in messages.
    ///
    /// # Errors
    /// When the text does not fill one window, or fewer than `windows`.
    pub fn new(
        tokenizer: &TextTokenizer,
        text: &str,
        profile: Profile,
        windows: Option<usize>,
        origin: &Path,
    ) -> Result<Self> {
        let tokens = tokenizer.encode(text)?;
        let count = tokens.len();
        let mut cut = TokenWindows::cut(tokens, profile.window);
        let wanted = windows.unwrap_or(cut.len()).max(1);
        if cut.len() < wanted {
            return Err(Error::Text {
                path: origin.to_owned(),
                line: None,
                reason: format!(
                    "gives {count} tokens, that is {} windows of {}; {wanted} are needed",
                    cut.len(),
                    profile.window
                ),
            });
        }
        cut.truncate(wanted);
        let (text_sha256, tokens_sha256) = (sha256_hex(text), cut.sha256());
        Ok(Self { windows: cut, profile, text_sha256, tokens_sha256 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_are_named_by_their_rule() {
        for (text, id) in [("wt2-gptq-2048", "wt2-gptq-2048"), ("gptq-512", "gptq-512")] {
            assert_eq!(text.parse::<Profile>().unwrap().id(), id);
        }
        for bad in ["", "wt2", "gptq-1", "gptq-x", "lmeval"] {
            assert!(bad.parse::<Profile>().is_err(), "{bad}");
        }
    }
}
