//! Repacks the codes of a checkpoint as GGUF blocks, bit for bit.
//!
//! A symmetric 4-bit grid with a scale per 32 inputs becomes Q4_0, an 8-bit one Q8_0. The scale of a larger group is
//! repeated. Zero points must be those of a symmetric grid, and scales must be exact in half precision.

use half::f16;

use super::rows::RowOrder;
use crate::blocks::{self, BlockType, pack_q4_0};
use crate::model::Model;
use crate::quantize::QuantizedTensor;
use crate::{Error, Result};

pub(super) fn read(model: &Model, module: &str, shape: [usize; 2]) -> Result<QuantizedTensor> {
    let tensor = model.packed(module, shape)?;
    let refuse = |reason: String| Error::NotRepackable {
        path: model.path().to_owned(),
        module: module.to_owned(),
        reason,
    };
    if tensor.input_order.is_some() {
        return Err(refuse(
            "its groups of inputs are not adjacent (desc_act or actorder), and blocks have no index of groups".into(),
        ));
    }
    let zero_point = 1_u8 << (tensor.scheme.bits() - 1);
    if tensor.zeros.as_ref().is_some_and(|zeros| zeros.iter().any(|&z| z != zero_point)) {
        return Err(refuse(
            "it has zero points other than the middle code, which Q4_0 and Q8_0 cannot store".into(),
        ));
    }
    if let Some(scale) = tensor.scales.iter().find(|s| f16::from_f32(**s).to_f32() != **s) {
        return Err(refuse(format!("its scale {scale:e} cannot be represented exactly in F16")));
    }
    Ok(tensor)
}

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
                // Converts from unsigned with zero point 128 to two's complement.
                *out = code ^ 0x80;
            }
        }
    }
}
