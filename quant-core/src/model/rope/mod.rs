//! Rotary position embedding: the rotated channels of a head, their angles, and the tables of a run.

mod config;
mod llama3;
mod rotate;
mod scaling;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use candle_core::{Device, Tensor};

pub use config::RopeRequest;
pub(crate) use llama3::restore_llama3;
pub use scaling::{LongRope, RopeScaling, Yarn};

use super::Segments;
use crate::{Error, Result};

/// A rotary position embedding.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Rope {
    /// Width of a head.
    pub head_dim: usize,
    /// Number of rotated channels, counted from the first one; even. The other channels are unchanged.
    pub rotary_dim: usize,
    /// The pairing of channels.
    pub layout: RopeLayout,
    /// Base of the frequencies.
    pub theta: f64,
    /// Change of the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// The pairs of channels that a rotation mixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RopeLayout {
    /// Channel `i` of the first half with channel `i` of the second (GPT-NeoX, Llama).
    Halves,
    /// Channels `2i` and `2i + 1` (GPT-J, GLM, Cohere).
    Interleaved,
}

impl Rope {
    /// Creates a rotation of whole heads, paired by halves, with unscaled frequencies.
    pub fn plain(head_dim: usize, theta: f64) -> Self {
        Self { head_dim, rotary_dim: head_dim, layout: RopeLayout::Halves, theta, scaling: RopeScaling::None }
    }

    /// Returns the divisor of each frequency in the shortest sequences.
    pub(crate) fn divisors(&self) -> Vec<f32> {
        self.scaling.divisors(self.theta, self.rotary_dim)
    }

    /// Returns the channel that a channel of a head is paired with; a channel that is not rotated is its own partner.
    pub fn partner(&self, channel: usize) -> usize {
        let half = self.rotary_dim / 2;
        match self.layout {
            _ if channel >= self.rotary_dim => channel,
            RopeLayout::Halves if channel < half => channel + half,
            RopeLayout::Halves => channel - half,
            RopeLayout::Interleaved => channel ^ 1,
        }
    }
}

/// Cosines and sines of consecutive positions, each `[positions, rotary_dim / 2]`.
#[derive(Debug, Clone)]
struct Angles {
    cos: Tensor,
    sin: Tensor,
}

impl Angles {
    fn new(rope: &Rope, length: usize, positions: usize) -> Result<Self> {
        let (frequencies, factor) = rope.scaling.frequencies(rope.theta, rope.rotary_dim, length);
        let angles = || (0..positions).flat_map(|p| frequencies.iter().map(move |f| p as f32 * f));
        let shape = (positions, rope.rotary_dim / 2);
        let table = |values: Vec<f32>| Tensor::from_vec(values, shape, &Device::Cpu);
        Ok(Self {
            cos: table(angles().map(|a| a.cos() * factor).collect())?,
            sin: table(angles().map(|a| a.sin() * factor).collect())?,
        })
    }

    fn rows(&self, start: usize, positions: usize) -> Result<Self> {
        Ok(Self { cos: self.cos.narrow(0, start, positions)?, sin: self.sin.narrow(0, start, positions)? })
    }
}

/// The angles of a rotary embedding at positions `0..positions`.
///
/// With some scalings, frequencies depend on the length of the whole sequence. Tokens that are appended to a cache are
/// rotated with the frequencies for the new length; as in transformers, cached keys are not updated.
#[derive(Debug, Clone)]
pub struct RopeTable {
    rope: Rope,
    positions: usize,
    short: Angles,
    /// Angles for longer sequences, if these share one set of frequencies.
    long: Option<Angles>,
}

/// The tables of all rotary embeddings of a model.
#[derive(Debug, Clone)]
pub struct RopeTables(Vec<Arc<RopeTable>>);

impl RopeTables {
    /// Creates tables for positions `0..positions`, one for each distinct rotation.
    ///
    /// # Errors
    /// When the tensors cannot be created.
    pub fn new<'a>(ropes: impl Iterator<Item = &'a Rope>, positions: usize) -> Result<Self> {
        let mut tables: Vec<Arc<RopeTable>> = Vec::new();
        for rope in ropes {
            if !tables.iter().any(|known| known.rope == *rope) {
                tables.push(Arc::new(RopeTable::new(rope.clone(), positions)?));
            }
        }
        Ok(Self(tables))
    }

    /// Returns the table of a rotation, if the model has it.
    pub fn get(&self, rope: &Rope) -> Option<&Arc<RopeTable>> {
        self.0.iter().find(|known| known.rope == *rope)
    }
}

impl RopeTable {
    /// Creates tables for positions `0..positions`.
    ///
    /// # Errors
    /// When the tensors cannot be created.
    pub fn new(rope: Rope, positions: usize) -> Result<Self> {
        let changes = rope.scaling.changes_above();
        let short = Angles::new(&rope, 0, changes.map_or(positions, |length| length.min(positions)))?;
        let long = match rope.scaling {
            RopeScaling::LongRope(_) if changes.is_some_and(|length| length < positions) => {
                Some(Angles::new(&rope, positions, positions)?)
            }
            _ => None,
        };
        Ok(Self { rope, positions, short, long })
    }

    /// Returns the number of positions that the tables cover.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// `start` is the position of the first of `positions` tokens; the last one ends the sequence.
    fn angles(&self, start: usize, positions: usize) -> Result<Angles> {
        let length = start + positions;
        if length > self.positions {
            return Err(Error::Internal(format!("{length} positions, but tables for {}", self.positions)));
        }
        match self.rope.scaling.changes_above() {
            Some(limit) if length > limit => match &self.long {
                Some(long) => long.rows(start, positions),
                None => Angles::new(&self.rope, length, length)?.rows(start, positions),
            },
            _ => self.short.rows(start, positions),
        }
    }

    /// Rotates every head of `x` `[batch, positions, heads · head_dim]`, whose first row is at position `start`.
    ///
    /// # Errors
    /// When the tables are too short.
    pub fn apply(&self, x: &Tensor, start: usize) -> Result<Tensor> {
        let angles = self.angles(start, x.dims3()?.1)?;
        rotate::rotate(x, &self.rope, &angles.cos, &angles.sin)
    }

    /// Rotates every head of `x`, with positions counted from the start of each segment.
    ///
    /// # Errors
    /// When the tables are too short, the segments do not match the batch, or they are [whole](Segments::whole)
    /// windows.
    pub fn apply_packed(&self, x: &Tensor, segments: Segments<'_>) -> Result<Tensor> {
        let (batch, positions, _) = x.dims3()?;
        let fits = segments.fit(batch, positions);
        let Some(places) = fits.then(|| segments.positions(positions)).flatten() else {
            return Err(Error::Internal(format!("segments do not fit {:?}", x.dims())));
        };
        let mut parts = (Vec::new(), Vec::new());
        for window in places.chunks(positions.max(1)) {
            let mut begin = 0;
            while begin < window.len() {
                let after = window[begin + 1..].iter().position(|&place| place == 0);
                let length = after.map_or(window.len() - begin, |next| next + 1);
                let angles = self.angles(0, length)?;
                parts.0.push(angles.cos);
                parts.1.push(angles.sin);
                begin += length;
            }
        }
        let shape = (batch, positions, self.rope.rotary_dim / 2);
        let (cos, sin) =
            (Tensor::cat(&parts.0, 0)?.reshape(shape)?, Tensor::cat(&parts.1, 0)?.reshape(shape)?);
        rotate::rotate(x, &self.rope, &cos, &sin)
    }
}
