//! Quantized caches of keys and values: their names, their form in `config.json`, and their simulation.
//!
//! Each token's keys (after rotary embedding) and values (as projected) have a separate grid in every head (QServe,
//! §3.3). The grid is defined by the cache in [`quant_kernels_cpu::attention`]; this module only calls it.
//!
//! FP8 is different: the keys and the values of a layer have one scale each, which is determined by calibration and
//! stored in the checkpoint ([`KvScales`](super::KvScales)). The grid is that of static FP8 activations.

use std::fmt;
use std::str::FromStr;

use quant_kernels_cpu::attention::{KvLayout, KvType, MAX_MAGNITUDE, dequantize_head, quantize_head};
use quant_kernels_cpu::{Isa, KernelError};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::arch::AttentionShape;
use crate::checkpoint::ConfigFields;
use crate::quantize::InputGrid;
use crate::scheme::KV_CONFIG_KEY;
use crate::{Error, Result};

/// Heads rounded per task.
const HEAD_TILE: usize = 256;
/// The kernels' message for a value that no cache can hold.
const NOT_FINITE: &str = "a key or value is not finite";

/// The cached form of keys and values: integers on asymmetric grids, with a scale and a zero point in f16 per token and
/// head, or FP8 (E4M3) with one scale for the keys of a layer and one for its values.
///
/// Written `kv4`, `kv8` or `kvf8`. By default keys and values are cached as floats.
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

    /// Rounds keys or values as the cache does. `x` is `[tokens, heads, head_dim]`, and `scale` is the static scale of
    /// FP8; values beyond 448 times the scale saturate. Integer schemes compute their own scales.
    ///
    /// # Errors
    /// [`Error::Internal`] when the length of `x` is not a multiple of `head_dim`; [`Error::Cache`] when a value is not
    /// finite or, for integers, beyond ±65504.
    pub fn round(self, x: &mut [f32], head_dim: usize, scale: f32) -> Result<()> {
        if head_dim == 0 || !x.len().is_multiple_of(head_dim) {
            return Err(Error::Internal(format!(
                "{} keys or values are not a multiple of the head width {head_dim}",
                x.len()
            )));
        }
        if self == Self::Kvf8 {
            if x.iter().any(|x| !x.is_finite()) {
                return Err(cache_error(KernelError::Scheme(NOT_FINITE)));
            }
            InputGrid::Fp8Static { scale }.round(x, head_dim);
            return Ok(());
        }
        let bits = u32::from(self.bits());
        x.par_chunks_mut(HEAD_TILE * head_dim).try_for_each_init(Vec::new, |codes, heads| {
            codes.resize(head_dim, 0);
            for head in heads.chunks_exact_mut(head_dim) {
                let grid = quantize_head(head, bits, codes).map_err(cache_error)?;
                dequantize_head(codes, grid, head).map_err(cache_error)?;
            }
            Ok(())
        })
    }
}

/// How a block caches keys and values before queries read them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvCaching {
    /// As `f32`.
    #[default]
    Float,
    /// Rounded as the cache would round them, with attention on floats. Queries stay float, too.
    Simulated(KvScheme),
    /// In the kernels' pages, with attention in the kernels. If the pages hold codes, queries are rounded to 8 bits.
    Kernels(KvType),
}

impl KvCaching {
    /// Returns why the kernels cannot cache the keys and values of these attentions on this machine, if so. The cache
    /// is then simulated.
    pub fn refusal(kind: Option<KvType>, attentions: &[AttentionShape]) -> Option<String> {
        let Some(kind) = kind else { return Some("the kernels do not support an FP8 cache".into()) };
        attentions.iter().find_map(|shape| match lacking(*shape) {
            Some(reason) => Some(reason.into()),
            None => refusal(kind, shape.head_dim),
        })
    }
}

/// Returns the feature of an attention that the kernels lack, if any.
pub(super) fn lacking(shape: AttentionShape) -> Option<&'static str> {
    if shape.softcap.is_some() {
        Some("the attention kernels do not support a soft cap on scores")
    } else if shape.sinks.is_some() {
        Some("the attention kernels do not support attention sinks")
    } else if shape.chunk.is_some() {
        Some("the attention kernels do not support chunked attention")
    } else if shape.alibi {
        Some("the attention kernels do not support ALiBi")
    } else if shape.value_dim != shape.head_dim {
        Some("the cache of the kernels requires keys and values of the same width")
    } else {
        None
    }
}

/// Returns why the kernels cannot hold heads of `head_dim` in pages on this machine, if so.
pub(super) fn refusal(kind: KvType, head_dim: usize) -> Option<String> {
    if Isa::detect() == Isa::Scalar {
        return Some("this processor has no vector instructions that the kernels support".into());
    }
    let error = KvLayout::new(kind, head_dim).err()?;
    Some(format!("the cache of the kernels does not support a head width of {head_dim}: {error}"))
}

/// Converts an error of the cache. Sizes were checked earlier, so the cause is a value or a lack of memory; anything
/// else is a bug.
pub(super) fn cache_error(error: KernelError) -> Error {
    let reason = match error {
        KernelError::TooLarge("a key or value") => {
            format!("a value exceeds ±{MAX_MAGNITUDE}, the range of F16 scales")
        }
        KernelError::Scheme(NOT_FINITE) => "a value is NaN or infinite".to_owned(),
        KernelError::Memory(what) => {
            return Error::Unavailable {
                what: format!("memory for {what} of keys and values"),
                reason: "the allocation failed".into(),
                remedy: "use shorter windows or a shorter context".into(),
            };
        }
        other => return Error::Internal(format!("the cache rejected its operands: {other}")),
    };
    Error::Cache { block: None, reason }
}

impl fmt::Display for KvCaching {
    /// The type of cached values, such as `kv8`, and whether it is simulated.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float => f.write_str("f32"),
            Self::Simulated(scheme) => write!(f, "{scheme} (simulated)"),
            Self::Kernels(kind) => f.write_str(kind.name()),
        }
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
                "known values: kv4, kv8, kvf8",
            )
        })
    }
}

#[cfg(test)]
#[path = "kv_tests.rs"]
mod tests;
