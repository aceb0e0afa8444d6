//! A first policy, from results that are known to be good.

use super::Metric;
use crate::Evaluation;

/// The headroom of a suggested cap on a measurement, as a fraction of the measured value or, for an agreement, of its
/// distance from 1.
const HEADROOM: f64 = 0.25;
/// The smallest suggested margin for the perplexity: half a percent.
const MARGIN: f64 = 0.005;
/// The one-sided level of the suggested policy.
const LEVEL: f64 = 0.05;

/// Returns a policy (TOML) that these results pass: caps with some headroom, and a margin for the perplexity that the
/// number of windows can decide. It says that a later model must not be much worse than these results, not that these
/// results are good enough.
pub fn suggest(results: &[(String, Evaluation)]) -> String {
    let margin = results.iter().filter_map(|(_, e)| detectable(e)).fold(MARGIN, f64::max);
    let mut text = format!(
        "schema = \"quant-gate-policy/1\"\nlevel = {LEVEL}\non_inconclusive = \"inconclusive\"\n\n\
         # Against the baseline: at most {:.1} % more perplexity. With these windows, an equally good model passes with\n\
         # a probability of 80 %. If a difference such as that between two calibration seeds must pass too, measure it,\n\
         # and set the margin above it by the same amount.\n\
         [[non_inferiority]]\nmetric = \"perplexity\"\nagainst = \"baseline\"\nmargin = {}\n",
        100.0 * rounded_up(margin),
        rounded_up(margin),
    );
    for (name, result) in results {
        for metric in [Metric::KlP99, Metric::Kl, Metric::Top1Agreement] {
            let Some(value) = metric.value(result) else { continue };
            let (key, limit) = match metric {
                Metric::Top1Agreement => {
                    ("at_least", 1.0 - rounded_up((1.0 - value) * (1.0 + HEADROOM)).min(1.0))
                }
                _ => ("at_most", rounded_up(value * (1.0 + HEADROOM))),
            };
            text.push_str(&cap(metric, name, key, &shown(limit), &shown(value)));
        }
        let size = result.model.size_bytes;
        let limit = size.saturating_add(size / 50);
        text.push_str(&cap(Metric::SizeBytes, name, "at_most", &limit.to_string(), &size.to_string()));
    }
    text
}

/// The smallest relative increase of the perplexity that these windows can detect, if differences from the baseline
/// vary as much as those from the reference.
fn detectable(result: &Evaluation) -> Option<f64> {
    let difference = result.comparison.as_ref()?.delta_nll;
    difference.minimum_detectable(LEVEL, &result.window_tokens).map(f64::exp_m1)
}

fn cap(metric: Metric, result: &str, key: &str, limit: &str, measured: &str) -> String {
    // A JSON string is also a TOML string, except that TOML escapes this character.
    let name = serde_json::Value::from(result).to_string().replace('\u{7f}', "\\u007f");
    format!(
        "\n# Measured: {measured}.\n[[cap]]\nmetric = \"{}\"\n{key} = {limit}\nresults = [{name}]\n",
        metric.name()
    )
}

/// A number with two significant digits, rounded up.
fn rounded_up(value: f64) -> f64 {
    if !(value.is_finite() && value > 0.0) {
        return value.max(0.0);
    }
    let digits = 1 - value.log10().floor() as i32;
    let text = format!("{:.*}", digits.clamp(0, 17) as usize, value);
    let near: f64 = text.parse().unwrap_or(value);
    let step = 10_f64.powi(-digits);
    let up = if near >= value { near } else { near + step };
    format!("{up:.*}", digits.clamp(0, 17) as usize).parse().unwrap_or(up)
}

/// A float in TOML, which needs a digit on both sides of the point.
fn shown(value: f64) -> String {
    let text = format!("{value:.6}");
    let text = text.trim_end_matches('0');
    match text.ends_with('.') {
        true => format!("{text}0"),
        false if value > 0.0 && value < 1e-5 => format!("{value:.1e}"),
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_up_to_two_digits() {
        for (value, up) in [
            (0.123, 0.13),
            (0.12, 0.12),
            (0.001_01, 0.0011),
            (0.99, 0.99),
            (0.991, 1.0),
            (12.1, 13.0),
            (0.0, 0.0),
        ] {
            assert_eq!(rounded_up(value), up, "{value}");
        }
        for exponent in -12..3 {
            for mantissa in 1..1000 {
                let value = f64::from(mantissa) * 1.37 * 10_f64.powi(exponent);
                let up = rounded_up(value);
                assert!(up >= value * (1.0 - 1e-12) && up <= value * 1.1001, "{value} {up}");
            }
        }
        assert_eq!((&*shown(0.13), &*shown(1.0), &*shown(3.2e-6)), ("0.13", "1.0", "3.2e-6"));
    }
}
