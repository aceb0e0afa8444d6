//! Isolation of tokenizers and chat templates, which are untrusted input.
//!
//! A chat template is a program, and a `tokenizer.json` can be crafted to grow a text without bound or never to end.
//! Therefore callers do not run them directly, but send requests to a [`TextWorker`], which [`TextWorkers`] loads. This
//! module defines the traits, requests and responses; the implementations are elsewhere.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use serde_json::Value;

use crate::wording::Remedy;
use crate::{Error, Result};

/// Loads tokenizers and templates.
pub trait TextWorkers: fmt::Debug + Send + Sync {
    /// Loads a tokenizer or a template.
    ///
    /// # Errors
    /// When it is malformed, exceeds its limits, or no worker is available.
    fn load(&self, loadable: Loadable) -> Result<Box<dyn TextWorker>>;
}

/// Holds a tokenizer or a template, and answers requests.
pub trait TextWorker: fmt::Debug + Send + Sync {
    /// Returns the answer, in the variant that matches the request.
    ///
    /// # Errors
    /// When the tokenizer or template fails on the input, exceeds its limits, or the run is cancelled.
    fn ask(&self, question: &Question<'_>) -> Result<Answer>;
}

/// A file of a model that a worker holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loadable {
    /// The path of the file, for messages; the file is not opened.
    pub path: PathBuf,
    /// The contents of the file.
    pub content: Content,
}

/// The contents of a file that a worker holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// The bytes of a `tokenizer.json`.
    Tokenizer(Vec<u8>),
    /// A chat template.
    Template {
        /// The template's source.
        source: String,
        /// Special tokens that the template may use, by name.
        tokens: Vec<(String, String)>,
    },
}

impl Loadable {
    /// Converts a fault of this file into an error that names the file.
    pub fn error(&self, fault: Fault) -> Error {
        let path = self.path.clone();
        match self.content {
            Content::Tokenizer(_) => Error::Tokenizer { path, reason: fault.reason },
            Content::Template { .. } => {
                Error::InputFile { path, line: fault.line, reason: fault.reason, remedy: fault.remedy }
            }
        }
    }
}

/// A fault of a file, without the file's name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fault {
    /// The line, counted from 1, if known.
    pub line: Option<usize>,
    /// The reason, as the end of a sentence that begins with the file's name.
    pub reason: String,
    /// The remedy; not shown for tokenizers.
    pub remedy: Remedy,
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        match error {
            Error::Tokenizer { reason, .. } => Self { reason, ..Self::default() },
            Error::InputFile { line, reason, remedy, .. } => Self { line, reason, remedy },
            other => Self { line: None, reason: other.to_string(), remedy: other.remedy() },
        }
    }
}

/// A request to a worker.
#[derive(Debug, Clone, PartialEq)]
pub enum Question<'a> {
    /// Tokenize texts, each separately.
    Encode {
        /// The texts.
        texts: Vec<&'a str>,
        /// Whether to add the special tokens that the tokenizer adds to every text.
        special: bool,
        /// Whether to return the byte range of each token.
        places: bool,
    },
    /// Decode tokens to texts, without special tokens.
    Decode {
        /// The tokens of each text.
        tokens: Vec<Cow<'a, [u32]>>,
    },
    /// The largest token id, including special tokens.
    LargestToken,
    /// The id of a token.
    TokenId(&'a str),
    /// Render conversations with the template.
    Render {
        /// The conversations.
        chats: Vec<Cow<'a, Chat>>,
        /// How to render them.
        form: ChatForm,
    },
}

/// The messages of a conversation, as passed to a template.
#[derive(Debug, Clone, PartialEq)]
pub struct Chat {
    /// One object per message.
    pub messages: Vec<Value>,
    /// A list of tools, or null.
    pub tools: Value,
}

/// How a conversation is rendered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChatForm {
    /// The conversation as it is.
    Whole,
    /// The conversation as it is, with the spans that the assistant wrote.
    Marked,
    /// The conversation followed by the prompt for the assistant's next answer.
    Prompt,
}

/// A response of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Tokens, one list per text.
    Encoded(Vec<Encoded>),
    /// Texts, one per list of tokens.
    Decoded(Vec<String>),
    /// The largest token id, if there is any.
    LargestToken(Option<u32>),
    /// The token id, if the vocabulary has the token.
    TokenId(Option<u32>),
    /// One result per conversation; the template may refuse some.
    Rendered(Vec<Result<RenderedText, Fault>>),
}

/// The tokens of one text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// The token ids.
    pub ids: Vec<u32>,
    /// The byte range of each token, start and end, if requested.
    pub places: Vec<[u32; 2]>,
}

/// A rendered conversation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RenderedText {
    /// The text.
    pub text: String,
    /// The spans that the assistant wrote, as byte ranges of the text, in order and without overlap, if requested.
    pub assistant: Vec<Range<usize>>,
}

impl Question<'_> {
    /// Whether a response has the form that this request requires. The sender is not trusted.
    pub fn fits(&self, answer: &Answer) -> bool {
        match (self, answer) {
            (Self::Encode { texts, places, .. }, Answer::Encoded(all)) => {
                let placed = |e: &Encoded| e.places.len() == if *places { e.ids.len() } else { 0 };
                all.len() == texts.len() && all.iter().all(placed)
            }
            (Self::Decode { tokens }, Answer::Decoded(texts)) => texts.len() == tokens.len(),
            (Self::LargestToken, Answer::LargestToken(_)) | (Self::TokenId(_), Answer::TokenId(_)) => true,
            (Self::Render { chats, .. }, Answer::Rendered(all)) => {
                all.len() == chats.len() && all.iter().flatten().all(RenderedText::has_valid_spans)
            }
            _ => false,
        }
    }

    /// Number of items that can be processed in parallel.
    pub fn items(&self) -> usize {
        match self {
            Self::Encode { texts, .. } => texts.len(),
            Self::Decode { tokens } => tokens.len(),
            Self::LargestToken | Self::TokenId(_) => 1,
            Self::Render { chats, .. } => chats.len(),
        }
    }
}

impl RenderedText {
    fn has_valid_spans(&self) -> bool {
        let mut after = 0;
        self.assistant.iter().all(|span| {
            let is_valid = after <= span.start && span.start <= span.end && span.end <= self.text.len();
            after = span.end;
            is_valid
        })
    }
}
