//! How messages name settings and commands, which each program spells in its own way.
//!
//! A message writes a setting as `‹group_size›`, one with its value as `‹format=gptq›`, and a command as `‹plan(MODEL)›` or
//! `‹eval(MODEL, text=TEXT)›`. That can be read as it stands. [`worded`] puts a program's own spelling in its place, which
//! a [`Wording`] has: `--group-size` on a command line, `group_size=` in Python.

use std::borrow::Cow;

/// A program's spelling of settings and commands.
pub trait Wording {
    /// A setting, by its name in `snake_case`, with the value that is proposed for it, if one is.
    fn setting(&self, name: &str, value: Option<&str>) -> String;
    /// A command with its arguments: settings with their values, and values without a name.
    fn command(&self, name: &str, arguments: &[Argument<'_>]) -> String;
}

/// An argument of a command in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Argument<'a> {
    /// A value that stands at its place.
    Positional(&'a str),
    /// A setting, with a value or without.
    Setting(&'a str, Option<&'a str>),
}

const OPEN: char = '‹';
const CLOSE: char = '›';

/// A message in a program's own words. What stands between the marks and is no setting or command stays as it is.
pub fn worded<'a>(text: &'a str, wording: &dyn Wording) -> Cow<'a, str> {
    if !text.contains(OPEN) {
        return Cow::Borrowed(text);
    }
    let mut said = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(OPEN) {
        said.push_str(before);
        match after.split_once(CLOSE).and_then(|(marked, tail)| Some((one(marked, wording)?, tail))) {
            Some((own, tail)) => {
                said.push_str(&own);
                rest = tail;
            }
            None => {
                said.push(OPEN);
                rest = after;
            }
        }
    }
    said.push_str(rest);
    Cow::Owned(said)
}

/// What stands between two marks, where it is a setting or a command.
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
            // A value that may be left out needs the sign.
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
        for (text, said) in [
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
            assert_eq!(worded(text, &CommandLine), said);
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
