//! `quant generate MODEL --prompt TEXT`: generates text after a prompt.

use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

use quant_core::calibrate::{ChatTemplate, Conversation};
use quant_core::generate::Generator;
use quant_core::model::kernels;
use quant_core::{Error, Result};
use serde::Serialize;
use serde_json::json;

use super::Session;
use crate::generation::{self, DecodingOptions};
use crate::inputs;
use crate::output::{self, JsonOption};

/// Longer prompts from a file or standard input are rejected before they are tokenized.
const MAX_PROMPT_BYTES: u64 = 16 << 20;

/// The model and the prompt.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model directory or GGUF file, float or quantized, or org/name or org/name@revision on a hub
    pub model: PathBuf,
    /// Prompt; without it and --prompt-file, standard input is read
    #[arg(long, short, value_name = "TEXT", conflicts_with = "prompt_file")]
    prompt: Option<String>,
    /// File with the prompt; - is standard input
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Format the prompt as a user message with the model's chat template
    #[arg(long)]
    chat: bool,
    /// System message, with --chat
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    // Before options with a heading of their own, which would also apply to it.
    #[command(flatten)]
    json: JsonOption,
    #[command(flatten)]
    decoding: DecodingOptions,
}

#[derive(Serialize)]
struct Report<'a> {
    schema: &'static str,
    model: String,
    /// The kernel path that multiplies quantized weights; `cuda` on a GPU.
    kernels: &'static str,
    settings: serde_json::Value,
    prompt_tokens: &'a [u32],
    text: &'a str,
    /// Why the generation ended: `eos`, `length`, `context` or `stop`.
    end: &'static str,
    tokens: Vec<Token>,
    prompt_seconds: f64,
    seconds: f64,
}

#[derive(Serialize)]
struct Token {
    id: u32,
    /// Log-probability under the model's own distribution.
    logprob: f64,
    /// Log-probability under the distribution that the token was sampled from.
    sampling_logprob: f64,
}

/// Generates a text and prints it.
pub fn run(args: &Args, session: &Session) -> Result<()> {
    let prompt_file = args.prompt_file.as_deref().filter(|file| *file != Path::new("-"));
    args.json.check_distinct(&args.model, &prompt_file.into_iter().collect::<Vec<_>>())?;
    let (prompt, origin) = prompt(args)?;
    let opened = inputs::open(&args.model, session)?;
    let tokenizer = generation::tokenizer(&opened)?;
    let settings = args.decoding.settings(&opened, &tokenizer, session)?;
    let tokens = match args.chat {
        false => tokenizer.encode(&prompt)?,
        true => {
            let system = args.system.as_ref().map(|text| json!({ "role": "system", "content": text }));
            let user = json!({ "role": "user", "content": prompt });
            let messages: Vec<_> = system.into_iter().chain([user]).collect();
            let conversation = Conversation::of_messages(&messages).map_err(Error::Internal)?;
            let text = ChatTemplate::open(&opened.directory)?.prompt(&conversation, &origin)?;
            tokenizer.encode_rendered(&text)?.into_iter().map(|(token, _)| token).collect()
        }
    };
    let tokens = generation::checked_tokens(&opened, tokens)?;
    let positions = tokens.len().saturating_add(settings.max_new_tokens);
    let decoder = args.decoding.load(&opened, positions, session)?;
    let to_stdout = args.json.json.as_deref() == Some(Path::new("-"));
    let mut show = |text: &str| if to_stdout { Ok(()) } else { output::print_written(text) };
    let mut generator = Generator::new(&decoder);
    let written = generation::write(
        &mut generator,
        &tokenizer,
        &tokens,
        &settings,
        args.decoding.stop(),
        &session.cancel,
        &mut show,
    )?;
    if !to_stdout && !written.text.ends_with('\n') {
        output::print("\n")?;
    }
    session.progress.note(&written.rates());
    let token = |choice: &quant_core::generate::Choice| Token {
        id: choice.token,
        logprob: choice.logprob,
        sampling_logprob: choice.sampling_logprob,
    };
    let report = Report {
        schema: "quant-generate/1",
        model: args.model.display().to_string(),
        kernels: if args.decoding.is_on_gpu() { "cuda" } else { kernels() },
        settings: json!({
            "max_new_tokens": settings.max_new_tokens,
            "do_sample": settings.do_sample,
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "min_p": settings.min_p,
            "repetition_penalty": settings.repetition_penalty,
            "no_repeat_ngram_size": settings.no_repeat_ngram_size,
            "eos_token_id": settings.eos_token_ids,
            "seed": settings.seed,
        }),
        prompt_tokens: &tokens,
        text: &written.text,
        end: written.end.name(),
        tokens: written.choices.iter().map(token).collect(),
        prompt_seconds: written.prompt_seconds,
        seconds: written.seconds,
    };
    match &args.json.json {
        None => Ok(()),
        Some(_) => args.json.emit(&report, String::new),
    }
}

fn prompt(args: &Args) -> Result<(String, PathBuf)> {
    let standard = || PathBuf::from("standard input");
    let (text, origin) = match (&args.prompt, args.prompt_file.as_deref()) {
        (Some(text), _) => return Ok((text.clone(), PathBuf::from("--prompt"))),
        (None, Some(path)) if path != Path::new("-") => {
            // Opening a named pipe would block until its other end is opened.
            let metadata = std::fs::metadata(path).map_err(|e| Error::io("open", path, e))?;
            if !metadata.is_file() {
                return Err(Error::InputFile {
                    path: path.to_owned(),
                    line: None,
                    reason: "is not a regular file".into(),
                    remedy: "give a file, or - to read the prompt from standard input".into(),
                });
            }
            let mut file = std::fs::File::open(path).map_err(|e| Error::io("open", path, e))?;
            (bounded(&mut file, path)?, path.to_owned())
        }
        (None, None) if std::io::stdin().is_terminal() => {
            return Err(Error::usage(
                "no prompt was given",
                "give --prompt TEXT or --prompt-file FILE, or use `quant chat`",
            ));
        }
        (None, _) => {
            let text = bounded(&mut std::io::stdin().lock(), &standard())?;
            if text.is_empty() {
                return Err(Error::usage(
                    "no prompt was given: standard input is empty",
                    "give --prompt TEXT or --prompt-file FILE, or write the prompt to standard input",
                ));
            }
            (text, standard())
        }
    };
    // The final line break comes from the editor; it is not part of the prompt.
    let text =
        text.strip_suffix('\n').map_or(text.as_str(), |t| t.strip_suffix('\r').unwrap_or(t)).to_owned();
    Ok((text, origin))
}

fn bounded(from: &mut dyn Read, path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    from.take(MAX_PROMPT_BYTES + 1).read_to_end(&mut bytes).map_err(|e| Error::io("read", path, e))?;
    let fault = |reason| Error::InputFile {
        path: path.to_owned(),
        line: None,
        reason,
        remedy: "give a prompt of at most 16 MiB of UTF-8 text".into(),
    };
    if bytes.len() as u64 > MAX_PROMPT_BYTES {
        return Err(fault(format!("is longer than {MAX_PROMPT_BYTES} bytes")));
    }
    String::from_utf8(bytes)
        .map_err(|e| fault(format!("is not UTF-8 at byte {}", e.utf8_error().valid_up_to())))
}
