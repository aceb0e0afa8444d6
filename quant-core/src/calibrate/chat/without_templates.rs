//! In the place of chat templates, where this crate is built without the feature `chat-templates`.

use std::path::PathBuf;

use crate::Result;
use crate::calibrate::in_process::left_out;
use crate::worker::TextWorker;

/// Fails: the host's own [`TextWorkers`](crate::worker::TextWorkers) run templates.
///
/// # Errors
/// Always.
pub(in crate::calibrate) fn load(
    _: String,
    _: Vec<(String, String)>,
    _: PathBuf,
) -> Result<Box<dyn TextWorker>> {
    Err(left_out("a chat template", "chat-templates"))
}
