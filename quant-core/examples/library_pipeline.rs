//! Quantizes a model and runs the result, using only the library, as an engine would.
//!
//! ```text
//! cargo run --release -p quant-core --example library_pipeline -- [MODEL [TEXT [OUT]]]
//! ```
//!
//! `MODEL` is a Hugging Face directory (default: the demo model of this repository), `TEXT` the calibration text. With
//! `OUT` the checkpoint is written there; otherwise it stays in memory.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use quant_core::calibrate::{Sampling, TextTokenizer, TokenWindows, read_documents};
use quant_core::checkpoint::{CheckpointWriter, MemorySink, ModelDirectory, WriteOptions, refuse_overlap};
use quant_core::model::{Decoder, Model};
use quant_core::pipeline::{self, Job, Program};
use quant_core::recipe::{Plan, Recipe};
use quant_core::{CancelToken, Error, Event, Observer, Result, Silent};

const PROMPT: &str = "It was a dark and stormy night, and the old man";
const NEW_TOKENS: usize = 24;

/// Receives progress events on the thread that drives the run. The library itself prints nothing.
struct Progress;

impl Observer for Progress {
    fn event(&self, event: &Event) {
        match event {
            Event::StageStarted { stage, unit, units } => eprintln!("{stage}: {units} {unit}s"),
            Event::UnitDone { detail } => eprintln!("  {detail} done"),
            Event::Warning { message } => eprintln!("warning: {message}"),
            // Later versions may add events.
            _ => {}
        }
    }
}

fn main() -> ExitCode {
    // Another thread, or a signal handler, may call `cancel()` on a clone of the token. The run then ends between two
    // units of work with `Error::Interrupted`; a run into a directory can be resumed.
    let cancel = CancelToken::new();
    match run(&cancel) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cancel: &CancelToken) -> Result<()> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../calibration-data");
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let model_path = arguments.next().unwrap_or_else(|| data.join("demo-model"));
    let text_path = arguments.next().unwrap_or_else(|| data.join("corpus/narrative.txt"));
    let out = arguments.next();

    // Opening checks every header and compares the configuration with the tensors. Weights are read later, piece by
    // piece. An engine with its own tensors passes any `TensorSource` to `Model::new` instead.
    let directory = ModelDirectory::open(&model_path)?;
    let model = Model::open(&directory)?;
    let tokenizer_path = directory
        .tokenizer_path()
        .ok_or_else(|| Error::usage("the model has no tokenizer.json", "give a model that has one"))?;
    let tokenizer = TextTokenizer::open(&tokenizer_path)?;

    // The recipe is the request; the plan says what happens to every tensor. It is created before any computation, so
    // that impossible requests fail here.
    let sampling = Sampling { samples: 16, length: 128, ..Sampling::default() };
    let recipe = Recipe { sampling, ..Recipe::preset("awq-w4a16")? };
    let plan = Plan::new(&model, &recipe, recipe.containers[0])?;
    let documents = read_documents(&text_path)?;
    let windows = TokenWindows::sample(&tokenizer, &documents, plan.sampling, &text_path)?;

    // Parallel steps run on the caller's rayon pool; `pool.install(|| …)` would confine them to `pool`.
    let job = Job {
        model: &model,
        plan: &plan,
        windows: Some(&windows),
        maxima: None,
        observer: &Progress,
        cancel,
    };
    let (quantized, report) = match out {
        None => {
            let mut sink = MemorySink::new(plan.outputs())?;
            let report = pipeline::quantize(&job, &mut sink)?;
            let mut config = directory.config().clone();
            let settings = plan.container.quantization_config(&plan.module_schemes());
            config.insert("quantization_config".into(), settings);
            let source = Arc::new(sink.into_source()?);
            (Model::new(source, directory.config_path(), &config)?, report)
        }
        Some(out) => {
            // The directory appears complete and verified, or not at all.
            refuse_overlap(&model_path, &out)?;
            let fingerprint = pipeline::fingerprint(&job, &directory, &Program::current(cancel)?);
            let options = WriteOptions { fingerprint, ..WriteOptions::default() };
            let mut writer = CheckpointWriter::create(&out, plan.outputs(), options)?;
            let report = pipeline::quantize(&job, &mut writer)?;
            pipeline::add_companions(&directory, &plan, &report, &mut writer)?;
            let published = writer.publish_observed(&Progress, cancel)?;
            println!("written to {}", published.path.display());
            (Model::open(&ModelDirectory::open(&published.path)?)?, report)
        }
    };
    println!(
        "{} {}: {} → {} bytes, {:.2} bits per quantized weight",
        report.method,
        recipe.scheme,
        report.bytes_before,
        report.bytes_after,
        report.bits_per_quantized_weight
    );

    for (name, model) in [("float", &model), ("quantized", &quantized)] {
        let text = continuation(model, &tokenizer, &tokenizer_path, cancel)?;
        writeln!(std::io::stdout(), "{name:>9}: {text}").map_err(|e| Error::io("write", "stdout", e))?;
    }
    Ok(())
}

/// Returns the prompt with greedily decoded tokens, generated one at a time with the cache.
fn continuation(
    model: &Model,
    tokenizer: &TextTokenizer,
    tokenizer_path: &Path,
    cancel: &CancelToken,
) -> Result<String> {
    let mut tokens = tokenizer.encode(PROMPT)?;
    let decoder = Decoder::load(model, tokens.len() + NEW_TOKENS, &Silent, cancel)?;
    let mut cache = decoder.cache();
    let mut logits = decoder.step(&tokens, &mut cache)?;
    for _ in 0..NEW_TOKENS {
        let token = logits.argmax(0)?.to_scalar::<u32>()?;
        tokens.push(token);
        logits = decoder.step(&[token], &mut cache)?;
    }
    // Calibration only needs to encode; an engine decodes with the tokenizers crate itself.
    let fault =
        |e: tokenizers::Error| Error::Tokenizer { path: tokenizer_path.into(), reason: e.to_string() };
    let tokenizer = tokenizers::Tokenizer::from_file(tokenizer_path).map_err(fault)?;
    tokenizer.decode(&tokens, true).map_err(fault)
}
