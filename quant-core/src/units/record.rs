//! The record of a job: what its results depend on, and how a worker finds its inputs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::store::{RECORD, Store, damaged};
use crate::checkpoint::{
    ModelDirectory, Sidecar, differences, file_sha256, parse_strictly, printable, read_capped,
};
use crate::digest::{hex, sha256_hex};
use crate::recipe::Plan;
use crate::run::RecipeSettings;
use crate::wording::parser_message;
use crate::{CancelToken, Error, Result};

pub(super) const SCHEMA: &str = "quant-job/3";
/// The maximum size of a record, which lists the scheme of every linear.
const MAX_BYTES: u64 = 256 << 20;
const MAX_LISTED: usize = 8;
const MACHINE: [&str; 3] = ["instruction_set", "processor", "float_products"];

/// The contents of `job.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct JobRecord {
    pub(super) schema: String,
    /// The model's directory or GGUF file, where the job was created.
    pub(super) model: PathBuf,
    /// The settings. A recipe and a file of channel maxima are copied to the inputs, and named as there.
    pub(super) settings: RecipeSettings,
    /// The calibration tokens, as an input.
    #[serde(deserialize_with = "Option::deserialize")]
    pub(super) windows: Option<String>,
    /// The name of the calibration text, if it is one that every program has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) text: Option<String>,
    pub(super) blocks_per_unit: usize,
    /// The requested number of shards of calibration windows for the passage through the float model.
    pub(super) forward_shards: usize,
    /// The number of experts whose linears a unit computes; `None` if blocks are whole.
    #[serde(deserialize_with = "Option::deserialize")]
    pub(super) experts_per_unit: Option<usize>,
    /// The data on which the results depend: the program, the configuration of the model, all settings, and the tokens.
    pub(super) run: Value,
    /// A hash of the name, type, shape and outputs of every tensor.
    pub(super) tensors_sha256: String,
    /// The SHA-256 of the files that a merge copies from the model, by name. No unit reads them.
    pub(super) companions: BTreeMap<String, String>,
}

impl JobRecord {
    pub(super) fn read(store: &Store) -> Result<Self> {
        let path = &store.shown(RECORD);
        let bytes = read_capped(&store.record(MAX_BYTES)?, path, MAX_BYTES)?;
        let bytes = bytes.map_err(|reason| damaged(path, reason))?;
        let value = parse_strictly(&bytes).map_err(|reason| damaged(path, reason))?;
        match value["schema"].as_str() {
            Some(SCHEMA) => {}
            Some(other) => {
                return Err(Error::usage(
                    format!("{} has the schema `{other}`, expected `{SCHEMA}`", path.display()),
                    "use the version of the program that created the job",
                ));
            }
            None => return Err(damaged(path, "is not the record of a job".into())),
        }
        let record: Self = serde_json::from_value(value)
            .map_err(|e| damaged(path, parser_message(&e.to_string(), "an object")))?;
        let [blocks, shards] = [record.blocks_per_unit, record.forward_shards];
        if blocks == 0 || shards == 0 || record.experts_per_unit == Some(0) {
            return Err(damaged(path, "has units without blocks, shards or experts".into()));
        }
        Ok(record)
    }

    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        let text = serde_json::to_string_pretty(self).map_err(|e| Error::Internal(e.to_string()))?;
        Ok(format!("{text}\n").into_bytes())
    }

    /// Returns a hash of everything that the results depend on, which excludes the model's path.
    pub(super) fn digest(&self) -> String {
        let results = json!({
            "schema": self.schema,
            "run": self.run,
            "tensors_sha256": self.tensors_sha256,
            "blocks_per_unit": self.blocks_per_unit,
            "forward_shards": self.forward_shards,
            "experts_per_unit": self.experts_per_unit,
        });
        hex(blake3::hash(results.to_string().as_bytes()).as_bytes())
    }

    /// Replaces the machine in `run` by that of the job, if the program is the same.
    pub(super) fn overlook_machine(&self, run: &mut Value) {
        if self.run["program"]["executable_blake3"] == run["program"]["executable_blake3"] {
            for field in MACHINE {
                run["program"][field] = self.run["program"][field].clone();
            }
        }
    }

    /// Fails unless a worker with this `run` and these tensors computes the results of the job.
    pub(super) fn check(&self, path: &Path, run: &Value, tensors_sha256: &str) -> Result<()> {
        let program = |run: &Value, field: &str| run["program"][field].clone();
        let is_other = |field: &&str| program(&self.run, field) != program(run, field);
        if self.run["program"]["executable_blake3"] == run["program"]["executable_blake3"]
            && let Some(field) = MACHINE.iter().find(|field| is_other(field))
        {
            return Err(Error::Unavailable {
                what: format!("a machine of the type that the job in {} needs", path.display()),
                reason: format!(
                    "{field} was {}, and is {} on this machine, where float sums may differ in their last bits",
                    program(&self.run, field),
                    program(run, field)
                ),
                remedy:
                    "create the job and run all units on machines of the same type; QUANT_ISA selects the \
                    instruction set of the kernels, and QUANT_FLOAT_PRODUCTS how floats are multiplied"
                        .into(),
            });
        }
        let mut different = differences(&self.run, run);
        if self.tensors_sha256 != tensors_sha256 {
            different.push("the model has tensors of different names, types or shapes".into());
        }
        if different.is_empty() {
            return Ok(());
        }
        let mut list: String = different.iter().take(MAX_LISTED).map(|d| format!("\n  {d}")).collect();
        if different.len() > MAX_LISTED {
            list.push_str(&format!("\n  and {} more", different.len() - MAX_LISTED));
        }
        Err(Error::usage(
            format!("the job in {} has a different program, model or settings:{list}", path.display()),
            "use the program and the model with which the job was created, or create a new job",
        ))
    }
}

/// Returns the hashes of the files next to the weights, by name.
///
/// # Errors
/// [`Error::Io`] if one of them cannot be read; [`Error::Interrupted`].
pub(super) fn companions(model: &ModelDirectory, cancel: &CancelToken) -> Result<BTreeMap<String, String>> {
    let hash = |file: &Sidecar| {
        let name = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let hash = match &file.contents {
            Some(contents) => sha256_hex(contents),
            None => file_sha256(&file.real, cancel)?,
        };
        Ok((name, hash))
    };
    model.sidecar_files().iter().map(hash).collect()
}

pub(super) fn changed(was: &BTreeMap<String, String>, is: &BTreeMap<String, String>) -> Vec<String> {
    let names: BTreeSet<&String> = was.keys().chain(is.keys()).collect();
    names.into_iter().filter(|name| was.get(*name) != is.get(*name)).map(|name| printable(name)).collect()
}

pub(super) fn tensors_sha256(plan: &Plan) -> String {
    let mut text = String::new();
    for entry in &plan.entries {
        text.push_str(&format!("{} {} {:?}\n", entry.stored, entry.info.dtype, entry.info.shape));
        for output in &entry.outputs {
            text.push_str(&format!("  {} {} {:?}\n", output.name, output.info.dtype, output.info.shape));
        }
    }
    sha256_hex(text)
}

/// Converts a value to text and back, after which equal numbers compare equal.
pub(super) fn normalized(value: &Value) -> Value {
    serde_json::from_str(&value.to_string()).unwrap_or_else(|_| value.clone())
}
