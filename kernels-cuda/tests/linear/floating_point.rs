//! FP4 and FP8 weights with float activations: every code, every kind of scales, ragged shapes, planted bugs, and cost.

use quant_kernels_cpu::{FloatFormat, KernelError, reference};
use quant_kernels_cuda::compile::Source;
use quant_kernels_cuda::layout::{Order, WeightLayout};
use quant_kernels_cuda::linear::{InputType, LinearPlan, Output, SOURCE};
use quant_ptx_interpreter::Options;

use crate::DEVICE;
use crate::cases::{Case, Kind};
use crate::machine::{compiled, launch, launch_with, ready, run};
use crate::packing::{outcome, pack, sections};
use crate::planted::changed;
use crate::problem::{Draw, Problem};

const E2M1: FloatFormat = FloatFormat::E2m1;
const E4M3: FloatFormat = FloatFormat::E4m3;

/// The schemes of common formats, and other combinations.
const SCHEMES: [(FloatFormat, Option<usize>, Kind); 8] = [
    (E2M1, Some(16), Kind::E4m3),
    (E2M1, Some(32), Kind::E8m0),
    (E4M3, Some(32), Kind::E8m0),
    (E4M3, Some(128), Kind::Bf16),
    (E4M3, None, Kind::F32),
    (E2M1, Some(64), Kind::E4m3),
    (E4M3, Some(16), Kind::F16),
    (E2M1, None, Kind::E8m0),
];

fn plan(problem: &Problem) -> LinearPlan {
    LinearPlan::new(&problem.layout, problem.activation, problem.output, problem.m, &DEVICE).unwrap()
}

/// The exact value of a weight in the kernel.
fn weight(case: &Case, row: usize, i: usize) -> f32 {
    let k = case.shape[1];
    let number = case.float.unwrap().value(case.codes[row * k + i]);
    let group = row * (k / case.group) + i / case.group;
    match case.kind {
        Kind::E4m3 => E4M3.value(case.groups[group]) / 256.0 * number * (256.0 / case.scales[0]),
        _ => number * case.scales[group],
    }
}

fn wrong_weights(problem: &Problem, values: &[f32]) -> usize {
    let [n, k] = problem.case.shape;
    let is_wrong = |&(i, &value): &(usize, &f32)| value != weight(&problem.case, i % n, i / n);
    let wrong = values.iter().enumerate().filter(is_wrong).count();
    assert_eq!(values.len(), n * k);
    wrong
}

/// Each token is a single feature, so the results are the weights.
#[test]
fn every_code_is_its_number() {
    if !ready() {
        return;
    }
    for (turn, (format, group, kind)) in SCHEMES.into_iter().enumerate() {
        let case = Case::float([48, 256], format, group.unwrap_or(256), kind, 60 + turn as u64);
        // Every value of the format at every position of a lane's words, including both zeros.
        let numbers = (0..=u8::MAX).filter(|&code| format.is_number(code));
        assert!(numbers.into_iter().all(|code| case.codes.contains(&code)));
        let mut dequantized = vec![0.0; 48 * 256];
        reference::dequantize_rows(&case.view(), 0..48, &mut dequantized);
        for (i, &expected) in dequantized.iter().enumerate() {
            // With E4M3 scales, the reference multiplies in a different order, with up to two different roundings.
            let ours = weight(&case, i / 256, i % 256);
            let near = if kind == Kind::E4m3 { 2.0_f32.powi(-22) * expected.abs() } else { 0.0 };
            assert!((ours - expected).abs() <= near, "{ours} for {expected}");
        }
        for activation in [InputType::F16, InputType::Bf16] {
            let problem = Problem::one_hot(case.clone(), activation);
            let values = launch(&problem, &plan(&problem));
            assert_eq!(wrong_weights(&problem, &values), 0, "{format:?} {group:?} {kind:?} {activation:?}");
        }
    }
}

#[test]
fn ragged_shapes() {
    if !ready() {
        return;
    }
    let mut worst = 0.0_f64;
    for (turn, (format, group, kind)) in SCHEMES.into_iter().enumerate() {
        let shapes = match group {
            Some(16) => [[128, 128], [37, 176], [150, 1040]],
            Some(32) => [[128, 128], [37, 160], [150, 1056]],
            Some(64) => [[128, 256], [33, 192], [130, 2112]],
            Some(_) => [[128, 256], [40, 384], [200, 1152]],
            None => [[128, 128], [17, 104], [130, 1040]],
        };
        for (i, [n, k]) in shapes.into_iter().enumerate() {
            let m = [[1, 33, 16], [8, 17, 70], [64, 5, 25]][turn % 3][i];
            let activation = [InputType::F16, InputType::Bf16][(turn + i) % 2];
            let output = [Output::F32, Output::F16, Output::Bf16][turn % 3];
            let seed = 100 + (3 * turn + i) as u64;
            let case = Case::float([n, k], format, group.unwrap_or(k), kind, seed);
            let draw = if i == 1 { Draw::Shifted } else { Draw::Typical };
            let problem = Problem::float(case, activation, output, m, draw, seed);
            worst = worst.max(problem.check(&launch(&problem, &plan(&problem))));
        }
    }
    println!("largest error {worst:e} of the sum of magnitudes");
    assert!(worst < 1e-5, "{worst:e}");
}

#[test]
fn extremes() {
    if !ready() {
        return;
    }
    for activation in [InputType::F16, InputType::Bf16] {
        let mut mx = Case::float([20, 256], E2M1, 32, Kind::E8m0, 5);
        let powers = [-127, -126, -60, 0, 60, 100];
        for (i, scale) in mx.scales.iter_mut().enumerate() {
            // 2⁻¹²⁷ is subnormal, and the product of the two is exact.
            let power = powers[i / 8 % powers.len()];
            *scale = 2.0_f32.powi(power.max(-120)) * 2.0_f32.powi(power.min(-120) + 120);
        }
        mx.codes[..64].fill(8);
        let problem = Problem::one_hot(mx, activation);
        assert_eq!(wrong_weights(&problem, &launch(&problem, &plan(&problem))), 0);
        let mut nv = Case::float([20, 256], E2M1, 16, Kind::E4m3, 6);
        nv.groups = (0..20 * 16).map(|i| [0, 1, 7, 8, 0x7e][i % 5]).collect();
        nv.codes.iter_mut().enumerate().for_each(|(i, code)| *code = [7, 15][i / 16 % 2]);
        let problem = Problem::float(nv, activation, Output::F32, 6, Draw::Extreme, 5);
        problem.check(&launch(&problem, &plan(&problem)));
        let mut fp8 = Case::float([20, 256], E4M3, 256, Kind::F32, 7);
        fp8.codes.iter_mut().enumerate().for_each(|(i, code)| *code = [0x7e, 0xfe, 1, 0x81][i % 4]);
        let problem = Problem::float(fp8, activation, Output::F32, 6, Draw::Extreme, 5);
        problem.check(&launch(&problem, &plan(&problem)));
    }
}

/// Only wrong values reveal these bugs.
#[test]
fn planted() {
    if !ready() {
        return;
    }
    let nv = |activation| Problem::one_hot(Case::float([16, 128], E2M1, 16, Kind::E4m3, 71), activation);
    let mut mx = Case::float([16, 128], E2M1, 32, Kind::E8m0, 72);
    mx.scales[0] = f32::from_bits(1 << 22);
    let mx = |activation| Problem::one_hot(mx.clone(), activation);
    let fp8 = |activation| Problem::one_hot(Case::float([16, 128], E4M3, 128, Kind::F32, 73), activation);
    let found = |problem: &Problem, source: Option<&'static Source>| {
        let plan = plan(problem);
        let module = compiled(&plan.work.variant, source);
        wrong_weights(problem, &run(problem, &plan, &module, &Options::default()).unwrap().values)
    };
    let (f16, bf16) = (InputType::F16, InputType::Bf16);
    for (problem, from, to) in [
        (nv(f16), "    a[0] = word & 0x8e008e00;", "    a[0] = word & 0x0e000e00;"),
        (nv(f16), "a[1] = rotate_right<3>(word) & 0x8e008e00;", "a[1] = (word >> 3) & 0x8e008e00;"),
        (
            nv(f16),
            "rotate_right<26>(word), rotate_right<1>(word) & SIGNS",
            "rotate_right<26>(word), word & SIGNS",
        ),
        (nv(f16), "(rotate_right<29>(word), rotate_right<2>(word) & SIGNS)", "(rotate_right<29>(word), 0)"),
        (nv(bf16), "(by_3, word & SIGNS)", "(by_3, by_3 & SIGNS)"),
        (nv(bf16), "(rotate_right<6>(word), by_3 & SIGNS)", "(rotate_right<5>(word), by_3 & SIGNS)"),
        (nv(bf16), "<0x7e80>(a[i])", "<0x7e00>(a[i])"),
        (nv(f16), "byte << 7)", "byte << 8)"),
        (nv(f16), "GROUP == 0 || SCALE == E4M3) value", "GROUP == 0) value"),
        (nv(f16), "CODES == E2M1 ? 16384.0f", "CODES == E2M1 ? 8192.0f"),
        (nv(f16), "words >> 8 * half & 255);\n            else", "words & 255);\n            else"),
        (mx(f16), "max(byte << 23, 1u << 22)", "byte << 23"),
        (fp8(f16), "    first = word & 0xbf80bf80;", "    first = word & 0x3f803f80;"),
        (
            fp8(f16),
            "rotate_right<25>(word), rotate_right<31>(word)",
            "rotate_right<25>(word), rotate_right<30>(word)",
        ),
        (
            fp8(bf16),
            "(rotate_right<28>(word), rotate_right<31>(word)",
            "(rotate_right<27>(word), rotate_right<31>(word)",
        ),
        (fp8(bf16), "first = times_bf16_pair<0x7b80>(", "first = ("),
        (fp8(f16), ": 256.0f;", ": 128.0f;"),
    ] {
        assert_eq!(found(&problem, None), 0);
        assert!(found(&problem, Some(changed(&SOURCE, &[[from, to]]))) > 0, "not found: {to}");
    }
}

#[test]
fn packing_on_the_device() {
    if !ready() {
        return;
    }
    for (turn, (format, group, kind)) in SCHEMES.into_iter().enumerate() {
        let k = if group == Some(128) { 384 } else { 320 };
        let case = Case::float([37, k], format, group.unwrap_or(k), kind, 80 + turn as u64);
        assert_eq!(outcome(&case, Order::Float, &[]), Ok(true), "{format:?} {group:?} {kind:?}");
    }
    let nv = Case::float([37, 320], E2M1, 16, Kind::E4m3, 90);
    let mx = Case::float([37, 320], E2M1, 32, Kind::E8m0, 91);
    for (case, from, to) in [
        (&nv, "? 9 : field == 1", "? 8 : field == 1"),
        (&nv, "field == 2 ? 16 : 17;", "field == 2 ? 17 : 16;"),
        (&nv, "(n + 15) / 16 * 16 + row] = there ? global", "(n + 15) / 16 * 16 + row] = there ? factor"),
        (&mx, "block[place] = (u8)(bits >> 23);", "block[place] = (u8)(bits >> 24);"),
    ] {
        assert_eq!(outcome(case, Order::Float, &[[from, to]]), Ok(false), "not found: {to}");
    }
}

#[test]
fn non_finite_codes_and_scales_are_refused() {
    let nv = Case::float([5, 128], E2M1, 16, Kind::E4m3, 3);
    let fp8 = Case::float([5, 128], E4M3, 128, Kind::F32, 3);
    let mx = Case::float([5, 128], E2M1, 32, Kind::E8m0, 3);
    let with = |case: &Case, change: &dyn Fn(&mut Case)| {
        let mut case = case.clone();
        change(&mut case);
        case
    };
    let refused = |case: &Case, change: &dyn Fn(&mut Case), why: &'static str| {
        let layout = WeightLayout::of(&case.view(), Order::Float, false).unwrap();
        let mut out = vec![0; layout.bytes()];
        layout.pack(&case.view(), &mut out).unwrap();
        let bad = with(case, change);
        let got =
            WeightLayout::of(&bad.view(), Order::Float, false).and_then(|l| l.pack(&bad.view(), &mut out));
        assert_eq!(got, Err(KernelError::Scheme(why)));
        if ready() {
            assert!(pack(&bad, &layout).1, "{why}");
            let (made, fault) = pack(case, &layout);
            layout.pack(&case.view(), &mut out).unwrap();
            assert!(!fault);
            for (made, (at, bytes)) in made.iter().zip(sections(&layout)) {
                assert!(made == &out[at..at + bytes]);
            }
        }
    };
    for code in [0x7f, 0xff] {
        refused(&fp8, &|case| case.codes[77] = code, "a code is not a number in its format");
    }
    refused(&nv, &|case| case.codes[9] = 16, "a code is not a number in its format");
    for scale in [0x7f, 0x80, 0xff] {
        refused(&nv, &|case| case.groups[3] = scale, "a group scale is negative or NaN");
    }
    for global in [0.0, -1.0, f32::INFINITY, f32::NAN] {
        let why = "a global scale is not positive and finite, or so small that 256 divided by it overflows";
        refused(&nv, &|case| case.scales[0] = global, why);
    }
    // Other scales lead to a different layout; packing them with a layout for E8M0 is an error.
    let powers = WeightLayout::of(&mx.view(), Order::Float, false).unwrap();
    for scale in [0.3, 0.0, -0.5, f32::INFINITY, f32::NAN] {
        let bad = with(&mx, &|case| case.scales[3] = scale);
        assert!(powers.pack(&bad.view(), &mut vec![0; powers.bytes()]).is_err());
        assert!(!ready() || pack(&bad, &powers).1, "{scale}");
    }
    let view = nv.view();
    assert!(matches!(WeightLayout::of(&view, Order::Int8, false), Err(KernelError::Scheme(_))));
    assert!(matches!(WeightLayout::of(&view, Order::Float, true), Err(KernelError::Scheme(_))));
}

#[test]
fn what_they_cost() {
    if !ready() {
        return;
    }
    // One chunk, so that no sums pass through the workspace.
    let (n, k) = (256, 896);
    for (format, group, kind, activation, max) in [
        (E2M1, 16, Kind::E4m3, InputType::F16, 11),
        (E2M1, 32, Kind::E8m0, InputType::F16, 11),
        (E2M1, 16, Kind::E4m3, InputType::Bf16, 17),
        (E4M3, 896, Kind::F32, InputType::F16, 10),
        (E4M3, 896, Kind::F32, InputType::Bf16, 18),
    ] {
        for m in [1, 16, 64] {
            let case = Case::float([n, k], format, group, kind, 41);
            let problem = Problem::float(case, activation, Output::F16, m, Draw::Typical, 43);
            let outcome = launch_with(&problem, &plan(&problem), &Options::default());
            problem.check(&outcome.values);
            let counters = outcome.report.counters;
            let words = (n * k / 8 / 32) as u64;
            if m == 1 {
                // `and` is also used once for offsets in the ring, and once for the scales of groups.
                let taken =
                    ["lop3.", "shf.", "fma.rn.bf16x2"].iter().map(|o| counters.opcode(o)).sum::<u64>();
                let ands = counters.opcode("and.b32");
                println!("{format:?} {kind:?} {activation:?}: {taken} and {ands} for {words} words");
                assert!(taken <= max * words && taken + ands >= max * words, "{:?}", counters.by_opcode);
            }
            let (reads, writes) = (counters.shared_reads, counters.shared_writes);
            assert_eq!((reads.taken, writes.taken), (reads.ideal, writes.ideal), "{format:?}, {m} tokens");
            let scales = match kind {
                Kind::F32 => 4 * n,
                _ => n * k / group,
            };
            let rows = if kind == Kind::E4m3 { 4 * n } else { 0 };
            let weights = n * k * usize::from(format.bits()) / 8 + scales + rows;
            let floor = (weights + 2 * m * (n + k)) as f64;
            let moved: u64 = counters
                .buffers
                .values()
                .map(|t| 32 * (t.read.unique_sectors + t.written.unique_sectors))
                .sum();
            let ratio = moved as f64 / floor;
            println!("{format:?} {kind:?}, {m} tokens: {ratio:.4} times the floor");
            assert!(ratio <= 1.03, "{format:?} {kind:?}, {m} tokens: {ratio}");
        }
    }
}
