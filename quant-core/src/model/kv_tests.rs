use std::path::Path;

use proptest::prelude::*;

use serde_json::{Value, json};

use super::*;
use crate::checkpoint::ConfigFields;
use crate::scheme::KV_CONFIG_KEY;

fn read(value: Value) -> Result<Option<KvScheme>> {
    let config = json!({ KV_CONFIG_KEY: value });
    KvScheme::from_config(&ConfigFields::new(Path::new("config.json"), config.as_object().unwrap()))
}

#[test]
fn names_and_configurations_come_back() {
    for scheme in KvScheme::ALL {
        assert_eq!(scheme.to_string().parse::<KvScheme>().unwrap(), scheme);
        assert_eq!(serde_json::to_value(scheme).unwrap(), json!(scheme.to_string()));
        assert_eq!(serde_json::from_value::<KvScheme>(json!(scheme.to_string())).unwrap(), scheme);
        if let Some(value) = scheme.config_value() {
            assert_eq!(read(value).unwrap(), Some(scheme));
        }
    }
    assert_eq!(read(Value::Null).unwrap(), None);
    for bad in ["kv2", "kv16", "kvf4", "fp8", "KV4", "4", ""] {
        assert_eq!(bad.parse::<KvScheme>().unwrap_err().category().exit_code(), 2, "{bad}");
    }
}

#[test]
fn configurations_that_say_something_else_are_refused() {
    let with = |key: &str, value: Value| {
        let mut good = KvScheme::Kv4.config_value().unwrap();
        good[key] = value;
        good
    };
    let without = |key: &str| {
        let mut good = KvScheme::Kv4.config_value().unwrap();
        good.as_object_mut().unwrap().shift_remove(key);
        good
    };
    for (value, field) in [
        (json!(4), ""),
        (json!("kv4"), ""),
        (json!([]), ""),
        (json!({}), ".bits"),
        (without("bits"), ".bits"),
        (without("symmetric"), ".symmetric"),
        (without("strategy"), ".strategy"),
        (without("scale_dtype"), ".scale_dtype"),
        (with("bits", json!(2)), ".bits"),
        (with("bits", json!(16)), ".bits"),
        (with("bits", json!(-4)), ".bits"),
        (with("bits", json!(4.0)), ".bits"),
        (with("bits", json!("4")), ".bits"),
        (with("bits", json!(u64::MAX)), ".bits"),
        (with("symmetric", json!(true)), ".symmetric"),
        (with("symmetric", json!(0)), ".symmetric"),
        (with("symmetric", Value::Null), ".symmetric"),
        (with("strategy", json!("tensor")), ".strategy"),
        (with("strategy", json!(null)), ".strategy"),
        (with("scale_dtype", json!("bfloat16")), ".scale_dtype"),
        (with("group_size", json!(64)), ".group_size"),
    ] {
        let error = read(value.clone()).unwrap_err();
        assert_eq!(error.category().exit_code(), 4, "{value}");
        assert!(error.to_string().contains(&format!("`{KV_CONFIG_KEY}{field}`")), "{value}: {error}");
        assert!(error.to_string().contains("config.json") && !error.remedy().marked().is_empty());
    }
}

proptest! {
    /// Every head is quantized independently of the others, with the results of the kernels' functions for one head.
    #[test]
    fn heads_are_rounded_as_the_cache_rounds_them(
        seed in any::<u64>(),
        tokens in 1_usize..300,
        head_dim in 1_usize..40,
        four in any::<bool>(),
    ) {
        let scheme = if four { KvScheme::Kv4 } else { KvScheme::Kv8 };
        let value = |i: usize| {
            let bits = crate::random::mix(seed ^ i as u64);
            // Some heads are constant, some have an outlier.
            let head = crate::random::mix(seed ^ (i / head_dim) as u64 ^ 0xabc) % 4;
            let v = (bits >> 40) as f32 / (1 << 20) as f32 - 8.0;
            match head {
                0 => 1.25,
                1 if i.is_multiple_of(head_dim) => 1e3 * v,
                _ => v,
            }
        };
        let x: Vec<f32> = (0..tokens * head_dim).map(value).collect();
        let mut rounded = x.clone();
        round_cached(scheme, &mut rounded, head_dim, 1.0).unwrap();
        for (x, found) in x.chunks_exact(head_dim).zip(rounded.chunks_exact(head_dim)) {
            let (mut codes, mut expected) = (vec![0; head_dim], vec![0.0; head_dim]);
            let grid = quantize_head(x, u32::from(scheme.bits()), &mut codes).unwrap();
            dequantize_head(&codes, grid, &mut expected).unwrap();
            prop_assert_eq!(found, &expected[..]);
            if x.iter().all(|v| *v == 1.25) {
                prop_assert_eq!(found, x);
            }
        }
    }
}

#[test]
fn values_that_a_cache_cannot_hold_are_errors() {
    for (value, phrase) in [(f32::NAN, "NaN"), (f32::INFINITY, "NaN or infinite"), (7e4, "65504")] {
        let error = round_cached(KvScheme::Kv4, &mut [0.0, value], 2, 1.0).unwrap_err();
        assert_eq!(error.category().exit_code(), 6);
        assert!(error.to_string().contains(phrase), "{error}");
    }
    assert!(round_cached(KvScheme::Kv4, &mut [0.0; 3], 2, 1.0).is_err());
    assert!(round_cached(KvScheme::Kv4, &mut [0.0; 3], 0, 1.0).is_err());
    round_cached(KvScheme::Kv8, &mut [], 4, 1.0).unwrap();
}

/// An E4M3 value, by the definition of the format; NaN for the two NaN codes.
fn number(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2.0_f64.powi(exponent - 7),
    };
    if code < 0x80 { magnitude } else { -magnitude }
}

/// Every FP8 value times a scale is stored exactly, for any scale. Other values are rounded to nearest, ties to even,
/// and values out of range saturate.
#[test]
fn fp8_holds_its_codes_and_rounds_what_lies_between() {
    let round = |x: f32, scale: f32| {
        let mut x = [x];
        round_cached(KvScheme::Kvf8, &mut x, 1, scale).unwrap();
        x[0]
    };
    // Powers of two, for which products and quotients are exact, and one other scale.
    for scale in [1.0_f32, 2.0_f32.powi(-9), 2.0_f32.powi(12), 0.0123] {
        let exact = scale.log2().fract() == 0.0;
        for code in 0..=255_u8 {
            let value = number(code);
            if value.is_nan() {
                continue;
            }
            let x = (value * f64::from(scale)) as f32;
            assert_eq!(round(x, scale).to_bits(), x.to_bits(), "{code:#x} times {scale}");
            let next = number(code.wrapping_add(1));
            if next.is_nan() || code & 0x7f == 0x7e || !exact {
                continue;
            }
            // Adjacent codes of one sign: the midpoint is rounded to the even code.
            let [low, middle, high] = [0.25, 0.5, 0.75].map(|share| value + share * (next - value));
            let even = if code & 1 == 0 { value } else { next };
            for (x, expected) in [(low, value), (middle, even), (high, next)] {
                let found = round((x * f64::from(scale)) as f32, scale);
                assert_eq!(f64::from(found), expected * f64::from(scale), "{x} times {scale}");
            }
        }
        let largest = 448.0 * scale;
        for x in [largest, 449.0 * scale, 465.0 * scale, 1e30, f32::MAX] {
            assert_eq!((round(x, scale), round(-x, scale)), (largest, -largest), "{x}");
        }
    }
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = round_cached(KvScheme::Kvf8, &mut [0.0, value], 2, 1.0).unwrap_err();
        assert_eq!(error.category().exit_code(), 6);
        assert!(error.to_string().contains("NaN or infinite"), "{error}");
    }
    assert!(round_cached(KvScheme::Kvf8, &mut [0.0; 3], 2, 1.0).is_err());
}
