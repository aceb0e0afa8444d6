//! What launches cost, as the interpreter counts: bytes of memory beside the floor's, passes through the banks of shared
//! memory, instructions of dequantization.

use quant_kernels_cuda::linear::{Activation, LinearPlan, Output};
use quant_ptx_interpreter::{Counters, Options};

use crate::DEVICE;
use crate::cases::{Case, Kind};
use crate::machine::{launch_with, ready};
use crate::problem::{Draw, Problem};

fn counted(problem: &Problem) -> (LinearPlan, Counters) {
    let plan =
        LinearPlan::new(&problem.layout, problem.activation, problem.output, problem.m, &DEVICE).unwrap();
    let outcome = launch_with(problem, &plan, &Options::default());
    problem.check(&outcome.values);
    (plan, outcome.report.counters)
}

const N: usize = 256;
const K: usize = 1024;

fn float(activation: Activation, group: usize, zeros: bool, m: usize) -> Problem {
    let (kind, output) = match activation {
        Activation::F16 => (Kind::F16, Output::F16),
        _ => (Kind::Bf16, Output::Bf16),
    };
    Problem::float(Case::new([N, K], 4, group, kind, zeros, 41), activation, output, m, Draw::Usual, 43)
}

fn int8(bits: u8, group: usize, kind: Kind, zeros: bool, m: usize) -> Problem {
    Problem::int8(Case::new([N, K], bits, group, kind, zeros, 41), Output::F16, m, None, Draw::Usual, 43)
}

/// Each with the bytes that the weights take at least: codes, scales and zeros as they are stored.
fn problems(m: usize) -> Vec<(&'static str, Problem, usize)> {
    let groups = |size: usize| N * K / size;
    let weights = N * K;
    vec![
        ("w4a16 g128 asym", float(Activation::F16, 128, true, m), weights / 2 + groups(128) * 5 / 2),
        ("w4a16 g128", float(Activation::F16, 128, false, m), weights / 2 + groups(128) * 2),
        ("w4a16 g64 asym bf16", float(Activation::Bf16, 64, true, m), weights / 2 + groups(64) * 5 / 2),
        ("w4a16 g32 asym bf16", float(Activation::Bf16, 32, true, m), weights / 2 + groups(32) * 5 / 2),
        ("w8a8 channel", int8(8, K, Kind::F32, false, m), weights + 4 * N + 4 * m),
        ("w4a8 channel asym", int8(4, K, Kind::F32, true, m), weights / 2 + 5 * N + 4 * m),
        (
            "w4a8 g128 progressive",
            int8(4, 128, Kind::Progressive, true, m),
            weights / 2 + groups(128) * 3 / 2 + 4 * N + 4 * m,
        ),
        ("w4a8 g128", int8(4, 128, Kind::F16, false, m), weights / 2 + groups(128) * 2 + 4 * m),
    ]
}

/// Different sectors of memory: weights, activations and results. The workspace, which is written and read by one launch and
/// stays in the second cache, is counted apart.
#[test]
fn bytes_of_memory_are_the_floors() {
    if !ready() {
        return;
    }
    for m in [1, 16, 64] {
        for (name, problem, weights) in problems(m) {
            let (_, counters) = counted(&problem);
            let x = problem.m * K * if name.contains("a16") { 2 } else { 1 };
            let floor = (weights + x + 2 * problem.m * N) as f64;
            let of = |workspace: bool| -> u64 {
                let buffers = counters.buffers.iter();
                let chosen =
                    buffers.filter(|(b, _)| matches!(b.as_str(), "partials" | "tickets") == workspace);
                chosen.map(|(_, t)| 32 * (t.read.unique_sectors + t.written.unique_sectors)).sum()
            };
            let ratio = of(false) as f64 / floor;
            println!("{name}, {m} tokens: {ratio:.4} of the floor, workspace {:.4}", of(true) as f64 / floor);
            assert!(ratio <= 1.03, "{name}, {m} tokens: {ratio}");
            // No weight is asked for twice.
            let codes = counters.buffers["codes"].read;
            assert_eq!(codes.bytes_asked, codes.unique_bytes, "{name}, {m} tokens");
            assert_eq!(
                codes.unique_bytes as usize,
                problem.layout.row_blocks() * problem.layout.tiles() * problem.layout.tile_bytes()
            );
        }
    }
}

#[test]
fn banks_have_no_conflicts() {
    if !ready() {
        return;
    }
    for m in [1, 16, 32, 64] {
        for (name, problem, _) in problems(m) {
            let (_, counters) = counted(&problem);
            println!(
                "{name}, {m} tokens: reads {:?}, writes {:?}",
                counters.shared_reads, counters.shared_writes
            );
            assert!(counters.shared_reads.ideal > 0 && counters.shared_writes.ideal > 0);
            assert_eq!(counters.shared_reads.taken, counters.shared_reads.ideal, "{name}, {m} tokens: reads");
            assert_eq!(
                counters.shared_writes.taken, counters.shared_writes.ideal,
                "{name}, {m} tokens: writes"
            );
        }
    }
}

/// `lop3` and `shf` stand in the text for dequantization alone.
#[test]
fn dequantization_takes_few_instructions() {
    if !ready() {
        return;
    }
    // A word is eight weights, and an instruction one of each lane's.
    let words = (N * K / 8 / 32) as u64;
    for (activation, most) in [(Activation::F16, 5), (Activation::Bf16, 7)] {
        let (_, counters) = counted(&float(activation, 128, true, 8));
        let taken = counters.opcode("lop3.") + counters.opcode("shf.");
        assert_eq!(taken, most * words, "{activation:?}: {:?}", counters.by_opcode);
    }
}

/// Of PTX, of which machine code has fewer: with one token and groups of 128, 256 in the loop for 340 here. What these chunks of four
/// tiles take before and after the loop is in it.
#[test]
fn instructions_of_a_slot_are_few() {
    if !ready() {
        return;
    }
    for (m, most) in [(1, 620.0), (16, 870.0)] {
        for (name, problem, _) in problems(m) {
            let (plan, counters) = counted(&problem);
            let slots = (N / 128 * K / 128 * plan.launch.block as usize / 32) as u64;
            let each = counters.instructions as f64 / slots as f64;
            println!(
                "{name}, {m} tokens: {each:.0} instructions of PTX a warp and slot, ends of blocks included"
            );
            assert!(each < most, "{name}, {m} tokens: {each}");
        }
    }
}
