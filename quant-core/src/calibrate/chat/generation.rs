//! `{% generation %}` blocks of a template, which contain the assistant's text.
//!
//! The tag is an extension of transformers. Before a template is compiled, each tag is replaced by a filter block,
//! which inserts marks before and after the text. The marks are noncharacters, which should not occur in text files.

use std::ops::Range;

/// Marks the beginning and the end of a block's text.
pub(super) const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];
/// The filter that places the marks.
pub(super) const FILTER: &str = "quant_generation";

/// Returns the template with each `generation` tag replaced by a filter block, and the number of such tags.
pub(super) fn replace_tags(source: &str) -> (String, usize) {
    let mut out = String::with_capacity(source.len());
    let (mut rest, mut found) = (source, 0);
    while let Some(at) = rest.find('{') {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let len = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map_or(tag.len(), |end| end + 2),
            Some(b'{') => expression_len(tag, "}}"),
            Some(b'%') => expression_len(tag, "%}"),
            _ => 1,
        };
        let (tag, after) = tag.split_at(len);
        rest = after;
        let name = tag.strip_prefix("{%").map(|t| t.trim_start_matches(['-', '+']).trim_start());
        match name.map(word) {
            Some("generation") => {
                out.push_str(&tag.replacen("generation", &format!("filter {FILTER}"), 1));
                found += 1;
            }
            Some("endgeneration") => out.push_str(&tag.replacen("endgeneration", "endfilter", 1)),
            Some("raw") => {
                out.push_str(tag);
                let end = raw_len(rest);
                out.push_str(&rest[..end]);
                rest = &rest[end..];
            }
            _ => out.push_str(tag),
        }
    }
    out.push_str(rest);
    (out, found)
}

fn word(text: &str) -> &str {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or("")
}

/// Strings are skipped.
fn expression_len(tag: &str, end: &str) -> usize {
    let mut quote = None;
    let mut escaped = false;
    for (i, c) in tag.char_indices().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(q) if c == q => quote = None,
            Some(_) => {}
            None if c == '"' || c == '\'' => quote = Some(c),
            None if tag[i..].starts_with(end) => return i + end.len(),
            None => {}
        }
    }
    tag.len()
}

/// The number of bytes up to the tag that ends a raw block.
fn raw_len(text: &str) -> usize {
    let mut at = 0;
    while let Some(tag) = text[at..].find("{%") {
        at += tag;
        if word(text[at + 2..].trim_start_matches(['-', '+']).trim_start()) == "endraw" {
            return at;
        }
        at += 2;
    }
    text.len()
}

/// Removes the marks from a text. Returns the remaining text, and the byte ranges of the marked parts in it.
pub(super) fn take_marks(marked: &str) -> Result<(String, Vec<Range<usize>>), String> {
    let mut text = String::with_capacity(marked.len());
    let mut spans = Vec::new();
    let mut open = None;
    for part in marked.split_inclusive(MARKS) {
        let mark = part.chars().next_back().filter(|c| MARKS.contains(c));
        text.push_str(&part[..part.len() - mark.map_or(0, char::len_utf8)]);
        match (mark, open) {
            (None, _) => {}
            (Some(m), None) if m == MARKS[0] => open = Some(text.len()),
            (Some(m), Some(start)) if m == MARKS[1] => {
                if start < text.len() {
                    spans.push(start..text.len());
                }
                open = None;
            }
            _ => return Err("generation blocks are nested".into()),
        }
    }
    match open {
        Some(_) => Err("a generation block is cut off".into()),
        None => Ok((text, spans)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_the_tags_are_replaced() {
        for (source, expected, count) in [
            ("a {% generation %}x{% endgeneration %}", "a {% filter F %}x{% endfilter %}", 1),
            ("{%- generation -%}{%- endgeneration -%}", "{%- filter F -%}{%- endfilter -%}", 1),
            ("{%generation%}\n{%+ endgeneration %}", "{%filter F%}\n{%+ endfilter %}", 1),
            ("{# {% generation %} #}{% generations %}", "{# {% generation %} #}{% generations %}", 0),
            ("{{ '{% generation %}' }}", "{{ '{% generation %}' }}", 0),
            (r#"{{ "}} \" {% generation %}" }}"#, r#"{{ "}} \" {% generation %}" }}"#, 0),
            (
                "{% raw %}{% generation %}{%- endraw %}{% generation %}",
                "{% raw %}{% generation %}{%- endraw %}{% filter F %}",
                1,
            ),
            ("{% set x = '%}{% generation %}' %}{", "{% set x = '%}{% generation %}' %}{", 0),
            ("{", "{", 0),
            ("{% generation", "{% filter F", 1),
        ] {
            let (found, tags) = replace_tags(source);
            assert_eq!((found.replace(FILTER, "F").as_str(), tags), (expected, count), "{source}");
        }
    }

    #[test]
    fn marks_come_out_in_pairs() {
        let marked = "aé\u{fdd0}bc\u{fdd1}d\u{fdd0}\u{fdd1}\u{fdd0}e\u{fdd1}";
        assert_eq!(take_marks(marked).unwrap(), ("aébcde".to_owned(), vec![3..5, 6..7]));
        for wrong in ["\u{fdd0}", "\u{fdd1}", "\u{fdd0}\u{fdd0}\u{fdd1}\u{fdd1}", "a\u{fdd1}b\u{fdd0}"] {
            assert!(take_marks(wrong).is_err(), "{wrong:?}");
        }
    }

    proptest! {
        /// Text without `generation` tags is returned unchanged, and never causes a panic.
        #[test]
        fn any_text_goes_through(source in "[{}%#'\"a \\-ré]{0,60}") {
            let (found, tags) = replace_tags(&source);
            prop_assert_eq!(tags, 0);
            prop_assert_eq!(found, source);
        }
    }
}
