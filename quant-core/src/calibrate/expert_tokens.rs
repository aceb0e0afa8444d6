//! The tokens of the batch on which an expert's linears are calibrated.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::HiddenStates;
use crate::model::{Block, BlockGraph, NodeId, with_values};
use crate::names::suggestion;
use crate::{CancelToken, Error, Result};

/// The tokens on which an expert's linears are calibrated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ExpertSampling {
    /// The tokens used for an expert with at least `floor` routed tokens.
    pub tokens: ExpertTokens,
    /// An expert with fewer routed tokens than this is calibrated on all tokens.
    pub floor: u64,
}

/// The tokens on which experts are calibrated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ExpertTokens {
    /// The tokens routed to the expert.
    #[default]
    Routed,
    /// All tokens of the batch, regardless of routing.
    All,
}

impl FromStr for ExpertTokens {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "routed" => Ok(Self::Routed),
            "all" => Ok(Self::All),
            _ => Err(Error::usage(
                format!("unknown value `{text}` for the tokens of experts"),
                suggestion(text, "known values: routed, all", &["routed", "all"]),
            )),
        }
    }
}

impl ExpertSampling {
    /// Whether every expert is calibrated only on its routed tokens, however few there are.
    pub fn is_routed(self) -> bool {
        self == Self::default()
    }

    /// Whether an expert with `routed` tokens is calibrated on all tokens.
    pub fn takes_all(self, routed: u64) -> bool {
        self.tokens == ExpertTokens::All || routed < self.floor
    }

    /// The smallest and largest share of the batch on which an expert may be calibrated. `routed` is the share of
    /// tokens that is routed to the expert.
    pub(crate) fn shares(self, routed: f64) -> [f64; 2] {
        match self.tokens {
            ExpertTokens::All => [1.0; 2],
            ExpertTokens::Routed if self.floor > 0 => [routed, 1.0],
            ExpertTokens::Routed => [routed; 2],
        }
    }

    /// Checks that both settings have an effect.
    ///
    /// # Errors
    /// [`Error::Usage`] if there is a floor although all experts are calibrated on all tokens.
    pub fn check(self) -> Result<()> {
        match self.tokens == ExpertTokens::All && self.floor > 0 {
            true => Err(Error::usage(
                format!(
                    "the floor of {} tokens per expert has no effect: all experts are calibrated on all tokens",
                    self.floor
                ),
                "omit the floor, or calibrate experts on the tokens routed to them",
            )),
            false => Ok(()),
        }
    }

    /// Returns the experts of a block that are calibrated on all tokens. Each is identified by the node that selects
    /// its rows, and comes with the number of counted tokens routed to it. `states` are the values of node `from`.
    ///
    /// # Errors
    /// When the block fails or the run is cancelled.
    pub fn unrouted(
        self,
        states: &HiddenStates,
        block: &Block,
        from: NodeId,
        cancel: &CancelToken,
    ) -> Result<BTreeMap<NodeId, u64>> {
        let mut counts = BTreeMap::new();
        if self.is_routed() {
            return Ok(counts);
        }
        let graph = block.graph();
        let mut routers: BTreeMap<NodeId, Vec<(usize, NodeId)>> = BTreeMap::new();
        for (id, expert, weights) in experts(graph) {
            routers.entry(weights).or_default().push((expert, id));
        }
        for (weights, experts) in routers {
            let width = graph.width(weights);
            let mut routed = vec![0; width];
            let mut first = 0;
            // The second value is unused, so the same node is passed twice.
            states.values_between(block, from, [weights; 2], cancel, &mut |values: &[Tensor]| {
                with_values(&values[0], |values| {
                    for (token, row) in values.chunks_exact(width.max(1)).enumerate() {
                        if states.layout().counts(first + token) {
                            row.iter().zip(&mut routed).for_each(|(w, n)| *n += u64::from(*w != 0.0));
                        }
                    }
                    first += values.len() / width.max(1);
                    Ok(())
                })
            })?;
            let few = experts.into_iter().filter_map(|(expert, id)| Some((id, *routed.get(expert)?)));
            counts.extend(few.filter(|(_, routed)| self.takes_all(*routed)));
        }
        Ok(counts)
    }
}

/// The nodes that select rows for experts, each with its expert and the node of the router's weights.
fn experts(graph: &BlockGraph) -> impl Iterator<Item = (NodeId, usize, NodeId)> {
    graph.nodes().iter().enumerate().filter_map(|(id, node)| match node.inputs[..] {
        [_, weights, ..] => Some((id, node.op.selected_expert()?, weights)),
        _ => None,
    })
}

/// The number of routed tokens for each linear that belongs to one of these experts.
pub(crate) fn routed_to_linears(
    graph: &BlockGraph,
    experts: &BTreeMap<NodeId, u64>,
) -> BTreeMap<NodeId, u64> {
    let routed = |id: NodeId| graph.rows_selected_by(id).and_then(|selects| experts.get(&selects)).copied();
    graph.linears().filter_map(|(id, ..)| Some((id, routed(id)?))).collect()
}

/// A copy of the block that passes all tokens to these experts, for gathering statistics.
pub(crate) fn watched(block: &Block, experts: &BTreeMap<NodeId, u64>) -> Block {
    block.unrouted(experts.keys().copied().collect::<BTreeSet<_>>())
}
