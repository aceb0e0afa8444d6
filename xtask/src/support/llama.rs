//! The shape of a Llama checkpoint: its tensors, its configuration, and which linears read which norm.

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

use super::noise::Float;
use super::shards::Entry;

/// The sizes that define a Llama model. The defaults are those of Llama 3.2 1B.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Shape {
    /// Decoder blocks
    #[arg(long, default_value_t = 16)]
    pub layers: usize,
    /// Width of the residual stream
    #[arg(long, default_value_t = 2048)]
    pub hidden: usize,
    /// Width inside the MLP
    #[arg(long, default_value_t = 8192)]
    pub intermediate: usize,
    /// Query heads
    #[arg(long, default_value_t = 32)]
    pub heads: usize,
    /// Key and value heads; divides the query heads
    #[arg(long, default_value_t = 8)]
    pub kv_heads: usize,
    /// Width of one head; even
    #[arg(long, default_value_t = 64)]
    pub head_dim: usize,
    /// Rows of the embedding; at least 258
    #[arg(long, default_value_t = 128_256)]
    pub vocab: usize,
    /// Share the embedding with the output head
    #[arg(long)]
    pub tied: bool,
}

/// Number of ids that the tokenizer needs: 256 bytes, begin and end of text.
pub const TOKENIZER_IDS: usize = 258;
const BEGIN_OF_TEXT: usize = 256;
const END_OF_TEXT: usize = 257;

impl Shape {
    /// A model that any method quantizes in a moment.
    pub const TINY: Self = Self {
        layers: 2,
        hidden: 128,
        intermediate: 256,
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        vocab: 288,
        tied: false,
    };

    /// Fails if these sizes do not form a Llama model.
    pub fn check(&self) -> Result<()> {
        let sizes = [self.hidden, self.intermediate, self.heads, self.kv_heads, self.head_dim];
        ensure!(sizes.iter().all(|s| *s > 0), "sizes must be positive");
        ensure!(self.heads.is_multiple_of(self.kv_heads), "--kv-heads must divide --heads");
        ensure!(self.head_dim.is_multiple_of(2), "--head-dim must be even");
        ensure!(self.vocab >= TOKENIZER_IDS, "--vocab must be at least {TOKENIZER_IDS}");
        Ok(())
    }

    /// All tensors, in the order in which the model uses them.
    pub fn tensors(&self, float: Float) -> Vec<Entry> {
        let tensor = |name: String, shape: &[usize]| Entry::new(name, float, shape);
        let (h, q, kv) = (self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut all = vec![tensor("model.embed_tokens.weight".into(), &[self.vocab, h])];
        for layer in 0..self.layers {
            let at = |part: &str| format!("model.layers.{layer}.{part}.weight");
            all.push(tensor(at("input_layernorm"), &[h]));
            all.push(tensor(at("self_attn.q_proj"), &[q, h]));
            all.push(tensor(at("self_attn.k_proj"), &[kv, h]));
            all.push(tensor(at("self_attn.v_proj"), &[kv, h]));
            all.push(tensor(at("self_attn.o_proj"), &[h, q]));
            all.push(tensor(at("post_attention_layernorm"), &[h]));
            all.push(tensor(at("mlp.gate_proj"), &[self.intermediate, h]));
            all.push(tensor(at("mlp.up_proj"), &[self.intermediate, h]));
            all.push(tensor(at("mlp.down_proj"), &[h, self.intermediate]));
        }
        all.push(tensor("model.norm.weight".into(), &[h]));
        if !self.tied {
            all.push(tensor("lm_head.weight".into(), &[self.vocab, h]));
        }
        all
    }

    /// The contents of `config.json`.
    pub fn config(&self, float: Float) -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": false,
            "attention_dropout": 0.0,
            "bos_token_id": BEGIN_OF_TEXT,
            "eos_token_id": END_OF_TEXT,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 131_072,
            "mlp_bias": false,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3"
            },
            "rope_theta": 500_000.0,
            "tie_word_embeddings": self.tied,
            "torch_dtype": float.config_name(),
            "use_cache": true,
            "vocab_size": self.vocab
        })
    }
}

/// The contents of `generation_config.json`.
pub fn generation_config() -> Value {
    json!({ "bos_token_id": BEGIN_OF_TEXT, "eos_token_id": END_OF_TEXT })
}

/// The contents of `tokenizer.json`: one id per byte, no merges, and a leading begin-of-text token.
pub fn tokenizer() -> Value {
    let (begin, end) = ("<|begin_of_text|>", "<|end_of_text|>");
    let mut vocab = serde_json::Map::new();
    for byte in 0..=255u8 {
        vocab.insert(byte_symbol(byte).to_string(), json!(byte));
    }
    let special = |id: usize, content: &str| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true })
    };
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
    });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [special(BEGIN_OF_TEXT, begin), special(END_OF_TEXT, end)],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": begin, "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "SpecialToken": { "id": begin, "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } },
                     { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { begin: { "id": begin, "ids": [BEGIN_OF_TEXT], "tokens": [begin] } }
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": []
        }
    })
}

/// The printable character that represents a byte in byte-level vocabularies.
fn byte_symbol(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let unprintable_before = (0..byte).filter(|b| !printable(*b)).count() as u32;
    char::from_u32(0x100 + unprintable_before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The role of a tensor in `linear(norm(x))`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// The weight of a norm, which scales the channels that the linears after it read.
    Norm,
    /// A linear whose only input is the norm of this name.
    ReaderOf(String),
    /// Any other tensor.
    Other,
}

/// The role of a tensor, by its name.
pub fn role(name: &str) -> Role {
    let Some((layer, part)) = split_layer(name) else {
        return Role::Other;
    };
    match part {
        "input_layernorm.weight" | "post_attention_layernorm.weight" => Role::Norm,
        "self_attn.q_proj.weight" | "self_attn.k_proj.weight" | "self_attn.v_proj.weight" => {
            Role::ReaderOf(format!("model.layers.{layer}.input_layernorm.weight"))
        }
        "mlp.gate_proj.weight" | "mlp.up_proj.weight" => {
            Role::ReaderOf(format!("model.layers.{layer}.post_attention_layernorm.weight"))
        }
        _ => Role::Other,
    }
}

/// `model.layers.3.mlp.up_proj.weight` → `(3, "mlp.up_proj.weight")`.
fn split_layer(name: &str) -> Option<(usize, &str)> {
    let (layer, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, part))
}

/// Fails unless the configuration describes a float Llama model.
pub fn require_llama(config: &Value) -> Result<()> {
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or("missing");
    if model_type != "llama" {
        bail!("config.json: `model_type` is {model_type}, only llama is supported");
    }
    ensure!(config.get("quantization_config").is_none(), "config.json: the model is already quantized");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_billion() -> Shape {
        Shape {
            layers: 16,
            hidden: 2048,
            intermediate: 8192,
            heads: 32,
            kv_heads: 8,
            head_dim: 64,
            vocab: 128_256,
            tied: true,
        }
    }

    #[test]
    fn sixteen_layers_are_the_1b_model() {
        let tensors = one_billion().tensors(Float::Bf16);
        let parameters: usize = tensors.iter().map(|t| t.shape.iter().product::<usize>()).sum();
        assert_eq!(parameters, 1_235_814_400);
        assert_eq!(tensors.len(), 16 * 9 + 2);
    }

    #[test]
    fn impossible_shapes_are_refused() {
        assert!(one_billion().check().is_ok());
        assert!(Shape { kv_heads: 5, ..one_billion() }.check().is_err());
        assert!(Shape { head_dim: 63, ..one_billion() }.check().is_err());
        assert!(Shape { vocab: 257, ..one_billion() }.check().is_err());
        assert!(Shape { hidden: 0, ..one_billion() }.check().is_err());
    }

    #[test]
    fn the_tokenizer_loads_and_keeps_every_byte() {
        let tokenizer = tokenizers::Tokenizer::from_bytes(tokenizer().to_string()).unwrap();
        let text = "Grüße, 世界!\n\tfn main() { 3.14 }\u{7f}";
        let ids = tokenizer.encode(text, true).unwrap();
        let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
        assert_eq!(ids.get_ids()[0] as usize, BEGIN_OF_TEXT);
        assert_eq!(&ids.get_ids()[1..], bytes);
        assert_eq!(tokenizer.decode(ids.get_ids(), true).unwrap(), text);
        assert_eq!(tokenizer.get_vocab_size(true), TOKENIZER_IDS);
    }

    #[test]
    fn readers_know_their_norm() {
        let norm = "model.layers.11.input_layernorm.weight";
        assert_eq!(role(norm), Role::Norm);
        assert_eq!(role("model.layers.11.self_attn.k_proj.weight"), Role::ReaderOf(norm.into()));
        for other in ["model.norm.weight", "model.layers.1.self_attn.o_proj.weight", "lm_head.weight"] {
            assert_eq!(role(other), Role::Other);
        }
    }
}
