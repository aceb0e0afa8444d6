//! GGUF as an archive.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::open::GgufFile;
use super::parts::{self, Part};
use super::read::{GgufHeader, GgufTensor};
use super::value::Value;
use super::write::{Described, SEAL_KEY, WRITER_KEY, add_seal, header};
use crate::blocks::{self, BlockType, block_type};
use crate::checkpoint::{
    Archive, Dtype, OpaqueDtype, Origin, PlacedTensor, ShardFile, ShardLayout, TensorInfo, TensorSpec,
    check_specs, seal,
};
use crate::digest::Digest256;
use crate::{Error, Result};

/// A GGUF file with this metadata.
#[derive(Debug, Clone)]
pub struct GgufArchive {
    /// The file's name.
    pub file_name: String,
    /// The metadata, in order. An entry for the program that wrote it is added.
    pub metadata: Vec<(String, Value)>,
    /// Whether to write several files if one would be too large.
    pub in_parts: bool,
}

impl GgufArchive {
    /// The specification of a tensor of a block type.
    ///
    /// # Errors
    /// [`Error::Internal`] when GGUF cannot store the name or shape, or the row length is not a multiple of the block
    /// size.
    pub fn spec(name: &str, kind: &'static BlockType, shape: &[usize]) -> Result<TensorSpec> {
        let bytes = Described { name, shape, kind }.bytes()?;
        Ok(TensorSpec::new(name, dtype(kind, bytes)?, shape))
    }
}

/// The dtype for a block type: an element type if there is one, otherwise an opaque type with a name and a number of
/// bytes.
fn dtype(kind: &'static BlockType, bytes: u64) -> Result<Dtype> {
    if *kind == blocks::F32 {
        return Ok(Dtype::F32);
    }
    if *kind == blocks::F16 {
        return Ok(Dtype::F16);
    }
    if *kind == blocks::BF16 {
        return Ok(Dtype::Bf16);
    }
    let opaque = OpaqueDtype::new(kind.name, bytes);
    opaque.map(Dtype::Opaque).ok_or_else(|| Error::Internal(format!("unknown type {}", kind.name)))
}

fn kind(spec: &TensorSpec) -> Result<&'static BlockType> {
    block_type(spec.info.dtype.name()).ok_or_else(|| {
        Error::Internal(format!("`{}` is {}, which is not a block type", spec.name, spec.info.dtype))
    })
}

fn placed(tensor: GgufTensor) -> Result<PlacedTensor> {
    let dtype = dtype(tensor.kind, tensor.bytes)?;
    let info = TensorInfo { dtype, shape: tensor.shape };
    Ok(PlacedTensor { name: tensor.name, info, offset: tensor.offset })
}

/// Splits tensors into files in order. A file with more than one tensor has at most `max` bytes of tensor data.
fn divided(tensors: &[TensorSpec], max: u64) -> Vec<&[TensorSpec]> {
    let (mut groups, mut first, mut bytes) = (Vec::new(), 0, 0_u64);
    for (i, tensor) in tensors.iter().enumerate() {
        let more = bytes.saturating_add(tensor.info.byte_len());
        if i > first && more > max {
            groups.push(&tensors[first..i]);
            (first, bytes) = (i, tensor.info.byte_len());
        } else {
            bytes = more;
        }
    }
    groups.push(&tensors[first..]);
    groups
}

impl GgufArchive {
    /// Lays out one file. If there are several, only the first has all metadata.
    fn file(&self, tensors: &[TensorSpec], part: Option<Part>) -> Result<ShardFile> {
        let described = tensors
            .iter()
            .map(|spec| Ok(Described { name: &spec.name, shape: &spec.info.shape, kind: kind(spec)? }));
        let described = described.collect::<Result<Vec<_>>>()?;
        let mut metadata = match part {
            Some(Part { number: 1.., .. }) => Vec::new(),
            _ => self.metadata.clone(),
        };
        metadata.extend(part.into_iter().flat_map(Part::entries));
        metadata.push((WRITER_KEY.to_owned(), Value::string(env!("CARGO_PKG_VERSION"))));
        let seal = add_seal(&mut metadata);
        let (header, offsets) = header(&metadata, &described)?;
        let placed = tensors.iter().zip(&offsets).map(|(spec, offset)| PlacedTensor {
            name: spec.name.clone(),
            info: spec.info.clone(),
            offset: *offset,
        });
        let name = match part {
            None => self.file_name.clone(),
            Some(part) => parts::file_name(self.stem(), part.number, part.count),
        };
        let bytes = offsets.last().copied().unwrap_or_default();
        Ok(ShardFile { name, header, seal: Some(seal), tensors: placed.collect(), bytes })
    }

    fn stem(&self) -> &str {
        self.file_name.strip_suffix(".gguf").unwrap_or(&self.file_name)
    }

    /// The file from which a model is read: the only one, or the first part found.
    fn first(&self, directory: &Path) -> Result<PathBuf> {
        let whole = directory.join(&self.file_name);
        if !self.in_parts || whole.exists() {
            return Ok(whole);
        }
        let begin = format!("{}-00001-of-", self.stem());
        let entries = std::fs::read_dir(directory).map_err(|e| Error::io("list", directory, e))?;
        for entry in entries {
            let entry = entry.map_err(|e| Error::io("list", directory, e))?;
            if entry.file_name().to_string_lossy().starts_with(&begin) {
                return Ok(entry.path());
            }
        }
        Ok(whole)
    }
}

/// Whether a file has exactly the contents with which this program sealed it.
fn is_sealed(file: &GgufFile) -> Result<bool> {
    let GgufHeader { metadata, tensors, .. } = file.header();
    let Some(((key, Value::String(stated)), others)) = metadata.split_last() else { return Ok(false) };
    if key != SEAL_KEY {
        return Ok(false);
    }
    let mut unsealed = others.to_vec();
    add_seal(&mut unsealed);
    let described = tensors.iter();
    let described = described.map(|t| Described { name: &t.name, shape: &t.shape, kind: t.kind });
    let (header, offsets) = header(&unsealed, &described.collect::<Vec<_>>())?;
    // Nothing may follow the last tensor.
    if offsets.last() != Some(&file.bytes()) {
        return Ok(false);
    }
    let digests: Vec<Digest256> = tensors.par_iter().map(|t| digest(file, t)).collect::<Result<_>>()?;
    Ok(seal(&header, digests) == *stated)
}

fn digest(file: &GgufFile, tensor: &GgufTensor) -> Result<Digest256> {
    const PIECE: u64 = 4 << 20;
    let (mut hash, mut piece) = (blake3::Hasher::new(), Vec::new());
    for first in (0..tensor.bytes).step_by(PIECE as usize) {
        piece.resize(PIECE.min(tensor.bytes - first) as usize, 0);
        file.read(tensor, first, &mut piece)?;
        hash.update(&piece);
    }
    Ok(hash.finalize().into())
}

impl Archive for GgufArchive {
    fn layout(&self, tensors: &[TensorSpec], max_file_bytes: u64) -> Result<ShardLayout> {
        check_specs(tensors)?;
        let groups = match self.in_parts {
            true => divided(tensors, max_file_bytes),
            false => vec![tensors],
        };
        let count = groups.len();
        if count > parts::MAX_FILES {
            return Err(Error::usage(
                format!(
                    "the model would be split into {count} files; at most {} are supported",
                    parts::MAX_FILES
                ),
                "allow larger files with ‹split_max_size›",
            ));
        }
        let files = groups.into_iter().enumerate().map(|(number, group)| {
            let part = Part { number, count, tensors: tensors.len() };
            self.file(group, (count > 1).then_some(part))
        });
        ShardLayout::of_files(files.collect::<Result<Vec<_>>>()?)
    }

    fn read_header(&self, file: &File, path: &Path) -> Result<Vec<PlacedTensor>> {
        let len = file.metadata().map_err(|e| Error::io("read", path, e))?.len();
        // The file may have been read before.
        use std::io::Seek;
        let mut reader = file;
        reader.rewind().map_err(|e| Error::io("read", path, e))?;
        let header = GgufHeader::parse(BufReader::new(reader), len);
        let header = header.map_err(|fault| GgufFile::broken(path, fault))?;
        header.tensors.into_iter().map(placed).collect()
    }

    fn check_directory(&self, directory: &Path, tensors: usize) -> Result<()> {
        let path = self.first(directory)?;
        let differs = |reason: String| Error::Verification { path: path.clone(), reason };
        let seen = GgufFile::open_model(&path).map_err(|e| differs(e.to_string()))?;
        match seen.header().tensors.len() {
            found if found == tensors => Ok(()),
            found => Err(differs(format!("contains {found} tensors, but {tensors} were written"))),
        }
    }

    fn origin(&self, path: &Path) -> Result<Origin> {
        let file = match GgufFile::open(path) {
            Ok(file) => file,
            Err(Error::InputFile { .. }) => return Ok(Origin::Foreign),
            Err(other) => return Err(other),
        };
        if file.header().get(WRITER_KEY).is_none() {
            return Ok(Origin::Foreign);
        }
        Ok(if is_sealed(&file)? { Origin::Own } else { Origin::Changed })
    }
}
