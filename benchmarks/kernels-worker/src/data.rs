//! Weights and activations that are the same in every run, and a reference for their products.

/// The number of distinct weight rows. Further rows repeat them, which no kernel exploits.
pub const BASE: usize = 128;

/// `[BASE, k]`, approximately normal with a standard deviation of 0.02.
pub fn weights(k: usize) -> Vec<f32> {
    noise(k as u64, BASE * k, 0.02)
}

/// `[m, k]`, approximately normal with a standard deviation of 1.
pub fn activations(m: usize, k: usize) -> Vec<f32> {
    noise(1, m * k, 1.0)
}

/// Repeats the rows `[BASE, width]` to get `n` rows.
pub fn repeated<T: Copy>(base: &[T], n: usize) -> Vec<T> {
    let mut all: Vec<T> = base.iter().copied().cycle().take(base.len() * n.div_ceil(BASE)).collect();
    all.truncate(base.len() / BASE * n);
    all
}

/// Sums of twelve uniform values, minus their mean: approximately normal, within six standard deviations.
fn noise(seed: u64, count: usize, deviation: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        // xorshift64*; only the upper 24 bits of its output are used, since the low bits are less random.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f32 / (1 << 24) as f32
    };
    (0..count).map(|_| ((0..12).map(|_| uniform()).sum::<f32>() - 6.0) * deviation).collect()
}

/// Returns the relative error of the first and the last outputs of the first and the last token, compared with the
/// product of the unquantized weights.
pub fn error(out: &[f32], x: &[f32], [n, k]: [usize; 2]) -> f64 {
    let (base, m) = (weights(k), x.len() / k);
    let (mut wrong, mut all) = (0.0, 0.0);
    for token in [0, m - 1] {
        for column in (0..BASE.min(n)).chain(n - BASE.min(n)..n) {
            let row = &base[column % BASE * k..][..k];
            let x = &x[token * k..][..k];
            let expected: f64 = row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            wrong += (f64::from(out[token * n + column]) - expected).powi(2);
            all += expected.powi(2);
        }
    }
    (wrong / all).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_that_of_the_outputs() {
        let [m, n, k] = [2, 3 * BASE, 32];
        let (all, x) = (repeated(&weights(k), n), activations(m, k));
        let dot = |t: usize, r: usize| {
            (0..k).map(|i| f64::from(all[r * k + i]) * f64::from(x[t * k + i])).sum::<f64>() as f32
        };
        let mut out: Vec<f32> = (0..m * n).map(|i| dot(i / n, i % n)).collect();
        assert!(error(&out, &x, [n, k]) < 1e-6);
        out.iter_mut().for_each(|o| *o *= 1.5);
        assert!((error(&out, &x, [n, k]) - 0.5).abs() < 1e-6);
        out.fill(0.0);
        assert!((error(&out, &x, [n, k]) - 1.0).abs() < 1e-6);
    }
}
