//! Adds the results of each token's experts, in a fixed order.

use quant_kernels_cpu::KernelError;

use crate::compile::{Source, Variant};
use crate::float::Float;
use crate::launch::{Argument, LaunchShape, Region};
use crate::registry::Entry;

static SOURCE: Source = Source {
    name: "experts_sum.cu",
    text: include_str!("../../cuda/experts_sum.cu"),
    headers: &[
        ("ptx.cuh", include_str!("../../cuda/ptx.cuh")),
        ("values.cuh", include_str!("../../cuda/values.cuh")),
    ],
};

const THREADS: usize = 128;

/// The parameters from which a launch is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SumShape {
    /// The type of rows.
    pub element: Float,
    /// The type of sums.
    pub output: Float,
    /// The number of rows.
    pub rows: usize,
    /// The number of tokens. 0 launches nothing.
    pub tokens: usize,
    /// The number of terms per token, of which some may be absent.
    pub terms: usize,
    /// Features per row.
    pub n: usize,
    /// Elements between rows.
    pub x_stride: usize,
    /// Elements between sums.
    pub out_stride: usize,
    /// Whether addresses and strides are multiples of 16 bytes. Otherwise values are read one at a time.
    pub aligned: bool,
}

impl SumShape {
    /// Creates the shape of contiguous rows of `n` features, with up to `terms` rows per token.
    pub fn new(element: Float, output: Float, [tokens, terms, n]: [usize; 3]) -> Self {
        let straight = |of: Float| n.saturating_mul(of.bytes()).is_multiple_of(16);
        Self {
            element,
            output,
            rows: tokens.saturating_mul(terms),
            tokens,
            terms,
            n,
            x_stride: n,
            out_stride: n,
            aligned: straight(element) && straight(output),
        }
    }

    /// Plans a launch.
    ///
    /// # Errors
    /// When a stride is too small or a number too large.
    pub fn plan(&self) -> Result<SumPlan, KernelError> {
        let most = i32::MAX as usize;
        if self.rows > most || self.terms > most {
            return Err(KernelError::TooLarge("the number of expert rows"));
        }
        if self.tokens > most {
            return Err(KernelError::TooLarge("the number of tokens"));
        }
        for (stride, of) in [(self.x_stride, self.element), (self.out_stride, self.output)] {
            if stride < self.n {
                return Err(KernelError::Scheme("the row stride of sums must be at least the row width"));
            }
            if self.aligned && !stride.saturating_mul(of.bytes()).is_multiple_of(16) {
                return Err(KernelError::Scheme("the row stride of sums must be a multiple of 16 bytes"));
            }
        }
        let of_block = THREADS * if self.element == Float::F32 { 4 } else { 8 };
        let blocks = self.n.div_ceil(of_block);
        if blocks > 65_535 {
            return Err(KernelError::TooLarge("the number of output features"));
        }
        Ok(SumPlan {
            variant: self.variant(),
            launch: LaunchShape {
                grid: [self.tokens as u32, blocks as u32, 1],
                block: THREADS as u32,
                shared_bytes: 0,
            },
            shape: *self,
        })
    }

    fn variant(&self) -> Variant {
        Variant {
            source: &SOURCE,
            kernel: "sum_experts",
            defines: vec![
                ("ELEMENT", self.element.name().to_owned()),
                ("OUTPUT", self.output.name().to_owned()),
                ("ALIGNED", usize::from(self.aligned).to_string()),
            ],
        }
    }
}

/// A planned launch: `out[t] = Σ_j factors[r] · x[r]` with `r = row_of[t, j]`, in the order of `j`. The sum is f32.
/// Each product is rounded before it is added, and the sum is rounded to the type of the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SumPlan {
    /// The kernel.
    pub variant: Variant,
    /// Blocks and threads.
    pub launch: LaunchShape,
    shape: SumShape,
}

/// Device addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SumArguments {
    /// `[rows, n]`
    pub x: Region,
    /// u32 `[tokens, terms]`: the rows of each token. Indices that no row has are left out.
    pub row_of: Region,
    /// f32 `[rows]`, or [`Region::NONE`] if rows are added as they are.
    pub factors: Region,
    /// `[tokens, n]`
    pub out: Region,
}

impl SumPlan {
    /// The arguments of the kernel, in order.
    ///
    /// # Errors
    /// When a region is too small or misaligned for its type.
    pub fn arguments(&self, at: &SumArguments) -> Result<[Argument; 9], KernelError> {
        let SumShape { element, output, rows, tokens, terms, n, x_stride, out_stride, aligned } = self.shape;
        let matrix = |m: usize, stride: usize, of: Float, what| {
            let last = m.saturating_sub(1).checked_mul(stride).and_then(|s| s.checked_add(n.min(m * n)));
            last.and_then(|elements| elements.checked_mul(of.bytes())).ok_or(KernelError::TooLarge(what))
        };
        let align = |of: Float| if aligned { 16 } else { of.bytes() };
        at.x.require("rows", matrix(rows, x_stride, element, "the activation buffer")?, align(element))?;
        let words =
            tokens.checked_mul(4 * terms).ok_or(KernelError::TooLarge("the number of expert rows"))?;
        at.row_of.require("rows of tokens", words, 4)?;
        if at.factors != Region::NONE {
            at.factors.require("factors of rows", 4 * rows, 4)?;
        }
        at.out.require("outputs", matrix(tokens, out_stride, output, "the output buffer")?, align(output))?;
        Ok([
            Argument::U64(at.x.address),
            Argument::U64(at.row_of.address),
            Argument::U64(at.factors.address),
            Argument::U64(at.out.address),
            Argument::U32(rows as u32),
            Argument::U32(terms as u32),
            Argument::U32(n as u32),
            Argument::U64(x_stride as u64),
            Argument::U64(out_stride as u64),
        ])
    }
}

pub(super) fn entries() -> Vec<Entry> {
    use Float::{Bf16, F16, F32};
    let outputs = [F16, Bf16, F32];
    let types = [F32, F16, Bf16].into_iter().flat_map(|element| outputs.map(|output| (element, output)));
    let entry = |(i, (element, output)): (usize, (Float, Float))| {
        let aligned = i % 4 != 2;
        let shape = SumShape { aligned, ..SumShape::new(element, output, [1, 8, 2048]) };
        Entry {
            family: "experts",
            variant: shape.variant(),
            register_ceiling: 48,
            spill_bytes: 0,
            only_on: None,
            instructions: if aligned { vec!["LDG.E.128", "FADD"] } else { vec!["FADD"] },
        }
    };
    types.enumerate().map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(address: u64, bytes: usize) -> Region {
        Region { address, bytes: bytes as u64 }
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let good = SumShape::new(Float::F32, Float::F16, [3, 8, 2048]);
        assert_eq!(good.plan().unwrap().launch.grid, [3, 4, 1]);
        assert_eq!(SumShape { tokens: 0, ..good }.plan().unwrap().launch.grid[0], 0);
        assert!(!SumShape::new(Float::F32, Float::F16, [3, 8, 20]).aligned);
        for bad in [
            SumShape { rows: 1 << 31, ..good },
            SumShape { terms: 1 << 31, ..good },
            SumShape { tokens: 1 << 31, ..good },
            SumShape { n: 1 << 30, x_stride: 1 << 30, out_stride: 1 << 30, ..good },
            SumShape { x_stride: 2047, ..good },
            SumShape { out_stride: 2047, ..good },
            SumShape { x_stride: 2049, ..good },
            SumShape { out_stride: 2052, ..good },
        ] {
            assert!(bad.plan().is_err(), "{bad:?}");
        }
        assert!(SumShape { x_stride: 2049, aligned: false, ..good }.plan().is_ok());
    }

    #[test]
    fn mismatched_arguments_are_reported() {
        let plan = SumShape::new(Float::F32, Float::F16, [3, 2, 64]).plan().unwrap();
        let good = SumArguments {
            x: region(16, 6 * 256),
            row_of: region(4, 24),
            factors: region(4, 24),
            out: region(16, 3 * 128),
        };
        assert_eq!(plan.arguments(&good).unwrap()[4..7], [6, 2, 64].map(Argument::U32));
        assert!(plan.arguments(&SumArguments { factors: Region::NONE, ..good }).is_ok());
        for bad in [
            SumArguments { x: region(16, 6 * 256 - 1), ..good },
            SumArguments { x: region(8, 6 * 256), ..good },
            SumArguments { row_of: region(4, 23), ..good },
            SumArguments { factors: region(4, 23), ..good },
            SumArguments { out: region(16, 3 * 128 - 1), ..good },
            SumArguments { out: region(8, 3 * 128), ..good },
        ] {
            assert!(plan.arguments(&bad).is_err(), "{bad:?}");
        }
    }
}
