//! AWQ: the recorded search errors match their definitions, a search never ends with a larger error than it began with,
//! and with planted outliers the whole pipeline loses far less than rounding alone.

use crate::common;

use std::collections::BTreeMap;

use candle_core::Tensor;
use common::{Checkpoint, Quantized, Tiny, flat, logits, mean_divergence, recipe, relative_difference, run};
use quant_core::blocks::{BlockSearch, IQ4_XS, Q4_0, Q4_K, Q5_K, Q6_K};
use quant_core::calibrate::{HiddenStates, InputRows, TokenWindows};
use quant_core::checkpoint::{Dtype, MemorySink};
use quant_core::model::{Block, FoldGroup, NoTap, NodeId, TokenRows, WeightBody};
use quant_core::pipeline::{Job, SharedSearches, quantize_job};
use quant_core::quantize::quantize_rtn;
use quant_core::recipe::{Pattern, Plan, Recipe};
use quant_core::transform::{
    Awq, AwqSettings, BlockGrid, BlockTask, LinearGrid, Rewrite, Search as SearchMode, StepSettings,
    Transform, TransformSettings, rewritten,
};
use quant_core::{CancelToken, Silent, TensorSource};

fn tiny() -> Tiny {
    Tiny { hidden: 128, intermediate: 256, head_dim: 32, vocab: 128, ..Tiny::default() }
}

/// Some norm channels are multiplied by 32 and the columns that read them are divided by 32. The outputs of the float
/// model are unchanged, but it is hard to quantize.
fn planted(tiny: &Tiny, seed: u64) -> Checkpoint {
    let mut checkpoint = tiny.random(seed);
    for layer in 0..tiny.layers {
        let name = |module: &str| format!("{}{module}.weight", tiny.block(layer));
        for (norm, consumers) in tiny.norms() {
            let consumers: Vec<String> = consumers.iter().map(|c| name(c)).collect();
            let consumers: Vec<&str> = consumers.iter().map(String::as_str).collect();
            let channels: Vec<usize> = (0..6).map(|i| (layer * 11 + i * 21) % tiny.hidden).collect();
            checkpoint.plant(&name(norm), &consumers, &channels, 32.0);
        }
    }
    checkpoint
}

fn quantized(checkpoint: &Checkpoint, recipe: &Recipe, windows: &TokenWindows) -> Quantized {
    run(&checkpoint.model(), &checkpoint.tiny.config(), recipe, Some(windows))
}

fn opt() -> Tiny {
    Tiny { hidden: 128, intermediate: 256, head_dim: 32, vocab: 128, ..Tiny::opt() }
}

struct Search {
    block: Block,
    hidden: HiddenStates,
    grids: BTreeMap<NodeId, LinearGrid>,
    block_grids: BTreeMap<NodeId, BlockGrid>,
    rewrite: Rewrite,
}

/// The grids of a block's linears: of a scheme, or of block types.
type Grids = (BTreeMap<NodeId, LinearGrid>, BTreeMap<NodeId, BlockGrid>);

impl Search {
    fn by(search: SearchMode, checkpoint: &Checkpoint, scheme: &str, windows: &TokenWindows) -> Self {
        let grid =
            LinearGrid { scheme: scheme.parse().unwrap(), scale_dtype: checkpoint.tiny.dtype, fused: None };
        let of = |block: &Block| block.graph().linears().map(|(id, ..)| (id, grid)).collect();
        Self::of(search, checkpoint, |block| (of(block), BTreeMap::new()), windows)
    }

    fn of(
        search: SearchMode,
        checkpoint: &Checkpoint,
        grids: impl Fn(&Block) -> Grids,
        windows: &TokenWindows,
    ) -> Self {
        let model = checkpoint.model();
        let block = model.block(0, &model.rope(windows.length()).unwrap()).unwrap();
        let embed = || HiddenStates::embed(&model, windows).unwrap();
        let mut hidden = embed();
        let (grids, block_grids) = grids(&block);
        let norm_dtypes = block.graph().norms().map(|(id, ..)| (id, checkpoint.tiny.norm_dtype)).collect();
        let settings = TransformSettings {
            steps: StepSettings::of(AwqSettings { search }),
            ..TransformSettings::default()
        };
        let cancel = CancelToken::new();
        let mut task = BlockTask::new("block.", &block, &settings, &cancel);
        (task.grids, task.block_grids, task.norm_dtypes) = (&grids, &block_grids, &norm_dtypes);
        let rewrite = Awq.search(&[task], Some(&mut hidden), true).unwrap().remove(0);
        // The search has advanced the batch to the next block, regardless of its sample.
        let mut next = embed();
        next.advance(&block, &CancelToken::new()).unwrap();
        let values = |states: &HiddenStates| -> Vec<Vec<f32>> {
            states.chunks().map(|c| c.unwrap().1.flatten_all().unwrap().to_vec1().unwrap()).collect()
        };
        assert_eq!(values(&hidden), values(&next));
        Self { block, hidden: embed(), grids, block_grids, rewrite }
    }

    fn groups(&self) -> Vec<FoldGroup> {
        self.block.graph().fold_groups().into_iter().filter(|g| g.repeat == 1).collect()
    }

    /// The values of a node for the inputs of the block, `[tokens · width]`.
    fn values(&self, block: &Block, known: Option<(NodeId, &[Tensor])>, node: NodeId) -> Vec<Tensor> {
        let chunks = self.hidden.chunks().enumerate().map(|(i, chunk)| {
            let (first, x) = chunk.unwrap();
            let segments = self.hidden.segments(first, &x);
            let known = match known {
                Some((id, values)) => (id, values[i].clone()),
                None => (block.graph().input(), x),
            };
            block.evaluate_packed(&[known], &[node], segments, &mut NoTap).unwrap().remove(0)
        });
        chunks.collect()
    }

    fn counted(&self, chunks: &[Tensor]) -> Vec<f32> {
        let width = chunks[0].dims3().unwrap().2;
        let rows: Vec<f32> = chunks.iter().flat_map(flat).collect();
        let tokens = TokenRows::range(0, rows.len() / width);
        InputRows::new(&rows, width, tokens, self.hidden.layout()).unwrap().counted_values().to_vec()
    }

    /// `Q(W · s) / s`, computed by the public quantizer.
    fn rounded(&self, node: NodeId, scales: &[f32]) -> Vec<f32> {
        let weight = self.block.linear(node).weight();
        let mut values = weight.to_f32().unwrap();
        let each = |values: &mut [f32], f: fn(f32, f32) -> f32| {
            values.iter_mut().enumerate().for_each(|(i, w)| *w = f(*w, scales[i % scales.len()]));
        };
        each(&mut values, |w, s| w * s);
        if let Some(grid) = self.block_grids.get(&node) {
            let squares = grid.importance.iter().flatten().zip(scales).map(|(im, s)| im / s / s);
            let importance: Option<Vec<f32>> = grid.importance.as_ref().map(|_| squares.collect());
            for row in values.chunks_exact_mut(scales.len()) {
                let mut bytes = vec![0; grid.kind.row_bytes(row.len()).unwrap()];
                grid.kind.encode_by(grid.search, row, importance.as_deref(), &mut bytes);
                grid.kind.decode(&bytes, row);
            }
        } else {
            let grid = self.grids[&node];
            let shape = weight.shape();
            let tensor = quantize_rtn("w", &values, shape, grid.scheme, grid.scale_dtype, None).unwrap();
            values = tensor.dequantize().unwrap();
        }
        each(&mut values, |w, s| w / s);
        values
    }

    /// The mean squared error of a group's inspected output, by definition.
    fn group_error(&self, group: &FoldGroup, scales: &[f32]) -> f64 {
        let mut block = self.block.clone();
        let is_rounded = |node| self.grids.contains_key(node) || self.block_grids.contains_key(node);
        for &node in group.consumers.iter().filter(|node| is_rounded(*node)) {
            let linear = self.block.linear(node);
            let (shape, values) = (linear.weight().shape(), self.rounded(node, scales));
            block.replace_linear(node, linear.with_weight(WeightBody::F32 { shape, values }));
        }
        let x = self.values(&self.block, None, group.input);
        let exact = self.values(&self.block, Some((group.input, &x)), group.inspected);
        let rounded = self.values(&block, Some((group.input, &x)), group.inspected);
        let (exact, rounded) = (self.counted(&exact), self.counted(&rounded));
        let sum: f64 = exact.iter().zip(&rounded).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        sum / exact.len() as f64
    }

    /// The mean squared error of the partial outputs of all groups of a linear, with the clip bounds that were found or
    /// with none, by definition.
    fn clip_error(&self, node: NodeId, clipped: bool) -> f64 {
        let grid = self.grids[&node];
        let weight = self.block.linear(node).weight();
        let [n, k] = weight.shape();
        let size = grid.scheme.granularity.group_size(k);
        let exact = self.rewrite.weight(node, &weight.read().unwrap()).unwrap();
        let bounds = self.rewrite.clips.get(&node).filter(|_| clipped).map(Vec::as_slice);
        let rounded = quantize_rtn("w", &exact, [n, k], grid.scheme, grid.scale_dtype, bounds).unwrap();
        let rounded = rounded.dequantize().unwrap();
        let input = self.block.graph().nodes()[node].inputs[0];
        let mut x = self.counted(&self.values(&self.block, None, input));
        if let Some(scales) = self.rewrite.columns.get(&node) {
            x.iter_mut().enumerate().for_each(|(i, v)| *v /= scales[i % k]);
        }
        let mut sum = 0.0;
        for (exact, rounded) in exact.chunks_exact(k).zip(rounded.chunks_exact(k)) {
            let difference: Vec<f32> = rounded.iter().zip(exact).map(|(a, b)| a - b).collect();
            for token in x.chunks_exact(k) {
                for (x, d) in token.chunks_exact(size).zip(difference.chunks_exact(size)) {
                    let product: f64 = x.iter().zip(d).map(|(x, d)| f64::from(x * d)).sum();
                    sum += product * product;
                }
            }
        }
        sum / (n * (k / size) * (x.len() / k)) as f64
    }
}

fn assert_near(found: f64, exact: f64, tolerance: f64, what: &str) {
    assert!((found - exact).abs() <= tolerance * exact, "{what}: recorded {found:e}, actual {exact:e}");
}

#[test]
fn recorded_errors_are_those_of_the_definition_by_every_route() {
    // With more tokens, the reference search keeps the Gram matrix of the down projection's input, the batch forms
    // several chunks, and clipping uses a sample. The fast search uses all of a small batch.
    for (mode, scheme, count, length) in [
        (SearchMode::Fast, "w4a16-g32", 4, 30),
        (SearchMode::Fast, "w4a16-channel", 7, 40),
        (SearchMode::Reference, "w3a16-g64-asym", 9, 30),
        (SearchMode::Reference, "w4a16-channel", 15, 20),
        (SearchMode::Reference, "w4a16-g32", 35, 60),
    ] {
        let windows = common::windows(128, count, length, 2);
        for tiny in [Tiny { kv_heads: 4, attention_bias: true, ..tiny() }, opt()] {
            let checkpoint = planted(&Tiny { layers: 1, ..tiny }, 1);
            records_are_right(&Search::by(mode, &checkpoint, scheme, &windows), scheme);
        }
    }
}

/// With enough work, candidates are compared by differences in bfloat16, if the CPU supports it. The recorded errors
/// must still match the definition.
#[test]
fn errors_from_differences_are_those_of_the_definition() {
    if quant_kernels_cpu::bf16::Bf16Token::detect().is_none() {
        eprintln!("this processor, or QUANT_ISA, has no avx512bf16: candidates are computed in f32");
    }
    let wide = Tiny { layers: 1, kv_heads: 4, head_dim: 128, hidden: 512, intermediate: 512, ..tiny() };
    for (scheme, family) in [
        ("w4a16-g64", common::Kind::Llama),
        ("w3a16-g128-asym", common::Kind::Qwen3),
        ("w8a16-g64", common::Kind::Llama),
    ] {
        let tiny = Tiny { family, attention_bias: family == common::Kind::Llama, ..wide.clone() };
        let search =
            Search::by(SearchMode::Fast, &planted(&tiny, 3), scheme, &common::windows(128, 4, 256, 4));
        records_are_right(&search, scheme);
    }
    let masked = common::masked_windows(128, 4, 320, 5);
    records_are_right(&Search::by(SearchMode::Fast, &planted(&wide, 3), "w4a16-g64", &masked), "masked");
}

/// Gives the linears of a block different types, and their inputs random importance. One linear stays float.
fn blocks(block: &Block) -> BTreeMap<NodeId, BlockGrid> {
    let kinds = [&Q4_K, &Q6_K, &Q4_0, &IQ4_XS, &Q5_K];
    let linears = block.graph().linears().enumerate().filter(|(i, _)| *i != 1);
    let grid = |(i, (id, _, [_, k], _)): (usize, (NodeId, &str, [usize; 2], bool))| {
        let search = [BlockSearch::Reference, BlockSearch::Refined][i % 2];
        let mean_square = |c: usize| 0.1 + ((c * 7919 + i) % 101) as f32;
        let importance = (i % 3 > 0).then(|| (0..k).map(mean_square).collect());
        (id, BlockGrid { kind: kinds[i % kinds.len()], search, importance })
    };
    linears.map(grid).collect()
}

fn rounded_to_blocks() -> Tiny {
    Tiny {
        hidden: 256,
        intermediate: 512,
        layers: 1,
        head_dim: 64,
        kv_heads: 4,
        vocab: 128,
        ..Tiny::default()
    }
}

/// The errors of candidates are those of the blocks of each linear, weighted by the importance of the scaled inputs.
#[test]
fn recorded_errors_are_those_of_blocks() {
    let checkpoint = planted(&Tiny { attention_bias: true, ..rounded_to_blocks() }, 1);
    let opt = planted(&Tiny { hidden: 256, intermediate: 512, head_dim: 64, layers: 1, ..opt() }, 2);
    // The long batch is compared by differences in bfloat16, if the CPU supports it, and by a Gram matrix.
    for (mode, checkpoint, count, length) in [
        (SearchMode::Reference, &checkpoint, 4, 30),
        (SearchMode::Fast, &checkpoint, 4, 30),
        (SearchMode::Fast, &checkpoint, 8, 200),
        (SearchMode::Fast, &opt, 4, 30),
    ] {
        let windows = common::windows(128, count, length, 2);
        let search = Search::of(mode, checkpoint, |block| (BTreeMap::new(), blocks(block)), &windows);
        folds_are_right(&search, &format!("blocks, {mode:?}"));
        assert!(search.rewrite.clips.is_empty() && search.rewrite.clip_records.is_empty());
        let better = search.rewrite.folds.iter().filter(|f| f.error_after < 0.8 * f.error_before).count();
        assert!(better >= 2, "{:?}", search.rewrite.folds);
    }
}

/// A model that is rewritten as it is read has the logits of the original, whatever the dtype of its tensors.
#[test]
fn rewritten_models_have_the_same_logits() {
    let windows = common::windows(128, 2, 30, 3);
    let tiny = Tiny { mlp_bias: true, attention_bias: true, ..rounded_to_blocks() };
    let opt = Tiny { hidden: 256, intermediate: 512, head_dim: 64, layers: 1, ..opt() };
    let mixtral = Tiny { family: common::Kind::Mixtral, ..rounded_to_blocks() };
    for tiny in [tiny.clone(), Tiny { dtype: Dtype::Bf16, norm_dtype: Dtype::F16, ..tiny }, opt, mixtral] {
        let checkpoint = match tiny.family {
            common::Kind::Mixtral => tiny.random(4),
            _ => planted(&tiny, 4),
        };
        let search =
            Search::of(SearchMode::Fast, &checkpoint, |block| (BTreeMap::new(), blocks(block)), &windows);
        let model = checkpoint.model();
        let other = rewritten(&model, std::slice::from_ref(&search.rewrite)).unwrap();
        let changed = search.rewrite.columns.keys().filter(|node| {
            let name = format!("{}{}.weight", tiny.block(0), search.block.graph().name(**node));
            let [before, after] = [&model, &other].map(|m| m.source().read_f32(&name).unwrap());
            relative_difference(&after, &before) > 1e-3
        });
        assert!(changed.count() >= 4, "{:?}", tiny.family);
        let [before, after] = [&model, &other].map(|model| logits(model, &windows));
        let difference = relative_difference(&after, &before);
        assert!(difference < 2e-5, "{:?}: {difference}", tiny.family);
    }
    let mut clipped = Rewrite::default();
    clipped.clips.insert(0, vec![1.0]);
    let model = planted(&rounded_to_blocks(), 1).model();
    assert!(rewritten(&model, &[clipped]).is_err());
}

/// Only counted tokens affect the search, however candidates are compared.
#[test]
fn masked_and_packed_batches_are_judged_by_what_counts() {
    for (family, scheme, count, length) in [
        (common::Kind::Llama, "w4a16-g32", 4, 30),
        (common::Kind::Llama, "w4a16-channel", 8, 90),
        (common::Kind::Mistral(Some(7)), "w3a16-g64-asym", 6, 60),
        (common::Kind::Opt, "w4a16-g32", 6, 60),
    ] {
        let tiny = match family {
            common::Kind::Opt => Tiny { layers: 1, ..opt() },
            _ => Tiny { layers: 1, kv_heads: 4, family, ..tiny() },
        };
        let checkpoint = planted(&tiny, 1);
        let windows = common::masked_windows(128, count, length, 2);
        let [fast, reference] = [SearchMode::Fast, SearchMode::Reference]
            .map(|mode| Search::by(mode, &checkpoint, scheme, &windows));
        records_are_right(&fast, scheme);
        records_are_right(&reference, scheme);
        let counted = fast.hidden.layout().counted() as u64;
        assert!(counted < (count * length) as u64 * 2 / 3, "{counted}");
        for (fast, reference) in fast.rewrite.folds.iter().zip(&reference.rewrite.folds) {
            assert_eq!((fast.tokens, reference.tokens), (counted, counted), "{}", fast.producer);
            assert_near(fast.error_before, reference.error_before, 1e-3, &fast.producer);
            assert_near(fast.error_after, reference.error_after, 1e-3, &fast.producer);
        }
        for search in [&fast, &reference] {
            let linears = search.block.graph().linears().count();
            assert_eq!(search.rewrite.tokens.len(), linears, "every linear is counted");
            assert!(search.rewrite.tokens.values().all(|t| *t == counted));
        }
        // Without the mask the errors differ, which shows that the search uses the mask.
        let plain = common::windows(128, count, length, 2);
        assert_eq!(plain.tokens(), windows.tokens());
        let plain = Search::by(SearchMode::Reference, &checkpoint, scheme, &plain);
        for (masked, plain) in reference.rewrite.folds.iter().zip(&plain.rewrite.folds) {
            assert_ne!(masked.error_before, plain.error_before, "{}", masked.producer);
        }
    }
}

fn folds_are_right(search: &Search, scheme: &str) {
    let tokens = search.hidden.layout().counted();
    assert_eq!(search.rewrite.folds.len(), 4);
    for (group, record) in search.groups().iter().zip(&search.rewrite.folds) {
        let what = format!("{scheme}, {tokens} tokens, {}", record.producer);
        let module = |node| format!("block.{}", search.block.graph().name(node));
        assert_eq!(record.producer, module(group.producer));
        assert_eq!(record.inspected, module(group.inspected));
        let ones = vec![1.0; search.block.linear(group.consumers[0]).weight().shape()[1]];
        assert_near(record.error_before, search.group_error(group, &ones), 1e-3, &what);
        // Norms are in f32 here, so folded values differ from the searched ones in the last bit at most. Occasionally,
        // this decides a rounding tie.
        let scales = search.rewrite.columns.get(&group.consumers[0]).unwrap_or(&ones);
        assert_eq!(record.ratio.is_some(), *scales != ones, "{what}");
        // The scales of blocks are searched, and the last bit may decide between two candidates there too.
        let tolerance = if search.block_grids.is_empty() { 5e-3 } else { 2e-2 };
        assert_near(record.error_after, search.group_error(group, scales), tolerance, &what);
        assert!(record.error_after <= record.error_before, "{what}");
    }
}

fn records_are_right(search: &Search, scheme: &str) {
    folds_are_right(search, scheme);
    let tokens = search.hidden.layout().counted();
    let linears = search.block.graph().linears().count();
    assert_eq!(search.rewrite.clip_records.len(), linears - 2, "all but queries and keys");
    for record in &search.rewrite.clip_records {
        let what = format!("{scheme}, {tokens} tokens, clip of {}", record.module);
        let name = record.module.strip_prefix("block.").unwrap();
        let (node, ..) = search.block.graph().linears().find(|l| l.1 == name).unwrap();
        assert!(record.error_after <= record.error_before, "{what}");
        assert_eq!(record.clipped_groups > 0, search.rewrite.clips.contains_key(&node), "{what}");
        if tokens < 1024 {
            assert_near(record.error_before, search.clip_error(node, false), 1e-3, &what);
            assert_near(record.error_after, search.clip_error(node, true), 1e-3, &what);
        }
    }
    let clipped: u64 = search.rewrite.clip_records.iter().map(|r| r.clipped_groups).sum();
    assert!(clipped > 0, "{scheme}: narrowing helps for some range");
}

/// With a sample of a large batch, the fast search finds scales as good as those of the reference, up to sampling
/// error.
#[test]
fn a_race_ends_near_the_best() {
    for (seed, scheme, masked) in
        [(1, "w4a16-g32", false), (2, "w3a16-g32-asym", false), (3, "w4a16-g32", true)]
    {
        let windows = match masked {
            false => common::windows(128, 64, 256, 5),
            true => common::masked_windows(128, 128, 256, 5),
        };
        let counted = windows.layout().counted() as u64;
        let checkpoint = planted(&Tiny { layers: 1, kv_heads: 4, ..tiny() }, seed);
        let fast = Search::by(SearchMode::Fast, &checkpoint, scheme, &windows);
        let reference = Search::by(SearchMode::Reference, &checkpoint, scheme, &windows);
        for (fast, reference) in fast.rewrite.folds.iter().zip(&reference.rewrite.folds) {
            let what = format!("{scheme}, {}", fast.producer);
            assert_eq!(reference.tokens, counted, "{what}");
            assert_eq!(reference.tried.len(), 21, "{what}");
            let whole = |ratio| reference.tried.iter().find(|t| t.ratio == ratio).unwrap().error;
            assert_eq!(whole(reference.ratio), reference.error_after, "{what}");
            let regret = whole(fast.ratio) / reference.error_after - 1.0;
            assert!(
                (0.0..0.02).contains(&regret),
                "{what}: {:?} for {:?}, {regret}",
                fast.ratio,
                reference.ratio
            );
            // The fast search only estimates this error.
            assert_near(fast.error_after, whole(fast.ratio), 0.3, &what);
        }
        // Single linears of this size are evaluated exactly with their Gram matrix.
        let shares: Vec<(bool, u64)> = (fast.rewrite.folds.iter())
            .map(|f| (f.consumers.len() > 1, f.tried.iter().map(|t| t.tokens).sum()))
            .collect();
        let whole = 21 * counted;
        assert!(shares.iter().all(|&(raced, tokens)| if raced {
            tokens < whole / 4
        } else {
            tokens == whole
        }));
    }
}

#[test]
fn searches_never_end_worse_and_change_what_is_written() {
    let windows = common::windows(128, 12, 32, 3);
    for (scheme, dtype) in [("w4a16-g32", Dtype::F32), ("w3a16-g64-asym", Dtype::Bf16), ("w4a16", Dtype::F16)]
    {
        let tiny = Tiny { dtype, norm_dtype: dtype, mlp_bias: true, ..tiny() };
        let checkpoint = tiny.random(4);
        let awq = quantized(&checkpoint, &recipe("awq", scheme), &windows);
        let rtn = quantized(&checkpoint, &recipe("rtn", scheme), &windows);
        let (mut folds, mut clips) = (0, 0);
        for tensor in &awq.report.tensors {
            if let Some(record) = &tensor.scale_search {
                assert!(record.error_after <= record.error_before, "{}", tensor.tensor);
                assert!(record.error_after > 0.0, "{}", tensor.tensor);
                assert_eq!(tensor.ratio, record.ratio);
                folds += 1;
            }
            if let Some(record) = &tensor.clip_search {
                assert!(record.error_after <= record.error_before, "{}", tensor.tensor);
                clips += 1;
            }
        }
        // With grouped queries, no scale is searched between the value projection and `o_proj`, so 6 of 7 linears have
        // scaled inputs.
        assert_eq!((folds, clips), (2 * 6, 2 * 5), "{scheme}");
        let mut changed = 0;
        for tensor in awq.report.tensors.iter().filter(|t| t.action == "quantized") {
            // A weight changes if a scale was folded into its rows or columns, or a range was narrowed.
            let up = tensor.tensor.replace("up_proj", "down_proj");
            let down = awq.report.tensors.iter().find(|t| t.tensor == up && up != tensor.tensor);
            let scaled = tensor.ratio.is_some() || down.is_some_and(|d| d.ratio.is_some());
            let clipped = tensor.clip_search.as_ref().is_some_and(|c| c.clipped_groups > 0);
            let name = tensor.tensor.replace(".weight", ".weight_packed");
            let same = awq.source.bytes(&name).unwrap() == rtn.source.bytes(&name).unwrap();
            assert_eq!(same, !scaled && !clipped, "{scheme}: {name}");
            changed += usize::from(!same);
        }
        assert!(changed >= 10, "{scheme}: only {changed} of 14 linears changed");
        assert!(rtn.report.tensors.iter().all(|t| t.scale_search.is_none() && t.clip_search.is_none()));
    }
}

#[test]
fn on_planted_outliers_awq_loses_far_less_than_rounding() {
    let (calibration, held_out) = (common::windows(128, 16, 32, 5), common::windows(128, 8, 32, 6));
    for (tiny, scheme, dtype, max) in [
        (tiny(), "w4a16-g32", Dtype::F32, 0.35),
        (tiny(), "w4a16", Dtype::Bf16, 0.35),
        (tiny(), "w3a16-g64-asym", Dtype::Bf16, 0.65),
        (opt(), "w4a16-g32", Dtype::F32, 0.35),
        (opt(), "w4a16", Dtype::Bf16, 0.35),
    ] {
        let tiny = Tiny { dtype, norm_dtype: dtype, ..tiny };
        let checkpoint = planted(&tiny, 7);
        let exact = logits(&checkpoint.model(), &held_out);
        assert!(exact == logits(&tiny.random(7).model(), &held_out), "planting changes no float logit");
        let divergence = |method: &str| {
            let written = quantized(&checkpoint, &recipe(method, scheme), &calibration);
            mean_divergence(&exact, &logits(&written.model(), &held_out), tiny.vocab)
        };
        let (awq, rtn) = (divergence("awq"), divergence("rtn"));
        println!("{scheme} in {dtype}: KL {awq:.4} with AWQ, {rtn:.4} with RTN");
        assert!(awq < max * rtn, "{scheme}: {awq} against {rtn}");
    }
}

#[test]
fn linears_that_stay_float_are_rewritten_exactly() {
    let tiny = Tiny { layers: 1, kv_heads: 4, mlp_bias: true, ..tiny() };
    let checkpoint = planted(&tiny, 8);
    let (calibration, held_out) = (common::windows(128, 8, 32, 9), common::windows(128, 4, 32, 10));
    let exact = logits(&checkpoint.model(), &held_out);
    let input = checkpoint.source();
    for (kept, siblings, producer) in [
        ("q_proj", &["self_attn.k_proj", "self_attn.v_proj"][..], "input_layernorm"),
        ("up_proj", &["mlp.gate_proj"][..], "post_attention_layernorm"),
        ("down_proj", &[][..], "mlp.up_proj"),
    ] {
        let others =
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"].into_iter();
        let ignore = others.filter(|name| *name != kept).map(|name| Pattern::new(name).unwrap()).collect();
        let recipe = Recipe { ignore, ..recipe("awq", "w8a16-g32") };
        let written = quantized(&checkpoint, &recipe, &calibration);
        let difference = relative_difference(&logits(&written.model(), &held_out), &exact);
        println!("all float but {kept}: logits move by {difference:.1e}");
        assert!(difference < 0.02, "{kept}: {difference:e}");

        // The product of a producer channel and a sibling's column is unchanged.
        let name = |module: &str| format!("model.layers.0.{module}.weight");
        let values = |source: &dyn TensorSource, module: &str| source.read_f32(&name(module)).unwrap();
        let (before, after) = (values(&input, producer), values(&written.source, producer));
        assert!(before != after, "{producer} was folded");
        for sibling in siblings {
            let (old, new) = (values(&input, sibling), values(&written.source, sibling));
            assert!(old != new, "{sibling} was rewritten");
            for (i, (o, n)) in old.iter().zip(&new).enumerate() {
                let c = i % tiny.hidden;
                let (o, n) = (f64::from(*o) * f64::from(before[c]), f64::from(*n) * f64::from(after[c]));
                assert!((o - n).abs() <= 3e-7 * o.abs(), "{sibling} [{i}]: {o} became {n}");
            }
        }
        if producer == "mlp.up_proj" {
            // A linear's bias is divided like its rows.
            let bias =
                |source: &dyn TensorSource| source.read_f32("model.layers.0.mlp.up_proj.bias").unwrap();
            let (old, new) = (bias(&input), bias(&written.source));
            for (c, (o, n)) in old.iter().zip(&new).enumerate() {
                let at = c * tiny.hidden;
                let ratio = f64::from(before[at]) / f64::from(after[at]);
                assert!((f64::from(*o) / f64::from(*n) / ratio - 1.0).abs() < 1e-6, "channel {c}");
            }
        }
    }
}

#[test]
fn without_a_calibration_batch_awq_is_refused() {
    let checkpoint = tiny().random(1);
    let model = checkpoint.model();
    let recipe = recipe("awq", "w4a16");
    let plan = Plan::new(&model, &recipe, recipe.containers[0]).unwrap();
    let mut sink = MemorySink::new(plan.outputs()).unwrap();
    let job = Job {
        model: &model,
        plan: &plan,
        windows: None,
        maxima: None,
        searches: None,
        observer: &Silent,
        cancel: &CancelToken::new(),
    };
    let error = quantize_job(&job, &mut sink).unwrap_err();
    assert_eq!(error.category(), quant_core::Category::Usage, "{error}");
}

/// A run with the same search takes what an earlier one found, and its output does not change. Runs with other grids,
/// batches or settings search themselves.
#[test]
fn runs_share_what_they_have_found() {
    let checkpoint = tiny().random(1);
    let model = checkpoint.model();
    let [windows, other] = [1, 2].map(|seed| common::windows(tiny().vocab, 8, 32, seed));
    let searches = SharedSearches::new(&model, &windows);
    let mut taken = 0;
    for (recipe, windows, takes) in [
        (recipe("awq", "w4a16-g32"), &windows, false),
        (recipe("awq-gptq", "w4a16-g32"), &windows, true),
        (recipe("awq", "w4a16-g32"), &windows, true),
        (recipe("awq", "w3a16-g32"), &windows, false),
        (recipe("awq", "w4a16-g32"), &other, false),
        (
            recipe("awq", "w4a16-g32").with_settings(AwqSettings { search: SearchMode::Reference }),
            &windows,
            false,
        ),
    ] {
        let plan = Plan::new(&model, &recipe, recipe.containers[0]).unwrap();
        let written = |searches| {
            let mut sink = MemorySink::new(plan.outputs()).unwrap();
            let (observer, cancel) = (&Silent, &CancelToken::new());
            let job = Job {
                model: &model,
                plan: &plan,
                windows: Some(windows),
                maxima: None,
                searches,
                observer,
                cancel,
            };
            quantize_job(&job, &mut sink).unwrap();
            let source = sink.into_source().unwrap();
            plan.outputs().iter().map(|o| source.read(&o.name).unwrap().to_vec()).collect::<Vec<_>>()
        };
        assert_eq!(written(Some(&searches)), written(None));
        assert_eq!(searches.taken() > taken, takes, "{recipe:?}");
        taken = searches.taken();
    }
}
