//! `tokenizer.json`, guarded: it comes with the model and is as hostile as its weights.

use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

use crate::checkpoint::ModelDirectory;
use crate::{Error, Result};

/// Larger tokenizer files are refused before they are parsed.
const LARGEST_FILE: u64 = 256 << 20;

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

/// A model's tokenizer.
#[derive(Debug)]
pub struct TextTokenizer {
    tokenizer: Tokenizer,
    path: PathBuf,
}

impl TextTokenizer {
    /// Reads a `tokenizer.json`. Truncation and padding that it may ask for are switched off:
    /// evaluation must see the whole text.
    ///
    /// # Errors
    /// When the file is missing, larger than 256 MiB or malformed.
    pub fn open(path: &Path) -> Result<Self> {
        let size = std::fs::metadata(path).map_err(|e| Error::io("read", path, e))?.len();
        if size > LARGEST_FILE {
            return Err(Self::fault(path, format!("has {size} bytes; at most {LARGEST_FILE} are read")));
        }
        Self::from_bytes(path, &std::fs::read(path).map_err(|e| Error::io("read", path, e))?)
    }

    /// The tokenizer of a model.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn of(directory: &ModelDirectory) -> Result<Self> {
        const NAME: &str = "tokenizer.json";
        let Some(sidecar) = directory.sidecar(NAME) else {
            return Err(Self::fault(&directory.path().join(NAME), "is missing".into()));
        };
        match &sidecar.contents {
            None => Self::open(&sidecar.path),
            Some(contents) => Self::from_bytes(&sidecar.path, contents),
        }
    }

    /// The same from bytes; `path` is for messages.
    ///
    /// # Errors
    /// When they are malformed.
    pub fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self> {
        let parsed = Self::guarded(path, || Tokenizer::from_bytes(bytes))?;
        let mut tokenizer = parsed.map_err(|e| Self::fault(path, format!("is not a tokenizer: {e}")))?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| Self::fault(path, e.to_string()))?;
        Ok(Self { tokenizer, path: path.to_owned() })
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
        let encoded = Self::guarded(&self.path, || self.tokenizer.encode_fast(text, true))?;
        let encoding = encoded.map_err(|e| Self::fault(&self.path, format!("fails on the text: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The same, each token with the bytes of the text that it stands for: none, for one that the
    /// tokenizer adds.
    ///
    /// # Errors
    /// When the tokenizer fails on the text.
    pub fn encode_with_places(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        self.encode_placed(text, true)
    }

    /// The tokens of a text that holds its special tokens already, each with the bytes of the text that
    /// it stands for.
    ///
    /// # Errors
    /// When the tokenizer fails on the text.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        self.encode_placed(text, false)
    }

    fn encode_placed(&self, text: &str, special: bool) -> Result<Vec<(u32, Range<usize>)>> {
        let encoded = Self::guarded(&self.path, || self.tokenizer.encode(text, special))?;
        let encoding = encoded.map_err(|e| Self::fault(&self.path, format!("fails on the text: {e}")))?;
        let places = encoding.get_offsets().iter().map(|&(from, to)| from..to);
        Ok(encoding.get_ids().iter().copied().zip(places).collect())
    }

    /// The text of tokens, without special ones.
    ///
    /// # Errors
    /// When the tokenizer fails on them.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let decoded = Self::guarded(&self.path, || self.tokenizer.decode(tokens, true))?;
        decoded.map_err(|e| Self::fault(&self.path, format!("fails on tokens: {e}")))
    }

    /// The largest number of a token, special ones among them.
    pub fn largest_token(&self) -> Option<u32> {
        self.tokenizer.get_vocab(true).into_values().max()
    }

    /// The number of a token, if the vocabulary has it.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// Crafted vocabularies make the tokenizers crate panic; that must not end the process.
    fn guarded<T>(path: &Path, work: impl FnOnce() -> T) -> Result<T> {
        guard_panics(work).ok_or_else(|| Self::fault(path, "makes the tokenizer library panic".into()))
    }

    fn fault(path: &Path, reason: String) -> Error {
        Error::Tokenizer { path: path.to_owned(), reason }
    }
}
