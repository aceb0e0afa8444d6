//! Files that a run writes beside its checkpoint: looked at before the work, and written whole.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::{Error, Result, system};

/// Fails when a file cannot be written, before work is done whose result would be lost.
///
/// # Errors
/// When it cannot be opened; [`Error::Usage`] for a named pipe.
pub fn check_writable(path: &Path) -> Result<()> {
    if std::fs::metadata(path).is_ok_and(|m| system::is_named_pipe(&m)) {
        return Err(Error::usage(
            format!("{} is a named pipe, and writing to it would wait for a reader", path.display()),
            "name a file",
        ));
    }
    // Opened without truncation: if the work fails, what was there stays.
    let new = !path.exists();
    std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .map_err(|e| Error::io("write", path, e))?;
    if new {
        std::fs::remove_file(path).map_err(|e| Error::io("remove", path, e))?;
    }
    Ok(())
}

/// Writes a file of which either all is there afterwards, or what was there before. Devices and pipes are written to.
///
/// # Errors
/// When it cannot be written.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let fault = |e: std::io::Error| Error::io("write", path, e);
    // A link stays one.
    let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if target.metadata().is_ok_and(|m| !m.is_file()) {
        return std::fs::write(&target, bytes).map_err(fault);
    }
    let directory = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(directory).map_err(fault)?;
    file.write_all(bytes).and_then(|()| file.as_file().sync_all()).map_err(fault)?;
    // Temporary files are for their owner alone; results are for others too.
    file.as_file().set_permissions(system::readable_by_all()).map_err(fault)?;
    file.persist(&target).map(drop).map_err(|e| fault(e.error))
}

/// Where a path leads, whether it is there yet or not.
fn real(path: &Path) -> PathBuf {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let beside = || Some(parent.canonicalize().ok()?.join(path.file_name()?));
    path.canonicalize().ok().or_else(beside).unwrap_or_else(|| path.to_owned())
}

/// Fails when a file that is to be written lies in the directory of a model that is read; `-` stands for
/// standard output.
///
/// # Errors
/// [`Error::Usage`].
pub fn outside(written: &[(&str, Option<&Path>)], models: &[&Path]) -> Result<()> {
    for (option, path) in written {
        let Some(path) = path.filter(|p| *p != Path::new("-")) else { continue };
        if let Some(model) = models.iter().find(|model| real(path).starts_with(real(model))) {
            return Err(Error::usage(
                format!("‹{option}› would write {} into the model {}", path.display(), model.display()),
                format!("give ‹{option}› a file outside of it"),
            ));
        }
    }
    Ok(())
}

/// Fails when a file that is to be written is one that is read, or is to be written twice: the setting and
/// the file of each. Nothing is written yet.
///
/// # Errors
/// [`Error::Usage`].
pub fn distinct(written: &[(&str, Option<&Path>)], read: &[&Path]) -> Result<()> {
    let mut taken: Vec<PathBuf> = read.iter().map(|p| real(p)).collect();
    for (option, path) in written {
        let Some(path) = path.filter(|p| *p != Path::new("-")) else { continue };
        if taken.contains(&real(path)) {
            return Err(Error::usage(
                format!(
                    "‹{option}› would write {}, which is read or written by this very run",
                    path.display()
                ),
                format!("give ‹{option}› a file of its own"),
            ));
        }
        taken.push(real(path));
    }
    Ok(())
}
