//! Output of results to stdout, as text or JSON, and of messages to stderr.

use std::borrow::Cow;
use std::io::{ErrorKind, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

use quant_core::checkpoint::{is_unprintable, printable_lines};
pub use quant_core::run::bytes;
pub use quant_core::run::files::{check_replaceable, check_writable, distinct, outside, write_file};
use quant_core::wording::{CommandLine, worded};
use quant_core::{Error, Result};
use quant_evaluator::is_stored_reference;
use serde::Serialize;

use crate::colors;

/// Prints a result with its control characters escaped, because it contains names and paths. A closed pipe (`| head`)
/// surfaces as an error that [`is_closed_pipe`] recognizes, not as a panic.
pub fn print(text: &str) -> Result<()> {
    print_raw(&printable_lines(text))
}

/// Prints a gate's table.
pub fn print_verdicts(text: &str) -> Result<()> {
    let text = printable_lines(text);
    if colors::shows(&std::io::stdout()) { print_raw(&colors::verdicts(&text)) } else { print_raw(&text) }
}

/// Prints a model's output unchanged, except for characters that would control the terminal it is printed to.
pub fn print_written(text: &str) -> Result<()> {
    if std::io::stdout().is_terminal() { print(text) } else { print_raw(text) }
}

/// Prints the program's own text.
pub fn print_raw(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|e| Error::io("write", "standard output", e))
}

/// Prints a message to stderr, with settings named as options. Write errors are ignored: stderr may be closed, and that
/// must not stop the work.
pub fn print_message(text: &str) {
    let text = worded(text, &CommandLine);
    let text = printable_lines(&text);
    let text = if colors::shows(&std::io::stderr()) { colors::message(&text) } else { text.as_ref().into() };
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Prints an argument error or the requested help, and returns the exit code.
pub fn refused_arguments(error: &clap::Error) -> u8 {
    let plain = error.render().to_string();
    match printable_lines(plain.trim_end()) {
        // A text with terminal control characters is printed escaped, not as the parser formats it.
        escaped @ Cow::Owned(_) if error.use_stderr() => print_message(&escaped),
        _ if error.use_stderr() => drop(error.print()),
        _ => {
            let printed = error.print().and_then(|()| std::io::stdout().flush());
            let failed = printed.map_err(|e| Error::io("write", "standard output", e)).err();
            if let Some(failed) = failed.filter(|e| !is_closed_pipe(e)) {
                print_message(&format!("error: {failed}\n  {}", failed.remedy()));
                return failed.category().exit_code();
            }
        }
    }
    u8::try_from(error.exit_code()).unwrap_or(2)
}

/// Returns whether a run ended because its output was closed.
pub fn is_closed_pipe(error: &Error) -> bool {
    matches!(error, Error::Io { path, source, .. }
        if path == Path::new("standard output") && source.kind() == ErrorKind::BrokenPipe)
}

/// Formats a result as JSON with a final newline. Control characters are escaped.
pub fn json<T: Serialize>(value: &T) -> Result<String> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Error::Internal(e.to_string()))?;
    if !text.chars().any(is_unprintable) {
        return Ok(text + "\n");
    }
    // Control characters occur only inside JSON strings, where an escape has the same meaning.
    let mut escaped = String::with_capacity(text.len() + 64);
    for c in text.chars() {
        match is_unprintable(c) {
            true => escaped.push_str(&format!("\\u{:04x}", u32::from(c))),
            false => escaped.push(c),
        }
    }
    Ok(escaped + "\n")
}

/// A kind of file that the program writes at a path that the user gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// A result as JSON.
    Json,
    /// An HTML report.
    Html,
    /// JUnit XML.
    Junit,
    /// A stored reference.
    Reference,
}

/// The first bytes of a file that decide its kind.
const HEAD_BYTES: u64 = 256;
/// JSON files of this program that are more than the output of one command.
const KEPT: [&str; 6] = [
    "quant-gate-baseline",
    "quant-job",
    "quant-manifest",
    "quant-report",
    "quant-gguf-report",
    "quant-floats-report",
];

impl Written {
    /// Whether a file of this kind may begin with these bytes.
    fn begins(self, head: &[u8]) -> bool {
        match self {
            Self::Json => schema_of(head).is_some_and(|schema| {
                schema.starts_with("quant-") && !KEPT.contains(&schema.split('/').next().unwrap_or_default())
            }),
            Self::Html => head.get(..9).is_some_and(|start| start.eq_ignore_ascii_case(b"<!doctype")),
            Self::Junit => head.starts_with(b"<?xml"),
            Self::Reference => false,
        }
    }
}

/// Returns the schema at the beginning of a JSON file.
fn schema_of(head: &[u8]) -> Option<&str> {
    let text = match std::str::from_utf8(head) {
        Ok(text) => text,
        Err(error) => std::str::from_utf8(&head[..error.valid_up_to()]).ok()?,
    };
    let value = text.trim_start().strip_prefix('{')?.trim_start().strip_prefix("\"schema\"")?;
    value.trim_start().strip_prefix(':')?.trim_start().strip_prefix('"')?.split('"').next()
}

/// Returns an error if the file of an option cannot be written, or would replace a file of a different kind, such as a
/// baseline or a file of the user. Commands call this before they start work whose result would be lost.
pub fn check_output(option: &str, path: &Path, kind: Written) -> Result<()> {
    check_replaceable(option, path, |path| {
        let mut head = Vec::new();
        let read = std::fs::File::open(path).and_then(|file| file.take(HEAD_BYTES).read_to_end(&mut head));
        read.map_err(|e| Error::io("read", path, e))?;
        Ok(kind.begins(&head) || kind == Written::Reference && is_stored_reference(path))
    })
}

/// The destination of a result as JSON: `--json[=FILE]`.
#[derive(Debug, Clone, clap::Args)]
pub struct JsonOption {
    /// Print the result as JSON, or write the JSON to FILE
    ///
    /// With FILE, the table is printed too.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    pub json: Option<PathBuf>,
}

impl JsonOption {
    /// Returns an error if the file cannot be written, or is no result.
    pub fn check(&self) -> Result<()> {
        match self.json.as_deref().filter(|p| *p != Path::new("-")) {
            Some(path) => check_output("json", path, Written::Json),
            None => Ok(()),
        }
    }

    /// Like `check`, but also returns an error if the file is an input or lies in the directory of an input model.
    pub fn check_distinct(&self, model: &Path, read: &[&Path]) -> Result<()> {
        let written = [("json", self.json.as_deref())];
        distinct(&written, read)?;
        outside(&written, &[model])?;
        self.check()
    }

    /// Prints the table or the JSON, or prints the table and writes the JSON to its file.
    pub fn emit<T: Serialize>(&self, value: &T, table: impl FnOnce() -> String) -> Result<()> {
        self.emit_by(value, || print(&table()))
    }

    /// Like `emit`, with a function that prints the table.
    pub fn emit_by<T: Serialize>(&self, value: &T, table: impl FnOnce() -> Result<()>) -> Result<()> {
        match &self.json {
            Some(path) if path == Path::new("-") => print(&json(value)?),
            Some(path) => {
                write_file(path, json(value)?.as_bytes())?;
                table()
            }
            None => table(),
        }
    }
}

/// Formats seconds as `4.2 s`, `3 min 20 s` or `2 h 5 min`.
pub fn duration(seconds: f64) -> String {
    if seconds < 60.0 {
        return format!("{seconds:.1} s");
    }
    let whole = seconds.round() as u64;
    if whole < 3600 {
        return format!("{} min {} s", whole / 60, whole % 60);
    }
    format!("{} h {} min", whole / 3600, whole % 3600 / 60)
}

/// Formats a table with columns wide enough for their content: the first is left-aligned, the others are right-aligned.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|r| r.get(column)).map(|c| c.chars().count());
        cells.chain([header[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut text = String::new();
        for (column, (cell, width)) in cells.zip(&widths).enumerate() {
            let padding = " ".repeat(width - cell.chars().count());
            match column {
                0 => text.push_str(&format!("{cell}{padding}")),
                _ => text.push_str(&format!("  {padding}{cell}")),
            }
        }
        text.trim_end().to_owned() + "\n"
    };
    let rule: usize = widths.iter().sum::<usize>() + 2 * (header.len() - 1);
    let mut text = line(&mut header.iter().copied());
    text.push_str(&"─".repeat(rule));
    text.push('\n');
    for row in rows {
        text.push_str(&line(&mut row.iter().map(String::as_str)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_read_well() {
        for (count, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.00 kB"),
            (13_644_256, "13.6 MB"),
            (999_600_000, "1.00 GB"),
            (2_471_645_608, "2.47 GB"),
        ] {
            assert_eq!(bytes(count), text);
        }
        assert_eq!(duration(3.12), "3.1 s");
        assert_eq!(duration(200.2), "3 min 20 s");
        assert_eq!(duration(7500.0), "2 h 5 min");
    }

    #[test]
    fn only_files_of_the_same_kind_are_replaced() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("file");
        let json = |schema: &str| format!("{{\n  \"schema\": \"{schema}\",\n  \"a\": 1\n}}\n").into_bytes();
        let (html, xml) = (b"<!DOCTYPE html><html>".to_vec(), b"<?xml version=\"1.0\"?>".to_vec());
        for (contents, kind) in [
            (json("quant-eval/4"), Some(Written::Json)),
            (json("quant-summary/1"), Some(Written::Json)),
            (json("quant-gate-baseline/1"), None),
            (json("quant-job/3"), None),
            (json("other/1"), None),
            (b"{\"model_type\": \"llama\"}".to_vec(), None),
            (b"{\"schema\": \"quant-eval/4\xff".to_vec(), Some(Written::Json)),
            (html, Some(Written::Html)),
            (xml, Some(Written::Junit)),
            (b"a diary".to_vec(), None),
        ] {
            std::fs::write(&path, &contents).expect("a file");
            for one in [Written::Json, Written::Html, Written::Junit, Written::Reference] {
                let checked = check_output("json", &path, one);
                assert_eq!(checked.is_ok(), kind == Some(one), "{one:?}: {}", contents.escape_ascii());
            }
        }
        std::fs::write(&path, "").expect("a file");
        check_output("json", &path, Written::Json).expect("an empty file may be replaced");
        check_output("json", &folder.path().join("new"), Written::Json).expect("a new file");
    }

    #[test]
    fn tables_align() {
        let rows = vec![vec!["a".into(), "1".into()], vec!["long".into(), "22".into()]];
        assert_eq!(table(&["x", "yy"], &rows), "x     yy\n────────\na      1\nlong  22\n");
    }
}
