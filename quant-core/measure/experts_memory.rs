//! Measures the memory and time of quantizing one block of experts whose weights are generated when they are read.
//!
//! ```text
//! cargo run --release -p quant-core --example experts_memory -- METHOD [BLOCK] [EXPERTS] [HIDDEN] [WIDTH] [SAMPLES] [LENGTH] [BUDGET]
//! ```
//!
//! METHOD is a method such as `rtn` or `gptq`; `awq:reference` and `awq-gptq:reference` compare candidates on the whole
//! batch, and `smoothquant:auto` searches exponents. BLOCK is one of:
//!
//! - `latent` (default): as in DeepSeek-V3, with a shared expert and latent attention; HIDDEN must be a multiple of
//!   1792.
//! - `plain`: as in Qwen3-MoE, with attention of HIDDEN / 128 heads.
//!
//! Default sizes are those of DeepSeek-V3: 256 experts of 7168 × 2048, 8 per token; 128 windows of 512 random tokens.
//! BUDGET is the memory budget in bytes, or `smallest` for the smallest that suffices; without it, everything is in
//! memory. SmoothQuant quantizes to `w8a8-channel-sym`, other methods to `w4a16-g128-sym`. The output is hashed and
//! dropped. Prints the time, the peak resident memory (VmHWM), the plan's prediction, and the
//! hash.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use quant_core::calibrate::{Residence, Sampling, Spill, TokenWindows};
use quant_core::checkpoint::{Dtype, TensorInfo};
use quant_core::model::Model;
use quant_core::pipeline::{Job, StateFiles, quantize_each_with};
use quant_core::recipe::{Plan, Recipe, method};
use quant_core::transform::{
    Alpha, Automatic, AwqSettings, Search, SmoothSettings, StepSettings, TransformSettings,
};
use quant_core::{CancelToken, Error, Result, Silent, TensorSink, TensorSource};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

const VOCAB: usize = 1024;
const TOP_K: usize = 8;
/// Width of a head in plain attention.
const PLAIN_HEAD: usize = 128;
/// Widths of a head in latent attention: unrotated features, rotated features, and value features.
const HEAD: [usize; 3] = [128, 64, 128];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut rest = arguments.iter().skip(1).peekable();
    let plain = rest.next_if(|a| ["plain", "latent"].contains(&a.as_str())).is_some_and(|a| a == "plain");
    let mut rest: Vec<&String> = rest.collect();
    let budget = match rest.last().map(|last| last.as_str()) {
        Some("smallest") => rest.pop().map(|_| 0),
        _ if rest.len() > 5 => rest.pop().and_then(|budget| budget.parse().ok()),
        _ => None,
    };
    let sizes: std::result::Result<Vec<usize>, _> = rest.into_iter().map(|a| a.parse()).collect();
    let (Some(name), Ok(sizes)) = (arguments.first(), sizes) else {
        eprintln!(
            "usage: experts_memory METHOD [plain|latent] [EXPERTS] [HIDDEN] [WIDTH] [SAMPLES] [LENGTH] [BUDGET]"
        );
        return ExitCode::from(2);
    };
    let size = |i: usize, default: usize| sizes.get(i).copied().unwrap_or(default);
    let shape = [size(0, 256), size(1, 7168), size(2, 2048), size(3, 128), size(4, 512)];
    match run(name, plain, shape, budget) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}\n  {}", error.remedy());
            ExitCode::from(error.category().exit_code())
        }
    }
}

fn run(
    name: &str,
    plain: bool,
    [experts, hidden, width, samples, length]: [usize; 5],
    budget: Option<u64>,
) -> Result<()> {
    let (config, source) = match plain {
        true => (plain_config(experts, hidden, width), Generated::plain(experts, hidden, width)),
        false => (latent_config(experts, hidden, width), Generated::latent(experts, hidden, width)),
    };
    let source = Arc::new(source);
    let model = Model::new(source, Path::new("config.json"), &config)?;
    let (base, search) = name.split_once(':').unwrap_or((name, ""));
    let settings = match search {
        "reference" => StepSettings::of(AwqSettings { search: Search::Reference }),
        "auto" => {
            let alpha = Some(Alpha::Auto(Automatic::Auto));
            StepSettings::of(SmoothSettings { alpha, ..SmoothSettings::default() })
        }
        _ => StepSettings::default(),
    };
    let recipe = Recipe {
        method: method(base)?,
        settings: TransformSettings { steps: settings, ..TransformSettings::default() },
        scheme: if base == "smoothquant" { "w8a8-channel-sym" } else { "w4a16-g128-sym" }.parse()?,
        sampling: Sampling { samples, length, ..Sampling::default() },
        ..Recipe::preset("rtn-w4a16")?
    };
    let plan = Plan::new(&model, &recipe, recipe.containers[0])?;
    let mut random = Random(7);
    let tokens = (0..samples * length).map(|_| (random.next() % VOCAB as u64) as u32).collect();
    let windows = plan.needs_text().then(|| TokenWindows::cut(tokens, length));
    let plans = std::slice::from_ref(&plan);
    let residence = match budget {
        None => Residence::Memory,
        Some(budget) => Plan::residence(plans, &model, budget, false)
            .or_else(|smallest| Plan::residence(plans, &model, smallest, false))
            .unwrap_or_default(),
    };
    let predicted = Plan::peak_memory_in(plans, &model, residence);
    eprintln!("predicted {:.2} GB, {}", predicted as f64 / 1e9, place(residence));
    let directory = std::env::temp_dir();
    let spill = match residence {
        Residence::Files { round_bytes, experts_apart } => {
            Some(Spill::new(directory, round_bytes).with_experts_apart(experts_apart))
        }
        _ => None,
    };
    let files = StateFiles { spill, ..StateFiles::default() };
    let mut sink = Hashed::default();
    let (observer, cancel) = (&Silent, &CancelToken::new());
    let job = Job {
        model: &model,
        plan: &plan,
        windows: windows.as_ref(),
        maxima: None,
        searches: None,
        observer,
        cancel,
    };
    let started = Instant::now();
    quantize_each_with(&[job], vec![&mut sink], &files)?;
    println!(
        "{name}, {} attention, {experts} experts of {hidden} x {width}, {TOP_K} per token, {samples} x {length} tokens, {}: \
         {:.0} s, peak {:.2} GB, predicted {:.2} GB, sha256 {}",
        if plain { "plain" } else { "latent" },
        place(residence),
        started.elapsed().as_secs_f64(),
        peak_bytes()? as f64 / 1e9,
        predicted as f64 / 1e9,
        sink.hash(),
    );
    Ok(())
}

fn place(residence: Residence) -> &'static str {
    match residence {
        Residence::Files { experts_apart: false, .. } => "states in files",
        Residence::Files { experts_apart: true, .. } => "states in files, experts one at a time",
        _ => "all in memory",
    }
}

/// Returns the number of heads, and the widths of the query latent and the key-value latent.
fn latent(hidden: usize) -> [usize; 3] {
    [hidden / 56, hidden / 14 * 3, hidden / 14]
}

fn plain_config(experts: usize, hidden: usize, width: usize) -> Map<String, Value> {
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": width,
        "moe_intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": hidden / PLAIN_HEAD,
        "num_key_value_heads": hidden / PLAIN_HEAD,
        "head_dim": PLAIN_HEAD,
        "num_experts": experts,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": true,
        "vocab_size": VOCAB,
    });
    config.as_object().cloned().unwrap_or_default()
}

fn latent_config(experts: usize, hidden: usize, width: usize) -> Map<String, Value> {
    let [heads, query_rank, rank] = latent(hidden);
    let [plain, rotary, value] = HEAD;
    // Two experts per group, up to DeepSeek's number of groups.
    let groups = (experts / 2).clamp(1, 8);
    let config = json!({
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": width,
        "moe_intermediate_size": width,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": query_rank,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": rotary,
        "v_head_dim": value,
        "n_routed_experts": experts,
        "num_experts_per_tok": TOP_K,
        "n_shared_experts": 1,
        "n_group": groups,
        "topk_group": groups.div_ceil(2),
        "vocab_size": VOCAB,
    });
    config.as_object().cloned().unwrap_or_default()
}

/// Values are computed from names and positions; nothing is stored.
struct Generated {
    tensors: BTreeMap<String, TensorInfo>,
}

impl Generated {
    fn plain(experts: usize, hidden: usize, width: usize) -> Self {
        let projections = ["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| (name, vec![hidden, hidden]));
        let norms = ["q_norm", "k_norm"].map(|name| (name, vec![PLAIN_HEAD]));
        let attention: Vec<_> = projections.into_iter().chain(norms).collect();
        Self::new([experts, hidden, width], &attention, &[])
    }

    fn latent(experts: usize, hidden: usize, width: usize) -> Self {
        let [heads, query_rank, rank] = latent(hidden);
        let [plain, rotary, value] = HEAD;
        let attention = [
            ("q_a_proj", vec![query_rank, hidden]),
            ("q_a_layernorm", vec![query_rank]),
            ("q_b_proj", vec![heads * (plain + rotary), query_rank]),
            ("kv_a_proj_with_mqa", vec![rank + rotary, hidden]),
            ("kv_a_layernorm", vec![rank]),
            ("kv_b_proj", vec![heads * (plain + value), rank]),
            ("o_proj", vec![hidden, heads * value]),
        ];
        let mut latent = Self::new([experts, hidden, width], &attention, &["shared_experts"]);
        let correction = TensorInfo { dtype: Dtype::Bf16, shape: vec![experts] };
        latent.tensors.insert("model.layers.0.mlp.gate.e_score_correction_bias".to_owned(), correction);
        latent
    }

    fn new(
        [experts, hidden, width]: [usize; 3],
        attention: &[(&str, Vec<usize>)],
        extra_tensors: &[&str],
    ) -> Self {
        let mut tensors = BTreeMap::new();
        let mut add = |name: String, shape: &[usize]| {
            tensors
                .insert(format!("{name}.weight"), TensorInfo { dtype: Dtype::Bf16, shape: shape.to_vec() });
        };
        add("model.embed_tokens".into(), &[VOCAB, hidden]);
        add("lm_head".into(), &[VOCAB, hidden]);
        add("model.norm".into(), &[hidden]);
        let block = "model.layers.0";
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            add(format!("{block}.{norm}"), &[hidden]);
        }
        for (name, shape) in attention {
            add(format!("{block}.self_attn.{name}"), shape);
        }
        add(format!("{block}.mlp.gate"), &[experts, hidden]);
        let all = (0..experts).map(|expert| format!("experts.{expert}"));
        for expert in all.chain(extra_tensors.iter().map(|name| (*name).to_owned())) {
            for (linear, shape) in
                [("gate_proj", [width, hidden]), ("up_proj", [width, hidden]), ("down_proj", [hidden, width])]
            {
                add(format!("{block}.mlp.{expert}.{linear}"), &shape);
            }
        }
        Self { tensors }
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl TensorSource for Generated {
    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let info = self.require(name)?;
        let is_norm = name.ends_with("norm.weight");
        let scale = if info.shape.len() == 1 { 0.2 } else { 2.0 / (info.shape[1] as f32).sqrt() };
        let seed = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3));
        // Ranges are aligned to two-byte values.
        let first = offset / 2;
        for (i, bytes) in buffer.chunks_exact_mut(2).enumerate() {
            let bits = Random(seed ^ (first + i as u64).wrapping_mul(0x2545_f491_4f6c_dd1d)).next();
            let uniform = (bits >> 40) as f32 / (1_u32 << 24) as f32 - 0.5;
            let value = scale * uniform + if is_norm { 1.0 } else { 0.0 };
            // The upper half of an f32 is a BF16.
            bytes.copy_from_slice(&((value.to_bits() >> 16) as u16).to_le_bytes());
        }
        Ok(())
    }

    fn location(&self, _name: &str) -> PathBuf {
        PathBuf::from("<generated>")
    }
}

/// Keeps only a hash of each tensor.
#[derive(Default)]
struct Hashed {
    running: BTreeMap<String, Sha256>,
    done: BTreeSet<String>,
}

impl Hashed {
    fn hash(self) -> String {
        let mut all = Sha256::new();
        for (name, hash) in self.running {
            all.update(name.as_bytes());
            all.update(hash.finalize());
        }
        all.finalize().iter().take(8).map(|b| format!("{b:02x}")).collect()
    }
}

impl TensorSink for Hashed {
    fn is_complete(&self, name: &str) -> bool {
        self.done.contains(name)
    }

    fn write(&mut self, name: &str, _offset: u64, bytes: &[u8]) -> Result<()> {
        self.running.entry(name.to_owned()).or_default().update(bytes);
        Ok(())
    }

    fn commit(&mut self) -> Result<()> {
        Ok(())
    }
}

/// The largest resident memory of this process so far.
fn peak_bytes() -> Result<u64> {
    let path = "/proc/self/status";
    let status = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    Ok(kilobytes.unwrap_or(0) * 1024)
}
