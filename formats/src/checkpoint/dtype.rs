//! Element types of stored tensors, and conversion of the float types to and from `f32`.

use std::fmt;

use half::{bf16, f16};

/// The element type of a tensor in a safetensors file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum Dtype {
    Bool,
    U8,
    I8,
    I16,
    U16,
    I32,
    U32,
    I64,
    U64,
    F16,
    Bf16,
    F32,
    F64,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    F6E2M3,
    F6E3M2,
    F4,
    /// A type that this version does not know. Such tensors can only be copied.
    Opaque(OpaqueDtype),
}

/// An unknown element type: its name, and the size of its tensor, which the shape does not determine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpaqueDtype {
    name: [u8; Self::MAX_NAME_BYTES],
    length: u8,
    bytes: u64,
}

impl OpaqueDtype {
    /// Maximum length of a stored name in bytes.
    pub const MAX_NAME_BYTES: usize = 15;

    /// Creates the type with this name for a tensor of `bytes` bytes; `None` if the name is empty, longer than
    /// [`MAX_NAME_BYTES`](Self::MAX_NAME_BYTES), or contains anything but letters, digits and underscores.
    pub fn new(name: &str, bytes: u64) -> Option<Self> {
        let is_plain = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
        if name.is_empty() || name.len() > Self::MAX_NAME_BYTES || !name.bytes().all(is_plain) {
            return None;
        }
        let mut kept = [0; Self::MAX_NAME_BYTES];
        kept[..name.len()].copy_from_slice(name.as_bytes());
        Some(Self { name: kept, length: name.len() as u8, bytes })
    }

    /// The name in a safetensors header.
    pub fn name(&self) -> &str {
        std::str::from_utf8(&self.name[..usize::from(self.length)]).unwrap_or_default()
    }

    /// Size of the tensor in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Dtype {
    /// All known types, in the order used in messages.
    pub const ALL: [Dtype; 19] = [
        Self::Bool,
        Self::U8,
        Self::I8,
        Self::I16,
        Self::U16,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::F8E8M0,
        Self::F6E2M3,
        Self::F6E3M2,
        Self::F4,
    ];

    /// The name in a safetensors header.
    pub fn name(&self) -> &str {
        match self {
            Self::Bool => "BOOL",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::I16 => "I16",
            Self::U16 => "U16",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::I64 => "I64",
            Self::U64 => "U64",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
            Self::F64 => "F64",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E8M0 => "F8_E8M0",
            Self::F6E2M3 => "F6_E2M3",
            Self::F6E3M2 => "F6_E3M2",
            Self::F4 => "F4",
            Self::Opaque(of) => of.name(),
        }
    }

    /// Returns the known type with that name in a safetensors header.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|d| d.name() == name)
    }

    /// Bits per element; 0 for an unknown type.
    pub fn bits(self) -> usize {
        match self {
            Self::Opaque(_) => 0,
            Self::F4 => 4,
            Self::F6E2M3 | Self::F6E3M2 => 6,
            Self::Bool | Self::U8 | Self::I8 | Self::F8E4M3 | Self::F8E5M2 | Self::F8E8M0 => 8,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 16,
            Self::I32 | Self::U32 | Self::F32 => 32,
            Self::I64 | Self::U64 | Self::F64 => 64,
        }
    }

    /// Bytes per element, at least 1: a byte is the smallest unit that is read or written.
    pub fn size(self) -> usize {
        (self.bits() / 8).max(1)
    }

    /// Bytes of this number of elements; `None` if they do not fill whole bytes, or on overflow. For an unknown type,
    /// the tensor's bytes.
    pub fn byte_len(self, elements: u64) -> Option<u64> {
        if let Self::Opaque(of) = self {
            return Some(of.bytes());
        }
        // In two parts, so that only the result can overflow.
        let bits = self.bits() as u64;
        let rest = elements % 8 * bits;
        let whole = (elements / 8).checked_mul(bits)?.checked_add(rest / 8)?;
        rest.is_multiple_of(8).then_some(whole)
    }

    /// Whether weights of this type can be widened to `f32` and quantized.
    pub fn is_weight_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32)
    }

    /// Widens little-endian elements to `f32`, exactly.
    ///
    /// # Panics
    /// When the type is not F16, BF16 or F32, or `bytes.len() != out.len() * self.size()`.
    #[inline(always)]
    pub fn widen(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(bytes.len(), out.len() * self.size(), "byte length does not match element count");
        match self {
            Self::F32 => {
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            Self::Bf16 => {
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *o = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
                }
            }
            Self::F16 => {
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *o = widen_half(u16::from_le_bytes([b[0], b[1]]));
                }
            }
            other => panic!("{other} is not a weight type"),
        }
    }

    /// Rounds one value to this type and back, half to even.
    ///
    /// # Panics
    /// When the type is not F16, BF16 or F32.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Self::F32 => value,
            Self::Bf16 => bf16::from_f32(value).to_f32(),
            Self::F16 => f16::from_f32(value).to_f32(),
            other => panic!("{other} is not a weight type"),
        }
    }

    /// Whether a value of this type equals this one: `round(value) == value`.
    ///
    /// # Panics
    /// When the type is not F16, BF16 or F32.
    pub fn holds(self, value: f32) -> bool {
        let bits = value.to_bits();
        match self {
            // The exponent is that of a normal half-precision number, and 10 bits of the mantissa are enough.
            Self::F16 if bits & 0x1FFF == 0 && (113..=142).contains(&(bits >> 23 & 0xFF)) => true,
            Self::Bf16 if bits & 0xFFFF == 0 => !value.is_nan(),
            _ => self.round(value) == value,
        }
    }

    /// Rounds values to this type, half to even, as little-endian bytes.
    ///
    /// # Panics
    /// When the type is not F16, BF16 or F32.
    pub fn narrow(self, values: &[f32]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(values.len() * self.size());
        for &v in values {
            match self {
                Self::F32 => bytes.extend_from_slice(&v.to_le_bytes()),
                Self::Bf16 => bytes.extend_from_slice(&bf16::from_f32(v).to_le_bytes()),
                Self::F16 => bytes.extend_from_slice(&f16::from_f32(v).to_le_bytes()),
                other => panic!("{other} is not a weight type"),
            }
        }
        bytes
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Widens an IEEE half-precision number, exactly, without branches. A NaN becomes quiet and keeps its sign and payload.
#[inline(always)]
fn widen_half(bits: u16) -> f32 {
    const SUBNORMAL_UNIT: f32 = 1.0 / 16_777_216.0;
    const BIAS: u32 = (127 - 15) << 23;
    let bits = u32::from(bits);
    let (sign, exponent, mantissa) = ((bits & 0x8000) << 16, bits & 0x7C00, bits & 0x03FF);
    let magnitude = (bits & 0x7FFF) << 13;
    let subnormal = (mantissa as f32 * SUBNORMAL_UNIT).to_bits();
    let special = magnitude | 0x7F80_0000 | if mantissa == 0 { 0 } else { 0x0040_0000 };
    let finite = if exponent == 0 { subnormal } else { magnitude + BIAS };
    f32::from_bits(sign | if exponent == 0x7C00 { special } else { finite })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_exactly() {
        for bits in 0..=u16::MAX {
            let expected = f16::from_bits(bits).to_f32();
            let mut got = [0.0];
            Dtype::F16.widen(&bits.to_le_bytes(), &mut got);
            assert_eq!(got[0].to_bits(), expected.to_bits(), "{bits:#06x}");
        }
    }

    #[test]
    fn a_type_holds_the_values_that_it_does_not_round() {
        let halves = (0..=u16::MAX).map(|bits| f16::from_bits(bits).to_f32());
        let wide = (0..=u16::MAX).map(|bits| bf16::from_bits(bits).to_f32());
        for value in halves.chain(wide) {
            let bits = value.to_bits();
            for near in [bits.wrapping_sub(1), bits, bits ^ 1, bits ^ 0x1000, bits ^ 0x2000, bits ^ 0x8000] {
                let near = f32::from_bits(near);
                for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
                    assert_eq!(dtype.holds(near), dtype.round(near) == near, "{dtype} {near:e}");
                }
            }
        }
    }
}
