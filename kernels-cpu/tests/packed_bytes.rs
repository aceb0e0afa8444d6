//! Arbitrary packed bytes: all paths give bit-identical results for them, and `PackedView::check` rejects those that
//! packing never writes.

use proptest::prelude::*;
use quant_kernels_cpu::{
    FloatFormat, FloatRows, Int8Rows, Isa, Layout, PackedLinear, PackedView, RowLayout, ScaleType, Scales,
    Serial, WeightView,
};

fn bytes(len: usize, mut state: u64) -> Vec<u8> {
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    // NaN codes are more frequent than in uniform bytes.
    (0..len)
        .map(|_| match next() {
            r if r % 11 == 0 => 0xff,
            r if r % 11 == 1 => 0x7f,
            r => (r >> 8) as u8,
        })
        .collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }).collect()
}

/// Returns the values that a path uses for the weights, by multiplying them by an identity matrix.
fn multiplied(view: PackedView<'_>, isa: Isa) -> Vec<f32> {
    let (n, k) = (view.layout().n(), view.layout().k());
    let mut identity = vec![0.0; k * k];
    identity.iter_mut().step_by(k + 1).for_each(|x| *x = 1.0);
    let mut rows = FloatRows::new(isa.token().unwrap());
    rows.pack(&identity, RowLayout::of(view.layout()), &Serial).unwrap();
    let mut out = vec![f32::NAN; k * n];
    view.multiply_float(&rows, None, &mut out, &Serial).unwrap();
    out
}

proptest! {
    #[test]
    fn all_paths_make_the_same_of_any_bytes(
        n in 1_usize..40, groups in 1_usize..4, size in prop_oneof![1_usize..40, Just(16), Just(32)],
        eight: bool, kind in 0_usize..4, m in 1_usize..20, seed: u64,
    ) {
        let format = if eight { FloatFormat::E4m3 } else { FloatFormat::E2m1 };
        let scales = [ScaleType::F16, ScaleType::Bf16, ScaleType::E4m3, ScaleType::E8m0][kind];
        let layout = Layout::from_float_parts([n, groups * size], format, size, scales).unwrap();
        let packed = bytes(layout.bytes(), seed);
        let view = PackedView::new(layout, layout.id(), &packed).unwrap();
        let x: Vec<f32> = (0..m * layout.k()).map(|i| ((i * i) as f32 * 0.37).sin()).collect();
        let (mut integers, mut floats) = (None, None);
        for isa in Isa::runnable() {
            let mut out = vec![0.0; m * n];
            if !eight {
                let mut rows = Int8Rows::new(isa.token().unwrap());
                rows.quantize(&x, RowLayout::of(&layout), &Serial).unwrap();
                view.multiply(isa.token().unwrap(), &rows, None, &mut out, &Serial).unwrap();
                prop_assert_eq!(&bits(&out), integers.get_or_insert_with(|| bits(&out)), "{:?}", isa);
            }
            if !isa.splits_floats() {
                let mut rows = FloatRows::new(isa.token().unwrap());
                rows.pack(&x, RowLayout::of(&layout), &Serial).unwrap();
                view.multiply_float(&rows, None, &mut out, &Serial).unwrap();
                prop_assert_eq!(&bits(&out), floats.get_or_insert_with(|| bits(&out)), "{:?} on floats", isa);
            }
        }
    }
}

/// Every E4M3 code, including NaN, decodes to the same value on every path, and NaN codes to ±480.
#[test]
fn codes_of_nan_count_as_their_bits() {
    let codes: Vec<u8> = (0..=255).collect();
    let layout = Layout::from_float_parts([256, 1], FloatFormat::E4m3, 1, ScaleType::F16).unwrap();
    let valid: Vec<u8> = codes.iter().map(|&code| if code & 0x7f == 0x7f { 0 } else { code }).collect();
    let scales = vec![1.0; 256];
    let view = WeightView::float([256, 1], FloatFormat::E4m3, 1, &valid, &scales).unwrap();
    // The scales are 1. Packing would store them as E8M0, so write f16 scales into the packed bytes directly.
    let mut packed = vec![0; layout.bytes()];
    for (row, &code) in codes.iter().enumerate() {
        let panel = &mut packed[row / 16 * layout.panel_bytes()..][..layout.panel_bytes()];
        panel[4 * (row % 16)] = code;
        panel[128 + 2 * (row % 16)..][..2].copy_from_slice(&0x3c00_u16.to_le_bytes());
    }
    let packed = PackedView::new(layout, layout.id(), &packed).unwrap();
    let value = |code: u8| match code {
        0x7f => 480.0,
        0xff => -480.0,
        code => FloatFormat::E4m3.value(code),
    };
    let expected: Vec<f32> = codes.iter().map(|&code| value(code)).collect();
    for isa in Isa::runnable() {
        let out = multiplied(packed, isa);
        assert!(out.iter().zip(&expected).all(|(got, expected)| got == expected), "{isa:?}: {out:?}");
    }
    let mut floats = vec![0.0; 256];
    packed.dequantize_rows(0..256, &mut floats).unwrap();
    assert_eq!(bits(&floats), bits(&expected));
    assert_eq!(packed.check().unwrap_err().code(), 3);
    assert!(PackedLinear::pack(&view, None, false, &Serial).unwrap().view().check().is_ok());
}

#[test]
fn what_no_packing_writes_is_reported() {
    let (n, k, size) = (21, 64, 32);
    let codes: Vec<u8> = (0..n * k).map(|i| (i % 15) as u8).collect();
    let (powers, floats) = (vec![0.25; n * k / size], vec![0.3; n * k / size]);
    let (groups, rows) = (vec![7; n * k / size], vec![0.5; n]);
    let e4m3 = Scales::E4m3 { groups: &groups, global: 3.0 };
    let progressive = Scales::Progressive { groups: &groups, channels: &rows };
    let float = |format, scales| WeightView::float_with_scales([n, k], format, size, &codes, scales).unwrap();
    let integer = |bits, scales| WeightView::with_scales([n, k], bits, size, &codes, scales, None).unwrap();
    let (e2m1, fp8) = (FloatFormat::E2m1, FloatFormat::E4m3);
    for (view, sums) in [
        (float(e2m1, Scales::Float(&powers)), false),
        (float(e2m1, e4m3), false),
        (float(fp8, Scales::Float(&powers)), false),
        (float(fp8, Scales::Float(&floats)), false),
        (integer(4, Scales::Float(&floats)), true),
        (integer(4, progressive), false),
        (integer(8, Scales::Float(&floats)), false),
    ] {
        let packed = PackedLinear::pack(&view, None, sums, &Serial).unwrap();
        packed.view().check().unwrap();
        let layout = *packed.layout();
        let refused = |at: usize, byte: u8| {
            let mut bytes = packed.view().bytes().to_vec();
            bytes[at] = byte;
            PackedView::new(layout, layout.id(), &bytes).unwrap().check().is_err()
        };
        let code_bytes = k / 8 * if layout.code_bits() == 4 { 64 } else { 128 };
        for panel in 0..layout.panels() {
            let start = panel * layout.panel_bytes();
            for at in (start..start + code_bytes).step_by(37) {
                let is_fp8 = layout.float_format() == Some(fp8);
                assert_eq!((refused(at, 0x7f), refused(at, 0xff)), (is_fp8, is_fp8));
                assert!(!refused(at, 0x11));
            }
            let scales = start + code_bytes;
            for at in scales..scales + 16 * k / size {
                match layout.scales() {
                    ScaleType::E8m0 => assert!(refused(at, 255) && !refused(at, 254) && !refused(at, 0)),
                    ScaleType::E4m3 => {
                        assert!(
                            refused(at, 0x7f) && refused(at, 0x80) && refused(at, 0xff) && !refused(at, 0x7e)
                        );
                    }
                    ScaleType::Progressive => assert!(refused(at, 255) && !refused(at, 1)),
                    _ => {}
                }
            }
            if layout.scales() == ScaleType::E4m3 {
                let channels = scales + 16 * k / size;
                assert!(
                    refused(channels + 3, 0xff) && refused(channels + 64 + 3, 0xff) && refused(channels, 1)
                );
            }
        }
    }
    // Since NaN is not a power of two, these scales are stored as floats, and stay NaN.
    let scales = vec![f32::NAN; n * k / size];
    let view = WeightView::float([n, k], e2m1, size, &codes, &scales).unwrap();
    let packed = PackedLinear::pack(&view, None, false, &Serial).unwrap();
    for isa in Isa::runnable() {
        assert!(multiplied(packed.view(), isa).iter().all(|x| x.is_nan()), "{isa:?}");
    }
}
