//! GPTQ for the blocks of GGUF files. The scales of a block are computed when its first column is reached, from weights
//! that include the updates of earlier columns.
//!
//! Columns stay in file order, because blocks consist of adjacent columns. They are processed in runs; the errors of a
//! run are propagated to the columns after it by one matrix product.

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

use super::Factor;
use super::factor::Ratios;
use crate::blocks::BlockType;
use crate::vector::vectorized;

const TILE: usize = 32;
/// Columns per run: a multiple of the block size of every type.
const RUN: usize = 256;

/// Encodes rows `[n, k]` as blocks, with the factor of their inputs' Hessian for columns in ascending order.
/// `importance` weights the errors by which scales are chosen. Floats are only rounded. The codes of IQ2 and IQ3 are
/// chosen for a whole block.
///
/// # Panics
/// When lengths are inconsistent, or the factor has the wrong width or column order.
pub fn encode_blocks(
    rows: &[f32],
    k: usize,
    kind: &BlockType,
    importance: &[f32],
    factor: &Factor,
    out: &mut [u8],
) {
    let row_bytes = kind.row_bytes(k).unwrap_or_default();
    assert!(
        k > 0 && rows.len().is_multiple_of(k) && out.len() == rows.len() / k * row_bytes,
        "bytes of {kind:?} rows"
    );
    assert!(
        factor.columns().iter().copied().eq(0..k),
        "expected a factor of {k} columns in their original \
        order"
    );
    let tiles = rows.par_chunks(TILE * k).zip(out.par_chunks_mut((TILE * row_bytes).max(1)));
    tiles.for_each(|(rows, out)| tile(rows, k, kind, importance, factor.ratios(), out));
}

fn tile(rows: &[f32], k: usize, kind: &BlockType, importance: &[f32], ratios: &Ratios, out: &mut [u8]) {
    let count = rows.len() / k;
    let mut rows = rows.to_vec();
    let row_bytes = out.len() / count;
    let mut errors = vec![0.0_f32; count * RUN];
    for first in (0..k).step_by(RUN) {
        let end = k.min(first + RUN);
        let width = end - first;
        for (r, (row, out)) in rows.chunks_exact_mut(k).zip(out.chunks_exact_mut(row_bytes)).enumerate() {
            let row = &mut row[first..end];
            let errors = &mut errors[r * width..][..width];
            let out = &mut out[first / kind.elements * kind.bytes..][..width / kind.elements * kind.bytes];
            for (b, out) in out.chunks_exact_mut(kind.bytes).enumerate() {
                let at = b * kind.elements;
                let part = at..at + kind.elements;
                let importance = &importance[first..][part.clone()];
                let mut block = kind.fit_scales(&row[part.clone()], importance);
                let mut stored = [0.0; RUN];
                let stored = &mut stored[..kind.elements];
                if block.is_none() {
                    // The codes of a block are chosen together; its errors are only passed on to later blocks.
                    kind.encode_refined(&row[part.clone()], Some(importance), out);
                    if kind.is_float() {
                        continue;
                    }
                    kind.decode(out, stored);
                }
                for (e, c) in part.enumerate() {
                    let stored = block.as_mut().map_or(stored[e], |block| block.choose(e, row[c]));
                    let error = row[c] - stored;
                    errors[c] = error;
                    let ratios = ratios.row(first + c, first + c + 1..end);
                    vectorized(
                        #[inline(always)]
                        || {
                            for (later, ratio) in row[c + 1..].iter_mut().zip(ratios) {
                                *later -= error * ratio;
                            }
                        },
                    );
                }
                if let Some(block) = block {
                    block.write(out);
                }
            }
        }
        if end < k {
            let errors = MatRef::from_row_major_slice(&errors[..count * width], count, width);
            let rows = MatMut::from_row_major_slice_mut(&mut rows, count, k).subcols_mut(end, k - end);
            ratios.with_panel(first..end, end..k, |ratios| {
                matmul(rows, Accum::Add, errors, ratios, -1.0_f32, Par::Seq);
            });
        }
    }
}
