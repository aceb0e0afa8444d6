//! A model written with candle's `QMatMul` on checkpoints of `quant`.

use candle_core::{DType, Device, Module, Tensor};
use candle_transformers::models::llama::{Cache as OracleCache, Llama as Oracle, LlamaConfig};
use quant_candle::llama::{Cache, Llama};
use quant_candle::{Checkpoint, Rayon, Runner};
use quant_tests::args;
use quant_tests::models::{edit_config, write_cut_demo_model};
use quant_tests::program::quant;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::json;

#[allow(dead_code, reason = "its `main` is not run here")]
#[path = "../../candle/examples/llama.rs"]
mod llama;
#[allow(dead_code, reason = "its `main` is not run here")]
#[path = "../../candle/examples/mlp.rs"]
mod mlp;

use llama::continued;
use mlp::Mlp;

/// The logits of candle-transformers' float model with dequantized weights, after all `tokens`.
fn oracle(checkpoint: &Checkpoint, tokens: &[u32]) -> Vec<f32> {
    let config = serde_json::Value::Object(checkpoint.quantized().config().clone());
    let config = serde_json::from_value::<LlamaConfig>(config).unwrap().into_config(false);
    let llama = Oracle::load(checkpoint.var_builder(DType::F32), &config).unwrap();
    let mut cache = OracleCache::new(false, DType::F32, &config, &Device::Cpu).unwrap();
    let tokens = Tensor::new(tokens, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    llama.forward(&tokens, 0, &mut cache).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Compares the example with the same products by dequantized weights.
fn check_mlp(checkpoint: &Checkpoint, module: &str) {
    let mut random = StdRng::seed_from_u64(11);
    let x: Vec<f32> = (0..3 * 256).map(|_| random.random_range(-1.0..1.0)).collect();
    let x = Tensor::from_vec(x, (3, 256), &Device::Cpu).unwrap();
    let floats = checkpoint.var_builder(DType::F32);
    let linear = |x: &Tensor, name: &str, shape: (usize, usize)| {
        let weight = floats.get(shape, &format!("{module}.{name}.weight")).unwrap();
        x.matmul(&weight.t().unwrap()).unwrap()
    };
    let [gate, up] = ["gate_proj", "up_proj"].map(|name| linear(&x, name, (768, 256)));
    let expected = linear(&(gate.silu().unwrap() * up).unwrap(), "down_proj", (256, 768));
    let found = Mlp::load(checkpoint, module).unwrap().forward(&x).unwrap();
    let [found, expected] = [found, expected].map(|y| y.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    let size = expected.iter().fold(0.0_f32, |largest, y| largest.max(y.abs()));
    let worst = found.iter().zip(&expected).fold(0.0_f32, |worst, (a, b)| worst.max((a - b).abs()));
    assert!(found.len() == 3 * 256 && worst <= 2e-5 * size, "{module}: {worst} of {size}");
}

#[test]
fn logits_and_text_on_qmatmul_are_those_of_the_dequantized_model_and_of_generate() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    write_cut_demo_model(&at("model"), 2);
    for (format, scheme) in
        [("compressed-tensors", "w4a16-g64-sym"), ("awq", "w4a16-g32-asym"), ("gptq", "w8a16-g128")]
    {
        let out = at(format);
        let options = args!["--method", "rtn", "--format", format, "--scheme", scheme, "-o", &out];
        quant(args!["quantize", at("model")].into_iter().chain(options)).succeeded();
        let generated = quant(args![
            "generate",
            &out,
            "--prompt",
            "The miller opened the door",
            "--temperature",
            "0",
            "--max-new-tokens",
            "12",
            "--ignore-eos",
            "--json"
        ])
        .json();
        let ids = |of: &serde_json::Value| -> Vec<u32> {
            of.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let prompt = ids(&generated["prompt_tokens"]);
        let expected: Vec<u32> = generated["tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|token| token["id"].as_u64().unwrap() as u32)
            .collect();

        let checkpoint = Checkpoint::open(&out, &Runner::new(Rayon)).unwrap();
        check_mlp(&checkpoint, "model.layers.1.mlp");
        assert!(Mlp::load(&checkpoint, "model.layers.2.mlp").is_err());
        let llama = Llama::load(&checkpoint).unwrap();
        let mut cache = Cache::default();
        // Of the prompt in one pass, and of one token after a cache.
        for tokens in [&prompt[..], &expected[..1]] {
            let logits: Vec<f32> = llama.forward(tokens, &mut cache).unwrap().to_vec1().unwrap();
            let all = if tokens == prompt { prompt.clone() } else { [&prompt[..], tokens].concat() };
            let exact = oracle(&checkpoint, &all);
            let size = exact.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
            let worst = logits.iter().zip(&exact).fold(0.0_f32, |worst, (a, b)| worst.max((a - b).abs()));
            assert!(logits.len() == exact.len() && worst <= 2e-5 * size, "{format}: {worst} of {size}");
        }
        let text = continued(&llama, &prompt, expected.len()).unwrap();
        assert_eq!(text, expected, "{format} {scheme}");
    }
}

#[test]
fn the_decoder_refuses_what_it_does_not_run() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    write_cut_demo_model(&at("model"), 1);
    quant(args!["quantize", at("model"), "-o", at("out"), "--method", "rtn"]).succeeded();
    let load = || Llama::load(&Checkpoint::open(&at("out"), &Runner::new(Rayon)).unwrap());
    let llama = load().unwrap();
    let no_token = llama.forward(&[], &mut Cache::default()).unwrap_err().to_string();
    assert!(no_token.contains("no token"), "{no_token}");
    for token in [4096, u32::MAX] {
        let unknown = llama.forward(&[token], &mut Cache::default()).unwrap_err().to_string();
        assert!(unknown.contains("not in the vocabulary"), "{unknown}");
    }
    let config = std::fs::read(at("out").join("config.json")).unwrap();
    for (changes, message) in [
        (json!({"architectures": ["Qwen2ForCausalLM"]}), "LlamaForCausalLM"),
        (json!({"hidden_act": "gelu"}), "only the activation `silu`"),
        (json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}), "does not scale"),
        (json!({"rope_scaling": {"type": "linear", "factor": 2.0}}), "does not scale"),
        (json!({"hidden_size": null}), "no `hidden_size`"),
        (json!({"num_hidden_layers": 0}), "0 layers"),
        (json!({"num_hidden_layers": u64::MAX}), "model.layers.1."),
        (json!({"num_attention_heads": 0}), "0 heads of width"),
        (json!({"num_key_value_heads": 0}), "`num_key_value_heads` (0)"),
        (json!({"num_key_value_heads": 3}), "`num_key_value_heads` (3)"),
        (json!({"head_dim": 3}), "width 3"),
        (json!({"vocab_size": 7}), "embed_tokens"),
    ] {
        edit_config(&at("out"), &changes);
        let error = load().unwrap_err().to_string();
        assert!(error.contains(message), "{changes}: {error}");
        std::fs::write(at("out").join("config.json"), &config).unwrap();
    }
    load().unwrap();
}
