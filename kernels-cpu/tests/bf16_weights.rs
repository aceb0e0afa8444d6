//! Dense weights of bf16: every path is compared with the definition.

mod common;

use common::{Backwards, Stream, Threads};
use half::{bf16, f16};
use proptest::prelude::*;
use quant_kernels_cpu::{
    Bf16Parts, Element, FloatRows, Int8Rows, Isa, KernelError, Layout, PackedLinear, PackedView, Parallel,
    RowLayout, Serial, WeightView, reference,
};

#[derive(Debug)]
struct Case {
    shape: [usize; 3],
    weight: Vec<bf16>,
    bias: Option<Vec<f32>>,
    x: Vec<f32>,
}

impl Case {
    fn new([m, n, k]: [usize; 3], bias: bool, seed: u64) -> Self {
        let mut s = Stream(seed);
        // Random values; or extreme ones, of which few cancel.
        let extreme = s.below(4) == 0;
        let weight = |s: &mut Stream| match (extreme, s.below(8)) {
            (true, 0) => 1e30 * s.unit(),
            (true, 1) => 0.0,
            (true, _) => [1e-12, -1e15][s.below(2) as usize],
            _ => s.float(),
        };
        let weight = (0..n * k).map(|_| bf16::from_f32(weight(&mut s))).collect();
        let bias = bias.then(|| (0..n).map(|_| s.float()).collect());
        let mut x: Vec<f32> = (0..m * k).map(|_| if extreme { 6e4 * s.unit() } else { s.float() }).collect();
        if extreme && m > 1 {
            x[..k].fill(0.0);
        }
        Self { shape: [m, n, k], weight, bias, x }
    }

    fn packed(&self) -> PackedLinear {
        let [_, n, k] = self.shape;
        PackedLinear::pack_bf16([n, k], &self.weight, self.bias.as_deref(), &Backwards).unwrap()
    }

    /// Checks the product of activations of one type, on every path and with every number of parts, against the
    /// definition; `exact` states how many parts represent the type exactly.
    fn check<E: Element>(&self, to: fn(f32) -> E, back: fn(E) -> f32, exact: usize) {
        let [_, n, k] = self.shape;
        let packed = self.packed();
        let x: Vec<E> = self.x.iter().map(|&v| to(v)).collect();
        let rounded: Vec<f32> = x.iter().map(|&v| back(v)).collect();
        let expected = reference::bf16_linear([n, k], &self.weight, &rounded, self.bias.as_deref());
        let mut ordered: Option<Vec<u32>> = None;
        for (isa, parts) in Isa::runnable()
            .flat_map(|isa| [Bf16Parts::One, Bf16Parts::Two, Bf16Parts::Three].map(|parts| (isa, parts)))
        {
            if parts != Bf16Parts::Two && !matches!(isa, Isa::Amx | Isa::AmxEmulated) {
                continue;
            }
            let mut rows = FloatRows::in_parts(isa.token().unwrap(), parts);
            rows.pack(&x, RowLayout::of(packed.layout()), &Backwards).unwrap();
            let mut results = [&Serial as &dyn Parallel, &Backwards, &Threads(2)].map(|parallel| {
                let mut out = vec![f32::NAN; expected.len()];
                packed.multiply_float(&rows, &mut out, parallel).unwrap();
                out
            });
            let count = 1 + parts as usize;
            let of_parts = match isa.splits_floats() && count < exact {
                true => 2.0_f64.powi(-8 * count as i32),
                false => 0.0,
            };
            for (got, (exact, magnitude)) in results[0].iter().zip(&expected) {
                // Products and sums below the smallest normal number are lost on paths with bf16.
                let bound = (of_parts + (k as f64 + 4.0) * 2.0_f64.powi(-23)) * magnitude;
                let lost = (4 * k) as f64 * f64::from(f32::MIN_POSITIVE);
                let off = (f64::from(*got) - exact).abs();
                assert!(off <= bound + lost, "{isa:?} {parts:?}: {got}, not {exact}: {off:e} of {bound:e}");
            }
            let first = bits(&results[0]);
            assert!(results.iter_mut().all(|out| bits(out) == first), "{isa:?}: threads");
            if !isa.splits_floats() {
                assert_eq!(ordered.get_or_insert_with(|| first.clone()), &first, "{isa:?}");
            }
        }
    }
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}

fn cases() -> impl Strategy<Value = Case> {
    let m = prop_oneof![1usize..20, 14usize..40];
    let k = prop_oneof![1usize..80, Just(256), 500usize..1200];
    (m, 1usize..80, k, any::<bool>(), any::<u64>())
        .prop_map(|(m, n, k, bias, seed)| Case::new([m, n, k], bias, seed))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn products_are_within_their_bound(case in cases()) {
        case.check(|v| v, |v: f32| v, 3);
        case.check(f16::from_f32, f16::to_f32, 2);
        case.check(bf16::from_f32, bf16::to_f32, 1);
    }

    #[test]
    fn packing_keeps_everything(case in cases(), first in 0usize..80) {
        let [_, n, k] = case.shape;
        let layout = Layout::bf16([n, k]).unwrap();
        let mut bytes = vec![0xa5; layout.bytes()];
        layout.pack_bf16(&case.weight, 0..layout.panels(), &mut bytes).unwrap();
        let packed = case.packed();
        prop_assert_eq!(packed.view().bytes(), &bytes[..]);
        let view = PackedView::new(layout, layout.id(), &bytes).unwrap();
        view.check().unwrap();
        let first = first.min(n);
        let mut floats = vec![f32::NAN; (n - first) * k];
        view.dequantize_rows(first..n, &mut floats).unwrap();
        let expected: Vec<f32> = case.weight[first * k..].iter().map(|w| w.to_f32()).collect();
        prop_assert_eq!(bits(&floats), bits(&expected));
    }
}

#[test]
fn rows_are_the_same_in_every_batch() {
    for (n, k, most) in [(5 * 16 + 3, 700, 40), (32, 96, 230)] {
        let case = Case::new([most, n, k], false, 3);
        let packed = case.packed();
        for isa in Isa::runnable() {
            for in_bf16 in [false, true] {
                let product = |x: &[f32], parallel: &dyn Parallel| {
                    let mut rows = FloatRows::new(isa.token().unwrap());
                    let halves: Vec<bf16> = x.iter().map(|&v| bf16::from_f32(v)).collect();
                    match in_bf16 {
                        true => rows.pack(&halves, RowLayout::of(packed.layout()), parallel).unwrap(),
                        false => rows.pack(x, RowLayout::of(packed.layout()), parallel).unwrap(),
                    }
                    let mut out = vec![f32::NAN; rows.m() * n];
                    packed.multiply_float(&rows, &mut out, parallel).unwrap();
                    bits(&out)
                };
                let each: Vec<u32> = case.x.chunks_exact(k).flat_map(|row| product(row, &Serial)).collect();
                let batches = (1..=40).chain([most - 1, most]);
                for m in batches.filter(|&m| m <= most && (most == 40 || m > 40)) {
                    let first = most - m;
                    let got = product(&case.x[first * k..], &Threads(2));
                    assert!(got == each[first * n..], "{isa:?}, {m} rows, bf16 {in_bf16}");
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    let (n, k) = (20, 40);
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let mut weight = vec![bf16::ONE; n * k];
        weight[3 * k + 7] = bf16::from_f32(bad);
        let packed = PackedLinear::pack_bf16([n, k], &weight, None, &Serial).unwrap();
        for isa in Isa::runnable() {
            for m in [1, 7, 30] {
                let mut x = vec![1.0_f32; m * k];
                x[(m - 1) * k + 5] = bad;
                let mut rows = FloatRows::new(isa.token().unwrap());
                rows.pack(&x, RowLayout::of(packed.layout()), &Serial).unwrap();
                let mut out = vec![0.0; m * n];
                packed.multiply_float(&rows, &mut out, &Serial).unwrap();
                for (i, v) in out.iter().enumerate() {
                    let finite = i / n != m - 1 && i % n != 3;
                    assert!(v.is_finite() == finite && (!finite || *v == k as f32), "{isa:?} {m} {i}: {v}");
                }
            }
        }
    }
}

#[test]
fn misuse_is_an_error() {
    let weight = vec![bf16::ONE; 3 * 5];
    let code = |error: KernelError| error.code();
    for (shape, len) in [([3, 5], 14), ([3, 5], 16), ([usize::MAX, 5], 15)] {
        let packed = PackedLinear::pack_bf16(shape, &vec![bf16::ONE; len], None, &Serial);
        assert!(packed.is_err(), "{shape:?}");
    }
    assert_eq!(Layout::bf16([0, 5]).map_err(code), Layout::bf16([3, 0]).map_err(code));
    assert!(Layout::bf16([0, 5]).is_err() && Layout::bf16([usize::MAX / 2, 8]).is_err());
    assert!(Layout::bf16([1, usize::MAX]).is_err() && Layout::bf16([1, usize::MAX / 40]).is_err());
    assert!(PackedLinear::pack_bf16([3, 5], &weight, Some(&[0.0; 2]), &Serial).is_err());

    let packed = PackedLinear::pack_bf16([3, 5], &weight, None, &Serial).unwrap();
    let layout = *packed.layout();
    assert_eq!((layout.code_bits(), layout.groups(), layout.is_bf16()), (16, 1, true));
    let codes = WeightView::new([3, 5], 8, 5, &[1; 15], &[1.0; 3], None).unwrap();
    let of_codes = Layout::of(&codes, false).unwrap();
    assert!(!of_codes.is_bf16() && of_codes.id() != layout.id());
    assert!(layout.pack(&codes, 0..1, &mut vec![0; layout.bytes()]).is_err());
    assert!(of_codes.pack_bf16(&weight, 0..1, &mut vec![0; of_codes.bytes()]).is_err());
    for panels in [0..2, 1..2] {
        assert!(layout.pack_bf16(&weight, panels, &mut vec![0; layout.bytes()]).is_err());
    }
    assert!(layout.pack_bf16(&weight, 0..1, &mut vec![0; layout.bytes() - 1]).is_err());
    assert!(layout.unpack(packed.view().bytes()).is_err());
    for isa in Isa::runnable() {
        let mut rows = Int8Rows::new(isa.token().unwrap());
        rows.quantize(&[1.0_f32; 5], RowLayout::of(&layout), &Serial).unwrap();
        let mut out = [f32::NAN; 3];
        let result = packed.view().multiply(isa.token().unwrap(), &rows, None, &mut out, &Serial);
        assert!(matches!(result, Err(KernelError::Scheme(_))) && out.iter().all(|v| v.is_nan()));
    }
}
