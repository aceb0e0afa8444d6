//! Quantized checkpoints on disk: opening, listing, and reading one linear layer at a time, for `qz1_pack`.

use core::ffi::{CStr, c_char};
use std::ffi::{CString, OsStr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use quant_formats::format::{LinearInfo, QuantizedCheckpoint};
use quant_formats::quantize::QuantizedTensor;
use quant_kernels_cpu::{FloatFormat, Scales};

use crate::memory::{self, fields};
use crate::rows::qz1_static_scale;
use crate::status::{Fault, call, qz1_message, qz1_status};
use crate::weights::{QZ1_CODES_E2M1, QZ1_CODES_E4M3, QZ1_CODES_INTEGER, qz1_weights};

/// An open checkpoint. It is immutable: any number of threads may use it.
pub struct qz1_checkpoint {
    opened: QuantizedCheckpoint,
    /// The name and scheme of each linear layer.
    texts: Vec<[CString; 2]>,
    warnings: Vec<CString>,
}

/// The unpacked weight of a linear layer, in memory. It is immutable: any number of threads may use it.
pub struct qz1_tensor {
    tensor: QuantizedTensor,
    /// The E4M3 codes of the group scales, if the tensor has such scales.
    scale_codes: Option<Vec<u8>>,
    bias: Option<Vec<f32>>,
    /// The input of each column, if the columns are in a different order.
    order: Option<Vec<u32>>,
    /// Whether the caller knows the order.
    order_is_known: AtomicBool,
}

/// A linear layer whose weight is quantized.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_linear {
    /// `sizeof(qz1_linear)`
    pub struct_size: u32,
    /// Bits per code.
    pub bits: u32,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// The module, such as "model.layers.0.mlp.down_proj". Belongs to the checkpoint.
    pub name: *const c_char,
    /// The quantization scheme, such as "w4a16-g128-sym". Belongs to the checkpoint.
    pub scheme: *const c_char,
}

fields!(qz1_linear, scheme);

/// Reads a string.
///
/// # Safety
/// If `at` is not null, the string must end with a zero byte, and must not change during the call.
unsafe fn text<'a>(at: *const c_char, what: &'static str) -> Result<&'a CStr, Fault> {
    if at.is_null() {
        return Err(Fault::part(qz1_status::Null, what, "null pointer"));
    }
    // SAFETY: not null, checked above; by the pointer contract it ends with a zero byte.
    Ok(unsafe { CStr::from_ptr(at) })
}

#[cfg(unix)]
fn path(text: &CStr) -> Result<&Path, Fault> {
    use std::os::unix::ffi::OsStrExt;
    Ok(Path::new(OsStr::from_bytes(text.to_bytes())))
}

#[cfg(not(unix))]
fn path(text: &CStr) -> Result<&Path, Fault> {
    let text =
        text.to_str().map_err(|_| Fault::new(qz1_status::Checkpoint, "the path is not valid UTF-8"))?;
    Ok(Path::new(OsStr::new(text)))
}

fn linear(checkpoint: &qz1_checkpoint, index: usize) -> Result<&LinearInfo, Fault> {
    let linear = checkpoint.opened.linears().get(index);
    linear.ok_or_else(|| {
        Fault::new(qz1_status::Checkpoint, "the index is not less than the number of quantized linears")
    })
}

/// Opens a checkpoint: a directory with `config.json` and safetensors files, in one of the formats AWQ, GPTQ,
/// compressed-tensors, ModelOpt, QServe, FP8 or gpt-oss's MXFP4. Checks headers and shapes, and reads no weights. `path`
/// ends with a zero byte. The handle must be freed by `qz1_checkpoint_free`. On error, `out` is set to null.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_checkpoint_open(
    path: *const c_char,
    out: *mut *mut qz1_checkpoint,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        memory::make(scope, out, || {
            let opened = QuantizedCheckpoint::open(self::path(text(path, "the path")?)?)?;
            // Names contain no zero bytes, because tensor names with control characters are rejected.
            let c_text = |text: &str| CString::new(text).unwrap_or_default();
            let both = |linear: &LinearInfo| [c_text(&linear.name), c_text(&linear.scheme.to_string())];
            let texts = opened.linears().iter().map(both).collect();
            let warnings = opened.warnings().iter().map(|warning| c_text(warning)).collect();
            Ok(qz1_checkpoint { opened, texts, warnings })
        })
    })
}

/// Closes a checkpoint; null is allowed. Tensors that were read from it remain valid.
///
/// # Safety
/// The handle must come from `qz1_checkpoint_open` and be freed only once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_checkpoint_free(checkpoint: *mut qz1_checkpoint) {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { memory::free(checkpoint) }
}

/// The number of quantized linear layers. They are sorted by name, and numbered from 0.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_checkpoint_count(
    checkpoint: *const qz1_checkpoint,
    out: *mut usize,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let checkpoint = scope.shared(checkpoint, "the checkpoint")?;
        scope.value(out, "the number")?.put(checkpoint.opened.linears().len());
        Ok(())
    })
}

/// A warning about the checkpoint, one line without a line break: a problem that does not make it unreadable, or a part of
/// its configuration that is not followed. Warnings are numbered from 0; `out` is set to null for an index that is too
/// large. The text is valid as long as the checkpoint.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_checkpoint_warning(
    checkpoint: *const qz1_checkpoint,
    index: usize,
    out: *mut *const c_char,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let checkpoint = scope.shared(checkpoint, "the checkpoint")?;
        let text = checkpoint.warnings.get(index).map_or(std::ptr::null(), |warning| warning.as_ptr());
        scope.value(out, "the warning")?.put(text);
        Ok(())
    })
}

/// The index of the quantized linear layer with this name. `name` ends with a zero byte.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_checkpoint_find(
    checkpoint: *const qz1_checkpoint,
    name: *const c_char,
    out: *mut usize,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let checkpoint = scope.shared(checkpoint, "the checkpoint")?;
        let out = scope.value(out, "the number")?;
        let name = text(name, "the name")?.to_bytes();
        let found = checkpoint.opened.linears().binary_search_by(|linear| linear.name.as_bytes().cmp(name));
        let missing =
            |_| Fault::new(qz1_status::Checkpoint, "the checkpoint has no quantized linear of this name");
        out.put(found.map_err(missing)?);
        Ok(())
    })
}

/// Describes a linear layer. Fills `out`, whose `struct_size` must be set by the caller.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_checkpoint_linear(
    checkpoint: *const qz1_checkpoint,
    index: usize,
    out: *mut qz1_linear,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let checkpoint = scope.shared(checkpoint, "the checkpoint")?;
        let out = scope.place(out, "the linear")?;
        let LinearInfo { shape: [n, k], scheme, .. } = linear(checkpoint, index)?;
        let [name, scheme_name] = &checkpoint.texts[index];
        out.put(qz1_linear {
            struct_size: size_of::<qz1_linear>() as u32,
            bits: u32::from(scheme.bits()),
            n: *n,
            k: *k,
            name: name.as_ptr(),
            scheme: scheme_name.as_ptr(),
        });
        Ok(())
    })
}

/// Reads the weight of a linear layer, and its bias. Codes take one byte each. The handle must be freed by
/// `qz1_tensor_free`. On error, `out` is set to null.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_checkpoint_read(
    checkpoint: *const qz1_checkpoint,
    index: usize,
    out: *mut *mut qz1_tensor,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        memory::make(scope, out, || {
            let checkpoint = scope.shared(checkpoint, "the checkpoint")?;
            let linear = linear(checkpoint, index)?;
            let mut tensor = checkpoint.opened.read(&linear.name)?;
            let order = tensor.take_input_order();
            let bias = checkpoint.opened.bias(&linear.name)?;
            if bias.as_ref().is_some_and(|bias| bias.len() != linear.shape[0]) {
                return Err(Fault::new(
                    qz1_status::Checkpoint,
                    "the length of the bias differs from the number of rows in the weight",
                ));
            }
            let scale_codes = tensor.global.and_then(|_| tensor.scale_codes());
            Ok(qz1_tensor { tensor, scale_codes, bias, order, order_is_known: AtomicBool::new(false) })
        })
    })
}

/// Frees a tensor; null is allowed.
///
/// # Safety
/// The handle must come from `qz1_checkpoint_read` and be freed only once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_tensor_free(tensor: *mut qz1_tensor) {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { memory::free(tensor) }
}

/// The weight in the form that `qz1_layout_of` and `qz1_pack` take. Fills `out`, whose `struct_size` must be set by the
/// caller. The pointers in `out` point to memory of the tensor. Fails if the columns are not in the order of the inputs
/// and `qz1_tensor_input_order` was not called for this tensor.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_tensor_weights(
    tensor: *const qz1_tensor,
    out: *mut qz1_weights,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let out = scope.place(out, "the weights")?;
        let weights = weights(scope.shared(tensor, "the tensor")?)?;
        out.put(weights);
        Ok(())
    })
}

fn weights(of: &qz1_tensor) -> Result<qz1_weights, Fault> {
    let qz1_tensor { tensor, scale_codes, .. } = of;
    if of.order.is_some() && !of.order_is_known.load(Ordering::Relaxed) {
        return Err(Fault::new(
            qz1_status::Checkpoint,
            "the columns are not in the order of the inputs (desc_act or actorder): call qz1_tensor_input_order, and \
             rearrange the activations",
        ));
    }
    let view = tensor.view_with(scale_codes.as_deref())?;
    let at = |slice: Option<&[u8]>| slice.map_or((core::ptr::null(), 0), |s| (s.as_ptr(), s.len()));
    let (scales, groups) = match view.scales(0..tensor.shape[0]) {
        Scales::Float(scales) => (scales, None),
        Scales::Progressive { groups, channels } => (channels, Some(groups)),
        Scales::E4m3 { groups, .. } => (tensor.global.as_slice(), Some(groups)),
        Scales::Super(_) => {
            return Err(Fault::new(qz1_status::Scheme, "this interface does not support super-blocks"));
        }
    };
    let (group_scales, group_scales_len) = at(groups);
    let (zeros, zeros_len) = at(tensor.zeros.as_deref());
    Ok(qz1_weights {
        struct_size: size_of::<qz1_weights>() as u32,
        bits: u32::from(tensor.scheme.bits()),
        n: tensor.shape[0],
        k: tensor.shape[1],
        group_size: view.group_size(),
        codes: tensor.codes.as_ptr(),
        codes_len: tensor.codes.len(),
        scales: scales.as_ptr(),
        scales_len: scales.len(),
        group_scales,
        group_scales_len,
        zeros,
        zeros_len,
        format: match tensor.scheme.float_format() {
            None => QZ1_CODES_INTEGER,
            Some(FloatFormat::E4m3) => QZ1_CODES_E4M3,
            Some(FloatFormat::E2m1) => QZ1_CODES_E2M1,
            Some(_) => {
                return Err(Fault::new(
                    qz1_status::Scheme,
                    "this interface does not support the code format of the tensor",
                ));
            }
        },
        reserved: 0,
    })
}

/// The input of each column of the weight, `[k]`, or null if column i belongs to input i. Checkpoints of GPTQ with
/// `desc_act`, and of compressed-tensors with `actorder: group`, have such an order. Column i is multiplied by activation
/// `order[i]`, so rearrange the activations before you pack them. The order belongs to the tensor.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_tensor_input_order(
    tensor: *const qz1_tensor,
    out: *mut *const u32,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let out = scope.value(out, "the order")?;
        let tensor = scope.shared(tensor, "the tensor")?;
        out.put(tensor.order.as_ref().map_or(core::ptr::null(), |order| order.as_ptr()));
        tensor.order_is_known.store(true, Ordering::Relaxed);
        Ok(())
    })
}

/// The bias `[n]`, or null if the layer has no bias. It belongs to the tensor.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_tensor_bias(
    tensor: *const qz1_tensor,
    out: *mut *const f32,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let out = scope.value(out, "the bias")?;
        let bias = &scope.shared(tensor, "the tensor")?.bias;
        out.put(bias.as_ref().map_or(core::ptr::null(), |bias| bias.as_ptr()));
        Ok(())
    })
}

/// The calibrated static scale of the layer's activations, for layers whose activations are integers with one scale for
/// all tokens. For other layers, `scale` is 0. A zero point other than 0 requires a layout with sums.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_tensor_static_scale(
    tensor: *const qz1_tensor,
    out: *mut qz1_static_scale,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let out = scope.place(out, "the static scale")?;
        let tensor = &scope.shared(tensor, "the tensor")?.tensor;
        let is_integer = !tensor.scheme.activations.is_float();
        let (scale, zero) =
            tensor.input.filter(|_| is_integer).map_or((0.0, 0), |by| (by.scale, i32::from(by.zero)));
        out.put(qz1_static_scale {
            struct_size: size_of::<qz1_static_scale>() as u32,
            scale,
            zero,
            reserved: 0,
        });
        Ok(())
    })
}
