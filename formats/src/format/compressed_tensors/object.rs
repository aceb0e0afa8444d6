//! The objects of a `quantization_config`, read strictly: errors name the path.

use serde_json::{Map, Value};

pub(super) struct Object<'a> {
    pub(super) map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Object<'a> {
    pub(super) fn new(value: &'a Value, path: String) -> Result<Self, String> {
        value
            .as_object()
            .map(|map| Self { map, path: path.clone() })
            .ok_or(format!("`{path}` must be an object"))
    }

    /// Returns a key's value; `null` counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn object(&self, key: &str) -> Result<Object<'a>, String> {
        Object::new(self.get(key).unwrap_or(&Value::Null), format!("{}.{key}", self.path))
    }

    /// Returns the strings of an array, each with its path.
    pub(super) fn strings(&self, key: &str) -> Result<Vec<(String, &'a str)>, String> {
        let path = |i: usize| format!("{}.{key}[{i}]", self.path);
        let array =
            self.get(key).and_then(Value::as_array).ok_or_else(|| self.refuse(key, "must be an array"))?;
        let strings = array.iter().enumerate().map(|(i, v)| match v.as_str() {
            Some(s) => Ok((path(i), s)),
            None => Err(format!("`{}` is not a string", path(i))),
        });
        strings.collect()
    }

    pub(super) fn require(&self, key: &str, expected: &str) -> Result<(), String> {
        match self.get(key) {
            Some(Value::String(s)) if s == expected => Ok(()),
            Some(other) => {
                Err(self.refuse(key, &format!("is {}; only {expected} is supported", brief(other))))
            }
            None => Err(self.refuse(key, &format!("is missing; it must be {expected}"))),
        }
    }

    pub(super) fn require_absent(&self, key: &str) -> Result<(), String> {
        match self.get(key) {
            None => Ok(()),
            Some(_) => Err(self.refuse(key, "is not supported and must be absent")),
        }
    }

    pub(super) fn allow_only(&self, known: &[&str]) -> Result<(), String> {
        match self.map.keys().find(|k| !known.contains(&k.as_str())) {
            None => Ok(()),
            Some(key) => Err(self.refuse(key, "is an unknown key")),
        }
    }

    pub(super) fn refuse(&self, key: &str, reason: &str) -> String {
        format!("`{}.{key}` {reason}", self.path)
    }
}

fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
