//! In place of `tracer` on platforms whose system calls it does not know.

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Result, bail};

use super::disk::Disk;

/// What happens at the operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    Nothing,
    DiskFull,
    Fails,
    PowerLoss { after: bool },
}

/// A run that has ended.
pub(super) struct Traced {
    pub(super) code: Option<i32>,
    pub(super) operations: usize,
    pub(super) hit: Option<String>,
    pub(super) disk: Disk,
    pub(super) stderr: String,
}

pub(super) fn run(_: (&Path, &[OsString]), _: &Path, _: &Path, _: (usize, Fault)) -> Result<Traced> {
    bail!("only programs on Linux and x86-64 can be traced")
}
