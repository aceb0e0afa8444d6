//! The definition of every result: scalar, portable, in an order that is easy to follow. The kernels are tested against
//! these functions.
//!
//! The inputs of products are quantized or packed rows, so that rounding of activations is not part of the comparison.

mod activation;
mod experts;
mod hadamard;

use std::ops::Range;

use half::bf16;

pub(crate) use self::activation::{EXP_TERMS, GELU, LN_2, LOG2_E, SILU_END};
pub use self::activation::{clamped_gate, gelu_tanh, rms_norm, silu, silu_mul};
pub use self::experts::experts;
pub use self::hadamard::hadamard;

use crate::layout::{SUPER_BLOCK, factor};
use crate::{FloatFormat, Int8Rows, Scales, SuperScales, WeightView};

/// Dequantizes a range of rows into `out`, `[rows.len(), k]`, row-major. The value of a weight is
///
/// - `(code − zero) · scale`, rounded once;
/// - for progressive weights `((code − zero) · group) · channel`, rounded once, since the integer product is exact;
/// - for super-blocks `(block · group) · (code − zero) − min_block · min_group`, where the first product and the
///   difference are rounded, as in GGUF's definition;
/// - for floating-point codes `value(code) · scale`, rounded once. An E4M3 scale is `value(group) / global`, rounded.
///
/// # Panics
/// When `rows` is out of range or `out` has the wrong length.
pub fn dequantize_rows(weight: &WeightView<'_>, rows: Range<usize>, out: &mut [f32]) {
    let k = weight.k();
    assert_eq!(out.len(), rows.len() * k, "output length does not match the rows");
    if k == 0 {
        return;
    }
    let codes = weight.codes(rows.clone());
    let scales = weight.scales(rows.clone());
    let format = weight.float_format();
    for (r, row) in rows.enumerate() {
        let groups = weight.groups();
        for g in 0..groups {
            let zero = i32::from(weight.zero(row, g));
            let span = r * k + g * weight.group_size()..r * k + (g + 1) * weight.group_size();
            let (whole, scale) = match scales {
                Scales::Super(scales) => {
                    let (scale, min) = of_super_block(scales, [groups, k], r, g);
                    for (o, &c) in out[span.clone()].iter_mut().zip(&codes[span]) {
                        let code = format.map_or_else(|| (i32::from(c) - zero) as f32, |f| f.value(c));
                        let product = scale * code;
                        *o = min.map_or(product, |min| product - min);
                    }
                    continue;
                }
                Scales::Float(scales) => (1, scales[r * groups + g]),
                Scales::Progressive { groups: whole, channels } => {
                    (i32::from(whole[r * groups + g]), channels[r])
                }
                Scales::E4m3 { groups: codes, global } => {
                    (1, FloatFormat::E4m3.value(codes[r * groups + g]) / global)
                }
            };
            for (o, &c) in out[span.clone()].iter_mut().zip(&codes[span]) {
                *o = match format {
                    None => ((i32::from(c) - zero) * whole) as f32 * scale,
                    Some(format) => format.value(c) * scale,
                };
            }
        }
    }
}

/// Multiplies int8 activations by a weight, `[m, n]` row-major; [`PackedView::multiply`](crate::PackedView::multiply)
/// must match it bit for bit:
///
/// `y = s_x · Σ_g s_g I_g + b` with `I_g = Σ_{k∈g} (q − z)(a − a₀)` exact, each group's sum rounded to a float and
/// added by a fused multiply-add in order of groups; for progressive weights `y = s_x · (s_row · Σ_g s_g I_g) + b`,
/// where the sum over groups is exact as well.
///
/// For super-blocks, `y = s_x · Σ_b (d_b Σ_{g∈b} s_g I_g − e_b Σ_{g∈b} m_g A_g) + b` with `A_g = Σ_{k∈g} a`: both sums
/// of a block are exact, each is rounded to a float and added by a fused multiply-add, the scaled sum first.
///
/// For IQ4 codes, `I_g = Σ_{k∈g} value(q) a`, exact. For E2M1 codes, `I_g = Σ_{k∈g} 2q (a − a₀)`, which is exact, and
/// `s_x / 2` replaces `s_x`. If the scales of E2M1 codes are E4M3 under a global scale `G`,
/// `y = (s_x / 2) · ((256 / G) · Σ_g (s_g / 256) I_g) + b`.
///
/// # Panics
/// When the rows have the wrong width, or codes are of a floating-point format other than E2M1 and IQ4.
pub fn int8_linear(weight: &WeightView<'_>, x: &Int8Rows, bias: Option<&[f32]>) -> Vec<f32> {
    assert!(!matches!(weight.float_format(), Some(FloatFormat::E4m3)), "codes are not integers");
    let e2m1 = weight.float_format() == Some(FloatFormat::E2m1);
    let (n, size, groups) = (weight.n(), weight.group_size(), weight.groups());
    let mut out = Vec::with_capacity(x.m() * n);
    for m in 0..x.m() {
        let a = x.row(m);
        assert_eq!(a.len(), weight.k(), "rows of the wrong width");
        for o in 0..n {
            let codes = weight.codes(o..o + 1);
            let sum = |g: usize| -> i32 {
                let zero = i32::from(weight.zero(o, g));
                let group = g * size..(g + 1) * size;
                let terms = codes[group.clone()].iter().zip(&a[group]);
                let weight = |q: u8| match weight.float_format() {
                    Some(FloatFormat::E2m1) => (2.0 * FloatFormat::E2m1.value(q)) as i32,
                    Some(format) => format.value(q) as i32,
                    None => i32::from(q) - zero,
                };
                terms.map(|(&q, &a)| weight(q) * (i32::from(a) - x.zero())).sum()
            };
            let total = match weight.scales(o..o + 1) {
                Scales::Float(scales) => {
                    (0..groups).fold(0.0_f32, |total, g| (sum(g) as f32).mul_add(scales[g], total))
                }
                Scales::Progressive { groups: whole, channels } => {
                    let total: i32 = (0..groups).map(|g| sum(g) * i32::from(whole[g])).sum();
                    total as f32 * channels[0]
                }
                Scales::Super(scales) => {
                    let per_block = SUPER_BLOCK / size;
                    let of_a =
                        |g: usize| a[g * size..(g + 1) * size].iter().map(|&a| i32::from(a)).sum::<i32>();
                    (0..weight.k() / SUPER_BLOCK).fold(0.0_f32, |total, b| {
                        let of = b * per_block..(b + 1) * per_block;
                        let scaled: i32 = of.clone().map(|g| sum(g) * i32::from(scales.groups[g])).sum();
                        let total = (scaled as f32).mul_add(scales.blocks[b].to_f32(), total);
                        scales.mins.map_or(total, |mins| {
                            let sum: i32 = of.map(|g| of_a(g) * i32::from(mins.groups[g])).sum();
                            (-sum as f32).mul_add(mins.blocks[b].to_f32(), total)
                        })
                    })
                }
                Scales::E4m3 { groups: scales, global } => {
                    let scale = |g: usize| FloatFormat::E4m3.value(scales[g]) / 256.0;
                    let total =
                        (0..groups).fold(0.0_f32, |total, g| (sum(g) as f32).mul_add(scale(g), total));
                    total * factor(global)
                }
            };
            let scale = if e2m1 { x.scales()[m] * 0.5 } else { x.scales()[m] };
            out.push(match bias {
                Some(bias) => total.mul_add(scale, bias[o]),
                None => total * scale,
            });
        }
    }
    out
}

/// Multiplies float activations `x` `[m, k]` by a weight in `f64`, `[m, n]` row-major. Each value is paired with the
/// sum of magnitudes to which the error bound of
/// [`PackedView::multiply_float`](crate::PackedView::multiply_float) is proportional:
/// `Σ_g |s_g| Σ_{k∈g} (|q − c| + |c − z|) |x|` plus the magnitude of the bias. For floating-point codes the sum is
/// `Σ |ŵ| |x|`; minima of super-blocks add their magnitude times `Σ |x|`.
///
/// # Panics
/// When `x` is not whole rows.
pub fn float_linear(weight: &WeightView<'_>, x: &[f32], bias: Option<&[f32]>) -> Vec<(f64, f64)> {
    let (n, k, size, groups) = (weight.n(), weight.k(), weight.group_size(), weight.groups());
    assert!(k > 0 && x.len().is_multiple_of(k), "not whole rows");
    // The midpoint of the codes as stored, in 4 or 8 bits.
    let stored = if weight.bits() <= 4 { 4 } else { 8 };
    let centre = if weight.has_zeros() { 1 << (stored - 1) } else { i32::from(weight.zero(0, 0)) };
    let mut out = Vec::with_capacity(x.len() / k * n);
    for row in x.chunks_exact(k) {
        for o in 0..n {
            let codes = weight.codes(o..o + 1);
            let (mut value, mut magnitude) = (0.0_f64, 0.0_f64);
            for g in 0..groups {
                let zero = i32::from(weight.zero(o, g));
                let mut min = 0.0;
                let scale = match weight.scales(o..o + 1) {
                    Scales::Super(scales) => {
                        let (scale, of_min) = of_super_block(scales, [groups, k], 0, g);
                        min = f64::from(of_min.unwrap_or_default());
                        f64::from(scale)
                    }
                    Scales::Float(scales) => f64::from(scales[g]),
                    Scales::Progressive { groups: whole, channels } => {
                        f64::from(whole[g]) * f64::from(channels[0])
                    }
                    Scales::E4m3 { groups: scales, global } => {
                        f64::from(FloatFormat::E4m3.value(scales[g])) / f64::from(global)
                    }
                };
                for i in g * size..(g + 1) * size {
                    if let Some(format) = weight.float_format() {
                        let term = scale * f64::from(format.value(codes[i])) * f64::from(row[i]);
                        value += term;
                        magnitude += term.abs();
                        continue;
                    }
                    let (q, x) = (i32::from(codes[i]), f64::from(row[i]));
                    value += scale * f64::from(q - zero) * x - min * x;
                    magnitude += (min * x).abs();
                    magnitude += (scale * f64::from((q - centre).abs() + (centre - zero).abs()) * x).abs();
                }
            }
            let bias = bias.map_or(0.0, |bias| f64::from(bias[o]));
            out.push((value + bias, magnitude + bias.abs()));
        }
    }
    out
}

/// Multiplies float activations `x` `[m, k]` by dense weights `[n, k]` in `f64`, `[m, n]` row-major. Each value is paired
/// with the sum of magnitudes to which the error bound of
/// [`PackedLinear::pack_bf16`](crate::PackedLinear::pack_bf16) is proportional: `Σ |w| |x|` plus the magnitude of the
/// bias.
///
/// # Panics
/// When `weight` is not `[n, k]`, or `x` is not whole rows.
pub fn bf16_linear([n, k]: [usize; 2], weight: &[bf16], x: &[f32], bias: Option<&[f32]>) -> Vec<(f64, f64)> {
    assert!(k > 0 && weight.len() == n * k && x.len().is_multiple_of(k), "not whole rows");
    let of = |x: &[f32], o: usize| {
        let terms = x.iter().zip(&weight[o * k..(o + 1) * k]).map(|(x, w)| f64::from(*x) * w.to_f64());
        let bias = bias.map_or(0.0, |bias| f64::from(bias[o]));
        (terms.clone().sum::<f64>() + bias, terms.map(f64::abs).sum::<f64>() + bias.abs())
    };
    x.chunks_exact(k).flat_map(|row| (0..n).map(move |o| of(row, o))).collect()
}

/// The scale of a group of super-blocks, and its minimum if it has one, in rows of `groups` groups and `k` features.
/// Both are exact products of 11 and 8 bits.
fn of_super_block(
    scales: SuperScales<'_>,
    [groups, k]: [usize; 2],
    row: usize,
    g: usize,
) -> (f32, Option<f32>) {
    let (at, block) = (row * groups + g, row * (k / SUPER_BLOCK) + g * (k / groups) / SUPER_BLOCK);
    let min = scales.mins.map(|mins| mins.blocks[block].to_f32() * f32::from(mins.groups[at]));
    (scales.blocks[block].to_f32() * f32::from(scales.groups[at]), min)
}

/// Attention of one query head in `f64`: `keys` and `values` are `[tokens, q.len()]`, as stored in a cache. Returns the
/// output, the log-sum-exp of the scores, and each token's probability; without tokens, zeros and minus infinity.
///
/// # Panics
/// When `q` is empty, `keys` is not whole tokens, or `values` has a different length.
pub fn attention(q: &[f64], keys: &[f32], values: &[f32], scale: f64) -> (Vec<f64>, f64, Vec<f64>) {
    let d = q.len();
    assert!(d > 0 && keys.len().is_multiple_of(d) && values.len() == keys.len(), "not whole tokens");
    let dot = |k: &[f32]| q.iter().zip(k).map(|(q, k)| q * f64::from(*k)).sum::<f64>();
    let scores: Vec<f64> = keys.chunks_exact(d).map(|k| scale * dot(k)).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    let lse = if scores.is_empty() { max } else { max + sum.ln() };
    let probabilities: Vec<f64> = scores.iter().map(|s| (s - lse).exp()).collect();
    let mut out = vec![0.0; d];
    for (p, v) in probabilities.iter().zip(values.chunks_exact(d)) {
        out.iter_mut().zip(v).for_each(|(out, v)| *out += p * f64::from(*v));
    }
    (out, lse, probabilities)
}
