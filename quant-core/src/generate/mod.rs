//! Text generation, one token at a time.
//!
//! ```text
//! prompt ─► tokens ─► Decoder::step ─► logits ─► Sampler ─► token ─► TextStream ─► text
//!                        ▲                                   │
//!                        └───────────────────────────────────┘
//! ```
//!
//! The settings have the names, meanings and order of transformers' `GenerationConfig`. The same tokens, settings,
//! seed, program and instruction set produce the same text, regardless of the number of threads.

mod sampler;
#[cfg(test)]
mod sampler_tests;
mod settings;
mod text_stream;

use std::ops::ControlFlow;

pub use self::sampler::{Candidate, Choice, Sampler};
pub use self::settings::GenerationSettings;
pub use self::text_stream::TextStream;
use crate::model::{Decoder, SequenceCache};
use crate::{CancelToken, Error, Result};

/// Prompt tokens per step: enough for efficient matrix products, few enough to stop soon when cancelled and to keep
/// intermediate values small.
const PROMPT_CHUNK: usize = 512;

/// The reason why generation stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// The model emitted an end-of-sequence token.
    EndOfSequence,
    /// The maximum number of new tokens was reached.
    MaxNewTokens,
    /// The decoder has no positions left.
    Context,
    /// The caller asked to stop.
    Stopped,
}

impl End {
    /// Returns the name for reports: `eos`, `length`, `context` or `stop`.
    pub fn name(self) -> &'static str {
        match self {
            Self::EndOfSequence => "eos",
            Self::MaxNewTokens => "length",
            Self::Context => "context",
            Self::Stopped => "stop",
        }
    }
}

/// One growing sequence: a decoder, its KV cache, and the tokens in it.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use quant_core::checkpoint::ModelDirectory;
/// use quant_core::generate::{GenerationSettings, Generator};
/// use quant_core::model::{Decoder, Model};
/// use quant_core::{CancelToken, Silent};
/// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/support/tiny.rs")); }
/// # let temporary = tempfile::tempdir().unwrap();
/// # let path = temporary.path();
/// # tiny::tiny_llama(path).unwrap();
///
/// let model = Model::open(&ModelDirectory::open(path)?)?;
/// let cancel = CancelToken::new();
/// let decoder = Decoder::load(&model, 128, &Silent, &cancel)?.packed()?; // quantized linears run on the kernels
/// let settings = GenerationSettings { max_new_tokens: 8, ..GenerationSettings::default() };
/// let mut new = Vec::new();
/// Generator::new(&decoder).generate(&[1, 2, 3], &settings, &cancel, &mut |choice| {
///     new.push(choice.token);
///     Ok(ControlFlow::Continue(()))
/// })?;
/// assert_eq!(new.len(), 8);
/// # Ok::<(), quant_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Generator<'a> {
    decoder: &'a Decoder,
    cache: SequenceCache,
    /// The tokens in the cache.
    tokens: Vec<u32>,
}

impl<'a> Generator<'a> {
    /// Creates an empty sequence.
    pub fn new(decoder: &'a Decoder) -> Self {
        Self { decoder, cache: decoder.cache(), tokens: Vec::new() }
    }

    /// Returns the tokens whose keys and values are cached.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the size of the cache in bytes.
    pub fn cache_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Sets the sequence to `prompt` and returns the logits `[vocab]` after its last token. If the prompt continues the
    /// cached tokens by at least one, only the new ones are processed; otherwise all are.
    ///
    /// # Errors
    /// [`Error::Usage`] when the prompt is empty or longer than the decoder's positions; [`Error::Interrupted`] when
    /// the run is cancelled, after which the sequence contains the tokens processed so far.
    pub fn read(&mut self, prompt: &[u32], cancel: &CancelToken) -> Result<Vec<f32>> {
        let positions = self.decoder.positions();
        if prompt.is_empty() {
            return Err(Error::usage(
                "the prompt is empty: it has no tokens",
                "give a prompt that has at least one token",
            ));
        }
        if prompt.len() > positions {
            return Err(Error::usage(
                format!(
                    "the prompt has {} tokens, but the model was loaded for a context of {positions}",
                    prompt.len()
                ),
                "shorten the prompt, or load the model for a longer context if its configuration allows one",
            ));
        }
        // The last token's logits are not kept, so at least one token must be processed.
        let continues = self.tokens.len() < prompt.len() && prompt.starts_with(&self.tokens);
        if !continues {
            *self = Self::new(self.decoder);
        }
        let mut logits = None;
        for chunk in prompt[self.tokens.len()..].chunks(PROMPT_CHUNK) {
            cancel.check()?;
            logits = Some(self.decoder.step(chunk, &mut self.cache)?);
            self.tokens.extend_from_slice(chunk);
        }
        let logits = logits.ok_or_else(|| Error::Internal("a prompt without tokens was accepted".into()))?;
        Ok(logits.to_vec1()?)
    }

    /// Processes a prompt, then chooses tokens until the model emits an end-of-sequence token,
    /// `settings.max_new_tokens` are emitted, the context is full, or `each` breaks. `each` receives every new token
    /// except end-of-sequence tokens.
    ///
    /// # Errors
    /// As [`read`](Self::read) and [`Sampler::choose`], those of invalid settings, and those of `each`.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        settings: &GenerationSettings,
        cancel: &CancelToken,
        each: &mut dyn FnMut(Choice) -> Result<ControlFlow<()>>,
    ) -> Result<End> {
        let mut sampler = Sampler::new(settings)?;
        let mut logits = self.read(prompt, cancel)?;
        let mut tokens = prompt.to_vec();
        loop {
            if tokens.len() - prompt.len() >= settings.max_new_tokens {
                return Ok(End::MaxNewTokens);
            }
            let choice = sampler.choose(&logits, &tokens, prompt.len())?;
            if settings.eos_token_ids.contains(&choice.token) {
                return Ok(End::EndOfSequence);
            }
            tokens.push(choice.token);
            if each(choice)?.is_break() {
                return Ok(End::Stopped);
            }
            if tokens.len() - prompt.len() >= settings.max_new_tokens {
                return Ok(End::MaxNewTokens);
            }
            if tokens.len() > self.decoder.positions() {
                return Ok(End::Context);
            }
            cancel.check()?;
            logits = self.decoder.step(&tokens[tokens.len() - 1..], &mut self.cache)?.to_vec1()?;
            self.tokens.push(choice.token);
        }
    }
}
