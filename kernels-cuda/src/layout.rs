//! Packed weights for GPUs: the order in which the kernels read them, and nothing else.
//!
//! One layout serves every kernel and architecture. A matrix `[n, k]` is cut into tiles of [`TILE_ROWS`] rows and
//! [`TILE_K`] features, filled up at its edges; tiles lie row block by row block, along `k` within each, so a block of
//! threads reads one run of bytes. A tile holds, lane by lane, the registers of `mma`'s A fragments (PTX ISA,
//! figures of `m16n8k16` and `m16n8k32`): lane `l` has rows `r = l / 4` and `r + 8`, and `t = l % 4` says which features.
//!
//! ```text
//! codes        [n16 / 16][k128 / 128] tiles of 1024 bytes (4 bits) or 2048 (8 bits)
//! parameters   [n16 / 16][k128 / 128] blocks of what stands beside a tile; none where a row is one group:
//!                scales [groups][16]   f16, bf16, f32; progressive: u8
//!                zeros  [groups][16]   u4 or u8, where there are any
//!                sums   [groups][16]   i32, Σ (q − z), on request, unless rows are summed whole
//!                filler up to a multiple of 16 bytes
//!                floating-point codes: f16, bf16, f32, E4M3 or E8M0
//! row scales   [n16] f32               where a row is one group, and of progressive weights
//!              [2][n16] f32            of E4M3 scales: 256 / global, and the global scale itself
//! row zeros    [n16] u8                where a row is one group and has a zero
//! row sums     [n16] i32               on request, where a row is summed whole: Σ (q − z), progressive: Σ (q − z) s
//! ```
//!
//! Every section begins at a multiple of [`SECTION`] bytes. `n16` and `k128` are `n` and `k` filled up; fillers have
//! code 0 and scale 0, and the kernels see zeros for the activations of features that are not there. Groups of a tile are
//! those of its 128 features; a wider group stands in each of its tiles.
//!
//! Within a tile, byte `512 · c + 16 · l + b` is byte `b` of chunk `c` of lane `l`: a warp reads a chunk as 512
//! neighbouring bytes, without conflicts of banks. Word `w` of a lane is bytes `4 (w % 4)…` of chunk `w / 4`.
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
//! Floating-point codes, E2M1 and E4M3, are of `Order::Float` and lie in the same words; their bits lie apart, so that
//! sign and magnitude are where a mask finds them as those of an f16, or a rotation first: see `WeightLayout::spread`.
//!
//! Scales, u8 zeros and sums of a group's 16 rows stand in the order `0, 8, 1, 9, …, 7, 15`, so that a lane reads its two
//! with one load; u4 zeros as bytes `zero(r) | zero(r + 8) << 4`. In `Order::Int8` a symmetric grid's codes are stored as
//! `q − middle`, signed, except those of progressive weights.

use quant_kernels_cpu::{FloatFormat, KernelError, Layout, ScaleType, Scales, Unpacked, WeightView};

/// Rows of a tile.
pub const TILE_ROWS: usize = 16;
/// Features of a tile.
pub const TILE_K: usize = 128;
/// What sections of a packed matrix are aligned to, in bytes.
pub const SECTION: usize = 256;

/// What the weights are multiplied with, which decides how codes lie within a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// f16 or bf16.
    Float,
    /// Integers of 8 bits.
    Int8,
}

/// Where everything is in a packed matrix.
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
    /// 4 or 8: bits that a code takes.
    code_bits: usize,
    group_size: usize,
    scales: ScaleType,
    /// The zero of every group, or `None` where they are stored.
    middle: Option<u8>,
    /// The format of codes that are no integers.
    float: Option<FloatFormat>,
    order: Order,
    sums: bool,
    /// Where sections begin, in bytes, and the end of the last.
    sections: [usize; 6],
}

/// A section of a packed matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// Codes, tile by tile.
    Codes = 0,
    /// Scales, zeros and sums of groups.
    Parameters = 1,
    /// Scales of rows.
    RowScales = 2,
    /// Zeros of rows.
    RowZeros = 3,
    /// Sums of rows.
    RowSums = 4,
}

impl WeightLayout {
    /// The layout of a view; with `sums` it holds what whole-number activations with a zero need.
    ///
    /// Groups are 32, 64 or 128 features, or a whole row; multiples of 128 where activations are floats or weights are
    /// progressive; of floating-point codes, which are multiplied with floats only, also 16.
    ///
    /// # Errors
    /// As [`Layout::of`]; another group size; a symmetric grid in `Order::Int8` whose zero is more than half of its codes; `sums` of float activations; progressive weights of 8 bits; a symmetric grid
    /// of 4 bits in `Order::Int8` whose rows are one group wider than 131,071 (65,793 with `sums`), for its sums are 16-fold.
    pub fn of(view: &WeightView<'_>, order: Order, sums: bool) -> Result<Self, KernelError> {
        let cpu = Layout::of(view, sums)?;
        let shape = [cpu.n(), cpu.k()];
        if let Some(format) = view.float_format() {
            if order == Order::Int8 {
                view.require_integers()?;
            }
            return Self::from_float_parts(shape, format, cpu.group_size(), cpu.scales());
        }
        Self::from_parts(shape, cpu.code_bits(), cpu.group_size(), cpu.scales(), cpu.middle(), order, sums)
    }

    /// The layout with these properties, for callers that have packed bytes and no view; as [`Layout::from_parts`].
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn from_parts(
        [n, k]: [usize; 2],
        code_bits: usize,
        group_size: usize,
        scales: ScaleType,
        middle: Option<u8>,
        order: Order,
        sums: bool,
    ) -> Result<Self, KernelError> {
        Layout::from_parts([n, k], code_bits, group_size, scales, middle, sums)?;
        let progressive = scales == ScaleType::Progressive;
        if sums && order == Order::Float {
            return Err(KernelError::Scheme("sums of weights for float activations"));
        }
        if progressive && (code_bits != 4 || order == Order::Float) {
            return Err(KernelError::Scheme("progressive weights but w4a8"));
        }
        Self { n, k, code_bits, group_size, scales, middle, float: None, order, sums, sections: [0; 6] }
            .checked()
    }

    /// The layout of codes of a floating-point format, for float activations; as [`Layout::from_float_parts`].
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn from_float_parts(
        [n, k]: [usize; 2],
        format: FloatFormat,
        group_size: usize,
        scales: ScaleType,
    ) -> Result<Self, KernelError> {
        let cpu = Layout::from_float_parts([n, k], format, group_size, scales)?;
        let (code_bits, middle, order) = (cpu.code_bits(), cpu.middle(), Order::Float);
        let (float, sums, sections) = (Some(format), false, [0; 6]);
        Self { n, k, code_bits, group_size, scales, middle, float, order, sums, sections }.checked()
    }

    /// Sections, where these kernels have such groups.
    fn checked(mut self) -> Result<Self, KernelError> {
        let Self { k, code_bits, group_size, middle, order, sums, .. } = self;
        let layout = &self;
        // Codes less a larger one are no signed numbers of as many bits.
        if layout.signed() && middle.is_some_and(|middle| middle > 1 << (code_bits - 1)) {
            return Err(KernelError::Scheme("a symmetric grid for integers whose zero is beyond its middle"));
        }
        let tile_groups = matches!(group_size, 32 | 64 | 128);
        let progressive = self.scales == ScaleType::Progressive;
        let tile_groups = tile_groups || (self.float.is_some() && group_size == 16);
        let repeated = group_size.is_multiple_of(TILE_K) && (order == Order::Float || progressive);
        if !(tile_groups || repeated || layout.row_is_group()) {
            return Err(KernelError::Scheme("a group that is not 32, 64, 128 or a row"));
        }
        if layout.row_is_group() && layout.signed() && code_bits == 4 {
            let activation = if sums { 255 } else { 128 };
            if k > i32::MAX as usize / (16 * 8 * activation) {
                return Err(KernelError::TooLarge("the width of a row"));
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
            when(self.row_is_group() && self.middle.is_none(), Some(rows))?,
            when(self.sums && self.summed_whole(), rows.checked_mul(4))?,
        ];
        let mut sections = [0_usize; 6];
        for (i, size) in sizes.into_iter().enumerate() {
            sections[i + 1] = sections[i].checked_add(size)?.checked_next_multiple_of(SECTION)?;
        }
        isize::try_from(sections[5]).ok().map(|_| sections)
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bits that a code takes: 4, or 8.
    pub fn code_bits(&self) -> usize {
        self.code_bits
    }

    /// Input features that share a scale.
    pub fn group_size(&self) -> usize {
        self.group_size
    }

    /// How scales of groups are stored; those of a row that is one group are `f32` always.
    pub fn scales(&self) -> ScaleType {
        self.scales
    }

    /// The zero of every group, or `None` where each has its own.
    pub fn middle(&self) -> Option<u8> {
        self.middle
    }

    /// The format of codes that are no integers.
    pub fn float_format(&self) -> Option<FloatFormat> {
        self.float
    }

    /// What the weights are multiplied with.
    pub fn order(&self) -> Order {
        self.order
    }

    /// Whether sums of weights are there.
    pub fn has_sums(&self) -> bool {
        self.sums
    }

    /// Whether a row is one group, whose scale stands beside no tile.
    pub fn row_is_group(&self) -> bool {
        self.group_size == self.k && !matches!(self.scales, ScaleType::Progressive | ScaleType::E4m3)
    }

    /// Whether products are summed over all of a row before they become floats.
    pub(crate) fn summed_whole(&self) -> bool {
        self.order == Order::Int8 && (self.row_is_group() || self.scales == ScaleType::Progressive)
    }

    /// Whether codes are stored less the middle.
    pub(crate) fn signed(&self) -> bool {
        self.order == Order::Int8 && self.middle.is_some() && self.scales != ScaleType::Progressive
    }

    /// Blocks of 16 rows.
    pub fn row_blocks(&self) -> usize {
        self.n.div_ceil(TILE_ROWS)
    }

    /// Tiles along `k`.
    pub fn tiles(&self) -> usize {
        self.k.div_ceil(TILE_K)
    }

    /// Bytes of a tile's codes.
    pub fn tile_bytes(&self) -> usize {
        TILE_ROWS * TILE_K * self.code_bits / 8
    }

    /// Groups that a tile has parameters of.
    pub(crate) fn tile_groups(&self) -> usize {
        if self.row_is_group() { 0 } else { TILE_K / self.group_size.min(TILE_K) }
    }

    fn scale_bytes(&self) -> usize {
        match self.scales {
            ScaleType::Progressive | ScaleType::E4m3 | ScaleType::E8m0 => 1,
            ScaleType::F16 | ScaleType::Bf16 => 2,
            ScaleType::F32 => 4,
        }
    }

    fn zeros_at(&self) -> usize {
        self.tile_groups() * TILE_ROWS * self.scale_bytes()
    }

    fn sums_at(&self) -> usize {
        let zeros = if self.middle.is_some() { 0 } else { TILE_ROWS * self.code_bits / 8 };
        self.zeros_at() + self.tile_groups() * zeros
    }

    /// Bytes that stand beside a tile, a multiple of 16.
    pub fn parameter_bytes(&self) -> usize {
        let sums = if self.sums && !self.summed_whole() { 4 * TILE_ROWS } else { 0 };
        (self.sums_at() + self.tile_groups() * sums).next_multiple_of(16)
    }

    /// Where a section begins, in bytes.
    pub fn section(&self, section: Section) -> usize {
        self.sections[section as usize]
    }

    /// Bytes of the whole matrix.
    pub fn bytes(&self) -> usize {
        self.sections[5]
    }

    /// Bits a weight of the matrix, fillers included.
    pub fn bits_per_weight(&self) -> f64 {
        8.0 * self.bytes() as f64 / (self.n as f64 * self.k as f64)
    }

    /// Identifies the order and everything that it depends on: bytes of one layout are never read as those
    /// of another.
    pub fn id(&self) -> u64 {
        let scales = match self.scales {
            ScaleType::F16 => 1,
            ScaleType::Bf16 => 2,
            ScaleType::F32 => 3,
            ScaleType::Progressive => 4,
            ScaleType::E4m3 => 5,
            ScaleType::E8m0 => 6,
        };
        let order = match self.order {
            Order::Float => 1,
            Order::Int8 => 2,
        };
        let middle = self.middle.map_or(0, |m| 1 + u64::from(m));
        let sizes = [self.n, self.k, self.code_bits, self.group_size].map(|s| s as u64);
        let float = self.float.map(|format| match format {
            FloatFormat::E4m3 => 1,
            FloatFormat::E2m1 => 2,
            _ => 0,
        });
        let words =
            [TAG, VERSION].into_iter().chain(sizes).chain([scales, middle, order, u64::from(self.sums)]);
        // Of integers nothing follows.
        let words = words.chain(float);
        // FNV-1a.
        words.flat_map(u64::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }
}

/// Where the value of a row stands among the 16 of its block.
pub(crate) fn pair_order(row: usize) -> usize {
    2 * (row % 8) + row / 8
}

/// "cuda" in letters, so that no layout of another crate has the number.
const TAG: u64 = 0x6164_7563;
/// Grows whenever the order of anything changes.
const VERSION: u64 = 1;

pub mod device;
mod pack;
mod place;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_beside_a_tile() {
        let of = |bits, group, scales, middle, order, sums| {
            let layout =
                WeightLayout::from_parts([32, 256], bits, group, scales, middle, order, sums).unwrap();
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
    fn what_is_no_layout_is_told() {
        let of = |shape, bits, group, scales, middle, order, sums| {
            WeightLayout::from_parts(shape, bits, group, scales, middle, order, sums).unwrap_err()
        };
        let (float, int8) = (Order::Float, Order::Int8);
        let group = KernelError::Scheme("a group that is not 32, 64, 128 or a row");
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
