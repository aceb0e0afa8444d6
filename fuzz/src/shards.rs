//! The measurements of an evaluation in shards.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use quant_core::Result;
use quant_evaluator::{EvaluationText, Profile, Shard, ShardFiles, Window, merged_shards, shard_journal};
use serde_json::json;

use crate::texts::text;

const NAME: &str = "0-of-1.0.journal";

#[derive(Debug)]
struct Memory(Mutex<BTreeMap<String, Vec<u8>>>);

impl Memory {
    fn files<T>(&self, with: impl FnOnce(&mut BTreeMap<String, Vec<u8>>) -> T) -> T {
        with(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ShardFiles for Memory {
    fn shown(&self, name: &str) -> PathBuf {
        Path::new("memory").join(name)
    }

    fn names(&self) -> Result<Vec<String>> {
        Ok(self.files(|files| files.keys().cloned().collect()))
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.files(|files| files.get(name).cloned()))
    }

    fn publish(&self, name: &str, bytes: &[u8]) -> Result<bool> {
        Ok(self.files(|files| *files.entry(name.to_owned()).or_insert_with(|| bytes.to_vec()) == bytes))
    }
}

/// The first batch of a shard, in an evaluation of three windows.
///
/// # Panics
/// If a property does not hold.
pub fn eval_shard(data: &[u8]) {
    let identity = json!({ "model": 1 });
    let window = |scored: usize| Window { tokens: vec![0; scored + 1], first: 1 };
    let profile = Profile::gptq(64).expect("a profile");
    let windows = EvaluationText::of_windows([3, 2, 4].map(window).to_vec(), profile).expect("a text");
    let shard = json!({ "evaluation": identity, "first_window": 0, "end_window": 3, "batch": 0 });
    let head = json!({ "schema": "quant-eval-journal/3", "identity": shard }).to_string();
    let line = |window: usize, last: bool, values: &str| {
        let line = format!("[{last},{values}]");
        let hash = quant_core::digest::sha256_hex(format!("{window} {line}"));
        format!("{} {line}\n", &hash[..16])
    };
    let whole = format!("{head}\n{}{}", line(0, false, "[0.5,1.5,2.5]"), line(1, true, "[1.0,2.0]"));
    let odd = format!("{head}\n{}{}", line(0, true, "[0.5,-1.5,1e999]"), line(1, true, "[1.0]"));
    let bytes = text(data, &[&whole, &odd, &head]);
    let files: Arc<dyn ShardFiles> =
        Arc::new(Memory(Mutex::new([(NAME.to_owned(), bytes.clone())].into_iter().collect())));
    let open = || shard_journal::<f64>(&files, Shard::new(0, 1).expect("a shard"), &identity, &windows);
    let merged = || merged_shards::<f64>(&files, &identity, &windows);
    let Ok(mut journal) = open() else {
        assert!(merged().is_err() && bytes != whole.as_bytes(), "a batch was refused");
        return;
    };
    let known = journal.take();
    assert!(!known.is_empty() && known.len() <= windows.windows.len());
    assert!(known.iter().zip(&windows.windows).all(|(values, window)| values.len() == window.scored()));
    assert!(known.iter().flatten().all(|value| value.is_finite()));
    match merged() {
        Ok(all) => assert_eq!(all, known),
        Err(_) => assert!(known.len() < windows.windows.len()),
    }
    assert_eq!(open().expect("a journal that was read before").take(), known);
    assert_eq!(files.read(NAME).ok().flatten(), Some(bytes));
}
