//! The heads of an attention.

/// The heads of an attention, how far it sees, and how it scales its scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Key and value heads.
    pub kv_heads: usize,
    /// Consecutive query heads that share a key head.
    pub repeat: usize,
    /// Width of a query's or key's head.
    pub head_dim: usize,
    /// Width of a value's head.
    pub value_dim: usize,
    /// Positions that a query sees, its own included; all before it without one.
    pub window: Option<usize>,
    /// What products of queries and keys are multiplied by; `1 / √head_dim` without one.
    pub score_scale: Option<f32>,
    /// The bound `c` of scaled scores `s`, which become `c · tanh(s / c)` before the softmax.
    pub softcap: Option<f32>,
    /// The module that stores a sink of each query head, `sinks`, where there are such: a score that takes part in the
    /// softmax and has no value.
    pub sinks: Option<&'static str>,
}

impl AttentionShape {
    /// Attention to all positions, with scores scaled by `1 / √head_dim` and values as wide as keys.
    pub fn new(kv_heads: usize, repeat: usize, head_dim: usize) -> Self {
        Self {
            kv_heads,
            repeat,
            head_dim,
            value_dim: head_dim,
            window: None,
            score_scale: None,
            softcap: None,
            sinks: None,
        }
    }

    /// Query heads.
    pub fn heads(&self) -> usize {
        self.kv_heads * self.repeat
    }

    /// What products of queries and keys are multiplied by.
    pub fn scale(&self) -> f32 {
        self.score_scale.unwrap_or_else(|| 1.0 / (self.head_dim as f32).sqrt())
    }
}
