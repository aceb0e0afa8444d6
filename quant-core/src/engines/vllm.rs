//! vLLM: the kernel that runs each linear. vLLM tries its kernels in order and fails if none supports the linear. The
//! rules for CUDA assume compute capability 8.0 or later.

use super::Compatibility::{self, No, Unsure, With, Yes};
use super::experts;
use super::outline::Outline;
use super::sharding::{Share, linears};
use crate::scheme::{ActivationScheme, FloatFormat, Granularity, ScaleFormat};

/// Rules for the compressed-tensors and ModelOpt formats.
pub(super) fn cuda(outline: &Outline, ranks: usize) -> Compatibility {
    cuda_with(outline, ranks, cuda_packed)
}

/// Group sizes that Marlin does not support run on a separate kernel.
pub(super) fn cuda_awq(outline: &Outline, ranks: usize) -> Compatibility {
    cuda_with(outline, ranks, |share| {
        if is_marlin_group(share) {
            return cuda_packed(share);
        }
        let (n, group) = (share.n(), share.group().unwrap_or(0));
        match n.is_multiple_of(64) && group.is_multiple_of(32) && n.is_multiple_of(group) {
            true => With(share.fault(format!("groups of {group} run on the slow AWQ kernel, in F16 only"))),
            false => {
                No(share.fault(format!("no kernel supports groups of {group} with {n} outputs per rank")))
            }
        }
    })
}

/// vLLM supports the GPTQ format on Marlin only.
pub(super) fn cuda_gptq(outline: &Outline, ranks: usize) -> Compatibility {
    cuda_with(outline, ranks, |share| {
        let scheme = share.scheme;
        match is_marlin_group(share) && scheme.is_symmetric() && matches!(scheme.bits(), 4 | 8) {
            true => cuda_packed(share),
            false => No(share.fault(format!(
                "in the gptq format it supports only symmetric 4-bit and 8-bit weights, per channel or in \
                groups of 32, 64 or 128, not {scheme}"
            ))),
        }
    })
}

fn cuda_with(outline: &Outline, ranks: usize, packed: fn(&Share<'_>) -> Compatibility) -> Compatibility {
    let embedding = match outline.embedding {
        Some(scheme) if !scheme.is_symmetric() => No("a quantized embedding must be symmetric".into()),
        Some(scheme) if !matches!(scheme.bits(), 2 | 4 | 8) => {
            No(format!("a quantized embedding cannot have {} bits", scheme.bits()))
        }
        Some(scheme) if scheme.float_format().is_some() => {
            Unsure("whether it supports an embedding in a floating-point format was not checked".into())
        }
        _ => Yes,
    };
    embedding.and(linears(outline, ranks, |share| cuda_kernel(share, packed)))
}

/// Rules for the compressed-tensors and AWQ formats on x86-64.
pub(super) fn cpu(outline: &Outline, ranks: usize) -> Compatibility {
    outside_blocks(outline).and(linears(outline, ranks, cpu_kernel))
}

pub(super) fn cpu_gptq(outline: &Outline, ranks: usize) -> Compatibility {
    let grids = match outline.schemes().iter().find(|scheme| !scheme.is_symmetric()) {
        Some(scheme) => No(format!("it supports only symmetric grids in the gptq format, not {scheme}")),
        None => Yes,
    };
    outside_blocks(outline).and(grids).and(linears(outline, ranks, cpu_kernel))
}

fn outside_blocks(outline: &Outline) -> Compatibility {
    match (outline.embedding, outline.head) {
        (Some(_), _) => No("a quantized embedding needs a GPU".into()),
        (_, Some(head)) if head.bits() != 4 => {
            No(format!("no CPU kernel for a head of {} bits", head.bits()))
        }
        _ => Yes,
    }
}

fn is_marlin_group(share: &Share<'_>) -> bool {
    matches!(share.group(), None | Some(32 | 64 | 128))
}

/// 8-bit activations run on CUTLASS if weights are stored as bytes, and on a kernel compiled at startup if they are
/// packed.
fn cuda_int8_kernel(share: &Share<'_>) -> Compatibility {
    let (n, k) = (share.n(), share.k);
    if !share.scheme.is_stored_as_bytes() {
        return match share.scheme.has_static_activations() {
            true => No(share.fault("no kernel for packed weights with static activation scales")),
            false if !share.scheme.is_symmetric() => {
                No(share.fault("packed weights with 8-bit activations must be symmetric"))
            }
            false => {
                With(share.fault(format!("{} runs on a kernel that is compiled at startup", share.scheme)))
            }
        };
    }
    match n.is_multiple_of(16) && k.is_multiple_of(16) {
        true => With(
            "int8 activations require compute capability 7.5 to 9.0; 10.0 and later are not supported".into(),
        ),
        false => With(share.fault(format!(
            "{n} and {k} per rank are not both multiples of 16, so it runs on a slower kernel"
        ))),
    }
}

fn cuda_float_kernel(share: &Share<'_>, format: FloatFormat) -> Compatibility {
    let rounds = share.scheme.activations != ActivationScheme::Float;
    match (format, share.scheme.fixed_scales()) {
        (_, Some(ScaleFormat::E4m3)) if rounds => With(
            "FP4 activations require compute capability 10.0 or later; on older GPUs they stay float".into(),
        ),
        (_, Some(ScaleFormat::E4m3)) => Yes,
        (FloatFormat::E2m1, _) => With(
            "it quantizes activations to FP4 on compute capability 10.0 and later, although the checkpoint \
            has float activations; on older GPUs they stay float"
                .into(),
        ),
        (_, Some(_)) if rounds => With(
            "MXFP8 activations require compute capability 10.0 or later and FlashInfer; otherwise they stay float"
                .into(),
        ),
        (_, Some(_)) => With(
            "with FlashInfer, it quantizes activations to MXFP8 on compute capability 10.0 and later, although \
            the checkpoint has float activations; otherwise they stay float"
                .into(),
        ),
        (_, None) if rounds => With(
            "FP8 activations require compute capability 8.9 or later; on older GPUs they stay float".into(),
        ),
        (_, None) => Yes,
    }
}

/// `packed` is the format's rule for integer weights with float activations outside experts.
fn cuda_kernel(share: &Share<'_>, packed: fn(&Share<'_>) -> Compatibility) -> Compatibility {
    if let Some(width) = share.expert_width {
        return experts::vllm_kernel(share, width);
    }
    if let Some(format) = share.scheme.float_format() {
        return cuda_float_kernel(share, format);
    }
    if share.scheme.activations == ActivationScheme::Fp8Token {
        return With("4-bit integers with FP8 activations require compute capability 9.0".into());
    }
    if share.scheme.activations != ActivationScheme::Float {
        return cuda_int8_kernel(share);
    }
    packed(share)
}

fn cuda_packed(share: &Share<'_>) -> Compatibility {
    let (bits, symmetric, group) = (share.scheme.bits(), share.scheme.is_symmetric(), share.group());
    let (n, k) = (share.n(), share.k);
    if is_marlin_group(share) && (bits == 4 || (bits == 8 && symmetric)) {
        let tiled = (n.is_multiple_of(64) && k.is_multiple_of(128))
            || (n.is_multiple_of(128) && k.is_multiple_of(64));
        return match tiled {
            true => Yes,
            false => {
                With(share.fault(format!("{n} × {k} per rank is padded to Marlin's tiles, which is slow")))
            }
        };
    }
    match group {
        Some(group) if group < 16 => No(share.fault(format!("no kernel for groups of {group}"))),
        Some(group) if !group.is_power_of_two() => Unsure(share.fault(format!(
            "whether groups of {group}, which is not a power of two, are supported was not checked"
        ))),
        _ => With(share.fault(format!("{} runs on a kernel that is compiled at startup", share.scheme))),
    }
}

fn cpu_float_kernel(share: &Share<'_>, format: FloatFormat) -> Compatibility {
    let rounds = share.scheme.activations != ActivationScheme::Float;
    match (format, share.scheme.fixed_scales(), share.scheme.granularity) {
        (FloatFormat::E2m1, ..) => No(share.fault("no CPU kernel for FP4 weights")),
        (_, Some(_), _) => No(share.fault("no CPU kernel for MXFP8 weights")),
        _ if !rounds => No(share.fault("no CPU kernel for FP8 weights with float activations")),
        (.., Granularity::Block) if !share.n().is_multiple_of(32) => {
            No(share
                .fault(format!("the CPU kernel needs a multiple of 32 outputs per rank, not {}", share.n())))
        }
        (.., Granularity::Block) => With("its kernel requires a CPU with AMX".into()),
        // The CPU build declares the operation, but does not implement it.
        _ if share.scheme.activations == ActivationScheme::Fp8Static => {
            No(share.fault("its CPU build cannot quantize activations with a static scale"))
        }
        _ => With("its fast kernel requires a CPU with AMX; other CPUs use a slow fallback in torch".into()),
    }
}

fn cpu_kernel(share: &Share<'_>) -> Compatibility {
    let (n, k) = (share.n(), share.k);
    if let Some(format) = share.scheme.float_format() {
        return cpu_float_kernel(share, format);
    }
    match share.scheme.activations {
        ActivationScheme::Float => {}
        _ if share.scheme.is_stored_as_bytes() => return Yes,
        // Per-token 8-bit activations with symmetric 4-bit weights run on the same kernel as 4-bit weights with float
        // activations.
        ActivationScheme::Token if share.scheme.bits() == 4 && share.scheme.is_symmetric() => {}
        _ => return No(share.fault(format!("no CPU kernel for {}", share.scheme))),
    }
    if share.scheme.bits() != 4 {
        return No(share
            .fault(format!("the CPU kernel supports 4-bit weights only, not {}-bit", share.scheme.bits())));
    }
    if let Some(group) = share.group().filter(|g| !g.is_multiple_of(2)) {
        return No(share.fault(format!("the CPU kernel does not support groups of {group}")));
    }
    if !n.is_multiple_of(32) || !k.is_multiple_of(32) {
        return No(share.fault(format!("the CPU kernel needs multiples of 32, not {n} × {k} per rank")));
    }
    Yes
}
