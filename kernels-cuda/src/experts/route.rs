//! Sorts a routing by expert, on the device.

use quant_kernels_cpu::KernelError;
pub use quant_kernels_cpu::experts::NO_EXPERT;

use crate::compile::{Source, Variant};
use crate::launch::{Argument, LaunchShape, Region};
use crate::registry::Entry;

static SOURCE: Source = Source {
    name: "experts_route.cu",
    text: include_str!("../../cuda/experts_route.cu"),
    headers: &[("ptx.cuh", include_str!("../../cuda/ptx.cuh"))],
};

const THREADS: usize = 128;

/// A planned launch that sorts a routing by expert.
///
/// A token has `top_k` slots, each with the number of an expert and a weight. Rows are slots in the order of experts;
/// those of an expert are in the order of slots. Slots whose number is not that of an expert, such as [`NO_EXPERT`],
/// have no row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutePlan {
    /// The kernel.
    pub variant: Variant,
    /// Blocks and threads: a warp per expert. No blocks if there are no experts.
    pub launch: LaunchShape,
    experts: usize,
    slots: usize,
    top_k: usize,
}

/// Device addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteArguments {
    /// u32 `[tokens, top_k]`: the numbers of experts.
    pub experts: Region,
    /// f32 `[tokens, top_k]`: the weights of experts; not used for slots without an expert.
    pub weights: Region,
    /// u32 `[experts + 1]`: the first row of each expert, followed by the number of rows.
    pub starts: Region,
    /// u32 `[tokens · top_k]`: the token of each row.
    pub token_of: Region,
    /// f32 `[tokens · top_k]`: the weight of each row.
    pub factors: Region,
    /// u32 `[tokens, top_k]`: the rows of each token in ascending order, then `u32::MAX` for slots without an expert.
    pub row_of: Region,
}

impl RoutePlan {
    /// Plans the sorting of `tokens · top_k` slots.
    ///
    /// # Errors
    /// When there are 2³¹ experts or slots, or more.
    pub fn new(experts: usize, tokens: usize, top_k: usize) -> Result<Self, KernelError> {
        let most = i32::MAX as usize - 1024;
        if experts > most {
            return Err(KernelError::TooLarge("the number of experts"));
        }
        let slots = tokens.checked_mul(top_k).filter(|&slots| slots <= most && top_k <= most);
        let slots = slots.ok_or(KernelError::TooLarge("the number of expert rows"))?;
        // One more warp finds the slots without an expert, and writes the number of rows.
        let blocks = (experts + 1).div_ceil(THREADS / 32);
        let launch = LaunchShape { grid: [blocks as u32, 1, 1], block: THREADS as u32, shared_bytes: 0 };
        Ok(Self { variant: variant(), launch, experts, slots, top_k })
    }

    /// The arguments of the kernel, in order.
    ///
    /// # Errors
    /// When a region is too small or misaligned.
    pub fn arguments(&self, at: &RouteArguments) -> Result<[Argument; 9], KernelError> {
        let of_slots = 4 * self.slots;
        at.experts.require("expert numbers", of_slots, 4)?;
        at.weights.require("expert weights", of_slots, 4)?;
        at.starts.require("first rows of experts", 4 * (self.experts + 1), 4)?;
        at.token_of.require("tokens of rows", of_slots, 4)?;
        at.factors.require("factors of rows", of_slots, 4)?;
        at.row_of.require("rows of tokens", of_slots, 4)?;
        Ok([
            Argument::U64(at.experts.address),
            Argument::U64(at.weights.address),
            Argument::U64(at.starts.address),
            Argument::U64(at.token_of.address),
            Argument::U64(at.factors.address),
            Argument::U64(at.row_of.address),
            Argument::U32(self.slots as u32),
            Argument::U32(self.top_k as u32),
            Argument::U32(self.experts as u32),
        ])
    }
}

fn variant() -> Variant {
    Variant { source: &SOURCE, kernel: "route_experts", defines: Vec::new() }
}

pub(super) fn entry() -> Entry {
    Entry {
        family: "experts",
        variant: variant(),
        register_ceiling: 40,
        spill_bytes: 0,
        only_on: None,
        instructions: vec!["VOTE.ANY", "POPC"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(address: u64, bytes: usize) -> Region {
        Region { address, bytes: bytes as u64 }
    }

    #[test]
    fn every_expert_has_a_warp() {
        for (experts, blocks) in [(0, 1), (3, 1), (4, 2), (128, 33)] {
            assert_eq!(RoutePlan::new(experts, 5, 2).unwrap().launch.grid, [blocks, 1, 1]);
        }
        for (experts, tokens, top_k) in
            [(1 << 31, 1, 1), (1, 1 << 30, 2), (1, usize::MAX, 2), (1, 0, 1 << 32)]
        {
            assert!(matches!(RoutePlan::new(experts, tokens, top_k), Err(KernelError::TooLarge(_))));
        }
    }

    #[test]
    fn mismatched_arguments_are_reported() {
        let plan = RoutePlan::new(4, 3, 2).unwrap();
        let of_slots = region(4, 24);
        let good = RouteArguments {
            experts: of_slots,
            weights: of_slots,
            starts: region(4, 20),
            token_of: of_slots,
            factors: of_slots,
            row_of: of_slots,
        };
        assert_eq!(plan.arguments(&good).unwrap()[6..], [6, 2, 4].map(Argument::U32));
        let short = region(4, 23);
        for bad in [
            RouteArguments { experts: short, ..good },
            RouteArguments { weights: short, ..good },
            RouteArguments { starts: region(4, 19), ..good },
            RouteArguments { token_of: short, ..good },
            RouteArguments { factors: short, ..good },
            RouteArguments { row_of: region(2, 24), ..good },
        ] {
            assert!(plan.arguments(&bad).is_err(), "{bad:?}");
        }
    }
}
