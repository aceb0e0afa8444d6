//! Planned launches: grid, workspace and arguments.

use quant_kernels_cpu::KernelError;

use super::scheme::{InputType, KernelScheme, Output};
use super::variant::{BLOCK_ROWS, Chunks, LinearVariant, Parts, PlanLimits};
use crate::launch::{Argument, LaunchShape, Region};
use crate::layout::{SECTION, Section, WeightLayout};

/// A planned launch.
///
/// ```
/// use quant_kernels_cpu::WeightView;
/// use quant_kernels_cuda::compile::GpuArchitecture;
/// use quant_kernels_cuda::layout::{Order, WeightLayout};
/// use quant_kernels_cuda::linear::{InputType, LinearPlan, Output, PlanLimits};
///
/// # let (codes, scales) = (vec![9; 4096 * 128], vec![0.5; 4096]);
/// # let view = WeightView::new([4096, 128], 4, 128, &codes, &scales, None)?;
/// # let layout = WeightLayout::of(&view, Order::Float, false)?;
/// // For one token on an H100 or H200; needs no device.
/// let device = PlanLimits::of(GpuArchitecture::Sm90);
/// let plan = LinearPlan::new(&layout, InputType::Bf16, Output::Bf16, 1, &device)?;
/// println!("{} with {} bytes of workspace", plan.work.variant.name(), plan.work.workspace_bytes);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearPlan {
    /// The kernel, its blocks and its buffers.
    pub work: LinearWork,
    layout: WeightLayout,
    m: usize,
}

/// The kernel of a plan, its blocks, and the sizes of the buffers in which these combine chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinearWork {
    /// The kernel.
    pub variant: LinearVariant,
    /// Blocks, threads and shared memory. No blocks if there are no tokens. For experts, the grid is for the largest
    /// number of tiles of any routing; blocks without a tile return at once.
    pub launch: LaunchShape,
    /// Number of chunks of `k`.
    pub chunks: u32,
    /// The size in bytes of the tickets, by which blocks that share a tile of results find the last one. They must be 0
    /// before a launch, which resets them to 0.
    pub ticket_bytes: usize,
    /// The size in bytes of the workspace, in which these blocks combine their sums. Its initial contents do not
    /// matter.
    pub workspace_bytes: usize,
}

/// Device addresses. Regions that the plan does not use may be [`Region::NONE`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearArguments {
    /// The packed matrix with all sections.
    pub weight: Region,
    /// f16, bf16 or i8 `[m, k]`, rows `x_stride` apart.
    pub x: Region,
    /// Elements between rows of activations: at least `k`. The distance in bytes must be a multiple of 16.
    pub x_stride: usize,
    /// f32 `[m]`, for 8-bit activations.
    pub x_scales: Region,
    /// The zero point of 8-bit activations, −128 to 127; 0 if the layout has no sums.
    pub x_zero: i32,
    /// f32 `[n]`, if there is a bias.
    pub bias: Region,
    /// f16, bf16 or f32 `[m, n]`, rows `out_stride` apart.
    pub out: Region,
    /// Elements between rows of results, at least `n`.
    pub out_stride: usize,
    /// The tickets, 0 before the launch, which resets them to 0. Launches that run one after another may share tickets,
    /// so an engine allocates the maximum over its plans once per stream. Concurrent launches must not share them.
    pub tickets: Region,
    /// The workspace, which may be shared like the tickets.
    pub workspace: Region,
}

/// The memory traffic of a launch in bytes: each necessary access is counted once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinearTraffic {
    /// The packed matrix including padding, read once.
    pub weights: usize,
    /// Activations and their scales, read from memory once.
    pub activations: usize,
    /// Results, written once.
    pub results: usize,
    /// Sums of chunks, written once and read once, usually in the L2 cache. Without tickets.
    pub workspace: usize,
}

impl LinearTraffic {
    /// The total traffic.
    pub fn total(&self) -> usize {
        self.weights + self.activations + self.results + self.workspace
    }
}

impl LinearPlan {
    /// Plans a product with `m` tokens.
    ///
    /// # Errors
    /// When weights and activations do not match, or the grid or an index exceeds the range of the kernel's integers.
    pub fn new(
        layout: &WeightLayout,
        activation: InputType,
        output: Output,
        m: usize,
        device: &PlanLimits,
    ) -> Result<Self, KernelError> {
        let scheme = KernelScheme::new(layout, activation, output)?;
        let variant = LinearVariant::choose(scheme, [layout.n(), layout.k()], m, device);
        Self::of_variant(variant, layout, m)
    }

    /// Plans a product with `m` tokens and a given variant.
    ///
    /// # Errors
    /// See [`new`](Self::new); also when the variant does not match the layout.
    pub fn of_variant(variant: LinearVariant, layout: &WeightLayout, m: usize) -> Result<Self, KernelError> {
        if variant.experts {
            return Err(KernelError::Scheme("the kernel variant is for the experts of a layer"));
        }
        let work = LinearWork::new(variant, layout, m, m.div_ceil(variant.shape.tokens()))?;
        Ok(Self { work, layout: *layout, m })
    }

    /// The traffic of a launch, without a bias.
    pub fn traffic(&self) -> LinearTraffic {
        let (n, k) = (self.layout.n(), self.layout.k());
        let scheme = &self.work.variant.scheme;
        let scales = if scheme.is_float() { 0 } else { 4 };
        let others = if self.work.workspace_bytes > 0 { self.work.chunks as usize - 1 } else { 0 };
        LinearTraffic {
            weights: self.layout.bytes(),
            activations: self.m * (k * scheme.activation_bytes() + scales),
            results: self.m * n * scheme.output_bytes(),
            workspace: 2 * others * self.m * n.next_multiple_of(BLOCK_ROWS) * 4,
        }
    }

    /// The arguments of the kernel, in order.
    ///
    /// # Errors
    /// When a region is too small or misaligned for its type, or a stride or zero point is invalid.
    pub fn arguments(&self, at: &LinearArguments) -> Result<[Argument; 19], KernelError> {
        let (layout, m) = (&self.layout, self.m);
        let (n, k) = (layout.n(), layout.k());
        let operands = Operands {
            x: at.x,
            x_stride: at.x_stride,
            x_scales: at.x_scales,
            x_zero: at.x_zero,
            out: at.out,
            out_stride: at.out_stride,
        };
        let [x_stride, out_stride] = operands.check(&self.work.variant, layout, m, m)?;
        at.weight.require("packed weights", layout.bytes(), SECTION)?;
        at.tickets.require("tickets", self.work.ticket_bytes, 256)?;
        at.workspace.require("workspace", self.work.workspace_bytes, 256)?;
        if at.bias != Region::NONE {
            at.bias.require("bias", 4 * n, 4)?;
        }
        let section = |s| Argument::U64(at.weight.address + layout.section(s) as u64);
        Ok([
            section(Section::Codes),
            section(Section::Parameters),
            section(Section::RowScales),
            section(Section::RowZeros),
            section(Section::RowSums),
            Argument::U64(at.x.address),
            Argument::U64(at.x_scales.address),
            Argument::U64(at.bias.address),
            Argument::U64(at.out.address),
            Argument::U64(at.workspace.address),
            Argument::U64(at.tickets.address),
            Argument::U32(m as u32),
            Argument::U32(n as u32),
            Argument::U32(k as u32),
            Argument::U32(x_stride),
            Argument::U32(out_stride),
            Argument::U32(self.work.chunks),
            Argument::U32(u32::from(layout.zero_point().unwrap_or(0))),
            Argument::U32(at.x_zero as u32),
        ])
    }
}

impl LinearWork {
    /// Plans a product with `m` tokens, in at most `token_tiles` tiles of tokens.
    ///
    /// # Errors
    /// When the variant is for several chunks of `k` and there is one, or the grid or an index exceeds the range of the
    /// kernel's integers.
    pub(super) fn new(
        variant: LinearVariant,
        layout: &WeightLayout,
        m: usize,
        token_tiles: usize,
    ) -> Result<Self, KernelError> {
        let (n, k) = (layout.n(), layout.k());
        let small = |value: usize, max: usize, what| {
            if value <= max { Ok(value as u32) } else { Err(KernelError::TooLarge(what)) }
        };
        // The kernel's 32-bit indices can exceed the end by up to one block.
        let max = i32::MAX as usize / 2 - 1024;
        small(k, max, "the number of input features")?;
        small(m, max, "the number of tokens")?;
        // Blocks are numbered in bands of eight token tiles, so an index can reach eight times the number of output
        // features.
        small(n, max / 8, "the number of output features")?;
        let Parts { chunks } = Parts::of([n, k]);
        if variant.chunks != Chunks::Blocks && chunks == 1 {
            return Err(KernelError::Scheme(
                "the kernel variant is for several chunks of k, and there is one",
            ));
        }
        let split = if variant.chunks == Chunks::Blocks { chunks } else { 1 };
        let tiles = n
            .div_ceil(variant.features())
            .checked_mul(token_tiles)
            .ok_or(KernelError::TooLarge("the grid"))?;
        let launch = LaunchShape {
            grid: [small(tiles, i32::MAX as usize, "the grid")?, split as u32, 1],
            block: variant.shape.threads() as u32,
            shared_bytes: variant.shared_bytes() as u32,
        };
        let (mut ticket_bytes, mut workspace_bytes) = (0, 0);
        if split > 1 {
            let large = KernelError::TooLarge("the workspace");
            ticket_bytes = tiles.checked_mul(8).ok_or(large.clone())?;
            let partials = tiles.checked_mul(split).and_then(|t| t.checked_mul(variant.partial_bytes()));
            workspace_bytes = partials.ok_or(large)?;
        }
        Ok(Self { variant, launch, chunks: chunks as u32, ticket_bytes, workspace_bytes })
    }
}

/// The regions of activations and results.
pub(super) struct Operands {
    pub(super) x: Region,
    pub(super) x_stride: usize,
    pub(super) x_scales: Region,
    pub(super) x_zero: i32,
    pub(super) out: Region,
    pub(super) out_stride: usize,
}

impl Operands {
    /// Checks the regions of `tokens` rows of activations and `rows` rows of results. Returns the strides.
    ///
    /// # Errors
    /// When a region is too small or misaligned, or a stride or the zero point is invalid.
    pub(super) fn check(
        &self,
        variant: &LinearVariant,
        layout: &WeightLayout,
        tokens: usize,
        rows: usize,
    ) -> Result<[u32; 2], KernelError> {
        let (n, k) = (layout.n(), layout.k());
        let matrix = |m: usize, stride: usize, width: usize, bytes: usize, what| {
            let last =
                m.saturating_sub(1).checked_mul(stride).and_then(|s| s.checked_add(width.min(m * width)));
            last.and_then(|elements| elements.checked_mul(bytes)).ok_or(KernelError::TooLarge(what))
        };
        let stride = |stride: usize, min: usize, what| match u32::try_from(stride) {
            Ok(short) if stride >= min => Ok(short),
            _ => Err(KernelError::Mismatch { what, expected: min, got: stride }),
        };
        let each = variant.scheme.activation_bytes();
        let x_stride = stride(self.x_stride, k, "the row stride of activations must be at least")?;
        if !(self.x_stride * each).is_multiple_of(16) {
            return Err(KernelError::Scheme("the row stride of activations must be a multiple of 16 bytes"));
        }
        let out_stride = stride(self.out_stride, n, "the row stride of outputs must be at least")?;
        let x_bytes = matrix(tokens, self.x_stride, k, each, "the activation buffer")?;
        self.x.require("activations", x_bytes, 16)?;
        let out = variant.scheme.output_bytes();
        self.out.require("outputs", matrix(rows, self.out_stride, n, out, "the output buffer")?, out)?;
        if !variant.scheme.is_float() {
            self.x_scales.require("activation scales", 4 * tokens, 4)?;
        }
        if !(-128..=127).contains(&self.x_zero) || (self.x_zero != 0 && !layout.has_sums()) {
            return Err(KernelError::Scheme(
                "an activation zero point must fit in 8 bits, and needs weights that were packed with sums",
            ));
        }
        Ok([x_stride, out_stride])
    }
}

#[cfg(test)]
mod tests {
    use quant_kernels_cpu::ScaleType;

    use super::*;
    use crate::compile::GpuArchitecture;
    use crate::layout::Order;

    fn plan(n: usize, k: usize, m: usize) -> Result<LinearPlan, KernelError> {
        let layout = WeightLayout::from_parts([n, k], 4, 128, ScaleType::F16, None, Order::Float, false)?;
        let device = PlanLimits::of(GpuArchitecture::Sm90);
        LinearPlan::new(&layout, InputType::F16, Output::F16, m, &device)
    }

    #[test]
    fn chunks_belong_to_the_weights() {
        for m in [1, 7, 16, 100, 5000] {
            for (n, k, chunks) in [
                (4096, 4096, 8),
                (4096, 2048, 4),
                (6144, 4096, 4),
                (8192, 28_672, 4),
                (12_288, 4096, 2),
                (28_672, 4096, 1),
            ] {
                let plan = plan(n, k, m).unwrap();
                assert_eq!((Parts::of([n, k]).chunks, plan.work.chunks as usize), (chunks, chunks));
            }
        }
        // No chunk is ever empty.
        for tiles in 1..400 {
            for n in [1, 1000, 4096, 9000, 20_000, 40_000] {
                let parts = Parts::of([n, 128 * tiles]);
                let length = parts.chunk_tiles(128 * tiles);
                assert!((1..=8).contains(&parts.chunks), "{tiles} {n}");
                assert!((parts.chunks - 1) * length < tiles && parts.chunks * length >= tiles, "{tiles} {n}");
            }
        }
    }

    #[test]
    fn few_tokens_take_a_workspace_and_many_none() {
        let few = plan(4096, 4096, 3).unwrap();
        assert_eq!((few.work.launch.grid, few.work.launch.block), ([32, 8, 1], 128));
        assert_eq!((few.work.ticket_bytes, few.work.workspace_bytes), (8 * 32, 8 * 4096 * 8 * 4));
        let many = plan(4096, 4096, 1000).unwrap();
        assert_eq!(many.work.variant.chunks, Chunks::Shared);
        assert_eq!((many.work.launch.grid, many.work.workspace_bytes), ([32 * 16, 1, 1], 0));
        assert_eq!(plan(4096, 4096, 0).unwrap().work.launch.grid[0], 0);
    }

    #[test]
    fn variants_for_several_chunks_need_them() {
        let (cut, whole) = (plan(4096, 4096, 3).unwrap(), plan(57_344, 4096, 3).unwrap());
        assert!(LinearPlan::of_variant(cut.work.variant, &cut.layout, 3).is_ok());
        for chunks in [Chunks::Blocks, Chunks::Registers, Chunks::Shared] {
            let variant = LinearVariant { chunks, ..cut.work.variant };
            assert!(LinearPlan::of_variant(variant, &cut.layout, 3).is_ok(), "{chunks:?}");
            let is_split = chunks == Chunks::Blocks;
            assert_eq!(LinearPlan::of_variant(variant, &whole.layout, 3).is_ok(), is_split, "{chunks:?}");
        }
    }

    #[test]
    fn too_large_values_are_reported() {
        assert!(matches!(plan(4096, 4096, usize::MAX), Err(KernelError::TooLarge(_))));
        assert!(matches!(plan(4096, 4096, 1 << 31), Err(KernelError::TooLarge(_))));
        assert!(matches!(plan(1 << 28, 128, 1), Err(KernelError::TooLarge(_))));
        assert!(matches!(plan(16, 1 << 31, 1), Err(KernelError::TooLarge(_))));
    }

    #[test]
    fn misfits_are_reported() {
        let plan = plan(4096, 4096, 3).unwrap();
        let region = |address, bytes: usize| Region { address, bytes: bytes as u64 };
        let good = LinearArguments {
            weight: region(0x1000, plan.layout.bytes()),
            x: region(0x10, 3 * 8192),
            x_stride: 4096,
            x_scales: Region::NONE,
            x_zero: 0,
            bias: Region::NONE,
            out: region(0x2, 3 * 8192),
            out_stride: 4096,
            tickets: region(0x100, plan.work.ticket_bytes),
            workspace: region(0x200, plan.work.workspace_bytes),
        };
        let arguments = plan.arguments(&good).unwrap();
        assert_eq!(arguments[1], Argument::U64(0x1000 + 4096 * 4096 / 2));
        assert_eq!((arguments[9], arguments[10]), (Argument::U64(0x200), Argument::U64(0x100)));
        let bad = [
            LinearArguments { weight: region(0x1000, plan.layout.bytes() - 1), ..good },
            LinearArguments { weight: region(0x1010, plan.layout.bytes()), ..good },
            LinearArguments { x: region(0x10, 3 * 8192 - 1), ..good },
            LinearArguments { x: region(0x8, 3 * 8192), ..good },
            LinearArguments { x_stride: 4095, ..good },
            LinearArguments { x_stride: 4100, x: region(0x10, 4 * 8192), ..good },
            LinearArguments { x_zero: 3, ..good },
            LinearArguments { bias: region(0x10, 4), ..good },
            LinearArguments { out: region(0x2, 8192), ..good },
            LinearArguments { out_stride: 4000, ..good },
            LinearArguments { tickets: Region::NONE, ..good },
            LinearArguments { tickets: region(0x100, plan.work.ticket_bytes - 1), ..good },
            LinearArguments { workspace: Region::NONE, ..good },
            LinearArguments { workspace: region(0x210, plan.work.workspace_bytes), ..good },
            LinearArguments { workspace: region(u64::MAX - 255, plan.work.workspace_bytes), ..good },
            LinearArguments { weight: region(u64::MAX - 255, plan.layout.bytes()), ..good },
        ];
        for (i, bad) in bad.iter().enumerate() {
            assert!(plan.arguments(bad).is_err(), "{i}");
        }
    }
}
