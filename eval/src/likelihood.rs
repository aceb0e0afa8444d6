//! Log-likelihoods of continuations: what multiple-choice tasks compare.

use quant_core::model::Decoder;
use quant_core::{CancelToken, Error, Observer, Result};

use crate::Window;
use crate::score::{Origin, Panel, dropped, require_finite};

/// How likely a model finds the scored tokens of a window.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Likelihood {
    /// The sum of the natural logarithms of their probabilities.
    pub log_likelihood: f64,
    /// Whether each of them is the most likely token at its position.
    pub is_greedy: bool,
}

/// Scores windows of any lengths, each by itself: the tokens from [`Window::first`] on, given those before. Equally long
/// windows run together; results are in the order of the windows.
///
/// # Errors
/// [`Error::Usage`] when a window scores no token, has none before them, or is longer than the decoder's positions;
/// when a token is outside the vocabulary, the model fails, a likelihood is not finite, or the token pulls.
pub fn log_likelihoods(
    decoder: &Decoder,
    windows: &[Window],
    observer: &dyn Observer,
    cancel: &CancelToken,
) -> Result<Vec<Likelihood>> {
    for (number, window) in windows.iter().enumerate() {
        check(decoder, window).map_err(|reason| {
            Error::usage(format!("request {number} {reason}"), "shorten the request, or give it a context")
        })?;
    }
    // The longest first: what does not fit into memory shows at once.
    let mut order: Vec<usize> = (0..windows.len()).collect();
    order.sort_by_key(|&number| std::cmp::Reverse(windows[number].tokens.len()));
    let sorted: Vec<Window> = order.iter().map(|&number| windows[number].clone()).collect();
    let next = |window: &Window| window.tokens[window.first..].to_vec();
    let scored = Panel::new([Origin::Model(decoder)])?.with_ranks().run(
        &sorted,
        Vec::new(),
        (observer, cancel),
        |models, _| (models[0].nll(), models[0].top().first().copied()),
        |_| Ok(()),
        &mut dropped,
    )?;
    require_finite(scored.iter().flatten().map(|(nll, _)| *nll))?;
    let mut results = vec![Likelihood { log_likelihood: 0.0, is_greedy: true }; windows.len()];
    for ((number, window), positions) in order.into_iter().zip(&sorted).zip(scored) {
        results[number] = Likelihood {
            log_likelihood: -positions.iter().map(|(nll, _)| nll).sum::<f64>(),
            is_greedy: positions.iter().zip(next(window)).all(|((_, top), next)| *top == Some(next)),
        };
    }
    Ok(results)
}

fn check(decoder: &Decoder, window: &Window) -> std::result::Result<(), String> {
    if window.first == 0 || window.first >= window.tokens.len() {
        return Err("has no token to score, or none before those that are scored".into());
    }
    let (length, positions) = (window.input().len(), decoder.positions());
    if length > positions {
        return Err(format!("reads {length} tokens, and the model was loaded for {positions}"));
    }
    match window.tokens.iter().find(|&&token| token as usize >= decoder.vocab()) {
        Some(token) => Err(format!("has token {token}, and the vocabulary {}", decoder.vocab())),
        None => Ok(()),
    }
}
