//! The soft cap, which bounds scores and logits.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use rayon::prelude::*;

use super::attention::slice;
use super::math::tanh;
use crate::Result;
use crate::vector::vectorized;

/// Elements per task.
const ELEMENT_TILE: usize = 1 << 14;

/// `cap · tanh(x / cap)`, elementwise.
pub(crate) fn soft_capped(x: &Tensor, cap: f32) -> Result<Tensor> {
    Ok(x.contiguous()?.apply_op1_no_bwd(&SoftCap(cap))?)
}

struct SoftCap(f32);

impl CustomOp1 for SoftCap {
    fn name(&self) -> &'static str {
        "soft-cap"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let mut out = slice(x, layout)?.to_vec();
        out.par_chunks_mut(ELEMENT_TILE).for_each(|out| soft_cap_in_place(out, self.0));
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }
}

pub(super) fn soft_cap_in_place(values: &mut [f32], cap: f32) {
    vectorized(
        #[inline(always)]
        || cap_in_place(values, cap),
    );
}

/// Inlined into loops that are vectorized as a whole.
#[inline(always)]
pub(super) fn cap_in_place(values: &mut [f32], cap: f32) {
    values.iter_mut().for_each(|v| *v = cap * tanh(*v / cap));
}
