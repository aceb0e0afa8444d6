//! Variants of operations: activations, layer norm parameters, position scales.

/// The stored parameters of a layer norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerNormParameters {
    /// Neither weight nor bias.
    None,
    /// A weight.
    Weight,
    /// A weight and a bias.
    WeightAndBias,
}

/// An elementwise function between linears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)²`.
    ReluSquared,
    /// `x · σ(x)`.
    Silu,
    /// `σ(x)`: an output gate.
    Sigmoid,
    /// `x · Φ(x)`, with the error function.
    Gelu,
    /// `x · Φ(x)` with `Φ(x) ≈ (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`.
    GeluTanh,
}

/// `1 + beta · ln(1 + ⌊(position + offset) / original_positions⌋)`: a factor of queries that keeps attention sharp in
/// contexts longer than the original training context (Llama 4, Ministral 3).
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct PositionScale {
    /// Coefficient of the logarithm.
    pub beta: f32,
    /// The original training context, in positions. The factor is 1 if `position + offset` is less.
    pub original_positions: usize,
    /// Index of the first position: 0 or 1.
    pub offset: usize,
}

impl PositionScale {
    /// Returns the factor at a position, rounded to `f32` after each operation.
    pub fn at(&self, position: usize) -> f32 {
        1.0 + self.beta
            * (1.0 + ((position + self.offset) as f32 / self.original_positions as f32).floor()).ln()
    }
}
