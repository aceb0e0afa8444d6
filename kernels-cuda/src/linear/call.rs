//! A linear as a framework calls it: from float activations to results, with all launches in between. Weights that are
//! packed for integers need their activations quantized first.

use quant_kernels_cpu::KernelError;

use super::plan::{LinearArguments, LinearPlan};
use super::scheme::{InputType, Output};
use super::variant::PlanLimits;
use crate::activation::{ActivationArguments, ActivationPlan, ActivationShape, FixedScale, RowSource};
use crate::compile::Variant;
use crate::float::Float;
use crate::launch::{Argument, LaunchShape, Region};
use crate::layout::{Order, WeightLayout};

const ALIGN: usize = 256;

/// The types and strides of the activations and results of a call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CallShape {
    /// Number of tokens.
    pub m: usize,
    /// The type of the activations `[m, k]`.
    pub element: Float,
    /// Elements between rows: `k`; if the weights are packed for floats, any multiple of 8 that is at least `k`.
    pub stride: usize,
    /// The type of the results `[m, n]`, which are contiguous.
    pub output: Output,
    /// One scale and zero point for all activations, or `None` for a scale per token. Only for weights that are packed
    /// for integers.
    pub fixed: Option<FixedScale>,
}

impl CallShape {
    /// Creates the shape of contiguous rows of `k` activations, with results of the same type.
    pub fn new(element: Float, m: usize, k: usize) -> Self {
        let output = match element {
            Float::F16 => Output::F16,
            Float::Bf16 => Output::Bf16,
            Float::F32 => Output::F32,
        };
        Self { m, element, stride: k, output, fixed: None }
    }
}

/// A planned linear for a number of tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearCall {
    rounding: Option<Rounding>,
    product: LinearPlan,
    n: usize,
    m: usize,
    stride: usize,
    workspace_at: usize,
    scratch_bytes: usize,
}

/// How activations are quantized, and where codes and scales are in the scratch memory.
#[derive(Debug, Clone, PartialEq)]
struct Rounding {
    plan: ActivationPlan,
    fixed: Option<FixedScale>,
    stride: usize,
    codes_at: usize,
    codes_bytes: usize,
    scales_at: usize,
}

/// Device addresses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CallArguments {
    /// The packed matrix with all sections.
    pub weight: Region,
    /// f32 `[n]`, or [`Region::NONE`].
    pub bias: Region,
    /// `[m, k]`, at a multiple of 16 bytes.
    pub x: Region,
    /// `[m, n]`, contiguous.
    pub out: Region,
    /// The scratch memory, at a multiple of 256. Its first [`LinearCall::zero_bytes`] bytes must be 0 before the
    /// launches; clear them if a different call has used the memory.
    pub scratch: Region,
}

/// One launch of a call. The launches run in order, on one stream.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct CallLaunch {
    /// The kernel.
    pub variant: Variant,
    /// Blocks, threads and shared memory.
    pub shape: LaunchShape,
    /// The arguments, in the order of the kernel's parameters.
    pub arguments: Vec<Argument>,
}

impl LinearCall {
    /// Plans a call. Weights of [`Order::Float`] are multiplied with the activations themselves, f16 or bf16, whose
    /// rows are a multiple of 8 elements apart. Weights of [`Order::Int8`] are multiplied with 8-bit integers, with a
    /// scale per token, or with one scale and zero point if [`fixed`](CallShape::fixed) is set.
    ///
    /// # Errors
    /// - Weights of [`Order::Float`]: `f32` activations, a `fixed` scale, or an invalid stride.
    /// - Weights of [`Order::Int8`]: rows that are not exactly `k` elements apart, a `fixed` scale that is not positive
    ///   and finite or has no finite reciprocal, or a nonzero zero point if the layout has no sums.
    /// - All errors of planning the product and the quantization.
    pub fn new(layout: &WeightLayout, shape: &CallShape, device: &PlanLimits) -> Result<Self, KernelError> {
        let (n, k) = (layout.n(), layout.k());
        let CallShape { m, element, stride, output, fixed } = *shape;
        let refuse = |why| Err(KernelError::Scheme(why));
        let activation = match (layout.order(), element) {
            (Order::Float, _) if fixed.is_some() => {
                return refuse(
                    "a static activation scale needs weights that were packed for int8 activations",
                );
            }
            (Order::Float, Float::F32) => {
                return refuse(
                    "weights that were packed for float activations need f16 or bf16 activations, not f32",
                );
            }
            (Order::Float, _) if !stride.is_multiple_of(8) => {
                return refuse("the row stride of activations must be a multiple of 16 bytes");
            }
            (Order::Float, _) if stride < k => {
                return refuse("the row stride of activations must be at least the row width");
            }
            (Order::Int8, _) if stride != k => {
                return refuse("int8 activations must be contiguous");
            }
            (Order::Float, Float::F16) => InputType::F16,
            (Order::Float, Float::Bf16) => InputType::Bf16,
            (Order::Int8, _) => InputType::Int8 { zero: fixed.is_some_and(|by| by.zero != 0) },
        };
        let product = LinearPlan::new(layout, activation, output, m, device)?;
        // Tickets come first: only they must be 0 before the launches.
        let mut end = product.work.ticket_bytes;
        let mut place = |bytes: Option<usize>| {
            let at = end.checked_next_multiple_of(ALIGN);
            let (at, bytes) = at.zip(bytes).ok_or(KernelError::TooLarge("the workspace"))?;
            end = at.checked_add(bytes).ok_or(KernelError::TooLarge("the workspace"))?;
            Ok((at, bytes))
        };
        let (workspace_at, _) = place(Some(product.work.workspace_bytes))?;
        let mut rounding = None;
        if layout.order() == Order::Int8 {
            if fixed.is_some_and(|by| !by.is_valid()) {
                return Err(KernelError::Scheme(
                    "the activation scale and its reciprocal must be positive and finite",
                ));
            }
            let shape = ActivationShape {
                fixed: fixed.is_some(),
                ..ActivationShape::new(RowSource::Plain, element, m, k)
            };
            let (plan, stride) = (shape.plan()?, shape.code_stride);
            let (codes_at, codes_bytes) = place(m.checked_mul(stride))?;
            let (scales_at, _) = place(m.checked_mul(4))?;
            rounding = Some(Rounding { plan, fixed, stride, codes_at, codes_bytes, scales_at });
        }
        Ok(Self { rounding, product, n, m, stride, workspace_at, scratch_bytes: end })
    }

    /// Bytes of scratch memory. Concurrent calls may not share it.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch_bytes
    }

    /// The number of bytes at the beginning of the scratch memory that must be 0 before the launches.
    pub fn zero_bytes(&self) -> usize {
        self.product.work.ticket_bytes
    }

    /// Number of elements of the results.
    pub fn results(&self) -> usize {
        self.m * self.n
    }

    /// The plan of the product.
    pub fn product(&self) -> &LinearPlan {
        &self.product
    }

    /// Returns the launches, in order.
    ///
    /// # Errors
    /// When a region is too small or misaligned for its type.
    pub fn launches(&self, at: &CallArguments) -> Result<Vec<CallLaunch>, KernelError> {
        if self.m == 0 {
            return Ok(Vec::new());
        }
        at.scratch.require("workspace", self.scratch_bytes, ALIGN)?;
        let part = |from: usize, bytes: usize| Region {
            address: at.scratch.address + from as u64,
            bytes: bytes as u64,
        };
        let mut launches = Vec::with_capacity(2);
        let (mut x, mut x_stride, mut x_scales, mut x_zero) = (at.x, self.stride, Region::NONE, 0);
        if let Some(rounding) = &self.rounding {
            let codes = part(rounding.codes_at, rounding.codes_bytes);
            let scales = part(rounding.scales_at, 4 * self.m);
            let arguments = rounding.plan.arguments(&ActivationArguments {
                x: at.x,
                up: Region::NONE,
                residual: Region::NONE,
                weight: Region::NONE,
                eps: 0.0,
                fixed: rounding.fixed,
                codes,
                scales,
                row_sums: Region::NONE,
                group_sums: Region::NONE,
                count: Region::NONE,
            })?;
            launches.push(CallLaunch {
                variant: rounding.plan.variant.clone(),
                shape: rounding.plan.launch,
                arguments: arguments.to_vec(),
            });
            (x, x_stride, x_scales) = (codes, rounding.stride, scales);
            x_zero = rounding.fixed.map_or(0, |by| i32::from(by.zero));
        }
        let some = |from: usize, bytes: usize| if bytes == 0 { Region::NONE } else { part(from, bytes) };
        let arguments = self.product.arguments(&LinearArguments {
            weight: at.weight,
            x,
            x_stride,
            x_scales,
            x_zero,
            bias: at.bias,
            out: at.out,
            out_stride: self.n,
            tickets: some(0, self.product.work.ticket_bytes),
            workspace: some(self.workspace_at, self.product.work.workspace_bytes),
        })?;
        launches.push(CallLaunch {
            variant: self.product.work.variant.compiled(),
            shape: self.product.work.launch,
            arguments: arguments.to_vec(),
        });
        Ok(launches)
    }
}

#[cfg(test)]
mod tests {
    use quant_kernels_cpu::ScaleType;

    use super::*;
    use crate::compile::GpuArchitecture;

    const FIXED: FixedScale = FixedScale { scale: 0.5, zero: -3 };

    fn layout(k: usize, order: Order, sums: bool) -> WeightLayout {
        let group = if k.is_multiple_of(128) { 128 } else { k };
        WeightLayout::from_parts([512, k], 4, group, ScaleType::F16, Some(8), order, sums).unwrap()
    }

    fn call(
        layout: &WeightLayout,
        element: Float,
        fixed: Option<FixedScale>,
        m: usize,
    ) -> Result<LinearCall, KernelError> {
        let shape = CallShape { fixed, ..CallShape::new(element, m, layout.k()) };
        LinearCall::new(layout, &shape, &PlanLimits::of(GpuArchitecture::Sm90))
    }

    fn places(call: &LinearCall, layout: &WeightLayout, each: usize) -> CallArguments {
        let region = |address, bytes: usize| Region { address, bytes: bytes as u64 };
        CallArguments {
            weight: region(0x10_0000, layout.bytes()),
            bias: region(0x20_0000, 4 * 512),
            x: region(0x30_0000, call.m * call.stride * each),
            out: region(0x40_0000, call.m * 512 * each),
            scratch: region(0x50_0000, call.scratch_bytes()),
        }
    }

    #[test]
    fn floats_are_multiplied_as_they_are() {
        let layout = layout(1024, Order::Float, false);
        for element in [Float::F16, Float::Bf16] {
            let call = call(&layout, element, None, 3).unwrap();
            let product = call.product();
            let tickets = product.work.ticket_bytes.next_multiple_of(256);
            assert_eq!(call.scratch_bytes(), tickets + product.work.workspace_bytes);
            assert!(call.zero_bytes() == 0 || call.zero_bytes() < call.scratch_bytes());
            let launches = call.launches(&places(&call, &layout, 2)).unwrap();
            assert_eq!(launches.len(), 1);
            assert_eq!(launches[0].variant.kernel, "linear");
            assert_eq!(launches[0].arguments[5], Argument::U64(0x30_0000));
            assert_eq!(launches[0].arguments[8], Argument::U64(0x40_0000));
            assert_eq!(call.results(), 3 * 512);
        }
    }

    #[test]
    fn integers_pass_through_the_scratch_memory() {
        for (m, k) in [(1, 4096), (7, 1000), (300, 4096)] {
            let layout = layout(k, Order::Int8, false);
            let call = call(&layout, Float::Bf16, None, m).unwrap();
            let launches = call.launches(&places(&call, &layout, 2)).unwrap();
            let [rounding, product] = &launches[..] else { panic!("{} launches", launches.len()) };
            assert_eq!((rounding.variant.kernel, product.variant.kernel), ("activation", "linear"));
            assert_eq!(rounding.arguments[0], Argument::U64(0x30_0000));
            assert_eq!(rounding.arguments[4..6], product.arguments[5..7]);
            let (Argument::U64(codes), Argument::U64(scales)) = (product.arguments[5], product.arguments[6])
            else {
                panic!("no addresses")
            };
            let (stride, base) = (k.next_multiple_of(16), 0x50_0000);
            let (tickets, workspace) =
                (call.product().work.ticket_bytes, call.product().work.workspace_bytes);
            assert!(codes >= base + (tickets + workspace) as u64);
            assert!(scales >= codes + (m * stride) as u64);
            assert_eq!(scales + 4 * m as u64, base + call.scratch_bytes() as u64);
            assert_eq!(rounding.arguments[11], Argument::U64(stride as u64));
            assert_eq!(product.arguments[14], Argument::U32(stride as u32));
        }
    }

    #[test]
    fn one_scale_and_zero_reach_both_launches() {
        let layout = layout(1024, Order::Int8, true);
        let call = call(&layout, Float::F32, Some(FIXED), 2).unwrap();
        let launches = call.launches(&places(&call, &layout, 4)).unwrap();
        assert_eq!(launches[0].arguments[15..17], [Argument::F32(0.5), Argument::U32(-3_i32 as u32)]);
        assert_eq!(launches[1].arguments[18], Argument::U32(-3_i32 as u32));
    }

    #[test]
    fn no_tokens_are_no_launches() {
        for (order, element) in [(Order::Float, Float::F16), (Order::Int8, Float::F32)] {
            let layout = layout(1024, order, false);
            let call = call(&layout, element, None, 0).unwrap();
            let nothing = CallArguments {
                weight: Region::NONE,
                bias: Region::NONE,
                x: Region::NONE,
                out: Region::NONE,
                scratch: Region::NONE,
            };
            assert_eq!(call.launches(&nothing), Ok(Vec::new()));
            assert_eq!(call.results(), 0);
        }
    }

    #[test]
    fn rows_have_gaps_and_results_a_type_of_their_own() {
        let layout = layout(1004, Order::Float, false);
        let shape = CallShape { stride: 1008, output: Output::F32, ..CallShape::new(Float::F16, 3, 1004) };
        let new = |shape: &CallShape, layout| {
            LinearCall::new(layout, shape, &PlanLimits::of(GpuArchitecture::Sm90))
        };
        let call = new(&shape, &layout).unwrap();
        let at = CallArguments {
            out: Region { bytes: 4 * 3 * 512, ..places(&call, &layout, 2).out },
            ..places(&call, &layout, 2)
        };
        let launches = call.launches(&at).unwrap();
        assert_eq!(launches[0].arguments[14], Argument::U32(1008));
        let too_small = CallArguments { out: Region { bytes: 2 * 3 * 512, ..at.out }, ..at };
        assert!(matches!(call.launches(&too_small), Err(KernelError::Length { .. })));
        let bad = |shape, layout| new(&shape, layout).unwrap_err().to_string();
        assert!(bad(CallShape { stride: 1000, ..shape }, &layout).contains("at least the row width"));
        let whole = super::tests::layout(1024, Order::Int8, false);
        let gaps = CallShape { stride: 1040, ..CallShape::new(Float::F16, 3, 1024) };
        assert!(bad(gaps, &whole).contains("contiguous"));
    }

    #[test]
    fn mismatched_parts_are_reported() {
        let (float, whole) = (layout(1024, Order::Float, false), layout(1024, Order::Int8, false));
        let bad =
            |layout: &WeightLayout, element, fixed| call(layout, element, fixed, 1).unwrap_err().to_string();
        assert!(bad(&float, Float::F32, None).contains("not f32"));
        assert!(bad(&float, Float::F16, Some(FIXED)).contains("packed for int8"));
        assert!(bad(&layout(1004, Order::Float, false), Float::F16, None).contains("multiple of 16 bytes"));
        assert!(bad(&whole, Float::F16, Some(FIXED)).contains("packed with sums"));
        let none = FixedScale { scale: 0.0, zero: 0 };
        assert!(bad(&whole, Float::F16, Some(none)).contains("must be positive"));
        assert!(call(&whole, Float::F16, Some(FixedScale { zero: 0, ..FIXED }), 1).is_ok());
        assert!(matches!(call(&whole, Float::F16, None, usize::MAX), Err(KernelError::TooLarge(_))));
    }

    #[test]
    fn too_small_memory_is_reported() {
        let layout = layout(1024, Order::Int8, false);
        let call = call(&layout, Float::F16, None, 5).unwrap();
        let good = places(&call, &layout, 2);
        assert!(call.launches(&good).is_ok());
        assert!(call.launches(&CallArguments { bias: Region::NONE, ..good }).is_ok());
        let less = |r: Region| Region { bytes: r.bytes - 1, ..r };
        for bad in [
            CallArguments { weight: less(good.weight), ..good },
            CallArguments { bias: less(good.bias), ..good },
            CallArguments { x: less(good.x), ..good },
            CallArguments { x: Region { address: 0x30_0008, ..good.x }, ..good },
            CallArguments { out: less(good.out), ..good },
            CallArguments { scratch: less(good.scratch), ..good },
            CallArguments { scratch: Region { address: 0x50_0080, ..good.scratch }, ..good },
        ] {
            assert!(call.launches(&bad).is_err(), "{bad:?}");
        }
    }
}
