//! OLMo 2, OLMo 3 and Exaone 4: norms only after attention and MLP, and norms of queries and keys.

use super::decoder::{Decoder, Defaults};
use super::parts::{DecoderBlock, HeadNorms, Placement};
use super::windows::Windows;
use super::{Architecture, AttentionShape, Family};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::Rope;

#[derive(Debug, Clone, Copy)]
pub(super) struct Olmo2;

#[derive(Debug, Clone, Copy)]
pub(super) struct Olmo3;

#[derive(Debug, Clone, Copy)]
pub(super) struct Exaone4;

const POST: Placement = Placement::Post(["post_attention_layernorm", "post_feedforward_layernorm"]);

/// One norm over all queries, one over all keys.
const WHOLE_WIDTH: HeadNorms = HeadNorms { whole_width: true, ..HeadNorms::DEFAULT };

impl Family for Olmo2 {
    fn name(&self) -> &'static str {
        "olmo2"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Olmo2ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = Decoder::read(config, Defaults { norm_eps: 1e-5, ..Defaults::new(self.name()) })?;
        let (rope, bias) = (d.rope()?, d.flag("attention_bias", false)?);
        d.architecture(|_| post_normed(&d, WHOLE_WIDTH, Some(rope.clone()), None, bias))
    }
}

impl Family for Olmo3 {
    fn name(&self) -> &'static str {
        "olmo3"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Olmo3ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = Decoder::read(config, Defaults { theta: 5e5, norm_eps: 1e-5, ..Defaults::new(self.name()) })?;
        let windows = Windows::patterned(config, Some(4096), |layer| !(layer + 1).is_multiple_of(4))?;
        let mut request = d.rope_request();
        request.layer_type = Some("full_attention");
        let full = request.read(config)?;
        // As in transformers, `rope_scaling` applies only to full attention, and sliding attention has its own base.
        (request.layer_type, request.is_scaled) = (Some("sliding_attention"), false);
        request.theta_key = "rope_local_base_freq";
        let sliding = request.read(config)?;
        let bias = d.flag("attention_bias", false)?;
        d.architecture(|layer| {
            let window = windows.of(layer);
            let rope = if window.is_some() { &sliding } else { &full };
            post_normed(&d, WHOLE_WIDTH, Some(rope.clone()), window, bias)
        })
    }
}

impl Family for Exaone4 {
    fn name(&self) -> &'static str {
        "exaone4"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Exaone4ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        const PATTERN: &str = "sliding_window_pattern";
        let kv_heads = Some(32);
        let d = Decoder::read(config, Defaults { kv_heads, norm_eps: 1e-5, ..Defaults::new(self.name()) })?;
        let has_windows = !config.has("sliding_window") || config.get("sliding_window").is_some();
        let windows = match has_windows {
            true => {
                // Some releases give the pattern as text, `LLLG`, in addition to the list of layer types.
                let pattern = match config.get(PATTERN) {
                    Some(text) if text.is_string() && config.get("layer_types").is_some() => 4,
                    _ => config.optional_positive(PATTERN)?.unwrap_or(4),
                };
                Windows::patterned(config, Some(4096), |layer| !(layer + 1).is_multiple_of(pattern))?
            }
            false => Windows::Never,
        };
        let rope = d.rope()?;
        d.architecture(|layer| {
            let window = windows.of(layer);
            // If some layers have sliding windows, the layers with full attention are not rotated.
            let rope = (window.is_some() || !has_windows).then(|| rope.clone());
            post_normed(&d, HeadNorms::DEFAULT, rope, window, false)
        })
    }
}

fn post_normed(
    d: &Decoder<'_>,
    head_norms: HeadNorms,
    rope: Option<Rope>,
    window: Option<usize>,
    bias: bool,
) -> DecoderBlock {
    let mut attention = d.attention(rope, [bias; 2]);
    attention.shape = AttentionShape { window, ..d.shape };
    attention.head_norms = Some(head_norms);
    DecoderBlock { placement: POST, ..d.block(attention, d.mlp(false)) }
}
