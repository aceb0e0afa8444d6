//! The position of every byte of a checkpoint, determined before the first is written.
//!
//! Names, types and shapes determine everything but the tensors' data. So shards can be created at full length and
//! tensors written in any order, and the same plan always gives the same files.

use std::ops::Range;

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use sha2::{Digest, Sha256};

use super::contract::check_specs;
use super::header::Limits;
use super::header_text::HeaderText;
use super::shards::{INDEX, SINGLE};
use super::{TensorInfo, TensorSpec};
use crate::{Error, Result};

/// 5 GB, the shard size of the Hugging Face tools.
pub(crate) const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

/// The layout of the files of a checkpoint.
#[derive(Debug, Clone)]
pub struct ShardLayout {
    shards: Vec<ShardFile>,
    /// Shard, and position within it, of every tensor, sorted by name.
    places: Vec<(usize, usize)>,
    index: Option<Vec<u8>>,
    tensor_bytes: u64,
}

/// One file.
#[derive(Debug, Clone)]
pub struct ShardFile {
    /// The file's name, such as `model-00001-of-00002.safetensors`.
    pub name: String,
    /// All bytes before the data: in a safetensors file, the length field and the JSON.
    pub header: Vec<u8>,
    /// The place of the [seal](super::seal) in the header, if the format has one. The header has
    /// [`UNSEALED`](super::UNSEALED) there.
    pub seal: Option<Range<usize>>,
    /// The tensors in the order of their data.
    pub tensors: Vec<PlacedTensor>,
    /// Length of the whole file. Bytes that neither the header nor a tensor covers are zero.
    pub bytes: u64,
}

/// One tensor of a file.
#[derive(Debug, Clone)]
pub struct PlacedTensor {
    /// The tensor's name.
    pub name: String,
    /// Type and shape.
    pub info: TensorInfo,
    /// First byte, counted from the start of the file.
    pub offset: u64,
}

impl ShardLayout {
    /// Divides tensors among shards, in the order given. A shard is closed when the next tensor would take its data
    /// over `max_shard_bytes`; a larger tensor gets a shard of its own. Within a shard, wide element types come first,
    /// so that every tensor is aligned.
    ///
    /// # Errors
    /// - [`Error::Usage`]: no tensors, or more in one shard than a header may describe.
    /// - [`Error::Internal`]: a name is duplicated or cannot be written, or a size overflows.
    pub fn plan(specs: &[TensorSpec], max_shard_bytes: u64) -> Result<Self> {
        check_specs(specs)?;
        let groups = split(specs, max_shard_bytes)?;
        let count = groups.len();
        let mut shards = Vec::with_capacity(count);
        for (position, group) in groups.into_iter().enumerate() {
            let name = match count {
                1 => SINGLE.to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", position + 1),
            };
            shards.push(ShardFile::new(name, group)?);
        }
        let mut layout = Self::of_files(shards)?;
        layout.index = if count > 1 { Some(layout.index_bytes()?) } else { None };
        Ok(layout)
    }

    /// Creates a layout of files whose tensors have distinct names, without an index.
    ///
    /// # Errors
    /// [`Error::Internal`] when the total size of all tensors overflows.
    pub fn of_files(shards: Vec<ShardFile>) -> Result<Self> {
        let of_shard = |(s, shard): (usize, &ShardFile)| (0..shard.tensors.len()).map(move |t| (s, t));
        let mut places: Vec<_> = shards.iter().enumerate().flat_map(of_shard).collect();
        places.sort_unstable_by_key(|&(s, t)| shards[s].tensors[t].name.as_str());
        let tensor_bytes = (shards.iter().flat_map(|shard| &shard.tensors))
            .try_fold(0u64, |sum, tensor| sum.checked_add(tensor.info.byte_len()))
            .ok_or_else(|| Error::Internal("the size of the output overflows".into()))?;
        Ok(Self { shards, places, index: None, tensor_bytes })
    }

    /// Names and lengths of all files: the shards, then the index if there is one.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        let index = self.index.iter().map(|bytes| (INDEX, bytes.len() as u64));
        self.shards.iter().map(|s| (s.name.as_str(), s.bytes)).chain(index)
    }

    /// Total bytes of all files.
    pub fn file_bytes(&self) -> u64 {
        self.files().map(|(_, bytes)| bytes).sum()
    }

    /// Total bytes of all tensors, the index's `total_size`.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensor_bytes
    }

    pub(crate) fn shards(&self) -> &[ShardFile] {
        &self.shards
    }

    pub(crate) fn index(&self) -> Option<&[u8]> {
        self.index.as_deref()
    }

    pub(crate) fn position(&self, tensor: &str) -> Option<(usize, usize)> {
        let name = |&(s, t): &(usize, usize)| self.shards[s].tensors[t].name.as_str();
        self.places.binary_search_by(|place| name(place).cmp(tensor)).ok().map(|i| self.places[i])
    }

    pub(crate) fn tensor(&self, (shard, position): (usize, usize)) -> &PlacedTensor {
        &self.shards[shard].tensors[position]
    }

    /// The contents of the index: the file of every tensor, sorted by name.
    fn index_bytes(&self) -> Result<Vec<u8>> {
        let index =
            Index { metadata: Metadata { total_size: self.tensor_bytes }, weight_map: WeightMap(self) };
        let mut text =
            serde_json::to_vec_pretty(&index).map_err(|e| Error::Internal(format!("the index: {e}")))?;
        text.push(b'\n');
        Ok(text)
    }

    pub(crate) fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        for shard in &self.shards {
            hash.update((shard.name.len() as u64).to_le_bytes());
            hash.update(shard.name.as_bytes());
            // A header determines its own length.
            hash.update(&shard.header);
        }
        hash.finalize().into()
    }
}

fn split(specs: &[TensorSpec], max_shard_bytes: u64) -> Result<Vec<Vec<&TensorSpec>>> {
    let mut groups: Vec<Vec<&TensorSpec>> = Vec::new();
    let mut filled = 0u64;
    for spec in specs {
        let bytes = spec.info.byte_len();
        let total = filled.checked_add(bytes);
        match (groups.last_mut(), total) {
            (Some(group), Some(total)) if total <= max_shard_bytes => {
                group.push(spec);
                filled = total;
            }
            _ => {
                groups.push(vec![spec]);
                filled = bytes;
            }
        }
    }
    if groups.is_empty() {
        return Err(Error::usage("the model has no tensors to write", "give a model that has weights"));
    }
    Ok(groups)
}

impl ShardFile {
    fn new(name: String, mut group: Vec<&TensorSpec>) -> Result<Self> {
        group.sort_by(|a, b| b.info.dtype.bits().cmp(&a.info.dtype.bits()).then_with(|| a.name.cmp(&b.name)));
        let overflow = |_| Error::Internal(format!("the size of {name} overflows"));
        let mut text = HeaderText::for_transformers();
        let mut tensors = Vec::with_capacity(group.len());
        for spec in group {
            let offset = text.add(&spec.name, &spec.info).map_err(overflow)?;
            tensors.push(PlacedTensor { name: spec.name.clone(), info: spec.info.clone(), offset });
        }
        let end = text.data_bytes();
        let header = text.finish();
        let limits = Limits::default();
        if tensors.len() > limits.tensors || header.len() as u64 > 8 + limits.header_bytes {
            return Err(Error::usage(
                format!(
                    "{name} would contain {} tensors in a header of {} bytes; the limits are {} tensors and {} bytes",
                    tensors.len(),
                    header.len() - 8,
                    limits.tensors,
                    limits.header_bytes
                ),
                "write smaller shards",
            ));
        }
        let data_start = header.len() as u64;
        let bytes = data_start
            .checked_add(end)
            .ok_or_else(|| Error::Internal(format!("the size of {name} overflows")))?;
        for tensor in &mut tensors {
            tensor.offset += data_start;
        }
        Ok(Self { name, header, seal: None, tensors, bytes })
    }
}

#[derive(Serialize)]
struct Index<'a> {
    metadata: Metadata,
    weight_map: WeightMap<'a>,
}

#[derive(Serialize)]
struct Metadata {
    total_size: u64,
}

struct WeightMap<'a>(&'a ShardLayout);

impl Serialize for WeightMap<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.places.len()))?;
        for &place in &self.0.places {
            map.serialize_entry(&self.0.tensor(place).name, &self.0.shards[place.0].name)?;
        }
        map.end()
    }
}
