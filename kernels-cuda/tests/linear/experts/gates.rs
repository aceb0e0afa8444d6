//! Gate and up of all experts with the activation, in one launch: results are bit-identical to two products with one
//! expert at a time, followed by the activation.

use quant_kernels_cpu::FloatFormat;
use quant_kernels_cpu::experts::ExpertGate;
use quant_kernels_cuda::linear::{InputType, Output, Parts, SOURCE};
use quant_ptx_interpreter::{BlockOrder, Error, FaultKind, Options, WarpOrder};

use super::layer::{Layer, gated as definition};
use super::{Codes, FEW, KINDS, MANY, OUTPUTS, SHAPES, Scheme, every_block, integers, product};
use crate::cases::Kind;
use crate::machine::{compiled, ready};
use crate::planted::changed;
use crate::problem::Problem;

const GATES: [ExpertGate; 3] =
    [ExpertGate::Silu, ExpertGate::GeluTanh, ExpertGate::Clamped { alpha: 1.702, limit: 1.5 }];

fn gated(scheme: Scheme, counts: &[usize], shape: [usize; 2], output: Output, tokens: usize) -> Layer {
    let make = |e| product(scheme, shape, output, tokens, e);
    Layer::new(counts, 3, make).with_gate(GATES[scheme.1 % 3], make)
}

fn layers(counts: &[usize], shape: [usize; 2], tokens: usize) -> Vec<Layer> {
    KINDS.iter().map(|&scheme| gated(scheme, counts, shape, Output::F32, tokens)).collect()
}

/// For few and many rows, with and without factors.
fn check(schemes: &[Scheme]) {
    if !ready() {
        return;
    }
    for (i, &scheme) in schemes.iter().enumerate() {
        // Features do not fill a block, fill one exactly, or need several.
        let shapes =
            if matches!(scheme.1, 0 | 16 | 32) { SHAPES } else { [[40, 384], [64, 1152], [133, 2176]] };
        for (j, (counts, tokens)) in [(&FEW[..], 13), (&MANY[..], 29), (&FEW[..], 13)].into_iter().enumerate()
        {
            let (shape, output) = (shapes[(i + j) % 3], OUTPUTS[(i + 2 * j) % 3]);
            let make = |e| product(scheme, shape, output, tokens, e);
            let mut layer = Layer::new(counts, i as u64, make).with_gate(GATES[(i + j) % 3], make);
            if j == 2 {
                layer = layer.with_factors(7);
                layer.out_gap = 5;
            }
            let plan = layer.plan();
            let name = plan.work.variant.name();
            assert_eq!(layer.bits(&plan), layer.one_by_one(), "{scheme:?} {shape:?} {name}");
        }
    }
}

#[test]
fn float_activations() {
    check(&[
        (integers(4, true), 128, Kind::F16, InputType::F16),
        (integers(4, true), 0, Kind::F32, InputType::Bf16),
        (integers(8, false), 64, Kind::Bf16, InputType::Bf16),
        (Codes::Floats(FloatFormat::E2m1), 16, Kind::E4m3, InputType::F16),
        (Codes::Floats(FloatFormat::E4m3), 0, Kind::F32, InputType::F16),
    ]);
}

#[test]
fn integer_activations() {
    check(&[
        (integers(8, true), 0, Kind::F32, InputType::Int8 { zero: true }),
        (integers(4, true), 64, Kind::F16, InputType::Int8 { zero: false }),
        (integers(4, false), 0, Kind::F32, InputType::Int8 { zero: false }),
        (integers(4, true), 128, Kind::Progressive, InputType::Int8 { zero: true }),
    ]);
}

#[test]
fn every_block_gives_the_same_bits() {
    if !ready() {
        return;
    }
    let shape = [72, 2176];
    assert_eq!(Parts::of(shape), Parts { chunks: 4 });
    for layer in layers(&[5, 0, 21, 1], shape, 11) {
        every_block(&layer, shape);
    }
}

#[test]
fn orders_of_blocks_and_warps_change_nothing() {
    if !ready() {
        return;
    }
    for layer in layers(&[3, 0, 18, 2], [72, 2176], 6) {
        let plan = layer.plan();
        assert!(plan.work.launch.grid[1] > 1);
        let expected = layer.bits(&plan);
        for (block_order, warp_order) in [
            (BlockOrder::Reverse, WarpOrder::RoundRobin),
            (BlockOrder::Seeded(1), WarpOrder::Reverse),
            (BlockOrder::Seeded(2), WarpOrder::Seeded(3)),
        ] {
            let options = Options { block_order, warp_order, ..Options::default() };
            let outcome = layer.launch(&plan, &options);
            let bits: Vec<u32> = outcome.values.iter().map(|v| v.to_bits()).collect();
            assert_eq!(bits, expected, "{options:?}");
        }
    }
}

/// The bounds of sigmoids and clamps, infinities and NaN: the bias is the result, since the activations are zero.
#[test]
fn extreme_values_are_those_of_the_definition() {
    if !ready() {
        return;
    }
    let values = [
        0.0,
        1e-40,
        -1e-30,
        0.5,
        -0.5,
        1.5,
        -1.5,
        87.0,
        -87.0,
        87.1,
        -87.1,
        1e4,
        -1e4,
        3e20,
        -3e20,
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    for gate in GATES {
        let scheme = (integers(4, true), 128, Kind::F16, InputType::F16);
        let make = |e| product(scheme, [values.len() * 3, 384], Output::F32, 2, e);
        let mut layer = Layer::new(&[1, 2], 3, make).with_gate(gate, make);
        for expert in &mut layer.experts {
            expert.x.fill(0);
            expert.bias = Some((0..3).flat_map(|_| values).collect());
        }
        let (_, ups) = layer.gate.as_mut().unwrap();
        for up in ups {
            let times = |turn: usize| values.into_iter().cycle().skip(7 * turn).take(values.len());
            up.x.fill(0);
            up.bias = Some((0..3).flat_map(times).collect());
        }
        let got = layer.at_once();
        let biases = |problem: &Problem| problem.bias.clone().unwrap();
        let (gates, ups) = (biases(&layer.experts[0]), biases(&layer.gate.as_ref().unwrap().1[0]));
        assert_eq!(got.len(), 3 * gates.len());
        for (i, &got) in got.iter().enumerate() {
            let at = i % gates.len();
            let (got, expected) = (f32::from_bits(got), definition(gate, gates[at], ups[at]));
            let is_same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
            assert!(is_same, "{gate:?} feature {i}: {got} for {expected}");
        }
    }
}

/// Weights of both matrices and activations are read once; a product with one matrix reads the same activations.
#[test]
fn activations_are_read_once_for_both_matrices() {
    if !ready() {
        return;
    }
    let scheme = (integers(4, true), 128, Kind::F16, InputType::F16);
    let both = gated(scheme, &[3, 5], [64, 896], Output::F16, 8);
    let one = Layer::new(&[3, 5], 3, |e| product(scheme, [128, 896], Output::F16, 8, e));
    let counters = |layer: &Layer| layer.launch(&layer.plan(), &Options::default()).report.counters;
    let (both, one) = (counters(&both), counters(&one));
    for name in ["codes", "parameters", "x"] {
        let (both, one) = (both.buffers[name].read, one.buffers[name].read);
        assert_eq!((both.bytes_asked, both.unique_bytes), (one.bytes_asked, one.unique_bytes), "{name}");
    }
    let (reads, writes) = (both.shared_reads, both.shared_writes);
    assert_eq!((reads.taken, writes.taken), (reads.ideal, writes.ideal));
    println!("{} instructions, {} of one matrix", both.instructions, one.instructions);
    assert!(both.instructions as f64 <= 1.05 * one.instructions as f64);
}

/// Planted bugs that mix up the two matrices, which the comparison detects, or that read outside of them.
#[test]
fn mixed_up_matrices() {
    if !ready() {
        return;
    }
    let float = (integers(4, true), 128, Kind::F16, InputType::F16);
    let rows = (integers(8, true), 0, Kind::F32, InputType::Int8 { zero: false });
    for (scheme, place) in [
        (float, ["(i == own ? 0 : from.up_codes)", "(u64)0"]),
        (float, ["                offset += from.up_parameters;\n", ""]),
        (float, ["                block -= MATRIX_BLOCKS;\n", ""]),
        (float, ["finish(up, sum[FEATURES],", "finish(up, sum[0],"]),
        (float, ["finish(up, sum[FEATURES],", "finish(p, sum[FEATURES],"]),
        (float, ["experts[MATRICES * place.expert + MATRICES - 1]", "experts[MATRICES * place.expert]"]),
        (rows, ["const u8 *zeros = is_up ? p.up_row_zeros : p.row_zeros;", "const u8 *zeros = p.row_zeros;"]),
        (rows, ["const Arguments up = GATED ? read_again(p, 1) : p;", "const Arguments &up = p;"]),
        (rows, ["- (is_up ? FEATURES : 0)", ""]),
    ] {
        let layer = gated(scheme, &[3, 0, 18], [200, 1152], Output::F32, 6);
        let plan = layer.plan();
        let expected = layer.bits(&plan);
        let module = compiled(&plan.work.variant, Some(changed(&SOURCE, &[place])));
        match layer.run(&plan, &module, &Options::default()) {
            Ok(outcome) => {
                let bits: Vec<u32> = outcome.values.iter().map(|v| v.to_bits()).collect();
                assert_ne!(bits, expected, "{}", place[0]);
            }
            Err(Error::Fault(fault)) => assert_eq!(fault.kind, FaultKind::OutOfBounds, "{fault}"),
            Err(other) => panic!("{other}"),
        }
    }
}

/// The value of each step matters: planted changes of the functions are detected.
#[test]
fn wrong_functions() {
    if !ready() {
        return;
    }
    for (gate, place) in [
        (GATES[0], ["return silu(gate) * up;", "return silu(up) * gate;"]),
        (GATES[1], ["0.071354814f", "0.0713548f"]),
        (GATES[2], ["float u = limit < up ? limit : up;", "float u = up;"]),
        (GATES[2], ["u = -limit > u ? -limit : u;", ""]),
        (GATES[2], ["* (u + 1.0f)", "* u"]),
        (GATES[2], ["float z = alpha * g;", "float z = g;"]),
    ] {
        let scheme = (integers(4, true), 128, Kind::F16, InputType::F16);
        let make = |e| product(scheme, [40, 384], Output::F32, 6, e);
        let layer = Layer::new(&[3, 0, 18], 3, make).with_gate(gate, make);
        let plan = layer.plan();
        let module = compiled(&plan.work.variant, Some(changed(&SOURCE, &[place])));
        let outcome = layer.run(&plan, &module, &Options::default()).unwrap();
        let bits: Vec<u32> = outcome.values.iter().map(|v| v.to_bits()).collect();
        assert_ne!(bits, layer.bits(&plan), "{}", place[0]);
    }
}
