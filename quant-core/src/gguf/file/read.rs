//! Reads a file's header and checks it against the file.

use std::collections::HashSet;
use std::io::Read;

use super::fault::GgufFault;
use super::value::{Array, Value, kinds};
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, MAX_NAME};
use crate::blocks::{BlockType, block_type_of, unread_type};
use crate::checkpoint::printable;

const MAX_ENTRIES: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 20;
/// The maximum length of a string. Chat templates have tens of thousands of bytes.
const MAX_STRING: u64 = 64 << 20;
/// The longest text that `llama-quantize` writes for an option.
const CUT: usize = 127;
/// The maximum number of elements in all lists together. Vocabularies have hundreds of thousands.
const MAX_ELEMENTS: u64 = 1 << 24;

/// The header of a file.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GgufHeader {
    /// 2 or 3. Both are read alike.
    pub version: u32,
    /// Metadata, in file order.
    pub metadata: Vec<(String, Value)>,
    /// The tensors, in file order.
    pub tensors: Vec<GgufTensor>,
}

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GgufTensor {
    /// The name.
    pub name: String,
    /// Dimensions, outermost first: the reverse of the order in the file.
    pub shape: Vec<usize>,
    /// The encoding of its rows.
    pub kind: &'static BlockType,
    /// The offset of its first byte from the start of the file.
    pub offset: u64,
    /// The size of the data in bytes.
    pub bytes: u64,
    /// The part that contains it, counted from 0; always 0 for a model in a single file.
    pub part: usize,
}

impl GgufTensor {
    /// The number of elements per row, the innermost dimension.
    pub fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

impl GgufHeader {
    /// Reads the header of a file of `len` bytes from its start. Tensor data is not read.
    ///
    /// # Errors
    /// The rule that the header breaks, or the unsupported feature that it uses.
    pub fn parse(reader: impl Read, len: u64) -> Result<Self, GgufFault> {
        Cursor { reader, at: 0, len, elements: 0 }.header()
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find(|(known, _)| known == key).map(|(_, value)| value)
    }
}

struct Cursor<R> {
    reader: R,
    at: u64,
    len: u64,
    /// The number of elements in all lists so far.
    elements: u64,
}

impl<R: Read> Cursor<R> {
    fn header(mut self) -> Result<GgufHeader, GgufFault> {
        if self.array::<4>("magic")? != MAGIC {
            return Err("does not begin with `GGUF`".into());
        }
        let version = u32::from_le_bytes(self.array("version")?);
        match version {
            2 | 3 => {}
            v if v != 0 && v & 0xffff == 0 => {
                return Err(GgufFault::Unread("is in big-endian order, which is not supported".into()));
            }
            v => {
                return Err(GgufFault::Unread(format!(
                    "`version` at byte 4 is {v}; supported versions: 2, 3"
                )));
            }
        }
        let tensors = self.count("tensor_count", MAX_TENSORS, 8 + 4 + 8 + 4 + 8)?;
        let entries = self.count("metadata_kv_count", MAX_ENTRIES, 8 + 4 + 1)?;
        let mut metadata = Vec::new();
        let mut keys = HashSet::new();
        for i in 0..entries {
            let at = self.at;
            let key = self.string(&format!("key {i}"))?;
            if key.is_empty() {
                return Err(format!("key {i} at byte {at} is empty").into());
            }
            if !keys.insert(key.clone()) {
                return Err(format!("key `{}` at byte {at} appears twice", printable(&key)).into());
            }
            let kind = u32::from_le_bytes(self.array(&key)?);
            let value = self.value(&key, kind)?;
            metadata.push((key, value));
        }
        let alignment = alignment(&metadata)?;
        let mut names = HashSet::new();
        let mut found = Vec::new();
        for i in 0..tensors {
            let tensor = self.tensor(i)?;
            if !names.insert(tensor.name.clone()) {
                return Err(format!("tensor `{}` appears twice", tensor.name).into());
            }
            found.push(tensor);
        }
        let start = self.at.checked_next_multiple_of(alignment).ok_or("the header is too long")?;
        place(&mut found, start, alignment, self.len)?;
        Ok(GgufHeader { version, metadata, tensors: found })
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.fill(what, &mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, what: &str, bytes: &mut [u8]) -> Result<(), String> {
        self.require(what, bytes.len() as u64)?;
        let at = self.at;
        let short = |e| format!("`{}` at byte {at} cannot be read: {e}", printable(what));
        self.reader.read_exact(bytes).map_err(short)?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn require(&self, what: &str, bytes: u64) -> Result<(), String> {
        let left = self.len.saturating_sub(self.at);
        if bytes > left {
            let what = printable(what);
            return Err(format!(
                "`{what}` at byte {} needs {bytes} bytes, but only {left} are left",
                self.at
            ));
        }
        Ok(())
    }

    fn u64(&mut self, what: &str) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// Reads a number of items that have at least `min` bytes each.
    fn count(&mut self, what: &str, max: u64, min: u64) -> Result<u64, String> {
        let at = self.at;
        let count = self.u64(what)?;
        let left = self.len.saturating_sub(self.at);
        if count > max || count.checked_mul(min).is_none_or(|bytes| bytes > left) {
            let what = printable(what);
            return Err(format!(
                "`{what}` at byte {at} is {count}, which exceeds the limit of {max} or the remaining {left} \
                bytes"
            ));
        }
        Ok(count)
    }

    fn string(&mut self, what: &str) -> Result<String, String> {
        let at = self.at;
        utf8(self.bytes(what)?, what, at)
    }

    /// Reads the value of a key. `llama-quantize` cuts texts to [`CUT`] bytes, possibly within a character, which is left
    /// out here.
    fn text(&mut self, key: &str) -> Result<String, String> {
        let at = self.at;
        let mut bytes = self.bytes(key)?;
        if let Err(e) = std::str::from_utf8(&bytes)
            && bytes.len() == CUT
            && e.error_len().is_none()
        {
            bytes.truncate(e.valid_up_to());
        }
        utf8(bytes, key, at)
    }

    /// Reads the bytes of a string, which follow their number.
    fn bytes(&mut self, what: &str) -> Result<Vec<u8>, String> {
        let len = self.count(what, MAX_STRING, 1)?;
        // The allocation is bounded by the remaining bytes of the file.
        let mut bytes = vec![0; len as usize];
        self.fill(what, &mut bytes)?;
        Ok(bytes)
    }

    fn flag(&mut self, what: &str) -> Result<bool, String> {
        let at = self.at;
        match self.array::<1>(what)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(format!("`{}` at byte {at} is {other}; it must be 0 or 1", printable(what))),
        }
    }

    fn value(&mut self, key: &str, kind: u32) -> Result<Value, GgufFault> {
        Ok(match kind {
            kinds::U8 => Value::U8(u8::from_le_bytes(self.array(key)?)),
            kinds::I8 => Value::I8(i8::from_le_bytes(self.array(key)?)),
            kinds::U16 => Value::U16(u16::from_le_bytes(self.array(key)?)),
            kinds::I16 => Value::I16(i16::from_le_bytes(self.array(key)?)),
            kinds::U32 => Value::U32(u32::from_le_bytes(self.array(key)?)),
            kinds::I32 => Value::I32(i32::from_le_bytes(self.array(key)?)),
            kinds::F32 => Value::F32(f32::from_le_bytes(self.array(key)?)),
            kinds::BOOL => Value::Bool(self.flag(key)?),
            kinds::STRING => Value::String(self.text(key)?),
            kinds::ARRAY => Value::Array(self.list(key)?),
            kinds::U64 => Value::U64(self.u64(key)?),
            kinds::I64 => Value::I64(i64::from_le_bytes(self.array(key)?)),
            kinds::F64 => Value::F64(f64::from_le_bytes(self.array(key)?)),
            other => {
                let (key, at) = (printable(key), self.at - 4);
                return Err(format!("`{key}` has unknown type {other} at byte {at}").into());
            }
        })
    }

    fn list(&mut self, key: &str) -> Result<Array, GgufFault> {
        let at = self.at;
        let kind = u32::from_le_bytes(self.array(key)?);
        let min = match kind {
            kinds::U8 | kinds::I8 | kinds::BOOL => 1,
            kinds::U16 | kinds::I16 => 2,
            kinds::U32 | kinds::I32 | kinds::F32 => 4,
            kinds::U64 | kinds::I64 | kinds::F64 | kinds::STRING => 8,
            kinds::ARRAY => {
                return Err(GgufFault::Unread(format!(
                    "`{}` at byte {at} is a list of lists, which is not supported",
                    printable(key)
                )));
            }
            other => {
                return Err(
                    format!("`{}` is a list of unknown type {other} at byte {at}", printable(key)).into()
                );
            }
        };
        let count = self.count(key, MAX_ELEMENTS - self.elements, min)?;
        self.elements += count;
        Ok(match kind {
            kinds::U8 => Array::U8(self.elements(key, count, u8::from_le_bytes)?),
            kinds::I8 => Array::I8(self.elements(key, count, i8::from_le_bytes)?),
            kinds::U16 => Array::U16(self.elements(key, count, u16::from_le_bytes)?),
            kinds::I16 => Array::I16(self.elements(key, count, i16::from_le_bytes)?),
            kinds::U32 => Array::U32(self.elements(key, count, u32::from_le_bytes)?),
            kinds::I32 => Array::I32(self.elements(key, count, i32::from_le_bytes)?),
            kinds::F32 => Array::F32(self.elements(key, count, f32::from_le_bytes)?),
            kinds::U64 => Array::U64(self.elements(key, count, u64::from_le_bytes)?),
            kinds::I64 => Array::I64(self.elements(key, count, i64::from_le_bytes)?),
            kinds::F64 => Array::F64(self.elements(key, count, f64::from_le_bytes)?),
            kinds::BOOL => Array::Bool((0..count).map(|_| self.flag(key)).collect::<Result<_, _>>()?),
            _ => {
                let one = |i: u64| self.string(&format!("{key}[{i}]"));
                Array::String((0..count).map(one).collect::<Result<_, _>>()?)
            }
        })
    }

    fn elements<T, const N: usize>(
        &mut self,
        key: &str,
        count: u64,
        read: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, String> {
        (0..count).map(|_| Ok(read(self.array(key)?))).collect()
    }

    /// Reads the description of a tensor. Its offset is still relative to the start of the data.
    fn tensor(&mut self, i: u64) -> Result<GgufTensor, GgufFault> {
        let at = self.at;
        let name = self.string(&format!("name of tensor {i}"))?;
        let shown = printable(&name);
        if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
            return Err(format!(
                "the name of tensor {i} at byte {at}, `{shown}`, must have 1 to {MAX_NAME} bytes and no \
                control characters"
            )
            .into());
        }
        let dims = u32::from_le_bytes(self.array(&name)?) as usize;
        if dims == 0 || dims > MAX_DIMS {
            let reason = format!(
                "tensor `{shown}` at byte {at} has {dims} dimensions; it must have 1 to \
                {MAX_DIMS}"
            );
            return Err(reason.into());
        }
        let mut shape = Vec::with_capacity(dims);
        for _ in 0..dims {
            let dim = self.u64(&name)?;
            let fits = usize::try_from(dim).ok().filter(|dim| *dim > 0 && *dim <= isize::MAX as usize);
            shape.push(
                fits.ok_or_else(|| format!("tensor `{shown}` at byte {at} has an invalid dimension, {dim}"))?,
            );
        }
        shape.reverse();
        let type_at = self.at;
        let id = u32::from_le_bytes(self.array(&name)?);
        let kind = block_type_of(id).ok_or_else(|| match unread_type(id) {
            Some(kind) => GgufFault::Unread(format!(
                "tensor `{shown}` has the type {kind} at byte {type_at}, which is not supported"
            )),
            None => format!("tensor `{shown}` has unknown type {id} at byte {type_at}").into(),
        })?;
        let columns = shape[dims - 1];
        let row = kind.row_bytes(columns).ok_or_else(|| {
            format!(
                "tensor `{shown}` at byte {at} has rows of {columns} values, which is not a multiple of the \
                block size {}",
                kind.elements
            )
        })?;
        let bytes = shape[..dims - 1].iter().try_fold(row, |bytes, &dim| bytes.checked_mul(dim));
        let bytes = bytes.filter(|_| shape.iter().try_fold(1_usize, |n, &dim| n.checked_mul(dim)).is_some());
        let bytes =
            bytes.ok_or_else(|| format!("tensor `{shown}` at byte {at} exceeds the address space"))? as u64;
        let offset = self.u64(&name)?;
        Ok(GgufTensor { name, shape, kind, offset, bytes, part: 0 })
    }
}

fn utf8(bytes: Vec<u8>, what: &str, at: u64) -> Result<String, String> {
    String::from_utf8(bytes).map_err(|_| format!("`{}` at byte {at} is not valid UTF-8", printable(what)))
}

fn alignment(metadata: &[(String, Value)]) -> Result<u64, String> {
    let Some((_, value)) = metadata.iter().find(|(key, _)| key == ALIGNMENT_KEY) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match value {
        Value::U32(v) if v.is_power_of_two() => Ok(u64::from(*v)),
        other => Err(format!("`{ALIGNMENT_KEY}` is {other:?}; it must be a power of two of type u32")),
    }
}

/// Checks that tensors follow each other in the order of their descriptions, each at a multiple of the alignment, and
/// that all are within the file. Makes their offsets relative to the start of the file.
fn place(tensors: &mut [GgufTensor], start: u64, alignment: u64, len: u64) -> Result<(), String> {
    let mut expected = 0_u64;
    for tensor in tensors {
        if tensor.offset != expected {
            return Err(format!(
                "the offset of tensor `{}` is {}, expected {expected}: its data would begin at byte {} \
                of the file instead of {}",
                tensor.name,
                tensor.offset,
                start.saturating_add(tensor.offset),
                start.saturating_add(expected)
            ));
        }
        let end = expected.checked_add(tensor.bytes);
        let placed = end.and_then(|end| start.checked_add(end)).filter(|end| *end <= len);
        let (Some(end), Some(_)) = (end, placed) else {
            return Err(format!(
                "tensor `{}` needs {} bytes from byte {}, but the file has only {len} bytes",
                tensor.name,
                tensor.bytes,
                start.saturating_add(expected)
            ));
        };
        tensor.offset = start + expected;
        expected = end.checked_next_multiple_of(alignment).ok_or("the data is too long")?;
    }
    Ok(())
}
