//! A Llama decoder on packed weights, to try a checkpoint and as a pattern for other architectures. It runs
//! `LlamaForCausalLM` without scaled rotary embeddings, one sequence at a time. Only [`Llama::load`] knows how the
//! weights are stored: the linears are candle's [`QMatMul`].
//!
//! The example `llama` continues a text.

use candle_core::quantized::QMatMul;
use candle_core::{D, DType, Device, Error, Module, Result, Tensor};
use candle_nn::Embedding;
use candle_nn::ops::{rms_norm, silu, softmax_last_dim};
use candle_nn::rotary_emb::rope;
use serde_json::{Map, Value};

use crate::Checkpoint;

/// The sizes of a model.
#[derive(Debug, Clone)]
struct Config {
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    eps: f32,
    theta: f64,
    tied: bool,
}

impl Config {
    fn read(config: &Map<String, Value>) -> Result<Self> {
        let number = |key: &str| config.get(key).and_then(Value::as_u64).map(|n| n as usize);
        let require =
            |key: &str| number(key).ok_or_else(|| Error::msg(format!("config.json has no `{key}`")));
        let float = |key: &str, default| config.get(key).and_then(Value::as_f64).unwrap_or(default);
        if config.get("architectures") != Some(&serde_json::json!(["LlamaForCausalLM"])) {
            candle_core::bail!("this decoder supports only `LlamaForCausalLM`");
        }
        if config.get("hidden_act").is_some_and(|activation| activation != "silu") {
            candle_core::bail!("this decoder supports only the activation `silu`");
        }
        // transformers writes both fields in `rope_parameters` since version 5.
        let rope = config.get("rope_parameters").and_then(Value::as_object);
        let scaling = config.get("rope_scaling").and_then(Value::as_object).or(rope);
        let kind = scaling.and_then(|scaling| scaling.get("rope_type").or(scaling.get("type")));
        if kind.is_some_and(|kind| kind != "default") {
            candle_core::bail!("this decoder does not scale rotary embeddings");
        }
        let theta = rope.and_then(|rope| rope.get("rope_theta")).and_then(Value::as_f64);
        let (hidden, heads) = (require("hidden_size")?, require("num_attention_heads")?);
        let read = Self {
            layers: require("num_hidden_layers")?,
            hidden,
            heads,
            kv_heads: number("num_key_value_heads").unwrap_or(heads),
            head_dim: number("head_dim").unwrap_or(hidden / heads.max(1)),
            vocab: require("vocab_size")?,
            eps: float("rms_norm_eps", 1e-6) as f32,
            theta: theta.unwrap_or_else(|| float("rope_theta", 10_000.0)),
            tied: config.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false),
        };
        if read.layers == 0 || read.heads == 0 || read.head_dim == 0 || !read.head_dim.is_multiple_of(2) {
            let Self { layers, heads, head_dim, .. } = read;
            candle_core::bail!("config.json has {layers} layers with {heads} heads of width {head_dim}");
        }
        if read.heads.checked_rem(read.kv_heads) != Some(0) {
            candle_core::bail!(
                "`num_key_value_heads` ({}) must divide `num_attention_heads` ({})",
                read.kv_heads,
                read.heads
            );
        }
        Ok(read)
    }
}

#[derive(Debug)]
struct Linear {
    weight: QMatMul,
    bias: Option<Tensor>,
}

impl Linear {
    fn load(checkpoint: &Checkpoint, name: &str) -> Result<Self> {
        Ok(Self { weight: checkpoint.qmatmul(name)?, bias: checkpoint.bias(name)? })
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.weight.forward(x)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}

#[derive(Debug)]
struct Block {
    input_norm: Tensor,
    /// Of queries, keys, values and the output.
    attention: [Linear; 4],
    mlp_norm: Tensor,
    /// Gate, up and down.
    mlp: [Linear; 3],
}

/// A decoder with packed weights.
#[derive(Debug)]
pub struct Llama {
    config: Config,
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: Tensor,
    head: QMatMul,
    frequencies: Tensor,
}

/// The keys and values of the tokens of one sequence so far. The default is that of an empty sequence.
#[derive(Debug, Clone, Default)]
pub struct Cache {
    /// `[1, kv_heads, tokens, head_dim]` for each block.
    blocks: Vec<Option<[Tensor; 2]>>,
}

impl Llama {
    /// Loads all weights.
    ///
    /// # Errors
    /// When the configuration names a different architecture, a tensor is missing or has a different shape, or the
    /// kernels do not support a scheme.
    pub fn load(checkpoint: &Checkpoint) -> Result<Self> {
        let config = Config::read(checkpoint.quantized().config())?;
        let floats = checkpoint.var_builder(DType::F32);
        let norm = |name: &str| floats.get(config.hidden, &format!("{name}.weight"));
        let block = |layer| {
            let linear = |name: &str| Linear::load(checkpoint, &format!("model.layers.{layer}.{name}"));
            let [q, k, v, o] =
                ["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| format!("self_attn.{name}"));
            Ok(Block {
                input_norm: norm(&format!("model.layers.{layer}.input_layernorm"))?,
                attention: [linear(&q)?, linear(&k)?, linear(&v)?, linear(&o)?],
                mlp_norm: norm(&format!("model.layers.{layer}.post_attention_layernorm"))?,
                mlp: [linear("mlp.gate_proj")?, linear("mlp.up_proj")?, linear("mlp.down_proj")?],
            })
        };
        let embedding = floats.get((config.vocab, config.hidden), "model.embed_tokens.weight")?;
        let half = config.head_dim / 2;
        let frequency = |i| config.theta.powf(-(i as f64) / half as f64) as f32;
        Ok(Self {
            blocks: (0..config.layers).map(block).collect::<Result<_>>()?,
            norm: norm("model.norm")?,
            head: match config.tied {
                true => QMatMul::Tensor(embedding.clone()),
                false => checkpoint.qmatmul("lm_head")?,
            },
            embedding: Embedding::new(embedding, config.hidden),
            frequencies: Tensor::from_vec((0..half).map(frequency).collect(), (1, half), &Device::Cpu)?,
            config,
        })
    }

    /// Appends `tokens` to those in `cache`, and returns the logits `[vocab]` of the last one.
    ///
    /// # Errors
    /// When there is no token, one is not in the vocabulary, or the cache belongs to a different model.
    pub fn forward(&self, tokens: &[u32], cache: &mut Cache) -> Result<Tensor> {
        if tokens.is_empty() {
            candle_core::bail!("there is no token");
        }
        if let Some(unknown) = tokens.iter().find(|&&token| token as usize >= self.config.vocab) {
            candle_core::bail!("token {unknown} is not in the vocabulary of {}", self.config.vocab);
        }
        cache.blocks.resize(self.blocks.len(), None);
        let past = match cache.blocks.first() {
            Some(Some([keys, _])) => keys.dim(2)?,
            _ => 0,
        };
        let positions: Vec<f32> = (past..past + tokens.len()).map(|position| position as f32).collect();
        let angles =
            Tensor::new(positions.as_slice(), &Device::Cpu)?.unsqueeze(1)?.matmul(&self.frequencies)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let mut x = self.embedding.forward(&Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?)?;
        for (block, cache) in self.blocks.iter().zip(&mut cache.blocks) {
            let normed = rms_norm(&x, &block.input_norm, self.config.eps)?;
            x = (x + self.attention(block, &normed, [&cos, &sin], cache)?)?;
            let normed = rms_norm(&x, &block.mlp_norm, self.config.eps)?;
            let [gate, up, down] = &block.mlp;
            x = (x + down.forward(&(silu(&gate.forward(&normed)?)? * up.forward(&normed)?)?)?)?;
        }
        let last = x.narrow(1, tokens.len() - 1, 1)?.contiguous()?;
        let last = rms_norm(&last, &self.norm, self.config.eps)?;
        self.head.forward(&last)?.flatten_all()
    }

    fn attention(
        &self,
        block: &Block,
        x: &Tensor,
        [cos, sin]: [&Tensor; 2],
        cache: &mut Option<[Tensor; 2]>,
    ) -> Result<Tensor> {
        let Config { heads, kv_heads, head_dim, .. } = self.config;
        let (_, tokens, _) = x.dims3()?;
        let [q, k, v, o] = &block.attention;
        let split = |linear: &Linear, heads| {
            linear.forward(x)?.reshape((1, tokens, heads, head_dim))?.transpose(1, 2)?.contiguous()
        };
        let q = rope(&split(q, heads)?, cos, sin)?;
        let mut new = [rope(&split(k, kv_heads)?, cos, sin)?, split(v, kv_heads)?];
        if let Some([keys, values]) = cache {
            new = [Tensor::cat(&[&*keys, &new[0]], 2)?, Tensor::cat(&[&*values, &new[1]], 2)?];
        }
        let [keys, values] = cache.insert(new);
        // Each key head serves `heads / kv_heads` query heads that follow each other.
        let (group, all) = (heads / kv_heads, keys.dim(2)?);
        let q = q.reshape((kv_heads, group * tokens, head_dim))?;
        let scores = (q.matmul(&keys.squeeze(0)?.t()?)? / (head_dim as f64).sqrt())?;
        let masked = |i: usize| if i % all > all - tokens + i / all { f32::NEG_INFINITY } else { 0.0 };
        let mask =
            Tensor::from_vec((0..tokens * all).map(masked).collect(), (1, 1, tokens, all), &Device::Cpu)?;
        let scores = scores.reshape((kv_heads, group, tokens, all))?.broadcast_add(&mask)?;
        let weights = softmax_last_dim(&scores)?.reshape((kv_heads, group * tokens, all))?;
        let out = weights.matmul(&values.squeeze(0)?.contiguous()?)?;
        let out = out.reshape((1, heads, tokens, head_dim))?.transpose(1, 2)?;
        o.forward(&out.contiguous()?.flatten_from(D::Minus2)?)
    }
}
