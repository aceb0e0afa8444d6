//! The experts of a layer in one launch: results are bit-identical to products with one expert at a time, for any
//! routing.

mod budgets;
mod gates;
mod layer;
mod planted;

use quant_kernels_cpu::FloatFormat;
use quant_kernels_cuda::linear::{Chunks, InputType, LinearExpertsPlan, LinearVariant, Output, Parts};
use quant_ptx_interpreter::{BlockOrder, Options, WarpOrder};

use self::layer::{Layer, NO_TOKEN};
use crate::cases::{Case, Kind};
use crate::machine::ready;
use crate::problem::{Draw, Problem};

const OUTPUTS: [Output; 3] = [Output::F16, Output::Bf16, Output::F32];
/// Numbers of rows per expert: for decoding, with empty experts at both ends, and for many tokens, with several tiles.
const FEW: [usize; 7] = [0, 3, 0, 1, 17, 9, 0];
const MANY: [usize; 4] = [70, 0, 1, 37];
/// Rows and features do not fill tiles. In one chunk, in two, and in four.
const SHAPES: [[usize; 2]; 3] = [[40, 416], [150, 1056], [133, 2080]];

#[derive(Debug, Clone, Copy)]
enum Codes {
    Integers { bits: u8, zeros: bool },
    Floats(FloatFormat),
}

/// Weights with the activations that they are multiplied with; a group of 0 is a row.
type Scheme = (Codes, usize, Kind, InputType);

fn integers(bits: u8, zeros: bool) -> Codes {
    Codes::Integers { bits, zeros }
}

/// The product of expert `e` with all tokens, which are the same for all experts.
fn product(
    (codes, group, kind, input): Scheme,
    shape: [usize; 2],
    output: Output,
    m: usize,
    e: u64,
) -> Problem {
    let group = if group == 0 { shape[1] } else { group };
    let case = match codes {
        Codes::Integers { bits, zeros } => Case::new(shape, bits, group, kind, zeros, 900 + e),
        Codes::Floats(format) => Case::float(shape, format, group, kind, 900 + e),
    };
    match input {
        InputType::Int8 { zero } => Problem::int8(case, output, m, zero.then_some(-7), Draw::Typical, 50),
        float => Problem::float(case, float, output, m, Draw::Typical, 50),
    }
}

/// For few and many rows, with and without factors.
fn check(schemes: &[Scheme]) {
    if !ready() {
        return;
    }
    for (i, &scheme) in schemes.iter().enumerate() {
        // Groups of 32 divide all shapes, other groups only the last two of these.
        let shapes =
            if matches!(scheme.1, 0 | 16 | 32) { SHAPES } else { [[40, 384], [150, 1152], [133, 2176]] };
        for (j, (counts, tokens)) in [(&FEW[..], 13), (&MANY[..], 29), (&FEW[..], 13)].into_iter().enumerate()
        {
            let (shape, output) = (shapes[(i + j) % 3], OUTPUTS[(i + 2 * j) % 3]);
            let mut layer = Layer::new(counts, i as u64, |e| product(scheme, shape, output, tokens, e));
            if j == 2 {
                layer = layer.with_factors(7);
                layer.out_gap = 5;
            }
            let plan = layer.plan();
            plan.check_routing(&layer.starts, layer.token_of.as_deref()).unwrap();
            assert_eq!(
                layer.bits(&plan),
                layer.one_by_one(),
                "{scheme:?} {shape:?} {}",
                plan.work.variant.name()
            );
        }
    }
}

#[test]
fn w4a16() {
    check(&[
        (integers(4, true), 128, Kind::F16, InputType::F16),
        (integers(4, false), 128, Kind::Bf16, InputType::Bf16),
        (integers(4, true), 32, Kind::F32, InputType::Bf16),
        (integers(4, true), 0, Kind::F32, InputType::F16),
    ]);
}

#[test]
fn w8a16() {
    check(&[
        (integers(8, false), 64, Kind::F16, InputType::F16),
        (integers(8, true), 0, Kind::F32, InputType::Bf16),
    ]);
}

#[test]
fn floats() {
    check(&[
        (Codes::Floats(FloatFormat::E2m1), 16, Kind::E4m3, InputType::F16),
        (Codes::Floats(FloatFormat::E2m1), 32, Kind::E8m0, InputType::Bf16),
        (Codes::Floats(FloatFormat::E4m3), 128, Kind::Bf16, InputType::Bf16),
        (Codes::Floats(FloatFormat::E4m3), 0, Kind::F32, InputType::F16),
    ]);
}

#[test]
fn w8a8() {
    check(&[
        (integers(8, false), 0, Kind::F32, InputType::Int8 { zero: false }),
        (integers(8, true), 128, Kind::F16, InputType::Int8 { zero: true }),
    ]);
}

#[test]
fn w4a8() {
    check(&[
        (integers(4, false), 0, Kind::F32, InputType::Int8 { zero: true }),
        (integers(4, true), 64, Kind::F16, InputType::Int8 { zero: false }),
        (integers(4, true), 128, Kind::Progressive, InputType::Int8 { zero: true }),
    ]);
}

/// The schemes whose sums are made in different ways: floats with and without sums of activations, integers by group and
/// over all of `k`.
const KINDS: [Scheme; 4] = [
    (Codes::Integers { bits: 4, zeros: true }, 128, Kind::F16, InputType::F16),
    (Codes::Floats(FloatFormat::E2m1), 16, Kind::E4m3, InputType::Bf16),
    (Codes::Integers { bits: 4, zeros: true }, 64, Kind::F16, InputType::Int8 { zero: false }),
    (Codes::Integers { bits: 8, zeros: false }, 0, Kind::F32, InputType::Int8 { zero: false }),
];

fn layers(counts: &[usize], shape: [usize; 2], tokens: usize) -> Vec<Layer> {
    let layer = |&scheme| Layer::new(counts, 3, |e| product(scheme, shape, Output::F32, tokens, e));
    KINDS.iter().map(layer).collect()
}

#[test]
fn every_block_gives_the_same_bits() {
    if !ready() {
        return;
    }
    let shape = [136, 2176];
    assert_eq!(Parts::of(shape), Parts { chunks: 4 });
    for layer in layers(&[5, 0, 21, 1], shape, 11) {
        every_block(&layer, shape);
    }
}

/// Blocks of all shapes give the bits of single products.
fn every_block(layer: &Layer, shape: [usize; 2]) {
    let expected = layer.one_by_one();
    let planned = layer.plan().work.variant;
    let mut seen = Vec::new();
    for m in [1, 9, 17, 33, 65] {
        let of = LinearVariant::choose_experts(planned.scheme, shape, [1, m], planned.gate, &crate::DEVICE);
        for chunks in [Chunks::Blocks, Chunks::Registers, Chunks::Shared] {
            let mut variant = of;
            variant.chunks = chunks;
            if seen.contains(&variant) || variant.shared_bytes() > crate::DEVICE.shared_of_block {
                continue;
            }
            seen.push(variant);
            let plan =
                LinearExpertsPlan::of_variant(variant, &layer.experts[0].layout, &layer.shape()).unwrap();
            assert_eq!(layer.bits(&plan), expected, "{}", variant.name());
        }
    }
    assert!(seen.len() >= 8, "{}", seen.len());
}

#[test]
fn one_expert_has_all_rows() {
    if !ready() {
        return;
    }
    for at in 0..3 {
        let mut counts = [0; 3];
        counts[at] = 41;
        for layer in layers(&counts, [40, 1152], 12) {
            assert_eq!(layer.at_once(), layer.one_by_one());
        }
    }
}

/// There are more experts than lanes, and most blocks have nothing to do.
#[test]
fn many_experts_with_one_row() {
    if !ready() {
        return;
    }
    for (experts, rows) in [(31, 31), (33, 7), (70, 70), (128, 8)] {
        let mut counts = vec![0; experts];
        // The first, the last, and some between.
        (0..rows).for_each(|i| counts[i * (experts - 1) / (rows - 1)] += 1);
        assert_eq!(counts.iter().max(), Some(&1));
        let scheme = KINDS[rows % 4];
        let mut layer = Layer::new(&counts, 5, |e| product(scheme, [24, 256], Output::F16, 9, e));
        let all = layer.plan().work.launch.grid[0] as usize;
        layer.max_rows = rows + 60;
        let plan = layer.plan();
        assert!(plan.work.launch.grid[0] as usize > all);
        assert_eq!(layer.bits(&plan), layer.one_by_one(), "{experts} experts, {rows} rows");
    }
}

#[test]
fn no_rows_are_no_results() {
    if !ready() {
        return;
    }
    for mut layer in layers(&[0, 0, 0], [40, 1152], 3) {
        assert_eq!(layer.plan().work.launch.grid[0], 0);
        layer.max_rows = 5;
        assert!(layer.plan().work.launch.grid[0] > 0 && layer.at_once().is_empty());
    }
}

#[test]
fn the_order_of_experts_changes_nothing() {
    if !ready() {
        return;
    }
    let counts = [9, 0, 1, 20];
    let order = [2, 3, 0, 1];
    for (mut layer, mut moved) in
        layers(&counts, [40, 2176], 10).into_iter().zip(layers(&counts, [40, 2176], 10))
    {
        layer = layer.with_factors(4);
        let (starts, n) = (layer.starts.clone(), layer.n());
        let rows: Vec<usize> =
            order.iter().flat_map(|&e| starts[e] as usize..starts[e + 1] as usize).collect();
        moved.token_of = Some(rows.iter().map(|&row| layer.token_of.as_ref().unwrap()[row]).collect());
        moved.factors = Some(rows.iter().map(|&row| layer.factors.as_ref().unwrap()[row]).collect());
        let mut experts: Vec<_> = std::mem::take(&mut moved.experts).into_iter().map(Some).collect();
        moved.experts = order.iter().map(|&e| experts[e].take().unwrap()).collect();
        for (i, &e) in order.iter().enumerate() {
            moved.starts[i + 1] = moved.starts[i] + counts[e] as u32;
        }
        let (before, after) = (layer.at_once(), moved.at_once());
        for (i, &row) in rows.iter().enumerate() {
            assert_eq!(after[i * n..][..n], before[row * n..][..n], "row {row}");
        }
    }
}

/// Without indices, rows of results and of activations are the same, as for the down projections.
#[test]
fn rows_are_tokens_without_indices() {
    if !ready() {
        return;
    }
    for mut layer in layers(&[4, 0, 11, 2], [40, 2176], 17) {
        layer.token_of = None;
        assert_eq!(layer.at_once(), layer.one_by_one());
    }
}

#[test]
fn rows_without_a_token_are_zero() {
    if !ready() {
        return;
    }
    for mut layer in layers(&[3, 0, 18, 2], [40, 1152], 6) {
        let (n, token_of) = (layer.n(), layer.token_of.clone().unwrap());
        let expected = layer.at_once();
        let without = [0, 5, 19, 22];
        for (row, marker) in without.into_iter().zip([NO_TOKEN, 6, NO_TOKEN, 7]) {
            layer.token_of.as_mut().unwrap()[row] = marker;
        }
        let some = layer.at_once();
        for row in 0..token_of.len() {
            let (some, expected) = (&some[row * n..][..n], &expected[row * n..][..n]);
            if !without.contains(&row) {
                assert_eq!(some, expected, "row {row}");
                continue;
            }
            let expert = layer.starts.iter().rposition(|&start| start as usize <= row).unwrap();
            for (o, &bits) in some.iter().enumerate() {
                let bias = layer.experts[expert].bias.as_ref().map_or(0.0, |b| b[o]);
                assert_eq!(f32::from_bits(bits), bias, "row {row} feature {o}");
            }
        }
    }
}

/// A wrong routing on the device must not write outside of the planned rows.
#[test]
fn starts_beyond_the_rows_are_reduced() {
    if !ready() {
        return;
    }
    for mut layer in layers(&[3, 7, 18, 2], [40, 1152], 6) {
        let expected = layer.at_once();
        // The third expert has its first six rows only.
        layer.max_rows = 16;
        layer.token_of.as_mut().unwrap().truncate(16);
        let plan = layer.plan();
        assert!(plan.check_routing(&layer.starts, None).is_err());
        assert_eq!(layer.bits(&plan), expected[..16 * layer.n()]);
        layer.starts[4] = u32::MAX;
        assert_eq!(layer.bits(&plan), expected[..16 * layer.n()]);
    }
}

#[test]
fn orders_of_blocks_and_warps_change_nothing() {
    if !ready() {
        return;
    }
    for layer in layers(&[3, 0, 18, 2], [136, 2176], 6) {
        let plan = layer.plan();
        assert!(plan.work.launch.grid[1] > 1);
        let expected = layer.bits(&plan);
        for (block_order, warp_order) in [
            (BlockOrder::Reverse, WarpOrder::InOrder),
            (BlockOrder::Seeded(1), WarpOrder::Reverse),
            (BlockOrder::Seeded(2), WarpOrder::Seeded(3)),
            (BlockOrder::Forward, WarpOrder::RoundRobin),
        ] {
            let options = Options { block_order, warp_order, ..Options::default() };
            let outcome = layer.launch(&plan, &options);
            let bits: Vec<u32> = outcome.values.iter().map(|v| v.to_bits()).collect();
            assert_eq!(bits, expected, "{options:?}");
        }
    }
}
