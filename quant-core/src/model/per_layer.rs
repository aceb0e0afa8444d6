//! Per-layer inputs. They depend only on the token, so they are computed once, before the first block, and passed along
//! with the hidden states.

use std::ops::Range;

use candle_core::{Device, Tensor};

use super::arch::Op;
use super::embeddings::Rows;
use super::tensor_values::with_values;
use super::{Linear, Norm};
use crate::Result;

/// Tokens projected at a time.
const CHUNK_TOKENS: usize = 2048;

/// Table rows are read on demand, because the table may be larger than all blocks.
#[derive(Debug)]
pub(crate) struct PerLayer {
    pub(super) rows: Rows,
    /// The factor that rows of the table are multiplied by.
    pub(super) scale: f32,
    /// `[layers · width, hidden]`.
    pub(super) projection: Linear,
    pub(super) norm: (Op, Norm),
}

impl PerLayer {
    /// Returns the embeddings `[tokens, hidden]`, each followed by the inputs of all blocks.
    pub(crate) fn append_inputs(&self, tokens: &[u32], embeddings: &[f32]) -> Result<Vec<f32>> {
        let [features, hidden] = self.projection.weight().shape();
        let state = hidden + features;
        let mut states = vec![0.0; tokens.len() * state];
        for (first, piece) in tokens.chunks(CHUNK_TOKENS).enumerate().map(|(i, p)| (i * CHUNK_TOKENS, p)) {
            let of = |width: usize| -> Range<usize> { first * width..(first + piece.len()) * width };
            let embedded = &embeddings[of(hidden)];
            let projected = self.projected(embedded, piece.len())?;
            let states = &mut states[of(state)];
            with_values(&projected, |projected| {
                for (token, state) in states.chunks_exact_mut(state).enumerate() {
                    state[..hidden].copy_from_slice(&embedded[token * hidden..][..hidden]);
                    state[hidden..].copy_from_slice(&projected[token * features..][..features]);
                }
                Ok(())
            })?;
            self.rows.each(piece, |token, row| {
                for (input, value) in states[token * state + hidden..][..features].iter_mut().zip(row) {
                    *input = (*input + value * self.scale) * std::f32::consts::FRAC_1_SQRT_2;
                }
            })?;
        }
        Ok(states)
    }

    /// `norm(projection(x) / √hidden)`.
    fn projected(&self, embedded: &[f32], tokens: usize) -> Result<Tensor> {
        let hidden = self.projection.weight().shape()[1];
        let x = Tensor::from_slice(embedded, (1, tokens, hidden), &Device::Cpu)?;
        let projected = (self.projection.forward(&x)? * (1.0 / (hidden as f64).sqrt()))?;
        let (op, norm) = &self.norm;
        norm.apply(op, &projected)
    }
}
