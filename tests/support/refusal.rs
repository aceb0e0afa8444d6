//! The requirements on every run that the program refuses: the right exit code, a helpful message, no output, and
//! existing files unchanged.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::files::snapshot;
use crate::program::{Run, quant};

/// Checks the exit code and message of a refused run.
///
/// # Panics
/// If the run does not meet the requirements.
#[track_caller]
pub fn check_message(case: &str, run: &Run, code: i32, expected: &[&str]) {
    assert_eq!(run.code(), Some(code), "{case}: {run}");
    assert_eq!(run.stdout, "", "{case}: an error must not write to stdout: {run}");
    let at = run.stderr.find("error: ");
    let message = &run.stderr[at.unwrap_or_else(|| panic!("{case}: no error was reported: {run}"))..];
    assert!(message.trim_end().lines().count() >= 2, "{case}: the message has no remedy: {run}");
    assert!(!run.stderr.contains("panicked"), "{case}: {run}");
    for text in expected {
        assert!(message.contains(text), "{case}: does not say `{text}`: {run}");
    }
}

/// Runs `quant quantize MODEL -o OUT` with more options and expects a refusal, twice: without an existing OUT, and with
/// `--force` and an existing one. Neither run may change anything.
///
/// # Panics
/// If a run is not refused, or changes anything.
#[track_caller]
pub fn refuses_to_quantize(case: &str, model: &Path, options: &[&str], code: i32, expected: &[&str]) {
    let scratch = tempfile::tempdir().expect("a directory");
    let out = scratch.path().join("out");
    let run = |force: Option<&str>| {
        let fixed = [OsStr::new("quantize"), model.as_os_str(), OsStr::new("-o"), out.as_os_str()];
        quant(fixed.into_iter().chain(options.iter().copied().chain(force).map(OsStr::new)))
    };
    check_message(case, &run(None), code, expected);
    assert_eq!(snapshot(scratch.path()).len(), 0, "{case}: something was left");

    old_checkpoint(&out);
    let before = snapshot(scratch.path());
    check_message(case, &run(Some("--force")), code, expected);
    assert_eq!(snapshot(scratch.path()), before, "{case}: existing files have changed");
}

/// Writes an existing output that must survive. Its manifest says that this program wrote it, so `--force` would
/// replace it.
///
/// # Panics
/// When it cannot be written.
#[track_caller]
pub fn old_checkpoint(at: &Path) {
    std::fs::create_dir_all(at).expect("a directory");
    let files = [
        ("config.json", "the old configuration"),
        ("model.safetensors", "the old weights"),
        ("old.txt", "something that a new run does not write"),
    ];
    let listed: Vec<_> =
        files.iter().map(|(name, text)| json!({ "name": name, "bytes": text.len() })).collect();
    let manifest = json!({ "files": listed }).to_string();
    for (name, text) in files.into_iter().chain([("quant_manifest.json", manifest.as_str())]) {
        std::fs::write(at.join(name), text).expect("a file");
    }
}

/// The directory in which a run prepares its output.
pub fn job_of(out: &Path) -> PathBuf {
    let mut name = out.file_name().unwrap_or_default().to_owned();
    name.push(".job");
    out.with_file_name(name)
}
