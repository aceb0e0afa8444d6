//! The model card of a checkpoint, `README.md`: what was done to the model and how to load it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use crate::calibrate::TokenWindows;
use crate::checkpoint::ModelDirectory;
use crate::engines::{Compatibility, ENGINES, Engine, Outline};
use crate::pipeline::{Job, QuantReport};
use crate::recipe::PlanEntry;
use crate::wording::bytes;
use crate::wording::{Wording, worded};

pub(super) const NAME: &str = "README.md";
/// The bytes of the source's card that are searched for its license.
const MAX_HEADER: u64 = 1 << 16;

/// Returns the card. It holds no paths and no times, so the same job gives the same bytes.
pub(super) fn model_card(
    directory: &ModelDirectory,
    job: &Job<'_>,
    report: &QuantReport,
    wording: &dyn Wording,
) -> String {
    let base =
        directory.config().get("_name_or_path").and_then(Value::as_str).filter(|name| is_hub_name(name));
    let mut card = String::from("---\nlibrary_name: transformers\npipeline_tag: text-generation\n");
    if let Some(base) = base {
        card += &format!("base_model: {base}\nbase_model_relation: quantized\n");
    }
    card += &license(&directory.path().join(NAME));
    card += &format!("tags:\n- quantized\n- {}\n- {}\n---\n\n", report.method, report.format);
    let title = base.and_then(|name| name.split('/').next_back()).unwrap_or("Quantized model");
    card += &format!("# {title}, {}\n\n| | |\n|---|---|\n", schemes(job).join(", "));
    if let Some(base) = base {
        card += &format!("| Base model | {base} |\n");
    }
    card += &format!("| Method | {} |\n| Scheme | {} |\n", report.method, counts(job));
    card += &format!("| Format | {} |\n", report.format);
    if let Some(kv) = report.kv {
        card += &format!("| KV cache | {kv} |\n");
    }
    card += &format!(
        "| Size | {}, before {}; {:.2} bits per quantized weight |\n",
        bytes(report.bytes_after),
        bytes(report.bytes_before),
        report.bits_per_quantized_weight
    );
    if let Some(batch) = &report.calibration {
        let (tokens, samples, length) = (batch.tokens, batch.samples, batch.length);
        let text = match job.windows.and_then(TokenWindows::text) {
            Some(name) => format!("the text `{}`", cell(name)),
            None => "a given text".to_owned(),
        };
        card += &format!(
            "| Calibration | {tokens} tokens in {samples} windows of {length} from {text}, seed {}; SHA-256 of the \
             tokens: `{}` |\n",
            batch.seed, batch.tokens_sha256
        );
    }
    card += &format!("| Created by | quant {} |\n\n## Load it\n\n", report.version);
    card += &engines(job, wording);
    // A command is spelled with backquotes around it, for sentences; here it is a block of its own.
    let measure = worded("‹eval(OUT, reference=MODEL, text=builtin-heldout)›", wording);
    card + &format!(
        "\n## Accuracy\n\nThe run that wrote this file did not measure it. With the base model in `MODEL`:\n\n```\n\
         {}\n```\n\n`quant_report.json` has the rounding error of every tensor, `quant_manifest.json` the SHA-256 of \
         every file.\n",
        measure.trim_matches('`')
    )
}

/// The lines about the license in the header of the source's card; empty if there are none.
fn license(card: &Path) -> String {
    let mut header = Vec::new();
    let is_file = card.metadata().is_ok_and(|found| found.is_file());
    let mut read = || File::open(card)?.take(MAX_HEADER).read_to_end(&mut header);
    if !is_file || read().is_err() {
        return String::new();
    }
    // The last character may be cut off.
    license_lines(&String::from_utf8_lossy(&header))
}

fn license_lines(card: &str) -> String {
    let mut lines = card.lines().map(str::trim_end);
    if lines.next() != Some("---") {
        return String::new();
    }
    let header = lines.take_while(|line| *line != "---");
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._/:+ ".contains(c);
    let kept = header.filter(|line| {
        let key = line.split_once(": ").map(|(key, _)| key);
        let is_license = matches!(key, Some("license" | "license_name" | "license_link"));
        is_license && line.len() <= 200 && line.chars().all(is_plain)
    });
    kept.map(|line| format!("{line}\n")).collect()
}

/// Returns whether an id is `organization/name`, with only the characters that hubs allow.
fn is_hub_name(name: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    name.len() <= 200 && name.split_once('/').is_some_and(|(owner, name)| is_part(owner) && is_part(name))
}

fn by_scheme(job: &Job<'_>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for (_, scheme) in job.plan.entries.iter().filter_map(PlanEntry::quantized) {
        *counts.entry(scheme.to_string()).or_default() += 1;
    }
    counts
}

fn schemes(job: &Job<'_>) -> Vec<String> {
    by_scheme(job).into_keys().collect()
}

fn counts(job: &Job<'_>) -> String {
    let counts = by_scheme(job).into_iter().map(|(scheme, count)| format!("`{scheme}`: {count} linears"));
    counts.collect::<Vec<_>>().join("; ")
}

fn engines(job: &Job<'_>, wording: &dyn Wording) -> String {
    let outline = Outline::new(job.plan, job.model);
    let row = |engine: &Engine| {
        let remark = match engine.loads(&outline, 1)? {
            Compatibility::Yes => String::new(),
            Compatibility::With(remark) => cell(&remark),
            Compatibility::Unsure(_) | Compatibility::No(_) => return None,
        };
        let packages = engine.packages(&outline);
        let install = packages.map_or_else(String::new, |names| format!(", after `pip install {names}`"));
        Some(format!("| {} {} | `{}`{install} | {remark} |\n", engine.name, engine.version(), engine.command))
    };
    let rows: Vec<String> = ENGINES.iter().filter_map(row).collect();
    match rows.is_empty() {
        true => "`quant` does not know of an engine that loads it.\n".to_owned(),
        false => format!(
            "| engine | command | remark |\n|---|---|---|\n{}\n{} shows more, such as the supported numbers of \
             GPUs.\n",
            rows.concat(),
            worded("‹plan()›", wording)
        ),
    }
}

/// Escapes text for a table cell: it may hold names from the checkpoint.
fn cell(text: &str) -> String {
    let clean = |c: char| if c.is_control() || c == '|' { ' ' } else { c };
    text.chars().map(clean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_license_of_the_source_is_kept() {
        let card = "---\nlanguage: en\nlicense: other\nlicense_name: my-license-1.0\nlicense_link: https://a.b/LICENSE\n\
                    tags:\n- license: x\n---\nlicense: mit\n";
        let kept = "license: other\nlicense_name: my-license-1.0\nlicense_link: https://a.b/LICENSE\n";
        assert_eq!(license_lines(card), kept);
        for none in ["", "license: mit\n", "# A\n---\nlicense: mit\n---\n", "---\nlicense: \"a\" # b\n---\n"]
        {
            assert_eq!(license_lines(none), "", "{none}");
        }
    }

    #[test]
    fn only_names_of_a_hub_go_into_the_header() {
        for good in ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "a/b"] {
            assert!(is_hub_name(good), "{good}");
        }
        for bad in
            ["", "a", "/a", "a/", "a/b/c", "/home/me/model", "./a", "a/..", "a/b\ntags:", "ä/b", "a/b c"]
        {
            assert!(!is_hub_name(bad), "{bad}");
        }
    }
}
