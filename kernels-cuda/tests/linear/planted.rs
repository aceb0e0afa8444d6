//! Bugs planted into the kernels' sources. The interpreter or the reference must detect each of them.

use quant_kernels_cuda::compile::Source;
use quant_kernels_cuda::layout::Order;
use quant_kernels_cuda::linear::{InputType, LinearPlan, Output, SOURCE};
use quant_ptx_interpreter::{Counters, Error, Fault, FaultKind, Options, WarpOrder};

use crate::DEVICE;
use crate::cases::{Case, Kind};
use crate::machine::{compiled, ready, run};
use crate::packing;
use crate::problem::{Draw, Problem};

/// A source with some changes; each replaced text must occur exactly once in the source and its headers.
pub fn changed(source: &Source, places: &[[&str; 2]]) -> &'static Source {
    let mut texts: Vec<(&'static str, String)> = vec![(source.name, source.text.to_owned())];
    texts.extend(source.headers.iter().map(|&(name, text)| (name, text.to_owned())));
    for [from, to] in places {
        let found: usize = texts.iter().map(|(_, text)| text.matches(from).count()).sum();
        assert_eq!(found, 1, "{from}");
        texts.iter_mut().for_each(|(_, text)| *text = text.replace(from, to));
    }
    let mut texts = texts.into_iter().map(|(name, text)| (name, &*text.leak()));
    let (name, text) = texts.next().expect("the kernel's text comes first");
    let headers: Vec<(&str, &str)> = texts.collect();
    Box::leak(Box::new(Source { name, text, headers: headers.leak() }))
}

/// Rows, features and tokens do not fill tiles.
fn problem(m: usize, k: usize) -> (Problem, LinearPlan) {
    let group = if k.is_multiple_of(128) { 128 } else { 32 };
    let case = Case::new([133, k], 4, group, Kind::F16, true, 31);
    let problem = Problem::float(case, InputType::F16, Output::F32, m, Draw::Typical, 32);
    let plan = LinearPlan::new(&problem.layout, problem.activation, problem.output, m, &DEVICE).unwrap();
    // Several chunks, except in short rows.
    assert_eq!(
        (plan.work.chunks > 1, plan.work.launch.grid[1]),
        (k > 1000, plan.work.chunks),
        "{}",
        plan.work.variant.name()
    );
    (problem, plan)
}

fn outcome(places: &[[&str; 2]], m: usize, k: usize) -> Result<(Vec<f32>, Counters), Box<Fault>> {
    let (problem, plan) = problem(m, k);
    let module = compiled(&plan.work.variant, Some(changed(&SOURCE, places)));
    // No warp gets far ahead of the others.
    let options =
        Options { warp_order: WarpOrder::RoundRobin, max_instructions: 3_000_000, ..Options::default() };
    match run(&problem, &plan, &module, &options) {
        Err(Error::Fault(fault)) => Err(fault),
        Err(other) => panic!("{other}"),
        Ok(outcome) => Ok((outcome.values, outcome.report.counters)),
    }
}

#[track_caller]
fn is_found(places: &[[&str; 2]], kinds: &[FaultKind], opcode: &str, buffer: &str) {
    is_found_of(places, 13, 2176, kinds, opcode, buffer);
}

#[track_caller]
fn is_found_of(places: &[[&str; 2]], m: usize, k: usize, kinds: &[FaultKind], opcode: &str, buffer: &str) {
    if !ready() {
        return;
    }
    let fault = outcome(places, m, k).expect_err("the planted bug was not detected");
    let is_it = kinds.contains(&fault.kind)
        && fault.opcode.starts_with(opcode)
        && fault.buffer.as_deref().unwrap_or_default() == buffer;
    assert!(is_it, "unexpected fault, not {kinds:?} of {opcode} in {buffer:?}: {fault}");
}

/// The wait and the barrier of the main loop.
const WAIT: &str = "copy_async_wait<STAGES - 2 - (SHARED_SUMS ? 1 : 0)>();\n        __syncthreads();";
const WAIT_ALONE: &str = "copy_async_wait<STAGES - 2 - (SHARED_SUMS ? 1 : 0)>();";
const LATE_WAIT: &str = "copy_async_wait<STAGES - 1>();\n        __syncthreads();";

#[test]
fn without_a_bug_nothing_is_found() {
    if !ready() {
        return;
    }
    for (m, k) in [(13, 2176), (13, 2080)] {
        let (values, counters) = outcome(&[], m, k).unwrap();
        problem(m, k).0.check(&values);
        let reads = counters.shared_reads;
        assert_eq!(reads.taken, reads.ideal);
    }
}

#[test]
fn a_missing_barrier() {
    let without = [[WAIT, WAIT_ALONE]];
    let kinds = [FaultKind::SharedRace, FaultKind::InFlight, FaultKind::NotVisible];
    is_found(&without, &kinds, "ld", "shared");
}

#[test]
fn too_short_a_wait() {
    let without = [[WAIT, LATE_WAIT]];
    is_found(&without, &[FaultKind::InFlight], "ld", "shared");
}

#[test]
fn too_short_a_ring() {
    let short = [["const u32 refill = slot == 0 ? STAGES - 1 : slot - 1;", "const u32 refill = slot;"]];
    is_found(&short, &[FaultKind::InFlight], "ld", "shared");
}

/// Only blocks of more than 16 tokens have sums in shared memory.
#[test]
fn sums_in_one_place() {
    let one = [["x_sums + (odd ^ 1) * GROUPS * TOKENS", "x_sums + odd * GROUPS * TOKENS"]];
    is_found_of(&one, 21, 2176, &[FaultKind::SharedRace], "", "shared");
}

#[test]
fn a_missing_guard_of_rows() {
    let without = [["if (token + line < p.m && row + column < p.n) {", "if (token + line < p.m) {"]];
    is_found(&without, &[FaultKind::OutOfBounds], "ld.global", "bias");
}

#[test]
fn a_missing_guard_of_rows_of_weights() {
    let without = [["bool there = own * CODES_BLOCKS < from.row_blocks;", "bool there = true;"]];
    is_found(&without, &[FaultKind::OutOfBounds], "cp.async", "codes");
}

#[test]
fn a_missing_guard_of_parameters() {
    let without =
        [["bool there = block - (i32)(thread / CODES_CHUNKS) < from.row_blocks;", "bool there = true;"]];
    is_found(&without, &[FaultKind::OutOfBounds], "cp.async", "parameters");
}

#[test]
fn a_missing_guard_of_tokens() {
    let without = [["i * X_ROWS < from.tokens && valid > 0", "valid > 0"]];
    is_found(&without, &[FaultKind::OutOfBounds], "cp.async", "x");
}

#[test]
fn a_missing_guard_of_features() {
    let without = [["const i32 valid = max(min(from.left, 16), 0);", "const i32 valid = 16;"]];
    let kinds = [FaultKind::OutOfBounds, FaultKind::Uninitialised];
    is_found_of(&without, 13, 2080, &kinds, "cp.async", "x");
}

#[test]
fn a_missing_guard_of_results() {
    let without = [["if (token + line < p.m && row + column < p.n) {", "if (row + column < p.n) {"]];
    is_found(&without, &[FaultKind::OutOfBounds], "st.global", "out");
}

/// The last tile is in the first slot of the ring, whose memory results are reordered in.
#[test]
fn a_missing_barrier_behind_the_ring() {
    let without = [["    // Shared memory is free for other data from here on.\n    __syncthreads();\n", ""]];
    assert_eq!(problem(13, 512).1.work.variant.shape.stages, 3);
    is_found_of(&without, 13, 512, &[FaultKind::SharedRace], "st.shared", "shared");
}

#[test]
fn chunks_without_a_fence() {
    let without = [[
        "            fence_device();\n            add_device(written, 1);",
        "            add_device(written, 1);",
    ]];
    is_found(&without, &[FaultKind::GlobalRace], "ld.global.cg", "partials");
}

#[test]
fn chunks_without_a_barrier_before_their_ticket() {
    let without = [[
        "        __syncthreads();\n        if (threadIdx.x == 0) {\n            fence_device();\n            add_device",
        "        if (threadIdx.x == 0) {\n            fence_device();\n            add_device",
    ]];
    is_found(&without, &[FaultKind::GlobalRace], "ld.global.cg", "partials");
}

#[test]
fn chunks_that_are_not_waited_for() {
    let without = [["while (add_device(written, 0) != p.chunks - 1) {", "while (false) {"]];
    is_found(&without, &[FaultKind::GlobalRace], "st.global", "tickets");
}

/// The first block waits forever.
#[test]
fn chunks_joined_by_the_first_to_arrive() {
    let first = [["const bool is_last = *others == p.chunks - 1;", "const bool is_last = *others == 0;"]];
    is_found(&first, &[FaultKind::Runaway], "", "");
}

/// The second launch waits forever.
#[test]
fn tickets_that_are_not_reset() {
    is_found(&[["        *written = 0;\n", ""]], &[FaultKind::Runaway], "", "");
}

#[test]
fn another_swizzle_on_one_side() {
    if !ready() {
        return;
    }
    let (values, _) = outcome(&[["(chunk ^ row % 8) * 16);", "(chunk ^ row % 4) * 16);"]], 13, 2176).unwrap();
    let check = || problem(13, 2176).0.check(&values);
    assert!(
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_err(),
        "wrong values were not found"
    );
}

/// Only bank conflicts reveal the bug.
#[test]
fn no_swizzle() {
    if !ready() {
        return;
    }
    let places = [
        ["(chunk ^ row % 8) * 16);", "chunk * 16);"],
        ["place = thread % X_CHUNKS ^ row % 8;", "place = thread % X_CHUNKS;"],
    ];
    let (values, counters) = outcome(&places, 13, 2176).unwrap();
    problem(13, 2176).0.check(&values);
    let reads = counters.shared_reads;
    assert!(reads.taken > 2 * reads.ideal, "{reads:?}");
}

/// With many tokens, a block of eight warps computes chunks one after another.
#[test]
fn many_tokens() {
    if !ready() {
        return;
    }
    let case = Case::new([133, 1160], 8, 1160, Kind::F32, true, 31);
    let problem = Problem::int8(case, Output::F32, 70, None, Draw::Typical, 32);
    let plan = LinearPlan::new(&problem.layout, problem.activation, problem.output, 70, &DEVICE).unwrap();
    assert_eq!((plan.work.variant.shape.threads(), plan.work.variant.shape.tokens()), (256, 128));
    let found = |places: &[[&str; 2]]| {
        let module = compiled(&plan.work.variant, Some(changed(&SOURCE, places)));
        match run(&problem, &plan, &module, &Options::default()) {
            Err(Error::Fault(fault)) => Some((fault.kind, fault.buffer.unwrap_or_default())),
            Err(other) => panic!("{other}"),
            Ok(outcome) => {
                problem.check(&outcome.values);
                None
            }
        }
    };
    assert_eq!(found(&[]), None);
    for (from, to, kinds, buffer) in [
        (
            WAIT,
            WAIT_ALONE,
            &[FaultKind::SharedRace, FaultKind::InFlight, FaultKind::NotVisible][..],
            "shared",
        ),
        (
            "    __syncthreads();\n    for (u32 i",
            "    for (u32 i",
            &[FaultKind::SharedRace, FaultKind::Uninitialised],
            "shared",
        ),
        (WAIT, LATE_WAIT, &[FaultKind::InFlight], "shared"),
        (
            "const u32 refill = slot == 0 ? STAGES - 1 : slot - 1;",
            "const u32 refill = slot;",
            &[FaultKind::InFlight, FaultKind::SharedRace],
            "shared",
        ),
        ("i * X_ROWS < from.tokens && valid > 0", "valid > 0", &[FaultKind::OutOfBounds], "x"),
    ] {
        let (kind, at) = found(&[[from, to]]).unwrap_or_else(|| panic!("{to}: not found"));
        assert!(kinds.contains(&kind) && at == buffer, "{to}: {kind:?} in {at}");
    }
}

/// Bugs in the order of bits are found by comparison with the CPU's bytes.
#[test]
fn packers() {
    if !ready() {
        return;
    }
    let case = Case::new([37, 320], 4, 64, Kind::F16, true, 5);
    let rows = Case::new([37, 320], 4, 320, Kind::F32, true, 6);
    let found = |case: &Case, order: Order, places: &[[&str; 2]]| packing::outcome(case, order, places);
    for (case, order) in [(&case, Order::Float), (&case, Order::Int8), (&rows, Order::Int8)] {
        assert_eq!(found(case, order, &[]), Ok(true));
    }
    let out = |buffer: &str| Err((FaultKind::OutOfBounds, buffer.to_owned()));
    let read = [["if (row >= w.n || feature >= w.k) return 0;", "if (feature >= w.k) return 0;"]];
    assert_eq!(found(&case, Order::Float, &read), out("codes"));
    let features = [["if (row >= w.n || feature >= w.k) return 0;", "if (row >= w.n) return 0;"]];
    assert_eq!(found(&case, Order::Float, &features), out("codes"));
    let tiles = [[
        "    if (tile >= (u64)((n + 15) / 16) * tiles) return;\n    const u32 chunk",
        "    const u32 chunk",
    ]];
    assert_eq!(found(&case, Order::Float, &tiles), out("section 0"));
    let outside = [["const bool there = row < n && first < k;", "const bool there = first < k;"]];
    assert_eq!(found(&case, Order::Float, &outside), out("zeros"));
    let once = [["const bool there = row < n;", "const bool there = true;"]];
    assert_eq!(found(&rows, Order::Int8, &once), out("codes"));
    let step = [[
        "for (int other = 16; other > 0; other /= 2) sum",
        "for (int other = 16; other > 1; other /= 2) sum",
    ]];
    assert_eq!(found(&rows, Order::Int8, &step), Ok(false));
    let place = [["word = word << 2 | word >> 30;", "word = word << 4 | word >> 28;"]];
    assert_eq!(found(&case, Order::Float, &place), Ok(false));
}
