//! Checks that the output does not overlap the input.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};

use super::job::job_path;
use crate::{Error, Result, system};

/// Fails when `output`, or its job directory, is the directory `input`, is inside it, or contains it. Links, bind
/// mounts and different spellings are resolved; `output` need not exist.
///
/// # Errors
/// [`Error::OutputIsInput`] when they overlap; [`Error::Usage`] when `output` cannot be a target; [`Error::Io`] when a
/// path cannot be resolved.
pub fn refuse_overlap(input: &Path, output: &Path) -> Result<()> {
    let real_input = input.canonicalize().map_err(|e| Error::io("open", input, e))?;
    let real_output = resolve(output)?;
    for candidate in [job_path(&real_output)?, real_output] {
        if overlap(&real_input, &candidate) {
            return Err(Error::OutputIsInput { output: output.to_owned(), input: input.to_owned() });
        }
    }
    Ok(())
}

fn overlap(input: &Path, output: &Path) -> bool {
    output.starts_with(input)
        || input.starts_with(output)
        || has_ancestor(output, input)
        || has_ancestor(input, output)
}

/// Whether `path` or one of its parents is the same directory as `above` under another name, as with a bind mount.
fn has_ancestor(path: &Path, above: &Path) -> bool {
    let identity = |p: &Path| fs::metadata(p).ok().map(|m| system::identity(&m));
    let Some(sought) = identity(above) else { return false };
    path.ancestors().any(|p| identity(p) == Some(sought))
}

/// The absolute path with links resolved; its last components need not exist.
pub(crate) fn resolve(path: &Path) -> Result<PathBuf> {
    let absolute = std::path::absolute(path).map_err(|e| Error::io("open", path, e))?;
    let mut existing = absolute.as_path();
    let mut rest: Vec<OsString> = Vec::new();
    loop {
        match existing.canonicalize() {
            Ok(mut real) => {
                real.extend(rest.iter().rev());
                return Ok(real);
            }
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(Error::io("open", path, e)),
        }
        let (Some(parent), Some(Component::Normal(name))) =
            (existing.parent(), existing.components().next_back())
        else {
            return Err(Error::usage(
                format!("{} contains `..` after a directory that does not exist", path.display()),
                "write the path without `..`",
            ));
        };
        if fs::symlink_metadata(existing).is_ok() {
            return Err(Error::usage(
                format!("{} is a broken symbolic link", existing.display()),
                "remove the link, or give a different path",
            ));
        }
        rest.push(name.to_owned());
        existing = parent;
    }
}
