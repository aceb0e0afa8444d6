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
    /// Positions of a chunk, where a query sees those of its own chunk alone.
    pub chunk: Option<usize>,
    /// What products of queries and keys are multiplied by; `1 / √head_dim` without one.
    pub score_scale: Option<f32>,
    /// The bound `c` of scaled scores `s`, which become `c · tanh(s / c)` before the softmax.
    pub softcap: Option<f32>,
    /// The module that stores a sink of each query head, `sinks`, where there are such: a score that takes part in the
    /// softmax and has no value.
    pub sinks: Option<&'static str>,
    /// Whether scores fall with the distance of a key, by a slope of each head ([`slopes`](Self::slopes)).
    pub alibi: bool,
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
            chunk: None,
            score_scale: None,
            softcap: None,
            sinks: None,
            alibi: false,
        }
    }

    /// Query heads.
    pub fn heads(&self) -> usize {
        self.kv_heads * self.repeat
    }

    /// What each query head's score loses for every position between query and key (ALiBi): a geometric series down to
    /// 2⁻⁸ over as many heads as a power of two has, and for what heads are left every second term of the series of twice
    /// as many.
    pub fn slopes(&self) -> Vec<f32> {
        let heads = self.heads();
        let whole = 1 << heads.max(1).ilog2();
        let term = |of: usize, n: usize| (-8.0 * n as f64 / of as f64).exp2() as f32;
        let first = (1..=whole).map(|n| term(whole, n));
        first.chain((0..heads - whole.min(heads)).map(|n| term(2 * whole, 2 * n + 1))).collect()
    }

    /// What products of queries and keys are multiplied by.
    pub fn scale(&self) -> f32 {
        self.score_scale.unwrap_or_else(|| 1.0 / (self.head_dim as f32).sqrt())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_those_of_the_paper() {
        let eight = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625];
        assert_eq!(AttentionShape::new(8, 1, 16).slopes(), eight);
        assert_eq!(AttentionShape::new(1, 1, 16).slopes(), eight[7..]);
        // Of twice as many heads, the first, third and so on stand between those of eight.
        let twelve = AttentionShape::new(6, 2, 16).slopes();
        assert_eq!(twelve[..8], eight);
        for (slope, between) in
            twelve[8..].iter().zip([(1.0, 0.5), (0.5, 0.25), (0.25, 0.125), (0.125, 0.0625)])
        {
            let (above, below): (f32, f32) = between;
            approx::assert_relative_eq!(*slope, (above * below).sqrt(), max_relative = 1e-6);
        }
    }
}
