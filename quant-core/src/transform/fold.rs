//! Folding: divides a producer's output channels by scales, and multiplies the columns of every consumer.

use super::{BlockTask, Rewrite};
use crate::model::{FoldGroup, Op};
use crate::{Error, Result};

/// Folds `scales`, one per channel of the group's producer, into a rewrite.
///
/// A norm's weight is stored in a narrow dtype, so `γ / s` is rounded. The consumers are therefore multiplied by `γ /
/// round(γ / s)` instead of `s`. If `γ = 1 + w` and `w` is stored (Gemma), the new weight is `w' = (1 + w) / s − 1`. If
/// a quotient underflows or overflows, the channel keeps a scale of 1.
///
/// # Errors
/// [`Error::Internal`] when there are not as many scales as channels, or one of them is not positive and finite,
/// because operations between producer and consumers need not commute with such a scale.
pub fn fold(rewrite: &mut Rewrite, task: &BlockTask<'_>, group: &FoldGroup, scales: &[f32]) -> Result<()> {
    if let Some(scale) = scales.iter().find(|s| !(s.is_finite() && **s > 0.0)) {
        return Err(Error::Internal(format!("a scale of {scale} cannot be folded")));
    }
    let node = group.producer;
    let scales = &group.roots(scales)[..];
    let effective: Vec<f32> = match &task.block.graph().nodes()[node].op {
        op if op.stored_norm().is_some_and(|(_, width, _)| width == scales.len()) => {
            let dtype = *task
                .norm_dtypes
                .get(&node)
                .ok_or_else(|| Error::Internal(format!("no dtype for norm {}", task.module(node))))?;
            let weight = match rewrite.norms.remove(&node) {
                Some(weight) => weight,
                None => task.block.norm(node).to_vec1()?,
            };
            let bias = match (rewrite.norm_biases.remove(&node), task.block.norm_bias(node)) {
                (Some(bias), _) => Some(bias),
                (None, Some(bias)) => Some(bias.to_vec1::<f32>()?),
                (None, None) => None,
            };
            let offset = op.weight_offset();
            let fits = |channel: usize, scale: f32| {
                bias.as_ref().is_none_or(|bias| dtype.round(bias[channel] / scale).is_finite())
            };
            let folded: Vec<f32> = weight
                .iter()
                .zip(scales)
                .enumerate()
                .map(|(c, (&w, &s))| {
                    // `w + 0` would lose the sign of a zero.
                    let gamma = if offset == 0.0 { w } else { w + offset };
                    let folded = dtype.round(gamma / s - offset);
                    let new = folded + offset;
                    if gamma == 0.0 {
                        // The factor is 0 for any scale, so the scale has no effect. With an offset, the stored value
                        // is not 0 and must not change.
                        return if offset == 0.0 { folded } else { w };
                    }
                    let holds = new.is_normal() && (gamma / new).is_normal() && fits(c, gamma / new);
                    if holds { folded } else { w }
                })
                .collect();
            let effective = weight.iter().zip(&folded).map(|(&w, &f)| match f + offset {
                0.0 => 1.0,
                new => (w + offset) / new,
            });
            let effective: Vec<f32> = effective.collect();
            if let Some(mut bias) = bias {
                bias.iter_mut().zip(&effective).for_each(|(b, s)| *b /= s);
                rewrite.norm_biases.insert(node, bias);
            }
            rewrite.norms.insert(node, folded);
            effective
        }
        Op::Linear { shape, .. } if group.rows.len() == scales.len() && group.rows.end <= shape[0] => {
            let rows = rewrite.rows.entry(node).or_insert_with(|| vec![1.0; shape[0]]);
            multiply_into(&mut rows[group.rows.clone()], scales);
            scales.to_vec()
        }
        op => return Err(Error::Internal(format!("{} scales do not fit {op:?}", scales.len()))),
    };
    let effective = group.spread(&group.powers(&effective));
    for &consumer in &group.consumers {
        let columns = rewrite.columns.entry(consumer).or_insert_with(|| vec![1.0; effective.len()]);
        multiply_into(columns, &effective);
    }
    Ok(())
}

fn multiply_into(factors: &mut [f32], by: &[f32]) {
    for (f, b) in factors.iter_mut().zip(by) {
        *f *= b;
    }
}
