//! `quant plan MODEL`: shows what would happen to every tensor.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use quant_core::calibrate::Residence;
use quant_core::engines::{Basis, ENGINES, Engine, Known, Outline, RANKS};
use quant_core::model::Carried;
use quant_core::recipe::{Action, METHODS, Plan, PlanEntry, Rates, Recipe};
use quant_core::run::{self, RecipeSettings, plan_gguf};
use quant_core::wording::{CommandLine, Wording, counted, worded};
use quant_core::{Error, Result};
use serde::Serialize;

use super::Session;
use crate::output::{self, JsonOption, bytes, table};
use crate::recipe::RecipeOptions;

/// What to plan.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model directory or GGUF file, or org/name or org/name@revision on a hub
    #[arg(required_unless_present_any = ["print_recipe", "print_recipe_schema"])]
    pub model: Option<PathBuf>,
    /// Print a preset, or the recipe of the options, as a recipe file, and nothing else
    #[arg(long, value_name = "PRESET", conflicts_with = "model", num_args = 0..=1, default_missing_value = "")]
    print_recipe: Option<String>,
    /// Print the JSON schema of recipe files, for editors, and nothing else
    #[arg(long, hide_short_help = true, conflicts_with_all = ["model", "print_recipe"])]
    print_recipe_schema: bool,
    #[command(flatten)]
    recipe: RecipeOptions,
    /// Show every tensor, instead of one line per kind of tensor
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    json: JsonOption,
}

#[derive(Serialize)]
struct PlanJson<'a> {
    schema: &'static str,
    method: &'a str,
    input_bytes: u64,
    peak_memory_bytes: u64,
    /// The smallest sufficient memory budget, with hidden states kept in files.
    smallest_budget_bytes: u64,
    /// The disk space for hidden states that this budget requires.
    scratch_bytes: u64,
    /// The parts of a vision-language model outside its text tower; absent for other models.
    #[serde(skip_serializing_if = "Option::is_none")]
    carried: Option<Carried>,
    selectors: Vec<SelectorJson<'a>>,
    formats: Vec<FormatJson<'a>>,
}

#[derive(Serialize)]
struct FormatJson<'a> {
    format: &'a str,
    output_bytes: u64,
    bits_per_quantized_weight: f64,
    warnings: Vec<String>,
    /// The parts of the requested quantization that the format cannot represent.
    loses: Vec<String>,
    engines: Vec<EngineJson>,
    tensors: Vec<TensorJson<'a>>,
}

#[derive(Serialize)]
struct EngineJson {
    engine: &'static str,
    /// The version that was run, or whose sources were read.
    version: &'static str,
    /// The version whose sources were read, if that is a different one.
    #[serde(skip_serializing_if = "Option::is_none")]
    read_version: Option<&'static str>,
    /// The date on which the engine's sources were read.
    read: &'static str,
    family: FamilyJson,
    ranks: Vec<VerdictJson>,
}

/// The evidence that the engine supports the model's family.
#[derive(Serialize)]
struct FamilyJson {
    /// `run`, `read` or `not checked`.
    basis: &'static str,
    /// The version of the engine that was run or read.
    version: Option<&'static str>,
    /// The date of the run or of the reading.
    date: Option<&'static str>,
}

#[derive(Serialize)]
struct VerdictJson {
    ranks: usize,
    loads: &'static str,
    reason: Option<String>,
}

#[derive(Serialize)]
struct SelectorJson<'a> {
    option: String,
    pattern: &'a str,
    outcome: &'a str,
    modules: &'a [String],
}

#[derive(Serialize)]
struct TensorJson<'a> {
    tensor: &'a str,
    dtype: &'a str,
    shape: &'a [usize],
    action: String,
    bytes_before: u64,
    bytes_after: u64,
    outputs: Vec<OutputJson<'a>>,
}

#[derive(Serialize)]
struct OutputJson<'a> {
    tensor: &'a str,
    dtype: &'a str,
    shape: &'a [usize],
}

/// Prints the plan.
pub fn run(args: &Args, session: &Session) -> Result<()> {
    if let Some(preset) = &args.print_recipe {
        return output::print(&requested_recipe(preset, args.recipe.settings()?)?.to_commented_toml());
    }
    if args.print_recipe_schema {
        return output::print(&Recipe::schema());
    }
    let model = args.model.as_deref().ok_or_else(|| Error::Internal("a plan without a model".into()))?;
    let read: Vec<_> = [&args.recipe.recipe, &args.recipe.channel_maxima, &args.recipe.gguf.imatrix]
        .into_iter()
        .filter_map(|file| file.as_deref())
        .collect();
    args.json.check_distinct(model, &read)?;
    let settings = args.recipe.settings()?;
    if settings.writes_gguf()? {
        return super::gguf::plan(model, &settings, args.all, &args.json, session);
    }
    let planned = Planned::new(model, &settings, session)?;
    args.json
        .emit(&json(&planned, &CommandLine), || worded(&text(&planned, args.all), &CommandLine).into_owned())
}

/// Returns the recipe to print: that of a preset, of a method, or of the options alone.
fn requested_recipe(name: &str, mut settings: RecipeSettings) -> Result<Recipe> {
    if settings.writes_gguf()? || settings.writes_floats()?.is_some() {
        let format = settings.format.concat();
        return Err(Error::usage(
            format!("there are no recipe files for ‹format={format}›"),
            "leave ‹format› out, or choose a format of quantized safetensors",
        ));
    }
    settings.gguf.refuse()?;
    let is_method = METHODS.iter().any(|method| *method.name == *name);
    let taken = if is_method { &mut settings.method } else { &mut settings.preset };
    if !name.is_empty() {
        if let Some(other) = taken {
            return Err(Error::usage(
                format!("`{name}` and `{other}` cannot be combined"),
                "name one of them",
            ));
        }
        *taken = Some(name.to_owned());
    }
    settings.recipe()
}

/// Returns a plan as JSON with the given wording, and the estimated seconds of a run if they are known.
///
/// # Errors
/// Same as `quant plan`.
pub fn value(
    model: &Path,
    settings: &RecipeSettings,
    wording: &dyn Wording,
    session: &Session,
) -> Result<(serde_json::Value, Option<f64>)> {
    let (value, seconds) = if settings.writes_gguf()? {
        let planned = plan_gguf(model, settings, &session.host())?;
        let seconds = planned.work.seconds(Rates::measure()?);
        (serde_json::to_value(super::gguf::value(&planned)), Some(seconds))
    } else {
        let planned = Planned::new(model, settings, session)?;
        (serde_json::to_value(json(&planned, wording)), Some(planned.seconds))
    };
    Ok((value.map_err(|e| Error::Internal(e.to_string()))?, seconds))
}

struct Planned {
    plans: Vec<Plan>,
    outlines: Vec<Outline>,
    carried: Option<Carried>,
    memory: u64,
    /// The smallest sufficient memory budget, and the disk space that it requires.
    smallest: (u64, u64),
    seconds: f64,
}

impl Planned {
    fn new(model: &Path, settings: &RecipeSettings, session: &Session) -> Result<Self> {
        if settings.writes_floats()?.is_some() {
            return Err(Error::usage(
                "there is no plan for float checkpoints: every float gets the requested type",
                "run ‹quantize()›, or plan a different format",
            ));
        }
        // This names an unknown format before settings that depend on the format.
        let recipe = settings.recipe()?;
        settings.gguf.refuse()?;
        let host = session.host();
        let opened = run::prepared(run::open(model, &host)?, &recipe, settings, &host)?;
        let plans = settings.plans(&opened.model, &recipe)?;
        let smallest = match Plan::residence(&plans, &opened.model, 0, false) {
            Ok(_) => 0,
            Err(budget) => budget,
        };
        let residence = Plan::residence(&plans, &opened.model, smallest, false).unwrap_or_default();
        let scratch = match residence {
            Residence::Memory => 0,
            files => Plan::scratch_bytes(&plans, &opened.model, files),
        };
        Ok(Self {
            smallest: (smallest, scratch),
            memory: Plan::peak_memory(&plans, &opened.model),
            outlines: plans.iter().map(|plan| Outline::new(plan, &opened.model)).collect(),
            // The estimated time depends on a measurement, so the JSON omits it: equal plans give equal JSON.
            seconds: Plan::seconds(&plans, &opened.model, Rates::measure()?),
            carried: opened.model.carried(),
            plans,
        })
    }
}

fn outcome(entry: &PlanEntry) -> String {
    match &entry.action {
        Action::Copy if entry.modified => "float, folded or rotated".into(),
        Action::Copy => "unchanged".into(),
        Action::Rewrite { .. } => "float, possibly rescaled".into(),
        Action::Quantize { scheme, .. } => scheme.to_string(),
        Action::Repack { scheme, .. } => format!("{scheme}, same values"),
        _ => "changed".into(),
    }
}

fn json<'a>(planned: &'a Planned, wording: &dyn Wording) -> PlanJson<'a> {
    let Planned { plans, outlines, carried, memory, smallest, .. } = planned;
    let first = plans.first();
    let selectors = first.into_iter().flat_map(|plan| &plan.selectors).map(|s| SelectorJson {
        option: wording.setting(s.option, None),
        pattern: &s.pattern,
        outcome: &s.outcome,
        modules: &s.modules,
    });
    PlanJson {
        schema: "quant-plan/2",
        method: first.map_or("", |plan| &plan.method.name),
        input_bytes: first.map_or(0, Plan::input_bytes),
        peak_memory_bytes: *memory,
        smallest_budget_bytes: smallest.0,
        scratch_bytes: smallest.1,
        carried: carried.clone(),
        selectors: selectors.collect(),
        formats: plans
            .iter()
            .zip(outlines)
            .map(|(plan, outline)| format_json(plan, outline, wording))
            .collect(),
    }
}

fn format_json<'a>(plan: &'a Plan, outline: &Outline, wording: &dyn Wording) -> FormatJson<'a> {
    let reworded = |texts: Vec<String>| texts.iter().map(|text| worded(text, wording).into_owned()).collect();
    let tensors = plan.entries.iter().map(|e| TensorJson {
        tensor: &e.tensor,
        dtype: e.info.dtype.name(),
        shape: &e.info.shape,
        action: outcome(e),
        bytes_before: e.input_bytes(),
        bytes_after: e.output_bytes(),
        outputs: e
            .outputs
            .iter()
            .map(|o| OutputJson { tensor: &o.name, dtype: o.info.dtype.name(), shape: &o.info.shape })
            .collect(),
    });
    FormatJson {
        format: plan.container.name(),
        output_bytes: plan.output_bytes(),
        bits_per_quantized_weight: plan.bits_per_quantized_weight(),
        warnings: reworded(plan.warnings()),
        loses: reworded(plan.losses()),
        engines: ENGINES.iter().map(|engine| engine_json(engine, outline)).collect(),
        tensors: tensors.collect(),
    }
}

fn engine_json(engine: &Engine, outline: &Outline) -> EngineJson {
    let verdict = |&ranks: &usize| {
        let verdict = engine.loads(outline, ranks)?;
        Some(VerdictJson { ranks, loads: verdict.word(), reason: verdict.reason().map(str::to_owned) })
    };
    let ranks = RANKS.iter().filter_map(verdict).collect();
    let Known { basis, version, date, .. } = engine.known(outline);
    let checked = basis != Basis::NotChecked;
    let family = FamilyJson {
        basis: basis.word(),
        version: checked.then_some(version),
        date: checked.then_some(date),
    };
    EngineJson {
        engine: engine.name,
        version: engine.version(),
        read_version: engine.run.map(|_| engine.loader.version),
        read: engine.loader.read,
        family,
        ranks,
    }
}

fn text(planned: &Planned, all: bool) -> String {
    let Planned { plans, outlines, carried, memory, smallest, seconds } = planned;
    let mut text = String::new();
    if let Some(Carried { class, tensors, bytes: size }) = carried {
        text.push_str(&format!(
            "text tower of {class}; the {tensors} other tensors ({}) are copied unchanged\n\n",
            bytes(*size)
        ));
    }
    for (plan, outline) in plans.iter().zip(outlines) {
        if plans.len() > 1 {
            text.push_str(&format!("{}:\n\n", plan.container.name()));
        }
        text.push_str(&plan_text(plan, all));
        text.push('\n');
        text.push_str(&engines_text(outline));
        text.push('\n');
    }
    for s in plans.first().into_iter().flat_map(|plan| &plan.selectors) {
        text.push_str(&format!(
            "{}: {} {} {}\n",
            CommandLine.setting(s.option, Some(&s.pattern)),
            counted(s.modules.len(), "linear"),
            if s.modules.len() == 1 { "gets" } else { "get" },
            s.outcome
        ));
        for module in s.modules.iter().filter(|_| all) {
            text.push_str(&format!("  {module}\n"));
        }
    }
    text.push_str(&format!(
        "needs about {} of memory and {} on this machine\n",
        bytes(*memory),
        about(*seconds)
    ));
    let (budget, scratch) = *smallest;
    if budget < *memory {
        text.push_str(&format!(
            "with --memory-budget: at least {} of memory, and {} of disk space for hidden states\n",
            bytes(budget),
            bytes(scratch)
        ));
    }
    text
}

/// Returns a table of the engines that load the checkpoint, per number of ranks, and the reasons why others do not.
fn engines_text(outline: &Outline) -> String {
    let mut reasons: Vec<(String, usize, Vec<&str>)> = Vec::new();
    let (mut rows, mut dated) = (Vec::new(), Vec::new());
    for engine in ENGINES {
        let mut row = vec![format!("{} {}", engine.name, engine.version())];
        let mut last = None;
        for ranks in RANKS {
            let verdict = engine.loads(outline, ranks);
            row.push(verdict.as_ref().map_or("–", |v| v.word()).to_owned());
            let reason = verdict.and_then(|v| v.reason().map(str::to_owned));
            if let Some(reason) = reason.clone().filter(|_| reason != last) {
                match reasons.iter_mut().find(|(known, from, _)| *known == reason && *from == ranks) {
                    Some((_, _, engines)) => engines.push(engine.name),
                    None => reasons.push((reason, ranks, vec![engine.name])),
                }
            }
            last = reason;
        }
        let known = engine.known(outline);
        row.push(known.basis.word().to_owned());
        rows.push(row);
        // The family was checked separately.
        if known.basis != Basis::NotChecked
            && (known.version, known.date) != (engine.loader.version, engine.loader.read)
        {
            let Known { basis, version, date, .. } = known;
            dated.push(format!(
                "{}: support for the model family was {} in {version} on {date}\n",
                engine.name,
                basis.word()
            ));
        }
    }
    let header: Vec<String> =
        RANKS.iter().map(|ranks| if *ranks == 1 { "1 rank".to_owned() } else { ranks.to_string() }).collect();
    let header: Vec<&str> = std::iter::once("loads in")
        .chain(header.iter().map(String::as_str))
        .chain(["model family"])
        .collect();
    let mut text = table(&header, &rows);
    for (reason, ranks, engines) in reasons {
        let from = if ranks == 1 { String::new() } else { format!(", {ranks} ranks") };
        text.push_str(&format!("{}{from}: {reason}\n", engines.join("; ")));
    }
    dated.into_iter().for_each(|line| text.push_str(&line));
    let other = ENGINES.iter().filter(|engine| engine.run.is_some());
    let other: String =
        other.map(|engine| format!("; {}: of {}", engine.name, engine.loader.version)).collect();
    let read: BTreeSet<&str> = ENGINES.iter().map(|engine| engine.loader.read).collect();
    let read = read.into_iter().collect::<Vec<_>>().join(" and ");
    text.push_str(&format!(
        "(model family: whether models of the family were loaded in the engine, or its source code was read; formats: \
        from the source code of these versions, read on {read}{other}; see docs/formats/engines.md)\n"
    ));
    text
}

fn plan_text(plan: &Plan, all: bool) -> String {
    let header = ["tensor", "shape", "dtype", "gets", "bytes before", "after"];
    let row = |name: String, e: &PlanEntry, count: u64, before: u64, after: u64| {
        let shape: Vec<String> = e.info.shape.iter().map(usize::to_string).collect();
        let times = if count > 1 { format!("{count} × ") } else { String::new() };
        vec![
            name,
            format!("{times}{}", shape.join("×")),
            e.info.dtype.to_string(),
            outcome(e),
            bytes(before),
            bytes(after),
        ]
    };
    let mut kinds: Vec<(String, &PlanEntry, u64, u64, u64)> = Vec::new();
    let mut places = HashMap::new();
    for entry in &plan.entries {
        let name = if all { entry.tensor.clone() } else { kind(&entry.tensor) };
        let (before, after) = (entry.input_bytes(), entry.output_bytes());
        let key = (name.clone(), entry.info.dtype, &entry.info.shape, outcome(entry));
        let place = *places.entry(key).or_insert(kinds.len());
        if place == kinds.len() {
            kinds.push((name, entry, 0, 0, 0));
        }
        let kind = &mut kinds[place];
        kind.2 += 1;
        kind.3 += before;
        kind.4 += after;
    }
    let rows: Vec<_> = kinds
        .into_iter()
        .map(|(name, entry, count, before, after)| row(name, entry, count, before, after))
        .collect();
    let mut text = table(&header, &rows);
    text.push('\n');
    text.push_str(&format!(
        "{} with {}: {} → {} ({:.2} bits per quantized weight)\n",
        plan.method.name,
        plan.container.name(),
        bytes(plan.input_bytes()),
        bytes(plan.output_bytes()),
        plan.bits_per_quantized_weight(),
    ));
    for loss in plan.losses() {
        text.push_str(&format!("lost: {loss}\n"));
    }
    for warning in plan.warnings() {
        text.push_str(&format!("note: {warning}\n"));
    }
    text
}

/// Formats an estimated duration, rounded to a whole unit.
pub(super) fn about(seconds: f64) -> String {
    match seconds {
        s if s < 1.5 => "a second".into(),
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s if s < 3.2e7 => format!("{:.0} h", s / 3600.0),
        _ => "more than a year".into(),
    }
}

/// `model.layers.3.mlp.up_proj.weight` → `model.layers.*.mlp.up_proj.weight`.
pub(super) fn kind(tensor: &str) -> String {
    let parts: Vec<&str> =
        tensor.split('.').map(|p| if p.bytes().all(|b| b.is_ascii_digit()) { "*" } else { p }).collect();
    parts.join(".")
}
