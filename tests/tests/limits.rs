//! Limits of the environment, and special files in place of regular ones: each ends with its exit code and a message
//! that the user can act on.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use quant_tests::files::{hashes, snapshot};
use quant_tests::models::TinyLlama;
use quant_tests::program::{Run, Running, Signal, command, program, quant};
use quant_tests::refusal::{check_message, job_of};
use quant_tests::{args, demo_model};
use tempfile::TempDir;

const SEARCH: [&str; 6] = ["--scheme", "w4a16-g32", "--samples", "2", "--seq-len", "64"];

struct Bench {
    scratch: TempDir,
}

impl Bench {
    fn new() -> Self {
        let bench = Self { scratch: tempfile::tempdir().unwrap() };
        TinyLlama::default().write(&bench.at("model"));
        bench
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn quantize(&self, out: &str, options: &[&str]) -> Command {
        let mut command = command(args!["quantize", self.at("model"), "-o", self.at(out)]);
        command.args(options);
        command
    }
}

fn run(command: Command) -> Run {
    Running::start(command).wait()
}

/// The command under a shell limit.
fn limited(limit: &str, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &format!("ulimit {limit} && exec \"$@\""), "sh"])
        .arg(program())
        .args(command.get_args());
    shell.env_remove("QUANT_LOG").env("RUST_BACKTRACE", "0").env("HF_HUB_OFFLINE", "1");
    shell
}

fn fifo(path: &Path) {
    let _ = std::fs::remove_file(path);
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Every run either succeeds or reports too little memory.
#[test]
fn too_little_memory() {
    let bench = Bench::new();
    for method in ["rtn", "awq", "gptq", "smoothquant", "qoq"] {
        let mut options = vec!["--method", method, "--threads", "2"];
        options.extend(match method {
            "rtn" => &["--scheme", "w4a16-g32"][..],
            "smoothquant" => &["--samples", "2", "--seq-len", "64"],
            "qoq" => &["--group-size", "32", "--samples", "2", "--seq-len", "64"],
            _ => &SEARCH,
        });
        let whole = bench.quantize("whole", &options);
        let expected = run(whole);
        let (mut done, mut short) = (0, 0);
        let step = |kib: u32| {
            let run = run(limited(&format!("-v {kib}"), &bench.quantize("out", &options)));
            (run.code(), run)
        };
        // 20 limits, up to enough for the model, and one with room to spare.
        let mut spoken = false;
        for kib in (1..=20).map(|i| 12_000 * i).chain([4_000_000]) {
            let out = bench.at("out");
            match step(kib) {
                (Some(code), run) if Some(code) == expected.code() && code != 5 => {
                    (done, spoken) = (done + 1, true);
                    assert_eq!(hashes(&out), hashes(&bench.at("whole")), "{method} at {kib} KiB: {run}");
                }
                // The program could not be loaded. Once it has been loaded, this must not happen with more memory.
                (None | Some(126 | 127), run) if !spoken && !run.stderr.contains("error: ") => {}
                (_, run) => {
                    (short, spoken) = (short + 1, true);
                    check_message(&format!("{method} at {kib} KiB"), &run, 5, &[]);
                    assert!(!out.exists(), "{method} at {kib} KiB: {run}");
                    assert!(
                        !run.stderr.contains("abort") && run.stderr.matches("error: ").count() == 1,
                        "{run}"
                    );
                }
            }
            let _ = std::fs::remove_dir_all(&out);
            let _ = std::fs::remove_dir_all(job_of(&out));
        }
        assert!(
            expected.code() == Some(0) && done > 0 && short > 0,
            "{method}: {done} done, {short} short: {expected}"
        );
        std::fs::remove_dir_all(bench.at("whole")).unwrap();
    }
}

/// A limit on data makes the worker that tokenizes fail. That is no fault of the tokenizer.
#[test]
fn too_little_memory_for_data() {
    let text = ["--text", "builtin-heldout", "--profile", "gptq-16", "--windows", "2"].map(Into::into);
    let eval = command(args!["eval", demo_model()].into_iter().chain(text));
    check_message("data", &run(limited("-d 40000", &eval)), 5, &["not enough memory"]);
}

#[test]
fn a_small_stack() {
    let bench = Bench::new();
    let quantize = bench.quantize("out", &["--method", "rtn", "--scheme", "w4a16-g32"]);
    run(limited("-s 128", &quantize)).succeeded();
}

#[test]
fn pipes_in_the_place_of_files() {
    let bench = Bench::new();
    let recipe = bench.at("recipe.toml");
    fifo(&recipe);
    let mut quantize = bench.quantize("out", &["--recipe"]);
    quantize.arg(&recipe);
    check_message("a recipe", &run(quantize), 2, &["recipe.toml", "not a regular file"]);

    // Files of an interrupted job.
    let (mut done, job) = (0, job_of(&bench.at("out")));
    for name in ["job.json", "journal.jsonl", "lock"] {
        let mut awq = Running::start(bench.quantize("out", &SEARCH));
        // Kill the run only after both files exist; before that, there is nothing to resume.
        let begun = ["job.json", "journal.jsonl"].map(|file| job.join(file));
        if awq.wait_until(|| begun.iter().all(|file| file.metadata().is_ok_and(|m| m.len() > 0))) {
            awq.signal(Signal::KILL);
        }
        let _ = awq.wait();
        if !job.exists() {
            // The run finished before the signal arrived.
            std::fs::remove_dir_all(bench.at("out")).unwrap();
            continue;
        }
        done += 1;
        fifo(&job.join(name));
        let mut resume = SEARCH.to_vec();
        resume.push("--resume");
        let run = run(bench.quantize("out", &resume));
        check_message(name, &run, 2, &[name]);
        std::fs::remove_dir_all(&job).unwrap();
    }
    assert!(done > 0, "every run finished before it could be killed");
}

/// Opening a pipe without a writer would never return, and a device never ends.
#[test]
fn pipes_and_devices_in_the_place_of_any_input() {
    let bench = Bench::new();
    let (model, result) = (bench.at("model"), bench.at("result.json"));
    let (name, out) = (|path: &Path| path.to_str().unwrap().to_owned(), bench.at("out"));
    let text = name(&bench.at("text.txt"));
    std::fs::write(&text, "the rain in the morning and the sun in the afternoon ".repeat(200)).unwrap();
    let [model, result, out] = [&model, &result, &out].map(|path| name(path));
    let policy = name(&bench.at("policy.toml"));
    let cap = "schema = \"quant-gate-policy/1\"\n[[cap]]\nmetric = \"perplexity\"\nat_most = 1e9\n";
    std::fs::write(&policy, cap).unwrap();
    let [gguf, json] = [format!("{out}.gguf"), format!("--json={result}")];
    let evaluate = ["eval", &model, "--text", &text, "--window", "16", "--windows", "3"];
    quant(evaluate.iter().chain([&&*json])).succeeded();
    let calibrated =
        ["quantize", &model, "-o", &out, "--group-size", "32", "--samples", "2", "--seq-len", "32"];
    let with = |first: &[&'_ str], more: &[&'_ str]| {
        [first, more].concat().into_iter().map(str::to_owned).collect::<Vec<String>>()
    };
    // The arguments before the input, and after it.
    let cases: Vec<(Vec<String>, Vec<&str>)> = vec![
        (with(&calibrated, &["--recipe"]), vec![]),
        (with(&calibrated, &["--method", "gptq", "--calibration"]), vec![]),
        (with(&calibrated, &["--method", "smoothquant", "--scheme", "w8a8", "--channel-maxima"]), vec![]),
        (with(&["quantize", &model, "-o", &gguf, "--imatrix"], &[]), vec![]),
        (with(&["plan", &model, "--recipe"], &[]), vec![]),
        (with(&["plan"], &[]), vec![]),
        (with(&["inspect"], &[]), vec!["--verify"]),
        (with(&["generate", &model, "--prompt-file"], &[]), vec![]),
        (with(&["generate"], &[]), vec!["--prompt", "a"]),
        (with(&["eval", &model, "--text"], &[]), vec![]),
        (with(&evaluate, &["--reference"]), vec![]),
        (with(&evaluate, &["--journal"]), vec![]),
        (with(&evaluate, &["--shards"]), vec![]),
        (with(&evaluate, &["--report", &out, "--compare"]), vec![]),
        (with(&["gate", "--policy", &policy], &[]), vec![]),
        (with(&["gate", &result, "--policy"], &[]), vec![]),
        (with(&["gate", &result, "--policy", &policy, "--baseline"], &[]), vec![]),
        (with(&["gate", &result, "--update", "--baseline"], &[]), vec![]),
        (with(&["compare", &result], &[]), vec![]),
        (with(&["job", "run"], &[]), vec![]),
        (with(&["merge"], &[]), vec!["-o", &out]),
    ];
    let pipe = bench.at("pipe");
    for (before, after) in cases {
        for device in [None, Some("/dev/zero")] {
            fifo(&pipe);
            if let Some(device) = device {
                std::fs::remove_file(&pipe).unwrap();
                std::os::unix::fs::symlink(device, &pipe).unwrap();
            }
            let run =
                quant(before.iter().map(String::as_str).chain([&*name(&pipe)]).chain(after.iter().copied()));
            let what = format!("{} {device:?}", before.join(" "));
            assert!(matches!(run.code(), Some(2 | 4 | 5)), "{what}: {run}");
            assert!(run.stderr.contains("error: ") && run.stderr.contains("pipe"), "{what}: {run}");
            assert!(!Path::new(&out).exists(), "{what}: {run}");
        }
    }
}

#[test]
fn companions_of_any_size() {
    let bench = Bench::new();
    let rtn = ["--method", "rtn", "--scheme", "w4a16-g32"];
    let sparse =
        |name: &str, len: u64| File::create(bench.at("model").join(name)).unwrap().set_len(len).unwrap();
    sparse("LICENSE.txt", 20 << 30);
    check_message("one", &run(bench.quantize("out", &rtn)), 4, &["LICENSE.txt", "has 21474836480 bytes"]);
    sparse("LICENSE.txt", 600 << 20);
    sparse("NOTICE", 600 << 20);
    check_message("two", &run(bench.quantize("out", &rtn)), 4, &["NOTICE", "in total"]);
    assert!(!bench.at("out").exists());
}

#[test]
fn an_output_in_the_job_of_another_run() {
    let bench = Bench::new();
    let job = job_of(&bench.at("out"));
    let mut awq = Running::start(bench.quantize("out", &SEARCH));
    assert!(awq.wait_until(|| job.join("journal.jsonl").exists()), "{}", awq.wait());
    awq.signal(Signal::KILL);
    if awq.wait().code() == Some(0) {
        panic!("the run finished before it could be killed");
    }
    let before = snapshot(&job);
    for inside in ["out.job/out/x", "out.job/x", "out.job/out/a/b/c"] {
        for force in [None, Some("--force")] {
            let options =
                ["--method", "rtn", "--scheme", "w4a16-g32"].into_iter().chain(force).collect::<Vec<_>>();
            let run = run(bench.quantize(inside, &options));
            check_message(inside, &run, 2, &["out.job", "holds another run's unfinished output"]);
        }
    }
    assert_eq!(snapshot(&job), before);
    // A directory of that name that is not a job directory may contain anything.
    std::fs::create_dir(bench.at("mine.job")).unwrap();
    std::fs::write(bench.at("mine.job/lock"), "of my door").unwrap();
    run(bench.quantize("mine.job/out", &["--method", "rtn", "--scheme", "w4a16-g32"])).succeeded();
}

/// Under `nohup` a hangup has no effect; otherwise it ends the run.
#[test]
fn a_hangup_that_is_ignored() {
    let bench = Bench::new();
    let eval =
        args!["eval", bench.at("model"), "--text", "builtin-heldout", "--window", "512", "--threads", "1"];
    let started = |through: &[&str]| {
        let mut command = Command::new("env");
        command.args(through).arg(program()).args(&eval).stdin(File::open("/dev/null").unwrap());
        command.env_remove("QUANT_LOG").env("RUST_BACKTRACE", "0");
        let run = Running::start(command);
        std::thread::sleep(std::time::Duration::from_millis(400));
        run.signal(Signal::HUP);
        run.wait()
    };
    started(&["nohup"]).succeeded();
    let without = started(&["--default-signal=HUP"]);
    assert!(matches!(without.code(), Some(0 | 75)), "{without}");
}

#[test]
fn paths_that_steer_a_terminal() {
    let bench = Bench::new();
    let wild = "e\u{1b}[31m\u{9b}2J\u{202e}";
    let clean = |run: &Run| {
        let is_unprintable = |c: char| c.is_control() && c != '\n' || ('\u{202a}'..='\u{202e}').contains(&c);
        assert!(!run.stdout.contains(is_unprintable) && !run.stderr.contains(is_unprintable), "{run}");
    };
    let model = bench.at("model");
    let wild_text = bench.at(wild);
    std::fs::write(&wild_text, "Rain in the morning. ".repeat(100)).unwrap();
    let rtn = ["--method", "rtn", "--scheme", "w4a16-g32"];
    let cases: Vec<(Vec<OsString>, i32)> = vec![
        (args!["inspect", bench.at(&format!("no{wild}"))], 4),
        (args!["quantize", &model, "-o", bench.at(&format!("out{wild}")), rtn[0], rtn[1], rtn[2], rtn[3]], 0),
        (args!["quantize", &model, "-o", bench.at(&format!("out{wild}")), rtn[0], rtn[1], rtn[2], rtn[3]], 2),
        (
            args![
                "quantize",
                &model,
                "-o",
                bench.at(&format!("o{wild}")),
                rtn[0],
                rtn[1],
                rtn[2],
                rtn[3],
                "--json"
            ],
            0,
        ),
        (args!["eval", &model, "--text", &wild_text, "--windows", "1", "--window", "64"], 0),
        (args!["eval", &model, "--text", &wild_text, "--windows", "1", "--window", "64", "--json"], 0),
        (args!["plan", &model, "--scheme", format!("w4{wild}")], 2),
        (args!["plan", &model, "--ignore", wild], 2),
        (args![format!("verb{wild}")], 2),
        (args!["plan", format!("--option{wild}")], 2),
        (args!["quantize", &model, "-o", bench.at("x"), "--recipe", bench.at(&format!("r{wild}"))], 2),
    ];
    for (arguments, code) in cases {
        let json = arguments.iter().any(|a| a == "--json");
        let run = quant(arguments);
        assert_eq!(run.code(), Some(code), "{run}");
        clean(&run);
        if json {
            assert!(run.json().to_string().contains("2J"), "the path is there");
        }
    }
}
