//! The errors of a build without the feature `hub` when it is asked to download.

use std::borrow::Cow;
use std::path::Path;

use quant_calibration_data::PublicSet;
use quant_core::{Error, Result};

use super::id::HubId;
use crate::commands::Session;

/// The error for a model that is not available locally.
pub fn model(id: &HubId, _session: &Session) -> Result<Cow<'static, Path>> {
    let revision = id.revision.as_ref().map(|r| format!(" --revision {r}")).unwrap_or_default();
    Err(Error::Unavailable {
        what: format!("the model {id}"),
        reason: "there is no such directory, and this build does not download models".into(),
        remedy: format!(
            "check the path; or fetch the model with `hf download {}{revision}` and give the directory that \
            it prints; or build quant with `--features hub`",
            id.repository()
        )
        .into(),
    })
}

/// The error for a public text set that is not available locally.
pub fn documents(set: &PublicSet, _session: &Session) -> Result<Vec<String>> {
    Err(Error::Unavailable {
        what: format!("the text set `{}`", set.name),
        reason: "this build does not download texts".into(),
        remedy: format!(
            "fetch {} of the data set {} yourself, unpack it to plain text or .jsonl, and give that file's path \
             (licence: {}); or build quant with `--features hub`",
            set.file, set.hub_id, set.licence
        )
        .into(),
    })
}
