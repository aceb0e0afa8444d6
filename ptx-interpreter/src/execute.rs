//! Instructions that access only the registers of their own lanes.

use crate::integer::{insert_field, logic3};
use crate::operation::{Join, Operation};
use crate::types::{LANES, Lanes, low_bits};
use crate::warp::Warp;

fn each(f: impl Fn(usize) -> u64) -> Lanes {
    std::array::from_fn(f)
}

pub(crate) fn arithmetic(warp: &mut Warp, active: u32, operation: &Operation) -> bool {
    let mut out = [0; LANES];
    let d = match operation {
        Operation::One { f, d, a } => {
            f(warp.get(*a), &mut out);
            *d
        }
        Operation::Two { f, d, a, b } => {
            f(warp.get(*a), warp.get(*b), &mut out);
            *d
        }
        Operation::Three { f, d, a, b, c } => {
            f(warp.get(*a), warp.get(*b), warp.get(*c), &mut out);
            *d
        }
        Operation::Move { d, a, keep } => {
            out = *warp.get(*a);
            out.iter_mut().for_each(|v| *v &= keep);
            *d
        }
        Operation::Select { d, a, b, p, keep } => {
            let (a, b, p) = (warp.get(*a), warp.get(*b), warp.get(*p));
            out = each(|i| keep & if p[i] & 1 != 0 { a[i] } else { b[i] });
            *d
        }
        Operation::Compare { f, d, other, a, b, with } => {
            f(warp.get(*a), warp.get(*b), &mut out);
            let with = with.map(|(join, p, negated)| (join, warp.holds(p, negated)));
            let joined = |i: usize, value: u64| match with {
                None => value,
                Some((join, mask)) => {
                    let p = u64::from(mask >> i & 1);
                    match join {
                        Join::And => value & p,
                        Join::Or => value | p,
                        Join::Xor => value ^ p,
                    }
                }
            };
            if let Some(other) = other {
                let negated = each(|i| joined(i, out[i] ^ 1));
                warp.set(*other, active, &negated);
            }
            out = each(|i| joined(i, out[i]));
            *d
        }
        Operation::Set { f, d, a, b, yes } => {
            f(warp.get(*a), warp.get(*b), &mut out);
            out.iter_mut().for_each(|v| *v *= yes);
            *d
        }
        Operation::Pack { d, parts, bits } => {
            for (i, part) in parts.as_slice().iter().enumerate() {
                let part = warp.get(*part);
                for (out, part) in out.iter_mut().zip(part) {
                    *out |= (part & low_bits(*bits)) << (i as u32 * bits).min(63);
                }
            }
            *d
        }
        Operation::Unpack { parts, a, bits } => {
            let a = *warp.get(*a);
            for (i, part) in parts.as_slice().iter().enumerate() {
                let value = each(|lane| (a[lane] >> (i as u32 * bits).min(63)) & low_bits(*bits));
                warp.set(*part, active, &value);
            }
            return true;
        }
        Operation::Convert { conversion, d, a, keep } => {
            let a = warp.get(*a);
            out = each(|i| conversion.convert(a[i]) & keep);
            *d
        }
        Operation::ConvertPair { conversion, d, a, b } => {
            let (a, b) = (warp.get(*a), warp.get(*b));
            out = each(|i| conversion.pack(a[i], b[i]));
            *d
        }
        Operation::Insert { d, a, b, position, length, width } => {
            let (a, b) = (warp.get(*a), warp.get(*b));
            let (position, length) = (warp.get(*position), warp.get(*length));
            out = each(|i| insert_field(a[i], b[i], position[i] as u32, length[i] as u32, *width));
            *d
        }
        Operation::Logic3 { d, a, b, c, table } => {
            let (a, b, c) = (warp.get(*a), warp.get(*b), warp.get(*c));
            out = each(|i| u64::from(logic3(a[i] as u32, b[i] as u32, c[i] as u32, *table)));
            *d
        }
        _ => return false,
    };
    warp.set(d, active, &out);
    true
}
