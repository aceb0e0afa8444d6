//! The report of what a run did to every tensor: `quant_report.json`.
//!
//! The report holds nothing that differs between two runs of the same job (no times, no paths), so its bytes are always
//! the same.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::records::{check_names, typed};
use super::{Job, REPORT};
use crate::calibrate::{ExpertSampling, Mask, Packing, Sampling, TokenWindows};
use crate::checkpoint::{Dtype, TensorInfo, parse_strictly, read_capped};
use crate::digest::hex;
use crate::model::{Carried, KvScheme, Model};
use crate::quantize::ErrorStats;
use crate::quantize::gptq::GptqSettings;
use crate::recipe::{Action, PlanEntry};
use crate::round::{Gptq, GptqRecord, Rounding};
use crate::scheme::{BLOCK, Granularity, LinearScheme};
use crate::transform::{AttentionRecord, ClipRecord, FoldRecord, Search, SmoothRecord};
use crate::wording::parser_message;
use crate::{Error, Result};

/// The version increases when a field is removed or changes its meaning. Programs that read reports must ignore fields
/// that they do not know.
pub(super) const SCHEMA: &str = "quant-report/1";
/// The maximum size of a report that is read.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// The report of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct QuantReport {
    /// The version of the schema, `quant-report/1`.
    pub schema: String,
    /// The version of this crate.
    pub version: String,
    /// The method.
    pub method: String,
    /// The steps of the method before rounding, in order; empty if there were none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<String>,
    /// What the steps left unchanged, with the reasons.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The number format of the KV cache; absent if it stays float.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv: Option<KvScheme>,
    /// The checkpoint format.
    pub format: String,
    /// The `quant_method` of the input, if the input was quantized and its codes were used as the weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requantized_from: Option<String>,
    /// The calibration batch, if the method used one.
    pub calibration: Option<CalibrationReport>,
    /// The settings of GPTQ, if it was used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gptq: Option<GptqSettings>,
    /// The settings of the rounding, if it has any and is not GPTQ.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rounding: BTreeMap<String, Value>,
    /// Total bytes of the tensors in the input.
    pub bytes_before: u64,
    /// Total bytes of the tensors written.
    pub bytes_after: u64,
    /// Average bits per quantized weight, including scales and zero points.
    pub bits_per_quantized_weight: f64,
    /// The parts of a vision-language model besides its text model; absent for other models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub carried: Option<Carried>,
    /// SHA-256 over the names and hashes of all input tensors.
    pub source: SourceDigest,
    /// Every tensor of the input, in plan order.
    pub tensors: Vec<TensorReport>,
}

/// Identifies the input independently of its file names.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SourceDigest {
    /// The number of tensors that were hashed.
    pub tensors: u64,
    /// SHA-256 of the lines `name sha256\n`, sorted by name.
    pub sha256: String,
}

/// The calibration batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CalibrationReport {
    /// How candidates were compared, for methods that search.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub search: Option<Search>,
    /// The number of windows.
    pub samples: usize,
    /// Tokens per window.
    pub length: usize,
    /// The seed that selected the windows.
    pub seed: u64,
    /// How documents became windows: `stream` or `documents`.
    pub packing: Packing,
    /// Which tokens are counted.
    pub mask: Mask,
    /// Which tokens experts were calibrated on; absent if each expert was calibrated only on the tokens routed to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertSampling>,
    /// Text tokens in all windows.
    pub tokens: u64,
    /// The number of these tokens that the method used; the others are masked prompts.
    pub tokens_counted: u64,
    /// Positions that the documents did not fill.
    pub padding: u64,
    /// SHA-256 of the token ids as little-endian 32-bit integers.
    pub tokens_sha256: String,
    /// SHA-256 of each token's role and the start of its document; absent if windows are cut from a stream and all
    /// tokens count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout_sha256: Option<String>,
}

/// The rounding error of a weight, relative to the float weight after the rewrite.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WeightError {
    /// `√(Σ(w − ŵ)² / Σw²)`.
    pub relative_rms: f64,
    /// The signal-to-noise ratio in decibels; absent if there is no error.
    pub sqnr_db: Option<f64>,
    /// `max |w − ŵ|`.
    pub max: f64,
}

impl From<ErrorStats> for WeightError {
    fn from(stats: ErrorStats) -> Self {
        Self {
            relative_rms: stats.relative_rms(),
            sqnr_db: Some(stats.sqnr_db()).filter(|db| db.is_finite()),
            max: stats.max_error,
        }
    }
}

/// The report of one tensor. What most tensors lack is boxed, because a model can have very many tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TensorReport {
    /// The tensor's name in the input.
    pub tensor: String,
    /// `copied`, `rewritten`, `quantized` or `repacked`.
    pub action: Cow<'static, str>,
    /// The tensor's type in the input.
    pub dtype: Cow<'static, str>,
    /// The tensor's shape in the input.
    pub shape: Vec<usize>,
    /// The scheme, for quantized tensors.
    pub scheme: Option<String>,
    /// The scheme that the weight was rounded to, if the container merges its two levels of scales into one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounded_to: Option<String>,
    /// Bits per code.
    pub bits: Option<u8>,
    /// The number of weights in a row that share a scale.
    pub group_size: Option<usize>,
    /// The exponent that AWQ chose; absent if no scaling was best or no search was run.
    pub ratio: Option<f32>,
    /// The error of the stored weight.
    pub weight_error: Option<WeightError>,
    /// The number of groups in which at most one weight is not rounded to zero, although several are not zero.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub vanished_groups: u64,
    /// Whether all weights are zero.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub all_zero: bool,
    /// The scale search of the group that the tensor belongs to.
    pub scale_search: Option<Box<FoldRecord>>,
    /// The clip search.
    pub clip_search: Option<Box<ClipRecord>>,
    /// The result of GPTQ; absent if it was not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gptq: Option<Box<GptqRecord>>,
    /// The result of SmoothQuant; absent if it was not run or skipped the linear.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub smooth: Option<Box<SmoothRecord>>,
    /// The result of SmoothAttention; present for linears that produce keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention: Option<Box<AttentionRecord>>,
    /// Whether its rows or columns are in a different order than in the input.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reordered: bool,
    /// The input grid, if it is the same for all tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<InputReport>,
    /// The static scales of the cached keys and values that this linear produces, by tensor name; absent if there are
    /// none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub cache_scales: BTreeMap<String, f32>,
    /// Counted tokens of the calibration batch that passed through the linear; absent if the method used no batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration_tokens: Option<u64>,
    /// For a linear of an expert that was calibrated on all tokens: how many of them are routed to the expert.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routed_tokens: Option<u64>,
    /// The tensor's bytes in the input.
    pub bytes_before: u64,
    /// The bytes written for it.
    pub bytes_after: u64,
    /// SHA-256 of the input bytes; if norms were folded or the model was rotated before, of the resulting tensor.
    pub source_sha256: String,
    /// Records of steps and roundings that have no field here, under their names. A report by a newer version may have
    /// other fields, which are here too.
    #[serde(flatten)]
    pub records: BTreeMap<String, Value>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// The grid of a linear's input.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct InputReport {
    /// The scale.
    pub scale: f32,
    /// The code that represents 0.
    pub zero: i8,
}

#[derive(Debug, Default)]
pub(super) struct Searched {
    pub(super) fold: Option<FoldRecord>,
    pub(super) clip: Option<ClipRecord>,
    pub(super) tokens: Option<u64>,
    pub(super) routed: Option<u64>,
    /// The records of the rounding and of steps, by their names.
    pub(super) records: BTreeMap<String, Value>,
    pub(super) smooth: Option<SmoothRecord>,
    pub(super) attention: Option<AttentionRecord>,
    pub(super) reordered: bool,
    pub(super) stored: Option<LinearScheme>,
    pub(super) input: Option<InputReport>,
}

/// Some containers store zero points for a symmetric grid.
fn is_equivalent(stored: LinearScheme, reported: LinearScheme) -> bool {
    stored == reported.with_symmetry(stored.is_symmetric() && reported.is_symmetric())
}

impl TensorReport {
    fn new(entry: &PlanEntry, action: &'static str, source_sha256: String) -> Self {
        let TensorInfo { dtype, shape } = &entry.info;
        let scheme = entry.quantized().map(|(_, scheme)| scheme);
        let columns = shape.last().copied().unwrap_or(0);
        Self {
            tensor: entry.tensor.clone(),
            action: Cow::Borrowed(action),
            dtype: match Dtype::ALL.iter().find(|known| *known == dtype) {
                Some(known) => Cow::Borrowed(known.name()),
                None => Cow::Owned(dtype.to_string()),
            },
            shape: shape.clone(),
            scheme: scheme.map(|s| s.to_string()),
            rounded_to: None,
            bits: scheme.map(|s| s.bits()),
            group_size: scheme.map(|s| match s.granularity {
                Granularity::Block => BLOCK,
                granularity => granularity.group_size(columns),
            }),
            ratio: None,
            weight_error: None,
            vanished_groups: 0,
            all_zero: false,
            scale_search: None,
            clip_search: None,
            gptq: None,
            smooth: None,
            attention: None,
            reordered: false,
            input: None,
            cache_scales: BTreeMap::new(),
            calibration_tokens: None,
            routed_tokens: None,
            bytes_before: entry.input_bytes(),
            bytes_after: entry.output_bytes(),
            source_sha256,
            records: BTreeMap::new(),
        }
    }

    pub(super) fn copied(entry: &PlanEntry, source_sha256: String) -> Self {
        Self::new(entry, "copied", source_sha256)
    }

    pub(super) fn rewritten(entry: &PlanEntry, source_sha256: String) -> Self {
        Self::new(entry, "rewritten", source_sha256)
    }

    pub(super) fn repacked(entry: &PlanEntry, source_sha256: String) -> Self {
        let from = match &entry.action {
            // The two differ if the format restates the scheme, for example with one level of scales instead of two.
            Action::Repack { from, scheme, .. } => Some(*from).filter(|from| from != scheme),
            _ => None,
        };
        Self { rounded_to: from.map(|s| s.to_string()), ..Self::new(entry, "repacked", source_sha256) }
    }

    pub(super) fn quantized(
        entry: &PlanEntry,
        source_sha256: String,
        error: WeightError,
        search: Searched,
    ) -> Self {
        let Searched { fold, clip, tokens, routed, mut records, smooth, attention, reordered, stored, input } =
            search;
        let asked = entry.quantized().map(|(_, scheme)| scheme);
        Self {
            scheme: stored.map(|s| s.to_string()),
            rounded_to: asked.filter(|_| asked != stored).map(|s| s.to_string()),
            attention: attention.map(Box::new),
            reordered,
            ratio: fold.as_ref().and_then(|f| f.ratio),
            weight_error: Some(error),
            scale_search: fold.map(Box::new),
            clip_search: clip.map(Box::new),
            gptq: typed(&mut records, Gptq.name()),
            records,
            smooth: smooth.map(Box::new),
            input,
            calibration_tokens: tokens,
            routed_tokens: routed,
            ..Self::new(entry, "quantized", source_sha256)
        }
    }
}

/// The line of a tensor in the digest of the input, in parts.
fn line(tensor: &TensorReport) -> std::array::IntoIter<&[u8], 4> {
    [tensor.tensor.as_bytes(), b" ", tensor.source_sha256.as_bytes(), b"\n"].into_iter()
}

impl QuantReport {
    pub(super) fn new(job: &Job<'_>) -> Result<Self> {
        check_names(job)?;
        let (method, settings) = (&job.plan.method, &job.plan.settings);
        let described = method.rounding.described(settings);
        let described =
            Some((method.rounding.name().to_owned(), described)).filter(|(_, keys)| !keys.is_empty());
        let mut rounding: BTreeMap<_, _> =
            described.into_iter().map(|(name, keys)| (name, Value::Object(keys))).collect();
        let gptq = typed(&mut rounding, Gptq.name());
        Ok(Self {
            schema: SCHEMA.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            method: job.plan.method.name.to_string(),
            steps: job.plan.steps().into_iter().map(str::to_owned).collect(),
            notes: job.plan.step_notes().to_vec(),
            kv: job.plan.settings.kv,
            format: job.plan.container.name().into(),
            requantized_from: job.model.dequantized_from().map(str::to_owned),
            calibration: job.windows.filter(|_| job.plan.needs_text()).map(|w| calibration(job, w)),
            gptq,
            rounding,
            bytes_before: job.plan.input_bytes(),
            bytes_after: job.plan.output_bytes(),
            bits_per_quantized_weight: job.plan.bits_per_quantized_weight(),
            carried: job.model.carried(),
            source: SourceDigest::default(),
            tensors: Vec::new(),
        })
    }

    pub(super) fn finish(&mut self, tensors: Vec<TensorReport>) {
        self.tensors = tensors;
        let mut sorted: Vec<&TensorReport> = self.tensors.iter().collect();
        sorted.sort_unstable_by(|a, b| line(a).flatten().cmp(line(b).flatten()));
        let mut hash = Sha256::new();
        sorted.iter().copied().flat_map(line).for_each(|part| hash.update(part));
        self.source = SourceDigest { tensors: sorted.len() as u64, sha256: hex(&hash.finalize()) };
    }

    /// Reads the report next to the weights of `model` in `directory`; `None` if the directory has no report.
    ///
    /// # Errors
    /// [`Error::InputFile`] when the file exceeds 64 MiB, is not a report of this schema, or contradicts the model's
    /// linears.
    pub fn find(directory: &Path, model: &Model) -> Result<Option<Self>> {
        let path = directory.join(REPORT);
        if !path.is_file() {
            return Ok(None);
        }
        let broken = |reason: String| Error::InputFile {
            path: path.clone(),
            line: None,
            reason,
            remedy: "remove it, or use the report written together with these weights".into(),
        };
        let bytes = read_capped(&path, &path, MAX_FILE_BYTES)?.map_err(broken)?;
        let value = parse_strictly(&bytes).map_err(broken)?;
        match value.get("schema") {
            Some(schema) if schema == SCHEMA => {}
            _ => return Err(broken(format!("does not have the schema `{SCHEMA}`"))),
        }
        let report: Self =
            serde_json::from_value(value).map_err(|e| broken(parser_message(&e.to_string(), "an object")))?;
        for tensor in report.tensors.iter().filter(|t| t.weight_error.is_some()) {
            let module = tensor.tensor.strip_suffix(".weight").unwrap_or(&tensor.tensor);
            let stored = model.module_scheme(module);
            let reported = tensor.scheme.as_deref().and_then(|scheme| scheme.parse::<LinearScheme>().ok());
            if !stored.zip(reported).is_some_and(|(stored, reported)| is_equivalent(stored, reported)) {
                return Err(broken(format!(
                    "does not match the stored scheme of tensor `{}`",
                    tensor.tensor
                )));
            }
        }
        Ok(Some(report))
    }

    /// Returns the quantized linears, each with the scheme that its weight was rounded to.
    pub fn schemes(&self) -> impl Iterator<Item = (&str, LinearScheme)> {
        self.tensors.iter().filter_map(|t| {
            let scheme = t.rounded_to.as_deref().or(t.scheme.as_deref())?.parse().ok()?;
            Some((t.tensor.strip_suffix(".weight").unwrap_or(&t.tensor), scheme))
        })
    }

    /// Returns the report as pretty-printed JSON with a final newline.
    ///
    /// # Errors
    /// Never for reports made by this crate.
    pub fn to_json(&self) -> Result<String> {
        let mut text = Vec::new();
        let written = self.write_json(&mut text).map_err(|e| e.to_string());
        let text = written.and_then(|()| String::from_utf8(text).map_err(|e| e.to_string()));
        text.map_err(|reason| Error::Internal(format!("the report cannot be written: {reason}")))
    }

    /// Writes the JSON of [`to_json`](Self::to_json) in small pieces.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_json(&self, out: &mut dyn io::Write) -> io::Result<()> {
        serde_json::to_writer_pretty(&mut *out, self)?;
        out.write_all(b"\n")
    }
}

pub(super) fn calibration(job: &Job<'_>, windows: &TokenWindows) -> CalibrationReport {
    let search = job.plan.method.search_mode(&job.plan.settings);
    CalibrationReport::new(search, &job.plan.sampling, windows)
}

impl CalibrationReport {
    pub(crate) fn new(search: Option<Search>, sampling: &Sampling, windows: &TokenWindows) -> Self {
        let [counted, context, padding] = windows.uses();
        Self {
            search,
            samples: windows.len(),
            length: windows.length(),
            seed: sampling.seed,
            packing: windows.packing(),
            mask: sampling.mask,
            experts: Some(sampling.experts).filter(|experts| !experts.is_routed()),
            tokens: (counted + context) as u64,
            tokens_counted: counted as u64,
            padding: padding as u64,
            tokens_sha256: windows.sha256(),
            layout_sha256: windows.layout_sha256(),
        }
    }
}
