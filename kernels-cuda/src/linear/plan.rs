//! A launch: grid, workspace and arguments.

use quant_kernels_cpu::KernelError;

use super::scheme::{Activation, Output, ProductScheme};
use super::variant::{BLOCK_ROWS, LinearLimits, LinearVariant, Parts};
use crate::launch::{Argument, LaunchShape, Region};
use crate::layout::{SECTION, Section, WeightLayout};

/// A launch, settled.
///
/// ```
/// use quant_kernels_cpu::WeightView;
/// use quant_kernels_cuda::compile::Architecture;
/// use quant_kernels_cuda::layout::{Order, WeightLayout};
/// use quant_kernels_cuda::linear::{Activation, LinearLimits, LinearPlan, Output};
///
/// # let (codes, scales) = (vec![9; 4096 * 128], vec![0.5; 4096]);
/// # let view = WeightView::new([4096, 128], 4, 128, &codes, &scales, None)?;
/// # let layout = WeightLayout::of(&view, Order::Float, false)?;
/// // For one token on an H100 or H200; needs no device.
/// let device = LinearLimits::of(Architecture::Sm90);
/// let plan = LinearPlan::new(&layout, Activation::Bf16, Output::Bf16, 1, &device)?;
/// println!("{} with {} bytes of workspace", plan.variant.name(), plan.workspace_bytes);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearPlan {
    /// The kernel.
    pub variant: LinearVariant,
    /// Blocks, threads, shared memory. No blocks where there are no tokens.
    pub launch: LaunchShape,
    /// Chunks of `k`.
    pub chunks: u32,
    /// Bytes of tickets, by which blocks that share a tile of results know who is last: zero before a launch, and after it.
    pub ticket_bytes: usize,
    /// Bytes of the workspace, in which they meet. What it holds before does not matter.
    pub workspace_bytes: usize,
    layout: WeightLayout,
    m: usize,
}

/// Where things are on the device. What the plan does not ask for is [`Region::NONE`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearArguments {
    /// The packed matrix, all sections.
    pub weight: Region,
    /// f16, bf16 or i8 `[m, k]`, rows `x_stride` apart.
    pub x: Region,
    /// Elements between rows of activations: `k` or more, a multiple of 16 bytes.
    pub x_stride: usize,
    /// f32 `[m]`, of activations of 8 bits.
    pub x_scales: Region,
    /// The zero of activations of 8 bits, −128 to 127; 0 where the layout has no sums.
    pub x_zero: i32,
    /// f32 `[n]`, where there is a bias.
    pub bias: Region,
    /// f16, bf16 or f32 `[m, n]`, rows `out_stride` apart.
    pub out: Region,
    /// Elements between rows of results, `n` or more.
    pub out_stride: usize,
    /// As many bytes as the plan says, or more: zero before, and left so. Launches of any plans of this crate, one after the other,
    /// share them, so an engine allocates the most of its plans once for each stream. Launches that may run at the same time do not.
    pub tickets: Region,
    /// As many bytes as the plan says, or more. Shared as the tickets are.
    pub workspace: Region,
}

/// Bytes that a launch moves, each as often as it must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinearTraffic {
    /// Of the packed matrix, fillers included; read once.
    pub weights: usize,
    /// Activations and their scales, read once from memory; every block reads its part again, from the L2 cache.
    pub activations: usize,
    /// Written once; with the bias.
    pub results: usize,
    /// Sums of chunks, written once and read once, which a device's L2 cache holds if it has room. All blocks of a tile
    /// leave theirs but the last, and only those of tokens that are there. Tickets, 8 bytes a tile of results, are left out.
    pub workspace: usize,
}

impl LinearTraffic {
    /// All of them.
    pub fn total(&self) -> usize {
        self.weights + self.activations + self.results + self.workspace
    }
}

impl LinearPlan {
    /// Plans `m` tokens.
    ///
    /// # Errors
    /// When weights and activations do not belong together, or the grid or an index goes beyond what the kernel counts
    /// with.
    pub fn new(
        layout: &WeightLayout,
        activation: Activation,
        output: Output,
        m: usize,
        device: &LinearLimits,
    ) -> Result<Self, KernelError> {
        let scheme = ProductScheme::new(layout, activation, output)?;
        let variant = LinearVariant::choose(scheme, [layout.n(), layout.k()], m, device);
        Self::of_variant(variant, layout, m)
    }

    /// Plans `m` tokens with a given variant, of the scheme of the layout.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_variant(variant: LinearVariant, layout: &WeightLayout, m: usize) -> Result<Self, KernelError> {
        let (n, k) = (layout.n(), layout.k());
        let small = |value: usize, most: usize, what| {
            if value <= most { Ok(value as u32) } else { Err(KernelError::TooLarge(what)) }
        };
        // Indices of features and tokens, and bytes of a row, are of 32 bits in the kernel, and reach a block beyond.
        let most = i32::MAX as usize / 2 - 1024;
        small(k, most, "the input features")?;
        small(m, most, "the tokens")?;
        // Eight token tiles of every row tile are counted together.
        small(n, most / 8, "the output features")?;
        let Parts { chunks, halved } = Parts::of([n, k]);
        // Two sets take halves side by side, `serial` ones one after the other.
        let ways = usize::from(variant.serial) + variant.shape.sets;
        if variant.halved != halved || !(1..=1 + usize::from(halved)).contains(&ways) {
            return Err(KernelError::Scheme("a variant for other parts of k"));
        }
        let (rows, tokens) = (n.div_ceil(BLOCK_ROWS), m.div_ceil(variant.shape.tokens()));
        let split = if variant.serial { 1 } else { chunks };
        let tiles = rows.checked_mul(tokens).ok_or(KernelError::TooLarge("the grid"))?;
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
        Ok(Self { variant, launch, chunks: chunks as u32, ticket_bytes, workspace_bytes, layout: *layout, m })
    }

    /// What a launch moves, without a bias.
    pub fn traffic(&self) -> LinearTraffic {
        let (n, k) = (self.layout.n(), self.layout.k());
        let scheme = &self.variant.scheme;
        let scales = if scheme.is_float() { 0 } else { 4 };
        let others = if self.workspace_bytes > 0 { self.chunks as usize - 1 } else { 0 };
        LinearTraffic {
            weights: self.layout.bytes(),
            activations: self.m * (k * scheme.activation_bytes() + scales),
            results: self.m * n * scheme.output_bytes(),
            workspace: 2 * others * self.m * n.next_multiple_of(BLOCK_ROWS) * 4,
        }
    }

    /// The arguments of the kernel, in its order.
    ///
    /// # Errors
    /// When a region is too small or lies at no multiple of what its type needs, or a stride or zero is invalid.
    pub fn arguments(&self, at: &LinearArguments) -> Result<[Argument; 19], KernelError> {
        let (layout, scheme, m) = (&self.layout, &self.variant.scheme, self.m);
        let (n, k) = (layout.n(), layout.k());
        let matrix = |stride: usize, width: usize, bytes: usize, what| {
            let last =
                m.saturating_sub(1).checked_mul(stride).and_then(|s| s.checked_add(width.min(m * width)));
            last.and_then(|elements| elements.checked_mul(bytes)).ok_or(KernelError::TooLarge(what))
        };
        let stride = |stride: usize, least: usize, what| match u32::try_from(stride) {
            Ok(short) if stride >= least => Ok(short),
            _ => Err(KernelError::Mismatch { what, expected: least, got: stride }),
        };
        let each = scheme.activation_bytes();
        let x_stride = stride(at.x_stride, k, "the stride of activations")?;
        if !(at.x_stride * each).is_multiple_of(16) {
            return Err(KernelError::Scheme("rows of activations that are no multiples of 16 bytes"));
        }
        let out_stride = stride(at.out_stride, n, "the stride of results")?;
        at.weight.require("packed weights", layout.bytes(), SECTION)?;
        at.x.require("activations", matrix(at.x_stride, k, each, "the activations")?, 16)?;
        let out = scheme.output_bytes();
        at.out.require("results", matrix(at.out_stride, n, out, "the results")?, out)?;
        at.tickets.require("tickets", self.ticket_bytes, 256)?;
        at.workspace.require("workspace", self.workspace_bytes, 256)?;
        if at.bias != Region::NONE {
            at.bias.require("bias", 4 * n, 4)?;
        }
        if !scheme.is_float() {
            at.x_scales.require("scales of activations", 4 * m, 4)?;
        }
        if !(-128..=127).contains(&at.x_zero) || (at.x_zero != 0 && !layout.has_sums()) {
            return Err(KernelError::Scheme(
                "a zero of activations beyond 8 bits, or without sums in the layout",
            ));
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
            Argument::U32(self.chunks),
            Argument::U32(u32::from(layout.middle().unwrap_or(0))),
            Argument::U32(at.x_zero as u32),
        ])
    }
}

#[cfg(test)]
mod tests {
    use quant_kernels_cpu::ScaleType;

    use super::*;
    use crate::compile::Architecture;
    use crate::layout::Order;

    fn plan(n: usize, k: usize, m: usize) -> Result<LinearPlan, KernelError> {
        let layout = WeightLayout::from_parts([n, k], 4, 128, ScaleType::F16, None, Order::Float, false)?;
        let device = LinearLimits::of(Architecture::Sm90);
        LinearPlan::new(&layout, Activation::F16, Output::F16, m, &device)
    }

    #[test]
    fn chunks_belong_to_the_weights() {
        let halves = |chunks| Parts { chunks, halved: true };
        for m in [1, 7, 16, 100, 5000] {
            for (n, k, parts) in [
                (4096, 4096, halves(4)),
                (8192, 28_672, halves(2)),
                (28_672, 4096, halves(1)),
                (57_344, 8192, Parts { chunks: 1, halved: false }),
            ] {
                let plan = plan(n, k, m).unwrap();
                assert_eq!((Parts::of([n, k]), plan.chunks as usize), (parts, parts.chunks));
                assert_eq!(plan.variant.halved, parts.halved);
            }
        }
        // No half is empty, whatever the sizes.
        for tiles in 1..400 {
            for n in [1, 1000, 4096, 9000, 20_000, 40_000] {
                let parts = Parts::of([n, 128 * tiles]);
                let length = parts.chunk_tiles(128 * tiles);
                let last = tiles.checked_sub((parts.chunks - 1) * length).unwrap();
                let needed = if parts.halved { length.div_ceil(2) } else { 0 };
                assert!((1..=4).contains(&parts.chunks) && last > needed, "{tiles} {n}");
            }
        }
    }

    #[test]
    fn few_tokens_take_a_workspace_and_many_none() {
        let few = plan(4096, 4096, 3).unwrap();
        assert_eq!((few.launch.grid, few.launch.block), ([32, 4, 1], 256));
        assert_eq!((few.ticket_bytes, few.workspace_bytes), (8 * 32, 4 * 4096 * 8 * 4));
        let many = plan(4096, 4096, 1000).unwrap();
        assert!(many.variant.serial);
        assert_eq!((many.launch.grid, many.workspace_bytes), ([32 * 16, 1, 1], 0));
        assert_eq!(plan(4096, 4096, 0).unwrap().launch.grid[0], 0);
    }

    #[test]
    fn variants_for_other_parts_are_told() {
        let (cut, whole) = (plan(4096, 4096, 3).unwrap(), plan(57_344, 4096, 3).unwrap());
        assert!(LinearPlan::of_variant(cut.variant, &cut.layout, 3).is_ok());
        assert!(LinearPlan::of_variant(whole.variant, &cut.layout, 3).is_err());
        assert!(LinearPlan::of_variant(cut.variant, &whole.layout, 3).is_err());
        for (sets, serial, good) in [(1, false, true), (1, true, true), (2, true, false), (3, false, false)] {
            let mut variant = cut.variant;
            (variant.shape.sets, variant.serial) = (sets, serial);
            assert_eq!(LinearPlan::of_variant(variant, &cut.layout, 3).is_ok(), good, "{sets} {serial}");
        }
    }

    #[test]
    fn what_is_too_large_is_told() {
        assert!(matches!(plan(4096, 4096, usize::MAX), Err(KernelError::TooLarge(_))));
        assert!(matches!(plan(4096, 4096, 1 << 31), Err(KernelError::TooLarge(_))));
        assert!(matches!(plan(1 << 28, 128, 1), Err(KernelError::TooLarge(_))));
        assert!(matches!(plan(16, 1 << 31, 1), Err(KernelError::TooLarge(_))));
    }

    #[test]
    fn what_does_not_fit_is_told() {
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
            tickets: region(0x100, plan.ticket_bytes),
            workspace: region(0x200, plan.workspace_bytes),
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
            LinearArguments { tickets: region(0x100, plan.ticket_bytes - 1), ..good },
            LinearArguments { workspace: Region::NONE, ..good },
            LinearArguments { workspace: region(0x210, plan.workspace_bytes), ..good },
            // Beyond the last address.
            LinearArguments { workspace: region(u64::MAX - 255, plan.workspace_bytes), ..good },
            LinearArguments { weight: region(u64::MAX - 255, plan.layout.bytes()), ..good },
        ];
        for (i, bad) in bad.iter().enumerate() {
            assert!(plan.arguments(bad).is_err(), "{i}");
        }
    }
}
