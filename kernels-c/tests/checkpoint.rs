//! Checkpoints through the C interface.
#![cfg(all(unix, feature = "checkpoints"))]

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use quant_formats::checkpoint::Dtype;
use quant_formats::format::{ModuleSchemes, QuantizedCheckpoint, container};
use quant_formats::quantize::{QuantizedTensor, quantize_rtn};
use quant_kernels::*;
use safetensors::tensor::TensorView;

#[path = "support/c_program.rs"]
mod c_program;

/// The format, the scheme, and the dtype of scales.
const CHECKPOINTS: [(&str, &str, Dtype); 7] = [
    ("awq", "w4a16-g32-asym", Dtype::F16),
    ("gptq", "w4a16-g32-sym", Dtype::F16),
    ("compressed-tensors", "w4a16-g32-sym", Dtype::Bf16),
    ("compressed-tensors", "w8a8-channel-sym", Dtype::F32),
    ("compressed-tensors", "fp8", Dtype::Bf16),
    ("modelopt", "nvfp4a16", Dtype::F8E4M3),
    ("qserve", "w4a8-g128-asym-progressive", Dtype::F16),
];
const SHAPE: [usize; 2] = [128, 256];
const BIAS: f32 = 0.25;

/// Writes a checkpoint with two linear layers; returns the sums of their first rows.
fn write(at: &Path, (format, scheme, scales): (&str, &str, Dtype)) -> [f64; 2] {
    let (container, scheme) = (container(format).unwrap(), scheme.parse().unwrap());
    let mut data: HashMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)> = HashMap::new();
    let sums = ["a", "b"].map(|module| {
        let phase = f32::from(module.as_bytes()[0]);
        let values: Vec<f32> =
            (0..SHAPE[0] * SHAPE[1]).map(|i| (i as f32 * 0.61 + phase).sin() * 0.1).collect();
        let tensor = quantize_rtn(module, &values, SHAPE, scheme, scales, None).unwrap();
        for (spec, bytes) in container.pack(module, &tensor).unwrap() {
            let dtype = serde_json::from_value(spec.info.dtype.name().into()).unwrap();
            data.insert(spec.name, (dtype, spec.info.shape, bytes));
        }
        tensor.dequantize().unwrap()[..SHAPE[1]].iter().map(|w| f64::from(*w)).sum()
    });
    let bias = [BIAS; SHAPE[0]].iter().flat_map(|b| b.to_le_bytes()).collect();
    data.insert("b.bias".into(), (safetensors::Dtype::F32, vec![SHAPE[0]], bias));
    let schemes = ModuleSchemes {
        quantized: vec![("a", scheme), ("b", scheme)],
        shapes: [("a", SHAPE), ("b", SHAPE)].into(),
        ..Default::default()
    };
    let config = serde_json::json!({ "quantization_config": container.quantization_config(&schemes) });
    std::fs::create_dir_all(at).unwrap();
    std::fs::write(at.join("config.json"), config.to_string()).unwrap();
    let views = data
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &at.join("model.safetensors")).unwrap();
    [sums[0], sums[1] + f64::from(BIAS)]
}

fn all(scratch: &Path) -> Vec<(PathBuf, [f64; 2])> {
    CHECKPOINTS
        .iter()
        .enumerate()
        .map(|(i, &case)| {
            let at = scratch.join(format!("{i}-{}", case.0));
            let sums = write(&at, case);
            (at, sums)
        })
        .collect()
}

fn c_path(path: &Path) -> CString {
    CString::new(path.to_str().unwrap()).unwrap()
}

fn text(at: *const c_char) -> String {
    // SAFETY: the string comes from the library, which ends its strings with a zero byte.
    unsafe { CStr::from_ptr(at) }.to_str().unwrap().to_owned()
}

struct Said([c_char; 400]);

impl Said {
    fn message(&mut self) -> qz1_message {
        let struct_size = size_of::<qz1_message>() as u32;
        qz1_message { struct_size, reserved: 0, text: self.0.as_mut_ptr(), capacity: self.0.len() }
    }
}

fn open(path: &Path) -> *mut qz1_checkpoint {
    let mut checkpoint = null_mut();
    // SAFETY: every pointer points to a live value.
    let status = unsafe { qz1_checkpoint_open(c_path(path).as_ptr(), &raw mut checkpoint, null()) };
    assert_eq!(status, qz1_status::Ok, "{}", path.display());
    checkpoint
}

#[test]
fn warnings_are_told() {
    let scratch = tempfile::tempdir().unwrap();
    write(scratch.path(), ("compressed-tensors", "wf4a16-g32-mx", Dtype::F8E8M0));
    let warning = |index| {
        let checkpoint = open(scratch.path());
        let mut warning = std::ptr::dangling();
        // SAFETY: the handle comes from the library, and every other pointer points to a live value of this test.
        unsafe {
            let status = qz1_checkpoint_warning(checkpoint, index, &raw mut warning, null());
            assert_eq!(status, qz1_status::Ok);
            let found = (!warning.is_null()).then(|| text(warning));
            let status = qz1_checkpoint_warning(null(), index, &raw mut warning, null());
            assert_eq!(status, qz1_status::Null);
            qz1_checkpoint_free(checkpoint);
            found
        }
    };
    assert_eq!(warning(0), None);

    // Activations in MXFP4 are described, but stay float.
    let path = scratch.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = serde_json::json!({
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "dynamic": true, "symmetric": true,
        "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8",
    });
    std::fs::write(&path, config.to_string()).unwrap();
    assert!(warning(0).unwrap().contains("stay float"));
    assert_eq!(warning(1), None);
}

#[test]
fn every_container_is_listed_and_read() {
    let scratch = tempfile::tempdir().unwrap();
    for ((path, sums), (format, scheme, _)) in all(scratch.path()).iter().zip(CHECKPOINTS) {
        let checkpoint = open(path);
        // SAFETY: handles come from the library, and every other pointer points to a live value of this test.
        unsafe {
            let mut count = 0;
            assert_eq!(qz1_checkpoint_count(checkpoint, &raw mut count, null()), qz1_status::Ok);
            assert_eq!(count, 2, "{format}");
            for (index, name) in [c"a", c"b"].into_iter().enumerate() {
                let mut found = usize::MAX;
                let status = qz1_checkpoint_find(checkpoint, name.as_ptr(), &raw mut found, null());
                assert_eq!((status, found), (qz1_status::Ok, index));
                let mut linear: qz1_linear = std::mem::zeroed();
                linear.struct_size = size_of::<qz1_linear>() as u32;
                assert_eq!(qz1_checkpoint_linear(checkpoint, index, &raw mut linear, null()), qz1_status::Ok);
                assert_eq!([linear.n, linear.k], SHAPE);
                assert_eq!(text(linear.name).as_bytes(), name.to_bytes());
                let expected: quant_formats::scheme::LinearScheme = scheme.parse().unwrap();
                assert_eq!(linear.bits, u32::from(expected.bits()));

                let mut tensor = null_mut();
                assert_eq!(qz1_checkpoint_read(checkpoint, index, &raw mut tensor, null()), qz1_status::Ok);
                let mut weights: qz1_weights = std::mem::zeroed();
                weights.struct_size = size_of::<qz1_weights>() as u32;
                assert_eq!(qz1_tensor_weights(tensor, &raw mut weights, null()), qz1_status::Ok);
                let mut layout: qz1_layout = std::mem::zeroed();
                layout.struct_size = size_of::<qz1_layout>() as u32;
                assert_eq!(qz1_layout_of(&raw const weights, 0, &raw mut layout, null()), qz1_status::Ok);
                let mut packed = vec![0_u8; layout.bytes as usize];
                let panels = layout.panels as usize;
                let status = qz1_pack(
                    &raw const weights,
                    &raw const layout,
                    0,
                    panels,
                    packed.as_mut_ptr(),
                    packed.len(),
                    null(),
                    null(),
                );
                assert_eq!(status, qz1_status::Ok, "{format} {scheme}");
                let mut bias = null();
                assert_eq!(qz1_tensor_bias(tensor, &raw mut bias, null()), qz1_status::Ok);
                assert_eq!(bias.is_null(), index == 0);
                let mut scale: qz1_static_scale = std::mem::zeroed();
                scale.struct_size = size_of::<qz1_static_scale>() as u32;
                assert_eq!(qz1_tensor_static_scale(tensor, &raw mut scale, null()), qz1_status::Ok);
                assert_eq!(scale.scale, 0.0);
                qz1_tensor_free(tensor);
                let mut row = vec![0.0_f32; SHAPE[1]];
                let status = qz1_dequantize_rows(
                    &raw const layout,
                    packed.as_ptr(),
                    packed.len(),
                    0,
                    1,
                    row.as_mut_ptr(),
                    row.len(),
                    null(),
                );
                assert_eq!(status, qz1_status::Ok);
                let sum: f64 = row.iter().map(|w| f64::from(*w)).sum();
                let expected = sums[index] - if index == 1 { f64::from(BIAS) } else { 0.0 };
                // With two levels of scales, multiplying rounds once more.
                assert!((sum - expected).abs() < 1e-6, "{format} {scheme}: {sum} and {expected}");
            }
            qz1_checkpoint_free(checkpoint);
        }
    }
}

/// Writes a checkpoint with one linear layer. Returns its weight, in which input i belongs to group i mod 8, and the
/// groups.
fn write_scattered(at: &Path) -> (QuantizedTensor, Vec<usize>) {
    let scheme: quant_formats::scheme::LinearScheme = "w4a16-g32-sym".parse().unwrap();
    let [n, k] = SHAPE;
    let values: Vec<f32> = (0..n * k).map(|i| (i as f32 * 0.61).sin() * 0.1).collect();
    let tensor = quantize_rtn("a", &values, SHAPE, scheme, Dtype::F16, None).unwrap();
    let groups: Vec<usize> = (0..k).map(|input| input % (k / 32)).collect();
    let index: Vec<u8> = groups.iter().flat_map(|&group| (group as i32).to_le_bytes()).collect();
    let container = container("gptq").unwrap();
    let mut data = HashMap::new();
    for (spec, bytes) in container.pack("a", &tensor).unwrap() {
        let dtype: safetensors::Dtype = serde_json::from_value(spec.info.dtype.name().into()).unwrap();
        let bytes = if spec.name == "a.g_idx" { index.clone() } else { bytes };
        data.insert(spec.name, (dtype, spec.info.shape, bytes));
    }
    let schemes =
        ModuleSchemes { quantized: vec![("a", scheme)], shapes: [("a", SHAPE)].into(), ..Default::default() };
    let mut settings = container.quantization_config(&schemes);
    settings["desc_act"] = true.into();
    let config = serde_json::json!({ "quantization_config": settings });
    std::fs::create_dir_all(at).unwrap();
    std::fs::write(at.join("config.json"), config.to_string()).unwrap();
    let views = data
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &at.join("model.safetensors")).unwrap();
    (tensor, groups)
}

/// Columns are sorted by group; the caller must ask for their order before it gets the weights.
#[test]
fn columns_in_another_order_are_read_with_that_order() {
    let scratch = tempfile::tempdir().unwrap();
    let (tensor, groups) = write_scattered(scratch.path());
    let [n, k] = SHAPE;
    let checkpoint = open(scratch.path());
    // SAFETY: handles come from the library, and every other pointer points to a live value of this test. The order and
    // the weights belong to the tensor, which is freed after their last use.
    unsafe {
        let mut read = null_mut();
        assert_eq!(qz1_checkpoint_read(checkpoint, 0, &raw mut read, null()), qz1_status::Ok);
        let mut weights: qz1_weights = std::mem::zeroed();
        weights.struct_size = size_of::<qz1_weights>() as u32;
        let mut said = Said([0; 400]);
        let message = said.message();
        let status = qz1_tensor_weights(read, &raw mut weights, &raw const message);
        assert_eq!(status, qz1_status::Checkpoint);
        assert!(text(said.0.as_ptr()).contains("qz1_tensor_input_order"), "{}", text(said.0.as_ptr()));

        let mut order = null();
        assert_eq!(qz1_tensor_input_order(read, &raw mut order, null()), qz1_status::Ok);
        let order = std::slice::from_raw_parts(order, k);
        let mut expected: Vec<u32> = (0..k as u32).collect();
        expected.sort_by_key(|&input| groups[input as usize]);
        assert_eq!(order, expected);
        assert_eq!(qz1_tensor_weights(read, &raw mut weights, null()), qz1_status::Ok);
        let codes = std::slice::from_raw_parts(weights.codes, n * k);
        for (row, stored) in codes.chunks(k).zip(tensor.codes.chunks(k)) {
            assert!(row.iter().zip(order).all(|(&code, &input)| code == stored[input as usize]));
        }
        assert_eq!(qz1_tensor_input_order(null(), null_mut(), null()), qz1_status::Null);
        qz1_tensor_free(read);
        qz1_checkpoint_free(checkpoint);
    }

    // The columns of other checkpoints are in the order of the inputs.
    let plain = scratch.path().join("plain");
    write(&plain, CHECKPOINTS[1]);
    let checkpoint = open(&plain);
    // SAFETY: handles come from the library, and every other pointer points to a live value of this test.
    unsafe {
        let mut read = null_mut();
        assert_eq!(qz1_checkpoint_read(checkpoint, 0, &raw mut read, null()), qz1_status::Ok);
        let mut order = std::ptr::dangling();
        assert_eq!(qz1_tensor_input_order(read, &raw mut order, null()), qz1_status::Ok);
        assert!(order.is_null());
        qz1_tensor_free(read);
        qz1_checkpoint_free(checkpoint);
    }
}

#[test]
fn what_is_wrong_is_a_status_with_a_reason() {
    let scratch = tempfile::tempdir().unwrap();
    let good = scratch.path().join("good");
    write(&good, CHECKPOINTS[0]);
    let refused = |path: *const c_char, status: qz1_status, says: &str| {
        let mut said = Said([0; 400]);
        let message = said.message();
        let mut checkpoint = std::ptr::dangling_mut();
        // SAFETY: every pointer is null or points to a live value.
        let got = unsafe { qz1_checkpoint_open(path, &raw mut checkpoint, &raw const message) };
        let text = text(said.0.as_ptr());
        assert_eq!(got, status, "{text}");
        assert!(text.contains(says), "{text}");
        assert!(checkpoint.is_null());
    };
    refused(null(), qz1_status::Null, "the path: null pointer");
    refused(c_path(&scratch.path().join("absent")).as_ptr(), qz1_status::Checkpoint, "absent");
    let float = scratch.path().join("float");
    write(&float, CHECKPOINTS[0]);
    std::fs::write(float.join("config.json"), "{}").unwrap();
    refused(c_path(&float).as_ptr(), qz1_status::Checkpoint, "not quantized");

    let checkpoint = open(&good);
    // SAFETY: handles come from the library, and every other pointer points to a live value of this test.
    unsafe {
        let mut found = 7;
        let status = qz1_checkpoint_find(checkpoint, c"c".as_ptr(), &raw mut found, null());
        assert_eq!((status, found), (qz1_status::Checkpoint, 7));
        assert_eq!(qz1_checkpoint_find(checkpoint, null(), &raw mut found, null()), qz1_status::Null);
        assert_eq!(qz1_checkpoint_count(null(), &raw mut found, null()), qz1_status::Null);
        let mut tensor = std::ptr::dangling_mut();
        let status = qz1_checkpoint_read(checkpoint, 2, &raw mut tensor, null());
        assert_eq!((status, tensor.is_null()), (qz1_status::Checkpoint, true));
        let mut linear: qz1_linear = std::mem::zeroed();
        assert_eq!(qz1_checkpoint_linear(checkpoint, 0, &raw mut linear, null()), qz1_status::StructSize);
        std::fs::write(good.join("model.safetensors"), b"cut").unwrap();
        assert_eq!(qz1_checkpoint_read(checkpoint, 0, &raw mut tensor, null()), qz1_status::Checkpoint);
        qz1_checkpoint_free(checkpoint);
        qz1_checkpoint_free(null_mut());
        qz1_tensor_free(null_mut());
    }
}

#[test]
fn the_example_reads_every_container() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = c_program::compile("checkpoint") else { return };
    let scattered = scratch.path().join("scattered");
    write_scattered(&scattered);
    let written = all(scratch.path()).into_iter().map(|(path, _)| (path, &["a", "b"][..]));
    for (path, linears) in written.chain([(scattered, &["a"][..])]) {
        let checkpoint = QuantizedCheckpoint::open(&path).unwrap();
        for name in linears {
            let line = c_program::succeeds(std::process::Command::new(&program).arg(&path).arg(name));
            assert!(line.starts_with(&format!("{name} [128, 256]: ")), "{line}");
            let weight = checkpoint.read(name).unwrap().dequantize().unwrap();
            let products = weight[..SHAPE[1]].iter().zip(1..).map(|(w, i)| f64::from(*w) / f64::from(i));
            let expected = products.sum::<f64>() + if *name == "b" { f64::from(BIAS) } else { 0.0 };
            let got: f64 = line.rsplit_once(": ").unwrap().1.trim().parse().unwrap();
            assert!((got - expected).abs() < 1e-4, "{}: {line}, expected {expected}", path.display());
        }
    }
    let here = scratch.path().join("0-awq");
    for (arguments, status, message) in [
        (vec![scratch.path().join("absent"), "a".into()], 1, "absent"),
        (vec![here.clone(), "c".into()], 1, "no quantized linear of this name"),
        (vec![here], 2, "usage"),
    ] {
        let refused = std::process::Command::new(&program).args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(status) && text.contains(message), "{text}");
    }
}
