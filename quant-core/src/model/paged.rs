//! Attention in the kernels, on pages of keys and values in the format of the cache.

use std::ops::Range;

use candle_core::{Device, Tensor};
use quant_kernels_cpu::attention::{Heads, KvCache, KvLayout, KvPages, KvType, PAGE_TOKENS, PageList};
use quant_kernels_cpu::{IsaToken, Parallel, Rayon, Serial};

use super::Segments;
use super::arch::AttentionShape;
use super::cache::{CacheContents, LayerCache};
use super::kv::cache_error;
use super::tensor_values::with_slices;
use crate::{Error, Result};

/// Calls with fewer products run on one thread, because waking a second thread would take longer than its work.
const MIN_PARALLEL_PRODUCTS: usize = 1 << 19;

#[derive(Debug, Clone)]
pub(super) struct Paged {
    cache: KvCache,
    words: Vec<u32>,
    lse: Vec<f32>,
}

impl Paged {
    /// `kv_width` is the number of features of all key-value heads.
    pub(super) fn new(kind: KvType, shape: AttentionShape, kv_width: usize, capacity: usize) -> Result<Self> {
        let d = shape.head_dim;
        let kv = kv_width.checked_div(d).filter(|kv| kv * d == kv_width && *kv > 0);
        let kv = kv.ok_or_else(|| {
            Error::Internal(format!("{kv_width} features are not a multiple of the head width {d}"))
        })?;
        if let Some(reason) = super::kv::lacking(shape) {
            return Err(Error::Internal(reason.into()));
        }
        let heads = Heads { query: kv * shape.repeat, kv, scale: shape.scale() };
        let layout = KvLayout::new(kind, d).map_err(cache_error)?;
        let cache = KvCache::new(layout, heads, capacity).map_err(cache_error)?;
        Ok(Self { cache, words: Vec::new(), lse: Vec::new() })
    }

    pub(super) fn bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Appends tokens and computes attention for their queries: `q` and `out` are `[m, heads · head_dim]`, `k` and `v`
    /// `[m, kv_heads · head_dim]`.
    pub(super) fn advance(
        &mut self,
        [q, k, v]: [&[f32]; 3],
        window: Option<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let (heads, d) = (self.cache.heads(), self.cache.layout().head_dim());
        let (past, m) = (self.cache.tokens(), k.len() / (heads.kv * d));
        let threads: &dyn Parallel =
            if m * (past + m) * heads.query * d < MIN_PARALLEL_PRODUCTS { &Serial } else { &Rayon };
        self.cache.append(k, v, if m == 1 { &Serial } else { &Rayon }).map_err(cache_error)?;
        // Queries that the window does not restrict are computed together; every other query attends to a different
        // range.
        let whole = window.map_or(m, |w| w.saturating_sub(past).min(m));
        self.attend(0..whole, past, 0, q, out, threads)?;
        for i in whole..m {
            let first = (past + i + 1).saturating_sub(window.unwrap_or(usize::MAX));
            self.attend(i..i + 1, past, first, q, out, threads)?;
        }
        Ok(())
    }

    /// Computes attention for the queries `rows`. The first of all queries is at position `past`; no query attends to a
    /// token before `first`.
    fn attend(
        &mut self,
        rows: Range<usize>,
        past: usize,
        first: usize,
        q: &[f32],
        out: &mut [f32],
        threads: &dyn Parallel,
    ) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let (heads, layout) = (self.cache.heads(), *self.cache.layout());
        // Skip pages that no query attends to, and the tokens after the last query.
        let skipped = first / PAGE_TOKENS;
        let lists: Vec<PageList<'_>> = (0..heads.kv)
            .map(|head| PageList {
                pages: self.cache.list(head).pages.get(skipped..).unwrap_or_default(),
                tokens: past + rows.end - skipped * PAGE_TOKENS,
                first: first - skipped * PAGE_TOKENS,
                seen: (past + rows.start + 1 - skipped * PAGE_TOKENS) as isize,
            })
            .collect();
        let tokens = past + rows.end - skipped * PAGE_TOKENS;
        let words = KvPages::workspace(&layout, heads, rows.len(), tokens).map_err(cache_error)?;
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        self.lse.resize(rows.len() * heads.query, 0.0);
        let width = heads.query * layout.head_dim();
        let span = rows.start * width..rows.end * width;
        let (q, out) = (&q[span.clone()], &mut out[span]);
        let pages = self.cache.pages();
        pages
            .attend(IsaToken::detect(), heads, &lists, q, out, &mut self.lse, &mut self.words, threads)
            .map_err(cache_error)
    }
}

/// Computes attention for tokens that follow those in `cache`: `q` is `[1, m, heads · head_dim]`, `k` and `v` are `[1,
/// m, kv_heads · head_dim]`.
pub(super) fn decode(
    kind: KvType,
    shape: AttentionShape,
    cache: &mut LayerCache,
    [q, k, v]: [&Tensor; 3],
) -> Result<Tensor> {
    let (batch, m, width) = q.dims3()?;
    if batch != 1 || k.dims() != v.dims() || k.dims3()? != (1, m, width / shape.repeat) {
        return Err(Error::Internal(format!("attention of {:?} with {:?}", q.dims(), k.dims())));
    }
    if let CacheContents::Nothing = cache.held {
        cache.held = CacheContents::Pages(Paged::new(kind, shape, width / shape.repeat, cache.capacity())?);
    }
    let CacheContents::Pages(pages) = &mut cache.held else {
        return Err(Error::Internal("the model caches pages, but got a float cache".into()));
    };
    let mut out = vec![0.0; m * width];
    with_slices([q, k, v], |tensors| pages.advance(tensors, shape.window, &mut out))?;
    Ok(Tensor::from_vec(out, q.dims(), &Device::Cpu)?)
}

/// Computes attention for whole windows `[batch, positions, …]`, with separate pages for each segment.
pub(super) fn prefill(
    kind: KvType,
    shape: AttentionShape,
    [q, k, v]: [&Tensor; 3],
    segments: Segments<'_>,
) -> Result<Tensor> {
    let (batch, positions, width) = q.dims3()?;
    let kv_width = width / shape.repeat;
    let fits = k.dims() == v.dims() && k.dims3()? == (batch, positions, kv_width);
    if !fits || !segments.fit(batch, positions) {
        return Err(Error::Internal(format!("attention of {:?} with {:?}", q.dims(), k.dims())));
    }
    let mut out = vec![0.0; batch * positions * width];
    let mut pages = Paged::new(kind, shape, kv_width, positions)?;
    with_slices([q, k, v], |[q, k, v]| {
        for b in 0..batch {
            let starts = segments.starts_from(b * positions);
            let mut begin = 0;
            while begin < positions {
                let end = match starts {
                    Some(starts) => (begin..positions).find(|&i| starts[i] != starts[begin]),
                    None => None,
                };
                let end = end.unwrap_or(positions);
                let rows = b * positions + begin..b * positions + end;
                pages.cache.clear();
                let of = |width: usize| rows.start * width..rows.end * width;
                let inputs = [&q[of(width)], &k[of(kv_width)], &v[of(kv_width)]];
                pages.advance(inputs, shape.window, &mut out[of(width)])?;
                begin = end;
            }
        }
        Ok(())
    })?;
    Ok(Tensor::from_vec(out, q.dims(), &Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use quant_kernels_cpu::attention::quantize_query;

    use super::*;
    use crate::model::KvScheme;
    use crate::model::kv::{refusal, round_cached};
    use crate::random::SplitMix64;

    struct Case {
        shape: AttentionShape,
        kv: usize,
        batch: usize,
        positions: usize,
    }

    impl Case {
        fn all() -> Vec<Self> {
            let case = |repeat, head_dim, kv, batch, positions, window| Self {
                shape: AttentionShape { window, ..AttentionShape::new(kv, repeat, head_dim) },
                kv,
                batch,
                positions,
            };
            vec![
                case(1, 16, 1, 1, 1, None),
                case(4, 64, 2, 2, 70, None),
                case(2, 32, 1, 1, 200, Some(1)),
                case(2, 32, 2, 2, 150, Some(67)),
                case(1, 48, 3, 1, 130, Some(64)),
                case(3, 128, 1, 1, 90, Some(5000)),
                // A sequence longer than one chunk of the kernels.
                case(2, 16, 1, 1, 1300, Some(1100)),
            ]
        }

        /// Queries, keys and values, `[batch, positions, …]`; some keys and values are constant.
        fn inputs(&self, seed: u64) -> [Tensor; 3] {
            let kv_width = self.kv * self.shape.head_dim;
            let mut random = SplitMix64(seed);
            [kv_width * self.shape.repeat, kv_width, kv_width].map(|width| {
                let value = |i: usize| match (i / 16) % 11 {
                    3 => 0.75,
                    _ => (random.next_u64() >> 40) as f32 / (1 << 22) as f32 - 2.0,
                };
                let values: Vec<f32> = (0..self.batch * self.positions * width).map(value).collect();
                Tensor::from_vec(values, (self.batch, self.positions, width), &Device::Cpu).unwrap()
            })
        }
    }

    fn flat(x: &Tensor) -> Vec<f32> {
        x.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// Returns exact attention of float queries on the dequantized cache, with the maximum deviation of the kernels.
    /// Rounding a query to 8 bits changes scores by `δ ≤ scale · s_q / 2 · Σ |k̂|`, and probabilities by a factor
    /// within `e^±2δ`. The deviation also includes `2⁻⁸`, for paths that round to bf16, and `10⁻⁴` for everything else.
    #[allow(clippy::needless_range_loop, reason = "positions are counted")]
    fn exact(case: &Case, q: &[f32], k: &[f32], v: &[f32], starts: Option<&[u32]>) -> Vec<(f64, f64)> {
        let AttentionShape { repeat, head_dim: d, window, .. } = case.shape;
        let (n, heads) = (case.positions, case.kv * repeat);
        let mut out = Vec::new();
        for row in 0..case.batch * n {
            let (b, t) = (row / n, row % n);
            let from = window.map_or(0, |w| (t + 1).saturating_sub(w));
            let from = starts.map_or(from, |s| from.max(s[row] as usize));
            for head in 0..heads {
                let q = &q[(row * heads + head) * d..][..d];
                let of = |x: &[f32], s: usize| -> Vec<f64> {
                    let at = ((b * n + s) * case.kv + head / repeat) * d;
                    x[at..at + d].iter().map(|v| f64::from(*v)).collect()
                };
                let scale = f64::from(case.shape.scale());
                let (step, _) = quantize_query(q, &mut vec![0; d]).unwrap();
                let (mut total, mut delta) = (0.0, 0.0_f64);
                let (mut sums, mut max) = (vec![0.0; d], vec![0.0_f64; d]);
                for s in from..=t {
                    let (k, v) = (of(k, s), of(v, s));
                    let score: f64 = q.iter().zip(&k).map(|(q, k)| f64::from(*q) * k).sum::<f64>() * scale;
                    let off = f64::from(step) / 2.0 * k.iter().map(|k| k.abs()).sum::<f64>() * scale;
                    delta = delta.max(off);
                    let p = score.exp();
                    total += p;
                    for i in 0..d {
                        sums[i] += p * v[i];
                        max[i] = max[i].max(v.iter().fold(0.0, |m, v| v.abs().max(m)));
                    }
                }
                let slack = (2.0 * delta).exp_m1() + 2.0_f64.powi(-8) + 1e-4;
                out.extend(sums.iter().zip(max).map(|(sum, max)| (sum / total, 3.0 * max * slack)));
            }
        }
        out
    }

    fn check(case: &Case, found: &[f32], expected: &[(f64, f64)]) {
        assert_eq!(found.len(), expected.len());
        for (i, (found, (exact, bound))) in found.iter().zip(expected).enumerate() {
            let off = (f64::from(*found) - exact).abs();
            assert!(off <= *bound, "{:?}, {i}: {found}, not {exact}, {off} > {bound}", case.shape);
        }
    }

    #[test]
    fn pages_give_what_is_simulated_and_no_less_token_by_token() {
        for (seed, case) in Case::all().into_iter().enumerate() {
            let [q, k, v] = case.inputs(seed as u64);
            for scheme in KvScheme::INTEGERS {
                let kind = scheme.kind().unwrap();
                let rounded = [&k, &v].map(|x| {
                    let mut x = flat(x);
                    round_cached(scheme, &mut x, case.shape.head_dim, 1.0).unwrap();
                    x
                });
                let expected = exact(&case, &flat(&q), &rounded[0], &rounded[1], None);
                let whole = flat(&prefill(kind, case.shape, [&q, &k, &v], Segments::whole()).unwrap());
                check(&case, &whole, &expected);
                // A prompt, then several tokens at once, then single tokens: the results are bit-identical.
                let mut cache = LayerCache::new(case.positions);
                let mut pieces = Vec::new();
                let mut at = 0;
                while at < case.positions {
                    let m = [case.positions / 2 + 1, 3, 1][at.min(2)].min(case.positions - at);
                    let of = |x: &Tensor| x.narrow(0, 0, 1).unwrap().narrow(1, at, m).unwrap();
                    let inputs = [&of(&q), &of(&k), &of(&v)];
                    pieces.extend(flat(&decode(kind, case.shape, &mut cache, inputs).unwrap()));
                    at += m;
                }
                assert_eq!(pieces, whole[..pieces.len()], "{:?}", case.shape);
            }
        }
    }

    #[test]
    fn segments_do_not_see_each_other() {
        for window in [None, Some(7), Some(100)] {
            let shape = AttentionShape { window, ..AttentionShape::new(2, 2, 16) };
            let case = Case { shape, kv: 2, batch: 2, positions: 130 };
            let [q, k, v] = case.inputs(9);
            let starts: Vec<u32> = [[1, 65, 2, 62], [130, 0, 0, 0]]
                .iter()
                .flat_map(|lengths| {
                    let begin = |i: usize| lengths[..i].iter().sum::<usize>() as u32;
                    (0..4).flat_map(move |i| std::iter::repeat_n(begin(i), lengths[i])).collect::<Vec<_>>()
                })
                .collect();
            let rounded = [&k, &v].map(|x| {
                let mut x = flat(x);
                round_cached(KvScheme::Kv8, &mut x, 16, 1.0).unwrap();
                x
            });
            let expected = exact(&case, &flat(&q), &rounded[0], &rounded[1], Some(&starts));
            let found = prefill(KvType::Kv8, shape, [&q, &k, &v], Segments::new(&starts)).unwrap();
            check(&case, &flat(&found), &expected);
            let wrong = prefill(KvType::Kv8, shape, [&q, &k, &v], Segments::new(&starts[1..]));
            assert!(wrong.is_err());
        }
    }

    #[test]
    fn misfits_are_errors() {
        let case = Case { shape: AttentionShape::new(1, 2, 16), kv: 1, batch: 1, positions: 3 };
        let [q, k, v] = case.inputs(1);
        let attend = |shape, tensors: [&Tensor; 3]| prefill(KvType::Kv4, shape, tensors, Segments::whole());
        let short = v.narrow(1, 0, 2).unwrap();
        attend(case.shape, [&q, &k, &v]).unwrap();
        assert!(attend(AttentionShape { repeat: 1, ..case.shape }, [&q, &k, &v]).is_err());
        assert!(attend(AttentionShape { head_dim: 8, ..case.shape }, [&q, &k, &v]).is_err());
        assert!(attend(case.shape, [&q, &k, &short]).is_err());
        assert!(refusal(KvType::Kv4, 8).is_some_and(|reason| reason.contains("head width of 8")));
        assert!(refusal(KvType::F16, 1024).is_some());
        // Tokens beyond the cache's capacity, and a cache of a different format.
        let mut cache = LayerCache::new(4);
        decode(KvType::Kv4, case.shape, &mut cache, [&q, &k, &v]).unwrap();
        assert!(decode(KvType::Kv4, case.shape, &mut cache, [&q, &k, &v]).is_err());
        assert!(cache.append([&[0.0; 16], &[0.0; 16]], [16; 2]).is_err());
        let mut floats = LayerCache::new(4);
        assert_eq!(floats.append([&[1.0; 16], &[2.0; 16]], [16; 2]).unwrap().0.len(), 16);
        assert!(floats.append([&[1.0; 64], &[2.0; 64]], [16; 2]).is_err());
        assert!(decode(KvType::Kv4, case.shape, &mut floats, [&q, &k, &v]).is_err());
        let bad = (&k * 1e6).unwrap();
        let error = attend(case.shape, [&q, &bad, &v]).unwrap_err();
        assert!(error.category().exit_code() == 6 && error.to_string().contains("65504"), "{error}");
    }
}
