//! A run reads every weight of a block once per output format, also when it is resumed. Exceptions: AWQ reads once for
//! all formats; rounding to nearest with a scale shared between linears reads twice; experts that are processed one at
//! a time are read several times.

use crate::common;
use crate::sink;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Checkpoint, EXPERTS, Kind, Tiny, normal, recipe, windows};
use quant_core::calibrate::{Spill, TokenWindows};
use quant_core::checkpoint::{Dtype, MemorySource, TensorInfo};
use quant_core::format::CONTAINERS;
use quant_core::model::Model;
use quant_core::pipeline::{Job, QuantReport, StateFiles, quantize_each_with};
use quant_core::quantize::gptq::GptqSettings;
use quant_core::recipe::{Pattern, Plan, Recipe};
use quant_core::round::LayerInputs;
use quant_core::transform::{AwqSettings, Search, StepSettings, TransformSettings};
use quant_core::{CancelToken, Error, Event, Observer, Result, TensorSink, TensorSource};
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::{Map, Value, json};
use sink::Resumable;

struct Counting {
    source: Arc<dyn TensorSource>,
    read: Mutex<BTreeMap<String, u64>>,
    /// The number of reads until one takes so long that a part of the block is committed; 0 if none does.
    until_slow: Mutex<usize>,
}

impl Counting {
    fn new(source: MemorySource) -> Self {
        Self { source: Arc::new(source), read: Mutex::default(), until_slow: Mutex::default() }
    }

    fn take(&self) -> BTreeMap<String, u64> {
        std::mem::take(&mut self.read.lock().unwrap())
    }
}

impl TensorSource for Counting {
    fn names(&self) -> Vec<&str> {
        self.source.names()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.source.info(name)
    }

    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        *self.read.lock().unwrap().entry(name.to_owned()).or_default() += buffer.len() as u64;
        let is_slow = {
            let mut until = self.until_slow.lock().unwrap();
            let is_slow = *until == 1;
            *until = until.saturating_sub(1);
            is_slow
        };
        if is_slow {
            std::thread::sleep(Duration::from_millis(1100));
        }
        self.source.read_range(name, offset, buffer)
    }

    fn location(&self, name: &str) -> PathBuf {
        self.source.location(name)
    }
}

struct Until {
    events: usize,
    seen: Mutex<usize>,
    cancel: CancelToken,
}

impl Observer for Until {
    fn event(&self, _: &Event) {
        let mut seen = self.seen.lock().unwrap();
        *seen += 1;
        if *seen == self.events {
            self.cancel.cancel();
        }
    }
}

struct Bench {
    hidden: usize,
    counting: Arc<Counting>,
    model: Model,
    plans: Vec<Plan>,
    windows: TokenWindows,
    /// The blocks of which the last run committed a part.
    committed_in_part: Mutex<BTreeSet<usize>>,
}

impl Bench {
    fn new(tiny: &Tiny, recipe: &Recipe) -> Self {
        Self::over(tiny.random(5).source(), tiny, recipe)
    }

    fn over(source: MemorySource, tiny: &Tiny, recipe: &Recipe) -> Self {
        Self::with_config(source, &tiny.config(), tiny.hidden, tiny.vocab, recipe)
    }

    fn with_config(
        source: MemorySource,
        config: &Map<String, Value>,
        hidden: usize,
        vocab: usize,
        recipe: &Recipe,
    ) -> Self {
        let counting = Arc::new(Counting::new(source));
        let model = Model::new(counting.clone(), &PathBuf::from("config.json"), config).unwrap();
        let model = recipe.prepared(model).unwrap();
        let plans = Plan::all(&model, recipe).unwrap();
        counting.take();
        let windows = windows(vocab, 3, 24, 2);
        Self { hidden, counting, model, plans, windows, committed_in_part: Mutex::default() }
    }

    fn sinks(&self) -> Vec<Resumable> {
        self.plans.iter().map(Resumable::new).collect()
    }

    /// Runs until `events` events have occurred. Returns the bytes read, the reports if the run completed, and the
    /// number of events.
    fn run(
        &self,
        sinks: &mut [Resumable],
        events: usize,
    ) -> (BTreeMap<String, u64>, Option<Vec<QuantReport>>, usize) {
        self.run_with(sinks, events, &StateFiles::default())
    }

    fn run_with(
        &self,
        sinks: &mut [Resumable],
        events: usize,
        files: &StateFiles,
    ) -> (BTreeMap<String, u64>, Option<Vec<QuantReport>>, usize) {
        let cancel = CancelToken::new();
        let until = Until { events, seen: Mutex::new(0), cancel: cancel.clone() };
        let windows = Some(&self.windows).filter(|_| self.plans[0].needs_text());
        let job = |plan| Job {
            model: &self.model,
            plan,
            windows,
            maxima: None,
            searches: None,
            observer: &until,
            cancel: &cancel,
        };
        let jobs: Vec<_> = self.plans.iter().map(job).collect();
        let each = sinks.iter_mut().map(|sink| sink as &mut dyn TensorSink).collect();
        let reports = match quantize_each_with(&jobs, each, files) {
            Ok(reports) => Some(reports),
            Err(Error::Interrupted) => None,
            Err(error) => panic!("{error}"),
        };
        let recorded = sinks.iter().flat_map(|sink| &sink.recorded);
        // The first span precedes the blocks.
        let layer =
            |key: &String| key.strip_prefix("weights of span ")?.parse::<usize>().ok()?.checked_sub(1);
        *self.committed_in_part.lock().unwrap() = recorded.filter_map(layer).collect();
        let seen = *until.seen.lock().unwrap();
        (self.counting.take(), reports, seen)
    }

    fn bytes(&self, name: &str) -> u64 {
        self.counting.source.info(name).unwrap().byte_len()
    }

    /// Weights of blocks are read once. Tensors outside the blocks, norms and biases are read once per container that
    /// contains them; norms and biases once more with their block, and embedding rows of the text's tokens once more
    /// with the text. If a block takes longer than a second, a part of it is committed with hashes, and its norms and
    /// biases are read once more for that.
    fn assert_read_once(&self, read: &BTreeMap<String, u64>, what: &str) {
        let written = self.plans.len() as u64;
        let row = (self.hidden * 4) as u64;
        let committed_in_part = self.committed_in_part.lock().unwrap();
        for name in self.counting.source.names() {
            let (bytes, got) = (self.bytes(name), read.get(name).copied().unwrap_or(0));
            let small = ["norm.weight", "norm.bias", "bias", "sinks"].iter().any(|end| name.ends_with(end));
            match name.contains(".layers.") {
                _ if small => {
                    let layer = name.split('.').find_map(|part| part.parse::<usize>().ok());
                    let hashed = layer.is_some_and(|layer| committed_in_part.contains(&layer));
                    assert!(
                        got <= (written + 1 + u64::from(hashed)) * bytes,
                        "{what}: {got} of {bytes} bytes of {name}"
                    )
                }
                false if name.contains("embed") => {
                    assert!(
                        got <= (written + 1) * bytes + 2 * row,
                        "{what}: {got} of {bytes} bytes of {name}"
                    );
                }
                // In a resumed run, a tensor that is complete in every container is read only once.
                false => assert!((bytes..=written * bytes).contains(&got), "{what}: {got} bytes of {name}"),
                true => assert_eq!(got, bytes, "{what}: {name}"),
            }
        }
    }
}

fn tinies() -> Vec<Tiny> {
    let tiny = Tiny { hidden: 64, intermediate: 128, layers: 3, dtype: Dtype::Bf16, ..Tiny::default() };
    let of = |family: Kind| Tiny { family, ..tiny.clone() };
    vec![
        tiny.clone(),
        of(Kind::Qwen2),
        of(Kind::Mixtral),
        of(Kind::Qwen3Moe(true)),
        Tiny { layers: 3, ..Tiny::opt() },
    ]
}

fn on_float(recipe: Recipe) -> Recipe {
    recipe.with_settings(GptqSettings { inputs: LayerInputs::Float, ..GptqSettings::default() })
}

fn recipes() -> Vec<(&'static str, Recipe)> {
    let reference = TransformSettings {
        steps: StepSettings::of(AwqSettings { search: Search::Reference }),
        ..TransformSettings::default()
    };
    let two = vec![CONTAINERS[0], *CONTAINERS.iter().find(|c| c.name() == "gptq").unwrap()];
    let modelopt = vec![*CONTAINERS.iter().find(|c| c.name() == "modelopt").unwrap()];
    let ignored = vec![Pattern::new("*v_proj").unwrap()];
    vec![
        ("rtn", recipe("rtn", "w4a16-g32")),
        ("rtn, static", recipe("rtn", "w8a8-channel-static")),
        ("awq", recipe("awq", "w4a16-g32")),
        ("awq, reference", Recipe { settings: reference, ..recipe("awq", "w4a16-g32") }),
        ("awq, static", recipe("awq", "w8a8-channel-static")),
        ("awq, two containers", Recipe { containers: two, ..recipe("awq", "w4a16-g32") }),
        ("awq, a scale for several linears", recipe("awq", "nvfp4a16")),
        ("awq, a scale for a tensor", recipe("awq", "fp8-static")),
        ("awq, some left float", Recipe { ignore: ignored, ..recipe("awq", "w4a16-g32") }),
        ("gptq", recipe("gptq", "w4a16-g32")),
        ("gptq, float inputs", on_float(recipe("gptq", "w4a16-g32"))),
        ("gptq, modelopt", Recipe { containers: modelopt, ..recipe("gptq", "nvfp4a16") }),
        ("awq-gptq", recipe("awq-gptq", "w4a16-g32")),
        ("awq-gptq, float inputs", on_float(recipe("awq-gptq", "w4a16-g32"))),
        ("smoothquant", recipe("smoothquant", "w8a8-channel")),
        ("smoothquant-awq", recipe("smoothquant-awq", "w4a8-g32")),
    ]
}

#[test]
fn every_weight_is_read_once() {
    for tiny in tinies() {
        for (what, recipe) in recipes() {
            let what = format!("{what} of {:?}", tiny.family);
            let bench = Bench::new(&tiny, &recipe);
            let mut sinks = bench.sinks();
            let (read, reports, _) = bench.run(&mut sinks, usize::MAX);
            bench.assert_read_once(&read, &what);
            for (report, plan) in reports.unwrap().iter().zip(&bench.plans) {
                // Reports are in the order of the plan, regardless of the order of writing.
                let tensors = report.tensors.iter().map(|t| &t.tensor);
                assert!(tensors.eq(plan.entries.iter().map(|e| &e.tensor)), "{what}");
            }
        }
    }
}

/// No weight of an expert is kept, so each is read several times; all others are read once.
#[test]
fn experts_that_are_apart_are_read_again() {
    let directory = tempfile::tempdir().unwrap();
    let cases =
        [("awq", "w4a16-g32-sym"), ("smoothquant", "w8a8-channel-sym"), ("awq-gptq", "w4a16-g32-sym")];
    for (method, scheme) in cases {
        for family in [Kind::Mixtral, Kind::Qwen3Moe(true)] {
            let tiny = Tiny { family, dtype: Dtype::Bf16, ..Tiny::default() };
            let bench = Bench::new(&tiny, &recipe(method, scheme));
            let read = |apart: bool| {
                let spill = Spill::new(directory.path(), 1 << 20).with_experts_apart(apart);
                let files = StateFiles { spill: Some(spill), ..StateFiles::default() };
                let mut sinks = bench.sinks();
                let read = bench.run_with(&mut sinks, usize::MAX, &files).0;
                (read, sinks.into_iter().map(Resumable::tensors).collect::<Vec<_>>())
            };
            let (whole, apart) = (read(false), read(true));
            assert!(apart.1 == whole.1, "{method} of {family:?}: other bytes");
            bench.assert_read_once(&whole.0, method);
            let mut again = 0;
            for (name, bytes) in &apart.0 {
                let of_expert = name.contains(".experts.");
                let once = bytes == &whole.0[name];
                assert_eq!(of_expert, !once, "{method} of {family:?}: {bytes} bytes of {name}");
                again += usize::from(!once);
            }
            assert!(again > 0, "{method} of {family:?}");
        }
    }
}

/// The layout of a block's experts in one tensor of gates and ups and one of downs.
#[derive(Debug, Clone, Copy)]
enum Together {
    Rows,
    Columns,
    Mxfp4,
}

fn fused(checkpoint: &Checkpoint, form: Together) -> MemorySource {
    let tiny = &checkpoint.tiny;
    let mut tensors = checkpoint.tensors.clone();
    let mut source = MemorySource::new();
    for layer in 0..tiny.layers {
        let Some((_, experts)) = tiny.family.experts(layer) else { continue };
        let block = tiny.block(layer);
        let mut take = |name: &String| tensors.remove(&format!("{block}{name}.weight")).unwrap().1;
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        for [gate, up, of_down] in &experts {
            gate_up.push([take(gate), take(up)].concat());
            down.push(take(of_down));
        }
        for (name, matrices, [n, k]) in [
            ("gate_up_proj", gate_up, [2 * tiny.intermediate, tiny.hidden]),
            ("down_proj", down, [tiny.hidden, tiny.intermediate]),
        ] {
            let name = format!("{block}mlp.experts.{name}");
            match form {
                Together::Rows => {
                    source.insert_f32(name, tiny.dtype, vec![EXPERTS, n, k], &matrices.concat()).unwrap();
                }
                Together::Columns => {
                    let transposed = |m: &Vec<f32>| -> Vec<f32> {
                        (0..k).flat_map(|i| (0..n).map(move |o| m[o * k + i])).collect()
                    };
                    let values = matrices.iter().map(transposed).collect::<Vec<_>>().concat();
                    source.insert_f32(name, tiny.dtype, vec![EXPERTS, k, n], &values).unwrap();
                }
                Together::Mxfp4 => {
                    // The codes are arbitrary; these scales keep activations at the same magnitude.
                    let count = EXPERTS * n * k / 2;
                    let codes = (0..count).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) as u8).collect();
                    let shape = vec![EXPERTS, n, k / 32, 16];
                    source.insert(format!("{name}_blocks"), Dtype::U8, shape, codes).unwrap();
                    let scales = vec![123; EXPERTS * n * k / 32];
                    let shape = vec![EXPERTS, n, k / 32];
                    source.insert(format!("{name}_scales"), Dtype::U8, shape, scales).unwrap();
                }
            }
        }
    }
    for (name, (shape, values)) in tensors {
        let dtype = if name.contains("norm") { tiny.norm_dtype } else { tiny.dtype };
        source.insert_f32(name, dtype, shape, &values).unwrap();
    }
    source
}

/// A gpt-oss model: gates and ups alternate as columns of one tensor, with biases in another.
fn gpt_oss() -> (MemorySource, Map<String, Value>) {
    const EXPERTS: usize = 4;
    let (hidden, intermediate, vocab, heads, head) = (64, 96, 96, 4, 16);
    let config = json!({
        "architectures": ["GptOssForCausalLM"], "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": head,
        "vocab_size": vocab, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 16, "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention"],
    });
    let mut rng = StdRng::seed_from_u64(11);
    let mut source = MemorySource::new();
    let mut add = |name: String, shape: &[usize], mean: f32, deviation: f32| {
        let values: Vec<f32> =
            (0..shape.iter().product()).map(|_| mean + deviation * normal(&mut rng)).collect();
        let dtype = if name.ends_with("norm.weight") { Dtype::F32 } else { Dtype::Bf16 };
        source.insert_f32(name, dtype, shape.to_vec(), &values).unwrap();
    };
    add("model.embed_tokens.weight".into(), &[vocab, hidden], 0.0, 1.0);
    add("lm_head.weight".into(), &[vocab, hidden], 0.0, 0.2);
    add("model.norm.weight".into(), &[hidden], 1.0, 0.3);
    for layer in 0..2 {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            add(at(&format!("{norm}.weight")), &[hidden], 1.0, 0.3);
        }
        for (name, n) in [("q", heads * head), ("k", 2 * head), ("v", 2 * head), ("o", hidden)] {
            add(at(&format!("self_attn.{name}_proj.weight")), &[n, hidden], 0.0, 0.12);
            add(at(&format!("self_attn.{name}_proj.bias")), &[n], 0.0, 0.3);
        }
        add(at("self_attn.sinks"), &[heads], 0.0, 0.3);
        add(at("mlp.router.weight"), &[EXPERTS, hidden], 0.0, 0.2);
        add(at("mlp.router.bias"), &[EXPERTS], 0.0, 0.05);
        add(at("mlp.experts.gate_up_proj"), &[EXPERTS, hidden, 2 * intermediate], 0.0, 0.12);
        add(at("mlp.experts.gate_up_proj_bias"), &[EXPERTS, 2 * intermediate], 0.0, 0.3);
        add(at("mlp.experts.down_proj"), &[EXPERTS, intermediate, hidden], 0.0, 0.12);
        add(at("mlp.experts.down_proj_bias"), &[EXPERTS, hidden], 0.0, 0.3);
    }
    (source, config.as_object().cloned().unwrap())
}

/// Experts with alternating gates and ups, and biases read in between.
#[test]
fn experts_that_alternate_are_read_once() {
    for method in ["rtn", "awq", "gptq"] {
        let (source, config) = gpt_oss();
        let bench = Bench::with_config(source, &config, 64, 96, &recipe(method, "w4a16-g32"));
        let mut sinks = bench.sinks();
        let (read, ..) = bench.run(&mut sinks, usize::MAX);
        bench.assert_read_once(&read, method);
    }
}

#[test]
fn experts_that_are_stored_together_are_read_once() {
    let tiny = Tiny { family: Kind::Qwen3Moe(true), ..tinies()[0].clone() };
    let checkpoint = tiny.random(5);
    for form in [Together::Rows, Together::Columns, Together::Mxfp4] {
        for (what, recipe) in recipes() {
            let bench = Bench::over(fused(&checkpoint, form), &tiny, &recipe);
            let mut sinks = bench.sinks();
            let (read, ..) = bench.run(&mut sinks, usize::MAX);
            bench.assert_read_once(&read, &format!("{what}, {form:?}"));
        }
    }
}

/// A block that takes longer than a second is committed in part, with the hashes of the weights used so far. Weights
/// that are still to be read, such as those of experts without tokens, are not read for that.
#[test]
fn a_slow_block_reads_every_weight_once() {
    let tiny = Tiny { family: Kind::Qwen3Moe(true), ..tinies()[0].clone() };
    let checkpoint = tiny.random(5);
    for method in ["rtn", "awq", "gptq", "awq-gptq"] {
        let bench = Bench::over(fused(&checkpoint, Together::Rows), &tiny, &recipe(method, "w4a16-g32"));
        let mut committed = 0;
        for slow in [30, 60, 90] {
            *bench.counting.until_slow.lock().unwrap() = slow;
            let mut sinks = bench.sinks();
            let (read, ..) = bench.run(&mut sinks, usize::MAX);
            bench.assert_read_once(&read, &format!("{method}, slow at read {slow}"));
            committed += bench.committed_in_part.lock().unwrap().len();
        }
        // RTN without a text depends on nothing but each weight.
        assert!(committed > 0 || method == "rtn", "{method}: no block was committed in part");
    }
}

/// Rotation transforms the rows or columns of a block's tensors; each source tensor is read once.
#[test]
fn every_weight_of_a_rotated_model_is_read_once() {
    for method in ["qoq", "qoq-rtn", "rotate,gptq"] {
        let bench = Bench::new(&tinies()[0], &recipe(method, "w4a8-channel"));
        let mut sinks = bench.sinks();
        let (read, ..) = bench.run(&mut sinks, usize::MAX);
        bench.assert_read_once(&read, method);
    }
}

/// Wherever the run was interrupted, even between the experts of a block.
#[test]
fn a_resumed_run_reads_every_weight_once() {
    for tiny in [&tinies()[0], &tinies()[2], &tinies()[3]] {
        for (what, recipe) in recipes() {
            let of_experts = ["rtn", "awq", "gptq", "gptq, float inputs", "gptq, modelopt"].contains(&what);
            if tiny.family == Kind::Llama || of_experts {
                resume(tiny, what, &recipe);
            }
        }
    }
}

fn resume(tiny: &Tiny, what: &str, recipe: &Recipe) {
    let bench = Bench::new(tiny, recipe);
    let mut whole = bench.sinks();
    let (_, whole_reports, events) = bench.run(&mut whole, usize::MAX);
    // Near the end, every event is tested: all blocks are complete there, but other tensors are not.
    for until in (1..events).filter(|until| until % 7 == 1 || until + 10 > events) {
        let mut sinks = bench.sinks();
        if bench.run(&mut sinks, until).1.is_some() {
            // The last events come after the last check for cancellation.
            continue;
        }
        let mut sinks: Vec<_> = sinks.iter().map(Resumable::resumed).collect();
        let (read, reports, _) = bench.run(&mut sinks, usize::MAX);
        let what = format!("{what} of {:?}, resumed after {until} of {events} events", tiny.family);
        bench.assert_read_once(&read, &what);
        assert_eq!(reports, whole_reports, "{what}");
        for ((sink, whole), plan) in sinks.iter().zip(&whole).zip(&bench.plans) {
            for output in plan.outputs() {
                assert!(sink.sink.bytes(&output.name) == whole.sink.bytes(&output.name), "{what}");
            }
        }
    }
}
