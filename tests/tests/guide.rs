//! Runs the guide's commands page by page, and compares the messages that it explains with the program's.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use quant_tests::files::copy_files;
use quant_tests::models::write_cut_demo_model;
use quant_tests::program::{Run, Running, command};
use quant_tests::workspace_root;

#[allow(dead_code, reason = "its `main` is not run here")]
#[path = "../../formats/examples/packed_linear.rs"]
mod packed_linear;

const LAYERS: u64 = 2;
const WINDOWS: &str = "3";
/// Pages whose Python code is run by `python/tests` or by `tests/interop/check_fewbits.py`.
const PYTHON: [&str; 4] = ["engines.md", "lm-eval.md", "python.md", "transformers.md"];

fn page(name: &str) -> String {
    std::fs::read_to_string(workspace_root().join("docs/guide").join(name)).unwrap()
}

/// The commands of a page: those to run here, and those marked `not-run`.
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

/// The words of a command line, some of which may be quoted.
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

fn prepare(scratch: &Path) {
    write_cut_demo_model(&scratch.join("MODEL"), LAYERS);
    std::fs::write(scratch.join("FILE"), "Rain in the morning, and sun in the afternoon. ".repeat(600))
        .unwrap();
    let gate = page("gate.md");
    std::fs::write(scratch.join("gate.toml"), block(&gate, "toml")).unwrap();
    let chats = page("chats.md");
    std::fs::write(scratch.join("chats.jsonl"), block(&chats, "jsonl")).unwrap();
    let template = "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}\
                    {% if add_generation_prompt %}<|assistant|>{% endif %}";
    std::fs::write(scratch.join("MODEL/chat_template.jinja"), template).unwrap();
    let chat = serde_json::json!({ "messages": [
        { "role": "user", "content": "How far is the mill?" },
        { "role": "assistant", "content": "A mile, along the river, as far as anybody knows. ".repeat(3) },
    ] });
    std::fs::write(scratch.join("held-out.jsonl"), format!("{chat}\n").repeat(20)).unwrap();
}

fn block<'a>(text: &'a str, language: &str) -> &'a str {
    let (_, after) = text.split_once(&format!("```{language}\n")).unwrap();
    after.split("```").next().unwrap()
}

/// Runs the commands of a page in a new directory, and returns the files that they leave there.
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
fn little_memory() {
    assert!(run_page("memory.md").contains("OUT"));
}

#[test]
fn several_machines() {
    let left = run_page("jobs.md");
    assert!(["OUT-rtn", "OUT-awq", "OUT-gptq"].iter().all(|name| left.contains(*name)), "{left:?}");
}

#[test]
fn own_chats() {
    assert!(run_page("chats.md").contains("OUT-default"));
}

#[test]
fn coming_from_another_quantizer() {
    assert!(run_page("coming-from.md").contains("out-w8a8"));
}

/// These pages continue with the `OUT` of a different page.
#[test]
fn evaluation_gate_and_kernels() {
    let scratch = tempfile::tempdir().unwrap();
    prepare(scratch.path());
    let out = run_in(scratch.path(), ["quantize", "MODEL", "-o", "OUT", "--method", "rtn"]);
    assert_eq!(out.code(), Some(0), "{out}");
    for name in ["results.md", "gate.md", "kernels.md"] {
        for line in &commands(&page(name))[0] {
            let mut words = words(line);
            assert_eq!(words.remove(0), "quant");
            let out = run_in(scratch.path(), &words);
            assert_eq!(out.code(), Some(0), "{name}: `{line}`: {out}");
        }
    }
    assert!(scratch.path().join("baseline.json").is_file());

    // The page's Rust code, from the checkpoint to a product, compared with the weights that the reader returns.
    let out = scratch.path().join("OUT");
    let (module, shape) = ("model.layers.1.mlp.down_proj", [256, 768]);
    let linear = packed_linear::load(&out, module).unwrap();
    let x: Vec<f32> = (0..2 * shape[1]).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let product = packed_linear::multiply(&linear, &x).unwrap();
    let mut weights = vec![0.0; shape[0] * shape[1]];
    linear.view().dequantize_rows(0..shape[0], &mut weights).unwrap();
    assert_eq!(product.len(), 2 * shape[0]);
    for (i, &found) in product.iter().enumerate() {
        let (row, column) = (i / shape[0], i % shape[0]);
        let [x, w] = [&x[row * shape[1]..][..shape[1]], &weights[column * shape[1]..][..shape[1]]];
        let (mut sum, mut size) = (0.0, 0.0);
        for (x, w) in x.iter().zip(w) {
            sum += f64::from(x * w);
            size += f64::from((x * w).abs());
        }
        assert!((f64::from(found) - sum).abs() <= 1e-5 * size.max(1e-3), "{i}: {found} for {sum}");
    }
    assert!(packed_linear::load(&out, "lm_head").is_err());
}

#[test]
fn programs_are_those_of_the_examples() {
    let read = |path: &str| std::fs::read_to_string(workspace_root().join(path)).unwrap();
    let text = page("kernels.md");
    assert!(read("formats/examples/packed_linear.rs").contains(block(&text, "rust").trim()));
    assert_eq!(block(&text, "c"), read("kernels-c/examples/hello.c"));
}

/// Every page is either run above or has only commands of other programs; the README lists all pages.
#[test]
fn no_page_is_forgotten() {
    let readme = std::fs::read_to_string(workspace_root().join("README.md")).unwrap();
    let run: BTreeSet<&str> = [
        "start.md",
        "engines.md",
        "llama-cpp.md",
        "memory.md",
        "jobs.md",
        "chats.md",
        "coming-from.md",
        "results.md",
        "gate.md",
        "kernels.md",
    ]
    .into();
    let mut not_run = String::new();
    let entries = std::fs::read_dir(workspace_root().join("docs/guide")).unwrap();
    let names: BTreeSet<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    for name in names {
        assert!(readme.contains(&format!("(docs/guide/{name})")), "the README does not list {name}");
        let text = page(&name);
        let [ours, others] = commands(&text);
        assert_eq!(run.contains(&*name), !ours.is_empty(), "{name}");
        assert!(others.iter().all(|line| !line.starts_with("quant ")), "{name}: {others:?}");
        // Python code is listed by its first line. The tests of the package run the rest.
        assert!(
            !text.contains("```python\n") || PYTHON.contains(&&*name),
            "no test runs the Python code of {name}"
        );
        let python = text.split("```python not-run\n").skip(1).filter_map(|block| block.lines().next());
        for line in others.into_iter().chain(python) {
            not_run.push_str(&format!("| [{name}]({name}) | `{line}` |\n"));
        }
    }
    let listed = page("tested.md");
    assert!(listed.contains(&not_run), "docs/guide/tested.md should list\n{not_run}");
}

fn sources(directory: &Path, text: &mut String) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path: PathBuf = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|e| e == "rs" || e == "py") {
            text.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn messages_that_are_explained_exist() {
    let mut source = String::new();
    for directory in ["formats/src", "quant-core/src", "quant-cli/src", "eval/src", "python/fewbits"] {
        sources(&workspace_root().join(directory), &mut source);
    }
    let text = page("troubleshooting.md");
    let rows: Vec<&str> =
        text.lines().filter(|l| l.starts_with("| ")).filter_map(|l| l.split(" | ").next()).collect();
    let quoted: Vec<&str> = rows.iter().flat_map(|row| row.split('`').skip(1).step_by(2)).collect();
    assert!(quoted.len() >= 8, "{quoted:?}");
    for message in quoted {
        let parts = message.split('…').map(str::trim);
        for part in parts {
            assert!(source.contains(part), "no message contains `{part}`");
        }
    }
}
