//! The largest keys and values of a block's attention layers over the batch, from which the static scales of an FP8
//! cache are computed.

use std::collections::BTreeMap;

use candle_core::D;

use super::HiddenStates;
use crate::model::{Block, CachedValue, NodeId, with_values};
use crate::scheme::CachePart;
use crate::{CancelToken, Error, Result};

/// `max |x|` of cached values, per attention layer and cache part.
pub type CachedMaxima = BTreeMap<(NodeId, CachePart), f32>;

impl HiddenStates {
    /// Returns the largest magnitude of the values that the attention layers of `block` would cache for these states.
    ///
    /// All tokens except padding are included, masked prompts too, because all of them are cached.
    ///
    /// # Errors
    /// When the block fails, a value is not finite, or the run is cancelled.
    pub fn cached_maxima(
        &self,
        block: &Block,
        values: &[CachedValue],
        cancel: &CancelToken,
    ) -> Result<CachedMaxima> {
        let mut maxima = CachedMaxima::new();
        let attention = |value: &CachedValue, part| value.part == part;
        let keys = values.iter().filter(|value| attention(value, CachePart::Keys));
        for keys in keys {
            let of_it = |other: &&CachedValue| {
                other.attention == keys.attention && attention(other, CachePart::Values)
            };
            let Some(values) = values.iter().find(of_it) else {
                return Err(Error::Internal("an attention block has keys, but no values".into()));
            };
            // Keys come last, because they depend on positions, and the last target determines how the batch is split.
            let targets = [values.node, keys.node];
            let (mut largest, mut token) = ([0.0_f32; 2], 0);
            self.values_between(block, block.graph().input(), targets, cancel, &mut |tensors| {
                let mut tokens = 0;
                for (tensor, largest) in tensors.iter().zip(&mut largest) {
                    let width = tensor.dim(D::Minus1)?.max(1);
                    with_values(tensor, |x| {
                        tokens = x.len() / width;
                        let rows = x.chunks_exact(width).enumerate();
                        for (_, row) in rows.filter(|(row, _)| !self.layout().is_padding(token + row)) {
                            // `<` and `>` would skip NaN.
                            let row = row.iter().map(|x| x.abs()).max_by(f32::total_cmp).unwrap_or(0.0);
                            *largest = if row.total_cmp(largest).is_gt() { row } else { *largest };
                        }
                        Ok(())
                    })?;
                }
                token += tokens;
                Ok(())
            })?;
            for (value, largest) in [values, keys].into_iter().zip(largest) {
                if !largest.is_finite() {
                    return Err(Error::Calibration {
                        tensor: format!("{}.weight", block.graph().name(value.linear)),
                        what: "a cached key or value".into(),
                    });
                }
                maxima.insert((value.attention, value.part), largest);
            }
        }
        Ok(maxima)
    }
}
