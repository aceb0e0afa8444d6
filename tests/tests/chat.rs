//! Calibration on conversations: templates, masks, and packing as documents that share windows without attending to
//! each other.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use quant_tests::args;
use quant_tests::files::hashes;
use quant_tests::models::{TinyLlama, byte_tokenizer};
use quant_tests::program::{Run, quant};
use quant_tests::refusal::{check_message, refuses_to_quantize};
use serde_json::{Value, json};
use tempfile::TempDir;

const TEMPLATE: &str = "\
{%- for message in messages -%}
{{- '<' + message['role'] + '>' + message['content'].strip() + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}";
const AWQ: [&str; 6] = ["--scheme", "w4a16-g32", "--samples", "3", "--seq-len", "96"];

/// A model with a chat template, and a file of conversations.
struct Bench {
    scratch: TempDir,
}

impl Bench {
    fn new() -> Self {
        let bench = Self { scratch: tempfile::tempdir().unwrap() };
        TinyLlama::default().write(&bench.model());
        bench.write("model/chat_template.jinja", TEMPLATE);
        bench
            .write("model/tokenizer_config.json", &json!({ "eos_token": { "content": "</s>" } }).to_string());
        let line = |i: usize| {
            let messages = json!([
                { "role": "user", "content": "How far is it? ".repeat(1 + i % 3) },
                { "role": "assistant", "content": "A mile, or two. ".repeat(1 + i % 2) },
            ]);
            json!({ "messages": messages }).to_string()
        };
        bench.write("chats.jsonl", &(0..12).map(line).collect::<Vec<_>>().join("\n"));
        bench
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn model(&self) -> PathBuf {
        self.at("model")
    }

    fn chats(&self) -> String {
        self.at("chats.jsonl").to_string_lossy().into_owned()
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.at(name), text).unwrap();
    }

    fn quantize(&self, out: &str, options: &[&str]) -> Run {
        let chats = self.chats();
        let options = [&AWQ[..], &["--calibration", &chats], options].concat();
        let arguments = args!["quantize", self.model(), "-o", self.at(out)];
        quant(arguments.into_iter().chain(options.iter().map(OsString::from))).succeeded()
    }

    fn report(&self, out: &str) -> Value {
        read_json(&self.at(out).join("quant_report.json"))
    }

    /// Checks a refusal on the conversations.
    #[track_caller]
    fn refuses(&self, case: &str, options: &[&str], code: i32, phrase: &[&str]) {
        let chats = self.chats();
        let options = [&AWQ[..], &["--calibration", &chats], options].concat();
        refuses_to_quantize(case, &self.model(), &options, code, phrase);
    }
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn importance_matrices_of_conversations() {
    let bench = Bench::new();
    let importance = |name: &str, options: &[&str]| {
        let file = bench.at(&format!("{name}.dat"));
        let chats = bench.chats();
        let options = [&["--samples", "3", "--seq-len", "96", "--calibration", &chats], options].concat();
        let arguments = args![
            "quantize",
            bench.model(),
            "-o",
            bench.at(&format!("{name}.gguf")),
            "--format",
            "gguf",
            "--scheme",
            "q8_0",
            "--pre",
            "none",
            "--save-imatrix",
            &file
        ];
        quant(arguments.into_iter().chain(options.iter().map(OsString::from))).succeeded();
        std::fs::read(file).unwrap()
    };
    let masked = importance("masked", &["--mask", "prompts", "--threads", "1"]);
    assert_eq!(masked, importance("again", &["--mask", "prompts", "--threads", "2"]));
    assert_ne!(masked, importance("whole", &["--mask", "none"]));
    bench.write("model/chat_template.jinja", &TEMPLATE.replace("eos_token", "'!!'"));
    assert_ne!(masked, importance("other", &["--mask", "prompts"]));
}

#[test]
fn masked_conversations() {
    let bench = Bench::new();
    let run = bench.quantize("masked", &["--mask", "prompts", "--threads", "1"]);
    let report = bench.report("masked");
    let batch = &report["calibration"];
    assert_eq!((&batch["packing"], &batch["mask"]), (&json!("documents"), &json!("prompts")));
    let number = |key: &str| batch[key].as_u64().unwrap();
    let (tokens, counted, padding) = (number("tokens"), number("tokens_counted"), number("padding"));
    assert_eq!(tokens + padding, 3 * 96);
    assert!(0 < counted && counted < tokens, "{counted} of {tokens}");
    assert_eq!(batch["layout_sha256"].as_str().unwrap().len(), 64);
    let linears: Vec<_> =
        report["tensors"].as_array().unwrap().iter().filter(|t| t["action"] == "quantized").collect();
    assert_eq!(linears.len(), 2 * 7);
    assert!(linears.iter().all(|t| t["calibration_tokens"] == json!(counted)), "{report:#}");
    let expected = format!("calibrated on {counted} of {tokens} tokens (");
    assert!(run.stdout.contains(&expected), "{run}");
    assert!(bench.at("masked/chat_template.jinja").is_file(), "the template is copied");

    // The bytes are the same with a different number of threads and from a recipe.
    let masked = hashes(&bench.at("masked"));
    bench.quantize("again", &["--mask", "prompts", "--threads", "2"]);
    assert_eq!(masked, hashes(&bench.at("again")));
    bench.write(
        "recipe.toml",
        "[[transform]]\nkind = \"awq\"\n[quantize]\nscheme = \"w4a16-g32\"\n[calibration]\n\
         text = \"chats.jsonl\"\nsamples = 3\nlength = 96\nmask = \"prompts\"\npacking = \"documents\"\n",
    );
    let recipe = bench.at("recipe.toml");
    quant(args!["quantize", bench.model(), "-o", bench.at("recipe"), "--recipe", recipe]).succeeded();
    assert_eq!(masked, hashes(&bench.at("recipe")));
    for (name, options) in [
        ("whole", &["--mask", "none"][..]),
        ("stream", &["--mask", "prompts", "--packing", "stream"]),
        ("fast", &["--mask", "prompts", "--search", "reference"]),
    ] {
        bench.quantize(name, options);
        let report = bench.report(name);
        let batch = &report["calibration"];
        match name {
            "whole" => assert_eq!(batch["tokens_counted"], batch["tokens"]),
            "stream" => assert_eq!((&batch["padding"], &batch["tokens"]), (&json!(0), &json!(288))),
            _ => assert_eq!(batch["tokens_counted"], json!(counted)),
        }
        assert_ne!(masked["quant_report.json"], hashes(&bench.at(name))["quant_report.json"], "{name}");
    }
    let weights = |name: &str| hashes(&bench.at(name))["model.safetensors"].clone();
    assert_ne!(weights("masked"), weights("whole"));
}

/// The template may be in either file, alone or in a list of templates; the tokens are the same.
#[test]
fn every_place_of_a_template() {
    let bench = Bench::new();
    let tokens = |bench: &Bench, out: &str| {
        bench.quantize(out, &[]);
        bench.report(out)["calibration"]["tokens_sha256"].clone()
    };
    let from_file = tokens(&bench, "beside");
    let config = json!({ "eos_token": "</s>", "chat_template": "{{ raise_exception('not this one') }}" });
    bench.write("model/tokenizer_config.json", &config.to_string());
    assert_eq!(tokens(&bench, "first"), from_file, "chat_template.jinja takes precedence");
    std::fs::remove_file(bench.at("model/chat_template.jinja")).unwrap();
    for (out, template) in [
        ("text", json!(TEMPLATE)),
        (
            "list",
            json!([{ "name": "tool_use", "template": "x" }, { "name": "default", "template": TEMPLATE }]),
        ),
    ] {
        let config = json!({ "eos_token": "</s>", "chat_template": template });
        bench.write("model/tokenizer_config.json", &config.to_string());
        assert_eq!(tokens(&bench, out), from_file, "{out}");
    }
}

#[test]
fn templates_that_cannot_be_used() {
    let file = "chat_template.jinja";
    let config = "tokenizer_config.json";
    let with = |name: &str, text: &str| {
        let bench = Bench::new();
        bench.write(&format!("model/{name}"), text);
        bench
    };
    let bench = Bench::new();
    std::fs::remove_file(bench.at("model/chat_template.jinja")).unwrap();
    bench.refuses("none at all", &[], 4, &["has no chat template", "put its chat_template.jinja next to"]);
    with(file, "a\n{% for").refuses("no template", &[], 4, &["chat_template.jinja:2: syntax error"]);
    let raises = "{{ raise_exception('turns are wrong') }}";
    let phrase =
        ["chats.jsonl:1: ", "chat_template.jinja fails on it: line 1", "refuses it: turns are wrong"];
    with(file, raises).refuses("one that raises", &[], 4, &phrase);
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    with(file, endless).refuses("one that does not end", &[], 4, &["exceeds the step limit"]);
    let deep = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    with(file, deep).refuses("one that calls itself", &[], 4, &["fails on it"]);
    let last = "{{ messages[-1].content }}";
    with(file, last).refuses(
        "answers that cannot be distinguished",
        &["--mask", "prompts"],
        4,
        &["does not allow separating prompts from answers", "--mask none"],
    );
    with(config, "{").refuses("settings that are not JSON", &[], 4, &[config, "not valid JSON"]);
    with(config, r#"{"eos_token": 3}"#).refuses(
        "a token that is not a string",
        &[],
        4,
        &[config, "`eos_token`"],
    );
    let bench = with(config, r#"{"chat_template": [{"name": "rag", "template": "x"}]}"#);
    std::fs::remove_file(bench.at("model/chat_template.jinja")).unwrap();
    bench.refuses("a list without a default", &[], 4, &[config, "without a template named `default`"]);
}

#[test]
fn conversations_that_cannot_be_used() {
    let with = |text: &str| {
        let bench = Bench::new();
        bench.write("chats.jsonl", text);
        bench
    };
    let good = json!({ "messages": [{ "role": "user", "content": "x ".repeat(60) }] }).to_string();
    for (case, line, phrase) in [
        ("a text among them", json!({ "text": "x" }), "no field `messages`"),
        ("no messages", json!({ "messages": [] }), "empty or not a list"),
        ("no role", json!({ "messages": [{ "content": "x" }] }), "`role` in message 1"),
        ("no content", json!({ "messages": [{ "role": "user" }] }), "fails on it"),
    ] {
        with(&format!("{good}\n\n{line}\n")).refuses(case, &[], 4, &["chats.jsonl:3: ", phrase]);
    }
    with(&format!("{good}\n{{")).refuses("no JSON", &[], 4, &["chats.jsonl:2: is not JSON"]);
    with(&good).refuses("too few", &[], 4, &["chats.jsonl has ", "of 96", "3 windows are needed"]);
    let phrase = ["no assistant tokens", "--mask none"];
    with(&good).refuses("no answers", &["--mask", "prompts"], 4, &phrase);
    let bench = Bench::new();
    bench.write("plain.txt", &"Rain in the morning. ".repeat(200));
    let plain = bench.at("plain.txt");
    for text in ["builtin", plain.to_str().unwrap()] {
        let options = [&AWQ[..], &["--calibration", text, "--mask", "prompts"]].concat();
        let phrase = ["is plain text, which has no prompts to mask", "`messages`"];
        refuses_to_quantize("a mask on text", &bench.model(), &options, 2, &phrase);
    }
}

#[test]
fn packed_texts() {
    let bench = Bench::new();
    let quantize = |out: &str, options: &[&str]| {
        let options = [&AWQ[..], options].concat();
        let arguments = args!["quantize", bench.model(), "-o", bench.at(out)];
        quant(arguments.into_iter().chain(options.iter().map(OsString::from))).succeeded();
        bench.report(out)["calibration"].clone()
    };
    let packed = quantize("packed", &["--packing", "documents"]);
    assert_eq!((&packed["packing"], &packed["mask"]), (&json!("documents"), &json!("none")));
    let stream = quantize("stream", &["--packing", "stream"]);
    let auto = quantize("auto", &[]);
    assert_eq!(stream, auto);
    assert_eq!(hashes(&bench.at("stream")), hashes(&bench.at("auto")));
    assert!(auto["layout_sha256"].is_null() && auto["tokens"] == json!(288));
    let recipe = quant(args!["plan", "--print-recipe", "awq-w4a16"]).succeeded().stdout;
    for key in ["packing = \"auto\"", "mask = \"none\""] {
        assert!(recipe.contains(key), "{recipe}");
    }
    let memory = |options: &[&str]| {
        let arguments = args!["plan", bench.model(), "--group-size", "32", "--json"];
        let plan = quant(arguments.into_iter().chain(options.iter().map(OsString::from))).json();
        plan["peak_memory_bytes"].as_u64().unwrap()
    };
    assert!(memory(&["--mask", "prompts"]) > memory(&[]));
    assert!(memory(&["--packing", "documents"]) > memory(&["--packing", "stream"]));
}

/// Conversations are scored as the text that the template writes, without the special tokens of the tokenizer.
#[test]
fn evaluation_of_conversations() {
    let bench = Bench::new();
    let rendered: String = (0..12)
        .map(|i| {
            let (question, answer) =
                ("How far is it? ".repeat(1 + i % 3), "A mile, or two. ".repeat(1 + i % 2));
            format!("<user>{}</s><assistant>{}</s>", question.trim(), answer.trim())
        })
        .collect();
    bench.write("rendered.txt", &rendered);
    let run = |text: &str, options: &[&str]| {
        let arguments = args!["eval", bench.model(), "--text", bench.at(text), "--window", "64", "--json"];
        quant(arguments.into_iter().chain(options.iter().map(OsString::from)))
    };
    let [chats, plain] = ["chats.jsonl", "rendered.txt"].map(|text| run(text, &[]).json());
    for field in ["perplexity", "bits_per_byte", "tokens_sha256", "window_tokens", "bos"] {
        assert!(
            !chats[field].is_null() && chats[field] == plain[field],
            "{field}: {} {}",
            chats[field],
            plain[field]
        );
    }
    assert_eq!(chats["text"]["sha256"], plain["text"]["sha256"]);
    let compared = run("chats.jsonl", &["--reference", bench.model().to_str().unwrap()]).json();
    assert_eq!(compared["comparison"]["kl"]["mean"], 0.0);

    // The tokenizer adds a token to plain texts, but not to what the template has rendered.
    let mut tokenizer = byte_tokenizer();
    let bos = json!({ "SpecialToken": { "id": "A", "type_id": 0 } });
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [bos, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 0 } }],
        "special_tokens": { "A": { "id": "A", "ids": [65], "tokens": ["A"] } },
    });
    bench.write("model/tokenizer.json", &tokenizer.to_string());
    assert_eq!(run("chats.jsonl", &[]).json()["tokens_sha256"], chats["tokens_sha256"]);
    let with_bos = run("rendered.txt", &[]).json();
    assert_eq!((&with_bos["bos"]["policy"], &with_bos["bos"]["token"]), (&json!("text"), &json!(65)));

    let rolling = run("chats.jsonl", &["--profile", "lmeval-rolling-64"]);
    check_message(
        "rolling",
        &rolling,
        2,
        &["the text consists of conversations", "choose a different --profile"],
    );
    std::fs::remove_file(bench.at("model/chat_template.jinja")).unwrap();
    check_message(
        "no template",
        &run("chats.jsonl", &[]),
        4,
        &["has no chat template", "without `messages`"],
    );
}
