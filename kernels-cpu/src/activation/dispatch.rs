//! The loops of [`rows`](super::rows), compiled for each instruction set.

use super::RowLayout;
use super::element::Element;
use super::rows::{self, Grid, RowDestination};
use super::tiles::Tiling;
use crate::simd::elementwise::dispatched;

dispatched! { rows,
    fn largest[][](row: &[f32]) -> f32;
    fn widen[E][](x: &[E], out: &mut [f32]) -> f32;
    fn narrow[E][](x: &[f32], out: &mut [E]);
    fn rms_norm[E][](x: &[E], residual: Option<&mut [E]>, weight: &[f32], eps: f32, out: &mut [f32]) -> f32;
    fn silu_mul[E][](gate: &[E], up: &[E], out: &mut [f32]) -> f32;
    fn gelu_tanh_mul[][](gate: &[f32], up: &[f32], out: &mut [f32]);
    fn clamped_mul[][](gate: &[f32], up: &[f32], alpha_and_limit: [f32; 2], out: &mut [f32]);
    fn add_weighted[][](sum: &mut [f32], weight: f32, y: &[f32]);
    fn quantize[][STATIC](row: &[f32], grid: Grid, to: RowDestination<'_>);
    fn pack_row[][](row: &[f32], layout: RowLayout, place: [usize; 2], words: &mut [u32], sums: &mut [f32]);
    fn pack_pairs[][EXACT](
        row: &[f32], layout: RowLayout, place: [usize; 2], words: &mut [u32], sums: &mut [f32],
    );
    fn pack_tiles[][](
        row: &[f32], layout: RowLayout, tiling: Tiling, r: usize, words: &mut [u32], sums: &mut [f32],
    );
}
