//! Shared scales and the search for those of NVFP4, compared with definitions in double precision.

use proptest::prelude::*;

use super::*;
use crate::quantize::grid::Extent;
use crate::quantize::{ErrorStats, QuantizedTensor, quantize_rtn, quantize_within};

/// Normally distributed values from a linear congruential generator.
fn gaussian(len: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / f64::from(1 << 24)
    };
    (0..len)
        .map(|_| {
            let (u, v) = (1.0 - uniform(), uniform());
            ((-2.0 * u.ln()).sqrt() * (2.0 * std::f64::consts::PI * v).cos() * 0.02) as f32
        })
        .collect()
}

fn quantize(weights: &[f32], shape: [usize; 2], scheme: &str, search: ScaleSearch) -> QuantizedTensor {
    let scheme: LinearScheme = scheme.parse().unwrap();
    let target = (scheme, scheme.scale_dtype(Dtype::Bf16));
    let context = ScaleContext { search, amax: None };
    quantize_within(SourceRows::Floats(weights), shape, target, None, context).unwrap().0
}

fn error(weights: &[f32], shape: [usize; 2], scheme: &str, search: ScaleSearch) -> f64 {
    ErrorStats::of(weights, &quantize(weights, shape, scheme, search)).unwrap().relative_rms()
}

/// Published errors of these grids, within 3 %.
#[test]
fn relative_errors_are_those_of_the_formats() {
    use ScaleSearch::{Amax, FourOverSix, Sweep};
    let shape = [512, 1024];
    let weights = gaussian(shape[0] * shape[1]);
    for (scheme, search, expected) in [
        ("wf8a16-tensor", Sweep, 0.0264),
        ("wf8af8-channel", Sweep, 0.0264),
        ("wf8a16-b128", Sweep, 0.0264),
        ("wf8a16-g32-mx", Sweep, 0.0266),
        ("wf4a16-g16-nv", Amax, 0.0953),
        ("wf4a16-g16-nv", FourOverSix, 0.0872),
        ("wf4a16-g16-nv", Sweep, 0.0814),
        ("wf4a16-g32-mx", Sweep, 0.112),
        ("w4a16-g32-sym", Sweep, 0.095),
    ] {
        let error = error(&weights, shape, scheme, search);
        assert!(
            (error / expected - 1.0).abs() < 0.03,
            "{scheme} {search:?}: {error:.4}, expected {expected}"
        );
    }
}

fn value(tensor: &QuantizedTensor, i: usize) -> f64 {
    let format = tensor.scheme.float_format().unwrap();
    let size = tensor.scheme.granularity.group_size(tensor.shape[1]);
    f64::from(format.value(tensor.codes[i])) * f64::from(tensor.scales[i / size])
}

fn group_errors(weights: &[f32], tensor: &QuantizedTensor) -> Vec<f64> {
    let squares: Vec<f64> =
        weights.iter().enumerate().map(|(i, w)| (f64::from(*w) - value(tensor, i)).powi(2)).collect();
    squares.chunks(16).map(|group| group.iter().sum()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn a_search_never_ends_worse_than_the_largest_weight(
        weights in prop::collection::vec(prop_oneof![Just(0.0_f32), Just(-0.0), -2.0_f32..2.0, -1e-3_f32..1e-3], 64),
        exponent in -30_i32..30,
    ) {
        let weights: Vec<f32> = weights.iter().map(|w| w * 2.0_f32.powi(exponent)).collect();
        let nv = |search| quantize(&weights, [2, 32], "wf4a16-g16-nv", search);
        let amax = nv(ScaleSearch::Amax);
        let least = group_errors(&weights, &amax);
        for (searched, least) in group_errors(&weights, &nv(ScaleSearch::Sweep)).iter().zip(&least) {
            prop_assert!(*searched <= least * (1.0 + 1e-6), "{} after {}", searched, least);
        }
    }

    #[test]
    fn nvfp4_is_rounded_by_the_definition(weights in prop::collection::vec(-2.0_f32..2.0, 64)) {
        let tensor = quantize(&weights, [2, 32], "wf4a16-g16-nv", ScaleSearch::Amax);
        let amax = |part: &[f32]| part.iter().fold(0.0_f32, |m, w| m.max(w.abs()));
        let global = 2688.0 / amax(&weights);
        prop_assert_eq!(tensor.global, Some(global));
        let numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (g, group) in weights.chunks(16).enumerate() {
            let code = FloatFormat::E4m3.code(global * (amax(group) / 6.0));
            let scale = FloatFormat::E4m3.value(code) / global;
            prop_assert_eq!(tensor.scales[g], scale);
            for (i, w) in group.iter().enumerate() {
                let exact = f64::from(*w).abs() / f64::from(scale);
                let distance = |n: f64| (n - exact).abs();
                let got = distance(value(&tensor, g * 16 + i).abs() / f64::from(scale));
                let least = numbers.map(distance).into_iter().fold(f64::MAX, f64::min);
                prop_assert!(got <= least + 1e-5, "{} became {}", w, value(&tensor, g * 16 + i));
            }
        }
    }

    #[test]
    fn blocks_share_the_scale_of_their_largest_weight(n in 1_usize..300, k in 1_usize..20, step in 1_usize..30) {
        let k = k * step;
        let weights: Vec<f32> = (0..n * k).map(|i| ((i * 7919 % 1009) as f32 / 505.0 - 1.0) * (1 + i / k) as f32).collect();
        let tensor = quantize(&weights, [n, k], "wf8a16-b128", ScaleSearch::Sweep);
        let size = tensor.scheme.granularity.group_size(k);
        prop_assert_eq!(tensor.scales.len(), n * k / size);
        let (high, wide) = (n.div_ceil(128), k.div_ceil(128));
        let mut amax = vec![0.0_f32; high * wide];
        for (i, w) in weights.iter().enumerate() {
            let at = i / k / 128 * wide + i % k / 128;
            amax[at] = amax[at].max(w.abs());
        }
        let expected: Vec<f32> = amax.iter().map(|a| if *a == 0.0 { 1.0 } else { Dtype::Bf16.round(a / 448.0) }).collect();
        prop_assert_eq!(tensor.stored_scales().unwrap(), expected.clone());
        prop_assert_eq!(QuantizedTensor::spread_scales(&expected, [n, k], Granularity::Block), tensor.scales.clone());
        for (i, w) in weights.iter().enumerate() {
            let scale = expected[i / k / 128 * wide + i % k / 128];
            prop_assert_eq!(tensor.codes[i], FloatFormat::E4m3.code(w / scale));
        }
    }
}

#[test]
fn a_tensor_has_one_scale_which_others_may_widen() {
    let weights = [0.5, -2.0, 1.0, 0.25, 0.0, 1.5];
    let scheme: LinearScheme = "wf8a16-tensor".parse().unwrap();
    let with = |amax| {
        let context = ScaleContext { amax, ..ScaleContext::default() };
        quantize_within(SourceRows::Floats(&weights), [2, 3], (scheme, Dtype::Bf16), None, context).unwrap().0
    };
    assert_eq!(with(None).scales, [Dtype::Bf16.round(2.0 / 448.0); 2]);
    assert_eq!(with(Some(7.0)).scales, [Dtype::Bf16.round(7.0 / 448.0); 2]);
    assert_eq!(with(Some(0.1)).scales, with(None).scales, "the weight's own values must be in range");
    assert_eq!(with(Some(7.0)).stored_scales().unwrap().len(), 1);
    let nv: LinearScheme = "wf4a16-g16-nv".parse().unwrap();
    let context = ScaleContext { amax: Some(28.0), ..ScaleContext::default() };
    let weights = vec![1.0; 16];
    let (tensor, _) =
        quantize_within(SourceRows::Floats(&weights), [1, 16], (nv, Dtype::F8E4M3), None, context).unwrap();
    assert_eq!(tensor.global, Some(96.0));
    assert_eq!(tensor.dequantize().unwrap(), weights);
}

#[test]
fn zeros_and_extremes() {
    for (scheme, scale) in [
        ("wf8a16-tensor", 1.0),
        ("wf8a16-b128", 1.0),
        ("wf4a16-g16-nv", 0.125),
        ("wf4a16-g32-mx", 2.0_f32.powi(-127)),
        ("wf8a16-g32-mx", 2.0_f32.powi(-127)),
    ] {
        let mut weights = vec![0.0; 64];
        let tensor = quantize(&weights, [1, 64], scheme, ScaleSearch::Sweep);
        assert!(tensor.codes.iter().all(|c| *c == 0), "{scheme}");
        assert!(tensor.scales.iter().all(|s| *s == scale), "{scheme}: {:?}", tensor.scales);
        assert!(tensor.require_storable("m").is_ok(), "{scheme}");
        weights[5] = -0.0;
        assert_eq!(quantize(&weights, [1, 64], scheme, ScaleSearch::Sweep).dequantize().unwrap(), [0.0; 64]);
        for size in [f32::from_bits(1), 1e-40, 1e-37, 1e-30, 1e-10, 1.0, 1e10, 1e30, 1e38] {
            let weights: Vec<f32> = (0..64).map(|i| size * (i as f32 / 63.0)).collect();
            let tensor = quantize(&weights, [1, 64], scheme, ScaleSearch::Sweep);
            tensor.require_storable("m").unwrap_or_else(|e| panic!("{scheme} {size}: {e}"));
            let values = tensor.dequantize().unwrap();
            assert!(values.iter().all(|v| v.is_finite() && *v >= 0.0), "{scheme} {size}");
            if size > 1e-34 {
                let error = (f64::from(values[63]) / f64::from(size) - 1.0).abs();
                assert!(error < 0.26, "{scheme} {size}: {}", values[63]);
            }
        }
    }
    for bad in [f32::NAN, f32::INFINITY] {
        let mut weights = vec![1.0; 64];
        weights[40] = bad;
        for scheme in ["wf8a16-tensor", "wf8a16-b128", "wf4a16-g16-nv", "wf8a16-g32-mx"] {
            let scheme: LinearScheme = scheme.parse().unwrap();
            let rows = SourceRows::Floats(&weights);
            let refused = quantize_within(
                rows,
                [1, 64],
                (scheme, scheme.scale_dtype(Dtype::Bf16)),
                None,
                ScaleContext::default(),
            );
            assert_eq!(refused.unwrap_err(), RowsError::NonFinite { count: 1, first_index: 40 }, "{scheme}");
        }
    }
}

/// The rules of the MX formats at the mantissas where they change.
#[test]
fn powers_of_two() {
    let scale = |amax: f32, format| super::super::grid::power_of_two(amax, format);
    for exponent in [-100, -1, 0, 1, 100] {
        let unit = 2.0_f32.powi(exponent);
        for (mantissa, four, eight) in [
            (1.0, 0, 0),
            (1.5, 0, 0),
            (1.75_f32.next_down(), 0, 0),
            (1.75, 1, 0),
            (1.75_f32.next_up(), 1, 1),
            (1.999, 1, 1),
        ] {
            let of = |raised: i32, largest: i32| 2.0_f32.powi(exponent - largest + raised);
            assert_eq!(scale(unit * mantissa, FloatFormat::E2m1), of(four, 2), "{mantissa}");
            assert_eq!(scale(unit * mantissa, FloatFormat::E4m3), of(eight, 8), "{mantissa}");
        }
    }
    for format in FloatFormat::ALL {
        assert_eq!(scale(0.0, format), 2.0_f32.powi(-127));
        assert_eq!(scale(f32::MIN_POSITIVE, format), 2.0_f32.powi(-127));
    }
    let rule = GridRule::new("wf8a16-g32-mx".parse().unwrap(), ScaleFormat::E8m0).unwrap();
    for i in 1..1000 {
        let amax = i as f32 * 0.013;
        let grid = rule.fit(Extent { min: 0.0, max: amax }).unwrap();
        assert!(amax / grid.scale() <= 448.0 && amax / grid.scale() > 224.0, "{amax}");
    }
}

#[test]
fn threads_and_bytes_do_not_change_a_bit() {
    let shape = [300, 192];
    let weights: Vec<f32> = gaussian(shape[0] * shape[1]).iter().map(|w| Dtype::Bf16.round(*w)).collect();
    let bytes = Dtype::Bf16.narrow(&weights);
    for scheme in ["wf8a16-tensor", "wf8a16-b128", "wf4a16-g16-nv", "wf4a16-g32-mx"] {
        let scheme: LinearScheme = scheme.parse().unwrap();
        let dtype = scheme.scale_dtype(Dtype::Bf16);
        let whole = quantize_rtn("w", &weights, shape, scheme, dtype, None).unwrap();
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let rows = SourceRows::Bytes(&bytes, Dtype::Bf16);
            let context = ScaleContext::default();
            let again =
                pool.install(|| quantize_within(rows, shape, (scheme, dtype), None, context)).unwrap();
            assert_eq!(again.0, whole);
            assert_eq!(again.1, ErrorStats::of(&weights, &whole).unwrap());
            let mut faked = weights.clone();
            pool.install(|| super::super::fake_quantize(&mut faked, shape[1], scheme, dtype, None)).unwrap();
            assert_eq!(faked, whole.dequantize().unwrap());
        }
    }
}
