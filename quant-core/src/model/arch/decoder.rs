//! The configuration keys that most families share, and the architecture that follows from them.

use super::experts::GatedExperts;
use super::parts::{Attention, DecoderBlock, Mlp, NormKind, Norms, Projections};
use super::{Activation, Architecture, AttentionShape, Blocks, LogitsTransform};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::{Rope, RopeRequest};

/// The defaults of a family, and its names for keys that differ between families.
#[derive(Debug, Clone, Copy)]
pub(super) struct Defaults {
    pub(super) family: &'static str,
    /// The key of the MLP width. If no layer has an MLP, the key of a different width that is always present.
    pub(super) intermediate_key: &'static str,
    /// Number of key and value heads; `None` means as many as query heads.
    pub(super) kv_heads: Option<usize>,
    /// Width of a head; `None` means `hidden_size / num_attention_heads`.
    pub(super) head_dim: Option<usize>,
    /// Base of the rotary frequencies.
    pub(super) theta: f64,
    pub(super) norm: NormKind,
    pub(super) norm_eps_key: &'static str,
    pub(super) norm_eps: f64,
    pub(super) activation_key: &'static str,
    /// The activation of the family, and its names in configurations.
    pub(super) activation: (Activation, &'static [&'static str]),
    pub(super) tied: bool,
    /// SmoothQuant's exponent.
    pub(super) smoothing: f32,
}

/// Names of the tanh approximation of GELU.
pub(super) const GELU_TANH: &[&str] = &["gelu_pytorch_tanh", "gelu_new", "gelu_python_tanh", "gelu_fast"];

impl Defaults {
    pub(super) fn new(family: &'static str) -> Self {
        Self {
            family,
            intermediate_key: "intermediate_size",
            kv_heads: None,
            head_dim: None,
            theta: 10_000.0,
            norm: NormKind::Rms,
            norm_eps_key: "rms_norm_eps",
            norm_eps: 1e-6,
            activation_key: "hidden_act",
            activation: (Activation::Silu, &["silu", "swish"]),
            tied: false,
            smoothing: 0.8,
        }
    }
}

/// Returns the second of two names of a field if only that one has a value, else the first.
pub(super) fn either(config: &ConfigFields<'_>, names: [&'static str; 2]) -> &'static str {
    let [first, second] = names.map(|name| config.get(name).is_some());
    if second && !first { names[1] } else { names[0] }
}

#[derive(Debug, Clone)]
pub(super) struct Decoder<'a> {
    pub(super) config: &'a ConfigFields<'a>,
    pub(super) defaults: Defaults,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) shape: AttentionShape,
    pub(super) layers: usize,
    pub(super) norm: Norms,
}

impl<'a> Decoder<'a> {
    pub(super) fn read(config: &'a ConfigFields<'a>, defaults: Defaults) -> Result<Self> {
        let hidden = config.require_positive("hidden_size")?;
        let intermediate = config.require_positive(defaults.intermediate_key)?;
        let heads = config.require_positive("num_attention_heads")?;
        let kv_heads = match config.optional_positive("num_key_value_heads")? {
            Some(kv_heads) => kv_heads,
            // In every family, `null` means as many key and value heads as query heads. A family's default applies only
            // if the key is missing.
            None if config.has("num_key_value_heads") => heads,
            None => defaults.kv_heads.unwrap_or(heads),
        };
        if heads % kv_heads != 0 {
            return Err(config.error(
                "num_key_value_heads",
                format!("is {kv_heads}, which does not divide the number of heads, {heads}"),
            ));
        }
        let head_dim = match config.optional_positive("head_dim")?.or(defaults.head_dim) {
            Some(width) => width,
            None if hidden % heads == 0 => hidden / heads,
            None => {
                return Err(config.error(
                    "num_attention_heads",
                    format!(
                        "is {heads}, which does not divide hidden_size {hidden}, and head_dim is missing"
                    ),
                ));
            }
        };
        let (activation_key, (_, names)) = (defaults.activation_key, defaults.activation);
        if let Some(found) = config.optional_str(activation_key)?.filter(|found| !names.contains(found)) {
            let reason = format!("is `{}`; this family supports only `{}`", found.escape_default(), names[0]);
            return Err(config.error(activation_key, reason));
        }
        Ok(Self {
            config,
            defaults,
            hidden,
            intermediate,
            shape: AttentionShape::new(kv_heads, heads / kv_heads, head_dim),
            layers: Blocks::layers(config)?,
            norm: Self::norms(config, defaults)?,
        })
    }

    pub(super) fn norms(config: &ConfigFields<'_>, defaults: Defaults) -> Result<Norms> {
        let eps = config.optional_f64(defaults.norm_eps_key)?.unwrap_or(defaults.norm_eps);
        match (0.0..1.0).contains(&eps) {
            true => Ok(Norms { kind: defaults.norm, eps }),
            false => {
                let reason = format!("is {eps}; it must be at least 0 and less than 1");
                Err(config.error(defaults.norm_eps_key, reason))
            }
        }
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.config.optional_bool(key)?.unwrap_or(default))
    }

    pub(super) fn factor(&self, key: &str) -> Result<Option<f64>> {
        match self.config.optional_f64(key)? {
            Some(value) if value > 0.0 && (value as f32).is_normal() => Ok(Some(value)),
            Some(value) => Err(self
                .config
                .error(key, format!("is {value}; it must be positive and in the range of f32"))),
            None => Ok(None),
        }
    }

    pub(super) fn refuse(&self, key: &str, reason: &str) -> Result<()> {
        match self.flag(key, false)? {
            true => Err(self.config.unsupported_setting(key, format!("is true: {reason}"))),
            false => Ok(()),
        }
    }

    /// The rotary embedding of most families: whole heads are rotated, and channel `i` is paired with channel `i +
    /// head_dim / 2`.
    pub(super) fn rope(&self) -> Result<Rope> {
        self.rope_request().read(self.config)
    }

    pub(super) fn rope_request(&self) -> RopeRequest<'static> {
        RopeRequest::new(self.shape.head_dim, self.defaults.theta)
    }

    /// Attention with separate projections. `bias`: whether queries, keys and values have biases, and whether the
    /// output does.
    pub(super) fn attention(&self, rope: Option<Rope>, bias: [bool; 2]) -> Attention {
        Attention {
            shape: self.shape,
            projections: Projections::Separate,
            output: "self_attn.o_proj",
            bias,
            head_norms: None,
            norms_values: false,
            rope,
            position_scale: None,
            sharing: None,
        }
    }

    pub(super) fn mlp(&self, bias: bool) -> Mlp {
        Mlp::Gated { activation: self.defaults.activation.0, intermediate: self.intermediate, bias }
    }

    /// A block with a norm before the attention and a norm before the MLP.
    pub(super) fn block(&self, attention: Attention, mlp: Mlp) -> DecoderBlock {
        DecoderBlock::new(self.hidden, self.norm, attention, mlp)
    }

    /// The architecture with these blocks. Layers for which `experts` returns experts have them instead of the MLP.
    pub(super) fn with_experts(
        &self,
        block: impl Fn(usize) -> DecoderBlock,
        experts: impl Fn(usize) -> Option<GatedExperts>,
    ) -> Result<Architecture> {
        self.architecture(|layer| {
            let block = block(layer);
            match experts(layer) {
                Some(experts) => DecoderBlock { mlp: Mlp::Experts(experts), ..block },
                None => block,
            }
        })
    }

    pub(super) fn architecture(&self, block: impl Fn(usize) -> DecoderBlock) -> Result<Architecture> {
        let (config, defaults) = (self.config, self.defaults);
        Ok(Architecture {
            family: defaults.family,
            hidden: self.hidden,
            vocab: config.require_positive("vocab_size")?,
            layers: self.layers,
            max_positions: config.optional_positive("max_position_embeddings")?.unwrap_or(2048),
            selected_keys: None,
            smoothing: defaults.smoothing,
            learned_positions: None,
            embedding_norm: None,
            embedding_scale: None,
            logits: LogitsTransform::IDENTITY,
            tied: self.flag("tie_word_embeddings", defaults.tied)?,
            embedding: "model.embed_tokens.weight".into(),
            final_norm: Some(self.norm.op("model.norm", self.hidden)),
            head: "lm_head".into(),
            head_alias: None,
            router_alias: None,
            head_bias: false,
            block_prefix: "model.layers.{}.",
            base: "",
            stored_by_columns: &[],
            fused: &[
                ("self_attn.qkv_proj", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
                ("mlp.gate_up_proj", &["mlp.gate_proj", "mlp.up_proj"]),
                (
                    "mlp.shared_expert.gate_up_proj",
                    &["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"],
                ),
                ("mlp.shared_mlp.gate_up_proj", &["mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"]),
                (
                    "mlp.shared_experts.gate_up_proj",
                    &["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"],
                ),
                ("self_attn.fused_qkv_a_proj", &["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"]),
            ],
            multiplied_inputs: Vec::new(),
            wrapper: None,
            per_layer_inputs: None,
            unread: None,
            further_blocks: 0,
            further_module: None,
            fused_experts: (0..self.layers).find_map(|layer| match block(layer).mlp {
                Mlp::Experts(experts) => Some(experts.fused(self.hidden)),
                Mlp::Gated { .. }
                | Mlp::GatedAs { .. }
                | Mlp::FusedGated { .. }
                | Mlp::FusedGatedAs { .. }
                | Mlp::Plain { .. } => None,
            }),
            blocks: Blocks::new(self.layers, block, DecoderBlock::graph),
        })
    }
}
