//! Products of `QMatMul` with packed weights of every format against products of the dequantized weights.

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul};
use candle_core::{DType, Device, Module, Tensor};
use half::bf16;
use quant_candle::{Checkpoint, Rayon, Runner, Serial, qtensor};
use quant_formats::checkpoint::{Dtype, MemorySource};
use quant_formats::format::{ModuleSchemes, QuantizedCheckpoint, container};
use quant_formats::quantize::{InputGrid, QuantizedTensor, quantize_rtn};
use quant_formats::scheme::LinearScheme;
use quant_kernels_cpu::StaticScale;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const N: usize = 96;
const K: usize = 256;
const SHAPE: [usize; 2] = [N, K];

/// Formats and schemes.
const STORED: [(&str, &str); 9] = [
    ("awq", "w4a16-g32-asym"),
    ("gptq", "w4a16-g64-sym"),
    ("gptq", "w8a16-g128-sym"),
    ("compressed-tensors", "w4a16-g128-asym"),
    ("compressed-tensors", "w8a8-channel-sym"),
    ("compressed-tensors", "wf8af8-channel"),
    ("modelopt", "wf4a16-g16-nv"),
    ("qserve", "w4a8-g128-asym-progressive"),
    ("qserve", "w4a8-channel-asym"),
];

/// The largest difference of a product, relative to the sum of the magnitudes of its terms: docs/kernels.md.
const BOUND: f64 = 1.0 / 65536.0 + (K as f64 + 4.0) / 8388608.0;

fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut random = StdRng::seed_from_u64(seed);
    (0..count).map(|_| random.random_range(-1.0..1.0)).collect()
}

fn rounded(scheme: &str, seed: u64) -> QuantizedTensor {
    let scheme: LinearScheme = scheme.parse().unwrap();
    let scale_dtype = scheme.fixed_scales().map_or(Dtype::F16, |fixed| fixed.dtype());
    quantize_rtn("proj", &values(N * K, seed), SHAPE, scheme, scale_dtype, None).unwrap()
}

/// A checkpoint with the quantized linear `proj`, its bias, and two float linears.
fn checkpoint(format: &str, tensor: &QuantizedTensor, runner: &Runner) -> Checkpoint {
    let format = container(format).unwrap();
    let mut source = MemorySource::new();
    for (spec, bytes) in format.pack("proj", tensor).unwrap() {
        source.insert(&spec.name, spec.info.dtype, spec.info.shape.clone(), bytes).unwrap();
    }
    let schemes = ModuleSchemes { quantized: vec![("proj", tensor.scheme)], ..Default::default() };
    for (name, dtype, shape) in [
        ("proj.bias", Dtype::Bf16, vec![N]),
        ("half.weight", Dtype::F16, vec![40, K]),
        ("brain.weight", Dtype::Bf16, vec![40, K]),
        ("norm.weight", Dtype::Bf16, vec![K]),
    ] {
        let values = values(shape.iter().product(), 77);
        source.insert_f32(name, dtype, shape, &values).unwrap();
    }
    let settings = format.quantization_config(&schemes);
    let opened = QuantizedCheckpoint::new(Arc::new(source), "config.json".as_ref(), &settings).unwrap();
    Checkpoint::new(opened, runner)
}

/// `x · Wᵀ` in `f64`, and the sums of the magnitudes of its terms.
fn product(x: &[f32], weight: &[f32], n: usize) -> Vec<[f64; 2]> {
    let rows = x.chunks_exact(K).flat_map(|x| (0..n).map(move |row| (x, row)));
    let sum = |(x, row): (&[f32], usize)| {
        let terms = x.iter().zip(&weight[row * K..]).map(|(x, w)| f64::from(*x) * f64::from(*w));
        terms.fold([0.0, 0.0], |[sum, size], term| [sum + term, size + term.abs()])
    };
    rows.map(sum).collect()
}

/// Compares results with exact products; `bound` is relative to the sum of the magnitudes.
#[track_caller]
fn check(got: &Tensor, exact: &[[f64; 2]], bound: f64, what: &str) {
    let got = got.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(got.len(), exact.len(), "{what}");
    for (i, (got, [sum, size])) in got.iter().zip(exact).enumerate() {
        let difference = (f64::from(*got) - sum).abs();
        assert!(difference <= bound * size + 1e-6, "{what}: result {i} is {got}, expected {sum}");
    }
}

#[test]
fn products_of_every_format_are_those_of_the_dequantized_weight() {
    let runner = Runner::new(Rayon);
    for (seed, (format, scheme)) in STORED.into_iter().enumerate() {
        let tensor = rounded(scheme, seed as u64);
        let weight = tensor.dequantize().unwrap();
        let proj = checkpoint(format, &tensor, &runner).qmatmul("proj").unwrap();
        for m in [1, 2, 17] {
            for (dtype, ulp) in [(DType::F32, 0.0), (DType::F16, 1.0 / 2048.0), (DType::BF16, 1.0 / 256.0)] {
                let x = Tensor::from_vec(values(m * K, 100 + m as u64), (1, m, K), &Device::Cpu).unwrap();
                let x = x.to_dtype(dtype).unwrap();
                let y = proj.forward(&x).unwrap();
                assert_eq!((y.dims(), y.dtype()), (&[1, m, N][..], dtype));
                let x = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
                let mut x = x.to_vec1::<f32>().unwrap();
                if let Some(grid) = tensor.input_grid().unwrap() {
                    grid.round(&mut x, K);
                }
                check(
                    &y,
                    &product(&x, &weight, N),
                    BOUND + ulp,
                    &format!("{format} {scheme}, {m} rows, {dtype:?}"),
                );
            }
        }
    }
}

#[test]
fn static_grids_are_applied() {
    let mut tensor = rounded("w8a8-channel-sym-static-asym", 3);
    tensor.input = Some(StaticScale { scale: 0.009, zero: -17 });
    assert!(matches!(tensor.input_grid().unwrap(), Some(InputGrid::Static(_))));
    let weight = tensor.dequantize().unwrap();
    let mut x = values(3 * K, 8);
    let input = Tensor::from_slice(&x, (3, K), &Device::Cpu).unwrap();
    let y = QMatMul::from_qtensor(qtensor(tensor.clone(), &Runner::new(Serial)).unwrap()).unwrap();
    tensor.input_grid().unwrap().unwrap().round(&mut x, K);
    check(&y.forward(&input).unwrap(), &product(&x, &weight, N), BOUND, "static");
}

#[test]
fn columns_in_another_order_than_the_inputs() {
    for scheme in ["w4a16-g32-asym", "wf8af8-g32-mx"] {
        let mut tensor = rounded(scheme, 5);
        // A permutation without fixed points nearby.
        tensor.input_order = Some((0..K as u32).map(|column| (column * 37 + 11) % K as u32).collect());
        let weight = tensor.dequantize().unwrap();
        let packed = qtensor(tensor.clone(), &Runner::new(Rayon)).unwrap();
        let dequantized = packed.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap();
        assert_eq!(dequantized.to_vec1::<f32>().unwrap(), weight);
        let mut x = values(5 * K, 9);
        let input = Tensor::from_slice(&x, (5, K), &Device::Cpu).unwrap();
        if let Some(grid) = tensor.input_grid().unwrap() {
            grid.round(&mut x, K);
        }
        let y = QMatMul::from_qtensor(packed).unwrap().forward(&input).unwrap();
        check(&y, &product(&x, &weight, N), BOUND, "ordered");
    }
    let mut wrong = rounded("w4a16-g32-asym", 5);
    wrong.input_order = Some(vec![0; K]);
    assert!(qtensor(wrong, &Runner::new(Serial)).is_err());
}

#[test]
fn weights_are_dequantized_whole_and_by_row() {
    let tensor = rounded("w4a16-g32-asym", 1);
    let weight = tensor.dequantize().unwrap();
    let packed = qtensor(tensor, &Runner::new(Serial)).unwrap();
    assert_eq!((packed.dtype(), packed.shape().dims()), (GgmlDType::Q8_1, &[N, K][..]));
    let whole = packed.dequantize(&Device::Cpu).unwrap();
    assert_eq!(whole.flatten_all().unwrap().to_vec1::<f32>().unwrap(), weight);
    let ids = Tensor::new(&[95u32, 0, 7], &Device::Cpu).unwrap();
    let rows = packed.embedding(&ids).unwrap().to_vec2::<f32>().unwrap();
    for (row, id) in rows.iter().zip([95, 0, 7]) {
        assert_eq!(row[..], weight[id * K..(id + 1) * K]);
    }
    assert!(packed.embedding(&Tensor::new(&[96u32], &Device::Cpu).unwrap()).is_err());
    // Packed codes of 4 bits, scales and zero points, not floats.
    assert!((N * K / 2..N * K).contains(&packed.storage_size_in_bytes()));
    assert_eq!(packed.data().unwrap().len(), packed.storage_size_in_bytes());
}

#[test]
fn float_linears_biases_and_norms_are_read() {
    let runner = Runner::new(Rayon);
    let tensor = rounded("w4a16-g32-asym", 2);
    let checkpoint = checkpoint("awq", &tensor, &runner);
    let x = values(3 * K, 4);
    let input = Tensor::from_slice(&x, (3, K), &Device::Cpu).unwrap();
    let floats = checkpoint.var_builder(DType::F32);
    for (name, bound) in [("half", 1e-6), ("brain", BOUND)] {
        let weight = floats.get((40, K), &format!("{name}.weight")).unwrap();
        let weight = weight.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let y = checkpoint.qmatmul(name).unwrap().forward(&input).unwrap();
        check(&y, &product(&x, &weight, 40), bound, name);
    }
    let proj = floats.get((N, K), "proj.weight").unwrap();
    assert_eq!(proj.flatten_all().unwrap().to_vec1::<f32>().unwrap(), tensor.dequantize().unwrap());
    let bias = checkpoint.bias("proj").unwrap().unwrap().to_vec1::<f32>().unwrap();
    let expected: Vec<f32> = values(N, 77).into_iter().map(|x| bf16::from_f32(x).to_f32()).collect();
    assert_eq!(bias, expected);
    assert!(checkpoint.bias("half").unwrap().is_none());
    assert!(floats.contains_tensor("norm.weight") && floats.contains_tensor("proj.weight"));
    assert!(!floats.contains_tensor("other.weight"));
    assert!(floats.get(K + 1, "norm.weight").is_err());
}

#[test]
fn what_does_not_fit_is_an_error() {
    let runner = Runner::new(Serial);
    let checkpoint = checkpoint("awq", &rounded("w4a16-g32-asym", 2), &runner);
    let missing = checkpoint.qmatmul("other").unwrap_err().to_string();
    assert!(missing.contains("other.weight"), "{missing}");
    let vector = checkpoint.qmatmul("norm").unwrap_err().to_string();
    assert!(vector.contains("expected a matrix"), "{vector}");
    let proj = checkpoint.qmatmul("proj").unwrap();
    for shape in [(1, K - 1), (2, K / 2)] {
        assert!(proj.forward(&Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap()).is_err());
    }
    let none = proj.forward(&Tensor::zeros((0, K), DType::F32, &Device::Cpu).unwrap()).unwrap();
    assert_eq!(none.dims(), [0, N]);
}
