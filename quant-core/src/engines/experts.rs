//! Rules for experts: engines have separate kernels for experts, and most loaders keep all experts of a block in one
//! parameter.

use super::Compatibility::{self, No, Unsure, With, Yes};
use super::outline::Outline;
use super::sharding::Share;
use crate::scheme::{ActivationScheme, FloatFormat, Granularity, LinearScheme, ScaleFormat};

pub(super) fn not_followed(_outline: &Outline) -> Compatibility {
    Unsure("which shapes and schemes its expert kernels support was not checked".into())
}

/// Engines that apply the scheme of a block's first expert to all its experts: `rules` judges the scheme. Float experts
/// are supported.
pub(super) fn one_scheme(
    outline: &Outline,
    rules: impl FnOnce(LinearScheme) -> Compatibility,
) -> Compatibility {
    let schemes: Vec<_> = outline.experts.iter().collect();
    let [one] = schemes[..] else {
        return Unsure(
            "it applies the scheme of a block's first expert to all experts of the block, but the experts of this \
            model have different schemes; the effect was not checked"
                .into(),
        );
    };
    one.map_or(Yes, rules)
}

/// [`vllm_kernel`] judges the shapes.
pub(super) fn vllm_cuda(outline: &Outline) -> Compatibility {
    one_scheme(outline, |_| Yes)
}

pub(super) fn vllm_cuda_gptq(outline: &Outline) -> Compatibility {
    one_scheme(outline, |scheme| match scheme.is_symmetric() {
        true => Yes,
        false => No(format!("in the gptq format it supports only symmetric experts, not {scheme}")),
    })
}

/// Rules for the compressed-tensors and ModelOpt formats. `width` is the hidden size, which experts read and write.
pub(super) fn vllm_kernel(share: &Share<'_>, width: usize) -> Compatibility {
    let scheme = share.scheme;
    let no = |what: String| No(share.fault(format!("experts {what}")));
    if let Some(format) = scheme.float_format() {
        return vllm_float_kernel(share, format);
    }
    match scheme.activations {
        ActivationScheme::Float => vllm_packed(share, width),
        ActivationScheme::Token if scheme.bits() == 8 => match (scheme.granularity, scheme.is_symmetric()) {
            (Granularity::Channel, true) => With("int8 experts run on Triton kernels".into()),
            _ => no(format!("of {scheme} have no kernel: scales must be symmetric and per channel")),
        },
        ActivationScheme::Token => no(format!("of {scheme} run on CPUs only")),
        ActivationScheme::Fp8Token => {
            let inner = if share.k == width { share.n() } else { share.k };
            match (share.group(), width.is_multiple_of(256) && inner.is_multiple_of(256)) {
                (Some(128), true) => {
                    With("4-bit experts with FP8 activations need compute capability 9.0".into())
                }
                (Some(128), false) => {
                    no(format!("of {scheme} need widths in multiples of 256, not {width} and {inner}"))
                }
                _ => no(format!("of {scheme} have no kernel: groups must have 128 inputs")),
            }
        }
        _ => no(format!("of {scheme} have no kernel: activation scales must be dynamic, per token")),
    }
}

/// vLLM runs integer experts with float activations on Marlin, or on Triton for shapes and group sizes that Marlin
/// cannot run.
fn vllm_packed(share: &Share<'_>, width: usize) -> Compatibility {
    let (scheme, bits) = (share.scheme, share.scheme.bits());
    if !matches!(bits, 4 | 8) {
        return Unsure(share.fault(format!("which kernel runs experts of {bits} bits was not checked")));
    }
    if bits == 8 && !scheme.is_symmetric() {
        return Unsure(share.fault("which kernel runs 8-bit experts with zero points was not checked"));
    }
    match share.group() {
        None | Some(32 | 64 | 128) if width.is_multiple_of(128) => Yes,
        None => No(share.fault(format!(
            "Marlin needs a hidden size that is a multiple of 128, not {width}, and no other kernel runs experts with \
            scales per channel"
        ))),
        Some(_) => With(share.fault(format!("experts of {scheme} run on Triton, which is slower than Marlin"))),
    }
}

fn vllm_float_kernel(share: &Share<'_>, format: FloatFormat) -> Compatibility {
    let scheme = share.scheme;
    let rounds = scheme.activations != ActivationScheme::Float;
    match (format, scheme.fixed_scales()) {
        (_, Some(ScaleFormat::E4m3)) if rounds => With(
            "FP4 products of experts need compute capability 10.0; on older GPUs, activations stay float"
                .into(),
        ),
        (_, Some(_)) => Yes,
        (_, None) if !rounds => {
            No(share.fault(format!("experts of {scheme} have no kernel: activations must be FP8 too")))
        }
        (_, None) => match (scheme.granularity, scheme.activations) {
            (Granularity::Channel, ActivationScheme::Fp8Static) => No(share
                .fault("FP8 experts with scales per channel have no kernel for static activation scales")),
            _ => With(
                "FP8 products of experts need compute capability 8.9; on older GPUs, activations stay float"
                    .into(),
            ),
        },
    }
}

/// vLLM 0.32.0 ran float experts only.
pub(super) fn vllm_cpu(outline: &Outline) -> Compatibility {
    let is_packed = |scheme: &&LinearScheme| {
        scheme.activations == ActivationScheme::Float && scheme.float_format().is_none()
    };
    match outline.experts.iter().flatten().find(is_packed) {
        Some(scheme) => No(format!("its CPU backend does not support experts in {scheme}")),
        None if outline.experts.iter().all(Option::is_none) => Yes,
        None => not_followed(outline),
    }
}

const FLOAT_EXPERTS: &str = "it does not support float experts together with quantized linears";

pub(super) fn transformers_others(outline: &Outline) -> Compatibility {
    match outline.experts.iter().all(Option::is_none) {
        true => No(FLOAT_EXPERTS.into()),
        false => No(format!("its loader for the {} format does not support experts", outline.container)),
    }
}

/// transformers keeps the experts of a block in one parameter and applies one scheme to all experts.
pub(super) fn transformers(outline: &Outline) -> Compatibility {
    let schemes: Vec<_> = outline.experts.iter().collect();
    match schemes[..] {
        [None] => No(FLOAT_EXPERTS.into()),
        [Some(scheme)] if outline.scales_expert_inputs => transformers_separate(*scheme),
        [Some(scheme)] => transformers_scheme(*scheme),
        _ => No(
            "it applies one scheme to all experts, but here their schemes differ, which gives wrong results"
                .into(),
        ),
    }
}

/// transformers loads each expert as linears of its own if scores multiply the inputs of experts.
fn transformers_separate(scheme: LinearScheme) -> Compatibility {
    let plain = scheme.is_symmetric() && scheme.activations == ActivationScheme::Float;
    match scheme.fixed_scales() {
        None if plain => Yes,
        Some(ScaleFormat::E4m3) if plain => {
            With("it loads in BF16 (dtype=torch.bfloat16), but not in F32".into())
        }
        _ => Unsure("experts in this scheme were not checked for this family".into()),
    }
}

/// transformers dequantizes experts while it loads, with the codes and scales of the weights only.
fn transformers_scheme(scheme: LinearScheme) -> Compatibility {
    let is_int = scheme.float_format().is_none();
    match (scheme.float_format(), scheme.fixed_scales()) {
        _ if !scheme.is_symmetric() => No("it supports only symmetric schemes for experts".into()),
        (_, Some(ScaleFormat::E4m3)) => {
            No("it ignores the global scale of experts in NVFP4, which gives wrong results".into())
        }
        (Some(FloatFormat::E4m3), Some(_)) => No(format!("it fails on the scales of experts in {scheme}")),
        _ if scheme.granularity == Granularity::Block || is_int && scheme.is_stored_as_bytes() => {
            No(format!("it fails on the scales of experts in {scheme}"))
        }
        _ if scheme.activations != ActivationScheme::Float => With("the inputs of experts stay float".into()),
        _ => Yes,
    }
}
