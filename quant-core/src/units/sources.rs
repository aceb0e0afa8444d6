//! Whether all units of a job read the same model.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::graph::{Unit, Work};
use super::job::UnitJob;
use super::unit_file::{Identity, UnitFile};
use super::work::key;
use crate::checkpoint::{TensorInfo, TensorSink};
use crate::digest::hex;
use crate::pipeline::sources_of;
use crate::{Category, Error, Result};

const PIECE: u64 = 4 << 20;

impl UnitJob {
    /// Fails if another unit, whose result exists, has read a different version of a tensor that this unit has read.
    pub(super) fn compare_with_others(&self, unit: &Unit, file: &Path, identity: &Identity) -> Result<()> {
        let others: Vec<&Unit> = self.units().iter().filter(|other| shares_tensors(unit, other)).collect();
        if others.is_empty() {
            return Ok(());
        }
        let own = self.sources(unit, file, identity)?;
        for other in others {
            let Some(identity) = self.identity(other)? else { continue };
            // A damaged result is set aside by the worker of that unit.
            let path = match self.store.files.outline(&key(&identity)) {
                Ok(Some(path)) => path,
                Err(error) if error.category() != Category::Input => return Err(error),
                Ok(None) | Err(_) => continue,
            };
            let Ok(sources) = self.sources(other, &path, &identity) else { continue };
            let differs =
                |(stored, sha256): &(&String, &String)| own.get(*stored).is_some_and(|own| own != *sha256);
            if let Some((stored, _)) = sources.iter().find(differs) {
                return Err(Error::usage(
                    format!(
                        "the unit `{}` has read a different tensor `{stored}` from that in {}",
                        other.id,
                        self.model_directory().display()
                    ),
                    format!(
                        "give all workers the same model; if the other worker had the wrong one, remove {} and run \
                        the job again",
                        self.store.shown(&key(&identity)).display()
                    ),
                ));
            }
        }
        Ok(())
    }

    /// The hashes of the tensors that a result was computed from, by name in the model.
    fn sources(&self, unit: &Unit, path: &Path, identity: &Identity) -> Result<BTreeMap<String, String>> {
        if unit.is_forward() {
            return sources_of(path);
        }
        let part = unit.part(&self.plan, &self.opened.model)?;
        let stored: HashMap<&str, &str> = part.entries.iter().map(|e| (&*e.tensor, &*e.stored)).collect();
        let file = UnitFile::open(path, part.outputs(), identity)?;
        let source = |(tensor, report): (&String, &serde_json::Value)| {
            Some((
                (*stored.get(tensor.as_str())?).to_owned(),
                report.get("source_sha256")?.as_str()?.to_owned(),
            ))
        };
        let others = file.others_read().map(|(name, hash)| (name.clone(), hash.to_owned()));
        Ok(file.reports().filter_map(source).chain(others).collect())
    }

    /// The hashes of the tensors that a unit has read, but does not write.
    fn others_read(&self, unit: &Unit, path: &Path, identity: &Identity) -> Result<BTreeMap<String, String>> {
        if unit.is_forward() {
            return sources_of(path);
        }
        let tensors = unit.tensors(&self.plan, &self.opened.model)?;
        let file = UnitFile::open(path, tensors, identity)?;
        Ok(file.others_read().map(|(name, hash)| (name.clone(), hash.to_owned())).collect())
    }

    /// Fails unless the weights that units passed hidden states through are those that other units rounded, and which
    /// the pipeline compares with the model.
    pub(super) fn compare_sources(&self, sink: &dyn TensorSink) -> Result<()> {
        let entries: HashMap<&str, &str> =
            self.plan.entries.iter().map(|entry| (&*entry.stored, &*entry.tensor)).collect();
        let reported = |stored: &str| {
            sink.recall(entries.get(stored)?)?.get("source_sha256")?.as_str().map(str::to_owned)
        };
        let mut known: HashMap<String, Option<String>> = HashMap::new();
        let reads_others = |unit: &&Unit| unit.is_forward() || matches!(unit.work, Work::Experts { .. });
        for unit in self.units().iter().filter(reads_others) {
            let Some(identity) = self.identity(unit)? else { continue };
            let path = self.store.files.outline(&key(&identity))?;
            let path = path.ok_or_else(|| self.gone(unit))?;
            for (stored, sha256) in self.others_read(unit, &path, &identity)? {
                let expected = known.entry(stored.clone()).or_insert_with(|| reported(&stored));
                if expected.as_ref().is_none_or(|expected| *expected == sha256) {
                    continue;
                }
                // The two units differ; the model tells which of them is wrong.
                let rounded = entries.get(&*stored).and_then(|tensor| self.unit_of(tensor));
                let wrong = match rounded {
                    Some(rounded) if self.hash_in_model(&stored)? == sha256 => rounded,
                    _ => unit,
                };
                return Err(self.read_another(wrong, &stored)?);
            }
        }
        Ok(())
    }

    /// The error for a unit that has read a tensor which differs from that in the model.
    pub(super) fn read_another(&self, unit: &Unit, tensor: &str) -> Result<Error> {
        let path = self.identity(unit)?.map(|identity| self.store.shown(&key(&identity)));
        let path = path.unwrap_or_default();
        Ok(Error::usage(
            format!(
                "the unit `{}` has read a different tensor `{tensor}` from that in {}: the model has changed, or a \
                worker had a different model",
                unit.id,
                self.model_directory().display()
            ),
            format!(
                "if a worker had the wrong model, remove {} and run the job again; if the model has changed, restore it \
                or create a new job",
                path.display()
            ),
        ))
    }

    pub(super) fn unit_of(&self, tensor: &str) -> Option<&Unit> {
        let layer = self.plan.entries.iter().find(|entry| entry.tensor == tensor)?.layer;
        let holds = |unit: &Unit| {
            let part = unit.part(&self.plan, &self.opened.model);
            part.is_ok_and(|part| part.entries.iter().any(|entry| entry.tensor == tensor))
        };
        self.units().iter().find(|unit| match (&unit.work, layer) {
            (Work::Blocks(blocks), Some(layer)) => blocks.contains(&layer),
            (Work::Experts { block, .. }, Some(layer)) => *block == layer && holds(unit),
            (Work::Outside, None) => true,
            _ => false,
        })
    }

    fn hash_in_model(&self, stored: &str) -> Result<String> {
        let source = self.opened.model.source();
        let len = source.info(stored).map_or(0, TensorInfo::byte_len);
        let (mut hash, mut piece) = (Sha256::new(), Vec::new());
        let mut at = 0;
        while at < len {
            piece.resize(PIECE.min(len - at) as usize, 0);
            source.read_range(stored, at, &mut piece)?;
            hash.update(&piece);
            at += piece.len() as u64;
        }
        Ok(hex(&hash.finalize()))
    }
}

/// Whether two different units read tensors of the same blocks, or both the embedding.
fn shares_tensors(one: &Unit, other: &Unit) -> bool {
    let (a, b) = (one.blocks(), other.blocks());
    let embeds = |unit: &Unit| unit.is_forward() && unit.blocks().start == 0;
    let outside = |unit: &Unit| unit.work == Work::Outside;
    one.id != other.id
        && (a.start < b.end && b.start < a.end
            || outside(one) && embeds(other)
            || outside(other) && embeds(one))
}
