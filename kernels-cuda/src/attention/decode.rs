//! Decode attention on paged caches: which variant of the kernel a shape takes, its grid, its memory, its arguments.

use quant_kernels_cpu::KernelError;
use quant_kernels_cpu::attention::KvType;

use super::Float;
use super::layout::{KvPageLayout, TILE_TOKENS};
use crate::compile::Variant;
use crate::launch::{Argument, LaunchShape};
use crate::registry::Entry;

/// The most splits that a sequence is cut into.
pub const MAX_SPLITS: usize = 32;
/// The fewest tokens of a split.
pub const MIN_SPLIT: usize = 512;
/// Shared memory that every architecture lends a block, if asked to.
const SHARED_LIMIT: usize = 96 * 1024;
/// What a multiprocessor of the larger architectures has for all blocks.
const SHARED_TOTAL: usize = 200 * 1024;
/// Registers of a multiprocessor, and the most of a thread.
const REGISTERS: usize = 65536;
const MAX_REGISTERS: usize = 255;

/// What a launch is planned by. The plan holds for any number of tokens up to `max_tokens`, so it can be kept, or captured
/// in a graph, while sequences grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeShape {
    /// The pages.
    pub layout: KvPageLayout,
    /// A multiple of the key-value heads: query head `h` attends with head `h / (query_heads / kv_heads)`.
    pub query_heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Sequences of a launch; up to 65535.
    pub sequences: usize,
    /// Queries of each sequence: its last tokens', in order, of which each sees none that comes after it. 1 decodes; more
    /// are drafts to verify, or a prefill, after their keys and values were appended.
    pub queries: usize,
    /// At least the tokens of the longest list; sizes the grid and the workspace, and changes no result. Of a list that is
    /// longer on the device, the last tokens may be left out, and other lists are not harmed.
    pub max_tokens: usize,
    /// Of queries: f16 or bf16.
    pub query: Float,
    /// Of outputs.
    pub out: Float,
}

/// How sequences are cut: by rule of their tokens, whatever else is in the launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitRule {
    /// The most splits.
    pub max_splits: usize,
    /// The fewest tokens of a split, a multiple of 64.
    pub min_split: usize,
}

impl Default for SplitRule {
    fn default() -> Self {
        Self { max_splits: MAX_SPLITS, min_split: MIN_SPLIT }
    }
}

impl SplitRule {
    /// Tokens of each split, but for the last, of a sequence of `tokens`: a multiple of 64.
    pub fn split_tokens(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.max_splits).next_multiple_of(64).max(self.min_split)
    }

    /// Splits of a sequence of `tokens`: at least 1.
    pub fn splits(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.split_tokens(tokens)).max(1)
    }

    /// The most splits of any sequence of up to `tokens`.
    pub fn most_splits(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.min_split).clamp(1, self.max_splits)
    }
}

/// A planned launch of `attention_decode`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodePlan {
    /// The kernel: the same for all architectures.
    pub variant: Variant,
    /// Blocks, threads, shared memory; above 48 KiB of it the kernel must be loaded with as much.
    pub launch: LaunchShape,
    register_ceiling: u32,
    shape: DecodeShape,
    max_splits: usize,
    column_blocks: usize,
}

/// Where things are on the device, and strides. Addresses are multiples of 16 but where said.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeArguments {
    /// `[sequences, queries]` rows, `query_stride` elements apart, of `[query_heads, head_dim]`.
    pub query: u64,
    /// Elements between queries: a multiple of 4, usually `query_heads · head_dim`.
    pub query_stride: u64,
    /// The first page's first head.
    pub pages: u64,
    /// Bytes between pages of one head: a multiple of 16, at least [`KvPageLayout::page_bytes`].
    pub page_stride: u64,
    /// Bytes between heads of one page: a multiple of 16.
    pub head_stride: u64,
    /// u32 numbers of pages, in order, of any selection: `table[sequence · table_stride + kv_head · table_head_stride + i]`.
    pub table: u64,
    /// Entries between sequences.
    pub table_stride: u32,
    /// Entries between key-value heads: 0 where all heads read the same pages.
    pub table_head_stride: u32,
    /// u32 tokens of each list: `tokens[sequence · count_stride + kv_head · count_head_stride]`. The last page may be unfilled.
    pub tokens: u64,
    /// u32 tokens at the beginning of each list that are not seen, as `tokens`; 0 for none at all.
    pub first: u64,
    /// Entries between sequences: usually 1.
    pub count_stride: u32,
    /// Entries between key-value heads: usually 0.
    pub count_head_stride: u32,
    /// What scores are multiplied with: usually `1 / √head_dim`.
    pub scale: f32,
    /// `[sequences, queries, query_heads, head_dim]`; aligned to an element.
    pub out: u64,
    /// f32 `[sequences, queries, query_heads]`, natural logarithms; 0 for none.
    pub lse: u64,
    /// [`DecodePlan::tickets`] bytes or more: zero before, and left so. Launches of any plans of this crate, one after the other,
    /// share them; those that may run at the same time do not.
    pub tickets: u64,
    /// [`DecodePlan::workspace`] bytes or more, of any content. Shared as the tickets are.
    pub workspace: u64,
}

impl DecodeShape {
    /// Query heads that share a key-value head.
    pub fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// Plans a launch.
    ///
    /// # Errors
    /// When heads do not divide, queries are f32, or the grid would be too large.
    pub fn plan(&self) -> Result<DecodePlan, KernelError> {
        self.plan_with(SplitRule::default())
    }

    /// Plans a launch with another rule of splits, which is another variant of the kernel.
    ///
    /// # Errors
    /// As [`plan`](Self::plan), and when the rule has no splits, or such that are no multiples of 64 tokens.
    pub fn plan_with(&self, rule: SplitRule) -> Result<DecodePlan, KernelError> {
        if self.kv_heads == 0 || self.query_heads == 0 || !self.query_heads.is_multiple_of(self.kv_heads) {
            return Err(KernelError::Mismatch {
                what: "query heads, a multiple of key-value heads",
                expected: self.kv_heads,
                got: self.query_heads,
            });
        }
        if self.query == Float::F32 {
            return Err(KernelError::Scheme("a query of f32"));
        }
        if rule.max_splits == 0 || rule.min_split == 0 || !rule.min_split.is_multiple_of(64) {
            return Err(KernelError::Scheme("a rule of splits without splits, or not of 64 tokens"));
        }
        if self.max_tokens > i32::MAX as usize {
            return Err(KernelError::TooLarge("a sequence"));
        }
        let (layout, group) = (&self.layout, self.group());
        let columns = group.checked_mul(self.queries).ok_or(KernelError::TooLarge("the queries"))?;
        let tune = Tuning::of(layout, columns);
        let column_blocks = columns.div_ceil(8 * tune.head_tiles);
        let max_splits = rule.most_splits(self.max_tokens);
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
    /// What its machine code is held to.
    pub(super) fn entry(self) -> Entry {
        Entry {
            family: "attention",
            variant: self.variant,
            register_ceiling: self.register_ceiling,
            instructions: vec!["HMMA.16816.F32", "LDGSTS.E", "MOVM.16.MT88"],
        }
    }

    /// Bytes that splits meet in; 0 where no sequence is cut.
    pub fn workspace(&self) -> usize {
        match self.max_splits {
            1 => 0,
            _ => self.sums_bytes() + 8 * self.records(),
        }
    }

    /// Bytes of tickets, by which splits know who is last: 0 where no sequence is cut.
    pub fn tickets(&self) -> usize {
        match self.max_splits {
            1 => 0,
            _ => 4 * self.shape.sequences * self.shape.kv_heads * self.column_blocks,
        }
    }

    /// The arguments of the kernel, in its order.
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

    /// Rows that splits leave: of each split, query head, query and sequence.
    fn records(&self) -> usize {
        self.shape.sequences * self.shape.queries * self.shape.query_heads * self.max_splits
    }

    /// Sums come first in the workspace, what splits say of them second.
    fn sums_bytes(&self) -> usize {
        4 * self.records() * self.shape.layout.head_dim()
    }
}

/// What is chosen for a layout and a number of columns, query heads that share a key-value head times queries; the same
/// for all architectures. How tiles go to warps depends on the layout alone, so that results do not depend on columns.
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
        // Sixteen columns keep twice the sums; of wide heads these are too many registers.
        let head_tiles = if columns <= 8 || dim > 192 { 1 } else { 2 };
        let (mut warps, mut stages) = (4, 4);
        while warps * stages * tile > SHARED_LIMIT {
            if stages > 3 { stages -= 1 } else { warps /= 2 }
        }
        // The ring, and after it, in the same place, rows of sums with 8 bytes more each.
        let meet = warps * 8 * head_tiles * (4 * (dim + 4) + 8);
        let shared_bytes = (warps * stages * tile).max(meet);
        let by_registers = match (head_tiles, dim) {
            (1, 0..=96) => 4,
            (1, 97..=128) if layout.kind() == KvType::Kv4 => 4,
            (1, 97..=160) | (2, 0..=64) => 3,
            _ => 2,
        };
        let min_blocks = (SHARED_TOTAL / shared_bytes).clamp(1, by_registers);
        let register_ceiling = (REGISTERS / (32 * warps * min_blocks) / 8 * 8).min(MAX_REGISTERS);
        Self { head_tiles, warps, stages, min_blocks, shared_bytes, register_ceiling }
    }
}

const _: () = assert!(MIN_SPLIT.is_multiple_of(64) && 64 % TILE_TOKENS == 0);
