//! A synthetic model with experts in the shape of Qwen3-30B-A3B, with fewer blocks.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use xtask::support::noise::Float;
use xtask::support::shards::Entry;
use xtask::support::shell::target_dir;
use xtask::synth::{Contents, Spread};

const HIDDEN: usize = 2048;
/// The width inside an expert.
const WIDTH: usize = 768;
const HEADS: usize = 32;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 128;
const VOCAB: usize = 151_936;
/// The experts per token.
const CHOSEN: usize = 8;
const FLOAT: Float = Float::Bf16;

/// Returns the model, which is created if it does not exist.
pub(super) fn model(layers: usize, experts: usize) -> Result<PathBuf> {
    ensure!(experts >= CHOSEN, "--experts must be at least {CHOSEN}, the number of experts per token");
    let out = target_dir().join("synth").join(format!("qwen3-moe-{layers}l-{experts}e-bf16"));
    if !out.is_dir() {
        let contents = Contents {
            tensors: tensors(layers, experts),
            config: config(layers, experts),
            float: FLOAT,
            spread: Spread { matrices: 0.02, norms: 0.1, biases: 0.0 },
            seed: 0,
            // models_gguf.py reads one file.
            shard_bytes: u64::MAX,
        };
        contents.write(&out)?;
    }
    Ok(out)
}

/// The same matrices of all experts of a block are adjacent, so that models_gguf.py can read them as one tensor.
fn tensors(layers: usize, experts: usize) -> Vec<Entry> {
    let (queries, keys) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let mut all = vec![("model.embed_tokens".to_owned(), vec![VOCAB, HIDDEN])];
    for layer in 0..layers {
        let mut add =
            |name: &str, shape: &[usize]| all.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        add("input_layernorm", &[HIDDEN]);
        add("self_attn.q_proj", &[queries, HIDDEN]);
        add("self_attn.k_proj", &[keys, HIDDEN]);
        add("self_attn.v_proj", &[keys, HIDDEN]);
        add("self_attn.q_norm", &[HEAD_DIM]);
        add("self_attn.k_norm", &[HEAD_DIM]);
        add("self_attn.o_proj", &[HIDDEN, queries]);
        add("post_attention_layernorm", &[HIDDEN]);
        add("mlp.gate", &[experts, HIDDEN]);
        for (linear, shape) in
            [("gate_proj", [WIDTH, HIDDEN]), ("up_proj", [WIDTH, HIDDEN]), ("down_proj", [HIDDEN, WIDTH])]
        {
            (0..experts).for_each(|expert| add(&format!("mlp.experts.{expert}.{linear}"), &shape));
        }
    }
    all.push(("model.norm".into(), vec![HIDDEN]));
    all.push(("lm_head".into(), vec![VOCAB, HIDDEN]));
    all.into_iter().map(|(name, shape)| Entry::new(format!("{name}.weight"), FLOAT, &shape)).collect()
}

fn config(layers: usize, experts: usize) -> Value {
    json!({
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": false,
        "decoder_sparse_step": 1,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": WIDTH,
        "norm_topk_prob": true,
        "num_attention_heads": HEADS,
        "num_experts": experts,
        "num_experts_per_tok": CHOSEN,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": false,
        "torch_dtype": FLOAT.config_name(),
        "vocab_size": VOCAB,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forty_eight_blocks_are_the_30b_model() {
        let count = |entry: &Entry| entry.shape.iter().product::<usize>();
        let parameters: usize = tensors(48, 128).iter().map(count).sum();
        assert_eq!(parameters, 30_532_122_624);
    }
}
