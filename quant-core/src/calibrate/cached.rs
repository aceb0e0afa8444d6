//! The largest keys and values of a block's attentions over the batch: what the static scales of an FP8 cache are found
//! from.

use std::collections::BTreeMap;

use candle_core::D;

use super::HiddenStates;
use crate::model::{Block, CachedValue, NodeId, with_values};
use crate::scheme::CachePart;
use crate::{CancelToken, Error, Result};

/// `max |x|` of cached values, by their attention.
pub type CachedMaxima = BTreeMap<(NodeId, CachePart), f32>;

impl HiddenStates {
    /// The largest magnitude of what the attentions of `block` would cache of these states, which stay as they are.
    ///
    /// Every token is cached, so that all are looked at, prompts that searches leave out among them; padding is not.
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
                return Err(Error::Internal("an attention has keys and no values".into()));
            };
            // Keys come last: they depend on positions, which decides how the batch is cut.
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
                            // A comparison would pass NaN over.
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
                        what: "what is cached of it".into(),
                    });
                }
                maxima.insert((value.attention, value.part), largest);
            }
        }
        Ok(maxima)
    }
}
