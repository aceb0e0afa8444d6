//! Memory budgets: a run stays within its budget and writes the same bytes, or is refused with a budget that suffices.

use std::path::{Path, PathBuf};

use quant_tests::args;
use quant_tests::files::hashes;
use quant_tests::models::TinyLlama;
use quant_tests::program::{Run, Running, Signal, command, quant};
use quant_tests::refusal::{check_message, job_of};
use serde_json::Value;
use tempfile::TempDir;

/// The values in the hidden states, which are most of the memory.
const STATES: u64 = 4800 * 64 * 128;
const LENGTH: u64 = 64;

struct Bench {
    scratch: TempDir,
    options: Vec<String>,
}

impl Bench {
    /// A narrow model, which needs few operations for as many bytes.
    fn new(options: &[&str]) -> Self {
        Self::with_width(128, options)
    }

    fn with_width(hidden: u64, options: &[&str]) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let samples = (STATES / LENGTH / hidden).to_string();
        let batch = ["--samples", &samples, "--seq-len", &LENGTH.to_string()].map(str::to_owned);
        let options = batch.into_iter().chain(options.iter().map(|&option| option.to_owned())).collect();
        let bench = Self { scratch, options };
        let tiny = TinyLlama {
            hidden,
            intermediate: 2 * hidden,
            heads: hidden / 64,
            kv_heads: hidden / 128,
            head_dim: 64,
            ..TinyLlama::default()
        };
        tiny.write(&bench.at("model"));
        // Every character is a token.
        let line = |i: usize| format!("{i} {} {}\n", i * 7919 % 1009, i * i % 8191);
        std::fs::write(bench.at("text.txt"), (0..24_000).map(line).collect::<String>()).unwrap();
        bench
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn plan(&self) -> Value {
        let mut arguments = args!["plan", self.at("model"), "--json"];
        arguments.extend(self.options.iter().map(Into::into));
        quant(arguments).json()
    }

    fn arguments(&self, out: &Path, more: &[&str]) -> Vec<std::ffi::OsString> {
        let mut arguments =
            args!["quantize", self.at("model"), "-o", out, "--json", "--calibration", self.at("text.txt")];
        arguments.extend(self.options.iter().map(Into::into));
        arguments.extend(more.iter().map(Into::into));
        arguments
    }

    fn run(&self, out: &str, more: &[&str]) -> Run {
        quant(self.arguments(&self.at(out), more))
    }
}

const IN_FILES: &str = "hidden states are kept in files";

fn used(run: &Run) -> u64 {
    let summary: Value = serde_json::from_str(&run.stdout).unwrap();
    summary["peak_memory_bytes"].as_u64().unwrap()
}

fn mib(bytes: u64) -> String {
    format!("{}MiB", bytes.div_ceil(1 << 20))
}

#[test]
fn a_run_stays_within_its_budget() {
    for options in [
        &["--method", "awq", "--scheme", "w4a16-g32"][..],
        &["--method", "gptq", "--scheme", "w4a16-g32"],
        &["--preset", "smoothquant-w8a8"],
    ] {
        let bench = Bench::new(options);
        let plan = bench.plan();
        let [memory, smallest] =
            ["peak_memory_bytes", "smallest_budget_bytes"].map(|key| plan[key].as_u64().unwrap());
        assert!(smallest + (80 << 20) < memory, "{options:?}: {smallest} and {memory}");
        let large = bench.run("large", &["--memory-budget", &mib(memory)]).succeeded();
        assert!(!large.stderr.contains(IN_FILES), "{large}");
        assert!(used(&large) > smallest, "{options:?}: {} of {smallest}", used(&large));
        assert!(used(&large) <= memory, "{options:?}: {} of {memory}", used(&large));
        let small = bench.run("small", &["--memory-budget", &mib(smallest)]).succeeded();
        assert!(small.stderr.contains(IN_FILES), "{small}");
        assert!(used(&small) <= smallest, "{options:?}: {} of {smallest}", used(&small));
        assert_eq!(hashes(&bench.at("small")), hashes(&bench.at("large")), "{options:?}");
        assert!(!job_of(&bench.at("small")).exists());
    }
}

/// The budget that the refusal of one of 1 MiB suggests, in MiB, such as `160MiB`. Nothing is written.
fn suggested_budget(bench: &Bench) -> String {
    let refused = bench.run("out", &["--memory-budget", "1MiB"]);
    check_message("1 MiB", &refused, 5, &["the budget is 1 MiB", "--memory-budget"]);
    assert!(!bench.at("out").exists() && !job_of(&bench.at("out")).exists());
    let suggested =
        refused.stderr.split_once("--memory-budget ").or(refused.stderr.split_once("--memory-budget="));
    let suggested = suggested.unwrap_or_else(|| panic!("{refused}")).1;
    suggested.chars().take_while(char::is_ascii_alphanumeric).collect()
}

#[test]
fn a_budget_that_is_too_small_is_refused_with_one_that_suffices() {
    let bench = Bench::new(&["--scheme", "w4a16-g32"]);
    let suggested = suggested_budget(&bench);
    let less = suggested.trim_end_matches("MiB").parse::<u64>().unwrap() - 1;
    let refused = bench.run("out", &["--memory-budget", &format!("{less}MiB")]);
    check_message("one MiB less", &refused, 5, &[&suggested]);
    bench.run("out", &["--memory-budget", &suggested]).succeeded();

    let with = |threads: &str, budget: &str| {
        bench.run("out", &["--force", "--threads", threads, "--memory-budget", budget])
    };
    let refused = with("6", "1MiB");
    let needed = refused.stderr.split_once("needs at least ").and_then(|(_, rest)| rest.split_once(" MiB"));
    let needed: u64 = needed.unwrap_or_else(|| panic!("{refused}")).0.parse().unwrap();
    assert!(!refused.stderr.contains("set --threads"), "{refused}");
    let less = format!("{}MiB", needed - 1);
    let expected =
        [&*format!("{needed} MiB of memory with 6 threads"), "set --threads 5 or less, set --memory-budget"];
    check_message("6 threads", &with("6", &less), 5, &expected);
    with("5", &less).succeeded();
}

#[test]
fn a_size_needs_a_unit() {
    let bench = Bench::new(&[]);
    for size in ["8", "lots", "-1GiB", "1KiB"] {
        let refused = bench.run("out", &[&format!("--memory-budget={size}")]);
        check_message(size, &refused, 2, &[size, "8GiB"]);
    }
}

#[test]
fn gguf_files_are_the_same_under_every_budget() {
    for options in [&["--scheme", "q4_k_m"][..], &["--scheme", "q4_k_m", "--method", "gptq"]] {
        let bench = Bench::with_width(256, &[&["--format", "gguf", "--pre", "none"], options].concat());
        let large = bench.run("large", &[]).succeeded();
        assert!(!large.stderr.contains(IN_FILES), "{large}");
        let suggested = suggested_budget(&bench);
        let bytes = suggested.trim_end_matches("MiB").parse::<u64>().unwrap() << 20;
        let small = bench.run("small", &["--memory-budget", &suggested]).succeeded();
        assert!(small.stderr.contains(IN_FILES), "{small}");
        assert!(used(&small) <= bytes, "{options:?}: {} of {bytes}", used(&small));
        assert_eq!(hashes(&bench.at("small")), hashes(&bench.at("large")), "{options:?}");
    }
}

#[test]
fn a_resumed_run_may_have_another_budget() {
    let bench = Bench::new(&["--scheme", "w4a16-g32"]);
    let plan = bench.plan();
    let smallest = mib(plan["smallest_budget_bytes"].as_u64().unwrap());
    bench.run("whole", &[]).succeeded();
    let out = bench.at("out");
    let mut run = Running::start(command(bench.arguments(&out, &["--memory-budget", &smallest])));
    let journal = job_of(&out).join("journal.jsonl");
    let begun = || std::fs::read_to_string(&journal).unwrap_or_default().contains("layers.0.");
    if run.wait_until(begun) {
        run.signal(Signal::KILL);
    }
    run.wait();
    // The temporary files of a killed run are gone: only the files that a resumed run needs are left.
    let known = ["lock", "job.json", "journal.jsonl", "out", "states.safetensors", "states.safetensors.new"];
    for entry in std::fs::read_dir(job_of(&out)).into_iter().flatten() {
        let name = entry.unwrap().file_name();
        assert!(known.iter().any(|known| name == *known), "{name:?}");
    }
    if !out.exists() {
        bench.run("out", &["--resume"]).succeeded();
    }
    assert_eq!(hashes(&out), hashes(&bench.at("whole")));
}
