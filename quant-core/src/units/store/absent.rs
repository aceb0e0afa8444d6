//! The error that a build without the feature `store` reports for the URL of an object store.

use std::path::Path;

use super::Files;
use crate::run::Host;
use crate::{Error, Result};

pub(super) fn open(url: &Path, _host: &Host<'_>) -> Result<Box<dyn Files>> {
    Err(absent(url))
}

pub(super) fn check_url(url: &Path) -> Result<()> {
    Err(absent(url))
}

fn absent(url: &Path) -> Error {
    // A URL may contain a password, so only its scheme is printed.
    let url = url.to_string_lossy();
    let scheme = url.split("://").next().unwrap_or_default();
    Error::usage(
        format!(
            "{scheme}:// is the URL of an object store, and this program was built without the feature `store`"
        ),
        "use a directory that all workers see, or build the program with `--features store`",
    )
}
