//! The results of a job in an object store: manifests and parts.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use object_store::memory::InMemory;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt};
use quant_core::run::Host;
use quant_core::units::{Selection, UnitJob, WorkOptions, init};
use quant_core::{Result, digest};
use tempfile::TempDir;

use crate::input::Input;
use crate::job_files::{UNITS, request, with_host};
use crate::texts::text;

const URL: &str = "s3://bucket/job";

/// A finished job in an object store in memory.
struct Bench {
    directory: TempDir,
    store: InMemory,
    /// The manifest of each of [`UNITS`], and the result that it describes.
    results: Vec<(Key, String, Vec<u8>)>,
}

impl Bench {
    /// One input uses it at a time.
    fn shared() -> &'static Mutex<Self> {
        static SHARED: OnceLock<Mutex<Bench>> = OnceLock::new();
        SHARED.get_or_init(|| Mutex::new(Self::new()))
    }

    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let (request, store) = (request(directory.path()), InMemory::new());
        on(directory.path(), &store, |host| {
            init(&request, Path::new(URL), host)?;
            UnitJob::open(Path::new(URL), None, host)?.run(&Selection::All, &WorkOptions::default(), host)
        })
        .expect("a job that can be computed");
        let listed = wait(store.list_with_delimiter(Some(&Key::from("job/units")))).expect("the results");
        let result = |unit: &&str| {
            let name = format!("{}.", unit.replace('/', "-"));
            let is_result = |key: &&Key| key.filename().is_some_and(|found| found.starts_with(&name));
            let key = listed.objects.iter().map(|object| &object.location).find(is_result);
            let key = key.expect("a result").clone();
            let manifest = String::from_utf8(get(&store, &key).expect("a manifest")).expect("JSON");
            let whole = whole(&store, manifest.as_bytes()).expect("a result");
            (key, manifest, whole)
        };
        let results = UNITS.iter().map(result).collect();
        Self { directory, store, results }
    }
}

fn on<T>(directory: &Path, store: &InMemory, work: impl FnOnce(&Host<'_>) -> Result<T>) -> Result<T> {
    // A clone has the same objects.
    let shared: Arc<dyn ObjectStore> = Arc::new(store.clone());
    with_host(directory, |host| {
        let mut host = host.observed(host.observer);
        host.object_store = Some(&shared);
        host.scratch = Some(directory);
        work(&host)
    })
}

fn wait<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(work)
}

fn get(store: &InMemory, key: &Key) -> Option<Vec<u8>> {
    wait(async { Some(store.get(key).await.ok()?.bytes().await.ok()?.to_vec()) })
}

fn put(store: &InMemory, key: &Key, bytes: Vec<u8>) {
    wait(store.put(key, bytes.into())).expect("an object");
}

fn part_keys(manifest: &[u8]) -> Option<Vec<Key>> {
    let manifest: serde_json::Value = serde_json::from_slice(manifest).ok()?;
    let part = |part: &serde_json::Value| Some(Key::from(format!("job/parts/{}", part["sha256"].as_str()?)));
    manifest["parts"].as_array()?.iter().map(part).collect()
}

/// The result that a manifest describes.
fn whole(store: &InMemory, manifest: &[u8]) -> Option<Vec<u8>> {
    let parts = part_keys(manifest)?.iter().map(|key| get(store, key)).collect::<Option<Vec<_>>>()?;
    Some(parts.concat())
}

/// The manifest of a result or one of its parts: a damaged result is computed again, byte for byte, or is an error.
///
/// # Panics
/// If a property does not hold.
pub fn unit_objects(data: &[u8]) {
    let bench = Bench::shared().lock().unwrap_or_else(PoisonError::into_inner);
    let mut input = Input::new(data);
    let which = input.below(UNITS.len());
    let (key, manifest, intact) = &bench.results[which];
    let store = bench.store.fork();
    let parts = part_keys(manifest.as_bytes()).expect("a manifest");
    let part = &parts[input.below(parts.len())];
    match input.below(4) {
        0 => put(&store, key, data.to_vec()),
        1 => {
            let mut bytes = get(&store, part).expect("a part");
            let at = input.below(bytes.len());
            bytes[at] = input.byte();
            put(&store, part, bytes);
        }
        2 => {
            // The part of a different result in the place of one of this.
            let other = part_keys(bench.results[input.below(UNITS.len())].1.as_bytes()).expect("a manifest");
            let other = &other[input.below(other.len())];
            let bytes = get(&store, other).expect("a part");
            let name = |key: &Key| key.filename().expect("a name").to_owned();
            let (from, to) = (name(part), name(other));
            assert_eq!(digest::sha256_hex(&bytes), to);
            put(&store, key, manifest.replace(&from, &to).into_bytes());
        }
        _ => put(&store, key, text(&data[data.len().min(6)..], &[manifest])),
    }
    let run = |unit: &str| {
        on(bench.directory.path(), &store, |host| {
            let job = UnitJob::open(Path::new(URL), None, host)?;
            let _ = job.status();
            job.run(&Selection::Unit(unit.into()), &WorkOptions::default(), host)
        })
    };
    if UNITS[which].starts_with("forward") && input.flag() {
        let _ = run("blocks/1");
    }
    match run(UNITS[which]) {
        Ok(_) => {
            let manifest = get(&store, key).expect("a result");
            assert!(whole(&store, &manifest).as_ref() == Some(intact), "a damaged result was accepted");
        }
        Err(error) => {
            let code = error.category().exit_code();
            assert!([4, 5].contains(&code), "{error}");
        }
    }
}
