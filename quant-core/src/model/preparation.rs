//! Transforms of a whole model before its blocks are processed.

/// A transform of a whole model. The result computes the same function, so later stages need no changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Preparation {
    /// Norm weights are folded into the linears that read them.
    FoldNorms,
    /// Norm weights are folded, and the residual stream is rotated by a Hadamard matrix.
    Rotate,
}

impl Preparation {
    /// All preparations.
    pub const ALL: [Self; 2] = [Self::FoldNorms, Self::Rotate];

    /// Returns whether this preparation does everything that `other` does, and more. No preparation includes itself.
    pub fn includes(self, other: Self) -> bool {
        matches!((self, other), (Self::Rotate, Self::FoldNorms))
    }

    /// Returns the name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Self::FoldNorms => "fold-norms",
            Self::Rotate => "rotate",
        }
    }

    /// Returns a one-line description for help and tables.
    pub fn summary(self) -> &'static str {
        match self {
            Self::FoldNorms => "moves norm weights into the linears that read them",
            Self::Rotate => {
                "rotates the residual stream, which spreads outliers over all channels; also folds norms"
            }
        }
    }
}
