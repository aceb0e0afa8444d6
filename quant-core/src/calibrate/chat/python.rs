//! The parts of Python that chat templates rely on: JSON, dates, exceptions.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use serde_json::Value as Json;

/// The current date as seen by templates. It is fixed, so that results do not depend on the day of the run. Llama 3.2's
/// own template uses the same date as its fallback.
pub(super) const TODAY: &str = "2024-07-26";

fn invalid(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason.into())
}

pub(super) const RAISED: &str = "the template refuses it: ";

/// `raise_exception(message)`.
pub(super) fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(invalid(format!("{RAISED}{message}")))
}

/// `strftime_now(format)`, fixed at midnight of [`TODAY`], a Friday.
pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let mut directive = rest.next();
        let unpadded = directive == Some('-');
        if unpadded {
            directive = rest.next();
        }
        let value = match directive {
            Some('Y') => "2024",
            Some('y') => "24",
            Some('m') => "07",
            Some('B') => "July",
            Some('b' | 'h') => "Jul",
            Some('d' | 'e') => "26",
            Some('j') => "208",
            Some('A') => "Friday",
            Some('a') => "Fri",
            Some('u' | 'w') => "5",
            Some('H' | 'M' | 'S') => "00",
            Some('I') => "12",
            Some('p') => "AM",
            Some('F') => TODAY,
            Some('T') => "00:00:00",
            Some('R') => "00:00",
            Some('D' | 'x') => "07/26/24",
            Some('%') => "%",
            _ => return Err(invalid(format!("strftime_now does not support the format `{format}`"))),
        };
        let shorter = value.trim_start_matches('0');
        text.push_str(match (unpadded, shorter) {
            (true, "") => "0",
            (true, shorter) => shorter,
            (false, _) => value,
        });
    }
    Ok(text)
}

/// `json.dumps` with the options that transformers passes through; not escaped for HTML.
pub(super) fn tojson(value: &Value, ensure_ascii: Option<bool>, options: Kwargs) -> Result<String, Error> {
    let json =
        serde_json::to_value(value).map_err(|e| invalid(format!("cannot be converted to JSON: {e}")))?;
    let ensure_ascii = match ensure_ascii {
        Some(choice) => choice,
        None => options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    let indent = match options.get::<Option<Value>>("indent")? {
        Some(indent) if !indent.is_none() => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::from(u8::try_from(indent.clone())?)),
        }),
        _ => None,
    };
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(_) => return Err(invalid("`separators` must be two strings")),
        None => (if indent.is_some() { "," } else { ", " }, ": "),
    };
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut writer = Writer { text: String::new(), ensure_ascii, indent, item, key, sort_keys };
    writer.value(&json, 0);
    Ok(writer.text)
}

struct Writer<'a> {
    text: String,
    ensure_ascii: bool,
    indent: Option<String>,
    item: &'a str,
    key: &'a str,
    sort_keys: bool,
}

impl Writer<'_> {
    fn value(&mut self, value: &Json, depth: usize) {
        match value {
            Json::String(text) => self.string(text),
            Json::Number(number) => {
                let text = number.to_string();
                // Python writes the sign of an exponent and at least two digits.
                match text.split_once('e') {
                    Some((digits, exponent)) => {
                        let (sign, exponent) = match exponent.strip_prefix('-') {
                            Some(rest) => ('-', rest),
                            None => ('+', exponent.trim_start_matches('+')),
                        };
                        let digits = digits.strip_suffix(".0").unwrap_or(digits);
                        self.text.push_str(&format!("{digits}e{sign}{exponent:0>2}"));
                    }
                    None => self.text.push_str(&text),
                }
            }
            Json::Array(items) => {
                self.list('[', ']', items.len(), depth, |w, i| w.value(&items[i], depth + 1))
            }
            Json::Object(fields) => {
                let mut fields: Vec<_> = fields.iter().collect();
                if self.sort_keys {
                    fields.sort_by_key(|(key, _)| *key);
                }
                self.list('{', '}', fields.len(), depth, |w, i| {
                    w.string(fields[i].0);
                    w.text.push_str(w.key);
                    w.value(fields[i].1, depth + 1);
                });
            }
            Json::Bool(_) | Json::Null => self.text.push_str(&value.to_string()),
        }
    }

    fn list(&mut self, open: char, close: char, len: usize, depth: usize, write: impl Fn(&mut Self, usize)) {
        self.text.push(open);
        for i in 0..len {
            if i > 0 {
                self.text.push_str(self.item);
            }
            self.new_line(depth + 1);
            write(self, i);
        }
        if len > 0 {
            self.new_line(depth);
        }
        self.text.push(close);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            self.text.push_str(&indent.repeat(depth));
        }
    }

    fn string(&mut self, text: &str) {
        let quoted = Json::from(text).to_string();
        if !self.ensure_ascii {
            self.text.push_str(&quoted);
            return;
        }
        let mut units = [0; 2];
        for c in quoted.chars() {
            if c.is_ascii() {
                self.text.push(c);
            } else {
                for unit in c.encode_utf16(&mut units) {
                    self.text.push_str(&format!("\\u{unit:04x}"));
                }
            }
        }
    }
}

/// `str.title`: the first letter of every run of letters that have cases in title case, the others in lower case.
pub(super) fn title(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut is_inside = false;
    for c in text.chars() {
        match is_inside {
            true => titled.extend(c.to_lowercase()),
            // A ligature becomes several letters, of which the first is capital.
            false => {
                let mut letters = c.to_uppercase();
                titled.extend(letters.next());
                titled.extend(letters.flat_map(char::to_lowercase));
            }
        }
        is_inside = c.is_lowercase() || c.is_uppercase();
    }
    titled
}

/// Jinja's test `sequence`: whether the value has a length and items, as strings, mappings, ranges and undefined values
/// do.
pub(super) fn is_sequence(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined => true,
        ValueKind::Iterable => value.len().is_some(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, value: Json) -> String {
        let mut environment = minijinja::Environment::new();
        environment.add_filter("tojson", tojson);
        environment.add_function("strftime_now", strftime_now);
        let value = Value::from(minijinja::value::Serde(&value));
        environment.render_str(source, minijinja::context! { v => value }).unwrap()
    }

    #[test]
    fn titles_are_python_s() {
        for (text, titled) in [
            ("x,y,,z", "X,Y,,Z"),
            ("it's ONE", "It'S One"),
            ("a1b ß", "A1B Ss"),
            ("中a ﬁrst", "中A First"),
            ("", ""),
        ] {
            assert_eq!(title(text), titled);
        }
    }

    #[test]
    fn sequences_are_python_s() {
        for (value, expected) in
            [(json!("role"), true), (json!([1]), true), (json!({"a": 1}), true), (json!(1), false)]
        {
            assert_eq!(is_sequence(&Value::from(minijinja::value::Serde(&value))), expected, "{value}");
        }
    }

    #[test]
    fn json_is_python_s() {
        let value = json!({"b": [1, 2.0, -0.5, 1e300, 1e-7], "a": {"<é😀>\n\"": null}, "e": [], "t": true});
        assert_eq!(
            render("{{ v|tojson }}", value.clone()),
            r#"{"b": [1, 2.0, -0.5, 1e+300, 1e-07], "a": {"<é😀>\n\"": null}, "e": [], "t": true}"#
        );
        assert_eq!(
            render("{{ v|tojson(ensure_ascii=true, sort_keys=true, separators=[',', ':']) }}", value),
            r#"{"a":{"<\u00e9\ud83d\ude00>\n\"":null},"b":[1,2.0,-0.5,1e+300,1e-07],"e":[],"t":true}"#
        );
        let nested = json!({"a": [1, {}], "b": {"c": 2}});
        assert_eq!(
            render("{{ v|tojson(indent=2) }}", nested),
            "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": {\n    \"c\": 2\n  }\n}"
        );
    }

    #[test]
    fn it_is_always_the_same_day() {
        assert_eq!(render("{{ strftime_now('%d %b %Y') }}", json!(0)), "26 Jul 2024");
        assert_eq!(strftime_now("%A, %-m/%-d %H:%-M 100%%").unwrap(), "Friday, 7/26 00:0 100%");
        assert!(strftime_now("%Q").is_err() && strftime_now("%").is_err());
    }
}
