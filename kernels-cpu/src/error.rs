//! Why a kernel refuses what it is given: packing, and multiplying packed weights, do not panic.

/// An argument that does not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A slice has another length than its shape says.
    #[error("{what} has {got} elements, {expected} expected")]
    Length {
        /// Which slice.
        what: &'static str,
        /// Elements that the shape asks for.
        expected: usize,
        /// Elements there are.
        got: usize,
    },
    /// A shape whose size is beyond this machine's numbers, or whose sums are beyond 32 bits.
    #[error("{0} is too large")]
    TooLarge(&'static str),
    /// This kernel does not multiply the scheme.
    #[error("{0} is not supported")]
    Scheme(&'static str),
    /// Two operands that do not belong together.
    #[error("{what}: {got} does not fit {expected}")]
    Mismatch {
        /// In what they differ.
        what: &'static str,
        /// What was expected.
        expected: usize,
        /// What was given.
        got: usize,
    },
    /// Packed bytes of another layout, or of another version of this one.
    #[error("packed weights have layout {got:#018x}, {expected:#018x} expected")]
    LayoutId {
        /// That of the layout asked for.
        expected: u64,
        /// That found.
        got: u64,
    },
    /// The processor lacks the instructions that were asked for.
    #[error("this processor does not have {0}")]
    Isa(&'static str),
    /// `QUANT_ISA` names an unknown path, or one that this processor lacks.
    #[error(
        "QUANT_ISA is {value:?}; this processor has {known}, and f32 is the widest that rounds no float to bf16"
    )]
    IsaName {
        /// What it says.
        value: String,
        /// The names that could be had.
        known: String,
    },
    /// Memory that the system does not give.
    #[error("there is no memory for {0}")]
    Memory(&'static str),
    /// A size for which no Hadamard matrix is constructed here.
    #[error("there is no Hadamard matrix of order {0} here")]
    Order(usize),
}

impl KernelError {
    /// A number for callers that cannot match on the variant; it never changes its meaning.
    pub fn code(&self) -> u32 {
        match self {
            Self::Length { .. } => 1,
            Self::TooLarge(_) => 2,
            Self::Scheme(_) => 3,
            Self::Mismatch { .. } => 4,
            Self::LayoutId { .. } => 5,
            Self::Isa(_) | Self::IsaName { .. } => 6,
            Self::Order(_) => 7,
            Self::Memory(_) => 8,
        }
    }

    pub(crate) fn length(what: &'static str, expected: usize, got: usize) -> Result<(), Self> {
        if expected == got { Ok(()) } else { Err(Self::Length { what, expected, got }) }
    }
}
