//! Log-likelihoods of continuations, as multiple-choice tasks compare them.

use quant_core::model::Decoder;
use quant_formats::{CancelToken, Error, Observer, Result};

use crate::Window;
use crate::decoder::Blocks;
use crate::score::{Panel, dropped, require_finite};

/// The likelihood of a window's scored tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Likelihood {
    /// The sum of the natural logarithms of the scored tokens' probabilities.
    pub log_likelihood: f64,
    /// Whether every scored token is the most likely token at its position.
    pub is_greedy: bool,
}

/// Scores windows of any lengths, each independently: the tokens starting at [`Window::first`], given those before.
/// Results are in the order of the windows.
///
/// # Errors
/// [`Error::Usage`] for a window that the decoder cannot score; also when the model fails, a likelihood is not finite,
/// or when cancelled.
pub fn log_likelihoods(
    decoder: &Decoder,
    windows: &[Window],
    observer: &dyn Observer,
    cancel: &CancelToken,
) -> Result<Vec<Likelihood>> {
    for (number, window) in windows.iter().enumerate() {
        check(decoder, window).map_err(|reason| {
            Error::usage(
                format!("request {number}: {reason}"),
                "give at least one token of context and one to score, all of them in the vocabulary, and at most as many \
                 as the model was loaded for",
            )
        })?;
    }
    // The longest first, so that insufficient memory shows at once.
    let mut order: Vec<usize> = (0..windows.len()).collect();
    order.sort_by_key(|&number| std::cmp::Reverse(windows[number].tokens.len()));
    let sorted: Vec<Window> = order.iter().map(|&number| windows[number].clone()).collect();
    let next = |window: &Window| window.tokens[window.first..].to_vec();
    let scored = Panel::new([Box::new(Blocks(decoder, None)) as _])?.with_ranks().run(
        (&sorted, 0..sorted.len()),
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
        return Err("there must be at least one token of context and one token to score".into());
    }
    let (length, positions) = (window.input().len(), decoder.positions());
    if length > positions {
        return Err(format!(
            "the request has {length} tokens, but the model was loaded for at most {positions}"
        ));
    }
    match window.tokens.iter().find(|&&token| token as usize >= decoder.vocab()) {
        Some(token) => Err(format!("token {token} is not in the vocabulary of {} tokens", decoder.vocab())),
        None => Ok(()),
    }
}
