//! Reports: HTML pages that explain a result.
//!
//! A page is one HTML file with embedded style. It needs no network and no script, every text in it is escaped, and the
//! same numbers give the same bytes: timings are left out.

mod evaluation;
mod gate;
mod quantization;
mod svg;

use maud::{DOCTYPE, Markup, PreEscaped, html};

pub use self::evaluation::{EvaluationReport, WorstWindow};
pub use self::gate::gate_page;
pub use self::quantization::{LinearCell, quantization_page};
pub use quant_core::run::bytes;

use crate::{Divergence, Estimate, Evaluation, Tool};

const STYLE: &str = include_str!("style.css");

/// A page.
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

/// A line of the provenance.
fn row(name: &str, value: &str) -> Markup {
    html! { tr { td { (name) } td.hash { (value) } } }
}

fn tool(tool: &Tool) -> String {
    let sha256 = tool.sha256.as_deref().unwrap_or("SHA-256 unknown");
    format!("{} {} ({}), {sha256}", tool.name, tool.version, tool.isa)
}

/// A divergence: five digits after the point, or two significant digits if those would be zero.
pub fn nats(value: f64) -> String {
    if value != 0.0 && value.abs() < 1e-3 { format!("{value:.1e}") } else { format!("{value:.5}") }
}

/// The formatted value with its standard error.
fn nats_of(estimate: Estimate) -> String {
    match estimate.standard_error {
        Some(error) if estimate.mean.abs() < 1e-3 => format!("{} ± {error:.0e}", nats(estimate.mean)),
        Some(error) => format!("{} ± {error:.5}", nats(estimate.mean)),
        None => format!("{} ± ?", nats(estimate.mean)),
    }
}

/// A tile with a mean and its standard error.
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
        div.wide { table {
            tr { th { "" } th.text { "result" } th { "size" } th { "perplexity" } th { "mean KL" } th { "same top token" } th { "" } }
            @for (number, ((name, e, c), point)) in compared.iter().zip(&points).enumerate() {
                tr {
                    td { (number + 1) }
                    td.text { (name) }
                    td { (bytes(e.model.size_bytes)) }
                    td { (format!("{:.3}", e.scores.perplexity)) }
                    td { (nats_of(c.kl)) }
                    td { (format!("{:.4}", c.top1_agreement)) }
                    td.text { @if point.marked && points.len() > 1 { "no other result is both smaller and \
                        closer to the reference" } }
                }
            }
        } }
    }
}
