//! A full disk ends a run with exit code 5, reports the path and the sizes, and damages no existing files.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use quant_tests::files::{hashes, snapshot};
use quant_tests::models::write_cut_demo_model;
use quant_tests::program::{Running, Signal, SmallDisk, can_mount, command, program, quant};
use quant_tests::refusal::{check_message, job_of, old_checkpoint};
use quant_tests::{args, demo_model, skip};

const RTN: [&str; 2] = ["--method", "rtn"];

fn quantize(model: &Path, out: &Path, options: &[&str]) -> Vec<OsString> {
    let mut arguments = args!["quantize", model, "-o", out];
    arguments.extend(options.iter().map(OsString::from));
    arguments
}

fn small_disk(point: &Path, bytes: u64) -> SmallDisk {
    let disk = SmallDisk::mount(point, bytes).expect("mounting worked before");
    old_checkpoint(&disk.path().join("old"));
    disk
}

#[test]
fn too_small_a_disk_is_reported_before_anything_is_written() {
    if !can_mount() {
        return skip("no file system can be mounted here");
    }
    let point = tempfile::tempdir().unwrap();
    let disk = small_disk(point.path(), 4 << 20);
    let before = snapshot(disk.path());
    for (name, options) in [("new", &RTN[..]), ("old", &[&RTN[..], &["--force"]].concat())] {
        let out = disk.path().join(name);
        let run = quant(quantize(&demo_model(), &out, options));
        check_message(name, &run, 5, &[&out.display().to_string(), "needs ", " bytes, ", " are free"]);
        // The required bytes (6.6 MB of weights, the companion files, and 2 %), and the free bytes.
        let numbers: Vec<u64> = run.stderr.split([' ', ',']).filter_map(|w| w.parse().ok()).collect();
        let [needed, free] = numbers[..] else { panic!("{run}") };
        assert!((6_900_000..7_700_000).contains(&needed) && free < 4 << 20, "{run}");
        assert_eq!(snapshot(disk.path()), before, "{name}: the disk has changed");
    }
}

/// There is room for the weights only.
#[test]
fn companions_are_counted() {
    if !can_mount() {
        return skip("no file system can be mounted here");
    }
    let point = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    quant(quantize(&demo_model(), &elsewhere.path().join("out"), &RTN)).succeeded();
    let weights = elsewhere.path().join("out/model.safetensors").metadata().unwrap().len();
    let disk = small_disk(point.path(), weights + weights / 50 + 32 * 1024);
    let before = snapshot(disk.path());
    let out = disk.path().join("old");
    let run = quant(quantize(&demo_model(), &out, &[&RTN[..], &["--force"]].concat()));
    check_message("no room for companions", &run, 5, &["old needs ", " bytes, ", " are free"]);
    assert_eq!(snapshot(disk.path()), before);
}

/// The disk fills up during the search.
#[test]
fn a_disk_that_fills_up_meanwhile() {
    if !can_mount() {
        return skip("no file system can be mounted here");
    }
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    write_cut_demo_model(&model, 3);
    let awq = ["--samples", "2", "--seq-len", "128"];
    let undisturbed = scratch.path().join("undisturbed");
    quant(quantize(&model, &undisturbed, &awq)).succeeded();

    let point = tempfile::tempdir().unwrap();
    let disk = small_disk(point.path(), 32 << 20);
    let (old, before) = (disk.path().join("old"), hashes(&disk.path().join("old")));
    let forced = [&awq[..], &["--force"]].concat();
    let mut run = Running::start(command(quantize(&model, &old, &forced)));
    let journal = job_of(&old).join("journal.jsonl");
    let begun =
        || std::fs::read_to_string(&journal).is_ok_and(|j| j.contains("\"tensor\":\"model.layers.0."));
    assert!(run.wait_until(begun), "{}", run.wait());
    run.signal(Signal::STOP);
    let filler = disk.fill();
    run.signal(Signal::CONT);
    let run = run.wait();
    check_message(
        "filled up",
        &run,
        5,
        &[&job_of(&old).display().to_string(), "needs ", " bytes, but only 0 are free"],
    );
    assert_eq!(hashes(&old), before);

    let run = quant(quantize(&model, &old, &[&forced[..], &["--resume"]].concat()));
    assert_eq!(run.code(), Some(5), "{run}");
    assert_eq!(hashes(&old), before);

    std::fs::remove_file(filler).unwrap();
    let run = quant(quantize(&model, &old, &[&forced[..], &["--resume"]].concat())).succeeded();
    assert!(run.stderr.contains("resumed: "), "{run}");
    assert_eq!(hashes(&old), hashes(&undisturbed));
    assert!(!job_of(&old).exists());
}

/// If a file next to the output cannot be written, the command fails and says that the output exists.
#[test]
fn a_report_that_finds_no_room() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    let run = quant(quantize(&demo_model(), &out, &[&RTN[..], &["--report", "/dev/full"]].concat()));
    assert_eq!(run.code(), Some(5), "{run}");
    let complete = format!("{} is complete", out.display());
    assert!([&complete, "/dev/full", "No space left"].iter().all(|part| run.stderr.contains(*part)), "{run}");
    quant([OsString::from("inspect"), out.into()]).succeeded();
}

/// A limit on file sizes (`ulimit -f`) kills a program that does not handle the signal.
#[test]
fn a_limit_on_file_sizes() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("old");
    old_checkpoint(&out);
    let before = hashes(&out);
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 1000 && exec \"$@\"", "sh"]).arg(program());
    limited.args(quantize(&demo_model(), &out, &[&RTN[..], &["--force"]].concat()));
    let run = Running::start(limited).wait();
    let phrases = ["old.job/out/model.safetensors needs ", "at most 512000 bytes to a file", "ulimit -f"];
    check_message("limited", &run, 5, &phrases);
    assert_eq!(hashes(&out), before);
}

const GGUF: [&str; 8] =
    ["--format", "gguf", "--calibration", "builtin", "--samples", "4", "--seq-len", "128"];

/// The space of a GGUF file is reserved at the start. What fills the disk later are the records of the journal.
#[test]
fn a_disk_that_fills_up_while_a_gguf_file_is_written() {
    if !can_mount() {
        return skip("no file system can be mounted here");
    }
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    write_cut_demo_model(&model, 3);
    let undisturbed = scratch.path().join("undisturbed.gguf");
    quant(quantize(&model, &undisturbed, &GGUF)).succeeded();

    let point = tempfile::tempdir().unwrap();
    let disk = small_disk(point.path(), 32 << 20);
    let out = disk.path().join("out.gguf");
    let mut run = Running::start(command(quantize(&model, &out, &GGUF)));
    let journal = job_of(&out).join("journal.jsonl");
    let begun = || std::fs::read_to_string(&journal).is_ok_and(|j| j.contains("\"tensor\":\"blk.0."));
    assert!(run.wait_until(begun), "{}", run.wait());
    run.signal(Signal::STOP);
    let filler = disk.fill();
    run.signal(Signal::CONT);
    let run = run.wait();
    let phrases = [&journal.display().to_string(), " needs ", " bytes, but only 0 are free"];
    check_message("filled up", &run, 5, &phrases);
    assert!(!out.exists());

    let resumed = [&GGUF[..], &["--resume"]].concat();
    let run = quant(quantize(&model, &out, &resumed));
    check_message("still full", &run, 5, &["are free"]);
    assert!(!out.exists());

    std::fs::remove_file(filler).unwrap();
    let run = quant(quantize(&model, &out, &resumed)).succeeded();
    assert!(run.stderr.contains("resumed: "), "{run}");
    assert_eq!(std::fs::read(&out).unwrap(), std::fs::read(&undisturbed).unwrap());
    assert!(!job_of(&out).exists());
}

#[test]
fn a_limit_on_the_size_of_a_gguf_file() {
    let scratch = tempfile::tempdir().unwrap();
    let [model, out, undisturbed] =
        ["model", "out.gguf", "undisturbed.gguf"].map(|name| scratch.path().join(name));
    write_cut_demo_model(&model, 1);
    quant(quantize(&model, &undisturbed, &GGUF)).succeeded();
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 1000 && exec \"$@\"", "sh"]).arg(program());
    limited.args(quantize(&model, &out, &GGUF));
    let run = Running::start(limited).wait();
    let phrases = ["out.gguf needs ", "at most 512000 bytes to a file", "ulimit -f", "--split-max-size"];
    check_message("limited", &run, 5, &phrases);
    assert!(!out.exists());
    quant(quantize(&model, &out, &[&GGUF[..], &["--resume"]].concat())).succeeded();
    assert_eq!(std::fs::read(&out).unwrap(), std::fs::read(&undisturbed).unwrap());
}
