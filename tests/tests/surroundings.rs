//! What surrounds a run, such as permissions, locale and terminal, changes no byte of the output, or is reported.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use quant_tests::files::{hashes, snapshot};
use quant_tests::models::TinyLlama;
use quant_tests::program::{Run, Running, SmallDisk, can_mount, command, isa_values, program, quant};
use quant_tests::refusal::{check_message, job_of, refuses_to_quantize};
use quant_tests::{args, skip};
use tempfile::TempDir;

const RTN: [&str; 4] = ["--method", "rtn", "--scheme", "w4a16-g32"];
const AWQ: [&str; 6] = ["--scheme", "w4a16-g32", "--samples", "2", "--seq-len", "64"];

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
}

fn quantize(model: &Path, out: &Path, options: &[&str]) -> Vec<OsString> {
    let mut arguments = args!["quantize", model, "-o", out];
    arguments.extend(options.iter().map(OsString::from));
    arguments
}

/// Runs the program through another one, such as a shell, that gets the program and its arguments as last arguments.
fn through(launcher: &[&str], arguments: &[OsString], environment: &[(&str, &str)]) -> Run {
    let (first, rest) = launcher.split_first().unwrap();
    let mut outer = Command::new(first);
    outer.args(rest).arg(program()).args(arguments);
    outer.stdin(Stdio::null());
    outer.env_remove("QUANT_LOG").env("RUST_BACKTRACE", "0").env("HF_HUB_OFFLINE", "1");
    outer.envs(environment.iter().copied());
    Running::start(outer).wait()
}

/// Terminals interpret escape sequences; files and the readers of pipes do not.
#[test]
fn a_log_in_a_file_has_no_colors() {
    let bench = Bench::new();
    let run = through(
        &["env"],
        &quantize(
            &bench.at("model"),
            &bench.at("out"),
            &["--method", "gptq", "--group-size", "32", "--samples", "2", "--seq-len", "64"],
        ),
        &[("QUANT_LOG", "debug")],
    );
    run.clone().succeeded();
    assert!(run.stderr.contains("DEBUG") && !run.stderr.contains('\x1b'), "{run}");
}

/// An output that is the input under a different mount is recognized.
#[test]
fn an_output_in_a_bind_mount_of_the_input() {
    if !can_mount() {
        return skip("no file system can be mounted here");
    }
    let bench = Bench::new();
    let (model, alias) = (bench.at("model"), bench.at("alias"));
    std::fs::create_dir(&alias).unwrap();
    let before = snapshot(bench.scratch.path());
    let mount = format!("mount --bind '{}' '{}' && exec \"$@\"", model.display(), alias.display());
    let launcher = ["unshare", "--mount", "sh", "-c", &mount, "sh"];
    for (input, output) in [
        (model.clone(), alias.clone()),
        (model.clone(), alias.join("out")),
        (alias.clone(), model.clone()),
        (alias.clone(), model.join("out")),
    ] {
        for force in [None, Some("--force")] {
            let options: Vec<&str> = RTN.into_iter().chain(force).collect();
            let run = through(&launcher, &quantize(&input, &output, &options), &[]);
            check_message(&output.display().to_string(), &run, 2, &["overlaps the input"]);
            assert_eq!(snapshot(bench.scratch.path()), before);
        }
    }
}

/// Nothing can be written to a file system that is mounted read-only.
#[test]
fn a_file_system_without_writing() {
    if !can_mount() {
        return skip("no file system can be mounted here");
    }
    let bench = Bench::new();
    let point = bench.at("disk");
    std::fs::create_dir(&point).unwrap();
    let disk = SmallDisk::mount(&point, 1 << 20).expect("mounting worked before");
    let remount = Command::new("mount").args(["-o", "remount,ro"]).arg(disk.path()).status().unwrap();
    assert!(remount.success());
    for out in ["out", "more/out"] {
        let run = quant(quantize(&bench.at("model"), &disk.path().join(out), &RTN));
        check_message(out, &run, 5, &["disk", "Read-only file system"]);
    }
    let json = format!("--json={}", disk.path().join("result.json").display());
    let run = quant(args!["inspect", bench.at("model"), json]);
    check_message("a result", &run, 5, &["result.json", "Read-only file system"]);
    assert_eq!(snapshot(disk.path()).len(), 0);
}

/// A file whose content cannot be read: Linux answers every read of this one with an input/output error.
#[test]
fn reads_that_fail() {
    let bench = Bench::new();
    let unreadable = "/proc/self/mem";
    if std::fs::read(unreadable).is_ok() || !Path::new(unreadable).is_file() {
        return skip("no file here gives an input/output error");
    }
    let expected = ["cannot read /proc/self/mem", "Input/output error"];
    let options = [&AWQ[..], &["--calibration", unreadable]].concat();
    refuses_to_quantize("calibration", &bench.at("model"), &options, 5, &expected);
    let run = quant(args!["eval", bench.at("model"), "--text", unreadable, "--window", "64"]);
    check_message("eval", &run, 5, &expected);
}

/// Files and directories without permission, for a user that has no privileges.
#[test]
fn permissions_that_are_missing() {
    let bench = Bench::new();
    let mode = |path: &Path, mode: u32| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(bench.scratch.path(), 0o755);
    mode(&bench.at("model"), 0o755);
    let unprivileged = ["setpriv", "--reuid=64321", "--regid=64321", "--clear-groups"];
    let inspect = args!["inspect", bench.at("model")];
    if through(&unprivileged, &inspect, &[]).code() != Some(0) {
        return skip("another user cannot run the program here");
    }
    let out = bench.at("out");
    let run = through(&unprivileged, &quantize(&bench.at("model"), &out, &RTN), &[]);
    check_message("an output", &run, 5, &["out.job", "Permission denied"]);
    assert!(!out.exists() && !job_of(&out).exists());
    for file in ["model.safetensors", "config.json"] {
        mode(&bench.at("model").join(file), 0o000);
        check_message(file, &through(&unprivileged, &inspect, &[]), 5, &[file, "Permission denied"]);
        mode(&bench.at("model").join(file), 0o644);
    }
}

type Case<'a> = (&'a str, u32, &'a [(&'a str, &'a str)]);

#[test]
fn umask_time_zone_and_locale() {
    let bench = Bench::new();
    let expected = bench.at("expected");
    quant(quantize(&bench.at("model"), &expected, &AWQ)).succeeded();
    let cases: [Case<'_>; 4] = [
        // Threads with stacks of this size would overflow them.
        ("000", 0o000, &[("TZ", "Pacific/Kiritimati"), ("RUST_MIN_STACK", "20000")]),
        ("022", 0o022, &[("TZ", "not a time zone"), ("LC_ALL", "C")]),
        ("027", 0o027, &[("LC_ALL", "de_DE.UTF-8"), ("LC_NUMERIC", "de_DE.UTF-8")]),
        ("077", 0o077, &[("LANG", "tr_TR.UTF-8"), ("LC_CTYPE", "tr_TR.UTF-8")]),
    ];
    for (name, umask, environment) in cases {
        let out = bench.at(name);
        let shell = ["sh", "-c", &format!("umask {name} && exec \"$@\""), "sh"];
        through(&shell, &quantize(&bench.at("model"), &out, &AWQ), environment).succeeded();
        assert_eq!(hashes(&out), hashes(&expected), "{name}");
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&out), 0o777 & !umask, "{name}");
        for file in hashes(&out).keys() {
            assert_eq!(mode(&out.join(file)), 0o666 & !umask, "{name}: {file}");
        }
    }
}

#[test]
fn instruction_sets_change_no_byte() {
    let bench = Bench::new();
    for scheme in ["w4a16-g32", "w3a16-g32-asym", "w8a8-channel", "nvfp4", "wf8a16-channel"] {
        let options = ["--method", "rtn", "--scheme", scheme];
        let mut first = None;
        for isa in isa_values().chain(["scalar"]) {
            let out = bench.at(&format!("{scheme}-{isa}"));
            let mut command = command(quantize(&bench.at("model"), &out, &options));
            command.env("QUANT_ISA", isa);
            Running::start(command).wait().succeeded();
            let found = hashes(&out);
            assert_eq!(first.get_or_insert_with(|| found.clone()), &found, "{scheme} with {isa}");
        }
    }
}

#[test]
fn terminals() {
    const ESCAPE: char = '\u{1b}';
    let bench = Bench::new();
    let nowhere = bench.at("nowhere");
    let inspect = args!["inspect", &nowhere];
    // Not a terminal, whatever it is called.
    for terminal in ["xterm", "dumb", ""] {
        let run = through(&["env"], &inspect, &[("TERM", terminal), ("COLUMNS", "20")]);
        check_message(terminal, &run, 4, &["nowhere", "does not exist"]);
        let done = through(
            &["env"],
            &quantize(&bench.at("model"), &bench.at("out"), &[&RTN[..], &["--force"]].concat()),
            &[("TERM", terminal), ("COLUMNS", "20")],
        );
        let done = done.succeeded();
        assert!(!(run.stderr + &done.stdout + &done.stderr).contains(ESCAPE), "{terminal}");
    }

    // `script` runs a command on a terminal and prints what that shows.
    let on_terminal = |terminal: &str, no_color: bool, arguments: &[OsString]| {
        let mut script = Command::new("script");
        let words: Vec<String> = [program().as_os_str().to_owned()]
            .iter()
            .chain(arguments)
            .map(|word| format!("'{}'", word.to_string_lossy()))
            .collect();
        script.arg("-qec").arg(format!("stty cols 20 && exec {}", words.join(" "))).arg("/dev/null");
        script.env("TERM", terminal).env("HF_HUB_OFFLINE", "1").env("RUST_BACKTRACE", "0");
        script.env_remove("QUANT_LOG").env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE").env_remove("CI");
        if no_color {
            script.env("NO_COLOR", "1");
        }
        script.stdin(Stdio::null());
        Running::start(script).wait()
    };
    let probe = Command::new("script").args(["-qec", "stty cols 20", "/dev/null"]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        return skip("`script` cannot open a terminal here");
    }
    for (terminal, no_color, colored) in
        [("xterm", false, true), ("xterm", true, false), ("dumb", false, false)]
    {
        let run = on_terminal(terminal, no_color, &inspect);
        assert_eq!(run.code(), Some(4), "{run}");
        assert!(run.stdout.contains("nowhere does not exist"), "{run}");
        assert_eq!(run.stdout.contains(ESCAPE), colored, "{terminal}, NO_COLOR {no_color}: {run}");
        let options = [&RTN[..], &["--force"]].concat();
        let run = on_terminal(terminal, no_color, &quantize(&bench.at("model"), &bench.at("out"), &options));
        let run = run.succeeded();
        assert!(run.stdout.contains(&format!("written to {}", bench.at("out").display())), "{run}");
        assert!(terminal != "dumb" || !run.stdout.contains(ESCAPE), "{run}");
    }
}
