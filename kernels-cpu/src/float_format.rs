//! Floating-point formats of weights: the value of every code, and rounding to codes.
//!
//! E4M3 has a sign bit, four exponent bits with bias 7 and three mantissa bits; no infinity, and one NaN of each sign:
//!
//! | codes (without the sign) | value |
//! |---|---|
//! | `0x00` | 0 |
//! | `0x01`–`0x07` | subnormal: `m · 2⁻⁹` |
//! | `0x08`–`0x7E` | `(1 + m/8) · 2^(e − 7)`, at most 448 |
//! | `0x7F` | NaN |
//!
//! A value rounds to the nearest code, ties to even; beyond ±448 it saturates, as in torch 2.12 and later. No value
//! becomes a NaN code. The sign of a zero is kept.
//!
//! E2M1 has four bits, stored here as one code per byte: bit 3 is the sign, and the codes 0 to 7 stand for 0, 0.5, 1,
//! 1.5, 2, 3, 4 and 6. There is no infinity and no NaN. Rounding is the same, and saturates at ±6.
//!
//! IQ4 has sixteen integers, closer together near zero, which GGUF's IQ4 types use. A value halfway between two rounds
//! up. No scheme is named after it.
//!
//! Scales may be powers of two, E8M0: [`e8m0_value`]. E5M2 can be read, but no scheme writes it: [`e5m2_value`].

/// A floating-point format of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FloatFormat {
    /// E4M3 without infinities (`float8_e4m3fn`).
    E4m3,
    /// E2M1, four bits (`float4_e2m1fn`).
    E2m1,
    /// The sixteen integers of GGUF's IQ4 types, four bits.
    Iq4,
}

impl FloatFormat {
    /// All formats that schemes name.
    pub const ALL: [Self; 2] = [Self::E4m3, Self::E2m1];

    /// The name in schemes: `f8` for E4M3, `f4` for E2M1. IQ4, which has none, is `iq4`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::E4m3 => "f8",
            Self::E2m1 => "f4",
            Self::Iq4 => "iq4",
        }
    }

    /// Bits per code.
    pub const fn bits(self) -> u8 {
        match self {
            Self::E4m3 => 8,
            Self::E2m1 | Self::Iq4 => 4,
        }
    }

    /// The largest finite value.
    pub const fn largest(self) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::E2m1 => 6.0,
            Self::Iq4 => 113.0,
        }
    }

    /// The value of every code; NaN for codes that are NaN or have more bits than the format.
    #[inline]
    pub fn values(self) -> &'static [f32; 256] {
        match self {
            Self::E4m3 => &E4M3_VALUES,
            Self::E2m1 => &E2M1_VALUES,
            Self::Iq4 => &IQ4_VALUES,
        }
    }

    pub(crate) const fn e2m1_values() -> [f32; 16] {
        let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let mut values = [0.0; 16];
        let mut code = 0;
        while code < 8 {
            values[code] = magnitudes[code];
            values[code | 8] = -magnitudes[code];
            code += 1;
        }
        values
    }

    /// The value of a code; NaN for codes that are not numbers.
    #[inline(always)]
    pub fn value(self, code: u8) -> f32 {
        self.values()[code as usize]
    }

    /// Whether the value of a code is a number.
    pub fn is_number(self, code: u8) -> bool {
        !self.value(code).is_nan()
    }

    /// The nearest value of the format, ties to even (in IQ4 up), saturating: `value(code(x))`. NaN becomes the largest
    /// value or, if its sign bit is set and the format is not IQ4, the negative of it.
    #[inline(always)]
    pub fn round(self, x: f32) -> f32 {
        match self {
            Self::E4m3 => e4m3_round(x),
            Self::E2m1 => e2m1_round(x),
            Self::Iq4 => f32::from(IQ4_LEVELS[usize::from(iq4_code(x))]),
        }
    }

    /// The code of the nearest value, ties to even (in IQ4 up), saturating. NaN becomes the code that
    /// [`round`](Self::round) defines; callers reject values that are not finite.
    #[inline(always)]
    pub fn code(self, x: f32) -> u8 {
        match self {
            Self::E4m3 => e4m3_code(x),
            Self::E2m1 => e2m1_code(x),
            Self::Iq4 => iq4_code(x),
        }
    }
}

/// The values of E4M3, from the definition.
static E4M3_VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = e4m3_value(code as u8);
        code += 1;
    }
    values
};

const fn e4m3_value(code: u8) -> f32 {
    let sign = (code as u32 & 0x80) << 24;
    let (exponent, mantissa) = (code as u32 >> 3 & 15, code as u32 & 7);
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        // 2⁻⁹ has the exponent 118 of an f32.
        (0, _) => mantissa as f32 * f32::from_bits(118 << 23),
        _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
    };
    f32::from_bits(magnitude.to_bits() | sign)
}

/// Returns the value that kernels use for a packed E4M3 code: [`FloatFormat::value`], except that the two NaN codes
/// decode to ±480, the value of their bits without the special case. Vector code decodes every code this way, and all
/// paths must match it.
#[inline(always)]
pub(crate) fn e4m3_packed(code: u8) -> f32 {
    match code & 0x7f {
        0x7f => f32::copysign(480.0, FloatFormat::E4m3.value(code)),
        _ => FloatFormat::E4m3.value(code),
    }
}

/// Returns the value that kernels use for a packed E8M0 scale: [`e8m0_value`], except that 255 (NaN) decodes to
/// infinity.
#[inline(always)]
pub(crate) fn e8m0_packed(code: u8) -> f32 {
    f32::from_bits((u32::from(code) << 23).max(1 << 22))
}

/// Returns the value that kernels use for a packed E4M3 group scale, times `2⁻⁸`: the bits of the code, read as an f16.
/// Scales have no sign; codes with a sign bit are invalid scales.
#[inline(always)]
pub(crate) fn e4m3_scale_packed(code: u8) -> f32 {
    half::f16::from_bits(u16::from(code) << 7).to_f32()
}

/// The mantissa bits of f32 minus those of E4M3.
const DROPPED: u32 = 20;
/// The smallest normal value, `2⁻⁶`.
const SMALLEST_NORMAL: f32 = 0.015_625;
/// `f32` values between `2¹⁴` and `2¹⁵` are spaced `2⁻⁹` apart, so adding this constant to a magnitude below
/// [`SMALLEST_NORMAL`] rounds it to an E4M3 subnormal, ties to even.
const SUBNORMALS: f32 = 16_384.0;

/// The magnitude of `x`, at most 448. NaN becomes 448.
#[inline(always)]
fn saturated(x: f32) -> f32 {
    let magnitude = x.abs();
    if magnitude < 448.0 { magnitude } else { 448.0 }
}

/// The bits of a magnitude from `2⁻⁶` to 448, rounded to three mantissa bits; the bits below those are not cleared.
#[inline(always)]
fn normal_bits(magnitude: f32) -> u32 {
    let bits = magnitude.to_bits();
    bits + ((1 << (DROPPED - 1)) - 1) + (bits >> DROPPED & 1)
}

#[inline(always)]
fn e4m3_round(x: f32) -> f32 {
    let magnitude = saturated(x);
    let subnormal = (magnitude + SUBNORMALS) - SUBNORMALS;
    let normal = f32::from_bits(normal_bits(magnitude) & !((1 << DROPPED) - 1));
    let rounded = if magnitude < SMALLEST_NORMAL { subnormal } else { normal };
    f32::from_bits(rounded.to_bits() | x.to_bits() & 1 << 31)
}

#[inline(always)]
fn e4m3_code(x: f32) -> u8 {
    let magnitude = saturated(x);
    // The low bits of the sum are the multiple of 2⁻⁹. If the magnitude rounds up to 2⁻⁶, this is 8, the code of 2⁻⁶.
    let subnormal = (magnitude + SUBNORMALS).to_bits() & 15;
    let normal = (normal_bits(magnitude) >> DROPPED).wrapping_sub(120 << 3);
    let code = if magnitude < SMALLEST_NORMAL { subnormal } else { normal };
    code as u8 | (x.to_bits() >> 24) as u8 & 0x80
}

static E2M1_VALUES: [f32; 256] = {
    let numbers = FloatFormat::e2m1_values();
    let mut values = [f32::NAN; 256];
    let mut code = 0;
    while code < 16 {
        values[code] = numbers[code];
        code += 1;
    }
    values
};

pub(crate) const IQ4_LEVELS: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

static IQ4_VALUES: [f32; 256] = {
    let mut values = [f32::NAN; 256];
    let mut code = 0;
    while code < 16 {
        values[code] = IQ4_LEVELS[code] as f32;
        code += 1;
    }
    values
};

fn iq4_code(x: f32) -> u8 {
    // NaN is not below any middle.
    let above = |pair: &&[i8]| !matches!(x.partial_cmp(&middle(pair)), Some(std::cmp::Ordering::Less));
    IQ4_LEVELS.windows(2).filter(above).count() as u8
}

fn middle(pair: &[i8]) -> f32 {
    (f32::from(pair[0]) + f32::from(pair[1])) / 2.0
}

/// The magnitude of `x`, at most 6 (also for NaN), and the spacing of E2M1's values there.
#[inline(always)]
fn e2m1_step(x: f32) -> (f32, f32) {
    let magnitude = x.abs();
    let magnitude = if magnitude < 6.0 { magnitude } else { 6.0 };
    let step = if magnitude < 4.0 { 1.0 } else { 2.0 };
    (magnitude, if magnitude < 2.0 { 0.5 } else { step })
}

/// `1.5 · 2²³`. Adding and then subtracting `step · MULTIPLES` rounds to a multiple of `step`, a power of two, with
/// ties to even.
const MULTIPLES: f32 = 12_582_912.0;

#[inline(always)]
fn e2m1_round(x: f32) -> f32 {
    let (magnitude, step) = e2m1_step(x);
    let magic = step * MULTIPLES;
    let rounded = (magnitude + magic) - magic;
    f32::from_bits(rounded.to_bits() | x.to_bits() & 1 << 31)
}

#[inline(always)]
fn e2m1_code(x: f32) -> u8 {
    let (magnitude, step) = e2m1_step(x);
    // The low bits of the sum are the multiple of `step`. The code exceeds it by 2 for magnitudes of at least 2, and by
    // 4 for magnitudes of at least 4.
    let steps = (magnitude + step * MULTIPLES).to_bits() & 15;
    let below = if magnitude < 4.0 { 2 } else { 4 };
    let below = if magnitude < 2.0 { 0 } else { below };
    (steps + below) as u8 | (x.to_bits() >> 28) as u8 & 8
}

/// Returns the value of an E8M0 code, `2^(code − 127)`; NaN for 255. Every value is exact in `f32`, in which 2⁻¹²⁷ is
/// subnormal.
#[inline]
pub const fn e8m0_value(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits((code as u32) << 23),
    }
}

/// The value of an E5M2 code, which is the high byte of an f16. `0x7C` is infinity, `0x7D` to `0x7F` are NaN.
#[inline]
pub fn e5m2_value(code: u8) -> f32 {
    half::f16::from_bits(u16::from(code) << 8).to_f32()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const E4M3: FloatFormat = FloatFormat::E4m3;
    #[test]
    fn the_levels_of_iq4_round_to_themselves_and_middles_up() {
        let iq4 = FloatFormat::Iq4;
        for (code, level) in IQ4_LEVELS.iter().enumerate() {
            assert_eq!((iq4.value(code as u8), iq4.code(f32::from(*level))), (f32::from(*level), code as u8));
        }
        for (below, pair) in IQ4_LEVELS.windows(2).enumerate() {
            let middle = middle(pair);
            let codes = [middle.next_down(), middle].map(|x| iq4.code(x));
            assert_eq!(codes, [below as u8, below as u8 + 1], "{middle}");
        }
        assert_eq!([-1e9, 1e9, f32::NAN].map(|x| iq4.code(x)), [0, 15, 15]);
        assert!(!iq4.is_number(16) && iq4.round(112.0) == 113.0);
    }

    const E2M1: FloatFormat = FloatFormat::E2m1;

    /// Computes the value in f64 from sign, exponent and mantissa, as an independent check of the table.
    fn definition(code: u8) -> Option<f64> {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match (exponent, code & 7) {
            (15, 7) => return None,
            (0, _) => mantissa / 8.0 * 2.0_f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2.0_f64.powi(exponent - 7),
        };
        Some(if code & 0x80 != 0 { -magnitude } else { magnitude })
    }

    #[test]
    fn every_code_has_the_value_of_the_format() {
        for code in 0..=255 {
            match definition(code) {
                None => assert!(!E4M3.is_number(code) && E4M3.value(code).is_nan()),
                Some(value) => {
                    assert_eq!(f64::from(E4M3.value(code)), value, "{code:#x}");
                    assert_eq!(E4M3.value(code).is_sign_negative(), code & 0x80 != 0);
                    assert_eq!(E4M3.code(E4M3.value(code)), code);
                    assert_eq!(E4M3.round(E4M3.value(code)).to_bits(), E4M3.value(code).to_bits());
                }
            }
        }
        assert_eq!((E4M3.value(0x7e), E4M3.value(0x08), E4M3.value(0x01)), (448.0, 0.015625, 0.001953125));
        assert_eq!([0x7f, 0xff].map(|code| E4M3.is_number(code)), [false; 2]);
    }

    #[test]
    fn halves_go_to_the_even_code() {
        for code in 0..0x7e {
            let (low, high) = (E4M3.value(code), E4M3.value(code + 1));
            let middle = (low + high) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            assert_eq!(E4M3.code(middle), even, "between {low} and {high}");
            assert_eq!(E4M3.code(-middle), even | 0x80);
            assert_eq!(E4M3.code(middle.next_down()), code);
            assert_eq!(E4M3.code(middle.next_up()), code + 1);
        }
    }

    #[test]
    fn beyond_the_largest_it_saturates() {
        for x in [448.0, 464.0, 464.1, 480.0, 1e9, f32::MAX, f32::INFINITY] {
            assert_eq!((E4M3.code(x), E4M3.code(-x)), (0x7e, 0xfe), "{x}");
            assert_eq!(E4M3.round(-x), -448.0);
        }
        assert!(E4M3.is_number(E4M3.code(f32::NAN)), "NaN has no code of its own");
        assert_eq!((E4M3.code(0.0), E4M3.code(-0.0), E4M3.code(-1e-9)), (0, 0x80, 0x80));
        assert_eq!(E4M3.code(f32::from_bits(1)), 0);
    }

    proptest! {
        #[test]
        fn the_nearest_of_all_values_is_found(bits in any::<u32>(), small in -600.0_f32..600.0) {
            for x in [f32::from_bits(bits), small, small * 1e-4] {
                if !x.is_finite() {
                    continue;
                }
                let code = E4M3.code(x);
                prop_assert!(E4M3.is_number(code));
                prop_assert_eq!(E4M3.value(code).to_bits(), E4M3.round(x).to_bits());
                let distance = |code: u8| (f64::from(E4M3.value(code)) - f64::from(x)).abs();
                let min = (0..=255).filter(|c| E4M3.is_number(*c)).map(distance).fold(f64::MAX, f64::min);
                prop_assert_eq!(distance(code), min, "{} became {}", x, E4M3.value(code));
            }
        }

        #[test]
        fn the_nearest_value_of_four_bits_is_found(bits in any::<u32>(), small in -8.0_f32..8.0) {
            for x in [f32::from_bits(bits), small] {
                if !x.is_finite() {
                    continue;
                }
                let code = E2M1.code(x);
                prop_assert!(code < 16);
                prop_assert_eq!(E2M1.value(code).to_bits(), E2M1.round(x).to_bits());
                let distance = |code: u8| (f64::from(E2M1.value(code)) - f64::from(x)).abs();
                let min = (0..16).map(distance).fold(f64::MAX, f64::min);
                prop_assert_eq!(distance(code), min, "{} became {}", x, E2M1.value(code));
            }
        }
    }

    #[test]
    fn four_bits() {
        for code in 0..=255_u8 {
            assert_eq!(E2M1.is_number(code), code < 16);
        }
        for code in 0..16 {
            // A sign bit, two exponent bits with bias 1, one mantissa bit.
            let (exponent, mantissa) = (i32::from(code >> 1 & 3), f32::from(code & 1));
            let magnitude = match exponent {
                0 => mantissa / 2.0,
                _ => (1.0 + mantissa / 2.0) * 2.0_f32.powi(exponent - 1),
            };
            let value = if code & 8 != 0 { -magnitude } else { magnitude };
            assert_eq!(E2M1.value(code).to_bits(), value.to_bits(), "{code}");
            assert_eq!(E2M1.code(value), code);
            assert_eq!(E2M1.round(value).to_bits(), value.to_bits());
        }
        for (x, code) in [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)] {
            let x: f32 = x;
            assert_eq!((E2M1.code(x), E2M1.code(-x)), (code, code | 8), "{x}");
            let [below, above] = [x.next_down(), x.next_up()].map(|x| E2M1.code(x));
            assert_eq!(above - below, 1, "{x} lies between two codes");
        }
        for x in [6.0, 7.0, 1e30, f32::INFINITY] {
            assert_eq!((E2M1.code(x), E2M1.code(-x), E2M1.round(-x)), (7, 15, -6.0));
        }
        assert_eq!((E2M1.code(-0.0), E2M1.code(-1e-9), E2M1.code(0.0)), (8, 8, 0));
        assert!(E2M1.is_number(E2M1.code(f32::NAN)));
    }

    #[test]
    fn powers_of_two_and_the_other_format_of_eight_bits() {
        for code in 0..255 {
            assert_eq!(f64::from(e8m0_value(code)), 2.0_f64.powi(i32::from(code) - 127));
        }
        assert!(e8m0_value(255).is_nan());
        for code in 0..=255_u8 {
            let (exponent, mantissa) = (i32::from(code >> 2 & 31), f64::from(code & 3));
            let magnitude = match exponent {
                31 if mantissa == 0.0 => f64::INFINITY,
                31 => f64::NAN,
                0 => mantissa / 4.0 * 2.0_f64.powi(-14),
                _ => (1.0 + mantissa / 4.0) * 2.0_f64.powi(exponent - 15),
            };
            let value = f64::from(e5m2_value(code));
            let expected = if code & 0x80 != 0 { -magnitude } else { magnitude };
            assert!(value == expected || value.is_nan() && expected.is_nan(), "{code:#x}");
        }
        assert_eq!(e5m2_value(0x7b), 57344.0);
    }
}
