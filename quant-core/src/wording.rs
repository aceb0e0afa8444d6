//! How messages name settings and commands, which each program spells differently.
//!
//! A message writes a setting as `‹group_size›`, a setting with a value as `‹format=gptq›`, and a command as
//! `‹plan(MODEL)›` or `‹eval(MODEL, text=TEXT)›`. This form is readable as it is. [`worded`] replaces it with a
//! program's own spelling, which a [`Wording`] defines: `--group-size` on a command line, `group_size=` in Python.

use std::borrow::Cow;

/// A program's spelling of settings and commands.
pub trait Wording {
    /// Spells a setting, given its name in `snake_case` and the suggested value, if any.
    fn setting(&self, name: &str, value: Option<&str>) -> String;
    /// Spells a command with its arguments: settings with their values, and positional values.
    fn command(&self, name: &str, arguments: &[Argument<'_>]) -> String;
}

/// An argument of a command in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Argument<'a> {
    /// A positional value.
    Positional(&'a str),
    /// A setting, with or without a value.
    Setting(&'a str, Option<&'a str>),
}

const OPEN: char = '‹';
const CLOSE: char = '›';

/// Returns a message in a program's own spelling. Marked text that is not a setting or command stays as it is.
pub fn worded<'a>(text: &'a str, wording: &dyn Wording) -> Cow<'a, str> {
    if !text.contains(OPEN) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(OPEN) {
        out.push_str(before);
        match after.split_once(CLOSE).and_then(|(marked, tail)| Some((one(marked, wording)?, tail))) {
            Some((own, tail)) => {
                out.push_str(&own);
                rest = tail;
            }
            None => {
                out.push(OPEN);
                rest = after;
            }
        }
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// Spells the text between two marks, if it is a setting or a command.
fn one(marked: &str, wording: &dyn Wording) -> Option<String> {
    let end = marked.find(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'));
    let (name, tail) = marked.split_at(end.unwrap_or(marked.len()));
    if name.is_empty() {
        return None;
    }
    if let Some(value) = tail.strip_prefix('=') {
        return Some(wording.setting(name, Some(value)));
    }
    if let Some(inner) = tail.strip_prefix('(').and_then(|t| t.strip_suffix(')')) {
        let arguments: Vec<_> = inner.split(", ").filter(|a| !a.is_empty()).map(argument).collect();
        return Some(wording.command(name, &arguments));
    }
    tail.is_empty().then(|| wording.setting(name, None))
}

fn argument(text: &str) -> Argument<'_> {
    let is_name = |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
    match text.split_once('=') {
        Some((name, value)) if is_name(name) => Argument::Setting(name, Some(value)),
        None if is_name(text) => Argument::Setting(text, None),
        _ => Argument::Positional(text),
    }
}

/// The spelling of a command line: `--group-size`, `--format gptq`, `` `quant plan MODEL` ``.
#[derive(Debug, Clone, Copy, Default)]
pub struct CommandLine;

impl Wording for CommandLine {
    fn setting(&self, name: &str, value: Option<&str>) -> String {
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
        let words: Vec<String> = ["quant", name].into_iter().map(str::to_owned).chain(words).collect();
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
            ("‹plan()› predicts", "`quant plan` predicts"),
            ("‹eval(MODEL, text=TEXT, json=FILE)›", "`quant eval MODEL --text TEXT --json=FILE`"),
            ("‹gate(RESULT…, baseline=FILE, update)›", "`quant gate RESULT… --baseline FILE --update`"),
        ] {
            assert_eq!(worded(text, &CommandLine), out);
        }
    }

    #[test]
    fn other_text_between_the_marks_stays() {
        for text in ["‹A b›", "a ‹ b", "‹›", "‹x y›", "›‹", "‹x(›"] {
            assert_eq!(worded(text, &CommandLine), text);
        }
        assert_eq!(worded("‹ ‹ignore›", &CommandLine), "‹ --ignore");
    }
}
