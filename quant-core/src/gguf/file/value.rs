//! Metadata values.

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// A list of values of one type.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

pub(super) mod kinds {
    pub(in super::super) const U8: u32 = 0;
    pub(in super::super) const I8: u32 = 1;
    pub(in super::super) const U16: u32 = 2;
    pub(in super::super) const I16: u32 = 3;
    pub(in super::super) const U32: u32 = 4;
    pub(in super::super) const I32: u32 = 5;
    pub(in super::super) const F32: u32 = 6;
    pub(in super::super) const BOOL: u32 = 7;
    pub(in super::super) const STRING: u32 = 8;
    pub(in super::super) const ARRAY: u32 = 9;
    pub(in super::super) const U64: u32 = 10;
    pub(in super::super) const I64: u32 = 11;
    pub(in super::super) const F64: u32 = 12;
}

impl Value {
    pub(super) fn kind(&self) -> u32 {
        match self {
            Self::U8(_) => kinds::U8,
            Self::I8(_) => kinds::I8,
            Self::U16(_) => kinds::U16,
            Self::I16(_) => kinds::I16,
            Self::U32(_) => kinds::U32,
            Self::I32(_) => kinds::I32,
            Self::F32(_) => kinds::F32,
            Self::Bool(_) => kinds::BOOL,
            Self::String(_) => kinds::STRING,
            Self::Array(_) => kinds::ARRAY,
            Self::U64(_) => kinds::U64,
            Self::I64(_) => kinds::I64,
            Self::F64(_) => kinds::F64,
        }
    }

    /// Creates a string value.
    pub fn string(text: impl Into<String>) -> Self {
        Self::String(text.into())
    }

    /// The string, if the value is one.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// The integer, if the value is a nonnegative one.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::U64(v) => Some(v),
            Self::I8(v) => v.try_into().ok(),
            Self::I16(v) => v.try_into().ok(),
            Self::I32(v) => v.try_into().ok(),
            Self::I64(v) => v.try_into().ok(),
            Self::F32(_) | Self::F64(_) | Self::Bool(_) | Self::String(_) | Self::Array(_) => None,
        }
    }

    /// The number, if the value is a float.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(v) => Some(v.into()),
            Self::F64(v) => Some(v),
            _ => None,
        }
    }

    /// The flag, if the value is one.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// The strings, if the value is a list of them.
    pub fn as_strings(&self) -> Option<&[String]> {
        match self {
            Self::Array(Array::String(texts)) => Some(texts),
            _ => None,
        }
    }

    /// The floats, if the value is a list of them.
    pub fn as_f32s(&self) -> Option<&[f32]> {
        match self {
            Self::Array(Array::F32(values)) => Some(values),
            _ => None,
        }
    }

    /// The flags, if the value is a list of them.
    pub fn as_bools(&self) -> Option<&[bool]> {
        match self {
            Self::Array(Array::Bool(flags)) => Some(flags),
            _ => None,
        }
    }

    /// The integers, if the value is a list of them and all fit `i64`.
    pub fn as_integers(&self) -> Option<Vec<i64>> {
        match self {
            Self::Array(Array::U8(v)) => Some(v.iter().map(|&v| v.into()).collect()),
            Self::Array(Array::I8(v)) => Some(v.iter().map(|&v| v.into()).collect()),
            Self::Array(Array::U16(v)) => Some(v.iter().map(|&v| v.into()).collect()),
            Self::Array(Array::I16(v)) => Some(v.iter().map(|&v| v.into()).collect()),
            Self::Array(Array::U32(v)) => Some(v.iter().map(|&v| v.into()).collect()),
            Self::Array(Array::I32(v)) => Some(v.iter().map(|&v| v.into()).collect()),
            Self::Array(Array::I64(v)) => Some(v.clone()),
            Self::Array(Array::U64(v)) => v.iter().map(|&v| i64::try_from(v).ok()).collect(),
            _ => None,
        }
    }
}

impl Array {
    pub(super) fn kind(&self) -> u32 {
        match self {
            Self::U8(_) => kinds::U8,
            Self::I8(_) => kinds::I8,
            Self::U16(_) => kinds::U16,
            Self::I16(_) => kinds::I16,
            Self::U32(_) => kinds::U32,
            Self::I32(_) => kinds::I32,
            Self::F32(_) => kinds::F32,
            Self::Bool(_) => kinds::BOOL,
            Self::String(_) => kinds::STRING,
            Self::U64(_) => kinds::U64,
            Self::I64(_) => kinds::I64,
            Self::F64(_) => kinds::F64,
        }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::String(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F64(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
