//! Applies a rotary embedding to the heads of a value.

use candle_core::{CpuStorage, CustomOp3, Layout, Shape, Tensor};
use rayon::prelude::*;

use super::{Rope, RopeLayout};
use crate::Result;
use crate::model::attention::slice;

/// Rotates every head of `x` `[batch, positions, heads · head_dim]` by `cos` and `sin`, `[positions, rotary_dim / 2]`
/// for all windows or `[batch, positions, rotary_dim / 2]`.
pub(super) fn rotate(x: &Tensor, rope: &Rope, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (batch, positions, width) = x.dims3()?;
    if rope.rotary_dim == rope.head_dim && rope.layout == RopeLayout::Halves {
        let heads = x.reshape((batch, positions, width / rope.head_dim, rope.head_dim))?;
        let rotated = candle_nn::rotary_emb::rope_thd(&heads.contiguous()?, cos, sin)?;
        return Ok(rotated.reshape((batch, positions, width))?);
    }
    let rotate = Rotation { head_dim: rope.head_dim, rotary_dim: rope.rotary_dim, layout: rope.layout };
    Ok(x.contiguous()?.apply_op3_no_bwd(&cos.contiguous()?, &sin.contiguous()?, &rotate)?)
}

struct Rotation {
    head_dim: usize,
    rotary_dim: usize,
    layout: RopeLayout,
}

impl CustomOp3 for Rotation {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        cos: &CpuStorage,
        cos_layout: &Layout,
        sin: &CpuStorage,
        sin_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (batch, positions, width) = x_layout.shape().dims3()?;
        let (x, cos, sin) = (slice(x, x_layout)?, slice(cos, cos_layout)?, slice(sin, sin_layout)?);
        let half = self.rotary_dim / 2;
        let fits = (self.rotary_dim.is_multiple_of(2) && self.rotary_dim <= self.head_dim)
            && (self.head_dim > 0 && width.is_multiple_of(self.head_dim))
            && cos.len() == sin.len()
            && [positions * half, batch * positions * half].contains(&cos.len());
        if !fits {
            candle_core::bail!("rotation of {:?} by {:?}", x_layout.dims(), cos_layout.dims());
        }
        let mut out = x.to_vec();
        let windows = cos.len() / (positions * half).max(1);
        out.par_chunks_mut(width.max(1)).enumerate().for_each(|(row, token)| {
            let at = if windows > 1 { row } else { row % positions } * half;
            let (cos, sin) = (&cos[at..at + half], &sin[at..at + half]);
            for head in token.chunks_exact_mut(self.head_dim) {
                for (i, (&c, &s)) in cos.iter().zip(sin).enumerate() {
                    let (a, b) = match self.layout {
                        RopeLayout::Halves => (i, i + half),
                        RopeLayout::Interleaved => (2 * i, 2 * i + 1),
                    };
                    (head[a], head[b]) = (head[a] * c - head[b] * s, head[a] * s + head[b] * c);
                }
            }
        });
        Ok((CpuStorage::F32(out), x_layout.shape().clone()))
    }
}
