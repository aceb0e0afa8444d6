//! The rules that turn a text into scored tokens. Every result names its rule.
//!
//! A perplexity is comparable only with those of the same rule. All rules run a model on windows and score some of each
//! window's tokens, given those before them in the window:
//!
//! | profile | text | windows | scored |
//! | --- | --- | --- | --- |
//! | `gptq-L` | tokenized once, with the tokenizer's own special tokens | `L` tokens, disjoint; the rest is dropped |
//! all but the first of each |
//! | `llamacpp-L` | tokenized once, with the tokenizer's own special tokens | `L` tokens, disjoint; the rest is
//! dropped; if the tokenizer adds a first token (BOS), it overwrites the first of each | those after the middle: `L/2 +
//! 1` to `L − 1`, counted from 0 |
//! | `hf-stride-L-S` | tokenized once, with the tokenizer's own special tokens | up to `L` tokens, from 0, `S`, `2S` …,
//! until the end is reached | those that no earlier window has scored; never the first of a window |
//! | `lmeval-rolling-L` | each document separately | see below | every token once |
//!
//! `gptq` is the rule of the GPTQ paper's code. `wt2-gptq-2048`, the headline number of the literature, is `gptq-2048`
//! on the rows of WikiText-2's raw test split, joined by two newlines. `llamacpp` is the rule of llama.cpp's
//! `perplexity`; `wt2-llamacpp-512` applies it to the file `wiki.test.raw` unchanged. Names with `wt2` are only for
//! these texts, identified by their SHA-256.
//!
//! `hf-stride` is the sliding window of the Hugging Face documentation, but every token has the same weight. (The
//! program there weights windows by numbers of tokens that are off by one.)
//!
//! `lmeval-rolling` is `loglikelihood_rolling` of lm-evaluation-harness with a context of one token. Documents begin
//! with a prefix, the BOS token or else the EOS token. The first window is the prefix and the document's first `L`
//! tokens. Each further window scores the next `L` tokens after a context of one token; a shorter last one has more
//! context, so that the model reads `L` tokens. As in the harness, tokens that the tokenizer adds at the start of a
//! document are scored too.

use quant_formats::names::nearest;
use quant_formats::{Error, Result};

/// Default distance between the windows of `hf-stride`, in tokens.
const STRIDE: usize = 512;
/// Some models claim a practically unlimited number of positions.
const MAX_WINDOW: usize = 1 << 20;

/// A rule for scoring a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Profile {
    /// `gptq-L`.
    Gptq {
        /// Tokens per window.
        window: usize,
    },
    /// `llamacpp-L`.
    LlamaCpp {
        /// Tokens per window.
        window: usize,
    },
    /// `hf-stride-L-S`.
    HfStride {
        /// Tokens per window, at most.
        window: usize,
        /// Distance between the beginnings of successive windows, in tokens.
        stride: usize,
    },
    /// `lmeval-rolling-L`.
    LmEvalRolling {
        /// Tokens that the model reads per window, at most.
        window: usize,
    },
}

const KNOWN: &str = "known profiles: wt2-gptq-2048, wt2-llamacpp-512, gptq-L, llamacpp-L, hf-stride-L-S and \
    lmeval-rolling-L, where L is the window in tokens and S the stride";

/// A rule, and whether it was requested for the text of WikiText-2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProfileRequest {
    /// The rule.
    pub profile: Profile,
    /// Whether the profile accepts only the text of WikiText-2.
    pub wikitext: bool,
}

impl ProfileRequest {
    /// Returns the rule with this name. `window` overrides the length in the name; the default is `positions`, the
    /// model's number of positions.
    ///
    /// # Errors
    /// [`Error::Usage`] for an unknown name, and for windows that are too long or would score nothing.
    pub fn parse(name: &str, window: Option<usize>, positions: usize) -> Result<Self> {
        match name.strip_prefix("wt2-") {
            Some(rule) if rule.starts_with("lmeval") => Err(unknown(name)),
            Some(rule) => Ok(Self { profile: Profile::resolve(rule, window, positions)?, wikitext: true }),
            None => Ok(Self { profile: Profile::resolve(name, window, positions)?, wikitext: false }),
        }
    }
}

impl From<Profile> for ProfileRequest {
    fn from(profile: Profile) -> Self {
        Self { profile, wikitext: false }
    }
}

fn unknown(name: &str) -> Error {
    const RULES: [&str; 6] =
        ["gptq", "llamacpp", "hf-stride", "lmeval-rolling", "wt2-gptq-2048", "wt2-llamacpp-512"];
    // The lengths at the end are kept: `gtpq-512` means `gptq-512`.
    let rule = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '-');
    let meant = nearest(rule, RULES).map(|near| match near.starts_with("wt2") {
        true => near.to_owned(),
        false => format!("{near}{}", &name[rule.len()..]),
    });
    let remedy = match meant.filter(|meant| meant != name) {
        Some(meant) => format!("did you mean {meant}? {KNOWN}"),
        None => KNOWN.to_owned(),
    };
    Error::usage(format!("unknown profile `{name}`"), remedy)
}

impl Profile {
    fn resolve(name: &str, window: Option<usize>, positions: usize) -> Result<Self> {
        let numbers = |prefix: &str| -> Option<Result<Vec<usize>>> {
            let rest = name.strip_prefix(prefix)?;
            let parts = match rest.strip_prefix('-') {
                Some(parts) => parts.split('-').map(|n| n.parse().map_err(|_| unknown(name))).collect(),
                None if rest.is_empty() => Ok(Vec::new()),
                None => return None,
            };
            Some(parts)
        };
        let length = |given: Option<&usize>| window.or(given.copied()).unwrap_or(positions);
        let profile = if let Some(n) = numbers("gptq").transpose()?.filter(|n| n.len() <= 1) {
            Self::Gptq { window: length(n.first()) }
        } else if let Some(n) = numbers("llamacpp").transpose()?.filter(|n| n.len() <= 1) {
            Self::LlamaCpp { window: length(n.first()) }
        } else if let Some(n) = numbers("hf-stride").transpose()?.filter(|n| n.len() <= 2) {
            let window = length(n.first());
            Self::HfStride { window, stride: n.get(1).copied().unwrap_or(STRIDE.min(window)) }
        } else if let Some(n) = numbers("lmeval-rolling").transpose()?.filter(|n| n.len() <= 1) {
            Self::LmEvalRolling { window: length(n.first()) }
        } else {
            return Err(unknown(name));
        };
        profile.check()
    }

    /// Returns the rule of the GPTQ paper with windows of this many tokens.
    ///
    /// # Errors
    /// [`Error::Usage`] when a window would score nothing, or is too long.
    pub fn gptq(window: usize) -> Result<Self> {
        Self::Gptq { window }.check()
    }

    fn check(self) -> Result<Self> {
        let min = match self {
            Self::Gptq { .. } => 2,
            Self::LlamaCpp { .. } => 4,
            Self::HfStride { .. } => 2,
            Self::LmEvalRolling { .. } => 1,
        };
        if self.window() < min {
            return Err(Error::usage(
                format!(
                    "windows of {} tokens are too short: this profile would score no token",
                    self.window()
                ),
                format!("choose ‹window={min}› or more; 512 and 2048 are common choices"),
            ));
        }
        if self.window() > MAX_WINDOW {
            return Err(Error::usage(
                format!("windows of {} tokens are too long: the limit is {MAX_WINDOW}", self.window()),
                "choose a shorter ‹window›; 512 and 2048 are common choices",
            ));
        }
        match self {
            Self::HfStride { window, stride } if stride == 0 || stride > window => Err(Error::usage(
                format!("the stride is {stride}; it must be from 1 to the window, which is {window}"),
                "choose a valid stride, such as hf-stride-2048-512",
            )),
            _ => Ok(self),
        }
    }

    /// Tokens per window, at most.
    pub fn window(self) -> usize {
        match self {
            Self::Gptq { window }
            | Self::LlamaCpp { window }
            | Self::HfStride { window, .. }
            | Self::LmEvalRolling { window } => window,
        }
    }

    /// The name of the rule, regardless of the text.
    pub fn name(self) -> String {
        match self {
            Self::Gptq { window } => format!("gptq-{window}"),
            Self::LlamaCpp { window } => format!("llamacpp-{window}"),
            Self::HfStride { window, stride } => format!("hf-stride-{window}-{stride}"),
            Self::LmEvalRolling { window } => format!("lmeval-rolling-{window}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str, window: Option<usize>) -> String {
        ProfileRequest::parse(text, window, 1024).unwrap().profile.name()
    }

    #[test]
    fn rules_have_one_full_name() {
        for (text, full) in [
            ("wt2-gptq-2048", "gptq-2048"),
            ("gptq-512", "gptq-512"),
            ("gptq", "gptq-1024"),
            ("wt2-llamacpp-512", "llamacpp-512"),
            ("hf-stride", "hf-stride-1024-512"),
            ("hf-stride-256", "hf-stride-256-256"),
            ("hf-stride-256-64", "hf-stride-256-64"),
            ("lmeval-rolling", "lmeval-rolling-1024"),
            ("lmeval-rolling-1", "lmeval-rolling-1"),
        ] {
            assert_eq!(name(text, None), full);
        }
        assert_eq!(name("wt2-gptq-2048", Some(128)), "gptq-128");
        assert_eq!(name("hf-stride-256-64", Some(128)), "hf-stride-128-64");
        assert_eq!(name(&name("hf-stride", Some(100)), None), "hf-stride-100-100");
    }

    #[test]
    fn unknown_rules_are_refused() {
        for bad in [
            "",
            "wt2",
            "wt2-lmeval-rolling",
            "gptq-1",
            "gptq-x",
            "gptq-2-3",
            "gptqx",
            "gptq-",
            "lmeval",
            "lmeval-rolling-0",
            "llamacpp-3",
            "hf-stride-8-9",
            "hf-stride-8-0",
            "hf-stride-8-4-2",
            "gptq-99999999999999999999",
            "gptq-1048577",
        ] {
            assert!(ProfileRequest::parse(bad, None, 1024).is_err(), "{bad}");
        }
        assert!(ProfileRequest::parse("gptq-512", Some(1), 1024).is_err());
        assert!(ProfileRequest::parse("wt2-gptq", None, 1024).unwrap().wikitext);
    }
}
