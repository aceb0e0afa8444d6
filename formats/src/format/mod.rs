//! Checkpoint formats: conversion of a [`QuantizedTensor`] to bytes that other engines load, and back.
//!
//! Everything that an engine's layout requires is behind [`Container`]. To add a format, add a file here and an entry
//! in [`CONTAINERS`].

mod awq;
mod bits;
mod checks;
mod compressed_tensors;
mod gptq;
mod input_order;
pub mod loaders;
mod modelopt;
pub mod mxfp4;
mod native_fp8;
mod nibbles;
mod numbers;
mod parts;
mod qserve;
mod quantized;

use std::collections::BTreeMap;

use serde_json::Value;

use crate::checkpoint::{Dtype, TensorSource, TensorSpec};
use crate::names::unknown;
use crate::quantize::QuantizedTensor;
use crate::scheme::{ActivationScheme, CachePart, LinearScheme};
use crate::{Error, Result};

pub use awq::AutoAwq;
pub use bits::{WordCount, pack_rows, pack_words, unpack_rows, unpack_words, words_for};
pub use compressed_tensors::CompressedTensors;
pub use gptq::GptqV1;
pub use loaders::{Loader, LoaderRule};
pub use modelopt::ModelOpt;
pub use numbers::read_positive;
pub use parts::{Axis, Contents, TensorPart};
pub use qserve::QServe;
pub use quantized::{LinearInfo, QuantizedCheckpoint, quantization_settings};

/// Linears that engines run as one matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FusedLinears {
    /// The name that engines give the fused linear.
    pub name: String,
    /// Names of the linears that are fused, in order.
    pub parts: Vec<String>,
    /// Names of further parts of the engines' fused linear that the checkpoint does not have, because they equal one
    /// of `parts`, such as the values of a layer whose keys are also the values.
    pub absent: Vec<String>,
}

/// The position of a decoder within a larger model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WrapperNames {
    /// Outermost modules outside the decoder, all float: `visual`, `multi_modal_projector`.
    pub outside: Vec<String>,
    /// Name prefixes of the decoder's modules in the file, and the prefixes that loaders with different module names
    /// use instead: `("language_model.model.", "model.language_model.")`.
    pub renamed: Vec<(&'static str, &'static str)>,
}

impl WrapperNames {
    /// Returns regular expressions for all modules outside the decoder, for loaders that match from the start of a
    /// name. They also match below `model.`, where some loaders have these modules.
    pub fn outside_patterns(&self) -> impl Iterator<Item = String> {
        self.outside.iter().map(|module| format!(r"(model\.)?{}\..*", regex::escape(module)))
    }
}

/// The content of a checkpoint's quantization configuration: the scheme of every module.
#[derive(Debug, Clone, Default)]
pub struct ModuleSchemes<'a> {
    /// Quantized linears by module name (`model.layers.0.mlp.up_proj`), in model order.
    pub quantized: Vec<(&'a str, LinearScheme)>,
    /// Linears that stay float, in model order, including `lm_head`.
    pub float: Vec<&'a str>,
    /// Linears that engines run as one matrix, in model order.
    pub fused: &'a [FusedLinears],
    /// The head, if it is quantized.
    pub head: Option<&'a str>,
    /// The embedding's scheme, if it is quantized.
    pub embedding: Option<LinearScheme>,
    /// `[n, k]` of the quantized linears, by module name.
    pub shapes: BTreeMap<&'a str, [usize; 2]>,
    /// Whether keys and values are cached in FP8, with scales stored next to the weights.
    pub fp8_cache: bool,
    /// The dtypes of unquantized tensors, each once.
    pub float_dtypes: Vec<Dtype>,
    /// The larger model, if the decoder is only a part of it.
    pub wrapper: Option<&'a WrapperNames>,
}

impl<'a> ModuleSchemes<'a> {
    /// All names that loaders may use for these modules: their own names, those of fused linears that consist of them,
    /// and the [renamed](WrapperNames::renamed) ones.
    pub fn all_names(&self, modules: &[&str]) -> Vec<String> {
        let mut names: Vec<String> =
            modules.iter().copied().chain(self.fused_of(modules)).map(str::to_owned).collect();
        let renamed = self.wrapper.iter().flat_map(|wrapper| &wrapper.renamed);
        let others = renamed.flat_map(|(stored, module)| {
            names.iter().filter_map(move |name| Some(format!("{module}{}", name.strip_prefix(stored)?)))
        });
        let others: Vec<String> = others.collect();
        names.extend(others);
        names
    }

    /// The modules outside the decoder.
    pub fn outside(&self) -> &[String] {
        self.wrapper.map_or(&[], |wrapper| &wrapper.outside)
    }

    /// Returns the engine names of the fused linears whose parts are all among `modules`, and the names of their absent
    /// parts. Engines that do not know the parts of a fused linear look for its own name; those that do know them
    /// require all parts to be listed.
    pub fn fused_of(&self, modules: &[&str]) -> Vec<&'a str> {
        let modules: std::collections::BTreeSet<&str> = modules.iter().copied().collect();
        let whole = |fused: &&FusedLinears| fused.parts.iter().all(|part| modules.contains(part.as_str()));
        let names = |fused: &'a FusedLinears| std::iter::once(&fused.name).chain(&fused.absent);
        self.fused.iter().filter(whole).flat_map(names).map(String::as_str).collect()
    }
}

/// A format of quantized checkpoints.
///
/// A format of your own needs this trait for writing, and a [`PackedReader`] for reading:
///
/// ```
/// use quant_formats::checkpoint::{Dtype, TensorSpec};
/// use quant_formats::format::{Container, LoaderRule, ModuleSchemes, PackedReader};
/// use quant_formats::quantize::{QuantizedTensor, quantize_rtn};
/// use quant_formats::scheme::LinearScheme;
/// use quant_formats::{Error, Result};
/// use serde_json::{Value, json};
///
/// /// Codes as bytes in `MODULE.codes`, with scales in single precision in `MODULE.scales`.
/// #[derive(Debug)]
/// struct Bytes;
///
/// impl Container for Bytes {
///     fn name(&self) -> &'static str {
///         "bytes"
///     }
///
///     fn summary(&self) -> &'static str {
///         "a byte for each code"
///     }
///
///     fn layout(
///         &self,
///         module: &str,
///         [n, k]: [usize; 2],
///         scheme: LinearScheme,
///         _: Dtype,
///     ) -> Result<Vec<TensorSpec>> {
///         if !scheme.is_symmetric() {
///             return Err(Error::usage("`bytes` has no zero points", "choose a symmetric scheme"));
///         }
///         let groups = k / scheme.granularity.group_size(k);
///         let codes = TensorSpec::new(format!("{module}.codes"), Dtype::U8, [n, k]);
///         Ok(vec![codes, TensorSpec::new(format!("{module}.scales"), Dtype::F32, [n, groups])])
///     }
///
///     fn pack(&self, module: &str, tensor: &QuantizedTensor) -> Result<Vec<(TensorSpec, Vec<u8>)>> {
///         let specs = self.layout(module, tensor.shape, tensor.scheme, tensor.scale_dtype)?;
///         let scales = tensor.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
///         Ok(specs.into_iter().zip([tensor.codes.clone(), scales]).collect())
///     }
///
///     fn quantization_config(&self, schemes: &ModuleSchemes<'_>) -> Value {
///         json!({ "quant_method": "bytes", "linears": schemes.quantized.len() })
///     }
///
///     fn loader_rules(&self) -> &'static [LoaderRule] {
///         &[]
///     }
///
///     fn reader(&self, _: &Value) -> Result<Option<Box<dyn PackedReader>>, String> {
///         Ok(None) // checkpoints of this format can be written, but not read
///     }
/// }
///
/// let weight: Vec<f32> = (0..4 * 32).map(|i| (i as f32 * 0.7).sin()).collect();
/// let rounded = quantize_rtn("proj", &weight, [4, 32], "w8a16-g32-sym".parse()?, Dtype::F32, None)?;
/// let tensors = Bytes.pack("proj", &rounded)?;
/// assert_eq!(tensors[0].1, rounded.codes);
/// assert!(Bytes.layout("proj", [4, 32], "w8a16-g32-asym".parse()?, Dtype::F32).is_err());
/// # Ok::<(), Error>(())
/// ```
pub trait Container: std::fmt::Debug + Send + Sync {
    /// The name that `--format` takes.
    fn name(&self) -> &'static str;

    /// The `quant_method` in its configurations.
    fn quant_method(&self) -> &'static str {
        self.name()
    }

    /// A one-line summary for help and tables.
    fn summary(&self) -> &'static str;

    /// Whether grids with this number of bits are symmetric by default.
    fn symmetric_by_default(&self, _bits: u8) -> bool {
        true
    }

    /// The dtype in which scales are stored for weights of dtype `weight` quantized to this scheme.
    fn scale_dtype(&self, scheme: LinearScheme, weight: Dtype) -> Dtype {
        scheme.scale_dtype(weight)
    }

    /// Whether the two levels of scales of a progressive scheme are stored separately; other formats store their
    /// products.
    fn keeps_levels(&self) -> bool {
        false
    }

    /// Whether configurations specify the activations. Otherwise dynamic 8-bit activations become float.
    fn keeps_activations(&self) -> bool {
        true
    }

    /// Describes what this format loses of a linear quantized to this scheme, beyond the quantization error, in
    /// sentences for the user.
    fn loses(&self, scheme: LinearScheme, scale_dtype: Dtype) -> Vec<String> {
        let mut lost = Vec::new();
        let is_dynamic = matches!(scheme.activations, ActivationScheme::Token | ActivationScheme::Fp8Token);
        if is_dynamic && !self.keeps_activations() {
            lost.push(format!(
                "the {} format cannot describe quantized activations: engines will use float activations \
                instead of the 8-bit ones of {scheme}",
                self.name()
            ));
        }
        if !scheme.is_progressive() || self.keeps_levels() {
            return lost;
        }
        let bits = match scale_dtype {
            Dtype::F16 => "with a relative error of up to 2^-11",
            Dtype::Bf16 => "with a relative error of up to 2^-8",
            _ => "which is exact",
        };
        lost.push(format!(
            "each group scale is multiplied by its row scale into one {scale_dtype} scale, {bits}"
        ));
        lost.push(
            "kernels that convert weights to 8-bit integers need both scales, and cannot run this checkpoint"
                .to_owned(),
        );
        lost
    }

    /// The scheme in which a linear quantized to this scheme is stored: with one level of scales if the format does not
    /// [keep both](Self::keeps_levels), and with float activations in place of dynamic 8-bit ones if it does not [keep
    /// activations](Self::keeps_activations).
    fn stored_scheme(&self, scheme: LinearScheme) -> LinearScheme {
        let scheme = if self.keeps_levels() { scheme } else { scheme.flattened() };
        match scheme.activations {
            ActivationScheme::Token | ActivationScheme::Fp8Token if !self.keeps_activations() => {
                LinearScheme { activations: ActivationScheme::Float, ..scheme }
            }
            _ => scheme,
        }
    }

    /// The scheme in which an already quantized linear is stored: [`stored_scheme`](Self::stored_scheme), or an
    /// equivalent one.
    fn restated_scheme(&self, scheme: LinearScheme) -> LinearScheme {
        self.stored_scheme(scheme)
    }

    /// Checks that these schemes can be combined in one checkpoint.
    ///
    /// # Errors
    /// [`Error::Usage`] that names the conflicting modules.
    fn check(&self, _schemes: &ModuleSchemes<'_>) -> Result<()> {
        Ok(())
    }

    /// The specs of the tensors that store a linear of this shape.
    ///
    /// # Errors
    /// When the format cannot represent the scheme or the shape.
    fn layout(
        &self,
        module: &str,
        shape: [usize; 2],
        scheme: LinearScheme,
        scale_dtype: Dtype,
    ) -> Result<Vec<TensorSpec>>;

    /// The tensors of [`layout`](Self::layout) with their bytes, in the same order.
    ///
    /// # Errors
    /// See [`layout`](Self::layout).
    fn pack(&self, module: &str, tensor: &QuantizedTensor) -> Result<Vec<(TensorSpec, Vec<u8>)>>;

    /// Returns the spec of the tensor that holds the static FP8 scale of keys or values, given the linear that computes
    /// them. `None` if the format cannot store it.
    fn cache_scale(&self, _linear: &str, _part: CachePart) -> Option<TensorSpec> {
        None
    }

    /// The value of `quantization_config` in `config.json`.
    fn quantization_config(&self, schemes: &ModuleSchemes<'_>) -> Value;

    /// Files next to `config.json` that loaders of this format require.
    fn companion_files(&self, _schemes: &ModuleSchemes<'_>) -> Vec<(&'static str, Value)> {
        Vec::new()
    }

    /// The limitations of this format's loaders, with the versions of the loaders.
    fn loader_rules(&self) -> &'static [LoaderRule];

    /// Warnings about loaders that do not support these schemes, from all [rules](Self::loader_rules).
    fn warnings(&self, schemes: &ModuleSchemes<'_>) -> Vec<String> {
        self.loader_rules().iter().flat_map(|rule| rule.notes(schemes)).collect()
    }

    /// Returns a reader for checkpoints with this `quantization_config`; `None` if it describes a different format.
    ///
    /// # Errors
    /// When it describes this format but uses an unsupported feature: the reason, naming the key.
    fn reader(&self, quantization_config: &Value) -> Result<Option<Box<dyn PackedReader>>, String>;
}

/// A weight that is quantized according to a [`PackedReader`].
#[derive(Debug, Clone, Copy)]
pub struct PackedWeight<'a> {
    /// The module.
    pub module: &'a str,
    /// `[n, k]` according to the model.
    pub shape: [usize; 2],
    /// The weight's scheme.
    pub scheme: LinearScheme,
}

/// Reads quantized weights of one checkpoint back into logical order.
///
/// ```
/// use quant_formats::checkpoint::{Dtype, MemorySource};
/// use quant_formats::format::{CONTAINERS, ModuleSchemes, PackedWeight};
/// use quant_formats::quantize::quantize_rtn;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let weight: Vec<f32> = (0..64 * 128).map(|i| (i as f32 * 0.7).sin()).collect();
/// let scheme = "w4a16-g128-asym".parse()?;
/// let rounded = quantize_rtn("proj", &weight, [64, 128], scheme, Dtype::F16, None)?;
/// let schemes = ModuleSchemes { quantized: vec![("proj", scheme)], ..Default::default() };
/// let mut formats = Vec::new();
/// for container in CONTAINERS {
///     let Ok(tensors) = container.pack("proj", &rounded) else { continue };
///     let mut source = MemorySource::new();
///     for (spec, bytes) in tensors {
///         source.insert(&spec.name, spec.info.dtype, spec.info.shape.clone(), bytes)?;
///     }
///     let mut reader = container.reader(&container.quantization_config(&schemes))?.unwrap();
///     reader.survey(&source)?;
///     let stored = PackedWeight { module: "proj", shape: [64, 128], scheme: reader.scheme("proj").unwrap() };
///     assert_eq!(reader.read(&source, stored)?.codes, rounded.codes);
///     formats.push(container.name());
/// }
/// assert!(formats.contains(&"awq") && formats.contains(&"gptq"), "{formats:?}");
/// # Ok(())
/// # }
/// ```
pub trait PackedReader: Send + Sync {
    /// Examines the tensors, if the configuration alone does not determine the schemes. Called once, before any other
    /// method.
    ///
    /// # Errors
    /// When they cannot be read.
    fn survey(&mut self, _source: &dyn TensorSource) -> Result<()> {
        Ok(())
    }

    /// The endings of the names of tensors that hold a module's codes, with the dot: a tensor `MODULE.qweight` belongs
    /// to the linear `MODULE`. Modules with other tensors may have these endings too.
    fn code_suffixes(&self) -> &'static [&'static str];

    /// The endings of the names of other tensors that only a quantized linear has, such as `.scales`. If the codes of
    /// such a linear are missing, that is reported. None by default.
    fn parameter_suffixes(&self) -> &'static [&'static str] {
        &[]
    }

    /// The scheme of a linear, or `None` if it is float.
    fn scheme(&self, module: &str) -> Option<LinearScheme>;

    /// The scheme of the embedding module of this name, or `None` if it is float.
    fn embedding_scheme(&self, _module: &str) -> Option<LinearScheme> {
        None
    }

    /// Whether keys and values are cached in FP8, with scales stored next to the weights.
    fn has_fp8_cache(&self) -> bool {
        false
    }

    /// The parts of the configuration that are not followed, in sentences for the user. The weights have the values that
    /// the checkpoint stores in any case.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns the dtype of a quantized module's scales.
    ///
    /// # Errors
    /// When the module has no scales.
    fn scale_dtype(&self, source: &dyn TensorSource, module: &str) -> Result<Dtype>;

    /// The shape `[n, k]` of a linear's weight according to its tensors, for callers without a model; `None` if the
    /// linear has no codes.
    ///
    /// # Errors
    /// When the tensor that determines it is missing, has an invalid shape, or cannot be read.
    fn shape(&self, source: &dyn TensorSource, module: &str) -> Result<Option<[usize; 2]>>;

    /// The tensors that hold a weight, checked to exist with the dtype and shape that the scheme implies.
    ///
    /// # Errors
    /// When one is missing, or its dtype or shape differs.
    fn tensors(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Vec<TensorSpec>>;

    /// How the tensors of a weight are divided among its outputs and inputs, so that a part of the weight can be read
    /// alone. Tensors that every part needs whole are left out. `None`, the default, if parts cannot be read alone;
    /// then the whole weight is read.
    fn parts(&self, _source: &dyn TensorSource, _weight: PackedWeight<'_>) -> Option<Vec<TensorPart>> {
        None
    }

    /// The [order of inputs](QuantizedTensor::input_order) of the weight that [`read`](Self::read) returns, if its groups
    /// of inputs are not adjacent in the file. The default is for formats in which they always are.
    ///
    /// # Errors
    /// See [`read`](Self::read).
    fn input_order(&self, _source: &dyn TensorSource, _weight: PackedWeight<'_>) -> Result<Option<Vec<u32>>> {
        Ok(None)
    }

    /// The zero points of a weight, `[n, groups]`, if its scheme has any.
    ///
    /// # Errors
    /// See [`tensors`](Self::tensors).
    fn zeros(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Option<Vec<u8>>>;

    /// Reads the quantized weight.
    ///
    /// # Errors
    /// See [`tensors`](Self::tensors); also when the contents are invalid.
    fn read(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<QuantizedTensor>;
}

/// The formats that this version writes and reads.
///
/// ```
/// use quant_formats::format::CONTAINERS;
///
/// let names: Vec<_> = CONTAINERS.iter().map(|container| container.name()).collect();
/// assert!(names.contains(&"awq") && names.contains(&"compressed-tensors"));
/// ```
pub static CONTAINERS: &[&dyn Container] = &[&CompressedTensors, &AutoAwq, &GptqV1, &QServe, &ModelOpt];

/// The function that creates a format's reader, as [`Container::reader`].
type ReaderOf = fn(&Value) -> Result<Option<Box<dyn PackedReader>>, String>;

/// The formats that this version only reads: their `quant_method`, and their reader.
static READ_ONLY: &[(&str, ReaderOf)] =
    &[(native_fp8::METHOD, native_fp8::reader), (mxfp4::METHOD, mxfp4::reader)];

/// Returns the `quant_method` of each format that this version reads.
///
/// ```
/// let methods: Vec<_> = quant_formats::format::quant_methods().collect();
/// assert!(methods.contains(&"compressed-tensors") && methods.contains(&"fp8"), "{methods:?}");
/// ```
pub fn quant_methods() -> impl Iterator<Item = &'static str> {
    CONTAINERS.iter().map(|c| c.quant_method()).chain(READ_ONLY.iter().map(|(method, _)| *method))
}

/// Returns the format of that name.
///
/// # Errors
/// When no format has that name; the message lists the known names.
pub fn container(name: &str) -> Result<&'static dyn Container> {
    CONTAINERS.iter().copied().find(|c| c.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
        let known: Vec<_> = CONTAINERS.iter().map(|c| c.name()).collect();
        unknown("format", name, "formats", &known)
    })
}

/// Returns the format whose configurations have this `quant_method`, if there is one.
pub fn container_of(quant_method: &str) -> Option<&'static dyn Container> {
    CONTAINERS.iter().copied().find(|c| c.quant_method() == quant_method)
}

/// Returns the formats of those names.
///
/// # Errors
/// See [`container`]; also when the list is empty or has a duplicate.
pub fn containers(names: &[String]) -> Result<Vec<&'static dyn Container>> {
    containers_with(names, container)
}

/// Returns the formats of those names, each looked up with `find`.
///
/// # Errors
/// Those of `find`; also when the list is empty or has a duplicate.
pub fn containers_with<T>(names: &[String], find: impl Fn(&str) -> Result<T>) -> Result<Vec<T>> {
    const REMEDY: &str = "list each format once";
    if names.is_empty() {
        return Err(Error::usage("no format is given", REMEDY));
    }
    for (i, name) in names.iter().enumerate() {
        if names[..i].iter().any(|other| other.eq_ignore_ascii_case(name)) {
            return Err(Error::usage(format!("format `{name}` is listed twice"), REMEDY));
        }
    }
    names.iter().map(|name| find(name)).collect()
}

/// Returns a reader for a checkpoint whose `config.json` has this `quantization_config`.
///
/// # Errors
/// When the format is unknown, or its reader does not support the checkpoint: the reason, with the key.
pub fn reader(quantization_config: &Value) -> Result<Box<dyn PackedReader>, String> {
    reader_with(quantization_config, &[])
}

/// [`reader`] with further formats, which take precedence.
///
/// # Errors
/// As [`reader`].
pub fn reader_with(
    quantization_config: &Value,
    containers: &[&dyn Container],
) -> Result<Box<dyn PackedReader>, String> {
    for container in containers.iter().chain(CONTAINERS) {
        if let Some(reader) = container.reader(quantization_config)? {
            return Ok(reader);
        }
    }
    for (_, reader) in READ_ONLY {
        if let Some(reader) = reader(quantization_config)? {
            return Ok(reader);
        }
    }
    match quantization_config.get("quant_method").and_then(Value::as_str) {
        Some(method) => {
            Err(format!("`quantization_config.quant_method` is {method}, which is not supported"))
        }
        None => Err("`quantization_config.quant_method` is missing or not a string".into()),
    }
}
