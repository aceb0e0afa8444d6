//! Compares the activation kernels with the CPU's. They run on the interpreter, which detects races and invalid
//! accesses. Needs NVRTC, but no GPU.

mod problem;
#[path = "../support/mod.rs"]
mod support;

use problem::{Numbers, Outcome, Problem};
use quant_kernels_cuda::activation::{ActivationShape, Float, HELD_WIDTH, RowSource};
use quant_kernels_cuda::compile::{Source, Variant};
use quant_ptx_interpreter::{BlockOrder, Error, FaultKind, Options, WarpOrder};
use support::has_nvrtc;

const ELEMENTS: [Float; 3] = [Float::F32, Float::F16, Float::Bf16];

fn norm(weight: Float, residual: bool) -> RowSource {
    RowSource::RmsNorm { weight, residual }
}

/// See the module `activation`.
fn norm_bound(shape: &ActivationShape) -> f64 {
    let threads = shape.plan().unwrap().launch.block as usize;
    // Vectors are not divided among threads.
    let chain = shape.k.div_ceil(threads) + 8 + 10;
    ((chain + shape.k / 64 + 7) as f64 / 2.0 + 12.0) * 2.0_f64.powi(-24)
}

/// Norms are compared within a bound, because their sums of squares are added in a different order than on the CPU.
#[track_caller]
fn assert_agrees(problem: &Problem, got: &Outcome, expected: &Outcome) {
    let shape = &problem.shape;
    assert_eq!(got.residual, expected.residual, "residual of {shape:?}");
    if !matches!(shape.rows, RowSource::RmsNorm { .. }) {
        assert_eq!(got, expected, "{shape:?}");
        return;
    }
    let bound = norm_bound(shape);
    for (got, expected) in got.scales.iter().zip(&expected.scales) {
        let [a, b] = [got, expected].map(|bits| f64::from(f32::from_bits(*bits)));
        assert!(got == expected || (a - b).abs() <= bound * b.abs(), "{a} for {b}, {shape:?}");
    }
    let off = |(a, b): (&i8, &i8)| (i32::from(*a) - i32::from(*b)).abs();
    let max = got.codes.iter().zip(&expected.codes).map(off).max().unwrap();
    assert!(max <= 1, "a code is off by {max}, {shape:?}");
    let changed = got.codes.iter().zip(&expected.codes).filter(|(a, b)| a != b).count();
    // Only codes of values close to the midpoint between two codes may differ.
    assert!(changed <= 2 + got.codes.len() / 500, "{changed} of {} codes, {shape:?}", got.codes.len());
    let add = |codes: &[i8]| codes.iter().map(|&c| i32::from(c)).sum::<i32>();
    let rows = || got.codes.chunks(shape.k);
    assert_eq!(got.row_sums, rows().map(add).collect::<Vec<_>>(), "{shape:?}");
    let groups = |g| rows().flat_map(|row| row.chunks(g).map(add).collect::<Vec<_>>()).collect::<Vec<_>>();
    assert_eq!(got.group_sums, shape.group.map_or(Vec::new(), groups), "{shape:?}");
}

fn shapes(widths: &[usize]) -> Vec<ActivationShape> {
    let groups = [None, Some(32), Some(64), Some(128), Some(96), Some(1024)];
    let mut numbers = Numbers(7);
    let mut pick = |n: usize| numbers.next() as usize % n;
    let mut out = Vec::new();
    for element in ELEMENTS {
        for rows in [RowSource::Plain, RowSource::SiluMul, norm(element, false), norm(Float::F32, true)] {
            for &k in widths {
                let base = ActivationShape::new(rows, element, 3, k);
                let aligned = pick(2) == 0;
                // Exchanging two strides must be detected.
                let stride = |i: usize| if aligned { k.next_multiple_of(16) + 16 * i } else { k + i };
                let first = pick(3);
                out.push(ActivationShape {
                    aligned,
                    fixed: pick(3) == 0,
                    group: groups[pick(groups.len())],
                    x_stride: stride(first),
                    up_stride: stride(first + 1),
                    residual_stride: stride(first + 2),
                    code_stride: k.next_multiple_of(16) + 16 * pick(2),
                    ..base
                });
            }
        }
    }
    out
}

#[test]
fn ragged_rows_are_what_the_cpu_makes() {
    if !has_nvrtc() {
        return;
    }
    for (i, shape) in shapes(&[1, 7, 33, 128, 200, 511, 1000, 1024]).into_iter().enumerate() {
        let problem = Problem::new(shape, i as u64);
        assert_agrees(&problem, &problem.run(&Options::default()).0, &problem.expected());
    }
}

#[test]
fn wide_rows_are_what_the_cpu_makes() {
    if !has_nvrtc() {
        return;
    }
    for (i, k) in [1025, 2049, 4104, 8195, 16_400, HELD_WIDTH + 40].into_iter().enumerate() {
        for (rows, group) in
            [(RowSource::Plain, None), (RowSource::SiluMul, Some(128)), (norm(Float::Bf16, true), Some(160))]
        {
            let base = ActivationShape { group, ..ActivationShape::new(rows, Float::Bf16, 2, k) };
            let problem = Problem::new(base, i as u64);
            assert_agrees(&problem, &problem.run(&Options::default()).0, &problem.expected());
        }
    }
}

#[test]
fn extremes_are_what_the_cpu_makes() {
    if !has_nvrtc() {
        return;
    }
    for element in ELEMENTS {
        for rows in [RowSource::Plain, RowSource::SiluMul, norm(element, false), norm(element, true)] {
            for fixed in [false, true] {
                let shape = ActivationShape { fixed, ..ActivationShape::new(rows, element, 9, 136) };
                let mut problem = Problem::new(shape, 3);
                let k = shape.k;
                problem.x[..k].fill(0.0);
                problem.residual[..k].fill(0.0);
                problem.x[k + 5] = f32::INFINITY;
                problem.x[2 * k + 135] = f32::NAN;
                problem.x[3 * k] = f32::NEG_INFINITY;
                problem.x[4 * k..5 * k].fill(-0.0);
                problem.x[5 * k..6 * k].iter_mut().for_each(|x| *x = x.signum() * 2.0_f32.powi(-20));
                // A row of large equal values; then a row with values halfway between two codes: 127, and integers plus
                // a half.
                problem.x[6 * k..7 * k].fill(65_280.0);
                problem.x[7 * k] = 127.0;
                (1..k).for_each(|i| problem.x[7 * k + i] = (i as f32) - 68.5);
                let ends = [-90.0, -87.0, -86.5, 86.5, 87.0, 90.0, -0.0, 0.5];
                (0..k).for_each(|i| problem.x[8 * k + i] = ends[i % 8]);
                assert_agrees(&problem, &problem.run(&Options::default()).0, &problem.expected());
            }
        }
    }
    // Values that count as zero, which only f32 can represent; then the largest values of f32.
    let mut problem = Problem::new(ActivationShape::new(RowSource::Plain, Float::F32, 2, 40), 1);
    problem.x[..40].iter_mut().for_each(|x| *x *= 1e-38);
    problem.x[40..].fill(f32::MAX);
    let got = problem.run(&Options::default()).0;
    assert_eq!(got, problem.expected());
    assert_eq!(got.scales[0], 0);
}

#[test]
fn a_row_does_not_depend_on_its_neighbours() {
    if !has_nvrtc() {
        return;
    }
    for (rows, k, group) in [
        (norm(Float::F16, true), 1000, Some(128)),
        (norm(Float::F32, false), 2100, Some(96)),
        (RowSource::SiluMul, 520, Some(32)),
        (RowSource::Plain, 300, Some(288)),
    ] {
        let problem =
            Problem::new(ActivationShape { group, ..ActivationShape::new(rows, Float::F16, 4, k) }, 11);
        let whole = problem.run(&Options::default()).0;
        let orders = [
            (WarpOrder::Reverse, BlockOrder::Reverse),
            (WarpOrder::RoundRobin, BlockOrder::Forward),
            (WarpOrder::Seeded(1), BlockOrder::Seeded(2)),
            (WarpOrder::Seeded(3), BlockOrder::Reverse),
        ];
        for (warp_order, block_order) in orders {
            let options = Options { warp_order, block_order, ..Options::default() };
            assert_eq!(problem.run(&options).0, whole, "{options:?}");
        }
        for chosen in [&[0][..], &[3], &[2, 0, 1]] {
            let some = problem.only(chosen).run(&Options::default()).0;
            let groups = k.div_ceil(group.unwrap());
            for (i, &r) in chosen.iter().enumerate() {
                assert_eq!(some.codes[i * k..][..k], whole.codes[r * k..][..k]);
                assert_eq!(some.scales[i], whole.scales[r]);
                assert_eq!(some.group_sums[i * groups..][..groups], whole.group_sums[r * groups..][..groups]);
            }
        }
    }
}

#[test]
fn bytes_are_the_floor() {
    if !has_nvrtc() {
        return;
    }
    for element in ELEMENTS {
        for (rows, group) in [
            (RowSource::Plain, Some(128)),
            (RowSource::SiluMul, None),
            (norm(element, false), Some(256)),
            (norm(element, true), Some(32)),
        ] {
            let (m, k) = (3, 1024);
            let shape = ActivationShape { group, ..ActivationShape::new(rows, element, m, k) };
            let problem = Problem { align: 256, ..Problem::new(shape, 5) };
            let counters = problem.run(&Options::default()).1.counters;
            let matrix = (m * k * element.bytes()) as u64;
            let floor = |name: &str| match name {
                "x" | "up" => [matrix, 0],
                "residual" => [matrix, matrix],
                "codes" => [0, (m * k) as u64],
                "scales" | "row_sums" => [0, 4 * m as u64],
                "group_sums" => [0, (4 * m * k / group.unwrap()) as u64],
                // Read for every row, but from memory only once.
                "weight" => [(k * element.bytes()) as u64, 0],
                // The compiler adds this buffer to every module.
                "(module)" => [0, 0],
                other => panic!("a buffer {other}"),
            };
            for (name, traffic) in &counters.buffers {
                let [read, written] = floor(name);
                let again = if name == "weight" { m as u64 } else { 1 };
                assert_eq!(
                    (traffic.read.unique_bytes, traffic.written.unique_bytes),
                    (read, written),
                    "{name}"
                );
                assert_eq!(traffic.read.bytes_asked, again * read, "{name}");
                assert_eq!(traffic.written.bytes_asked, written, "{name}");
                if matches!(name.as_str(), "x" | "up" | "residual" | "codes" | "weight") {
                    assert_eq!(traffic.read.sectors, again * read.div_ceil(32), "{name}");
                    assert_eq!(traffic.written.sectors, written.div_ceil(32), "{name}");
                }
            }
            for wavefronts in [counters.shared_reads, counters.shared_writes] {
                assert_eq!(wavefronts.taken, wavefronts.ideal, "{:?}", problem.shape);
            }
            assert!(counters.shared_reads.taken > 0);
        }
    }
}

/// PTX instructions of a lane per value of long rows, without moves between registers. The limits are the current
/// numbers, rounded up; lower them when possible.
#[test]
fn instructions_stay_within_their_budgets() {
    if !has_nvrtc() {
        return;
    }
    for (rows, max) in [
        (RowSource::Plain, 16.0),
        (norm(Float::Bf16, false), 23.0),
        (norm(Float::Bf16, true), 30.0),
        (RowSource::SiluMul, 42.0),
    ] {
        let (m, k) = (1, 8192);
        let shape = ActivationShape { group: Some(128), ..ActivationShape::new(rows, Float::Bf16, m, k) };
        let counters = Problem::new(shape, 5).run(&Options::default()).1.counters;
        let taken = counters.instructions - counters.opcode("mov.");
        let each = 32.0 * taken as f64 / (m * k) as f64;
        println!("{rows:?}: {each:.1} PTX instructions per value");
        assert!(each <= max, "{each} instructions per value, {rows:?}");
    }
}

/// The number of rows is in device memory.
#[test]
fn rows_beyond_the_count_are_left_out() {
    if !has_nvrtc() {
        return;
    }
    for (k, group) in [(520, None), (520, Some(96)), (33_000, Some(128))] {
        let plain = ActivationShape::new(RowSource::Plain, Float::F32, 4, k);
        let mut problem = Problem::new(ActivationShape { group, ..plain }, 9);
        for count in [0, 1, 3, 4, 5, u32::MAX] {
            problem.count = Some(count);
            let rows: Vec<usize> = (0..4.min(count as usize)).collect();
            let got = problem.run(&Options::default()).0;
            if rows.is_empty() {
                assert!(got.codes.is_empty() && got.scales.is_empty());
                continue;
            }
            assert_eq!(got, problem.only(&rows).expected(), "{count} rows of {k}");
        }
    }
}

#[test]
fn sums_of_rows_may_be_left_out() {
    if !has_nvrtc() {
        return;
    }
    let shape = ActivationShape::new(norm(Float::Bf16, true), Float::Bf16, 2, 264);
    let problem = Problem { row_sums: false, ..Problem::new(shape, 2) };
    let (outcome, report) = problem.run(&Options::default());
    let with = Problem { row_sums: true, ..problem }.run(&Options::default()).0;
    assert_eq!((outcome.codes, outcome.row_sums), (with.codes, Vec::new()));
    assert!(!report.counters.buffers.contains_key("row_sums"));
}

fn planted(variant: &Variant, from: &str, to: &str) -> Variant {
    let Source { text, headers, .. } = *variant.source;
    let texts = headers.iter().map(|header| header.1).chain([text]);
    let found: usize = texts.map(|text| text.matches(from).count()).sum();
    assert_eq!(found, 1, "{from:?} occurs once in the source and its headers");
    // Sources are static; the test process is short-lived.
    let changed = |text: &str| -> &'static str { text.replace(from, to).leak() };
    let headers: Vec<_> = headers.iter().map(|&(name, text)| (name, changed(text))).collect();
    let source = Source { name: "planted.cu", text: changed(text), headers: headers.leak() };
    Variant { source: Box::leak(Box::new(source)), ..variant.clone() }
}

#[test]
fn planted_bugs_are_caught() {
    if !has_nvrtc() {
        return;
    }
    let shape = |k: usize| ActivationShape {
        group: Some(96),
        x_stride: k.next_multiple_of(8),
        aligned: true,
        ..ActivationShape::new(norm(Float::F16, false), Float::F16, 2, k)
    };
    let run = |k, places: Option<[&str; 2]>| {
        // The barrier of sums of rows would hide a missing barrier of the sums of groups.
        let problem = Problem { row_sums: false, ..Problem::new(shape(k), 1) };
        let plan = problem.plan();
        let options = Options { warp_order: WarpOrder::RoundRobin, ..Options::default() };
        let variant = places.map_or(plan.variant.clone(), |[from, to]| planted(&plan.variant, from, to));
        match problem.run_variant(&plan, &variant, &options) {
            Ok((outcome, _)) => Ok((outcome, problem.expected())),
            Err(Error::Fault(fault)) => Err(fault),
            Err(other) => panic!("{other}"),
        }
    };
    for k in [1020, 1024] {
        let (got, expected) = run(k, None).unwrap();
        assert!(got.codes.iter().zip(&expected.codes).all(|(a, b)| a.abs_diff(*b) <= 1));
        assert!(got.group_sums.iter().zip(&expected.group_sums).all(|(a, b)| a.abs_diff(*b) <= 4));
    }
    // The fault must be reported for this instruction and this buffer.
    let is_found = |k, from: &str, to: &str, kinds: &[FaultKind], opcode: &str, buffer: &str| {
        let fault = run(k, Some([from, to])).expect_err(from);
        let is_it = kinds.contains(&fault.kind)
            && fault.opcode.starts_with(opcode)
            && fault.buffer.as_deref() == Some(buffer);
        assert!(is_it, "{from:?} for {to:?}: {fault}");
    };
    let race = &[FaultKind::SharedRace, FaultKind::Uninitialised];
    // Remove the barrier in sums over a block.
    let barrier = "slots[threadIdx.x / 32] = word;\n    __syncthreads();";
    is_found(1024, barrier, "slots[threadIdx.x / 32] = word;", race, "ld.shared", "shared");
    // Use the same slots for two sums.
    is_found(1024, "(largest, slots[1])", "(largest, slots[0])", race, "st.shared", "shared");
    // Remove the barrier before sums of groups.
    let barrier = "if constexpr (GROUP == 1) {\n        __syncthreads();";
    is_found(1024, barrier, "if constexpr (GROUP == 1) {", race, "ld.shared", "shared");
    // Remove the guards at the end of a row, for reads and for writes, and at the end of its last group.
    let outside = &[FaultKind::OutOfBounds];
    let words = "\n        u32 words[WORDS];\n#pragma unroll\n        for (int i = 0; i < WORDS; i += 4)";
    let guard = format!("if (ALIGNED && at + VECTOR <= k) {{{words}");
    is_found(1020, &guard, &format!("if (ALIGNED) {{{words}"), outside, "ld.global", "weight");
    let guard = "if (at + VECTOR <= k) {\n        if constexpr";
    is_found(1020, guard, "if (true) {\n        if constexpr", outside, "st.global", "codes");
    let guard = "if (g * each + i < all) sum";
    is_found(1020, guard, "sum", outside, "ld.shared", "shared");
    // Only wrong values reveal lanes and warps that a sum leaves out.
    for (from, to) in [
        (
            "for (int apart = 1; apart < 32; apart *= 2) sum = sum",
            "for (int apart = 2; apart < 32; apart *= 2) sum = sum",
        ),
        (
            "for (int apart = 1; apart < LANES; apart *= 2) sum",
            "for (int apart = 2; apart < LANES; apart *= 2) sum",
        ),
        ("lane < WARPS ? slots[lane]", "lane < WARPS - 1 ? slots[lane]"),
    ] {
        let (got, expected) = run(1024, Some([from, to])).unwrap();
        let far = got.codes.iter().zip(&expected.codes).any(|(a, b)| a.abs_diff(*b) > 1);
        let scale = |bits: u32| f32::from_bits(bits);
        let scaled =
            got.scales.iter().zip(&expected.scales).any(|(a, b)| (scale(*a) / scale(*b) - 1.0).abs() > 0.01);
        let sums = got.group_sums.iter().zip(&expected.group_sums).any(|(a, b)| a.abs_diff(*b) > 4);
        assert!(far || scaled || sums, "{from:?} for {to:?}");
    }
}
