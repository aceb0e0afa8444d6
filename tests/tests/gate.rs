//! The evaluator and the gate as a user sees them.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use quant_tests::files::sha256;
use quant_tests::program::{Run, Running, Signal, command, quant};
use quant_tests::refusal::check_message;
use quant_tests::{args, demo_model};
use serde_json::{Value, json};
use tempfile::TempDir;

const TEXT: [&str; 6] = ["--text", "builtin-heldout", "--window", "64", "--windows", "24"];

const POLICY: &str = r#"schema = "quant-gate-policy/1"

[[non_inferiority]]
metric = "perplexity"
against = "baseline"
margin = 0.005

[[non_inferiority]]
metric = "kl"
against = "baseline"
margin = 0.002

[[cap]]
metric = "kl_p99"
at_most = 1.0
"#;

/// Results of the demo model rounded to 8, 4 and 3 bits, each named `held.json`, and a baseline from the 4-bit result.
struct Bench {
    scratch: TempDir,
}

impl Bench {
    fn get() -> &'static Self {
        static ONCE: OnceLock<Bench> = OnceLock::new();
        ONCE.get_or_init(|| {
            let bench = Self { scratch: tempfile::tempdir().unwrap() };
            for bits in ["8", "4", "3"] {
                let model = bench.at(&format!("w{bits}"));
                let scheme = format!("w{bits}a16-g64-sym");
                quant(args!["quantize", demo_model(), "-o", &model, "--method", "rtn", "--scheme", scheme])
                    .succeeded();
                std::fs::create_dir(bench.at(bits)).unwrap();
                evaluate(&model, &bench.result(bits)).succeeded();
            }
            std::fs::write(bench.at("gate.toml"), POLICY).unwrap();
            let update =
                args!["gate", bench.result("4"), "--baseline", bench.at("baseline.json"), "--update"];
            let run = quant(update).succeeded();
            assert!(run.stdout.contains("perplexity") && run.stdout.contains(" now"), "{run}");
            bench
        })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn result(&self, bits: &str) -> PathBuf {
        self.at(bits).join("held.json")
    }

    fn judge(&self, result: &Path, policy: &Path) -> Run {
        quant(args!["gate", result, "--policy", policy, "--baseline", self.at("baseline.json")])
    }
}

fn evaluate(model: &Path, result: &Path) -> Run {
    let mut arguments =
        args!["eval", model, "--reference", demo_model(), format!("--json={}", result.display())];
    arguments.extend(TEXT.map(Into::into));
    quant(arguments)
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn numbers(mut result: Value) -> Value {
    for key in ["seconds", "tokens_per_second"] {
        result.as_object_mut().unwrap().remove(key).unwrap();
    }
    result
}

/// Recomputes the SHA-256 of a changed result, as if these values had been measured.
fn seal(result: &mut Value) {
    let fields = result.as_object_mut().unwrap();
    let kept: Vec<_> = ["seconds", "tokens_per_second", "sha256"]
        .into_iter()
        .filter_map(|k| fields.shift_remove_entry(k))
        .collect();
    let digest = sha256(serde_json::to_string(fields).unwrap().as_bytes());
    fields.extend(kept);
    fields["sha256"] = json!(digest);
}

#[test]
fn threads_do_not_change_a_bit() {
    let bench = Bench::get();
    let found = ["1", "2", "3"].map(|threads| {
        let mut arguments =
            args!["eval", bench.at("w4"), "--reference", demo_model(), "--json", "--threads", threads];
        arguments.extend(TEXT.map(Into::into));
        numbers(quant(arguments).json())
    });
    assert_eq!(found[0], found[1]);
    assert_eq!(found[0], found[2]);
    assert_eq!(found[0], numbers(read(&bench.result("4"))));
}

#[test]
fn reports_agree_with_each_other() {
    let result = read(&Bench::get().result("3"));
    let number = |path: &str| result.pointer(path).unwrap().as_f64().unwrap();
    assert_eq!((number("/windows"), number("/tokens_scored")), (24.0, 24.0 * 63.0));
    assert_eq!(result["profile"], "gptq-64");
    // The demo model's tokenizer adds one token at the start of a text.
    assert_eq!(result["bos"]["policy"], "text");
    let ratio = number("/perplexity/mean") / number("/comparison/reference/perplexity/mean");
    assert!((ratio / number("/comparison/perplexity_ratio/mean") - 1.0).abs() < 1e-12);
    let quantile = |name: &str| number(&format!("/comparison/kl_quantiles/{name}/value"));
    let rising = ["median", "p90", "p99", "p999", "max"].map(quantile);
    assert!(rising.is_sorted() && rising[0] > 0.0, "{rising:?}");
    for name in ["median", "p90", "p99"] {
        let end = |end: &str| number(&format!("/comparison/kl_quantiles/{name}/{end}"));
        assert!(end("low") <= quantile(name) && quantile(name) <= end("high") && end("low") < end("high"));
    }
    let buckets = result["comparison"]["kl_by_confidence"].as_array().unwrap();
    let positions: u64 = buckets.iter().map(|b| b["positions"].as_u64().unwrap()).sum();
    assert_eq!(positions, 24 * 63);
    // The effect of rounding to 3 bits is far above the rounding noise of sums.
    let floor = number("/comparison/noise_floor/kl/mean");
    assert!(floor > 0.0 && floor < 1e-2 * number("/comparison/kl/mean"), "{floor}");
    assert_eq!(result["comparison"]["at_noise_floor"], false);
    let (top1, top5) = (number("/comparison/top1_agreement/mean"), number("/comparison/top5_overlap/mean"));
    assert!((0.5..1.0).contains(&top1) && (0.5..1.0).contains(&top5), "{top1} {top5}");
    let sha256 = |path: &str| result.pointer(path).unwrap().as_str().unwrap().len();
    for path in ["/model/sha256", "/reference/sha256", "/text/sha256", "/tokenizer_sha256", "/tokens_sha256"]
    {
        assert_eq!(sha256(path), 64, "{path}");
    }
    assert_eq!(result["model"]["schemes"], json!([{ "scheme": "w3a16-g64-sym", "linears": 42 }]));
}

#[test]
fn a_model_is_not_far_from_itself() {
    let mut arguments = args!["eval", demo_model(), "--reference", demo_model(), "--json"];
    arguments.extend(TEXT.map(Into::into));
    let result = quant(arguments).json();
    let comparison = &result["comparison"];
    assert_eq!(comparison["kl"], json!({ "mean": 0.0, "standard_error": 0.0 }));
    assert_eq!(comparison["top1_agreement"]["mean"], 1.0);
    assert_eq!(comparison["at_noise_floor"], true);
}

#[test]
fn every_outcome_has_its_exit_code() {
    let bench = Bench::get();
    let gate = bench.at("gate.toml");
    let pass = bench.judge(&bench.result("4"), &gate).succeeded();
    assert!(pass.stdout.contains("bit-identical"), "{pass}");
    bench.judge(&bench.result("8"), &gate).succeeded();
    let fail = bench.judge(&bench.result("3"), &gate);
    assert_eq!(fail.code(), Some(1), "{fail}");
    assert!(fail.stdout.contains("fail          held  kl against the baseline: +"), "{fail}");

    let rise = |bits: &str| read(&bench.result(bits)).pointer("/nll/mean").unwrap().as_f64().unwrap();
    let margin = (rise("3") - rise("4")).exp_m1();
    let open = POLICY
        .replace("margin = 0.005", &format!("margin = {margin}"))
        .replace("margin = 0.002", "margin = 10.0");
    for (setting, code) in [("inconclusive", 3), ("fail", 1), ("pass", 0)] {
        let policy = bench.at(&format!("open-{setting}.toml"));
        let setting = format!("on_inconclusive = \"{setting}\"\n\n[[non_inf");
        std::fs::write(&policy, open.replacen("[[non_inf", &setting, 1)).unwrap();
        let run = bench.judge(&bench.result("3"), &policy);
        assert_eq!(run.code(), Some(code), "{run}");
        assert!(run.stdout.contains("inconclusive  held"), "{run}");
    }

    let capped = bench.at("capped.toml");
    std::fs::write(&capped, POLICY.replace("at_most = 1.0", "at_most = 1e-6")).unwrap();
    let run = bench.judge(&bench.result("4"), &capped);
    assert_eq!(run.code(), Some(1), "{run}");
}

#[test]
fn ci_systems_are_notified() {
    let bench = Bench::get();
    let (junit, summary) = (bench.at("junit.xml"), bench.at("summary.md"));
    let mut gate = command(args![
        "gate",
        bench.result("3"),
        "--policy",
        bench.at("gate.toml"),
        "--baseline",
        bench.at("baseline.json"),
        "--junit",
        &junit,
        "--json"
    ]);
    gate.env("GITHUB_ACTIONS", "true").env("GITHUB_STEP_SUMMARY", &summary);
    let run = Running::start(gate).wait();
    assert_eq!(run.code(), Some(1), "{run}");
    let outcome: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((&outcome["schema"], &outcome["verdict"]), (&json!("quant-gate/1"), &json!("fail")));
    let checks = outcome["checks"].as_array().unwrap();
    assert_eq!(checks.len(), 3);
    let failed = checks.iter().filter(|c| c["verdict"] != "pass").count();
    assert_eq!(failed, 2, "{outcome}");
    let xml = std::fs::read_to_string(junit).unwrap();
    assert!(xml.contains(&format!("tests=\"3\" skipped=\"0\" failures=\"{failed}\"")), "{xml}");
    let markdown = std::fs::read_to_string(summary).unwrap();
    assert!(markdown.starts_with("### Accuracy gate: fail\n") && markdown.contains("| held |"), "{markdown}");
    let values: Vec<&str> = checks.iter().map(|c| c["measured"].as_str().unwrap()).collect();
    assert!(values[0].contains(" % (between "), "{values:?}");
    for part in [
        values[0],
        "| at most +0.500 % |",
        "| held | scheme | w4a16-g64-sym | w3a16-g64-sym | changed |",
        "| held | size | ",
        " %, better |",
        " %, worse |",
        "different weights",
    ] {
        assert!(markdown.contains(part), "no `{part}` in {markdown}");
    }
    let (w4, w3) = (bench.at("w4"), bench.at("w3"));
    let causes = format!(
        "; since the baseline, model: was {}, is {}; scheme: was w4a16-g64-sym, is w3a16-g64-sym",
        w4.display(),
        w3.display()
    );
    let marks: Vec<&str> = run.stderr.lines().filter(|l| l.starts_with("::error file=")).collect();
    assert!(marks.len() == failed && marks.iter().all(|mark| mark.contains(&causes)), "{run}");
    assert!(
        marks[1].contains(",line=8,title=accuracy gate%3A held%2C kl against baseline%3A fail::"),
        "{run}"
    );
    assert_eq!(xml.matches("since the baseline, model: was ").count(), failed, "{xml}");

    // The instruction set is listed where it has changed.
    let mut other: Value = serde_json::from_slice(&std::fs::read(bench.result("4")).unwrap()).unwrap();
    other["tool"]["isa"] = json!("aarch64 neon");
    seal(&mut other);
    std::fs::create_dir(bench.at("other")).unwrap();
    std::fs::write(bench.result("other"), other.to_string()).unwrap();
    let capped = bench.at("tight.toml");
    std::fs::write(&capped, POLICY.replace("at_most = 1.0", "at_most = 1e-6")).unwrap();
    let mut gate = command(args!["gate", bench.result("other"), "--policy", &capped]);
    gate.arg("--baseline").arg(bench.at("baseline.json")).env("GITHUB_ACTIONS", "true");
    let run = Running::start(gate).wait();
    assert!(run.stderr.contains("; since the baseline, program: was quant "), "{run}");
    assert!(run.stderr.contains(", aarch64 neon\n"), "{run}");
}

/// A pipe without a reader is a warning, not a wait.
#[test]
fn a_pipe_as_the_summary_is_not_opened() {
    let bench = Bench::get();
    let pipe = bench.at("summary.pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut gate = command(args!["gate", bench.result("8"), "--policy", bench.at("gate.toml")]);
    gate.arg("--baseline").arg(bench.at("baseline.json")).env("GITHUB_STEP_SUMMARY", &pipe);
    let run = Running::start(gate).wait().succeeded();
    assert!(run.stderr.contains("cannot write") && run.stderr.contains("summary.pipe"), "{run}");
}

/// The table of changes calls a difference better or worse only if it is significant, and decides nothing.
#[test]
fn changes_since_the_baseline_are_shown() {
    let bench = Bench::get();
    let run = bench.judge(&bench.result("8"), &bench.at("gate.toml")).succeeded();
    let row = |name: &str| {
        let row = run.stdout.lines().find(|line| line.starts_with(name) && line.contains(" held "));
        row.unwrap_or_else(|| panic!("no {name}: {run}")).to_owned()
    };
    assert!(row("scheme").contains("w4a16-g64-sym") && row("scheme").ends_with("changed"), "{run}");
    assert!(row("size").ends_with("%, worse"), "{run}");
    assert!(row("mean KL").ends_with("%, better"), "{run}");
    let same = bench.judge(&bench.result("4"), &bench.at("gate.toml")).succeeded();
    assert!(same.stdout.contains("same weights") && !same.stdout.contains("worse"), "{same}");
}

#[test]
fn a_suggested_policy_passes_its_results_and_fails_worse_ones() {
    let bench = Bench::get();
    let run = quant(args!["gate", bench.result("4"), "--suggest"]).succeeded();
    let policy = bench.at("suggested.toml");
    std::fs::write(&policy, &run.stdout).unwrap();
    for part in
        ["metric = \"kl_p99\"", "metric = \"top1_agreement\"", "metric = \"size_bytes\"", "[\"held\"]"]
    {
        assert!(run.stdout.contains(part), "no `{part}`: {run}");
    }
    assert_eq!(bench.judge(&bench.result("4"), &policy).code(), Some(0));
    let worse = bench.judge(&bench.result("3"), &policy);
    assert_eq!(worse.code(), Some(1), "{worse}");
    let larger = bench.judge(&bench.result("8"), &policy);
    assert!(larger.code() == Some(1) && larger.stdout.contains("size_bytes is "), "{larger}");
    let both = quant(args!["gate", bench.result("4"), "--suggest", "--policy", &policy]);
    assert_eq!(both.code(), Some(2), "{both}");
}

#[test]
fn results_are_compared() {
    let bench = Bench::get();
    let scratch = tempfile::tempdir().unwrap();
    let named = ["8", "4", "3"].map(|bits| {
        let path = scratch.path().join(format!("w{bits}.json"));
        std::fs::copy(bench.result(bits), &path).unwrap();
        path
    });
    let run = quant(args!["compare", &named[1], &named[2], &named[0]]).succeeded();
    let rows: Vec<&str> = run.stdout.lines().filter(|line| line.starts_with('w')).collect();
    assert!(rows.len() == 3 && rows[0].contains("w8a16-g64-sym"), "{run}");
    assert!(rows[1].contains("w4a16-g64-sym") && rows[1].contains("  rtn  "), "{run}");
    // Files of the same name are distinguished by their directories, and the same file twice is a mistake.
    let run = quant(args!["compare", bench.result("4"), bench.result("3")]).succeeded();
    assert!(run.stdout.contains("\nClosest to the reference: 4/held, with a mean KL of "), "{run}");
    let twice = quant(args!["compare", &named[0], &named[0]]);
    check_message("the same file twice", &twice, 2, &["w8.json was given twice"]);
    let run = quant(args!["compare", &named[1], &named[2], &named[0]]).succeeded();
    assert!(run.stdout.contains("\nClosest to the reference: w8, with a mean KL of "), "{run}");
    assert!(
        run.stdout.contains(" nats; significantly closer than w4 with ") && run.stdout.contains("5 % level"),
        "{run}"
    );
    let json = quant(args!["compare", &named[1], &named[2], "--json"]).json();
    assert_eq!((&json["schema"], &json["rows"][1]["result"]), (&json!("quant-compare/1"), &json!("w3")));
    assert_eq!(json["rows"][0]["method"], "rtn");
    assert!(json["closest"].as_str().unwrap().starts_with("Closest to the reference: w4"), "{json}");

    let mut eval = args!["eval", bench.at("w3"), "--reference", demo_model(), "--compare", &named[1]];
    eval.extend(TEXT.map(Into::into));
    let run = quant(eval).succeeded();
    assert!(run.stdout.contains("\nClosest to the reference: w4, with a mean KL of "), "{run}");

    assert_eq!(quant(args!["compare", &named[0]]).code(), Some(2));
    let other = scratch.path().join("other.json");
    let mut eval = args!["eval", bench.at("w3"), format!("--json={}", other.display())];
    eval.extend(TEXT.map(Into::into));
    quant(eval).succeeded();
    let run = quant(args!["compare", &named[0], &other]);
    check_message("no reference", &run, 2, &["`other` was measured without a reference, others with one"]);
    std::fs::write(&other, "{}").unwrap();
    check_message("no result", &quant(args!["compare", &named[0], &other]), 4, &["has no field `schema`"]);
    let onto = quant(args!["compare", &named[0], &named[1], format!("--json={}", named[0].display())]);
    assert_eq!(onto.code(), Some(2), "{onto}");
}

#[test]
fn nothing_that_is_missing_or_broken_passes() {
    let bench = Bench::get();
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let (policy, baseline, good) = (bench.at("gate.toml"), bench.at("baseline.json"), bench.result("4"));
    let judge = |case: &str, result: &Path, baseline: &Path, code: i32, expected: &[&str]| {
        let run = quant(args!["gate", result, "--policy", &policy, "--baseline", baseline]);
        check_message(case, &run, code, expected);
    };

    // Baselines.
    std::fs::write(at("empty.json"), "").unwrap();
    std::fs::write(at("no-results.json"), r#"{"schema":"quant-gate-baseline/1","sha256":"","results":{}}"#)
        .unwrap();
    let text = std::fs::read_to_string(&baseline).unwrap();
    std::fs::write(at("cut.json"), &text[..text.len() / 2]).unwrap();
    std::fs::write(at("newer.json"), text.replace("quant-gate-baseline/1", "quant-gate-baseline/9")).unwrap();
    let edited = text.replacen("\"windows\": 24", "\"windows\":  24", 1);
    std::fs::write(at("spaced.json"), &edited).unwrap();
    let value = read(&good).pointer("/comparison/kl_quantiles/p99/value").unwrap().to_string();
    std::fs::write(at("edited.json"), text.replacen(&value, "0.5", 1)).unwrap();
    judge("no baseline", &good, &at("absent.json"), 4, &["absent.json does not exist", "--update"]);
    judge("an empty baseline", &good, &at("empty.json"), 4, &["is empty", "--update"]);
    judge("a baseline of nothing", &good, &at("no-results.json"), 4, &["contains no results"]);
    judge("half a baseline", &good, &at("cut.json"), 4, &["is not a baseline"]);
    judge("a newer baseline", &good, &at("newer.json"), 4, &["quant-gate-baseline/9"]);
    judge("an edited baseline", &good, &at("edited.json"), 4, &["was modified after it was created"]);
    quant(args!["gate", &good, "--policy", &policy, "--baseline", at("spaced.json")]).succeeded();
    check_message(
        "a policy without its baseline",
        &quant(args!["gate", &good, "--policy", &policy]),
        4,
        &["gate.toml has tests against a baseline", "--baseline"],
    );

    // Broken results. Each keeps its name, which links it to the baseline.
    let broken = |case: &str, change: &dyn Fn(&mut Value), expected: &[&str]| {
        let mut result = read(&good);
        change(&mut result);
        seal(&mut result);
        let path = at("held.json");
        std::fs::write(&path, serde_json::to_string(&result).unwrap()).unwrap();
        judge(case, &path, &baseline, 4, expected);
    };
    let set = |path: &'static str, value: Value| {
        move |result: &mut Value| *result.pointer_mut(path).unwrap() = value.clone()
    };
    broken(
        "another text",
        &set("/text/sha256", json!("0".repeat(64))),
        &["the text of `held` differs: `builtin-heldout`, with SHA-256 ", "restore the former", "--update"],
    );
    let other_text = |r: &mut Value| {
        r["text"]["name"] = json!("my.txt");
        r["text"]["sha256"] = json!("0".repeat(64));
    };
    let named = "the text of `held` differs: `builtin-heldout` in the baseline, `my.txt` now\n  measure with \
                 --text builtin-heldout; if the change is intended, create a new baseline with --update";
    broken("a text with a different name", &other_text, &[named]);
    broken("another tokenizer", &set("/tokenizer_sha256", json!("0".repeat(64))), &["the tokenizer of"]);
    broken("other tokens", &set("/tokens_sha256", json!("0".repeat(64))), &["the tokenization of"]);
    let mut fewer = args!["eval", bench.at("w4"), "--reference", demo_model()];
    fewer.push(format!("--json={}", at("held.json").display()).into());
    fewer.extend(TEXT.map(|word| if word == "24" { "4" } else { word }.into()));
    quant(fewer).succeeded();
    let expected = ["the number of windows of `held` differs: 24 in the baseline, 4 now", "--windows 24"];
    judge("fewer windows", &at("held.json"), &baseline, 4, &expected);
    broken(
        "another rule",
        &set("/profile", json!("gptq-65")),
        &["the profile of", "with --profile gptq-64;"],
    );
    broken("another reference", &set("/reference/sha256", json!("0".repeat(64))), &["a different reference"]);
    broken("a newer result", &set("/schema", json!("quant-eval/9")), &["quant-eval/9"]);
    broken("no schema", &|r| drop(r.as_object_mut().unwrap().remove("schema")), &["has no field `schema`"]);
    broken("an invalid number", &set("/nll/mean", Value::Null), &["is not an evaluation result"]);
    broken("an invalid window", &set("/window_nll/3", Value::Null), &["is not an evaluation result"]);
    broken(
        "positions not finite",
        &set("/non_finite", json!(2)),
        &["2 positions with a NaN or infinite score"],
    );
    broken("no windows", &set("/windows", json!(0)), &["no scored windows"]);
    broken("a better number than its windows", &set("/nll/mean", json!(3.0)), &["windows give"]);
    broken("a better KL", &set("/comparison/kl/mean", json!(0.0)), &["windows give"]);
    broken("windows that were dropped", &set("/window_nll", json!([1.0])), &["24 windows"]);
    broken("no comparison", &set("/comparison", Value::Null), &["only one of `reference` and `comparison`"]);
    broken("a likelihood above one", &set("/window_nll/3", json!(-5.0)), &["has an invalid"]);
    broken("a divergence below zero", &set("/comparison/window_kl/3", json!(-5.0)), &["has an invalid"]);
    broken("numbers beyond all bounds", &|r| r["window_nll"] = json!(vec![1e305; 24]), &["held.json"]);
    broken("a negative rate", &set("/bits_per_byte/mean", json!(-5.0)), &["bits_per_byte"]);
    broken(
        "a rate of no number of bytes",
        &set("/bits_per_byte/mean", json!(0.5)),
        &["implies a non-integer number of bytes"],
    );
    let more_bytes = |r: &mut Value| {
        let mean = r["bits_per_byte"]["mean"].as_f64().unwrap();
        r["bits_per_byte"]["mean"] = json!(mean / 1024.0);
    };
    broken("a rate of other bytes", &more_bytes, &["but the text has"]);
    broken("a perplexity without its error", &set("/perplexity/standard_error", json!(0.0)), &["perplexity"]);
    broken(
        "a ratio without its error",
        &set("/comparison/perplexity_ratio/standard_error", json!(0.0)),
        &["ratio"],
    );
    broken(
        "part of a position agrees",
        &set("/comparison/top1_agreement/mean", json!(0.98765)),
        &["top1_agreement"],
    );
    let small = json!({ "value": 1e-9, "low": 1e-9, "high": 1e-9 });
    let flat = |r: &mut Value| {
        ["median", "p90", "p99", "p999", "max"].map(|q| r["comparison"]["kl_quantiles"][q] = small.clone())
    };
    broken(
        "quantiles of a better model",
        &|r| {
            flat(r);
        },
        &["kl_quantiles"],
    );
    broken("a tool of no bytes", &set("/tool/sha256", json!("x")), &["as a SHA-256"]);
    let shout = |r: &mut Value| {
        r["reference"]["sha256"] = json!(r["reference"]["sha256"].as_str().unwrap().to_uppercase())
    };
    broken("a hash in capitals", &shout, &["as a SHA-256"]);
    for (path, value) in [
        ("/comparison/kl_quantiles/p99/value", json!(0.05)),
        ("/comparison/top5_overlap/mean", json!(0.99)),
        ("/comparison/rms_delta_p/mean", json!(0.0)),
        ("/model/size_bytes", json!(1)),
        ("/bits_per_byte/standard_error", Value::Null),
        ("/comparison/noise_floor/windows", json!(0)),
        ("/comparison/minimum_detectable_increase", json!(1.0)),
        ("/sha256", json!("0".repeat(64))),
    ] {
        let mut result = read(&good);
        *result.pointer_mut(path).unwrap() = value;
        std::fs::write(at("held.json"), result.to_string()).unwrap();
        judge(path, &at("held.json"), &baseline, 4, &["held.json"]);
    }
    broken("an unknown field", &|r| r["extra"] = json!(1), &["is not an evaluation result"]);
    let alone = |r: &mut Value| {
        r["comparison"] = Value::Null;
        r["reference"] = Value::Null;
    };
    broken("measured alone", &alone, &["a different reference than in the baseline"]);
    broken(
        "an unknown field deep inside",
        &|r| r["comparison"]["kl"]["x"] = json!(1),
        &["is not an evaluation result"],
    );
    let reversed = |r: &mut Value| {
        let q = &mut r["comparison"]["kl_quantiles"]["p99"];
        (q["low"], q["high"]) = (q["high"].take(), q["low"].take());
    };
    broken("an interval the wrong way", &reversed, &["invalid intervals"]);
    broken(
        "no buckets",
        &set("/comparison/kl_by_confidence", json!([])),
        &["do not add up to `tokens_scored`"],
    );
    let text = std::fs::read_to_string(&good).unwrap();
    for (case, length) in [("half a result", text.len() / 2), ("an empty result", 0)] {
        std::fs::write(at("held.json"), &text[..length]).unwrap();
        judge(case, &at("held.json"), &baseline, 4, &["held.json"]);
    }
    std::fs::write(at("held.json"), text.replacen("\"mean\": ", "\"mean\": 0.1, \"mean\": ", 1)).unwrap();
    judge("a key twice", &at("held.json"), &baseline, 4, &["held.json"]);
    std::fs::write(at("held.json"), text.replacen("\"mean\": ", "\"mean\": NaN, \"was\": ", 1)).unwrap();
    judge("NaN in a result", &at("held.json"), &baseline, 4, &["held.json"]);
    std::fs::write(at("other.json"), &text).unwrap();
    judge("a result of another name", &at("other.json"), &baseline, 4, &["`held`, which was not given"]);
    for (option, path) in [("--junit", &policy), ("--json", &baseline), ("--report", &good)] {
        let before = std::fs::read(path).unwrap();
        let option = format!("{option}={}", path.display());
        let run = quant(args!["gate", &good, "--policy", &policy, "--baseline", &baseline, &option]);
        check_message("an output that is an input", &run, 2, &["a separate file"]);
        assert_eq!(std::fs::read(path).unwrap(), before, "{option}");
    }
    judge("no result", &at("absent.json"), &baseline, 4, &["absent.json does not exist"]);
    let twice = args!["gate", &good, bench.result("3"), "--policy", &policy, "--baseline", &baseline];
    check_message("one name twice", &quant(twice), 2, &["two results have the name `held`"]);
    let twice = args!["gate", &good, bench.result("3"), "--baseline", at("new.json"), "--update"];
    check_message("one name twice in a baseline", &quant(twice), 2, &["two results have the name `held`"]);
    assert!(!at("new.json").exists());
    let both = args!["gate", &good, at("other.json"), "--policy", &policy, "--baseline", &baseline];
    check_message("more than the baseline has", &quant(both), 4, &["does not contain the result `other`"]);

    std::fs::write(at("held.json"), &text[..100]).unwrap();
    std::fs::copy(&baseline, at("kept.json")).unwrap();
    let update = args!["gate", at("held.json"), "--baseline", at("kept.json"), "--update"];
    check_message("a baseline of half a result", &quant(update), 4, &["held.json"]);
    assert_eq!(std::fs::read(at("kept.json")).unwrap(), std::fs::read(&baseline).unwrap());
    std::fs::write(at("notes.md"), "my notes").unwrap();
    let update = args!["gate", &good, "--baseline", at("notes.md"), "--update"];
    check_message("what is no baseline", &quant(update), 4, &["notes.md", "only a baseline can be replaced"]);
    assert_eq!(std::fs::read(at("notes.md")).unwrap(), b"my notes");

    // A model compared with itself always agrees with its reference. Without a baseline, no other check would detect
    // the mistake.
    std::fs::write(
        at("caps.toml"),
        POLICY.split("[[non_inf").next().unwrap().to_owned()
            + "[[cap]]\nmetric = \"kl_p99\"\nat_most = 1.0\n",
    )
    .unwrap();
    let mut own = args![
        "eval",
        bench.at("w3"),
        "--reference",
        bench.at("w3"),
        format!("--json={}", at("own.json").display())
    ];
    own.extend(TEXT.map(Into::into));
    quant(own).succeeded();
    let run = quant(args!["gate", at("own.json"), "--policy", at("caps.toml")]);
    check_message("compared with itself", &run, 4, &["caps.toml:3", "the model itself"]);
    quant(args!["gate", &good, "--policy", at("caps.toml")]).succeeded();
    std::fs::write(at("old.xml"), "<?xml version=\"1.0\"?><testsuites/>").unwrap();
    quant(args!["gate", at("own.json"), "--policy", at("caps.toml"), "--junit", at("old.xml")]);
    assert!(!at("old.xml").exists());
}

#[test]
fn a_baseline_is_the_same_bytes_and_shows_what_changes() {
    let bench = Bench::get();
    let path = bench.at("again.json");
    let update =
        |bits: &str| quant(args!["gate", bench.result(bits), "--baseline", &path, "--update"]).succeeded();
    update("4");
    let first = std::fs::read(&path).unwrap();
    assert_eq!(first, std::fs::read(bench.at("baseline.json")).unwrap());
    let run = update("3");
    // An update says, as the gate does, what has become worse.
    assert!(run.stdout.contains('+') && run.stdout.contains(" %, worse"), "{run}");
    assert!(run.stdout.contains(" points"), "{run}");
    assert_ne!(first, std::fs::read(&path).unwrap());
    let run = update("3");
    assert!(run.stdout.contains("same") && !run.stdout.contains("worse"), "{run}");
    assert!(!run.stdout.contains("different weights") && !run.stdout.contains("points"), "{run}");
    // Without a reference, tests of the KL divergence cannot be decided anymore.
    let mut alone: Value = serde_json::from_slice(&std::fs::read(bench.result("3")).unwrap()).unwrap();
    (alone["comparison"], alone["reference"]) = (Value::Null, Value::Null);
    seal(&mut alone);
    std::fs::create_dir(bench.at("alone")).unwrap();
    std::fs::write(bench.result("alone"), alone.to_string()).unwrap();
    let run = update("alone");
    let row = run.stdout.lines().find(|line| line.starts_with("reference ")).unwrap_or_default();
    assert!(row.contains(" none ") && row.ends_with("changed"), "{run}");
    check_message(
        "an update by a policy",
        &quant(args!["gate", bench.result("4"), "--baseline", &path, "--update", "--policy", "x"]),
        2,
        &["--update"],
    );
}

#[test]
fn a_stopped_evaluation_resumes() {
    let bench = Bench::get();
    let journal = bench.at("journal");
    let arguments = |windows: &str| {
        let mut arguments =
            args!["eval", bench.at("w4"), "--reference", demo_model(), "--json", "--journal", &journal];
        arguments.extend(args!["--text", "builtin-heldout", "--window", "512", "--windows", windows]);
        arguments
    };
    let mut run = Running::start(command(arguments("24")));
    let lines = || std::fs::read_to_string(&journal).unwrap_or_default().lines().count();
    if !run.wait_until(|| lines() > 4) {
        panic!("ended before it could be stopped: {}", run.wait());
    }
    run.signal(Signal::INT);
    check_message("interrupted", &run.wait(), 75, &["interrupted", "--journal"]);
    assert!(lines() > 4);

    check_message(
        "another evaluation",
        &quant(arguments("8")),
        2,
        &["a different evaluation", "remove the file"],
    );
    let resumed = quant(arguments("24")).succeeded();
    assert!(resumed.stderr.contains("of 24 windows have already been measured"), "{resumed}");
    assert!(!journal.exists());
    let whole = quant(arguments("24")).json();
    assert_eq!(numbers(resumed.json()), numbers(whole));
}

#[test]
fn a_failing_gate_fails_into_a_closed_pipe() {
    let bench = Bench::get();
    let arguments = args![
        "gate",
        bench.result("3"),
        "--policy",
        bench.at("gate.toml"),
        "--baseline",
        bench.at("baseline.json")
    ];
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = command(arguments).stdout(writer).stderr(std::process::Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn harmless_tests_do_not_disarm_others() {
    let bench = Bench::get();
    let result = read(&bench.result("3"));
    let kl = |path: &str| result.pointer(path).unwrap().as_f64().unwrap();
    let policy = |margin: f64, more: &str| {
        let path = bench.at("many.toml");
        let head = "schema = \"quant-gate-policy/1\"\non_inconclusive = \"pass\"\n";
        let test = "[[non_inferiority]]\nmetric = \"kl\"\nagainst = \"baseline\"\nmargin = ";
        std::fs::write(&path, format!("{head}{test}{margin}\n{more}")).unwrap();
        bench.judge(&bench.result("3"), &path).code()
    };
    // A margin so close to the measured value that the test alone just fails.
    let (mean, before) = (kl("/comparison/kl/mean"), read(&bench.result("4")));
    let before = before.pointer("/comparison/kl/mean").unwrap().as_f64().unwrap();
    let margin = (0..400)
        .map(|i| (mean - before) * f64::from(i) / 400.0)
        .rfind(|m| policy(*m, "") == Some(1))
        .unwrap();
    let others = ["baseline", "reference"].map(|against| {
        format!("[[non_inferiority]]\nmetric = \"perplexity\"\nagainst = \"{against}\"\nmargin = 0.9\n")
    });
    assert_eq!(policy(margin, &others.concat()), Some(3));
    assert_eq!(policy(0.0, &others.concat()), Some(1));
}

#[test]
fn an_unchecked_result_does_not_pass() {
    let bench = Bench::get();
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let odd = "a\n::error file=x::pwned";
    for name in ["held", odd] {
        std::fs::copy(bench.result("4"), at(&format!("{name}.json"))).unwrap();
    }
    let results = [at("held.json"), at(&format!("{odd}.json"))];
    let update =
        quant(args!["gate", &results[0], &results[1], "--baseline", at("b.json"), "--update"]).succeeded();
    let judge = |policy: &str| {
        std::fs::write(at("gate.toml"), policy).unwrap();
        quant(args![
            "gate",
            &results[0],
            &results[1],
            "--policy",
            at("gate.toml"),
            "--baseline",
            at("b.json")
        ])
    };
    let passes = judge(POLICY).succeeded();
    for run in [&update, &passes] {
        assert!(run.stdout.contains("pwned"), "{run}");
        assert!(!run.stdout.lines().any(|line| line.trim_start().starts_with("::")), "{run}");
    }
    let some = POLICY.replace("metric =", "results = [\"held\"]\nmetric =");
    let run = judge(&some);
    check_message("a result without a check", &run, 4, &["has no check that applies to the result"]);

    std::os::unix::fs::symlink(at("b.json"), at("link.json")).unwrap();
    quant(args!["gate", &results[0], "--baseline", at("link.json"), "--update"]).succeeded();
    assert!(at("link.json").is_symlink());
    assert_eq!(read(&at("b.json"))["results"].as_object().unwrap().len(), 1);
}
