//! Splits text into tokens with line numbers; comments are dropped.

use crate::error::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token<'a> {
    /// An identifier, an opcode with its modifiers, a directive or a number.
    Word(&'a str),
    /// The text between double quotes.
    Text(&'a str),
    /// Any other character.
    Mark(char),
}

/// A token and its line, from 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Located<'a> {
    pub token: Token<'a>,
    pub line: u32,
}

fn in_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%' | '.')
}

/// `::` inside an opcode (`.shared::cta`) is part of the word.
pub(crate) fn tokenize(text: &str) -> Result<Vec<Located<'_>>> {
    let mut tokens = Vec::new();
    let mut line = 1u32;
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if c == '\n' {
            line += 1;
        }
        if c.is_whitespace() || c == '\0' {
            rest = &rest[c.len_utf8()..];
        } else if rest.starts_with("//") {
            rest = rest.find('\n').map_or("", |end| &rest[end..]);
        } else if rest.starts_with("/*") {
            let end = rest.find("*/").map_or(rest.len(), |end| end + 2);
            line += rest[..end].matches('\n').count() as u32;
            rest = &rest[end..];
        } else if c == '"' {
            let Some(end) = rest[1..].find('"') else {
                return Err(Error::Parse { line, message: "unterminated string".to_owned() });
            };
            let inside = &rest[1..=end];
            tokens.push(Located { token: Token::Text(inside), line });
            line += inside.matches('\n').count() as u32;
            rest = &rest[end + 2..];
        } else if in_word(c) {
            let mut end = 0;
            loop {
                end += rest[end..].find(|c| !in_word(c)).unwrap_or(rest.len() - end);
                let after = &rest[end..];
                let names = after.strip_prefix("::").is_some_and(|more| more.starts_with(in_word));
                if !names {
                    break;
                }
                end += 2;
            }
            tokens.push(Located { token: Token::Word(&rest[..end]), line });
            rest = &rest[end..];
        } else {
            tokens.push(Located { token: Token::Mark(c), line });
            rest = &rest[c.len_utf8()..];
        }
    }
    Ok(tokens)
}
