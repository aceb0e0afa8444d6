//! Packed weights for GPUs: the order in which the kernels read them.
//!
//! One layout serves all kernels and architectures. A matrix `[n, k]` is cut into tiles of [`TILE_ROWS`] rows and
//! [`TILE_K`] features, padded at its edges. Tiles are stored row block by row block, along `k` within each, so that a
//! thread block reads contiguous bytes. A tile holds, lane by lane, the registers of `mma`'s A fragments (PTX ISA,
//! figures of `m16n8k16` and `m16n8k32`): lane `l` has rows `r = l / 4` and `r + 8`, and `t = l % 4` determines the
//! features.
//!
//! ```text
//! codes        [n16 / 16][k128 / 128] tiles of 1024 bytes (4 bits) or 2048 (8 bits)
//! parameters   [n16 / 16][k128 / 128] blocks with the parameters of a tile; none if a row is one group:
//!                scales [groups][16]   f16, bf16, f32; progressive: u8; floating-point codes also: E4M3, E8M0
//!                zeros  [groups][16]   u4 or u8, if there are any
//!                sums   [groups][16]   i32, Σ (q − z), on request, unless rows are summed whole
//!                padding to a multiple of 16 bytes
//! row scales   [n16] f32               if a row is one group, and for progressive weights
//!              [2][n16] f32            for E4M3 scales: 256 / global, and the global scale itself
//! row zeros    [n16] u8                if a row is one group and has a zero point
//! row sums     [n16] i32               on request, if a row is summed whole: Σ (q − z), progressive: Σ (q − z) s
//! ```
//!
//! Every section begins at a multiple of [`SECTION`] bytes. `n16` and `k128` are `n` and `k` rounded up; padding has
//! code 0 and scale 0, and the kernels use 0 for the activations of padded features. The parameters of a group that is
//! wider than a tile are repeated in each of its tiles.
//!
//! Within a tile, byte `512 · c + 16 · l + b` is byte `b` of chunk `c` of lane `l`: a warp reads a chunk as 512
//! contiguous bytes, without bank conflicts. Word `w` of a lane is bytes `4 (w % 4)…` of chunk `w / 4`.
//!
//! ```text
//! Order::Float, 4 bits   word w: step of 16 features from f = 16 w; with the fields
//!                          i = 0: (r, f + 2t)   1: (r + 8, f + 2t)   2: (r, f + 2t + 8)   3: (r + 8, f + 2t + 8)
//!                        code of field i at bits 4 i, of the feature after it at bits 16 + 4 i, all rotated left by 2
//! Order::Float, 8 bits   word w: step from f = 16 (w / 2); bytes: field 2 (w % 2), the feature after it, the next field,
//!                        the feature after that
//! Order::Int8, 4 bits    word w: step of 32 features from f = 32 (w / 2), row r + 8 (w % 2); code of feature f + 4t + j at
//!                        bits 8 j, of feature f + 16 + 4t + j at bits 8 j + 4
//! Order::Int8, 8 bits    word w: step from f = 32 (w / 4), row r + 8 (w % 2), features f + 16 (w / 2 % 2) + 4t + j, a byte each
//! ```
//!
//! Floating-point codes, E2M1 and E4M3, have `Order::Float` and are in the same words. Their bits are spread, so that a
//! mask, possibly after a rotation, finds sign and magnitude in place: see `WeightLayout::spread`.
//!
//! Scales, u8 zero points and sums of a group's 16 rows are stored in the order `0, 8, 1, 9, …, 7, 15`, so that a lane
//! reads its two with one load; u4 zero points as bytes `zero(r) | zero(r + 8) << 4`. In `Order::Int8` the codes of a
//! symmetric grid are stored as signed `q − zero_point`, except those of progressive weights.

use quant_kernels_cpu::{FloatFormat, KernelError, Layout, ScaleType, Scales, Unpacked, WeightView};

/// Rows per tile.
pub const TILE_ROWS: usize = 16;
/// Features per tile.
pub const TILE_K: usize = 128;
/// Alignment of the sections of a packed matrix, in bytes.
pub const SECTION: usize = 256;

/// The type of the activations. It determines the order of codes within a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// f16 or bf16.
    Float,
    /// 8-bit integers.
    Int8,
}

/// The layout of a packed matrix.
///
/// ```
/// use quant_kernels_cpu::WeightView;
/// use quant_kernels_cuda::layout::{Order, WeightLayout};
///
/// // Packed on the CPU; a device packs the same bytes.
/// let (codes, scales) = (vec![9; 16 * 128], vec![0.5; 16]);
/// let view = WeightView::new([16, 128], 4, 128, &codes, &scales, None)?;
/// let layout = WeightLayout::of(&view, Order::Float, false)?;
/// let mut bytes = vec![0; layout.bytes()];
/// layout.pack(&view, &mut bytes)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightLayout {
    n: usize,
    k: usize,
    /// Bits per stored code: 4 or 8.
    code_bits: usize,
    group_size: usize,
    scales: ScaleType,
    /// The zero point of all groups, or `None` if zero points are stored.
    zero_point: Option<u8>,
    /// The format of floating-point codes; `None` for integers.
    float: Option<FloatFormat>,
    order: Order,
    sums: bool,
    sections: [usize; 6],
}

/// A section of a packed matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// Codes, tile by tile.
    Codes = 0,
    /// Scales, zero points and sums of groups.
    Parameters = 1,
    /// Scales of rows.
    RowScales = 2,
    /// Zero points of rows.
    RowZeros = 3,
    /// Sums of rows.
    RowSums = 4,
}

const GROUP_SIZES: &str = "the group size must be 32, 64, 128 or the row width, 16 for floating-point codes, or a \
    multiple of 128 for float activations or progressive weights";
pub(crate) const SUPER_BLOCKS: &str =
    "the kernels for GPUs do not support super-blocks (GGUF's Q4_K, Q5_K and Q6_K)";

impl WeightLayout {
    /// Returns the layout of a view. `sums` includes the sums for integer activations with a zero point.
    ///
    /// Groups have 32, 64 or 128 features, or are whole rows. With float activations or progressive weights, multiples
    /// of 128 are supported too. Floating-point codes, which require float activations, also support groups of 16.
    ///
    /// # Errors
    /// - All errors of [`Layout::of`].
    /// - An unsupported group size.
    /// - A symmetric grid in `Order::Int8` whose zero point is more than half the number of its codes.
    /// - `sums` with float activations.
    /// - Progressive weights of 8 bits, or with float activations.
    /// - Super-blocks, and the levels of IQ4.
    /// - A symmetric grid of 4 bits in `Order::Int8` whose rows are one group of more than 131,071 features (65,793
    ///   with `sums`), because its sums are multiplied by 16.
    pub fn of(view: &WeightView<'_>, order: Order, sums: bool) -> Result<Self, KernelError> {
        let cpu = Layout::of(view, sums)?;
        let shape = [cpu.n(), cpu.k()];
        if let Some(format) = view.float_format() {
            if order == Order::Int8 {
                view.require_integers()?;
            }
            return Self::from_float_parts(shape, format, cpu.group_size(), cpu.scales());
        }
        Self::from_parts(
            shape,
            cpu.code_bits(),
            cpu.group_size(),
            cpu.scales(),
            cpu.zero_point(),
            order,
            sums,
        )
    }

    /// Returns the layout with these properties, like [`Layout::from_parts`].
    ///
    /// # Errors
    /// See [`of`](Self::of).
    pub fn from_parts(
        [n, k]: [usize; 2],
        code_bits: usize,
        group_size: usize,
        scales: ScaleType,
        zero_point: Option<u8>,
        order: Order,
        sums: bool,
    ) -> Result<Self, KernelError> {
        Layout::from_parts([n, k], code_bits, group_size, scales, zero_point, sums)?;
        if let ScaleType::Super | ScaleType::SuperMins = scales {
            return Err(KernelError::Scheme(SUPER_BLOCKS));
        }
        let progressive = scales == ScaleType::Progressive;
        if sums && order == Order::Float {
            return Err(KernelError::Scheme("sums are supported with int8 activations only"));
        }
        if progressive && (code_bits != 4 || order == Order::Float) {
            return Err(KernelError::Scheme("progressive weights need 4-bit codes and int8 activations"));
        }
        Self { n, k, code_bits, group_size, scales, zero_point, float: None, order, sums, sections: [0; 6] }
            .checked()
    }

    /// Returns the layout of floating-point codes, for float activations, like [`Layout::from_float_parts`].
    ///
    /// # Errors
    /// See [`of`](Self::of).
    pub fn from_float_parts(
        [n, k]: [usize; 2],
        format: FloatFormat,
        group_size: usize,
        scales: ScaleType,
    ) -> Result<Self, KernelError> {
        let cpu = Layout::from_float_parts([n, k], format, group_size, scales)?;
        if format == FloatFormat::Iq4 {
            return Err(KernelError::Scheme("the kernels for GPUs do not support the levels of IQ4"));
        }
        let (code_bits, zero_point, order) = (cpu.code_bits(), cpu.zero_point(), Order::Float);
        let (float, sums, sections) = (Some(format), false, [0; 6]);
        Self { n, k, code_bits, group_size, scales, zero_point, float, order, sums, sections }.checked()
    }

    fn checked(mut self) -> Result<Self, KernelError> {
        let Self { k, code_bits, group_size, zero_point, order, sums, .. } = self;
        let layout = &self;
        // `code − zero_point` must fit in signed integers of this width.
        if layout.signed() && zero_point.is_some_and(|zero_point| zero_point > 1 << (code_bits - 1)) {
            return Err(KernelError::Scheme(
                "the zero point of a symmetric integer grid must not exceed the middle code",
            ));
        }
        let tile_groups = matches!(group_size, 32 | 64 | 128);
        let progressive = self.scales == ScaleType::Progressive;
        let tile_groups = tile_groups || (self.float.is_some() && group_size == 16);
        let repeated = group_size.is_multiple_of(TILE_K) && (order == Order::Float || progressive);
        if !(tile_groups || repeated || layout.row_is_group()) {
            return Err(KernelError::Scheme(GROUP_SIZES));
        }
        if layout.row_is_group() && layout.signed() && code_bits == 4 {
            let activation = if sums { 255 } else { 128 };
            if k > i32::MAX as usize / (16 * 8 * activation) {
                return Err(KernelError::TooLarge("the row width"));
            }
        }
        self.sections = self.find_sections().ok_or(KernelError::TooLarge("the packed matrix"))?;
        Ok(self)
    }

    fn find_sections(&self) -> Option<[usize; 6]> {
        let rows = self.n.checked_next_multiple_of(TILE_ROWS)?;
        let tiles = (rows / TILE_ROWS).checked_mul(self.k.div_ceil(TILE_K))?;
        let progressive = self.scales == ScaleType::Progressive;
        let below_global = self.scales == ScaleType::E4m3;
        let of_row = if below_global { 8 } else { 4 };
        let when = |there: bool, bytes: Option<usize>| if there { bytes } else { Some(0) };
        let sizes = [
            tiles.checked_mul(self.tile_bytes())?,
            tiles.checked_mul(self.parameter_bytes())?,
            when(self.row_is_group() || progressive || below_global, rows.checked_mul(of_row))?,
            when(self.row_is_group() && self.zero_point.is_none(), Some(rows))?,
            when(self.sums && self.summed_whole(), rows.checked_mul(4))?,
        ];
        let mut sections = [0_usize; 6];
        for (i, size) in sizes.into_iter().enumerate() {
            sections[i + 1] = sections[i].checked_add(size)?.checked_next_multiple_of(SECTION)?;
        }
        isize::try_from(sections[5]).ok().map(|_| sections)
    }

    /// The number of output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// The number of input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bits per stored code: 4 or 8.
    pub fn code_bits(&self) -> usize {
        self.code_bits
    }

    /// The number of input features that share a scale.
    pub fn group_size(&self) -> usize {
        self.group_size
    }

    /// The type of stored group scales. If a row is one group, its scale is always `f32`.
    pub fn scales(&self) -> ScaleType {
        self.scales
    }

    /// The zero point of all groups, or `None` if each group has its own.
    pub fn zero_point(&self) -> Option<u8> {
        self.zero_point
    }

    /// The format of floating-point codes; `None` for integers.
    pub fn float_format(&self) -> Option<FloatFormat> {
        self.float
    }

    /// The type of the activations.
    pub fn order(&self) -> Order {
        self.order
    }

    /// Whether sums of weights are included.
    pub fn has_sums(&self) -> bool {
        self.sums
    }

    /// Whether a row is one group, whose scale is stored with the row and not with the tiles.
    pub fn row_is_group(&self) -> bool {
        self.group_size == self.k && !matches!(self.scales, ScaleType::Progressive | ScaleType::E4m3)
    }

    /// Whether integers are summed over a whole row.
    pub(crate) fn summed_whole(&self) -> bool {
        self.order == Order::Int8 && (self.row_is_group() || self.scales == ScaleType::Progressive)
    }

    /// Whether codes are stored minus the zero point.
    pub(crate) fn signed(&self) -> bool {
        self.order == Order::Int8 && self.zero_point.is_some() && self.scales != ScaleType::Progressive
    }

    /// Number of blocks of 16 rows.
    pub fn row_blocks(&self) -> usize {
        self.n.div_ceil(TILE_ROWS)
    }

    /// Number of tiles along `k`.
    pub fn tiles(&self) -> usize {
        self.k.div_ceil(TILE_K)
    }

    /// The size of a tile's codes in bytes.
    pub fn tile_bytes(&self) -> usize {
        TILE_ROWS * TILE_K * self.code_bits / 8
    }

    /// The number of groups for which a tile has parameters.
    pub(crate) fn tile_groups(&self) -> usize {
        if self.row_is_group() { 0 } else { TILE_K / self.group_size.min(TILE_K) }
    }

    fn scale_bytes(&self) -> usize {
        match self.scales {
            ScaleType::Progressive | ScaleType::E4m3 | ScaleType::E8m0 => 1,
            // No layout has these scales.
            ScaleType::Super | ScaleType::SuperMins => 1,
            ScaleType::F16 | ScaleType::Bf16 => 2,
            ScaleType::F32 => 4,
        }
    }

    fn zeros_at(&self) -> usize {
        self.tile_groups() * TILE_ROWS * self.scale_bytes()
    }

    fn sums_at(&self) -> usize {
        let zeros = if self.zero_point.is_some() { 0 } else { TILE_ROWS * self.code_bits / 8 };
        self.zeros_at() + self.tile_groups() * zeros
    }

    /// The size of a tile's parameters in bytes, a multiple of 16.
    pub fn parameter_bytes(&self) -> usize {
        let sums = if self.sums && !self.summed_whole() { 4 * TILE_ROWS } else { 0 };
        (self.sums_at() + self.tile_groups() * sums).next_multiple_of(16)
    }

    /// The first byte of a section.
    pub fn section(&self, section: Section) -> usize {
        self.sections[section as usize]
    }

    /// The size of the whole matrix in bytes.
    pub fn bytes(&self) -> usize {
        self.sections[5]
    }

    /// Bits per weight of the matrix, including padding.
    pub fn bits_per_weight(&self) -> f64 {
        8.0 * self.bytes() as f64 / (self.n as f64 * self.k as f64)
    }

    /// An id of the layout, so that bytes of one layout are not read with a different one.
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
        let order = match self.order {
            Order::Float => 1,
            Order::Int8 => 2,
        };
        let zero_point = self.zero_point.map_or(0, |m| 1 + u64::from(m));
        let sizes = [self.n, self.k, self.code_bits, self.group_size].map(|s| s as u64);
        let float = self.float.map(|format| match format {
            FloatFormat::E4m3 => 1,
            FloatFormat::E2m1 => 2,
            _ => 0,
        });
        let words =
            [TAG, VERSION].into_iter().chain(sizes).chain([scales, zero_point, order, u64::from(self.sums)]);
        let words = words.chain(float);
        // FNV-1a.
        words.flat_map(u64::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }
}

/// The position of a row's value among the 16 values of its block.
pub(crate) fn pair_order(row: usize) -> usize {
    2 * (row % 8) + row / 8
}

/// "cuda" in ASCII, so that no layout of another crate has the same id.
const TAG: u64 = 0x6164_7563;
/// Increase this whenever the order of bytes changes.
const VERSION: u64 = 1;

pub mod device;
mod pack;
mod place;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_outside_tiles() {
        let of = |bits, group, scales, zero_point, order, sums| {
            let layout =
                WeightLayout::from_parts([32, 256], bits, group, scales, zero_point, order, sums).unwrap();
            layout.parameter_bytes()
        };
        let (float, int8) = (Order::Float, Order::Int8);
        assert_eq!(of(4, 128, ScaleType::F16, Some(8), float, false), 32);
        assert_eq!(of(4, 128, ScaleType::F16, None, float, false), 48);
        assert_eq!(of(4, 64, ScaleType::F16, None, float, false), 80);
        assert_eq!(of(4, 32, ScaleType::Bf16, None, float, false), 160);
        assert_eq!(of(8, 128, ScaleType::F32, None, int8, true), 64 + 16 + 64);
        assert_eq!(of(4, 128, ScaleType::Progressive, None, int8, true), 32);
        assert_eq!(of(4, 256, ScaleType::F32, None, float, false), 0);
        assert_eq!(of(4, 256, ScaleType::Progressive, None, int8, false), 32);
    }

    #[test]
    fn invalid_layouts_are_reported() {
        let of = |shape, bits, group, scales, zero_point, order, sums| {
            WeightLayout::from_parts(shape, bits, group, scales, zero_point, order, sums).unwrap_err()
        };
        let (float, int8) = (Order::Float, Order::Int8);
        let group = KernelError::Scheme(GROUP_SIZES);
        assert_eq!(of([16, 256], 4, 16, ScaleType::F16, Some(8), float, false), group);
        let floats =
            |size, scales| WeightLayout::from_float_parts([16, 256], FloatFormat::E2m1, size, scales);
        assert_eq!(floats(8, ScaleType::E4m3).unwrap_err(), group);
        assert!(floats(16, ScaleType::Progressive).is_err() && floats(16, ScaleType::E4m3).is_ok());
        assert_eq!(of([16, 96], 4, 48, ScaleType::F16, Some(8), float, false), group);
        assert_eq!(of([16, 512], 4, 256, ScaleType::F16, Some(8), int8, false), group);
        assert!(matches!(
            of([16, 512], 8, 128, ScaleType::Progressive, None, int8, false),
            KernelError::Scheme(_)
        ));
        assert!(matches!(
            of([16, 512], 4, 128, ScaleType::Progressive, None, float, false),
            KernelError::Scheme(_)
        ));
        assert!(matches!(of([16, 512], 4, 128, ScaleType::F16, None, float, true), KernelError::Scheme(_)));
        let wide = 131_072;
        assert!(matches!(
            of([16, wide], 4, wide, ScaleType::F16, Some(8), int8, false),
            KernelError::TooLarge(_)
        ));
        assert!(
            WeightLayout::from_parts([16, wide - 1], 4, wide - 1, ScaleType::F16, Some(8), int8, false)
                .is_ok()
        );
        for n in [usize::MAX, usize::MAX / 2, usize::MAX / 256] {
            assert!(matches!(
                of([n, 4096], 4, 128, ScaleType::F16, Some(8), float, false),
                KernelError::TooLarge(_)
            ));
        }
    }
}
