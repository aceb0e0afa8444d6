//! Merging results on parts of sequences: the kernel variant, its grid and its arguments.

use quant_kernels_cpu::KernelError;

use super::Float;
use crate::compile::Variant;
use crate::launch::{Argument, LaunchShape};
use crate::registry::Entry;

const THREADS: usize = 128;

/// The parameters from which a launch is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MergeShape {
    /// Number of parts to merge.
    pub parts: usize,
    /// Number of rows of each part: sequences times query heads.
    pub rows: usize,
    /// Number of features per row.
    pub head_dim: usize,
    /// Type of the merged rows; parts are f32.
    pub out: Float,
}

/// Device addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MergeArguments {
    /// f32 `[parts, rows, head_dim]`: the results of the parts.
    pub sums: u64,
    /// f32 `[parts, rows]`: log-sum-exps, minus infinity for parts without tokens.
    pub logs: u64,
    /// `[rows, head_dim]`: the merged rows.
    pub out: u64,
    /// f32 `[rows]`: the merged log-sum-exps; 0 if they are not needed.
    pub lse: u64,
}

/// A planned launch of `attention_merge`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergePlan {
    /// The kernel, the same for all architectures.
    pub variant: Variant,
    /// Blocks and threads.
    pub launch: LaunchShape,
    shape: MergeShape,
}

impl MergeShape {
    /// Plans a launch.
    ///
    /// # Errors
    /// When a size or the grid would be too large.
    pub fn plan(&self) -> Result<MergePlan, KernelError> {
        let items = self.rows.checked_mul(self.head_dim).map(|items| items.div_ceil(THREADS));
        let Some(blocks) = items.filter(|&blocks| blocks <= i32::MAX as usize) else {
            return Err(KernelError::TooLarge("the number of rows to merge"));
        };
        if [self.parts, self.rows, self.head_dim].into_iter().any(|of| of > i32::MAX as usize) {
            return Err(KernelError::TooLarge("the number of parts, rows or features to merge"));
        }
        let variant = Variant {
            source: &super::MERGE_SOURCE,
            kernel: "attention_merge",
            defines: vec![("OUT_TYPE", self.out.code().to_string())],
        };
        let launch = LaunchShape { grid: [blocks as u32, 1, 1], block: THREADS as u32, shared_bytes: 0 };
        Ok(MergePlan { variant, launch, shape: *self })
    }
}

impl MergePlan {
    pub(super) fn entry(self) -> Entry {
        Entry {
            family: "attention",
            variant: self.variant,
            register_ceiling: 64,
            spill_bytes: 0,
            only_on: None,
            instructions: vec!["LDG.E", "STG.E"],
        }
    }

    /// The arguments of the kernel, in order.
    pub fn arguments(&self, at: &MergeArguments) -> [Argument; 7] {
        let u = |x: usize| Argument::U32(x as u32);
        [
            Argument::U64(at.sums),
            Argument::U64(at.logs),
            Argument::U64(at.out),
            Argument::U64(at.lse),
            u(self.shape.parts),
            u(self.shape.rows),
            u(self.shape.head_dim),
        ]
    }
}
