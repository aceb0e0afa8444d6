//! Jobs in units: any partition of the units over workers, in any order, with duplicates and interruptions, gives the
//! checkpoint that a run in one process writes.

use crate::common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use common::{Checkpoint, Kind, Tiny};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use quant_core::calibrate::Corpus;
use quant_core::recipe::Extensions;
use quant_core::round::{LayerInputs, Rounding};
use quant_core::run::{Host, MemoryBudget, Nothing, QuantizeRequest, RecipeSettings, Text, quantize};
use quant_core::transform::TransformSettings;
use quant_core::units::{JobRequest, Phase, Selection, UnitJob, WorkOptions, init};
use quant_core::{CancelToken, Category, Error, Event, Observer, Result, Silent, TensorSource};
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) const BLOCKS: usize = 4;

/// The tokenizer has the words `w0`, `w1` and so on.
pub(crate) fn write_checkpoint(checkpoint: &Checkpoint, directory: &Path) {
    std::fs::create_dir(directory).unwrap();
    let (source, tiny) = (checkpoint.source(), &checkpoint.tiny);
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for name in source.names() {
        let (info, bytes) = (source.info(name).unwrap(), source.read(name).unwrap());
        let entry = json!({
            "dtype": info.dtype.name(), "shape": info.shape, "data_offsets": [data.len(), data.len() + bytes.len()],
        });
        header.insert(name.to_owned(), entry);
        data.extend(bytes);
    }
    let header = Value::Object(header).to_string().into_bytes();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    let words: serde_json::Map<_, _> = (0..tiny.vocab).map(|i| (format!("w{i}"), i.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "pre_tokenizer": { "type": "WhitespaceSplit" },
        "model": { "type": "WordLevel", "vocab": words, "unk_token": "w0" },
    });
    let write = |name: &str, bytes: &[u8]| std::fs::write(directory.join(name), bytes).unwrap();
    write("model.safetensors", &file);
    write("tokenizer.json", tokenizer.to_string().as_bytes());
    write("tokenizer_config.json", b"{}");
    write("config.json", Value::Object(tiny.config()).to_string().as_bytes());
}

fn text() -> Text {
    let words: String = (0..20_000_usize).map(|i| format!("w{} ", i * i % 7919 % 96)).collect();
    Text::Given(Corpus::Texts(vec![words]), "numbers".into())
}

pub(crate) fn tiny(family: Kind) -> Tiny {
    let layers = BLOCKS;
    match family {
        Kind::Opt => Tiny { layers, ..Tiny::opt() },
        family => Tiny { family, layers, ..Tiny::default() },
    }
}

pub(crate) fn settings(method: &str, scheme: &str) -> RecipeSettings {
    RecipeSettings { method: Some(method.into()), scheme: Some(scheme.into()), ..RecipeSettings::default() }
}

/// Settings of a method that is calibrated on several pieces of windows.
pub(crate) fn calibrated(method: &str, scheme: &str) -> RecipeSettings {
    RecipeSettings { samples: Some(150), seq_len: Some(40), ..settings(method, scheme) }
}

pub(crate) struct Bench {
    scratch: TempDir,
    settings: RecipeSettings,
    calibration: Option<Text>,
    expected: BTreeMap<String, Vec<u8>>,
}

fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(&path).unwrap()))
        .collect()
}

impl Bench {
    pub(crate) fn new(family: Kind, settings: RecipeSettings) -> Self {
        Self::with_config(family, settings, |_| {})
    }

    /// A bench whose model has a changed configuration.
    pub(crate) fn with_config(
        family: Kind,
        settings: RecipeSettings,
        change: impl FnOnce(&mut serde_json::Map<String, Value>),
    ) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let model = scratch.path().join("model");
        write_checkpoint(&tiny(family).random(2), &model);
        let mut config = tiny(family).config();
        change(&mut config);
        std::fs::write(model.join("config.json"), Value::Object(config).to_string()).unwrap();
        let calibration = settings.samples.map(|_| text());
        let out = scratch.path().join("expected");
        let request = QuantizeRequest {
            settings: settings.clone(),
            calibration: calibration.clone(),
            ..QuantizeRequest::new(&model, &out)
        };
        let cancel = CancelToken::new();
        quantize(&request, &Host::new(&Silent, &cancel, &Nothing)).unwrap();
        Self { settings, calibration, expected: files(&out), scratch }
    }

    /// Whether the settings leave the linears of this pattern float.
    pub(crate) fn ignored(&self, pattern: &str) -> bool {
        self.settings.ignore.iter().any(|ignored| ignored == pattern)
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    pub(crate) fn request(&self, blocks_per_unit: usize, forward_shards: usize) -> JobRequest {
        JobRequest {
            model: self.at("model"),
            settings: self.settings.clone(),
            calibration: self.calibration.clone(),
            extensions: Extensions::default(),
            blocks_per_unit: Some(blocks_per_unit),
            experts_per_unit: None,
            // A single group of blocks needs no states.
            forward_shards: (self.calibration.is_some() && blocks_per_unit < BLOCKS)
                .then_some(forward_shards),
        }
    }

    pub(crate) fn init(&self, name: &str, blocks_per_unit: usize, forward_shards: usize) -> PathBuf {
        self.init_at(self.at(name), blocks_per_unit, forward_shards)
    }

    pub(crate) fn init_at(&self, store: PathBuf, blocks_per_unit: usize, forward_shards: usize) -> PathBuf {
        let cancel = CancelToken::new();
        let host = host(&store, &Silent, &cancel);
        let made = init(&self.request(blocks_per_unit, forward_shards), &store, &host).unwrap();
        assert!(made.created);
        store
    }

    #[track_caller]
    pub(crate) fn assert_merges(&self, store: &Path) {
        let out = self.at(&format!("{}.out", store.file_name().unwrap().display()));
        on(store, &Silent, |job, host| job.merge(&out, (false, false), host)).unwrap();
        let found = files(&out);
        assert!(found.keys().eq(self.expected.keys()), "{:?}", found.keys());
        for (name, bytes) in &self.expected {
            assert!(found[name] == *bytes, "{name} differs");
        }
        std::fs::remove_dir_all(out).unwrap();
    }
}

/// A host that opens jobs in directories, and those at the URLs of [`crate::unit_objects`].
pub(crate) fn host<'a>(store: &Path, observer: &'a dyn Observer, cancel: &'a CancelToken) -> Host<'a> {
    let host = Host::new(observer, cancel, &Nothing);
    #[cfg(feature = "store")]
    let host = crate::unit_objects::with_objects(host, store);
    #[cfg(not(feature = "store"))]
    let _ = store;
    host
}

/// Opens a job as a new worker does, and passes it to `work`.
pub(crate) fn on<T>(
    store: &Path,
    observer: &dyn Observer,
    work: impl FnOnce(&UnitJob, &Host<'_>) -> Result<T>,
) -> Result<T> {
    let cancel = CancelToken::new();
    let host = host(store, observer, &cancel);
    work(&UnitJob::open(store, None, &host)?, &host)
}

pub(crate) fn run(store: &Path, selection: &Selection) -> Result<Vec<quant_core::units::UnitDone>> {
    on(store, &Silent, |job, host| job.run(selection, &WorkOptions::default(), host))
}

pub(crate) fn unit(id: &str) -> Selection {
    Selection::Unit(id.into())
}

struct Interrupts {
    cancel: CancelToken,
    left: Mutex<usize>,
}

impl Observer for Interrupts {
    fn event(&self, _: &Event) {
        let mut left = self.left.lock().unwrap();
        *left = left.saturating_sub(1);
        if *left == 0 {
            self.cancel.cancel();
        }
    }
}

fn run_interrupted(store: &Path, selection: &Selection, events: usize) -> Result<()> {
    let interrupts = Interrupts { cancel: CancelToken::new(), left: Mutex::new(events) };
    let cancel = interrupts.cancel.clone();
    let host = host(store, &interrupts, &cancel);
    let job = UnitJob::open(store, None, &host)?;
    job.run(selection, &WorkOptions::default(), &host).map(drop)
}

#[test]
fn units_give_what_one_run_gives() {
    let float = |s: RecipeSettings| RecipeSettings { layer_inputs: Some("float".into()), ..s };
    for (family, settings, forward) in [
        (Kind::Llama, settings("rtn", "w4a16-g32-sym"), false),
        (Kind::Mixtral, settings("rtn", "w4a16-g32-asym"), false),
        (Kind::Opt, settings("rtn", "w8a16-g32-sym"), false),
        (Kind::Llama, settings("rtn", "nvfp4a16"), false),
        (Kind::Llama, calibrated("rtn", "w8a8-channel-sym-static"), true),
        (Kind::Llama, calibrated("awq", "w4a16-g32-asym"), true),
        (Kind::Qwen3Moe(true), calibrated("awq", "w4a16-g32-sym"), true),
        (Kind::Llama, calibrated("smoothquant", "w8a8-channel-sym-static"), true),
        (Kind::Llama, float(calibrated("gptq", "w4a16-g32-sym")), true),
        (Kind::Mixtral, float(calibrated("gptq", "w4a16-g32-sym")), true),
        (Kind::Qwen3, float(calibrated("awq-gptq", "w4a16-g32-sym")), true),
        (Kind::Llama, calibrated("qoq", "w4a8-g32"), true),
    ] {
        let bench = Bench::new(family, settings);
        for (name, blocks, shards) in [("each", 1, 1), ("shards", 1, 3), ("pairs", 2, 2), ("one", 9, 1)] {
            let store = bench.init(name, blocks, shards);
            let done = run(&store, &Selection::All).unwrap();
            let groups = BLOCKS.div_ceil(blocks);
            let forwards = if forward { (groups - 1) * shards } else { 0 };
            assert_eq!(done.len(), groups + 1 + forwards, "{family:?}, {:?}", bench.settings);
            assert!(done.iter().all(|unit| unit.computed));
            bench.assert_merges(&store);
            // Everything exists now, so nothing is computed.
            assert!(run(&store, &Selection::All).unwrap().iter().all(|unit| !unit.computed));
        }
    }
}

/// GPTQ on inputs of the quantized model, in spans.
#[test]
fn spans_give_what_one_run_gives() {
    for (family, method, scheme) in [
        (Kind::Llama, "gptq", "w4a16-g32-sym"),
        (Kind::Mixtral, "gptq", "w4a16-g32-sym"),
        (Kind::Qwen3, "awq-gptq", "w4a16-g32-sym"),
        (Kind::Llama, "gptq", "w8a8-channel-sym-static"),
    ] {
        let spans = |blocks: Option<usize>| {
            let settings = RecipeSettings { span_blocks: blocks, ..calibrated(method, scheme) };
            Bench::new(family, settings)
        };
        let weights = |bench: &Bench| bench.expected["model.safetensors"].clone();
        let (sequential, two, all) = (spans(None), spans(Some(2)), spans(Some(BLOCKS)));
        assert!(weights(&sequential) != weights(&two), "{method}: the span changes the result");
        assert!(weights(&sequential) == weights(&all), "{method}: one span is a sequential run");
        for (name, blocks, shards, groups) in
            [("spans", None, 1, 2), ("shards", None, 3, 2), ("pairs", Some(4), 2, 1)]
        {
            let mut request = two.request(1, shards);
            request.blocks_per_unit = blocks;
            if groups == 1 {
                request.forward_shards = None;
            }
            let store = two.at(name);
            let cancel = CancelToken::new();
            init(&request, &store, &Host::new(&Silent, &cancel, &Nothing)).unwrap();
            let done = run(&store, &Selection::All).unwrap();
            assert_eq!(done.len(), groups + 1 + (groups - 1) * shards, "{done:?}");
            two.assert_merges(&store);
        }
        let cancel = CancelToken::new();
        let host = Host::new(&Silent, &cancel, &Nothing);
        let error = init(&two.request(3, 1), &two.at("threes"), &host).unwrap_err();
        assert!(error.category() == Category::Usage && error.to_string().contains("spans"), "{error}");
    }
}

/// Rounds to nearest, but asks for the states of the quantized model.
#[derive(Debug)]
struct Sequential;

impl Rounding for Sequential {
    fn name(&self) -> &'static str {
        "sequential"
    }

    fn summary(&self) -> &'static str {
        "follows the quantized model"
    }

    fn inputs(&self, _: &TransformSettings) -> Option<LayerInputs> {
        Some(LayerInputs::Quantized)
    }
}

#[test]
fn only_settings_of_the_rounding_make_blocks_independent() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    write_checkpoint(&tiny(Kind::Llama).random(2), &model);
    let remedy = |method: &str| {
        let request = JobRequest {
            model: model.clone(),
            settings: calibrated(method, "w4a16-g32-sym"),
            calibration: Some(text()),
            extensions: Extensions { roundings: vec![&Sequential], ..Extensions::default() },
            ..JobRequest::default()
        };
        let cancel = CancelToken::new();
        let host = Host::new(&Silent, &cancel, &Nothing);
        let error = init(&request, &scratch.path().join("job"), &host).unwrap_err();
        assert_eq!(error.category(), Category::Usage);
        assert!(error.to_string().contains("depends on the results of all blocks before it"), "{error}");
        error.remedy().marked().to_owned()
    };
    let settings = "set ‹span_blocks›, for example to 4, or ‹layer_inputs=float›";
    assert_eq!(remedy("gptq"), format!("{settings}; or run ‹quantize()›"));
    assert_eq!(remedy("sequential"), "run ‹quantize()›");
}

/// The position of a unit among all, and the number of events after which the worker is interrupted.
pub(crate) type Step = (usize, Option<usize>);

pub(crate) fn any_order(bench: &Bench, store: &Path, steps: &[Step], workers: usize) -> TestCaseResult {
    let ids = on(store, &Silent, |job, _| Ok(job.units().iter().map(|u| u.id.clone()).collect::<Vec<_>>()));
    let ids = ids.unwrap();
    for (position, interrupted) in steps {
        let selection = unit(&ids[position % ids.len()]);
        match interrupted {
            Some(events) => match run_interrupted(store, &selection, *events) {
                Ok(()) | Err(Error::Interrupted) => {}
                Err(error) => prop_assert_eq!(error.category(), Category::Environment, "{}", error),
            },
            None => match run(store, &selection) {
                Ok(done) => prop_assert_eq!(done.len(), 1),
                // The unit may need units that are not finished.
                Err(error) => prop_assert_eq!(error.category(), Category::Environment, "{}", error),
            },
        }
    }
    // Workers run at the same time, each with its share; then each of them computes everything that is left.
    std::thread::scope(|scope| {
        for index in 0..workers {
            scope.spawn(move || {
                let _ = run(store, &Selection::Shard { index, count: workers });
                run(store, &Selection::All).unwrap();
            });
        }
    });
    let status = on(store, &Silent, |job, _| job.status()).unwrap();
    prop_assert_eq!((status.done, status.temporary_files), (status.total, 0));
    prop_assert!(status.other_files.is_empty(), "{:?}", status.other_files);
    bench.assert_merges(store);
    Ok(())
}

#[test]
fn any_order_any_partition_any_interruption() {
    let float = RecipeSettings { layer_inputs: Some("float".into()), ..calibrated("gptq", "w4a16-g32-sym") };
    let benches = [(Kind::Llama, settings("rtn", "w4a16-g32-sym")), (Kind::Llama, float)]
        .map(|(f, s)| Bench::new(f, s));
    let steps = prop::collection::vec((0..64_usize, prop::option::weighted(0.4, 1..12_usize)), 0..8);
    let config = ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let number = std::cell::Cell::new(0);
    runner
        .run(
            &(0..2_usize, 1..4_usize, 1..4_usize, steps, 1..4_usize),
            |(which, blocks, shards, steps, workers)| {
                number.set(number.get() + 1);
                let bench = &benches[which];
                let store = bench.init(&format!("store-{}", number.get()), blocks, shards);
                any_order(bench, &store, &steps, workers)?;
                std::fs::remove_dir_all(store).unwrap();
                Ok(())
            },
        )
        .unwrap();
}

#[test]
fn shards_cover_every_unit_once() {
    let bench = Bench::new(Kind::Llama, calibrated("awq", "w4a16-g32-asym"));
    let store = bench.init("store", 1, 3);
    let total = on(&store, &Silent, |job, _| Ok(job.units().len())).unwrap();
    let phase = |phase, index| {
        let options =
            WorkOptions { phase: Some(phase), memory_budget: MemoryBudget::Auto, ..WorkOptions::default() };
        on(&store, &Silent, |job, host| job.run(&Selection::Shard { index, count: 2 }, &options, host))
    };
    // The second phase needs the first.
    let early = phase(Phase::Blocks, 1).unwrap_err();
    assert_eq!(early.category(), Category::Environment, "{early}");
    assert!(early.to_string().contains("forward/0/0"), "{early}");
    let mut computed = 0;
    for (name, index) in [(Phase::Forward, 1), (Phase::Forward, 0), (Phase::Blocks, 0), (Phase::Blocks, 1)] {
        computed += phase(name, index).unwrap().iter().filter(|unit| unit.computed).count();
    }
    assert_eq!(computed, total);
    bench.assert_merges(&store);
    let wrong = on(&store, &Silent, |job, host| {
        job.run(&Selection::Shard { index: 2, count: 2 }, &WorkOptions::default(), host)
    });
    assert_eq!(wrong.unwrap_err().category(), Category::Usage);
    assert_eq!(run(&store, &unit("blocks/9")).unwrap_err().category(), Category::Usage);
}

pub(crate) fn result_of(store: &Path, id: &str) -> PathBuf {
    let prefix = format!("{}.", id.replace('/', "-"));
    let entries = std::fs::read_dir(store.join("units")).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    let found: Vec<_> = entries
        .filter(|path| name(path).starts_with(&prefix) && name(path).ends_with(".safetensors"))
        .collect();
    assert_eq!(found.len(), 1, "{id}: {found:?}");
    found[0].clone()
}

#[test]
fn damaged_results_are_computed_again() {
    let bench = Bench::new(Kind::Llama, calibrated("awq", "w4a16-g32-asym"));
    let store = bench.init("store", 2, 2);
    run(&store, &Selection::All).unwrap();
    let mut bad = 0;
    for id in ["outside", "blocks/1", "forward/1/0"] {
        let path = result_of(&store, id);
        let intact = std::fs::read(&path).unwrap();
        let end = intact.len();
        let (mut early, mut late) = (intact.clone(), intact.clone());
        early[20] ^= 1;
        late[end / 2] ^= 1;
        for damaged in [intact[..end - 1].to_vec(), intact[..50].to_vec(), Vec::new(), early, late] {
            std::fs::write(&path, damaged).unwrap();
            // What an earlier merge has written is not read again.
            let _ = std::fs::remove_dir_all(bench.at("no.job"));
            let merged = on(&store, &Silent, |job, host| job.merge(&bench.at("no"), (false, false), host));
            if let Err(error) = merged {
                assert_eq!(error.category(), Category::Environment, "{error}");
                assert!(!bench.at("no").exists());
            } else {
                // States are not read by a merge, only their hash.
                assert!(id.starts_with("forward"));
                std::fs::remove_dir_all(bench.at("no")).unwrap();
            }
            let done = run(&store, &Selection::All).unwrap();
            assert_eq!(done.iter().filter(|u| u.computed).map(|u| &*u.id).collect::<Vec<_>>(), [id]);
            assert!(std::fs::read(result_of(&store, id)).unwrap() == intact);
            bad += 1;
            let status = on(&store, &Silent, |job, _| job.status()).unwrap();
            assert_eq!(status.other_files.len(), bad, "{:?}", status.other_files);
        }
    }
    bench.assert_merges(&store);
}

#[test]
fn results_that_differ_are_an_error() {
    let bench = Bench::new(Kind::Llama, settings("rtn", "w4a16-g32-sym"));
    let store = bench.init("store", 1, 1);
    run(&store, &unit("blocks/1")).unwrap();
    let path = result_of(&store, "blocks/1");
    let intact = std::fs::read(&path).unwrap();
    // Another machine publishes a different result, with a correct hash, after this worker has begun.
    let other = resealed(&intact, |data| data[0] ^= 1);
    struct Publishes(PathBuf, Vec<u8>);
    impl Observer for Publishes {
        fn event(&self, event: &Event) {
            if matches!(event, Event::StageStarted { .. }) {
                std::fs::write(&self.0, &self.1).unwrap();
            }
        }
    }
    std::fs::remove_file(&path).unwrap();
    let publishes = Publishes(path.clone(), other.clone());
    let error = on(&store, &publishes, |job, host| job.run(&unit("blocks/1"), &WorkOptions::default(), host))
        .unwrap_err();
    assert_eq!(error.category(), Category::Input, "{error}");
    let message = error.to_string();
    let own = quant_core::system::host_name();
    assert!(message.contains("differs") && message.matches(&own).count() >= 2, "{message}");
    // Both results are kept.
    assert!(std::fs::read(&path).unwrap() == other);
    let status = on(&store, &Silent, |job, _| job.status()).unwrap();
    assert!(status.other_files.iter().any(|name| name.contains(".other-")), "{:?}", status.other_files);
    // The same result from two workers is not an error.
    std::fs::remove_file(&path).unwrap();
    let publishes = Publishes(path.clone(), intact.clone());
    on(&store, &publishes, |job, host| job.run(&unit("blocks/1"), &WorkOptions::default(), host)).unwrap();
    assert!(std::fs::read(&path).unwrap() == intact);
}

/// The file with changed data and the matching hash.
pub(crate) fn resealed(file: &[u8], change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut file = file.to_vec();
    let data = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let hash = file.len() - 32;
    change(&mut file[data..hash]);
    let hex = quant_core::digest::sha256_hex(&file[data..hash]);
    for (i, byte) in file[hash..].iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap();
    }
    file
}

#[test]
fn hostile_stores_are_refused() {
    let bench = Bench::new(Kind::Llama, settings("rtn", "w4a16-g32-sym"));
    let store = bench.init("store", 1, 1);
    run(&store, &Selection::All).unwrap();
    let category = |outcome: Result<()>| outcome.map_err(|e| (e.category(), e.to_string()));
    let open = || category(on(&store, &Silent, |_, _| Ok(())));
    let refused = |outcome: std::result::Result<(), (Category, String)>, expected: Category, says: &str| {
        let (found, message) = outcome.unwrap_err();
        assert_eq!(found, expected, "{message}");
        assert!(message.contains(says), "{message}");
    };
    let record = store.join("job.json");
    let intact = std::fs::read_to_string(&record).unwrap();
    for (from, to, expected, says) in [
        ("quant-job/3", "quant-job/9", Category::Usage, "quant-job/9"),
        ("\"instruction_set\": \"", "\"instruction_set\": \"x", Category::Environment, "instruction_set"),
        ("\"processor\": \"", "\"processor\": \"x", Category::Environment, "processor"),
        (
            "\"executable_blake3\": \"",
            "\"executable_blake3\": \"0",
            Category::Usage,
            "executable: is a different build",
        ),
        ("\"method\": \"rtn\"", "\"method\": \"awq\"", Category::Input, "inputs"),
        ("\"version\": \"", "\"version\": \"9", Category::Usage, "version"),
        ("\"tensors_sha256\": \"", "\"tensors_sha256\": \"0", Category::Usage, "tensors"),
        ("\"config_sha256\": \"", "\"config_sha256\": \"0", Category::Usage, "config.json: has changed"),
        ("\"forward_shards\"", "\"backward_shards\"", Category::Input, "backward_shards"),
        ("\"recipe\": null", "\"recipe\": \"../../x\"", Category::Input, "../../x"),
        ("\"windows\": null", "\"windows\": \"x\"", Category::Input, "inputs"),
        ("\"blocks_per_unit\": 1", "\"blocks_per_unit\": 0", Category::Input, "without blocks"),
        (
            "\"forward_shards\": 1",
            "\"forward_shards\": 0",
            Category::Input,
            "without blocks, shards or experts",
        ),
        ("{", "[", Category::Input, "job.json"),
    ] {
        assert!(intact.contains(from), "{from}");
        std::fs::write(&record, intact.replacen(from, to, 1)).unwrap();
        refused(open(), expected, says);
    }
    let fields: serde_json::Map<String, Value> = serde_json::from_str(&intact).unwrap();
    for key in fields.keys() {
        let mut without = fields.clone();
        without.remove(key);
        std::fs::write(&record, Value::Object(without).to_string()).unwrap();
        refused(open(), Category::Input, "job.json");
    }
    std::fs::remove_file(&record).unwrap();
    refused(open(), Category::Usage, "job.json");
    std::os::unix::fs::symlink(bench.at("elsewhere"), &record).unwrap();
    refused(open(), Category::Input, "regular");
    std::fs::remove_file(&record).unwrap();
    std::fs::write(&record, &intact).unwrap();
    open().unwrap();

    // Links and directories in the place of results are never followed or replaced.
    let path = result_of(&store, "blocks/2");
    let aside = path.with_extension("moved");
    std::fs::rename(&path, &aside).unwrap();
    let fails = || {
        refused(category(run(&store, &unit("blocks/2")).map(drop)), Category::Input, "regular");
        let merged =
            on(&store, &Silent, |job, host| job.merge(&bench.at("no"), (false, false), host).map(drop));
        refused(category(merged), Category::Input, "regular");
    };
    std::os::unix::fs::symlink(&aside, &path).unwrap();
    fails();
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    fails();
    std::fs::remove_dir(&path).unwrap();
    // A result of another unit under this name counts as damaged.
    std::fs::copy(result_of(&store, "blocks/1"), &path).unwrap();
    assert!(run(&store, &unit("blocks/2")).unwrap()[0].computed);
    assert!(std::fs::read(&path).unwrap() == std::fs::read(&aside).unwrap());

    // Other files are ignored, and listed.
    std::fs::write(store.join("units/notes.txt"), "hello").unwrap();
    std::fs::write(store.join("README"), "hello").unwrap();
    let status = on(&store, &Silent, |job, _| job.status()).unwrap();
    assert!(status.other_files.contains(&"notes.txt".to_owned()));
    bench.assert_merges(&store);
}

#[test]
fn a_job_is_created_once() {
    let bench = Bench::new(Kind::Llama, calibrated("awq", "w4a16-g32-asym"));
    let store = bench.init("store", 1, 2);
    let cancel = CancelToken::new();
    let host = Host::new(&Silent, &cancel, &Nothing);
    let again = |request: &JobRequest, at: &Path| init(request, at, &host);
    assert!(!again(&bench.request(1, 2), &store).unwrap().created);
    let refused = |request: JobRequest, at: &Path, says: &str| {
        let error = again(&request, at).unwrap_err();
        assert_eq!(error.category(), Category::Usage, "{error}");
        assert!(error.to_string().contains(says), "{error}");
    };
    refused(bench.request(2, 2), &store, "other units");
    let mut seeded = bench.request(1, 2);
    seeded.settings.seed = Some(9);
    refused(seeded, &store, "calibration.seed");
    refused(JobRequest { blocks_per_unit: Some(0), ..bench.request(1, 1) }, &bench.at("new"), "0");
    let formats = |names: &[&str]| {
        let mut request = bench.request(1, 1);
        request.settings.format = names.iter().map(|&name| name.into()).collect();
        request
    };
    refused(formats(&["awq", "gptq"]), &bench.at("new"), "one format");
    refused(formats(&["gguf"]), &bench.at("new"), "GGUF");
    refused(bench.request(1, 1), &bench.at("model"), "overlaps");
    std::fs::create_dir(bench.at("used")).unwrap();
    std::fs::write(bench.at("used/file"), "x").unwrap();
    refused(bench.request(1, 1), &bench.at("used"), "`file`");
    let mut sequential = bench.request(1, 1);
    sequential.settings = calibrated("gptq", "w4a16-g32-sym");
    refused(sequential, &bench.at("new"), "quantized model");
    let mut without_text = bench.request(1, 1);
    (without_text.settings, without_text.calibration) = (settings("rtn", "w4a16-g32-sym"), None);
    without_text.forward_shards = Some(2);
    refused(without_text, &bench.at("new"), "forward_shards");
    assert!(!bench.at("new").exists());
}

#[test]
fn a_model_that_changes_is_noticed() {
    let bench = Bench::new(Kind::Llama, settings("rtn", "w4a16-g32-sym"));
    let store = bench.init("store", 1, 1);
    run(&store, &Selection::All).unwrap();
    let path = bench.at("model/model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let error =
        on(&store, &Silent, |job, host| job.merge(&bench.at("no"), (false, false), host)).unwrap_err();
    assert_eq!(error.category(), Category::Usage, "{error}");
    let message = error.to_string();
    assert!(message.contains("different tensor") && message.contains("the model has changed"), "{message}");
    assert!(!message.contains("resume"), "{message}");
    assert!(!bench.at("no").exists());
}

/// A worker of a job without hidden states reads a copy of the model that differs. Only the merge can notice it; its
/// message names the file whose removal mends the job.
#[test]
fn a_unit_of_another_model_can_be_computed_again() {
    let bench = Bench::new(Kind::Llama, settings("rtn", "w4a16-g32-sym"));
    let store = bench.init("store", 1, 1);
    let copy = bench.at("copy");
    let mut changed = tiny(Kind::Llama).random(2);
    changed.values("model.layers.1.mlp.up_proj.weight")[5] += 1.0;
    write_checkpoint(&changed, &copy);
    let cancel = CancelToken::new();
    let host = Host::new(&Silent, &cancel, &Nothing);
    let job = UnitJob::open(&store, Some(&copy), &host).unwrap();
    job.run(&unit("blocks/1"), &WorkOptions::default(), &host).unwrap();
    run(&store, &Selection::All).unwrap();
    let error =
        on(&store, &Silent, |job, host| job.merge(&bench.at("no"), (false, false), host)).unwrap_err();
    assert_eq!(error.category(), Category::Usage, "{error}");
    let wrong = result_of(&store, "blocks/1");
    assert!(error.to_string().contains("`blocks/1`"), "{error}");
    assert!(error.remedy().to_string().contains(wrong.to_str().unwrap()), "{}", error.remedy());
    assert!(!bench.at("no").exists());
    std::fs::remove_file(wrong).unwrap();
    run(&store, &Selection::All).unwrap();
    bench.assert_merges(&store);
}

/// The tokenizer and other files that a merge copies must be those with which the job was created.
#[test]
fn companions_that_change_are_noticed() {
    let bench = Bench::new(Kind::Llama, settings("rtn", "w4a16-g32-sym"));
    let store = bench.init("store", 1, 1);
    run(&store, &Selection::All).unwrap();
    let path = bench.at("model/tokenizer.json");
    let intact = std::fs::read_to_string(&path).unwrap();
    let merge =
        || on(&store, &Silent, |job, host| job.merge(&bench.at("no"), (false, false), host).map(drop));
    let again = || {
        let cancel = CancelToken::new();
        init(&bench.request(1, 1), &store, &Host::new(&Silent, &cancel, &Nothing)).map(drop)
    };
    let refused = |name: &str| {
        for outcome in [merge(), again()] {
            let error = outcome.unwrap_err();
            assert_eq!(error.category(), Category::Usage, "{error}");
            assert!(error.to_string().contains(name) && error.to_string().contains("changed"), "{error}");
        }
        assert!(!bench.at("no").exists());
    };
    std::fs::write(&path, intact.replace("w1\"", "v1\"")).unwrap();
    refused("tokenizer.json");
    std::fs::write(&path, &intact).unwrap();
    std::fs::write(bench.at("model/generation_config.json"), "{}").unwrap();
    refused("generation_config.json");
    std::fs::remove_file(bench.at("model/generation_config.json")).unwrap();
    again().unwrap();
    bench.assert_merges(&store);
}

/// A damaged or missing input is bad input, not an error of the tokenizer or the environment, and `init` repairs it.
#[test]
fn inputs_are_repaired_by_creating_the_job_again() {
    let bench = Bench::new(Kind::Llama, calibrated("awq", "w4a16-g32-asym"));
    let store = bench.init("store", 2, 2);
    let inputs = || std::fs::read_dir(store.join("inputs")).unwrap().map(|entry| entry.unwrap().path());
    let [path] = inputs().collect::<Vec<_>>().try_into().unwrap();
    let intact = std::fs::read(&path).unwrap();
    let mut flipped = intact.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for damaged in [Some(flipped), Some(intact[..100].to_vec()), Some(Vec::new()), None] {
        match &damaged {
            Some(bytes) => std::fs::write(&path, bytes).unwrap(),
            None => std::fs::remove_file(&path).unwrap(),
        }
        let error = run(&store, &Selection::All).unwrap_err();
        assert_eq!(error.category(), Category::Input, "{error}");
        let (message, remedy) = (error.to_string(), error.remedy().to_string());
        assert!(message.contains(path.to_str().unwrap()) && !message.contains("tokenizer"), "{message}");
        assert!(remedy.contains("job_init") && !remedy.contains("download"), "{remedy}");
        let cancel = CancelToken::new();
        let host = Host::new(&Silent, &cancel, &Nothing);
        assert!(!init(&bench.request(2, 2), &store, &host).unwrap().created);
        assert!(std::fs::read(&path).unwrap() == intact);
    }
    run(&store, &Selection::All).unwrap();
    bench.assert_merges(&store);
}

/// Sparse files of terabytes are refused without being read.
#[test]
fn files_of_any_size_end_soon() {
    let bench = Bench::new(Kind::Llama, calibrated("awq", "w4a16-g32-asym"));
    let store = bench.init("store", 2, 2);
    run(&store, &Selection::All).unwrap();
    let enlarge = |path: &Path| {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        // Some file systems have a lower limit.
        (20..=46).rev().any(|bits| file.set_len(1 << bits).is_ok() && bits > 40)
    };
    let result = result_of(&store, "blocks/1");
    let intact = std::fs::read(&result).unwrap();
    assert!(enlarge(&result), "a large file cannot be made");
    let done = run(&store, &Selection::All).unwrap();
    assert_eq!(done.iter().filter(|u| u.computed).map(|u| &*u.id).collect::<Vec<_>>(), ["blocks/1"]);
    assert!(std::fs::read(&result).unwrap() == intact);
    let mut inputs = std::fs::read_dir(store.join("inputs")).unwrap().map(|entry| entry.unwrap().path());
    for path in [inputs.next().unwrap(), store.join("job.json")] {
        let intact = std::fs::read(&path).unwrap();
        assert!(enlarge(&path));
        let error = run(&store, &Selection::All).unwrap_err();
        assert_eq!(error.category(), Category::Input, "{error}");
        assert!(error.to_string().contains("the limit is"), "{error}");
        std::fs::write(&path, intact).unwrap();
    }
    bench.assert_merges(&store);
}

#[test]
fn the_name_of_a_gguf_file_is_refused() {
    let bench = Bench::new(Kind::Llama, settings("rtn", "w4a16-g32-sym"));
    let store = bench.init("store", 1, 1);
    run(&store, &Selection::All).unwrap();
    let out = bench.at("x.gguf");
    let error = on(&store, &Silent, |job, host| job.merge(&out, (false, false), host)).unwrap_err();
    assert_eq!(error.category(), Category::Usage, "{error}");
    assert!(!out.exists());
    // The path that overlaps is named, which here is the job's.
    let inside = store.join("out");
    let error = on(&store, &Silent, |job, host| job.merge(&inside, (false, false), host)).unwrap_err();
    assert_eq!(error.category(), Category::Usage, "{error}");
    assert!(error.remedy().to_string().contains(store.to_str().unwrap()), "{}", error.remedy());
}

/// Fewer shards than asked for, because the text is short.
#[test]
fn init_says_how_many_shards_there_are() {
    struct Warnings(Mutex<Vec<String>>);
    impl Observer for Warnings {
        fn event(&self, event: &Event) {
            if let Event::Warning { message } = event {
                self.0.lock().unwrap().push(message.clone());
            }
        }
    }
    let bench = Bench::new(Kind::Llama, calibrated("awq", "w4a16-g32-asym"));
    for (asked, warns) in [(3, false), (100, true)] {
        let (warnings, cancel) = (Warnings(Mutex::default()), CancelToken::new());
        let host = Host::new(&warnings, &cancel, &Nothing);
        init(&bench.request(1, asked), &bench.at(&format!("store-{asked}")), &host).unwrap();
        let found = warnings.0.into_inner().unwrap();
        assert_eq!(
            found.iter().any(|message| message.contains("3 forward shards, not 100")),
            warns,
            "{found:?}"
        );
    }
}

/// A worker that only computes hidden states reads a copy of the model in which one weight differs.
#[test]
fn workers_with_different_models_are_noticed() {
    let bench = Bench::new(Kind::Llama, calibrated("awq", "w4a16-g32-asym"));
    let store = bench.init("store", 1, 2);
    let copy = bench.at("copy");
    let mut changed = tiny(Kind::Llama).random(2);
    changed.values("model.layers.1.mlp.up_proj.weight")[5] += 1.0;
    write_checkpoint(&changed, &copy);
    let cancel = CancelToken::new();
    let host = Host::new(&Silent, &cancel, &Nothing);
    let job = UnitJob::open(&store, Some(&copy), &host).unwrap();
    for id in ["forward/0/0", "forward/0/1"] {
        job.run(&unit(id), &WorkOptions::default(), &host).unwrap();
    }
    let names = |error: Error, says: &str| {
        assert_eq!(error.category(), Category::Usage, "{error}");
        let message = error.to_string();
        assert!(message.contains("`forward/0/1`") && message.contains("layers.1.mlp.up_proj"), "{message}");
        let remedy = error.remedy().to_string();
        assert!(remedy.contains(result_of(&store, "forward/0/1").to_str().unwrap()), "{remedy}");
        assert!(remedy.contains(says), "{remedy}");
    };
    // The other shard of the windows passes through the same block.
    names(run(&store, &Selection::All).unwrap_err(), "give all workers the same model");
    let wrong = std::fs::read(result_of(&store, "forward/0/1")).unwrap();
    std::fs::remove_file(result_of(&store, "forward/0/1")).unwrap();
    run(&store, &Selection::All).unwrap();
    bench.assert_merges(&store);
    // Two workers that publish at the same time do not see each other's result. The merge compares all of them.
    std::fs::write(result_of(&store, "forward/0/1"), wrong).unwrap();
    run(&store, &Selection::All).unwrap();
    let error =
        on(&store, &Silent, |job, host| job.merge(&bench.at("no"), (false, false), host)).unwrap_err();
    names(error, "restore it or create a new job");
    assert!(!bench.at("no").exists());
}

#[test]
fn hidden_states_in_files_give_the_same() {
    let bench = Bench::new(Kind::Llama, calibrated("awq", "w4a16-g32-asym"));
    let store = bench.init("store", 1, 2);
    let scratch = bench.at("scratch");
    std::fs::create_dir(&scratch).unwrap();
    let smallest = on(&store, &Silent, |job, _| job.costs()).unwrap();
    let smallest = smallest.iter().map(|cost| cost.smallest_budget_bytes).max().unwrap();
    let options = WorkOptions {
        memory_budget: MemoryBudget::Bytes(smallest + (32 << 20)),
        scratch: Some(scratch),
        phase: None,
    };
    on(&store, &Silent, |job, host| job.run(&Selection::All, &options, host)).unwrap();
    bench.assert_merges(&store);
    let small = WorkOptions { memory_budget: MemoryBudget::Bytes(1 << 20), ..WorkOptions::default() };
    std::fs::remove_file(result_of(&store, "blocks/1")).unwrap();
    let error = on(&store, &Silent, |job, host| job.run(&Selection::All, &small, host)).unwrap_err();
    assert!(matches!(error, Error::MemoryBudget { .. }), "{error}");
}
