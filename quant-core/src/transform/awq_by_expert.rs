//! AWQ in a block whose experts are processed one at a time: their inputs are gathered, their scales and clip bounds
//! are searched, and their weights are dropped before the next expert runs. The result is the same as that of a search
//! with all experts in memory.

use super::awq::{self, Searched};
use super::clip::{self, clip_linears};
use super::statistics::{Gathering, InputStatistics, Wanted};
use super::{BlockTask, ClipRecord, FoldRecord, Rewrite, SCALE_CANDIDATES, Search, fold};
use crate::Result;
use crate::calibrate::{HiddenStates, StatisticsPass};
use crate::model::{BlockGraph, CancelTap, ExpertOrder, FoldGroup, NodeId};

/// `None` if AWQ needs all experts at once.
pub(super) fn order(graph: &BlockGraph) -> Option<ExpertOrder> {
    let order = ExpertOrder::of(graph)?;
    let fits = |group: &FoldGroup| match (part_of(graph, group), reads_experts(graph, group)) {
        (Some(expert), _) => order.has(expert),
        (None, false) => true,
        (None, true) => {
            group.input >= order.from
                && group.inspected >= order.sum
                && graph.nodes()[group.inspected].op.linear_shape().is_none()
        }
    };
    awq::groups(graph).iter().all(fits).then_some(order)
}

/// The expert that contains all linears of a group, as the node that selects its rows.
pub(super) fn part_of(graph: &BlockGraph, group: &FoldGroup) -> Option<NodeId> {
    let expert = graph.expert_of(group.producer)?;
    group.consumers.iter().all(|&consumer| graph.expert_of(consumer) == Some(expert)).then_some(expert)
}

/// Whether linears of several experts read a group's channels.
pub(super) fn reads_experts_apart(graph: &BlockGraph, group: &FoldGroup) -> bool {
    part_of(graph, group).is_none() && reads_experts(graph, group)
}

/// Whether linears of experts read a group's channels.
fn reads_experts(graph: &BlockGraph, group: &FoldGroup) -> bool {
    group.consumers.iter().any(|&consumer| graph.expert_of(consumer).is_some())
}

/// The findings for a task, with the positions at which the records belong.
struct Found {
    rewrite: Rewrite,
    folds: Vec<(usize, FoldRecord)>,
    clips: Vec<(NodeId, ClipRecord)>,
}

impl Found {
    fn scale(
        &mut self,
        task: &BlockTask<'_>,
        groups: &[(usize, &FoldGroup)],
        inputs: &InputStatistics,
        searched: Searched<'_>,
    ) -> Result<()> {
        let mut chosen = Vec::with_capacity(groups.len());
        for (position, group) in groups {
            let (record, scales) = awq::choose(task, group, inputs, searched)?;
            self.folds.push((*position, record));
            chosen.push((group, scales));
        }
        for (group, scales) in chosen {
            if let Some(scales) = scales {
                fold(&mut self.rewrite, task, group, &scales)?;
            }
        }
        Ok(())
    }

    fn clip(
        &mut self,
        task: &BlockTask<'_>,
        inputs: &InputStatistics,
        which: impl Fn(NodeId) -> bool,
    ) -> Result<()> {
        self.clips.extend(clip_linears(task, inputs, &mut self.rewrite, which)?);
        Ok(())
    }

    fn finish(mut self) -> Rewrite {
        self.folds.sort_by_key(|(position, _)| *position);
        self.clips.sort_by_key(|(node, _)| *node);
        self.rewrite.folds = self.folds.into_iter().map(|(_, record)| record).collect();
        self.rewrite.clip_records = self.clips.into_iter().map(|(_, record)| record).collect();
        self.rewrite
    }
}

/// `groups` are those whose scales are searched.
pub(super) fn search(
    tasks: &[BlockTask<'_>],
    groups: &[FoldGroup],
    hidden: &mut HiddenStates,
    advance: bool,
    order: &ExpertOrder,
) -> Result<Vec<Rewrite>> {
    let Some(first) = tasks.first() else { return Ok(Vec::new()) };
    let (block, graph, cancel) = (first.block, first.block.graph().clone(), first.cancel);
    // The reference search needs the states before the block until the end.
    let searches_all = !groups.is_empty() && awq::search_of(first.settings) == Search::Reference;
    let mut copy;
    let (states, before, moves) = match advance && !searches_all {
        true => (&mut *hidden, None, true),
        false => {
            copy = hidden.try_clone()?;
            (&mut copy, Some(&*hidden).filter(|_| searches_all), false)
        }
    };
    let searched = Searched::ByExpert(order, before);
    let numbered = || groups.iter().enumerate();
    let shared: Vec<_> = numbered().filter(|(_, group)| part_of(&graph, group).is_none()).collect();
    let outside = |node: NodeId| graph.expert_of(node).is_none();

    let (mut inputs, mut experts) =
        gather(first, &shared, states, &outside, |pass, states| pass.run_before_experts(states, order))?;
    for (node, ..) in graph.linears() {
        if let Some(selects) = graph.expert_of(node) {
            inputs.tokens.insert(node, experts.counted(block, selects));
        }
    }
    let tokens = inputs.tokens.clone();
    let found = || Found {
        rewrite: Rewrite { tokens: tokens.clone(), ..Rewrite::default() },
        folds: Vec::new(),
        clips: Vec::new(),
    };
    let mut all: Vec<Found> = tasks.iter().map(|_| found()).collect();
    for (task, found) in tasks.iter().zip(&mut all) {
        found.scale(task, &shared, &inputs, searched)?;
        found.clip(task, &inputs, outside)?;
    }
    drop(inputs);
    for &(selects, _) in &order.experts {
        let own: Vec<_> = numbered().filter(|(_, group)| part_of(&graph, group) == Some(selects)).collect();
        let inside = |node: NodeId| graph.expert_of(node) == Some(selects);
        let is_found = |task: &BlockTask<'_>| {
            own.iter().all(|(_, group)| awq::found(task, group).is_some()) && clip::are_found(task, inside)
        };
        let inputs = if tasks.iter().all(is_found) {
            // An interrupted run has searched this expert, so no statistics of its inputs are needed.
            experts.pass_next(states, block, &mut CancelTap(cancel), moves, cancel)?;
            InputStatistics::default()
        } else {
            let gathered = gather(first, &own, states, &inside, |pass, states| {
                experts.pass_next(states, block, pass, moves, cancel)
            });
            gathered?.0
        };
        for (task, found) in tasks.iter().zip(&mut all) {
            found.scale(task, &own, &inputs, searched)?;
            found.clip(task, &inputs, inside)?;
        }
        block.release_expert(selects);
    }
    if moves {
        states.advance_parts(block, order, experts, cancel)?;
    } else if advance {
        first.advance(hidden)?;
    }
    Ok(all.into_iter().map(Found::finish).collect())
}

fn gather<T>(
    task: &BlockTask<'_>,
    groups: &[(usize, &FoldGroup)],
    states: &mut HiddenStates,
    is_part: &dyn Fn(NodeId) -> bool,
    run: impl FnOnce(&mut StatisticsPass<'_>, &mut HiddenStates) -> Result<T>,
) -> Result<(InputStatistics, T)> {
    let groups: Vec<FoldGroup> = groups.iter().map(|(_, group)| (*group).clone()).collect();
    let wanted = Wanted { groups: &groups, candidates: SCALE_CANDIDATES, clip_tokens: clip::TOKENS };
    let layout = states.layout().clone();
    let mut gathering = Gathering::new(task, &wanted, states, is_part)?;
    let mut pass = StatisticsPass::new(task.block, &layout, task.cancel);
    gathering.add_to(&mut pass)?;
    let outcome = run(&mut pass, states)?;
    let tokens = pass.into_tokens();
    Ok((gathering.finish(tokens), outcome))
}
