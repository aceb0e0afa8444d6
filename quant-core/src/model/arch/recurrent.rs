//! Operations that carry a state from token to token: causal convolutions, linear attention and state spaces.

use super::Activation;
use super::op::{Parameter, ScalePass};

/// An operation with a state: its output depends on the token's inputs and on the state left by earlier tokens.
///
/// The state is zero before the first token of a segment.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Recurrent {
    /// Module name inside the block.
    pub name: String,
    /// The computation.
    pub kind: RecurrentKind,
}

/// The computation of a recurrent operation.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RecurrentKind {
    /// A convolution with a separate kernel per channel.
    Convolution(Convolution),
    /// The gated delta rule, with inputs `[queries, keys and values; b; a]`.
    DeltaNet(DeltaNet),
    /// A state-space operation, with inputs `[x, B, C; dt]`.
    StateSpace(StateSpace),
}

/// The convolution `y[t, c] = f(Σ_j w[c, j] · x[t − kernel + 1 + j, c] + bias[c])`, with `x = 0` before the first
/// token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Convolution {
    /// Input and output channels.
    pub channels: usize,
    /// Number of tokens that an output depends on, including its own.
    pub kernel: usize,
    /// Whether there is a bias.
    pub bias: bool,
    /// The function `f`, if it is not the identity.
    pub activation: Option<Activation>,
}

/// The gated delta rule (Yang et al., "Gated Delta Networks", 2024).
///
/// For each value head, with the queries `q` and keys `k` of its key head: `q` and `k` are divided by their norms, and
/// `q` also by `√key_dim`. Then `β = σ(b)`, `g = −exp(A_log) · softplus(a + dt_bias)`, and the state `S`, a matrix
/// `[key_dim, value_dim]`, becomes `S' = e^g S + k δᵀ` with `δ = β (v − (e^g S)ᵀ k)`. The output is `S'ᵀ q`.
///
/// The first input holds the queries of all key heads, then their keys, then the values of all value heads. The other
/// two inputs have one channel per value head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeltaNet {
    /// Number of query and key heads.
    pub key_heads: usize,
    /// Number of consecutive value heads that share a key head.
    pub repeat: usize,
    /// Width of a query or key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
}

impl DeltaNet {
    /// Returns the number of value heads.
    pub fn value_heads(&self) -> usize {
        self.key_heads * self.repeat
    }

    /// Returns the number of features of the first input.
    pub fn mixed_width(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.width()
    }

    /// Returns the number of features of the output.
    pub fn width(&self) -> usize {
        self.value_heads() * self.value_dim
    }
}

/// A state-space operation with one decay per head (Dao and Gu, "Transformers are SSMs", 2024: Mamba 2).
///
/// For each head, with inputs `x` and with `b` and `c` of its group: the step is `Δ = softplus(dt + dt_bias)`, clamped
/// to bounds, and the state `S`, a matrix `[state_dim, head_dim]`, becomes `S' = e^(−Δ e^A_log) S + b (Δ x)ᵀ`. The
/// output is `S'ᵀ c + D x`.
///
/// The first input holds the `x` of all heads, then the `b` of all groups, then their `c`. The other input has one
/// channel per head.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct StateSpace {
    /// Number of heads.
    pub heads: usize,
    /// Number of groups of consecutive heads that share `b` and `c`.
    pub groups: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Channels of `b` and `c`.
    pub state_dim: usize,
    /// The lower and upper bound of steps.
    pub steps: [f32; 2],
}

impl StateSpace {
    /// Returns the number of features of the first input.
    pub fn mixed_width(&self) -> usize {
        self.width() + 2 * self.groups * self.state_dim
    }

    /// Returns the number of features of the output.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }
}

impl Recurrent {
    pub(super) fn parameters(&self) -> Vec<Parameter> {
        let parameter = |name: &'static str, shape: &[usize]| Parameter { name, shape: shape.to_vec() };
        match &self.kind {
            RecurrentKind::Convolution(Convolution { channels, kernel, bias, .. }) => {
                let bias = bias.then(|| parameter("bias", &[*channels]));
                [parameter("weight", &[*channels, 1, *kernel])].into_iter().chain(bias).collect()
            }
            RecurrentKind::DeltaNet(net) => {
                ["A_log", "dt_bias"].map(|name| parameter(name, &[net.value_heads()])).into()
            }
            RecurrentKind::StateSpace(space) => {
                ["A_log", "D", "dt_bias"].map(|name| parameter(name, &[space.heads])).into()
            }
        }
    }

    pub(super) fn width(&self) -> usize {
        match &self.kind {
            RecurrentKind::Convolution(convolution) => convolution.channels,
            RecurrentKind::DeltaNet(net) => net.width(),
            RecurrentKind::StateSpace(space) => space.width(),
        }
    }

    /// Returns the number of values in the state, which does not depend on the sequence's length.
    pub fn state_len(&self) -> usize {
        match &self.kind {
            RecurrentKind::Convolution(Convolution { channels, kernel, .. }) => (kernel - 1) * channels,
            RecurrentKind::DeltaNet(net) => net.value_heads() * net.key_dim * net.value_dim,
            RecurrentKind::StateSpace(space) => space.width() * space.state_dim,
        }
    }

    pub(super) fn scale_pass(&self, _port: usize) -> ScalePass {
        match &self.kind {
            RecurrentKind::Convolution(Convolution { bias: false, activation: None, .. }) => {
                ScalePass::UNCHANGED
            }
            // A convolution with a bias or an activation does not commute with scales. Delta nets and state-space
            // operations combine several values in one input.
            RecurrentKind::Convolution(_) | RecurrentKind::DeltaNet(_) | RecurrentKind::StateSpace(_) => {
                ScalePass::Stopped
            }
        }
    }

    /// Returns the number of floating-point operations of matrix products on `tokens` tokens.
    pub(super) fn product_operations(&self, tokens: f64) -> f64 {
        match &self.kind {
            RecurrentKind::Convolution(_) => 0.0,
            RecurrentKind::DeltaNet(net) => {
                let chunk = 64.0 * (2 * net.key_dim + 2 * net.value_dim) as f64;
                let state = 3.0 * (net.key_dim * net.value_dim) as f64;
                2.0 * tokens * net.value_heads() as f64 * (state + chunk)
            }
            RecurrentKind::StateSpace(space) => {
                let chunk = 64.0 * (space.state_dim + space.head_dim) as f64;
                let state = 2.0 * (space.state_dim * space.head_dim) as f64;
                2.0 * tokens * space.heads as f64 * (state + chunk)
            }
        }
    }
}
