//! Attentions whose queries and keys can be scaled against each other, and the parameters that the scales go into.

use super::{AttentionShape, BlockGraph, NodeId, Op};
use crate::model::rope::Rope;

/// An attention and the producers, norms and rotation of its queries and keys.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct QueryKey {
    /// The attention.
    pub attention: NodeId,
    /// The producers of queries and keys: linears, which may be the same one, or two head norms.
    pub producers: [NodeId; 2],
    /// The rows of the producers that are queries and keys.
    pub rows: [ProducerRows; 2],
    /// Query heads per key head.
    pub repeat: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// The rotary embedding of both, if there is one. Channels that it mixes must have the same scale.
    pub rope: Option<Rope>,
}

/// The rows of a producer that compute a value: `width` of every `period` rows, from row `start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProducerRows {
    /// The number of rows in a period.
    pub period: usize,
    /// The first of these rows in each period, counted from the start of the period.
    pub start: usize,
    /// The number of these rows in each period.
    pub width: usize,
    /// The number of all rows of the producer.
    pub all: usize,
}

impl ProducerRows {
    fn of_all(all: usize) -> Self {
        Self { period: all, start: 0, width: all, all }
    }

    /// Returns the row that computes a channel of the value.
    pub fn row(&self, channel: usize) -> usize {
        channel / self.width * self.period + self.start + channel % self.width
    }

    /// Returns the number of channels of the value.
    pub fn channels(&self) -> usize {
        self.all / self.period * self.width
    }
}

struct Made<'a> {
    producer: NodeId,
    rows: ProducerRows,
    rope: Option<&'a Rope>,
}

// Reasons why queries and keys of an attention cannot be scaled against each other.
const BY_BOTH: &str = "queries and keys are rotated differently";
const REUSED: &str = "something else reads the queries or keys too";
const ZERO_CENTERED: &str = "the norms of queries and keys store their weights minus 1";
const OF_HEADS: &str = "the norms of queries and keys have different weights for each head";
const WEIGHTLESS: &str = "queries and keys are normalized without weights";
const LATENT: &str = "queries or keys are computed from latent vectors or by another block";

impl BlockGraph {
    /// Returns every attention whose queries and keys can be scaled against each other.
    pub fn query_keys(&self) -> Vec<QueryKey> {
        self.all_query_keys().filter_map(Result::ok).collect()
    }

    /// Returns, for every attention whose queries and keys cannot be scaled against each other, the reason.
    pub fn unscaled_query_keys(&self) -> Vec<&'static str> {
        self.all_query_keys().filter_map(Result::err).collect()
    }

    fn all_query_keys(&self) -> impl Iterator<Item = Result<QueryKey, &'static str>> {
        self.nodes().iter().enumerate().filter_map(|(attention, node)| match node.op {
            Op::Attention(shape) => Some(self.query_key(attention, shape)),
            _ => None,
        })
    }

    fn query_key(&self, attention: NodeId, shape: AttentionShape) -> Result<QueryKey, &'static str> {
        let inputs = &self.nodes()[attention].inputs;
        let [queries, keys] = [self.made_by(inputs[0])?, self.made_by(inputs[1])?];
        let producers = [queries.producer, keys.producer];
        if queries.rope != keys.rope {
            return Err(BY_BOTH);
        }
        // Norms of queries and keys are scaled only if their stored weight can be multiplied exactly by powers of two.
        if producers.iter().any(|&id| self.nodes()[id].op.weight_offset() != 0.0) {
            return Err(ZERO_CENTERED);
        }
        let AttentionShape { repeat, head_dim, .. } = shape;
        let (rows, rope) = ([queries.rows, keys.rows], queries.rope.cloned());
        Ok(QueryKey { attention, producers, rows, repeat, head_dim, rope })
    }

    fn made_by(&self, value: NodeId) -> Result<Made<'_>, &'static str> {
        if self.users(value).count() != 1 {
            return Err(REUSED);
        }
        let node = &self.nodes()[value];
        let made = |all: usize| Ok(Made { producer: value, rows: ProducerRows::of_all(all), rope: None });
        match &node.op {
            Op::Rope(rope) => Ok(Made { rope: Some(rope), ..self.made_by(node.inputs[0])? }),
            // All channels of a token are multiplied by the same factor.
            Op::PositionScale(_) | Op::Scale(_) => self.made_by(node.inputs[0]),
            Op::Linear { shape: [all, _], .. } => made(*all),
            &Op::Slice { period, start, width } => self.made_by_rows(node.inputs[0], [period, start, width]),
            Op::ScaleBy { .. } => Err(OF_HEADS),
            Op::Normalize { .. } => Err(WEIGHTLESS),
            op => match op.stored_norm() {
                Some((_, width, _)) => made(width),
                None if op.is_norm() => Err(WEIGHTLESS),
                None => Err(LATENT),
            },
        }
    }

    fn made_by_rows(
        &self,
        producer: NodeId,
        [period, start, width]: [usize; 3],
    ) -> Result<Made<'_>, &'static str> {
        let Op::Linear { shape: [all, _], .. } = self.nodes()[producer].op else { return Err(LATENT) };
        let readers = self.users(producer).filter(|&(user, _)| match self.nodes()[user].op {
            Op::Slice { period: other, start: first, width: taken } if other == period => {
                first < start + width && start < first + taken
            }
            _ => true,
        });
        match readers.count() {
            1 => Ok(Made { producer, rows: ProducerRows { period, start, width, all }, rope: None }),
            _ => Err(REUSED),
        }
    }
}
