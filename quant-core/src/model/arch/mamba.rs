//! Mamba 2 as part of a block graph: one linear computes the gate, the convolution's input and the time steps. The
//! state-space operation follows, then a gate and, in some families, a norm.

use super::parts::linear;
use super::{Activation, Convolution, GraphBuilder, NodeId, Op, Recurrent, RecurrentKind, StateSpace};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Mamba2 {
    pub(super) space: StateSpace,
    /// Kernel size of the convolution, in tokens.
    pub(super) kernel: usize,
    /// Whether the convolution has a bias.
    pub(super) conv_bias: bool,
    /// Whether the input projection has a bias, and whether the output projection has one.
    pub(super) bias: [bool; 2],
    pub(super) module: &'static str,
    pub(super) norm: Option<GatedNorm>,
    /// Factors of the parts of the input projection: gate `z`, `x`, `B`, `C` and time step `dt`.
    pub(super) scales: [f32; 5],
}

/// A norm over groups of channels, before or after the gate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct GatedNorm {
    /// The name of the weight.
    pub(super) weight: &'static str,
    pub(super) groups: usize,
    pub(super) eps: f64,
    pub(super) before_gate: bool,
}

impl Mamba2 {
    /// Adds the mixer for the input `x`; returns the output of its output projection.
    pub(super) fn add(&self, g: &mut GraphBuilder, x: NodeId, hidden: usize) -> NodeId {
        let Self { space, module, .. } = *self;
        let (width, mixed, heads) = (space.width(), space.mixed_width(), space.heads);
        let period = width + mixed + heads;
        let all = g.add(linear(&format!("{module}.in_proj"), [period, hidden], self.bias[0]), &[x]);
        let part = |g: &mut GraphBuilder, start: usize, width: usize, scale: f32| {
            let taken = g.add(Op::Slice { period, start, width }, &[all]);
            scaled(g, taken, scale)
        };
        let [gate, input, write, read, step] = self.scales;
        let groups = space.groups * space.state_dim;
        let z = part(g, 0, width, gate);
        let convolved = if [input, write, read] == [1.0; 3] {
            part(g, width, mixed, 1.0)
        } else {
            let x = part(g, width, width, input);
            let b = part(g, 2 * width, groups, write);
            let c = part(g, 2 * width + groups, groups, read);
            g.add(Op::Concatenate, &[x, b, c])
        };
        let dt = part(g, width + mixed, heads, step);
        let recurrent = |name: String, kind| Op::Recurrent(Recurrent { name, kind });
        let convolution = Convolution {
            channels: mixed,
            kernel: self.kernel,
            bias: self.conv_bias,
            activation: Some(Activation::Silu),
        };
        let convolution = RecurrentKind::Convolution(convolution);
        let mixed = g.add(recurrent(format!("{module}.conv1d"), convolution), &[convolved]);
        let spaces = recurrent(module.to_owned(), RecurrentKind::StateSpace(space));
        let mut y = g.add(spaces, &[mixed, dt]);
        let norm = |g: &mut GraphBuilder, norm: GatedNorm, y: NodeId| {
            let normed = g.add(Op::Normalize { width: width / norm.groups, eps: norm.eps }, &[y]);
            g.add(Op::ScaleBy { tensor: norm.weight, width, heads: None }, &[normed])
        };
        if let Some(first) = self.norm.filter(|norm| norm.before_gate) {
            y = norm(g, first, y);
        }
        y = g.add(Op::Gated(Activation::Silu), &[z, y]);
        if let Some(last) = self.norm.filter(|norm| !norm.before_gate) {
            y = norm(g, last, y);
        }
        g.add(linear(&format!("{module}.out_proj"), [hidden, width], self.bias[1]), &[y])
    }
}

pub(super) fn scaled(g: &mut GraphBuilder, value: NodeId, scale: f32) -> NodeId {
    if scale == 1.0 { value } else { g.add(Op::Scale(scale), &[value]) }
}

/// A larger number of heads, groups or channels means that the configuration is damaged.
const MAX_DIM: usize = 1 << 16;

/// Reads the sizes of a state-space operation. `keys` are the keys of heads, channels per head, groups and channels per
/// state, each with its default.
pub(super) fn state_space(config: &ConfigFields<'_>, keys: [(&str, Option<usize>); 4]) -> Result<StateSpace> {
    let number = |(key, default): (&str, Option<usize>)| {
        let found = config.optional_positive(key)?.or(default);
        match found {
            Some(number) if number <= MAX_DIM => Ok(number),
            Some(number) => Err(config.error(key, format!("is {number}; at most {MAX_DIM} are supported"))),
            None => Err(config.error(key, "is missing")),
        }
    };
    let [heads, head_dim, groups, state_dim] =
        [number(keys[0])?, number(keys[1])?, number(keys[2])?, number(keys[3])?];
    if heads % groups != 0 {
        let reason = format!("is {groups}, which does not divide the number of heads, {heads}");
        return Err(config.error(keys[2].0, reason));
    }
    Ok(StateSpace { heads, groups, head_dim, state_dim, steps: steps(config)? })
}

/// Reads the lower and upper bound of time steps. transformers writes an infinite upper bound as `Infinity`, or as an
/// object with the key `__float__`.
fn steps(config: &ConfigFields<'_>) -> Result<[f32; 2]> {
    const KEY: &str = "time_step_limit";
    let Some(limits) = config.get(KEY) else { return Ok([0.0, f32::INFINITY]) };
    let wrong = || {
        config.error(KEY, "must be a list of two numbers in ascending order, the first of them at least 0")
    };
    let [min, max] = limits.as_array().map(Vec::as_slice).ok_or_else(wrong)? else { return Err(wrong()) };
    let infinite = max.as_str() == Some("Infinity")
        || max.get("__float__").and_then(serde_json::Value::as_str) == Some("Infinity");
    let min = min.as_f64().map(|v| v as f32).ok_or_else(wrong)?;
    let max = if infinite { f32::INFINITY } else { max.as_f64().map(|v| v as f32).ok_or_else(wrong)? };
    if min >= 0.0 && min <= max { Ok([min, max]) } else { Err(wrong()) }
}
