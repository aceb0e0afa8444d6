//! The cost of launches, as counted by the interpreter: bytes of memory compared with the minimum, passes through the
//! banks of shared memory, and instructions for dequantization.

use quant_kernels_cpu::ScaleType;
use quant_kernels_cuda::compile::GpuArchitecture;
use quant_kernels_cuda::layout::{Order, WeightLayout};
use quant_kernels_cuda::linear::{InputType, LinearPlan, Output, PlanLimits};
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
/// One chunk.
const K: usize = 896;

fn float(activation: InputType, group: usize, zeros: bool, m: usize) -> Problem {
    let (kind, output) = match activation {
        InputType::F16 => (Kind::F16, Output::F16),
        _ => (Kind::Bf16, Output::Bf16),
    };
    Problem::float(Case::new([N, K], 4, group, kind, zeros, 41), activation, output, m, Draw::Typical, 43)
}

fn int8(bits: u8, group: usize, kind: Kind, zeros: bool, m: usize) -> Problem {
    Problem::int8(Case::new([N, K], bits, group, kind, zeros, 41), Output::F16, m, None, Draw::Typical, 43)
}

/// With the minimum size of the weights in bytes.
fn problems(m: usize) -> Vec<(&'static str, Problem, usize)> {
    let groups = |size: usize| N * K / size;
    let weights = N * K;
    vec![
        ("w4a16 g128 asym", float(InputType::F16, 128, true, m), weights / 2 + groups(128) * 5 / 2),
        ("w4a16 g128", float(InputType::F16, 128, false, m), weights / 2 + groups(128) * 2),
        ("w4a16 g64 asym bf16", float(InputType::Bf16, 64, true, m), weights / 2 + groups(64) * 5 / 2),
        ("w4a16 g32 asym bf16", float(InputType::Bf16, 32, true, m), weights / 2 + groups(32) * 5 / 2),
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

/// For matrices of one chunk, which need no workspace.
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
            let ratio = moved(&counters) as f64 / floor;
            println!("{name}, {m} tokens: {ratio:.4} times the floor");
            assert!(ratio <= 1.03, "{name}, {m} tokens: {ratio}");
            assert!(!counters.buffers.contains_key("partials"));
            let codes = counters.buffers["codes"].read;
            assert_eq!(codes.bytes_asked, codes.unique_bytes, "{name}, {m} tokens");
            assert_eq!(
                codes.unique_bytes as usize,
                problem.layout.row_blocks() * problem.layout.tiles() * problem.layout.tile_bytes()
            );
        }
    }
}

/// The number of bytes in all sectors that were read, plus those that were written: weights, activations, results and
/// workspace.
fn moved(counters: &Counters) -> u64 {
    counters.buffers.values().map(|t| 32 * (t.read.unique_sectors + t.written.unique_sectors)).sum()
}

/// Not counting tickets.
#[test]
fn bytes_of_a_workspace_are_those_of_the_plan() {
    if !ready() {
        return;
    }
    for m in [1, 5, 16, 20] {
        let case = Case::new([160, 3072], 4, 128, Kind::F16, true, 41);
        let problem = Problem::float(case, InputType::F16, Output::F16, m, Draw::Typical, 43);
        let (plan, counters) = counted(&problem);
        assert_eq!(plan.work.launch.grid[1], 4);
        let partials = counters.buffers["partials"];
        let expected = plan.traffic().workspace as u64 / 2;
        for way in [partials.read, partials.written] {
            assert_eq!((way.unique_bytes, way.bytes_asked), (expected, expected), "{m} tokens");
            assert_eq!(32 * way.unique_sectors, expected, "{m} tokens");
        }
        let tickets = 2 * 32 * (plan.work.launch.grid[0] as u64 * 8).div_ceil(32);
        let (got, message) = (moved(&counters), plan.traffic().total() as u64);
        assert!((message..=message + tickets + 64).contains(&got), "{m} tokens: {got} for {message}");
    }
}

/// For shapes of real models, the total bytes relative to the minimum: weights of 4.15625 bits (groups of 128 with f16
/// scales and zero points), activations and results. Most of the excess is the workspace.
#[test]
fn bytes_of_models_shapes() {
    let device = PlanLimits::of(GpuArchitecture::Sm90);
    let ratio = |n: usize, k: usize, m: usize| {
        let layout =
            WeightLayout::from_parts([n, k], 4, 128, ScaleType::F16, None, Order::Float, false).unwrap();
        let plan = LinearPlan::new(&layout, InputType::F16, Output::F16, m, &device).unwrap();
        let floor = n * k / 2 + n * k / 128 * 5 / 2 + 2 * m * (n + k);
        plan.traffic().total() as f64 / floor as f64
    };
    for (n, k, expected) in [
        // For 1, 8 and 16 tokens.
        (8192, 8192, [1.0131, 1.0522, 1.0963]),
        (57_344, 8192, [1.0075, 1.0075, 1.0075]),
        (4096, 4096, [1.0338, 1.2148, 1.4161]),
        (6144, 4096, [1.0188, 1.0965, 1.1834]),
        (28_672, 4096, [1.0075, 1.0075, 1.0074]),
        (4096, 14_336, [1.0150, 1.0670, 1.1254]),
        (10_240, 8192, [1.0094, 1.0224, 1.0371]),
        (8192, 28_672, [1.0091, 1.0203, 1.0330]),
    ] {
        for (m, expected) in [1, 8, 16].into_iter().zip(expected) {
            let got = ratio(n, k, m);
            println!("{n} × {k}, {m} tokens: {got:.4}");
            assert!((got - expected).abs() < 1e-4, "{n} × {k}, {m} tokens: {got}");
        }
        assert!(ratio(n, k, 4096) < 1.01);
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

/// In the PTX, only dequantization uses `lop3` and `shf`.
#[test]
fn dequantization_takes_few_instructions() {
    if !ready() {
        return;
    }
    // A word holds eight weights, and an instruction processes one word per lane.
    let words = (N * K / 8 / 32) as u64;
    for (activation, max) in [(InputType::F16, 5), (InputType::Bf16, 7)] {
        let (_, counters) = counted(&float(activation, 128, true, 8));
        let taken = counters.opcode("lop3.") + counters.opcode("shf.");
        assert_eq!(taken, max * words, "{activation:?}: {:?}", counters.by_opcode);
    }
}

/// Measured as the difference of seven tiles, with other uses of the same opcodes.
#[test]
fn dequantization_of_other_schemes_takes_few_instructions() {
    if !ready() {
        return;
    }
    let of = |k: usize, kind: Kind, bits: u8, group: usize, zeros: bool, activation: Option<InputType>| {
        let case = Case::new([N, k], bits, if group == 0 { k } else { group }, kind, zeros, 41);
        let problem = match activation {
            None => Problem::int8(case, Output::F16, 8, None, Draw::Typical, 43),
            Some(activation) => Problem::float(case, activation, Output::F16, 8, Draw::Typical, 43),
        };
        counted(&problem).1
    };
    let whole = ["and.b32", "shl.b32", "shr.u32", "mul.lo", "mad.lo", "lop3"];
    let bytes = ["prmt", "sub.rn.f32", "add.rn.f32", "cvt.rn.bf16x2"];
    for (name, kind, bits, group, zeros, activation, opcodes, max) in [
        // Three, or five with two levels of scales, and some for offsets, zero points and scales.
        ("w4a8", Kind::F32, 4, 0, false, None, &whole[..], 4.0),
        ("w4a8 asym", Kind::F32, 4, 0, true, None, &whole, 4.0),
        ("w4a8 g128 asym", Kind::F16, 4, 128, true, None, &whole, 5.0),
        ("w4a8 g128 progressive", Kind::Progressive, 4, 128, true, None, &whole, 7.0),
        ("w8a16 f16", Kind::F32, 8, 0, false, Some(InputType::F16), &bytes, 5.0),
        // Far more than for f16, because the mantissa of bf16 has too few bits for a byte.
        ("w8a16 bf16", Kind::F32, 8, 0, false, Some(InputType::Bf16), &bytes, 21.0),
    ] {
        let count = |counters: &Counters| opcodes.iter().map(|o| counters.opcode(o)).sum::<u64>();
        let [few, many] = [8, 15].map(|tiles| count(&of(128 * tiles, kind, bits, group, zeros, activation)));
        let each = (many - few) as f64 * 32.0 * 8.0 / (N * 7 * 128) as f64;
        println!("{name}: {each:.2} instructions for 8 weights");
        assert!(each <= max && each > max - 2.0, "{name}: {each}");
    }
}

/// All PTX instructions per tile, including those before and after the loop over four tiles.
#[test]
fn instructions_of_a_slot_are_few() {
    if !ready() {
        return;
    }
    for (m, max) in [(1, 620.0), (16, 870.0)] {
        for (name, problem, _) in problems(m) {
            let (plan, counters) = counted(&problem);
            let slots = (N / 128 * K / 128 * plan.work.launch.block as usize / 32) as u64;
            let each = counters.instructions as f64 / slots as f64;
            println!(
                "{name}, {m} tokens: {each:.0} PTX instructions per warp and slot, with the code around the loop"
            );
            assert!(each < max, "{name}, {m} tokens: {each}");
        }
    }
}
