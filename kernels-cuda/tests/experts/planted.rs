//! Bugs planted into the kernels that sort routings and add rows. The interpreter or a comparison must detect each.

use quant_kernels_cuda::Float;
use quant_kernels_cuda::compile::{Source, Variant};
use quant_kernels_cuda::experts::SumShape;
use quant_ptx_interpreter::{Error, FaultKind};

use crate::route::{self, Routing};
use crate::sum::Problem;
use crate::support::has_nvrtc;
use crate::support::machine as ptx;

/// The variant with one change of its source.
fn changed(variant: &Variant, [from, to]: [&str; 2]) -> Variant {
    let source = variant.source;
    assert_eq!(source.text.matches(from).count(), 1, "{from}");
    let text = source.text.replace(from, to).leak();
    let source = Box::leak(Box::new(Source { name: source.name, text, headers: source.headers }));
    Variant { source, ..variant.clone() }
}

/// The name of the buffer of the fault, if it is in one, or `values` if only these are different.
fn found<T: PartialEq>(outcome: ptx::Result<T>, expected: &T) -> String {
    match outcome {
        Ok(values) => {
            assert!(values != *expected, "the planted bug was not detected");
            "values".to_owned()
        }
        Err(Error::Fault(fault)) => {
            assert!([FaultKind::OutOfBounds, FaultKind::GlobalRace].contains(&fault.kind), "{fault}");
            fault.buffer.unwrap_or_default()
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn bugs_in_the_order_of_rows() {
    if !has_nvrtc() {
        return;
    }
    let routing = Routing::new([6, 33, 3], 3);
    let run = |place| {
        let outcome = routing.run(&changed(&route::variant(), place), &ptx::Options::default());
        found(outcome, &routing.sorted())
    };
    // Too many warps write.
    assert_eq!(run(["if (expert > count) return;", ""]), "starts");
    // Lanes beyond the last slot read.
    let guard = ["const bool is_own = slot < slots && expert_of", "const bool is_own = expert_of"];
    assert_eq!(run(guard), "experts");
    // Rows of an expert are those of the next.
    let next = ["count) < expert));", "count) <= expert));"];
    assert_eq!(run(next), "token of");
    for place in [
        // Slots of an expert in the same 32 slots have the same row.
        ["row + __popc(own & ((1u << lane) - 1))", "row"],
        // Rows of later slots overwrite those of earlier ones.
        ["row += __popc(own);", ""],
        // Two slots of a token with the same expert.
        ["(number == expert && other < slot)", "(number == expert && other <= slot)"],
        ["factors[at] = weights[slot];", "factors[at] = weights[place];"],
    ] {
        run(place);
    }
}

#[test]
fn bugs_in_sums() {
    if !has_nvrtc() {
        return;
    }
    let problem = Problem::new(SumShape::new(Float::F32, Float::F32, [3, 4, 520]), true, 3);
    let variant = problem.shape.plan().unwrap().variant;
    let run = |place| {
        let outcome = problem.run(Some(&changed(&variant, place)), &ptx::Options::default());
        found(outcome, &problem.expected())
    };
    // An index far beyond the buffer.
    assert_eq!(run(["if (row >= rows) continue;", ""]), "");
    for place in [
        ["term[i] * factors[row]", "term[i] * factors[j]"],
        ["for (u32 j = 0; j < terms; j++)", "for (u32 j = 1; j < terms; j++)"],
        // Another order of the terms, and terms that are not rounded.
        ["row_of[token * terms + j]", "row_of[token * terms + terms - 1 - j]"],
        ["sum[i] = sum[i] + term[i];", "sum[i] = fmaf(term[i], 1.0000001f, sum[i]);"],
    ] {
        assert_eq!(run(place), "values", "{}", place[0]);
    }
}
