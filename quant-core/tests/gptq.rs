//! GPTQ in the pipeline: every linear's codes match the solver's result for the linear's actual inputs, in the
//! quantized model or in the float one, and with planted outliers the loss is much smaller than with plain rounding.

use crate::common;

use std::collections::BTreeMap;

use candle_core::Tensor;
use common::{Checkpoint, Kind, Quantized, Tiny, logits, mean_divergence, recipe, run};
use quant_core::calibrate::{BatchLayout, HiddenStates, TokenWindows};
use quant_core::checkpoint::MemorySink;
use quant_core::model::{Block, Model, NodeId, Tap, TokenRows, WeightBody};
use quant_core::pipeline::{Job, quantize_job};
use quant_core::quantize::SourceRows;
use quant_core::quantize::gptq::{ActOrder, Factor, GptqSettings, Hessian, solve};
use quant_core::recipe::{Plan, Recipe};
use quant_core::round::LayerInputs;
use quant_core::{CancelToken, Category, Error, Result, Silent, TensorSink, TensorSource};

fn tiny() -> Tiny {
    Tiny { hidden: 128, intermediate: 256, head_dim: 32, vocab: 128, ..Tiny::default() }
}

fn gptq(scheme: &str, gptq: GptqSettings) -> Recipe {
    recipe("gptq", scheme).with_settings(gptq)
}

fn quantized(checkpoint: &Checkpoint, recipe: &Recipe, windows: &TokenWindows) -> Quantized {
    run(&checkpoint.model(), &checkpoint.tiny.config(), recipe, Some(windows))
}

/// The Hessian of every linear's input, by definition.
struct Watch {
    layout: BatchLayout,
    hessians: BTreeMap<NodeId, Hessian>,
}

impl Tap for Watch {
    fn linear_input(&mut self, linear: NodeId, x: &Tensor, tokens: TokenRows<'_>) -> Result<()> {
        let k = x.dims3()?.2;
        let rows = x.flatten_all()?.to_vec1::<f32>()?;
        let hessian = self.hessians.entry(linear).or_insert_with(|| Hessian::new(k).unwrap());
        for (_, row) in tokens.iter().zip(rows.chunks(k)).filter(|(token, _)| self.layout.counts(*token)) {
            hessian.add(row);
        }
        Ok(())
    }
}

fn hessians(block: &Block, states: &mut HiddenStates) -> BTreeMap<NodeId, Hessian> {
    let mut watch = Watch { layout: states.layout().clone(), hessians: BTreeMap::new() };
    states.advance_watched(block, &CancelToken::new(), &mut watch).unwrap();
    watch.hessians.values_mut().for_each(Hessian::finish);
    watch.hessians
}

fn holds(checkpoint: &Checkpoint, windows: &TokenWindows, settings: GptqSettings, scheme: &str) {
    let float = checkpoint.model();
    let recipe = gptq(scheme, settings);
    let result = quantized(checkpoint, &recipe, windows);
    let written = result.model();
    let rope = float.rope(windows.length()).unwrap();
    let mut states = HiddenStates::embed(&float, windows).unwrap();
    for layer in 0..checkpoint.tiny.layers {
        let (exact, rounded) = (float.block(layer, &rope).unwrap(), written.block(layer, &rope).unwrap());
        // A linear's input depends only on earlier linears, and all of those are quantized in the result.
        let runs = match settings.inputs {
            LayerInputs::Float => &exact,
            _ => &rounded,
        };
        for (node, hessian) in hessians(runs, &mut states) {
            let name = exact.graph().name(node).to_owned();
            let weight = exact.linear(node).weight();
            let values = weight.to_f32().unwrap();
            let WeightBody::Quantized(found) = &**rounded.linear(node).weight() else {
                assert!(!exact.graph().nodes()[node].op.is_quantizable(), "{name} is float");
                continue;
            };
            let group_size = found.scheme.granularity.group_size(weight.shape()[1]);
            let columns = settings.act_order.columns(&hessian.diagonal(), group_size);
            let factor = Factor::new(&hessian, columns, settings.damping).unwrap();
            let rows = SourceRows::Floats(&values);
            let expected =
                solve(rows, weight.shape(), found.scheme, found.scale_dtype, None, &factor, settings)
                    .unwrap();
            assert!(expected.tensor == *found, "{settings:?}: codes of {name} in block {layer}");
            let report =
                result.report.tensors.iter().find(|t| t.tensor.contains(&format!(".{layer}.{name}.")));
            let record = report.unwrap().gptq.as_ref().unwrap();
            assert_eq!((record.loss, record.damping), (expected.loss, factor.damping()), "{name}");
        }
    }
}

#[test]
fn linears_are_solved_on_the_inputs_that_they_have() {
    let checkpoint = tiny().random(3);
    let windows = common::windows(128, 5, 48, 1);
    for inputs in [LayerInputs::Quantized, LayerInputs::Float] {
        for act_order in [ActOrder::None, ActOrder::StaticGroups, ActOrder::GroupAware] {
            let settings = GptqSettings { inputs, act_order, ..GptqSettings::default() };
            holds(&checkpoint, &windows, settings, "w4a16-g32-asym");
        }
        let settings = GptqSettings { inputs, damping: 0.03, ..GptqSettings::default() };
        holds(&checkpoint, &common::masked_windows(128, 5, 48, 2), settings, "w3a16-g64-sym");
    }
    for inputs in [LayerInputs::Quantized, LayerInputs::Float] {
        let settings = GptqSettings { inputs, ..GptqSettings::default() };
        let checkpoint = Tiny { family: Kind::Mixtral, intermediate: 128, ..tiny() }.random(6);
        holds(&checkpoint, &common::masked_windows(128, 5, 48, 2), settings, "w4a16-g32-asym");
    }
    // A batch in several pieces, and windows longer than a piece.
    let small = Tiny { hidden: 32, intermediate: 64, head_dim: 16, layers: 1, ..tiny() };
    let settings = GptqSettings::default();
    holds(&small.random(4), &common::windows(128, 50, 64, 3), settings, "w4a16-g32-sym");
}

#[test]
fn less_is_lost_than_by_rounding() {
    let tiny = tiny();
    let mut checkpoint = tiny.random(5);
    for layer in 0..tiny.layers {
        let name = |module: &str| format!("model.layers.{layer}.{module}.weight");
        let readers = [name("mlp.gate_proj"), name("mlp.up_proj")];
        let readers: Vec<&str> = readers.iter().map(String::as_str).collect();
        checkpoint.plant(&name("post_attention_layernorm"), &readers, &[3, 40, 77, 120], 32.0);
    }
    let (windows, others) = (common::windows(128, 40, 60, 1), common::windows(128, 6, 60, 2));
    let exact = logits(&checkpoint.model(), &others);
    let lost = |recipe: &Recipe| {
        mean_divergence(&exact, &logits(&quantized(&checkpoint, recipe, &windows).model(), &others), 128)
    };
    let rtn = lost(&recipe("rtn", "w3a16-g32"));
    let with_gptq = lost(&gptq("w3a16-g32", GptqSettings::default()));
    assert!(with_gptq < 0.7 * rtn, "{with_gptq} with GPTQ, {rtn} without");
}

/// A sink that may be unable to read its data back. It may cancel a token after a number of commits.
struct Forgetful {
    inner: MemorySink,
    records: BTreeMap<String, serde_json::Value>,
    stop: Option<(CancelToken, usize)>,
    reads_back: bool,
}

impl TensorSink for Forgetful {
    fn is_complete(&self, name: &str) -> bool {
        self.inner.is_complete(name)
    }

    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        self.inner.write(name, offset, bytes)
    }

    fn remember(&mut self, key: &str, value: &serde_json::Value) -> Result<()> {
        self.records.insert(key.to_owned(), value.clone());
        Ok(())
    }

    fn recall(&self, key: &str) -> Option<serde_json::Value> {
        self.records.get(key).cloned()
    }

    fn read_back(&self, name: &str) -> Result<Option<Vec<u8>>> {
        if self.reads_back { self.inner.read_back(name) } else { Ok(None) }
    }

    fn commit(&mut self) -> Result<()> {
        self.inner.commit()?;
        if let Some((cancel, commits)) = &self.stop
            && self.inner.commits() == *commits
        {
            cancel.cancel();
        }
        Ok(())
    }
}

#[test]
fn a_run_resumes_from_any_block_whether_or_not_its_sink_reads_back() {
    let checkpoint = Tiny { layers: 3, ..tiny() }.random(6);
    let windows = common::windows(128, 4, 40, 1);
    let model: Model = checkpoint.model();
    for method in ["gptq", "awq-gptq"] {
        for inputs in [LayerInputs::Quantized, LayerInputs::Float] {
            let gptq = GptqSettings { inputs, ..GptqSettings::default() };
            let recipe = recipe(method, "w4a16-g32-asym").with_settings(gptq);
            let whole = quantized(&checkpoint, &recipe, &windows).source;
            let plan = Plan::new(&model, &recipe, recipe.containers[0]).unwrap();
            for (commits, reads_back) in [(2, true), (3, true), (2, false), (4, true)] {
                let cancel = CancelToken::new();
                let mut sink = Forgetful {
                    inner: MemorySink::new(plan.outputs()).unwrap(),
                    records: BTreeMap::new(),
                    stop: Some((cancel.clone(), commits)),
                    reads_back,
                };
                let job = Job {
                    model: &model,
                    plan: &plan,
                    windows: Some(&windows),
                    maxima: None,
                    searches: None,
                    observer: &Silent,
                    cancel: &cancel,
                };
                if let Err(error) = quantize_job(&job, &mut sink) {
                    assert_eq!(error.category(), Category::Interrupted, "{error}");
                    sink.stop = None;
                    let cancel = CancelToken::new();
                    quantize_job(&Job { cancel: &cancel, ..job }, &mut sink).unwrap();
                }
                let source = sink.inner.into_source().unwrap();
                assert!(source == whole, "{method} {inputs:?} after {commits} commits");
            }
        }
    }
}

#[test]
fn non_finite_activations_are_reported_with_their_linear() {
    let mut checkpoint = tiny().random(7);
    checkpoint.values("model.layers.0.mlp.up_proj.weight").iter_mut().for_each(|w| *w *= 1e30);
    checkpoint.values("model.layers.0.mlp.gate_proj.weight").iter_mut().for_each(|w| *w = w.abs() * 1e30);
    let tiny = Tiny { dtype: quant_core::checkpoint::Dtype::F32, ..checkpoint.tiny.clone() };
    let checkpoint = Checkpoint { tiny, ..checkpoint };
    let model = checkpoint.model();
    let windows = common::windows(128, 2, 16, 1);
    for inputs in [LayerInputs::Quantized, LayerInputs::Float] {
        let recipe = gptq("w4a16-g32", GptqSettings { inputs, ..GptqSettings::default() });
        let plan = Plan::new(&model, &recipe, recipe.containers[0]).unwrap();
        let mut sink = MemorySink::new(plan.outputs()).unwrap();
        let cancel = CancelToken::new();
        let job = Job {
            model: &model,
            plan: &plan,
            windows: Some(&windows),
            maxima: None,
            searches: None,
            observer: &Silent,
            cancel: &cancel,
        };
        let error = quantize_job(&job, &mut sink).unwrap_err();
        assert_eq!(error.category(), Category::Numeric, "{error}");
        assert!(
            matches!(&error, Error::Calibration { tensor, .. } if tensor.contains("mlp.down_proj")),
            "{error}"
        );
        // Earlier linears may be written, but nothing of the block is committed.
        assert_eq!(sink.commits(), 1, "the embedding alone");
        assert!(plan.outputs().iter().all(|o| !sink.is_complete(&o.name) || !o.name.contains("down_proj")));
    }
}

#[test]
fn the_report_reads_back() {
    let checkpoint = tiny().random(8);
    let result =
        quantized(&checkpoint, &gptq("w4a16-g32", GptqSettings::default()), &common::windows(128, 3, 30, 1));
    let text = result.report.to_json().unwrap();
    let back: quant_core::pipeline::QuantReport = serde_json::from_str(&text).unwrap();
    assert_eq!(back, result.report);
    let names = result.source.names();
    assert!(names.iter().all(|n| !n.contains("g_idx")), "groups need no index");
}
