//! The error of this crate's kernels.

use std::ops::Range;

/// An invalid argument, or a resource that is not available, such as an instruction set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The length of a slice differs from what its shape requires.
    #[error("{what}: expected {expected} elements, got {got}")]
    Length {
        /// Which slice.
        what: &'static str,
        /// The number of elements that the shape requires.
        expected: usize,
        /// The actual number of elements.
        got: usize,
    },
    /// A shape or a size beyond a limit; also keys or values beyond the range of f16.
    #[error("{0} is too large")]
    TooLarge(&'static str),
    /// An invalid argument, or one that the kernel does not support; the text is the whole message.
    #[error("{0}")]
    Scheme(&'static str),
    /// A number that does not match another argument, or is beyond a bound.
    #[error("{what} {expected}, got {got}")]
    Mismatch {
        /// The requirement, which the message completes with the expected value.
        what: &'static str,
        /// The expected value, or the bound.
        expected: usize,
        /// The given value.
        got: usize,
    },
    /// Packed bytes of a different layout, or of a different version of this layout.
    #[error("packed weights: expected layout id {expected:#018x}, got {got:#018x}")]
    LayoutId {
        /// The id of the requested layout.
        expected: u64,
        /// The given id.
        got: u64,
    },
    /// The processor lacks the requested instructions.
    #[error("this processor does not support {0}")]
    Isa(&'static str),
    /// `QUANT_ISA` names an unknown path, or one that this processor lacks.
    #[error(
        "QUANT_ISA is {value:?}, but this processor supports {known} (f32 is the widest that does not round \
        floats to bf16)"
    )]
    IsaName {
        /// The value of the variable.
        value: String,
        /// The available names.
        known: String,
    },
    /// Memory allocation failed.
    #[error("not enough memory for {0}")]
    Memory(&'static str),
    /// This crate cannot construct a Hadamard matrix of this order.
    #[error("Hadamard matrices of order {0} are not supported")]
    Order(usize),
}

impl KernelError {
    /// A stable error code, for callers that cannot match on the variant.
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

    /// Returns how many parts of `width` elements a slice has. A length that is not a multiple is reported with the
    /// next one, which is not 0. `width` must not be 0.
    pub(crate) fn parts(what: &'static str, width: usize, len: usize) -> Result<usize, Self> {
        let parts = len.div_ceil(width);
        Self::length(what, parts.saturating_mul(width), len)?;
        Ok(parts)
    }

    /// Checks that a range is within the first `total` rows.
    pub(crate) fn rows(rows: &Range<usize>, total: usize) -> Result<(), Self> {
        let reversed = "the end of the range of rows must be at least its start,";
        Self::range(rows, total, [reversed, "rows must end at or before row"])
    }

    /// Checks that a range is within the first `total` panels.
    pub(crate) fn panels(panels: &Range<usize>, total: usize) -> Result<(), Self> {
        let reversed = "the end of the range of panels must be at least its start,";
        Self::range(panels, total, [reversed, "panels must end at or before panel"])
    }

    fn range(range: &Range<usize>, total: usize, [reversed, beyond]: [&'static str; 2]) -> Result<(), Self> {
        match *range {
            Range { start, end } if start > end => {
                Err(Self::Mismatch { what: reversed, expected: start, got: end })
            }
            Range { end, .. } if end > total => {
                Err(Self::Mismatch { what: beyond, expected: total, got: end })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_never_ask_for_nothing() {
        let message = |result: Result<(), KernelError>| result.unwrap_err().to_string();
        assert_eq!(KernelError::parts("keys", 64, 128), Ok(2));
        assert_eq!(KernelError::parts("keys", 64, 0), Ok(0));
        assert_eq!(message(KernelError::parts("keys", 64, 5).map(drop)), "keys: expected 64 elements, got 5");
        assert_eq!(KernelError::rows(&(2..4), 4), Ok(()));
        assert_eq!(message(KernelError::rows(&(2..5), 4)), "rows must end at or before row 4, got 5");
        #[expect(clippy::reversed_empty_ranges, reason = "refused")]
        let reversed = 3..2;
        assert_eq!(
            message(KernelError::rows(&reversed, 4)),
            "the end of the range of rows must be at least its start, 3, got 2"
        );
        assert_eq!(message(KernelError::panels(&(0..3), 2)), "panels must end at or before panel 2, got 3");
        assert!(KernelError::panels(&reversed, 4).is_err());
    }
}
