//! The tensors of a model directory, in one file or several.
//!
//! Every header is read and checked when the checkpoint is opened; data is read on demand. Files stay open, so that the
//! data comes from the files that were checked.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::header::{Header, Located};
use super::input_file::{Lookup, Root, listed, open_regular, read_capped, read_exact_at};
use super::names::printable;
use super::shard_index::{MAX_INDEX_BYTES, ShardIndex};
use super::{TensorInfo, TensorSource, WeightFiles};
use crate::{Error, Result};

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// File extensions of pickle files, which can execute code when they are read.
const PICKLES: [&str; 4] = [".bin", ".pt", ".pth", ".ckpt"];
/// The maximum number of names in a message.
const MAX_LISTED: usize = 256;

/// The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.
#[derive(Debug)]
pub struct ShardedCheckpoint {
    directory: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, ShardTensor>,
    warnings: Vec<String>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    file: File,
    bytes: u64,
}

#[derive(Debug)]
struct ShardTensor {
    shard: usize,
    located: Located,
}

impl ShardedCheckpoint {
    /// Opens the checkpoint of a model directory and checks every header.
    ///
    /// # Errors
    /// - [`Error::NoCheckpoint`] or [`Error::PickleOnly`]: there is no supported checkpoint.
    /// - [`Error::Index`]: the index is malformed, names a file outside the directory, or is inconsistent
    ///   with the shards; all missing shards are listed.
    /// - [`Error::Safetensors`]: a shard violates a rule of the format, or is truncated.
    /// - [`Error::Io`]: a file cannot be read.
    pub fn open(directory: &Path) -> Result<Self> {
        Self::open_in(&Root::open(directory)?)
    }

    /// Opens one safetensors file with any name, and checks its header.
    ///
    /// # Errors
    /// [`Error::Safetensors`] when it violates a rule of the format; [`Error::Io`] when it cannot be read.
    pub fn open_file(path: &Path) -> Result<Self> {
        let (shard, header) = Shard::open(path.to_owned(), path)?;
        let tensors = header
            .tensors
            .into_iter()
            .map(|(name, located)| (name, ShardTensor { shard: 0, located }))
            .collect();
        let directory = path.parent().unwrap_or(Path::new("")).to_owned();
        Ok(Self { directory, shards: vec![shard], tensors, warnings: Vec::new() })
    }

    pub(crate) fn open_in(root: &Root) -> Result<Self> {
        let single = weight_file(root, SINGLE)?;
        let Some(index) = weight_file(root, INDEX)? else {
            return match single {
                Some(real) => Self::open_single(root, &real),
                None => Err(nothing_to_read(root.path(), &root.entries()?)),
            };
        };
        Self::open_sharded(root, &index, single.as_deref())
    }

    fn open_single(root: &Root, real: &Path) -> Result<Self> {
        let (shard, header) = Shard::open(root.join(SINGLE), real)?;
        if header.tensors.is_empty() {
            let reason = format!("{SINGLE} contains no tensors");
            return Err(Error::NoCheckpoint { path: root.path().to_owned(), reason, remedy: None });
        }
        let tensors = header
            .tensors
            .into_iter()
            .map(|(name, located)| (name, ShardTensor { shard: 0, located }))
            .collect();
        let warnings = stray_weights(root, &[SINGLE.to_owned()])?;
        Ok(Self { directory: root.path().to_owned(), shards: vec![shard], tensors, warnings })
    }

    fn open_sharded(root: &Root, index_file: &Path, single: Option<&Path>) -> Result<Self> {
        let index_path = root.join(INDEX);
        let broken = |reason: String| Error::Index { path: index_path.clone(), reason };
        let bytes = read_capped(index_file, &index_path, MAX_INDEX_BYTES)?.map_err(broken)?;
        let index = ShardIndex::parse(&bytes).map_err(broken)?;
        drop(bytes);

        let files = find_shards(root, &index.shards).map_err(|fault| match fault {
            ShardFault::Other(error) => error,
            ShardFault::Index(reason) => broken(reason),
        })?;
        let mut shards = Vec::with_capacity(files.len());
        let mut found: BTreeMap<String, ShardTensor> = BTreeMap::new();
        for (position, (name, real)) in index.shards.iter().zip(&files).enumerate() {
            let (shard, header) = Shard::open(root.join(name), real)?;
            shards.push(shard);
            for (tensor, located) in header.tensors {
                match found.entry(tensor) {
                    Entry::Vacant(place) => {
                        place.insert(ShardTensor { shard: position, located });
                    }
                    Entry::Occupied(other) => {
                        let first = &index.shards[other.get().shard];
                        return Err(broken(format!(
                            "tensor `{}` is in both {first} and {name}",
                            other.key()
                        )));
                    }
                }
            }
        }

        let mut warnings = Vec::new();
        let tensors = match_index(&index, found, &mut warnings).map_err(broken)?;
        let total: u64 = tensors.values().map(|p| p.located.info.byte_len()).sum();
        let stated = match &index.total_size {
            None => None,
            Some(Ok(size)) => (*size != total).then(|| size.to_string()),
            Some(Err(other)) => Some(other.clone()),
        };
        if let Some(stated) = stated {
            warnings.push(format!(
                "{INDEX}: `metadata.total_size` is {stated}, but the tensors have {total} bytes in total"
            ));
        }
        let mut known = index.shards;
        if let Some(real) = single.filter(|_| !known.iter().any(|s| s == SINGLE)) {
            compare_single(root, real, &tensors).map_err(|e| match e {
                ShardFault::Other(error) => error,
                ShardFault::Index(reason) => broken(reason),
            })?;
            warnings.push(format!("{SINGLE} is ignored; the shards listed in {INDEX} are read instead"));
            known.push(SINGLE.to_owned());
        }
        warnings.extend(stray_weights(root, &known)?);
        Ok(Self { directory: root.path().to_owned(), shards, tensors, warnings })
    }

    /// Problems that do not make the checkpoint unreadable, one line each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The files that hold the tensors, in the order of their names.
    pub fn shard_paths(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|s| s.path.as_path())
    }

    /// Total bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|p| p.located.info.byte_len()).sum()
    }
}

impl WeightFiles for ShardedCheckpoint {
    fn file_bytes(&self) -> u64 {
        self.shards.iter().map(|s| s.bytes).sum()
    }

    fn tensor_bytes(&self) -> u64 {
        self.total_bytes()
    }

    fn files(&self) -> Vec<PathBuf> {
        self.shard_paths().map(Path::to_owned).collect()
    }
}

impl TensorSource for ShardedCheckpoint {
    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|p| &p.located.info)
    }

    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let Some(place) = self.tensors.get(name) else {
            return Err(Error::MissingTensor { path: self.directory.clone(), tensor: name.to_owned() });
        };
        check_range(name, place.located.info.byte_len(), offset, buffer.len())?;
        let shard = &self.shards[place.shard];
        read_exact_at(&shard.file, &shard.path, place.located.offset + offset, buffer)
    }

    fn location(&self, name: &str) -> PathBuf {
        let shard = self.tensors.get(name).map(|p| &self.shards[p.shard]);
        shard.map_or_else(|| self.directory.clone(), |s| s.path.clone())
    }
}

impl Shard {
    fn open(path: PathBuf, real: &Path) -> Result<(Self, Header)> {
        let file = open_regular(real, &path)?;
        let header = Header::read(&file, &path)?;
        let bytes = file.metadata().map_err(|e| Error::io("read", &path, e))?.len();
        Ok((Self { path, file, bytes }, header))
    }
}

/// Fails when a range exceeds its tensor: an error of the caller, not of the file.
pub(crate) fn check_range(name: &str, tensor_bytes: u64, offset: u64, len: usize) -> Result<()> {
    match offset.checked_add(len as u64) {
        Some(end) if end <= tensor_bytes => Ok(()),
        _ => Err(Error::Internal(format!(
            "{len} bytes at offset {offset} exceed tensor `{name}` of {tensor_bytes} bytes"
        ))),
    }
}

/// An error in the index, to which the caller adds the index's path, or any other error.
enum ShardFault {
    Index(String),
    Other(Error),
}

impl From<Error> for ShardFault {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// Returns the resolved path of one of the two files that a checkpoint can begin with; `None` if it does not exist.
pub(crate) fn weight_file(root: &Root, name: &str) -> Result<Option<PathBuf>> {
    let reason = match root.lookup(name)? {
        Lookup::File(real) => return Ok(Some(real)),
        Lookup::Absent => return Ok(None),
        Lookup::Dangling => incomplete_download(name),
        Lookup::Refused(reason) => format!("{name} {reason}"),
    };
    Err(Error::NoCheckpoint { path: root.path().to_owned(), reason, remedy: None })
}

fn incomplete_download(names: &str) -> String {
    format!("{names}: broken link; the download is incomplete: run `hf download` again")
}

fn find_shards(root: &Root, names: &[String]) -> Result<Vec<PathBuf>, ShardFault> {
    let mut files = Vec::with_capacity(names.len());
    let (mut absent, mut dangling) = (Vec::new(), Vec::new());
    for name in names {
        match root.lookup(name)? {
            Lookup::File(real) => files.push(real),
            Lookup::Absent => absent.push(name.as_str()),
            Lookup::Dangling => dangling.push(name.as_str()),
            Lookup::Refused(reason) => return Err(ShardFault::Index(format!("the shard {name} {reason}"))),
        }
    }
    let mut reasons = Vec::new();
    if !absent.is_empty() {
        let (count, list) = (absent.len(), listed(absent, MAX_LISTED));
        reasons.push(format!("{count} of {} shards are missing: {list}", names.len()));
    }
    if !dangling.is_empty() {
        reasons.push(incomplete_download(&listed(dangling, MAX_LISTED)));
    }
    if reasons.is_empty() { Ok(files) } else { Err(ShardFault::Index(reasons.join("; "))) }
}

/// Keeps the tensors that the index names, each from the shard it names.
fn match_index(
    index: &ShardIndex,
    mut found: BTreeMap<String, ShardTensor>,
    warnings: &mut Vec<String>,
) -> Result<BTreeMap<String, ShardTensor>, String> {
    let mut tensors = BTreeMap::new();
    let mut missing = Vec::new();
    for (name, &shard) in &index.weight_map {
        let Some((name, place)) = found.remove_entry(name) else {
            missing.push(format!("`{name}` is not in {}", index.shards[shard]));
            continue;
        };
        if place.shard != shard {
            let (stated, real) = (&index.shards[shard], &index.shards[place.shard]);
            missing.push(format!("`{name}` is in {real}, but listed in {stated}"));
        }
        tensors.insert(name, place);
    }
    if !missing.is_empty() {
        return Err(format!("tensor {}", listed(missing.iter().map(String::as_str), MAX_LISTED)));
    }
    let mut extra: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
    for (name, place) in &found {
        extra.entry(place.shard).or_default().push(name);
    }
    for (shard, names) in extra {
        warnings.push(format!(
            "tensors in {} that are not in {INDEX} are ignored ({}): {}",
            index.shards[shard],
            names.len(),
            listed(names, 8)
        ));
    }
    Ok(tensors)
}

fn compare_single(
    root: &Root,
    real: &Path,
    tensors: &BTreeMap<String, ShardTensor>,
) -> Result<(), ShardFault> {
    let (_, header) = Shard::open(root.join(SINGLE), real)?;
    let mut differing: Vec<&str> = header
        .tensors
        .iter()
        .filter(|(name, located)| tensors.get(*name).is_none_or(|p| p.located.info != located.info))
        .map(|(name, _)| name.as_str())
        .collect();
    differing.extend(tensors.keys().filter(|n| !header.tensors.contains_key(*n)).map(String::as_str));
    if differing.is_empty() {
        return Ok(());
    }
    Err(ShardFault::Index(format!(
        "{SINGLE} also exists, but these tensors differ: {}; remove the wrong set of weights",
        listed(differing, 8)
    )))
}

/// Warns about weight files that are not part of the checkpoint.
fn stray_weights(root: &Root, known: &[String]) -> Result<Vec<String>> {
    let entries = root.entries()?;
    let stray: Vec<&str> = entries
        .iter()
        .filter(|e| e.ends_with(".safetensors") && !known.contains(e))
        .map(String::as_str)
        .collect();
    if stray.is_empty() {
        return Ok(Vec::new());
    }
    Ok(vec![format!("ignored, because they are not part of the checkpoint: {}", listed(stray, 8))])
}

pub(crate) fn nothing_to_read(path: &Path, entries: &[String]) -> Error {
    let path = path.to_owned();
    let other: Vec<&str> = entries
        .iter()
        .filter(|e| e.ends_with(".safetensors") || e.ends_with(".gguf"))
        .map(String::as_str)
        .collect();
    let adapter =
        entries.iter().find(|e| ["adapter_config.json", "adapter_model.safetensors"].contains(&e.as_str()));
    let is_pickle = |e: &&String| PICKLES.iter().any(|p| e.ends_with(p));
    let mut weights = other.iter().copied().chain(entries.iter().filter(is_pickle).map(String::as_str));
    if let (Some(adapter), true) = (adapter, weights.all(|e| e.starts_with("adapter_"))) {
        return Error::NoCheckpoint {
            path,
            reason: format!("it is a LoRA adapter ({adapter}) without its base model"),
            remedy: Some(
                "merge the adapter into its base model first: load both with peft, then call `merge_and_unload()` and \
                 `save_pretrained()`"
                    .into(),
            ),
        };
    }
    if !other.is_empty() {
        let reason =
            format!("it has neither {SINGLE} nor {INDEX}, only {}", listed(other.iter().copied(), 8));
        let remedy = match () {
            () if other.iter().any(|e| e.ends_with(".gguf")) => "give the path of the GGUF file".to_owned(),
            () if other.iter().any(|e| e.contains("-of-")) => format!(
                "download {INDEX}, which lists the shards, from where the shards come from, at the same revision"
            ),
            () => format!(
                "download the checkpoint that transformers loads, with config.json and {SINGLE}, or with {INDEX} and \
                 its shards"
            ),
        };
        return Error::NoCheckpoint { path, reason, remedy: Some(remedy.into()) };
    }
    let pickles: Vec<String> =
        entries.iter().filter(is_pickle).map(|e| printable(e)).take(MAX_LISTED).collect();
    if pickles.is_empty() {
        let has_weights = |e: &&String| [SINGLE, INDEX].iter().any(|name| path.join(e).join(name).is_file());
        let within: Vec<&str> = entries.iter().filter(has_weights).map(String::as_str).collect();
        let reason = match within[..] {
            [] => format!("it has neither {SINGLE} nor {INDEX}"),
            _ => format!(
                "it has neither {SINGLE} nor {INDEX}; these directories in it do: {}",
                listed(within, 8)
            ),
        };
        return Error::NoCheckpoint { path, reason, remedy: None };
    }
    Error::PickleOnly { path, files: pickles }
}
