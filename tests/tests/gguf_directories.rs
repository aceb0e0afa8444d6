//! A directory of GGUF files as a model: what `--format gguf` writes into a directory, and downloads.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use quant_tests::args;
use quant_tests::models::write_cut_demo_model;
use quant_tests::program::{Run, quant};
use quant_tests::refusal::check_message;
use tempfile::TempDir;

struct Bench {
    scratch: TempDir,
}

impl Bench {
    /// The first block of the demo model.
    fn new() -> Self {
        let bench = Self { scratch: tempfile::tempdir().unwrap() };
        write_cut_demo_model(&bench.at("model"), 1);
        bench
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn quantize(&self, out: &str, options: &[&str]) -> Run {
        let arguments =
            args!["quantize", self.at("model"), "-o", self.at(out), "--format", "gguf", "--scheme", "q8_0"];
        quant(arguments.into_iter().chain(options.iter().map(OsString::from)))
    }

    fn names(&self, directory: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.at(directory)).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name.ends_with(".gguf"));
        names.sort();
        names
    }
}

fn perplexity(model: &Path, options: &[&str]) -> f64 {
    let arguments =
        args!["eval", model, "--text", "builtin-heldout", "--window", "64", "--windows", "2", "--json"];
    let run = quant(arguments.into_iter().chain(options.iter().map(OsString::from)));
    run.json()["perplexity"]["mean"].as_f64().expect("a perplexity")
}

/// Every command accepts the directory, as the printed next step does.
#[test]
fn what_is_written_into_a_directory_is_a_model() {
    let bench = Bench::new();
    bench.quantize("one.gguf", &[]).succeeded();
    let whole = std::fs::metadata(bench.at("one.gguf")).unwrap().len();
    let run = bench.quantize("out", &[]).succeeded();
    let line = run.stdout.lines().find(|line| line.starts_with("next, ")).expect("a next step");
    let (_, command) = line.split_once(": quant ").unwrap();
    quant(command.split_whitespace().chain(["--window", "64", "--windows", "2"])).succeeded();
    let limit = (whole / 3).to_string();
    bench.quantize("parts", &["--split-max-size", &limit]).succeeded();
    assert!(bench.names("parts").len() > 2);
    let expected = perplexity(&bench.at("one.gguf"), &[]);
    let reference = bench.at("parts");
    for name in ["out", "parts"] {
        let model = bench.at(name);
        assert_eq!(perplexity(&model, &["--reference", reference.to_str().unwrap()]), expected, "{name}");
        let inspected = quant(args!["inspect", &model, "--json"]).json();
        assert_eq!(inspected["gguf"]["mixture"], "Q8_0");
        let options = ["--prompt", "Once", "--max-new-tokens", "2"];
        quant(args!["generate", &model].into_iter().chain(options.map(OsString::from))).succeeded();
        quant(args!["bench", &model, "--prefill", "4", "--decode", "2", "--repeat", "1"]).succeeded();
        quant(args!["plan", &model, "--format", "gguf", "--scheme", "f16"]).succeeded();
        let floats = bench.at(&format!("{name} as floats"));
        quant(args!["quantize", &model, "-o", &floats, "--format", "safetensors", "--scheme", "f32"])
            .succeeded();
        assert_eq!(perplexity(&floats, &[]), expected, "{name}");
        let verified = quant(args!["inspect", &model, "--verify", "--json"]).json();
        assert_eq!(verified["verified"]["compared_with"], "quant_manifest.json", "{name}");
    }
    // The output is not within the input, where it would be a second model.
    for output in [bench.at("out"), bench.at("out").join("other.gguf")] {
        let within = args![
            "quantize",
            bench.at("out"),
            "-o",
            output,
            "--format",
            "gguf",
            "--scheme",
            "f16",
            "--force"
        ];
        check_message("within", &quant(within), 2, &["overlaps the input"]);
    }
    // A changed file is found.
    let file = bench.at("out").join("model.gguf");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 100;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let run = quant(args!["inspect", bench.at("out"), "--verify"]);
    check_message("changed", &run, 4, &["model.gguf", "the file is damaged or was changed"]);
}

#[test]
fn several_models_missing_and_renamed_files_are_named() {
    let bench = Bench::new();
    bench.quantize("one.gguf", &[]).succeeded();
    let limit = (std::fs::metadata(bench.at("one.gguf")).unwrap().len() / 3).to_string();
    bench.quantize("parts", &["--split-max-size", &limit]).succeeded();
    let names = bench.names("parts");
    let part = |n: usize| bench.at("parts").join(&names[n]);
    let refused = |model: &Path, code: i32, expected: &[&str]| {
        for command in ["inspect", "plan"] {
            check_message(command, &quant(args![command, model]), code, expected);
        }
    };
    std::fs::copy(bench.at("one.gguf"), bench.at("parts").join("other.gguf")).unwrap();
    let both = format!("contains several GGUF models: {}, other.gguf", names[0]);
    refused(&bench.at("parts"), 2, &[&both, "give the path of one of these files"]);
    std::fs::remove_file(bench.at("parts").join("other.gguf")).unwrap();
    let first = format!("give the first file, {}", part(0).display());
    refused(&part(1), 4, &["is file 2 of a model in", &first]);
    // A first file under another name.
    let renamed = bench.at("parts").join("renamed.gguf");
    std::fs::rename(part(0), &renamed).unwrap();
    let remedy = format!("rename it to {}, as the other files", names[0]);
    refused(&renamed, 4, &["renamed.gguf is the first of", "its name must end in", &remedy]);
    refused(&bench.at("parts"), 4, &["renamed.gguf is the first of", &remedy]);
    refused(&part(1), 4, &["is file 2 of a model in", "whose name contains -00001-of-"]);
    std::fs::rename(&renamed, bench.at("renamed.gguf")).unwrap();
    refused(&bench.at("renamed.gguf"), 4, &["give it the same name as the other files"]);
    refused(&bench.at("parts"), 4, &["contains only some of the", &names[0], "download the missing files"]);
    // Other files are missing.
    std::fs::rename(bench.at("renamed.gguf"), part(0)).unwrap();
    std::fs::remove_file(part(1)).unwrap();
    for model in [bench.at("parts"), part(0)] {
        refused(&model, 4, &["of which others are missing: ", &names[1], "download the missing files"]);
    }
    // With a configuration, the directory is one of Hugging Face.
    std::fs::write(bench.at("parts").join("config.json"), "{}").unwrap();
    refused(
        &bench.at("parts"),
        4,
        &["does not contain a checkpoint", &names[0], "the path of the GGUF file"],
    );
}
