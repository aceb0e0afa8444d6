//! What searches have found in a block, kept with a job's output until the block is written.

use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use super::conveyor::Conveyor;
use super::source::ReadWeights;
use crate::Result;
use crate::transform::FindingStore;

pub(super) struct KeptFindings<'c, 'a, 'j> {
    conveyor: Mutex<&'c mut Conveyor<'a, 'j>>,
    span: usize,
    held: ReadWeights<'c>,
}

impl<'c, 'a, 'j> KeptFindings<'c, 'a, 'j> {
    /// `held` are the weights of the block, whose hashes are recorded with the first finding.
    pub(super) fn new(conveyor: &'c mut Conveyor<'a, 'j>, span: usize, held: ReadWeights<'c>) -> Self {
        Self { conveyor: Mutex::new(conveyor), span, held }
    }

    fn key(&self, key: &str) -> String {
        format!("search in span {}, {key}", self.span)
    }
}

impl FindingStore for KeptFindings<'_, '_, '_> {
    fn recall(&self, key: &str) -> Option<Value> {
        let mut conveyor = self.conveyor.lock().unwrap_or_else(PoisonError::into_inner);
        conveyor.recall_finding(&self.key(key))
    }

    fn remember(&self, key: &str, value: &Value) -> Result<()> {
        let mut conveyor = self.conveyor.lock().unwrap_or_else(PoisonError::into_inner);
        conveyor.remember_finding(self.span, (&self.key(key), value), &self.held)
    }
}
