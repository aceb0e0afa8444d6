//! Bugs planted into the kernel's text, each of which the interpreter or the reference must find.

use quant_kernels_cuda::compile::Source;
use quant_kernels_cuda::linear::{Activation, LinearPlan, Output, SOURCE};
use quant_ptx_interpreter::{Error, FaultKind, Options};

use crate::DEVICE;
use crate::cases::{Case, Kind};
use crate::machine::{compiled, ready, run};
use crate::problem::{Draw, Problem};

/// The text with some places changed, each of which is once in it or its headers.
fn changed(places: &[[&str; 2]]) -> &'static Source {
    let mut texts: Vec<(&'static str, String)> = vec![(SOURCE.name, SOURCE.text.to_owned())];
    texts.extend(SOURCE.headers.iter().map(|&(name, text)| (name, text.to_owned())));
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

/// What the changed text does on a ragged problem of several chunks: a fault's kind, or none.
fn fault(from: &str, to: &str) -> Option<FaultKind> {
    let case = Case::new([133, 1152], 4, 128, Kind::F16, true, 31);
    let problem = Problem::float(case, Activation::F16, Output::F16, 13, Draw::Usual, 32);
    let plan =
        LinearPlan::new(&problem.layout, problem.activation, problem.output, problem.m, &DEVICE).unwrap();
    assert!(plan.chunks > 1 && plan.launch.grid[1] > 1);
    let module = compiled(&plan.variant, Some(changed(&[[from, to]])));
    match run(&problem, &plan, &module, &Options::default()) {
        Err(Error::Fault(fault)) => Some(fault.kind),
        Err(other) => panic!("{other}"),
        Ok(_) => None,
    }
}

/// The barrier of the main loop.
const WAIT: &str = "copy_async_wait<STAGES - 2 - (SUMS ? 1 : 0)>();\n        __syncthreads();";

#[test]
fn a_missing_barrier() {
    if ready() {
        let found = fault(WAIT, "copy_async_wait<STAGES - 2 - (SUMS ? 1 : 0)>();");
        assert!(matches!(found, Some(FaultKind::SharedRace | FaultKind::NotVisible)), "{found:?}");
    }
}

#[test]
fn too_short_a_wait() {
    if ready() {
        let found = fault(WAIT, "copy_async_wait<STAGES - 1>();\n        __syncthreads();");
        assert_eq!(found, Some(FaultKind::InFlight));
    }
}

#[test]
fn too_short_a_ring() {
    if ready() {
        let found =
            fault("const u32 refill = slot == 0 ? STAGES - 1 : slot - 1;", "const u32 refill = slot;");
        assert!(matches!(found, Some(FaultKind::SharedRace | FaultKind::InFlight)), "{found:?}");
    }
}

#[test]
fn sums_in_one_place() {
    if ready() {
        let found = fault("x_sums + (odd ^ 1) * GROUPS * TOKENS", "x_sums + odd * GROUPS * TOKENS");
        assert_eq!(found, Some(FaultKind::SharedRace));
    }
}

#[test]
fn a_missing_guard_of_rows() {
    if ready() {
        let found = fault("if (token + line < p.m && row + column < p.n) {", "if (row + column < p.n) {");
        assert_eq!(found, Some(FaultKind::OutOfBounds));
    }
}

#[test]
fn a_missing_guard_of_tokens() {
    if ready() {
        let found = fault("i * X_ROWS < from.tokens && valid > 0", "valid > 0");
        assert_eq!(found, Some(FaultKind::OutOfBounds));
    }
}

#[test]
fn a_missing_guard_of_features() {
    if ready() {
        let found = fault("bool there = i * CODES_BLOCKS < from.row_blocks;", "bool there = true;");
        assert_eq!(found, Some(FaultKind::OutOfBounds));
    }
}

#[test]
fn chunks_joined_by_the_first_to_arrive() {
    if ready() {
        let found = fault("p.chunks - 1) == p.chunks - 1;", "p.chunks - 1) == 0;");
        assert!(matches!(found, Some(FaultKind::Uninitialised | FaultKind::GlobalRace)), "{found:?}");
    }
}

#[test]
fn chunks_without_a_fence() {
    if ready() {
        let found = fault(
            "    fence_device();\n    __syncthreads();\n    u32 *last",
            "    __syncthreads();\n    u32 *last",
        );
        assert_eq!(found, Some(FaultKind::GlobalRace));
    }
}

/// Values come out wrong, and nothing else can tell.
#[test]
fn another_swizzle_on_one_side() {
    if !ready() {
        return;
    }
    let place = ["(chunk ^ row % 8) * 16);", "(chunk ^ row % 4) * 16);"];
    let case = Case::new([133, 1152], 4, 128, Kind::F16, true, 31);
    let problem = Problem::float(case, Activation::F16, Output::F32, 13, Draw::Usual, 32);
    let plan =
        LinearPlan::new(&problem.layout, problem.activation, problem.output, problem.m, &DEVICE).unwrap();
    let module = compiled(&plan.variant, Some(changed(&[place])));
    let values = run(&problem, &plan, &module, &Options::default()).unwrap().values;
    let check = || problem.check(&values);
    assert!(
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_err(),
        "wrong values were not found"
    );
}

/// Values come out right, and only the banks tell.
#[test]
fn no_swizzle() {
    if !ready() {
        return;
    }
    let places = [
        ["(chunk ^ row % 8) * 16);", "chunk * 16);"],
        ["place = thread % X_CHUNKS ^ row % 8;", "place = thread % X_CHUNKS;"],
    ];
    let case = Case::new([133, 1152], 4, 128, Kind::F16, true, 31);
    let problem = Problem::float(case, Activation::F16, Output::F32, 13, Draw::Usual, 32);
    let plan =
        LinearPlan::new(&problem.layout, problem.activation, problem.output, problem.m, &DEVICE).unwrap();
    let module = compiled(&plan.variant, Some(changed(&places)));
    let outcome = run(&problem, &plan, &module, &Options::default()).unwrap();
    problem.check(&outcome.values);
    let reads = outcome.report.counters.shared_reads;
    assert!(reads.taken > 2 * reads.ideal, "{reads:?}");
}
