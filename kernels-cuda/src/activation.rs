//! Quantization of activation rows to 8-bit integers: the variant of `cuda/activation.cu` for a shape, and its launch.
//!
//! The results are defined by `Int8Rows` of [`quant_kernels_cpu`], with codes row by row. For plain rows and for
//! `silu(gate) · up`, codes, scales and sums are bit-identical to that definition. The sum of squares of a norm is
//! added in a different order: with `c = values per thread + 10` sequential additions on the GPU and `k / 64 + 7` on
//! the CPU, each value and each scale is within a relative `δ = ((c + k / 64 + 7) / 2 + 12) · 2⁻²⁴` of the CPU's, and
//! codes differ by at most one.
//!
//! A row's result is bit-identical for any other rows. A row of up to [`HELD_WIDTH`] values is read once; wider rows
//! are read again for each pass.
//!
//! Planning runs on the host and needs neither a device nor CUDA.

use quant_kernels_cpu::KernelError;

use crate::compile::{Source, Variant};
pub use crate::float::Float;
use crate::launch::{Argument, LaunchShape, Region};
use crate::registry::Entry;

static SOURCE: Source = Source {
    name: "activation.cu",
    text: include_str!("../cuda/activation.cu"),
    headers: &[
        ("ptx.cuh", include_str!("../cuda/ptx.cuh")),
        ("gates.cuh", include_str!("../cuda/gates.cuh")),
        ("values.cuh", include_str!("../cuda/values.cuh")),
    ],
};

/// The maximum width of rows that fit the registers of a block.
pub const HELD_WIDTH: usize = 32_768;
/// The maximum width of rows. A block keeps a sum per 32 codes in shared memory, of which every device has at least 48
/// KiB.
pub const MAX_WIDTH: usize = 360_448;

/// The maximum width of rows, threads per block, and values that a thread keeps in registers.
const SHAPES: [[usize; 3]; 6] = [
    [1024, 64, 16],
    [2048, 128, 16],
    [4096, 256, 16],
    [8192, 512, 16],
    [16_384, 512, 32],
    [HELD_WIDTH, 1024, 32],
];
/// Threads per block for wider rows, of which no values are kept.
const WIDE: [usize; 2] = [1024, 0];

/// The values that are quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowSource {
    /// The rows, unmodified.
    Plain,
    /// RMSNorm of the rows, `x · (1 / √(mean x² + ε)) · γ`.
    RmsNorm {
        /// The type of γ.
        weight: Float,
        /// Whether `x` is first added to a residual. The sum is rounded to the type of the rows, stored in the
        /// residual, and normalized instead of `x`.
        residual: bool,
    },
    /// `silu(gate) · up`.
    SiluMul,
}

/// The parameters from which a launch is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ActivationShape {
    /// The values that are quantized.
    pub rows: RowSource,
    /// The type of the values.
    pub element: Float,
    /// Number of rows (tokens). 0 launches nothing.
    pub m: usize,
    /// Values per row: 1 to [`MAX_WIDTH`].
    pub k: usize,
    /// Whether all rows use the same given scale and zero point.
    pub fixed: bool,
    /// Number of features per group whose codes are summed, a multiple of 32; the last group may be shorter.
    pub group: Option<usize>,
    /// Elements between rows of `x`, or of the gate.
    pub x_stride: usize,
    /// Elements between rows of `up`.
    pub up_stride: usize,
    /// Elements between rows of the residual.
    pub residual_stride: usize,
    /// Bytes between rows of codes: a multiple of 16.
    pub code_stride: usize,
    /// Whether addresses and strides of floats are multiples of 16 bytes. Otherwise values are read one at a time.
    pub aligned: bool,
}

impl ActivationShape {
    /// Creates the shape of `m` contiguous rows of `k` values, with a scale per row and no sums per group.
    pub fn new(rows: RowSource, element: Float, m: usize, k: usize) -> Self {
        Self {
            rows,
            element,
            m,
            k,
            fixed: false,
            group: None,
            x_stride: k,
            up_stride: k,
            residual_stride: k,
            code_stride: k.saturating_add(15) / 16 * 16,
            aligned: k.saturating_mul(element.bytes()).is_multiple_of(16),
        }
    }

    /// Plans a launch.
    ///
    /// # Errors
    /// When a length, stride or group is invalid or too large.
    pub fn plan(&self) -> Result<ActivationPlan, KernelError> {
        if self.k == 0 {
            return Err(KernelError::Scheme("the row width must be at least 1, got 0"));
        }
        if self.k > MAX_WIDTH || self.m > i32::MAX as usize {
            return Err(KernelError::TooLarge("the activation buffer"));
        }
        if self.group.is_some_and(|g| g == 0 || !g.is_multiple_of(32) || g > MAX_WIDTH) {
            return Err(KernelError::Scheme("the group size must be a positive multiple of 32"));
        }
        if self.code_stride < self.k || !self.code_stride.is_multiple_of(16) {
            return Err(KernelError::Scheme(
                "the row stride of codes must be a multiple of 16 and at least the row width",
            ));
        }
        for stride in self.float_strides() {
            if stride < self.k {
                return Err(KernelError::Scheme(
                    "the row stride of activations must be at least the row width",
                ));
            }
            if self.aligned && !stride.saturating_mul(self.element.bytes()).is_multiple_of(16) {
                return Err(KernelError::Scheme(
                    "the row stride of activations must be a multiple of 16 bytes",
                ));
            }
        }
        let [threads, held] = block_of(self.k);
        let segments = if self.group.is_some_and(is_general) { self.k.div_ceil(32) * 4 } else { 0 };
        Ok(ActivationPlan {
            variant: self.variant([threads, held]),
            launch: LaunchShape {
                grid: [self.m as u32, 1, 1],
                block: threads as u32,
                shared_bytes: segments as u32,
            },
            shape: *self,
        })
    }

    fn float_strides(&self) -> impl Iterator<Item = usize> {
        let up = (self.rows == RowSource::SiluMul).then_some(self.up_stride);
        let residual =
            matches!(self.rows, RowSource::RmsNorm { residual: true, .. }).then_some(self.residual_stride);
        [Some(self.x_stride), up, residual].into_iter().flatten()
    }

    fn variant(&self, [threads, held]: [usize; 2]) -> Variant {
        let (source, weight) = match self.rows {
            RowSource::Plain => ("PLAIN", self.element),
            RowSource::RmsNorm { weight, residual: false } => ("NORM", weight),
            RowSource::RmsNorm { weight, residual: true } => ("NORM_RESIDUAL", weight),
            RowSource::SiluMul => ("SILU_MUL", self.element),
        };
        let group = self.group.map_or(0, |g| if is_general(g) { 1 } else { g });
        Variant {
            source: &SOURCE,
            kernel: "activation",
            defines: vec![
                ("SOURCE", source.to_owned()),
                ("ELEMENT", self.element.name().to_owned()),
                ("WEIGHT", weight.name().to_owned()),
                ("STATIC", usize::from(self.fixed).to_string()),
                ("GROUP", group.to_string()),
                ("ALIGNED", usize::from(self.aligned).to_string()),
                ("THREADS", threads.to_string()),
                ("HELD", held.to_string()),
            ],
        }
    }
}

/// Whether the codes of a group are summed through shared memory.
fn is_general(group: usize) -> bool {
    ![32, 64, 128].contains(&group)
}

fn block_of(k: usize) -> [usize; 2] {
    SHAPES.iter().find(|shape| k <= shape[0]).map_or(WIDE, |&[_, threads, held]| [threads, held])
}

/// A scale and zero point for all rows: `x ≈ scale · (code − zero)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FixedScale {
    /// The scale: positive and finite, with a finite inverse.
    pub scale: f32,
    /// The zero point, −128 to 127.
    pub zero: i8,
}

impl FixedScale {
    pub(crate) fn is_valid(&self) -> bool {
        self.scale > 0.0 && self.scale.is_finite() && (1.0 / self.scale).is_finite()
    }
}

/// Device addresses. Regions that the shape does not use may be [`Region::NONE`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ActivationArguments {
    /// `[m, k]`: activations, or the gate.
    pub x: Region,
    /// `[m, k]`, for `silu(gate) · up`.
    pub up: Region,
    /// `[m, k]`, read and written.
    pub residual: Region,
    /// `[k]`: γ, for norms.
    pub weight: Region,
    /// ε, for norms; positive and finite.
    pub eps: f32,
    /// The static scale; required if the shape has `fixed`.
    pub fixed: Option<FixedScale>,
    /// i8 `[m, k]`, with rows `code_stride` bytes apart; bytes between rows are left unchanged.
    pub codes: Region,
    /// f32 `[m]`: the scale of each row.
    pub scales: Region,
    /// i32 `[m]`: the sum of each row's codes; [`Region::NONE`] if they are not needed.
    pub row_sums: Region,
    /// i32 `[m, ⌈k / group⌉]`, if the shape has groups.
    pub group_sums: Region,
    /// u32: the number of rows if it is known on the device only, at most `m`. Rows beyond it are not read, and have no
    /// results. [`Region::NONE`]: `m`.
    pub count: Region,
}

/// A planned launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActivationPlan {
    /// The kernel.
    pub variant: Variant,
    /// Blocks, threads and shared memory.
    pub launch: LaunchShape,
    shape: ActivationShape,
}

impl ActivationPlan {
    /// The arguments of the kernel, in order.
    ///
    /// # Errors
    /// When a region is too small or misaligned for its type, or a number is invalid.
    pub fn arguments(&self, at: &ActivationArguments) -> Result<[Argument; 18], KernelError> {
        let ActivationShape { rows, element, m, k, .. } = self.shape;
        let floats = if self.shape.aligned { 16 } else { element.bytes() };
        let matrix = |stride: usize, bytes: usize| -> Result<usize, KernelError> {
            let last = m.saturating_sub(1).checked_mul(stride).and_then(|n| n.checked_add(k.min(m * k)));
            last.and_then(|n| n.checked_mul(bytes)).ok_or(KernelError::TooLarge("the activation buffer"))
        };
        at.x.require("activations", matrix(self.shape.x_stride, element.bytes())?, floats)?;
        at.codes.require("codes", matrix(self.shape.code_stride, 1)?, 16)?;
        at.scales.require("scales", m * 4, 4)?;
        if at.row_sums != Region::NONE {
            at.row_sums.require("row sums", m * 4, 4)?;
        }
        if at.count != Region::NONE {
            at.count.require("the number of rows", 4, 4)?;
        }
        if let Some(group) = self.shape.group {
            at.group_sums.require("group sums", m * k.div_ceil(group) * 4, 4)?;
        }
        match rows {
            RowSource::Plain => {}
            RowSource::SiluMul => {
                at.up.require("up", matrix(self.shape.up_stride, element.bytes())?, floats)?
            }
            RowSource::RmsNorm { weight, residual } => {
                let align = if self.shape.aligned { 16 } else { weight.bytes() };
                at.weight.require("norm weight", k * weight.bytes(), align)?;
                if residual {
                    let bytes = matrix(self.shape.residual_stride, element.bytes())?;
                    at.residual.require("residual", bytes, floats)?;
                }
                if !(at.eps > 0.0 && at.eps.is_finite()) {
                    return Err(KernelError::Scheme("the epsilon of the norm must be positive and finite"));
                }
            }
        }
        let fixed = match (self.shape.fixed, at.fixed) {
            (false, _) => FixedScale { scale: 1.0, zero: 0 },
            (true, Some(by)) if by.is_valid() => by,
            (true, _) => {
                return Err(KernelError::Scheme(
                    "the activation scale and its reciprocal must be positive and finite",
                ));
            }
        };
        Ok([
            Argument::U64(at.x.address),
            Argument::U64(at.up.address),
            Argument::U64(at.residual.address),
            Argument::U64(at.weight.address),
            Argument::U64(at.codes.address),
            Argument::U64(at.scales.address),
            Argument::U64(at.row_sums.address),
            Argument::U64(at.group_sums.address),
            Argument::U64(self.shape.x_stride as u64),
            Argument::U64(self.shape.up_stride as u64),
            Argument::U64(self.shape.residual_stride as u64),
            Argument::U64(self.shape.code_stride as u64),
            Argument::U32(k as u32),
            Argument::U32(self.shape.group.unwrap_or(0) as u32),
            Argument::F32(at.eps),
            Argument::F32(fixed.scale),
            Argument::U32(i32::from(fixed.zero) as u32),
            Argument::U64(at.count.address),
        ])
    }
}

/// The variants that the tests compile for the architectures: every source and type, with some of the other options.
pub fn variants() -> Vec<Entry> {
    use Float::{Bf16, F16, F32};
    let mut kinds = Vec::new();
    for element in [F32, F16, Bf16] {
        kinds.extend([(RowSource::Plain, element), (RowSource::SiluMul, element)]);
        let weights = if element == F32 { vec![F32] } else { vec![element, F32] };
        for (weight, residual) in weights.into_iter().flat_map(|w| [(w, false), (w, true)]) {
            kinds.push((RowSource::RmsNorm { weight, residual }, element));
        }
    }
    let mut others = Vec::new();
    for group in [None, Some(32), Some(64), Some(128), Some(96)] {
        for fixed in [false, true] {
            others.extend([true, false].map(|aligned| (group, fixed, aligned)));
        }
    }
    // Each kind gets two neighbouring widths, and one that does not fit the registers, with different options.
    let widths: Vec<usize> = SHAPES.iter().map(|shape| shape[0]).chain([HELD_WIDTH + 1]).collect();
    let of_kind = |i: usize| [2 * i, 2 * i + 1, widths.len() - 1].map(|at| widths[at % widths.len()]);
    let all = kinds.iter().enumerate().flat_map(|(i, kind)| of_kind(i).map(|k| (kind, k)));
    let shapes = all.zip(others.iter().cycle()).map(|((&(rows, element), k), &(group, fixed, aligned))| {
        ActivationShape { group, fixed, aligned, ..ActivationShape::new(rows, element, 1, k) }
    });
    let mut entries: Vec<Entry> = Vec::new();
    for entry in shapes.map(|shape| entry(&shape)) {
        if !entries.contains(&entry) {
            entries.push(entry);
        }
    }
    entries
}

fn entry(shape: &ActivationShape) -> Entry {
    let [threads, held] = block_of(shape.k);
    let mut instructions = vec!["IDP.4A.S8.S8", "BAR.SYNC", "REDUX.MAX"];
    if shape.group.is_some() || matches!(shape.rows, RowSource::RmsNorm { .. }) {
        instructions.push("SHFL.BFLY");
    }
    if shape.aligned {
        instructions.push("LDG.E.128");
    }
    instructions.extend(match shape.rows {
        RowSource::Plain => None,
        RowSource::RmsNorm { .. } => Some("MUFU.RSQ"),
        RowSource::SiluMul => Some("MUFU.RCP"),
    });
    Entry {
        family: "activation",
        variant: shape.variant([threads, held]),
        // At least half of a multiprocessor's maximum number of threads can then be resident.
        register_ceiling: if held == 16 { 48 } else { 64 },
        spill_bytes: 0,
        only_on: None,
        instructions,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(address: u64, bytes: usize) -> Region {
        Region { address, bytes: bytes as u64 }
    }

    #[test]
    fn a_block_holds_its_row() {
        for k in [1, 31, 1024, 1025, 4096, 8192, 8193, 14_336, 28_672, 32_768, 32_769, MAX_WIDTH] {
            let [threads, held] = block_of(k);
            assert!(held == 0 && k > HELD_WIDTH || threads * held >= k, "{k}");
            assert!(threads.is_power_of_two() && (64..=1024).contains(&threads));
        }
    }

    #[test]
    fn the_variant_does_not_depend_on_the_number_of_rows() {
        for k in [5, 4096, 14_336, 53_248] {
            let rows = RowSource::RmsNorm { weight: Float::F32, residual: true };
            let of = |m| ActivationShape::new(rows, Float::Bf16, m, k).plan().unwrap();
            let (one, many) = (of(1), of(4000));
            assert_eq!(one.variant, many.variant);
            assert_eq!((one.launch.grid, many.launch.grid), ([1, 1, 1], [4000, 1, 1]));
            assert_eq!(one.launch.block, many.launch.block);
        }
    }

    #[test]
    fn every_choice_is_among_the_variants() {
        let entries = variants();
        for (name, values) in [
            ("SOURCE", &["PLAIN", "NORM", "NORM_RESIDUAL", "SILU_MUL"][..]),
            ("ELEMENT", &["F32", "F16", "BF16"]),
            ("WEIGHT", &["F32", "F16", "BF16"]),
            ("STATIC", &["0", "1"]),
            ("GROUP", &["0", "1", "32", "64", "128"]),
            ("ALIGNED", &["0", "1"]),
            ("THREADS", &["64", "128", "256", "512", "1024"]),
            ("HELD", &["0", "16", "32"]),
        ] {
            for value in values {
                let has = |e: &Entry| e.variant.defines.iter().any(|(n, v)| *n == name && v == value);
                assert!(entries.iter().any(has), "{name}={value}");
            }
        }
        for (i, entry) in entries.iter().enumerate() {
            assert!(!entries[..i].iter().any(|e| e.variant == entry.variant), "{} twice", entry.variant);
        }
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let good = ActivationShape::new(RowSource::SiluMul, Float::F16, 3, 4096);
        assert!(good.plan().is_ok());
        for bad in [
            ActivationShape { k: 0, ..good },
            ActivationShape { k: MAX_WIDTH + 1, ..good },
            ActivationShape { m: usize::MAX, ..good },
            ActivationShape { group: Some(0), ..good },
            ActivationShape { group: Some(48), ..good },
            ActivationShape { code_stride: 4095, ..good },
            ActivationShape { code_stride: 4104, ..good },
            ActivationShape { x_stride: 4095, ..good },
            ActivationShape { x_stride: 4097, ..good },
            ActivationShape { up_stride: 4097, ..good },
        ] {
            assert!(bad.plan().is_err(), "{bad:?}");
        }
        assert!(ActivationShape { residual_stride: 0, ..good }.plan().is_ok());
        assert!(ActivationShape { x_stride: 4097, aligned: false, ..good }.plan().is_ok());
        assert_eq!(ActivationShape { m: 0, ..good }.plan().unwrap().launch.grid[0], 0);
    }

    #[test]
    fn regions_and_numbers_are_checked() {
        let shape = ActivationShape {
            group: Some(128),
            fixed: true,
            x_stride: 320,
            ..ActivationShape::new(
                RowSource::RmsNorm { weight: Float::F32, residual: true },
                Float::Bf16,
                3,
                304,
            )
        };
        let plan = shape.plan().unwrap();
        let good = ActivationArguments {
            x: region(1024, (2 * 320 + 304) * 2),
            up: Region::NONE,
            residual: region(4096, 3 * 304 * 2),
            weight: region(8192, 304 * 4),
            eps: 1e-6,
            fixed: Some(FixedScale { scale: 0.5, zero: -3 }),
            codes: region(16, 3 * 304),
            scales: region(4, 12),
            row_sums: region(4, 12),
            group_sums: region(8, 3 * 3 * 4),
            count: Region::NONE,
        };
        let arguments = plan.arguments(&good).unwrap();
        assert_eq!(arguments[12..14], [Argument::U32(304), Argument::U32(128)]);
        assert_eq!(arguments[16..], [Argument::U32(-3_i32 as u32), Argument::U64(0)]);
        let counted = plan.arguments(&ActivationArguments { count: region(4, 4), ..good }).unwrap();
        assert_eq!(counted[17], Argument::U64(4));
        assert!(plan.arguments(&ActivationArguments { row_sums: Region::NONE, ..good }).is_ok());
        let smaller = |r: Region| Region { bytes: r.bytes - 1, ..r };
        let moved = |r: Region| Region { address: r.address + 8, ..r };
        for bad in [
            ActivationArguments { x: smaller(good.x), ..good },
            ActivationArguments { x: moved(good.x), ..good },
            ActivationArguments { residual: smaller(good.residual), ..good },
            ActivationArguments { weight: smaller(good.weight), ..good },
            ActivationArguments { weight: Region::NONE, ..good },
            ActivationArguments { codes: smaller(good.codes), ..good },
            ActivationArguments { codes: moved(good.codes), ..good },
            ActivationArguments { scales: smaller(good.scales), ..good },
            ActivationArguments { row_sums: smaller(good.row_sums), ..good },
            ActivationArguments { group_sums: smaller(good.group_sums), ..good },
            ActivationArguments { count: region(4, 3), ..good },
            ActivationArguments { count: region(2, 4), ..good },
            ActivationArguments { eps: 0.0, ..good },
            ActivationArguments { eps: f32::NAN, ..good },
            ActivationArguments { fixed: None, ..good },
            ActivationArguments { fixed: Some(FixedScale { scale: 1e-40, zero: 0 }), ..good },
        ] {
            assert!(plan.arguments(&bad).is_err(), "{bad:?}");
        }
    }
}
