//! Packed weights: the order in which the kernels read them.
//!
//! One layout serves every kernel and every instruction set. A matrix `[n, k]` is divided into panels of [`PANEL_ROWS`]
//! rows, and a kernel reads a panel sequentially. `k` is divided into groups, and a group into steps of [`STEP`] input
//! features. The last step is padded: padding codes are 0, and so are the corresponding activations.
//!
//! ```text
//! panel:  codes    [groups][steps] 64 bytes for 4 bits, 128 for 8; in super-blocks also 80 for 5 bits, 96 for 6
//!         scales   [groups][16]    f16, bf16 or f32; u8 for progressive weights; i8 for super-blocks; E4M3 or E8M0 are
//!                                  also possible for floating-point codes
//!         zeros    [groups][16]    4 bits, low half first, or 8 bits; absent in a symmetric grid; for super-blocks the
//!                                  minima, u8
//!         channels [16]            f32; progressive weights only
//!         blocks   [k / 256][16]   f16; super-blocks only: all scales, then all minima
//!         factors  [2][16]         f32; E4M3 scales only: 256 / global, then the global scale itself
//!         sums     [groups][16]    i32, Σ (code − zero); on request
//!         padding  to a multiple of 64 bytes
//!
//! step, 4 bits:  byte 4·r + i = code(r, i) | code(r, i + 4) << 4      row r < 16, i < 4
//! step, 8 bits:  byte 4·r + i = code(r, i), byte 64 + 4·r + i = code(r, i + 4)
//! ```
//!
//! Codes of super-blocks may also have 5 or 6 bits. Their steps are stored in units of four (5 bits) or two (6 bits):
//! first the low four bits of each step as above, then one line of 64 bytes with the high bits of all steps:
//!
//! ```text
//! high bits:  byte 4·r + i, at bit w·(2·s + h) = high w bits of code(r, i + 4·h) of step s    w = 1 or 2, h < 2
//! ```
//!
//! Dense weights of bf16 have no codes. A step is four lines of pairs, in the order of
//! [`PAIRS`](crate::activation::split::PAIRS), and the scale of every row is 1:
//!
//! ```text
//! step, bf16:  word r of line p = weight(r, PAIRS[p]) | weight(r, PAIRS[p] + 2) << 16
//! ```
//!
//! So with 4 bits, one load of 64 bytes, an AND and a shift give two registers whose 32-bit lanes are rows with four
//! neighbouring codes each: the operands of `vpdpbusd`, `vpmaddubsw` and `sdot`.

mod dense;
mod pack;
mod unpack;

use half::{bf16, f16};

use dense::DENSE_BITS;
pub(crate) use dense::dense_place;
pub use unpack::Unpacked;

use crate::weight_view::{Scales, SuperScales, super_block_fits};
use crate::{FloatFormat, KernelError, WeightView, e8m0_value};

/// Rows per panel.
pub const PANEL_ROWS: usize = 16;
/// Input features per step.
pub const STEP: usize = 8;
/// Input features per super-block.
pub const SUPER_BLOCK: usize = 256;
/// Bytes of a cache line, and the alignment of panels.
pub const LINE: usize = 64;

/// The number of steps that share a line for the high bits of their codes; 1 if codes are stored whole.
pub(crate) const fn unit_of(code_bits: usize) -> usize {
    match code_bits {
        5 => 4,
        6 => 2,
        _ => 1,
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [u8; LINE]);

impl Default for Line {
    fn default() -> Self {
        Self([0; LINE])
    }
}

/// The storage type of group scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleType {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Single precision.
    F32,
    /// Unsigned 8-bit integers, and an `f32` scale per row: QServe's progressive quantization.
    Progressive,
    /// E4M3 without a sign, divided by an `f32`: NVFP4. Only for floating-point codes.
    E4m3,
    /// E8M0, powers of two: the MX formats. Only for floating-point codes.
    E8m0,
    /// Signed 8-bit integers, and an f16 scale per super-block: GGUF's Q6_K.
    Super,
    /// Scales as in [`Super`](Self::Super), and minima: unsigned 8-bit integers, and an f16 per super-block. GGUF's
    /// Q4_K and Q5_K.
    SuperMins,
}

impl ScaleType {
    fn bytes(self) -> usize {
        match self {
            Self::Progressive | Self::E4m3 | Self::E8m0 | Self::Super | Self::SuperMins => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    pub(crate) fn is_super(self) -> bool {
        matches!(self, Self::Super | Self::SuperMins)
    }

    /// The narrowest type that represents all of these scales exactly.
    fn narrowest(scales: &[f32]) -> Self {
        let same = |value: f32, stored: f32| value.to_bits() == stored.to_bits();
        if scales.iter().all(|&s| same(s, f16::from_f32(s).to_f32())) {
            Self::F16
        } else if scales.iter().all(|&s| same(s, bf16::from_f32(s).to_f32())) {
            Self::Bf16
        } else {
            Self::F32
        }
    }
}

/// The E8M0 code of a scale, if it has one.
fn e8m0_code(scale: f32) -> Option<u8> {
    if scale.is_nan() {
        return None;
    }
    let code = if scale == e8m0_value(0) { 0 } else { (scale.to_bits() >> 23) as u8 };
    (e8m0_value(code).to_bits() == scale.to_bits()).then_some(code)
}

/// The layout of a packed matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    n: usize,
    k: usize,
    /// Bits per stored code: 4 or 8; 5 or 6 only in super-blocks; 16 for dense bf16.
    code_bits: usize,
    group_size: usize,
    scales: ScaleType,
    /// The zero point of every group, or `None` if zero points are stored.
    zero_point: Option<u8>,
    /// The format of floating-point codes.
    float: Option<FloatFormat>,
    sums: bool,
    /// Derived values.
    groups: usize,
    steps: usize,
    panel_bytes: usize,
}

impl Layout {
    /// The layout for a view; with `sums` it includes the sums of codes that activations with a zero point require.
    ///
    /// # Errors
    /// When
    /// - the matrix is empty, or its packed size overflows;
    /// - `sums` is set for floating-point codes or super-blocks;
    /// - a global scale is not positive and finite, or so small that 256 divided by it overflows;
    /// - a group, or a row of progressive weights, is so wide that its sums might overflow 32 bits. The limit depends on
    ///   the format; it is 33,025 input features or more.
    pub fn of(view: &WeightView<'_>, sums: bool) -> Result<Self, KernelError> {
        let code_bits = match (view.bits(), view.all_scales()) {
            (..=4, _) => 4,
            (bits, Scales::Super(_)) => usize::from(bits),
            _ => 8,
        };
        let scales = match view.all_scales() {
            Scales::Float(scales) => match view.float_format() {
                Some(FloatFormat::E4m3 | FloatFormat::E2m1)
                    if scales.iter().all(|&s| e8m0_code(s).is_some()) =>
                {
                    ScaleType::E8m0
                }
                _ => ScaleType::narrowest(scales),
            },
            Scales::Progressive { .. } => ScaleType::Progressive,
            Scales::E4m3 { global, .. } => {
                if !(global > 0.0 && global.is_finite() && factor(global).is_normal()) {
                    return Err(KernelError::Scheme(
                        "a global scale is not positive and finite, or so small that 256 divided by it overflows",
                    ));
                }
                ScaleType::E4m3
            }
            Scales::Super(SuperScales { mins: None, .. }) => ScaleType::Super,
            Scales::Super(SuperScales { mins: Some(_), .. }) => ScaleType::SuperMins,
        };
        if let Some(format) = view.float_format() {
            let shape = [view.n(), view.k()];
            return match sums {
                false => Self::from_float_parts(shape, format, view.group_size(), scales),
                true => Err(KernelError::Scheme("sums are supported for integer codes only")),
            };
        }
        let zero_point = (!view.has_zeros()).then(|| view.zero_point());
        Self::from_parts([view.n(), view.k()], code_bits, view.group_size(), scales, zero_point, sums)
    }

    /// The layout of integer codes with these properties, for callers that have packed bytes and no view: `code_bits`
    /// is 4 or 8, for super-blocks 4 to 6; `zero_point` is the zero point of every group, or `None` if each has its
    /// own.
    ///
    /// # Errors
    /// See [`of`](Self::of); also when the group size does not divide `k`, the code width or zero point is invalid, or
    /// the scales are E4M3 or E8M0.
    pub fn from_parts(
        [n, k]: [usize; 2],
        code_bits: usize,
        group_size: usize,
        scales: ScaleType,
        zero_point: Option<u8>,
        sums: bool,
    ) -> Result<Self, KernelError> {
        if code_bits == DENSE_BITS {
            return Err(KernelError::Scheme("codes have at most 8 bits"));
        }
        if let ScaleType::E4m3 | ScaleType::E8m0 = scales {
            return Err(KernelError::Scheme("E4M3 and E8M0 scales require floating-point codes"));
        }
        Self::with_codes([n, k], code_bits, group_size, scales, zero_point, None, sums)
    }

    /// The layout of floating-point codes with these properties.
    ///
    /// # Errors
    /// See [`of`](Self::of); also when the format does not support these scales, or the group size does not divide `k`.
    pub fn from_float_parts(
        shape: [usize; 2],
        format: FloatFormat,
        group_size: usize,
        scales: ScaleType,
    ) -> Result<Self, KernelError> {
        let fits = match (scales, format) {
            (ScaleType::Progressive | ScaleType::SuperMins, _) => false,
            (ScaleType::Super, _) => format == FloatFormat::Iq4,
            (ScaleType::E4m3 | ScaleType::E8m0, _) => format != FloatFormat::Iq4,
            _ => true,
        };
        if !fits {
            return Err(KernelError::Scheme("codes of this format cannot have scales of this type"));
        }
        let zero_point = Some(0);
        Self::with_codes(
            shape,
            usize::from(format.bits()),
            group_size,
            scales,
            zero_point,
            Some(format),
            false,
        )
    }

    fn with_codes(
        [n, k]: [usize; 2],
        code_bits: usize,
        group_size: usize,
        scales: ScaleType,
        zero_point: Option<u8>,
        float: Option<FloatFormat>,
        sums: bool,
    ) -> Result<Self, KernelError> {
        if n == 0 || k == 0 {
            return Err(KernelError::Scheme("the matrix must have at least one row and one column"));
        }
        let widths: &[usize] = if scales.is_super() { &[4, 5, 6] } else { &[4, 8, DENSE_BITS] };
        if !widths.contains(&code_bits) || zero_point.is_some_and(|m| usize::from(m) >> code_bits != 0) {
            return Err(KernelError::Scheme(
                "codes must be stored in 4 or 8 bits (4, 5 or 6 in super-blocks), and the zero point must fit in them",
            ));
        }
        if scales.is_super() {
            let mins = scales == ScaleType::SuperMins;
            if k % SUPER_BLOCK != 0 || !super_block_fits(code_bits, mins, float, group_size) {
                return Err(KernelError::Scheme(
                    "this width, code size and group size do not form super-blocks",
                ));
            }
            let zero = if mins || float.is_some() { 0 } else { 1 << (code_bits - 1) };
            if sums || zero_point != Some(zero) {
                return Err(KernelError::Scheme("super-blocks have a fixed zero point and no sums"));
            }
        }
        if group_size == 0 || k % group_size != 0 {
            return Err(KernelError::Mismatch {
                what: "the group size must divide k =",
                expected: k,
                got: group_size,
            });
        }
        // |Σ (code − zero) · (a − a₀)| must stay below 2³¹, with |code − zero| ≤ 255 or 15, and |a| ≤ 128 since
        // static codes can be −128, or |a − a₀| ≤ 255 if activations have a zero point; progressive weights are summed
        // over the whole row.
        let (width, weight) = match (scales, code_bits) {
            (ScaleType::Progressive, _) => (k, PROGRESSIVE_MAX as usize),
            // An integer scale is at most 128 in magnitude, a code without its zero point below 64, a level below 128.
            (ScaleType::Super | ScaleType::SuperMins, _) => (SUPER_BLOCK, 128 * 128),
            // Dense weights are multiplied by floats only.
            (_, DENSE_BITS) => (1, 1),
            (_, 8) => (group_size, 255),
            // Levels are multiplied with an offset that makes them unsigned.
            _ if float == Some(FloatFormat::Iq4) => (group_size, 255),
            _ => (group_size, 15),
        };
        let activation = if sums { 255 } else { 128 };
        if width > i32::MAX as usize / (weight * activation) {
            return Err(KernelError::TooLarge("the group size"));
        }
        let (groups, steps) = (k / group_size, group_size.div_ceil(STEP));
        let mut layout = Self {
            n,
            k,
            code_bits,
            group_size,
            scales,
            zero_point,
            float,
            sums,
            groups,
            steps,
            panel_bytes: 0,
        };
        let too_large = KernelError::TooLarge("the packed matrix");
        // The bytes of one group cannot overflow; those of all groups can.
        let group = layout.steps() * layout.step_bytes()
            + PANEL_ROWS * scales.bytes()
            + layout.zero_bytes()
            + if sums { 4 * PANEL_ROWS } else { 0 };
        let bytes = layout.groups().checked_mul(group).and_then(|b| b.checked_add(layout.channel_bytes()));
        let bytes = bytes.and_then(|b| b.checked_next_multiple_of(LINE)).ok_or(too_large.clone())?;
        bytes.checked_mul(layout.panels()).filter(|&b| isize::try_from(b).is_ok()).ok_or(too_large)?;
        layout.panel_bytes = bytes;
        Ok(layout)
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// The layout of `n` of these rows, from a panel boundary.
    pub(crate) fn of_rows(&self, n: usize) -> Self {
        Self { n, ..*self }
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bits per stored code: 4 or 8, for super-blocks 4 to 6, for dense bf16 16.
    pub fn code_bits(&self) -> usize {
        self.code_bits
    }

    /// Input features that share a scale.
    pub fn group_size(&self) -> usize {
        self.group_size
    }

    /// Groups per row.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// The storage type of scales.
    pub fn scales(&self) -> ScaleType {
        self.scales
    }

    /// The format of floating-point codes.
    pub fn float_format(&self) -> Option<FloatFormat> {
        self.float
    }

    /// The zero point of every group, or `None` if each has its own. For floating-point codes it is always 0, and
    /// unused.
    pub fn zero_point(&self) -> Option<u8> {
        self.zero_point
    }

    /// Whether the sum of the codes of each group and row is stored.
    pub fn has_sums(&self) -> bool {
        self.sums
    }

    /// Steps per group.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Input features including the padding of groups: the width of a packed row of activations.
    pub fn padded_k(&self) -> usize {
        self.groups() * self.steps() * STEP
    }

    /// The number of panels.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(PANEL_ROWS)
    }

    /// Bytes per panel, a multiple of [`LINE`].
    pub fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// Bytes of the whole matrix.
    pub fn bytes(&self) -> usize {
        self.panel_bytes * self.panels()
    }

    /// Bits per weight, including padding.
    pub fn bits_per_weight(&self) -> f64 {
        8.0 * self.bytes() as f64 / (self.n as f64 * self.k as f64)
    }

    pub(crate) fn step_bytes(&self) -> usize {
        PANEL_ROWS * STEP * self.code_bits / 8
    }

    /// Whether the tile unit, if the processor has one, multiplies these weights; activations for it have another form.
    pub(crate) fn has_tiles(&self) -> bool {
        !self.is_super() && self.float != Some(FloatFormat::Iq4)
    }

    pub(crate) fn is_super(&self) -> bool {
        self.scales.is_super()
    }

    /// The offset of a step's codes in a panel; of their low four bits, if the high bits are stored separately.
    pub(crate) fn step_at(&self, step: usize) -> usize {
        let unit = unit_of(self.code_bits);
        match unit {
            1 => step * self.step_bytes(),
            _ => step / unit * unit * self.step_bytes() + step % unit * LINE,
        }
    }

    fn zero_bytes(&self) -> usize {
        match (self.scales, self.zero_point) {
            (ScaleType::SuperMins, _) => PANEL_ROWS,
            (_, Some(_)) => 0,
            (_, None) => PANEL_ROWS * self.code_bits / 8,
        }
    }

    pub(crate) fn blocks(&self) -> usize {
        self.k / SUPER_BLOCK
    }

    fn channel_bytes(&self) -> usize {
        match self.scales {
            ScaleType::Progressive => 4 * PANEL_ROWS,
            ScaleType::E4m3 => 8 * PANEL_ROWS,
            ScaleType::Super => 2 * PANEL_ROWS * self.blocks(),
            ScaleType::SuperMins => 4 * PANEL_ROWS * self.blocks(),
            ScaleType::F16 | ScaleType::Bf16 | ScaleType::F32 | ScaleType::E8m0 => 0,
        }
    }

    /// The offset of the line with the high bits of half a step's codes, and the shift of these bits in a byte; `None`
    /// if codes are stored whole.
    pub(crate) fn high_bits(&self, step: usize, half: usize) -> Option<(usize, usize)> {
        let unit = unit_of(self.code_bits);
        let at = step / unit * unit * self.step_bytes() + unit * LINE;
        (unit > 1).then(|| (at, (2 * (step % unit) + half) * (self.code_bits - 4)))
    }

    /// Offset of the scales in a panel.
    pub(crate) fn scales_at(&self) -> usize {
        self.groups() * self.steps() * self.step_bytes()
    }

    pub(crate) fn zeros_at(&self) -> usize {
        self.scales_at() + self.groups() * PANEL_ROWS * self.scales.bytes()
    }

    pub(crate) fn channels_at(&self) -> usize {
        self.zeros_at() + self.groups() * self.zero_bytes()
    }

    pub(crate) fn sums_at(&self) -> usize {
        self.channels_at() + self.channel_bytes()
    }

    /// A hash of the order of bytes and everything that it depends on. Stored with packed bytes, it shows whether they
    /// have this layout.
    pub fn id(&self) -> u64 {
        let scales = match self.scales {
            ScaleType::F16 => 1,
            ScaleType::Bf16 => 2,
            ScaleType::F32 => 3,
            ScaleType::Progressive => 4,
            ScaleType::E4m3 => 5,
            ScaleType::E8m0 => 6,
            ScaleType::Super => 7,
            ScaleType::SuperMins => 8,
        };
        let float = self.float.map(|format| match format {
            FloatFormat::E4m3 => 1,
            FloatFormat::E2m1 => 2,
            FloatFormat::Iq4 => 3,
        });
        let zero_point = self.zero_point.map_or(0, |m| 1 + u64::from(m));
        let sizes = [self.n, self.k, self.code_bits, self.group_size].map(|s| s as u64);
        let words = [VERSION].into_iter().chain(sizes).chain([scales, zero_point, u64::from(self.sums)]);
        // Integer codes add no word, so that their ids do not change.
        let words = words.chain(float);
        // FNV-1a.
        words.flat_map(u64::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }
}

/// The factor of sums over terms with the scales of [`load_e4m3`](crate::simd::Lanes::load_e4m3), which are `2⁻⁸` times
/// the stored ones.
pub(crate) fn factor(global: f32) -> f32 {
    256.0 / global
}

/// The E4M3 code of NaN without a sign; all smaller codes are numbers.
pub(crate) const E4M3_NAN: u8 = 0x7f;

/// The largest magnitude of a progressive weight's integer part, a signed 8-bit number.
pub(crate) const PROGRESSIVE_MAX: i32 = 128;

/// Increases whenever the order of bytes changes.
const VERSION: u64 = 1;
