//! `tokenizer.json`, asked through a worker: it comes with the model and is as hostile as its weights.

use std::borrow::Cow;
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use super::InProcess;
use crate::checkpoint::{ModelDirectory, Sidecar, read_capped};
use crate::worker::{Answer, Content, Encoded, Loadable, Question, TextWorker, TextWorkers};
use crate::{Error, Result};

/// Larger tokenizer files are refused before they are parsed.
const LARGEST_FILE: u64 = 256 << 20;
/// Texts are asked about so many, or so many bytes, at a time; a longer one by itself.
const TEXTS_AT_ONCE: usize = 1024;
const BYTES_AT_ONCE: usize = 8 << 20;

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread would be caught here and told as an error, so that a program's
/// panic hook need not print it.
pub fn panic_is_handled() -> bool {
    GUARDED.get()
}

/// What `work` returns, or nothing when it panics: for libraries that panic on crafted files.
/// Meanwhile [`panic_is_handled`].
pub fn guard_panics<T>(work: impl FnOnce() -> T) -> Option<T> {
    let outer = GUARDED.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(outer);
    outcome.ok()
}

/// The tokens of a text, each with the bytes of the text that it stands for.
pub type PlacedTokens = Vec<(u32, Range<usize>)>;

/// A model's tokenizer.
#[derive(Debug)]
pub struct TextTokenizer {
    worker: Box<dyn TextWorker>,
    path: PathBuf,
}

impl TextTokenizer {
    /// Reads a `tokenizer.json`, which runs in this process. Truncation and padding that it may ask for are
    /// switched off: evaluation must see the whole text.
    ///
    /// # Errors
    /// When the file is missing, larger than 256 MiB or malformed.
    pub fn open(path: &Path) -> Result<Self> {
        let real = path.canonicalize().map_err(|e| Error::io("read", path, e))?;
        let bytes = read_capped(&real, path, LARGEST_FILE)?;
        Self::load(None, path, bytes.map_err(|reason| Self::fault(path, reason))?)
    }

    /// The tokenizer of a model, run by the directory's workers.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn of(directory: &ModelDirectory) -> Result<Self> {
        Self::load(directory.text_workers(), &Self::file_of(directory)?.path, Self::bytes_of(directory)?)
    }

    /// The bytes of a model's `tokenizer.json`.
    ///
    /// # Errors
    /// When the file is missing, cannot be read, or is larger than 256 MiB.
    pub fn bytes_of(directory: &ModelDirectory) -> Result<Vec<u8>> {
        let sidecar = Self::file_of(directory)?;
        sidecar.read(LARGEST_FILE)?.map_err(|reason| Self::fault(&sidecar.path, reason))
    }

    fn file_of(directory: &ModelDirectory) -> Result<&Sidecar> {
        const NAME: &str = "tokenizer.json";
        let missing = || match directory.unread_tokenizer() {
            Some(reason) => Error::InputFile {
                path: directory.path().to_owned(),
                line: None,
                reason: reason.to_owned(),
                remedy: "give the Hugging Face directory of the model".into(),
            },
            None => Self::fault(&directory.path().join(NAME), "is missing".into()),
        };
        directory.sidecar(NAME).ok_or_else(missing)
    }

    /// The same from bytes, run in this process; `path` is for messages.
    ///
    /// # Errors
    /// When they are malformed.
    pub fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self> {
        Self::load(None, path, bytes.to_vec())
    }

    /// The same, run by workers, or without them in this process.
    ///
    /// # Errors
    /// When the bytes are malformed, or no worker can be had.
    pub fn load(workers: Option<&dyn TextWorkers>, path: &Path, bytes: Vec<u8>) -> Result<Self> {
        let loadable = Loadable { path: path.to_owned(), content: Content::Tokenizer(bytes) };
        let worker = workers.unwrap_or(&InProcess).load(loadable)?;
        Ok(Self { worker, path: path.to_owned() })
    }

    /// The file it came from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tokens of a text, with the special tokens (such as one at the start) that the tokenizer
    /// itself adds.
    ///
    /// # Errors
    /// When the tokenizer fails on the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.encode_one(text, true, false)?.ids)
    }

    /// [`encode`](Self::encode) of each text by itself.
    ///
    /// # Errors
    /// When the tokenizer fails on one of them.
    pub fn encode_all(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>> {
        Ok(self.encode_batches(texts, true, false)?.into_iter().map(|encoded| encoded.ids).collect())
    }

    /// The same, each token with the bytes of the text that it stands for: none, for one that the
    /// tokenizer adds.
    ///
    /// # Errors
    /// When the tokenizer fails on the text.
    pub fn encode_with_places(&self, text: &str) -> Result<PlacedTokens> {
        Ok(placed(self.encode_one(text, true, true)?))
    }

    /// [`encode_with_places`](Self::encode_with_places) of each text by itself.
    ///
    /// # Errors
    /// When the tokenizer fails on one of them.
    pub fn encode_all_with_places(&self, texts: &[&str]) -> Result<Vec<PlacedTokens>> {
        Ok(self.encode_batches(texts, true, true)?.into_iter().map(placed).collect())
    }

    /// The tokens of a text that holds its special tokens already, each with the bytes of the text that
    /// it stands for.
    ///
    /// # Errors
    /// When the tokenizer fails on the text.
    pub fn encode_rendered(&self, text: &str) -> Result<PlacedTokens> {
        Ok(placed(self.encode_one(text, false, true)?))
    }

    /// [`encode_rendered`](Self::encode_rendered) of each text by itself.
    ///
    /// # Errors
    /// When the tokenizer fails on one of them.
    pub fn encode_all_rendered(&self, texts: &[&str]) -> Result<Vec<PlacedTokens>> {
        Ok(self.encode_batches(texts, false, true)?.into_iter().map(placed).collect())
    }

    fn encode_one(&self, text: &str, special: bool, places: bool) -> Result<Encoded> {
        let encoded = self.encode_batches(&[text], special, places)?;
        encoded.into_iter().next().ok_or_else(|| self.unexpected())
    }

    fn encode_batches(&self, texts: &[&str], special: bool, places: bool) -> Result<Vec<Encoded>> {
        let mut all = Vec::with_capacity(texts.len());
        let mut rest = texts;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |text: &&&str| {
                bytes += text.len();
                bytes <= BYTES_AT_ONCE
            };
            let some = rest.iter().take(TEXTS_AT_ONCE).take_while(fits).count().max(1);
            let (batch, after) = rest.split_at(some);
            match self.worker.ask(&Question::Encode { texts: batch.to_vec(), special, places })? {
                Answer::Encoded(encoded) => all.extend(encoded),
                _ => return Err(self.unexpected()),
            }
            rest = after;
        }
        Ok(all)
    }

    /// The text of tokens, without special ones.
    ///
    /// # Errors
    /// When the tokenizer fails on them.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let [text] = self.decode_each([tokens])?;
        Ok(text)
    }

    /// [`decode`](Self::decode) of several lists of tokens.
    ///
    /// # Errors
    /// When the tokenizer fails on one of them.
    pub fn decode_each<const N: usize>(&self, lists: [&[u32]; N]) -> Result<[String; N]> {
        let tokens = lists.into_iter().map(Cow::Borrowed).collect();
        match self.worker.ask(&Question::Decode { tokens })? {
            Answer::Decoded(texts) => texts.try_into().map_err(|_| self.unexpected()),
            _ => Err(self.unexpected()),
        }
    }

    /// The largest number of a token, special ones among them.
    ///
    /// # Errors
    /// When the worker fails.
    pub fn largest_token(&self) -> Result<Option<u32>> {
        match self.worker.ask(&Question::LargestToken)? {
            Answer::LargestToken(token) => Ok(token),
            _ => Err(self.unexpected()),
        }
    }

    /// The number of a token, if the vocabulary has it.
    ///
    /// # Errors
    /// When the worker fails.
    pub fn token_id(&self, token: &str) -> Result<Option<u32>> {
        match self.worker.ask(&Question::TokenId(token))? {
            Answer::TokenId(token) => Ok(token),
            _ => Err(self.unexpected()),
        }
    }

    fn unexpected(&self) -> Error {
        Error::Internal(format!(
            "the worker of {} gave an answer that does not match the request",
            self.path.display()
        ))
    }

    fn fault(path: &Path, reason: String) -> Error {
        Error::Tokenizer { path: path.to_owned(), reason }
    }
}

/// Tokens with their places.
fn placed(Encoded { ids, places }: Encoded) -> Vec<(u32, Range<usize>)> {
    let places = places.into_iter().map(|[from, to]| from as usize..to as usize);
    ids.into_iter().zip(places).collect()
}
