//! SmoothAttention (QServe, §4.2.2): moves outliers of keys into queries, so that keys can be stored in 4 bits.
//!
//! A key head has a few channels that are much larger than the others, the same ones for all tokens, and all channels
//! share one scale. Scores are products of queries and keys, so `Q Λ · (K Λ⁻¹)ᵀ = Q Kᵀ`. With
//!
//! ```text
//! λ_i = max |K_i|^α                                       i a channel of a key head, over the text
//! λ_i = λ_j = max(max |K_i|, max |K_j|)^α                 if the rotary embedding rotates i and j as a pair
//! ```
//!
//! rows of `q_proj` are multiplied by `λ` and rows of `k_proj` divided, including biases. The query heads that share a
//! key head share its `λ`. Keys are measured as they are cached, after the rotary embedding.
//!
//! If queries and keys are normalized after their linears (Qwen3), `λ` is folded into the weights of these norms. If
//! all heads share the weights, they share one `λ`. It is rounded to powers of two, which norms of any dtype hold
//! exactly: with other values, rounding could give different scales to the two channels of a rotated pair. Channels
//! whose parameters would leave the dtype's range keep their scale.
//!
//! The paper uses `α = 0.5`. By default, it is searched among 0, 0.1 … 1 for the least squared error of the scores with
//! keys on the cache's grid. For keys `k`, rounded to `k + e`, and all queries `q` of the heads that read them, the
//! error is `Σ (q · e)² = Σ eᵀ (Σ q qᵀ) e`.

use std::collections::BTreeMap;

use quant_kernels_cpu::attention::{dequantize_head, quantize_head};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::settings::{Alpha, alpha_key};
use super::{BlockTask, Needs, Rewrite, StepContext, StepKey, Transform, TransformSettings, TriedScales};
use crate::calibrate::{AttentionStatistic, HiddenStates, InputRows, StatisticsPass};
use crate::checkpoint::Dtype;
use crate::keys::no_such_key;
use crate::model::{Architecture, BlockGraph, KvScheme, NodeId, QueryKey};
use crate::{Error, Result};

const SEARCH_TOKENS: usize = 1024;
/// The exponents that a search tries, in tenths.
const TENTHS: std::ops::RangeInclusive<u8> = 0..=10;
/// The cache for which the exponent is searched if the plan does not specify one.
const DEFAULT_CACHE: KvScheme = KvScheme::Kv4;

/// The result of SmoothAttention for an attention layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AttentionRecord {
    /// The producer of the keys, which is divided.
    pub keys: String,
    /// The exponent; 0 if nothing is moved.
    pub alpha: f32,
    /// The exponents tried, with the mean squared error of a score. Empty without a search.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tried: Vec<TriedScales>,
}

/// The SmoothAttention step.
#[derive(Debug, Clone, Copy)]
pub struct SmoothAttention;

/// Settings of SmoothAttention.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AttentionSettings {
    /// The exponent; searched if `None`.
    pub alpha: Option<Alpha>,
}

fn alpha_of(settings: &TransformSettings) -> Option<Alpha> {
    settings.steps.get::<AttentionSettings>().alpha
}

impl Transform for SmoothAttention {
    fn name(&self) -> &'static str {
        "smooth-attention"
    }

    fn summary(&self) -> &'static str {
        "moves outliers from keys into queries, for a 4-bit KV cache"
    }

    fn folded_nodes(&self, graph: &BlockGraph, _settings: &TransformSettings) -> Vec<NodeId> {
        graph.query_keys().into_iter().flat_map(|pair| pair.producers).collect()
    }

    fn needs(&self, _settings: &TransformSettings) -> Needs {
        Needs { ranges: false, states: true }
    }

    fn keys(&self) -> Vec<StepKey> {
        vec![alpha_key(
            "The exponent of the keys, from 0 to 1, or `auto`, the default.",
            "attention_alpha",
            "QoQ: exponent of SmoothAttention, 0 to 1, or auto [default: auto]",
        )]
    }

    fn set(&self, key: &str, value: &Value, settings: &mut TransformSettings) -> Result<()> {
        if key != "alpha" {
            return Err(no_such_key(self.name(), key));
        }
        settings.steps.set(AttentionSettings { alpha: Some(Alpha::from_value(value)?) });
        Ok(())
    }

    fn described(&self, settings: &TransformSettings) -> Map<String, Value> {
        alpha_of(settings).map(|alpha| ("alpha".to_owned(), alpha.to_value())).into_iter().collect()
    }

    fn fingerprint(&self, settings: &TransformSettings) -> Value {
        json!(alpha_of(settings))
    }

    fn check(&self, context: &StepContext<'_>) -> Result<()> {
        if !context.calibrates_cache {
            return Ok(());
        }
        Err(Error::usage(
            "`smooth-attention` only improves integer caches: an FP8 cache has one scale for all channels, \
            and step sizes that grow with the values",
            "remove the step, for example with ‹skip=smooth-attention›",
        ))
    }

    fn notes(&self, architecture: &Architecture) -> Vec<String> {
        let of_layer = |layer: usize| architecture.graph(layer).unscaled_query_keys();
        let mut layers: BTreeMap<&str, usize> = BTreeMap::new();
        for reason in (0..architecture.layers).flat_map(of_layer) {
            *layers.entry(reason).or_default() += 1;
        }
        let all = (0..architecture.layers)
            .map(|layer| architecture.graph(layer).attentions().count())
            .sum::<usize>();
        let note = |(reason, count): (&str, usize)| match count == all {
            true => format!("`smooth-attention` leaves the model unchanged: {reason}"),
            false => {
                format!("`smooth-attention` leaves {count} of {all} attention layers unchanged: {reason}")
            }
        };
        layers.into_iter().map(note).collect()
    }

    /// Only weights of attention are read.
    fn takes_experts_apart(&self, _graph: &BlockGraph, _settings: &TransformSettings) -> bool {
        true
    }

    fn search(
        &self,
        tasks: &[BlockTask<'_>],
        hidden: Option<&mut HiddenStates>,
        advance: bool,
    ) -> Result<Vec<Rewrite>> {
        let (Some(first), Some(hidden)) = (tasks.first(), hidden) else { return Ok(Vec::new()) };
        let stride = hidden.layout().counted().div_ceil(SEARCH_TOKENS).max(1);
        let pairs = first.block.graph().query_keys();
        let mut seen: Vec<QueryKeyStatistics> =
            pairs.into_iter().map(|pair| QueryKeyStatistics::new(pair, stride)).collect();
        let mut pass = StatisticsPass::new(first.block, hidden.layout(), first.cancel);
        for seen in &mut seen {
            pass.gather_attention(seen.pair.attention, seen);
        }
        first.run(pass, hidden, advance)?;
        tasks.iter().map(|task| smoothed(task, &seen)).collect()
    }
}

struct QueryKeyStatistics {
    pair: QueryKey,
    /// Every `stride`-th counted token is in `keys` and `grams`.
    stride: usize,
    /// `max |k|` of every channel of every key head.
    maxima: Vec<f32>,
    /// The keys of these tokens, `[tokens, kv_heads · head_dim]`.
    keys: Vec<f32>,
    /// `Σ q qᵀ` over the same tokens, `[kv_heads, head_dim, head_dim]`.
    grams: Vec<f64>,
    /// The number of queries in the sums, per key head.
    queries: usize,
}

fn smoothed(task: &BlockTask<'_>, seen: &[QueryKeyStatistics]) -> Result<Rewrite> {
    let mut rewrite = Rewrite::default();
    for seen in seen {
        let keys = task.module(seen.pair.producers[1]);
        if !seen.maxima.iter().all(|m| m.is_finite()) {
            return Err(Error::Calibration { tensor: keys, what: "a key".into() });
        }
        let (alpha, tried) = match alpha_of(task.settings) {
            Some(Alpha::Fixed(alpha)) => (alpha, Vec::new()),
            _ => seen.search(task)?,
        };
        tracing::debug!(keys, alpha, "attention smoothed");
        if alpha > 0.0 {
            seen.fold(task, &seen.scales(task, alpha)?, &mut rewrite)?;
        }
        rewrite.attention.push(AttentionRecord { keys, alpha, tried });
    }
    Ok(rewrite)
}

impl QueryKeyStatistics {
    fn kv_heads(&self) -> usize {
        self.maxima.len() / self.pair.head_dim
    }

    /// The width of the norm that produces keys, if there is one.
    fn norm_width(&self, task: &BlockTask<'_>) -> Option<usize> {
        task.block.graph().nodes()[self.pair.producers[1]].op.stored_norm().map(|(_, width, _)| width)
    }

    /// `λ` of every channel of every key head.
    fn scales(&self, task: &BlockTask<'_>, alpha: f32) -> Result<Vec<f32>> {
        let d = self.pair.head_dim;
        let mut largest = self.maxima.clone();
        let norm = self.norm_width(task);
        if norm == Some(d) {
            for channel in 0..d {
                let all = largest.iter().skip(channel).step_by(d).fold(0.0_f32, |a, b| a.max(*b));
                largest.iter_mut().skip(channel).step_by(d).for_each(|m| *m = all);
            }
        }
        if let Some(rope) = &self.pair.rope {
            for head in largest.chunks_exact_mut(d) {
                for channel in 0..d {
                    let partner = rope.partner(channel);
                    let both = head[channel].max(head[partner]);
                    (head[channel], head[partner]) = (both, both);
                }
            }
        }
        let scales = largest.iter().map(|&max| match max.powf(alpha) {
            // A channel keeps its scale if its keys are always 0, or if no float holds its factor and the reciprocal.
            scale if max > 0.0 && scale.is_normal() && (1.0 / scale).is_normal() => scale,
            _ => 1.0,
        });
        if norm.is_none() {
            return Ok(scales.collect());
        }
        let mut scales: Vec<f32> = scales.map(|scale| scale.log2().round().exp2()).collect();
        self.leave_what_norms_cannot_hold(task, &mut scales)?;
        Ok(scales)
    }

    /// Sets powers of two to 1 if a norm's dtype cannot hold a parameter multiplied or divided by them.
    fn leave_what_norms_cannot_hold(&self, task: &BlockTask<'_>, scales: &mut [f32]) -> Result<()> {
        let (d, shared) = (self.pair.head_dim, self.pair.head_dim * self.pair.repeat);
        let [queries, keys] = self.pair.producers;
        let mut held = vec![true; scales.len()];
        for node in [queries, keys] {
            if task.block.graph().nodes()[node].op.stored_norm().is_none() {
                continue;
            }
            let dtype = task.norm_dtypes.get(&node).copied().unwrap_or(Dtype::F32);
            let bias = task.block.norm_bias(node);
            for parameter in std::iter::once(task.block.norm(node)).chain(bias) {
                for (i, value) in parameter.to_vec1::<f32>()?.into_iter().enumerate() {
                    let (channel, scaled) = match node == queries {
                        true => (i / shared * d + i % d, value * scales[i / shared * d + i % d]),
                        false => (i, value / scales[i]),
                    };
                    held[channel] &= value == 0.0 || scaled.is_normal() && dtype.round(scaled) == scaled;
                }
            }
        }
        // A norm over single heads applies to all heads, and the channels of a rotated pair have the same scale.
        let one_head = self.norm_width(task) == Some(d);
        for (at, scale) in scales.iter_mut().enumerate() {
            let (head, channel) = if one_head { (0, at % d) } else { (at / d * d, at % d) };
            let twin = self.pair.rope.as_ref().map_or(channel, |rope| rope.partner(channel));
            if !held[head + channel] || !held[head + twin] {
                *scale = 1.0;
            }
        }
        Ok(())
    }

    fn fold(&self, task: &BlockTask<'_>, scales: &[f32], rewrite: &mut Rewrite) -> Result<()> {
        let (d, [queries, keys]) = (self.pair.head_dim, self.pair.producers);
        let shared = d * self.pair.repeat;
        let of_queries = |row: usize| scales[row / shared * d + row % d];
        let nodes = task.block.graph().nodes();
        for (node, rows, scale) in [
            (queries, self.pair.rows[0], &of_queries as &dyn Fn(usize) -> f32),
            (keys, self.pair.rows[1], &|row: usize| 1.0 / scales[row]),
        ] {
            match &nodes[node].op {
                op if op.linear_shape().is_some() => {
                    let divisors = rewrite.rows.entry(node).or_insert_with(|| vec![1.0; rows.all]);
                    for channel in 0..rows.channels() {
                        // Rewrites contain divisors for rows, so factors are inverted.
                        divisors[rows.row(channel)] = 1.0 / scale(channel);
                    }
                }
                op => {
                    let Some((_, width, _)) = op.stored_norm() else {
                        return Err(Error::Internal(format!("{op:?} computes queries or keys")));
                    };
                    let scaled = |values: Vec<f32>| -> Vec<f32> {
                        values.iter().enumerate().map(|(i, v)| v * scale(i)).collect()
                    };
                    let weight: Vec<f32> = task.block.norm(node).to_vec1()?;
                    debug_assert_eq!(weight.len(), width);
                    rewrite.norms.insert(node, scaled(weight));
                    if let Some(bias) = task.block.norm_bias(node) {
                        rewrite.norm_biases.insert(node, scaled(bias.to_vec1()?));
                    }
                }
            }
        }
        Ok(())
    }

    /// Tries all exponents. Ties go to the smallest, which moves least.
    fn search(&self, task: &BlockTask<'_>) -> Result<(f32, Vec<TriedScales>)> {
        let bits = u32::from(task.settings.kv.unwrap_or(DEFAULT_CACHE).bits());
        let mut tried = Vec::new();
        for tenth in TENTHS {
            task.cancel.check()?;
            let alpha = f32::from(tenth) / 10.0;
            let error = self.error(&self.scales(task, alpha)?, bits);
            let tokens = (self.keys.len() / self.maxima.len().max(1)) as u64;
            tried.push(TriedScales { ratio: Some(alpha), error, tokens });
        }
        let best = tried.iter().min_by(|a, b| a.error.total_cmp(&b.error));
        Ok((best.and_then(|b| b.ratio).unwrap_or(0.0), tried))
    }

    /// The mean squared error of a score, over all pairs of these queries and keys.
    fn error(&self, scales: &[f32], bits: u32) -> f64 {
        let d = self.pair.head_dim;
        let (mut scaled, mut codes, mut rounded) = (vec![0.0; d], vec![0; d], vec![0.0; d]);
        let mut sum = 0.0;
        for key in self.keys.chunks_exact(self.maxima.len().max(1)) {
            for (head, (key, scales)) in key.chunks_exact(d).zip(scales.chunks_exact(d)).enumerate() {
                scaled.iter_mut().zip(key).zip(scales).for_each(|((s, k), scale)| *s = k / scale);
                let grid = quantize_head(&scaled, bits, &mut codes);
                // Values that the cache cannot hold are worse than any error.
                let Ok(()) = grid.and_then(|grid| dequantize_head(&codes, grid, &mut rounded)) else {
                    return f64::INFINITY;
                };
                for ((r, s), scale) in rounded.iter_mut().zip(&scaled).zip(scales) {
                    *r = (*r - s) * scale;
                }
                let gram = &self.grams[head * d * d..(head + 1) * d * d];
                for (row, &e) in gram.chunks_exact(d).zip(&rounded) {
                    let product: f64 = row.iter().zip(&rounded).map(|(g, &f)| g * f64::from(f)).sum();
                    sum += product * f64::from(e);
                }
            }
        }
        let keys = self.keys.len() / self.maxima.len().max(1);
        sum / (keys * self.queries * self.kv_heads() * d).max(1) as f64
    }
}

impl QueryKeyStatistics {
    /// Every `stride`-th counted token is used for the search.
    fn new(pair: QueryKey, stride: usize) -> Self {
        Self { pair, stride, maxima: Vec::new(), keys: Vec::new(), grams: Vec::new(), queries: 0 }
    }

    fn add(&mut self, query: &[f32], key: &[f32]) {
        let d = self.pair.head_dim;
        self.keys.extend_from_slice(key);
        self.queries += self.pair.repeat;
        for (head, query) in query.chunks_exact(d).enumerate() {
            let gram = &mut self.grams[head / self.pair.repeat * d * d..][..d * d];
            for (row, &a) in gram.chunks_exact_mut(d).zip(query) {
                row.iter_mut().zip(query).for_each(|(g, &b)| *g += f64::from(a) * f64::from(b));
            }
        }
    }
}

impl AttentionStatistic for QueryKeyStatistics {
    fn take(&mut self, queries: &InputRows<'_>, keys: &InputRows<'_>) -> Result<()> {
        self.maxima.resize(keys.channels(), 0.0);
        self.grams.resize(keys.channels() * self.pair.head_dim, 0.0);
        for ((rank, key), (_, query)) in keys.counted().zip(queries.counted()) {
            for (max, k) in self.maxima.iter_mut().zip(key) {
                // Comparisons would skip NaN.
                *max = if k.is_nan() { f32::INFINITY } else { max.max(k.abs()) };
            }
            if rank.is_multiple_of(self.stride) {
                self.add(query, key);
            }
        }
        Ok(())
    }
}
