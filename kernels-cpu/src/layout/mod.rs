//! Packed weights: the order in which the kernels read them.
//!
//! One layout serves every kernel and every instruction set. A matrix `[n, k]` is divided into panels of [`PANEL_ROWS`]
//! rows, and a kernel reads a panel sequentially. `k` is divided into groups, and a group into steps of [`STEP`] input
//! features. The last step is padded: padding codes are 0, and so are the corresponding activations.
//!
//! ```text
//! panel:  codes    [groups][steps] of 64 bytes (4 bits) or 128 bytes (8 bits); of super-blocks also 80 (5) or 96 (6)
//!         scales   [groups][16]    f16, bf16 or f32; of progressive weights u8; of floating-point codes also E4M3 or E8M0;
//!                                  of super-blocks i8
//!         zeros    [groups][16]    of 4 bits, low half first, or 8; absent in a symmetric grid; of super-blocks the
//!                                  minima, u8
//!         channels [16]            f32, of progressive weights only
//!         blocks   [k / 256][16]   f16, of super-blocks only: scales, and after all of them minima
//!         factors  [2][16]         f32, of E4M3 scales only: 256 / global, and the global scale itself
//!         sums     [groups][16]    i32, Σ (code − zero), on request
//!         padding  up to a multiple of 64 bytes
//!
//! step, 4 bits:  byte 4·r + i = code(r, i) | code(r, i + 4) << 4      row r < 16, i < 4
//! step, 8 bits:  byte 4·r + i = code(r, i), byte 64 + 4·r + i = code(r, i + 4)
//! ```
//!
//! Super-blocks have codes of 5 and 6 bits too. Their steps are stored in units of four (5 bits) or two (6 bits): first
//! the low four bits of each step as above, then 64 bytes with the high bits of all, so that every part is a line:
//!
//! ```text
//! high bits:  byte 4·r + i, at bit w·(2·s + h) = high bits of code(r, i + 4·h) of step s      w = 1 or 2, h < 2
//! ```
//!
//! So one load of 64 bytes, an AND and a shift give two registers whose 32-bit lanes are rows with four neighbouring
//! codes each, the operands of `vpdpbusd`, `vpmaddubsw` and `sdot`; and its 16-bit words hold, at shifts of 0, 4, 8 and
//! 12, the pairs for a bf16 dot product.

mod unpack;

use std::ops::Range;

use half::{bf16, f16};

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

/// Steps that share a line with the high bits of their codes; 1 if codes are stored whole.
pub(crate) const fn unit_of(code_bits: usize) -> usize {
    match code_bits {
        5 => 4,
        6 => 2,
        _ => 1,
    }
}

/// A cache line.
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
    /// 8-bit integers, under an `f32` scale per row: QServe's progressive quantization.
    Progressive,
    /// E4M3 without a sign, divided by an `f32`: NVFP4. Only for floating-point codes.
    E4m3,
    /// Powers of two: the MX formats. Only for floating-point codes.
    E8m0,
    /// 8-bit signed integers, under an f16 scale per super-block: GGUF's Q6_K.
    Super,
    /// The same, with minima, 8-bit unsigned integers under an f16 per super-block: GGUF's Q4_K and Q5_K.
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

    /// Whether these are the scales of super-blocks.
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
    /// Bits per stored code: 4 or 8; 5 or 6 only in super-blocks.
    code_bits: usize,
    group_size: usize,
    scales: ScaleType,
    /// The zero point of every group, or `None` if zero points are stored.
    zero_point: Option<u8>,
    /// The format of floating-point codes.
    float: Option<FloatFormat>,
    sums: bool,
    /// Derived values, computed once since kernels use them for every tile.
    groups: usize,
    steps: usize,
    panel_bytes: usize,
}

impl Layout {
    /// The layout for a view; with `sums` it includes the sums that activations with a zero point require.
    ///
    /// # Errors
    /// When the matrix is empty; when `sums` is set for floating-point codes or super-blocks, or their global scale is not positive and
    /// finite; or when a group is so wide that its sums might overflow 32 bits: wider than 65,793 at 8 bits and
    /// 1,118,481 at 4, with `sums` 33,025 and 561,433; for progressive weights a row wider than 131,071, with `sums`
    /// 65,793.
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
                    return Err(KernelError::Scheme("a global scale is not positive and finite"));
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

    /// The layout with these properties, for callers that have packed bytes and no view: `code_bits` is 4 or 8, for
    /// super-blocks 4 to 6; `zero_point` is the zero point of every group, or `None` if each has its own.
    ///
    /// # Errors
    /// See [`of`](Self::of); also when the group size does not divide `k`, or the code width or zero point is invalid.
    pub fn from_parts(
        [n, k]: [usize; 2],
        code_bits: usize,
        group_size: usize,
        scales: ScaleType,
        zero_point: Option<u8>,
        sums: bool,
    ) -> Result<Self, KernelError> {
        if let ScaleType::E4m3 | ScaleType::E8m0 = scales {
            return Err(KernelError::Scheme("E4M3 and E8M0 scales require floating-point codes"));
        }
        Self::with_codes([n, k], code_bits, group_size, scales, zero_point, None, sums)
    }

    /// The layout of floating-point codes with these properties.
    ///
    /// # Errors
    /// See [`from_parts`](Self::from_parts); also when the scales are progressive; when they are those of super-blocks,
    /// except for IQ4 without minima; or when they are E4M3 or E8M0 for IQ4.
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
            return Err(KernelError::Scheme("scales that codes of this format do not have"));
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
        let widths: &[usize] = if scales.is_super() { &[4, 5, 6] } else { &[4, 8] };
        if !widths.contains(&code_bits) || zero_point.is_some_and(|m| usize::from(m) >> code_bits != 0) {
            return Err(KernelError::Scheme(
                "codes must be stored in 4 or 8 bits, and the zero point must fit in them",
            ));
        }
        if scales.is_super() {
            let mins = scales == ScaleType::SuperMins;
            if k % SUPER_BLOCK != 0 || !super_block_fits(code_bits, mins, float, group_size) {
                return Err(KernelError::Scheme("groups that do not form super-blocks"));
            }
            let zero = if mins || float.is_some() { 0 } else { 1 << (code_bits - 1) };
            if sums || zero_point != Some(zero) {
                return Err(KernelError::Scheme("zero points or sums of super-blocks"));
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
            // Levels are multiplied with an offset that makes them unsigned.
            (_, 8) => (group_size, 255),
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

    /// The layout of `n` of these rows, from a panel boundary. Only `n` differs, because panels are independent of each other.
    pub(crate) fn of_rows(&self, n: usize) -> Self {
        Self { n, ..*self }
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bits per stored code: 4 or 8, for super-blocks 4 to 6.
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

    /// The zero point of every group, or `None` if each has its own. For floating-point codes it is 0 and has no
    /// meaning.
    pub fn zero_point(&self) -> Option<u8> {
        self.zero_point
    }

    /// Whether the sums of rows are stored.
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

    /// Whether groups form super-blocks.
    pub(crate) fn is_super(&self) -> bool {
        self.scales.is_super()
    }

    /// The offset of a step in the codes of a panel, which is that of its low bits if it is one of a unit.
    pub(crate) fn step_at(&self, step: usize) -> usize {
        let unit = unit_of(self.code_bits);
        match unit {
            1 => step * self.step_bytes(),
            _ => step / unit * unit * self.step_bytes() + step % unit * LINE,
        }
    }

    /// Bytes of zero points per group, or of minima.
    fn zero_bytes(&self) -> usize {
        match (self.scales, self.zero_point) {
            (ScaleType::SuperMins, _) => PANEL_ROWS,
            (_, Some(_)) => 0,
            (_, None) => PANEL_ROWS * self.code_bits / 8,
        }
    }

    /// Super-blocks per row.
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

    /// The line with the high bits of a step's codes, and their place in a byte; `None` if codes are stored whole.
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

    /// Identifies the order of bytes and everything that it depends on, so that bytes of one layout are never read with
    /// a different one.
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
        // Integer formats are not hashed, so that their ids remain those from before other formats existed.
        let words = words.chain(float);
        // FNV-1a.
        words.flat_map(u64::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }

    /// Packs some panels of a view into `out`, which has exactly their size. Callers that use threads give each its own
    /// panels.
    ///
    /// # Errors
    /// When the view does not have this layout, `out` has the wrong length, a code or zero point is above `2^bits − 1`
    /// or a code is not a number of its format, a progressive weight `(code − zero) · group` is beyond ±128, or an E4M3
    /// scale is negative or NaN.
    pub fn pack(
        &self,
        view: &WeightView<'_>,
        panels: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), KernelError> {
        if Self::of(view, self.sums)? != *self {
            return Err(KernelError::Scheme("the weight view does not match the layout"));
        }
        if panels.start > panels.end || panels.end > self.panels() {
            let (expected, got) = (self.panels(), panels.end);
            return Err(KernelError::Mismatch { what: "panels must end at or before panel", expected, got });
        }
        KernelError::length("packed panels", panels.len() * self.panel_bytes, out.len())?;
        self.pack_panels(view, panels, out)
    }

    /// Same as [`pack`](Self::pack), for a view that is known to have this layout and for `out` of the right length.
    pub(crate) fn pack_panels(
        &self,
        view: &WeightView<'_>,
        panels: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), KernelError> {
        out.fill(0);
        for (panel, bytes) in panels.zip(out.chunks_exact_mut(self.panel_bytes)) {
            for r in 0..PANEL_ROWS.min(self.n - panel * PANEL_ROWS) {
                self.pack_row(view, panel * PANEL_ROWS + r, r, bytes)?;
            }
        }
        Ok(())
    }

    /// Fails on values that the bounds of sums do not allow.
    fn check_group(
        &self,
        view: &WeightView<'_>,
        row: usize,
        g: usize,
        group: &[u8],
    ) -> Result<(), KernelError> {
        if let Some(format) = view.float_format() {
            if !group.iter().all(|&code| format.is_number(code)) {
                return Err(KernelError::Scheme("a code is not a number in its format"));
            }
            return match view.all_scales() {
                Scales::E4m3 { groups, .. } if groups[row * self.groups() + g] >= E4M3_NAN => {
                    Err(KernelError::Scheme("a group scale is negative or NaN"))
                }
                _ => Ok(()),
            };
        }
        let zero = view.zero(row, g);
        let (low, high) = group.iter().fold((u8::MAX, 0), |(low, high), &c| (low.min(c), high.max(c)));
        if high.max(zero) > u8::MAX >> (8 - view.bits()) {
            return Err(KernelError::Scheme("a code or zero point exceeds the bits of the weight"));
        }
        if let Scales::Progressive { groups, .. } = view.all_scales() {
            let scale = i32::from(groups[row * self.groups() + g]);
            let reach = |code: u8| ((i32::from(code) - i32::from(zero)) * scale).abs();
            if reach(low).max(reach(high)) > PROGRESSIVE_MAX {
                return Err(KernelError::Scheme("a progressive weight exceeds 8 bits"));
            }
        }
        Ok(())
    }

    fn pack_row(
        &self,
        view: &WeightView<'_>,
        row: usize,
        r: usize,
        panel: &mut [u8],
    ) -> Result<(), KernelError> {
        let codes = view.codes(row..row + 1);
        for (g, group) in codes.chunks_exact(self.group_size).enumerate() {
            self.check_group(view, row, g, group)?;
            for (i, &code) in group.iter().enumerate() {
                let step = g * self.steps() + i / STEP;
                let (at, half, byte) = (self.step_at(step), (i % STEP) / 4, 4 * r + i % 4);
                match self.code_bits {
                    8 => panel[at + 64 * half + byte] = code,
                    _ => panel[at + byte] |= (code & 0x0f) << (4 * half),
                }
                if let Some((at, shift)) = self.high_bits(step, half) {
                    panel[at + byte] |= code >> 4 << shift;
                }
            }
            let at = g * PANEL_ROWS + r;
            let zero = view.zero(row, g);
            if self.zero_point.is_none() {
                match self.code_bits {
                    4 => panel[self.zeros_at() + at / 2] |= zero << (4 * (at % 2)),
                    _ => panel[self.zeros_at() + at] = zero,
                }
            }
            if self.sums {
                let sum: i32 = group.iter().map(|&c| i32::from(c) - i32::from(zero)).sum();
                panel[self.sums_at() + 4 * at..][..4].copy_from_slice(&sum.to_le_bytes());
            }
        }
        let mut write = |at: usize, bytes: &[u8]| panel[at..at + bytes.len()].copy_from_slice(bytes);
        let (groups, size) = (self.groups(), self.scales.bytes());
        for g in 0..groups {
            let at = self.scales_at() + (g * PANEL_ROWS + r) * size;
            match (view.all_scales(), self.scales) {
                (Scales::Float(s), ScaleType::F16) => {
                    write(at, &f16::from_f32(s[row * groups + g]).to_le_bytes())
                }
                (Scales::Float(s), ScaleType::Bf16) => {
                    write(at, &bf16::from_f32(s[row * groups + g]).to_le_bytes())
                }
                // In this layout, all scales have a code.
                (Scales::Float(s), ScaleType::E8m0) => {
                    write(at, &[e8m0_code(s[row * groups + g]).unwrap_or_default()])
                }
                (Scales::Float(s), _) => write(at, &s[row * groups + g].to_le_bytes()),
                (Scales::Progressive { groups: s, .. } | Scales::E4m3 { groups: s, .. }, _) => {
                    write(at, &[s[row * groups + g]])
                }
                (Scales::Super(s), _) => {
                    write(at, &s.groups[row * groups + g].to_le_bytes());
                    if let Some(mins) = s.mins {
                        write(self.zeros_at() + g * PANEL_ROWS + r, &[mins.groups[row * groups + g]]);
                    }
                }
            }
        }
        if let Scales::Super(s) = view.all_scales() {
            let blocks = self.blocks();
            for b in 0..blocks {
                let at = self.channels_at() + 2 * (b * PANEL_ROWS + r);
                write(at, &s.blocks[row * blocks + b].to_le_bytes());
                if let Some(mins) = s.mins {
                    write(at + 2 * PANEL_ROWS * blocks, &mins.blocks[row * blocks + b].to_le_bytes());
                }
            }
        }
        if let Scales::Progressive { channels, .. } = view.all_scales() {
            write(self.channels_at() + 4 * r, &channels[row].to_le_bytes());
        }
        if let Scales::E4m3 { global, .. } = view.all_scales() {
            write(self.channels_at() + 4 * r, &factor(global).to_le_bytes());
            write(self.channels_at() + 4 * (PANEL_ROWS + r), &global.to_le_bytes());
        }
        Ok(())
    }
}

/// The factor of sums whose terms use the scales of [`load_e4m3`](crate::simd::Lanes::load_e4m3).
pub(crate) fn factor(global: f32) -> f32 {
    256.0 / global
}

/// The E4M3 code of NaN without a sign; all smaller codes are numbers.
pub(crate) const E4M3_NAN: u8 = 0x7f;

/// The largest magnitude of a progressive weight's integer part, a signed 8-bit number.
pub(crate) const PROGRESSIVE_MAX: i32 = 128;

/// Increases whenever the order of bytes changes.
const VERSION: u64 = 1;
