//! Computing units.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};

use super::graph::{Unit, Work};
use super::job::{UnitJob, job};
use super::store::{LOG, LocalFile, Publication, UNITS};
use super::unit_file::{Identity, UnitFile, UnitSink, stored_digest};
use crate::calibrate::{Residence, Spill, TokenWindows};
use crate::checkpoint::MemorySink;
use crate::pipeline::{self, StateFiles, quantize_unit};
use crate::run::{Host, MemoryBudget, residence};
use crate::wording::counted;
use crate::{Category, Error, Result, system};

const KEY_DIGITS: usize = 32;
const MAX_LISTED: usize = 4;

/// The units that a worker computes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Selection {
    /// All.
    All,
    /// The unit of this name.
    Unit(String),
    /// The share of the worker `index` of `count`.
    Shard {
        /// The number of the worker, from 0.
        index: usize,
        /// The number of workers.
        count: usize,
    },
}

/// A phase of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// Units that write hidden states.
    Forward,
    /// Units that write tensors.
    Blocks,
}

/// How a worker computes units.
#[derive(Debug, Clone, Default)]
pub struct WorkOptions {
    /// The phase whose units are computed; all phases if `None`.
    pub phase: Option<Phase>,
    /// The memory that a unit may use. If it is predicted to need more, hidden states are kept in files.
    pub memory_budget: MemoryBudget,
    /// The directory for these files; by default, a directory of the job, or [`Host::scratch`] if the job is in an object
    /// store.
    pub scratch: Option<PathBuf>,
}

/// A unit that is finished.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct UnitDone {
    /// Its name.
    pub id: String,
    /// Whether this call computed it; otherwise the result existed.
    pub computed: bool,
    /// The seconds that this took.
    pub seconds: f64,
}

impl UnitJob {
    /// Computes the selected units whose results do not exist yet, and checks the others. A result that another worker
    /// publishes in the meantime is compared with this worker's.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if units of other workers must be finished first; [`Error::InputFile`] if two results of
    /// a unit differ, or a result is not a regular file; [`Error::Usage`] for an invalid selection; errors of the
    /// pipeline. Finished units are kept.
    pub fn run(
        &self,
        selection: &Selection,
        options: &WorkOptions,
        host: &Host<'_>,
    ) -> Result<Vec<UnitDone>> {
        self.remove_abandoned(host);
        let mut pending = self.selected(selection, options.phase)?;
        let (mut done, total) = (Vec::new(), pending.len());
        loop {
            let mut waiting = Vec::new();
            let before = done.len();
            for unit in pending {
                host.cancel.check()?;
                if self.missing(unit)?.is_some() {
                    waiting.push(unit);
                    continue;
                }
                let place = format!("unit {} ({} of {total})", unit.id, done.len() + 1);
                done.push(self.run_unit((unit, &place), options, host)?);
            }
            pending = waiting;
            if pending.is_empty() {
                return Ok(done);
            }
            if done.len() == before {
                return Err(self.waits(&pending)?);
            }
        }
    }

    fn selected(&self, selection: &Selection, phase: Option<Phase>) -> Result<Vec<&Unit>> {
        let of_phase = |unit: &&Unit| match phase {
            Some(Phase::Forward) => unit.is_forward(),
            Some(Phase::Blocks) => !unit.is_forward(),
            None => true,
        };
        match selection {
            Selection::All => Ok(self.units.iter().filter(of_phase).collect()),
            Selection::Unit(id) => {
                let unit = self.unit(id)?;
                match of_phase(&unit) {
                    true => Ok(vec![unit]),
                    false => Err(Error::usage(
                        format!("the unit `{id}` does not belong to this ‹phase›"),
                        "leave out ‹phase›",
                    )),
                }
            }
            Selection::Shard { index, count } => {
                if index >= count {
                    return Err(Error::usage(
                        format!("‹shard› {index} of {count} does not exist"),
                        "shards are numbered from 0",
                    ));
                }
                let tensors = self.units.iter().filter(|unit| !unit.is_forward());
                let places: BTreeMap<&str, usize> = tensors.zip(0..).map(|(u, i)| (&*u.id, i)).collect();
                // A worker follows its windows through all blocks.
                let place = |unit: &Unit| match unit.work {
                    Work::Forward { shard, .. } => shard,
                    _ => places[&*unit.id],
                };
                let is_own = |unit: &&Unit| place(unit) % count == *index;
                Ok(self.units.iter().filter(of_phase).filter(is_own).collect())
            }
        }
    }

    /// Returns the name of the first unit that `unit` needs and that has no result.
    fn missing(&self, unit: &Unit) -> Result<Option<String>> {
        for id in &unit.needs {
            if self.digest_of(self.unit(id)?)?.is_none() {
                return Ok(Some(id.clone()));
            }
        }
        Ok(None)
    }

    fn waits(&self, pending: &[&Unit]) -> Result<Error> {
        let missing = pending.iter().filter_map(|unit| self.missing(unit).transpose());
        let missing = missing.collect::<Result<HashSet<String>>>()?;
        let mut missing: Vec<String> = missing.into_iter().collect();
        missing.sort_unstable();
        let more = if missing.len() > MAX_LISTED { ", …" } else { "" };
        missing.truncate(MAX_LISTED);
        Ok(Error::Unavailable {
            what: format!("the input of {} unit(s)", pending.len()),
            reason: format!("not finished yet: {}{more}", missing.join(", ")),
            remedy: "run the same command again when these units are finished".into(),
        })
    }

    /// `None` if a result that the unit needs does not exist.
    pub(super) fn identity(&self, unit: &Unit) -> Result<Option<Identity>> {
        let mut hash = blake3::Hasher::new();
        let mut line = |text: &str| {
            hash.update(text.as_bytes());
            hash.update(b"\n");
        };
        line(&self.digest);
        line(&unit.id);
        for id in &unit.needs {
            let Some(digest) = self.digest_of(self.unit(id)?)? else { return Ok(None) };
            line(&format!("{id} {digest}"));
        }
        let key = crate::digest::hex(hash.finalize().as_bytes());
        Ok(Some(Identity { unit: unit.id.clone(), job: self.digest.clone(), key }))
    }

    /// Returns whether a result is among the `listed` names.
    ///
    /// # Errors
    /// [`Error::InputFile`] if something else has its name.
    pub(super) fn exists(&self, identity: &Identity, listed: &BTreeSet<String>) -> Result<bool> {
        Ok(listed.contains(&file_name(identity)) && self.store.files.exists(&key(identity))?)
    }

    /// Returns a local copy of a result; `None` if it does not exist.
    fn result(&self, unit: &Unit, identity: &Identity, host: &Host<'_>) -> Result<Option<LocalFile>> {
        let max_bytes = unit.max_bytes(&self.plan, &self.opened.model)?;
        self.store.files.result(&key(identity), max_bytes, host.cancel)
    }

    /// Returns a local copy of a result that existed a moment ago.
    pub(super) fn existing_result(
        &self,
        unit: &Unit,
        identity: &Identity,
        host: &Host<'_>,
    ) -> Result<LocalFile> {
        self.result(unit, identity, host)?.ok_or_else(|| self.gone(unit))
    }

    /// The error for a result that was removed.
    pub(super) fn gone(&self, unit: &Unit) -> Error {
        Error::Unavailable {
            what: format!("the result of `{}`", unit.id),
            reason: "it existed, and was removed".into(),
            remedy: "run the job again".into(),
        }
    }

    /// `None` if no readable result exists.
    fn digest_of(&self, unit: &Unit) -> Result<Option<String>> {
        let known = || self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(digest) = known().get(&unit.id) {
            return Ok(Some(digest.clone()));
        }
        let Some(identity) = self.identity(unit)? else { return Ok(None) };
        let key = key(&identity);
        let outline = match self.store.files.outline(&key) {
            Err(error) if error.category() == Category::Input => {
                // Something else of this name is an error.
                self.store.files.exists(&key)?;
                return Ok(None);
            }
            other => other?,
        };
        let Some(outline) = outline else { return Ok(None) };
        match stored_digest(&outline) {
            Ok(digest) => {
                known().insert(unit.id.clone(), digest.clone());
                Ok(Some(digest))
            }
            Err(error) if error.category() == Category::Input => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn forget(&self, unit: &Unit) {
        self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner).remove(&unit.id);
    }

    /// Computes a unit if its result does not exist. `place` names it and its place among the selected units.
    fn run_unit(
        &self,
        (unit, place): (&Unit, &str),
        options: &WorkOptions,
        host: &Host<'_>,
    ) -> Result<UnitDone> {
        let started = Instant::now();
        let Some(identity) = self.identity(unit)? else {
            return Err(Error::Internal(format!("`{}` runs too early", unit.id)));
        };
        let target = key(&identity);
        let done = |computed: bool| {
            let seconds = started.elapsed().as_secs_f64();
            UnitDone { id: unit.id.clone(), computed, seconds }
        };
        if self.store.files.exists(&target)? && self.is_intact(unit, &identity, host)? {
            host.note(format!("{place}: the result exists already"));
            return Ok(done(false));
        }
        host.note(format!("{place}: computing"));
        let directory = self.store.temporary_directory(&unit.id.replace('/', "-"))?;
        let file = directory.path().join("unit.safetensors");
        match self.compute(unit, &identity, (&file, options), host) {
            Err(error) if error.category() == Category::Input => {
                self.check_inputs(unit, host)?;
                return Err(error);
            }
            other => other?,
        }
        host.cancel.check()?;
        self.compare_with_others(unit, &file, &identity)?;
        let publish = |key: &str| self.store.files.publish(&file, key, host.cancel);
        let mut published = publish(&target)?;
        if published == Publication::Different && !self.is_intact(unit, &identity, host)? {
            published = publish(&target)?;
        }
        if published == Publication::Different {
            return Err(self.conflict(&identity, &publish)?);
        }
        let done = done(true);
        self.log(&identity, &done, published)?;
        Ok(done)
    }

    fn compute(
        &self,
        unit: &Unit,
        identity: &Identity,
        (file, options): (&Path, &WorkOptions),
        host: &Host<'_>,
    ) -> Result<()> {
        let part = unit.part(&self.plan, &self.opened.model)?;
        let shard = self.windows_of(unit);
        let windows = shard.as_ref().or(self.windows.as_ref());
        let parts = std::slice::from_ref(&part);
        let (residence, note) = residence(parts, &self.opened.model, options.memory_budget, false)?;
        if let Some(note) = note {
            host.note(note);
        }
        let scratch = options.scratch.as_deref().unwrap_or(self.store.files.scratch().0);
        let spill = match residence {
            Residence::Memory => None,
            Residence::Files { round_bytes, experts_apart } => {
                Some(Spill::new(scratch.to_owned(), round_bytes).with_experts_apart(experts_apart))
            }
        };
        let needs = unit.needs.iter().map(|id| self.identity(self.unit(id)?));
        let needs = needs.collect::<Result<Option<Vec<_>>>>()?.unwrap_or_default();
        let units = unit.needs.iter().map(|id| self.unit(id));
        let before = units.zip(&needs).map(|(unit, identity)| self.existing_result(unit?, identity, host));
        let before = before.collect::<Result<Vec<_>>>()?;
        let states = StateFiles {
            before: before.iter().map(|file| file.to_path_buf()).collect(),
            after: unit.is_forward().then(|| file.to_owned()),
            depends_on: self.depends_on(),
            spill,
            saved: None,
        };
        let job = job(&self.opened, &part, windows, (host.observer, host.cancel));
        if unit.is_forward() {
            return quantize_unit(&job, &mut MemorySink::new(Vec::new())?, &states).map(drop);
        }
        let mut sink = UnitSink::create(file, part.outputs())?;
        let read = quantize_unit(&job, &mut sink, &states)?;
        sink.finish(identity, &read)
    }

    /// `None` for units that compute no hidden states.
    fn windows_of(&self, unit: &Unit) -> Option<TokenWindows> {
        match (&unit.work, &self.windows) {
            (Work::Forward { windows, .. }, Some(all)) => Some(all.slice(windows.clone())),
            _ => None,
        }
    }

    /// The value in files of hidden states that identifies the job.
    fn depends_on(&self) -> Value {
        json!(self.digest)
    }

    pub(super) fn remove_abandoned(&self, host: &Host<'_>) {
        match self.store.remove_abandoned() {
            0 => {}
            removed => {
                host.note(format!("removed the temporary files of {}", counted(removed, "killed worker")))
            }
        }
    }

    /// Sets damaged results that a unit needs aside, so that they are computed again.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if there are any.
    fn check_inputs(&self, unit: &Unit, host: &Host<'_>) -> Result<()> {
        let mut damaged = Vec::new();
        for id in &unit.needs {
            let need = self.unit(id)?;
            let Some(identity) = self.identity(need)? else { continue };
            if self.store.files.exists(&key(&identity))? && !self.is_intact(need, &identity, host)? {
                damaged.push(id.clone());
            }
        }
        if damaged.is_empty() {
            return Ok(());
        }
        Err(Error::Unavailable {
            what: format!("the input of `{}`", unit.id),
            reason: format!("damaged, and must be computed again: {}", damaged.join(", ")),
            remedy: "run the job again".into(),
        })
    }

    /// Returns whether a result is intact. A damaged one is set aside, with a warning.
    fn is_intact(&self, unit: &Unit, identity: &Identity, host: &Host<'_>) -> Result<bool> {
        let checked = self.result(unit, identity, host).and_then(|path| match path {
            Some(path) => self.check(unit, identity, &path, host).map(|()| true),
            None => Ok(false),
        });
        match checked {
            Err(error) if error.category() == Category::Input => {
                self.set_aside(unit, identity, &error, host)?;
                Ok(false)
            }
            other => other,
        }
    }

    /// Fails if a result is damaged.
    fn check(&self, unit: &Unit, identity: &Identity, path: &Path, host: &Host<'_>) -> Result<()> {
        if unit.is_forward() {
            let (part, shard) = (unit.part(&self.plan, &self.opened.model)?, self.windows_of(unit));
            let job = job(&self.opened, &part, shard.as_ref(), (host.observer, host.cancel));
            return pipeline::check_states(path, &job, part.blocks().end, &self.depends_on());
        }
        let file = UnitFile::open(path, unit.tensors(&self.plan, &self.opened.model)?, identity)?;
        file.read(host.cancel, &mut |_, _, _| Ok(())).map(drop)
    }

    pub(super) fn set_aside(
        &self,
        unit: &Unit,
        identity: &Identity,
        error: &Error,
        host: &Host<'_>,
    ) -> Result<()> {
        let aside = self.store.files.set_aside(&key(identity))?;
        self.forget(unit);
        if let Some(aside) = aside {
            host.warn(format!("{error}; it was renamed to {aside}"));
        }
        Ok(())
    }

    /// Keeps the result that differs from the published one, and returns the error.
    fn conflict(&self, identity: &Identity, publish: &dyn Fn(&str) -> Result<Publication>) -> Result<Error> {
        let own = format!("{}.other-{}-{}", file_name(identity), system::host_name(), std::process::id());
        publish(&format!("{UNITS}/{own}"))?;
        let others = self.computed_by(identity);
        let others = if others.is_empty() { "an unknown machine".to_owned() } else { others.join(", ") };
        Ok(Error::InputFile {
            path: self.store.shown(&key(identity)),
            line: None,
            reason: format!(
                "was computed by {others}, and differs from the result of {} in {own}: one of the machines \
                computes wrong results",
                system::host_name()
            ),
            remedy:
                "compute the unit on a third machine in a new job, remove the wrong file, and give the other \
                one the name of the result"
                    .into(),
        })
    }

    /// The machines that computed a result, according to the log.
    fn computed_by(&self, identity: &Identity) -> Vec<String> {
        let stem = stem(identity);
        let names = self.store.files.list(LOG).unwrap_or_default();
        let mut hosts: Vec<String> = names
            .iter()
            .filter_map(|name| {
                let (host, _) = name.strip_prefix(&stem)?.strip_prefix('.')?.rsplit_once('-')?;
                Some(host.to_owned())
            })
            .collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    fn log(&self, identity: &Identity, done: &UnitDone, published: Publication) -> Result<()> {
        let (host, process) = (system::host_name(), std::process::id());
        let entry = json!({
            "schema": "quant-unit-log/1",
            "unit": identity.unit,
            "key": identity.key,
            "host": host,
            "process": process,
            "seconds": done.seconds,
            "published": published == Publication::Created,
        });
        let key = format!("{LOG}/{}.{host}-{process}.json", stem(identity));
        // An earlier process may have had the same number and written a different entry, which is kept.
        self.store.files.publish_bytes(&key, format!("{entry:#}\n").as_bytes()).map(drop)
    }
}

fn stem(identity: &Identity) -> String {
    format!("{}.{}", identity.unit.replace('/', "-"), &identity.key[..KEY_DIGITS])
}

/// The key of a result.
pub(super) fn key(identity: &Identity) -> String {
    format!("{UNITS}/{}", file_name(identity))
}

pub(super) fn file_name(identity: &Identity) -> String {
    format!("{}.safetensors", stem(identity))
}
