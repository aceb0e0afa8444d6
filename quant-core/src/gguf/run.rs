//! Writes the tensors of a planned GGUF file, piece by piece, so memory does not grow with the model.

use std::sync::Arc;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::codes;
use super::curvature::Curvature;
use super::imatrix::Importance;
use super::plan::{GgufPlan, PlannedTensor};
use super::rows::{Source, matrix, read_rows};
use super::steps::Steps;
use crate::blocks::{BlockSearch, BlockType, repack_mxfp4};
use crate::model::Model;
use crate::quantize::gptq::{Factor, encode_blocks};
use crate::transform::FoldRecord;
use crate::{CancelToken, Error, Event, Observer, Result, TensorSink};

pub(super) const CHUNK_VALUES: usize = 1 << 22;
const HASHED_VALUES: usize = 1 << 16;

/// The report on a tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GgufTensorReport {
    /// The name in the file.
    pub tensor: String,
    /// The type.
    pub kind: String,
    /// The requested type, if the rows did not fit it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replaces: Option<String>,
    /// The shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// Size in the file, in bytes.
    pub bytes: u64,
    /// Whether the checkpoint's codes were kept.
    pub keeps_codes: bool,
    /// Whether errors were weighted by an importance matrix.
    pub weighted: bool,
    /// The steps that multiplied columns of the weight before it was encoded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<String>,
    /// The name of the rounding, such as `gptq`, if codes compensate each other's rounding errors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// The square root of the sum of squared errors divided by the sum of squared values; `null` if codes were kept.
    pub relative_rms: Option<f64>,
    /// BLAKE3 of the values before encoding, in F32 and file order; if codes are kept, of the codes and scales.
    pub source_blake3: String,
}

/// The report on a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct GgufReport {
    /// `quant-gguf-report/1`.
    pub schema: &'static str,
    /// The mixture.
    pub mixture: &'static str,
    /// How steps before rounding chose the scales of channels.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub folds: Vec<FoldRecord>,
    /// All tensors, in file order.
    pub tensors: Vec<GgufTensorReport>,
}

impl GgufReport {
    /// Returns the report as JSON.
    ///
    /// # Errors
    /// [`Error::Internal`] if this crate has a bug.
    pub fn to_json(&self) -> Result<String> {
        let text = serde_json::to_string_pretty(self);
        text.map(|t| t + "\n").map_err(|e| Error::Internal(format!("JSON cannot be written: {e}")))
    }

    /// Tensors that do not have the requested type, because their rows do not fit it.
    pub fn replaced(&self) -> impl Iterator<Item = &GgufTensorReport> {
        self.tensors.iter().filter(|t| t.replaces.is_some())
    }
}

/// The inputs of a run, besides its plan.
#[derive(Clone, Copy)]
pub struct GgufInputs<'a> {
    /// The model, as the steps before rounding have rewritten it.
    pub model: &'a Model,
    /// The importance of the inputs of this model's linears.
    pub importance: Option<&'a Importance>,
    /// What the steps before rounding have found, if there are any.
    pub steps: Option<&'a Steps>,
}

/// Writes every tensor of a plan. Tensors that `sink` has from an interrupted run are not encoded again. With
/// `curvature`, weights that have an importance and a Hessian factor are encoded with compensated errors.
///
/// # Errors
/// [`Error::Numeric`] if a row exceeds the range of its type; [`Error::InputFile`] if the importance of a tensor is
/// invalid; [`Error::Usage`] if a source tensor has changed since the interrupted run; [`Error::Interrupted`]; errors
/// of reading tensors, of `curvature` and of `sink`.
pub fn write_tensors(
    plan: &GgufPlan,
    inputs: GgufInputs<'_>,
    mut curvature: Option<&mut Curvature<'_>>,
    sink: &mut dyn TensorSink,
    observer: &dyn Observer,
    cancel: &CancelToken,
) -> Result<GgufReport> {
    let GgufInputs { model, importance, steps } = inputs;
    let units = plan.tensors.len() as u64;
    observer.event(&Event::StageStarted { stage: "encode and write", unit: "tensor", units });
    let mut reports = Vec::with_capacity(plan.tensors.len());
    for tensor in &plan.tensors {
        cancel.check()?;
        let recalled = sink.recall(&tensor.name).and_then(|r| serde_json::from_value(r).ok());
        // A tensor that is already complete is only read, to check that it is unchanged.
        let recalled = recalled.filter(|_| sink.is_complete(&tensor.name));
        let importance = importance.map(|im| im.of(tensor)).transpose()?.flatten();
        let factors = match &mut curvature {
            Some(curvature) if recalled.is_none() => curvature.of(tensor, sink)?,
            _ => Vec::new(),
        };
        let search = plan.request.search;
        let is_rewritten = steps.is_some_and(|steps| tensor.sources().iter().any(|name| steps.changes(name)));
        let mut writer = Writer {
            tensor,
            search,
            steps: if is_rewritten { plan.request.steps() } else { Vec::new() },
            rounding: plan.request.method.rounding.name(),
            importance,
            factors,
            sink,
            cancel,
            written: 0,
            hash: blake3::Hasher::new(),
        };
        reports.push(writer.run(model, recalled)?);
        sink.commit()?;
        observer.event(&Event::UnitDone { detail: tensor.name.clone() });
    }
    observer.event(&Event::StageDone);
    Ok(GgufReport {
        schema: "quant-gguf-report/1",
        mixture: plan.mixture().name,
        folds: steps.map(|steps| steps.folds().to_vec()).unwrap_or_default(),
        tensors: reports,
    })
}

struct Writer<'a> {
    tensor: &'a PlannedTensor,
    search: BlockSearch,
    steps: Vec<&'static str>,
    rounding: &'static str,
    /// The importance of all columns, for each matrix of the tensor.
    importance: Option<Vec<f32>>,
    factors: Vec<Option<Arc<Factor>>>,
    sink: &'a mut dyn TensorSink,
    cancel: &'a CancelToken,
    written: u64,
    hash: blake3::Hasher,
}

#[derive(Default)]
struct Squares {
    error: f64,
    value: f64,
}

impl Writer<'_> {
    /// `recalled` is the report of a tensor that an interrupted run has completed.
    fn run(&mut self, model: &Model, recalled: Option<GgufTensorReport>) -> Result<GgufTensorReport> {
        let PlannedTensor { name, shape, kind, replaces, source } = self.tensor;
        let skip = recalled.is_some();
        let mut squares = Squares::default();
        match source {
            Source::Stored { tensors, view } => {
                let columns = shape.last().copied().unwrap_or_default();
                for (i, tensor) in tensors.iter().enumerate() {
                    let [rows, stored] = matrix(&model.source().require(tensor)?.shape, *view)?;
                    // If a bias is reordered, each element is a row; otherwise, the bias of an expert is a single row.
                    let columns = if shape.len() == 1 { stored } else { columns };
                    if stored != columns {
                        return Err(Error::Internal(format!(
                            "`{tensor}` has an unexpected row width of {stored}"
                        )));
                    }
                    let step = (CHUNK_VALUES / columns.max(1)).max(1);
                    for first in (0..rows).step_by(step) {
                        let some = first..(first + step).min(rows);
                        let values = read_rows(model, tensor, *view, some, columns)?;
                        self.encode(&values, columns, i, skip, &mut squares)?;
                    }
                }
            }
            Source::Values(values) => self.encode(values, values.len(), 0, skip, &mut squares)?,
            Source::Codes { modules, order } => {
                let shape = [shape[shape.len() - 2], shape[shape.len() - 1]];
                for module in modules {
                    let codes = codes::read(model, module, shape)?;
                    self.hash.update(&codes.codes);
                    for scale in &codes.scales {
                        self.hash.update(&scale.to_le_bytes());
                    }
                    if skip {
                        continue;
                    }
                    let row_bytes = row_bytes(kind, shape[1])?;
                    let mut bytes = vec![0; shape[0] * row_bytes];
                    bytes.par_chunks_mut(row_bytes).enumerate().for_each(|(row, out)| {
                        codes::encode_row(&codes, kind, *order, row, out);
                    });
                    self.put(&bytes)?;
                }
            }
            Source::Blocks { tensors } => {
                for tensor in tensors {
                    let blocks = model.source().read_mxfp4(tensor)?;
                    let [codes, exponents] = blocks
                        .ok_or_else(|| Error::Internal(format!("`{tensor}` is not stored in blocks")))?;
                    self.hash.update(&codes);
                    self.hash.update(&exponents);
                    if skip {
                        continue;
                    }
                    let mut bytes = vec![0; exponents.len() * kind.bytes];
                    let blocks = exponents.iter().zip(codes.chunks_exact(kind.elements / 2));
                    for ((exponent, codes), out) in blocks.zip(bytes.chunks_exact_mut(kind.bytes)) {
                        repack_mxfp4(*exponent, codes, out);
                    }
                    self.put(&bytes)?;
                }
            }
        }
        let source_blake3 = self.hash.finalize().to_hex().to_string();
        if let Some(recalled) = recalled {
            return match recalled.source_blake3 == source_blake3 {
                true => Ok(recalled),
                false => Err(Error::inputs_changed(&format!("the source tensors of `{name}`"))),
            };
        }
        let keeps_codes = self.tensor.keeps_codes();
        let report = GgufTensorReport {
            tensor: name.clone(),
            kind: kind.name.to_owned(),
            replaces: replaces.map(|kind| kind.name.to_owned()),
            shape: shape.clone(),
            bytes: self.tensor.bytes(),
            keeps_codes,
            weighted: self.importance.is_some(),
            steps: self.steps.iter().map(|step| (*step).to_owned()).collect(),
            // Without importance, values are encoded by the search.
            method: (self.factors.iter().any(Option::is_some) && self.importance.is_some())
                .then(|| self.rounding.to_owned()),
            relative_rms: (!keeps_codes).then(|| match squares.value {
                0.0 => 0.0,
                value => (squares.error / value).sqrt(),
            }),
            source_blake3,
        };
        self.sink.remember(name, &json!(report))?;
        Ok(report)
    }

    /// Hashes whole rows of matrix `index`; unless `skip`, encodes and writes them.
    fn encode(
        &mut self,
        values: &[f32],
        columns: usize,
        index: usize,
        skip: bool,
        squares: &mut Squares,
    ) -> Result<()> {
        self.cancel.check()?;
        let mut bytes = vec![0; 4 * HASHED_VALUES.min(values.len())];
        for part in values.chunks(HASHED_VALUES) {
            let bytes = &mut bytes[..4 * part.len()];
            bytes.chunks_exact_mut(4).zip(part).for_each(|(out, v)| out.copy_from_slice(&v.to_le_bytes()));
            self.hash.update(bytes);
        }
        if skip {
            return Ok(());
        }
        let (kind, search) = (self.tensor.kind, self.search);
        let row_bytes = row_bytes(kind, columns)?;
        let mut bytes = vec![0; values.len() / columns.max(1) * row_bytes];
        let factor = self.factors.get(index).and_then(Option::as_ref);
        let first_row = (self.written / row_bytes as u64) as usize;
        let rows_of_matrix = match self.tensor.shape[..] {
            [_, rows, _] => rows.max(1),
            _ => usize::MAX,
        };
        // A chunk may contain rows of several matrices.
        let (mut values_left, mut bytes_left) = (values, &mut bytes[..]);
        let mut row = first_row;
        while !values_left.is_empty() {
            let rows = (values_left.len() / columns.max(1)).min(rows_of_matrix - row % rows_of_matrix);
            let some;
            (some, values_left) = values_left.split_at(rows * columns);
            let (out, rest) = std::mem::take(&mut bytes_left).split_at_mut(rows * row_bytes);
            bytes_left = rest;
            let importance = self.importance.as_ref();
            let importance = importance.map(|all| Importance::of_matrix(all, row / rows_of_matrix, columns));
            match (factor, importance) {
                (Some(factor), Some(importance)) => {
                    encode_blocks(some, columns, kind, importance, factor, out);
                }
                _ => {
                    let rows = some.par_chunks_exact(columns).zip(out.par_chunks_exact_mut(row_bytes));
                    rows.for_each(|(row, out)| kind.encode_by(search, row, importance, out));
                }
            }
            row += rows;
        }
        let rows = values.par_chunks_exact(columns).zip(bytes.par_chunks_exact(row_bytes));
        let sums: Vec<(f64, f64)> = rows.map(|(row, bytes)| squares_of(kind, row, bytes)).collect();
        if let Some(row) = sums.iter().position(|(error, _)| !error.is_finite()) {
            // The row number in the file's tensor, which contains the matrices of all experts.
            let row = self.written / row_bytes as u64 + row as u64;
            return Err(Error::Numeric {
                tensor: self.tensor.name.clone(),
                reason: format!("row {row} exceeds the range of {}", kind.name),
            });
        }
        // Errors are added in order, so that the sums do not depend on the number of threads.
        for (error, value) in sums {
            squares.error += error;
            squares.value += value;
        }
        self.put(&bytes)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.sink.write(&self.tensor.name, self.written, bytes)?;
        self.written += bytes.len() as u64;
        Ok(())
    }
}

fn row_bytes(kind: &BlockType, columns: usize) -> Result<usize> {
    kind.row_bytes(columns)
        .ok_or_else(|| Error::Internal(format!("a row of {} cannot have {columns} columns", kind.name)))
}

/// The sums of squares of a row's errors and of its values. The former is not finite if a stored value is not.
fn squares_of(kind: &BlockType, row: &[f32], bytes: &[u8]) -> (f64, f64) {
    let mut back = vec![0.0; row.len()];
    kind.decode(bytes, &mut back);
    let (mut error, mut value) = (0.0, 0.0);
    for (v, b) in row.iter().zip(&back) {
        error += (f64::from(*v) - f64::from(*b)).powi(2);
        value += f64::from(*v).powi(2);
    }
    (error, value)
}
