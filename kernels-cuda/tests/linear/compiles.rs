//! What the compiler makes of the kernels, for every architecture: registers within the ceiling, nothing spilled.

use quant_kernels_cuda::compile::{Architecture, Form, compile};
use quant_kernels_cuda::layout::{Order, WeightLayout};
use quant_kernels_cuda::linear::{DeviceLimits, variants};
use quant_kernels_cuda::nvrtc_available;

use crate::cases::{Case, Kind};

fn compile_all(architecture: Architecture) {
    if !nvrtc_available() {
        println!("SKIPPED: no NVRTC on the loader's path");
        return;
    }
    let device = DeviceLimits::of(architecture);
    let variants = variants(architecture);
    assert!(variants.len() > 150, "{}", variants.len());
    let mut most = 0;
    for variant in variants {
        assert!(variant.shared_bytes() <= device.shared_of_block, "{}", variant.name());
        let image = compile(&variant.compiled(), architecture, Form::Cubin).unwrap();
        let usage = image.usage().unwrap();
        let what = format!("{} {architecture} {usage:?}", variant.name());
        assert_eq!((usage.spill_stores, usage.spill_loads, usage.stack), (0, 0, 0), "{what}");
        assert!(usage.registers as usize <= variant.shape.register_ceiling(), "{what}");
        most = most.max(usage.registers);
    }
    println!("{architecture}: at most {most} registers");
}

#[test]
fn sm80() {
    compile_all(Architecture::Sm80);
}

#[test]
fn sm86() {
    compile_all(Architecture::Sm86);
}

#[test]
fn sm89() {
    compile_all(Architecture::Sm89);
}

#[test]
fn sm90() {
    compile_all(Architecture::Sm90);
}

#[test]
fn sm120() {
    compile_all(Architecture::Sm120);
}

#[test]
fn packing() {
    if !nvrtc_available() {
        println!("SKIPPED: no NVRTC on the loader's path");
        return;
    }
    for (bits, group, kind, order) in [
        (4, 128, Kind::F16, Order::Float),
        (8, 32, Kind::Bf16, Order::Float),
        (4, 256, Kind::F32, Order::Int8),
        (4, 64, Kind::Progressive, Order::Int8),
    ] {
        let case = Case::new([32, 256], bits, group, kind, true, 1);
        let layout = WeightLayout::of(&case.view(), order, order == Order::Int8).unwrap();
        for launch in layout.device_packing().unwrap() {
            for architecture in Architecture::ALL {
                let usage = compile(&launch.kernel, architecture, Form::Cubin).unwrap().usage().unwrap();
                assert_eq!((usage.spill_stores, usage.stack), (0, 0), "{} {usage:?}", launch.kernel);
            }
        }
    }
}
