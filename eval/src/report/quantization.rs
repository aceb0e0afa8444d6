//! The page of a quantization.

use std::collections::BTreeSet;

use maud::{Markup, html};
pub use quant_core::pipeline::QuantReport;

use quant_core::pipeline::TensorReport;
use quant_core::run::{MIN_EXPERT_TOKENS, UndersampledLinears};
use quant_core::transform::ChannelOutlier;

use super::bits::{LinearCell, bit_map};
use super::svg::{self, Series};
use super::{breakable, bytes, page, tile};

pub(super) fn in_one_line(report: &QuantReport, schemes: &str) -> String {
    format!(
        "{} as {}, {schemes}, {:.2} bits per quantized weight",
        report.method, report.format, report.bits_per_quantized_weight
    )
}

/// The table below the chart lists at most `shown` tensors, the worst first.
pub(super) fn tensor_errors(report: &QuantReport, shown: usize) -> Markup {
    let quantized: Vec<&TensorReport> = report.tensors.iter().filter(|t| t.weight_error.is_some()).collect();
    let error = |t: &TensorReport| t.weight_error.map_or(0.0, |e| 100.0 * e.relative_rms);
    let mut worst = quantized.clone();
    worst.sort_by(|a, b| error(b).total_cmp(&error(a)));
    let errors = Series {
        name: "relative error in percent",
        class: "model",
        values: quantized.iter().map(|t| error(t)).collect(),
    };
    // Methods leave some columns empty.
    let scaled = quantized.iter().any(|t| t.scale_search.is_some() || t.smooth.is_some());
    let searched = quantized.iter().any(|t| t.scale_search.is_some());
    let gptq = quantized.iter().any(|t| t.gptq.is_some());
    html! {
        p { "RMS of the rounding error divided by the RMS of the weight, in percent. The chart shows the tensors \
            in the order of the model, the table by error." }
        @if gptq {
            p { "GPTQ minimizes the error of a linear's output, not that of its weight: the mean squared error over \
                outputs and calibration tokens is shown beside it." }
        }
        (svg::bars("Error of every quantized tensor", "Horizontal: tensors. Vertical: error in percent.", &[], &[errors]))
        div.wide { table.cards {
            @if worst.len() > shown { caption { "The worst " (shown) " of " (worst.len()) } }
            tr {
                th { "tensor" } th { "scheme" } th { "error, %" } th { "signal to noise (SQNR), dB" }
                @if scaled { th { "exponent of scales" } }
                @if searched { th { "error before and after the search" } }
                @if gptq { th { "GPTQ: output error" } }
            }
            @for t in worst.iter().take(shown) {
                tr {
                    td.text.names { (breakable(&t.tensor)) }
                    td { (t.scheme.as_deref().unwrap_or("")) }
                    td { (format!("{:.2}", error(t))) }
                    td { (t.weight_error.and_then(|e| e.sqnr_db).map_or("∞".to_owned(), |db| format!("{db:.1}"))) }
                    @if scaled { td { (exponents(t)) } }
                    @if searched {
                        td { @if let Some(s) = &t.scale_search { (number(s.error_before)) " → " (number(s.error_after)) } }
                    }
                    @if gptq { td { @if let Some(g) = &t.gptq { (number(g.loss)) } } }
                }
            }
        } }
    }
}

fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if (1e-3..1e4).contains(&size) => {
            let digits = 3 - size.log10().floor() as i32;
            format!("{value:.*}", digits.max(0) as usize)
        }
        _ => format!("{value:.3e}"),
    }
}

/// The exponents of the chosen scales; a dash if no scaling was best.
fn exponents(tensor: &TensorReport) -> String {
    let awq = tensor.scale_search.as_ref().map(|search| search.ratio);
    let smooth = tensor.smooth.as_ref().map(|smooth| smooth.alpha);
    let text = |exponent: Option<f32>| exponent.map_or("–".to_owned(), |e| format!("{e:.2}"));
    [awq, smooth].into_iter().flatten().map(text).collect::<Vec<_>>().join(", ")
}

fn outliers(report: &QuantReport) -> Vec<Markup> {
    let searched = report.tensors.iter().filter_map(|t| t.scale_search.as_ref());
    let searched = searched.map(|s| (&s.producer, &s.consumers, s.outlier));
    let smoothed = report.tensors.iter().filter_map(|t| t.smooth.as_ref());
    let smoothed = smoothed.map(|s| (&s.producer, &s.consumers, s.outlier));
    let charts = [
        outlier_charts(
            "Outliers in the inputs of linear layers",
            "Mean magnitude of the largest channel divided by that of the median channel, on the \
            calibration text, without scales and with the chosen scales.",
            searched,
        ),
        outlier_charts(
            "Outliers before and after SmoothQuant",
            "Maximum magnitude of the largest channel divided by that of the median channel, on the \
            calibration text, before and after smoothing.",
            smoothed,
        ),
    ];
    charts.into_iter().flatten().collect()
}

fn outlier_charts<'a>(
    title: &str,
    about: &str,
    records: impl Iterator<Item = (&'a String, &'a Vec<String>, Option<ChannelOutlier>)>,
) -> Option<Markup> {
    // Linears with the same input share a record; inputs of one kind share a chart.
    let mut kinds: Vec<(String, Vec<ChannelOutlier>)> = Vec::new();
    let mut seen = BTreeSet::new();
    for (producer, consumers, outlier) in records {
        let Some(outlier) = outlier.filter(|_| seen.insert(producer)) else { continue };
        let mut leaves: Vec<&str> = Vec::new();
        for module in consumers {
            let leaf = module.rsplit('.').next().unwrap_or(module);
            if !leaves.contains(&leaf) {
                leaves.push(leaf);
            }
        }
        let kind = leaves.join(", ");
        match kinds.iter_mut().find(|(name, _)| *name == kind) {
            Some((_, values)) => values.push(outlier),
            None => kinds.push((kind, vec![outlier])),
        }
    }
    (!kinds.is_empty()).then(|| html! {
        h2 { (title) }
        p { (about) }
        div.two {
            @for (kind, values) in &kinds {
                figure {
                    figcaption { (kind) }
                    (svg::lines(kind, "block", true, &[
                        Series { name: "before", class: "other", values: values.iter().map(|o| o.before).collect() },
                        Series { name: "after", class: "model", values: values.iter().map(|o| o.after).collect() },
                    ]))
                }
            }
        }
    })
}

/// In ascending order of tokens.
fn few_tokens(report: &QuantReport) -> Option<Markup> {
    let mut few = UndersampledLinears::in_report(report)?;
    few.experts.sort_by_key(|expert| expert.tokens);
    Some(html! {
        h2 { "Experts with few tokens" }
        p { "Experts that saw fewer than " (MIN_EXPERT_TOKENS) " tokens of the calibration text. More text reaches more \
            experts." }
        div.wide { table.cards {
            tr { th { "expert" } th { "tokens" } }
            @for expert in &few.experts {
                tr { td.text.names { (breakable(&expert.module)) } td { (expert.tokens) } }
            }
        } }
    })
}

/// Renders the page of a quantization; `title` names the output.
pub fn quantization_page(title: &str, report: &QuantReport, linears: &[LinearCell]) -> String {
    let quantized = report.tensors.iter().filter(|t| t.weight_error.is_some()).count();
    let schemes: BTreeSet<&str> = report.tensors.iter().filter_map(|t| t.scheme.as_deref()).collect();
    let schemes = match schemes.len() {
        0 => "no quantized tensor".to_owned(),
        1..=4 => schemes.into_iter().collect::<Vec<_>>().join(", "),
        count => format!("{count} schemes"),
    };
    let subtitle = html! {
        (report.method) ", " (schemes) ", as " (report.format)
        @if let Some(kv) = report.kv { ", KV cache " (kv) }
        "; by quant " (report.version)
    };
    let body = html! {
        p.verdict { strong {
            (format!("{:.1} % of the original size, {:.2} bits per quantized weight.", 100.0 * report.bytes_after as f64 / report.bytes_before.max(1) as f64, report.bits_per_quantized_weight))
        } }
        p { "Rounding errors do not predict quality. Evaluate this model with the original as the reference to measure it." }
        div.tiles {
            (tile("tensors before", &bytes(report.bytes_before), ""))
            (tile("tensors now", &bytes(report.bytes_after), &format!("{:.1} % of before", 100.0 * report.bytes_after as f64 / report.bytes_before.max(1) as f64)))
            (tile("bits per quantized weight", &format!("{:.3}", report.bits_per_quantized_weight), "including \
                scales and zero points"))
            (tile("quantized tensors", &quantized.to_string(), &format!("of {}", report.tensors.len())))
            @if let Some(c) = &report.calibration {
                (tile("calibration", &format!("{} × {}", c.samples, c.length), &format!("{} tokens counted", c.tokens_counted)))
            }
        }
        @if !linears.is_empty() { h2 { "Precision of every linear" } (bit_map(linears)) }
        @if quantized > 0 { h2 { "Error of every quantized tensor" } (tensor_errors(report, usize::MAX)) }
        @for charts in outliers(report) { (charts) }
        @if let Some(experts) = few_tokens(report) { (experts) }
        h2 { "Provenance" }
        div.wide { table {
            tr { td { "input, SHA-256" } td.hash { (report.source.sha256) } }
            @if let Some(c) = &report.calibration {
                tr { td { "calibration tokens, SHA-256" } td.hash { (c.tokens_sha256) } }
                tr { td { "seed" } td.hash { (c.seed) } }
            }
        } }
    };
    page(title, &subtitle, &body)
}
