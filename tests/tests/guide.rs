//! The guide's commands are run, page by page, and the messages that it explains are compared with the program's.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use quant_tests::files::copy_files;
use quant_tests::models::write_cut_demo_model;
use quant_tests::program::{Run, Running, command};
use quant_tests::workspace_root;

/// Layers of the built-in model that the commands run on.
const LAYERS: u64 = 2;
/// Windows that evaluations are cut to.
const WINDOWS: &str = "3";

fn page(name: &str) -> String {
    std::fs::read_to_string(workspace_root().join("docs/guide").join(name)).unwrap()
}

/// The commands of a page: those that are run here, and those that are marked `not-run`.
fn commands(text: &str) -> [Vec<&str>; 2] {
    let mut found = [Vec::new(), Vec::new()];
    let mut block = None;
    for line in text.lines() {
        if let Some(info) = line.strip_prefix("```") {
            block = match info {
                "console" => Some(0),
                "console not-run" => Some(1),
                _ => None,
            };
        } else if let (Some(command), Some(block)) = (line.strip_prefix("$ "), block) {
            found[block].push(command);
        }
    }
    found
}

/// The words of a command line, of which some may be quoted.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (i, part) in line.split(['"', '\'']).enumerate() {
        match i % 2 {
            0 => words.extend(part.split_whitespace().map(str::to_owned)),
            _ => words.push(part.to_owned()),
        }
    }
    words
}

fn run_in<A: AsRef<std::ffi::OsStr>>(directory: &Path, arguments: impl IntoIterator<Item = A>) -> Run {
    let mut command = command(arguments);
    command.current_dir(directory);
    Running::start(command).wait()
}

/// Where the placeholders of the pages lie.
fn prepare(scratch: &Path) {
    write_cut_demo_model(&scratch.join("MODEL"), LAYERS);
    std::fs::write(scratch.join("FILE"), "Rain in the morning, and sun in the afternoon. ".repeat(600))
        .unwrap();
    let gate = page("gate.md");
    let (_, policy) = gate.split_once("```toml\n").unwrap();
    std::fs::write(scratch.join("gate.toml"), policy.split("```").next().unwrap()).unwrap();
}

/// Runs the commands of a page in a directory of its own, and gives the files that they left there.
fn run_page(name: &str) -> BTreeSet<String> {
    let scratch = tempfile::tempdir().unwrap();
    prepare(scratch.path());
    let text = page(name);
    let [runs, _] = commands(&text);
    assert!(!runs.is_empty(), "{name} has no commands");
    for line in runs {
        let mut words = words(line);
        assert_eq!(words.remove(0), "quant", "{name}: `{line}`");
        if words[0] == "eval" {
            words.extend(["--windows", WINDOWS].map(str::to_owned));
        }
        let out = run_in(scratch.path(), &words);
        assert_eq!(out.code(), Some(0), "{name}: `{line}`: {out}");
        if line.starts_with("quant demo --save-model") {
            // The whole model is too slow here.
            let saved = scratch.path().join(&words[2]);
            assert!(saved.join("tokenizer.json").is_file());
            std::fs::remove_dir_all(&saved).unwrap();
            copy_files(&scratch.path().join("MODEL"), &saved);
        }
    }
    let left = std::fs::read_dir(scratch.path()).unwrap();
    left.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn the_first_steps() {
    let left = run_page("start.md");
    assert!(["demo-model", "out", "out-rtn", "out-gptq"].iter().all(|name| left.contains(*name)), "{left:?}");
}

#[test]
fn engines() {
    assert!(run_page("engines.md").contains("out-ct"));
}

#[test]
fn llama_cpp() {
    assert!(run_page("llama-cpp.md").contains("imatrix.gguf"));
}

#[test]
fn coming_from_another_quantizer() {
    assert!(run_page("coming-from.md").contains("out-w8a8"));
}

/// These two pages go on from the `OUT` of another.
#[test]
fn evaluation_and_gate() {
    let scratch = tempfile::tempdir().unwrap();
    prepare(scratch.path());
    let out = run_in(scratch.path(), ["quantize", "MODEL", "-o", "OUT", "--method", "rtn"]);
    assert_eq!(out.code(), Some(0), "{out}");
    for name in ["results.md", "gate.md"] {
        for line in &commands(&page(name))[0] {
            let mut words = words(line);
            assert_eq!(words.remove(0), "quant");
            let out = run_in(scratch.path(), &words);
            assert_eq!(out.code(), Some(0), "{name}: `{line}`: {out}");
        }
    }
    assert!(scratch.path().join("baseline.json").is_file());
}

/// Every page is run above, or has no commands but those of other programs; the README lists all.
#[test]
fn no_page_is_forgotten() {
    let readme = std::fs::read_to_string(workspace_root().join("README.md")).unwrap();
    let run: BTreeSet<&str> =
        ["start.md", "engines.md", "llama-cpp.md", "coming-from.md", "results.md", "gate.md"].into();
    for entry in std::fs::read_dir(workspace_root().join("docs/guide")).unwrap() {
        let name = entry.unwrap().file_name().to_string_lossy().into_owned();
        assert!(readme.contains(&format!("(docs/guide/{name})")), "the README does not list {name}");
        let text = page(&name);
        let [ours, others] = commands(&text);
        assert_eq!(run.contains(&*name), !ours.is_empty(), "{name}");
        assert!(others.iter().all(|line| !line.starts_with("quant ")), "{name}: {others:?}");
    }
}

/// All sources below a directory, one after the other.
fn sources(directory: &Path, text: &mut String) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path: PathBuf = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|e| e == "rs") {
            text.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn messages_that_are_explained_exist() {
    let mut source = String::new();
    for directory in ["formats/src", "quant-core/src", "quant-cli/src", "eval/src"] {
        sources(&workspace_root().join(directory), &mut source);
    }
    let text = page("troubleshooting.md");
    let rows: Vec<&str> =
        text.lines().filter(|l| l.starts_with("| ")).filter_map(|l| l.split(" | ").next()).collect();
    let quoted: Vec<&str> = rows.iter().flat_map(|row| row.split('`').skip(1).step_by(2)).collect();
    assert!(quoted.len() >= 8, "{quoted:?}");
    for message in quoted {
        // What stands for a value is left out of the comparison.
        let parts = message.split('…').map(str::trim);
        for part in parts {
            assert!(source.contains(part), "no message contains `{part}`");
        }
    }
}
