//! Quantized weights as plain slices: the input of packing and of the reference kernels.

use std::ops::Range;

use half::f16;

use crate::layout::{STEP, SUPER_BLOCK, unit_of};
use crate::{FloatFormat, KernelError};

/// The reason why slices do not form a [`WeightView`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum ViewError {
    #[error("bits must be from 2 to 8, got {0}")]
    Bits(u8),
    #[error("the group size must divide the number of input features, {k}, got {group_size}")]
    GroupSize { group_size: usize, k: usize },
    #[error(
        "progressive and super-block scales require integer codes, and E4M3 scales floating-point codes; super-blocks \
        have no zero points, and fixed combinations of bits, minima and group size"
    )]
    Scales,
    #[error("super-blocks require a number of input features that is a multiple of {SUPER_BLOCK}, got {k}")]
    SuperBlocks { k: usize },
    #[error("{what}: expected {expected} elements, got {got}")]
    Length { what: &'static str, expected: usize, got: usize },
    #[error("{0}: the number of elements of this shape overflows")]
    TooLarge(&'static str),
}

/// A quantized weight matrix `[n, k]` in logical order, row-major, as plain slices.
///
/// `ŵ[o, i] = (codes[o, i] − zeros[o, i / group_size]) · scales[o, i / group_size]`, with unsigned codes below
/// `2^bits`. Without `zeros` the grid is symmetric: every zero point is `2^(bits − 1)`, or 0 for super-blocks that have
/// minima.
///
/// Progressive quantization (QServe, §4.1) has two levels of scales, an integer per group and a float per row:
/// `ŵ[o, i] = ((codes[o, i] − zeros[…]) · groups[…]) · channels[o]`, where the inner product is exact.
///
/// The super-blocks of GGUF's K types have two levels of scales as well, and may have two levels of minima:
/// `ŵ[o, i] = (blocks[…] · groups[…]) · (codes[o, i] − zero) − min_blocks[…] · min_groups[…]`, see [`SuperScales`].
///
/// Codes may also be those of a [`FloatFormat`]: `ŵ[o, i] = value(codes[o, i]) · scales[o, i / group_size]`, without
/// zero points. In NVFP4 the group scales are E4M3 codes, divided by one global `f32` scale.
///
/// ```
/// use quant_kernels_cpu::WeightView;
///
/// // [1, 4] in groups of two, with zeros: (3 - 1) * 0.5, (1 - 1) * 0.5, (0 - 2) * 2, (2 - 2) * 2.
/// let view = WeightView::new([1, 4], 2, 2, &[3, 1, 0, 2], &[0.5, 2.0], Some(&[1, 2]))?;
/// let mut floats = [0.0; 4];
/// quant_kernels_cpu::reference::dequantize_rows(&view, 0..1, &mut floats);
/// assert_eq!(floats, [1.0, 0.0, -4.0, 0.0]);
///
/// // A group size that does not divide the number of input features is an error.
/// assert!(WeightView::new([1, 4], 2, 3, &[3, 1, 0, 2], &[0.5, 2.0], None).is_err());
/// # Ok::<(), quant_kernels_cpu::ViewError>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct WeightView<'a> {
    n: usize,
    k: usize,
    bits: u8,
    group_size: usize,
    codes: &'a [u8],
    scales: Scales<'a>,
    zeros: Option<&'a [u8]>,
    float: Option<FloatFormat>,
}

/// The scales of a [`WeightView`].
#[derive(Debug, Clone, Copy)]
pub enum Scales<'a> {
    /// `[n, k / group_size]`
    Float(&'a [f32]),
    /// Two levels of scales.
    Progressive {
        /// `[n, k / group_size]`
        groups: &'a [u8],
        /// `[n]`
        channels: &'a [f32],
    },
    /// NVFP4: the scale is `value(groups[…]) / global`, rounded to `f32`. Only for floating-point codes.
    E4m3 {
        /// `[n, k / group_size]`, E4M3 codes without a sign
        groups: &'a [u8],
        /// The divisor of all scales: positive and finite.
        global: f32,
    },
    /// An integer per group, and a float per super-block.
    Super(SuperScales<'a>),
}

/// The scales of super-blocks: 256 input features share a float, and each group in them has an integer. These are
/// GGUF's Q4_K and Q5_K, which have minima, and Q6_K, which has none.
///
/// Codes of 2 to 5 bits have minima, and a zero point of 0; codes of 6 bits have none, and a zero point of 32. Codes of
/// [`FloatFormat::Iq4`] have neither. The group size divides 256 and is a multiple of 8; of 16 for codes of 6 bits, and
/// of 32 for codes of 5.
///
/// ```
/// use half::f16;
/// use quant_kernels_cpu::{Scales, SuperMins, SuperScales, WeightView};
///
/// // Groups of 32 with the scale 0.5 · 3 and the minimum 0.25 · 2.
/// let mins = SuperMins { groups: &[2; 8], blocks: &[f16::from_f32(0.25)] };
/// let scales = SuperScales { groups: &[3; 8], blocks: &[f16::from_f32(0.5)], mins: Some(mins) };
/// let view = WeightView::with_scales([1, 256], 4, 32, &[5; 256], Scales::Super(scales), None)?;
/// let mut floats = [0.0; 256];
/// quant_kernels_cpu::reference::dequantize_rows(&view, 0..1, &mut floats);
/// assert_eq!(floats, [7.0; 256]); // 1.5 · 5 − 0.5
/// # Ok::<(), quant_kernels_cpu::ViewError>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct SuperScales<'a> {
    /// `[n, k / group_size]`
    pub groups: &'a [i8],
    /// `[n, k / 256]`
    pub blocks: &'a [f16],
    /// The minima, which are subtracted from every weight of a group; `None` for integer codes of 6 bits and for IQ4.
    pub mins: Option<SuperMins<'a>>,
}

/// The minima of super-blocks.
#[derive(Debug, Clone, Copy)]
pub struct SuperMins<'a> {
    /// `[n, k / group_size]`
    pub groups: &'a [u8],
    /// `[n, k / 256]`
    pub blocks: &'a [f16],
}

impl<'a> SuperScales<'a> {
    fn rows(self, rows: Range<usize>, groups: usize, blocks: usize) -> Self {
        let of_groups = rows.start * groups..rows.end * groups;
        let of_blocks = rows.start * blocks..rows.end * blocks;
        let mins = self.mins.map(|mins| SuperMins {
            groups: &mins.groups[of_groups.clone()],
            blocks: &mins.blocks[of_blocks.clone()],
        });
        Self { groups: &self.groups[of_groups], blocks: &self.blocks[of_blocks], mins }
    }
}

impl<'a> WeightView<'a> {
    /// Creates a view and checks that the slices match.
    ///
    /// * `codes`: `[n, k]`, one code per byte
    /// * `scales`, `zeros`: `[n, k / group_size]`; per channel means `group_size == k`
    ///
    /// # Errors
    /// When a length, the group size or the bit width is wrong. Values are checked when they are packed.
    pub fn new(
        [n, k]: [usize; 2],
        bits: u8,
        group_size: usize,
        codes: &'a [u8],
        scales: &'a [f32],
        zeros: Option<&'a [u8]>,
    ) -> Result<Self, ViewError> {
        Self::with_scales([n, k], bits, group_size, codes, Scales::Float(scales), zeros)
    }

    /// Creates a view of a matrix with floating-point codes.
    ///
    /// # Errors
    /// See [`new`](Self::new).
    pub fn float(
        shape: [usize; 2],
        format: FloatFormat,
        group_size: usize,
        codes: &'a [u8],
        scales: &'a [f32],
    ) -> Result<Self, ViewError> {
        Self::float_with_scales(shape, format, group_size, codes, Scales::Float(scales))
    }

    /// Creates a view of a matrix with floating-point codes and any scales that these support.
    ///
    /// # Errors
    /// See [`new`](Self::new); also when the scales are progressive; when they are those of super-blocks, except for
    /// IQ4 without minima; or when they are E4M3 codes for IQ4.
    pub fn float_with_scales(
        shape: [usize; 2],
        format: FloatFormat,
        group_size: usize,
        codes: &'a [u8],
        scales: Scales<'a>,
    ) -> Result<Self, ViewError> {
        match (scales, format) {
            (Scales::Progressive { .. }, _) | (Scales::E4m3 { .. }, FloatFormat::Iq4) => {
                return Err(ViewError::Scales);
            }
            (Scales::Super(_), FloatFormat::E4m3 | FloatFormat::E2m1) => return Err(ViewError::Scales),
            _ => {}
        }
        Self::checked(shape, format.bits(), group_size, codes, scales, None, Some(format))
    }

    /// Creates a view of a matrix with integer codes and any scales that these support.
    ///
    /// # Errors
    /// See [`new`](Self::new); also when the scales are E4M3 codes. For super-blocks also when `k` is not a multiple of
    /// 256, zero points are given, or [`SuperScales`] does not allow the bits, minima and group size together.
    pub fn with_scales(
        [n, k]: [usize; 2],
        bits: u8,
        group_size: usize,
        codes: &'a [u8],
        scales: Scales<'a>,
        zeros: Option<&'a [u8]>,
    ) -> Result<Self, ViewError> {
        if let Scales::E4m3 { .. } = scales {
            return Err(ViewError::Scales);
        }
        Self::checked([n, k], bits, group_size, codes, scales, zeros, None)
    }

    fn checked(
        [n, k]: [usize; 2],
        bits: u8,
        group_size: usize,
        codes: &'a [u8],
        scales: Scales<'a>,
        zeros: Option<&'a [u8]>,
        float: Option<FloatFormat>,
    ) -> Result<Self, ViewError> {
        if !(2..=8).contains(&bits) {
            return Err(ViewError::Bits(bits));
        }
        if group_size == 0 || k % group_size != 0 {
            return Err(ViewError::GroupSize { group_size, k });
        }
        let length = |what, expected: Option<usize>, got| match expected {
            Some(expected) if expected == got => Ok(()),
            Some(expected) => Err(ViewError::Length { what, expected, got }),
            None => Err(ViewError::TooLarge(what)),
        };
        let groups = n.checked_mul(k / group_size);
        length("codes", n.checked_mul(k), codes.len())?;
        match scales {
            Scales::Float(scales) => length("scales", groups, scales.len())?,
            Scales::Progressive { groups: scales, channels } => {
                length("group scales", groups, scales.len())?;
                length("row scales", Some(n), channels.len())?;
            }
            Scales::E4m3 { groups: scales, .. } => length("group scales", groups, scales.len())?,
            Scales::Super(scales) => {
                let fits = super_block_fits(usize::from(bits), scales.mins.is_some(), float, group_size);
                if zeros.is_some() || !fits {
                    return Err(ViewError::Scales);
                }
                if k % SUPER_BLOCK != 0 {
                    return Err(ViewError::SuperBlocks { k });
                }
                let blocks = n.checked_mul(k / SUPER_BLOCK);
                length("group scales", groups, scales.groups.len())?;
                length("super-block scales", blocks, scales.blocks.len())?;
                if let Some(mins) = scales.mins {
                    length("group minima", groups, mins.groups.len())?;
                    length("super-block minima", blocks, mins.blocks.len())?;
                }
            }
        }
        if let Some(zeros) = zeros {
            length("zeros", groups, zeros.len())?;
        }
        Ok(Self { n, k, bits, group_size, codes, scales, zeros, float })
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bits per code.
    pub fn bits(&self) -> u8 {
        self.bits
    }

    /// The format of floating-point codes; `None` for integers.
    pub fn float_format(&self) -> Option<FloatFormat> {
        self.float
    }

    /// Fails unless codes are integers.
    ///
    /// # Errors
    /// [`KernelError::Scheme`].
    pub fn require_integers(&self) -> Result<(), KernelError> {
        match self.float {
            None => Ok(()),
            Some(FloatFormat::E4m3) => {
                Err(KernelError::Scheme("this kernel supports integer weights only, not FP8 (E4M3)"))
            }
            Some(FloatFormat::E2m1) => {
                Err(KernelError::Scheme("this kernel supports integer weights only, not FP4 (E2M1)"))
            }
            Some(FloatFormat::Iq4) => {
                Err(KernelError::Scheme("this kernel supports integer weights only, not the levels of IQ4"))
            }
        }
    }

    /// Input features that share a scale.
    pub fn group_size(&self) -> usize {
        self.group_size
    }

    /// Groups per row.
    pub fn groups(&self) -> usize {
        self.k / self.group_size
    }

    /// The codes of some rows.
    ///
    /// # Panics
    /// When `rows` is out of range.
    pub fn codes(&self, rows: Range<usize>) -> &'a [u8] {
        &self.codes[rows.start * self.k..rows.end * self.k]
    }

    /// The scales of some rows.
    ///
    /// # Panics
    /// When `rows` is out of range.
    pub fn scales(&self, rows: Range<usize>) -> Scales<'a> {
        let groups_of = rows.start * self.groups()..rows.end * self.groups();
        match self.scales {
            Scales::Float(scales) => Scales::Float(&scales[groups_of]),
            Scales::Progressive { groups, channels } => {
                Scales::Progressive { groups: &groups[groups_of], channels: &channels[rows] }
            }
            Scales::E4m3 { groups, global } => Scales::E4m3 { groups: &groups[groups_of], global },
            Scales::Super(scales) => Scales::Super(scales.rows(rows, self.groups(), self.k / SUPER_BLOCK)),
        }
    }

    /// The scales of the whole matrix.
    pub fn all_scales(&self) -> Scales<'a> {
        self.scales
    }

    /// Whether every group has its own zero point.
    pub fn has_zeros(&self) -> bool {
        self.zeros.is_some()
    }

    /// The stored zero points of some rows, in the order of [`scales`](Self::scales); `None` if none are stored.
    ///
    /// # Panics
    /// When `rows` is out of range.
    pub fn zeros(&self, rows: Range<usize>) -> Option<&'a [u8]> {
        self.zeros.map(|zeros| &zeros[rows.start * self.groups()..rows.end * self.groups()])
    }

    /// The zero point of a group: the stored one, the midpoint of a symmetric grid, or 0 if super-blocks have minima.
    /// For floating-point codes the value has no meaning.
    ///
    /// # Panics
    /// When zero points are stored, and the index `row · groups + group` is out of range.
    pub fn zero(&self, row: usize, group: usize) -> u8 {
        match self.zeros {
            Some(zeros) => zeros[row * self.groups() + group],
            None => self.zero_point(),
        }
    }

    pub(crate) fn zero_point(&self) -> u8 {
        match self.scales {
            Scales::Super(SuperScales { mins: Some(_), .. }) => 0,
            _ => 1 << (self.bits - 1),
        }
    }
}

/// Whether codes of this many bits, in groups of this size, with or without minima, can form super-blocks, see
/// [`SuperScales`].
pub(crate) fn super_block_fits(
    bits: usize,
    mins: bool,
    float: Option<FloatFormat>,
    group_size: usize,
) -> bool {
    let unit = STEP * unit_of(bits.max(4));
    (match float {
        Some(format) => format == FloatFormat::Iq4 && !mins,
        None if mins => bits <= 5,
        None => bits == 6,
    }) && group_size > 0
        && SUPER_BLOCK.is_multiple_of(group_size)
        && group_size.is_multiple_of(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODES: [u8; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
    const SCALES: [f32; 6] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];

    #[test]
    fn parts_of_a_matrix() {
        let zeros = [6, 5, 4, 3, 2, 1];
        let view = WeightView::new([3, 4], 4, 2, &CODES, &SCALES, Some(&zeros)).unwrap();
        assert_eq!((view.n(), view.k(), view.bits(), view.group_size(), view.groups()), (3, 4, 4, 2, 2));
        assert_eq!(view.codes(1..3), &CODES[4..]);
        assert!(matches!(view.scales(1..2), Scales::Float([3.0, 4.0])));
        assert_eq!(view.zeros(2..3), Some(&[2, 1][..]));
        assert_eq!(view.zero(1, 1), 3);
    }

    #[test]
    fn a_symmetric_grid_has_its_zero_in_the_middle() {
        for (bits, zero) in [(2, 2), (3, 4), (4, 8), (8, 128)] {
            let view = WeightView::new([1, 4], bits, 4, &CODES[..4], &SCALES[..1], None).unwrap();
            assert_eq!((view.zero(0, 0), view.zeros(0..1)), (zero, None));
        }
    }

    #[test]
    fn misfits_are_reported() {
        let new = |shape, bits, size, codes: usize, scales: usize, zeros: Option<&'static [u8]>| {
            WeightView::new(shape, bits, size, &CODES[..codes], &SCALES[..scales], zeros).unwrap_err()
        };
        for bits in [0, 1, 9] {
            assert_eq!(new([3, 4], bits, 2, 12, 6, None), ViewError::Bits(bits));
        }
        assert_eq!(new([3, 4], 4, 3, 12, 6, None), ViewError::GroupSize { group_size: 3, k: 4 });
        assert_eq!(new([3, 4], 4, 0, 12, 6, None), ViewError::GroupSize { group_size: 0, k: 4 });
        let length = |what, expected, got| ViewError::Length { what, expected, got };
        assert_eq!(new([3, 4], 4, 2, 11, 6, None), length("codes", 12, 11));
        assert_eq!(new([3, 4], 4, 2, 12, 5, None), length("scales", 6, 5));
        assert_eq!(new([3, 4], 4, 2, 12, 6, Some(&[0; 7])), length("zeros", 6, 7));
        assert_eq!(new([usize::MAX, 4], 4, 4, 12, 6, None), ViewError::TooLarge("codes"));
    }

    #[test]
    fn two_levels_of_scales() {
        let (groups, channels) = ([1, 2, 3, 4, 5, 6], [0.5, 1.0, 2.0]);
        let new = |groups: &'static [u8], channels| {
            let scales = Scales::Progressive { groups, channels };
            WeightView::with_scales([3, 4], 4, 2, &CODES, scales, None)
        };
        let view = new(&[1, 2, 3, 4, 5, 6], &channels).unwrap();
        let Scales::Progressive { groups: g, channels: c } = view.scales(1..3) else { panic!() };
        assert_eq!((g, c), (&groups[2..], &channels[1..]));
        let length = |what, expected, got| ViewError::Length { what, expected, got };
        assert_eq!(new(&[1; 5], &channels).unwrap_err(), length("group scales", 6, 5));
        assert_eq!(new(&[1; 6], &channels[..2]).unwrap_err(), length("row scales", 3, 2));
    }

    #[test]
    fn empty_matrices_are_matrices() {
        assert!(WeightView::new([0, 4], 4, 2, &[], &[], None).is_ok());
        assert!(WeightView::new([3, 0], 4, 2, &[], &[], None).is_ok());
    }
}
