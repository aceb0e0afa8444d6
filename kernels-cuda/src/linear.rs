//! Linear layers: which variant of `cuda/linear.cu` multiplies these weights by so many tokens, and what it needs.
//!
//! [`LinearPlan::new`] settles everything before a launch: macros, grid, shared memory, workspace. What decides about bits is
//! the scheme and [`chunks`], which depend on the weights alone; the shape of a block, and whether chunks of `k` go to
//! blocks of their own or follow each other in one, depend on `m` and the device and change no bit.

use quant_kernels_cpu::{KernelError, ScaleType};

use crate::compile::{Architecture, Source, Variant};
use crate::layout::{Order, TILE_K, TILE_ROWS, WeightLayout};

/// The text of the kernels.
pub static SOURCE: Source = Source {
    name: "linear.cu",
    text: include_str!("../cuda/linear.cu"),
    headers: &[
        ("ptx.cuh", include_str!("../cuda/ptx.cuh")),
        ("dequantize.cuh", include_str!("../cuda/dequantize.cuh")),
    ],
};

/// What activations are, as the kernel reads them: `[m, x_stride]` row-major, of which `k` are read. Rows begin at multiples of
/// 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Whole numbers of 8 bits with a scale a token; `zero`: and a zero, the same for all tokens.
    Int8 {
        /// Whether there is a zero.
        zero: bool,
    },
}

/// What results are rounded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Output {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Single precision.
    F32,
}

/// What of weights, activations and results is compiled into a variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinearScheme {
    activation: Activation,
    output: Output,
    code_bits: usize,
    /// Features of a group: 32, 64, 128, or `None` where a row is one group.
    group: Option<usize>,
    /// 0 to 3: the kernels' `SCALE`.
    scale: Scale,
    zeros: bool,
    /// Whether products are summed over all of `k` as whole numbers.
    whole: bool,
    signed: bool,
    parameter_bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Scale {
    F16,
    Bf16,
    F32,
    Progressive,
}

impl LinearScheme {
    /// That of packed weights with these activations and results.
    ///
    /// # Errors
    /// When the weights' codes lie for other activations, or lack the sums that a zero of activations needs.
    pub fn new(layout: &WeightLayout, activation: Activation, output: Output) -> Result<Self, KernelError> {
        let (order, zero) = match activation {
            Activation::Int8 { zero } => (Order::Int8, zero),
            Activation::F16 | Activation::Bf16 => (Order::Float, false),
        };
        if order != layout.order() {
            return Err(KernelError::Scheme("weights that are packed for other activations"));
        }
        if zero && !layout.has_sums() {
            return Err(KernelError::Scheme("a zero of activations without sums in the layout"));
        }
        let activation = match activation {
            // Sums that stand beside the tiles are read past, so they belong to the scheme.
            Activation::Int8 { .. } => Activation::Int8 { zero: layout.has_sums() },
            float => float,
        };
        let row = layout.row_is_group();
        let scale = match layout.scales() {
            _ if row => Scale::F32,
            ScaleType::F16 => Scale::F16,
            ScaleType::Bf16 => Scale::Bf16,
            ScaleType::F32 => Scale::F32,
            ScaleType::Progressive => Scale::Progressive,
        };
        Ok(Self {
            activation,
            output,
            code_bits: layout.code_bits(),
            group: (!row).then(|| layout.group_size().min(TILE_K)),
            scale,
            zeros: layout.middle().is_none(),
            whole: layout.summed_whole(),
            signed: layout.signed(),
            parameter_bytes: layout.parameter_bytes(),
        })
    }

    /// Bytes of an activation.
    pub fn activation_bytes(&self) -> usize {
        if self.is_float() { 2 } else { 1 }
    }

    /// Bytes of a result.
    pub fn output_bytes(&self) -> usize {
        if self.output == Output::F32 { 4 } else { 2 }
    }

    fn is_float(&self) -> bool {
        !matches!(self.activation, Activation::Int8 { .. })
    }

    /// Whether sums of activations are made.
    fn sums_activations(&self) -> bool {
        !self.signed
    }

    fn tile_groups(&self) -> usize {
        self.group.map_or(1, |g| TILE_K / g)
    }

    /// As [docs/naming.md] has it, without the machine: `w4a16_g128_gemm`, with `f16`, `bf16`, `asym`, `static` and the type of
    /// results behind.
    pub fn name(&self) -> String {
        let (bits, kind) = match self.activation {
            Activation::F16 => ("a16", "_f16"),
            Activation::Bf16 => ("a16", "_bf16"),
            Activation::Int8 { zero: false } => ("a8", ""),
            Activation::Int8 { zero: true } => ("a8", "_static"),
        };
        let group = self.group.map_or("channel".to_owned(), |g| format!("g{g}"));
        let scale = match self.scale {
            Scale::Progressive => "_progressive",
            Scale::Bf16 => "_sbf16",
            Scale::F32 if self.group.is_some() => "_sf32",
            _ => "",
        };
        let zeros = if self.zeros { "_asym" } else { "" };
        let output = match self.output {
            Output::F16 => "f16",
            Output::Bf16 => "bf16",
            Output::F32 => "f32",
        };
        format!("w{}{bits}_{group}_gemm{kind}{scale}{zeros}_{output}", self.code_bits)
    }
}

/// The shape of a block of threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockShape {
    /// Warps along output features, each with `row_tiles` tiles of 16.
    pub row_warps: usize,
    /// Tiles of 16 output features of a warp.
    pub row_tiles: usize,
    /// Warps along tokens, each with `token_tiles` tiles of 8.
    pub token_warps: usize,
    /// Tiles of 8 tokens of a warp.
    pub token_tiles: usize,
    /// Depth of the ring.
    pub stages: usize,
    /// Blocks that a multiprocessor should hold: bounds the registers of a thread.
    pub blocks: usize,
}

impl BlockShape {
    /// Output features of a block: 128 in all shapes.
    pub fn rows(&self) -> usize {
        self.row_warps * self.row_tiles * TILE_ROWS
    }

    /// Tokens of a block.
    pub fn tokens(&self) -> usize {
        self.token_warps * self.token_tiles * 8
    }

    /// Threads of a block.
    pub fn threads(&self) -> usize {
        32 * self.row_warps * self.token_warps
    }

    /// Registers of a thread that `blocks` blocks leave on a multiprocessor with 65,536, at most 255.
    pub fn register_ceiling(&self) -> usize {
        (65_536 / (self.blocks * self.threads()) / 8 * 8).min(255)
    }
}

/// Warps and tiles along tokens, and blocks, from few tokens to many.
const SHAPES: [[usize; 3]; 5] = [[1, 1, 4], [1, 2, 3], [2, 2, 2], [2, 4, 1], [2, 8, 1]];
/// Shapes whose sums of floats fit the registers.
const FLOAT_SHAPES: usize = 4;
/// Output features of a block in every shape.
pub const BLOCK_ROWS: usize = 128;

/// What a device has, as far as plans depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Bytes of shared memory that one block may have.
    pub shared_of_block: usize,
    /// Bytes of shared memory that a multiprocessor has.
    pub shared_of_multiprocessor: usize,
    /// Multiprocessors.
    pub multiprocessors: usize,
}

impl DeviceLimits {
    /// Those of a usual device of an architecture: A100, A10, L40S, H200, RTX 5090.
    pub fn of(architecture: Architecture) -> Self {
        let (shared_of_block, multiprocessors) = match architecture {
            Architecture::Sm80 => (166_912, 108),
            Architecture::Sm86 => (101_376, 72),
            Architecture::Sm89 => (101_376, 142),
            Architecture::Sm90 => (232_448, 132),
            Architecture::Sm120 => (101_376, 170),
        };
        // A kibibyte is the system's, for each block.
        Self { shared_of_block, shared_of_multiprocessor: shared_of_block + 1024, multiprocessors }
    }
}

/// A kernel as it is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinearVariant {
    /// What it multiplies.
    pub scheme: LinearScheme,
    /// By how many threads.
    pub shape: BlockShape,
    /// Whether a block takes all chunks of `k`, one after the other.
    pub serial: bool,
}

impl LinearVariant {
    /// The macros of `cuda/linear.cu`.
    pub fn defines(&self) -> Vec<(&'static str, String)> {
        let s = &self.scheme;
        let activation = match s.activation {
            Activation::F16 => "F16",
            Activation::Bf16 => "BF16",
            Activation::Int8 { .. } => "S8",
        };
        let scale = match s.scale {
            Scale::F16 => "F16",
            Scale::Bf16 => "BF16",
            Scale::F32 => "F32",
            Scale::Progressive => "PROGRESSIVE",
        };
        let output = match s.output {
            Output::F16 => "F16",
            Output::Bf16 => "BF16",
            Output::F32 => "F32",
        };
        let x_zero = matches!(s.activation, Activation::Int8 { zero: true });
        let flag = |set: bool| usize::from(set).to_string();
        vec![
            ("ACTIVATION", activation.to_owned()),
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
            ("SERIAL", flag(self.serial)),
        ]
    }

    /// What the compiler gets.
    pub fn compiled(&self) -> Variant {
        Variant { source: &SOURCE, kernel: "linear", defines: self.defines() }
    }

    /// Scheme, tokens of a block, depth of the ring, and whether chunks follow each other.
    pub fn name(&self) -> String {
        let serial = if self.serial { "_serial" } else { "" };
        format!("{}_t{}_s{}{serial}", self.scheme.name(), self.shape.tokens(), self.shape.stages)
    }

    /// The matrix instruction that disassembly of it must show.
    pub fn matrix_instruction(&self) -> &'static str {
        if self.scheme.is_float() { "HMMA.16816" } else { "IMMA.16832" }
    }

    /// Bytes of one slot of the ring.
    fn stage_bytes(scheme: &LinearScheme, tokens: usize) -> usize {
        let blocks = BLOCK_ROWS / TILE_ROWS;
        let tile = TILE_ROWS * TILE_K * scheme.code_bits / 8;
        blocks * (tile + scheme.parameter_bytes) + tokens * TILE_K * scheme.activation_bytes()
    }

    /// Bytes of dynamic shared memory of a block.
    pub fn shared_bytes(&self) -> usize {
        let tokens = self.shape.tokens();
        let sums =
            if self.scheme.sums_activations() { 2 * self.scheme.tile_groups() * tokens * 4 } else { 0 };
        let ring = self.shape.stages * Self::stage_bytes(&self.scheme, tokens) + sums;
        // Results turn from fragments to rows where the ring was.
        ring.max(tokens * (BLOCK_ROWS + 4) * 4)
    }

    /// Bytes of a chunk's sums in the workspace, of one tile of results.
    fn partial_bytes(&self) -> usize {
        self.shape.row_tiles * self.shape.token_tiles * self.shape.threads() * 16
    }

    /// The variant for so many tokens on such a device: the smallest shape that holds them, or the largest that there is;
    /// chunks follow each other in one block where tiles of results are enough to occupy the device.
    pub fn choose(scheme: LinearScheme, [n, k]: [usize; 2], m: usize, device: &DeviceLimits) -> Self {
        let shapes = if scheme.whole { &SHAPES[..] } else { &SHAPES[..FLOAT_SHAPES] };
        let holds = shapes.iter().position(|&[warps, tiles, _]| m <= 8 * warps * tiles);
        let mut choice = holds.unwrap_or(shapes.len() - 1);
        loop {
            let [token_warps, token_tiles, blocks] = shapes[choice];
            let tokens = 8 * token_warps * token_tiles;
            let stage = Self::stage_bytes(&scheme, tokens);
            // Two blocks of few tokens, or one of many, share what a multiprocessor has, a kibibyte of which each block
            // takes for the system; some more is for sums.
            let share = if blocks > 1 { device.shared_of_multiprocessor / 2 } else { device.shared_of_block };
            let ring = share.min(device.shared_of_block).saturating_sub(4096);
            let stages = (ring / stage).clamp(MIN_STAGES, MAX_STAGES);
            let tiles = n.div_ceil(BLOCK_ROWS).saturating_mul(m.div_ceil(tokens));
            let serial = tokens > 16 && chunks([n, k]) > 1 && tiles >= device.multiprocessors;
            // Sums of the chunks before take registers too.
            let blocks = if serial { 1 } else { blocks };
            let shape = BlockShape { row_warps: 4, row_tiles: 2, token_warps, token_tiles, stages, blocks };
            let variant = Self { scheme, shape, serial };
            if choice == 0 || variant.shared_bytes() <= device.shared_of_block {
                return variant;
            }
            choice -= 1;
        }
    }
}

/// The tile that is multiplied, the one whose sums are made, and one on its way.
const MIN_STAGES: usize = 3;
const MAX_STAGES: usize = 6;

/// Into how many runs of whole tiles `k` is cut, for weights `[n, k]`: enough that some 256 blocks share the matrix, of at
/// least four tiles each, and at most eight.
///
/// Each chunk is summed from zero and chunks are added in order, so this number belongs to the definition of results.
pub fn chunks([n, k]: [usize; 2]) -> usize {
    let (rows, tiles) = (n.div_ceil(BLOCK_ROWS).max(1), k.div_ceil(TILE_K).max(1));
    let wanted = 256_usize.div_ceil(rows).min(8).min(tiles / 4).max(1);
    // No chunk may be empty.
    tiles.div_ceil(tiles.div_ceil(wanted))
}

/// A launch, settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearPlan {
    /// The kernel.
    pub variant: LinearVariant,
    /// Blocks: tiles of results, chunks, 1.
    pub grid: [u32; 3],
    /// Chunks of `k`.
    pub chunks: u32,
    /// Bytes at the beginning of the workspace that are zero before the first launch; the kernel leaves them zero.
    pub ticket_bytes: usize,
    /// Bytes of the workspace.
    pub workspace_bytes: usize,
}

impl LinearPlan {
    /// Plans `m` tokens.
    ///
    /// # Errors
    /// When `m` is 0, the grid or an index goes beyond what the kernel counts with.
    pub fn new(
        layout: &WeightLayout,
        activation: Activation,
        output: Output,
        m: usize,
        device: &DeviceLimits,
    ) -> Result<Self, KernelError> {
        let scheme = LinearScheme::new(layout, activation, output)?;
        let shape = [layout.n(), layout.k()];
        Self::of_variant(LinearVariant::choose(scheme, shape, m, device), shape, m)
    }

    /// Plans `m` tokens with a given variant, for weights `[n, k]`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_variant(variant: LinearVariant, [n, k]: [usize; 2], m: usize) -> Result<Self, KernelError> {
        if m == 0 {
            return Err(KernelError::Scheme("a product of no tokens"));
        }
        let small = |value: usize, most: usize, what| {
            if value <= most { Ok(value as u32) } else { Err(KernelError::TooLarge(what)) }
        };
        // Indices of features and tokens, and bytes of a row, are of 32 bits in the kernel, and reach a block beyond.
        let most = i32::MAX as usize / 2 - 1024;
        small(n, most, "the output features")?;
        small(k, most, "the input features")?;
        small(m, most, "the tokens")?;
        let chunks = chunks([n, k]);
        let (rows, tokens) = (n.div_ceil(BLOCK_ROWS), m.div_ceil(variant.shape.tokens()));
        let split = if variant.serial { 1 } else { chunks };
        let tiles = rows.checked_mul(tokens).ok_or(KernelError::TooLarge("the grid"))?;
        // Eight token tiles of every row tile are counted together.
        small(rows, i32::MAX as usize / 8, "the output features")?;
        let grid = [small(tiles, i32::MAX as usize, "the grid")?, small(split, 65_535, "the grid")?, 1];
        let (mut ticket_bytes, mut workspace_bytes) = (0, 0);
        if split > 1 {
            let large = KernelError::TooLarge("the workspace");
            ticket_bytes = tiles.checked_mul(4).ok_or(large.clone())?.next_multiple_of(256);
            let partials = tiles.checked_mul(split).and_then(|t| t.checked_mul(variant.partial_bytes()));
            workspace_bytes = partials.and_then(|p| p.checked_add(ticket_bytes)).ok_or(large)?;
        }
        Ok(Self { variant, grid, chunks: chunks as u32, ticket_bytes, workspace_bytes })
    }
}

/// Variants that stand for all: of every scheme, with scales and results of its activations' type, the shapes for one token
/// and for many; of the usual schemes every shape.
pub fn variants(architecture: Architecture) -> Vec<LinearVariant> {
    let device = DeviceLimits::of(architecture);
    let mut variants = Vec::new();
    for (layout, activation, output, usual) in schemes() {
        let Ok(scheme) = LinearScheme::new(&layout, activation, output) else { continue };
        let tokens: &[usize] = if usual { &[8, 16, 32, 64, 128, 4096] } else { &[8, 4096] };
        for &m in tokens {
            // Of several chunks, which follow each other only where tokens are many.
            let variant = LinearVariant::choose(scheme, [4096, 4096], m, &device);
            if !variants.contains(&variant) {
                variants.push(variant);
            }
        }
    }
    variants
}

/// A layout of every scheme, with activations and results; whether it is one of the usual.
fn schemes() -> Vec<(WeightLayout, Activation, Output, bool)> {
    let mut schemes = Vec::new();
    let k = 4096;
    for bits in [4, 8] {
        for group in [32, 64, 128, k] {
            for zeros in [false, true] {
                let middle = (!zeros).then_some(1 << (bits - 1));
                let mut add = |scale, order, sums, activation, output, usual| {
                    let layout = WeightLayout::from_parts([4096, k], bits, group, scale, middle, order, sums);
                    schemes.extend(layout.map(|layout| (layout, activation, output, usual)));
                };
                let usual = bits == 4 && group == 128;
                add(ScaleType::F16, Order::Float, false, Activation::F16, Output::F16, usual);
                add(ScaleType::Bf16, Order::Float, false, Activation::Bf16, Output::Bf16, usual);
                for zero in [false, true] {
                    let activation = Activation::Int8 { zero };
                    let usual = group == k && !zeros && !zero;
                    add(ScaleType::F16, Order::Int8, zero, activation, Output::F16, usual);
                    if bits == 4 && group < k {
                        let usual = group == 128 && zeros && !zero;
                        add(ScaleType::Progressive, Order::Int8, zero, activation, Output::F16, usual);
                    }
                }
            }
        }
    }
    schemes
}
