//! Compares a model with its reference block by block: the deviation of each block's output, and the range of each
//! linear's input. Both run block by block over a few windows, to save memory.

#[cfg(feature = "decoders")]
mod run;

#[cfg(feature = "decoders")]
pub use run::anatomy;

/// Differences between two models, block by block.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Anatomy {
    /// Number of windows that were run.
    pub windows: usize,
    /// For each block, `‖h − h₀‖ / ‖h₀‖` over all positions, where `h` is its output and `h₀` the reference's.
    pub block_errors: Vec<f64>,
    /// Inputs of the linears, in order of blocks. An input most of whose channels are 0 may be left out.
    pub inputs: Vec<LinearInput>,
}

/// How uneven the channels of a linear's input are: the largest magnitude of any channel, divided by the median over
/// the channels of their largest magnitudes.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LinearInput {
    /// The block.
    pub block: usize,
    /// The linear's name in the block.
    pub linear: String,
    /// The ratio in the reference.
    pub reference: f64,
    /// The ratio in the model.
    pub model: f64,
}
