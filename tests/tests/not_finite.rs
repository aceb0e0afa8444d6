//! NaN and infinity in a checkpoint.

use quant_tests::args;
use quant_tests::models::{RawTensor, TinyLlama, read_safetensors, write_model};
use quant_tests::program::quant;
use quant_tests::refusal::{check_message, refuses_to_quantize};

const WEIGHTS: &str = "model.safetensors";
const RTN: [&str; 4] = ["--method", "rtn", "--scheme", "w4a16-g32"];
const AWQ: [&str; 8] = ["--method", "awq", "--scheme", "w4a16-g32", "--samples", "2", "--seq-len", "64"];

#[test]
fn values_that_are_not_finite() {
    let poisoned = |name: &str, places: &[(usize, f32)]| {
        let model = tempfile::tempdir().unwrap();
        let mut tensors = TinyLlama::default().tensors();
        let tensor: &mut RawTensor = tensors.iter_mut().find(|t| t.name == name).unwrap();
        places.iter().for_each(|&(at, value)| tensor.set_f16(at, value));
        TinyLlama::default().write_with(model.path(), &tensors);
        model
    };
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for (name, places, expected) in [
        (
            "model.layers.1.mlp.down_proj.weight",
            vec![(3, nan), (500, nan)],
            "2 non-finite values, the first at index 3",
        ),
        (
            "model.layers.0.self_attn.k_proj.weight",
            vec![(77, -inf)],
            "1 non-finite value, the first at index 77",
        ),
        (
            "model.layers.0.post_attention_layernorm.weight",
            vec![(5, inf), (6, nan)],
            "2 non-finite values, the first at index 5",
        ),
        ("model.norm.weight", vec![(63, nan)], "1 non-finite value, the first at index 63"),
        // Row 32, the space, occurs in every text.
        (
            "model.embed_tokens.weight",
            vec![(32 * 64 + 7, nan), (255 * 64, inf)],
            "2 non-finite values, the first at index 2055",
        ),
        ("lm_head.weight", vec![(0, inf)], "1 non-finite value, the first at index 0"),
    ] {
        let model = poisoned(name, &places);
        let expected = [WEIGHTS, &format!("tensor `{name}`"), expected];
        refuses_to_quantize(name, model.path(), &RTN, 6, &expected);
        refuses_to_quantize(name, model.path(), &AWQ, 6, &expected);
        let run = quant(args![
            "eval",
            model.path(),
            "--text",
            "builtin-heldout",
            "--window",
            "64",
            "--windows",
            "1"
        ]);
        check_message(name, &run, 6, &expected);
        quant(args!["plan", model.path(), "--group-size", "32"]).succeeded();
    }
}

#[test]
fn values_that_are_not_finite_in_a_large_tensor() {
    let large = TinyLlama { vocab: 80_000, layers: 1, ..TinyLlama::default() };
    let mut tensors = large.tensors();
    let last = 80_000 * 64 - 1;
    for at in [1, 70_000 * 64, last] {
        tensors[0].set_f16(at, f32::NAN);
    }
    let model = tempfile::tempdir().unwrap();
    large.write_with(model.path(), &tensors);
    let expected = ["`model.embed_tokens.weight`", "3 non-finite values, the first at index 1"];
    refuses_to_quantize("a large embedding", model.path(), &RTN, 6, &expected);
    refuses_to_quantize("a large embedding", model.path(), &AWQ, 6, &expected);
}

/// Codes and scales that are finite, but whose products are not.
#[test]
fn products_that_are_not_finite() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    TinyLlama::default().write(&at("model"));
    let name = "model.layers.0.mlp.up_proj.weight_scale";
    for (scheme, largest) in [("mxfp4a16", 254), ("mxfp8a16", 254)] {
        let out = at(scheme);
        quant(args!["quantize", at("model"), "-o", &out, "--method", "rtn", "--scheme", scheme]).succeeded();
        let mut tensors = read_safetensors(&out.join(WEIGHTS));
        // The largest weight of a group has a code of at least 4.
        tensors.iter_mut().find(|t| t.name == name).unwrap().data[3] = largest;
        let config = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
        write_model(&at("damaged"), &config, &tensors);
        for options in
            [["--format", "safetensors", "--scheme", "f32"], ["--format", "safetensors", "--scheme", "bf16"]]
        {
            refuses_to_quantize(scheme, &at("damaged"), &options, 6, &["up_proj", "non-finite value"]);
        }
        if scheme == "mxfp4a16" {
            refuses_to_quantize(
                scheme,
                &at("damaged"),
                &["--format", "modelopt"],
                6,
                &["up_proj", "non-finite value"],
            );
        }
    }
}
