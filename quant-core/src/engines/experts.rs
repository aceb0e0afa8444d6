//! Rules for experts: engines have separate kernels for experts, and most loaders keep all experts of a block in one
//! parameter.

use super::Verdict::{self, No, Unsure, Yes};
use super::outline::Outline;
use crate::scheme::{ActivationScheme, LinearScheme};

/// An engine whose kernels for experts were not checked.
pub(super) fn not_followed(_outline: &Outline) -> Verdict {
    Unsure("which shapes and schemes its kernels for experts support".into())
}

/// vLLM on a CPU. Version 0.32.0 ran float experts only.
pub(super) fn vllm_cpu(outline: &Outline) -> Verdict {
    let is_packed = |scheme: &&LinearScheme| {
        scheme.activations == ActivationScheme::Float && scheme.float_format().is_none()
    };
    match outline.experts.iter().flatten().find(is_packed) {
        Some(scheme) => No(format!("its CPU backend does not run experts of {scheme}")),
        None if outline.experts.iter().all(Option::is_none) => Yes,
        None => not_followed(outline),
    }
}

const FLOAT_EXPERTS: &str = "it does not load float experts among quantized linears";

/// Loaders of transformers that do not support experts.
pub(super) fn transformers_others(outline: &Outline) -> Verdict {
    match outline.experts.iter().all(Option::is_none) {
        true => No(FLOAT_EXPERTS.into()),
        false => No(format!("its loader for the {} format does not support experts", outline.container)),
    }
}

/// transformers, which keeps the experts of a block in one parameter and applies one scheme to all experts.
pub(super) fn transformers(outline: &Outline) -> Verdict {
    let schemes: Vec<_> = outline.experts.iter().collect();
    match schemes[..] {
        [None] => No(FLOAT_EXPERTS.into()),
        [Some(scheme)] if scheme.is_symmetric() => Yes,
        [Some(_)] => No("it supports symmetric schemes only for experts".into()),
        _ => {
            No("it applies one scheme to all experts, which gives wrong results if their schemes differ"
                .into())
        }
    }
}
