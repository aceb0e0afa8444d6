//! The experts of a layer as a framework calls them: from activations and a routing to results, with all launches in
//! between.

use quant_kernels_cpu::KernelError;
use quant_kernels_cpu::experts::ExpertGate;

use super::route::{RouteArguments, RoutePlan};
use super::sum::{SumArguments, SumPlan, SumShape};
use crate::activation::{ActivationArguments, ActivationPlan, ActivationShape, RowSource};
use crate::compile::Variant;
use crate::float::Float;
use crate::launch::{Argument, LaunchShape, Region};
use crate::layout::{Order, WeightLayout};
use crate::linear::{
    EXPERT_BYTES, ExpertRegions, InputType, LinearExpertsArguments, LinearExpertsPlan, LinearExpertsShape,
    Output, PlanLimits, expert_descriptors,
};

const ALIGN: usize = 256;

/// The parameters of a call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsShape {
    /// The number of experts.
    pub experts: usize,
    /// The number of tokens.
    pub tokens: usize,
    /// The number of experts per token.
    pub top_k: usize,
    /// The function that combines the results of gate and up.
    pub gate: ExpertGate,
    /// The type of the activations `[tokens, hidden]`, which are contiguous.
    pub element: Float,
    /// The type of the results `[tokens, hidden]`, which are contiguous.
    pub output: Float,
}

/// All launches for the experts of a layer: `y[t] = Σ_e w[t, e] · down_e(act(gate_e(x[t]), up_e(x[t])))` over the
/// experts that token `t` is routed to.
///
/// The result is bit-identical to separate products of each expert, whose results in f32 are multiplied by their
/// weights, rounded, and added in the order of experts; if a token lists an expert twice, in the order of its slots.
/// The results of the gates are quantized to integers as f32 if `down` is packed for integers, and otherwise rounded to
/// the type of the activations. Tokens without experts get zeros.
///
/// Weights of [`Order::Int8`] are multiplied by 8-bit integers with a scale per row, which are made here.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsCall {
    shape: ExpertsShape,
    hidden: usize,
    inner: usize,
    route: RoutePlan,
    x: Option<Rounding>,
    gate_up: LinearExpertsPlan,
    between: Option<Rounding>,
    down: LinearExpertsPlan,
    sum: SumPlan,
    places: Places,
    workspace_bytes: usize,
    ticket_bytes: usize,
}

/// How rows are quantized, and where codes and scales are in the workspace.
#[derive(Debug, Clone, PartialEq)]
struct Rounding {
    plan: ActivationPlan,
    stride: usize,
    codes: Place,
    scales: Place,
}

/// A part of the workspace: its offset and length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place(usize, usize);

/// The parts of the workspace that every call has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Places {
    starts: Place,
    token_of: Place,
    factors: Place,
    row_of: Place,
    /// The results of the gates, `[rows, inner]`.
    between: Place,
    /// The results of `down`, f32 `[rows, hidden]`.
    results: Place,
    /// The sums of chunks.
    partials: Place,
}

/// The device addresses of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertsRegions {
    /// `[inner, hidden]`
    pub gate: ExpertRegions,
    /// `[inner, hidden]`
    pub up: ExpertRegions,
    /// `[hidden, inner]`
    pub down: ExpertRegions,
}

/// Device addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertsArguments {
    /// The bytes of [`layer_descriptors`], at a multiple of 16.
    pub descriptors: Region,
    /// `[tokens, hidden]`, at a multiple of 16.
    pub x: Region,
    /// u32 `[tokens, top_k]`: the numbers of experts; others, such as [`NO_EXPERT`](super::NO_EXPERT), mark unused
    /// slots.
    pub experts: Region,
    /// f32 `[tokens, top_k]`: the weights of experts.
    pub weights: Region,
    /// `[tokens, hidden]`, at a multiple of 16.
    pub out: Region,
    /// [`ExpertsCall::ticket_bytes`] at a multiple of 256, 0 before the launches, which reset them to 0. Concurrent
    /// calls must not share them.
    pub tickets: Region,
    /// [`ExpertsCall::workspace_bytes`] at a multiple of 256. Its initial contents do not matter. Concurrent calls must
    /// not share it.
    pub workspace: Region,
}

/// Returns the descriptors of the experts of a layer, to be copied to the device: gate and up of each expert, followed
/// by `down` of each. All experts have these layouts.
///
/// # Errors
/// When a region is too small, null or misaligned.
pub fn layer_descriptors(
    gate_up: &WeightLayout,
    down: &WeightLayout,
    experts: &[ExpertsRegions],
) -> Result<Vec<u8>, KernelError> {
    let first: Vec<ExpertRegions> = experts.iter().flat_map(|expert| [expert.gate, expert.up]).collect();
    let second: Vec<ExpertRegions> = experts.iter().map(|expert| expert.down).collect();
    let mut bytes = expert_descriptors(gate_up, &first)?;
    bytes.extend(expert_descriptors(down, &second)?);
    Ok(bytes)
}

impl ExpertsCall {
    /// Plans a call for experts of which gate and up have the first layout, and `down` has the second.
    ///
    /// # Errors
    /// - The shapes of the layouts do not match.
    /// - Weights of [`Order::Float`] would be multiplied by f32 activations, or their rows are not a multiple of 8
    ///   wide.
    /// - All errors of planning the launches.
    pub fn new(
        gate_up: &WeightLayout,
        down: &WeightLayout,
        shape: &ExpertsShape,
        device: &PlanLimits,
    ) -> Result<Self, KernelError> {
        let ExpertsShape { experts, tokens, top_k, gate, element, output } = *shape;
        let (hidden, inner) = (gate_up.k(), gate_up.n());
        for (expected, got) in [(hidden, down.n()), (inner, down.k())] {
            if expected != got {
                let what = "the down projections must have the transposed shape of gate and up: expected";
                return Err(KernelError::Mismatch { what, expected, got });
            }
        }
        let route = RoutePlan::new(experts, tokens, top_k)?;
        let rows = tokens * top_k;
        // Results of the gates are rounded once, to integers or to the type that `down` is multiplied by.
        let between_type = if down.order() == Order::Int8 { Float::F32 } else { element };
        let mut end = 0_usize;
        let mut place = |sizes: &[usize]| {
            let large = KernelError::TooLarge("the workspace");
            let bytes = sizes.iter().try_fold(1_usize, |all, &size| all.checked_mul(size));
            let at = end.checked_next_multiple_of(ALIGN).zip(bytes);
            let (at, bytes) = at.ok_or(large.clone())?;
            end = at.checked_add(bytes).ok_or(large)?;
            Ok(Place(at, bytes))
        };
        let starts = place(&[experts + 1, 4])?;
        let token_of = place(&[rows, 4])?;
        let factors = place(&[rows, 4])?;
        let row_of = place(&[rows, 4])?;
        let mut rounding = |layout: &WeightLayout, of: Float, m: usize| {
            let (activation, k) = (input_type(layout, of)?, layout.k());
            if layout.order() == Order::Float {
                if !k.is_multiple_of(8) {
                    let why = "the row width of activations must be a multiple of 16 bytes";
                    return Err(KernelError::Scheme(why));
                }
                return Ok((activation, None));
            }
            let shape = ActivationShape::new(RowSource::Plain, of, m, k);
            let (plan, stride) = (shape.plan()?, shape.code_stride);
            let (codes, scales) = (place(&[m, stride])?, place(&[m, 4])?);
            Ok((activation, Some(Rounding { plan, stride, codes, scales })))
        };
        let (first, x) = rounding(gate_up, element, tokens)?;
        let (second, between) = rounding(down, between_type, rows)?;
        let of = LinearExpertsShape { experts, tokens, rows, gate: Some(gate) };
        let gate_up = LinearExpertsPlan::new(gate_up, first, result_type(between_type), &of, device)?;
        let of = LinearExpertsShape { tokens: rows, gate: None, ..of };
        let down = LinearExpertsPlan::new(down, second, Output::F32, &of, device)?;
        let sum = SumShape::new(Float::F32, output, [tokens, top_k, hidden]).plan()?;
        let partials = gate_up.work.workspace_bytes.max(down.work.workspace_bytes);
        let places = Places {
            starts,
            token_of,
            factors,
            row_of,
            between: place(&[rows, inner, between_type.bytes()])?,
            results: place(&[rows, hidden, 4])?,
            partials: place(&[partials])?,
        };
        let ticket_bytes = gate_up.work.ticket_bytes.max(down.work.ticket_bytes);
        let (shape, workspace_bytes) = (*shape, end);
        Ok(Self {
            shape,
            hidden,
            inner,
            route,
            x,
            gate_up,
            between,
            down,
            sum,
            places,
            workspace_bytes,
            ticket_bytes,
        })
    }

    /// Bytes of the workspace.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Bytes of the tickets.
    pub fn ticket_bytes(&self) -> usize {
        self.ticket_bytes
    }

    /// The number of elements of the results.
    pub fn results(&self) -> usize {
        self.shape.tokens * self.hidden
    }

    /// The kernels, in launch order, with their blocks and threads. The launches run one after another, on one stream.
    pub fn kernels(&self) -> Vec<(Variant, LaunchShape)> {
        let rounding = |of: &Option<Rounding>| of.as_ref().map(|r| (r.plan.variant.clone(), r.plan.launch));
        let product = |plan: &LinearExpertsPlan| (plan.work.variant.compiled(), plan.work.launch);
        [
            Some((self.route.variant.clone(), self.route.launch)),
            rounding(&self.x),
            Some(product(&self.gate_up)),
            rounding(&self.between),
            Some(product(&self.down)),
            Some((self.sum.variant.clone(), self.sum.launch)),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Calls `then` with the arguments of each kernel, in the order of [`kernels`](Self::kernels); with no arguments if
    /// there are no tokens, since there is nothing to launch then. Does not allocate.
    ///
    /// # Errors
    /// When a region is too small or misaligned for its type.
    pub fn with_arguments<R>(
        &self,
        at: &ExpertsArguments,
        then: impl FnOnce(&[&[Argument]]) -> R,
    ) -> Result<R, KernelError> {
        let experts = self.shape.experts;
        if self.shape.tokens == 0 {
            return Ok(then(&[]));
        }
        let places = &self.places;
        at.workspace.require("workspace", self.workspace_bytes, ALIGN)?;
        at.tickets.require("tickets", self.ticket_bytes, ALIGN)?;
        at.descriptors.require("descriptors of experts", 3 * EXPERT_BYTES * experts, 16)?;
        let part = |Place(from, bytes): Place| match bytes {
            0 => Region::NONE,
            _ => Region { address: at.workspace.address + from as u64, bytes: bytes as u64 },
        };
        let starts = part(places.starts);
        let route = self.route.arguments(&RouteArguments {
            experts: at.experts,
            weights: at.weights,
            starts,
            token_of: part(places.token_of),
            factors: part(places.factors),
            row_of: part(places.row_of),
        })?;
        let round = |rounding: &Option<Rounding>, x: Region, count: Region| {
            let of = |rounding: &Rounding| {
                rounding.plan.arguments(&ActivationArguments {
                    x,
                    up: Region::NONE,
                    residual: Region::NONE,
                    weight: Region::NONE,
                    eps: 0.0,
                    fixed: None,
                    codes: part(rounding.codes),
                    scales: part(rounding.scales),
                    row_sums: Region::NONE,
                    group_sums: Region::NONE,
                    count,
                })
            };
            rounding.as_ref().map(of).transpose()
        };
        let product = |plan: &LinearExpertsPlan, rounding: &Option<Rounding>, x: Region, k: usize| {
            let is_first = plan.work.variant.gate.is_some();
            let (x, x_stride, x_scales) = match rounding {
                Some(rounding) => (part(rounding.codes), rounding.stride, part(rounding.scales)),
                None => (x, k, Region::NONE),
            };
            let gates = 2 * EXPERT_BYTES * experts;
            let (from, bytes) = if is_first { (0, gates) } else { (gates, gates / 2) };
            let descriptors = Region { address: at.descriptors.address + from as u64, bytes: bytes as u64 };
            plan.arguments(&LinearExpertsArguments {
                experts: descriptors,
                starts,
                token_of: if is_first { part(places.token_of) } else { Region::NONE },
                factors: if is_first { Region::NONE } else { part(places.factors) },
                x,
                x_stride,
                x_scales,
                x_zero: 0,
                out: part(if is_first { places.between } else { places.results }),
                out_stride: if is_first { self.inner } else { self.hidden },
                tickets: at.tickets,
                workspace: part(places.partials),
            })
        };
        let rounded_x = round(&self.x, at.x, Region::NONE)?;
        let gate_up = product(&self.gate_up, &self.x, at.x, self.hidden)?;
        let rows = Region { address: starts.address + 4 * experts as u64, bytes: 4 };
        let rounded = round(&self.between, part(places.between), rows)?;
        let down = product(&self.down, &self.between, part(places.between), self.inner)?;
        let sum = self.sum.arguments(&SumArguments {
            x: part(places.results),
            row_of: part(places.row_of),
            factors: Region::NONE,
            out: at.out,
        })?;
        let all: [Option<&[Argument]>; 6] = [
            Some(&route),
            rounded_x.as_ref().map(|arguments| &arguments[..]),
            Some(&gate_up),
            rounded.as_ref().map(|arguments| &arguments[..]),
            Some(&down),
            Some(&sum),
        ];
        let mut list: [&[Argument]; 6] = [&[]; 6];
        let mut count = 0;
        for arguments in all.into_iter().flatten() {
            list[count] = arguments;
            count += 1;
        }
        Ok(then(&list[..count]))
    }
}

/// The activations of weights with this layout, for rows of this type.
///
/// # Errors
/// When the type does not match the layout.
fn input_type(layout: &WeightLayout, of: Float) -> Result<InputType, KernelError> {
    match (layout.order(), of) {
        (Order::Int8, _) => Ok(InputType::Int8 { zero: false }),
        (Order::Float, Float::F16) => Ok(InputType::F16),
        (Order::Float, Float::Bf16) => Ok(InputType::Bf16),
        (Order::Float, Float::F32) => Err(KernelError::Scheme(
            "weights that were packed for float activations need f16 or bf16 activations, not f32",
        )),
    }
}

fn result_type(of: Float) -> Output {
    match of {
        Float::F16 => Output::F16,
        Float::Bf16 => Output::Bf16,
        Float::F32 => Output::F32,
    }
}

#[cfg(test)]
mod tests {
    use quant_kernels_cpu::ScaleType;

    use super::*;
    use crate::compile::GpuArchitecture;

    const SHAPE: ExpertsShape = ExpertsShape {
        experts: 5,
        tokens: 3,
        top_k: 2,
        gate: ExpertGate::Silu,
        element: Float::Bf16,
        output: Float::Bf16,
    };

    fn layout(n: usize, k: usize, order: Order) -> WeightLayout {
        WeightLayout::from_parts([n, k], 4, 32, ScaleType::F16, Some(8), order, false).unwrap()
    }

    fn new(orders: [Order; 2], shape: &ExpertsShape) -> Result<ExpertsCall, KernelError> {
        let (gate_up, down) = (layout(96, 1024, orders[0]), layout(1024, 96, orders[1]));
        ExpertsCall::new(&gate_up, &down, shape, &PlanLimits::of(GpuArchitecture::Sm90))
    }

    fn arguments(call: &ExpertsCall) -> ExpertsArguments {
        let region = |address, bytes: usize| Region { address, bytes: bytes as u64 };
        ExpertsArguments {
            descriptors: region(0x10_0000, 3 * EXPERT_BYTES * 5),
            x: region(0x20_0000, 3 * 1024 * call.shape.element.bytes()),
            experts: region(0x30_0000, 24),
            weights: region(0x40_0000, 24),
            out: region(0x50_0000, 3 * 1024 * call.shape.output.bytes()),
            tickets: region(0x60_0000, call.ticket_bytes()),
            workspace: region(0x70_0000, call.workspace_bytes()),
        }
    }

    fn kernels(call: &ExpertsCall) -> Vec<&'static str> {
        call.kernels().iter().map(|(variant, _)| variant.kernel).collect()
    }

    fn address(argument: Argument) -> u64 {
        let Argument::U64(address) = argument else { panic!("no address: {argument:?}") };
        address
    }

    #[test]
    fn launches_pass_on_their_results() {
        use Order::{Float as F, Int8};
        let (all, float) = (SHAPE, ["route_experts", "linear_experts", "linear_experts", "sum_experts"]);
        let call = new([F, F], &all).unwrap();
        assert_eq!(kernels(&call), float);
        call.with_arguments(&arguments(&call), |list| {
            let &[route, gate_up, down, sum] = list else { panic!("{} launches", list.len()) };
            // Starts, tokens, factors and rows of the routing.
            assert_eq!((gate_up[1], down[1]), (route[2], route[2]));
            assert_eq!((gate_up[2], down[2]), (route[3], Argument::U64(0)));
            assert_eq!((gate_up[3], down[3]), (Argument::U64(0), route[4]));
            assert_eq!(sum[1], route[5]);
            // Descriptors of `down` follow those of gate and up.
            assert_eq!((address(gate_up[0]), address(down[0])), (0x10_0000, 0x10_0000 + 10 * 48));
            assert_eq!((address(gate_up[4]), down[4], sum[0]), (0x20_0000, gate_up[6], down[6]));
            assert_eq!((address(sum[3]), call.results()), (0x50_0000, 3 * 1024));
        })
        .unwrap();
        let whole =
            ["route_experts", "activation", "linear_experts", "activation", "linear_experts", "sum_experts"];
        let call = new([Int8, Int8], &ExpertsShape { element: Float::F32, ..all }).unwrap();
        assert_eq!(kernels(&call), whole);
        call.with_arguments(&arguments(&call), |list| {
            let &[route, x, gate_up, between, down, _] = list else { panic!("{} launches", list.len()) };
            assert_eq!((x[4], x[5]), (gate_up[4], gate_up[5]));
            assert_eq!((between[4], between[5]), (down[4], down[5]));
            assert_eq!((address(x[0]), between[0]), (0x20_0000, gate_up[6]));
            // Only as many rows are quantized as there are.
            assert_eq!((address(x[17]), address(between[17])), (0, address(route[2]) + 4 * 5));
        })
        .unwrap();
        // Only one of the two is packed for integers.
        assert_eq!(kernels(&new([F, Int8], &all).unwrap()), [&float[..2], &whole[3..]].concat());
        assert_eq!(kernels(&new([Int8, F], &all).unwrap()), [&whole[..3], &float[2..]].concat());
    }

    #[test]
    fn parts_of_the_workspace_do_not_overlap() {
        for orders in [[Order::Float; 2], [Order::Int8; 2]] {
            let call = new(orders, &SHAPE).unwrap();
            let Places { starts, token_of, factors, row_of, between, results, partials } = call.places;
            let mut all = vec![starts, token_of, factors, row_of, between, results, partials];
            let roundings = [&call.x, &call.between].into_iter().flatten();
            all.extend(roundings.flat_map(|rounding| [rounding.codes, rounding.scales]));
            all.sort_by_key(|place| place.0);
            assert!(all.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
            let last = all[all.len() - 1];
            assert_eq!(last.0 + last.1, call.workspace_bytes());
        }
    }

    #[test]
    fn no_tokens_are_no_launches() {
        let call = new([Order::Float; 2], &ExpertsShape { tokens: 0, ..SHAPE }).unwrap();
        let none = Region::NONE;
        let at = ExpertsArguments {
            descriptors: none,
            x: none,
            experts: none,
            weights: none,
            out: none,
            tickets: none,
            workspace: none,
        };
        assert_eq!(call.with_arguments(&at, |list| list.len()), Ok(0));
        assert_eq!(call.results(), 0);
    }

    #[test]
    fn mismatched_parts_are_reported() {
        let device = PlanLimits::of(GpuArchitecture::Sm90);
        let [gate_up, down] = [layout(96, 1024, Order::Float), layout(1024, 64, Order::Float)];
        let error = ExpertsCall::new(&gate_up, &down, &SHAPE, &device).unwrap_err().to_string();
        assert!(error.contains("transposed shape") && error.contains("96"), "{error}");
        let f32s = new([Order::Float; 2], &ExpertsShape { element: Float::F32, ..SHAPE }).unwrap_err();
        assert!(f32s.to_string().contains("not f32"), "{f32s}");
        let limit = ExpertGate::Clamped { alpha: 1.0, limit: -1.0 };
        assert!(new([Order::Float; 2], &ExpertsShape { gate: limit, ..SHAPE }).is_err());
        assert!(new([Order::Float; 2], &ExpertsShape { experts: 0, ..SHAPE }).is_err());
        let many = ExpertsShape { tokens: usize::MAX, ..SHAPE };
        assert!(matches!(new([Order::Int8; 2], &many), Err(KernelError::TooLarge(_))));
        let odd = WeightLayout::from_parts([4, 1004], 4, 1004, ScaleType::F16, Some(8), Order::Float, false);
        let back = WeightLayout::from_parts([1004, 4], 4, 4, ScaleType::F16, Some(8), Order::Float, false);
        let narrow = ExpertsCall::new(&odd.unwrap(), &back.unwrap(), &SHAPE, &device).unwrap_err();
        assert!(narrow.to_string().contains("multiple of 16 bytes"), "{narrow}");
    }

    #[test]
    fn too_small_memory_is_reported() {
        let call = new([Order::Int8; 2], &SHAPE).unwrap();
        let good = arguments(&call);
        let less = |r: Region| Region { bytes: r.bytes - 1, ..r };
        for bad in [
            ExpertsArguments { descriptors: less(good.descriptors), ..good },
            ExpertsArguments { x: less(good.x), ..good },
            ExpertsArguments { experts: less(good.experts), ..good },
            ExpertsArguments { weights: less(good.weights), ..good },
            ExpertsArguments { out: less(good.out), ..good },
            ExpertsArguments { tickets: less(good.tickets), ..good },
            ExpertsArguments { workspace: less(good.workspace), ..good },
            ExpertsArguments { workspace: Region { address: 0x70_0080, ..good.workspace }, ..good },
        ] {
            assert!(call.with_arguments(&bad, |_| ()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn descriptors_are_gates_and_ups_then_downs() {
        let (gate_up, down) = (layout(96, 1024, Order::Int8), layout(1024, 96, Order::Int8));
        let part = |i: u64, layout: &WeightLayout| ExpertRegions {
            weight: Region { address: i << 20, bytes: layout.bytes() as u64 },
            bias: Region::NONE,
        };
        let expert = |i: u64| ExpertsRegions {
            gate: part(3 * i + 1, &gate_up),
            up: part(3 * i + 2, &gate_up),
            down: part(3 * i + 3, &down),
        };
        let bytes = layer_descriptors(&gate_up, &down, &[expert(0), expert(1)]).unwrap();
        let firsts =
            bytes.chunks(EXPERT_BYTES).map(|of| u64::from_le_bytes(of[..8].try_into().unwrap()) >> 20);
        assert_eq!(firsts.collect::<Vec<_>>(), [1, 2, 4, 5, 3, 6]);
        let mut short = expert(0);
        short.down.weight.bytes -= 1;
        assert!(layer_descriptors(&gate_up, &down, &[short]).is_err());
    }
}
