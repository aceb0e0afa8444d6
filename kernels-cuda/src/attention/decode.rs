//! Decode attention on paged caches: the kernel variant for a shape, its grid, memory and arguments.

use quant_kernels_cpu::KernelError;
use quant_kernels_cpu::attention::KvType;

use super::Float;
use super::layout::{KvPageLayout, TILE_TOKENS};
use crate::compile::Variant;
use crate::launch::{Argument, LaunchShape};
use crate::registry::Entry;

/// Maximum number of splits of a sequence.
pub const MAX_SPLITS: usize = 32;
/// Minimum number of tokens of every split except the last.
pub const MIN_SPLIT: usize = 512;
/// Shared memory in bytes that a block can have on every architecture, with opt-in.
const SHARED_LIMIT: usize = 96 * 1024;
/// Shared memory in bytes of a multiprocessor, as the tuning assumes it.
const SHARED_TOTAL: usize = 200 * 1024;
/// Registers of a multiprocessor.
const REGISTERS: usize = 65536;
/// The maximum number of registers per thread.
const MAX_REGISTERS: usize = 255;

/// The parameters from which a launch is planned. A plan is valid for any number of tokens up to `max_tokens`, so it
/// can be kept, or captured in a graph, while sequences grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeShape {
    /// The pages.
    pub layout: KvPageLayout,
    /// A multiple of the key-value heads: query head `h` attends to key-value head `h / (query_heads / kv_heads)`.
    pub query_heads: usize,
    /// Number of key-value heads.
    pub kv_heads: usize,
    /// Number of sequences in a launch, at most 65535.
    pub sequences: usize,
    /// Queries per sequence, which belong to its last tokens, in order; each sees no tokens after its own. 1 for
    /// decoding; more to verify drafts or to prefill, after their keys and values were appended.
    pub queries: usize,
    /// An upper bound of the tokens per list. It does not change results. If a list is longer on the device, its last
    /// tokens may be ignored; other lists are not affected.
    pub max_tokens: usize,
    /// Type of queries: f16 or bf16.
    pub query: Float,
    /// Type of outputs.
    pub out: Float,
}

/// The rule by which a sequence is split. It depends only on the sequence's own number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitRule {
    /// Maximum number of splits.
    pub max_splits: usize,
    /// Minimum number of tokens of every split except the last, a multiple of 64.
    pub min_split: usize,
}

impl Default for SplitRule {
    fn default() -> Self {
        Self { max_splits: MAX_SPLITS, min_split: MIN_SPLIT }
    }
}

impl SplitRule {
    /// The number of tokens of each split except the last, for a sequence of `tokens`: a multiple of 64.
    pub fn split_tokens(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.max_splits).next_multiple_of(64).max(self.min_split)
    }

    /// The number of splits of a sequence of `tokens`: at least 1.
    pub fn splits(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.split_tokens(tokens)).max(1)
    }

    /// The maximum number of splits of any sequence of up to `tokens`.
    pub fn max_splits(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.min_split).clamp(1, self.max_splits)
    }
}

/// A planned launch of `attention_decode`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodePlan {
    /// The kernel, the same for all architectures.
    pub variant: Variant,
    /// Blocks, threads and shared memory.
    pub launch: LaunchShape,
    register_ceiling: u32,
    shape: DecodeShape,
    max_splits: usize,
    column_blocks: usize,
}

/// Device addresses and strides. Addresses are multiples of 16 unless stated otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeArguments {
    /// The queries: `[sequences, queries]` rows of `[query_heads, head_dim]`, `query_stride` elements apart.
    pub query: u64,
    /// Elements between queries: a multiple of 4, usually `query_heads · head_dim`.
    pub query_stride: u64,
    /// The first head of the first page.
    pub pages: u64,
    /// Bytes between pages of one head: a multiple of 16, at least [`KvPageLayout::page_bytes`].
    pub page_stride: u64,
    /// Bytes between heads of one page: a multiple of 16.
    pub head_stride: u64,
    /// u32 page numbers, in order: `table[sequence · table_stride + kv_head · table_head_stride + i]`. A list may
    /// contain any pages.
    pub table: u64,
    /// Table entries between sequences.
    pub table_stride: u32,
    /// Table entries between key-value heads: 0 if all heads read the same pages.
    pub table_head_stride: u32,
    /// u32 numbers of tokens per list: `tokens[sequence · count_stride + kv_head · count_head_stride]`. The last page
    /// may be partly filled.
    pub tokens: u64,
    /// u32 numbers of tokens at the beginning of each list that no query sees, indexed like `tokens`; 0 if all lists
    /// are seen from the beginning.
    pub first: u64,
    /// Entries between sequences: usually 1.
    pub count_stride: u32,
    /// Entries between key-value heads: usually 0.
    pub count_head_stride: u32,
    /// Factor of the scores, usually `1 / √head_dim`.
    pub scale: f32,
    /// `[sequences, queries, query_heads, head_dim]`; aligned to an element.
    pub out: u64,
    /// f32 `[sequences, queries, query_heads]`, natural logarithms; 0 if they are not needed.
    pub lse: u64,
    /// At least [`DecodePlan::tickets`] bytes, 0 before the launch, which resets them to 0. Launches that run one after
    /// another may share tickets; concurrent launches may not.
    pub tickets: u64,
    /// At least [`DecodePlan::workspace`] bytes with any contents. May be shared like the tickets.
    pub workspace: u64,
}

impl DecodeShape {
    /// The number of query heads that share a key-value head.
    pub fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// Plans a launch.
    ///
    /// # Errors
    /// When the query heads are not a positive multiple of the key-value heads, queries are f32, or `max_tokens` or the
    /// grid is too large.
    pub fn plan(&self) -> Result<DecodePlan, KernelError> {
        self.plan_with(SplitRule::default())
    }

    /// Plans a launch with a different rule for splits, which needs a different kernel.
    ///
    /// # Errors
    /// See [`plan`](Self::plan); also when the rule allows no splits, or splits that are not multiples of 64 tokens.
    pub fn plan_with(&self, rule: SplitRule) -> Result<DecodePlan, KernelError> {
        if self.kv_heads == 0 {
            let what = "the number of key-value heads must be at least";
            return Err(KernelError::Mismatch { what, expected: 1, got: 0 });
        }
        if self.query_heads == 0 || !self.query_heads.is_multiple_of(self.kv_heads) {
            return Err(KernelError::Mismatch {
                what: "the number of query heads must be a positive multiple of",
                expected: self.kv_heads,
                got: self.query_heads,
            });
        }
        if self.query == Float::F32 {
            return Err(KernelError::Scheme("queries must be f16 or bf16, not f32"));
        }
        if rule.max_splits == 0 || rule.min_split == 0 || !rule.min_split.is_multiple_of(64) {
            return Err(KernelError::Scheme(
                "a split rule must allow at least one split, and its splits must be multiples of 64 tokens",
            ));
        }
        if self.max_tokens > i32::MAX as usize {
            return Err(KernelError::TooLarge("the maximum number of tokens"));
        }
        let (layout, group) = (&self.layout, self.group());
        let columns =
            group.checked_mul(self.queries).ok_or(KernelError::TooLarge("the number of queries"))?;
        let tune = Tuning::of(layout, columns);
        let column_blocks = columns.div_ceil(8 * tune.head_tiles);
        let max_splits = rule.max_splits(self.max_tokens);
        let rows = self.kv_heads.checked_mul(column_blocks).filter(|&rows| rows <= 65535);
        let Some(rows) = rows.filter(|_| self.sequences <= 65535) else {
            return Err(KernelError::TooLarge("the grid"));
        };
        let defines = [
            ("KV_BITS", layout.bits()),
            ("HEAD_DIM", layout.head_dim()),
            ("QUERY_TYPE", self.query.code()),
            ("OUT_TYPE", self.out.code()),
            ("HEAD_TILES", tune.head_tiles),
            ("WARPS", tune.warps),
            ("STAGES", tune.stages),
            ("MAX_SPLITS", rule.max_splits),
            ("MIN_SPLIT", rule.min_split),
            ("MIN_BLOCKS", tune.min_blocks),
        ];
        let variant = Variant {
            source: &super::DECODE_SOURCE,
            kernel: "attention_decode",
            defines: defines.map(|(name, value)| (name, value.to_string())).to_vec(),
        };
        let launch = LaunchShape {
            grid: [max_splits as u32, rows as u32, self.sequences as u32],
            block: 32 * tune.warps as u32,
            shared_bytes: tune.shared_bytes as u32,
        };
        let register_ceiling = tune.register_ceiling as u32;
        Ok(DecodePlan { variant, launch, register_ceiling, shape: *self, max_splits, column_blocks })
    }
}

impl DecodePlan {
    pub(super) fn entry(self) -> Entry {
        Entry {
            family: "attention",
            variant: self.variant,
            register_ceiling: self.register_ceiling,
            // Five blocks of 96 registers per thread were faster on an H200 than four.
            spill_bytes: if self.register_ceiling == 96 { 8 } else { 0 },
            only_on: None,
            instructions: vec!["HMMA.16816.F32", "LDGSTS.E", "MOVM.16.MT88"],
        }
    }

    /// The size in bytes of the workspace in which the results of splits are combined; 0 if no sequence is split.
    pub fn workspace(&self) -> usize {
        match self.max_splits {
            1 => 0,
            _ => self.sums_bytes() + 8 * self.records(),
        }
    }

    /// The size in bytes of the tickets, by which blocks determine which split finishes last; 0 if no sequence is
    /// split.
    pub fn tickets(&self) -> usize {
        match self.max_splits {
            1 => 0,
            _ => 4 * self.shape.sequences * self.shape.kv_heads * self.column_blocks,
        }
    }

    /// The arguments of the kernel, in order.
    pub fn arguments(&self, at: &DecodeArguments) -> [Argument; 22] {
        let shape = &self.shape;
        let u = |x: usize| Argument::U32(x as u32);
        [
            Argument::U64(at.query),
            Argument::U64(at.pages),
            Argument::U64(at.table),
            Argument::U64(at.tokens),
            Argument::U64(at.first),
            Argument::U64(at.out),
            Argument::U64(at.lse),
            Argument::U64(at.workspace),
            Argument::U64(at.workspace.wrapping_add(self.sums_bytes() as u64)),
            Argument::U64(at.tickets),
            Argument::U64(at.page_stride),
            Argument::U64(at.head_stride),
            Argument::U64(at.query_stride),
            Argument::U32(at.table_stride),
            Argument::U32(at.table_head_stride),
            Argument::U32(at.count_stride),
            Argument::U32(at.count_head_stride),
            Argument::U32(shape.layout.page_shift()),
            u(shape.kv_heads),
            u(shape.group()),
            u(shape.queries),
            Argument::F32(at.scale),
        ]
    }

    fn records(&self) -> usize {
        self.shape.sequences * self.shape.queries * self.shape.query_heads * self.max_splits
    }

    fn sums_bytes(&self) -> usize {
        4 * self.records() * self.shape.layout.head_dim()
    }
}

/// The tuning for a layout and a number of columns (queries times query heads that share a key-value head). The
/// assignment of tiles to warps depends only on the layout, so that results do not depend on the number of columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tuning {
    head_tiles: usize,
    warps: usize,
    stages: usize,
    min_blocks: usize,
    shared_bytes: usize,
    register_ceiling: usize,
}

impl Tuning {
    fn of(layout: &KvPageLayout, columns: usize) -> Self {
        let (dim, tile) = (layout.dim(), layout.tile_bytes());
        // Sixteen columns need twice as many sums, too many for the registers if heads are wide.
        let head_tiles = if columns <= 8 || dim > 192 { 1 } else { 2 };
        // More stages or fewer blocks were slower on an H200.
        let (mut warps, stages) = (4, 3);
        while warps * stages * tile > SHARED_LIMIT {
            warps /= 2;
        }
        // Shared memory holds the ring, and afterwards the rows of sums that warps combine, with 8 more bytes each.
        let meet = warps * 8 * head_tiles * (4 * (dim + 4) + 8);
        let shared_bytes = (warps * stages * tile).max(meet);
        let by_registers = match (head_tiles, dim) {
            (1, 0..=96) => 4,
            (1, 97..=128) if layout.kind() == KvType::Kv4 => 5,
            (1, 97..=160) | (2, 0..=64) => 3,
            _ => 2,
        };
        let min_blocks = (SHARED_TOTAL / shared_bytes).clamp(1, by_registers);
        let register_ceiling = (REGISTERS / (32 * warps * min_blocks) / 8 * 8).min(MAX_REGISTERS);
        Self { head_tiles, warps, stages, min_blocks, shared_bytes, register_ceiling }
    }
}

const _: () = assert!(MIN_SPLIT.is_multiple_of(64) && 64 % TILE_TOKENS == 0);
