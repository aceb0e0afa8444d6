//! On an object store in memory, and on one that misbehaves.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path as Key;
use object_store::{
    CopyOptions, Error as StoreError, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
};
use tempfile::TempDir;

use super::super::super::unit_file::{Identity, UnitFile, UnitSink};
use super::super::{Files, INPUTS, LOG, LocalFile, Publication, UNITS};
use super::manifest::PART_BYTES;
use super::*;
use crate::checkpoint::{Dtype, TensorInfo, TensorSink, TensorSpec};
use crate::run::Nothing;
use crate::{Category, Silent};

const URL: &str = "s3://bucket/some/job";
const RESULT: &str = "units/blocks-0.0123.safetensors";
const BYTES: usize = 2 * PART_BYTES as usize + 12345;

struct Bench {
    store: Arc<dyn ObjectStore>,
    scratch: TempDir,
    cancel: CancelToken,
}

impl Bench {
    fn new(store: impl ObjectStore) -> Self {
        Self { store: Arc::new(store), scratch: tempfile::tempdir().unwrap(), cancel: CancelToken::new() }
    }

    /// Another worker.
    fn open(&self) -> Objects {
        self.with_host(|host| Objects::open(Path::new(URL), host)).unwrap()
    }

    fn create(&self) -> Result<Box<dyn Files>> {
        let files = self.with_host(|host| open(Path::new(URL), host))?;
        files.check_unused()?;
        files.prepare(&FOLDERS).map(|()| files)
    }

    fn with_host<T>(&self, work: impl FnOnce(&Host<'_>) -> Result<T>) -> Result<T> {
        let mut host = Host::new(&Silent, &self.cancel, &Nothing);
        host.object_store = Some(&self.store);
        host.scratch = Some(self.scratch.path());
        work(&host)
    }

    fn get(&self, key: &str) -> Vec<u8> {
        let key = Key::from(format!("some/job/{key}"));
        wait(async { self.store.get(&key).await.unwrap().bytes().await.unwrap() }).to_vec()
    }

    fn put(&self, key: &str, bytes: &[u8]) {
        let key = Key::from(format!("some/job/{key}"));
        wait(async { self.store.put(&key, bytes.to_vec().into()).await.unwrap() });
    }

    fn delete(&self, key: &str) {
        wait(async { self.store.delete(&Key::from(format!("some/job/{key}"))).await.unwrap() });
    }

    fn manifest(&self) -> serde_json::Value {
        serde_json::from_slice(&self.get(RESULT)).unwrap()
    }

    /// A file as a unit writes it, whose values depend on `seed`.
    fn result(&self, seed: usize) -> PathBuf {
        let path = self.scratch.path().join(format!("result-{seed}"));
        if !path.exists() {
            let mut sink = UnitSink::create(&path, specs()).unwrap();
            let bytes: Vec<u8> = (0..BYTES).map(|i| (((i + seed) * 2_654_435_761) >> 13) as u8).collect();
            sink.write("weight", 0, &bytes).unwrap();
            sink.remember("weight", &serde_json::json!({ "seed": seed })).unwrap();
            sink.finish(&identity(), &std::collections::BTreeMap::new()).unwrap();
        }
        path
    }

    fn publish(&self, seed: usize) -> Result<Publication> {
        self.open().publish(&self.result(seed), RESULT, &self.cancel)
    }

    fn copy(&self, worker: &Objects) -> Result<Option<LocalFile>> {
        worker.result(RESULT, 1 << 30, &self.cancel)
    }
}

fn wait<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
}

fn specs() -> Vec<TensorSpec> {
    vec![TensorSpec { name: "weight".into(), info: TensorInfo { dtype: Dtype::U8, shape: vec![BYTES] } }]
}

fn identity() -> Identity {
    Identity { unit: "blocks/0".into(), job: "job".into(), key: "0123".into() }
}

#[track_caller]
fn refused<T: fmt::Debug>(outcome: Result<T>, category: Category, says: &str) {
    let error = outcome.unwrap_err();
    assert_eq!(error.category(), category, "{error}");
    assert!(error.to_string().contains(says), "{error}");
}

#[test]
fn the_first_worker_wins() {
    let bench = Bench::new(InMemory::new());
    let store = bench.create().unwrap();
    assert!(!store.exists(RESULT).unwrap());
    assert!(store.outline(RESULT).unwrap().is_none());
    assert!(bench.copy(&bench.open()).unwrap().is_none());
    let results = [bench.result(1), bench.result(2)];
    let outcomes: Vec<Publication> = std::thread::scope(|scope| {
        let publish = |which: usize| bench.open().publish(&results[which], RESULT, &bench.cancel).unwrap();
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(move || publish(0))).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    let count = |kind| outcomes.iter().filter(|outcome| **outcome == kind).count();
    assert_eq!((count(Publication::Created), count(Publication::Same)), (1, 3), "{outcomes:?}");
    assert_eq!(bench.publish(1).unwrap(), Publication::Same);
    assert_eq!(bench.publish(2).unwrap(), Publication::Different);
    let copy = bench.copy(&bench.open()).unwrap();
    // The worker that made the copy has ended, and with it the copy.
    assert!(!copy.unwrap().exists());
    let worker = bench.open();
    let copy = bench.copy(&worker).unwrap().unwrap();
    assert!(std::fs::read(&*copy).unwrap() == std::fs::read(&results[0]).unwrap());
    let path = copy.to_path_buf();
    drop(copy);
    assert!(!path.exists());
    assert_eq!(store.list(UNITS).unwrap(), [RESULT.trim_start_matches("units/")]);
    assert_eq!(store.list(LOG).unwrap(), Vec::<String>::new());
}

/// The header and the description can be read without the tensors.
#[test]
fn an_outline_has_no_tensors() {
    let bench = Bench::new(InMemory::new());
    bench.publish(1).unwrap();
    let parts = bench.manifest()["parts"].as_array().unwrap().clone();
    assert_eq!(parts.len(), 5, "a header, three parts of the tensor, a description");
    for part in &parts[1..4] {
        bench.delete(&format!("parts/{}", part["sha256"].as_str().unwrap()));
    }
    let worker = bench.open();
    let outline = worker.outline(RESULT).unwrap().unwrap();
    let whole = std::fs::read(bench.result(1)).unwrap();
    assert_eq!(std::fs::metadata(&*outline).unwrap().len(), whole.len() as u64);
    let file = UnitFile::open(&outline, specs(), &identity()).unwrap();
    assert_eq!(file.reports().next().unwrap().1["seed"], 1);
    refused(file.read(&bench.cancel, &mut |_, _, _| Ok(())), Category::Input, "do not match");
    refused(bench.copy(&worker), Category::Input, "is missing");
}

#[test]
fn damage_is_noticed_and_repaired() {
    let bench = Bench::new(InMemory::new());
    bench.publish(1).unwrap();
    let intact = bench.manifest();
    let sha256 = |part: usize| intact["parts"][part]["sha256"].as_str().unwrap().to_owned();
    let key = |part: usize| format!("parts/{}", sha256(part));
    let mut number = 0;
    for part in [0, 2, 4] {
        let bytes = bench.get(&key(part));
        let mut flipped = bytes.clone();
        flipped[bytes.len() / 2] ^= 1;
        let longer = [&bytes[..], b"x"].concat();
        for damaged in [flipped, longer, bytes[..bytes.len() - 1].to_vec(), Vec::new()] {
            bench.put(&key(part), &damaged);
            let worker = bench.open();
            refused(bench.copy(&worker), Category::Input, &key(part));
            let outline = worker.outline(RESULT);
            if part == 2 {
                outline.unwrap();
            } else {
                refused(outline, Category::Input, &sha256(part));
            }
            let aside = worker.set_aside(RESULT).unwrap().unwrap();
            assert_eq!(aside, format!("blocks-0.0123.safetensors.bad-{number}"));
            number += 1;
            assert_eq!(worker.set_aside(RESULT).unwrap(), None);
            assert!(worker.list(UNITS).unwrap().contains(&aside));
            assert_eq!(bench.publish(1).unwrap(), Publication::Created);
            let copy = bench.copy(&worker).unwrap().unwrap();
            assert!(std::fs::read(&*copy).unwrap() == std::fs::read(bench.result(1)).unwrap());
        }
    }
}

#[test]
fn manifests_are_not_trusted() {
    let bench = Bench::new(InMemory::new());
    bench.publish(1).unwrap();
    let intact = bench.manifest();
    let changed = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut manifest = intact.clone();
        change(&mut manifest);
        manifest.to_string().into_bytes()
    };
    let huge = u64::MAX;
    for (bytes, says) in [
        (Vec::new(), "blocks-0.0123"),
        (b"{}".to_vec(), "schema"),
        (std::fs::read(bench.result(1)).unwrap()[..1000].to_vec(), "blocks-0.0123"),
        (vec![b' '; manifest::MAX_BYTES as usize + 1], "limit"),
        (changed(&|m| m["schema"] = "quant-parts/2".into()), "schema"),
        (changed(&|m| m["more"] = 1.into()), "more"),
        (changed(&|m| m["bytes"] = 1.into()), "add up"),
        (changed(&|m| m["parts"][0]["bytes"] = huge.into()), "size"),
        (changed(&|m| m["parts"][0]["bytes"] = 0.into()), "size"),
        (changed(&|m| m["parts"][0]["sha256"] = "../../job.json".into()), "name"),
        (changed(&|m| m["parts"][0]["sha256"] = "A".repeat(64).into()), "name"),
        (changed(&|m| m["parts"] = serde_json::json!([])), "add up"),
        (changed(&|m| m["head"] = 0.into()), "header"),
        (changed(&|m| m["tail"] = huge.into()), "header"),
        (changed(&|m| m["head"] = 5.into()), "header"),
    ] {
        bench.put(RESULT, &bytes);
        let worker = bench.open();
        refused(bench.copy(&worker), Category::Input, says);
        refused(worker.outline(RESULT), Category::Input, says);
        // A worker that has a result compares it, and finds this one.
        assert_eq!(bench.publish(1).unwrap(), Publication::Different);
    }
    // Many parts that exist make a file that is larger than any result of the unit.
    let part = intact["parts"][1].clone();
    let repeated = changed(&|m| {
        m["parts"] = vec![part.clone(); 100].into();
        m["bytes"] = (100 * PART_BYTES).into();
    });
    bench.put(RESULT, &repeated);
    refused(bench.copy(&bench.open()), Category::Input, "more than a result");
}

#[test]
fn small_files_are_compared() {
    let bench = Bench::new(InMemory::new());
    let store = bench.create().unwrap();
    let key = "inputs/windows-0123.safetensors";
    assert_eq!(store.small(key, 100).unwrap(), None);
    assert_eq!(store.publish_bytes(key, b"tokens").unwrap(), Publication::Created);
    assert_eq!(store.publish_bytes(key, b"tokens").unwrap(), Publication::Same);
    for other in [&b"tokeni"[..], b"token", b"tokens and more", b""] {
        assert_eq!(store.publish_bytes(key, other).unwrap(), Publication::Different);
    }
    let path = store.small(key, 6).unwrap().unwrap();
    assert!(path.starts_with(bench.scratch.path()));
    assert_eq!(std::fs::read(path).unwrap(), b"tokens");
    refused(store.small(key, 5), Category::Input, "limit");
    assert_eq!(store.list(INPUTS).unwrap(), ["windows-0123.safetensors"]);
}

#[test]
fn other_objects_are_not_part_of_a_job() {
    let bench = Bench::new(InMemory::new());
    wait(async { bench.store.put(&Key::from("some/job-2/x"), "a neighbour".into()).await.unwrap() });
    let store = bench.create().unwrap();
    store.publish_bytes(RECORD, b"{}").unwrap();
    bench.publish(1).unwrap();
    drop(bench.create().unwrap());
    bench.put("notes.txt", b"x");
    refused(bench.create(), Category::Usage, "`notes.txt`");
    bench.delete("notes.txt");
    bench.put("models/x", b"x");
    refused(bench.create(), Category::Usage, "`models`");
}

/// What a [`Faulty`] store does wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    /// Replaces objects despite the condition.
    Unconditional,
    /// Writes objects, but loses this many answers.
    LostAnswers(usize),
    /// Never answers.
    Silent,
    Denied,
}

/// Misbehaves when objects are written, or, if it is silent or denies access, always.
#[derive(Debug)]
struct Faulty {
    inner: InMemory,
    fault: Fault,
    lost: AtomicUsize,
}

impl Faulty {
    fn new(fault: Fault) -> Self {
        Self { inner: InMemory::new(), fault, lost: AtomicUsize::new(0) }
    }

    async fn before(&self) -> object_store::Result<()> {
        match self.fault {
            Fault::Silent => std::future::pending().await,
            Fault::Denied => Err(StoreError::PermissionDenied {
                path: "some/job".into(),
                source: "403 Forbidden: <Error><Code>AccessDenied</Code><Message>No.</Message></Error>"
                    .into(),
            }),
            Fault::Unconditional | Fault::LostAnswers(_) => Ok(()),
        }
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

type Boxed<'a, T> = std::pin::Pin<Box<dyn Future<Output = object_store::Result<T>> + Send + 'a>>;

impl ObjectStore for Faulty {
    fn put_opts<'a: 'f, 'k: 'f, 'f>(
        &'a self,
        key: &'k Key,
        payload: PutPayload,
        mut options: PutOptions,
    ) -> Boxed<'f, PutResult>
    where
        Self: 'f,
    {
        Box::pin(async move {
            self.before().await?;
            if self.fault == Fault::Unconditional {
                options.mode = PutMode::Overwrite;
            }
            let is_create = options.mode == PutMode::Create;
            let result = self.inner.put_opts(key, payload, options).await;
            match self.fault {
                Fault::LostAnswers(count)
                    if is_create && self.lost.fetch_add(1, Ordering::SeqCst) < count =>
                {
                    Err(StoreError::Generic { store: "Faulty", source: "connection closed".into() })
                }
                _ => result,
            }
        })
    }

    fn put_multipart_opts<'a: 'f, 'k: 'f, 'f>(
        &'a self,
        key: &'k Key,
        options: PutMultipartOptions,
    ) -> Boxed<'f, Box<dyn MultipartUpload>>
    where
        Self: 'f,
    {
        self.inner.put_multipart_opts(key, options)
    }

    fn get_opts<'a: 'f, 'k: 'f, 'f>(&'a self, key: &'k Key, options: GetOptions) -> Boxed<'f, GetResult>
    where
        Self: 'f,
    {
        Box::pin(async move {
            self.before().await?;
            self.inner.get_opts(key, options).await
        })
    }

    fn delete_stream(
        &self,
        keys: BoxStream<'static, object_store::Result<Key>>,
    ) -> BoxStream<'static, object_store::Result<Key>> {
        self.inner.delete_stream(keys)
    }

    fn list(&self, prefix: Option<&Key>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    fn list_with_delimiter<'a: 'f, 'k: 'f, 'f>(&'a self, prefix: Option<&'k Key>) -> Boxed<'f, ListResult>
    where
        Self: 'f,
    {
        Box::pin(async move {
            self.before().await?;
            self.inner.list_with_delimiter(prefix).await
        })
    }

    fn copy_opts<'a: 'f, 'k: 'f, 'l: 'f, 'f>(
        &'a self,
        from: &'k Key,
        to: &'l Key,
        options: CopyOptions,
    ) -> Boxed<'f, ()>
    where
        Self: 'f,
    {
        self.inner.copy_opts(from, to, options)
    }
}

#[test]
fn stores_without_conditional_writes_are_refused() {
    let bench = Bench::new(Faulty::new(Fault::Unconditional));
    refused(bench.create(), Category::Environment, "If-None-Match");
}

#[test]
fn a_lost_answer_is_not_a_conflict() {
    let bench = Bench::new(Faulty::new(Fault::LostAnswers(2)));
    assert_eq!(bench.publish(1).unwrap(), Publication::Same);
    assert_eq!(bench.publish(2).unwrap(), Publication::Different);
    let bench = Bench::new(Faulty::new(Fault::LostAnswers(usize::MAX)));
    refused(bench.publish(1), Category::Environment, "connection closed");
}

#[test]
fn a_denied_request_is_an_error_of_the_environment() {
    let bench = Bench::new(Faulty::new(Fault::Denied));
    refused(bench.create(), Category::Environment, "AccessDenied: No.");
    let error = bench.publish(1).unwrap_err();
    assert!(error.remedy().to_string().contains("credentials"), "{}", error.remedy());
}

#[test]
fn a_request_without_an_answer_can_be_cancelled() {
    let bench = Bench::new(Faulty::new(Fault::Silent));
    let worker = bench.open();
    let cancel = bench.cancel.clone();
    let stop = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        cancel.cancel();
    });
    let started = Instant::now();
    let error = bench.copy(&worker).unwrap_err();
    assert!(matches!(error, Error::Interrupted), "{error}");
    assert!(started.elapsed() < Duration::from_secs(5));
    stop.join().unwrap();
    drop(worker);
    let left: Vec<_> = std::fs::read_dir(bench.scratch.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}
