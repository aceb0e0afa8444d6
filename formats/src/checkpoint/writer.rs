//! Writes a checkpoint that appears completely or not at all.
//!
//! Tensors go into shards of full length in a job directory next to the target. A commit makes everything written so
//! far durable and records it in the journal, so that an interrupted run can be resumed. Publishing reads everything
//! back and renames the directory.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use sha2::Digest;

use super::contract::{check_part, incomplete, unknown};
use super::file_system::{FileSystem, RealFileSystem, failure, write_new};
use super::input_file::{listed, open_regular, read_exact_at, relative_name_fault};
use super::job::{Job, is_resumable, job_path, parent_of, refuse_within_job};
use super::journal::{Entries, WriteJournal};
use super::layout::ShardFile;
use super::manifest::{MANIFEST, PublishedFile, manifest_bytes};
use super::names::printable;
use super::options::{Resume, WriteOptions};
use super::overlap::resolve;
use super::prepared::Prepared;
use super::progress::{Hashed, Progress};
use super::publish::{Published, ReplacePolicy, check_target};
use super::shards::INDEX;
use super::staging::{Staged, check_space, create_parents, record, restage, stage, unfinished};
use super::verify::{each_chunk, sealed, tensor_digest, verify_file, verify_shard};
use super::{ShardLayout, Sidecar, TensorSink, TensorSpec};
use crate::progress::timed;
use crate::wording::counted;
use crate::{CancelToken, Error, Event, Observer, Result, Silent, allocate};

const PIECE: usize = 1 << 20;

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
    /// The progress of every tensor, by shard and position in it.
    tensors: Vec<Vec<Progress>>,
    files: BTreeMap<String, PublishedFile>,
    journal: WriteJournal,
    records: BTreeMap<String, Box<str>>,
    fresh_records: BTreeSet<String>,
    options: WriteOptions,
    place: ReplacePolicy,
    notes: Vec<String>,
    is_resumed: bool,
    /// Set after a failed sync, because the system may have dropped unwritten data.
    sync_failed: bool,
}

impl fmt::Debug for CheckpointWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let complete = self.tensors.iter().flatten().filter(|p| p.hash.is_some()).count();
        f.debug_struct("CheckpointWriter")
            .field("target", &self.job.target())
            .field("tensors", &self.count())
            .field("complete", &complete)
            .finish_non_exhaustive()
    }
}

impl CheckpointWriter {
    /// Prepares the job directory `<target>.job` and creates all shards in it at full length.
    ///
    /// # Errors
    /// - [`Error::OutputExists`]: the target exists and `force` is not set. Nothing was created.
    /// - [`Error::Usage`]: the target may not be replaced, or the interrupted job had a different request and may not be
    ///   discarded (see [`Resume`]); the differing fields are listed.
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
        // Taking over the job may have restored an old target.
        check_target(&target, &place)?;

        let record = record(&options, &layout)?;
        // The fingerprint lists the scheme of every linear, and is in the record from here on.
        let options = WriteOptions { fingerprint: Value::Null, ..options };
        if let Some(claimed) = unfinished(&job, &record, &options)? {
            return Self::resume(fs, job, layout, options, place, claimed);
        }
        job.clear(&*fs)?;
        match stage(&*fs, &job, &layout, &record) {
            Ok((shards, journal)) => {
                let resumes = options.resume == Resume::Required;
                let mut writer = Self::assemble(fs, job, layout, options, place, shards, journal);
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
        place: ReplacePolicy,
        shards: Vec<Staged>,
        journal: WriteJournal,
    ) -> Self {
        let progress = |shard: &ShardFile| {
            shard.tensors.iter().map(|tensor| Progress::new(tensor.info.byte_len())).collect()
        };
        let tensors = layout.shards().iter().map(progress).collect();
        Self {
            fs,
            job,
            layout,
            shards,
            tensors,
            files: BTreeMap::new(),
            journal,
            records: BTreeMap::new(),
            fresh_records: BTreeSet::new(),
            options,
            place,
            notes: Vec::new(),
            is_resumed: false,
            sync_failed: false,
        }
    }

    /// Takes over staged shards; keeps tensors that are in the journal and match their hash.
    fn resume(
        fs: Arc<dyn FileSystem>,
        job: Job,
        layout: ShardLayout,
        options: WriteOptions,
        place: ReplacePolicy,
        claimed: Entries,
    ) -> Result<Self> {
        let shards = restage(&*fs, &job, &layout)?;
        let mut held = BTreeMap::new();
        let mut lost = Vec::new();
        for (name, hash) in claimed.tensors {
            let Some(place) = layout.position(&name) else { continue };
            let Staged { path, file, .. } = &shards[place.0];
            if tensor_digest(file.file(), path, layout.tensor(place))? == hash {
                held.insert(name, hash);
            } else {
                lost.push(name);
            }
        }
        let entries = Entries { tensors: held, records: claimed.records };
        let journal = WriteJournal::start(&*fs, &job.journal(), &entries)?;
        let mut writer = Self::assemble(fs, job, layout, options, place, shards, journal);
        writer.records = entries.records;
        writer.is_resumed = true;
        let held = entries.tensors;
        let mut note =
            format!("resumed: {} of {} tensors of the output are complete", held.len(), writer.count());
        if writer.options.resume == Resume::IfSame {
            note.push_str(&format!("; to start over, remove {}", writer.job.path().display()));
        }
        writer.notes.push(note);
        if !lost.is_empty() {
            writer.notes.push(format!(
                "{} did not match the journal and will be written again: {}",
                counted(lost.len(), "tensor"),
                listed(lost.iter().map(String::as_str), 8)
            ));
        }
        for (name, hash) in held {
            if let Some((shard, position)) = writer.layout.position(&name) {
                let progress = &mut writer.tensors[shard][position];
                progress.hash = Some(hash);
                progress.journaled = true;
                progress.resumed = true;
            }
        }
        Ok(writer)
    }

    fn count(&self) -> usize {
        self.tensors.iter().map(Vec::len).sum()
    }

    fn progress(&self, name: &str) -> Option<&Progress> {
        self.layout.position(name).map(|(shard, position)| &self.tensors[shard][position])
    }

    /// The names of all tensors with their progress.
    fn named(&self) -> impl Iterator<Item = (&str, &Progress)> {
        let shards = self.layout.shards().iter().zip(&self.tensors);
        shards.flat_map(|(shard, all)| shard.tensors.iter().map(|t| t.name.as_str()).zip(all))
    }

    /// Whether a run has published its output at this target, and left nothing to resume.
    pub fn is_finished(target: &Path) -> bool {
        let is_unfinished = resolve(target).and_then(|t| job_path(&t)).is_ok_and(|job| job.exists());
        !is_unfinished && (target.is_file() || target.join(MANIFEST).is_file())
    }

    /// The job directory of an interrupted run with this target, if there is one.
    pub fn unfinished_job(target: &Path) -> Option<PathBuf> {
        let job = resolve(target).and_then(|target| job_path(&target)).ok()?;
        is_resumable(&job).then_some(job)
    }

    /// Notes on how the job was resumed, one line each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Whether this run resumes an earlier one.
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

    /// Adds a file that `write` writes in pieces.
    ///
    /// # Errors
    /// See [`Self::add_file`].
    pub fn add_written(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<()> {
        self.refuse_with_single_file(name)?;
        self.check_file_name(name)?;
        let path = self.job.out().join(name);
        let file = self.fs.create_file(&path).map_err(|e| failure(&*self.fs, "create", &path, 1, e))?;
        let mut out =
            BufWriter::with_capacity(PIECE, Hashed { file: &*file, hash: sha2::Sha256::new(), at: 0 });
        let written = write(&mut out).and_then(|()| out.flush()).and_then(|()| file.sync_data());
        let Hashed { hash, at, .. } = out.into_parts().0;
        written.map_err(|e| failure(&*self.fs, "write", &path, at, e))?;
        self.files.insert(name.to_owned(), PublishedFile::new(name, at, hash.finalize().into()));
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
            self.named().filter(|(_, p)| p.hash.is_none()).map(|(name, _)| name).collect();
        if !missing.is_empty() {
            missing.sort_unstable();
            return Err(incomplete(&missing));
        }
        self.commit()?;
        self.seal()?;
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
        cancel.check()?;
        // The shards are closed with the writer, because open files could keep a network file system from moving their
        // directory.
        Ok(Prepared { fs: self.fs, job: self.job, files, place: self.place })
    }

    /// Writes the seals of files whose format has one.
    fn seal(&self) -> Result<()> {
        for (shard, staged) in self.layout.shards().iter().zip(&self.shards) {
            let Some(range) = shard.seal.clone() else { continue };
            let header = sealed(shard, |name| self.progress(name).and_then(|p| p.hash));
            let fail = |action, e| failure(&*self.fs, action, &staged.path, range.len() as u64, e);
            staged.file.write_at(range.start as u64, &header[range.clone()]).map_err(|e| fail("write", e))?;
            staged.file.sync_data().map_err(|e| fail("sync", e))?;
        }
        Ok(())
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
            let hash_of = |name: &str| self.progress(name).and_then(|p| p.hash);
            files.push(verify_shard(&*self.fs, &*self.options.archive, out, shard, hash_of, cancel)?);
            observer.event(&Event::UnitDone { detail: shard.name.clone() });
        }
        for (name, file) in &self.files {
            verify_file(&*self.fs, out, file)?;
            files.push(file.clone());
            observer.event(&Event::UnitDone { detail: name.clone() });
        }
        // As a loader will see the directory, including the index.
        self.options.archive.check_directory(out, self.count())?;
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

impl TensorSink for CheckpointWriter {
    fn is_complete(&self, name: &str) -> bool {
        self.progress(name).is_some_and(|p| p.hash.is_some())
    }

    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        let Some(place @ (shard, position)) = self.layout.position(name) else { return Err(unknown(name)) };
        let (tensor, progress) = (self.layout.tensor(place), &mut self.tensors[shard][position]);
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
        match value {
            Value::Null => self.records.remove(key),
            value => self.records.insert(key.to_owned(), value.to_string().into()),
        };
        self.fresh_records.insert(key.to_owned());
        Ok(())
    }

    fn recall(&self, key: &str) -> Option<Value> {
        serde_json::from_str(self.records.get(key)?).ok()
    }

    fn read_back(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(place) = self.layout.position(name).filter(|_| self.is_complete(name)) else {
            return Ok(None);
        };
        let tensor = self.layout.tensor(place);
        let Ok(len) = usize::try_from(tensor.info.byte_len()) else { return Ok(None) };
        let Staged { path, file, .. } = &self.shards[place.0];
        let mut bytes = allocate::zeros(len, format_args!("tensor `{name}`"))?;
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
        let fresh = std::mem::take(&mut self.fresh_records);
        let value = |key: &String| self.records.get(key).map_or("null", |value| &**value);
        let records = fresh.iter().map(|key| (key.as_str(), value(key)));
        let shards = self.layout.shards().iter().zip(&self.tensors);
        let unnoted = shards.flat_map(|(shard, all)| shard.tensors.iter().zip(all));
        let unnoted = unnoted.filter(|(_, p)| !p.journaled);
        let mut tensors: Vec<_> = unnoted.filter_map(|(t, p)| Some((t.name.as_str(), p.hash?))).collect();
        tensors.sort_unstable();
        if let Err(error) = self.journal.append(&*self.fs, records, tensors.into_iter()) {
            self.sync_failed = true;
            return Err(error);
        }
        for progress in self.tensors.iter_mut().flatten() {
            progress.journaled |= progress.hash.is_some();
        }
        Ok(())
    }
}
