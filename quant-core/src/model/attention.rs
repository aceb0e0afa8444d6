//! Operations between linears: causal grouped-query attention, gated products and activations.
//!
//! They run on plain slices, divided into pieces of fixed size, so results do not depend on the number of threads.

use std::ops::Range;

use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Shape, Tensor};
use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

use super::Segments;
use super::arch::{Activation, AttentionShape};
use super::math::{exp, gelu, gelu_tanh, sigmoid, silu};
use super::soft_cap::cap_in_place;
use crate::vector::vectorized;
use crate::{Error, Result};

/// Query positions per task.
const QUERY_TILE: usize = 64;
/// Elements per task of an elementwise operation.
const ELEMENT_TILE: usize = 1 << 14;

/// `softmax(q kᵀ · scale + causal mask) v` for every head. With a soft cap `c`, scaled scores `s` become
/// `c tanh(s / c)` before the mask.
///
/// The shapes are `[batch, queries, heads · head_dim]` for `q`, `[batch, keys, kv_heads · head_dim]` for `k`, and
/// `[batch, keys, kv_heads · value_dim]` for `v`. The last query has the last key's position. `repeat` consecutive
/// query heads share one key/value head. With a `window`, a query attends to that many positions, including its own;
/// with a `chunk`, to the positions since the last multiple of `chunk`, counted from the start of its segment. No query
/// attends to a key of a different segment; several segments require as many keys as queries. `sinks` has one score per
/// query head, which takes part in the softmax but has no value. With `alibi`, the head's slope times the distance
/// between query and key is subtracted from each scaled score.
pub(crate) fn causal_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    shape: AttentionShape,
    sinks: Option<&[f32]>,
    segments: Segments<'_>,
) -> Result<Tensor> {
    let op = CausalAttention { shape, sinks, segments };
    Ok(q.contiguous()?.apply_op3_no_bwd(&k.contiguous()?, &v.contiguous()?, &op)?)
}

/// `activation(gate) · up`, elementwise.
pub(crate) fn gated(activation: Activation, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    Ok(gate.contiguous()?.apply_op2_no_bwd(&up.contiguous()?, &Gated(activation))?)
}

/// `a + b`, elementwise. candle's own sum runs on a second pool, whose threads wait by spinning.
pub(crate) fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    Ok(a.contiguous()?.apply_op2_no_bwd(&b.contiguous()?, &Sum)?)
}

/// Applies an activation elementwise; NaN stays NaN.
pub(crate) fn activate(activation: Activation, x: &Tensor) -> Result<Tensor> {
    Ok(x.contiguous()?.apply_op1_no_bwd(&Activate(activation))?)
}

pub(super) fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<f32>()?[start..end]),
        None => candle_core::bail!("contiguous tensors expected"),
    }
}

struct CausalAttention<'a> {
    shape: AttentionShape,
    sinks: Option<&'a [f32]>,
    segments: Segments<'a>,
}

impl CustomOp3 for CausalAttention<'_> {
    fn name(&self) -> &'static str {
        "causal-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (batch, queries, q_width) = q_layout.shape().dims3()?;
        let (k_batch, keys, k_width) = k_layout.shape().dims3()?;
        let heads = self.heads(k_width);
        let fits = v_layout.dims() == [k_batch, keys, heads * self.shape.value_dim]
            && k_batch == batch
            && q_width == k_width * self.shape.repeat
            && self.fit(k_width)
            && queries <= keys
            && (self.segments.is_whole() || (queries == keys && self.segments.fit(batch, keys)));
        if !fits {
            candle_core::bail!("attention of {:?} with {:?}", q_layout.dims(), k_layout.dims());
        }
        let (q, k, v) = (slice(q, q_layout)?, slice(k, k_layout)?, slice(v, v_layout)?);
        let out = self.run([batch, queries, keys, heads], [q, k, v]);
        let width = heads * self.shape.repeat * self.shape.value_dim;
        Ok((CpuStorage::F32(out), Shape::from((batch, queries, width))))
    }
}

/// [`causal_attention`] of one sequence, on slices: `q` is `[queries, heads · head_dim]`, `k`
/// `[keys, kv_heads · head_dim]` and `v` `[keys, kv_heads · value_dim]`. `k_width` is the width of one key row.
pub(super) fn cached_attention(
    [q, k, v]: [&[f32]; 3],
    k_width: usize,
    shape: AttentionShape,
    sinks: Option<&[f32]>,
) -> Result<Vec<f32>> {
    let op = CausalAttention { shape, sinks, segments: Segments::whole() };
    let (width, heads) = (k_width * shape.repeat, op.heads(k_width));
    let fits = width > 0
        && op.fit(k_width)
        && q.len().is_multiple_of(width)
        && k.len().is_multiple_of(k_width)
        && v.len() == k.len() / k_width * heads * shape.value_dim
        && q.len() / width <= k.len() / k_width;
    if !fits {
        return Err(Error::Internal(format!("attention of {} queries with {} keys", q.len(), k.len())));
    }
    Ok(op.run([1, q.len() / width, k.len() / k_width, heads], [q, k, v]))
}

impl CausalAttention<'_> {
    fn heads(&self, k_width: usize) -> usize {
        k_width.checked_div(self.shape.head_dim).unwrap_or(0)
    }

    fn fit(&self, k_width: usize) -> bool {
        let heads = self.heads(k_width);
        heads * self.shape.head_dim == k_width
            && self.sinks.is_none_or(|sinks| sinks.len() == heads * self.shape.repeat)
    }

    /// Runs attention with the validated sizes `[batch, queries, keys, key heads]`.
    fn run(&self, [batch, queries, keys, heads]: [usize; 4], [q, k, v]: [&[f32]; 3]) -> Vec<f32> {
        let (k_width, v_width) = (heads * self.shape.head_dim, heads * self.shape.value_dim);
        let [q_width, out_width] = [k_width, v_width].map(|width| (width * self.shape.repeat).max(1));
        let mut out = vec![0.0_f32; batch * queries * out_width];
        let tiles: Vec<_> = out
            .chunks_mut((queries * out_width).max(1))
            .enumerate()
            .flat_map(|(b, window)| {
                window
                    .chunks_mut(QUERY_TILE * out_width)
                    .enumerate()
                    .map(move |(t, tile)| (b, t * QUERY_TILE, tile))
            })
            .collect();
        tiles.into_par_iter().for_each_init(Vec::new, |scores, (b, first, tile)| {
            let count = tile.len() / out_width;
            let q = &q[(b * queries + first) * q_width..][..count * q_width];
            let [k, v] = [(k, k_width), (v, v_width)]
                .map(|(values, width)| &values[b * keys * width..(b + 1) * keys * width]);
            let past = keys - queries + first;
            let starts = self.segments.starts_from(b * keys + past);
            self.attend(q, k, v, heads, past, starts, scores, tile);
        });
        out
    }

    /// Computes attention for `q` `[count, heads · head_dim]`, whose first row is at position `past`. `starts` gives
    /// the start of each row's segment, if there are several.
    #[allow(clippy::too_many_arguments)]
    fn attend(
        &self,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        kv_heads: usize,
        past: usize,
        starts: Option<&[u32]>,
        scores: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        let AttentionShape { head_dim: d, value_dim, repeat, window, chunk, softcap, .. } = self.shape;
        let slopes = if self.shape.alibi { self.shape.slopes() } else { Vec::new() };
        let (k_width, v_width, heads) = (kv_heads * d, kv_heads * value_dim, kv_heads * repeat);
        let (q_width, out_width) = (heads * d, heads * value_dim);
        let count = q.len() / q_width;
        // No query of the tile attends to keys before `first`, since the starts of windows and segments never decrease.
        let start = |position: usize| {
            let window = window.map_or(0, |w| (position + 1).saturating_sub(w));
            let segment = starts.map_or(0, |s| s[position - past] as usize);
            let chunk = chunk.map_or(0, |c| segment + (position - segment) / c.max(1) * c);
            window.max(segment).max(chunk)
        };
        let first = start(past);
        let visible = past + count - first;
        let scale = self.shape.scale();
        scores.resize(count * visible, 0.0);
        for head in 0..heads {
            let kv_head = head / repeat;
            let view = |data, rows, width, at: usize| {
                MatRef::from_row_major_slice_with_stride(data, rows, width, at)
            };
            let queries = view(&q[head * d..], count, d, q_width);
            let keys = view(&k[first * k_width + kv_head * d..], visible, d, k_width);
            let values = view(&v[first * v_width + kv_head * value_dim..], visible, value_dim, v_width);
            let sink = self.sinks.map(|sinks| sinks[head]);
            let weights = MatMut::from_row_major_slice_mut(scores.as_mut_slice(), count, visible);
            matmul(weights, Accum::Replace, queries, keys.transpose(), scale, Par::Seq);
            vectorized(
                #[inline(always)]
                || {
                    for (i, row) in scores.chunks_exact_mut(visible).enumerate() {
                        let position = past + i;
                        let seen = start(position) - first..position + 1 - first;
                        if let Some(cap) = softcap {
                            cap_in_place(&mut row[seen.clone()], cap);
                        }
                        if let Some(slope) = slopes.get(head) {
                            let distance = |key: usize| (position - first - key) as f32;
                            let keys = seen.clone().zip(&mut row[seen.clone()]);
                            keys.for_each(|(key, score)| *score -= slope * distance(key));
                        }
                        softmax_range(row, seen, sink);
                    }
                },
            );
            let weights = MatRef::from_row_major_slice(scores.as_slice(), count, visible);
            // faer 0.24's own strided row-major constructor swaps the strides of a mutable view.
            let into = &mut out[head * value_dim..];
            let into = MatMut::from_column_major_slice_with_stride_mut(into, value_dim, count, out_width);
            matmul(into.transpose_mut(), Accum::Replace, weights, values, 1.0_f32, Par::Seq);
        }
    }
}

/// Softmax over the scores in `seen` and the sink, if there is one. The other scores become 0.
#[inline(always)]
fn softmax_range(row: &mut [f32], seen: Range<usize>, sink: Option<f32>) {
    const LANES: usize = 16;
    let (row, after) = row.split_at_mut(seen.end);
    let (before, seen) = row.split_at_mut(seen.start);
    before.fill(0.0);
    after.fill(0.0);
    // Unlike `f32::max`, this comparison vectorizes. It ignores NaN, but the sum below propagates it.
    let mut largest = [f32::NEG_INFINITY; LANES];
    for part in seen.chunks(LANES) {
        for (m, &s) in largest.iter_mut().zip(part) {
            *m = if s > *m { s } else { *m };
        }
    }
    let max = largest.into_iter().fold(sink.unwrap_or(f32::NEG_INFINITY), f32::max);
    let mut sums = [0.0_f32; LANES];
    for part in seen.chunks_mut(LANES) {
        for (sum, s) in sums.iter_mut().zip(part) {
            *s = exp(*s - max);
            *sum += *s;
        }
    }
    let all = sums.iter().sum::<f32>();
    let inverse = 1.0 / sink.map_or(all, |sink| all + exp(sink - max));
    for s in seen.iter_mut() {
        *s *= inverse;
    }
}

/// Applies an activation to every value; inlined into loops that are vectorized as a whole.
#[inline(always)]
pub(super) fn in_place(activation: Activation, values: &mut [f32]) {
    match activation {
        // `f32::max`, which candle's own operation uses, would turn NaN into 0.
        Activation::Relu => values.iter_mut().for_each(|v| *v = if *v < 0.0 { 0.0 } else { *v }),
        Activation::ReluSquared => {
            values.iter_mut().for_each(|v| *v = if *v < 0.0 { 0.0 } else { *v * *v });
        }
        Activation::Silu => values.iter_mut().for_each(|v| *v = silu(*v)),
        Activation::Sigmoid => values.iter_mut().for_each(|v| *v = sigmoid(*v)),
        Activation::GeluTanh => values.iter_mut().for_each(|v| *v = gelu_tanh(*v)),
        Activation::Gelu => values.iter_mut().for_each(|v| *v = gelu(*v)),
    }
}

struct Gated(Activation);

impl CustomOp2 for Gated {
    fn name(&self) -> &'static str {
        "gated"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        elementwise(
            [(gate, gate_layout), (up, up_layout)],
            #[inline(always)]
            |gate, up| {
                in_place(self.0, gate);
                gate.iter_mut().zip(up).for_each(|(gate, &up)| *gate *= up);
            },
        )
    }
}

struct Sum;

impl CustomOp2 for Sum {
    fn name(&self) -> &'static str {
        "sum"
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        elementwise(
            [(a, a_layout), (b, b_layout)],
            #[inline(always)]
            |a, b| a.iter_mut().zip(b).for_each(|(a, &b)| *a += b),
        )
    }
}

/// Combines the values of two tensors of the same shape: `combine` changes values of the first by those of the second.
/// It must be `#[inline(always)]`, see [`vectorized`].
fn elementwise(
    [(a, a_layout), (b, b_layout)]: [(&CpuStorage, &Layout); 2],
    combine: impl Fn(&mut [f32], &[f32]) + Sync,
) -> candle_core::Result<(CpuStorage, Shape)> {
    if a_layout.dims() != b_layout.dims() {
        candle_core::bail!("operands of shapes {:?} and {:?}", a_layout.dims(), b_layout.dims());
    }
    let b = slice(b, b_layout)?;
    let mut out = slice(a, a_layout)?.to_vec();
    out.par_chunks_mut(ELEMENT_TILE).zip(b.par_chunks(ELEMENT_TILE)).for_each(|(out, b)| {
        vectorized(
            #[inline(always)]
            || combine(out, b),
        );
    });
    Ok((CpuStorage::F32(out), a_layout.shape().clone()))
}

struct Activate(Activation);

impl CustomOp1 for Activate {
    fn name(&self) -> &'static str {
        "activation"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let mut out = slice(x, layout)?.to_vec();
        out.par_chunks_mut(ELEMENT_TILE).for_each(|out| {
            vectorized(
                #[inline(always)]
                || in_place(self.0, out),
            );
        });
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn wave(shape: (usize, usize, usize), phase: f32) -> Tensor {
        let count = shape.0 * shape.1 * shape.2;
        let values: Vec<f32> = (0..count).map(|i| (i as f32 * 0.61 + phase).sin() * 2.0).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    /// Reference implementation: one score at a time, in double precision.
    #[allow(clippy::needless_range_loop)]
    fn naive(q: &Tensor, k: &Tensor, v: &Tensor, repeat: usize, d: usize, window: usize) -> Vec<f64> {
        let (q, k, v) =
            (q.to_vec3::<f32>().unwrap(), k.to_vec3::<f32>().unwrap(), v.to_vec3::<f32>().unwrap());
        let mut out = Vec::new();
        for b in 0..q.len() {
            let past = k[b].len() - q[b].len();
            for t in 0..q[b].len() {
                for head in 0..q[b][t].len() / d {
                    let at = |row: &[f32], head: usize, i: usize| f64::from(row[head * d + i]);
                    let weights: Vec<f64> = (0..=past + t)
                        .map(|s| {
                            let dot: f64 =
                                (0..d).map(|i| at(&q[b][t], head, i) * at(&k[b][s], head / repeat, i)).sum();
                            let sees = past + t - s < window;
                            if sees { (dot / (d as f64).sqrt()).exp() } else { 0.0 }
                        })
                        .collect();
                    let total: f64 = weights.iter().sum();
                    for i in 0..d {
                        let sum: f64 =
                            weights.iter().enumerate().map(|(s, w)| w * at(&v[b][s], head / repeat, i)).sum();
                        out.push(sum / total);
                    }
                }
            }
        }
        out
    }

    #[test]
    fn attention_matches_its_definition() {
        for (batch, queries, keys, kv_heads, repeat, d) in [
            (1, 1, 1, 1, 1, 2),
            (2, 5, 5, 2, 2, 4),
            (1, 150, 150, 1, 3, 8),
            (3, 2, 9, 2, 1, 6),
            (1, 70, 133, 2, 2, 4),
        ] {
            let q = wave((batch, queries, kv_heads * repeat * d), 0.1);
            let (k, v) = (wave((batch, keys, kv_heads * d), 0.7), wave((batch, keys, kv_heads * d), 1.9));
            for window in [None, Some(1), Some(3), Some(64), Some(keys), Some(usize::MAX)] {
                let shape = AttentionShape { window, ..AttentionShape::new(kv_heads, repeat, d) };
                let out = causal_attention(&q, &k, &v, shape, None, Segments::whole()).unwrap();
                let out = out.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let exact = naive(&q, &k, &v, repeat, d, window.unwrap_or(usize::MAX));
                for (got, exact) in out.iter().zip(exact) {
                    approx::assert_abs_diff_eq!(f64::from(*got), exact, epsilon = 1e-5);
                }
            }
        }
    }

    #[test]
    fn alibi_matches_its_definition() {
        let (heads, d, length) = (6, 4, 150);
        let shape = AttentionShape { alibi: true, ..AttentionShape::new(heads, 1, d) };
        let q = wave((1, length, heads * d), 0.1);
        let (k, v) = (wave((1, length, heads * d), 0.7), wave((1, length, heads * d), 1.9));
        let whole = causal_attention(&q, &k, &v, shape, None, Segments::whole()).unwrap();
        let tail = q.narrow(1, length - 3, 3).unwrap();
        let after = causal_attention(&tail, &k, &v, shape, None, Segments::whole()).unwrap();
        let last = whole.narrow(1, length - 3, 3).unwrap();
        let flat = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (found, expected) in flat(&after).iter().zip(flat(&last)) {
            approx::assert_abs_diff_eq!(*found, expected, epsilon = 1e-6);
        }
        let [q, k, v, out] = [&q, &k, &v, &whole].map(|t| t.to_vec3::<f32>().unwrap().swap_remove(0));
        for (t, out) in out.iter().enumerate() {
            for (head, out) in out.chunks(d).enumerate() {
                let slope = f64::from(shape.slopes()[head]);
                let weight = |s: usize| {
                    let dot: f64 =
                        (0..d).map(|i| f64::from(q[t][head * d + i]) * f64::from(k[s][head * d + i])).sum();
                    (dot / (d as f64).sqrt() - slope * (t - s) as f64).exp()
                };
                let all: f64 = (0..=t).map(weight).sum();
                for (i, found) in out.iter().enumerate() {
                    let sum: f64 = (0..=t).map(|s| weight(s) * f64::from(v[s][head * d + i])).sum();
                    approx::assert_abs_diff_eq!(f64::from(*found), sum / all, epsilon = 1e-5);
                }
            }
        }
    }

    /// Values narrower and wider than keys, with one sink per head. A sink is like another key whose value is 0.
    #[test]
    fn sinks_and_values_of_another_width_match_their_definition() {
        let (kv_heads, repeat, d, length) = (2, 3, 4, 9);
        for value_dim in [1, 3, 7] {
            let q = wave((1, length, kv_heads * repeat * d), 0.1);
            let (k, v) = (wave((1, length, kv_heads * d), 0.7), wave((1, length, kv_heads * value_dim), 1.9));
            let sinks: Vec<f32> = (0..kv_heads * repeat).map(|head| head as f32 - 2.0).collect();
            let window = Some(5);
            let shape = AttentionShape { value_dim, window, ..AttentionShape::new(kv_heads, repeat, d) };
            let out = causal_attention(&q, &k, &v, shape, Some(&sinks), Segments::whole()).unwrap();
            assert_eq!(out.dims(), [1, length, kv_heads * repeat * value_dim]);
            let [q, k, v, out] = [&q, &k, &v, &out].map(|t| t.to_vec3::<f32>().unwrap().swap_remove(0));
            for (t, out) in out.iter().enumerate() {
                for (head, out) in out.chunks(value_dim).enumerate() {
                    let kv = head / repeat;
                    let seen = (t + 1).saturating_sub(5)..=t;
                    let weight = |s: usize| {
                        let dot: f64 =
                            (0..d).map(|i| f64::from(q[t][head * d + i]) * f64::from(k[s][kv * d + i])).sum();
                        (dot / (d as f64).sqrt()).exp()
                    };
                    let all = seen.clone().map(weight).sum::<f64>() + f64::from(sinks[head]).exp();
                    for (i, found) in out.iter().enumerate() {
                        let sum: f64 =
                            seen.clone().map(|s| weight(s) * f64::from(v[s][kv * value_dim + i])).sum();
                        approx::assert_abs_diff_eq!(f64::from(*found), sum / all, epsilon = 1e-5);
                    }
                }
            }
        }
    }

    #[test]
    fn segments_do_not_see_each_other() {
        let (kv_heads, repeat, d) = (2, 2, 8);
        let (width, kv_width) = (kv_heads * repeat * d, kv_heads * d);
        for window in [None, Some(1), Some(5), Some(100)] {
            let lengths = [[1, 130, 3, 66], [200, 0, 0, 0]];
            let starts: Vec<u32> = (lengths.iter())
                .flat_map(|l| {
                    let begin = |i: usize| l[..i].iter().sum::<usize>() as u32;
                    (0..4).flat_map(move |i| std::iter::repeat_n(begin(i), l[i]))
                })
                .collect();
            let q = wave((2, 200, width), 0.1);
            let (k, v) = (wave((2, 200, kv_width), 0.7), wave((2, 200, kv_width), 1.9));
            let shape = AttentionShape { window, ..AttentionShape::new(kv_heads, repeat, d) };
            let packed = causal_attention(&q, &k, &v, shape, None, Segments::new(&starts)).unwrap();
            for (row, lengths) in lengths.iter().enumerate() {
                let mut at = 0;
                for &length in lengths.iter().filter(|l| **l > 0) {
                    let part = |t: &Tensor| {
                        t.narrow(0, row, 1).unwrap().narrow(1, at, length).unwrap().contiguous().unwrap()
                    };
                    let (q, k, v) = (part(&q), part(&k), part(&v));
                    let alone = causal_attention(&q, &k, &v, shape, None, Segments::whole()).unwrap();
                    let values = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    for (a, b) in values(&part(&packed)).iter().zip(values(&alone)) {
                        approx::assert_abs_diff_eq!(*a, b, epsilon = 1e-5);
                    }
                    at += length;
                }
            }
        }
    }

    /// Chunked attention matches attention computed for each chunk separately, also with a cache, and with several
    /// segments, in which chunks are counted from the start of the segment.
    #[test]
    fn chunks_do_not_see_each_other() {
        let (kv_heads, repeat, d, length) = (2, 2, 8, 100);
        let (width, kv_width) = (kv_heads * repeat * d, kv_heads * d);
        let q = wave((1, length, width), 0.1);
        let (k, v) = (wave((1, length, kv_width), 0.7), wave((1, length, kv_width), 1.9));
        let values = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for segment in [100, 70] {
            for size in [1, 3, 66, 100, usize::MAX] {
                let shape = AttentionShape { chunk: Some(size), ..AttentionShape::new(kv_heads, repeat, d) };
                let starts: Vec<u32> =
                    (0..100).map(|t| if t < segment { 0 } else { segment as u32 }).collect();
                let segments = Segments::new(&starts);
                let whole = causal_attention(&q, &k, &v, shape, None, segments).unwrap();
                let mut at = 0;
                while at < length {
                    let first = if at < segment { 0 } else { segment };
                    let end = if at < segment { segment } else { length };
                    let count = size.min(end - at).min(size - (at - first) % size);
                    let part = |t: &Tensor| t.narrow(1, at, count).unwrap().contiguous().unwrap();
                    let plain = AttentionShape::new(kv_heads, repeat, d);
                    let alone =
                        causal_attention(&part(&q), &part(&k), &part(&v), plain, None, Segments::whole());
                    for (a, b) in values(&part(&whole)).iter().zip(values(&alone.unwrap())) {
                        approx::assert_abs_diff_eq!(*a, b, epsilon = 1e-5);
                    }
                    at += count;
                }
                if segment == length {
                    let last = q.narrow(1, length - 1, 1).unwrap().contiguous().unwrap();
                    let decoded = causal_attention(&last, &k, &v, shape, None, Segments::whole()).unwrap();
                    let last = whole.narrow(1, length - 1, 1).unwrap();
                    for (a, b) in values(&decoded).iter().zip(values(&last)) {
                        approx::assert_abs_diff_eq!(*a, b, epsilon = 1e-6);
                    }
                }
            }
        }
    }

    #[test]
    fn relu_keeps_what_is_not_a_number() {
        let x = Tensor::from_slice(&[-1.0, -0.0, 2.0, f32::NAN, f32::INFINITY], 5, &Device::Cpu).unwrap();
        let y = activate(Activation::Relu, &x).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(y[..3], [0.0, 0.0, 2.0]);
        assert!(y[3].is_nan() && y[4] == f32::INFINITY);
    }

    #[test]
    fn misfits_are_errors() {
        let (q, k) = (wave((1, 3, 8), 0.0), wave((1, 2, 8), 0.0));
        let attend =
            |q, k, v, segments| causal_attention(q, k, v, AttentionShape::new(2, 1, 4), None, segments);
        assert!(attend(&q, &k, &k, Segments::whole()).is_err());
        assert!(attend(&k, &q, &k, Segments::whole()).is_err());
        for starts in [&[0][..], &[0, 1, 1, 1], &[0, 2, 2], &[0, 1, 0]] {
            assert!(attend(&q, &q, &q, Segments::new(starts)).is_err(), "{starts:?}");
        }
        assert!(gated(Activation::Silu, &q, &k).is_err());
    }
}
