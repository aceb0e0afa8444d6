//! A Hugging Face model directory.
//!
//! Only data is read from it. Scripts in the directory are neither run nor copied.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::input_file::{
    Lookup, PLACEHOLDER_BYTES, Placeholder, Root, open_regular, placeholder, read_capped,
};
use super::names::printable;
use super::{ConfigFields, ShardedCheckpoint, WeightFiles, strict_json};
use crate::worker::TextWorkers;
use crate::{Error, Result};

pub(crate) const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Files that accompany a model and contain neither weights nor code.
const SIDECARS: [&str; 15] = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tekken.json",
    TOKENIZER,
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
];
/// Name prefixes of legal texts that must accompany a model.
const LEGAL: [&str; 3] = ["LICENSE", "NOTICE", "USE_POLICY"];

/// A model directory: its configuration, its weights, and the files to copy with them.
///
/// ```
/// use quant_formats::TensorSource;
/// use quant_formats::checkpoint::ModelDirectory;
/// # let temporary = tempfile::tempdir().unwrap();
/// # let path = temporary.path();
/// # std::fs::write(path.join("config.json"), r#"{ "hidden_size": 2 }"#).unwrap();
/// # let header = br#"{"norm.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}    "#;
/// # let bytes = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 8]].concat();
/// # std::fs::write(path.join("model.safetensors"), bytes).unwrap();
///
/// // Opening a directory reads and checks the headers, but no tensor data.
/// let directory = ModelDirectory::open(path)?;
/// assert_eq!(directory.fields().require_usize("hidden_size")?, 2);
/// assert_eq!(directory.source().read("norm.weight")?.len(), 8);
/// # Ok::<(), quant_formats::Error>(())
/// ```
#[derive(Debug)]
pub struct ModelDirectory {
    path: PathBuf,
    config: Map<String, Value>,
    config_path: PathBuf,
    source: Arc<dyn WeightFiles>,
    sidecars: Vec<Sidecar>,
    warnings: Vec<String>,
    text_workers: Option<Arc<dyn TextWorkers>>,
    unread_tokenizer: Option<String>,
    rounded_to: Option<String>,
    description: Map<String, Value>,
}

/// A file that accompanies the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sidecar {
    /// The file's path in the model directory.
    pub path: PathBuf,
    /// The file's path after resolving links, which a Hugging Face cache uses.
    pub real: PathBuf,
    /// The file's contents, if a single-file model contains it.
    pub contents: Option<Arc<[u8]>>,
}

impl Sidecar {
    /// Reads the file's bytes, or returns the reason why its size is not accepted.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be read.
    pub fn read(&self, cap: u64) -> Result<Result<Vec<u8>, String>> {
        match &self.contents {
            None => read_capped(&self.real, &self.path, cap),
            Some(contents) if contents.len() as u64 > cap => {
                Ok(Err(format!("has {} bytes; the limit is {cap}", contents.len())))
            }
            Some(contents) => Ok(Ok(contents.to_vec())),
        }
    }

    /// Returns the file's length in bytes.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be opened.
    pub fn bytes(&self) -> Result<u64> {
        match &self.contents {
            Some(contents) => Ok(contents.len() as u64),
            None => {
                let metadata = std::fs::File::open(&self.real).and_then(|file| file.metadata());
                Ok(metadata.map_err(|e| Error::io("read", &self.path, e))?.len())
            }
        }
    }
}

impl ModelDirectory {
    /// Opens a model directory and checks its configuration file and all safetensors headers.
    ///
    /// # Errors
    /// - [`Error::NoCheckpoint`], [`Error::PickleOnly`]: there is no supported model.
    /// - [`Error::Config`]: `config.json` is missing or unusable.
    /// - The errors of [`ShardedCheckpoint::open`].
    pub fn open(path: &Path) -> Result<ModelDirectory> {
        let root = Root::open(path)?;
        // Weights first, so that a directory of pickle files is reported as such.
        let source = ShardedCheckpoint::open_in(&root)?;
        let config_path = root.join(CONFIG);
        let config = read_config(&root, &config_path)?;
        let mut warnings = source.warnings().to_vec();
        let sidecars = find_sidecars(&root, &mut warnings)?;
        if config.contains_key("auto_map") {
            warnings.push(format!("{CONFIG}: `auto_map` is ignored, because code from a model is never run"));
        }
        let source: Arc<dyn WeightFiles> = Arc::new(source);
        Ok(Self {
            path: path.to_owned(),
            config,
            config_path,
            source,
            sidecars,
            warnings,
            text_workers: None,
            unread_tokenizer: None,
            rounded_to: None,
            description: Map::new(),
        })
    }

    /// Creates a model from the single file at `path`, which holds all of it.
    pub fn in_memory(
        path: &Path,
        config: Map<String, Value>,
        source: Arc<dyn WeightFiles>,
        sidecars: Vec<Sidecar>,
        warnings: Vec<String>,
    ) -> Self {
        let (path, config_path) = (path.to_owned(), path.to_owned());
        Self {
            path,
            config,
            config_path,
            source,
            sidecars,
            warnings,
            text_workers: None,
            unread_tokenizer: None,
            rounded_to: None,
            description: Map::new(),
        }
    }

    /// Records the block types from which the model's floats were decoded.
    pub fn with_rounded(self, types: String) -> Self {
        Self { rounded_to: Some(types), ..self }
    }

    /// The block types from which the model's floats were decoded, if the model was already quantized.
    pub fn rounded_to(&self) -> Option<&str> {
        self.rounded_to.as_deref()
    }

    /// Records what the model's file says about the model, by the keys of its format.
    pub fn with_description(self, description: Map<String, Value>) -> Self {
        Self { description, ..self }
    }

    /// What a single-file model says about the model itself, such as its name and license, by the keys of its format.
    /// Empty for a directory.
    pub fn description(&self) -> &Map<String, Value> {
        &self.description
    }

    /// Records the reason why the tokenizer in the model's file is not supported.
    pub fn without_tokenizer(self, reason: String) -> Self {
        Self { unread_tokenizer: Some(reason), ..self }
    }

    /// The reason why the tokenizer in a single-file model is not supported, or `None` if it is.
    pub fn unread_tokenizer(&self) -> Option<&str> {
        self.unread_tokenizer.as_deref()
    }

    /// Runs the model's tokenizer and chat template in these workers instead of in this process.
    pub fn with_text_workers(self, workers: Arc<dyn TextWorkers>) -> Self {
        Self { text_workers: Some(workers), ..self }
    }

    /// The workers for the model's tokenizer and chat template; `None` if they run in this process.
    pub fn text_workers(&self) -> Option<&dyn TextWorkers> {
        self.text_workers.as_deref()
    }

    /// The directory as the user gave it, or the path of a single-file model.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The configuration, with keys in file order.
    pub fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// The path of `config.json`, or of a single-file model.
    pub fn config_path(&self) -> &Path {
        &self.config_path
    }

    /// Typed access to the configuration.
    pub fn fields(&self) -> ConfigFields<'_> {
        ConfigFields::new(&self.config_path, &self.config)
    }

    /// The weights.
    pub fn source(&self) -> &Arc<dyn WeightFiles> {
        &self.source
    }

    /// The path of `tokenizer.json`, if it is among the [accompanying files](Self::sidecar_files).
    pub fn tokenizer_path(&self) -> Option<PathBuf> {
        self.sidecar(TOKENIZER).map(|s| s.path.clone())
    }

    /// Returns the [accompanying file](Self::sidecar_files) with this name.
    pub fn sidecar(&self, name: &str) -> Option<&Sidecar> {
        self.sidecars.iter().find(|s| s.path.file_name() == Some(OsStr::new(name)))
    }

    /// Files to copy to a converted model, sorted by name, such as tokenizer, chat template and license; never code or
    /// weights. Files that are left out give a [warning](Self::warnings).
    pub fn sidecar_files(&self) -> &[Sidecar] {
        &self.sidecars
    }

    /// Problems that do not make the directory unreadable, one line each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

fn read_config(root: &Root, path: &Path) -> Result<Map<String, Value>> {
    let fault = |reason: String, remedy: Option<&str>| Error::Config {
        path: path.to_owned(),
        field: CONFIG.into(),
        reason,
        remedy: remedy.map(Into::into),
    };
    let broken = |reason: String| fault(reason, None);
    const DOWNLOAD: &str = "download config.json from where the weights come from, at the same revision, into the \
        same directory";
    let real = match root.lookup(CONFIG)? {
        Lookup::File(real) => real,
        Lookup::Absent => return Err(fault("is missing".into(), Some(DOWNLOAD))),
        Lookup::Dangling => {
            return Err(fault("is a broken link; the download is incomplete".into(), Some(DOWNLOAD)));
        }
        Lookup::Refused(reason) => return Err(broken(reason)),
    };
    let bytes = read_capped(&real, path, MAX_CONFIG_BYTES)?.map_err(broken)?;
    if let Some(found) = placeholder(&bytes) {
        return Err(fault(found.to_string(), Some(found.remedy())));
    }
    match strict_json::parse(&bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(broken("must contain one JSON object".into())),
        Err(reason) => Err(broken(format!("is not valid JSON: {reason}"))),
    }
}

fn find_sidecars(root: &Root, warnings: &mut Vec<String>) -> Result<Vec<Sidecar>> {
    let mut found = Vec::new();
    let mut folded = BTreeSet::new();
    for name in root.entries()?.iter().filter(|n| is_sidecar(n)) {
        match root.lookup(name)? {
            // On a file system that ignores case, the copies would collide.
            Lookup::File(_) if !folded.insert(name.to_lowercase()) => warnings.push(format!(
                "{} is not copied, because its name differs from that of another file only in case",
                printable(name)
            )),
            Lookup::File(real) => match placeholder_at(&real, &root.join(name), name)? {
                Some(what) => warnings.push(format!("{} {what}; it is not copied", printable(name))),
                None => found.push(Sidecar { path: root.join(name), real, contents: None }),
            },
            Lookup::Absent => {}
            Lookup::Dangling => {
                warnings.push(format!("{} is a broken link; it is not copied", printable(name)))
            }
            Lookup::Refused(reason) => {
                warnings.push(format!("{} {reason}; it is not copied", printable(name)))
            }
        }
    }
    Ok(found)
}

/// Returns what lies in place of a file. The tokenizer is checked where it is read.
fn placeholder_at(real: &Path, shown: &Path, name: &str) -> Result<Option<Placeholder>> {
    if name == TOKENIZER {
        return Ok(None);
    }
    let mut start = Vec::new();
    let read = open_regular(real, shown)?.take(PLACEHOLDER_BYTES as u64).read_to_end(&mut start);
    read.map_err(|e| Error::io("read", shown, e))?;
    // A license can be an HTML page.
    let is_page = |what: &Placeholder| *what == Placeholder::Page && !name.ends_with(".json");
    Ok(placeholder(&start).filter(|what| !is_page(what)))
}

/// Whether a file of this name accompanies a model.
pub(crate) fn is_sidecar(name: &str) -> bool {
    if SIDECARS.contains(&name) {
        return true;
    }
    if name.chars().any(char::is_control) || !LEGAL.iter().any(|l| name.starts_with(l)) {
        return false;
    }
    // `LICENSE`, `LICENSE.txt` and `LICENSE-APACHE-2.0`, but not `LICENSE.py`.
    match Path::new(name).extension().and_then(OsStr::to_str) {
        None => true,
        Some(e) => {
            matches!(e, "txt" | "md" | "rst" | "pdf" | "html") || e.bytes().all(|b| b.is_ascii_digit())
        }
    }
}
