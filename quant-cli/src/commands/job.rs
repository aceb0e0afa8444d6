//! `quant job`: quantizes a model in units that any number of processes compute, and `quant merge`.

use std::path::PathBuf;

use quant_core::run::{Done, Quantized, Text};
use quant_core::units::{
    Cost, JobRequest, JobStatus, Phase, Selection, State, Unit, UnitDone, UnitJob, WorkOptions, init,
};
use quant_core::wording::counted;
use quant_core::{Error, Result};
use serde::Serialize;

use super::{Session, quantize};
use crate::output::{self, JsonOption, bytes, duration, table};
use crate::recipe::RecipeOptions;
use crate::system::peak_memory;

/// The subcommands of `quant job`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Create a job: plan it and store what its workers need
    Init(Box<InitArgs>),
    /// List the units of a job, with the predicted cost of each
    Units(ListArgs),
    /// Compute units whose results do not exist yet
    Run(RunArgs),
    /// Show which units are finished
    Status(ListArgs),
}

/// The model to quantize, and the directory of the job.
#[derive(Debug, clap::Args)]
struct InitArgs {
    /// Model directory, or org/name or org/name@revision on a hub
    model: PathBuf,
    /// Directory for the job, which all workers can read and write, or s3://BUCKET/PREFIX, gs:// or az:// in a build
    /// with object stores
    #[arg(long, value_name = "STORE")]
    job: PathBuf,
    // Not a doc comment, which would become part of the help.
    #[allow(missing_docs)]
    #[command(flatten)]
    recipe: RecipeOptions,
    /// Calibration text: a file (plain text, or .jsonl with `text` or `messages`) or a named set [default: builtin]
    #[arg(long, value_name = "FILE|NAME", help_heading = "Calibration")]
    calibration: Option<String>,
    /// Blocks per unit [default: 1, or --span-blocks if given]
    #[arg(long, value_name = "N")]
    blocks_per_unit: Option<usize>,
    /// Shards of the calibration windows for the float model [default: 1]
    #[arg(long, value_name = "N")]
    forward_shards: Option<usize>,
    /// Split the experts of each block into units of N, for methods that round each expert alone
    #[arg(long, value_name = "N")]
    experts_per_unit: Option<usize>,
    #[allow(missing_docs)]
    #[command(flatten)]
    json: JsonOption,
}

/// The job to list.
#[derive(Debug, clap::Args)]
struct ListArgs {
    /// Directory or URL of the job
    store: PathBuf,
    /// Copy of the model to read instead of the model that the job was created for
    #[arg(long, value_name = "MODEL")]
    model: Option<PathBuf>,
    #[allow(missing_docs)]
    #[command(flatten)]
    json: JsonOption,
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    /// Directory or URL of the job
    store: PathBuf,
    /// Compute only the unit of this name
    #[arg(long, value_name = "ID", conflicts_with_all = ["shard", "phase"])]
    unit: Option<String>,
    /// Compute the share of worker I of N; I begins at 0
    #[arg(long, value_name = "I/N", value_parser = shard)]
    shard: Option<(usize, usize)>,
    /// Compute only units of this phase: forward (hidden states of the float model) or blocks (tensors)
    #[arg(long, value_name = "forward|blocks", value_parser = phase)]
    phase: Option<Phase>,
    /// Copy of the model to read instead of the model that the job was created for
    #[arg(long, value_name = "MODEL")]
    model: Option<PathBuf>,
    /// Memory that a unit may use, such as 8GiB, or `auto` for 80 % of the available memory
    #[arg(long, value_name = "SIZE", default_value = "auto")]
    memory_budget: String,
    /// Directory for hidden states that do not fit into memory, and for copies of results if STORE is a URL [default:
    /// a directory in STORE, or that of the system for temporary files]
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    #[allow(missing_docs)]
    #[command(flatten)]
    json: JsonOption,
}

/// The job to merge, and where to write the checkpoint.
#[derive(Debug, clap::Args)]
pub struct MergeArgs {
    /// Directory or URL of the job
    store: PathBuf,
    /// Output directory; it is created only when complete and verified
    #[arg(long, short)]
    output: PathBuf,
    /// Copy of the model to read instead of the model that the job was created for
    #[arg(long, value_name = "MODEL")]
    model: Option<PathBuf>,
    /// Replace OUT, and discard the unfinished run of a different command
    #[arg(long)]
    force: bool,
    /// Fail if an interrupted merge cannot be continued
    #[arg(long)]
    pub resume: bool,
    /// Directory for copies of results if STORE is a URL [default: that of the system for temporary files]
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    #[allow(missing_docs)]
    #[command(flatten)]
    json: JsonOption,
}

/// Parses the share of a worker, `I/N`.
pub fn shard(text: &str) -> std::result::Result<(usize, usize), String> {
    let number = |text: &str| text.parse::<usize>().ok().filter(|n| *n <= 1 << 20);
    match text.split_once('/').map(|(index, count)| (number(index), number(count))) {
        Some((Some(index), Some(count))) if index < count => Ok((index, count)),
        _ => Err("expected I/N with I from 0 to N - 1, such as 0/8".into()),
    }
}

fn phase(text: &str) -> std::result::Result<Phase, String> {
    match text {
        "forward" => Ok(Phase::Forward),
        "blocks" => Ok(Phase::Blocks),
        _ => Err("expected forward or blocks".into()),
    }
}

#[derive(Serialize)]
struct InitJson {
    schema: &'static str,
    job: String,
    created: bool,
    units: usize,
}

#[derive(Serialize)]
struct UnitsJson<'a> {
    schema: &'static str,
    job: &'a str,
    units: Vec<UnitJson<'a>>,
}

#[derive(Serialize)]
struct UnitJson<'a> {
    id: &'a str,
    phase: &'static str,
    needs: &'a [String],
    #[serde(flatten)]
    cost: Cost,
}

#[derive(Serialize)]
struct RunJson<'a> {
    schema: &'static str,
    job: &'a str,
    units: Vec<RunUnitJson<'a>>,
    peak_memory_bytes: Option<u64>,
}

#[derive(Serialize)]
struct RunUnitJson<'a> {
    id: &'a str,
    computed: bool,
    seconds: f64,
}

fn phase_of(unit: &Unit) -> &'static str {
    if unit.is_forward() { "forward" } else { "blocks" }
}

/// Runs a subcommand of `quant job`.
pub fn run(args: &Args, session: &Session) -> Result<()> {
    match &args.command {
        Command::Init(args) => create(args, session),
        Command::Units(args) => list(args, session),
        Command::Run(args) => work(args, session),
        Command::Status(args) => status(args, session),
    }
}

impl Args {
    /// Whether the same command continues after an interruption.
    pub fn continues(&self) -> bool {
        matches!(self.command, Command::Run(_) | Command::Init(_))
    }
}

fn create(args: &InitArgs, session: &Session) -> Result<()> {
    let request = JobRequest {
        model: args.model.clone(),
        settings: args.recipe.settings()?,
        calibration: args.calibration.clone().map(Text::Named),
        blocks_per_unit: args.blocks_per_unit,
        forward_shards: args.forward_shards,
        experts_per_unit: args.experts_per_unit,
        ..JobRequest::default()
    };
    args.json.check_distinct(&args.model, &request.settings.files().collect::<Vec<_>>())?;
    let made = init(&request, &args.job, &session.host())?;
    let json = InitJson {
        schema: "quant-job-init/1",
        job: made.job.clone(),
        created: made.created,
        units: made.units,
    };
    args.json.emit(&json, || {
        let made_or_not = if made.created { "created" } else { "exists already" };
        format!("{}: {made_or_not}, {}\n", args.job.display(), counted(made.units, "unit"))
    })
}

fn list(args: &ListArgs, session: &Session) -> Result<()> {
    args.json.check_distinct(&args.store, &[])?;
    let job = UnitJob::open_anywhere(&args.store, args.model.as_deref(), &session.host())?;
    let costs = job.costs()?;
    let units = job.units().iter().zip(&costs);
    let units = units.map(|(unit, cost)| UnitJson {
        id: &unit.id,
        phase: phase_of(unit),
        needs: &unit.needs,
        cost: *cost,
    });
    let json = UnitsJson { schema: "quant-job-units/1", job: job.digest(), units: units.collect::<Vec<_>>() };
    args.json.emit(&json, || {
        let row = |unit: &UnitJson<'_>| {
            let needs = match unit.needs {
                [] => String::new(),
                [one] => one.clone(),
                [first, ..] => format!("{first} and {} more", unit.needs.len() - 1),
            };
            let cost = &unit.cost;
            let memory = [cost.memory_bytes, cost.smallest_budget_bytes].map(bytes);
            let written = bytes(cost.output_bytes);
            vec![unit.id.to_owned(), needs, duration(cost.seconds), memory.join(" / "), written]
        };
        let rows: Vec<_> = json.units.iter().map(row).collect();
        let mut text = table(&["unit", "needs", "time", "memory / in files", "writes"], &rows);
        let seconds: f64 = costs.iter().map(|cost| cost.seconds).sum();
        let units = counted(rows.len(), "unit");
        text.push_str(&format!("{units}, {} on one machine like this\n", duration(seconds)));
        text
    })
}

fn work(args: &RunArgs, session: &Session) -> Result<()> {
    args.json.check_distinct(&args.store, &[])?;
    let mut host = session.host();
    host.scratch = args.scratch.as_deref();
    let selection = match (&args.unit, args.shard) {
        (Some(id), _) => Selection::Unit(id.clone()),
        (None, Some((index, count))) => Selection::Shard { index, count },
        (None, None) => Selection::All,
    };
    let options = WorkOptions {
        phase: args.phase,
        memory_budget: args.memory_budget.parse()?,
        scratch: args.scratch.clone(),
    };
    let job = UnitJob::open(&args.store, args.model.as_deref(), &host)?;
    let done = job.run(&selection, &options, &host)?;
    let units = done.iter();
    let units =
        units.map(|unit| RunUnitJson { id: &unit.id, computed: unit.computed, seconds: unit.seconds });
    let json = RunJson {
        schema: "quant-job-run/1",
        job: job.digest(),
        units: units.collect(),
        peak_memory_bytes: peak_memory(),
    };
    args.json.emit(&json, || {
        let computed = done.iter().filter(|unit: &&UnitDone| unit.computed).count();
        // Not `sum`, which is -0 for no unit.
        let seconds = done.iter().fold(0.0, |sum, unit| sum + unit.seconds);
        format!(
            "{} computed, {} existed already, in {}\n",
            counted(computed, "unit"),
            done.len() - computed,
            duration(seconds)
        )
    })
}

fn status(args: &ListArgs, session: &Session) -> Result<()> {
    args.json.check_distinct(&args.store, &[])?;
    let job = UnitJob::open_anywhere(&args.store, args.model.as_deref(), &session.host())?;
    let status = job.status()?;
    args.json.emit(&status, || status_text(&status))
}

fn status_text(status: &JobStatus) -> String {
    let count = |state| status.units.iter().filter(|unit| unit.state == state).count();
    let mut text = format!(
        "{} of {} units done, {} ready, {} waiting for others\n",
        status.done,
        status.total,
        count(State::Ready),
        count(State::Waiting)
    );
    let ready = status.units.iter().filter(|unit| unit.state == State::Ready);
    for unit in ready.take(8) {
        text.push_str(&format!("ready: {}\n", unit.unit));
    }
    for name in &status.other_files {
        text.push_str(&format!("not a result of this job: {name}\n"));
    }
    match status.temporary_files {
        0 => {}
        some => text.push_str(&format!("{some} temporary files of running or killed workers\n")),
    }
    text
}

/// Runs `quant merge`.
pub fn merge(args: &MergeArgs, session: &Session) -> Result<()> {
    args.json.check()?;
    let mut host = session.host();
    host.scratch = args.scratch.as_deref();
    let job = UnitJob::open_anywhere(&args.store, args.model.as_deref(), &host)?;
    output::outside(&[("json", args.json.json.as_deref())], &[job.model_directory(), &args.output])?;
    let done: Quantized = job.merge(&args.output, (args.force, args.resume), &host)?;
    let done = Done::Checkpoints(done);
    let summary = done.summary().with_peak_memory(peak_memory());
    args.json.emit_by(&summary, || match &summary {
        quant_core::run::Summary::Checkpoints(summary) => {
            let next = quantize::next_step(summary, job.model_directory(), false, session);
            output::print(&(quantize::text(summary) + &next))
        }
        _ => Err(Error::Internal("a summary of the wrong kind".into())),
    })
}
