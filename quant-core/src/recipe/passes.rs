//! Which passes the calibration batch makes through a block, what each looks at, and which of them moves the batch on
//! to the next block.
//!
//! The run follows this plan, and the prediction of its memory reads it.
//!
//! The states of the float model are moved on by the float block itself, never by one that is rewritten: the two
//! differ by rounding, and a resumed run has only the first. Exactly one pass does it. What comes after that pass
//! looks at a copy from before it.

use super::{Plan, Rounding};
use crate::quantize::gptq::LayerInputs;

/// Whose hidden states a pass looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum States {
    /// The float model's, which the pass moves on.
    Float,
    /// The float model's before the block, which stay as they are.
    Copy,
    /// The quantized model's, which the pass moves on.
    Quantized,
}

/// The pass of the float block that comes before all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FirstPass {
    /// Whether it gathers the ranges of what linears read.
    pub(crate) ranges: bool,
    /// Whether it moves the float states on.
    pub(crate) advance: bool,
}

/// The passes of a block, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PassPlan {
    /// The pass before all others, if one is needed.
    pub(crate) first: Option<FirstPass>,
    /// What the searches look at, where one of them looks at states: [`States::Float`] or [`States::Copy`].
    pub(crate) search: Option<States>,
    /// What the maxima of cached keys and values are found on, where they are: before the first pass on
    /// [`States::Float`], which stay, or in the rewritten block on [`States::Copy`].
    pub(crate) cache: Option<States>,
    /// What GPTQ looks at, where it rounds.
    pub(crate) gptq: Option<States>,
}

/// What a plan asks of the passes.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    /// Transforms that follow on each other.
    transforms: usize,
    /// Whether one of them looks at hidden states.
    searched: bool,
    /// Whether ranges are gathered, for grids, transforms or a file of maxima.
    ranges: bool,
    /// Whether the maxima of cached keys and values are found.
    cache: bool,
    /// Whose states GPTQ looks at, where it rounds.
    gptq: Option<LayerInputs>,
}

impl PassPlan {
    /// The passes of every block of a plan; the maxima of what linears read may be kept beside.
    pub(crate) fn new(plan: &Plan, keeps_maxima: bool) -> Self {
        let transforms = plan.transforms();
        Self::of(Wanted {
            transforms: transforms.len(),
            searched: transforms.iter().any(|t| t.needs(&plan.settings).states),
            ranges: plan.needs_ranges() || keeps_maxima,
            cache: plan.calibrates_cache(),
            gptq: (plan.method.rounding == Rounding::Gptq).then_some(plan.gptq.inputs),
        })
    }

    fn of(wanted: Wanted) -> Self {
        let Wanted { transforms, searched, ranges, cache, gptq } = wanted;
        // A single search has a pass of its own; several look at the same states one after the other.
        let search = match (searched, transforms, ranges) {
            (false, ..) => None,
            (true, 1, false) => Some(States::Float),
            (true, ..) => Some(States::Copy),
        };
        // After transforms GPTQ looks at a rewritten block.
        let gptq = gptq.map(|inputs| match inputs {
            LayerInputs::Quantized => States::Quantized,
            LayerInputs::Float if transforms == 0 => States::Float,
            LayerInputs::Float => States::Copy,
        });
        // What a transform rewrites may be cached.
        let cache = cache.then_some(if transforms == 0 { States::Float } else { States::Copy });
        let mut passes = Self { first: None, search, cache, gptq };
        let advance = !passes.look_at(States::Float);
        if ranges || advance && (passes.look_at(States::Copy) || cache.is_some()) {
            passes.first = Some(FirstPass { ranges, advance });
        }
        passes
    }

    /// Whether a pass after the first looks at such states.
    fn look_at(&self, states: States) -> bool {
        self.search == Some(states) || self.gptq == Some(states)
    }

    /// Whether the states of the float model are needed from block to block.
    pub(crate) fn follow_float(&self) -> bool {
        self.first.is_some() || self.look_at(States::Float)
    }

    /// Whether those of the quantized model are.
    pub(crate) fn follow_quantized(&self) -> bool {
        self.look_at(States::Quantized)
    }

    /// Whether a pass looks at a copy of the float model's states from before the block.
    pub(crate) fn copy_float(&self) -> bool {
        self.look_at(States::Copy) || self.cache == Some(States::Copy)
    }

    /// How many times the hidden states of the batch are in memory at once.
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

    /// Transforms, whether one looks at states, whether ranges are gathered, and what GPTQ is asked to look at; then
    /// the first pass, what the searches and GPTQ look at, and how many states are in memory.
    type Row =
        ((usize, bool, bool, Option<LayerInputs>), (Option<FirstPass>, Option<States>, Option<States>), u64);

    const ON_QUANTIZED: Option<LayerInputs> = Some(LayerInputs::Quantized);
    const ON_FLOAT: Option<LayerInputs> = Some(LayerInputs::Float);

    /// Every combination there is. More transforms than two are as two.
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
        for ((transforms, searched, ranges, gptq), (first, search, on), states) in ALL {
            for transforms in if transforms == 2 { 2..5 } else { transforms..transforms + 1 } {
                let wanted = Wanted { transforms, searched, ranges, cache: false, gptq };
                let passes = PassPlan::of(wanted);
                assert_eq!(passes, PassPlan { first, search, cache: None, gptq: on }, "{wanted:?}");
                assert_eq!(passes.states_in_memory(), states, "{wanted:?}");
            }
        }
    }

    #[test]
    fn one_pass_moves_the_float_states_on() {
        for ((transforms, searched, ranges, gptq), ..) in ALL {
            for cache in [false, true] {
                let passes = PassPlan::of(Wanted { transforms, searched, ranges, cache, gptq });
                let first = passes.first.is_some_and(|first| first.advance);
                let moving =
                    [first, passes.search == FLOAT, passes.gptq == FLOAT].into_iter().filter(|m| *m).count();
                assert_eq!(moving, usize::from(passes.follow_float()), "{passes:?}");
                // What is cached is found on states from before the block, of the block as it will be written.
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
