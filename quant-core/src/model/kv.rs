//! The cache of keys and values in few bits: what it is called, how `config.json` says it, and how it is simulated.
//!
//! Each token's keys (after rotary embedding) and values (as projected) get a grid of their own in every head
//! (QServe, §3.3). The grid is defined where the cache is, in [`quant_kernels_cpu::attention`]; nothing is
//! computed here that it does not compute.

use std::fmt;
use std::str::FromStr;

use quant_kernels_cpu::attention::{KvLayout, KvType, LARGEST, dequantize_head, quantize_head};
use quant_kernels_cpu::{Isa, KernelError};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::arch::AttentionShape;
use crate::checkpoint::ConfigFields;
use crate::scheme::KV_CONFIG_KEY;
use crate::{Error, Result};

/// Heads that one task rounds.
const HEAD_TILE: usize = 256;

/// Bits of a cached key or value: asymmetric, a scale and a zero in f16 for every token and head.
///
/// Written `kv4` or `kv8`; where there is none, keys and values are cached as floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvScheme {
    /// 4 bits.
    Kv4,
    /// 8 bits.
    Kv8,
}

impl KvScheme {
    /// All there are.
    pub const ALL: [Self; 2] = [Self::Kv4, Self::Kv8];

    /// Bits of a code.
    pub fn bits(self) -> u8 {
        match self {
            Self::Kv4 => 4,
            Self::Kv8 => 8,
        }
    }

    /// The kernels' name for it.
    pub fn kind(self) -> KvType {
        match self {
            Self::Kv4 => KvType::Kv4,
            Self::Kv8 => KvType::Kv8,
        }
    }

    /// What `config.json` holds under [`KV_CONFIG_KEY`] in a checkpoint that is meant for such a cache.
    pub fn config_value(self) -> Value {
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
        let known = Self::Kv4.config_value();
        if let Some(other) = fields.map().keys().find(|key| known.get(key.as_str()).is_none()) {
            return Err(fields.error(&other.escape_default().to_string(), "is not known"));
        }
        let bits = fields.require_usize("bits")?;
        let Some(scheme) = Self::ALL.into_iter().find(|s| usize::from(s.bits()) == bits) else {
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

    /// Replaces keys or values by what the cache gives back of them: `x` is `[tokens, heads, head_dim]`.
    ///
    /// # Errors
    /// When `x` is no whole heads, or a value is none that a cache can hold, beyond ±65504.
    pub fn round(self, x: &mut [f32], head_dim: usize) -> Result<()> {
        if head_dim == 0 || !x.len().is_multiple_of(head_dim) {
            return Err(Error::Internal(format!("{} keys or values are no heads of {head_dim}", x.len())));
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
    pub fn refusal(kind: KvType, attentions: &[AttentionShape]) -> Option<String> {
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
        KernelError::Scheme("a key or value that is not finite") => "a value is NaN or infinite".to_owned(),
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
        write!(f, "kv{}", self.bits())
    }
}

impl FromStr for KvScheme {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|scheme| scheme.to_string() == text).ok_or_else(|| {
            Error::usage(
                format!("`{}` is no cache of keys and values", text.escape_default()),
                "ask for kv4 or kv8",
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    fn read(value: Value) -> Result<Option<KvScheme>> {
        let config = json!({ KV_CONFIG_KEY: value });
        KvScheme::from_config(&ConfigFields::new(Path::new("config.json"), config.as_object().unwrap()))
    }

    #[test]
    fn names_and_configurations_come_back() {
        for scheme in KvScheme::ALL {
            assert_eq!(scheme.to_string().parse::<KvScheme>().unwrap(), scheme);
            assert_eq!(serde_json::to_value(scheme).unwrap(), json!(scheme.to_string()));
            assert_eq!(serde_json::from_value::<KvScheme>(json!(scheme.to_string())).unwrap(), scheme);
            assert_eq!(read(scheme.config_value()).unwrap(), Some(scheme));
        }
        assert_eq!(read(Value::Null).unwrap(), None);
        for bad in ["kv2", "kv16", "KV4", "4", ""] {
            assert_eq!(bad.parse::<KvScheme>().unwrap_err().category().exit_code(), 2, "{bad}");
        }
    }

    #[test]
    fn configurations_that_say_something_else_are_refused() {
        let with = |key: &str, value: Value| {
            let mut good = KvScheme::Kv4.config_value();
            good[key] = value;
            good
        };
        let without = |key: &str| {
            let mut good = KvScheme::Kv4.config_value();
            good.as_object_mut().unwrap().shift_remove(key);
            good
        };
        for (value, field) in [
            (json!(4), ""),
            (json!("kv4"), ""),
            (json!([]), ""),
            (json!({}), ".bits"),
            (without("bits"), ".bits"),
            (without("symmetric"), ".symmetric"),
            (without("strategy"), ".strategy"),
            (without("scale_dtype"), ".scale_dtype"),
            (with("bits", json!(2)), ".bits"),
            (with("bits", json!(16)), ".bits"),
            (with("bits", json!(-4)), ".bits"),
            (with("bits", json!(4.0)), ".bits"),
            (with("bits", json!("4")), ".bits"),
            (with("bits", json!(u64::MAX)), ".bits"),
            (with("symmetric", json!(true)), ".symmetric"),
            (with("symmetric", json!(0)), ".symmetric"),
            (with("symmetric", Value::Null), ".symmetric"),
            (with("strategy", json!("tensor")), ".strategy"),
            (with("strategy", json!(null)), ".strategy"),
            (with("scale_dtype", json!("bfloat16")), ".scale_dtype"),
            (with("group_size", json!(64)), ".group_size"),
        ] {
            let error = read(value.clone()).unwrap_err();
            assert_eq!(error.category().exit_code(), 4, "{value}");
            assert!(error.to_string().contains(&format!("`{KV_CONFIG_KEY}{field}`")), "{value}: {error}");
            assert!(error.to_string().contains("config.json") && !error.remedy().is_empty());
        }
    }

    proptest! {
        /// Every head by itself: what the kernels' own functions give, whatever its neighbours are.
        #[test]
        fn heads_are_rounded_as_the_cache_rounds_them(
            seed in any::<u64>(),
            tokens in 1_usize..300,
            head_dim in 1_usize..40,
            four in any::<bool>(),
        ) {
            let scheme = if four { KvScheme::Kv4 } else { KvScheme::Kv8 };
            let value = |i: usize| {
                let bits = crate::random::mix(seed ^ i as u64);
                // Some heads are constants, some have an outlier.
                let head = crate::random::mix(seed ^ (i / head_dim) as u64 ^ 0xabc) % 4;
                let v = (bits >> 40) as f32 / (1 << 20) as f32 - 8.0;
                match head {
                    0 => 1.25,
                    1 if i.is_multiple_of(head_dim) => 1e3 * v,
                    _ => v,
                }
            };
            let x: Vec<f32> = (0..tokens * head_dim).map(value).collect();
            let mut rounded = x.clone();
            scheme.round(&mut rounded, head_dim).unwrap();
            for (x, found) in x.chunks_exact(head_dim).zip(rounded.chunks_exact(head_dim)) {
                let (mut codes, mut expected) = (vec![0; head_dim], vec![0.0; head_dim]);
                let grid = quantize_head(x, u32::from(scheme.bits()), &mut codes).unwrap();
                dequantize_head(&codes, grid, &mut expected).unwrap();
                prop_assert_eq!(found, &expected[..]);
                if x.iter().all(|v| *v == 1.25) {
                    prop_assert_eq!(found, x);
                }
            }
        }
    }

    #[test]
    fn what_a_cache_cannot_hold_is_told() {
        for (value, says) in [(f32::NAN, "NaN"), (f32::INFINITY, "NaN or infinite"), (7e4, "65504")] {
            let error = KvScheme::Kv4.round(&mut [0.0, value], 2).unwrap_err();
            assert_eq!(error.category().exit_code(), 6);
            assert!(error.to_string().contains(says), "{error}");
        }
        assert!(KvScheme::Kv4.round(&mut [0.0; 3], 2).is_err());
        assert!(KvScheme::Kv4.round(&mut [0.0; 3], 0).is_err());
        KvScheme::Kv8.round(&mut [], 4).unwrap();
    }
}
