//! The type of floats that kernels read and write.

/// The type of floats that a kernel reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Float {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Single floats.
    F32,
}

impl Float {
    /// Bytes of one.
    pub fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// What the kernels' macros call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
        }
    }

    /// Its number where a macro decides about text: `cuda/ptx.cuh` has the same.
    pub(crate) fn code(self) -> usize {
        match self {
            Self::F16 => 0,
            Self::Bf16 => 1,
            Self::F32 => 2,
        }
    }
}
