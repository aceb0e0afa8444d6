//! Folding: a producer's output channels divided by scales, every reader's columns multiplied.

use super::{BlockTask, Rewrite};
use crate::model::{FoldGroup, Op};
use crate::{Error, Result};

/// Folds `scales`, one a channel of the group's input, into a rewrite.
///
/// A norm's weight is stored in a narrow type, so `γ / s` is rounded there. The consumers are
/// therefore multiplied not by `s` but by `γ / round(γ / s)`: the rewrite stays an identity however
/// narrow the type. Where the quotient underflows, the channel keeps its scale of 1.
///
/// # Errors
/// When the group cannot be folded channel by channel, or there are not as many scales as channels.
pub fn fold(rewrite: &mut Rewrite, task: &BlockTask<'_>, group: &FoldGroup, scales: &[f32]) -> Result<()> {
    if group.repeat != 1 {
        return Err(Error::Internal("channels that are repeated cannot be folded one by one".into()));
    }
    let node = group.producer;
    let effective: Vec<f32> = match &task.block.graph().nodes()[node].op {
        Op::RmsNorm { width, .. } if *width == scales.len() => {
            let dtype = *task
                .norm_dtypes
                .get(&node)
                .ok_or_else(|| Error::Internal(format!("no dtype for norm {}", task.module(node))))?;
            let weight = match rewrite.norms.remove(&node) {
                Some(weight) => weight,
                None => task.block.norm(node).to_vec1()?,
            };
            let folded: Vec<f32> = weight
                .iter()
                .zip(scales)
                .map(|(&w, &s)| match dtype.round(w / s) {
                    folded if w == 0.0 || (folded.is_normal() && (w / folded).is_normal()) => folded,
                    _ => w,
                })
                .collect();
            let effective =
                weight.iter().zip(&folded).map(|(&w, &f)| if f == 0.0 { 1.0 } else { w / f }).collect();
            rewrite.norms.insert(node, folded);
            effective
        }
        Op::Linear { shape, .. } if shape[0] == scales.len() => {
            multiply_into(rewrite.rows.entry(node).or_insert_with(|| vec![1.0; scales.len()]), scales);
            scales.to_vec()
        }
        op => return Err(Error::Internal(format!("{} scales do not fit {op:?}", scales.len()))),
    };
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
