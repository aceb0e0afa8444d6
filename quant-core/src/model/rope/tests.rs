//! Rotary embeddings against values computed by transformers, and rejected configurations.

use candle_core::{Device, Tensor};
use serde_json::{Value, json};

use super::*;
use crate::checkpoint::ConfigFields;

fn request() -> RopeRequest<'static> {
    RopeRequest::new(16, 10_000.0)
}

fn read_as(request: &RopeRequest<'_>, config: &Value) -> Result<Rope> {
    let path = std::path::Path::new("config.json");
    request.read(&ConfigFields::new(path, config.as_object().unwrap()))
}

fn read(config: Value) -> Result<Rope> {
    read_as(&request(), &config)
}

#[test]
fn llama3_keeps_short_divides_long_and_joins_smoothly() {
    let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_positions: 8192.0 };
    let (plain, _) = RopeScaling::None.frequencies(500_000.0, 128, 0);
    let (scaled, _) = scaling.frequencies(500_000.0, 128, 0);
    let ratio: Vec<f32> = plain.iter().zip(&scaled).map(|(p, s)| p / s).collect();
    assert_eq!(ratio[0], 1.0);
    assert!((ratio[63] - 8.0).abs() < 1e-5);
    assert!(ratio.windows(2).all(|w| w[0] <= w[1] + 1e-5), "{ratio:?}");
    assert!(ratio.iter().any(|r| *r > 1.1 && *r < 7.9));
}

#[test]
fn the_older_key_wins_as_in_transformers() {
    let linear = json!({"rope_type": "linear", "factor": 4.0});
    let plain = json!({"rope_type": "default", "rope_theta": 20000.0});
    let of = |config: Value| read(config).map(|rope| (rope.theta, rope.scaling)).unwrap();
    let both = json!({"rope_theta": 7e5, "rope_parameters": plain, "rope_scaling": linear});
    assert_eq!(of(both), (7e5, RopeScaling::Linear { factor: 4.0 }));
    assert_eq!(of(json!({"rope_parameters": plain})), (20000.0, RopeScaling::None));
    let own = json!({"type": "linear", "factor": 2.0, "rope_theta": 5e5});
    assert_eq!(of(json!({"rope_scaling": own})), (5e5, RopeScaling::Linear { factor: 2.0 }));
    assert_eq!(of(json!({"rope_scaling": null})), (10_000.0, RopeScaling::None));
}

#[test]
fn types_of_layers_turn_differently() {
    let nested = json!({"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }});
    let older = json!({"rope_theta": 1e6, "rope_local_base_freq": 1e4,
                       "rope_scaling": {"type": "linear", "factor": 8.0}});
    let full = RopeRequest { layer_type: Some("full_attention"), theta: 5.0, ..request() };
    let sliding = RopeRequest {
        layer_type: Some("sliding_attention"),
        theta_key: "rope_local_base_freq",
        theta: 6.0,
        is_scaled: false,
        ..request()
    };
    for config in [&nested, &older] {
        let rope = read_as(&full, config).unwrap();
        assert_eq!((rope.theta, rope.scaling), (1e6, RopeScaling::Linear { factor: 8.0 }));
        let rope = read_as(&sliding, config).unwrap();
        assert_eq!((rope.theta, rope.scaling), (1e4, RopeScaling::None));
    }
    assert_eq!(read_as(&full, &json!({})).unwrap().theta, 5.0);
    assert_eq!(read_as(&sliding, &json!({})).unwrap().theta, 6.0);
    let flat = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}});
    assert!(read_as(&full, &flat).unwrap_err().to_string().contains("each layer type"));
    let message = read(nested.clone()).unwrap_err().to_string();
    assert!(
        message.contains("rope_parameters.full_attention")
            && message.contains("all blocks have the same RoPE"),
        "{message}"
    );
    let older = json!({"rope_scaling": nested["rope_parameters"]});
    assert!(read(older).unwrap_err().to_string().contains("rope_scaling.full_attention"));
}

#[test]
fn hostile_values_are_refused_by_their_field() {
    let scaled = |changes: Value| {
        let mut scaling = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
        for (key, value) in changes.as_object().unwrap() {
            scaling[key] = value.clone();
        }
        json!({ "max_position_embeddings": 256, "rope_scaling": scaling })
    };
    let long = |changes: Value| {
        let mut config = scaled(json!({"rope_type": "longrope", "short_factor": [1, 1, 1, 1, 1, 1, 1, 1],
                                       "long_factor": [2, 2, 2, 2, 2, 2, 2, 2]}));
        for (key, value) in changes.as_object().unwrap() {
            config["rope_scaling"][key] = value.clone();
        }
        config
    };
    assert!(read(scaled(json!({}))).is_ok() && read(long(json!({}))).is_ok());
    for (config, field) in [
        (json!({"rope_scaling": {"factor": 8.0}}), "rope_type"),
        (json!({"rope_scaling": {"rope_type": "xpos"}}), "rope_type` is `xpos`, which is not supported"),
        (json!({"rope_scaling": {"type": "xpos"}}), "rope_scaling.type` is `xpos`"),
        (json!({"rope_scaling": {"rope_type": "linear", "factor": 1e-300}}), "factor"),
        (json!({"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}), "factor"),
        (json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}), "max_position_embeddings"),
        (json!({"rope_theta": 0.5}), "rope_theta"),
        (json!({"rope_theta": 1e300}), "rope_theta"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (json!({"partial_rotary_factor": -1.0}), "partial_rotary_factor"),
        (json!({"partial_rotary_factor": 1e300}), "partial_rotary_factor"),
        (scaled(json!({"factor": -4.0})), "factor"),
        (scaled(json!({"factor": 0})), "factor"),
        (scaled(json!({"beta_fast": -1.0})), "beta_fast"),
        (scaled(json!({"beta_slow": 1e-320})), "beta_slow"),
        (scaled(json!({"attention_factor": -1.0})), "attention_factor"),
        (scaled(json!({"attention_factor": "x"})), "attention_factor"),
        (scaled(json!({"mscale": -1.0})), "mscale"),
        (scaled(json!({"truncate": 1})), "truncate"),
        (scaled(json!({"original_max_position_embeddings": 0})), "original_max_position_embeddings"),
        (scaled(json!({"original_max_position_embeddings": 1.5})), "original_max_position_embeddings"),
        (scaled(json!({"original_max_position_embeddings": 1e300})), "original_max_position_embeddings"),
        (long(json!({"short_factor": null})), "short_factor"),
        (long(json!({"short_factor": [1.0]})), "short_factor"),
        (long(json!({"long_factor": [1, 1, 1, 1, 1, 1, 1, 0]})), "long_factor"),
        (long(json!({"long_factor": [1, 1, 1, 1, 1, 1, 1, "1"]})), "long_factor"),
        (long(json!({"original_max_position_embeddings": 1})), "attention_factor"),
    ] {
        let message = read(config.clone()).unwrap_err().to_string();
        assert!(message.contains(field), "{config}: {message}");
    }
    let alpha = RopeRequest { has_alpha: true, ..request() };
    let config = json!({"rope_scaling": {"rope_type": "dynamic", "factor": 1.0, "alpha": -2.0}});
    assert!(read_as(&alpha, &config).unwrap_err().to_string().contains("alpha"));
    let odd = RopeRequest { head_dim: 15, ..request() };
    assert!(read_as(&odd, &json!({})).unwrap_err().to_string().contains("head_dim"));
    let partial = RopeRequest { partial: Some(0.5), head_dim: 14, ..request() };
    assert!(read_as(&partial, &json!({})).unwrap_err().to_string().contains("partial_rotary_factor"));
}

/// The rotation by definition: channel by channel, in double precision.
#[test]
fn heads_are_rotated_as_defined() {
    for (layout, rotary_dim) in [
        (RopeLayout::Halves, 8),
        (RopeLayout::Halves, 6),
        (RopeLayout::Interleaved, 8),
        (RopeLayout::Interleaved, 4),
    ] {
        let rope = Rope { rotary_dim, layout, ..Rope::plain(8, 100.0) };
        let (batch, positions, heads, start) = (2, 5, 3, 7);
        let value = |i: usize| (i as f32 * 0.37).sin();
        let values: Vec<f32> = (0..batch * positions * heads * 8).map(value).collect();
        let x = Tensor::from_slice(&values, (batch, positions, heads * 8), &Device::Cpu).unwrap();
        let table = RopeTable::new(rope.clone(), start + positions).unwrap();
        let rotated = table.apply(&x, start).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (at, found) in rotated.iter().enumerate() {
            let (channel, position) = (at % 8, start + at / (heads * 8) % positions);
            let partner = rope.partner(channel);
            assert_eq!(rope.partner(partner), channel);
            let own = f64::from(values[at]);
            let expected = if partner == channel {
                own
            } else {
                let other = f64::from(values[at - channel + partner]);
                let pair = match layout {
                    RopeLayout::Halves => channel.min(partner),
                    RopeLayout::Interleaved => channel / 2,
                };
                let angle = position as f64 * 100_f64.powf(-2.0 * pair as f64 / rotary_dim as f64);
                let sign = if channel < partner { -1.0 } else { 1.0 };
                own * angle.cos() + sign * other * angle.sin()
            };
            approx::assert_abs_diff_eq!(f64::from(*found), expected, epsilon = 2e-6);
        }
        assert!(table.apply(&x, start + 1).is_err(), "beyond the table");
    }
}

/// Frequencies and attention factors computed by transformers 5.23: `ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len)`
/// of a Llama with heads of width 16, base 10000 and 256 positions, torch 2.15 on a CPU.
#[test]
fn frequencies_are_those_of_transformers() {
    const YARN: [f64; 8] = [
        1.0,
        0.237_170_82,
        0.049_999_997,
        0.007_905_694_7,
        0.002_499_999_94,
        0.000_790_569_47,
        0.000_250_000_01,
        7.905_694_7e-5,
    ];
    const LONG_ROPE: [f64; 8] = [
        1.0,
        0.287_479_76,
        0.083_333_336,
        0.024_325_214,
        0.007_142_857_2,
        0.002_108_185_3,
        0.000_624_999_99,
        0.000_186_016_33,
    ];
    let lists = |mut scaling: Value| {
        scaling["rope_type"] = json!("longrope");
        scaling["short_factor"] = (0..8).map(|i| 1.0 + 0.1 * f64::from(i)).collect();
        scaling["long_factor"] = (0..8).map(|i| 1.5 + 0.7 * f64::from(i)).collect();
        scaling
    };
    let original = |mut scaling: Value| {
        scaling["original_max_position_embeddings"] = json!(64);
        scaling
    };
    let yarn = |scaling: Value| {
        let mut scaling = original(scaling);
        scaling["rope_type"] = json!("yarn");
        scaling
    };
    let llama3 =
        json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
    let dynamic = json!({"rope_type": "dynamic", "factor": 3.0});
    let cases: Vec<(Value, usize, f64, [f64; 8])> = vec![
        (yarn(json!({"factor": 4.0})), 0, 1.138_629_436_111_989, YARN),
        (yarn(json!({"factor": null})), 0, 1.138_629_436_111_989, YARN),
        (
            yarn(json!({"factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": false})),
            0,
            1.138_629_436_111_989,
            [1.0, 0.238_408_46, 0.044_248_301, YARN[3], YARN[4], YARN[5], YARN[6], YARN[7]],
        ),
        (
            yarn(json!({"factor": 4.0, "mscale": 0.8, "mscale_all_dim": 0.4})),
            0,
            1.052_538_425_523_009_2,
            YARN,
        ),
        (yarn(json!({"factor": 4.0, "attention_factor": 1.25})), 0, 1.25, YARN),
        (
            dynamic.clone(),
            64,
            1.0,
            [
                1.0,
                0.316_227_76,
                0.1,
                0.031_622_779,
                0.009_999_999_8,
                0.003_162_277_9,
                0.001,
                0.000_316_227_79,
            ],
        ),
        (
            dynamic,
            100,
            1.0,
            [
                1.0,
                0.274_577_23,
                0.075_392_649,
                0.020_701_105,
                0.005_684_051_7,
                0.001_560_711_1,
                0.000_428_535_71,
                0.000_117_666_15,
            ],
        ),
        (original(lists(json!({}))), 64, 1.154_700_538_379_251_7, LONG_ROPE),
        (
            original(lists(json!({}))),
            65,
            1.154_700_538_379_251_7,
            [
                0.666_666_69,
                0.143_739_88,
                0.034_482_758,
                0.008_784_105_1,
                0.002_325_581_2,
                0.000_632_455_57,
                0.000_175_438_6,
                4.941_059_2e-5,
            ],
        ),
        (original(lists(json!({"factor": 8.0}))), 0, 1.224_744_871_391_589, LONG_ROPE),
        (
            original(llama3),
            0,
            1.0,
            [
                1.0,
                0.244_384_59,
                0.013_042_256,
                0.003_952_847_3,
                0.001_249_999_97,
                0.000_395_284_73,
                0.000_125_000_01,
                3.952_847_3e-5,
            ],
        ),
        (
            json!({"rope_type": "proportional", "partial_rotary_factor": 0.25}),
            0,
            1.0,
            [1.0, 0.316_227_76, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        ),
        (
            json!({"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}),
            0,
            1.0,
            [0.5, 0.158_113_88, 0.05, 0.015_811_389, 0.0, 0.0, 0.0, 0.0],
        ),
    ];
    for (scaling, length, factor, expected) in cases {
        let positions = if scaling["rope_type"] == "dynamic" { 64 } else { 256 };
        let rope = read(json!({ "max_position_embeddings": positions, "rope_scaling": scaling })).unwrap();
        let (found, attention_factor) = rope.scaling.frequencies(rope.theta, rope.rotary_dim, length);
        assert_eq!(attention_factor, factor as f32, "{scaling}");
        for (found, expected) in found.iter().zip(expected) {
            let off = (f64::from(*found) - expected).abs();
            assert!(off <= 2e-7 * expected, "{scaling}: {found}, not {expected}");
        }
    }
    let partial = RopeRequest { partial: Some(0.5), ..request() };
    let config = json!({ "rope_scaling": { "rope_type": "linear", "factor": 3.0 } });
    let rope = read_as(&partial, &config).unwrap();
    let (found, _) = rope.scaling.frequencies(rope.theta, rope.rotary_dim, 0);
    for (found, expected) in
        found.iter().zip([0.333_333_34, 0.033_333_335, 0.003_333_333_2, 0.000_333_333_36])
    {
        assert!((f64::from(*found) - expected).abs() <= 2e-7 * expected, "{found}, not {expected}");
    }
    // HunYuan: the base grows by alpha^(d / (d − 2)) at any length.
    let alpha = RopeRequest { has_alpha: true, ..request() };
    let config = json!({ "rope_scaling": { "type": "dynamic", "factor": 1.0, "alpha": 50.0 } });
    let rope = read_as(&alpha, &config).unwrap();
    approx::assert_relative_eq!(rope.theta, 10_000.0 * 50.0_f64.powf(16.0 / 14.0), max_relative = 1e-12);
    assert_eq!(rope.scaling, RopeScaling::None);
}

#[test]
fn the_length_of_the_sequence_chooses_the_frequencies() {
    let long = LongRope {
        short: vec![1.0; 4].into(),
        long: vec![2.0, 3.0, 4.0, 5.0].into(),
        original_positions: 6,
        attention_factor: 1.0,
    };
    let dynamic = RopeScaling::Dynamic { factor: 2.0, positions: 6 };
    for scaling in [RopeScaling::LongRope(long), dynamic] {
        let rope = Rope { scaling: scaling.clone(), ..Rope::plain(8, 100.0) };
        let table = RopeTable::new(rope.clone(), 12).unwrap();
        let values = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (start, count) in [(0, 6), (0, 7), (6, 1), (3, 4), (0, 12), (5, 1)] {
            let (frequencies, _) = scaling.frequencies(100.0, 8, start + count);
            let cos = values(&table.angles(start, count).unwrap().cos);
            let expected =
                (start..start + count).flat_map(|p| frequencies.iter().map(move |f| (p as f32 * f).cos()));
            assert_eq!(cos, expected.collect::<Vec<_>>(), "{scaling:?} {start} {count}");
        }
        // Documents that share a window use their own lengths.
        let x = Tensor::from_vec((0..12 * 8).map(|i| i as f32).collect(), (1, 12, 8), &Device::Cpu).unwrap();
        let starts: Vec<u32> = [vec![0; 4], vec![4; 8]].concat();
        let packed = table.apply_packed(&x, Segments::new(&starts)).unwrap();
        for (at, length) in [(0, 4), (4, 8)] {
            let part = |t: &Tensor| t.narrow(1, at, length).unwrap();
            assert_eq!(values(&part(&packed)), values(&table.apply(&part(&x), 0).unwrap()));
        }
        assert!(table.angles(0, 13).is_err());
    }
}
