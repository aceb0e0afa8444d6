//! `tokenizer_config.json`: information on a model's special tokens that `tokenizer.json` does not contain.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::checkpoint::{ModelDirectory, parse_strictly, placeholder};
use crate::{Error, Result};

pub(super) const CONFIG: &str = "tokenizer_config.json";
/// The maximum size of the file. Files that list thousands of special tokens fit.
const MAX_FILE_BYTES: u64 = 64 << 20;
const TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A model's tokenizer settings; empty if it has none.
#[derive(Debug)]
pub struct TokenizerSettings {
    fields: Map<String, Value>,
    path: PathBuf,
}

impl TokenizerSettings {
    /// Reads `tokenizer_config.json` next to a model, if the file exists.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when it is larger than 64 MiB or not a JSON object.
    pub fn open(directory: &ModelDirectory) -> Result<Self> {
        let path = directory.path().join(CONFIG);
        let Some(sidecar) = directory.sidecar(CONFIG) else { return Ok(Self { fields: Map::new(), path }) };
        let fault = |reason| Error::Tokenizer { path: path.clone(), reason };
        let bytes = sidecar.read(MAX_FILE_BYTES)?.map_err(fault)?;
        if let Some(found) = placeholder(&bytes) {
            return Err(fault(found.to_string()));
        }
        match parse_strictly(&bytes) {
            Ok(Value::Object(fields)) => Ok(Self { fields, path }),
            Ok(_) => Err(fault("must contain one JSON object".into())),
            Err(reason) => Err(fault(format!("is not valid JSON: {reason}"))),
        }
    }

    /// The path of the file, whether or not it exists.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All settings.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.fields
    }

    /// The special tokens that are set, by name (`bos_token` …). Each is a string, or an object with a `content`.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when one is neither.
    pub fn special_tokens(&self) -> Result<Vec<(&'static str, String)>> {
        let mut tokens = Vec::new();
        for name in TOKENS {
            let Some(value) = self.fields.get(name).filter(|v| !v.is_null()) else { continue };
            match value.as_str().or_else(|| value.get("content").and_then(Value::as_str)) {
                Some(token) => tokens.push((name, token.to_owned())),
                None => {
                    let reason = format!("`{name}` is neither a string nor an object with `content`");
                    return Err(Error::Tokenizer { path: self.path.clone(), reason });
                }
            }
        }
        Ok(tokens)
    }

    /// Whether a BOS token is added at the start of every text (`add_bos_token`), if the settings specify it.
    pub fn adds_bos(&self) -> Option<bool> {
        self.fields.get("add_bos_token").and_then(Value::as_bool)
    }
}
