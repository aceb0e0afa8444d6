//! The accuracy gate: has a model become worse than it may?
//!
//! ```text
//! policy, baseline, results ─► binding ─► tests and caps ─► verdict ─► JSON, JUnit, GitHub
//! ```
//!
//! A [`Policy`] says what must hold. Degradations are tested in pairs of windows, against a [`Baseline`]
//! of results that were good or against the reference that a result was measured with, and have three
//! ends: it is shown that they stay within the margin, that they do not, or there are too few windows
//! to tell. Caps are bounds without statistics.
//!
//! Nothing that is missing passes. A result that is not in the baseline, one of the baseline that is not
//! given, another text, tokenizer, rule or reference than in the baseline, a number that a result does
//! not have: each is an error and no verdict.

mod baseline;
mod decision;
mod github;
mod junit;
mod metric;
mod policy;

use std::collections::BTreeSet;

use quant_core::{Error, Result};
use serde::Serialize;

pub use self::baseline::Baseline;
pub use self::decision::Verdict;
pub use self::github::{annotations, summary};
pub use self::junit::junit;
pub use self::metric::Metric;
pub use self::policy::{Against, Cap, NonInferiority, OnInconclusive, Policy};
use crate::{Evaluation, ModelIdentity};

/// The version of the form of outcomes.
pub const SCHEMA: &str = "quant-gate/1";

/// What a gate decided, and why.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Outcome {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// The policy's file.
    pub policy: String,
    /// All checks together, after what the policy says of open ones.
    pub verdict: Verdict,
    /// The one-sided level of tests.
    pub level: f64,
    /// SHA-256 of the policy's text.
    pub policy_sha256: String,
    /// SHA-256 that the baseline holds of its results, where there is one.
    pub baseline_sha256: Option<String>,
    /// What was judged.
    pub results: Vec<Judged>,
    /// Every check of every result.
    pub checks: Vec<Check>,
    /// What else to know, each fit for a line of text.
    pub notes: Vec<String>,
}

/// A result, identified by what it says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Judged {
    /// Its name.
    pub name: String,
    /// The rule that it was scored by.
    pub profile: String,
    /// What measured it.
    pub tool: crate::Tool,
    /// SHA-256 of the result, as it holds it.
    pub sha256: String,
    /// SHA-256 of the model, and of its reference if it had one.
    pub model_sha256: String,
    /// See `model_sha256`.
    pub reference_sha256: Option<String>,
    /// SHA-256 of the scored windows.
    pub tokens_sha256: String,
}

impl Judged {
    fn new((name, e): &(String, Evaluation)) -> Self {
        Self {
            name: name.clone(),
            profile: e.profile.clone(),
            tool: e.tool.clone(),
            sha256: e.sha256.clone(),
            model_sha256: e.model.sha256.clone(),
            reference_sha256: e.reference.as_ref().map(|r| r.sha256.clone()),
            tokens_sha256: e.tokens_sha256.clone(),
        }
    }
}

/// One check of one result.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Check {
    /// The result's name.
    pub result: String,
    /// The rule that it was scored by.
    pub profile: String,
    /// What was checked, such as `perplexity against baseline`.
    pub name: String,
    /// Where the policy asks for it.
    pub line: usize,
    /// How it ended.
    pub verdict: Verdict,
    /// The number that was checked: a degradation, or what is capped.
    pub value: f64,
    /// Its standard error, where it has one.
    pub standard_error: Option<f64>,
    /// Between these the degradation lies, each at the one-sided level.
    pub low: Option<f64>,
    /// The upper one.
    pub high: Option<f64>,
    /// What it must not exceed.
    pub at_most: Option<f64>,
    /// What it must not fall below.
    pub at_least: Option<f64>,
    /// Windows.
    pub windows: usize,
    /// About how many windows would decide an open test four times out of five.
    pub windows_needed: Option<u64>,
    /// The check in a sentence.
    pub message: String,
}

/// Judges results by a policy.
///
/// # Errors
/// [`Error::InputFile`] and [`Error::Usage`] when something that a check needs is missing or does not
/// fit.
pub fn judge(
    policy: &Policy,
    baseline: Option<(&Baseline, &std::path::Path)>,
    results: &[(String, Evaluation)],
) -> Result<Outcome> {
    let names: Vec<&str> = results.iter().map(|(name, _)| name.as_str()).collect();
    check_given(&names)?;
    policy.check_names(&names)?;
    if policy.needs_baseline() && baseline.is_none() {
        return Err(Error::InputFile {
            path: policy.path.clone(),
            line: None,
            reason: "compares with a baseline, and none was given".into(),
            remedy: "give it with ‹baseline=FILE›; ‹update› makes one of results that are good".into(),
        });
    }
    let mut notes = Vec::new();
    if baseline.is_none() {
        notes.push(
            "no baseline binds these results: nothing says that they are of the text and reference that you mean"
                .to_owned(),
        );
    }
    if let Some((baseline, path)) = baseline {
        bind(baseline, path, results, &mut notes)?;
    }
    against_others(policy, results)?;
    let mut tests = Vec::new();
    for check in &policy.non_inferiority {
        for (name, result) in chosen(results, &check.results) {
            let before = baseline.and_then(|(b, _)| b.results.get(name));
            tests.push(non_inferiority(policy, check, name, result, before)?);
        }
    }
    let fails = decision::holm(&tests.iter().map(|(_, p)| *p).collect::<Vec<_>>(), policy.level);
    let mut checks = Vec::new();
    let mut doubted = false;
    for ((mut check, _), fails) in tests.into_iter().zip(fails) {
        if check.verdict == Verdict::Fail && !fails {
            doubted = true;
            check.verdict = Verdict::Inconclusive;
            check.message.push_str("; with so many tests, chance explains it");
        }
        checks.push(check);
    }
    for cap in &policy.caps {
        for (name, result) in chosen(results, &cap.results) {
            checks.push(capped(policy, cap, name, result)?);
        }
    }
    if let Some((name, _)) = results.iter().find(|(name, _)| checks.iter().all(|c| c.result != *name)) {
        return Err(Error::InputFile {
            path: policy.path.clone(),
            line: None,
            reason: format!("checks nothing of the result `{}`", name.escape_default()),
            remedy: "add a check of it, or do not give it: what is not checked does not pass".into(),
        });
    }
    let any = |v| checks.iter().any(|c| c.verdict == v);
    let verdict = match (any(Verdict::Fail), any(Verdict::Inconclusive), policy.on_inconclusive) {
        (true, ..) | (_, true, OnInconclusive::Fail) => Verdict::Fail,
        (_, true, OnInconclusive::Inconclusive) => Verdict::Inconclusive,
        // By itself this one would have failed: more tests beside it must not make it pass.
        (_, true, OnInconclusive::Pass) if doubted => Verdict::Inconclusive,
        _ => Verdict::Pass,
    };
    Ok(Outcome {
        schema: SCHEMA,
        policy: policy.path.display().to_string(),
        verdict,
        level: policy.level,
        policy_sha256: policy.sha256.clone(),
        baseline_sha256: baseline.map(|(b, _)| b.sha256()).transpose()?,
        results: results.iter().map(Judged::new).collect(),
        checks,
        notes,
    })
}

/// Fails unless there are results, each with a name of its own.
///
/// # Errors
/// [`Error::Usage`].
pub fn check_given(names: &[&str]) -> Result<()> {
    if names.is_empty() {
        return Err(Error::usage("no result was given", "give the files that ‹eval(json=FILE)› wrote"));
    }
    let mut seen = BTreeSet::new();
    match names.iter().find(|n| !seen.insert(**n)) {
        Some(twice) => Err(Error::usage(
            format!("two results are called `{}`", twice.escape_default()),
            "give their files different names: a result is known by its file's name",
        )),
        None => Ok(()),
    }
}

/// Fails where a check asks how far a model is from its reference, and that was the model itself.
fn against_others(policy: &Policy, results: &[(String, Evaluation)]) -> Result<()> {
    let tests = policy.non_inferiority.iter().map(|c| {
        let compares = c.metric.is_comparison() || c.against == Against::Reference;
        (compares, &c.results, c.line)
    });
    let caps = policy.caps.iter().map(|c| (c.metric.is_comparison(), &c.results, c.line));
    for (_, names, line) in tests.chain(caps).filter(|(compares, ..)| *compares) {
        // With keys and values cached otherwise it is another model.
        let itself = |e: &Evaluation| {
            let same = |r: &ModelIdentity| r.sha256 == e.model.sha256 && r.kv_cache == e.model.kv_cache;
            e.reference.as_ref().is_some_and(same)
        };
        if let Some((name, _)) = chosen(results, names).find(|(_, e)| itself(e)) {
            let reason = format!("checks `{}`, which was compared with itself", name.escape_default());
            return Err(Error::InputFile {
                path: policy.path.clone(),
                line: Some(line),
                reason,
                remedy: "measure it with ‹reference› and the model that it was made from".into(),
            });
        }
    }
    Ok(())
}

fn chosen<'a>(
    results: &'a [(String, Evaluation)],
    names: &'a [String],
) -> impl Iterator<Item = (&'a str, &'a Evaluation)> {
    results.iter().filter(|(n, _)| names.is_empty() || names.contains(n)).map(|(n, e)| (n.as_str(), e))
}

/// Fails unless results and baseline are of the same texts, cut in the same way.
fn bind(
    baseline: &Baseline,
    path: &std::path::Path,
    results: &[(String, Evaluation)],
    notes: &mut Vec<String>,
) -> Result<()> {
    let fault = |reason: String, remedy: &str| Error::InputFile {
        path: path.to_owned(),
        line: None,
        reason,
        remedy: remedy.into(),
    };
    let update = "measure what the baseline was measured on, or make a new one with ‹update›";
    if let Some(missing) = baseline.results.keys().find(|k| results.iter().all(|(n, _)| n != *k)) {
        let reason = format!("holds the result `{}`, which was not given", missing.escape_default());
        return Err(fault(reason, "give all results of the baseline, or make a new one with ‹update›"));
    }
    for (name, result) in results {
        let Some(before) = baseline.results.get(name) else {
            let reason = format!("holds no result `{}`", name.escape_default());
            return Err(fault(reason, "make a new baseline of all results with ‹update›"));
        };
        let reference = |e: &Evaluation| e.reference.as_ref().map(|r| r.sha256.clone()).unwrap_or_default();
        for (what, now, then) in [
            ("profile", &result.profile, &before.profile),
            ("text", &result.text.sha256, &before.text.sha256),
            ("tokenizer", &result.tokenizer_sha256, &before.tokenizer_sha256),
            ("tokens", &result.tokens_sha256, &before.tokens_sha256),
        ] {
            if now != then {
                let reason =
                    format!("`{}` has another {what}: {then} there, {now} now", name.escape_default());
                return Err(fault(reason, update));
            }
        }
        let cache = |m: &ModelIdentity| m.kv_cache.map_or_else(|| "floats".to_owned(), |kv| kv.to_string());
        let caches = |e: &Evaluation| (cache(&e.model), e.reference.as_ref().map(&cache).unwrap_or_default());
        let (now, then) = (caches(result), caches(before));
        for (whose, now, then) in [("", now.0, then.0), ("reference's ", now.1, then.1)] {
            if reference(result) == reference(before) && now != then {
                let name = name.escape_default();
                let reason =
                    format!("`{name}` has another {whose}cache of keys and values: {then} there, {now} now");
                return Err(fault(
                    reason,
                    "measure with the same ‹kv›, or make a new baseline with ‹update›",
                ));
            }
        }
        if result.window_tokens != before.window_tokens {
            return Err(fault(format!("`{}` has other windows", name.escape_default()), update));
        }
        if reference(result) != reference(before) {
            let reason =
                format!("`{}` was measured against another reference, or none", name.escape_default());
            return Err(fault(reason, update));
        }
        if result.tool.version != before.tool.version || result.tool.isa != before.tool.isa {
            notes.push(format!(
                "{name}: measured by version {} on {}, the baseline by {} on {}",
                result.tool.version, result.tool.isa, before.tool.version, before.tool.isa
            ));
        }
    }
    Ok(())
}

/// A test, and its probability for Holm's rule.
fn non_inferiority(
    policy: &Policy,
    check: &NonInferiority,
    name: &str,
    result: &Evaluation,
    before: Option<&Evaluation>,
) -> Result<(Check, f64)> {
    let missing = |what: &str| lacks(policy, check.line, name, what);
    let now = check.metric.windows(result).ok_or_else(|| missing("a comparison with a reference"))?;
    let then = match check.against {
        Against::Baseline => before.and_then(|b| check.metric.windows(b)),
        Against::Reference => result.comparison.as_ref().map(|c| c.reference.window_nll.as_slice()),
    };
    let then = then.ok_or_else(|| match check.against {
        Against::Baseline => missing("a baseline with the same numbers"),
        Against::Reference => missing("a comparison with a reference"),
    })?;
    let differences: Vec<f64> = now.iter().zip(then).map(|(n, t)| n - t).collect();
    // A perplexity that rises by a share does so by its logarithm in nats.
    let ratio = check.metric == Metric::Perplexity;
    let margin = if ratio { check.margin.ln_1p() } else { check.margin };
    let test = decision::test(&differences, &result.window_tokens, margin, policy.level);
    let shown = |nats: f64| if ratio { nats.exp_m1() } else { nats };
    let unit = |x: f64| if ratio { format!("{:+.3} %", 100.0 * x) } else { format!("{x:+.6} nats") };
    let value = shown(test.degradation.mean);
    let (low, high) = test.bounds.map(|(l, u)| (shown(l), shown(u))).unzip();
    let against = match check.against {
        Against::Baseline => "baseline",
        Against::Reference => "reference",
    };
    let range = match low.zip(high) {
        Some((l, u)) => format!("between {} and {}", unit(l), unit(u)),
        None => "of one window, which says nothing of the spread".into(),
    };
    let need = match test.windows_needed {
        Some(n) => format!("; about {n} windows would decide it with 80 % probability"),
        None => String::new(),
    };
    let message = match differences.iter().all(|d| *d == 0.0) {
        true => format!("{} is the same as the {against}'s to the last bit", check.metric.name()),
        false => format!(
            "{} against the {against}: {} ({range}), at most {} allowed{need}",
            check.metric.name(),
            unit(value),
            unit(check.margin)
        ),
    };
    let check = Check {
        result: name.to_owned(),
        profile: result.profile.clone(),
        name: format!("{} against {against}", check.metric.name()),
        line: check.line,
        verdict: test.verdict,
        value,
        standard_error: test.degradation.standard_error.map(|e| if ratio { e * (1.0 + value) } else { e }),
        low,
        high,
        at_most: Some(check.margin),
        at_least: None,
        windows: differences.len(),
        windows_needed: test.windows_needed,
        message,
    };
    Ok((check, test.p_fail))
}

fn capped(policy: &Policy, cap: &Cap, name: &str, result: &Evaluation) -> Result<Check> {
    let number = cap.metric.of(result).ok_or_else(|| lacks(policy, cap.line, name, cap.metric.name()))?;
    let value = number.value;
    let holds = value.is_finite()
        && cap.at_most.is_none_or(|most| value <= most)
        && cap.at_least.is_none_or(|least| value >= least);
    let bounds = [cap.at_most.map(|m| format!("at most {m}")), cap.at_least.map(|l| format!("at least {l}"))];
    let bounds: Vec<String> = bounds.into_iter().flatten().collect();
    let error = number.standard_error.map(|e| format!(" ± {e:.2e}")).unwrap_or_default();
    Ok(Check {
        result: name.to_owned(),
        profile: result.profile.clone(),
        name: cap.metric.name().to_owned(),
        line: cap.line,
        verdict: if holds { Verdict::Pass } else { Verdict::Fail },
        value,
        standard_error: number.standard_error,
        low: None,
        high: None,
        at_most: cap.at_most,
        at_least: cap.at_least,
        windows: result.windows,
        windows_needed: None,
        message: format!("{} is {}{error}, {} allowed", cap.metric.name(), shown(value), bounds.join(", ")),
    })
}

/// A number as people read it: whole ones whole, others with six digits after the point.
fn shown(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value}") } else { format!("{value:.6}") }
}

fn lacks(policy: &Policy, line: usize, name: &str, what: &str) -> Error {
    Error::InputFile {
        path: policy.path.clone(),
        line: Some(line),
        reason: format!("checks `{}`, which was measured without {what}", name.escape_default()),
        remedy: "measure with ‹reference=MODEL›, and make the baseline of such results".into(),
    }
}
