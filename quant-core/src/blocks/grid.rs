//! What blocks of a type can hold, for searches that are not the reference's: the steps between its values, what its
//! parts share, and how the fields become bytes.

use super::iq4::LEVELS;

/// Elements of a block, at most, and its parts.
pub(super) const MOST: usize = 256;
pub(super) const PARTS: usize = 16;

/// The grid of a block type.
pub(super) struct Grid {
    pub(super) steps: Steps,
    /// Elements that share a factor, and a minimum if there is one: a multiple of 8.
    pub(super) part: usize,
    /// The smallest and largest factor of a part; 1 and 1 where a block has one scale.
    pub(super) factors: [i32; 2],
    /// Writes all bytes of a block.
    pub(super) pack: fn(&Fields, &mut [u8]),
}

/// The values of a part.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Steps {
    /// `d·factor·(q − half)`, `q` below `2·half`.
    Even { half: i32 },
    /// `d·factor·T[q]`, of IQ4.
    Uneven,
    /// `d·factor·q − dmin·minimum`, `q` up to `top`; minimums have the range of factors.
    Minimum { top: i32 },
}

/// What a block stores.
#[derive(Clone)]
pub(super) struct Fields {
    /// The scale, exact in half precision.
    pub(super) d: f32,
    /// The scale of minimums, likewise.
    pub(super) dmin: f32,
    /// Of each part.
    pub(super) factors: [i32; PARTS],
    pub(super) minimums: [i32; PARTS],
    /// Of each element.
    pub(super) codes: [u8; MOST],
}

impl Fields {
    pub(super) const ZERO: Self =
        Self { d: 0.0, dmin: 0.0, factors: [0; PARTS], minimums: [0; PARTS], codes: [0; MOST] };

    /// Scale and minimum of a part, as decoding has them.
    pub(super) fn part(&self, j: usize) -> [f32; 2] {
        [self.d * self.factors[j] as f32, self.dmin * self.minimums[j] as f32]
    }
}

impl Grid {
    /// The nearest code for a value of a part with this scale and minimum, and what it stands for.
    #[inline(always)]
    pub(super) fn round(&self, [scale, minimum]: [f32; 2], x: f32) -> (u8, f32) {
        // Of a part without a scale all codes stand for the same.
        let inverse = if scale != 0.0 { 1.0 / scale } else { 0.0 };
        match self.steps {
            Steps::Even { half } => {
                let level = Even(half).level(x * inverse);
                ((level as i32 + half) as u8, scale * level)
            }
            Steps::Uneven => {
                let level = Uneven.level(x * inverse);
                (Uneven::code(level), scale * level)
            }
            Steps::Minimum { top } => {
                let code = code_above((x + minimum) * inverse, top);
                (code as u8, scale * code - minimum)
            }
        }
    }
}

/// Rounds to the nearest integer, half to even, for magnitudes below 2²².
#[inline(always)]
pub(super) fn nearest(value: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    value + SHIFT - SHIFT
}

/// The nearest integer of `0..=top`. What is no number becomes 0.
#[inline(always)]
pub(super) fn code_above(value: f32, top: i32) -> f32 {
    nearest(value.max(0.0).min(top as f32))
}

/// Rounding to the levels of a symmetric grid.
pub(super) trait Levels: Copy {
    /// The level that is nearest to a value. What is no number becomes the lowest.
    fn level(self, value: f32) -> f32;
    /// The lowest and the highest level.
    fn ends(self) -> [f32; 2];
    /// About how far levels are apart.
    fn step(self) -> f32;
}

#[derive(Clone, Copy)]
pub(super) struct Even(pub(super) i32);

impl Levels for Even {
    #[inline(always)]
    fn level(self, value: f32) -> f32 {
        nearest(value.max(-self.0 as f32).min((self.0 - 1) as f32))
    }

    fn ends(self) -> [f32; 2] {
        [-self.0 as f32, (self.0 - 1) as f32]
    }

    fn step(self) -> f32 {
        1.0
    }
}

#[derive(Clone, Copy)]
pub(super) struct Uneven;

impl Levels for Uneven {
    #[inline(always)]
    fn level(self, value: f32) -> f32 {
        let mut level = f32::from(LEVELS[0]);
        for k in 1..LEVELS.len() {
            let (below, above) = (f32::from(LEVELS[k - 1]), f32::from(LEVELS[k]));
            level += if value > (below + above) / 2.0 { above - below } else { 0.0 };
        }
        level
    }

    fn ends(self) -> [f32; 2] {
        [f32::from(LEVELS[0]), f32::from(LEVELS[15])]
    }

    fn step(self) -> f32 {
        16.0
    }
}

impl Uneven {
    /// The code of a level.
    fn code(level: f32) -> u8 {
        LEVELS.iter().position(|known| f32::from(*known) == level).unwrap_or_default() as u8
    }
}
