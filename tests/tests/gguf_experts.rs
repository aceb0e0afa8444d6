//! GPTQ for the experts of GGUF files.

use quant_tests::args;
use quant_tests::models::write_experts_model;
use quant_tests::program::quant;
use serde_json::Value;

const EXPERTS: u64 = 4;

#[test]
fn experts_are_compensated_with_the_tokens_routed_to_them() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    write_experts_model(&at("model"), EXPERTS, 3);
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
