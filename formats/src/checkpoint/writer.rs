//! Writes a checkpoint that appears completely or not at all.
//!
//! Tensors go into shards of full length in a job directory next to the target. A commit makes everything written so
//! far durable and records it in the journal, so that a run after a crash continues from there. Publishing reads
//! everything back and renames the directory in one step.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use sha2::Digest;

use super::contract::{check_part, incomplete, unknown};
use super::file_system::{FileSystem, RealFileSystem, failure, write_new};
use super::input_file::{listed, open_regular, read_exact_at, relative_name_fault};
use super::job::{Job, job_path, parent_of, refuse_within_job};
use super::journal::{Entries, WriteJournal};
use super::layout::DEFAULT_SHARD_BYTES;
use super::manifest::{MANIFEST, PublishedFile, manifest_bytes};
use super::names::printable;
use super::overlap::resolve;
use super::publish::{Published, ReplacePolicy, check_target, move_into_place};
use super::shards::INDEX;
use super::staging::{Staged, check_space, create_parents, record, refuse_differences, restage, stage};
use super::verify::{each_chunk, tensor_digest, verify_file, verify_shard};
use super::{Archive, SafetensorsDirectory, ShardLayout, Sidecar, TensorSink, TensorSpec};
use crate::digest::Digest256;
use crate::progress::timed;
use crate::wording::counted;
use crate::{CancelToken, Error, Event, Observer, Result, Silent};

/// How a checkpoint is written.
#[derive(Debug, Clone)]
pub struct WriteOptions {
    /// Replace an existing checkpoint. It stays until the new one is complete and verified.
    pub force: bool,
    /// Resume an interrupted job, if there is one.
    pub resume: bool,
    /// Maximum bytes of tensor data per shard; a larger tensor gets a shard of its own.
    pub max_shard_bytes: u64,
    /// Bytes of the files that will be added to the shards, as far as known, for the check of the free disk space.
    pub companion_bytes: u64,
    /// Identifies the input of the tensors: a resumed job must have started with the same fingerprint.
    pub fingerprint: Value,
    /// The version that the manifest names.
    pub tool_version: String,
    /// The file format to write.
    pub archive: Arc<dyn Archive>,
    /// Whether the target is the single file that the archive writes, without other files or a manifest.
    pub single_file: bool,
}

impl Default for WriteOptions {
    /// Neither `force` nor `resume`, shards of 5 GB, no fingerprint, the version of this crate.
    fn default() -> Self {
        Self {
            force: false,
            resume: false,
            max_shard_bytes: DEFAULT_SHARD_BYTES,
            companion_bytes: 0,
            fingerprint: Value::Null,
            tool_version: env!("CARGO_PKG_VERSION").into(),
            archive: Arc::new(SafetensorsDirectory),
            single_file: false,
        }
    }
}

impl WriteOptions {
    fn place(&self) -> ReplacePolicy {
        ReplacePolicy { force: self.force, file_of: self.single_file.then(|| self.archive.clone()) }
    }
}

/// Writes a checkpoint. The target does not change before [`CheckpointWriter::publish`].
///
/// Dropping it leaves the job directory, from which another writer can resume.
///
/// ```
/// use quant_formats::checkpoint::{
///     CheckpointWriter, Dtype, ShardedCheckpoint, TensorSink, TensorSource, TensorSpec, WriteOptions,
/// };
/// # let temporary = tempfile::tempdir().unwrap();
/// # let target = temporary.path().join("out");
///
/// // All tensors are announced first, so the files have their full length from the start.
/// let tensors = vec![TensorSpec::new("a", Dtype::F32, [2]), TensorSpec::new("b", Dtype::U8, [3])];
/// let mut writer = CheckpointWriter::create(&target, tensors, WriteOptions::default())?;
/// writer.write("b", 0, &[1, 2, 3])?; // in any order, and each in as many parts as you like
/// writer.write("a", 0, &1.5_f32.to_le_bytes())?;
/// writer.write("a", 4, &2.5_f32.to_le_bytes())?;
/// writer.commit()?; // a job that is killed from here on can be resumed with these tensors
/// writer.add_file("config.json", b"{}")?;
/// assert!(!target.exists());
///
/// // Everything is read back and compared before the directory gets its name.
/// let published = writer.publish()?;
/// assert!(published.files.iter().any(|file| file.name == "model.safetensors"));
/// assert_eq!(ShardedCheckpoint::open(&target)?.read_f32("a")?, [1.5, 2.5]);
/// # Ok::<(), quant_formats::Error>(())
/// ```
pub struct CheckpointWriter {
    fs: Arc<dyn FileSystem>,
    job: Job,
    layout: ShardLayout,
    shards: Vec<Staged>,
    tensors: HashMap<String, Progress>,
    files: BTreeMap<String, PublishedFile>,
    journal: WriteJournal,
    /// All records of the caller, by key.
    records: BTreeMap<String, Value>,
    /// The records that are not in the journal yet.
    fresh_records: BTreeMap<String, Value>,
    options: WriteOptions,
    notes: Vec<String>,
    is_resumed: bool,
    /// Set after a failed sync, because the system may have dropped unwritten data.
    sync_failed: bool,
}

impl fmt::Debug for CheckpointWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let complete = self.tensors.values().filter(|p| p.hash.is_some()).count();
        f.debug_struct("CheckpointWriter")
            .field("target", &self.job.target())
            .field("tensors", &self.tensors.len())
            .field("complete", &complete)
            .finish_non_exhaustive()
    }
}

/// The progress of a tensor.
struct Progress {
    written: u64,
    /// The digest of the bytes so far, while the tensor is incomplete and has some. A hasher takes 2 kB, and a model
    /// can have a hundred thousand tensors.
    running: Option<Box<blake3::Hasher>>,
    /// The digest of all bytes of the tensor, once they are written.
    hash: Option<Digest256>,
    journaled: bool,
    /// Whether an earlier run completed the tensor. It may be written again.
    resumed: bool,
}

impl CheckpointWriter {
    /// Prepares the job directory `<target>.job` and creates all shards in it at full length.
    ///
    /// # Errors
    /// - [`Error::OutputExists`]: the target exists and `force` is not set. Nothing was created.
    /// - [`Error::Usage`]: the target may not be replaced, or `resume` is set and the
    ///   interrupted job had a different request; the differing fields are listed.
    /// - [`Error::Locked`]: another writer works on the same target.
    /// - [`Error::DiskFull`]: the files and 2 % more do not fit.
    /// - [`Error::Internal`]: the name or the shape of a tensor is invalid.
    /// - [`Error::Io`].
    pub fn create(target: &Path, tensors: Vec<TensorSpec>, options: WriteOptions) -> Result<Self> {
        Self::create_on(Arc::new(RealFileSystem), target, tensors, options)
    }

    pub(crate) fn create_on(
        fs: Arc<dyn FileSystem>,
        target: &Path,
        tensors: Vec<TensorSpec>,
        options: WriteOptions,
    ) -> Result<Self> {
        let target = resolve(target)?;
        let job = job_path(&target)?;
        refuse_within_job(&target)?;
        let place = options.place();
        check_target(&target, &place)?;
        let layout = options.archive.layout(&tensors, options.max_shard_bytes)?;
        if options.single_file && layout.shards().len() != 1 {
            return Err(Error::Internal("several files for a single-file target".into()));
        }
        drop(tensors);
        check_space(&*fs, &target, &job, layout.file_bytes().saturating_add(options.companion_bytes))?;
        create_parents(&*fs, parent_of(&target))?;
        let job = Job::acquire(&*fs, &target)?;
        // Check again, because taking over the job may have restored an old target.
        check_target(&target, &place)?;

        let record = record(&options, &layout)?;
        let stored = if options.resume { job.read_record()? } else { None };
        if let Some(stored) = &stored {
            refuse_differences(job.path(), stored, &record)?;
            return Self::resume(fs, job, layout, options);
        }
        job.clear(&*fs)?;
        match stage(&*fs, &job, &layout, &record) {
            Ok((shards, journal)) => {
                let resumes = options.resume;
                let mut writer = Self::assemble(fs, job, layout, options, shards, journal);
                if resumes {
                    writer.notes.push("there is nothing to resume: the run starts from the beginning".into());
                }
                Ok(writer)
            }
            Err(error) => {
                // Incomplete staging files cannot be resumed, and may fill the disk.
                let _ = job.remove(&*fs);
                Err(error)
            }
        }
    }

    fn assemble(
        fs: Arc<dyn FileSystem>,
        job: Job,
        layout: ShardLayout,
        options: WriteOptions,
        shards: Vec<Staged>,
        journal: WriteJournal,
    ) -> Self {
        let tensors = layout.shards().iter().flat_map(|s| &s.tensors);
        let tensors = tensors.map(|t| (t.name.clone(), Progress::new(t.info.byte_len()))).collect();
        Self {
            fs,
            job,
            layout,
            shards,
            tensors,
            files: BTreeMap::new(),
            journal,
            records: BTreeMap::new(),
            fresh_records: BTreeMap::new(),
            options,
            notes: Vec::new(),
            is_resumed: false,
            sync_failed: false,
        }
    }

    /// Takes over staged shards; keeps tensors that are in the journal and match their hash.
    fn resume(fs: Arc<dyn FileSystem>, job: Job, layout: ShardLayout, options: WriteOptions) -> Result<Self> {
        let shards = restage(&*fs, &job, &layout)?;
        let claimed = WriteJournal::load(&job.journal())?;
        let mut held = BTreeMap::new();
        let mut lost = Vec::new();
        for (name, hash) in claimed.tensors {
            let Some((shard, tensor)) = layout.place(&name) else { continue };
            let Staged { path, file, .. } = &shards[shard];
            if tensor_digest(file.file(), path, tensor)? == hash {
                held.insert(name, hash);
            } else {
                lost.push(name);
            }
        }
        let entries = Entries { tensors: held, records: claimed.records };
        let journal = WriteJournal::start(&*fs, &job.journal(), &entries)?;
        let mut writer = Self::assemble(fs, job, layout, options, shards, journal);
        writer.records = entries.records;
        writer.is_resumed = true;
        let held = entries.tensors;
        writer.notes.push(format!(
            "resumed: {} of {} tensors of the output are complete",
            held.len(),
            writer.tensors.len()
        ));
        if !lost.is_empty() {
            writer.notes.push(format!(
                "{} did not match the journal and will be written again: {}",
                counted(lost.len(), "tensor"),
                listed(lost.iter().map(String::as_str), 8)
            ));
        }
        for (name, hash) in held {
            if let Some(progress) = writer.tensors.get_mut(&name) {
                progress.hash = Some(hash);
                progress.journaled = true;
                progress.resumed = true;
            }
        }
        Ok(writer)
    }

    /// Notes on how the job was resumed, one line each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Whether the job directory is that of an earlier run.
    pub fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    /// The files to be written, without those of [`Self::add_file`].
    pub fn layout(&self) -> &ShardLayout {
        &self.layout
    }

    /// The directory in which everything is prepared.
    pub fn job_directory(&self) -> &Path {
        self.job.path()
    }

    /// The file in which a run may save hidden states for a resumed run. It is removed with the job directory.
    pub fn saved_states(&self) -> PathBuf {
        self.job.states()
    }

    /// Adds a file next to the shards, such as `config.json`.
    ///
    /// After resuming, files must be added again; only tensors are kept.
    ///
    /// # Errors
    /// [`Error::Internal`] when the name is not a plain file name or exists, or the target is a single file;
    /// [`Error::DiskFull`], [`Error::Io`].
    pub fn add_file(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.refuse_with_single_file(name)?;
        self.check_file_name(name)?;
        let file = self.write_companion(name, bytes)?;
        self.files.insert(name.to_owned(), file);
        Ok(())
    }

    /// Adds a copy of an accompanying file, in chunks.
    ///
    /// # Errors
    /// See [`Self::add_file`]; also when the file cannot be read.
    pub fn add_copy(&mut self, sidecar: &Sidecar) -> Result<()> {
        let original = &sidecar.path;
        let name = original.file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.refuse_with_single_file(&name)?;
        self.check_file_name(&name)?;
        if let Some(contents) = &sidecar.contents {
            return self.add_file(&name, contents);
        }
        let source = open_regular(&sidecar.real, original)?;
        let len = source.metadata().map_err(|e| Error::io("read", original, e))?.len();
        let path = self.job.out().join(&name);
        let fail = |action, e| failure(&*self.fs, action, &path, len, e);
        let copy = self.fs.create_file(&path).map_err(|e| fail("create", e))?;
        let mut hash = sha2::Sha256::new();
        let mut at = 0;
        each_chunk(&source, original, 0..len, |piece| {
            hash.update(piece);
            copy.write_at(at, piece).map_err(|e| fail("write", e))?;
            at += piece.len() as u64;
            Ok(())
        })?;
        copy.sync_data().map_err(|e| fail("sync", e))?;
        self.files.insert(name.clone(), PublishedFile::new(name, len, hash.finalize().into()));
        Ok(())
    }

    fn refuse_with_single_file(&self, name: &str) -> Result<()> {
        match self.options.single_file {
            true => Err(Error::Internal(format!("`{}` would be next to a single file", printable(name)))),
            false => Ok(()),
        }
    }

    fn check_file_name(&self, name: &str) -> Result<()> {
        let refused = |reason: &str| Error::Internal(format!("file name `{}` {reason}", printable(name)));
        if let Some(reason) = relative_name_fault(name) {
            return Err(refused(reason));
        }
        if name.contains('/') {
            return Err(refused("is not a plain file name"));
        }
        // Names are compared without regard to case, because some file systems ignore it.
        let folded = name.to_lowercase();
        let shards = self.layout.shards().iter().map(|s| s.name.as_str());
        let taken = shards.chain([INDEX, MANIFEST]).chain(self.files.keys().map(String::as_str));
        if taken.into_iter().any(|t| t.to_lowercase() == folded) {
            return Err(refused("is taken"));
        }
        Ok(())
    }

    /// Calls [`Self::publish_observed`] without observer or cancellation.
    ///
    /// # Errors
    /// See [`Self::publish_observed`].
    pub fn publish(self) -> Result<Published> {
        self.publish_observed(&Silent, &CancelToken::new())
    }

    /// Reads back everything that was written and moves it to the target in one step.
    ///
    /// # Errors
    /// See [`Self::prepare`] and [`Prepared::publish`].
    pub fn publish_observed(self, observer: &dyn Observer, cancel: &CancelToken) -> Result<Published> {
        self.prepare(observer, cancel)?.publish()
    }

    /// Reads back everything that was written, so that only the final rename is left.
    ///
    /// # Errors
    /// - [`Error::Internal`]: tensors are not complete.
    /// - [`Error::Verification`]: the data read back differs from what was written.
    /// - [`Error::Interrupted`], [`Error::DiskFull`], [`Error::Io`].
    ///
    /// The target is unchanged, and the job can be resumed.
    pub fn prepare(mut self, observer: &dyn Observer, cancel: &CancelToken) -> Result<Prepared> {
        let mut missing: Vec<&str> =
            self.tensors.iter().filter(|(_, p)| p.hash.is_none()).map(|(name, _)| name.as_str()).collect();
        if !missing.is_empty() {
            missing.sort_unstable();
            return Err(incomplete(&missing));
        }
        self.commit()?;
        let out = self.job.out();
        if let Some(index) = self.layout.index().map(<[u8]>::to_vec) {
            let file = self.write_companion(INDEX, &index)?;
            self.files.insert(INDEX.to_owned(), file);
        }
        let mut files = timed(observer, "verify", || self.read_back(&out, observer, cancel))?;
        files.sort();
        if !self.options.single_file {
            let manifest = manifest_bytes(&files, &self.options.tool_version);
            let manifest = self.write_companion(MANIFEST, &manifest)?;
            verify_file(&*self.fs, &out, &manifest)?;
            files.push(manifest);
        }
        self.sync_dir(&out)?;
        // The last check: nothing remains but the rename.
        cancel.check()?;
        // The shards are closed with the writer: open files could keep a network file system from moving their
        // directory.
        let place = self.options.place();
        Ok(Prepared { fs: self.fs, job: self.job, files, place })
    }

    /// Discards the job directory. The target is unchanged.
    ///
    /// # Errors
    /// [`Error::Io`] when something could not be removed.
    pub fn abandon(self) -> Result<()> {
        self.job.remove(&*self.fs)
    }

    fn read_back(
        &self,
        out: &Path,
        observer: &dyn Observer,
        cancel: &CancelToken,
    ) -> Result<Vec<PublishedFile>> {
        let units = (self.layout.shards().len() + self.files.len()) as u64;
        observer.event(&Event::StageStarted { stage: "verify", unit: "file", units });
        let mut files = Vec::new();
        for shard in self.layout.shards() {
            let tensors = &self.tensors;
            let hash_of = |name: &str| tensors.get(name).and_then(|p| p.hash);
            files.push(verify_shard(&*self.fs, &*self.options.archive, out, shard, hash_of, cancel)?);
            observer.event(&Event::UnitDone { detail: shard.name.clone() });
        }
        for (name, file) in &self.files {
            verify_file(&*self.fs, out, file)?;
            files.push(file.clone());
            observer.event(&Event::UnitDone { detail: name.clone() });
        }
        // Checks the directory as a loader will see it, including the index.
        self.options.archive.check_directory(out, self.tensors.len())?;
        observer.event(&Event::StageDone);
        Ok(files)
    }

    fn write_companion(&self, name: &str, bytes: &[u8]) -> Result<PublishedFile> {
        write_new(&*self.fs, &self.job.out().join(name), bytes)?;
        Ok(PublishedFile::new(name, bytes.len() as u64, sha2::Sha256::digest(bytes).into()))
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        self.fs.sync_dir(path).map_err(|e| failure(&*self.fs, "sync", path, 0, e))
    }
}

/// A checkpoint that is complete and verified, but not at its target yet.
///
/// Dropping it leaves the job directory, from which a writer can resume.
pub struct Prepared {
    fs: Arc<dyn FileSystem>,
    job: Job,
    files: Vec<PublishedFile>,
    place: ReplacePolicy,
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared").field("target", &self.job.target()).finish_non_exhaustive()
    }
}

impl Prepared {
    /// Moves the checkpoint to its target in one step.
    ///
    /// # Errors
    /// - [`Error::OutputExists`]: the target has appeared in the meantime and `force` is not set.
    /// - [`Error::Usage`]: the target has changed in the meantime and may not be replaced.
    /// - [`Error::DiskFull`], [`Error::Io`].
    ///
    /// The target is then unchanged, and the job can be resumed; only if syncing after the rename fails may the target
    /// already be the new one.
    pub fn publish(self) -> Result<Published> {
        let Self { fs, job, files, place } = self;
        let replaced = move_into_place(&*fs, &job, &place)?;
        let leftover = job.remove(&*fs).is_err().then(|| job.path().to_owned());
        let bytes = files.iter().map(|f| f.bytes).sum();
        Ok(Published { path: job.target().to_owned(), files, bytes, replaced, leftover })
    }
}

impl TensorSink for CheckpointWriter {
    fn is_complete(&self, name: &str) -> bool {
        self.tensors.get(name).is_some_and(|p| p.hash.is_some())
    }

    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        let (Some((shard, tensor)), Some(progress)) = (self.layout.place(name), self.tensors.get_mut(name))
        else {
            return Err(unknown(name));
        };
        let len = tensor.info.byte_len();
        if progress.resumed && offset == 0 && !bytes.is_empty() {
            *progress = Progress::new(len);
        }
        check_part(name, len, progress.written, offset, bytes.len())?;
        let staged = &mut self.shards[shard];
        staged.touched = true;
        staged
            .file
            .write_at(tensor.offset + offset, bytes)
            .map_err(|e| failure(&*self.fs, "write", &staged.path, bytes.len() as u64, e))?;
        progress.advance(bytes, len);
        Ok(())
    }

    fn remember(&mut self, key: &str, value: &Value) -> Result<()> {
        self.records.insert(key.to_owned(), value.clone());
        self.fresh_records.insert(key.to_owned(), value.clone());
        Ok(())
    }

    fn recall(&self, key: &str) -> Option<Value> {
        self.records.get(key).cloned()
    }

    fn read_back(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some((shard, tensor)) = self.layout.place(name).filter(|_| self.is_complete(name)) else {
            return Ok(None);
        };
        let Ok(len) = usize::try_from(tensor.info.byte_len()) else { return Ok(None) };
        let Staged { path, file, .. } = &self.shards[shard];
        let mut bytes = vec![0; len];
        read_exact_at(file.file(), path, tensor.offset, &mut bytes)?;
        Ok(Some(bytes))
    }

    fn commit(&mut self) -> Result<()> {
        if self.sync_failed {
            return Err(Error::io("sync", self.job.path(), std::io::Error::other("an earlier sync failed")));
        }
        for staged in self.shards.iter_mut().filter(|s| s.touched) {
            if let Err(e) = staged.file.sync_data() {
                self.sync_failed = true;
                return Err(failure(&*self.fs, "sync", &staged.path, 0, e));
            }
            staged.touched = false;
        }
        // Sorted, so that the journal does not depend on the order of writing.
        let unnoted = |(name, p): (&String, &Progress)| {
            p.hash.filter(|_| !p.journaled).map(|hash| (name.clone(), hash))
        };
        let fresh = Entries {
            tensors: self.tensors.iter().filter_map(unnoted).collect(),
            records: std::mem::take(&mut self.fresh_records),
        };
        if let Err(error) = self.journal.append(&*self.fs, &fresh) {
            self.sync_failed = true;
            return Err(error);
        }
        for name in fresh.tensors.keys() {
            if let Some(progress) = self.tensors.get_mut(name) {
                progress.journaled = true;
            }
        }
        Ok(())
    }
}

impl Progress {
    fn new(len: u64) -> Self {
        let mut progress = Self { written: 0, running: None, hash: None, journaled: false, resumed: false };
        // A tensor without bytes is complete from the start.
        progress.advance(&[], len);
        progress
    }

    fn advance(&mut self, bytes: &[u8], len: u64) {
        if self.hash.is_some() {
            return;
        }
        let mut running = self.running.take().unwrap_or_default();
        running.update(bytes);
        self.written += bytes.len() as u64;
        if self.written == len {
            self.hash = Some(running.finalize().into());
        } else {
            self.running = Some(running);
        }
    }
}
