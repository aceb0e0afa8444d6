//! The two ends of the pipeline as traits: sources and sinks of tensors.

use std::path::PathBuf;

use super::Dtype;
use crate::blocks::BlockType;
use crate::{Error, Result, allocate};

/// The description of one tensor in a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first; data is row-major.
    pub shape: Vec<usize>,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Number of bytes.
    pub fn byte_len(&self) -> u64 {
        self.dtype.byte_len(self.elements() as u64).unwrap_or(u64::MAX)
    }
}

/// Tensors by name, validated and read lazily. Implement it for tensors that are not in a directory of safetensors.
///
/// ```
/// use std::path::PathBuf;
/// use quant_formats::checkpoint::{Dtype, TensorInfo, TensorSource};
/// use quant_formats::Result;
///
/// /// A single tensor of an archive that is mapped into memory.
/// struct Mapped {
///     info: TensorInfo,
///     bytes: &'static [u8],
/// }
///
/// impl TensorSource for Mapped {
///     fn names(&self) -> Vec<&str> {
///         vec!["x"]
///     }
///
///     fn info(&self, name: &str) -> Option<&TensorInfo> {
///         (name == "x").then_some(&self.info)
///     }
///
///     fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
///         self.require(name)?;
///         let start = offset as usize;
///         buffer.copy_from_slice(&self.bytes[start..start + buffer.len()]);
///         Ok(())
///     }
///
///     fn location(&self, _tensor: &str) -> PathBuf {
///         "archive.bin".into()
///     }
/// }
///
/// let info = TensorInfo { dtype: Dtype::F16, shape: vec![2] };
/// let source = Mapped { info, bytes: &[0x00, 0x3c, 0x00, 0xc0] };
/// assert_eq!(source.read_f32("x")?, [1.0, -2.0]);
/// # Ok::<(), quant_formats::Error>(())
/// ```
pub trait TensorSource: Send + Sync {
    /// All names, sorted.
    fn names(&self) -> Vec<&str>;

    /// Returns the description of a tensor without reading its data.
    fn info(&self, name: &str) -> Option<&TensorInfo>;

    /// Fills `buffer` with the tensor's bytes, starting at `offset`.
    ///
    /// # Errors
    /// When there is no such tensor, the range exceeds it, or reading fails.
    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()>;

    /// Returns the file that holds the tensor, for messages.
    fn location(&self, name: &str) -> PathBuf;

    /// Returns the type of the blocks that [`read_blocks`](Self::read_blocks) returns for a tensor, if it can.
    fn block_type(&self, _name: &str) -> Option<&'static BlockType> {
        None
    }

    /// Returns the blocks that a tensor's floats are decoded from, row by row; `None` if the tensor has no
    /// [`block_type`](Self::block_type).
    ///
    /// # Errors
    /// When reading fails.
    fn read_blocks(&self, _name: &str) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    /// Whether a tensor's floats are decoded from blocks of MXFP4.
    fn is_mxfp4(&self, _name: &str) -> bool {
        false
    }

    /// Returns the MXFP4 blocks of a tensor, row by row: codes, two neighboring columns per byte with the lower one in
    /// the low nibble; and one exponent per 32 columns. `None` if the tensor is not stored in MXFP4 blocks.
    ///
    /// # Errors
    /// When reading fails.
    fn read_mxfp4(&self, _name: &str) -> Result<Option<[Vec<u8>; 2]>> {
        Ok(None)
    }

    /// Returns the tensor's description, or the error that it is missing.
    fn require(&self, name: &str) -> Result<&TensorInfo> {
        self.info(name)
            .ok_or_else(|| Error::MissingTensor { path: self.location(name), tensor: name.to_owned() })
    }

    /// Reads the tensor's bytes.
    ///
    /// # Errors
    /// When there is no such tensor, reading fails, or it does not fit in memory.
    fn read(&self, name: &str) -> Result<Vec<u8>> {
        let len = self.require(name)?.byte_len();
        let len = usize::try_from(len)
            .map_err(|_| Error::Internal(format!("tensor `{name}` exceeds the address space")))?;
        let mut bytes = allocate::zeros(len, format_args!("tensor `{name}`"))?;
        self.read_range(name, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads the tensor widened to `f32`.
    ///
    /// # Errors
    /// When the tensor cannot be read, is not F32, F16 or BF16, holds NaN or infinity, or does not fit in memory.
    fn read_f32(&self, name: &str) -> Result<Vec<f32>> {
        let info = self.require(name)?.clone();
        require_weight_float(self.location(name), name, info.dtype)?;
        let bytes = self.read(name)?;
        let mut values = allocate::zeros(info.elements(), format_args!("tensor `{name}` in f32"))?;
        info.dtype.widen(&bytes, &mut values);
        require_finite(self.location(name), name, &values)?;
        Ok(values)
    }
}

/// The weight files of a model.
pub trait WeightFiles: TensorSource + std::fmt::Debug {
    /// Total bytes of all files, including headers.
    fn file_bytes(&self) -> u64;

    /// Total stored bytes of all tensors.
    fn tensor_bytes(&self) -> u64;

    /// The files, in the order of their names.
    fn files(&self) -> Vec<PathBuf>;
}

pub(crate) const WEIGHT_FLOATS: &str = "F32, F16 or BF16";

/// Fails unless the type is valid for weights.
pub fn require_weight_float(path: PathBuf, tensor: &str, dtype: Dtype) -> Result<()> {
    if dtype.is_weight_float() {
        return Ok(());
    }
    Err(Error::TensorDtype {
        path,
        tensor: tensor.to_owned(),
        expected: WEIGHT_FLOATS.into(),
        got: dtype.to_string(),
    })
}

/// Fails with the number of non-finite values and the position of the first if a value is NaN or infinite.
pub fn require_finite(path: PathBuf, tensor: &str, values: &[f32]) -> Result<()> {
    // The common case is one pass that the compiler vectorizes.
    if values.iter().fold(true, |ok, v| ok & v.is_finite()) {
        return Ok(());
    }
    let first_index = values.iter().position(|v| !v.is_finite()).unwrap_or_default() as u64;
    let count = values.iter().filter(|v| !v.is_finite()).count() as u64;
    Err(Error::NonFinite { path, tensor: tensor.to_owned(), count, first_index })
}

/// A tensor that will be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// The tensor's name in the checkpoint.
    pub name: String,
    /// Element type and shape.
    pub info: TensorInfo,
}

impl TensorSpec {
    /// Creates the spec of a tensor.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), info: TensorInfo { dtype, shape: shape.into() } }
    }
}

/// Receives the tensors of a checkpoint, whose names, types and shapes it knows before the first byte. So it can lay
/// out files at once and accept tensors in any order.
pub trait TensorSink: Send {
    /// Whether the tensor is already complete, from an interrupted earlier run.
    fn is_complete(&self, name: &str) -> bool;

    /// Writes the tensor's bytes, starting at `offset`. Parts of one tensor come in order.
    ///
    /// # Errors
    /// When the tensor has no spec, the bytes exceed it or leave a gap, or writing fails.
    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Whether a later run may continue with what is committed here.
    fn is_resumable(&self) -> bool {
        true
    }

    /// Stores a record with the tensors, so that a resumed run can report the results of an earlier one. It becomes
    /// durable with the next [`commit`](Self::commit). A null value removes the record. A sink that cannot be resumed
    /// need not store records.
    ///
    /// # Errors
    /// When it cannot be stored.
    fn remember(&mut self, _key: &str, _value: &serde_json::Value) -> Result<()> {
        Ok(())
    }

    /// Returns a record of this run or of the one that it resumes.
    fn recall(&self, _key: &str) -> Option<serde_json::Value> {
        None
    }

    /// Reads the bytes of a tensor that [is complete](Self::is_complete), even if an earlier run wrote it; `None` from
    /// a sink that cannot read them back. Methods that calibrate on the quantized model resume from these bytes.
    ///
    /// # Errors
    /// When they cannot be read.
    fn read_back(&self, _name: &str) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    /// Makes everything written so far durable.
    ///
    /// # Errors
    /// When the disk reports an error.
    fn commit(&mut self) -> Result<()>;
}

/// Same as [`require_finite`], for little-endian elements of a weight type.
pub fn require_finite_bytes(path: PathBuf, tensor: &str, dtype: Dtype, bytes: &[u8]) -> Result<()> {
    const ELEMENTS: usize = 4096;
    let mut values = [0.0; ELEMENTS];
    let (mut count, mut first_index) = (0, None);
    for (chunk, part) in bytes.chunks(ELEMENTS * dtype.size()).enumerate() {
        let values = &mut values[..part.len() / dtype.size()];
        dtype.widen(part, values);
        if values.iter().fold(true, |ok, v| ok & v.is_finite()) {
            continue;
        }
        count += values.iter().filter(|v| !v.is_finite()).count() as u64;
        let position = values.iter().position(|v| !v.is_finite()).unwrap_or_default();
        first_index.get_or_insert((chunk * ELEMENTS + position) as u64);
    }
    match first_index {
        None => Ok(()),
        Some(first_index) => Err(Error::NonFinite { path, tensor: tensor.to_owned(), count, first_index }),
    }
}

/// Gives an error about non-finite values in a part of a tensor the count and position for the whole tensor, which is
/// read again.
pub fn non_finite_in_whole(source: &dyn TensorSource, dtype: Dtype, error: Error) -> Error {
    const CHUNK_BYTES: u64 = 8 << 20;
    let Error::NonFinite { path, tensor, .. } = &error else { return error };
    let Some(len) = source.info(tensor).map(TensorInfo::byte_len) else { return error };
    let (mut total, mut first) = (0, None);
    let mut buffer = Vec::new();
    let mut at = 0;
    while at < len {
        buffer.resize(CHUNK_BYTES.min(len - at) as usize, 0);
        if let Err(unreadable) = source.read_range(tensor, at, &mut buffer) {
            return unreadable;
        }
        if let Err(Error::NonFinite { count, first_index, .. }) =
            require_finite_bytes(path.clone(), tensor, dtype, &buffer)
        {
            total += count;
            first.get_or_insert(first_index + at / dtype.size() as u64);
        }
        at += buffer.len() as u64;
    }
    match first {
        Some(first_index) => {
            Error::NonFinite { path: path.clone(), tensor: tensor.clone(), count: total, first_index }
        }
        None => error,
    }
}
