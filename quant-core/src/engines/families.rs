//! Rules for single families, in addition to those that hold for all linears.

use super::Compatibility::{self, No, Unsure, With, Yes};
use super::outline::Outline;
use crate::scheme::{FloatFormat, LinearScheme};

/// In the sources that were read for OPT, which are older than the version of the engine's entry, the head and the
/// embedding are created without a quantization configuration.
pub(super) fn head_of_opt(outline: &Outline) -> Compatibility {
    match outline.head.is_some() || outline.embedding.is_some() {
        true => Unsure("whether its OPT class supports a quantized head or embedding was not checked".into()),
        false => Yes,
    }
}

/// GPT-2 stores weights with inputs first, and engines transpose every tensor named `weight`. In the compressed-tensors
/// format, these include 8-bit codes.
pub(super) fn no_transposed_codes(outline: &Outline) -> Compatibility {
    let is_called_so = |scheme: &&LinearScheme| {
        scheme.is_stored_as_bytes() || scheme.float_format() == Some(FloatFormat::E4m3)
    };
    match outline.schemes().iter().find(is_called_so) {
        Some(scheme) => No(format!(
            "it transposes all weights of this family when loading them, including the codes of {scheme}"
        )),
        None => Yes,
    }
}

/// Engines read the configuration through transformers, which has no configuration class for InternLM2.
pub(super) fn remote_configuration(_: &Outline) -> Compatibility {
    With("it needs the configuration code of the model, and --trust-remote-code".into())
}

/// vLLM scales the queries of Ministral 3 by position only if the configuration is in Mistral's own format, which quant
/// does not write.
pub(super) fn position_scale(_: &Outline) -> Compatibility {
    With(
        "it does not scale queries by position, so results are wrong beyond `original_max_position_embeddings`"
            .into(),
    )
}

/// vLLM's Bloom splits every tensor of `query_key_value` by head along its first dimension. In the compressed-tensors
/// format, this works if each integer code is stored in a byte, and no activation scale is stored.
pub(super) fn parted_by_rows(outline: &Outline) -> Compatibility {
    let has_rows = |scheme: &LinearScheme| scheme.is_stored_as_bytes() && !scheme.has_static_activations();
    match outline.schemes().iter().all(has_rows) {
        true => Yes,
        false => No(PARTED_BY_ROWS.into()),
    }
}

pub(super) const PARTED_BY_ROWS: &str = "it splits every tensor of `query_key_value` by head, which works only in \
     the compressed-tensors format, with int8 weights, scales per channel and dynamic activation scales";

/// vLLM runs the class of transformers with its own linear layers.
pub(super) fn by_transformers(_: &Outline) -> Compatibility {
    With("it has no class for this family, and runs the transformers class with its own linear layers".into())
}

/// The class looks for the settings of experts under other names than the checkpoint's, so that only the setting of the
/// class `Linear` reaches them: that of the most common scheme.
pub(super) fn experts_by_class(outline: &Outline) -> Compatibility {
    let is_one = outline.experts.len() == 1 && outline.experts.iter().all(Option::is_some);
    match outline.experts.is_empty() || is_one {
        true => Yes,
        false => {
            No("its class has other names for experts, so it ignores the settings of single experts".into())
        }
    }
}

/// The class keeps experts in one tensor, but the checkpoint stores them separately.
pub(super) fn without_experts(outline: &Outline) -> Compatibility {
    match outline.experts.is_empty() {
        true => Yes,
        false => No("it does not support separately stored experts for this model".into()),
    }
}

/// The engine has no Mistral 4 class under the name in the checkpoint.
pub(super) fn mistral4_in_mistral3(_: &Outline) -> Compatibility {
    Unsure("it has no Mistral 4 class of this name; what it runs instead was not checked".into())
}

pub(super) fn other_format(outline: &Outline) -> Compatibility {
    Unsure(format!("how it runs {} in the {} format was not checked", outline.family, outline.container))
}

/// A family that was run in only one format, and whose separately stored experts cannot be read in any format.
pub(super) fn other_format_without_experts(outline: &Outline) -> Compatibility {
    without_experts(outline).and(other_format(outline))
}
