//! GGUF: models as one file for llama.cpp and programs based on it, for writing and reading.
//!
//! ```text
//! families, metadata, tokenizer ─► plan ─► run ─► archive (file)      what is written, tensor by tensor
//! calibration or a file ─► imatrix ──────┤
//! calibration ─► steps (AWQ) ─────────────┤
//! calibration ─► curvature (GPTQ) ────────┘
//! ```
//!
//! A file is written in one pass over the checkpoint's tensors, without an intermediate form of the model. The encoding
//! of rows as bytes is in [`blocks`](crate::blocks).
//!
//! [`run::quantize`](crate::run::quantize) writes a model. A file of other tensors is written with [`GgufArchive`], and
//! any file is read with [`GgufFile`]:
//!
//! ```
//! use std::sync::Arc;
//! use quant_core::blocks::Q8_0;
//! use quant_core::checkpoint::{CheckpointWriter, TensorSink, WriteOptions};
//! use quant_core::gguf::{GgufArchive, GgufFile, Value};
//! # let temporary = tempfile::tempdir().unwrap();
//! # let path = temporary.path().join("a.gguf");
//!
//! let row: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin()).collect();
//! let mut bytes = vec![0; Q8_0.row_bytes(64).unwrap()];
//! Q8_0.encode(&row, None, &mut bytes);
//!
//! let metadata = vec![("general.name".to_owned(), Value::string("a row"))];
//! let archive = GgufArchive { file_name: "a.gguf".into(), metadata, in_parts: false };
//! let options = WriteOptions { archive: Arc::new(archive), single_file: true, ..WriteOptions::default() };
//! let tensors = vec![GgufArchive::spec("row", &Q8_0, &[1, 64])?];
//! let mut writer = CheckpointWriter::create(&path, tensors, options)?;
//! writer.write("row", 0, &bytes)?;
//! writer.publish()?;
//!
//! let file = GgufFile::open(&path)?;
//! assert_eq!(file.header().get("general.name").and_then(Value::as_str), Some("a row"));
//! let tensor = file.tensor("row").unwrap();
//! let (mut stored, mut decoded) = (vec![0; bytes.len()], vec![0.0; 64]);
//! file.read(tensor, 0, &mut stored)?;
//! tensor.kind.decode(&stored, &mut decoded);
//! assert!(row.iter().zip(&decoded).all(|(a, b)| (a - b).abs() < 0.01));
//! # Ok::<(), quant_core::Error>(())
//! ```

mod codes;
#[cfg(test)]
mod config_tests;
mod curvature;
mod description;
mod factors;
mod families;
mod file;
mod gemma4;
mod general;
mod imatrix;
mod layout;
mod llama4;
mod memory;
mod metadata;
#[cfg(test)]
mod metadata_tests;
mod mixers;
mod mixture;
mod plan;
mod read;
#[cfg(test)]
mod read_back_tests;
mod rows;
mod run;
mod saved;
mod specials;
mod steps;
mod time;
mod tokenizer;

use serde_json::json;

pub use curvature::Curvature;
pub use file::{Array, GgufArchive, GgufFault, GgufFile, GgufHeader, GgufTensor, MAGIC, Value, model_in};
pub use imatrix::{Importance, ImportanceEntry};
pub use memory::{peak_memory, scratch_bytes};
pub use mixture::{MIXTURES, Mixture, mixture};
pub use plan::{GgufPlan, GgufRequest, PlannedTensor};
pub use read::{GgufSource, is_gguf, open};
pub use run::{GgufInputs, GgufReport, GgufTensorReport, write_tensors};
pub use steps::Steps;
pub use time::{GgufWork, ImportanceOrigin};
pub(crate) use tokenizer::check_pre;

use crate::calibrate::{Sampling, TokenWindows};
use crate::checkpoint::ModelDirectory;
use crate::digest::sha256_hex;
use crate::model::Model;
use crate::pipeline::{CalibrationReport, Program};
use crate::{CancelToken, Result, TensorSink};

pub use crate::recipe::GGUF as FORMAT;

/// A one-line description for help and tables.
pub const SUMMARY: &str = "one file for llama.cpp; ‹scheme› is a type such as Q4_K_M";

impl GgufPlan {
    /// The archive of a plan: its metadata, with the entries for an importance matrix. `in_parts`: whether to write
    /// several files if one would be too large. `origin`: the file name to record for the importance matrix.
    pub fn archive(
        &self,
        file_name: &str,
        in_parts: bool,
        importance: Option<&Importance>,
        origin: &str,
    ) -> GgufArchive {
        let mut metadata = self.metadata.clone();
        if let Some(importance) = importance {
            let datasets = importance.datasets.join(", ");
            metadata.extend(general::importance(
                origin,
                &datasets,
                importance.entries.len(),
                importance.chunks,
            ));
        }
        GgufArchive { file_name: file_name.to_owned(), metadata, in_parts }
    }

    /// The inputs on which a run depends, except those that a resume checks separately: the file's header and the
    /// contents of the checkpoint. `importance` is a matrix from a file; `calibration` is the text, if there is one, and
    /// how its windows were chosen.
    pub fn fingerprint(
        &self,
        directory: &ModelDirectory,
        importance: Option<&Importance>,
        calibration: Option<(&TokenWindows, &Sampling)>,
        program: &Program,
    ) -> serde_json::Value {
        let request = &self.request;
        let importance = importance.map(|im| sha256_hex(im.to_dat()));
        let (method, settings) = (&request.method, &request.settings);
        let search = method.search_mode(settings);
        json!({
            "program": program,
            "config_sha256": sha256_hex(json!(directory.config()).to_string()),
            "format": FORMAT,
            "mixture": request.mixture.name,
            "method": method.name,
            "importance_sha256": importance,
            "search": format!("{:?}", request.search),
            "calibration": calibration.map(|(windows, sampling)| CalibrationReport::new(search, sampling, windows)),
            "rounding": method.rounding_fingerprint(settings),
            "transforms": method.fingerprint(settings),
        })
    }

    /// Compares the tensors outside of blocks, on which all calibration depends, with those of the interrupted run.
    ///
    /// # Errors
    /// [`Error::InputChanged`](crate::Error::InputChanged) if one has changed; errors of reading and of `sink`.
    pub fn check_outer(&self, model: &Model, sink: &mut dyn TensorSink, cancel: &CancelToken) -> Result<()> {
        saved::check_outer(sink, model, self, cancel)
    }
}
