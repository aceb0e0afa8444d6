//! Quantized caches of keys and values: their names, and their form in `config.json`.

use std::fmt;
use std::str::FromStr;

use quant_kernels_cpu::attention::KvType;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::KV_CONFIG_KEY;
use crate::checkpoint::ConfigFields;
use crate::names::suggestion;
use crate::{Error, Result};

/// The cached form of keys and values: integers on asymmetric grids, with a scale and a zero point in f16 per token and
/// head, or FP8 (E4M3) with one scale for the keys of a layer and one for its values. Written `kv4`, `kv8` or `kvf8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum KvScheme {
    /// 4 bits.
    Kv4,
    /// 8 bits.
    Kv8,
    /// FP8.
    Kvf8,
}

impl KvScheme {
    /// All schemes.
    pub const ALL: [Self; 3] = [Self::Kv4, Self::Kv8, Self::Kvf8];

    /// The integer schemes, which the kernels support and `config.json` stores under [`KV_CONFIG_KEY`].
    pub const INTEGERS: [Self; 2] = [Self::Kv4, Self::Kv8];

    /// Returns the bits per code.
    pub fn bits(self) -> u8 {
        match self {
            Self::Kv4 => 4,
            Self::Kv8 | Self::Kvf8 => 8,
        }
    }

    /// Returns the kernels' type for the scheme; `None` if they do not support it.
    pub fn kind(self) -> Option<KvType> {
        match self {
            Self::Kv4 => Some(KvType::Kv4),
            Self::Kv8 => Some(KvType::Kv8),
            Self::Kvf8 => None,
        }
    }

    /// Returns the part of the name after `kv`.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Kv4 => "4",
            Self::Kv8 => "8",
            Self::Kvf8 => "f8",
        }
    }

    /// Returns the value of [`KV_CONFIG_KEY`] in the `config.json` of a checkpoint with such an integer cache; `None`
    /// for FP8, which is described in `quantization_config`.
    pub fn config_value(self) -> Option<Value> {
        let integers = Self::INTEGERS.contains(&self);
        integers.then(|| self.integers_value())
    }

    fn integers_value(self) -> Value {
        json!({
            "bits": self.bits(),
            "symmetric": false,
            "strategy": "token-head",
            "scale_dtype": "float16",
        })
    }

    /// Reads the scheme of a configuration; `None` if the key is absent or `null`.
    ///
    /// # Errors
    /// [`Error::Config`] with the field that is missing, unknown or unsupported.
    pub fn from_config(config: &ConfigFields<'_>) -> Result<Option<Self>> {
        let Some(fields) = config.optional_object(KV_CONFIG_KEY)? else { return Ok(None) };
        let known = Self::Kv4.integers_value();
        if let Some(other) = fields.map().keys().find(|key| known.get(key.as_str()).is_none()) {
            return Err(fields.error(&other.escape_default().to_string(), "is an unknown key"));
        }
        let bits = fields.require_usize("bits")?;
        let Some(scheme) = Self::INTEGERS.into_iter().find(|s| usize::from(s.bits()) == bits) else {
            return Err(fields.error("bits", format!("is {bits}; supported values: 4, 8")));
        };
        match fields.optional_bool("symmetric")? {
            Some(false) => {}
            Some(true) => {
                return Err(fields.error("symmetric", "is true; only asymmetric caches are supported"));
            }
            None => return Err(fields.error("symmetric", "is missing")),
        }
        for (key, expected) in [("strategy", "token-head"), ("scale_dtype", "float16")] {
            let found = fields.require_str(key)?;
            if found != expected {
                let reason = format!("is `{}`; only {expected} is supported", found.escape_default());
                return Err(fields.error(key, reason));
            }
        }
        Ok(Some(scheme))
    }
}

impl fmt::Display for KvScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kv{}", self.suffix())
    }
}

impl FromStr for KvScheme {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|scheme| scheme.to_string() == text).ok_or_else(|| {
            Error::usage(
                format!("unknown KV cache `{}`", text.escape_default()),
                suggestion(text, "known values: kv4, kv8, kvf8", &["kv4", "kv8", "kvf8"]),
            )
        })
    }
}
