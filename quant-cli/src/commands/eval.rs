//! `quant eval MODEL --text FILE`: what a model is worth on a text.

use std::path::{Path, PathBuf};
use std::time::Instant;

use quant_core::model::Decoder;
use quant_core::{Error, Result};
use quant_evaluator::{Divergence, Estimate, EvaluationText, Perplexity, Profile, compare, perplexity};
use serde::Serialize;

use super::Session;
use crate::inputs::{self, Opened};
use crate::output::{JsonOption, table};

/// What to evaluate on what.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model directory, float or quantized, or org/name or org/name@revision on a hub
    pub model: PathBuf,
    /// Compare with this model on the same tokens, such as the float one it was made from
    #[arg(long, value_name = "MODEL")]
    pub reference: Option<PathBuf>,
    /// Evaluation text: a file, or the name of a set
    #[arg(long, value_name = "FILE|NAME")]
    pub text: String,
    /// Rule of scoring: wt2-gptq-2048, or gptq-L for windows of L tokens
    #[arg(long, default_value = "wt2-gptq-2048", conflicts_with = "window")]
    pub profile: String,
    /// The same rule with windows of L tokens
    #[arg(long, value_name = "L")]
    pub window: Option<usize>,
    /// Score only the first N windows
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub windows: Option<u64>,
    #[command(flatten)]
    pub json: JsonOption,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    version: &'static str,
    model: String,
    text: String,
    seconds: f64,
    tokens_per_second: f64,
    #[serde(flatten)]
    result: Outcome,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Outcome {
    Alone(Perplexity),
    Compared(Box<Divergence>),
}

/// Evaluates.
pub fn run(args: &Args, session: &Session) -> Result<()> {
    args.json.check()?;
    let profile = match args.window {
        Some(window) => Profile::gptq(window)?,
        None => args.profile.parse()?,
    };
    let opened = inputs::open(&args.model, session)?;
    let reference = args.reference.as_ref().map(|path| inputs::open(path, session)).transpose()?;
    let text = text(&opened, &args.text, profile, args.windows, session)?;
    if let Some(reference) = &reference {
        same_tokenizer(&opened, reference)?;
    }
    let decoder = load(&opened, profile, session)?;
    let started = Instant::now();
    let observer = session.progress.tokens_per_unit(Some(profile.window as u64));
    let result = match &reference {
        Some(reference) => {
            let reference = load(reference, profile, session)?;
            let divergence = compare(&reference, &decoder, &text, &observer, &session.cancel)?;
            Outcome::Compared(Box::new(divergence))
        }
        None => Outcome::Alone(perplexity(&decoder, &text, &observer, &session.cancel)?),
    };
    let seconds = started.elapsed().as_secs_f64();
    let report = Report {
        schema: "quant-eval/1",
        version: env!("CARGO_PKG_VERSION"),
        model: args.model.display().to_string(),
        text: args.text.clone(),
        seconds,
        tokens_per_second: text.windows.tokens().len() as f64 / seconds,
        result,
    };
    args.json.emit(&report, || show(&report))
}

/// Tokenizes and cuts an evaluation text.
pub fn text(
    opened: &Opened,
    source: &str,
    profile: Profile,
    windows: Option<u64>,
    session: &Session,
) -> Result<EvaluationText> {
    let positions = opened.model.architecture().max_positions;
    if profile.window > positions {
        session.progress.note(&format!(
            "warning: windows of {} tokens are longer than the {positions} positions the model was made \
             for; --window {positions} stays inside",
            profile.window
        ));
    }
    let (documents, origin) = inputs::texts(source, session)?;
    let tokenizer = inputs::tokenizer(&opened.directory)?;
    let windows = windows.map(|n| usize::try_from(n).unwrap_or(usize::MAX));
    // Documents of a set are joined as the rows of WikiText are: by an empty line.
    let joined = documents.join("\n\n");
    let text = EvaluationText::new(&tokenizer, &joined, profile, windows, &origin)?;
    inputs::check(&opened.model, &text.windows)?;
    Ok(text)
}

/// Loads a model for the windows of a profile.
pub fn load(opened: &Opened, profile: Profile, session: &Session) -> Result<Decoder> {
    Decoder::load(&opened.model, profile.window, &session.progress, &session.cancel)
}

/// Numbers of two tokenizers cannot be compared position by position.
fn same_tokenizer(model: &Opened, reference: &Opened) -> Result<()> {
    let read = |opened: &Opened| -> Result<Vec<u8>> {
        let tokenizer = inputs::tokenizer(&opened.directory)?;
        std::fs::read(tokenizer.path()).map_err(|e| Error::io("read", tokenizer.path(), e))
    };
    if read(model)? == read(reference)? {
        return Ok(());
    }
    Err(Error::usage(
        format!(
            "{} and the reference {} have different tokenizers",
            model.directory.path().display(),
            reference.directory.path().display()
        ),
        "compare a model with the one it was made from: token by token only these say the same",
    ))
}

fn show(report: &Report) -> String {
    let row = |name: &str, estimate: &Estimate, digits: usize| {
        let error = estimate.standard_error.map_or("?".into(), |e| format!("{e:.digits$}"));
        vec![name.to_owned(), format!("{:.digits$}", estimate.mean), error]
    };
    let (own, rows) = match &report.result {
        Outcome::Alone(p) => (p, vec![row("perplexity", &p.perplexity, 3), row("nats per token", &p.nll, 4)]),
        Outcome::Compared(d) => (
            &d.model,
            vec![
                row("perplexity", &d.model.perplexity, 3),
                row("reference perplexity", &d.reference.perplexity, 3),
                row("perplexity ratio", &d.perplexity_ratio, 5),
                row("mean KL (nats)", &d.kl, 6),
                row("same top token", &d.top1_agreement, 4),
            ],
        ),
    };
    let mut text = table(&["", "mean", "± standard error"], &rows);
    text.push_str(&format!(
        "\n{} on {}: {} tokens in {} windows, {:.0} tokens/s\n",
        own.profile,
        Path::new(&report.text).display(),
        own.tokens_scored,
        own.windows,
        report.tokens_per_second
    ));
    text
}
