//! Mixtures of experts in the pipeline: each expert only sees its routed tokens, experts without tokens are quantized
//! too, routers stay float and are folded with the norm, and nothing depends on the order of experts.

use crate::common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use common::{
    Checkpoint, EXPERTS, Kind, Quantized, TOP_K, Tiny, decoder, logits, mean_divergence, recipe,
    relative_difference, run, windows,
};
use quant_core::TensorSource;
use quant_core::calibrate::{ExpertSampling, ExpertTokens, Sampling};
use quant_core::checkpoint::Dtype;
use quant_core::engines::{LayerKind, Outline};
use quant_core::model::Model;
use quant_core::pipeline::TensorReport;
use quant_core::quantize::gptq::GptqSettings;
use quant_core::recipe::{Action, Pattern, Plan, Recipe};
use quant_core::round::LayerInputs;
use quant_core::transform::{Alpha, Automatic, AwqSettings, Search, SmoothSettings};

fn tiny(family: Kind) -> Tiny {
    Tiny { family, ..Tiny::default() }
}

/// An embedding feature that is always large and positive at a block's router: attention does not write to channel 0,
/// so the router's column for it alone decides the routing.
const STEADY: usize = 0;

/// Makes the first block's router depend on channel [`STEADY`], with these weights.
fn steer(checkpoint: &mut Checkpoint, columns: [f32; EXPERTS]) {
    let hidden = checkpoint.tiny.hidden;
    for row in checkpoint.values("model.embed_tokens.weight").chunks_exact_mut(hidden) {
        row[STEADY] = 4.0;
    }
    let attention = checkpoint.values("model.layers.0.self_attn.o_proj.weight");
    let width = attention.len() / hidden;
    attention[STEADY * width..(STEADY + 1) * width].fill(0.0);
    checkpoint.values("model.layers.0.post_attention_layernorm.weight")[STEADY] = 1.0;
    let (router, _) = checkpoint.tiny.family.experts(0).unwrap();
    let router = checkpoint.values(&format!("model.layers.0.{router}.weight"));
    for (row, column) in router.chunks_exact_mut(hidden).zip(columns) {
        row[STEADY] = column;
    }
}

fn quantized(checkpoint: &Checkpoint, recipe: &Recipe) -> Quantized {
    let batch = windows(checkpoint.tiny.vocab, 4, 48, 5);
    run(&checkpoint.model(), &checkpoint.tiny.config(), recipe, Some(&batch))
}

fn reports(result: &Quantized) -> BTreeMap<&str, &TensorReport> {
    result.report.tensors.iter().map(|t| (t.tensor.as_str(), t)).collect()
}

fn written(result: &Quantized, module: &str) -> Vec<Vec<u8>> {
    let names = result.source.names().into_iter().filter(|name| name.starts_with(&format!("{module}.")));
    names.map(|name| result.source.read(name).unwrap()).collect()
}

#[test]
fn every_method_takes_experts() {
    for family in [Kind::Mixtral, Kind::Qwen3Moe(true)] {
        let checkpoint = tiny(family).random(3);
        let batch = windows(checkpoint.tiny.vocab, 4, 48, 5);
        let exact = logits(&checkpoint.model(), &batch);
        let divergence = |method: &str, scheme: &str| {
            let found = logits(&quantized(&checkpoint, &recipe(method, scheme)).model(), &batch);
            mean_divergence(&exact, &found, checkpoint.tiny.vocab)
        };
        let rtn = divergence("rtn", "w4a16-g32-sym");
        let gptq = divergence("gptq", "w4a16-g32-sym");
        assert!(gptq < rtn && rtn < 0.5, "{family:?}: GPTQ {gptq}, RTN {rtn}");
        for (method, scheme) in [
            ("awq", "w4a16-g32-sym"),
            ("awq-gptq", "w4a16-g32-asym"),
            ("smoothquant", "w8a8-channel-sym"),
            ("smoothquant", "w8a8-channel-sym-static"),
        ] {
            let found = divergence(method, scheme);
            assert!(found < 1.3 * rtn, "{family:?}, {method}, {scheme}: {found}, RTN {rtn}");
        }
    }
}

#[test]
fn routers_stay_float_and_follow_the_norm() {
    let checkpoint = tiny(Kind::Qwen3Moe(false)).random(4);
    let model = checkpoint.model();
    let plan = Plan::new(&model, &recipe("awq", "w4a16-g32-sym"), quant_core::format::CONTAINERS[0]).unwrap();
    let router = plan.entries.iter().find(|e| e.tensor == "model.layers.0.mlp.gate.weight").unwrap();
    assert!(matches!(router.action, Action::Rewrite { layer: 0, .. }), "{:?}", router.action);
    assert!(plan.float_modules.contains(&"model.layers.0.mlp.gate".to_owned()));
    let ignored =
        Recipe { ignore: vec![Pattern::new("*.mlp.gate").unwrap()], ..recipe("rtn", "w4a16-g32-sym") };
    assert!(Plan::new(&model, &ignored, ignored.containers[0]).is_ok());
    let overridden = Recipe {
        overrides: vec![(Pattern::new("*.mlp.gate").unwrap(), "w8a16".parse().unwrap())],
        ..recipe("rtn", "w4a16-g32-sym")
    };
    let message = Plan::new(&model, &overridden, overridden.containers[0]).unwrap_err().to_string();
    assert!(
        message.contains("mlp.gate") && message.contains("routers and gates always stay float"),
        "{message}"
    );
}

#[test]
fn tokens_count_for_the_experts_they_go_to() {
    let checkpoint = tiny(Kind::Mixtral).random(6);
    let result = quantized(&checkpoint, &recipe("gptq", "w4a16-g32-sym"));
    let reports = reports(&result);
    let tokens = 4 * 48;
    for layer in 0..checkpoint.tiny.layers {
        let (_, experts) = checkpoint.tiny.family.experts(layer).unwrap();
        let of =
            |name: &str| reports[&*format!("model.layers.{layer}.{name}.weight")].calibration_tokens.unwrap();
        let routed: Vec<u64> = experts.iter().map(|[gate, ..]| of(gate)).collect();
        for (linears, tokens) in experts.iter().zip(&routed) {
            assert!(linears.iter().all(|name| of(name) == *tokens));
        }
        assert_eq!(routed.iter().sum::<u64>(), (TOP_K * tokens) as u64, "{routed:?}");
        assert_eq!(of("self_attn.q_proj"), tokens as u64);
    }
}

#[test]
fn experts_without_tokens_are_rounded_to_nearest() {
    let mut checkpoint = tiny(Kind::Mixtral).random(7);
    steer(&mut checkpoint, [-50.0, 50.0, -50.0, 40.0, -50.0]);
    let (_, experts) = checkpoint.tiny.family.experts(0).unwrap();
    let rtn = quantized(&checkpoint, &recipe("rtn", "w4a16-g32-sym"));
    for method in ["gptq", "awq", "awq-gptq", "smoothquant"] {
        let scheme = if method == "smoothquant" { "w8a8-channel-sym-static" } else { "w4a16-g32-sym" };
        let result = quantized(&checkpoint, &recipe(method, scheme));
        let reports = reports(&result);
        for (expert, linears) in experts.iter().enumerate() {
            for (which, linear) in linears.iter().enumerate() {
                let module = format!("model.layers.0.{linear}");
                let report = reports[&*format!("{module}.weight")];
                if let Some(tokens) = report.calibration_tokens {
                    // Static scales need tokens.
                    let seen = expert % 2 == 1 || method == "smoothquant";
                    assert_eq!(tokens, if seen { 4 * 48 } else { 0 }, "{method}, {module}");
                }
                // An expert's gate and up are connected to the norm only by scales that all experts share.
                if expert % 2 == 0 && (method == "gptq" || method == "awq" && which == 2) {
                    assert_eq!(written(&result, &module), written(&rtn, &module), "{method}, {module}");
                }
                if expert % 2 == 0 && which == 2 && method == "awq" {
                    let search = report.scale_search.as_ref().unwrap();
                    assert_eq!((search.ratio, search.tokens), (None, 0));
                }
            }
        }
        let batch = windows(checkpoint.tiny.vocab, 2, 40, 9);
        assert!(logits(&result.model(), &batch).iter().all(|v| v.is_finite()), "{method}");
    }
}

#[test]
fn static_scales_of_experts_without_tokens_are_those_of_all_tokens() {
    let mut checkpoint = tiny(Kind::Mixtral).random(7);
    steer(&mut checkpoint, [-50.0, 50.0, -50.0, 40.0, -50.0]);
    let (_, experts) = checkpoint.tiny.family.experts(0).unwrap();
    let float_inputs = GptqSettings { inputs: LayerInputs::Float, ..GptqSettings::default() };
    for (what, recipe) in [
        ("rtn", recipe("rtn", "w8a8-channel-sym-static")),
        ("fp8", recipe("rtn", "fp8-static")),
        ("smoothquant", recipe("smoothquant", "w8a8-channel-sym-static")),
        ("gptq", recipe("gptq", "w8a8-channel-sym-static")),
        ("gptq on float inputs", recipe("gptq", "w8a8-channel-sym-static").with_settings(float_inputs)),
    ] {
        let all = ExpertSampling { tokens: ExpertTokens::All, floor: 0 };
        let sampling = Sampling { experts: all, ..recipe.sampling };
        let default = quantized(&checkpoint, &recipe);
        let all = quantized(&checkpoint, &Recipe { sampling, ..recipe.clone() });
        let (default, all) = (reports(&default), reports(&all));
        for (expert, linears) in experts.iter().enumerate() {
            for linear in linears {
                let name = format!("model.layers.0.{linear}.weight");
                let [own, of_all] = [&default, &all].map(|reports| reports[&*name].input.unwrap());
                assert!(own == of_all && own.scale != 1.0, "{what}, {name}: {own:?}, {of_all:?}");
                let routed = default[&*name].routed_tokens;
                assert_eq!(routed, (expert % 2 == 0).then_some(0), "{what}, {name}");
            }
        }
    }
    // Other schemes keep the fallback without a pass of all tokens.
    let plan = |scheme: &str| {
        let recipe = recipe("gptq", scheme);
        Plan::new(&checkpoint.model(), &recipe, recipe.containers[0]).unwrap().sampling.experts.floor
    };
    assert_eq!((plan("w8a8-channel-sym"), plan("w8a8-channel-sym-static")), (0, 1));
}

#[test]
fn one_token_is_enough_for_an_expert() {
    let mut checkpoint = tiny(Kind::Mixtral).random(8);
    steer(&mut checkpoint, [-50.0, 50.0, -50.0, 40.0, -50.0]);
    // Exactly one token of the vocabulary is routed to expert 0.
    let hidden = checkpoint.tiny.hidden;
    let token = windows(checkpoint.tiny.vocab, 4, 48, 5).window(0)[0] as usize;
    checkpoint.values("model.embed_tokens.weight")[token * hidden + STEADY] = -4.0;
    for method in ["gptq", "awq"] {
        let result = quantized(&checkpoint, &recipe(method, "w4a16-g32-sym"));
        let reports = reports(&result);
        let tokens =
            reports["model.layers.0.block_sparse_moe.experts.0.w2.weight"].calibration_tokens.unwrap();
        assert!((1..20).contains(&tokens), "{tokens}");
        let batch = windows(checkpoint.tiny.vocab, 2, 40, 9);
        assert!(logits(&result.model(), &batch).iter().all(|v| v.is_finite()), "{method}");
    }
}

#[test]
fn the_order_of_experts_changes_nothing() {
    let checkpoint = tiny(Kind::Mixtral).random(9);
    let order = [3, 0, 4, 1, 2];
    let mut permuted = checkpoint.clone();
    for layer in 0..checkpoint.tiny.layers {
        let (router, experts) = checkpoint.tiny.family.experts(layer).unwrap();
        let name = |linear: &str| format!("model.layers.{layer}.{linear}.weight");
        let hidden = checkpoint.tiny.hidden;
        let rows = &checkpoint.tensors[&name(router)].1;
        let moved: Vec<f32> =
            order.iter().flat_map(|&e| &rows[e * hidden..(e + 1) * hidden]).copied().collect();
        permuted.values(&name(router)).copy_from_slice(&moved);
        for (to, from) in order.iter().enumerate() {
            for (new, old) in experts[to].iter().zip(&experts[*from]) {
                let values = checkpoint.tensors[&name(old)].1.clone();
                permuted.values(&name(new)).copy_from_slice(&values);
            }
        }
    }
    let batch = windows(checkpoint.tiny.vocab, 2, 40, 9);
    let change =
        relative_difference(&logits(&permuted.model(), &batch), &logits(&checkpoint.model(), &batch));
    assert!(change < 2e-6, "{change:e}");
    let recipe = recipe("rtn", "w4a16-g32-sym");
    let (one, other) = (quantized(&checkpoint, &recipe), quantized(&permuted, &recipe));
    let (_, experts) = checkpoint.tiny.family.experts(1).unwrap();
    for (to, from) in order.iter().enumerate() {
        for (new, old) in experts[to].iter().zip(&experts[*from]) {
            let module = |linear: &str| format!("model.layers.1.{linear}");
            assert_eq!(written(&other, &module(new)), written(&one, &module(old)));
        }
    }
}

/// Two models. In the first block of the first, experts 1 and 3 see all tokens and the others none; in the second,
/// experts 0 and 2 see all tokens.
fn starved_and_fed(seed: u64) -> [Checkpoint; 2] {
    let of = |columns: [f32; EXPERTS]| {
        let mut checkpoint = tiny(Kind::Mixtral).random(seed);
        steer(&mut checkpoint, columns);
        checkpoint
    };
    [of([-50.0, 50.0, -50.0, 40.0, -50.0]), of([50.0, -50.0, 40.0, -50.0, -50.0])]
}

fn sampled(recipe: &Recipe, tokens: ExpertTokens, floor: u64) -> Recipe {
    let mut recipe = recipe.clone();
    recipe.sampling.experts = ExpertSampling { tokens, floor };
    recipe
}

/// The result is as if all tokens were routed to the expert. With a minimum number of tokens, this applies only to
/// experts below it.
#[test]
fn experts_may_be_calibrated_on_all_tokens() {
    let [starved, fed] = starved_and_fed(14);
    let tokens = 4 * 48;
    let (_, experts) = starved.tiny.family.experts(0).unwrap();
    let module = |expert: usize, which: usize| format!("model.layers.0.{}", experts[expert][which]);
    for inputs in [LayerInputs::Quantized, LayerInputs::Float] {
        let base = recipe("gptq", "w4a16-g32-sym");
        let base = base.with_settings(GptqSettings { inputs, ..GptqSettings::default() });
        let routed = [&starved, &fed].map(|checkpoint| quantized(checkpoint, &base));
        let all = quantized(&starved, &sampled(&base, ExpertTokens::All, 0));
        let floored = quantized(&starved, &sampled(&base, ExpertTokens::Routed, 1));
        for (result, own) in [(&all, Some(tokens)), (&floored, None)] {
            let reports = reports(result);
            for expert in [0, 1, 4] {
                for which in 0..3 {
                    let module = module(expert, which);
                    let report = reports[&*format!("{module}.weight")];
                    assert_eq!(report.calibration_tokens, Some(tokens), "{module}");
                    let is_own = expert == 1;
                    assert_eq!(report.routed_tokens, if is_own { own } else { Some(0) }, "{module}");
                    match expert {
                        0 => {
                            assert_eq!(written(result, &module), written(&routed[1], &module), "{module}");
                            assert_ne!(written(result, &module), written(&routed[0], &module), "{module}");
                        }
                        1 => assert_eq!(written(result, &module), written(&routed[0], &module), "{module}"),
                        _ => {}
                    }
                }
            }
        }
        // The floor is larger than the number of tokens of any expert, so all experts see all tokens.
        let above = quantized(&starved, &sampled(&base, ExpertTokens::Routed, tokens + 1));
        for name in all.source.names() {
            assert_eq!(above.source.read(name).unwrap(), all.source.read(name).unwrap(), "{name}");
        }
        // The float model's states do not depend on the observed tokens.
        if inputs == LayerInputs::Float {
            for linear in ["q_proj", "o_proj"] {
                let module = format!("model.layers.1.self_attn.{linear}");
                assert_eq!(written(&all, &module), written(&routed[0], &module), "{module}");
            }
        }
    }
}

/// Searches see the same tokens as GPTQ.
#[test]
fn searches_see_all_tokens_of_an_expert() {
    let [starved, fed] = starved_and_fed(15);
    for search in [Search::Fast, Search::Reference] {
        let mut base = recipe("awq", "w4a16-g32-sym");
        base.settings.steps.set(AwqSettings { search });
        let all = quantized(&starved, &sampled(&base, ExpertTokens::All, 0));
        let expected = quantized(&fed, &base);
        let down = "model.layers.0.block_sparse_moe.experts.0.w2.weight";
        let [found, expected] = [&all, &expected].map(|result| reports(result)[down].clone());
        let [found_search, expected_search] = [&found, &expected].map(|r| r.scale_search.clone().unwrap());
        assert_eq!(found_search.tokens, expected_search.tokens, "{search:?}");
        approx::assert_relative_eq!(
            found_search.error_before,
            expected_search.error_before,
            max_relative = 1e-5
        );
        assert!(found_search.error_before > 0.0);
        assert_eq!((found.calibration_tokens, found.routed_tokens), (Some(4 * 48), Some(0)));
        assert_eq!((expected.calibration_tokens, expected.routed_tokens), (Some(4 * 48), None));
    }
    let base = recipe("rtn", "w8a8-channel-sym-static");
    let of = |checkpoint: &Checkpoint, recipe: &Recipe| {
        let result = quantized(checkpoint, recipe);
        let module = "model.layers.0.block_sparse_moe.experts.0.w2.weight";
        reports(&result)[module].input.unwrap()
    };
    let all = of(&starved, &sampled(&base, ExpertTokens::All, 0));
    assert_eq!(all, of(&fed, &base));
}

/// Settings without any effect are rejected.
#[test]
fn expert_tokens_without_experts_are_refused() {
    let refused = |kind: Kind, tokens: ExpertTokens, floor: u64| {
        let recipe = sampled(&recipe("gptq", "w4a16-g32-sym"), tokens, floor);
        let plan = Plan::new(&tiny(kind).random(1).model(), &recipe, recipe.containers[0]);
        plan.err().map(|error| error.to_string())
    };
    let message = refused(Kind::Llama, ExpertTokens::All, 0).unwrap();
    assert!(message.contains("the model has no experts"), "{message}");
    assert!(refused(Kind::Llama, ExpertTokens::Routed, 1).is_some());
    assert_eq!(refused(Kind::Llama, ExpertTokens::Routed, 0), None);
    let message = refused(Kind::Mixtral, ExpertTokens::All, 64).unwrap();
    assert!(message.contains("the floor of 64 tokens per expert has no effect"), "{message}");
    assert_eq!(refused(Kind::Mixtral, ExpertTokens::Routed, 64), None);
}

#[test]
fn threads_do_not_change_a_bit() {
    let checkpoint = tiny(Kind::Qwen3Moe(true)).random(10);
    for (method, floor) in [("awq", 0), ("gptq", 0), ("gptq", 80), ("awq-gptq", 80)] {
        let recipe = sampled(&recipe(method, "w4a16-g32-asym"), ExpertTokens::Routed, floor);
        let bytes = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let result = pool.install(|| quantized(&checkpoint, &recipe));
            let names = result.source.names();
            names
                .into_iter()
                .map(|name| (name.to_owned(), result.source.read(name).unwrap()))
                .collect::<Vec<_>>()
        };
        assert!(bytes(1) == bytes(3), "{method}, {floor}");
    }
}

/// Engines split an expert's gate and up by outputs, as in an MLP, and its down by inputs.
#[test]
fn experts_are_split_over_ranks_like_an_mlp() {
    let checkpoint = tiny(Kind::Qwen3Moe(true)).random(11);
    let recipe = recipe("rtn", "w4a16-g32-sym");
    let plan = Plan::new(&checkpoint.model(), &recipe, recipe.containers[0]).unwrap();
    let outline = Outline::new(&plan, &checkpoint.model());
    let kinds = |ending: &str| -> Vec<LayerKind> {
        let layers = outline.layers.iter().filter(|layer| layer.parts[0].module.ends_with(ending));
        layers.map(|layer| layer.kind).collect()
    };
    assert_eq!(kinds(".mlp.gate"), [], "routers are not split");
    for (ending, kind) in [
        (".experts.1.gate_proj", LayerKind::Column),
        (".experts.1.up_proj", LayerKind::Column),
        (".experts.1.down_proj", LayerKind::Row),
    ] {
        let found = kinds(ending);
        assert!(!found.is_empty() && found.iter().all(|k| *k == kind), "{ending}: {found:?}");
    }
}

/// The configuration is rejected at the first missing expert, before it is expanded.
#[test]
fn experts_that_are_not_there_are_named() {
    let checkpoint = tiny(Kind::Mixtral).random(12);
    let mut source = checkpoint.source();
    for i in 0..200 {
        source.insert_f32(format!("other.{i}"), Dtype::F32, vec![1], &[0.0]).unwrap();
    }
    let mut config = checkpoint.tiny.config();
    for (key, value) in [("num_local_experts", 4096), ("num_hidden_layers", 200)] {
        config.insert(key.into(), value.into());
    }
    let found = Model::new(Arc::new(source), Path::new("config.json"), &config);
    let message = found.err().map(|e| e.to_string()).unwrap();
    assert!(message.contains("block_sparse_moe"), "{message}");
}

#[test]
fn a_router_that_overflows_is_named() {
    let mut checkpoint = tiny(Kind::Mixtral).random(13);
    checkpoint.values("model.layers.1.block_sparse_moe.gate.weight").iter_mut().for_each(|w| *w = 3e38);
    let error = decoder(&checkpoint.model()).hidden(&[&[1, 2, 3, 4]]).unwrap_err().to_string();
    assert!(error.contains("block_sparse_moe.gate.weight") && error.contains("NaN or infinite"), "{error}");
}

/// The linears that SmoothQuant has quantized for a candidate take little more than a byte per weight.
#[test]
fn the_plan_counts_the_codes_of_a_candidate() {
    for family in [Kind::Mixtral, Kind::Qwen3Moe(true)] {
        let checkpoint = Tiny { hidden: 512, intermediate: 2048, ..tiny(family) }.random(3);
        let model = checkpoint.model();
        let source = model.source();
        let of_block = |name: &&str| name.contains("layers.0.");
        let elements = |name: &str| source.info(name).unwrap().elements() as u64;
        let weights: u64 = source.names().into_iter().filter(of_block).map(elements).sum();
        let peak = |alpha| {
            let settings = SmoothSettings { alpha: Some(alpha), ..SmoothSettings::default() };
            let recipe = Recipe {
                sampling: Sampling { samples: 2, length: 64, ..Sampling::default() },
                ..recipe("smoothquant", "w8a8-channel-sym").with_settings(settings)
            };
            Plan::peak_memory(&[Plan::new(&model, &recipe, recipe.containers[0]).unwrap()], &model)
        };
        let (given, searched) = (peak(Alpha::Fixed(0.5)), peak(Alpha::Auto(Automatic::Auto)));
        assert!(searched > given, "{family:?}: {searched} and {given}");
        assert!(searched < given + 3 * weights, "{family:?}: {searched} and {given}, {weights} weights");
    }
}

/// With inputs of the quantized model, GPTQ holds one expert at a time, and the plan counts one; with float inputs, all
/// experts of a block are in memory together.
#[test]
fn the_plan_counts_the_experts_that_are_there_together() {
    for family in [Kind::Mixtral, Kind::Qwen3Moe(true)] {
        let checkpoint = Tiny { hidden: 256, intermediate: 1024, ..tiny(family) }.random(3);
        let model = checkpoint.model();
        let peak = |inputs: LayerInputs| {
            let recipe = recipe("gptq", "w4a16-g32-sym");
            let recipe = recipe.with_settings(GptqSettings { inputs, ..GptqSettings::default() });
            Plan::peak_memory(&[Plan::new(&model, &recipe, recipe.containers[0]).unwrap()], &model)
        };
        let of_expert = |name: &&str| name.contains("layers.0.") && name.contains("experts.0.");
        let source = model.source();
        let expert: u64 = source
            .names()
            .into_iter()
            .filter(of_expert)
            .map(|name| source.info(name).unwrap().byte_len())
            .sum();
        assert!(expert > 1 << 20, "{expert}");
        let (one, all) = (peak(LayerInputs::Quantized), peak(LayerInputs::Float));
        assert!(one + (EXPERTS as u64 - 1) * expert <= all, "{family:?}: {one} and {all}, {expert} each");
    }
}
