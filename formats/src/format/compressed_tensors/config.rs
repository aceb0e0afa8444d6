//! The `quantization_config` of `config.json`.
//!
//! Loaders reject unknown keys, and several of their versions are in use. So only the keys that have the same meaning
//! in all versions are written.

use serde_json::{Map, Value, json};

use super::layout::Storage;
use super::{E4M3_SCALES, E8M0_SCALES, EMBEDDING, LINEAR, METHOD, MIXED, REGEX, STATUS};
use crate::format::ModuleSchemes;
use crate::scheme::{ActivationScheme, BLOCK, Granularity, LinearScheme, MX_GROUP, NV_GROUP, ScaleFormat};

struct Group<'a> {
    scheme: LinearScheme,
    modules: Vec<&'a str>,
}

/// The group of most modules comes first (on ties, the first in model order), then the others in model order.
fn groups<'a>(schemes: &ModuleSchemes<'a>) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    for &(module, scheme) in &schemes.quantized {
        match groups.iter_mut().find(|g| g.scheme == scheme) {
            Some(group) => group.modules.push(module),
            None => groups.push(Group { scheme, modules: vec![module] }),
        }
    }
    let max = groups.iter().map(|g| g.modules.len()).max();
    if let Some(main) = groups.iter().position(|g| Some(g.modules.len()) == max) {
        groups[..=main].rotate_right(1);
    }
    groups
}

/// `group_0` targets every `Linear`; other groups target their modules by name, which loaders prefer to the class. A
/// quantized head is always named, since some loaders do not count it among the linears. `ignore` names every linear
/// that stays float, and has expressions for everything outside the decoder. A fused linear is named if all of its
/// parts are. A quantized embedding has its own group, by class, because not all loaders match it by name.
pub(super) fn quantization_config(schemes: &ModuleSchemes<'_>) -> Value {
    let named = |modules: &[&str]| -> Value { schemes.all_names(modules).into() };
    let outside = schemes.wrapper.into_iter().flat_map(|wrapper| wrapper.outside_patterns());
    let ignored = schemes.all_names(&schemes.float).into_iter().chain(outside.map(|p| format!("{REGEX}{p}")));
    let of_linears = groups(schemes).into_iter().enumerate().map(|(i, group)| {
        let targets = if i == 0 {
            let head = schemes.head.filter(|head| group.modules.contains(head));
            let head = head.map(|head| schemes.all_names(&[head])).unwrap_or_default();
            json!([LINEAR.to_owned()].into_iter().chain(head).collect::<Vec<_>>())
        } else {
            named(&group.modules)
        };
        (targets, group.scheme)
    });
    let of_embedding = schemes.embedding.map(|scheme| (json!([EMBEDDING]), scheme));
    let config_groups: Map<String, Value> = of_linears
        .chain(of_embedding)
        .enumerate()
        .map(|(i, (targets, scheme))| {
            let value = json!({
                "targets": targets,
                "weights": weights(scheme),
                "input_activations": input_activations(scheme.activations),
                "output_activations": null,
                // Some loaders read the format only here.
                "format": Storage::of(scheme).name(),
            });
            (format!("group_{i}"), value)
        })
        .collect();
    let schemes_of_all = schemes.quantized.iter().map(|(_, scheme)| *scheme).chain(schemes.embedding);
    let mut storages: Vec<Storage> = schemes_of_all.map(Storage::of).collect();
    storages.dedup();
    let format = match storages[..] {
        [] => Storage::Packed.name(),
        [one] => one.name(),
        _ => MIXED,
    };
    let mut config = json!({
        "quant_method": METHOD,
        "format": format,
        // Without this key, transformers loads the file without an error and gives wrong results.
        "quantization_status": STATUS,
        "config_groups": config_groups,
        "ignore": ignored.collect::<Vec<_>>(),
    });
    if schemes.fp8_cache {
        config["kv_cache_scheme"] = input_activations(ActivationScheme::Fp8Static);
    }
    config
}

fn weights(scheme: LinearScheme) -> Value {
    let mut weights = json!({
        "num_bits": scheme.bits(),
        "type": if scheme.float_format().is_some() { "float" } else { "int" },
        "symmetric": scheme.is_symmetric(),
        "strategy": match scheme.granularity {
            Granularity::Group(_) if scheme.has_global_scale() => "tensor_group",
            Granularity::Group(_) => "group",
            Granularity::Channel => "channel",
            Granularity::Block => "block",
            Granularity::Tensor => "tensor",
        },
    });
    if let Granularity::Group(size) = scheme.granularity {
        weights["group_size"] = json!(size);
    }
    if scheme.granularity == Granularity::Block {
        weights["block_structure"] = json!([BLOCK, BLOCK]);
    }
    weights["dynamic"] = json!(false);
    if let Some(dtype) = scale_dtype(scheme) {
        weights["scale_dtype"] = json!(dtype);
    }
    weights
}

/// The dtype of scales, if it must be stated. Loaders identify the MX formats by it, and round the scales of NVFP4
/// activations only if it is present. With float activations it has no meaning, and versions before 0.13 reject it.
fn scale_dtype(scheme: LinearScheme) -> Option<&'static str> {
    match scheme.fixed_scales()? {
        ScaleFormat::E4m3 => (scheme.activations != ActivationScheme::Float).then_some(E4M3_SCALES),
        _ => Some(E8M0_SCALES),
    }
}

fn input_activations(scheme: ActivationScheme) -> Value {
    let float = |bits: u8, strategy: &str, dynamic: Value| json!({ "num_bits": bits, "type": "float", "symmetric": true, "strategy": strategy, "dynamic": dynamic });
    let grouped = |mut value: Value, size: usize, scales: Option<&str>| {
        value["group_size"] = json!(size);
        if let Some(dtype) = scales {
            value["scale_dtype"] = json!(dtype);
        }
        value
    };
    let (symmetric, strategy, dynamic) = match scheme {
        ActivationScheme::Float => return Value::Null,
        ActivationScheme::Fp8Token => return float(8, "token", json!(true)),
        ActivationScheme::Fp8Static => return float(8, "tensor", json!(false)),
        ActivationScheme::Fp8Group => return grouped(float(8, "group", json!(true)), BLOCK, None),
        ActivationScheme::Mxfp8 => {
            return grouped(float(8, "group", json!(true)), MX_GROUP, Some(E8M0_SCALES));
        }
        ActivationScheme::Nvfp4 => {
            return grouped(float(4, "tensor_group", json!("local")), NV_GROUP, Some(E4M3_SCALES));
        }
        ActivationScheme::Token => (true, "token", true),
        ActivationScheme::Static { symmetric } => (symmetric, "tensor", false),
    };
    json!({ "num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": strategy, "dynamic": dynamic })
}

#[cfg(test)]
fn warnings(schemes: &ModuleSchemes<'_>) -> Vec<String> {
    use crate::format::Container;
    super::CompressedTensors.warnings(schemes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::FusedLinears;

    fn schemes<'a>(quantized: &[(&'a str, &str)], float: &[&'a str]) -> ModuleSchemes<'a> {
        ModuleSchemes {
            quantized: quantized.iter().map(|(m, s)| (*m, s.parse().unwrap())).collect(),
            float: float.to_vec(),
            ..Default::default()
        }
    }

    #[test]
    fn one_scheme() {
        let config = quantization_config(&schemes(
            &[("model.layers.0.mlp.up_proj", "w4a16"), ("model.layers.0.mlp.down_proj", "w4a16")],
            &["model.layers.0.mlp.gate", "lm_head"],
        ));
        let expected = r#"{
  "quant_method": "compressed-tensors",
  "format": "pack-quantized",
  "quantization_status": "compressed",
  "config_groups": {
    "group_0": {
      "targets": [
        "Linear"
      ],
      "weights": {
        "num_bits": 4,
        "type": "int",
        "symmetric": true,
        "strategy": "group",
        "group_size": 128,
        "dynamic": false
      },
      "input_activations": null,
      "output_activations": null,
      "format": "pack-quantized"
    }
  },
  "ignore": [
    "model.layers.0.mlp.gate",
    "lm_head"
  ]
}"#;
        assert_eq!(serde_json::to_string_pretty(&config).unwrap(), expected);
    }

    #[test]
    fn the_most_common_scheme_is_the_class_and_others_are_named() {
        let config = quantization_config(&schemes(
            &[
                ("a", "w8a16-channel"),
                ("b", "w4a16-asym"),
                ("c", "w3a16"),
                ("d", "w4a16-asym"),
                ("e", "w8a16-channel"),
                ("f", "w4a16-asym"),
            ],
            &[],
        ));
        let groups = config["config_groups"].as_object().unwrap();
        assert_eq!(groups.keys().collect::<Vec<_>>(), ["group_0", "group_1", "group_2"]);
        assert_eq!(groups["group_0"]["targets"], json!(["Linear"]));
        assert_eq!(groups["group_0"]["weights"]["symmetric"], json!(false));
        assert_eq!(groups["group_1"]["targets"], json!(["a", "e"]));
        let channel = json!({
            "num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel", "dynamic": false,
        });
        assert_eq!(groups["group_1"]["weights"], channel);
        assert_eq!(groups["group_2"]["targets"], json!(["c"]));
    }

    #[test]
    fn activations_of_8_bits() {
        let of = |scheme: &str| quantization_config(&schemes(&[("a", scheme)], &[]));
        let config = of("w8a8");
        assert_eq!(config["format"], json!("int-quantized"));
        let group = &config["config_groups"]["group_0"];
        assert_eq!(group["format"], json!("int-quantized"));
        let token = json!({
            "num_bits": 8, "type": "int", "symmetric": true, "strategy": "token", "dynamic": true,
        });
        assert_eq!(group["input_activations"], token);
        let fixed = json!({
            "num_bits": 8, "type": "int", "symmetric": false, "strategy": "tensor", "dynamic": false,
        });
        let asymmetric = of("w8a8-static-asym");
        assert_eq!(asymmetric["config_groups"]["group_0"]["input_activations"], fixed);
        let packed = of("w4a8");
        assert_eq!(packed["format"], json!("pack-quantized"));
        assert_eq!(packed["config_groups"]["group_0"]["format"], json!("pack-quantized"));
        assert_eq!(packed["config_groups"]["group_0"]["input_activations"], token);
        let mixed = quantization_config(&schemes(&[("a", "w8a8"), ("b", "w8a16"), ("c", "w8a8")], &[]));
        assert_eq!(mixed["format"], json!("mixed-precision"));
        assert_eq!(mixed["config_groups"]["group_1"]["format"], json!("pack-quantized"));
    }

    #[test]
    fn what_engines_fuse_is_named_as_they_name_it() {
        let part = |name: &str| format!("m.{name}");
        let fused = [
            FusedLinears { name: "m.qkv".into(), parts: vec![part("q"), part("k")], absent: vec![part("v")] },
            FusedLinears { name: "m.gate_up".into(), parts: vec![part("gate"), part("up")], absent: vec![] },
        ];
        let mut schemes = schemes(
            &[("m.q", "w8a16"), ("m.k", "w8a16"), ("m.o", "w4a16"), ("m.d", "w4a16"), ("m.e", "w4a16")],
            &["m.gate", "m.up"],
        );
        schemes.fused = &fused;
        let config = quantization_config(&schemes);
        assert_eq!(config["config_groups"]["group_1"]["targets"], json!(["m.q", "m.k", "m.qkv", "m.v"]));
        assert_eq!(config["ignore"], json!(["m.gate", "m.up", "m.gate_up"]));
        // If only one part of a fused linear is listed, neither the fused linear nor its absent parts are.
        schemes.float.pop();
        assert_eq!(quantization_config(&schemes)["ignore"], json!(["m.gate"]));
    }

    #[test]
    fn head_and_embedding_are_found_by_all_readers() {
        let mut schemes = schemes(&[("a", "w4a16"), ("lm_head", "w4a16")], &[]);
        schemes.head = Some("lm_head");
        schemes.embedding = Some("w4a16".parse().unwrap());
        let groups = quantization_config(&schemes)["config_groups"].clone();
        assert_eq!(groups["group_0"]["targets"], json!(["Linear", "lm_head"]));
        assert_eq!(groups["group_1"]["targets"], json!(["Embedding"]));
    }

    #[test]
    fn of_equally_common_schemes_the_first_wins() {
        let config = quantization_config(&schemes(&[("a", "w8a16"), ("b", "w4a16")], &[]));
        assert_eq!(config["config_groups"]["group_0"]["weights"]["num_bits"], json!(8));
        assert_eq!(config["config_groups"]["group_1"]["targets"], json!(["b"]));
    }

    #[test]
    fn nothing_quantized() {
        let config = quantization_config(&schemes(&[], &["lm_head"]));
        assert_eq!(config["config_groups"], json!({}));
    }

    #[test]
    fn warnings_name_the_readers_that_fail() {
        assert!(warnings(&schemes(&[("a", "w4a16"), ("b", "w4a16")], &["c"])).is_empty());
        let notes = |quantized: &[(&'static str, &str)]| warnings(&schemes(quantized, &[])).join("\n");
        assert!(notes(&[("a", "w4a16-asym")]).contains("dequantize=True"));
        assert!(notes(&[("a", "w3a16")]).contains("vLLM 0.33"));
        assert!(notes(&[("a", "w8a16-channel")]).contains("per channel"));
        assert!(notes(&[("a", "w8a16"), ("b", "w4a16")]).contains("several schemes"));
    }
}

#[cfg(test)]
#[path = "config_float_tests.rs"]
mod float_tests;
