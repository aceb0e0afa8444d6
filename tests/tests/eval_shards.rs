//! `quant eval --shards`: shards that several processes measure give the same result as one process, bit for bit.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use quant_tests::program::{Run, Running, Signal, command, command_that_hangs_up, quant};
use quant_tests::refusal::check_message;
use quant_tests::{args, demo_model};
use serde_json::{Value, json};

/// Several batches of windows, the last of which is not full.
const TEXT: [&str; 6] = ["--text", "builtin-heldout", "--window", "64", "--windows", "75"];

struct Bench {
    scratch: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let rtn = args!["quantize", demo_model(), "-o", scratch.path().join("w3"), "--method", "rtn"];
        quant(rtn.into_iter().chain(args!["--scheme", "w3a16-g64-sym"])).succeeded();
        Self { scratch }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn arguments(&self, options: &[OsString]) -> Vec<OsString> {
        let eval = args!["eval", self.at("w3")].into_iter().chain(TEXT.map(Into::into));
        eval.chain(options.iter().cloned()).collect()
    }

    fn eval(&self, options: &[OsString]) -> Run {
        quant(self.arguments(options))
    }
}

/// A result without its timing.
fn numbers(run: Run) -> Value {
    let mut result = run.json();
    for key in ["seconds", "tokens_per_second", "sha256"] {
        assert!(result.as_object_mut().unwrap().remove(key).is_some(), "{key}");
    }
    result
}

/// The files of shards in a directory.
fn journals(directory: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".journal")).collect();
    names.sort();
    names
}

#[test]
fn shards_give_the_result_of_one_process() {
    let bench = Bench::new();
    let kept = bench.at("kept");
    quant(args!["eval", demo_model(), "--save-reference", &kept].into_iter().chain(TEXT.map(Into::into)))
        .succeeded();
    for (name, reference) in [
        ("alone", args![]),
        ("model", args!["--reference", demo_model()]),
        ("stored", args!["--reference", &kept]),
    ] {
        let whole = bench.eval(&[reference.clone(), args!["--json"]].concat());
        let directory = bench.at(name);
        let shards = args!["--shards", &directory];
        let merge = || bench.eval(&[reference.clone(), shards.clone(), args!["--json"]].concat());
        let shard = |shard: &str| [reference.clone(), shards.clone(), args!["--shard", shard]].concat();

        let none = bench.eval(&[reference.clone(), shards.clone()].concat());
        check_message(name, &none, 5, &["has no shards yet", "--shard"]);
        assert!(!directory.exists(), "{name}");
        let first = bench.eval(&[shard("1/3"), args!["--json"]].concat()).json();
        assert_eq!((&first["first_window"], &first["end_window"]), (&json!(32), &json!(64)), "{name}");
        let early = merge();
        check_message(name, &early, 5, &["2 shards not finished: 0/3, 2/3", "--shard"]);
        let others = ["0/3", "2/3"].map(|i| Running::start(command(bench.arguments(&shard(i)))));
        others.into_iter().for_each(|run| drop(run.wait().succeeded()));
        assert_eq!(journals(&directory), ["0-of-3.0.journal", "1-of-3.32.journal", "2-of-3.64.journal"]);
        assert_eq!(numbers(merge()), numbers(whole), "{name}");
        // A shard that is finished is not measured again.
        let again = bench.eval(&[shard("0/3"), args!["--json"]].concat()).json();
        assert_eq!((&again["known"], &again["of_windows"]), (&json!(32), &json!(75)));
    }
}

#[test]
fn an_interrupted_shard_resumes() {
    let bench = Bench::new();
    let (directory, reference) = (bench.at("shards"), args!["--reference", demo_model()]);
    let shard = [reference.clone(), args!["--shards", &directory, "--shard", "0/1"]].concat();
    let mut run = Running::start(command_that_hangs_up(bench.arguments(&shard)));
    assert!(run.wait_until(|| !journals(&directory).is_empty()), "{}", run.wait());
    run.signal(Signal::KILL);
    run.wait();
    let resumed = bench.eval(&shard).succeeded();
    assert!(resumed.stderr.contains("of 75 windows have already been measured"), "{resumed}");
    let merged = bench.eval(&[reference.clone(), args!["--shards", &directory, "--json"]].concat());
    let whole = bench.eval(&[reference, args!["--json"]].concat());
    assert_eq!(numbers(merged), numbers(whole));
}

/// A signal at any moment, also while the program is hashed, is no other evaluation.
#[test]
fn a_signal_does_not_make_a_shard_look_foreign() {
    let bench = Bench::new();
    let directory = bench.at("shards");
    let shard = args!["--shards", &directory, "--shard", "0/3"];
    bench.eval(&shard).succeeded();
    for milliseconds in (0..240).step_by(15) {
        let run = Running::start(command(bench.arguments(&shard)));
        std::thread::sleep(std::time::Duration::from_millis(milliseconds));
        run.signal(Signal::TERM);
        let run = run.wait();
        // Without a code, the signal came before the program could handle it.
        assert!(matches!(run.code(), None | Some(0 | 75)), "after {milliseconds} ms: {run}");
    }
}

/// A worker removes what killed workers have left, and nothing else.
#[test]
fn old_directories_of_the_user_stay() {
    let bench = Bench::new();
    let directory = bench.at("shards");
    let notes = directory.join("tmp/notes");
    std::fs::create_dir_all(&notes).unwrap();
    std::fs::write(notes.join("note.txt"), "x").unwrap();
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(30 * 24 * 60 * 60);
    for path in [notes.join("note.txt"), notes.clone()] {
        std::fs::File::open(path).unwrap().set_modified(old).unwrap();
    }
    bench.eval(&args!["--shards", &directory, "--shard", "0/3"]).succeeded();
    assert!(notes.join("note.txt").exists());
}

/// Two processes that measure one shard share the work, and a different result of one of them is an error.
#[test]
fn a_shard_may_be_measured_twice() {
    let bench = Bench::new();
    let directory = bench.at("shards");
    let shard = args!["--shards", &directory, "--shard", "0/1"];
    let both = [0, 1].map(|_| Running::start(command(bench.arguments(&shard))));
    both.into_iter().for_each(|run| drop(run.wait().succeeded()));
    assert_eq!(journals(&directory), ["0-of-1.0.journal", "0-of-1.32.journal", "0-of-1.64.journal"]);
    assert_eq!(std::fs::read_dir(directory.join("tmp")).unwrap().count(), 0);

    let third = directory.join("0-of-1.64.journal");
    let right = std::fs::read(&third).unwrap();
    let wrong = [&right[..right.len() - 20], b"\n"].concat();
    std::fs::write(&third, wrong).unwrap();
    check_message("damaged", &bench.eval(&shard), 2, &["0-of-1.64.journal", "damaged", "remove the file"]);
    std::fs::remove_file(&third).unwrap();
    std::fs::create_dir(&third).unwrap();
    check_message("a directory", &bench.eval(&shard), 4, &["0-of-1.64.journal", "not a regular file"]);
    std::fs::remove_dir(&third).unwrap();
    bench.eval(&shard).succeeded();
    assert_eq!(std::fs::read(&third).unwrap(), right);
}

#[test]
fn shards_of_other_evaluations_are_refused() {
    let bench = Bench::new();
    let directory = bench.at("shards");
    let shards = args!["--shards", &directory];
    let shard = |i: &str| bench.eval(&[shards.clone(), args!["--shard", i]].concat());
    // Two batches and a rest make three shards at most; the others have nothing to do.
    let empty = shard("0/5").succeeded();
    assert!(empty.stdout.contains("no windows belong to this one"), "{empty}");
    for i in ["1/5", "3/5", "4/5"] {
        shard(i).succeeded();
    }
    quant(bench.arguments(&shards)).succeeded();

    let other = bench.eval(&[shards.clone(), args!["--reference", demo_model()]].concat());
    check_message("with a reference", &other, 2, &["the journal of a different evaluation"]);
    let other = bench.eval(&[shards.clone(), args!["--kv", "4"]].concat());
    check_message("another cache", &other, 2, &["the journal of a different evaluation"]);
    shard("0/2").succeeded();
    let mixed = quant(bench.arguments(&shards));
    check_message("mixed", &mixed, 2, &["of 2 and 5 shards"]);

    for (name, options, parts) in [
        ("no directory", args!["--shard", "0/2"], vec!["--shards"]),
        ("no such shard", args!["--shards", &directory, "--shard", "2/2"], vec!["expected I/N"]),
        ("a journal", args!["--shards", &directory, "--journal", bench.at("j")], vec!["cannot be used with"]),
        (
            "a URL",
            args!["--shards", "s3://key:hunter22@bucket/x", "--shard", "0/2"],
            vec!["s3://", "`store`"],
        ),
        ("a URL to merge", args!["--shards", "gs://bucket/x"], vec!["gs://", "--features store"]),
        ("in the model", args!["--shards", bench.at("w3/shards"), "--shard", "0/2"], vec!["w3"]),
    ] {
        let run = bench.eval(&options);
        check_message(name, &run, 2, &parts);
        assert!(!run.stderr.contains("hunter22"), "{run}");
    }
    assert!(!bench.at("w3/shards").exists() && !Path::new("s3:").exists());
}
