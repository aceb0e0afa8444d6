//! The shape of an attention.

/// The heads, window and score modifications of an attention.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct AttentionShape {
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Number of consecutive query heads that share a key head.
    pub repeat: usize,
    /// Width of a query or key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Number of positions that a query attends to, including its own; `None` means all positions up to its own.
    pub window: Option<usize>,
    /// Chunk length in positions, if a query attends only to its own chunk.
    pub chunk: Option<usize>,
    /// Factor of the query-key products; `None` means `1 / √head_dim`.
    pub score_scale: Option<f32>,
    /// Soft cap `c`: scaled scores `s` become `c · tanh(s / c)` before the softmax.
    pub softcap: Option<f32>,
    /// Module that stores the attention sinks (`sinks`, one per query head), if there are any. A sink is a score that
    /// takes part in the softmax but has no value.
    pub sinks: Option<&'static str>,
    /// Whether scores decrease with the distance to the key (ALiBi), with one slope per head
    /// ([`slopes`](Self::slopes)).
    pub alibi: bool,
}

impl AttentionShape {
    /// Creates attention to all positions up to the query's own, with the default score scale and values as wide as
    /// keys.
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

    /// Returns the number of query heads.
    pub fn heads(&self) -> usize {
        self.kv_heads * self.repeat
    }

    /// Returns the ALiBi slope of each query head: the amount subtracted from its scores per position between query and
    /// key. With `n` the largest power of two that is at most the number of heads, the first `n` slopes are `2^(-8i/n)`
    /// for `i` from 1 to `n`. The remaining heads get the first, third, fifth, … slope of a model with `2n` heads.
    pub fn slopes(&self) -> Vec<f32> {
        let heads = self.heads();
        let whole = 1 << heads.max(1).ilog2();
        let term = |of: usize, n: usize| (-8.0 * n as f64 / of as f64).exp2() as f32;
        let first = (1..=whole).map(|n| term(whole, n));
        first.chain((0..heads - whole.min(heads)).map(|n| term(2 * whole, 2 * n + 1))).collect()
    }

    /// Returns the factor of the query-key products.
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
