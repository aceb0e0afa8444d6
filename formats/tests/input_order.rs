//! Weights whose groups of inputs are not adjacent: GPTQ with `desc_act`, and compressed-tensors with `actorder: group`.
//! The expected numbers are computed from the stored codes, scales, zero points and index, by definition.

use std::sync::Arc;

use quant_formats::checkpoint::{Dtype, MemorySource, TensorInfo};
use quant_formats::format::{ModuleSchemes, QuantizedCheckpoint, container};
use quant_formats::quantize::{QuantizedTensor, quantize_rtn};
use quant_formats::random::mix;
use quant_formats::scheme::LinearScheme;
use quant_formats::{Category, Error, Result};
use quant_kernels_cpu::{FloatRows, IsaToken, RowLayout, Serial};
use serde_json::{Value, json};

const SHAPE: [usize; 2] = [32, 128];
const GROUP: usize = 32;
const CASES: [(&str, &str); 4] = [
    ("gptq", "w4a16-g32-sym"),
    ("gptq", "w3a16-g32-asym"),
    ("compressed-tensors", "w4a16-g32-sym"),
    ("compressed-tensors", "w8a16-g32-asym"),
];

/// The group of every input: each of the four groups 32 times, in a random order.
fn groups_of_inputs(seed: u64) -> Vec<usize> {
    let mut inputs: Vec<usize> = (0..SHAPE[1]).collect();
    inputs.sort_by_key(|&input| mix(seed ^ input as u64));
    let mut groups = vec![0; SHAPE[1]];
    for (place, &input) in inputs.iter().enumerate() {
        groups[input] = place / GROUP;
    }
    groups
}

/// A checkpoint with the linear `m`, whose inputs belong to these groups, and the float weight that it stores.
fn checkpoint(
    format: &str,
    scheme: &str,
    groups: &[usize],
    index: &[i64],
) -> (Result<QuantizedCheckpoint>, Vec<f32>) {
    let container = container(format).unwrap();
    let scheme: LinearScheme = scheme.parse().unwrap();
    let [n, k] = SHAPE;
    let random = |i: usize| (mix(mix(7) ^ i as u64) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    let values: Vec<f32> = (0..n * k).map(random).collect();
    // Scales that differ clearly from group to group. Codes are stored in the order of inputs.
    let mut tensor = quantize_rtn("m", &values, SHAPE, scheme, Dtype::F16, None).unwrap();
    for (i, scale) in tensor.scales.iter_mut().enumerate() {
        *scale = Dtype::F16.round(*scale * (1.0 + (i % (k / GROUP)) as f32));
    }
    let middle = 1 << (scheme.bits() - 1);
    let stored = |o: usize, i: usize| {
        let at = o * (k / GROUP) + groups[i];
        let zero = tensor.zeros.as_ref().map_or(middle, |zeros| i32::from(zeros[at]));
        (i32::from(tensor.codes[o * k + i]) - zero) as f32 * tensor.scales[at]
    };
    let expected = (0..n * k).map(|at| stored(at / k, at % k)).collect();

    let mut source = MemorySource::new();
    let bytes = index.iter().flat_map(|&group| (group as i32).to_le_bytes()).collect::<Vec<u8>>();
    for (spec, packed) in container.pack("m", &tensor).unwrap() {
        let packed = if spec.name == "m.g_idx" { bytes.clone() } else { packed };
        source.insert(&spec.name, spec.info.dtype, spec.info.shape.clone(), packed).unwrap();
    }
    let schemes = ModuleSchemes { quantized: vec![("m", scheme)], ..Default::default() };
    let mut settings = container.quantization_config(&schemes);
    if format == "compressed-tensors" {
        source.insert("m.weight_g_idx", Dtype::I32, [k], bytes).unwrap();
        let group = settings["config_groups"].as_object_mut().unwrap().values_mut().next().unwrap();
        group["weights"]["actorder"] = json!("group");
    } else {
        settings["desc_act"] = json!(true);
    }
    let opened = QuantizedCheckpoint::new(Arc::new(source), "config.json".as_ref(), &settings);
    (opened, expected)
}

fn scattered(format: &str, scheme: &str, seed: u64) -> (QuantizedCheckpoint, Vec<f32>) {
    let groups = groups_of_inputs(seed);
    let index: Vec<i64> = groups.iter().map(|&group| group as i64).collect();
    let (opened, expected) = checkpoint(format, scheme, &groups, &index);
    (opened.unwrap(), expected)
}

#[test]
fn weights_are_dequantized_in_the_order_of_inputs() {
    for (format, scheme) in CASES {
        let (opened, expected) = scattered(format, scheme, 3);
        let weight = opened.read("m").unwrap();
        assert_eq!(weight.dequantize().unwrap(), expected, "{format} {scheme}");
        let order = weight.input_order.clone().expect("an order");
        assert_eq!(opened.input_order("m").unwrap(), Some(order.clone()));
        // Every group has its own inputs, in ascending order, and every input is there once.
        let groups = groups_of_inputs(3);
        for (g, columns) in order.chunks(GROUP).enumerate() {
            assert!(columns.windows(2).all(|pair| pair[0] < pair[1]));
            assert!(columns.iter().all(|&input| groups[input as usize] == g), "{format} {scheme}");
        }
        // Other tools may store the index with 64 bits, or leave it unused.
        let adjacent: Vec<usize> = (0..SHAPE[1]).map(|input| input / GROUP).collect();
        if format == "compressed-tensors" {
            let (opened, expected) = checkpoint(format, scheme, &adjacent, &[-1; SHAPE[1]]);
            let weight = opened.unwrap().read("m").unwrap();
            assert_eq!((weight.dequantize().unwrap(), weight.input_order), (expected, None));
        }
    }
}

#[test]
fn the_kernels_multiply_rearranged_activations() {
    for (format, scheme) in CASES {
        let (opened, expected) = scattered(format, scheme, 5);
        let mut weight = opened.read("m").unwrap();
        let refused = weight.pack(None, &Serial).unwrap_err();
        assert_eq!((refused.category(), refused.category().exit_code()), (Category::Usage, 2));
        assert!(refused.to_string().contains("not in the order of its inputs"), "{refused}");
        assert!(refused.remedy().marked().contains("take_input_order"), "{}", refused.remedy());

        let order = weight.take_input_order().unwrap();
        let packed = weight.pack(None, &Serial).unwrap();
        let x: Vec<f32> = (0..SHAPE[1]).map(|i| (i as f32 * 0.31).cos()).collect();
        let sorted: Vec<f32> = order.iter().map(|&input| x[input as usize]).collect();
        let mut rows = FloatRows::new(IsaToken::detect());
        rows.pack(&sorted, RowLayout::of(packed.layout()), &Serial).unwrap();
        let mut out = vec![0.0; SHAPE[0]];
        packed.multiply_float(&rows, &mut out, &Serial).unwrap();
        for (got, row) in out.iter().zip(expected.chunks(SHAPE[1])) {
            let exact: f64 = row.iter().zip(&x).map(|(w, x)| f64::from(w * x)).sum();
            let size: f64 = row.iter().zip(&x).map(|(w, x)| f64::from((w * x).abs())).sum();
            assert!((f64::from(*got) - exact).abs() < 0.01 * size, "{got} and {exact}");
        }
    }
}

#[test]
fn such_weights_are_divided_by_outputs_only() {
    for (format, scheme) in CASES {
        let (opened, expected) = scattered(format, scheme, 8);
        let part = opened.read_rows("m", 0..32).unwrap();
        assert_eq!(part.dequantize().unwrap(), expected);
        let k = SHAPE[1];
        let whole = opened.read("m").unwrap();
        let part = whole.part(8..24, 0..k).unwrap();
        assert_eq!(part.dequantize().unwrap(), &expected[8 * k..24 * k]);
        assert_eq!(part, opened.read_part("m", 8..24, 0..k).unwrap());
        for error in [opened.read_part("m", 0..32, 0..64), whole.part(0..32, 64..128)] {
            let error = error.unwrap_err();
            assert_eq!(error.category(), Category::Usage);
            assert!(error.to_string().contains("cannot be divided by inputs"), "{error}");
        }
    }
}

#[test]
fn a_part_never_has_the_scales_of_another_group() {
    let [_, k] = SHAPE;
    for (format, scheme) in CASES {
        // Groups of adjacent inputs, of which two are exchanged.
        let groups: Vec<usize> = (0..k).map(|input| [1, 0, 2, 3][input / GROUP]).collect();
        let index: Vec<i64> = groups.iter().map(|&group| group as i64).collect();
        let (opened, expected) = checkpoint(format, scheme, &groups, &index);
        let opened = opened.unwrap();
        for columns in [0..32, 32..64, 64..96, 96..128, 0..64, 32..96, 64..128] {
            let is_stored_in_order = columns.start >= 64;
            match opened.read_part("m", 0..32, columns.clone()) {
                Ok(part) => {
                    let inside: Vec<f32> =
                        expected.chunks(k).flat_map(|row| row[columns.clone()].iter().copied()).collect();
                    assert_eq!(part.dequantize().unwrap(), inside, "{format} {scheme} {columns:?}");
                    assert!(is_stored_in_order, "{format} {scheme} {columns:?}");
                }
                Err(error) => {
                    assert_eq!(error.category(), Category::Usage, "{error}");
                    assert!(!is_stored_in_order, "{format} {scheme} {columns:?}: {error}");
                }
            }
        }
    }
    // An index that is not used says nothing about parts, either.
    let adjacent: Vec<usize> = (0..k).map(|input| input / GROUP).collect();
    let (opened, expected) = checkpoint("compressed-tensors", "w4a16-g32-sym", &adjacent, &vec![-1; k]);
    let part = opened.unwrap().read_part("m", 0..32, 64..128).unwrap();
    let inside: Vec<f32> = expected.chunks(k).flat_map(|row| row[64..].iter().copied()).collect();
    assert_eq!(part.dequantize().unwrap(), inside);
}

#[test]
fn what_has_no_index_of_groups_is_refused() {
    let (opened, _) = scattered("gptq", "w4a16-g32-sym", 9);
    let weight: QuantizedTensor = opened.read("m").unwrap();
    for format in ["gptq", "compressed-tensors", "awq"] {
        assert!(container(format).unwrap().pack("m", &weight).is_err(), "{format}");
    }
    let reason = weight.clone().restated(weight.scheme, weight.scale_dtype).unwrap_err();
    assert!(reason.contains("not adjacent"), "{reason}");
    let mut twice = weight;
    twice.input_order.as_mut().unwrap()[5] = 7;
    assert!(matches!(twice.dequantize(), Err(Error::Internal(_))));
    twice.input_order = Some(vec![0; 3]);
    assert!(twice.dequantize().is_err());
}

#[test]
fn indices_that_are_no_groups_are_refused() {
    let index: Vec<i64> = groups_of_inputs(3).iter().map(|&group| group as i64).collect();
    let with = |change: &dyn Fn(&mut Vec<i64>)| {
        let mut index = index.clone();
        change(&mut index);
        index
    };
    for (format, scheme) in CASES {
        for (index, expected) in [
            (with(&|index| index[3] = 4), "assigns input 3 to group 4 of 4"),
            (with(&|index| index[9] = -1), "assigns input 9 to group -1 of 4"),
            (with(&|index| index[0] = (index[0] + 1) % 4), "inputs to group"),
        ] {
            let (opened, _) = checkpoint(format, scheme, &groups_of_inputs(3), &index);
            let error = opened.unwrap().read("m").unwrap_err();
            assert_eq!((error.category(), error.category().exit_code()), (Category::Input, 4), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}

#[test]
fn an_index_is_needed_and_must_have_the_right_form() {
    let (opened, _) = scattered("compressed-tensors", "w4a16-g32-sym", 3);
    let settings = |actorder: Value| {
        json!({
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": { "group_0": { "targets": ["Linear"], "weights": {
                "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32,
                "actorder": actorder } } },
        })
    };
    let copy = |left_out: &str| {
        let mut copy = MemorySource::new();
        for name in opened.source().names().into_iter().filter(|name| *name != left_out) {
            let TensorInfo { dtype, shape } = opened.source().info(name).unwrap().clone();
            copy.insert(name, dtype, shape, opened.source().read(name).unwrap()).unwrap();
        }
        Arc::new(copy)
    };
    let open =
        |source, actorder| QuantizedCheckpoint::new(source, "config.json".as_ref(), &settings(actorder));
    for actorder in [json!("group"), json!("dynamic"), json!(true)] {
        assert!(open(copy(""), actorder.clone()).is_ok());
        let error = open(copy("m.weight_g_idx"), actorder).unwrap_err();
        assert!(
            matches!(&error, Error::MissingTensor { tensor, .. } if tensor == "m.weight_g_idx"),
            "{error}"
        );
    }
    for actorder in [json!("static"), json!("weight"), json!(false), Value::Null] {
        assert!(open(copy("m.weight_g_idx"), actorder.clone()).is_ok());
        let error = open(copy(""), actorder).unwrap_err();
        assert!(error.to_string().contains("`actorder` is not group"), "{error}");
    }
    let error = open(copy(""), json!("best")).unwrap_err();
    assert!(error.to_string().contains("weights.actorder` must be"), "{error}");
}
