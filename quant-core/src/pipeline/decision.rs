//! The decisions about a block that are made before its tensors are written.

use std::collections::BTreeMap;
use std::sync::Arc;

use quant_kernels_cpu::StaticScale;
use serde::{Deserialize, Serialize};

use crate::calibrate::CachedMaxima;
use crate::checkpoint::Dtype;
use crate::format::Container;
use crate::model::{NodeId, WeightBody};
use crate::quantize::QuantizedTensor;
use crate::quantize::gptq::ActOrder;
use crate::transform::Rewrite;
use crate::{Error, Result};

#[derive(Default)]
pub(super) struct Decision {
    pub(super) rewrite: Rewrite,
    pub(super) inputs: BTreeMap<NodeId, StaticScale>,
    /// The number of tokens routed to the expert, for each linear of an expert that was calibrated on all tokens.
    pub(super) routed: BTreeMap<NodeId, u64>,
    pub(super) cached: CachedMaxima,
}

pub(super) type StageRounded = BTreeMap<NodeId, Rounded>;

#[derive(Debug)]
pub(super) struct Rounded {
    /// The quantized weight, shared with the block that is still being evaluated.
    pub(super) weight: Arc<WeightBody>,
    pub(super) record: GptqRecord,
    pub(super) tokens: u64,
    /// The number of these tokens that are routed to the linear's expert, if that expert was calibrated on all tokens.
    pub(super) routed: Option<u64>,
}

impl Rounded {
    pub(super) fn tensor(&self) -> Result<&QuantizedTensor> {
        match &*self.weight {
            WeightBody::Quantized(tensor) => Ok(tensor),
            _ => Err(Error::Internal("a rounded weight is not quantized".into())),
        }
    }
}

/// The result of GPTQ for a linear.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GptqRecord {
    /// The mean squared error of the linear's output after rounding, over outputs and tokens, including the damping
    /// term.
    pub loss: f64,
    /// The damping that was used, as a fraction of the mean of the Hessian's diagonal. It may exceed the requested
    /// damping.
    pub damping: f64,
    /// The number of input channels that were always 0.
    pub dead_channels: usize,
    /// The order in which columns were rounded.
    pub act_order: ActOrder,
}

/// Converts a quantized weight to the form that the container stores.
pub(super) fn stored(
    tensor: QuantizedTensor,
    container: &dyn Container,
    scale_dtype: Dtype,
    name: &str,
) -> Result<QuantizedTensor> {
    let mut tensor = match container.keeps_levels() {
        true => tensor,
        false => tensor.flattened(scale_dtype).map_err(|scale| Error::Numeric {
            tensor: name.to_owned(),
            reason: format!("a scale of {scale} is too large for {scale_dtype}"),
        })?,
    };
    tensor.scheme = container.stored_scheme(tensor.scheme);
    Ok(tensor)
}
