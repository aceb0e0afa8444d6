//! The staged files of a job, newly created or taken over.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::ShardLayout;
use super::differences::Differences;
use super::file_system::{FileSystem, StagedFile, failure, remove_if_present};
use super::input_file::read_exact_at;
use super::job::{Job, parent_of};
use super::journal::{Entries, WriteJournal};
use super::layout::ShardFile;
use super::options::{Resume, WriteOptions};
use super::seal::equal_unsealed;
use crate::digest::hex;
use crate::{Error, Result, system};

pub(crate) struct Staged {
    pub(crate) path: PathBuf,
    pub(crate) file: Box<dyn StagedFile>,
    pub(crate) touched: bool,
}

/// Creates all files of a new job. The record comes last, since it makes the job resumable.
pub(crate) fn stage(
    fs: &dyn FileSystem,
    job: &Job,
    layout: &ShardLayout,
    record: &Value,
) -> Result<(Vec<Staged>, WriteJournal)> {
    let out = job.out();
    fs.create_dir(&out).map_err(|e| failure(fs, "create", &out, 0, e))?;
    let mut shards = Vec::with_capacity(layout.shards().len());
    for shard in layout.shards() {
        let path = out.join(&shard.name);
        let file = create_shard(fs, &path, shard)?;
        shards.push(Staged { path, file, touched: true });
    }
    fs.sync_dir(&out).map_err(|e| failure(fs, "sync", &out, 0, e))?;
    let journal = WriteJournal::start(fs, &job.journal(), &Default::default())?;
    job.write_record(fs, record)?;
    Ok((shards, journal))
}

/// Takes over the shards of an interrupted job. Files that do not match their shard are created again; other files are
/// removed, since every run adds them again.
pub(crate) fn restage(fs: &dyn FileSystem, job: &Job, layout: &ShardLayout) -> Result<Vec<Staged>> {
    let out = job.out();
    remove_strays(fs, &out, layout)?;
    let mut shards = Vec::with_capacity(layout.shards().len());
    for shard in layout.shards() {
        let path = out.join(&shard.name);
        let file = match reopen(fs, &path, shard) {
            Some(file) => file,
            None => {
                remove_if_present(fs, &path)?;
                create_shard(fs, &path, shard)?
            }
        };
        shards.push(Staged { path, file, touched: true });
    }
    fs.sync_dir(&out).map_err(|e| failure(fs, "sync", &out, 0, e))?;
    Ok(shards)
}

/// Creates a shard of full length with its header, so that a full disk is noticed before the work begins.
fn create_shard(fs: &dyn FileSystem, path: &Path, shard: &ShardFile) -> Result<Box<dyn StagedFile>> {
    let fail = |action, e| failure(fs, action, path, shard.bytes, e);
    let file = fs.create_file(path).map_err(|e| fail("create", e))?;
    file.allocate(shard.bytes).map_err(|e| fail("allocate", e))?;
    file.write_at(0, &shard.header).map_err(|e| fail("write", e))?;
    Ok(file)
}

fn reopen(fs: &dyn FileSystem, path: &Path, shard: &ShardFile) -> Option<Box<dyn StagedFile>> {
    let file = fs.open_file(path).ok()?;
    if file.file().metadata().ok()?.len() != shard.bytes {
        return None;
    }
    let mut header = vec![0; shard.header.len()];
    read_exact_at(file.file(), path, 0, &mut header).ok()?;
    equal_unsealed(&header, &shard.header, shard.seal.as_ref()).then_some(file)
}

fn remove_strays(fs: &dyn FileSystem, out: &Path, layout: &ShardLayout) -> Result<()> {
    let fail = |e| Error::io("list", out, e);
    let entries = match std::fs::read_dir(out) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => {
            return fs.create_dir(out).map_err(|e| failure(fs, "create", out, 0, e));
        }
        Err(e) => return Err(fail(e)),
    };
    for entry in entries {
        let name = entry.map_err(fail)?.file_name();
        if !layout.shards().iter().any(|s| name == s.name.as_str()) {
            remove_if_present(fs, &out.join(name))?;
        }
    }
    Ok(())
}

/// The request of a job, as stored in its record.
pub(crate) fn record(options: &WriteOptions, layout: &ShardLayout) -> Result<Value> {
    let record = json!({
        "schema_version": 1,
        "tool_version": options.tool_version,
        "max_shard_bytes": options.max_shard_bytes,
        "layout_sha256": hex(&layout.digest()),
        "fingerprint": options.fingerprint,
    });
    // Equal numbers must compare equal, so this is parsed like the stored record.
    serde_json::from_str(&record.to_string()).map_err(|e| Error::Internal(format!("job record: {e}")))
}

/// Returns the finished work of an earlier run that this one resumes.
///
/// # Errors
/// [`Error::Usage`] if the earlier run had a different request, and its work may not be discarded.
pub(crate) fn unfinished(job: &Job, record: &Value, options: &WriteOptions) -> Result<Option<Entries>> {
    if options.resume == Resume::Never {
        return Ok(None);
    }
    let fault = match job.read_record()? {
        Ok(None) => return Ok(None),
        Ok(Some(stored)) => different(job.path(), &stored, record),
        Err(damage) => Some((damage, "")),
    };
    let required = options.resume == Resume::Required;
    if fault.is_some() && options.force && !required {
        return Ok(None);
    }
    let entries = match WriteJournal::load(&job.journal()) {
        // The fault is reported.
        Err(_) if fault.is_some() && job.journal().symlink_metadata().is_ok_and(|m| !m.is_file()) => {
            Entries::unknown()
        }
        loaded => loaded?,
    };
    match fault {
        _ if !required && entries.is_empty() => Ok(None),
        None => Ok(Some(entries)),
        Some((message, remedy)) => {
            let start_over = match required {
                true => "run with ‹force› and without ‹resume› to start over",
                false => "run with ‹force› to discard its finished work and start over",
            };
            Err(Error::usage(message, format!("{remedy}{start_over}")))
        }
    }
}

/// Compares a request with that of an interrupted run. Returns the differences, if there are any, and how to continue
/// that run.
fn different(job: &Path, was: &Value, is: &Value) -> Option<(String, &'static str)> {
    const MAX_LISTED: usize = 8;
    if was == is {
        return None;
    }
    let Differences { lines, program } = Differences::new(was, is);
    let mut list = lines.iter().take(MAX_LISTED).map(|d| format!("\n  {d}")).collect::<String>();
    if lines.len() > MAX_LISTED {
        list.push_str(&format!("\n  and {} more", lines.len() - MAX_LISTED));
    }
    let (what, remedy) = match program {
        true => (
            "a different build or instruction set",
            "resume it with the executable, processor and QUANT_ISA that it used, or ",
        ),
        false => {
            ("different inputs or settings", "run with the settings of the interrupted run to resume it, or ")
        }
    };
    Some((format!("the interrupted run in {} used {what}:{list}", job.display()), remedy))
}

/// Fails if the files and 2 % more do not fit. Files of an earlier run in the job directory count as free space.
pub(crate) fn check_space(fs: &dyn FileSystem, target: &Path, job: &Path, file_bytes: u64) -> Result<()> {
    let Some(existing) = target.ancestors().skip(1).find(|p| p.exists()) else { return Ok(()) };
    let Some(free) = fs.free_bytes(existing).map_err(|e| Error::io("measure", existing, e))? else {
        return Ok(());
    };
    let needed = file_bytes.saturating_add(file_bytes / 50);
    let free = free.saturating_add(occupied(&job.join("out")));
    if needed > free {
        return Err(Error::DiskFull { path: target.to_owned(), needed, free });
    }
    Ok(())
}

/// Disk usage of the files in a directory, in bytes.
fn occupied(directory: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    entries.flatten().filter_map(|e| e.metadata().ok()).map(|m| system::bytes_on_disk(&m)).sum()
}

pub(crate) fn create_parents(fs: &dyn FileSystem, parent: &Path) -> Result<()> {
    let missing: Vec<&Path> = parent.ancestors().take_while(|p| !p.exists()).collect();
    for directory in missing.into_iter().rev() {
        match fs.create_dir(directory) {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::AlreadyExists => continue,
            Err(e) => return Err(failure(fs, "create", directory, 0, e)),
        }
        let above = parent_of(directory);
        fs.sync_dir(above).map_err(|e| failure(fs, "sync", above, 0, e))?;
    }
    Ok(())
}
