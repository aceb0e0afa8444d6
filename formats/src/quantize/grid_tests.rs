//! Tests of the grid: the definition by hand, its edge cases, and the fast loops against the definition.

use proptest::prelude::*;

use super::*;
use crate::scheme::Granularity;

fn rule(bits: u8, symmetric: bool, scale_dtype: Dtype) -> GridRule {
    GridRule::new(
        LinearScheme::weight_only(WeightFormat::int(bits, symmetric), Granularity::Channel),
        ScaleFormat::of(scale_dtype).unwrap(),
    )
    .unwrap()
}

fn fit(rule: GridRule, weights: &[f32]) -> Result<Grid, GridError> {
    rule.fit(Extent::of(weights).ok_or(GridError::NonFinite)?)
}

fn encode(grid: Grid, weights: &[f32]) -> Vec<u8> {
    let mut codes = vec![0; weights.len()];
    grid.encode(weights, &mut codes);
    codes
}

#[test]
fn symmetric_four_bits_by_hand() {
    // The positive end saturates one step below the negative one.
    let weights = [-7.5, -7.4, -0.5, -0.0, 0.0, 0.4, 0.5, 1.5, 2.5, 7.5];
    let grid = fit(rule(4, true, Dtype::F16), &weights).unwrap();
    assert_eq!((grid.scale(), grid.zero()), (1.0, 8));
    assert_eq!(encode(grid, &weights), [0, 1, 8, 8, 8, 8, 8, 10, 10, 15]);
}

#[test]
fn asymmetric_four_bits_by_hand() {
    let weights = [-3.0, -1.5, -0.5, 0.0, 0.5, 2.5, 12.0];
    let grid = fit(rule(4, false, Dtype::Bf16), &weights).unwrap();
    assert_eq!((grid.scale(), grid.zero()), (1.0, 3));
    assert_eq!(encode(grid, &weights), [0, 1, 3, 3, 3, 5, 15]);
    assert_eq!(grid.value(0), -3.0);
    assert_eq!(grid.value(15), 12.0);
}

#[test]
fn three_and_eight_bits_by_hand() {
    let three = fit(rule(3, true, Dtype::F32), &[3.5, -3.5, 1.0]).unwrap();
    assert_eq!((three.scale(), three.zero()), (1.0, 4));
    assert_eq!(encode(three, &[3.5, -3.5, 1.0]), [7, 0, 5]);
    let eight = fit(rule(8, true, Dtype::F32), &[127.5, -127.5, 64.5]).unwrap();
    assert_eq!((eight.scale(), eight.zero()), (1.0, 128));
    assert_eq!(encode(eight, &[127.5, -127.5, 64.5]), [255, 0, 192]);
    let eight = fit(rule(8, false, Dtype::F32), &[255.0, 0.5, 1.5]).unwrap();
    assert_eq!((eight.scale(), eight.zero()), (1.0, 0));
    assert_eq!(encode(eight, &[255.0, 0.5, 1.5]), [255, 0, 2]);
}

#[test]
fn the_range_of_an_asymmetric_grid_includes_zero() {
    let above = fit(rule(4, false, Dtype::F32), &[10.0, 15.0]).unwrap();
    assert_eq!((above.scale(), above.zero()), (1.0, 0));
    let below = fit(rule(4, false, Dtype::F32), &[-10.0, -15.0]).unwrap();
    assert_eq!((below.scale(), below.zero()), (1.0, 15));
    assert_eq!(encode(below, &[-10.0, -15.0]), [5, 0]);
}

#[test]
fn codes_follow_the_rounded_scale() {
    // 0.7 / 7.5 is not exact in BF16; codes must come from the stored scale.
    let grid = fit(rule(4, true, Dtype::Bf16), &[0.7, -0.1]).unwrap();
    assert_eq!(grid.scale(), Dtype::Bf16.round(0.7 / 7.5));
    assert_ne!(grid.scale(), 0.7 / 7.5);
    for w in [0.7f32, -0.1, 0.14, 0.0467] {
        let expected = ((w / grid.scale()).round_ties_even() as i32 + 8).clamp(0, 15);
        assert_eq!(i32::from(grid.code(w)), expected);
    }
}

#[test]
fn zeros_of_either_sign_come_back_as_zeros() {
    for (symmetric, zero) in [(true, 8), (false, 0)] {
        let weights = [0.0, -0.0, 0.0];
        let grid = fit(rule(4, symmetric, Dtype::F16), &weights).unwrap();
        assert_eq!((grid.scale(), grid.zero()), (1.0, zero));
        assert_eq!(encode(grid, &weights), [zero; 3]);
        assert_eq!(grid.value(zero).to_bits(), 0, "and positive");
    }
    let empty = fit(rule(4, true, Dtype::F16), &[]).unwrap();
    assert_eq!(empty.scale(), 1.0);
}

#[test]
fn constant_groups_have_a_finite_grid() {
    for c in [1.0f32, -1.0, 3e-3, -6e4] {
        let sym = fit(rule(4, true, Dtype::F32), &[c; 5]).unwrap();
        // The weight is 7.5 steps from zero. On the positive side it saturates at 7; on the negative side, the rounding
        // of the scale decides between 7 and 8.
        let code = sym.code(c);
        assert!(if c > 0.0 { code == 15 } else { code <= 1 });
        assert!(((sym.value(code) - c) / c).abs() <= 0.5 / 7.5 + 1e-6);
        let asym = fit(rule(4, false, Dtype::F32), &[c; 5]).unwrap();
        assert_eq!(asym.code(c), if c > 0.0 { 15 } else { 0 });
        assert!(((asym.value(asym.code(c)) - c) / c).abs() < 1e-6);
    }
}

#[test]
fn an_underflowing_scale_becomes_the_smallest_of_its_type() {
    for (dtype, smallest) in
        [(Dtype::F16, 2f32.powi(-24)), (Dtype::Bf16, 2f32.powi(-133)), (Dtype::F32, f32::from_bits(1))]
    {
        let tiny = (smallest / 4.0).max(f32::from_bits(1));
        for symmetric in [true, false] {
            let grid = fit(rule(4, symmetric, dtype), &[tiny, -tiny]).unwrap();
            assert_eq!(grid.scale(), smallest, "{dtype}");
            let back = grid.value(grid.code(tiny));
            assert!((back - tiny).abs() <= smallest / 2.0, "{dtype}: {tiny:e} became {back:e}");
        }
    }
}

#[test]
fn subnormal_weights_and_scales_stay_finite() {
    let weights: Vec<f32> = (0..16).map(|i| f32::from_bits(1 << i)).collect();
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
        for (bits, symmetric) in [(3, true), (4, false), (8, true)] {
            let grid = fit(rule(bits, symmetric, dtype), &weights).unwrap();
            assert!(grid.scale() > 0.0 && grid.scale().is_finite());
            assert!(weights.iter().all(|&w| grid.value(grid.code(w)).is_finite()));
        }
    }
}

#[test]
fn overflow_is_an_error_not_infinity() {
    let f16 = rule(4, true, Dtype::F16);
    assert!(matches!(fit(f16, &[1e6]), Err(GridError::Overflow { .. })));
    // The scale fits, but 8 times the scale does not: an implementation that computes in F16 would get −inf …
    assert!(matches!(fit(f16, &[-65472.0]), Err(GridError::Overflow { .. })));
    // … while 7 times the scale, on the positive side, fits; so does a scale that was rounded up.
    assert!(fit(f16, &[65472.0]).is_ok());
    assert!(fit(f16, &[-65504.0]).is_ok());
    assert!(fit(f16, &[60000.0, -60000.0]).is_ok());
    // (max − min) itself overflows.
    let f32_rule = rule(8, false, Dtype::F32);
    assert!(matches!(fit(f32_rule, &[3e38, -3e38]), Err(GridError::Overflow { .. })));
    assert!(fit(rule(8, true, Dtype::F32), &[f32::MAX]).is_ok());
    assert!(fit(rule(8, true, Dtype::Bf16), &[f32::MAX, -f32::MAX]).is_err());
}

#[test]
fn weights_that_are_not_finite_have_no_grid() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0xffff_ffff)] {
        for at in [0, 3, 15, 16, 20] {
            let mut weights = [0.5; 21];
            weights[at] = bad;
            assert_eq!(fit(rule(4, true, Dtype::F16), &weights), Err(GridError::NonFinite));
        }
    }
    assert!(Extent::of(&[f32::MAX, -f32::MAX, f32::from_bits(1)]).is_some());
}

#[test]
fn rules_that_cannot_be() {
    let scheme = |bits| LinearScheme::weight_only(WeightFormat::int(bits, true), Granularity::Channel);
    for bits in [0, 1, 9, 255] {
        assert!(matches!(GridRule::new(scheme(bits), ScaleFormat::F16), Err(Error::Usage { .. })));
    }
    for scale in [ScaleFormat::E8m0, ScaleFormat::E4m3] {
        assert!(matches!(GridRule::new(scheme(4), scale), Err(Error::Usage { .. })));
    }
    assert!(matches!(ScaleFormat::of(Dtype::I8), Err(Error::Usage { .. })));
}

#[test]
fn clipping() {
    let mut weights = [3.0, -3.0, 0.5, -0.0];
    clip(&mut weights, f32::INFINITY);
    assert_eq!(weights, [3.0, -3.0, 0.5, 0.0]);
    clip(&mut weights, 1.0);
    assert_eq!(weights, [1.0, -1.0, 0.5, 0.0]);
    clip(&mut weights, 0.0);
    assert_eq!(weights, [0.0; 4]);
}

fn weights() -> impl Strategy<Value = Vec<f32>> {
    let weight = prop_oneof![
        4 => -1f32..1.0,
        1 => (-8i8..8).prop_map(|i| f32::from(i) / 2.0),
        1 => any::<u16>().prop_map(|b| half::bf16::from_bits(b).to_f32())
            // At 2 bits the grid extends a third beyond the largest weight, and must stay in F16.
            .prop_filter("far from both ends of f32", |w| w.abs() < 4e4 && w.abs() > 1e-30),
        1 => Just(-0.0),
    ];
    prop::collection::vec(weight, 0..70)
}

proptest! {
    #[test]
    fn fast_loops_are_the_definition(weights in weights(), bits in 2u8..=8, symmetric: bool, dtype in 0..3usize) {
        let dtype = [Dtype::F16, Dtype::Bf16, Dtype::F32][dtype];
        let grid = fit(rule(bits, symmetric, dtype), &weights).unwrap();
        let max = (1i32 << bits) - 1;
        prop_assert!(grid.scale() > 0.0);
        prop_assert_eq!(dtype.round(grid.scale()), grid.scale());
        let codes = encode(grid, &weights);
        let mut faked = weights.clone();
        grid.fake_quantize(&mut faked);
        for ((&w, &code), &fake) in weights.iter().zip(&codes).zip(&faked) {
            let expected = ((w / grid.scale()).round_ties_even() as i32 + i32::from(grid.zero())).clamp(0, max);
            prop_assert_eq!(i32::from(code), expected);
            prop_assert_eq!(grid.code(w), code);
            prop_assert_eq!(grid.value(code).to_bits(), fake.to_bits());
        }
    }

    #[test]
    fn the_error_is_half_a_step_inside_the_grid(weights in weights(), bits in 2u8..=8, symmetric: bool) {
        let grid = fit(rule(bits, symmetric, Dtype::F32), &weights).unwrap();
        let s = f64::from(grid.scale());
        for &w in &weights {
            let code = grid.code(w);
            let saturated = code == 0 || i32::from(code) == (1 << bits) - 1;
            let error = (f64::from(grid.value(code)) - f64::from(w)).abs();
            // The symmetric grid lacks half a step at its positive end. A rounded zero point may move an asymmetric
            // grid as much.
            let bound = if saturated { 1.0 } else { 0.5 };
            prop_assert!(error <= s * bound * 1.0001, "{} steps", error / s);
        }
    }

    #[test]
    fn extents_are_those_of_a_plain_loop(weights in weights()) {
        let min = weights.iter().copied().fold(0.0, f32::min);
        let max = weights.iter().copied().fold(0.0, f32::max);
        prop_assert_eq!(Extent::of(&weights), Some(Extent { min, max }));
    }
}

fn float_rule(scale_dtype: Dtype) -> GridRule {
    let scheme = LinearScheme::weight_only(WeightFormat::Float(FloatFormat::E4m3), Granularity::Channel);
    GridRule::new(scheme, ScaleFormat::of(scale_dtype).unwrap()).unwrap()
}

#[test]
fn floating_point_by_hand() {
    let weights = [-896.0, 2.0, 0.0, 3.0, 500.0, -0.001];
    let grid = fit(float_rule(Dtype::Bf16), &weights).unwrap();
    assert_eq!((grid.scale(), grid.zero()), (2.0, 0));
    assert_eq!(encode(grid, &weights), [0xfe, 0x38, 0x00, 0x3c, 0x78, 0x80]);
    let mut values = weights;
    grid.fake_quantize(&mut values);
    assert_eq!(values, [-896.0, 2.0, 0.0, 3.0, 512.0, 0.0]);
    assert_eq!(grid.limits(), (-448.0, 448.0));
}

#[test]
fn floating_point_at_the_edges() {
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
        let rule = float_rule(dtype);
        let zeros = fit(rule, &[0.0, -0.0]).unwrap();
        assert_eq!((zeros.scale(), encode(zeros, &[0.0, -0.0])), (1.0, vec![0x00, 0x80]));
        let tiny = f32::from_bits(1);
        let grid = fit(rule, &[tiny]).unwrap();
        assert_eq!(grid.scale(), smallest_positive(dtype));
        assert!(grid.value(grid.code(tiny)).is_finite());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(fit(rule, &[1.0, bad]), Err(GridError::NonFinite));
        }
    }
    // The F16 maximum is 65504, which 448 times a rounded-up scale exceeds.
    assert!(fit(float_rule(Dtype::F16), &[65408.0]).is_ok());
    assert!(matches!(fit(float_rule(Dtype::F16), &[65504.0]), Err(GridError::Overflow { .. })));
    assert!(matches!(fit(float_rule(Dtype::F16), &[7e4]), Err(GridError::Overflow { .. })));
    assert!(fit(float_rule(Dtype::F32), &[f32::MAX]).is_ok());
}

proptest! {
    #[test]
    fn floating_point_loops_are_the_definition(weights in weights(), dtype in 0..3usize) {
        let dtype = [Dtype::F16, Dtype::Bf16, Dtype::F32][dtype];
        let grid = fit(float_rule(dtype), &weights).unwrap();
        prop_assert_eq!(dtype.round(grid.scale()), grid.scale());
        let largest = weights.iter().fold(0.0_f32, |max, w| max.max(w.abs()));
        if largest > 0.0 {
            let exact = dtype.round(largest / 448.0);
            prop_assert_eq!(grid.scale(), if exact == 0.0 { smallest_positive(dtype) } else { exact });
        }
        let codes = encode(grid, &weights);
        let (mut faked, mut decoded) = (weights.clone(), vec![0.0; weights.len()]);
        grid.fake_quantize(&mut faked);
        grid.decode(&codes, &mut decoded);
        let (mut quantized, mut values) = (vec![0; weights.len()], vec![0.0; weights.len()]);
        grid.quantize(&weights, &mut quantized, &mut values);
        prop_assert_eq!(&quantized, &codes);
        for (i, (&w, &code)) in weights.iter().zip(&codes).enumerate() {
            prop_assert_eq!(values[i].to_bits(), decoded[i].to_bits());
            prop_assert_eq!(grid.code(w), code);
            prop_assert!(FloatFormat::E4m3.is_number(code));
            prop_assert_eq!(grid.value(code).to_bits(), faked[i].to_bits());
            prop_assert_eq!(decoded[i].to_bits(), faked[i].to_bits());
            let (w, s) = (f64::from(w), f64::from(grid.scale()));
            if w.abs() > 448.0 * s {
                prop_assert_eq!(faked[i], (448.0 * grid.scale()).copysign(weights[i]));
            } else {
                // Half a unit of the three-bit mantissa, or half of the smallest step.
                let bound = (w.abs() / 16.0).max(s * 2.0_f64.powi(-10)) * 1.001;
                prop_assert!((f64::from(faked[i]) - w).abs() <= bound, "{} became {}", w, faked[i]);
            }
        }
    }
}
