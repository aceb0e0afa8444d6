//! Makes every file operation of a run fail once, and simulates a power loss at each.
//!
//! On a power loss, unsynced data is lost: written ranges that were not synced turn to garbage, files whose directory
//! was not synced disappear. In every case the target is absent, the complete old one, or the complete new one, and the
//! next run succeeds.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use serde_json::json;
use tempfile::TempDir;

use super::{snapshot, spec, write_tensors};
use crate::checkpoint::file_system::{FileSystem, RealFileSystem, StagedFile};
use crate::checkpoint::{CheckpointWriter, Dtype, Resume, TensorSink, TensorSpec, WriteOptions};
use crate::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    /// Only this operation fails.
    DiskFull,
    /// All later operations fail, too. This one may have been done, entirely or in part.
    PowerLoss,
}

#[derive(Clone)]
struct FaultyFileSystem {
    state: Arc<Mutex<State>>,
    can_exchange: bool,
}

struct State {
    operations: usize,
    fault_at: usize,
    fault: Fault,
    off: bool,
    dirty: Vec<(Arc<File>, u64, u64)>,
    unsynced: HashSet<PathBuf>,
}

enum Turn {
    Succeed,
    /// Report the error, after doing part of the operation if it can be divided.
    Fail(io::Error),
}

fn power_loss() -> io::Error {
    io::Error::other("the power is off")
}

impl FaultyFileSystem {
    fn new(fault_at: usize, fault: Fault, can_exchange: bool) -> Self {
        let state =
            State { operations: 0, fault_at, fault, off: false, dirty: Vec::new(), unsynced: HashSet::new() };
        Self { state: Arc::new(Mutex::new(state)), can_exchange }
    }

    fn turn(&self) -> io::Result<Turn> {
        let mut state = self.state.lock().unwrap();
        if state.off {
            return Err(power_loss());
        }
        let now = state.operations;
        state.operations += 1;
        if now != state.fault_at {
            return Ok(Turn::Succeed);
        }
        Ok(Turn::Fail(match state.fault {
            Fault::DiskFull => Errno::NOSPC.into(),
            Fault::PowerLoss => {
                state.off = true;
                power_loss()
            }
        }))
    }

    /// An operation that happens entirely or not at all. At a power loss, the parity of the operation's number selects
    /// which.
    fn atomic<T>(&self, operation: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match self.turn()? {
            Turn::Succeed => operation(),
            Turn::Fail(error) => {
                let state = self.state.lock().unwrap();
                if state.off && state.fault_at.is_multiple_of(2) {
                    drop(state);
                    operation()?;
                }
                Err(error)
            }
        }
    }

    fn was_hit(&self) -> bool {
        let state = self.state.lock().unwrap();
        state.operations > state.fault_at
    }

    fn lose_unsynced(&self) {
        let state = self.state.lock().unwrap();
        for (file, offset, len) in &state.dirty {
            let garbage = vec![0xEE; usize::try_from(*len).unwrap()];
            file.write_all_at(&garbage, *offset).unwrap();
        }
        for path in &state.unsynced {
            let _ = fs::remove_file(path);
        }
    }
}

/// A file system that never fails, and does not wait for the disk.
fn steady() -> FaultyFileSystem {
    FaultyFileSystem::new(usize::MAX, Fault::DiskFull, true)
}

struct FaultyFile {
    fs: FaultyFileSystem,
    file: Arc<File>,
}

impl FaultyFile {
    fn open(fs: &FaultyFileSystem, path: &Path, create: bool) -> io::Result<Box<dyn StagedFile>> {
        let file = fs::OpenOptions::new().read(true).write(true).create_new(create).open(path)?;
        if create {
            fs.state.lock().unwrap().unsynced.insert(path.to_owned());
        }
        Ok(Box::new(Self { fs: fs.clone(), file: Arc::new(file) }))
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.fs.state.lock().unwrap();
        state.dirty.push((Arc::clone(&self.file), offset, bytes.len() as u64));
        self.file.write_all_at(bytes, offset)
    }
}

impl StagedFile for FaultyFile {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match self.fs.turn()? {
            Turn::Succeed => self.write(offset, bytes),
            Turn::Fail(error) => {
                self.write(offset, &bytes[..bytes.len() / 2])?;
                Err(error)
            }
        }
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        match self.fs.turn()? {
            Turn::Succeed => self.file.set_len(len),
            Turn::Fail(error) => {
                self.file.set_len(len / 2)?;
                Err(error)
            }
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        match self.fs.turn()? {
            Turn::Succeed => {
                let mut state = self.fs.state.lock().unwrap();
                state.dirty.retain(|(file, ..)| !Arc::ptr_eq(file, &self.file));
                Ok(())
            }
            Turn::Fail(error) => Err(error),
        }
    }

    fn file(&self) -> &File {
        &self.file
    }
}

impl FileSystem for FaultyFileSystem {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.atomic(|| fs::create_dir(path))
    }

    fn open_lock(&self, path: &Path) -> io::Result<File> {
        self.atomic(|| RealFileSystem.open_lock(path))
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StagedFile>> {
        self.atomic(|| FaultyFile::open(self, path, true))
    }

    fn open_file(&self, path: &Path) -> io::Result<Box<dyn StagedFile>> {
        self.atomic(|| FaultyFile::open(self, path, false))
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.atomic(|| {
            self.state.lock().unwrap().unsynced.retain(|p| p.parent() != Some(path));
            Ok(())
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.atomic(|| {
            fs::rename(from, to)?;
            let mut state = self.state.lock().unwrap();
            // Until the directory is synced, the file may have either name. Only its content matters.
            state.unsynced.remove(from);
            Ok(())
        })
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.check_durable(from);
        self.atomic(|| RealFileSystem.rename_new(from, to))
    }

    fn exchange(&self, one: &Path, other: &Path) -> io::Result<()> {
        if !self.can_exchange {
            return Err(Errno::INVAL.into());
        }
        self.check_durable(one);
        self.atomic(|| RealFileSystem.exchange(one, other))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.atomic(|| fs::remove_file(path))
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.atomic(|| fs::remove_dir(path))
    }

    fn remove_tree(&self, path: &Path) -> io::Result<()> {
        match self.turn()? {
            Turn::Succeed => fs::remove_dir_all(path),
            Turn::Fail(error) => {
                // The removal stops halfway: every other file is gone.
                for entry in fs::read_dir(path)?.step_by(2) {
                    let _ = fs::remove_file(entry?.path());
                }
                Err(error)
            }
        }
    }

    fn free_bytes(&self, _path: &Path) -> io::Result<Option<u64>> {
        Ok(None)
    }

    fn forget_cached(&self, _file: &File) {}
}

impl FaultyFileSystem {
    /// When a directory becomes the target, the disk must hold all of it.
    fn check_durable(&self, directory: &Path) {
        let state = self.state.lock().unwrap();
        assert!(!state.unsynced.iter().any(|p| p.starts_with(directory)), "{:?}", state.unsynced);
        if directory.ends_with("out.job/out") {
            assert!(state.dirty.is_empty(), "published before it was synced");
        }
    }
}

fn specs() -> Vec<TensorSpec> {
    vec![spec("a", Dtype::F32, &[8]), spec("b", Dtype::U8, &[5]), spec("c", Dtype::I32, &[3, 2])]
}

fn create(fs: Arc<dyn FileSystem>, target: &Path, force: bool, resume: Resume) -> Result<CheckpointWriter> {
    let options = WriteOptions {
        force,
        resume,
        max_shard_bytes: 40,
        fingerprint: json!({ "plan": "p" }),
        ..WriteOptions::default()
    };
    CheckpointWriter::create_on(fs, target, specs(), options)
}

fn run(fs: Arc<dyn FileSystem>, target: &Path, force: bool, resume: Resume) -> Result<()> {
    let mut writer = create(fs, target, force, resume)?;
    writer.add_file("config.json", b"{}")?;
    for unit in specs().chunks(2) {
        write_tensors(&mut writer, unit)?;
        writer.commit()?;
    }
    writer.publish().map(drop)
}

type Files = Vec<(String, Vec<u8>)>;

fn content_of(target: &Path) -> Option<Files> {
    target.exists().then(|| snapshot(target))
}

fn put(target: &Path, files: &Files) {
    for (name, bytes) in files {
        let path = target.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}

/// In memory if possible: the tests create thousands of small files.
fn scratch() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Makes operation `k` fail, for every `k` of a run, and checks the state of the disk.
fn every_operation(fault: Fault, old: Option<Files>, can_exchange: bool) {
    let reference = scratch();
    let place = reference.path().join("out");
    run(Arc::new(RealFileSystem), &place, false, Resume::Never).unwrap();
    let new = snapshot(&place);

    let force = old.is_some();
    let mut was_aside = false;
    for k in 0.. {
        assert!(k < 500, "the run did not end");
        let mut hit = true;
        for resume in [Resume::Never, Resume::IfSame, Resume::Required] {
            let dir = scratch();
            let target = dir.path().join("out");
            if let Some(old) = &old {
                put(&target, old);
            }
            let fs = FaultyFileSystem::new(k, fault, can_exchange);
            let outcome = run(Arc::new(fs.clone()), &target, force, Resume::Never);
            hit = fs.was_hit();
            if fault == Fault::PowerLoss {
                fs.lose_unsynced();
            }
            let case = format!("{fault:?} at operation {k}, {resume:?}: {outcome:?}");

            let left = content_of(&target);
            let aside = dir.path().join("out.job/previous");
            let is_new = left.as_ref() == Some(&new);
            let is_old = left == old;
            // The old target is only set aside if directories cannot be exchanged.
            let is_aside = !can_exchange && left.is_none() && content_of(&aside) == old;
            assert!(is_new || is_old || is_aside, "{case}");
            if outcome.is_ok() {
                assert!(is_new, "{case}");
            }
            if let (Err(error), Fault::DiskFull, true) = (&outcome, fault, hit) {
                assert!(matches!(error, Error::DiskFull { .. } | Error::Io { .. }), "{case}");
                assert!(!is_aside, "{case}: not rolled back");
            }

            if is_aside {
                was_aside = true;
                // Starting the next run restores the old target, whatever happens to that run.
                let started = create(Arc::new(steady()), &target, false, resume);
                assert!(matches!(started, Err(Error::OutputExists { .. })), "{case}");
                assert_eq!(content_of(&target), old, "{case}: the old output was not restored");
            }
            let force = force || left.is_some();
            run(Arc::new(RealFileSystem), &target, force, resume)
                .unwrap_or_else(|e| panic!("{case}, then {e}"));
            assert_eq!(content_of(&target).as_ref(), Some(&new), "{case}");
            let left_over: Vec<_> =
                fs::read_dir(dir.path()).unwrap().flatten().map(|e| e.file_name()).collect();
            assert_eq!(left_over, ["out"], "{case}");
        }
        if !hit {
            assert_eq!(was_aside, fault == Fault::PowerLoss && !can_exchange);
            assert!(k > 30, "only {k} operations were counted");
            return;
        }
    }
}

fn old() -> Option<Files> {
    let manifest =
        r#"{ "files": [{ "name": "config.json", "bytes": 3 }, { "name": "weights", "bytes": 7 }] }"#;
    Some(vec![
        ("config.json".into(), b"old".to_vec()),
        ("quant_manifest.json".into(), manifest.into()),
        ("weights".into(), b"old too".to_vec()),
    ])
}

#[test]
fn disk_full_at_any_operation_of_a_new_output() {
    every_operation(Fault::DiskFull, None, true);
}

#[test]
fn disk_full_at_any_operation_of_a_replacement() {
    every_operation(Fault::DiskFull, old(), true);
}

#[test]
fn disk_full_at_any_operation_without_exchange() {
    every_operation(Fault::DiskFull, old(), false);
}

#[test]
fn power_loss_at_any_operation_of_a_new_output() {
    every_operation(Fault::PowerLoss, None, true);
}

#[test]
fn power_loss_at_any_operation_of_a_replacement() {
    every_operation(Fault::PowerLoss, old(), true);
}

#[test]
fn power_loss_at_any_operation_without_exchange() {
    every_operation(Fault::PowerLoss, old(), false);
}

#[test]
fn power_loss_while_resuming() {
    let reference = scratch();
    let place = reference.path().join("out");
    run(Arc::new(RealFileSystem), &place, false, Resume::Never).unwrap();
    let new = snapshot(&place);
    for k in 0..500 {
        let dir = scratch();
        let target = dir.path().join("out");
        // The first run is interrupted after its first commit.
        let first = FaultyFileSystem::new(30, Fault::PowerLoss, true);
        run(Arc::new(first.clone()), &target, false, Resume::Never).unwrap_err();
        first.lose_unsynced();
        let second = FaultyFileSystem::new(k, Fault::PowerLoss, true);
        let outcome = run(Arc::new(second.clone()), &target, false, Resume::IfSame);
        second.lose_unsynced();
        let left = content_of(&target);
        assert!(left.is_none() || left.as_ref() == Some(&new), "operation {k}: {outcome:?}");
        let force = left.is_some();
        run(Arc::new(steady()), &target, force, Resume::Required).unwrap();
        assert_eq!(content_of(&target).as_ref(), Some(&new), "operation {k}");
        if !second.was_hit() {
            return;
        }
    }
    panic!("the run did not end");
}
