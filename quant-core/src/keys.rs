//! Keys of steps: the settings that a step or a rounding brings, with their names, values and help.

use std::borrow::Cow;
use std::str::FromStr;

use serde_json::{Map, Value, json};

use crate::{Error, Result};

/// A setting of a step, for recipe files, requests and the command line.
///
/// ```
/// use quant_core::transform::StepKey;
/// use serde_json::json;
///
/// let strength = StepKey::new("strength", "How much is evened out", json!({ "type": "number", "minimum": 0 }));
/// assert_eq!(strength.schema["description"], "How much is evened out");
/// assert_eq!(strength.setting, None);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StepKey {
    /// The key.
    pub name: &'static str,
    /// A JSON schema of its values, with a `description`.
    pub schema: Value,
    /// The field of [`RecipeSettings`](crate::run::RecipeSettings) that sets it too, if there is one: `output_alpha`
    /// for `alpha` of `smooth-outputs`.
    pub setting: Option<&'static str>,
    /// The help of that setting, with the default in square brackets. Other settings are
    /// [marked](crate::wording).
    pub help: &'static str,
    /// Whether the value is the path of a file. Such a key has a [`setting`](Self::setting), and only that sets it.
    pub is_file: bool,
}

impl StepKey {
    /// Creates a key that no field of `RecipeSettings` sets.
    pub fn new(name: &'static str, description: &str, schema: Value) -> Self {
        let mut described = Map::from_iter([("description".to_owned(), description.into())]);
        if let Value::Object(entries) = schema {
            described.extend(entries);
        }
        Self { name, schema: described.into(), setting: None, help: "", is_file: false }
    }

    pub(crate) fn of_names(name: &'static str, description: &str, values: &[&str]) -> Self {
        Self::new(name, description, json!({ "enum": values }))
    }

    pub(crate) fn of_file(name: &'static str, setting: &'static str, help: &'static str) -> Self {
        let key = Self::new(name, help, json!({ "type": "string" }));
        Self { is_file: true, ..key.with_setting(setting, help) }
    }

    pub(crate) fn with_setting(self, setting: &'static str, help: &'static str) -> Self {
        Self { setting: Some(setting), help, ..self }
    }
}

/// A value of a setting, its name in options and recipes, and a description.
pub(crate) type Named<T> = (T, &'static str, &'static str);

/// Returns a schema of these names with their descriptions.
pub(crate) fn schema_of_names<T>(all: &[Named<T>]) -> Value {
    let one = |(_, name, description): &Named<T>| json!({ "const": name, "description": description });
    json!({ "oneOf": all.iter().map(one).collect::<Vec<_>>() })
}

/// Parses a value that is a name. The text of a number or a boolean is a name too, because a command line has no
/// quotes.
pub(crate) fn parse_text<T: FromStr<Err = Error>>(key: &str, value: &Value) -> Result<T> {
    match value {
        Value::String(text) => text.parse(),
        Value::Number(_) | Value::Bool(_) => value.to_string().parse(),
        _ => Err(Error::usage(format!("{key} is {value}, which is not a name"), "give one name")),
    }
}

/// Returns the value for a key whose schema is a string: the text of a number or a boolean, as
/// [`parse_text`] reads it.
pub(crate) fn as_text_if_string<'a>(value: &'a Value, schema: &Value) -> Cow<'a, Value> {
    let is_string = schema.get("type").and_then(Value::as_str) == Some("string");
    match value {
        Value::Number(_) | Value::Bool(_) if is_string => Cow::Owned(value.to_string().into()),
        _ => Cow::Borrowed(value),
    }
}

/// The error for a key that a step or rounding does not have, in code that sets keys of [`StepKey`] lists.
pub(crate) fn no_such_key(step: &str, key: &str) -> Error {
    Error::Internal(format!("`{step}` has no key `{key}`"))
}

/// The number may be a string, and `NaN` or infinite.
pub(crate) fn parse_number(key: &str, value: &Value) -> Result<f64> {
    let number = value.as_f64().or_else(|| value.as_str()?.parse().ok());
    number.ok_or_else(|| Error::usage(format!("{key} is {value}, which is not a number"), "give a number"))
}

pub(crate) fn parse_count(key: &str, value: &Value) -> Result<usize> {
    let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
    count.ok_or_else(|| {
        Error::usage(
            format!("{key} is {value}, which is not a count"),
            "give an integer that is not negative",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_wrong_type_are_refused() {
        assert_eq!(parse_number("damping", &json!(0.5)).unwrap(), 0.5);
        assert_eq!(parse_number("damping", &json!(1)).unwrap(), 1.0);
        assert!(parse_number("damping", &json!("NaN")).unwrap().is_nan());
        assert_eq!(parse_count("size", &json!(4)).unwrap(), 4);
        for value in [json!(-1), json!(1.5), json!("4"), Value::Null, json!([4])] {
            assert!(parse_count("size", &value).unwrap_err().to_string().contains("size is "), "{value}");
        }
        for value in [json!("much"), Value::Null, json!(true)] {
            assert!(parse_number("damping", &value).is_err(), "{value}");
        }
        let search = |value| parse_text::<crate::transform::Search>("search", &value).unwrap_err();
        for (value, expected) in [
            (json!(1), "unknown search `1`"),
            (json!(true), "unknown search `true`"),
            (json!(["fast"]), "search is [\"fast\"], which is not a name"),
        ] {
            assert!(search(value).to_string().contains(expected), "{expected}");
        }
        let of = |value: &Value, schema: Value| as_text_if_string(value, &schema).into_owned();
        assert_eq!(of(&json!(2024), json!({ "type": "string" })), json!("2024"));
        assert_eq!(of(&json!(true), json!({ "type": "string" })), json!("true"));
        assert_eq!(of(&json!(2024), json!({ "type": "integer" })), json!(2024));
    }
}
