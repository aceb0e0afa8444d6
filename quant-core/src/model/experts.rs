//! Mixtures of experts: the routing of tokens, the rows of each expert, and the sum of the expert outputs.
//!
//! Routing is a dense value, `[…, experts]`, with the weights of the chosen experts and 0 for all others. An expert's
//! tokens are the rows in which its weight is not 0. A chosen expert whose weight underflows to 0 contributes nothing
//! and does not run.

use candle_core::{D, Device, Tensor};
use rayon::prelude::*;

use super::arch::{RouterScores, RoutingRule};
use super::tensor_values::with_values;
use crate::{Error, Result, allocate};

/// Computes the expert weights of each token from the router's logits `[…, experts]` and the correction of each
/// expert's score, if the routing has one. Ties between experts or groups are resolved in favor of the first.
pub(super) fn route(logits: &Tensor, routing: RoutingRule, correction: Option<&[f32]>) -> Result<Tensor> {
    let experts = routing.experts;
    if logits.dim(D::Minus1)? != experts || correction.is_some_and(|c| c.len() != experts) {
        return Err(Error::Internal(format!(
            "router logits {:?} do not match {experts} experts",
            logits.dims()
        )));
    }
    let weights = with_values(logits, |logits| {
        if logits.iter().any(|logit| !logit.is_finite()) {
            return Err(Error::Logits { reason: "a router logit is NaN or infinite".into() });
        }
        let mut weights = vec![0.0; logits.len()];
        let rows = weights.par_chunks_mut(experts).zip(logits.par_chunks(experts));
        rows.for_each_init(Scratch::default, |scratch, (weights, logits)| {
            route_token(logits, routing, correction, scratch, weights);
        });
        Ok(weights)
    })?;
    Ok(Tensor::from_vec(weights, logits.dims(), &Device::Cpu)?)
}

#[derive(Default)]
struct Scratch {
    scores: Vec<f32>,
    choice: Vec<f32>,
    group: Vec<f32>,
    order: Vec<u32>,
}

/// `weights` must be all zeros on entry.
fn route_token(
    logits: &[f32],
    routing: RoutingRule,
    correction: Option<&[f32]>,
    Scratch { scores, choice, group, order }: &mut Scratch,
    weights: &mut [f32],
) {
    if let RouterScores::Sparse { tolerance } = routing.scores {
        return route_one_by_one(logits, routing.top_k, tolerance, weights);
    }
    scores.clear();
    match routing.scores {
        RouterScores::Softmax | RouterScores::Sparse { .. } => {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            scores.extend(logits.iter().map(|logit| (logit - largest).exp()));
            let all: f32 = scores.iter().sum();
            scores.iter_mut().for_each(|score| *score /= all);
        }
        RouterScores::Sigmoid => scores.extend(logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp()))),
    }
    choice.clear();
    match correction {
        Some(correction) => choice.extend(scores.iter().zip(correction).map(|(score, c)| score + c)),
        // Unlike scores, logits still differ if the scores underflow to equal values.
        None if routing.groups.is_none() => choice.extend(logits),
        None => choice.extend(&*scores),
    }
    order.clear();
    match routing.groups {
        None => order.extend(0..logits.len() as u32),
        Some(groups) => {
            let size = (logits.len() / groups.count.max(1)).max(1);
            let worth = |experts: &[f32]| -> f32 {
                let mut sorted = experts.to_vec();
                sorted.sort_by(|a, b| b.total_cmp(a));
                sorted.iter().take(groups.by_largest).sum()
            };
            group.clear();
            group.extend(choice.chunks(size).map(worth));
            let mut best: Vec<usize> = (0..group.len()).collect();
            best.sort_by(|&a, &b| group[b].total_cmp(&group[a]));
            best.truncate(groups.chosen);
            best.sort_unstable();
            order.extend(best.into_iter().flat_map(|g| (g * size) as u32..((g + 1) * size) as u32));
        }
    }
    // The sort is stable: among equal scores, the first expert wins.
    order.sort_by(|&a, &b| choice[b as usize].total_cmp(&choice[a as usize]));
    let chosen = &order[..routing.top_k.min(order.len())];
    let score = |expert: u32| scores[expert as usize];
    let divisor = match routing.normalized {
        true => {
            let sum = chosen.iter().map(|&e| score(e)).sum::<f32>();
            (sum + routing.epsilon).max(routing.min_sum)
        }
        false => 1.0,
    };
    for &expert in chosen {
        weights[expert as usize] = match routing.on_inputs {
            true => 1.0,
            false => score(expert) / divisor * routing.scale,
        };
    }
}

/// [`route_token`] for [`RouterScores::Sparse`].
fn route_one_by_one(logits: &[f32], top_k: usize, tolerance: f32, weights: &mut [f32]) {
    let mut chosen = vec![false; logits.len()];
    for _ in 0..top_k.min(logits.len()) {
        let open = || logits.iter().enumerate().filter(|(expert, _)| !chosen[*expert]);
        let Some((expert, &largest)) = open().reduce(|a, b| if *b.1 > *a.1 { b } else { a }) else { return };
        let counts = |logit: f32| {
            let gap = (largest - logit) / logit.abs().max(largest);
            // 0 / 0: both are 0, so they are equal.
            gap.is_nan() || gap <= tolerance
        };
        let all: f32 = open().map(|(_, &l)| l).filter(|&l| counts(l)).map(|l| (l - largest).exp()).sum();
        weights[expert] = 1.0 / all;
        chosen[expert] = true;
    }
}

/// Multiplies each row of `[1, tokens, width]` by the sigmoid of its token's logit for an expert.
pub(super) fn scale_rows(rows: &Tensor, logits: &Tensor, tokens: &[u32], expert: usize) -> Result<Tensor> {
    let experts = logits.dim(D::Minus1)?;
    let factors = with_values(logits, |logits| {
        let of = |&token: &u32| {
            let logit = logits.get(token as usize * experts + expert);
            logit
                .map(|l| 1.0 / (1.0 + (-l).exp()))
                .ok_or_else(|| Error::Internal(format!("row {token} does not exist")))
        };
        tokens.iter().map(of).collect::<Result<Vec<f32>>>()
    })?;
    Ok(rows.broadcast_mul(&Tensor::from_vec(factors, (1, tokens.len(), 1), &Device::Cpu)?)?)
}

/// Returns the tokens of an expert, in ascending order, from the weights `[…, experts]`.
pub(super) fn tokens_of_expert(weights: &Tensor, expert: usize) -> Result<Vec<u32>> {
    let experts = weights.dim(D::Minus1)?;
    if expert >= experts {
        return Err(Error::Internal(format!("expert {expert} does not exist; there are {experts}")));
    }
    with_values(weights, |weights| {
        let rows = weights.chunks_exact(experts).enumerate();
        Ok(rows.filter(|(_, row)| row[expert] != 0.0).map(|(token, _)| token as u32).collect())
    })
}

/// Returns the rows `tokens` of `x` `[…, width]`, as `[1, tokens, width]`.
pub(super) fn rows(x: &Tensor, tokens: &[u32]) -> Result<Tensor> {
    let width = x.dim(D::Minus1)?;
    let values = with_values(x, |x| {
        let mut values = allocate::room(tokens.len() * width, "the inputs of an expert")?;
        for &token in tokens {
            let at = token as usize * width;
            let row = x.get(at..at + width);
            values.extend_from_slice(
                row.ok_or_else(|| Error::Internal(format!("row {token} does not exist")))?,
            );
        }
        Ok(values)
    })?;
    Ok(Tensor::from_vec(values, (1, tokens.len(), width), &Device::Cpu)?)
}

/// Sums the outputs of the experts, in the order of the experts. `outputs[e]` `[…, width]` has a row for each of expert
/// `e`'s tokens, in order, or a row for every token, of which only those of expert `e` are used.
pub(super) fn sum(weights: &Tensor, outputs: &[Tensor]) -> Result<Tensor> {
    let experts = weights.dim(D::Minus1)?;
    let Some(width) = outputs.first().map(|output| output.dim(D::Minus1)).transpose()? else {
        return Err(Error::Internal("experts without outputs".into()));
    };
    if outputs.len() != experts {
        return Err(Error::Internal(format!("got {} outputs for {experts} experts", outputs.len())));
    }
    let tokens = weights.elem_count().checked_div(experts).unwrap_or(0);
    let mut sums = vec![0.0; tokens * width];
    with_values(weights, |weights| {
        for (expert, output) in outputs.iter().enumerate() {
            let of = |token: usize| weights[token * experts + expert];
            with_values(output, |output| {
                let has_others = output.len() == tokens * width && (0..tokens).any(|token| of(token) == 0.0);
                if !has_others {
                    return add_expert(&mut sums, width, of, output);
                }
                let rows = output.chunks_exact(width.max(1)).enumerate();
                let own = rows.filter(|(token, _)| of(*token) != 0.0).flat_map(|(_, row)| row);
                add_expert(&mut sums, width, of, &own.copied().collect::<Vec<f32>>())
            })?;
        }
        Ok(())
    })?;
    let mut dims = weights.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = width;
    }
    Ok(Tensor::from_vec(sums, dims, &Device::Cpu)?)
}

/// Adds an expert's output rows to the sums `[tokens, width]`. `of` returns a token's weight for the expert; the output
/// has one row for each token whose weight is not 0.
pub(crate) fn add_expert(
    sums: &mut [f32],
    width: usize,
    of: impl Fn(usize) -> f32,
    output: &[f32],
) -> Result<()> {
    let routed = sums.chunks_exact_mut(width.max(1)).enumerate().filter_map(|(token, sums)| {
        let weight = of(token);
        (weight != 0.0).then_some((weight, sums))
    });
    let routed: Vec<(f32, &mut [f32])> = routed.collect();
    if routed.len() * width != output.len() {
        return Err(Error::Internal(format!(
            "got {} values of an expert for {} tokens",
            output.len(),
            routed.len()
        )));
    }
    routed.into_par_iter().zip(output.par_chunks_exact(width.max(1))).for_each(|((weight, sums), row)| {
        sums.iter_mut().zip(row).for_each(|(sum, y)| *sum += weight * y);
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::arch::Groups;

    fn tensor(values: &[f32], rows: usize) -> Tensor {
        Tensor::from_slice(values, (1, rows, values.len() / rows.max(1)), &Device::Cpu).unwrap()
    }

    fn flat(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn weights_are_the_softmax_of_the_chosen() {
        let logits = [1.0_f32, 3.0, 2.0, -1.0, 0.0, 0.0, 0.0, 0.0];
        let routing = RoutingRule::new(4, 2);
        let all: f64 = logits[..4].iter().map(|l| f64::from(*l).exp()).sum();
        let weights = flat(&route(&tensor(&logits, 2), routing, None).unwrap());
        for (expert, &weight) in weights[..4].iter().enumerate() {
            let exact = if expert == 1 || expert == 2 { f64::from(logits[expert]).exp() / all } else { 0.0 };
            approx::assert_relative_eq!(f64::from(weight), exact, max_relative = 1e-6);
        }
        assert_eq!(weights[4..], [0.25, 0.25, 0.0, 0.0]);
        let scaled =
            flat(&route(&tensor(&logits, 2), RoutingRule { normalized: true, ..routing }, None).unwrap());
        approx::assert_relative_eq!(scaled[1] + scaled[2], 1.0, max_relative = 1e-6);
        approx::assert_relative_eq!(scaled[1] / scaled[2], weights[1] / weights[2], max_relative = 1e-6);
        assert_eq!(scaled[4..], [0.5, 0.5, 0.0, 0.0]);
    }

    /// Sigmoid scores: the correction affects the choice but not the weights; groups are ranked by their best two
    /// experts.
    #[test]
    fn corrections_and_groups_choose_and_do_not_weigh() {
        let logits = [3.0_f32, -2.0, 2.0, 1.9, -1.0, 2.5];
        let score = |expert: usize| 1.0 / (1.0 + (-f64::from(logits[expert])).exp());
        let routing = RoutingRule {
            scores: RouterScores::Sigmoid,
            groups: Some(Groups { count: 3, chosen: 1, by_largest: 2 }),
            normalized: true,
            epsilon: 1e-20,
            scale: 2.5,
            ..RoutingRule::new(6, 1)
        };
        let chosen = |routing: RoutingRule, correction: Option<&[f32]>| {
            let weights = flat(&route(&tensor(&logits, 1), routing, correction).unwrap());
            let found = weights.iter().enumerate().filter(|(_, w)| **w != 0.0);
            found.map(|(expert, weight)| (expert, f64::from(*weight))).collect::<Vec<_>>()
        };
        // The middle group has the largest sum of two; the first group has the largest score.
        assert_eq!(chosen(routing, None), [(2, 2.5)]);
        let by_largest = Groups { by_largest: 1, ..routing.groups.unwrap() };
        assert_eq!(chosen(RoutingRule { groups: Some(by_largest), ..routing }, None), [(0, 2.5)]);
        assert_eq!(chosen(RoutingRule { groups: None, ..routing }, None), [(0, 2.5)]);
        let correction = [0.0, 0.0, 0.0, 0.5, 0.0, 0.0];
        let two = RoutingRule { top_k: 2, ..routing };
        assert_eq!(chosen(routing, Some(&correction)), [(3, 2.5)]);
        let found = chosen(two, Some(&correction));
        for ((expert, weight), expected) in found.into_iter().zip([2, 3]) {
            assert_eq!(expert, expected);
            approx::assert_relative_eq!(
                weight,
                2.5 * score(expert) / (score(2) + score(3)),
                max_relative = 1e-6
            );
        }
        let (expert, weight) = chosen(RoutingRule { normalized: false, ..routing }, Some(&correction))[0];
        assert_eq!(expert, 3);
        approx::assert_relative_eq!(weight, 2.5 * score(3), max_relative = 1e-6);
        assert!(route(&tensor(&logits, 1), routing, Some(&[0.0; 5])).is_err());
    }

    /// The largest logit, weighted among those within the tolerance, then the largest of the rest.
    #[test]
    fn experts_are_chosen_one_after_the_other() {
        let weights = |logits: &[f32], tolerance: f32| {
            let routing =
                RoutingRule { scores: RouterScores::Sparse { tolerance }, ..RoutingRule::new(4, 2) };
            flat(&route(&tensor(logits, 1), routing, None).unwrap())
        };
        let softmax = |all: &[f64]| 1.0 / all.iter().map(|l| (l - all[0]).exp()).sum::<f64>();
        // (2 - 1.9) / 2 is within 0.1, (2 - 1.5) / 2 is not; among the rest, (1.9 - 1.5) / 1.9 is not.
        let found = weights(&[1.5, 2.0, -1.0, 1.9], 0.1);
        assert_eq!((found[0], found[2], found[3]), (0.0, 0.0, 1.0));
        approx::assert_relative_eq!(f64::from(found[1]), softmax(&[2.0, 1.9]), max_relative = 1e-6);
        let found = weights(&[1.5, 2.0, -1.0, 1.9], 0.3);
        approx::assert_relative_eq!(f64::from(found[1]), softmax(&[2.0, 1.9, 1.5]), max_relative = 1e-6);
        approx::assert_relative_eq!(f64::from(found[3]), softmax(&[1.9, 1.5]), max_relative = 1e-6);
        // Differences are relative to the larger magnitude: (-1 + 4) / 4.
        let found = weights(&[-4.0, -1.0, -8.0, -9.0], 0.8);
        approx::assert_relative_eq!(f64::from(found[1]), softmax(&[-1.0, -4.0]), max_relative = 1e-6);
        assert_eq!(weights(&[0.0; 4], 0.1), [0.25, 1.0_f32 / 3.0, 0.0, 0.0]);
    }

    #[test]
    fn scores_on_inputs_leave_weights_of_one() {
        let logits = tensor(&[1.0, -2.0, 3.0, 0.5, 2.0, -1.0], 2);
        let routing =
            RoutingRule { scores: RouterScores::Sigmoid, on_inputs: true, ..RoutingRule::new(3, 1) };
        assert_eq!(flat(&route(&logits, routing, None).unwrap()), [0.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
        let x = tensor(&[1.0, 2.0, 3.0, 4.0], 2);
        let tokens = [1];
        let scaled = flat(&scale_rows(&rows(&x, &tokens).unwrap(), &logits, &tokens, 1).unwrap());
        let factor = 1.0 / (1.0 + (-2.0_f32).exp());
        assert_eq!(scaled, [3.0 * factor, 4.0 * factor]);
        assert!(scale_rows(&x, &logits, &[0, 2], 0).is_err());
    }

    #[test]
    fn permuting_experts_permutes_weights() {
        let logits: Vec<f32> = (0..40).map(|i| (i as f32 * 0.91).sin() * 3.0).collect();
        let routing = RoutingRule { normalized: true, ..RoutingRule::new(8, 3) };
        let order = [3, 0, 7, 1, 6, 2, 5, 4];
        let permuted: Vec<f32> = logits.chunks(8).flat_map(|row| order.map(|e| row[e])).collect();
        let weights = flat(&route(&tensor(&logits, 5), routing, None).unwrap());
        let expected: Vec<f32> = weights.chunks(8).flat_map(|row| order.map(|e| row[e])).collect();
        let found = flat(&route(&tensor(&permuted, 5), routing, None).unwrap());
        for (found, expected) in found.iter().zip(&expected) {
            approx::assert_relative_eq!(found, expected, max_relative = 1e-6);
        }
        assert!(weights.chunks(8).all(|row| row.iter().filter(|w| **w != 0.0).count() == 3));
    }

    #[test]
    fn experts_see_their_tokens_and_add_up() {
        let weights = tensor(&[0.5, 0.0, 0.5, 0.0, 0.0, 1.0, 0.25, 0.0, 0.75], 3);
        let x = tensor(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3);
        let tokens: Vec<Vec<u32>> = (0..3).map(|e| tokens_of_expert(&weights, e).unwrap()).collect();
        assert_eq!(tokens, [vec![0, 2], vec![], vec![0, 1, 2]]);
        assert!(tokens_of_expert(&weights, 3).is_err());
        let inputs: Vec<Tensor> = tokens.iter().map(|tokens| rows(&x, tokens).unwrap()).collect();
        assert_eq!(flat(&inputs[0]), [1.0, 2.0, 5.0, 6.0]);
        assert_eq!(inputs[1].dims(), [1, 0, 2]);
        assert!(rows(&x, &[3]).is_err());
        let outputs = [&inputs[0] * 2.0, &inputs[1] * 1.0, &inputs[2] * -1.0].map(Result::unwrap);
        let summed = flat(&sum(&weights, &outputs).unwrap());
        assert_eq!(summed, [0.5, 1.0, -3.0, -4.0, -1.25, -1.5]);
        // Rows for all tokens, two of which do not belong to the first expert.
        let of_all =
            [rows(&x, &[0, 1, 2]).unwrap() * 2.0, &inputs[1] * 1.0, &inputs[2] * -1.0].map(Result::unwrap);
        assert_eq!(flat(&sum(&weights, &of_all).unwrap()), summed);
        assert!(sum(&weights, &outputs[..2]).is_err());
        assert!(sum(&weights, &[outputs[1].clone(), outputs[1].clone(), outputs[2].clone()]).is_err());
    }

    #[test]
    fn logits_must_be_finite() {
        let routing = RoutingRule::new(2, 1);
        assert!(route(&tensor(&[0.0, f32::NAN], 1), routing, None).is_err());
        assert!(route(&tensor(&[0.0, 1.0, 2.0], 1), routing, None).is_err());
    }
}
