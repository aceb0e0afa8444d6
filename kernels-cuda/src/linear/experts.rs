//! Linears of the experts of a layer, in one launch: their weights have the same layout, and each row of activations is
//! multiplied by the weights of one expert.

use quant_kernels_cpu::KernelError;
use quant_kernels_cpu::experts::ExpertGate;

use super::plan::{LinearWork, Operands};
use super::scheme::{InputType, KernelScheme, Output};
use super::variant::{GateFunction, LinearVariant, PlanLimits};
use crate::launch::{Argument, Region};
use crate::layout::{SECTION, Section, WeightLayout};

/// The size in bytes of an expert's descriptor.
pub const EXPERT_BYTES: usize = 48;

/// The sizes of a launch for all experts of a layer.
///
/// Rows of results are sorted by expert. Each row has the index of its token, so a token that is routed to several
/// experts has several rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearExpertsShape {
    /// The number of experts.
    pub experts: usize,
    /// The number of rows of activations.
    pub tokens: usize,
    /// The maximum number of rows of results: usually the number of tokens times the number of experts per token.
    pub rows: usize,
    /// The function that combines the results of two matrices per expert, gate and up; `None` if experts have one
    /// matrix.
    pub gate: Option<ExpertGate>,
}

/// A planned launch for all experts of a layer, for any routing.
///
/// The number of rows of each expert is in device memory, and may be 0. A row's result is bit-identical to the result
/// of a [`LinearPlan`](super::LinearPlan) with the weights of its expert. If there is a gate, it is bit-identical to
/// the function of [`quant_kernels_cpu::reference`] of two such results in f32.
///
/// ```
/// use quant_kernels_cpu::ScaleType;
/// use quant_kernels_cuda::compile::GpuArchitecture;
/// use quant_kernels_cuda::layout::{Order, WeightLayout};
/// use quant_kernels_cuda::linear::{InputType, LinearExpertsPlan, LinearExpertsShape, Output, PlanLimits};
///
/// // 128 experts of 768 x 2048, of which each of 16 tokens uses 8.
/// let layout = WeightLayout::from_parts([768, 2048], 4, 128, ScaleType::F16, None, Order::Float, false)?;
/// let shape = LinearExpertsShape { experts: 128, tokens: 16, rows: 16 * 8, gate: None };
/// let device = PlanLimits::of(GpuArchitecture::Sm90);
/// let plan = LinearExpertsPlan::new(&layout, InputType::Bf16, Output::Bf16, &shape, &device)?;
/// // If the routing is known on the host, it can be checked. Here all tokens use the first eight experts.
/// let starts: Vec<u32> = (0..=128).map(|expert| (16 * expert).min(128)).collect();
/// let token_of: Vec<u32> = (0..128).map(|row| row % 16).collect();
/// plan.check_routing(&starts, Some(&token_of))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearExpertsPlan {
    /// The kernel, its blocks and its buffers.
    pub work: LinearWork,
    layout: WeightLayout,
    shape: LinearExpertsShape,
}

/// The device addresses of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertRegions {
    /// The packed matrix with all sections.
    pub weight: Region,
    /// f32 `[n]`, or [`Region::NONE`].
    pub bias: Region,
}

/// Device addresses. Regions that the plan does not use may be [`Region::NONE`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearExpertsArguments {
    /// The descriptors of all experts: the bytes of [`expert_descriptors`], at a multiple of 16. If there is a gate,
    /// each expert has two, first that of the gate and then that of the up projection.
    pub experts: Region,
    /// u32 `[experts + 1]`: the index of the first row of each expert, followed by the number of rows. Rows beyond it
    /// are not computed.
    pub starts: Region,
    /// u32 `[rows]`: the index of each row's token, or [`Region::NONE`] if row `r` has the activations of token `r`. An
    /// index that no token has stands for activations of zero.
    pub token_of: Region,
    /// f32 `[rows]`: the factor of each row, such as the weight of its expert in the routing, or [`Region::NONE`]. The
    /// bias is multiplied too, and so are results of a gate. Results are rounded afterwards.
    pub factors: Region,
    /// f16, bf16 or i8 `[tokens, k]`, rows `x_stride` apart.
    pub x: Region,
    /// Elements between rows of activations: at least `k`. The distance in bytes must be a multiple of 16.
    pub x_stride: usize,
    /// f32 `[tokens]`, for 8-bit activations.
    pub x_scales: Region,
    /// The zero point of 8-bit activations, −128 to 127; 0 if the layout has no sums.
    pub x_zero: i32,
    /// f16, bf16 or f32 `[rows, n]`, rows `out_stride` apart.
    pub out: Region,
    /// Elements between rows of results, at least `n`.
    pub out_stride: usize,
    /// The tickets, as in [`LinearArguments`](super::LinearArguments).
    pub tickets: Region,
    /// The workspace, as in [`LinearArguments`](super::LinearArguments).
    pub workspace: Region,
}

/// Returns the descriptors of experts whose weights have this layout, to be copied to the device.
///
/// # Errors
/// When a region is too small, null or misaligned.
pub fn expert_descriptors(layout: &WeightLayout, experts: &[ExpertRegions]) -> Result<Vec<u8>, KernelError> {
    let mut bytes = Vec::with_capacity(EXPERT_BYTES * experts.len());
    for expert in experts {
        expert.weight.require("packed weights", layout.bytes(), SECTION)?;
        if expert.bias != Region::NONE {
            expert.bias.require("bias", 4 * layout.n(), 4)?;
        }
        let section = |s| expert.weight.address + layout.section(s) as u64;
        let addresses = [
            section(Section::Codes),
            section(Section::Parameters),
            section(Section::RowScales),
            section(Section::RowZeros),
            section(Section::RowSums),
            expert.bias.address,
        ];
        bytes.extend(addresses.iter().flat_map(|address| address.to_le_bytes()));
    }
    Ok(bytes)
}

impl LinearExpertsPlan {
    /// Plans the products of all experts.
    ///
    /// # Errors
    /// When there are no experts, the gate's limit is negative or NaN, weights and activations do not match, or the grid
    /// or an index exceeds the range of the kernel's integers.
    pub fn new(
        layout: &WeightLayout,
        activation: InputType,
        output: Output,
        shape: &LinearExpertsShape,
        device: &PlanLimits,
    ) -> Result<Self, KernelError> {
        let scheme = KernelScheme::new(layout, activation, output)?;
        let of = [layout.n(), layout.k()];
        let gate = gate_of(shape)?;
        let variant = LinearVariant::choose_experts(scheme, of, [shape.experts, shape.rows], gate, device);
        Self::of_variant(variant, layout, shape)
    }

    /// Plans the products of all experts with a given variant.
    ///
    /// # Errors
    /// See [`new`](Self::new); also when the variant does not match the layout or the gate, or is not for experts.
    pub fn of_variant(
        variant: LinearVariant,
        layout: &WeightLayout,
        shape: &LinearExpertsShape,
    ) -> Result<Self, KernelError> {
        let LinearExpertsShape { experts, tokens, rows, .. } = *shape;
        if !variant.experts {
            return Err(KernelError::Scheme("the kernel variant is not for the experts of a layer"));
        }
        if variant.gate != gate_of(shape)? {
            return Err(KernelError::Scheme("the kernel variant is for experts with a different gate"));
        }
        if experts == 0 {
            return Err(KernelError::Scheme("a layer must have at least one expert"));
        }
        if u32::try_from(tokens).is_err() {
            return Err(KernelError::TooLarge("the number of tokens"));
        }
        // Every expert with rows can have a tile that is not full. The others have whole tiles.
        let (touched, of_tile) = (experts.min(rows), variant.shape.tokens());
        let work = LinearWork::new(variant, layout, rows, touched + (rows - touched) / of_tile)?;
        // The kernel adds the tiles of all experts, each of which has at most `rows` rows.
        let sum = rows.div_ceil(of_tile).max(1).checked_mul(experts).and_then(|sum| u32::try_from(sum).ok());
        sum.ok_or(KernelError::TooLarge("the number of experts"))?;
        Ok(Self { work, layout: *layout, shape: *shape })
    }

    /// Checks a routing that is known on the host: the first row of each expert, followed by the number of rows, and
    /// the token of each row, if there are indices. The kernel does not access memory out of bounds for any routing,
    /// but rows that are in two ranges have undefined results.
    ///
    /// # Errors
    /// When there are not as many numbers as the plan requires, starts are not in ascending order from 0 to at most
    /// [`rows`](LinearExpertsShape::rows), or a token does not exist.
    pub fn check_routing(&self, starts: &[u32], token_of: Option<&[u32]>) -> Result<(), KernelError> {
        let LinearExpertsShape { experts, tokens, rows, .. } = self.shape;
        if starts.len() != experts + 1 {
            let what = "the first rows of experts, and the number of rows";
            return Err(KernelError::Length { what, expected: experts + 1, got: starts.len() });
        }
        if starts[0] != 0 || !starts.is_sorted() {
            return Err(KernelError::Scheme("the first rows of experts must be in ascending order, from 0"));
        }
        let got = starts[experts] as usize;
        if got > rows {
            let what = "the number of rows must be at most";
            return Err(KernelError::Mismatch { what, expected: rows, got });
        }
        let Some(token_of) = token_of else { return Ok(()) };
        if token_of.len() < got {
            return Err(KernelError::Length {
                what: "the tokens of rows",
                expected: got,
                got: token_of.len(),
            });
        }
        match token_of[..got].iter().find(|&&token| token as usize >= tokens) {
            None => Ok(()),
            Some(&token) => {
                let what = "the indices of tokens must be less than";
                Err(KernelError::Mismatch { what, expected: tokens, got: token as usize })
            }
        }
    }

    /// The arguments of the kernel, in order.
    ///
    /// # Errors
    /// When a region is too small or misaligned for its type, a stride or zero point is invalid, or there are fewer
    /// tokens than rows although rows have no indices of tokens.
    pub fn arguments(&self, at: &LinearExpertsArguments) -> Result<[Argument; 21], KernelError> {
        let (layout, LinearExpertsShape { experts, tokens, rows, gate }) = (&self.layout, self.shape);
        let operands = Operands {
            x: at.x,
            x_stride: at.x_stride,
            x_scales: at.x_scales,
            x_zero: at.x_zero,
            out: at.out,
            out_stride: at.out_stride,
        };
        let [x_stride, out_stride] = operands.check(&self.work.variant, layout, tokens, rows)?;
        if u32::try_from(at.x_stride * self.work.variant.scheme.activation_bytes()).is_err() {
            return Err(KernelError::TooLarge("the row stride of activations"));
        }
        let matrices = if gate.is_some() { 2 } else { 1 };
        at.experts.require("descriptors of experts", EXPERT_BYTES * matrices * experts, 16)?;
        at.starts.require("first rows of experts", 4 * (experts + 1), 4)?;
        if at.token_of != Region::NONE {
            at.token_of.require("tokens of rows", 4 * rows, 4)?;
        } else if tokens < rows {
            let what = "rows without indices of tokens need as many tokens:";
            return Err(KernelError::Mismatch { what, expected: rows, got: tokens });
        }
        if at.factors != Region::NONE {
            at.factors.require("factors of rows", 4 * rows, 4)?;
        }
        let [alpha, limit] = match gate {
            Some(ExpertGate::Clamped { alpha, limit }) => [alpha, limit],
            _ => [0.0; 2],
        };
        at.tickets.require("tickets", self.work.ticket_bytes, 256)?;
        at.workspace.require("workspace", self.work.workspace_bytes, 256)?;
        Ok([
            Argument::U64(at.experts.address),
            Argument::U64(at.starts.address),
            Argument::U64(at.token_of.address),
            Argument::U64(at.factors.address),
            Argument::U64(at.x.address),
            Argument::U64(at.x_scales.address),
            Argument::U64(at.out.address),
            Argument::U64(at.workspace.address),
            Argument::U64(at.tickets.address),
            Argument::U32(experts as u32),
            Argument::U32(rows as u32),
            Argument::U32(tokens as u32),
            Argument::U32(layout.n() as u32),
            Argument::U32(layout.k() as u32),
            Argument::U32(x_stride),
            Argument::U32(out_stride),
            Argument::U32(self.work.chunks),
            Argument::U32(u32::from(layout.zero_point().unwrap_or(0))),
            Argument::U32(at.x_zero as u32),
            Argument::F32(alpha),
            Argument::F32(limit),
        ])
    }
}

/// The function of the gate, if there is one.
///
/// # Errors
/// When the gate's limit is negative or NaN, or the kernels do not have its function.
fn gate_of(shape: &LinearExpertsShape) -> Result<Option<GateFunction>, KernelError> {
    if let Some(ExpertGate::Clamped { limit, .. }) = shape.gate
        && (limit.is_nan() || limit < 0.0)
    {
        return Err(KernelError::Scheme("the gate limit must not be negative or NaN"));
    }
    let unknown = KernelError::Scheme("the kernels do not have the function of the gate");
    shape.gate.map(|gate| GateFunction::of(gate).ok_or(unknown)).transpose()
}

#[cfg(test)]
mod tests {
    use quant_kernels_cpu::ScaleType;

    use super::*;
    use crate::compile::GpuArchitecture;
    use crate::layout::Order;

    fn region(address: u64, bytes: usize) -> Region {
        Region { address, bytes: bytes as u64 }
    }

    fn layout() -> WeightLayout {
        WeightLayout::from_parts([768, 2048], 4, 128, ScaleType::F16, None, Order::Float, false).unwrap()
    }

    fn plan(experts: usize, tokens: usize, rows: usize) -> Result<LinearExpertsPlan, KernelError> {
        gated(experts, tokens, rows, None)
    }

    fn gated(
        experts: usize,
        tokens: usize,
        rows: usize,
        gate: Option<ExpertGate>,
    ) -> Result<LinearExpertsPlan, KernelError> {
        let shape = LinearExpertsShape { experts, tokens, rows, gate };
        let device = PlanLimits::of(GpuArchitecture::Sm90);
        LinearExpertsPlan::new(&layout(), InputType::F16, Output::F16, &shape, &device)
    }

    /// Regions for 3 tokens and 6 rows, with this many descriptors of experts.
    fn regions(plan: &LinearExpertsPlan, descriptors: usize) -> LinearExpertsArguments {
        LinearExpertsArguments {
            experts: region(0x10, descriptors * EXPERT_BYTES),
            starts: region(0x4, 20),
            token_of: region(0x4, 24),
            factors: region(0x4, 24),
            x: region(0x10, 3 * 4096),
            x_stride: 2048,
            x_scales: Region::NONE,
            x_zero: 0,
            out: region(0x2, 6 * 1536),
            out_stride: 768,
            tickets: region(0x100, plan.work.ticket_bytes),
            workspace: region(0x200, plan.work.workspace_bytes),
        }
    }

    #[test]
    fn the_grid_has_the_tiles_of_every_routing() {
        let row_tiles = 6;
        for (experts, rows) in [(1, 5), (128, 8), (128, 128), (128, 4096), (3, 1000), (128, 0)] {
            let plan = plan(experts, rows.max(1), rows).unwrap();
            let both = gated(experts, rows.max(1), rows, Some(ExpertGate::Silu)).unwrap();
            // Each block computes half as many features of two matrices. Chunks are those of one matrix.
            assert_eq!(both.work.launch.grid[0], 2 * plan.work.launch.grid[0]);
            assert_eq!(both.work.chunks, plan.work.chunks);
            let of_tile = plan.work.variant.shape.tokens();
            assert_eq!(plan.work.launch.grid[0] % row_tiles, 0);
            let most = (plan.work.launch.grid[0] / row_tiles) as usize;
            // As many tiles as possible: one row for each expert, and the others for one of them.
            let touched = experts.min(rows);
            let tiles = if touched == 0 { 0 } else { (rows - touched + 1).div_ceil(of_tile) + touched - 1 };
            assert_eq!(most, tiles, "{experts} experts, {rows} rows");
            assert_eq!(plan.work.chunks, 4);
            assert_eq!(plan.work.workspace_bytes > 0, plan.work.launch.grid[1] == 4 && rows > 0);
        }
    }

    #[test]
    fn blocks_suit_the_rows_of_an_expert() {
        for (rows, tokens) in [(8, 8), (128, 8), (1024, 16), (4096, 64), (1 << 20, 64)] {
            assert_eq!(plan(128, rows, rows).unwrap().work.variant.shape.tokens(), tokens, "{rows}");
        }
        // A single expert has all rows.
        assert_eq!(plan(1, 16, 16).unwrap().work.variant.shape.tokens(), 16);
    }

    #[test]
    fn invalid_shapes_are_reported() {
        assert!(plan(0, 1, 1).unwrap_err().to_string().contains("at least one expert"));
        for (experts, tokens, rows) in [
            (1, 1, usize::MAX),
            (usize::MAX, 1, 1),
            (usize::MAX, 1, 0),
            (1 << 32, 1, 8),
            (1, 1 << 32, 1),
            (1 << 20, 1, 1 << 29),
        ] {
            let error = plan(experts, tokens, rows).unwrap_err();
            assert!(matches!(error, KernelError::TooLarge(_)), "{experts} {tokens} {rows}: {error}");
        }
        let plan = plan(4, 3, 6).unwrap();
        let (shape, layout) = (LinearExpertsShape { experts: 4, tokens: 3, rows: 6, gate: None }, layout());
        let mut variant = plan.work.variant;
        variant.experts = false;
        assert!(LinearExpertsPlan::of_variant(variant, &layout, &shape).is_err());
        assert!(super::super::LinearPlan::of_variant(variant, &layout, 6).is_ok());
        assert!(super::super::LinearPlan::of_variant(plan.work.variant, &layout, 6).is_err());
    }

    #[test]
    fn gates_are_those_of_the_variant() {
        let clamped = |alpha, limit| Some(ExpertGate::Clamped { alpha, limit });
        for limit in [-1.0, f32::NAN] {
            let error = gated(4, 3, 6, clamped(1.0, limit)).unwrap_err();
            assert_eq!(error, KernelError::Scheme("the gate limit must not be negative or NaN"));
        }
        let plan = gated(4, 3, 6, clamped(1.5, 7.0)).unwrap();
        assert_eq!(plan.work.variant.gate, Some(GateFunction::Clamped));
        let shape = LinearExpertsShape { experts: 4, tokens: 3, rows: 6, gate: Some(ExpertGate::Silu) };
        let other = LinearExpertsPlan::of_variant(plan.work.variant, &layout(), &shape).unwrap_err();
        assert_eq!(other, KernelError::Scheme("the kernel variant is for experts with a different gate"));
        let at = LinearExpertsArguments { factors: Region::NONE, ..regions(&plan, 8) };
        let arguments = plan.arguments(&at).unwrap();
        assert_eq!(arguments[19..], [Argument::F32(1.5), Argument::F32(7.0)]);
        let few = LinearExpertsArguments { experts: region(0x10, 8 * EXPERT_BYTES - 1), ..at };
        assert!(matches!(plan.arguments(&few), Err(KernelError::Length { .. })));
    }

    #[test]
    fn invalid_routings_are_reported() {
        let plan = plan(4, 3, 6).unwrap();
        let tokens = [0, 1, 2, 2, 1, 0];
        let check = |starts: &[u32], tokens: &[u32]| plan.check_routing(starts, Some(tokens));
        assert_eq!(check(&[0, 2, 2, 5, 6], &tokens), Ok(()));
        assert_eq!(check(&[0, 0, 0, 0, 0], &[]), Ok(()));
        assert_eq!(plan.check_routing(&[0, 6, 6, 6, 6], None), Ok(()));
        // Tokens of unused rows do not matter.
        assert_eq!(check(&[0, 1, 1, 1, 2], &[0, 1, 9]), Ok(()));
        for (starts, tokens) in [
            (&[0, 2, 2, 6][..], &tokens[..]),
            (&[0, 2, 2, 5, 6, 6], &tokens),
            (&[1, 2, 2, 5, 6], &tokens),
            (&[0, 3, 2, 5, 6], &tokens),
            (&[0, 2, 2, 5, 7], &tokens),
            (&[0, 2, 2, 5, 6], &tokens[..5]),
            (&[0, 2, 2, 5, 6], &[0, 1, 2, 3, 1, 0]),
        ] {
            assert!(check(starts, tokens).is_err(), "{starts:?} {tokens:?}");
        }
    }

    #[test]
    fn descriptors_have_the_addresses_of_sections() {
        let layout = layout();
        let good = ExpertRegions { weight: region(0x1000, layout.bytes()), bias: region(0x20, 4 * 768) };
        let none = ExpertRegions { weight: region(0x20_0000, layout.bytes()), bias: Region::NONE };
        let bytes = expert_descriptors(&layout, &[good, none]).unwrap();
        let words: Vec<u64> =
            bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(bytes.len(), 2 * EXPERT_BYTES);
        let parameters = layout.section(Section::Parameters) as u64;
        assert_eq!((words[0], words[1], words[5]), (0x1000, 0x1000 + parameters, 0x20));
        assert_eq!((words[6], words[11]), (0x20_0000, 0));
        for bad in [
            ExpertRegions { weight: region(0x1000, layout.bytes() - 1), ..good },
            ExpertRegions { weight: region(0x1010, layout.bytes()), ..good },
            ExpertRegions { weight: Region::NONE, ..good },
            ExpertRegions { bias: region(0x20, 4 * 768 - 1), ..good },
            ExpertRegions { bias: region(0x22, 4 * 768), ..good },
        ] {
            assert!(expert_descriptors(&layout, &[none, bad]).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn mismatched_arguments_are_reported() {
        let plan = plan(4, 3, 6).unwrap();
        let good = regions(&plan, 4);
        let arguments = plan.arguments(&good).unwrap();
        assert_eq!(arguments[9..13], [4, 6, 3, 768].map(Argument::U32));
        assert!(plan.arguments(&LinearExpertsArguments { factors: Region::NONE, ..good }).is_ok());
        let bad = [
            LinearExpertsArguments { experts: region(0x10, 4 * EXPERT_BYTES - 1), ..good },
            LinearExpertsArguments { experts: region(0x8, 4 * EXPERT_BYTES), ..good },
            LinearExpertsArguments { starts: region(0x4, 16), ..good },
            LinearExpertsArguments { token_of: region(0x4, 20), ..good },
            // There are fewer tokens than rows.
            LinearExpertsArguments { token_of: Region::NONE, ..good },
            LinearExpertsArguments { factors: region(0x4, 20), ..good },
            LinearExpertsArguments { factors: region(0x2, 24), ..good },
            LinearExpertsArguments { x: region(0x10, 3 * 4096 - 1), ..good },
            LinearExpertsArguments { x_stride: 2044, ..good },
            LinearExpertsArguments { x_stride: 1 << 31, x: region(0x10, usize::MAX / 2), ..good },
            LinearExpertsArguments { x_zero: 1, ..good },
            LinearExpertsArguments { out: region(0x2, 6 * 1536 - 1), ..good },
            LinearExpertsArguments { out_stride: 767, ..good },
            LinearExpertsArguments { tickets: Region::NONE, ..good },
            LinearExpertsArguments { workspace: region(0x200, plan.work.workspace_bytes - 1), ..good },
        ];
        for (i, bad) in bad.iter().enumerate() {
            assert!(plan.arguments(bad).is_err(), "{i}");
        }
    }
}
