//! The three-dimensional tensors in which checkpoints store all experts of a block.

/// The fused tensors of a checkpoint: one holds the gates and ups of all experts of a block, another the downs. The
/// dimension that holds the rows of a matrix depends on the checkpoint and is derived from the shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct FusedExperts {
    /// Name inside the block of the tensor of gates and ups: `[experts, 2 · intermediate, hidden]`, or with the last
    /// two dimensions exchanged.
    pub gate_up: &'static str,
    /// Name inside the block of the tensor of downs: `[experts, hidden, intermediate]`, or with the last two dimensions
    /// exchanged.
    pub down: &'static str,
    /// Suffix of the bias names, if there are biases: `[experts, 2 · intermediate]`, `[experts, hidden]`.
    pub bias: Option<&'static str>,
    /// Whether gates and ups alternate; otherwise all gates come first.
    pub alternate: bool,
    /// The prefix of the module names of single experts, before the expert's index.
    pub prefix: &'static str,
    /// Modules of a single expert: gate, up, down.
    pub linears: [&'static str; 3],
    /// Number of experts.
    pub experts: usize,
    /// Features of the hidden states.
    pub hidden: usize,
    /// Intermediate size of an expert.
    pub intermediate: usize,
}
