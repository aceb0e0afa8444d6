//! Checks and estimates of smoothing before a run.

use super::{CANDIDATES, SEARCH_TOKENS, SmoothSettings, Smoothing};
use std::collections::BTreeMap;

use crate::model::{ExpertOrder, NodeId};
use crate::transform::{Producers, SearchWork, StepContext, Workload};
use crate::{Error, Result};

/// Fails for NVFP4 and the MX formats, whose scales per group of inputs adapt to outliers by themselves.
pub(super) fn check_scales(step: &str, context: &StepContext<'_>) -> Result<()> {
    let Some(scheme) = context.schemes.iter().find(|scheme| scheme.fixed_scales().is_some()) else {
        return Ok(());
    };
    Err(Error::usage(
        format!(
            "`{step}` would not improve {scheme}: every group of {} inputs has its own scale, which already \
            adapts to outliers, and moving outliers into weights increases rounding errors",
            scheme.granularity.group_size(0)
        ),
        "choose the ‹method› rtn, gptq or awq, or a scheme such as wf8af8-channel",
    ))
}

/// Fails if SmoothQuant has no effect, repeats another step, or is given maxima of a different model.
pub(super) fn check_inputs(context: &StepContext<'_>) -> Result<()> {
    let smooth = SmoothSettings::of(context.settings);
    let repeated = context.others.iter().find(|other| other.smooths_linears(context.settings));
    if let Some(other) = repeated.filter(|_| smooth.producers == Producers::All) {
        let other = other.name();
        return Err(Error::usage(
            format!(
                "`{other}` and SmoothQuant with all producers cannot be combined: both scale the inputs of o_proj and down_proj"
            ),
            format!("remove `{other}`, or set ‹smooth_producers=norms›"),
        ));
    }
    if let (Some(_), Some(step)) = (&smooth.maxima, context.earlier.first()) {
        return Err(Error::usage(
            format!(
                "channel maxima from a file apply to the unmodified model, but `{step}` modifies it first"
            ),
            "omit ‹channel_maxima› to collect maxima after that step, or put `smoothquant` first",
        ));
    }
    if !context.rounds_in_blocks {
        return Err(Error::usage(
            format!("method `{}` has no effect: all activations stay float", context.method),
            "SmoothQuant makes activations easier to quantize: choose a scheme such as w8a8, or a different \
            ‹method›",
        ));
    }
    (0..context.architecture.layers).try_for_each(|layer| check_maxima(context, layer))
}

/// Fails if a file of channel maxima does not fit block `layer`.
fn check_maxima(context: &StepContext<'_>, layer: usize) -> Result<()> {
    let Some(file) = SmoothSettings::of(context.settings).maxima else { return Ok(()) };
    let graph = context.architecture.graph(layer);
    let is_rounded = |&node: &NodeId| context.rounded_inputs.contains(&(layer, node));
    let groups = Smoothing::of_inputs(context.settings).groups(graph).into_iter();
    for group in groups.filter(|g| g.consumers.iter().any(is_rounded)) {
        let first = group.consumers[0];
        if let Some((_, name, [_, k], _)) = graph.linears().find(|(node, ..)| *node == first) {
            file.of(&context.architecture.in_block(layer, name), k)?;
        }
    }
    Ok(())
}

impl Smoothing {
    /// The memory for a candidate's block, of which the parts that the next candidate does not change are reused: codes
    /// and scales of quantized linears, other linears in f32, and the floats from which a linear is quantized.
    pub(super) fn memory(self, work: &Workload<'_>) -> u64 {
        match ExpertOrder::of(work.graph).filter(|_| work.experts_apart) {
            _ if !self.is_searched() => 0,
            None => {
                let weights = |[n, k]: [usize; 2]| (n * k) as u64;
                let kept = work.graph.linears().map(|(node, _, shape, _)| match work.schemes.get(&node) {
                    Some(_) => weights(shape) + weights(shape) / 4,
                    None => 4 * weights(shape),
                });
                let largest = work.graph.linears().map(|(.., shape, _)| weights(shape)).max().unwrap_or(0);
                kept.sum::<u64>() + 8 * largest
            }
            Some(order) => self.memory_by_expert(work, &order),
        }
    }

    /// The memory if experts are processed one at a time: for each candidate, its factors, the value at which the block
    /// is split, the router's weights and the sum of the experts; the outputs of all experts; and the quantized linears
    /// of one expert and of everything outside the experts, one of them as floats.
    fn memory_by_expert(self, work: &Workload<'_>, order: &ExpertOrder) -> u64 {
        let graph = work.graph;
        let tokens = (work.sampling.length as u64).max(SEARCH_TOKENS as u64);
        let widths = |node: NodeId| graph.width(node) as u64;
        let token = widths(order.from) + widths(order.weights) + widths(order.sum);
        let linears = || graph.linears();
        let factors: u64 = linears().map(|(.., [n, k], _)| (n + 3 * k) as u64).sum();
        let share: f64 = order.experts.iter().map(|(selects, _)| work.share_of_tokens(*selects)).sum();
        let outputs =
            (2.0 * share.min(order.experts.len() as f64 / 2.0) * tokens as f64) as u64 * widths(order.sum);
        let mut parts: BTreeMap<Option<NodeId>, u64> = BTreeMap::new();
        for (node, _, [n, k], _) in linears() {
            *parts.entry(graph.expert_of(node)).or_default() += (n * k) as u64;
        }
        let others = parts.remove(&None).unwrap_or(0);
        let expert = parts.into_values().max().unwrap_or(0);
        let largest = linears().map(|(.., [n, k], _)| (n * k) as u64).max().unwrap_or(0);
        let values: u64 = linears().map(|(.., [n, k], _)| (n + k) as u64).max().unwrap_or(0);
        let candidates = CANDIDATES as u64 * 4 * (factors + token * tokens);
        candidates + 4 * outputs + 2 * (others + expert) + 8 * largest + 12 * values * tokens
    }

    /// The operations of running the block for all exponents.
    pub(super) fn work(self, work: &Workload<'_>) -> SearchWork {
        if !self.is_searched() {
            return SearchWork::default();
        }
        let share = (SEARCH_TOKENS as f64 / work.tokens().max(1.0)).min(1.0);
        let runs = self.groups(work.graph).len() * CANDIDATES + 1;
        SearchWork { operations: runs as f64 * share * work.block_operations(), rounded: 0.0 }
    }
}
