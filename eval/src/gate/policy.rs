//! The policy: requirements as a TOML file, committed with the code it guards.
//!
//! ```toml
//! schema = "quant-gate-policy/1"
//! level = 0.05
//! on_inconclusive = "inconclusive"
//!
//! [[non_inferiority]]
//! metric = "perplexity"
//! against = "baseline"
//! margin = 0.005
//!
//! [[cap]]
//! metric = "kl_p99"
//! at_most = 0.5
//! ```
//!
//! Every check applies to the results that its `results` names, by default to all.

use std::ops::Range;
use std::path::{Path, PathBuf};

use quant_formats::digest::sha256_hex;
use quant_formats::wording::parser_message;
use quant_formats::{Error, Result};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::metric::Metric;

/// The schema version of policies.
pub const SCHEMA: &str = "quant-gate-policy/1";
const MAX_FILE_BYTES: u64 = 1 << 20;
const ABSENT: &str = "does not exist";

/// Requirements on results.
///
/// ```
/// use quant_evaluator::gate::Policy;
///
/// let text = r#"
///     schema = "quant-gate-policy/1"
///     [[cap]]
///     metric = "kl_p99"
///     at_most = 0.5
/// "#;
/// let policy = Policy::parse(text, "policy.toml".as_ref())?;
/// assert_eq!((policy.caps.len(), policy.needs_baseline()), (1, false));
/// # Ok::<(), quant_evaluator::Error>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Policy {
    /// SHA-256 of its text.
    pub sha256: String,
    /// Path of the file, for messages.
    pub path: PathBuf,
    /// The one-sided level of tests.
    pub level: f64,
    /// The outcome of the gate if tests are inconclusive.
    pub on_inconclusive: OnInconclusive,
    /// Degradations that must be shown to stay within a margin.
    pub non_inferiority: Vec<NonInferiority>,
    /// Bounds on metrics.
    pub caps: Vec<Cap>,
}

/// The outcome of the gate if some checks are inconclusive and none fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum OnInconclusive {
    /// The gate is inconclusive.
    #[default]
    Inconclusive,
    /// The gate fails.
    Fail,
    /// The gate passes, unless Holm's correction made a failed test inconclusive; then the gate is inconclusive.
    Pass,
}

/// A degradation that must be shown to stay within a margin.
#[derive(Debug, Clone)]
pub struct NonInferiority {
    /// The metric that is tested.
    pub metric: Metric,
    /// The comparison: baseline or reference.
    pub against: Against,
    /// For a perplexity, the allowed relative increase; for a divergence, nats per token.
    pub margin: f64,
    /// Names of the results that the check applies to. If empty: all results.
    pub results: Vec<String>,
    /// Line number of the check in the policy.
    pub line: usize,
}

/// The result that another one is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Against {
    /// The result of the same name in the baseline.
    Baseline,
    /// The reference that the result itself was measured against.
    Reference,
}

/// A bound on a metric.
#[derive(Debug, Clone)]
pub struct Cap {
    /// The metric.
    pub metric: Metric,
    /// The upper limit.
    pub at_most: Option<f64>,
    /// The lower limit.
    pub at_least: Option<f64>,
    /// Names of the results that the bound applies to. If empty: all results.
    pub results: Vec<String>,
    /// Line number of the bound in the policy.
    pub line: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    schema: Spanned<String>,
    level: Option<Spanned<f64>>,
    #[serde(default)]
    on_inconclusive: OnInconclusive,
    #[serde(default)]
    non_inferiority: Vec<Spanned<NonInferiorityEntry>>,
    #[serde(default)]
    cap: Vec<Spanned<CapEntry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NonInferiorityEntry {
    metric: Metric,
    against: Against,
    margin: f64,
    #[serde(default)]
    results: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CapEntry {
    metric: Metric,
    at_most: Option<f64>,
    at_least: Option<f64>,
    #[serde(default)]
    results: Vec<String>,
}

impl Policy {
    /// Reads a policy.
    ///
    /// # Errors
    /// [`Error::InputFile`] when the file is missing or not a valid policy; [`Error::Io`] when it cannot be read.
    pub fn read(path: &Path) -> Result<Self> {
        let fault = |reason: String| fault(path, None, reason);
        let metadata = std::fs::metadata(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => fault(ABSENT.into()),
            _ => Error::io("read", path, e),
        })?;
        if !metadata.is_file() || metadata.len() > MAX_FILE_BYTES {
            return Err(fault(format!("must be a regular file of at most {MAX_FILE_BYTES} bytes")));
        }
        let bytes = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
        let text = String::from_utf8(bytes).map_err(|_| fault("is not UTF-8".into()))?;
        Self::parse(&text, path)
    }

    /// Parses a policy; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::InputFile`], with the line if it is known.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        let line =
            |span: Range<usize>| text.get(..span.start).map_or(1, |before| 1 + before.matches('\n').count());
        let fault = |line, reason: String| fault(path, line, reason);
        let file: File = toml::from_str(text).map_err(|e| {
            let message = parser_message(e.message().trim_end(), "a table");
            fault(e.span().map(line), format!("is not a valid policy: {message}"))
        })?;
        if file.schema.get_ref() != SCHEMA {
            let reason = format!(
                "has the schema `{}`; this version reads `{SCHEMA}`",
                file.schema.get_ref().escape_default()
            );
            return Err(fault(Some(line(file.schema.span())), reason));
        }
        let level = match &file.level {
            Some(level) if (1e-6..0.5).contains(level.get_ref()) => *level.get_ref(),
            Some(level) => {
                let reason = format!(
                    "has a level of {}; it must be at least 0.000001 and less than 0.5",
                    level.get_ref()
                );
                return Err(fault(Some(line(level.span())), reason));
            }
            None => 0.05,
        };
        let mut policy = Self {
            sha256: sha256_hex(text),
            path: path.to_owned(),
            level,
            on_inconclusive: file.on_inconclusive,
            non_inferiority: Vec::new(),
            caps: Vec::new(),
        };
        for entry in file.non_inferiority {
            let at = line(entry.span());
            let NonInferiorityEntry { metric, against, margin, results } = entry.into_inner();
            if !(margin.is_finite() && margin >= 0.0) {
                return Err(fault(
                    Some(at),
                    format!("has a margin of {margin}; it must be finite and at least 0"),
                ));
            }
            if metric == Metric::Perplexity && margin >= 1.0 {
                let reason = format!(
                    "has a margin of {margin} for the perplexity; it must be less than 1 (0.005 is half a \
                    percent)"
                );
                return Err(fault(Some(at), reason));
            }
            metric.check_paired(against).map_err(|reason| fault(Some(at), reason))?;
            let twice = |c: &&NonInferiority| {
                let common = c.results.iter().any(|r| results.contains(r));
                c.metric == metric
                    && c.against == against
                    && (common || c.results.is_empty() || results.is_empty())
            };
            if let Some(other) = policy.non_inferiority.iter().find(twice) {
                return Err(fault(Some(at), format!("repeats the test on line {}", other.line)));
            }
            policy.non_inferiority.push(NonInferiority { metric, against, margin, results, line: at });
        }
        for entry in file.cap {
            let at = line(entry.span());
            let CapEntry { metric, at_most, at_least, results } = entry.into_inner();
            if at_most.is_none() && at_least.is_none() {
                return Err(fault(Some(at), "has a cap with neither `at_most` nor `at_least`".into()));
            }
            if !at_most.into_iter().chain(at_least).all(f64::is_finite) {
                return Err(fault(Some(at), "has a cap that is NaN or infinite".into()));
            }
            policy.caps.push(Cap { metric, at_most, at_least, results, line: at });
        }
        if policy.non_inferiority.is_empty() && policy.caps.is_empty() {
            return Err(fault(
                None,
                "contains no checks: it needs at least one [[non_inferiority]] or [[cap]]".into(),
            ));
        }
        Ok(policy)
    }

    /// Whether a check needs a baseline.
    pub fn needs_baseline(&self) -> bool {
        self.non_inferiority.iter().any(|c| c.against == Against::Baseline)
    }

    pub(super) fn check_names(&self, names: &[&str]) -> Result<()> {
        let checks = self.non_inferiority.iter().map(|c| (&c.results, c.line));
        for (results, line) in checks.chain(self.caps.iter().map(|c| (&c.results, c.line))) {
            if let Some(missing) = results.iter().find(|r| !names.contains(&r.as_str())) {
                let given: Vec<String> = names.iter().map(|n| format!("`{}`", n.escape_default())).collect();
                let reason = format!(
                    "refers to the result `{}`, which was not given (given: {}; a result is named after its file)",
                    missing.escape_default(),
                    given.join(", ")
                );
                return Err(fault(&self.path, Some(line), reason));
            }
        }
        Ok(())
    }
}

pub(super) fn fault(path: &Path, line: Option<usize>, reason: String) -> Error {
    let remedy = match reason == ABSENT {
        true => "check the path; ‹gate(RESULT…, suggest)› makes a policy to start from",
        false => {
            "correct the policy; ‹gate(RESULT…, suggest)› makes a valid one, and docs/evaluation.md describes the format"
        }
    };
    Error::InputFile { path: path.to_owned(), line, reason, remedy: remedy.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
schema = "quant-gate-policy/1"

[[non_inferiority]]
metric = "perplexity"
against = "baseline"
margin = 0.005

[[cap]]
metric = "kl_p99"
at_most = 0.5
results = ["books"]
"#;

    #[test]
    fn a_policy_knows_its_lines() {
        let policy = Policy::parse(GOOD, Path::new("gate.toml")).unwrap();
        assert_eq!((policy.level, policy.on_inconclusive), (0.05, OnInconclusive::Inconclusive));
        assert_eq!((policy.non_inferiority[0].line, policy.caps[0].line), (4, 9));
        assert!(policy.needs_baseline());
        assert!(policy.check_names(&["books"]).is_ok());
        let error = policy.check_names(&["wiki"]).unwrap_err().to_string();
        assert!(error.contains("gate.toml:9") && error.contains("books"), "{error}");
        assert!(error.contains("(given: `wiki`;"), "{error}");
    }

    #[test]
    fn invalid_policies_are_refused_with_their_line() {
        for (from, to, part) in [
            ("quant-gate-policy/1", "quant-gate-policy/2", ":2: has the schema"),
            ("margin = 0.005", "margin = -1", ":4: has a margin"),
            ("margin = 0.005", "margin = nan", ":4: has a margin"),
            ("margin = 0.005", "margin = 0.005\nmagin = 1", ":8: is not a valid policy"),
            ("\"perplexity\"", "\"size_bytes\"", ":4: tests `size_bytes`"),
            ("\"perplexity\"", "\"perplexit\"", ":5: is not a valid policy"),
            ("at_most = 0.5", "", ":9: has a cap with neither"),
            ("at_most = 0.5", "at_most = nan", ":9: has a cap that is NaN or infinite"),
            ("at_most = 0.5", "at_most = inf", ":9: has a cap that is NaN or infinite"),
            ("margin = 0.005", "margin = 50", ":4: has a margin of 50 for the perplexity"),
            (
                "schema = \"quant-gate-policy/1\"",
                "schema = \"quant-gate-policy/1\"\nlevel = 0.9",
                ":3: has a level of 0.9",
            ),
        ] {
            let error = Policy::parse(&GOOD.replace(from, to), Path::new("g")).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let test = GOOD.split("[[cap]]").next().unwrap().split_once("[[").unwrap().1;
        let twice = Policy::parse(&format!("{GOOD}\n[[{test}"), Path::new("g")).unwrap_err().to_string();
        assert!(twice.contains("repeats the test on line 4"), "{twice}");
        let empty = Policy::parse("schema = \"quant-gate-policy/1\"", Path::new("g")).unwrap_err();
        assert!(empty.to_string().contains("contains no checks"));
    }
}
