//! `cargo study quality-qoq`: QoQ on the real models, as they are and with planted outliers in activations and in keys.
//!
//! All models are evaluated on the same tokens, so differences are paired. The checked claims, pooled over the rows by
//! tokens, are:
//!
//! * without KV4, QoQ's KL exceeds that of AWQ with float activations by no more than the loss due to 8-bit
//!   activations, which is measured by leaving the activations float; its perplexity exceeds AWQ's by at most 1.5 %;
//! * planted outliers in activations raise QoQ's KL by at most a tenth of the amount by which they raise that of plain
//!   W4A8KV4;
//! * with planted outliers in keys, QoQ with SmoothAttention is no worse than without it, and SmoothAttention recovers
//!   at least half of the loss that the outliers cause.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use xtask::bench_rtn::quant_binary;
use xtask::support::record::{Record, table, typed_command};
use xtask::support::shell::{output, remove_dir, shared_dir, target_dir};

use crate::quality::{Args, Outcome};
use crate::support::rows::{ROWS, Row};

/// Maximum relative excess of QoQ's perplexity over AWQ's.
const PERPLEXITY: f64 = 0.015;
/// Maximum effect of planted activation outliers on QoQ, as a share of their effect on plain W4A8KV4.
const WIDENED: f64 = 0.1;
/// Share of the loss due to planted key outliers that SmoothAttention must recover.
const TAKEN_BACK: f64 = 0.5;

/// A way to quantize a model: its name, the bits of the scheme, whether groups are progressive, and options.
struct Way {
    name: &'static str,
    scheme: &'static str,
    progressive: bool,
    options: &'static [&'static str],
}

const fn way(
    name: &'static str,
    scheme: &'static str,
    progressive: bool,
    options: &'static [&'static str],
) -> Way {
    Way { name, scheme, progressive, options }
}

const PLAIN: Way = way("plain W4A8KV4", "w4a8kv4", false, &["--method", "rtn"]);
const AWQ: Way = way("AWQ W4A16", "w4a16", false, &["--method", "awq"]);
const FLOAT_ACTIVATIONS: Way = way("QoQ W4A16", "w4a16", true, &["--method", "qoq"]);
const WITHOUT_KV: Way = way("QoQ W4A8", "w4a8", true, &["--method", "qoq"]);
const QOQ: Way = way("QoQ W4A8KV4", "w4a8kv4", true, &["--method", "qoq"]);
const WITHOUT_SMOOTH_ATTENTION: Way =
    way("without SmoothAttention", "w4a8kv4", true, &["--method", "qoq", "--skip", "smooth-attention"]);

struct Set {
    title: &'static str,
    kind: &'static str,
    ways: &'static [&'static Way],
}

const SETS: [Set; 3] = [
    Set {
        title: "as they are",
        kind: "none",
        ways: &[&AWQ, &FLOAT_ACTIVATIONS, &WITHOUT_KV, &QOQ, &WITHOUT_SMOOTH_ATTENTION, &PLAIN],
    },
    Set { title: "with planted activation outliers", kind: "activations", ways: &[&AWQ, &QOQ, &PLAIN] },
    Set {
        title: "with planted key outliers",
        kind: "keys",
        ways: &[&WITHOUT_KV, &QOQ, &WITHOUT_SMOOTH_ATTENTION],
    },
];

#[derive(Clone, Copy, Default)]
struct Pooled {
    kl: f64,
    lost: f64,
    tokens: f64,
}

/// Measures and writes the record.
pub fn run(args: &Args) -> Result<()> {
    let data = shared_dir().context("the real models and texts are not available")?.join("data");
    let quant = quant_binary(args.quant.as_deref())?;
    let mut csv = vec!["outliers,model,evaluation,group,way,float,perplexity,kl,kl_se,tokens".to_owned()];
    let mut body = String::new();
    let mut pooled: Vec<Vec<Pooled>> = Vec::new();
    for set in &SETS {
        let (mut cells, mut sums) = (Vec::new(), vec![Pooled::default(); set.ways.len()]);
        for row in &ROWS {
            let model = match set.kind {
                "keys" => row.with_outlying_keys(&data)?,
                kind => row.model(&data, kind == "activations")?,
            };
            let mut line = vec![row.name.to_owned(), row.evaluation.to_owned(), row.group.to_owned()];
            for (way, sum) in set.ways.iter().zip(&mut sums) {
                let o = measure(args, &quant, &data, row, &model, way)?;
                sum.kl += o.kl * o.tokens;
                sum.lost += (o.perplexity / o.float).ln() * o.tokens;
                sum.tokens += o.tokens;
                if line.len() == 3 {
                    line.push(format!("{:.3}", o.float));
                }
                line.push(format!("{:.3}", o.perplexity));
                line.push(format!("{:.5} ± {:.5}", o.kl, o.kl_error));
                csv.push(format!(
                    "{},{},{},{},{},{},{},{},{},{}",
                    set.kind,
                    row.name,
                    row.evaluation,
                    row.group,
                    way.name,
                    o.float,
                    o.perplexity,
                    o.kl,
                    o.kl_error,
                    o.tokens
                ));
            }
            println!("{}  {}", set.title, line.join("  "));
            cells.push(line);
        }
        let mut header = vec!["model", "text", "group", "float"];
        header.extend(set.ways.iter().flat_map(|way| [way.name, "KL"]));
        let sums: Vec<Pooled> = sums
            .iter()
            .map(|s| Pooled { kl: s.kl / s.tokens, lost: s.lost / s.tokens, tokens: s.tokens })
            .collect();
        let means = set.ways.iter().zip(&sums).map(|(way, s)| format!("{:.5} ({})", s.kl, way.name));
        body += &format!(
            "## Models {}\n\n{}\nMean KL, pooled over {:.0} tokens: {}.\n\n",
            set.title,
            table(&header, &cells),
            sums[0].tokens,
            means.collect::<Vec<_>>().join(", ")
        );
        pooled.push(sums);
    }
    let (claims, broken) = claims(&pooled);
    println!("{claims}");
    let record = Record {
        benchmark: "quality-qoq",
        title: "QoQ on the real models".into(),
        command: typed_command(),
        body: format!(
            "4-bit weights, symmetric, in groups (progressive for QoQ); 8-bit activations per token; a 4-bit KV \
             cache; all simulated. {} calibration windows and {} evaluation windows \
             of 512 tokens (256 on stories260k); embeddings and head float. Perplexity, and KL to float over the full \
             vocabulary in nats per token, ± its standard error over windows. Planted in activations: 4 channels of \
             every norm multiplied by 32, the columns that read them divided by 32. Planted in keys: 2 pairs of \
             channels of every key head multiplied by 32, the matching rows of queries divided by 32.\n\n{body}## \
             Claims\n\n{claims}",
            args.samples, args.windows
        ),
        csv,
    };
    record.conclude(args.check, &broken)
}

/// All claims with their verdicts as a list, and the violated ones alone.
fn claims(pooled: &[Vec<Pooled>]) -> (String, Vec<String>) {
    let of = |kind: &str, way: &Way| {
        let set = SETS.iter().position(|s| s.kind == kind).unwrap_or_default();
        let at = SETS[set].ways.iter().position(|w| w.name == way.name).unwrap_or_default();
        pooled[set][at]
    };
    let (awq, qoq) = (of("none", &AWQ), of("none", &WITHOUT_KV));
    let activations = qoq.kl - of("none", &FLOAT_ACTIVATIONS).kl;
    let perplexity = (qoq.lost - awq.lost).exp() - 1.0;
    let widened = of("activations", &QOQ).kl - of("none", &QOQ).kl;
    let plain = of("activations", &PLAIN).kl - of("none", &PLAIN).kl;
    let (smooth, rough) = (of("keys", &QOQ).kl, of("keys", &WITHOUT_SMOOTH_ATTENTION).kl);
    let cost = rough - of("none", &WITHOUT_SMOOTH_ATTENTION).kl;
    let kv = of("none", &QOQ).kl - qoq.kl;
    let list = [
        (
            qoq.kl - awq.kl <= activations.max(0.0),
            format!(
                "QoQ W4A8's KL minus AWQ W4A16's is {:+.5}; its 8-bit activations add {activations:+.5}",
                qoq.kl - awq.kl
            ),
        ),
        (
            perplexity <= PERPLEXITY,
            format!("QoQ W4A8's perplexity differs from AWQ W4A16's by {:+.2} %", 100.0 * perplexity),
        ),
        (
            widened <= WIDENED * plain,
            format!(
                "planted outliers of activations add {widened:+.5} to QoQ's KL, {:.1} % of the {plain:+.5} that they add to plain W4A8KV4's",
                100.0 * widened / plain
            ),
        ),
        (
            smooth <= rough && rough - smooth >= TAKEN_BACK * cost,
            format!(
                "planted outliers of keys add {cost:+.5} without SmoothAttention, which removes {:.1} % of that",
                100.0 * (rough - smooth) / cost
            ),
        ),
        (true, format!("a 4-bit KV cache adds {kv:+.5} on unmodified models")),
    ];
    let holds = |holds: bool| if holds { "holds" } else { "does not hold" };
    let text = list.iter().map(|(held, claim)| format!("- {claim}: {}\n", holds(*held))).collect();
    (text, list.into_iter().filter(|(held, _)| !held).map(|(_, claim)| claim).collect())
}

fn measure(args: &Args, quant: &Path, data: &Path, row: &Row, model: &Path, way: &Way) -> Result<Outcome> {
    let out = target_dir().join("quality-qoq");
    remove_dir(&out)?;
    let channel = format!("{}-channel", way.scheme);
    let scheme = match row.group {
        "channel" => channel,
        group if way.progressive => format!("{}-g{group}-progressive", way.scheme),
        group => format!("{}-g{group}", way.scheme),
    };
    let mut command = Command::new(quant);
    command.arg("quantize").arg(model).arg("-o").arg(&out).arg("--quiet");
    command.args(["--scheme", &scheme]).args(way.options);
    let bits = way.scheme.trim_end_matches("kv4");
    for linear in row.per_channel() {
        command.args(["--override", &format!("{linear}={bits}-channel")]);
    }
    if !way.options.contains(&"rtn") {
        command.arg("--calibration").arg(row.calibration(data));
        command.args(["--samples", &args.samples.to_string(), "--seq-len", &row.window.to_string()]);
    }
    output(&mut command)?;
    Outcome::of(quant, data, row, model, &out, args.windows)
}
