//! Files of text become documents.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde_json::Value;

use crate::{Error, Result};

/// Text files above this are refused: everything is tokenized in memory.
const LARGEST_FILE: u64 = 1 << 30;

/// Reads the documents of a text file: a `.jsonl` file holds one object with a `text` field a
/// line; any other file is one document as it stands.
///
/// # Errors
/// When the file cannot be read, is not UTF-8, is larger than 1 GiB or holds no text; in JSONL the
/// line at fault is named.
pub fn read_documents(path: &Path) -> Result<Vec<String>> {
    // Before it is opened: opening a pipe waits for its other end.
    let metadata = std::fs::metadata(path).map_err(|e| Error::io("open", path, e))?;
    let fault = |line, reason: String| Error::Text { path: path.to_owned(), line, reason };
    if !metadata.is_file() {
        return Err(fault(None, "is not a regular file".into()));
    }
    if metadata.len() > LARGEST_FILE {
        return Err(fault(None, format!("has {} bytes; at most {LARGEST_FILE} are read", metadata.len())));
    }
    let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
    let is_jsonl = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("jsonl"));
    let documents = if is_jsonl { read_jsonl(path, file)? } else { vec![read_plain(path, file)?] };
    if documents.iter().all(|d| d.trim().is_empty()) {
        return Err(fault(None, "holds no text".into()));
    }
    Ok(documents)
}

/// The UTF-8 byte-order mark that some editors put first.
const BOM: &[u8] = b"\xef\xbb\xbf";

fn read_plain(path: &Path, file: File) -> Result<String> {
    let mut bytes = Vec::new();
    file.take(LARGEST_FILE).read_to_end(&mut bytes).map_err(|e| Error::io("read", path, e))?;
    // A byte-order mark is no text.
    if bytes.starts_with(BOM) {
        bytes.drain(..BOM.len());
    }
    String::from_utf8(bytes).map_err(|e| Error::Text {
        path: path.to_owned(),
        line: None,
        reason: format!("is not UTF-8 at byte {}", e.utf8_error().valid_up_to()),
    })
}

fn read_jsonl(path: &Path, file: File) -> Result<Vec<String>> {
    let mut documents = Vec::new();
    for (index, line) in BufReader::new(file.take(LARGEST_FILE)).split(b'\n').enumerate() {
        let fault = |reason: String| Error::Text { path: path.to_owned(), line: Some(index + 1), reason };
        let line = line.map_err(|e| Error::io("read", path, e))?;
        let line = if index == 0 { line.strip_prefix(BOM).unwrap_or(&line) } else { &line };
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let value: Value = serde_json::from_slice(line).map_err(|e| fault(format!("is not JSON: {e}")))?;
        match value.get("text").and_then(Value::as_str) {
            Some(text) => documents.push(text.to_owned()),
            None => return Err(fault("has no string field `text`".into())),
        }
    }
    Ok(documents)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, content: &[u8]) -> Result<Vec<String>> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        std::fs::write(&path, content).unwrap();
        read_documents(&path)
    }

    #[test]
    fn reads_plain_text_and_jsonl() {
        assert_eq!(read("a.txt", "one\ntwo".as_bytes()).unwrap(), ["one\ntwo"]);
        let jsonl = b"{\"text\": \"a\"}\n\n{\"id\": 1, \"text\": \"b\"}\r\n";
        assert_eq!(read("a.jsonl", jsonl).unwrap(), ["a", "b"]);
    }

    #[test]
    fn names_the_line_at_fault() {
        for (content, line, reason) in [
            ("{\"text\": \"a\"}\n{\"txt\": 1}\n", 2, "no string field"),
            ("{\"text\": 3}\n", 1, "no string field"),
            ("\n\n{", 3, "not JSON"),
        ] {
            match read("a.jsonl", content.as_bytes()).unwrap_err() {
                Error::Text { line: Some(found), reason: text, .. } => {
                    assert_eq!(found, line);
                    assert!(text.contains(reason), "{text}");
                }
                other => panic!("{other}"),
            }
        }
    }

    #[test]
    fn refuses_empty_and_foreign_files() {
        for content in [b"".as_slice(), b" \n\t", b"\xff\xfe1"] {
            assert!(matches!(read("a.txt", content), Err(Error::Text { .. })));
        }
        assert!(matches!(read("a.jsonl", b"{\"text\": \"\"}"), Err(Error::Text { .. })));
        let directory = tempfile::tempdir().unwrap();
        assert!(read_documents(directory.path()).is_err());
        assert!(matches!(read_documents(&directory.path().join("none")), Err(Error::Io { .. })));
        assert!(matches!(read_documents(Path::new("/dev/null")), Err(Error::Text { .. })));
    }
}
