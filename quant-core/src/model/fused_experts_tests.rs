use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::checkpoint::{ConfigFields, MemorySource};
use crate::model::arch;

const EXPERTS: usize = 3;
const BLOCK: &str = "model.layers.1.mlp.experts.";

fn architecture(class: &str, hidden: usize, intermediate: usize) -> Architecture {
    let config: Value = json!({
        "architectures": [class], "hidden_size": hidden, "intermediate_size": intermediate,
        "moe_intermediate_size": intermediate, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 16, "num_experts": EXPERTS, "num_experts_per_tok": 2,
    });
    let config = ConfigFields::new(Path::new("config.json"), config.as_object().unwrap());
    arch::describe(&config, &MemorySource::new()).unwrap()
}

/// A value that encodes expert, linear, output and input.
fn value(expert: usize, linear: usize, output: usize, input: usize) -> f32 {
    (((expert * 3 + linear) * 200 + output) * 200 + input) as f32
}

/// The values of an expert's linear `[n, k]`.
fn weight(expert: usize, linear: usize, [n, k]: [usize; 2]) -> Vec<f32> {
    (0..n).flat_map(|o| (0..k).map(move |i| value(expert, linear, o, i))).collect()
}

/// Fused expert tensors. `row` returns the linear and output of a row of the first tensor.
fn stored(
    [hidden, intermediate]: [usize; 2],
    row: impl Fn(usize) -> (usize, usize) + Copy,
    transposed: bool,
    biased: bool,
) -> MemorySource {
    let mut source = MemorySource::new();
    let mut add = |name: String, n: usize, k: usize, at: &dyn Fn(usize, usize, usize) -> f32| {
        let matrix = |e: usize| -> Vec<f32> {
            match transposed && k > 1 {
                true => (0..k).flat_map(|i| (0..n).map(move |o| at(e, o, i))).collect(),
                false => (0..n).flat_map(|o| (0..k).map(move |i| at(e, o, i))).collect(),
            }
        };
        let values: Vec<f32> = (0..EXPERTS).flat_map(matrix).collect();
        let shape = match (transposed, k) {
            (_, 1) => vec![EXPERTS, n],
            (true, _) => vec![EXPERTS, k, n],
            (false, _) => vec![EXPERTS, n, k],
        };
        source.insert_f32(name, Dtype::F32, shape, &values).unwrap();
    };
    let of_row = |e: usize, o: usize, i: usize| value(e, row(o).0, row(o).1, i);
    add(format!("{BLOCK}gate_up_proj"), 2 * intermediate, hidden, &of_row);
    add(format!("{BLOCK}down_proj"), hidden, intermediate, &|e, o, i| value(e, 2, o, i));
    if biased {
        add(format!("{BLOCK}gate_up_proj_bias"), 2 * intermediate, 1, &of_row);
        add(format!("{BLOCK}down_proj_bias"), hidden, 1, &|e, o, i| value(e, 2, o, i));
    }
    source.insert_f32("other".to_owned(), Dtype::F32, vec![2], &[1.0, 2.0]).unwrap();
    source
}

fn check(class: &str, sizes: [usize; 2], source: MemorySource, biased: bool) {
    let [hidden, intermediate] = sizes;
    let view = split(Arc::new(source), &architecture(class, hidden, intermediate)).unwrap();
    assert_eq!(view.names().len(), EXPERTS * if biased { 6 } else { 3 } + 1, "{class}");
    assert!(view.names().is_sorted() && view.read_f32("other").unwrap() == [1.0, 2.0]);
    for expert in 0..EXPERTS {
        for (linear, (name, shape)) in [
            ("gate_proj", [intermediate, hidden]),
            ("up_proj", [intermediate, hidden]),
            ("down_proj", [hidden, intermediate]),
        ]
        .into_iter()
        .enumerate()
        {
            let name = format!("{BLOCK}{expert}.{name}.");
            let expected = weight(expert, linear, shape);
            let weight_name = format!("{name}weight");
            assert_eq!(view.info(&weight_name).unwrap().shape, shape);
            assert_eq!(view.read_f32(&weight_name).unwrap(), expected, "{class} {name}");
            // A piece from the middle.
            let mut bytes = [0; 12];
            view.read_range(&weight_name, 4 * 5, &mut bytes).unwrap();
            assert_eq!(bytes[..], Dtype::F32.narrow(&expected[5..8])[..]);
            assert!(view.read_range(&weight_name, 4 * expected.len() as u64 - 8, &mut bytes).is_err());
            assert!(view.read_range(&weight_name, u64::MAX - 4, &mut bytes).is_err());
            if biased {
                let first: Vec<f32> = expected.iter().step_by(shape[1]).copied().collect();
                assert_eq!(view.read_f32(&format!("{name}bias")).unwrap(), first, "{class} {name}");
            }
        }
    }
}

#[test]
fn experts_are_found_however_they_lie() {
    for sizes in [[12, 6], [6, 6], [10, 14]] {
        let intermediate = sizes[1];
        let halves = |row: usize| (row / intermediate, row % intermediate);
        let alternate = |row: usize| (row % 2, row / 2);
        for transposed in [false, true] {
            check("Qwen3MoeForCausalLM", sizes, stored(sizes, halves, transposed, false), false);
            check("GptOssForCausalLM", sizes, stored(sizes, alternate, transposed, true), true);
        }
    }
}

#[test]
fn codes_become_numbers_row_by_row() {
    let (hidden, intermediate) = (64, 32);
    let table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    let code = |at: usize| (at * 7 + at / 13) % 16;
    let scale = |at: usize| 120 + (at * 5 % 11) as u8;
    let mut source = MemorySource::new();
    for (name, n, k) in [("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)] {
        let blocks = EXPERTS * n * k / 32;
        let codes: Vec<u8> =
            (0..blocks * 16).map(|byte| (code(2 * byte) | (code(2 * byte + 1) << 4)) as u8).collect();
        let scales: Vec<u8> = (0..blocks).map(scale).collect();
        source
            .insert(format!("{BLOCK}{name}_blocks"), Dtype::U8, vec![EXPERTS, n, k / 32, 16], codes)
            .unwrap();
        source.insert(format!("{BLOCK}{name}_scales"), Dtype::U8, vec![EXPERTS, n, k / 32], scales).unwrap();
        let zeros = vec![0.0; EXPERTS * n];
        source.insert_f32(format!("{BLOCK}{name}_bias"), Dtype::F32, vec![EXPERTS, n], &zeros).unwrap();
    }
    let view = split(Arc::new(source), &architecture("GptOssForCausalLM", hidden, intermediate)).unwrap();
    let number = |at: usize| table[code(at)] * (f32::from(scale(at / 32)) - 127.0).exp2();
    for (name, n, k, all, first, step) in [
        ("gate_proj", intermediate, hidden, 2 * intermediate, 0, 2),
        ("up_proj", intermediate, hidden, 2 * intermediate, 1, 2),
        ("down_proj", hidden, intermediate, hidden, 0, 1),
    ] {
        for expert in 0..EXPERTS {
            let row = |o: usize| (expert * all + first + o * step) * k;
            let expected: Vec<f32> = (0..n).flat_map(|o| (0..k).map(move |i| number(row(o) + i))).collect();
            let name = format!("{BLOCK}{expert}.{name}.weight");
            assert_eq!(view.info(&name).unwrap(), &TensorInfo { dtype: Dtype::Bf16, shape: vec![n, k] });
            assert_eq!(view.read_f32(&name).unwrap(), expected, "{name}");
        }
    }
}

/// A tensor that does not match the configuration is rejected by name before any of it is read.
#[test]
fn misfits_are_named() {
    let sizes = [12, 6];
    let halves = |row: usize| (row / 6, row % 6);
    let refused = |class: &str, source: MemorySource| {
        let found = split(Arc::new(source), &architecture(class, sizes[0], sizes[1]));
        found.err().map(|e| e.to_string()).unwrap()
    };
    let with = |names: &[(&str, Dtype, Vec<usize>)]| {
        let mut source = MemorySource::new();
        for (name, dtype, shape) in names {
            let bytes = vec![0; shape.iter().product::<usize>() * dtype.size()];
            source.insert(format!("{BLOCK}{name}"), *dtype, shape.clone(), bytes).unwrap();
        }
        source
    };
    let float = Dtype::F32;
    for (names, part) in [
        (vec![("gate_up_proj", float, vec![3, 12, 12])], "down_proj"),
        (vec![("gate_up_proj", float, vec![3, 12, 11])], "gate_up_proj"),
        (
            vec![("gate_up_proj", float, vec![2, 12, 12]), ("down_proj", float, vec![3, 12, 6])],
            "gate_up_proj",
        ),
        (
            vec![("gate_up_proj", Dtype::U8, vec![3, 12, 12]), ("down_proj", float, vec![3, 12, 6])],
            "gate_up_proj",
        ),
        (vec![("gate_up_proj", float, vec![3, 12, 12]), ("down_proj", float, vec![3, 6, 6])], "down_proj"),
        // 12 is not a multiple of 32.
        (vec![("gate_up_proj_blocks", Dtype::U8, vec![3, 12, 1, 16])], "gate_up_proj_blocks"),
    ] {
        let message = refused("Qwen3MoeForCausalLM", with(&names));
        assert!(message.contains(part), "{message}");
    }
    let message = refused("GptOssForCausalLM", stored(sizes, halves, false, false));
    assert!(message.contains("gate_up_proj_bias"), "{message}");
    let mut twice = stored(sizes, halves, false, false);
    let name = format!("{BLOCK}1.up_proj.weight");
    twice.insert_f32(name.clone(), Dtype::F32, vec![6, 12], &[0.0; 72]).unwrap();
    let message = refused("Qwen3MoeForCausalLM", twice);
    assert!(message.contains(&name), "{message}");
}
