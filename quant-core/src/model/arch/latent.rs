//! Multi-head latent attention (DeepSeek-V2): keys and values are projected from one short latent vector per token,
//! queries optionally from another, and only part of each head is rotated. All heads share the rotated part of the key.
//!
//! Keys and values are expanded to one per head and cached in that form. Engines cache the latent vectors instead.

use super::parts::linear;
use super::{AttentionShape, GraphBuilder, NodeId, Op};
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
        let Self { query_rank, rank, plain, rotated } = self;
        let (heads, head_dim) = (shape.heads(), shape.head_dim);
        let norm = |name: &str, width| Op::RmsNorm {
            name: format!("self_attn.{name}"),
            width,
            eps: EPS,
            zero_centered: false,
        };
        let linear = |name: &str, shape, bias| linear(&format!("self_attn.{name}"), shape, bias);
        let q = match query_rank {
            None => g.add(linear("q_proj", [heads * head_dim, hidden], false), &[x]),
            Some(rank) => {
                let latent = g.add(linear("q_a_proj", [rank, hidden], bias), &[x]);
                let latent = g.add(norm("q_a_layernorm", rank), &[latent]);
                g.add(linear("q_b_proj", [heads * head_dim, rank], false), &[latent])
            }
        };
        let widths = [plain, rotated];
        let [q_plain, q_rotated] = split(g, q, widths);
        let q_rotated = g.add(Op::Rope(rope.clone()), &[q_rotated]);
        let q = g.add(Op::JoinHeads { heads, widths }, &[q_plain, q_rotated]);

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
