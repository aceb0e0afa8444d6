//! Packing and unpacking of floating-point weights.
//!
//! For a module `X` with weight `[n, k]`:
//!
//! | format | tensor | type | shape | holds |
//! |---|---|---|---|---|
//! | `float-quantized` | `X.weight` | F8_E4M3 | `[n, k]` | codes |
//! | | `X.weight_scale` | F16, BF16 or F32 | `[n, 1]`; `[1]` per tensor; `[⌈n/128⌉, ⌈k/128⌉]` per block | scales |
//! | | `X.input_scale` | F32 | `[1]` | the input's scale; static activations only |
//! | `nvfp4-pack-quantized` | `X.weight_packed` | U8 | `[n, k/2]` | two codes per byte, with the even column in the low bits |
//! | | `X.weight_scale` | F8_E4M3 | `[n, k/16]` | group scales |
//! | | `X.weight_global_scale` | F32 | `[1]` | the divisor of the group scales |
//! | | `X.input_global_scale` | F32 | `[1]` | the input's global scale, a divisor; NVFP4 activations only |
//! | `mxfp4-pack-quantized` | `X.weight_packed` | U8 | `[n, k/2]` | as above |
//! | | `X.weight_scale` | U8 | `[n, k/32]` | exponents: `2^(byte − 127)` |
//! | `mxfp8-quantized` | `X.weight` | F8_E4M3 | `[n, k]` | codes |
//! | | `X.weight_scale` | U8 | `[n, k/32]` | exponents |
//!
//! A weight is the code's value times its scale, in `f32`. For NVFP4 the scale is `f32(scale / global)`: the division
//! is rounded before the multiplication.

use quant_kernels_cpu::{StaticScale, e8m0_value};

use super::layout::{Storage, input_scale_name, packed_name, scale_name, weight_name};
use crate::allocate::collected;
use crate::checkpoint::{Dtype, TensorSource, TensorSpec, require_finite};
use crate::error::Indivisible;
use crate::format::PackedWeight;
use crate::format::nibbles::{pack_nibbles, unpack_nibbles};
use crate::format::numbers::{read_numbers, read_positive, require_no_sign};
use crate::quantize::QuantizedTensor;
use crate::scheme::{ActivationScheme, BLOCK, FloatFormat, Granularity, LinearScheme};
use crate::{Error, Result};

pub(super) fn global_scale_name(module: &str) -> String {
    format!("{module}.weight_global_scale")
}

pub(super) fn input_global_scale_name(module: &str) -> String {
    format!("{module}.input_global_scale")
}

/// The product of the sizes must fit in memory.
pub(super) fn layout(
    storage: Storage,
    module: &str,
    [n, k]: [usize; 2],
    scheme: LinearScheme,
    scale_dtype: Dtype,
) -> Result<Vec<TensorSpec>> {
    let unusable = |what: String| {
        Error::usage(
            format!("`{module}.weight`: {what}"),
            "leave it float with ‹ignore›, or choose a different scheme",
        )
    };
    if storage != Storage::of(scheme) {
        return Err(unusable(format!("the {} layout does not support {scheme}", storage.name())));
    }
    let is_fit = match scheme.fixed_scales() {
        Some(fixed) => fixed.dtype() == scale_dtype,
        None => scale_dtype.is_weight_float(),
    };
    if !is_fit {
        return Err(unusable(format!("scales of {scheme} cannot be stored as {scale_dtype}")));
    }
    let group_size = scheme.needed_divisor(k);
    if group_size == 0 || !k.is_multiple_of(group_size) {
        let tensor = format!("{module}.weight");
        return Err(Error::GroupSizeDoesNotDivide(vec![Indivisible { tensor, columns: k, group_size }]));
    }
    let codes = match scheme.float_format() {
        Some(FloatFormat::E2m1) => TensorSpec::new(packed_name(module), Dtype::U8, [n, k / 2]),
        _ => TensorSpec::new(weight_name(module), Dtype::F8E4M3, [n, k]),
    };
    // compressed-tensors uses U8 instead of the E8M0 type of safetensors.
    let stored_dtype = if scale_dtype == Dtype::F8E8M0 { Dtype::U8 } else { scale_dtype };
    let scale = match scheme.granularity {
        Granularity::Tensor => TensorSpec::new(scale_name(module), stored_dtype, [1]),
        Granularity::Block => {
            TensorSpec::new(scale_name(module), stored_dtype, [n.div_ceil(BLOCK), k.div_ceil(BLOCK)])
        }
        _ => TensorSpec::new(scale_name(module), stored_dtype, [n, k / group_size]),
    };
    let mut specs = vec![codes, scale];
    if scheme.has_global_scale() {
        specs.push(TensorSpec::new(global_scale_name(module), Dtype::F32, [1]));
    }
    match scheme.activations {
        ActivationScheme::Fp8Static => {
            specs.push(TensorSpec::new(input_scale_name(module), Dtype::F32, [1]));
        }
        ActivationScheme::Nvfp4 => {
            specs.push(TensorSpec::new(input_global_scale_name(module), Dtype::F32, [1]));
        }
        _ => {}
    }
    Ok(specs)
}

/// The bytes of the tensors of [`layout`], in the same order.
pub(super) fn pack(module: &str, tensor: &QuantizedTensor) -> Result<Vec<Vec<u8>>> {
    let inconsistent = |what: &str| Error::Internal(format!("quantized `{module}.weight`: {what}"));
    let codes = match tensor.scheme.float_format() {
        Some(FloatFormat::E2m1) => pack_nibbles(&tensor.codes),
        _ => tensor.codes.clone(),
    };
    let scales = match tensor.scheme.fixed_scales() {
        Some(_) => tensor.scale_codes().ok_or_else(|| inconsistent("a scale is not exact in its type"))?,
        None => {
            let scales =
                tensor.stored_scales().ok_or_else(|| inconsistent("rows of a block differ in scale"))?;
            tensor.scale_dtype.narrow(&scales)
        }
    };
    let mut bytes = vec![codes, scales];
    if tensor.scheme.has_global_scale() {
        let global = tensor.global.ok_or_else(|| inconsistent("it has no global scale"))?;
        bytes.push(global.to_le_bytes().to_vec());
    }
    if let (ActivationScheme::Fp8Static | ActivationScheme::Nvfp4, Some(input)) =
        (tensor.scheme.activations, tensor.input)
    {
        bytes.push(input.scale.to_le_bytes().to_vec());
    }
    Ok(bytes)
}

/// Reads a weight whose tensors were checked against [`layout`].
pub(super) fn read(source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<QuantizedTensor> {
    let PackedWeight { module, shape, scheme } = weight;
    let codes = match scheme.float_format() {
        Some(FloatFormat::E2m1) => unpack_nibbles(&source.read(&packed_name(module))?)?,
        _ => read_numbers(source, &weight_name(module), FloatFormat::E4m3)?,
    };
    let name = scale_name(module);
    let global = match scheme.has_global_scale() {
        true => Some(read_positive(source, &global_scale_name(module))?),
        false => None,
    };
    let (scales, scale_dtype) = match scheme.fixed_scales() {
        Some(fixed) => {
            let number = |code: u8| match global {
                Some(global) => FloatFormat::E4m3.value(code) / global,
                None => e8m0_value(code),
            };
            let codes = source.read(&name)?;
            let scales = collected(codes.len(), codes.into_iter().map(number), "the scales of a weight")?;
            require_finite(source.location(&name), &name, &scales)?;
            require_no_sign(source, &name, &scales)?;
            (scales, fixed.dtype())
        }
        None => {
            let scale_dtype = source.require(&name)?.dtype;
            let stored = source.read_f32(&name)?;
            require_finite(source.location(&name), &name, &stored)?;
            (QuantizedTensor::spread_scales(&stored, shape, scheme.granularity), scale_dtype)
        }
    };
    let input = match scheme.activations {
        ActivationScheme::Fp8Static => Some(input_scale_name(module)),
        ActivationScheme::Nvfp4 => Some(input_global_scale_name(module)),
        _ => None,
    };
    let input = match input {
        Some(name) => Some(StaticScale { scale: read_positive(source, &name)?, zero: 0 }),
        None => None,
    };
    let (zeros, levels) = (None, None);
    let tensor = QuantizedTensor {
        shape,
        scheme,
        codes,
        scales,
        scale_dtype,
        zeros,
        levels,
        global,
        input,
        input_order: None,
    };
    tensor.view()?;
    Ok(tensor)
}
