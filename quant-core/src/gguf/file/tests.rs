//! Files that are written and read back, and malicious files.

use std::sync::Arc;

use proptest::prelude::*;

use super::read::GgufHeader;
use super::value::{Array, Value};
use super::write::{Described, header};
use super::{GgufArchive, GgufFault};
use crate::TensorSink;
use crate::blocks::{BLOCK_TYPES, F16, F32, Q4_K, Q6_K};
use crate::checkpoint::{Archive, CheckpointWriter, Origin, Resume, WriteOptions};

fn entries() -> Vec<(String, Value)> {
    let lists = Value::Array(Array::String(vec!["a".into(), String::new(), "ü".into()]));
    [
        ("u8", Value::U8(3)),
        ("i8", Value::I8(-3)),
        ("u16", Value::U16(300)),
        ("i16", Value::I16(-300)),
        ("u32", Value::U32(7)),
        ("i32", Value::I32(-7)),
        ("f32", Value::F32(0.5)),
        ("bool", Value::Bool(true)),
        ("string", Value::string("text")),
        ("list", lists),
        ("flags", Value::Array(Array::Bool(vec![true, false]))),
        ("floats", Value::Array(Array::F32(vec![1.0, -0.0]))),
        ("u64", Value::U64(u64::MAX)),
        ("i64", Value::I64(i64::MIN)),
        ("f64", Value::F64(1e300)),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .to_vec()
}

fn file() -> Vec<u8> {
    let tensors = [
        Described { name: "a", shape: &[3, 256], kind: &Q4_K },
        Described { name: "b", shape: &[5], kind: &F32 },
        Described { name: "c", shape: &[2, 3, 4], kind: &F16 },
    ];
    let (mut bytes, offsets) = header(&entries(), &tensors).unwrap();
    bytes.resize(*offsets.last().unwrap() as usize, 0);
    bytes
}

fn parse(bytes: &[u8]) -> Result<GgufHeader, GgufFault> {
    GgufHeader::parse(bytes, bytes.len() as u64)
}

#[test]
fn what_is_written_is_read_back() {
    let bytes = file();
    let header = parse(&bytes).unwrap();
    assert_eq!((header.version, header.metadata), (3, entries()));
    let shapes: Vec<&[usize]> = header.tensors.iter().map(|t| t.shape.as_slice()).collect();
    assert_eq!(shapes, [&[3, 256][..], &[5], &[2, 3, 4]]);
    let ends: Vec<u64> = header.tensors.iter().map(|t| t.offset + t.bytes).collect();
    assert!(header.tensors.iter().all(|t| t.offset % 32 == 0));
    assert!(ends[2] <= bytes.len() as u64 && bytes.len().is_multiple_of(32));
}

/// `llama-quantize` cuts the paths that it records to 127 bytes, wherever a character begins.
#[test]
fn texts_that_are_cut_within_a_character_are_read() {
    let path = "é".repeat(80);
    let with = |text: &[u8]| {
        let mut bytes =
            header(&[("quantize.imatrix.file".into(), Value::string("x".repeat(text.len())))], &[])
                .unwrap()
                .0;
        let at = bytes.windows(text.len()).position(|w| w.iter().all(|b| *b == b'x')).unwrap();
        bytes[at..at + text.len()].copy_from_slice(text);
        parse(&bytes).map(|header| header.metadata[0].1.clone())
    };
    assert_eq!(with(&path.as_bytes()[..127]), Ok(Value::string("é".repeat(63))));
    // Any other text that is not valid is damaged.
    for text in [&path.as_bytes()[..125], &[&path.as_bytes()[..126], &[0xff]].concat()] {
        assert!(with(text).unwrap_err().to_string().contains("is not valid UTF-8"));
    }
}

#[test]
fn a_file_that_is_cut_anywhere_is_refused() {
    let bytes = file();
    let last = parse(&bytes).unwrap().tensors.last().map(|t| t.offset + t.bytes).unwrap() as usize;
    for len in 0..last {
        let message = parse(&bytes[..len]).unwrap_err().to_string();
        assert!(!message.is_empty(), "{len}");
    }
}

/// A file is recognized as this program's own until anything in it changes.
#[test]
fn a_seal_fits_only_the_file_that_was_written() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("a.gguf");
    let archive = GgufArchive { file_name: "a.gguf".into(), metadata: entries(), in_parts: false };
    let tensors = [("a", &Q4_K, &[3, 256][..]), ("b", &F32, &[5]), ("c", &F16, &[2, 3, 4])];
    let specs = tensors.iter().map(|(name, kind, shape)| GgufArchive::spec(name, kind, shape).unwrap());
    let options = || WriteOptions {
        archive: Arc::new(archive.clone()),
        single_file: true,
        force: true,
        ..WriteOptions::default()
    };
    let write = |first: u8| {
        let mut writer = CheckpointWriter::create(&path, specs.clone().collect(), options())?;
        for spec in specs.clone() {
            writer.write(&spec.name, 0, &vec![first; spec.info.byte_len() as usize])?;
        }
        writer.publish()
    };
    let written = |first| write(first).map(|_| std::fs::read(&path).unwrap());
    let bytes = written(1).unwrap();
    assert_eq!(archive.origin(&path).unwrap(), Origin::Own);
    let origin = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        archive.origin(&path).unwrap()
    };
    // A byte of the metadata, of a tensor's description, of the seal and of the last tensor.
    let at = |text: &str| bytes.windows(text.len()).position(|part| part == text.as_bytes()).unwrap();
    let last = parse(&bytes).unwrap().tensors[2].offset as usize;
    for place in [at("text"), at("quant.blake3") + 12 + 4 + 8, last + 7] {
        let mut changed = bytes.clone();
        changed[place] ^= 1;
        assert_eq!(origin(&changed), Origin::Changed, "byte {place}");
        let error = write(2).unwrap_err();
        assert!(error.to_string().contains("was modified after quant wrote it"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), changed);
    }
    assert_eq!(origin(&[&bytes[..], &[0; 32]].concat()), Origin::Changed);
    // Programs that rewrite a file keep unknown metadata: here with other types, and with further entries.
    let found = parse(&bytes).unwrap();
    let rewritten = |metadata: &[(String, Value)], kind| {
        let described = [("a", kind, &[3, 256][..]), ("b", &F32, &[5]), ("c", &F16, &[2, 3, 4])];
        let described = described.map(|(name, kind, shape)| Described { name, shape, kind });
        let (mut rewritten, offsets) = header(metadata, &described).unwrap();
        rewritten.resize(*offsets.last().unwrap() as usize, 1);
        rewritten
    };
    assert_eq!(origin(&rewritten(&found.metadata, &Q6_K)), Origin::Changed);
    let mut more = found.metadata.clone();
    more.push(("quantize.imatrix.file".to_owned(), Value::string("x")));
    assert_eq!(origin(&rewritten(&more, &Q4_K)), Origin::Changed);
    more.retain(|(key, _)| !key.starts_with("quant."));
    assert_eq!(origin(&rewritten(&more, &Q4_K)), Origin::Foreign);
    assert_eq!(origin(b"GGUF of somebody"), Origin::Foreign);
    assert!(write(2).unwrap_err().to_string().contains("was not written by quant"));
    // The file itself is replaced, and the result does not depend on what was there.
    std::fs::write(&path, &bytes).unwrap();
    let other = written(2).unwrap();
    assert!(other != bytes && archive.origin(&path).unwrap() == Origin::Own);
    assert!(written(1).unwrap() == bytes);
    // A run that ends after the file is sealed and before it has its name is resumed with all tensors.
    std::fs::remove_file(&path).unwrap();
    let create = |resume| {
        CheckpointWriter::create(&path, specs.clone().collect(), WriteOptions { resume, ..options() })
            .unwrap()
    };
    let mut writer = create(Resume::Never);
    for spec in specs.clone() {
        writer.write(&spec.name, 0, &vec![1; spec.info.byte_len() as usize]).unwrap();
    }
    drop(writer.prepare(&crate::Silent, &crate::CancelToken::new()).unwrap());
    let writer = create(Resume::Required);
    assert_eq!(writer.notes(), ["resumed: 3 of 3 tensors of the output are complete"]);
    writer.publish().unwrap();
    assert!(std::fs::read(&path).unwrap() == bytes);
}

fn crafted(tensors: u64, entries: u64, rest: &[u8]) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend(tensors.to_le_bytes());
    bytes.extend(entries.to_le_bytes());
    bytes.extend_from_slice(rest);
    bytes.resize(bytes.len() + 128, 0);
    bytes
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn tensor(name: &str, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut bytes = text(name);
    bytes.extend((dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|d| bytes.extend(d.to_le_bytes()));
    bytes.extend(kind.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes
}

#[test]
fn headers_that_mislead_are_refused_with_field_and_offset() {
    let entry = |key: &str, kind: u32, value: &[u8]| [&text(key)[..], &kind.to_le_bytes(), value].concat();
    let list = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
    let one = |entry: Vec<u8>| crafted(0, 1, &entry);
    let two = tensor("t", &[4], 0, 0);
    for (bytes, expected) in [
        (b"GGML\x03\0\0\0".to_vec(), "does not begin with `GGUF`"),
        (b"GGUF\x01\0\0\0".to_vec(), "`version` at byte 4 is 1"),
        (b"GGUF\0\0\0\x03".to_vec(), "big-endian"),
        (crafted(u64::MAX, 0, &[]), "`tensor_count` at byte 8"),
        (crafted(1 << 40, 0, &[]), "`tensor_count` at byte 8"),
        (crafted(0, u64::MAX, &[]), "`metadata_kv_count` at byte 16"),
        (one(entry("", 4, &[0; 4])), "key 0 at byte 24 is empty"),
        (one(entry("k", 13, &[0; 8])), "`k` has unknown type 13"),
        (one(entry("k", 7, &[2])), "`k` at byte 37 is 2; it must be 0 or 1"),
        (one(entry("k", 8, &u64::MAX.to_le_bytes())), "`k` at byte 37"),
        (one(entry("k", 9, &list(4, u64::MAX))), "`k` at byte 41"),
        (one(entry("k", 9, &list(0, 1 << 23))), "`k` at byte 41"),
        (one(entry("k", 9, &list(9, 1))), "a list of lists"),
        (one(entry("k", 9, &list(77, 1))), "a list of unknown type 77"),
        (one(entry("k", 8, &[&2_u64.to_le_bytes()[..], &[0xff, 0xfe]].concat())), "not valid UTF-8"),
        (crafted(0, 2, &[entry("k", 0, &[1]), entry("k", 0, &[1])].concat()), "`k` at byte 38 appears twice"),
        (one(entry("general.alignment", 4, &3_u32.to_le_bytes())), "must be a power of two"),
        (one(entry("general.alignment", 4, &0_u32.to_le_bytes())), "must be a power of two"),
        (one(entry("general.alignment", 10, &32_u64.to_le_bytes())), "of type u32"),
        (crafted(1, 0, &tensor("", &[4], 0, 0)), "the name of tensor 0"),
        (crafted(1, 0, &tensor(&"x".repeat(64), &[4], 0, 0)), "must have 1 to 63 bytes"),
        (crafted(1, 0, &tensor("a\nb", &[4], 0, 0)), "the name of tensor 0"),
        (crafted(1, 0, &tensor("t", &[], 0, 0)), "0 dimensions"),
        (crafted(1, 0, &tensor("t", &[1, 1, 1, 1, 1], 0, 0)), "5 dimensions"),
        (crafted(1, 0, &tensor("t", &[0], 0, 0)), "an invalid dimension, 0"),
        (crafted(1, 0, &tensor("t", &[u64::MAX], 0, 0)), "an invalid dimension"),
        (crafted(1, 0, &tensor("t", &[1 << 31, 1 << 31, 1 << 31], 0, 0)), "exceeds the address space"),
        (crafted(1, 0, &tensor("t", &[48], 2, 0)), "not a multiple of the block size 32"),
        (crafted(1, 0, &tensor("t", &[256], 19, 0)), "the type IQ1_S"),
        (crafted(1, 0, &tensor("t", &[4], 4, 0)), "unknown type 4"),
        (crafted(1, 0, &tensor("t", &[4], 0, 32)), "is 32, expected 0"),
        (crafted(1, 0, &tensor("t", &[1 << 20], 0, 0)), "the file has"),
        (crafted(2, 0, &[two.clone(), two.clone()].concat()), "`t` appears twice"),
        (crafted(2, 0, &[two, tensor("u", &[4], 0, 0)].concat()), "is 0, expected 32"),
    ] {
        let message = parse(&bytes).unwrap_err().to_string();
        assert!(message.contains(expected), "{message} does not say {expected}");
    }
}

#[test]
fn unsupported_files_are_distinguished_from_damaged_ones() {
    let is_unread = |bytes: &[u8]| matches!(parse(bytes).unwrap_err(), GgufFault::Unread(_));
    assert!(is_unread(b"GGUF\0\0\0\x03"));
    assert!(is_unread(b"GGUF\x01\0\0\0"));
    assert!(is_unread(&crafted(1, 0, &tensor("t", &[256], 19, 0))));
    // Tensor names come from the file, so their words must not affect the kind of the fault.
    assert!(!is_unread(&crafted(1, 0, &tensor("which is not read", &[4], 4, 0))));
    assert!(!is_unread(&crafted(1, 0, &tensor("t", &[1, 1, 1, 1, 1], 0, 0))));
}

proptest! {
    #[test]
    fn changed_bytes_are_refused_or_read(changes in proptest::collection::vec((0_usize..4096, any::<u8>()), 1..4)) {
        let mut bytes = file();
        let head = bytes.len();
        for (at, with) in changes {
            bytes[at % head] = with;
        }
        if let Ok(header) = parse(&bytes) {
            for tensor in &header.tensors {
                prop_assert!(tensor.offset + tensor.bytes <= bytes.len() as u64);
            }
        }
    }

    #[test]
    fn layouts_are_read_as_they_were_made(
        shapes in proptest::collection::vec((0_usize..BLOCK_TYPES.len(), 1_usize..5, 1_usize..4), 1..8),
        alignment in 0_u32..8,
    ) {
        let names: Vec<String> = (0..shapes.len()).map(|i| format!("tensor.{i}")).collect();
        let shapes: Vec<(usize, Vec<usize>)> =
            shapes.iter().map(|&(kind, rows, blocks)| (kind, vec![rows, blocks * 256])).collect();
        let described: Vec<Described<'_>> = names
            .iter()
            .zip(&shapes)
            .map(|(name, (kind, shape))| Described { name, shape, kind: BLOCK_TYPES[*kind] })
            .collect();
        let metadata = vec![("general.alignment".to_owned(), Value::U32(1 << alignment))];
        let (mut bytes, offsets) = header(&metadata, &described).unwrap();
        bytes.resize(*offsets.last().unwrap() as usize, 0);
        let back = parse(&bytes).unwrap();
        for ((tensor, described), offset) in back.tensors.iter().zip(&described).zip(&offsets) {
            prop_assert_eq!(&tensor.name, described.name);
            prop_assert_eq!(&tensor.shape, described.shape);
            prop_assert_eq!((tensor.kind, tensor.offset), (described.kind, *offset));
        }
    }
}
