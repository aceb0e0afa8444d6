//! The fast solver, compared with the definition.

use proptest::prelude::*;

use super::reference::{Row, chain, damped};
use super::*;
use crate::checkpoint::Dtype;
use crate::quantize::grid::GridRule;
use crate::quantize::layer_inputs::LayerInputs;
use crate::quantize::{QuantizedTensor, RowsError, SourceRows, fake_quantize, quantize_rtn};
use crate::scheme::{LinearScheme, ScaleFormat, WeightFormat};

fn noise(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }
}

/// Inputs with correlated channels of different magnitudes; some may be dead.
fn inputs(tokens: usize, k: usize, seed: u64, dead: &[usize]) -> Vec<f32> {
    let mut next = noise(seed);
    let mut x = Vec::with_capacity(tokens * k);
    for _ in 0..tokens {
        let common: [f32; 3] = std::array::from_fn(|_| next());
        for c in 0..k {
            let size = if c % 17 == 3 { 12.0 } else { 1.0 + (c % 5) as f32 * 0.3 };
            let value = size * (common[c % 3] + 0.5 * next());
            x.push(if dead.contains(&c) { 0.0 } else { value });
        }
    }
    x
}

fn weights(n: usize, k: usize, seed: u64) -> Vec<f32> {
    let mut next = noise(seed ^ 0xabcd);
    (0..n * k).map(|_| 0.05 * (next() + next() + next())).collect()
}

fn hessian(x: &[f32], k: usize) -> Hessian {
    let mut hessian = Hessian::new(k).unwrap();
    hessian.add(x);
    hessian.finish();
    hessian
}

fn factor(hessian: &Hessian, settings: GptqSettings, group_size: usize) -> Factor {
    let columns = settings.act_order.columns(&hessian.diagonal(), group_size);
    Factor::new(hessian, columns, settings.damping).unwrap()
}

const ORDERS: [ActOrder; 3] = [ActOrder::None, ActOrder::StaticGroups, ActOrder::GroupAware];

/// Checks a solve against the definition: every code is the nearest one to the weight after the updates of earlier
/// columns, up to an error of about `k` roundings in `f32`, and the loss is that of the definition.
fn held(n: usize, k: usize, scheme: &str, settings: GptqSettings, seed: u64, dead: &[usize]) {
    let scheme: LinearScheme = scheme.parse().unwrap();
    let group_size = scheme.granularity.group_size(k);
    let (h, w) = (hessian(&inputs(3 * k, k, seed, dead), k), weights(n, k, seed));
    let factor = factor(&h, settings, group_size);
    let Solved { tensor, loss } =
        solve(SourceRows::Floats(&w), [n, k], scheme, Dtype::F32, None, &factor, settings).unwrap();
    tensor.require_storable("m").unwrap();
    let upper = chain(&damped(&h, factor.columns(), factor.damping()), k);
    let rule = GridRule::new(scheme, ScaleFormat::F32).unwrap();
    let zero_points = vec![1 << (scheme.bits() - 1); k / group_size];
    let mut exact = 0.0;
    for (r, row) in w.chunks_exact(k).enumerate() {
        let groups = r * (k / group_size)..(r + 1) * (k / group_size);
        let zeros = tensor.zeros.as_ref().map_or(&zero_points[..], |z| &z[groups.clone()]);
        let prescribed = (&tensor.codes[r * k..(r + 1) * k], &tensor.scales[groups], zeros);
        let (order, columns) = (settings.act_order, factor.columns());
        let row = Row { weights: row, rule, group_size, order, columns, upper: &upper };
        let outcome = row.quantize(Some(prescribed));
        // The distance from the nearest code is off by the weight's error divided by the scale. Weights have at most k
        // rounded updates, codes at most 2^bits steps. If updates cancel the weights of a group, its scale is small,
        // but errors are relative to the weights before.
        let largest = row.weights.iter().fold(0.0_f32, |max, w| max.max(w.abs()));
        let narrowest = prescribed.1.iter().fold(f32::INFINITY, |min, s| min.min(*s));
        let cancelled = (2.0 * largest / (narrowest * f32::from(scheme.max_code()))).max(1.0);
        let bound =
            4.0 * k as f64 * f64::from(f32::EPSILON) * f64::from(scheme.max_code()) * f64::from(cancelled);
        assert!(outcome.beyond <= bound, "{scheme} {settings:?}: {} steps", outcome.beyond);
        assert!(outcome.scale_off <= bound, "{scheme} {settings:?}: scale off by {}", outcome.scale_off);
        exact += outcome.loss / n as f64;
    }
    // A loss close to 0 is dominated by the rounding of the weights themselves.
    let diagonal = h.diagonal();
    let energy: f64 = w.iter().enumerate().map(|(i, w)| f64::from(*w).powi(2) * diagonal[i % k]).sum();
    let rounding = (4.0 * k as f64 * f64::from(f32::EPSILON)).powi(2) * energy / n as f64;
    assert!(
        (loss - exact).abs() <= 1e-4 * exact + rounding,
        "{scheme} {settings:?}: loss {loss}, by the definition {exact}"
    );
}

#[test]
fn every_code_is_the_nearest_that_the_definition_leaves() {
    for act_order in ORDERS {
        for scheme in
            ["w4a16-g32-sym", "w4a16-g128-asym", "w3a16-g64-asym", "w8a16-channel-sym", "w2a16-g16-sym"]
        {
            let settings = GptqSettings { act_order, ..GptqSettings::default() };
            held(130, 256, scheme, settings, 1, &[]);
        }
        for block_size in [1, 7, 100, 4096] {
            let settings = GptqSettings { act_order, block_size, ..GptqSettings::default() };
            held(5, 240, "w4a16-g48-asym", settings, 2, &[0, 100, 239]);
            held(3, 240, "w4a16-g5-sym", settings, 3, &[7]);
        }
    }
}

#[test]
fn codes_are_the_definition_s_own_where_no_tie_is_near() {
    let (n, k, settings) = (40, 64, GptqSettings::default());
    let scheme: LinearScheme = "w4a16-g32-asym".parse().unwrap();
    let (h, w) = (hessian(&inputs(200, k, 9, &[]), k), weights(n, k, 9));
    let factor = factor(&h, settings, 32);
    let solved = solve(SourceRows::Floats(&w), [n, k], scheme, Dtype::F16, None, &factor, settings).unwrap();
    let upper = chain(&damped(&h, factor.columns(), factor.damping()), k);
    let (rule, columns) = (GridRule::new(scheme, ScaleFormat::F16).unwrap(), factor.columns());
    for (r, row) in w.chunks_exact(k).enumerate() {
        let row =
            Row { weights: row, rule, group_size: 32, order: settings.act_order, columns, upper: &upper };
        let own = row.quantize(None);
        assert_eq!(own.codes, solved.tensor.codes[r * k..(r + 1) * k]);
        assert_eq!(own.scales, solved.tensor.scales[r * 2..r * 2 + 2]);
        assert_eq!(own.zeros, solved.tensor.zeros.as_ref().unwrap()[r * 2..r * 2 + 2]);
    }
}

#[test]
fn the_factor_is_the_textbook_s() {
    let k = 600;
    let h = hessian(&inputs(900, k, 4, &[5]), k);
    let settings = GptqSettings::default();
    let factor = factor(&h, settings, 40);
    let upper = chain(&damped(&h, factor.columns(), 0.01), k);
    let mean = h.diagonal().iter().sum::<f64>() / (k - 1) as f64;
    for c in 0..k {
        let pivot = upper[c * k + c];
        assert!((factor.weights()[c] * pivot * pivot - 1.0).abs() < 1e-8, "{c} of mean {mean}");
        for j in c..k {
            let (got, exact) = (f64::from(factor.ratios().row(c, j..j + 1)[0]), upper[c * k + j] / pivot);
            assert!((got - exact).abs() < 1e-6 * (1.0 + exact.abs()), "{c}, {j}: {got} for {exact}");
        }
    }
    assert_eq!((factor.dead(), factor.damping()), (1, 0.01));
}

#[test]
fn wide_inputs_are_factored_in_f32() {
    // The f32 path depends on the width alone, so a small matrix cannot test it.
    assert!(Hessian::is_f64(8192) && !Hessian::is_f64(8193));
}

#[test]
fn the_hessian_is_its_definition_whatever_the_pieces_and_threads() {
    let (tokens, k) = (2048 + 77, 300);
    let x = inputs(tokens, k, 5, &[]);
    let run = |threads: usize, piece: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut h = Hessian::new(k).unwrap();
            x.chunks(piece * k).for_each(|x| h.add(x));
            h.finish();
            (0..k).flat_map(|i| (0..=i).map(move |j| (i, j))).map(|(i, j)| h.at(i, j)).collect::<Vec<_>>()
        })
    };
    let whole = run(1, tokens);
    for (threads, piece) in [(2, tokens), (3, 1), (1, 500), (2, 2048)] {
        assert_eq!(run(threads, piece), whole);
    }
    let mut at = 0;
    for i in 0..k {
        for j in 0..=i {
            let sum: f64 = (0..tokens).map(|t| f64::from(x[t * k + i]) * f64::from(x[t * k + j])).sum();
            let exact = 2.0 * sum / tokens as f64;
            assert!((whole[at] - exact).abs() < 1e-3 * (1.0 + exact.abs()), "{} for {exact}", whole[at]);
            at += 1;
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let (n, k, settings) = (300, 640, GptqSettings::default());
    let (h, w) = (hessian(&inputs(700, k, 6, &[]), k), weights(n, k, 6));
    let scheme: LinearScheme = "w4a16-g64-asym".parse().unwrap();
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let factor = factor(&h, settings, 64);
            let solved =
                solve(SourceRows::Floats(&w), [n, k], scheme, Dtype::F16, None, &factor, settings).unwrap();
            (solved.tensor, solved.loss)
        })
    };
    let one = run(1);
    for threads in [2, 5] {
        assert!(run(threads) == one);
    }
}

/// `Σ over tokens of ‖(W − Ŵ) x‖²`, divided by the numbers of outputs and tokens.
fn output_error(x: &[f32], w: &[f32], rounded: &[f32], k: usize) -> f64 {
    let mut sum = 0.0;
    for (w, r) in w.chunks_exact(k).zip(rounded.chunks_exact(k)) {
        for x in x.chunks_exact(k) {
            let y: f64 = (0..k).map(|c| f64::from(w[c] - r[c]) * f64::from(x[c])).sum();
            sum += y * y;
        }
    }
    sum / (x.len() / k) as f64 / (w.len() / k) as f64
}

#[test]
fn it_leaves_less_output_error_than_rounding() {
    let (n, k) = (24, 192);
    let (x, w) = (inputs(400, k, 7, &[]), weights(n, k, 7));
    let h = hessian(&x, k);
    for scheme in ["w2a16-g32-asym", "w3a16-g64-sym", "w4a16-g32-sym", "w4a16-channel-asym"] {
        let scheme: LinearScheme = scheme.parse().unwrap();
        let mut rounded = w.clone();
        fake_quantize(&mut rounded, k, scheme, Dtype::F16, None).unwrap();
        let rtn = output_error(&x, &w, &rounded, k);
        for act_order in ORDERS {
            let settings = GptqSettings { act_order, damping: 1e-6, ..GptqSettings::default() };
            let factor = factor(&h, settings, scheme.granularity.group_size(k));
            let solved =
                solve(SourceRows::Floats(&w), [n, k], scheme, Dtype::F16, None, &factor, settings).unwrap();
            let error = output_error(&x, &w, &solved.tensor.dequantize().unwrap(), k);
            assert!(error < 0.7 * rtn, "{scheme} {act_order:?}: {error} for {rtn}");
            // The reported loss is this error if damping is negligible.
            assert!((solved.loss / error - 1.0).abs() < 0.02, "{} reported, {error} left", solved.loss);
        }
    }
}

#[test]
fn without_correlation_it_is_rounding_to_nearest() {
    // One token per channel: the Hessian is diagonal, so no column can compensate another.
    let (n, k) = (9, 64);
    let mut x = vec![0.0; k * k];
    (0..k).for_each(|c| x[c * k + c] = 1.0 + c as f32);
    let (h, w) = (hessian(&x, k), weights(n, k, 8));
    let scheme: LinearScheme = "w4a16-g32-asym".parse().unwrap();
    for act_order in ORDERS {
        let settings = GptqSettings { act_order, ..GptqSettings::default() };
        let factor = factor(&h, settings, 32);
        let solved =
            solve(SourceRows::Floats(&w), [n, k], scheme, Dtype::F16, None, &factor, settings).unwrap();
        assert_eq!(solved.tensor, quantize_rtn("m", &w, [n, k], scheme, Dtype::F16, None).unwrap());
    }
}

#[test]
fn dead_channels_and_batches_of_one_token_are_defined() {
    let (n, k) = (6, 64);
    let w = weights(n, k, 10);
    let scheme: LinearScheme = "w4a16-g32-sym".parse().unwrap();
    let nearest = quantize_rtn("m", &w, [n, k], scheme, Dtype::F16, None).unwrap();
    for act_order in ORDERS {
        let settings = GptqSettings { act_order, ..GptqSettings::default() };
        // All channels are dead, with and without tokens.
        for x in [vec![0.0; 5 * k], Vec::new()] {
            let factor = factor(&hessian(&x, k), settings, 32);
            assert_eq!(factor.dead(), k);
            let solved =
                solve(SourceRows::Floats(&w), [n, k], scheme, Dtype::F16, None, &factor, settings).unwrap();
            assert_eq!(solved.tensor, nearest);
        }
        // A dead channel among others is rounded on its group's grid, and not set to 0.
        let dead = [3, 40];
        let factor_of = factor(&hessian(&inputs(100, k, 11, &dead), k), settings, 32);
        assert_eq!(factor_of.dead(), 2);
        let solved = solve(SourceRows::Floats(&w), [n, k], scheme, Dtype::F32, None, &factor_of, settings)
            .unwrap()
            .tensor;
        let values = solved.dequantize().unwrap();
        for (r, c) in (0..n).flat_map(|r| dead.map(|c| (r, c))) {
            let scale = solved.scales[r * 2 + c / 32];
            let (w, v) = (w[r * k + c], values[r * k + c]);
            let inside = w.abs() <= 7.0 * scale;
            assert!(!inside || (w - v).abs() <= 0.5001 * scale, "{w} became {v} in steps of {scale}");
        }
        // One token: a Hessian of rank one, which damping makes positive definite.
        let one = factor(&hessian(&inputs(1, k, 12, &[]), k), settings, 32);
        let solved = solve(SourceRows::Floats(&w), [n, k], scheme, Dtype::F16, None, &one, settings).unwrap();
        assert!(solved.loss.is_finite() && solved.tensor.scales.iter().all(|s| s.is_finite()));
    }
}

#[test]
fn indefinite_hessians_get_more_damping() {
    // All channels are identical, and the damping is lost when added to 1 in f64.
    let k = 8;
    let x = vec![1.0_f32; 500 * k];
    let h = hessian(&x, k);
    let factor = Factor::new(&h, (0..k).collect(), 1e-18).unwrap();
    assert!(factor.escalations() > 1 && factor.damping() > 1e-17, "{}", factor.damping());
    let scheme: LinearScheme = "w4a16-g8-sym".parse().unwrap();
    let w = weights(3, k, 14);
    let solved =
        solve(SourceRows::Floats(&w), [3, k], scheme, Dtype::F16, None, &factor, GptqSettings::default())
            .unwrap();
    assert!(solved.loss.is_finite());
}

#[test]
fn what_is_not_finite_is_an_error() {
    let (n, k) = (2, 64);
    for bad in [f32::NAN, f32::INFINITY, f32::MAX] {
        let mut x = inputs(10, k, 15, &[]);
        x[5 * k + 9] = bad;
        let error = Factor::new(&hessian(&x, k), (0..k).collect(), 0.01).unwrap_err();
        assert!(matches!(error, FactorError::NonFinite { .. }), "{error}");
    }
    let settings = GptqSettings::default();
    let factor = factor(&hessian(&inputs(100, k, 16, &[]), k), settings, 32);
    let scheme: LinearScheme = "w4a16-g32-sym".parse().unwrap();
    for bad in [f32::NAN, f32::NEG_INFINITY, 3e38] {
        let mut w = weights(n, k, 17);
        w[k + 33] = bad;
        let error =
            solve(SourceRows::Floats(&w), [n, k], scheme, Dtype::F16, None, &factor, settings).unwrap_err();
        assert!(matches!(error, RowsError::Grid { row: 1, .. }), "{error}");
    }
    let refused = |shape, scheme: &str| {
        solve(
            SourceRows::Floats(&weights(n, k, 1)),
            shape,
            scheme.parse().unwrap(),
            Dtype::F16,
            None,
            &factor,
            settings,
        )
        .unwrap_err()
    };
    assert!(matches!(refused([n, k], "w4a16-g48"), RowsError::Indivisible { .. }));
    assert!(matches!(refused([n + 1, k], "w4a16-g32"), RowsError::Layout(_)));
    assert!(matches!(refused([2 * n, k / 2], "w4a16-g32"), RowsError::Layout(_)));
}

#[test]
fn bounds_narrow_the_range_of_grids() {
    let (n, k, settings) = (4, 64, GptqSettings::default());
    let (h, w) = (hessian(&inputs(300, k, 18, &[]), k), weights(n, k, 18));
    let factor = factor(&h, settings, 32);
    let scheme: LinearScheme = "w4a16-g32-sym".parse().unwrap();
    let run = |clip: &[f32]| {
        solve(SourceRows::Floats(&w), [n, k], scheme, Dtype::F32, Some(clip), &factor, settings)
    };
    let mut bounds = vec![f32::INFINITY; n * 2];
    bounds[5] = 0.03;
    let free = run(&vec![f32::INFINITY; n * 2]).unwrap().tensor;
    let solved = run(&bounds).unwrap().tensor;
    assert_eq!(solved.scales[5], 0.03_f32 / 7.5);
    assert_eq!(solved.codes[..2 * k], free.codes[..2 * k], "other rows are not affected");
    assert!(run(&bounds[1..]).is_err());
    bounds[0] = f32::NAN;
    assert!(run(&bounds).is_err());
}

#[test]
fn settings_that_cannot_be_are_refused() {
    let defaults = GptqSettings::default();
    defaults.check().unwrap();
    for damping in [0.0, -0.01, f64::NAN, 1e3] {
        assert!(GptqSettings { damping, ..defaults }.check().is_err());
    }
    for block_size in [0, 5000] {
        assert!(GptqSettings { block_size, ..defaults }.check().is_err());
    }
    for order in ORDERS {
        assert_eq!(order.name().parse::<ActOrder>().unwrap(), order);
    }
    assert!("desc".parse::<ActOrder>().is_err() && "fp".parse::<LayerInputs>().is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn any_shape_equals_the_definition(
        n in 1_usize..140, groups in 1_usize..6, size in 1_usize..70, bits in 2_u8..=8, seed: u64,
        symmetric: bool, order in 0_usize..3, block_size in 1_usize..200,
    ) {
        let granularity = crate::scheme::Granularity::Group(size);
        let scheme = LinearScheme::weight_only(WeightFormat::int(bits, symmetric), granularity);
        let settings = GptqSettings { act_order: ORDERS[order], block_size, ..GptqSettings::default() };
        if WeightFormat::INT_BITS.contains(&bits) {
            held(n, groups * size, &scheme.to_string(), settings, seed, &[]);
        }
    }
}

/// Floating-point codes: without correlations, GPTQ rounds to nearest; with them, its loss is lower.
#[test]
fn floating_point_codes() {
    let schemes =
        ["wf8a16-channel", "wf8a16-tensor", "wf8a16-b128", "wf4a16-g16-nv", "wf4a16-g32-mx", "wf8a16-g32-mx"];
    for (scheme, act_order) in schemes.iter().flat_map(|scheme| ORDERS.map(|order| (scheme, order))) {
        // Rows that share scales are in several tiles.
        let (n, k) = (if scheme.ends_with("b128") { 200 } else { 24 }, 96);
        let w = weights(n, k, 5);
        let scheme: LinearScheme = scheme.parse().unwrap();
        let dtype = scheme.scale_dtype(Dtype::Bf16);
        let nearest = quantize_rtn("w", &w, [n, k], scheme, dtype, None).unwrap();
        let size = scheme.granularity.group_size(k);
        let settings = GptqSettings { act_order, ..Default::default() };
        let solved = |h: &Hessian| {
            let factor = factor(h, settings, size);
            solve(SourceRows::Floats(&w), [n, k], scheme, dtype, None, &factor, settings).unwrap()
        };
        let mut identity = vec![0.0; k * k];
        (0..k).for_each(|i| identity[i * k + i] = 1.0);
        let plain = solved(&hessian(&identity, k)).tensor;
        assert_eq!(plain.dequantize().unwrap(), nearest.dequantize().unwrap(), "{scheme} {act_order:?}");
        let h = hessian(&inputs(3 * k, k, 5, &[7]), k);
        let solved = solved(&h).tensor;
        solved.require_storable("w").unwrap();
        assert_eq!((&solved.scales, solved.global), (&nearest.scales, nearest.global), "settled beforehand");
        let loss = |tensor: &QuantizedTensor| {
            let rounded = tensor.dequantize().unwrap();
            let mut total = 0.0;
            for (w, q) in w.chunks(k).zip(rounded.chunks(k)) {
                let e: Vec<f64> = w.iter().zip(q).map(|(w, q)| f64::from(*w) - f64::from(*q)).collect();
                for i in 0..k {
                    total += e[i] * (0..k).map(|j| h.at(i, j) * e[j]).sum::<f64>();
                }
            }
            total
        };
        let (gained, before) = (loss(&solved), loss(&nearest));
        assert!(gained < 0.8 * before, "{scheme} {act_order:?}: {gained} of {before}");
    }
}
