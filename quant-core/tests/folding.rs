//! Folding alone leaves a block's output unchanged, for random norms, biases, grouped and ungrouped queries, and all
//! storage types of norms. Every transform rests on this identity.

use crate::common;

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use common::{EXPERTS, Kind, Tiny, flat, normal, relative_difference};
use quant_core::CancelToken;
use quant_core::checkpoint::Dtype;
use quant_core::model::{Block, BlockGraph, FoldGroup, Model, NoTap, Node, NodeId, Op};
use quant_core::transform::{BlockTask, Rewrite, TransformSettings, fold};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Maximum change of the output by rounding a few products in `f32`, relative to its largest value.
const BOUND: f64 = 5e-6;

struct Bench {
    model: Model,
    block: Block,
    norm_dtypes: BTreeMap<NodeId, Dtype>,
    x: Tensor,
}

impl Bench {
    fn new(tiny: &Tiny, seed: u64) -> Self {
        Self::of(tiny.random(seed).model(), tiny, seed)
    }

    fn of(model: Model, tiny: &Tiny, seed: u64) -> Self {
        let block = model.block(0, &model.rope(24).unwrap()).unwrap();
        let norm_dtypes = block.graph().norms().map(|(id, ..)| (id, tiny.norm_dtype)).collect();
        let mut rng = StdRng::seed_from_u64(seed);
        let values: Vec<f32> = (0..2 * 24 * tiny.hidden).map(|_| normal(&mut rng)).collect();
        let x = Tensor::from_vec(values, (2, 24, tiny.hidden), &Device::Cpu).unwrap();
        Self { model, block, norm_dtypes, x }
    }

    fn graph(&self) -> &BlockGraph {
        self.block.graph()
    }

    fn groups(&self) -> Vec<FoldGroup> {
        self.graph().fold_groups()
    }

    fn fold(&self, rewrite: &mut Rewrite, group: &FoldGroup, scales: &[f32]) -> quant_core::Result<()> {
        let prefix = self.model.architecture().in_block(0, "");
        let (settings, cancel) = (TransformSettings::default(), CancelToken::new());
        let mut task = BlockTask::new(&prefix, &self.block, &settings, &cancel);
        task.norm_dtypes = &self.norm_dtypes;
        fold(rewrite, &task, group, scales)
    }

    fn channels(&self, group: &FoldGroup) -> usize {
        self.block.linear(group.consumers[0]).weight().shape()[1] / group.repeat
    }

    /// Folds random scales into all of these groups.
    fn fold_all(&self, groups: &[FoldGroup], seed: u64) -> Rewrite {
        let mut rewrite = Rewrite::default();
        for (i, group) in groups.iter().enumerate() {
            let scales = random_scales(self.channels(group), seed + i as u64);
            self.fold(&mut rewrite, group, &scales).unwrap();
        }
        rewrite
    }

    /// The change of the block's output by a rewrite, relative to its largest value.
    fn change(&self, rewrite: &Rewrite) -> f64 {
        let output = |block: &Block| {
            // The residual stream would hide an error of the branches, so it is subtracted.
            let y = block.forward(&self.x, 0, None, &mut NoTap).unwrap();
            flat(&(y - &self.x).unwrap())
        };
        relative_difference(&output(&rewrite.apply(&self.block).unwrap()), &output(&self.block))
    }
}

/// Random scales, log-uniform between 1/64 and 64.
fn random_scales(channels: usize, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..channels).map(|_| rng.random_range(-6.0_f32..6.0).exp2()).collect()
}

fn cases() -> Vec<(&'static str, Tiny)> {
    let biased = Tiny { attention_bias: true, mlp_bias: true, ..Tiny::default() };
    vec![
        ("grouped queries", Tiny::default()),
        ("grouped queries, biases", biased.clone()),
        ("every head its own, biases", Tiny { kv_heads: 4, ..biased.clone() }),
        ("every head its own", Tiny { kv_heads: 4, ..Tiny::default() }),
        ("wide heads", Tiny { kv_heads: 4, head_dim: 24, attention_bias: true, ..Tiny::default() }),
        ("mistral", Tiny { family: Kind::Mistral(Some(5)), kv_heads: 4, ..Tiny::default() }),
        ("qwen2", Tiny { family: Kind::Qwen2, ..Tiny::default() }),
        ("qwen2, every head its own", Tiny { family: Kind::Qwen2, kv_heads: 4, ..Tiny::default() }),
        ("qwen3", Tiny { family: Kind::Qwen3, head_dim: 24, ..Tiny::default() }),
        ("qwen3, biases", Tiny { family: Kind::Qwen3, kv_heads: 4, attention_bias: true, ..Tiny::default() }),
        ("mixtral", Tiny { family: Kind::Mixtral, ..Tiny::default() }),
        ("qwen3-moe", Tiny { family: Kind::Qwen3Moe(true), kv_heads: 4, ..Tiny::default() }),
        ("opt", Tiny::opt()),
        ("opt without biases", Tiny { attention_bias: false, mlp_bias: false, ..Tiny::opt() }),
        ("opt, norms in bf16", Tiny { norm_dtype: Dtype::Bf16, ..Tiny::opt() }),
        ("norms in bf16", Tiny { kv_heads: 4, norm_dtype: Dtype::Bf16, ..biased.clone() }),
        ("norms in f16", Tiny { norm_dtype: Dtype::F16, dtype: Dtype::F16, ..biased }),
    ]
}

#[test]
fn folding_every_group_leaves_the_output_unchanged() {
    let mut worst = 0.0_f64;
    for (name, tiny) in cases() {
        for seed in 0..4 {
            let bench = Bench::new(&tiny, seed);
            let groups = bench.groups();
            let ups = if tiny.family.experts(0).is_some() { EXPERTS } else { 1 };
            assert_eq!(groups.len(), 3 + ups, "{name}");
            let repeated = groups.iter().filter(|g| g.repeat != 1).count();
            assert_eq!(repeated, usize::from(tiny.kv_heads != tiny.heads), "{name}");
            let change = bench.change(&bench.fold_all(&groups, 10 * seed));
            assert!(change <= BOUND, "{name}, seed {seed}: {change:e}");
            worst = worst.max(change);
        }
    }
    println!("largest change by folding: {worst:.2e} of the largest output");
}

#[test]
fn folding_one_group_changes_its_weights_but_not_the_output() {
    let (_, tiny) = cases().swap_remove(2);
    let bench = Bench::new(&tiny, 3);
    for group in bench.groups() {
        let name = bench.graph().name(group.producer);
        let rewrite = bench.fold_all(std::slice::from_ref(&group), 5);
        assert!(bench.change(&rewrite) <= BOUND, "{name}");
        let rewritten = rewrite.apply(&bench.block).unwrap();
        for &consumer in &group.consumers {
            let before = bench.block.linear(consumer).weight().to_f32().unwrap();
            let after = rewritten.linear(consumer).weight().to_f32().unwrap();
            let factors = random_scales(bench.channels(&group), 5);
            for (i, (b, a)) in before.iter().zip(&after).enumerate() {
                let expected = b * factors[i % factors.len()];
                assert!((a - expected).abs() <= 2e-7 * expected.abs(), "{name}: {a} for {expected}");
            }
        }
    }
}

#[test]
fn folding_twice_composes() {
    let (_, tiny) = cases().swap_remove(5);
    let bench = Bench::new(&tiny, 4);
    let groups = bench.groups();
    let twice: Vec<FoldGroup> = groups.iter().chain(&groups).cloned().collect();
    let change = bench.change(&bench.fold_all(&twice, 40));
    assert!(change <= BOUND, "{change:e}");
}

#[test]
fn a_consumer_left_out_breaks_the_identity() {
    // Shows that the tests above can fail.
    let grouped = Tiny::default();
    let experts = Tiny { family: Kind::Mixtral, ..grouped.clone() };
    for tiny in [grouped.clone(), Tiny { kv_heads: 4, ..grouped }, experts, Tiny::opt()] {
        let bench = Bench::new(&tiny, 6);
        for group in bench.groups() {
            for i in 0..group.consumers.len() {
                let mut wrong = group.clone();
                let left_out = wrong.consumers.remove(i);
                let mut rewrite = Rewrite::default();
                bench.fold(&mut rewrite, &wrong, &random_scales(bench.channels(&group), 9)).unwrap();
                let change = bench.change(&rewrite);
                assert!(change > 0.05, "without {}: {change:e}", bench.graph().name(left_out));
            }
        }
    }
}

#[test]
fn every_reader_of_a_folded_channel_is_in_the_balance_list() {
    for (name, tiny) in cases() {
        let bench = Bench::new(&tiny, 0);
        let nodes = bench.graph().nodes();
        // Experts read the rows of their tokens.
        fn readers(nodes: &[Node], value: NodeId) -> Vec<NodeId> {
            let users = (0..nodes.len()).filter(|&n| nodes[n].inputs.contains(&value));
            let linears = |n: NodeId| match nodes[n].op {
                Op::ExpertInput { .. } => readers(nodes, n),
                _ => vec![n],
            };
            users.flat_map(linears).collect()
        }
        let groups = bench.graph().fold_groups();
        for (norm, _, width) in bench.graph().norms() {
            // Head norms come before the rotation, which no scale passes.
            if width != tiny.hidden {
                assert!(groups.iter().all(|g| g.producer != norm), "{name}");
                continue;
            }
            let group = groups.iter().find(|g| g.producer == norm).expect("every norm can be folded");
            assert_eq!(group.consumers, readers(nodes, norm), "{name}");
            assert_eq!(group.input, norm, "{name}");
            assert!(group.consumers.iter().all(|&c| matches!(nodes[c].op, Op::Linear { .. })), "{name}");
        }
        // Only the consumers of a group may read the value that they have in common.
        for group in &groups {
            assert_eq!(group.consumers, readers(nodes, group.input), "{name}");
        }
    }
}

#[test]
fn norms_in_a_narrow_type_are_folded_to_values_of_that_type() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let tiny = Tiny { norm_dtype: dtype, ..Tiny::default() };
        let bench = Bench::new(&tiny, 8);
        let groups = bench.groups();
        let rewrite = bench.fold_all(&groups, 70);
        for (node, weight) in &rewrite.norms {
            assert!(weight.iter().all(|&w| dtype.round(w) == w), "{dtype} {}", bench.graph().name(*node));
        }
        // If consumers were multiplied by the requested scale instead of the scale by which the rounded norm was
        // actually divided, the output would be off by the rounding of the type.
        let norm = &groups[0];
        let scales = random_scales(tiny.hidden, 70);
        let mut naive = Rewrite::default();
        bench.fold(&mut naive, norm, &scales).unwrap();
        assert!(bench.change(&naive) <= BOUND, "{dtype}");
        for &consumer in &norm.consumers {
            naive.columns.insert(consumer, scales.clone());
        }
        assert!(bench.change(&naive) > 10.0 * BOUND, "{dtype}");
    }
}

#[test]
fn zero_tiny_and_huge_norm_weights_keep_the_identity() {
    // Per type: a weight whose quotient by 64 underflows, and one whose quotient by 1/64 overflows.
    for (dtype, low, high) in
        [(Dtype::F32, 4e-37, 2e37), (Dtype::Bf16, 4e-37, 2e37), (Dtype::F16, 1e-7, 60000.0)]
    {
        let tiny = Tiny { norm_dtype: dtype, kv_heads: 4, ..Tiny::default() };
        let mut checkpoint = tiny.random(9);
        let norm_name = "model.layers.0.input_layernorm.weight";
        let extremes =
            [(0, 0.0_f32), (1, -0.0), (2, low), (3, -low), (4, high), (5, f32::MIN_POSITIVE / 8.0)];
        for (channel, value) in extremes {
            checkpoint.values(norm_name)[channel] = value;
        }
        // The columns that read the huge weight are small, so that the outputs stay finite.
        for consumer in ["q_proj", "k_proj", "v_proj"] {
            let name = format!("model.layers.0.self_attn.{consumer}.weight");
            checkpoint.values(&name).chunks_exact_mut(tiny.hidden).for_each(|row| row[4] /= high);
        }
        let bench = Bench::of(checkpoint.model(), &tiny, 9);
        let group = &bench.groups()[0];
        let mut scales = random_scales(tiny.hidden, 90);
        scales[..6].copy_from_slice(&[64.0, 64.0, 64.0, 64.0, 1.0 / 64.0, 64.0]);
        let mut rewrite = Rewrite::default();
        bench.fold(&mut rewrite, group, &scales).unwrap();

        let (norm, columns) = (&rewrite.norms[&group.producer], &rewrite.columns[&group.consumers[0]]);
        assert_eq!(columns[..6], [1.0; 6], "{dtype}: such channels keep their scale");
        assert!(norm.iter().all(|w| w.is_finite()), "{dtype}");
        assert_eq!((norm[0], norm[1]), (0.0, 0.0));
        assert_eq!(norm[2], dtype.round(low), "{dtype}");
        assert!(columns[6..].iter().all(|c| c.is_normal() && *c != 1.0), "{dtype}");
        let change = bench.change(&rewrite);
        assert!(change <= BOUND, "{dtype}: {change:e}");
    }
}

/// A channel that consists only of its bias keeps its scale, and so does one whose bias would overflow its type.
#[test]
fn biases_of_norms_are_folded_with_their_weights() {
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let tiny = Tiny { norm_dtype: dtype, ..Tiny::opt() };
        let mut checkpoint = tiny.random(12);
        let norm = format!("{}self_attn_layer_norm", tiny.block(0));
        checkpoint.values(&format!("{norm}.weight"))[..2].fill(0.0);
        let bias = checkpoint.values(&format!("{norm}.bias"));
        (bias[0], bias[1], bias[2], bias[3]) = (0.0, 5.0, 0.0, 6e4);
        // The columns that read the huge bias are small, so that the other channels still affect the output.
        for consumer in tiny.norms()[0].1 {
            let weight = checkpoint.values(&format!("{}{consumer}.weight", tiny.block(0)));
            weight.chunks_exact_mut(tiny.hidden).for_each(|row| row[3] /= 6e4);
        }
        let bench = Bench::of(checkpoint.model(), &tiny, 12);
        let group = &bench.groups()[0];
        let mut scales = random_scales(tiny.hidden, 13);
        scales[..4].copy_from_slice(&[8.0, 8.0, 8.0, 1.0 / 16.0]);
        let mut rewrite = Rewrite::default();
        bench.fold(&mut rewrite, group, &scales).unwrap();
        let columns = &rewrite.columns[&group.consumers[0]];
        assert_eq!(columns[..2], [1.0, 1.0], "{dtype}");
        assert_eq!(columns[3] == 1.0, dtype == Dtype::F16, "{dtype}");
        let (before, after) = (bench.block.norm_bias(group.producer), &rewrite.norm_biases[&group.producer]);
        for ((b, a), c) in flat(before.unwrap()).iter().zip(after).zip(columns) {
            assert_eq!(*a, b / c, "{dtype}");
        }
        assert!(bench.change(&rewrite) <= BOUND, "{dtype}");
        rewrite.norm_biases.clear();
        assert!(bench.change(&rewrite) > 0.05, "{dtype}: without the biases");
    }
}

/// A ReLU only commutes with positive scales.
#[test]
fn scales_that_are_not_positive_are_refused() {
    let bench = Bench::new(&Tiny::opt(), 2);
    for group in bench.groups() {
        for bad in [0.0, -2.0, f32::NAN, f32::INFINITY] {
            let mut scales = vec![2.0; bench.channels(&group)];
            scales[1] = bad;
            let mut rewrite = Rewrite::default();
            assert!(bench.fold(&mut rewrite, &group, &scales).is_err(), "{bad}");
            assert!(rewrite.columns.is_empty());
        }
    }
}

/// A scale of a value head is applied to every query head that reads it, and to no other query head.
#[test]
fn repeated_channels_are_scaled_wherever_they_are() {
    let bench = Bench::new(&Tiny::default(), 1);
    let repeated = bench.groups().into_iter().find(|g| g.repeat == 2).unwrap();
    let mut scales = vec![1.0; bench.channels(&repeated)];
    // Channel 3 of the second of two heads of 16.
    scales[16 + 3] = 4.0;
    let mut rewrite = Rewrite::default();
    bench.fold(&mut rewrite, &repeated, &scales).unwrap();
    let columns = &rewrite.columns[&repeated.consumers[0]];
    let scaled: Vec<usize> = (0..columns.len()).filter(|&c| columns[c] != 1.0).collect();
    assert_eq!(scaled, [2 * 16 + 3, 3 * 16 + 3]);
    assert_eq!(repeated.gather_largest(columns), scales);
}

#[test]
fn rewrites_follow_on_each_other() {
    for (name, tiny) in cases() {
        let bench = Bench::new(&tiny, 5);
        let groups = bench.groups();
        let first = bench.fold_all(&groups, 21);
        let between = Bench { block: first.apply(&bench.block).unwrap(), ..Bench::new(&tiny, 5) };
        let both = first.then(between.fold_all(&groups, 22)).unwrap();
        assert!(bench.change(&both) <= 2.0 * BOUND, "{name}: {:e}", bench.change(&both));
        for (node, weight) in &both.norms {
            let dtype = tiny.norm_dtype;
            assert!(weight.iter().all(|&w| dtype.round(w) == w), "{name} {}", bench.graph().name(*node));
        }
    }
    let mut clipped = Rewrite::default();
    clipped.clips = BTreeMap::from([(0, vec![1.0])]);
    assert!(clipped.then(Rewrite::default()).is_err());
}

#[test]
fn wrong_counts_are_refused() {
    let bench = Bench::new(&Tiny::default(), 1);
    for group in bench.groups() {
        let mut rewrite = Rewrite::default();
        let scales = vec![2.0; bench.channels(&group) - 1];
        assert!(bench.fold(&mut rewrite, &group, &scales).is_err());
        assert!(rewrite.columns.is_empty(), "a fold applies completely or not at all");
    }
}
