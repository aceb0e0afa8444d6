//! Pages from an external source may hold any bytes. NaN and infinities affect only the results of queries that see
//! them.

use half::f16;
use quant_kernels_cpu::attention::{KvType, PAGE_TOKENS, merge};
use quant_kernels_cpu::{Isa, Serial};

use crate::case::{Case, KINDS, bits};

const TOKENS: usize = 1100;
const D: usize = 16;

/// Overwrites the scale (with `is_scale`) or the zero of a token's key; in f16 pages, one feature of the key.
fn poison(case: &mut Case, token: usize, is_scale: bool, value: f16) {
    let slot = token % PAGE_TOKENS;
    let codes = PAGE_TOKENS * D * case.layout.bits() / 8;
    let at = match case.layout.kind() {
        KvType::F16 => 2 * ((slot / 16 * D + 3) * 16 + slot % 16),
        _ => codes + 2 * slot + if is_scale { 0 } else { 2 * PAGE_TOKENS },
    };
    let at = case.pages[0][token / PAGE_TOKENS] as usize * case.layout.page_bytes() + at;
    case.bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

#[test]
fn non_finite_scores_are_reported() {
    for kind in KINDS {
        for (i, token) in [0, 17, 640, 1030, TOKENS - 1].into_iter().enumerate() {
            for value in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY] {
                // With a single key-value head, all rows see the token.
                let mut case = Case::new(kind, D, [1, 3], [TOKENS, 2], i as u64);
                case.q.iter_mut().for_each(|q| *q += 2.0);
                let clean = case.run(Isa::Scalar, &case.lists(), &Serial);
                assert!(clean.0.iter().chain(&clean.1).all(|v| v.is_finite()));
                poison(&mut case, token, i % 2 == 0, value);
                let mut all: Option<[Vec<bool>; 2]> = None;
                for isa in Isa::available() {
                    let (out, lse) = case.run(isa, &case.lists(), &Serial);
                    assert!(lse.iter().all(|v| v.is_nan()), "{kind:?} {isa:?} {token} {value}: {lse:?}");
                    assert!(out.iter().all(|v| v.is_nan()), "{kind:?} {isa:?} {token} {value}");
                    let nan = [&out, &lse].map(|v| v.iter().map(|v| v.is_nan()).collect());
                    assert_eq!(all.get_or_insert_with(|| nan.clone()), &nan);
                    let (mut joined, mut joined_lse) = clean.clone();
                    merge(D, &mut joined, &mut joined_lse, &out, &lse).unwrap();
                    assert!(joined.iter().chain(&joined_lse).all(|v| v.is_nan()));
                    let (mut joined, mut joined_lse) = (out, lse);
                    merge(D, &mut joined, &mut joined_lse, &clean.0, &clean.1).unwrap();
                    assert!(joined.iter().chain(&joined_lse).all(|v| v.is_nan()));
                }
                if token == TOKENS - 1 {
                    case.seen = TOKENS as isize - 1;
                    for isa in Isa::available() {
                        let (out, lse) = case.run(isa, &case.lists(), &Serial);
                        assert!(lse[..3].iter().chain(&out[..3 * D]).all(|v| v.is_finite()), "{isa:?}");
                        assert!(lse[3..].iter().chain(&out[3 * D..]).all(|v| v.is_nan()), "{isa:?}");
                    }
                }
                if token == 0 {
                    case.first = 1;
                    let seen = case.run(Isa::Scalar, &case.lists(), &Serial);
                    for isa in Isa::available() {
                        let (out, lse) = case.run(isa, &case.lists(), &Serial);
                        assert!(lse.iter().chain(&out).all(|v| v.is_finite()), "{isa:?}");
                        assert_eq!(bits(&lse), bits(&seen.1));
                    }
                }
            }
        }
    }
}

#[test]
fn no_number_at_all_is_not_nothing() {
    for kind in KINDS {
        let mut case = Case::new(kind, D, [1, 1], [3, 1], 1);
        case.q.fill(1.0);
        (0..3).for_each(|token| poison(&mut case, token, true, f16::NAN));
        for isa in Isa::available() {
            let (out, lse) = case.run(isa, &case.lists(), &Serial);
            assert!(lse[0].is_nan() && out.iter().all(|v| v.is_nan()), "{kind:?} {isa:?} {lse:?}");
        }
    }
}
