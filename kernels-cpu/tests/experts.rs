//! Running the experts of a layer in one call gives results that are bit-identical to a loop of separate products.

mod common;

use common::{Backwards, Stream, Threads};
use half::{bf16, f16};
use quant_kernels_cpu::experts::{
    Expert, ExpertGate, ExpertRows, Experts, ExpertsPlan, ExpertsWorkspace, NO_EXPERT, Routing,
};
use quant_kernels_cpu::{
    Bf16Parts, Element, FloatFormat, Isa, IsaToken, KernelError, PackedLinear, Parallel, Serial, WeightView,
    reference,
};

const HIDDEN: usize = 96;
const INNER: usize = 80;
/// For successive experts: bits, group size of gate and up, group size of down, and whether there are zero points.
const KINDS: [(u8, usize, usize, bool); 5] =
    [(4, 32, 16, false), (8, 96, 80, true), (4, 48, 40, true), (3, 96, 20, false), (8, 16, 80, false)];

struct Owned {
    parts: [PackedLinear; 3],
}

fn linear(
    s: &mut Stream,
    [n, k]: [usize; 2],
    (bits, group, zeros): (u8, usize, bool),
    bias: bool,
) -> PackedLinear {
    let top = 1_u64 << bits;
    let codes: Vec<u8> = (0..n * k).map(|_| s.below(top) as u8).collect();
    let groups = n * k / group;
    let scales: Vec<f32> = (0..groups).map(|_| s.unit() / 64.0).collect();
    let of_groups: Vec<u8> = (0..groups).map(|_| s.below(top) as u8).collect();
    let bias = bias.then(|| (0..n).map(|_| s.unit()).collect::<Vec<f32>>());
    let zeros = zeros.then_some(&of_groups[..]);
    let view = WeightView::new([n, k], bits, group, &codes, &scales, zeros).unwrap();
    PackedLinear::pack(&view, bias.as_deref(), false, &Serial).unwrap()
}

fn owned(count: usize, inner: usize) -> Vec<Owned> {
    let mut s = Stream(inner as u64);
    let mut expert = |i: usize| {
        let (bits, of_rows, of_inner, zeros) = KINDS[i % KINDS.len()];
        let of_inner = if inner.is_multiple_of(of_inner) { of_inner } else { inner };
        let bias = i.is_multiple_of(3);
        let other = if bits == 8 { 4 } else { 8 };
        let parts = [
            linear(&mut s, [inner, HIDDEN], (bits, of_rows, zeros), bias),
            linear(&mut s, [inner, HIDDEN], (other, of_rows, !zeros), bias),
            linear(&mut s, [HIDDEN, inner], (bits, of_inner, zeros), bias),
        ];
        Owned { parts }
    };
    (0..count).map(&mut expert).collect()
}

fn views(owned: &[Owned]) -> Vec<Expert<'_>> {
    owned
        .iter()
        .map(|Owned { parts: [gate, up, down] }| Expert {
            gate: gate.into(),
            up: up.into(),
            down: down.into(),
        })
        .collect()
}

fn rows(tokens: usize, seed: u64) -> Vec<f32> {
    let mut s = Stream(seed);
    (0..tokens * HIDDEN).map(|_| s.float()).collect()
}

struct Routed {
    top_k: usize,
    experts: Vec<u32>,
    weights: Vec<f32>,
}

impl Routed {
    fn new(top_k: usize, experts: Vec<u32>, seed: u64) -> Self {
        let mut s = Stream(seed);
        let weights = experts.iter().map(|_| s.unit()).collect();
        Self { top_k, experts, weights }
    }

    fn view(&self) -> Routing<'_> {
        Routing { top_k: self.top_k, experts: &self.experts, weights: &self.weights }
    }
}

fn routings(tokens: usize) -> Vec<(&'static str, Routed)> {
    let mut s = Stream(tokens as u64);
    let mut uniform = Vec::new();
    for _ in 0..tokens {
        let mut all: Vec<u32> = (0..8).collect();
        for i in 0..4 {
            all.swap(i, i + s.below(8 - i as u64) as usize);
        }
        uniform.extend(&all[..4]);
    }
    let one = (0..tokens).flat_map(|_| [5, NO_EXPERT]).collect();
    let twice = (0..tokens).flat_map(|_| [6, 6]).collect();
    // Most tokens go to expert 1, token 0 also goes to expert 7, and experts 3 to 6 get no tokens.
    let skewed = (0..tokens).flat_map(|t| match t {
        0 => [7, 1],
        t if t % 2 == 0 => [1, NO_EXPERT],
        t => [NO_EXPERT, (t % 3) as u32],
    });
    vec![
        ("uniform", Routed::new(4, uniform, 1)),
        ("all to one", Routed::new(2, one, 2)),
        ("twice to one", Routed::new(2, twice, 3)),
        ("skewed", Routed::new(2, skewed.collect(), 4)),
        ("none", Routed::new(3, vec![NO_EXPERT; 3 * tokens], 5)),
        ("no slots", Routed::new(0, Vec::new(), 6)),
    ]
}

fn bits(out: &[f32]) -> Vec<u32> {
    out.iter().map(|v| v.to_bits()).collect()
}

fn grouped<E: Element>(
    experts: &[Expert<'_>],
    (token, rows, gate): (IsaToken, ExpertRows, ExpertGate),
    x: &[E],
    routing: &Routing<'_>,
    workspace: &mut ExpertsWorkspace,
    parallel: &dyn Parallel,
) -> Vec<f32> {
    let experts = Experts::new(experts).unwrap();
    let tokens = x.len() / HIDDEN;
    let plan = ExpertsPlan::new::<E>(&experts, token, rows, gate, tokens, routing.top_k).unwrap();
    workspace.reserve(&plan).unwrap();
    let mut out = vec![f32::NAN; x.len()];
    experts.run(&plan, x, routing, workspace, &mut out, parallel).unwrap();
    out
}

const GATES: [ExpertGate; 3] =
    [ExpertGate::Silu, ExpertGate::GeluTanh, ExpertGate::Clamped { alpha: 1.702, limit: 0.75 }];

fn kinds(isa: Isa) -> Vec<ExpertRows> {
    let parts = [Bf16Parts::One, Bf16Parts::Two, Bf16Parts::Three];
    let parts = if matches!(isa, Isa::Amx | Isa::AmxEmulated) { &parts[..] } else { &parts[1..2] };
    let floats = parts.iter().map(|&parts| ExpertRows::Float(parts));
    [ExpertRows::Int8].into_iter().chain(floats).collect()
}

#[test]
fn a_call_equals_a_loop_of_single_products() {
    let owned = owned(8, INNER);
    let experts = views(&owned);
    let all = Experts::new(&experts).unwrap();
    for isa in Isa::runnable() {
        let token = isa.token().unwrap();
        for kind in kinds(isa) {
            let mut workspace = ExpertsWorkspace::default();
            for (at, tokens) in [1, 5, 70].into_iter().enumerate() {
                let x = rows(tokens, 7);
                for (name, routed) in routings(tokens) {
                    let gate = GATES[(at + routed.top_k) % GATES.len()];
                    let how = (token, kind, gate);
                    let expected =
                        bits(&reference::experts(&all, token, kind, gate, &x, &routed.view()).unwrap());
                    for (i, parallel) in
                        [&Serial as &dyn Parallel, &Backwards, &Threads(3)].into_iter().enumerate()
                    {
                        let got = grouped(&experts, how, &x, &routed.view(), &mut workspace, parallel);
                        assert!(
                            bits(&got) == expected,
                            "{isa:?}, {kind:?}, {gate:?}, {tokens} tokens, {name}, threads {i}"
                        );
                    }
                }
            }
        }
    }
}

/// Widths that are not a multiple of the panel width, and enough rows for several blocks of strips or tiles.
#[test]
fn many_rows_of_ragged_widths() {
    let owned = owned(3, 21);
    let experts = views(&owned);
    let all = Experts::new(&experts).unwrap();
    let x = rows(300, 11);
    let routed = Routed::new(2, (0..300).flat_map(|t| [0, 1 + (t % 7 == 0) as u32]).collect(), 9);
    for isa in Isa::runnable() {
        let token = isa.token().unwrap();
        for kind in kinds(isa).into_iter().take(2) {
            let expected =
                reference::experts(&all, token, kind, ExpertGate::Silu, &x, &routed.view()).unwrap();
            for parallel in [&Backwards as &dyn Parallel, &Threads(2)] {
                let how = (token, kind, ExpertGate::Silu);
                let got =
                    grouped(&experts, how, &x, &routed.view(), &mut ExpertsWorkspace::default(), parallel);
                assert!(bits(&got) == bits(&expected), "{isa:?}, {kind:?}");
            }
        }
    }
}

/// Reordering the experts changes only the order of the sum, which does not matter for two terms.
#[test]
fn permutations_of_slots_and_of_experts() {
    let owned = owned(8, INNER);
    let experts = views(&owned);
    let x = rows(40, 3);
    let (_, four) = routings(40).swap_remove(0);
    let mut s = Stream(77);
    let mut place: Vec<u32> = (0..8).collect();
    for i in 0..8 {
        place.swap(i, s.below(8) as usize);
    }
    let mut moved = experts.clone();
    place.iter().enumerate().for_each(|(from, &to)| moved[to as usize] = experts[from]);
    for isa in Isa::runnable() {
        for kind in kinds(isa) {
            let how = (isa.token().unwrap(), kind, ExpertGate::Silu);
            let run = |experts: &[Expert<'_>], routed: &Routed| {
                let mut workspace = ExpertsWorkspace::default();
                bits(&grouped(experts, how, &x, &routed.view(), &mut workspace, &Threads(2)))
            };
            let permuted = Routed {
                top_k: 4,
                experts: four.experts.chunks(4).flat_map(|c| [c[2], c[0], c[3], c[1]]).collect(),
                weights: four.weights.chunks(4).flat_map(|c| [c[2], c[0], c[3], c[1]]).collect(),
            };
            assert!(run(&experts, &four) == run(&experts, &permuted), "{isa:?}, {kind:?}");
            let first = |of: &[u32]| of.chunks(4).flat_map(|c| [c[0], c[1]]).collect::<Vec<u32>>();
            let two = Routed::new(2, first(&four.experts), 8);
            let renamed = two.experts.iter().map(|&e| place[e as usize]).collect();
            let renamed = Routed::new(2, renamed, 8);
            assert!(run(&experts, &two) == run(&moved, &renamed), "{isa:?}, {kind:?}");
        }
    }
}

#[test]
fn activations_of_16_bits() {
    fn check<E: Element>(experts: &[Expert<'_>], to: fn(f32) -> E, from: fn(E) -> f32) {
        let x: Vec<E> = rows(30, 5).into_iter().map(to).collect();
        let wide: Vec<f32> = x.iter().map(|&v| from(v)).collect();
        let (_, routed) = routings(30).swap_remove(0);
        for isa in Isa::runnable() {
            for kind in [ExpertRows::Int8, ExpertRows::Float(Bf16Parts::Two)] {
                let how = (isa.token().unwrap(), kind, ExpertGate::Silu);
                let mut workspace = ExpertsWorkspace::default();
                let expected = grouped(experts, how, &wide, &routed.view(), &mut workspace, &Serial);
                let got = grouped(experts, how, &x, &routed.view(), &mut workspace, &Threads(2));
                let largest = expected.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
                let off = expected.iter().zip(&got).fold(0.0_f32, |a, (e, g)| a.max((e - g).abs()));
                let exact = kind == ExpertRows::Int8 || !isa.splits_floats();
                assert!(if exact { off == 0.0 } else { off < 1e-4 * largest }, "{isa:?}, {kind:?}: {off}");
            }
        }
    }
    let owned = owned(8, INNER);
    let experts = views(&owned);
    check(&experts, f16::from_f32, f16::to_f32);
    check(&experts, bf16::from_f32, bf16::to_f32);
}

/// The result matches the definition in double precision, within the error of 8-bit rounding and of floats.
#[test]
fn the_sum_is_that_of_the_experts() {
    let owned = owned(8, INNER);
    let experts = views(&owned);
    let x = rows(9, 13);
    let (_, routed) = routings(9).swap_remove(0);
    let float = |linear: &PackedLinear, x: &[f64]| -> Vec<f64> {
        let [n, k] = [linear.layout().n(), linear.layout().k()];
        let mut weights = vec![0.0; n * k];
        linear.view().dequantize_rows(0..n, &mut weights).unwrap();
        let bias = linear.bias().map_or(vec![0.0; n], <[f32]>::to_vec);
        let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
        weights.chunks_exact(k).zip(bias).map(|(row, bias)| dot(row) + f64::from(bias)).collect()
    };
    let mut expected = vec![0.0_f64; x.len()];
    for (slot, (&expert, &weight)) in routed.experts.iter().zip(&routed.weights).enumerate() {
        let token = slot / routed.top_k;
        let row: Vec<f64> = x[token * HIDDEN..][..HIDDEN].iter().map(|&v| f64::from(v)).collect();
        let [gate, up, down] = &owned[expert as usize].parts;
        let silu = |g: f64| g / (1.0 + (-g).exp());
        let pairs = float(gate, &row).into_iter().zip(float(up, &row));
        let inner: Vec<f64> = pairs.map(|(g, u)| silu(g) * u).collect();
        let sums = &mut expected[token * HIDDEN..][..HIDDEN];
        sums.iter_mut().zip(float(down, &inner)).for_each(|(sum, y)| *sum += f64::from(weight) * y);
    }
    let size = (expected.iter().map(|v| v * v).sum::<f64>() / expected.len() as f64).sqrt();
    for isa in Isa::runnable() {
        for (kind, bound) in [(ExpertRows::Float(Bf16Parts::Two), 1e-4), (ExpertRows::Int8, 0.03)] {
            let how = (isa.token().unwrap(), kind, ExpertGate::Silu);
            let got =
                grouped(&experts, how, &x, &routed.view(), &mut ExpertsWorkspace::default(), &Threads(2));
            let off = expected.iter().zip(&got).map(|(e, g)| (e - f64::from(*g)).powi(2)).sum::<f64>();
            let off = (off / expected.len() as f64).sqrt() / size;
            assert!(off > 0.0 && off < bound, "{isa:?}, {kind:?}: {off}");
        }
    }
}

/// Floating-point weights: FP4 with both kinds of rows, FP8 with floats only.
#[test]
fn floating_point_weights() {
    let mut s = Stream(5);
    let mut float = |[n, k]: [usize; 2], format: FloatFormat, group: usize| {
        let codes: Vec<u8> = (0..n * k)
            .map(|_| (s.below(256) as u8) & (u8::MAX >> (8 - format.bits())))
            .map(|c| if format.is_number(c) { c } else { 1 })
            .collect();
        let scales: Vec<f32> = (0..n * k / group).map(|_| 2.0_f32.powi(s.below(4) as i32 - 9)).collect();
        let view = WeightView::float([n, k], format, group, &codes, &scales).unwrap();
        PackedLinear::pack(&view, None, false, &Serial).unwrap()
    };
    for (format, int8) in [(FloatFormat::E2m1, true), (FloatFormat::E4m3, false)] {
        let mut owned = owned(3, INNER);
        owned[1].parts = [
            float([INNER, HIDDEN], format, 32),
            float([INNER, HIDDEN], format, 32),
            float([HIDDEN, INNER], format, 16),
        ];
        let experts = views(&owned);
        let all = Experts::new(&experts).unwrap();
        let x = rows(25, 4);
        let routed = Routed::new(2, (0..25).flat_map(|t| [t % 3, (t + 1) % 3]).collect(), 6);
        for isa in Isa::runnable() {
            let token = isa.token().unwrap();
            for kind in kinds(isa) {
                let gate = ExpertGate::Silu;
                if kind == ExpertRows::Int8 && !int8 {
                    let plan = ExpertsPlan::new::<f32>(&all, token, kind, gate, 25, 2);
                    assert_eq!(plan.unwrap_err().code(), 3);
                    continue;
                }
                let expected = reference::experts(&all, token, kind, gate, &x, &routed.view()).unwrap();
                let mut workspace = ExpertsWorkspace::default();
                let got =
                    grouped(&experts, (token, kind, gate), &x, &routed.view(), &mut workspace, &Backwards);
                assert!(bits(&got) == bits(&expected), "{isa:?}, {kind:?}, {format:?}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let own = owned(4, INNER);
    let experts = views(&own);
    let all = Experts::new(&experts).unwrap();
    let (token, gate) = (IsaToken::detect(), ExpertGate::Silu);
    assert_eq!(Experts::new(&[]).unwrap_err().code(), 3);
    let other = owned(1, 48);
    let mut wrong = experts.clone();
    wrong[2] = views(&other)[0];
    assert!(matches!(
        Experts::new(&wrong).unwrap_err(),
        KernelError::Mismatch { expected: INNER, got: 48, .. }
    ));
    wrong[2] = Expert { up: experts[1].up, ..experts[2] };
    assert!(matches!(
        Experts::new(&wrong).unwrap_err(),
        KernelError::Mismatch {
            what: "gate and up projections must have the same groups: expected size",
            ..
        }
    ));
    wrong[2] = Expert { down: experts[2].gate, ..experts[2] };
    assert_eq!(Experts::new(&wrong).unwrap_err().code(), 4);
    let short = vec![0.0; INNER - 1];
    wrong[2] = experts[2];
    wrong[2].gate.bias = Some(&short);
    assert_eq!(Experts::new(&wrong).unwrap_err().code(), 1);
    let new = |gate, tokens, top_k| {
        ExpertsPlan::new::<f32>(&all, token, ExpertRows::Int8, gate, tokens, top_k).map(drop)
    };
    for limit in [-1.0, f32::NAN] {
        assert_eq!(new(ExpertGate::Clamped { alpha: 1.0, limit }, 1, 1).unwrap_err().code(), 3);
    }
    assert_eq!(new(gate, usize::MAX, 2).unwrap_err().code(), 2);
    assert_eq!(new(gate, 1 << 31, 2).unwrap_err().code(), 2);

    let plan = ExpertsPlan::new::<f32>(&all, token, ExpertRows::Int8, gate, 3, 2).unwrap();
    let (x, routed) = (rows(3, 1), Routed::new(2, vec![0, 1, 2, 3, 0, 1], 1));
    let mut workspace = ExpertsWorkspace::default();
    let mut run = |all: &Experts<'_>, plan: &ExpertsPlan, x: &[f32], routing: Routing<'_>, reserved: bool| {
        if reserved {
            workspace.reserve(plan).unwrap();
        } else {
            workspace.release();
        }
        let mut out = vec![5.0; 3 * HIDDEN];
        let error = all.run(plan, x, &routing, &mut workspace, &mut out, &Serial);
        assert!(error.is_ok() || out.iter().all(|&v| v == 5.0));
        error.map_err(|error| error.code())
    };
    assert_eq!(run(&all, &plan, &x, routed.view(), true), Ok(()));
    assert_eq!(run(&all, &plan, &x, routed.view(), false), Err(1));
    assert_eq!(run(&all, &plan, &x[1..], routed.view(), true), Err(1));
    assert_eq!(
        run(&all, &plan, &x, Routing { experts: &routed.experts[1..], ..routed.view() }, true),
        Err(1)
    );
    assert_eq!(
        run(&all, &plan, &x, Routing { weights: &routed.weights[1..], ..routed.view() }, true),
        Err(1)
    );
    assert_eq!(run(&all, &plan, &x, Routing { experts: &[0, 1, 2, 4, 0, 1], ..routed.view() }, true), Err(4));
    assert_eq!(run(&all, &plan, &x, Routing { top_k: 3, ..routed.view() }, true), Err(4));
    assert_eq!(run(&all, &plan, &rows(4, 1), routed.view(), true), Err(4));
    assert_eq!(run(&Experts::new(&experts[..3]).unwrap(), &plan, &x, routed.view(), true), Err(4));
    // A workspace for fewer rows, then a plan for experts with wider groups, whose rows need less memory.
    let small = ExpertsPlan::new::<f32>(&all, token, ExpertRows::Int8, gate, 1, 2).unwrap();
    let mut workspace = ExpertsWorkspace::default();
    workspace.reserve(&small).unwrap();
    let mut out = vec![0.0; 3 * HIDDEN];
    let error = all.run(&plan, &x, &routed.view(), &mut workspace, &mut out, &Serial).unwrap_err();
    let (expected, got) = (plan.workspace_bytes(), small.workspace_bytes());
    assert_eq!(error, KernelError::Length { what: "workspace", expected, got });
    let wide = [experts[1]; 4];
    let wide = Experts::new(&wide).unwrap();
    let plan = ExpertsPlan::new::<f32>(&wide, token, ExpertRows::Int8, gate, 3, 2).unwrap();
    let mut workspace = ExpertsWorkspace::default();
    workspace.reserve(&plan).unwrap();
    let error = all.run(&plan, &x, &routed.view(), &mut workspace, &mut out, &Serial).unwrap_err();
    assert!(
        matches!(&error, KernelError::Scheme(message) if message.contains("need less memory")),
        "{error}"
    );
    let floats = ExpertsPlan::new::<f16>(&all, token, ExpertRows::Int8, gate, 3, 2).unwrap();
    workspace.reserve(&floats).unwrap();
    let error = all.run(&floats, &x, &routed.view(), &mut workspace, &mut out, &Serial).unwrap_err();
    assert_eq!(error.code(), 3);
}
