//! Which tokens of the batch an expert's linears are calibrated on, and how many are routed to each.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::HiddenStates;
use crate::model::{Block, BlockGraph, NodeId, with_values};
use crate::{CancelToken, Error, Result};

/// Which tokens an expert's linears are calibrated on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ExpertSampling {
    /// Those of most experts.
    pub tokens: ExpertTokens,
    /// An expert that fewer tokens than these are routed to is calibrated on all.
    pub floor: u64,
}

/// The tokens that experts are calibrated on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ExpertTokens {
    /// Those that are routed to the expert.
    #[default]
    Routed,
    /// All tokens of the batch, however they are routed.
    All,
}

impl FromStr for ExpertTokens {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "routed" => Ok(Self::Routed),
            "all" => Ok(Self::All),
            _ => Err(Error::usage(format!("expert tokens `{text}` are not known"), "known: routed, all")),
        }
    }
}

impl ExpertSampling {
    /// Whether every expert is calibrated on its own tokens alone, however few.
    pub fn is_routed(self) -> bool {
        self == Self::default()
    }

    /// Whether an expert that so many tokens are routed to is calibrated on all.
    pub fn takes_all(self, routed: u64) -> bool {
        self.tokens == ExpertTokens::All || routed < self.floor
    }

    /// The least and the largest share of the batch that an expert may be calibrated on, of which `routed` are its own.
    pub(crate) fn shares(self, routed: f64) -> [f64; 2] {
        match self.tokens {
            ExpertTokens::All => [1.0; 2],
            ExpertTokens::Routed if self.floor > 0 => [routed, 1.0],
            ExpertTokens::Routed => [routed; 2],
        }
    }

    /// Fails where one setting makes the other meaningless.
    ///
    /// # Errors
    /// [`Error::Usage`].
    pub fn check(self) -> Result<()> {
        match self.tokens == ExpertTokens::All && self.floor > 0 {
            true => Err(Error::usage(
                format!(
                    "a floor of {} tokens for each expert has no effect: all experts see all tokens",
                    self.floor
                ),
                "leave one of the two out",
            )),
            false => Ok(()),
        }
    }

    /// The experts of a block that are calibrated on all tokens, each by the node that selects its rows, with how many
    /// tokens that count are routed to it; from the states that enter the block.
    ///
    /// # Errors
    /// When the block fails or the run is cancelled.
    pub fn unrouted(
        self,
        states: &HiddenStates,
        block: &Block,
        cancel: &CancelToken,
    ) -> Result<BTreeMap<NodeId, u64>> {
        let mut counts = BTreeMap::new();
        if self.is_routed() {
            return Ok(counts);
        }
        let graph = block.graph();
        // Of each router, the experts that its weights are for.
        let mut routers: BTreeMap<NodeId, Vec<(usize, NodeId)>> = BTreeMap::new();
        for (id, expert, weights) in experts(graph) {
            routers.entry(weights).or_default().push((expert, id));
        }
        for (weights, experts) in routers {
            let width = graph.width(weights);
            let mut routed = vec![0; width];
            let mut first = 0;
            // The second value is not needed; it is the same one.
            states.values_between(
                block,
                graph.input(),
                [weights; 2],
                cancel,
                &mut |values: &[Tensor]| {
                    with_values(&values[0], |values| {
                        for (token, row) in values.chunks_exact(width.max(1)).enumerate() {
                            if states.layout().counts(first + token) {
                                row.iter().zip(&mut routed).for_each(|(w, n)| *n += u64::from(*w != 0.0));
                            }
                        }
                        first += values.len() / width.max(1);
                        Ok(())
                    })
                },
            )?;
            let few = experts.into_iter().filter_map(|(expert, id)| Some((id, *routed.get(expert)?)));
            counts.extend(few.filter(|(_, routed)| self.takes_all(*routed)));
        }
        Ok(counts)
    }
}

/// The nodes that select experts' rows, each with the expert and the node of all weights.
fn experts(graph: &BlockGraph) -> impl Iterator<Item = (NodeId, usize, NodeId)> {
    graph.nodes().iter().enumerate().filter_map(|(id, node)| match node.inputs[..] {
        [_, weights, ..] => Some((id, node.op.selected_expert()?, weights)),
        _ => None,
    })
}

/// Of each linear inside one of some experts, how many tokens are routed to it.
pub(crate) fn routed_to_linears(
    graph: &BlockGraph,
    experts: &BTreeMap<NodeId, u64>,
) -> BTreeMap<NodeId, u64> {
    let routed = |id: NodeId| graph.rows_selected_by(id).and_then(|selects| experts.get(&selects)).copied();
    graph.linears().filter_map(|(id, ..)| Some((id, routed(id)?))).collect()
}

/// The block as it is watched where these experts are calibrated on all tokens.
pub(crate) fn watched(block: &Block, experts: &BTreeMap<NodeId, u64>) -> Block {
    block.unrouted(experts.keys().copied().collect::<BTreeSet<_>>())
}
