//! GGUF files whose run is interrupted: what it has calibrated is kept, and inputs that have changed are found.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use quant_tests::args;
use quant_tests::files::sha256;
use quant_tests::models::{read_safetensors, safetensors, write_cut_demo_model};
use quant_tests::program::{Run, Running, Signal, command, quant};
use quant_tests::refusal::{check_message, job_of};
use serde_json::Value;
use tempfile::TempDir;

const TEXT: [&str; 4] = ["--samples", "16", "--seq-len", "128"];

struct Bench {
    scratch: TempDir,
}

impl Bench {
    fn new() -> Self {
        let bench = Self { scratch: tempfile::tempdir().unwrap() };
        write_cut_demo_model(&bench.at("model"), 3);
        std::fs::write(bench.at("text"), "The kettle was on, and the window was open.\n".repeat(500))
            .unwrap();
        bench
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn arguments(&self, out: &str, options: &[&str]) -> Vec<OsString> {
        let mut arguments = args!["quantize", self.at("model"), "-o", self.at(out), "--format", "gguf"];
        arguments.extend(args!["--calibration", self.at("text")]);
        arguments.extend(TEXT.iter().chain(options).map(Into::into));
        arguments
    }

    fn quantize(&self, out: &str, options: &[&str]) -> Run {
        quant(self.arguments(out, options))
    }

    /// Kills a run whose journal contains a line that begins with `last`, and removes the lines after it, as if the run
    /// had been killed just then. Returns the journal.
    fn killed(&self, out: &str, options: &[&str], last: &str) -> PathBuf {
        let journal = job_of(&self.at(out)).join("journal.jsonl");
        let mut run = Running::start(command(self.arguments(out, options)));
        let begins = |line: &str| line.starts_with(last) && line.ends_with('\n');
        if !run.wait_until(|| read(&journal).split_inclusive('\n').any(begins)) {
            panic!("ended before {last}: {}", run.wait());
        }
        run.signal(Signal::KILL);
        assert_eq!(run.wait().code(), None);
        let text = read(&journal);
        let lines: Vec<&str> = text.split_inclusive('\n').collect();
        let kept = lines.iter().position(|line| begins(line)).unwrap() + 1;
        std::fs::write(&journal, lines[..kept].concat()).unwrap();
        journal
    }

    fn resume(&self, out: &str, options: &[&str]) -> Run {
        self.quantize(out, &[options, &["--resume"]].concat())
    }

    fn digest(&self, file: &str) -> String {
        sha256(&std::fs::read(self.at(file)).unwrap())
    }
}

/// A line of the journal without its hash.
fn unsealed(line: &str) -> String {
    let (text, _) = line.rsplit_once(",\"check\":").unwrap();
    format!("{text}}}")
}

fn sealed(line: &str) -> String {
    let text = line.strip_suffix('}').unwrap();
    format!("{text},\"check\":\"{}\"}}\n", &sha256(text.as_bytes())[..16])
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// The codes of a finished tensor depend on the text and on all weights of its block, also on those that are written
/// later.
#[test]
fn gptq_is_not_resumed_with_other_inputs() {
    let bench = Bench::new();
    let matrix = bench.at("matrix.gguf");
    let matrix = matrix.to_str().unwrap();
    bench.quantize("plain.gguf", &["--save-imatrix", matrix]).succeeded();
    // With a matrix from a file, only the Hessians depend on the text and on other weights.
    let gptq = ["--method", "gptq", "--imatrix", matrix];
    bench.quantize("whole.gguf", &gptq).succeeded();
    bench.killed("out.gguf", &gptq, r#"{"tensor":"blk.1.attn_q.weight""#);

    let refused = |path: &Path, changed: &[u8], expected: &str| {
        let before = std::fs::read(path).unwrap();
        assert_ne!(before, changed);
        std::fs::write(path, changed).unwrap();
        check_message(expected, &bench.resume("out.gguf", &gptq), 2, &[expected, " to start over"]);
        assert!(!bench.at("out.gguf").exists(), "{expected}");
        std::fs::write(path, before).unwrap();
    };
    let text = bench.at("text");
    refused(&text, &std::fs::read(&text).unwrap().to_ascii_uppercase(), "calibration text: has changed");
    let weights = bench.at("model/model.safetensors");
    for name in [
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.embed_tokens.weight",
    ] {
        let mut tensors = read_safetensors(&weights);
        tensors.iter_mut().find(|tensor| tensor.name == name).unwrap().data[0] ^= 1;
        let expected = if name.contains("layers.0") { "changed since" } else { name };
        refused(&weights, &safetensors(&tensors), expected);
    }
    for options in [&["--seed", "7"][..], &["--damping", "0.5"]] {
        let run = bench.resume("out.gguf", &[&gptq, options].concat());
        check_message("settings", &run, 2, &["different inputs or settings", "was 0"]);
    }
    let run = bench.resume("out.gguf", &gptq).succeeded();
    assert!(run.stderr.contains("resumed: "), "{run}");
    assert_eq!(bench.digest("out.gguf"), bench.digest("whole.gguf"));
}

/// The journal is changed to show that its records are used.
#[test]
fn calibration_is_not_repeated() {
    let bench = Bench::new();
    let matrices = ["matrix.gguf", "again.gguf"].map(|name| bench.at(name).to_str().unwrap().to_owned());
    let with = |matrix: &str| ["--method", "awq-gptq", "--save-imatrix", matrix].map(str::to_owned);
    let [whole, again] = matrices.each_ref().map(|matrix| with(matrix));
    let whole: Vec<&str> = whole.iter().map(String::as_str).collect();
    let again: Vec<&str> = again.iter().map(String::as_str).collect();
    bench.quantize("whole", &whole).succeeded();

    // Killed in the search.
    let searched = r#"{"record":"rewrite of block 1""#;
    bench.killed("out", &whole, searched);
    bench.resume("out", &whole).succeeded();
    assert_eq!(bench.digest("out/model.gguf"), bench.digest("whole/model.gguf"));
    assert_eq!(bench.digest("out/quant_report.json"), bench.digest("whole/quant_report.json"));

    // Killed while tensors are written.
    std::fs::remove_dir_all(bench.at("out")).unwrap();
    bench.killed("out", &whole, r#"{"tensor":"blk.1.attn_q.weight""#);
    bench.resume("out", &whole).succeeded();
    assert_eq!(bench.digest("out/model.gguf"), bench.digest("whole/model.gguf"));

    std::fs::remove_dir_all(bench.at("out")).unwrap();
    let journal = bench.killed("out", &again, searched);
    let text = read(&journal);
    let exchanged = text.lines().map(|line| {
        let line = unsealed(line);
        let [first, second] = [0, 1].map(|layer| format!("\"importance of blk.{layer}.attn_q.weight\""));
        let line = line.replace(&first, "\"-\"").replace(&second, &first).replace("\"-\"", &second);
        if !line.starts_with(r#"{"record":"rewrite of block 0""#) {
            return line;
        }
        let mut record: Value = serde_json::from_str(&line).unwrap();
        record["value"]["folds"][0]["tokens"] = 12345.into();
        record.to_string()
    });
    let exchanged = exchanged.map(|line| sealed(&line)).collect::<String>();
    std::fs::write(&journal, exchanged).unwrap();
    bench.resume("out", &again).succeeded();
    let report: Value = serde_json::from_str(&read(&bench.at("out/quant_report.json"))).unwrap();
    assert_eq!(report["folds"][0]["tokens"], 12345);
    assert_ne!(report["folds"][1]["tokens"], 12345);
    assert_ne!(bench.digest("again.gguf"), bench.digest("matrix.gguf"), "the matrix was gathered again");
}

/// A matrix of an interrupted run is not used for other weights. It is gathered again if its record is damaged.
#[test]
fn an_importance_matrix_belongs_to_its_weights() {
    let bench = Bench::new();
    let options = ["--scheme", "q4_k_m"];
    bench.quantize("whole.gguf", &options).succeeded();
    let journal = bench.killed("out.gguf", &options, r#"{"tensor":"token_embd.weight""#);
    let weights = bench.at("model/model.safetensors");
    let before = std::fs::read(&weights).unwrap();
    let mut tensors = read_safetensors(&weights);
    let name = "model.layers.2.self_attn.o_proj.weight";
    tensors.iter_mut().find(|tensor| tensor.name == name).unwrap().data[0] ^= 1;
    std::fs::write(&weights, safetensors(&tensors)).unwrap();
    check_message(
        "weights",
        &bench.resume("out.gguf", &options),
        2,
        &[name, "remove the directory next to the output"],
    );
    std::fs::write(&weights, before).unwrap();

    let text = read(&journal);
    let at = text.find("importance of blk.1.").unwrap();
    let at = at + text[at..].find("\"values\":\"").unwrap() + 12;
    let other = if text.as_bytes()[at] == b'0' { "1" } else { "0" };
    let edited = [&text[..at], other, &text[at + 1..]].concat();
    std::fs::write(&journal, edited.lines().map(|line| sealed(&unsealed(line))).collect::<String>()).unwrap();
    // A different request must not discard the matrix; the same one continues by itself.
    let ways = ["different inputs or settings", "settings of the interrupted run", "run with --force"];
    check_message("a different run", &bench.quantize("out.gguf", &["--scheme", "q4_k_s"]), 2, &ways);
    let run = bench.quantize("out.gguf", &options).succeeded();
    assert!(run.stderr.contains("note: resumed: "), "{run}");
    assert_eq!(bench.digest("out.gguf"), bench.digest("whole.gguf"));
}
