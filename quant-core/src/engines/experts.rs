//! Experts: engines run all of a block on kernels of their own, and most readers hold them in one parameter.

use super::Verdict::{self, No, Unsure, Yes};
use super::outline::Outline;
use crate::scheme::{ActivationScheme, LinearScheme};

/// An engine whose kernels for experts were not followed.
pub(super) fn not_followed(_outline: &Outline) -> Verdict {
    Unsure("experts run on kernels whose rules were not followed".into())
}

/// vLLM on a CPU, whose version 0.32.0 has run those alone that stay float.
pub(super) fn vllm_cpu(outline: &Outline) -> Verdict {
    let is_packed = |scheme: &&LinearScheme| {
        scheme.activations == ActivationScheme::Float && scheme.float_format().is_none()
    };
    match outline.experts.iter().flatten().find(is_packed) {
        Some(scheme) => No(format!("its CPU backend runs no experts of {scheme}")),
        None if outline.experts.iter().all(Option::is_none) => Yes,
        None => not_followed(outline),
    }
}

const FLOAT_EXPERTS: &str = "it does not load float experts among quantized linears";

/// Readers of transformers that have no experts.
pub(super) fn transformers_others(outline: &Outline) -> Verdict {
    match outline.experts.iter().all(Option::is_none) {
        true => No(FLOAT_EXPERTS.into()),
        false => No(format!("its readers of the {} format know no experts", outline.container)),
    }
}

/// transformers, which holds the experts of a block in one parameter and reads all of them by one scheme.
pub(super) fn transformers(outline: &Outline) -> Verdict {
    let schemes: Vec<_> = outline.experts.iter().collect();
    match schemes[..] {
        [None] => No(FLOAT_EXPERTS.into()),
        [Some(scheme)] if scheme.is_symmetric() => Yes,
        [Some(_)] => No("it reads experts on symmetric grids only".into()),
        _ => No("it reads all experts by one scheme, and computes something else with several".into()),
    }
}
