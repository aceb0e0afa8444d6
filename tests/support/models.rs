//! Models that tests generate: small enough to be written for every case, and simple enough to be broken in any way.
//! This module shares no code with the reader under test.

use std::path::Path;

use half::f16;
use serde_json::{Map, Value, json};

/// One tensor of a safetensors file, with its data.
#[derive(Debug, Clone, PartialEq)]
pub struct RawTensor {
    /// The tensor's name.
    pub name: String,
    /// The element type, such as `F16` or `I32`.
    pub dtype: String,
    /// The tensor's shape.
    pub shape: Vec<u64>,
    /// The data, little-endian.
    pub data: Vec<u8>,
}

impl RawTensor {
    /// A float16 tensor.
    pub fn f16(name: &str, shape: &[u64], values: impl IntoIterator<Item = f32>) -> Self {
        let data = values.into_iter().flat_map(|v| f16::from_f32(v).to_le_bytes()).collect();
        Self { name: name.into(), dtype: "F16".into(), shape: shape.to_vec(), data }
    }

    /// Sets one value of a float16 tensor.
    pub fn set_f16(&mut self, index: usize, value: f32) {
        assert_eq!(self.dtype, "F16");
        self.data[2 * index..2 * index + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
    }
}

/// A safetensors file with these tensors.
pub fn safetensors(tensors: &[RawTensor]) -> Vec<u8> {
    let mut header = Map::new();
    let mut data = Vec::new();
    for tensor in tensors {
        let begin = data.len();
        data.extend_from_slice(&tensor.data);
        let entry =
            json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, data.len()] });
        header.insert(tensor.name.clone(), entry);
    }
    safetensors_with_header(&Value::Object(header).to_string(), &data)
}

/// A safetensors file with this header, valid or not.
pub fn safetensors_with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let padded = header.len().next_multiple_of(8);
    let mut file = (padded as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(8 + padded, b' ');
    file.extend_from_slice(data);
    file
}

/// The tensors of a well-formed safetensors file, in the order of their data.
///
/// # Panics
/// If it is not well-formed.
#[track_caller]
pub fn read_safetensors(path: &Path) -> Vec<RawTensor> {
    let file = std::fs::read(path).expect("the file can be read");
    let header_len = u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
    let header: Map<String, Value> =
        serde_json::from_slice(&file[8..8 + header_len]).expect("the header is JSON");
    let data = &file[8 + header_len..];
    let mut tensors: Vec<(usize, RawTensor)> = header
        .into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .map(|(name, entry)| {
            let number = |v: &Value| v.as_u64().expect("an integer");
            let list = |v: &Value| -> Vec<u64> { v.as_array().expect("a list").iter().map(number).collect() };
            let span = list(&entry["data_offsets"]);
            let dtype = entry["dtype"].as_str().expect("a dtype").to_owned();
            let data = data[span[0] as usize..span[1] as usize].to_vec();
            (span[0] as usize, RawTensor { name, dtype, shape: list(&entry["shape"]), data })
        })
        .collect();
    tensors.sort_by_key(|(begin, _)| *begin);
    tensors.into_iter().map(|(_, tensor)| tensor).collect()
}

/// A Llama with random weights in float16 and one token per byte.
#[derive(Debug, Clone, Copy)]
pub struct TinyLlama {
    /// Width of the residual stream.
    pub hidden: u64,
    /// Width of the MLP.
    pub intermediate: u64,
    /// Number of query heads.
    pub heads: u64,
    /// Number of key and value heads.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Number of blocks.
    pub layers: u64,
    /// Number of rows of the embedding.
    pub vocab: u64,
    /// Whether the head uses the embedding's weights.
    pub tied: bool,
}

impl Default for TinyLlama {
    /// Groups of 32 divide all widths; groups of 64 do not divide the 96 of `down_proj`.
    fn default() -> Self {
        Self {
            hidden: 64,
            intermediate: 96,
            heads: 2,
            kv_heads: 1,
            head_dim: 32,
            layers: 2,
            vocab: 256,
            tied: false,
        }
    }
}

impl TinyLlama {
    /// Returns the model's `config.json`.
    pub fn config(&self) -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.tied,
            "dtype": "float16",
        })
    }

    /// Returns the model's tensors, which depend only on the sizes. If the head is tied, it has no tensor.
    pub fn tensors(&self) -> Vec<RawTensor> {
        let mut random = Random(0x5eed);
        let mut matrix = |name: String, rows: u64, columns: u64| {
            let scale = 1.0 / (columns as f32).sqrt();
            RawTensor::f16(&name, &[rows, columns], (0..rows * columns).map(|_| random.signed() * scale))
        };
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut tensors = vec![matrix("model.embed_tokens.weight".into(), self.vocab, self.hidden)];
        for layer in 0..self.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            for (part, rows, columns) in [
                ("self_attn.q_proj", q, self.hidden),
                ("self_attn.k_proj", kv, self.hidden),
                ("self_attn.v_proj", kv, self.hidden),
                ("self_attn.o_proj", self.hidden, q),
                ("mlp.gate_proj", self.intermediate, self.hidden),
                ("mlp.up_proj", self.intermediate, self.hidden),
                ("mlp.down_proj", self.hidden, self.intermediate),
            ] {
                tensors.push(matrix(name(part), rows, columns));
            }
        }
        if !self.tied {
            tensors.push(matrix("lm_head.weight".into(), self.vocab, self.hidden));
        }
        let mut norm = |name: &str| {
            let values = (0..self.hidden).map(|_| 1.0 + 0.25 * random.signed());
            RawTensor::f16(name, &[self.hidden], values)
        };
        for layer in 0..self.layers {
            for part in ["input_layernorm", "post_attention_layernorm"] {
                tensors.push(norm(&format!("model.layers.{layer}.{part}.weight")));
            }
        }
        tensors.push(norm("model.norm.weight"));
        tensors
    }

    /// Writes the model as a model directory.
    ///
    /// # Panics
    /// When a file cannot be written.
    #[track_caller]
    pub fn write(&self, directory: &Path) {
        self.write_with(directory, &self.tensors());
    }

    /// Writes the model with these tensors instead of its own.
    ///
    /// # Panics
    /// When a file cannot be written.
    #[track_caller]
    pub fn write_with(&self, directory: &Path, tensors: &[RawTensor]) {
        write_model(directory, &self.config(), tensors);
    }
}

/// Writes a model directory with a tokenizer that has one token per byte.
///
/// # Panics
/// When a file cannot be written.
#[track_caller]
pub fn write_model(directory: &Path, config: &Value, tensors: &[RawTensor]) {
    std::fs::create_dir_all(directory).expect("the directory can be created");
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(directory.join(name), bytes).expect("the file can be written");
    };
    write("config.json", format!("{config:#}").as_bytes());
    write("generation_config.json", b"{\"eos_token_id\": 0}");
    write("tokenizer.json", byte_tokenizer().to_string().as_bytes());
    write("model.safetensors", &safetensors(tensors));
}

/// Changes `config.json`: sets each key to its value, or removes it if the value is `null`.
///
/// # Panics
/// When it cannot be read or written.
#[track_caller]
pub fn edit_config(directory: &Path, changes: &Value) {
    let path = directory.join("config.json");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(&path).expect("config.json")).expect("JSON");
    for (key, value) in changes.as_object().expect("an object of changes") {
        match value {
            Value::Null => config.as_object_mut().expect("an object").remove(key),
            value => config.as_object_mut().expect("an object").insert(key.clone(), value.clone()),
        };
    }
    std::fs::write(path, config.to_string()).expect("config.json can be written");
}

/// Writes the demo model cut to its first blocks.
///
/// # Panics
/// When it cannot be read or written.
#[track_caller]
pub fn write_cut_demo_model(directory: &Path, layers: u64) {
    let demo = crate::demo_model();
    crate::files::copy_files(&demo, directory);
    let kept: Vec<RawTensor> = read_safetensors(&demo.join("model.safetensors"))
        .into_iter()
        .filter(|t| {
            let layer = t.name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
            layer.is_none_or(|l| l.parse::<u64>().is_ok_and(|l| l < layers))
        })
        .collect();
    std::fs::write(directory.join("model.safetensors"), safetensors(&kept))
        .expect("the weights can be written");
    edit_config(directory, &json!({ "num_hidden_layers": layers }));
}

/// Writes the first blocks of the demo model as a Mixtral: every expert is the block's MLP with random changes.
pub fn write_experts_model(directory: &Path, experts: u64, layers: u64) {
    write_cut_demo_model(directory, layers);
    let mut state = 7_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let mut tensors = Vec::new();
    for tensor in read_safetensors(&directory.join("model.safetensors")) {
        let Some((block, linear)) = tensor.name.split_once(".mlp.") else {
            tensors.push(tensor);
            continue;
        };
        assert_eq!(tensor.dtype, "F16");
        let name = match linear {
            "gate_proj.weight" => "w1",
            "up_proj.weight" => "w3",
            _ => "w2",
        };
        for expert in 0..experts {
            let changed = tensor.data.chunks_exact(2).flat_map(|pair| {
                let value = f16::from_le_bytes([pair[0], pair[1]]).to_f32();
                f16::from_f32(value * (1.0 + 0.1 * random())).to_le_bytes()
            });
            let name = format!("{block}.block_sparse_moe.experts.{expert}.{name}.weight");
            tensors.push(RawTensor { name, data: changed.collect(), ..tensor.clone() });
        }
        if name == "w1" {
            let shape = vec![experts, tensor.shape[1]];
            let values = (0..experts * tensor.shape[1]).map(|_| f16::from_f32(0.1 * random()).to_le_bytes());
            let name = format!("{block}.block_sparse_moe.gate.weight");
            tensors.push(RawTensor { name, dtype: "F16".into(), shape, data: values.flatten().collect() });
        }
    }
    std::fs::write(directory.join("model.safetensors"), safetensors(&tensors))
        .expect("the weights can be written");
    edit_config(
        directory,
        &json!({
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": experts,
            "num_experts_per_tok": 2
        }),
    );
}

/// A tokenizer whose token for each byte is the byte's value.
pub fn byte_tokenizer() -> Value {
    let mut stand_in = 256u32;
    let vocab: Map<String, Value> = (0..=255u8)
        .map(|byte| {
            let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let code = if printable { u32::from(byte) } else { stand_in };
            stand_in += u32::from(!printable);
            (char::from_u32(code).unwrap_or('?').to_string(), json!(byte))
        })
        .collect();
    json!({
        "version": "1.0",
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
        },
        "post_processor": null,
        "decoder": null,
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    })
}

/// Steele, Lea and Flood's SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// A value from −1 up to, but excluding, 1.
    pub(crate) fn signed(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_read_back() {
        let directory = tempfile::tempdir().expect("a directory");
        let model = TinyLlama::default();
        model.write(directory.path());
        assert_eq!(read_safetensors(&directory.path().join("model.safetensors")), model.tensors());
    }

    #[test]
    fn every_byte_has_a_token() {
        let tokenizer = byte_tokenizer();
        assert_eq!(tokenizer["model"]["vocab"].as_object().expect("a vocabulary").len(), 256);
    }
}
