//! The cost of launches, as counted by the interpreter, relative to products with one expert at a time.

use quant_kernels_cuda::linear::{InputType, LinearExpertsPlan, LinearPlan, Output};
use quant_ptx_interpreter::{Counters, Options};

use super::layer::Layer;
use super::{Scheme, integers, product};
use crate::DEVICE;
use crate::cases::Kind;
use crate::machine::{launch_with, ready};
use crate::problem::Problem;

const N: usize = 256;
/// One chunk, which needs no workspace.
const K: usize = 896;

/// With the bytes of an expert's weights.
fn schemes() -> [(&'static str, Scheme, usize); 3] {
    let (weights, groups) = (N * K, N * K / 128);
    let float = (integers(4, true), 128, Kind::F16, InputType::F16);
    let whole = (integers(8, false), 0, Kind::F32, InputType::Int8 { zero: false });
    let two_levels = (integers(4, true), 128, Kind::Progressive, InputType::Int8 { zero: false });
    [
        ("w4a16 g128 asym", float, weights / 2 + groups * 5 / 2),
        ("w8a8 channel", whole, weights + 4 * N),
        ("w4a8 g128 progressive", two_levels, weights / 2 + groups * 3 / 2 + 4 * N),
    ]
}

fn layer(scheme: Scheme, counts: &[usize], tokens: usize) -> Layer {
    let mut layer = Layer::new(counts, 3, |e| product(scheme, [N, K], Output::F16, tokens, e));
    layer.experts.iter_mut().for_each(|expert| expert.bias = None);
    layer
}

fn counted(layer: &Layer) -> Counters {
    layer.launch(&layer.plan(), &Options::default()).report.counters
}

fn moved(counters: &Counters) -> u64 {
    counters.buffers.values().map(|t| 32 * (t.read.unique_sectors + t.written.unique_sectors)).sum()
}

/// Weights of experts without rows are not read, and those of others are read once.
#[test]
fn bytes_of_memory_are_those_of_the_experts_with_rows() {
    if !ready() {
        return;
    }
    let mut counts = [0; 24];
    [0, 5, 11, 22].into_iter().zip([1, 2, 1, 5]).for_each(|(e, rows)| counts[e] = rows);
    for (name, scheme, weights) in schemes() {
        let mut layer = layer(scheme, &counts, 9);
        // Each token once.
        layer.token_of = Some(vec![4, 2, 3, 8, 7, 0, 1, 6, 5]);
        let counters = counted(&layer);
        let x = 9 * if name.contains("a16") { 2 * K } else { K + 4 };
        let floor = (4 * weights + x + 9 * 2 * N) as f64;
        let ratio = moved(&counters) as f64 / floor;
        println!("{name}: {ratio:.4} times the floor");
        assert!(ratio <= 1.03, "{name}: {ratio}");
        let codes = counters.buffers["codes"].read;
        assert_eq!(codes.bytes_asked, codes.unique_bytes, "{name}");
        assert_eq!(
            codes.unique_bytes as usize,
            4 * layer.experts[0].layout.tiles() * N / 16 * layer.experts[0].layout.tile_bytes()
        );
    }
}

/// The search and the indices cost few instructions, and cause no bank conflicts.
#[test]
fn instructions_are_those_of_single_products_and_a_search() {
    if !ready() {
        return;
    }
    for (name, scheme, _) in schemes() {
        for (rows, tokens) in [(1, 4), (16, 16)] {
            let layer = layer(scheme, &[rows; 4], tokens);
            let problems = (0..4).map(|e| layer.experts[e].of_tokens(&layer.tokens(e)));
            let plans = problems.map(|problem| {
                let (layout, input, output) = (&problem.layout, problem.activation, problem.output);
                (LinearPlan::new(layout, input, output, problem.m, &DEVICE).unwrap(), problem)
            });
            let plans: Vec<(LinearPlan, Problem)> = plans.collect();
            let (mut single, mut warps) = (0, 0);
            for (plan, problem) in &plans {
                single += launch_with(problem, plan, &Options::default()).report.counters.instructions;
                warps += plan.work.launch.grid[0] * plan.work.launch.block / 32;
            }
            // Blocks of the same shape.
            let mut variant = plans[0].0.work.variant;
            variant.experts = true;
            let layout = &layer.experts[0].layout;
            let plan = LinearExpertsPlan::of_variant(variant, layout, &layer.shape()).unwrap();
            let counters = layer.launch(&plan, &Options::default()).report.counters;
            let (reads, writes) = (counters.shared_reads, counters.shared_writes);
            assert_eq!((reads.taken, writes.taken), (reads.ideal, writes.ideal), "{name}");
            let more = (counters.instructions as f64 - single as f64) / f64::from(warps);
            println!("{name}, {rows} rows: {more:.0} instructions more per warp");
            // The scale of a token is found again for each result.
            let max = if name.contains("a16") { 300.0 } else { 600.0 };
            assert!(more < max, "{name}, {rows} rows: {more}");
        }
    }
}

/// A block without a tile only searches.
#[test]
fn blocks_without_a_tile_return_at_once() {
    if !ready() {
        return;
    }
    for (name, scheme, _) in schemes() {
        let mut layer = layer(scheme, &[0; 128], 1);
        layer.max_rows = 8;
        let plan = layer.plan();
        let counters = layer.launch(&plan, &Options::default()).report.counters;
        let warps = f64::from(plan.work.launch.grid[0] * plan.work.launch.block / 32);
        let each = counters.instructions as f64 / warps;
        println!("{name}: {each:.0} instructions per warp without a tile");
        assert!(each < 150.0, "{name}: {each}");
        let read: Vec<&str> =
            counters.buffers.iter().filter(|(_, t)| t.read.bytes_asked > 0).map(|(n, _)| &**n).collect();
        assert_eq!(read, ["starts"], "{name}");
    }
}
