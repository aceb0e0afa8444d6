//! Containers: how a [`QuantizedTensor`] becomes bytes that other engines load, and back.
//!
//! Everything an engine's layout dictates (keys, nibble order, packing direction) lives behind
//! [`Container`]; adding one is a file here and a line in [`CONTAINERS`].

mod awq;
mod bits;
mod compressed_tensors;
mod gptq;
mod modelopt;
pub mod mxfp4;
mod native_fp8;
mod nibbles;
mod numbers;
mod qserve;
mod quantized;

use std::collections::BTreeMap;

use serde_json::Value;

use crate::checkpoint::{Dtype, TensorSource, TensorSpec};
use crate::quantize::QuantizedTensor;
use crate::scheme::{ActivationScheme, CachePart, LinearScheme};
use crate::{Error, Result};

pub use awq::AutoAwq;
pub use bits::{WordCount, pack_rows, pack_words, unpack_rows, unpack_words, words_for};
pub use compressed_tensors::CompressedTensors;
pub use gptq::GptqV1;
pub use modelopt::ModelOpt;
pub use numbers::read_positive;
pub use qserve::QServe;
pub use quantized::{QuantizedCheckpoint, QuantizedLinear, quantization_settings};

/// Linears that engines run as one matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FusedLinears {
    /// The name that engines give it.
    pub name: String,
    /// Its parts by name, in order.
    pub parts: Vec<String>,
}

/// What of a larger model a decoder is a part of, as far as configurations must name it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WrapperNames {
    /// Outermost modules beside the decoder that may hold linears, all float: `visual`, `multi_modal_projector`.
    pub outside: Vec<String>,
    /// What names of the decoder's modules begin with in the file, and what in the modules of readers that have
    /// others: `("language_model.model.", "model.language_model.")`.
    pub renamed: Vec<(&'static str, &'static str)>,
}

impl WrapperNames {
    /// Expressions for all modules beside the decoder, for readers that match from the start of a name. Some readers
    /// have them below `model.`.
    pub fn outside_patterns(&self) -> impl Iterator<Item = String> {
        self.outside.iter().map(|module| format!(r"(model\.)?{}\..*", regex::escape(module)))
    }
}

/// What a checkpoint's configuration must say: which modules are quantized how.
#[derive(Debug, Clone, Default)]
pub struct ModuleSchemes<'a> {
    /// Quantized linears by module name (`model.layers.0.mlp.up_proj`), in model order.
    pub quantized: Vec<(&'a str, LinearScheme)>,
    /// Linears that stay float, in model order (`lm_head` among them).
    pub float: Vec<&'a str>,
    /// Linears that engines run as one, in model order.
    pub fused: &'a [FusedLinears],
    /// The head, where it is among the quantized.
    pub head: Option<&'a str>,
    /// The embedding's scheme, where it is quantized.
    pub embedding: Option<LinearScheme>,
    /// `[n, k]` of the quantized linears, by module name.
    pub shapes: BTreeMap<&'a str, [usize; 2]>,
    /// Whether keys and values are to be cached in FP8, with the scales that stand beside the weights.
    pub fp8_cache: bool,
    /// The types of tensors that are not quantized, each once.
    pub float_dtypes: Vec<Dtype>,
    /// What the decoder is a part of, where it is not the whole model.
    pub wrapper: Option<&'a WrapperNames>,
}

impl ModuleSchemes<'_> {
    /// All names that readers may have for these modules: their own, those of fused linears of which they are the
    /// parts, and those in the modules of readers that are called otherwise than the tensors of the file.
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

    /// The modules beside the decoder.
    pub fn outside(&self) -> &[String] {
        self.wrapper.map_or(&[], |wrapper| &wrapper.outside)
    }

    /// The names that engines give to fused linears of which all parts are among `modules`. Engines
    /// that do not know which parts a fused name stands for look for that name itself.
    pub fn fused_of(&self, modules: &[&str]) -> Vec<&str> {
        let modules: std::collections::BTreeSet<&str> = modules.iter().copied().collect();
        let whole = |fused: &&FusedLinears| fused.parts.iter().all(|part| modules.contains(part.as_str()));
        self.fused.iter().filter(whole).map(|fused| fused.name.as_str()).collect()
    }
}

/// A container for quantized checkpoints.
pub trait Container: std::fmt::Debug + Send + Sync {
    /// The name that `--format` takes.
    fn name(&self) -> &'static str;

    /// What its configurations say as `quant_method`.
    fn quant_method(&self) -> &'static str {
        self.name()
    }

    /// One line for help and tables.
    fn summary(&self) -> &'static str;

    /// Whether grids of so many bits are symmetric where the user says nothing.
    fn symmetric_by_default(&self, _bits: u8) -> bool {
        true
    }

    /// The type that scales are stored in, of weights of some type that are quantized to this scheme.
    fn scale_dtype(&self, scheme: LinearScheme, weight: Dtype) -> Dtype {
        scheme.scale_dtype(weight)
    }

    /// Whether the two levels of scales of a progressive scheme are written apart; in other containers their products
    /// are.
    fn keeps_levels(&self) -> bool {
        false
    }

    /// Whether configurations say how the inputs of linears are rounded; in other containers they stay float.
    fn keeps_activations(&self) -> bool {
        true
    }

    /// What is lost of a linear that is quantized to this scheme, beyond what quantizing it costs, when its scales are
    /// written in this type: sentences for the user, none where all of it is kept.
    fn loses(&self, scheme: LinearScheme, scale_dtype: Dtype) -> Vec<String> {
        let mut lost = Vec::new();
        let is_dynamic = matches!(scheme.activations, ActivationScheme::Token | ActivationScheme::Fp8Token);
        if is_dynamic && !self.keeps_activations() {
            lost.push(format!(
                "the {} format says nothing of activations: engines leave them float, where {scheme} has 8 bits",
                self.name()
            ));
        }
        if !scheme.is_progressive() || self.keeps_levels() {
            return lost;
        }
        let bits = match scale_dtype {
            Dtype::F16 => "up to 2^-11 of it off",
            Dtype::Bf16 => "up to 2^-8 of it off",
            _ => "exact",
        };
        lost.push(format!("the two levels of scales become one, their product in {scale_dtype}: {bits}"));
        lost.push(
            "kernels that reach integers of 8 bits before they meet a float need both levels, and cannot run it"
                .to_owned(),
        );
        lost
    }

    /// How a linear that is quantized to this scheme is written. Static activations are never left out: what was found
    /// for them would be gone.
    fn stored_scheme(&self, scheme: LinearScheme) -> LinearScheme {
        let scheme = if self.keeps_levels() { scheme } else { scheme.flattened() };
        match scheme.activations {
            ActivationScheme::Token | ActivationScheme::Fp8Token if !self.keeps_activations() => {
                LinearScheme { activations: ActivationScheme::Float, ..scheme }
            }
            _ => scheme,
        }
    }

    /// How a linear that is quantized to this scheme already is written: as [`stored_scheme`](Self::stored_scheme) says, or
    /// in other words that say the same.
    fn restated_scheme(&self, scheme: LinearScheme) -> LinearScheme {
        self.stored_scheme(scheme)
    }

    /// Whether these schemes can stand in one checkpoint.
    ///
    /// # Errors
    /// [`Error::Usage`] naming modules that cannot.
    fn check(&self, _schemes: &ModuleSchemes<'_>) -> Result<()> {
        Ok(())
    }

    /// The tensors that a linear of this shape becomes, before it is quantized.
    ///
    /// # Errors
    /// When the container cannot express the scheme or the shape.
    fn layout(
        &self,
        module: &str,
        shape: [usize; 2],
        scheme: LinearScheme,
        scale_dtype: Dtype,
    ) -> Result<Vec<TensorSpec>>;

    /// The bytes of those tensors, in the same order.
    ///
    /// # Errors
    /// As [`layout`](Self::layout).
    fn pack(&self, module: &str, tensor: &QuantizedTensor) -> Result<Vec<(TensorSpec, Vec<u8>)>>;

    /// The tensor that holds the static FP8 scale of keys or values, by the linear that they come from; `None` where the
    /// container has no place for it.
    fn cache_scale(&self, _linear: &str, _part: CachePart) -> Option<TensorSpec> {
        None
    }

    /// The value of `quantization_config` in `config.json`.
    fn quantization_config(&self, schemes: &ModuleSchemes<'_>) -> Value;

    /// Files beside `config.json` that readers of this container look for.
    fn companion_files(&self, _schemes: &ModuleSchemes<'_>) -> Vec<(&'static str, Value)> {
        Vec::new()
    }

    /// Notes for the user on readers that cannot load these schemes.
    fn warnings(&self, schemes: &ModuleSchemes<'_>) -> Vec<String>;

    /// A reader for checkpoints with this `quantization_config`, if it is of this container.
    ///
    /// # Errors
    /// When it is, but uses what cannot be read: the reason, naming the key.
    fn reader(&self, quantization_config: &Value) -> Result<Option<Box<dyn PackedReader>>, String>;
}

/// A weight of a checkpoint that a [`PackedReader`] says is quantized.
#[derive(Debug, Clone, Copy)]
pub struct PackedWeight<'a> {
    /// The module.
    pub module: &'a str,
    /// `[n, k]`, as the model implies it.
    pub shape: [usize; 2],
    /// How it is quantized.
    pub scheme: LinearScheme,
}

/// Reads quantized weights of one checkpoint back into logical order.
pub trait PackedReader: Send + Sync {
    /// Looks at the tensors, where the configuration alone does not say which modules are quantized and how. Called
    /// once, before anything else.
    ///
    /// # Errors
    /// When they cannot be read.
    fn survey(&mut self, _source: &dyn TensorSource) -> Result<()> {
        Ok(())
    }

    /// The scheme of a linear, or `None` if it is stored float.
    fn scheme(&self, module: &str) -> Option<LinearScheme>;

    /// The scheme of the embedding, a module of this name, or `None` if it is stored float.
    fn embedding_scheme(&self, _module: &str) -> Option<LinearScheme> {
        None
    }

    /// Whether keys and values are cached in FP8, with the scales that stand beside the weights.
    fn has_fp8_cache(&self) -> bool {
        false
    }

    /// The type that a quantized module's scales are stored in.
    ///
    /// # Errors
    /// When there are none.
    fn scale_dtype(&self, source: &dyn TensorSource, module: &str) -> Result<Dtype>;

    /// The shape `[n, k]` of a linear's weight as its tensors have it, for callers that have no model to ask; `None` where
    /// there are no codes of such a linear.
    ///
    /// # Errors
    /// When a tensor that says it is missing, is not of a shape that it can have, or cannot be read.
    fn shape(&self, source: &dyn TensorSource, module: &str) -> Result<Option<[usize; 2]>>;

    /// The tensors that hold a weight, each there with the type and shape that its scheme implies.
    ///
    /// # Errors
    /// When one is missing, or its type or shape is another.
    fn tensors(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Vec<TensorSpec>>;

    /// The zeros of a weight, `[n, groups]`, where its scheme has any.
    ///
    /// # Errors
    /// As [`tensors`](Self::tensors).
    fn zeros(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Option<Vec<u8>>>;

    /// The quantized weight.
    ///
    /// # Errors
    /// As [`tensors`](Self::tensors), and when contents are not what they should be.
    fn read(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<QuantizedTensor>;
}

/// The containers this version writes and reads.
///
/// ```
/// use quant_formats::format::CONTAINERS;
///
/// let names: Vec<_> = CONTAINERS.iter().map(|container| container.name()).collect();
/// assert!(names.contains(&"awq") && names.contains(&"compressed-tensors"));
/// ```
pub static CONTAINERS: &[&dyn Container] = &[&CompressedTensors, &AutoAwq, &GptqV1, &QServe, &ModelOpt];

/// The container of that name.
///
/// # Errors
/// When no container has it; the message lists those that exist.
pub fn container(name: &str) -> Result<&'static dyn Container> {
    CONTAINERS.iter().copied().find(|c| c.name() == name).ok_or_else(|| {
        let known: Vec<_> = CONTAINERS.iter().map(|c| c.name()).collect();
        Error::usage(format!("unknown format `{name}`"), format!("known formats: {}", known.join(", ")))
    })
}

/// The container whose configurations say this as `quant_method`, if there is one.
pub fn container_of(quant_method: &str) -> Option<&'static dyn Container> {
    CONTAINERS.iter().copied().find(|c| c.quant_method() == quant_method)
}

/// The containers of those names, each once.
///
/// # Errors
/// As [`container`], and when the list is empty or names one twice.
pub fn containers(names: &[String]) -> Result<Vec<&'static dyn Container>> {
    const REMEDY: &str = "name each container once";
    if names.is_empty() {
        return Err(Error::usage("no format is given", REMEDY));
    }
    for (i, name) in names.iter().enumerate() {
        if names[..i].contains(name) {
            return Err(Error::usage(format!("format `{name}` is named twice"), REMEDY));
        }
    }
    names.iter().map(|name| container(name)).collect()
}

/// A reader for a checkpoint whose `config.json` has this `quantization_config`.
///
/// # Errors
/// When no container recognizes it, or the one that does cannot read it: the reason, with the key.
pub fn reader(quantization_config: &Value) -> Result<Box<dyn PackedReader>, String> {
    for container in CONTAINERS {
        if let Some(reader) = container.reader(quantization_config)? {
            return Ok(reader);
        }
    }
    if let Some(reader) = native_fp8::reader(quantization_config)? {
        return Ok(Box::new(reader));
    }
    if let Some(reader) = mxfp4::reader(quantization_config) {
        return Ok(Box::new(reader));
    }
    let method = quantization_config.get("quant_method").and_then(Value::as_str).unwrap_or("none stated");
    Err(format!("`quantization_config.quant_method` is {method}"))
}
