//! Runs windows through models and hands every scored position's logits to a measurement.

use quant_core::calibrate::TokenWindows;
use quant_core::model::Decoder;
use quant_core::{CancelToken, Error, Event, Observer, Result};
use rayon::prelude::*;

/// Tokens that go through a model at a time.
const BATCH_TOKENS: usize = 2048;
/// Positions whose logits are held at a time: a large vocabulary makes them the largest tensor.
const LOGIT_ROWS: usize = 128;

/// For every window, `measure` is called with each scored position: the logits of every model in
/// `decoders` for it, and the token that follows. Returns its results in window and position order.
///
/// Work is shared over the current rayon pool in a way that results do not depend on.
///
/// # Errors
/// When a model fails, a measurement is not finite, or the token pulls.
pub(crate) fn each_position<T: Send>(
    decoders: &[&Decoder],
    windows: &TokenWindows,
    observer: &dyn Observer,
    cancel: &CancelToken,
    measure: impl Fn(&[&[f32]], u32) -> T + Sync,
) -> Result<Vec<Vec<T>>> {
    let length = windows.length();
    observer.event(&Event::StageStarted { stage: "evaluate", unit: "window", units: windows.len() as u64 });
    let batch = (BATCH_TOKENS / length).max(1);
    let mut results = Vec::with_capacity(windows.len());
    for first in (0..windows.len()).step_by(batch) {
        cancel.check()?;
        let indices = first..(first + batch).min(windows.len());
        let tokens: Vec<&[u32]> = indices.clone().map(|i| windows.window(i)).collect();
        let hidden = decoders.iter().map(|d| d.hidden(&tokens)).collect::<Result<Vec<_>>>()?;
        for (row, tokens) in tokens.iter().enumerate() {
            cancel.check()?;
            let mut window = Vec::with_capacity(length - 1);
            for start in (0..length - 1).step_by(LOGIT_ROWS) {
                let count = LOGIT_ROWS.min(length - 1 - start);
                let logits = decoders
                    .iter()
                    .zip(&hidden)
                    .map(|(d, h)| {
                        let part = h.narrow(0, row, 1)?.narrow(1, start, count)?;
                        Ok(d.logits(&part)?.flatten_all()?.to_vec1::<f32>()?)
                    })
                    .collect::<Result<Vec<_>>>()?;
                let measured: Vec<T> = (0..count)
                    .into_par_iter()
                    .map(|i| {
                        let rows: Vec<&[f32]> = logits
                            .iter()
                            .zip(decoders)
                            .map(|(l, d)| &l[i * d.vocab()..(i + 1) * d.vocab()])
                            .collect();
                        measure(&rows, tokens[start + i + 1])
                    })
                    .collect();
                window.extend(measured);
            }
            results.push(window);
            observer.event(&Event::UnitDone { detail: String::new() });
        }
    }
    observer.event(&Event::StageDone);
    Ok(results)
}

/// Fails when a value that was measured is not finite.
pub(crate) fn require_finite(values: impl Iterator<Item = f64>) -> Result<()> {
    let bad = values.filter(|v| !v.is_finite()).count();
    if bad == 0 {
        return Ok(());
    }
    Err(Error::Numeric {
        tensor: "logits".into(),
        reason: format!("{bad} scored position(s) are NaN or infinite; the model's numbers overflow"),
    })
}
