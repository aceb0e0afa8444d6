//! Reads documents from text files.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde_json::{Value, json};

use super::Conversation;
use crate::{Error, Result};

/// The maximum size of a text file, because everything is tokenized in memory.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// The maximum length of a line of JSON.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// The contents of a calibration file.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Corpus {
    /// Plain texts.
    Texts(Vec<String>),
    /// Conversations, which a chat template renders as text.
    Chats(Vec<Conversation>),
}

/// Reads the documents of a text file. A `.jsonl` file has one object with a `text` field per line; any other file is
/// one document.
///
/// # Errors
/// If the file cannot be read, is not UTF-8, is larger than 1 GiB or contains no text, or a line of JSONL is malformed;
/// then the error names the line.
pub fn read_documents(path: &Path) -> Result<Vec<String>> {
    let file = open(path)?;
    let documents = if is_jsonl(path) { read_jsonl(path, file)? } else { vec![read_plain(path, file)?] };
    if documents.iter().all(|d| d.trim().is_empty()) {
        return Err(empty(path));
    }
    Ok(documents)
}

/// Reads a calibration file like [`read_documents`], or as conversations, one per line, if the first object of a
/// `.jsonl` file has a field `messages`.
///
/// # Errors
/// As [`read_documents`].
pub fn read_corpus(path: &Path) -> Result<Corpus> {
    if !is_jsonl(path) {
        return Ok(Corpus::Texts(read_documents(path)?));
    }
    let mut chats = Vec::new();
    let mut texts = false;
    each_json_line(BufReader::new(open(path)?.take(MAX_FILE_BYTES)), path, |line, value| {
        if chats.is_empty() && value.get("messages").is_none() {
            texts = true;
            return Ok(false);
        }
        chats.push(Conversation::new(line, value)?);
        Ok(true)
    })?;
    match chats.is_empty() && !texts {
        true => Err(empty(path)),
        false if texts => Ok(Corpus::Texts(read_documents(path)?)),
        false => Ok(Corpus::Chats(chats)),
    }
}

/// Builds a corpus from rows in memory, all of one kind: texts (a string, or an object with a string `text`), or
/// conversations (an object with `messages`, or a list of messages). `origin` names the corpus in messages.
///
/// # Errors
/// [`Error::InputFile`] with the row number, counted from 1, for a malformed row, a row of a different kind, or the row
/// after which the rows exceed 1 GiB; [`Error::Text`] if there are no rows, or only texts without content.
pub fn corpus_of_rows(rows: impl IntoIterator<Item = Value>, origin: &Path) -> Result<Corpus> {
    let (mut texts, mut chats, mut bytes) = (Vec::new(), Vec::new(), 0);
    for (number, row) in (1..).zip(rows) {
        let fault = |reason: String| Error::InputFile {
            path: origin.to_owned(),
            line: Some(number),
            reason,
            remedy: "give rows of at most 1 GiB in total: either texts (strings, or objects with a field \
                `text`) or conversations (lists of messages with a `role`, or objects with such a list as \
                field `messages`)"
                .into(),
        };
        let chat = match row {
            Value::Array(messages) => Some(json!({ "messages": messages })),
            Value::Object(fields) if fields.contains_key("messages") => Some(Value::Object(fields)),
            Value::String(text) => {
                texts.push(text);
                None
            }
            Value::Object(mut fields) => match fields.remove("text") {
                Some(Value::String(text)) => {
                    texts.push(text);
                    None
                }
                _ => return Err(fault("has no string field `text`".into())),
            },
            _ => return Err(fault("must be a text or a conversation".into())),
        };
        bytes += match chat {
            Some(chat) => {
                let size = chat.to_string().len();
                chats.push(Conversation::new(number, chat).map_err(fault)?);
                size
            }
            None => texts.last().map_or(0, String::len),
        };
        if !chats.is_empty() && !texts.is_empty() {
            return Err(fault(
                "is of a different kind than the rows before it: texts and conversations cannot be mixed"
                    .into(),
            ));
        }
        if bytes as u64 > MAX_FILE_BYTES {
            return Err(fault(format!("makes the rows exceed the limit of {MAX_FILE_BYTES} bytes")));
        }
    }
    match chats.is_empty() {
        true if texts.iter().all(|text| text.trim().is_empty()) => Err(empty(origin)),
        true => Ok(Corpus::Texts(texts)),
        false => Ok(Corpus::Chats(chats)),
    }
}

fn is_jsonl(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("jsonl"))
}

fn empty(path: &Path) -> Error {
    Error::Text { path: path.to_owned(), line: None, reason: "holds no text".into() }
}

fn open(path: &Path) -> Result<File> {
    // Opening a pipe would block until its other end is opened.
    let metadata = std::fs::metadata(path).map_err(|e| Error::io("open", path, e))?;
    let fault = |reason: String| Error::Text { path: path.to_owned(), line: None, reason };
    if !metadata.is_file() {
        return Err(fault("is not a regular file".into()));
    }
    if metadata.len() > MAX_FILE_BYTES {
        return Err(fault(format!("has {} bytes; the limit is {MAX_FILE_BYTES}", metadata.len())));
    }
    File::open(path).map_err(|e| Error::io("open", path, e))
}

/// The UTF-8 byte-order mark, which some editors insert at the start of a file.
const BOM: &[u8] = b"\xef\xbb\xbf";

fn read_plain(path: &Path, file: File) -> Result<String> {
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut bytes).map_err(|e| Error::io("read", path, e))?;
    let skipped = if bytes.starts_with(BOM) { BOM.len() } else { 0 };
    bytes.drain(..skipped);
    String::from_utf8(bytes).map_err(|e| Error::Text {
        path: path.to_owned(),
        line: None,
        reason: format!("is not valid UTF-8 at byte {}", skipped + e.utf8_error().valid_up_to()),
    })
}

fn read_jsonl(path: &Path, file: File) -> Result<Vec<String>> {
    read_json_lines(BufReader::new(file.take(MAX_FILE_BYTES)), "text", path, usize::MAX)
}

/// Reads documents from JSON lines, one object with a string `field` each, until the input ends or a document would
/// bring the total to more than `limit` bytes. That document is dropped, and nothing after it is read. `origin` names
/// the input in messages.
///
/// # Errors
/// When the input fails, or a line is not such an object or is longer than 64 MiB; the error names the line.
pub fn read_json_lines(input: impl BufRead, field: &str, origin: &Path, limit: usize) -> Result<Vec<String>> {
    let (mut documents, mut bytes) = (Vec::new(), 0);
    each_json_line(input, origin, |_, value| {
        let Some(text) = value.get(field).and_then(Value::as_str) else {
            return Err(format!("has no string field `{field}`"));
        };
        bytes += text.len();
        if bytes <= limit {
            documents.push(text.to_owned());
        }
        Ok(bytes <= limit)
    })?;
    Ok(documents)
}

/// Passes the number and the value of each line that is not blank to `take`, until it returns `false`. An error from
/// `take` is reported with its line.
fn each_json_line(
    mut input: impl BufRead,
    origin: &Path,
    mut take: impl FnMut(usize, Value) -> Result<bool, String>,
) -> Result<()> {
    let mut line = Vec::new();
    for number in 1.. {
        let fault = |reason: String| Error::Text { path: origin.to_owned(), line: Some(number), reason };
        line.clear();
        // Compressed inputs can encode a line of any length in a few bytes.
        let read = (&mut input).take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut line);
        if read.map_err(|e| Error::io("read", origin, e))? == 0 {
            break;
        }
        if line.len() as u64 > MAX_LINE_BYTES {
            return Err(fault(format!("is too long; the limit is {MAX_LINE_BYTES} bytes")));
        }
        let line = if number == 1 { line.strip_prefix(BOM).unwrap_or(&line) } else { &line };
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let value: Value = serde_json::from_slice(line).map_err(|e| fault(format!("is not JSON: {e}")))?;
        if !take(number, value).map_err(fault)? {
            break;
        }
    }
    Ok(())
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
    fn rows_are_of_one_kind() {
        let origin = Path::new("dataset");
        let of = |rows: Value| corpus_of_rows(rows.as_array().unwrap().clone(), origin);
        let texts = Corpus::Texts(vec!["a".into(), "b".into()]);
        assert_eq!(of(json!(["a", { "text": "b", "id": 1 }])).unwrap(), texts);
        let message = json!({ "role": "user", "content": "a" });
        match of(json!([[message], { "messages": [message] }])).unwrap() {
            Corpus::Chats(chats) => {
                assert_eq!(chats.iter().map(Conversation::line).collect::<Vec<_>>(), [1, 2])
            }
            other => panic!("{other:?}"),
        }
        for (rows, expected) in [
            (json!(["a", [message]]), "dataset:2: is of a different kind"),
            (json!([3]), "dataset:1: must be a text"),
            (json!([{ "txt": "a" }]), "dataset:1: has no string field `text`"),
            (json!([["a"]]), "dataset:1: has no string field `role`"),
            (json!([" "]), "dataset holds no text"),
            (json!([]), "dataset holds no text"),
        ] {
            let error = of(rows).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn the_first_line_distinguishes_conversations_from_texts() {
        let read = |content: &str| {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("a.jsonl");
            std::fs::write(&path, content).unwrap();
            read_corpus(&path)
        };
        let chat = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n";
        match read(&format!("\n{chat}\n{chat}")).unwrap() {
            Corpus::Chats(chats) => {
                assert_eq!(chats.iter().map(Conversation::line).collect::<Vec<_>>(), [2, 4]);
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(read("{\"text\": \"a\"}\n").unwrap(), Corpus::Texts(vec!["a".into()]));
        for (content, line, expected) in [
            (format!("{chat}{{\"text\": \"a\"}}"), 2, "no field `messages`, which other rows have"),
            (format!("{{\"text\": \"a\"}}\n{chat}"), 2, "no string field `text`"),
            (format!("{chat}{{\"messages\": 3}}"), 2, "empty or not a list"),
            ("3".into(), 1, "no string field"),
        ] {
            let error = read(&content).unwrap_err().to_string();
            assert!(error.contains(&format!(".jsonl:{line}: ")) && error.contains(expected), "{error}");
        }
        assert!(read("\n").unwrap_err().to_string().contains("holds no text"));
    }

    #[test]
    fn json_lines_stop_at_the_limit() {
        let input = "{\"t\": \"abc\"}\n{\"t\": \"de\"}\n{\"t\": \"f\"}\nno JSON";
        let read = |limit| read_json_lines(input.as_bytes(), "t", Path::new("x"), limit);
        assert_eq!(read(3).unwrap(), ["abc"]);
        assert_eq!(read(4).unwrap(), ["abc"]);
        assert_eq!(read(5).unwrap(), ["abc", "de"]);
        assert!(matches!(read(usize::MAX), Err(Error::Text { line: Some(4), .. })));
        assert!(read(0).unwrap().is_empty());
        let endless = BufReader::new(std::io::repeat(b' '));
        let error = read_json_lines(endless, "t", Path::new("x"), 3).unwrap_err();
        assert!(error.to_string().contains("too long"), "{error}");
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
