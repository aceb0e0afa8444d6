//! Runs that write GGUF files.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use super::files::{check_replaceable, distinct, outside, write_file};
use super::gguf_settings::{check_importance, sampling};
use super::host::{Host, Opened, as_floats, open_with};
use super::memory::residence_by;
use super::outputs::{given_up, refuse_existing, resume};
use super::quantize::{QuantizeRequest, is_gguf_name};
use super::settings::RecipeSettings;
use super::texts::{BUILTIN, Text, calibration};
use crate::calibrate::{HiddenStates, Residence, Sampling, Spill, TokenWindows};
use crate::checkpoint::{Archive as _, CheckpointWriter, Published, WriteOptions};
use crate::gguf::{
    Curvature, GgufInputs, GgufPlan, GgufReport, GgufRequest, GgufWork, Importance, ImportanceOrigin, Steps,
    peak_memory, scratch_bytes, write_tensors,
};
use crate::model::Model;
use crate::pipeline::REPORT;
use crate::recipe::Extensions;
use crate::{Error, Result};

const FILE: &str = "model.gguf";

/// The result of a run that wrote a GGUF file.
#[derive(Debug)]
#[non_exhaustive]
pub struct GgufDone {
    /// The plan, with the type of each tensor.
    pub plan: GgufPlan,
    /// The file that was written, or the directory with its files.
    pub published: Published,
    /// The report on every tensor.
    pub report: GgufReport,
    /// The size of the model's files in bytes.
    pub bytes_before: u64,
    /// The duration of the run in seconds.
    pub seconds: f64,
}

/// Whether a run reads a calibration text.
fn reads_text(request: &QuantizeRequest) -> bool {
    request.calibration.is_some() || request.settings.gguf.save_imatrix.is_some()
}

/// Checks everything about a request that can be checked without its model.
pub(super) fn check(request: &QuantizeRequest) -> Result<()> {
    let settings = &request.settings;
    if request.save_channel_maxima.is_some() {
        return Err(Error::usage("‹save_channel_maxima› has no effect with ‹format=gguf›", "leave it out"));
    }
    if settings.gguf.split_max_size.is_some() && is_gguf_name(&request.output) {
        return Err(Error::usage(
            format!(
                "‹split_max_size› writes several files, but the output {} is a single file",
                request.output.display()
            ),
            "use a directory as the output, or omit ‹split_max_size›",
        ));
    }
    // Checked here rather than after calibration.
    request.extensions.check()?;
    let needs_text = settings.gguf_request_with(true, &request.extensions)?.needs_text();
    check_importance(settings, reads_text(request), needs_text)?;
    if needs_text && !reads_text(request) {
        return Err(Error::usage(
            format!(
                "method `{}` needs a calibration text, but ‹calibration› is missing",
                settings.method.as_deref().unwrap_or_default()
            ),
            "set ‹calibration›, for example ‹calibration=builtin›",
        ));
    }
    refuse_existing(std::slice::from_ref(&request.output), request.force, request.resume)?;
    if let Some(path) = &settings.gguf.save_imatrix {
        let written = [("save_imatrix", Some(path.as_path()))];
        distinct(&written, &request.files_read())?;
        outside(&written, &[&request.model, &request.output])?;
        check_replaceable("save_imatrix", path, Importance::is_matrix)?;
    }
    Ok(())
}

pub(super) fn quantize(request: &QuantizeRequest, started: Instant, host: &Host<'_>) -> Result<GgufDone> {
    let settings = &request.settings;
    let opened = source(&request.model, settings, &request.extensions, host)?;
    opened.refuse_overlap(&request.model, &request.output)?;
    let spill = spill(request, &opened, host)?;
    let default = Text::Named(BUILTIN.to_owned());
    let text = request.calibration.as_ref().unwrap_or(&default);
    let windows = match reads_text(request) {
        true => Some(calibration(&opened, text, sampling(settings)?, host)?),
        false => None,
    };
    let mut importance = importance(settings, text.name(), &opened, windows.as_ref())?;
    let request_of_file = settings.gguf_request_with(importance.is_some(), &request.extensions)?;
    let plan = GgufPlan::new(&opened.model, &opened.directory, request_of_file)?;
    for note in &plan.notes {
        host.note(note.as_str());
    }
    if let Some(found) = &importance {
        let note = found.matrix().check(&plan.tensors, opened.model.architecture())?;
        note.into_iter().for_each(|note| host.note(note));
    }
    if let Some(ImportanceMatrix::Given(matrix)) = &mut importance {
        matrix.fit(&plan.tensors);
    }
    let mut writer = writer(&plan, &opened, importance.as_ref(), windows.as_ref(), request, host)?;
    for note in writer.notes() {
        host.note(note.as_str());
    }
    let batch = windows.as_ref().map(|windows| Batch { windows, spill: spill.as_ref(), states: None });
    let report = match fill(&plan, &opened, importance, batch, &mut writer, request, host) {
        Ok(report) => report,
        Err(error) => return Err(given_up(vec![writer], error)),
    };
    let published = writer.prepare(host.observer, host.cancel)?.publish()?;
    let bytes_before = opened.directory.source().file_bytes();
    Ok(GgufDone { plan, published, report, bytes_before, seconds: started.elapsed().as_secs_f64() })
}

/// The importance matrix of a run.
enum ImportanceMatrix {
    Given(Importance),
    /// It will be gathered. This is its outline.
    Gathered(Importance),
}

impl ImportanceMatrix {
    fn matrix(&self) -> &Importance {
        match self {
            Self::Given(matrix) | Self::Gathered(matrix) => matrix,
        }
    }
}

/// Calibrates, and writes all tensors and the report.
fn fill(
    plan: &GgufPlan,
    opened: &Opened,
    importance: Option<ImportanceMatrix>,
    mut batch: Option<Batch<'_>>,
    sink: &mut CheckpointWriter,
    request: &QuantizeRequest,
    host: &Host<'_>,
) -> Result<GgufReport> {
    let (observer, cancel) = (host.observer, host.cancel);
    if batch.is_some() {
        plan.check_outer(&opened.model, sink, cancel)?;
    }
    let mut importance = match (importance, &mut batch) {
        (Some(ImportanceMatrix::Given(matrix)), _) => Some(matrix),
        (Some(ImportanceMatrix::Gathered(outline)), Some(batch)) => {
            let mut matrix = gathered(outline, opened, batch, sink, request, host)?;
            matrix.fit(&plan.tensors);
            Some(matrix)
        }
        _ => None,
    };
    let steps = match batch.as_mut().filter(|_| !plan.request.method.transforms.is_empty()) {
        Some(batch) => {
            let states = batch.embedded(&opened.model)?;
            let (model, importance) = (&opened.model, importance.as_ref());
            Some(Steps::search(plan, model, states, importance, sink, observer, cancel)?)
        }
        None => None,
    };
    if let Some(steps) = &steps {
        importance = importance.map(|importance| steps.importance(importance, &plan.tensors));
    }
    let model = steps.as_ref().map_or(&opened.model, Steps::model);
    let mut curvature = match (plan.request.compensation(), batch) {
        (Some(settings), Some(batch)) => {
            Some(Curvature::new(model, batch.into_embedded(model)?, steps.is_none(), settings, cancel)?)
        }
        _ => None,
    };
    let inputs = GgufInputs { model, importance: importance.as_ref(), steps: steps.as_ref() };
    let report = write_tensors(plan, inputs, curvature.as_mut(), sink, observer, cancel)?;
    if !is_gguf_name(&request.output) {
        sink.add_file(REPORT, report.to_json()?.as_bytes())?;
    }
    Ok(report)
}

/// The calibration batch, which passes through the model several times with the same memory.
struct Batch<'a> {
    windows: &'a TokenWindows,
    spill: Option<&'a Spill>,
    states: Option<HiddenStates>,
}

impl Batch<'_> {
    /// The embeddings of the batch, for the next pass.
    fn embedded(&mut self, model: &Model) -> Result<&mut HiddenStates> {
        match &mut self.states {
            Some(states) => {
                states.restart(model, self.windows)?;
                Ok(states)
            }
            states => Ok(states.insert(HiddenStates::embed_in(model, self.windows, self.spill)?)),
        }
    }

    fn into_embedded(mut self, model: &Model) -> Result<HiddenStates> {
        self.embedded(model)?;
        self.states.ok_or_else(|| Error::Internal("the batch has no states".into()))
    }
}

/// Checks the memory budget. Hidden states that do not fit are kept in unnamed files next to the output.
fn spill(request: &QuantizeRequest, opened: &Opened, host: &Host<'_>) -> Result<Option<Spill>> {
    let sampling = match reads_text(request) {
        true => Some(sampling(&request.settings)?),
        false => None,
    };
    let file = request.settings.gguf_request_with(true, &request.extensions)?;
    let further = further_bytes(&request.settings, opened);
    let peak = |residence| peak_memory(&opened.model, &file, sampling, residence).saturating_add(further);
    let scratch = sampling.map_or(0, |sampling| scratch_bytes(&opened.model, sampling));
    let (residence, note) = residence_by(peak, scratch, request.memory_budget)?;
    if let Some(note) = note {
        host.note(note);
    }
    let Residence::Files { round_bytes, .. } = residence else { return Ok(None) };
    let exists = |path: &&Path| !path.as_os_str().is_empty() && path.is_dir();
    let parent = request.output.ancestors().skip(1).find(exists).unwrap_or(Path::new("."));
    Ok(Some(Spill::new(parent, round_bytes)))
}

/// The memory for an importance matrix from a file, and for the vocabulary.
fn further_bytes(settings: &RecipeSettings, opened: &Opened) -> u64 {
    /// The memory for a tokenizer, as JSON and as metadata, relative to the size of its file.
    const TOKENIZER: u64 = 8;
    let matrix = settings.gguf.imatrix.as_ref().and_then(|path| std::fs::metadata(path).ok());
    let matrix = matrix.map_or(0, |file| file.len().saturating_mul(2));
    let tokenizer = opened.directory.sidecar("tokenizer.json").and_then(|file| file.bytes().ok());
    let has_vocabulary = settings.gguf.pre.as_deref() != Some("none");
    let tokenizer = tokenizer.filter(|_| has_vocabulary).unwrap_or(0).saturating_mul(TOKENIZER);
    matrix.saturating_add(tokenizer)
}

/// Opens the model, dequantized if requested. The values of GGUF blocks may be written as floats without such a
/// request.
fn source(
    model: &Path,
    settings: &RecipeSettings,
    extensions: &Extensions,
    host: &Host<'_>,
) -> Result<Opened> {
    let opened = open_with(model, extensions, host)?;
    let keeps_floats =
        opened.directory.rounded_to().is_some() && settings.gguf_request_with(true, extensions)?.is_float();
    if keeps_floats { Ok(opened) } else { as_floats(opened, settings, host) }
}

fn importance(
    settings: &RecipeSettings,
    text: &str,
    opened: &Opened,
    windows: Option<&TokenWindows>,
) -> Result<Option<ImportanceMatrix>> {
    let gguf = &settings.gguf;
    if (windows.is_some() || gguf.imatrix.is_some()) && opened.model.quant_method().is_some() {
        if let Some(method) = settings.method.as_deref().filter(|_| gguf.imatrix.is_none()) {
            return Err(Error::usage(
                format!(
                    "method `{method}` has no effect: the model is already quantized, and its codes are kept"
                ),
                "add ‹requantize›, or omit ‹method›",
            ));
        }
        return Err(Error::usage(
            "an importance matrix has no effect: the model is already quantized, and its codes are kept",
            "leave it out, or add ‹requantize›",
        ));
    }
    match (&gguf.imatrix, windows) {
        (Some(path), _) => Ok(Some(ImportanceMatrix::Given(Importance::read(path)?))),
        (None, Some(windows)) => {
            Ok(Some(ImportanceMatrix::Gathered(Importance::outline(&opened.model, windows, text)?)))
        }
        (None, None) => Ok(None),
    }
}

/// Gathers an importance matrix, unless an interrupted run has done so, and saves it if requested.
fn gathered(
    outline: Importance,
    opened: &Opened,
    batch: &mut Batch<'_>,
    sink: &mut CheckpointWriter,
    request: &QuantizeRequest,
    host: &Host<'_>,
) -> Result<Importance> {
    let model = &opened.model;
    let found = match outline.recall(model, sink, host.cancel)? {
        Some(found) => found,
        None => outline.gather(model, batch.embedded(model)?, sink, host.observer, host.cancel)?,
    };
    if let Some(path) = &request.settings.gguf.save_imatrix {
        let bytes = match path.extension() == Some(OsStr::new("dat")) {
            true => found.to_dat(),
            false => found.to_gguf()?,
        };
        write_file(path, &bytes)?;
    }
    Ok(found)
}

/// Begins or resumes the file OUT if that ends in `.gguf`, otherwise a file in a directory of that name.
fn writer(
    plan: &GgufPlan,
    opened: &Opened,
    importance: Option<&ImportanceMatrix>,
    windows: Option<&TokenWindows>,
    request: &QuantizeRequest,
    host: &Host<'_>,
) -> Result<CheckpointWriter> {
    let single_file = is_gguf_name(&request.output);
    let file_name = match request.output.file_name() {
        Some(name) if single_file => name.to_string_lossy().into_owned(),
        _ => FILE.to_owned(),
    };
    let gguf = &request.settings.gguf;
    let split = gguf.split_max_size;
    let given = match importance {
        Some(ImportanceMatrix::Given(matrix)) => Some(matrix),
        _ => None,
    };
    let origin = gguf.imatrix.as_ref().or(gguf.save_imatrix.as_ref());
    let origin = origin.map_or_else(String::new, |path| path.display().to_string());
    let sampling = sampling(&request.settings)?;
    let calibration = windows.map(|windows| (windows, &sampling));
    let matrix = importance.map(ImportanceMatrix::matrix);
    let options = WriteOptions {
        force: request.force,
        resume: resume(request.resume),
        fingerprint: plan.fingerprint(&opened.directory, given, calibration, &host.program()?),
        archive: Arc::new(plan.archive(&file_name, split.is_some(), matrix, &origin)),
        single_file,
        max_shard_bytes: split.unwrap_or(WriteOptions::default().max_shard_bytes),
        ..WriteOptions::default()
    };
    CheckpointWriter::create(&request.output, plan.outputs()?, options)
}

/// Returns the bits per weight of a file, over all tensors.
pub fn bits_per_weight(plan: &GgufPlan) -> f64 {
    let elements: usize = plan.tensors.iter().map(|t| t.shape.iter().product::<usize>()).sum();
    plan.output_bytes() as f64 * 8.0 / elements.max(1) as f64
}

/// The plan of a GGUF file, and what a run needs.
#[derive(Debug)]
#[non_exhaustive]
pub struct GgufPlanned {
    /// The plan.
    pub plan: GgufPlan,
    /// The size of the model's files in bytes.
    pub input_bytes: u64,
    /// What a run needs, with a calibration text if these settings require one.
    pub needs: GgufNeeds,
    /// What a run needs that computes an importance matrix, if these settings neither require nor exclude one.
    pub calibrated: Option<GgufNeeds>,
    /// The size of the file or files in bytes, with the metadata, except what it says about an importance matrix that
    /// the run computes.
    pub file_bytes: u64,
    /// What a run computes, as for `needs`.
    pub work: GgufWork,
    /// What a run computes, as for `calibrated`.
    pub calibrated_work: Option<GgufWork>,
}

/// The estimated memory and disk space of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GgufNeeds {
    /// Memory in bytes, with hidden states in memory.
    pub peak_memory_bytes: u64,
    /// The smallest sufficient memory budget in bytes, with hidden states in files.
    pub smallest_budget_bytes: u64,
    /// The disk space in bytes for hidden states with that budget.
    pub scratch_bytes: u64,
}

impl GgufNeeds {
    fn of(model: &Model, request: &GgufRequest, sampling: Option<Sampling>, further: u64) -> Self {
        let files = Residence::Files { round_bytes: 0, experts_apart: false };
        let peak = |residence| peak_memory(model, request, sampling, residence).saturating_add(further);
        let [memory, in_files] = [peak(Residence::Memory), peak(files)];
        Self {
            peak_memory_bytes: memory,
            smallest_budget_bytes: in_files.min(memory),
            scratch_bytes: match sampling {
                Some(sampling) if in_files < memory => scratch_bytes(model, sampling),
                _ => 0,
            },
        }
    }
}

/// Returns the plan of a GGUF file. If a type needs an importance matrix, the plan is that of a run which computes one.
///
/// # Errors
/// [`Error::Usage`] if `save_imatrix` is set; as [`RecipeSettings::gguf_request`], [`open`](super::open),
/// [`Importance::read`] and [`GgufPlan::new`].
pub fn plan_gguf(model: &Path, settings: &RecipeSettings, host: &Host<'_>) -> Result<GgufPlanned> {
    plan_gguf_with(model, settings, &Extensions::default(), host)
}

/// Calls [`plan_gguf`] with the methods, steps and formats of a program.
///
/// # Errors
/// See [`plan_gguf`]; also when the extensions contradict each other.
pub fn plan_gguf_with(
    model: &Path,
    settings: &RecipeSettings,
    extensions: &Extensions,
    host: &Host<'_>,
) -> Result<GgufPlanned> {
    extensions.check()?;
    if settings.gguf.save_imatrix.is_some() {
        return Err(Error::usage(
            "‹save_imatrix› has no effect: a plan does not compute an importance matrix",
            "leave it out",
        ));
    }
    let opened = source(model, settings, extensions, host)?;
    // Types may depend on whether there is an importance matrix.
    let importance = settings.gguf.imatrix.as_ref().map(|path| Importance::read(path)).transpose()?;
    let weighted = settings.gguf_request_with(true, extensions)?;
    let calibrates = weighted.needs_text() || weighted.needs_importance() && importance.is_none();
    let request = settings.gguf_request_with(calibrates || importance.is_some(), extensions)?;
    let mut plan = GgufPlan::new(&opened.model, &opened.directory, request)?;
    if let Some(importance) = &importance {
        plan.notes.extend(importance.check(&plan.tensors, opened.model.architecture())?);
    }
    let sampling = sampling(settings)?;
    let further = further_bytes(settings, &opened);
    let of = |sampling| GgufNeeds::of(&opened.model, &plan.request, sampling, further);
    let needs = of(calibrates.then_some(sampling));
    let may_calibrate = !calibrates && importance.is_none() && opened.model.quant_method().is_none();
    let calibrated = may_calibrate.then(|| of(Some(sampling)));
    let input_bytes = opened.directory.source().file_bytes();
    let origin = match importance.is_some() {
        true => ImportanceOrigin::File,
        false if calibrates => ImportanceOrigin::Text,
        false => ImportanceOrigin::Absent,
    };
    let work = plan.work(&opened.model, calibrates.then_some(sampling), origin);
    let calibrated_work =
        may_calibrate.then(|| plan.work(&opened.model, Some(sampling), ImportanceOrigin::Text));
    let split = settings.gguf.split_max_size;
    let origin = settings.gguf.imatrix.as_ref().map_or_else(String::new, |path| path.display().to_string());
    let archive = plan.archive(FILE, split.is_some(), importance.as_ref(), &origin);
    let layout =
        archive.layout(&plan.outputs()?, split.unwrap_or(WriteOptions::default().max_shard_bytes))?;
    let file_bytes = layout.file_bytes();
    Ok(GgufPlanned { plan, input_bytes, needs, calibrated, file_bytes, work, calibrated_work })
}
