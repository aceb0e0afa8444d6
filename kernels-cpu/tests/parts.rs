//! Multiplying only some output features of a matrix is bit-identical to that part of the whole product.

mod common;

use common::{Backwards, Stream};
use quant_kernels_cpu::{
    FloatRows, Int8Rows, Isa, IsaToken, KernelError, PackedLinear, PackedView, Product, RowLayout, Serial,
    StaticScale, WeightView, multiply_each,
};

const K: usize = 96;
const N: usize = 16 * 9 + 5;

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

fn weights(bits: u8) -> PackedLinear {
    let mut s = Stream(3);
    let codes: Vec<u8> = (0..N * K).map(|_| s.below(1 << bits) as u8).collect();
    let scales: Vec<f32> = (0..N * 3).map(|_| s.float()).collect();
    let zeros: Vec<u8> = (0..N * 3).map(|_| s.below(1 << bits) as u8).collect();
    let view = WeightView::new([N, K], bits, 32, &codes, &scales, Some(&zeros)).unwrap();
    PackedLinear::pack(&view, None, true, &Serial).unwrap()
}

#[test]
fn parts_are_those_of_the_whole() {
    let mut s = Stream(4);
    let bias: Vec<f32> = (0..N).map(|_| s.float()).collect();
    for m in [1, 3, 17] {
        let x: Vec<f32> = (0..m * K).map(|_| s.float()).collect();
        for (isa, width) in Isa::runnable().flat_map(|isa| [(isa, 4), (isa, 8)]) {
            let (packed, token) = (weights(width), isa.token().unwrap());
            let layout = RowLayout::of(packed.layout());
            let (mut whole, mut float) = (Int8Rows::new(token), FloatRows::new(token));
            let by = StaticScale { scale: 0.02, zero: -9 };
            whole.quantize_static(&x, layout, by, &Serial).unwrap();
            float.pack(&x, layout, &Serial).unwrap();
            let products = |view: PackedView<'_>, bias: &[f32]| {
                let n = view.layout().n();
                let mut outs = [vec![f32::NAN; m * n], vec![f32::NAN; m * n]];
                view.multiply(token, &whole, Some(bias), &mut outs[0], &Backwards).unwrap();
                view.multiply_float(&float, Some(bias), &mut outs[1], &Backwards).unwrap();
                outs
            };
            let all = products(packed.view(), &bias);
            for rows in [0..N, 0..16, 16..48, 48..128, 128..N, 144..N, 80..144] {
                let part = packed.view().rows(rows.clone()).unwrap();
                let got = products(part, &bias[rows.clone()]);
                for (got, all) in got.iter().zip(&all) {
                    let expected: Vec<f32> =
                        all.chunks(N).flat_map(|row| row[rows.clone()].to_vec()).collect();
                    assert_eq!(bits(got), bits(&expected), "{isa:?} {m} {rows:?}");
                }
                let mut floats = [vec![0.0; rows.len() * K], vec![0.0; rows.len() * K]];
                part.dequantize_rows(0..rows.len(), &mut floats[0]).unwrap();
                packed.view().dequantize_rows(rows, &mut floats[1]).unwrap();
                assert_eq!(floats[0], floats[1]);
            }
        }
    }
}

#[test]
fn invalid_parts_are_errors() {
    let packed = weights(4);
    let code = |rows| packed.view().rows(rows).map(|_| ()).unwrap_err().code();
    #[allow(clippy::reversed_empty_ranges, reason = "it is what is tested")]
    let backwards = 32..16;
    for rows in [0..N + 1, 16..16, N..N, 8..32, 16..33, 0..N - 1, 160..176, 0..usize::MAX, backwards] {
        assert_eq!(code(rows.clone()), 4, "{rows:?}");
    }
    let part = packed.view().rows(32..N).unwrap().rows(16..32).unwrap();
    assert_eq!(part.bytes(), packed.view().rows(48..64).unwrap().bytes());
}

#[test]
fn nothing_is_written_where_one_of_several_is_refused() {
    let codes = vec![9; 16 * 32];
    let scales = vec![1.0; 16];
    let view = WeightView::new([16, 32], 4, 32, &codes, &scales, None).unwrap();
    let weight = PackedLinear::pack(&view, None, false, &Serial).unwrap();
    let mut x = Int8Rows::default();
    x.quantize(&[1.0_f32; 32], RowLayout::of(weight.layout()), &Serial).unwrap();
    let (mut right, mut short) = ([f32::NAN; 16], [0.0; 15]);
    let of = |out| Product { weight: weight.view(), bias: None, out };
    let mut products = [of(&mut right[..]), of(&mut short[..])];
    let refused = multiply_each(IsaToken::detect(), &x, &mut products, &Serial);
    assert!(matches!(refused, Err(KernelError::Length { what: "output", .. })), "{refused:?}");
    assert!(right.iter().all(|v| v.is_nan()));
    multiply_each(IsaToken::detect(), &x, &mut [], &Serial).unwrap();
}
