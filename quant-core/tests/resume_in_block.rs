//! A run that is killed inside a block continues there: tensors that were written are not written again, and GPTQ reads
//! the linears of finished stages back instead of rounding them again.

use crate::common;
use crate::sink;

use std::collections::BTreeSet;
use std::sync::Mutex;

use common::{Kind, Tiny, masked_windows, recipe};
use quant_core::calibrate::{ExpertSampling, Sampling, TokenWindows};
use quant_core::model::Model;
use quant_core::pipeline::{Job, QuantReport, quantize_job};
use quant_core::quantize::gptq::GptqSettings;
use quant_core::recipe::{Action, Plan, PlanEntry, Recipe};
use quant_core::round::LayerInputs;
use quant_core::{CancelToken, Error, Result, Silent, TensorSink};
use serde_json::Value;
use sink::Resumable;

const BLOCKS: usize = 2;

/// A sink of a run that is killed after a number of tensors, all of which are on the disk.
struct Killed<'a> {
    sink: &'a mut Resumable,
    left: usize,
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
        if self.left == 1 {
            self.sink.commit()?;
            self.cancel.cancel();
        }
        self.left = self.left.saturating_sub(1);
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

/// A sink that lists what is written and read back.
struct Listing {
    sink: Resumable,
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

struct Bench {
    model: Model,
    plan: Plan,
    windows: TokenWindows,
}

impl Bench {
    fn new(family: Kind, recipe: &Recipe) -> Self {
        let tiny = Tiny { family, layers: BLOCKS, ..Tiny::default() };
        let model = recipe.prepared(tiny.random(9).model()).unwrap();
        let plan = Plan::new(&model, recipe, recipe.containers[0]).unwrap();
        Self { model, plan, windows: masked_windows(tiny.vocab, 4, 40, 3) }
    }

    fn run(&self, sink: &mut dyn TensorSink, cancel: &CancelToken) -> Result<QuantReport> {
        let windows = Some(&self.windows).filter(|_| self.plan.needs_text());
        let job =
            Job { model: &self.model, plan: &self.plan, windows, maxima: None, observer: &Silent, cancel };
        quantize_job(&job, sink)
    }

    /// Runs until `tensors` entries of the plan are written; `None` if the run is complete before it sees the signal.
    fn killed(&self, tensors: usize) -> Option<Resumable> {
        let mut sink = Resumable::new(&self.plan);
        let cancel = CancelToken::new();
        let outcome = self.run(&mut Killed { sink: &mut sink, left: tensors, cancel: &cancel }, &cancel);
        match outcome {
            Ok(_) => None,
            Err(Error::Interrupted) => Some(sink.resumed()),
            Err(error) => panic!("{error}"),
        }
    }

    fn resumed(&self, sink: Resumable, exchanged: Option<[String; 2]>) -> (Listing, QuantReport) {
        let (written, read) = (BTreeSet::new(), Mutex::default());
        let mut listing = Listing { sink, written, read, exchanged };
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

/// A sink so slow that each tensor is committed. The run is interrupted after a number of tensors.
struct Slow<'a> {
    sink: &'a mut Resumable,
    left: usize,
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
        if value.is_object() {
            match self.left {
                0 => self.cancel.cancel(),
                1 => std::thread::sleep(std::time::Duration::from_millis(1100)),
                _ => {}
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
    for (method, scheme) in [("gptq", "w4a16-g32-sym"), ("awq", "w4a16-g32-sym"), ("rtn", "w4a16-g32-sym")] {
        let recipe = recipe(method, scheme);
        let mut bench = Bench::new(Kind::Mixtral, &recipe);
        let gates = [0, 1].map(|layer| format!("model.layers.{layer}.block_sparse_moe.gate.weight"));
        let before = bench.plan.entries.iter().take_while(|entry| entry.layer.is_none()).count();
        let (mut sink, cancel) = (Resumable::new(&bench.plan), CancelToken::new());
        let outcome = bench.run(&mut Slow { sink: &mut sink, left: before + 3, cancel: &cancel }, &cancel);
        assert!(matches!(outcome, Err(Error::Interrupted)), "{method}");
        let begun = sink.resumed();
        assert!((1..bench.linears(0).count()).contains(&written(&bench, &begun)), "{method}");
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
