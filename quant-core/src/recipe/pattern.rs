//! Patterns that select linears by name.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use regex::Regex;

use crate::wording::Remedy;
use crate::{Error, Result};

/// Selects modules by name, such as `model.layers.3.mlp.down_proj`.
///
/// * `re:EXPRESSION` is a regular expression that must match the whole name;
/// * a text with `*` or `?` is a glob over the whole name (`*` also matches dots);
/// * anything else is a name, or its last parts: `down_proj`, `mlp.down_proj`.
///
/// A trailing `.weight` of a name or glob is ignored, so tensor names work too.
#[derive(Debug, Clone)]
pub struct Pattern {
    text: String,
    regex: Regex,
    place: Option<Place>,
}

#[derive(Debug, Clone)]
struct Place {
    /// The file, unless the recipe was parsed from a text.
    file: Option<Arc<Path>>,
    line: usize,
}

impl Pattern {
    /// Parses a pattern.
    ///
    /// # Errors
    /// [`Error::Usage`] if it is empty, or not a valid expression of at most 1 MiB when compiled.
    pub fn new(text: &str) -> Result<Self> {
        let fault = |reason: String| {
            Error::usage(
                format!("pattern `{text}`: {reason}"),
                "use a name (down_proj), a glob (*.layers.3.*), or a regular expression after re:",
            )
        };
        let expression = match text.strip_prefix("re:") {
            Some(expression) => format!("^(?:{expression})$"),
            None => {
                let name = text.strip_suffix(".weight").unwrap_or(text);
                if name.is_empty() {
                    return Err(fault("is empty".into()));
                }
                let body = regex::escape(name).replace("\\*", ".*").replace("\\?", ".");
                let is_glob = name.contains(['*', '?']);
                if is_glob { format!("^{body}$") } else { format!("(?:^|\\.){body}$") }
            }
        };
        let regex = regex::RegexBuilder::new(&expression)
            .size_limit(1 << 20)
            .build()
            .map_err(|e| fault(e.to_string()))?;
        Ok(Self { text: text.to_owned(), regex, place: None })
    }

    pub(super) fn at_line(self, line: usize) -> Self {
        Self { place: Some(Place { file: None, line }), ..self }
    }

    pub(super) fn set_file(&mut self, path: &Arc<Path>) {
        if let Some(place) = &mut self.place {
            place.file = Some(path.clone());
        }
    }

    /// The error for a pattern of the setting `option` that matches none of `names`.
    pub(crate) fn matches_nothing(&self, option: &'static str, names: &[&str]) -> Error {
        let error =
            Error::PatternMatchesNothing { option, pattern: self.text.clone(), nearest: self.nearest(names) };
        match &self.place {
            None => error,
            Some(_) => self.fault(option, "matches no linear of the model".into(), error.remedy()),
        }
    }

    /// The error for a pattern if other patterns take precedence for all modules that it matches.
    pub(crate) fn has_no_effect(&self, option: &'static str) -> Error {
        self.fault(
            option,
            "has no effect: other patterns take precedence for all linears that it matches".into(),
            "remove it; ‹ignore› takes precedence over ‹override›, and a later ‹override› over an earlier one",
        )
    }

    /// The error for a pattern that matches only weights whose codes are kept, of this type.
    pub(crate) fn keeps_codes(&self, option: &'static str, kind: &str) -> Error {
        self.fault(
            option,
            format!(
                "has no effect: the model is already quantized, and the codes of all weights that it matches are kept \
                 as {kind}"
            ),
            "add ‹requantize›, or remove the pattern",
        )
    }

    /// An error about the setting `option`, or about the line of the recipe that has the pattern.
    fn fault(&self, option: &'static str, reason: String, remedy: impl Into<Remedy>) -> Error {
        let remedy = remedy.into();
        let text = &self.text;
        match &self.place {
            None => Error::Usage { message: format!("‹{option}={text}› {reason}"), remedy },
            Some(Place { file, line }) => {
                let reason = format!("line {line}: {option} `{text}` {reason}");
                match file {
                    Some(path) => Error::Recipe { path: path.to_path_buf(), reason, remedy },
                    None => Error::Usage { message: reason, remedy },
                }
            }
        }
    }

    /// The pattern as given.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the pattern selects this module.
    pub fn matches(&self, module: &str) -> bool {
        self.regex.is_match(module)
    }

    /// The last parts of up to three of `names` that resemble the pattern, most similar first; as many parts as the
    /// pattern has.
    pub fn nearest(&self, names: &[&str]) -> Vec<String> {
        let parts = self.text.matches('.').count() + 1;
        let mut scored: Vec<(f64, String)> = names
            .iter()
            .map(|name| {
                let tail: Vec<&str> = name.rsplit('.').take(parts).collect();
                let tail = tail.into_iter().rev().collect::<Vec<_>>().join(".");
                (strsim::jaro_winkler(&self.text, &tail), tail)
            })
            .filter(|(score, _)| *score > 0.7)
            .collect();
        scored.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
        scored.dedup_by(|a, b| a.1 == b.1);
        scored.into_iter().take(3).map(|(_, name)| name).collect()
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_globs_and_expressions() {
        let name = "model.layers.3.mlp.down_proj";
        for yes in [
            "down_proj",
            "mlp.down_proj",
            "model.layers.3.mlp.down_proj.weight",
            "*.3.*",
            "*down_pro?",
            "re:.*\\.(up|down)_proj",
        ] {
            assert!(Pattern::new(yes).unwrap().matches(name), "{yes}");
        }
        for no in ["own_proj", "mlp", "*.13.*", "down_proj*x", "re:down_proj", "Down_proj"] {
            assert!(!Pattern::new(no).unwrap().matches(name), "{no}");
        }
        for bad in ["", "re:(", ".weight"] {
            assert!(Pattern::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn suggests_what_was_meant() {
        let names =
            ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "model.layers.0.mlp.up_proj"];
        assert_eq!(Pattern::new("down_prj").unwrap().nearest(&names)[0], "down_proj");
        assert!(Pattern::new("zzz").unwrap().nearest(&names).is_empty());
    }
}
