//! Compares the pass with the definitions.

use std::sync::Arc;

use quant_core::model::{Head, HeadParts, LogitsTransform};
use quant_formats::checkpoint::Dtype;
use quant_formats::random::mix;

use super::exp::{EXP_BOUND, exp};
use super::*;
use crate::Position;

/// `ln Σ exp(x)` in double precision.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - f64::from(max)).exp()).sum();
    f64::from(max) + sum.ln()
}

fn log_sum_exp_of_singles(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from((x - max).exp())).sum();
    f64::from(max) + sum.ln()
}

fn top(logits: &[f32]) -> Vec<usize> {
    let mut best: Vec<usize> = Vec::new();
    for (i, &x) in logits.iter().enumerate() {
        let at = best.iter().position(|&b| x > logits[b]).unwrap_or(best.len());
        best.insert(at, i);
        best.truncate(5);
    }
    best
}

/// `KL(r ‖ m)`, term by term.
fn divergence(r: &[f32], m: &[f32], norm: fn(&[f32]) -> f64) -> f64 {
    let (r_norm, m_norm) = (norm(r), norm(m));
    let term = |(&r, &m): (&f32, &f32)| {
        let log_p = f64::from(r) - r_norm;
        if log_p == f64::NEG_INFINITY { 0.0 } else { log_p.exp() * (log_p - (f64::from(m) - m_norm)) }
    };
    r.iter().zip(m).map(term).sum::<f64>().max(0.0)
}

fn definition(r: &[f32], m: &[f32], next: u32, norm: fn(&[f32]) -> f64) -> Position {
    let (r_top, m_top) = (top(r), top(m));
    Position {
        reference_nll: norm(r) - f64::from(r[next as usize]),
        model_nll: norm(m) - f64::from(m[next as usize]),
        kl: divergence(r, m, norm),
        confidence: (f64::from(r[r_top[0]]) - norm(r)).exp(),
        top1: r_top[0] == m_top[0],
        top5: r_top.iter().filter(|t| m_top.contains(t)).count() as f64 / r_top.len() as f64,
        floor: None,
    }
}

/// A number in [−1, 1).
fn uniform(seed: u64, i: usize) -> f32 {
    (mix(mix(seed) ^ i as u64) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// A head with these logits for inputs that are a unit matrix.
fn head_of(vocab: usize, logits: &[f32]) -> Head<'static> {
    let width = logits.len() / vocab;
    let columns = (0..vocab).flat_map(|v| logits.iter().skip(v).step_by(vocab).copied());
    let weight = Arc::new(Dtype::F32.narrow(&columns.collect::<Vec<f32>>()));
    let transform = LogitsTransform::IDENTITY;
    let parts = HeadParts { shape: [vocab, width], dtype: Dtype::F32, weight, bias: None, transform };
    Head::from_parts(parts).unwrap()
}

/// The result of the pass for these logits, which must be the same from a head and from given logits.
fn passed(vocab: usize, logits: &[&[f32]], next: &[u32]) -> Vec<Sums> {
    let heads: Vec<Head<'_>> = logits.iter().map(|logits| head_of(vocab, logits)).collect();
    let mut unit = vec![0.0_f32; next.len() * next.len()];
    unit.iter_mut().step_by(next.len() + 1).for_each(|x| *x = 1.0);
    let sources: Vec<Source<'_>> = heads.iter().map(|output| Source { output, inputs: &unit }).collect();
    let sums = pass(&sources, next, true, &CancelToken::new()).unwrap();
    let at_hand = Given(vocab);
    let sources: Vec<Source<'_>> = logits.iter().map(|inputs| Source { output: &at_hand, inputs }).collect();
    let again = pass(&sources, next, true, &CancelToken::new()).unwrap();
    let texts = [&again, &sums].map(|sums| format!("{sums:?}"));
    assert!(again == sums || (texts[0].contains("NaN") && texts[0] == texts[1]), "{texts:?}");
    sums
}

#[test]
fn exp_is_within_its_bound() {
    let mut worst = 0.0_f64;
    for i in 0..3_000_000 {
        let x = match i % 3 {
            0 => -f64::from(i) * 2.35e-4,
            1 => -f64::from(i) * 3e-7,
            _ => f64::from(uniform(1, i as usize)),
        };
        let exact = x.exp();
        worst = worst.max(((exp(x) - exact) / exact).abs());
    }
    assert!(worst < EXP_BOUND, "{worst:e}");
    assert!(worst > EXP_BOUND / 100.0, "the bound is not tight: {worst:e}");
    assert_eq!((exp(0.0), exp(-708.0), exp(f64::NEG_INFINITY)), (1.0, 0.0, 0.0));
    assert!(exp(f64::NAN).is_nan());
}

fn pair(vocab: usize, position: usize, spread: f32, noise: f32) -> [Vec<f32>; 2] {
    let r: Vec<f32> = (0..vocab)
        .map(|i| {
            let x = uniform(position as u64, i);
            // Rounding produces ties.
            (spread * (x * x * x * 2.0 + if i % 97 == position % 97 { 0.7 } else { 0.0 }) * 64.0).round()
                / 64.0
        })
        .collect();
    let m = r.iter().enumerate().map(|(i, x)| x + noise * uniform(1 << 40 | position as u64, i)).collect();
    [r, m]
}

fn near(found: f64, exact: f64, relative: f64, absolute: f64) {
    assert!((found - exact).abs() <= relative * exact.abs() + absolute, "{found:e} {exact:e}");
}

#[test]
fn a_pass_gives_what_the_definitions_say() {
    // Vocabularies of one tile, of incomplete tiles, and of more tiles than stripes.
    for (vocab, positions, spread, noise) in [
        (1, 3, 1.0, 0.1),
        (3, 5, 8.0, 0.5),
        (40, 70, 8.0, 0.01),
        (256, 9, 30.0, 1.0),
        (1000, 33, 12.0, 0.3),
        (4000, 5, 5.0, 1e-3),
        (8500, 2, 5.0, 0.2),
    ] {
        let rows: Vec<[Vec<f32>; 2]> = (0..positions).map(|p| pair(vocab, p, spread, noise)).collect();
        let column = |which: usize| rows.iter().flat_map(|r| r[which].iter().copied()).collect::<Vec<f32>>();
        let next: Vec<u32> = (0..positions).map(|p| (mix(p as u64) % vocab as u64) as u32).collect();
        let (r, m) = (column(0), column(1));
        let sums = passed(vocab, &[&r, &m, &r], &next);
        for ((sums, rows), &next) in sums.chunks(3).zip(&rows).zip(&next) {
            let found = Position::new(&sums[0], &sums[1], Some(&sums[2]));
            let exact = definition(&rows[0], &rows[1], next, log_sum_exp);
            assert_eq!((found.top1, found.top5), (exact.top1, exact.top5));
            assert_eq!(sums[0].top().iter().map(|t| *t as usize).collect::<Vec<_>>(), top(&rows[0]));
            assert_eq!(found.floor, Some(0.0));
            near(found.reference_nll, exact.reference_nll, 1e-12, 1e-13);
            near(found.model_nll, exact.model_nll, 1e-12, 1e-13);
            near(found.confidence, exact.confidence, 1e-12, 0.0);
            near(found.kl, exact.kl, 1e-9, 1e-13);
        }
    }
}

/// Exponentials in single precision differ by about 2⁻²³, their mean by far less.
#[test]
fn means_are_those_of_singles_before() {
    let (vocab, positions) = (3000, 400);
    let rows: Vec<[Vec<f32>; 2]> = (0..positions).map(|p| pair(vocab, p, 6.0, 0.3)).collect();
    let column = |which: usize| rows.iter().flat_map(|r| r[which].iter().copied()).collect::<Vec<f32>>();
    let next: Vec<u32> = (0..positions).map(|p| (mix(p as u64) % vocab as u64) as u32).collect();
    let (r, m) = (column(0), column(1));
    let sums = passed(vocab, &[&r, &m], &next);
    let mut means = [[0.0; 2]; 3];
    for ((sums, rows), &next) in sums.chunks(2).zip(&rows).zip(&next) {
        let found = Position::new(&sums[0], &sums[1], None);
        let before = definition(&rows[0], &rows[1], next, log_sum_exp_of_singles);
        assert_eq!((found.top1, found.top5), (before.top1, before.top5));
        for (mean, pair) in means.iter_mut().zip([
            [found.reference_nll, before.reference_nll],
            [found.model_nll, before.model_nll],
            [found.kl, before.kl],
        ]) {
            near(pair[0], pair[1], 0.0, 1.2e-7);
            mean.iter_mut().zip(pair).for_each(|(m, x)| *m += x / positions as f64);
        }
    }
    let [r_nll, m_nll, kl] = means;
    near(r_nll[0], r_nll[1], 1e-9, 0.0);
    near(m_nll[0], m_nll[1], 1e-9, 0.0);
    near(kl[0], kl[1], 0.0, 5e-9);
}

#[test]
fn what_is_not_finite_shows_and_what_is_impossible_does_not_matter() {
    let vocab = 600;
    let [mut r, m] = pair(vocab, 0, 5.0, 0.2);
    let kl = |r: &[f32], m: &[f32]| {
        let sums = passed(vocab, &[r, m], &[7]);
        (sums[0].nll(), sums[1].nll(), sums[1].divergence_from(&sums[0]))
    };
    // The reference gives all tokens of the first tile but one the probability 0, the model only some.
    r[..300].fill(f32::NEG_INFINITY);
    r[7] = 1.0;
    let mut absent = m.clone();
    absent[..7].fill(f32::NEG_INFINITY);
    let found = kl(&r, &absent);
    near(found.2, divergence(&r, &absent, log_sum_exp), 1e-9, 0.0);
    near(found.0, log_sum_exp(&r) - 1.0, 1e-12, 0.0);
    let mut never = m.clone();
    never[400] = f32::NEG_INFINITY;
    assert_eq!(kl(&r, &never).2, f64::INFINITY);
    for bad in [f32::NAN, f32::INFINITY] {
        for place in [3, 550] {
            let mut broken = m.clone();
            broken[place] = bad;
            assert!(kl(&broken, &m).0.is_nan() && kl(&r, &broken).1.is_nan(), "{bad} at {place}");
            assert!(kl(&broken, &m).2.is_nan() && kl(&r, &broken).2.is_nan(), "{bad} at {place}");
        }
    }
}

#[test]
fn the_same_bits_on_any_number_of_threads() {
    let (vocab, positions) = (1500, 130);
    let rows: Vec<[Vec<f32>; 2]> = (0..positions).map(|p| pair(vocab, p, 9.0, 0.3)).collect();
    let column = |which: usize| rows.iter().flat_map(|r| r[which].iter().copied()).collect::<Vec<f32>>();
    let next: Vec<u32> = (0..positions).map(|p| (p * 11) as u32 % vocab as u32).collect();
    let (r, m) = (column(0), column(1));
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| passed(vocab, &[&r, &m], &next))
    };
    let one = run(1);
    assert!(one == run(2) && one == run(7));
}
