//! An evaluation as a file: what was measured, on what, and by which program. The gate and the report read it.
//!
//! A result is validated completely before any of its numbers is used.

use std::path::Path;

use quant_formats::checkpoint::parse_strictly;
use quant_formats::digest::sha256_hex;
use quant_formats::scheme::KvScheme;
use quant_formats::wording::parser_message;
use quant_formats::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::divergence::AT_FLOOR;
use crate::statistics::Quantile;
use crate::{BosPolicy, Divergence, Estimate, EvaluationText, Scores};

/// The schema version of results.
pub const SCHEMA: &str = "quant-eval/4";
/// Larger files are rejected, because a parsed number takes about thirty times its size in the file.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// Relative tolerance between a mean and the mean recomputed from the windows.
const TOLERANCE: f64 = 1e-9;
/// How a result is written, for remedies.
const WRITTEN_BY: &str = "‹eval(MODEL, text=TEXT, json=FILE)› writes results";

/// The measurements of a model on a text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Evaluation {
    /// [`SCHEMA`].
    pub schema: String,
    /// The program that measured it.
    pub tool: Tool,
    /// The model that was measured.
    pub model: ModelIdentity,
    /// The reference that it was compared with.
    pub reference: Option<ModelIdentity>,
    /// The text on which the model was measured.
    pub text: TextIdentity,
    /// The name of the [`Profile`](crate::Profile) that was used, with the prefix `wt2-` on the text of WikiText-2.
    pub profile: String,
    /// The token before the text's own tokens.
    pub bos: BosPolicy,
    /// SHA-256 of `tokenizer.json`.
    pub tokenizer_sha256: String,
    /// SHA-256 of the scored windows.
    pub tokens_sha256: String,
    /// Number of windows.
    pub windows: usize,
    /// Number of scored tokens.
    pub tokens_scored: usize,
    /// Number of scored tokens per window.
    pub window_tokens: Vec<usize>,
    /// Number of positions whose values were not finite; zero in every valid result.
    pub non_finite: usize,
    /// The model's scores.
    #[serde(flatten)]
    pub scores: Scores,
    /// The comparison with the reference.
    pub comparison: Option<Divergence>,
    /// Duration of the measurement in seconds; for a resumed run, the time since it was resumed.
    pub seconds: f64,
    /// Tokens that the model read per second during `seconds`.
    pub tokens_per_second: f64,
    /// SHA-256 of all other fields except `seconds` and `tokens_per_second`, as compact JSON in this order, to detect
    /// accidental changes.
    pub sha256: String,
}

/// A build of a program. The fields belong to the [`SCHEMA`]: new ones require a new version of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tool {
    /// The program's name.
    pub name: String,
    /// The program's version.
    pub version: String,
    /// SHA-256 of the executable, if it can be read.
    pub sha256: Option<String>,
    /// The CPU instruction sets that its kernels used.
    pub isa: String,
}

impl Tool {
    /// The mark in [`isa`](Self::isa) of programs that multiply floats as sums of products of bf16. Their results
    /// differ from those of `f32` in the last digits.
    pub const BF16_PARTS: &str = ", floats in bf16 parts";

    /// Whether floats were multiplied as sums of products of bf16.
    pub fn multiplies_bf16_parts(&self) -> bool {
        self.isa.contains(Self::BF16_PARTS)
    }
}

/// A model. The fields belong to the [`SCHEMA`]: new ones require a new version of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelIdentity {
    /// The model's location, as the user gave it.
    pub path: String,
    /// SHA-256 of the model: the hash of the output of `sha256sum config.json *.safetensors`.
    pub sha256: String,
    /// Total size of the model's weight files in bytes.
    pub size_bytes: u64,
    /// The model's schemes, each with the number of linears that have it.
    pub schemes: Vec<SchemeShare>,
    /// The format of the model's KV cache during the measurement; absent if the cache held floats.
    pub kv_cache: Option<KvScheme>,
    /// The quantization method, if the model has a report that names it. Results of earlier versions do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
}

/// The number of linears of a model that have a scheme.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchemeShare {
    /// The scheme, or `float` for linears that are not quantized.
    pub scheme: String,
    /// Number of linears with this scheme.
    pub linears: usize,
}

/// The text on which models were evaluated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct TextIdentity {
    /// The text's name.
    pub name: String,
    /// SHA-256 of the text.
    pub sha256: String,
    /// Size of the text in bytes.
    pub bytes: u64,
}

impl Evaluation {
    /// Assembles a result.
    pub fn new(
        tool: Tool,
        model: ModelIdentity,
        reference: Option<ModelIdentity>,
        (name, text): (String, &EvaluationText),
        (scores, comparison): (Scores, Option<Divergence>),
        (seconds, tokens_per_second): (f64, f64),
    ) -> Self {
        let result = Self {
            schema: SCHEMA.into(),
            tool,
            model,
            reference,
            text: TextIdentity { name, sha256: text.text_sha256.clone(), bytes: text.text_bytes },
            profile: text.id.clone(),
            bos: text.bos.clone(),
            tokenizer_sha256: text.tokenizer_sha256.clone(),
            tokens_sha256: text.tokens_sha256.clone(),
            windows: text.windows.len(),
            tokens_scored: text.tokens_scored(),
            window_tokens: text.windows.iter().map(crate::Window::scored).collect(),
            non_finite: 0,
            scores,
            comparison,
            seconds,
            tokens_per_second,
            sha256: String::new(),
        };
        Self { sha256: result.digest(), ..result }
    }

    /// Computes the expected value of [`sha256`](Self::sha256).
    pub fn digest(&self) -> String {
        let mut value = serde_json::to_value(self).unwrap_or_default();
        if let Some(fields) = value.as_object_mut() {
            for key in ["seconds", "tokens_per_second", "sha256"] {
                fields.remove(key);
            }
        }
        sha256_hex(value.to_string())
    }

    /// Reads a result and validates it completely.
    ///
    /// # Errors
    /// [`Error::InputFile`] when it does not exist, or is not a valid result of this schema; [`Error::Io`] when it
    /// cannot be read.
    pub fn read(path: &Path) -> Result<Self> {
        let value = read_json(path, "an evaluation")?;
        Self::from_value(value, path)
    }

    /// Validates a value that was read from `path`.
    ///
    /// # Errors
    /// See [`read`](Self::read).
    pub fn from_value(value: Value, path: &Path) -> Result<Self> {
        let broken = |reason: String| fault(path, reason);
        check_schema(&value, SCHEMA, path)?;
        let result: Self = serde_json::from_value(value).map_err(|e| {
            let message = parser_message(&e.to_string(), "an object");
            broken(format!("is not an evaluation result: {message}"))
        })?;
        result.check().map_err(broken)?;
        Ok(result)
    }

    /// The error names the inconsistent part.
    fn check(&self) -> Result<(), String> {
        if self.windows == 0 || self.tokens_scored == 0 {
            return Err("has no scored windows".into());
        }
        if self.non_finite > 0 {
            return Err(format!("has {} positions with a NaN or infinite score", self.non_finite));
        }
        if self.window_tokens.len() != self.windows || self.window_tokens.contains(&0) {
            return Err(format!(
                "must have one positive entry in `window_tokens` for each of {} windows, but has {} entries",
                self.windows,
                self.window_tokens.len()
            ));
        }
        if self.window_tokens.iter().try_fold(0_usize, |sum, n| sum.checked_add(*n))
            != Some(self.tokens_scored)
        {
            return Err("has `window_tokens` that do not add up to `tokens_scored`".into());
        }
        // Texts and tokenizers of engines may have no files.
        let files =
            [&self.text.sha256, &self.tokenizer_sha256].into_iter().filter(|digest| !digest.is_empty());
        let required = [
            Some(&self.model.sha256),
            self.reference.as_ref().map(|r| &r.sha256),
            Some(&self.tokens_sha256),
            self.tool.sha256.as_ref(),
        ];
        for digest in required.into_iter().flatten().chain(files) {
            let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
            if digest.len() != 64 || !digest.bytes().all(digit) {
                return Err(format!(
                    "has `{}` as a SHA-256, which must be 64 lowercase hexadecimal digits",
                    digest.escape_default()
                ));
            }
        }
        if self.reference.is_some() != self.comparison.is_some() {
            return Err("has only one of `reference` and `comparison`".into());
        }
        self.scores.check("", &self.window_tokens, self.text.bytes)?;
        if ![self.seconds, self.tokens_per_second].iter().all(|t| t.is_finite() && *t >= 0.0) {
            return Err("has a negative or non-finite `seconds` or `tokens_per_second`".into());
        }
        if let Some(comparison) = &self.comparison {
            comparison.reference.check("comparison.reference.", &self.window_tokens, self.text.bytes)?;
            comparison.check(&self.scores, &self.window_tokens)?;
        }
        if self.sha256 != self.digest() {
            return Err("was modified after the measurement: its fields do not match their SHA-256".into());
        }
        Ok(())
    }

    /// The name of a result: the name of its file without the extension.
    pub fn name(path: &Path) -> String {
        path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned())
    }
}

pub(crate) fn read_json(path: &Path, what: &str) -> Result<Value> {
    let broken = |reason: String| fault(path, reason);
    let metadata = std::fs::metadata(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::InputFile {
            path: path.to_owned(),
            line: None,
            reason: "does not exist".into(),
            remedy: format!("check the path; {WRITTEN_BY}").into(),
        },
        _ => Error::io("read", path, e),
    })?;
    if metadata.is_dir() {
        return Err(Error::InputFile {
            path: path.to_owned(),
            line: None,
            reason: format!("is a directory, not {what}"),
            remedy: format!("give a file, not a model; {WRITTEN_BY}").into(),
        });
    }
    if !metadata.is_file() {
        return Err(broken("is not a regular file".into()));
    }
    if metadata.len() > MAX_FILE_BYTES {
        return Err(broken(format!("has {} bytes; the limit is {MAX_FILE_BYTES}", metadata.len())));
    }
    let bytes = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(broken("is empty".into()));
    }
    parse_strictly(&bytes).map_err(|e| broken(format!("is not {what}: {e}")))
}

pub(crate) fn check_schema(value: &Value, schema: &str, path: &Path) -> Result<()> {
    let kind = |schema: &str| schema.split('/').next().unwrap_or_default().to_owned();
    let reason = match value.get("schema").and_then(Value::as_str) {
        Some(found) if found == schema => return Ok(()),
        Some(found) if kind(found) != kind(schema) => {
            return Err(Error::InputFile {
                path: path.to_owned(),
                line: None,
                reason: format!("has the schema `{}`, not `{schema}`", found.escape_default()),
                remedy: WRITTEN_BY.into(),
            });
        }
        Some(found) => format!("has the schema `{}`; this version reads `{schema}`", found.escape_default()),
        None => format!("has no field `schema`; this version reads `{schema}`"),
    };
    Err(fault(path, reason))
}

fn fault(path: &Path, reason: String) -> Error {
    Error::InputFile {
        path: path.to_owned(),
        line: None,
        reason,
        remedy: "measure again: ‹eval(MODEL, text=TEXT, json=FILE)›".into(),
    }
}

impl Scores {
    fn check(&self, place: &str, tokens: &[usize], text_bytes: u64) -> Result<(), String> {
        // Rounding can push the likelihood of a near-certain token above 1.
        agree(&format!("{place}nll"), self.nll, &self.window_nll, tokens, -1e-6)?;
        same(&format!("{place}perplexity"), self.perplexity, self.nll.exp())?;
        let nats = self.nll.mean * tokens.iter().sum::<usize>() as f64;
        if let Some(bits) = self.bits_per_byte {
            let name = format!("{place}bits_per_byte");
            check_estimate(&name, bits, 0.0)?;
            let bytes = nats / (bits.mean * std::f64::consts::LN_2);
            if nats > 0.0 && !whole(bytes) {
                return Err(format!("has a `{name}` that implies a non-integer number of bytes"));
            }
            if nats > 0.0 && bytes > text_bytes as f64 + 0.5 {
                return Err(format!(
                    "has a `{name}` that implies {bytes:.0} bytes, but the text has only {text_bytes}"
                ));
            }
            if let Some(byte) = self.byte_perplexity {
                same(&format!("{place}byte_perplexity"), byte, bits.scaled(std::f64::consts::LN_2).exp())?;
            }
        }
        if let Some(word) = self.word_perplexity {
            let name = format!("{place}word_perplexity");
            check_estimate(&name, word, 1.0)?;
            if nats > 0.0 && !whole(nats / word.mean.ln()) {
                return Err(format!("has a `{name}` that implies a non-integer number of words"));
            }
        }
        if self.token_standard_error.is_some_and(|e| !(e.is_finite() && e >= 0.0)) {
            return Err(format!("has a negative or non-finite `{place}token_standard_error`"));
        }
        Ok(())
    }
}

impl Divergence {
    fn check(&self, own: &Scores, tokens: &[usize]) -> Result<(), String> {
        agree("comparison.kl", self.kl, &self.window_kl, tokens, 0.0)?;
        let count = tokens.iter().sum::<usize>() as f64;
        let differences: Vec<f64> =
            own.window_nll.iter().zip(&self.reference.window_nll).map(|(m, r)| m - r).collect();
        agree("comparison.delta_nll", self.delta_nll, &differences, tokens, f64::NEG_INFINITY)?;
        same("comparison.perplexity_ratio", self.perplexity_ratio, self.delta_nll.exp())?;
        let q = &self.kl_quantiles;
        let rising = [q.median, q.p90, q.p99, q.p999, q.max].map(|q| q.value);
        if !rising.iter().all(|v| v.is_finite() && *v >= 0.0) || !rising.is_sorted() {
            return Err(
                "has `comparison.kl_quantiles` that are not finite, nonnegative and in ascending order"
                    .into(),
            );
        }
        let ordered = |q: &Quantile| match (q.low, q.high) {
            (Some(low), Some(high)) => 0.0 <= low && low <= high && high.is_finite(),
            (None, None) => tokens.len() == 1,
            _ => false,
        };
        if ![q.median, q.p90, q.p99, q.p999, q.max].iter().all(ordered)
            || self.kl.mean > q.max.value * (1.0 + TOLERANCE)
        {
            return Err("has `comparison.kl_quantiles` with invalid intervals".into());
        }
        // The quantiles imply an upper bound on the mean, and the mean implies an upper bound on each quantile.
        let max =
            0.5 * rising[0] + 0.4 * rising[1] + 0.09 * rising[2] + 0.009 * rising[3] + 0.001 * rising[4];
        // The fraction of positions below a quantile can differ from its nominal value by up to one position.
        let slack = 4.0 * rising[4] / count;
        let min = [(0.5, rising[0]), (0.9, rising[1]), (0.99, rising[2]), (0.999, rising[3])];
        let too_large =
            |(share, value): (f64, f64)| value * (1.0 - share) > self.kl.mean * (1.0 + TOLERANCE) + slack;
        let window_over = self.window_kl.iter().any(|w| *w > rising[4] * (1.0 + TOLERANCE));
        if self.kl.mean > max + slack || min.into_iter().any(too_large) || window_over {
            return Err("has `comparison.kl_quantiles` that contradict the mean `comparison.kl`".into());
        }
        let positions = self.kl_by_confidence.iter().map(|b| b.positions);
        if positions.fold(0_usize, usize::saturating_add) != tokens.iter().sum::<usize>() {
            return Err(
                "has `comparison.kl_by_confidence` positions that do not add up to `tokens_scored`".into()
            );
        }
        let parts = self.kl_by_confidence.iter().filter_map(|b| Some(b.kl?.mean * b.positions as f64));
        near("comparison.kl_by_confidence", parts.sum::<f64>() / count, self.kl.mean)?;
        let at_floor = self.noise_floor.as_ref().map(|f| self.kl.mean < AT_FLOOR * f.kl.mean);
        if self.at_noise_floor != at_floor {
            return Err("has a `comparison.at_noise_floor` that contradicts `comparison.noise_floor`".into());
        }
        if !whole(self.top1_agreement.mean * count) {
            return Err(
                "has a `comparison.top1_agreement` that implies a non-integer number of positions".into()
            );
        }
        if self.kl_histogram.total() != tokens.iter().sum::<usize>() as u64 {
            return Err("has `comparison.kl_histogram` counts that do not add up to `tokens_scored`".into());
        }
        if self.minimum_detectable_increase.is_some_and(|m| !(m.is_finite() && m >= 0.0)) {
            return Err("has a negative or non-finite `comparison.minimum_detectable_increase`".into());
        }
        for (name, estimate) in [("top1_agreement", self.top1_agreement), ("top5_overlap", self.top5_overlap)]
        {
            check_estimate(&format!("comparison.{name}"), estimate, 0.0)?;
            if estimate.mean > 1.0 {
                return Err(format!("has a `comparison.{name}` above 1"));
            }
        }
        check_estimate("comparison.rms_delta_p", self.rms_delta_p, 0.0)
    }
}

fn check_estimate(name: &str, estimate: Estimate, min: f64) -> Result<(), String> {
    let error_fits = estimate.standard_error.is_none_or(|e| e.is_finite() && e >= 0.0);
    if estimate.mean.is_finite() && estimate.mean >= min && error_fits {
        return Ok(());
    }
    Err(format!("has an invalid `{name}`: {estimate}"))
}

fn whole(number: f64) -> bool {
    number.is_finite() && number > -0.5 && (number - number.round()).abs() <= 1e-6 * (1.0 + number.abs())
}

fn same(name: &str, found: Estimate, expected: Estimate) -> Result<(), String> {
    check_estimate(name, found, 0.0)?;
    near(name, found.mean, expected.mean)?;
    match (found.standard_error, expected.standard_error) {
        (None, None) => Ok(()),
        (Some(a), Some(b)) => near(&format!("{name}.standard_error"), a, b),
        _ => Err(format!("has a standard error of `{name}` that contradicts the values of its windows")),
    }
}

/// Checks that an estimate agrees with the windows' means, which must be at least `min`.
fn agree(name: &str, estimate: Estimate, means: &[f64], tokens: &[usize], min: f64) -> Result<(), String> {
    if means.len() != tokens.len() {
        return Err(format!("has {} windows, but `{name}` for {}", tokens.len(), means.len()));
    }
    if means.iter().any(|m| !(m.is_finite() && *m >= min)) {
        return Err(format!("has an invalid `{name}` for a window"));
    }
    check_estimate(name, estimate, min)?;
    let totals: Vec<f64> = means.iter().zip(tokens).map(|(m, &n)| m * n as f64).collect();
    let again = Estimate::clustered(&totals, tokens);
    near(name, estimate.mean, again.mean)?;
    match (estimate.standard_error, again.standard_error) {
        (None, None) => Ok(()),
        // If windows hardly differ, the error may consist of rounding errors.
        (Some(a), Some(b)) if (a - b).abs() <= 1e-6 * b + 1e-12 => Ok(()),
        _ => Err(format!("has a standard error of `{name}` that contradicts the values of its windows")),
    }
}

fn near(name: &str, found: f64, expected: f64) -> Result<(), String> {
    if expected.is_finite() && (found - expected).abs() <= TOLERANCE * (1.0 + expected.abs()) {
        return Ok(());
    }
    Err(format!("has a `{name}` of {found}, but its windows give {expected}"))
}
