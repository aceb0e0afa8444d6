//! Codes of a checkpoint as blocks: the same numbers, bit for bit.
//!
//! A symmetric grid of 4 bits with a scale for every 32 inputs is Q4_0, of 8 bits Q8_0. Larger groups repeat their
//! scale. Zeros must be those of a symmetric grid, and scales exact in half precision.

use half::f16;

use super::rows::RowOrder;
use crate::blocks::{self, BlockType, pack_q4_0};
use crate::model::Model;
use crate::quantize::QuantizedTensor;
use crate::{Error, Result};

/// A quantized weight, checked to be expressible.
pub(super) fn read(model: &Model, module: &str, shape: [usize; 2]) -> Result<QuantizedTensor> {
    let tensor = model.packed(module, shape)?;
    let refuse = |reason: String| Error::NotRepackable {
        path: model.path().to_owned(),
        module: module.to_owned(),
        reason,
    };
    let middle = 1_u8 << (tensor.scheme.bits() - 1);
    if tensor.zeros.as_ref().is_some_and(|zeros| zeros.iter().any(|&z| z != middle)) {
        return Err(refuse("it has zero points, and Q4_0 and Q8_0 have none".into()));
    }
    if let Some(scale) = tensor.scales.iter().find(|s| f16::from_f32(**s).to_f32() != **s) {
        return Err(refuse(format!("its scale {scale:e} is not exact in half precision")));
    }
    Ok(tensor)
}

/// One row of it as blocks.
pub(super) fn encode_row(
    tensor: &QuantizedTensor,
    kind: &BlockType,
    order: RowOrder,
    row: usize,
    out: &mut [u8],
) {
    let columns = tensor.shape[1];
    let row = order.stored(row);
    let groups = tensor.scales.len() / tensor.shape[0].max(1);
    let size = columns / groups.max(1);
    let codes = &tensor.codes[row * columns..][..columns];
    let scales = &tensor.scales[row * groups..][..groups];
    for (b, (codes, block)) in codes.chunks_exact(32).zip(out.chunks_exact_mut(kind.bytes)).enumerate() {
        let scale = f16::from_f32(scales[b * 32 / size]);
        if *kind == blocks::Q4_0 {
            let mut nibbles = [0; 32];
            nibbles.copy_from_slice(codes);
            pack_q4_0(scale, &nibbles, block);
        } else {
            block[..2].copy_from_slice(&scale.to_le_bytes());
            for (out, code) in block[2..].iter_mut().zip(codes) {
                // From 0 to 255 with 128 in the middle, to two's complement.
                *out = code ^ 0x80;
            }
        }
    }
}
