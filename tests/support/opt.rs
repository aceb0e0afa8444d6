//! An OPT model that tests generate, like the Llama model [`TinyLlama`](crate::models::TinyLlama).

use std::path::Path;

use serde_json::{Value, json};

use crate::models::{Random, RawTensor, write_model};

/// An OPT with random weights in float16, one token per byte, and its head tied to the embedding.
#[derive(Debug, Clone, Copy)]
pub struct TinyOpt {
    /// Width of the residual stream.
    pub hidden: u64,
    /// Width of the MLP.
    pub ffn: u64,
    /// Number of heads.
    pub heads: u64,
    /// Number of blocks.
    pub layers: u64,
    /// Number of learned positions.
    pub positions: u64,
}

impl Default for TinyOpt {
    fn default() -> Self {
        Self { hidden: 64, ffn: 128, heads: 2, layers: 2, positions: 192 }
    }
}

impl TinyOpt {
    /// Returns the model's `config.json`.
    pub fn config(&self) -> Value {
        json!({
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "activation_function": "relu",
            "do_layer_norm_before": true,
            "enable_bias": true,
            "ffn_dim": self.ffn,
            "hidden_size": self.hidden,
            "layer_norm_elementwise_affine": true,
            "max_position_embeddings": self.positions,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "vocab_size": 256,
            "word_embed_proj_dim": self.hidden,
            "dtype": "float16",
        })
    }

    /// Returns the model's tensors, which depend only on the sizes.
    pub fn tensors(&self) -> Vec<RawTensor> {
        let mut random = Random(0x0b7);
        let mut tensor = |name: String, shape: &[u64], mean: f32, spread: f32| {
            let values = (0..shape.iter().product()).map(|_| mean + spread * random.signed());
            RawTensor::f16(&name, shape, values)
        };
        let (h, ffn) = (self.hidden, self.ffn);
        let fan_in = |k: u64| 1.0 / (k as f32).sqrt();
        let decoder = "model.decoder";
        let mut tensors = vec![
            tensor(format!("{decoder}.embed_tokens.weight"), &[256, h], 0.0, 1.0),
            tensor(format!("{decoder}.embed_positions.weight"), &[self.positions + 2, h], 0.0, 0.5),
        ];
        let block = |layer: u64| format!("{decoder}.layers.{layer}");
        let of_blocks = |part: &str| (0..self.layers).map(|l| format!("{}.{part}", block(l))).collect();
        let norms: [Vec<String>; 3] = [
            of_blocks("self_attn_layer_norm"),
            of_blocks("final_layer_norm"),
            vec![format!("{decoder}.final_layer_norm")],
        ];
        for norm in norms.concat() {
            tensors.push(tensor(format!("{norm}.weight"), &[h], 1.0, 0.5));
            tensors.push(tensor(format!("{norm}.bias"), &[h], 0.0, 0.5));
        }
        for layer in 0..self.layers {
            for (part, rows, columns) in [
                ("self_attn.q_proj", h, h),
                ("self_attn.k_proj", h, h),
                ("self_attn.v_proj", h, h),
                ("self_attn.out_proj", h, h),
                ("fc1", ffn, h),
                ("fc2", h, ffn),
            ] {
                let module = format!("{}.{part}", block(layer));
                tensors.push(tensor(format!("{module}.weight"), &[rows, columns], 0.0, fan_in(columns)));
                tensors.push(tensor(format!("{module}.bias"), &[rows], 0.0, 0.25));
            }
        }
        tensors
    }

    /// Writes the model as a model directory.
    ///
    /// # Panics
    /// When a file cannot be written.
    #[track_caller]
    pub fn write(&self, directory: &Path) {
        write_model(directory, &self.config(), &self.tensors());
    }
}
