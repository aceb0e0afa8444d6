//! The tensors of one linear, and their bytes.
//!
//! For a module `X` with weight `[n, k]`, `b` bits and groups of `g` (`g = k` per channel), `pack-quantized`:
//!
//! | tensor | type | shape | holds |
//! |---|---|---|---|
//! | `X.weight_packed` | I32 | `[n, ⌈k·b/32⌉]` | codes, packed along rows |
//! | `X.weight_scale` | F16, BF16 or F32 | `[n, k/g]` | scales |
//! | `X.weight_zero_point` | I32 | `[⌈n·b/32⌉, k/g]` | zero points, packed along **columns**; asymmetric only |
//! | `X.weight_shape` | I64 | `[2]` | `n`, `k` |
//!
//! and `int-quantized`, which stores W8A8 with a symmetric scale per row:
//!
//! | tensor | type | shape | holds |
//! |---|---|---|---|
//! | `X.weight` | I8 | `[n, k]` | codes |
//! | `X.weight_scale` | F16, BF16 or F32 | `[n, 1]` | scales |
//! | `X.input_scale` | F32 | `[1]` | the input's scale; static activations only |
//! | `X.input_zero_point` | I8 | `[1]` | its zero point; asymmetric static activations only |
//!
//! For floating-point weights, see [`floats`](super::floats).
//!
//! The format defines signed integers from `−2^(b−1)`, stored with `2^(b−1)` added: these are the unsigned codes and
//! zero points of [`QuantizedTensor`] unchanged. `int-quantized` stores them without the offset.

use super::floats;
use crate::allocate::zeros;
use crate::checkpoint::{Dtype, TensorSpec};
use crate::error::Indivisible;
use crate::format::bits::{pack_rows, transpose, transpose_words, unpack_rows, words_for};
use crate::quantize::QuantizedTensor;
use crate::scheme::{ActivationScheme, FloatFormat, LinearScheme, ScaleFormat, WeightFormat};

use crate::{Error, Result};

/// The storage of a linear's weight: the `format` of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Storage {
    /// `pack-quantized`
    Packed,
    /// `int-quantized`
    Int8,
    /// `float-quantized`
    Float,
    /// `nvfp4-pack-quantized`
    Nvfp4,
    /// `mxfp4-pack-quantized`
    Mxfp4,
    /// `mxfp8-quantized`
    Mxfp8,
}

impl Storage {
    pub(super) const ALL: [Self; 6] =
        [Self::Packed, Self::Int8, Self::Float, Self::Nvfp4, Self::Mxfp4, Self::Mxfp8];

    /// Engines take W8A8 from `int-quantized`, and other integers packed.
    pub(super) fn of(scheme: LinearScheme) -> Self {
        match scheme.weight {
            WeightFormat::Float(format) => match (scheme.fixed_scales(), format) {
                (None, _) => Self::Float,
                (Some(ScaleFormat::E4m3), _) => Self::Nvfp4,
                (Some(_), FloatFormat::E2m1) => Self::Mxfp4,
                (Some(_), _) => Self::Mxfp8,
            },
            WeightFormat::Int { .. } if scheme.is_stored_as_bytes() => Self::Int8,
            WeightFormat::Int { .. } => Self::Packed,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Packed => "pack-quantized",
            Self::Int8 => "int-quantized",
            Self::Float => "float-quantized",
            Self::Nvfp4 => "nvfp4-pack-quantized",
            Self::Mxfp4 => "mxfp4-pack-quantized",
            Self::Mxfp8 => "mxfp8-quantized",
        }
    }

    pub(super) fn is_float(self) -> bool {
        !matches!(self, Self::Packed | Self::Int8)
    }
}

pub(super) fn weight_name(module: &str) -> String {
    format!("{module}.weight")
}

pub(super) fn input_scale_name(module: &str) -> String {
    format!("{module}.input_scale")
}

pub(super) fn input_zero_point_name(module: &str) -> String {
    format!("{module}.input_zero_point")
}

pub(super) fn packed_name(module: &str) -> String {
    format!("{module}.weight_packed")
}

pub(super) fn scale_name(module: &str) -> String {
    format!("{module}.weight_scale")
}

pub(super) fn zero_point_name(module: &str) -> String {
    format!("{module}.weight_zero_point")
}

pub(super) fn shape_name(module: &str) -> String {
    format!("{module}.weight_shape")
}

/// The group of every column, if `actorder` is group; quant never writes it.
pub(super) fn group_index_name(module: &str) -> String {
    format!("{module}.weight_g_idx")
}

pub(super) fn layout(
    module: &str,
    shape: [usize; 2],
    scheme: LinearScheme,
    scale_dtype: Dtype,
) -> Result<Vec<TensorSpec>> {
    layout_as(Storage::of(scheme), module, shape, scheme, scale_dtype)
}

pub(super) fn layout_as(
    storage: Storage,
    module: &str,
    shape: [usize; 2],
    scheme: LinearScheme,
    scale_dtype: Dtype,
) -> Result<Vec<TensorSpec>> {
    let [n, k] = shape;
    let unusable = |what: String| {
        Error::usage(
            format!("`{module}.weight`: {what}"),
            "leave it float with ‹ignore›, or choose a different scheme",
        )
    };
    let bits = scheme.bits();
    if !(2..=8).contains(&bits) {
        return Err(unusable(format!("compressed-tensors supports 2 to 8 bits, not {bits}")));
    }
    // No tensor below takes more than 8 bytes per weight.
    if n.checked_mul(k).is_none_or(|elements| elements > isize::MAX as usize / 8) {
        return Err(unusable(format!("a weight of shape [{n}, {k}] exceeds the address space")));
    }
    if scheme.float_format().is_some() {
        return floats::layout(storage, module, shape, scheme, scale_dtype);
    }
    if !scale_dtype.is_weight_float() {
        return Err(unusable(format!("scales must be stored as F16, BF16 or F32, not {scale_dtype}")));
    }
    let group_size = scheme.granularity.group_size(k);
    if group_size == 0 || !k.is_multiple_of(group_size) {
        let tensor = format!("{module}.weight");
        return Err(Error::GroupSizeDoesNotDivide(vec![Indivisible { tensor, columns: k, group_size }]));
    }
    let groups = k / group_size;
    if storage.is_float() {
        return Err(unusable(format!("the {} layout does not support {scheme}", storage.name())));
    }
    if storage == Storage::Int8 {
        if !scheme.is_symmetric() {
            return Err(unusable("the int-quantized layout supports symmetric weights only".to_owned()));
        }
        let mut specs = vec![
            TensorSpec::new(weight_name(module), Dtype::I8, [n, k]),
            TensorSpec::new(scale_name(module), scale_dtype, [n, groups]),
        ];
        if scheme.has_static_activations() {
            specs.push(TensorSpec::new(input_scale_name(module), Dtype::F32, [1]));
        }
        if scheme.activations == (ActivationScheme::Static { symmetric: false }) {
            specs.push(TensorSpec::new(input_zero_point_name(module), Dtype::I8, [1]));
        }
        return Ok(specs);
    }
    if scheme.has_static_activations() {
        return Err(unusable(format!(
            "engines support static activation scales only with w8a8-channel-sym, not {scheme}"
        )));
    }
    let mut specs = vec![
        TensorSpec::new(packed_name(module), Dtype::I32, [n, words_for(k, bits)]),
        TensorSpec::new(scale_name(module), scale_dtype, [n, groups]),
    ];
    if !scheme.is_symmetric() {
        specs.push(TensorSpec::new(zero_point_name(module), Dtype::I32, [words_for(n, bits), groups]));
    }
    specs.push(TensorSpec::new(shape_name(module), Dtype::I64, [2]));
    Ok(specs)
}

pub(super) fn pack(module: &str, tensor: &QuantizedTensor) -> Result<Vec<(TensorSpec, Vec<u8>)>> {
    let [n, k] = tensor.shape;
    let bits = tensor.scheme.bits();
    let specs = layout(module, tensor.shape, tensor.scheme, tensor.scale_dtype)?;
    tensor.require_storable(module)?;
    if tensor.scheme.float_format().is_some() {
        return Ok(specs.into_iter().zip(floats::pack(module, tensor)?).collect());
    }
    let scales = tensor.scale_dtype.narrow(&tensor.scales);
    let bytes = match Storage::of(tensor.scheme) {
        Storage::Int8 => {
            let codes = tensor.codes.iter().map(|code| code ^ CODE_OFFSET).collect();
            let input = tensor.input.into_iter();
            let input =
                input.flat_map(|by| [by.scale.to_le_bytes().to_vec(), by.zero.to_le_bytes().to_vec()]);
            [codes, scales].into_iter().chain(input).take(specs.len()).collect()
        }
        _ => {
            let mut bytes = vec![pack_rows(&tensor.codes, k, bits), scales];
            if let Some(zeros) = &tensor.zeros {
                bytes.push(pack_zeros(zeros, n, bits)?);
            }
            bytes.push([n, k].iter().flat_map(|&d| (d as i64).to_le_bytes()).collect());
            bytes
        }
    };
    Ok(specs.into_iter().zip(bytes).collect())
}

/// The difference between an 8-bit code and its signed value.
pub(super) const CODE_OFFSET: u8 = 128;

/// Packs zero points `[n, groups]` along `n`: word `w` of group `g` is at `[w, g]`.
fn pack_zeros(zeros: &[u8], n: usize, bits: u8) -> Result<Vec<u8>> {
    if zeros.is_empty() {
        return Ok(Vec::new());
    }
    let groups = zeros.len() / n;
    let columns = transpose(zeros, n, groups)?;
    let packed = pack_rows(&columns, n, bits);
    transpose_words(&packed, groups, words_for(n, bits))
}

/// Unpacks zero points `[n, groups]` from the bytes of `[⌈n·bits/32⌉, groups]` words; the caller checked their number.
pub(super) fn unpack_zeros(bytes: &[u8], n: usize, groups: usize, bits: u8) -> Result<Vec<u8>> {
    if n == 0 || groups == 0 {
        return Ok(Vec::new());
    }
    let packed = transpose_words(bytes, words_for(n, bits), groups)?;
    let mut columns = zeros(n * groups, "the zero points of a weight")?;
    unpack_rows(&packed, n, bits, &mut columns).map_err(|e| Error::Internal(format!("packed zeros: {e}")))?;
    transpose(&columns, groups, n)
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
