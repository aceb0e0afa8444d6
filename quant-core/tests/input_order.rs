//! Models whose quantized weights have groups of inputs that are not adjacent (GPTQ with `desc_act`, compressed-tensors
//! with `actorder: group`): they run, and are a source for quantizing again, with the numbers of the definition.

use crate::common;

use common::{Quantized, Tiny, logits, model, recipe, run, windows};
use quant_core::checkpoint::{Dtype, MemorySource, TensorInfo, TensorSource};
use quant_core::format::{QuantizedCheckpoint, container};
use quant_core::model::Model;
use quant_core::random::mix;
use quant_core::recipe::{Plan, Recipe};
use quant_core::{Category, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

const GROUP: usize = 16;

/// A model whose linears were quantized with adjacent groups, after which every input was moved to another group. Returns
/// its tensors and configuration, and those of a float model with the same numbers by definition.
fn scattered(format: &str, scheme: &str) -> [(MemorySource, Map<String, Value>); 2] {
    let tiny = Tiny::default();
    let recipe = Recipe { containers: vec![container(format).unwrap()], ..recipe("rtn", scheme) };
    let Quantized { source, config, .. } = run(&tiny.random(5).model(), &tiny.config(), &recipe, None);
    let settings = &config["quantization_config"];
    let opened =
        QuantizedCheckpoint::new(Arc::new(source.clone()), "config.json".as_ref(), settings).unwrap();
    let (mut changed, mut floats) = (BTreeMap::new(), BTreeMap::new());
    for linear in opened.linears() {
        let (tensor, name) = (opened.read(&linear.name).unwrap(), &linear.name);
        let [n, k] = tensor.shape;
        let mut inputs: Vec<usize> = (0..k).collect();
        inputs.sort_by_key(|&input| mix(input as u64 ^ mix(name.len() as u64)));
        let mut groups = vec![0; k];
        inputs.iter().enumerate().for_each(|(place, &input)| groups[input] = place / GROUP);
        // Codes stay where they are; only the group of each input, and so its scale and zero point, is another one.
        let middle = 1 << (tensor.scheme.bits() - 1);
        let value = |at: usize| {
            let group = at / k * (k / GROUP) + groups[at % k];
            let zero = tensor.zeros.as_ref().map_or(middle, |zeros| i32::from(zeros[group]));
            (i32::from(tensor.codes[at]) - zero) as f32 * tensor.scales[group]
        };
        floats.insert(format!("{name}.weight"), ([n, k], (0..n * k).map(value).collect::<Vec<f32>>()));
        let index: Vec<u8> = groups.iter().flat_map(|&group| (group as i32).to_le_bytes()).collect();
        let suffix = if format == "gptq" { "g_idx" } else { "weight_g_idx" };
        changed.insert(format!("{name}.{suffix}"), (k, index));
    }
    assert!(floats.len() >= 14);

    let (mut ours, mut float) = (MemorySource::new(), MemorySource::new());
    let parts = ["qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_shape"];
    for name in source.names() {
        let TensorInfo { dtype, shape } = source.info(name).unwrap().clone();
        let bytes = source.read(name).unwrap();
        let quantized =
            parts.iter().chain(&["weight_zero_point"]).any(|part| name.ends_with(&format!(".{part}")));
        if !quantized {
            float.insert(name, dtype, shape.clone(), bytes.clone()).unwrap();
        }
        if !changed.contains_key(name) {
            ours.insert(name, dtype, shape, bytes).unwrap();
        }
    }
    for (name, (k, bytes)) in changed {
        ours.insert(&name, Dtype::I32, [k], bytes).unwrap();
    }
    for (name, (shape, values)) in floats {
        float.insert(&name, Dtype::F32, shape, Dtype::F32.narrow(&values)).unwrap();
    }
    let mut config = config;
    let settings = &mut config["quantization_config"];
    match format {
        "gptq" => settings["desc_act"] = json!(true),
        _ => {
            let group = settings["config_groups"].as_object_mut().unwrap().values_mut().next().unwrap();
            group["weights"]["actorder"] = json!("group");
        }
    }
    let mut plain = config.clone();
    plain.remove("quantization_config");
    [(ours, config), (float, plain)]
}

fn models(format: &str, scheme: &str) -> [(Model, Map<String, Value>); 2] {
    scattered(format, scheme).map(|(source, config)| (model(Arc::new(source), &config), config))
}

const CASES: [(&str, &str); 3] =
    [("gptq", "w4a16-g16-sym"), ("gptq", "w8a16-g16-asym"), ("compressed-tensors", "w4a16-g16-asym")];

#[test]
fn such_a_model_computes_what_its_numbers_say() {
    for (format, scheme) in CASES {
        let [(ours, _), (float, _)] = models(format, scheme);
        let others = windows(64, 2, 16, 3);
        let (got, expected) = (logits(&ours, &others), logits(&float, &others));
        assert_eq!(got, expected, "{format} {scheme}: the same floats are multiplied in the same order");
        let plain = Tiny::default().random(5).model();
        assert_ne!(logits(&plain, &others), expected);
    }
}

#[test]
fn such_a_model_is_quantized_again() -> Result<()> {
    for (format, scheme) in CASES {
        let [(ours, config), (float, plain)] = models(format, scheme);
        let again = |model: &Model, config: &Map<String, Value>| {
            run(model, config, &recipe("rtn", "w8a16-g32-sym"), None)
        };
        let ours = ours.dequantized()?;
        let (ours, expected) = (again(&ours, &config), again(&float, &plain));
        for name in expected.source.names() {
            assert_eq!(ours.source.read(name)?, expected.source.read(name)?, "{format} {scheme} {name}");
        }
        assert!(ours.source.names().iter().all(|name| !name.ends_with("g_idx")), "{:?}", ours.source.names());
    }
    Ok(())
}

#[test]
fn its_numbers_cannot_be_written_in_another_format() {
    for (format, scheme) in CASES {
        let [(ours, _), _] = models(format, scheme);
        for target in ["gptq", "compressed-tensors", "awq"] {
            let error = Plan::repack(&ours, container(target).unwrap()).unwrap_err();
            assert_eq!((error.category(), error.category().exit_code()), (Category::Usage, 2), "{error}");
            assert!(error.to_string().contains("groups of inputs that are not adjacent"), "{error}");
            assert!(error.remedy().marked().contains("‹requantize›"), "{}", error.remedy());
        }
    }
}
