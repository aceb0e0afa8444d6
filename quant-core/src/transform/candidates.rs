//! What a scale search chooses from, and what it chose.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// One choice of scales for the channels of a fold group.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    /// The exponent they come from; `None` for no scaling.
    pub(super) ratio: Option<f32>,
    /// A factor for every channel.
    pub(super) scales: Vec<f32>,
}

/// How the candidates of a scale search are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Search {
    /// All candidates on a share of the batch, the better ones on more of it, until one is left or
    /// the rest are as good; from the batch's Gram matrix where that is cheaper, and then exactly.
    #[default]
    Fast,
    /// Every candidate on the whole batch, as in the reference algorithm.
    Reference,
}

impl FromStr for Search {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "fast" => Ok(Self::Fast),
            "reference" => Ok(Self::Reference),
            _ => Err(Error::usage(format!("unknown search `{text}`"), "known searches: fast, reference")),
        }
    }
}

/// A candidate as it was measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TriedScales {
    /// The exponent of the activations; `None` for no scaling.
    pub ratio: Option<f32>,
    /// Mean squared error of the inspected output with every consumer rounded.
    pub error: f64,
    /// Tokens that it was measured on before it was given up, or at the end.
    pub tokens: u64,
}

/// The outcome of a search.
#[derive(Debug, Clone)]
pub(super) struct Choice {
    /// Position of the best candidate; the first is no scaling.
    pub(super) best: usize,
    /// Error of no scaling, and of the best on the same tokens.
    pub(super) error_before: f64,
    pub(super) error_after: f64,
    /// How many tokens these are.
    pub(super) tokens: u64,
    /// All that could be measured.
    pub(super) tried: Vec<TriedScales>,
}

impl Choice {
    /// No scaling, where there is nothing to compare candidates on: an expert that no token went to.
    pub(super) fn unsearched() -> Self {
        Self { best: 0, error_before: 0.0, error_after: 0.0, tokens: 0, tried: Vec::new() }
    }
}

/// Measures every candidate on all tokens and takes the best. The first is no scaling.
///
/// # Errors
/// Those of `measure`, but for candidates whose scaled weights need a scale that its type cannot
/// hold: these are not better. [`Error::Numeric`] when no error is finite.
pub(super) fn choose_exactly(
    candidates: &[Candidate],
    tokens: usize,
    mut measure: impl FnMut(&Candidate) -> Result<f64>,
) -> Result<Choice> {
    let mut tried = Vec::new();
    let mut best: Option<(usize, f64)> = None;
    for (index, candidate) in candidates.iter().enumerate() {
        let error = match measure(candidate) {
            Err(Error::Numeric { .. }) if candidate.ratio.is_some() => continue,
            other => other?,
        };
        if !error.is_finite() {
            continue;
        }
        tried.push(TriedScales { ratio: candidate.ratio, error, tokens: tokens as u64 });
        // The earlier candidate wins ties.
        if best.is_none_or(|(_, least)| error < least) {
            best = Some((index, error));
        }
    }
    let before = tried.first().filter(|t| t.ratio.is_none());
    match (best, before) {
        (Some((best, error_after)), Some(before)) => {
            Ok(Choice { best, error_before: before.error, error_after, tokens: tokens as u64, tried })
        }
        _ => Err(not_finite()),
    }
}

/// The error that not even unscaled weights give finite outputs; the caller names the tensor.
pub(super) fn not_finite() -> Error {
    Error::Numeric { tensor: String::new(), reason: "no candidate scale gives a finite output".into() }
}
