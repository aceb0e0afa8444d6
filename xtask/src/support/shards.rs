//! Checkpoints on disk, read and written one tensor at a time: safetensors shards with their index.
//!
//! This deliberately does not use the pipeline's reader and writer, because they are tested on the checkpoints written
//! here.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::noise::Float;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// One tensor of a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The tensor's name.
    pub name: String,
    /// The tensor's element type, as named in the header.
    pub dtype: String,
    /// The tensor's dimensions, outermost first.
    pub shape: Vec<usize>,
    /// The tensor's length in bytes.
    pub bytes: u64,
}

impl Entry {
    /// A float tensor.
    pub fn new(name: String, float: Float, shape: &[usize]) -> Self {
        let bytes = shape.iter().product::<usize>() as u64 * float.size() as u64;
        Self { name, dtype: float.header_name().into(), shape: shape.to_vec(), bytes }
    }

    /// The tensor's element type; `None` if it is not one of [`Float`]'s.
    pub fn float(&self) -> Option<Float> {
        Float::from_header(&self.dtype)
    }
}

/// Distributes tensors over shards of at most `limit` bytes each, in order; a larger tensor gets its own shard. A
/// single shard is named `model.safetensors`; names of several follow the convention
/// `model-00001-of-00003.safetensors`.
pub fn plan_shards(entries: Vec<Entry>, limit: u64) -> Vec<(String, Vec<Entry>)> {
    let mut shards: Vec<Vec<Entry>> = vec![Vec::new()];
    let mut used = 0;
    for entry in entries {
        if used > 0 && used + entry.bytes > limit {
            shards.push(Vec::new());
            used = 0;
        }
        used += entry.bytes;
        if let Some(shard) = shards.last_mut() {
            shard.push(entry);
        }
    }
    let count = shards.len();
    let name = |i: usize| match count {
        1 => SINGLE.to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
    };
    shards.into_iter().enumerate().map(|(i, shard)| (name(i), shard)).collect()
}

/// Writes the index of several shards; does nothing for a single one.
pub fn write_index(dir: &Path, shards: &[(String, Vec<Entry>)]) -> Result<()> {
    if shards.iter().all(|(file, _)| file == SINGLE) {
        return Ok(());
    }
    let total: u64 = shards.iter().flat_map(|(_, entries)| entries).map(|e| e.bytes).sum();
    let map: BTreeMap<&str, &str> =
        shards.iter().flat_map(|(file, entries)| entries.iter().map(move |e| (&*e.name, &**file))).collect();
    write_json(&dir.join(INDEX), &json!({ "metadata": { "total_size": total }, "weight_map": map }))
}

/// Writes a value as indented JSON with a final newline.
pub fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value)? + "\n";
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Reads a JSON file.
pub fn read_json(path: &Path) -> Result<Value> {
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is not JSON", path.display()))
}

/// A shard being written: first the header, then the tensors' bytes in order.
#[derive(Debug)]
pub struct ShardWriter {
    file: BufWriter<File>,
    remaining: u64,
}

impl ShardWriter {
    /// Creates the file and writes its header.
    pub fn create(path: &Path, entries: &[Entry]) -> Result<Self> {
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({ "format": "pt" }));
        let mut offset = 0;
        for entry in entries {
            let end = offset + entry.bytes;
            let value = json!({ "dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, end] });
            ensure!(
                header.insert(entry.name.clone(), value).is_none(),
                "tensor {} is written twice",
                entry.name
            );
            offset = end;
        }
        let mut header = serde_json::to_vec(&header)?;
        header.resize(header.len().next_multiple_of(8), b' ');
        let file = File::create_new(path).with_context(|| format!("cannot create {}", path.display()))?;
        let mut file = BufWriter::with_capacity(1 << 20, file);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        Ok(Self { file, remaining: offset })
    }

    /// Appends bytes of the tensors, in the order of the entries.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let len = bytes.len() as u64;
        ensure!(len <= self.remaining, "more bytes than the header declares");
        self.remaining -= len;
        Ok(self.file.write_all(bytes)?)
    }

    /// Finishes the file. Fails if bytes of the tensors are missing.
    pub fn finish(mut self) -> Result<()> {
        ensure!(self.remaining == 0, "{} bytes fewer than the header declares", self.remaining);
        Ok(self.file.flush()?)
    }
}

/// A checkpoint directory opened for reading.
#[derive(Debug)]
pub struct Checkpoint {
    /// File names with their tensors, in the order of the data.
    pub shards: Vec<(String, Vec<Entry>)>,
    places: BTreeMap<String, (PathBuf, u64)>,
}

impl Checkpoint {
    /// Reads the headers of a directory's shards.
    pub fn open(dir: &Path) -> Result<Self> {
        let mut files = vec![SINGLE.to_owned()];
        if !dir.join(SINGLE).is_file() {
            let index = read_json(&dir.join(INDEX))?;
            let map =
                index.get("weight_map").and_then(Value::as_object).context("the index has no weight_map")?;
            files = map.values().filter_map(Value::as_str).map(str::to_owned).collect();
            files.sort();
            files.dedup();
        }
        let mut checkpoint = Self { shards: Vec::new(), places: BTreeMap::new() };
        for file in files {
            ensure!(!file.contains(['/', '\\']), "shard {file} is not a plain file name");
            let path = dir.join(&file);
            let located = read_header(&path).with_context(|| format!("{} is invalid", path.display()))?;
            for (entry, offset) in &located {
                checkpoint.places.insert(entry.name.clone(), (path.clone(), *offset));
            }
            checkpoint.shards.push((file, located.into_iter().map(|(entry, _)| entry).collect()));
        }
        Ok(checkpoint)
    }

    /// All tensors.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.shards.iter().flat_map(|(_, entries)| entries)
    }

    /// A tensor's bytes.
    pub fn read(&self, entry: &Entry) -> Result<Vec<u8>> {
        let Some((path, offset)) = self.places.get(&entry.name) else {
            bail!("tensor {} is missing", entry.name);
        };
        let mut file = File::open(path)?;
        file.seek(SeekFrom::Start(*offset))?;
        let mut bytes = vec![0; usize::try_from(entry.bytes)?];
        file.read_exact(&mut bytes).with_context(|| format!("cannot read {}", entry.name))?;
        Ok(bytes)
    }
}

/// The tensors of a shard with the positions of their bytes in the file, in the order of the data.
///
/// # Errors
/// When the file cannot be read, or its header is malformed or points outside the file.
pub fn read_header(path: &Path) -> Result<Vec<(Entry, u64)>> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let start =
        u64::from_le_bytes(length).checked_add(8).filter(|s| *s <= size).context("header too long")?;
    let mut header = vec![0; usize::try_from(start - 8)?];
    file.read_exact(&mut header)?;
    let header: Map<String, Value> = serde_json::from_slice(&header)?;
    let mut located = Vec::new();
    for (name, value) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
        let (entry, begin) = parse_entry(&name, &value).with_context(|| format!("tensor {name}"))?;
        let end = begin.checked_add(entry.bytes).and_then(|e| e.checked_add(start));
        ensure!(end.is_some_and(|e| e <= size), "tensor {name} exceeds the file");
        located.push((entry, start + begin));
    }
    located.sort_by_key(|(_, offset)| *offset);
    Ok(located)
}

fn parse_entry(name: &str, value: &Value) -> Result<(Entry, u64)> {
    let dtype = value.get("dtype").and_then(Value::as_str).context("no dtype")?;
    let numbers =
        |key: &str| -> Option<Vec<u64>> { value.get(key)?.as_array()?.iter().map(Value::as_u64).collect() };
    let shape = numbers("shape").context("no shape")?;
    let Some([begin, end]) = numbers("data_offsets").and_then(|o| <[u64; 2]>::try_from(o).ok()) else {
        bail!("no data_offsets");
    };
    let bytes = end.checked_sub(begin).context("data_offsets are descending")?;
    let elements = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).context("shape overflows")?;
    if let Some(float) = Float::from_header(dtype) {
        ensure!(elements.checked_mul(float.size() as u64) == Some(bytes), "length does not match the shape");
    }
    let shape = shape.into_iter().map(usize::try_from).collect::<Result<_, _>>()?;
    Ok((Entry { name: name.to_owned(), dtype: dtype.to_owned(), shape, bytes }, begin))
}

/// A directory that gets its final name only when it is complete.
#[derive(Debug)]
pub struct NewDir {
    partial: PathBuf,
    target: PathBuf,
}

impl NewDir {
    /// Starts a directory next to the target, which must not exist.
    pub fn create(target: &Path) -> Result<Self> {
        ensure!(!target.exists(), "{} exists already", target.display());
        let name = target.file_name().context("the output needs a name")?.to_string_lossy().into_owned();
        let partial = target.with_file_name(name + ".partial");
        super::shell::remove_dir(&partial)?;
        std::fs::create_dir_all(&partial).with_context(|| format!("cannot create {}", partial.display()))?;
        Ok(Self { partial, target: target.to_owned() })
    }

    /// The temporary path to write to.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Moves the directory to its final name.
    pub fn publish(self) -> Result<()> {
        std::fs::rename(&self.partial, &self.target)
            .with_context(|| format!("cannot rename {} to {}", self.partial.display(), self.target.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_cut_in_order_and_large_tensors_stand_alone() {
        let entry = |name: &str, n: usize| Entry::new(name.into(), Float::Bf16, &[n]);
        let all = vec![entry("a", 10), entry("b", 20), entry("c", 500), entry("d", 1), entry("e", 2)];
        let shards = plan_shards(all.clone(), 60);
        let names: Vec<Vec<&str>> =
            shards.iter().map(|(_, s)| s.iter().map(|e| &*e.name).collect()).collect();
        assert_eq!(names, [vec!["a", "b"], vec!["c"], vec!["d", "e"]]);
        assert_eq!(shards[2].0, "model-00003-of-00003.safetensors");
        assert_eq!(plan_shards(all, 1 << 20)[0].0, "model.safetensors");
    }

    #[test]
    fn a_shard_reads_back_here_and_in_the_reference_reader() {
        let dir = tempfile::tempdir().unwrap();
        let entries =
            [Entry::new("z".into(), Float::F32, &[2, 3]), Entry::new("a".into(), Float::Bf16, &[5])];
        let path = dir.path().join(SINGLE);
        let mut writer = ShardWriter::create(&path, &entries).unwrap();
        let data: Vec<u8> = (0..34).collect();
        writer.write(&data[..7]).unwrap();
        assert!(writer.write(&[0; 28]).is_err());
        writer.write(&data[7..]).unwrap();
        writer.finish().unwrap();

        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.entries().cloned().collect::<Vec<_>>(), entries);
        assert_eq!(checkpoint.read(&entries[1]).unwrap(), &data[24..]);
        let bytes = std::fs::read(&path).unwrap();
        let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(reference.tensor("z").unwrap().data(), &data[..24]);
    }

    #[test]
    fn an_unfinished_shard_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let entry = Entry::new("a".into(), Float::F16, &[4]);
        let writer = ShardWriter::create(&dir.path().join(SINGLE), &[entry]).unwrap();
        assert!(writer.finish().is_err());
        assert!(Checkpoint::open(dir.path()).is_err());
    }
}
