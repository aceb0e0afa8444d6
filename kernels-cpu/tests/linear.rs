//! Every instruction set matches the reference bit for bit.

mod common;

use common::{Backwards, Stream, Threads};
use proptest::prelude::*;
use quant_kernels_cpu::{
    Bf16Parts, FloatRows, Int8Rows, Isa, IsaToken, KernelError, Layout, PackedLinear, PackedView, Parallel,
    RowLayout, Scales, Serial, StaticScale, WeightView, reference,
};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Float,
    Wide,
    Progressive,
}

#[derive(Debug)]
struct Case {
    shape: [usize; 3],
    group_size: usize,
    bits: u8,
    kind: Kind,
    codes: Vec<u8>,
    scales: Vec<f32>,
    whole: Vec<u8>,
    zeros: Option<Vec<u8>>,
    bias: Option<Vec<f32>>,
    x: Vec<f32>,
    fixed: Option<StaticScale>,
}

impl Case {
    #[allow(clippy::too_many_arguments, reason = "they describe one case")]
    fn new(
        [m, n, groups]: [usize; 3],
        group_size: usize,
        bits: u8,
        kind: Kind,
        asymmetric: bool,
        bias: bool,
        fixed: bool,
        seed: u64,
    ) -> Self {
        let mut s = Stream(seed);
        let k = groups * group_size;
        // With two levels of scales, weights must fit 8 signed bits, so use codes of at most 4 bits.
        let bits = if kind == Kind::Progressive { bits.min(4) } else { bits };
        let extreme = s.below(4) == 0;
        let top = (1_u64 << bits) - 1;
        let code = |s: &mut Stream| (if extreme { s.below(2) * top } else { s.below(top + 1) }) as u8;
        let codes = (0..n * k).map(|_| code(&mut s)).collect();
        let scales = (0..if kind == Kind::Progressive { n } else { n * groups })
            .map(|i| match kind {
                // Subnormal, zero, negative and positive values.
                Kind::Wide => match i % 5 {
                    0 => f32::from_bits(1 + s.below(1000) as u32),
                    1 => 0.0,
                    2 => -s.float(),
                    _ => s.float(),
                },
                _ => (1 + s.below(2000)) as f32 / 4096.0,
            })
            .collect();
        let whole = (0..n * groups).map(|_| 1 + s.below(8) as u8).collect();
        let zeros = asymmetric.then(|| (0..n * groups).map(|_| code(&mut s)).collect());
        let bias = bias.then(|| (0..n).map(|_| s.float()).collect());
        let mut x: Vec<f32> =
            (0..m * k).map(|_| if extreme { [1.0, -1.0][s.below(2) as usize] } else { s.float() }).collect();
        if extreme && m > 1 {
            x[..k].fill(0.0);
        }
        let fixed = fixed.then(|| StaticScale { scale: 0.013, zero: (s.below(256) as i64 - 128) as i8 });
        Self { shape: [m, n, k], group_size, bits, kind, codes, scales, whole, zeros, bias, x, fixed }
    }

    fn view(&self) -> WeightView<'_> {
        let [_, n, k] = self.shape;
        let scales = match self.kind {
            Kind::Progressive => Scales::Progressive { groups: &self.whole, channels: &self.scales },
            _ => Scales::Float(&self.scales),
        };
        WeightView::with_scales(
            [n, k],
            self.bits,
            self.group_size,
            &self.codes,
            scales,
            self.zeros.as_deref(),
        )
        .unwrap()
    }

    fn rows(&self, layout: &Layout) -> Int8Rows {
        self.rows_for(IsaToken::detect(), layout)
    }

    fn rows_for(&self, token: IsaToken, layout: &Layout) -> Int8Rows {
        let mut rows = Int8Rows::new(token);
        match self.fixed {
            Some(fixed) => rows.quantize_static(&self.x, RowLayout::of(layout), fixed, &Backwards),
            None => rows.quantize(&self.x, RowLayout::of(layout), &Backwards),
        }
        .unwrap();
        rows
    }

    fn check_float(&self) {
        let view = self.view();
        let packed = PackedLinear::pack(&view, None, false, &Backwards).unwrap();
        let expected = reference::float_linear(&view, &self.x, self.bias.as_deref());
        let k = self.shape[2];
        let (mut first, mut tiled): (Option<Vec<u32>>, Option<Vec<u32>>) = (None, None);
        for (isa, parts) in in_parts() {
            let mut rows = FloatRows::in_parts(isa.token().unwrap(), parts);
            rows.pack(&self.x, RowLayout::of(packed.layout()), &Backwards).unwrap();
            // The bounds for split values. Paths without a choice are tested with `Two`: those that split use two
            // parts.
            let off = match parts {
                Bf16Parts::One => -8,
                Bf16Parts::Two => -16,
                Bf16Parts::Three => -24,
            };
            for parallel in [&Serial as &dyn Parallel, &Backwards] {
                let mut out = vec![f32::NAN; expected.len()];
                packed.view().multiply_float(&rows, self.bias.as_deref(), &mut out, parallel).unwrap();
                for (got, (exact, magnitude)) in out.iter().zip(&expected) {
                    let bound = (2.0_f64.powi(off) + (k as f64 + 4.0) * 2.0_f64.powi(-23)) * magnitude;
                    let off = (f64::from(*got) - exact).abs();
                    assert!(off <= bound + 1e-30, "{isa:?}: {got}, not {exact}: {off:e} of {bound:e}");
                }
                let bits: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
                match isa {
                    Isa::Avx512Bf16 => {}
                    Isa::Amx | Isa::AmxEmulated if parts == Bf16Parts::Two => {
                        assert_eq!(tiled.get_or_insert_with(|| bits.clone()), &bits, "{isa:?}");
                    }
                    Isa::Amx | Isa::AmxEmulated => {}
                    _ => assert_eq!(first.get_or_insert_with(|| bits.clone()), &bits, "{isa:?}"),
                }
            }
        }
    }

    fn check(&self) {
        let view = self.view();
        let packed = PackedLinear::pack(&view, None, self.fixed.is_some(), &Backwards).unwrap();
        let rows = self.rows(packed.layout());
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let expected = bits(&reference::int8_linear(&view, &rows, self.bias.as_deref()));
        for isa in Isa::runnable() {
            let token = isa.token().unwrap();
            let rows = self.rows_for(token, packed.layout());
            for parallel in [&Serial as &dyn Parallel, &Backwards] {
                let mut out = vec![f32::NAN; expected.len()];
                packed.view().multiply(token, &rows, self.bias.as_deref(), &mut out, parallel).unwrap();
                assert_eq!(bits(&out), expected, "{isa:?} {:?} g{}", self.shape, self.group_size);
            }
        }
    }
}

fn in_parts() -> impl Iterator<Item = (Isa, Bf16Parts)> {
    let all = [Bf16Parts::One, Bf16Parts::Two, Bf16Parts::Three];
    let of = move |isa| match isa {
        Isa::Amx | Isa::AmxEmulated => all.to_vec(),
        _ => vec![Bf16Parts::Two],
    };
    Isa::runnable().flat_map(move |isa| of(isa).into_iter().map(move |parts| (isa, parts)))
}

fn cases() -> impl Strategy<Value = Case> {
    let kind = prop_oneof![Just(Kind::Float), Just(Kind::Wide), Just(Kind::Progressive)];
    // More rows than two tiles have.
    let shape = (prop_oneof![1usize..30, 14usize..40], 1usize..100, 1usize..5);
    let group = prop_oneof![1usize..40, Just(32), Just(64), Just(128)];
    (shape, group, 2u8..=8, kind, any::<[bool; 3]>(), any::<u64>()).prop_map(
        |((m, n, groups), group, bits, kind, [asymmetric, bias, fixed], seed)| {
            Case::new([m, n, groups], group, bits, kind, asymmetric, bias, fixed, seed)
        },
    )
}

proptest! {
    #[test]
    fn all_instruction_sets_equal_the_definition(case in cases()) {
        case.check();
    }

    #[test]
    fn floats_are_within_their_bound(case in cases()) {
        case.check_float();
    }

    #[test]
    fn packing_keeps_everything(case in cases(), cut in 0usize..8) {
        let view = case.view();
        let layout = Layout::of(&view, case.fixed.is_some()).unwrap();
        let mut bytes = vec![0xa5; layout.bytes()];
        let cut = cut.min(layout.panels());
        let (left, right) = bytes.split_at_mut(cut * layout.panel_bytes());
        layout.pack(&view, 0..cut, left).unwrap();
        layout.pack(&view, cut..layout.panels(), right).unwrap();
        let whole = PackedLinear::pack(&view, None, case.fixed.is_some(), &Serial).unwrap();
        prop_assert_eq!(whole.view().bytes(), &bytes[..]);
        let parts = layout.unpack(&bytes).unwrap();
        let mut floats = [vec![f32::NAN; view.n() * view.k()], vec![f32::NAN; view.n() * view.k()]];
        whole.view().dequantize_rows(0..view.n(), &mut floats[0]).unwrap();
        reference::dequantize_rows(&view, 0..view.n(), &mut floats[1]);
        prop_assert_eq!(&floats[0], &floats[1]);
        prop_assert_eq!(&parts.codes, &case.codes);
        prop_assert_eq!(&parts.zeros[..], case.zeros.as_deref().unwrap_or_default());
        match case.kind {
            Kind::Progressive => {
                prop_assert_eq!(parts.channels, case.scales);
                prop_assert_eq!(parts.scales, case.whole.iter().map(|&s| f32::from(s)).collect::<Vec<_>>());
            }
            _ => prop_assert_eq!(parts.scales, case.scales),
        }
    }
}

/// Shapes that are divided by rows as well as by panels, on the default path.
#[test]
fn large_shapes_do_not_depend_on_the_split() {
    for (m, n, groups, size, bits) in
        [(1, 3000, 4, 128, 4), (70, 520, 16, 128, 4), (300, 200, 17, 256, 8), (5, 130, 1, 4100, 8)]
    {
        let case = Case::new([m, n, groups], size, bits, Kind::Float, bits == 4, true, false, 7);
        let view = case.view();
        let packed = PackedLinear::pack(&view, case.bias.as_deref(), false, &Serial).unwrap();
        let rows = case.rows(packed.layout());
        let expected = reference::int8_linear(&view, &rows, case.bias.as_deref());
        for parallel in [&Serial as &dyn Parallel, &Backwards, &Threads(2), &Threads(3)] {
            let mut out = vec![f32::NAN; m * n];
            packed.multiply(&rows, &mut out, parallel).unwrap();
            assert!(out.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{m} {n}");
        }
    }
}

/// Row tiles that fill a piece of work plus one more, leftover panels, groups that are too wide to be expanded at once,
/// and rows that are wide enough to be divided.
#[test]
fn tiles_do_not_depend_on_the_split() {
    for (m, n, groups, size, bits, kind) in [
        (1, 100, 3, 128, 4, Kind::Float),
        (16, 16 * 7, 2, 72, 8, Kind::Float),
        (17, 33, 5, 100, 4, Kind::Progressive),
        (129, 40, 1, 1000, 8, Kind::Float),
        (145, 24, 2, 1040, 4, Kind::Float),
        (130, 16, 1, 9000, 8, Kind::Wide),
        (40, 50, 66, 128, 4, Kind::Float),
    ] {
        let asymmetric = m % 2 == 0;
        let case = Case::new([m, n, groups], size, bits, kind, asymmetric, true, m == 40, 11);
        let (view, bias) = (case.view(), case.bias.as_deref());
        let packed = PackedLinear::pack(&view, None, case.fixed.is_some(), &Serial).unwrap();
        let expected = reference::int8_linear(&view, &case.rows(packed.layout()), bias);
        let exact = reference::float_linear(&view, &case.x, bias);
        let mut floats: Option<Vec<u32>> = None;
        for isa in [Isa::Amx, Isa::AmxEmulated].into_iter().filter(|isa| isa.is_available()) {
            let token = isa.token().unwrap();
            let rows = case.rows_for(token, packed.layout());
            let mut float_rows = FloatRows::new(token);
            float_rows.pack(&case.x, RowLayout::of(packed.layout()), &Threads(2)).unwrap();
            for parallel in [&Serial as &dyn Parallel, &Backwards, &Threads(2), &Threads(3)] {
                let mut out = vec![f32::NAN; m * n];
                packed.view().multiply(token, &rows, bias, &mut out, parallel).unwrap();
                assert!(
                    out.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{isa:?} {m} {n}"
                );
                out.fill(f32::NAN);
                packed.view().multiply_float(&float_rows, bias, &mut out, parallel).unwrap();
                for (got, (exact, magnitude)) in out.iter().zip(&exact) {
                    let k = (groups * size) as f64;
                    let bound = (2.0_f64.powi(-16) + (k + 4.0) * 2.0_f64.powi(-23)) * magnitude + 1e-30;
                    assert!((f64::from(*got) - exact).abs() <= bound, "{isa:?} {m} {n}: {got}, not {exact}");
                }
                let bits: Vec<u32> = out.iter().map(|v| v.to_bits()).collect();
                assert!(floats.get_or_insert_with(|| bits.clone()) == &bits, "{isa:?} {m} {n} on floats");
            }
        }
    }
}

/// 4-bit codes in groups of 128 need at most 4.16 bits per weight, including scales and zero points.
#[test]
fn packed_weights_are_small() {
    let (n, k) = (256, 4096);
    let (codes, scales, zeros) = (vec![3; n * k], vec![0.5; n * k / 128], vec![7; n * k / 128]);
    let bits = |zeros| {
        let view = WeightView::new([n, k], 4, 128, &codes, &scales, zeros).unwrap();
        Layout::of(&view, false).unwrap().bits_per_weight()
    };
    assert_eq!((bits(None), bits(Some(&zeros[..]))), (4.125, 4.15625));
}

#[test]
fn misuse_is_an_error() {
    let case = Case::new([3, 20, 2], 32, 4, Kind::Float, true, false, false, 1);
    let view = case.view();
    let packed = PackedLinear::pack(&view, None, false, &Serial).unwrap();
    let rows = case.rows(packed.layout());
    let token = Isa::Scalar.token().unwrap();
    let mut out = vec![0.0; 60];
    let view_of = packed.view();
    let multiply = |rows: &Int8Rows, bias: Option<&[f32]>, out: &mut [f32]| {
        view_of.multiply(token, rows, bias, out, &Serial).unwrap_err().code()
    };
    assert_eq!(multiply(&rows, None, &mut out[..59]), 1);
    assert_eq!(multiply(&rows, Some(&[0.0; 19]), &mut out), 1);
    let other = Case::new([3, 20, 1], 64, 4, Kind::Float, false, false, false, 1);
    let packed_other = PackedLinear::pack(&other.view(), None, true, &Serial).unwrap();
    assert_eq!(multiply(&other.rows(packed_other.layout()), None, &mut out), 4);
    let mut shifted = Int8Rows::default();
    let by = StaticScale { scale: 0.1, zero: 3 };
    shifted.quantize_static(&case.x, RowLayout::of(packed.layout()), by, &Serial).unwrap();
    assert_eq!(multiply(&shifted, None, &mut out), 3);
    assert_eq!(multiply(&Int8Rows::default(), None, &mut out), 4);
    assert_eq!(
        rows.clone().quantize(&case.x[1..], RowLayout::of(packed.layout()), &Serial).unwrap_err().code(),
        1
    );
    let broken = StaticScale { scale: f32::NAN, zero: 0 };
    assert_eq!(
        rows.clone()
            .quantize_static(&case.x, RowLayout::of(packed.layout()), broken, &Serial)
            .unwrap_err()
            .code(),
        3
    );
    let layout = *packed.layout();
    assert_eq!(PackedView::new(layout, layout.id() ^ 1, view_of.bytes()).unwrap_err().code(), 5);
    assert_eq!(PackedView::new(layout, layout.id(), &view_of.bytes()[1..]).unwrap_err().code(), 1);
    assert!(PackedView::new(layout, layout.id(), view_of.bytes()).is_ok());
    assert_ne!(layout.id(), packed_other.layout().id());
    assert_eq!(layout.pack(&other.view(), 0..1, &mut [0; 8]).unwrap_err().code(), 3);
    assert_eq!(layout.pack(&view, 1..9, &mut [0; 8]).unwrap_err().code(), 4);
    assert_eq!(PackedLinear::pack(&view, Some(&[0.0; 3]), false, &Serial).unwrap_err().code(), 1);
    let empty = WeightView::new([0, 4], 4, 4, &[], &[], None).unwrap();
    assert_eq!(Layout::of(&empty, false).unwrap_err().code(), 3);
}

#[test]
fn what_is_not_finite_stays_in_its_row() {
    let mut case = Case::new([3, 20, 2], 32, 4, Kind::Float, true, true, false, 3);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        case.x[70] = bad;
        let packed = PackedLinear::pack(&case.view(), case.bias.as_deref(), false, &Serial).unwrap();
        let mut out = vec![0.0; 60];
        packed.multiply(&case.rows(packed.layout()), &mut out, &Serial).unwrap();
        assert!(out[20..40].iter().all(|v| v.is_nan()));
        assert!(out[..20].iter().chain(&out[40..]).all(|v| v.is_finite()));
    }
}

#[test]
fn rows_are_rounded_half_to_even_by_their_largest() {
    let view = WeightView::new([1, 8], 4, 8, &[0; 8], &[1.0], None).unwrap();
    let layout = RowLayout::of(&Layout::of(&view, false).unwrap());
    let mut rows = Int8Rows::default();
    let x = [127.0, -127.0, 0.5, 1.5, -2.5, 126.5, 0.49, 0.0];
    let tiny = [1e-38_f32; 8];
    rows.quantize(&[x, [0.0; 8], tiny].concat(), layout, &Serial).unwrap();
    assert_eq!(rows.row(0), [127, -127, 0, 2, -2, 126, 0, 0]);
    assert_eq!(rows.scales(), [1.0, 0.0, 0.0]);
    assert_eq!(rows.row(2), [0; 8]);
    rows.quantize_static(&x, layout, StaticScale { scale: 2.0, zero: 100 }, &Serial).unwrap();
    assert_eq!(rows.row(0), [127, 36, 100, 101, 99, 127, 100, 100]);
}

#[test]
fn values_beyond_their_bits_are_refused() {
    let pack = |bits: u8, codes: &[u8], scales: Scales<'_>, zeros: Option<&[u8]>| {
        let view =
            WeightView::with_scales([1, codes.len()], bits, codes.len(), codes, scales, zeros).unwrap();
        PackedLinear::pack(&view, None, false, &Threads(2)).map(|_| ())
    };
    let one = Scales::Float(&[1.0]);
    for (bits, codes, zero) in [(4, [8; 8], 16), (4, [16; 8], 0), (3, [8; 8], 0), (7, [1; 8], 128)] {
        let error = pack(bits, &codes, one, Some(&[zero])).unwrap_err();
        assert_eq!(error, KernelError::Scheme("a code or zero point exceeds the bits of the weight"));
    }
    assert!(pack(4, &[15; 8], one, Some(&[15])).is_ok());
    let levels = |group: &'static [u8]| Scales::Progressive { groups: group, channels: &[1.0] };
    assert!(pack(4, &[15; 8], levels(&[8]), Some(&[0])).is_ok());
    let error = pack(4, &[15; 8], levels(&[9]), Some(&[0])).unwrap_err();
    assert_eq!(error, KernelError::Scheme("a progressive weight exceeds 8 bits"));
}
