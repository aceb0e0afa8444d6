//! How a variant divides its work.

use quant_kernels_cpu::FloatFormat;

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
    /// Number of sets of warps, each with its own ring: two sets compute the halves of a chunk concurrently.
    pub sets: usize,
    /// Number of stages of a ring.
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
        32 * self.row_warps * self.token_warps * self.sets
    }

    /// Registers per thread if `blocks` blocks share a multiprocessor with 65,536 registers; at most 255.
    pub fn register_ceiling(&self) -> usize {
        (65_536 / (self.blocks * self.threads()) / 8 * 8).min(255)
    }
}

/// From few tokens to many: warps along tokens, tiles of 8 tokens per warp, and sets of warps per multiprocessor.
const SHAPES: [[usize; 3]; 5] = [[1, 1, 4], [1, 2, 3], [2, 2, 2], [2, 4, 1], [2, 8, 1]];
/// Blocks of more tokens have one set of warps.
const TWO_SETS: usize = 16;
/// The number of shapes whose float sums fit in registers.
const FLOAT_SHAPES: usize = 4;
/// Output features per block, in every shape.
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
        // The system reserves 1 KiB per block.
        Self { shared_of_block, shared_of_multiprocessor: shared_of_block + 1024, multiprocessors }
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
    /// Whether chunks of `k` have halves: [`Parts::halved`].
    pub halved: bool,
    /// Whether a block computes all chunks of `k`, one after another.
    pub serial: bool,
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
            ("SETS", self.shape.sets.to_string()),
            ("STAGES", self.shape.stages.to_string()),
            ("BLOCKS", self.shape.blocks.to_string()),
            ("HALVED", flag(self.halved)),
            ("SERIAL", flag(self.serial)),
        ]
    }

    /// The source, kernel and macros to compile.
    pub fn compiled(&self) -> Variant {
        Variant { source: &SOURCE, kernel: "linear", defines: self.defines() }
    }

    /// A name made of the scheme, the tokens per block, the depth of the ring, and how parts of `k` are computed.
    pub fn name(&self) -> String {
        let parts = match (self.halved, self.shape.sets, self.serial) {
            (false, ..) => "",
            (true, 1, false) => "_halved",
            (true, 1, true) => "_serial",
            (true, ..) => "_sets",
        };
        format!("{}_t{}_s{}{parts}", self.scheme.name(), self.shape.tokens(), self.shape.stages)
    }

    /// Bytes of one stage of the ring.
    fn stage_bytes(scheme: &KernelScheme, tokens: usize) -> usize {
        let blocks = BLOCK_ROWS / TILE_ROWS;
        let tile = TILE_ROWS * TILE_K * scheme.code_bits / 8;
        blocks * (tile + scheme.parameter_bytes) + tokens * TILE_K * scheme.activation_bytes()
    }

    /// Bytes of dynamic shared memory per block.
    pub fn shared_bytes(&self) -> usize {
        let tokens = self.shape.tokens();
        let sums =
            if self.scheme.sums_activations() { 2 * self.scheme.tile_groups() * tokens * 4 } else { 0 };
        let ring = (self.shape.stages * Self::stage_bytes(&self.scheme, tokens) + sums).next_multiple_of(128);
        let ring = self.shape.sets * ring;
        // The memory of the ring is reused to reorder results.
        ring.max(tokens * (BLOCK_ROWS + 4) * 4)
    }

    /// Bytes of the workspace for a chunk's sums of one tile of results.
    pub(super) fn partial_bytes(&self) -> usize {
        4 * self.shape.rows() * self.shape.tokens()
    }

    /// Chooses the variant for `m` tokens on this device: the smallest shape that holds them, if it fits in shared
    /// memory, and otherwise the largest that fits. With many tokens, one block may compute all chunks one after
    /// another.
    pub fn choose(scheme: KernelScheme, [n, k]: [usize; 2], m: usize, device: &PlanLimits) -> Self {
        let shapes = if scheme.whole { &SHAPES[..] } else { &SHAPES[..FLOAT_SHAPES] };
        let parts = Parts::of([n, k]);
        let holds = shapes.iter().position(|&[warps, tiles, _]| m <= 8 * warps * tiles);
        let mut choice = holds.unwrap_or(shapes.len() - 1);
        let mut sets = 2;
        loop {
            let [token_warps, token_tiles, resident] = shapes[choice];
            let tokens = 8 * token_warps * token_tiles;
            sets = if parts.halved && tokens <= TWO_SETS { sets } else { 1 };
            let stage = Self::stage_bytes(&scheme, tokens);
            // For few tokens, two sets of warps share a multiprocessor's shared memory; for many, one set has all of
            // it. 4 KiB are left for the system and for sums.
            let share =
                if resident > 1 { device.shared_of_multiprocessor / 2 } else { device.shared_of_block };
            let ring = share.min(device.shared_of_block).saturating_sub(4096);
            let stages = (ring / stage).clamp(MIN_STAGES, MAX_STAGES);
            let tiles = n.div_ceil(BLOCK_ROWS).saturating_mul(m.div_ceil(tokens));
            let serial = tokens > TWO_SETS && parts.chunks > 1 && tiles >= device.multiprocessors;
            // The sums of previous chunks occupy registers, too.
            let blocks = if serial { 1 } else { resident / sets };
            let shape =
                BlockShape { row_warps: 4, row_tiles: 2, token_warps, token_tiles, sets, stages, blocks };
            let variant = Self { scheme, shape, halved: parts.halved, serial };
            if (choice, sets) == (0, 1) || variant.shared_bytes() <= device.shared_of_block {
                return variant;
            }
            // One set of warps, and then fewer tokens per block.
            (choice, sets) = if sets == 2 { (choice, 1) } else { (choice - 1, 2) };
        }
    }
}

/// For a tile that is being multiplied, one that is being summed, and one that is being loaded.
const MIN_STAGES: usize = 3;
const MAX_STAGES: usize = 6;

/// How `k` is cut into parts. Each part is summed starting from zero; a chunk is its first half plus its second, and
/// chunks are added in order. So rounding depends only on the shape of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Parts {
    /// The number of chunks, 1 to 4. Each is a run of whole tiles.
    pub chunks: usize,
    /// Whether each chunk is summed in two halves.
    pub halved: bool,
}

impl Parts {
    /// Returns the parts of weights `[n, k]`: as many chunks as are needed to occupy about 128 blocks, but at most 4,
    /// and at most one per eight tiles along `k`; each chunk has two halves. A matrix with at least 256 tiles of
    /// [`BLOCK_ROWS`] rows, or with fewer than eight tiles along `k`, is one part.
    pub fn of([n, k]: [usize; 2]) -> Self {
        let (rows, tiles) = (n.div_ceil(BLOCK_ROWS).max(1), k.div_ceil(TILE_K).max(1));
        let halved = rows < 256 && tiles >= 8;
        // To the nearest number of chunks. With 96 row tiles, for example, 1 chunk leaves a quarter of 128 places for
        // blocks idle, and so do 2 chunks, in two waves.
        let wanted = ((128 + rows / 2) / rows).clamp(1, 4).min((tiles / 8).max(1));
        Self { chunks: if halved { wanted } else { 1 }, halved }
    }

    /// The number of tiles per chunk; the last chunk may have fewer.
    pub fn chunk_tiles(&self, k: usize) -> usize {
        k.div_ceil(TILE_K).div_ceil(self.chunks)
    }
}
