//! FP8 checkpoints with `quant_method: "fp8"`, the layout that DeepSeek, Qwen and others publish. Read, not written:
//! compressed-tensors can store the same weights, and its loaders handle partial blocks at the edges correctly.
//!
//! | tensor | type | shape | holds |
//! |---|---|---|---|
//! | `X.weight` | F8_E4M3 | `[n, k]` | codes |
//! | `X.weight_scale_inv`, or `X.weight_scale`, `X.scale`, `X.qscale_weight` | F32, BF16, F16, F8_E8M0 or U8 | `[⌈n/128⌉, ⌈k/128⌉]`, `[⌈n/128⌉, 1, ⌈k/128⌉, 1]`, `[n]`, or one number | scales |
//! | `X.weight`, as DeepSeek-V4 stores experts | I8 | `[n, k/2]` | E2M1 codes, with the even column in the low bits |
//! | its scale, under the same names | F8_E8M0 or U8 | `[n, k/32]` | exponents |
//! | `X.input_scale`, `X.activation_scale` or `X.qscale_act` | float | one number | the input's scale, if it is static |
//!
//! Scales are multipliers, whatever their name suggests. One-byte scales are exponents, `2^(byte − 127)`. The dtypes of
//! tensors determine which linears are quantized: configurations leave some linears float without naming them.

use std::collections::BTreeMap;

use quant_kernels_cpu::{StaticScale, e8m0_value};
use serde_json::Value;

use super::nibbles::unpack_nibbles;
use super::numbers::{matrix, read_numbers, read_positive, require_no_sign};
use super::{Axis, PackedReader, PackedWeight, TensorPart};
use crate::allocate::collected;
use crate::checkpoint::{Dtype, TensorSource, TensorSpec, require_finite};
use crate::quantize::QuantizedTensor;
use crate::scheme::{ActivationScheme, BLOCK, FloatFormat, Granularity, LinearScheme, WeightFormat};
use crate::{Error, Result};

/// `quant_method`.
pub(super) const METHOD: &str = "fp8";
/// Name suffixes of scales, in search order.
const SCALES: [&str; 4] = ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"];
/// Name suffixes of input scales.
const INPUT_SCALES: [&str; 3] = ["input_scale", "activation_scale", "qscale_act"];

/// Columns that share a scale of FP4 codes.
const FP4_GROUP: usize = 32;

#[derive(Debug)]
pub(super) struct NativeFp8 {
    static_inputs: bool,
    /// Whether I8 weights with exponents as scales are FP4 codes.
    reads_fp4: bool,
    modules: BTreeMap<String, Module>,
}

#[derive(Debug)]
struct Module {
    scheme: LinearScheme,
    scale: String,
    input: Option<String>,
}

/// Returns the reader for a checkpoint with this `quantization_config`; `None` for other methods.
///
/// # Errors
/// A reason that names the key, when the configuration uses a feature that this reader does not implement.
pub(super) fn reader(config: &Value) -> Result<Option<Box<dyn PackedReader>>, String> {
    if config.get("quant_method").and_then(Value::as_str) != Some(METHOD) {
        return Ok(None);
    }
    let refuse = |key: &str, why: String| Err(format!("`quantization_config.{key}` {why}"));
    let text = |key: &str| config.get(key).filter(|v| !v.is_null());
    match text("fmt") {
        None => {}
        Some(Value::String(fmt)) if fmt == "e4m3" => {}
        Some(other) => return refuse("fmt", format!("is {other}; only e4m3 is supported")),
    }
    match text("weight_block_size") {
        None => {}
        Some(size) if *size == serde_json::json!([BLOCK, BLOCK]) => {}
        Some(size) => return refuse("weight_block_size", format!("is {size}; only [128, 128] is supported")),
    }
    let static_inputs = match text("activation_scheme").map(Value::as_str) {
        None | Some(Some("dynamic")) => false,
        Some(Some("static")) => true,
        Some(_) => return refuse("activation_scheme", "must be dynamic or static".into()),
    };
    Ok(Some(Box::new(NativeFp8 { reads_fp4: true, ..NativeFp8::new(static_inputs) })))
}

impl NativeFp8 {
    /// Creates an FP8 reader that has not examined the tensors yet; `static_inputs` enables input scales.
    pub(super) fn new(static_inputs: bool) -> Self {
        Self { static_inputs, reads_fp4: false, modules: BTreeMap::new() }
    }

    fn module(&self, name: &str) -> Result<&Module> {
        let missing = || Error::Internal(format!("module `{name}` is not quantized"));
        self.modules.get(name).ok_or_else(missing)
    }

    /// Returns the module of an I8 weight with a scale, which is two FP4 codes per byte; `None` without a scale.
    fn survey_fp4(source: &dyn TensorSource, module: &str, shape: &[usize]) -> Result<Option<Module>> {
        let names = SCALES.iter().map(|name| format!("{module}.{name}"));
        let found = names.filter_map(|name| source.info(&name).map(|info| (name, info.clone()))).next();
        let Some((scale, info)) = found else { return Ok(None) };
        let groups = |n: usize, bytes: usize| vec![n, bytes / (FP4_GROUP / 2)];
        let fits = match shape {
            &[n, bytes] => bytes % (FP4_GROUP / 2) == 0 && info.shape == groups(n, bytes),
            _ => false,
        };
        if !fits || !matches!(info.dtype, Dtype::F8E8M0 | Dtype::U8) {
            let weight = format!("{module}.weight");
            return Err(Error::UnsupportedQuantization {
                path: source.location(&weight),
                reason: format!(
                    "tensor `{scale}` is {} {:?}, but FP4 codes of shape {shape:?} (in bytes) need one E8M0 \
                    scale per 32 columns",
                    info.dtype, info.shape
                ),
            });
        }
        let (weight, granularity) = (WeightFormat::Float(FloatFormat::E2m1), Granularity::Group(FP4_GROUP));
        let scheme = LinearScheme { weight, granularity, activations: ActivationScheme::Float };
        Ok(Some(Module { scheme, scale, input: None }))
    }

    /// Determines a module's scheme from its tensors.
    fn survey_module(&self, source: &dyn TensorSource, module: &str, shape: &[usize]) -> Result<Module> {
        let weight = format!("{module}.weight");
        let unsupported =
            |reason: String| Error::UnsupportedQuantization { path: source.location(&weight), reason };
        let &[n, k] = shape else {
            return Err(unsupported(format!("tensor `{weight}` is FP8, but not a matrix")));
        };
        let find = |names: &[&str]| {
            names.iter().map(|name| format!("{module}.{name}")).find(|name| source.info(name).is_some())
        };
        let Some(scale) = find(&SCALES) else {
            return Err(unsupported(format!("tensor `{weight}` is FP8, but has no scale")));
        };
        let info = source.require(&scale)?;
        let granularity = match info.shape[..] {
            [] | [1] => Granularity::Tensor,
            // ModelOpt stores the scales of blocks with four dimensions.
            [rows, columns] | [rows, 1, columns, 1]
                if [rows, columns] == [n.div_ceil(BLOCK), k.div_ceil(BLOCK)] =>
            {
                Granularity::Block
            }
            [rows] | [rows, 1] if rows == n => Granularity::Channel,
            [1, 1] => Granularity::Tensor,
            _ => {
                return Err(unsupported(format!(
                    "tensor `{scale}` has shape {:?}, but an FP8 weight [{n}, {k}] needs one scale per \
                    tensor, row or block of 128 × 128",
                    info.shape
                )));
            }
        };
        if !(info.dtype.is_weight_float() || matches!(info.dtype, Dtype::F8E8M0 | Dtype::U8)) {
            return Err(unsupported(format!(
                "tensor `{scale}` has type {}, which is not supported for scales",
                info.dtype
            )));
        }
        let input = find(&INPUT_SCALES).filter(|_| self.static_inputs && granularity != Granularity::Block);
        let activations = match granularity {
            Granularity::Block if k.is_multiple_of(BLOCK) => ActivationScheme::Fp8Group,
            Granularity::Block => ActivationScheme::Float,
            _ if input.is_some() => ActivationScheme::Fp8Static,
            _ => ActivationScheme::Fp8Token,
        };
        let weight = WeightFormat::Float(FloatFormat::E4m3);
        Ok(Module { scheme: LinearScheme { weight, granularity, activations }, scale, input })
    }
}

impl PackedReader for NativeFp8 {
    fn survey(&mut self, source: &dyn TensorSource) -> Result<()> {
        let mut modules = BTreeMap::new();
        for name in source.names() {
            let Some(module) = name.strip_suffix(".weight") else { continue };
            let info = source.require(name)?;
            if info.dtype == Dtype::F8E4M3 {
                modules.insert(module.to_owned(), self.survey_module(source, module, &info.shape)?);
            }
            if self.reads_fp4
                && info.dtype == Dtype::I8
                && let Some(found) = Self::survey_fp4(source, module, &info.shape)?
            {
                modules.insert(module.to_owned(), found);
            }
        }
        self.modules = modules;
        Ok(())
    }

    fn code_suffixes(&self) -> &'static [&'static str] {
        &[".weight"]
    }

    fn parameter_suffixes(&self) -> &'static [&'static str] {
        &[".weight_scale_inv"]
    }

    fn scheme(&self, module: &str) -> Option<LinearScheme> {
        self.modules.get(module).map(|module| module.scheme)
    }

    fn scale_dtype(&self, source: &dyn TensorSource, module: &str) -> Result<Dtype> {
        let module = self.module(module)?;
        if let Some(fixed) = module.scheme.fixed_scales() {
            return Ok(fixed.dtype());
        }
        // Exponents stand for powers of two, which BF16 represents exactly.
        let dtype = source.require(&module.scale)?.dtype;
        Ok(if dtype.is_weight_float() { dtype } else { Dtype::Bf16 })
    }

    fn shape(&self, source: &dyn TensorSource, module: &str) -> Result<Option<[usize; 2]>> {
        let Some(Module { scheme, .. }) = self.modules.get(module) else { return Ok(None) };
        let name = format!("{module}.weight");
        match scheme.float_format() {
            Some(FloatFormat::E2m1) => matrix(source, &name, Dtype::I8, [1, 2]),
            _ => matrix(source, &name, Dtype::F8E4M3, [1, 1]),
        }
    }

    fn tensors(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Vec<TensorSpec>> {
        let module = self.module(weight.module)?;
        let name = format!("{}.weight", weight.module);
        let info = source.require(&name)?;
        let [n, k] = weight.shape;
        let is_fp4 = module.scheme.float_format() == Some(FloatFormat::E2m1);
        let stored = if is_fp4 { [n, k / 2] } else { [n, k] };
        if info.shape != stored || (is_fp4 && k % FP4_GROUP != 0) {
            return Err(Error::TensorShape {
                path: source.location(&name),
                tensor: name,
                expected: stored.to_vec(),
                got: info.shape.clone(),
            });
        }
        let names = [Some(&name), Some(&module.scale), module.input.as_ref()];
        let spec = |name: &String| Ok(TensorSpec { name: name.clone(), info: source.require(name)?.clone() });
        names.into_iter().flatten().map(spec).collect()
    }

    fn parts(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Option<Vec<TensorPart>> {
        let Module { scheme, scale, .. } = self.modules.get(weight.module)?;
        let rows = Some(Axis::new(0, 1, 1));
        let columns = match scheme.float_format() {
            Some(FloatFormat::E2m1) => Axis::new(1, 2, 1),
            _ => Axis::new(1, 1, 1),
        };
        let scales = match scheme.granularity {
            Granularity::Tensor => {
                return Some(vec![TensorPart::new(format!("{}.weight", weight.module), rows, Some(columns))]);
            }
            Granularity::Block if source.info(scale)?.shape.len() != 2 => return None,
            Granularity::Block => {
                TensorPart::new(scale.clone(), Axis::of_groups(0, *scheme), Axis::of_groups(1, *scheme))
            }
            Granularity::Group(_) | Granularity::Channel => {
                TensorPart::new(scale.clone(), rows, Axis::of_groups(1, *scheme))
            }
        };
        source.info(scale)?;
        Some(vec![TensorPart::new(format!("{}.weight", weight.module), rows, Some(columns)), scales])
    }

    fn zeros(&self, _source: &dyn TensorSource, _weight: PackedWeight<'_>) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn read(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<QuantizedTensor> {
        self.tensors(source, weight)?;
        let module = self.module(weight.module)?;
        let name = format!("{}.weight", weight.module);
        let codes = match module.scheme.float_format() {
            Some(FloatFormat::E2m1) => unpack_nibbles(&source.read(&name)?)?,
            _ => read_numbers(source, &name, FloatFormat::E4m3)?,
        };
        let stored = match source.require(&module.scale)?.dtype {
            Dtype::F8E8M0 | Dtype::U8 => {
                let codes = source.read(&module.scale)?;
                collected(codes.len(), codes.into_iter().map(e8m0_value), "the scales of a weight")?
            }
            _ => source.read_f32(&module.scale)?,
        };
        require_finite(source.location(&module.scale), &module.scale, &stored)?;
        require_no_sign(source, &module.scale, &stored)?;
        let scales = match module.scheme.granularity {
            Granularity::Group(_) => stored,
            of => QuantizedTensor::spread_scales(&stored, weight.shape, of),
        };
        let input = match &module.input {
            Some(name) => Some(StaticScale { scale: read_positive(source, name)?, zero: 0 }),
            None => None,
        };
        let tensor = QuantizedTensor {
            shape: weight.shape,
            scheme: module.scheme,
            codes,
            scales,
            scale_dtype: self.scale_dtype(source, weight.module)?,
            zeros: None,
            levels: None,
            global: None,
            input,
            input_order: None,
        };
        tensor.view()?;
        Ok(tensor)
    }
}
