//! What was decided about a block before its tensors are due.

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

/// What was decided about a block.
#[derive(Default)]
pub(super) struct Decision {
    pub(super) rewrite: Rewrite,
    /// The grids of inputs that are the same for all tokens.
    pub(super) inputs: BTreeMap<NodeId, StaticScale>,
    /// Of each linear of an expert that was calibrated on all tokens, how many are routed to it.
    pub(super) routed: BTreeMap<NodeId, u64>,
    /// The largest of what its attentions cache, where that is to be in FP8.
    pub(super) cached: CachedMaxima,
}

/// Linears that GPTQ has rounded.
pub(super) type StageRounded = BTreeMap<NodeId, Rounded>;

/// A linear that GPTQ has rounded.
#[derive(Debug)]
pub(super) struct Rounded {
    /// The quantized weight; a block that goes on being evaluated shares it.
    pub(super) weight: Arc<WeightBody>,
    pub(super) record: GptqRecord,
    /// Tokens that the Hessian is a sum over.
    pub(super) tokens: u64,
    /// How many of these are routed to the linear's expert, where it was calibrated on all.
    pub(super) routed: Option<u64>,
}

impl Rounded {
    pub(super) fn tensor(&self) -> Result<&QuantizedTensor> {
        match &*self.weight {
            WeightBody::Quantized(tensor) => Ok(tensor),
            _ => Err(Error::Internal("a weight that was rounded is not quantized".into())),
        }
    }
}

/// What GPTQ did to a linear.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GptqRecord {
    /// The mean over outputs and tokens of the squared error that is left in the linear's output, with what damping
    /// adds to it.
    pub loss: f64,
    /// The damping that was used: more than was asked for where the Hessian was not positive definite with that, or
    /// is so wide that it is factored in `f32`.
    pub damping: f64,
    /// Input channels that were always 0.
    pub dead_channels: usize,
    /// The order in which columns were rounded.
    pub act_order: ActOrder,
}

/// A quantized weight as the container holds it: with one level of scales where it knows no other, and for float
/// activations where it says nothing of them.
///
/// # Errors
/// [`Error::Numeric`] when a scale overflows its type.
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
            reason: format!("a scale of {scale} and its multiples leave the range of {scale_dtype}"),
        })?,
    };
    tensor.scheme = container.stored_scheme(tensor.scheme);
    Ok(tensor)
}
