//! The summary of a run in numbers. Its JSON is versioned by `schema`.

use std::collections::BTreeMap;

use serde::Serialize;

use super::floats::FloatsDone;
use super::gguf::{GgufDone, bits_per_weight};
use super::quantize::Quantized;
use super::steps::StepTime;
use crate::checkpoint::Published;
use crate::pipeline::{QuantReport, TensorReport};

/// The summary of a run.
#[derive(Debug, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum Summary {
    /// Checkpoints were written.
    Checkpoints(QuantizeSummary),
    /// A GGUF file was written.
    Gguf(GgufSummary),
    /// A float checkpoint was written.
    Floats(FloatsSummary),
}

/// The summary of a run that wrote checkpoints.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct QuantizeSummary {
    /// Name and version of this format.
    pub schema: &'static str,
    /// The method.
    pub method: String,
    /// Bytes of the model's tensors.
    pub bytes_before: u64,
    /// The use of the calibration batch, if not all of it was counted, or experts saw few or all of its tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibration: Option<Calibration>,
    /// The checkpoints, one per format.
    pub outputs: Vec<OutputSummary>,
    /// The duration of each step, summed over all blocks; reading the calibration text is not included.
    pub steps: Vec<StepTime>,
    /// The duration of the run in seconds.
    pub seconds: f64,
    /// The peak memory of the process, if the program reports it.
    pub peak_memory_bytes: Option<u64>,
}

/// A checkpoint.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct OutputSummary {
    /// Its directory.
    pub path: String,
    /// Its format.
    pub format: String,
    /// Bytes of its tensors.
    pub bytes_after: u64,
    /// Bits per weight of the quantized linears, including scales and zero points.
    pub bits_per_quantized_weight: f64,
    /// The tensor with the largest rounding error.
    pub worst_tensor: Option<Worst>,
}

/// A tensor and its rounding error.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct Worst {
    /// The name of the tensor.
    pub tensor: String,
    /// The root mean square of the error, relative to that of the weights.
    pub relative_rms: f64,
}

/// The number of tokens in the calibration batch, and how many of them were counted.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct Calibration {
    /// The number of text tokens in all windows.
    pub tokens: u64,
    /// The number of these tokens that were counted.
    pub tokens_counted: u64,
    /// Padding: positions that no document fills.
    pub padding: u64,
    /// Linears of experts that saw few of these tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub few: Option<UndersampledLinears>,
    /// Linears of experts that were calibrated on all tokens instead of those routed to them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub all: Option<FullBatchLinears>,
}

/// Linears of experts that were calibrated on all tokens.
#[derive(Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct FullBatchLinears {
    /// The number of linears.
    pub linears: usize,
    /// The smallest number of tokens routed to one of them.
    pub least_routed: u64,
}

impl FullBatchLinears {
    /// `None` without linears.
    fn of(routed: impl Iterator<Item = u64> + Clone) -> Option<Self> {
        Some(Self { least_routed: routed.clone().min()?, linears: routed.count() })
    }
}

/// Linears that saw fewer than [`MIN_EXPERT_TOKENS`] tokens or, if no linear saw that many, fewer than the linear that
/// saw most.
#[derive(Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct UndersampledLinears {
    /// The number of linears.
    pub linears: usize,
    /// The smallest number of tokens that one of them saw.
    pub least: u64,
    /// The experts that they belong to, in model order.
    pub experts: Vec<UndersampledExpert>,
}

/// An expert that saw few tokens.
#[derive(Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct UndersampledExpert {
    /// The module that holds its linears.
    pub module: String,
    /// The smallest number of tokens that one of its linears saw.
    pub tokens: u64,
}

/// The number of tokens below which an expert is reported, because its calibration is unreliable.
pub const MIN_EXPERT_TOKENS: u64 = 128;

impl UndersampledLinears {
    /// Returns the linears of a report that saw few tokens; `None` if there are none.
    pub fn in_report(report: &QuantReport) -> Option<Self> {
        let seen = |tensor: &TensorReport| {
            let module = tensor.tensor.strip_suffix(".weight").unwrap_or(&tensor.tensor).to_owned();
            Some((module, tensor.calibration_tokens?))
        };
        Self::of(&report.tensors.iter().filter_map(seen).collect::<Vec<_>>())
    }

    fn of(seen: &[(String, u64)]) -> Option<Self> {
        // Without experts, all linears see the same number of tokens.
        let enough = MIN_EXPERT_TOKENS.min(seen.iter().map(|(_, tokens)| *tokens).max()?);
        let below: Vec<_> = seen.iter().filter(|(_, tokens)| *tokens < enough).collect();
        let mut experts: Vec<UndersampledExpert> = Vec::new();
        for (linear, tokens) in &below {
            let module = linear.rsplit_once('.').map_or(linear.as_str(), |(module, _)| module);
            match experts.last_mut().filter(|expert| expert.module == module) {
                Some(expert) => expert.tokens = expert.tokens.min(*tokens),
                None => experts.push(UndersampledExpert { module: module.to_owned(), tokens: *tokens }),
            }
        }
        let least = below.iter().map(|(_, tokens)| *tokens).min()?;
        Some(Self { linears: below.len(), least, experts })
    }
}

/// The summary of a run that wrote a GGUF file.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct GgufSummary {
    /// Name and version of this format.
    pub schema: &'static str,
    /// The file, or the directory that holds it.
    pub path: String,
    /// The mixture of types.
    pub mixture: &'static str,
    /// Bytes of the model's files.
    pub bytes_before: u64,
    /// Bytes written.
    pub bytes_after: u64,
    /// Bits per weight, over all tensors.
    pub bits_per_weight: f64,
    /// The number of tensors of each type.
    pub types: BTreeMap<String, usize>,
    /// Tensors whose rows did not fit their type.
    pub replaced: Vec<Replaced>,
    /// Whether errors were weighted by an importance matrix.
    pub weighted: bool,
    /// The tensor with the largest rounding error.
    pub worst_tensor: Option<Worst>,
    /// The duration of the run in seconds.
    pub seconds: f64,
    /// The peak memory of the process, if the program reports it.
    pub peak_memory_bytes: Option<u64>,
}

/// The summary of a run that wrote a float checkpoint.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct FloatsSummary {
    /// Name and version of this format.
    pub schema: &'static str,
    /// The directory.
    pub path: String,
    /// The type of the floats.
    pub dtype: String,
    /// What the model was quantized to: a method, or the types of GGUF blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dequantized_from: Option<String>,
    /// Bytes of the model's tensors.
    pub bytes_before: u64,
    /// Bytes written.
    pub bytes_after: u64,
    /// The number of tensors of each type.
    pub types: BTreeMap<String, usize>,
    /// The duration of the run in seconds.
    pub seconds: f64,
    /// The peak memory of the process, if the program reports it.
    pub peak_memory_bytes: Option<u64>,
}

/// A tensor whose rows did not fit its type.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct Replaced {
    /// The name of the tensor.
    pub tensor: String,
    /// The requested type.
    pub wanted: String,
    /// The type that it has instead.
    pub got: String,
}

impl Summary {
    pub(super) fn of_checkpoints(done: &Quantized) -> Self {
        let first = done.outputs.first().map(|(_, report)| report);
        Self::Checkpoints(QuantizeSummary {
            schema: "quant-summary/2",
            method: first.map(|report| report.method.clone()).unwrap_or_default(),
            bytes_before: first.map_or(0, |report| report.bytes_before),
            calibration: first.and_then(calibration),
            outputs: done
                .outputs
                .iter()
                .map(|(published, report)| OutputSummary::new(published, report))
                .collect(),
            steps: done.steps.clone(),
            seconds: done.seconds,
            peak_memory_bytes: None,
        })
    }

    pub(super) fn of_gguf(done: &GgufDone) -> Self {
        let GgufDone { plan, published, report, .. } = done;
        let mut types: BTreeMap<String, usize> = BTreeMap::new();
        for tensor in &report.tensors {
            *types.entry(tensor.kind.clone()).or_default() += 1;
        }
        let replaced = report.replaced().map(|t| Replaced {
            tensor: t.tensor.clone(),
            wanted: t.replaces.clone().unwrap_or_default(),
            got: t.kind.clone(),
        });
        let errors =
            report.tensors.iter().filter_map(|t| Some((t, t.relative_rms.filter(|rms| *rms > 0.0)?)));
        let worst = errors.max_by(|a, b| a.1.total_cmp(&b.1));
        Self::Gguf(GgufSummary {
            schema: "quant-gguf-summary/1",
            path: published.path.display().to_string(),
            mixture: plan.mixture().name,
            bytes_before: done.bytes_before,
            bytes_after: published.bytes,
            bits_per_weight: bits_per_weight(plan),
            types,
            replaced: replaced.collect(),
            weighted: report.tensors.iter().any(|t| t.weighted),
            worst_tensor: worst.map(|(t, relative_rms)| Worst { tensor: t.tensor.clone(), relative_rms }),
            seconds: done.seconds,
            peak_memory_bytes: None,
        })
    }

    pub(super) fn of_floats(done: &FloatsDone) -> Self {
        Self::Floats(FloatsSummary {
            schema: "quant-floats-summary/1",
            path: done.published.path.display().to_string(),
            dtype: done.dtype.name().to_owned(),
            dequantized_from: done.report.dequantized_from.clone(),
            bytes_before: done.bytes_before,
            bytes_after: done.published.bytes,
            types: done.report.types(),
            seconds: done.seconds,
            peak_memory_bytes: None,
        })
    }

    /// Returns the summary with the peak memory of the process, which the library does not query.
    pub fn with_peak_memory(mut self, bytes: Option<u64>) -> Self {
        match &mut self {
            Self::Checkpoints(summary) => summary.peak_memory_bytes = bytes,
            Self::Gguf(summary) => summary.peak_memory_bytes = bytes,
            Self::Floats(summary) => summary.peak_memory_bytes = bytes,
        }
        self
    }
}

impl OutputSummary {
    fn new(published: &Published, report: &QuantReport) -> Self {
        let errors = report.tensors.iter().filter_map(|t| Some((t, t.weight_error?.relative_rms)));
        let worst = errors.max_by(|a, b| a.1.total_cmp(&b.1));
        Self {
            path: published.path.display().to_string(),
            format: report.format.clone(),
            bytes_after: report.bytes_after,
            bits_per_quantized_weight: report.bits_per_quantized_weight,
            worst_tensor: worst
                .map(|(tensor, relative_rms)| Worst { tensor: tensor.tensor.clone(), relative_rms }),
        }
    }
}

fn calibration(report: &QuantReport) -> Option<Calibration> {
    let batch = report.calibration.as_ref()?;
    let (tokens, padding) = (batch.tokens, batch.padding);
    // All linears outside experts see the same tokens, and linears of experts see fewer. If an earlier run did all the
    // work, no tokens were counted.
    let seen = report.tensors.iter().filter_map(|t| t.calibration_tokens).max();
    let tokens_counted = seen.unwrap_or(batch.tokens_counted);
    let few = UndersampledLinears::in_report(report);
    let all = FullBatchLinears::of(report.tensors.iter().filter_map(|t| t.routed_tokens));
    let notable = tokens_counted < tokens || padding > 0 || few.is_some() || all.is_some();
    notable.then_some(Calibration { tokens, tokens_counted, padding, few, all })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_with_few_tokens_are_counted() {
        // Two linears per expert.
        let few = |tokens: &[u64]| {
            let linear = |(i, tokens): (usize, &u64)| (format!("experts.{}.w{}", i / 2, i % 2), *tokens);
            UndersampledLinears::of(&tokens.iter().enumerate().map(linear).collect::<Vec<_>>())
        };
        let expert = |i: usize, tokens| UndersampledExpert { module: format!("experts.{i}"), tokens };
        assert_eq!(few(&[]), None);
        // Few tokens are not reported if the whole text is short.
        assert_eq!(few(&[64, 64, 64]), None);
        let experts = vec![expert(1, 0)];
        assert_eq!(few(&[64, 64, 8, 0]), Some(UndersampledLinears { linears: 2, least: 0, experts }));
        assert_eq!(few(&[4096, 4096, 128]), None);
        let experts = vec![expert(1, 127), expert(2, 100)];
        let found = few(&[4096, 4096, 128, 127, 100, 101]);
        assert_eq!(found, Some(UndersampledLinears { linears: 3, least: 100, experts }));
        let all = |routed: &[u64]| FullBatchLinears::of(routed.iter().copied());
        assert_eq!((all(&[]), all(&[7, 3])), (None, Some(FullBatchLinears { linears: 2, least_routed: 3 })));
    }
}
