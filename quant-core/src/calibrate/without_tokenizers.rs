//! In the place of tokenizers, where this crate is built without the feature `tokenizers`.

use std::path::PathBuf;

use super::in_process::left_out;
use crate::Result;
use crate::worker::TextWorker;

/// Fails: the host's own [`TextWorkers`](crate::worker::TextWorkers) run tokenizers.
///
/// # Errors
/// Always.
pub(super) fn load(_: PathBuf, _: &[u8]) -> Result<Box<dyn TextWorker>> {
    Err(left_out("a tokenizer", "tokenizers"))
}
