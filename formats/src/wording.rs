//! How messages name settings and commands, which each program spells differently.
//!
//! A message writes a setting as `‹group_size›` or `‹format=gptq›`, and a command as `‹plan(MODEL)›` or `‹eval(MODEL,
//! text=TEXT)›`. [`parts`] returns these as data, and [`worded`] replaces them with a program's own spelling, which a
//! [`Wording`] defines.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;

/// A program's spelling of settings and commands.
///
/// ```
/// use quant_formats::wording::{Argument, Wording, worded};
///
/// /// Spells settings as keys of a YAML file.
/// struct Yaml;
///
/// impl Wording for Yaml {
///     fn setting(&self, name: &str, value: Option<&str>) -> String {
///         format!("`{name}: {}`", value.unwrap_or("…"))
///     }
///
///     fn command(&self, name: &str, _arguments: &[Argument<'_>]) -> String {
///         format!("the task `{name}`")
///     }
/// }
///
/// assert_eq!(worded("write ‹format=gptq›", &Yaml), "write `format: gptq`");
/// assert_eq!(worded("see ‹plan(MODEL)›", &Yaml), "see the task `plan`");
/// ```
pub trait Wording: Sync {
    /// Spells a setting, given its name in `snake_case` and the suggested value, if any.
    fn setting(&self, name: &str, value: Option<&str>) -> String;
    /// Spells a command with its arguments: settings with their values, and positional values.
    fn command(&self, name: &str, arguments: &[Argument<'_>]) -> String;
}

/// An argument of a command in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Argument<'a> {
    /// A positional value.
    Positional(&'a str),
    /// A setting, with or without a value.
    Setting(&'a str, Option<&'a str>),
}

/// A part of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Part<'a> {
    /// Text.
    Text(&'a str),
    /// A setting of the request, by its name in `snake_case`, and the suggested value, if any.
    Setting(&'a str, Option<&'a str>),
    /// A command, and its arguments.
    Command(&'a str, Vec<Argument<'a>>),
}

const OPEN: char = '‹';
const CLOSE: char = '›';

/// Splits a message into text, settings and commands. Marked text that is not a setting or command stays text.
///
/// ```
/// use quant_formats::wording::{Part, parts};
///
/// let parts = parts("leave it float with ‹ignore›, or write ‹format=gptq›");
/// assert_eq!(parts[1], Part::Setting("ignore", None));
/// assert_eq!(parts[3], Part::Setting("format", Some("gptq")));
/// ```
pub fn parts(text: &str) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    let (mut rest, mut from) = (text, 0);
    while let Some(open) = rest[from..].find(OPEN).map(|at| from + at) {
        let after = &rest[open + OPEN.len_utf8()..];
        match after.split_once(CLOSE).and_then(|(marked, tail)| Some((one(marked)?, tail))) {
            Some((part, tail)) => {
                parts.extend(Some(Part::Text(&rest[..open])).filter(|_| open > 0));
                parts.push(part);
                (rest, from) = (tail, 0);
            }
            None => from = open + OPEN.len_utf8(),
        }
    }
    parts.extend(Some(Part::Text(rest)).filter(|_| !rest.is_empty()));
    parts
}

/// Returns a message in a program's own spelling.
pub fn worded<'a>(text: &'a str, wording: &dyn Wording) -> Cow<'a, str> {
    if !text.contains(OPEN) {
        return Cow::Borrowed(text);
    }
    let own = |part| match part {
        Part::Text(text) => text.to_owned(),
        Part::Setting(name, value) => wording.setting(name, value),
        Part::Command(name, arguments) => wording.command(name, &arguments),
    };
    Cow::Owned(parts(text).into_iter().map(own).collect())
}

/// Returns a number with its noun: `1 window`, `2 windows`.
///
/// ```
/// assert_eq!(quant_formats::wording::counted(1, "window"), "1 window");
/// assert_eq!(quant_formats::wording::counted(0, "window"), "0 windows");
/// ```
pub fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Formats a number of bytes with a decimal unit: `1234567` becomes `1.23 MB`.
///
/// ```
/// assert_eq!(quant_formats::wording::bytes(1_234_567), "1.23 MB");
/// assert_eq!(quant_formats::wording::bytes(999), "999 B");
/// ```
pub fn bytes(count: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    match unit {
        0 => format!("{count} B"),
        _ if value < 9.995 => format!("{value:.2} {}", units[unit]),
        _ if value < 99.95 => format!("{value:.1} {}", units[unit]),
        _ => format!("{value:.0} {}", units[unit]),
    }
}

const VERBS: [&str; 22] = [
    "is",
    "has",
    "does",
    "was",
    "holds",
    "contains",
    "cannot",
    "must",
    "needs",
    "names",
    "refers",
    "declares",
    "adds",
    "copies",
    "ends",
    "exceeds",
    "fails",
    "makes",
    "overflows",
    "produces",
    "renders",
    "uses",
];

/// Returns a message about a file. A reason that begins with a verb continues the sentence; any other follows a colon.
/// If a line is given (counted from 1), a colon follows the place, as editors expect.
///
/// ```
/// use quant_formats::wording::about_file;
///
/// assert_eq!(about_file("a.txt".as_ref(), None, "has 6 tokens"), "a.txt has 6 tokens");
/// assert_eq!(about_file("a.txt".as_ref(), None, "line 3 is empty"), "a.txt: line 3 is empty");
/// assert_eq!(about_file("a.txt".as_ref(), Some(3), "is not JSON"), "a.txt:3: is not JSON");
/// ```
pub fn about_file(path: &Path, line: Option<usize>, reason: &str) -> String {
    let path = path.display();
    let verb = reason.split(' ').next().is_some_and(|word| VERBS.contains(&word));
    match line {
        Some(line) => format!("{path}:{line}: {reason}"),
        None if verb => format!("{path} {reason}"),
        None => format!("{path}: {reason}"),
    }
}

/// What the names of Rust's types mean in the messages of parsers.
const RUST_TYPES: [(&str, &str); 18] = [
    ("usize", "an integer of at least 0"),
    ("u8", "an integer from 0 to 255"),
    ("u16", "an integer from 0 to 65535"),
    ("u32", "an integer from 0 to 4294967295"),
    ("u64", "an integer of at least 0"),
    ("u128", "an integer of at least 0"),
    ("isize", "an integer"),
    ("i8", "an integer from -128 to 127"),
    ("i16", "an integer from -32768 to 32767"),
    ("i32", "an integer from -2147483648 to 2147483647"),
    ("i64", "an integer"),
    ("i128", "an integer"),
    ("f32", "a number"),
    ("f64", "a number"),
    ("a sequence", "a list"),
    ("unit", "null"),
    ("variant identifier", "a name"),
    ("field identifier", "a name"),
];

/// Returns a parser's message with plain words for the names of Rust's types. `object` is what the format calls an
/// object with named values.
///
/// ```
/// use quant_formats::wording::parser_message;
///
/// let message = r#"invalid type: string "a", expected usize at line 1 column 3"#;
/// let plain = r#"invalid type: string "a", expected an integer of at least 0 at line 1 column 3"#;
/// assert_eq!(parser_message(message, "a table"), plain);
/// assert_eq!(parser_message("expected struct Entry", "a table"), "expected a table");
/// ```
pub fn parser_message(message: &str, object: &str) -> String {
    const EXPECTED: &str = "expected ";
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let tail = |rest: &'_ str, known: &str| {
        let tail = rest.strip_prefix(known)?;
        (!tail.starts_with(is_name)).then(|| rest.len() - tail.len())
    };
    let (mut plain, mut rest) = (String::with_capacity(message.len()), message);
    while let Some(at) = rest.find(EXPECTED) {
        let (before, after) = rest.split_at(at + EXPECTED.len());
        plain.push_str(before);
        rest = after;
        let known = RUST_TYPES.iter().find_map(|(name, words)| Some((tail(rest, name)?, *words)));
        let of_map = tail(rest, "a map").map(|len| (len, object));
        let of_own = ["struct ", "tuple struct ", "enum "].into_iter().find_map(|kind| {
            let name = rest.strip_prefix(kind)?;
            let name = name.trim_start_matches(is_name);
            Some((rest.len() - name.len(), if kind == "enum " { "a name" } else { object }))
        });
        if let Some((len, words)) = known.or(of_map).or(of_own) {
            plain.push_str(words);
            rest = &rest[len..];
        }
    }
    plain + rest
}

fn one(marked: &str) -> Option<Part<'_>> {
    let end = marked.find(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'));
    let (name, tail) = marked.split_at(end.unwrap_or(marked.len()));
    if name.is_empty() {
        return None;
    }
    if let Some(value) = tail.strip_prefix('=') {
        return Some(Part::Setting(name, Some(value)));
    }
    if let Some(inner) = tail.strip_prefix('(').and_then(|t| t.strip_suffix(')')) {
        let arguments = inner.split(", ").filter(|a| !a.is_empty()).map(argument).collect();
        return Some(Part::Command(name, arguments));
    }
    tail.is_empty().then_some(Part::Setting(name, None))
}

fn argument(text: &str) -> Argument<'_> {
    let is_name = |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
    match text.split_once('=') {
        Some((name, value)) if is_name(name) => Argument::Setting(name, Some(value)),
        None if is_name(text) => Argument::Setting(text, None),
        _ => Argument::Positional(text),
    }
}

/// Advice on an error: text in which settings and commands are marked.
///
/// ```
/// use quant_formats::wording::{CommandLine, Part, Remedy};
///
/// let remedy = Remedy::from("choose a different output, or replace it with ‹force›");
/// assert_eq!(remedy.parts()[1], Part::Setting("force", None));
/// assert_eq!(remedy.worded(&CommandLine), "choose a different output, or replace it with --force");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Remedy(String);

impl Remedy {
    /// The text and the marked settings and commands, in order.
    pub fn parts(&self) -> Vec<Part<'_>> {
        parts(&self.0)
    }

    /// The text with its marks: `‹force›`.
    pub fn marked(&self) -> &str {
        &self.0
    }

    /// The text in a program's own spelling.
    pub fn worded(&self, wording: &dyn Wording) -> Cow<'_, str> {
        worded(&self.0, wording)
    }
}

impl fmt::Display for Remedy {
    /// The text with its marks.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&str> for Remedy {
    fn from(marked: &str) -> Self {
        Self(marked.into())
    }
}

impl From<String> for Remedy {
    fn from(marked: String) -> Self {
        Self(marked)
    }
}

/// The spelling of a command line: `--group-size`, `--format gptq`, `` `quant plan MODEL` ``.
#[derive(Debug, Clone, Copy, Default)]
pub struct CommandLine;

impl Wording for CommandLine {
    fn setting(&self, name: &str, value: Option<&str>) -> String {
        let name = if name == "steps" { "step" } else { name };
        let option = format!("--{}", name.replace('_', "-"));
        match value {
            None => option,
            // An option with an optional value needs the `=`.
            Some(value) if name == "json" => format!("{option}={value}"),
            Some(value) => format!("{option} {value}"),
        }
    }

    fn command(&self, name: &str, arguments: &[Argument<'_>]) -> String {
        let words = arguments.iter().map(|argument| match argument {
            Argument::Positional(value) => (*value).to_owned(),
            Argument::Setting(name, value) => self.setting(name, *value),
        });
        // The name of a subcommand follows that of its command: `job_run`.
        let name = name.replace('_', " ");
        let words: Vec<String> = ["quant".to_owned(), name].into_iter().chain(words).collect();
        format!("`{}`", words.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_has_options() {
        for (text, out) in [
            ("nothing", "nothing"),
            (
                "leave it float with ‹ignore›, or write ‹format=gptq›",
                "leave it float with --ignore, or write --format gptq",
            ),
            ("for example ‹override='{a=b}=w8a16'›", "for example --override '{a=b}=w8a16'"),
            ("write ‹steps=STEP.KEY=VALUE›", "write --step STEP.KEY=VALUE"),
            ("‹plan()› predicts", "`quant plan` predicts"),
            ("‹job_run(STORE)› continues", "`quant job run STORE` continues"),
            ("‹eval(MODEL, text=TEXT, json=FILE)›", "`quant eval MODEL --text TEXT --json=FILE`"),
            ("‹gate(RESULT…, baseline=FILE, update)›", "`quant gate RESULT… --baseline FILE --update`"),
        ] {
            assert_eq!(worded(text, &CommandLine), out);
        }
    }

    #[test]
    fn messages_of_parsers_name_no_types_of_rust() {
        for (message, plain) in [
            ("invalid value: integer `-1`, expected u32", "expected an integer from 0 to 4294967295"),
            ("invalid type: map, expected f64", "map, expected a number"),
            (
                "invalid type: sequence, expected struct File with 3 elements",
                "expected a table with 3 elements",
            ),
            ("expected u64 or a sequence, expected a sequence", "expected an integer of at least 0 or"),
            ("expected a map at line 1", "expected a table at line 1"),
            ("unknown variant `x`, expected one of `u8`, `u16`", "expected one of `u8`, `u16`"),
            ("expected u8_like, expected usizes, expected a maple", "usizes, expected a maple"),
            ("expected `u8`", "expected `u8`"),
            ("expected enum Against", "expected a name"),
            ("expected ", "expected "),
        ] {
            let found = parser_message(message, "a table");
            assert!(found.contains(plain), "{message}: {found}");
        }
    }

    /// These are the words of serde, which the table must know.
    #[test]
    fn names_of_types_are_those_of_serde() {
        fn message<T: serde::de::DeserializeOwned>() -> String {
            serde_json::from_str::<T>("[[]]").err().map(|e| e.to_string()).unwrap_or_default()
        }
        #[derive(serde::Deserialize)]
        struct Entry {
            #[allow(dead_code)]
            size: usize,
        }
        for message in [
            message::<usize>(),
            message::<u8>(),
            message::<u16>(),
            message::<u32>(),
            message::<u64>(),
            message::<isize>(),
            message::<i8>(),
            message::<i16>(),
            message::<i32>(),
            message::<i64>(),
            message::<f32>(),
            message::<f64>(),
            message::<Vec<Entry>>(),
            message::<()>(),
        ] {
            let plain = parser_message(&message, "an object");
            assert_ne!(plain, message);
            let expected = plain.split("expected ").nth(1).unwrap();
            assert!(["a number", "null", "an "].iter().any(|word| expected.starts_with(word)), "{plain}");
        }
    }

    #[test]
    fn other_text_between_the_marks_stays() {
        for text in ["‹A b›", "a ‹ b", "‹›", "‹x y›", "›‹", "‹x(›"] {
            assert_eq!(worded(text, &CommandLine), text);
        }
        assert_eq!(worded("‹ ‹ignore›", &CommandLine), "‹ --ignore");
        assert_eq!(
            parts("‹ ‹ignore› ‹"),
            [Part::Text("‹ "), Part::Setting("ignore", None), Part::Text(" ‹")]
        );
        assert_eq!(parts(""), []);
        let command = Part::Command(
            "eval",
            vec![Argument::Positional("MODEL"), Argument::Setting("json", Some("FILE"))],
        );
        assert_eq!(Remedy::from("‹eval(MODEL, json=FILE)›".to_owned()).parts(), [command]);
    }
}
