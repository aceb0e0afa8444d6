//! Lists what has changed since the baseline, for people. No decision depends on it.

use serde::Serialize;

use super::{Baseline, Metric, decision};
use crate::Evaluation;
use crate::report::{bytes, nats, schemes};

/// One property of a result, now and in the baseline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Change {
    /// The result's name.
    pub result: String,
    /// The property: `model`, `reference`, `scheme`, `method`, `size`, `perplexity`, `mean KL`, `same top token`.
    pub name: &'static str,
    /// The property's value in the baseline, as text; absent without a baseline.
    pub before: Option<String>,
    /// The property's value now, as text.
    pub now: String,
    /// The difference, as text: `same`, `-2.1 %`, `different weights`; absent without a baseline.
    pub change: Option<String>,
    /// Whether it is better or worse than in the baseline; absent if that is unknown or not significant.
    pub trend: Option<Trend>,
}

/// The direction of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Trend {
    /// Smaller or more accurate; for measurements, significantly so at the policy's significance level.
    Better,
    /// Larger or less accurate; for measurements, significantly so at the policy's significance level.
    Worse,
}

impl Trend {
    /// Returns `better` or `worse`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Worse => "worse",
        }
    }
}

impl Change {
    /// The change and its direction: `-2.1 %, better`.
    pub fn described(&self) -> String {
        let parts = [self.change.as_deref(), self.trend.map(Trend::name)];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

/// Returns the properties of all results, and how they differ from a baseline.
pub fn changes(baseline: Option<&Baseline>, results: &[(String, Evaluation)], level: f64) -> Vec<Change> {
    let of = |(name, now): &(String, Evaluation)| {
        let before = baseline.and_then(|b| b.results.get(name));
        of_result(name, before, now, level)
    };
    results.iter().flat_map(of).collect()
}

/// The changed scheme of a result, a likely cause of other changes: `scheme: was w4a16-g128-sym, is w4a16-g64-sym`.
pub(super) fn cause(changes: &[Change], result: &str) -> Option<String> {
    let scheme = changes.iter().find(|c| c.result == result && c.name == "scheme")?;
    let before = scheme.before.as_ref().filter(|before| **before != scheme.now)?;
    Some(format!("scheme: was {before}, is {}", scheme.now))
}

fn of_result(name: &str, before: Option<&Evaluation>, now: &Evaluation, level: f64) -> Vec<Change> {
    let row = |property, of: &dyn Fn(&Evaluation) -> Option<String>| {
        let now = of(now)?;
        let before = before.and_then(of);
        let change = before.as_ref().map(|before| if *before == now { "same" } else { "changed" }.to_owned());
        Some(Change { result: name.to_owned(), name: property, before, now, change, trend: None })
    };
    let mut rows = Vec::new();
    if let Some(mut model) = row("model", &|e| Some(e.model.path.clone())) {
        // The same path may hold different weights.
        model.change = before.map(|b| match b.model.sha256 == now.model.sha256 {
            true => "same weights".into(),
            false => "different weights".into(),
        });
        rows.push(model);
    }
    rows.extend(row("reference", &|e| e.reference.as_ref().map(|r| r.path.clone())).map(|mut reference| {
        // A different reference would have been an error.
        reference.change = before.map(|_| "same weights".into());
        reference
    }));
    rows.extend(row("scheme", &|e| Some(schemes(&e.model))));
    rows.extend(row("method", &|e| e.model.method.clone()));
    let numbers = [
        ("size", Metric::SizeBytes),
        ("perplexity", Metric::Perplexity),
        ("mean KL", Metric::Kl),
        ("same top token", Metric::Top1Agreement),
    ];
    for (property, metric) in numbers {
        let shown = |e: &Evaluation| Some(text_of(metric, metric.value(e)?));
        rows.extend(row(property, &shown).map(|mut row| {
            if let Some((was, is)) = before.and_then(|b| Some((metric.value(b)?, metric.value(now)?))) {
                row.change = Some(difference(metric, was, is));
                row.trend = before.and_then(|b| trend(metric, b, now, level));
            }
            row
        }));
    }
    rows
}

fn text_of(metric: Metric, value: f64) -> String {
    match metric {
        Metric::SizeBytes => bytes(value as u64),
        Metric::Perplexity => format!("{value:.3}"),
        Metric::Kl => format!("{} nats", nats(value)),
        _ => format!("{:.2} %", 100.0 * value),
    }
}

fn difference(metric: Metric, was: f64, is: f64) -> String {
    match (metric, was == is) {
        (_, true) => "same".into(),
        (Metric::Top1Agreement, _) => format!("{:+.2} points", 100.0 * (is - was)),
        _ if was != 0.0 => format!("{:+.2} %", 100.0 * (is / was - 1.0)),
        _ => "changed".into(),
    }
}

/// The direction of a significant change of a size, perplexity or mean KL; `None` for other metrics.
fn trend(metric: Metric, before: &Evaluation, now: &Evaluation, level: f64) -> Option<Trend> {
    let of_sign = |low: f64, high: f64| match () {
        () if high < 0.0 => Some(Trend::Better),
        () if low > 0.0 => Some(Trend::Worse),
        () => None,
    };
    match metric {
        Metric::SizeBytes => {
            let change = now.model.size_bytes as f64 - before.model.size_bytes as f64;
            of_sign(change, change)
        }
        Metric::Perplexity | Metric::Kl => {
            if now.tokens_sha256 != before.tokens_sha256 || now.window_tokens != before.window_tokens {
                return None;
            }
            let (is, was) = (metric.windows(now)?, metric.windows(before)?);
            let differences: Vec<f64> = is.iter().zip(was).map(|(n, t)| n - t).collect();
            let (low, high) = decision::test(&differences, &now.window_tokens, 0.0, level).bounds?;
            of_sign(low, high)
        }
        _ => None,
    }
}
