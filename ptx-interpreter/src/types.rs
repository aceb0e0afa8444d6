//! PTX types, values of registers, and functions over the 32 lanes of a warp.

use half::{bf16, f16};

pub(crate) const LANES: usize = 32;

/// A register of a warp: one value per lane, zero-extended to 64 bits.
pub(crate) type Lanes = [u64; LANES];
pub(crate) type One = fn(&Lanes, &mut Lanes);
pub(crate) type Two = fn(&Lanes, &Lanes, &mut Lanes);
pub(crate) type Three = fn(&Lanes, &Lanes, &Lanes, &mut Lanes);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Type {
    Pred,
    B8,
    B16,
    B32,
    B64,
    B128,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
}

impl Type {
    /// Without the leading dot.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Self::Pred,
            "b8" => Self::B8,
            "b16" => Self::B16,
            "b32" => Self::B32,
            "b64" => Self::B64,
            "b128" => Self::B128,
            "u8" => Self::U8,
            "u16" => Self::U16,
            "u32" => Self::U32,
            "u64" => Self::U64,
            "s8" => Self::S8,
            "s16" => Self::S16,
            "s32" => Self::S32,
            "s64" => Self::S64,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::Bf16,
            "bf16x2" => Self::Bf16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            _ => return None,
        })
    }

    /// Bits per value; a predicate counts as 1.
    pub fn bits(self) -> u32 {
        match self {
            Self::Pred => 1,
            Self::B8 | Self::U8 | Self::S8 => 8,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::Bf16 => 16,
            Self::B32 | Self::U32 | Self::S32 | Self::F16x2 | Self::Bf16x2 | Self::F32 => 32,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 64,
            Self::B128 => 128,
        }
    }

    pub fn bytes(self) -> usize {
        (self.bits() as usize).div_ceil(8)
    }

    pub fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    pub fn is_wide_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64)
    }
}

pub(crate) fn low_bits(bits: u32) -> u64 {
    if bits >= 64 { u64::MAX } else { (1u64 << bits) - 1 }
}

/// Two 16-bit floats in 32 bits, low half first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pair<T>(pub T, pub T);

pub(crate) trait Lane: Copy {
    /// Higher bits are ignored.
    fn get(bits: u64) -> Self;
    /// Higher bits are 0.
    fn put(self) -> u64;
}

macro_rules! lane_of_integer {
    ($($signed:ty: $unsigned:ty),*) => {$(
        impl Lane for $unsigned {
            fn get(bits: u64) -> Self { bits as $unsigned }
            fn put(self) -> u64 { u64::from(self) }
        }
        impl Lane for $signed {
            fn get(bits: u64) -> Self { bits as $signed }
            fn put(self) -> u64 { u64::from(self as $unsigned) }
        }
    )*};
}
lane_of_integer!(i8: u8, i16: u16, i32: u32, i64: u64);

impl Lane for bool {
    fn get(bits: u64) -> Self {
        bits & 1 != 0
    }
    fn put(self) -> u64 {
        u64::from(self)
    }
}

impl Lane for f32 {
    fn get(bits: u64) -> Self {
        f32::from_bits(bits as u32)
    }
    fn put(self) -> u64 {
        u64::from(self.to_bits())
    }
}

impl Lane for f64 {
    fn get(bits: u64) -> Self {
        f64::from_bits(bits)
    }
    fn put(self) -> u64 {
        self.to_bits()
    }
}

impl Lane for f16 {
    fn get(bits: u64) -> Self {
        f16::from_bits(bits as u16)
    }
    fn put(self) -> u64 {
        u64::from(self.to_bits())
    }
}

impl Lane for bf16 {
    fn get(bits: u64) -> Self {
        bf16::from_bits(bits as u16)
    }
    fn put(self) -> u64 {
        u64::from(self.to_bits())
    }
}

impl<T: Lane> Lane for Pair<T> {
    fn get(bits: u64) -> Self {
        Self(T::get(bits & 0xffff), T::get(bits >> 16 & 0xffff))
    }
    fn put(self) -> u64 {
        self.0.put() | self.1.put() << 16
    }
}

/// Makes a function over all lanes from an expression for one lane: `one!(u32, |a| !a)`.
macro_rules! one {
    ($t:ty, |$a:ident| $e:expr) => {{
        let f: $crate::types::One = |x, d| {
            for (d, x) in d.iter_mut().zip(x) {
                let $a = <$t as $crate::types::Lane>::get(*x);
                *d = $crate::types::Lane::put($e);
            }
        };
        f
    }};
}

/// `two!(u32, |a, b| a & b)`, or `two!(u32, u32, |a, b| ...)`.
macro_rules! two {
    ($t:ty, |$a:ident, $b:ident| $e:expr) => {
        two!($t, $t, |$a, $b| $e)
    };
    ($t:ty, $u:ty, |$a:ident, $b:ident| $e:expr) => {{
        let f: $crate::types::Two = |x, y, d| {
            for ((d, x), y) in d.iter_mut().zip(x).zip(y) {
                let $a = <$t as $crate::types::Lane>::get(*x);
                let $b = <$u as $crate::types::Lane>::get(*y);
                *d = $crate::types::Lane::put($e);
            }
        };
        f
    }};
}

/// With three sources, of one type or of three.
macro_rules! three {
    ($t:ty, |$a:ident, $b:ident, $c:ident| $e:expr) => {
        three!($t, $t, $t, |$a, $b, $c| $e)
    };
    ($t:ty, $u:ty, $v:ty, |$a:ident, $b:ident, $c:ident| $e:expr) => {{
        let f: $crate::types::Three = |x, y, z, d| {
            for (((d, x), y), z) in d.iter_mut().zip(x).zip(y).zip(z) {
                let $a = <$t as $crate::types::Lane>::get(*x);
                let $b = <$u as $crate::types::Lane>::get(*y);
                let $c = <$v as $crate::types::Lane>::get(*z);
                *d = $crate::types::Lane::put($e);
            }
        };
        f
    }};
}

/// Dispatches on an integer type of 16 to 64 bits; bit types are unsigned: `integers!(ty, T => two!(T, ...))`.
macro_rules! integers {
    ($ty:expr, $t:ident => $e:expr) => {
        match $ty {
            $crate::types::Type::U16 | $crate::types::Type::B16 => {
                type $t = u16;
                Some($e)
            }
            $crate::types::Type::U32 | $crate::types::Type::B32 => {
                type $t = u32;
                Some($e)
            }
            $crate::types::Type::U64 | $crate::types::Type::B64 => {
                type $t = u64;
                Some($e)
            }
            $crate::types::Type::S16 => {
                type $t = i16;
                Some($e)
            }
            $crate::types::Type::S32 => {
                type $t = i32;
                Some($e)
            }
            $crate::types::Type::S64 => {
                type $t = i64;
                Some($e)
            }
            _ => None,
        }
    };
}

pub(crate) use {integers, one, three, two};
