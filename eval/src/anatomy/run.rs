//! Runs two decoders block by block and compares them.

use std::collections::BTreeMap;

use candle_core::{D, Tensor};
use quant_core::model::{Decoder, NodeId, Tap, TokenRows};
use quant_formats::{CancelToken, Result};

use super::{Anatomy, LinearInput};
use crate::EvaluationText;

/// They are spread over the text.
const WINDOWS: usize = 4;

#[derive(Default)]
struct Magnitudes(BTreeMap<NodeId, Vec<f32>>);

impl Tap for Magnitudes {
    fn linear_input(&mut self, linear: NodeId, x: &Tensor, _tokens: TokenRows<'_>) -> Result<()> {
        let channels = x.dim(D::Minus1)?;
        let values = x.flatten_all()?.to_vec1::<f32>()?;
        let largest = self.0.entry(linear).or_insert_with(|| vec![0.0; channels]);
        for row in values.chunks_exact(channels.max(1)) {
            largest.iter_mut().zip(row).for_each(|(l, v)| *l = l.max(v.abs()));
        }
        Ok(())
    }
}

impl Magnitudes {
    fn unevenness(&self, linear: NodeId) -> Option<f64> {
        let mut channels = self.0.get(&linear)?.clone();
        channels.sort_unstable_by(f32::total_cmp);
        let (largest, median) = (*channels.last()?, channels[channels.len() / 2]);
        (median > 0.0).then(|| f64::from(largest) / f64::from(median))
    }
}

/// Runs both models on some of the windows and compares the blocks that both have.
///
/// # Errors
/// When a model fails, or when cancelled.
pub fn anatomy(
    reference: &Decoder,
    model: &Decoder,
    text: &EvaluationText,
    cancel: &CancelToken,
) -> Result<Anatomy> {
    let all = text.windows.len();
    let some = all.min(WINDOWS);
    let blocks = reference.blocks().min(model.blocks());
    let mut squares = vec![[0.0_f64; 2]; blocks];
    let mut seen: Vec<[Magnitudes; 2]> = (0..blocks).map(|_| Default::default()).collect();
    for i in 0..some {
        let input = [text.windows[i * all / some].input()];
        let mut hidden = [reference.embed(&input)?, model.embed(&input)?];
        for block in 0..blocks {
            cancel.check()?;
            let [before, now] = &mut seen[block];
            hidden = [reference.advance(block, &hidden[0], before)?, model.advance(block, &hidden[1], now)?];
            // Further columns hold other data that blocks pass on.
            let states = |t: &Tensor| t.narrow(D::Minus1, 0, reference.width())?.contiguous();
            let [r, m] = [states(&hidden[0])?, states(&hidden[1])?];
            let [r, m] = [r.flatten_all()?.to_vec1::<f32>()?, m.flatten_all()?.to_vec1::<f32>()?];
            for (r, m) in r.iter().zip(&m) {
                squares[block][0] += f64::from(m - r).powi(2);
                squares[block][1] += f64::from(*r).powi(2);
            }
        }
    }
    let mut inputs = Vec::new();
    for (block, [before, now]) in seen.iter().enumerate() {
        for (linear, name) in reference.linears(block) {
            if let Some((reference, model)) = before.unevenness(linear).zip(now.unevenness(linear)) {
                inputs.push(LinearInput { block, linear: name.to_owned(), reference, model });
            }
        }
    }
    let block_errors = squares.iter().map(|[d, r]| if *r > 0.0 { (d / r).sqrt() } else { 0.0 }).collect();
    Ok(Anatomy { windows: some, block_errors, inputs })
}
