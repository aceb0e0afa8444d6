//! The errors that a build without the feature `hub` reports for requests that need a download.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use quant_calibration_data::PublicSet;
use quant_core::checkpoint::printable;
use quant_core::names::nearest_path;
use quant_core::{Error, Result};

use super::id::HubId;
use crate::commands::Session;
use crate::inputs::{BUILTIN, HELDOUT_NAME};

/// Returns the error for a model that is not available locally.
pub fn model(id: &HubId, _session: &Session) -> Result<Cow<'static, Path>> {
    // In a directory that exists, the argument is a path: opening it reports what is missing.
    if Path::new(&id.owner).is_dir() && id.revision.is_none() {
        return Ok(Cow::Owned(PathBuf::from(id.repository())));
    }
    let revision = id.revision.as_ref().map(|r| format!(" --revision {r}")).unwrap_or_default();
    let meant = nearest_path(Path::new(&id.repository()));
    let meant = meant.map(|meant| printable(&meant.display().to_string()));
    let meant = meant.map_or_else(String::new, |meant| format!("did you mean {meant}? "));
    // Not an error of the environment: a scheduler would retry it.
    Err(Error::usage(
        format!(
            "the model {id} is not available: there is no such directory, and this build does not download models"
        ),
        format!(
            "{meant}check the path, or download the model with `hf download {}{revision}` and give the directory \
            that it prints, or build quant with `--features hub`",
            id.repository()
        ),
    ))
}

/// Returns the error for a public text set, which this build cannot download.
pub fn documents(set: &PublicSet, _session: &Session) -> Result<Vec<String>> {
    Err(Error::usage(
        format!("the text set `{}` is not available: this build does not download texts", set.name),
        format!(
            "use the built-in text ({HELDOUT_NAME} for an evaluation, {BUILTIN} for calibration); or download {} from \
             the data set {}, convert it to plain text or to a .jsonl file whose lines have a field `text`, and give \
             the path of the converted file (licence: {}); or build quant with `--features hub`",
            set.file, set.hub_id, set.licence
        ),
    ))
}
