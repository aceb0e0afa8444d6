//! Jobs in which the experts of a block are split over units.

use std::path::PathBuf;

use crate::common::{EXPERTS, Kind};
use crate::units::{
    BLOCKS, Bench, any_order, calibrated, host, on, result_of, run, settings, tiny, unit, write_checkpoint,
};
use proptest::prelude::*;
use quant_core::run::RecipeSettings;
use quant_core::units::{JobRequest, Selection, UnitJob, Work, WorkOptions, init};
use quant_core::{CancelToken, Category, Error, Silent};

fn float(settings: RecipeSettings) -> RecipeSettings {
    RecipeSettings { layer_inputs: Some("float".into()), ..settings }
}

fn request(bench: &Bench, experts: usize, shards: usize) -> JobRequest {
    JobRequest { experts_per_unit: Some(experts), ..bench.request(1, shards) }
}

fn init_with(bench: &Bench, name: &str, request: &JobRequest) -> PathBuf {
    let (store, cancel) = (bench.at(name), CancelToken::new());
    assert!(init(request, &store, &host(&store, &Silent, &cancel)).unwrap().created);
    store
}

#[test]
fn experts_in_units_give_what_one_run_gives() {
    let only = |pattern: &str, settings: RecipeSettings| RecipeSettings {
        ignore: vec![pattern.to_owned()],
        ..settings
    };
    let all_tokens = |settings| RecipeSettings { expert_tokens: Some("all".into()), ..settings };
    let gptq = || float(calibrated("gptq", "w4a16-g32-sym"));
    // The units that need hidden states: none, those of experts, or all.
    for (family, settings, states) in [
        (Kind::Mixtral, settings("rtn", "w4a16-g32-asym"), false),
        (Kind::Qwen3Moe(true), settings("rtn", "nvfp4a16"), false),
        (Kind::Mixtral, calibrated("rtn", "w8a8-channel-sym-static"), true),
        (Kind::Mixtral, gptq(), true),
        (Kind::Qwen3Moe(false), gptq(), true),
        (Kind::Mixtral, float(calibrated("gptq", "w8a8-channel-sym-static")), true),
        (Kind::Qwen3Moe(true), float(calibrated("gptq", "nvfp4a16")), true),
        (Kind::Mixtral, all_tokens(gptq()), true),
        (Kind::Mixtral, only("*.self_attn.*", gptq()), true),
        (Kind::Qwen3Moe(true), only("*.experts.3.*", gptq()), true),
    ] {
        let bench = Bench::new(family, settings);
        for (experts, shards) in [(1, 3), (3, 1)] {
            let store = init_with(&bench, &format!("by-{experts}"), &request(&bench, experts, shards));
            let done = run(&store, &Selection::All).unwrap();
            let split = (0..BLOCKS).filter(|&layer| family.experts(layer).is_some()).count();
            let parts = match bench.ignored("*.experts.3.*") {
                true if experts == 1 => EXPERTS - 1,
                _ => EXPERTS.div_ceil(experts),
            };
            let forwards = if states { (BLOCKS - 1) * shards } else { 0 };
            assert_eq!(done.len(), BLOCKS + split * parts + 1 + forwards, "{family:?}: {done:?}");
            bench.assert_merges(&store);
            assert!(run(&store, &Selection::All).unwrap().iter().all(|unit| !unit.computed));
        }
    }
}

/// Windows of more than 2048 tokens pass through the part of a block after its attention in pieces.
#[test]
fn long_windows_give_the_same() {
    let settings = RecipeSettings {
        samples: Some(2),
        seq_len: Some(2100),
        ..float(calibrated("gptq", "w4a16-g32-sym"))
    };
    let bench = Bench::with_config(Kind::Mixtral, settings, |config| {
        config["max_position_embeddings"] = 4096.into();
        config["num_hidden_layers"] = BLOCKS.into();
    });
    let store = init_with(&bench, "store", &request(&bench, 2, 1));
    run(&store, &Selection::All).unwrap();
    bench.assert_merges(&store);
}

#[test]
fn any_order_any_partition_any_interruption() {
    let benches = [settings("rtn", "w4a16-g32-sym"), float(calibrated("gptq", "w4a16-g32-sym"))]
        .map(|settings| Bench::new(Kind::Mixtral, settings));
    let steps = prop::collection::vec((0..64_usize, prop::option::weighted(0.4, 1..12_usize)), 0..8);
    let config = ProptestConfig { cases: 10, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let number = std::cell::Cell::new(0);
    runner
        .run(
            &(0..2_usize, 1..=EXPERTS, 1..4_usize, steps, 1..4_usize),
            |(which, experts, shards, steps, workers)| {
                number.set(number.get() + 1);
                let bench = &benches[which];
                let store =
                    init_with(bench, &format!("store-{}", number.get()), &request(bench, experts, shards));
                any_order(bench, &store, &steps, workers)?;
                std::fs::remove_dir_all(store).unwrap();
                Ok(())
            },
        )
        .unwrap();
}

/// A unit of experts reads the attention before them, which another unit writes.
#[test]
fn experts_after_another_attention_are_noticed() {
    let bench = Bench::new(Kind::Mixtral, float(calibrated("gptq", "w4a16-g32-sym")));
    let store = init_with(&bench, "store", &request(&bench, 2, 1));
    let copy = bench.at("copy");
    let mut changed = tiny(Kind::Mixtral).random(2);
    let last = format!("model.layers.{}.self_attn.o_proj.weight", BLOCKS - 1);
    changed.values(&last)[5] += 1.0;
    write_checkpoint(&changed, &copy);
    for id in (0..BLOCKS - 1).map(|group| format!("forward/0/{group}")) {
        run(&store, &unit(&id)).unwrap();
    }
    let cancel = CancelToken::new();
    let host = host(&store, &Silent, &cancel);
    let job = UnitJob::open(&store, Some(&copy), &host).unwrap();
    let wrong = format!("blocks/{}/experts/1", BLOCKS - 1);
    job.run(&unit(&wrong), &WorkOptions::default(), &host).unwrap();
    let names = |error: Error| {
        assert_eq!(error.category(), Category::Usage, "{error}");
        assert!(error.to_string().contains(&wrong) && error.to_string().contains(&last), "{error}");
        let remedy = error.remedy().to_string();
        assert!(remedy.contains(result_of(&store, &wrong).to_str().unwrap()), "{remedy}");
    };
    names(run(&store, &Selection::All).unwrap_err());
    // The merge compares results that were published at the same time.
    let kept = std::fs::read(result_of(&store, &wrong)).unwrap();
    std::fs::remove_file(result_of(&store, &wrong)).unwrap();
    run(&store, &Selection::All).unwrap();
    std::fs::write(result_of(&store, &wrong), kept).unwrap();
    names(on(&store, &Silent, |job, host| job.merge(&bench.at("no"), (false, false), host)).unwrap_err());
    assert!(!bench.at("no").exists());
}

#[test]
fn experts_that_depend_on_each_other_are_not_split() {
    let refused = |family, settings: RecipeSettings, change: &dyn Fn(&mut JobRequest), says: &str| {
        let bench = Bench::new(family, settings);
        let mut request = request(&bench, 2, 1);
        change(&mut request);
        let (store, cancel) = (bench.at("store"), CancelToken::new());
        let error = init(&request, &store, &host(&store, &Silent, &cancel)).unwrap_err();
        assert_eq!(error.category(), Category::Usage, "{error}");
        assert!(error.to_string().contains(says), "{error}");
        assert!(!store.exists());
    };
    let spans = RecipeSettings { span_blocks: Some(1), ..calibrated("gptq", "w4a16-g32-sym") };
    let rtn = || settings("rtn", "w4a16-g32-sym");
    for (settings, says) in [
        (calibrated("awq", "w4a16-g32-sym"), "`awq` searches scales that all experts of a block share"),
        (calibrated("smoothquant", "w8a8-channel"), "all experts of a block share"),
        (float(calibrated("awq-gptq", "w4a16-g32-sym")), "all experts of a block share"),
        (spans, "`gptq` calibrates them on inputs of the quantized model"),
    ] {
        refused(Kind::Mixtral, settings, &|_| {}, says);
    }
    refused(Kind::Llama, rtn(), &|_| {}, "the model has no experts");
    refused(Kind::Mixtral, rtn(), &|request| request.blocks_per_unit = Some(2), "‹blocks_per_unit› is 2");
    refused(Kind::Mixtral, rtn(), &|request| request.experts_per_unit = Some(0), "‹experts_per_unit› is 0");
}

#[test]
fn a_unit_of_experts_costs_less_than_the_block() {
    let bench = Bench::new(Kind::Mixtral, float(calibrated("gptq", "w4a16-g32-sym")));
    let costs = |name: &str, experts: Option<usize>| {
        let store = init_with(&bench, name, &JobRequest { experts_per_unit: experts, ..bench.request(1, 1) });
        on(&store, &Silent, |job, _| {
            let costs = job.units().to_vec().into_iter().zip(job.costs()?);
            Ok(costs.filter(|(unit, _)| !unit.is_forward() && unit.work != Work::Outside).collect::<Vec<_>>())
        })
        .unwrap()
    };
    let (whole, parts) = (costs("whole", None), costs("parts", Some(1)));
    assert_eq!((whole.len(), parts.len()), (BLOCKS, BLOCKS * (1 + EXPERTS)));
    for (block, (_, whole)) in whole.iter().enumerate() {
        let parts = &parts[block * (1 + EXPERTS)..(block + 1) * (1 + EXPERTS)];
        for (unit, part) in parts {
            assert!(part.memory_bytes < whole.memory_bytes, "{unit:?}: {part:?} of {whole:?}");
            assert!(part.input_bytes < whole.input_bytes, "{unit:?}: {part:?} of {whole:?}");
        }
        let written: u64 = parts.iter().map(|(_, part)| part.output_bytes).sum();
        assert_eq!(written, whole.output_bytes);
    }
}
