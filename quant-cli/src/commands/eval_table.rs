//! The table that `quant eval` prints.

use std::path::Path;

use quant_core::wording::counted;
use quant_evaluator::report::{error_in_nats, nats};
use quant_evaluator::statistics::Quantile;
use quant_evaluator::{Divergence, Estimate, Evaluation, ModelIdentity};

use crate::output::{bytes, table};

/// Returns the result as text.
pub fn show(result: &Evaluation) -> String {
    let row = |name: &str, estimate: &Estimate, digits: usize| {
        let error = estimate.standard_error.map_or("?".into(), |e| format!("{e:.digits$}"));
        vec![name.to_owned(), format!("{:.digits$}", estimate.mean), error]
    };
    let scores = &result.scores;
    let mut rows = vec![row("perplexity", &scores.perplexity, 3), row("nats per token", &scores.nll, 4)];
    for (name, estimate, digits) in [
        ("bits per byte", &scores.bits_per_byte, 4),
        ("word perplexity", &scores.word_perplexity, 3),
        ("byte perplexity", &scores.byte_perplexity, 4),
    ] {
        rows.extend(estimate.iter().map(|e| row(name, e, digits)));
    }
    if let Some(comparison) = &result.comparison {
        rows.push(row("reference perplexity", &comparison.reference.perplexity, 3));
        rows.push(row("perplexity ratio", &comparison.perplexity_ratio, 5));
        rows.push(vec!["mean KL (nats)".into(), nats(comparison.kl.mean), error_in_nats(comparison.kl)]);
        if let Some(floor) = &comparison.noise_floor {
            rows.push(vec!["  its noise floor".into(), nats(floor.kl.mean), error_in_nats(floor.kl)]);
        }
        rows.push(row("same top token", &comparison.top1_agreement, 4));
        rows.push(row("same top five tokens", &comparison.top5_overlap, 4));
        rows.push(row("RMS change of p", &comparison.rms_delta_p, 5));
    }
    let mut text = table(&["", "mean", "± standard error"], &rows);
    if let Some(comparison) = &result.comparison {
        text.push_str("\nUse the mean KL to compare models: lower is better, and 0 means identical.\n\n");
        text.push_str(&spread(comparison));
    }
    let cache_of = |before: &str, model: Option<&ModelIdentity>| {
        let kv = model.and_then(|m| m.kv_cache);
        kv.map(|kv| format!("{before} keys and values in {kv}")).unwrap_or_default()
    };
    let cache =
        cache_of(",", Some(&result.model)) + &cache_of("; the reference with", result.reference.as_ref());
    // Nothing was measured if the results are those of shards.
    let rate = match result.tokens_per_second {
        0.0 => String::new(),
        rate => format!(", {rate:.0} tokens/s"),
    };
    text.push_str(&format!(
        "\nprofile {} on {}: {} in {}{rate}; weights of {}{cache}\n",
        result.profile,
        Path::new(&result.text.name).display(),
        counted(result.tokens_scored, "token"),
        counted(result.windows, "window"),
        bytes(result.model.size_bytes),
    ));
    text
}

/// Returns a table of the distribution of the divergence over tokens.
fn spread(comparison: &Divergence) -> String {
    let row = |name: &str, q: &Quantile| {
        let interval = match (q.low, q.high) {
            (Some(low), Some(high)) => format!("{} – {}", nats(low), nats(high)),
            _ => "?".into(),
        };
        vec![name.to_owned(), nats(q.value), interval]
    };
    let q = &comparison.kl_quantiles;
    let rows = [
        row("median", &q.median),
        row("90th percentile", &q.p90),
        row("99th percentile", &q.p99),
        row("99.9th percentile", &q.p999),
        row("maximum", &q.max),
    ];
    let mut text = table(&["KL per token (nats)", "", "95 % interval"], &rows);
    if comparison.at_noise_floor == Some(true) {
        text.push_str(
            "\nThe mean KL is below three times its noise floor, so this text shows no difference \
            between the models.\n",
        );
    }
    if let Some(increase) = comparison.minimum_detectable_increase {
        text.push_str(&format!(
            "\nOn this text, a perplexity increase of {:.2} % would be detected with 80 % probability.\n",
            100.0 * increase
        ));
    }
    text
}
