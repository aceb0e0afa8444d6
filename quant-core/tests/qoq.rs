//! QoQ's rewrites: each leaves the model's output unchanged in every family that allows it, is rejected with a reason
//! in all other families, and has the intended effect.

use crate::common;

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use common::{Kind, Tiny, flat, logits, mean_divergence, normal, relative_difference};
use quant_core::calibrate::{ChannelRanges, HiddenStates, Packing, Sampling, TokenWindows};
use quant_core::checkpoint::{Dtype, MemorySource, TensorSource};
use quant_core::model::{
    Block, KvScheme, Linear, Model, NoTap, NodeId, Preparation, Tap, TokenRows, WeightBody,
};
use quant_core::quantize::quantize_rtn;
use quant_core::recipe::{Plan, Recipe, kv, method};
use quant_core::transform::{
    Alpha, AttentionSettings, Automatic, BlockTask, Clip, LinearGrid, OutputSettings, Reorder, Rewrite,
    SmoothAttention, SmoothOutputs, StepSettings, Transform, TransformSettings, fold_norms, rotate,
};
use quant_core::{CancelToken, Category, Result};
use quant_kernels_cpu::Serial;
use quant_kernels_cpu::candle::Runner;
use rand::SeedableRng;
use rand::rngs::StdRng;

/// Maximum change of an output by rounding in `f32`, relative to its largest value.
const BOUND: f64 = 1e-5;
const LENGTH: usize = 32;

fn families() -> Vec<(&'static str, Tiny)> {
    let biased = Tiny { attention_bias: true, mlp_bias: true, ..Tiny::default() };
    vec![
        ("llama", Tiny::default()),
        ("llama, biases", biased.clone()),
        ("llama, every head its own, biases", Tiny { kv_heads: 4, ..biased.clone() }),
        ("llama, tied", Tiny { tied: true, ..Tiny::default() }),
        ("llama, heads wider than their share", Tiny { head_dim: 24, hidden: 80, ..Tiny::default() }),
        ("mistral", Tiny { family: Kind::Mistral(Some(5)), ..Tiny::default() }),
        ("qwen2", Tiny { family: Kind::Qwen2, ..Tiny::default() }),
        ("qwen3", Tiny { family: Kind::Qwen3, head_dim: 24, ..Tiny::default() }),
        ("qwen3, biases, tied", Tiny { family: Kind::Qwen3, tied: true, ..biased }),
    ]
}

fn windows(tiny: &Tiny) -> TokenWindows {
    common::masked_windows(tiny.vocab, 4, LENGTH, 5)
}

#[test]
fn rotation_leaves_logits_unchanged() {
    for (name, tiny) in families() {
        let checkpoint = tiny.random(7);
        let model = checkpoint.model();
        let rotated = rotate(&model).unwrap();
        assert!(rotated.is_rotated() && !model.is_rotated());
        let windows = common::windows(tiny.vocab, 2, LENGTH, 3);
        let change = relative_difference(&logits(&rotated, &windows), &logits(&model, &windows));
        assert!(change <= BOUND, "{name}: {change:e}");
        // Norms are folded, the last one into the head, so the head is no longer tied to the embedding.
        assert!(!rotated.architecture().tied, "{name}");
        for norm in ["model.norm", "model.layers.1.input_layernorm"] {
            let gamma = rotated.source().read_f32(&format!("{norm}.weight")).unwrap();
            assert!(gamma.iter().all(|&g| g == 1.0), "{name}: {norm}");
        }
        for linear in ["q_proj", "o_proj"] {
            let tensor = format!("model.layers.0.self_attn.{linear}.weight");
            let of = |model: &Model| model.source().read_f32(&tensor).unwrap();
            assert!(
                relative_difference(&of(&rotated), &of(&model)) > 0.1,
                "{name}: {linear} stays as it was"
            );
        }
    }
}

#[test]
fn folded_norms_leave_logits_unchanged() {
    // Sizes without a Hadamard matrix are folded, too.
    let odd = ("llama, a size without a matrix", Tiny { hidden: 74, ..Tiny::default() });
    for (name, tiny) in families().into_iter().chain([odd]) {
        let model = tiny.random(7).model();
        let folded = fold_norms(&model).unwrap();
        assert!(!folded.is_rotated() && folded.preparation() == Some(Preparation::FoldNorms));
        let windows = common::windows(tiny.vocab, 2, LENGTH, 3);
        let change = relative_difference(&logits(&folded, &windows), &logits(&model, &windows));
        assert!(change <= BOUND, "{name}: {change:e}");
        assert!(!folded.architecture().tied && folded.untied_by_preparation() == tiny.tied, "{name}");
        let of = |model: &Model, tensor: &str| model.source().read_f32(tensor).unwrap();
        for norm in ["model.norm", "model.layers.1.input_layernorm"] {
            assert!(of(&folded, &format!("{norm}.weight")).iter().all(|&g| g == 1.0), "{name}: {norm}");
        }
        for (linear, changes) in [("self_attn.q_proj", true), ("self_attn.o_proj", false)] {
            let tensor = format!("model.layers.0.{linear}.weight");
            assert_eq!(of(&folded, &tensor) != of(&model, &tensor), changes, "{name}: {linear}");
        }
        assert_eq!(of(&folded, "model.embed_tokens.weight"), of(&model, "model.embed_tokens.weight"));
    }
    let error = fold_norms(&Tiny::opt().random(1).model()).map(drop).unwrap_err();
    assert_eq!(error.category(), Category::Usage);
    assert!(error.remedy().marked().contains("‹skip=fold-norms›"), "{}", error.remedy());
}

#[test]
fn rotated_tensors_are_read_in_any_pieces() {
    let tiny = Tiny { attention_bias: true, dtype: Dtype::Bf16, norm_dtype: Dtype::F16, ..Tiny::default() };
    let rotated = rotate(&tiny.random(3).model()).unwrap();
    let source = rotated.source();
    for name in source.names() {
        let whole = source.read(name).unwrap();
        for piece in [1, 7, 130, 1000] {
            let mut at = 0;
            for part in whole.chunks(piece).take(40) {
                let mut read = vec![0; part.len()];
                source.read_range(name, at, &mut read).unwrap();
                assert_eq!(read, part, "{name} at {at}");
                at += part.len() as u64;
            }
        }
        assert!(source.read_range(name, whole.len() as u64, &mut [0]).is_err(), "{name}");
    }
    assert!(source.read("model.layers.9.mlp.up_proj.weight").is_err());
}

#[test]
fn a_last_norm_of_ones_leaves_the_head_tied() {
    let tiny = Tiny { tied: true, ..Tiny::default() };
    let mut checkpoint = tiny.random(4);
    checkpoint.values("model.norm.weight").fill(1.0);
    let model = checkpoint.model();
    let rotated = rotate(&model).unwrap();
    assert!(rotated.architecture().tied);
    assert!(rotated.source().info("lm_head.weight").is_none());
    let windows = common::windows(tiny.vocab, 2, LENGTH, 3);
    assert!(relative_difference(&logits(&rotated, &windows), &logits(&model, &windows)) <= BOUND);
}

#[test]
fn rotation_spreads_outliers() {
    let mut checkpoint = Tiny::default().random(9);
    let hidden = checkpoint.tiny.hidden;
    // A channel of the residual stream that dwarfs the others.
    for row in checkpoint.values("model.embed_tokens.weight").chunks_exact_mut(hidden) {
        row[5] = 50.0;
    }
    let model = checkpoint.model();
    let rotated = rotate(&model).unwrap();
    let outlier = |model: &Model| {
        let states = HiddenStates::embed(model, &windows(&checkpoint.tiny)).unwrap();
        let x = flat(&states.chunks().next().unwrap().unwrap().1);
        let rms = (x.iter().map(|v| f64::from(v * v)).sum::<f64>() / x.len() as f64).sqrt();
        f64::from(x.iter().fold(0.0_f32, |m, v| m.max(v.abs()))) / rms
    };
    let (before, after) = (outlier(&model), outlier(&rotated));
    assert!(before > 7.0 && after < 2.0, "{before} becomes {after}");
}

#[test]
fn what_cannot_be_rotated_is_refused_with_the_reason() {
    let refused = |tiny: Tiny| {
        let error = rotate(&tiny.random(1).model()).map(drop).unwrap_err();
        assert_eq!(error.category(), Category::Usage);
        error.to_string()
    };
    assert!(refused(Tiny::opt()).contains("learned positions"));
    // There is no Hadamard matrix of order 74: beyond 2, the order must be a multiple of 4.
    let message = refused(Tiny { hidden: 74, ..Tiny::default() });
    assert!(message.contains("order 74"), "{message}");
    let checkpoint = Tiny::default().random(2);
    let written = common::run(
        &checkpoint.model(),
        &checkpoint.tiny.config(),
        &common::recipe("rtn", "w8a16-g32"),
        None,
    );
    assert!(matches!(rotate(&written.model()), Err(quant_core::Error::AlreadyQuantized { .. })));
}

#[test]
fn non_finite_values_are_reported_with_their_place() {
    for tensor in ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight"] {
        let mut checkpoint = Tiny::default().random(2);
        checkpoint.values(tensor)[3] = f32::NAN;
        let rotated = rotate(&checkpoint.model()).unwrap();
        let error = rotated.source().read(tensor).unwrap_err();
        let quant_core::Error::NonFinite { tensor: named, first_index, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!((named.as_str(), *first_index), (tensor, 3));
    }
}

struct Bench {
    model: Model,
    block: Block,
    hidden: HiddenStates,
    ranges: BTreeMap<NodeId, ChannelRanges>,
    norm_dtypes: BTreeMap<NodeId, Dtype>,
    grids: BTreeMap<NodeId, LinearGrid>,
    settings: TransformSettings,
}

struct Ranges<'a>(&'a Block, BTreeMap<NodeId, ChannelRanges>);

impl Tap for Ranges<'_> {
    fn linear_input(&mut self, linear: NodeId, x: &Tensor, _tokens: TokenRows<'_>) -> Result<()> {
        let value = self.0.graph().nodes()[linear].inputs[0];
        let k = x.dims3()?.2;
        self.1.entry(value).or_insert_with(|| ChannelRanges::new(k)).add(&flat(x));
        Ok(())
    }
}

impl Bench {
    fn new(tiny: &Tiny, settings: TransformSettings) -> Self {
        Self::of(tiny.random(11).model(), tiny, settings)
    }

    fn of(model: Model, tiny: &Tiny, settings: TransformSettings) -> Self {
        let block = model.block(0, &model.rope(LENGTH).unwrap()).unwrap();
        let hidden = HiddenStates::embed(&model, &windows(tiny)).unwrap();
        let mut ranges = Ranges(&block, BTreeMap::new());
        hidden.watch(&block, &CancelToken::new(), &mut ranges).unwrap();
        let ranges = ranges.1;
        let norm_dtypes = block.graph().norms().map(|(id, ..)| (id, tiny.norm_dtype)).collect();
        let grid =
            LinearGrid { scheme: "w4a8-g16-asym".parse().unwrap(), scale_dtype: Dtype::F16, fused: None };
        let grids = block.graph().linears().map(|(id, ..)| (id, grid)).collect();
        Self { model, block, hidden, ranges, norm_dtypes, grids, settings }
    }

    fn search(&mut self, transform: &dyn Transform, block: &Block, before: &Rewrite) -> Result<Rewrite> {
        let prefix = self.model.architecture().in_block(0, "");
        let ranges = before.ranges(self.block.graph(), self.ranges.clone());
        let cancel = CancelToken::new();
        let mut task = BlockTask::new(&prefix, block, &self.settings, &cancel);
        (task.grids, task.norm_dtypes, task.ranges) = (&self.grids, &self.norm_dtypes, &ranges);
        Ok(transform.search(&[task], Some(&mut self.hidden), false)?.swap_remove(0))
    }

    /// The change of the block's output by a rewrite, relative to its largest value.
    fn change(&self, rewrite: &Rewrite) -> f64 {
        let mut rng = StdRng::seed_from_u64(1);
        let hidden = self.model.architecture().hidden;
        let x: Vec<f32> = (0..2 * 24 * hidden).map(|_| normal(&mut rng)).collect();
        let x = Tensor::from_vec(x, (2, 24, hidden), &Device::Cpu).unwrap();
        let output = |block: &Block| {
            // The residual stream would hide an error of the branches, so it is subtracted.
            flat(&(block.forward(&x, 0, None, &mut NoTap).unwrap() - &x).unwrap())
        };
        relative_difference(&output(&rewrite.apply(&self.block).unwrap()), &output(&self.block))
    }

    fn id(&self, name: &str) -> NodeId {
        let graph = self.block.graph();
        (0..graph.nodes().len()).find(|&id| graph.name(id) == name).unwrap()
    }
}

fn all_families() -> Vec<(&'static str, Tiny)> {
    let plain = Tiny { attention_bias: false, mlp_bias: false, ..Tiny::opt() };
    families()
        .into_iter()
        .chain([
            ("opt", Tiny::opt()),
            ("opt without biases", plain),
            (
                "qwen3, norms in bf16",
                Tiny { family: Kind::Qwen3, norm_dtype: Dtype::Bf16, ..Tiny::default() },
            ),
        ])
        .collect()
}

#[test]
fn every_step_leaves_the_block_unchanged_alone_and_after_others() {
    let auto = Some(Alpha::Auto(Automatic::Auto));
    for (name, tiny) in all_families() {
        for (outputs, attention) in [(None, Some(Alpha::Fixed(0.5))), (auto, auto)] {
            let mut steps = StepSettings::of(OutputSettings { alpha: outputs });
            steps.set(AttentionSettings { alpha: attention });
            let settings = TransformSettings { steps, kv: Some(KvScheme::Kv4), ..Default::default() };
            let mut bench = Bench::new(&tiny, settings);
            let steps: [&dyn Transform; 3] = [&Reorder, &SmoothAttention, &SmoothOutputs];
            let mut all = Rewrite::default();
            for step in steps {
                let original = bench.block.clone();
                let alone = bench.search(step, &original, &Rewrite::default()).unwrap();
                let change = bench.change(&alone);
                assert!(change <= BOUND, "{name}: {} alone: {change:e}", step.name());
                let rewritten = all.apply(&bench.block).unwrap();
                let next = bench.search(step, &rewritten, &all).unwrap();
                all = all.then(next).unwrap();
                let change = bench.change(&all);
                assert!(change <= BOUND, "{name}: up to {}: {change:e}", step.name());
            }
            // All changes are present: reordered rows and columns, divided rows of keys, multiplied columns.
            let linear = |suffix: &str| {
                let graph = bench.block.graph();
                graph.linears().find(|(_, n, ..)| n.ends_with(suffix)).unwrap().0
            };
            let down = if tiny.family == Kind::Opt { "fc2" } else { "down_proj" };
            assert!(
                all.column_order.contains_key(&linear(down)) && all.row_order.contains_key(&linear("v_proj"))
            );
            assert!(outputs == auto || all.columns.contains_key(&linear(down)), "{name}");
            let keys = all.attention[0].alpha;
            if attention != auto {
                let moved = match tiny.family {
                    Kind::Qwen3 => all.norms.contains_key(&bench.id("self_attn.k_norm")),
                    _ => all.rows.contains_key(&linear("k_proj")),
                };
                assert!(moved && keys == 0.5, "{name}");
            }
        }
    }
}

/// Shows that the test above can fail.
#[test]
fn an_order_that_is_not_the_same_everywhere_changes_the_block() {
    let mut bench = Bench::new(&Tiny::default(), TransformSettings::default());
    let block = bench.block.clone();
    let rewrite = bench.search(&Reorder, &block, &Rewrite::default()).unwrap();
    for node in rewrite.row_order.keys() {
        let mut wrong = rewrite.clone();
        wrong.row_order.remove(node);
        assert!(bench.change(&wrong) > 0.01, "without {}", bench.block.graph().name(*node));
    }
}

#[test]
fn channels_are_sorted_by_what_the_text_drives_them_to() {
    let mut bench = Bench::new(&Tiny::default(), TransformSettings::default());
    let block = bench.block.clone();
    let rewrite = bench.search(&Reorder, &block, &Rewrite::default()).unwrap();
    let after = rewrite.ranges(block.graph(), bench.ranges.clone());
    let down = bench.id("mlp.down_proj");
    let maxima = after[&block.graph().nodes()[down].inputs[0]].maxima();
    assert!(maxima.is_sorted(), "{maxima:?}");
    // The computed ranges equal those observed in the rewritten block.
    let rewritten = rewrite.apply(&block).unwrap();
    let mut seen = Ranges(&rewritten, BTreeMap::new());
    bench.hidden.watch(&rewritten, &CancelToken::new(), &mut seen).unwrap();
    for (value, ranges) in &after {
        let (a, b) = (ranges.maxima(), seen.1[value].maxima());
        assert!(relative_difference(&a, &b) < 1e-5);
    }
}

/// Three channels of every key head are twenty times as large as at random, and the same channels of query heads a
/// twentieth.
fn outlying_keys(tiny: &Tiny) -> common::Checkpoint {
    let mut checkpoint = tiny.random(21);
    let (hidden, d) = (tiny.hidden, tiny.head_dim);
    for layer in 0..tiny.layers {
        let (q, k) = (
            format!("{}self_attn.q_proj.weight", tiny.block(layer)),
            format!("{}self_attn.k_proj.weight", tiny.block(layer)),
        );
        for head in 0..tiny.kv_heads {
            for channel in [1, 3, 1 + d / 2] {
                let row = head * d + channel;
                checkpoint.values(&k)[row * hidden..(row + 1) * hidden].iter_mut().for_each(|w| *w *= 20.0);
            }
        }
        for head in 0..tiny.heads {
            for channel in [1, 3, 1 + d / 2] {
                let row = head * d + channel;
                checkpoint.values(&q)[row * hidden..(row + 1) * hidden].iter_mut().for_each(|w| *w /= 20.0);
            }
        }
    }
    checkpoint
}

#[test]
fn smooth_attention_takes_outliers_out_of_keys() {
    for (tiny, share) in [(Tiny::default(), 0.15), (Tiny { family: Kind::Qwen2, ..Tiny::default() }, 0.15)] {
        let settings = TransformSettings { kv: Some(KvScheme::Kv4), ..Default::default() };
        let mut bench = Bench::of(outlying_keys(&tiny).model(), &tiny, settings);
        let block = bench.block.clone();
        let rewrite = bench.search(&SmoothAttention, &block, &Rewrite::default()).unwrap();
        let record = &rewrite.attention[0];
        assert_eq!(record.keys, "model.layers.0.self_attn.k_proj");
        assert_eq!(record.tried.len(), 11);
        let (before, best) =
            (record.tried[0].error, record.tried.iter().map(|t| t.error).fold(f64::MAX, f64::min));
        let chosen = record.tried.iter().find(|t| t.ratio == Some(record.alpha)).unwrap();
        assert_eq!(chosen.error, best);
        assert!(best < share * before, "{best} of {before}");
    }
}

#[test]
fn nan_is_reported() {
    let tiny = Tiny::default();
    let mut checkpoint = tiny.random(3);
    checkpoint.values("model.layers.0.self_attn.k_proj.weight").iter_mut().for_each(|w| *w *= 1e38);
    checkpoint.values("model.embed_tokens.weight").iter_mut().for_each(|w| *w *= 1e6);
    let mut bench = Bench::of(checkpoint.model(), &tiny, TransformSettings::default());
    let block = bench.block.clone();
    let outcome = bench.search(&SmoothAttention, &block, &Rewrite::default());
    let error = outcome.unwrap_err();
    assert_eq!(error.category(), Category::Numeric, "{error}");
    assert!(error.to_string().contains("a key becomes NaN or infinite"), "{error}");
}

fn qoq(method: &str, scheme: &str) -> Recipe {
    let (linear, kv) = kv::split(scheme).unwrap();
    let mut recipe = common::recipe(method, &linear);
    recipe.settings.kv = kv;
    recipe.set_method(recipe.method.clone()).unwrap();
    recipe.sampling = Sampling { samples: 4, length: LENGTH, packing: Packing::Auto, ..Sampling::default() };
    recipe
}

#[test]
fn whole_models_come_out_close_to_the_float_ones() {
    for (name, tiny) in families() {
        let checkpoint = tiny.random(31);
        let windows = windows(&tiny);
        let float = logits(&checkpoint.model(), &common::windows(tiny.vocab, 2, LENGTH, 3));
        for (method, scheme) in [("qoq", "w4a8kv4-g16-progressive"), ("qoq-rtn", "w8a8kv4-channel")] {
            let recipe = qoq(method, scheme);
            let model = recipe.prepared(checkpoint.model()).unwrap();
            let written = common::run(&model, &tiny.config(), &recipe, Some(&windows));
            let out = written.model();
            assert!(!out.architecture().tied, "{name}");
            let other = logits(&out, &common::windows(tiny.vocab, 2, LENGTH, 3));
            let divergence = mean_divergence(&float, &other, tiny.vocab);
            let bound = if scheme.starts_with("w8") { 2e-3 } else { 0.15 };
            assert!(divergence < bound, "{name}, {method} {scheme}: {divergence}");
            assert_eq!(written.report.kv, Some(KvScheme::Kv4));
            let steps = ["rotate", "reorder", "smooth-attention", "smooth-outputs", "clip"];
            assert_eq!(written.report.steps, steps, "{name}");
        }
    }
}

#[test]
fn steps_can_be_left_out_each_and_all() {
    let tiny = Tiny { tied: true, ..Tiny::default() };
    let checkpoint = tiny.random(31);
    let windows = windows(&tiny);
    let method = method("qoq-rtn").unwrap();
    let mut bytes = Vec::new();
    for skipped in
        [vec![], vec!["rotate"], vec!["reorder"], vec!["smooth-outputs"], vec!["clip"], method.steps()]
    {
        let mut recipe = qoq("qoq-rtn", "w4a8-g16-asym");
        recipe.settings.steps.set(AttentionSettings { alpha: Some(Alpha::Fixed(0.5)) });
        let names: Vec<String> = skipped.iter().map(|s| (*s).to_owned()).collect();
        recipe.method = method.without(&names).unwrap();
        let model = recipe.prepared(checkpoint.model()).unwrap();
        assert_eq!(model.is_rotated(), !skipped.contains(&"rotate"));
        let written = common::run(&model, &tiny.config(), &recipe, Some(&windows));
        bytes.push(written.source.read("model.layers.0.mlp.down_proj.weight_packed").unwrap());
        if skipped.len() == method.steps().len() {
            // If all steps are skipped, the method is rounding to nearest.
            let rtn = common::run(&model, &tiny.config(), &common::recipe("rtn", "w4a8-g16-asym"), None);
            let name = "model.layers.1.mlp.up_proj.weight_packed";
            assert_eq!(written.source.read(name).unwrap(), rtn.source.read(name).unwrap());
        }
        // A printed recipe reads back unchanged.
        let again = Recipe::parse(&recipe.to_toml()).unwrap();
        assert_eq!(again.method.name, recipe.method.name);
        let left_out = !recipe.method.steps().contains(&"smooth-attention");
        assert!(left_out || again.settings == recipe.settings, "{:?}", again.settings);
        match skipped.len() {
            0 => assert_eq!(again.method.name, "qoq-rtn"),
            all if all == method.steps().len() => assert_eq!(again.method.name, "rtn"),
            _ => assert_eq!(again.method.name, recipe.method.steps().join(",")),
        }
    }
    for (i, a) in bytes.iter().enumerate() {
        assert!(bytes[i + 1..].iter().all(|b| a != b), "step {i} changes nothing");
    }
    assert!(method.without(&["rotat".into()]).is_err());
}

/// The weight is written with the product of both levels, rounded once.
#[test]
fn two_levels_are_written_as_one() {
    let checkpoint = Tiny::default().random(5);
    let model = checkpoint.model();
    let recipe = common::recipe("rtn", "w4a8-g16-asym-progressive");
    let written = common::run(&model, &checkpoint.tiny.config(), &recipe, None);
    let name = "model.layers.0.mlp.gate_proj";
    let weights = model.source().read_f32(&format!("{name}.weight")).unwrap();
    let [n, k] = [checkpoint.tiny.intermediate, checkpoint.tiny.hidden];
    let tensor = quant_core::quantize::quantize_rtn(
        name,
        &weights,
        [n, k],
        recipe.scheme.with_default_symmetry(true),
        Dtype::F32,
        None,
    )
    .unwrap();
    let out = written.model();
    let block = out.block(0, &out.rope(4).unwrap()).unwrap();
    let (id, ..) = block.graph().linears().find(|(_, n, ..)| *n == "mlp.gate_proj").unwrap();
    let WeightBody::Quantized(read) = &**block.linear(id).weight() else { panic!("not quantized") };
    assert_eq!((&read.codes, &read.zeros), (&tensor.codes, &tensor.zeros));
    assert!(read.levels.is_none() && !read.scheme.is_progressive());
    let report = written.report.tensors.iter().find(|t| t.tensor == format!("{name}.weight")).unwrap();
    assert_eq!(report.scheme.as_deref(), Some("w4a8-g16-asym"));
    assert_eq!(report.rounded_to.as_deref(), Some("w4a8-g16-asym-progressive"));
}

#[test]
fn plans_know_what_is_rotated() {
    let checkpoint = Tiny { tied: true, ..Tiny::default() }.random(5);
    let recipe = qoq("qoq", "w4a8kv4-g16");
    let error = Plan::new(&checkpoint.model(), &recipe, recipe.containers[0]).unwrap_err();
    assert_eq!(error.category(), Category::Internal);
    let model = recipe.prepared(checkpoint.model()).unwrap();
    let plan = Plan::new(&model, &recipe, recipe.containers[0]).unwrap();
    assert!(plan.unties_head());
    assert!(plan.outputs().iter().any(|o| o.name == "lm_head.weight"));
    let source: Arc<MemorySource> = Arc::new(checkpoint.source());
    assert!(source.info("lm_head.weight").is_none());
    // Clipping alone is an ordinary transform.
    let _: &dyn Transform = &Clip;
}

/// The integer product equals the product of the rounded values in floats, up to the rounding of sums in `f32`, for
/// random weights and for weights that reach both ends of every grid.
#[test]
fn integers_of_one_linear_are_what_is_simulated() {
    let (n, k) = (40, 384);
    let mut rng = StdRng::seed_from_u64(7);
    let by_chance: Vec<f32> = (0..n * k).map(|_| normal(&mut rng)).collect();
    // Rows of all magnitudes, groups that span the whole grid, and groups that are constant or zero.
    let extreme = (0..n * k).map(|i| {
        let (row, group) = (i / k, i % k / 128);
        let size = 2f32.powi(row as i32 % 9 - 4);
        match (row + group) % 4 {
            0 => 0.0,
            1 => size,
            _ if i % 2 == 0 => size,
            _ => -size,
        }
    });
    let extreme: Vec<f32> = extreme.collect();
    let inputs: Vec<f32> = (0..5 * k)
        .map(|i| match i / k {
            0 => 0.0,
            1 => {
                if i % 3 == 0 {
                    1.0
                } else {
                    -1.0
                }
            }
            _ => normal(&mut rng) * 10f32.powi((i / k) as i32 - 3),
        })
        .collect();
    let x = Tensor::from_vec(inputs.clone(), (1, 5, k), &Device::Cpu).unwrap();
    for scheme in
        ["w4a8-g128-asym-progressive", "w4a8-g128-sym-progressive", "w4a8-channel-asym", "w4a8-channel-sym"]
    {
        for weights in [&by_chance, &extreme] {
            let tensor =
                quantize_rtn("l", weights, [n, k], scheme.parse().unwrap(), Dtype::F16, None).unwrap();
            let values = tensor.dequantize().unwrap();
            let fake = Linear::new(Arc::new(WeightBody::Quantized(tensor)), None);
            let real = fake.packed(&Runner::new(Serial)).unwrap();
            let [fake, real] = [fake, real].map(|linear| flat(&linear.forward(&x).unwrap()));
            for (at, (a, b)) in fake.iter().zip(&real).enumerate() {
                let (row, column) = (at / n, at % n);
                let pairs = inputs[row * k..][..k].iter().zip(&values[column * k..][..k]);
                let size: f32 = pairs.map(|(x, w)| (x * w).abs()).sum();
                // Half an ulp for every addition of the two sums, with a margin.
                let bound = (k as f32 + 16.0) * f32::EPSILON * size + f32::MIN_POSITIVE;
                assert!((a - b).abs() <= bound, "{scheme}, token {row}, output {column}: {a} and {b}");
            }
        }
    }
}
