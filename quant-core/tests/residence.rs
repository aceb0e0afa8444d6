//! The storage of hidden states and samples does not change the output, and a resumed run starts from saved states.

use crate::common;
use crate::sink;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use common::{Kind, Tiny, masked_windows, recipe, windows};
use quant_core::calibrate::{ExpertSampling, ExpertTokens, Residence, Spill, TokenWindows};
use quant_core::checkpoint::Dtype;
use quant_core::model::Model;
use quant_core::pipeline::{Job, QuantReport, SavedStates, StateFiles, quantize_each_with};
use quant_core::quantize::gptq::{ActOrder, GptqSettings};
use quant_core::recipe::{Plan, Recipe, method};
use quant_core::round::LayerInputs;
use quant_core::transform::{
    Alpha, Automatic, AwqSettings, Producers, Search, SmoothSettings, StepSettings, TransformSettings,
};
use quant_core::{CancelToken, Error, Event, Observer, Result, TensorSink};
use serde_json::json;
use sink::Resumable;

const BLOCKS: usize = 4;
const FLOOR: u64 = 1200;

fn tiny(family: Kind) -> Tiny {
    Tiny { family, layers: BLOCKS, dtype: Dtype::Bf16, ..Tiny::default() }
}

fn on_float(recipe: Recipe) -> Recipe {
    recipe.with_settings(GptqSettings { inputs: LayerInputs::Float, ..GptqSettings::default() })
}

#[derive(Default)]
struct Watch {
    cancel: CancelToken,
    after: Option<usize>,
    blocks: Mutex<usize>,
    steps: Mutex<Vec<&'static str>>,
    warnings: Mutex<Vec<String>>,
}

impl Observer for Watch {
    fn event(&self, event: &Event) {
        match event {
            Event::UnitDone { .. } => {
                let mut blocks = self.blocks.lock().unwrap();
                *blocks += 1;
                if Some(*blocks) == self.after {
                    self.cancel.cancel();
                }
            }
            Event::StepDone { step, .. } => self.steps.lock().unwrap().push(step),
            Event::Warning { message } => self.warnings.lock().unwrap().push(message.clone()),
            _ => {}
        }
    }
}

impl Watch {
    fn after(blocks: usize) -> Self {
        Self { after: Some(blocks), ..Self::default() }
    }

    fn count(&self, step: &str) -> usize {
        self.steps.lock().unwrap().iter().filter(|name| **name == step).count()
    }
}

fn run(
    model: &Model,
    plans: &[Plan],
    windows: &TokenWindows,
    sinks: &mut [Resumable],
    files: &StateFiles,
    watch: &Watch,
) -> Result<Vec<QuantReport>> {
    let job = |plan| Job {
        model,
        plan,
        windows: Some(windows),
        maxima: None,
        searches: None,
        observer: watch,
        cancel: &watch.cancel,
    };
    let jobs: Vec<_> = plans.iter().map(job).collect();
    quantize_each_with(&jobs, sinks.iter_mut().map(|sink| sink as &mut dyn TensorSink).collect(), files)
}

fn whole(
    model: &Model,
    recipe: &Recipe,
    windows: &TokenWindows,
    files: &StateFiles,
) -> (Vec<BTreeMap<String, Vec<u8>>>, Vec<QuantReport>) {
    let plans = Plan::all(model, recipe).unwrap();
    let mut sinks: Vec<_> = plans.iter().map(Resumable::new).collect();
    let reports = run(model, &plans, windows, &mut sinks, files, &Watch::default()).unwrap();
    (sinks.into_iter().map(Resumable::tensors).collect(), reports)
}

fn spilled(directory: &Path, round_bytes: u64) -> StateFiles {
    StateFiles { spill: Some(Spill::new(directory, round_bytes)), ..StateFiles::default() }
}

#[test]
fn files_do_not_change_the_output() {
    let reference = TransformSettings {
        steps: StepSettings::of(AwqSettings { search: Search::Reference }),
        ..TransformSettings::default()
    };
    let smoothed = |producers| {
        let alpha = Some(Alpha::Auto(Automatic::Auto));
        recipe("smoothquant", "w8a8-channel-sym").with_settings(SmoothSettings {
            alpha,
            producers,
            ..SmoothSettings::default()
        })
    };
    let unrotated = method("qoq").unwrap().without(&["rotate".to_owned()]).unwrap();
    let order = |act_order| GptqSettings { act_order, ..GptqSettings::default() };
    let odd = GptqSettings { block_size: 48, ..GptqSettings::default() };
    let calibrated = |mut recipe: Recipe, tokens, floor| {
        recipe.sampling.experts = ExpertSampling { tokens, floor };
        recipe
    };
    let all = |recipe| calibrated(recipe, ExpertTokens::All, 0);
    // Some experts of these models have fewer tokens, and others have more.
    let floored = |recipe| calibrated(recipe, ExpertTokens::Routed, FLOOR);
    let cases: Vec<(Kind, Recipe)> = vec![
        (Kind::Llama, recipe("awq", "w4a16-g32-asym")),
        (Kind::Llama, Recipe { settings: reference.clone(), ..recipe("awq", "w4a16-g32-asym") }),
        (Kind::Llama, recipe("gptq", "w4a16-g32-sym")),
        (Kind::Llama, recipe("gptq", "w4a16-g32-sym").with_settings(order(ActOrder::StaticGroups))),
        (Kind::Llama, recipe("gptq", "w4a16-g32-sym").with_settings(odd)),
        (Kind::Llama, on_float(recipe("gptq", "w4a16-g32-sym"))),
        (Kind::Qwen3, recipe("awq-gptq", "w4a16-g32-sym")),
        (Kind::Llama, recipe("smoothquant", "w8a8-channel-sym-static")),
        (Kind::Llama, recipe("qoq", "w4a8-g32")),
        (Kind::Mixtral, recipe("gptq", "w4a16-g32-sym")),
        (Kind::Qwen3Moe(true), recipe("awq", "w4a16-g32-sym")),
        (Kind::Mixtral, recipe("awq", "w4a16-g32-asym")),
        (Kind::Mixtral, recipe("smoothquant", "w8a8-channel-sym")),
        (Kind::Qwen3Moe(true), recipe("smoothquant", "w8a8-channel-sym-static")),
        (Kind::Mixtral, recipe("awq-gptq", "w4a16-g32-sym")),
        (Kind::Qwen3Moe(true), recipe("awq-gptq", "w4a16-g32-asym")),
        (Kind::Mixtral, Recipe { settings: reference.clone(), ..recipe("awq", "w4a16-g32-asym") }),
        (Kind::Qwen3Moe(true), Recipe { settings: reference.clone(), ..recipe("awq-gptq", "w4a16-g32-sym") }),
        (Kind::Qwen3Moe(true), Recipe { method: unrotated, ..recipe("qoq", "w4a8-g32") }),
        (Kind::Mixtral, smoothed(Producers::Norms)),
        (Kind::Qwen3Moe(true), smoothed(Producers::All)),
        (Kind::Qwen3Moe(true), floored(recipe("awq", "w4a16-g32-asym"))),
        (Kind::Qwen3Moe(true), floored(recipe("awq-gptq", "w8a8-channel-sym-static"))),
        (Kind::Mixtral, all(Recipe { settings: reference.clone(), ..recipe("awq", "w4a16-g32-sym") })),
        (Kind::Qwen3Moe(true), all(smoothed(Producers::All))),
        (Kind::Mixtral, all(recipe("rtn", "w8a8-channel-sym-static"))),
        (Kind::Opt, recipe("gptq", "w4a16-g32-sym")),
    ];
    let directory = tempfile::tempdir().unwrap();
    for (family, recipe) in cases {
        let tiny = match family {
            Kind::Opt => Tiny { layers: 2, ..Tiny::opt() },
            family => Tiny { layers: 2, ..tiny(family) },
        };
        let model = recipe.prepared(tiny.random(2).model()).unwrap();
        // Enough windows for a race of several rounds, and more than one piece.
        let windows = masked_windows(tiny.vocab, 150, 40, 3);
        let memory = whole(&model, &recipe, &windows, &StateFiles::default());
        if recipe.sampling.experts.floor > 0 {
            let of_experts = memory.1[0].tensors.iter().filter(|tensor| tensor.tensor.contains(".experts."));
            let (below, above): (Vec<_>, Vec<_>) = of_experts.partition(|t| t.routed_tokens.is_some());
            assert!(!below.is_empty() && !above.is_empty(), "{} and {}", below.len(), above.len());
        }
        for (round_bytes, apart) in [(0, false), (700_000, true), (u64::MAX, false), (0, true)] {
            let spill = Spill::new(directory.path(), round_bytes).with_experts_apart(apart);
            let states = StateFiles { spill: Some(spill), ..StateFiles::default() };
            let files = whole(&model, &recipe, &windows, &states);
            let case = format!("{family:?}, {}, {round_bytes}, {apart}", recipe.method.name);
            assert!(files.0 == memory.0, "{case}: other bytes");
            assert_eq!(files.1[0].tensors, memory.1[0].tensors, "{case}");
        }
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "files are left over");
}

/// On processors with bfloat16 instructions, candidates for groups of this size are compared by differences.
#[test]
fn rounds_in_several_batches_choose_the_same() {
    let tiny = Tiny { hidden: 256, intermediate: 512, layers: 1, ..tiny(Kind::Llama) };
    let recipe = recipe("awq", "w4a16-g32-asym");
    let model = tiny.random(4).model();
    let windows = windows(tiny.vocab, 24, 256, 5);
    let memory = whole(&model, &recipe, &windows, &StateFiles::default());
    let directory = tempfile::tempdir().unwrap();
    for round_bytes in [0, 3 << 20] {
        let files = whole(&model, &recipe, &windows, &spilled(directory.path(), round_bytes));
        assert!(files.0 == memory.0, "{round_bytes}: different bytes");
        assert_eq!(files.1[0].tensors, memory.1[0].tensors);
    }
}

fn saved(path: &Path, spill: Option<Spill>) -> StateFiles {
    let saved = Some(SavedStates { path: path.to_owned(), every: Duration::ZERO });
    StateFiles { saved, spill, depends_on: json!("the model"), ..StateFiles::default() }
}

/// Interrupts a run after `blocks` blocks, resumes it, and compares the result with that of an uninterrupted run.
/// Returns the events of the resumed run.
fn interrupted(tiny: &Tiny, recipe: &Recipe, blocks: usize, prepare: impl Fn(&Path)) -> Watch {
    let model = recipe.prepared(tiny.random(2).model()).unwrap();
    let windows = masked_windows(tiny.vocab, 6, 40, 3);
    let expected = whole(&model, recipe, &windows, &StateFiles::default());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("states.safetensors");
    let plans = Plan::all(&model, recipe).unwrap();
    let mut sinks: Vec<_> = plans.iter().map(Resumable::new).collect();
    let first = Watch::after(blocks * plans.len());
    let stopped = run(&model, &plans, &windows, &mut sinks, &saved(&path, None), &first);
    assert!(matches!(stopped, Err(Error::Interrupted)), "{}", recipe.method.name);
    prepare(&path);
    let mut sinks: Vec<_> = sinks.iter().map(Resumable::resumed).collect();
    let second = Watch::default();
    let files = saved(&path, Some(Spill::new(directory.path(), 0)));
    let reports = run(&model, &plans, &windows, &mut sinks, &files, &second).unwrap();
    let tensors: Vec<_> = sinks.into_iter().map(Resumable::tensors).collect();
    assert!(tensors == expected.0, "{}: different bytes", recipe.method.name);
    for (report, expected) in reports.iter().zip(&expected.1) {
        assert_eq!(report.tensors, expected.tensors);
    }
    second
}

/// The run is resumed at the beginning of a span, inside one, and after one.
#[test]
fn a_resumed_run_keeps_its_spans() {
    for span in [2, 3] {
        for blocks in [1, 2, 3] {
            let gptq = GptqSettings { span_blocks: Some(span), ..GptqSettings::default() };
            for method in ["gptq", "awq-gptq"] {
                let recipe = recipe(method, "w4a16-g32-sym").with_settings(gptq);
                interrupted(&tiny(Kind::Qwen3), &recipe, blocks, |path| assert!(path.exists()));
            }
        }
    }
}

#[test]
fn a_resumed_run_starts_from_saved_states() {
    let mut two = recipe("awq", "w4a16-g32-sym");
    let other = quant_core::format::CONTAINERS.iter().find(|c| c.name() == "gptq").unwrap();
    two.containers.push(*other);
    let mut two_gptq = recipe("gptq", "w4a16-g32-sym");
    two_gptq.containers.push(*other);
    for (family, recipe, step) in [
        (Kind::Llama, recipe("awq", "w4a16-g32-asym"), "search"),
        (Kind::Llama, recipe("gptq", "w4a16-g32-sym"), "gptq"),
        (Kind::Llama, on_float(recipe("gptq", "w4a16-g32-sym")), "gptq"),
        (Kind::Qwen3, recipe("awq-gptq", "w4a16-g32-sym"), "gptq"),
        (Kind::Llama, recipe("smoothquant", "w8a8-channel-sym-static"), "ranges"),
        (Kind::Mixtral, recipe("gptq", "w4a16-g32-sym"), "gptq"),
        (Kind::Llama, two, "search"),
        (Kind::Llama, two_gptq, "gptq"),
    ] {
        let watch = interrupted(&tiny(family), &recipe, 2, |path| assert!(path.exists()));
        assert!(watch.warnings.lock().unwrap().is_empty());
        let name = &recipe.method.name;
        // Completed blocks are not run again, not even to recompute the states after them.
        assert_eq!(watch.count("forward"), 0, "{family:?}, {name}: {:?}", watch.steps.lock().unwrap());
        assert!(watch.count(step) > 0 || step == "search", "{family:?}, {name}");
    }
}

#[test]
fn states_that_cannot_be_used_are_computed_again() {
    let recipe = recipe("awq", "w4a16-g32-asym");
    let watch = interrupted(&tiny(Kind::Llama), &recipe, 2, |path| std::fs::remove_file(path).unwrap());
    assert!(watch.warnings.lock().unwrap().is_empty());
    assert_eq!(watch.count("forward"), 2);
    let watch = interrupted(&tiny(Kind::Llama), &recipe, 2, |path| {
        let mut bytes = std::fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(path, bytes).unwrap();
    });
    let warnings = watch.warnings.lock().unwrap().clone();
    assert!(warnings.len() == 1 && warnings[0].contains("recomputed"), "{warnings:?}");
    let watch = interrupted(&tiny(Kind::Llama), &recipe, 2, |path| std::fs::write(path, b"other").unwrap());
    assert!(watch.warnings.lock().unwrap().is_empty());
}

/// The run logs a warning and continues.
#[test]
fn saving_may_fail() {
    let tiny = tiny(Kind::Llama);
    let model = tiny.random(2).model();
    let recipe = recipe("awq", "w4a16-g32-asym");
    let windows = windows(tiny.vocab, 4, 40, 3);
    let plans = Plan::all(&model, &recipe).unwrap();
    let mut sinks = [Resumable::new(&plans[0])];
    let watch = Watch::default();
    let files = saved(Path::new("/nonexistent/states.safetensors"), None);
    run(&model, &plans, &windows, &mut sinks, &files, &watch).unwrap();
    let warnings = watch.warnings.lock().unwrap().clone();
    assert!(warnings.len() == 1 && warnings[0].contains("cannot be saved"), "{warnings:?}");
}

/// A link in the place of the file is replaced, and its target stays as it is. A run that finishes leaves no states.
#[test]
fn saving_follows_no_link() {
    let tiny = tiny(Kind::Llama);
    let model = tiny.random(2).model();
    let recipe = recipe("awq", "w4a16-g32-asym");
    let windows = windows(tiny.vocab, 4, 40, 3);
    let plans = Plan::all(&model, &recipe).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let [path, other] = ["states.safetensors", "other"].map(|name| directory.path().join(name));
    std::fs::write(&other, "kept").unwrap();
    std::os::unix::fs::symlink(&other, directory.path().join("states.safetensors.new")).unwrap();
    let watch = Watch::default();
    run(&model, &plans, &windows, &mut [Resumable::new(&plans[0])], &saved(&path, None), &watch).unwrap();
    assert!(watch.warnings.lock().unwrap().is_empty() && watch.count("save") > 0);
    assert_eq!(std::fs::read_to_string(&other).unwrap(), "kept");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn a_budget_decides_where_states_are() {
    let tiny = Tiny { hidden: 256, intermediate: 512, ..tiny(Kind::Llama) };
    let model = tiny.random(2).model();
    for method in ["awq", "gptq", "awq-gptq", "smoothquant", "qoq"] {
        let scheme = match method {
            "smoothquant" => "w8a8-channel-sym-static",
            "qoq" => "w4a8-g32",
            _ => "w4a16-g32-sym",
        };
        let mut recipe = recipe(method, scheme);
        recipe.sampling.samples = 4096;
        let model = recipe.prepared(tiny.random(2).model()).unwrap();
        let plans = Plan::all(&model, &recipe).unwrap();
        let memory = Plan::peak_memory(&plans, &model);
        assert_eq!(Plan::residence(&plans, &model, memory, false), Ok(Residence::Memory), "{method}");
        // Channel maxima are gathered in the float model, whose states some methods do not need otherwise.
        let with_maxima = Plan::residence(&plans, &model, memory, true);
        assert_eq!(
            with_maxima == Ok(Residence::Memory),
            method == "smoothquant" || method == "qoq",
            "{method}"
        );
        let smallest = Plan::residence(&plans, &model, 0, false).unwrap_err();
        assert!(smallest < memory, "{method}: {smallest} of {memory}");
        assert!(Plan::residence(&plans, &model, smallest - 1, false).is_err(), "{method}");
        for budget in [smallest, (smallest + memory) / 2, memory - 1] {
            let residence = Plan::residence(&plans, &model, budget, false).unwrap();
            let Residence::Files { round_bytes, .. } = residence else {
                panic!("{method}: in memory at {budget}")
            };
            assert!(round_bytes > 0);
            let peak = Plan::peak_memory_in(&plans, &model, residence);
            assert!(peak <= budget, "{method}: {peak} of {budget}");
            // At least two copies of the states are in files.
            let states = 4096 * 512 * 256 * 4;
            assert!(Plan::scratch_bytes(&plans, &model, residence) >= 2 * states, "{method}");
        }
    }
    // A plan without a calibration text keeps nothing in files.
    let plans = Plan::all(&model, &recipe("rtn", "w4a16-g32-sym")).unwrap();
    let memory = Plan::peak_memory(&plans, &model);
    assert_eq!(Plan::residence(&plans, &model, memory - 1, false), Err(memory));
    assert_eq!(Plan::scratch_bytes(&plans, &model, Residence::Memory), 0);
}
