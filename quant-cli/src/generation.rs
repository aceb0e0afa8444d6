//! The parts that `generate` and `chat` share: the decoding options, and a model that is ready to decode.

use std::ops::ControlFlow;
use std::time::Instant;

use clap::builder::NonEmptyStringValueParser;
use quant_core::calibrate::{TextTokenizer, TokenizerSettings};
use quant_core::generate::{Choice, End, GenerationSettings, Generator, TextStream};
use quant_core::model::{CudaRunner, Decoder, KvCaching};
use quant_core::wording::counted;
use quant_core::{CancelToken, Error, Result};

use crate::commands::Session;
use crate::device::Device;
use crate::inputs::{self, Opened};
use crate::kv::KvBits;
use crate::provenance;

/// Maximum context length, because the tables and the cache grow with the number of positions.
const MAX_CONTEXT: usize = 1 << 20;

/// How tokens are chosen. Options that are not given come from the model's generation_config.json.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Decoding (default: the model's generation_config.json)")]
pub struct DecodingOptions {
    /// Generate at most N tokens
    #[arg(long, value_name = "N")]
    max_new_tokens: Option<usize>,
    /// Always take the most probable token
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "min_p", "seed"])]
    greedy: bool,
    /// Divide the logits by T before sampling; 0 is the same as --greedy
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Sample from the K most probable tokens; 0 means all
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Sample from the smallest set of tokens whose probabilities add up to at least P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Exclude tokens whose probability is less than P times that of the most probable token
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Seed for sampling; the same seed gives the same text [default: 0]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Make tokens that have already occurred less likely: divide their logits by X if positive, multiply them if
    /// negative
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
    /// Stop before TEXT, which is not printed; can be repeated
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    /// Do not stop at end-of-text tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Precision of the KV cache: auto (as in config.json), 16 (floats), 8, 4 or fp8
    #[arg(long, value_enum, default_value_t, value_name = "BITS")]
    kv: KvBits,
    /// Device for quantized linears: cuda is the first NVIDIA GPU
    #[arg(long, value_enum, default_value_t, value_name = "DEVICE")]
    device: Device,
}

impl DecodingOptions {
    /// Returns the decoding settings: those of the model, overridden by the given options.
    pub fn settings(
        &self,
        opened: &Opened,
        tokenizer: &TextTokenizer,
        session: &Session,
    ) -> Result<GenerationSettings> {
        let (mut settings, notes) = GenerationSettings::open(&opened.directory)?;
        notes.iter().for_each(|note| session.progress.note(&format!("note: {note}")));
        if settings.eos_token_ids.is_empty() {
            let special = TokenizerSettings::open(&opened.directory)?.special_tokens()?;
            let eos = special.iter().find(|(name, _)| *name == "eos_token");
            let id = eos.map(|(_, token)| tokenizer.token_id(token)).transpose()?;
            settings.eos_token_ids.extend(id.flatten());
        }
        let draws = self.temperature.is_some()
            || self.top_k.is_some()
            || self.top_p.is_some()
            || self.min_p.is_some()
            || self.seed.is_some();
        settings.do_sample = (settings.do_sample || draws) && !self.greedy && self.temperature != Some(0.0);
        settings.max_new_tokens = self.max_new_tokens.unwrap_or(settings.max_new_tokens);
        settings.temperature = self.temperature.filter(|t| *t != 0.0).unwrap_or(settings.temperature);
        settings.top_k = self.top_k.unwrap_or(settings.top_k);
        settings.top_p = self.top_p.unwrap_or(settings.top_p);
        settings.min_p = self.min_p.unwrap_or(settings.min_p);
        settings.repetition_penalty = self.repetition_penalty.unwrap_or(settings.repetition_penalty);
        settings.seed = self.seed.unwrap_or(settings.seed);
        if self.ignore_eos {
            settings.eos_token_ids.clear();
        }
        settings.check()?;
        if settings.max_new_tokens == 0 {
            return Err(Error::usage(
                "--max-new-tokens is 0, so there is nothing to generate",
                "give at least 1",
            ));
        }
        Ok(settings)
    }

    /// Returns whether the user set the maximum number of tokens.
    pub fn bounds_answers(&self) -> bool {
        self.max_new_tokens.is_some()
    }

    /// Returns the stop strings; the text ends before the first one.
    pub fn stop(&self) -> &[String] {
        &self.stop
    }

    /// Returns whether quantized linears run on a GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.device == Device::Cuda
    }

    /// Loads the model for `positions` tokens, with its quantized linears packed for the kernels or on the GPU.
    pub fn load(&self, opened: &Opened, positions: usize, session: &Session) -> Result<Decoder> {
        let max = opened.model.architecture().max_positions.min(MAX_CONTEXT);
        if positions > max {
            return Err(Error::usage(
                format!("a context of {positions} positions is needed, but the maximum is {max}"),
                "shorten the prompt, or request fewer tokens (--max-new-tokens; in a chat, --context)",
            ));
        }
        let gpu = self.is_on_gpu().then(CudaRunner::new).transpose()?;
        provenance::note_floats(&opened.model, gpu.is_some(), session);
        let decoder = Decoder::load(&opened.model, positions, &session.progress, &session.cancel)?
            .with_kv(self.kv.scheme(&opened.model));
        let decoder = match &gpu {
            Some(gpu) => decoder.on_cuda(gpu)?,
            None => decoder.packed()?,
        }
        .with_half_cache();
        if let KvCaching::Simulated(kv) = decoder.caching() {
            let reason = opened.model.kernels_refuse(kv).unwrap_or_default();
            session.progress.note(&format!("the KV cache is simulated: {reason}"));
        }
        Ok(decoder)
    }
}

/// Returns `tokens` unchanged, or fails if the model lacks one.
pub fn checked_tokens(opened: &Opened, tokens: Vec<u32>) -> Result<Vec<u32>> {
    if let Some(largest) = tokens.iter().max() {
        opened.model.check_token(*largest)?;
    }
    Ok(tokens)
}

/// Returns the tokenizer of a model.
pub fn tokenizer(opened: &Opened) -> Result<TextTokenizer> {
    inputs::tokenizer(&opened.directory)
}

/// The result of a generation.
pub struct Written {
    /// The text.
    pub text: String,
    /// The generated tokens, including those of a stop string, but without an end-of-text token.
    pub choices: Vec<Choice>,
    /// The reason why the generation ended.
    pub end: End,
    /// Seconds spent on the prompt.
    pub prompt_seconds: f64,
    /// Seconds spent on the new tokens.
    pub seconds: f64,
    /// Prompt tokens that were processed, not counting those already cached.
    pub prompt_tokens: usize,
}

impl Written {
    /// Formats the tokens per second of the prompt and of the generation.
    pub fn rates(&self) -> String {
        // The first new token is sampled from the prompt's logits.
        let steps = self.choices.len().saturating_sub(1);
        let rate = |tokens: usize, seconds: f64| match tokens {
            0 => String::new(),
            _ => format!(" ({:.1} tokens/s)", tokens as f64 / seconds.max(1e-9)),
        };
        format!(
            "{} in {:.2} s{}, {} in {:.2} s{}",
            counted(self.prompt_tokens, "prompt token"),
            self.prompt_seconds,
            rate(self.prompt_tokens, self.prompt_seconds),
            counted(self.choices.len(), "new token"),
            self.seconds,
            rate(steps, self.seconds),
        )
    }
}

/// Generates text after a prompt; `show` receives it piece by piece.
pub fn write(
    generator: &mut Generator<'_>,
    tokenizer: &TextTokenizer,
    prompt: &[u32],
    settings: &GenerationSettings,
    stop: &[String],
    cancel: &CancelToken,
    show: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<Written> {
    let mut stream = TextStream::new(tokenizer, prompt, stop);
    let cached = generator.tokens().len();
    let continues = cached < prompt.len() && prompt.starts_with(generator.tokens());
    let mut written = Written {
        text: String::new(),
        choices: Vec::new(),
        end: End::Stopped,
        prompt_seconds: 0.0,
        seconds: 0.0,
        prompt_tokens: if continues { prompt.len() - cached } else { prompt.len() },
    };
    let started = Instant::now();
    let mut read = None;
    let mut emit = |text: &mut String, piece: String| -> Result<()> {
        text.push_str(&piece);
        if piece.is_empty() { Ok(()) } else { show(&piece) }
    };
    let end = generator.generate(prompt, settings, cancel, &mut |choice| {
        read.get_or_insert_with(|| started.elapsed().as_secs_f64());
        written.choices.push(choice);
        let piece = stream.push(choice.token)?;
        emit(&mut written.text, piece)?;
        Ok(if stream.is_stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    });
    let total = started.elapsed().as_secs_f64();
    let rest = stream.finish()?;
    emit(&mut written.text, rest)?;
    written.end = end?;
    written.prompt_seconds = read.unwrap_or(total);
    written.seconds = total - written.prompt_seconds;
    Ok(written)
}
