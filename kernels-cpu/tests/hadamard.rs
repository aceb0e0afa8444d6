//! Rotations: every instruction set matches the reference bit for bit, and the reference matches the product with the
//! matrix.

mod common;

use common::Backwards;
use quant_kernels_cpu::{Construction, Hadamard, Isa, KernelError, Parallel, Serial, reference};

fn values(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0).collect()
}

/// All kinds of orders: powers of two, one factor with a Sylvester part of any order, and several factors.
const ORDERS: [usize; 21] = [
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    128,
    1024,
    12,
    24,
    40,
    112,
    20 * 16,
    36 * 4,
    52,
    92,
    144,
    156,
    172 * 2,
    12 * 28 * 2,
];

#[test]
fn all_instruction_sets_equal_the_definition() {
    for n in ORDERS {
        let by = Hadamard::new(n).unwrap();
        let mut x = values(19 * n, n);
        x[0] = f32::MAX;
        let mut expected = x.clone();
        expected.chunks_exact_mut(n).for_each(|row| reference::hadamard(&by, row));
        let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        for isa in Isa::available() {
            for parallel in [&Serial as &dyn Parallel, &Backwards] {
                let mut got = x.clone();
                by.transform(isa.token().unwrap(), &mut got, parallel).unwrap();
                assert!(bits(&got) == bits(&expected), "{isa:?} {n}");
            }
        }
    }
}

#[test]
fn the_definition_is_the_matrix() {
    for n in ORDERS.into_iter().filter(|n| *n < 400) {
        let by = Hadamard::new(n).unwrap();
        let sign = |r, c| f64::from(by.sign(r, c).unwrap());
        for r in 0..n {
            for other in 0..=r {
                let product: f64 = (0..n).map(|c| sign(r, c) * sign(other, c)).sum();
                assert_eq!(product, if r == other { n as f64 } else { 0.0 }, "{n}");
            }
        }
        let x = values(n, 5);
        let mut got = x.clone();
        reference::hadamard(&by, &mut got);
        let sum: f64 = x.iter().map(|v| f64::from(v.abs())).sum();
        let terms = by.sylvester().ilog2() as usize + by.factors().map(|(order, _)| order).sum::<usize>() + 2;
        let bound = terms as f64 * 2.0_f64.powi(-24) * sum / (n as f64).sqrt();
        for (r, got) in got.iter().enumerate() {
            let exact = (0..n).map(|c| sign(r, c) * f64::from(x[c])).sum::<f64>() / (n as f64).sqrt();
            assert!((f64::from(*got) - exact).abs() <= bound, "{n}: {got}, not {exact}");
        }
        assert_eq!((by.sign(n, 0), by.sign(0, n)), (None, None));
    }
    let by = Hadamard::new(4).unwrap();
    let rows: Vec<i8> = (0..16).map(|i| by.sign(i / 4, i % 4).unwrap()).collect();
    assert_eq!(rows, [1, 1, 1, 1, 1, -1, 1, -1, 1, 1, -1, -1, 1, -1, -1, 1]);
}

#[test]
fn widths_of_models() {
    for (n, orders) in [
        (2048, &[][..]),
        (2560, &[20]),
        (2816, &[44]),
        (3072, &[12]),
        (3584, &[28]),
        (4096, &[]),
        (5120, &[20]),
        (6144, &[12]),
        (7168, &[28]),
        (8192, &[]),
        (11008, &[172]),
        (13824, &[12, 36]),
        (14336, &[28]),
        (18944, &[148]),
        (27648, &[12, 12, 12]),
        (28672, &[28]),
        (29568, &[12, 28, 44]),
    ] {
        let by = Hadamard::new(n).unwrap();
        let factors: Vec<usize> = by.factors().map(|(order, _)| order).collect();
        assert_eq!(factors, orders, "{n}");
        assert_eq!(by.sylvester() * factors.iter().product::<usize>(), n);
        let (a, b) = (values(n, 1), values(n, 2));
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
        let mut rotated = [a.clone(), b.clone()].concat();
        by.transform(Isa::detect().token().unwrap(), &mut rotated, &Serial).unwrap();
        let (left, right) = rotated.split_at(n);
        assert!((dot(left, right) - dot(&a, &b)).abs() < 1e-4 * dot(&a, &a), "{n}");
    }
    let of = |n| Hadamard::new(n).unwrap().factors().next().unwrap().1;
    assert_eq!(of(11008), Construction::Williamson(43));
    assert_eq!(of(18944), Construction::PaleySecond(73));
    assert_eq!(of(156), Construction::CooperWallis(13));
}

#[test]
fn sizes_that_are_not_there_are_named() {
    for n in [0, 3, 6, 7, 100_001, 116, 188, 29 << 8, 9 * 4 + 2, usize::MAX] {
        let error = Hadamard::new(n).unwrap_err();
        assert_eq!((error.code(), &error), (7, &KernelError::Order(n)));
        assert!(error.to_string().contains(&n.to_string()));
    }
    let token = Isa::Scalar.token().unwrap();
    let by = Hadamard::new(16).unwrap();
    assert_eq!(by.transform(token, &mut [0.0; 15], &Serial).unwrap_err().code(), 1);
    assert!(by.transform(token, &mut [], &Serial).is_ok());
}
