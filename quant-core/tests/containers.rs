//! Several containers from one run, and conversions between containers: the quantized values are the same in all of
//! them.

use crate::common;

use common::{Quantized, Tiny, logits, model, recipe, run, windows};
use quant_core::calibrate::TokenWindows;
use quant_core::checkpoint::{Dtype, MemorySink};
use quant_core::format::{Container, container};
use quant_core::model::Model;
use quant_core::pipeline::{Job, QuantReport, quantize_each, quantize_job};
use quant_core::recipe::{Pattern, Plan, Recipe};
use quant_core::{CancelToken, Error, Silent, TensorSink, TensorSource};

fn tiny(dtype: Dtype) -> Tiny {
    Tiny { hidden: 64, intermediate: 128, head_dim: 16, dtype, norm_dtype: dtype, ..Tiny::default() }
}

fn named(name: &str) -> &'static dyn Container {
    container(name).unwrap()
}

fn repacked(from: &Quantized, to: &str) -> Quantized {
    let model = from.model();
    let plan = Plan::repack(&model, named(to)).unwrap();
    execute(&model, from, &plan)
}

fn execute(model: &Model, from: &Quantized, plan: &Plan) -> Quantized {
    let mut sink = MemorySink::new(plan.outputs()).unwrap();
    let report = quantize_job(&job(model, plan, None), &mut sink).unwrap();
    let mut config = from.config.clone();
    config.insert("quantization_config".into(), plan.container.quantization_config(&plan.module_schemes()));
    Quantized { source: sink.into_source().unwrap(), config, report }
}

fn job<'a>(model: &'a Model, plan: &'a Plan, windows: Option<&'a TokenWindows>) -> Job<'a> {
    static NEVER: std::sync::LazyLock<CancelToken> = std::sync::LazyLock::new(CancelToken::new);
    Job { model, plan, windows, maxima: None, searches: None, observer: &Silent, cancel: &NEVER }
}

fn in_container(name: &str, method: &str, scheme: &str) -> Recipe {
    Recipe { containers: vec![named(name)], ..recipe(method, scheme) }
}

#[test]
fn there_and_back_again() {
    let checkpoint = tiny(Dtype::F16).random(1);
    let batch = windows(96, 2, 24, 7);
    for (first, second, scheme) in [
        ("compressed-tensors", "awq", "w4a16-g32-sym"),
        ("compressed-tensors", "awq", "w4a16-g32-asym"),
        ("compressed-tensors", "awq", "w4a16-channel-asym"),
        ("awq", "compressed-tensors", "w4a16-g32-asym"),
        ("awq", "compressed-tensors", "w4a16-g64-sym"),
        ("compressed-tensors", "compressed-tensors", "w3a16-g32-asym"),
        ("qserve", "compressed-tensors", "w4a8-channel-asym"),
        ("qserve", "compressed-tensors", "w8a8-channel-sym"),
    ] {
        let recipe = in_container(first, "rtn", scheme);
        let original = run(&checkpoint.model(), &checkpoint.tiny.config(), &recipe, None);
        let other = repacked(&original, second);
        assert_eq!(logits(&other.model(), &batch), logits(&original.model(), &batch), "{scheme}");
        let actions = |r: &QuantReport, what| r.tensors.iter().filter(|t| t.action == what).count();
        assert_eq!(actions(&other.report, "repacked"), actions(&original.report, "quantized"));
        assert_eq!(other.report.bytes_before, original.report.bytes_after);
        let back = repacked(&other, first);
        assert_eq!(back.source, original.source, "{first} {scheme}");
        assert_eq!(back.config, original.config, "{first} {scheme}");
    }
}

/// Products of two-level scales are exact in F32. One-level scales cannot be split again.
#[test]
fn two_levels_of_scales_become_one_without_a_change() {
    let tiny = Tiny { hidden: 128, intermediate: 256, head_dim: 32, ..tiny(Dtype::Bf16) };
    let checkpoint = tiny.random(5);
    let batch = windows(96, 2, 24, 7);
    let recipe = in_container("qserve", "rtn", "w4a8-g128-asym-progressive");
    let original = run(&checkpoint.model(), &tiny.config(), &recipe, None);
    let again = repacked(&original, "qserve");
    assert_eq!((&again.source, &again.config), (&original.source, &original.config));
    let flat = repacked(&original, "compressed-tensors");
    assert_eq!(logits(&flat.model(), &batch), logits(&original.model(), &batch));
    let scales = flat.source.info("model.layers.1.mlp.down_proj.weight_scale").unwrap();
    assert_eq!(scales.dtype, Dtype::F32);
    let error = Plan::repack(&flat.model(), named("qserve")).unwrap_err();
    assert!(error.to_string().contains("does not support w4a8-g128-asym"), "{error}");
    assert!(error.remedy().marked().contains("original float checkpoint"), "{}", error.remedy());
}

#[test]
fn grids_that_are_symmetric_in_truth_are_written_so() {
    let checkpoint = tiny(Dtype::F16).random(2);
    let recipe = in_container("awq", "rtn", "w4a16-g32-sym");
    let awq = run(&checkpoint.model(), &checkpoint.tiny.config(), &recipe, None);
    let other = repacked(&awq, "compressed-tensors");
    assert!(other.source.names().iter().all(|name| !name.ends_with("weight_zero_point")));
    let direct = in_container("compressed-tensors", "rtn", "w4a16-g32-sym");
    assert_eq!(other.source, run(&checkpoint.model(), &checkpoint.tiny.config(), &direct, None).source);
}

#[test]
fn what_a_container_cannot_hold_is_refused() {
    let checkpoint = tiny(Dtype::F32).random(3);
    let refused = |recipe: &Recipe| {
        let original = run(&checkpoint.model(), &checkpoint.tiny.config(), recipe, None);
        let model = original.model();
        match Plan::repack(&model, named("awq")) {
            Err(error) => error,
            Ok(plan) => {
                let mut sink = MemorySink::new(plan.outputs()).unwrap();
                quantize_job(&job(&model, &plan, None), &mut sink).unwrap_err()
            }
        }
    };
    assert!(refused(&recipe("rtn", "w3a16-g32")).to_string().contains("4-bit weights only, not 3"));
    // F32 scales have more digits than F16 can hold.
    let error = refused(&recipe("rtn", "w4a16-g32"));
    assert!(matches!(error, Error::NotRepackable { .. }), "{error}");
    assert!(error.to_string().contains("_proj` cannot be repacked without loss"), "{error}");
    let own = |pattern: &str, scheme: &str| {
        let mut recipe = recipe("rtn", "w4a16-g32");
        recipe.overrides.push((Pattern::new(pattern).unwrap(), scheme.parse().unwrap()));
        recipe
    };
    assert!(refused(&own("down_proj", "w4a16-g64")).to_string().contains("one scheme for all"));
    assert!(refused(&own("lm_head", "w4a16-g32")).to_string().contains("keep it float"));

    let float = checkpoint.model();
    let error = Plan::repack(&float, named("awq")).unwrap_err();
    assert!(error.to_string().contains("nothing to repack"), "{error}");
}

#[test]
fn one_run_gives_what_each_would_alone() {
    let checkpoint = tiny(Dtype::Bf16).random(4);
    let (source, batch) = (checkpoint.model(), windows(96, 6, 32, 5));
    for method in ["awq", "rtn"] {
        let plans: Vec<Plan> = ["compressed-tensors", "awq"]
            .iter()
            .map(|name| Plan::new(&source, &open_recipe(method), named(name)).unwrap())
            .collect();
        let batch = plans[0].needs_text().then_some(&batch);
        let jobs: Vec<Job<'_>> = plans.iter().map(|plan| job(&source, plan, batch)).collect();
        let alone: Vec<_> = jobs
            .iter()
            .map(|job| {
                let mut sink = MemorySink::new(job.plan.outputs()).unwrap();
                let report = quantize_job(job, &mut sink).unwrap();
                (sink.into_source().unwrap(), report)
            })
            .collect();
        let mut sinks: Vec<MemorySink> =
            plans.iter().map(|plan| MemorySink::new(plan.outputs()).unwrap()).collect();
        let slots = sinks.iter_mut().map(|sink| sink as &mut dyn TensorSink).collect();
        let reports = quantize_each(&jobs, slots).unwrap();
        let together = sinks.into_iter().map(|sink| sink.into_source().unwrap()).zip(reports);
        for (one, (source, report)) in together.zip(&alone) {
            assert_eq!(one.0, *source, "{method}");
            assert_eq!(one.1.to_json().unwrap(), report.to_json().unwrap(), "{method}");
        }
        assert_eq!(alone[0].1.tensors[3].scheme.as_deref().map(|s| s.ends_with("-sym")), Some(true));
        assert_eq!(alone[1].1.tensors[3].scheme.as_deref().map(|s| s.ends_with("-asym")), Some(true));
    }
    let plan = Plan::new(&source, &open_recipe("awq"), named("awq")).unwrap();
    let jobs = [job(&source, &plan, Some(&batch)), job(&source, &plan, None)];
    let mut sinks = [MemorySink::new(plan.outputs()).unwrap(), MemorySink::new(plan.outputs()).unwrap()];
    let slots = sinks.iter_mut().map(|sink| sink as &mut dyn TensorSink).collect();
    assert!(matches!(quantize_each(&jobs, slots), Err(Error::Internal(_))));
}

fn open_recipe(method: &str) -> Recipe {
    recipe(method, "w4a16-g32")
}

#[test]
fn the_head_is_quantized_where_that_is_asked_for() {
    let checkpoint = tiny(Dtype::F16).random(6);
    let batch = windows(96, 2, 24, 7);
    let (source, config) = (checkpoint.model(), checkpoint.tiny.config());
    let with = |overrides: &[(&str, &str)]| {
        let mut recipe = recipe("rtn", "w4a16-g32");
        for (pattern, scheme) in overrides {
            recipe.overrides.push((Pattern::new(pattern).unwrap(), scheme.parse().unwrap()));
        }
        run(&source, &config, &recipe, None)
    };
    let head =
        |q: &Quantized| q.report.tensors.iter().find(|t| t.tensor == "lm_head.weight").cloned().unwrap();
    assert_eq!(head(&with(&[])).action, "copied");
    // Patterns such as `*` only select linears of blocks.
    assert_eq!(head(&with(&[("*", "w8a16-g32")])).action, "copied");
    let quantized = with(&[("lm_head", "w8a16-g32")]);
    assert_eq!(head(&quantized).scheme.as_deref(), Some("w8a16-g32-sym"));
    let ignored = quantized.config["quantization_config"]["ignore"].as_array().unwrap();
    assert!(ignored.is_empty(), "{ignored:?}");
    // At 8 bits the logits differ little from those with a float head.
    let difference =
        common::relative_difference(&logits(&quantized.model(), &batch), &logits(&with(&[]).model(), &batch));
    assert!(difference > 0.0 && difference < 0.02, "{difference}");

    for outer in ["lm_head", "embed_tokens"] {
        let mut awq = in_container("awq", "rtn", "w4a16-g32");
        awq.overrides.push((Pattern::new(outer).unwrap(), "w4a16-g32".parse().unwrap()));
        let error = Plan::new(&source, &awq, awq.containers[0]).unwrap_err();
        assert!(error.to_string().contains("keep it float"), "{error}");
    }
}

/// The two may be stored under either name.
#[test]
fn a_shared_head_is_parted_from_the_embedding() {
    let tiny = Tiny { tied: true, ..tiny(Dtype::F16) };
    let batch = windows(96, 2, 24, 7);
    let asked = |patterns: &[&str]| {
        let mut recipe = recipe("rtn", "w4a16-g32");
        let scheme = "w8a16-g32".parse().unwrap();
        recipe.overrides.extend(patterns.iter().map(|p| (Pattern::new(p).unwrap(), scheme)));
        recipe
    };
    let checkpoint = tiny.random(9);
    let error = Plan::new(&checkpoint.model(), &asked(&["embed_tokens"]), named("compressed-tensors"));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("is tied to the head"), "{error}");
    let float_head = run(&checkpoint.model(), &tiny.config(), &asked(&[]), None);
    for renamed in [false, true] {
        let mut checkpoint = checkpoint.clone();
        if renamed {
            let tensor = checkpoint.tensors.remove("model.embed_tokens.weight").unwrap();
            checkpoint.tensors.insert("lm_head.weight".into(), tensor);
        }
        for patterns in [&["lm_head"][..], &["lm_head", "embed_tokens"]] {
            let mut written = run(&checkpoint.model(), &tiny.config(), &asked(patterns), None);
            assert!(written.source.info("lm_head.weight").is_none());
            let float = written.source.info("model.embed_tokens.weight").is_some();
            assert_eq!(float, patterns.len() == 1, "{:?}", written.source.names());
            written.config.insert("tie_word_embeddings".into(), false.into());
            let model = written.model();
            let difference =
                common::relative_difference(&logits(&model, &batch), &logits(&float_head.model(), &batch));
            assert!(difference > 0.0 && difference < 0.03, "{difference}");
            assert_eq!(written.report.bytes_before, float_head.report.bytes_before);
            let again = repacked(&written, "compressed-tensors");
            assert_eq!((&again.source, &again.config), (&written.source, &written.config));
        }
    }
}

#[test]
fn a_foreign_checkpoint_is_read_as_configured() {
    // AutoAWQ writes the version in upper case, and omits the head from the list.
    let checkpoint = tiny(Dtype::F16).random(8);
    let recipe = in_container("awq", "rtn", "w4a16-g32-asym");
    let mut awq = run(&checkpoint.model(), &checkpoint.tiny.config(), &recipe, None);
    let settings = awq.config.get_mut("quantization_config").unwrap();
    settings["version"] = "GEMM".into();
    settings["modules_to_not_convert"] = serde_json::Value::Null;
    let model = model(std::sync::Arc::new(awq.source.clone()), &awq.config);
    let plan = Plan::repack(&model, named("compressed-tensors")).unwrap();
    let other = execute(&model, &awq, &plan);
    assert_eq!(
        other.config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"],
        false
    );
    assert_eq!(other.config["quantization_config"]["ignore"], serde_json::json!(["lm_head"]));
}
