//! The floating-point types that kernels read and write.

/// The floating-point type that a kernel reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Float {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Single precision.
    F32,
}

impl Float {
    /// Bytes per value.
    pub fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// The name of this type in the kernels' macros.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
        }
    }

    /// The number of this type in preprocessor conditions; `cuda/ptx.cuh` has the same numbers.
    pub(crate) fn code(self) -> usize {
        match self {
            Self::F16 => 0,
            Self::Bf16 => 1,
            Self::F32 => 2,
        }
    }
}
