//! What the searches in a block have found, kept so that a resumed run does not search again.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::BlockTask;
use crate::Result;
use crate::digest::{bytes_from_hex, hex, sha256_hex};

/// Stores the findings of the searches in one block.
pub(crate) trait FindingStore: Send + Sync {
    fn recall(&self, key: &str) -> Option<Value>;

    fn remember(&self, key: &str, value: &Value) -> Result<()>;
}

/// The findings of one of the steps of a method.
#[derive(Clone, Copy)]
pub(crate) struct Findings<'a> {
    pub(crate) store: &'a dyn FindingStore,
    /// The position of the step in the method.
    pub(crate) step: usize,
}

impl std::fmt::Debug for Findings<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Findings").field("step", &self.step).finish_non_exhaustive()
    }
}

impl Findings<'_> {
    fn key(&self, about: &str) -> String {
        format!("step {}: {about}", self.step)
    }
}

impl BlockTask<'_> {
    /// Returns what an interrupted run has found. A damaged record counts as missing: a changed factor would go
    /// unnoticed.
    pub(super) fn recall<T: DeserializeOwned>(&self, about: &str) -> Option<T> {
        let findings = self.findings?;
        let record = findings.store.recall(&findings.key(about))?;
        let [sha256, value] = record.as_array()?.as_slice() else { return None };
        let intact = sha256.as_str() == Some(&sha256_hex(value.to_string()));
        intact.then(|| serde_json::from_value(value.clone()).ok())?
    }

    /// Keeps a finding for a run that resumes.
    pub(super) fn remember<T: Serialize>(&self, about: &str, finding: &T) -> Result<()> {
        let Some(findings) = self.findings else { return Ok(()) };
        let value = json!(finding);
        findings.store.remember(&findings.key(about), &json!([sha256_hex(value.to_string()), value]))
    }
}

/// Floats as text, bit by bit.
pub(super) fn to_text(values: &[f32]) -> String {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    hex(&bytes)
}

/// The inverse of [`to_text`].
pub(super) fn from_text(text: &str) -> Option<Vec<f32>> {
    let bytes = bytes_from_hex(text)?;
    let (values, rest) = bytes.as_chunks::<4>();
    rest.is_empty().then(|| values.iter().map(|value| f32::from_le_bytes(*value)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_survive_as_text() {
        let values = [0.0, -0.0, 1.5, f32::MIN_POSITIVE / 2.0, f32::MAX, f32::INFINITY, 0.1];
        let read = from_text(&to_text(&values)).unwrap();
        assert!(
            read.iter().zip(&values).all(|(a, b)| a.to_bits() == b.to_bits()) && read.len() == values.len()
        );
        assert_eq!(from_text(""), Some(Vec::new()));
        for invalid in ["3f80000", "3f800000 ", "3f80000g", "é3f8000", "+f800000"] {
            assert_eq!(from_text(invalid), None, "{invalid}");
        }
    }
}
