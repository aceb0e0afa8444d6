//! SGLang: Marlin kernels without padding; for the AWQ container a slow path beside them.

use super::Verdict::{self, No, Unsure, With, Yes};
use super::outline::Outline;
use super::sharding::{Share, linears};
use crate::scheme::{ActivationScheme, FloatFormat, ScaleFormat};

/// On NVIDIA devices of compute capability 8.0 or later.
pub(super) fn cuda(outline: &Outline, ranks: usize) -> Verdict {
    if outline.embedding.is_some() {
        return No("a quantized embedding is not read, and stays as it was initialized".into());
    }
    linears(outline, ranks, |share| match outline.container {
        "awq" => awq(share),
        "gptq" => gptq(share),
        _ => compressed_tensors(share),
    })
}

/// Its OPT calls `self_attn.out_proj` `o_proj`, and leaves `decoder` out of the names of blocks: nothing
/// that a checkpoint says of single modules is found.
pub(super) fn opt(outline: &Outline) -> Verdict {
    if outline.head.is_some() {
        return No("the head of its OPT has no quantization".into());
    }
    uniform(outline, "OPT")
}

/// Classes some of whose linears have no names.
pub(super) fn unnamed(outline: &Outline) -> Verdict {
    uniform(outline, "class")
}

/// What is said of single linears is not found in its class.
fn uniform(outline: &Outline, class: &str) -> Verdict {
    let mut parts = outline.layers.iter().flat_map(|layer| &layer.parts);
    let first = parts.next().and_then(|part| part.scheme);
    match parts.find(|part| part.scheme != first) {
        None => Yes,
        Some(part) => No(format!(
            "`{}` is another in its {class}: what is said of single linears, float or of another scheme, is lost",
            part.module
        )),
    }
}

fn is_marlin_group(share: &Share<'_>) -> bool {
    matches!(share.group(), None | Some(32 | 64 | 128))
}

/// Floating-point weights: their own products on recent devices, and float activations on Marlin on others.
fn float_kernel(share: &Share<'_>, format: FloatFormat) -> Verdict {
    let rounds = share.scheme.activations != ActivationScheme::Float;
    match (format, share.scheme.fixed_scales()) {
        (_, Some(ScaleFormat::E4m3)) if rounds => {
            With("FP4 products need compute capability 10.0; before, activations stay float".into())
        }
        (FloatFormat::E2m1, Some(ScaleFormat::E8m0)) => No(share.fault("it reads MXFP4 for experts only")),
        (_, None) if rounds => {
            With("FP8 products need compute capability 8.9; before, activations stay float".into())
        }
        (_, None) => Unsure(share.fault(
            "whether this version takes FP8 weights with float activations; earlier ones run them on Marlin",
        )),
        _ => Unsure(share.fault(format!("whether it reads {}", share.scheme))),
    }
}

fn compressed_tensors(share: &Share<'_>) -> Verdict {
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
                    Unsure(share.fault(format!("{n} × {k} a rank: whether its product of bytes takes these")))
                }
            };
        }
        ActivationScheme::Fp8Token => {
            return No(share.fault("it reads 4-bit integers under FP8 activations for experts only"));
        }
        _ => return Unsure(share.fault(format!("whether it reads {scheme}"))),
    }
    if !matches!(scheme.bits(), 4 | 8) {
        return No(share.fault(format!("{} bits are not supported", scheme.bits())));
    }
    if scheme.bits() == 8 && !scheme.is_symmetric() {
        return No(share.fault("no kernel for 8 bits with zeros"));
    }
    if !is_marlin_group(share) {
        return No(share.fault(format!("no kernel for {scheme}: groups of 32, 64, 128 or channels")));
    }
    let tiled =
        (n.is_multiple_of(64) && k.is_multiple_of(128)) || (n.is_multiple_of(128) && k.is_multiple_of(64));
    match tiled {
        true => Yes,
        false => {
            No(share.fault(format!("{n} × {k} a rank fits none of Marlin's tiles, and nothing pads it")))
        }
    }
}

fn gptq(share: &Share<'_>) -> Verdict {
    if share.scheme.is_symmetric() && matches!(share.scheme.bits(), 4 | 8) {
        return compressed_tensors(share);
    }
    Unsure(share.fault(format!(
        "{} runs on a slow kernel, in F16 only, and what that makes of a zero of 0 was not seen",
        share.scheme
    )))
}

fn awq(share: &Share<'_>) -> Verdict {
    let (n, k) = (share.n(), share.k);
    match is_marlin_group(share) && n.is_multiple_of(64) && k.is_multiple_of(128) {
        true => Yes,
        false => With(share.fault(format!(
            "{n} × {k} a rank in {}: dequantized before every product, slower",
            share.scheme
        ))),
    }
}
