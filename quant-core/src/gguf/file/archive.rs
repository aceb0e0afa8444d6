//! The archive: one file for a whole model.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use super::read::{GgufFile, GgufHeader, GgufTensor};
use super::value::Value;
use super::write::{Described, WRITER_KEY, header};
use crate::blocks::{self, BlockType, block_type};
use crate::checkpoint::{
    Archive, Dtype, OpaqueDtype, PlacedTensor, ShardFile, ShardLayout, TensorInfo, TensorSpec, check_specs,
};
use crate::{Error, Result};

/// A GGUF file with this metadata.
#[derive(Debug, Clone)]
pub struct GgufArchive {
    /// The file's name.
    pub file_name: String,
    /// Its metadata, in order. Which program wrote it is added.
    pub metadata: Vec<(String, Value)>,
}

impl GgufArchive {
    /// A tensor of a block type.
    ///
    /// # Errors
    /// [`Error::Internal`] when its rows are no whole number of blocks.
    pub fn spec(name: &str, kind: &'static BlockType, shape: &[usize]) -> Result<TensorSpec> {
        let bytes = Described { name, shape, kind }.bytes()?;
        Ok(TensorSpec::new(name, dtype(kind, bytes)?, shape))
    }
}

/// How the writer names a block type: by an element type where there is one, else by a name and a number of bytes.
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
    opaque.map(Dtype::Opaque).ok_or_else(|| Error::Internal(format!("no type is called {}", kind.name)))
}

fn kind(spec: &TensorSpec) -> Result<&'static BlockType> {
    block_type(spec.info.dtype.name())
        .ok_or_else(|| Error::Internal(format!("`{}` is {}, no block type", spec.name, spec.info.dtype)))
}

fn placed(tensor: GgufTensor) -> Result<PlacedTensor> {
    let dtype = dtype(tensor.kind, tensor.bytes)?;
    let info = TensorInfo { dtype, shape: tensor.shape };
    Ok(PlacedTensor { name: tensor.name, info, offset: tensor.offset })
}

impl Archive for GgufArchive {
    fn layout(&self, tensors: &[TensorSpec], _max_file_bytes: u64) -> Result<ShardLayout> {
        check_specs(tensors)?;
        let described = tensors
            .iter()
            .map(|spec| Ok(Described { name: &spec.name, shape: &spec.info.shape, kind: kind(spec)? }));
        let described = described.collect::<Result<Vec<_>>>()?;
        let mut metadata = self.metadata.clone();
        metadata.push((WRITER_KEY.to_owned(), Value::string(env!("CARGO_PKG_VERSION"))));
        let (header, offsets) = header(&metadata, &described)?;
        let placed = tensors.iter().zip(&offsets).map(|(spec, offset)| PlacedTensor {
            name: spec.name.clone(),
            info: spec.info.clone(),
            offset: *offset,
        });
        let bytes = offsets.last().copied().unwrap_or_default();
        let file = ShardFile { name: self.file_name.clone(), header, tensors: placed.collect(), bytes };
        ShardLayout::of_files(vec![file])
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
        let path = directory.join(&self.file_name);
        let differs = |reason: String| Error::Verification { path: path.clone(), reason };
        let seen = GgufFile::open(&path).map_err(|e| differs(e.to_string()))?;
        match seen.header().tensors.len() {
            found if found == tensors => Ok(()),
            found => Err(differs(format!("holds {found} tensors, {tensors} were written"))),
        }
    }

    fn is_own_file(&self, path: &Path) -> Result<bool> {
        match GgufFile::open(path) {
            Ok(file) => Ok(file.header().get(WRITER_KEY).is_some()),
            Err(Error::InputFile { .. }) => Ok(false),
            Err(other) => Err(other),
        }
    }
}
