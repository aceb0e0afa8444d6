//! Decoding uses exactly the expected number of tensor core instructions. Needs NVRTC, but no GPU.

use quant_kernels_cuda::attention;
use quant_kernels_cuda::compile::{Form, GpuArchitecture, compile};

mod support;

use support::has_nvrtc;

/// Per tile: one instruction per 16 features of keys, one per 16 features of values, and one for the sums of P.
#[test]
fn decoding_multiplies_on_tensor_cores() {
    if !has_nvrtc() {
        return;
    }
    for entry in attention::variants() {
        let define =
            |name| entry.variant.defines.iter().find(|(n, _)| *n == name).map(|(_, value)| value.as_str());
        if entry.variant.kernel != "attention_decode" {
            continue;
        }
        let number = |name| define(name).unwrap().parse::<usize>().unwrap();
        let (steps, heads) = (number("HEAD_DIM").div_ceil(32) * 2, number("HEAD_TILES"));
        let sums = usize::from(number("KV_BITS") != 16);
        // Two more per step before the loop, for the sums of queries.
        let expected = heads * (2 * steps + sums + 2 * sums * steps);
        let image = compile(&entry.variant, GpuArchitecture::Sm80, Form::Ptx).unwrap();
        let text = String::from_utf8(image.bytes).unwrap();
        assert_eq!(text.matches("mma.sync.aligned.m16n8k16").count(), expected, "{}", entry.variant);
        assert_eq!(text.matches("movmatrix.sync").count(), 2 * heads, "{}", entry.variant);
    }
}
