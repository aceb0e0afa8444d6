//! What searches have found in a block: kept with a job's output until the block is written, and shared by runs that
//! search for the same.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use super::Job;
use super::conveyor::Conveyor;
use super::source::ReadWeights;
use crate::Result;
use crate::calibrate::TokenWindows;
use crate::digest::sha256_hex;
use crate::model::{Model, NodeId};
use crate::recipe::Plan;
use crate::transform::{FindingStore, LinearGrid};

/// What searches have found, for several runs on one model and batch. A run with the steps, settings and grids of an
/// earlier one takes its scales and clip bounds instead of searching again; only their roundings may differ, as those
/// of `awq` and `awq-gptq` do. Its output is byte-identical to that of a run alone.
pub struct SharedSearches<'a> {
    model: &'a Model,
    windows: &'a TokenWindows,
    found: Mutex<HashMap<String, Value>>,
    taken: AtomicUsize,
}

impl std::fmt::Debug for SharedSearches<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedSearches").finish_non_exhaustive()
    }
}

impl<'a> SharedSearches<'a> {
    /// Creates an empty store for jobs on this model and batch. Jobs on others do not use it.
    pub fn new(model: &'a Model, windows: &'a TokenWindows) -> Self {
        Self { model, windows, found: Mutex::default(), taken: AtomicUsize::new(0) }
    }

    /// The number of times that a run took what an earlier one had found.
    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    fn serves(&self, job: &Job<'_>) -> bool {
        std::ptr::eq(self.model, job.model) && job.windows.is_some_and(|own| std::ptr::eq(self.windows, own))
    }
}

pub(super) struct KeptFindings<'c, 'a, 'j> {
    conveyor: Mutex<&'c mut Conveyor<'a, 'j>>,
    span: usize,
    held: ReadWeights<'c>,
    /// The findings of other runs, and a hash of everything besides the model and the batch on which searches depend.
    shared: Option<(&'j SharedSearches<'j>, String)>,
}

impl<'c, 'a, 'j> KeptFindings<'c, 'a, 'j> {
    /// `held` are the weights of the block. The hashes of those that were used are recorded with the findings.
    pub(super) fn new(
        conveyor: &'c mut Conveyor<'a, 'j>,
        span: usize,
        held: ReadWeights<'c>,
        grids: &BTreeMap<NodeId, LinearGrid>,
    ) -> Self {
        let job = conveyor.job();
        let shared = job.searches.filter(|shared| shared.serves(job)).map(|shared| {
            let Plan { method, settings, sampling, .. } = job.plan;
            let (steps, transforms) = (method.steps(), method.fingerprint(settings));
            let (search, kv) = (method.search_mode(settings), settings.kv);
            let depends_on = format!("{steps:?} {transforms} {search:?} {kv:?} {sampling:?} {grids:?}");
            (shared, sha256_hex(depends_on))
        });
        Self { conveyor: Mutex::new(conveyor), span, held, shared }
    }

    fn key(&self, key: &str) -> String {
        format!("search in span {}, {key}", self.span)
    }
}

impl FindingStore for KeptFindings<'_, '_, '_> {
    fn recall(&self, key: &str) -> Option<Value> {
        let key = self.key(key);
        let mut conveyor = self.conveyor.lock().unwrap_or_else(PoisonError::into_inner);
        conveyor.recall_finding(&key).or_else(|| {
            let (shared, depends_on) = self.shared.as_ref()?;
            let found = shared.found.lock().unwrap_or_else(PoisonError::into_inner);
            let found = found.get(&format!("{depends_on} {key}")).cloned()?;
            shared.taken.fetch_add(1, Ordering::Relaxed);
            Some(found)
        })
    }

    fn remember(&self, key: &str, value: &Value) -> Result<()> {
        let key = self.key(key);
        if let Some((shared, depends_on)) = &self.shared {
            let mut found = shared.found.lock().unwrap_or_else(PoisonError::into_inner);
            found.insert(format!("{depends_on} {key}"), value.clone());
        }
        let mut conveyor = self.conveyor.lock().unwrap_or_else(PoisonError::into_inner);
        conveyor.remember_finding(self.span, (&key, value), &self.held)
    }
}
