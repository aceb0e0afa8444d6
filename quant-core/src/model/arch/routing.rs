//! How the experts of a token are chosen, and what their outputs are weighted by.

/// How experts are chosen for a token.
///
/// A token's scores come from the router's logits. The `top_k` experts with the largest scores are chosen, after the
/// [correction](Self::correction) is added and experts outside the best [groups](Self::groups) are left out. Their weights
/// are their scores without the correction, which are then [normalized](Self::normalized) and [scaled](Self::scale).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// How many there are.
    pub experts: usize,
    /// How many a token is routed to.
    pub top_k: usize,
    /// What scores are made of.
    pub scores: Scores,
    /// What is added to the scores before experts are chosen, where the checkpoint stores such numbers.
    pub correction: Option<Correction>,
    /// The groups that experts are chosen from, where not from all.
    pub groups: Option<Groups>,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalized: bool,
    /// What is added to that sum.
    pub epsilon: f32,
    /// What that sum counts as at least.
    pub least_sum: f32,
    /// What weights are multiplied by in the end.
    pub scale: f32,
    /// Whether scores multiply what experts read, and their outputs are added up as they are (Llama 4).
    pub on_inputs: bool,
}

impl Routing {
    /// The experts with the largest softmax, weighted by it.
    pub fn new(experts: usize, top_k: usize) -> Self {
        Self {
            experts,
            top_k,
            scores: Scores::Softmax,
            correction: None,
            groups: None,
            normalized: false,
            epsilon: 0.0,
            least_sum: 0.0,
            scale: 1.0,
            on_inputs: false,
        }
    }
}

/// What a router's scores are.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Scores {
    /// The softmax of the logits of all experts.
    Softmax,
    /// The sigmoid of each logit.
    Sigmoid,
    /// Experts are chosen one after the other, the largest logit first. The weight of each is its softmax over the logits
    /// that are left, but for those that are smaller by more than `tolerance` times the larger magnitude of the two
    /// (Phi-3.5-MoE's sparse mixer).
    Sparse {
        /// The relative difference from which on a logit does not count.
        tolerance: f32,
    },
}

/// A stored number for each expert, added to the scores that experts are chosen by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Correction {
    /// The module that it is stored in.
    pub module: &'static str,
    /// Its name there.
    pub tensor: &'static str,
    /// Whether it is stored as a matrix of one row.
    pub is_row: bool,
}

impl Correction {
    /// The shape that it is stored in.
    pub fn shape(self, experts: usize) -> Vec<usize> {
        if self.is_row { vec![1, experts] } else { vec![experts] }
    }
}

/// Experts in groups of equal size, of which only the best are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// How many groups there are; experts that belong together follow each other.
    pub count: usize,
    /// How many are looked at.
    pub chosen: usize,
    /// What a group is worth: the sum of this many of its largest scores.
    pub by_largest: usize,
}
