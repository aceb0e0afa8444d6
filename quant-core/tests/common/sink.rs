//! A sink for runs that are interrupted and resumed.

use std::collections::{BTreeMap, BTreeSet};

use quant_core::checkpoint::MemorySink;
use quant_core::recipe::Plan;
use quant_core::{Result, TensorSink, TensorSource};
use serde_json::Value;

/// A sink in memory that keeps records and can be resumed from the last commit.
#[derive(Clone)]
pub struct Resumable {
    /// The tensors.
    pub sink: MemorySink,
    pub records: BTreeMap<String, Value>,
    /// The keys of all records that were ever stored, also of those that were removed.
    pub recorded: BTreeSet<String>,
    committed: Option<Box<Self>>,
}

impl Resumable {
    pub fn new(plan: &Plan) -> Self {
        let sink = MemorySink::new(plan.outputs()).unwrap();
        let empty = Self { sink, records: BTreeMap::new(), recorded: BTreeSet::new(), committed: None };
        Self { committed: Some(Box::new(empty.clone())), ..empty }
    }

    /// The sink as a resumed run finds it.
    pub fn resumed(&self) -> Self {
        let committed = self.committed.clone().unwrap();
        Self { committed: Some(committed.clone()), recorded: BTreeSet::new(), ..*committed }
    }

    pub fn tensors(self) -> BTreeMap<String, Vec<u8>> {
        let source = self.sink.into_source().unwrap();
        source.names().into_iter().map(|name| (name.to_owned(), source.read(name).unwrap())).collect()
    }
}

impl TensorSink for Resumable {
    fn is_complete(&self, name: &str) -> bool {
        self.sink.is_complete(name)
    }

    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        self.sink.write(name, offset, bytes)
    }

    fn remember(&mut self, key: &str, value: &Value) -> Result<()> {
        self.recorded.insert(key.to_owned());
        match value {
            Value::Null => self.records.remove(key),
            value => self.records.insert(key.to_owned(), value.clone()),
        };
        Ok(())
    }

    fn recall(&self, key: &str) -> Option<Value> {
        self.records.get(key).cloned()
    }

    fn read_back(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.sink.read_back(name)
    }

    fn commit(&mut self) -> Result<()> {
        self.committed = Some(Box::new(Self { committed: None, ..self.clone() }));
        Ok(())
    }
}
