//! All launches for the experts of a layer.

use half::bf16;
use quant_kernels_cpu::experts::{Expert, ExpertGate, ExpertRows, Experts, Routing as CpuRouting};
use quant_kernels_cpu::{Bf16Parts, IsaToken, PackedLinear, Serial, reference};
use quant_kernels_cuda::Float;
use quant_kernels_cuda::experts::{
    ExpertsArguments, ExpertsCall, ExpertsRegions, ExpertsShape, layer_descriptors,
};
use quant_kernels_cuda::launch::Region;
use quant_kernels_cuda::layout::{Order, WeightLayout};
use quant_kernels_cuda::linear::{ExpertRegions, PlanLimits};

use crate::cases::{Case, Kind, Random};
use crate::route::Routing;
use crate::support::has_nvrtc;
use crate::support::machine as ptx;
use crate::{bytes_of, launch, module, output, region};

/// An A10.
const DEVICE: PlanLimits =
    PlanLimits { shared_of_block: 101_376, shared_of_multiprocessor: 102_400, multiprocessors: 72 };
const GATES: [ExpertGate; 3] =
    [ExpertGate::Silu, ExpertGate::GeluTanh, ExpertGate::Clamped { alpha: 1.702, limit: 1.5 }];

struct Layer {
    /// Gate, up and down of each expert, with their biases.
    experts: Vec<[(Case, Option<Vec<f32>>); 3]>,
    order: Order,
    gate: ExpertGate,
    element: Float,
}

impl Layer {
    /// `make` creates a matrix of this shape from a seed.
    fn new(
        [count, hidden, inner]: [usize; 3],
        gate: ExpertGate,
        (order, element): (Order, Float),
        make: impl Fn([usize; 2], u64) -> Case,
    ) -> Self {
        let bias = |n: usize, seed: u64| {
            let mut random = Random(seed);
            (!seed.is_multiple_of(3)).then(|| (0..n).map(|_| random.float() * 0.25).collect())
        };
        let matrix = |shape: [usize; 2], seed| (make(shape, seed), bias(shape[0], seed));
        let expert = |e: u64| {
            [
                matrix([inner, hidden], 4 * e),
                matrix([inner, hidden], 4 * e + 1),
                matrix([hidden, inner], 4 * e + 2),
            ]
        };
        Self { experts: (0..count as u64).map(expert).collect(), order, gate, element }
    }

    fn layout(&self, part: usize) -> WeightLayout {
        WeightLayout::of(&self.experts[0][part].0.view(), self.order, false).unwrap()
    }

    fn hidden(&self) -> usize {
        self.experts[0][0].0.shape[1]
    }

    /// f32 results, of activations that are representable in their type.
    fn run(&self, x: &[f32], routing: &Routing, output_type: Float) -> Vec<f32> {
        let (gate_up, down) = (self.layout(0), self.layout(2));
        let shape = ExpertsShape {
            experts: self.experts.len(),
            tokens: x.len() / self.hidden(),
            top_k: routing.top_k,
            gate: self.gate,
            element: self.element,
            output: output_type,
        };
        let call = ExpertsCall::new(&gate_up, &down, &shape, &DEVICE).unwrap();
        let mut memory = ptx::Memory::new();
        let mut matrix = |(case, bias): &(Case, Option<Vec<f32>>), layout: &WeightLayout| {
            let mut packed = vec![0; layout.bytes()];
            layout.pack(&case.view(), &mut packed).unwrap();
            let bias = bytes_of(bias.iter().flatten().map(|b| b.to_bits()));
            ExpertRegions {
                weight: region(&mut memory, "weights", &packed, 256),
                bias: region(&mut memory, "bias", &bias, 4),
            }
        };
        let regions = self.experts.iter().map(|[gate, up, last]| ExpertsRegions {
            gate: matrix(gate, &gate_up),
            up: matrix(up, &gate_up),
            down: matrix(last, &down),
        });
        let regions: Vec<ExpertsRegions> = regions.collect();
        let descriptors = layer_descriptors(&gate_up, &down, &regions).unwrap();
        let x: Vec<u8> = match self.element {
            Float::F32 => bytes_of(x.iter().map(|x| x.to_bits())),
            Float::F16 => x.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
            Float::Bf16 => x.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        };
        let each = output_type.bytes();
        let at = ExpertsArguments {
            descriptors: region(&mut memory, "descriptors", &descriptors, 16),
            x: region(&mut memory, "x", &x, 16),
            experts: region(&mut memory, "experts", &bytes_of(routing.experts.iter().copied()), 4),
            weights: region(
                &mut memory,
                "weights",
                &bytes_of(routing.weights.iter().map(|w| w.to_bits())),
                4,
            ),
            out: output(&mut memory, "out", call.results() * each, 16),
            tickets: region(&mut memory, "tickets", &vec![0; call.ticket_bytes()], 256),
            // Unwritten bytes must not be read.
            workspace: output(&mut memory, "workspace", call.workspace_bytes(), 256),
        };
        // A second call finds the workspace and the tickets as the first left them.
        let mut before: Option<Vec<u8>> = None;
        for _ in 0..2 {
            call.with_arguments(&at, |list| {
                let kernels = call.kernels();
                assert_eq!(kernels.len(), list.len());
                for ((variant, shape), arguments) in kernels.iter().zip(list) {
                    let options = ptx::Options::default();
                    launch(&module(variant), variant.kernel, shape, arguments, &mut memory, &options)
                        .unwrap();
                }
            })
            .unwrap();
            let bytes = memory.bytes(at.out.address).unwrap().into_owned();
            assert!(before.is_none_or(|before| before == bytes), "the second call gives different results");
            before = Some(bytes);
        }
        if at.tickets != Region::NONE {
            assert!(memory.bytes(at.tickets.address).unwrap().iter().all(|&b| b == 0), "tickets are not 0");
        }
        let bytes = before.unwrap();
        let values = bytes.chunks(each).map(|b| match output_type {
            Float::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            Float::F16 => half::f16::from_le_bytes([b[0], b[1]]).to_f32(),
            Float::Bf16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        });
        values.collect()
    }

    /// The definition, on the CPU.
    fn expected(&self, x: &[f32], routing: &Routing) -> Vec<f32> {
        let pack = |(case, bias): &(Case, Option<Vec<f32>>)| {
            PackedLinear::pack(&case.view(), bias.as_deref(), false, &Serial).unwrap()
        };
        let packed: Vec<[PackedLinear; 3]> = self.experts.iter().map(|of| of.each_ref().map(pack)).collect();
        let experts = packed.iter().map(|[gate, up, down]| Expert {
            gate: gate.into(),
            up: up.into(),
            down: down.into(),
        });
        let experts: Vec<Expert<'_>> = experts.collect();
        let rows = match self.order {
            Order::Int8 => ExpertRows::Int8,
            Order::Float => ExpertRows::Float(Bf16Parts::default()),
        };
        let known = |&e: &u32| if (e as usize) < self.experts.len() { e } else { u32::MAX };
        let numbers: Vec<u32> = routing.experts.iter().map(known).collect();
        let routing = CpuRouting { top_k: routing.top_k, experts: &numbers, weights: &routing.weights };
        let experts = Experts::new(&experts).unwrap();
        reference::experts(&experts, IsaToken::detect(), rows, self.gate, x, &routing).unwrap()
    }
}

fn activations(len: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    (0..len).map(|_| bf16::from_f32(random.float() * 2.0).to_f32()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Integers are summed over all of `k`, so the CPU's results are the same to the bit.
#[test]
fn integer_layers_are_bit_identical_to_the_cpu() {
    if !has_nvrtc() {
        return;
    }
    for (i, gate) in GATES.into_iter().enumerate() {
        let (bits_per_code, zeros) = [(8, false), (4, true), (8, true)][i];
        let make =
            |shape: [usize; 2], seed| Case::new(shape, bits_per_code, shape[1], Kind::F32, zeros, 31 + seed);
        for ([count, tokens, top_k], [hidden, inner]) in
            [([5, 7, 2], [544, 72]), ([3, 1, 2], [544, 136]), ([9, 40, 3], [1056, 40])]
        {
            let layer = Layer::new([count, hidden, inner], gate, (Order::Int8, Float::F32), make);
            let (x, routing) = (activations(tokens * hidden, 5), Routing::new([count, tokens, top_k], 6));
            let got = layer.run(&x, &routing, Float::F32);
            assert_eq!(bits(&got), bits(&layer.expected(&x, &routing)), "{gate:?}, {count} experts");
        }
    }
}

/// Sums of floats are added in a different order, and results of the gates are rounded.
#[test]
fn float_layers_are_near_the_cpu_and_independent() {
    if !has_nvrtc() {
        return;
    }
    let make = |shape: [usize; 2], seed| Case::new(shape, 4, 32, Kind::F16, true, 31 + seed);
    let [count, tokens, top_k, hidden] = [5, 9, 3, 1056];
    let layer = Layer::new([count, hidden, 96], ExpertGate::Silu, (Order::Float, Float::Bf16), make);
    let (x, routing) = (activations(tokens * hidden, 5), Routing::new([count, tokens, top_k], 6));
    let (got, expected) = (layer.run(&x, &routing, Float::F32), layer.expected(&x, &routing));
    let rms =
        |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let error = rms(&mut got.iter().zip(&expected).map(|(a, b)| a - b)) / rms(&mut expected.iter().copied());
    assert!(error < 2.0_f64.powi(-8), "{error}");
    // A token's result does not depend on the others.
    for token in [0, 4, 8] {
        let one = Routing {
            count,
            top_k,
            experts: routing.experts[token * top_k..][..top_k].to_vec(),
            weights: routing.weights[token * top_k..][..top_k].to_vec(),
        };
        let alone = layer.run(&x[token * hidden..][..hidden], &one, Float::F32);
        assert_eq!(bits(&alone), bits(&got[token * hidden..][..hidden]), "token {token}");
    }
    let rounded: Vec<f32> = got.iter().map(|&v| bf16::from_f32(v).to_f32()).collect();
    assert_eq!(bits(&layer.run(&x, &routing, Float::Bf16)), bits(&rounded));
}
