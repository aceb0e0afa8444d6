use proptest::prelude::*;

use super::{Candidate, GenerationSettings, Sampler};
use crate::Category;

fn sampling() -> GenerationSettings {
    GenerationSettings { do_sample: true, top_k: 0, ..GenerationSettings::default() }
}

/// The candidates after tokens 0 and 1, which are the prompt.
fn candidates(settings: &GenerationSettings, logits: &[f32]) -> Vec<(u32, f64)> {
    let candidates = Sampler::new(settings).unwrap().candidates(logits, &[0, 1], 2).unwrap();
    candidates.into_iter().map(|Candidate { token, probability }| (token, probability)).collect()
}

fn tokens(settings: &GenerationSettings, logits: &[f32]) -> Vec<u32> {
    candidates(settings, logits).into_iter().map(|(token, _)| token).collect()
}

fn logits(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

#[test]
fn each_setting_by_hand() {
    let of = logits(&[0.1, 0.4, 0.2, 0.3]);
    assert_eq!(tokens(&sampling(), &of), [1, 3, 2, 0]);
    for (token, probability) in candidates(&sampling(), &of) {
        assert!((probability - f64::from(of[token as usize]).exp()).abs() < 1e-6);
    }
    let top_k = |top_k| GenerationSettings { top_k, ..sampling() };
    assert_eq!(tokens(&top_k(2), &of), [1, 3]);
    assert_eq!(tokens(&top_k(1), &of), [1]);
    assert_eq!(tokens(&top_k(9), &of), [1, 3, 2, 0]);
    assert_eq!(tokens(&top_k(2), &[1.0, 0.5, 0.5, 0.5]), [0, 1, 2, 3], "equal to the last one");
    let top_p = |top_p| GenerationSettings { top_p, ..sampling() };
    assert_eq!(tokens(&top_p(0.39), &of), [1]);
    assert_eq!(tokens(&top_p(0.41), &of), [1, 3]);
    assert_eq!(tokens(&top_p(0.91), &of), [1, 3, 2, 0]);
    assert_eq!(tokens(&top_p(1e-30), &of), [1]);
    let min_p = |min_p| GenerationSettings { min_p, ..sampling() };
    assert_eq!(tokens(&min_p(0.6), &of), [1, 3]);
    assert_eq!(tokens(&min_p(1.0), &of), [1]);
    // A temperature of one half squares the probabilities.
    let cold = candidates(&GenerationSettings { temperature: 0.5, ..sampling() }, &of);
    assert!((cold[0].1 - 0.16 / 0.30).abs() < 1e-6, "{cold:?}");
    // Tokens 0 and 1 have occurred: positive logits are divided, negative ones multiplied.
    let penalty = GenerationSettings { repetition_penalty: 2.0, ..sampling() };
    let penalized = candidates(&penalty, &[2.0, -1.0, 0.0, -1.5]);
    let expected = [1.0_f64, -2.0, 0.0, -1.5].map(f64::exp);
    let total: f64 = expected.iter().sum();
    for (token, probability) in penalized {
        assert!((probability - expected[token as usize] / total).abs() < 1e-9);
    }
    let suppressed = GenerationSettings { suppress_tokens: vec![1, 99], ..sampling() };
    assert_eq!(tokens(&suppressed, &of), [3, 2, 0]);
}

#[test]
fn ends_and_runs_are_withheld() {
    let settings = GenerationSettings { min_new_tokens: 2, eos_token_ids: vec![3], ..Default::default() };
    let sampler = Sampler::new(&settings).unwrap();
    let next =
        |tokens: &[u32], prompt| sampler.candidates(&[0.0, 1.0, 2.0, 3.0], tokens, prompt).unwrap()[0].token;
    assert_eq!([next(&[0], 1), next(&[0, 1], 1), next(&[0, 1, 2], 1)], [2, 2, 3]);
    let settings = GenerationSettings { no_repeat_ngram_size: 2, ..Default::default() };
    let sampler = Sampler::new(&settings).unwrap();
    let next = |tokens: &[u32]| sampler.candidates(&[0.0, 1.0, 2.0, 3.0], tokens, 0).unwrap()[0].token;
    assert_eq!([next(&[1, 3, 1]), next(&[3, 1, 1]), next(&[]), next(&[3])], [2, 3, 3, 3]);
    let all = GenerationSettings { no_repeat_ngram_size: 1, ..Default::default() };
    let error = Sampler::new(&all).unwrap().candidates(&[0.0; 3], &[0, 1, 2], 0).unwrap_err();
    assert_eq!(error.category(), Category::Usage);
}

#[test]
fn logits_without_a_choice_are_errors() {
    let settings = GenerationSettings::default();
    let mut sampler = Sampler::new(&settings).unwrap();
    for bad in [[f32::NAN, 0.0], [0.0, f32::INFINITY], [f32::NEG_INFINITY; 2]] {
        assert_eq!(sampler.choose(&bad, &[0], 1).unwrap_err().category(), Category::Numeric);
    }
    assert_eq!(sampler.choose(&[f32::NEG_INFINITY, -3.0], &[0], 1).unwrap().token, 1);
    assert!(Sampler::new(&GenerationSettings { top_p: 0.0, ..settings.clone() }).is_err());
}

#[test]
fn a_seed_draws_the_same_and_frequencies_are_the_probabilities() {
    let probabilities = [0.5, 0.3, 0.15, 0.05];
    let of = logits(&probabilities);
    let drawn = |seed| -> Vec<u32> {
        let settings = GenerationSettings { seed, ..sampling() };
        let mut sampler = Sampler::new(&settings).unwrap();
        (0..20_000).map(|_| sampler.choose(&of, &[0], 1).unwrap().token).collect()
    };
    let first = drawn(7);
    assert_eq!(first, drawn(7));
    assert_ne!(first, drawn(8));
    for (token, p) in probabilities.iter().enumerate() {
        let share = first.iter().filter(|t| **t == token as u32).count() as f64 / first.len() as f64;
        // Five standard errors.
        let bound = 5.0 * (f64::from(*p) * (1.0 - f64::from(*p)) / first.len() as f64).sqrt();
        assert!((share - f64::from(*p)).abs() < bound, "{token}: {share}");
    }
    let settings = GenerationSettings { temperature: 0.5, ..sampling() };
    let choice = Sampler::new(&settings).unwrap().choose(&of, &[0], 1).unwrap();
    let p = f64::from(probabilities[choice.token as usize]);
    assert!((choice.logprob - p.ln()).abs() < 1e-6);
    let squares: f64 = probabilities.iter().map(|p| f64::from(p * p)).sum();
    assert!((choice.sampling_logprob - (p * p / squares).ln()).abs() < 1e-6);
}

proptest! {
    /// The definition as in transformers, filter by filter over all tokens.
    #[test]
    fn candidates_are_those_of_the_definition(
        logits in prop::collection::vec(-8.0_f32..8.0, 1..40),
        temperature in 0.1_f32..3.0, top_k in 0_usize..45, top_p in 0.01_f32..=1.0, min_p in 0.0_f32..=1.0,
    ) {
        let settings = GenerationSettings { temperature, top_k, top_p, min_p, ..sampling() };
        let mut scores: Vec<f64> = logits.iter().map(|x| f64::from(x / temperature)).collect();
        let softmax = |scores: &[f64]| -> Vec<f64> {
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|x| (x - largest).exp()).collect();
            let total: f64 = weights.iter().sum();
            weights.iter().map(|w| w / total).collect()
        };
        let best = (0..scores.len()).rev().max_by(|a, b| scores[*a].total_cmp(&scores[*b])).unwrap();
        if top_k > 0 {
            let mut sorted = scores.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let smallest = sorted[top_k.min(sorted.len()) - 1];
            scores.iter_mut().filter(|x| **x < smallest).for_each(|x| *x = f64::NEG_INFINITY);
        }
        // Sums close to a bound may fall on either side.
        let mut near = false;
        let probabilities = softmax(&scores);
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|a, b| probabilities[*b].total_cmp(&probabilities[*a]).then(a.cmp(b)));
        let mut before = 0.0;
        for i in order {
            near |= (before - f64::from(top_p)).abs() < 1e-9;
            if before >= f64::from(top_p) && i != best && top_p < 1.0 {
                scores[i] = f64::NEG_INFINITY;
            }
            before += probabilities[i];
        }
        let probabilities = softmax(&scores);
        for i in 0..scores.len() {
            let min = f64::from(min_p) * probabilities[best];
            near |= (probabilities[i] - min).abs() < 1e-12 && i != best;
            if probabilities[i] < min && i != best {
                scores[i] = f64::NEG_INFINITY;
            }
        }
        prop_assume!(!near);
        let expected = softmax(&scores);
        let found = candidates(&settings, &logits);
        prop_assert_eq!(found.len(), expected.iter().filter(|p| **p > 0.0).count());
        prop_assert!(found.windows(2).all(|w| w[0].1 >= w[1].1));
        for (token, probability) in found {
            prop_assert!((probability - expected[token as usize]).abs() < 1e-9);
        }
    }
}
