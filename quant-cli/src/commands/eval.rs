//! `quant eval MODEL --text FILE`: measures a model on a text.

use std::path::{Path, PathBuf};
use std::time::Instant;

use quant_core::calibrate::{TextTokenizer, TokenizerSettings};
use quant_core::digest::sha256_hex;
use quant_core::model::{CudaRunner, Decoder, KvScheme};
use quant_core::pipeline::QuantReport;
use quant_core::run::{self, Text};
use quant_core::{Error, Result};
use quant_evaluator::report::{EvaluationReport, WorstWindow};
use quant_evaluator::{
    Anatomy, Divergence, Evaluation, EvaluationText, Journal, Measured, ModelIdentity, Position,
    ProfileRequest, RenderedTokenization, Scores, Tokenization, Tool, anatomy, compare, perplexity,
    store_reference,
};
use serde_json::json;

use super::Session;
use super::ablation::{self, AblationOptions};
use super::reference::{self, LoadedReference, OpenedReference};
use super::shards::{self, ShardOptions};
use super::{compare as compare_results, eval_table};
use crate::device::Device;
use crate::inputs::{self, Opened};
use crate::kv::KvBits;
use crate::output::{self, JsonOption, Written};
use crate::provenance;

/// The model and the text to evaluate.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model directory or GGUF file, float or quantized, or org/name or org/name@revision on a hub
    pub model: PathBuf,
    /// Compare with this model on the same tokens, such as the float model that MODEL was quantized from; or with a
    /// file written by --save-reference
    #[arg(long, value_name = "MODEL|FILE")]
    pub reference: Option<PathBuf>,
    /// Save MODEL's results on this text to FILE, so that a later run with --reference FILE need not run MODEL again.
    /// The file contains the output head, and 4 bytes per scored token and hidden feature
    #[arg(long, value_name = "FILE", conflicts_with_all = ["reference", "journal", "execution", "kv", "device", "report"])]
    pub save_reference: Option<PathBuf>,
    // Its help lists the names of sets.
    #[allow(missing_docs)]
    #[arg(long, value_name = "FILE|NAME", help = inputs::evaluation_text_help())]
    pub text: String,
    /// Scoring rule: wt2-gptq-2048, wt2-llamacpp-512, gptq-L, llamacpp-L, hf-stride-L-S or lmeval-rolling-L, where L
    /// is the window in tokens and S the stride [default: gptq-L, where L is 2048 or the model's number of positions
    /// if that is less]
    #[arg(long)]
    pub profile: Option<String>,
    /// Window of the scoring rule, in tokens
    #[arg(long, value_name = "L")]
    pub window: Option<usize>,
    /// Score only the first N windows, or all if the text has fewer
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub windows: Option<u64>,
    /// How quantized linears are computed: fake dequantizes them and multiplies floats; kernels runs the
    /// packed kernels, as engines that link them do
    #[arg(long, value_enum, default_value_t, value_name = "HOW")]
    pub execution: Execution,
    /// Device for MODEL's quantized linears with --execution kernels: cuda is the first NVIDIA GPU. Everything
    /// else, including a reference, runs on the processor
    #[arg(long, value_enum, default_value_t, value_name = "DEVICE")]
    pub device: Device,
    /// Precision of MODEL's KV cache (auto: as in its config.json; 16: floats). A reference always uses that of its
    /// own config.json
    #[arg(long, value_enum, default_value_t, value_name = "BITS")]
    pub kv: KvBits,
    /// Record measurements in FILE while the evaluation runs, and continue an interrupted evaluation from it
    #[arg(long, value_name = "FILE")]
    pub journal: Option<PathBuf>,
    // Not a doc comment, which would become part of the help.
    #[allow(missing_docs)]
    #[command(flatten)]
    pub shards: ShardOptions,
    /// Write an HTML report of the result to FILE
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Also show another result of the same text, profile and reference, in a table and in the report; can be repeated
    #[arg(long, value_name = "RESULT", conflicts_with = "save_reference")]
    pub compare: Vec<PathBuf>,
    // Not a doc comment, which would become part of the help. Before options with a heading of their own, which would
    // also apply to it.
    #[allow(missing_docs)]
    #[command(flatten)]
    pub json: JsonOption,
    #[allow(missing_docs)]
    #[command(flatten, next_help_heading = "Ablation")]
    pub ablation: AblationOptions,
}

fn at_least_one(text: &str) -> std::result::Result<u64, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected an integer of at least 1".to_owned())
}

/// How quantized linears are computed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Execution {
    /// Dequantized tile by tile and multiplied as floats.
    #[default]
    Fake,
    /// Multiplied by the kernels, from packed codes.
    Kernels,
}

/// The window of the default profile in tokens, if the model has this many positions.
const DEFAULT_WINDOW: usize = 2048;
const EXCERPT_TOKENS: usize = 48;

/// The result of an evaluation.
pub struct Evaluated {
    /// The measurements, as in the JSON output.
    pub result: Evaluation,
    /// The page, if one was requested.
    pub page: Option<String>,
    others: Vec<(String, Evaluation)>,
    /// The journal, which is no longer needed once the result is stored.
    journal: Option<PathBuf>,
}

impl Evaluated {
    /// Removes the journal.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn finish(&self) -> Result<()> {
        match &self.journal {
            Some(path) => std::fs::remove_file(path).map_err(|e| Error::io("remove", path, e)),
            None => Ok(()),
        }
    }
}

/// Evaluates a model and prints the table or the JSON; with `--ablation`, runs the ablation instead.
pub fn run(args: &Args, session: &Session) -> Result<()> {
    let text = Text::Named(args.text.clone());
    if args.ablation.ablation {
        let Prepared { opened, text, .. } = Prepared::new(args, &text, session)?;
        return ablation::run(&args.ablation, &opened, &text, &args.json, session);
    }
    if let Some(shard) = args.shards.selected()? {
        return shards::run(args, &text, shard, session);
    }
    let done = evaluate(args, &text, args.report.is_some(), session)?;
    args.json.emit(&done.result, || {
        let mut text = eval_table::show(&done.result);
        if !done.others.is_empty() {
            let own = format!("{} (this)", done.result.model.path);
            let others = done.others.iter().map(|(name, e)| (name.as_str(), e));
            let all: Vec<_> = std::iter::once((own.as_str(), &done.result)).chain(others).collect();
            text.push_str(&format!("\n{}", compare_results::text(&all)));
        }
        let alone = done.result.comparison.is_none() && args.save_reference.is_none();
        if alone && is_quantized(&done.result.model) && !session.progress.is_quiet() {
            text.push_str("add --reference FLOAT, the model before quantization, to measure the KL divergence from it\n");
        }
        text
    })?;
    done.finish()
}

/// The inputs of a measurement, opened and cut into windows before any computation.
struct Prepared {
    gpu: Option<CudaRunner>,
    others: Vec<(String, Evaluation)>,
    opened: Opened,
    quantization: Option<QuantReport>,
    reference: Option<OpenedReference>,
    request: ProfileRequest,
    text: EvaluationText,
}

impl Prepared {
    fn new(args: &Args, source: &Text, session: &Session) -> Result<Self> {
        check(args, source)?;
        let gpu = gpu(args)?;
        // A path that exists but is not a file is rejected by the journal itself.
        let kept = args.journal.as_ref().filter(|path| path.is_file() || !path.exists());
        let report = args.report.iter().map(|path| ("report", path, Written::Html));
        let reference = args.save_reference.iter().map(|path| ("save_reference", path, Written::Reference));
        for (option, path, kind) in report.chain(reference) {
            output::check_output(option, path, kind)?;
        }
        kept.map_or(Ok(()), |path| output::check_writable(path))?;
        let others = compared(&args.compare)?;
        let opened = inputs::open(&args.model, session)?;
        let quantization = args.report.as_ref().and_then(|_| quantization(&opened, session));
        let reference = args.reference.as_deref().map(|path| reference::open(path, session)).transpose()?;
        let positions = opened.model.architecture().max_positions;
        let profile =
            args.profile.clone().unwrap_or_else(|| format!("gptq-{}", positions.min(DEFAULT_WINDOW)));
        let request = ProfileRequest::parse(&profile, args.window, positions)?;
        let text = text(&opened, source, request, args.windows, session)?;
        Ok(Self { gpu, others, opened, quantization, reference, request, text })
    }
}

fn check(args: &Args, source: &Text) -> Result<()> {
    let outputs = [
        ("json", args.json.json.as_deref()),
        ("report", args.report.as_deref()),
        ("journal", args.journal.as_deref()),
        ("save_reference", args.save_reference.as_deref()),
        ("shards", args.shards.directory()?),
    ];
    let inputs: Vec<&Path> =
        args.compare.iter().chain(&args.reference).map(PathBuf::as_path).chain(source.file()).collect();
    output::distinct(&outputs, &inputs)?;
    let models: Vec<&Path> =
        [Some(&args.model), args.reference.as_ref()].into_iter().flatten().map(PathBuf::as_path).collect();
    output::outside(&outputs, &models)?;
    if args.save_reference.is_some() {
        let others = [
            ("reference", args.reference.is_some()),
            ("journal", args.journal.is_some()),
            ("report", args.report.is_some()),
            ("execution", args.execution != Execution::Fake),
            ("kv", args.kv != KvBits::Auto),
            ("shards", args.shards.shards.is_some()),
        ];
        if let Some((option, _)) = others.into_iter().find(|(_, given)| *given) {
            return Err(Error::usage(
                format!("‹{option}› and ‹save_reference› cannot be combined"),
                "save the reference in a separate run",
            ));
        }
    }
    args.json.check()
}

/// A measurement whose inputs were checked against each other. No weights have been read yet.
pub(super) struct Setup {
    prepared: Prepared,
    model: ModelIdentity,
    compared_with: Option<ModelIdentity>,
    tool: Tool,
    kv: Option<KvScheme>,
}

impl Setup {
    pub(super) fn new(args: &Args, source: &Text, session: &Session) -> Result<Self> {
        let prepared = Prepared::new(args, source, session)?;
        let Prepared { gpu, opened, reference, request, text, .. } = &prepared;
        if let Some(reference) = reference {
            reference.check(opened, text, |reference| {
                self::text(reference, source, *request, args.windows, session)
            })?;
        }
        let kv = args.kv.scheme(&opened.model);
        let model = provenance::identity(opened, args.model.display().to_string(), kv, session)?;
        let compared_with = match (reference, &args.reference) {
            (Some(opened), Some(path)) => Some(opened.identity(path, session)?),
            _ => None,
        };
        compare_results::check_measured(&text.tokens_sha256, compared_with.as_ref(), &prepared.others)?;
        if let Some(reference) = &compared_with
            && is_quantized(reference)
            && (!is_quantized(&model) || reference.size_bytes < model.size_bytes)
        {
            session.progress.note(
                "warning: the reference is quantized, and MODEL is float or larger: usually, MODEL is the quantized \
                 model and ‹reference› the original",
            );
        }
        let simulated = match args.execution {
            Execution::Kernels => kv.and_then(|kv| opened.model.kernels_refuse(kv)),
            Execution::Fake => None,
        };
        if let Some(reason) = &simulated {
            session.progress.note(&format!("the KV cache is simulated: {reason}"));
        }
        let device = gpu.as_ref().map(CudaRunner::device);
        if args.execution == Execution::Kernels {
            provenance::note_floats(&opened.model, device.is_some(), session);
        }
        let tool = provenance::tool(args.execution, device, &opened.model, simulated.is_some(), session)?;
        Ok(Self { prepared, model, compared_with, tool, kv })
    }

    pub(super) fn text(&self) -> &EvaluationText {
        &self.prepared.text
    }

    /// What the measurements depend on.
    pub(super) fn identity(&self) -> serde_json::Value {
        let Prepared { reference, text, .. } = &self.prepared;
        json!({
            "tool": self.tool,
            "model": self.model.sha256,
            "kv_cache": self.model.kv_cache,
            "reference": self.compared_with.as_ref().map(|r| &r.sha256),
            "stored_reference": reference.as_ref().and_then(|r| r.digest()),
            "profile": text.id,
            "tokens": text.tokens_sha256,
        })
    }

    pub(super) fn decoder(&self, execution: Execution, session: &Session) -> Result<Decoder> {
        let Prepared { gpu, opened, text, .. } = &self.prepared;
        let decoder = load(opened, text, "load", session)?.with_kv(self.kv);
        match (gpu, execution) {
            (Some(gpu), _) => decoder.on_cuda(gpu),
            (None, Execution::Kernels) => decoder.packed(),
            (None, Execution::Fake) => Ok(decoder),
        }
    }

    /// Reads the weights of the reference, if there is one.
    pub(super) fn take_reference(&mut self, session: &Session) -> Result<Option<LoadedReference>> {
        let reference = self.prepared.reference.take();
        reference.map(|reference| reference.load(&self.prepared.text, session)).transpose()
    }

    pub(super) fn reference(&self) -> Option<&OpenedReference> {
        self.prepared.reference.as_ref()
    }
}

struct Measurement {
    scores: (Scores, Option<Divergence>),
    /// Windows that were measured before.
    known: usize,
    journal: Option<PathBuf>,
    seen: Option<Anatomy>,
    seconds: f64,
}

/// Measures a model on a text, with a page about the result if `with_page` is set; [`Evaluated::finish`] completes it.
///
/// # Errors
/// Same as `quant eval`.
pub fn evaluate(args: &Args, source: &Text, with_page: bool, session: &Session) -> Result<Evaluated> {
    let mut setup = Setup::new(args, source, session)?;
    let measured = match &args.shards.shards {
        Some(place) => Measurement {
            scores: shards::merged(&setup, place, session)?,
            known: setup.text().windows.len(),
            journal: None,
            seen: None,
            seconds: 0.0,
        },
        None => measure(&mut setup, args, source, session)?,
    };
    complete(setup, args, source, with_page, measured, session)
}

fn measure(setup: &mut Setup, args: &Args, source: &Text, session: &Session) -> Result<Measurement> {
    let identity = setup.identity();
    let decoder = setup.decoder(args.execution, session)?;
    let started = Instant::now();
    let reference = setup.take_reference(session)?;
    let Setup { prepared: Prepared { text, .. }, tool, model, .. } = setup;
    let observer = session.progress.tokens_per_unit(Some(text.longest_input() as u64));
    let mut seen = None;
    let (scores, known, journal) = match (reference, &args.save_reference) {
        (Some(reference), _) => {
            let mut journal = journal::<Position>(args, &identity, text, session)?;
            let known = journal.windows();
            let (scores, divergence) =
                compare(reference.compared(), &decoder, text, &mut journal, &observer, &session.cancel)?;
            match (&args.report, reference.decoder()) {
                (Some(_), Some(reference)) => {
                    seen = Some(anatomy(reference, &decoder, text, &session.cancel)?);
                }
                (Some(_), None) => session.progress.note(
                    "the report will not show the errors of blocks, because a stored reference contains \
                    only the output of the last block",
                ),
                (None, _) => {}
            }
            ((scores, Some(divergence)), known, journal.finish())
        }
        (None, Some(path)) => {
            let about = (&*tool, &*model, source.name());
            let scores = store_reference(&decoder, text, about, path, &observer, &session.cancel)?;
            ((scores, None), 0, None)
        }
        (None, None) => {
            let mut journal = journal::<f64>(args, &identity, text, session)?;
            let known = journal.windows();
            let scores = perplexity(&decoder, text, &mut journal, &observer, &session.cancel)?;
            ((scores, None), known, journal.finish())
        }
    };
    let seconds = started.elapsed().as_secs_f64();
    Ok(Measurement { scores, known, journal, seen, seconds })
}

fn complete(
    setup: Setup,
    args: &Args,
    source: &Text,
    with_page: bool,
    measured: Measurement,
    session: &Session,
) -> Result<Evaluated> {
    let Measurement { scores, known, journal, seen, seconds } = measured;
    let Setup { prepared, model, compared_with, tool, .. } = setup;
    let Prepared { others, opened, quantization, text, .. } = prepared;
    if args.shards.shards.is_some() && args.report.is_some() && compared_with.is_some() {
        session.progress.note("the report will not show the errors of blocks, which shards do not measure");
    }
    let read: usize = text.windows[known..].iter().map(|w| w.input().len()).sum();
    let time = (seconds, read as f64 / seconds.max(f64::MIN_POSITIVE));
    let result = Evaluation::new(tool, model, compared_with, (source.name().to_owned(), &text), scores, time);
    compare_results::check(&result, &others)?;
    let page = match with_page {
        true => Some(page(&result, seen.as_ref(), quantization.as_ref(), &others, &opened, &text)?),
        false => None,
    };
    if let (Some(path), Some(page)) = (&args.report, &page) {
        output::write_file(path, page.as_bytes())?;
    }
    Ok(Evaluated { result, page, others, journal })
}

fn is_quantized(model: &ModelIdentity) -> bool {
    model.schemes.iter().any(|share| share.scheme != "float")
}

/// Opens the GPU, if one is requested. A missing GPU is reported before anything is read.
fn gpu(args: &Args) -> Result<Option<CudaRunner>> {
    match (args.device, args.execution) {
        (Device::Cpu, _) => Ok(None),
        (Device::Cuda, Execution::Kernels) if !args.ablation.ablation => CudaRunner::new().map(Some),
        (Device::Cuda, _) => Err(Error::usage(
            "‹device=cuda› requires ‹execution=kernels›, but this evaluation does not use the kernels",
            "add ‹execution=kernels›, or omit ‹device›; an ablation runs on the CPU",
        )),
    }
}

fn compared(paths: &[PathBuf]) -> Result<Vec<(String, Evaluation)>> {
    compare_results::read(paths)
}

/// Returns the quantization report stored next to the model's weights, if there is one. An invalid report is only a
/// warning.
fn quantization(opened: &Opened, session: &Session) -> Option<QuantReport> {
    QuantReport::find(opened.directory.path(), &opened.model).unwrap_or_else(|error| {
        session.progress.note(&format!("warning: {error}; the report will not show the errors of tensors"));
        None
    })
}

fn page(
    result: &Evaluation,
    anatomy: Option<&Anatomy>,
    quantization: Option<&QuantReport>,
    others: &[(String, Evaluation)],
    opened: &Opened,
    text: &EvaluationText,
) -> Result<String> {
    let tokenizer = inputs::tokenizer(&opened.directory)?;
    let worst = EvaluationReport::worst_windows(result)
        .into_iter()
        .map(|window| {
            let tokens = &text.windows[window].tokens;
            Ok(WorstWindow {
                window,
                excerpt: tokenizer.decode(&tokens[..tokens.len().min(EXCERPT_TOKENS)])?,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let linears = provenance::linears(&opened.model);
    Ok(EvaluationReport { result, anatomy, linears: &linears, quantization, worst: &worst, others }.page())
}

fn journal<T: Measured>(
    args: &Args,
    identity: &serde_json::Value,
    text: &EvaluationText,
    session: &Session,
) -> Result<Journal<T>> {
    let Some(path) = &args.journal else { return Ok(Journal::none()) };
    let tokens: Vec<usize> = text.windows.iter().map(|w| w.scored()).collect();
    let journal = Journal::open(path, identity, &tokens)?;
    if journal.windows() > 0 {
        session.progress.note(&format!(
            "{} of {} windows have already been measured",
            journal.windows(),
            tokens.len()
        ));
    }
    Ok(journal)
}

/// Tokenizes an evaluation text and cuts it into windows.
pub fn text(
    opened: &Opened,
    source: &Text,
    request: ProfileRequest,
    windows: Option<u64>,
    session: &Session,
) -> Result<EvaluationText> {
    let (positions, window) = (opened.model.architecture().max_positions, request.profile.window());
    opened.model.check_positions(window)?;
    if window > positions {
        session.progress.note(&format!(
            "warning: windows of {window} tokens are longer than the {positions} positions the model was \
            trained for; ‹window={positions}› avoids this"
        ));
    }
    let documents = run::documents(opened, source, &session.host())?;
    let origin = Path::new(source.name());
    let tokenizer = inputs::tokenizer(&opened.directory)?;
    let tokenization = Tokenization {
        tokenizer: &tokenizer,
        settings: &TokenizerSettings::open(&opened.directory)?,
        sha256: sha256_hex(read_tokenizer(opened)?),
    };
    let windows = windows.map(|n| usize::try_from(n).unwrap_or(usize::MAX));
    let text = match documents.rendered {
        false => EvaluationText::new(&tokenization, &documents.texts, request, windows, origin)?,
        true => {
            let tokenization = RenderedTokenization(tokenization);
            EvaluationText::new(&tokenization, &[documents.texts.concat()], request, windows, origin)?
        }
    };
    for warning in &text.warnings {
        session.progress.note(&format!("warning: {warning}"));
    }
    for note in &text.notes {
        session.progress.note(note);
    }
    // If the tokenizer is larger than the embedding, even the tokens that the embedding has may have a different
    // meaning.
    if let Some(largest) = text.largest_token().max(tokenizer.largest_token()?) {
        opened.model.check_token(largest)?;
    }
    Ok(text)
}

/// Loads a model for the windows of a text, and shows the progress under `stage`.
pub fn load(
    opened: &Opened,
    text: &EvaluationText,
    stage: &'static str,
    session: &Session,
) -> Result<Decoder> {
    Decoder::load(&opened.model, text.longest_input(), &session.progress.named(stage), &session.cancel)
}

fn read_tokenizer(opened: &Opened) -> Result<Vec<u8>> {
    TextTokenizer::bytes_of(&opened.directory)
}
