//! Linears on candle's tensors on `Device::Cuda` match the CPU's results up to the order of sums.
//!
//! These tests are built with the feature `candle`, which needs nvcc, and run on a device with `QUANT_GPU=1`.

use std::sync::Arc;

use candle_core::{DType, Device, Module, Tensor};
use quant_kernels_cpu::candle as cpu;
use quant_kernels_cpu::experts::ExpertGate;
use quant_kernels_cpu::{KernelError, Serial, StaticScale, WeightView};
use quant_kernels_cuda::candle::{
    Activations, DevicePackedLinear, QuantizedExperts, QuantizedLinear, Runner,
};
use quant_kernels_cuda::layout::Order;

const STATIC: Activations = Activations::Static(StaticScale { scale: 1.0 / 24.0, zero: -9 });
const ALL: [Activations; 3] = [Activations::Float, Activations::PerToken, STATIC];
const SHAPE: [usize; 2] = [40, 2048];

fn device() -> Option<Device> {
    if std::env::var_os("QUANT_GPU").is_none_or(|v| v != "1") {
        eprintln!("SKIPPED: QUANT_GPU is not 1");
        return None;
    }
    Some(Device::new_cuda(0).unwrap())
}

/// 4-bit weights with zero points and a bias, on the device and on the CPU.
fn linears(device: &Device, activations: Activations) -> (QuantizedLinear, cpu::QuantizedLinear) {
    let [n, k] = SHAPE;
    let codes: Vec<u8> = (0..n * k).map(|i| (i * 7 % 251 % 16) as u8).collect();
    let scales: Vec<f32> = (0..n * k / 128).map(|i| (1 + i % 9) as f32 / 64.0).collect();
    let zeros: Vec<u8> = (0..n * k / 128).map(|i| (i * 5 % 16) as u8).collect();
    let bias: Vec<f32> = (0..n).map(|i| i as f32 - 17.5).collect();
    let view = WeightView::new(SHAPE, 4, 128, &codes, &scales, Some(&zeros)).unwrap();
    let order = if activations == Activations::Float { Order::Float } else { Order::Int8 };
    let sums = activations == STATIC;
    let weight = Arc::new(DevicePackedLinear::pack(&view, Some(&bias), order, sums, device).unwrap());
    let runner = Runner::new(device).unwrap();
    let on_cpu = quant_kernels_cpu::PackedLinear::pack(&view, Some(&bias), true, &Serial).unwrap();
    (
        QuantizedLinear::new(weight, activations, &runner).unwrap(),
        cpu::QuantizedLinear::new(Arc::new(on_cpu), activations, &cpu::Runner::new(Serial)).unwrap(),
    )
}

/// `[2, 3, k]` on the CPU.
fn input(dtype: DType) -> Tensor {
    let k = SHAPE[1];
    let values: Vec<f32> = (0..6 * k).map(|i| ((i * 37 % 997) as f32 - 498.3) / 300.0).collect();
    Tensor::from_vec(values, (2, 3, k), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn values(x: &Tensor) -> Vec<f32> {
    let on_cpu = x.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    on_cpu.flatten_all().unwrap().to_vec1().unwrap()
}

/// Sums are up to a few hundred, with f32 errors below a thousandth; the result is rounded once.
#[track_caller]
fn assert_near(got: &Tensor, expected: &Tensor) {
    assert_eq!((got.dims(), got.dtype()), (expected.dims(), expected.dtype()));
    let rounding = match got.dtype() {
        DType::F32 => 0.0,
        DType::F16 => 2_f32.powi(-10),
        _ => 2_f32.powi(-7),
    };
    for (got, expected) in values(got).into_iter().zip(values(expected)) {
        assert!((got - expected).abs() <= 0.02 + rounding * expected.abs(), "{got} {expected}");
    }
}

#[test]
fn results_are_the_cpus() {
    let Some(device) = device() else { return };
    for activations in ALL {
        let (linear, on_cpu) = linears(&device, activations);
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let x = input(dtype);
            let got = linear.forward(&x.to_device(&device).unwrap());
            match (activations, dtype) {
                (Activations::Float, DType::F32) => {
                    let message = got.unwrap_err().to_string();
                    assert!(message.contains("quantized-linear: expected f16 or bf16, got f32"), "{message}");
                }
                _ => assert_near(&got.unwrap(), &on_cpu.forward(&x).unwrap()),
            }
        }
    }
}

#[test]
fn views_are_read_where_they_begin() {
    let Some(device) = device() else { return };
    let (linear, on_cpu) = linears(&device, Activations::PerToken);
    let x = input(DType::F16);
    let on_device = x.to_device(&device).unwrap();
    let k = SHAPE[1];
    let views: [fn(&Tensor, usize) -> Tensor; 4] = [
        |x, _| x.narrow(1, 1, 2).unwrap(),
        |x, _| x.transpose(0, 1).unwrap(),
        |x, _| x.get(1).unwrap(),
        |x, k| x.flatten_all().unwrap().narrow(0, 3, 2 * k).unwrap().reshape((2, k)).unwrap(),
    ];
    for view in views {
        let expected = on_cpu.forward(&view(&x, k)).unwrap();
        assert_near(&linear.forward(&view(&on_device, k)).unwrap(), &expected);
    }
    assert_eq!(linear.forward(&on_device.get(0).unwrap().get(0).unwrap()).unwrap().dims(), [SHAPE[0]]);
}

#[test]
fn misfits_are_reported() {
    let Some(device) = device() else { return };
    let (linear, _) = linears(&device, Activations::PerToken);
    let refusal = |x: &Tensor| linear.forward(x).unwrap_err().to_string();
    let elsewhere = refusal(&input(DType::F16));
    assert!(elsewhere.contains("runs on CUDA only, but its input is on the CPU"), "{elsewhere}");
    let narrow = refusal(&input(DType::F16).to_device(&device).unwrap().narrow(2, 0, 2047).unwrap());
    assert!(narrow.contains("expected an input of shape [.., 2048], got [2, 3, 2047]"), "{narrow}");
    let whole = refusal(&Tensor::zeros((2, 2048), DType::U8, &device).unwrap());
    assert!(whole.contains("expected f32, f16 or bf16, got u8"), "{whole}");
    let runner = Runner::new(&device).unwrap();
    let other = QuantizedLinear::new(linear.weight().clone(), Activations::Float, &runner).unwrap_err();
    assert_eq!(other, KernelError::Scheme("the weights are packed for different activations"));
    let another = Runner::new(&Device::new_cuda(0).unwrap()).unwrap();
    let far = QuantizedLinear::new(linear.weight().clone(), Activations::PerToken, &another).unwrap_err();
    assert_eq!(far, KernelError::Scheme("the weights must be on the device of the runner"));
}

/// Gate, up and down of two experts, on the device and on the CPU.
fn experts(device: &Device, activations: Activations) -> (QuantizedExperts, cpu::QuantizedExperts) {
    let order = if activations == Activations::Float { Order::Float } else { Order::Int8 };
    let (mut on_device, mut on_cpu) = (Vec::new(), Vec::new());
    for expert in 0..2 {
        let parts = [[40, SHAPE[1]], [40, SHAPE[1]], [SHAPE[1], 40]].map(|[n, k]| {
            let codes: Vec<u8> = (0..n * k).map(|i| (i * (7 + expert) % 251 % 16) as u8).collect();
            let scales: Vec<f32> = (0..n).map(|i| (1 + i % 9) as f32 / 1024.0).collect();
            let view = WeightView::new([n, k], 4, k, &codes, &scales, None).unwrap();
            let bias: Vec<f32> = (0..n).map(|i| (i % 5) as f32 / 8.0).collect();
            let packed = quant_kernels_cpu::PackedLinear::pack(&view, Some(&bias), false, &Serial).unwrap();
            let weight = DevicePackedLinear::pack(&view, Some(&bias), order, false, device).unwrap();
            (Arc::new(weight), Arc::new(packed))
        });
        on_device.push(parts.each_ref().map(|part| Arc::clone(&part.0)));
        on_cpu.push(parts.map(|part| cpu::ExpertLinear::from(part.1)));
    }
    let (runner, gate) = (Runner::new(device).unwrap(), ExpertGate::GeluTanh);
    (
        QuantizedExperts::new(on_device, activations, gate, &runner).unwrap(),
        cpu::QuantizedExperts::new(on_cpu, activations, gate, &cpu::Runner::new(Serial)).unwrap(),
    )
}

#[test]
fn experts_are_the_cpus() {
    let Some(device) = device() else { return };
    let numbers = Tensor::new(&[[[0_u32, 1], [1, 1], [u32::MAX, 0]], [[0, 1]; 3]], &Device::Cpu).unwrap();
    let weights =
        Tensor::new(&[[[0.5_f32, 0.25], [1.0, -0.5], [9.0, 0.75]], [[0.125, 0.5]; 3]], &Device::Cpu);
    let weights = weights.unwrap();
    let to = |x: &Tensor| x.to_device(&device).unwrap();
    for activations in [Activations::Float, Activations::PerToken] {
        let (layer, on_cpu) = experts(&device, activations);
        assert_eq!((layer.count(), layer.hidden()), (2, SHAPE[1]));
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let x = input(dtype);
            let got = layer.forward(&to(&x), &to(&numbers), &to(&weights));
            match (activations, dtype) {
                (Activations::Float, DType::F32) => {
                    let message = got.unwrap_err().to_string();
                    assert!(
                        message.contains("quantized-experts: expected f16 or bf16, got f32"),
                        "{message}"
                    );
                }
                _ => assert_near(&got.unwrap(), &on_cpu.forward(&x, &numbers, &weights).unwrap()),
            }
        }
        // A part that does not begin at a multiple of 16 bytes.
        let x = input(DType::F16);
        let odd = to(&x.flatten_all().unwrap()).narrow(0, 3, SHAPE[1]).unwrap();
        let expected = x.flatten_all().unwrap().narrow(0, 3, SHAPE[1]).unwrap();
        let one = |x: &Tensor| x.get(1).unwrap().get(0).unwrap();
        let got = layer.forward(&odd, &one(&to(&numbers)), &one(&to(&weights))).unwrap();
        assert_near(&got, &on_cpu.forward(&expected, &one(&numbers), &one(&weights)).unwrap());
    }
}

#[test]
fn mismatched_experts_are_reported() {
    let Some(device) = device() else { return };
    let (layer, _) = experts(&device, Activations::PerToken);
    let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &device).unwrap();
    let (x, numbers, weights) =
        (zeros(&[3, 2048], DType::F16), zeros(&[3, 2], DType::U32), zeros(&[3, 2], DType::F32));
    let refusal = |x: &Tensor, numbers: &Tensor, weights: &Tensor| {
        layer.forward(x, numbers, weights).unwrap_err().to_string()
    };
    let narrow = refusal(&x.narrow(1, 0, 2047).unwrap(), &numbers, &weights);
    assert!(narrow.contains("expected inputs of shapes [.., 2048], [.., k] and [.., k]"), "{narrow}");
    let few = refusal(&x, &numbers.narrow(0, 0, 2).unwrap(), &weights);
    assert!(few.contains("got [3, 2048], [2, 2] and [3, 2]"), "{few}");
    let wrong = refusal(&x, &weights, &weights);
    assert!(wrong.contains("expected expert numbers in u32 and weights in f32, got f32 and f32"), "{wrong}");
    let (linear, _) = linears(&device, Activations::PerToken);
    let runner = Runner::new(&device).unwrap();
    let new = |experts, activations| {
        QuantizedExperts::new(experts, activations, ExpertGate::Silu, &runner).unwrap_err().to_string()
    };
    let one = || vec![[(); 3].map(|()| Arc::clone(linear.weight()))];
    assert!(new(Vec::new(), Activations::PerToken).contains("at least one expert"));
    assert!(new(one(), STATIC).contains("do not support static activation scales"));
    assert!(new(one(), Activations::Float).contains("packed for different activations"));
    assert!(new(one(), Activations::PerToken).contains("transposed shape"));
}
