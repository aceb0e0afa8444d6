//! Any bytes of a layout unpack, dequantize and multiply: the same on all instruction sets.
#![no_main]

use libfuzzer_sys::fuzz_target;
use quant_kernels_cpu::{Int8Rows, Isa, Layout, PackedView, RowLayout, ScaleType, Serial};

#[derive(arbitrary::Arbitrary, Debug)]
struct Input {
    n: u8,
    groups: u8,
    group_size: u8,
    wide: bool,
    scales: u8,
    middle: Option<u8>,
    sums: bool,
    bytes: Vec<u8>,
    x: Vec<f32>,
}

fuzz_target!(|input: Input| {
    let (n, groups, size) = (usize::from(input.n % 40), usize::from(input.groups % 8), usize::from(input.group_size));
    let scales = [ScaleType::F16, ScaleType::Bf16, ScaleType::F32, ScaleType::Progressive];
    let scales = scales[usize::from(input.scales % 4)];
    let bits = if input.wide { 8 } else { 4 };
    let Ok(layout) = Layout::from_parts([n, groups * size], bits, size, scales, input.middle, input.sums) else {
        return;
    };
    assert!(PackedView::new(layout, layout.id() ^ 1, &input.bytes).is_err());
    let mut bytes = input.bytes;
    bytes.resize(layout.bytes(), 0x5a);
    let view = PackedView::new(layout, layout.id(), &bytes).unwrap();
    let parts = layout.unpack(&bytes).unwrap();
    assert_eq!(parts.codes.len(), layout.n() * layout.k());
    let mut floats = vec![0.0; layout.k()];
    view.dequantize_rows(n - 1..n, &mut floats).unwrap();
    let mut x = input.x;
    x.resize(x.len().clamp(1, 14 * layout.k()).next_multiple_of(layout.k()), 1.0);
    let mut out = [vec![0.0; x.len() / layout.k() * n], vec![0.0; x.len() / layout.k() * n]];
    for (out, isa) in out.iter_mut().zip([Isa::Scalar, Isa::detect()]) {
        let token = isa.token().unwrap();
        let mut rows = Int8Rows::new(token);
        rows.quantize(&x, RowLayout::of(&layout), &Serial).unwrap();
        view.multiply(token, &rows, None, out, &Serial).unwrap();
    }
    let bits = |v: &[f32]| v.iter().map(|v| if v.is_nan() { 0 } else { v.to_bits() }).collect::<Vec<_>>();
    assert_eq!(bits(&out[0]), bits(&out[1]));
});
