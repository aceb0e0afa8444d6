//! A first policy, from results that are known to be good.

use super::Metric;
use crate::Evaluation;

/// The headroom of a suggested cap on a measurement, as a fraction of the measured value or, for an agreement, of its
/// distance from 1.
const HEADROOM: f64 = 0.25;
/// The smallest suggested margin for the perplexity: half a percent.
const MARGIN: f64 = 0.005;
/// The smallest suggested margin for the divergence, as a fraction of it.
const KL_MARGIN: f64 = 0.1;
/// The one-sided level of the suggested policy.
const LEVEL: f64 = 0.05;

/// Returns a policy (TOML) that these results pass: caps with some headroom, and margins for the divergence and the
/// perplexity that the number of windows can decide. It says that a later model must not be much worse than these
/// results, not that these results are good enough.
pub fn suggest(results: &[(String, Evaluation)]) -> String {
    let mut text = format!(
        "schema = \"quant-gate-policy/1\"\nlevel = {LEVEL}\non_inconclusive = \"inconclusive\"\n\n\
         # Tests against the baseline. With these windows, an equally good model passes each of them with a probability of\n\
         # about 80 % or more. If a difference such as that between two calibration seeds must pass too, measure it, and\n\
         # add it to the margins.\n"
    );
    for (name, result) in results {
        if let Some(margin) = kl_margin(result) {
            text.push_str(&format!(
                "\n# At most {} nats more mean KL. This is the more sensitive test.\n[[non_inferiority]]\nmetric = \"kl\"\n\
                 against = \"baseline\"\nmargin = {}\nresults = [{}]\n",
                shown(margin),
                shown(margin),
                quoted(name)
            ));
        }
    }
    let margin = rounded_up(results.iter().filter_map(|(_, e)| detectable(e)).fold(MARGIN, f64::max));
    text.push_str(&format!(
        "\n# At most {:.1} % more perplexity.\n[[non_inferiority]]\nmetric = \"perplexity\"\nagainst = \"baseline\"\n\
         margin = {margin}\n",
        100.0 * margin,
    ));
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

/// A margin for the divergence: a fraction of it, or as much as these windows can detect if that is more. Divergences of
/// two models differ from window to window less than each of them does.
fn kl_margin(result: &Evaluation) -> Option<f64> {
    let kl = result.comparison.as_ref()?.kl;
    let detectable = kl.minimum_detectable(LEVEL, &result.window_tokens).unwrap_or_default();
    Some(rounded_up(detectable.max(KL_MARGIN * kl.mean))).filter(|margin| *margin > 0.0)
}

/// Returns a string in TOML: a JSON string, except that TOML also escapes this character.
fn quoted(name: &str) -> String {
    serde_json::Value::from(name).to_string().replace('\u{7f}', "\\u007f")
}

fn cap(metric: Metric, result: &str, key: &str, limit: &str, measured: &str) -> String {
    let name = quoted(result);
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
