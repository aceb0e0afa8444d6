//! From logits to log-probabilities.

/// `ln Σ exp(x)`, with the largest value subtracted and the sum in `f64`.
pub(crate) fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from((x - max).exp())).sum();
    f64::from(max) + sum.ln()
}

/// The position of the largest value; the first of equals.
pub(crate) fn argmax(logits: &[f32]) -> usize {
    let mut best = 0;
    for (i, &x) in logits.iter().enumerate() {
        if x > logits[best] {
            best = i;
        }
    }
    best
}

/// The positions of the `N` largest values, largest first, the first of equals; all of them where there
/// are fewer.
pub(crate) fn top<const N: usize>(logits: &[f32]) -> Vec<usize> {
    let mut best: Vec<usize> = Vec::with_capacity(N + 1);
    for (i, &x) in logits.iter().enumerate() {
        if best.len() == N && x <= logits[best[N - 1]] {
            continue;
        }
        let at = best.iter().position(|&b| x > logits[b]).unwrap_or(best.len());
        best.insert(at, i);
        best.truncate(N);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survives_large_logits_and_keeps_nan() {
        approx::assert_relative_eq!(log_sum_exp(&[1000.0, 1000.0]), 1000.0 + 2.0_f64.ln());
        approx::assert_relative_eq!(log_sum_exp(&[-2000.0, -2000.0]), -2000.0 + 2.0_f64.ln());
        assert!(log_sum_exp(&[0.0, f32::NAN]).is_nan());
        assert_eq!(argmax(&[0.0, 2.0, 2.0]), 1);
        assert_eq!(top::<3>(&[0.0, 2.0, 2.0, 5.0, 2.0, -1.0]), [3, 1, 2]);
        assert_eq!(top::<3>(&[1.0, 2.0]), [1, 0]);
    }
}
