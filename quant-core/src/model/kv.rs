//! The cache of keys and values in few bits: what it is called, how `config.json` says it, and how it is simulated.
//!
//! Each token's keys (after rotary embedding) and values (as projected) get a grid of their own in every head
//! (QServe, §3.3). The grid is defined where the cache is, in [`quant_kernels_cpu::attention`]; nothing is
//! computed here that it does not compute.
//!
//! FP8 is another matter: keys and values of a layer have one scale each, which a calibration text settles and the
//! checkpoint holds ([`KvScales`](super::KvScales)). Its grid is that of static FP8 activations.

use std::fmt;
use std::str::FromStr;

use quant_kernels_cpu::attention::{KvLayout, KvType, LARGEST, dequantize_head, quantize_head};
use quant_kernels_cpu::{Isa, KernelError};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::arch::AttentionShape;
use crate::checkpoint::ConfigFields;
use crate::quantize::InputGrid;
use crate::scheme::KV_CONFIG_KEY;
use crate::{Error, Result};

/// Heads that one task rounds.
const HEAD_TILE: usize = 256;
/// What the kernels say of a value that no cache holds.
const NOT_FINITE: &str = "a key or value that is not finite";

/// How keys and values are cached: integers on asymmetric grids, a scale and a zero in f16 for every token and head, or
/// FP8 (E4M3) with one scale for the keys of a layer and one for its values.
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
    /// All there are.
    pub const ALL: [Self; 3] = [Self::Kv4, Self::Kv8, Self::Kvf8];

    /// Those of integers, which the kernels hold, and `config.json` has under [`KV_CONFIG_KEY`].
    pub const INTEGERS: [Self; 2] = [Self::Kv4, Self::Kv8];

    /// Bits of a code.
    pub fn bits(self) -> u8 {
        match self {
            Self::Kv4 => 4,
            Self::Kv8 | Self::Kvf8 => 8,
        }
    }

    /// The kernels' name for it; `None` where they do not have it.
    pub fn kind(self) -> Option<KvType> {
        match self {
            Self::Kv4 => Some(KvType::Kv4),
            Self::Kv8 => Some(KvType::Kv8),
            Self::Kvf8 => None,
        }
    }

    /// The name after `kv`.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Kv4 => "4",
            Self::Kv8 => "8",
            Self::Kvf8 => "f8",
        }
    }

    /// What `config.json` holds under [`KV_CONFIG_KEY`] in a checkpoint that is meant for such a cache of integers; `None`
    /// for FP8, which stands in `quantization_config`.
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

    /// What a configuration says; nothing where the key is absent or `null`.
    ///
    /// # Errors
    /// [`Error::Config`] with the field that is missing, not known, or says something that this version does not
    /// compute.
    pub fn from_config(config: &ConfigFields<'_>) -> Result<Option<Self>> {
        let Some(fields) = config.optional_object(KV_CONFIG_KEY)? else { return Ok(None) };
        let known = Self::Kv4.integers_value();
        if let Some(other) = fields.map().keys().find(|key| known.get(key.as_str()).is_none()) {
            return Err(fields.error(&other.escape_default().to_string(), "is not known"));
        }
        let bits = fields.require_usize("bits")?;
        let Some(scheme) = Self::INTEGERS.into_iter().find(|s| usize::from(s.bits()) == bits) else {
            return Err(fields.error("bits", format!("is {bits}; this version caches in 4 or 8")));
        };
        match fields.optional_bool("symmetric")? {
            Some(false) => {}
            Some(true) => {
                return Err(fields.error("symmetric", "is true; this version caches on asymmetric grids"));
            }
            None => return Err(fields.error("symmetric", "is missing")),
        }
        for (key, expected) in [("strategy", "token-head"), ("scale_dtype", "float16")] {
            let found = fields.require_str(key)?;
            if found != expected {
                let reason = format!("is `{}`; this version computes {expected}", found.escape_default());
                return Err(fields.error(key, reason));
            }
        }
        Ok(Some(scheme))
    }

    /// Replaces keys or values by what the cache gives back of them: `x` is `[tokens, heads, head_dim]`, and `scale` the
    /// static one of FP8, beyond 448 times which values saturate. Integers have scales of their own.
    ///
    /// # Errors
    /// When the length of `x` is no multiple of a head, or a value is not finite or, for integers, beyond ±65504.
    pub fn round(self, x: &mut [f32], head_dim: usize, scale: f32) -> Result<()> {
        if head_dim == 0 || !x.len().is_multiple_of(head_dim) {
            return Err(Error::Internal(format!("{} keys or values are no heads of {head_dim}", x.len())));
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

/// What becomes of a block's keys and values before a query sees them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KvCaching {
    /// Nothing: they stay `f32`.
    #[default]
    Float,
    /// They are rounded to what such a cache gives back, and attention runs on floats. Queries stay float, too.
    Simulated(KvScheme),
    /// They go into the kernels' pages, and attention runs there; with codes, on queries of 8 bits.
    Kernels(KvType),
}

impl KvCaching {
    /// Why the kernels cannot cache the keys and values of all these attentions on this machine, if they cannot; the
    /// cache is then simulated.
    pub fn refusal(kind: Option<KvType>, attentions: &[AttentionShape]) -> Option<String> {
        let Some(kind) = kind else { return Some("the kernels have no cache of FP8".into()) };
        attentions.iter().find_map(|shape| match lacking(*shape) {
            Some(reason) => Some(reason.into()),
            None => refusal(kind, shape.head_dim),
        })
    }
}

/// What of an attention the kernels do not compute, if there is such.
pub(super) fn lacking(shape: AttentionShape) -> Option<&'static str> {
    if shape.softcap.is_some() {
        Some("the kernels' attention has no soft cap on scores")
    } else if shape.sinks.is_some() {
        Some("the kernels' attention has no sinks")
    } else if shape.chunk.is_some() {
        Some("the kernels' attention has no chunks")
    } else if shape.alibi {
        Some("the kernels' attention has no scores that fall with the distance")
    } else if shape.value_dim != shape.head_dim {
        Some("the kernels' cache holds keys and values of one width")
    } else {
        None
    }
}

/// Why the kernels cannot hold heads of `head_dim` in pages here, if they cannot.
pub(super) fn refusal(kind: KvType, head_dim: usize) -> Option<String> {
    if Isa::detect() == Isa::Scalar {
        return Some("the kernels have no vector instructions on this processor".into());
    }
    let error = KvLayout::new(kind, head_dim).err()?;
    Some(format!("the kernels' cache does not hold heads of {head_dim}: {error}"))
}

/// What a refusal by the cache means: sizes were checked, so numbers are what it refuses.
pub(super) fn cache_error(error: KernelError) -> Error {
    let reason = match error {
        KernelError::TooLarge("a key or value") => {
            format!("a value is beyond ±{LARGEST}, and the cache's scales are f16")
        }
        KernelError::Scheme(NOT_FINITE) => "a value is NaN or infinite".to_owned(),
        KernelError::Memory(what) => {
            return Error::Unavailable {
                what: format!("memory for {what} of keys and values"),
                reason: "the system gives no more".into(),
                remedy: "use fewer tokens at once".into(),
            };
        }
        other => return Error::Internal(format!("the cache refuses its operands: {other}")),
    };
    Error::Cache { block: None, reason }
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
                format!("`{}` is no cache of keys and values", text.escape_default()),
                "ask for kv4, kv8 or kvf8",
            )
        })
    }
}

#[cfg(test)]
#[path = "kv_tests.rs"]
mod tests;
