//! Shows the results of `quant quantize` and `quant plan` with `--format gguf`.

use std::path::Path;

use quant_core::Result;
use quant_core::format::loaders::LLAMA_CPP;
use quant_core::recipe::Rates;
use quant_core::run::{
    GgufNeeds, GgufPlanned, GgufSummary, RecipeSettings, Replaced, Worst, bits_per_weight, plan_gguf,
};
use serde::Serialize;

use super::Session;
use super::plan::about;
use crate::output::{JsonOption, bytes, duration, table};

/// Formats the summary of a run as text.
pub fn text(summary: &GgufSummary) -> String {
    let mut text = format!(
        "{} → {} as {} ({:.2} bits per weight)\n",
        bytes(summary.bytes_before),
        bytes(summary.bytes_after),
        summary.mixture,
        summary.bits_per_weight,
    );
    let types: Vec<String> = summary.types.iter().map(|(kind, n)| format!("{n} × {kind}")).collect();
    text.push_str(&format!("tensors: {}\n", types.join(", ")));
    for Replaced { tensor, wanted, got, .. } in &summary.replaced {
        text.push_str(&format!(
            "fallback: {tensor} is stored as {got}, because its row width does not suit {wanted}\n"
        ));
    }
    if let Some(Worst { tensor, relative_rms, .. }) = &summary.worst_tensor {
        text.push_str(&format!("largest weight error: {:.2} % in {tensor} (RMS relative to the weight; not a measure of quality)\n", 100.0 * relative_rms));
    }
    text.push_str(&format!("written to {}\nin {}\n", summary.path, duration(summary.seconds)));
    text
}

#[derive(Serialize)]
pub(super) struct PlanJson<'a> {
    schema: &'static str,
    format: &'static str,
    mixture: &'static str,
    input_bytes: u64,
    /// The tensors.
    output_bytes: u64,
    /// The tensors and the metadata.
    file_bytes: u64,
    bits_per_weight: f64,
    #[serde(flatten)]
    needs: GgufNeeds,
    /// What a run with a calibration text needs, if the text is optional.
    #[serde(skip_serializing_if = "Option::is_none")]
    with_calibration: Option<GgufNeeds>,
    engines: [EngineJson; 1],
    notes: &'a [String],
    tensors: Vec<TensorJson<'a>>,
}

/// An engine that loads the file, with the version and the date of the sources that the plan follows.
#[derive(Serialize)]
struct EngineJson {
    engine: &'static str,
    version: &'static str,
    read: &'static str,
}

#[derive(Serialize)]
struct TensorJson<'a> {
    tensor: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    replaces: Option<&'static str>,
    shape: &'a [usize],
    bytes: u64,
    keeps_codes: bool,
    sources: Vec<&'a str>,
}

/// Prints the plan of a GGUF file.
pub fn plan(
    model: &Path,
    settings: &RecipeSettings,
    all: bool,
    json: &JsonOption,
    session: &Session,
) -> Result<()> {
    let planned = plan_gguf(model, settings, &session.host())?;
    // The estimated time depends on a measurement, so the JSON omits it: equal plans give equal JSON.
    let rates = Rates::measure()?;
    json.emit(&value(&planned), || plan_text(&planned, all, rates))
}

pub(super) fn value(planned: &GgufPlanned) -> PlanJson<'_> {
    let GgufPlanned { plan, input_bytes, needs, calibrated, file_bytes, .. } = planned;
    let tensors = plan.tensors.iter().map(|t| TensorJson {
        tensor: &t.name,
        kind: t.kind.name,
        replaces: t.replaces.map(|kind| kind.name),
        shape: &t.shape,
        bytes: t.bytes(),
        keeps_codes: t.keeps_codes(),
        sources: t.sources(),
    });
    PlanJson {
        schema: "quant-gguf-plan/2",
        format: quant_core::gguf::FORMAT,
        mixture: plan.mixture().name,
        input_bytes: *input_bytes,
        output_bytes: plan.output_bytes(),
        file_bytes: *file_bytes,
        bits_per_weight: bits_per_weight(plan),
        needs: *needs,
        with_calibration: *calibrated,
        engines: [EngineJson { engine: LLAMA_CPP.name, version: LLAMA_CPP.version, read: LLAMA_CPP.read }],
        notes: &plan.notes,
        tensors: tensors.collect(),
    }
}

fn plan_text(planned: &GgufPlanned, all: bool, rates: Rates) -> String {
    let GgufPlanned { plan, needs, calibrated, file_bytes, work, calibrated_work, .. } = planned;
    let mut text = format!(
        "GGUF, {}: {}, of which {} are tensors, {:.2} bits per weight\n\n",
        plan.mixture().name,
        bytes(*file_bytes),
        bytes(plan.output_bytes()),
        bits_per_weight(plan)
    );
    let rows: Vec<Vec<String>> = if all {
        let row = |t: &quant_core::gguf::PlannedTensor| {
            let shape: Vec<String> = t.shape.iter().map(usize::to_string).collect();
            vec![t.name.clone(), shape.join("×"), t.kind.name.to_owned(), bytes(t.bytes())]
        };
        plan.tensors.iter().map(row).collect()
    } else {
        let mut kinds: Vec<(String, &str, usize, u64)> = Vec::new();
        for t in &plan.tensors {
            let name: Vec<&str> = t.name.split('.').filter(|part| part.parse::<usize>().is_err()).collect();
            let name = name.join(".");
            match kinds.iter_mut().find(|k| k.0 == name && k.1 == t.kind.name) {
                Some(known) => {
                    known.2 += 1;
                    known.3 += t.bytes();
                }
                None => kinds.push((name, t.kind.name, 1, t.bytes())),
            }
        }
        let row = |(name, kind, n, size): (String, &str, usize, u64)| {
            vec![name, n.to_string(), kind.to_owned(), bytes(size)]
        };
        kinds.into_iter().map(row).collect()
    };
    let head = if all { ["tensor", "shape", "type", "size"] } else { ["tensor", "tensors", "type", "size"] };
    text.push_str(&table(&head, &rows));
    for t in plan.replaced() {
        let wanted = t.replaces.map_or("", |kind| kind.name);
        text.push_str(&format!(
            "\nfallback: {} is stored as {}, because its row width does not suit {wanted}",
            t.name, t.kind.name
        ));
    }
    for note in &plan.notes {
        text.push_str(&format!("\nnote: {note}"));
    }
    text.push_str(&format!(
        "\n\nloads in {} {} and programs built on it (according to its sources of {})\n",
        LLAMA_CPP.name, LLAMA_CPP.version, LLAMA_CPP.read
    ));
    text.push_str(&format!("needs about {}\n", needs_text(needs, work.seconds(rates))));
    if let (Some(calibrated), Some(work)) = (calibrated, calibrated_work) {
        text.push_str(&format!(
            "with --calibration: about {}\n",
            needs_text(calibrated, work.seconds(rates))
        ));
    }
    text
}

fn needs_text(needs: &GgufNeeds, seconds: f64) -> String {
    let memory =
        format!("{} of memory and {} on this machine", bytes(needs.peak_memory_bytes), about(seconds));
    match needs.smallest_budget_bytes < needs.peak_memory_bytes {
        true => format!(
            "{memory}; with --memory-budget at least {}, and {} of disk space for hidden states",
            bytes(needs.smallest_budget_bytes),
            bytes(needs.scratch_bytes)
        ),
        false => memory,
    }
}
