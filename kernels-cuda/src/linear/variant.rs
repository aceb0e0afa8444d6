//! How a variant divides its work.

use quant_kernels_cpu::FloatFormat;
use quant_kernels_cpu::experts::ExpertGate;

use super::SOURCE;
use super::scheme::{InputType, KernelScheme, Output, Scale};
use crate::compile::{GpuArchitecture, Variant};
use crate::layout::{TILE_K, TILE_ROWS};

/// The shape of a block of threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct BlockShape {
    /// Warps along output features, each with `row_tiles` tiles of 16.
    pub row_warps: usize,
    /// Number of tiles of 16 output features per warp.
    pub row_tiles: usize,
    /// Number of warps along tokens, each with `token_tiles` tiles of 8.
    pub token_warps: usize,
    /// Number of tiles of 8 tokens per warp.
    pub token_tiles: usize,
    /// Number of stages of the ring.
    pub stages: usize,
    /// Intended number of blocks per multiprocessor, which bounds the registers per thread.
    pub blocks: usize,
}

impl BlockShape {
    /// Output features per block: 128 in all shapes.
    pub fn rows(&self) -> usize {
        self.row_warps * self.row_tiles * TILE_ROWS
    }

    /// Tokens per block.
    pub fn tokens(&self) -> usize {
        self.token_warps * self.token_tiles * 8
    }

    /// Threads per block.
    pub fn threads(&self) -> usize {
        32 * self.row_warps * self.token_warps
    }

    /// Registers per thread if `blocks` blocks share a multiprocessor with 65,536 registers; at most 255.
    pub fn register_ceiling(&self) -> usize {
        (65_536 / (self.blocks * self.threads()) / 8 * 8).min(255)
    }
}

/// From few tokens to many: warps along tokens, tiles of 8 tokens per warp, and blocks per multiprocessor. The numbers
/// of blocks were the fastest on an H200.
const SHAPES: [[usize; 3]; 5] = [[1, 1, 5], [1, 2, 4], [2, 2, 2], [2, 4, 2], [2, 8, 1]];
/// Up to this number of tokens per block, several blocks always share the chunks of `k`.
const FEW_TOKENS: usize = 16;
/// The number of tokens of the largest block.
const MANY_TOKENS: usize = 128;
/// The number of shapes whose float sums fit in registers.
const FLOAT_SHAPES: usize = 4;
/// Tiles of tokens per warp in the last of these shapes.
const MANY_TILES: usize = 4;
/// Rows of weights per block, in every shape.
pub const BLOCK_ROWS: usize = 128;

/// The properties of a device that determine plans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanLimits {
    /// Maximum shared memory per block in bytes.
    pub shared_of_block: usize,
    /// Shared memory per multiprocessor in bytes.
    pub shared_of_multiprocessor: usize,
    /// Number of multiprocessors.
    pub multiprocessors: usize,
}

impl From<&crate::device::DeviceLimits> for PlanLimits {
    fn from(device: &crate::device::DeviceLimits) -> Self {
        Self {
            shared_of_block: device.shared_of_block as usize,
            shared_of_multiprocessor: device.shared_of_multiprocessor as usize,
            multiprocessors: device.multiprocessors as usize,
        }
    }
}

impl PlanLimits {
    /// The limits of a typical device of an architecture: A100, A10, L40S, H200, RTX 5090.
    pub fn of(architecture: GpuArchitecture) -> Self {
        let (shared_of_block, multiprocessors) = match architecture {
            GpuArchitecture::Sm80 => (166_912, 108),
            GpuArchitecture::Sm86 => (101_376, 72),
            GpuArchitecture::Sm89 => (101_376, 142),
            GpuArchitecture::Sm90 => (232_448, 132),
            GpuArchitecture::Sm120 => (101_376, 170),
        };
        Self { shared_of_block, shared_of_multiprocessor: shared_of_block + SYSTEM, multiprocessors }
    }
}

/// How the chunks of `k` are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Chunks {
    /// Each by a block. The last block to finish adds their sums, which it reads from the workspace.
    Blocks,
    /// By one block, one after another, which keeps the sum of those before in registers.
    Registers,
    /// By one block, one after another, which keeps the sum of those before in shared memory.
    Shared,
}

/// The functions that combine the results of gate and up projections, without their numbers. See
/// [`ExpertGate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GateFunction {
    /// `silu(gate) · up`.
    Silu,
    /// `gelu(gate) · up`.
    GeluTanh,
    /// The clamped gate of gpt-oss.
    Clamped,
}

impl GateFunction {
    /// The function of a gate, or `None` if the kernels do not have it.
    pub fn of(gate: ExpertGate) -> Option<Self> {
        match gate {
            ExpertGate::Silu => Some(Self::Silu),
            ExpertGate::GeluTanh => Some(Self::GeluTanh),
            ExpertGate::Clamped { .. } => Some(Self::Clamped),
            _ => None,
        }
    }
}

/// A kernel variant: scheme, block shape and division of `k`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct LinearVariant {
    /// The types and groups of the operands.
    pub scheme: KernelScheme,
    /// The shape of the block.
    pub shape: BlockShape,
    /// How the chunks of `k` are computed.
    pub chunks: Chunks,
    /// Whether rows are multiplied by the weights of different experts, in one launch.
    pub experts: bool,
    /// If experts have two matrices, gate and up: the function that combines their results.
    pub gate: Option<GateFunction>,
}

impl LinearVariant {
    /// The macros of `cuda/linear.cu`.
    pub fn defines(&self) -> Vec<(&'static str, String)> {
        let s = &self.scheme;
        let activation = match s.activation {
            InputType::F16 => "F16",
            InputType::Bf16 => "BF16",
            InputType::Int8 { .. } => "S8",
        };
        let scale = match s.scale {
            Scale::F16 => "F16",
            Scale::Bf16 => "BF16",
            Scale::F32 => "F32",
            Scale::Progressive => "PROGRESSIVE",
            Scale::E4m3 => "E4M3",
            Scale::E8m0 => "E8M0",
        };
        let codes = match s.float {
            None => "INTEGER",
            Some(FloatFormat::E2m1) => "E2M1",
            Some(_) => "E4M3",
        };
        let output = match s.output {
            Output::F16 => "F16",
            Output::Bf16 => "BF16",
            Output::F32 => "F32",
        };
        let chunks = match self.chunks {
            Chunks::Blocks => "BLOCKS_EACH",
            Chunks::Registers => "REGISTERS",
            Chunks::Shared => "SHARED",
        };
        let gate = match self.gate {
            None => "UNGATED",
            Some(GateFunction::Silu) => "SILU",
            Some(GateFunction::GeluTanh) => "GELU_TANH",
            Some(GateFunction::Clamped) => "CLAMPED",
        };
        let x_zero = matches!(s.activation, InputType::Int8 { zero: true });
        let flag = |set: bool| usize::from(set).to_string();
        vec![
            ("ACTIVATION", activation.to_owned()),
            ("CODES", codes.to_owned()),
            ("CODE_BITS", s.code_bits.to_string()),
            ("GROUP", s.group.unwrap_or(0).to_string()),
            ("SCALE", scale.to_owned()),
            ("ZEROS", flag(s.zeros)),
            ("X_ZERO", flag(x_zero)),
            ("OUTPUT", output.to_owned()),
            ("ROW_WARPS", self.shape.row_warps.to_string()),
            ("ROW_TILES", self.shape.row_tiles.to_string()),
            ("TOKEN_WARPS", self.shape.token_warps.to_string()),
            ("TOKEN_TILES", self.shape.token_tiles.to_string()),
            ("STAGES", self.shape.stages.to_string()),
            ("BLOCKS", self.shape.blocks.to_string()),
            ("CHUNKS", chunks.to_owned()),
            ("EXPERTS", flag(self.experts)),
            ("GATE", gate.to_owned()),
        ]
    }

    /// The source, kernel and macros to compile.
    pub fn compiled(&self) -> Variant {
        let kernel = if self.experts { "linear_experts" } else { "linear" };
        Variant { source: &SOURCE, kernel, defines: self.defines() }
    }

    /// A name made of the scheme, the tokens per block, the depth of the ring, how chunks of `k` are computed,
    /// `_experts` if the weights are those of several experts, and the function of their gates.
    pub fn name(&self) -> String {
        let chunks = match self.chunks {
            Chunks::Blocks => "",
            Chunks::Registers => "_serial",
            Chunks::Shared => "_kept",
        };
        let experts = if self.experts { "_experts" } else { "" };
        let gate = match self.gate {
            None => "",
            Some(GateFunction::Silu) => "_silu",
            Some(GateFunction::GeluTanh) => "_gelu",
            Some(GateFunction::Clamped) => "_clamped",
        };
        format!(
            "{}_t{}_s{}{chunks}{experts}{gate}",
            self.scheme.name(),
            self.shape.tokens(),
            self.shape.stages
        )
    }

    /// Output features per block: a block for gates has the same features of two matrices.
    pub fn features(&self) -> usize {
        features(self.gate)
    }

    /// Bytes of one stage of the ring.
    fn stage_bytes(scheme: &KernelScheme, tokens: usize) -> usize {
        let blocks = BLOCK_ROWS / TILE_ROWS;
        let tile = TILE_ROWS * TILE_K * scheme.code_bits / 8;
        blocks * (tile + scheme.parameter_bytes) + tokens * TILE_K * scheme.activation_bytes()
    }

    /// Bytes of shared memory for the sums of activations, and for the kept sums of chunks.
    fn bytes_beside_ring(&self) -> usize {
        let tokens = self.shape.tokens();
        // With few tokens, every warp has the sums of activations in registers.
        let has_sums = self.scheme.sums_activations() && self.shape.token_warps > 1;
        let sums = if has_sums { 2 * self.scheme.tile_groups() * tokens * 4 } else { 0 };
        let kept = if self.chunks == Chunks::Shared { BLOCK_ROWS * tokens * 4 } else { 0 };
        sums.next_multiple_of(128) + kept
    }

    /// Bytes of dynamic shared memory per block.
    pub fn shared_bytes(&self) -> usize {
        let tokens = self.shape.tokens();
        let ring = self.shape.stages * Self::stage_bytes(&self.scheme, tokens);
        // The memory of the ring is reused to reorder results.
        (ring.next_multiple_of(128) + self.bytes_beside_ring()).max(tokens * (BLOCK_ROWS + 4) * 4)
    }

    /// The bytes of registers that may be spilled. With 64 tokens and float sums, two blocks of 128 registers per
    /// thread were 15 % faster on an H200 than one.
    pub(super) fn spill_bytes(&self) -> u32 {
        let is_crowded = self.shape.token_tiles == MANY_TILES && self.shape.blocks == 2 && !self.scheme.whole;
        if is_crowded { 24 } else { 0 }
    }

    /// Bytes of the workspace for a chunk's sums of one tile of results.
    pub(super) fn partial_bytes(&self) -> usize {
        4 * self.shape.rows() * self.shape.tokens()
    }

    /// Chooses the variant for `m` tokens on this device: the smallest shape that holds them, if it fits in shared
    /// memory, and otherwise the largest that fits. With many tokens, one block may compute all chunks one after
    /// another.
    pub fn choose(scheme: KernelScheme, shape: [usize; 2], m: usize, device: &PlanLimits) -> Self {
        Self::of_products(scheme, shape, [1, m], false, None, device)
    }

    /// Chooses the variant for `rows` rows of results, which a routing distributes among at most `experts` experts: the
    /// smallest shape that most experts fill at most once if the routing is uniform. If there is a gate, `shape` is
    /// that of one of the two matrices.
    pub fn choose_experts(
        scheme: KernelScheme,
        shape: [usize; 2],
        [experts, rows]: [usize; 2],
        gate: Option<GateFunction>,
        device: &PlanLimits,
    ) -> Self {
        let experts = experts.min(rows).max(1);
        let mean = rows.div_ceil(experts);
        // Two standard deviations more: an expert's number of rows is about Poisson distributed.
        let most = mean.saturating_add(2 * mean.isqrt()).min(rows);
        Self::of_products(scheme, shape, [experts, most], true, gate, device)
    }

    /// Chooses the variant for a number of products in one launch, each with `m` tokens.
    fn of_products(
        scheme: KernelScheme,
        [n, k]: [usize; 2],
        [products, m]: [usize; 2],
        experts: bool,
        gate: Option<GateFunction>,
        device: &PlanLimits,
    ) -> Self {
        let shapes = if scheme.whole { &SHAPES[..] } else { &SHAPES[..FLOAT_SHAPES] };
        let parts = Parts::of([n, k]);
        let holds = shapes.iter().position(|&[warps, tiles, _]| m <= 8 * warps * tiles);
        let mut choice = holds.unwrap_or(shapes.len() - 1);
        loop {
            let [token_warps, token_tiles, resident] = shapes[choice];
            // Tiles of 8-bit codes are twice as large, so fewer blocks have enough copies in flight.
            let resident = if scheme.code_bits == 8 { resident.min(2) } else { resident };
            let tokens = 8 * token_warps * token_tiles;
            let tiles =
                n.div_ceil(features(gate)).saturating_mul(m.div_ceil(tokens)).saturating_mul(products);
            // Integers need no memory for the sums of chunks, so a block computes all chunks even if that leaves some
            // multiprocessors idle.
            let enough = if scheme.whole && tokens == MANY_TOKENS {
                device.multiprocessors / 3
            } else {
                device.multiprocessors
            };
            let is_serial = tokens > FEW_TOKENS && parts.chunks > 1 && tiles >= enough;
            let ways: &[Chunks] = match (is_serial, scheme.whole) {
                (false, _) => &[Chunks::Blocks],
                // Integers are summed over all of k, so nothing is kept.
                (true, true) => &[Chunks::Registers],
                // The indices of tokens leave no registers for sums that are kept.
                (true, false) if experts => &[Chunks::Shared],
                (true, false) => &[Chunks::Shared, Chunks::Registers],
            };
            for &chunks in ways {
                let resident = match (chunks, experts) {
                    _ if scheme.whole => resident,
                    // Sums that are kept in registers leave room for one block only.
                    (Chunks::Registers, _) => 1,
                    // Next to the sums of several tiles of tokens, so do the indices of tokens.
                    (_, true) if token_tiles == MANY_TILES => 1,
                    (_, true) if tokens == FEW_TOKENS => resident.min(3),
                    _ => resident,
                };
                let shape =
                    BlockShape { row_warps: 4, row_tiles: 2, token_warps, token_tiles, stages: 0, blocks: 1 };
                let mut variant = Self { scheme, shape, chunks, experts, gate };
                let stage = Self::stage_bytes(&scheme, tokens);
                let others = variant.bytes_beside_ring();
                let share = (device.shared_of_multiprocessor / resident).min(device.shared_of_block + SYSTEM);
                variant.shape.stages =
                    (share.saturating_sub(SYSTEM + others) / stage).clamp(MIN_STAGES, MAX_STAGES);
                let bytes = variant.shared_bytes();
                variant.shape.blocks =
                    (device.shared_of_multiprocessor / (bytes + SYSTEM)).clamp(1, resident);
                if choice == 0 || bytes <= device.shared_of_block {
                    return variant;
                }
            }
            // Fewer tokens per block.
            choice -= 1;
        }
    }
}

/// Output features per block.
fn features(gate: Option<GateFunction>) -> usize {
    if gate.is_some() { BLOCK_ROWS / 2 } else { BLOCK_ROWS }
}

/// The shared memory in bytes that the system reserves per block.
const SYSTEM: usize = 1024;
/// For a tile that is being multiplied, one that is being summed, and one that is being loaded.
const MIN_STAGES: usize = 3;
const MAX_STAGES: usize = 6;

/// How `k` is cut into chunks, each a run of whole tiles. Each is summed starting from zero, and chunks are added in
/// order. So rounding depends only on the shape of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Parts {
    /// The number of chunks, 1 to 8.
    pub chunks: usize,
}

/// Chunks are used up to this number of blocks for few tokens: two per multiprocessor of an H200.
const BLOCKS_OF_MATRIX: usize = 264;
const MAX_CHUNKS: usize = 8;
/// The minimum length of a chunk.
const MIN_CHUNK_TILES: usize = 4;

impl Parts {
    /// Returns the parts of weights `[n, k]`: the largest power of two up to 8 for which there are at most 264 blocks,
    /// and chunks of at least four tiles along `k`.
    pub fn of([n, k]: [usize; 2]) -> Self {
        let (rows, tiles) = (n.div_ceil(BLOCK_ROWS).max(1), k.div_ceil(TILE_K).max(1));
        let mut chunks = 1;
        while 2 * chunks <= MAX_CHUNKS
            && 2 * chunks * rows <= BLOCKS_OF_MATRIX
            && 2 * chunks * MIN_CHUNK_TILES <= tiles
        {
            chunks *= 2;
        }
        // Fewer if whole tiles fill fewer chunks.
        Self { chunks: tiles.div_ceil(tiles.div_ceil(chunks)) }
    }

    /// The number of tiles per chunk; the last chunk may have fewer.
    pub fn chunk_tiles(&self, k: usize) -> usize {
        k.div_ceil(TILE_K).div_ceil(self.chunks)
    }
}
