//! The header of a safetensors file, validated against the file.
//!
//! A file is an 8-byte little-endian length `n`, `n` bytes of JSON, and the data that the JSON divides among tensors
//! without gaps or overlap. The parser is strict, because lenient parsers let two implementations read two different
//! models from one file. No declared length is allocated before it is compared with the file.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::fs::File;
use std::path::Path;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::input_file::{PLACEHOLDER_BYTES, placeholder, read_exact_at};
use super::names::{name_fault, printable};
use super::{Dtype, HeaderError, OpaqueDtype, TensorInfo};
use crate::{Error, Result, allocate};

pub(crate) const MAX_RANK: usize = 8;

/// Limits of a header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Bytes of JSON.
    pub(crate) header_bytes: u64,
    /// Number of tensors.
    pub(crate) tensors: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { header_bytes: 32 << 20, tensors: 1_000_000 }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Located {
    pub(crate) info: TensorInfo,
    /// Counted from the start of the file.
    pub(crate) offset: u64,
}

/// A header that passed all checks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) tensors: BTreeMap<String, Located>,
    /// `__metadata__`, empty if absent.
    pub(crate) metadata: BTreeMap<String, String>,
}

impl Header {
    /// Reads and checks the header of an open file.
    ///
    /// # Errors
    /// [`Error::Safetensors`] for a violated rule, [`Error::Io`] when it cannot be read.
    pub(crate) fn read(file: &File, path: &Path) -> Result<Self> {
        let broken = |fault| Error::Safetensors { path: path.to_owned(), source: Box::new(fault) };
        let file_len = file.metadata().map_err(|e| Error::io("read", path, e))?.len();
        if file_len < 8 {
            return Err(broken(HeaderError::TooShort(file_len)));
        }
        let mut prefix = [0; 8];
        read_exact_at(file, path, 0, &mut prefix)?;
        let limits = Limits::default();
        let len = checked_len(prefix, file_len, limits).map_err(|fault| {
            let mut start = vec![0; file_len.min(PLACEHOLDER_BYTES as u64) as usize];
            let found = read_exact_at(file, path, 0, &mut start).ok().and_then(|()| placeholder(&start));
            broken(found.map_or(fault, HeaderError::Placeholder))
        })?;
        let mut json = allocate::zeros(len, format_args!("the header of {}", path.display()))?;
        read_exact_at(file, path, 8, &mut json)?;
        Self::parse(&json, file_len, limits).map_err(broken)
    }

    /// Checks the JSON of a header whose file has `file_len` bytes.
    pub(crate) fn parse(json: &[u8], file_len: u64, limits: Limits) -> Result<Self, HeaderError> {
        if json.first() != Some(&b'{') {
            return Err(HeaderError::NotAnObject { found: json.first().copied() });
        }
        let text = std::str::from_utf8(json).map_err(|e| HeaderError::NotUtf8 { offset: e.valid_up_to() })?;
        let mut collected = Collected::new(limits);
        let mut deserializer = serde_json::Deserializer::from_str(text);
        let outcome = (&mut collected).deserialize(&mut deserializer).and_then(|()| deserializer.end());
        if let Err(error) = outcome {
            return Err(collected.explain(&error));
        }
        let data_start = 8 + json.len() as u64;
        check_ranges(&collected.tensors, data_start, file_len)?;
        let mut tensors = collected.tensors;
        for located in tensors.values_mut() {
            // Within the file, see `check_ranges`.
            located.offset += data_start;
        }
        Ok(Self { tensors, metadata: collected.metadata.unwrap_or_default() })
    }
}

/// Returns the header's length after checking that it is within the file and the limit.
pub(crate) fn checked_len(prefix: [u8; 8], file_len: u64, limits: Limits) -> Result<usize, HeaderError> {
    let declared = u64::from_le_bytes(prefix);
    let available = file_len.saturating_sub(8);
    if declared > available {
        return Err(HeaderError::HeaderPastEnd { declared, available });
    }
    let too_large = HeaderError::HeaderTooLarge { declared, limit: limits.header_bytes };
    if declared > limits.header_bytes {
        return Err(too_large);
    }
    usize::try_from(declared).map_err(|_| too_large)
}

fn check_ranges(
    tensors: &BTreeMap<String, Located>,
    data_start: u64,
    file_len: u64,
) -> Result<(), HeaderError> {
    let mut by_place: Vec<(u64, u64, &str)> = tensors
        .iter()
        .map(|(name, located)| (located.offset, located.offset + located.info.byte_len(), name.as_str()))
        .collect();
    by_place.sort_unstable();
    let mut covered = 0;
    let mut last = "";
    for &(begin, end, name) in &by_place {
        if begin < covered {
            return Err(HeaderError::Overlap {
                first: last.to_owned(),
                first_end: covered,
                second: name.to_owned(),
                second_begin: begin,
            });
        }
        if begin > covered {
            return Err(HeaderError::Hole { before: name.to_owned(), begin: covered, end: begin });
        }
        (covered, last) = (end, name);
    }
    let need = data_start.saturating_add(covered);
    if need > file_len {
        let available = file_len.saturating_sub(data_start);
        let tensor = by_place.iter().find(|t| t.1 > available).map_or(last, |t| t.2).to_owned();
        return Err(HeaderError::PastEnd { tensor, have: file_len, need });
    }
    if need < file_len {
        return Err(HeaderError::TrailingBytes { have: file_len, need });
    }
    Ok(())
}

/// The state of reading a header. `failure` carries a typed error through serde, whose errors are text only; `inside`
/// tells where serde's own errors occurred.
struct Collected {
    limits: Limits,
    tensors: BTreeMap<String, Located>,
    metadata: Option<BTreeMap<String, String>>,
    failure: Option<HeaderError>,
    inside: Inside,
}

enum Inside {
    Header,
    Metadata,
    Tensor(String),
}

impl Collected {
    fn new(limits: Limits) -> Self {
        Self { limits, tensors: BTreeMap::new(), metadata: None, failure: None, inside: Inside::Header }
    }

    fn explain(self, error: &serde_json::Error) -> HeaderError {
        if let Some(failure) = self.failure {
            return failure;
        }
        let reason = printable(&error.to_string());
        match self.inside {
            Inside::Metadata if error.is_data() => HeaderError::BadMetadata { reason },
            Inside::Tensor(tensor) if error.is_data() => HeaderError::BadEntry { tensor, reason },
            _ => HeaderError::Json { reason },
        }
    }

    fn add(&mut self, name: String, raw: RawEntry) -> Result<(), HeaderError> {
        if self.tensors.len() >= self.limits.tensors {
            return Err(HeaderError::TooManyTensors { limit: self.limits.tensors });
        }
        let located = raw.check(&name)?;
        match self.tensors.entry(name) {
            Entry::Occupied(old) => Err(HeaderError::DuplicateTensor { tensor: old.key().clone() }),
            Entry::Vacant(place) => {
                place.insert(located);
                Ok(())
            }
        }
    }
}

impl<'de> DeserializeSeed<'de> for &mut Collected {
    type Value = ();

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Collected {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            let added = if name == "__metadata__" {
                self.inside = Inside::Metadata;
                let Metadata(pairs) = map.next_value()?;
                match self.metadata.replace(pairs) {
                    Some(_) => Err(HeaderError::DuplicateMetadata),
                    None => Ok(()),
                }
            } else if let Some(reason) = name_fault(&name) {
                Err(HeaderError::BadName { name: printable(&name), reason })
            } else {
                self.inside = Inside::Tensor(name.clone());
                let raw = map.next_value()?;
                self.add(name, raw)
            };
            self.inside = Inside::Header;
            if let Err(failure) = added {
                self.failure = Some(failure);
                return Err(de::Error::custom("refused"));
            }
        }
        Ok(())
    }
}

struct Metadata(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Metadata;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of string values")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                let mut pairs = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if pairs.contains_key(&key) {
                        return Err(de::Error::custom(format_args!("`{key}` appears twice")));
                    }
                    pairs.insert(key, value);
                }
                Ok(Metadata(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

struct RawEntry {
    dtype: String,
    rank: usize,
    shape: Vec<u64>,
    begin: u64,
    end: u64,
}

impl RawEntry {
    fn check(self, name: &str) -> Result<Located, HeaderError> {
        let tensor = || name.to_owned();
        let Self { dtype, rank, shape, begin, end } = self;
        // The offsets give the length of an unknown type.
        let opaque = || OpaqueDtype::new(&dtype, end.saturating_sub(begin)).map(Dtype::Opaque);
        let Some(dtype) = Dtype::from_name(&dtype).or_else(opaque) else {
            return Err(HeaderError::UnknownDtype { tensor: tensor(), dtype: printable(&dtype) });
        };
        if rank > MAX_RANK {
            return Err(HeaderError::RankTooHigh { tensor: tensor(), rank, limit: MAX_RANK });
        }
        let Some((dims, elements)) = checked_elements(&shape, dtype) else {
            return Err(HeaderError::SizeOverflow { tensor: tensor(), shape });
        };
        let bytes = if elements == 0 { Some(0) } else { dtype.byte_len(elements) };
        let Some(expected) = bytes else {
            return Err(HeaderError::NotWholeBytes { tensor: tensor(), dtype, shape });
        };
        if begin > end {
            return Err(HeaderError::OffsetsReversed { tensor: tensor(), begin, end });
        }
        let got = end - begin;
        if got != expected {
            return Err(HeaderError::SizeMismatch { tensor: tensor(), dtype, shape, expected, got });
        }
        Ok(Located { info: TensorInfo { dtype, shape: dims }, offset: begin })
    }
}

/// Dimensions and number of elements; `None` on overflow. Zeros count as ones in this check, because code that
/// multiplies strides would overflow as well.
fn checked_elements(shape: &[u64], dtype: Dtype) -> Option<(Vec<usize>, u64)> {
    let mut dims = Vec::with_capacity(shape.len());
    let mut elements = 1u64;
    for &dim in shape {
        dims.push(usize::try_from(dim).ok()?);
        elements = elements.checked_mul(dim.max(1))?;
    }
    let bytes = elements.checked_mul(dtype.size() as u64)?;
    usize::try_from(bytes).ok()?;
    Some((dims, if shape.contains(&0) { 0 } else { elements }))
}

impl<'de> Deserialize<'de> for RawEntry {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Implemented by hand, because a derived implementation would also accept an array in place of the object.
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = RawEntry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with dtype, shape and data_offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawEntry, A::Error> {
                let (mut dtype, mut dims, mut offsets) = (None, None, None);
                while let Some(key) = map.next_key::<String>()? {
                    let again = match key.as_str() {
                        "dtype" => dtype.replace(map.next_value::<String>()?).is_some(),
                        "shape" => dims.replace(map.next_value::<Dims>()?).is_some(),
                        "data_offsets" => offsets.replace(map.next_value::<Dims>()?).is_some(),
                        _ => return Err(de::Error::custom(format_args!("unknown field `{key}`"))),
                    };
                    if again {
                        return Err(de::Error::custom(format_args!("field `{key}` appears twice")));
                    }
                }
                let dtype = dtype.ok_or_else(|| de::Error::missing_field("dtype"))?;
                let Dims { rank, shape } = dims.ok_or_else(|| de::Error::missing_field("shape"))?;
                let offsets = offsets.ok_or_else(|| de::Error::missing_field("data_offsets"))?;
                let [begin, end] = offsets.shape[..] else {
                    return Err(de::Error::invalid_length(offsets.rank, &"the two `data_offsets`"));
                };
                Ok(RawEntry { dtype, rank, shape, begin, end })
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

/// A list of numbers: the first [`MAX_RANK`] are kept, and all are counted.
struct Dims {
    rank: usize,
    shape: Vec<u64>,
}

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Dims;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of integers")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Dims, A::Error> {
                let mut shape = Vec::new();
                while shape.len() < MAX_RANK {
                    match seq.next_element()? {
                        Some(dim) => shape.push(dim),
                        None => break,
                    }
                }
                let mut rank = shape.len();
                while rank >= MAX_RANK && seq.next_element::<IgnoredAny>()?.is_some() {
                    rank += 1;
                }
                Ok(Dims { rank, shape })
            }
        }
        deserializer.deserialize_seq(List)
    }
}
