//! What a model's files make us execute or expand, and where that happens.
//!
//! A chat template is a program, and a `tokenizer.json` can be made to grow a text without bound, to
//! recurse, or to run an expression that never ends. No check beforehand tells which will. So nobody runs either
//! directly: they ask a [`TextWorker`], which a [`TextWorkers`] has loaded, and a
//! [`ModelDirectory`](crate::checkpoint::ModelDirectory) carries the choice. This module has the traits, the questions
//! and the answers; what answers them is elsewhere.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use serde_json::Value;

use crate::{Error, Result};

/// Loads tokenizers and templates.
pub trait TextWorkers: fmt::Debug + Send + Sync {
    /// Loads one; it is held until the worker is dropped.
    ///
    /// # Errors
    /// When it is malformed, takes more than it may, or no worker can be had.
    fn load(&self, loadable: Loadable) -> Result<Box<dyn TextWorker>>;
}

/// Holds a tokenizer or a template, and answers questions.
pub trait TextWorker: fmt::Debug + Send + Sync {
    /// The answer, of the variant that belongs to the question.
    ///
    /// # Errors
    /// When the tokenizer or template fails on it, takes more than it may, or the run is cancelled.
    fn ask(&self, question: &Question<'_>) -> Result<Answer>;
}

/// A file of a model that a worker holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loadable {
    /// The file, for messages; it is not opened.
    pub path: PathBuf,
    /// What is in it.
    pub content: Content,
}

/// What a worker holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// The bytes of a `tokenizer.json`.
    Tokenizer(Vec<u8>),
    /// A chat template.
    Template {
        /// Its source.
        source: String,
        /// Special tokens that it may write, by name.
        tokens: Vec<(String, String)>,
    },
}

impl Loadable {
    /// The error that a fault of this file is.
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

/// What is wrong with a file, without its name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fault {
    /// The line, counted from 1, where one can be named.
    pub line: Option<usize>,
    /// What is wrong, ending the sentence that the file's name begins.
    pub reason: String,
    /// What to do about it; not shown for tokenizers.
    pub remedy: String,
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

/// What is asked of a worker.
#[derive(Debug, Clone, PartialEq)]
pub enum Question<'a> {
    /// The tokens of texts, each by itself.
    Encode {
        /// The texts.
        texts: Vec<&'a str>,
        /// Whether the tokenizer adds the special tokens that it has for every text.
        special: bool,
        /// Whether it is asked which bytes per token stands for.
        places: bool,
    },
    /// The texts of tokens, without special ones.
    Decode {
        /// The tokens of each text.
        tokens: Vec<Cow<'a, [u32]>>,
    },
    /// The largest number of a token, special ones among them.
    LargestToken,
    /// The number of a token.
    TokenId(&'a str),
    /// Conversations as the template writes them.
    Render {
        /// The conversations.
        chats: Vec<Cow<'a, Chat>>,
        /// What of the text is wanted.
        form: ChatForm,
    },
}

/// The messages of a conversation, as a template is given them.
#[derive(Debug, Clone, PartialEq)]
pub struct Chat {
    /// One object a message.
    pub messages: Vec<Value>,
    /// A list of tools, or null.
    pub tools: Value,
}

/// How a conversation is rendered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChatForm {
    /// As it stands.
    Whole,
    /// As it stands, with the spans that the assistant wrote.
    Marked,
    /// With the beginning of the assistant's next answer.
    Prompt,
}

/// What a worker answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// One for each text.
    Encoded(Vec<Encoded>),
    /// One for each list of tokens.
    Decoded(Vec<String>),
    /// The largest token, if there is any.
    LargestToken(Option<u32>),
    /// The token, if the vocabulary has it.
    TokenId(Option<u32>),
    /// One for each conversation; the template may refuse some.
    Rendered(Vec<Result<RenderedText, Fault>>),
}

/// The tokens of one text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Their numbers.
    pub ids: Vec<u32>,
    /// The first byte that each stands for and the one after its last, where that was asked for.
    pub places: Vec<[u32; 2]>,
}

/// A conversation as text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RenderedText {
    /// The text.
    pub text: String,
    /// What the assistant wrote, in bytes of the text, in order and without overlap, where that was asked for.
    pub assistant: Vec<Range<usize>>,
}

impl Question<'_> {
    /// Whether an answer has the form of one to this question: what comes from another process may be anything.
    pub fn fits(&self, answer: &Answer) -> bool {
        match (self, answer) {
            (Self::Encode { texts, places, .. }, Answer::Encoded(all)) => {
                let placed = |e: &Encoded| e.places.len() == if *places { e.ids.len() } else { 0 };
                all.len() == texts.len() && all.iter().all(placed)
            }
            (Self::Decode { tokens }, Answer::Decoded(texts)) => texts.len() == tokens.len(),
            (Self::LargestToken, Answer::LargestToken(_)) | (Self::TokenId(_), Answer::TokenId(_)) => true,
            (Self::Render { chats, .. }, Answer::Rendered(all)) => {
                all.len() == chats.len() && all.iter().flatten().all(RenderedText::is_sound)
            }
            _ => false,
        }
    }

    /// Items that can be answered beside each other.
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
    fn is_sound(&self) -> bool {
        let mut after = 0;
        self.assistant.iter().all(|span| {
            let sound = after <= span.start && span.start <= span.end && span.end <= self.text.len();
            after = span.end;
            sound
        })
    }
}
