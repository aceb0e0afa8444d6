//! Weights of floating-point formats: every instruction set is compared with the reference.

mod common;

use common::{Backwards, Stream, Threads};
use proptest::prelude::*;
use quant_kernels_cpu::{
    Bf16Parts, FloatFormat, FloatRows, Int8Rows, Isa, Layout, PackedLinear, PackedView, Parallel, RowLayout,
    ScaleType, Scales, Serial, StaticScale, WeightView, e8m0_value, reference,
};

const FORMATS: [FloatFormat; 3] = [FloatFormat::E4m3, FloatFormat::E2m1, FloatFormat::Iq4];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    F32,
    Bf16,
    E8m0,
    E4m3,
}

#[derive(Debug)]
struct Case {
    shape: [usize; 3],
    group_size: usize,
    format: FloatFormat,
    kind: Kind,
    codes: Vec<u8>,
    scales: Vec<f32>,
    e4m3: Vec<u8>,
    global: f32,
    bias: Option<Vec<f32>>,
    x: Vec<f32>,
    fixed: Option<StaticScale>,
}

impl Case {
    fn new(
        [m, n, groups]: [usize; 3],
        group_size: usize,
        format: FloatFormat,
        kind: Kind,
        [bias, fixed]: [bool; 2],
        seed: u64,
    ) -> Self {
        let mut s = Stream(seed);
        let k = groups * group_size;
        let largest = match format {
            FloatFormat::E4m3 => 0x7e,
            _ => 7,
        };
        let sign = largest + 1 + (largest & 1 ^ 1);
        let extreme = s.below(4) == 0;
        let code = |s: &mut Stream| {
            let magnitude = if extreme { s.below(2) * largest } else { s.below(largest + 1) };
            (magnitude + s.below(2) * sign) as u8
        };
        let codes = (0..n * k).map(|_| code(&mut s)).collect();
        let scales = (0..n * groups)
            .map(|_| match kind {
                Kind::F32 => s.float(),
                Kind::Bf16 => (1 + s.below(200)) as f32 / 4096.0,
                // Sometimes one of the smallest scales, of which the first is subnormal in `f32`; otherwise values
                // around 1.
                _ if s.below(16) == 0 => e8m0_value(s.below(3) as u8),
                _ => e8m0_value(120 + s.below(12) as u8),
            })
            .collect();
        let e4m3 = (0..n * groups).map(|_| s.below(0x7f) as u8).collect();
        let global = [0.037, 1.0, 5931.7][s.below(3) as usize];
        let bias = bias.then(|| (0..n).map(|_| s.float()).collect());
        let mut x: Vec<f32> =
            (0..m * k).map(|_| if extreme { [1.0, -1.0][s.below(2) as usize] } else { s.float() }).collect();
        if extreme && m > 1 {
            x[..k].fill(0.0);
        }
        let fixed = fixed.then_some(StaticScale { scale: 0.013, zero: 0 });
        Self { shape: [m, n, k], group_size, format, kind, codes, scales, e4m3, global, bias, x, fixed }
    }

    fn view(&self) -> WeightView<'_> {
        let [_, n, k] = self.shape;
        let scales = match self.kind {
            Kind::E4m3 => Scales::E4m3 { groups: &self.e4m3, global: self.global },
            _ => Scales::Float(&self.scales),
        };
        WeightView::float_with_scales([n, k], self.format, self.group_size, &self.codes, scales).unwrap()
    }

    fn packed(&self) -> PackedLinear {
        PackedLinear::pack(&self.view(), None, false, &Backwards).unwrap()
    }

    fn rows(&self, isa: Isa, layout: &Layout) -> Int8Rows {
        let mut rows = Int8Rows::new(isa.token().unwrap());
        match self.fixed {
            Some(by) => rows.quantize_static(&self.x, RowLayout::of(layout), by, &Backwards),
            None => rows.quantize(&self.x, RowLayout::of(layout), &Backwards),
        }
        .unwrap();
        rows
    }

    fn check_integers(&self) {
        let (view, packed) = (self.view(), self.packed());
        let rows = self.rows(Isa::Scalar, packed.layout());
        let expected = bits(&reference::int8_linear(&view, &rows, self.bias.as_deref()));
        for isa in Isa::runnable() {
            let rows = self.rows(isa, packed.layout());
            for parallel in [&Serial as &dyn Parallel, &Backwards, &Threads(2)] {
                let mut out = vec![f32::NAN; expected.len()];
                let token = isa.token().unwrap();
                packed.view().multiply(token, &rows, self.bias.as_deref(), &mut out, parallel).unwrap();
                assert_eq!(bits(&out), expected, "{isa:?} {:?} g{}", self.shape, self.group_size);
            }
        }
    }

    fn check_floats(&self) {
        let (view, packed) = (self.view(), self.packed());
        let expected = reference::float_linear(&view, &self.x, self.bias.as_deref());
        let k = self.shape[2] as f64;
        let (mut first, mut tiled): (Option<Vec<u32>>, Option<Vec<u32>>) = (None, None);
        for isa in Isa::runnable() {
            let mut rows = FloatRows::in_parts(isa.token().unwrap(), Bf16Parts::Two);
            rows.pack(&self.x, RowLayout::of(packed.layout()), &Backwards).unwrap();
            let mut out = vec![f32::NAN; expected.len()];
            packed.view().multiply_float(&rows, self.bias.as_deref(), &mut out, &Threads(2)).unwrap();
            for (got, (exact, magnitude)) in out.iter().zip(&expected) {
                let bound = (2.0_f64.powi(-16) + (k + 4.0) * 2.0_f64.powi(-23)) * magnitude;
                let off = (f64::from(*got) - exact).abs();
                assert!(off <= bound + 1e-30, "{isa:?}: {got}, not {exact}: {off:e} of {bound:e}");
            }
            let bits = bits(&out);
            match isa {
                Isa::Avx512Bf16 => {}
                Isa::Amx | Isa::AmxEmulated => {
                    assert_eq!(tiled.get_or_insert_with(|| bits.clone()), &bits, "{isa:?}");
                }
                _ => assert_eq!(first.get_or_insert_with(|| bits.clone()), &bits, "{isa:?}"),
            }
        }
    }
}

fn row<'a>(format: FloatFormat, codes: &'a [u8], scales: Scales<'a>) -> WeightView<'a> {
    WeightView::float_with_scales([1, 2], format, 2, codes, scales).unwrap()
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}

fn cases(formats: &'static [FloatFormat]) -> impl Strategy<Value = Case> {
    let kind = prop_oneof![Just(Kind::F32), Just(Kind::Bf16), Just(Kind::E8m0), Just(Kind::E4m3)];
    // More rows than two tiles have.
    let shape = (prop_oneof![1usize..30, 14usize..40], 1usize..100, 1usize..5);
    let group = prop_oneof![1usize..40, Just(16), Just(32), Just(128)];
    (shape, group, prop::sample::select(formats), kind, any::<[bool; 2]>(), any::<u64>()).prop_map(
        |((m, n, groups), group, format, kind, flags, seed)| {
            let kind = match (format, kind) {
                (FloatFormat::Iq4, Kind::E8m0 | Kind::E4m3) => Kind::F32,
                _ => kind,
            };
            Case::new([m, n, groups], group, format, kind, flags, seed)
        },
    )
}

proptest! {
    #[test]
    fn integer_products_equal_the_definition(case in cases(&FORMATS[1..])) {
        case.check_integers();
    }

    #[test]
    fn float_products_are_within_their_bound(case in cases(&FORMATS)) {
        case.check_floats();
    }

    #[test]
    fn packing_keeps_everything(case in cases(&FORMATS)) {
        let (view, packed) = (case.view(), case.packed());
        let layout = packed.layout();
        let parts = layout.unpack(packed.view().bytes()).unwrap();
        prop_assert_eq!(&parts.codes, &case.codes);
        prop_assert!(parts.zeros.is_empty());
        if case.kind == Kind::E4m3 {
            let scales: Vec<f32> = case.e4m3.iter().map(|&code| FloatFormat::E4m3.value(code)).collect();
            prop_assert_eq!(bits(&parts.scales), bits(&scales));
            prop_assert!(parts.channels.len() == view.n() && parts.channels.iter().all(|&g| g == case.global));
        } else {
            prop_assert_eq!(bits(&parts.scales), bits(&case.scales));
            prop_assert!(parts.channels.is_empty());
        }
        let mut floats = [vec![f32::NAN; view.n() * view.k()], vec![f32::NAN; view.n() * view.k()]];
        packed.view().dequantize_rows(0..view.n(), &mut floats[0]).unwrap();
        reference::dequantize_rows(&view, 0..view.n(), &mut floats[1]);
        prop_assert_eq!(bits(&floats[0]), bits(&floats[1]));
        let again = Layout::from_float_parts([view.n(), view.k()], case.format, case.group_size, layout.scales());
        prop_assert_eq!(again.unwrap(), *layout);
        prop_assert!(PackedView::new(*layout, layout.id(), packed.view().bytes()).is_ok());
    }
}

#[test]
fn every_code_is_what_it_means() {
    for format in FORMATS {
        let codes: Vec<u8> = (0..=255).filter(|&code| format.is_number(code)).collect();
        let n = codes.len();
        let matrix: Vec<u8> = codes.iter().flat_map(|&code| [0, code, 0, 0]).collect();
        let scales = vec![1.0; n];
        let view = WeightView::float([n, 4], format, 4, &matrix, &scales).unwrap();
        let packed = PackedLinear::pack(&view, None, false, &Serial).unwrap();
        for isa in Isa::runnable() {
            for m in [1, 3, 20] {
                let mut rows = FloatRows::new(isa.token().unwrap());
                rows.pack(&[0.0, 1.0, 0.0, 0.0].repeat(m), RowLayout::of(packed.layout()), &Serial).unwrap();
                let mut out = vec![f32::NAN; m * n];
                packed.view().multiply_float(&rows, None, &mut out, &Serial).unwrap();
                for (i, got) in out.iter().enumerate() {
                    assert_eq!(*got, format.value(codes[i % n]), "{isa:?}, code {:#x}", codes[i % n]);
                }
            }
        }
    }
}

/// Groups of 16 use vector lanes for any number of rows; wider groups use tiles for 16 rows or more.
#[test]
fn narrow_and_wide_groups_equal_the_definition() {
    for (size, m) in [(16, 16), (16, 60), (32, 16), (48, 60), (32, 15)] {
        let shape = [m, 40, 96 / size];
        Case::new(shape, size, FloatFormat::E2m1, Kind::E4m3, [false; 2], 13).check_integers();
    }
}

#[test]
fn packed_weights_are_small() {
    let (n, k) = (64, 4096);
    let bits = |format, size: usize, scales: Scales<'_>| {
        let codes = vec![1; n * k];
        let view = WeightView::float_with_scales([n, k], format, size, &codes, scales).unwrap();
        Layout::of(&view, false).unwrap().bits_per_weight()
    };
    let (powers, codes) = (vec![0.25; n * k / 32], vec![0x38; n * k / 16]);
    assert_eq!(bits(FloatFormat::E2m1, 32, Scales::Float(&powers)), 4.25);
    assert_eq!(bits(FloatFormat::E4m3, 32, Scales::Float(&powers)), 8.25);
    // NVFP4 also stores two floats per row.
    let nvfp4 = bits(FloatFormat::E2m1, 16, Scales::E4m3 { groups: &codes, global: 3.0 });
    assert_eq!(nvfp4, 4.5 + 64.0 / k as f64);
}

#[test]
fn what_no_kernel_multiplies_is_refused() {
    let case = Case::new([3, 20, 2], 32, FloatFormat::E4m3, Kind::F32, [false; 2], 1);
    let packed = case.packed();
    let rows = case.rows(Isa::Scalar, packed.layout());
    let mut out = vec![0.0; 60];
    let refused = packed.view().multiply(Isa::Scalar.token().unwrap(), &rows, None, &mut out, &Serial);
    assert_eq!(
        refused.unwrap_err().to_string(),
        "FP8 (E4M3) weights cannot be multiplied with int8 activations"
    );
    // Sums are needed only for zero points of activations, which these weights do not support.
    assert_eq!(Layout::of(&case.view(), true).unwrap_err().code(), 3);
    // NaN codes, E2M1 codes of more than four bits, and invalid scales.
    let pack = |view: WeightView<'_>| PackedLinear::pack(&view, None, false, &Serial).map(|_| ());
    for (format, code) in [(FloatFormat::E4m3, 0x7f), (FloatFormat::E4m3, 0xff), (FloatFormat::E2m1, 16)] {
        assert_eq!(pack(row(format, &[0, code], Scales::Float(&[1.0]))).unwrap_err().code(), 3, "{code:#x}");
    }
    for (group, global) in
        [(0x7f, 1.0), (0x80, 1.0), (1, 0.0), (1, -1.0), (1, f32::NAN), (1, f32::INFINITY), (1, 1e-39)]
    {
        let groups = [group];
        let scales = Scales::E4m3 { groups: &groups, global };
        assert!(pack(row(FloatFormat::E2m1, &[0, 1], scales)).is_err(), "{group:#x} {global}");
    }
    let (codes, groups, floats) = ([0; 2], [1], [1.0]);
    let progressive = Scales::Progressive { groups: &groups, channels: &floats };
    assert!(WeightView::float_with_scales([1, 2], FloatFormat::E2m1, 2, &codes, progressive).is_err());
    let e4m3 = Scales::E4m3 { groups: &groups, global: 1.0 };
    assert!(WeightView::with_scales([1, 2], 4, 2, &codes, e4m3, None).is_err());
    for scales in [ScaleType::E4m3, ScaleType::E8m0] {
        assert!(Layout::from_parts([16, 32], 4, 32, scales, Some(8), false).is_err());
    }
    let progressive = Layout::from_float_parts([16, 32], FloatFormat::E2m1, 32, ScaleType::Progressive);
    assert!(progressive.is_err());
}
