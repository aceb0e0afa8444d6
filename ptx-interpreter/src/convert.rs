//! `cvt`: conversions between integers and floats, with rounding, saturation and packing of two values.

use half::{bf16, f16};

use crate::integer::extend;
use crate::rounding::{Direction, canonical, flush, to_bf16, to_f16, to_f32};
use crate::types::{Lane, One, Pair, Two, Type, low_bits, one, two};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Conversion {
    pub to: Type,
    pub from: Type,
    pub direction: Option<Direction>,
    /// Whether the result is rounded to an integral value (`rni`, …).
    pub integral: bool,
    pub ftz: bool,
    pub sat: bool,
    pub relu: bool,
}

fn is_float(ty: Type) -> bool {
    matches!(ty, Type::F16 | Type::Bf16 | Type::F32 | Type::F64)
}

fn is_integer(ty: Type) -> bool {
    matches!(ty, Type::U8 | Type::U16 | Type::U32 | Type::U64 | Type::S8 | Type::S16 | Type::S32 | Type::S64)
}

impl Conversion {
    /// Whether [`convert`](Self::convert) supports this conversion.
    pub fn is_known(&self) -> bool {
        let known = |ty| is_float(ty) || is_integer(ty);
        known(self.to) && known(self.from)
    }

    /// A function over all lanes, for frequent conversions. It does not extend signs, so a signed result needs a
    /// register as wide as its type.
    pub fn fast(&self) -> Option<One> {
        if self.sat || self.ftz || self.relu {
            return None;
        }
        let near = self.direction == Some(Direction::Nearest) && !self.integral;
        Some(match (self.to, self.from) {
            (Type::U64, Type::U32) => one!(u32, |a| a),
            (Type::U32 | Type::S32, Type::U64 | Type::S64 | Type::U32 | Type::S32) => one!(u32, |a| a),
            (Type::S64, Type::S32) => one!(i32, |a| i64::from(a)),
            (Type::U32 | Type::U64 | Type::S32, Type::U16) => one!(u16, |a| a),
            (Type::U16, Type::U32 | Type::U64) => one!(u16, |a| a),
            (Type::F32, Type::F16) => one!(f16, |a| canonical(a.to_f32())),
            (Type::F32, Type::Bf16) => one!(bf16, |a| canonical(a.to_f32())),
            (Type::F32, Type::S32) if near => one!(i32, |a| a as f32),
            (Type::F32, Type::U32) if near => one!(u32, |a| a as f32),
            _ => return None,
        })
    }

    /// The result is extended to 64 bits according to its type.
    pub fn convert(&self, bits: u64) -> u64 {
        if is_integer(self.from) {
            let value = extend(bits, self.from.bits(), self.from.is_signed());
            if is_integer(self.to) { self.integer_to_integer(value) } else { self.integer_to_float(value) }
        } else {
            let mut value = match self.from {
                Type::F16 => f16::get(bits).to_f64(),
                Type::Bf16 => bf16::get(bits).to_f64(),
                Type::F32 if self.ftz => f64::from(flush(f32::get(bits))),
                Type::F32 => f64::from(f32::get(bits)),
                _ => f64::get(bits),
            };
            if is_integer(self.to) {
                return self.float_to_integer(value);
            }
            if self.integral {
                value = self.direction.unwrap_or(Direction::Nearest).integral(value);
            }
            self.float(value)
        }
    }

    fn integer_to_integer(&self, value: u64) -> u64 {
        let (bits, signed) = (self.to.bits(), self.to.is_signed());
        if !self.sat {
            return extend(value, bits, signed);
        }
        let wide = if self.from.is_signed() { i128::from(value as i64) } else { i128::from(value) };
        let (low, high) = range(bits, signed);
        wide.clamp(low, high) as u64
    }

    fn integer_to_float(&self, value: u64) -> u64 {
        let signed = self.from.is_signed();
        // Odd rounding to f64 makes the next rounding correct.
        let (negative, size) =
            if signed { ((value as i64) < 0, (value as i64).unsigned_abs()) } else { (false, value) };
        let spare = (64 - size.leading_zeros()).saturating_sub(53);
        let odd = if self.to == Type::F64 || spare == 0 {
            size
        } else {
            let lost = size & low_bits(spare) != 0;
            (size >> spare | u64::from(lost)) << spare
        };
        let value = if negative { -(odd as f64) } else { odd as f64 };
        self.float(value)
    }

    fn float_to_integer(&self, value: f64) -> u64 {
        let (bits, signed) = (self.to.bits(), self.to.is_signed());
        if value.is_nan() {
            return 0;
        }
        let value = self.direction.unwrap_or(Direction::Zero).integral(value);
        let (low, high) = range(bits, signed);
        (value as i128).clamp(low, high) as u64
    }

    fn float(&self, mut value: f64) -> u64 {
        if self.sat {
            value = if value > 0.0 { value.min(1.0) } else { 0.0 };
        }
        if self.relu && (value.is_nan() || value <= 0.0) {
            value = 0.0;
        }
        let direction = self.direction.filter(|_| !self.integral).unwrap_or(Direction::Nearest);
        match self.to {
            Type::F16 => to_f16(value, direction).put(),
            Type::Bf16 => to_bf16(value, direction).put(),
            Type::F32 if self.ftz => flush(canonical(to_f32(value, direction))).put(),
            Type::F32 => canonical(to_f32(value, direction)).put(),
            _ => value.put(),
        }
    }

    /// `cvt...x2.f32 d, a, b`: `a` goes to the high half.
    pub fn pack(&self, high: u64, low: u64) -> u64 {
        let part = Self { to: if self.to == Type::Bf16x2 { Type::Bf16 } else { Type::F16 }, ..*self };
        part.convert(high) << 16 | part.convert(low)
    }
}

fn range(bits: u32, signed: bool) -> (i128, i128) {
    if signed { (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1) } else { (0, (1i128 << bits) - 1) }
}

/// `cvt.rn.f16x2.f32` and `cvt.rn.bf16x2.f32`, as functions over the lanes.
pub(crate) fn fast_pack(conversion: &Conversion) -> Option<Two> {
    if conversion.relu || conversion.sat || conversion.direction != Some(Direction::Nearest) {
        return None;
    }
    match conversion.to {
        Type::F16x2 => Some(two!(f32, |a, b| Pair(f16_near(b), f16_near(a)))),
        Type::Bf16x2 => Some(two!(f32, |a, b| Pair(bf16_near(b), bf16_near(a)))),
        _ => None,
    }
}

fn f16_near(x: f32) -> f16 {
    if x.is_nan() { f16::from_bits(0x7fff) } else { f16::from_f32(x) }
}

fn bf16_near(x: f32) -> bf16 {
    if x.is_nan() { bf16::from_bits(0x7fff) } else { bf16::from_f32(x) }
}
