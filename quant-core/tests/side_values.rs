//! Models whose blocks read more than the hidden states: per-layer inputs, and keys and values of an earlier block.
//! Both travel with the hidden states, whose width therefore changes from block to block.

use crate::common;
use crate::configs;

use std::collections::BTreeMap;

use common::{logits, recipe, relative_difference, run, windows};
use configs::{Case, cases};
use quant_core::calibrate::{HiddenStates, TokenWindows};
use quant_core::checkpoint::{Dtype, MemorySink};
use quant_core::model::Model;
use quant_core::pipeline::{Job, StateFiles, quantize_job, quantize_part};
use quant_core::recipe::{Plan, Recipe};
use quant_core::{CancelToken, Silent, TensorSource};
use serde_json::json;

const LENGTH: usize = 40;

fn small() -> Case {
    cases().into_iter().find(|case| case.name == "gemma4-small").unwrap()
}

/// Blocks that read another block's keys and values have no projections for them. If the file contains such
/// projections, they are not written.
#[test]
fn keys_that_nothing_reads_are_left_away() {
    let mut case = cases().into_iter().find(|case| case.name == "gemma4-small").unwrap();
    case.config.insert("use_double_wide_mlp".into(), json!(false));
    let shared = case.config.clone();
    // The same model without shared keys; its file holds the projections of all blocks.
    case.config.insert("num_kv_shared_layers".into(), json!(0));
    let source = case.random(Dtype::F32, 15).source().clone();
    let model = common::model(source.clone(), &shared);
    let written = run(&model, &shared, &recipe("rtn", "w4a16-g32-sym"), None);
    let has = |names: Vec<&str>, layer: usize, module: &str| {
        let prefix = format!("model.layers.{layer}.self_attn.{module}.");
        names.iter().any(|name| name.starts_with(&prefix))
    };
    for (layer, module) in (0..4).flat_map(|layer| ["k_proj", "v_proj", "k_norm"].map(|m| (layer, m))) {
        assert!(has(source.names(), layer, module), "{layer} {module}");
        assert_eq!(has(written.source.names(), layer, module), layer < 2, "{layer} {module}");
    }
    let ignored = written.config["quantization_config"]["ignore"].as_array().unwrap();
    let times = ignored.iter().filter(|name| **name == json!("model.per_layer_model_projection")).count();
    assert_eq!(times, 1, "{ignored:?}");
    let batch = windows(case.vocab(), 1, LENGTH, 16);
    let distance = relative_difference(&logits(&written.model(), &batch), &logits(&model, &batch));
    assert!(distance > 0.0 && distance < case.rounding, "{distance}");
}

fn values(states: &HiddenStates) -> Vec<f32> {
    states.values().read(0..states.values().len()).unwrap().into_owned()
}

/// The width may differ from block to block.
#[test]
fn states_are_as_wide_as_blocks_read_them() {
    let case = small();
    let (model, batch) = (case.random(Dtype::F32, 17), windows(case.vocab(), 3, LENGTH, 18));
    let architecture = model.architecture();
    // 64 hidden features; 32 input features for each remaining block; keys and values of 2 heads of 16, then of 32.
    let widths = [64 + 4 * 32, 64 + 3 * 32 + 64, 64 + 2 * 32 + 64 + 128, 64 + 32 + 128, 64];
    assert_eq!([0, 1, 2, 3, 4].map(|layer| architecture.state_width(layer)), widths);
    let (decoder, ropes) = (common::decoder(&model), model.rope(LENGTH).unwrap());
    let mut states = HiddenStates::embed(&model, &batch).unwrap();
    let inputs: Vec<&[u32]> = (0..3).map(|i| batch.window(i)).collect();
    let mut expected = decoder.embed(&inputs).unwrap();
    for (layer, width) in widths.into_iter().enumerate().take(architecture.layers) {
        assert_eq!(states.width(), width);
        assert_eq!(values(&states), common::flat(&expected), "before block {layer}");
        states.advance(&model.block(layer, &ropes).unwrap(), &CancelToken::new()).unwrap();
        expected = decoder.advance(layer, &expected, &mut quant_core::model::NoTap).unwrap();
    }
    assert_eq!(values(&states), common::flat(&expected));
}

/// The jobs pass on the states, including the values that travel with them.
#[test]
fn parts_make_the_whole() {
    let case = small();
    let (model, batch) = (case.random(Dtype::F32, 19), windows(case.vocab(), 4, LENGTH, 20));
    for recipe in [recipe("awq", "w4a16-g32-asym"), recipe("gptq", "w4a16-g32-sym")] {
        let whole = part(&model, &recipe, &batch, None);
        let directory = tempfile::tempdir().unwrap();
        let mut together = BTreeMap::new();
        for ends in [[0, 1], [1, 3], [3, 4]] {
            let at = |block: usize| directory.path().join(format!("states-{block}.safetensors"));
            let files = StateFiles {
                before: (ends[0] > 0).then(|| at(ends[0])).into_iter().collect(),
                after: (ends[1] < 4).then(|| at(ends[1])),
                depends_on: json!({ "model": "small" }),
                ..StateFiles::default()
            };
            together.extend(part(&model, &recipe, &batch, Some((ends, &files))));
        }
        assert!(together == whole, "{}: different bytes", recipe.method.name);
    }
}

fn part(
    model: &Model,
    recipe: &Recipe,
    windows: &TokenWindows,
    part: Option<([usize; 2], &StateFiles)>,
) -> BTreeMap<String, Vec<u8>> {
    let plan = Plan::new(model, recipe, recipe.containers[0]).unwrap();
    let plan = part.map_or_else(|| plan.clone(), |([from, to], _)| plan.part(from..to).unwrap());
    let mut sink = MemorySink::new(plan.outputs()).unwrap();
    let (observer, cancel) = (&Silent, &CancelToken::new());
    let job =
        Job { model, plan: &plan, windows: Some(windows), maxima: None, searches: None, observer, cancel };
    match part {
        Some((_, files)) => quantize_part(&job, &mut sink, files).unwrap(),
        None => quantize_job(&job, &mut sink).unwrap(),
    };
    let source = sink.into_source().unwrap();
    source.names().into_iter().map(|name| (name.to_owned(), source.read(name).unwrap())).collect()
}
