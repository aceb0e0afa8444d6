//! FP8 and NVFP4 checkpoints of other programs, in the layouts in which models are published: inside vision-language
//! models, with ModelOpt's algorithms, and with scales that engines cannot use.

use std::path::Path;

use half::bf16;
use quant_tests::args;
use quant_tests::models::{RawTensor, TinyLlama, edit_config, read_safetensors, safetensors, write_model};
use quant_tests::program::quant;
use quant_tests::workspace_root;
use serde_json::{Value, json};

const TEXT: &str = "calibration-data/heldout/narrative.txt";
const TINY: TinyLlama = TinyLlama {
    hidden: 192,
    intermediate: 320,
    heads: 6,
    kv_heads: 3,
    head_dim: 32,
    layers: 2,
    vocab: 256,
    tied: false,
};

/// The value of an E4M3 code.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7),
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

/// Arbitrary numbers.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    fn signed(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 30) as f32 - 1.0
    }

    fn bf16(&mut self, name: &str, shape: &[u64], around: f32, by: f32) -> RawTensor {
        let values = (0..shape.iter().product()).map(|_| bf16::from_f32(around + by * self.signed()));
        let data = values.flat_map(|v: bf16| v.to_le_bytes()).collect();
        RawTensor { name: name.into(), dtype: "BF16".into(), shape: shape.to_vec(), data }
    }
}

fn numbers(name: String, shape: &[u64], values: &[f32]) -> RawTensor {
    let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    RawTensor { name, dtype: "F32".into(), shape: shape.to_vec(), data }
}

/// The layouts of FP8, as published.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    /// Blocks, as DeepSeek and Qwen publish them.
    Blocks,
    /// One scale per tensor, in BF16, and a scale of the inputs, as Mistral publishes them.
    Static,
    /// ModelOpt's FP8_PB_WO: blocks, whose scales have four dimensions.
    FourDimensions,
    /// ModelOpt's FP8_PER_CHANNEL_PER_TOKEN.
    Channel,
}

/// Replaces linears by FP8 codes: the tensors as published, and the same values in F32. `is_coded` selects the weights.
fn coded(
    tensors: Vec<RawTensor>,
    layout: Layout,
    is_coded: impl Fn(&str) -> bool,
) -> (Vec<RawTensor>, Vec<RawTensor>) {
    let (mut stored, mut wide, mut random) = (Vec::new(), Vec::new(), Numbers(77));
    for tensor in tensors {
        let Some(module) = tensor.name.strip_suffix(".weight").filter(|_| is_coded(&tensor.name)) else {
            stored.push(tensor.clone());
            wide.push(tensor);
            continue;
        };
        let &[n, k] = &tensor.shape[..] else { panic!("{} is no matrix", tensor.name) };
        let codes: Vec<u8> = (0..n * k).map(|_| (random.next() >> 5) as u8 & 0xbf).collect();
        let (height, width) = match layout {
            Layout::Blocks | Layout::FourDimensions => (n.div_ceil(128), k.div_ceil(128)),
            Layout::Static => (1, 1),
            Layout::Channel => (n, 1),
        };
        // BF16 represents these scales exactly.
        let scales: Vec<f32> = (0..height * width).map(|i| 0.03125 * (1.0 + (i % 8) as f32 / 8.0)).collect();
        let scale_of = |i: u64| match layout {
            Layout::Blocks | Layout::FourDimensions => scales[(i / k / 128 * width + i % k / 128) as usize],
            Layout::Static => scales[0],
            Layout::Channel => scales[(i / k) as usize],
        };
        let values: Vec<f32> = codes.iter().zip(0..).map(|(code, i)| e4m3(*code) * scale_of(i)).collect();
        let named = |name: &str| format!("{module}.{name}");
        match layout {
            Layout::Blocks => stored.push(numbers(named("weight_scale_inv"), &[height, width], &scales)),
            Layout::FourDimensions => {
                stored.push(numbers(named("weight_scale"), &[height, 1, width, 1], &scales));
            }
            Layout::Channel => stored.push(numbers(named("weight_scale"), &[n], &scales)),
            Layout::Static => {
                for (name, value) in [("weight_scale_inv", scales[0]), ("activation_scale", 0.25)] {
                    let data = bf16::from_f32(value).to_le_bytes().to_vec();
                    stored.push(RawTensor { name: named(name), dtype: "BF16".into(), shape: vec![], data });
                }
            }
        }
        wide.push(numbers(tensor.name.clone(), &tensor.shape, &values));
        stored.push(RawTensor { dtype: "F8_E4M3".into(), data: codes, ..tensor });
    }
    (stored, wide)
}

/// Tensors of a vision tower, with a linear that stays float although it is called like those of the text model.
fn tower(prefix: &str) -> Vec<RawTensor> {
    let mut random = Numbers(5);
    ["blocks.0.attn.q_proj.weight", "merger.mlp.weight"]
        .map(|name| random.bf16(&format!("{prefix}{name}"), &[8, 128], 0.0, 0.5))
        .into()
}

/// A Mistral 3: the text model is a Mistral.
fn mistral3() -> (Value, Vec<RawTensor>) {
    let mut tensors = TINY.tensors();
    for tensor in &mut tensors {
        tensor.name = format!("language_model.{}", tensor.name);
    }
    tensors.extend(tower("vision_tower."));
    let mut text = TINY.config();
    text.as_object_mut().unwrap().shift_remove("architectures");
    text["model_type"] = json!("mistral");
    text["sliding_window"] = Value::Null;
    let config = json!({
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 255,
        "text_config": text, "tie_word_embeddings": false, "vision_config": { "hidden_size": 8 },
    });
    (config, tensors)
}

/// A Qwen3.5 with a gated delta net in the first layer and attention in the second.
fn qwen3_5() -> (Value, Vec<RawTensor>) {
    let mut random = Numbers(9);
    let (hidden, wide, heads, key_heads) = (192, 320, 4, 2);
    let base = "model.language_model.";
    let mut tensors = vec![random.bf16(&format!("{base}embed_tokens.weight"), &[256, hidden], 0.0, 0.5)];
    let of_mixers: [&[(&str, &[u64])]; 2] = [
        &[
            ("linear_attn.in_proj_qkv.weight", &[2 * 2 * 32 + 4 * 48, hidden]),
            ("linear_attn.in_proj_z.weight", &[4 * 48, hidden]),
            ("linear_attn.in_proj_a.weight", &[4, hidden]),
            ("linear_attn.in_proj_b.weight", &[4, hidden]),
            ("linear_attn.out_proj.weight", &[hidden, 4 * 48]),
            ("linear_attn.conv1d.weight", &[2 * 2 * 32 + 4 * 48, 1, 4]),
            ("linear_attn.A_log", &[4]),
            ("linear_attn.dt_bias", &[4]),
            ("linear_attn.norm.weight", &[48]),
        ],
        &[
            ("self_attn.q_proj.weight", &[2 * heads * 48, hidden]),
            ("self_attn.k_proj.weight", &[key_heads * 48, hidden]),
            ("self_attn.v_proj.weight", &[key_heads * 48, hidden]),
            ("self_attn.o_proj.weight", &[hidden, heads * 48]),
            ("self_attn.q_norm.weight", &[48]),
            ("self_attn.k_norm.weight", &[48]),
        ],
    ];
    let of_mlp: [(&str, &[u64]); 5] = [
        ("mlp.gate_proj.weight", &[wide, hidden]),
        ("mlp.up_proj.weight", &[wide, hidden]),
        ("mlp.down_proj.weight", &[hidden, wide]),
        ("input_layernorm.weight", &[hidden]),
        ("post_attention_layernorm.weight", &[hidden]),
    ];
    for (layer, of_mixer) in of_mixers.into_iter().enumerate() {
        for (name, shape) in of_mixer.iter().chain(&of_mlp) {
            let by = if shape.len() == 1 { 0.2 } else { 1.5 / (*shape.last().unwrap() as f32).sqrt() };
            tensors.push(random.bf16(&format!("{base}layers.{layer}.{name}"), shape, 0.0, by));
        }
    }
    tensors.push(random.bf16(&format!("{base}norm.weight"), &[hidden], 0.0, 0.2));
    tensors.push(random.bf16("lm_head.weight", &[256, hidden], 0.0, 0.1));
    tensors.push(random.bf16("mtp.fc.weight", &[hidden, 2 * hidden], 0.0, 0.1));
    tensors.extend(tower("model.visual."));
    let config = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 255,
        "vision_config": { "hidden_size": 8 }, "tie_word_embeddings": false,
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": 2,
            "num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": 48, "vocab_size": 256,
            "max_position_embeddings": 512, "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
            "linear_value_head_dim": 48, "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                "mrope_section": [2, 2, 2], "mrope_interleaved": true,
            },
        },
    });
    (config, tensors)
}

fn windows(model: &Path) -> Value {
    let text = workspace_root().join(TEXT);
    let arguments =
        args!["eval", model, "--text", text, "--window", "32", "--windows", "2", "--quiet", "--json"];
    let found = quant(arguments).json()["window_nll"].clone();
    assert!(found.as_array().is_some_and(|list| list.len() == 2), "{found}");
    found
}

fn quantize(from: &Path, to: &Path, options: &[&str]) {
    let arguments = args!["quantize", from, "-o", to, "--quiet"];
    quant(arguments.into_iter().chain(options.iter().map(Into::into))).succeeded();
}

const AGAIN: [&str; 4] = ["--scheme", "w4a16-g32", "--method", "rtn"];

/// A published FP8 checkpoint at `native`, and its values in F32 at `float`: rounded to 4 bits, both give the same file,
/// and the conversion keeps every code. Returns the tensors of the converted checkpoint.
fn is_read_like_its_floats(native: &Path, float: &Path, scratch: &Path) -> Vec<RawTensor> {
    let at = |name: &str| scratch.join(name);
    quantize(native, &at("again"), &[&AGAIN[..], &["--requantize"]].concat());
    quantize(float, &at("expected"), &AGAIN);
    let read = |name: &str| std::fs::read(at(name).join("model.safetensors")).unwrap();
    assert!(read("again") == read("expected"));
    quantize(native, &at("converted"), &["--format", "compressed-tensors"]);
    assert_eq!(windows(&at("converted")), windows(native));
    let converted = read_safetensors(&at("converted").join("model.safetensors"));
    for tensor in read_safetensors(&native.join("model.safetensors")) {
        if tensor.name.contains("scale") {
            continue;
        }
        assert!(converted.contains(&tensor), "{} changes", tensor.name);
    }
    converted
}

/// Blocks in Qwen3.5, one scale per tensor in Mistral 3: linears of the text model are FP8, everything else is copied.
#[test]
fn fp8_in_vision_language_models_is_read() {
    let is_text = |name: &str| name.contains("language_model") && name.contains(".layers.");
    let in_qwen = |name: &str| {
        let is_linear =
            ["_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight"].iter().any(|end| name.ends_with(end));
        is_text(name) && is_linear
    };
    let in_mistral = |name: &str| is_text(name) && name.ends_with("_proj.weight");
    let blocks = json!({ "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                         "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "model.visual"] });
    let fixed = json!({ "quant_method": "fp8", "activation_scheme": "static", "dequantize": false,
                        "weight_block_size": null, "modules_to_not_convert": ["model.vision_tower", "lm_head"] });
    type Select<'a> = &'a dyn Fn(&str) -> bool;
    type Case<'a> = ((Value, Vec<RawTensor>), Layout, Select<'a>, Value, usize, &'a str);
    let cases: [Case<'_>; 2] = [
        (qwen3_5(), Layout::Blocks, &in_qwen, blocks, 13, "visual"),
        (mistral3(), Layout::Static, &in_mistral, fixed, 14, "vision_tower"),
    ];
    for ((config, tensors), layout, is_coded, settings, linears, outside) in cases {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        let (stored, wide) = coded(tensors, layout, is_coded);
        write_model(&at("native"), &config, &stored);
        write_model(&at("float"), &config, &wide);
        edit_config(&at("native"), &json!({ "quantization_config": settings }));
        let converted = is_read_like_its_floats(&at("native"), &at("float"), scratch.path());
        assert_eq!(converted.iter().filter(|t| t.dtype == "F8_E4M3").count(), linears, "{layout:?}");
        if layout == Layout::Blocks {
            // No width is a multiple of 128, so inputs stay float.
            assert_eq!(windows(&at("native")), windows(&at("float")));
        }
        let written: Value =
            serde_json::from_slice(&std::fs::read(at("converted").join("config.json")).unwrap()).unwrap();
        let ignored = written["quantization_config"]["ignore"].to_string();
        assert!(ignored.contains(outside) && ignored.contains("lm_head"), "{ignored}");
        assert_eq!(written["text_config"], config["text_config"]);
    }
}

/// ModelOpt's FP8 with scales per row, and with blocks, whose scales it stores with four dimensions.
#[test]
fn further_algorithms_of_modelopt_are_read() {
    for (layout, algorithm) in
        [(Layout::Channel, "FP8_PER_CHANNEL_PER_TOKEN"), (Layout::FourDimensions, "FP8_PB_WO")]
    {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        let (stored, wide) = coded(TINY.tensors(), layout, |name| name.ends_with("_proj.weight"));
        TINY.write_with(&at("native"), &stored);
        TINY.write_with(&at("float"), &wide);
        let settings = json!({ "quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"],
                               "producer": { "name": "modelopt", "version": "0.47.0" } });
        edit_config(&at("native"), &json!({ "quantization_config": settings }));
        let converted = is_read_like_its_floats(&at("native"), &at("float"), scratch.path());
        let scale = converted.iter().find(|t| t.name == "model.layers.1.mlp.up_proj.weight_scale").unwrap();
        let shape: &[u64] = if layout == Layout::Channel { &[320, 1] } else { &[3, 2] };
        assert_eq!(scale.shape, shape, "{algorithm}");
        // A grid of scales that does not fit the weight.
        let mut damaged = stored.clone();
        let name = "model.layers.1.mlp.up_proj.weight_scale";
        let tensor = damaged.iter_mut().find(|t| t.name == name).unwrap();
        tensor.shape = vec![1, tensor.shape.iter().product()];
        std::fs::write(at("native").join("model.safetensors"), safetensors(&damaged)).unwrap();
        let refused = quant(args!["inspect", at("native")]);
        assert!(
            refused.code() == Some(4) && refused.stderr.contains(name),
            "{algorithm}: {}",
            refused.stderr
        );
    }
}

/// Engines keep one global scale for linears that they run as one matrix. A checkpoint in which these scales differ is
/// read as it is, with a warning.
#[test]
fn global_scales_that_engines_cannot_keep_are_reported() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    TINY.write(&at("model"));
    for (format, suffix) in [("compressed-tensors", "weight_global_scale"), ("modelopt", "weight_scale_2")] {
        let out = at(format);
        quantize(&at("model"), &out, &["--scheme", "nvfp4a16", "--method", "rtn", "--format", format]);
        let inspected = || quant(args!["inspect", &out]).succeeded().stderr;
        assert!(!inspected().contains("global scales"), "{}", inspected());
        let file = out.join("model.safetensors");
        let mut tensors = read_safetensors(&file);
        for layer in 0..2 {
            let name = format!("model.layers.{layer}.mlp.up_proj.{suffix}");
            let scale = tensors.iter_mut().find(|t| t.name == name).unwrap();
            let value = f32::from_le_bytes(scale.data[..].try_into().unwrap());
            scale.data = (value * 0.75).to_le_bytes().to_vec();
        }
        std::fs::write(&file, safetensors(&tensors)).unwrap();
        let seen = inspected();
        for part in [
            "warning: `model.layers.0.mlp.gate_proj` and `model.layers.0.mlp.up_proj` have different global scales, as \
             do linears in 1 more group",
            "engines that run them as one matrix",
        ] {
            assert!(seen.contains(part), "{seen}");
        }
    }
}

/// MXFP4 whose activations are MXFP4 too: the weights have the values of their definition, and a warning says that the
/// activations stay float.
#[test]
fn mxfp4_with_quantized_activations_is_read() {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let (mut stored, mut wide, mut random) = (Vec::new(), Vec::new(), Numbers(5));
    for tensor in TINY.tensors() {
        let Some(module) = tensor.name.strip_suffix(".weight").filter(|name| name.ends_with("_proj")) else {
            stored.push(tensor.clone());
            wide.push(tensor);
            continue;
        };
        let (n, k) = (tensor.shape[0], tensor.shape[1]);
        let codes: Vec<u8> = (0..n * k / 2).map(|_| random.next() as u8).collect();
        let exponents: Vec<u8> = (0..n * k / 32).map(|_| 118 + (random.next() % 5) as u8).collect();
        let value = |i: usize| {
            // The even column is in the low bits.
            let code = codes[i / 2] >> (i % 2 * 4) & 15;
            let magnitude =
                MAGNITUDES[usize::from(code & 7)] * 2.0_f32.powi(i32::from(exponents[i / 32]) - 127);
            if code & 8 == 0 { magnitude } else { -magnitude }
        };
        let values: Vec<f32> = (0..(n * k) as usize).map(value).collect();
        wide.push(numbers(tensor.name.clone(), &tensor.shape, &values));
        for (suffix, columns, data) in [("packed", k / 2, codes), ("scale", k / 32, exponents)] {
            let (name, shape) = (format!("{module}.weight_{suffix}"), vec![n, columns]);
            stored.push(RawTensor { name, dtype: "U8".into(), shape, data });
        }
    }
    TINY.write_with(&at("float"), &wide);
    TINY.write_with(&at("native"), &stored);
    let mxfp4 = |dynamic: bool| {
        json!({ "num_bits": 4, "type": "float", "symmetric": true, "strategy": "group", "group_size": 32,
                "dynamic": dynamic, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8" })
    };
    let config = json!({
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": mxfp4(false),
                                        "input_activations": mxfp4(true), "format": "mxfp4-pack-quantized" } },
        "ignore": ["lm_head"],
    });
    edit_config(&at("native"), &json!({ "quantization_config": config }));
    is_read_like_its_floats(&at("native"), &at("float"), scratch.path());

    let text = workspace_root().join(TEXT);
    let windows = |name: &str| {
        let options = ["--window", "32", "--windows", "2", "--quiet", "--json"].map(Into::into);
        quant(args!["eval", at(name), "--text", &text].into_iter().chain(options)).json()["window_nll"]
            .clone()
    };
    assert_eq!(windows("native"), windows("float"));
    let seen = quant(args!["inspect", at("native")]).succeeded();
    let warning = "warning: `config_groups.group_0` describes activations in MXFP4 (4 bits, one scale per token and 32 \
        inputs), which stay float here: its linears are read as wf4a16-g32-mx";
    assert!(seen.stderr.contains(warning), "{}", seen.stderr);
    assert!(seen.stdout.contains("wf4a16-g32-mx"), "{}", seen.stdout);
}
