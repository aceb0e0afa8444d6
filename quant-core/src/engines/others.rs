//! Engines with few rules.

use std::collections::BTreeSet;

use super::Compatibility::{self, No, Unsure, With, Yes};
use super::outline::{LayerKind, Outline};
use crate::scheme::{ActivationScheme, Granularity, LinearScheme, ScaleFormat};
use crate::wording::counted;

/// All schemes of a checkpoint, head and embedding included.
fn all_schemes(outline: &Outline) -> Vec<LinearScheme> {
    let mut schemes = outline.schemes();
    schemes.extend(outline.head.into_iter().chain(outline.embedding));
    schemes.sort_unstable();
    schemes.dedup();
    schemes
}

const EMBEDDING: &str = "it does not support quantized embeddings (AttributeError on initialization)";

pub(super) fn transformers_gptq(outline: &Outline, _ranks: usize) -> Compatibility {
    if outline.embedding.is_some() {
        return No(EMBEDDING.into());
    }
    if let Some(part) = outline.layers.iter().flat_map(|l| &l.parts).find(|part| part.scheme.is_none()) {
        return No(format!(
            "`{}` is float, but it treats all linears as quantized in this format",
            part.module
        ));
    }
    let mut parts = outline.layers.iter().flat_map(|l| l.parts.iter().map(move |p| (p, l.k)));
    let narrow =
        parts.find(|(part, k)| part.scheme.is_some() && !(part.n.is_multiple_of(32) && k.is_multiple_of(32)));
    match narrow {
        Some((part, k)) => Unsure(format!(
            "`{}`: gptqmodel needs multiples of 32 inputs and outputs; how it pads {} × {k} was not checked",
            part.module, part.n
        )),
        None => Yes,
    }
}

pub(super) fn transformers_awq(outline: &Outline, _ranks: usize) -> Compatibility {
    if outline.embedding.is_some() {
        return No(EMBEDDING.into());
    }
    let narrow = (outline.layers.iter().flat_map(|l| &l.parts))
        .find(|part| part.scheme.is_some() && !part.n.is_multiple_of(32));
    let channel = all_schemes(outline).iter().any(|s| s.granularity == Granularity::Channel);
    match (narrow, channel) {
        (Some(part), _) => With(format!(
            "`{}`: gptqmodel's AVX-512 kernel needs a multiple of 32 outputs, not {}",
            part.module, part.n
        )),
        (_, true) => With("gptqmodel's AVX-512 kernel does not support scales per channel".into()),
        _ => Yes,
    }
}

pub(super) fn transformers(outline: &Outline, ranks: usize) -> Compatibility {
    let weights = transformers_weights(outline, ranks);
    if !outline.fp8_cache || matches!(weights, No(_)) {
        return weights;
    }
    let heads: BTreeSet<_> =
        outline.attentions.iter().map(|shape| (shape.kv_heads, shape.repeat, shape.head_dim)).collect();
    if heads.len() > 1 {
        return No("it does not load FP8 cache scales if the attention heads differ between blocks".into());
    }
    let mut parts = outline.layers.iter().flat_map(|layer| &layer.parts);
    match parts.any(|part| part.module.contains(".query_key_value")) {
        true => With("it ignores FP8 cache scales of attention modules that are not called self_attn".into()),
        false => weights,
    }
}

fn transformers_weights(outline: &Outline, _ranks: usize) -> Compatibility {
    if outline.embedding.is_some() {
        return No(EMBEDDING.into());
    }
    let schemes = all_schemes(outline);
    if schemes.iter().any(|s| s.fixed_scales().is_some()) {
        return With("it loads in BF16 (dtype=torch.bfloat16), but not in F32".into());
    }
    if schemes.iter().any(|s| s.activations != ActivationScheme::Float)
        && schemes.iter().all(|s| s.is_symmetric())
    {
        return With("activations are quantized, but multiplied as floats".into());
    }
    if schemes.iter().all(|s| s.is_symmetric()) {
        return Yes;
    }
    match schemes.len() {
        1 => With("asymmetric grids need CompressedTensorsConfig(dequantize=True)".into()),
        _ => No(
            "it applies one scheme to all linears if any scheme is asymmetric, but here the schemes differ"
                .into(),
        ),
    }
}

pub(super) fn turbomind(outline: &Outline, ranks: usize) -> Compatibility {
    turbomind_with(outline, ranks, &[32, 128], |_| Yes)
}

pub(super) fn turbomind_awq(outline: &Outline, ranks: usize) -> Compatibility {
    turbomind_with(outline, ranks, &[128], |_| Yes)
}

pub(super) fn turbomind_gptq(outline: &Outline, ranks: usize) -> Compatibility {
    turbomind_with(outline, ranks, &[128], |scheme| match scheme.is_symmetric() {
        true => Yes,
        false => No("it supports only symmetric grids in the gptq format".into()),
    })
}

/// Supports the group sizes in `known`; `grid` checks the zero points.
fn turbomind_with(
    outline: &Outline,
    ranks: usize,
    known: &[usize],
    grid: fn(&LinearScheme) -> Compatibility,
) -> Compatibility {
    if outline.embedding.is_some() {
        return No("it does not support a quantized embedding".into());
    }
    let schemes = outline.schemes();
    let [scheme] = schemes[..] else { return No("it supports only one scheme per checkpoint".into()) };
    if scheme.activations != ActivationScheme::Float {
        return No(format!("it does not support {scheme} in this format"));
    }
    if scheme.float_format().is_some() {
        return Unsure(format!("whether it supports {scheme} in this format was not checked"));
    }
    if outline.head.is_some() {
        return Unsure("whether it supports a quantized head was not checked".into());
    }
    if let Some((one, other)) = outline.layers.iter().find_map(|layer| layer.scheme().err()) {
        return Unsure(format!(
            "`{one}` and `{other}` are fused into one linear, but have different schemes"
        ));
    }
    if let Some(shape) = outline.attentions.iter().find(|shape| !shape.heads().is_multiple_of(ranks)) {
        return No(format!("{} heads cannot be split across {ranks} ranks", shape.heads()));
    }
    let group = match scheme.granularity {
        Granularity::Group(size) => size,
        _ => return No("it does not support scales per channel".into()),
    };
    if let refused @ No(_) = grid(&scheme) {
        return refused;
    }
    if scheme.bits() != 4 || !known.contains(&group) {
        return No(format!("it supports only 4-bit weights with group sizes {known:?}, not {scheme}"));
    }
    let output =
        outline.layers.iter().find(|l| l.kind == LayerKind::Row && !(l.k / group).is_multiple_of(ranks));
    match output {
        Some(layer) => Unsure(format!(
            "`{}`: whether {} can be split across {ranks} ranks was not checked",
            layer.parts.first().map_or("", |p| &p.module),
            counted(layer.k / group, "group")
        )),
        None => Yes,
    }
}

pub(super) fn mlx(outline: &Outline, _ranks: usize) -> Compatibility {
    match outline.schemes()[..] {
        [LinearScheme { granularity: Granularity::Group(32 | 64 | 128), .. }] => Yes,
        _ => No("it supports only one scheme per checkpoint, with groups of 32, 64 or 128".into()),
    }
}

/// The operator that multiplies by packed weights needs groups whose size is a power of two. The model builder looks for
/// codes of every linear.
pub(super) fn ort_genai(outline: &Outline, _ranks: usize) -> Compatibility {
    if let Some(part) = outline.layers.iter().flat_map(|l| &l.parts).find(|part| part.scheme.is_none()) {
        return No(format!("`{}` is float, but its model builder needs codes of every linear", part.module));
    }
    let loads = |scheme: &LinearScheme| match scheme.granularity {
        Granularity::Group(size) => {
            size >= 16 && size.is_power_of_two() && matches!(scheme.bits(), 2 | 4 | 8)
        }
        _ => false,
    };
    match &outline.schemes()[..] {
        [scheme] if loads(scheme) => With(
            "its model builder rounds a float head to 4 bits, unless nodes_to_exclude names it; on a CPU, it rounds \
             activations to 8 bits"
                .into(),
        ),
        _ => No("it supports only one scheme per checkpoint, with 2, 4 or 8 bits, and groups whose size is a power of \
                 two and at least 16"
            .into()),
    }
}

/// llama.cpp's converter reads FP8 with scales per row or block, and NVFP4 if the number of inputs is a multiple of 64.
fn llama_cpp_floats(outline: &Outline, scheme: LinearScheme) -> Compatibility {
    match (scheme.fixed_scales(), scheme.granularity) {
        (None, Granularity::Channel | Granularity::Block) => Yes,
        (Some(ScaleFormat::E4m3), _) => match outline.layers.iter().find(|l| !l.k.is_multiple_of(64)) {
            None => Yes,
            Some(layer) => No(format!(
                "`{}`: {} inputs are not a multiple of its block size, 64",
                layer.parts.first().map_or("", |part| &part.module),
                layer.k
            )),
        },
        _ => No(format!("it does not support {scheme}")),
    }
}

/// Rules for the compressed-tensors and ModelOpt formats. With 8-bit activations, the converter reads the weights and
/// leaves activations float; it does not support static scales.
pub(super) fn llama_cpp(outline: &Outline, _ranks: usize) -> Compatibility {
    llama_cpp_with(outline, |_| false)
}

pub(super) fn llama_cpp_gptq(outline: &Outline, _ranks: usize) -> Compatibility {
    llama_cpp_with(outline, |scheme| matches!(scheme.bits(), 2 | 4 | 8))
}

/// `takes` returns whether a scheme is supported in this format. Some schemes are supported in all formats.
fn llama_cpp_with(outline: &Outline, takes: fn(&LinearScheme) -> bool) -> Compatibility {
    let schemes = all_schemes(outline);
    // It reads the input scale of NVFP4 only.
    if schemes.iter().any(|s| s.has_static_activations() && !s.has_global_scale()) {
        return No("it does not support static activation scales".into());
    }
    let is_one = outline.head.is_none() && outline.embedding.is_none();
    let verdict = match schemes[..] {
        [scheme] if takes(&scheme) => Yes,
        [scheme] if is_one && scheme.float_format().is_some() => llama_cpp_floats(outline, scheme),
        [scheme] if is_one && scheme.is_stored_as_bytes() => Yes,
        [scheme @ LinearScheme { granularity: Granularity::Group(_), .. }]
            if is_one && matches!(scheme.bits(), 2 | 4 | 8) =>
        {
            Yes
        }
        [LinearScheme { granularity: Granularity::Channel, .. }] => No(
            "it does not support scales per channel with this scheme, or with a quantized head or embedding"
                .into(),
        ),
        [scheme] => {
            No(format!("it does not support {scheme}, or does not support a quantized head or embedding"))
        }
        _ => No("it supports only one scheme per checkpoint".into()),
    };
    let rounds_activations = schemes.iter().any(|s| s.activations != ActivationScheme::Float);
    // Only NVFP4 codes are kept.
    let loses_codes = schemes.iter().any(|s| !s.has_global_scale());
    match (verdict, loses_codes, rounds_activations) {
        (Yes, true, true) => With("it dequantizes the weights, and leaves activations float".into()),
        (Yes, true, false) => {
            With("it dequantizes the weights, so the file is as large as the float model".into())
        }
        (Yes, false, true) => With("it leaves activations float".into()),
        (verdict, ..) => verdict,
    }
}
