//! Runs windows through models and hands every scored position's logits to a measurement.

use candle_core::Tensor;
use quant_core::model::Decoder;
use quant_core::{CancelToken, Error, Event, Observer, Result};
use rayon::prelude::*;

use crate::Window;
use crate::noise::disturb;

/// Tokens that go through a model at a time.
const BATCH_TOKENS: usize = 2048;
/// Positions whose logits are held at a time: a large vocabulary makes them the largest tensor.
const LOGIT_ROWS: usize = 128;

/// Where logits come from.
#[derive(Clone, Copy)]
pub(crate) enum Logits<'a> {
    /// A model.
    Model(&'a Decoder),
    /// A model that is disturbed from this seed.
    Noisy(&'a Decoder, u64),
}

impl<'a> Logits<'a> {
    fn decoder(self) -> &'a Decoder {
        match self {
            Self::Model(decoder) | Self::Noisy(decoder, _) => decoder,
        }
    }

    /// The hidden states of windows of equal length, the first of which is number `first`.
    fn hidden(self, windows: &[&[u32]], first: usize) -> Result<Tensor> {
        match self {
            Self::Model(decoder) => decoder.hidden(windows),
            Self::Noisy(decoder, seed) => {
                decoder.hidden_through(windows, &mut |block, hidden| disturb(&hidden, seed, block, first))
            }
        }
    }
}

/// Windows that go through a model together: of those with these numbers, equally long ones that
/// stand side by side. What a window gives does not depend on which others it is with beyond rounding,
/// but may in its last bits; the same numbers always make the same batches.
fn batches(windows: &[Window], numbers: &[usize]) -> Vec<Vec<usize>> {
    let mut batches: Vec<Vec<usize>> = Vec::new();
    for &number in numbers {
        let length = windows[number].input().len();
        let most = (BATCH_TOKENS / length.max(1)).max(1);
        match batches.last_mut() {
            Some(batch)
                if batch.len() < most
                    && windows[batch[0]].input().len() == length
                    && batch.last().is_some_and(|last| last + 1 == number) =>
            {
                batch.push(number);
            }
            _ => batches.push(vec![number]),
        }
    }
    batches
}

/// Measures every scored position of a batch's windows: `measure` is given the logits of every source
/// for it, and the token that follows. The results of each window in order of positions.
///
/// Work is shared over the current rayon pool in a way that results do not depend on.
fn measure_batch<T: Send>(
    sources: &[Logits<'_>],
    windows: &[Window],
    batch: &[usize],
    cancel: &CancelToken,
    measure: &(impl Fn(&[&[f32]], u32) -> T + Sync),
) -> Result<Vec<Vec<T>>> {
    let inputs: Vec<&[u32]> = batch.iter().map(|&n| windows[n].input()).collect();
    let hidden = sources.iter().map(|s| s.hidden(&inputs, batch[0])).collect::<Result<Vec<_>>>()?;
    let mut all = Vec::with_capacity(batch.len());
    for (row, &number) in batch.iter().enumerate() {
        cancel.check()?;
        let window = &windows[number];
        let mut results = Vec::with_capacity(window.scored());
        for start in (window.first..window.tokens.len()).step_by(LOGIT_ROWS) {
            let count = LOGIT_ROWS.min(window.tokens.len() - start);
            let logits = sources
                .iter()
                .zip(&hidden)
                .map(|(source, hidden)| {
                    // A token is predicted at the position before it.
                    let part = hidden.narrow(0, row, 1)?.narrow(1, start - 1, count)?;
                    Ok(source.decoder().logits(&part)?.flatten_all()?.to_vec1::<f32>()?)
                })
                .collect::<Result<Vec<_>>>()?;
            let measured: Vec<T> = (0..count)
                .into_par_iter()
                .map(|i| {
                    let row = |l: &Vec<f32>| i * l.len() / count..(i + 1) * l.len() / count;
                    let rows: Vec<&[f32]> = logits.iter().map(|l| &l[row(l)]).collect();
                    measure(&rows, window.tokens[start + i])
                })
                .collect();
            results.extend(measured);
        }
        all.push(results);
    }
    Ok(all)
}

/// Measures the windows of these numbers.
///
/// # Errors
/// When a model fails or the token pulls.
pub(crate) fn some_windows<T: Send>(
    sources: &[Logits<'_>],
    windows: &[Window],
    numbers: &[usize],
    cancel: &CancelToken,
    measure: impl Fn(&[&[f32]], u32) -> T + Sync,
) -> Result<Vec<Vec<T>>> {
    let mut all = Vec::with_capacity(numbers.len());
    for batch in batches(windows, numbers) {
        cancel.check()?;
        all.extend(measure_batch(sources, windows, &batch, cancel, &measure)?);
    }
    Ok(all)
}

/// Measures all windows. `known` are the results of the first ones from an earlier run; `keep` is given
/// those of every batch that is new. What comes out does not depend on where the earlier run ended.
///
/// # Errors
/// When a model or `keep` fails, or the token pulls.
pub(crate) fn all_windows<T: Send>(
    sources: &[Logits<'_>],
    windows: &[Window],
    mut known: Vec<Vec<T>>,
    observer: &dyn Observer,
    cancel: &CancelToken,
    measure: impl Fn(&[&[f32]], u32) -> T + Sync,
    mut keep: impl FnMut(&[Vec<T>]) -> Result<()>,
) -> Result<Vec<Vec<T>>> {
    let units = windows.len() as u64;
    observer.event(&Event::StageStarted { stage: "evaluate", unit: "window", units });
    let batches = batches(windows, &(0..windows.len()).collect::<Vec<_>>());
    // Only whole batches were kept.
    let resumed = known.len();
    for batch in batches {
        cancel.check()?;
        if batch[0] >= resumed {
            let results = measure_batch(sources, windows, &batch, cancel, &measure)?;
            keep(&results)?;
            known.extend(results);
        }
        for _ in batch {
            observer.event(&Event::UnitDone { detail: String::new() });
        }
    }
    observer.event(&Event::StageDone);
    Ok(known)
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
