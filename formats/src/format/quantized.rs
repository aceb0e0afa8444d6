//! A quantized checkpoint for an engine with its own model: which linears are quantized, and their weights. This works
//! without knowledge of model families.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::mxfp4::{self, ExpertReader, Experts};
use super::parts::{PartSource, check_range, common_multiple, divides, multiples, not_divided_by_inputs};
use super::{PackedReader, PackedWeight, reader};
use crate::checkpoint::{ConfigFields, ModelDirectory, TensorSource};
use crate::names::nearest;
use crate::quantize::QuantizedTensor;
use crate::scheme::LinearScheme;
use crate::wording::counted;
use crate::{Error, Result};

/// The key of `config.json` that describes the quantization.
const KEY: &str = "quantization_config";
/// The key of the text model's configuration in a multimodal model.
const TEXT_CONFIG: &str = "text_config";
/// Embeddings are not multiplied.
const EMBEDDINGS: [&str; 2] = ["embed", "wte"];

/// Returns the `quantization_config` of the model, or of its text model, where some exporters write it.
///
/// # Errors
/// [`Error::Config`] when there are two and they differ.
pub fn quantization_settings<'a>(config: &ConfigFields<'a>) -> Result<Option<&'a Value>> {
    let nested = config.get(TEXT_CONFIG).and_then(Value::as_object);
    let nested = nested.and_then(|text| text.get(KEY)).filter(|settings| !settings.is_null());
    match (config.get(KEY), nested) {
        (Some(outer), Some(inner)) if outer != inner => {
            Err(config.error(KEY, format!("differs from the `quantization_config` in `{TEXT_CONFIG}`")))
        }
        (outer, inner) => Ok(outer.or(inner)),
    }
}

/// A linear with a quantized weight.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinearInfo {
    /// The module: `model.layers.0.mlp.down_proj`.
    pub name: String,
    /// `[n, k]`: output and input features.
    pub shape: [usize; 2],
    /// The weight's scheme.
    pub scheme: LinearScheme,
}

/// A checkpoint with quantized linears, in any format of safetensors that this crate reads.
///
/// ```
/// use std::sync::Arc;
/// use quant_formats::checkpoint::{Dtype, MemorySource};
/// use quant_formats::format::{AutoAwq, Container, ModuleSchemes, QuantizedCheckpoint};
/// use quant_formats::quantize::quantize_rtn;
/// use quant_kernels_cpu::{FloatRows, RowLayout, Serial};
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
/// // Packed once for the kernels of this CPU, then multiplied with two rows.
/// let packed = checkpoint.read(&linear.name)?.pack(None, &Serial)?;
/// let mut rows = FloatRows::default();
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
    linears: Vec<LinearInfo>,
    warnings: Vec<String>,
}

impl fmt::Debug for QuantizedCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuantizedCheckpoint").field("linears", &self.linears).finish_non_exhaustive()
    }
}

impl QuantizedCheckpoint {
    /// Opens a model directory. Headers, and dtypes and shapes of all packed tensors, are checked; no weight is read.
    ///
    /// # Errors
    /// - Those of [`ModelDirectory::open`].
    /// - [`Error::Config`]: the checkpoint is not quantized.
    /// - [`Error::UnsupportedQuantization`]: it is quantized in an unsupported way.
    /// - [`Error::MissingTensor`], [`Error::TensorShape`], [`Error::TensorDtype`]: the tensors of a linear are
    ///   inconsistent, incomplete or empty.
    pub fn open(path: &Path) -> Result<Self> {
        let directory = ModelDirectory::open(path)?;
        let settings = quantization_settings(&directory.fields())?;
        let settings = settings.ok_or_else(|| Error::Config {
            path: directory.config_path().to_owned(),
            field: KEY.into(),
            reason: "is missing: the checkpoint is not quantized".into(),
            remedy: Some("quantize the model first, or read its floats from the checkpoint's source".into()),
        })?;
        let source: Arc<dyn TensorSource> = directory.source().clone();
        let opened = Self::new(source, directory.config_path(), settings)?;
        let warnings = [directory.warnings(), &opened.warnings].concat();
        Ok(Self { config: directory.config().clone(), warnings, ..opened })
    }

    /// Creates a checkpoint from its tensors and its `quantization_config`; `path` is for messages.
    ///
    /// # Errors
    /// See [`open`](Self::open).
    pub fn new(source: Arc<dyn TensorSource>, path: &Path, settings: &Value) -> Result<Self> {
        if mxfp4::is_own(settings) {
            return Self::with_reader(Arc::new(Experts::new(source)?), Box::new(ExpertReader));
        }
        let unsupported = |reason| Error::UnsupportedQuantization { path: path.to_owned(), reason };
        Self::with_reader(source, reader(settings).map_err(unsupported)?)
    }

    /// Creates a checkpoint with a custom reader, for a format that this crate does not know.
    ///
    /// # Errors
    /// Those of the reader.
    pub fn with_reader(source: Arc<dyn TensorSource>, mut reader: Box<dyn PackedReader>) -> Result<Self> {
        reader.survey(source.as_ref())?;
        let linears = linears(source.as_ref(), reader.as_ref())?;
        let mut warnings = reader.notes();
        warnings.extend(unread(source.as_ref(), reader.as_ref(), &linears)?);
        Ok(Self { source, config: Map::new(), reader, linears, warnings })
    }

    /// The quantized linears, sorted by name, each expert's individually. Embeddings are not included.
    ///
    /// In MXFP4 checkpoints of gpt-oss, these are `….experts.E.gate_proj`, `up_proj` and `down_proj`, although one tensor
    /// stores the gate and up of all experts; [`source`](Self::source) shows tensors under these names too.
    pub fn linears(&self) -> &[LinearInfo] {
        &self.linears
    }

    /// Returns the linear of that name, if it is quantized.
    pub fn linear(&self, name: &str) -> Option<&LinearInfo> {
        let at = self.linears.binary_search_by(|linear| linear.name.as_str().cmp(name)).ok()?;
        Some(&self.linears[at])
    }

    fn require(&self, name: &str) -> Result<&LinearInfo> {
        self.linear(name).ok_or_else(|| {
            let is_float = self.source.info(&format!("{name}.weight")).is_some();
            let nearest = nearest(name, self.linears.iter().map(|linear| linear.name.as_str()));
            Error::MissingLinear { linear: name.to_owned(), is_float, nearest: nearest.map(str::to_owned) }
        })
    }

    /// Reads a linear's weight: codes, scales and zero points in the order of the matrix, independent of the order in
    /// the file. If groups of inputs are not adjacent, columns are sorted by group, and
    /// [`input_order`](QuantizedTensor::input_order) names the input of each. Memory: one byte per weight and 4 per scale.
    ///
    /// # Errors
    /// [`Error::MissingLinear`] when no quantized linear has that name; otherwise when the file cannot be read, or
    /// violates the format.
    pub fn read(&self, name: &str) -> Result<QuantizedTensor> {
        let LinearInfo { shape, scheme, .. } = self.require(name)?;
        self.reader.read(self.source.as_ref(), PackedWeight { module: name, shape: *shape, scheme: *scheme })
    }

    /// Returns the [order of inputs](QuantizedTensor::input_order) that [`read`](Self::read) returns with a linear's
    /// weight, without reading the weight.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn input_order(&self, name: &str) -> Result<Option<Vec<u32>>> {
        let &LinearInfo { shape, scheme, .. } = self.require(name)?;
        self.reader.input_order(self.source.as_ref(), PackedWeight { module: name, shape, scheme })
    }

    /// Reads some outputs of a linear's weight, for an engine that divides it among devices by outputs
    /// (`q_proj`, `up_proj`). See [`read_part`](Self::read_part) for what is read from the file.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use quant_formats::checkpoint::{Dtype, MemorySource};
    /// # use quant_formats::format::{AutoAwq, Container, ModuleSchemes, QuantizedCheckpoint};
    /// # use quant_formats::quantize::quantize_rtn;
    /// # let weight: Vec<f32> = (0..16 * 64).map(|i| (i as f32 * 0.7).sin()).collect();
    /// # let scheme = "w4a16-g32-asym".parse()?;
    /// # let rounded = quantize_rtn("proj", &weight, [16, 64], scheme, Dtype::F16, None)?;
    /// # let mut source = MemorySource::new();
    /// # for (spec, bytes) in AutoAwq.pack("proj", &rounded)? {
    /// #     source.insert(&spec.name, spec.info.dtype, spec.info.shape.clone(), bytes)?;
    /// # }
    /// # let schemes = ModuleSchemes { quantized: vec![("proj", scheme)], ..Default::default() };
    /// # let settings = AutoAwq.quantization_config(&schemes);
    /// # let checkpoint = QuantizedCheckpoint::new(Arc::new(source), "config.json".as_ref(), &settings)?;
    /// // The second of two devices: outputs 8 to 15 of 16, and all inputs.
    /// assert_eq!(checkpoint.part_multiples("proj")?, [8, 32]);
    /// let part = checkpoint.read_rows("proj", 8..16)?;
    /// assert_eq!(part, checkpoint.read("proj")?.part(8..16, 0..64)?);
    /// # Ok::<(), quant_formats::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`read_part`](Self::read_part).
    pub fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<QuantizedTensor> {
        let columns = 0..self.require(name)?.shape[1];
        self.read_part(name, rows, columns)
    }

    /// Reads some outputs (rows) and inputs (columns) of a linear's weight: the same numbers as
    /// [`QuantizedTensor::part`] of the whole weight. If a linear is divided by inputs (`o_proj`, `down_proj`), only
    /// one device must add the [bias](Self::bias).
    ///
    /// If the ranges begin and end at [multiples](Self::part_multiples) or at the end of the weight, only the bytes of
    /// the part are read from the file, and memory is that of the part. A part whose bytes are not adjacent takes
    /// several reads: outputs of AWQ and GPTQ, whose rows are inputs, take one per input. Other ranges at the
    /// [multiples of the scheme](QuantizedTensor::part_multiples) are taken from the whole weight: QServe, for example,
    /// stores 4-bit codes of all inputs together. So are all parts if the reader of a format does not
    /// [describe](super::PackedReader::parts) how its tensors are divided.
    ///
    /// # Errors
    /// [`Error::Usage`] when the ranges do not begin and end at multiples of the scheme or at the end of the weight;
    /// otherwise as [`read`](Self::read).
    pub fn read_part(
        &self,
        name: &str,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Result<QuantizedTensor> {
        let &LinearInfo { shape, scheme, .. } = self.require(name)?;
        let of_scheme = QuantizedTensor::part_multiples(scheme);
        check_range("rows", &rows, shape[0], of_scheme[0])?;
        check_range("columns", &columns, shape[1], of_scheme[1])?;
        let weight = PackedWeight { module: name, shape, scheme };
        let source = self.source.as_ref();
        let of_storage = |parts: &Vec<_>| {
            let [outputs, inputs] = multiples(parts);
            divides(&rows, shape[0], outputs) && divides(&columns, shape[1], inputs)
        };
        let Some(parts) = self.reader.parts(source, weight).filter(of_storage) else {
            return self.reader.read(source, weight)?.part(rows, columns);
        };
        let part = PartSource::new(source, parts, shape, [&rows, &columns])?;
        let part_shape = [rows.len(), columns.len()];
        let read = self.reader.read(&part, PackedWeight { module: name, shape: part_shape, scheme });
        // The groups of some inputs may be adjacent, even if others are scattered.
        let is_whole = columns == (0..shape[1]) || matches!(&read, Ok(part) if part.input_order.is_none());
        match is_whole || self.reader.input_order(source, weight)?.is_none() {
            true => read,
            false => Err(not_divided_by_inputs()),
        }
    }

    /// Returns the alignment, in outputs and in inputs, at which a part of a linear's weight can be read without the rest:
    /// the format packs codes of several outputs or inputs together, and groups of inputs share scales.
    ///
    /// # Errors
    /// [`Error::MissingLinear`] when no quantized linear has that name.
    pub fn part_multiples(&self, name: &str) -> Result<[usize; 2]> {
        let &LinearInfo { shape, scheme, .. } = self.require(name)?;
        let [rows, columns] = QuantizedTensor::part_multiples(scheme);
        let parts = self.reader.parts(self.source.as_ref(), PackedWeight { module: name, shape, scheme });
        let [stored_rows, stored_columns] = multiples(&parts.unwrap_or_default());
        Ok([common_multiple(rows, stored_rows), common_multiple(columns, stored_columns)])
    }

    /// Reads a linear's bias `[n]`, if it has one.
    ///
    /// # Errors
    /// When it cannot be read, is not of a float type, or holds NaN or infinity.
    pub fn bias(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let name = format!("{name}.bias");
        self.source.info(&name).map(|_| self.source.read_f32(&name)).transpose()
    }

    /// All tensors, from which unquantized ones are read by name.
    pub fn source(&self) -> &dyn TensorSource {
        self.source.as_ref()
    }

    /// `config.json`; empty if the checkpoint was not opened from a directory.
    pub fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// Whether keys and values should be cached in FP8.
    pub fn has_fp8_cache(&self) -> bool {
        self.reader.has_fp8_cache()
    }

    /// Problems that do not make the checkpoint unreadable, and parts of its configuration that are
    /// [not followed](PackedReader::notes), one line each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The file that holds a tensor, for messages.
    pub fn location(&self, tensor: &str) -> PathBuf {
        self.source.location(tensor)
    }
}

/// Finds the modules that have codes and are quantized according to the configuration.
fn linears(source: &dyn TensorSource, reader: &dyn PackedReader) -> Result<Vec<LinearInfo>> {
    let (mut found, suffixes) = (Vec::new(), reader.code_suffixes());
    for tensor in source.names() {
        let Some(module) = suffixes.iter().find_map(|suffix| tensor.strip_suffix(suffix)) else { continue };
        if is_embedding(module) {
            continue;
        }
        let Some(scheme) = reader.scheme(module) else { continue };
        let Some(shape) = reader.shape(source, module)? else { continue };
        if shape.contains(&0) {
            return Err(Error::UnsupportedQuantization {
                path: source.location(tensor),
                reason: format!("the linear `{module}` has the shape {shape:?}, and no weights"),
            });
        }
        reader.tensors(source, PackedWeight { module, shape, scheme })?;
        found.push(LinearInfo { name: module.to_owned(), shape, scheme });
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found.dedup_by(|a, b| a.name == b.name);
    Ok(found)
}

/// Checks that every linear with scales or zero points has codes, and describes those whose codes are not read.
///
/// # Errors
/// [`Error::MissingTensor`] when a linear that is quantized according to the configuration has no codes.
fn unread(
    source: &dyn TensorSource,
    reader: &dyn PackedReader,
    linears: &[LinearInfo],
) -> Result<Vec<String>> {
    let mut unread = BTreeMap::new();
    for tensor in source.names() {
        let module = reader.parameter_suffixes().iter().find_map(|suffix| tensor.strip_suffix(suffix));
        let Some(module) = module.filter(|module| !is_embedding(module)) else { continue };
        if linears.binary_search_by(|linear| linear.name.as_str().cmp(module)).is_ok() {
            continue;
        }
        let codes = reader.code_suffixes().iter().map(|suffix| format!("{module}{suffix}"));
        let has_codes = codes.clone().any(|name| source.info(&name).is_some());
        if let Some(missing) =
            codes.into_iter().next().filter(|_| !has_codes && reader.scheme(module).is_some())
        {
            return Err(Error::MissingTensor { path: source.location(tensor), tensor: missing });
        }
        unread.entry(module).or_insert(tensor);
    }
    let mut notes = Vec::new();
    if let Some((module, tensor)) = unread.first_key_value() {
        let others = match unread.len() - 1 {
            0 => String::new(),
            others => format!(" (and {})", counted(others, "other linear")),
        };
        notes.push(format!(
            "`{module}` has `{tensor}`{others}, but is not read as a quantized linear: its weight is float or has a dtype \
            of a different format, or the configuration does not quantize it"
        ));
    }
    if linears.is_empty() {
        notes.push(
            "no quantized linear was found: the tensors have other names than in this format, or hold several \
            linears each"
                .into(),
        );
    }
    Ok(notes)
}

fn is_embedding(module: &str) -> bool {
    let last = module.rsplit('.').next().unwrap_or(module);
    EMBEDDINGS.iter().any(|part| last.contains(part))
}
