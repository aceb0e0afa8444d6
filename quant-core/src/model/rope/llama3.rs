//! Recovers the parameters of Llama 3's scaling from the divisors of its frequencies. GGUF files have only the
//! divisors.

use std::f64::consts::TAU;

use serde_json::{Map, Value, json};

use super::RopeScaling;

/// The factors and original context lengths of published models, with 1 and 4 as the ends of the transition.
const PUBLISHED: [(f64, f64); 2] = [(8.0, 8192.0), (32.0, 8192.0)];
const ENDS: [f64; 2] = [1.0, 4.0];
const MAX_POSITIONS: f64 = (1_u64 << 40) as f64;

/// Returns the scaling of Llama 3 that gives these divisors, each to within one unit in the last place.
pub(super) fn recovered(divisors: &[f32], theta: f64) -> Option<RopeScaling> {
    let fits = |candidate: &RopeScaling| {
        let found = candidate.divisors(theta, 2 * divisors.len());
        found.iter().zip(divisors).all(|(a, b)| a.to_bits().abs_diff(b.to_bits()) <= 1)
    };
    let with = |factor: f64, [low, high]: [f64; 2], original_positions: f64| {
        let valid = (1.0..MAX_POSITIONS).contains(&original_positions) && low > 0.0 && low < high;
        valid.then_some(RopeScaling::Llama3 { factor, low, high, original_positions })
    };
    let largest = *divisors.last()?;
    // The shortest decimal.
    let factor: f64 = largest.to_string().parse().ok()?;
    if !largest.is_finite() || largest <= 1.0 {
        return None;
    }
    let mut published = PUBLISHED.iter().filter_map(|(factor, positions)| with(*factor, ENDS, *positions));
    if let Some(found) = published.find(fits) {
        return Some(found);
    }
    let frequencies = RopeScaling::None.frequencies(theta, 2 * divisors.len(), 0).0;
    let pairs = || frequencies.iter().map(|f| f64::from(*f)).zip(divisors.iter().copied());
    // How much of a frequency in the transition is kept: 0 at its low end, and 1 at its high end.
    let kept: Vec<(f64, f64)> = pairs()
        .filter(|(_, divisor)| *divisor > 1.0 && *divisor < largest)
        .map(|(f, divisor)| (f, (1.0 / f64::from(divisor) - 1.0 / factor) / (1.0 - 1.0 / factor)))
        .collect();
    if kept.is_empty() {
        // Any parameters suffice for which no frequency is in the transition.
        let lengths = |is_kept: bool| {
            pairs().filter(move |(_, divisor)| (*divisor == 1.0) == is_kept).map(|(f, _)| TAU / f)
        };
        let [longest, shortest] =
            [lengths(true).fold(0.0, f64::max), lengths(false).fold(f64::MAX, f64::min)];
        let powers = (0..40).rev().map(|exponent| (ENDS, f64::from(exponent).exp2()));
        let between = (longest * shortest).sqrt().round();
        let narrow = ([1.0, (between / longest).sqrt()], between);
        return powers.chain([narrow]).filter_map(|(ends, length)| with(factor, ends, length)).find(fits);
    }
    let count = kept.len() as f64;
    let lengths = kept.iter().map(|(f, s)| TAU / f * (ENDS[0] + (ENDS[1] - ENDS[0]) * s));
    let length = (lengths.sum::<f64>() / count).round();
    if let Some(found) = with(factor, ENDS, length).filter(fits) {
        return Some(found);
    }
    // What is kept is linear in the frequency: `(length · f / 2π − low) / (high − low)`.
    let [mean_f, mean_s] =
        [kept.iter().map(|(f, _)| f).sum::<f64>() / count, kept.iter().map(|(_, s)| s).sum::<f64>() / count];
    let (over, under) = kept.iter().fold((0.0, 0.0), |(over, under), (f, s)| {
        (over + (f - mean_f) * (s - mean_s), under + (f - mean_f).powi(2))
    });
    let slope = over / under;
    let low_share = slope * mean_f - mean_s;
    // Only the ratios of the ends and the length matter, so the low end is near 1 and the length an integer.
    let length = (TAU * slope / low_share).round();
    let width = length / (TAU * slope);
    let ends = [low_share * width, (low_share + 1.0) * width];
    let rounded = ends.map(|end| (end * 1000.0).round() / 1000.0);
    [rounded, ends].into_iter().filter_map(|ends| with(factor, ends, length)).find(fits)
}

/// Replaces LongRoPE in a `config.json` by the scaling of Llama 3, if both rotate alike. More programs know the latter.
pub(crate) fn restore_llama3(config: &mut Map<String, Value>) {
    const KEY: &str = "rope_scaling";
    let found = || {
        let scaling = config.get(KEY)?;
        let is = |key: &str, value: f64| scaling[key].as_f64() == Some(value);
        if scaling["rope_type"] != "longrope" || !is("factor", 1.0) || !is("attention_factor", 1.0) {
            return None;
        }
        let divisors = scaling["short_factor"].as_array()?;
        if scaling["long_factor"].as_array() != Some(divisors) {
            return None;
        }
        let divisors: Option<Vec<f32>> = divisors.iter().map(|d| Some(d.as_f64()? as f32)).collect();
        recovered(&divisors?, config.get("rope_theta")?.as_f64()?)
    };
    if let Some(RopeScaling::Llama3 { factor, low, high, original_positions }) = found() {
        let scaling = json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": original_positions as u64,
        });
        config.insert(KEY.to_owned(), scaling);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama3(factor: f64, [low, high]: [f64; 2], original_positions: f64) -> RopeScaling {
        RopeScaling::Llama3 { factor, low, high, original_positions }
    }

    #[test]
    fn parameters_follow_from_the_divisors() {
        for (theta, dim, scaling) in [
            (5e5, 128, llama3(8.0, ENDS, 8192.0)),
            (5e5, 64, llama3(32.0, ENDS, 8192.0)),
            (5e5, 32, llama3(8.0, ENDS, 512.0)),
            (1e4, 64, llama3(16.0, ENDS, 4096.0)),
            (1e4, 16, llama3(4.0, ENDS, 64.0)),
            (5e5, 128, llama3(3.7, ENDS, 6000.0)),
            (5e5, 128, llama3(8.0, [1.0, 32.0], 8192.0)),
            (1e6, 96, llama3(2.5, [1.0, 2.5], 3000.0)),
        ] {
            let divisors = scaling.divisors(theta, dim);
            let (plain, last) = (divisors[0], divisors[dim / 2 - 1]);
            assert!(plain == 1.0 && last > 1.0, "{scaling:?}: {divisors:?}");
            assert_eq!(recovered(&divisors, theta), Some(scaling));
            // The converter rounds differently.
            let nudge = |(i, d): (usize, &f32)| match *d > 1.0 && *d < last && i % 2 == 0 {
                true => f32::from_bits(d.to_bits() + 1),
                false => *d,
            };
            let nudged: Vec<f32> = divisors.iter().enumerate().map(nudge).collect();
            let found = recovered(&nudged, theta).unwrap().divisors(theta, dim);
            assert!(found.iter().zip(&nudged).all(|(a, b)| a.to_bits().abs_diff(b.to_bits()) <= 1));
        }
        // The same rotation with other numbers: only the ratios of the ends and the length matter.
        let scaling = llama3(8.0, [2.0, 6.0], 4096.0);
        let divisors = scaling.divisors(5e5, 128);
        let found = recovered(&divisors, 5e5).unwrap();
        assert_eq!(found, llama3(8.0, [1.0, 3.0], 2048.0));
        assert_eq!(found.divisors(5e5, 128), divisors);
        // No frequency is in the transition.
        let divisors = llama3(8.0, [1.0, 1.001], 300.0).divisors(5e5, 32);
        assert!(divisors.iter().all(|d| [1.0, 8.0].contains(d)));
        assert_eq!(recovered(&divisors, 5e5).unwrap().divisors(5e5, 32), divisors);
    }

    #[test]
    fn other_divisors_stay_as_they_are() {
        let divisors = llama3(8.0, ENDS, 8192.0).divisors(5e5, 64);
        for (at, value) in [(0, 1.5), (12, 1.1), (31, 8.1), (31, f32::INFINITY), (5, f32::NAN), (31, 0.5)] {
            let mut changed = divisors.clone();
            changed[at] = value;
            assert_eq!(recovered(&changed, 5e5), None, "{at}: {value}");
        }
        for others in [&[][..], &[1.0], &[0.0, 0.0], &[1.0, 2.0, 3.0, 4.0, 5.0], &[-1.0, -8.0]] {
            assert_eq!(recovered(others, 1e4), None, "{others:?}");
        }
    }

    #[test]
    fn only_equal_divisors_without_a_factor_are_replaced() {
        let divisors = llama3(8.0, ENDS, 8192.0).divisors(5e5, 64);
        let config = |changes: &[(&str, Value)]| {
            let mut config = json!({ "rope_theta": 5e5, "rope_scaling": {
                "rope_type": "longrope", "short_factor": divisors, "long_factor": divisors,
                "attention_factor": 1.0, "factor": 1.0, "original_max_position_embeddings": 1024,
            } });
            for (key, value) in changes {
                config["rope_scaling"][*key] = value.clone();
            }
            let mut config = config.as_object().unwrap().clone();
            let before = config.clone();
            restore_llama3(&mut config);
            (config["rope_scaling"].clone(), config == before)
        };
        let expected = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192 });
        assert_eq!(config(&[]), (expected, false));
        for (key, value) in [
            ("rope_type", json!("yarn")),
            ("factor", json!(2.0)),
            ("attention_factor", json!(1.1)),
            ("attention_factor", Value::Null),
            ("long_factor", json!(vec![1.0; 32])),
            ("short_factor", json!("none")),
        ] {
            assert!(config(&[(key, value.clone())]).1, "{key}: {value}");
        }
    }
}
