//! Names from files: which tensor names are accepted, and how text is shown in messages.

use std::borrow::Cow;

pub(crate) const MAX_NAME_BYTES: usize = 1024;

/// Returns why a tensor may not have this name, as the end of a sentence.
pub(crate) fn name_fault(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        Some("is empty")
    } else if name.len() > MAX_NAME_BYTES {
        Some("is longer than 1024 bytes")
    } else if name.contains('\0') {
        Some("contains NUL")
    } else if name.chars().any(char::is_control) {
        Some("contains control characters")
    } else if name.chars().any(is_deceptive) {
        Some("contains invisible characters that change the direction of text")
    } else {
        None
    }
}

/// Characters that reorder or break the line they are shown in.
fn is_deceptive(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Escapes control characters and characters that reorder text, and cuts text off after 160 characters.
pub fn printable(text: &str) -> String {
    const MAX_CHARS: usize = 160;
    let mut out = String::new();
    for (i, c) in text.chars().enumerate() {
        if i == MAX_CHARS {
            out.push('…');
            break;
        }
        if c.is_control() || is_deceptive(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// Whether a character could control a terminal or reorder displayed text. Line feeds and tabs are printable.
pub fn is_unprintable(c: char) -> bool {
    c.is_control() && !matches!(c, '\n' | '\t') || is_deceptive(c)
}

/// Escapes [unprintable](is_unprintable) characters.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unprintable) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_unprintable(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    Cow::Owned(out)
}
