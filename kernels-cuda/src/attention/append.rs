//! Appending to paged caches: the kernel variant, its grid and its arguments.

use quant_kernels_cpu::KernelError;

use super::Float;
use super::layout::KvPageLayout;
use crate::compile::Variant;
use crate::launch::{Argument, LaunchShape};
use crate::registry::Entry;

const THREADS: usize = 128;

/// The parameters from which a launch is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AppendShape {
    /// The pages.
    pub layout: KvPageLayout,
    /// Number of key-value heads.
    pub kv_heads: usize,
    /// The number of tokens of a launch, of any sequences.
    pub tokens: usize,
    /// Type of keys and values.
    pub input: Float,
}

/// Device addresses and strides. Addresses are multiples of 16, except `refused`, a multiple of 4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AppendArguments {
    /// The keys, after rotary embedding: `[tokens]` rows of `[kv_heads, head_dim]`, `key_stride` elements apart.
    pub keys: u64,
    /// Elements between tokens; rows begin at multiples of 16 bytes.
    pub key_stride: u64,
    /// The values, in rows like those of the keys, `value_stride` elements apart.
    pub values: u64,
    /// Elements between tokens; rows begin at multiples of 16 bytes.
    pub value_stride: u64,
    /// u32 `[tokens]`: the table row of each token.
    pub sequence: u64,
    /// u32 `[tokens]`: each token's position in its sequence; tokens with `u32::MAX` are skipped.
    pub position: u64,
    /// u32 `[sequences, table_stride]`: page numbers.
    pub table: u64,
    /// Table entries between sequences.
    pub table_stride: u32,
    /// The first head of the first page.
    pub pages: u64,
    /// Bytes between pages of one head: a multiple of 16.
    pub page_stride: u64,
    /// Bytes between heads of one page: a multiple of 16.
    pub head_stride: u64,
    /// The number of pages. Tokens whose page number is greater than or equal to it are skipped.
    pub page_count: u32,
    /// A u32 that is incremented for each row with a NaN or a magnitude above 65504 (which is clamped when stored), or
    /// 0.
    pub refused: u64,
}

/// A planned launch of `kv_append`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppendPlan {
    /// The kernel, the same for all architectures.
    pub variant: Variant,
    /// Blocks and threads.
    pub launch: LaunchShape,
    shape: AppendShape,
}

impl AppendShape {
    /// Plans a launch.
    ///
    /// # Errors
    /// When there are no heads, or the grid would be too large.
    pub fn plan(&self) -> Result<AppendPlan, KernelError> {
        if self.kv_heads == 0 {
            return Err(KernelError::Scheme("the number of key-value heads must be at least 1"));
        }
        let lanes = match self.layout.dim() {
            0..=64 => 8,
            65..=128 => 16,
            _ => 32,
        };
        let rows = self.kv_heads.checked_mul(2).and_then(|heads| self.tokens.checked_mul(heads));
        let rows = rows.filter(|&rows| rows <= i32::MAX as usize);
        let Some(rows) = rows else { return Err(KernelError::TooLarge("the number of tokens to append")) };
        let defines = [
            ("KV_BITS", self.layout.bits()),
            ("HEAD_DIM", self.layout.head_dim()),
            ("INPUT_TYPE", self.input.code()),
        ];
        let variant = Variant {
            source: &super::APPEND_SOURCE,
            kernel: "kv_append",
            defines: defines.map(|(name, value)| (name, value.to_string())).to_vec(),
        };
        let grid = [rows.div_ceil(THREADS / lanes) as u32, 1, 1];
        let launch = LaunchShape { grid, block: THREADS as u32, shared_bytes: 0 };
        Ok(AppendPlan { variant, launch, shape: *self })
    }
}

impl AppendPlan {
    pub(super) fn entry(self) -> Entry {
        Entry {
            family: "attention",
            variant: self.variant,
            register_ceiling: 64,
            spill_bytes: 0,
            only_on: None,
            instructions: vec!["SHFL.BFLY", "STG.E"],
        }
    }

    /// The arguments of the kernel, in order.
    pub fn arguments(&self, at: &AppendArguments) -> [Argument; 16] {
        [
            Argument::U64(at.keys),
            Argument::U64(at.values),
            Argument::U64(at.sequence),
            Argument::U64(at.position),
            Argument::U64(at.table),
            Argument::U64(at.pages),
            Argument::U64(at.refused),
            Argument::U64(at.page_stride),
            Argument::U64(at.head_stride),
            Argument::U64(at.key_stride),
            Argument::U64(at.value_stride),
            Argument::U32(self.shape.tokens as u32),
            Argument::U32(self.shape.kv_heads as u32),
            Argument::U32(at.table_stride),
            Argument::U32(at.page_count),
            Argument::U32(self.shape.layout.page_shift()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use quant_kernels_cpu::attention::KvType;

    use super::*;

    #[test]
    fn too_large_values_are_reported() {
        let layout = KvPageLayout::new(KvType::Kv4, 64, 16).unwrap();
        let plan = |kv_heads, tokens| AppendShape { layout, kv_heads, tokens, input: Float::F16 }.plan();
        assert!(plan(8, 1 << 20).is_ok());
        for (kv_heads, tokens) in [(usize::MAX, 1), (usize::MAX / 2 + 1, 1), (1, 1 << 30), (8, usize::MAX)] {
            assert!(matches!(plan(kv_heads, tokens), Err(KernelError::TooLarge(_))), "{kv_heads} {tokens}");
        }
    }
}
