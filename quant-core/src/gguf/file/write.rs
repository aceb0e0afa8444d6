//! Builds the bytes before the tensor data.

use std::ops::Range;

use super::value::{Array, Value};
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, MAX_NAME, VERSION};
use crate::blocks::BlockType;
use crate::checkpoint::UNSEALED;
use crate::{Error, Result};

/// The key for the version of this program, in files that it wrote.
pub(super) const WRITER_KEY: &str = "quant.version";
/// The key for the [seal](crate::checkpoint::seal) of a file, by which the program recognizes a file that it wrote. Other
/// programs copy it to files that they make from this one, whose contents it does not match. It is the last entry.
pub(super) const SEAL_KEY: &str = "quant.blake3";

pub(super) struct Described<'a> {
    pub(super) name: &'a str,
    /// Outermost first, as everywhere except in the file.
    pub(super) shape: &'a [usize],
    pub(super) kind: &'static BlockType,
}

impl Described<'_> {
    pub(super) fn bytes(&self) -> Result<u64> {
        let fault = |reason: &str| Error::Internal(format!("output tensor `{}` {reason}", self.name));
        if self.name.is_empty() || self.name.len() > MAX_NAME {
            return Err(fault("has a name that GGUF cannot store"));
        }
        let Some((&columns, outer)) = self.shape.split_last() else { return Err(fault("has no dimensions")) };
        if self.shape.len() > MAX_DIMS {
            return Err(fault("has too many dimensions"));
        }
        let row = self
            .kind
            .row_bytes(columns)
            .ok_or_else(|| fault("has rows that are not a multiple of the block size"))?;
        let bytes = outer.iter().try_fold(row, |bytes, &dim| bytes.checked_mul(dim));
        bytes.map(|bytes| bytes as u64).ok_or_else(|| fault("has a size that overflows"))
    }
}

/// Returns the bytes before the tensor data, and the offset of each tensor from the start of the file, followed by the
/// file's length.
pub(super) fn header(metadata: &[(String, Value)], tensors: &[Described<'_>]) -> Result<(Vec<u8>, Vec<u64>)> {
    let set = metadata.iter().find(|(key, _)| key == ALIGNMENT_KEY).and_then(|(_, value)| value.as_u64());
    let alignment = set.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() {
        return Err(Error::Internal(format!("an alignment of {alignment} bytes is invalid")));
    }
    let mut bytes = start(metadata, tensors.len());
    let (mut offsets, mut end) = (Vec::with_capacity(tensors.len() + 1), 0_u64);
    for tensor in tensors {
        put_string(&mut bytes, tensor.name);
        bytes.extend((tensor.shape.len() as u32).to_le_bytes());
        for dim in tensor.shape.iter().rev() {
            bytes.extend((*dim as u64).to_le_bytes());
        }
        bytes.extend(tensor.kind.id.to_le_bytes());
        bytes.extend(end.to_le_bytes());
        offsets.push(end);
        end = (end.checked_add(tensor.bytes()?))
            .and_then(|end| end.checked_next_multiple_of(alignment))
            .ok_or_else(|| Error::Internal("the size of the output overflows".into()))?;
    }
    offsets.push(end);
    bytes.resize(bytes.len().next_multiple_of(alignment as usize), 0);
    let start = bytes.len() as u64;
    let placed = offsets.into_iter().map(|offset| offset.checked_add(start));
    let placed = placed.collect::<Option<Vec<u64>>>();
    Ok((bytes, placed.ok_or_else(|| Error::Internal("the size of the output overflows".into()))?))
}

/// Returns the bytes before the descriptions of the tensors.
fn start(metadata: &[(String, Value)], tensors: usize) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((tensors as u64).to_le_bytes());
    bytes.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_string(&mut bytes, key);
        bytes.extend(value.kind().to_le_bytes());
        put_value(&mut bytes, value);
    }
    bytes
}

/// Adds an entry for the seal as the last one, and returns its place in the header.
pub(super) fn add_seal(metadata: &mut Vec<(String, Value)>) -> Range<usize> {
    metadata.push((SEAL_KEY.to_owned(), Value::string(UNSEALED)));
    let end = start(metadata, 0).len();
    end - UNSEALED.len()..end
}

/// Returns the bytes of a whole file from the name, shape and values of each tensor.
pub(crate) fn write_file(
    metadata: &[(String, Value)],
    tensors: &[(String, Vec<usize>, Vec<f32>)],
) -> Result<Vec<u8>> {
    let kind = &crate::blocks::F32;
    let described: Vec<Described<'_>> =
        tensors.iter().map(|(name, shape, _)| Described { name, shape, kind }).collect();
    let (mut bytes, offsets) = header(metadata, &described)?;
    for ((_, _, values), after) in tensors.iter().zip(&offsets[1..]) {
        bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        bytes.resize(*after as usize, 0);
    }
    Ok(bytes)
}

fn put_string(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
}

fn put_value(bytes: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => bytes.push(*v),
        Value::I8(v) => bytes.extend(v.to_le_bytes()),
        Value::U16(v) => bytes.extend(v.to_le_bytes()),
        Value::I16(v) => bytes.extend(v.to_le_bytes()),
        Value::U32(v) => bytes.extend(v.to_le_bytes()),
        Value::I32(v) => bytes.extend(v.to_le_bytes()),
        Value::F32(v) => bytes.extend(v.to_le_bytes()),
        Value::Bool(v) => bytes.push((*v).into()),
        Value::String(text) => put_string(bytes, text),
        Value::U64(v) => bytes.extend(v.to_le_bytes()),
        Value::I64(v) => bytes.extend(v.to_le_bytes()),
        Value::F64(v) => bytes.extend(v.to_le_bytes()),
        Value::Array(array) => {
            bytes.extend(array.kind().to_le_bytes());
            bytes.extend((array.len() as u64).to_le_bytes());
            put_elements(bytes, array);
        }
    }
}

fn put_elements(bytes: &mut Vec<u8>, array: &Array) {
    match array {
        Array::U8(values) => bytes.extend_from_slice(values),
        Array::I8(values) => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        Array::U16(values) => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        Array::I16(values) => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        Array::U32(values) => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        Array::I32(values) => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        Array::F32(values) => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        Array::Bool(values) => bytes.extend(values.iter().map(|v| u8::from(*v))),
        Array::String(values) => values.iter().for_each(|text| put_string(bytes, text)),
        Array::U64(values) => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        Array::I64(values) => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        Array::F64(values) => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
    }
}
