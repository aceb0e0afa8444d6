//! Patterns that select linears by name.

use std::fmt;

use regex::Regex;

use crate::{Error, Result};

/// Selects modules by name, such as `model.layers.3.mlp.down_proj`.
///
/// * `re:EXPRESSION` is a regular expression that must match the whole name;
/// * a text with `*` or `?` is a glob over the whole name (`*` also matches dots);
/// * anything else is a name, or its last parts: `down_proj`, `mlp.down_proj`.
///
/// A trailing `.weight` is ignored, so tensor names work too.
#[derive(Debug, Clone)]
pub struct Pattern {
    text: String,
    regex: Regex,
}

impl Pattern {
    /// Parses a pattern.
    ///
    /// # Errors
    /// When it is empty or not a valid expression.
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
        Ok(Self { text: text.to_owned(), regex })
    }

    /// The pattern as given.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the pattern selects this module.
    pub fn matches(&self, module: &str) -> bool {
        self.regex.is_match(module)
    }

    /// Up to three of `names` that resemble the pattern.
    pub fn nearest(&self, names: &[&str]) -> Vec<String> {
        let parts = self.text.matches('.').count() + 1;
        let mut scored: Vec<(f64, String)> = names
            .iter()
            .map(|name| {
                // Compares and shows only as many trailing parts as the pattern has.
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
