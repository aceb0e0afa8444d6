//! Files that each violate one rule, and random files.

use proptest::prelude::*;

use super::{file, parse, parse_with, vectors};
use crate::checkpoint::header::{Limits, Located};
use crate::checkpoint::{Dtype, HeaderError};

/// A header with one F32 tensor of this shape and these offsets.
fn one(shape: &str, offsets: &str) -> String {
    format!(r#"{{"t":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
}

fn named(name: &str) -> Vec<u8> {
    let name = serde_json::to_string(name).unwrap();
    file(format!(r#"{{{name}:{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#), &[0])
}

/// A file with two U8 tensors at these offsets, and `data` bytes after its header.
fn two(a: (u64, u64), b: (u64, u64), data: usize) -> Vec<u8> {
    let entry = |(begin, end): (u64, u64)| {
        format!(r#"{{"dtype":"U8","shape":[{}],"data_offsets":[{begin},{end}]}}"#, end - begin)
    };
    file(format!(r#"{{"a":{},"b":{}}}"#, entry(a), entry(b)), &vec![0; data])
}

macro_rules! refused {
    ($bytes:expr, $variant:pat, $($message:expr),+) => {{
        let error = parse(&$bytes).expect_err(stringify!($variant));
        assert!(matches!(error, $variant), "{error:?} is not {}", stringify!($variant));
        let message = error.to_string();
        $(assert!(message.contains($message), "{message:?} lacks {:?}", $message);)+
        assert!(!message.chars().any(char::is_control), "{message:?}");
    }};
}

#[test]
fn every_rule_has_its_error() {
    use HeaderError as E;
    const X: &str = r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    const Y: &str = r#"{"dtype":"U8","shape":[1],"data_offsets":[1,2]}"#;

    refused!(*b"", E::TooShort(0), "0 bytes");
    refused!(*b"1234567", E::TooShort(7), "7 bytes");
    for declared in [4u64, 1 << 20, 1 << 63, u64::MAX] {
        let mut bytes = declared.to_le_bytes().to_vec();
        bytes.extend_from_slice(b"{}x");
        refused!(bytes, E::HeaderPastEnd { available: 3, .. }, &declared.to_string());
    }
    refused!(file("", b""), E::NotAnObject { found: None }, "empty");
    refused!(file(" {}", b""), E::NotAnObject { found: Some(b' ') }, "0x20");
    refused!(file("[]", b""), E::NotAnObject { .. }, "0x5b");
    refused!(file(b"{\"\xff\":1}", b""), E::NotUtf8 { offset: 2 }, "byte 2");
    refused!(file("{", b""), E::Json { .. }, "JSON");
    refused!(file("{}\0\0", b""), E::Json { .. }, "JSON");
    refused!(file("{}{}", b""), E::Json { .. }, "JSON");
    refused!(file(format!(r#"{{"a":{}"#, "[".repeat(100_000)), b""), E::BadEntry { .. }, "`a`");
    refused!(file(format!(r#"{{"a":{{"shape":{}"#, "[".repeat(100_000)), b""), E::BadEntry { .. }, "`a`");

    refused!(file(format!(r#"{{"a":{X},"a":{X}}}"#), &[0]), E::DuplicateTensor { .. }, "`a`", "twice");
    refused!(file(format!(r#"{{"a":{X},"a":{Y}}}"#), &[0; 2]), E::DuplicateTensor { .. }, "`a`");
    refused!(file(format!(r#"{{"a":{X},"\u0061":{Y}}}"#), &[0; 2]), E::DuplicateTensor { .. }, "`a`");
    refused!(file(r#"{"__metadata__":{},"__metadata__":{}}"#, b""), E::DuplicateMetadata, "twice");
    refused!(file(r#"{"__metadata__":{"a":1}}"#, b""), E::BadMetadata { .. }, "integer `1`");
    refused!(file(r#"{"__metadata__":[]}"#, b""), E::BadMetadata { .. }, "sequence");
    refused!(file(r#"{"__metadata__":null}"#, b""), E::BadMetadata { .. }, "null");
    refused!(file(r#"{"__metadata__":{"k":"1","k":"1"}}"#, b""), E::BadMetadata { .. }, "`k` appears twice");

    refused!(file(r#"{"a":null}"#, b""), E::BadEntry { .. }, "`a`");
    refused!(file(r#"{"a":["U8",[1],[0,1]]}"#, &[0]), E::BadEntry { .. }, "`a`");
    refused!(file(r#"{"a":{"shape":[],"data_offsets":[0,1]}}"#, &[0]), E::BadEntry { .. }, "dtype");
    refused!(file(r#"{"a":{"dtype":"U8","data_offsets":[0,1]}}"#, &[0]), E::BadEntry { .. }, "shape");
    refused!(file(r#"{"a":{"dtype":"U8","shape":[1]}}"#, &[0]), E::BadEntry { .. }, "data_offsets");
    let extra = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"\u001b[2J":0}}"#;
    refused!(file(extra, &[0]), E::BadEntry { .. }, "unknown field");
    let again = r#"{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#;
    refused!(file(again, &[0]), E::BadEntry { .. }, "`dtype` appears twice");
    refused!(file(one("[1.0]", "[0,4]"), &[0; 4]), E::BadEntry { .. }, "`t`", "1.0");
    refused!(file(one("[-1]", "[0,4]"), &[0; 4]), E::BadEntry { .. }, "`t`", "-1");
    refused!(file(one("\"1\"", "[0,4]"), &[0; 4]), E::BadEntry { .. }, "`t`");
    refused!(file(one("[1]", "[-4,0]"), &[0; 4]), E::BadEntry { .. }, "`t`", "-4");
    refused!(file(one("[1]", "[0]"), &[0; 4]), E::BadEntry { .. }, "`t`");
    refused!(file(one("[1]", "[0,4,8]"), &[0; 4]), E::BadEntry { .. }, "`t`");
    refused!(file(one("[1]", "[0,18446744073709551616]"), &[0; 4]), E::BadEntry { .. }, "`t`");

    refused!(named(""), E::BadName { .. }, "empty");
    refused!(named(&"n".repeat(1025)), E::BadName { .. }, "1024");
    refused!(named("a\0b"), E::BadName { .. }, "NUL");
    refused!(named("a\u{1b}[31m"), E::BadName { .. }, "control", "a\\u{1b}[31m");
    refused!(named("a\u{9b}"), E::BadName { .. }, "control");
    refused!(named("a\u{202e}b"), E::BadName { .. }, "direction");
    refused!(named("a\u{2066}b"), E::BadName { .. }, "direction");

    let unknown = r#"{"a":{"dtype":"F7\u001b","shape":[1],"data_offsets":[0,1]}}"#;
    refused!(file(unknown, &[0]), E::UnknownDtype { .. }, "`a`", "F7\\u{1b}", "BF16", "F8_E4M3");
    for name in ["", "sixteen_letters_", "F 8", "F8-E3", "ü8"] {
        let entry = format!(r#"{{"a":{{"dtype":"{name}","shape":[1],"data_offsets":[0,1]}}}}"#);
        refused!(file(entry, &[0]), E::UnknownDtype { .. }, "`a`");
    }
    refused!(file(one("[1,1,1,1,1,1,1,1,1]", "[0,4]"), &[0; 4]), E::RankTooHigh { rank: 9, .. }, "9", "8");
    let many = format!("[{}1]", "1,".repeat(99_999));
    refused!(file(one(&many, "[0,4]"), &[0; 4]), E::RankTooHigh { rank: 100_000, .. }, "100000");
    let max = u64::MAX;
    for shape in [
        format!("[{max},{max}]"),
        format!("[0,{max},{max}]"),
        format!("[{max},{max},0]"),
        "[4611686018427387904]".into(),
        "[4294967296,4294967296]".into(),
    ] {
        refused!(file(one(&shape, "[0,0]"), b""), E::SizeOverflow { .. }, "`t`", "overflows");
    }
    refused!(file(one("[1]", "[4,0]"), &[0; 4]), E::OffsetsReversed { begin: 4, end: 0, .. }, "`t`");
    let mismatch = file(one("[3]", "[0,8]"), &[0; 8]);
    refused!(mismatch, E::SizeMismatch { expected: 12, got: 8, .. }, "`t`", "F32", "[3]", "12", "8");
    refused!(file(one("[0]", "[0,8]"), &[0; 8]), E::SizeMismatch { expected: 0, got: 8, .. }, "`t`");
    refused!(file(one("[1]", "[4,8]"), &[0; 8]), E::Hole { begin: 0, end: 4, .. }, "`t`", "0 to 4");
    refused!(two((0, 4), (6, 8), 8), E::Hole { begin: 4, end: 6, .. }, "`b`");
    refused!(two((0, 4), (2, 6), 6), E::Overlap { .. }, "`a`", "`b`", "4", "2");
    refused!(two((2, 6), (0, 4), 6), E::Overlap { .. }, "`a`", "`b`");
    refused!(two((0, 8), (0, 8), 8), E::Overlap { .. }, "`a`", "`b`");
    refused!(two((0, 8), (4, 4), 8), E::Overlap { .. }, "`a`", "`b`");
    refused!(two((0, max - 1), (max - 1, max), 8), E::PastEnd { .. }, "`a`");
    refused!(file(one("[2]", "[0,8]"), &[0; 7]), E::PastEnd { .. }, "`t`", "it has", "needs");
    refused!(two((0, 4), (4, 8), 6), E::PastEnd { .. }, "`b`");
    refused!(file(one("[2]", "[0,8]"), &[0; 9]), E::TrailingBytes { .. }, "1 byte");
    refused!(file("{}", b"PK"), E::TrailingBytes { .. }, "2 byte");
}

#[test]
fn truncation_is_reported_with_lengths() {
    let whole = vectors(&[("a", 10), ("b", 20)]);
    let error = parse(&whole[..whole.len() - 5]).unwrap_err().to_string();
    let lengths = format!("it has {} bytes, but needs {}", whole.len() - 5, whole.len());
    assert!(error.contains(&lengths) && error.contains("`b`"), "{error}");
}

#[test]
fn limits_hold() {
    let small = Limits { header_bytes: 60, tensors: 2 };
    let long = file(format!("{{{}}}", " ".repeat(60)), b"");
    assert!(matches!(parse_with(&long, small), Err(HeaderError::HeaderTooLarge { declared: 62, limit: 60 })));
    let few = Limits { tensors: 2, ..Limits::default() };
    assert!(parse_with(&vectors(&[("a", 1), ("b", 1)]), few).is_ok());
    let three = vectors(&[("a", 1), ("b", 1), ("c", 1)]);
    assert!(matches!(parse_with(&three, few), Err(HeaderError::TooManyTensors { limit: 2 })));
    // A header longer than the limit is rejected before it is read, even in a file that is long enough.
    let limits = Limits::default();
    let prefix = (40u64 << 20).to_le_bytes();
    let refused = crate::checkpoint::header::checked_len(prefix, 1 << 30, limits);
    assert!(matches!(refused, Err(HeaderError::HeaderTooLarge { .. })));
}

#[test]
fn unusual_but_legal_files_are_accepted() {
    assert!(parse(&file("{}", b"")).unwrap().tensors.is_empty());
    assert!(parse(&file("{}   ", b"")).is_ok());
    let scalar = parse(&file(one("[]", "[0,4]"), &[0; 4])).unwrap();
    assert_eq!(scalar.tensors["t"].info.elements(), 1);
    assert!(parse(&file(one("[0,5]", "[0,0]"), b"")).is_ok());
    assert!(parse(&two((0, 4), (4, 4), 4)).is_ok());
    assert!(parse(&two((4, 8), (0, 4), 8)).is_ok());
    // Data that begins at an odd offset.
    let odd = parse(&file(format!("{} ", one("[1]", "[0,4]")), &[0; 4])).unwrap();
    assert_eq!(odd.tensors["t"].offset % 2, 1);
    let with = parse(&file(r#"{"__metadata__":{"format":"pt"}}"#, b"")).unwrap();
    assert_eq!(with.metadata["format"], "pt");
    assert!(parse(&named("../x")).is_ok() && parse(&named("größe")).is_ok());
}

proptest! {
    #[test]
    fn mutated_headers_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        truncate in any::<bool>(),
    ) {
        let mut bytes = vectors(&[("model.embed", 40), ("a", 0), ("b", 7), ("c", 9)]);
        for (place, value) in edits {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        if truncate {
            bytes.truncate(cut.index(bytes.len()));
        }
        agrees_with_the_file(&bytes)?;
    }

    #[test]
    fn structured_nonsense_never_panics(
        tensors in prop::collection::vec(
            ("[a-c]", prop::sample::select(vec!["U8", "F32", "I64", "X", "F4", "F6_E2M3", "F8_E8M0", "C64"]),
             prop::collection::vec(prop::sample::select(vec![0, 1, 2, 3, u64::MAX / 2, u64::MAX]), 0..4),
             0u64..40, 0u64..40),
            0..4),
        data in 0usize..60,
    ) {
        let entries: Vec<String> = tensors.iter().map(|(name, dtype, shape, begin, end)| {
            format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#)
        }).collect();
        agrees_with_the_file(&file(format!("{{{}}}", entries.join(",")), &vec![0; data]))?;
    }

    #[test]
    fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        agrees_with_the_file(&bytes)?;
    }
}

fn agrees_with_the_file(bytes: &[u8]) -> Result<(), TestCaseError> {
    match parse(bytes) {
        Ok(header) => {
            for located in header.tensors.values() {
                prop_assert!(located.offset + located.info.byte_len() <= bytes.len() as u64);
            }
            // The reference implementation rejects unknown types.
            let known = |t: &Located| !matches!(t.info.dtype, Dtype::Opaque(_));
            if header.tensors.values().all(known) {
                prop_assert!(safetensors::SafeTensors::deserialize(bytes).is_ok());
            }
        }
        Err(error) => prop_assert!(!error.to_string().is_empty()),
    }
    Ok(())
}

fn of_type(dtype: &str, shape: &str, end: u64) -> String {
    format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}}}"#)
}

#[test]
fn elements_of_less_than_a_byte() {
    use HeaderError as E;
    for (dtype, shape, bytes) in [
        ("F4", "[2,3]", 3),
        ("F4", "[0,3]", 0),
        ("F4", "[]", 0),
        ("F6_E2M3", "[4]", 3),
        ("F6_E3M2", "[2,8]", 12),
        ("F8_E8M0", "[5]", 5),
    ] {
        let header = file(of_type(dtype, shape, bytes), &vec![7; bytes as usize]);
        if shape == "[]" {
            refused!(header, E::NotWholeBytes { .. }, "`t`", "F4 [] does not fill whole bytes");
            continue;
        }
        let header = parse(&header).unwrap();
        assert_eq!(header.tensors["t"].info.dtype.name(), dtype);
        assert_eq!(header.tensors["t"].info.byte_len(), bytes, "{dtype} {shape}");
    }
    refused!(file(of_type("F4", "[3]", 2), &[0; 2]), E::NotWholeBytes { .. }, "`t`", "F4 [3]");
    refused!(file(of_type("F6_E2M3", "[2]", 2), &[0; 2]), E::NotWholeBytes { .. }, "`t`");
    refused!(file(of_type("F4", "[4]", 4), &[0; 4]), E::SizeMismatch { expected: 2, got: 4, .. }, "`t`");
    let wide = format!("[{}]", u64::MAX);
    refused!(file(of_type("F4", &wide, 8), &[0; 8]), E::NotWholeBytes { .. }, "`t`");
    refused!(file(of_type("F4", "[4294967296,4294967296]", 8), &[0; 8]), E::SizeOverflow { .. }, "`t`");
}

#[test]
fn unknown_types_keep_their_name_and_length() {
    use HeaderError as E;
    let header = parse(&file(of_type("C64", "[2]", 16), &[1; 16])).unwrap();
    let info = &header.tensors["t"].info;
    assert_eq!((info.dtype.name(), info.byte_len(), info.elements()), ("C64", 16, 2));
    assert!(!info.dtype.is_weight_float());
    // Their lengths are checked against the file, like those of known types.
    refused!(file(of_type("C64", "[2]", 17), &[1; 16]), E::PastEnd { .. }, "`t`");
    refused!(file(of_type("C64", "[2]", 15), &[1; 16]), E::TrailingBytes { .. }, "1 byte");
    refused!(file(of_type("C64", "[2]", u64::MAX), &[1; 16]), E::PastEnd { .. }, "`t`");
    refused!(file(of_type("C64", "[0]", 16), &[1; 16]), E::SizeMismatch { expected: 0, got: 16, .. }, "`t`");
    let max = u64::MAX;
    refused!(file(of_type("C64", &format!("[{max},{max}]"), 16), &[1; 16]), E::SizeOverflow { .. }, "`t`");
    let reversed = r#"{"t":{"dtype":"C64","shape":[1],"data_offsets":[8,0]}}"#;
    refused!(file(reversed, &[0; 8]), E::OffsetsReversed { .. }, "`t`");
    let shared = r#"{"s":{"dtype":"C64","shape":[1],"data_offsets":[0,8]},"t":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#;
    refused!(file(shared, &[0; 8]), E::Overlap { .. }, "`s`", "`t`");
}
