//! The host side from a plan to results (compile, cache, load and launch) on the installed driver.
//!
//! With `QUANT_GPU=1` this is a GPU's driver. Otherwise `QUANT_CUDA_STAND_IN` names a directory with a stand-in for the
//! driver, which runs PTX on the interpreter; these tests then run again in a child process that loads it.

mod support;

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use half::f16;
use quant_kernels_cpu::{
    FloatRows, Int8Rows, IsaToken, Layout, PackedLinear, RowLayout, ScaleType, Serial, StaticScale,
    WeightView,
};
use quant_kernels_cuda::Error;
use quant_kernels_cuda::activation::{ActivationArguments, ActivationShape, FixedScale, Float, RowSource};
use quant_kernels_cuda::compile::{Form, Image};
use quant_kernels_cuda::device::{DeviceLimits, Kernel, Kernels};
use quant_kernels_cuda::image_cache::{CACHE_DIRECTORY, ImageCache, Nvrtc};
use quant_kernels_cuda::launch::{Argument, LaunchShape, Region, Stream};
use quant_kernels_cuda::layout::{Order, WeightLayout};
use quant_kernels_cuda::linear::{CallArguments, CallShape, LinearCall};
use support::gpu::{Bytes, Gpu};
use support::machine::on_gpu;

const STAND_IN: &str = "QUANT_CUDA_STAND_IN";

fn region(bytes: &Bytes) -> Region {
    Region { address: bytes.address, bytes: bytes.len as u64 }
}

fn kernels(directory: Option<PathBuf>) -> Kernels {
    let named = std::env::var_os(CACHE_DIRECTORY).filter(|path| !path.is_empty()).map(PathBuf::from);
    Kernels::new(ImageCache::in_directory(named.or(directory), Nvrtc))
}

/// Without a GPU, runs the tests of this file with the stand-in for the driver.
#[test]
fn on_a_stand_in() {
    if on_gpu() {
        return;
    }
    let Some(directory) = std::env::var_os(STAND_IN).filter(|path| !path.is_empty()) else {
        support::is_there(Err(format!("{STAND_IN} does not name a stand-in for the driver")));
        return;
    };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--test-threads", "2"]).env("LD_LIBRARY_PATH", directory).env("QUANT_GPU", "1");
    let output = command.output().unwrap();
    let message =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{message}");
    assert!(message.contains("planned_rows_are_launched ... ok"), "{message}");
    assert!(message.contains("linears_of_a_program_without_a_framework ... ok"), "{message}");
    assert!(message.contains("calls_of_linears_are_launched ... ok"), "{message}");
}

#[test]
fn planned_rows_are_launched() {
    if !on_gpu() {
        return;
    }
    Gpu::get();
    let (m, k) = (5, 520);
    let values: Vec<f16> =
        (0..m * k).map(|i| f16::from_f32(((i * 37 % 997) as f32 - 498.0) / 61.0)).collect();
    let shape =
        ActivationShape { group: Some(128), ..ActivationShape::new(RowSource::Plain, Float::F16, m, k) };
    let plan = shape.plan().unwrap();
    let x = Bytes::of(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    let outputs = [m * shape.code_stride, 4 * m, 4 * m, 4 * m * k.div_ceil(128)];
    let [codes, scales, row_sums, group_sums] = outputs.map(|bytes| Bytes::filled(bytes, 0x5a));
    let arguments = plan
        .arguments(&ActivationArguments {
            x: region(&x),
            up: Region::NONE,
            residual: Region::NONE,
            weight: Region::NONE,
            eps: 0.0,
            fixed: None,
            codes: region(&codes),
            scales: region(&scales),
            row_sums: region(&row_sums),
            group_sums: region(&group_sums),
            count: Region::NONE,
        })
        .unwrap();
    let directory = tempfile::tempdir().unwrap();
    let kernels = kernels(Some(directory.path().into()));
    // SAFETY: the primary context is never released, and images come from this crate.
    let kernel = unsafe { kernels.kernel(&plan.variant, plan.launch.shared_bytes) }.unwrap();
    // SAFETY: the primary context is never released, and images come from this crate.
    let again = unsafe { kernels.kernel(&plan.variant, plan.launch.shared_bytes) }.unwrap();
    assert!(std::ptr::eq(&*kernel, &*again), "loaded twice");
    // SAFETY: the arguments match the plan, on memory that lives until after the synchronization.
    unsafe { kernel.launch(&plan.launch, &arguments, Stream::DEFAULT) }.unwrap();
    Gpu::get().wait().unwrap();

    let layout = Layout::from_parts([1, k], 4, k, ScaleType::F32, None, true).unwrap();
    let mut expected = Int8Rows::default();
    expected.quantize(&values, RowLayout::of(&layout), &Serial).unwrap();
    let got = codes.read(0, codes.len);
    for row in 0..m {
        let got = got[row * shape.code_stride..][..k].iter().map(|&c| c as i8).collect::<Vec<_>>();
        assert_eq!(got, expected.row(row), "row {row}");
    }
    let floats = |bytes: &[u8]| {
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect::<Vec<_>>()
    };
    assert_eq!(floats(&scales.read(0, 4 * m)), expected.scales());
    let sums: Vec<i32> = row_sums
        .read(0, 4 * m)
        .chunks_exact(4)
        .map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    let added = |row| expected.row(row).iter().map(|&c| i32::from(c)).sum::<i32>();
    assert_eq!(sums, (0..m).map(added).collect::<Vec<_>>());
}

#[test]
fn calls_of_linears_are_launched() {
    if !on_gpu() {
        return;
    }
    let ([n, k], m) = ([40, 2048], 3);
    let codes: Vec<u8> = (0..n * k).map(|i| (i * 7 % 251 % 16) as u8).collect();
    let scales: Vec<f32> = (0..n * k / 128).map(|i| (1 + i % 9) as f32 / 64.0).collect();
    let zeros: Vec<u8> = (0..n * k / 128).map(|i| (i * 5 % 16) as u8).collect();
    let bias: Vec<f32> = (0..n).map(|i| i as f32 - 17.5).collect();
    let view = WeightView::new([n, k], 4, 128, &codes, &scales, Some(&zeros)).unwrap();
    // Large values make errors of 8-bit quantization visible.
    let x: Vec<f16> = (0..m * k)
        .map(|i| f16::from_f32(((i * 37 % 997) as f32 - 498.0) / 300.0 * (1 + i / k) as f32))
        .collect();
    let fixed = FixedScale { scale: 1.0 / 24.0, zero: -9 };
    for (order, fixed) in [(Order::Float, None), (Order::Int8, None), (Order::Int8, Some(fixed))] {
        let multiplied: Vec<f64> = match order {
            Order::Float => x.iter().map(|&v| f64::from(v)).collect(),
            Order::Int8 => {
                // Must be bit-identical to the CPU's.
                let layout = Layout::from_parts([1, k], 4, k, ScaleType::F32, None, true).unwrap();
                let (mut rows, layout) = (Int8Rows::default(), RowLayout::of(&layout));
                match fixed {
                    None => rows.quantize(&x, layout, &Serial).unwrap(),
                    Some(FixedScale { scale, zero }) => {
                        rows.quantize_static(&x, layout, StaticScale { scale, zero }, &Serial).unwrap();
                    }
                }
                let zero = fixed.map_or(0, |by| i32::from(by.zero));
                let value = |row, code| f64::from(i32::from(code) - zero) * f64::from(rows.scales()[row]);
                (0..m)
                    .flat_map(|row| rows.row(row).into_iter().map(move |c| (row, c)))
                    .map(|(r, c)| value(r, c))
                    .collect()
            }
        };
        let got = called(&view, &bias, order, fixed, &x);
        for (i, got) in got.iter().enumerate() {
            let (row, feature) = (i / n, i % n);
            let products = (0..k).map(|j| {
                let group = feature * (k / 128) + j / 128;
                let code = f64::from(codes[feature * k + j]) - f64::from(zeros[group]);
                code * f64::from(scales[group]) * multiplied[row * k + j]
            });
            let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
            let expected = sum + f64::from(bias[feature]);
            // Sums are f32, and the result is rounded to f16.
            let bound = size * 1e-5 + expected.abs() * 2_f64.powi(-11);
            assert!(
                (f64::from(*got) - expected).abs() <= bound,
                "{order:?} {fixed:?} {row} {feature}: {got} {expected}"
            );
        }
    }
}

fn called(view: &WeightView, bias: &[f32], order: Order, fixed: Option<FixedScale>, x: &[f16]) -> Vec<f16> {
    let gpu = Gpu::get();
    let layout = WeightLayout::of(view, order, fixed.is_some()).unwrap();
    let mut packed = vec![0; layout.bytes()];
    layout.pack(view, &mut packed).unwrap();
    let limits = (&DeviceLimits::current().unwrap()).into();
    let shape = CallShape { fixed, ..CallShape::new(Float::F16, x.len() / layout.k(), layout.k()) };
    let call = LinearCall::new(&layout, &shape, &limits).unwrap();
    assert!(call.zero_bytes() > 0, "a workspace belongs to this test");
    let memory = |bytes: Vec<u8>| Bytes::of(&bytes);
    let weight = Bytes::of(&packed);
    let bias = memory(bias.iter().flat_map(|v| v.to_le_bytes()).collect());
    let x = memory(x.iter().flat_map(|v| v.to_le_bytes()).collect());
    let out = Bytes::filled(2 * call.results(), 0x5a);
    let scratch = Bytes::filled(call.scratch_bytes(), 0x5a);
    scratch.write(0, &vec![0; call.zero_bytes()]);
    let launches = call
        .launches(&CallArguments {
            weight: region(&weight),
            bias: region(&bias),
            x: region(&x),
            out: region(&out),
            scratch: region(&scratch),
        })
        .unwrap();
    assert_eq!(launches.len(), if order == Order::Float { 1 } else { 2 });
    let directory = tempfile::tempdir().unwrap();
    let kernels = kernels(Some(directory.path().into()));
    for launch in &launches {
        // SAFETY: the primary context is never released, and images come from this crate.
        let kernel = unsafe { kernels.kernel(&launch.variant, launch.shape.shared_bytes) }.unwrap();
        // SAFETY: the arguments match the call, on memory that lives until after the synchronization.
        unsafe { kernel.launch(&launch.shape, &launch.arguments, Stream::DEFAULT) }.unwrap();
    }
    gpu.wait().unwrap();
    out.read(0, out.len).chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect()
}

#[test]
fn without_blocks_nothing_is_launched() {
    if !on_gpu() {
        return;
    }
    Gpu::get();
    let plan = ActivationShape::new(RowSource::Plain, Float::F32, 0, 64).plan().unwrap();
    // SAFETY: the primary context is never released, and images come from this crate.
    let kernel = unsafe { kernels(None).kernel(&plan.variant, 0) }.unwrap();
    // SAFETY: nothing is launched, so nothing is accessed through these arguments.
    unsafe { kernel.launch(&plan.launch, &[Argument::U64(0); 18], Stream::DEFAULT) }.unwrap();
    Gpu::get().wait().unwrap();
}

#[test]
fn a_thread_without_a_context_is_an_error() {
    if !on_gpu() {
        return;
    }
    Gpu::get();
    let plan = ActivationShape::new(RowSource::Plain, Float::F32, 1, 64).plan().unwrap();
    let elsewhere = std::thread::spawn(move || {
        // SAFETY: nothing is loaded.
        let kernel = unsafe { kernels(None).kernel(&plan.variant, 0) };
        (DeviceLimits::current().unwrap_err(), kernel.unwrap_err())
    });
    assert_eq!(elsewhere.join().unwrap(), (Error::NoContext, Error::NoContext));
}

#[test]
fn invalid_images_are_refused() {
    if !on_gpu() {
        return;
    }
    Gpu::get();
    let limits = DeviceLimits::current().unwrap();
    let image = Image { bytes: b"no image".to_vec(), log: String::new() };
    // SAFETY: the text is not an image, so the driver rejects it and runs nothing.
    let refused = unsafe { Kernel::load(&image, "k", 0) }.unwrap_err();
    assert!(matches!(refused, Error::Driver { action: "load a kernel", .. }), "{refused}");
    // The image lacks this kernel, and no device has this much shared memory.
    let plan = ActivationShape::new(RowSource::Plain, Float::F32, 1, 64).plan().unwrap();
    let (architecture, form) = limits.target().unwrap();
    let cache = ImageCache::in_directory(None, Nvrtc);
    let Ok(image) = cache.image(&plan.variant, architecture, form) else { return };
    // SAFETY: the image comes from this crate, and the context is never released.
    let missing = unsafe { Kernel::load(&image, "other", 0) }.unwrap_err();
    assert!(matches!(missing, Error::Driver { action: "find a kernel", .. }), "{missing}");
    // SAFETY: the image comes from this crate, and the context is never released.
    let much = unsafe { Kernel::load(&image, plan.variant.kernel, limits.shared_of_block + 1) }.unwrap_err();
    assert!(matches!(much, Error::Driver { action: "reserve shared memory", .. }), "{much}");
    // SAFETY: the image comes from this crate, and the context is never released.
    let kernel = unsafe { Kernel::load(&image, plan.variant.kernel, 1024) }.unwrap();
    let shape = LaunchShape { shared_bytes: 1025, ..plan.launch };
    // SAFETY: the launch is refused, because it needs more shared memory than the kernel was loaded with.
    let refused = unsafe { kernel.launch(&shape, &[Argument::U64(0); 18], Stream::DEFAULT) };
    assert!(matches!(refused, Err(Error::Launch(_))), "{refused:?}");
    assert!(form == Form::Cubin || architecture.number() < 10 * limits.capability[0] + limits.capability[1]);
}

#[test]
fn linears_of_a_program_without_a_framework() {
    if !on_gpu() {
        return;
    }
    use quant_kernels_cuda::standalone::{Activations, CudaLinear, Launcher};
    let runner = Arc::new(Launcher::new().unwrap());
    let (n, m) = (70, 3);
    let by = StaticScale { scale: 0.03, zero: 5 };
    for (bits, k, group, activations) in [
        (4, 256, 128, Activations::Float),
        (8, 264, 264, Activations::PerToken),
        (4, 256, 64, Activations::PerToken),
        (8, 264, 264, Activations::Static(by)),
    ] {
        let number = |i: usize, of: usize| ((i * 2_654_435_761) >> 7) % of;
        let codes: Vec<u8> = (0..n * k).map(|i| number(i, 1 << bits) as u8).collect();
        let scales: Vec<f32> = (0..n * k / group).map(|i| (1 + i % 7) as f32 / 1024.0).collect();
        let zeros: Vec<u8> = (0..n * k / group).map(|i| number(i + 3, 1 << bits) as u8).collect();
        let view = WeightView::new([n, k], bits, group, &codes, &scales, Some(&zeros)).unwrap();
        let x: Vec<f32> =
            (0..m * k).map(|i| (number(i + 11, 2001) as f32 - 1000.0) * [1e-3, 1.0, 1e4][i / k]).collect();
        let linear = CudaLinear::new(&view, activations, &runner).unwrap();
        let mut got = vec![f32::NAN; m * n];
        linear.multiply(&x, &mut got).unwrap();

        let token = IsaToken::detect();
        let packed = PackedLinear::pack(&view, None, true, &Serial).unwrap();
        let layout = RowLayout::of(packed.layout());
        let mut expected = vec![0.0; m * n];
        let mut whole = Int8Rows::default();
        match activations {
            Activations::Float => {
                let mut rows = FloatRows::new(token);
                rows.pack(&x, layout, &Serial).unwrap();
                packed.multiply_float(&rows, &mut expected, &Serial).unwrap();
            }
            Activations::PerToken => whole.quantize(&x, layout, &Serial).unwrap(),
            Activations::Static(by) => whole.quantize_static(&x, layout, by, &Serial).unwrap(),
        }
        if activations != Activations::Float {
            packed.multiply(&whole, &mut expected, &Serial).unwrap();
        }
        let mut weights = vec![0.0; n * k];
        packed.view().dequantize_rows(0..n, &mut weights).unwrap();
        for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let (row, x) = (&weights[i % n * k..][..k], &x[i / n * k..][..k]);
            let magnitude: f32 = row.iter().zip(x).map(|(w, x)| (w * x).abs()).sum();
            // f16 activations have a relative error of 2⁻¹². With integers, only the final floats are rounded.
            let max =
                if activations == Activations::Float { magnitude / 2048.0 } else { expected.abs() * 1e-5 };
            assert!((got - expected).abs() <= max + 1e-6, "{activations:?} {i}: {got}, not {expected}");
        }
        assert!(linear.multiply(&x[1..], &mut got).is_err() && linear.multiply(&x, &mut got[1..]).is_err());
        linear.multiply(&[], &mut []).unwrap();
    }
    // The kernels do not support groups of 16 with integer codes.
    let (codes, scales) = (vec![1; 16 * 48], vec![1.0; 16 * 3]);
    let view = WeightView::new([16, 48], 4, 16, &codes, &scales, None).unwrap();
    assert!(matches!(CudaLinear::new(&view, Activations::Float, &runner), Err(Error::Operands(_))));
}
