//! The measured cases of experts: a layer of Qwen3-30B-A3B, with uniform routing.

use quant_kernels_cpu::{FloatFormat, KernelError, ScaleType};

use super::cases::{Buffer, Case, Fill, Product, region};
use crate::launch::Region;
use crate::layout::{Order, SECTION, WeightLayout};
use crate::linear::{
    EXPERT_BYTES, ExpertRegions, InputType, LinearExpertsArguments, LinearExpertsPlan, LinearExpertsShape,
    Output, PlanLimits, expert_descriptors,
};

const EXPERTS: usize = 128;
const EXPERTS_PER_TOKEN: usize = 8;
/// Gate or up, and down.
const MATRICES: [[usize; 2]; 2] = [[768, 2048], [2048, 768]];
const TOKENS: [usize; 3] = [1, 16, 512];

/// Returns the cases, planned for this device.
///
/// # Errors
/// When planning one of them fails.
pub(super) fn cases(device: &PlanLimits) -> Result<Vec<Case>, KernelError> {
    let mut cases = Vec::new();
    let int8 = InputType::Int8 { zero: false };
    for [n, k] in MATRICES {
        let integers = |bits, group, scale, zero_point, order| {
            WeightLayout::from_parts([n, k], bits, group, scale, zero_point, order, false)
        };
        let nv = WeightLayout::from_float_parts([n, k], FloatFormat::E2m1, 16, ScaleType::E4m3)?;
        for (name, layout, input) in [
            ("w4a16_g128", integers(4, 128, ScaleType::F16, Some(8), Order::Float)?, InputType::F16),
            ("wf4a16_g16_nv", nv, InputType::F16),
            ("w8a8_channel", integers(8, k, ScaleType::F32, Some(128), Order::Int8)?, int8),
            ("w4a8_g128_progressive", integers(4, 128, ScaleType::Progressive, None, Order::Int8)?, int8),
        ] {
            for tokens in TOKENS {
                cases.push(case(name, layout, input, tokens, device)?);
            }
        }
    }
    Ok(cases)
}

/// The first row of each expert with the number of rows, and the token of each row, if every token is routed to random
/// experts.
fn routing(tokens: usize) -> [Vec<u32>; 2] {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut rows: Vec<Vec<u32>> = vec![Vec::new(); EXPERTS];
    for token in 0..tokens as u32 {
        let mut left = EXPERTS_PER_TOKEN;
        while left > 0 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let of = &mut rows[(state >> 32) as usize % EXPERTS];
            if of.last() != Some(&token) {
                of.push(token);
                left -= 1;
            }
        }
    }
    let mut starts = vec![0];
    for of in &rows {
        starts.push(starts[starts.len() - 1] + of.len() as u32);
    }
    [starts, rows.concat()]
}

/// The descriptors of experts whose weights follow one another from an address.
///
/// # Errors
/// When the address is misaligned.
pub(super) fn descriptors(layout: &WeightLayout, experts: usize, at: u64) -> Result<Vec<u8>, KernelError> {
    let weight = |e: usize| region(at + (e * layout.bytes()) as u64, layout.bytes());
    let all = (0..experts).map(|e| ExpertRegions { weight: weight(e), bias: Region::NONE });
    expert_descriptors(layout, &all.collect::<Vec<_>>())
}

fn case(
    name: &str,
    layout: WeightLayout,
    input: InputType,
    tokens: usize,
    device: &PlanLimits,
) -> Result<Case, KernelError> {
    let (n, k) = (layout.n(), layout.k());
    debug_assert!(layout.bytes().is_multiple_of(SECTION), "matrices follow one another");
    let rows = tokens * EXPERTS_PER_TOKEN;
    // Gate and up read the rows of tokens; down reads the results of gate and up, which have the order of rows.
    let gathers = n < k;
    let x_rows = if gathers { tokens } else { rows };
    let shape = LinearExpertsShape { experts: EXPERTS, tokens: x_rows, rows, gate: None };
    let plan = LinearExpertsPlan::new(&layout, input, Output::F16, &shape, device)?;
    let [starts, token_of] = routing(tokens);
    let touched = starts.windows(2).filter(|pair| pair[0] < pair[1]).count();
    plan.check_routing(&starts, gathers.then_some(&token_of))?;
    let is_float = input == InputType::F16;
    let x = x_rows * k * if is_float { 2 } else { 1 };
    let buffer = |bytes, fill, turns| Buffer { bytes, fill, turns };
    let buffers = vec![
        buffer(EXPERTS * layout.bytes(), Fill::Random, true),
        buffer(EXPERTS * EXPERT_BYTES, Fill::Descriptors(layout), true),
        buffer(4 * starts.len(), Fill::Numbers(starts), false),
        buffer(
            if gathers { 4 * rows } else { 0 },
            Fill::Numbers(if gathers { token_of } else { Vec::new() }),
            false,
        ),
        buffer(if gathers { 0 } else { 4 * rows }, Fill::Words(0x3c00_0000), false),
        buffer(x, if is_float { Fill::Floats } else { Fill::Random }, false),
        buffer(if is_float { 0 } else { x_rows * 4 }, Fill::Words(0x3c00_0000), false),
        buffer(rows * n * 2, Fill::Zeros, false),
        buffer(plan.work.workspace_bytes, Fill::Zeros, false),
        buffer(plan.work.ticket_bytes, Fill::Zeros, false),
    ];
    let sizes: Vec<usize> = buffers.iter().map(|buffer| buffer.bytes).collect();
    Ok(Case {
        name: format!("experts_{name}"),
        shape: format!("{EXPERTS} x {n} x {k}"),
        tokens,
        variant: plan.work.variant.compiled(),
        launch: plan.work.launch,
        bytes: touched * layout.bytes() + sizes[1..8].iter().sum::<usize>(),
        operations: 2.0 * rows as f64 * n as f64 * k as f64,
        product: if is_float { Product::F16 } else { Product::Int8 },
        buffers,
        arguments: Box::new(move |at| {
            let there = |i: usize| if sizes[i] == 0 { Region::NONE } else { region(at[i], sizes[i]) };
            let arguments = LinearExpertsArguments {
                experts: there(1),
                starts: there(2),
                token_of: there(3),
                factors: there(4),
                x: there(5),
                x_stride: k,
                x_scales: there(6),
                x_zero: 0,
                out: there(7),
                out_stride: n,
                workspace: there(8),
                tickets: there(9),
            };
            plan.arguments(&arguments).map(|arguments| arguments.to_vec())
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::GpuArchitecture;

    #[test]
    fn only_the_experts_that_are_used_count() {
        let all = cases(&PlanLimits::of(GpuArchitecture::Sm90)).unwrap();
        assert_eq!(all.len(), MATRICES.len() * 4 * TOKENS.len());
        for case in &all {
            let [starts, token_of] = routing(case.tokens);
            assert_eq!((starts.len(), token_of.len()), (EXPERTS + 1, 8 * case.tokens));
            let touched = starts.windows(2).filter(|pair| pair[0] < pair[1]).count();
            let weights = case.buffers[0].bytes / EXPERTS * touched;
            assert!(
                case.bytes > weights && touched >= 8 && (touched == 8) == (case.tokens == 1),
                "{touched}"
            );
            let at: Vec<u64> = (1..=case.buffers.len() as u64).map(|i| i << 32).collect();
            assert_eq!(case.arguments(&at).unwrap().len(), 21);
        }
        for expert in 0..EXPERTS {
            let [starts, token_of] = routing(512);
            let own = &token_of[starts[expert] as usize..starts[expert + 1] as usize];
            assert!(own.is_sorted_by(|a, b| a < b), "a token is routed to an expert twice");
        }
    }
}
