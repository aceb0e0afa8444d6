//! Rules of single families: what an engine does with a model beside what it does with all linears.

use super::Verdict::{self, No, Unsure, With, Yes};
use super::outline::Outline;
use crate::scheme::{FloatFormat, LinearScheme};

/// OPT's head and embedding are made without a quantization in the sources that were seen, which are
/// older than this version.
pub(super) fn head_of_opt(outline: &Outline) -> Verdict {
    match outline.head.is_some() || outline.embedding.is_some() {
        true => Unsure("whether its OPT reads a quantized head or embedding".into()),
        false => Yes,
    }
}

/// GPT-2 is stored with inputs first, and engines turn around whatever is called `weight`: codes of 8 bits are, too, in
/// the compressed-tensors format.
pub(super) fn no_turned_codes(outline: &Outline) -> Verdict {
    let is_called_so = |scheme: &&LinearScheme| {
        scheme.is_stored_as_bytes() || scheme.float_format() == Some(FloatFormat::E4m3)
    };
    match outline.schemes().iter().find(is_called_so) {
        Some(scheme) => {
            No(format!("it transposes weights of this family on loading, {scheme} codes included"))
        }
        None => Yes,
    }
}

/// Engines read the configuration through transformers, which does not have that of InternLM2.
pub(super) fn remote_configuration(_: &Outline) -> Verdict {
    With("it needs the model's own configuration code and --trust-remote-code".into())
}

/// Queries of Ministral 3 are scaled by position in vLLM where Mistral's own configuration says so, and not in that of
/// transformers, which checkpoints of this project have.
pub(super) fn position_scale(_: &Outline) -> Verdict {
    With(
        "it does not scale queries by position: results are wrong beyond `original_max_position_embeddings`"
            .into(),
    )
}

/// vLLM's Bloom takes every tensor of `query_key_value` apart by heads along its first dimension, which bytes of the
/// compressed-tensors format have.
pub(super) fn parted_by_rows(outline: &Outline) -> Verdict {
    let has_rows = |scheme: &LinearScheme| scheme.is_stored_as_bytes() && !scheme.has_static_activations();
    match outline.schemes().iter().all(has_rows) {
        true => Yes,
        false => No(PARTED_BY_ROWS.into()),
    }
}

/// The reason why other codes are not read.
pub(super) const PARTED_BY_ROWS: &str =
    "it splits every tensor of `query_key_value` by head, which is impossible with packed codes";

/// vLLM's linears in the classes of transformers.
pub(super) fn by_transformers(_: &Outline) -> Verdict {
    With(
        "it has no class for this family and runs the class of transformers with its own linear layers"
            .into(),
    )
}

/// Experts are written one by one, and a class has them in one tensor.
pub(super) fn without_experts(outline: &Outline) -> Verdict {
    match outline.experts.is_empty() {
        true => Yes,
        false => No("it does not read experts of this model that are stored separately".into()),
    }
}

/// Mistral 3's class around a text model that is looked up by a name of its own.
pub(super) fn mistral4_in_mistral3(_: &Outline) -> Verdict {
    Unsure("it has no Mistral 4 class of this name; what it runs instead was not checked".into())
}

/// A family that was run in one format says nothing of the others.
pub(super) fn other_format(outline: &Outline) -> Verdict {
    Unsure(format!("how it runs {} in the {} format was not checked", outline.family, outline.container))
}

/// The same of a family whose experts are not read in any.
pub(super) fn other_format_without_experts(outline: &Outline) -> Verdict {
    without_experts(outline).and(other_format(outline))
}
