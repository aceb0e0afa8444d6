//! Tests of round-to-nearest on matrices: compared with single groups, in parts, on any pool, and with weights that
//! cannot be quantized.

use proptest::prelude::*;

use super::*;
use crate::Error;
use crate::quantize::grid::GridError;
use crate::scheme::{Granularity, ScaleFormat, WeightFormat};

/// Deterministic weights like a layer's: mostly small, a few large.
fn weights(n: usize, k: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n * k)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let u = (state >> 40) as f32 / (1u32 << 24) as f32 - 0.5;
            u * u * u * 0.3
        })
        .collect()
}

fn scheme(text: &str) -> LinearScheme {
    text.parse().unwrap()
}

#[test]
fn every_group_gets_its_own_grid() {
    let (n, k) = (5, 96);
    let weights = weights(n, k, 1);
    for text in ["w3a16-g32", "w4a16-g32-asym", "w8a16-channel", "w4a16-channel-asym", "wf8a16"] {
        let scheme = scheme(text);
        let tensor = quantize_rtn("t", &weights, [n, k], scheme, Dtype::Bf16, None).unwrap();
        let size = scheme.granularity.group_size(k);
        let rule = GridRule::new(scheme, ScaleFormat::Bf16).unwrap();
        assert_eq!(tensor.scales.len(), n * k / size);
        assert_eq!(tensor.zeros.is_none(), scheme.is_symmetric());
        for (g, part) in weights.chunks(size).enumerate() {
            let grid = rule.fit(Extent::of(part).unwrap()).unwrap();
            assert_eq!(tensor.scales[g], grid.scale());
            assert_eq!(tensor.zeros.as_ref().map_or(grid.zero(), |z| z[g]), grid.zero());
            for (i, &w) in part.iter().enumerate() {
                assert_eq!(tensor.codes[g * size + i], grid.code(w), "{text} group {g} weight {i}");
            }
        }
        let mut faked = weights.clone();
        fake_quantize(&mut faked, k, scheme, Dtype::Bf16, None).unwrap();
        assert_eq!(tensor.dequantize().unwrap(), faked);
    }
}

#[test]
fn bytes_in_parts_give_the_same_as_values_at_once() {
    // A task has 64 rows, so the matrix and its parts are split into tasks differently.
    let (n, k) = (150, 1024);
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
        let bytes = dtype.narrow(&weights(n, k, 2));
        let mut widened = vec![0.0; n * k];
        dtype.widen(&bytes, &mut widened);
        let scheme = scheme("w4a16-asym");
        let whole = quantize_rtn("t", &widened, [n, k], scheme, Dtype::F16, None).unwrap();
        let groups = k / 128;
        let (mut codes, mut scales, mut zeros) = (vec![0; n * k], vec![0.0; n * groups], vec![0; n * groups]);
        for (from, to) in [(0, 1), (1, 1), (1, 90), (90, n)] {
            let out = QuantizedRows {
                codes: &mut codes[from * k..to * k],
                scales: &mut scales[from * groups..to * groups],
                zeros: Some(&mut zeros[from * groups..to * groups]),
                rows: None,
            };
            let rows = SourceRows::Bytes(&bytes[from * k * dtype.size()..to * k * dtype.size()], dtype);
            quantize_rows(rows, k, scheme, Dtype::F16, None, out).unwrap();
        }
        assert_eq!((codes, scales, Some(zeros)), (whole.codes, whole.scales, whole.zeros));
    }
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let (n, k) = (200, 1024);
    let weights = weights(n, k, 3);
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut faked = weights.clone();
            fake_quantize(&mut faked, k, scheme("w3a16-g64"), Dtype::F16, None).unwrap();
            (quantize_rtn("t", &weights, [n, k], scheme("w4a16-asym"), Dtype::F16, None).unwrap(), faked)
        })
    };
    let one = run(1);
    assert_eq!(run(2), one);
    assert_eq!(run(7), one);
}

#[test]
fn clipping_is_clamping_first() {
    let (n, k) = (4, 64);
    let weights = weights(n, k, 4);
    let clip: Vec<f32> = (0..n * 2).map(|g| [f32::INFINITY, 0.01, 0.004, 0.0][g % 4]).collect();
    let mut clamped = weights.clone();
    for (part, &m) in clamped.chunks_mut(32).zip(&clip) {
        part.iter_mut().for_each(|w| *w = w.clamp(-m, m));
    }
    for text in ["w4a16-g32", "w3a16-g32-asym"] {
        let scheme = scheme(text);
        let expected = quantize_rtn("t", &clamped, [n, k], scheme, Dtype::F16, None).unwrap();
        let clipped = quantize_rtn("t", &weights, [n, k], scheme, Dtype::F16, Some(&clip)).unwrap();
        assert_eq!(clipped, expected);
        let mut faked = weights.clone();
        fake_quantize(&mut faked, k, scheme, Dtype::F16, Some(&clip)).unwrap();
        assert_eq!(faked, expected.dequantize().unwrap());
    }
}

#[test]
fn non_finite_weights_are_counted_across_tasks() {
    let (n, k) = (300, 512);
    let mut weights = weights(n, k, 5);
    let at = [3 * k + 77, 3 * k + 78, 299 * k + 511];
    weights[at[0]] = f32::NAN;
    weights[at[1]] = f32::INFINITY;
    weights[at[2]] = f32::NEG_INFINITY;
    weights[k] = 1e30; // also overflows; non-finite weights are reported first
    let expected = RowsError::NonFinite { count: 3, first_index: at[0] as u64 };
    let clip = vec![1.0; n * 4];
    for clip in [None, Some(&clip[..])] {
        let mut faked = weights.clone();
        assert_eq!(
            fake_quantize(&mut faked, k, scheme("w4a16"), Dtype::F16, clip),
            Err(expected.clone()),
            "a clip does not hide infinity"
        );
    }
    let error = quantize_rtn("a.weight", &weights, [n, k], scheme("w4a16"), Dtype::F16, None).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("tensor `a.weight`: 3 non-finite values, the first at index {}", at[0])
    );
    let located = expected.shifted(10, k).within("a.weight", Some("model.safetensors".into()));
    match located {
        Error::NonFinite { count: 3, first_index, .. } => assert_eq!(first_index as usize, at[0] + 10 * k),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_overflow_names_tensor_row_and_group() {
    let (n, k) = (200, 512);
    let mut weights = weights(n, k, 6);
    weights[150 * k + 300] = 1e30;
    weights[199 * k] = 1e30;
    let error = quantize_rtn("a.weight", &weights, [n, k], scheme("w4a16"), Dtype::F16, None).unwrap_err();
    assert!(matches!(error, Error::Numeric { .. }));
    let text = error.to_string();
    assert!(text.starts_with("tensor `a.weight`: row 150, group 2: weights from"), "{text}");
    assert!(text.contains("F16"), "{text}");
    assert!(quantize_rtn("a.weight", &weights, [n, k], scheme("w4a16"), Dtype::Bf16, None).is_ok());
    let shifted = RowsError::Grid { row: 1, group: 2, source: GridError::NonFinite }.shifted(5, k);
    assert_eq!(shifted, RowsError::Grid { row: 6, group: 2, source: GridError::NonFinite });
}

#[test]
fn an_outlier_costs_its_group_only() {
    let k = 256;
    let mut weights = weights(1, k, 7);
    weights[200] = 60000.0;
    let tensor = quantize_rtn("t", &weights, [1, k], scheme("w4a16"), Dtype::F16, None).unwrap();
    let back = tensor.dequantize().unwrap();
    assert!(back[128..].iter().enumerate().all(|(i, &v)| (v != 0.0) == (i == 72)));
    assert!(back[..128].iter().zip(&weights).all(|(v, w)| (v - w).abs() <= tensor.scales[0]));
}

#[test]
fn requests_that_do_not_fit() {
    let run = |len: usize, shape, text: &str, dtype, clip: Option<&[f32]>| {
        quantize_rtn("t", &vec![0.5; len], shape, scheme(text), dtype, clip).unwrap_err()
    };
    let f16 = Dtype::F16;
    assert!(matches!(run(96, [1, 96], "w4a16", f16, None), Error::GroupSizeDoesNotDivide(_)));
    assert!(matches!(run(64, [1, 64], "w4a16", f16, None), Error::GroupSizeDoesNotDivide(_)));
    assert!(matches!(run(0, [4, 0], "w4a16-channel", f16, None), Error::GroupSizeDoesNotDivide(_)));
    assert!(matches!(run(128, [2, 128], "w4a16", f16, None), Error::Internal(_)));
    assert!(matches!(run(129, [1, 128], "w4a16", f16, None), Error::Internal(_)));
    assert!(matches!(run(128, [1, 128], "w4a16", Dtype::I32, None), Error::Usage { .. }));
    assert!(matches!(run(128, [1, 128], "w4a16", f16, Some(&[1.0; 2])), Error::Internal(_)));
    assert!(matches!(run(128, [1, 128], "w4a16", f16, Some(&[-1.0])), Error::Internal(_)));
    assert!(matches!(run(128, [1, 128], "w4a16", f16, Some(&[f32::NAN])), Error::Internal(_)));

    let mut codes = vec![0; 128];
    let mut rows = |rows, scales: &mut [f32], zeros: Option<&mut [u8]>, text| {
        let out = QuantizedRows { codes: &mut codes, scales, zeros, rows: None };
        quantize_rows(rows, 128, scheme(text), f16, None, out).unwrap_err()
    };
    let floats = [0.5; 128];
    for error in [
        rows(SourceRows::Floats(&floats), &mut [0.0; 2], None, "w4a16"),
        rows(SourceRows::Floats(&floats), &mut [0.0], Some(&mut [0]), "w4a16"),
        rows(SourceRows::Floats(&floats), &mut [0.0], None, "w4a16-asym"),
        rows(SourceRows::Bytes(&[0; 255], Dtype::F16), &mut [0.0], None, "w4a16"),
        rows(SourceRows::Bytes(&[0; 128], Dtype::U8), &mut [0.0], None, "w4a16"),
    ] {
        assert!(matches!(error, RowsError::Layout(_)), "{error:?}");
    }
}

#[test]
fn zero_rows_are_allowed() {
    let tensor = quantize_rtn("t", &[], [0, 128], scheme("w4a16-asym"), Dtype::F16, None).unwrap();
    assert_eq!((tensor.codes.len(), tensor.scales.len(), tensor.zeros), (0, 0, Some(vec![])));
}

proptest! {
    #[test]
    fn any_scheme_comes_back_within_a_step(
        n in 0usize..4, groups in 1usize..4, size in 1usize..40, bits in 2u8..=8, symmetric: bool, seed: u64,
    ) {
        let k = groups * size;
        let weights = weights(n, k, seed);
        let scheme = LinearScheme::weight_only(WeightFormat::int(bits, symmetric), Granularity::Group(size));
        let tensor = quantize_rtn("t", &weights, [n, k], scheme, Dtype::F32, None).unwrap();
        prop_assert!(tensor.codes.iter().all(|&c| c <= scheme.max_code()));
        let back = tensor.dequantize().unwrap();
        for (i, (v, w)) in back.iter().zip(&weights).enumerate() {
            let scale = tensor.scales[i / size];
            prop_assert!((v - w).abs() <= scale * 1.0001);
        }
    }
}

#[test]
fn floating_point_rows_are_clipped_and_measured() {
    let (n, k) = (4, 64);
    let mut weights = weights(n, k, 9);
    weights[k..2 * k].fill(0.0);
    let scheme = scheme("wf8a16");
    let bounds = [f32::INFINITY, 0.5, 0.01, f32::INFINITY];
    let (tensor, stats) =
        quantize_tensor(SourceRows::Floats(&weights), [n, k], scheme, Dtype::Bf16, Some(&bounds)).unwrap();
    assert_eq!(tensor.scales[1], 1.0, "a row of zeros");
    assert!(tensor.codes[k..2 * k].iter().all(|code| code & 0x7f == 0));
    assert_eq!(tensor.scales[2], Dtype::Bf16.round(0.01_f32.min(2.0) / 448.0));
    assert_eq!(stats, ErrorStats::of(&weights, &tensor).unwrap());
    tensor.require_storable("t").unwrap();
    let mut faked = weights.clone();
    fake_quantize(&mut faked, k, scheme, Dtype::Bf16, Some(&bounds)).unwrap();
    assert_eq!(tensor.dequantize().unwrap(), faked);
    weights[5] = f32::NAN;
    let refused = quantize_tensor(SourceRows::Floats(&weights), [n, k], scheme, Dtype::Bf16, None);
    assert_eq!(refused.unwrap_err(), RowsError::NonFinite { count: 1, first_index: 5 });
}
