//! `quant inspect MODEL`: shows the contents of a checkpoint.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use quant_core::checkpoint::{ShardedCheckpoint, printable, verify_checkpoint};
use quant_core::format::container_of;
use quant_core::gguf::{self, GgufFile, Value};
use quant_core::model::{Carried, KvScheme};
use quant_core::pipeline::QuantReport;
use quant_core::scheme::LinearScheme;
use quant_core::wording::counted;
use quant_core::{Error, Result};
use serde::Serialize;

use super::Session;
use super::plan::kind;
use crate::inputs::{self, Opened};
use crate::output::{JsonOption, bytes, table};
use crate::snapshot::verify_snapshot;

/// The model to inspect.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model directory or GGUF file, float or quantized, or org/name or org/name@revision on a hub
    pub model: PathBuf,
    /// List every tensor, not one line per kind
    #[arg(long)]
    all: bool,
    /// Read all files and compare them with quant_manifest.json, to detect an incomplete or damaged copy. Files in the
    /// cache of a hub are compared with the hashes in their names
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    json: JsonOption,
}

/// The contents of a checkpoint, as JSON.
#[derive(Serialize)]
pub struct Report {
    schema: &'static str,
    family: &'static str,
    layers: usize,
    hidden_size: usize,
    /// Query heads of the first attention. `kv_heads` and `head_dim` also describe this attention; all three are 0 if
    /// there is none.
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Per block, in order: the length of the sliding window, that is, the number of positions that a query attends to,
    /// including its own; null if the block has none.
    windows: Vec<Option<usize>>,
    vocab_size: usize,
    max_positions: usize,
    tied_embeddings: bool,
    quant_method: Option<String>,
    /// The precision of the KV cache that the model's configuration requests; `None` means floats.
    kv_cache: Option<KvScheme>,
    /// The parts of the requested quantization that the format could not represent.
    loses: Vec<String>,
    /// Whether some linear's scales have two levels.
    keeps_levels: bool,
    bytes: u64,
    /// Absent if the checkpoint is not a GGUF file.
    #[serde(skip_serializing_if = "Option::is_none")]
    gguf: Option<GgufReport>,
    /// The parts of a vision-language model outside its text tower; absent for other models.
    #[serde(skip_serializing_if = "Option::is_none")]
    carried: Option<Carried>,
    /// The result of `--verify`; absent without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    verified: Option<Verified>,
    linears: Vec<LinearReport>,
    tensors: Vec<TensorReport>,
}

#[derive(Serialize)]
struct GgufReport {
    /// The mixture that the file names; null if it names none, or an unknown one.
    mixture: Option<&'static str>,
    bits_per_weight: f64,
    /// The size of the file, or of all files of a model in parts.
    file_bytes: u64,
}

#[derive(Serialize)]
struct Verified {
    /// Where the hashes come from.
    compared_with: &'static str,
    files: usize,
    bytes: u64,
    /// Files whose hash is unknown.
    unlisted: Vec<String>,
}

#[derive(Serialize)]
struct LinearReport {
    module: String,
    shape: [usize; 2],
    stored: String,
}

#[derive(Serialize)]
struct TensorReport {
    tensor: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: u64,
    file: String,
}

/// Prints the contents.
pub fn run(args: &Args, session: &Session) -> Result<()> {
    args.json.check_distinct(&args.model, &[])?;
    let verified = args.verify.then(|| verify(&args.model, session)).transpose()?;
    let report = Report { verified, ..report(&args.model, session)? };
    args.json.emit(&report, || show(&report, args.all))
}

fn verify(path: &Path, session: &Session) -> Result<Verified> {
    let opened = inputs::open(path, session)?;
    let mut directory = opened.directory.path();
    if !gguf::is_gguf(directory) {
        require_listed(directory)?;
    } else if path.is_dir() {
        // The directory of the GGUF file that was opened.
        directory = path;
    }
    if let Some(found) = verify_snapshot(directory, &session.cancel)? {
        let compared_with = "the names of their blobs";
        return Ok(Verified {
            compared_with,
            files: found.files,
            bytes: found.bytes,
            unlisted: found.others,
        });
    }
    let files = verify_checkpoint(directory, &session.progress, &session.cancel)?;
    let compared_with = "quant_manifest.json";
    Ok(Verified { compared_with, files: files.files, bytes: files.bytes, unlisted: files.unlisted })
}

/// Fails if shards or tensors are not in the index, or the index has a wrong size, which are only warnings otherwise.
fn require_listed(directory: &Path) -> Result<()> {
    let stored = ShardedCheckpoint::open(directory)?;
    if stored.warnings().is_empty() {
        return Ok(());
    }
    Err(Error::InputFile {
        path: directory.to_owned(),
        line: None,
        reason: format!("the files do not agree with the index: {}", stored.warnings().join("; ")),
        remedy: "download or copy the checkpoint again, into an empty directory".into(),
    })
}

/// Returns the contents of a checkpoint.
///
/// # Errors
/// When the model cannot be opened.
pub fn report(path: &Path, session: &Session) -> Result<Report> {
    let opened = inputs::open(path, session)?;
    let (model, a) = (&opened.model, opened.model.architecture());
    let source = model.source();
    // The tensors of a GGUF file are shown as stored, not as they are decoded.
    let file = match gguf::is_gguf(opened.directory.path()) {
        true => Some(GgufFile::open_model(opened.directory.path())?),
        false => None,
    };
    let decoded = || {
        source
            .names()
            .into_iter()
            .filter_map(|name| {
                let info = source.info(name)?;
                let file = source.location(name);
                Some(TensorReport {
                    tensor: name.to_owned(),
                    dtype: info.dtype.to_string(),
                    shape: info.shape.clone(),
                    bytes: info.byte_len(),
                    file: file_name(&file),
                })
            })
            .collect()
    };
    let tensors: Vec<TensorReport> = file.as_ref().map_or_else(decoded, stored);
    let mut linears = Vec::new();
    for layer in 0..a.layers {
        for (_, name, shape, _) in a.graph(layer).linears() {
            let module = a.in_block(layer, name);
            let float = || {
                let weight = format!("{module}.weight");
                if let Some(kind) = source.block_type(&weight) {
                    return kind.name.to_owned();
                }
                source.info(&weight).map_or("missing".to_owned(), |i| i.dtype.to_string())
            };
            let stored = model.module_scheme(&module).map_or_else(float, |s| s.to_string());
            linears.push(LinearReport { module, shape, stored });
        }
    }
    let loses = losses(&opened, session, linears.iter().map(|l| l.module.as_str()))?;
    let first = a.attentions().first().copied();
    Ok(Report {
        schema: "quant-inspect/3",
        family: a.family,
        layers: a.layers,
        hidden_size: a.hidden,
        heads: first.map_or(0, |shape| shape.heads()),
        kv_heads: first.map_or(0, |shape| shape.kv_heads),
        head_dim: first.map_or(0, |shape| shape.head_dim),
        windows: (0..a.layers)
            .map(|layer| a.graph(layer).attentions().find_map(|shape| shape.window))
            .collect(),
        vocab_size: a.vocab,
        max_positions: a.max_positions,
        tied_embeddings: a.tied,
        quant_method: match opened.directory.rounded_to() {
            Some(_) => Some(gguf::FORMAT.to_owned()),
            None => model.quant_method().map(str::to_owned),
        },
        kv_cache: model.kv_scheme(),
        keeps_levels: linears
            .iter()
            .any(|l| model.module_scheme(&l.module).is_some_and(|s| s.is_progressive())),
        loses,
        bytes: tensors.iter().map(|t| t.bytes).sum(),
        gguf: file.as_ref().map(GgufReport::of),
        carried: model.carried(),
        verified: None,
        linears,
        tensors,
    })
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn stored(file: &GgufFile) -> Vec<TensorReport> {
    let paths: Vec<String> = file.paths().map(file_name).collect();
    let tensors = file.header().tensors.iter().map(|t| TensorReport {
        tensor: t.name.clone(),
        dtype: t.kind.name.to_owned(),
        shape: t.shape.clone(),
        bytes: t.bytes,
        file: paths.get(t.part).cloned().unwrap_or_default(),
    });
    tensors.collect()
}

impl GgufReport {
    fn of(file: &GgufFile) -> Self {
        let header = file.header();
        let id = header.get("general.file_type").and_then(Value::as_u64);
        let mixture = gguf::MIXTURES.iter().find(|mixture| Some(u64::from(mixture.id)) == id);
        let bits = header.tensors.iter().map(|t| 8.0 * t.bytes as f64).sum::<f64>();
        let elements = header.tensors.iter().map(|t| t.shape.iter().product::<usize>() as f64).sum::<f64>();
        Self {
            mixture: mixture.map(|mixture| mixture.name),
            bits_per_weight: bits / elements.max(1.0),
            file_bytes: file.bytes(),
        }
    }
}

/// Returns the parts of the requested quantization that the format could not represent. The request is taken from the
/// run's report if there is one, otherwise from the stored weights.
fn losses<'a>(
    opened: &Opened,
    session: &Session,
    modules: impl Iterator<Item = &'a str>,
) -> Result<Vec<String>> {
    let model = &opened.model;
    let Some(container) = model.quant_method().and_then(container_of) else { return Ok(Vec::new()) };
    let report = QuantReport::find(opened.directory.path(), model).unwrap_or_else(|error| {
        session.progress.note(&format!("warning: {error}"));
        None
    });
    let asked: BTreeMap<&str, LinearScheme> =
        report.as_ref().map(|report| report.schemes().collect()).unwrap_or_default();
    let mut losses: Vec<String> = Vec::new();
    for module in modules {
        let Some(stored) = model.module_scheme(module) else { continue };
        let scheme = asked.get(module).copied().unwrap_or(stored);
        for loss in container.loses(scheme, model.packed_scale_dtype(module)?) {
            if !losses.contains(&loss) {
                losses.push(loss);
            }
        }
    }
    Ok(losses)
}

fn show(report: &Report, all: bool) -> String {
    let mut text = format!(
        "{}: {} blocks, hidden {}, {} heads ({} for keys and values) of {}, vocabulary {}, {} positions{}\n",
        report.family,
        report.layers,
        report.hidden_size,
        report.heads,
        report.kv_heads,
        report.head_dim,
        report.vocab_size,
        report.max_positions,
        if report.tied_embeddings { ", tied embeddings" } else { "" },
    );
    let mut windows: BTreeMap<usize, usize> = BTreeMap::new();
    for window in report.windows.iter().flatten() {
        *windows.entry(*window).or_default() += 1;
    }
    for (window, blocks) in windows {
        text.push_str(&format!("sliding window of {window} in {blocks} of {} blocks\n", report.layers));
    }
    if let Some(Carried { class, tensors, bytes: size }) = &report.carried {
        text.push_str(&format!(
            "text tower of {class}; {tensors} other tensors ({}), which quantize copies unchanged\n",
            bytes(*size)
        ));
    }
    match (&report.quant_method, &report.gguf) {
        (Some(_), Some(file)) => {
            let mixture = file.mixture.map(|name| format!(", {name}")).unwrap_or_default();
            text.push_str(&format!(
                "quantized: GGUF{mixture}, {:.2} bits per weight\n",
                file.bits_per_weight
            ));
        }
        (Some(method), None) => {
            // The name that ‹format› takes, and the `quant_method` of the configuration if it differs.
            let format = container_of(method).map_or(method.as_str(), |container| container.name());
            let other = if format == method { String::new() } else { format!(" (quant_method {method})") };
            text.push_str(&format!("quantized: {format}{other}\n"));
        }
        (None, _) => text.push_str("not quantized\n"),
    }
    if report.keeps_levels {
        text.push_str("kept: both levels of scales\n");
    }
    for loss in &report.loses {
        text.push_str(&format!("lost: {loss}\n"));
    }
    if let Some(kv) = report.kv_cache {
        text.push_str(&format!("KV cache: {kv}\n"));
    }
    if let Some(verified) = &report.verified {
        let (files, size) = (verified.files, bytes(verified.bytes));
        text.push_str(&format!("verified: {files} files, {size}, match {}\n", verified.compared_with));
        if !verified.unlisted.is_empty() {
            text.push_str(&format!(
                "not compared: {}\n",
                verified.unlisted.iter().map(|name| printable(name)).collect::<Vec<_>>().join(", ")
            ));
        }
    }
    text.push('\n');
    let mut stored: Vec<(String, u64, u64)> = Vec::new();
    for linear in &report.linears {
        let weights = (linear.shape[0] * linear.shape[1]) as u64;
        match stored.iter_mut().find(|s| s.0 == linear.stored) {
            Some(kind) => {
                kind.1 += 1;
                kind.2 += weights;
            }
            None => stored.push((linear.stored.clone(), 1, weights)),
        }
    }
    let rows: Vec<_> = stored
        .into_iter()
        .map(|(kind, count, weights)| vec![kind, count.to_string(), weights.to_string()])
        .collect();
    text.push_str(&table(&["linears stored as", "linears", "weights"], &rows));
    text.push('\n');
    text.push_str(&tensors_text(&report.tensors, all));
    let size = match &report.gguf {
        Some(file) => format!("{} with metadata", bytes(file.file_bytes)),
        None => bytes(report.bytes),
    };
    text.push_str(&format!("\n{}, {size}\n", counted(report.tensors.len(), "tensor")));
    text
}

fn tensors_text(tensors: &[TensorReport], all: bool) -> String {
    let mut kinds: Vec<(String, &TensorReport, u64, u64)> = Vec::new();
    let mut places = HashMap::new();
    for t in tensors {
        let name = if all { t.tensor.clone() } else { kind(&t.tensor) };
        let place = *places.entry((name.clone(), &t.dtype, &t.shape)).or_insert(kinds.len());
        if place == kinds.len() {
            kinds.push((name, t, 0, 0));
        }
        kinds[place].2 += 1;
        kinds[place].3 += t.bytes;
    }
    let row = |(name, t, count, size): (String, &TensorReport, u64, u64)| {
        let shape = t.shape.iter().map(usize::to_string).collect::<Vec<_>>().join("×");
        let shape = if count > 1 { format!("{count} × {shape}") } else { shape };
        let mut row = vec![name, t.dtype.clone(), shape, bytes(size)];
        row.extend(all.then(|| t.file.clone()));
        row
    };
    let rows: Vec<_> = kinds.into_iter().map(row).collect();
    let header = ["tensor", "dtype", "shape", "size", "file"];
    table(&header[..if all { 5 } else { 4 }], &rows)
}
