//! `tokenizer.json`, accessed through a worker, because it comes with the model and is untrusted.

use std::borrow::Cow;
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use super::{InProcess, vocabulary};
use crate::checkpoint::{ModelDirectory, Sidecar, placeholder, read_capped};
use crate::worker::{Answer, Content, Encoded, Loadable, Question, TextWorker, TextWorkers};
use crate::{Error, Result};

/// The maximum size of a tokenizer file, checked before it is parsed.
const MAX_FILE_BYTES: u64 = 256 << 20;
/// Texts are sent in batches of at most this many texts and bytes; a longer text is sent alone.
const TEXTS_PER_BATCH: usize = 1024;
const BYTES_PER_BATCH: usize = 8 << 20;

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread is inside [`guard_panics`]. A panic hook can then print nothing, because the panic will
/// be reported as an error.
pub fn panic_is_handled() -> bool {
    GUARDED.get()
}

/// Runs `work`, which may call libraries that panic on crafted files. Returns `None` if it panics.
pub fn guard_panics<T>(work: impl FnOnce() -> T) -> Option<T> {
    let outer = GUARDED.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(outer);
    outcome.ok()
}

/// The tokens of a text, each with its byte range in the text.
pub type PlacedTokens = Vec<(u32, Range<usize>)>;

/// A model's tokenizer.
#[derive(Debug)]
pub struct TextTokenizer {
    worker: Box<dyn TextWorker>,
    path: PathBuf,
}

impl TextTokenizer {
    /// Reads a `tokenizer.json`, which runs in this process. Truncation and padding requested by the file are disabled.
    ///
    /// # Errors
    /// When the file is missing, larger than 256 MiB or malformed.
    pub fn open(path: &Path) -> Result<Self> {
        let real = path.canonicalize().map_err(|e| Error::io("read", path, e))?;
        let bytes = read_capped(&real, path, MAX_FILE_BYTES)?;
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
        sidecar.read(MAX_FILE_BYTES)?.map_err(|reason| Self::fault(&sidecar.path, reason))
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

    /// Checks the vocabulary of a model's `tokenizer.json`, if there is one, without loading it.
    ///
    /// # Errors
    /// When the file is not JSON, or its vocabulary is empty or has two tokens of one number; as
    /// [`bytes_of`](Self::bytes_of).
    pub fn check(directory: &ModelDirectory) -> Result<()> {
        let Ok(sidecar) = Self::file_of(directory) else { return Ok(()) };
        Self::check_bytes(&sidecar.path, &Self::bytes_of(directory)?)
    }

    fn check_bytes(path: &Path, bytes: &[u8]) -> Result<()> {
        let reason = placeholder(bytes).map(|found| found.to_string()).or_else(|| vocabulary::fault(bytes));
        reason.map_or(Ok(()), |reason| Err(Self::fault(path, reason)))
    }

    /// Reads a tokenizer from bytes and runs it in this process; `path` is for messages.
    ///
    /// # Errors
    /// When the bytes are malformed.
    pub fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self> {
        Self::load(None, path, bytes.to_vec())
    }

    /// Reads a tokenizer from bytes and runs it with `workers`, or in this process if they are `None`.
    ///
    /// # Errors
    /// When the bytes are malformed, or no worker can be started.
    pub fn load(workers: Option<&dyn TextWorkers>, path: &Path, bytes: Vec<u8>) -> Result<Self> {
        Self::check_bytes(path, &bytes)?;
        let loadable = Loadable { path: path.to_owned(), content: Content::Tokenizer(bytes) };
        let worker = workers.unwrap_or(&InProcess).load(loadable)?;
        Ok(Self { worker, path: path.to_owned() })
    }

    /// The path of the tokenizer file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the tokens of a text, including special tokens that the tokenizer adds.
    ///
    /// # Errors
    /// When the tokenizer fails on the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.encode_one(text, true, false)?.ids)
    }

    /// [`encode`](Self::encode) for several texts.
    ///
    /// # Errors
    /// When the tokenizer fails on one of them.
    pub fn encode_all(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>> {
        Ok(self.encode_batches(texts, true, false)?.into_iter().map(|encoded| encoded.ids).collect())
    }

    /// [`encode_all`](Self::encode_all), with the byte range of each token in its text. A token that the tokenizer adds
    /// has an empty range.
    ///
    /// # Errors
    /// When the tokenizer fails on one of them.
    pub fn encode_all_with_places(&self, texts: &[&str]) -> Result<Vec<PlacedTokens>> {
        Ok(self.encode_batches(texts, true, true)?.into_iter().map(placed).collect())
    }

    /// Returns the tokens of a text that already contains its special tokens, each with its byte range in the text.
    ///
    /// # Errors
    /// When the tokenizer fails on the text.
    pub fn encode_rendered(&self, text: &str) -> Result<PlacedTokens> {
        Ok(placed(self.encode_one(text, false, true)?))
    }

    /// [`encode_rendered`](Self::encode_rendered) for several texts.
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
                bytes <= BYTES_PER_BATCH
            };
            let some = rest.iter().take(TEXTS_PER_BATCH).take_while(fits).count().max(1);
            let (batch, after) = rest.split_at(some);
            match self.worker.ask(&Question::Encode { texts: batch.to_vec(), special, places })? {
                Answer::Encoded(encoded) => all.extend(encoded),
                _ => return Err(self.unexpected()),
            }
            rest = after;
        }
        Ok(all)
    }

    /// Returns the text of tokens, without special ones.
    ///
    /// # Errors
    /// When the tokenizer fails on them.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let [text] = self.decode_each([tokens])?;
        Ok(text)
    }

    /// [`decode`](Self::decode) for several lists of tokens.
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

    /// The largest token ID, including special tokens; `None` if the vocabulary is empty.
    ///
    /// # Errors
    /// When the worker fails.
    pub fn largest_token(&self) -> Result<Option<u32>> {
        match self.worker.ask(&Question::LargestToken)? {
            Answer::LargestToken(token) => Ok(token),
            _ => Err(self.unexpected()),
        }
    }

    /// The ID of a token, if it is in the vocabulary.
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
            "the worker process of {} sent a response that does not match the request",
            self.path.display()
        ))
    }

    fn fault(path: &Path, reason: String) -> Error {
        Error::Tokenizer { path: path.to_owned(), reason }
    }
}

fn placed(Encoded { ids, places }: Encoded) -> Vec<(u32, Range<usize>)> {
    let places = places.into_iter().map(|[from, to]| from as usize..to as usize);
    ids.into_iter().zip(places).collect()
}
