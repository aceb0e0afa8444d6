//! Floating-point instructions, by name, over the lanes of a warp.
//!
//! `.rn` results follow IEEE 754. Approximate functions return the f64 result rounded once to f32; a device may differ
//! from it within the error that the ISA states.

use half::{bf16, f16};

use crate::rounding::{Direction, canonical, flush, odd_sum, to_bf16, to_f16, to_f32};
use crate::types::{One, Pair, Three, Two, Type, one, three, two};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Modifiers {
    /// `.ftz`: subnormal sources and results are zeros.
    pub ftz: bool,
    /// `.sat`: results are clamped to the range 0 to 1, NaN to 0.
    pub sat: bool,
    /// `.relu`: negative results, `-0` and NaN become 0.
    pub relu: bool,
    /// `.NaN`: minima and maxima propagate NaN.
    pub nan: bool,
    pub direction: Direction,
}

fn saturate(x: f32) -> f32 {
    if x > 0.0 { x.min(1.0) } else { 0.0 }
}

/// If only one is NaN, the other is returned; `-0` is below `+0`.
fn smaller(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, true) => canonical(a),
        (true, false) => b,
        (false, true) => a,
        _ if a == b => f32::from_bits(a.to_bits() | b.to_bits()),
        _ => a.min(b),
    }
}

fn larger(a: f32, b: f32) -> f32 {
    -smaller(-a, -b)
}

fn smaller_f64(a: f64, b: f64) -> f64 {
    if a == b { if a.is_sign_negative() { a } else { b } } else { a.min(b) }
}

/// Selects the function for the `.ftz` and `.sat` modifiers of an f32 instruction.
macro_rules! of_f32 {
    ($mods:expr, $make:ident, |$($a:ident),*| $e:expr) => {{
        let modifiers: Modifiers = $mods;
        match (modifiers.ftz, modifiers.sat) {
            (false, false) => $make!(f32, |$($a),*| canonical($e)),
            (true, false) => $make!(f32, |$($a),*| { $(let $a = flush($a);)* flush(canonical($e)) }),
            (false, true) => $make!(f32, |$($a),*| saturate($e)),
            (true, true) => $make!(f32, |$($a),*| { $(let $a = flush($a);)* flush(saturate($e)) }),
        }
    }};
}

pub(crate) fn unary(name: &str, ty: Type, modifiers: Modifiers) -> Option<One> {
    match (name, ty) {
        ("neg", Type::F32) if modifiers.ftz => Some(one!(f32, |a| -flush(a))),
        ("abs", Type::F32) if modifiers.ftz => Some(one!(f32, |a| flush(a).abs())),
        ("neg", Type::F32) => Some(one!(f32, |a| -a)),
        ("abs", Type::F32) => Some(one!(f32, |a| a.abs())),
        ("neg", Type::F64) => Some(one!(f64, |a| -a)),
        ("abs", Type::F64) => Some(one!(f64, |a| a.abs())),
        ("neg", Type::F16 | Type::Bf16) => Some(one!(u16, |a| a ^ 0x8000)),
        ("abs", Type::F16 | Type::Bf16) => Some(one!(u16, |a| a & 0x7fff)),
        ("neg", Type::F16x2 | Type::Bf16x2) => Some(one!(u32, |a| a ^ 0x8000_8000)),
        ("abs", Type::F16x2 | Type::Bf16x2) => Some(one!(u32, |a| a & 0x7fff_7fff)),
        ("ex2", Type::F32) => Some(of_f32!(modifiers, one, |a| f64::from(a).exp2() as f32)),
        ("lg2", Type::F32) => Some(of_f32!(modifiers, one, |a| f64::from(a).log2() as f32)),
        ("rsqrt", Type::F32) => Some(of_f32!(modifiers, one, |a| (1.0 / f64::from(a).sqrt()) as f32)),
        ("sin", Type::F32) => Some(of_f32!(modifiers, one, |a| f64::from(a).sin() as f32)),
        ("cos", Type::F32) => Some(of_f32!(modifiers, one, |a| f64::from(a).cos() as f32)),
        ("tanh", Type::F32) => Some(of_f32!(modifiers, one, |a| f64::from(a).tanh() as f32)),
        ("rcp", Type::F32) if modifiers.direction == Direction::Nearest => {
            Some(of_f32!(modifiers, one, |a| 1.0 / a))
        }
        ("sqrt", Type::F32) if modifiers.direction == Direction::Nearest => {
            Some(of_f32!(modifiers, one, |a| a.sqrt()))
        }
        ("rcp", Type::F64) => Some(one!(f64, |a| 1.0 / a)),
        ("sqrt", Type::F64) => Some(one!(f64, |a| a.sqrt())),
        ("rsqrt", Type::F64) => Some(one!(f64, |a| 1.0 / a.sqrt())),
        ("ex2", Type::F16) => Some(one!(f16, |a| to_f16(a.to_f64().exp2(), Direction::Nearest))),
        ("tanh", Type::F16) => Some(one!(f16, |a| to_f16(a.to_f64().tanh(), Direction::Nearest))),
        ("ex2", Type::F16x2) => Some(one!(Pair<f16>, |a| Pair(
            to_f16(a.0.to_f64().exp2(), Direction::Nearest),
            to_f16(a.1.to_f64().exp2(), Direction::Nearest)
        ))),
        ("tanh", Type::F16x2) => Some(one!(Pair<f16>, |a| Pair(
            to_f16(a.0.to_f64().tanh(), Direction::Nearest),
            to_f16(a.1.to_f64().tanh(), Direction::Nearest)
        ))),
        ("ex2", Type::Bf16) => Some(one!(bf16, |a| to_bf16(a.to_f64().exp2(), Direction::Nearest))),
        ("tanh", Type::Bf16) => Some(one!(bf16, |a| to_bf16(a.to_f64().tanh(), Direction::Nearest))),
        _ => None,
    }
}

macro_rules! directed {
    ($mods:expr, $make:ident, |$($a:ident),*| $near:expr, $exact:expr) => {
        Some(match $mods.direction {
            Direction::Nearest | Direction::NearestAway => of_f32!($mods, $make, |$($a),*| $near),
            Direction::Zero => of_f32!($mods, $make, |$($a),*| { $(let $a = f64::from($a);)* to_f32($exact, Direction::Zero) }),
            Direction::Down => of_f32!($mods, $make, |$($a),*| { $(let $a = f64::from($a);)* to_f32($exact, Direction::Down) }),
            Direction::Up => of_f32!($mods, $make, |$($a),*| { $(let $a = f64::from($a);)* to_f32($exact, Direction::Up) }),
        })
    };
}

/// Applies `.sat` or `.relu` to a 16-bit result.
macro_rules! finish {
    ($t:ty, $mods:expr, $make:ident, |$($a:ident),*| $e:expr) => {{
        let modifiers: Modifiers = $mods;
        let zero = <$t>::from_bits(0);
        let _ = zero;
        match (modifiers.sat, modifiers.relu) {
            (false, false) => $make!($t, |$($a),*| $e),
            (true, _) => $make!($t, |$($a),*| <$t>::from_f32(saturate(($e).to_f32()))),
            (false, true) => $make!($t, |$($a),*| {
                let v: $t = $e;
                if v.to_f32() > 0.0 { v } else { <$t>::from_bits(0) }
            }),
        }
    }};
}

macro_rules! finish_pair {
    ($t:ty, $mods:expr, $make:ident, |$($a:ident),*| $e:expr) => {{
        let modifiers: Modifiers = $mods;
        match (modifiers.sat, modifiers.relu) {
            (false, false) => $make!(Pair<$t>, |$($a),*| Pair({ $(let $a = $a.0;)* $e }, { $(let $a = $a.1;)* $e })),
            (true, _) => $make!(Pair<$t>, |$($a),*| Pair(
                <$t>::from_f32(saturate({ $(let $a = $a.0;)* $e }.to_f32())),
                <$t>::from_f32(saturate({ $(let $a = $a.1;)* $e }.to_f32())))),
            (false, true) => $make!(Pair<$t>, |$($a),*| {
                let v: Pair<$t> = Pair({ $(let $a = $a.0;)* $e }, { $(let $a = $a.1;)* $e });
                let keep = |v: $t| if v.to_f32() > 0.0 { v } else { <$t>::from_bits(0) };
                Pair(keep(v.0), keep(v.1))
            }),
        }
    }};
}

/// `$round` is the function that rounds to the format.
macro_rules! halves {
    ($ty:expr, $mods:expr, $make:ident, $round:ident, |$($a:ident),*| $e:expr) => {
        match $ty {
            Type::F16 => { use to_f16 as $round; Some(finish!(f16, $mods, $make, |$($a),*| $e)) }
            Type::Bf16 => { use to_bf16 as $round; Some(finish!(bf16, $mods, $make, |$($a),*| $e)) }
            Type::F16x2 => { use to_f16 as $round; Some(finish_pair!(f16, $mods, $make, |$($a),*| $e)) }
            Type::Bf16x2 => { use to_bf16 as $round; Some(finish_pair!(bf16, $mods, $make, |$($a),*| $e)) }
            _ => None,
        }
    };
}

fn extreme<T>(a: T, b: T, to: fn(T) -> f32, from: fn(f32) -> T, high: bool, nan: bool) -> T
where
    T: Copy,
{
    let (x, y) = (to(a), to(b));
    if nan && (x.is_nan() || y.is_nan()) {
        return from(f32::NAN);
    }
    from(if high { larger(x, y) } else { smaller(x, y) })
}

fn narrow_extreme(high: bool, ty: Type, nan: bool) -> Option<Two> {
    macro_rules! pick {
        ($t:ty, $to:expr, $from:expr) => {
            match (high, nan) {
                (false, false) => two!($t, |a, b| extreme(a, b, $to, $from, false, false)),
                (false, true) => two!($t, |a, b| extreme(a, b, $to, $from, false, true)),
                (true, false) => two!($t, |a, b| extreme(a, b, $to, $from, true, false)),
                (true, true) => two!($t, |a, b| extreme(a, b, $to, $from, true, true)),
            }
        };
    }
    macro_rules! pair {
        ($t:ty, $to:expr, $from:expr, $high:literal, $nan:literal) => {
            two!(Pair<$t>, |a, b| Pair(
                extreme(a.0, b.0, $to, $from, $high, $nan),
                extreme(a.1, b.1, $to, $from, $high, $nan)
            ))
        };
    }
    macro_rules! pairs {
        ($t:ty, $to:expr, $from:expr) => {
            match (high, nan) {
                (false, false) => pair!($t, $to, $from, false, false),
                (false, true) => pair!($t, $to, $from, false, true),
                (true, false) => pair!($t, $to, $from, true, false),
                (true, true) => pair!($t, $to, $from, true, true),
            }
        };
    }
    // Devices return a NaN in which all bits except the sign are set in the 16-bit formats.
    fn half(x: f32) -> f16 {
        to_f16(x.into(), Direction::Nearest)
    }
    fn brain(x: f32) -> bf16 {
        to_bf16(x.into(), Direction::Nearest)
    }
    Some(match ty {
        Type::F16 => pick!(f16, f16::to_f32, half),
        Type::Bf16 => pick!(bf16, bf16::to_f32, brain),
        Type::F16x2 => pairs!(f16, f16::to_f32, half),
        Type::Bf16x2 => pairs!(bf16, bf16::to_f32, brain),
        _ => return None,
    })
}

pub(crate) fn binary(name: &str, ty: Type, m: Modifiers) -> Option<Two> {
    let near = m.direction == Direction::Nearest;
    match (name, ty) {
        ("add", Type::F32) => directed!(m, two, |a, b| a + b, odd_sum(a, b)),
        ("sub", Type::F32) => directed!(m, two, |a, b| a - b, odd_sum(a, -b)),
        ("mul", Type::F32) => directed!(m, two, |a, b| a * b, a * b),
        ("div", Type::F32) if near => Some(of_f32!(m, two, |a, b| a / b)),
        ("min", Type::F32) if m.nan => {
            Some(of_f32!(m, two, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { smaller(a, b) }))
        }
        ("max", Type::F32) if m.nan => {
            Some(of_f32!(m, two, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { larger(a, b) }))
        }
        ("min", Type::F32) => Some(of_f32!(m, two, |a, b| smaller(a, b))),
        ("max", Type::F32) => Some(of_f32!(m, two, |a, b| larger(a, b))),
        ("add", Type::F64) if near => Some(two!(f64, |a, b| a + b)),
        ("sub", Type::F64) if near => Some(two!(f64, |a, b| a - b)),
        ("mul", Type::F64) if near => Some(two!(f64, |a, b| a * b)),
        ("div", Type::F64) if near => Some(two!(f64, |a, b| a / b)),
        ("min", Type::F64) => Some(two!(f64, |a, b| smaller_f64(a, b))),
        ("max", Type::F64) => Some(two!(f64, |a, b| -smaller_f64(-a, -b))),
        ("copysign", Type::F32) => Some(two!(f32, |a, b| b.copysign(a))),
        ("copysign", Type::F64) => Some(two!(f64, |a, b| b.copysign(a))),
        // A sum of two bf16 can need more than the 53 bits of f64; products of 16-bit floats never do.
        ("add", _) if near => {
            halves!(ty, m, two, round, |a, b| round(odd_sum(a.to_f64(), b.to_f64()), Direction::Nearest))
        }
        ("sub", _) if near => {
            halves!(ty, m, two, round, |a, b| round(odd_sum(a.to_f64(), -b.to_f64()), Direction::Nearest))
        }
        ("mul", _) if near => {
            halves!(ty, m, two, round, |a, b| round(a.to_f64() * b.to_f64(), Direction::Nearest))
        }
        ("min", _) => narrow_extreme(false, ty, m.nan),
        ("max", _) => narrow_extreme(true, ty, m.nan),
        _ => None,
    }
}

/// `fma` and the float `mad`.
pub(crate) fn multiply_add(ty: Type, m: Modifiers) -> Option<Three> {
    match ty {
        Type::F32 => directed!(m, three, |a, b, c| a.mul_add(b, c), odd_sum(a * b, c)),
        Type::F64 if m.direction == Direction::Nearest => Some(three!(f64, |a, b, c| a.mul_add(b, c))),
        _ => halves!(ty, m, three, round, |a, b, c| round(
            odd_sum(a.to_f64() * b.to_f64(), c.to_f64()),
            Direction::Nearest
        )),
    }
}

/// Comparisons of `setp` and `set`. Names that end with `u` are true for NaN.
// `a < b || a > b` cannot be replaced by `a != b`, which is true for NaN.
#[allow(clippy::double_comparisons)]
pub(crate) fn compare(name: &str, ty: Type, ftz: bool) -> Option<Two> {
    macro_rules! compare_as {
        ($t:ty, $read:expr) => {
            match name {
                "eq" => two!($t, |a, b| $read(a) == $read(b)),
                "ne" => two!($t, |a, b| {
                    let (a, b) = ($read(a), $read(b));
                    a < b || a > b
                }),
                "lt" => two!($t, |a, b| $read(a) < $read(b)),
                "le" => two!($t, |a, b| $read(a) <= $read(b)),
                "gt" => two!($t, |a, b| $read(a) > $read(b)),
                "ge" => two!($t, |a, b| $read(a) >= $read(b)),
                "equ" => two!($t, |a, b| {
                    let (a, b) = ($read(a), $read(b));
                    a == b || a.is_nan() || b.is_nan()
                }),
                "neu" => two!($t, |a, b| $read(a) != $read(b)),
                "ltu" => two!($t, |a, b| {
                    let (a, b) = ($read(a), $read(b));
                    a < b || a.is_nan() || b.is_nan()
                }),
                "leu" => two!($t, |a, b| {
                    let (a, b) = ($read(a), $read(b));
                    a <= b || a.is_nan() || b.is_nan()
                }),
                "gtu" => two!($t, |a, b| {
                    let (a, b) = ($read(a), $read(b));
                    a > b || a.is_nan() || b.is_nan()
                }),
                "geu" => two!($t, |a, b| {
                    let (a, b) = ($read(a), $read(b));
                    a >= b || a.is_nan() || b.is_nan()
                }),
                "num" => two!($t, |a, b| !($read(a).is_nan() || $read(b).is_nan())),
                "nan" => two!($t, |a, b| $read(a).is_nan() || $read(b).is_nan()),
                _ => return None,
            }
        };
    }
    fn same<T>(x: T) -> T {
        x
    }
    Some(match ty {
        Type::F32 if ftz => compare_as!(f32, flush),
        Type::F32 => compare_as!(f32, same),
        Type::F64 => compare_as!(f64, same),
        Type::F16 => compare_as!(f16, f16::to_f32),
        Type::Bf16 => compare_as!(bf16, bf16::to_f32),
        _ => return None,
    })
}
