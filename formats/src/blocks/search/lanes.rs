//! One value of several parts, in lanes.

use super::super::SUPER;

/// Number of parts that are searched in parallel.
pub(in crate::blocks) const LANES: usize = 16;

/// One value of each part.
pub(in crate::blocks) type Lanes = [f32; LANES];

/// Element `e` of the result holds value `e` of up to [`LANES`] consecutive parts of `N` values. Lanes without a part
/// are zero.
#[inline(always)]
pub(in crate::blocks) fn load<const N: usize>(values: &[f32]) -> [Lanes; N] {
    let mut lanes = [[0.0; LANES]; N];
    for (i, part) in values.chunks_exact(N).take(LANES).enumerate() {
        for e in 0..N {
            lanes[e][i] = part[e];
        }
    }
    lanes
}

/// Returns the sum of squares of each super-block, in element order.
#[inline(always)]
pub(in crate::blocks) fn square_sums(values: &[f32]) -> Lanes {
    let values = load::<SUPER>(values);
    let mut sums = [0.0; LANES];
    for x in &values {
        for i in 0..LANES {
            sums[i] += x[i] * x[i];
        }
    }
    sums
}

/// `im·√(σ² + x²)`, the weights of parts.
#[inline(always)]
pub(in crate::blocks) fn weigh_lanes<const N: usize>(
    importance: &[Lanes; N],
    sigma2: &Lanes,
    x: &[Lanes; N],
) -> [Lanes; N] {
    let mut weights = [[0.0; LANES]; N];
    for e in 0..N {
        for i in 0..LANES {
            weights[e][i] = importance[e][i] * (sigma2[i] + x[e][i] * x[e][i]).sqrt();
        }
    }
    weights
}

#[inline(always)]
pub(in crate::blocks) fn squares<const N: usize>(values: &[Lanes; N]) -> [Lanes; N] {
    let mut squares = [[0.0; LANES]; N];
    for e in 0..N {
        for i in 0..LANES {
            squares[e][i] = values[e][i] * values[e][i];
        }
    }
    squares
}

/// The element of largest magnitude of each part, with its sign; the first one on ties.
#[inline(always)]
pub(super) fn largest<const N: usize>(values: &[Lanes; N]) -> Lanes {
    let mut found = [0.0_f32; LANES];
    for x in values {
        for i in 0..LANES {
            found[i] = if x[i].abs() > found[i].abs() { x[i] } else { found[i] };
        }
    }
    found
}
