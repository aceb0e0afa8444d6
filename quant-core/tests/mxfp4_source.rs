//! gpt-oss as published, with experts in MXFP4: converted to other formats with the same codes.

use crate::common;

use std::path::PathBuf;
use std::sync::Arc;

use common::normal;
use quant_core::checkpoint::{Dtype, MemorySink, MemorySource};
use quant_core::format::{QuantizedCheckpoint, container};
use quant_core::model::Model;
use quant_core::pipeline::{Job, quantize_job};
use quant_core::recipe::Plan;
use quant_core::{CancelToken, Category, Silent, TensorSource};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Map, Value, json};

const EXPERTS: usize = 3;
const HIDDEN: usize = 64;
const WIDTH: usize = 96;

/// A random model whose experts are MXFP4, with all codes.
fn gpt_oss() -> (MemorySource, Map<String, Value>) {
    let config = json!({
        "architectures": ["GptOssForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": WIDTH,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 96, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 16, "swiglu_limit": 7.0,
        "layer_types": ["full_attention"], "tie_word_embeddings": false,
        "quantization_config": { "quant_method": "mxfp4" },
    });
    let mut rng = StdRng::seed_from_u64(3);
    let mut source = MemorySource::new();
    let block = "model.layers.0.";
    for (name, n) in [("gate_up_proj", 2 * WIDTH), ("down_proj", HIDDEN)] {
        let k = if name == "down_proj" { WIDTH } else { HIDDEN };
        let codes = (0..EXPERTS * n * k / 2).map(|_| rng.random::<u8>()).collect();
        let shape = vec![EXPERTS, n, k / 32, 16];
        source.insert(format!("{block}mlp.experts.{name}_blocks"), Dtype::U8, shape, codes).unwrap();
        let scales = (0..EXPERTS * n * k / 32).map(|_| rng.random_range(115..127)).collect();
        let shape = vec![EXPERTS, n, k / 32];
        source.insert(format!("{block}mlp.experts.{name}_scales"), Dtype::U8, shape, scales).unwrap();
    }
    let mut add = |name: &str, shape: &[usize]| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| 0.2 * normal(&mut rng)).collect();
        source.insert_f32(name.to_owned(), Dtype::Bf16, shape.to_vec(), &values).unwrap();
    };
    add("model.embed_tokens.weight", &[96, HIDDEN]);
    add("lm_head.weight", &[96, HIDDEN]);
    add("model.norm.weight", &[HIDDEN]);
    for norm in ["input_layernorm", "post_attention_layernorm"] {
        add(&format!("{block}{norm}.weight"), &[HIDDEN]);
    }
    for (name, n, k) in [("q", 64, HIDDEN), ("k", 32, HIDDEN), ("v", 32, HIDDEN), ("o", HIDDEN, 64)] {
        add(&format!("{block}self_attn.{name}_proj.weight"), &[n, k]);
        add(&format!("{block}self_attn.{name}_proj.bias"), &[n]);
    }
    add(&format!("{block}self_attn.sinks"), &[4]);
    add(&format!("{block}mlp.router.weight"), &[EXPERTS, HIDDEN]);
    add(&format!("{block}mlp.router.bias"), &[EXPERTS]);
    add(&format!("{block}mlp.experts.gate_up_proj_bias"), &[EXPERTS, 2 * WIDTH]);
    add(&format!("{block}mlp.experts.down_proj_bias"), &[EXPERTS, HIDDEN]);
    (source, config.as_object().cloned().unwrap())
}

fn open(source: &MemorySource, config: &Map<String, Value>) -> Model {
    Model::new(Arc::new(source.clone()), &PathBuf::from("config.json"), config).unwrap()
}

fn converted(model: &Model, config: &Map<String, Value>, format: &str) -> (MemorySource, Map<String, Value>) {
    let plan = Plan::repack(model, container(format).unwrap()).unwrap();
    let mut sink = MemorySink::new(plan.outputs()).unwrap();
    let cancel = CancelToken::new();
    let job = Job {
        model,
        plan: &plan,
        windows: None,
        maxima: None,
        searches: None,
        observer: &Silent,
        cancel: &cancel,
    };
    let report = quantize_job(&job, &mut sink).unwrap();
    let expected = if format == "modelopt" { 4.5 } else { 4.25 };
    assert!(
        (report.bits_per_quantized_weight - expected).abs() < 0.01,
        "{}",
        report.bits_per_quantized_weight
    );
    let mut config = config.clone();
    config.insert("quantization_config".into(), plan.container.quantization_config(&plan.module_schemes()));
    (sink.into_source().unwrap(), config)
}

#[test]
fn experts_keep_their_codes_in_other_formats() {
    let (source, config) = gpt_oss();
    let model = open(&source, &config);
    let blocks = source.read("model.layers.0.mlp.experts.gate_up_proj_blocks").unwrap();
    for format in ["compressed-tensors", "modelopt"] {
        let (written, config) = converted(&model, &config, format);
        let floats = open(&written, &config).dequantized().unwrap();
        for expert in 0..EXPERTS {
            let module = |part: &str| format!("model.layers.0.mlp.experts.{expert}.{part}_proj");
            for part in ["gate", "up", "down"] {
                let name = format!("{}.weight", module(part));
                let [found, exact] = [&floats, &model].map(|m| m.source().read_f32(&name).unwrap());
                // Codes of −0 stay what they are.
                assert!(found.iter().zip(&exact).all(|(a, b)| a.to_bits() == b.to_bits()), "{format} {name}");
                assert!(exact.iter().any(|x| *x != 0.0));
                let bias = format!("{}.bias", module(part));
                assert_eq!(written.read_f32(&bias).unwrap(), model.source().read_f32(&bias).unwrap());
            }
            // Even rows are those of the gate.
            let codes = if format == "modelopt" { "weight" } else { "weight_packed" };
            for (at, part) in ["gate", "up"].into_iter().enumerate() {
                let codes = written.read(&format!("{}.{codes}", module(part))).unwrap();
                for (row, codes) in codes.chunks_exact(HIDDEN / 2).enumerate() {
                    let stored = (expert * 2 * WIDTH + 2 * row + at) * HIDDEN / 2;
                    assert_eq!(codes, &blocks[stored..stored + HIDDEN / 2], "{format} {part} {row}");
                }
            }
            if format == "modelopt" {
                let [gate, up] =
                    ["gate", "up"].map(|p| written.read(&format!("{}.weight_scale_2", module(p))).unwrap());
                assert_eq!(gate, up);
            }
        }
    }
}

/// An engine without a model reads the same experts, under the names that this library uses.
#[test]
fn engines_read_experts_as_linears() {
    let (source, config) = gpt_oss();
    let model = open(&source, &config);
    let settings = &config["quantization_config"];
    let checkpoint = QuantizedCheckpoint::new(Arc::new(source), "config.json".as_ref(), settings).unwrap();
    assert_eq!(checkpoint.linears().len(), 3 * EXPERTS);
    for linear in checkpoint.linears() {
        let weight = model.source().read_f32(&format!("{}.weight", linear.name)).unwrap();
        assert_eq!(checkpoint.read(&linear.name).unwrap().dequantize().unwrap(), weight, "{}", linear.name);
        let bias = model.source().read_f32(&format!("{}.bias", linear.name)).unwrap();
        assert_eq!(checkpoint.bias(&linear.name).unwrap(), Some(bias));
    }
    let router = "model.layers.0.mlp.router.weight";
    assert_eq!(checkpoint.source().read(router).unwrap(), model.source().read(router).unwrap());
}

#[test]
fn formats_without_fp4_are_refused() {
    let (source, config) = gpt_oss();
    let model = open(&source, &config);
    for format in ["awq", "gptq", "qserve"] {
        let error = Plan::repack(&model, container(format).unwrap()).unwrap_err();
        assert_eq!(error.category(), Category::Usage, "{format}: {error}");
    }
}

/// A scale of 255 is NaN. With 254, 2^127, the product with a code of 4 or 6 is infinite.
#[test]
fn scales_that_give_no_number_are_refused() {
    let (source, config) = gpt_oss();
    let name = "model.layers.0.mlp.experts.down_proj_scales";
    for scale in [255, 254] {
        let mut damaged = MemorySource::new();
        for other in source.names() {
            let info = source.info(other).unwrap().clone();
            let mut bytes = source.read(other).unwrap();
            if other == name {
                bytes[7] = scale;
            }
            damaged.insert(other.to_owned(), info.dtype, info.shape, bytes).unwrap();
        }
        let model = open(&damaged, &config);
        let plan = Plan::repack(&model, container("compressed-tensors").unwrap()).unwrap();
        let mut sink = MemorySink::new(plan.outputs()).unwrap();
        let cancel = CancelToken::new();
        let job = Job {
            model: &model,
            plan: &plan,
            windows: None,
            maxima: None,
            searches: None,
            observer: &Silent,
            cancel: &cancel,
        };
        assert_eq!(quantize_job(&job, &mut sink).unwrap_err().category(), Category::Numeric, "{scale}");
    }
}

#[test]
fn nothing_to_convert_is_refused() {
    let (source, mut config) = gpt_oss();
    let model = open(&source, &config).dequantized().unwrap();
    config.insert("quantization_config".into(), json!({ "quant_method": "mxfp4" }));
    let mut floats = MemorySource::new();
    for name in model.source().names() {
        let info = model.source().info(name).unwrap().clone();
        floats.insert(name.to_owned(), info.dtype, info.shape, model.source().read(name).unwrap()).unwrap();
    }
    let error = Plan::repack(&open(&floats, &config), container("compressed-tensors").unwrap()).unwrap_err();
    assert_eq!(error.category(), Category::Usage, "{error}");
    assert!(error.to_string().contains("no quantized linears"), "{error}");
}
