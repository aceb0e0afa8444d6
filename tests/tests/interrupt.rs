//! Signals, kills and concurrent runs.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use quant_tests::args;
use quant_tests::files::{hashes, snapshot};
use quant_tests::models::{read_safetensors, safetensors, write_cut_demo_model, write_experts_model};
use quant_tests::program::{Run, Running, Signal, command, command_that_hangs_up, program, quant};
use quant_tests::refusal::{check_message, job_of, old_checkpoint};
use tempfile::TempDir;

/// A search that lasts seconds, block by block.
const AWQ: [&str; 4] = ["--samples", "2", "--seq-len", "128"];

/// A model with three blocks, and a directory for its outputs; each test has its own.
struct Bench {
    scratch: TempDir,
    model: PathBuf,
}

impl Bench {
    fn new() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let model = scratch.path().join("model");
        write_cut_demo_model(&model, 3);
        Self { scratch, model }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// A run that has finished a block and is working on the next one.
    fn midway(&self, out: &Path, options: &[&str]) -> Running {
        let mut run = Running::start(command_that_hangs_up(quantize(&self.model, out, options)));
        let journal = job_of(out).join("journal.jsonl");
        let block_done = || {
            let text = std::fs::read_to_string(&journal).unwrap_or_default();
            text.contains("\"tensor\":\"model.layers.0.self_attn.v_proj.weight_packed\"")
        };
        if !run.wait_until(block_done) {
            panic!("ended before a block was finished: {}", run.wait());
        }
        run
    }

    fn resume(&self, out: &Path, options: &[&str]) -> Run {
        quant(quantize(&self.model, out, &[options, &["--resume"]].concat()))
    }

    #[track_caller]
    fn assert_resumes(&self, out: &Path, options: &[&str]) {
        let run = self.resume(out, options).succeeded();
        let note = run.stderr.lines().find_map(|l| l.strip_prefix("note: resumed: "));
        let note = note.unwrap_or_else(|| panic!("not resumed: {run}"));
        let complete: usize = note.split(' ').next().unwrap().parse().unwrap();
        assert!(complete > 10, "only {complete} tensors were complete: {run}");
        assert_eq!(&hashes(out), undisturbed());
        assert!(!job_of(out).exists());
    }
}

/// The output files of an undisturbed run on this model.
fn undisturbed() -> &'static BTreeMap<String, String> {
    static ONCE: OnceLock<BTreeMap<String, String>> = OnceLock::new();
    ONCE.get_or_init(|| {
        let bench = Bench::new();
        quant(quantize(&bench.model, &bench.at("out"), &AWQ)).succeeded();
        hashes(&bench.at("out"))
    })
}

fn quantize(model: &Path, out: &Path, options: &[&str]) -> Vec<OsString> {
    let mut arguments = args!["quantize", model, "-o", out];
    arguments.extend(options.iter().map(OsString::from));
    arguments
}

#[test]
fn each_signal_stops_where_nothing_is_lost() {
    for (signal, force) in [(Signal::INT, false), (Signal::TERM, true), (Signal::HUP, false)] {
        let bench = Bench::new();
        let out = bench.at("out");
        let mut options = AWQ.to_vec();
        if force {
            old_checkpoint(&out);
            options.push("--force");
        }
        let before = out.exists().then(|| snapshot(&out));
        let run = bench.midway(&out, &options);
        run.signal(signal);
        check_message("interrupted", &run.wait(), 75, &["interrupted", "continue with: "]);
        assert_eq!(out.exists().then(|| snapshot(&out)), before, "{signal:?}");
        if signal == Signal::HUP {
            let left = hashes(&job_of(&out).join("out"));
            let rtn = quantize(&bench.model, &out, &["--method", "rtn"]);
            let ways = ["method: was awq, is rtn\n", "settings of the interrupted run", "run with --force"];
            check_message("a different run", &quant(rtn), 2, &ways);
            assert_eq!(hashes(&job_of(&out).join("out")), left);
            let run = quant(quantize(&bench.model, &out, &["--method", "rtn", "--force"])).succeeded();
            assert!(!run.stderr.contains("resumed"), "{run}");
            continue;
        }

        let left = hashes(&job_of(&out));
        for (other, differs) in [
            (["--seed", "7"], "calibration.seed: was 0, is 7"),
            (["--packing", "documents"], "calibration.packing: was stream, is documents"),
            (["--scheme", "w4a16-g64"], "scheme: was w4a16-g128-sym, is w4a16-g64-sym (21 linears)"),
        ] {
            let run = bench.resume(&out, &[&options[..], &other].concat());
            // Only this difference, and none of its consequences.
            let listed = format!("different inputs or settings:\n  {differs}\n  run with the settings");
            check_message("other settings", &run, 2, &[&listed, "without --resume"]);
        }
        let mut rtn = vec!["--method", "rtn"];
        rtn.extend(force.then_some("--force"));
        let differs = ["settings:\n  method: was awq, is rtn\n  run with", "without --resume"];
        check_message("another method", &bench.resume(&out, &rtn), 2, &differs);
        assert_eq!(out.exists().then(|| snapshot(&out)), before);
        let kept = hashes(&job_of(&out));
        let but_lock = |mut files: BTreeMap<String, String>| {
            files.remove("lock");
            files
        };
        assert_eq!(but_lock(kept), but_lock(left), "a refused run leaves the job as it was");

        bench.assert_resumes(&out, &options);
    }
}

/// Output bytes are reproducible for one program and instruction set; a job shared by two would match neither.
#[test]
fn another_program_or_instruction_set_does_not_resume() {
    let bench = Bench::new();
    let out = bench.at("out");
    let run = bench.midway(&out, &AWQ);
    run.signal(Signal::INT);
    check_message("interrupted", &run.wait(), 75, &["continue with: "]);
    let left = hashes(&job_of(&out));
    let resume = |program: Command| {
        let mut program = program;
        let run =
            program.args(quantize(&bench.model, &out, &[&AWQ[..], &["--resume"]].concat())).output().unwrap();
        (run.status.code(), String::from_utf8_lossy(&run.stderr).into_owned())
    };

    // Every processor supports this instruction set; it is the default only on processors that support no other.
    let mut narrow = Command::new(program());
    narrow.env("QUANT_ISA", "scalar");
    // Trailing bytes do not change the behavior of an executable.
    let copy = bench.at("quant");
    std::fs::copy(program(), &copy).unwrap();
    std::fs::OpenOptions::new().append(true).open(&copy).unwrap().write_all(b"\n").unwrap();
    for (program, field) in
        [(narrow, "instruction set: was "), (Command::new(&copy), "executable: is a different build")]
    {
        let (code, message) = resume(program);
        assert_eq!(code, Some(2), "{message}");
        let parts = [field, "different build", "QUANT_ISA"];
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    let but_lock = |files: BTreeMap<String, String>| -> BTreeMap<String, String> {
        files.into_iter().filter(|(name, _)| name != "lock").collect()
    };
    assert_eq!(but_lock(hashes(&job_of(&out))), but_lock(left), "a refused run leaves the job as it was");
    bench.assert_resumes(&out, &AWQ);
}

#[test]
fn inputs_that_changed_meanwhile() {
    let bench = Bench::new();
    let (out, text) = (bench.at("out"), bench.at("text.txt"));
    std::fs::write(&text, "The kettle was on, and the window was open.\n".repeat(500)).unwrap();
    let options = [&AWQ[..], &["--calibration", text.to_str().unwrap()]].concat();
    let run = bench.midway(&out, &options);
    run.signal(Signal::INT);
    check_message("interrupted", &run.wait(), 75, &["continue with: "]);
    let refused = |path: &Path, changed: &[u8], expected: &str, remedy: &str| {
        let before = std::fs::read(path).unwrap();
        assert_ne!(before, changed);
        std::fs::write(path, changed).unwrap();
        check_message(expected, &bench.resume(&out, &options), 2, &[expected, remedy]);
        assert!(!out.exists(), "{expected}");
        assert!(job_of(&out).exists(), "{expected}: the work of the first run is gone");
        std::fs::write(path, before).unwrap();
    };
    let upper = std::fs::read(&text).unwrap().to_ascii_uppercase();
    refused(&text, &upper, "calibration text: has changed", "without --resume");
    let config = bench.model.join("config.json");
    let mut fields: serde_json::Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    fields["rms_norm_eps"] = 0.25.into();
    refused(&config, fields.to_string().as_bytes(), "config.json: has changed", "without --resume");
    // One bit of a weight that an output tensor was already made from.
    let weights = bench.model.join("model.safetensors");
    let mut tensors = read_safetensors(&weights);
    let name = "model.layers.0.self_attn.v_proj.weight";
    tensors.iter_mut().find(|tensor| tensor.name == name).unwrap().data[0] ^= 1;
    let changed = format!("tensor `{name}` has changed since");
    refused(&weights, &safetensors(&tensors), &changed, "remove the directory next to the output");
    let run = bench.resume(&out, &options).succeeded();
    assert!(run.stderr.contains("of the output are complete"), "{run}");
    let card = std::fs::read_to_string(out.join("README.md")).unwrap();
    assert!(card.contains(" in 2 windows of 128 from a given text, seed 0"), "{card}");
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let bench = Bench::new();
    let out = bench.at("out");
    let run = bench.midway(&out, &AWQ);
    // The process is paused while both signals are sent.
    run.signal(Signal::STOP);
    run.signal(Signal::INT);
    run.signal(Signal::TERM);
    run.signal(Signal::CONT);
    let run = run.wait();
    assert!(matches!(run.code(), Some(130 | 143)), "{run}");
    assert_eq!((run.stdout.as_str(), out.exists()), ("", false));
    bench.assert_resumes(&out, &AWQ);
}

#[test]
fn killed_midway() {
    let bench = Bench::new();
    for name in ["resumed", "repeated"] {
        let out = bench.at(name);
        let run = bench.midway(&out, &AWQ);
        run.signal(Signal::KILL);
        assert_eq!(run.wait().code(), None);
        assert!(!out.exists() && job_of(&out).exists());
        if name == "resumed" {
            let journal = job_of(&out).join("journal.jsonl");
            let mut text = std::fs::read_to_string(&journal).unwrap();
            text.push_str("{\"tensor\":\"model.la");
            std::fs::write(journal, text).unwrap();
            bench.assert_resumes(&out, &AWQ);
        } else {
            // The same command continues by itself.
            let run = quant(quantize(&bench.model, &out, &AWQ)).succeeded();
            let note = format!("are complete; to start over, remove {}\n", job_of(&out).display());
            assert!(run.stderr.contains("note: resumed: ") && run.stderr.contains(&note), "{run}");
            assert_eq!(&hashes(&out), undisturbed());
            assert!(!job_of(&out).exists());
        }
        let finished = ["is finished: there is no interrupted run", "--force"];
        check_message("finished", &bench.resume(&out, &AWQ), 2, &finished);
    }
}

/// A run that is killed inside a block keeps the experts that were written.
#[test]
fn killed_between_experts() {
    const GPTQ: [&str; 8] = ["--method", "gptq", "--samples", "2", "--seq-len", "128", "--threads", "1"];
    // Parts of a block are committed once a second.
    const EXPERTS: u64 = 128;
    let scratch = tempfile::tempdir().unwrap();
    let (model, whole, out) =
        (scratch.path().join("model"), scratch.path().join("whole"), scratch.path().join("out"));
    write_experts_model(&model, EXPERTS, 1);
    quant(quantize(&model, &whole, &GPTQ)).succeeded();
    let mut run = Running::start(command_that_hangs_up(quantize(&model, &out, &GPTQ)));
    let written = |expert: u64| {
        let text = std::fs::read_to_string(job_of(&out).join("journal.jsonl")).unwrap_or_default();
        let down =
            format!("\"tensor\":\"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight_packed\"");
        text.contains(&down)
    };
    if !run.wait_until(|| written(0)) {
        panic!("ended before an expert was written: {}", run.wait());
    }
    run.signal(Signal::KILL);
    assert_eq!(run.wait().code(), None);
    assert!(!written(EXPERTS - 1), "the block was complete already");
    let run = quant(quantize(&model, &out, &[&GPTQ[..], &["--resume"]].concat())).succeeded();
    assert!(run.stderr.contains("note: resumed: "), "{run}");
    assert_eq!(hashes(&out), hashes(&whole));
    assert!(!job_of(&out).exists());
}

#[test]
fn a_job_that_was_damaged_meanwhile() {
    let bench = Bench::new();
    let out = bench.at("out");
    let run = bench.midway(&out, &AWQ);
    run.signal(Signal::KILL);
    run.wait();
    let weights = job_of(&out).join("out/model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    // Flips one bit in the finished tensors, which are the parts that are not zero.
    let place = header + bytes[header..].iter().position(|b| *b != 0).unwrap();
    bytes[place] ^= 1;
    std::fs::write(weights, bytes).unwrap();
    let journal = job_of(&out).join("journal.jsonl");
    let notes = std::fs::read_to_string(&journal).unwrap();
    let damaged = notes.replacen("\"relative_rms\":", "\"relative_rms\":\"much\",\"was\":", 1);
    assert_ne!(damaged, notes);
    std::fs::write(&journal, damaged).unwrap();
    let run = bench.resume(&out, &AWQ).succeeded();
    assert!(run.stderr.contains("did not match the journal and will be written again"), "{run}");
    assert_eq!(&hashes(&out), undisturbed());
}

#[test]
fn two_runs_on_one_output() {
    let bench = Bench::new();
    let out = bench.at("out");
    let first = bench.midway(&out, &AWQ);
    let holder = format!("process {}", first.id());
    first.signal(Signal::STOP);
    for options in [&AWQ[..], &["--method", "rtn"], &["--method", "rtn", "--force"]] {
        let run = quant(quantize(&bench.model, &out, options));
        check_message("the second", &run, 5, &["out.job", "another process", &holder]);
    }
    first.signal(Signal::CONT);
    let run = first.wait().succeeded();
    assert!(run.stderr.is_empty() || !run.stderr.contains("error"), "{run}");
    assert_eq!(&hashes(&out), undisturbed());
}

#[test]
fn evaluation_and_measurement_stop_too() {
    let bench = Bench::new();
    let (model, text) = (&bench.model, bench.at("long.txt"));
    let line = "The kettle was on, the window was open, and nobody had yet thought of Monday.\n";
    std::fs::write(&text, line.repeat(20_000)).unwrap();
    for arguments in [
        args!["eval", model, "--text", &text, "--window", "512"],
        args!["bench", model, "--prefill", "64", "--decode", "100000"],
    ] {
        let run = Running::start(command(arguments));
        // Handlers are installed by now.
        std::thread::sleep(std::time::Duration::from_millis(700));
        run.signal(Signal::INT);
        let run = run.wait();
        assert_eq!((run.code(), run.stdout.as_str()), (Some(75), ""), "{run}");
    }
}
