//! Creating jobs, and opening them as a worker does.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde_json::Value;

use super::graph::{self, Cost, Split, Unit};
use super::record::{JobRecord, SCHEMA, changed, companions, normalized, tensors_sha256};
use super::store::{MAX_INPUT_BYTES, Publication, RECORD, Store, check_location, damaged, is_url};
use super::windows;
use crate::calibrate::{TextTokenizer, TokenWindows};
use crate::checkpoint::{read_capped, refuse_overlap};
use crate::pipeline::{self, Job};
use crate::recipe::{Extensions, Plan, Rates};
use crate::run::{self, Host, Opened, RecipeSettings, SettingFile, Text, open_with, prepared, recipe_text};
use crate::wording::counted;
use crate::{CancelToken, Error, Observer, Result};

/// A job to be created.
#[derive(Debug, Clone, Default)]
pub struct JobRequest {
    /// A model directory, a GGUF file, or a name in the host's catalog.
    pub model: PathBuf,
    /// How the model is quantized, in one format.
    pub settings: RecipeSettings,
    /// Steps, roundings, methods and formats of the calling program, which the settings and a recipe file may name. A
    /// job stores only their names: workers open it [with the same ones](UnitJob::open_with).
    pub extensions: Extensions,
    /// The calibration text; `None` means the recipe's, or the catalog's default.
    pub calibration: Option<Text>,
    /// Blocks per unit; by default 1, or a span of the rounding.
    pub blocks_per_unit: Option<usize>,
    /// The number of shards of calibration windows for the passage through the float model; 1 by default.
    pub forward_shards: Option<usize>,
    /// Experts per unit, if the experts of a block are computed by several units. The rest of the block is one more
    /// unit. By default, a unit has all experts of its blocks.
    pub experts_per_unit: Option<usize>,
}

/// A job that was created, or existed already.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Initialized {
    /// Whether the job is new.
    pub created: bool,
    /// The number of units.
    pub units: usize,
    /// The digest of what the job depends on.
    pub job: String,
}

/// Creates a job in a directory, or at the URL of an object store (`s3://BUCKET/PREFIX`, `gs://…`, `az://…`), which
/// needs the feature `store`. If it holds the same job already, nothing changes.
///
/// # Errors
/// [`Error::Usage`] for invalid requests, and if the directory holds anything but this job; [`Error::Unavailable`] if
/// the job was created on a different type of machine; errors of the model, the text and the files.
pub fn init(request: &JobRequest, directory: &Path, host: &Host<'_>) -> Result<Initialized> {
    check_location(directory)?;
    let settings = &request.settings;
    if settings.writes_gguf()? {
        return Err(Error::usage("jobs in units do not write GGUF files", "run ‹quantize()›"));
    }
    if settings.writes_floats()?.is_some() {
        return Err(Error::usage("jobs in units do not write float checkpoints", "run ‹quantize()›"));
    }
    settings.check_formats(&request.extensions)?;
    settings.gguf.refuse()?;
    for (name, value) in [
        ("blocks_per_unit", request.blocks_per_unit),
        ("forward_shards", request.forward_shards),
        ("experts_per_unit", request.experts_per_unit),
    ] {
        if value == Some(0) {
            return Err(Error::usage(format!("‹{name}› is 0"), "choose a positive number"));
        }
    }
    let recipe = settings.recipe_with(&request.extensions)?;
    if recipe.containers.len() != 1 {
        return Err(Error::usage("a job writes one format", "create a job for each format"));
    }
    let no_text = |text: &Text| settings.needs_no_text(&recipe.method, &text.setting("calibration"));
    if let (Some(text), false) = (&request.calibration, recipe.needs_text()) {
        return Err(no_text(text));
    }
    let opened = prepared(open_with(&request.model, &request.extensions, host)?, &recipe, settings, host)?;
    TextTokenizer::check(&opened.directory)?;
    if !is_url(directory) {
        refuse_overlap(opened.directory.path(), directory)?;
    }
    let mut plans = settings.plans(&opened.model, &recipe)?;
    let Some(plan) = plans.pop() else { return Err(Error::Internal("no plan was made".into())) };
    if let (Some(text), false) = (&request.calibration, plan.needs_text()) {
        return Err(no_text(text));
    }
    run::warn_of_length(&plan, &opened.model, host);
    run::report_notes(std::slice::from_ref(&plan), &opened.model, host);
    let windows = run::windows(&opened, &plan, &recipe, request.calibration.as_ref(), host)?;
    let blocks_per_unit = request.blocks_per_unit.or(plan.span_blocks()).unwrap_or(1);
    let split = Split {
        blocks_per_unit,
        forward_shards: request.forward_shards.unwrap_or(1),
        experts_per_unit: request.experts_per_unit,
    };
    let units = graph::units(&plan, &opened.model, windows.as_ref(), split)?;
    if request.forward_shards.is_some() && !units.iter().any(Unit::is_forward) {
        return Err(Error::usage(
            "‹forward_shards› has no effect: no unit passes calibration windows through the float model",
            "leave it out",
        ));
    }
    if let Some(asked) = request.forward_shards {
        let shards = units.iter().filter_map(Unit::shard).max().map_or(0, |last| last + 1);
        if shards < asked {
            host.warn(format!(
                "the calibration text fills only {}, not {asked}: windows that pass through a block together stay \
                together",
                counted(shards, "forward shard")
            ));
        }
    }
    host.cancel.check()?;

    // The merge writes the files next to the weights.
    pipeline::companion_bytes(&opened.directory, &plan)?;
    let store = Store::create(directory, host)?;
    let mut stored = settings.clone();
    for SettingFile { setting, path, extension } in stored.files_mut() {
        *path = copied(&store, path.as_deref(), &setting.replace('_', "-"), extension)?;
    }
    let tokens = match &windows {
        Some(windows) => Some(store.publish_input(&windows::to_bytes(windows)?, "windows", "safetensors")?),
        None => None,
    };
    let record = JobRecord {
        schema: SCHEMA.into(),
        model: absolute(opened.directory.path())?,
        settings: stored,
        windows: tokens,
        text: windows.as_ref().and_then(|windows| windows.text()).map(str::to_owned),
        blocks_per_unit: split.blocks_per_unit,
        forward_shards: split.forward_shards,
        experts_per_unit: split.experts_per_unit,
        run: run_record(&opened, &plan, windows.as_ref(), host)?,
        tensors_sha256: tensors_sha256(&plan),
        companions: companions(&opened.directory, host.cancel)?,
    };
    let created = store.files.publish_bytes(RECORD, &record.to_bytes()?)?;
    if created == Publication::Different {
        let existing = JobRecord::read(&store)?;
        existing.check(directory, &record.run, &record.tensors_sha256)?;
        if existing.digest() != record.digest() {
            return Err(Error::usage(
                format!("{} holds a job with other units", directory.display()),
                "create the job in a new directory",
            ));
        }
        let changed = changed(&existing.companions, &record.companions);
        if !changed.is_empty() {
            return Err(Error::usage(
                format!(
                    "files next to the weights have changed since the job in {} was created: {}",
                    directory.display(),
                    changed.join(", ")
                ),
                "create the job in a new directory",
            ));
        }
    }
    let created = created == Publication::Created;
    Ok(Initialized { created, units: units.len(), job: record.digest() })
}

/// Copies a file into the inputs of a job, and returns its name there.
fn copied(store: &Store, path: Option<&Path>, kind: &str, extension: &str) -> Result<Option<PathBuf>> {
    let Some(path) = path else { return Ok(None) };
    let bytes = match recipe_text(path).filter(|_| kind == "recipe") {
        Some(text) => text.as_bytes().to_vec(),
        None => {
            let real = path.canonicalize().map_err(|e| Error::io("read", path, e))?;
            read_capped(&real, path, MAX_INPUT_BYTES)?.map_err(|reason| damaged(path, reason))?
        }
    };
    Ok(Some(PathBuf::from(store.publish_input(&bytes, kind, extension)?)))
}

fn absolute(path: &Path) -> Result<PathBuf> {
    path.canonicalize().map_err(|e| Error::io("open", path, e))
}

fn run_record(
    opened: &Opened,
    plan: &Plan,
    windows: Option<&TokenWindows>,
    host: &Host<'_>,
) -> Result<Value> {
    let program = host.program()?;
    let job = job(opened, plan, windows, (host.observer, host.cancel));
    Ok(normalized(&pipeline::fingerprint(&job, &opened.directory, &program)))
}

pub(super) fn job<'a>(
    opened: &'a Opened,
    plan: &'a Plan,
    windows: Option<&'a TokenWindows>,
    (observer, cancel): (&'a dyn Observer, &'a CancelToken),
) -> Job<'a> {
    Job { model: &opened.model, plan, windows, maxima: None, searches: None, observer, cancel }
}

/// A job as a worker opens it.
pub struct UnitJob {
    pub(super) store: Store,
    pub(super) opened: Opened,
    pub(super) plan: Plan,
    pub(super) windows: Option<TokenWindows>,
    pub(super) units: Vec<Unit>,
    pub(super) digest: String,
    /// The hashes of the files next to the weights, by name.
    pub(super) companions: BTreeMap<String, String>,
    /// The digests of results that were read, by unit.
    pub(super) known: Mutex<HashMap<String, String>>,
}

impl UnitJob {
    /// Opens a job in a directory, or at the URL of an object store. `model` is a copy of the job's model; without it, the
    /// model is read where it was when the job was created.
    ///
    /// # Errors
    /// [`Error::Usage`] if the directory holds no job, or the program, the model or the settings differ from those of
    /// the job; [`Error::Unavailable`] if this machine has a different instruction set or processor;
    /// [`Error::InputFile`] if the store is damaged; [`Error::Unavailable`] also if the object store is; errors of the
    /// model.
    pub fn open(directory: &Path, model: Option<&Path>, host: &Host<'_>) -> Result<Self> {
        Self::open_with(directory, model, &Extensions::default(), host)
    }

    /// Opens a job to show or merge it, which computes nothing, so the type of the machine does not matter.
    ///
    /// # Errors
    /// As [`open`](Self::open), except for a different type of machine.
    pub fn open_anywhere(directory: &Path, model: Option<&Path>, host: &Host<'_>) -> Result<Self> {
        Self::opened(directory, model, &Extensions::default(), false, host)
    }

    /// [`open`](Self::open) with the steps, roundings, methods and formats of the calling program.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(
        directory: &Path,
        model: Option<&Path>,
        extensions: &Extensions,
        host: &Host<'_>,
    ) -> Result<Self> {
        Self::opened(directory, model, extensions, true, host)
    }

    fn opened(
        directory: &Path,
        model: Option<&Path>,
        extensions: &Extensions,
        computes: bool,
        host: &Host<'_>,
    ) -> Result<Self> {
        let store = Store::open(directory, host)?;
        let record = JobRecord::read(&store)?;
        let mut settings = record.settings.clone();
        for path in settings.files_mut().into_iter().filter_map(|file| file.path.as_mut()) {
            *path = store.intact_input(&path.to_string_lossy(), host.cancel)?;
        }
        let recipe = settings.recipe_with(extensions)?;
        let opened = open_with(model.unwrap_or(&record.model), extensions, host)?;
        let opened = prepared(opened, &recipe, &settings, host)?;
        let mut plans = settings.plans(&opened.model, &recipe)?;
        let plan = plans.pop().filter(|_| plans.is_empty());
        let plan = plan.ok_or_else(|| damaged(&store.shown(RECORD), "does not name one format".into()))?;
        let windows = match (&record.windows, plan.needs_text()) {
            (Some(name), true) => {
                let windows = windows::read(&store.intact_input(name, host.cancel)?)?;
                Some(windows.named(record.text.as_deref()))
            }
            (None, false) => None,
            _ => return Err(damaged(&store.shown(RECORD), "has the wrong inputs".into())),
        };
        if let Some(largest) = windows.as_ref().and_then(|w| w.tokens().iter().max()) {
            opened.model.check_token(*largest)?;
        }
        let mut run = run_record(&opened, &plan, windows.as_ref(), host)?;
        if !computes {
            record.overlook_machine(&mut run);
        }
        record.check(directory, &run, &tensors_sha256(&plan))?;
        let split = Split {
            blocks_per_unit: record.blocks_per_unit,
            forward_shards: record.forward_shards,
            experts_per_unit: record.experts_per_unit,
        };
        let units = graph::units(&plan, &opened.model, windows.as_ref(), split)?;
        let (digest, companions, known) = (record.digest(), record.companions, Mutex::default());
        Ok(Self { store, opened, plan, windows, units, digest, companions, known })
    }

    /// The units, in an order in which each follows those that it needs.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The directory or file of the model.
    pub fn model_directory(&self) -> &Path {
        self.opened.directory.path()
    }

    /// The directory of the job, or its URL in an object store.
    pub fn directory(&self) -> &Path {
        self.store.location()
    }

    /// The digest of what the job depends on.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Predicts the cost of every unit on this machine, whose speed is measured first.
    ///
    /// # Errors
    /// [`Error::Internal`] if this crate has a bug.
    pub fn costs(&self) -> Result<Vec<Cost>> {
        let rates = Rates::measure()?;
        self.units.iter().map(|unit| unit.cost(&self.plan, &self.opened.model, rates)).collect()
    }

    /// Returns the unit of a name.
    ///
    /// # Errors
    /// [`Error::Usage`] if the job has no such unit.
    pub fn unit(&self, id: &str) -> Result<&Unit> {
        self.units.iter().find(|unit| unit.id == id).ok_or_else(|| {
            Error::usage(
                format!("{} has no unit `{id}`", self.store.location().display()),
                "‹job_units(STORE)› lists the units",
            )
        })
    }
}
