//! Shared code of the pipeline tests: tiny random checkpoints in memory, and helpers that quantize one and run the
//! result.
//!
//! Nothing here is trained; the tests compare two ways to compute the same values.

use std::collections::BTreeMap;
use std::io::Write;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use quant_core::calibrate::{TokenUse, TokenWindows};
use quant_core::checkpoint::{Dtype, MemorySink, MemorySource};
use quant_core::model::{Decoder, Model};
use quant_core::pipeline::{Job, QuantReport, quantize_job};
use quant_core::recipe::{Plan, Recipe};
use quant_core::{CancelToken, Silent, TensorSource};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Map, Value, json};

/// The family of a tiny model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Llama,
    /// Mistral with this sliding window, if any.
    Mistral(Option<usize>),
    Qwen2,
    Qwen3,
    /// Experts in every block.
    Mixtral,
    /// Experts in all blocks but the second; the flag says whether the weights of a token's experts are normalized to
    /// sum to 1.
    Qwen3Moe(bool),
    Opt,
}

/// Number of experts per block.
pub const EXPERTS: usize = 5;
/// Number of experts per token.
pub const TOP_K: usize = 2;

impl Kind {
    fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral(_) => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Mixtral => "MixtralForCausalLM",
            Self::Qwen3Moe(_) => "Qwen3MoeForCausalLM",
            Self::Opt => "OPTForCausalLM",
        }
    }

    /// Whether query and key heads are normalized.
    pub fn head_norms(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Qwen3Moe(_))
    }

    /// The router of a block, and the gate, up and down of its experts, if it has any.
    pub fn experts(self, layer: usize) -> Option<(&'static str, Vec<[String; 3]>)> {
        let (router, experts, names) = match self {
            Self::Mixtral => ("block_sparse_moe.gate", "block_sparse_moe.experts", ["w1", "w3", "w2"]),
            Self::Qwen3Moe(_) if layer != 1 => {
                ("mlp.gate", "mlp.experts", ["gate_proj", "up_proj", "down_proj"])
            }
            _ => return None,
        };
        Some((router, (0..EXPERTS).map(|e| names.map(|name| format!("{experts}.{e}.{name}"))).collect()))
    }

    /// The number of positions that a query attends to, including its own.
    pub fn window(self) -> usize {
        match self {
            Self::Mistral(Some(window)) => window,
            _ => usize::MAX,
        }
    }
}

/// The sizes of a random model. `Tiny::default()` is a small Llama with grouped queries, `Tiny::opt()` a small OPT.
#[derive(Debug, Clone)]
pub struct Tiny {
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    pub tied: bool,
    pub family: Kind,
    /// Biases in all four linears of attention. Qwen2 has those of queries, keys and values in any case; OPT has biases
    /// in all linears or in none.
    pub attention_bias: bool,
    pub mlp_bias: bool,
    /// Whether OPT's norms have weights and biases.
    pub affine: bool,
    /// The value of `rope_scaling`.
    pub rope_scaling: Value,
    /// The dtype of everything except norms.
    pub dtype: Dtype,
    pub norm_dtype: Dtype,
}

impl Default for Tiny {
    fn default() -> Self {
        Self {
            hidden: 64,
            intermediate: 96,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            vocab: 96,
            tied: false,
            family: Kind::Llama,
            attention_bias: false,
            mlp_bias: false,
            affine: true,
            rope_scaling: Value::Null,
            dtype: Dtype::F32,
            norm_dtype: Dtype::F32,
        }
    }
}

/// `max_position_embeddings` of every tiny model.
pub const POSITIONS: usize = 256;
/// The number of positions in the table of a tiny OPT: the default window length of calibration.
pub const OPT_POSITIONS: usize = 512;

impl Tiny {
    /// A small OPT with all features of the family.
    pub fn opt() -> Self {
        Self { family: Kind::Opt, kv_heads: 4, attention_bias: true, mlp_bias: true, ..Self::default() }
    }

    /// The fields of `config.json`.
    pub fn config(&self) -> Map<String, Value> {
        if self.family == Kind::Opt {
            return self.opt_config();
        }
        let mut config = json!({
            "architectures": [self.family.architecture()],
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": POSITIONS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": self.rope_scaling,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
        });
        match self.family {
            Kind::Mistral(window) => config["sliding_window"] = json!(window),
            Kind::Mixtral => {
                config["num_local_experts"] = json!(EXPERTS);
                config["num_experts_per_tok"] = json!(TOP_K);
            }
            Kind::Qwen3Moe(normalized) => {
                config["num_experts"] = json!(EXPERTS);
                config["num_experts_per_tok"] = json!(TOP_K);
                config["moe_intermediate_size"] = json!(self.intermediate);
                config["norm_topk_prob"] = json!(normalized);
                config["mlp_only_layers"] = json!([1]);
            }
            _ => {}
        }
        config.as_object().expect("a JSON object").clone()
    }

    fn opt_config(&self) -> Map<String, Value> {
        assert!(self.kv_heads == self.heads && self.heads * self.head_dim == self.hidden);
        assert_eq!(self.attention_bias, self.mlp_bias);
        let config = json!({
            "architectures": [self.family.architecture()],
            "model_type": "opt",
            "activation_function": "relu",
            "do_layer_norm_before": true,
            "enable_bias": self.attention_bias,
            "ffn_dim": self.intermediate,
            "hidden_size": self.hidden,
            "layer_norm_elementwise_affine": self.affine,
            "max_position_embeddings": OPT_POSITIONS,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocab,
            "word_embed_proj_dim": self.hidden,
        });
        config.as_object().expect("a JSON object").clone()
    }

    pub fn block(&self, layer: usize) -> String {
        match self.family {
            Kind::Opt => format!("model.decoder.layers.{layer}."),
            _ => format!("model.layers.{layer}."),
        }
    }

    /// The norms of a block, each with the linears that read it.
    pub fn norms(&self) -> [(&'static str, &'static [&'static str]); 2] {
        let qkv = &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
        match self.family {
            Kind::Opt => [("self_attn_layer_norm", qkv), ("final_layer_norm", &["fc1"])],
            _ => [("input_layernorm", qkv), ("post_attention_layernorm", &["mlp.gate_proj", "mlp.up_proj"])],
        }
    }

    fn random_opt(&self, seed: u64) -> Checkpoint {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut tensors = BTreeMap::new();
        let mut add = |name: String, shape: &[usize], mean: f32, deviation: f32| {
            let len = shape.iter().product();
            let values = (0..len).map(|_| mean + deviation * normal(&mut rng)).collect();
            tensors.insert(name, (shape.to_vec(), values));
        };
        let fan_in = |k: usize| 1.0 / (k as f32).sqrt();
        let (h, ffn) = (self.hidden, self.intermediate);
        add("model.decoder.embed_tokens.weight".into(), &[self.vocab, h], 0.0, 1.0);
        add("model.decoder.embed_positions.weight".into(), &[OPT_POSITIONS + 2, h], 0.0, 0.5);
        if !self.tied {
            add("lm_head.weight".into(), &[self.vocab, h], 0.0, 2.0 * fan_in(h));
        }
        let norms = (0..self.layers)
            .flat_map(|l| self.norms().map(|(norm, _)| format!("{}{norm}", self.block(l))))
            .chain(["model.decoder.final_layer_norm".to_owned()]);
        for norm in norms.filter(|_| self.affine) {
            add(format!("{norm}.weight"), &[h], 1.0, 0.3);
            add(format!("{norm}.bias"), &[h], 0.0, 0.3);
        }
        for layer in 0..self.layers {
            for (name, n, k) in [
                ("self_attn.q_proj", h, h),
                ("self_attn.k_proj", h, h),
                ("self_attn.v_proj", h, h),
                ("self_attn.out_proj", h, h),
                ("fc1", ffn, h),
                ("fc2", h, ffn),
            ] {
                let module = format!("{}{name}", self.block(layer));
                add(format!("{module}.weight"), &[n, k], 0.0, fan_in(k));
                if self.attention_bias {
                    add(format!("{module}.bias"), &[n], 0.0, 0.3);
                }
            }
        }
        Checkpoint { tiny: self.clone(), tensors }
    }

    /// Random weights: linears preserve the magnitude of their inputs, norms are `1 + 0.3 ε`.
    pub fn random(&self, seed: u64) -> Checkpoint {
        if self.family == Kind::Opt {
            return self.random_opt(seed);
        }
        let mut rng = StdRng::seed_from_u64(seed);
        let mut tensors = BTreeMap::new();
        let mut add = |name: String, shape: &[usize], mean: f32, deviation: f32| {
            let len = shape.iter().product();
            let values = (0..len).map(|_| mean + deviation * normal(&mut rng)).collect();
            tensors.insert(name, (shape.to_vec(), values));
        };
        let fan_in = |k: usize| 1.0 / (k as f32).sqrt();
        let (h, q, kv) = (self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim);
        add("model.embed_tokens.weight".into(), &[self.vocab, h], 0.0, 1.0);
        add("model.norm.weight".into(), &[h], 1.0, 0.3);
        if !self.tied {
            add("lm_head.weight".into(), &[self.vocab, h], 0.0, 2.0 * fan_in(h));
        }
        for layer in 0..self.layers {
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                add(format!("model.layers.{layer}.{norm}.weight"), &[h], 1.0, 0.3);
            }
            if self.family.head_norms() {
                for norm in ["q_norm", "k_norm"] {
                    add(format!("model.layers.{layer}.self_attn.{norm}.weight"), &[self.head_dim], 1.0, 0.3);
                }
            }
            let qkv_bias = self.attention_bias || self.family == Kind::Qwen2;
            let mut linears: Vec<(String, usize, usize, bool)> = vec![
                ("self_attn.q_proj".into(), q, h, qkv_bias),
                ("self_attn.k_proj".into(), kv, h, qkv_bias),
                ("self_attn.v_proj".into(), kv, h, qkv_bias),
                ("self_attn.o_proj".into(), h, q, self.attention_bias),
            ];
            let mlp = |[gate, up, down]: [String; 3], bias: bool| {
                [
                    (gate, self.intermediate, h, bias),
                    (up, self.intermediate, h, bias),
                    (down, h, self.intermediate, bias),
                ]
            };
            match self.family.experts(layer) {
                Some((router, experts)) => {
                    // Router logits are large enough that expert weights differ from token to token.
                    add(format!("model.layers.{layer}.{router}.weight"), &[EXPERTS, h], 0.0, 1.5 * fan_in(h));
                    linears.extend(experts.into_iter().flat_map(|names| mlp(names, false)));
                }
                None => linears
                    .extend(mlp(["gate", "up", "down"].map(|m| format!("mlp.{m}_proj")), self.mlp_bias)),
            }
            for (name, n, k, bias) in linears {
                add(format!("model.layers.{layer}.{name}.weight"), &[n, k], 0.0, fan_in(k));
                if bias {
                    add(format!("model.layers.{layer}.{name}.bias"), &[n], 0.0, 0.3);
                }
            }
        }
        Checkpoint { tiny: self.clone(), tensors }
    }
}

#[derive(Debug, Clone)]
pub struct Checkpoint {
    pub tiny: Tiny,
    /// Shapes and values by name.
    pub tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Checkpoint {
    pub fn values(&mut self, name: &str) -> &mut [f32] {
        &mut self.tensors.get_mut(name).expect("a tensor of the model").1
    }

    /// Multiplies some channels of a norm, given by its weight, by `factor` and divides the columns that read them by
    /// it. For a power of two the model's float outputs stay bit-identical.
    pub fn plant(&mut self, norm: &str, consumers: &[&str], channels: &[usize], factor: f32) {
        for &c in channels {
            self.values(norm)[c] *= factor;
        }
        if let Some((_, bias)) = self.tensors.get_mut(&norm.replace(".weight", ".bias")) {
            channels.iter().for_each(|&c| bias[c] *= factor);
        }
        let hidden = self.tiny.hidden;
        for consumer in consumers {
            for row in self.values(consumer).chunks_exact_mut(hidden) {
                channels.iter().for_each(|&c| row[c] /= factor);
            }
        }
    }

    /// The tensors, rounded to their stored dtypes.
    pub fn source(&self) -> MemorySource {
        let mut source = MemorySource::new();
        for (name, (shape, values)) in &self.tensors {
            let dtype = if name.contains("norm") { self.tiny.norm_dtype } else { self.tiny.dtype };
            source.insert_f32(name, dtype, shape.clone(), values).expect("valid names and shapes");
        }
        source
    }

    pub fn model(&self) -> Model {
        model(Arc::new(self.source()), &self.tiny.config())
    }
}

pub fn model(source: Arc<dyn TensorSource>, config: &Map<String, Value>) -> Model {
    Model::new(source, Path::new("config.json"), config).expect("the model is sound")
}

/// Draws from the standard normal distribution (Box-Muller).
pub fn normal(rng: &mut StdRng) -> f32 {
    let (u, v): (f32, f32) = (rng.random_range(f32::MIN_POSITIVE..1.0), rng.random_range(0.0..1.0));
    (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}

/// Uniformly random tokens.
pub fn windows(vocab: usize, count: usize, length: usize, seed: u64) -> TokenWindows {
    let mut rng = StdRng::seed_from_u64(seed);
    TokenWindows::cut((0..count * length).map(|_| rng.random_range(0..vocab as u32)).collect(), length)
}

/// The tokens of [`windows`], split into documents of different lengths. The first half of each document is an
/// uncounted prompt, and less than an eighth of each window, at its end, is padding.
pub fn masked_windows(vocab: usize, count: usize, length: usize, seed: u64) -> TokenWindows {
    let mut rng = StdRng::seed_from_u64(seed + 1);
    let (mut uses, mut starts) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let mut at = 0;
        let end = length - rng.random_range(0..length / 8);
        while at < end {
            let len = rng.random_range(1..=length / 2).min(end - at);
            starts.extend(std::iter::repeat_n(at as u32, len));
            uses.extend((0..len).map(|i| if i < len / 2 { TokenUse::Context } else { TokenUse::Counted }));
            at += len;
        }
        starts.extend(end as u32..length as u32);
        uses.extend(std::iter::repeat_n(TokenUse::Padding, length - end));
    }
    windows(vocab, count, length, seed)
        .with_layout(Some(uses), Some(starts))
        .expect("a layout of these windows")
}

pub fn decoder(model: &Model) -> Decoder {
    Decoder::load(model, POSITIONS, &Silent, &CancelToken::new()).expect("the model loads")
}

/// Logits of every position of every window, `[windows · length, vocab]`.
pub fn logits(model: &Model, windows: &TokenWindows) -> Vec<f32> {
    let decoder = decoder(model);
    let batch: Vec<&[u32]> = (0..windows.len()).map(|i| windows.window(i)).collect();
    flat(&decoder.logits(&decoder.hidden(&batch).unwrap()).unwrap())
}

pub fn flat(tensor: &candle_core::Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// The recipe of a method and a scheme, for the first container.
pub fn recipe(method: &str, scheme: &str) -> Recipe {
    Recipe {
        method: quant_core::recipe::method(method).unwrap(),
        scheme: scheme.parse().unwrap(),
        ..Recipe::preset("rtn-w4a16").unwrap()
    }
}

#[derive(Debug)]
pub struct Quantized {
    pub source: MemorySource,
    /// The configuration with its `quantization_config`.
    pub config: Map<String, Value>,
    pub report: QuantReport,
}

impl Quantized {
    /// Reads the output back as a model.
    pub fn model(&self) -> Model {
        model(Arc::new(self.source.clone()), &self.config)
    }
}

pub fn run(
    model: &Model,
    config: &Map<String, Value>,
    recipe: &Recipe,
    windows: Option<&TokenWindows>,
) -> Quantized {
    let plan = Plan::new(model, recipe, recipe.containers[0]).expect("the recipe fits");
    let mut sink = MemorySink::new(plan.outputs()).unwrap();
    let job = Job {
        model,
        plan: &plan,
        windows,
        maxima: None,
        searches: None,
        observer: &Silent,
        cancel: &CancelToken::new(),
    };
    let report = quantize_job(&job, &mut sink).expect("the model can be quantized");
    let mut config = config.clone();
    config.insert("quantization_config".into(), plan.container.quantization_config(&plan.module_schemes()));
    if plan.unties_head() {
        config.insert("tie_word_embeddings".into(), Value::Bool(false));
    }
    Quantized { source: sink.into_source().expect("complete tensors"), config, report }
}

/// `max |a − b| / max |b|`.
pub fn relative_difference(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let largest = b.iter().fold(0.0_f64, |m, v| m.max(f64::from(v.abs())));
    let difference = a.iter().zip(b).map(|(x, y)| f64::from(x - y).abs());
    // `f64::max` would ignore NaN.
    difference.fold(0.0, |m, d| if d <= m { m } else { d }) / largest
}

/// Mean over positions of `KL(softmax exact ‖ softmax other)` in nats.
pub fn mean_divergence(exact: &[f32], other: &[f32], vocab: usize) -> f64 {
    let log_softmax = |row: &[f32]| -> Vec<f64> {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|v| f64::from(v - max).exp()).sum();
        row.iter().map(|v| f64::from(v - max) - sum.ln()).collect()
    };
    let rows = exact.chunks_exact(vocab).zip(other.chunks_exact(vocab)).map(|(e, o)| {
        let (e, o) = (log_softmax(e), log_softmax(o));
        e.iter().zip(&o).map(|(p, q)| p.exp() * (p - q)).sum::<f64>()
    });
    rows.sum::<f64>() / (exact.len() / vocab) as f64
}

/// Returns the directory `../shared/data` next to the checkout, with real models and texts. If it is missing, the
/// calling test's skip is reported as in `tests/support` (which depends on this crate): a line on stderr, and one in
/// the file named by `QUANT_SKIP_LOG`.
#[track_caller]
pub fn shared_data() -> Option<PathBuf> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data");
    if data.is_dir() {
        return Some(data);
    }
    let place = Location::caller();
    let why = "no real models and texts in ../shared/data";
    let line = format!("SKIPPED: {why} ({}:{})\n", place.file(), place.line());
    eprint!("{line}");
    if let Some(log) = std::env::var_os("QUANT_SKIP_LOG") {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(&log);
        let noted = file.and_then(|mut file| file.write_all(line.as_bytes()));
        assert!(noted.is_ok(), "cannot note the skip in {}", Path::new(&log).display());
    }
    None
}
