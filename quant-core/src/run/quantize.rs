//! The one call: what `quant quantize` does.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::files::{check_writable, distinct, outside, write_file};
use super::gguf::{self, GgufDone};
use super::host::{Host, Opened, open, prepared};
use super::outputs::{outputs, refuse_existing, write};
use super::settings::RecipeSettings;
use super::steps::{StepTime, StepTimes};
use super::summary::Summary;
use super::texts::{BUILTIN, Text, calibration};
use crate::calibrate::ChannelMaxima;
use crate::checkpoint::{Published, refuse_overlap};
use crate::engines::{ENGINES, Outline, Verdict};
use crate::model::Model;
use crate::pipeline::{Job, QuantReport};
use crate::recipe::{Plan, Rates, Recipe};
use crate::{Error, Event, Result};

/// A search on fewer tokens follows chance.
const FEW_TOKENS: usize = 256;

/// What to quantize how, and where the result goes.
#[derive(Debug, Clone, Default)]
pub struct QuantizeRequest {
    /// A model directory, a GGUF file, or a name that the host's catalog knows.
    pub model: PathBuf,
    /// The directory to write; with several formats it holds one for each. A path that ends in `.gguf` is written as a file
    /// where that is the format.
    pub output: PathBuf,
    /// How.
    pub settings: RecipeSettings,
    /// The calibration text; none means the recipe's, or the catalog's [`BUILTIN`].
    pub calibration: Option<Text>,
    /// Where the maxima of all input channels are written (safetensors).
    pub save_channel_maxima: Option<PathBuf>,
    /// Whether an output that exists is replaced, once the new one is complete.
    pub force: bool,
    /// Whether to continue an interrupted run.
    pub resume: bool,
}

impl QuantizeRequest {
    /// The default recipe on a model.
    pub fn new(model: impl Into<PathBuf>, output: impl Into<PathBuf>) -> Self {
        Self { model: model.into(), output: output.into(), ..Self::default() }
    }

    /// Files that are read, the model's apart; the name of a text counts as one.
    pub fn files_read(&self) -> Vec<&Path> {
        let settings = &self.settings;
        let files = [&settings.recipe, &settings.channel_maxima, &settings.gguf.imatrix];
        let text = self.calibration.as_ref().and_then(Text::file);
        files.into_iter().filter_map(|file| file.as_deref()).chain(text).collect()
    }
}

/// What a run has written.
#[derive(Debug)]
#[non_exhaustive]
pub enum Done {
    /// Checkpoints.
    Checkpoints(Quantized),
    /// A GGUF file.
    Gguf(Box<GgufDone>),
}

/// Checkpoints, one for each format.
#[derive(Debug)]
#[non_exhaustive]
pub struct Quantized {
    /// Each with its report.
    pub outputs: Vec<(Published, QuantReport)>,
    /// What each step took, all blocks together; reading the calibration text is not among them.
    pub steps: Vec<StepTime>,
    /// What the run took.
    pub seconds: f64,
}

impl Done {
    /// What was done, in numbers.
    pub fn summary(&self) -> Summary {
        match self {
            Self::Checkpoints(done) => Summary::of_checkpoints(done),
            Self::Gguf(done) => Summary::of_gguf(done),
        }
    }

    /// The same as JSON.
    ///
    /// # Errors
    /// Never for summaries made by this crate.
    pub fn summary_json(&self) -> Result<String> {
        serde_json::to_string_pretty(&self.summary()).map_err(|e| Error::Internal(e.to_string()))
    }
}

/// Quantizes a model into directories that appear only when everything in them is verified.
///
/// What an interrupted run has finished stays beside the output, and a request with [`QuantizeRequest::resume`] continues
/// it: the result is the same, byte for byte.
///
/// # Errors
/// [`Error::Usage`] and its like for what cannot be asked for, before anything is read or written; errors of the model and
/// the text; [`Error::Interrupted`] when cancelled.
pub fn quantize(request: &QuantizeRequest, host: &Host<'_>) -> Result<Done> {
    QuantizeJob::new(request)?.run(host)
}

/// A request that was checked as far as it can be without its model.
#[derive(Debug)]
pub struct QuantizeJob<'a> {
    request: &'a QuantizeRequest,
    /// None where a GGUF file is written.
    checkpoints: Option<(Recipe, Vec<PathBuf>)>,
}

impl<'a> QuantizeJob<'a> {
    /// Checks a request.
    ///
    /// # Errors
    /// [`Error::Usage`]; errors of recipe files; when an output cannot be written.
    pub fn new(request: &'a QuantizeRequest) -> Result<Self> {
        let settings = &request.settings;
        if settings.writes_gguf()? {
            gguf::check(request)?;
            return Ok(Self { request, checkpoints: None });
        }
        settings.gguf.refuse()?;
        let recipe = settings.recipe()?;
        if let (Some(text), false) = (&request.calibration, recipe.needs_text()) {
            return Err(settings.needs_no_text(&recipe.method, &text.setting("calibration")));
        }
        let outputs = outputs(&request.output, &recipe)?;
        if let Some(path) = &request.save_channel_maxima {
            check_maxima(path, &recipe, request)?;
        }
        Ok(Self { request, checkpoints: Some((recipe, outputs)) })
    }

    /// The directories that will be written, or none where it is a GGUF file.
    pub fn outputs(&self) -> &[PathBuf] {
        self.checkpoints.as_ref().map_or(&[], |(_, outputs)| outputs)
    }

    /// Does it.
    ///
    /// # Errors
    /// As [`quantize`].
    pub fn run(&self, host: &Host<'_>) -> Result<Done> {
        let started = Instant::now();
        let steps = StepTimes::new(host.observer);
        let host = host.observed(&steps);
        let Some((recipe, outputs)) = &self.checkpoints else {
            return Ok(Done::Gguf(Box::new(gguf::quantize(self.request, started, &host)?)));
        };
        let request = self.request;
        // Found later for a model that is here; nothing is fetched for a run that cannot write.
        if host.catalog.is_named(&request.model) {
            refuse_existing(outputs, request)?;
        }
        let opened = prepared(open(&request.model, &host)?, recipe, &request.settings, &host)?;
        if opened.directory.tokenizer_path().is_none() {
            host.warn("the model has no tokenizer.json, and so the result will have none");
        }
        refuse_overlap(opened.directory.path(), &request.output)?;
        let outputs = checkpoints(&opened, recipe, request, outputs, &host)?;
        Ok(Done::Checkpoints(Quantized {
            outputs,
            steps: steps.times(),
            seconds: started.elapsed().as_secs_f64(),
        }))
    }
}

/// Fails where the maxima of channels cannot be kept.
fn check_maxima(path: &Path, recipe: &Recipe, request: &QuantizeRequest) -> Result<()> {
    const NAME: &str = "save_channel_maxima";
    distinct(&[(NAME, Some(path))], &request.files_read())?;
    if !recipe.needs_text() {
        return Err(request.settings.needs_no_text(&recipe.method, NAME));
    }
    if let Some(step) = recipe.method.preparation.map(|p| p.name()) {
        return Err(Error::usage(
            format!("‹{NAME}› would keep maxima of the model after `{step}`, which no other method sees"),
            format!("save them in a run of another method, or with ‹skip={step}›"),
        ));
    }
    outside(&[(NAME, Some(path))], &[&request.model, &request.output])?;
    check_writable(path)
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
    refuse_existing(outputs, request)?;
    let Some(plan) = plans.first() else { return Err(Error::Internal("no plan was made".into())) };
    if let (Some(text), false) = (&request.calibration, plan.needs_text()) {
        return Err(settings.needs_no_text(&plan.method, &text.setting("calibration")));
    }
    if request.save_channel_maxima.is_some() && !plan.needs_text() {
        return Err(settings.needs_no_text(&plan.method, "save_channel_maxima"));
    }
    let positions = opened.model.architecture().max_positions;
    if plan.needs_text() && plan.sampling.length > positions {
        host.warn(format!(
            "calibration windows of {} tokens are longer than the {positions} positions the model was made for; \
             ‹seq_len={positions}› stays inside",
            plan.sampling.length
        ));
    }
    tell_of(&plans, &opened.model, host);
    let windows = match plan.needs_text() {
        true => {
            let of_recipe = || recipe.calibration.clone().unwrap_or_else(|| BUILTIN.to_owned());
            let text = request.calibration.clone().unwrap_or_else(|| Text::Named(of_recipe()));
            Some(calibration(opened, &text, plan.sampling, host)?)
        }
        false => None,
    };
    if let Some(counted) = windows.as_ref().map(|w| w.layout().counted()).filter(|c| *c < FEW_TOKENS) {
        host.warn(format!(
            "only {counted} token(s) of the calibration text count, too few to judge scales by"
        ));
    }
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
        observer: host.observer,
        cancel: host.cancel,
    };
    let jobs: Vec<Job<'_>> = plans.iter().map(job).collect();
    let written = write(&jobs, &opened.directory, outputs, (request.force, request.resume), host);
    if written.is_err() && outputs.len() > 1 {
        // Made for them; stays where anything is left in it.
        let _ = std::fs::remove_dir(&request.output);
    }
    let written = written?;
    if let Some((path, kept)) = maxima {
        let kept = kept.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = write_file(path, &kept.to_bytes()?) {
            host.note(format!(
                "{} is complete; what follows concerns another file",
                request.output.display()
            ));
            return Err(error);
        }
    }
    Ok(written)
}

/// What the formats lose, and which common engines do not load them.
fn tell_of(plans: &[Plan], model: &Model, host: &Host<'_>) {
    let lost = |plan: &Plan| plan.losses().into_iter().map(|said| ("lost", said)).collect::<Vec<_>>();
    let warnings = |plan: &Plan| plan.warnings().into_iter().map(|said| ("note", said)).collect::<Vec<_>>();
    let mut notes: Vec<(&str, String)> =
        plans.iter().flat_map(|plan| [lost(plan), warnings(plan)].concat()).collect();
    for plan in plans {
        let outline = Outline::new(plan, model);
        for engine in ENGINES.iter().filter(|engine| engine.is_common) {
            if let Some(Verdict::No(reason)) = engine.loads(&outline, 1) {
                let (name, version, format) = (engine.name, engine.version, outline.container);
                notes.push(("note", format!("{name} {version} does not load this as {format}: {reason}")));
            }
        }
    }
    notes.dedup();
    for (label, message) in notes {
        host.observer.event(&Event::Note { label, message });
    }
}

/// Whether a GGUF output is a file and not a directory that holds one.
pub(super) fn is_single_file(output: &Path) -> bool {
    output.extension() == Some(OsStr::new("gguf"))
}
