//! The inputs of the commands: model directories, calibration texts, evaluation texts.

use std::path::{Path, PathBuf};

use quant_calibration_data::{CORPUS, HELDOUT, documents, public_sets};
use quant_core::calibrate::{Sampling, TextTokenizer, TokenWindows};
use quant_core::checkpoint::ModelDirectory;
pub use quant_core::run::{BUILTIN, HELDOUT as HELDOUT_NAME, Opened};
use quant_core::run::{Catalog, Text, calibration as calibration_windows};
use quant_core::{Error, Result, run};

use crate::commands::Session;
use crate::hub;

/// Opens a GGUF file or a model directory, or downloads the hub model of this name first.
pub fn open(path: &Path, session: &Session) -> Result<Opened> {
    run::open(path, &session.host())
}

pub fn tokenizer(directory: &ModelDirectory) -> Result<TextTokenizer> {
    TextTokenizer::of(directory)
}

/// Returns the calibration windows of `source`: a file, or the name of a text set.
pub fn calibration(
    opened: &Opened,
    source: &str,
    sampling: Sampling,
    session: &Session,
) -> Result<TokenWindows> {
    calibration_windows(opened, &Text::Named(source.to_owned()), sampling, &session.host())
}

impl Catalog for Session {
    fn is_named(&self, model: &Path) -> bool {
        hub::is_named(model)
    }

    fn model_directory(&self, given: &Path) -> Result<PathBuf> {
        hub::model_directory(given, self).map(std::borrow::Cow::into_owned)
    }

    fn built_in(&self, name: &str) -> Option<Vec<String>> {
        let set = match name {
            BUILTIN => CORPUS,
            HELDOUT_NAME => HELDOUT,
            _ => return None,
        };
        Some(documents(set).map(|document| document.text.to_owned()).collect())
    }

    fn fetched(&self, name: &str) -> Result<Option<Vec<String>>> {
        let public = sets()?;
        public.iter().find(|set| set.name == name).map(|set| hub::documents(set, self)).transpose()
    }

    fn texts(&self) -> Result<Vec<String>> {
        let public = sets()?.into_iter().map(|set| set.name);
        Ok([BUILTIN, HELDOUT_NAME].into_iter().map(str::to_owned).chain(public).collect())
    }
}

pub fn evaluation_text_help() -> String {
    let public: Vec<String> = sets().unwrap_or_default().into_iter().map(|set| set.name).collect();
    format!(
        "Evaluation text: a file (plain text, or .jsonl with texts or conversations), {HELDOUT_NAME} (built in), or a public set, downloaded in a \
         build with the feature hub: {}",
        public.join(", ")
    )
}

fn sets() -> Result<Vec<quant_calibration_data::PublicSet>> {
    public_sets().map_err(|e| Error::Internal(format!("the built-in manifest of text sets is invalid: {e}")))
}
