//! Runs that write a float checkpoint: the values of a GGUF file or of a quantized checkpoint, as safetensors.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::host::{Host, Opened, open_with};
use super::outputs::{given_up, refuse_existing, resume};
use super::quantize::{QuantizeRequest, is_gguf_name};
use super::settings::RecipeSettings;
use crate::checkpoint::{
    CheckpointWriter, Dtype, ModelDirectory, Published, TensorInfo, TensorSpec, WriteOptions,
    non_finite_in_whole, require_finite_bytes,
};
use crate::digest::sha256_hex;
use crate::model::arch::TEXT_CONFIG;
use crate::model::{Model, restore_llama3, transposed};
use crate::pipeline::REPORT;
use crate::recipe::FLOATS;
use crate::scheme::KV_CONFIG_KEY;
use crate::{CancelToken, Error, Event, Observer, Result, TensorSink};

const PIECE_BYTES: usize = 16 << 20;

/// A float checkpoint that was written.
#[derive(Debug)]
#[non_exhaustive]
pub struct FloatsDone {
    /// The directory.
    pub published: Published,
    /// The type of its float tensors.
    pub dtype: Dtype,
    /// The report on every tensor.
    pub report: FloatsReport,
    /// The size of the model's tensors in bytes.
    pub bytes_before: u64,
    /// The duration of the run in seconds.
    pub seconds: f64,
}

/// The report on a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct FloatsReport {
    /// `quant-floats-report/1`.
    pub schema: &'static str,
    /// What the model was quantized to: a method, or the types of GGUF blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dequantized_from: Option<String>,
    /// All tensors, by name.
    pub tensors: Vec<FloatTensor>,
}

/// The report on a tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FloatTensor {
    /// The name.
    pub tensor: String,
    /// The type.
    pub dtype: String,
    /// The shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// The largest change of a value by the conversion to this type, relative to the value.
    pub largest_change: f64,
    /// BLAKE3 of the values before the conversion.
    pub source_blake3: String,
}

impl RecipeSettings {
    /// Returns the type of the float checkpoint to write, if one is requested.
    ///
    /// # Errors
    /// [`Error::Usage`] for other formats besides, a missing or unknown type, and settings that have no effect.
    pub fn writes_floats(&self) -> Result<Option<Dtype>> {
        if !self.format.iter().any(|format| format.eq_ignore_ascii_case(FLOATS)) {
            return Ok(None);
        }
        if self.format.len() > 1 {
            return Err(Error::usage(
                format!("‹format={FLOATS}› cannot be combined with other formats in one run"),
                "run once for each",
            ));
        }
        self.gguf.refuse()?;
        if let Some(option) = self.not_for_floats() {
            return Err(Error::usage(
                format!("‹{option}› has no effect with ‹format={FLOATS}›, which only converts values"),
                "leave it out",
            ));
        }
        let name = self.scheme.as_deref().unwrap_or_default();
        let known = [Dtype::Bf16, Dtype::F16, Dtype::F32];
        let found = known.into_iter().find(|dtype| dtype.name().eq_ignore_ascii_case(name));
        found.map(Some).ok_or_else(|| {
            let fault = match self.scheme {
                None => format!("‹format={FLOATS}› needs the type of the floats"),
                Some(_) => format!("‹format={FLOATS}› stores floats, not `{name}`"),
            };
            Error::usage(fault, "set ‹scheme=bf16›, ‹scheme=f16› or ‹scheme=f32›")
        })
    }

    fn not_for_floats(&self) -> Option<String> {
        let rest = Self { format: Vec::new(), scheme: None, ..self.clone() };
        let [Ok(Value::Object(given)), Ok(Value::Object(none))] =
            [rest, Self::default()].map(serde_json::to_value)
        else {
            return None;
        };
        given.into_iter().find(|(name, value)| none.get(name) != Some(value)).map(|(name, _)| name)
    }
}

/// Checks everything about a request that can be checked without its model.
pub(super) fn check(request: &QuantizeRequest) -> Result<()> {
    let without_effect = [
        ("calibration", request.calibration.is_some()),
        ("save_channel_maxima", request.save_channel_maxima.is_some()),
    ];
    if let Some((option, _)) = without_effect.into_iter().find(|(_, given)| *given) {
        return Err(Error::usage(format!("‹{option}› has no effect with ‹format={FLOATS}›"), "leave it out"));
    }
    if is_gguf_name(&request.output) {
        return Err(Error::usage(
            format!("{} has the name of a GGUF file, but another format", request.output.display()),
            "set ‹format=gguf›, or choose an output whose name does not end in .gguf",
        ));
    }
    refuse_existing(std::slice::from_ref(&request.output), request.force, request.resume)
}

pub(super) fn write(
    request: &QuantizeRequest,
    dtype: Dtype,
    started: Instant,
    host: &Host<'_>,
) -> Result<FloatsDone> {
    let opened = open_with(&request.model, &request.extensions, host)?;
    opened.refuse_overlap(&request.model, &request.output)?;
    let Opened { directory, model } = opened;
    let quantized = model.quant_method().or(directory.rounded_to()).map(str::to_owned);
    let model = model.dequantized()?;
    if directory.tokenizer_path().is_none() {
        host.warn("the model has no tokenizer.json, so the output will not have one either");
    }
    if model.architecture().fused_experts.is_some() {
        host.note(
            "the experts are written as separate tensors, which engines that expect all experts of a block in one \
             tensor do not load",
        );
    }
    let tensors = outputs(&model, dtype, host.cancel)?;
    let config = float_config(&directory, dtype)?;
    let options = WriteOptions {
        force: request.force,
        resume: resume(request.resume),
        fingerprint: json!({
            "version": env!("CARGO_PKG_VERSION"),
            "program": host.program()?,
            "config_sha256": sha256_hex(json!(directory.config()).to_string()),
            "format": FLOATS,
            "dtype": dtype.name(),
        }),
        companion_bytes: companion_bytes(&directory, &config)?,
        ..WriteOptions::default()
    };
    let mut writer = CheckpointWriter::create(&request.output, tensors.clone(), options)?;
    for note in writer.notes() {
        host.note(note.as_str());
    }
    let outcome =
        convert_all(&model, &tensors, &mut writer, host.observer, host.cancel).and_then(|tensors| {
            let report =
                FloatsReport { schema: "quant-floats-report/1", dequantized_from: quantized, tensors };
            writer.add_file("config.json", config.as_bytes())?;
            for sidecar in directory.sidecar_files() {
                writer.add_copy(sidecar)?;
            }
            writer.add_file(REPORT, pretty(&json!(report))?.as_bytes())?;
            Ok(report)
        });
    let report = match outcome {
        Ok(report) => report,
        Err(error) => return Err(given_up(vec![writer], error)),
    };
    let published = writer.prepare(host.observer, host.cancel)?.publish()?;
    let bytes_before = directory.source().tensor_bytes();
    Ok(FloatsDone { published, dtype, report, bytes_before, seconds: started.elapsed().as_secs_f64() })
}

/// The tensors of the output. Vectors whose values the type cannot represent exactly stay F32: they are small, and
/// some, such as the corrections of a router's scores, need the precision.
fn outputs(model: &Model, dtype: Dtype, cancel: &CancelToken) -> Result<Vec<TensorSpec>> {
    let source = model.source();
    let of = |name: &str| {
        cancel.check()?;
        let info = source.require(name)?;
        let exact = |values: &[f32]| values.iter().all(|v| dtype.round(*v).to_bits() == v.to_bits());
        let found = match (info.dtype.is_weight_float(), info.shape.len()) {
            (false, _) => info.dtype,
            (true, 0 | 1) if info.dtype == Dtype::F32 && !exact(&source.read_f32(name)?) => Dtype::F32,
            (true, _) => dtype,
        };
        let mut shape = info.shape.clone();
        if is_by_columns(model, name, info) {
            shape.reverse();
        }
        Ok(TensorSpec::new(name, found, shape))
    };
    source.names().into_iter().map(of).collect()
}

/// Whether a weight is stored as `[in, out]`. The model presents it as `[out, in]`.
fn is_by_columns(model: &Model, name: &str, info: &TensorInfo) -> bool {
    let is_matrix = info.dtype.is_weight_float() && info.shape.len() == 2;
    is_matrix && model.architecture().is_stored_by_columns(name)
}

/// Converts all tensors. Of those that an earlier run completed, only the source is read, to check that it is
/// unchanged.
fn convert_all(
    model: &Model,
    tensors: &[TensorSpec],
    sink: &mut dyn TensorSink,
    observer: &dyn Observer,
    cancel: &CancelToken,
) -> Result<Vec<FloatTensor>> {
    let units = tensors.len() as u64;
    observer.event(&Event::StageStarted { stage: "convert", unit: "tensor", units });
    let mut reports = Vec::with_capacity(tensors.len());
    for spec in tensors {
        let known = sink.recall(&spec.name).and_then(|r| serde_json::from_value::<FloatTensor>(r).ok());
        let known = known.filter(|_| sink.is_complete(&spec.name));
        let found = convert(model, spec, known.is_some(), sink, cancel)?;
        match known {
            Some(known) if known.source_blake3 == found.source_blake3 => reports.push(known),
            Some(_) => return Err(Error::inputs_changed(&format!("the source values of `{}`", spec.name))),
            None => {
                sink.remember(&spec.name, &json!(found))?;
                sink.commit()?;
                reports.push(found);
            }
        }
        observer.event(&Event::UnitDone { detail: spec.name.clone() });
    }
    observer.event(&Event::StageDone);
    Ok(reports)
}

fn convert(
    model: &Model,
    spec: &TensorSpec,
    skip: bool,
    sink: &mut dyn TensorSink,
    cancel: &CancelToken,
) -> Result<FloatTensor> {
    let TensorSpec { name, info } = spec;
    let stored = model.source().require(name)?;
    let row = stored.shape.last().map_or(1, |columns| columns * stored.dtype.size()).max(1);
    let by_columns = is_by_columns(model, name, stored);
    // A transposed matrix is converted as a whole.
    let step = if by_columns { stored.byte_len().max(1) as usize } else { (PIECE_BYTES / row).max(1) * row };
    let in_order = |bytes: &[u8]| match stored.shape.as_slice() {
        [rows, columns] if by_columns => transposed(bytes, [*rows, *columns], info.dtype.size()),
        _ => Ok(bytes.to_vec()),
    };
    let (mut written, mut largest_change) = (0, 0.0_f64);
    let mut hash = blake3::Hasher::new();
    let mut piece = Vec::new();
    for first in (0..stored.byte_len()).step_by(step) {
        cancel.check()?;
        // The cast is lossless: the minimum is at most `step`.
        piece.resize((stored.byte_len() - first).min(step as u64) as usize, 0);
        model.source().read_range(name, first, &mut piece)?;
        hash.update(&piece);
        require_finite(model, name, stored.dtype, &piece)?;
        if skip {
            continue;
        }
        if stored.dtype == info.dtype {
            sink.write(name, written, &in_order(&piece)?)?;
            written += piece.len() as u64;
            continue;
        }
        let mut values = vec![0.0; piece.len() / stored.dtype.size()];
        stored.dtype.widen(&piece, &mut values);
        for value in &values {
            let rounded = info.dtype.round(*value);
            if rounded.is_infinite() && value.is_finite() {
                return Err(Error::Numeric {
                    tensor: name.clone(),
                    reason: format!("the value {value} exceeds the range of {}", info.dtype),
                });
            }
            if rounded != *value && *value != 0.0 {
                let change = (f64::from(rounded) - f64::from(*value)) / f64::from(*value);
                largest_change = largest_change.max(change.abs());
            }
        }
        let bytes = in_order(&info.dtype.narrow(&values))?;
        sink.write(name, written, &bytes)?;
        written += bytes.len() as u64;
    }
    Ok(FloatTensor {
        tensor: name.clone(),
        dtype: info.dtype.name().to_owned(),
        shape: info.shape.clone(),
        largest_change,
        source_blake3: hash.finalize().to_hex().to_string(),
    })
}

/// Fails if a part of a tensor holds NaN or infinity, which can come from damaged scales.
fn require_finite(model: &Model, name: &str, dtype: Dtype, piece: &[u8]) -> Result<()> {
    if !dtype.is_weight_float() {
        return Ok(());
    }
    let source = model.source();
    require_finite_bytes(source.location(name), name, dtype, piece)
        .map_err(|e| non_finite_in_whole(source.as_ref(), dtype, e))
}

/// The `config.json` of the output: the original without quantization, and with the type of the floats.
fn float_config(directory: &ModelDirectory, dtype: Dtype) -> Result<String> {
    let name = match dtype {
        Dtype::Bf16 => "bfloat16",
        Dtype::F16 => "float16",
        _ => "float32",
    };
    let mut config = directory.config().clone();
    restore_llama3(&mut config);
    let plain = |config: &mut Map<String, Value>| {
        config.shift_remove("quantization_config");
        config.shift_remove(KV_CONFIG_KEY);
        for key in ["dtype", "torch_dtype"] {
            if let Some(value) = config.get_mut(key) {
                *value = json!(name);
            }
        }
    };
    plain(&mut config);
    if let Some(text) = config.get_mut(TEXT_CONFIG).and_then(Value::as_object_mut) {
        plain(text);
    }
    if !config.contains_key("dtype") {
        config.insert("torch_dtype".into(), json!(name));
    }
    pretty(&Value::Object(config))
}

fn pretty(value: &Value) -> Result<String> {
    let text = serde_json::to_string_pretty(value);
    text.map(|t| t + "\n").map_err(|e| Error::Internal(format!("JSON cannot be written: {e}")))
}

/// The size of the files besides the weights, without the report.
fn companion_bytes(directory: &ModelDirectory, config: &str) -> Result<u64> {
    directory.sidecar_files().iter().try_fold(config.len() as u64, |sum, file| Ok(sum + file.bytes()?))
}

impl FloatsReport {
    /// The number of tensors of each type.
    pub fn types(&self) -> BTreeMap<String, usize> {
        let mut types = BTreeMap::new();
        for tensor in &self.tensors {
            *types.entry(tensor.dtype.clone()).or_default() += 1;
        }
        types
    }
}
