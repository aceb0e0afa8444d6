//! A run that is killed inside a block continues there: tensors that were written are not written again, and GPTQ reads
//! the linears of finished stages back instead of rounding them again.

use crate::common;
use crate::sink;

use std::collections::BTreeSet;
use std::sync::Mutex;

use common::{Kind, Tiny, masked_windows, recipe};
use quant_core::calibrate::{ExpertSampling, Sampling, Spill, TokenWindows};
use quant_core::digest::sha256_hex;
use quant_core::model::Model;
use quant_core::pipeline::{Job, QuantReport, StateFiles, quantize_each_with};
use quant_core::quantize::gptq::GptqSettings;
use quant_core::recipe::{Action, Plan, PlanEntry, Recipe};
use quant_core::round::LayerInputs;
use quant_core::transform::{Alpha, Automatic, SmoothSettings};
use quant_core::{CancelToken, Error, Result, Silent, TensorSink};
use serde_json::{Value, json};
use sink::Resumable;
use tempfile::TempDir;

const BLOCKS: usize = 2;

/// A sink of a run that is killed after a number of tensors or findings, all of which are on the disk.
struct Killed<'a> {
    sink: &'a mut Resumable,
    left: usize,
    counts_tensors: bool,
    cancel: &'a CancelToken,
}

impl TensorSink for Killed<'_> {
    fn is_complete(&self, name: &str) -> bool {
        self.sink.is_complete(name)
    }

    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        self.sink.write(name, offset, bytes)
    }

    fn remember(&mut self, key: &str, value: &Value) -> Result<()> {
        self.sink.remember(key, value)?;
        // Reports of tensors are objects.
        if value.is_object() == self.counts_tensors && !value.is_null() {
            if self.left == 1 {
                self.sink.commit()?;
                self.cancel.cancel();
            }
            self.left = self.left.saturating_sub(1);
        }
        Ok(())
    }

    fn recall(&self, key: &str) -> Option<Value> {
        self.sink.recall(key)
    }

    fn read_back(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.sink.read_back(name)
    }

    fn commit(&mut self) -> Result<()> {
        // Nothing reaches the disk after the kill.
        if self.left > 0 { self.sink.commit() } else { Ok(()) }
    }
}

/// A sink that lists what is found, written and read back.
struct Listing {
    sink: Resumable,
    found: BTreeSet<String>,
    written: BTreeSet<String>,
    read: Mutex<BTreeSet<String>>,
    /// Tensors whose bytes are exchanged when they are read back.
    exchanged: Option<[String; 2]>,
}

impl TensorSink for Listing {
    fn is_complete(&self, name: &str) -> bool {
        self.sink.is_complete(name)
    }

    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        self.written.insert(name.to_owned());
        self.sink.write(name, offset, bytes)
    }

    fn remember(&mut self, key: &str, value: &Value) -> Result<()> {
        if is_finding(key) && !value.is_null() {
            self.found.insert(key.to_owned());
        }
        self.sink.remember(key, value)
    }

    fn recall(&self, key: &str) -> Option<Value> {
        self.sink.recall(key)
    }

    fn read_back(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.read.lock().unwrap().insert(name.to_owned());
        let other = self.exchanged.as_ref().and_then(|[a, b]| match name {
            _ if name == a => Some(b),
            _ if name == b => Some(a),
            _ => None,
        });
        self.sink.read_back(other.map_or(name, String::as_str))
    }

    fn commit(&mut self) -> Result<()> {
        self.sink.commit()
    }
}

fn is_finding(key: &str) -> bool {
    key.starts_with("search in span ")
}

/// The keys of what searches have found.
fn findings(sink: &Resumable) -> BTreeSet<String> {
    sink.records.keys().filter(|key| is_finding(key)).cloned().collect()
}

struct Bench {
    model: Model,
    plan: Plan,
    windows: TokenWindows,
    /// The directory of hidden states, if the experts of a block are processed one at a time.
    apart: Option<TempDir>,
}

impl Bench {
    fn new(family: Kind, recipe: &Recipe) -> Self {
        let tiny = Tiny { family, layers: BLOCKS, ..Tiny::default() };
        let model = recipe.prepared(tiny.random(9).model()).unwrap();
        let plan = Plan::new(&model, recipe, recipe.containers[0]).unwrap();
        Self { model, plan, windows: masked_windows(tiny.vocab, 4, 40, 3), apart: None }
    }

    fn run(&self, sink: &mut dyn TensorSink, cancel: &CancelToken) -> Result<QuantReport> {
        let windows = Some(&self.windows).filter(|_| self.plan.needs_text());
        let job = Job {
            model: &self.model,
            plan: &self.plan,
            windows,
            maxima: None,
            searches: None,
            observer: &Silent,
            cancel,
        };
        let spill = self.apart.as_ref().map(|apart| Spill::new(apart.path(), 0).with_experts_apart(true));
        let files = StateFiles { spill, ..StateFiles::default() };
        Ok(quantize_each_with(&[job], vec![sink], &files)?.remove(0))
    }

    /// Runs until `tensors` entries of the plan are written; `None` if the run is complete before it sees the signal.
    fn killed(&self, tensors: usize) -> Option<Resumable> {
        self.killed_after(tensors, true)
    }

    /// Runs until that many tensors are written, or things found by searches.
    fn killed_after(&self, left: usize, counts_tensors: bool) -> Option<Resumable> {
        let mut sink = Resumable::new(&self.plan);
        let cancel = CancelToken::new();
        let mut killed = Killed { sink: &mut sink, left, counts_tensors, cancel: &cancel };
        let outcome = self.run(&mut killed, &cancel);
        match outcome {
            Ok(_) => None,
            Err(Error::Interrupted) => Some(sink.resumed()),
            Err(error) => panic!("{error}"),
        }
    }

    fn resumed(&self, sink: Resumable, exchanged: Option<[String; 2]>) -> (Listing, QuantReport) {
        let (found, written, read) = (BTreeSet::new(), BTreeSet::new(), Mutex::default());
        let mut listing = Listing { sink, found, written, read, exchanged };
        let report = self.run(&mut listing, &CancelToken::new()).unwrap();
        (listing, report)
    }

    /// The linears of a block that are quantized.
    fn linears(&self, layer: usize) -> impl Iterator<Item = &PlanEntry> {
        self.plan.entries.iter().filter(move |entry| {
            entry.layer == Some(layer) && matches!(entry.action, Action::Quantize { .. })
        })
    }
}

fn is_written(sink: &Resumable, entry: &PlanEntry) -> bool {
    sink.recall(&entry.tensor).is_some() && entry.outputs.iter().all(|o| sink.is_complete(&o.name))
}

fn with(settings: GptqSettings) -> Recipe {
    recipe("gptq", "w4a16-g32-sym").with_settings(settings)
}

fn cases() -> Vec<(&'static str, Recipe)> {
    let float = GptqSettings { inputs: LayerInputs::Float, ..GptqSettings::default() };
    let spans = GptqSettings { span_blocks: Some(1), ..GptqSettings::default() };
    let all = |experts: ExpertSampling, recipe: Recipe| Recipe {
        sampling: Sampling { experts, ..recipe.sampling },
        ..recipe
    };
    let floor = ExpertSampling { floor: 60, ..ExpertSampling::default() };
    let gptq = || recipe("gptq", "w4a16-g32-asym");
    vec![
        ("gptq", gptq()),
        ("gptq, float inputs", with(float)),
        ("gptq, spans", with(spans)),
        ("gptq, floor", all(floor, gptq())),
        ("gptq, floor, float inputs", all(floor, with(float))),
        ("awq-gptq", recipe("awq-gptq", "w4a16-g32-sym")),
        ("rtn", recipe("rtn", "w4a16-g32-sym")),
        ("awq", recipe("awq", "w4a16-g32-sym")),
    ]
}

/// Wherever the run is killed, the resumed run gives the same bytes and the same report.
#[test]
fn a_killed_run_continues_inside_the_block() {
    for family in [Kind::Mixtral, Kind::Qwen3Moe(true), Kind::Llama] {
        for (what, recipe) in cases() {
            if family == Kind::Llama && what.contains("floor") {
                continue;
            }
            let bench = Bench::new(family, &recipe);
            let mut whole = Resumable::new(&bench.plan);
            let expected = bench.run(&mut whole, &CancelToken::new()).unwrap();
            let whole = whole.tensors();
            let entries = bench.plan.entries.len();
            let step = if what == "gptq" && family == Kind::Mixtral { 1 } else { 3 };
            let (mut inside, mut skipped) = (0, 0);
            for tensors in (1..entries).step_by(step) {
                let Some(killed) = bench.killed(tensors) else { continue };
                let what = format!("{what} of {family:?}, killed after {tensors} of {entries} tensors");
                let written: Vec<_> =
                    bench.plan.entries.iter().filter(|entry| is_written(&killed, entry)).collect();
                assert!(written.len() >= tensors, "{what}: {}", written.len());
                let partial = (0..BLOCKS).filter(|&layer| {
                    let done = bench.linears(layer).filter(|entry| is_written(&killed, entry)).count();
                    0 < done && done < bench.linears(layer).count()
                });
                inside += partial.count();
                let kept: BTreeSet<String> = written
                    .iter()
                    .flat_map(|entry| &entry.outputs)
                    .map(|output| output.name.clone())
                    .collect();
                let (listing, report) = bench.resumed(killed, None);
                let again: Vec<_> = listing.written.intersection(&kept).collect();
                assert!(again.is_empty(), "{what}: written again: {again:?}");
                skipped += listing.read.lock().unwrap().len();
                assert_eq!(report, expected, "{what}");
                assert!(listing.sink.tensors() == whole, "{what}: different bytes");
            }
            assert!(inside > 2, "{what} of {family:?}: only {inside} runs were killed inside a block");
            let reads = what.starts_with("gptq") || what == "awq-gptq";
            assert_eq!(skipped > 0, reads, "{what} of {family:?}");
        }
    }
}

/// Experts that are finished are not rounded again: the experts after them see the weights that were written.
#[test]
fn finished_experts_are_read_back() {
    let bench = Bench::new(Kind::Mixtral, &recipe("gptq", "w4a16-g32-sym"));
    let names = |expert: usize| {
        let prefix = format!("model.layers.0.block_sparse_moe.experts.{expert}.");
        let parts = ["w1", "w3", "w2"].map(|part| format!("{prefix}{part}.weight_packed"));
        parts.into_iter().collect::<BTreeSet<String>>()
    };
    let is_done = |sink: &Resumable, expert: usize| names(expert).iter().all(|name| sink.is_complete(name));
    let killed = (1..).find_map(|tensors| bench.killed(tensors).filter(|sink| is_done(sink, 1))).unwrap();
    assert!(!is_done(&killed, 2));
    let (plain, _) = bench.resumed(killed.clone(), None);
    let read = plain.read.lock().unwrap().clone();
    for expert in 0..2 {
        assert!(names(expert).is_subset(&read), "{expert}: {read:?}");
        assert!(names(expert).is_disjoint(&plain.written), "{expert}");
    }
    assert!(names(2).is_disjoint(&read) && names(2).is_subset(&plain.written));

    // With the weights of other experts, the next block sees different inputs.
    let exchanged = [0, 1].map(|e| format!("model.layers.0.block_sparse_moe.experts.{e}.w2.weight_packed"));
    let (other, _) = bench.resumed(killed, Some(exchanged));
    let differs = |layer: usize| {
        let mut outputs = bench.linears(layer).flat_map(|entry| &entry.outputs);
        outputs.any(|output| plain.sink.sink.bytes(&output.name) != other.sink.sink.bytes(&output.name))
    };
    assert!(!differs(0) && differs(1));
}

fn searched() -> Vec<(&'static str, Recipe, bool)> {
    let automatic = SmoothSettings { alpha: Some(Alpha::Auto(Automatic::Auto)), ..SmoothSettings::default() };
    let smooth = recipe("smoothquant", "w8a8-channel-sym").with_settings(automatic);
    vec![
        ("awq", recipe("awq", "w4a16-g32-asym"), false),
        ("awq", recipe("awq", "w4a16-g32-asym"), true),
        ("awq-gptq", recipe("awq-gptq", "w4a16-g32-sym"), false),
        ("smoothquant", smooth.clone(), false),
        ("smoothquant", smooth, true),
    ]
}

/// Wherever a search is killed, what it has found is used by the resumed run.
#[test]
fn finished_searches_are_not_repeated() {
    for family in [Kind::Mixtral, Kind::Qwen3Moe(true), Kind::Llama] {
        for (what, recipe, apart) in searched() {
            let mut bench = Bench::new(family, &recipe);
            bench.apart = apart.then(|| tempfile::tempdir().unwrap());
            let (whole, expected) = bench.resumed(Resumable::new(&bench.plan), None);
            assert!(findings(&whole.sink).is_empty(), "{what} of {family:?}: findings are left");
            let bytes = whole.sink.tensors();
            let all = whole.found.len();
            assert!(all > 3, "{what} of {family:?}: {all} findings");
            let mut used = 0;
            for left in (1..=all).step_by((all / 6).max(1)) {
                let Some(killed) = bench.killed_after(left, false) else { continue };
                let case = format!("{what} of {family:?}, {apart}, killed after {left} of {all} findings");
                let kept = findings(&killed);
                used += kept.len();
                let (listing, report) = bench.resumed(killed, None);
                assert!(listing.found.is_disjoint(&kept), "{case}: found again");
                assert!(kept.is_subset(&whole.found) && listing.found.is_subset(&whole.found), "{case}");
                assert!(findings(&listing.sink).is_empty(), "{case}: findings are left");
                assert_eq!(report, expected, "{case}");
                assert!(listing.sink.tensors() == bytes, "{case}: different bytes");
            }
            assert!(used > 3, "{what} of {family:?}: only {used} findings were kept");
        }
    }
}

/// What is kept counts, unless it is damaged.
#[test]
fn damaged_findings_are_searched_again() {
    let bench = Bench::new(Kind::Mixtral, &recipe("awq", "w4a16-g32-asym"));
    let (whole, _) = bench.resumed(Resumable::new(&bench.plan), None);
    let killed = bench.killed_after(whole.found.len() / 2 - 1, false).unwrap();
    let bytes = whole.sink.tensors();
    let is_scaled = |value: &Value| value[1]["scales"].is_string();
    let is_clipped = |value: &Value| value[1]["choices"].is_string();
    for (field, is_meant) in [("scales", &is_scaled as &dyn Fn(&Value) -> bool), ("choices", &is_clipped)] {
        let found = killed.records.iter().find(|(key, value)| is_finding(key) && is_meant(value));
        let key = found.unwrap_or_else(|| panic!("no {field} were found")).0.clone();
        for (intact, restored) in [(false, false), (true, true)] {
            let mut changed = killed.clone();
            let value = changed.records.get_mut(&key).unwrap();
            let text = value[1][field].as_str().unwrap().to_owned();
            let other = match field {
                // Twice the first scale: the exponent grows by one.
                "scales" => {
                    format!("{:08x}{}", u32::from_str_radix(&text[..8], 16).unwrap() + (1 << 23), &text[8..])
                }
                _ => text.chars().map(|choice| if choice == '0' { '9' } else { '0' }).collect(),
            };
            value[1][field] = json!(other);
            if intact {
                value[0] = json!(sha256_hex(value[1].to_string()));
            }
            let (listing, _) = bench.resumed(changed, None);
            assert_eq!(listing.found.contains(&key), !restored, "{field}");
            assert_eq!(listing.sink.tensors() == bytes, !restored, "{field}");
        }
    }
}

/// A sink that is so slow once that a part of the block is committed. The run is interrupted after a number of tensors
/// or findings.
struct Slow<'a> {
    sink: &'a mut Resumable,
    left: usize,
    /// The number of tensors or findings after the commit.
    after: usize,
    counts_tensors: bool,
    cancel: &'a CancelToken,
}

impl TensorSink for Slow<'_> {
    fn is_complete(&self, name: &str) -> bool {
        self.sink.is_complete(name)
    }

    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        self.sink.write(name, offset, bytes)
    }

    fn remember(&mut self, key: &str, value: &Value) -> Result<()> {
        self.sink.remember(key, value)?;
        // Reports of tensors are objects.
        let counts = if self.counts_tensors { value.is_object() } else { is_finding(key) };
        if counts {
            if self.left == 0 {
                self.cancel.cancel();
            } else if self.left == self.after + 1 {
                std::thread::sleep(std::time::Duration::from_millis(1100));
            }
            self.left = self.left.saturating_sub(1);
        }
        Ok(())
    }

    fn recall(&self, key: &str) -> Option<Value> {
        self.sink.recall(key)
    }

    fn read_back(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.sink.read_back(name)
    }

    fn commit(&mut self) -> Result<()> {
        self.sink.commit()
    }
}

/// Finished linears depend on all weights of their block, also on those that are written later.
#[test]
fn a_block_whose_other_weights_have_changed_is_not_continued() {
    let written =
        |bench: &Bench, sink: &Resumable| bench.linears(0).filter(|entry| is_written(sink, entry)).count();
    for (method, counts_tensors) in [("gptq", true), ("awq", true), ("awq", false), ("rtn", true)] {
        let recipe = recipe(method, "w4a16-g32-sym");
        let mut bench = Bench::new(Kind::Mixtral, &recipe);
        let gates = [0, 1].map(|layer| format!("model.layers.{layer}.block_sparse_moe.gate.weight"));
        let before = bench.plan.entries.iter().take_while(|entry| entry.layer.is_none()).count();
        let (mut sink, cancel) = (Resumable::new(&bench.plan), CancelToken::new());
        let left = if counts_tensors { before + 3 } else { 3 };
        let mut slow = Slow { sink: &mut sink, left, after: 0, counts_tensors, cancel: &cancel };
        let outcome = bench.run(&mut slow, &cancel);
        assert!(matches!(outcome, Err(Error::Interrupted)), "{method}");
        let begun = sink.resumed();
        match counts_tensors {
            true => assert!((1..bench.linears(0).count()).contains(&written(&bench, &begun)), "{method}"),
            false => assert!(written(&bench, &begun) == 0 && findings(&begun).len() > 1, "{method}"),
        }
        assert!(begun.recall(&gates[0]).is_none(), "{method}");
        for (at, gate) in gates.iter().enumerate() {
            let tiny = Tiny { family: Kind::Mixtral, layers: BLOCKS, ..Tiny::default() };
            let mut changed = tiny.random(9);
            changed.values(gate)[0] += 1.0;
            bench.model = recipe.prepared(changed.model()).unwrap();
            let mut sink = begun.clone();
            let outcome = bench.run(&mut sink, &CancelToken::new());
            if at == 0 && method != "rtn" {
                let refused = |e: &Error| matches!(e, Error::InputChanged { tensor } if tensor == gate);
                assert!(outcome.as_ref().is_err_and(refused), "{method}: {:?}", outcome.err());
                // Nothing was added that depends on the changed weight.
                let kept = sink.resumed();
                assert_eq!(written(&bench, &kept), written(&bench, &begun), "{method}");
            } else {
                assert!(outcome.is_ok(), "{method}, {gate}: {:?}", outcome.err());
            }
        }
    }
}

/// What an interrupted search keeps after the last commit also depends on weights that were read since. Whichever weight
/// has changed, the run is refused, or its output is that of a run on the changed weights.
#[test]
fn findings_after_the_last_commit_are_bound_to_their_weights() {
    let recipe = recipe("awq", "w4a16-g32-sym");
    let tiny = Tiny { family: Kind::Mixtral, layers: BLOCKS, ..Tiny::default() };
    for (left, after, apart) in [(3, 2, true), (9, 6, true), (9, 6, false)] {
        let what = format!("{after} of {left} findings after the commit, {apart}");
        let mut bench = Bench::new(Kind::Mixtral, &recipe);
        bench.apart = apart.then(|| tempfile::tempdir().unwrap());
        let (mut sink, cancel) = (Resumable::new(&bench.plan), CancelToken::new());
        let mut slow = Slow { sink: &mut sink, left, after, counts_tensors: false, cancel: &cancel };
        let outcome = bench.run(&mut slow, &cancel);
        assert!(matches!(outcome, Err(Error::Interrupted)), "{what}");
        let begun = sink.resumed();
        assert!(findings(&begun).len() > left - after, "{what}: {} findings", findings(&begun).len());
        let names: Vec<String> = bench.linears(0).map(|entry| entry.tensor.clone()).collect();
        let mut refused = 0;
        for name in &names {
            let mut changed = tiny.random(9);
            changed.values(name).iter_mut().step_by(3).for_each(|value| *value *= 3.0);
            bench.model = recipe.prepared(changed.model()).unwrap();
            let mut resumed = begun.clone();
            match bench.run(&mut resumed, &CancelToken::new()) {
                Err(Error::InputChanged { .. }) => refused += 1,
                Err(error) => panic!("{what}, {name}: {error}"),
                Ok(_) => {
                    let mut whole = Resumable::new(&bench.plan);
                    bench.run(&mut whole, &CancelToken::new()).unwrap();
                    assert!(resumed.tensors() == whole.tensors(), "{what}: a mix with the old {name}");
                }
            }
        }
        assert!(refused > 0, "{what}: no change was noticed");
    }
}
