//! How checkpoints store all experts of a block in tensors of three dimensions.

/// The tensors of checkpoints that hold the gates and ups of all experts of a block in one, and their downs in another.
/// Which of its dimensions are a matrix's rows is a property of the checkpoint, and told by the shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FusedExperts {
    /// Name inside the block of the tensor of gates and ups, `[experts, 2 · intermediate, hidden]`, or
    /// `[experts, hidden, 2 · intermediate]`.
    pub gate_up: &'static str,
    /// Name inside the block of the tensor of downs, `[experts, hidden, intermediate]`, or
    /// `[experts, intermediate, hidden]`.
    pub down: &'static str,
    /// What the names of biases add to these, where there are biases: `[experts, 2 · intermediate]`, `[experts, hidden]`.
    pub bias: Option<&'static str>,
    /// Whether gates and ups alternate; else gates come first.
    pub alternate: bool,
    /// What the module names of single experts begin with, before the expert's number.
    pub prefix: &'static str,
    /// Modules of a single expert: gate, up, down.
    pub linears: [&'static str; 3],
    /// How many there are.
    pub experts: usize,
    /// Features of the hidden states.
    pub hidden: usize,
    /// Features between an expert's linears.
    pub intermediate: usize,
}
