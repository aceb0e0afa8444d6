//! The result of a row is bit-identical whether it is computed alone or in a batch.

mod common;

use common::{Backwards, Stream, Threads};
use half::{bf16, f16};
use quant_kernels_cpu::{
    Element, FloatRows, Int8Rows, Isa, IsaToken, PackedLinear, Parallel, RowLayout, Scales, Serial,
    StaticScale, WeightView,
};

/// The maximum number of rows: more than three strips.
const MAX_BATCH: usize = 40;

type Product = fn(IsaToken, &PackedLinear, &[f32], &dyn Parallel) -> Vec<u32>;

fn bits(out: &[f32]) -> Vec<u32> {
    out.iter().map(|v| v.to_bits()).collect()
}

fn whole(
    token: IsaToken,
    w: &PackedLinear,
    x: &[f32],
    by: Option<StaticScale>,
    p: &dyn Parallel,
) -> Vec<u32> {
    let (mut rows, layout) = (Int8Rows::new(token), RowLayout::of(w.layout()));
    match by {
        Some(by) => rows.quantize_static(x, layout, by, p).unwrap(),
        None => rows.quantize(x, layout, p).unwrap(),
    }
    let mut out = vec![f32::NAN; rows.m() * w.layout().n()];
    w.view().multiply(token, &rows, None, &mut out, p).unwrap();
    bits(&out)
}

fn float<E: Element>(
    token: IsaToken,
    w: &PackedLinear,
    x: &[f32],
    to: fn(f32) -> E,
    p: &dyn Parallel,
) -> Vec<u32> {
    let x: Vec<E> = x.iter().map(|&v| to(v)).collect();
    let mut rows = FloatRows::new(token);
    rows.pack(&x, RowLayout::of(w.layout()), p).unwrap();
    let mut out = vec![f32::NAN; rows.m() * w.layout().n()];
    w.view().multiply_float(&rows, None, &mut out, p).unwrap();
    bits(&out)
}

const PRODUCTS: [Product; 5] = [
    |t, w, x, p| whole(t, w, x, None, p),
    |t, w, x, p| whole(t, w, x, Some(StaticScale { scale: 0.03, zero: 5 }), p),
    |t, w, x, p| float(t, w, x, |v| v, p),
    |t, w, x, p| float(t, w, x, f16::from_f32, p),
    |t, w, x, p| float(t, w, x, bf16::from_f32, p),
];

fn weights(bits: u8, n: usize, [groups, size]: [usize; 2], zeros: bool, progressive: bool) -> PackedLinear {
    let mut s = Stream(u64::from(bits) + n as u64);
    let (k, top) = (groups * size, 1_u64 << bits);
    let codes: Vec<u8> = (0..n * k).map(|_| s.below(top) as u8).collect();
    let of_groups: Vec<u8> = (0..n * groups).map(|_| s.below(top) as u8).collect();
    let floats: Vec<f32> = (0..n * groups).map(|_| s.float()).collect();
    let whole: Vec<u8> = (0..n * groups).map(|_| 1 + s.below(8) as u8).collect();
    let scales = match progressive {
        true => Scales::Progressive { groups: &whole, channels: &floats[..n] },
        false => Scales::Float(&floats),
    };
    let zeros = zeros.then_some(&of_groups[..]);
    let view = WeightView::with_scales([n, k], bits, size, &codes, scales, zeros).unwrap();
    PackedLinear::pack(&view, None, true, &Serial).unwrap()
}

#[test]
fn rows_are_the_same_in_every_batch() {
    // Panel counts that are multiples of the tile's panels and ones that are not; small and large groups.
    for (bits, n, groups, zeros, progressive) in [
        (4, 5 * 16 + 3, [7, 32], false, false),
        (4, 16, [1, 100], true, false),
        // Groups so wide that they are computed in blocks.
        (4, 4 * 16, [1, 1700], true, false),
        (8, 16, [3, 600], false, false),
        (8, 2 * 16, [6, 20], true, false),
        (4, 4 * 16, [9, 8], true, true),
        // More groups, and wider ones, than are converted at once.
        (4, 2 * 16 + 1, [37, 32], true, false),
        (8, 3 * 16, [2, 1100], true, false),
    ] {
        let packed = weights(bits, n, groups, zeros, progressive);
        let k = groups[0] * groups[1];
        let mut s = Stream(9);
        let x: Vec<f32> = (0..MAX_BATCH * k).map(|_| s.float()).collect();
        for isa in Isa::runnable() {
            let token = isa.token().unwrap();
            for (i, product) in PRODUCTS.into_iter().enumerate() {
                let each: Vec<u32> =
                    x.chunks_exact(k).flat_map(|row| product(token, &packed, row, &Serial)).collect();
                for m in 1..=MAX_BATCH {
                    let parallel: &dyn Parallel = match m % 3 {
                        0 => &Serial,
                        1 => &Backwards,
                        _ => &Threads(2),
                    };
                    // Use the last rows, so that a row's position in its strip changes with the batch size.
                    let first = MAX_BATCH - m;
                    let got = product(token, &packed, &x[first * k..], parallel);
                    assert!(got == each[first * n..], "{isa:?}, product {i}, {m} rows of {bits} bits");
                }
            }
        }
    }
}

/// More rows than the totals that are kept at once, and strips of different heights.
#[test]
fn rows_are_the_same_in_large_batches() {
    for (bits, n, groups, zeros) in [(4, 3 * 16 + 5, [5, 32], true), (8, 2 * 16, [1, 700], false)] {
        let packed = weights(bits, n, groups, zeros, false);
        let k = groups[0] * groups[1];
        let mut s = Stream(11);
        let x: Vec<f32> = (0..403 * k).map(|_| s.float()).collect();
        for isa in Isa::available().filter(|isa| *isa != Isa::Scalar) {
            let token = isa.token().unwrap();
            for (i, product) in PRODUCTS.into_iter().enumerate() {
                for m in [191, 193, 403] {
                    let got = product(token, &packed, &x[..m * k], &Threads(2));
                    for first in [0, 7, 96, 180, m - 4] {
                        let rows = first..first + 4;
                        let alone = product(token, &packed, &x[first * k..(first + 4) * k], &Serial);
                        assert!(got[rows.start * n..rows.end * n] == alone, "{isa:?}, product {i}, {m} rows");
                    }
                }
            }
        }
    }
}
