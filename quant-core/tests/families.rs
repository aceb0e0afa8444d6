//! Every family with random weights: valid folds, reorderings and preparations leave the output unchanged, a cache
//! gives the results of whole windows, and the pipeline can process the model.
//!
//! `tests/interop` compares the families with transformers.

use crate::common;
use crate::configs;

use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use common::{Quantized, flat, logits, normal, recipe, relative_difference, run, windows};
use configs::{Case, cases};
use quant_core::calibrate::{ExpertSampling, ExpertTokens};
use quant_core::checkpoint::{ConfigFields, Dtype, MemorySource, TensorSource};
use quant_core::model::{
    Block, FoldGroup, KvCaching, KvScheme, Model, NoTap, NodeId, Op, QueryKey, Segments, arch,
};
use quant_core::recipe::{Pattern, Plan, Recipe};
use quant_core::transform::{Alpha, AttentionSettings, BlockTask, Rewrite, TransformSettings, fold, rotate};
use quant_core::{CancelToken, Category};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Map, Value, json};

/// Maximum change of an output by rounding a few products in `f32`, relative to its largest value.
const BOUND: f64 = 2e-5;
const LENGTH: usize = 40;

struct Bench {
    model: Model,
    block: Block,
    layer: usize,
    x: Tensor,
}

fn benches(case: &Case, norms: Dtype, seed: u64) -> Vec<Bench> {
    let layers: Vec<usize> =
        case.random(norms, seed).architecture().blocks.kinds().map(|k| k.first).collect();
    let bench = |layer: usize| {
        let model = case.random(norms, seed);
        let block = model.block(layer, &model.rope(LENGTH).unwrap()).unwrap();
        let width = model.architecture().state_width(layer);
        let mut rng = StdRng::seed_from_u64(seed);
        let values: Vec<f32> = (0..2 * LENGTH * width).map(|_| normal(&mut rng)).collect();
        let x = Tensor::from_vec(values, (2, LENGTH, width), &Device::Cpu).unwrap();
        Bench { model, block, layer, x }
    };
    layers.into_iter().map(bench).collect()
}

impl Bench {
    fn groups(&self) -> Vec<FoldGroup> {
        self.block.graph().fold_groups()
    }

    fn name(&self, id: NodeId) -> &str {
        self.block.graph().name(id)
    }

    fn channels(&self, group: &FoldGroup) -> usize {
        self.block.graph().width(group.input) / group.repeat
    }

    fn fold(&self, rewrite: &mut Rewrite, group: &FoldGroup, norms: Dtype, seed: u64) {
        let prefix = self.model.architecture().in_block(self.layer, "");
        let norm_dtypes = self.block.graph().norms().map(|(id, ..)| (id, norms)).collect();
        let (settings, cancel) = (TransformSettings::default(), CancelToken::new());
        let mut task = BlockTask::new(&prefix, &self.block, &settings, &cancel);
        task.norm_dtypes = &norm_dtypes;
        fold(rewrite, &task, group, &scales(self.channels(group), seed)).unwrap();
    }

    fn output(&self, block: &Block) -> Vec<f32> {
        // The residual stream would hide an error of the branches, so it is subtracted. Side values, which follow it,
        // remain.
        let y = block.forward(&self.x, 0, None, &mut NoTap).unwrap();
        let hidden = self.model.architecture().hidden;
        let part = |t: &Tensor, first: usize, width: usize| t.narrow(2, first, width).unwrap();
        let branches = (part(&y, 0, hidden) - part(&self.x, 0, hidden)).unwrap();
        let extra = part(&y, hidden, y.dim(2).unwrap() - hidden);
        [flat(&branches), flat(&extra), self.indexed(block)].concat()
    }

    /// The values by which an indexer selects keys. They do not change the output as long as it selects all keys.
    fn indexed(&self, block: &Block) -> Vec<f32> {
        let selections = block.graph().nodes().iter().filter(|node| node.op == Op::SelectKeys);
        let inputs: Vec<NodeId> = selections.flat_map(|node| node.inputs[1..].to_vec()).collect();
        let known = [(block.graph().input(), self.x.clone())];
        block.evaluate(&known, &inputs, &mut NoTap).unwrap().iter().flat_map(flat).collect()
    }

    /// The change of the block's output by a rewrite, relative to its largest value.
    fn change(&self, rewrite: &Rewrite) -> f64 {
        relative_difference(&self.output(&rewrite.apply(&self.block).unwrap()), &self.output(&self.block))
    }
}

/// Random scales, log-uniform between 1/8 and 8.
fn scales(channels: usize, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..channels).map(|_| rng.random_range(-3.0_f32..3.0).exp2()).collect()
}

#[test]
fn folding_every_group_leaves_the_output_unchanged() {
    for case in cases() {
        for norms in [Dtype::F32, Dtype::Bf16] {
            for (kind, bench) in benches(&case, norms, 3).into_iter().enumerate() {
                let groups = bench.groups();
                let producers: Vec<&str> = groups.iter().map(|g| bench.name(g.producer)).collect();
                assert_eq!(producers, case.producers_of(kind), "{}", case.name);
                let mut rewrite = Rewrite::default();
                for (i, group) in groups.iter().enumerate() {
                    bench.fold(&mut rewrite, group, norms, 10 + i as u64);
                }
                let change = bench.change(&rewrite);
                assert!(change <= BOUND, "{}, norms in {norms}: {change:e}", case.name);
                for (node, weight) in &rewrite.norms {
                    assert!(
                        weight.iter().all(|&w| norms.round(w) == w),
                        "{} {}",
                        case.name,
                        bench.name(*node)
                    );
                }
            }
        }
    }
}

/// Shows that the test above can fail.
#[test]
fn a_wrong_fold_changes_the_output() {
    for case in cases() {
        let benches = benches(&case, Dtype::F32, 4);
        for (bench, group) in
            benches.iter().flat_map(|bench| bench.groups().into_iter().map(move |g| (bench, g)))
        {
            for i in 0..group.consumers.len() {
                let mut wrong = group.clone();
                let left_out = wrong.consumers.remove(i);
                let mut rewrite = Rewrite::default();
                bench.fold(&mut rewrite, &wrong, Dtype::F32, 5);
                let change = bench.change(&rewrite);
                assert!(change > 0.005, "{} without {}: {change:e}", case.name, bench.name(left_out));
            }
            let op = &bench.block.graph().nodes()[group.producer].op;
            if op.weight_offset() != 0.0 {
                let mut rewrite = Rewrite::default();
                bench.fold(&mut rewrite, &group, Dtype::F32, 5);
                // w / s, as for a norm that multiplies by w.
                let stored: Vec<f32> = flat(bench.block.norm(group.producer));
                let divided = stored.iter().zip(scales(bench.channels(&group), 5)).map(|(w, s)| w / s);
                rewrite.norms.insert(group.producer, divided.collect());
                let change = bench.change(&rewrite);
                assert!(change > 0.05, "{}: {change:e}", case.name);
            }
        }
    }
}

/// Linears that stay float are written as `[in, out]`; quantized linears have one row per output.
#[test]
fn tensors_stored_by_columns_are_written_by_columns() {
    let case = cases().into_iter().find(|case| case.name == "gpt2").unwrap();
    let model = case.random(Dtype::F32, 17);
    let batch = windows(case.vocab(), 6, LENGTH, 18);
    let exact = logits(&model, &batch);
    let (kept, packed) = ("transformer.h.1.attn.c_attn.weight", "transformer.h.1.mlp.c_fc.weight_packed");
    for (method, scheme, bound) in [
        ("rtn", "w4a16-g32-sym", 0.6),
        ("awq", "w8a16-g32-sym", 0.05),
        ("smoothquant", "w8a8-channel-sym", 0.1),
    ] {
        let recipe = Recipe { ignore: vec![Pattern::new("*.c_attn").unwrap()], ..recipe(method, scheme) };
        let written = run(&model, &case.config, &recipe, Some(&batch));
        let stored = written.source.require(kept).unwrap();
        assert_eq!(stored.shape, [64, 192], "{method} {scheme}");
        let (stored, seen) = (written.source.read_f32(kept).unwrap(), model.source().read_f32(kept).unwrap());
        let by_rows: Vec<f32> = (0..192 * 64).map(|at| stored[at % 64 * 192 + at / 64]).collect();
        // AWQ divides the rows of `c_attn` that compute values.
        assert_eq!(by_rows != seen, method == "awq", "{method} {scheme}");
        if scheme.starts_with("w4") {
            assert_eq!(written.source.require(packed).unwrap().shape, [256, 8]);
        }
        let distance = relative_difference(&logits(&written.model(), &batch), &exact);
        assert!(distance < bound, "{method} {scheme}: {distance}");
    }
}

/// Something in between stops the scale, or the linears read a different norm.
#[test]
fn pairs_that_are_not_folds_change_the_output() {
    let cases = cases();
    for (name, producer, consumers) in [
        ("gemma2", "post_attention_layernorm", &["mlp.gate_proj", "mlp.up_proj"][..]),
        ("glm4", "post_self_attn_layernorm", &["mlp.gate_up_proj"]),
        ("olmo2", "post_attention_layernorm", &["mlp.gate_proj", "mlp.up_proj"]),
        ("exaone4", "post_attention_layernorm", &["mlp.gate_proj", "mlp.up_proj"]),
        ("gpt_oss", "mlp.experts.0.up_proj", &["mlp.experts.0.down_proj"]),
        ("gemma4_text", "self_attn.v_proj", &["self_attn.o_proj"]),
        ("phi", "mlp.fc1", &["mlp.fc2"]),
        ("gpt2", "mlp.c_fc", &["mlp.c_proj"]),
        ("bloom", "mlp.dense_h_to_4h", &["mlp.dense_4h_to_h"]),
        ("gemma2", "mlp.gate_proj", &["mlp.down_proj"]),
        ("deepseek_v3", "post_attention_layernorm", &["mlp.experts.0.gate_proj", "mlp.experts.0.up_proj"]),
    ] {
        let case = cases.iter().find(|case| case.name == name).unwrap();
        let bench = benches(case, Dtype::F32, 15).swap_remove(0);
        let graph = bench.block.graph();
        let node = |wanted: &str| (0..graph.nodes().len()).find(|id| graph.name(*id) == wanted).unwrap();
        let consumers: Vec<NodeId> = consumers.iter().map(|name| node(name)).collect();
        let width = |id: NodeId| match &graph.nodes()[id].op {
            Op::Linear { shape, .. } => shape[0],
            op => op.stored_norm().unwrap().1,
        };
        let (producer, input) = (node(producer), graph.all_rows_of(graph.nodes()[consumers[0]].inputs[0]));
        let repeat = graph.width(input) / width(producer);
        let wrong = FoldGroup {
            producer,
            rows: 0..width(producer),
            inspected: consumers[0],
            consumers,
            input,
            repeat,
            run: if repeat == 1 { 1 } else { 16 },
            exponent: 1,
        };
        assert!(!bench.groups().contains(&wrong), "{name}");
        let mut rewrite = Rewrite::default();
        bench.fold(&mut rewrite, &wrong, Dtype::F32, 16);
        let change = bench.change(&rewrite);
        assert!(change > 0.005, "{name} {}: {change:e}", bench.name(producer));
    }
}

/// Scales of queries and keys cancel in the scores, and channels mixed by a rotation must share one.
#[test]
fn queries_and_keys_are_scaled_against_each_other() {
    for case in cases() {
        for bench in benches(&case, Dtype::F32, 6) {
            let pairs = bench.block.graph().query_keys();
            let attends = bench.block.graph().attentions().next().is_some();
            assert_eq!(pairs.len(), usize::from(case.has_pairs && attends), "{}", case.name);
            for pair in pairs {
                let [queries, keys] = pair.producers;
                let graph = bench.block.graph().clone();
                let d = pair.head_dim;
                let kv_heads = pair.rows[1].channels() / d;
                let changed = |respects_partners: bool| {
                    let mut lambda = scales(kv_heads * d, 8);
                    if let Some(rope) = pair.rope.as_ref().filter(|_| respects_partners) {
                        for head in lambda.chunks_exact_mut(d) {
                            for channel in 0..d {
                                head[rope.partner(channel)] = head[channel];
                            }
                        }
                    }
                    let mut rewrite = Rewrite::default();
                    for (id, rows, is_query) in [(queries, pair.rows[0], true), (keys, pair.rows[1], false)] {
                        let shared = if is_query && rows.channels() != d { d * pair.repeat } else { d };
                        let scale = |channel: usize| {
                            let by = lambda[channel / shared * d % lambda.len() + channel % d];
                            if is_query { by } else { 1.0 / by }
                        };
                        match &graph.nodes()[id].op {
                            Op::Linear { shape, .. } => {
                                let divisors = rewrite.rows.entry(id).or_insert_with(|| vec![1.0; shape[0]]);
                                for channel in 0..rows.channels() {
                                    divisors[rows.row(channel)] = 1.0 / scale(channel);
                                }
                            }
                            _ => {
                                let scaled = |v: &Tensor| -> Vec<f32> {
                                    flat(v).iter().enumerate().map(|(i, v)| v * scale(i)).collect()
                                };
                                rewrite.norms.insert(id, scaled(bench.block.norm(id)));
                                if let Some(bias) = bench.block.norm_bias(id) {
                                    rewrite.norm_biases.insert(id, scaled(bias));
                                }
                            }
                        }
                    }
                    bench.change(&rewrite)
                };
                let change = changed(true);
                assert!(change <= BOUND, "{}: {change:e}", case.name);
                if pair.rope.is_some() {
                    assert!(changed(false) > 10.0 * BOUND, "{}", case.name);
                }
            }
        }
    }
}

#[test]
fn channels_may_be_in_any_order_that_the_graph_allows() {
    for case in cases() {
        for bench in benches(&case, Dtype::F32, 7) {
            for group in bench.block.graph().order_groups() {
                let columns = bench.block.linear(group.consumer).weight().shape()[1];
                let channels = columns / group.repeat;
                let unit = group.head.unwrap_or(channels);
                let reversed = |i: usize| (i / unit * unit + unit - 1 - i % unit) as u32;
                let mut rewrite = Rewrite::default();
                for &producer in &group.producers {
                    rewrite.row_order.insert(producer, (0..channels).map(reversed).collect());
                }
                rewrite.column_order.insert(group.consumer, (0..columns).map(reversed).collect());
                let change = bench.change(&rewrite);
                assert!(change <= BOUND, "{} {}: {change:e}", case.name, bench.name(group.consumer));
            }
        }
    }
}

#[test]
fn a_cache_gives_what_whole_windows_give() {
    for case in cases() {
        let model = case.random(Dtype::F32, 8);
        let batch = windows(case.vocab(), 1, LENGTH, 9);
        let tokens = batch.window(0);
        let whole = logits(&model, &batch);
        let vocab = case.vocab();
        let decoder = common::decoder(&model);
        let half = decoder.with_half_cache();
        let paged = half.caching();
        for (decoder, bound) in [(common::decoder(&model), 1e-5), (half, 2e-2)] {
            let mut cache = decoder.cache();
            let (mut at, mut seen) = (0, [Vec::new(), Vec::new()]);
            for piece in [5, 1, 1, 9, 1].into_iter().chain(std::iter::repeat_n(1, LENGTH - 17)) {
                let step = flat(&decoder.step(&tokens[at..at + piece], &mut cache).unwrap());
                at += piece;
                // If frequencies depend on the length, whole windows rotate their first tokens differently.
                if case.grows && at > case.positions {
                    break;
                }
                let expected = match case.grows {
                    true => logits(&model, &windows_of(&tokens[..at])),
                    false => whole[..at * vocab].to_vec(),
                };
                let expected = &expected[(at - 1) * vocab..];
                if case.has_experts() && bound > 1e-5 {
                    seen[0].extend(step);
                    seen[1].extend(expected);
                    continue;
                }
                let distance = relative_difference(&step, expected);
                assert!(distance <= bound, "{} after {at} tokens: {distance:e}", case.name);
            }
            // With rounded keys and values, some tokens are routed to different experts, which causes outliers.
            if let [found, expected] = &seen
                && !found.is_empty()
            {
                let distance = root_mean_square(found, expected);
                assert!(distance <= 4.0 * bound, "{}: {distance:e}", case.name);
            }
        }
        assert_eq!(matches!(paged, KvCaching::Kernels(_)), !case.unlike_kernels, "{}", case.name);
    }
}

fn windows_of(tokens: &[u32]) -> quant_core::calibrate::TokenWindows {
    quant_core::calibrate::TokenWindows::cut(tokens.to_vec(), tokens.len())
}

/// The results are equal up to rounding.
#[test]
fn documents_in_one_window_do_not_see_each_other() {
    for case in cases() {
        for bench in benches(&case, Dtype::F32, 10) {
            let lengths = [[1, 25, 14], [40, 0, 0]];
            let starts: Vec<u32> = lengths
                .iter()
                .flat_map(|l| {
                    (0..3).flat_map(move |i| std::iter::repeat_n(l[..i].iter().sum::<usize>() as u32, l[i]))
                })
                .collect();
            let packed = bench.block.forward_packed(&bench.x, Segments::new(&starts), &mut NoTap).unwrap();
            for (row, lengths) in lengths.iter().enumerate() {
                let mut at = 0;
                for &length in lengths.iter().filter(|l| **l > 0) {
                    let part = |t: &Tensor| t.narrow(0, row, 1).unwrap().narrow(1, at, length).unwrap();
                    let alone = bench.block.forward(&part(&bench.x), 0, None, &mut NoTap).unwrap();
                    let distance = relative_difference(&flat(&part(&packed)), &flat(&alone));
                    assert!(distance <= 1e-5, "{}: {distance:e}", case.name);
                    at += length;
                }
            }
        }
    }
}

#[test]
fn every_method_takes_every_family_through() {
    for case in cases() {
        let model = case.random(Dtype::F32, 11);
        let batch = windows(case.vocab(), 6, LENGTH, 12);
        let exact = logits(&model, &batch);
        for (method, scheme) in [
            ("rtn", "w4a16-g32-sym"),
            ("awq", "w4a16-g32-asym"),
            ("gptq", "w4a16-g32-sym"),
            ("smoothquant", "w8a8-channel-sym"),
        ] {
            let quantized = run(&model, &case.config, &recipe(method, scheme), Some(&batch));
            let found = logits(&quantized.model(), &batch);
            let distance = match case.has_experts() {
                // A token routed to different experts than before is an outlier, not an error.
                true => root_mean_square(&found, &exact),
                false => relative_difference(&found, &exact),
            };
            println!("{} {method}: {distance}", case.name);
            assert!(distance < case.rounding, "{} {method}: {distance}", case.name);
            // An error in a fold would be far larger than 8-bit rounding.
            let bound = if case.has_experts() { 0.15 } else { 0.1 };
            assert!(method != "smoothquant" || distance < bound, "{} {method}: {distance}", case.name);
        }
    }
}

/// Also in parallel blocks, where experts are beside the attention.
#[test]
fn experts_of_every_family_are_calibrated_on_all_tokens() {
    for case in cases().into_iter().filter(Case::has_experts) {
        let model = case.random(Dtype::F32, 11);
        let batch = windows(case.vocab(), 6, LENGTH, 12);
        let exact = logits(&model, &batch);
        let mut all = recipe("gptq", "w4a16-g32-sym");
        all.sampling.experts = ExpertSampling { tokens: ExpertTokens::All, floor: 0 };
        let quantized = run(&model, &case.config, &all, Some(&batch));
        let distance = root_mean_square(&logits(&quantized.model(), &batch), &exact);
        assert!(distance < case.rounding, "{}: {distance}", case.name);
    }
}

/// Linears for which engines keep one scale in common share it.
#[test]
fn linears_of_one_scale_share_it_in_every_family() {
    let float = |quantized: &Quantized, name: &str| {
        quantized.source.info(name).map(|_| quantized.source.read_f32(name).unwrap())
    };
    for case in cases() {
        let model = case.random(Dtype::F32, 11);
        let batch = windows(case.vocab(), 6, LENGTH, 12);
        let exact = logits(&model, &batch);
        let groups = model.architecture().scale_groups();
        for (method, scheme, scale) in [
            ("rtn", "nvfp4a16", "weight_global_scale"),
            ("awq", "nvfp4a16", "weight_global_scale"),
            ("gptq", "nvfp4a16", "weight_global_scale"),
            ("rtn", "nvfp4", "weight_global_scale"),
            ("rtn", "wf8a16-tensor", "weight_scale"),
            ("rtn", "fp8-static", "weight_scale"),
            ("rtn", "fp8", "weight_scale"),
        ] {
            // Falcon-H1's factors of inputs are not part of static scales, so these are refused.
            let request = recipe(method, scheme);
            if matches!(scheme, "fp8-static" | "nvfp4") && !model.architecture().multiplied_inputs.is_empty()
            {
                let refused = Plan::new(&model, &request, request.containers[0]).unwrap_err();
                assert_eq!(refused.category(), Category::Usage);
                assert!(refused.to_string().contains("multiplies its input by a factor"), "{refused}");
                assert_eq!(case.name, "falcon_h1");
                continue;
            }
            // Per channel there is no scale to share.
            let shares = scheme != "fp8";
            let quantized = run(&model, &case.config, &request, Some(&batch));
            let (mut shared, mut scales) = (0, std::collections::BTreeSet::new());
            for group in &groups {
                let of_group: Vec<_> =
                    group.iter().map(|module| float(&quantized, &format!("{module}.{scale}"))).collect();
                let first = of_group[0].clone().unwrap_or_else(|| panic!("{} {}", case.name, group[0]));
                assert!(
                    !shares || first.len() == 1 && of_group.iter().all(|s| s.as_ref() == Some(&first)),
                    "{} {method} {scheme}: {group:?} have {of_group:?}",
                    case.name
                );
                shared += 1;
                scales.insert(first[0].to_bits());
            }
            // Weights are random, so different groups have different scales.
            assert!(shared < 2 || scales.len() > 1, "{} {method} {scheme}", case.name);
            let found = logits(&quantized.model(), &batch);
            let distance = match case.has_experts() {
                true => root_mean_square(&found, &exact),
                false => relative_difference(&found, &exact),
            };
            println!("{} {method} {scheme}: {distance}", case.name);
            let bound = match scheme {
                "nvfp4" => 1.5 * case.rounding,
                "nvfp4a16" => case.rounding,
                _ => case.rounding / 2.0,
            };
            assert!(distance < bound, "{} {method} {scheme}: {distance}", case.name);
        }
    }
}

#[test]
fn scale_groups_cover_experts_and_shared_keys() {
    let groups = |name: &str| {
        let case = cases().into_iter().find(|case| case.name == name).unwrap();
        case.random(Dtype::F32, 1).architecture().scale_groups()
    };
    for (name, pair) in [
        ("qwen2_moe", ["mlp.experts.2.gate_proj", "mlp.experts.2.up_proj"]),
        ("deepseek_v3", ["mlp.experts.1.gate_proj", "mlp.experts.1.up_proj"]),
        ("phimoe", ["block_sparse_moe.experts.1.w1", "block_sparse_moe.experts.1.w3"]),
        ("gpt_oss", ["mlp.experts.0.gate_proj", "mlp.experts.0.up_proj"]),
        ("gemma4_text", ["self_attn.q_proj", "self_attn.k_proj"]),
        ("gemma4-experts", ["self_attn.q_proj", "self_attn.k_proj"]),
        ("gemma4-experts", ["experts.3.gate_proj", "experts.3.up_proj"]),
    ] {
        let expected = pair.map(|module| format!("model.layers.1.{module}"));
        assert!(groups(name).iter().any(|group| group[..] == expected), "{name}: {:?}", groups(name));
    }
}

#[test]
fn an_fp8_cache_is_refused_with_the_reason() {
    for (name, reason) in [
        (
            "gemma4-small",
            "keys and values of block 2 cannot be cached in FP8: it reads those that an earlier block cached",
        ),
        (
            "deepseek_v3",
            "keys and values of block 0 cannot be cached in FP8: engines cache a latent vector instead",
        ),
    ] {
        let case = cases().into_iter().find(|case| case.name == name).unwrap();
        let mut recipe = recipe("rtn", "wf8a16-channel");
        recipe.settings.kv = Some(KvScheme::Kvf8);
        let error = Plan::new(&case.random(Dtype::F32, 1), &recipe, recipe.containers[0]).unwrap_err();
        assert_eq!(error.category(), Category::Usage, "{name}");
        assert_eq!(error.to_string(), reason, "{name}");
    }
}

/// All steps of QServe, without rotation where a family does not allow it. SmoothAttention covers every attention, or
/// says why it does not.
#[test]
fn smooth_attention_is_run_or_explained_in_every_family() {
    for case in cases() {
        let float = case.random(Dtype::F32, 11);
        let batch = windows(case.vocab(), 6, LENGTH, 12);
        let exact = logits(&float, &batch);
        let rotates = case.not_rotated_for.is_none();
        let model = if rotates { rotate(&float).unwrap() } else { float };
        let steps = "reorder,smooth-attention,smooth-outputs,gptq";
        let method = if rotates { format!("rotate,{steps}") } else { steps.to_owned() };
        let mut recipe = recipe(&method, "w4a8-g32");
        recipe.settings.kv = Some(KvScheme::Kv4);
        recipe.settings.steps.set(AttentionSettings { alpha: Some(Alpha::Fixed(0.5)) });
        let plan = Plan::new(&model, &recipe, recipe.containers[0]).unwrap();
        let explained = plan.step_notes().iter().any(|note| note.contains("`smooth-attention` leaves"));
        let quantized = run(&model, &case.config, &recipe, Some(&batch));
        let smoothed = quantized.report.tensors.iter().filter(|t| t.attention.is_some()).count();
        // Linears have a record; norms of keys are not quantized and have none.
        let of_linears = |layer: usize| {
            let graph = model.architecture().graph(layer);
            let of_linear = |pair: &QueryKey| graph.nodes()[pair.producers[1]].op.linear_shape().is_some();
            graph.query_keys().iter().filter(|pair| of_linear(pair)).count()
        };
        assert_eq!(
            smoothed,
            (0..model.architecture().layers).map(of_linears).sum::<usize>(),
            "{}",
            case.name
        );
        assert_eq!(explained, !case.has_pairs, "{}: {:?}", case.name, plan.step_notes());
        assert_eq!(quantized.report.notes, plan.step_notes(), "{}", case.name);
        let found = logits(&quantized.model(), &batch);
        let distance = match case.has_experts() {
            true => root_mean_square(&found, &exact),
            false => relative_difference(&found, &exact),
        };
        println!("{}: {distance}", case.name);
        assert!(distance < 1.5 * case.rounding, "{}: {distance}", case.name);
    }
}

/// The root mean square of the difference, relative to that of `b`.
fn root_mean_square(a: &[f32], b: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let difference = squares(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
    (difference / squares(&mut b.iter().map(|b| f64::from(*b)))).sqrt()
}

#[test]
fn what_cannot_be_rotated_is_refused_with_the_reason() {
    for case in cases() {
        let model = case.random(Dtype::F32, 13);
        match (rotate(&model), case.not_rotated_for) {
            (Ok(rotated), None) => {
                let batch = windows(case.vocab(), 1, LENGTH, 14);
                let distance = relative_difference(&logits(&rotated, &batch), &logits(&model, &batch));
                assert!(distance < 1e-4, "{}: {distance:e}", case.name);
            }
            (Err(error), Some(reason)) => {
                let message = error.to_string();
                assert!(
                    message.contains(reason) && message.contains(case.family()),
                    "{}: {message}",
                    case.name
                );
            }
            (Ok(_), Some(_)) => panic!("{} was rotated", case.name),
            (Err(error), None) => panic!("{}: {error}", case.name),
        }
    }
}

#[test]
fn what_is_not_computed_is_refused_by_its_field() {
    let cases = cases();
    for (name, field, value) in [
        ("smollm3", "no_rope_layers", json!([1, 1])),
        ("smollm3", "no_rope_layers", json!([1, 1, 2])),
        ("smollm3", "no_rope_layer_interval", json!(0)),
        ("granite", "residual_multiplier", json!(0.0)),
        ("granite", "logits_scaling", json!(-1.0)),
        ("granite", "attention_multiplier", json!("1")),
        ("granite", "embedding_multiplier", json!(1e300)),
        ("ministral3", "rope_parameters", Value::Null),
        ("ministral3", "llama_4_scaling_beta", json!({ "rope_type": "default" })),
        ("gemma2", "hidden_activation", json!("silu")),
        ("gemma2", "use_bidirectional_attention", json!(true)),
        ("gemma2", "attn_logit_softcapping", json!(-50.0)),
        ("gemma2", "query_pre_attn_scalar", json!(0)),
        ("gemma2", "sliding_window", Value::Null),
        ("gemma3_text", "attn_logit_softcapping", json!(50.0)),
        ("gemma3_text", "layer_types", json!(["full_attention"])),
        ("gemma3_text", "sliding_window_pattern", json!(0)),
        ("olmo2", "rms_norm_eps", json!(-1e-5)),
        ("glm", "partial_rotary_factor", json!(1.5)),
        ("phi3", "num_key_value_heads", json!(3)),
        ("phi3", "hidden_act", json!("gelu")),
        ("phi", "hidden_act", json!("relu")),
        ("cohere", "use_qk_norm", json!("yes")),
        ("internlm2", "num_key_value_heads", json!(3)),
        ("internlm2", "hidden_act", json!("gelu")),
        ("internlm3", "qkv_bias", json!(1)),
        ("gpt2", "add_cross_attention", json!(true)),
        ("granitemoehybrid", "layer_types", json!(["mamba", "attention"])),
        ("granitemoehybrid", "layer_types", json!(["mamba", "attention", "conv"])),
        ("granitemoehybrid", "mamba_n_heads", json!(7)),
        ("granitemoehybrid", "mamba_d_head", json!(7)),
        ("granitemoehybrid", "position_embedding_type", json!("alibi")),
        ("granitemoehybrid", "shared_intermediate_size", Value::Null),
        ("granitemoehybrid, experts", "num_experts_per_tok", json!(3)),
        ("gpt2", "activation_function", json!("silu")),
        ("bloom", "apply_residual_connection_post_layernorm", json!(true)),
        ("bloom", "n_inner", json!(100)),
        ("hy_v3", "router_scaling_factor", Value::Null),
        ("hy_v3", "qk_norm", json!(false)),
        ("hy_v3", "route_norm", json!(false)),
        ("hy_v3", "mlp_layer_types", json!(["sparse"])),
        ("hy_v3", "moe_intermediate_size", json!(0)),
        ("cohere2", "head_dim", json!(24)),
        ("gpt_neox", "num_key_value_heads", json!(2)),
        ("gpt_neox", "rotary_pct", json!(0.0)),
        ("starcoder2", "use_bias", json!(1)),
        ("qwen3_5_text", "linear_num_value_heads", json!(3)),
        ("qwen3_5_text", "linear_key_head_dim", json!(1 << 30)),
        ("qwen3_5_text", "linear_conv_kernel_dim", json!(0)),
        ("qwen3_5_text", "layer_types", json!(["full_attention"])),
        ("qwen3_5_text", "layer_types", json!(["full_attention", "sliding_attention", "full_attention"])),
        ("gemma4_text", "num_kv_shared_layers", json!(4)),
        ("gemma4_text", "num_kv_shared_layers", json!(3)),
        ("gemma4_text", "num_kv_shared_layers", json!(-1)),
        ("gemma4_text", "enable_moe_block", json!(1)),
        ("gemma4-small", "num_kv_shared_layers", json!(3)),
        ("gemma4-small", "vocab_size_per_layer_input", json!(79)),
        ("gemma4-small", "hidden_size_per_layer_input", json!(1_u64 << 40)),
        ("gemma4-small", "num_hidden_layers", json!(5000)),
        ("gemma4-experts", "top_k_experts", json!(5)),
        ("gemma4-experts", "num_experts", Value::Null),
        ("gemma4-experts", "moe_intermediate_size", json!(0)),
        ("qwen3_next, experts", "num_experts_per_tok", json!(4)),
        ("qwen3_next, experts", "shared_expert_intermediate_size", Value::Null),
        ("qwen3_5_moe_text", "norm_topk_prob", json!(false)),
        ("qwen3_5_moe_text", "moe_intermediate_size", json!(0)),
        ("qwen3_5_moe_text", "num_experts", json!(1_u64 << 40)),
        ("lfm2_moe", "num_experts", json!(0)),
        ("lfm2_moe", "routed_scaling_factor", json!(-1.0)),
        ("gemma4_text", "use_bidirectional_attention", json!("all")),
        ("gemma4_text", "num_global_key_value_heads", json!(3)),
        ("gemma4_text", "rope_parameters", Value::Null),
        ("llama4_text", "attention_chunk_size", Value::Null),
        ("llama4_text", "attention_chunk_size", json!(0)),
        ("llama4_text", "no_rope_layers", json!([1, 1])),
        ("llama4_text", "no_rope_layers", json!([1, 1, 2])),
        ("llama4_text", "moe_layers", json!([3])),
        ("llama4_text", "interleave_moe_layer_step", json!(0)),
        ("llama4_text", "layer_types", json!(["chunked_attention"])),
        ("llama4_text", "layer_types", json!(["chunked_attention", "full_attention", "sliding_attention"])),
        ("llama4_text", "num_experts_per_tok", json!(4)),
        ("llama4_text, not rotated", "attn_scale", json!(-0.1)),
        ("llama4_text, not rotated", "floor_scale", json!(0)),
        ("llama4_text, not rotated", "intermediate_size_mlp", json!(0)),
        ("phimoe", "num_experts_per_tok", json!(1)),
        ("phimoe", "router_jitter_noise", json!(-0.1)),
        ("phimoe", "sliding_window", json!(0)),
        ("cohere2_moe", "expert_selection_fn", json!("sparsemax")),
        ("cohere2_moe", "shared_expert_combination_strategy", json!("maximum")),
        ("cohere2_moe", "mlp_layer_types", json!(["dense", "sparse"])),
        ("cohere2_moe", "num_experts", json!(0)),
        ("cohere2_moe", "prefix_dense_sliding_window_pattern", json!(0)),
        ("cohere2_moe", "num_shared_experts", json!(-1)),
        ("mistral4", "rope_parameters", Value::Null),
        ("mistral4", "llama_4_scaling_beta", json!({ "rope_type": "default" })),
        ("mistral4", "n_group", json!(3)),
        ("mistral4", "kv_lora_rank", json!(0)),
        ("nemotron_h", "layers_block_type", json!(["experts", "mlp", "full_attention"])),
        ("nemotron_h, experts", "n_shared_experts", json!(2)),
        ("nemotron_h, experts", "moe_latent_size", json!(0)),
        ("nemotron_h, experts", "num_experts_per_tok", json!(4)),
        ("nemotron_h, experts", "moe_shared_expert_intermediate_size", Value::Null),
        ("nemotron_h, latent experts", "n_group", json!(3)),
        ("nemotron_h", "layers_block_type", json!(["conv"])),
        ("nemotron_h", "layers_block_type", Value::Null),
        ("nemotron_h", "num_hidden_layers", json!(4)),
        ("nemotron_h", "n_groups", json!(3)),
        ("nemotron_h", "mamba_num_heads", json!(1 << 20)),
        ("nemotron_h", "time_step_limit", json!([1.0, 0.5])),
        ("nemotron_h", "time_step_limit", json!("none")),
        ("nemotron_h", "mlp_hidden_act", json!("silu")),
        ("nemotron_h", "mamba_hidden_act", json!("gelu")),
        ("nemotron_h", "sliding_window", json!(8)),
        ("falcon_h1", "ssm_multipliers", json!([1.0])),
        ("falcon_h1", "mlp_multipliers", json!([0.0, 1.0])),
        ("falcon_h1", "mamba_d_ssm", json!(60)),
        ("falcon_h1", "mamba_proj_bias", json!(true)),
        ("lfm2", "layer_types", json!(["conv", "linear_attention", "conv"])),
        ("lfm2", "block_ffn_dim_multiplier", json!(1e30)),
        ("lfm2", "conv_L_cache", json!(0)),
    ] {
        let case = cases.iter().find(|case| case.name == name).unwrap();
        let mut config = case.config.clone();
        // This field is nested in an object.
        let key = if field == "llama_4_scaling_beta" { "rope_parameters" } else { field };
        config.insert(key.into(), value.clone());
        let fields = ConfigFields::new(Path::new("config.json"), &config);
        let message = arch::describe(&fields, &MemorySource::new()).expect_err(field).to_string();
        assert!(message.contains(&format!("{field}`")), "{name} {field} {value}: {message}");
    }
}

/// Default patterns of sliding windows and rotated layers, if the configuration does not list the layers.
#[test]
fn patterns_of_layers_are_those_of_the_family() {
    let (slides, turns) = (Some(7), true);
    type Layers = Vec<(Option<usize>, bool)>;
    let expected: [(&str, Layers); 8] = [
        ("smollm3", [(None, true), (None, true), (None, true), (None, false)].repeat(2)),
        ("gemma2", [(slides, true), (None, true)].repeat(4)),
        ("gemma3_text", [vec![(slides, true); 5], vec![(None, true)], vec![(slides, true); 2]].concat()),
        ("olmo3", [vec![(slides, turns); 3], vec![(None, turns)]].concat().repeat(2)),
        ("exaone4", [vec![(slides, turns); 3], vec![(None, false)]].concat().repeat(2)),
        ("cohere2", [vec![(slides, turns); 3], vec![(None, false)]].concat().repeat(2)),
        ("starcoder2", vec![(slides, turns); 8]),
        ("gemma4_text", [vec![(slides, true); 5], vec![(None, true), (slides, true), (None, true)]].concat()),
    ];
    for (name, expected) in expected {
        let case = cases().into_iter().find(|case| case.name == name).unwrap();
        let mut config = case.config;
        for key in ["layer_types", "no_rope_layer_interval", "sliding_window_pattern", "use_sliding_window"] {
            config.remove(key);
        }
        config.insert("num_hidden_layers".into(), json!(8));
        let architecture =
            arch::describe(&ConfigFields::new(Path::new("config.json"), &config), &MemorySource::new())
                .unwrap();
        let found = (0..8).map(|layer| {
            let graph = architecture.graph(layer);
            let rotated = graph.nodes().iter().any(|node| matches!(node.op, Op::Rope(_)));
            (graph.attentions().next().unwrap().window, rotated)
        });
        assert_eq!(found.collect::<Vec<_>>(), expected, "{name}");
    }
}

#[test]
fn model_types_must_fit() {
    for case in cases() {
        let mut config = case.config.clone();
        let describe = |config: &Map<String, Value>| {
            arch::describe(&ConfigFields::new(Path::new("config.json"), config), &MemorySource::new())
                .map(|a| a.family)
        };
        config.insert("model_type".into(), json!(case.family()));
        assert_eq!(describe(&config).unwrap(), case.family());
        config.insert("model_type".into(), json!("opt"));
        assert!(describe(&config).unwrap_err().to_string().contains("model_type"));
    }
}

/// A block after the last one may predict further tokens, but then it has tensors of its own.
#[test]
fn a_configuration_with_a_layer_too_few_is_refused() {
    let case = cases().into_iter().find(|case| case.name == "deepseek_v3").unwrap();
    let complete = case.random(Dtype::F32, 71);
    let layers = complete.architecture().layers;
    let mut config = case.config.clone();
    config.insert("num_hidden_layers".into(), json!(layers - 1));
    config.insert("num_nextn_predict_layers".into(), json!(1));
    let mut source = MemorySource::new();
    for name in complete.source().names() {
        let (shape, values) =
            (complete.source().require(name).unwrap().shape.clone(), complete.source().read_f32(name));
        source.insert_f32(name.to_owned(), Dtype::F32, shape, &values.unwrap()).unwrap();
    }
    let open = |source: MemorySource| Model::new(Arc::new(source), Path::new("config.json"), &config);
    let error = open(source.clone()).map(|_| ()).unwrap_err();
    assert_eq!(error.category(), Category::Input);
    let message = error.to_string();
    assert!(
        message.contains("num_hidden_layers") && message.contains(&format!("block {}", layers - 1)),
        "{message}"
    );
    let name = format!("model.layers.{}.eh_proj.weight", layers - 1);
    source.insert_f32(name, Dtype::F32, vec![1], &[0.5]).unwrap();
    assert_eq!(open(source).unwrap().architecture().layers, layers - 1);
}
