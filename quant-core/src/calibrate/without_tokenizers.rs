//! Replaces tokenizers in builds without the feature `tokenizers`.

use std::path::PathBuf;

use super::in_process::left_out;
use crate::Result;
use crate::worker::TextWorker;

/// Always fails: tokenizers need [`TextWorkers`](crate::worker::TextWorkers) of the host.
pub(super) fn load(_: PathBuf, _: &[u8]) -> Result<Box<dyn TextWorker>> {
    Err(left_out("a tokenizer", "tokenizers"))
}
