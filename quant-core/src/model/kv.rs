//! The simulation of quantized caches of keys and values.
//!
//! Each token's keys (after rotary embedding) and values have a separate grid in every head (QServe, §3.3), which the
//! cache in [`quant_kernels_cpu::attention`] defines. FP8 is different: the keys and the values of a layer have one
//! scale each, which is determined by calibration and stored in the checkpoint ([`KvScales`](super::KvScales)).

use std::fmt;

use quant_kernels_cpu::attention::{KvLayout, KvType, MAX_MAGNITUDE, dequantize_head, quantize_head};
use quant_kernels_cpu::{Isa, KernelError};
use rayon::prelude::*;

use super::arch::AttentionShape;
use crate::quantize::InputGrid;
use crate::scheme::KvScheme;
use crate::{Error, Result};

/// Heads rounded per task.
const HEAD_TILE: usize = 256;
const NOT_FINITE: &str = "a key or value is not finite";

/// Rounds keys or values as the cache does. `x` is `[tokens, heads, head_dim]`, and `scale` is the static scale of FP8;
/// values beyond 448 times the scale saturate. Integer schemes compute their own scales.
///
/// # Errors
/// [`Error::Internal`] when the length of `x` is not a multiple of `head_dim`; [`Error::Cache`] when a value is not
/// finite or, for integers, beyond ±65504.
pub fn round_cached(scheme: KvScheme, x: &mut [f32], head_dim: usize, scale: f32) -> Result<()> {
    if head_dim == 0 || !x.len().is_multiple_of(head_dim) {
        return Err(Error::Internal(format!(
            "{} keys or values are not a multiple of the head width {head_dim}",
            x.len()
        )));
    }
    if scheme == KvScheme::Kvf8 {
        if x.iter().any(|x| !x.is_finite()) {
            return Err(cache_error(KernelError::Scheme(NOT_FINITE)));
        }
        InputGrid::Fp8Static { scale }.round(x, head_dim);
        return Ok(());
    }
    let bits = u32::from(scheme.bits());
    x.par_chunks_mut(HEAD_TILE * head_dim).try_for_each_init(Vec::new, |codes, heads| {
        codes.resize(head_dim, 0);
        for head in heads.chunks_exact_mut(head_dim) {
            let grid = quantize_head(head, bits, codes).map_err(cache_error)?;
            dequantize_head(codes, grid, head).map_err(cache_error)?;
        }
        Ok(())
    })
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
    /// Returns why the kernels cannot cache the keys and values of these attentions on this machine, if so.
    pub fn refusal(kind: Option<KvType>, attentions: &[AttentionShape]) -> Option<String> {
        let Some(kind) = kind else { return Some("the kernels do not support an FP8 cache".into()) };
        attentions.iter().find_map(|shape| match lacking(*shape) {
            Some(reason) => Some(reason.into()),
            None => refusal(kind, shape.head_dim),
        })
    }
}

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

pub(super) fn refusal(kind: KvType, head_dim: usize) -> Option<String> {
    if Isa::detect() == Isa::Scalar {
        return Some("the cache of the kernels needs vector instructions, but their path is `scalar`".into());
    }
    let error = KvLayout::new(kind, head_dim).err()?;
    Some(format!("the cache of the kernels does not support a head width of {head_dim}: {error}"))
}

/// Sizes were checked earlier, so the cause is a value or a lack of memory; anything else is a bug.
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

#[cfg(test)]
#[path = "kv_tests.rs"]
mod tests;
