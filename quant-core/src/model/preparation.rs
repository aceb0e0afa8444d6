//! What is done to a whole model before anything looks at a block of it.

/// Each makes another model that computes the same, so what follows sees no difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Preparation {
    /// Weights of norms move into the linears that read them, and are 1 from then on.
    FoldNorms,
    /// That, and the residual stream is turned by a Hadamard matrix.
    Rotate,
}

impl Preparation {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::FoldNorms, Self::Rotate];

    /// The name that recipes take.
    pub fn name(self) -> &'static str {
        match self {
            Self::FoldNorms => "fold-norms",
            Self::Rotate => "rotate",
        }
    }

    /// One line for help and tables.
    pub fn summary(self) -> &'static str {
        match self {
            Self::FoldNorms => "moves norm weights into the linears that read them",
            Self::Rotate => {
                "rotates the residual stream, which spreads outliers over all channels; folds norms"
            }
        }
    }
}
