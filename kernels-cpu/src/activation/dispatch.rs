//! The loops of [`rows`](super::rows), compiled for each instruction set.

use super::RowLayout;
use super::element::Element;
use super::rows::{self, Grid, RowDestination};
use super::tiles::Tiling;
use crate::simd::elementwise::dispatched;

dispatched! { rows,
    /// The largest magnitude; infinite or NaN if any value is.
    fn largest[][](row: &[f32]) -> f32;
    /// Converts values to `f32`; returns their largest magnitude.
    fn widen[E][](x: &[E], out: &mut [f32]) -> f32;
    /// Rounds values to their type.
    fn narrow[E][](x: &[f32], out: &mut [E]);
    /// Computes a row of RMSNorm; returns its largest magnitude.
    fn rms_norm[E][](x: &[E], residual: Option<&mut [E]>, weight: &[f32], eps: f32, out: &mut [f32]) -> f32;
    /// Computes a row of `silu(gate) · up`; returns its largest magnitude.
    fn silu_mul[E][](gate: &[E], up: &[E], out: &mut [f32]) -> f32;
    /// Computes a row of `gelu(gate) · up` in the tanh approximation.
    fn gelu_tanh_mul[][](gate: &[f32], up: &[f32], out: &mut [f32]);
    /// Computes a row of the clamped gate, see [`clamped_gate`](crate::reference::clamped_gate).
    fn clamped_mul[][](gate: &[f32], up: &[f32], alpha_and_limit: [f32; 2], out: &mut [f32]);
    /// Adds a row, multiplied by a weight, to a sum of rows.
    fn add_weighted[][](sum: &mut [f32], weight: f32, y: &[f32]);
    /// Quantizes a row, and sums its codes per group.
    fn quantize[][STATIC](row: &[f32], grid: Grid, to: RowDestination<'_>);
    /// Packs a row of floats.
    fn pack_row[][](row: &[f32], layout: RowLayout, place: [usize; 2], words: &mut [u32], sums: &mut [f32]);
    /// Packs a row of floats as two bf16 each, or one if they are bf16.
    fn pack_pairs[][EXACT](
        row: &[f32], layout: RowLayout, place: [usize; 2], words: &mut [u32], sums: &mut [f32],
    );
    /// Packs a row of floats into its tiles, with as many bf16 parts as the tiling has.
    fn pack_tiles[][](
        row: &[f32], layout: RowLayout, tiling: Tiling, r: usize, words: &mut [u32], sums: &mut [f32],
    );
}
