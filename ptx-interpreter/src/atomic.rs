//! The value that an atomic operation writes.

use half::{bf16, f16};

use crate::operation::Atomic;
use crate::types::{Lane, Pair, Type, low_bits};

/// Returns the new value; `None` for combinations that this crate does not support. `b` is the second source of `cas`.
pub(crate) fn combine(atomic: Atomic, ty: Type, old: u64, a: u64, b: u64) -> Option<u64> {
    let keep = low_bits(ty.bits());
    let a = a & keep;
    let signed = |v: u64| crate::integer::extend(v, ty.bits(), true) as i64;
    Some(match (atomic, ty) {
        (Atomic::Add, Type::F32) => (f32::get(old) + f32::get(a)).put(),
        (Atomic::Add, Type::F64) => (f64::get(old) + f64::get(a)).put(),
        (Atomic::Add, Type::F16) => (f16::get(old) + f16::get(a)).put(),
        (Atomic::Add, Type::Bf16) => (bf16::get(old) + bf16::get(a)).put(),
        (Atomic::Add, Type::F16x2) => {
            let (x, y) = (Pair::<f16>::get(old), Pair::<f16>::get(a));
            Pair(x.0 + y.0, x.1 + y.1).put()
        }
        (Atomic::Add, Type::Bf16x2) => {
            let (x, y) = (Pair::<bf16>::get(old), Pair::<bf16>::get(a));
            Pair(x.0 + y.0, x.1 + y.1).put()
        }
        (Atomic::Exchange, _) => a,
        (Atomic::Compare, _) => {
            if old == a {
                b & keep
            } else {
                old
            }
        }
        (_, Type::F16 | Type::Bf16 | Type::F16x2 | Type::Bf16x2 | Type::F32 | Type::F64) => return None,
        (Atomic::Add, _) => old.wrapping_add(a) & keep,
        (Atomic::And, _) => old & a,
        (Atomic::Or, _) => old | a,
        (Atomic::Xor, _) => old ^ a,
        (Atomic::Min, _) if ty.is_signed() => signed(old).min(signed(a)) as u64 & keep,
        (Atomic::Max, _) if ty.is_signed() => signed(old).max(signed(a)) as u64 & keep,
        (Atomic::Min, _) => old.min(a),
        (Atomic::Max, _) => old.max(a),
        // `inc` wraps from `a` to 0, and `dec` from 0 to `a`.
        (Atomic::Increment, _) => {
            if old >= a {
                0
            } else {
                old + 1
            }
        }
        (Atomic::Decrement, _) => {
            if old == 0 || old > a {
                a
            } else {
                old - 1
            }
        }
    })
}
