//! Lists what has changed since the baseline, for people. No decision depends on it.

use serde::Serialize;

use super::{Baseline, Metric, decision};
use crate::Evaluation;
use crate::report::{bytes, nats, schemes};

const SAME_WEIGHTS: &str = "same weights";

/// One property of a result, now and in the baseline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Change {
    /// The result's name.
    pub result: String,
    /// The property: `model`, `reference`, `scheme`, `method`, `program`, `size`, `perplexity`, `mean KL`,
    /// `same top token`.
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

/// The properties that may cause other changes.
const CAUSES: [&str; 4] = ["model", "scheme", "method", "program"];

/// Adds to the message of a check what has changed since the baseline, as a likely cause: `…; since the baseline,
/// scheme: was w4a16-g128-sym, is w4a16-g64-sym`.
pub(super) fn with_causes(message: &str, changes: &[Change], result: &str) -> String {
    let changed = changes.iter().filter(|c| c.result == result && CAUSES.contains(&c.name));
    let changed: Vec<String> = changed
        .filter_map(|c| match (c.before.as_deref()?, c.change.as_deref()?) {
            (_, "same" | SAME_WEIGHTS) => None,
            (before, change) if before == c.now => Some(format!("{}: {change}", c.name)),
            (before, _) => Some(format!("{}: was {before}, is {}", c.name, c.now)),
        })
        .collect();
    match changed.is_empty() {
        true => message.to_owned(),
        false => format!("{message}; since the baseline, {}", changed.join("; ")),
    }
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
            true => SAME_WEIGHTS.into(),
            false => "different weights".into(),
        });
        rows.push(model);
    }
    let reference = |e: &Evaluation| e.reference.as_ref().map_or_else(|| "none".into(), |r| r.path.clone());
    if now.reference.is_some() || before.is_some_and(|before| before.reference.is_some()) {
        rows.extend(row("reference", &|e| Some(reference(e))).map(|mut row| {
            // A different reference would have been an error.
            if before.is_some_and(|before| before.reference.is_some() && now.reference.is_some()) {
                row.change = Some(SAME_WEIGHTS.into());
            }
            row
        }));
    }
    rows.extend(row("scheme", &|e| Some(schemes(&e.model))));
    rows.extend(row("method", &|e| e.model.method.clone()));
    rows.extend(row("program", &|e| Some(format!("{} {}, {}", e.tool.name, e.tool.version, e.tool.isa))));
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
