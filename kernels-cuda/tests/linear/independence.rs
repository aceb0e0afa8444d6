//! Results do not depend on the other rows, the number of rows, the shape of a block, or the order of blocks.

use quant_kernels_cpu::FloatFormat;
use quant_kernels_cuda::linear::{Chunks, InputType, KernelScheme, LinearPlan, LinearVariant, Output, Parts};

use crate::DEVICE;
use crate::cases::{Case, Kind};
use crate::problem::{Draw, Problem};
use quant_ptx_interpreter::{BlockOrder, Options, WarpOrder};

use crate::machine::{launch, launch_with, ready};

fn problems(m: usize) -> Vec<Problem> {
    let shape = [136, 2176];
    assert_eq!(Parts::of(shape), Parts { chunks: 4 });
    let case = |kind, group| Case::new(shape, 4, group, kind, true, 21);
    let float = |kind, group, activation, output| {
        Problem::float(case(kind, group), activation, output, m, Draw::Typical, 22)
    };
    vec![
        float(Kind::F16, 128, InputType::F16, Output::F32),
        float(Kind::Bf16, 32, InputType::Bf16, Output::F32),
        float(Kind::F32, 2176, InputType::F16, Output::F32),
        nvfp4(m, shape),
        Problem::int8(case(Kind::F16, 64), Output::F32, m, None, Draw::Typical, 22),
        Problem::int8(case(Kind::Progressive, 128), Output::F32, m, None, Draw::Typical, 22),
    ]
}

fn nvfp4(m: usize, shape: [usize; 2]) -> Problem {
    let case = Case::float(shape, FloatFormat::E2m1, 16, Kind::E4m3, 21);
    Problem::float(case, InputType::F16, Output::F32, m, Draw::Typical, 22)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn variant(problem: &Problem, m: usize) -> LinearVariant {
    let scheme = KernelScheme::new(&problem.layout, problem.activation, problem.output).unwrap();
    LinearVariant::choose(scheme, problem.case.shape, m, &DEVICE)
}

fn results(problem: &Problem, variant: LinearVariant) -> Vec<u32> {
    let plan = LinearPlan::of_variant(variant, &problem.layout, problem.m).unwrap();
    bits(&launch(problem, &plan))
}

#[test]
fn a_row_is_the_same_in_every_batch() {
    if !ready() {
        return;
    }
    let n = 136;
    for problem in problems(70) {
        let all = results(&problem, variant(&problem, 70));
        for tokens in [vec![3], vec![69, 3, 0, 11, 12], (2..19).collect(), (0..33).rev().collect()] {
            let some = problem.of_tokens(&tokens);
            let some = results(&some, variant(&some, tokens.len()));
            for (i, &token) in tokens.iter().enumerate() {
                let what = (token, tokens.len());
                assert_eq!(some[i * n..][..n], all[token * n..][..n], "token and batch {what:?}");
            }
        }
    }
}

#[test]
fn a_row_is_the_same_by_every_block() {
    if !ready() {
        return;
    }
    for problem in problems(20) {
        let expected = results(&problem, variant(&problem, 20));
        for m in [1, 9, 17, 33, 65] {
            let planned = variant(&problem, m);
            for chunks in [Chunks::Blocks, Chunks::Registers, Chunks::Shared] {
                for stages in [3, 5] {
                    let mut variant = planned;
                    (variant.chunks, variant.shape.stages) = (chunks, stages);
                    // The depth of the ring is varied for one number of tokens only.
                    if stages == 5 && m != 9 || variant.shared_bytes() > DEVICE.shared_of_block {
                        continue;
                    }
                    assert_eq!(results(&problem, variant), expected, "{}", variant.name());
                }
            }
        }
    }
}

#[test]
fn orders_of_blocks_and_warps_change_nothing() {
    if !ready() {
        return;
    }
    for problem in problems(11) {
        let plan = LinearPlan::of_variant(variant(&problem, 11), &problem.layout, 11).unwrap();
        assert!(plan.work.launch.grid[1] > 1);
        let expected = bits(&launch(&problem, &plan));
        for (block_order, warp_order) in [
            (BlockOrder::Reverse, WarpOrder::InOrder),
            (BlockOrder::Seeded(1), WarpOrder::Reverse),
            (BlockOrder::Seeded(2), WarpOrder::Seeded(3)),
            (BlockOrder::Forward, WarpOrder::RoundRobin),
        ] {
            let options = Options { block_order, warp_order, ..Options::default() };
            let outcome = launch_with(&problem, &plan, &options);
            assert_eq!(bits(&outcome.values), expected, "{options:?}");
        }
    }
}
