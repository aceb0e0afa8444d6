//! SGLang: Marlin kernels without padding, with a slow fallback for the AWQ format.

use super::Compatibility::{self, No, Unsure, With, Yes};
use super::experts::one_scheme;
use super::outline::Outline;
use super::sharding::{Share, linears};
use crate::scheme::{ActivationScheme, FloatFormat, Granularity, ScaleFormat};

/// The rules assume NVIDIA devices of compute capability 8.0 or later.
pub(super) fn cuda(outline: &Outline, ranks: usize) -> Compatibility {
    cuda_with(outline, ranks, compressed_tensors)
}

pub(super) fn cuda_awq(outline: &Outline, ranks: usize) -> Compatibility {
    cuda_with(outline, ranks, awq)
}

pub(super) fn cuda_gptq(outline: &Outline, ranks: usize) -> Compatibility {
    cuda_with(outline, ranks, gptq)
}

fn cuda_with(outline: &Outline, ranks: usize, kernel: fn(&Share<'_>) -> Compatibility) -> Compatibility {
    if outline.embedding.is_some() {
        return No("it does not support a quantized embedding, and leaves it uninitialized".into());
    }
    linears(outline, ranks, kernel)
}

/// SGLang's OPT renames `self_attn.out_proj` to `o_proj` and omits `decoder` from the names of blocks, so it ignores
/// settings for single modules.
pub(super) fn opt(outline: &Outline) -> Compatibility {
    if outline.head.is_some() {
        return No("its OPT class does not support a quantized head".into());
    }
    uniform(outline, |module| format!("its OPT uses a different name for `{module}`"))
}

/// Classes in which some linears have no names, so that settings for single linears do not reach them.
pub(super) fn unnamed(outline: &Outline) -> Compatibility {
    uniform(outline, |module| format!("its class has no name for `{module}`"))
}

/// SGLang fuses the linears that compute latents while loading, and splits `kv_b_proj` into float matrices, which it
/// supports for few layouts only.
pub(super) fn latent(outline: &Outline) -> Compatibility {
    let is_packed = |name: &str| {
        let parts = outline.layers.iter().flat_map(|layer| &layer.parts);
        let of_name = parts.filter(|part| part.module.ends_with(name));
        of_name.filter_map(|part| part.scheme).any(|scheme| !scheme.is_stored_as_bytes())
    };
    if is_packed(".kv_b_proj") {
        return No(
            "its latent attention does not support a packed `kv_b_proj`, which must stay float: ignore it"
                .into(),
        );
    }
    match is_packed(".q_a_proj") {
        true => {
            Unsure("whether it can fuse packed `q_a_proj` and `kv_a_proj_with_mqa` was not checked".into())
        }
        false => Yes,
    }
}

pub(super) fn latent_gptq(_: &Outline) -> Compatibility {
    Unsure("whether its latent attention supports `kv_b_proj` in the gptq format was not checked".into())
}

/// If all linears have the same scheme, the setting for the class `Linear` applies. How settings for single linears
/// reach modules with different names was not checked.
pub(super) fn container(outline: &Outline) -> Compatibility {
    match uniform(outline, str::to_owned) {
        No(_) => Unsure(
            "whether it applies schemes of single linears was not checked: its module names differ from the \
            tensor names"
                .into(),
        ),
        other => other,
    }
}

/// Experts run on Marlin or Triton, with the scheme of the first expert.
pub(super) fn experts(outline: &Outline) -> Compatibility {
    one_scheme(outline, |scheme| match scheme.activations {
        ActivationScheme::Float if scheme.float_format().is_none() => Yes,
        ActivationScheme::Token if scheme.float_format().is_none() => {
            No(format!("it supports experts in {scheme} only on Ascend devices"))
        }
        _ => Unsure(format!("how it runs experts in {scheme} was not checked")),
    })
}

pub(super) fn experts_of_others(outline: &Outline) -> Compatibility {
    one_scheme(outline, |_| {
        Unsure(format!("how it runs experts in the {} format was not checked", outline.container))
    })
}

/// Checks that all linears have the same scheme, because the class ignores settings for single linears.
/// `cause` describes the class's names for a linear.
fn uniform(outline: &Outline, cause: impl Fn(&str) -> String) -> Compatibility {
    let mut parts = outline.layers.iter().flat_map(|layer| &layer.parts);
    let first = parts.next().and_then(|part| part.scheme);
    match parts.find(|part| part.scheme != first) {
        None => Yes,
        Some(part) => No(format!("{}, so it ignores the schemes of single linears", cause(&part.module))),
    }
}

fn is_marlin_group(share: &Share<'_>) -> bool {
    matches!(share.group(), None | Some(32 | 64 | 128))
}

fn float_kernel(share: &Share<'_>, format: FloatFormat) -> Compatibility {
    let rounds = share.scheme.activations != ActivationScheme::Float;
    match (format, share.scheme.fixed_scales()) {
        (_, Some(ScaleFormat::E4m3)) if rounds => With(
            "FP4 activations require compute capability 10.0 or later; on older GPUs they stay float".into(),
        ),
        (_, Some(ScaleFormat::E4m3)) => Yes,
        (FloatFormat::E2m1, Some(ScaleFormat::E8m0)) => No(share.fault("it supports MXFP4 for experts only")),
        (_, None) if rounds => With(
            "FP8 activations require compute capability 8.9 or later; on older GPUs they stay float".into(),
        ),
        (_, None) if share.scheme.granularity == Granularity::Block => No(share
            .fault("it supports FP8 weights with float activations only with one scale per tensor or row")),
        (_, None) => Yes,
        (_, Some(_)) => No(share.fault(format!("it has no kernel for {} in this format", share.scheme))),
    }
}

fn compressed_tensors(share: &Share<'_>) -> Compatibility {
    let scheme = share.scheme;
    let (n, k) = (share.n(), share.k);
    if let Some(format) = scheme.float_format() {
        return float_kernel(share, format);
    }
    match scheme.activations {
        ActivationScheme::Float => {}
        ActivationScheme::Token if scheme.is_stored_as_bytes() => {
            return match n.is_multiple_of(16) && k.is_multiple_of(16) {
                true => Yes,
                false => {
                    Unsure(share.fault(format!(
                        "whether its int8 kernel supports {n} × {k} per rank was not checked"
                    )))
                }
            };
        }
        ActivationScheme::Fp8Token => {
            return No(share.fault("it supports 4-bit integers with FP8 activations for experts only"));
        }
        _ => return Unsure(share.fault(format!("whether it supports {scheme} was not checked"))),
    }
    if !matches!(scheme.bits(), 4 | 8) {
        return No(share.fault(format!("{} bits are not supported", scheme.bits())));
    }
    if scheme.bits() == 8 && !scheme.is_symmetric() {
        return No(share.fault("no kernel for 8-bit weights with zero points"));
    }
    if !is_marlin_group(share) {
        return No(share.fault(format!(
            "no kernel for {scheme}; scales must be per channel or in groups of 32, 64 or 128"
        )));
    }
    let tiled =
        (n.is_multiple_of(64) && k.is_multiple_of(128)) || (n.is_multiple_of(128) && k.is_multiple_of(64));
    match tiled {
        true => Yes,
        false => No(share
            .fault(format!("{n} × {k} per rank does not fit Marlin's tiles, and SGLang does not pad it"))),
    }
}

fn gptq(share: &Share<'_>) -> Compatibility {
    if share.scheme.is_symmetric() && matches!(share.scheme.bits(), 4 | 8) {
        return compressed_tensors(share);
    }
    Unsure(share.fault(format!(
        "{} runs on a slow kernel, in F16 only; whether it handles a zero point of 0 correctly was not checked",
        share.scheme
    )))
}

fn awq(share: &Share<'_>) -> Compatibility {
    let (n, k) = (share.n(), share.k);
    match is_marlin_group(share) && n.is_multiple_of(64) && k.is_multiple_of(128) {
        true => Yes,
        false => With(share.fault(format!(
            "with {n} × {k} per rank in {}, weights are dequantized before every product, which is slow",
            share.scheme
        ))),
    }
}
