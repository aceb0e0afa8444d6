//! Constructs Hadamard matrices of orders `4t`, `t` odd, without tables.
//!
//! - Paley (1933): from the quadratic residues of a prime `q`. The first construction has order `q + 1` for
//!   `q ≡ 3 mod 4`; the second has order `2 (q + 1)` for `q ≡ 1 mod 4`.
//! - Williamson (1944): four symmetric circulant sequences of ±1 of length `t`, whose autocorrelations cancel, give
//!   order `4t`. The search is restricted to sequences that are constant on the orbits of a group of multipliers, and
//!   tries the largest group first. It is exhaustive for each group with at most eleven orbits; other groups
//!   are skipped.
//! - Cooper and Wallis (1972): Williamson's four sequences of length `w`, combined three at a time into sequences of
//!   length `3w`, give order `12w`.
//!
//! The last two use the array of Goethals and Seidel (1967), which does not require symmetry.

use core::array::from_fn;
use std::collections::{HashMap, HashSet};

/// The construction of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Construction {
    /// From the quadratic residues of this prime, order `q + 1`.
    PaleyFirst(usize),
    /// From the quadratic residues of this prime, order `2 (q + 1)`.
    PaleySecond(usize),
    /// From four sequences of this length `t`, order `4t`.
    Williamson(usize),
    /// From four sequences of this length `w`, order `12w`.
    CooperWallis(usize),
}

/// The largest order that is constructed.
pub(super) const MAX_ORDER: usize = 256;

/// The maximum number of orbits; the cost of the search is exponential in it.
const CLASSES: usize = 11;

/// Returns the matrix of order `4t`, `t` odd and greater than 1, row-major, with entries ±1.
pub(super) fn matrix(order: usize) -> Option<(Construction, Vec<f32>)> {
    let t = order / 4;
    if order > MAX_ORDER || order != 4 * t || t.is_multiple_of(2) || t < 3 {
        return None;
    }
    if is_prime(order - 1) {
        return Some((Construction::PaleyFirst(order - 1), paley_first(order - 1)));
    }
    let q = order / 2 - 1;
    if is_prime(q) && q % 4 == 1 {
        return Some((Construction::PaleySecond(q), paley_second(q)));
    }
    if let Some(sequences) = williamson(t) {
        return Some((Construction::Williamson(t), goethals_seidel(&sequences)));
    }
    let w = t / 3;
    if t.is_multiple_of(9) || !t.is_multiple_of(3) {
        return None;
    }
    williamson(w).map(|four| (Construction::CooperWallis(w), goethals_seidel(&cooper_wallis(&four))))
}

fn is_prime(q: usize) -> bool {
    q > 1 && (2..).take_while(|d| d * d <= q).all(|d| !q.is_multiple_of(d))
}

/// The Legendre symbol of every residue modulo a prime: 1 for squares, −1 for non-squares, 0 for zero.
fn residues(q: usize) -> Vec<f32> {
    let mut character = vec![-1.0; q];
    for x in 1..q {
        character[x * x % q] = 1.0;
    }
    character[0] = 0.0;
    character
}

fn square(order: usize, entry: impl Fn(usize, usize) -> f32) -> Vec<f32> {
    (0..order * order).map(|i| entry(i / order, i % order)).collect()
}

/// `I + S`, where `S` is the bordered skew-symmetric matrix of residues.
fn paley_first(q: usize) -> Vec<f32> {
    let character = residues(q);
    square(q + 1, |r, c| match (r, c) {
        _ if r == c => 1.0,
        (0, _) => 1.0,
        (_, 0) => -1.0,
        _ => character[(q + c - r) % q],
    })
}

/// `S ⊗ [1 1; 1 −1] + I ⊗ [1 −1; −1 −1]`, where `S` is the bordered symmetric matrix of residues.
fn paley_second(q: usize) -> Vec<f32> {
    let character = residues(q);
    square(2 * (q + 1), |r, c| {
        let (lower, right) = (r % 2 == 1, c % 2 == 1);
        let (r, c) = (r / 2, c / 2);
        if r == c {
            return if lower || right { -1.0 } else { 1.0 };
        }
        let s = if r == 0 || c == 0 { 1.0 } else { character[(q + c - r) % q] };
        if lower && right { -s } else { s }
    })
}

/// The matrix of four circulant sequences of length `t`: with `A[r, c] = a[c − r]` and `R` the reflection,
/// `[A BR CR DR; −BR A DᵀR −CᵀR; −CR −DᵀR A BᵀR; −DR CᵀR −BᵀR A]`.
fn goethals_seidel(sequences: &[Vec<f32>; 4]) -> Vec<f32> {
    let t = sequences[0].len();
    let block = |which: usize, reflected: bool, transposed: bool, r: usize, c: usize| {
        let c = if reflected { (t - c) % t } else { c };
        let (r, c) = if transposed { (c, r) } else { (r, c) };
        sequences[which][(t + c - r) % t]
    };
    square(4 * t, |r, c| {
        let (row, column) = (r / t, c / t);
        let (r, c) = (r % t, c % t);
        let (which, transposed, sign) = match (row, column) {
            _ if row == column => return block(0, false, false, r, c),
            (0, which) => (which, false, 1.0),
            (which, 0) => (which, false, -1.0),
            (1, 2) => (3, true, 1.0),
            (1, _) => (2, true, -1.0),
            (2, 1) => (3, true, -1.0),
            (2, _) => (1, true, 1.0),
            (_, 1) => (2, true, 1.0),
            _ => (1, true, -1.0),
        };
        sign * block(which, true, transposed, r, c)
    })
}

/// Four circulant sequences of length `3w` from four of length `w`; 3 must not divide `w`.
fn cooper_wallis([a, b, c, d]: &[Vec<f32>; 4]) -> [Vec<f32>; 4] {
    let w = a.len();
    let join = |parts: [(f32, &[f32]); 3]| -> Vec<f32> {
        (0..3 * w).map(|i| parts[i % 3].0 * parts[i % 3].1[i % w]).collect()
    };
    [
        join([(1.0, a), (1.0, b), (1.0, c)]),
        join([(-1.0, b), (1.0, a), (1.0, d)]),
        join([(-1.0, c), (-1.0, d), (1.0, a)]),
        join([(-1.0, d), (1.0, c), (-1.0, b)]),
    ]
}

/// Searches four symmetric circulant sequences of odd length `t` whose autocorrelations add up to zero at all shifts
/// except 0.
fn williamson(t: usize) -> Option<[Vec<f32>; 4]> {
    let units = (1..t).filter(|u| gcd(*u, t) == 1);
    let mut groups: Vec<Vec<usize>> = units.map(|u| multipliers(t, u)).collect();
    groups.sort_by_key(|group| core::cmp::Reverse(group.len()));
    groups.dedup();
    groups.iter().find_map(|group| cancelling(t, &classes(t, group)))
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The group of multipliers generated by −1 and `u`.
fn multipliers(t: usize, u: usize) -> Vec<usize> {
    let mut group = vec![1];
    let mut at = 0;
    while at < group.len() {
        for next in [group[at] * u % t, group[at] * (t - 1) % t] {
            if !group.contains(&next) {
                group.push(next);
            }
        }
        at += 1;
    }
    group.sort_unstable();
    group
}

/// The orbits of the nonzero residues under the multipliers.
fn classes(t: usize, group: &[usize]) -> Vec<Vec<usize>> {
    let mut classes: Vec<Vec<usize>> = Vec::new();
    for x in 1..t {
        if !classes.iter().any(|class| class.contains(&x)) {
            let mut class: Vec<usize> = group.iter().map(|g| x * g % t).collect();
            class.sort_unstable();
            class.dedup();
            classes.push(class);
        }
    }
    classes
}

/// Finds the first four sequences that are constant on orbits and whose autocorrelations cancel, by a
/// meet-in-the-middle search over pairs.
fn cancelling(t: usize, classes: &[Vec<usize>]) -> Option<[Vec<f32>; 4]> {
    if classes.len() > CLASSES {
        return None;
    }
    let sequence = |signs: usize| {
        let mut sequence = vec![1.0_f32; t];
        for (_, class) in classes.iter().enumerate().filter(|(i, _)| signs >> i & 1 == 1) {
            class.iter().for_each(|&x| sequence[x] = -1.0);
        }
        sequence
    };
    // One shift per orbit is enough, since the correlation is the same for all shifts of an orbit. Sums of two
    // correlations are at most `2t ≤ 126`, which fits `i8`.
    let correlations = |signs: usize| -> [i8; CLASSES] {
        let (s, mut out) = (sequence(signs), [0; CLASSES]);
        for (out, class) in out.iter_mut().zip(classes) {
            *out = (0..t).map(|i| s[i] * s[(i + class[0]) % t]).sum::<f32>() as i8;
        }
        out
    };
    let mut seen = HashSet::new();
    let all = (0..1 << classes.len()).map(|signs| (correlations(signs), signs));
    let singles: Vec<([i8; CLASSES], usize)> = all.filter(|(c, _)| seen.insert(*c)).collect();
    let mut pairs: HashMap<[i8; CLASSES], [usize; 2]> = HashMap::new();
    for (i, (left, a)) in singles.iter().enumerate() {
        for (right, b) in &singles[..=i] {
            let sum: [i8; CLASSES] = from_fn(|i| left[i] + right[i]);
            pairs.entry(sum).or_insert([*a, *b]);
            if let Some([c, d]) = pairs.get(&sum.map(|s| -s)) {
                return Some([*a, *b, *c, *d].map(sequence));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `H · Hᵀ = n · I` for every order, except those listed, which cannot be constructed.
    #[test]
    fn matrices_are_hadamard() {
        let mut none = Vec::new();
        for order in (12..=MAX_ORDER).step_by(8) {
            let Some((_, h)) = matrix(order) else {
                none.push(order);
                continue;
            };
            assert!(h.iter().all(|v| v.abs() == 1.0), "{order}");
            for r in 0..order {
                for other in 0..=r {
                    let rows = [r, other].map(|r| &h[r * order..][..order]);
                    let product: f32 = rows[0].iter().zip(rows[1]).map(|(a, b)| a * b).sum();
                    assert_eq!(product, if r == other { order as f32 } else { 0.0 }, "{order}: {r} {other}");
                }
            }
        }
        assert_eq!(none, [100, 116, 188, 236, 244]);
        let constructed = |order: usize| matrix(order).map(|(construction, _)| construction);
        for (order, construction) in [
            (12, Construction::PaleyFirst(11)),
            (20, Construction::PaleyFirst(19)),
            (28, Construction::PaleySecond(13)),
            (36, Construction::PaleySecond(17)),
            (44, Construction::PaleyFirst(43)),
            (52, Construction::Williamson(13)),
            (60, Construction::PaleyFirst(59)),
            (92, Construction::Williamson(23)),
            (108, Construction::PaleyFirst(107)),
            (140, Construction::PaleyFirst(139)),
            (148, Construction::PaleySecond(73)),
            (156, Construction::CooperWallis(13)),
            (172, Construction::Williamson(43)),
        ] {
            assert_eq!(constructed(order), Some(construction));
        }
        assert!([0, 4, 8, 10, 16, 24, 260].into_iter().all(|order| matrix(order).is_none()));
    }
}
