//! Fields of `config.json` by type; every error names the key.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value};

use super::names::printable;
use crate::names::suggestion;
use crate::{Error, Result};

const MAX_SIZE: u64 = 1 << 31;

/// Typed access to one JSON object of a configuration file.
///
/// A field that is `null` counts as absent. Strings (`"4096"`) and floats (`4096.0`, `1e3`) are not accepted as
/// integers.
#[derive(Debug, Clone)]
pub struct ConfigFields<'a> {
    path: &'a Path,
    map: &'a Map<String, Value>,
    prefix: String,
    asked: Option<&'a Asked>,
}

/// The keys of a configuration that were requested, whether or not they are present; for keys of nested objects, the
/// key of the outer object.
#[derive(Debug, Default)]
pub struct Asked(RefCell<BTreeSet<String>>);

impl Asked {
    /// The keys.
    pub fn into_keys(self) -> BTreeSet<String> {
        self.0.into_inner()
    }
}

impl<'a> ConfigFields<'a> {
    /// Creates access to the object `map`, which was read from the file `path`.
    pub fn new(path: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self { path, map, prefix: String::new(), asked: None }
    }

    /// Returns the same fields, recording requested keys in `asked`.
    pub fn noting<'b>(&'b self, asked: &'b Asked) -> ConfigFields<'b> {
        ConfigFields { path: self.path, map: self.map, prefix: self.prefix.clone(), asked: Some(asked) }
    }

    /// Replaces the object; errors name the same file and outer keys.
    pub fn with_map<'b>(&'b self, map: &'b Map<String, Value>) -> ConfigFields<'b> {
        ConfigFields { path: self.path, map, prefix: self.prefix.clone(), asked: self.asked }
    }

    fn note(&self, key: &str) {
        if let Some(asked) = self.asked.filter(|_| self.prefix.is_empty()) {
            asked.0.borrow_mut().insert(key.to_owned());
        }
    }

    /// Whether the key is present, with any value.
    pub fn has(&self, key: &str) -> bool {
        self.note(key);
        self.map.contains_key(key)
    }

    /// Replaces the nested object `key` by `map`.
    pub fn nested<'b>(&'b self, key: &str, map: &'b Map<String, Value>) -> ConfigFields<'b> {
        ConfigFields { path: self.path, map, prefix: format!("{}{key}.", self.prefix), asked: self.asked }
    }

    /// The file, for messages.
    pub fn path(&self) -> &'a Path {
        self.path
    }

    /// The object itself.
    pub fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    /// Returns the value of a key, unless it is absent or `null`.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.note(key);
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// Returns a key with those of the enclosing objects: `rope_scaling.factor`.
    pub fn name_of(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// Creates [`Error::Config`] for a key; `reason` is the rest of a sentence that begins with the key.
    pub fn error(&self, key: &str, reason: impl Into<String>) -> Error {
        let field = self.name_of(key);
        Error::Config { path: self.path.to_owned(), field, reason: reason.into(), remedy: None }
    }

    /// Creates [`Error::Config`] for a key whose value is not in `supported`.
    pub fn unsupported(&self, key: &str, value: &str, supported: &[&str]) -> Error {
        let listed = format!("supported values of `{}`: {}", self.name_of(key), supported.join(", "));
        Error::Config {
            path: self.path.to_owned(),
            field: self.name_of(key),
            reason: format!("is `{}`, which is not supported", printable(value)),
            remedy: Some(suggestion(value, listed, supported).into()),
        }
    }

    /// Creates [`Error::Config`] for a valid value whose computation is not supported; `reason` is the rest of a sentence
    /// that begins with the key.
    pub fn unsupported_setting(&self, key: &str, reason: impl Into<String>) -> Error {
        Error::Config {
            path: self.path.to_owned(),
            field: self.name_of(key),
            reason: reason.into(),
            remedy: Some(
                "config.json may be correct, but only models without this setting are supported".into(),
            ),
        }
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| match self.map.get(key) {
            Some(_) => self.error(key, "is null, but is required"),
            None => self.error(key, "is missing"),
        })
    }

    /// Returns an integer from 0 to 2³¹, if present.
    ///
    /// # Errors
    /// [`Error::Config`] when it is invalid.
    pub fn optional_usize(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let reason = match value {
            Value::Number(number) => match number.as_u64() {
                Some(n) if n <= MAX_SIZE => match usize::try_from(n) {
                    Ok(n) => return Ok(Some(n)),
                    Err(_) => format!("is {n}, which exceeds the address space"),
                },
                Some(n) => format!("is {n}; it must be at most 2^31"),
                None if number.is_i64() => format!("is {number}; it must not be negative"),
                None => format!("is {number}, expected an integer"),
            },
            other => format!("is {}, expected an integer", describe(other)),
        };
        Err(self.error(key, reason))
    }

    /// Returns an integer from 0 to 2³¹.
    ///
    /// # Errors
    /// [`Error::Config`] when it is absent or invalid.
    pub fn require_usize(&self, key: &str) -> Result<usize> {
        let value = self.optional_usize(key)?;
        self.required(key, value)
    }

    /// Returns an integer from 1 to 2³¹: a size that must not be zero.
    ///
    /// # Errors
    /// [`Error::Config`] when it is absent, zero or otherwise invalid.
    pub fn require_positive(&self, key: &str) -> Result<usize> {
        match self.require_usize(key)? {
            0 => Err(self.error(key, "is 0; it must be at least 1")),
            n => Ok(n),
        }
    }

    /// Returns an integer from 1 to 2³¹, if present.
    ///
    /// # Errors
    /// [`Error::Config`] when it is zero or otherwise invalid.
    pub fn optional_positive(&self, key: &str) -> Result<Option<usize>> {
        if self.get(key).is_none() { Ok(None) } else { self.require_positive(key).map(Some) }
    }

    /// Returns a finite number, if present; integers are accepted.
    ///
    /// # Errors
    /// [`Error::Config`] when it is invalid.
    pub fn optional_f64(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().filter(|v| v.is_finite()) {
            Some(number) => Ok(Some(number)),
            None => Err(self.error(key, format!("is {}, expected a number", describe(value)))),
        }
    }

    /// Returns a finite number.
    ///
    /// # Errors
    /// [`Error::Config`] when it is absent or invalid.
    pub fn require_f64(&self, key: &str) -> Result<f64> {
        let value = self.optional_f64(key)?;
        self.required(key, value)
    }

    /// Returns a boolean, if present.
    ///
    /// # Errors
    /// [`Error::Config`] when it is invalid.
    pub fn optional_bool(&self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_bool() {
            Some(flag) => Ok(Some(flag)),
            None => Err(self.error(key, format!("is {}, expected true or false", describe(value)))),
        }
    }

    /// Returns a string, if present.
    ///
    /// # Errors
    /// [`Error::Config`] when it is invalid.
    pub fn optional_str(&self, key: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_str() {
            Some(text) => Ok(Some(text)),
            None => Err(self.error(key, format!("is {}, expected a string", describe(value)))),
        }
    }

    /// Returns a string.
    ///
    /// # Errors
    /// [`Error::Config`] when it is absent or invalid.
    pub fn require_str(&self, key: &str) -> Result<&'a str> {
        let value = self.optional_str(key)?;
        self.required(key, value)
    }

    /// Returns a list of strings, if present.
    ///
    /// # Errors
    /// [`Error::Config`] when it is invalid.
    pub fn optional_str_list(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong = |v: &Value| self.error(key, format!("is {}, expected a list of strings", describe(v)));
        let list = value.as_array().ok_or_else(|| wrong(value))?;
        let texts = list.iter().map(|item| {
            item.as_str()
                .ok_or_else(|| self.error(key, format!("contains {}, expected strings", describe(item))))
        });
        texts.collect::<Result<_>>().map(Some)
    }

    /// Returns a list of integers from 0 to 2³¹, if present.
    ///
    /// # Errors
    /// [`Error::Config`] when it is invalid.
    pub fn optional_usize_list(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong = |v: &Value| self.error(key, format!("is {}, expected a list of integers", describe(v)));
        let list = value.as_array().ok_or_else(|| wrong(value))?;
        let numbers = list.iter().map(|item| {
            let number = item.as_u64().filter(|n| *n <= MAX_SIZE).and_then(|n| usize::try_from(n).ok());
            number.ok_or_else(|| {
                self.error(key, format!("contains {}, expected integers from 0 to 2^31", describe(item)))
            })
        });
        numbers.collect::<Result<_>>().map(Some)
    }

    /// Returns a nested object, such as `rope_scaling`, if present.
    ///
    /// # Errors
    /// [`Error::Config`] when it is invalid.
    pub fn optional_object(&self, key: &str) -> Result<Option<ConfigFields<'a>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_object() {
            Some(map) => {
                let prefix = format!("{}{key}.", self.prefix);
                Ok(Some(ConfigFields { path: self.path, map, prefix, asked: self.asked }))
            }
            None => Err(self.error(key, format!("is {}, expected an object", describe(value)))),
        }
    }
}

/// Formats a value for a message, type first, because `"4096"` and `4096` look alike.
fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => format!("the number {number}"),
        Value::String(text) => format!("the text \"{}\"", printable(text)),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
    }
}
