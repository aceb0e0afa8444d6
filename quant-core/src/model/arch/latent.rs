//! Multi-head latent attention (DeepSeek-V2): keys and values are projected from one short latent vector per token,
//! queries optionally from another, and only part of each head is rotated. All heads share the rotated part of the key.
//!
//! Keys and values are expanded to one per head and cached in that form. Engines cache the latent vectors instead.
//!
//! In DeepSeek-V3.2, an indexer with projections of its own selects the keys that each query attends to.

use super::parts::linear;
use super::{AttentionShape, GraphBuilder, LayerNormParameters, NodeId, Op};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::{Rope, Yarn};

/// Fixed by the family; the configuration's epsilon is for other norms.
const EPS: f64 = 1e-6;

/// The latent vectors from which queries, keys and values are projected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Latent {
    /// Width of the query latent; `None` if queries are projected from the hidden states.
    query_rank: Option<usize>,
    /// Width of the key-value latent.
    rank: usize,
    /// Features of a query or key head that are not rotated.
    plain: usize,
    /// Rotated features of a head, after the others.
    rotated: usize,
    indexer: Option<Indexer>,
}

/// The projections of an indexer: queries from the latent vector of the queries, one key and the weights of the heads
/// from the hidden states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Indexer {
    pub(super) heads: usize,
    pub(super) head_dim: usize,
}

impl Indexer {
    /// Adds the indexer, which selects keys for the queries `q`. It stays float: rounding would change which keys are
    /// selected.
    fn add(self, g: &mut GraphBuilder, [q, x, latent]: [NodeId; 3], [hidden, rank]: [usize; 2]) -> NodeId {
        let Self { heads, head_dim } = self;
        let linear = |name: &str, shape| Op::Linear {
            name: format!("self_attn.indexer.{name}"),
            shape,
            bias: false,
            stays_float: true,
        };
        let queries = g.add(linear("wq_b", [heads * head_dim, rank]), &[latent]);
        let key = g.add(linear("wk", [head_dim, hidden]), &[x]);
        let norm = Op::LayerNorm {
            name: "self_attn.indexer.k_norm".into(),
            width: head_dim,
            parameters: LayerNormParameters::WeightAndBias,
            eps: EPS,
        };
        let key = g.add(norm, &[key]);
        let weights = g.add(linear("weights_proj", [heads, hidden]), &[x]);
        g.add(Op::SelectKeys, &[q, queries, key, weights])
    }
}

impl Latent {
    pub(super) fn read(config: &ConfigFields<'_>) -> Result<(Self, AttentionShape)> {
        const KV_HEADS: &str = "num_key_value_heads";
        const QUERY_RANK: &str = "q_lora_rank";
        let size = |key: &str| config.require_positive(key);
        let latent = Self {
            // A missing key has different meanings in different families, so it must be given, as `null` if there is none.
            query_rank: match config.has(QUERY_RANK) {
                true => config.optional_positive(QUERY_RANK)?,
                false => return Err(config.error(QUERY_RANK, "is missing")),
            },
            rank: size("kv_lora_rank")?,
            plain: size("qk_nope_head_dim")?,
            rotated: size("qk_rope_head_dim")?,
            indexer: None,
        };
        let heads = size("num_attention_heads")?;
        if let Some(other) = config.optional_positive(KV_HEADS)?.filter(|other| *other != heads) {
            let reason =
                format!("is {other}; with latent attention, it must be the number of heads, {heads}");
            return Err(config.error(KV_HEADS, reason));
        }
        let head_dim = latent.plain + latent.rotated;
        let score_scale = 1.0 / (head_dim as f64).sqrt() * score_factor(config)?;
        let shape = AttentionShape {
            value_dim: size("v_head_dim")?,
            score_scale: Some(score_scale as f32),
            ..AttentionShape::new(heads, 1, head_dim)
        };
        Ok((latent, shape))
    }

    /// The same with an indexer.
    ///
    /// # Errors
    /// When the queries have no latent vector, which an indexer reads.
    pub(super) fn indexed(self, config: &ConfigFields<'_>, indexer: Indexer) -> Result<Self> {
        match self.query_rank {
            Some(_) => Ok(Self { indexer: Some(indexer), ..self }),
            None => Err(config
                .error("q_lora_rank", "is null, but the indexer reads the latent vector of the queries")),
        }
    }

    pub(super) fn rotated(&self) -> usize {
        self.rotated
    }

    /// Adds the projections of `x` to queries, keys and values. `bias`: whether the linears that compute the latent
    /// vectors have biases.
    pub(super) fn add(
        self,
        g: &mut GraphBuilder,
        x: NodeId,
        hidden: usize,
        (shape, rope, bias): (AttentionShape, &Rope, bool),
    ) -> [NodeId; 3] {
        let Self { query_rank, rank, plain, rotated, indexer } = self;
        let (heads, head_dim) = (shape.heads(), shape.head_dim);
        let norm = |name: &str, width| Op::RmsNorm {
            name: format!("self_attn.{name}"),
            width,
            eps: EPS,
            zero_centered: false,
        };
        let linear = |name: &str, shape, bias| linear(&format!("self_attn.{name}"), shape, bias);
        let mut indexed = None;
        let q = match query_rank {
            None => g.add(linear("q_proj", [heads * head_dim, hidden], false), &[x]),
            Some(rank) => {
                let latent = g.add(linear("q_a_proj", [rank, hidden], bias), &[x]);
                let latent = g.add(norm("q_a_layernorm", rank), &[latent]);
                indexed = indexer.map(|indexer| (indexer, latent, rank));
                g.add(linear("q_b_proj", [heads * head_dim, rank], false), &[latent])
            }
        };
        let widths = [plain, rotated];
        let [q_plain, q_rotated] = split(g, q, widths);
        let q_rotated = g.add(Op::Rope(rope.clone()), &[q_rotated]);
        let mut q = g.add(Op::JoinHeads { heads, widths }, &[q_plain, q_rotated]);
        if let Some((indexer, latent, rank)) = indexed {
            q = indexer.add(g, [q, x, latent], [hidden, rank]);
        }

        let both = g.add(linear("kv_a_proj_with_mqa", [rank + rotated, hidden], bias), &[x]);
        let [latent, k_rotated] = split(g, both, [rank, rotated]);
        let k_rotated = g.add(Op::Rope(rope.clone()), &[k_rotated]);
        let latent = g.add(norm("kv_a_layernorm", rank), &[latent]);
        let heads_of_both = linear("kv_b_proj", [heads * (plain + shape.value_dim), rank], false);
        let both = g.add(heads_of_both, &[latent]);
        let [k_plain, v] = split(g, both, [plain, shape.value_dim]);
        let k = g.add(Op::JoinHeads { heads, widths }, &[k_plain, k_rotated]);
        [q, k, v]
    }
}

/// Splits every `widths[0] + widths[1]` consecutive features into a first and a second part of these widths.
fn split(g: &mut GraphBuilder, value: NodeId, widths: [usize; 2]) -> [NodeId; 2] {
    let period = widths[0] + widths[1];
    [(0, widths[0]), (widths[0], widths[1])]
        .map(|(start, width)| g.add(Op::Slice { period, start, width }, &[value]))
}

/// Returns the factor of the scores in addition to `1 / √head_dim`: the square of YaRN's recommended factor if
/// `mscale_all_dim` is set, else 1.
fn score_factor(config: &ConfigFields<'_>) -> Result<f64> {
    const KEY: &str = "mscale_all_dim";
    let older = config.optional_object("rope_scaling")?;
    let Some(fields) = older.or(config.optional_object("rope_parameters")?) else { return Ok(1.0) };
    let kind = match fields.optional_str("rope_type")? {
        Some(kind) => Some(kind),
        None => fields.optional_str("type")?,
    };
    match fields.optional_f64(KEY)?.filter(|weight| *weight != 0.0 && kind != Some("default")) {
        Some(weight) if weight > 0.0 => {
            let factor = Yarn::recommended_factor(fields.require_f64("factor")?, weight).powi(2);
            match (factor as f32).is_normal() {
                true => Ok(factor),
                false => {
                    Err(fields.error(KEY, format!("implies a factor of {factor}, which is out of range")))
                }
            }
        }
        Some(weight) => Err(fields.error(KEY, format!("is {weight}; it must be positive"))),
        None => Ok(1.0),
    }
}
