//! Quantization of rows: every instruction set matches the reference bit for bit.

mod common;

use common::Threads;
use half::{bf16, f16};
use proptest::prelude::*;
use quant_kernels_cpu::{
    Element, FloatRows, GateUp, Int8Rows, Isa, KernelError, Layout, PackedLinear, Parallel, RmsNorm,
    RowLayout, Serial, StaticScale, WeightView, narrow, reference, rms_norm, silu_mul,
};

fn layout(groups: usize, size: usize) -> RowLayout {
    let codes = vec![0; groups * size];
    let scales = vec![1.0; groups];
    let view = WeightView::new([1, groups * size], 4, size, &codes, &scales, None).unwrap();
    RowLayout::of(&Layout::of(&view, true).unwrap())
}

/// Values whose magnitudes span many powers of two, of both signs, with occasional special values.
fn values(len: usize, seed: u64, special: bool) -> Vec<f32> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    (0..len)
        .map(|_| {
            let value = (next() as f32 / (1_u64 << 30) as f32 - 1.0) * 2.0_f32.powi((next() % 14) as i32 - 8);
            match next() % 400 {
                0 if special => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][next() as usize % 3],
                1 => 0.0,
                2 => f32::from_bits(next() % 1000),
                3 if special => 3e38,
                _ => value,
            }
        })
        .collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() }).collect()
}

/// The codes, sums and scale of a row, computed from the definition.
fn quantized(x: &[f32], size: usize, by: Option<StaticScale>) -> (Vec<i8>, Vec<i32>, u32) {
    let finite = x.iter().all(|v| v.is_finite());
    let largest = x.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    let codes: Vec<i8> = x
        .iter()
        .map(|v| match by {
            _ if !finite => 0,
            None if largest < 1e-36 => 0,
            None => (v * (127.0 / largest)).round_ties_even() as i8,
            Some(by) => {
                ((v * (1.0 / by.scale)).round_ties_even() + f32::from(by.zero)).clamp(-128.0, 127.0) as i8
            }
        })
        .collect();
    let scale = match by {
        _ if !finite => f32::NAN,
        None if largest < 1e-36 => 0.0,
        None => largest / 127.0,
        Some(by) => by.scale,
    };
    let sums = codes.chunks(size).map(|g| g.iter().map(|&c| i32::from(c)).sum()).collect();
    (codes, sums, bits(&[scale])[0])
}

fn check_rows(rows: &Int8Rows, x: &[f32], [groups, size]: [usize; 2], by: Option<StaticScale>) {
    assert_eq!(rows.m(), x.len() / (groups * size));
    for (i, x) in x.chunks_exact(groups * size).enumerate() {
        let got = (rows.row(i), rows.sums(i), bits(&rows.scales()[i..=i])[0]);
        assert_eq!(got, quantized(x, size, by), "row {i}");
    }
    assert_eq!(rows.zero(), by.map_or(0, |by| i32::from(by.zero)));
}

fn check<E: Element>(
    isa: Isa,
    m: usize,
    [groups, size]: [usize; 2],
    seed: u64,
    narrow: fn(f32) -> E,
    widen: fn(E) -> f32,
) {
    let (k, token, by) = (groups * size, isa.token().unwrap(), StaticScale { scale: 0.02, zero: seed as i8 });
    let element = |v: Vec<f32>| v.into_iter().map(narrow).collect::<Vec<E>>();
    let float = |v: &[E]| v.iter().map(|&v| widen(v)).collect::<Vec<f32>>();
    let (x, up) = (element(values(m * k, seed, true)), element(values(m * k, seed ^ 77, false)));
    let (weight, layout) = (values(k, seed ^ 5, false), layout(groups, size));
    let norm = RmsNorm { weight: &weight, eps: 1e-5 };
    let joined: Vec<E> = x.chunks(k).zip(up.chunks(k)).flat_map(|(g, u)| [g, u].concat()).collect();
    let apart = GateUp::Apart { gate: &x, up: &up };
    let normed =
        |x: &[f32]| x.chunks(k).flat_map(|x| reference::rms_norm(x, &weight, 1e-5)).collect::<Vec<_>>();
    let plain = normed(&float(&x));
    let sum: Vec<E> = float(&x).iter().zip(float(&up)).map(|(a, b)| narrow(a + b)).collect();
    let added = normed(&float(&sum));
    let gated = reference::silu_mul(&float(&x), &float(&up));
    let mut rows = Int8Rows::new(token);
    let mut out = vec![f32::NAN; m * k];
    for parallel in [&Serial as &dyn Parallel, &Threads(3)] {
        for by in [None, Some(by)] {
            match by {
                None => rows.quantize(&x, layout, parallel),
                Some(by) => rows.quantize_static(&x, layout, by, parallel),
            }
            .unwrap();
            check_rows(&rows, &float(&x), [groups, size], by);
            rows.quantize_rms_norm(&x, norm, None, layout, by, parallel).unwrap();
            check_rows(&rows, &plain, [groups, size], by);
            let mut residual = up.clone();
            rows.quantize_rms_norm(&x, norm, Some(&mut residual), layout, by, parallel).unwrap();
            check_rows(&rows, &added, [groups, size], by);
            assert_eq!(bits(&float(&residual)), bits(&float(&sum)));
            for both in [apart, GateUp::Joined(&joined)] {
                rows.quantize_silu_mul(both, layout, by, parallel).unwrap();
                check_rows(&rows, &gated, [groups, size], by);
            }
        }
        rms_norm(token, &x, norm, None, &mut out, parallel).unwrap();
        assert_eq!(bits(&out), bits(&plain));
        silu_mul(token, GateUp::Joined(&joined), k, &mut out, parallel).unwrap();
        assert_eq!(bits(&out), bits(&gated));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn all_instruction_sets_equal_the_definition(
        m in 1usize..28, groups in 1usize..5, size in prop_oneof![1usize..40, Just(64), Just(128), Just(200)], seed: u64,
    ) {
        for isa in Isa::available() {
            check::<f32>(isa, m, [groups, size], seed, |v| v, |v| v);
            check::<f16>(isa, m, [groups, size], seed, f16::from_f32, f16::to_f32);
            check::<bf16>(isa, m, [groups, size], seed, bf16::from_f32, bf16::to_f32);
        }
    }
}

/// The reference is within the documented bounds of `f64` results.
#[test]
fn norms_and_gates_are_near_their_formulas() {
    let mut worst = 0.0_f64;
    let mut bits = 0_u32;
    while bits < 0x7f80_0000 {
        for g in [f32::from_bits(bits), -f32::from_bits(bits)] {
            let exact = f64::from(g) / (1.0 + (-f64::from(g)).exp());
            let got = f64::from(reference::silu(g));
            if g < -87.0 {
                assert!(got == 0.0 && exact.abs() < 1.5e-36, "{g}");
            } else if exact.abs() > 1.2e-38 {
                worst = worst.max(((got - exact) / exact).abs());
            } else {
                assert!((got - exact).abs() <= 2.0_f64.powi(-149), "{g}");
            }
        }
        bits += 997;
    }
    assert!(worst <= 2.0_f64.powi(-22), "{worst:e}, 2^{}", worst.log2());
    assert!(reference::silu(f32::NAN).is_nan() && reference::silu(f32::NEG_INFINITY).is_nan());
    assert_eq!(reference::silu(f32::INFINITY), f32::INFINITY);
    for k in [1, 63, 64, 100, 4096, 14336] {
        let (x, weight) = (values(k, k as u64, false), values(k, 9, false));
        let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / k as f64;
        let r = 1.0 / (mean + f64::from(1e-6_f32)).sqrt();
        // Half the relative error of the sum, plus one rounding each for the mean, ε, the root, the inverse and the
        // product.
        let bound = (0.5 * (k as f64 / 64.0 + 8.0) + 5.0) * 2.0_f64.powi(-24);
        for ((got, x), w) in reference::rms_norm(&x, &weight, 1e-6).iter().zip(&x).zip(&weight) {
            let exact = f64::from(*x) * r * f64::from(*w);
            assert!(
                (f64::from(*got) - exact).abs() <= bound * exact.abs() + 1e-44,
                "{k}: {got}, not {exact}"
            );
        }
    }
}

#[test]
fn floats_are_rounded_half_to_even() {
    let special = [65519.99, 65520.0, 3.39e38, f32::MAX, f32::MIN_POSITIVE, 5.96e-8, 2.98e-8, 1e-40, -0.0];
    let halves = (0..2000_u32).map(|i| f32::from_bits(0x3f80_0000 + i * 0x800));
    let mut x: Vec<f32> = special.iter().flat_map(|&v| [v, -v]).chain(halves).collect();
    x.extend(values(40_000, 5, true));
    for len in [0, 1, 15, 16, 33, x.len()] {
        let x = &x[x.len() - len..];
        for isa in Isa::available() {
            let token = isa.token().unwrap();
            let (mut f, mut b, mut same) = (vec![f16::ONE; len], vec![bf16::ONE; len], vec![1.0_f32; len]);
            narrow(token, x, &mut f, &Threads(3)).unwrap();
            narrow(token, x, &mut b, &Threads(3)).unwrap();
            narrow(token, x, &mut same, &Threads(3)).unwrap();
            for (i, &v) in x.iter().enumerate() {
                if v.is_nan() {
                    assert!(f[i].is_nan() && b[i].is_nan() && same[i].is_nan());
                    continue;
                }
                assert_eq!(f[i].to_bits(), f16::from_f32(v).to_bits(), "{v:e} on {isa:?}");
                assert_eq!(b[i].to_bits(), bf16::from_f32(v).to_bits(), "{v:e} on {isa:?}");
                assert_eq!(same[i].to_bits(), v.to_bits());
            }
            assert!(matches!(narrow(token, x, &mut [f16::ONE; 2], &Serial), Err(KernelError::Length { .. })));
        }
    }
}

/// A row whose sum of squares overflows `f32` gets NaN, not zeros; a row of zeros gets zeros.
#[test]
fn extreme_rows_of_a_norm() {
    let layout = layout(2, 32);
    let weight = vec![1.0; 64];
    let norm = RmsNorm { weight: &weight, eps: 1e-6 };
    for isa in Isa::available() {
        let mut rows = Int8Rows::new(isa.token().unwrap());
        let x = [vec![1e30_f32; 64], vec![0.0; 64], vec![1.0; 64], vec![1e-30; 64]].concat();
        rows.quantize_rms_norm(&x, norm, None, layout, None, &Serial).unwrap();
        assert!(rows.scales()[0].is_nan());
        assert_eq!(rows.row(0), [0; 64]);
        assert_eq!((rows.scales()[1], rows.row(1)), (0.0, vec![0; 64]));
        assert_eq!(rows.row(2), [127; 64]);
        assert_eq!(rows.row(3), [127; 64]);
    }
}

#[test]
fn what_was_held_is_replaced() {
    let (small, large) = (layout(3, 13), layout(2, 128));
    let x = values(20 * 256, 3, false);
    let mut used = Int8Rows::default();
    let by = StaticScale { scale: 0.01, zero: -7 };
    used.quantize_static(&x, large, by, &Serial).unwrap();
    used.quantize(&x[..39 * 17], small, &Serial).unwrap();
    check_rows(&used, &x[..39 * 17], [3, 13], None);
    used.quantize::<f32>(&[], small, &Serial).unwrap();
    assert_eq!((used.m(), used.row(0), used.sums(0)), (0, vec![], vec![]));
}

#[test]
fn misuse_is_an_error() {
    let layout = layout(2, 32);
    let (x, weight) = (vec![1.0_f32; 128], vec![1.0_f32; 64]);
    let mut rows = Int8Rows::default();
    let norm = |weight: &'static [f32], eps| RmsNorm { weight, eps };
    let ones: &'static [f32] = &[1.0; 64];
    let mut go = |x: &[f32], by: RmsNorm<'_>, residual: Option<&mut [f32]>, fixed: Option<StaticScale>| {
        rows.quantize_rms_norm(x, by, residual, layout, fixed, &Serial).map_err(|e| e.code())
    };
    assert_eq!(go(&x, norm(ones, 1e-5), None, None), Ok(()));
    assert_eq!(go(&x[1..], norm(ones, 1e-5), None, None), Err(1));
    assert_eq!(go(&x, norm(&ones[1..], 1e-5), None, None), Err(1));
    assert_eq!(go(&x, norm(ones, 1e-5), Some(&mut [0.0; 127]), None), Err(1));
    for eps in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_eq!(go(&x, norm(ones, eps), None, None), Err(3));
    }
    // A residual is unchanged when the call fails.
    let mut residual = vec![1.0; 128];
    let broken = StaticScale { scale: 0.0, zero: 0 };
    assert_eq!(go(&x, norm(ones, 1e-5), Some(&mut residual), Some(broken)), Err(3));
    assert_eq!(residual, [1.0; 128]);
    let gate = |gate, up| GateUp::Apart { gate, up };
    let silu =
        |rows: &mut Int8Rows, x| rows.quantize_silu_mul(x, layout, None, &Serial).map_err(|e| e.code());
    assert_eq!(silu(&mut rows, gate(&x, &x[1..])), Err(1));
    assert_eq!(silu(&mut rows, GateUp::Joined(&x[..64])), Err(1));
    assert_eq!(silu(&mut rows, GateUp::Joined(&x)), Ok(()));
    let token = Isa::Scalar.token().unwrap();
    let mut out = vec![0.0; 127];
    let norm = RmsNorm { weight: &weight, eps: 1e-5 };
    assert_eq!(rms_norm(token, &x, norm, None, &mut out, &Serial).unwrap_err().code(), 1);
    let none = RmsNorm { weight: &[], eps: 1e-5 };
    assert!(matches!(rms_norm(token, &x, none, None, &mut out, &Serial), Err(KernelError::Scheme(_))));
    assert_eq!(silu_mul(token, gate(&x, &x), 0, &mut out, &Serial).unwrap_err().code(), 3);
    assert_eq!(silu_mul(token, gate(&x, &x), 64, &mut out, &Serial).unwrap_err().code(), 1);
}

/// Packing f16 or bf16 gives the same products as packing their values in `f32`.
#[test]
fn floats_of_any_type_are_packed() {
    let (n, k, m) = (20, 96, 15);
    let (codes, scales) = (vec![9_u8; n * k], vec![0.5_f32; n * 3]);
    let view = WeightView::new([n, k], 4, 32, &codes, &scales, None).unwrap();
    let packed = PackedLinear::pack(&view, None, false, &Serial).unwrap();
    let layout = RowLayout::of(packed.layout());
    let x: Vec<bf16> = values(m * k, 4, false).into_iter().map(bf16::from_f32).collect();
    let halves: Vec<f16> = values(m * k, 5, false).into_iter().map(f16::from_f32).collect();
    let product = |rows: &FloatRows| {
        let mut out = vec![f32::NAN; m * n];
        packed.multiply_float(rows, &mut out, &Serial).unwrap();
        bits(&out)
    };
    for isa in Isa::available() {
        let [mut a, mut b] = [FloatRows::new(isa.token().unwrap()), FloatRows::new(isa.token().unwrap())];
        a.pack(&x, layout, &Threads(2)).unwrap();
        b.pack(&x.iter().map(|v| v.to_f32()).collect::<Vec<_>>(), layout, &Serial).unwrap();
        assert_eq!((a.exact_in_bf16(), b.exact_in_bf16()), (true, false));
        assert_eq!(product(&a), product(&b));
        let wide: Vec<f32> = halves.iter().map(|v| v.to_f32()).collect();
        a.pack(&halves, layout, &Serial).unwrap();
        b.pack(&wide, layout, &Serial).unwrap();
        assert!(!a.exact_in_bf16());
        assert_eq!(product(&a), product(&b));
        // Fused norms and gates pack the same rows as separate operations.
        let weight = values(k, 8, false);
        let norm = RmsNorm { weight: &weight, eps: 1e-5 };
        a.pack_rms_norm(&halves, norm, None, layout, &Serial).unwrap();
        let made: Vec<f32> = wide.chunks(k).flat_map(|x| reference::rms_norm(x, &weight, 1e-5)).collect();
        b.pack(&made, layout, &Serial).unwrap();
        assert_eq!(product(&a), product(&b));
        a.pack_silu_mul(GateUp::Apart { gate: &halves, up: &halves }, layout, &Serial).unwrap();
        b.pack(&reference::silu_mul(&wide, &wide), layout, &Serial).unwrap();
        assert_eq!(product(&a), product(&b));
    }
}
