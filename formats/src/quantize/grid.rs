//! The arithmetic of all methods: the affine grid of one group of weights.
//!
//! A *group* is a run of one row's weights that share a scale. [`GridRule`] defines how a group's grid follows from the
//! weights' range, and [`Grid`] is the result. The definition is that of compressed-tensors; `b` is the number of bits
//! and every operation is in `f32`:
//!
//! | | symmetric | asymmetric |
//! |---|---|---|
//! | range | `a = max \|w\|` | `lo = min(0, min w)`, `hi = max(0, max w)` |
//! | scale | `s = round_to_dtype(a / ((2^b − 1) / 2))` | `s = round_to_dtype((hi − lo) / (2^b − 1))` |
//! | zero point | `z = 2^(b−1)` | `z = clamp(round(−lo / s), 0, 2^b − 1)` |
//! | code | `clamp(round(w / s) + z, 0, 2^b − 1)` | the same |
//! | value | `(code − z) · s` | the same |
//!
//! A grid of floating-point numbers is symmetric: `s = round_to_dtype(a / largest)`, `code = nearest(w / s)` and `value
//! = number(code) · s`, where `largest`, `nearest` and `number` are those of the [`FloatFormat`]. Power-of-two scales
//! (the MX formats) follow from the bits of `a`: for E4M3 the smallest with `a / s ≤ 448`, for E2M1 the exponent is
//! `⌊log₂ a⌋ − 2`, plus one if the mantissa of `a` is at least 1.75, as in compressed-tensors. For scales shared by
//! several rows, see `shared.rs`.
//!
//! `round` is to the nearest integer, half to even. The scale is rounded to its stored dtype *before* anything is
//! computed with it, so that codes match the stored scale. `w / s` is a true division: multiplying by `1 / s` would
//! change codes of weights on a boundary.
//!
//! # Edge cases
//!
//! * **All zeros**: `s = 1` (2⁻¹²⁷ in the MX formats), every code is `z`, every value exactly 0. Floating-point codes
//!   keep the sign of a zero. (compressed-tensors writes a different scale; the values are the same.)
//! * **A scale that rounds to 0** becomes the smallest positive value of its dtype: 2⁻²⁴ in F16, 2⁻¹³³ in BF16, 2⁻¹⁴⁹
//!   in F32. The grid is then coarser than the group requires, and weights below half of it become 0.
//! * **A scale in the subnormal range of its dtype** is rounded like any other. If it is rounded down, the largest
//!   weights saturate.
//! * **A scale or value that overflows** its dtype is an error ([`GridError::Overflow`]): an implementation that
//!   computes in that dtype would get infinity.
//! * **NaN and infinity** have no grid; [`Extent::of`] detects them.

use quant_kernels_cpu::e8m0_value;

use crate::checkpoint::Dtype;
use crate::scheme::{FloatFormat, Granularity, LinearScheme, ScaleFormat, WeightFormat};
use crate::{Error, Result};

/// `1.5 · 2²³`. Between 2²³ and 2²⁴ adjacent `f32` values are 1 apart, so for `|x| ≤ 2²²` the addition `x + MAGIC`
/// itself rounds, half to even, and the integer is in the low bits of the sum.
///
/// Baseline x86-64 has no rounding instruction, so `round_ties_even` would be a function call per weight.
const MAGIC: f32 = 12_582_912.0;

const LANES: usize = 16;

/// Rounds `x` to an integer with [`MAGIC`], half to even, for `|x| ≤ 2²²`.
#[inline(always)]
pub(super) fn round_even(x: f32) -> f32 {
    (x + MAGIC) - MAGIC
}

#[inline(always)]
fn lesser(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}

#[inline(always)]
fn greater(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// The number of steps from 0 to `w`, clamped to integers but not rounded. Clamping first gives the same result, and
/// keeps [`MAGIC`] in its range.
#[inline(always)]
fn steps(w: f32, scale: f32, (low, high): (f32, f32)) -> f32 {
    lesser(greater(w / scale, low), high)
}

/// The integer number of steps of `scale` from 0 to `w`, within the [limits](Grid::limits) of a grid: equivalent to
/// [`Grid::code`].
#[inline(always)]
pub fn nearest(w: f32, scale: f32, limits: (f32, f32)) -> f32 {
    round_even(steps(w, scale, limits))
}

/// The range of a group, extended to include 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Extent {
    /// The smallest weight, or 0.
    pub min: f32,
    /// The largest weight, or 0.
    pub max: f32,
}

impl Extent {
    /// Returns the range of these weights, or `None` if one is NaN or infinite.
    #[inline(always)]
    pub fn of(weights: &[f32]) -> Option<Self> {
        // Comparisons take one instruction, unlike `f32::min`, but do not propagate NaN. NaN and infinity times 0 are
        // NaN, and so is the sum.
        let (mut min, mut max, mut check) = ([0f32; LANES], [0f32; LANES], [0f32; LANES]);
        let mut step = |i: usize, w: f32| {
            min[i] = lesser(w, min[i]);
            max[i] = greater(w, max[i]);
            check[i] += w * 0.0;
        };
        let (chunks, rest) = weights.as_chunks::<LANES>();
        for chunk in chunks {
            for (i, &w) in chunk.iter().enumerate() {
                step(i, w);
            }
        }
        for (i, &w) in rest.iter().enumerate() {
            step(i, w);
        }
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                min[i] = lesser(min[i + half], min[i]);
                max[i] = greater(max[i + half], max[i]);
                check[i] += check[i + half];
            }
            half /= 2;
        }
        (check[0] == 0.0).then_some(Self { min: min[0], max: max[0] })
    }

    /// The largest magnitude.
    pub fn abs_max(self) -> f32 {
        self.max.max(-self.min)
    }
}

/// The reason why a group has no grid.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GridError {
    /// A weight is NaN or infinite.
    #[error("weights are NaN or infinite")]
    NonFinite,
    /// The scale, or a weight rounded to the grid, overflows the dtype of the scale.
    #[error(
        "weights from {} to {} need a scale of {exact}, but this scale, or a multiple of it, exceeds the \
        range of {dtype}",
        extent.min, extent.max
    )]
    Overflow {
        /// The weights' range.
        extent: Extent,
        /// The scale before rounding.
        exact: f32,
        /// The dtype of the stored scale.
        dtype: Dtype,
    },
}

/// Determines grids from ranges: bits, symmetry, and the dtype of stored scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GridRule {
    pub(super) max_code: u8,
    pub(super) symmetric: bool,
    pub(super) progressive: bool,
    pub(super) float: Option<FloatFormat>,
    scale_dtype: Dtype,
    powers_of_two: bool,
}

impl GridRule {
    /// Whether groups have integer scales relative to int8 values, with a float scale per row.
    #[inline]
    pub fn is_progressive(self) -> bool {
        self.progressive
    }

    /// The format of the codes, if they are floating-point numbers.
    #[inline]
    pub fn float_format(self) -> Option<FloatFormat> {
        self.float
    }

    /// Creates the rule of a scheme with integers of 2 to 8 bits or floating-point numbers, and scales in F16, BF16 or
    /// F32, or in the format that the scheme prescribes.
    ///
    /// # Errors
    /// [`Error::Usage`] for other bits or scale formats, and for progressive scales unless they are those of 4-bit
    /// groups.
    pub fn new(scheme: LinearScheme, scale: ScaleFormat) -> Result<Self> {
        let bits = scheme.bits();
        if !(2..=8).contains(&bits) {
            return Err(Error::usage(
                format!("{bits}-bit weights are not supported"),
                format!("supported numbers of bits: {:?}", WeightFormat::INT_BITS),
            ));
        }
        let progressive = scheme.is_progressive();
        if progressive && (bits != 4 || scheme.granularity == Granularity::Channel) {
            return Err(Error::usage(
                format!("{scheme} is not supported"),
                "progressive scales require 4-bit weights in groups",
            ));
        }
        let is_wide = matches!(scale, ScaleFormat::F16 | ScaleFormat::Bf16 | ScaleFormat::F32);
        if scheme.fixed_scales().map_or(!is_wide, |fixed| fixed != scale) {
            return Err(Error::usage(
                format!("{scheme} does not support {} scales", scale.dtype()),
                match scheme.fixed_scales() {
                    Some(fixed) => format!("store scales as {}", fixed.dtype()),
                    None => "store scales as F16, BF16 or F32".to_owned(),
                },
            ));
        }
        Ok(Self {
            max_code: scheme.max_code(),
            symmetric: scheme.is_symmetric(),
            progressive,
            float: scheme.float_format(),
            // With a global scale, the stored dtype does not limit scales.
            scale_dtype: if is_wide { scale.dtype() } else { Dtype::F32 },
            powers_of_two: scale == ScaleFormat::E8m0,
        })
    }

    /// The largest code.
    pub fn max_code(self) -> u8 {
        self.max_code
    }

    /// Returns the grid for weights of this range.
    ///
    /// # Errors
    /// [`GridError::Overflow`] when the scale dtype cannot represent the scale or the grid's values;
    /// [`GridError::NonFinite`] when the range itself is not finite.
    pub fn fit(self, extent: Extent) -> Result<Grid, GridError> {
        if !(extent.min.is_finite() && extent.max.is_finite()) {
            return Err(GridError::NonFinite);
        }
        if let Some(format) = self.float {
            return self.fit_float(extent, format);
        }
        let zero_point = self.max_code / 2 + 1;
        let grid = |scale, zero| Grid::of_integers(scale, zero, (0, self.max_code));
        if extent.abs_max() == 0.0 {
            return Ok(grid(1.0, if self.symmetric { zero_point } else { 0 }));
        }
        let exact = if self.symmetric {
            extent.abs_max() / (f32::from(self.max_code) / 2.0)
        } else {
            (extent.max - extent.min) / f32::from(self.max_code)
        };
        let scale = self.scale(exact, extent)?;
        let zero = if self.symmetric {
            zero_point
        } else {
            round_even(lesser(-extent.min / scale, f32::from(self.max_code))) as u8
        };
        let grid = grid(scale, zero);
        self.holding(grid, f32::from(self.max_code), exact, extent)
    }

    fn fit_float(self, extent: Extent, format: FloatFormat) -> Result<Grid, GridError> {
        let grid = |scale| self.at_scale(scale);
        if self.powers_of_two {
            return Ok(grid(power_of_two(extent.abs_max(), format)));
        }
        if extent.abs_max() == 0.0 {
            return Ok(grid(1.0));
        }
        let exact = extent.abs_max() / format.largest();
        let scale = self.scale(exact, extent)?;
        self.holding(grid(scale), format.largest(), exact, extent)
    }

    #[inline(always)]
    pub(super) fn at_scale(self, scale: f32) -> Grid {
        match self.float {
            Some(format) => {
                Grid { scale, limits: (-format.largest(), format.largest()), zero: 0, float: Some(format) }
            }
            None => Grid::of_integers(scale, 0, (0, self.max_code)),
        }
    }

    /// Returns the grid for weights from `−amax` to `amax`.
    ///
    /// # Errors
    /// See [`fit`](Self::fit).
    pub(super) fn fit_amax(self, amax: f32) -> Result<Grid, GridError> {
        self.fit(Extent { min: -amax, max: amax })
    }

    #[inline(always)]
    fn scale(self, exact: f32, extent: Extent) -> Result<f32, GridError> {
        match self.scale_dtype.round(exact) {
            0.0 => Ok(smallest_positive(self.scale_dtype)),
            s if s.is_finite() => Ok(s),
            _ => Err(GridError::Overflow { extent, exact, dtype: self.scale_dtype }),
        }
    }

    /// Returns the grid if the dtype of its scale can represent the rounded weights of this range. `furthest` is the
    /// largest magnitude of a grid value, in units of the scale.
    #[inline(always)]
    fn holding(self, grid: Grid, furthest: f32, exact: f32, extent: Extent) -> Result<Grid, GridError> {
        if grid.scale * furthest <= largest(self.scale_dtype) {
            return Ok(grid);
        }
        // Rounding is monotone, so the ends of the range decide.
        let holds = |w| self.scale_dtype.round(grid.value(grid.code(w))).is_finite();
        match holds(extent.min) && holds(extent.max) {
            true => Ok(grid),
            false => Err(GridError::Overflow { extent, exact, dtype: self.scale_dtype }),
        }
    }
}

/// The scale of a group of an MX format with largest magnitude `amax`: a power of two, at least 2⁻¹²⁷.
pub(super) fn power_of_two(amax: f32, format: FloatFormat) -> f32 {
    let exponent = match format {
        FloatFormat::E4m3 => (amax.to_bits() + ROUND_UP_BEYOND_1_75) >> 23,
        _ => (amax.to_bits() + ROUND_UP_FROM_1_75) >> 23,
    };
    let largest = (format.largest().to_bits() >> 23) as i32 - 127;
    e8m0_value((exponent as i32 - largest).clamp(0, 254) as u8)
}

/// Addend that increments the exponent of an f32 whose mantissa is at least 1.75.
pub(super) const ROUND_UP_FROM_1_75: u32 = 1 << 21;
/// Addend that increments the exponent of an f32 whose mantissa is greater than 1.75: 448 is 1.75 · 2⁸.
const ROUND_UP_BEYOND_1_75: u32 = (1 << 21) - 1;

/// The smallest positive value of a scale dtype.
pub(super) fn smallest_positive(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => half::f16::from_bits(1).to_f32(),
        Dtype::Bf16 => half::bf16::from_bits(1).to_f32(),
        _ => f32::from_bits(1),
    }
}

/// The largest finite value of a scale dtype.
fn largest(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => half::f16::MAX.to_f32(),
        Dtype::Bf16 => half::bf16::MAX.to_f32(),
        _ => f32::MAX,
    }
}

/// Calls a function with the format as a constant, so that its loop is vectorized for this format.
macro_rules! each_format {
    ($format:expr, $function:ident($($argument:expr),*)) => {
        match $format {
            FloatFormat::E4m3 => $function(FloatFormat::E4m3, $($argument),*),
            FloatFormat::E2m1 => $function(FloatFormat::E2m1, $($argument),*),
            other => $function(other, $($argument),*),
        }
    };
}

/// The grid of one group: `value = (code − zero) · scale`. In a progressive group, codes are limited to those to which
/// a value within the protective range can round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Grid {
    scale: f32,
    /// The lowest and the highest value, in units of the scale.
    limits: (f32, f32),
    zero: u8,
    /// The format of the codes, if they are floating-point numbers; then `value = number(code) · scale`.
    float: Option<FloatFormat>,
}

impl Grid {
    /// A grid of integers whose codes are in the given range.
    #[inline(always)]
    pub(super) fn of_integers(scale: f32, zero: u8, (lowest, highest): (u8, u8)) -> Self {
        let steps = |code: u8| f32::from(code) - f32::from(zero);
        Self { scale, limits: (steps(lowest), steps(highest)), zero, float: None }
    }

    /// The factor from a code's number to its value; positive.
    pub fn scale(self) -> f32 {
        self.scale
    }

    /// The code of the value 0, for integers; 0 for floating-point numbers, which have no zero point.
    pub fn zero(self) -> u8 {
        self.zero
    }

    /// The lowest and the highest value, in units of the scale.
    #[inline(always)]
    pub fn limits(self) -> (f32, f32) {
        self.limits
    }

    #[inline(always)]
    fn steps(self, w: f32, limits: (f32, f32)) -> f32 {
        steps(w, self.scale, limits)
    }

    /// Returns the code nearest to a weight. This defines the results of `encode` and `nearest`. For integers, NaN and
    /// infinity get the lowest or highest code.
    pub fn code(self, w: f32) -> u8 {
        if let Some(format) = self.float {
            return format.code(w / self.scale);
        }
        (round_even(self.steps(w, self.limits())) as i32 + i32::from(self.zero)) as u8
    }

    /// Returns the value of a code.
    #[inline(always)]
    pub fn value(self, code: u8) -> f32 {
        if let Some(format) = self.float {
            return format.value(code) * self.scale;
        }
        (i32::from(code) - i32::from(self.zero)) as f32 * self.scale
    }

    /// Writes the codes of weights: [`code`](Self::code) of each, vectorized.
    ///
    /// Stops at the end of the shorter slice.
    #[inline(always)]
    pub fn encode(self, weights: &[f32], codes: &mut [u8]) {
        if let Some(format) = self.float {
            return each_format!(format, encode_floats(weights, self.scale, codes));
        }
        let limits = self.limits();
        for (code, &w) in codes.iter_mut().zip(weights) {
            // The low byte of the sum is the number of steps modulo 256.
            *code = ((self.steps(w, limits) + MAGIC).to_bits() as u8).wrapping_add(self.zero);
        }
    }

    /// Writes the codes of weights and the values of these codes, as [`encode`](Self::encode) and
    /// [`decode`](Self::decode) do.
    #[inline(always)]
    pub(super) fn quantize(self, weights: &[f32], codes: &mut [u8], values: &mut [f32]) {
        self.encode(weights, codes);
        match self.float {
            // Rounding takes fewer instructions than looking up the values of codes.
            Some(format) => each_format!(format, round_floats(weights, self.scale, values)),
            None => self.decode(codes, values),
        }
    }

    /// Writes the values of codes: [`value`](Self::value) of each, vectorized.
    ///
    /// Stops at the end of the shorter slice.
    #[inline(always)]
    pub fn decode(self, codes: &[u8], values: &mut [f32]) {
        if let Some(format) = self.float {
            let numbers = format.values();
            for (value, &code) in values.iter_mut().zip(codes) {
                *value = numbers[usize::from(code)] * self.scale;
            }
            return;
        }
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = (i32::from(code) - i32::from(self.zero)) as f32 * self.scale;
        }
    }

    /// The squared error of weights rounded to a grid of floating-point numbers.
    #[inline(always)]
    pub(super) fn squared_error(self, weights: &[f32]) -> f64 {
        let Some(format) = self.float else { return f64::INFINITY };
        let mut sum = 0.0;
        for &w in weights {
            let error = f64::from(w - format.round(w / self.scale) * self.scale);
            sum += error * error;
        }
        sum
    }

    /// Replaces every weight by the value of its code.
    #[inline(always)]
    pub fn fake_quantize(self, weights: &mut [f32]) {
        if let Some(format) = self.float {
            for w in weights {
                *w = format.round(*w / self.scale) * self.scale;
            }
            return;
        }
        let limits = self.limits();
        for w in weights {
            *w = round_even(self.steps(*w, limits)) * self.scale;
        }
    }
}

#[inline(always)]
fn encode_floats(format: FloatFormat, weights: &[f32], scale: f32, codes: &mut [u8]) {
    for (code, &w) in codes.iter_mut().zip(weights) {
        *code = format.code(w / scale);
    }
}

#[inline(always)]
fn round_floats(format: FloatFormat, weights: &[f32], scale: f32, values: &mut [f32]) {
    for (value, &w) in values.iter_mut().zip(weights) {
        *value = format.round(w / scale) * scale;
    }
}

/// Clamps weights to `[−bound, bound]`. An infinite bound changes nothing.
#[inline(always)]
pub fn clip(weights: &mut [f32], bound: f32) {
    for w in weights {
        let v = if *w > bound { bound } else { *w };
        *w = if v < -bound { -bound } else { v };
    }
}

#[cfg(test)]
#[path = "grid_tests.rs"]
mod tests;
