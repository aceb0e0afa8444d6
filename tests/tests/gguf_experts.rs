//! GPTQ for the experts of GGUF files.

use std::path::Path;

use half::f16;
use quant_tests::args;
use quant_tests::models::{RawTensor, edit_config, read_safetensors, safetensors, write_cut_demo_model};
use quant_tests::program::quant;
use serde_json::{Value, json};

const EXPERTS: u64 = 4;

/// Three blocks of the demo model as a Mixtral: every expert is its MLP with random changes.
fn write_experts(directory: &Path) {
    write_cut_demo_model(directory, 3);
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
        for expert in 0..EXPERTS {
            let changed = tensor.data.chunks_exact(2).flat_map(|pair| {
                let value = f16::from_le_bytes([pair[0], pair[1]]).to_f32();
                f16::from_f32(value * (1.0 + 0.1 * random())).to_le_bytes()
            });
            let name = format!("{block}.block_sparse_moe.experts.{expert}.{name}.weight");
            tensors.push(RawTensor { name, data: changed.collect(), ..tensor.clone() });
        }
        if name == "w1" {
            let shape = vec![EXPERTS, tensor.shape[1]];
            let values = (0..EXPERTS * tensor.shape[1]).map(|_| f16::from_f32(0.1 * random()).to_le_bytes());
            let name = format!("{block}.block_sparse_moe.gate.weight");
            tensors.push(RawTensor { name, dtype: "F16".into(), shape, data: values.flatten().collect() });
        }
    }
    std::fs::write(directory.join("model.safetensors"), safetensors(&tensors)).unwrap();
    edit_config(
        directory,
        &json!({
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2
        }),
    );
}

#[test]
fn experts_are_compensated_with_the_tokens_routed_to_them() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    write_experts(&at("model"));
    for scheme in ["q4_0", "q4_k_s"] {
        let divergence = |out: &str, method: &[&str]| {
            let mut arguments =
                args!["quantize", at("model"), "-o", at(out), "--format", "gguf", "--scheme", scheme];
            arguments.extend(args![
                "--calibration",
                "builtin",
                "--samples",
                "32",
                "--seq-len",
                "256",
                "--force"
            ]);
            arguments.extend(method.iter().map(Into::into));
            quant(arguments).succeeded();
            let arguments = args![
                "eval",
                at(out).join("model.gguf"),
                "--reference",
                at("model"),
                "--text",
                "builtin-heldout",
                "--window",
                "128",
                "--windows",
                "40",
                "--json"
            ];
            quant(arguments).json()["comparison"]["kl"]["mean"].as_f64().expect("a KL divergence")
        };
        let [plain, gptq] = [divergence("plain", &[]), divergence("gptq", &["--method", "gptq"])];
        assert!(gptq < 0.9 * plain, "{scheme}: {gptq} of {plain}");
        if scheme == "q4_0" {
            // The norm before the router and all experts, and the up projection of each expert, are folded.
            let awq = divergence("awq", &["--method", "awq"]);
            assert!(awq < 1.05 * plain, "{awq} of {plain}");
            let exact = ["--override", "*=f32", "--override", "blk.*.ffn_*_exps=q8_0"];
            let awq = divergence("exact", &[&exact[..], &["--method", "awq"]].concat());
            assert!(awq < 1e-5, "{awq}");
        }
        let report: Value =
            serde_json::from_slice(&std::fs::read(at("gptq").join("quant_report.json")).unwrap()).unwrap();
        let of = |name: &str| {
            let tensors = report["tensors"].as_array().unwrap();
            tensors.iter().find(|t| t["tensor"] == name).unwrap()["method"].clone()
        };
        assert_eq!(of("blk.0.ffn_down_exps.weight"), "gptq");
        assert_eq!(of("token_embd.weight"), Value::Null);
    }
}
