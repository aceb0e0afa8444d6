//! Element types of stored tensors, and conversion of the float types to and from `f32`.

use std::fmt;

use half::slice::HalfFloatSliceExt;
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
            Self::F16 => widen_halves(bytes, out),
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

/// Widens IEEE half-precision numbers, exactly. A NaN becomes quiet and keeps its sign and payload.
///
/// `half` converts slices with the processor's own instructions. The same arithmetic on integers is three times as slow,
/// because the compiler does not vectorize it reliably.
fn widen_halves(bytes: &[u8], out: &mut [f32]) {
    const PIECE: usize = 256;
    let mut piece = [f16::ZERO; PIECE];
    for (out, bytes) in out.chunks_mut(PIECE).zip(bytes.chunks(2 * PIECE)) {
        let piece = &mut piece[..out.len()];
        for (half, bytes) in piece.iter_mut().zip(bytes.chunks_exact(2)) {
            *half = f16::from_le_bytes([bytes[0], bytes[1]]);
        }
        piece.convert_to_f32_slice(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_exactly() {
        // As a sum of powers of two. A NaN becomes quiet.
        let exact = |bits: u16| {
            let (exponent, mantissa) = (i32::from(bits >> 10 & 0x1F), f64::from(bits & 0x3FF));
            let magnitude = match exponent {
                0 => mantissa * 2f64.powi(-24),
                31 if mantissa == 0.0 => f64::INFINITY,
                31 => return u32::from(bits & 0x8000) << 16 | 0x7FC0_0000 | u32::from(bits & 0x3FF) << 13,
                _ => (1024.0 + mantissa) * 2f64.powi(exponent - 25),
            };
            (if bits & 0x8000 == 0 { magnitude } else { -magnitude } as f32).to_bits()
        };
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        // Lengths that do not fill the pieces and vectors in which values are converted.
        for len in [1, 3, 4, 7, 8, 13, 255, 256, 257, 1 << 16] {
            let mut all = vec![f32::NAN; 1 << 16];
            for (out, bytes) in all.chunks_mut(len).zip(bytes.chunks(2 * len)) {
                Dtype::F16.widen(bytes, out);
            }
            for (bits, got) in (0..=u16::MAX).zip(&all) {
                assert_eq!(got.to_bits(), exact(bits), "{bits:#06x}, {len} at a time");
            }
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
