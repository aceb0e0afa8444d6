//! Llama's block with one variation per family: layers without rotation (SmolLM3), four multipliers (Granite), queries
//! scaled by position (Ministral 3), biases (Seed-OSS), interleaved rotation (Ernie 4.5), norms after the rotation
//! (HunYuan).

use super::decoder::{Decoder, Defaults};
use super::parts::{Attention, HeadNorms, Mlp};
use super::windows::Windows;
use super::{Architecture, AttentionShape, EmbeddingScale, Family, LogitsTransform, PositionScale};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::{RopeLayout, RopeRequest};

#[derive(Debug, Clone, Copy)]
pub(super) struct SmolLm3;

#[derive(Debug, Clone, Copy)]
pub(super) struct Granite;

#[derive(Debug, Clone, Copy)]
pub(super) struct Ministral3;

#[derive(Debug, Clone, Copy)]
pub(super) struct SeedOss;

/// The family of `Ernie4_5ForCausalLM`, without experts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ernie45;

#[derive(Debug, Clone, Copy)]
pub(super) struct HunYuanDenseV1;

impl Family for SmolLm3 {
    fn name(&self) -> &'static str {
        "smollm3"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["SmolLM3ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let defaults = Defaults { kv_heads: Some(4), theta: 2e6, tied: true, ..Defaults::new(self.name()) };
        let d = Decoder::read(config, defaults)?;
        let rotated = rotated_layers(&d)?;
        let slides = d.flag("use_sliding_window", false)?;
        let windows = match slides && config.get("sliding_window").is_some() {
            true => Windows::patterned(config, None, |layer| !rotated[layer])?,
            false => Windows::Never,
        };
        let bias = d.flag("attention_bias", false)?;
        let rope = d.rope()?;
        let mlp = d.mlp(d.flag("mlp_bias", false)?);
        d.architecture(|layer| {
            let rope = rotated[layer].then(|| rope.clone());
            let mut attention = d.attention(rope, [bias; 2]);
            attention.shape = AttentionShape { window: windows.of(layer), ..d.shape };
            d.block(attention, mlp)
        })
    }
}

/// `parameters` are the rope parameters.
pub(super) fn position_scale(
    config: &ConfigFields<'_>,
    parameters: &ConfigFields<'_>,
) -> Result<PositionScale> {
    const BETA: &str = "llama_4_scaling_beta";
    const ORIGINAL: &str = "original_max_position_embeddings";
    let beta = parameters.require_f64(BETA)?;
    if !(0.0..=1e6).contains(&beta) {
        return Err(parameters.error(BETA, format!("is {beta}; it must be from 0 to 1e6")));
    }
    let original_positions = match config.optional_positive(ORIGINAL)? {
        Some(positions) => positions,
        None => match parameters.optional_positive(ORIGINAL)? {
            Some(positions) => positions,
            None => config.require_positive("max_position_embeddings")?,
        },
    };
    Ok(PositionScale { beta: beta as f32, original_positions, offset: 0 })
}

/// Returns whether each layer rotates queries and keys: 1 in `no_rope_layers` means rotated, despite the name.
fn rotated_layers(d: &Decoder<'_>) -> Result<Vec<bool>> {
    const KEY: &str = "no_rope_layers";
    if let Some(list) = d.config.optional_usize_list(KEY)? {
        if list.len() != d.layers {
            return Err(d.config.error(KEY, format!("has {} entries for {} blocks", list.len(), d.layers)));
        }
        if let Some(other) = list.iter().find(|&&n| n > 1) {
            return Err(d.config.error(KEY, format!("contains {other}, expected 0 or 1")));
        }
        return Ok(list.into_iter().map(|n| n == 1).collect());
    }
    let interval = d.config.optional_positive("no_rope_layer_interval")?.unwrap_or(4);
    Ok((1..=d.layers).map(|n| !n.is_multiple_of(interval)).collect())
}

impl Family for Granite {
    fn name(&self) -> &'static str {
        "granite"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["GraniteForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = Decoder::read(config, Defaults::new(self.name()))?;
        d.granite(d.mlp(d.flag("mlp_bias", false)?))
    }
}

impl Family for Ministral3 {
    fn name(&self) -> &'static str {
        "ministral3"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Ministral3ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        const PARAMETERS: &str = "rope_parameters";
        let defaults =
            Defaults { kv_heads: Some(8), head_dim: Some(128), norm_eps: 1e-5, ..Defaults::new(self.name()) };
        let d = Decoder::read(config, defaults)?;
        // The key is required: transformers' defaults are the values of one particular release, and all published
        // configurations contain it.
        let Some(parameters) = config.optional_object(PARAMETERS)? else {
            return Err(config.error(PARAMETERS, "is missing"));
        };
        let mut attention = d.attention(Some(d.rope()?), [false; 2]);
        attention.position_scale = Some(position_scale(config, &parameters)?);
        let windows = Windows::uniform(config, None, true)?;
        attention.shape.window = windows.of(0);
        let block = d.block(attention, d.mlp(false));
        d.architecture(|_| block.clone())
    }
}

impl Family for SeedOss {
    fn name(&self) -> &'static str {
        "seed_oss"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["SeedOssForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let (kv_heads, head_dim) = (Some(8), head_dim_or(config, 128));
        let d = Decoder::read(config, Defaults { kv_heads, head_dim, ..Defaults::new(self.name()) })?;
        let bias = [d.flag("attention_bias", true)?, d.flag("attention_out_bias", false)?];
        let block = d.block(d.attention(Some(d.rope()?), bias), d.mlp(d.flag("mlp_bias", false)?));
        d.architecture(|_| block.clone())
    }
}

/// `null` means `hidden_size / num_attention_heads`.
fn head_dim_or(config: &ConfigFields<'_>, default: usize) -> Option<usize> {
    (!config.has("head_dim")).then_some(default)
}

impl Family for Ernie45 {
    fn name(&self) -> &'static str {
        "ernie4_5"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Ernie4_5ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let defaults = Defaults {
            kv_heads: Some(2),
            head_dim: head_dim_or(config, 128),
            theta: 5e5,
            norm_eps: 1e-5,
            tied: true,
            ..Defaults::new(self.name())
        };
        let d = Decoder::read(config, defaults)?;
        let mut request = d.rope_request();
        request.layout = RopeLayout::Interleaved;
        let bias = d.flag("use_bias", false)?;
        let block = d.block(d.attention(Some(request.read(config)?), [bias; 2]), d.mlp(bias));
        d.architecture(|_| block.clone())
    }
}

impl Family for HunYuanDenseV1 {
    fn name(&self) -> &'static str {
        "hunyuan_v1_dense"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["HunYuanDenseV1ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = Decoder::read(config, Defaults { norm_eps: 1e-5, ..Defaults::new(self.name()) })?;
        let block = d.block(d.hunyuan_attention()?, d.mlp(false));
        d.architecture(|_| block.clone())
    }
}

impl Decoder<'_> {
    pub(super) fn granite(&self, mlp: Mlp) -> Result<Architecture> {
        let mut attention = self.attention(Some(self.rope()?), [self.flag("attention_bias", false)?; 2]);
        // Unlike in most families, scores are not divided by √head_dim.
        let scale = self.factor("attention_multiplier")?.unwrap_or(1.0);
        attention.shape.score_scale = Some(scale as f32);
        let mut block = self.block(attention, mlp);
        block.residual_scale = self.granite_residual()?;
        self.granite_around(self.architecture(|_| block.clone())?)
    }

    pub(super) fn granite_residual(&self) -> Result<Option<f32>> {
        Ok(self.factor("residual_multiplier")?.map(|m| m as f32).filter(|m| *m != 1.0))
    }

    pub(super) fn granite_around(&self, mut architecture: Architecture) -> Result<Architecture> {
        architecture.embedding_scale = self.factor("embedding_multiplier")?.map(EmbeddingScale::Exact);
        if let Some(divisor) = self.factor("logits_scaling")? {
            architecture.logits = LogitsTransform { scale: (1.0 / divisor) as f32, softcap: None };
        }
        Ok(architecture)
    }

    pub(super) fn hunyuan_attention(&self) -> Result<Attention> {
        let rope = RopeRequest { has_alpha: true, ..self.rope_request() }.read(self.config)?;
        let mut attention = self.attention(Some(rope), [self.flag("attention_bias", false)?; 2]);
        attention.head_norms = Some(HeadNorms {
            names: ["self_attn.query_layernorm", "self_attn.key_layernorm"],
            after_rope: true,
            ..HeadNorms::DEFAULT
        });
        Ok(attention)
    }
}
