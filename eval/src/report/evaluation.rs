//! The page of one evaluation.

use maud::{Markup, html};
use quant_formats::scheme::KvScheme;

use super::bits::{LinearCell, bit_map};
use super::quantization::{QuantReport, in_one_line, tensor_errors};
use super::svg::{self, Series};
use super::{bytes, estimate_tile, nats, nats_of, page, pareto, row, schemes, tile, tool};
use crate::statistics::{Histogram, Quantile, degrees_of_freedom, student};
use crate::{Anatomy, Bos, BosPolicy, Divergence, Evaluation, ModelIdentity};

const WORST: usize = 8;
const TENSORS: usize = 16;

/// The contents of an evaluation's page.
pub struct EvaluationReport<'a> {
    /// The result.
    pub result: &'a Evaluation,
    /// Block-by-block comparison of both models, if there is a reference.
    pub anatomy: Option<&'a Anatomy>,
    /// How the model's linears are stored, in order of blocks.
    pub linears: &'a [LinearCell],
    /// Quantization errors of the model's tensors, if known.
    pub quantization: Option<&'a QuantReport>,
    /// The beginnings of the worst windows' texts.
    pub worst: &'a [WorstWindow],
    /// Other results on the same text, by name.
    pub others: &'a [(String, Evaluation)],
}

/// A window with the beginning of its text.
pub struct WorstWindow {
    /// The window's index.
    pub window: usize,
    /// The beginning of its text.
    pub excerpt: String,
}

impl EvaluationReport<'_> {
    /// Returns the indices of the worst windows, worst first: by divergence, or without a reference by negative
    /// log-likelihood.
    pub fn worst_windows(result: &Evaluation) -> Vec<usize> {
        let by = match &result.comparison {
            Some(comparison) => &comparison.window_kl,
            None => &result.scores.window_nll,
        };
        let mut numbers: Vec<usize> = (0..by.len()).collect();
        numbers.sort_by(|&a, &b| by[b].total_cmp(&by[a]));
        numbers.truncate(WORST);
        numbers
    }

    /// Renders the page.
    pub fn page(&self) -> String {
        let r = self.result;
        let subtitle = html! {
            "Profile " (r.profile) " on " (r.text.name) ": " (r.tokens_scored) " tokens in " (r.windows) " windows"
            @if let Some(kv) = r.model.kv_cache { "; keys and values cached in " (cached_in(kv)) }
            @if let Some(reference) = &r.reference { "; compared with " (reference.path) }
            ". ± is one standard error over windows."
        };
        let body = html! {
            (self.verdict())
            (tiles(r))
            @if let Some(comparison) = &r.comparison {
                h2 { "Divergence from the reference" }
                (divergence(comparison))
            }
            @if let Some(anatomy) = self.anatomy {
                h2 { "Error by block" }
                (through_blocks(anatomy))
            }
            @if !self.linears.is_empty() {
                h2 { "Precision of every linear" }
                (bit_map(self.linears))
            }
            @if let Some(report) = self.quantization {
                h2 { "Error of every quantized tensor" }
                (tensor_errors(report, TENSORS))
            }
            h2 { "Worst windows" }
            (self.worst_table())
            @if !self.others.is_empty() {
                h2 { "Compared runs" }
                @let own = (format!("{} (this)", r.model.path), r);
                (pareto(&std::iter::once(own).chain(self.others.iter().map(|(n, e)| (n.clone(), e))).collect::<Vec<_>>()))
            }
            h2 { "Provenance" }
            (provenance(r))
        };
        page(&r.model.path, &subtitle, &body)
    }

    fn verdict(&self) -> Markup {
        let r = self.result;
        let what = match self.quantization {
            Some(report) => in_one_line(report, &schemes(&r.model)),
            None => schemes(&r.model),
        };
        let size = match &r.reference {
            Some(reference) => {
                let share = 100.0 * r.model.size_bytes as f64 / reference.size_bytes.max(1) as f64;
                format!("{}, {share:.0} % of the reference's weight files", bytes(r.model.size_bytes))
            }
            None => bytes(r.model.size_bytes),
        };
        html! {
            p.verdict { strong { (conclusion(r)) } }
            p { (what) "; " (size) "." }
        }
    }

    fn worst_table(&self) -> Markup {
        let r = self.result;
        let kl = r.comparison.as_ref().map(|c| &c.window_kl);
        html! {
            div.wide { table.cards {
                tr {
                    th { "window" }
                    @if kl.is_some() { th { "KL" } }
                    th { "nats per token" }
                    th.text { "beginning" }
                }
                @for worst in self.worst {
                    tr {
                        td { (worst.window) }
                        @if let Some(kl) = kl { td { (nats(kl[worst.window])) } }
                        td { (format!("{:.4}", r.scores.window_nll[worst.window])) }
                        td.text { (worst.excerpt) }
                    }
                }
            } }
        }
    }
}

/// The result in one sentence. The gate decides what is acceptable.
fn conclusion(r: &Evaluation) -> String {
    let Some(c) = &r.comparison else {
        return format!(
            "Perplexity {:.3}. Without a reference, the loss due to quantization is unknown.",
            r.scores.perplexity
        );
    };
    let kl = format!("mean KL is {} nats", nats(c.kl.mean));
    if c.at_noise_floor == Some(true) {
        return format!(
            "No measurable difference from the reference on this text: the {kl}, near the noise floor."
        );
    }
    let change = 100.0 * (c.perplexity_ratio.mean - 1.0);
    let top = 100.0 * c.top1_agreement.mean;
    let t = student::quantile(0.975, degrees_of_freedom(&r.window_tokens));
    // The logarithm of the perplexity ratio.
    let clear = (c.delta_nll.standard_error.zip(t)).is_some_and(|(e, t)| c.delta_nll.mean.abs() > t * e);
    let perplexity = match (clear, change > 0.0) {
        (false, _) => "No clear change of the perplexity".to_owned(),
        (true, true) => format!("Perplexity is {change:.2} % higher than the reference's"),
        (true, false) => format!("Perplexity is {:.2} % lower than the reference's", -change),
    };
    format!("{perplexity}. The {kl}, and the top token is the same at {top:.1} % of positions.")
}

fn tiles(r: &Evaluation) -> Markup {
    let scores = &r.scores;
    html! {
        div.tiles {
            (estimate_tile("perplexity", scores.perplexity, 3, &r.profile))
            @if let Some(c) = &r.comparison {
                (estimate_tile("perplexity ratio", c.perplexity_ratio, 4, &format!("reference {:.3}", c.reference.perplexity)))
                @let floor = c.noise_floor.as_ref().map(|f| format!("noise floor {}", nats_of(f.kl))).unwrap_or_default();
                (tile("mean KL, nats", &nats_of(c.kl), &floor))
                (estimate_tile("same top token", c.top1_agreement, 4, "fraction of positions"))
            }
            @if let Some(bits) = scores.bits_per_byte {
                (estimate_tile("bits per byte", bits, 4, "comparable across tokenizers"))
            }
            @let before = r.reference.as_ref().map(|m| format!("reference {}", bytes(m.size_bytes))).unwrap_or_default();
            (tile("weight files", &bytes(r.model.size_bytes), &before))
        }
    }
}

fn divergence(c: &Divergence) -> Markup {
    let share = |h: &Histogram| -> Vec<f64> {
        let total = h.total().max(1) as f64;
        h.counts.iter().map(|n| 100.0 * *n as f64 / total).collect()
    };
    let mut series = vec![Series { name: "the model", class: "model", values: share(&c.kl_histogram) }];
    if let Some(floor) = &c.noise_floor {
        let name = "noise floor: the reference and a perturbed copy of itself";
        series.push(Series { name, class: "other", values: share(&floor.kl_histogram) });
    }
    let h = &c.kl_histogram;
    let edges: Vec<(usize, String)> = (0..h.counts.len())
        .step_by(h.bins_per_decade.max(1) as usize)
        .enumerate()
        .map(|(decade, bin)| (bin, format!("1e{}", i64::from(h.first_decade) + decade as i64)))
        .collect();
    let q = &c.kl_quantiles;
    let quantile = |name: &str, q: &Quantile| {
        html! { tr {
            td { (name) }
            td { (nats(q.value)) }
            td { @if let (Some(low), Some(high)) = (q.low, q.high) { (nats(low)) " – " (nats(high)) } @else { "?" } }
        } }
    };
    html! {
        (svg::bars("Positions by divergence", "Horizontal: KL in nats. Vertical: percent of positions.", &edges, &series))
        @if c.at_noise_floor == Some(true) {
            p { "The mean is below three times the noise floor: this text does not distinguish the models." }
        }
        @if let Some(floor) = &c.noise_floor {
            p.soft { "Noise floor: " (nats_of(floor.kl)) " nats, on " (floor.windows) " windows. \
             Compare the values below with it." }
        }
        div.two {
            div.wide { table {
                caption { "Quantiles over positions" }
                tr { th { "quantile" } th { "KL" } th { "95 % interval" } }
                (quantile("50 %", &q.median)) (quantile("90 %", &q.p90)) (quantile("99 %", &q.p99))
                (quantile("99.9 %", &q.p999)) (quantile("maximum", &q.max))
            } }
            div.wide { table {
                caption { "By confidence of the reference" }
                tr { th { "largest probability" } th { "positions" } th { "mean KL" } }
                @for bucket in &c.kl_by_confidence {
                    tr {
                        td { (format!("{:.2} – {:.2}", bucket.from, bucket.to)) }
                        td { (bucket.positions) }
                        td { @if let Some(kl) = bucket.kl { (nats_of(kl)) } @else { "–" } }
                    }
                }
            } }
        }
    }
}

fn through_blocks(anatomy: &Anatomy) -> Markup {
    // Linears with the same input share one series.
    let mut drawn: Vec<(String, [Vec<f64>; 2])> = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    for input in &anatomy.inputs {
        if names.contains(&input.linear.as_str()) {
            continue;
        }
        names.push(&input.linear);
        let of = || anatomy.inputs.iter().filter(|i| i.linear == input.linear);
        let values = [of().map(|i| i.reference).collect(), of().map(|i| i.model).collect()];
        match drawn.iter_mut().find(|(_, known)| *known == values) {
            Some((name, _)) => *name += &format!(", {}", input.linear),
            None => drawn.push((input.linear.clone(), values)),
        }
    }
    let error = Series { name: "the model", class: "model", values: anatomy.block_errors.clone() };
    html! {
        p { "Relative error of each block's output, measured on " (anatomy.windows) " windows." }
        @if anatomy.block_errors.iter().all(|e| *e == 0.0) {
            p { "No difference: the outputs of all blocks are bit-identical." }
        } @else {
            (svg::lines("Relative error of hidden states by block", "block", true, &[error]))
        }
        h2 { "Outliers in the inputs of linear layers" }
        p { "Maximum magnitude of the largest channel divided by that of the median channel. A grid with a \
            single scale must cover this range; transforms that move scales from activations into weights \
            reduce it." }
        div.two {
            @for (name, [reference, model]) in drawn {
                figure {
                    figcaption { (name) }
                    (svg::lines(&name, "block", true, &[
                        Series { name: "reference", class: "other", values: reference },
                        Series { name: "model", class: "model", values: model },
                    ]))
                }
            }
        }
    }
}

fn beginning(bos: &BosPolicy) -> String {
    let token = bos.token.map(|t| format!("token {t} ")).unwrap_or_default();
    match bos.policy {
        Bos::None => "no token is added".to_owned(),
        Bos::Text => format!("{token}before the text, added by the tokenizer"),
        Bos::Windows => format!("{token}replaces the first token of every window"),
        Bos::Documents => format!("{token}before every document, not scored"),
    }
}

fn cache(model: &ModelIdentity) -> String {
    let grid = |kv| match kv {
        KvScheme::Kvf8 => format!("{kv}, with one scale for the keys and one for the values of a layer"),
        _ => format!("{kv}, with a scale and a zero point per token and head"),
    };
    model.kv_cache.map_or_else(|| "floats".to_owned(), grid)
}

fn cached_in(kv: KvScheme) -> String {
    match kv {
        KvScheme::Kvf8 => "FP8".to_owned(),
        _ => format!("{} bits", kv.bits()),
    }
}

fn provenance(r: &Evaluation) -> Markup {
    html! {
        div.wide { table {
            (row("tool, SHA-256", &tool(&r.tool)))
            (row("this result, SHA-256", &r.sha256))
            (row("model, SHA-256", &r.model.sha256))
            (row("keys and values of the model", &cache(&r.model)))
            @if let Some(reference) = &r.reference {
                (row("reference, SHA-256", &reference.sha256))
                (row("keys and values of the reference", &cache(reference)))
            }
            (row("text, SHA-256", &r.text.sha256))
            (row("tokenizer, SHA-256", &r.tokenizer_sha256))
            (row("scored tokens, SHA-256", &r.tokens_sha256))
            (row("beginning of text", &beginning(&r.bos)))
        } }
    }
}
