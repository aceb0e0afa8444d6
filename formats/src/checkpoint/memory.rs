//! Tensors in memory as source and sink, for library users and tests.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::contract::{check_part, check_specs, incomplete, unknown};
use super::shards::check_range;
use super::{Dtype, TensorInfo, TensorSink, TensorSource, TensorSpec};
use crate::{Error, Result};

/// A [`TensorSource`] over tensors in memory.
///
/// ```
/// use quant_formats::TensorSource;
/// use quant_formats::checkpoint::{Dtype, MemorySource};
///
/// let mut source = MemorySource::new();
/// let bytes: Vec<u8> = [1.0f32, 2.0].iter().flat_map(|value| value.to_le_bytes()).collect();
/// source.insert("norm.weight", Dtype::F32, [2], bytes)?;
/// assert_eq!(source.read("norm.weight")?.len(), 8);
/// assert!(source.read("other").is_err());
/// # Ok::<(), quant_formats::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemorySource {
    tensors: BTreeMap<String, (TensorInfo, Vec<u8>)>,
}

impl MemorySource {
    /// Creates a source without tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor from little-endian bytes in row-major order.
    ///
    /// # Errors
    /// [`Error::Usage`] when the number of bytes does not match type and shape, or the name exists.
    pub fn insert(
        &mut self,
        name: impl Into<String>,
        dtype: Dtype,
        shape: impl Into<Vec<usize>>,
        bytes: Vec<u8>,
    ) -> Result<()> {
        let (name, info) = (name.into(), TensorInfo { dtype, shape: shape.into() });
        let elements = info.shape.iter().try_fold(1_usize, |elements, &dim| elements.checked_mul(dim));
        let size = elements.and_then(|elements| dtype.byte_len(elements as u64));
        if size != Some(bytes.len() as u64) {
            return Err(Error::usage(
                format!(
                    "tensor `{name}`: {dtype} {:?} does not match {} bytes of data",
                    info.shape,
                    bytes.len()
                ),
                "pass exactly the bytes of this element type and shape",
            ));
        }
        if self.tensors.contains_key(&name) {
            return Err(Error::usage(
                format!("tensor `{name}` already exists"),
                "give every tensor a unique name",
            ));
        }
        self.tensors.insert(name, (info, bytes));
        Ok(())
    }

    /// Adds a tensor from values, rounded to `dtype` half to even.
    ///
    /// # Errors
    /// [`Error::TensorDtype`] unless the type is F32, F16 or BF16; otherwise as [`Self::insert`].
    pub fn insert_f32(
        &mut self,
        name: impl Into<String>,
        dtype: Dtype,
        shape: impl Into<Vec<usize>>,
        values: &[f32],
    ) -> Result<()> {
        let name = name.into();
        super::require_weight_float(memory(), &name, dtype)?;
        self.insert(name, dtype, shape, dtype.narrow(values))
    }

    /// Returns a tensor's bytes without copying.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.tensors.get(name).map(|(_, bytes)| bytes.as_slice())
    }
}

impl TensorSource for MemorySource {
    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|(info, _)| info)
    }

    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let (_, bytes) = self
            .tensors
            .get(name)
            .ok_or_else(|| Error::MissingTensor { path: memory(), tensor: name.to_owned() })?;
        check_range(name, bytes.len() as u64, offset, buffer.len())?;
        let start = usize::try_from(offset).unwrap_or_default();
        buffer.copy_from_slice(&bytes[start..start + buffer.len()]);
        Ok(())
    }

    fn location(&self, _name: &str) -> PathBuf {
        memory()
    }
}

fn memory() -> PathBuf {
    PathBuf::from("<memory>")
}

/// A [`TensorSink`] that keeps everything in memory and checks the contract.
#[derive(Debug, Clone, Default)]
pub struct MemorySink {
    tensors: BTreeMap<String, (TensorInfo, Vec<u8>)>,
    commits: usize,
}

impl MemorySink {
    /// Creates a sink for these tensors.
    ///
    /// # Errors
    /// [`Error::Internal`] when a name is duplicated, or a name or shape could not be written to a file.
    pub fn new(specs: Vec<TensorSpec>) -> Result<Self> {
        check_specs(&specs)?;
        let tensors = specs.into_iter().map(|spec| (spec.name, (spec.info, Vec::new()))).collect();
        Ok(Self { tensors, commits: 0 })
    }

    /// The bytes of a tensor so far.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.tensors.get(name).map(|(_, bytes)| bytes.as_slice())
    }

    /// Number of calls of [`TensorSink::commit`].
    pub fn commits(&self) -> usize {
        self.commits
    }

    /// Converts everything that was written into a source.
    ///
    /// # Errors
    /// [`Error::Internal`] naming tensors that are not complete.
    pub fn into_source(self) -> Result<MemorySource> {
        let missing: Vec<&str> =
            self.tensors.keys().filter(|n| !self.is_complete(n)).map(String::as_str).collect();
        if !missing.is_empty() {
            return Err(incomplete(&missing));
        }
        Ok(MemorySource { tensors: self.tensors })
    }
}

impl TensorSink for MemorySink {
    fn is_complete(&self, name: &str) -> bool {
        self.tensors.get(name).is_some_and(|(info, bytes)| bytes.len() as u64 == info.byte_len())
    }

    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        let (info, kept) = self.tensors.get_mut(name).ok_or_else(|| unknown(name))?;
        check_part(name, info.byte_len(), kept.len() as u64, offset, bytes.len())?;
        kept.extend_from_slice(bytes);
        Ok(())
    }

    fn read_back(&self, name: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.bytes(name).filter(|_| self.is_complete(name)).map(<[u8]>::to_vec))
    }

    fn commit(&mut self) -> Result<()> {
        self.commits += 1;
        Ok(())
    }
}
