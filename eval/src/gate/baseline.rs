//! The baseline: known good results in one committed file.
//!
//! The file also has the SHA-256 of all results, so that a truncated or edited file is rejected.

use std::collections::BTreeMap;
use std::path::Path;

use quant_formats::digest::sha256_hex;
use quant_formats::wording::parser_message;
use quant_formats::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::Evaluation;
use crate::result::{check_schema, read_json};

/// The schema version of baselines.
pub const SCHEMA: &str = "quant-gate-baseline/1";

/// Results by name.
#[derive(Debug, Clone, PartialEq)]
pub struct Baseline {
    /// The results, without their timings.
    pub results: BTreeMap<String, Evaluation>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    schema: String,
    sha256: String,
    results: BTreeMap<String, serde_json::Value>,
}

impl Baseline {
    /// Creates a baseline of these results. Timings are left out, so that equal numbers give an identical file.
    pub fn new(results: &[(String, Evaluation)]) -> Self {
        let timeless = |e: &Evaluation| Evaluation { seconds: 0.0, tokens_per_second: 0.0, ..e.clone() };
        Self { results: results.iter().map(|(name, e)| (name.clone(), timeless(e))).collect() }
    }

    /// Computes the SHA-256 of all results, which the file contains.
    ///
    /// # Errors
    /// [`Error::Internal`] if a result cannot be serialized.
    pub fn sha256(&self) -> Result<String> {
        digest(&self.values()?)
    }

    fn values(&self) -> Result<BTreeMap<String, serde_json::Value>> {
        let value = |e| serde_json::to_value(e).map_err(|e| Error::Internal(e.to_string()));
        self.results.iter().map(|(name, e)| Ok((name.clone(), value(e)?))).collect()
    }

    /// Reads a baseline and validates it completely.
    ///
    /// # Errors
    /// [`Error::InputFile`] when it is not a baseline, or is empty, truncated or edited.
    pub fn read(path: &Path) -> Result<Self> {
        let fault = |reason: String| Error::InputFile {
            path: path.to_owned(),
            line: None,
            reason,
            remedy: "create a baseline from accepted results: ‹gate(RESULT…, baseline=FILE, update)›".into(),
        };
        let value = read_json(path, "a baseline").map_err(|e| with_remedy(e, &fault))?;
        check_schema(&value, SCHEMA, path).map_err(|e| with_remedy(e, &fault))?;
        let file: File = serde_json::from_value(value).map_err(|e| {
            fault(format!("is not a baseline: {}", parser_message(&e.to_string(), "an object")))
        })?;
        if file.results.is_empty() {
            return Err(fault("contains no results".into()));
        }
        if digest(&file.results)? != file.sha256 {
            return Err(fault(
                "was modified after it was created: its results do not match their SHA-256".into(),
            ));
        }
        let read = |(name, value)| Ok((name, Evaluation::from_value(value, path)?));
        Ok(Self { results: file.results.into_iter().map(read).collect::<Result<_>>()? })
    }

    /// Returns the contents of the file.
    ///
    /// # Errors
    /// [`Error::Internal`] if a result cannot be serialized.
    pub fn to_json(&self) -> Result<String> {
        let results = self.values()?;
        let file = File { schema: SCHEMA.into(), sha256: digest(&results)?, results };
        let text = serde_json::to_string_pretty(&file).map_err(|e| Error::Internal(e.to_string()))?;
        Ok(text + "\n")
    }
}

fn digest(results: &BTreeMap<String, serde_json::Value>) -> Result<String> {
    serde_json::to_string(results).map(sha256_hex).map_err(|e| Error::Internal(e.to_string()))
}

fn with_remedy(error: Error, fault: &impl Fn(String) -> Error) -> Error {
    match error {
        Error::InputFile { reason, .. } => fault(reason),
        other => other,
    }
}
