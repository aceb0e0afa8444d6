//! Measurements of a model and its reference at one position.

use serde::{Deserialize, Serialize};

use crate::journal::Measured;
use crate::vocabulary::Sums;

/// Measurements of two models at one position.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Position {
    pub(crate) reference_nll: f64,
    pub(crate) model_nll: f64,
    pub(crate) kl: f64,
    /// The reference's largest probability.
    pub(crate) confidence: f64,
    pub(crate) top1: bool,
    pub(crate) top5: f64,
    /// Of the reference from its disturbed copy, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) floor: Option<f64>,
}

impl Position {
    /// `noise` has the sums of the disturbed reference.
    pub(crate) fn new(reference: &Sums, model: &Sums, noise: Option<&Sums>) -> Self {
        let (r_top, m_top) = (reference.top(), model.top());
        let shared = r_top.iter().filter(|t| m_top.contains(t)).count();
        Self {
            reference_nll: reference.nll(),
            model_nll: model.nll(),
            kl: model.divergence_from(reference),
            confidence: reference.confidence(),
            top1: r_top.first() == m_top.first(),
            top5: shared as f64 / r_top.len().max(1) as f64,
            floor: noise.map(|noise| noise.divergence_from(reference)),
        }
    }

    pub(crate) fn delta_p(&self) -> f64 {
        (-self.model_nll).exp() - (-self.reference_nll).exp()
    }

    pub(crate) fn numbers(&self) -> impl Iterator<Item = f64> {
        [self.reference_nll, self.model_nll, self.kl].into_iter().chain(self.floor)
    }
}

impl Measured for Position {
    fn is_valid(&self) -> bool {
        let share = 0.0..=1.0 + 1e-6;
        self.reference_nll.is_valid()
            && self.model_nll.is_valid()
            && self.kl.is_valid()
            && share.contains(&self.confidence)
            && share.contains(&self.top5)
            && self.floor.is_none_or(|floor| floor.is_valid())
    }
}
