//! The limitations of loaders of compressed-tensors checkpoints.

use std::collections::BTreeSet;

use super::layout::Storage;
use crate::format::ModuleSchemes;
use crate::format::loaders::{COMPRESSED_TENSORS, LLAMA_CPP, LoaderRule, SGLANG, TRANSFORMERS, VLLM};
use crate::scheme::{ActivationScheme, FloatFormat, Granularity, LinearScheme, ScaleFormat};

/// In the order in which their notes are printed.
pub(super) static RULES: &[LoaderRule] = &[
    LoaderRule::new(
        &[COMPRESSED_TENSORS, TRANSFORMERS],
        |schemes| any(schemes, |s| !s.is_symmetric()),
        "with compressed-tensors 0.18 to 0.20, transformers loads asymmetric weights only with \
        CompressedTensorsConfig(dequantize=True)",
    ),
    LoaderRule::new(
        &[SGLANG],
        |schemes| {
            any(schemes, |s| {
                is_fp8(s) && s.activations == ActivationScheme::Float && s.granularity == Granularity::Block
            })
        },
        "SGLang 0.5 supports FP8 weights with float activations only with one scale per tensor or row",
    ),
    LoaderRule::new(
        &[VLLM, SGLANG],
        |schemes| any(schemes, |s| is_fp8(s) && s.activations != ActivationScheme::Float),
        "in vLLM 0.33 and SGLang 0.5, FP8 activations require an NVIDIA GPU of compute capability 8.9 or later; on \
        older GPUs, activations stay float",
    ),
    LoaderRule::new(
        &[LLAMA_CPP],
        |schemes| any(schemes, |s| s.granularity == Granularity::Tensor),
        "llama.cpp's converter supports FP8 with one scale per row or block, not per tensor",
    ),
    LoaderRule::new(
        &[VLLM, SGLANG],
        |schemes| any(schemes, |s| s.activations == ActivationScheme::Nvfp4),
        "in vLLM 0.33 and SGLang 0.5, FP4 activations require an NVIDIA GPU of compute capability 10.0 or later; on \
        older GPUs, activations stay float",
    ),
    LoaderRule::new(
        &[TRANSFORMERS],
        |schemes| any(schemes, |s| s.has_global_scale()),
        "transformers 5.23 loads NVFP4 in BF16 (dtype=torch.bfloat16), but not in F32",
    ),
    LoaderRule::new(
        &[TRANSFORMERS, LLAMA_CPP],
        |schemes| any(schemes, |s| s.fixed_scales() == Some(ScaleFormat::E8m0)),
        "transformers 5.23 loads the MX formats in BF16 (dtype=torch.bfloat16) or with \
        CompressedTensorsConfig(dequantize=True); llama.cpp's converter does not support them",
    ),
    LoaderRule::new(
        &[VLLM, SGLANG],
        |schemes| any(schemes, |s| Storage::of(s) == Storage::Mxfp4),
        "on GPUs of compute capability 10.0 or later, vLLM 0.33 runs MXFP4 with FP4 activations, even if the \
        checkpoint specifies float activations; SGLang 0.5 supports MXFP4 for experts only",
    ),
    LoaderRule::new(
        &[VLLM, SGLANG],
        |schemes| any(schemes, |s| Storage::of(s) == Storage::Mxfp8),
        "on GPUs of compute capability 10.0 or later, vLLM 0.33 runs MXFP8 with MXFP8 activations, even if the \
        checkpoint specifies float activations; on older GPUs, activations stay float; SGLang 0.5 does not support \
        MXFP8 in this format",
    ),
    LoaderRule::new(
        &[VLLM],
        |schemes| any(schemes, |s| s.int_bits().is_some() && s.activations == ActivationScheme::Fp8Token),
        "vLLM 0.33 loads 4-bit integers with FP8 activations on GPUs of compute capability 9.0 only",
    ),
    LoaderRule::computed(&[LLAMA_CPP], ragged_blocks),
    LoaderRule::computed(&[TRANSFORMERS, COMPRESSED_TENSORS, VLLM, SGLANG, LLAMA_CPP], odd_widths)
        .refused_by(&[SGLANG, LLAMA_CPP]),
    LoaderRule::new(
        &[LLAMA_CPP],
        |schemes| {
            any(schemes, |s| s.granularity == Granularity::Channel && Storage::of(s) == Storage::Packed)
        },
        "llama.cpp's converter supports scales per group only, not per channel",
    ),
    LoaderRule::new(
        &[LLAMA_CPP],
        |schemes| any(schemes, |s| s.has_static_activations() && s.float_format().is_none()),
        "llama.cpp's converter does not support static activation scales",
    ),
    LoaderRule::new(
        &[LLAMA_CPP],
        |schemes| {
            schemes
                .quantized
                .iter()
                .any(|(_, scheme)| Some(scheme) != schemes.quantized.first().map(|(_, s)| s))
        },
        "llama.cpp's converter does not support checkpoints with several schemes",
    ),
    LoaderRule::new(
        &[VLLM],
        |schemes| schemes.fp8_cache,
        "vLLM 0.33 caches keys and values in FP8 and uses these scales only if it is started with --kv-cache-dtype \
        fp8",
    ),
    LoaderRule::new(
        &[TRANSFORMERS],
        |schemes| {
            schemes.fp8_cache
                && schemes.quantized.iter().any(|(module, _)| module.contains(".query_key_value"))
        },
        "transformers 5.23 ignores FP8 cache scales of attention modules that are not called `self_attn`",
    ),
    LoaderRule::new(
        &[LLAMA_CPP],
        |schemes| schemes.fp8_cache && any(schemes, |s| !s.has_global_scale()),
        "llama.cpp's converter rejects FP8 cache scales unless the weights are NVFP4",
    ),
];

fn any(schemes: &ModuleSchemes<'_>, test: fn(LinearScheme) -> bool) -> bool {
    schemes.quantized.iter().any(|(_, scheme)| test(*scheme))
}

fn is_fp8(scheme: LinearScheme) -> bool {
    scheme.float_format() == Some(FloatFormat::E4m3) && scheme.fixed_scales().is_none()
}

fn ragged_blocks(schemes: &ModuleSchemes<'_>) -> Vec<String> {
    let inputs = |module: &str| schemes.shapes.get(module).map(|[_, k]| *k);
    let mut blocks = schemes.quantized.iter().filter(|(_, scheme)| scheme.has_global_scale());
    let ragged =
        blocks.find_map(|(module, _)| Some((module, inputs(module)?)).filter(|(_, k)| !k.is_multiple_of(64)));
    match ragged {
        Some((module, k)) => vec![format!(
            "llama.cpp stores NVFP4 in blocks of 64 inputs, but `{module}` has {k} inputs, which is not a multiple of \
            64"
        )],
        None => Vec::new(),
    }
}

fn odd_widths(schemes: &ModuleSchemes<'_>) -> Vec<String> {
    let bits: BTreeSet<u8> = schemes.quantized.iter().map(|(_, scheme)| scheme.bits()).collect();
    let odd = bits.into_iter().filter(|bits| !bits.is_power_of_two());
    odd.map(|bits| {
        format!(
            "{bits}-bit weights load in transformers with compressed-tensors 0.18 or later, and in vLLM 0.33 on CUDA; \
            SGLang and llama.cpp's converter do not support them"
        )
    })
    .collect()
}
