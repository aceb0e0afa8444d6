//! Attention by the kernels: keys and values are quantized into pages when they are appended, and read from there.

use std::ops::Range;

use candle_core::{Device, Layout, Storage, Tensor};
use quant_kernels_cpu::attention::{Heads, KvCache, KvLayout, KvPages, KvType, PAGE_TOKENS, PageList};
use quant_kernels_cpu::{Isa, IsaToken, Parallel, Rayon, Serial};

use super::Segments;
use super::cache::{Held, LayerCache};
use super::kv::cache_error;
use crate::{Error, Result};

/// Products of a call below which waking a second thread takes longer than what it would do.
const WORTH_THREADS: usize = 1 << 19;

/// Why the kernels cannot hold heads of `head_dim` in pages here, if they cannot.
pub(super) fn refusal(kind: KvType, head_dim: usize) -> Option<String> {
    if Isa::detect() == Isa::Scalar {
        return Some("the kernels have no vector instructions on this processor".into());
    }
    let error = KvLayout::new(kind, head_dim).err()?;
    Some(format!("the kernels' cache does not hold heads of {head_dim}: {error}"))
}

/// One block's part in an attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Query heads of a key-value head.
    pub(super) repeat: usize,
    pub(super) head_dim: usize,
    /// Positions that a query sees, its own included; all before it without one.
    pub(super) window: Option<usize>,
}

/// The pages of one sequence in one block.
#[derive(Debug, Clone)]
pub(super) struct Paged {
    cache: KvCache,
    words: Vec<u32>,
    lse: Vec<f32>,
}

impl Paged {
    /// No tokens yet, at most `capacity`; `kv_width` are the features of all key-value heads.
    pub(super) fn new(kind: KvType, shape: Shape, kv_width: usize, capacity: usize) -> Result<Self> {
        let d = shape.head_dim;
        let kv = kv_width.checked_div(d).filter(|kv| kv * d == kv_width && *kv > 0);
        let kv = kv.ok_or_else(|| Error::Internal(format!("{kv_width} features are no heads of {d}")))?;
        let heads = Heads { query: kv * shape.repeat, kv, scale: 1.0 / (d as f32).sqrt() };
        let layout = KvLayout::new(kind, d).map_err(cache_error)?;
        let cache = KvCache::new(layout, heads, capacity).map_err(cache_error)?;
        Ok(Self { cache, words: Vec::new(), lse: Vec::new() })
    }

    /// Bytes of its pages.
    pub(super) fn bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Appends tokens and attends with their queries: `q` and `out` are `[m, heads · head_dim]`, `k` and `v`
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
            if m * (past + m) * heads.query * d < WORTH_THREADS { &Serial } else { &Rayon };
        self.cache.append(k, v, if m == 1 { &Serial } else { &Rayon }).map_err(cache_error)?;
        // Those that the window takes nothing from, all at once; of the others each sees another part.
        let whole = window.map_or(m, |w| w.saturating_sub(past).min(m));
        self.attend(0..whole, past, 0, q, out, threads)?;
        for i in whole..m {
            let first = (past + i + 1).saturating_sub(window.unwrap_or(usize::MAX));
            self.attend(i..i + 1, past, first, q, out, threads)?;
        }
        Ok(())
    }

    /// Some of the queries, the first of all stands at position `past`; none sees a token before `first`.
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
        // Pages that nobody sees are left out, and so are tokens after the last query's.
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

/// Attention of tokens that follow those in `cache`: `q` `[1, m, heads · head_dim]`, `k` and `v` `[1, m, kv_heads ·
/// head_dim]`.
pub(super) fn decode(
    kind: KvType,
    shape: Shape,
    cache: &mut LayerCache,
    [q, k, v]: [&Tensor; 3],
) -> Result<Tensor> {
    let (batch, m, width) = q.dims3()?;
    if batch != 1 || k.dims() != v.dims() || k.dims3()? != (1, m, width / shape.repeat) {
        return Err(Error::Internal(format!("attention of {:?} with {:?}", q.dims(), k.dims())));
    }
    if let Held::Nothing = cache.held {
        cache.held = Held::Pages(Paged::new(kind, shape, width / shape.repeat, cache.capacity())?);
    }
    let Held::Pages(pages) = &mut cache.held else {
        return Err(Error::Internal("a cache of floats was given to a model that caches pages".into()));
    };
    let mut out = vec![0.0; m * width];
    with_slices([q, k, v], |tensors| pages.advance(tensors, shape.window, &mut out))?;
    Ok(Tensor::from_vec(out, q.dims(), &Device::Cpu)?)
}

/// Attention of whole windows `[batch, positions, …]`, each segment on pages of its own.
pub(super) fn prefill(
    kind: KvType,
    shape: Shape,
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

/// Lends the values of three tensors, copied where they are not contiguous.
pub(super) fn with_slices<T>(
    tensors: [&Tensor; 3],
    work: impl FnOnce([&[f32]; 3]) -> Result<T>,
) -> Result<T> {
    let [a, b, c] = tensors.map(Tensor::contiguous);
    let (a, b, c) = (a?, b?, c?);
    let (a, b, c) = (a.storage_and_layout(), b.storage_and_layout(), c.storage_and_layout());
    work([values(&a.0, a.1)?, values(&b.0, b.1)?, values(&c.0, c.1)?])
}

fn values<'a>(storage: &'a Storage, layout: &Layout) -> Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (Storage::Cpu(storage), Some((start, end))) => Ok(&storage.as_slice::<f32>()?[start..end]),
        _ => Err(Error::Internal("contiguous tensors in main memory expected".into())),
    }
}
