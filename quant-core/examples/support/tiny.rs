/// Writes a Llama with two layers and untrained weights, and a tokenizer with the words `w0` to `w63`, for use in
/// examples.
pub fn tiny_llama(directory: &std::path::Path) -> std::io::Result<()> {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "hidden_act": "silu", "tie_word_embeddings": false,
    });
    let words: serde_json::Map<_, _> = (0..64).map(|i| (format!("w{i}"), i.into())).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "pre_tokenizer": { "type": "WhitespaceSplit" },
        "model": { "type": "WordLevel", "vocab": words, "unk_token": "w0" },
    });
    let mut shapes: Vec<(String, Vec<usize>)> =
        vec![("model.embed_tokens".into(), vec![64, 64]), ("lm_head".into(), vec![64, 64])];
    shapes.push(("model.norm".into(), vec![64]));
    for layer in 0..2 {
        for (module, shape) in [
            ("self_attn.q_proj", vec![64, 64]),
            ("self_attn.k_proj", vec![32, 64]),
            ("self_attn.v_proj", vec![32, 64]),
            ("self_attn.o_proj", vec![64, 64]),
            ("mlp.gate_proj", vec![96, 64]),
            ("mlp.up_proj", vec![96, 64]),
            ("mlp.down_proj", vec![64, 96]),
            ("input_layernorm", vec![64]),
            ("post_attention_layernorm", vec![64]),
        ] {
            shapes.push((format!("model.layers.{layer}.{module}"), shape));
        }
    }
    let (mut header, mut bytes) = (serde_json::Map::new(), Vec::new());
    for (module, shape) in shapes {
        let begin = bytes.len();
        for i in 0..shape.iter().product::<usize>() {
            let value = ((i + 7 * begin) as f32 * 0.7).sin() / if shape.len() == 1 { 8.0 } else { 4.0 };
            bytes.extend((if shape.len() == 1 { 1.0 + value } else { value }).to_le_bytes());
        }
        let entry =
            serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [begin, bytes.len()] });
        header.insert(format!("{module}.weight"), entry);
    }
    let header = serde_json::to_vec(&header)?;
    let tensors = [&(header.len() as u64).to_le_bytes()[..], &header, &bytes].concat();
    std::fs::write(directory.join("model.safetensors"), tensors)?;
    std::fs::write(directory.join("tokenizer.json"), tokenizer.to_string())?;
    std::fs::write(directory.join("tokenizer_config.json"), "{}")?;
    std::fs::write(directory.join("config.json"), config.to_string())
}
