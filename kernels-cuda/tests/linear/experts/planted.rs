//! Bugs planted into the search for experts and tokens. The interpreter or a comparison must detect each of them.

use quant_kernels_cuda::linear::{InputType, Output, SOURCE};
use quant_ptx_interpreter::{Error, Fault, FaultKind, Options, WarpOrder};

use super::layer::{Layer, NO_TOKEN};
use super::{integers, product};
use crate::cases::Kind;
use crate::machine::{compiled, ready};
use crate::planted::changed;

/// Several chunks, experts with several tiles and without rows, a row without a token, and blocks without a tile.
fn layer(input: InputType) -> Layer {
    let (group, kind) =
        if matches!(input, InputType::Int8 { .. }) { (0, Kind::F32) } else { (128, Kind::F16) };
    let scheme = (integers(4, true), group, kind, input);
    let mut layer = Layer::new(&[3, 0, 18, 9], 3, |e| product(scheme, [40, 2176], Output::F32, 6, e));
    layer.token_of.as_mut().unwrap()[7] = NO_TOKEN;
    layer
}

fn outcome(layer: &Layer, places: &[[&str; 2]]) -> Result<Vec<f32>, Box<Fault>> {
    let plan = layer.plan();
    assert!(
        plan.work.chunks > 1 && plan.work.launch.grid[1] == plan.work.chunks,
        "{}",
        plan.work.variant.name()
    );
    let module = compiled(&plan.work.variant, Some(changed(&SOURCE, places)));
    let options =
        Options { warp_order: WarpOrder::RoundRobin, max_instructions: 6_000_000, ..Options::default() };
    match layer.run(&plan, &module, &options) {
        Err(Error::Fault(fault)) => Err(fault),
        Err(other) => panic!("{other}"),
        Ok(outcome) => Ok(outcome.values),
    }
}

#[track_caller]
fn is_found(layer: &Layer, place: [&str; 2], kinds: &[FaultKind], buffer: &str) {
    let fault = outcome(layer, &[place]).expect_err("the planted bug was not detected");
    let is_it = kinds.contains(&fault.kind) && fault.buffer.as_deref().unwrap_or_default() == buffer;
    assert!(is_it, "unexpected fault, not {kinds:?} in {buffer:?}: {fault}");
}

const FLOAT: InputType = InputType::F16;
const INT8: InputType = InputType::Int8 { zero: false };

#[test]
fn without_a_bug_nothing_is_found() {
    if !ready() {
        return;
    }
    for input in [FLOAT, INT8] {
        let layer = layer(input);
        assert_eq!(outcome(&layer, &[]).map(|values| values.len()), Ok(30 * 40));
    }
}

#[test]
fn blocks_without_a_tile_that_go_on() {
    if !ready() {
        return;
    }
    let on = ["if (owner == 32) return false;", ""];
    let mut layer = layer(FLOAT);
    layer.max_rows = 60;
    assert!(outcome(&layer, &[]).is_ok());
    is_found(&layer, on, &[FaultKind::OutOfBounds], "starts");
}

#[test]
fn a_missing_guard_of_the_last_expert() {
    if !ready() {
        return;
    }
    let beyond = ["end = min(begin + each, experts);", "end = begin + each;"];
    is_found(&layer(FLOAT), beyond, &[FaultKind::OutOfBounds], "starts");
}

#[test]
fn a_missing_guard_of_rows() {
    if !ready() {
        return;
    }
    let without = [
        "i * X_ROWS < to.tokens ? token_of(p, row + i * X_ROWS) : NO_TOKEN",
        "token_of(p, row + i * X_ROWS)",
    ];
    is_found(&layer(FLOAT), without, &[FaultKind::OutOfBounds], "token of");
}

#[test]
fn a_missing_guard_of_tokens() {
    if !ready() {
        return;
    }
    let without = ["return token < p.tokens ? token : NO_TOKEN;", "return token;"];
    let mut layer = layer(FLOAT);
    layer.token_of.as_mut().unwrap()[7] = 6;
    assert!(outcome(&layer, &[]).is_ok());
    is_found(&layer, without, &[FaultKind::OutOfBounds], "x");
    let scales =
        ["scale = from == NO_TOKEN ? 0.0f : p.x_scales[from];", "scale = p.x_scales[min(from, p.tokens)];"];
    is_found(&self::layer(INT8), scales, &[FaultKind::OutOfBounds], "x scales");
}

#[test]
fn starts_that_are_not_reduced() {
    if !ready() {
        return;
    }
    let mut layer = layer(FLOAT);
    layer.max_rows = 25;
    layer.token_of.as_mut().unwrap().truncate(25);
    assert!(outcome(&layer, &[]).is_ok());
    let without = [
        "to.rows = max(min(starts[expert + 1], rows), to.first)",
        "to.rows = max(starts[expert + 1], to.first)",
    ];
    is_found(&layer, without, &[FaultKind::OutOfBounds], "token of");
}

#[test]
fn results_in_the_rows_of_another_expert() {
    if !ready() {
        return;
    }
    let same = ["                to += p.first;\n", ""];
    is_found(&layer(FLOAT), same, &[FaultKind::GlobalRace], "out");
}

/// Wrong values, which only a comparison detects.
#[test]
fn wrong_experts_tiles_and_tokens() {
    if !ready() {
        return;
    }
    let layer = layer(FLOAT);
    let expected = outcome(&layer, &[]).unwrap();
    for place in [
        // The weights of a different expert.
        [
            "const Expert &expert = experts[MATRICES * place.expert],",
            "const Expert &expert = experts[place.expert ^ 1],",
        ],
        // The first token for all rows.
        ["offset = (u64)from.token_of[i] *", "offset = (u64)(from.token_of[i] & 0) *"],
    ] {
        let got = outcome(&layer, &[place]).unwrap();
        assert!(got != expected, "{}", place[1]);
    }
}

/// With more experts than lanes, a lane searches several.
#[test]
fn a_search_that_counts_no_tiles() {
    if !ready() {
        return;
    }
    let scheme = (integers(4, true), 128, Kind::F16, FLOAT);
    let layer = Layer::new(&[1; 40], 3, |e| product(scheme, [24, 2176], Output::F32, 6, e));
    assert!(outcome(&layer, &[]).is_ok());
    is_found(&layer, ["        to.tile += tiles;\n", ""], &[FaultKind::OutOfBounds], "starts");
}
