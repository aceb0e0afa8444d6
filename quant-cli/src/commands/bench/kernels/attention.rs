//! Attention on the cache. Decoding reads the whole cache for one token, so it is limited by memory bandwidth; prefill
//! is limited by arithmetic.

use std::hint::black_box;
use std::ops::RangeInclusive;
use std::time::Instant;

use quant_core::Result;
use quant_core::random::SplitMix64;
use quant_kernels_cpu::attention::{Heads, KvCache, KvLayout, KvType, Workspace};
use quant_kernels_cpu::{KernelError, Rayon};
use serde::Serialize;

use super::super::Session;
use super::{Limits, median, refused};
use crate::output::table;

/// The name that a filter must match. All cache types are measured or none, because each is compared with f16.
pub(super) const NAME: &str = "attention kv4 kv8 f16";
/// Query heads, and key and value heads, of a model with 8 billion parameters.
const HEADS: [usize; 2] = [32, 8];
const HEAD_DIM: usize = 128;
/// Tokens per layer, and the number of layers that are read in turn. Together they exceed the last-level caches of most
/// processors.
const TOKENS: usize = 32 << 10;
const LAYERS: usize = 8;
/// Queries of a prefill, and its context length; the queries are the last tokens of the context.
const PREFILL: [usize; 2] = [512, 4096];
/// Tokens appended at once.
const APPENDED: usize = 512;
const ROUNDS: usize = 7;

const KINDS: [(&str, KvType); 3] = [("kv4", KvType::Kv4), ("kv8", KvType::Kv8), ("f16", KvType::F16)];

#[derive(Serialize)]
pub(super) struct Case {
    kernel: &'static str,
    query_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    tokens: usize,
    layers: usize,
    bytes_per_token: f64,
    /// Seconds per layer, one value per round.
    decode_seconds: Vec<f64>,
    gb_per_second: f64,
    /// `gb_per_second` as a share of the memory bandwidth measured around the rounds.
    memory_share: f64,
    /// Speedup over f16.
    over_f16: f64,
    prefill_queries: usize,
    prefill_tokens: usize,
    prefill_seconds: Vec<f64>,
    prefill_gflops: f64,
    append_seconds_per_token: f64,
    #[serde(skip)]
    probes: RangeInclusive<usize>,
}

impl Case {
    pub(super) fn judge(&mut self, limits: &Limits) {
        let [gb_per_second, ..] = limits.during(&self.probes);
        self.memory_share = self.gb_per_second / gb_per_second;
    }
}

/// Measures all types of cache in interleaved rounds, and the machine's limits in between.
pub(super) fn measure(limits: &mut Limits, session: &Session) -> Result<Vec<Case>> {
    let [query, kv] = HEADS;
    let heads = Heads { query, kv, scale: 1.0 / (HEAD_DIM as f32).sqrt() };
    let mut random = SplitMix64(1);
    let mut values = |count: usize| -> Vec<f32> {
        (0..count).map(|_| (random.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
    };
    let (keys, vals) = (values(APPENDED * kv * HEAD_DIM), values(APPENDED * kv * HEAD_DIM));
    let queries = values(PREFILL[0] * query * HEAD_DIM);
    let mut cases = Vec::new();
    let mut layers = Vec::new();
    for (kernel, kind) in KINDS {
        session.progress.note(&format!("attention on {kernel}"));
        let layout = KvLayout::new(kind, HEAD_DIM).map_err(refused)?;
        let mut case = Case {
            kernel,
            query_heads: query,
            kv_heads: kv,
            head_dim: HEAD_DIM,
            tokens: TOKENS,
            layers: LAYERS,
            bytes_per_token: 0.0,
            decode_seconds: Vec::new(),
            gb_per_second: 0.0,
            memory_share: 0.0,
            over_f16: 1.0,
            prefill_queries: PREFILL[0],
            prefill_tokens: PREFILL[1],
            prefill_seconds: Vec::new(),
            prefill_gflops: 0.0,
            append_seconds_per_token: 0.0,
            probes: 0..=0,
        };
        let mut of_kind = Vec::new();
        let mut appended = 0.0;
        for _ in 0..LAYERS {
            session.cancel.check()?;
            let mut cache = KvCache::new(layout, heads, TOKENS).map_err(refused)?;
            while cache.tokens() < TOKENS {
                let started = Instant::now();
                cache.append(&keys, &vals, &Rayon).map_err(refused)?;
                appended += started.elapsed().as_secs_f64();
                if cache.tokens() == PREFILL[1] && of_kind.is_empty() {
                    prefill(&mut case, &cache, &queries).map_err(refused)?;
                }
            }
            of_kind.push(cache);
        }
        case.append_seconds_per_token = appended / (LAYERS * TOKENS) as f64;
        case.bytes_per_token = of_kind[0].bytes() as f64 / TOKENS as f64;
        cases.push(case);
        layers.push(of_kind);
    }
    let mut workspace = Workspace::default();
    let (mut out, mut lse) = (vec![1.0; query * HEAD_DIM], vec![1.0; query]);
    let first = limits.probe();
    let mut last = first;
    for _ in 0..ROUNDS {
        for (case, layers) in cases.iter_mut().zip(&layers) {
            session.cancel.check()?;
            let started = Instant::now();
            for cache in layers {
                let q = &queries[..query * HEAD_DIM];
                cache.decode(q, &mut out, &mut lse, &mut workspace, &Rayon).map_err(refused)?;
                black_box(&out);
            }
            case.decode_seconds.push(started.elapsed().as_secs_f64() / LAYERS as f64);
        }
        last = limits.probe();
    }
    let f16 = cases.last().map_or(0.0, |case| median(&case.decode_seconds));
    for case in &mut cases {
        case.probes = first..=last;
        let seconds = median(&case.decode_seconds);
        case.gb_per_second = case.bytes_per_token * TOKENS as f64 / seconds / 1e9;
        case.over_f16 = f16 / seconds;
    }
    Ok(cases)
}

fn prefill(case: &mut Case, cache: &KvCache, queries: &[f32]) -> Result<(), KernelError> {
    let [m, tokens] = PREFILL;
    let mut workspace = Workspace::default();
    let (mut out, mut lse) = (vec![1.0; queries.len()], vec![1.0; m * HEADS[0]]);
    for _ in 0..3 {
        let started = Instant::now();
        cache.prefill(queries, &mut out, &mut lse, &mut workspace, &Rayon)?;
        black_box(&out);
        case.prefill_seconds.push(started.elapsed().as_secs_f64());
    }
    // Each query is multiplied by the keys and by the values of all tokens up to its own.
    let seen: usize = (tokens - m + 1..=tokens).sum();
    let operations = (4 * HEADS[0] * HEAD_DIM * seen) as f64;
    case.prefill_gflops = operations / median(&case.prefill_seconds) / 1e9;
    Ok(())
}

pub(super) fn show(cases: &[Case]) -> Option<String> {
    if cases.is_empty() {
        return None;
    }
    let header =
        ["cache", "bytes per token", "decode: GB/s", "x f16", "prefill: GFLOP/s", "append: us per token"];
    let rows: Vec<Vec<String>> = cases
        .iter()
        .map(|case| {
            vec![
                case.kernel.to_owned(),
                format!("{:.0}", case.bytes_per_token),
                format!("{:.1} ({:.0} %)", case.gb_per_second, 100.0 * case.memory_share),
                format!("{:.2}", case.over_f16),
                format!("{:.0}", case.prefill_gflops),
                format!("{:.1}", 1e6 * case.append_seconds_per_token),
            ]
        })
        .collect();
    Some(table(&header, &rows))
}
