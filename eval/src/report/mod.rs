//! Reports: HTML pages that explain a result.
//!
//! A page is one HTML file. It needs no network and no script, every text in it is escaped, and the same numbers give
//! the same bytes.

mod bits;
mod evaluation;
mod gate;
#[cfg(feature = "decoders")]
mod quantization;
#[cfg(not(feature = "decoders"))]
#[path = "no_quantization.rs"]
mod quantization;
mod svg;

use std::collections::BTreeSet;

use maud::{DOCTYPE, Markup, PreEscaped, html};

pub use self::bits::LinearCell;
pub use self::evaluation::{EvaluationReport, WorstWindow};
pub use self::gate::gate_page;
pub use self::quantization::QuantReport;
#[cfg(feature = "decoders")]
pub use self::quantization::quantization_page;
pub use quant_formats::wording::bytes;

use quant_formats::blocks::block_type;
use quant_formats::scheme::LinearScheme;

use crate::{Divergence, Estimate, Evaluation, ModelIdentity, SchemeShare, Tool, closest};

const STYLE: &str = include_str!("style.css");

fn page(title: &str, subtitle: &Markup, body: &Markup) -> String {
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                // Nothing is fetched, whatever a name on the page contains.
                meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (title) }
                p.soft { (subtitle) }
                (body)
            }
        }
    };
    markup.into_string()
}

fn tile(name: &str, value: &str, note: &str) -> Markup {
    html! { div.tile { small { (name) } b { (value) } small { (note) } } }
}

fn row(name: &str, value: &str) -> Markup {
    html! { tr { td { (name) } td.hash { (breakable(value)) } } }
}

/// A name or path that may continue on the next line after a separator. Browsers do not break lines there by themselves.
fn breakable(name: &str) -> Markup {
    let (mut parts, mut start) = (Vec::new(), 0);
    for (at, separator) in name.match_indices(['.', '_', '-', '/', ':']) {
        let end = at + separator.len();
        if name[end..].starts_with(char::is_alphanumeric) {
            parts.push(&name[start..end]);
            start = end;
        }
    }
    html! { @for part in parts { (part) wbr; } (&name[start..]) }
}

fn tool(tool: &Tool) -> String {
    let sha256 = tool.sha256.as_deref().unwrap_or("SHA-256 unknown");
    format!("{} {} ({}), {sha256}", tool.name, tool.version, tool.isa)
}

/// Formats a divergence: five digits after the point, or two significant digits below 0.001.
pub fn nats(value: f64) -> String {
    if value != 0.0 && value.abs() < 1e-3 { format!("{value:.1e}") } else { format!("{value:.5}") }
}

/// Formats a divergence with its standard error.
pub fn nats_of(estimate: Estimate) -> String {
    format!("{} ± {}", nats(estimate.mean), error_in_nats(estimate))
}

/// Formats the standard error of a divergence with the digits of the divergence, or with one significant digit if the
/// divergence is below 0.001.
pub fn error_in_nats(estimate: Estimate) -> String {
    match estimate.standard_error {
        Some(error) if error != 0.0 && estimate.mean.abs() < 1e-3 => format!("{error:.0e}"),
        Some(error) => format!("{error:.5}"),
        None => "?".to_owned(),
    }
}

fn estimate_tile(name: &str, estimate: Estimate, digits: usize, note: &str) -> Markup {
    tile(name, &format!("{estimate:.digits$}"), note)
}

/// Results by size and divergence; those on the Pareto front are marked.
fn pareto(results: &[(String, &Evaluation)]) -> Markup {
    let compared: Vec<_> =
        results.iter().filter_map(|(name, e)| Some((name, *e, e.comparison.as_ref()?))).collect();
    let place = |(_, e, c): &(&String, &Evaluation, &Divergence)| (e.model.size_bytes, c.kl.mean);
    let beaten = |p: (u64, f64)| {
        compared.iter().map(place).any(|o| o.0 <= p.0 && o.1 <= p.1 && (o.0 < p.0 || o.1 < p.1))
    };
    let points: Vec<svg::Point> = compared
        .iter()
        .map(|result| {
            let (size, kl) = place(result);
            svg::Point { x: size as f64 / 1e6, y: kl, name: result.0.clone(), marked: !beaten((size, kl)) }
        })
        .collect();
    html! {
        (svg::points("Divergence and size", "Horizontal: MB of weight files. Vertical: KL in nats per token.", &points))
        div.wide { table.cards.labelled.compared {
            tr {
                th { "" } th.text { "result" } th.text { "scheme" } th.text { "method" } th { "bits" } th { "size" }
                th { "perplexity" } th { "mean KL" } th { "same top token" } th { "" }
            }
            @for (number, ((name, e, c), point)) in compared.iter().zip(&points).enumerate() {
                tr {
                    td { (number + 1) }
                    td.text.names { (breakable(name)) }
                    td.text data-label="scheme" { (breakable(&schemes(&e.model))) }
                    td.text data-label="method" { (e.model.method.as_deref().unwrap_or("–")) }
                    td data-label="bits" { (bits(&e.model)) }
                    td data-label="size" { (bytes(e.model.size_bytes)) }
                    td data-label="perplexity" { (format!("{:.3}", e.scores.perplexity)) }
                    td data-label="mean KL" { (nats_of(c.kl)) }
                    td data-label="same top token" { (format!("{:.4}", c.top1_agreement)) }
                    td.name { @if point.marked && points.len() > 1 { "Pareto-optimal" } }
                }
            }
        } }
        @if points.len() > 1 {
            p.soft { "Pareto-optimal: no other result is both smaller and closer to the reference." }
        }
        @if let Some(sentence) = closest_of(&compared.iter().map(|(name, e, _)| (name.as_str(), *e)).collect::<Vec<_>>()) {
            p { (sentence) }
        }
    }
}

/// Which of several results is closest to their reference, as a sentence; `None` if there is nothing to compare.
pub fn closest_of(results: &[(&str, &Evaluation)]) -> Option<String> {
    let compared: Vec<_> =
        results.iter().filter_map(|(name, e)| Some((*name, *e, e.comparison.as_ref()?))).collect();
    let (_, first, _) = compared.first()?;
    if compared.iter().any(|(_, e, _)| e.tokens_sha256 != first.tokens_sha256) {
        return None;
    }
    let windows: Vec<&[f64]> = compared.iter().map(|(.., c)| c.window_kl.as_slice()).collect();
    let found = closest(&windows, &first.window_tokens)?;
    let kl = |index: usize| nats(compared[index].2.kl.mean);
    let (best, next) = (compared[found.index].0, compared[found.next].0);
    Some(match found.clear {
        _ if windows[found.index] == windows[found.next] => {
            format!(
                "Equally close to the reference: {best} and {next}, with a mean KL of {} nats.",
                kl(found.index)
            )
        }
        true => format!(
            "Closest to the reference: {best}, with a mean KL of {} nats; significantly closer than {next} with {} \
             (at the 5 % level, by a paired test over windows).",
            kl(found.index),
            kl(found.next)
        ),
        false => format!(
            "Closest to the reference: {best}, but not significantly closer than {next} (mean KL {} and {} nats; at \
             the 5 % level, by a paired test over windows).",
            kl(found.index),
            kl(found.next)
        ),
    })
}

/// The bits per code of a model's linears: `4`, `4 to 8`, or a dash if some are float or have an unknown scheme.
pub fn bits(model: &ModelIdentity) -> String {
    let parsed = |SchemeShare { scheme, .. }: &SchemeShare| match block_type(scheme) {
        Some(kind) => kind.code_bits(),
        None => scheme.parse::<LinearScheme>().ok().map(|scheme| scheme.bits()),
    };
    let bits: Option<BTreeSet<u8>> = model.schemes.iter().map(parsed).collect();
    let bits = bits.unwrap_or_default();
    match (bits.first(), bits.last()) {
        (Some(low), Some(high)) if low == high => low.to_string(),
        (Some(low), Some(high)) => format!("{low} to {high}"),
        _ => "–".into(),
    }
}

/// The schemes of a model's linears, the most frequent first, and that of its KV cache.
pub fn schemes(model: &ModelIdentity) -> String {
    let mut shares: Vec<_> = model.schemes.iter().collect();
    shares.sort_by(|a, b| b.linears.cmp(&a.linears).then_with(|| a.scheme.cmp(&b.scheme)));
    let text = match &shares[..] {
        [] => "unknown".to_owned(),
        [one] => one.scheme.clone(),
        several => {
            let parts: Vec<_> =
                several.iter().map(|s| format!("{} ({} linears)", s.scheme, s.linears)).collect();
            parts.join(", ")
        }
    };
    match model.kv_cache {
        Some(kv) => format!("{text}, KV cache {kv}"),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_break_after_separators() {
        for (name, shown) in [
            ("model.layers.0.self_attn", "model.<wbr>layers.<wbr>0.<wbr>self_<wbr>attn"),
            ("/tmp/<b>-ä", "/<wbr>tmp/&lt;b&gt;-<wbr>ä"),
            ("a._b...", "a._<wbr>b..."),
            ("w4a16", "w4a16"),
            ("", ""),
        ] {
            assert_eq!(breakable(name).into_string(), shown);
        }
    }
}
