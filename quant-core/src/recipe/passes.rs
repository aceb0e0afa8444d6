//! The passes that the calibration batch makes through a block: which states each uses, and which of them advances the
//! batch to the next block. Both the run and the memory estimate follow this plan.
//!
//! The states of the float model are advanced by the original float block, never by a rewritten one: the two differ by
//! rounding, and a resumed run only has the original. If they are needed, exactly one pass advances them. Later passes
//! use a copy from before that pass.

use super::Plan;
use crate::round::LayerInputs;
use crate::round::States;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FirstPass {
    /// Whether the pass gathers the ranges of linears' inputs.
    pub(crate) ranges: bool,
    /// Whether the pass advances the float states.
    pub(crate) advance: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PassPlan {
    /// The pass before all others, if one is needed.
    pub(crate) first: Option<FirstPass>,
    /// The states for searches, if one of them needs any: [`States::Float`] or [`States::Copy`].
    pub(crate) search: Option<States>,
    /// The states for the maxima of cached keys and values, if they are computed: [`States::Float`] before the first
    /// pass, without advancing them, or [`States::Copy`] through the rewritten block.
    pub(crate) cache: Option<States>,
    /// The states for the rounding, if it needs any.
    pub(crate) rounding: Option<States>,
}

#[derive(Debug, Clone, Copy)]
struct Wanted {
    /// The number of consecutive transforms.
    transforms: usize,
    /// Whether one of the transforms needs hidden states.
    searched: bool,
    /// Whether ranges are gathered, for grids, transforms or a file of maxima.
    ranges: bool,
    cache: bool,
    /// The model whose states the rounding uses, if it needs any.
    rounding: Option<LayerInputs>,
    /// Whether a rounding on states of the quantized model takes those of the float model again after some blocks.
    spans: bool,
}

impl Plan {
    /// Whether a block is the first of a span: the quantized model gets the states of the float model before it.
    pub(crate) fn begins_span(&self, layer: usize) -> bool {
        let rounding = self.method.rounding;
        rounding.inputs(&self.settings) == Some(LayerInputs::Quantized)
            && self.span_blocks().is_some_and(|blocks| blocks > 0 && layer.is_multiple_of(blocks))
    }

    /// The number of blocks in a span, if the rounding begins again with the states of the float model.
    pub(crate) fn span_blocks(&self) -> Option<usize> {
        self.method.rounding.span_blocks(&self.settings)
    }
}

impl PassPlan {
    /// The passes of every block of a plan. With `keeps_maxima`, the maxima of linears' inputs are kept as well.
    pub(crate) fn new(plan: &Plan, keeps_maxima: bool) -> Self {
        if plan.is_forward() {
            let first = Some(FirstPass { ranges: false, advance: true });
            return Self { first, search: None, cache: None, rounding: None };
        }
        let transforms = plan.transforms();
        Self::of(Wanted {
            transforms: transforms.len(),
            searched: transforms.iter().any(|t| t.needs(&plan.settings).states),
            ranges: plan.needs_ranges() || keeps_maxima,
            cache: plan.calibrates_cache(),
            rounding: plan.method.rounding.inputs(&plan.settings),
            spans: (plan.blocks().start + 1..plan.last_reader()).any(|layer| plan.begins_span(layer)),
        })
    }

    fn of(wanted: Wanted) -> Self {
        let Wanted { transforms, searched, ranges, cache, rounding, spans } = wanted;
        // A single search advances the states itself; several consecutive ones use the same states.
        let search = match (searched, transforms, ranges) {
            (false, ..) => None,
            (true, 1, false) => Some(States::Float),
            (true, ..) => Some(States::Copy),
        };
        // After transforms, the rounding works on the rewritten block, which must not advance the float states.
        let rounding = rounding.map(|inputs| match inputs {
            LayerInputs::Quantized => States::Quantized,
            LayerInputs::Float if transforms == 0 => States::Float,
            LayerInputs::Float => States::Copy,
        });
        // After transforms, keys and values come from rewritten weights, and the float states may have advanced.
        let cache = cache.then_some(if transforms == 0 { States::Float } else { States::Copy });
        let mut passes = Self { first: None, search, cache, rounding };
        let advance = !passes.uses(States::Float);
        if ranges || advance && (passes.uses(States::Copy) || cache.is_some() || spans) {
            passes.first = Some(FirstPass { ranges, advance });
        }
        passes
    }

    fn uses(&self, states: States) -> bool {
        self.search == Some(states) || self.rounding == Some(states)
    }

    pub(crate) fn follow_float(&self) -> bool {
        self.first.is_some() || self.uses(States::Float)
    }

    pub(crate) fn follow_quantized(&self) -> bool {
        self.uses(States::Quantized)
    }

    pub(crate) fn copy_float(&self) -> bool {
        self.uses(States::Copy) || self.cache == Some(States::Copy)
    }

    /// The maximum number of copies of the batch's hidden states that are in memory at the same time.
    pub(crate) fn states_in_memory(&self) -> u64 {
        [self.follow_float(), self.follow_quantized(), self.copy_float()].map(u64::from).iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GATHER: Option<FirstPass> = Some(FirstPass { ranges: true, advance: false });
    const ADVANCE: Option<FirstPass> = Some(FirstPass { ranges: false, advance: true });
    const BOTH: Option<FirstPass> = Some(FirstPass { ranges: true, advance: true });
    const FLOAT: Option<States> = Some(States::Float);
    const COPY: Option<States> = Some(States::Copy);
    const QUANTIZED: Option<States> = Some(States::Quantized);

    /// The inputs: transforms, whether one needs states, whether ranges are gathered, and the inputs of the rounding.
    /// Then the expectation: the first pass, the states of searches and the rounding, and the number of states in memory.
    type Row =
        ((usize, bool, bool, Option<LayerInputs>), (Option<FirstPass>, Option<States>, Option<States>), u64);

    const ON_QUANTIZED: Option<LayerInputs> = Some(LayerInputs::Quantized);
    const ON_FLOAT: Option<LayerInputs> = Some(LayerInputs::Float);

    /// More than two transforms are equivalent to two.
    const ALL: [Row; 30] = [
        ((0, false, false, None), (None, None, None), 0),
        ((0, false, false, ON_QUANTIZED), (None, None, QUANTIZED), 1),
        ((0, false, false, ON_FLOAT), (None, None, FLOAT), 1),
        ((0, false, true, None), (BOTH, None, None), 1),
        ((0, false, true, ON_QUANTIZED), (BOTH, None, QUANTIZED), 2),
        ((0, false, true, ON_FLOAT), (GATHER, None, FLOAT), 1),
        ((1, false, false, None), (None, None, None), 0),
        ((1, false, false, ON_QUANTIZED), (None, None, QUANTIZED), 1),
        ((1, false, false, ON_FLOAT), (ADVANCE, None, COPY), 2),
        ((1, false, true, None), (BOTH, None, None), 1),
        ((1, false, true, ON_QUANTIZED), (BOTH, None, QUANTIZED), 2),
        ((1, false, true, ON_FLOAT), (BOTH, None, COPY), 2),
        ((1, true, false, None), (None, FLOAT, None), 1),
        ((1, true, false, ON_QUANTIZED), (None, FLOAT, QUANTIZED), 2),
        ((1, true, false, ON_FLOAT), (None, FLOAT, COPY), 2),
        ((1, true, true, None), (BOTH, COPY, None), 2),
        ((1, true, true, ON_QUANTIZED), (BOTH, COPY, QUANTIZED), 3),
        ((1, true, true, ON_FLOAT), (BOTH, COPY, COPY), 2),
        ((2, false, false, None), (None, None, None), 0),
        ((2, false, false, ON_QUANTIZED), (None, None, QUANTIZED), 1),
        ((2, false, false, ON_FLOAT), (ADVANCE, None, COPY), 2),
        ((2, false, true, None), (BOTH, None, None), 1),
        ((2, false, true, ON_QUANTIZED), (BOTH, None, QUANTIZED), 2),
        ((2, false, true, ON_FLOAT), (BOTH, None, COPY), 2),
        ((2, true, false, None), (ADVANCE, COPY, None), 2),
        ((2, true, false, ON_QUANTIZED), (ADVANCE, COPY, QUANTIZED), 3),
        ((2, true, false, ON_FLOAT), (ADVANCE, COPY, COPY), 2),
        ((2, true, true, None), (BOTH, COPY, None), 2),
        ((2, true, true, ON_QUANTIZED), (BOTH, COPY, QUANTIZED), 3),
        ((2, true, true, ON_FLOAT), (BOTH, COPY, COPY), 2),
    ];

    #[test]
    fn every_combination_has_its_passes() {
        for ((transforms, searched, ranges, rounding), (first, search, on), states) in ALL {
            for transforms in if transforms == 2 { 2..5 } else { transforms..transforms + 1 } {
                let wanted = Wanted { transforms, searched, ranges, cache: false, rounding, spans: false };
                let passes = PassPlan::of(wanted);
                assert_eq!(passes, PassPlan { first, search, cache: None, rounding: on }, "{wanted:?}");
                assert_eq!(passes.states_in_memory(), states, "{wanted:?}");
            }
        }
    }

    #[test]
    fn one_pass_moves_the_float_states_on() {
        for ((transforms, searched, ranges, rounding), ..) in ALL {
            for cache in [false, true] {
                let wanted = Wanted { transforms, searched, ranges, cache, rounding, spans: false };
                let passes = PassPlan::of(wanted);
                // With spans, the float states are followed in any case.
                let spans = PassPlan::of(Wanted { spans: true, ..wanted });
                assert!(spans.follow_float(), "{wanted:?}");
                assert!(spans == passes || !passes.follow_float(), "{wanted:?}");
                let first = passes.first.is_some_and(|first| first.advance);
                let moving = [first, passes.search == FLOAT, passes.rounding == FLOAT]
                    .into_iter()
                    .filter(|m| *m)
                    .count();
                assert_eq!(moving, usize::from(passes.follow_float()), "{passes:?}");
                // With the block as it will be written, on states from before the block.
                assert_eq!(
                    passes.cache,
                    cache.then_some(if transforms == 0 { States::Float } else { States::Copy })
                );
                assert!(!cache || passes.follow_float(), "{passes:?}");
                assert!(passes.cache != COPY || passes.copy_float(), "{passes:?}");
            }
        }
    }
}
