//! Norms and activations, value by value.

/// RMSNorm of a row: `y = (x · r) · γ` with `r = 1 / √(Σ x² / k + ε)`, each step rounded once.
///
/// The sum of squares uses 64 lanes: the square of value `i` is added to lane `i mod 64` by a fused multiply-add, in
/// order; then the upper half of the lanes is added to the lower half, from 32 + 32 down to 1 + 1. Its relative error
/// is at most `(k / 64 + 7) · 2⁻²⁴`, since nothing cancels. If the sum overflows `f32`, `r` is NaN.
///
/// # Panics
/// When `x` and the weight have different lengths.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    assert_eq!(x.len(), weight.len(), "a weight of the wrong width");
    let mut lanes = [0.0_f32; 64];
    for (i, x) in x.iter().enumerate() {
        lanes[i % 64] = x.mul_add(*x, lanes[i % 64]);
    }
    for half in [32, 16, 8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    let r = match lanes[0].is_finite() {
        true => 1.0 / (lanes[0] / x.len() as f32 + eps).sqrt(),
        false => f32::NAN,
    };
    x.iter().zip(weight).map(|(x, w)| x * r * w).collect()
}

/// `silu` is zero below the negative of this: there `|g · e^g|` is less than `1.5 · 10⁻³⁶`.
pub(crate) const SILU_END: f32 = 87.0;
pub(crate) const LOG2_E: f32 = core::f32::consts::LOG2_E;
/// `ln 2` in two parts.
pub(crate) const LN_2: [f32; 2] = [core::f32::consts::LN_2, -1.904_654_3e-9];
/// `1 / i!` from 7 down to 0: the next term is below `2⁻²⁷` for the reduced argument, `|r| ≤ ln 2 / 2`.
pub(crate) const EXP_TERMS: [f32; 8] =
    [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// `g · σ(g)`, `σ(g) = 1 / (1 + e^−g)`, with a custom exponential, so that results are bit-identical on all machines:
/// `e^z = 2^n · Σ rⁱ / i!`, `n = round(z · log₂ e)`, `r = z − n · ln 2`, where the sum up to `i = 7` is computed by
/// Horner's rule with fused multiply-adds.
///
/// For `g ≥ −87`, the relative error is at most `2⁻²²` if `silu(g)` is a normal number. For smaller `g`, the result is
/// −0, with an absolute error of at most `1.5 · 10⁻³⁶`. NaN and −∞ give NaN, as in the formula.
pub fn silu(g: f32) -> f32 {
    g * sigmoid(g)
}

/// `σ(g)`, 0 below −87.
fn sigmoid(g: f32) -> f32 {
    let z = (-g).clamp(-SILU_END, SILU_END);
    let n = (z * LOG2_E).round_ties_even();
    let r = n.mul_add(-LN_2[1], n.mul_add(-LN_2[0], z));
    let sum = EXP_TERMS[1..].iter().fold(EXP_TERMS[0], |sum, &term| sum.mul_add(r, term));
    let sigmoid = 1.0 / (1.0 + sum * 2.0_f32.powi(n as i32));
    if g < -SILU_END { 0.0 } else { sigmoid }
}

/// `2 √(2/π)`, and 0.044715 times this.
pub(crate) const GELU: [f32; 2] = [1.595_769, 0.071_354_814];

/// GELU in the tanh approximation, `g / 2 · (1 + tanh(√(2/π) (g + 0.044715 g³)))`, which is
/// `g · σ(g · (2 √(2/π) + 2 √(2/π) 0.044715 g²))`, with the `σ` of [`silu`].
///
/// Within `2⁻²⁰ |g|` of the formula. NaN and −∞ give NaN.
pub fn gelu_tanh(g: f32) -> f32 {
    g * sigmoid(g * (g * g).mul_add(GELU[1], GELU[0]))
}

/// The gated activation of gpt-oss, `g · σ(alpha · g) · (u + 1)`, where `g = min(gate, limit)` and
/// `u = clamp(up, −limit, limit)`. Each step is rounded once.
pub fn clamped_gate(gate: f32, up: f32, alpha: f32, limit: f32) -> f32 {
    // These comparisons keep NaN.
    let g = if limit < gate { limit } else { gate };
    let u = if limit < up { limit } else { up };
    let u = if -limit > u { -limit } else { u };
    g * sigmoid(alpha * g) * (u + 1.0)
}

/// `silu(gate) · up`, the product rounded once more.
///
/// # Panics
/// When the two have different lengths.
pub fn silu_mul(gate: &[f32], up: &[f32]) -> Vec<f32> {
    assert_eq!(gate.len(), up.len(), "rows of different widths");
    gate.iter().zip(up).map(|(g, u)| silu(*g) * u).collect()
}
