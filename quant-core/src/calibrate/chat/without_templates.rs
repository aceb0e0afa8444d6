//! Replaces the template renderer in builds without the feature `chat-templates`.

use std::path::PathBuf;

use crate::Result;
use crate::calibrate::in_process::left_out;
use crate::worker::TextWorker;

/// Always fails: templates need [`TextWorkers`](crate::worker::TextWorkers) of the host.
pub(in crate::calibrate) fn load(
    _: String,
    _: Vec<(String, String)>,
    _: PathBuf,
) -> Result<Box<dyn TextWorker>> {
    Err(left_out("a chat template", "chat-templates"))
}
