//! `quant job` and `quant merge` as schedulers use them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use quant_tests::args;
use quant_tests::files::hashes;
use quant_tests::models::write_cut_demo_model;
use quant_tests::program::{Run, Running, Signal, command, command_that_hangs_up, quant};
use quant_tests::refusal::check_message;
use tempfile::TempDir;

/// A search that lasts seconds, block by block.
const AWQ: [&str; 4] = ["--samples", "8", "--seq-len", "512"];

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

    fn init(&self, options: &[&str]) -> Run {
        let mut arguments = args!["job", "init", &self.model, "--job", self.at("store")];
        arguments.extend(options.iter().map(OsString::from));
        quant(arguments)
    }

    fn run_arguments(&self, options: &[&str]) -> Vec<OsString> {
        let mut arguments = args!["job", "run", self.at("store")];
        arguments.extend(options.iter().map(OsString::from));
        arguments
    }

    fn run(&self, options: &[&str]) -> Run {
        quant(self.run_arguments(options))
    }

    fn merge(&self, options: &[&str]) -> Run {
        let mut arguments = args!["merge", self.at("store"), "-o", self.at("out")];
        arguments.extend(options.iter().map(OsString::from));
        quant(arguments)
    }

    #[track_caller]
    fn assert_same(&self, options: &[&str]) {
        let mut arguments = args!["quantize", &self.model, "-o", self.at("whole")];
        arguments.extend(options.iter().map(OsString::from));
        quant(arguments).succeeded();
        assert_eq!(hashes(&self.at("out")), hashes(&self.at("whole")));
    }

    fn results(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.at("store/units")).unwrap();
        let mut found: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        found.sort();
        found
    }
}

#[test]
fn workers_share_a_job() {
    let bench = Bench::new();
    let split = ["--forward-shards", "2"];
    let made = bench.init(&[&AWQ[..], &split].concat()).succeeded();
    assert!(made.stdout.contains("created, 8 units"), "{made}");
    assert!(bench.init(&[&AWQ[..], &split].concat()).succeeded().stdout.contains("exists already"));
    let units = quant(args!["job", "units", bench.at("store"), "--json"]).json();
    let units = units["units"].as_array().unwrap().clone();
    assert_eq!(units.len(), 8);
    for unit in &units {
        for cost in ["seconds", "memory_bytes", "smallest_budget_bytes", "input_bytes", "output_bytes"] {
            assert!(unit[cost].as_f64().unwrap() > 0.0, "{unit}");
        }
    }
    assert_eq!(units[6]["id"], "blocks/2");
    assert_eq!(units[6]["needs"].as_array().unwrap().len(), 2);
    let early = bench.run(&["--phase", "blocks", "--shard", "1/2"]);
    check_message("early", &early, 5, &["forward/0/0", "run the same command again"]);
    check_message("early merge", &bench.merge(&[]), 5, &["not finished", "quant job run STORE"]);
    assert!(!bench.at("out").exists());
    let one = bench.run(&["--unit", "forward/0/0"]).succeeded();
    assert!(one.stderr.contains("unit forward/0/0 (1 of 1): computing"), "{one}");
    assert!(one.stdout.starts_with("1 unit computed, 0 existed already"), "{one}");
    for phase in ["forward", "blocks"] {
        let start =
            |shard: &str| Running::start(command(bench.run_arguments(&["--phase", phase, "--shard", shard])));
        let workers = ["0/2", "1/2"].map(start);
        workers.into_iter().for_each(|worker| drop(worker.wait().succeeded()));
    }
    let status = quant(args!["job", "status", bench.at("store"), "--json"]).json();
    assert_eq!((&status["done"], &status["total"]), (&8.into(), &8.into()), "{status}");
    assert_eq!(status["temporary_files"], 0);
    let again = bench.run(&[]).succeeded();
    assert!(again.stderr.contains("unit forward/0/0 (1 of 8): the result exists already"), "{again}");
    assert!(!again.stderr.contains("computing"), "{again}");
    assert!(again.stdout.starts_with("0 units computed, 8 existed already"), "{again}");
    let again = bench.run(&["--json"]).json();
    assert!(again["units"].as_array().unwrap().iter().all(|unit| unit["computed"] == false), "{again}");
    let merged = bench.merge(&[]).succeeded();
    assert!(merged.stdout.contains("written to"), "{merged}");
    bench.assert_same(&AWQ);
    check_message("exists", &bench.merge(&[]), 2, &["exists", "--force"]);
    bench.merge(&["--force"]).succeeded();
    bench.assert_same(&["--force"].into_iter().chain(AWQ).collect::<Vec<_>>());
}

/// Every worker does everything, and is killed again and again; every published result is complete.
#[test]
fn killed_workers_lose_only_their_unit() {
    let bench = Bench::new();
    bench.init(&[&AWQ[..], &["--forward-shards", "2"]].concat()).succeeded();
    let mut kills = 0;
    for round in 0..40_usize {
        let before = bench.results().len();
        let mut worker = Running::start(command_that_hangs_up(bench.run_arguments(&[])));
        // Sometimes in the middle of a unit, and sometimes just after one was published.
        let at_most = before + round % 2;
        let delay = std::time::Duration::from_millis(37 * (round as u64 % 7));
        worker.wait_until(|| bench.results().len() > at_most);
        std::thread::sleep(delay);
        if worker.has_ended() {
            worker.wait().succeeded();
            break;
        }
        worker.signal(Signal::KILL);
        assert_ne!(worker.wait().code(), Some(0));
        kills += 1;
    }
    assert!(kills > 1, "workers were killed {kills} times");
    // Their temporary files stay for a minute, in case a worker is just starting.
    let status = || quant(args!["job", "status", bench.at("store"), "--json"]).json();
    assert!(status()["temporary_files"].as_u64().unwrap() > 0);
    let hour = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
    let entries = |path: &Path| std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    for directory in entries(&bench.at("store/tmp")).collect::<Vec<_>>() {
        for path in entries(&directory).chain([directory.clone()]).collect::<Vec<_>>() {
            std::fs::File::open(path).unwrap().set_modified(hour).unwrap();
        }
    }
    let cleaned = bench.run(&[]).succeeded();
    assert!(cleaned.stderr.contains("removed the temporary files of"), "{cleaned}");
    let status = status();
    assert_eq!(status["temporary_files"], 0, "{status}");
    assert_eq!(status["done"], status["total"]);
    assert_eq!(status["other_files"].as_array().unwrap().len(), 0, "{status}");
    bench.merge(&[]).succeeded();
    bench.assert_same(&AWQ);
}

#[test]
fn an_interrupted_worker_can_be_run_again() {
    let bench = Bench::new();
    bench.init(&AWQ).succeeded();
    let mut worker = Running::start(command_that_hangs_up(bench.run_arguments(&[])));
    assert!(worker.wait_until(|| bench.results().len() == 1), "{}", worker.wait());
    worker.signal(Signal::TERM);
    check_message("interrupted", &worker.wait(), 75, &["interrupted", "continue with: ", "job run"]);
    let status = quant(args!["job", "status", bench.at("store"), "--json"]).json();
    assert_eq!(status["temporary_files"], 0, "{status}");
    bench.run(&[]).succeeded();
    bench.merge(&[]).succeeded();
    bench.assert_same(&AWQ);
}

#[test]
fn exit_codes_tell_schedulers_what_to_do() {
    let bench = Bench::new();
    let rtn = ["--method", "rtn"];
    let case = |name: &str, run: &Run, code: i32, expected: &[&str]| check_message(name, run, code, expected);
    case("no job", &bench.run(&[]), 2, &["is not a job", "quant job init"]);
    case(
        "calibrated in order",
        &bench.init(&["--method", "gptq"]),
        2,
        &["--span-blocks", "--layer-inputs float"],
    );
    case("formats", &bench.init(&["--format", "awq", "--format", "gptq"]), 2, &["one format"]);
    case("gguf", &bench.init(&["--format", "gguf", "--scheme", "q4_0"]), 2, &["GGUF", "quant quantize"]);
    case("no effect", &bench.init(&["--method", "rtn", "--forward-shards", "2"]), 2, &["--forward-shards"]);
    assert!(!bench.at("store").exists());
    bench.init(&rtn).succeeded();
    case(
        "other settings",
        &bench.init(&["--method", "rtn", "--scheme", "w8a16"]),
        2,
        &["scheme: was w4a16-g128-sym, is w8a16-g128-sym (21 linears)"],
    );
    for (options, code, expected) in [
        (&["--unit", "blocks/7"][..], 2, "no unit `blocks/7`"),
        (&["--memory-budget", "2MiB"][..], 5, "memory"),
        (&["--model", "/no/such/model"][..], 4, "/no/such/model"),
    ] {
        case("run", &bench.run(options), code, &[expected]);
    }
    for shard in ["2/2", "x/2", "1", "0/0"] {
        assert_eq!(bench.run(&["--shard", shard]).code(), Some(2), "{shard}");
    }
    // As on a machine with an older processor.
    let mut other = command(bench.run_arguments(&[]));
    other.env("QUANT_ISA", "scalar");
    let other = Running::start(other).wait();
    case(
        "another machine",
        &other,
        5,
        &["instruction_set", "create the job and run all units on machines of the same type"],
    );
    // Showing the job computes nothing, so any machine can.
    for subcommand in ["status", "units"] {
        let mut shown = command(args!["job", subcommand, bench.at("store")]);
        shown.env("QUANT_ISA", "scalar");
        Running::start(shown).wait().succeeded();
    }
    let copy = bench.at("copy");
    write_cut_demo_model(&copy, 3);
    bench.run(&["--unit", "blocks/0", "--model", copy.to_str().unwrap()]).succeeded();
    let fewer = bench.at("fewer");
    write_cut_demo_model(&fewer, 2);
    case(
        "another model",
        &bench.run(&["--model", fewer.to_str().unwrap()]),
        2,
        &["different", "config.json: has changed"],
    );
    bench.run(&[]).succeeded();
    let path = bench.results()[0].clone();
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    case("damaged", &bench.merge(&[]), 5, &["hash", "compute it again"]);
    let again = bench.run(&[]).succeeded();
    assert!(again.stdout.starts_with("1 unit computed, 3 existed"), "{again}");
    let merged = bench.merge(&["--resume"]).succeeded();
    assert!(merged.stdout.contains("\nnext, measure the accuracy loss: quant eval "), "{merged}");
    bench.assert_same(&rtn);
    let mut merge = command(args!["merge", bench.at("store"), "-o", bench.at("elsewhere"), "--quiet"]);
    merge.env("QUANT_ISA", "scalar");
    let merged = Running::start(merge).wait().succeeded();
    assert!(merged.stdout.contains("written to ") && !merged.stdout.contains("next, "), "{merged}");
    assert_eq!(hashes(&bench.at("elsewhere")), hashes(&bench.at("out")));
}

/// What the merge would refuse is refused before any unit is computed.
#[test]
fn files_that_a_merge_cannot_copy_are_refused_at_once() {
    let bench = Bench::new();
    std::fs::File::create(bench.model.join("LICENSE.txt")).unwrap().set_len(1100 << 20).unwrap();
    let refused = bench.init(&["--method", "rtn"]);
    check_message("a large file", &refused, 4, &["LICENSE.txt", "1153433600 bytes"]);
    assert!(!bench.at("store").exists());
}

/// A job that cannot be reached may be there.
#[test]
fn a_job_that_cannot_be_reached_is_not_reported_as_missing() {
    let bench = Bench::new();
    std::os::unix::fs::symlink("store", bench.at("store")).unwrap();
    check_message("run", &bench.run(&[]), 5, &["cannot open", "job.json"]);
    check_message("merge", &bench.merge(&[]), 5, &["cannot open", "job.json"]);
}

#[test]
fn deleted_results_are_computed_again() {
    let bench = Bench::new();
    bench.init(&["--method", "rtn"]).succeeded();
    bench.run(&[]).succeeded();
    for folder in ["units", "log"] {
        std::fs::remove_dir_all(bench.at("store").join(folder)).unwrap();
    }
    bench.run(&[]).succeeded();
    bench.merge(&[]).succeeded();
    bench.assert_same(&["--method", "rtn"]);
}

/// The report of a tensor in a unit's file is checked before the tensor is copied, also if the hash of the file matches.
#[test]
fn a_forged_report_is_set_aside() {
    let bench = Bench::new();
    bench.init(&["--method", "rtn"]).succeeded();
    bench.run(&[]).succeeded();
    let forged =
        bench.results().into_iter().find(|path| path.to_str().unwrap().contains("/outside.")).unwrap();
    let mut bytes = std::fs::read(&forged).unwrap();
    let head = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let (text, hash) = (bytes.len() - 32, b"\"tensor\":\"");
    let at = bytes[..text].windows(hash.len()).rposition(|part| part == hash).unwrap() + hash.len();
    bytes[at] ^= 1;
    let digest: [u8; 32] =
        sha2::Digest::finalize(sha2::Digest::chain_update(sha2::Sha256::default(), &bytes[head..text]))
            .into();
    bytes[text..].copy_from_slice(&digest);
    std::fs::write(&forged, bytes).unwrap();
    let refused = bench.merge(&[]);
    check_message("merge", &refused, 5, &["has no valid report of", "job run"]);
    bench.run(&[]).succeeded();
    bench.merge(&[]).succeeded();
    bench.assert_same(&["--method", "rtn"]);
}

/// The program that the tests run has no object stores. A URL is no directory, and its password is not printed.
#[test]
fn urls_need_a_feature() {
    let bench = Bench::new();
    let url = "s3://key:hunter22@bucket/job";
    for arguments in [
        args!["job", "init", &bench.model, "--method", "rtn", "--job", url],
        args!["job", "units", url],
        args!["job", "run", url],
        args!["job", "status", url],
        args!["merge", url, "-o", bench.at("out")],
    ] {
        let mut command = command(arguments);
        command.current_dir(bench.scratch.path());
        let run = Running::start(command).wait();
        check_message("url", &run, 2, &["s3://", "without the feature `store`", "--features store"]);
        assert!(!run.stdout.contains("hunter22") && !run.stderr.contains("hunter22"), "{run}");
    }
    assert!(!bench.at("s3:").exists());
}

#[test]
fn gptq_in_spans() {
    let bench = Bench::new();
    let spans = [&AWQ[..2], &["--seq-len", "128", "--method", "gptq", "--span-blocks", "2"]].concat();
    bench.init(&spans).succeeded();
    bench.run(&["--memory-budget", "200GiB"]).succeeded();
    bench.merge(&[]).succeeded();
    bench.assert_same(&spans);
    let report = std::fs::read_to_string(bench.at("out").join("quant_report.json")).unwrap();
    assert!(report.contains("\"span_blocks\": 2"));
    let no_effect = [&spans[..], &["--layer-inputs", "float"]].concat();
    let mut arguments = args!["quantize", &bench.model, "-o", bench.at("no")];
    arguments.extend(no_effect.iter().map(OsString::from));
    check_message("no effect", &quant(arguments), 2, &["--span-blocks", "has no effect"]);
}

/// A recipe file is part of the job, so it may be gone when workers run.
#[test]
fn a_job_keeps_its_recipe() {
    let bench = Bench::new();
    let recipe = bench.at("recipe.toml");
    std::fs::write(&recipe, "[quantize]\nmethod = \"rtn\"\nscheme = \"w4a16-g64-asym\"\n").unwrap();
    let options = ["--recipe", recipe.to_str().unwrap()];
    bench.init(&options).succeeded();
    let moved = bench.at("moved.toml");
    std::fs::rename(&recipe, &moved).unwrap();
    bench.run(&[]).succeeded();
    bench.merge(&[]).succeeded();
    bench.assert_same(&["--recipe", path(&moved)]);
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}
