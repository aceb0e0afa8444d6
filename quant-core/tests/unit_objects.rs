//! Jobs in an object store in memory give the checkpoint of a run in one process, and their units have the same names
//! as in a directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::common::Kind;
use crate::units::{Bench, any_order, calibrated, host, on, resealed, result_of, run, settings, unit};
use object_store::memory::InMemory;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt};
use proptest::prelude::*;
use quant_core::run::{Host, RecipeSettings};
use quant_core::units::{JobRequest, Selection, SharedFiles, WorkOptions, init};
use quant_core::{CancelToken, Category, Event, Observer, Silent};

type Objects = &'static Arc<dyn ObjectStore>;

/// The stores of the tests, by URL.
fn stores() -> &'static Mutex<BTreeMap<PathBuf, Objects>> {
    static STORES: OnceLock<Mutex<BTreeMap<PathBuf, Objects>>> = OnceLock::new();
    STORES.get_or_init(Mutex::default)
}

/// A new store, and the URL of a job in it.
fn place() -> (Objects, PathBuf) {
    let mut stores = stores().lock().unwrap_or_else(PoisonError::into_inner);
    let url = PathBuf::from(format!("s3://bucket/jobs/{}", stores.len()));
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let store: Objects = Box::leak(Box::new(store));
    stores.insert(url.clone(), store);
    (store, url)
}

/// The host, with the store of this URL.
pub(crate) fn with_objects<'a>(mut host: Host<'a>, url: &Path) -> Host<'a> {
    host.object_store = stores().lock().unwrap_or_else(PoisonError::into_inner).get(url).copied();
    host
}

fn wait<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
}

/// The names in a folder, and their contents.
fn objects(store: Objects, url: &Path, folder: &str) -> BTreeMap<String, Vec<u8>> {
    let prefix = Key::from(format!("jobs/{}/{folder}", url.file_name().unwrap().display()));
    wait(async {
        let mut found = BTreeMap::new();
        for object in store.list_with_delimiter(Some(&prefix)).await.unwrap().objects {
            let bytes = store.get(&object.location).await.unwrap().bytes().await.unwrap();
            found.insert(object.location.filename().unwrap().to_owned(), bytes.to_vec());
        }
        found
    })
}

fn key(url: &Path, name: &str) -> Key {
    Key::from(format!("jobs/{}/{name}", url.file_name().unwrap().display()))
}

fn float(settings: RecipeSettings) -> RecipeSettings {
    RecipeSettings { layer_inputs: Some("float".into()), ..settings }
}

#[test]
fn a_job_in_objects_gives_what_one_run_gives() {
    for (family, settings) in [
        (Kind::Llama, settings("rtn", "w4a16-g32-sym")),
        (Kind::Mixtral, settings("rtn", "w4a16-g32-asym")),
        (Kind::Llama, calibrated("awq", "w4a16-g32-asym")),
        (Kind::Qwen3, float(calibrated("awq-gptq", "w4a16-g32-sym"))),
        (Kind::Llama, calibrated("qoq", "w4a8-g32")),
    ] {
        let bench = Bench::new(family, settings);
        for (blocks, shards) in [(1, 3), (2, 1)] {
            let directory = bench.init(&format!("directory-{blocks}"), blocks, shards);
            run(&directory, &Selection::All).unwrap();
            let (store, url) = place();
            bench.init_at(url.clone(), blocks, shards);
            let done = run(&url, &Selection::All).unwrap();
            assert!(!done.is_empty() && done.iter().all(|unit| unit.computed));
            bench.assert_merges(&url);
            assert!(run(&url, &Selection::All).unwrap().iter().all(|unit| !unit.computed));
            let names = |folder| objects(store, &url, folder).into_keys().collect::<Vec<_>>();
            let files = |folder: &str| {
                let entries = std::fs::read_dir(directory.join(folder)).unwrap();
                let mut names: Vec<_> =
                    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
                names.sort();
                names
            };
            // The names have hashes of all that a result depends on, also of the results of other units.
            assert_eq!(names("units"), files("units"));
            assert_eq!(names("inputs"), files("inputs"));
            assert_eq!(names("log").len(), done.len());
            let record = std::fs::read(directory.join("job.json")).unwrap();
            assert!(objects(store, &url, "")["job.json"] == record);
            for (name, manifest) in objects(store, &url, "units") {
                assert!(
                    whole(store, &url, &manifest)
                        == std::fs::read(directory.join("units").join(name)).unwrap()
                );
            }
        }
    }
}

/// The result that a manifest describes.
fn whole(store: Objects, url: &Path, manifest: &[u8]) -> Vec<u8> {
    let manifest: serde_json::Value = serde_json::from_slice(manifest).unwrap();
    let parts = manifest["parts"].as_array().unwrap();
    let part = |part: &serde_json::Value| {
        let key = key(url, &format!("parts/{}", part["sha256"].as_str().unwrap()));
        wait(async { store.get(&key).await.unwrap().bytes().await.unwrap() }).to_vec()
    };
    parts.iter().flat_map(part).collect()
}

#[test]
fn any_order_any_partition_any_interruption_in_objects() {
    let benches = [settings("rtn", "w4a16-g32-sym"), float(calibrated("gptq", "w4a16-g32-sym"))]
        .map(|settings| Bench::new(Kind::Llama, settings));
    let steps = prop::collection::vec((0..64_usize, prop::option::weighted(0.4, 1..12_usize)), 0..8);
    let config = ProptestConfig { cases: 8, failure_persistence: None, ..ProptestConfig::default() };
    proptest::test_runner::TestRunner::new(config)
        .run(
            &(0..2_usize, 1..4_usize, 1..4_usize, steps, 2..4_usize),
            |(which, blocks, shards, steps, workers)| {
                let (_, url) = place();
                let bench = &benches[which];
                bench.init_at(url.clone(), blocks, shards);
                any_order(bench, &url, &steps, workers)
            },
        )
        .unwrap();
}

/// Files that are shared without a job: in objects as in a directory.
#[test]
fn shared_files_keep_their_first_contents() {
    let directory = tempfile::tempdir().unwrap();
    let (store, url) = place();
    for location in [url.clone(), directory.path().join("a/shared")] {
        let cancel = CancelToken::new();
        let open = || SharedFiles::open(&location, &host(&location, &Silent, &cancel)).unwrap();
        assert!(open().names().unwrap().is_empty());
        assert_eq!(open().read("one").unwrap(), None);
        let processes: Vec<bool> = std::thread::scope(|scope| {
            let process = |number: u8| {
                let (location, cancel) = (&location, &cancel);
                move || {
                    let files = SharedFiles::create(location, &host(location, &Silent, cancel)).unwrap();
                    files.publish("one", &vec![number; 100_000]).unwrap()
                }
            };
            let running: Vec<_> = (0..4).map(|number| scope.spawn(process(number))).collect();
            running.into_iter().map(|process| process.join().unwrap()).collect()
        });
        assert_eq!(processes.iter().filter(|published| **published).count(), 1, "{processes:?}");
        let first = open().read("one").unwrap().unwrap();
        assert!(first.len() == 100_000 && processes[usize::from(first[0])]);
        assert!(open().publish("one", &first).unwrap() && !open().publish("one", &first[1..]).unwrap());
        assert!(open().publish("two", b"").unwrap());
        assert_eq!(open().read("one").unwrap().unwrap(), first);
        let mut names = open().names().unwrap();
        names.retain(|name| name != "tmp");
        names.sort();
        assert_eq!(names, ["one", "two"]);
        assert_eq!(open().shown("one"), location.join("one"));
        for name in ["", "..", "../one", "a/b", ".one", "a b", "\u{1b}"] {
            assert_eq!(open().publish(name, b"x").unwrap_err().category(), Category::Usage, "{name}");
            assert_eq!(open().read(name).unwrap_err().category(), Category::Usage, "{name}");
        }
    }
    assert!(objects(store, &url, "tmp").is_empty());
}

#[test]
fn damaged_objects_are_computed_again() {
    let bench = Bench::new(Kind::Llama, calibrated("awq", "w4a16-g32-asym"));
    let (store, url) = place();
    bench.init_at(url.clone(), 2, 2);
    run(&url, &Selection::All).unwrap();
    let mut bad = 0;
    for id in ["outside", "blocks/1", "forward/1/0"] {
        let prefix = format!("{}.", id.replace('/', "-"));
        let units = objects(store, &url, "units");
        let is_result = |name: &str| name.starts_with(&prefix) && name.ends_with(".safetensors");
        let (name, manifest) = units.into_iter().find(|(name, _)| is_result(name)).unwrap();
        let parts = serde_json::from_slice::<serde_json::Value>(&manifest).unwrap()["parts"].clone();
        let parts = parts.as_array().unwrap().iter().map(|part| part["sha256"].as_str().unwrap().to_owned());
        let parts: Vec<Key> = parts.map(|sha256| key(&url, &format!("parts/{sha256}"))).collect();
        let manifest_key = key(&url, &format!("units/{name}"));
        for damaged in parts.iter().chain([&manifest_key]) {
            wait(async {
                let bytes = store.get(damaged).await.unwrap().bytes().await.unwrap();
                let mut bytes = bytes.to_vec();
                match *damaged == manifest_key {
                    true => drop(bytes.pop()),
                    false => bytes[0] ^= 1,
                }
                store.put(damaged, bytes.into()).await.unwrap();
            });
            let merged = on(&url, &Silent, |job, host| job.merge(&bench.at("no"), (false, false), host));
            match merged {
                Err(error) => assert_eq!(error.category(), Category::Environment, "{error}"),
                Ok(_) => {
                    // A merge does not read states, only their description.
                    assert!(id.starts_with("forward") && *damaged == parts[1]);
                    std::fs::remove_dir_all(bench.at("no")).unwrap();
                }
            }
            let done = run(&url, &Selection::All).unwrap();
            assert_eq!(done.iter().filter(|u| u.computed).map(|u| &*u.id).collect::<Vec<_>>(), [id]);
            bad += 1;
            let status = on(&url, &Silent, |job, _| job.status()).unwrap();
            assert_eq!(status.other_files.len(), bad, "{:?}", status.other_files);
            assert_eq!(objects(store, &url, "units")[&name], manifest);
        }
    }
    bench.assert_merges(&url);
}

/// A machine that computes wrong results publishes one, with correct hashes, after this worker has begun.
#[test]
fn results_that_differ_are_an_error_in_objects() {
    let bench = Bench::new(Kind::Llama, settings("rtn", "w4a16-g32-sym"));
    let directory = bench.init("directory", 1, 1);
    run(&directory, &unit("blocks/1")).unwrap();
    let right = result_of(&directory, "blocks/1");
    let name = right.file_name().unwrap().to_str().unwrap();
    let wrong = resealed(&std::fs::read(&right).unwrap(), |data| data[0] ^= 1);
    let sha256 = quant_core::digest::sha256_hex(&wrong);

    struct Publishes<'a>(Objects, &'a Path, &'a str, Vec<(String, Vec<u8>)>);
    impl Observer for Publishes<'_> {
        fn event(&self, event: &Event) {
            if matches!(event, Event::StageStarted { .. }) {
                wait(async {
                    for (name, bytes) in &self.3 {
                        self.0.put(&key(self.1, name), bytes.clone().into()).await.unwrap();
                    }
                });
            }
        }
    }
    let (store, url) = place();
    bench.init_at(url.clone(), 1, 1);
    let header = 8 + u64::from_le_bytes(wrong[..8].try_into().unwrap()) as usize;
    let pieces = [&wrong[..header], &wrong[header..]];
    let hash = |bytes: &[u8]| quant_core::digest::sha256_hex(bytes);
    let manifest = serde_json::json!({
        "schema": "quant-parts/1", "bytes": wrong.len(), "head": 1, "tail": 1,
        "parts": pieces.map(|piece| serde_json::json!({ "bytes": piece.len(), "sha256": hash(piece) })),
    });
    let published = pieces.map(|piece| (format!("parts/{}", hash(piece)), piece.to_vec()));
    let manifest = (format!("units/{name}"), manifest.to_string().into_bytes());
    let published = published.into_iter().chain([manifest]).collect();
    let publishes = Publishes(store, &url, name, published);
    let outcome = on(&url, &publishes, |job, host| job.run(&unit("blocks/1"), &WorkOptions::default(), host));
    let error = outcome.unwrap_err();
    assert_eq!(error.category(), Category::Input, "{error}");
    let message = error.to_string();
    assert!(message.contains("differs") && message.contains(url.to_str().unwrap()), "{message}");
    let status = on(&url, &Silent, |job, _| job.status()).unwrap();
    assert!(status.other_files.iter().any(|name| name.contains(".other-")), "{:?}", status.other_files);
    let kept = objects(store, &url, "units");
    let other = kept.iter().find(|(name, _)| name.contains(".other-")).unwrap().1;
    assert!(whole(store, &url, other) == std::fs::read(&right).unwrap());
    assert!(hash(&whole(store, &url, &kept[publishes.2])) == sha256);
}

#[test]
fn hostile_records_and_inputs_in_objects() {
    let bench = Bench::new(Kind::Llama, calibrated("awq", "w4a16-g32-asym"));
    let (store, url) = place();
    let open = || {
        let opened = on(&url, &Silent, |_, _| Ok(()));
        opened.map_err(|e| (e.category(), e.to_string()))
    };
    assert_eq!(open().unwrap_err().0, Category::Usage);
    bench.init_at(url.clone(), 2, 2);
    let put = |name: &str, bytes: &[u8]| {
        wait(async { store.put(&key(&url, name), bytes.to_vec().into()).await.unwrap() });
    };
    let record = objects(store, &url, "").remove("job.json").unwrap();
    let text = String::from_utf8(record.clone()).unwrap();
    let (input, tokens) = objects(store, &url, "inputs").pop_first().unwrap();
    for (record, says) in [
        (text.replace(&input, "../../../etc/passwd"), "etc/passwd"),
        (text.replace(&input, "windows-0.safetensors"), "missing"),
        (text.replacen('{', "[", 1), "job.json"),
        (String::new(), "job.json"),
    ] {
        put("job.json", record.as_bytes());
        let (category, message) = open().unwrap_err();
        assert_eq!(category, Category::Input, "{message}");
        assert!(message.contains(says) && message.contains(url.to_str().unwrap()), "{message}");
    }
    put("job.json", &record);
    for damaged in [&tokens[..tokens.len() - 1], b"", &[&tokens[..], b"x"].concat()] {
        put(&format!("inputs/{input}"), damaged);
        let (category, message) = open().unwrap_err();
        assert_eq!(category, Category::Input, "{message}");
        assert!(message.contains(&input) && message.contains("is damaged"), "{message}");
        let cancel = CancelToken::new();
        let made = init(&bench.request(2, 2), &url, &host(&url, &Silent, &cancel)).unwrap();
        assert!(!made.created);
        open().unwrap();
    }
    // A second job does not fit into the same place.
    let other = JobRequest { blocks_per_unit: Some(1), ..bench.request(2, 2) };
    let cancel = CancelToken::new();
    let error = init(&other, &url, &host(&url, &Silent, &cancel)).unwrap_err();
    assert_eq!(error.category(), Category::Usage, "{error}");
    run(&url, &Selection::All).unwrap();
    bench.assert_merges(&url);
}
