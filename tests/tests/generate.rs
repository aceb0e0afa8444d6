//! `quant generate` and `quant chat`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use quant_tests::args;
use quant_tests::models::{TinyLlama, edit_config};
use quant_tests::program::{Run, Running, command, quant};
use quant_tests::refusal::check_message;
use serde_json::{Value, json};
use tempfile::TempDir;

const TEMPLATE: &str = "\
{%- for message in messages -%}{{- '<' + message['role'][0] + '>' + message['content'] + '|' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<a>' -}}{%- endif -%}";

struct Bench {
    scratch: TempDir,
}

impl Bench {
    fn new() -> Self {
        let bench = Self { scratch: tempfile::tempdir().unwrap() };
        TinyLlama { vocab: 256, ..TinyLlama::default() }.write(&bench.model());
        bench
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn model(&self) -> PathBuf {
        self.at("model")
    }

    fn configure(&self, settings: &Value) {
        std::fs::write(self.at("model/generation_config.json"), settings.to_string()).unwrap();
    }

    fn generate(&self, options: &[&str]) -> Run {
        let arguments = args!["generate", self.model(), "--prompt", "Once"];
        quant(arguments.into_iter().chain(options.iter().map(Into::into)))
    }

    fn report(&self, options: &[&str]) -> Value {
        self.generate(&[options, &["--json"]].concat()).json()
    }

    /// The program with `input` as its standard input.
    fn with_input(&self, arguments: &[&str], input: &[u8]) -> Run {
        let [subcommand, options @ ..] = arguments else { panic!("no subcommand") };
        let mut command = command(args![*subcommand, self.model()]);
        let path = self.at("input");
        std::fs::File::create(&path).unwrap().write_all(input).unwrap();
        command.args(options).stdin(Stdio::from(std::fs::File::open(&path).unwrap()));
        Running::start(command).wait()
    }
}

fn ids(report: &Value) -> Vec<u64> {
    report["tokens"].as_array().unwrap().iter().map(|token| token["id"].as_u64().unwrap()).collect()
}

fn logprobs(report: &Value, name: &str) -> Vec<f64> {
    report["tokens"].as_array().unwrap().iter().map(|token| token[name].as_f64().unwrap()).collect()
}

#[test]
fn greedy_text_is_that_of_the_definition() {
    let bench = Bench::new();
    let greedy = bench.report(&["--max-new-tokens", "24", "--ignore-eos"]);
    assert_eq!(ids(&greedy).len(), 24);
    assert_eq!(greedy["end"], "length");
    assert_eq!(greedy["prompt_tokens"], json!([79, 110, 99, 101]));
    assert!(logprobs(&greedy, "sampling_logprob").iter().all(|p| *p == 0.0));
    assert!(logprobs(&greedy, "logprob").iter().all(|p| *p <= 0.0 && *p >= -(256.0_f64).ln()));
    let one = bench.report(&["--max-new-tokens", "24", "--ignore-eos", "--threads", "1"]);
    assert_eq!(one["tokens"], greedy["tokens"]);
    let run = bench.generate(&["--max-new-tokens", "24", "--ignore-eos"]).succeeded();
    assert_eq!(run.stdout.trim_end_matches('\n'), greedy["text"].as_str().unwrap().trim_end_matches('\n'));
    assert!(run.stderr.contains("4 prompt tokens") && run.stderr.contains("24 new tokens"), "{}", run.stderr);
}

/// Decoding from the cache gives the same results as reading the prompt.
#[test]
fn what_was_written_is_continued_the_same() {
    let bench = Bench::new();
    bench.configure(&json!({ "suppress_tokens": (128..256).collect::<Vec<_>>() }));
    let whole = ids(&bench.report(&["--max-new-tokens", "24"]));
    let half: String = whole[..12].iter().map(|id| char::from(*id as u8)).collect();
    let options = args!["--prompt", format!("Once{half}"), "--max-new-tokens", "12", "--json"];
    let rest = quant(args!["generate", bench.model()].into_iter().chain(options)).json();
    assert_eq!(ids(&rest), whole[12..]);
}

#[test]
fn a_seed_gives_the_same_text() {
    let bench = Bench::new();
    let drawn = |seed: &str, threads: &str| {
        bench.report(&[
            "--max-new-tokens",
            "40",
            "--ignore-eos",
            "--top-k",
            "0",
            "--seed",
            seed,
            "--threads",
            threads,
        ])
    };
    let first = drawn("7", "1");
    assert_eq!(first["tokens"], drawn("7", "2")["tokens"]);
    assert_ne!(ids(&first), ids(&drawn("8", "2")));
    // Without settings that change it, tokens are sampled from the model's own distribution.
    for (own, drawn) in logprobs(&first, "logprob").iter().zip(logprobs(&first, "sampling_logprob")) {
        assert!((own - drawn).abs() < 1e-9, "{own} and {drawn}");
    }
    assert_eq!(
        ids(&bench.report(&["--temperature", "0", "--ignore-eos"])),
        ids(&bench.report(&["--greedy", "--ignore-eos"]))
    );
}

#[test]
fn settings_come_from_the_model_and_the_command_line() {
    let bench = Bench::new();
    let greedy = ids(&bench.report(&["--max-new-tokens", "8", "--ignore-eos"]));
    // The third token is made the end token, so the text ends at its first occurrence.
    let at = greedy.iter().position(|id| *id == greedy[2]).unwrap();
    bench.configure(&json!({ "eos_token_id": [greedy[2], 255], "max_new_tokens": 5 }));
    let report = bench.report(&[]);
    assert_eq!((ids(&report), report["end"].as_str()), (greedy[..at].to_vec(), Some("eos")));
    let longer = bench.report(&["--ignore-eos"]);
    assert_eq!((ids(&longer), longer["end"].as_str()), (greedy[..5].to_vec(), Some("length")));
    bench.configure(&json!({ "do_sample": true, "temperature": 0.7, "top_p": 0.9, "num_beams": 4 }));
    let run = bench.generate(&["--json", "--max-new-tokens", "3"]).succeeded();
    assert!(run.stderr.contains("`num_beams` is not supported"), "{}", run.stderr);
    let settings = run.json()["settings"].clone();
    assert_eq!((&settings["do_sample"], &settings["top_k"]), (&json!(true), &json!(50)));
    let settings = bench.report(&["--greedy", "--max-new-tokens", "3"])["settings"].clone();
    assert_eq!(settings["do_sample"], false);
    std::fs::remove_file(bench.at("model/generation_config.json")).unwrap();
    edit_config(&bench.model(), &json!({ "eos_token_id": greedy[0] }));
    let report = bench.report(&[]);
    assert_eq!((ids(&report).len(), report["end"].as_str()), (0, Some("eos")));
}

#[test]
fn a_stop_string_ends_the_text_and_is_not_shown() {
    let bench = Bench::new();
    let whole =
        bench.report(&["--max-new-tokens", "16", "--ignore-eos"])["text"].as_str().unwrap().to_owned();
    let characters: Vec<char> = whole.chars().collect();
    let stop: String = characters[3..5].iter().collect();
    let report = bench.report(&["--max-new-tokens", "16", "--ignore-eos", "--stop", &stop]);
    let expected = &whole[..whole.find(&stop).unwrap()];
    assert_eq!((report["text"].as_str(), report["end"].as_str()), (Some(expected), Some("stop")));
}

#[test]
fn quantized_models_and_caches_write() {
    let bench = Bench::new();
    let out = bench.at("out");
    quant(args!["quantize", bench.model(), "-o", &out, "--method", "rtn", "--scheme", "w8a16-channel"])
        .succeeded();
    let of = |model: &Path, kv: &str| {
        let options =
            args!["--prompt", "Once", "--max-new-tokens", "6", "--ignore-eos", "--kv", kv, "--json"];
        quant(args!["generate", model].into_iter().chain(options)).json()
    };
    let float = of(&bench.model(), "16");
    for (model, kv) in [(out.as_path(), "16"), (out.as_path(), "8"), (bench.model().as_path(), "8")] {
        let quantized = of(model, kv);
        let (a, b) = (logprobs(&float, "logprob")[0], logprobs(&quantized, "logprob")[0]);
        assert!((a - b).abs() < 0.1, "{kv}: {a} and {b}");
        assert_eq!(ids(&quantized).len(), 6);
    }
}

#[test]
fn prompts_come_from_files_and_standard_input() {
    let bench = Bench::new();
    let expected = bench.report(&["--max-new-tokens", "4"])["tokens"].clone();
    std::fs::write(bench.at("prompt"), "Once\r\n").unwrap();
    let file = bench.at("prompt");
    let options = args!["--prompt-file", file, "--max-new-tokens", "4", "--json"];
    let report = quant(args!["generate", bench.model()].into_iter().chain(options)).json();
    assert_eq!(report["tokens"], expected);
    let options = ["generate", "--max-new-tokens", "4", "--json"];
    assert_eq!(bench.with_input(&options, b"Once\n").json()["tokens"], expected);
    let run = bench.with_input(&options, b"\xff");
    check_message("not text", &run, 4, &["standard input", "not UTF-8 at byte 0"]);
    let nothing = quant(args!["generate", bench.model(), "--prompt", ""]);
    check_message("nothing", &nothing, 2, &["the prompt is empty"]);
    for options in [&["generate"][..], &["generate", "--prompt-file", "-"], &["generate", "--json"]] {
        let run = bench.with_input(options, b"");
        check_message("no input", &run, 2, &["standard input is empty", "--prompt TEXT"]);
    }
}

#[test]
fn what_cannot_be_done_is_refused() {
    let bench = Bench::new();
    for (options, phrase) in [
        (&["--temperature", "-1"][..], "`temperature` is -1; it must be a finite number greater than 0"),
        (&["--top-p", "0"], "`top_p` is 0"),
        (&["--min-p", "nan"], "`min_p` is NaN"),
        (&["--repetition-penalty", "0"], "`repetition_penalty` is 0"),
        (&["--max-new-tokens", "0"], "nothing to generate"),
        (&["--max-new-tokens", "99999999999"], "positions"),
        (&["--greedy", "--top-k", "3"], "cannot be used with"),
        (&["--system", "x"], "--chat"),
        (&["--prompt-file", "x"], "cannot be used with"),
    ] {
        check_message(&options.join(" "), &bench.generate(options), 2, &[phrase]);
    }
    check_message("no template", &bench.generate(&["--chat"]), 4, &["has no chat template"]);
    bench.configure(&json!({ "top_p": 7 }));
    check_message("settings", &bench.generate(&[]), 4, &["generation_config.json", "`top_p` is 7"]);
    std::fs::write(bench.at("model/generation_config.json"), "[]").unwrap();
    check_message("no object", &bench.generate(&[]), 4, &["generation_config.json", "one JSON object"]);
}

#[test]
fn a_conversation_continues() {
    let bench = Bench::new();
    std::fs::write(bench.at("model/chat_template.jinja"), TEMPLATE).unwrap();
    bench.configure(&json!({ "eos_token_id": 124 }));
    let first = bench.report(&["--chat", "--system", "S", "--max-new-tokens", "6", "--ignore-eos"]);
    let prompt: Vec<u64> = "<s>S|<u>Once|<a>".bytes().map(u64::from).collect();
    assert_eq!(first["prompt_tokens"], json!(prompt));
    let answer = first["text"].as_str().unwrap().trim_end();

    let options = ["chat", "--system", "S", "--max-new-tokens", "6", "--ignore-eos"];
    let run = bench.with_input(&options, b"Once\nand then\n").succeeded();
    assert!(run.stdout.starts_with(answer), "{run:?}");
    let rates: Vec<&str> = run.stderr.lines().filter(|line| line.contains("prompt tokens")).collect();
    assert!(rates[0].starts_with("[16 prompt tokens"), "{rates:?}");
    assert_eq!(rates.len(), 2);
    let run = bench.with_input(&options, b"Once\n/new\nOnce\n/retry\n/nonsense\n/exit\nnever\n").succeeded();
    let rates = run.stderr.lines().filter(|line| line.starts_with("[16 prompt tokens")).count();
    assert_eq!(rates, 3, "{}", run.stderr);
    assert!(run.stderr.contains("unknown command /nonsense"), "{}", run.stderr);
    let long = [b"x".repeat(300), b"\n/new\nOnce\n".to_vec()].concat();
    let run = bench.with_input(&[&options[..], &["--context", "64"]].concat(), &long).succeeded();
    assert!(run.stderr.contains("leaves no room for an answer in a context of 64"), "{}", run.stderr);
    assert!(run.stdout.starts_with(answer), "{run:?}");
    let run = bench.with_input(&options, b"Once\n\xff\n");
    assert_eq!(run.code(), Some(4), "{run}");
    assert!(run.stdout.starts_with(answer), "{run}");
    assert!(run.stderr.contains("standard input:2") && run.stderr.contains("UTF-8"), "{run}");
}
