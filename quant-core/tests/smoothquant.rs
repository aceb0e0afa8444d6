//! SmoothQuant and 8-bit activations in the pipeline.

use crate::common;

use std::collections::BTreeMap;
use std::sync::Mutex;

use candle_core::Tensor;
use common::{Checkpoint, Kind, Quantized, Tiny, decoder, flat, logits, mean_divergence, recipe, run};
use quant_core::calibrate::{BatchLayout, ChannelMaxima, HiddenStates, TokenWindows};
use quant_core::checkpoint::{Dtype, MemorySink};
use quant_core::model::{Block, BlockGraph, Model, NodeId, Tap, TokenRows, WeightBody};
use quant_core::pipeline::{Job, quantize_job};
use quant_core::recipe::{Plan, Recipe};
use quant_core::scheme::ActivationScheme;
use quant_core::transform::{Alpha, Automatic, Producers, SmoothSettings, StepSettings, TransformSettings};
use quant_core::{CancelToken, Category, Result, Silent};

const LENGTH: usize = 48;

fn llama() -> Tiny {
    Tiny { hidden: 128, intermediate: 256, head_dim: 32, vocab: 128, ..Tiny::default() }
}

fn smooth(method: &str, scheme: &str, alpha: Option<Alpha>, producers: Producers) -> Recipe {
    let smooth = SmoothSettings { alpha, producers, maxima: None };
    let settings = TransformSettings { steps: StepSettings::of(smooth), ..TransformSettings::default() };
    Recipe { settings, ..recipe(method, scheme) }
}

fn quantized(checkpoint: &Checkpoint, recipe: &Recipe, windows: &TokenWindows) -> Quantized {
    run(&checkpoint.model(), &checkpoint.tiny.config(), recipe, Some(windows))
}

/// The smallest and largest input of every channel of every linear.
struct Watch {
    layout: BatchLayout,
    ranges: BTreeMap<NodeId, Vec<[f32; 2]>>,
}

impl Tap for Watch {
    fn linear_input(&mut self, linear: NodeId, x: &Tensor, tokens: TokenRows<'_>) -> Result<()> {
        let k = x.dims3()?.2;
        let ranges = self.ranges.entry(linear).or_insert_with(|| vec![[f32::MAX, f32::MIN]; k]);
        for (token, row) in tokens.iter().zip(flat(x).chunks(k)) {
            if self.layout.counts(token) {
                for (range, v) in ranges.iter_mut().zip(row) {
                    *range = [range[0].min(*v), range[1].max(*v)];
                }
            }
        }
        Ok(())
    }
}

fn watched(block: &Block, states: &mut HiddenStates) -> BTreeMap<NodeId, Vec<[f32; 2]>> {
    let mut watch = Watch { layout: states.layout().clone(), ranges: BTreeMap::new() };
    states.advance_watched(block, &CancelToken::new(), &mut watch).unwrap();
    watch.ranges
}

fn id(graph: &BlockGraph, name: &str) -> NodeId {
    (0..graph.nodes().len()).find(|&id| graph.name(id) == name).unwrap()
}

fn largest(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(0.0, |max, v| max.max(v.abs()))
}

/// Equation 4, from ranges and weights, for a producer whose channels are the consumers' columns.
fn scales(
    block: &Block,
    ranges: &BTreeMap<NodeId, Vec<[f32; 2]>>,
    readers: &[NodeId],
    alpha: f64,
) -> Vec<f64> {
    let weights: Vec<_> = readers.iter().map(|&r| block.linear(r).weight().to_f32().unwrap()).collect();
    let k = block.linear(readers[0]).weight().shape()[1];
    (0..k)
        .map(|c| {
            let x = f64::from(largest(ranges[&readers[0]][c].into_iter()));
            let w = largest(weights.iter().flat_map(|w| w.iter().skip(c).step_by(k).copied()));
            x.max(1e-5).powf(alpha) / f64::from(w).max(1e-5).powf(1.0 - alpha)
        })
        .collect()
}

fn assert_close(got: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (c, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!((f64::from(*g) - e).abs() <= tolerance * e.abs() + 1e-9, "{what}, channel {c}: {g}, not {e}");
    }
}

#[test]
fn scales_are_those_of_the_paper() {
    let families = [
        llama(),
        Tiny { family: Kind::Qwen2, ..llama() },
        Tiny { family: Kind::Qwen3, norm_dtype: Dtype::Bf16, ..llama() },
        Tiny { hidden: 128, intermediate: 256, head_dim: 32, vocab: 128, ..Tiny::opt() },
    ];
    for tiny in families {
        let checkpoint = tiny.random(11);
        let windows = common::masked_windows(tiny.vocab, 4, LENGTH, 2);
        let float = checkpoint.model();
        let rope = float.rope(LENGTH).unwrap();
        for alpha in [None, Some(0.3)] {
            let used = alpha.unwrap_or(f64::from(float.architecture().smoothing));
            let asked = alpha.map(|a| Alpha::Fixed(a as f32));
            let result =
                quantized(&checkpoint, &smooth("smoothquant", "w8a8", asked, Producers::Norms), &windows);
            let written = result.model();
            let mut states = HiddenStates::embed(&float, &windows).unwrap();
            for layer in 0..tiny.layers {
                let (exact, smoothed) =
                    (float.block(layer, &rope).unwrap(), written.block(layer, &rope).unwrap());
                let ranges = watched(&exact, &mut states);
                for (norm, readers) in tiny.norms() {
                    let what = format!("{:?} {layer} {norm}", tiny.family);
                    let readers: Vec<_> = readers.iter().map(|name| id(exact.graph(), name)).collect();
                    let expected = scales(&exact, &ranges, &readers, used);
                    let norm = id(exact.graph(), norm);
                    let (before, after) = (flat(exact.norm(norm)), flat(smoothed.norm(norm)));
                    let divided: Vec<f64> =
                        before.iter().zip(&expected).map(|(b, s)| f64::from(*b) / s).collect();
                    let exactness = if tiny.norm_dtype == Dtype::F32 { 1e-5 } else { 1.0 / 256.0 };
                    assert_close(&after, &divided, exactness, &what);
                    // Columns are multiplied by the factor by which the stored, rounded norm actually changed.
                    let made_up: Vec<f32> = before.iter().zip(&after).map(|(b, a)| b / a).collect();
                    for reader in readers {
                        let weight = exact.linear(reader).weight().to_f32().unwrap();
                        let WeightBody::Quantized(tensor) = &**smoothed.linear(reader).weight() else {
                            panic!("{what}: float")
                        };
                        assert_eq!(tensor.scheme.activations, ActivationScheme::Token);
                        let k = made_up.len();
                        for (i, (q, w)) in tensor.dequantize().unwrap().iter().zip(&weight).enumerate() {
                            let (target, scale) = (w * made_up[i % k], tensor.scales[i / k]);
                            // A code is off by at most half a step, plus the clipping of the largest code of a row.
                            assert!((q - target).abs() <= 0.51 * scale + 1e-6, "{what}: {q} for {target}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn producers_that_are_linears_are_smoothed_on_request() {
    // Grouped queries: a value head is read by two query heads.
    let checkpoint = llama().random(5);
    let windows = common::windows(128, 4, LENGTH, 1);
    let float = checkpoint.model();
    let recipe = smooth("smoothquant", "w8a8", Some(Alpha::Fixed(0.5)), Producers::All);
    let result = quantized(&checkpoint, &recipe, &windows);
    let report = |name: &str| result.report.tensors.iter().find(|t| t.tensor.ends_with(name)).unwrap();
    for name in ["q_proj.weight", "o_proj.weight", "down_proj.weight", "up_proj.weight"] {
        assert_eq!(report(name).smooth.as_ref().unwrap().alpha, Some(0.5), "{name}");
    }
    let rope = float.rope(LENGTH).unwrap();
    let (exact, smoothed) = (float.block(0, &rope).unwrap(), result.model().block(0, &rope).unwrap());
    let mut states = HiddenStates::embed(&float, &windows).unwrap();
    let ranges = watched(&exact, &mut states);
    let graph = exact.graph();
    let (value, out) = (id(graph, "self_attn.v_proj"), id(graph, "self_attn.o_proj"));
    // For every channel of a value head, the largest input and weight over the two query heads that read it.
    let of_columns = scales(&exact, &ranges, &[out], 1.0);
    let weights = scales(&exact, &ranges, &[out], 0.0);
    let of_heads = |columns: &[f64], better: fn(f64, f64) -> f64| -> Vec<f64> {
        (0..64).map(|c| better(columns[c / 32 * 64 + c % 32], columns[c / 32 * 64 + 32 + c % 32])).collect()
    };
    let (x, w) = (of_heads(&of_columns, f64::max), of_heads(&weights, f64::min));
    let expected: Vec<f64> = x.iter().zip(&w).map(|(x, inverse)| x.sqrt() * inverse.sqrt()).collect();
    // The rows of the value projection are divided after its columns were multiplied for the norm.
    let norm = id(graph, "input_layernorm");
    let by_norm: Vec<f32> =
        flat(exact.norm(norm)).iter().zip(flat(smoothed.norm(norm))).map(|(b, a)| b / a).collect();
    let before = exact.linear(value).weight().to_f32().unwrap();
    let WeightBody::Quantized(after) = &**smoothed.linear(value).weight() else {
        panic!("expected a quantized weight")
    };
    let rows = after.dequantize().unwrap();
    for (row, scale) in expected.iter().enumerate() {
        for c in 0..128 {
            let target = f64::from(before[row * 128 + c] * by_norm[c]) / scale;
            let step = f64::from(after.scales[row]);
            assert!(
                (f64::from(rows[row * 128 + c]) - target).abs() <= 0.51 * step + 1e-6,
                "row {row}, column {c}"
            );
        }
    }
}

#[test]
fn static_grids_are_the_ranges_after_smoothing() {
    for (method, tiny) in [("rtn", llama()), ("smoothquant", llama()), ("smoothquant-gptq", Tiny::opt())] {
        let checkpoint = tiny.random(8);
        let windows = common::masked_windows(tiny.vocab, 4, LENGTH, 3);
        let float = checkpoint.model();
        let rope = float.rope(LENGTH).unwrap();
        for symmetric in [true, false] {
            let scheme = if symmetric { "w8a8-static" } else { "w8a8-static-asym" };
            let result = quantized(&checkpoint, &smooth(method, scheme, None, Producers::All), &windows);
            let written = result.model();
            let mut states = HiddenStates::embed(&float, &windows).unwrap();
            for layer in 0..tiny.layers {
                let (exact, rounded) =
                    (float.block(layer, &rope).unwrap(), written.block(layer, &rope).unwrap());
                // The input ranges of the float block. They determine the grids of `rtn`, which divides no inputs.
                let ranges = watched(&exact, &mut states);
                for (node, name, ..) in exact.graph().linears() {
                    let WeightBody::Quantized(tensor) = &**rounded.linear(node).weight() else {
                        panic!("expected a quantized weight")
                    };
                    let input = tensor.input.expect("a static grid");
                    let reported = result.report.tensors.iter();
                    let prefix = tiny.block(layer);
                    let mut reported = reported.filter(|t| t.tensor == format!("{prefix}{name}.weight"));
                    let message = reported.next().unwrap().input.unwrap();
                    assert_eq!((message.scale, message.zero), (input.scale, input.zero));
                    if method == "rtn" {
                        let lowest = ranges[&node].iter().fold(0.0_f32, |m, r| m.min(r[0]));
                        let highest = ranges[&node].iter().fold(0.0_f32, |m, r| m.max(r[1]));
                        let expected = match symmetric {
                            true => highest.max(-lowest) / 127.0,
                            false => (highest - lowest) / 255.0,
                        };
                        assert!((input.scale / expected - 1.0).abs() < 1e-6, "{name}");
                        // The code of 0, if 0 is in the range.
                        let zero = (-128.0 - lowest / input.scale).round_ties_even();
                        assert_eq!(f32::from(input.zero), if symmetric { 0.0 } else { zero }, "{name}");
                    }
                }
            }
            // The grids span the ranges of all calibration inputs, so on this text only rounding costs accuracy.
            let exact = logits(&float, &windows);
            let lost = mean_divergence(&exact, &logits(&written, &windows), tiny.vocab);
            assert!(lost < 0.02, "{method} {scheme}: {lost}");
        }
    }
}

/// Multiplies some channels of every norm by 32 and divides the columns that read them; the outputs of the float model
/// stay the same.
fn planted(tiny: &Tiny, seed: u64) -> Checkpoint {
    let mut checkpoint = tiny.random(seed);
    for layer in 0..tiny.layers {
        for (norm, readers) in tiny.norms() {
            let prefix = tiny.block(layer);
            let readers: Vec<String> = readers.iter().map(|r| format!("{prefix}{r}.weight")).collect();
            let readers: Vec<&str> = readers.iter().map(String::as_str).collect();
            checkpoint.plant(&format!("{prefix}{norm}.weight"), &readers, &[3, 40, 77, 120], 32.0);
        }
    }
    checkpoint
}

#[test]
fn planted_outliers_are_recovered() {
    let tiny = llama();
    let (windows, others) = (common::windows(128, 16, LENGTH, 1), common::windows(128, 6, LENGTH, 2));
    let clean = tiny.random(6);
    let dirty = planted(&tiny, 6);
    let exact = logits(&clean.model(), &others);
    assert_eq!(exact, logits(&dirty.model(), &others), "planting changes no float output");
    let lost = |checkpoint: &Checkpoint, recipe: &Recipe| {
        let written = quantized(checkpoint, recipe, &windows).model();
        mean_divergence(&exact, &logits(&written, &others), 128)
    };
    for scheme in ["w8a8-static", "w8a8-static-asym", "w8a8"] {
        let naive = (lost(&clean, &recipe("rtn", scheme)), lost(&dirty, &recipe("rtn", scheme)));
        assert!(naive.1 > 4.0 * naive.0, "{scheme}: outliers cost {} against {}", naive.1, naive.0);
        for alpha in [Some(Alpha::Fixed(0.5)), None, Some(Alpha::Auto(Automatic::Auto))] {
            let smoothed = lost(&dirty, &smooth("smoothquant", scheme, alpha, Producers::Norms));
            let recovered = (naive.1 - smoothed) / (naive.1 - naive.0);
            assert!(
                recovered > 0.9,
                "{scheme}, {alpha:?}: {smoothed} of {naive:?}, {recovered:.3} recovered"
            );
        }
    }
}

#[test]
fn the_exponent_that_is_found_leaves_the_least_error() {
    let tiny = Tiny { layers: 1, ..llama() };
    let checkpoint = planted(&tiny, 9);
    let windows = common::windows(128, 8, LENGTH, 4);
    let auto = Some(Alpha::Auto(Automatic::Auto));
    for (scheme, producers) in
        [("w8a8", Producers::Norms), ("w8a8-static-asym", Producers::All), ("w4a8-g32", Producers::Norms)]
    {
        let result = quantized(&checkpoint, &smooth("smoothquant", scheme, auto, producers), &windows);
        let mut searches = BTreeMap::new();
        for record in result.report.tensors.iter().filter_map(|t| t.smooth.as_ref()) {
            searches.insert(record.producer.clone(), record.clone());
        }
        assert_eq!(searches.len(), if producers == Producers::All { 4 } else { 2 });
        let mut least = f64::INFINITY;
        for record in searches.values() {
            let tried = &record.search.as_ref().unwrap().tried;
            assert_eq!((tried.len(), tried[0].ratio), (13, None));
            let best = tried.iter().map(|t| t.error).fold(f64::INFINITY, f64::min);
            assert_eq!(tried.iter().find(|t| t.error == best).unwrap().ratio, record.alpha);
            assert!(best < tried[0].error, "{scheme}: smoothing helps where outliers are planted");
            least = least.min(best);
        }
        // The error of the written weights is the final error of the last search.
        let (float, written) = (checkpoint.model(), result.model());
        let rope = float.rope(LENGTH).unwrap();
        let output = |model: &Model| -> Vec<f32> {
            let mut states = HiddenStates::embed(&float, &windows).unwrap();
            states.advance(&model.block(0, &rope).unwrap(), &CancelToken::new()).unwrap();
            states.chunks().flat_map(|c| flat(&c.unwrap().1)).collect()
        };
        let (exact, rounded) = (output(&float), output(&written));
        let squares: f64 = exact.iter().zip(&rounded).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let error = squares / exact.len() as f64;
        assert!((error / least - 1.0).abs() < 0.02, "{scheme}: {error} written, {least} found");
    }
}

#[test]
fn kernels_give_what_rounded_floats_give() {
    let tiny = llama();
    let checkpoint = planted(&tiny, 3);
    let (windows, others) = (common::windows(128, 6, LENGTH, 1), common::windows(128, 3, LENGTH, 2));
    for scheme in [
        "w8a8",
        "w8a8-static",
        "w8a8-static-asym",
        "w8a8-g64",
        "w4a8-g32-asym",
        "w4a8-channel",
        "w3a8-g128",
        "w2a8-g32-asym",
    ] {
        let written =
            quantized(&checkpoint, &smooth("smoothquant", scheme, None, Producers::All), &windows).model();
        let batch: Vec<&[u32]> = (0..others.len()).map(|i| others.window(i)).collect();
        let run = |decoder: quant_core::model::Decoder| {
            flat(&decoder.logits(&decoder.hidden(&batch).unwrap()).unwrap())
        };
        let fake = run(decoder(&written));
        let real = run(decoder(&written).packed().unwrap());
        // The integers are the same, but float sums round differently, and occasionally an input falls on the other
        // side of the midpoint between two codes.
        let difference = common::relative_difference(&real, &fake);
        assert!(difference < 2e-2, "{scheme}: {difference:e}");
        let divergence = mean_divergence(&fake, &real, 128);
        assert!(divergence < 1e-4, "{scheme}: {divergence:e}");
    }
}

fn keeping(
    model: &Model,
    recipe: &Recipe,
    windows: Option<&TokenWindows>,
) -> (quant_core::checkpoint::MemorySource, ChannelMaxima) {
    let plan = Plan::new(model, recipe, recipe.containers[0]).unwrap();
    let mut sink = MemorySink::new(plan.outputs()).unwrap();
    let kept = Mutex::new(ChannelMaxima::default());
    let maxima = windows.map(|_| &kept);
    let job = Job {
        model,
        plan: &plan,
        windows,
        maxima,
        searches: None,
        observer: &Silent,
        cancel: &CancelToken::new(),
    };
    quantize_job(&job, &mut sink).unwrap();
    (sink.into_source().unwrap(), kept.into_inner().unwrap())
}

#[test]
fn maxima_that_were_kept_give_the_same_bytes_without_a_text() {
    let checkpoint = llama().random(2);
    let model = checkpoint.model();
    let windows = common::windows(128, 4, LENGTH, 1);
    let gathered = smooth("smoothquant", "w8a8", None, Producers::All);
    let (whole, maxima) = keeping(&model, &gathered, Some(&windows));
    assert_eq!(maxima.len(), 2 * 7);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("maxima.safetensors");
    std::fs::write(&path, maxima.to_bytes().unwrap()).unwrap();
    let mut given = gathered.clone();
    given.set_file("smoothquant", "maxima", &path).unwrap();
    assert!(!given.needs_text() && gathered.needs_text());
    let (again, _) = keeping(&model, &given, None);
    assert!(whole == again);
    // A GPTQ run observes the states of a different model, but records the same maxima.
    let (_, find) = keeping(&model, &recipe("gptq", "w4a16-g32"), Some(&windows));
    assert_eq!(find.sha256(), maxima.sha256());
    // Maxima of a different model are rejected by name, before anything is computed.
    let other = Tiny { layers: 3, ..llama() }.random(1).model();
    let error = Plan::new(&other, &given, given.containers[0]).unwrap_err().to_string();
    assert!(error.contains("layers.2.self_attn.q_proj") && error.contains("maxima.safetensors"), "{error}");
}

#[test]
fn transforms_and_roundings_go_together() {
    let tiny = llama();
    let checkpoint = planted(&tiny, 12);
    let (windows, others) = (common::windows(128, 24, LENGTH, 1), common::windows(128, 6, LENGTH, 2));
    let exact = logits(&checkpoint.model(), &others);
    let lost = |method: &str| {
        let recipe = smooth(method, "w4a8-g32", Some(Alpha::Fixed(0.5)), Producers::Norms);
        let written = quantized(&checkpoint, &recipe, &windows);
        assert_eq!(written.report.method, method);
        mean_divergence(&exact, &logits(&written.model(), &others), 128)
    };
    let rtn = lost("rtn");
    let all: Vec<_> = ["smoothquant", "smoothquant-gptq", "smoothquant-awq", "smoothquant-awq-gptq"]
        .map(|method| (method, lost(method)))
        .into();
    println!("rtn {rtn:.5}, {all:.5?}");
    assert!(all.iter().all(|(_, lost)| *lost < 0.6 * rtn), "rtn {rtn}, {all:?}");
    assert!(all[1..].iter().all(|(_, lost)| *lost < all[0].1), "{all:?}");
}

#[test]
fn what_makes_no_sense_is_refused_before_any_compute() {
    let model = llama().random(1).model();
    let message = |recipe: &Recipe| {
        let error = Plan::new(&model, recipe, recipe.containers[0]).unwrap_err();
        assert_eq!(error.category(), Category::Usage, "{error}");
        error.to_string()
    };
    assert!(message(&recipe("smoothquant", "w4a16")).contains("all activations stay float"));
    assert!(message(&recipe("rtn", "w4a8-static")).contains("only with w8a8-channel-sym"));
    let with = |pattern: &str, scheme: &str| {
        let mut recipe = recipe("rtn", "w8a8");
        let scheme = recipe.scheme.refine(scheme).unwrap();
        recipe.overrides.push((quant_core::recipe::Pattern::new(pattern).unwrap(), scheme));
        recipe
    };
    assert!(message(&with("embed_tokens", "w8a8")).contains("an embedding has no input activations"));
    assert!(message(&with("lm_head", "w8a8-static")).contains("only in blocks"));
    for format in ["awq", "gptq"] {
        let containers = vec![quant_core::format::container(format).unwrap()];
        // Dynamic scales are computed by the engine, and a note says that the format does not describe them. Static
        // scales, which were computed on a text, must not be dropped.
        let plan = |scheme| Recipe { containers: containers.clone(), ..recipe("rtn", scheme) };
        let lost = Plan::new(&model, &plan("w4a8"), containers[0]).unwrap().losses();
        assert!(lost.len() == 1 && lost[0].contains("cannot describe quantized activations"), "{lost:?}");
        assert!(message(&plan("w8a8-static")).contains("cannot describe quantized activations"));
    }
    assert!(Plan::new(&model, &with("lm_head", "w8a8"), recipe("rtn", "w8a8").containers[0]).is_ok());
}

#[test]
fn non_finite_activations_are_an_error_that_names_their_linear() {
    let mut checkpoint = llama().random(4);
    for tensor in ["gate_proj", "up_proj"] {
        checkpoint.values(&format!("model.layers.1.mlp.{tensor}.weight"))[..128].fill(3e38);
    }
    let model = checkpoint.model();
    let windows = common::windows(128, 2, LENGTH, 1);
    for recipe in [recipe("rtn", "w8a8-static"), smooth("smoothquant", "w8a8", None, Producers::Norms)] {
        let plan = Plan::new(&model, &recipe, recipe.containers[0]).unwrap();
        let mut sink = MemorySink::new(plan.outputs()).unwrap();
        let (windows, cancel) = (Some(&windows), CancelToken::new());
        let job = Job {
            model: &model,
            plan: &plan,
            windows,
            maxima: None,
            searches: None,
            observer: &Silent,
            cancel: &cancel,
        };
        let error = quantize_job(&job, &mut sink).unwrap_err();
        assert_eq!(error.category(), Category::Numeric, "{error}");
        assert!(error.to_string().contains("model.layers.1.mlp.down_proj"), "{error}");
    }
}
