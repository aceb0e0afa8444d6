//! Every scheme with ragged shapes, and with values at the limits of their ranges.

use quant_kernels_cuda::compile::GpuArchitecture;
use quant_kernels_cuda::linear::{InputType, KernelScheme, LinearPlan, LinearVariant, Output, PlanLimits};

use crate::DEVICE;
use crate::cases::{Case, Kind};
use crate::machine::{launch, ready};
use crate::problem::{Draw, Problem};

fn shapes(group: Option<usize>) -> [[usize; 2]; 3] {
    match group {
        Some(32) => [[128, 128], [37, 160], [150, 1056]],
        // The last one has two chunks, which are combined in the workspace.
        Some(64) => [[128, 256], [33, 192], [130, 2112]],
        Some(_) => [[128, 256], [40, 384], [200, 1152]],
        None => [[128, 128], [17, 104], [130, 1040]],
    }
}

const OUTPUTS: [Output; 3] = [Output::F16, Output::Bf16, Output::F32];
const KINDS: [Kind; 3] = [Kind::F16, Kind::Bf16, Kind::F32];
/// Numbers of tokens that use each block shape, without filling it completely.
const TOKENS: [[usize; 3]; 3] = [[1, 33, 16], [8, 17, 70], [64, 5, 25]];

/// Runs a problem as planned; returns the error relative to the sum of magnitudes.
fn run(problem: &Problem) -> f64 {
    let plan =
        LinearPlan::new(&problem.layout, problem.activation, problem.output, problem.m, &DEVICE).unwrap();
    problem.check(&launch(problem, &plan))
}

fn floats(activation: InputType, bits: u8) {
    let mut turn = 0;
    let mut worst = 0.0_f64;
    for zeros in [false, true] {
        for group in [Some(32), Some(64), Some(128), None] {
            for (i, [n, k]) in shapes(group).into_iter().enumerate() {
                let m = TOKENS[turn % 3][i];
                let case = Case::new(
                    [n, k],
                    bits,
                    group.unwrap_or(k),
                    KINDS[turn % 3],
                    zeros,
                    (turn * 3 + i) as u64,
                );
                let draw = if i == 1 { Draw::Shifted } else { Draw::Typical };
                // Keeps the number of variants small.
                let output = OUTPUTS[(turn / 3 + turn) % 3];
                let problem = Problem::float(case, activation, output, m, draw, (turn * 3 + i) as u64);
                worst = worst.max(run(&problem));
            }
            turn += 1;
        }
    }
    println!("{activation:?}, {bits} bits: largest error {worst:e} of the sum of magnitudes");
    // With sums in the order of k, errors are this small; the bounds of `check` are much larger.
    assert!(worst < 1e-4, "{worst:e}");
}

#[test]
fn w4a16_f16() {
    if !ready() {
        return;
    }
    floats(InputType::F16, 4);
}

#[test]
fn w4a16_bf16() {
    if !ready() {
        return;
    }
    floats(InputType::Bf16, 4);
}

#[test]
fn w8a16_f16() {
    if !ready() {
        return;
    }
    floats(InputType::F16, 8);
}

#[test]
fn w8a16_bf16() {
    if !ready() {
        return;
    }
    floats(InputType::Bf16, 8);
}

fn integers(bits: u8, kinds: &[Kind], groups: &[Option<usize>]) {
    let mut turn = usize::from(bits);
    for x_zero in [None, Some(-7)] {
        for zeros in [false, true] {
            for &group in groups {
                for (i, [n, k]) in shapes(group).into_iter().enumerate() {
                    let m = TOKENS[turn % 3][i];
                    let seed = (turn * 3 + i) as u64;
                    let case =
                        Case::new([n, k], bits, group.unwrap_or(k), kinds[turn % kinds.len()], zeros, seed);
                    let draw = [Draw::Typical, Draw::Extreme, Draw::Shifted][i];
                    let output = OUTPUTS[(turn / 3 + turn) % 3];
                    run(&Problem::int8(case, output, m, x_zero, draw, seed));
                }
                turn += 1;
            }
        }
    }
}

const GROUPS: [Option<usize>; 4] = [Some(32), Some(64), Some(128), None];

#[test]
fn w8a8() {
    if !ready() {
        return;
    }
    integers(8, &KINDS, &GROUPS);
}

#[test]
fn w4a8() {
    if !ready() {
        return;
    }
    integers(4, &KINDS, &GROUPS);
}

#[test]
fn w4a8_progressive() {
    if !ready() {
        return;
    }
    integers(4, &[Kind::Progressive], &GROUPS[..3]);
}

#[test]
fn codes_of_2_3_and_5_bits() {
    if !ready() {
        return;
    }
    for (bits, seed) in [(2, 1), (3, 2), (5, 3)] {
        let case = |zeros| Case::new([40, 256], bits, 128, Kind::F16, zeros, seed);
        run(&Problem::float(case(true), InputType::F16, Output::F16, 5, Draw::Typical, seed));
        run(&Problem::float(case(false), InputType::F16, Output::F16, 5, Draw::Typical, seed));
        run(&Problem::int8(case(true), Output::F16, 5, None, Draw::Typical, seed));
        run(&Problem::int8(case(false), Output::F16, 5, None, Draw::Typical, seed));
    }
}

/// Each tile repeats the parameters of a group that spans several tiles.
#[test]
fn groups_wider_than_a_tile() {
    if !ready() {
        return;
    }
    let case = |kind| Case::new([40, 768], 4, 256, kind, true, 9);
    run(&Problem::float(case(Kind::F16), InputType::Bf16, Output::Bf16, 9, Draw::Typical, 9));
    run(&Problem::int8(case(Kind::Progressive), Output::F16, 9, None, Draw::Typical, 9));
    run(&Problem::int8(case(Kind::Progressive), Output::F16, 9, Some(5), Draw::Typical, 9));
}

#[test]
fn many_tokens() {
    if !ready() {
        return;
    }
    let case = |bits, group, kind| Case::new([150, 136], bits, group, kind, true, 11);
    let float = Problem::float(case(4, 136, Kind::F16), InputType::F16, Output::F16, 1200, Draw::Typical, 11);
    let whole = Problem::int8(case(8, 136, Kind::F32), Output::Bf16, 2100, None, Draw::Typical, 12);
    for problem in [float, whole] {
        let plan =
            LinearPlan::new(&problem.layout, problem.activation, problem.output, problem.m, &DEVICE).unwrap();
        assert!(problem.m > 8 * plan.work.variant.shape.tokens(), "{:?}", plan.work.variant.shape);
        problem.check(&launch(&problem, &plan));
    }
}

/// The deepest ring wraps around in every chunk.
#[test]
fn a_deep_ring() {
    if !ready() {
        return;
    }
    let device = PlanLimits::of(GpuArchitecture::Sm90);
    let case = |kind| Case::new([16, 7168], 4, 128, kind, true, 9);
    for problem in [
        Problem::float(case(Kind::F16), InputType::F16, Output::F16, 3, Draw::Typical, 9),
        Problem::float(case(Kind::F16), InputType::Bf16, Output::F16, 40, Draw::Typical, 9),
        Problem::int8(case(Kind::Progressive), Output::F16, 11, None, Draw::Typical, 9),
    ] {
        let scheme = KernelScheme::new(&problem.layout, problem.activation, problem.output).unwrap();
        let mut variant = LinearVariant::choose(scheme, problem.case.shape, problem.m, &device);
        variant.shape.stages = 6;
        let plan = LinearPlan::of_variant(variant, &problem.layout, problem.m).unwrap();
        assert!(problem.layout.tiles().div_ceil(plan.work.chunks as usize) > 6, "{}", variant.name());
        problem.check(&launch(&problem, &plan));
    }
}

#[test]
fn extremes() {
    if !ready() {
        return;
    }
    for (high, x_zero) in [(true, None), (false, None), (true, Some(127)), (false, Some(-128))] {
        for bits in [4, 8] {
            for (group, zeros) in [(128, true), (128, false), (256, true), (256, false)] {
                let mut case = Case::new([20, 256], bits, group, Kind::F32, zeros, 4);
                let max = u8::MAX >> (8 - bits);
                case.codes.fill(if high { max } else { 0 });
                if let Some(zeros) = &mut case.zeros {
                    zeros.fill(if high { 0 } else { max });
                }
                let scales = [0.0, f32::from_bits(1), -f32::from_bits(77), 1e30, -1e-20];
                for (i, scale) in case.scales.iter_mut().enumerate() {
                    *scale = scales[i % scales.len()];
                }
                run(&Problem::int8(case, Output::F32, 6, x_zero, Draw::Extreme, 4));
            }
        }
    }
    for activation in [InputType::F16, InputType::Bf16] {
        for bits in [4, 8] {
            for high in [true, false] {
                let mut case = Case::new([20, 256], bits, 64, Kind::F32, true, 5);
                let max = u8::MAX >> (8 - bits);
                case.codes.fill(if high { max } else { 0 });
                if let Some(zeros) = &mut case.zeros {
                    zeros.fill(if high { 0 } else { max });
                }
                let scales = [0.0, f32::from_bits(1), -f32::from_bits(77), 1e20, -1e-20];
                for (i, scale) in case.scales.iter_mut().enumerate() {
                    *scale = scales[i % scales.len()];
                }
                run(&Problem::float(case, activation, Output::F32, 6, Draw::Extreme, 5));
            }
        }
    }
}
