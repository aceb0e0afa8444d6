//! Jobs over parts of a model: together they write byte for byte what a single job writes, and states that do not
//! belong to a job are rejected.

use crate::common;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use common::{Kind, Tiny, masked_windows, recipe};
use quant_core::calibrate::TokenWindows;
use quant_core::checkpoint::MemorySink;
use quant_core::model::Model;
use quant_core::pipeline::{Job, QuantReport, StateFiles, quantize_job, quantize_part};
use quant_core::quantize::ScaleSearch;
use quant_core::quantize::gptq::GptqSettings;
use quant_core::recipe::{Pattern, Plan, Recipe};
use quant_core::round::LayerInputs;
use quant_core::transform::TransformSettings;
use quant_core::{CancelToken, Category, Error, Result, Silent, TensorSource};
use serde_json::{Value, json};

const BLOCKS: usize = 3;

type Written = (BTreeMap<String, Vec<u8>>, QuantReport);

fn tiny(family: Kind) -> Tiny {
    Tiny { family, layers: BLOCKS, ..Tiny::default() }
}

fn part(
    model: &Model,
    plan: &Plan,
    windows: &TokenWindows,
    blocks: Option<Range<usize>>,
    files: &StateFiles,
) -> Result<Written> {
    let plan = match blocks {
        Some(blocks) => plan.part(blocks)?,
        None => plan.clone(),
    };
    let mut sink = MemorySink::new(plan.outputs())?;
    let (observer, cancel) = (&Silent, &CancelToken::new());
    let job =
        Job { model, plan: &plan, windows: Some(windows), maxima: None, searches: None, observer, cancel };
    let report = match plan.blocks().len() {
        BLOCKS => quantize_job(&job, &mut sink)?,
        _ => quantize_part(&job, &mut sink, files)?,
    };
    let source = sink.into_source()?;
    let names = source.names().into_iter().map(|name| (name.to_owned(), source.read(name).unwrap()));
    Ok((names.collect(), report))
}

fn files(directory: &Path, before: usize, after: usize) -> StateFiles {
    let at = |block: usize| directory.join(format!("states-{block}.safetensors"));
    StateFiles {
        before: (before > 0).then(|| at(before)).into_iter().collect(),
        after: (after < BLOCKS).then(|| at(after)),
        depends_on: json!({ "model": "tiny" }),
        ..StateFiles::default()
    }
}

#[test]
fn parts_make_the_whole() {
    let float = GptqSettings { inputs: LayerInputs::Float, ..GptqSettings::default() };
    let spans = GptqSettings { span_blocks: Some(2), ..GptqSettings::default() };
    let cases: Vec<(Kind, Recipe)> = vec![
        (Kind::Llama, recipe("rtn", "w4a16-g32-sym")),
        (Kind::Llama, recipe("awq", "w4a16-g32-asym")),
        (Kind::Llama, recipe("gptq", "w4a16-g32-sym")),
        (Kind::Llama, recipe("gptq", "w4a16-g32-sym").with_settings(float)),
        (Kind::Llama, recipe("gptq", "w4a16-g32-sym").with_settings(spans)),
        (Kind::Qwen3, recipe("awq-gptq", "w4a16-g32-sym").with_settings(spans)),
        (Kind::Qwen3, recipe("awq-gptq", "w4a16-g32-sym")),
        (Kind::Llama, recipe("smoothquant", "w8a8-channel-sym-static")),
        (Kind::Mixtral, recipe("gptq", "w4a16-g32-sym")),
        (Kind::Qwen3Moe(true), recipe("awq", "w4a16-g32-sym")),
    ];
    for (family, recipe) in cases {
        let model = tiny(family).random(2).model();
        let windows = masked_windows(96, 4, 40, 3);
        let plan = Plan::new(&model, &recipe, recipe.containers[0]).unwrap();
        let (whole, reason) = part(&model, &plan, &windows, None, &StateFiles::default()).unwrap();
        for cuts in [vec![0, 1, 3], vec![0, 2, 3], vec![0, 1, 2, 3]] {
            let directory = tempfile::tempdir().unwrap();
            let (mut together, mut reports) = (BTreeMap::new(), Vec::new());
            for ends in cuts.windows(2) {
                let files = files(directory.path(), ends[0], ends[1]);
                let (tensors, report) =
                    part(&model, &plan, &windows, Some(ends[0]..ends[1]), &files).unwrap();
                for (name, bytes) in tensors {
                    assert!(together.insert(name.clone(), bytes).is_none(), "{name} is written twice");
                }
                reports.extend(report.tensors);
            }
            let name = plan.method.name.clone();
            assert!(together == whole, "{family:?}, {name}, {cuts:?}: different bytes");
            assert_eq!(reports, reason.tensors, "{family:?}, {name}, {cuts:?}");
        }
    }
}

#[test]
fn states_of_another_run_or_damaged_are_refused() {
    let model = tiny(Kind::Llama).random(2).model();
    let windows = masked_windows(96, 4, 40, 3);
    let recipe = recipe("gptq", "w4a16-g32-sym");
    let plan = Plan::new(&model, &recipe, recipe.containers[0]).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let first = files(directory.path(), 0, 1);
    part(&model, &plan, &windows, Some(0..1), &first).unwrap();
    let before = files(directory.path(), 1, BLOCKS);
    let path = before.before[0].clone();
    let run = |plan: &Plan, windows: &TokenWindows, blocks: Range<usize>, files: &StateFiles| {
        part(&model, plan, windows, Some(blocks), files).unwrap_err()
    };
    let refused = |error: Error, expected: &str| {
        let message = error.to_string();
        assert!(error.category() == Category::Input && message.contains(expected), "{message}");
        assert!(message.contains("states-1"), "{message}");
    };
    refused(run(&plan, &windows, 2..3, &before), "before_block");
    refused(run(&plan, &masked_windows(96, 4, 40, 4), 1..3, &before), "calibration");
    let other = StateFiles { depends_on: Value::Null, ..before.clone() };
    refused(run(&plan, &windows, 1..3, &other), "depends_on");
    let damped = recipe.clone().with_settings(GptqSettings { damping: 0.5, ..GptqSettings::default() });
    let damped = Plan::new(&model, &damped, damped.containers[0]).unwrap();
    refused(run(&damped, &windows, 1..3, &before), "damping");
    // Different grids in earlier blocks give different states of the quantized model, even if the grids of the
    // remaining blocks are the same.
    let wide = |pattern: &str| {
        let overrides = vec![(Pattern::new(pattern).unwrap(), "w8a16-g32".parse().unwrap())];
        let recipe = Recipe { overrides, ..recipe.clone() };
        Plan::new(&model, &recipe, recipe.containers[0]).unwrap()
    };
    refused(run(&wide("*.layers.0.*"), &windows, 1..3, &before), "grids");
    refused(run(&wide("*"), &windows, 1..3, &before), "grids");
    // Different scales on the same grids also give different states.
    let nvfp4 = |scale_search: ScaleSearch| {
        let recipe = common::recipe("gptq", "nvfp4a16");
        let settings = TransformSettings { scale_search, ..recipe.settings.clone() };
        let recipe = Recipe { settings, ..recipe };
        Plan::new(&model, &recipe, recipe.containers[0]).unwrap()
    };
    let other = tempfile::tempdir().unwrap();
    let first = files(other.path(), 0, 1);
    part(&model, &nvfp4(ScaleSearch::Amax), &windows, Some(0..1), &first).unwrap();
    let searched = run(&nvfp4(ScaleSearch::Sweep), &windows, 1..3, &files(other.path(), 1, BLOCKS));
    refused(searched, "scale_search");
    // A job that does not begin with the first block needs states.
    let missing = run(&plan, &windows, 1..3, &StateFiles::default());
    assert_eq!(missing.category(), Category::Usage);
    assert!(missing.to_string().contains("block 1"), "{missing}");

    let intact = std::fs::read(&path).unwrap();
    // Other builds and other instruction sets round differently.
    for (field, says) in [
        ("executable_blake3", "executable: is a different build"),
        ("instruction_set", "instruction set: was "),
        ("processor", "processor: was "),
    ] {
        let mut other = intact.clone();
        let key = format!("\"{field}\":\"");
        let at = other.windows(key.len()).position(|bytes| bytes == key.as_bytes()).unwrap() + key.len();
        other[at] = if other[at] == b'0' { b'1' } else { b'0' };
        std::fs::write(&path, &other).unwrap();
        refused(run(&plan, &windows, 1..3, &before), says);
    }
    let mut flipped = intact.clone();
    let middle = intact.len() / 2;
    flipped[middle] ^= 1;
    std::fs::write(&path, &flipped).unwrap();
    refused(run(&plan, &windows, 1..3, &before), "hash");
    for bytes in [&intact[..intact.len() - 1], &intact[..40], b"", b"not a safetensors file"] {
        std::fs::write(&path, bytes).unwrap();
        let error = run(&plan, &windows, 1..3, &before);
        assert_eq!(error.category(), Category::Input, "{error}");
    }
    std::fs::write(&path, &intact).unwrap();
    assert!(part(&model, &plan, &windows, Some(1..3), &before).is_ok());
}

#[test]
fn parts_lie_in_the_plan() {
    let model = tiny(Kind::Llama).random(2).model();
    let recipe = recipe("rtn", "w4a16-g32-sym");
    let plan = Plan::new(&model, &recipe, recipe.containers[0]).unwrap();
    for (start, end) in [(0, 0), (2, 1), (0, 4), (3, 4)] {
        let blocks = start..end;
        let message = plan.part(blocks.clone()).unwrap_err().to_string();
        assert!(message.contains("not a non-empty range within 0..3"), "{blocks:?}: {message}");
    }
    let of = |blocks: Range<usize>| plan.part(blocks).unwrap().outputs().len();
    assert_eq!(of(0..1) + of(1..2) + of(2..3), plan.outputs().len());
    assert_eq!(plan.part(1..3).unwrap().part(2..3).unwrap().outputs().len(), of(2..3));
}

/// The memory of a part does not depend on the position of its blocks in the model.
#[test]
fn the_memory_of_a_part_is_that_of_its_blocks() {
    for method in ["awq", "gptq"] {
        let model = Tiny { hidden: 512, intermediate: 2048, ..tiny(Kind::Llama) }.random(2).model();
        let recipe = recipe(method, "w4a16-g32-sym");
        let plan = Plan::new(&model, &recipe, recipe.containers[0]).unwrap();
        let peak = |blocks: Range<usize>| Plan::peak_memory(&[plan.part(blocks).unwrap()], &model);
        // Parts without the embedding and the head copy no large tensor.
        let (whole, copied) = (peak(0..3), 4 << 20);
        for start in 0..3 {
            assert!(whole.abs_diff(peak(start..start + 1)) < copied, "{method}, block {start}");
        }
    }
}
