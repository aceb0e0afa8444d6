//! The files of a checkpoint besides the weights: the configuration that engines need, the model's other files, and the
//! report.

use serde_json::{Value, json};

use super::{Job, Program, QuantReport};
use crate::checkpoint::{CheckpointWriter, ModelDirectory};
use crate::digest::sha256_hex;
use crate::model::arch::TEXT_CONFIG;
use crate::model::restore_llama3;
use crate::recipe::{Plan, PlanEntry};
use crate::scheme::KV_CONFIG_KEY;
use crate::{Error, Result};

/// The limit on the total size of the files copied next to the weights. Real models have some tens of megabytes.
const MAX_SIDECAR_BYTES: u64 = 1 << 30;
/// The file name of the report in a checkpoint.
pub const REPORT: &str = "quant_report.json";

/// Returns the `config.json` of the quantized model: the original, changed so that engines load the quantized weights
/// and the cache of the plan.
///
/// # Errors
/// Never for configurations that were read from JSON.
pub fn quantized_config(directory: &ModelDirectory, plan: &Plan) -> Result<String> {
    let mut config = directory.config().clone();
    restore_llama3(&mut config);
    let settings = plan.container.quantization_config(&plan.module_schemes());
    config.insert("quantization_config".into(), settings);
    let text = config.get_mut(TEXT_CONFIG).and_then(Value::as_object_mut);
    if let Some(text) = text.filter(|_| plan.is_wrapped()) {
        text.shift_remove("quantization_config");
        if plan.unties_head() {
            text.insert("tie_word_embeddings".into(), Value::Bool(false));
        }
    }
    match plan.settings.kv {
        Some(kv) => match kv.config_value() {
            Some(value) => drop(config.insert(KV_CONFIG_KEY.into(), value)),
            None => drop(config.remove(KV_CONFIG_KEY)),
        },
        // Repacking keeps the values, so it also keeps the description of the cache.
        None if plan.is_repacked() => {}
        None => drop(config.remove(KV_CONFIG_KEY)),
    }
    if plan.unties_head() {
        // Loaders that tie the head to the embedding would expect a float head.
        config.insert("tie_word_embeddings".into(), Value::Bool(false));
    }
    pretty(&Value::Object(config))
}

fn pretty(value: &Value) -> Result<String> {
    let mut text = serde_json::to_string_pretty(value)
        .map_err(|e| Error::Internal(format!("JSON cannot be written: {e}")))?;
    text.push('\n');
    Ok(text)
}

/// Returns the number of bytes that [`add_companions`] will write; the size of the report is estimated.
///
/// # Errors
/// When a file of the model cannot be inspected, or the files exceed 1 GiB in total.
pub fn companion_bytes(directory: &ModelDirectory, plan: &Plan) -> Result<u64> {
    const REPORT_BYTES_PER_TENSOR: u64 = 4096;
    let companions = plan.container.companion_files(&plan.module_schemes());
    let companions = companions.iter().map(|(_, value)| pretty(value));
    let companions = companions.map(|text| text.map(|t| t.len() as u64)).sum::<Result<u64>>()?;
    let mut bytes = companions + quantized_config(directory, plan)?.len() as u64;
    let mut room = MAX_SIDECAR_BYTES;
    for sidecar in directory.sidecar_files() {
        // An unreadable file is reported before any work is done.
        let len = sidecar.bytes()?;
        room = room.checked_sub(len).ok_or_else(|| Error::InputFile {
            path: sidecar.path.clone(),
            line: None,
            reason: format!(
                "has {len} bytes, but the files next to the weights are limited to {MAX_SIDECAR_BYTES} \
                bytes in total"
            ),
            remedy: "download the model again, or remove files that are not part of it".into(),
        })?;
        bytes += len;
    }
    Ok(bytes + REPORT_BYTES_PER_TENSOR * plan.entries.len() as u64)
}

/// Adds everything but the weights to the checkpoint that is being written.
///
/// # Errors
/// When a file of the model cannot be read, or a file of the checkpoint cannot be written.
pub fn add_companions(
    directory: &ModelDirectory,
    plan: &Plan,
    report: &QuantReport,
    writer: &mut CheckpointWriter,
) -> Result<()> {
    writer.add_file("config.json", quantized_config(directory, plan)?.as_bytes())?;
    for (name, value) in plan.container.companion_files(&plan.module_schemes()) {
        writer.add_file(name, pretty(&value)?.as_bytes())?;
    }
    for sidecar in directory.sidecar_files() {
        writer.add_copy(sidecar)?;
    }
    writer.add_written(REPORT, |out| report.write_json(out))
}

/// Returns the inputs that determine the output of a run, for
/// [`WriteOptions::fingerprint`](crate::checkpoint::WriteOptions). A run with different ones cannot resume an
/// interrupted job. The contents of the input are checked separately, tensor by tensor.
pub fn fingerprint(job: &Job<'_>, directory: &ModelDirectory, program: &Program) -> Value {
    let quantized = job.plan.entries.iter().filter_map(PlanEntry::quantized);
    let schemes: serde_json::Map<String, Value> =
        quantized.map(|(module, scheme)| (module.to_owned(), json!(scheme.to_string()))).collect();
    let text = job.windows.filter(|_| job.plan.needs_text());
    let calibration = text.map(|w| super::report::calibration(job, w));
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "program": program,
        "config_sha256": sha256_hex(json!(directory.config()).to_string()),
        "blocks": job.plan.blocks(),
        "method": job.plan.method.name,
        "format": job.plan.container.name(),
        "schemes": schemes,
        "calibration": calibration,
        "rounding": job.plan.method.rounding_fingerprint(&job.plan.settings),
        "steps": job.plan.steps(),
        "transforms": job.plan.method.fingerprint(&job.plan.settings),
        "kv": job.plan.settings.kv,
        "requantized_from": job.model.dequantized_from(),
        "scale_search": job.plan.searches_scales().then_some(job.plan.settings.scale_search),
    })
}
