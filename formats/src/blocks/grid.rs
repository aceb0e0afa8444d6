//! The values that blocks of a type can represent, for the search in `refine`: the steps between values, the fields
//! that parts of a block share, and how the fields are packed.

use super::iq4::LEVELS;

pub(super) const MAX_CODES: usize = 256;
pub(super) const PARTS: usize = 16;

pub(super) struct Grid {
    pub(super) steps: Steps,
    pub(super) scales: Scales,
    /// Elements that share a factor, and a minimum if the type has one: a multiple of 8.
    pub(super) part: usize,
    /// The smallest and largest factor of a part; 1 and 1 for types with one scale per block.
    pub(super) factors: [i32; 2],
    /// Writes all bytes of a block.
    pub(super) pack: fn(&Fields, &mut [u8]),
}

/// The meaning of a part's factor.
#[derive(Clone, Copy)]
pub(super) enum Scales {
    /// The factor multiplies the block's scale `d`.
    Multiples,
    /// The factor is the code of the part's own scale; larger codes stand for larger scales. The block has no `d`.
    Own(fn(u8) -> f32),
}

/// The values of a part, with the `scale` that its factor gives.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Steps {
    /// `scale·(q − half)`, `q` below `2·half`.
    Even { half: i32 },
    /// `scale·(q − 1)`, `q` below 3.
    Ternary,
    /// `scale·T[q]`, with the levels of IQ4.
    Uneven,
    /// `scale·T[q]`, with `T` twice the values of E2M1.
    Fp4,
    /// `scale·q − dmin·minimum`, `q` up to `top`; minimums have the same range as factors.
    Minimum { top: i32 },
}

/// The fields of a block.
#[derive(Clone)]
pub(super) struct Fields {
    /// The scale, exact in half precision.
    pub(super) d: f32,
    /// The scale of the minimums, exact in half precision.
    pub(super) dmin: f32,
    /// One per part.
    pub(super) factors: [i32; PARTS],
    pub(super) minimums: [i32; PARTS],
    pub(super) codes: [u8; MAX_CODES],
}

impl Fields {
    pub(super) const ZERO: Self =
        Self { d: 0.0, dmin: 0.0, factors: [0; PARTS], minimums: [0; PARTS], codes: [0; MAX_CODES] };
}

impl Grid {
    /// The limits of the values for which the block's scale does not overflow half precision. Scales of parts, which are
    /// codes, do not overflow.
    pub(super) fn limits(&self) -> [f32; 2] {
        /// Half of the last interval beyond the largest finite number, from which on numbers are rounded to infinity.
        const OVERFLOW: f32 = 65520.0;
        if matches!(self.scales, Scales::Own(_)) {
            return [f32::NEG_INFINITY, f32::INFINITY];
        }
        let [low, high] = self.factors;
        let largest = OVERFLOW * low.abs().max(high.abs()) as f32;
        let level = match self.steps {
            Steps::Even { half } => half as f32,
            Steps::Ternary => 1.0,
            Steps::Uneven => -Uneven.ends()[0],
            Steps::Fp4 => Fp4.ends()[1],
            Steps::Minimum { top } => return [-largest, largest * top as f32],
        };
        [-largest * level, largest * level]
    }

    /// Scale and minimum of part `j` of a block, as decoding computes them.
    pub(super) fn part(&self, fields: &Fields, j: usize) -> [f32; 2] {
        let scale = match self.scales {
            Scales::Multiples => fields.d * fields.factors[j] as f32,
            Scales::Own(scale) => scale(fields.factors[j] as u8),
        };
        [scale, fields.dmin * fields.minimums[j] as f32]
    }

    /// Returns the nearest code for a value of a part with this scale and minimum, and its decoded value.
    #[inline(always)]
    pub(super) fn round(&self, [scale, minimum]: [f32; 2], x: f32) -> (u8, f32) {
        let inverse = if scale != 0.0 { 1.0 / scale } else { 0.0 };
        match self.steps {
            Steps::Even { half } => {
                let level = Even(half).level(x * inverse);
                ((level as i32 + half) as u8, scale * level)
            }
            Steps::Ternary => {
                let level = Ternary.level(x * inverse);
                ((level as i32 + 1) as u8, scale * level)
            }
            Steps::Uneven => {
                let level = Uneven.level(x * inverse);
                (Uneven::code(level), scale * level)
            }
            Steps::Fp4 => {
                // The inverse of the smallest scales would overflow.
                let level = Fp4.level(if scale != 0.0 { x / scale } else { 0.0 });
                (Fp4::code(level), scale * level)
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

/// The nearest integer in `0..=top`. NaN becomes 0.
#[inline(always)]
pub(super) fn code_above(value: f32, top: i32) -> f32 {
    nearest(within(value, 0.0, top as f32))
}

/// Limits a value to a range; NaN becomes `low`. `f32::max` and `f32::min` would take more instructions.
#[inline(always)]
fn within(value: f32, low: f32, high: f32) -> f32 {
    let value = if value > low { value } else { low };
    if value < high { value } else { high }
}

/// The levels of a grid without a minimum, in units of the scale.
pub(super) trait Levels: Copy {
    /// The level nearest to a value. NaN becomes the lowest, or a zero for E2M1.
    fn level(self, value: f32) -> f32;
    /// The lowest and the highest level.
    fn ends(self) -> [f32; 2];
    /// The approximate distance between levels.
    fn step(self) -> f32;
    /// The maximum by which the largest value may exceed the last level at the start of a search.
    fn beyond(self) -> f32 {
        (-0.4 * self.ends()[0]).min(5.0 * self.step())
    }
}

#[derive(Clone, Copy)]
pub(super) struct Even(pub(super) i32);

impl Levels for Even {
    #[inline(always)]
    fn level(self, value: f32) -> f32 {
        nearest(within(value, -self.0 as f32, (self.0 - 1) as f32))
    }

    fn ends(self) -> [f32; 2] {
        [-self.0 as f32, (self.0 - 1) as f32]
    }

    fn step(self) -> f32 {
        1.0
    }
}

#[derive(Clone, Copy)]
pub(super) struct Ternary;

impl Levels for Ternary {
    #[inline(always)]
    fn level(self, value: f32) -> f32 {
        nearest(within(value, -1.0, 1.0))
    }

    fn ends(self) -> [f32; 2] {
        [-1.0, 1.0]
    }

    fn step(self) -> f32 {
        1.0
    }

    // With many values per part, the best scale is near the middle of their magnitudes, far below the largest value.
    fn beyond(self) -> f32 {
        8.0
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
    fn code(level: f32) -> u8 {
        LEVELS.iter().position(|known| f32::from(*known) == level).unwrap_or_default() as u8
    }
}

#[derive(Clone, Copy)]
pub(super) struct Fp4;

const MAGNITUDES: [f32; 8] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0];

impl Levels for Fp4 {
    #[inline(always)]
    fn level(self, value: f32) -> f32 {
        let magnitude = value.abs();
        let mut level = 0.0;
        for k in 1..MAGNITUDES.len() {
            let (below, above) = (MAGNITUDES[k - 1], MAGNITUDES[k]);
            level += if magnitude > (below + above) / 2.0 { above - below } else { 0.0 };
        }
        level.copysign(value)
    }

    fn ends(self) -> [f32; 2] {
        [-12.0, 12.0]
    }

    fn step(self) -> f32 {
        2.0
    }
}

impl Fp4 {
    /// Zero has only one code, without a sign.
    fn code(level: f32) -> u8 {
        let magnitude = MAGNITUDES.iter().position(|known| *known == level.abs()).unwrap_or_default() as u8;
        magnitude | if level < 0.0 { 8 } else { 0 }
    }
}
