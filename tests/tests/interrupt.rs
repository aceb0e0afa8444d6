//! Signals, kills and rivals: the target is absent or what it was, and what was finished is used by
//! `--resume`, to the same bytes as a run that nothing disturbed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use quant_tests::args;
use quant_tests::files::{hashes, snapshot};
use quant_tests::models::write_cut_demo_model;
use quant_tests::program::{Run, Running, Signal, command, quant};
use quant_tests::refusal::{check_message, job_of, old_checkpoint};
use tempfile::TempDir;

/// A search that lasts seconds, block by block.
const AWQ: [&str; 4] = ["--samples", "2", "--seq-len", "128"];

/// The model that all tests here quantize, and what becomes of it when nothing disturbs.
struct Undisturbed {
    _scratch: TempDir,
    model: PathBuf,
    files: BTreeMap<String, String>,
}

fn undisturbed() -> &'static Undisturbed {
    static ONCE: OnceLock<Undisturbed> = OnceLock::new();
    ONCE.get_or_init(|| {
        let scratch = tempfile::tempdir().unwrap();
        let (model, out) = (scratch.path().join("model"), scratch.path().join("out"));
        write_cut_demo_model(&model, 3);
        quant(quantize(&model, &out, &AWQ)).succeeded();
        Undisturbed { model, files: hashes(&out), _scratch: scratch }
    })
}

fn quantize(model: &Path, out: &Path, options: &[&str]) -> Vec<OsString> {
    let mut arguments = args!["quantize", model, "-o", out];
    arguments.extend(options.iter().map(OsString::from));
    arguments
}

/// A run that has finished a block and works on the next one.
fn midway(out: &Path, options: &[&str]) -> Running {
    let mut run = Running::start(command(quantize(&undisturbed().model, out, options)));
    let journal = job_of(out).join("journal.jsonl");
    let block_done = || {
        let text = std::fs::read_to_string(&journal).unwrap_or_default();
        text.contains("\"tensor\":\"model.layers.0.self_attn.v_proj.weight_packed\"")
    };
    assert!(run.wait_until(block_done), "{}", run.wait());
    run
}

fn resume(out: &Path, options: &[&str]) -> Run {
    quant(quantize(&undisturbed().model, out, &[options, &["--resume"]].concat()))
}

#[track_caller]
fn assert_resumes(out: &Path, options: &[&str]) {
    let run = resume(out, options).succeeded();
    let note =
        run.stderr.lines().find(|l| l.starts_with("note: resumed: ")).unwrap_or_else(|| panic!("{run}"));
    let complete: usize = note["note: resumed: ".len()..].split(' ').next().unwrap().parse().unwrap();
    assert!(complete > 10, "a block's tensors were complete: {run}");
    assert_eq!(hashes(out), undisturbed().files);
    assert!(!job_of(out).exists());
}

#[test]
fn each_signal_stops_where_nothing_is_lost() {
    for (signal, force) in [(Signal::INT, false), (Signal::TERM, true), (Signal::HUP, false)] {
        let scratch = tempfile::tempdir().unwrap();
        let out = scratch.path().join("out");
        let mut options = AWQ.to_vec();
        if force {
            old_checkpoint(&out);
            options.push("--force");
        }
        let before = out.exists().then(|| snapshot(&out));
        let run = midway(&out, &options);
        run.signal(signal);
        check_message("interrupted", &run.wait(), 75, &["interrupted", "--resume"]);
        assert_eq!(out.exists().then(|| snapshot(&out)), before, "{signal:?}");
        if signal == Signal::HUP {
            continue;
        }

        // A run that asks for something else does not take over what this one has done.
        let left = hashes(&job_of(&out));
        for (other, differs) in [
            (["--seed", "7"], vec!["fingerprint.calibration.seed: was 0, is 7"]),
            (
                ["--scheme", "w4a16-g64"],
                vec![
                    "fingerprint.schemes.model.layers.0.mlp.down_proj: was \"w4a16-g128-sym\"",
                    "w4a16-g64-sym",
                ],
            ),
            (["--method", "rtn"], vec!["fingerprint.method: was \"awq\", is \"rtn\""]),
        ] {
            let run = resume(&out, &[&options[..], &other].concat());
            check_message("other settings", &run, 2, &[&differs[..], &["without --resume"]].concat());
        }
        assert_eq!(out.exists().then(|| snapshot(&out)), before);
        let kept = hashes(&job_of(&out));
        let but_lock = |mut files: BTreeMap<String, String>| {
            files.remove("lock");
            files
        };
        assert_eq!(but_lock(kept), but_lock(left), "a refused run leaves the job as it was");

        assert_resumes(&out, &options);
    }
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    // The first alone may have ended it before the second came: then once more.
    let ended_at_once = (0..8).any(|_| {
        let run = midway(&out, &AWQ);
        run.signal(Signal::INT);
        std::thread::sleep(std::time::Duration::from_millis(2));
        run.signal(Signal::INT);
        let run = run.wait();
        assert!(!out.exists());
        assert!(matches!(run.code(), Some(130 | 75)), "{run}");
        run.code() == Some(130)
    });
    assert!(ended_at_once);
    assert_resumes(&out, &AWQ);
}

#[test]
fn killed_midway() {
    let scratch = tempfile::tempdir().unwrap();
    for name in ["resumed", "anew"] {
        let out = scratch.path().join(name);
        let run = midway(&out, &AWQ);
        run.signal(Signal::KILL);
        assert_eq!(run.wait().code(), None);
        assert!(!out.exists() && job_of(&out).exists());
        if name == "resumed" {
            // Even if the last line of the journal was torn, and a finished tensor damaged since.
            let journal = job_of(&out).join("journal.jsonl");
            let mut text = std::fs::read_to_string(&journal).unwrap();
            text.push_str("{\"tensor\":\"model.la");
            std::fs::write(journal, text).unwrap();
            assert_resumes(&out, &AWQ);
        } else {
            let run = quant(quantize(&undisturbed().model, &out, &AWQ)).succeeded();
            assert!(!run.stderr.contains("resumed"), "{run}");
            assert_eq!(hashes(&out), undisturbed().files);
            assert!(!job_of(&out).exists());
        }
    }
}

/// What was damaged between the runs is noticed and made again.
#[test]
fn a_job_that_was_damaged_meanwhile() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    let run = midway(&out, &AWQ);
    run.signal(Signal::KILL);
    run.wait();
    let weights = job_of(&out).join("out/model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    // The finished tensors hold something else than zeros; turn one byte of them.
    let place = header + bytes[header..].iter().position(|b| *b != 0).unwrap();
    bytes[place] ^= 1;
    std::fs::write(weights, bytes).unwrap();
    let run = resume(&out, &AWQ).succeeded();
    assert!(run.stderr.contains("did not hold what the journal says and are written again"), "{run}");
    assert_eq!(hashes(&out), undisturbed().files);
}

#[test]
fn two_runs_on_one_output() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    let first = midway(&out, &AWQ);
    let holder = format!("process {}", first.id());
    for options in [&AWQ[..], &["--method", "rtn"], &["--method", "rtn", "--force"]] {
        let run = quant(quantize(&undisturbed().model, &out, options));
        check_message("the second", &run, 5, &["out.job", "another process", &holder]);
    }
    // The first one never noticed.
    let run = first.wait().succeeded();
    assert!(run.stderr.is_empty() || !run.stderr.contains("error"), "{run}");
    assert_eq!(hashes(&out), undisturbed().files);
}

/// Without a block to finish, a run ends soon after its signal all the same.
#[test]
fn evaluation_and_measurement_stop_too() {
    let model = &undisturbed().model;
    let heldout = ["--text", "builtin-heldout", "--window", "512"].map(OsString::from);
    for arguments in [
        args!["eval", model].into_iter().chain(heldout).collect::<Vec<_>>(),
        args!["bench", model, "--prefill", "64", "--decode", "100000"],
    ] {
        let run = Running::start(command(arguments));
        // Enough for the handlers to be there, not for the work.
        std::thread::sleep(std::time::Duration::from_millis(700));
        run.signal(Signal::INT);
        let run = run.wait();
        assert_eq!((run.code(), run.stdout.as_str()), (Some(75), ""), "{run}");
    }
}
