//! A model's chat template, rendered by a worker because it is an untrusted program that comes with the model.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json};

use super::{CONVERSATIONS_PER_BATCH, Conversation, RenderedChat};
use crate::calibrate::settings::CONFIG;
use crate::calibrate::{InProcess, Mask, TokenizerSettings};
use crate::checkpoint::ModelDirectory;
use crate::worker::{Answer, ChatForm, Content, Loadable, Question, RenderedText, TextWorker, TextWorkers};
use crate::{CancelToken, Error, Result};

const TEMPLATE: &str = "chat_template.jinja";
/// The maximum length of a template. Real ones have a few kilobytes.
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;
pub(super) const REMEDY: &str = "correct the model's chat template, or put a different one next to it as \
    chat_template.jinja, which takes precedence";

/// A chat template, with the special tokens that it may write.
#[derive(Debug)]
pub struct ChatTemplate {
    worker: Box<dyn TextWorker>,
    path: PathBuf,
}

impl ChatTemplate {
    /// The template of a model: `chat_template.jinja` next to it, or else `chat_template` in its
    /// `tokenizer_config.json`, which is a string or a list of named templates, from which `default` is taken. Special
    /// tokens come from `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`Error::InputFile`] if there is no template, or it is larger than 1 MiB, not UTF-8 or malformed;
    /// [`Error::Tokenizer`] if `tokenizer_config.json` is malformed.
    pub fn open(directory: &ModelDirectory) -> Result<Self> {
        let settings = TokenizerSettings::open(directory)?;
        let tokens = settings.special_tokens()?;
        let config_path = settings.path().to_owned();
        let path = directory.path().join(TEMPLATE);
        if let Some(sidecar) = directory.sidecar(TEMPLATE) {
            let bytes = sidecar.read(MAX_TEMPLATE_BYTES)?;
            let bytes = bytes.map_err(|reason| fault(&sidecar.path, reason))?;
            let source = String::from_utf8(bytes).map_err(|e| {
                fault(&path, format!("is not valid UTF-8 at byte {}", e.utf8_error().valid_up_to()))
            })?;
            return Self::load(directory.text_workers(), source, tokens, path);
        }
        let source = configured(settings.fields()).map_err(|reason| fault(&config_path, reason))?;
        match source {
            Some(source) if source.len() as u64 <= MAX_TEMPLATE_BYTES => {
                Self::load(directory.text_workers(), source, tokens, config_path)
            }
            Some(source) => {
                let reason =
                    format!("`chat_template` has {} bytes; the limit is {MAX_TEMPLATE_BYTES}", source.len());
                Err(fault(&config_path, reason))
            }
            None => Err(Error::InputFile {
                path: directory.path().to_owned(),
                line: None,
                reason: format!(
                    "has no chat template (neither {TEMPLATE} nor `chat_template` in {CONFIG}), so \
                    conversations cannot be rendered"
                ),
                remedy: format!(
                    "use a chat model, put its {TEMPLATE} next to the weights, or use plain text: a file without \
                    `messages`, or ‹generate(MODEL, prompt=TEXT)›"
                )
                .into(),
            }),
        }
    }

    /// Compiles a template from its source, with special tokens by name, and runs it in this process; `path` is for
    /// messages.
    ///
    /// # Errors
    /// [`Error::InputFile`] if the template is malformed, with the line of a syntax error; [`Error::Unavailable`] in
    /// builds without the feature `chat-templates`.
    pub fn compile(source: String, tokens: Vec<(&'static str, String)>, path: PathBuf) -> Result<Self> {
        Self::load(None, source, tokens, path)
    }

    /// Compiles a template like [`compile`](Self::compile) and runs it with `workers`, or in this process if they are
    /// `None`.
    ///
    /// # Errors
    /// As [`compile`](Self::compile), and when no worker can be started.
    pub fn load(
        workers: Option<&dyn TextWorkers>,
        source: String,
        tokens: Vec<(&'static str, String)>,
        path: PathBuf,
    ) -> Result<Self> {
        let tokens = tokens.into_iter().map(|(name, token)| (name.to_owned(), token)).collect();
        let content = Content::Template { source, tokens };
        let worker = workers.unwrap_or(&InProcess).load(Loadable { path: path.clone(), content })?;
        Ok(Self { worker, path })
    }

    /// The path of the template file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the text of a conversation and, with [`Mask::Prompts`], the spans that the assistant wrote. `origin` is
    /// its file, for messages.
    ///
    /// # Errors
    /// [`Error::InputFile`] with the conversation's line when the template rejects it, exceeds its limits, or does not
    /// separate the assistant's text from the rest.
    pub fn render(&self, conversation: &Conversation, mask: Mask, origin: &Path) -> Result<RenderedChat> {
        self.only(self.render_all(std::slice::from_ref(conversation), mask, origin)?)
    }

    /// [`render`](Self::render) for several conversations. If several fail, the first error is returned.
    ///
    /// # Errors
    /// As [`render`](Self::render).
    pub fn render_all(
        &self,
        conversations: &[Conversation],
        mask: Mask,
        origin: &Path,
    ) -> Result<Vec<RenderedChat>> {
        let form = match mask {
            Mask::None => ChatForm::Whole,
            Mask::Prompts => ChatForm::Marked,
        };
        self.ask(conversations, form, origin)
    }

    /// Returns the texts of conversations. `origin` is their file, for messages.
    ///
    /// # Errors
    /// As [`render`](Self::render); also if the run is cancelled.
    pub fn texts(
        &self,
        conversations: &[Conversation],
        origin: &Path,
        cancel: &CancelToken,
    ) -> Result<Vec<String>> {
        let mut texts = Vec::with_capacity(conversations.len());
        for some in conversations.chunks(CONVERSATIONS_PER_BATCH) {
            cancel.check()?;
            let rendered = self.render_all(some, Mask::None, origin)?;
            texts.extend(rendered.into_iter().map(|chat| chat.text));
        }
        Ok(texts)
    }

    /// Returns the text of a conversation followed by the generation prompt, ready for the assistant's next answer.
    /// `origin` names the source of the conversation in messages.
    ///
    /// # Errors
    /// As [`render`](Self::render).
    pub fn prompt(&self, conversation: &Conversation, origin: &Path) -> Result<String> {
        let rendered = self.ask(std::slice::from_ref(conversation), ChatForm::Prompt, origin)?;
        Ok(self.only(rendered)?.text)
    }

    fn ask(
        &self,
        conversations: &[Conversation],
        form: ChatForm,
        origin: &Path,
    ) -> Result<Vec<RenderedChat>> {
        let chats = conversations.iter().map(|c| Cow::Borrowed(&c.chat)).collect();
        let Answer::Rendered(rendered) = self.worker.ask(&Question::Render { chats, form })? else {
            return Err(self.unexpected());
        };
        let chats = conversations.iter().zip(rendered).map(|(conversation, rendered)| match rendered {
            Ok(RenderedText { text, assistant }) => Ok(RenderedChat { text, assistant }),
            Err(fault) => Err(Error::InputFile {
                path: origin.to_owned(),
                line: Some(conversation.line),
                reason: fault.reason,
                remedy: fault.remedy,
            }),
        });
        chats.collect()
    }

    fn only(&self, rendered: Vec<RenderedChat>) -> Result<RenderedChat> {
        rendered.into_iter().next().ok_or_else(|| self.unexpected())
    }

    fn unexpected(&self) -> Error {
        Error::Internal(format!(
            "the worker process of {} sent a response that does not match the request",
            self.path.display()
        ))
    }
}

pub(super) fn fault(path: &Path, reason: String) -> Error {
    Error::InputFile { path: path.to_owned(), line: None, reason, remedy: REMEDY.into() }
}

/// The template in `tokenizer_config.json`.
fn configured(config: &Map<String, Json>) -> Result<Option<String>, String> {
    match config.get("chat_template") {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(source)) => Ok(Some(source.clone())),
        Some(Json::Array(named)) => {
            let default = named.iter().find(|t| t.get("name").and_then(Json::as_str) == Some("default"));
            match default.and_then(|t| t.get("template")).and_then(Json::as_str) {
                Some(source) => Ok(Some(source.to_owned())),
                None => Err("`chat_template` is a list without a template named `default`".into()),
            }
        }
        Some(_) => Err("`chat_template` must be a string or a list of named templates".into()),
    }
}
