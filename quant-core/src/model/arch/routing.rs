//! Expert routing: the choice of a token's experts and the weights of their outputs.

/// The routing of tokens to experts.
///
/// A token's scores are computed from the router's logits. The `top_k` experts with the largest scores are chosen,
/// after adding the [correction](Self::correction) and excluding experts outside the best [groups](Self::groups). Their
/// weights are the scores without the correction, [normalized](Self::normalized) and then [scaled](Self::scale).
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct RoutingRule {
    /// Number of experts.
    pub experts: usize,
    /// Number of experts per token.
    pub top_k: usize,
    /// The function from logits to scores.
    pub scores: RouterScores,
    /// The correction added to the scores before experts are chosen, if the checkpoint stores one.
    pub correction: Option<Correction>,
    /// The groups that experts are chosen from; `None` if experts are not grouped.
    pub groups: Option<Groups>,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalized: bool,
    /// Added to the sum of the weights before they are divided by it.
    pub epsilon: f32,
    /// Lower bound of the sum that weights are divided by.
    pub min_sum: f32,
    /// The final factor of the weights.
    pub scale: f32,
    /// Whether scores multiply the experts' inputs, and their outputs are added unweighted (Llama 4).
    pub on_inputs: bool,
}

impl RoutingRule {
    /// Creates a routing to the experts with the largest softmax scores, which are also their weights.
    pub fn new(experts: usize, top_k: usize) -> Self {
        Self {
            experts,
            top_k,
            scores: RouterScores::Softmax,
            correction: None,
            groups: None,
            normalized: false,
            epsilon: 0.0,
            min_sum: 0.0,
            scale: 1.0,
            on_inputs: false,
        }
    }
}

/// The function from a router's logits to scores.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RouterScores {
    /// The softmax of the logits of all experts.
    Softmax,
    /// The sigmoid of each logit.
    Sigmoid,
    /// Phi-3.5-MoE's sparse mixer. Experts are chosen in sequence, the largest logit first. The weight of an expert is
    /// its softmax over the logits of the experts that are not chosen yet. Logits that are smaller by more than
    /// `tolerance`, relative to the larger magnitude of the two, are excluded from the softmax.
    Sparse {
        /// The relative difference above which a logit is excluded.
        tolerance: f32,
    },
}

/// A stored bias per expert, added to the scores for the choice of experts only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Correction {
    /// The module that the bias is stored in.
    pub module: &'static str,
    /// The tensor name in the module.
    pub tensor: &'static str,
    /// Whether the bias is stored as a matrix with one row.
    pub is_row: bool,
}

impl Correction {
    /// Returns the stored shape.
    pub fn shape(self, experts: usize) -> Vec<usize> {
        if self.is_row { vec![1, experts] } else { vec![experts] }
    }
}

/// Experts in groups of equal size, of which only the best are considered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Groups {
    /// Number of groups; each group is a range of consecutive experts.
    pub count: usize,
    /// Number of groups that are considered.
    pub chosen: usize,
    /// A group is ranked by the sum of this many of its largest scores.
    pub by_largest: usize,
}
