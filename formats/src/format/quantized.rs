//! A quantized checkpoint for an engine that has a model of its own: which linears are quantized, and each of them.
//!
//! Nothing here knows a family of models. Names, types and shapes of the tensors say which modules are linears.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::{PackedReader, PackedWeight, reader};
use crate::checkpoint::{ConfigFields, ModelDirectory, TensorSource};
use crate::quantize::QuantizedTensor;
use crate::scheme::LinearScheme;
use crate::{Error, Result};

/// The key of `config.json` that says how a checkpoint is quantized.
const KEY: &str = "quantization_config";
/// Where a model of several towers has the configuration of its text tower.
const TEXT_CONFIG: &str = "text_config";
/// What follows the name of a module in the name of the tensor that holds its codes.
const CODES: [&str; 3] = [".weight", ".qweight", ".weight_packed"];
/// In names of embeddings, which are looked up and not multiplied.
const EMBEDDINGS: [&str; 2] = ["embed", "wte"];

/// The `quantization_config`: of the model, or of its text tower, which some exporters write it into.
///
/// # Errors
/// [`Error::Config`] when there are two and they differ.
pub fn quantization_settings<'a>(config: &ConfigFields<'a>) -> Result<Option<&'a Value>> {
    let nested = config.get(TEXT_CONFIG).and_then(Value::as_object);
    let nested = nested.and_then(|text| text.get(KEY)).filter(|settings| !settings.is_null());
    match (config.get(KEY), nested) {
        (Some(outer), Some(inner)) if outer != inner => {
            Err(config.error(KEY, format!("differs from the one in `{TEXT_CONFIG}`")))
        }
        (outer, inner) => Ok(outer.or(inner)),
    }
}

/// A linear whose weight is quantized.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuantizedLinear {
    /// The module: `model.layers.0.mlp.down_proj`.
    pub name: String,
    /// `[n, k]`: output and input features.
    pub shape: [usize; 2],
    /// How it is quantized.
    pub scheme: LinearScheme,
}

/// A checkpoint whose linears are quantized, in any container that this crate reads: AWQ, GPTQ, compressed-tensors,
/// QServe, ModelOpt, FP8.
///
/// ```
/// use std::sync::Arc;
/// use quant_formats::checkpoint::{Dtype, MemorySource};
/// use quant_formats::format::{AutoAwq, Container, ModuleSchemes, QuantizedCheckpoint};
/// use quant_formats::quantize::quantize_rtn;
/// use quant_kernels_cpu::{FloatRows, IsaToken, RowLayout, Serial};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // A checkpoint with one linear of 16 outputs and 64 inputs; from a directory: QuantizedCheckpoint::open(path).
/// let weight: Vec<f32> = (0..16 * 64).map(|i| (i as f32 * 0.7).sin()).collect();
/// let scheme = "w4a16-g32-asym".parse()?;
/// let rounded = quantize_rtn("proj", &weight, [16, 64], scheme, Dtype::F16, None)?;
/// let mut source = MemorySource::new();
/// for (spec, bytes) in AutoAwq.pack("proj", &rounded)? {
///     source.insert(&spec.name, spec.info.dtype, spec.info.shape.clone(), bytes)?;
/// }
/// let schemes = ModuleSchemes { quantized: vec![("proj", scheme)], ..Default::default() };
/// let settings = AutoAwq.quantization_config(&schemes);
///
/// let checkpoint = QuantizedCheckpoint::new(Arc::new(source), "config.json".as_ref(), &settings)?;
/// let linear = &checkpoint.linears()[0];
/// assert_eq!((linear.name.as_str(), linear.shape), ("proj", [16, 64]));
///
/// // Packed once for the kernels of this processor, and multiplied with two rows.
/// let packed = checkpoint.read(&linear.name)?.pack(None, &Serial)?;
/// let mut rows = FloatRows::new(IsaToken::detect());
/// rows.pack(&[0.5f32; 2 * 64], RowLayout::of(packed.layout()), &Serial)?;
/// let mut out = vec![0.0; 2 * 16];
/// packed.multiply_float(&rows, &mut out, &Serial)?;
/// let exact: f32 = rounded.dequantize()?[..64].iter().map(|w| w * 0.5).sum();
/// assert!((out[0] - exact).abs() < 1e-3);
/// # Ok(())
/// # }
/// ```
pub struct QuantizedCheckpoint {
    source: Arc<dyn TensorSource>,
    config: Map<String, Value>,
    reader: Box<dyn PackedReader>,
    linears: Vec<QuantizedLinear>,
    warnings: Vec<String>,
}

impl fmt::Debug for QuantizedCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuantizedCheckpoint").field("linears", &self.linears).finish_non_exhaustive()
    }
}

impl QuantizedCheckpoint {
    /// Opens a model directory: `config.json`, and safetensors in one file or in shards. Headers and the types and shapes
    /// of all packed tensors are checked; no weight is read.
    ///
    /// # Errors
    /// - Those of [`ModelDirectory::open`].
    /// - [`Error::UnsupportedQuantization`]: the checkpoint is not quantized, or in a way that cannot be read.
    /// - [`Error::MissingTensor`], [`Error::TensorShape`], [`Error::TensorDtype`]: the tensors of a linear do not belong
    ///   together.
    pub fn open(path: &Path) -> Result<Self> {
        let directory = ModelDirectory::open(path)?;
        let settings = quantization_settings(&directory.fields())?;
        let settings = settings.ok_or_else(|| Error::UnsupportedQuantization {
            path: directory.config_path().to_owned(),
            reason: format!("has no `{KEY}`: the checkpoint is not quantized"),
        })?;
        let source: Arc<dyn TensorSource> = directory.source().clone();
        let opened = Self::new(source, directory.config_path(), settings)?;
        let (config, warnings) = (directory.config().clone(), directory.warnings().to_vec());
        Ok(Self { config, warnings, ..opened })
    }

    /// A checkpoint from its tensors and its `quantization_config`; `path` is for messages.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn new(source: Arc<dyn TensorSource>, path: &Path, settings: &Value) -> Result<Self> {
        let unsupported = |reason| Error::UnsupportedQuantization { path: path.to_owned(), reason };
        Self::with_reader(source, reader(settings).map_err(unsupported)?)
    }

    /// The same with your own reader, for a container that this crate does not know.
    ///
    /// # Errors
    /// Those of the reader.
    pub fn with_reader(source: Arc<dyn TensorSource>, mut reader: Box<dyn PackedReader>) -> Result<Self> {
        reader.survey(source.as_ref())?;
        let linears = linears(source.as_ref(), reader.as_ref())?;
        Ok(Self { source, config: Map::new(), reader, linears, warnings: Vec::new() })
    }

    /// The quantized linears, sorted by name. Experts are linears of their own; embeddings are not among them, and
    /// linears that stay float are found in [`source`](Self::source).
    pub fn linears(&self) -> &[QuantizedLinear] {
        &self.linears
    }

    /// The linear of that name, if it is quantized.
    pub fn linear(&self, name: &str) -> Option<&QuantizedLinear> {
        let at = self.linears.binary_search_by(|linear| linear.name.as_str().cmp(name)).ok()?;
        Some(&self.linears[at])
    }

    /// Reads a linear's weight: codes, scales and zeros in the order of the matrix, whatever order the file has them in.
    /// Memory: a byte for each weight, and 4 for each scale.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] when no quantized linear has that name; otherwise when the file cannot be read, or holds
    /// what the container does not allow.
    pub fn read(&self, name: &str) -> Result<QuantizedTensor> {
        let Some(QuantizedLinear { shape, scheme, .. }) = self.linear(name) else {
            let tensor = format!("{name}.weight");
            return Err(Error::MissingTensor { path: self.source.location(&tensor), tensor });
        };
        self.reader.read(self.source.as_ref(), PackedWeight { module: name, shape: *shape, scheme: *scheme })
    }

    /// A linear's bias `[n]`, if it has one.
    ///
    /// # Errors
    /// When it cannot be read, is not of a float type, or holds NaN or infinity.
    pub fn bias(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let name = format!("{name}.bias");
        self.source.info(&name).map(|_| self.source.read_f32(&name)).transpose()
    }

    /// All tensors: those that are not quantized are read here by name.
    pub fn source(&self) -> &dyn TensorSource {
        self.source.as_ref()
    }

    /// `config.json`; empty where the checkpoint was not opened from a directory.
    pub fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// Whether keys and values are meant to be cached in FP8.
    pub fn has_fp8_cache(&self) -> bool {
        self.reader.has_fp8_cache()
    }

    /// What is odd about the directory without making it unreadable, a line each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The file that holds a tensor, for messages.
    pub fn location(&self, tensor: &str) -> PathBuf {
        self.source.location(tensor)
    }
}

/// The modules whose codes are there and that the configuration says are quantized.
fn linears(source: &dyn TensorSource, reader: &dyn PackedReader) -> Result<Vec<QuantizedLinear>> {
    let mut found = Vec::new();
    for tensor in source.names() {
        let Some(module) = CODES.iter().find_map(|suffix| tensor.strip_suffix(suffix)) else { continue };
        let last = module.rsplit('.').next().unwrap_or(module);
        if EMBEDDINGS.iter().any(|part| last.contains(part)) {
            continue;
        }
        let Some(scheme) = reader.scheme(module) else { continue };
        let Some(shape) = reader.shape(source, module)? else { continue };
        reader.tensors(source, PackedWeight { module, shape, scheme })?;
        found.push(QuantizedLinear { name: module.to_owned(), shape, scheme });
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found.dedup_by(|a, b| a.name == b.name);
    Ok(found)
}
