//! Integer, logical and shift instructions, by name, over the lanes of a warp.

use crate::types::{Lane, One, Three, Two, Type, integers, one, three, two};

pub(crate) fn unary(name: &str, ty: Type) -> Option<One> {
    match (name, ty) {
        ("not", Type::Pred) => Some(one!(bool, |a| !a)),
        ("not", _) => integers!(ty, T => one!(T, |a| !a)),
        ("cnot", _) => integers!(ty, T => one!(T, |a| T::from(a == 0))),
        ("neg", _) => integers!(ty, T => one!(T, |a| a.wrapping_neg())),
        ("abs", Type::S16) => Some(one!(i16, |a| a.wrapping_abs())),
        ("abs", Type::S32) => Some(one!(i32, |a| a.wrapping_abs())),
        ("abs", Type::S64) => Some(one!(i64, |a| a.wrapping_abs())),
        ("popc", Type::B32) => Some(one!(u32, |a| a.count_ones())),
        ("popc", Type::B64) => Some(one!(u64, |a| a.count_ones())),
        ("clz", Type::B32) => Some(one!(u32, |a| a.leading_zeros())),
        ("clz", Type::B64) => Some(one!(u64, |a| a.leading_zeros())),
        ("brev", Type::B32) => Some(one!(u32, |a| a.reverse_bits())),
        ("brev", Type::B64) => Some(one!(u64, |a| a.reverse_bits())),
        // The position of the highest bit that differs from the sign bit; all ones if no bit differs.
        ("bfind", Type::U32) => Some(one!(u32, |a| if a == 0 { u32::MAX } else { 31 - a.leading_zeros() })),
        ("bfind", Type::U64) => Some(one!(u64, |a| if a == 0 { u32::MAX } else { 63 - a.leading_zeros() })),
        ("bfind", Type::S32) => Some(one!(i32, |a| {
            let a = (if a < 0 { !a } else { a }) as u32;
            if a == 0 { u32::MAX } else { 31 - a.leading_zeros() }
        })),
        _ => None,
    }
}

fn quotient(name: &str, ty: Type) -> Option<Two> {
    // The ISA does not specify division by zero; devices return all ones.
    macro_rules! unsigned {
        ($t:ty) => {
            match name {
                "div" => Some(two!($t, |a, b| a.checked_div(b).unwrap_or(<$t>::MAX))),
                _ => Some(two!($t, |a, b| a.checked_rem(b).unwrap_or(a))),
            }
        };
    }
    macro_rules! signed {
        ($t:ty) => {
            match name {
                "div" => Some(two!($t, |a, b| if b == 0 { -1 } else { a.wrapping_div(b) })),
                _ => Some(two!($t, |a, b| if b == 0 { a } else { a.wrapping_rem(b) })),
            }
        };
    }
    match ty {
        Type::U16 => unsigned!(u16),
        Type::U32 => unsigned!(u32),
        Type::U64 => unsigned!(u64),
        Type::S16 => signed!(i16),
        Type::S32 => signed!(i32),
        Type::S64 => signed!(i64),
        _ => None,
    }
}

/// Multiplications: `part` is `lo`, `hi` or `wide`.
pub(crate) fn multiply(part: &str, ty: Type) -> Option<Two> {
    match (part, ty) {
        ("lo", _) => integers!(ty, T => two!(T, |a, b| a.wrapping_mul(b))),
        ("wide", Type::U16) => Some(two!(u16, |a, b| u32::from(a) * u32::from(b))),
        ("wide", Type::S16) => Some(two!(i16, |a, b| i32::from(a) * i32::from(b))),
        ("wide", Type::U32) => Some(two!(u32, |a, b| u64::from(a) * u64::from(b))),
        ("wide", Type::S32) => Some(two!(i32, |a, b| i64::from(a) * i64::from(b))),
        ("hi", Type::U16) => Some(two!(u16, |a, b| ((u32::from(a) * u32::from(b)) >> 16) as u16)),
        ("hi", Type::S16) => Some(two!(i16, |a, b| ((i32::from(a) * i32::from(b)) >> 16) as i16)),
        ("hi", Type::U32) => Some(two!(u32, |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32)),
        ("hi", Type::S32) => Some(two!(i32, |a, b| ((i64::from(a) * i64::from(b)) >> 32) as i32)),
        ("hi", Type::U64) => Some(two!(u64, |a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64)),
        ("hi", Type::S64) => Some(two!(i64, |a, b| ((i128::from(a) * i128::from(b)) >> 64) as i64)),
        _ => None,
    }
}

/// `part` as in [`multiply`].
pub(crate) fn multiply_add(part: &str, ty: Type) -> Option<Three> {
    match (part, ty) {
        ("lo", _) => integers!(ty, T => three!(T, |a, b, c| a.wrapping_mul(b).wrapping_add(c))),
        ("wide", Type::U16) => {
            Some(three!(u16, u16, u32, |a, b, c| (u32::from(a) * u32::from(b)).wrapping_add(c)))
        }
        ("wide", Type::S16) => {
            Some(three!(i16, i16, i32, |a, b, c| (i32::from(a) * i32::from(b)).wrapping_add(c)))
        }
        ("wide", Type::U32) => {
            Some(three!(u32, u32, u64, |a, b, c| (u64::from(a) * u64::from(b)).wrapping_add(c)))
        }
        ("wide", Type::S32) => {
            Some(three!(i32, i32, i64, |a, b, c| (i64::from(a) * i64::from(b)).wrapping_add(c)))
        }
        ("hi", Type::U32) => {
            Some(three!(u32, |a, b, c| (((u64::from(a) * u64::from(b)) >> 32) as u32).wrapping_add(c)))
        }
        ("hi", Type::S32) => {
            Some(three!(i32, |a, b, c| (((i64::from(a) * i64::from(b)) >> 32) as i32).wrapping_add(c)))
        }
        ("hi", Type::U64) => {
            Some(three!(u64, |a, b, c| (((u128::from(a) * u128::from(b)) >> 64) as u64).wrapping_add(c)))
        }
        ("hi", Type::S64) => {
            Some(three!(i64, |a, b, c| (((i128::from(a) * i128::from(b)) >> 64) as i64).wrapping_add(c)))
        }
        _ => None,
    }
}

fn signed24(a: i32) -> i64 {
    i64::from(a << 8 >> 8)
}

fn unsigned24(a: u32) -> u64 {
    u64::from(a & 0xff_ffff)
}

pub(crate) fn binary(name: &str, ty: Type) -> Option<Two> {
    match (name, ty) {
        ("add", _) => integers!(ty, T => two!(T, |a, b| a.wrapping_add(b))),
        ("sub", _) => integers!(ty, T => two!(T, |a, b| a.wrapping_sub(b))),
        ("add.sat", Type::S32) => Some(two!(i32, |a, b| a.saturating_add(b))),
        ("sub.sat", Type::S32) => Some(two!(i32, |a, b| a.saturating_sub(b))),
        ("min", _) => integers!(ty, T => two!(T, |a, b| a.min(b))),
        ("max", _) => integers!(ty, T => two!(T, |a, b| a.max(b))),
        ("div" | "rem", _) => quotient(name, ty),
        ("and", Type::Pred) => Some(two!(bool, |a, b| a & b)),
        ("or", Type::Pred) => Some(two!(bool, |a, b| a | b)),
        ("xor", Type::Pred) => Some(two!(bool, |a, b| a ^ b)),
        ("and", _) => integers!(ty, T => two!(T, |a, b| a & b)),
        ("or", _) => integers!(ty, T => two!(T, |a, b| a | b)),
        ("xor", _) => integers!(ty, T => two!(T, |a, b| a ^ b)),
        // Amounts beyond the width shift out all bits.
        ("shl", _) => integers!(ty, T => two!(T, u32, |a, n| a.checked_shl(n).unwrap_or(0))),
        ("shr", _) => {
            integers!(ty, T => two!(T, u32, |a, n| a >> n.min(T::BITS - 1) >> u32::from(n >= T::BITS)))
        }
        ("mul24.lo", Type::U32) => Some(two!(u32, |a, b| (unsigned24(a) * unsigned24(b)) as u32)),
        ("mul24.lo", Type::S32) => Some(two!(i32, |a, b| (signed24(a) * signed24(b)) as i32)),
        ("mul24.hi", Type::U32) => Some(two!(u32, |a, b| ((unsigned24(a) * unsigned24(b)) >> 16) as u32)),
        ("mul24.hi", Type::S32) => Some(two!(i32, |a, b| ((signed24(a) * signed24(b)) >> 16) as i32)),
        _ => None,
    }
}

fn field(a: u64, pos: u32, len: u32, width: u32) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    if pos >= width || len == 0 { 0 } else { (a >> pos) & crate::types::low_bits(len.min(width)) }
}

/// Extracts a signed field; 0 if its length is 0. As the ISA defines, bits beyond the top are copies of the sign bit.
fn signed_field(a: i64, pos: u32, len: u32, width: u32) -> i64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    if len == 0 {
        return 0;
    }
    let top = (pos + len - 1).min(width - 1);
    let sign = a >> top & 1 != 0;
    let kept = top as i64 - pos as i64 + 1;
    let low = if kept > 0 { (a as u64 >> pos) & crate::types::low_bits(kept as u32) } else { 0 };
    let high = if sign { !crate::types::low_bits(kept.max(0) as u32) } else { 0 };
    (low | high) as i64
}

/// `bfi`: inserts `len` bits of `a` into `b` at `pos`.
pub(crate) fn insert_field(a: u64, b: u64, pos: u32, len: u32, width: u32) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    if pos >= width || len == 0 {
        return b & crate::types::low_bits(width);
    }
    let mask = crate::types::low_bits(len.min(width - pos)) << pos;
    ((a << pos) & mask) | (b & !mask & crate::types::low_bits(width))
}

/// `prmt` without a mode: every nibble of the selector selects a byte; with its high bit set, the byte's sign bit is
/// replicated.
pub(crate) fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
    let mut out = [0u8; 4];
    for (i, out) in out.iter_mut().enumerate() {
        let nibble = selector >> (4 * i) & 0xf;
        let byte = bytes[(nibble & 7) as usize];
        *out = if nibble & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 };
    }
    u32::from_le_bytes(out)
}

/// `prmt` with a mode: a permutation whose selector is computed from the low two bits.
fn permute_mode(mode: &str, a: u32, b: u32, c: u32) -> u32 {
    let n = c & 3;
    let selector = match mode {
        "f4e" => (0..4).map(|i| (n + i) << (4 * i)).sum(),
        "b4e" => (0..4).map(|i| ((8 + n - i) & 7) << (4 * i)).sum(),
        "rc8" => n * 0x1111,
        "ecl" => (0..4).map(|i: u32| i.max(n) << (4 * i)).sum(),
        "ecr" => (0..4).map(|i: u32| i.min(n) << (4 * i)).sum(),
        _ => (n & 1) * 0x2222 + 0x1010,
    };
    permute(a, b, selector)
}

fn dot4(a: u32, b: u32, a_signed: bool, b_signed: bool, c: u32) -> u32 {
    let value = |byte: u8, signed: bool| if signed { i32::from(byte as i8) } else { i32::from(byte) };
    let sum: i32 = (a.to_le_bytes().iter().zip(b.to_le_bytes()))
        .map(|(a, b)| value(*a, a_signed) * value(b, b_signed))
        .sum();
    c.wrapping_add(sum as u32)
}

fn dot2(a: u32, b: u32, a_signed: bool, b_signed: bool, high: bool, c: u32) -> u32 {
    let half = |i: u32| {
        let v = (a >> (16 * i)) as u16;
        if a_signed { i32::from(v as i16) } else { i32::from(v) }
    };
    let byte = |i: u32| {
        let v = (b >> (8 * i + 16 * u32::from(high))) as u8;
        if b_signed { i32::from(v as i8) } else { i32::from(v) }
    };
    c.wrapping_add((half(0) * byte(0)) as u32).wrapping_add((half(1) * byte(1)) as u32)
}

/// Instructions with three sources; `types` are those of the opcode, in order.
pub(crate) fn ternary(name: &str, types: &[Type]) -> Option<Three> {
    let ty = *types.first()?;
    match (name, ty) {
        ("bfe", Type::U32) => Some(three!(u32, |a, p, n| field(a.into(), p, n, 32) as u32)),
        ("bfe", Type::U64) => Some(three!(u64, u32, u32, |a, p, n| field(a, p, n, 64))),
        ("bfe", Type::S32) => Some(three!(i32, u32, u32, |a, p, n| signed_field(a.into(), p, n, 32) as i32)),
        ("bfe", Type::S64) => Some(three!(i64, u32, u32, |a, p, n| signed_field(a, p, n, 64))),
        ("prmt", Type::B32) => Some(three!(u32, |a, b, c| permute(a, b, c))),
        ("prmt.f4e", Type::B32) => Some(three!(u32, |a, b, c| permute_mode("f4e", a, b, c))),
        ("prmt.b4e", Type::B32) => Some(three!(u32, |a, b, c| permute_mode("b4e", a, b, c))),
        ("prmt.rc8", Type::B32) => Some(three!(u32, |a, b, c| permute_mode("rc8", a, b, c))),
        ("prmt.ecl", Type::B32) => Some(three!(u32, |a, b, c| permute_mode("ecl", a, b, c))),
        ("prmt.ecr", Type::B32) => Some(three!(u32, |a, b, c| permute_mode("ecr", a, b, c))),
        ("prmt.rc16", Type::B32) => Some(three!(u32, |a, b, c| permute_mode("rc16", a, b, c))),
        // The funnel shift applies to the 64-bit value b:a.
        ("shf.l.wrap", Type::B32) => {
            Some(three!(u32, |a, b, n| (((u64::from(b) << 32 | u64::from(a)) << (n & 31)) >> 32) as u32))
        }
        ("shf.r.wrap", Type::B32) => {
            Some(three!(u32, |a, b, n| ((u64::from(b) << 32 | u64::from(a)) >> (n & 31)) as u32))
        }
        ("shf.l.clamp", Type::B32) => {
            Some(three!(u32, |a, b, n| (((u64::from(b) << 32 | u64::from(a)) << n.min(32)) >> 32) as u32))
        }
        ("shf.r.clamp", Type::B32) => {
            Some(three!(u32, |a, b, n| ((u64::from(b) << 32 | u64::from(a)) >> n.min(32)) as u32))
        }
        ("sad", Type::U32) => Some(three!(u32, |a, b, c| c.wrapping_add(a.abs_diff(b)))),
        ("sad", Type::S32) => Some(three!(i32, |a, b, c| c.wrapping_add(a.abs_diff(b) as i32))),
        ("mad24.lo", Type::U32) => {
            Some(three!(u32, |a, b, c| ((unsigned24(a) * unsigned24(b)) as u32).wrapping_add(c)))
        }
        ("mad24.lo", Type::S32) => {
            Some(three!(i32, |a, b, c| ((signed24(a) * signed24(b)) as i32).wrapping_add(c)))
        }
        ("dp4a", _) => Some(match (ty, types.get(1)?) {
            (Type::U32, Type::U32) => three!(u32, |a, b, c| dot4(a, b, false, false, c)),
            (Type::U32, Type::S32) => three!(u32, |a, b, c| dot4(a, b, false, true, c)),
            (Type::S32, Type::U32) => three!(u32, |a, b, c| dot4(a, b, true, false, c)),
            (Type::S32, Type::S32) => three!(u32, |a, b, c| dot4(a, b, true, true, c)),
            _ => return None,
        }),
        ("dp2a.lo", _) => Some(match (ty, types.get(1)?) {
            (Type::U32, Type::U32) => three!(u32, |a, b, c| dot2(a, b, false, false, false, c)),
            (Type::U32, Type::S32) => three!(u32, |a, b, c| dot2(a, b, false, true, false, c)),
            (Type::S32, Type::U32) => three!(u32, |a, b, c| dot2(a, b, true, false, false, c)),
            (Type::S32, Type::S32) => three!(u32, |a, b, c| dot2(a, b, true, true, false, c)),
            _ => return None,
        }),
        ("dp2a.hi", _) => Some(match (ty, types.get(1)?) {
            (Type::U32, Type::U32) => three!(u32, |a, b, c| dot2(a, b, false, false, true, c)),
            (Type::U32, Type::S32) => three!(u32, |a, b, c| dot2(a, b, false, true, true, c)),
            (Type::S32, Type::U32) => three!(u32, |a, b, c| dot2(a, b, true, false, true, c)),
            (Type::S32, Type::S32) => three!(u32, |a, b, c| dot2(a, b, true, true, true, c)),
            _ => return None,
        }),
        _ => None,
    }
}

/// `lop3`: for each bit position, selects bit `4a + 2b + c` of the table.
pub(crate) fn logic3(a: u32, b: u32, c: u32, table: u8) -> u32 {
    let mut out = 0;
    for row in 0..8u8 {
        if table >> row & 1 != 0 {
            let a = if row & 4 != 0 { a } else { !a };
            let b = if row & 2 != 0 { b } else { !b };
            let c = if row & 1 != 0 { c } else { !c };
            out |= a & b & c;
        }
    }
    out
}

/// Bit types and predicates support only equality.
pub(crate) fn compare(name: &str, ty: Type) -> Option<Two> {
    match name {
        "eq" => integers!(ty, T => two!(T, |a, b| a == b)),
        "ne" => integers!(ty, T => two!(T, |a, b| a != b)),
        "lt" | "lo" => integers!(ty, T => two!(T, |a, b| a < b)),
        "le" | "ls" => integers!(ty, T => two!(T, |a, b| a <= b)),
        "gt" | "hi" => integers!(ty, T => two!(T, |a, b| a > b)),
        "ge" | "hs" => integers!(ty, T => two!(T, |a, b| a >= b)),
        _ => None,
    }
}

pub(crate) fn extend(value: u64, bits: u32, signed: bool) -> u64 {
    let value = value & crate::types::low_bits(bits);
    if signed && bits < 64 && value >> (bits - 1) & 1 != 0 {
        value | !crate::types::low_bits(bits)
    } else {
        Lane::put(value)
    }
}
