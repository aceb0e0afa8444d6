//! The entry point of a run, which `quant quantize` calls.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::files::{check_replaceable, distinct, outside, write_file};
use super::floats::{self, FloatsDone};
use super::gguf::{self, GgufDone};
use super::host::{Host, Opened, open_with, prepared};
use super::memory::{MemoryBudget, residence};
use super::outputs::{outputs, refuse_existing, write};
use super::settings::RecipeSettings;
use super::steps::{StepTime, StepTimes};
use super::summary::Summary;
use super::texts::{BUILTIN, Text, calibration};
use crate::calibrate::{ChannelMaxima, TextTokenizer, TokenWindows};
use crate::checkpoint::{Dtype, Published};
use crate::engines::{Compatibility, ENGINES, Engine, Outline};
use crate::model::Model;
use crate::pipeline::{Job, QuantReport};
use crate::recipe::{Extensions, Plan, Rates, Recipe};
use crate::{Error, Event, Result};

/// With fewer tokens, the result of a search depends on chance.
const FEW_TOKENS: usize = 256;

/// A request: the model, the settings, and the destination of the result.
#[derive(Debug, Clone, Default)]
pub struct QuantizeRequest {
    /// A model directory, a GGUF file, or a name in the host's catalog.
    pub model: PathBuf,
    /// The directory to write; several formats get one subdirectory each. A path that ends in `.gguf` is written as a
    /// file if that is the format.
    pub output: PathBuf,
    /// The settings of the quantization.
    pub settings: RecipeSettings,
    /// Steps, roundings, methods and formats of the calling program, which the settings and a recipe file may name.
    pub extensions: Extensions,
    /// The calibration text; `None` means the recipe's, or the catalog's [`BUILTIN`].
    pub calibration: Option<Text>,
    /// Where to write the maxima of all input channels (safetensors).
    pub save_channel_maxima: Option<PathBuf>,
    /// The memory that the run may use. If it is predicted to need more, hidden states are kept in files next to the
    /// output.
    pub memory_budget: MemoryBudget,
    /// Whether an existing output is replaced once the new one is complete, and whether the finished work of an
    /// interrupted run with a different request is discarded.
    pub force: bool,
    /// Whether an interrupted run with a different request is an error even with `force`. Without `force`, a finished
    /// output is an error too, as always. An interrupted run with the same request is continued in any case.
    pub resume: bool,
}

impl QuantizeRequest {
    /// Creates a request for the default recipe on a model.
    pub fn new(model: impl Into<PathBuf>, output: impl Into<PathBuf>) -> Self {
        Self { model: model.into(), output: output.into(), ..Self::default() }
    }

    /// Returns the files that are read, except the model's; the name of a text counts as a file.
    pub fn files_read(&self) -> Vec<&Path> {
        let settings = &self.settings;
        let text = self.calibration.as_ref().and_then(Text::file);
        settings.files().chain(settings.gguf.imatrix.as_deref()).chain(text).collect()
    }
}

/// The result of a run.
#[derive(Debug)]
#[non_exhaustive]
pub enum Done {
    /// Checkpoints.
    Checkpoints(Quantized),
    /// A GGUF file.
    Gguf(Box<GgufDone>),
    /// A float checkpoint.
    Floats(Box<FloatsDone>),
}

/// Checkpoints that were written, one per format.
#[derive(Debug)]
#[non_exhaustive]
pub struct Quantized {
    /// The checkpoints, each with its report.
    pub outputs: Vec<(Published, QuantReport)>,
    /// The duration of each step, summed over all blocks; reading the calibration text is not included.
    pub steps: Vec<StepTime>,
    /// The duration of the run in seconds.
    pub seconds: f64,
}

impl Done {
    /// Summarizes the run.
    pub fn summary(&self) -> Summary {
        match self {
            Self::Checkpoints(done) => Summary::of_checkpoints(done),
            Self::Gguf(done) => Summary::of_gguf(done),
            Self::Floats(done) => Summary::of_floats(done),
        }
    }

    /// Returns the summary as JSON.
    ///
    /// # Errors
    /// Never for summaries made by this crate.
    pub fn summary_json(&self) -> Result<String> {
        serde_json::to_string_pretty(&self.summary()).map_err(|e| Error::Internal(e.to_string()))
    }
}

/// Quantizes a model into directories that appear only when everything in them is verified.
///
/// The finished work of an interrupted run stays next to the output, and the same request continues it; the result is
/// byte-identical.
///
/// # Errors
/// [`Error::Usage`] and similar errors for invalid requests, before anything is written, and if an interrupted run with
/// a different request has finished work that would be lost; errors of the model and the
/// text; [`Error::Interrupted`] when cancelled.
pub fn quantize(request: &QuantizeRequest, host: &Host<'_>) -> Result<Done> {
    QuantizeJob::new(request)?.run(host)
}

/// A request that was checked as far as possible without its model.
#[derive(Debug)]
pub struct QuantizeJob<'a> {
    request: &'a QuantizeRequest,
    output: Output,
}

#[derive(Debug)]
enum Output {
    Gguf,
    Floats(Dtype),
    /// A checkpoint per format of the recipe, in these directories.
    Checkpoints(Box<Recipe>, Vec<PathBuf>),
}

impl<'a> QuantizeJob<'a> {
    /// Checks a request.
    ///
    /// # Errors
    /// [`Error::Usage`] for an invalid request; errors of recipe files; errors if an output cannot be written.
    pub fn new(request: &'a QuantizeRequest) -> Result<Self> {
        let settings = &request.settings;
        if settings.writes_gguf()? {
            gguf::check(request)?;
            return Ok(Self { request, output: Output::Gguf });
        }
        if let Some(dtype) = settings.writes_floats()? {
            floats::check(request)?;
            return Ok(Self { request, output: Output::Floats(dtype) });
        }
        // Before settings that depend on the format.
        settings.check_formats(&request.extensions)?;
        settings.gguf.refuse()?;
        if is_gguf_name(&request.output) {
            return Err(Error::usage(
                format!(
                    "{} has the name of a GGUF file, but the format is not gguf",
                    request.output.display()
                ),
                "set ‹format=gguf›, or choose an output whose name does not end in .gguf",
            ));
        }
        let recipe = settings.recipe_with(&request.extensions)?;
        if let (Some(text), false) = (&request.calibration, recipe.needs_text()) {
            return Err(settings.needs_no_text(&recipe.method, &text.setting("calibration")));
        }
        let outputs = outputs(&request.output, &recipe)?;
        if let Some(path) = &request.save_channel_maxima {
            check_maxima(path, &recipe, request)?;
        }
        Ok(Self { request, output: Output::Checkpoints(Box::new(recipe), outputs) })
    }

    /// Returns the directories of quantized checkpoints that will be written.
    pub fn outputs(&self) -> &[PathBuf] {
        match &self.output {
            Output::Checkpoints(_, outputs) => outputs,
            Output::Gguf | Output::Floats(_) => &[],
        }
    }

    /// Runs the request.
    ///
    /// # Errors
    /// As [`quantize`].
    pub fn run(&self, host: &Host<'_>) -> Result<Done> {
        let started = Instant::now();
        let steps = StepTimes::new(host.observer);
        let host = host.observed(&steps);
        let request = self.request;
        let (recipe, outputs) = match &self.output {
            Output::Gguf => return Ok(Done::Gguf(Box::new(gguf::quantize(request, started, &host)?))),
            Output::Floats(dtype) => {
                return Ok(Done::Floats(Box::new(floats::write(request, *dtype, started, &host)?)));
            }
            Output::Checkpoints(recipe, outputs) => (recipe, outputs),
        };
        // For a local model this is checked later; here it prevents fetching a model for a run that cannot write.
        if host.catalog.is_named(&request.model) {
            refuse_existing(outputs, request.force, request.resume)?;
        }
        let opened = prepared(
            open_with(&request.model, &request.extensions, &host)?,
            recipe,
            &request.settings,
            &host,
        )?;
        if opened.directory.tokenizer_path().is_none() {
            host.warn("the model has no tokenizer.json, so the output will not have one either");
        }
        TextTokenizer::check(&opened.directory)?;
        opened.refuse_overlap(&request.model, &request.output)?;
        let outputs = checkpoints(&opened, recipe, request, outputs, &host)?;
        Ok(Done::Checkpoints(Quantized {
            outputs,
            steps: steps.times(),
            seconds: started.elapsed().as_secs_f64(),
        }))
    }
}

fn check_maxima(path: &Path, recipe: &Recipe, request: &QuantizeRequest) -> Result<()> {
    const NAME: &str = "save_channel_maxima";
    distinct(&[(NAME, Some(path))], &request.files_read())?;
    if !recipe.needs_text() {
        return Err(request.settings.needs_no_text(&recipe.method, NAME));
    }
    if let Some(step) = recipe.method.preparation.map(|p| p.name()) {
        return Err(Error::usage(
            format!(
                "‹{NAME}› would save the maxima of the model after `{step}`, which methods without this \
                step cannot use"
            ),
            format!("save them in a run of a different method, or with ‹skip={step}›"),
        ));
    }
    outside(&[(NAME, Some(path))], &[&request.model, &request.output])?;
    check_replaceable(NAME, path, |path| match ChannelMaxima::read(path) {
        Err(error @ Error::Io { .. }) => Err(error),
        read => Ok(read.is_ok()),
    })
}

fn checkpoints(
    opened: &Opened,
    recipe: &Recipe,
    request: &QuantizeRequest,
    outputs: &[PathBuf],
    host: &Host<'_>,
) -> Result<Vec<(Published, QuantReport)>> {
    let settings = &request.settings;
    let plans = settings.plans(&opened.model, recipe)?;
    refuse_existing(outputs, request.force, request.resume)?;
    let Some(plan) = plans.first() else { return Err(Error::Internal("no plan was made".into())) };
    if let (Some(text), false) = (&request.calibration, plan.needs_text()) {
        return Err(settings.needs_no_text(&plan.method, &text.setting("calibration")));
    }
    if request.save_channel_maxima.is_some() && !plan.needs_text() {
        return Err(settings.needs_no_text(&plan.method, "save_channel_maxima"));
    }
    warn_of_length(plan, &opened.model, host);
    report_notes(&plans, &opened.model, host);
    let (residence, note) =
        residence(&plans, &opened.model, request.memory_budget, request.save_channel_maxima.is_some())?;
    if let Some(note) = note {
        host.note(note);
    }
    let windows = windows(opened, plan, recipe, request.calibration.as_ref(), host)?;
    host.cancel.check()?;
    if host.observer.wants_estimate() && plan.needs_text() {
        let seconds = Plan::seconds(&plans, &opened.model, Rates::measure()?);
        host.observer.event(&Event::Expected { stage: "quantize", seconds });
    }
    let maxima =
        request.save_channel_maxima.as_ref().map(|path| (path, Mutex::new(ChannelMaxima::default())));
    let job = |plan| Job {
        model: &opened.model,
        plan,
        windows: windows.as_ref(),
        maxima: maxima.as_ref().map(|(_, kept)| kept),
        searches: None,
        observer: host.observer,
        cancel: host.cancel,
    };
    let jobs: Vec<Job<'_>> = plans.iter().map(job).collect();
    let written = write(&jobs, &opened.directory, outputs, (request.force, request.resume), residence, host);
    if written.is_err() && outputs.len() > 1 {
        let _ = std::fs::remove_dir(&request.output);
    }
    let written = written?;
    if let Some((path, kept)) = maxima {
        let kept = kept.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = write_file(path, &kept.to_bytes()?) {
            host.note(format!(
                "{} is complete; the following error concerns a different file",
                request.output.display()
            ));
            return Err(error);
        }
    }
    Ok(written)
}

/// Returns the calibration windows of a plan: of `text`, or of the text that the recipe names.
pub(crate) fn windows(
    opened: &Opened,
    plan: &Plan,
    recipe: &Recipe,
    text: Option<&Text>,
    host: &Host<'_>,
) -> Result<Option<TokenWindows>> {
    if !plan.needs_text() {
        return Ok(None);
    }
    let of_recipe = || Text::Named(recipe.calibration.clone().unwrap_or_else(|| BUILTIN.to_owned()));
    let text = text.cloned().unwrap_or_else(of_recipe);
    let windows = calibration(opened, &text, plan.sampling, host)?;
    let counted = windows.layout().counted();
    if counted < FEW_TOKENS {
        host.warn(format!(
            "only {counted} token(s) of the calibration text are counted, too few to choose scales reliably"
        ));
    }
    Ok(Some(windows))
}

pub(crate) fn warn_of_length(plan: &Plan, model: &Model, host: &Host<'_>) {
    let positions = model.architecture().max_positions;
    if plan.needs_text() && plan.sampling.length > positions {
        host.warn(format!(
            "calibration windows of {} tokens are longer than the {positions} positions the model was \
            trained for; use ‹seq_len={positions}› or less",
            plan.sampling.length
        ));
    }
}

pub(crate) fn report_notes(plans: &[Plan], model: &Model, host: &Host<'_>) {
    let lost = |plan: &Plan| plan.losses().into_iter().map(|message| ("lost", message)).collect::<Vec<_>>();
    let warnings =
        |plan: &Plan| plan.warnings().into_iter().map(|message| ("note", message)).collect::<Vec<_>>();
    let mut notes: Vec<(&str, String)> =
        plans.iter().flat_map(|plan| [lost(plan), warnings(plan)].concat()).collect();
    for plan in plans {
        let outline = Outline::new(plan, model);
        let schemes = plan.module_schemes();
        // One note per engine: a warning may say the same.
        let is_noted = |engine: &Engine| {
            plan.container.loader_rules().iter().any(|rule| rule.refuses(&engine.loader, &schemes))
        };
        for engine in ENGINES.iter().filter(|engine| engine.is_common && !is_noted(engine)) {
            if let Some(Compatibility::No(reason)) = engine.loads(&outline, 1) {
                let (name, version, format) = (engine.name, engine.version(), outline.container);
                notes.push(("note", format!("{name} {version} does not load this as {format}: {reason}")));
            }
        }
    }
    let mut emitted = BTreeSet::new();
    for (label, message) in notes {
        if emitted.insert(message.clone()) {
            host.observer.event(&Event::Note { label, message });
        }
    }
}

/// A GGUF output with any other name is a directory that holds the file.
pub fn is_gguf_name(output: &Path) -> bool {
    output.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}
