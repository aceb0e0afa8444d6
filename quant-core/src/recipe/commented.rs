//! Recipes with comments, from the descriptions in the JSON schema.

use serde_json::Value;

use super::Recipe;

const WIDTH: usize = 100;

impl Recipe {
    /// [`to_toml`](Self::to_toml) with a comment before each key that says what it does, and which names it accepts.
    ///
    /// ```
    /// use quant_core::recipe::Recipe;
    ///
    /// let recipe = Recipe::preset("gptq-w4a16")?;
    /// let text = recipe.to_commented_toml();
    /// assert!(text.contains("\n# Tokens per window\nlength = 512\n"));
    /// assert_eq!(Recipe::parse(&text)?.to_toml(), recipe.to_toml());
    /// # Ok::<(), quant_core::Error>(())
    /// ```
    pub fn to_commented_toml(&self) -> String {
        let schema: Value = serde_json::from_str(&Self::schema()).unwrap_or_default();
        let text = self.to_toml();
        let mut commented = String::new();
        // The schema of the current table.
        let mut table = &schema;
        let mut lines = text.lines().peekable();
        while let Some(line) = lines.next() {
            match line.trim_start_matches('[').split_once(']') {
                Some((path, _)) if line.starts_with('[') => {
                    table = table_of(&schema, path, lines.peek().copied().unwrap_or_default());
                    // A step is described by its name.
                    if path == "transform" || !path.contains('.') {
                        commented.push_str(&comment(&schema, table));
                    }
                }
                _ => {
                    let key = line.split(" = ").next().unwrap_or_default();
                    commented.push_str(&comment(&schema, &table["properties"][key]));
                }
            }
            commented.push_str(line);
            commented.push('\n');
        }
        commented
    }
}

/// Follows a reference to a definition.
fn resolved<'a>(schema: &'a Value, mut value: &'a Value) -> &'a Value {
    while let Some(name) = value["$ref"].as_str().and_then(|path| path.strip_prefix("#/$defs/")) {
        value = &schema["$defs"][name];
    }
    value
}

/// The schema of a table with the path `path`. The first key selects the alternative of `transform`.
fn table_of<'a>(schema: &'a Value, path: &str, first: &str) -> &'a Value {
    let definition = |name: &str| &schema["$defs"][name];
    match path {
        "transform" => {
            let kind = first.strip_prefix("kind = ").unwrap_or_default().trim_matches('"');
            let alternatives = definition("TransformEntry")["oneOf"].as_array();
            let found = alternatives
                .and_then(|all| all.iter().find(|one| one["properties"]["kind"]["const"] == kind));
            found.unwrap_or(&Value::Null)
        }
        "quantize.override" => definition("OverrideEntry"),
        _ => match path.strip_prefix("quantize.") {
            Some(rounding) => &definition("QuantizeEntry")["properties"][rounding],
            None => {
                let value = &schema["properties"][path];
                let optional = value["anyOf"].as_array().and_then(|all| all.first());
                resolved(schema, optional.unwrap_or(value))
            }
        },
    }
}

/// The names that a key accepts.
fn names<'a>(schema: &'a Value, value: &'a Value, found: &mut Vec<&'a str>) {
    let value = resolved(schema, value);
    let listed = value["enum"].as_array().into_iter().flatten().chain([&value["const"]]);
    for name in listed.filter_map(Value::as_str) {
        if !found.contains(&name) {
            found.push(name);
        }
    }
    for key in ["oneOf", "anyOf"] {
        value[key].as_array().into_iter().flatten().for_each(|one| names(schema, one, found));
    }
}

fn comment(schema: &Value, value: &Value) -> String {
    let Some(description) = value["description"].as_str().or(resolved(schema, value)["description"].as_str())
    else {
        return String::new();
    };
    let mut found = Vec::new();
    // Of a table, only the description.
    if value["properties"].is_null() {
        names(schema, value, &mut found);
    }
    let mut text = description.trim_end_matches('.').to_owned();
    if !found.is_empty() {
        text.push_str(&format!(" ({})", found.join(", ")));
    }
    let mut lines = vec!["#".to_owned()];
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= WIDTH => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(format!("# {word}")),
        }
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::PRESETS;

    #[test]
    fn every_key_has_a_comment_and_the_recipe_is_the_same() {
        for preset in PRESETS {
            let recipe = Recipe::preset(preset.name).unwrap();
            let text = recipe.to_commented_toml();
            assert_eq!(Recipe::parse(&text).unwrap().to_toml(), recipe.to_toml(), "{}", preset.name);
            let mut before = "";
            for line in text.lines() {
                let needs = line.contains(" = ") && !line.starts_with('#') && !line.starts_with("kind = ");
                assert!(
                    !needs || before.starts_with("# "),
                    "{}: no comment before `{line}` in\n{text}",
                    preset.name
                );
                assert!(line.chars().count() <= WIDTH && !line.contains('‹'), "{line}");
                before = line;
            }
        }
    }

    #[test]
    fn comments_name_the_choices() {
        let text = Recipe::preset("awq-w4a16").unwrap().to_commented_toml();
        for part in [
            " (fast,\n# reference)\nsearch = \"fast\"\n",
            "# The rounding method (rtn, gptq)\nmethod = \"rtn\"\n",
            "\n# How weights are rounded\n[quantize]\n",
            "scales and clipping, searched on a calibration text\n[[transform]]\nkind = \"awq\"\n",
        ] {
            assert!(text.contains(part), "no `{part}` in\n{text}");
        }
    }
}
