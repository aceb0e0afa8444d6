//! Rounding of f64 values to narrower formats, in each direction of PTX.
//!
//! Sums and products of narrow values are computed in f64 and then rounded. An inexact sum in f64 is rounded to odd, so
//! that the second rounding gives the correct result.

use half::{bf16, f16};

/// A rounding direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// To the nearest, ties to even.
    Nearest,
    /// To the nearest, ties away from zero.
    NearestAway,
    /// Toward zero.
    Zero,
    /// Toward minus infinity.
    Down,
    /// Toward plus infinity.
    Up,
}

impl Direction {
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "rn" | "rni" => Self::Nearest,
            "rna" => Self::NearestAway,
            "rz" | "rzi" => Self::Zero,
            "rm" | "rmi" => Self::Down,
            "rp" | "rpi" => Self::Up,
            _ => return None,
        })
    }

    pub fn integral(self, x: f64) -> f64 {
        match self {
            Self::Nearest => x.round_ties_even(),
            Self::NearestAway => x.round(),
            Self::Zero => x.trunc(),
            Self::Down => x.floor(),
            Self::Up => x.ceil(),
        }
    }
}

/// Replaces subnormal values by zero with the same sign.
pub(crate) fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// Replaces any NaN by 0x7fffffff, the NaN that devices return.
pub(crate) fn canonical(x: f32) -> f32 {
    // By bits, because the compiler may replace one NaN by another.
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { 0x7fff_ffff } else { bits })
}

/// Returns the sum rounded to odd: if it is not exact, its last bit is set.
pub(crate) fn odd_sum(a: f64, b: f64) -> f64 {
    let sum = a + b;
    if !sum.is_finite() {
        return sum;
    }
    // Knuth's two-sum gives the exact error of the sum.
    let part = sum - a;
    let error = (a - (sum - part)) + (b - part);
    let bits = sum.to_bits();
    if error == 0.0 || bits & 1 == 1 {
        return sum;
    }
    let away = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if away { bits + 1 } else { bits - 1 })
}

pub(crate) fn to_f32(x: f64, direction: Direction) -> f32 {
    let near = x as f32;
    if x.is_nan() || x.is_infinite() || f64::from(near) == x {
        return near;
    }
    let above = f64::from(near) > x;
    match direction {
        Direction::Nearest | Direction::NearestAway => near,
        Direction::Down if above => near.next_down(),
        Direction::Up if !above => near.next_up(),
        Direction::Zero if above && x > 0.0 => near.next_down(),
        Direction::Zero if !above && x < 0.0 => near.next_up(),
        _ => near,
    }
}

/// Rounds to f32 with the last bit set if the result is not exact, for a second rounding.
fn odd_f32(x: f64) -> f32 {
    let cut = to_f32(x, Direction::Zero);
    if x.is_nan() || f64::from(cut) == x { cut } else { f32::from_bits(cut.to_bits() | 1) }
}

macro_rules! narrow {
    ($name:ident, $t:ty, $nan:literal) => {
        pub(crate) fn $name(x: f64, direction: Direction) -> $t {
            if x.is_nan() {
                return <$t>::from_bits($nan);
            }
            let near = <$t>::from_f32(odd_f32(x));
            let back = near.to_f64();
            if back == x || x.is_infinite() {
                return near;
            }
            // Neighbouring values have neighbouring bits.
            let bits = near.to_bits();
            let toward_zero = <$t>::from_bits(bits.wrapping_sub(1));
            let away = <$t>::from_bits(bits + 1);
            let is_zero = bits & 0x7fff == 0;
            match direction {
                Direction::Down if back > x => {
                    if is_zero {
                        <$t>::from_bits(0x8001)
                    } else if x > 0.0 {
                        toward_zero
                    } else {
                        away
                    }
                }
                Direction::Up if back < x => {
                    if is_zero {
                        <$t>::from_bits(0x0001)
                    } else if x > 0.0 {
                        away
                    } else {
                        toward_zero
                    }
                }
                Direction::Zero if back.abs() > x.abs() => toward_zero,
                _ => near,
            }
        }
    };
}
narrow!(to_f16, f16, 0x7fff);
narrow!(to_bf16, bf16, 0x7fff);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directions_enclose_every_value() {
        let mut x = 1.0e-9f64;
        while x < 1.0e6 {
            for x in [x, -x, x * 1.0001] {
                let (down, up) = (to_f16(x, Direction::Down), to_f16(x, Direction::Up));
                assert!(down.to_f64() <= x && x <= up.to_f64(), "{x}");
                let exact = down == up;
                assert_eq!(exact, to_f16(x, Direction::Nearest).to_f64() == x, "{x}");
                assert_eq!(to_f16(x, Direction::Zero), if x > 0.0 { down } else { up }, "{x}");
                let (down, up) = (to_bf16(x, Direction::Down), to_bf16(x, Direction::Up));
                assert!(down.to_f64() <= x && x <= up.to_f64(), "{x}");
                assert!(f64::from(to_f32(x, Direction::Down)) <= x);
                assert!(f64::from(to_f32(x, Direction::Up)) >= x);
            }
            x *= 1.37;
        }
    }

    #[test]
    fn a_tie_with_a_tail_is_no_tie() {
        let tie = 1.0 + 2f64.powi(-11);
        assert_eq!(to_f16(tie, Direction::Nearest).to_f64(), 1.0);
        assert_eq!(to_f16(odd_sum(tie, 1e-30), Direction::Nearest).to_f64(), 1.0 + 2f64.powi(-10));
        assert_eq!(to_f16(odd_sum(tie, -1e-30), Direction::Nearest).to_f64(), 1.0);
    }
}
