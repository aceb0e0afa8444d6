//! The candidates of a scale search, and its choice.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::names::unknown;
use crate::{Error, Result};

#[derive(Debug, Clone)]
pub(super) struct Candidate {
    /// The exponent from which the scales are computed; `None` for no scaling.
    pub(super) ratio: Option<f32>,
    /// A factor per channel.
    pub(super) scales: Vec<f32>,
}

/// How the candidates of a scale search are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Search {
    /// Compares all candidates on a fraction of the batch, then the better ones on more of it, until one is left or the
    /// rest are equally good. If the Gram matrix of the batch is cheaper, it is used instead, and the comparison is
    /// exact.
    #[default]
    Fast,
    /// Compares all candidates on the whole batch, as in the reference algorithm.
    Reference,
}

impl FromStr for Search {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "fast" => Ok(Self::Fast),
            "reference" => Ok(Self::Reference),
            _ => Err(unknown("search", text, "searches", &["fast", "reference"])),
        }
    }
}

/// A candidate with its measured error.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TriedScales {
    /// The exponent of the activations; `None` for no scaling.
    pub ratio: Option<f32>,
    /// Mean squared error of the inspected output with every consumer rounded.
    pub error: f64,
    /// The number of tokens on which the error was measured: those before the candidate was eliminated, or all tokens
    /// of the race.
    pub tokens: u64,
}

#[derive(Debug, Clone)]
pub(super) struct Choice {
    /// The index of the best candidate; the first is no scaling.
    pub(super) best: usize,
    /// The errors of no scaling and of the best candidate, on the same tokens.
    pub(super) error_before: f64,
    pub(super) error_after: f64,
    pub(super) tokens: u64,
    pub(super) tried: Vec<TriedScales>,
}

impl Choice {
    /// The choice for an expert to which no token was routed: no scaling.
    pub(super) fn unsearched() -> Self {
        Self { best: 0, error_before: 0.0, error_after: 0.0, tokens: 0, tried: Vec::new() }
    }
}

/// Measures every candidate on all tokens, some of them `at_once`, and chooses the best. The first is no scaling. A
/// candidate whose scaled weights need a scale beyond the range of its dtype is skipped.
pub(super) fn choose_exactly(
    candidates: &[Candidate],
    tokens: usize,
    at_once: usize,
    mut measure: impl FnMut(&[&[f32]]) -> Result<Vec<Result<f64>>>,
) -> Result<Choice> {
    let mut tried = Vec::new();
    let mut best: Option<(usize, f64)> = None;
    let mut errors = Vec::with_capacity(candidates.len());
    for some in candidates.chunks(at_once.max(1)) {
        let scales: Vec<&[f32]> = some.iter().map(|candidate| &candidate.scales[..]).collect();
        errors.extend(measure(&scales)?);
    }
    for (index, (candidate, error)) in candidates.iter().zip(errors).enumerate() {
        let error = match error {
            Err(Error::Numeric { .. }) if candidate.ratio.is_some() => continue,
            other => other?,
        };
        if !error.is_finite() {
            continue;
        }
        tried.push(TriedScales { ratio: candidate.ratio, error, tokens: tokens as u64 });
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

/// The error for outputs that are not finite even with unscaled weights; the caller adds the tensor's name.
pub(super) fn not_finite() -> Error {
    Error::Numeric {
        tensor: String::new(),
        reason: "its outputs are NaN or infinite even without scaling".into(),
    }
}
