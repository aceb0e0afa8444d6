//! Records of steps and roundings in the report of a tensor, under their names.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Job;
use crate::round::{Gptq, Rounding};
use crate::{Error, Result};

/// The fields of [`TensorReport`](super::TensorReport), whose names no record may have.
const FIELDS: [&str; 26] = [
    "tensor",
    "action",
    "dtype",
    "shape",
    "scheme",
    "rounded_to",
    "bits",
    "group_size",
    "ratio",
    "weight_error",
    "vanished_groups",
    "all_zero",
    "scale_search",
    "clip_search",
    "gptq",
    "smooth",
    "attention",
    "reordered",
    "input",
    "cache_scales",
    "calibration_tokens",
    "routed_tokens",
    "bytes_before",
    "bytes_after",
    "source_sha256",
    "records",
];

/// Fails if a step or the rounding has the name of a field of the report, under which it could report nothing.
pub(super) fn check_names(job: &Job<'_>) -> Result<()> {
    let rounding = Some(job.plan.method.rounding.name()).filter(|name| *name != Gptq.name());
    match job.plan.steps().into_iter().chain(rounding).find(|name| FIELDS.contains(name)) {
        Some(name) => Err(Error::usage(
            format!("the step `{name}` has the name of a field of the report"),
            "give it another name in the program that adds it",
        )),
        None => Ok(()),
    }
}

/// Takes the record that has a field of its own out of the others. A record of a different form stays there.
pub(super) fn typed<T: DeserializeOwned>(records: &mut BTreeMap<String, Value>, name: &str) -> Option<T> {
    let record = records.get(name).and_then(|record| T::deserialize(record).ok());
    record.inspect(|_| drop(records.remove(name)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_fields_are_those_of_the_report() {
        let source = include_str!("report.rs");
        let (_, fields) = source.split_once("pub struct TensorReport {").unwrap();
        let (fields, _) = fields.split_once("\n}\n").unwrap();
        let names = fields.lines().filter_map(|line| line.strip_prefix("    pub ")?.split(':').next());
        assert_eq!(names.collect::<Vec<_>>(), FIELDS);
    }

    #[test]
    fn a_record_of_another_form_is_kept() {
        let mut records = BTreeMap::from([("a".to_owned(), json!(3)), ("b".to_owned(), json!("x"))]);
        assert_eq!(typed::<u8>(&mut records, "a"), Some(3));
        assert_eq!(typed::<u8>(&mut records, "b"), None);
        assert_eq!(typed::<u8>(&mut records, "c"), None);
        assert_eq!(records, BTreeMap::from([("b".to_owned(), json!("x"))]));
    }
}
