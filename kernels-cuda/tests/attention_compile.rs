//! The kernels of attention compile for every architecture within their registers, without spilling, on tensor cores.
//! Needs NVRTC, no GPU.

use quant_kernels_cuda::attention::{self, KernelPlan};
use quant_kernels_cuda::compile::{Architecture, Form, compile};

mod support;

use support::has_nvrtc;

fn check(architecture: Architecture) {
    if !has_nvrtc() {
        return;
    }
    let mut wrong = Vec::new();
    for KernelPlan { variant, register_ceiling, .. } in attention::variants().unwrap() {
        let image = compile(&variant, architecture, Form::Cubin).unwrap();
        let usage = image.usage().unwrap();
        if usage.spill_stores + usage.spill_loads + usage.stack > 0 || usage.registers > register_ceiling {
            wrong.push(format!(
                "{variant} for {architecture}: {usage:?}, {register_ceiling} registers at most"
            ));
        }
        if image.log.contains("warning") {
            wrong.push(format!("{variant} for {architecture}: {}", image.log));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_variant_fits_sm_80() {
    check(Architecture::Sm80);
}

#[test]
fn every_variant_fits_sm_86() {
    check(Architecture::Sm86);
}

#[test]
fn every_variant_fits_sm_89() {
    check(Architecture::Sm89);
}

#[test]
fn every_variant_fits_sm_90() {
    check(Architecture::Sm90);
}

#[test]
fn every_variant_fits_sm_120() {
    check(Architecture::Sm120);
}

/// Per tile: a step for each 16 features of keys and a block of outputs for each 16 of values, and one for the sums of P.
#[test]
fn decoding_multiplies_on_tensor_cores() {
    if !has_nvrtc() {
        return;
    }
    for plan in attention::variants().unwrap() {
        let define =
            |name| plan.variant.defines.iter().find(|(n, _)| *n == name).map(|(_, value)| value.as_str());
        if plan.variant.kernel != "attention_decode" {
            continue;
        }
        let number = |name| define(name).unwrap().parse::<usize>().unwrap();
        let (steps, heads) = (number("HEAD_DIM").div_ceil(32) * 2, number("HEAD_TILES"));
        let sums = usize::from(number("KV_BITS") != 16);
        // And twice a step before the loop, for the sums of queries.
        let expected = heads * (2 * steps + sums + 2 * sums * steps);
        let image = compile(&plan.variant, Architecture::Sm80, Form::Ptx).unwrap();
        let text = String::from_utf8(image.bytes).unwrap();
        assert_eq!(text.matches("mma.sync.aligned.m16n8k16").count(), expected, "{}", plan.variant);
        assert_eq!(text.matches("movmatrix.sync").count(), 2 * heads, "{}", plan.variant);
    }
}
