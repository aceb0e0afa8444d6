//! Files that a run writes besides its checkpoint.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::{Error, Result, system};

/// Fails if a file cannot be written, before work is done whose result would be lost.
///
/// # Errors
/// [`Error::Io`] when the file cannot be opened; [`Error::Usage`] for a named pipe.
pub fn check_writable(path: &Path) -> Result<()> {
    if std::fs::metadata(path).is_ok_and(|m| system::is_named_pipe(&m)) {
        return Err(Error::usage(
            format!("{} is a named pipe: writing to it would block until a reader opens it", path.display()),
            "use a regular file",
        ));
    }
    let fault = |e| Error::io("write", path, e);
    if path.exists() {
        // Opened without truncation, so that the file survives if the work fails.
        return std::fs::OpenOptions::new().append(true).open(path).map(drop).map_err(fault);
    }
    match path.symlink_metadata() {
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(fault(e)),
        _ if system::path_bytes(path).ends_with(b"/") => return Err(fault(ErrorKind::IsADirectory.into())),
        _ => {}
    }
    // An empty file under the name itself would remain if the program were killed here, and be taken for a result.
    let probe = parent_of(path).join(format!(".tmp{}", std::process::id()));
    match std::fs::OpenOptions::new().write(true).create_new(true).open(&probe) {
        Ok(_) => std::fs::remove_file(&probe).map_err(|e| Error::io("remove", probe, e)),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(fault(e)),
    }
}

/// Fails if a file cannot be written, or would replace a file that is not of the same kind, such as a model. An empty file
/// and a device may be replaced.
///
/// # Errors
/// [`Error::Usage`] that names the setting and the file; as [`check_writable`]; errors of `is_same_kind`.
pub fn check_replaceable(
    option: &str,
    path: &Path,
    is_same_kind: impl FnOnce(&Path) -> Result<bool>,
) -> Result<()> {
    check_writable(path)?;
    let is_file = path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() > 0);
    if !is_file || is_same_kind(path)? {
        return Ok(());
    }
    Err(Error::usage(
        format!("‹{option}› would replace {}, which is a different kind of file", path.display()),
        format!("set ‹{option}› to a different file, or remove this one"),
    ))
}

fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes a file completely or leaves the existing one unchanged, also at a power loss. Devices and pipes are written
/// in place.
///
/// # Errors
/// [`Error::Io`] when it cannot be written.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let fault = |e: std::io::Error| Error::io("write", path, e);
    // A symbolic link is kept.
    let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if target.metadata().is_ok_and(|m| !m.is_file()) {
        return std::fs::write(&target, bytes).map_err(fault);
    }
    let directory = parent_of(&target);
    let mut file = tempfile::NamedTempFile::new_in(directory).map_err(fault)?;
    file.write_all(bytes).and_then(|()| file.as_file().sync_all()).map_err(fault)?;
    // Temporary files are readable only by their owner; results should not be.
    file.as_file().set_permissions(system::readable_by_all()).map_err(fault)?;
    file.persist(&target).map_err(|e| fault(e.error))?;
    // Without this, a crash may bring the old file back.
    system::sync_directory(directory).map_err(fault)
}

/// Resolves a path, which need not exist.
fn real(path: &Path) -> PathBuf {
    let through_parent = || Some(parent_of(path).canonicalize().ok()?.join(path.file_name()?));
    path.canonicalize().ok().or_else(through_parent).unwrap_or_else(|| path.to_owned())
}

/// Fails if a file to be written is a model that is read, or lies in its directory; `-` is standard output.
///
/// # Errors
/// [`Error::Usage`] that names the setting and the file.
pub fn outside(written: &[(&str, Option<&Path>)], models: &[&Path]) -> Result<()> {
    for (option, path) in written {
        let Some(path) = path.filter(|p| *p != Path::new("-")) else { continue };
        let Some(model) = models.iter().find(|model| real(path).starts_with(real(model))) else { continue };
        return Err(match real(path) == real(model) {
            true => taken_already(option, path),
            false => Error::usage(
                format!(
                    "‹{option}› would write {} into the model directory {}",
                    path.display(),
                    model.display()
                ),
                format!("set ‹{option}› to a file outside that directory"),
            ),
        });
    }
    Ok(())
}

fn taken_already(option: &str, path: &Path) -> Error {
    Error::usage(
        format!("‹{option}› would write {}, which this run also reads or writes", path.display()),
        format!("set ‹{option}› to a separate file"),
    )
}

/// Fails if a file that will be written is also read, or would be written twice. Each file is given with its setting.
/// Call this before anything is written.
///
/// # Errors
/// [`Error::Usage`] that names the setting and the file.
pub fn distinct(written: &[(&str, Option<&Path>)], read: &[&Path]) -> Result<()> {
    let mut taken: Vec<PathBuf> = read.iter().map(|p| real(p)).collect();
    for (option, path) in written {
        let Some(path) = path.filter(|p| *p != Path::new("-")) else { continue };
        if taken.contains(&real(path)) {
            return Err(taken_already(option, path));
        }
        taken.push(real(path));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_cannot_be_written_are_noticed_and_nothing_is_left() {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        std::fs::write(at("old"), "old").unwrap();
        for fine in ["old", "new"] {
            check_writable(&at(fine)).unwrap();
        }
        for wrong in ["", "new/", "missing/new", "old/new", &"n".repeat(300)] {
            let error = check_writable(&at(wrong)).unwrap_err();
            assert!(matches!(error, Error::Io { .. }), "{wrong}: {error}");
        }
        assert_eq!(std::fs::read(at("old")).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 1);
    }
}
