//! A vision-language model as a user sees it.

use std::path::Path;

use quant_tests::args;
use quant_tests::models::{RawTensor, TinyLlama, edit_config, read_safetensors, write_model};
use quant_tests::program::{Run, quant};
use quant_tests::refusal::{check_message, refuses_to_quantize};
use serde_json::{Value, json};

const SHORT: [&str; 6] = ["--samples", "4", "--seq-len", "64", "--group-size", "32"];
const SIDECARS: [&str; 5] = [
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
    "tekken.json",
];

/// The tensors that do not belong to the text model: types that weights may have, one that they may not, and an unusual
/// shape.
fn outside_text_model() -> Vec<RawTensor> {
    let raw = |name: &str, dtype: &str, shape: &[u64], bytes: usize| RawTensor {
        name: name.into(),
        dtype: dtype.into(),
        shape: shape.to_vec(),
        // A value that is finite in every type.
        data: (0..bytes).map(|i| (i * 37 % 91) as u8).collect(),
    };
    vec![
        raw("vision_tower.layers.0.fc1.weight", "F32", &[6, 4], 96),
        raw("vision_tower.patch.weight", "F16", &[2, 3, 1, 5], 60),
        raw("vision_tower.position_ids", "I64", &[1, 3], 24),
        raw("multi_modal_projector.linear_1.weight", "BF16", &[4, 2], 16),
    ]
}

fn llava(tied: bool) -> tempfile::TempDir {
    let text = TinyLlama { tied, ..TinyLlama::default() };
    let mut tensors = text.tensors();
    for tensor in &mut tensors {
        tensor.name = format!("language_model.{}", tensor.name);
    }
    tensors.extend(outside_text_model());
    let mut fields = text.config();
    for key in ["architectures", "tie_word_embeddings"] {
        fields.as_object_mut().unwrap().shift_remove(key);
    }
    let config = json!({
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 255,
        "text_config": fields,
        "tie_word_embeddings": tied,
        "vision_config": { "hidden_size": 4 },
        "vision_feature_layer": -2,
    });
    let directory = tempfile::tempdir().unwrap();
    write_model(directory.path(), &config, &tensors);
    for name in SIDECARS {
        std::fs::write(directory.path().join(name), format!("{{\"of\": \"{name}\"}}")).unwrap();
    }
    std::fs::write(directory.path().join("params.json"), "not ours").unwrap();
    directory
}

fn run(subcommand: &str, model: &Path, options: &[&str]) -> Run {
    quant(args![subcommand, model].into_iter().chain(options.iter().map(Into::into)))
}

fn config(directory: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(directory.join("config.json")).unwrap()).unwrap()
}

#[test]
fn every_command_works_on_it() {
    let (model, scratch) = (llava(false), tempfile::tempdir().unwrap());
    let model = model.path();
    let carried = json!({ "class": "LlavaForConditionalGeneration", "tensors": 4, "bytes": 196 });
    let inspected = run("inspect", model, &["--json"]).json();
    assert_eq!((&inspected["family"], &inspected["carried"]), (&json!("llama"), &carried));
    let plan = run("plan", model, &[&SHORT[..], &["--json"]].concat()).json();
    assert_eq!(plan["carried"], carried);
    let seen = run("plan", model, &SHORT).succeeded().stdout.clone();
    for part in ["text tower of LlavaForConditionalGeneration; the 4 other tensors", "not checked"] {
        assert!(seen.contains(part), "{seen}");
    }
    let engine = |name: &str| {
        let engines = plan["formats"][0]["engines"].as_array().unwrap();
        engines.iter().find(|e| e["engine"] == name).unwrap()["ranks"][0].clone()
    };
    assert_eq!(engine("SGLang, CUDA")["loads"], "no", "64 × 64 fits no tile");
    assert_eq!(engine("llama.cpp, converter")["loads"], "unsure");

    let out = scratch.path().join("out");
    let written = quant(args!["quantize", model, "-o", &out].into_iter().chain(SHORT.iter().map(Into::into)));
    written.succeeded();
    let tensors = read_safetensors(&out.join("model.safetensors"));
    for tensor in outside_text_model() {
        assert!(tensors.contains(&tensor), "{}", tensor.name);
    }
    assert!(tensors.iter().any(|t| t.name == "language_model.model.layers.1.mlp.up_proj.weight_packed"));
    for name in SIDECARS {
        assert_eq!(std::fs::read(out.join(name)).unwrap(), std::fs::read(model.join(name)).unwrap());
    }
    assert!(!out.join("params.json").exists());
    let (before, mut after) = (config(model), config(&out));
    let settings = after.as_object_mut().unwrap().shift_remove("quantization_config").unwrap();
    assert_eq!(before, after);
    assert_eq!(
        settings["ignore"],
        json!([
            "language_model.lm_head",
            "lm_head",
            r"re:(model\.)?multi_modal_projector\..*",
            r"re:(model\.)?vision_tower\..*",
        ])
    );
    let report: Value =
        serde_json::from_slice(&std::fs::read(out.join("quant_report.json")).unwrap()).unwrap();
    assert_eq!(report["carried"], carried);
    let window = ["--text", "builtin-heldout", "--window", "96", "--windows", "4", "--json", "--reference"];
    let eval = run("eval", &out, &[&window[..], &[model.to_str().unwrap()]].concat()).json();
    let kl = eval["comparison"]["kl"]["mean"].as_f64().unwrap();
    assert!((0.0..0.2).contains(&kl), "{kl}");

    let again = scratch.path().join("again");
    quant(args!["quantize", &out, "-o", &again, "--format", "gptq"]).succeeded();
    let tensors = read_safetensors(&again.join("model.safetensors"));
    assert!(outside_text_model().iter().all(|tensor| tensors.contains(tensor)));
    let other = run("eval", &again, &[&window[..], &[out.to_str().unwrap()]].concat()).json();
    assert!(other["comparison"]["kl"]["mean"].as_f64().unwrap() < 1e-4);
}

/// A head that is separated from the embedding is recorded at both levels of the configuration.
#[test]
fn a_quantized_head() {
    let (model, scratch) = (llava(true), tempfile::tempdir().unwrap());
    let out = scratch.path().join("out");
    let options = ["--method", "rtn", "--group-size", "32", "--override", "lm_head=w8a16-g32"];
    quant(args!["quantize", model.path(), "-o", &out].into_iter().chain(options.iter().map(Into::into)))
        .succeeded();
    let config = config(&out);
    assert_eq!(config["tie_word_embeddings"], json!(false));
    assert_eq!(config["text_config"]["tie_word_embeddings"], json!(false));
    let targets = &config["quantization_config"]["config_groups"]["group_1"]["targets"];
    assert_eq!(targets, &json!(["language_model.lm_head", "lm_head"]));
    run("eval", &out, &["--text", "builtin-heldout", "--window", "64", "--windows", "2", "--json"])
        .succeeded();
}

#[test]
fn what_is_refused() {
    let model = llava(false);
    let awq = ["--format", "awq", "--group-size", "32", "--method", "rtn", "--override", "lm_head=w4a16-g32"];
    refuses_to_quantize("a head in AWQ", model.path(), &awq, 2, &["`language_model.lm_head`"]);
    let qoq = ["--method", "qoq", "--scheme", "w4a8-g32", "--samples", "4", "--seq-len", "64"];
    refuses_to_quantize("rotation", model.path(), &qoq, 2, &["projector", "--skip rotate"]);
    edit_config(model.path(), &json!({ "text_config": "elsewhere" }));
    check_message("no object", &run("inspect", model.path(), &[]), 4, &["config.json", "`text_config`"]);

    let unknown = llava(false);
    edit_config(
        unknown.path(),
        &json!({
            "architectures": ["Qwen3OtherForConditionalGeneration"],
            "model_type": "qwen3_other",
            "text_config": { "model_type": "qwen3_other_text", "rms_norm_eps": 1e-6, "intermediate_size": 96,
                             "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                             "num_key_value_heads": 2, "vocab_size": 256, "hidden_act": "silu",
                             "linear_num_value_heads": 4 },
        }),
    );
    let expected = [
        "`Qwen3OtherForConditionalGeneration` is not supported",
        "the nearest supported one is `Qwen3VLForConditionalGeneration`",
        "`text_config.linear_num_value_heads` is 4",
        "LlavaForConditionalGeneration",
    ];
    check_message("unknown", &run("plan", unknown.path(), &["--method", "rtn"]), 4, &expected);
}
