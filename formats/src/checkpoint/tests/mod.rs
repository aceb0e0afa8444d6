//! Tests of reading and writing checkpoints.

mod directories;
mod faults;
mod headers;
mod memory;
mod round_trip;
mod shards;
mod writing;

use std::path::Path;

use serde_json::{Value, json};

use super::header::{Header, Limits, checked_len};
use super::{CheckpointWriter, Dtype, HeaderError, TensorSink, TensorSource, TensorSpec};
use crate::Result;

fn file(header: impl AsRef<[u8]>, data: &[u8]) -> Vec<u8> {
    let header = header.as_ref();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header);
    bytes.extend_from_slice(data);
    bytes
}

/// A file of U8 vectors, whose data together are the bytes 0, 1, 2 …
fn vectors(lengths: &[(&str, usize)]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, len) in lengths {
        let entry = json!({ "dtype": "U8", "shape": [len], "data_offsets": [end, end + len] });
        header.insert((*name).to_owned(), entry);
        end += len;
    }
    let data: Vec<u8> = (0..end).map(|i| i as u8).collect();
    file(Value::Object(header).to_string(), &data)
}

/// The checks of [`Header::read`] without a file.
fn parse_with(bytes: &[u8], limits: Limits) -> Result<Header, HeaderError> {
    let len = bytes.len() as u64;
    let Some((prefix, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(HeaderError::TooShort(len));
    };
    let header = checked_len(*prefix, len, limits)?;
    Header::parse(&rest[..header], len, limits)
}

fn parse(bytes: &[u8]) -> Result<Header, HeaderError> {
    parse_with(bytes, Limits::default())
}

fn content(spec: &TensorSpec) -> Vec<u8> {
    let seed = spec.name.bytes().fold(7u32, |h, b| h.wrapping_mul(31).wrapping_add(u32::from(b)));
    (0..spec.info.byte_len())
        .map(|i| (seed.wrapping_add(i as u32).wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect()
}

fn write_tensors(writer: &mut CheckpointWriter, specs: &[TensorSpec]) -> Result<()> {
    for spec in specs {
        if writer.is_complete(&spec.name) {
            continue;
        }
        let bytes = content(spec);
        let (first, second) = bytes.split_at(bytes.len() / 2);
        writer.write(&spec.name, 0, first)?;
        writer.write(&spec.name, first.len() as u64, second)?;
    }
    Ok(())
}

fn assert_holds(source: &dyn TensorSource, specs: &[TensorSpec]) {
    assert_eq!(source.names().len(), specs.len());
    for spec in specs {
        assert_eq!(source.info(&spec.name), Some(&spec.info), "{}", spec.name);
        assert_eq!(source.read(&spec.name).unwrap(), content(spec), "{}", spec.name);
    }
}

fn snapshot(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if entry.file_type().unwrap().is_dir() {
            files.extend(snapshot(&entry.path()).into_iter().map(|(n, b)| (format!("{name}/{n}"), b)));
        } else {
            files.push((name, std::fs::read(entry.path()).unwrap()));
        }
    }
    files.sort();
    files
}

fn spec(name: &str, dtype: Dtype, shape: &[usize]) -> TensorSpec {
    TensorSpec::new(name, dtype, shape)
}
