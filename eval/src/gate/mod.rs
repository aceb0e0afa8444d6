//! The accuracy gate: decides whether a model has become worse than allowed.
//!
//! ```text
//! policy, baseline, results ─► binding ─► tests and caps ─► verdict ─► JSON, JUnit, GitHub
//! ```
//!
//! A [`Policy`] states the requirements. Degradations are tested with paired windows, against a [`Baseline`] of known
//! good results or against the reference that a result was measured with. Caps are bounds without statistics.
//!
//! Missing input never passes. A result or metric that is missing, and a text, tokenizer, rule or reference that
//! differs from the baseline's, are errors, and there is no verdict.

mod baseline;
mod changes;
mod decision;
mod github;
mod junit;
mod metric;
mod policy;
mod suggest;

use std::collections::BTreeSet;

use quant_formats::{Error, Result};
use serde::Serialize;

pub use self::baseline::Baseline;
pub use self::changes::{Change, Trend, changes};
pub use self::decision::Verdict;
pub use self::github::{annotations, summary};
pub use self::junit::junit;
pub use self::metric::Metric;
pub use self::policy::{Against, Cap, NonInferiority, OnInconclusive, Policy};
pub use self::suggest::suggest;
use crate::{Evaluation, ModelIdentity};

/// The schema version of outcomes.
pub const SCHEMA: &str = "quant-gate/1";

/// The decision of a gate, with its reasons.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Outcome {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// The policy's file.
    pub policy: String,
    /// The combined outcome of all checks, after the policy's rule for inconclusive ones.
    pub verdict: Verdict,
    /// The one-sided level of tests.
    pub level: f64,
    /// SHA-256 of the policy's text.
    pub policy_sha256: String,
    /// SHA-256 of the baseline's results, if there is a baseline.
    pub baseline_sha256: Option<String>,
    /// The results that were judged.
    pub results: Vec<Judged>,
    /// Every check of every result.
    pub checks: Vec<Check>,
    /// The properties of all results, and how they differ from the baseline. No verdict depends on them.
    pub changes: Vec<Change>,
    /// Further notes, one line each.
    pub notes: Vec<String>,
}

/// A result, identified by its own fields.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Judged {
    /// The result's name.
    pub name: String,
    /// The rule that it was scored by.
    pub profile: String,
    /// The program that measured it.
    pub tool: crate::Tool,
    /// SHA-256 of the result, as recorded in its file.
    pub sha256: String,
    /// SHA-256 of the model.
    pub model_sha256: String,
    /// SHA-256 of the reference, if the result has one.
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
    /// The check's name, such as `perplexity against baseline`.
    pub name: String,
    /// The line of the policy that requires the check.
    pub line: usize,
    /// The outcome.
    pub verdict: Verdict,
    /// The value that was checked: a degradation, or the capped metric.
    pub value: f64,
    /// The standard error of `value`, if it has one.
    pub standard_error: Option<f64>,
    /// The lower confidence bound of the degradation, at the one-sided level.
    pub low: Option<f64>,
    /// The upper confidence bound.
    pub high: Option<f64>,
    /// The upper limit.
    pub at_most: Option<f64>,
    /// The lower limit.
    pub at_least: Option<f64>,
    /// Number of windows.
    pub windows: usize,
    /// The approximate number of windows that would decide an inconclusive test with 80 % power.
    pub windows_needed: Option<u64>,
    /// The value with its interval or error, in its unit: `+0.233 % (between …)`.
    pub measured: String,
    /// The limits in the same unit: `at most +0.5 %`.
    pub allowed: String,
    /// The check as a sentence.
    pub message: String,
}

/// Judges results by a policy.
///
/// ```
/// use quant_evaluator::digest::sha256_hex;
/// use quant_evaluator::gate::{Baseline, Policy, Verdict, judge};
/// use quant_evaluator::{Evaluation, EvaluationText, ModelIdentity, Profile, Scores, Tool, Window};
///
/// // Results of an engine on 32 windows: of a model that is known to be good, and of new ones. `perplexity` computes
/// // such scores.
/// let windows = (0..32).map(|i| Window { tokens: vec![i; 3], first: 1 }).collect();
/// let text = EvaluationText::of_windows(windows, Profile::gptq(3)?)?;
/// let tool = Tool { name: "engine".into(), version: "7".into(), sha256: None, isa: "avx2".into() };
/// let result = |model: &str, worse: f64| {
///     let nll = (0..32).map(|i| 2.0 + 0.01 * f64::from(i) + worse * (1.0 + 0.1 * f64::from(i % 3))).collect();
///     let scores = Scores::of_windows(nll, &[2; 32]);
///     let identity = ModelIdentity {
///         path: model.into(),
///         sha256: sha256_hex(model),
///         size_bytes: 1 << 20,
///         schemes: Vec::new(),
///         method: None,
///         kv_cache: None,
///     };
///     let numbers = ((scores, None), (1.0, 64.0));
///     Evaluation::new(tool.clone(), identity, None, ("held-out".into(), &text), numbers.0, numbers.1)
/// };
/// let named = |evaluation| [("held-out".to_owned(), evaluation)];
///
/// let baseline = Baseline::new(&named(result("good", 0.0)));
/// let policy = r#"
///     schema = "quant-gate-policy/1"
///     [[non_inferiority]]
///     metric = "perplexity"
///     against = "baseline"
///     margin = 0.01
/// "#;
/// let policy = Policy::parse(policy, "policy.toml".as_ref())?;
/// let before = Some((&baseline, "baseline.json".as_ref()));
/// assert_eq!(judge(&policy, before, &named(result("close", 0.001)))?.verdict, Verdict::Pass);
/// let outcome = judge(&policy, before, &named(result("worse", 0.1)))?;
/// assert_eq!(outcome.verdict, Verdict::Fail);
/// println!("{}", outcome.checks[0].message);
/// # Ok::<(), quant_evaluator::Error>(())
/// ```
///
/// # Errors
/// [`Error::Usage`] if there are no results, or two have the same name; [`Error::InputFile`] if something that a check
/// needs is missing, or if policy, results and baseline do not match.
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
            reason: "has tests against a baseline, but no baseline was given".into(),
            remedy: "set ‹baseline=FILE›; ‹update› creates a baseline from accepted results".into(),
        });
    }
    let mut notes = Vec::new();
    if baseline.is_none() {
        notes.push(
            "without a baseline, the gate does not check the text and reference of these results".to_owned(),
        );
    }
    if let Some((baseline, path)) = baseline {
        bind(baseline, path, results)?;
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
            check
                .message
                .push_str("; this may be due to chance, because several tests were run (Holm's correction)");
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
            reason: format!("has no check that applies to the result `{}`", name.escape_default()),
            remedy: "add a check for this result, or omit it; every result must be checked".into(),
        });
    }
    let any = |v| checks.iter().any(|c| c.verdict == v);
    let verdict = match (any(Verdict::Fail), any(Verdict::Inconclusive), policy.on_inconclusive) {
        (true, ..) | (_, true, OnInconclusive::Fail) => Verdict::Fail,
        (_, true, OnInconclusive::Inconclusive) => Verdict::Inconclusive,
        // A test fails on its own, but not after Holm's correction. Adding tests to a policy must not turn a failure
        // into a pass.
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
        changes: changes::changes(baseline.map(|(b, _)| b), results, policy.level),
        notes,
    })
}

/// Checks that there are results, and that their names are unique.
///
/// # Errors
/// [`Error::Usage`] otherwise.
pub fn check_given(names: &[&str]) -> Result<()> {
    if names.is_empty() {
        return Err(Error::usage(
            "no results were given",
            "give the JSON files written by ‹eval(json=FILE)›",
        ));
    }
    let mut seen = BTreeSet::new();
    match names.iter().find(|n| !seen.insert(**n)) {
        Some(twice) => Err(Error::usage(
            format!("two results have the name `{}`", twice.escape_default()),
            "rename one of the files: a result is named after its file",
        )),
        None => Ok(()),
    }
}

fn against_others(policy: &Policy, results: &[(String, Evaluation)]) -> Result<()> {
    let tests = policy.non_inferiority.iter().map(|c| {
        let compares = c.metric.is_comparison() || c.against == Against::Reference;
        (compares, &c.results, c.line)
    });
    let caps = policy.caps.iter().map(|c| (c.metric.is_comparison(), &c.results, c.line));
    for (_, names, line) in tests.chain(caps).filter(|(compares, ..)| *compares) {
        // A different KV-cache format makes a different model.
        let itself = |e: &Evaluation| {
            let same = |r: &ModelIdentity| r.sha256 == e.model.sha256 && r.kv_cache == e.model.kv_cache;
            e.reference.as_ref().is_some_and(same)
        };
        if let Some((name, _)) = chosen(results, names).find(|(_, e)| itself(e)) {
            let reason = format!(
                "checks `{}` against its reference, but the reference is the model itself",
                name.escape_default()
            );
            return Err(Error::InputFile {
                path: policy.path.clone(),
                line: Some(line),
                reason,
                remedy: "set ‹reference› to the model that it was quantized from, and measure again".into(),
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

/// Fails unless results and baseline match.
fn bind(baseline: &Baseline, path: &std::path::Path, results: &[(String, Evaluation)]) -> Result<()> {
    let fault = |reason: String, remedy: &str| Error::InputFile {
        path: path.to_owned(),
        line: None,
        reason,
        remedy: remedy.to_owned().into(),
    };
    let update =
        |measure: &str| format!("{measure}; if the change is intended, create a new baseline with ‹update›");
    if let Some(missing) = baseline.results.keys().find(|k| results.iter().all(|(n, _)| n != *k)) {
        let reason = format!("contains the result `{}`, which was not given", missing.escape_default());
        return Err(fault(
            reason,
            "give all results of the baseline, or create a new baseline with ‹update›",
        ));
    }
    for (name, result) in results {
        let Some(before) = baseline.results.get(name) else {
            let reason = format!("does not contain the result `{}`", name.escape_default());
            return Err(fault(reason, "create a new baseline from all results with ‹update›"));
        };
        let reference = |e: &Evaluation| e.reference.as_ref().map(|r| r.sha256.clone()).unwrap_or_default();
        if let Some((what, differs, remedy)) = text_differs(result, before) {
            let reason = format!("the {what} of `{}` differs: {differs}", name.escape_default());
            return Err(fault(reason, &update(&remedy)));
        }
        let products = |e: &Evaluation| if e.tool.multiplies_bf16_parts() { "bf16 parts" } else { "f32" };
        let (then, now) = (products(before), products(result));
        if then != now {
            let reason = format!(
                "`{}` was measured with different products of floats: {then} in the baseline, {now} now",
                name.escape_default()
            );
            let measure = match then {
                "f32" => "measure with QUANT_FLOAT_PRODUCTS=f32",
                _ => "measure on the path `amx`, without QUANT_FLOAT_PRODUCTS=f32",
            };
            return Err(fault(reason, &update(measure)));
        }
        let cache = |m: &ModelIdentity| m.kv_cache.map_or_else(|| "floats".to_owned(), |kv| kv.to_string());
        let caches = |e: &Evaluation| (cache(&e.model), e.reference.as_ref().map(&cache).unwrap_or_default());
        let (now, then) = (caches(result), caches(before));
        for (whose, now, then) in [("", now.0, then.0), ("reference's ", now.1, then.1)] {
            if reference(result) == reference(before) && now != then {
                let name = name.escape_default();
                let reason =
                    format!("the {whose}KV cache of `{name}` differs: {then} in the baseline, {now} now");
                return Err(fault(reason, &update("measure with the same ‹kv›")));
            }
        }
        if result.window_tokens != before.window_tokens {
            return Err(fault(
                format!("the windows of `{}` differ from those in the baseline", name.escape_default()),
                &update("measure with the settings of the baseline"),
            ));
        }
        if reference(result) != reference(before) {
            let path = |e: &Evaluation| match &e.reference {
                Some(reference) => shown_path(&reference.path),
                None => "none".to_owned(),
            };
            let (then, now) = (path(before), path(result));
            let weights = if then == now { " with different weights" } else { "" };
            let reason = format!(
                "`{}` was measured with a different reference than in the baseline: {then} in the baseline, {now} \
                 now{weights}",
                name.escape_default()
            );
            let measure = match &before.reference {
                Some(reference) => format!("measure with ‹reference={}›", reference.path.escape_default()),
                None => "measure without ‹reference›".to_owned(),
            };
            return Err(fault(reason, &update(&measure)));
        }
    }
    Ok(())
}

/// Compares the text of a result, and how it is cut into windows, with those of the baseline. Returns what differs,
/// how, and what to do.
fn text_differs(now: &Evaluation, then: &Evaluation) -> Option<(&'static str, String, String)> {
    let both = |then: &str, now: &str| format!("{then} in the baseline, {now} now");
    let hashes = |then: &str, now: &str| format!("SHA-256 {then} in the baseline, {now} now");
    if now.profile != then.profile {
        let remedy = format!("measure with ‹profile={}›", then.profile.escape_default());
        return Some(("profile", both(&then.profile, &now.profile), remedy));
    }
    if now.text.sha256 != then.text.sha256 {
        let name = then.text.name.escape_default();
        let differs = match now.text.name == then.text.name {
            true => format!(
                "{}, with {}",
                shown_path(&now.text.name),
                hashes(&then.text.sha256, &now.text.sha256)
            ),
            false => both(&shown_path(&then.text.name), &shown_path(&now.text.name)),
        };
        let remedy = match now.text.name == then.text.name {
            true => format!("restore the former {name}, and measure again"),
            false => format!("measure with ‹text={name}›"),
        };
        return Some(("text", differs, remedy));
    }
    if now.tokenizer_sha256 != then.tokenizer_sha256 {
        let remedy =
            format!("use the tokenizer of {}, the model of the baseline", shown_path(&then.model.path));
        return Some(("tokenizer", hashes(&then.tokenizer_sha256, &now.tokenizer_sha256), remedy));
    }
    if now.windows != then.windows {
        let remedy = format!("measure with ‹windows={}›", then.windows);
        return Some((
            "number of windows",
            both(&then.windows.to_string(), &now.windows.to_string()),
            remedy,
        ));
    }
    (now.tokens_sha256 != then.tokens_sha256).then(|| {
        let remedy =
            "measure with the tokenizer_config.json and the version of quant of the baseline".to_owned();
        ("tokenization", hashes(&then.tokens_sha256, &now.tokens_sha256), remedy)
    })
}

/// A path or name in a message.
fn shown_path(path: &str) -> String {
    format!("`{}`", path.escape_default())
}

/// Also returns the p-value, for Holm's procedure.
fn non_inferiority(
    policy: &Policy,
    check: &NonInferiority,
    name: &str,
    result: &Evaluation,
    before: Option<&Evaluation>,
) -> Result<(Check, f64)> {
    let missing = |what: &str| lacks(policy, check.line, name, what);
    let now = check.metric.windows(result).ok_or_else(|| missing("comparison with a reference"))?;
    let then = match check.against {
        Against::Baseline => before.and_then(|b| check.metric.windows(b)),
        Against::Reference => result.comparison.as_ref().map(|c| c.reference.window_nll.as_slice()),
    };
    let then = then.ok_or_else(|| match check.against {
        Against::Baseline => missing("baseline with this metric"),
        Against::Reference => missing("comparison with a reference"),
    })?;
    let differences: Vec<f64> = now.iter().zip(then).map(|(n, t)| n - t).collect();
    // A relative increase of the perplexity is the difference of its logarithms, in nats.
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
        None => "no interval, because there is only one window".into(),
    };
    let need = match test.windows_needed {
        Some(n) => format!(
            "; about {n} windows would decide it with a probability of 80 %, as would a larger margin"
        ),
        None => String::new(),
    };
    let allowed = format!("at most {}", unit(check.margin));
    let identical = differences.iter().all(|d| *d == 0.0);
    let measured = match identical {
        true => "bit-identical".to_owned(),
        false => format!("{} ({range})", unit(value)),
    };
    let message = match identical {
        true => format!("{} is bit-identical to the {against} in every window", check.metric.name()),
        false => {
            format!("{} against the {against}: {measured}, {allowed} allowed{need}", check.metric.name())
        }
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
        measured,
        allowed,
        message,
    };
    Ok((check, test.p_fail))
}

fn capped(policy: &Policy, cap: &Cap, name: &str, result: &Evaluation) -> Result<Check> {
    let number = cap.metric.of(result).ok_or_else(|| lacks(policy, cap.line, name, cap.metric.name()))?;
    let value = number.value;
    let holds = value.is_finite()
        && cap.at_most.is_none_or(|max| value <= max)
        && cap.at_least.is_none_or(|min| value >= min);
    let unit = |x: f64, text: String| match cap.metric {
        Metric::SizeBytes => crate::report::bytes(x as u64),
        _ => text,
    };
    let bounds = [
        cap.at_most.map(|m| format!("at most {}", unit(m, m.to_string()))),
        cap.at_least.map(|l| format!("at least {}", unit(l, l.to_string()))),
    ];
    let allowed = bounds.into_iter().flatten().collect::<Vec<_>>().join(", ");
    let digits = |e: f64| if e != 0.0 && e < 1e-5 { format!("{e:.1e}") } else { format!("{e:.6}") };
    let error = number.standard_error.map(|e| format!(" ± {}", digits(e))).unwrap_or_default();
    let measured = format!("{}{error}", unit(value, shown(value)));
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
        message: format!("{} is {measured}, {allowed} allowed", cap.metric.name()),
        measured,
        allowed,
    })
}

fn shown(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value}") } else { format!("{value:.6}") }
}

fn lacks(policy: &Policy, line: usize, name: &str, what: &str) -> Error {
    Error::InputFile {
        path: policy.path.clone(),
        line: Some(line),
        reason: format!("checks `{}`, which has no {what}", name.escape_default()),
        remedy: "measure again with ‹reference=MODEL›, also the results in the baseline".into(),
    }
}
