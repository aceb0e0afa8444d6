//! Chooses a token from logits. The settings apply in the order of transformers.

use std::cmp::Ordering;
use std::collections::HashSet;

use super::GenerationSettings;
use crate::random::SplitMix64;
use crate::{Error, Result};

/// A token that may be chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Candidate {
    /// The token.
    pub token: u32,
    /// The probability among the candidates.
    pub probability: f64,
}

/// A chosen token.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Choice {
    /// The token.
    pub token: u32,
    /// The natural logarithm of the token's probability in the model: of the softmax of its logits, before any setting
    /// changes them.
    pub logprob: f64,
    /// The natural logarithm of the probability with which the token was drawn; 0 without sampling.
    pub sampling_logprob: f64,
}

/// Chooses tokens according to the settings and a seed.
#[derive(Debug)]
pub struct Sampler<'a> {
    settings: &'a GenerationSettings,
    random: SplitMix64,
}

impl<'a> Sampler<'a> {
    /// Creates a sampler with the seed of the settings.
    ///
    /// # Errors
    /// [`Error::Usage`] when a setting is out of range.
    pub fn new(settings: &'a GenerationSettings) -> Result<Self> {
        settings.check()?;
        Ok(Self { settings, random: SplitMix64(settings.seed) })
    }

    /// Chooses the next token after `tokens` from the logits `[vocab]`. The first `prompt` tokens are the prompt.
    ///
    /// # Errors
    /// [`Error::Logits`] when a logit is NaN or positive infinity, or all are negative infinity; [`Error::Usage`] when
    /// the settings allow no token.
    pub fn choose(&mut self, logits: &[f32], tokens: &[u32], prompt: usize) -> Result<Choice> {
        let candidates = self.candidates(logits, tokens, prompt)?;
        let chosen = match self.settings.do_sample {
            true => self.draw(&candidates),
            false => candidates[0],
        };
        Ok(Choice {
            token: chosen.token,
            logprob: f64::from(logits[chosen.token as usize]) - log_sum_exp(logits),
            sampling_logprob: if self.settings.do_sample { chosen.probability.ln() } else { 0.0 },
        })
    }

    /// Returns the candidates for the next token, in descending order of probability; equal probabilities are ordered
    /// by token ID. Without sampling, there is only one.
    ///
    /// # Errors
    /// As [`choose`](Self::choose).
    pub fn candidates(&self, logits: &[f32], tokens: &[u32], prompt: usize) -> Result<Vec<Candidate>> {
        let invalid = logits.iter().position(|x| x.is_nan() || *x == f32::INFINITY);
        if let Some(at) = invalid {
            return Err(numeric(format!("they contain {} for token {at}", logits[at])));
        }
        if logits.iter().all(|x| *x == f32::NEG_INFINITY) {
            return Err(numeric("they are -inf for every token".into()));
        }
        let mut scores = logits.to_vec();
        self.process(&mut scores, tokens, prompt);
        let mut candidates: Vec<(u32, f32)> =
            scores.into_iter().enumerate().map(|(token, score)| (token as u32, score)).collect();
        candidates.retain(|(_, score)| *score != f32::NEG_INFINITY);
        if candidates.is_empty() {
            return Err(Error::usage(
                "the generation settings exclude every token",
                "decrease min_new_tokens, increase or disable no_repeat_ngram_size, or suppress fewer tokens",
            ));
        }
        Ok(match self.settings.do_sample {
            true => self.warp(candidates),
            false => {
                let (token, _) =
                    candidates.into_iter().reduce(|a, b| if b.1 > a.1 { b } else { a }).unwrap_or_default();
                vec![Candidate { token, probability: 1.0 }]
            }
        })
    }

    /// Applies the settings that change or exclude scores according to the tokens so far.
    fn process(&self, scores: &mut [f32], tokens: &[u32], prompt: usize) {
        let s = self.settings;
        if s.repetition_penalty != 1.0 {
            for &token in tokens.iter().collect::<HashSet<_>>() {
                if let Some(score) = scores.get_mut(token as usize) {
                    *score = match *score < 0.0 {
                        true => *score * s.repetition_penalty,
                        false => *score / s.repetition_penalty,
                    };
                }
            }
        }
        let mut exclude = |token: u32| {
            if let Some(score) = scores.get_mut(token as usize) {
                *score = f32::NEG_INFINITY;
            }
        };
        let n = s.no_repeat_ngram_size;
        if n > 0 && tokens.len() + 1 >= n {
            let last = &tokens[tokens.len() + 1 - n..];
            tokens.windows(n).filter(|run| run.starts_with(last)).for_each(|run| exclude(run[n - 1]));
        }
        if tokens.len() - prompt < s.min_new_tokens {
            s.eos_token_ids.iter().copied().for_each(&mut exclude);
        }
        s.suppress_tokens.iter().copied().for_each(&mut exclude);
    }

    fn warp(&self, mut candidates: Vec<(u32, f32)>) -> Vec<Candidate> {
        let s = self.settings;
        candidates.iter_mut().for_each(|(_, score)| *score /= s.temperature);
        let descending = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if (1..candidates.len()).contains(&s.top_k) {
            let (_, &mut (_, smallest), _) = candidates.select_nth_unstable_by(s.top_k - 1, descending);
            // Tokens whose score equals that of the last one are kept, as in transformers.
            candidates.retain(|(_, score)| score.total_cmp(&smallest) != Ordering::Less);
        }
        candidates.sort_unstable_by(descending);
        let largest = f64::from(candidates[0].1);
        let weights: Vec<f64> =
            candidates.iter().map(|(_, score)| (f64::from(*score) - largest).exp()).collect();
        let mut kept = weights.len();
        if s.top_p < 1.0 {
            let enough = f64::from(s.top_p) * weights.iter().sum::<f64>();
            let sums = weights.iter().scan(0.0, |sum, weight| {
                *sum += weight;
                Some(*sum)
            });
            kept = 1 + sums.take_while(|sum| *sum < enough).count();
        }
        if s.min_p > 0.0 {
            let min = f64::from(s.min_p) * weights[0];
            kept = weights[..kept].iter().take_while(|weight| **weight >= min).count();
        }
        // The most probable token is always kept.
        let kept = kept.clamp(1, weights.len());
        let total: f64 = weights[..kept].iter().sum();
        let candidates = candidates.into_iter().zip(&weights[..kept]);
        candidates.map(|((token, _), weight)| Candidate { token, probability: weight / total }).collect()
    }

    fn draw(&mut self, candidates: &[Candidate]) -> Candidate {
        // A uniform number in [0, 1) with 53 bits.
        let mut left = (self.random.next_u64() >> 11) as f64 * 2.0_f64.powi(-53);
        for candidate in candidates {
            left -= candidate.probability;
            if left < 0.0 {
                return *candidate;
            }
        }
        // Rounding of the sums can leave a small remainder.
        candidates[candidates.len() - 1]
    }
}

fn numeric(reason: String) -> Error {
    Error::Logits { reason }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let largest = f64::from(largest);
    largest + logits.iter().map(|x| (f64::from(*x) - largest).exp()).sum::<f64>().ln()
}
