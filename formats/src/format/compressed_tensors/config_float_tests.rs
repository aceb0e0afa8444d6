//! Configurations and notes of floating-point formats that loaders could confuse.

use super::*;

fn of(scheme: &str) -> ModuleSchemes<'static> {
    let shapes = [("a", [64, 64])].into();
    ModuleSchemes { quantized: vec![("a", scheme.parse().unwrap())], shapes, ..Default::default() }
}

fn group(scheme: &str) -> Value {
    quantization_config(&of(scheme))["config_groups"]["group_0"].clone()
}

/// See `scale_dtype`.
#[test]
fn types_of_scales_are_stated_where_readers_need_them() {
    for (scheme, weights, inputs) in [
        ("wf4a16-g16-nv", Value::Null, Value::Null),
        ("wf4af4-g16-nv", json!("torch.float8_e4m3fn"), json!("torch.float8_e4m3fn")),
        ("wf4a16-g32-mx", json!("torch.uint8"), Value::Null),
        ("wf8a16-g32-mx", json!("torch.uint8"), Value::Null),
        ("wf8af8-g32-mx", json!("torch.uint8"), json!("torch.uint8")),
        ("wf8af8-channel", Value::Null, Value::Null),
        ("wf8af8-b128", Value::Null, Value::Null),
    ] {
        let group = group(scheme);
        assert_eq!(group["weights"]["scale_dtype"], weights, "{scheme}");
        assert_eq!(group["input_activations"]["scale_dtype"], inputs, "{scheme}");
    }
}

#[test]
fn w4afp8_says_that_it_is_packed() {
    let group = group("w4af8-g128-sym");
    assert_eq!(group["format"], json!("pack-quantized"));
    assert_eq!(
        group["input_activations"],
        json!({ "num_bits": 8, "type": "float", "symmetric": true, "strategy": "token", "dynamic": true })
    );
}

#[test]
fn fp8_caches_are_reported_and_explained() {
    let plain = of("wf8af8-channel");
    assert!(quantization_config(&plain).get("kv_cache_scheme").is_none());
    let cached = ModuleSchemes { fp8_cache: true, ..plain.clone() };
    let scheme =
        json!({ "num_bits": 8, "type": "float", "symmetric": true, "strategy": "tensor", "dynamic": false });
    assert_eq!(quantization_config(&cached)["kv_cache_scheme"], scheme);
    let new: Vec<String> = warnings(&cached).into_iter().filter(|n| !warnings(&plain).contains(n)).collect();
    assert!(
        new.len() == 2 && new[0].contains("--kv-cache-dtype fp8") && new[1].contains("llama.cpp"),
        "{new:?}"
    );
    // llama.cpp's converter ignores cache scales only if all weights are NVFP4.
    let nvfp4 = ModuleSchemes { fp8_cache: true, ..of("wf4a16-g16-nv") };
    assert!(!warnings(&nvfp4).iter().any(|n| n.contains("rejects FP8 cache scales")));
}

#[test]
fn notes_name_the_traps_of_each_format() {
    for (scheme, expected) in [
        ("wf8a16-b128", &["SGLang 0.5 supports FP8 weights", "per tensor or row"][..]),
        ("wf8af8-channel", &["compute capability 8.9"]),
        ("wf8af8-tensor", &["not per tensor"]),
        ("wf4af4-g16-nv", &["compute capability 10.0", "in BF16 (dtype=torch.bfloat16), but not in F32"]),
        ("wf4a16-g32-mx", &["even if the checkpoint specifies", "for experts only", "dequantize=True"]),
        (
            "wf8a16-g32-mx",
            &["llama.cpp's converter does not support them", "vLLM 0.33 runs MXFP8 with MXFP8"],
        ),
        ("w4af8-g128-sym", &["compute capability 9.0 only"]),
    ] {
        let notes = warnings(&of(scheme)).join("\n");
        expected.iter().for_each(|message| assert!(notes.contains(message), "{scheme}: {notes}"));
    }
    assert!(warnings(&of("wf8a16-channel")).iter().all(|note| !note.contains("SGLang")));
    let narrow = ModuleSchemes { shapes: [("a", [64, 48])].into(), ..of("wf4a16-g16-nv") };
    assert!(warnings(&narrow).join("\n").contains("`a` has 48 inputs, which is not a multiple of 64"));
}
