//! Results match the definition for any division of the work.

use proptest::prelude::*;
use quant_kernels_cpu::attention::{KvType, PAGE_TOKENS, PageList, merge};
use quant_kernels_cpu::{Isa, Parallel, Serial};

use crate::case::{Case, KINDS, bits};
use crate::common::{Backwards, Threads};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn all_instruction_sets_equal_the_definition(
        kind in prop::sample::select(KINDS.to_vec()),
        d in prop_oneof![1_usize..9, Just(4), Just(8), Just(16)].prop_map(|d| 16 * d),
        heads in (1_usize..4, 1_usize..10),
        tokens in 0_usize..200,
        m in 1_usize..5,
        first in 0_usize..90,
        seen in prop_oneof![Just(isize::MAX), -3_isize..200],
        seed: u64,
    ) {
        let mut case = Case::new(kind, d, [heads.0, heads.1], [tokens, m], seed);
        case.first = if seed % 2 == 0 { first.min(tokens) } else { 0 };
        case.seen = seen;
        case.check();
    }

    #[test]
    fn parts_merge(
        kind in prop::sample::select(KINDS.to_vec()),
        tokens in 1_usize..300,
        cut in 0_usize..300,
        m in 1_usize..4,
        causal: bool,
        seed: u64,
    ) {
        let mut case = Case::new(kind, 32, [2, 3], [tokens, m], seed);
        if causal {
            case.seen = tokens as isize - m as isize + 1;
        }
        let (isa, cut) = (Isa::available().last().unwrap(), cut.min(tokens));
        let whole = case.run(isa, &case.lists(), &Serial);
        let largest = case.values.iter().fold(0.0_f32, |max, v| if v.is_finite() { max.max(v.abs()) } else { max });
        let left: Vec<_> = case.lists().iter().map(|list| PageList { tokens: cut, ..*list }).collect();
        let right: Vec<_> = case.lists().iter().map(|list| PageList { first: cut, ..*list }).collect();
        let (mut out, mut lse) = case.run(isa, &left, &Serial);
        let (other, other_lse) = case.run(isa, &right, &Serial);
        merge(32, &mut out, &mut lse, &other, &other_lse).unwrap();
        for (a, b) in out.iter().zip(&whole.0).chain(lse.iter().zip(&whole.1)) {
            // With bf16, probabilities are rounded relative to the maximum of their part, which differs from that of
            // the whole. Each rounding has a relative error of at most 2⁻⁹.
            let tolerance = if kind == KvType::F16 { 1e-4 } else { 1.0 / 256.0 };
            prop_assert!(a == b || (a - b).abs() <= tolerance * (2.0 + largest.max(b.abs())), "{a} {b}");
        }
    }
}

/// With few rows there is one piece of work per chunk, with many one per block of rows.
#[test]
fn long_sequences_do_not_depend_on_the_split() {
    for (kind, heads, tokens, m) in [
        (KvType::Kv4, [2, 4], 5000, 1),
        (KvType::Kv8, [1, 7], 3100, 2),
        (KvType::F16, [3, 1], 2049, 1),
        (KvType::Kv4, [2, 2], 2300, 150),
        (KvType::F16, [1, 3], 1100, 80),
    ] {
        let mut case = Case::new(kind, 64, heads, [tokens, m], 11);
        case.seen = tokens as isize - m as isize + 1;
        let lists = case.lists();
        for isa in Isa::available() {
            if isa == Isa::Scalar && m > 1 {
                continue;
            }
            let expected = case.run(isa, &lists, &Serial);
            for parallel in [&Backwards as &dyn Parallel, &Threads(2), &Threads(3)] {
                let got = case.run(isa, &lists, parallel);
                assert_eq!([bits(&got.0), bits(&got.1)], [bits(&expected.0), bits(&expected.1)], "{isa:?}");
            }
            case.check_bound(&expected, isa == Isa::Avx512Bf16);
        }
    }
}

/// Alone, work is divided by chunks; in a batch, by rows.
#[test]
fn prefill_equals_decoding() {
    for kind in KINDS {
        let mut many = Case::new(kind, 32, [1, 2], [2100, 100], 5);
        many.seen = 2100 - 99;
        for isa in Isa::available() {
            let (out, lse) = many.run(isa, &many.lists(), &Serial);
            for i in [0, 47, 99] {
                let width = 2 * 32;
                let mut one = Case::new(kind, 32, [1, 2], [2100, 1], 5);
                one.q = many.q[i * width..(i + 1) * width].to_vec();
                (one.bytes, one.pages) = (many.bytes.clone(), many.pages.clone());
                one.seen = 2001 + i as isize;
                let (o, l) = one.run(isa, &one.lists(), &Serial);
                assert_eq!(bits(&o), bits(&out[i * width..(i + 1) * width]), "{kind:?} {isa:?} {i}");
                assert_eq!(bits(&l), bits(&lse[i * 2..(i + 1) * 2]));
            }
        }
    }
}

#[test]
fn integers_reach_their_extremes() {
    for kind in [KvType::Kv4, KvType::Kv8] {
        let levels = if kind == KvType::Kv4 { 15.0 } else { 255.0 };
        let mut case = Case::new(kind, 512, [1, 4], [70, 1], 3);
        // In each key one value is 0 and the other 511 are the maximum, so their codes are 0 and 15 or 255, with scale
        // 1 and zero 0.
        for t in 0..70 {
            let mut key = vec![levels; 512];
            key[t] = 0.0;
            let page = case.pages[0][t / PAGE_TOKENS] as usize * case.layout.page_bytes();
            let page = &mut case.bytes[page..page + case.layout.page_bytes()];
            case.layout.write(page, t % PAGE_TOKENS, &key, &key).unwrap();
        }
        case.heads.scale = 2.0_f32.powi(-12);
        for (r, q) in [127.0, -127.0, 1.0, -1.0].into_iter().enumerate() {
            case.q[r * 512..(r + 1) * 512].fill(q);
        }
        for isa in Isa::available() {
            let (out, lse) = case.run(isa, &case.lists(), &Backwards);
            for (r, q) in [127.0_f64, -127.0, 1.0, -1.0].into_iter().enumerate() {
                // The scale of a query of ones is 1/127, rounded.
                let factor = f64::from((q.abs() as f32) / 127.0) * 127.0 * q.signum();
                let score = 511.0 * f64::from(levels) * factor / 4096.0;
                let exact = score + 70.0_f64.ln();
                assert!((f64::from(lse[r]) - exact).abs() <= exact.abs() * 2e-7 + 1e-6, "{isa:?} {}", lse[r]);
                // The tolerance covers probabilities that are rounded to bf16.
                let values = out[r * 512..r * 512 + 512].iter().enumerate();
                for (f, v) in values {
                    let exact = f64::from(levels) * if f < 70 { 69.0 / 70.0 } else { 1.0 };
                    assert!((f64::from(*v) - exact).abs() <= exact * 4e-3, "{isa:?} {f} {v} {exact}");
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_in_its_head() {
    for kind in KINDS {
        let mut case = Case::new(kind, 16, [2, 2], [1100, 2], 9);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
            case.q[5 * 16 + 3] = bad;
            for isa in Isa::available() {
                let (out, lse) = case.run(isa, &case.lists(), &Serial);
                for row in 0..8 {
                    let whole = out[row * 16..(row + 1) * 16].iter().chain([&lse[row]]);
                    assert!(whole.clone().all(|v| v.is_nan() == (row == 5)), "{kind:?} {isa:?} {bad} {row}");
                }
            }
        }
    }
}

#[test]
fn merging_takes_what_is_there() {
    let nothing = f32::NEG_INFINITY;
    let (mut out, mut lse) = ([0.0, 0.0, 1.0, 2.0], [nothing, 3.0]);
    merge(2, &mut out, &mut lse, &[5.0, 6.0, 9.0, 9.0], &[1.5, nothing]).unwrap();
    assert_eq!((out, lse), ([5.0, 6.0, 1.0, 2.0], [1.5, 3.0]));
    merge(2, &mut out, &mut lse, &[7.0, 8.0, 3.0, 4.0], &[1.5, f32::NAN]).unwrap();
    assert_eq!((out[..2].to_vec(), lse[0]), (vec![6.0, 7.0], 1.5 + 2.0_f32.ln()));
    assert!(out[2..].iter().all(|v| v.is_nan()) && lse[1].is_nan());
}
