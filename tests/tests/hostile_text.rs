//! Chat templates and tokenizers that recurse, grow or never end. They run in a separate process, so that whatever they
//! do there is reported as an error of their file.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use quant_tests::models::{TinyLlama, byte_tokenizer};
use quant_tests::program::{Run, Running, Signal, command, program, quant};
use quant_tests::refusal::check_message;
use quant_tests::{args, skip};
use serde_json::{Value, json};
use tempfile::TempDir;

const TEMPLATE: &str = "chat_template.jinja";
const TOKENIZER: &str = "tokenizer.json";

struct Bench {
    scratch: TempDir,
}

impl Bench {
    fn new() -> Self {
        let bench = Self { scratch: tempfile::tempdir().unwrap() };
        TinyLlama::default().write(&bench.model());
        bench.write(TEMPLATE, "{% for m in messages %}{{ m.content }}{% endfor %}");
        bench
    }

    fn model(&self) -> PathBuf {
        self.scratch.path().join("model")
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.model().join(name), text).unwrap();
    }

    /// A tokenizer that differs from the byte tokenizer in one part.
    fn tokenizer(&self, part: &str, value: Value) {
        let mut tokenizer = byte_tokenizer();
        tokenizer[part] = value;
        self.write(TOKENIZER, &tokenizer.to_string());
    }

    fn text(&self, bytes: usize) -> PathBuf {
        let path = self.scratch.path().join("text.txt");
        std::fs::write(&path, "Rain fell on the eastern sea. ".repeat(bytes.div_ceil(30))).unwrap();
        path
    }

    /// A question, rendered through the chat template. The result depends only on the template.
    fn chat(&self) -> Command {
        command(args!["generate", self.model(), "--chat", "--prompt", "Hello", "--max-new-tokens", "1"])
    }

    fn eval(&self, text: &Path) -> Command {
        command(args!["eval", self.model(), "--text", text, "--windows", "1", "--window", "64"])
    }
}

fn run(command: Command) -> Run {
    Running::start(command).wait()
}

fn times(count: usize, text: &str) -> String {
    text.repeat(count)
}

/// Runs the program under shell limits such as `-v 4000000`.
fn limited(limit: &str, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("ulimit {limit} && exec \"$@\""), "sh"]).arg(command.get_program());
    shell.args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell
}

#[test]
fn templates_that_overflow_the_stack() {
    let bench = Bench::new();
    let nested = "{% set n = namespace(x=[]) %}{% for i in range(90000) %}{% set n.x = [n.x] %}{% endfor %}";
    for (case, template) in [
        ("a cycle, written", "{% set n = namespace() %}{% set n.a = n %}{{ n }}".to_owned()),
        ("a cycle as JSON", "{% set n = namespace() %}{% set n.a = n %}{{ n|tojson }}".into()),
        ("a cycle as text", "{% set n = namespace() %}{% set n.a = n %}{{ n|string }}".into()),
        ("values nested deep, as JSON", format!("{nested}{{{{ n.x|tojson }}}}")),
        ("values nested deep, compared", format!("{nested}{{% set m = n.x %}}{nested}{{{{ n.x == m }}}}")),
        ("values nested deep, sorted", format!("{nested}{{% set m = n.x %}}{nested}{{{{ [n.x, m]|sort }}}}")),
        ("a chain of sums", format!("{{{{ 1{} }}}}", times(400_000, "+1"))),
        ("a chain of signs", format!("{{{{ {}1 }}}}", times(900_000, "-"))),
        ("a chain of filters", format!("{{{{ 1{} }}}}", times(200_000, "|int"))),
        ("a chain of attributes", format!("{{{{ a{} }}}}", times(400_000, ".b"))),
        ("a chain of elif", format!("{{% if 0 %}}{}{{% endif %}}", times(80_000, "{% elif 0 %}x"))),
    ] {
        bench.write(TEMPLATE, &template);
        check_message(case, &run(bench.chat()), 4, &[TEMPLATE, "overflows the stack", "put a different one"]);
    }
    bench.write(TEMPLATE, "{% set n = namespace() %}{% set n.a = n %}{{ n }}");
    let chats = bench.scratch.path().join("chats.jsonl");
    let line =
        json!({ "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b" }] });
    std::fs::write(&chats, format!("{line}\n")).unwrap();
    let out = bench.scratch.path().join("out");
    let options = ["--scheme", "w4a16-g32", "--samples", "1", "--seq-len", "8", "--calibration"];
    let mut quantize = command(args!["quantize", bench.model(), "-o", &out]);
    quantize.args(options).arg(&chats);
    check_message("quantize", &run(quantize), 4, &[TEMPLATE, "overflows the stack"]);
    assert!(!out.exists());
}

#[test]
fn templates_that_take_memory_or_time() {
    let bench = Bench::new();
    let doubled = |step: &str| {
        format!(
            "{{% set n = namespace(s='xxxxxxxxxxxxxxxx') %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ n.s|length }}}}"
        )
    };
    for (case, template) in [
        ("a text doubled", doubled("{% set n.s = n.s ~ n.s %}")),
        (
            "a text doubled by capturing",
            doubled("{% set t %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = t %}"),
        ),
        ("batches filled up", "{{ [1, 2]|batch(10000000000, 'x')|list|length }}".into()),
        ("a width", "{{ '%999999999999d'|format(3) }}".into()),
    ] {
        bench.write(TEMPLATE, &template);
        check_message(case, &run(bench.chat()), 4, &[TEMPLATE, "MiB of memory", "put a different one"]);
    }
    // Replacing is slow in a development build, so on a slow machine the time runs out first.
    bench.write(TEMPLATE, &doubled("{% set n.s = n.s|replace('x', 'xx') %}"));
    let replaced = run(bench.chat());
    check_message("a text doubled by replacing", &replaced, 4, &[TEMPLATE, "put a different one"]);
    let reasons = ["MiB of memory", "seconds of processor time"];
    assert!(reasons.iter().any(|reason| replaced.stderr.contains(reason)), "{replaced}");
    let copied = "{% set x = '%90000000d'|format(1) %}{% for i in range(99999) %}{% set t %}{{ x }}{% endset %}{% endfor %}";
    bench.write(TEMPLATE, copied);
    check_message("work without end", &run(bench.chat()), 4, &[TEMPLATE, "seconds of processor time"]);
}

#[test]
fn tokenizers_that_grow() {
    let bench = Bench::new();
    let text = bench.text(60_000);
    let replace =
        |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
    let sequence = |all: Vec<Value>| json!({ "type": "Sequence", "normalizers": all });
    for (case, normalizer) in [
        ("replacing", sequence(vec![replace("e", "ee"); 40])),
        ("replacing by much", replace("e", &times(1_000_000, "e"))),
        ("replacing nothing by much", replace("", &times(1_000_000, "e"))),
        (
            "a table of a size that is not there",
            json!({ "type": "Precompiled", "precompiled_charsmap": "/////wAAAAA=" }),
        ),
    ] {
        bench.tokenizer("normalizer", normalizer);
        for command in [bench.eval(&text), limited("-v 8000000", &bench.eval(&text))] {
            let run = run(command);
            check_message(case, &run, 4, &[TOKENIZER]);
            // A text that doubles takes seconds to fill the memory, so on a slow machine the time runs out first.
            let slow = if case == "replacing" { "seconds of processor time" } else { "MiB of memory" };
            let reasons =
                ["MiB of memory", "makes the tokenizer library panic", "implausibly large output", slow];
            assert!(reasons.iter().any(|t| run.stderr.contains(t)), "{case}: {run}");
        }
    }
    let out = bench.scratch.path().join("out");
    bench.tokenizer("normalizer", sequence(vec![replace("e", "ee"); 40]));
    let awq = ["--method", "awq", "--scheme", "w4a16-g32", "--samples", "1", "--seq-len", "8"];
    let mut quantize = command(args!["quantize", bench.model(), "-o", &out]);
    quantize.args(awq);
    let quantized = run(quantize);
    check_message("quantize", &quantized, 4, &[TOKENIZER]);
    let reasons = ["MiB of memory", "seconds of processor time"];
    assert!(reasons.iter().any(|reason| quantized.stderr.contains(reason)), "{quantized}");
    assert!(!out.exists());
    // A decoder that grows may end the generation of a text, with an error of its file.
    bench.tokenizer("decoder", replace("", &times(10_000_000, "e")));
    let generate =
        command(args!["generate", bench.model(), "--prompt", times(900, "e"), "--max-new-tokens", "900"]);
    let run = run(generate);
    assert!(matches!(run.code(), Some(0 | 4)), "{run}");
}

/// A tokenizer whose regular expression takes time that grows with the square of the text's length, and a text of this
/// many bytes.
fn endless(bench: &Bench, bytes: usize) -> PathBuf {
    let pattern = json!({ "Regex": "(?:(?:.|\\n)*)*+(?=ZZZ)" });
    let split = json!({ "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false });
    bench.tokenizer("pre_tokenizer", split);
    bench.text(bytes)
}

/// A regular expression that takes too much processor time is stopped without an interrupt.
#[test]
fn regular_expressions_that_take_time() {
    let bench = Bench::new();
    let text = endless(&bench, 210_000);
    check_message("a split", &run(bench.eval(&text)), 4, &[TOKENIZER, "seconds of processor time"]);
    let out = bench.scratch.path().join("out");
    let mut quantize = command(args!["quantize", bench.model(), "-o", &out]);
    quantize.args(["--scheme", "w4a16-g32", "--samples", "1", "--seq-len", "8", "--calibration"]).arg(&text);
    check_message("quantize", &run(quantize), 4, &[TOKENIZER, "seconds of processor time"]);
    assert!(!out.exists());
}

/// A regular expression that takes very long: the first interrupt ends the run.
#[test]
fn an_interrupt_ends_what_a_file_never_does() {
    let bench = Bench::new();
    let text = endless(&bench, 400_000);
    for signal in [Signal::INT, Signal::TERM] {
        let mut run = Running::start(bench.eval(&text));
        let pid = run.id();
        assert!(run.wait_until(|| !children(pid).is_empty()), "no worker was started");
        let workers = children(pid);
        std::thread::sleep(Duration::from_millis(300));
        run.signal(signal);
        let asked = Instant::now();
        check_message("interrupted", &run.wait(), 75, &["interrupted"]);
        assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
        assert!(ended(&workers), "a worker keeps running");
    }
    let mut run = Running::start(bench.eval(&text));
    let pid = run.id();
    assert!(run.wait_until(|| !children(pid).is_empty()), "no worker was started");
    let workers = children(pid);
    run.signal(Signal::KILL);
    run.wait();
    assert!(ended(&workers), "a worker outlives the run");
}

fn children(pid: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists = tasks.flatten().filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok());
    lists.flat_map(|l| l.split_whitespace().filter_map(|p| p.parse().ok()).collect::<Vec<u32>>()).collect()
}

/// Whether these processes have ended, after waiting for a short time.
fn ended(pids: &[u32]) -> bool {
    let started = Instant::now();
    let alive = |pid: &u32| {
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // A zombie has ended; its new parent may not have reaped it yet.
        state.rsplit(')').next().and_then(|s| s.split_whitespace().next()).is_some_and(|s| s != "Z")
    };
    while pids.iter().any(alive) {
        if started.elapsed() > Duration::from_secs(5) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

#[test]
fn a_text_that_has_no_room() {
    let bench = Bench::new();
    let text = bench.scratch.path().join("long.txt");
    std::fs::write(&text, times(30_000_000, "a")).unwrap();
    let awq = ["--method", "awq", "--scheme", "w4a16-g32", "--samples", "1", "--seq-len", "8"];
    let mut quantize = command(args!["quantize", bench.model(), "-o", bench.scratch.path().join("out")]);
    quantize.args(awq).arg("--calibration").arg(&text);
    let run = run(limited("-v 2000000", &quantize));
    check_message("a long line", &run, 5, &["memory", TOKENIZER]);
}

/// Without /proc, the program finds itself by the path with which it was started. Without a path, it starts no workers.
#[test]
fn without_processes_the_answers_are_the_same() {
    let bench = Bench::new();
    let text = bench.text(3000);
    let expected = run(bench.eval(&text)).succeeded();
    let without_proc = |start: &str| {
        let hidden = format!("mount -t tmpfs none /proc && exec {start} \"$@\"");
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "bash", "-c", &hidden, "bash"])
            .arg(program())
            .args(bench.eval(&text).get_args());
        command.env_remove("QUANT_LOG").env("RUST_BACKTRACE", "0");
        run(command).succeeded()
    };
    let probe = Command::new("unshare").args(["--mount", "mount", "-t", "tmpfs", "none", "/proc"]).output();
    if !probe.is_ok_and(|o| o.status.success()) {
        return skip("no file system can be mounted here");
    }
    let table = |run: &Run| {
        run.stdout.lines().take_while(|l| !l.contains("tokens/s")).map(str::to_owned).collect::<Vec<_>>()
    };
    for (start, has_workers) in [("", true), ("-a quant", false)] {
        let run = without_proc(start);
        assert_eq!(run.stderr.contains("cannot start a worker process"), !has_workers, "{run}");
        assert!(table(&run).len() > 3 && table(&run) == table(&expected), "{run}");
    }
}

/// If a limit on processes prevents threads or workers from starting, the error is not reported as a bug.
#[test]
fn too_few_processes() {
    let bench = Bench::new();
    let dir = bench.scratch.path();
    for path in [dir.to_owned(), bench.model()] {
        let open = Command::new("chmod").arg("-R").arg("a+rX").arg(&path).status();
        assert!(open.unwrap().success());
    }
    let plan = args!["plan", bench.model(), "--threads", "8", "--scheme", "w4a16-g32"];
    let as_nobody = |max: u32, arguments: &[std::ffi::OsString]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=64321", "--regid=64321", "--clear-groups", "prlimit"]);
        command.arg(format!("--nproc={max}")).arg(program()).args(arguments).env("RUST_BACKTRACE", "0");
        run(command)
    };
    let probe = as_nobody(100, &plan);
    if probe.code() != Some(0) {
        return skip("another user cannot run the program here");
    }
    for max in 1..=10 {
        let run = as_nobody(max, &plan);
        match run.code() {
            Some(0) => assert!(max > 8, "{max}: {run}"),
            _ => check_message("threads", &run, 5, &["is not available", "--threads"]),
        }
    }
    let eval = args![
        "eval",
        bench.model(),
        "--threads",
        "1",
        "--windows",
        "1",
        "--window",
        "64",
        "--text",
        "builtin-heldout"
    ];
    for max in 1..=8 {
        let run = as_nobody(max, &eval);
        assert!(run.code() == Some(0) || run.code() == Some(5), "{max}: {run}");
        if run.code() == Some(5) {
            check_message("workers", &run, 5, &["is not available"]);
        }
    }
}

/// The protocol is internal to the program, so a worker that a user starts does not serve requests.
#[test]
fn a_worker_without_a_program_ends() {
    let run = quant(args!["__text-worker"]);
    assert!(run.code().is_some_and(|code| code != 70), "{run}");
}
