//! A model in memory that scores and generates text for Python, call after call.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use quant_cli::commands::Session;
use quant_cli::commands::eval::Execution;
use quant_cli::generation::write;
use quant_cli::kv::KvBits;
use quant_core::calibrate::{ChatTemplate, Conversation, TextTokenizer, TokenizerSettings};
use quant_core::generate::{GenerationSettings, Generator};
use quant_core::model::Decoder;
use quant_core::run::{Opened, open};
use quant_core::{Error, Event, Observer, Result};
use quant_evaluator::{Window, log_likelihoods};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::job::{self, Place};
use crate::requests::{choice, parse};

/// The maximum context length. The tables and the KV cache grow with the length.
const MAX_CONTEXT: usize = 1 << 20;

struct Loaded {
    opened: Opened,
    decoder: Decoder,
    tokenizer: TextTokenizer,
    eos: Vec<u32>,
    /// The chat template, loaded on first use.
    template: Mutex<Option<Arc<ChatTemplate>>>,
}

/// A loaded model.
#[pyclass(frozen, module = "fewbits._native")]
pub struct Model {
    loaded: Arc<Loaded>,
    /// Special tokens, the maximum context length and the vocabulary size, as JSON.
    #[pyo3(get)]
    about: String,
}

#[pymethods]
impl Model {
    /// Loads the model that `request` describes.
    #[new]
    #[pyo3(signature = (request, on_event, code, python, threads=None))]
    fn new(
        py: Python<'_>,
        request: String,
        on_event: Option<Py<PyAny>>,
        code: PathBuf,
        python: Option<PathBuf>,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let (loaded, target) = shared();
        let work = Box::new(move |session: &Session| {
            let (model, about) = load(&request, session)?;
            *target.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(model));
            Ok(about.to_string())
        });
        let about = job::run(py, work, on_event, Place { code, python }, threads, false)?;
        let loaded = loaded.lock().unwrap_or_else(PoisonError::into_inner).take();
        let loaded = loaded.ok_or_else(|| PyValueError::new_err("the model is not loaded"))?;
        Ok(Self { loaded, about })
    }

    /// Encodes or decodes text, renders a conversation, scores or generates. `kind` names the operation, and `request`
    /// has its arguments as JSON. Returns the answer as JSON.
    #[pyo3(signature = (kind, request, on_event, code, python, threads=None))]
    #[expect(clippy::too_many_arguments, reason = "called from one place, by position")]
    fn ask(
        &self,
        py: Python<'_>,
        kind: &str,
        request: String,
        on_event: Option<Py<PyAny>>,
        code: PathBuf,
        python: Option<PathBuf>,
        threads: Option<usize>,
    ) -> PyResult<String> {
        let loaded = self.loaded.clone();
        // Encoding and decoding take too little time to be worth a thread.
        let quick = match kind {
            "encode" => Some(py.detach(|| loaded.encode(&request))),
            "decode" => Some(py.detach(|| loaded.decode(&request))),
            _ => None,
        };
        if let Some(done) = quick {
            return done.map(|answer| answer.to_string()).map_err(|e| crate::error::exception(py, &e));
        }
        let work: job::Work = match kind {
            "chat" => Box::new(move |session| loaded.prompt(&request, session)),
            "score" => Box::new(move |session| loaded.score(&request, session)),
            "generate" => Box::new(move |session| loaded.generate(&request, session)),
            other => return Err(PyValueError::new_err(format!("unknown job {other} of a model"))),
        };
        job::run(py, work, on_event, Place { code, python }, threads, false)
    }
}

type Slot = Arc<Mutex<Option<Arc<Loaded>>>>;

fn shared() -> (Slot, Slot) {
    let slot = Slot::default();
    (slot.clone(), slot)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Load {
    model: PathBuf,
    execution: String,
    kv: String,
    max_length: Option<usize>,
}

fn load(request: &str, session: &Session) -> Result<(Loaded, Value)> {
    let asked: Load = parse(request)?;
    let execution = choice::<Execution>("execution", &asked.execution)?;
    let kv = choice::<KvBits>("kv", &asked.kv)?;
    let opened = open(&asked.model, &session.host())?;
    let max = opened.model.architecture().max_positions.min(MAX_CONTEXT);
    let positions = asked.max_length.unwrap_or(max);
    if !(1..=max).contains(&positions) {
        return Err(Error::usage(
            format!("‹max_length={positions}› is out of range for this model"),
            format!("use ‹max_length› from 1 to {max}"),
        ));
    }
    let tokenizer = TextTokenizer::of(&opened.directory)?;
    let special = TokenizerSettings::open(&opened.directory)?.special_tokens()?;
    let special = special.into_iter().map(|(name, text)| {
        let id = tokenizer.token_id(&text)?;
        Ok((name.to_owned(), json!({ "text": text, "id": id })))
    });
    let special = special.collect::<Result<serde_json::Map<_, _>>>()?;
    let decoder = Decoder::load(&opened.model, positions, &session.progress, &session.cancel)?
        .with_kv(kv.scheme(&opened.model));
    let decoder = match execution {
        Execution::Kernels => decoder.packed()?,
        Execution::Fake => decoder,
    };
    let mut eos = GenerationSettings::open(&opened.directory)?.0.eos_token_ids;
    if eos.is_empty() {
        let id = special.get("eos_token").and_then(|token| token["id"].as_u64());
        eos.extend(id.and_then(|id| u32::try_from(id).ok()));
    }
    let about = json!({
        "special_tokens": special,
        "eos_token_ids": eos,
        "positions": positions,
        "vocab": decoder.vocab(),
    });
    Ok((Loaded { opened, decoder, tokenizer, eos, template: Mutex::new(None) }, about))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Encode {
    texts: Vec<String>,
    special: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Scored {
    tokens: Vec<u32>,
    first: usize,
}

/// A request for text. Settings that are not given come from the model. Sampling is only used if it is requested.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Generate {
    prompts: Vec<Vec<u32>>,
    stop: Vec<String>,
    max_new_tokens: usize,
    do_sample: bool,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    seed: u64,
}

impl Loaded {
    fn encode(&self, request: &str) -> Result<Value> {
        let Encode { texts, special } = parse(request)?;
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        Ok(match special {
            true => json!(self.tokenizer.encode_all(&texts)?),
            false => {
                let encoded = self.tokenizer.encode_all_rendered(&texts)?.into_iter();
                json!(encoded.map(|t| t.into_iter().map(|(id, _)| id).collect()).collect::<Vec<Vec<u32>>>())
            }
        })
    }

    fn decode(&self, request: &str) -> Result<Value> {
        let tokens: Vec<u32> = parse(request)?;
        Ok(json!(self.tokenizer.decode(&tokens)?))
    }

    fn prompt(&self, request: &str, session: &Session) -> Result<String> {
        let messages: Vec<Value> = parse(request)?;
        session.cancel.check()?;
        let mut known = self.template.lock().unwrap_or_else(PoisonError::into_inner);
        let template = match &*known {
            Some(template) => template.clone(),
            None => known.insert(Arc::new(ChatTemplate::open(&self.opened.directory)?)).clone(),
        };
        drop(known);
        let conversation = Conversation::of_messages(&messages).map_err(|reason| {
            Error::usage(format!("the conversation {reason}"), "pass a list of messages")
        })?;
        Ok(json!(template.prompt(&conversation, Path::new("messages"))?).to_string())
    }

    fn score(&self, request: &str, session: &Session) -> Result<String> {
        let asked: Vec<Scored> = parse(request)?;
        let windows: Vec<Window> =
            asked.into_iter().map(|Scored { tokens, first }| Window { tokens, first }).collect();
        let scores = log_likelihoods(&self.decoder, &windows, &session.progress, &session.cancel)?;
        let scores: Vec<_> = scores.iter().map(|s| (s.log_likelihood, s.is_greedy)).collect();
        Ok(json!(scores).to_string())
    }

    fn generate(&self, request: &str, session: &Session) -> Result<String> {
        let asked: Generate = parse(request)?;
        let (own, _) = GenerationSettings::open(&self.opened.directory)?;
        let settings = GenerationSettings {
            max_new_tokens: asked.max_new_tokens,
            do_sample: asked.do_sample,
            temperature: asked.temperature.unwrap_or(own.temperature),
            top_k: asked.top_k.unwrap_or(own.top_k),
            top_p: asked.top_p.unwrap_or(own.top_p),
            min_p: asked.min_p.unwrap_or(own.min_p),
            repetition_penalty: asked.repetition_penalty.unwrap_or(own.repetition_penalty),
            seed: asked.seed,
            eos_token_ids: self.eos.clone(),
            ..own
        };
        settings.check()?;
        let units = asked.prompts.len() as u64;
        session.progress.event(&Event::StageStarted { stage: "generate", unit: "prompt", units });
        let mut written = Vec::with_capacity(asked.prompts.len());
        for prompt in &asked.prompts {
            let vocab = self.opened.model.architecture().vocab;
            if let Some(token) = prompt.iter().find(|token| **token as usize >= vocab) {
                let message = format!("a prompt has token {token}, but the vocabulary has {vocab} tokens");
                return Err(Error::usage(message, "pass tokens of the model's own tokenizer"));
            }
            let mut generator = Generator::new(&self.decoder);
            let (cancel, stop) = (&session.cancel, &asked.stop);
            let done =
                write(&mut generator, &self.tokenizer, prompt, &settings, stop, cancel, &mut |_| Ok(()))?;
            let tokens: Vec<u32> = done.choices.iter().map(|choice| choice.token).collect();
            written.push(json!({ "text": done.text, "tokens": tokens, "end": done.end.name() }));
            session.progress.event(&Event::UnitDone { detail: String::new() });
        }
        session.progress.event(&Event::StageDone);
        Ok(json!(written).to_string())
    }
}
