//! Typed access to the fields of a JSON configuration, with errors that name the key.

use std::path::Path;

use serde_json::{Map, Value};

use crate::{Error, Result};

/// Sizes above this are refused as absurd before anything is computed from them.
const LARGEST_SIZE: u64 = 1 << 31;

/// The fields of `config.json`, or of an object inside it.
#[derive(Debug, Clone)]
pub struct ConfigFields<'a> {
    path: &'a Path,
    prefix: String,
    fields: &'a Map<String, Value>,
}

impl<'a> ConfigFields<'a> {
    /// The fields of the file at `path`.
    pub fn new(path: &'a Path, fields: &'a Map<String, Value>) -> Self {
        Self { path, prefix: String::new(), fields }
    }

    /// The file, for messages.
    pub fn path(&self) -> &'a Path {
        self.path
    }

    /// An error about a field: `reason` ends the sentence that the key begins.
    pub fn error(&self, key: &str, reason: impl Into<String>) -> Error {
        Error::Config {
            path: self.path.to_owned(),
            field: format!("{}{key}", self.prefix),
            reason: reason.into(),
        }
    }

    /// A field that is neither missing nor null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.fields.get(key).filter(|v| !v.is_null())
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.error(key, "is missing"))
    }

    fn wrong_type(&self, key: &str, expected: &str, value: &Value) -> Error {
        let shown: String = value.to_string().chars().take(60).collect();
        self.error(key, format!("is {shown}; expected {expected}"))
    }

    /// A whole number from 1 to 2³¹, or `None` if absent.
    ///
    /// # Errors
    /// When it is anything else.
    pub fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if (1..=LARGEST_SIZE).contains(&n) => Ok(Some(n as usize)),
            _ => Err(self.wrong_type(key, "a whole number from 1 to 2147483648", value)),
        }
    }

    /// A whole number from 1 to 2³¹.
    ///
    /// # Errors
    /// When it is missing or anything else.
    pub fn require_size(&self, key: &str) -> Result<usize> {
        let value = self.optional_size(key)?;
        self.required(key, value)
    }

    /// A finite number, or `None` if absent.
    ///
    /// # Errors
    /// When it is anything else.
    pub fn optional_f64(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().filter(|v| v.is_finite()) {
            Some(v) => Ok(Some(v)),
            None => Err(self.wrong_type(key, "a number", value)),
        }
    }

    /// A finite number.
    ///
    /// # Errors
    /// When it is missing or anything else.
    pub fn require_f64(&self, key: &str) -> Result<f64> {
        let value = self.optional_f64(key)?;
        self.required(key, value)
    }

    /// A boolean, or `None` if absent.
    ///
    /// # Errors
    /// When it is anything else.
    pub fn optional_bool(&self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong_type(key, "true or false", value))
    }

    /// A string, or `None` if absent.
    ///
    /// # Errors
    /// When it is anything else.
    pub fn optional_str(&self, key: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong_type(key, "a string", value))
    }

    /// The fields of a nested object, or `None` if absent.
    ///
    /// # Errors
    /// When it is anything else.
    pub fn optional_object(&self, key: &str) -> Result<Option<ConfigFields<'a>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let fields = value.as_object().ok_or_else(|| self.wrong_type(key, "an object", value))?;
        Ok(Some(ConfigFields { path: self.path, prefix: format!("{}{key}.", self.prefix), fields }))
    }

    /// The first of `architectures`.
    ///
    /// # Errors
    /// When it is missing, empty, or not a list of strings.
    pub fn architecture(&self) -> Result<String> {
        let value = self.required("architectures", self.get("architectures"))?;
        let first = value.as_array().and_then(|list| list.first()).and_then(Value::as_str);
        first
            .map(str::to_owned)
            .ok_or_else(|| self.wrong_type("architectures", "a list of at least one name", value))
    }
}
