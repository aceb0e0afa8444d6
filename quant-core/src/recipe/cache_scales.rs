//! Static scales of keys and values for an FP8 cache. A scale is written with the linear that produces its keys or
//! values, in the same shard and commit, so that a resumed run finds both or neither.

use super::{Action, Plan};
use crate::checkpoint::{TensorInfo, TensorSpec};
use crate::format::read_positive;
use crate::model::{KvScheme, Model, NodeId, cached_values};
use crate::scheme::CachePart;
use crate::{Error, Result};

/// A scale of keys or values that is computed from the calibration text and written with a linear.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheScale {
    /// The attention node, in the block of the linear.
    pub attention: NodeId,
    /// Whether the scale is for keys or for values.
    pub part: CachePart,
    /// The name of the tensor that stores the scale.
    pub tensor: String,
}

impl Plan {
    /// Adds the scales of an FP8 cache, if one is requested, to the entries of the linears that produce keys and
    /// values.
    pub(super) fn add_cache_scales(&mut self, model: &Model) -> Result<()> {
        if self.settings.kv != Some(KvScheme::Kvf8) {
            return Ok(());
        }
        let architecture = model.architecture();
        for layer in 0..architecture.layers {
            let graph = architecture.graph(layer);
            let values = cached_values(graph).map_err(|reason| {
                Error::usage(
                    format!("keys and values of block {layer} cannot be cached in FP8: {reason}"),
                    "remove kvf8 from the scheme",
                )
            })?;
            for value in values {
                let linear = architecture.in_block(layer, graph.name(value.linear));
                let spec = self.cache_spec(&linear, value.part)?;
                let weight = format!("{linear}.weight");
                let entry = self.entries.iter_mut().find(|e| e.layer == Some(layer) && e.tensor == weight);
                let entry = entry.ok_or_else(|| Error::Internal(format!("`{weight}` is not planned")))?;
                let (attention, part) = (value.attention, value.part);
                entry.cache.push(CacheScale { attention, part, tensor: spec.name.clone() });
                entry.outputs.push(spec);
            }
        }
        Ok(())
    }

    /// Renames the input's FP8 cache scales for this format.
    pub(super) fn rename_cache_scales(&mut self, model: &Model) -> Result<()> {
        let architecture = model.architecture();
        for layer in 0..architecture.layers {
            for (value, stored) in model.kv_scale_tensors(layer)? {
                read_positive(model.source().as_ref(), &stored)?;
                let linear = architecture.in_block(layer, architecture.graph(layer).name(value.linear));
                let TensorSpec { name, info } = self.cache_spec(&linear, value.part)?;
                let entry = self.entries.iter_mut().find(|e| e.stored == stored && e.action == Action::Copy);
                let entry = entry.ok_or_else(|| Error::Internal(format!("`{stored}` is not planned")))?;
                let info = TensorInfo { dtype: entry.info.dtype, ..info };
                entry.outputs = vec![TensorSpec { name, info }];
            }
        }
        Ok(())
    }

    fn cache_spec(&self, linear: &str, part: CachePart) -> Result<TensorSpec> {
        self.container.cache_scale(linear, part).ok_or_else(|| {
            let format = self.container.name();
            Error::usage(
                format!("the {format} format cannot store the scales of an FP8 cache"),
                "remove kvf8 from the scheme, or write ‹format=compressed-tensors›",
            )
        })
    }
}
