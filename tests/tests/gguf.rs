//! GGUF files as a user sees them: what the program writes, reads and refuses.

use std::ffi::OsString;
use std::path::Path;

use quant_tests::files::sha256;
use quant_tests::models::{edit_config, write_cut_demo_model};
use quant_tests::program::{Running, Signal, command, quant};
use quant_tests::refusal::{check_message, job_of};
use quant_tests::{args, demo_model};
use serde_json::{Value, json};

const GGUF: [&str; 2] = ["--format", "gguf"];

fn quantize(model: &Path, out: &Path, options: &[&str]) -> Vec<OsString> {
    let arguments = args!["quantize", model, "-o", out];
    arguments.into_iter().chain(GGUF.iter().chain(options).map(OsString::from)).collect()
}

fn perplexity(model: &Path) -> f64 {
    evaluated(model, &[])["perplexity"]["mean"].as_f64().expect("a perplexity")
}

fn evaluated(model: &Path, options: &[&str]) -> Value {
    let arguments = args![
        "eval",
        model,
        "--text",
        "builtin-heldout",
        "--profile",
        "gptq-128",
        "--windows",
        "4",
        "--json"
    ];
    quant(arguments.into_iter().chain(options.iter().map(OsString::from)).collect::<Vec<_>>()).json()
}

fn digest(file: &Path) -> String {
    sha256(&std::fs::read(file).unwrap())
}

#[test]
fn a_file_is_written_and_read_back() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = demo_model();
    let float = perplexity(&model);
    let run = quant(quantize(&model, &at("f16.gguf"), &["--scheme", "f16"])).succeeded();
    assert!(!run.stdout.contains("largest weight error"), "{run}");
    assert_eq!(perplexity(&at("f16.gguf")), float);
    let summary = quant(quantize(&model, &at("q4.gguf"), &["--scheme", "q4_k_m", "--json"])).json();
    assert_eq!(summary["mixture"], "Q4_K_M");
    assert_eq!(summary["types"]["Q6_K"], 5);
    assert_eq!(summary["replaced"].as_array().map(Vec::len), Some(0));
    let four = perplexity(&at("q4.gguf"));
    assert!(four > float * 0.99 && four < float * 1.1, "{float} became {four}");
    quant(quantize(&model, &at("out"), &["--scheme", "q4_k_m"])).succeeded();
    assert_eq!(digest(&at("out").join("model.gguf")), digest(&at("q4.gguf")));
    let report: Value =
        serde_json::from_slice(&std::fs::read(at("out").join("quant_report.json")).unwrap()).unwrap();
    assert_eq!(report["tensors"].as_array().map(Vec::len), Some(57));
    let inspected = quant(args!["inspect", at("q4.gguf"), "--json"]).json();
    assert_eq!((&inspected["family"], &inspected["layers"]), (&"llama".into(), &6.into()));
    // Types, sizes and bits per weight are those of the file, not of the decoded tensors.
    assert_eq!(
        (&inspected["quant_method"], &inspected["gguf"]["mixture"]),
        (&"gguf".into(), &"Q4_K_M".into())
    );
    assert_eq!(inspected["gguf"]["bits_per_weight"], summary["bits_per_weight"]);
    let file_bytes = std::fs::metadata(at("q4.gguf")).unwrap().len();
    assert_eq!(inspected["gguf"]["file_bytes"], file_bytes);
    let tensors = inspected["tensors"].as_array().unwrap();
    assert_eq!(tensors.iter().filter(|t| t["dtype"] == "Q6_K").count(), 5);
    assert_eq!(inspected["bytes"], tensors.iter().map(|t| t["bytes"].as_u64().unwrap()).sum::<u64>());
    assert!(inspected["linears"].as_array().unwrap().iter().all(|l| l["stored"] != "F32"), "{inspected}");
    let shown = quant(args!["inspect", at("q4.gguf")]).succeeded();
    assert!(shown.stdout.contains("quantized: GGUF, Q4_K_M, ") && shown.stderr.is_empty(), "{shown}");
    let float = quant(args!["inspect", at("f16.gguf")]).succeeded();
    assert!(float.stdout.contains("not quantized"), "{float}");
}

#[test]
fn a_quantized_file_is_rounded_again_only_where_that_is_asked_for() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 1);
    quant(quantize(&model, &at("q4.gguf"), &["--scheme", "q4_k_m"])).succeeded();
    quant(quantize(&model, &at("bf16.gguf"), &["--scheme", "bf16"])).succeeded();
    let expected = ["is already quantized: it contains Q6_K, Q4_K blocks", "--requantize"];
    let run = quant(quantize(&at("q4.gguf"), &at("no.gguf"), &["--scheme", "q8_0"]));
    check_message("into GGUF", &run, 2, &expected);
    let run =
        quant(quantize(&at("q4.gguf"), &at("no.gguf"), &["--scheme", "f32", "--override", "ffn_up=q8_0"]));
    check_message("an override", &run, 2, &expected);
    let packed = ["--method", "rtn", "--scheme", "w4a16-g32-sym"];
    let other = |subcommand: &str, options: &[&str]| {
        let mut arguments = args![subcommand, at("q4.gguf")];
        if subcommand == "quantize" {
            arguments.extend(args!["-o", at("packed")]);
        }
        quant(arguments.into_iter().chain(options.iter().map(OsString::from)))
    };
    check_message("into another format", &other("quantize", &packed), 2, &expected);
    check_message("a plan", &other("plan", &packed), 2, &expected);
    assert!(!at("no.gguf").exists() && !at("packed").exists());
    let run =
        quant(quantize(&at("q4.gguf"), &at("q8.gguf"), &["--scheme", "q8_0", "--requantize"])).succeeded();
    assert!(run.stderr.contains("rounded again, which adds a second rounding error"), "{run}");
    other("quantize", &[&packed[..], &["--requantize"]].concat()).succeeded();
    // Writing floats, or rounding from floats, loses nothing more.
    quant(quantize(&at("q4.gguf"), &at("f32.gguf"), &["--scheme", "f32"])).succeeded();
    assert_eq!(perplexity(&at("f32.gguf")), perplexity(&at("q4.gguf")));
    quant(quantize(&at("bf16.gguf"), &at("from-floats.gguf"), &["--scheme", "q8_0"])).succeeded();
    let run = quant(quantize(&at("bf16.gguf"), &at("no.gguf"), &["--scheme", "q8_0", "--requantize"]));
    check_message("nothing to requantize", &run, 2, &["the model is not quantized"]);
}

#[test]
fn searches_and_gptq_cost_less_than_the_reference() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = demo_model();
    let divergence = |options: &[&str]| {
        let text = [
            "--scheme",
            "q4_k_m",
            "--calibration",
            "builtin",
            "--samples",
            "16",
            "--seq-len",
            "256",
            "--force",
        ];
        quant(quantize(&model, &at("out.gguf"), &[&text, options].concat())).succeeded();
        let arguments = args![
            "eval",
            at("out.gguf"),
            "--reference",
            &model,
            "--text",
            "builtin-heldout",
            "--window",
            "128",
            "--windows",
            "100",
            "--json"
        ];
        let length = std::fs::metadata(at("out.gguf")).unwrap().len();
        (quant(arguments).json()["comparison"]["kl"]["mean"].as_f64().expect("a KL divergence"), length)
    };
    let (reference, length) = divergence(&["--reference-search"]);
    let (search, of_search) = divergence(&[]);
    let (gptq, of_gptq) = divergence(&["--method", "gptq"]);
    assert!(search < 0.98 * reference && gptq < 0.85 * search, "{reference}, {search}, {gptq}");
    assert!(of_search.abs_diff(length) < 256 && of_gptq.abs_diff(length) < 256);
}

#[test]
fn a_failed_run_leaves_no_file_and_an_interrupted_one_resumes() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = demo_model();
    quant(quantize(&model, &at("whole.gguf"), &["--scheme", "iq4_xs"])).succeeded();
    let out = at("out.gguf");
    let mut run = Running::start(command(quantize(&model, &out, &["--scheme", "iq4_xs"])));
    let journal = job_of(&out).join("journal.jsonl");
    let begun = || std::fs::read_to_string(&journal).unwrap_or_default().contains("blk.0.");
    assert!(run.wait_until(begun), "ended before a tensor was finished");
    run.signal(Signal::INT);
    let run = run.wait();
    check_message("SIGINT", &run, 75, &["continue with: "]);
    assert!(!out.exists());
    let run = quant(quantize(&model, &out, &["--scheme", "q4_k_s", "--resume"]));
    check_message("other types", &run, 2, &["different inputs or settings"]);
    let run = quant(quantize(&model, &out, &["--scheme", "iq4_xs", "--resume"])).succeeded();
    assert!(run.stderr.contains("resumed: "), "{run}");
    assert_eq!(digest(&out), digest(&at("whole.gguf")));
    // An output of this program is not overwritten without `--force`. A file that a different program wrote is never
    // overwritten.
    let run = quant(quantize(&model, &out, &["--scheme", "q8_0"]));
    check_message("exists", &run, 2, &["out.gguf exists already"]);
    quant(quantize(&model, &out, &["--scheme", "q8_0", "--force"])).succeeded();
    std::fs::write(at("foreign.gguf"), b"GGUF of somebody").unwrap();
    let run = quant(quantize(&model, &at("foreign.gguf"), &["--force"]));
    check_message("foreign", &run, 2, &["was not written by quant"]);
    assert_eq!(std::fs::read(at("foreign.gguf")).unwrap(), b"GGUF of somebody");
}

#[test]
fn requests_that_cannot_be_met() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out.gguf");
    let demo = demo_model();
    for (options, expected) in [
        (&["--scheme", "q4_k_x"][..], "unknown GGUF quantization type or mixture"),
        (&["--scheme", "w4a16"], "unknown GGUF quantization type or mixture"),
        (&["--scheme", "iq1_s"], "the GGUF quantization type IQ1_S is not supported"),
        (&["--override", "ffn_down=q9"], "unknown GGUF tensor type"),
        (&["--override", "ffn_sideways=q8_0"], "matches no linear"),
        (&["--ignore", "nothing"], "matches no linear"),
        (&["--method", "gptq"], "--calibration is missing"),
        (&["--method", "awq"], "method `awq` needs a calibration text, but --calibration is missing"),
        (&["--method", "gptq", "--reference-search"], "cannot be combined"),
        (&["--damping", "0.1"], "--damping has no effect"),
        (&["--method", "rtn", "--damping", "0.1"], "--damping has no effect"),
        (&["--method", "rtn", "--step", "rtn.damping=0.1"], "key `damping`, which `rtn` does not know"),
        (
            &["--method", "gptq", "--block-size", "64"],
            "`block_size` of `gptq` has no effect with --format gguf",
        ),
        (&["--method", "gptq", "--step", "gptq.act_order=none"], "`act_order` of `gptq` has no effect"),
        (&["--method", "gptq", "--step", "gptq.dampin=1"], "did you mean damping?"),
        (&["--method", "gptq", "--step", "gptq.damping=0"], "greater than 0 and at most 100"),
        (
            &["--method", "gptq", "--damping", "0.1", "--step", "gptq.damping=0.1"],
            "both set `damping` of `gptq`",
        ),
        (&["--step", "awq.search=fast"], "--step has no effect with --format gguf"),
        (&["--samples", "4"], "--samples has no effect"),
        (&["--scheme", "q2_k_s"], "needs an importance matrix"),
        (&["--format", "awq"], "cannot be combined with other formats"),
        (&["--requantize"], "the model is not quantized"),
    ] {
        let run = quant(quantize(&demo, &out, options));
        check_message(expected, &run, 2, &[expected]);
        assert!(!out.exists(), "{options:?}");
    }
    let run = quant(args!["quantize", &demo, "-o", out.with_extension(""), "--pre", "smollm"]);
    check_message("--pre", &run, 2, &["--pre has no effect"]);
}

#[test]
fn rows_that_do_not_fit_are_refused_or_listed() {
    let Some(data) = quant_tests::shared_data() else { return };
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = data.join("models/stories260k");
    let run = quant(quantize(&model, &at("out.gguf"), &["--scheme", "q4_k_m"]));
    check_message(
        "narrow rows",
        &run,
        2,
        &["do not suit", "blk.0.attn_q.weight", "row width 64", "--allow-fallback", "Q5_0 for Q4_K"],
    );
    assert!(!at("out.gguf").exists());
    let options = ["--scheme", "q4_k_m", "--allow-fallback", "--json"];
    let summary = quant(quantize(&model, &at("out.gguf"), &options)).json();
    let replaced = summary["replaced"].as_array().unwrap();
    let down = replaced.iter().find(|r| r["tensor"] == "blk.2.ffn_down.weight").unwrap();
    assert_eq!((&down["wanted"], &down["got"]), (&"Q6_K".into(), &"F16".into()));
    // llama.cpp cannot use a vocabulary without byte tokens; the remedy names the only way out.
    let run = quant(quantize(&data.join("models/tinystories-656k"), &at("no.gguf"), &["--allow-fallback"]));
    check_message("byte tokens", &run, 4, &["has 0 byte tokens; llama.cpp needs 256", "set --pre none"]);
    assert!(!run.stderr.contains("add the model's tokenizer.json"), "{run}");
    // A SentencePiece vocabulary is rebuilt from scores.
    let [a, b] = [&model, &at("out.gguf")].map(|m| perplexity(m));
    assert!((a / b - 1.0).abs() < 0.2, "{a} and {b}");
}

#[test]
fn the_name_of_the_output_implies_the_format() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 1);
    quant(quantize(&model, &at("named.gguf"), &["--scheme", "q8_0"])).succeeded();
    let run = quant(args!["quantize", &model, "-o", at("implied.gguf"), "--scheme", "q8_0"]).succeeded();
    assert!(run.stderr.contains("--format gguf is implied by the name of the output"), "{run}");
    assert_eq!(digest(&at("implied.gguf")), digest(&at("named.gguf")));
    for other in [["--format", "awq"], ["--preset", "awq-w4a16"]] {
        let run = quant(args!["quantize", &model, "-o", at("no.gguf"), other[0], other[1]]);
        check_message(other[1], &run, 2, &["no.gguf has the name of a GGUF file", "set --format gguf"]);
        assert!(!at("no.gguf").exists());
    }
}

#[test]
fn codes_of_symmetric_checkpoints_are_kept() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 2);
    let kinds = [("w4a16-g32-sym", "Q4_0"), ("w4a16-g128-sym", "Q4_0"), ("w8a16-g64-sym", "Q8_0")];
    for (scheme, kind) in kinds {
        let (packed, file) = (at(&format!("{scheme} packed")), at(&format!("{scheme}.gguf")));
        quant(args!["quantize", &model, "-o", &packed, "--method", "rtn", "--scheme", scheme]).succeeded();
        let summary = quant(quantize(&packed, &file, &["--json"])).json();
        assert_eq!(summary["types"][kind], 14, "{scheme}");
        // Products are computed in a different order.
        let ratio = perplexity(&packed) / perplexity(&file);
        assert!((ratio - 1.0).abs() < 1e-6, "{scheme}: {ratio}");
    }
    let packed = at("asymmetric");
    quant(args!["quantize", &model, "-o", &packed, "--method", "rtn", "--scheme", "w4a16-g128-asym"])
        .succeeded();
    let run = quant(quantize(&packed, &at("asymmetric.gguf"), &[]));
    check_message("zeros", &run, 4, &["zero points", "layers.0"]);
    assert!(!at("asymmetric.gguf").exists());
    let options = ["--requantize", "--scheme", "q4_k_m"];
    quant(quantize(&packed, &at("asymmetric.gguf"), &options)).succeeded();
}

#[test]
fn every_container_of_the_same_codes_gives_the_same_bytes() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 1);
    for (scheme, formats) in [
        ("w4a16-g32-sym", &["compressed-tensors", "gptq", "awq"][..]),
        ("w4a16-g64-sym", &["compressed-tensors", "gptq", "awq"]),
        ("w8a16-g128-sym", &["compressed-tensors", "gptq"]),
    ] {
        let mut digests = formats.iter().map(|format| {
            // The name of the directory becomes that of the model.
            let (packed, file) = (at(format).join(scheme), at(format).join(format!("{scheme}.gguf")));
            std::fs::create_dir_all(at(format)).unwrap();
            let options = ["--method", "rtn", "--format", format, "--scheme", scheme].map(OsString::from);
            quant(args!["quantize", &model, "-o", &packed].into_iter().chain(options)).succeeded();
            quant(quantize(&packed, &file, &[])).succeeded();
            (format, digest(&file))
        });
        let (_, first) = digests.next().unwrap();
        for (format, other) in digests {
            assert_eq!(other, first, "{scheme} in {format}");
        }
    }
}

#[test]
fn sliding_windows_that_are_not_applied_are_a_warning() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    write_cut_demo_model(&model, 1);
    let shown = || {
        let run = quant(args!["plan", &model, "--format", "gguf", "--scheme", "q8_0"]).succeeded();
        format!("{}{}", run.stdout, run.stderr).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let expected = "llama.cpp ignores the sliding window of the architecture llama: results differ for texts of more than 96 tokens";
    assert!(!shown().contains("sliding window"));
    let class = json!({
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 96,
    });
    edit_config(&model, &class);
    assert!(shown().contains(expected), "{}", shown());
}

#[test]
fn pre_tokenizers_are_found_or_named_and_chat_templates_kept() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 1);
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    std::fs::write(model.join("chat_template.jinja"), template).unwrap();
    let written = |name: &str, options: &[&str]| {
        let run = quant(quantize(&model, &at(name), &[&["--scheme", "q8_0"], options].concat())).succeeded();
        for (named, contradicts) in [("deepseek-coder", true), ("starcoder", false)] {
            if options.contains(&named) {
                let noted = run.stderr.contains("but the tokenizer has the steps of smollm");
                assert!(
                    run.stderr.contains(&format!("{named}, as requested")) && noted == contradicts,
                    "{run}"
                );
            }
        }
        std::fs::read(at(name)).unwrap()
    };
    written("alike.gguf", &["--pre", "starcoder"]);
    let has = |bytes: &[u8], key: &str, value: &str| {
        let mut entry = key.as_bytes().to_vec();
        entry.extend(8u32.to_le_bytes());
        entry.extend((value.len() as u64).to_le_bytes());
        entry.extend(value.as_bytes());
        bytes.windows(entry.len()).any(|window| window == entry)
    };
    let found = written("found.gguf", &[]);
    assert!(has(&found, "tokenizer.ggml.pre", "smollm") && has(&found, "tokenizer.chat_template", template));
    let named = written("named.gguf", &["--pre", "deepseek-coder"]);
    assert!(
        has(&named, "tokenizer.ggml.pre", "deepseek-coder")
            && has(&named, "tokenizer.chat_template", template)
    );
    let without = written("without.gguf", &["--pre", "none"]);
    assert!(
        has(&without, "tokenizer.ggml.model", "none") && !has(&without, "tokenizer.chat_template", template)
    );
    // Only one of the two pre-tokenizers keeps contractions together. Without a vocabulary, there are no tokens.
    std::fs::write(at("short.txt"), "And I've nothing. ".repeat(100)).unwrap();
    let tokens = |name: &str| {
        let text = at("short.txt");
        let run = quant(args![
            "eval",
            at(name),
            "--text",
            text,
            "--profile",
            "gptq-128",
            "--windows",
            "1",
            "--json"
        ]);
        run.json()["tokens_sha256"].clone()
    };
    assert_ne!(tokens("found.gguf"), tokens("named.gguf"));
    let run = quant(args!["eval", at("without.gguf"), "--text", "builtin-heldout"]);
    check_message("no vocabulary", &run, 4, &["without.gguf"]);
    quant(quantize(&at("named.gguf"), &at("again.gguf"), &["--scheme", "f16", "--requantize"])).succeeded();
    let again = std::fs::read(at("again.gguf")).unwrap();
    assert!(has(&again, "tokenizer.chat_template", template));
    assert_eq!(tokens("again.gguf"), tokens("named.gguf"));
}

#[test]
fn importance_matrices_are_gathered_written_and_read() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 2);
    let short = ["--calibration", "builtin", "--samples", "4", "--seq-len", "64", "--scheme", "iq4_xs"];
    let saved = |name: &str| at(name).to_str().unwrap().to_owned();
    let [gguf, dat] = ["imatrix.gguf", "imatrix.dat"].map(saved);
    quant(quantize(&model, &at("one.gguf"), &[&short[..], &["--save-imatrix", &gguf]].concat())).succeeded();
    quant(quantize(&model, &at("two.gguf"), &[&short[..], &["--save-imatrix", &dat]].concat())).succeeded();
    let run =
        quant(quantize(&model, &at("three.gguf"), &["--scheme", "iq4_xs", "--imatrix", &gguf, "--json"]));
    assert_eq!(run.json()["weighted"], true);
    quant(quantize(&model, &at("four.gguf"), &["--scheme", "iq4_xs", "--imatrix", &dat])).succeeded();
    quant(quantize(&model, &at("plain.gguf"), &["--scheme", "iq4_xs"])).succeeded();
    let size = |name: &str| std::fs::metadata(at(name)).unwrap().len();
    assert!(size("one.gguf").abs_diff(size("plain.gguf")) < 1024);
    assert_ne!(perplexity(&at("one.gguf")), perplexity(&at("plain.gguf")));
    // Computed or read from a file, the importance gives the same output, except for the names of the text and of the
    // importance file.
    assert_eq!(perplexity(&at("one.gguf")), perplexity(&at("three.gguf")));
    let directory = saved("model");
    let run = quant(quantize(&model, &at("no.gguf"), &["--scheme", "iq4_xs", "--imatrix", &directory]));
    check_message("a directory", &run, 4, &["model is a directory"]);
    let other = at("other");
    write_cut_demo_model(&other, 3);
    let run = quant(quantize(&other, &at("no.gguf"), &["--scheme", "iq4_xs", "--imatrix", &gguf]));
    check_message("another model", &run, 2, &["has no entry for 7 tensors", "blk.2."]);
    // A matrix that has more than the model needs is not one of the model either.
    let larger = saved("larger.gguf");
    let more = [&short[..], &["--save-imatrix", &larger]].concat();
    quant(quantize(&other, &at("five.gguf"), &more)).succeeded();
    let options = ["--scheme", "iq4_xs", "--imatrix", &larger];
    let run = quant(quantize(&model, &at("no.gguf"), &options));
    check_message("a larger model", &run, 2, &["entries for 7 tensors, such as blk.2.", "the model lacks"]);
    let plan = args!["plan", &model].into_iter().chain(GGUF.iter().chain(&options).map(OsString::from));
    check_message("a larger model", &quant(plan.collect::<Vec<_>>()), 2, &["the model lacks"]);
    let output = saved("no.gguf");
    let same = [&short[..], &["--save-imatrix", &output]].concat();
    let run = quant(quantize(&model, &at("no.gguf"), &same));
    check_message("the output", &run, 2, &["which this run also reads or writes"]);
    assert!(!at("no.gguf").exists());
    std::fs::write(at("bad.dat"), [1, 0, 0, 0, 255, 255, 255, 127]).unwrap();
    let run = quant(quantize(&model, &at("no.gguf"), &["--imatrix", &saved("bad.dat")]));
    check_message("damaged", &run, 4, &["bad.dat", "at byte 4"]);
}

#[test]
fn damaged_files_are_bad_input() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 1);
    quant(quantize(&model, &at("good.gguf"), &["--scheme", "q8_0"])).succeeded();
    let good = std::fs::read(at("good.gguf")).unwrap();
    let find = |text: &[u8]| good.windows(text.len()).position(|w| w == text).unwrap();
    let with = |at: usize, bytes: &[u8]| {
        let mut file = good.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    };
    let heads = find(b"llama.attention.head_count\x04") + "llama.attention.head_count".len() + 4;
    let arch = find(b"general.architecture") + "general.architecture".len() + 4 + 8;
    let name = find(b"blk.0.attn_q.weight");
    let cases: [(&str, Vec<u8>, &[&str]); 9] = [
        ("empty", Vec::new(), &["at byte 0"]),
        ("short", good[..3].to_vec(), &["at byte 0"]),
        ("cut", good[..good.len() / 2].to_vec(), &["the file has only"]),
        ("head", good[..40].to_vec(), &["at byte"]),
        ("version", with(4, &[9]), &["`version` at byte 4 is 9"]),
        ("tensors", with(8, &[255; 8]), &["`tensor_count` at byte 8"]),
        ("heads", with(heads, &[0, 0, 0, 0]), &["attention.head_count", "is 0"]),
        ("arch", with(arch, b"lamma"), &["`lamma`"]),
        ("tensor", with(name, b"blk.0.attn_x"), &["attn_x"]),
    ];
    for (what, bytes, expected) in cases {
        let path = at(&format!("{what}.gguf"));
        std::fs::write(&path, bytes).unwrap();
        for subcommand in ["inspect", "eval"] {
            let text: &[&str] = if subcommand == "eval" { &["--text", "builtin-heldout"] } else { &[] };
            let arguments: Vec<OsString> =
                args![subcommand, &path].into_iter().chain(text.iter().map(OsString::from)).collect();
            let run = quant(arguments);
            check_message(what, &run, 4, &[&[&*format!("{what}.gguf")], expected].concat());
        }
    }
}

#[test]
fn models_are_written_in_parts_and_read_again() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 2);
    quant(quantize(&model, &at("whole.gguf"), &["--scheme", "q8_0"])).succeeded();
    let whole = std::fs::metadata(at("whole.gguf")).unwrap().len();
    let limit = whole / 4;
    let split = ["--scheme", "q8_0", "--split-max-size", &limit.to_string()];
    quant(quantize(&model, &at("parts"), &split)).succeeded();
    let mut names: Vec<String> = std::fs::read_dir(at("parts"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".gguf"))
        .collect();
    names.sort();
    let count = names.len();
    assert!(count >= 4, "{names:?}");
    let expected_names: Vec<String> =
        (1..=count).map(|n| format!("model-{n:05}-of-{count:05}.gguf")).collect();
    assert_eq!(names, expected_names);
    let part = |n: usize| at("parts").join(&names[n]);
    // The largest tensor may get a larger file of its own.
    let sizes: Vec<u64> = (0..count).map(|n| std::fs::metadata(part(n)).unwrap().len()).collect();
    assert!(sizes.iter().sum::<u64>() < whole + 4096 * count as u64, "{sizes:?}");
    assert_eq!(perplexity(&part(0)), perplexity(&at("whole.gguf")));
    let inspected = |path: &Path| quant(args!["inspect", path, "--json"]).json();
    let (joined, one) = (inspected(&part(0)), inspected(&at("whole.gguf")));
    assert_eq!((&joined["layers"], &joined["family"]), (&one["layers"], &one["family"]));
    quant(quantize(&model, &at("one"), &["--scheme", "q8_0", "--split-max-size", "4G"])).succeeded();
    assert!(at("one").join("model.gguf").exists());

    let refused = |path: &Path, expected: &[&str]| {
        let run = quant(args!["inspect", path]);
        check_message("a part", &run, 4, expected);
    };
    refused(&part(1), &[&names[1], "is file 2 of", "give the first file"]);
    let bytes = std::fs::read(part(1)).unwrap();
    let key = bytes.windows(8).position(|w| w == b"split.no").unwrap() + 8 + 4;
    let mut wrong = bytes.clone();
    wrong[key] = 3;
    std::fs::write(part(1), &wrong).unwrap();
    refused(&part(0), &[&names[1], "is not file 2"]);
    std::fs::write(part(1), &bytes[..bytes.len() / 2]).unwrap();
    refused(&part(0), &[&names[1], "the file has"]);
    std::fs::remove_file(part(1)).unwrap();
    refused(&part(0), &[&names[1], "of which others are missing"]);

    let run = quant(quantize(&model, &at("parts.gguf"), &split));
    check_message("one file for several", &run, 2, &["--split-max-size writes several files", "directory"]);
    for size in ["0", "4T", "G", "99999999999999999999"] {
        let run = quant(quantize(&model, &at("no"), &["--split-max-size", size]));
        check_message(size, &run, 2, &["--split-max-size"]);
    }
    let run = quant(args!["quantize", &model, "-o", at("no"), "--split-max-size", "1G"]);
    check_message("another format", &run, 2, &["--split-max-size has no effect"]);
}

#[test]
fn blocks_of_experts_and_ternary_types_are_named_as_schemes() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 1);
    for (scheme, kind, min) in [("tq1_0", "TQ1_0", 5), ("tq2_0", "TQ2_0", 5), ("mxfp4_moe", "Q8_0", 7)] {
        let summary = quant(quantize(&model, &at(scheme), &["--scheme", scheme, "--json"])).json();
        assert!(summary["types"][kind].as_u64() >= Some(min), "{scheme}: {summary}");
    }
    let overrides =
        ["--scheme", "q8_0", "--override", "blk.*.ffn_*=mxfp4", "--override", "blk.*.attn_*=nvfp4", "--json"];
    let summary = quant(quantize(&model, &at("four.gguf"), &overrides)).json();
    assert_eq!((&summary["types"]["MXFP4"], &summary["types"]["NVFP4"]), (&3.into(), &4.into()));
    assert!(perplexity(&at("four.gguf")).is_finite());
}

#[test]
fn blocks_run_on_the_kernels() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = demo_model();
    let mean = |result: &Value| result["perplexity"]["mean"].as_f64().expect("a perplexity");
    for (scheme, types) in [
        ("q4_k_m", "Q4_K, Q6_K"),
        ("q5_k_s", "Q5_K, Q6_K"),
        ("q3_k_m", "Q3_K"),
        ("q2_k", "Q2_K"),
        ("q4_0", "Q4_0"),
        ("q5_0", "Q5_0"),
        ("q8_0", "Q8_0"),
        ("iq4_xs", "IQ4_XS"),
        ("iq4_nl", "IQ4_NL"),
    ] {
        let file = at(&format!("{scheme}.gguf"));
        quant(quantize(&model, &file, &["--scheme", scheme])).succeeded();
        let (dense, kernels) = (evaluated(&file, &[]), evaluated(&file, &["--execution", "kernels"]));
        let isa = kernels["tool"]["isa"].as_str().unwrap();
        let types: Vec<&str> = types.split(", ").collect();
        assert!(isa.contains("with 8-bit activations per token for "), "{scheme}: {isa}");
        assert!(types.iter().all(|kind| isa.contains(kind)), "{scheme}: {isa}");
        assert!(!dense["tool"]["isa"].as_str().unwrap().contains("kernels"), "{scheme}");
        let off = (mean(&kernels) / mean(&dense)).ln().abs();
        assert!(off > 0.0 && off < 0.01, "{scheme}: {} became {}", mean(&dense), mean(&kernels));
    }
    let arguments =
        args!["bench", at("q4_k_m.gguf"), "--prefill", "8", "--decode", "2", "--repeat", "1", "--json"];
    assert_ne!(quant(arguments).json()["kernels"], "dense");
}

#[test]
fn blocks_without_kernels_are_multiplied_as_floats() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, file) = (scratch.path().join("model"), scratch.path().join("q4_1.gguf"));
    write_cut_demo_model(&model, 1);
    quant(quantize(&model, &file, &["--scheme", "q4_1"])).succeeded();
    let arguments = |execution: &str| {
        args![
            "eval",
            &file,
            "--text",
            "builtin-heldout",
            "--profile",
            "gptq-128",
            "--windows",
            "1",
            "--json",
            "--execution",
            execution
        ]
    };
    let (dense, kernels) = (quant(arguments("fake")), quant(arguments("kernels")));
    let said = &kernels.stderr;
    assert!(said.contains("there are no kernels for Q4_1: these weights are multiplied as floats"), "{said}");
    assert!(!dense.stderr.contains("no kernels"));
    let (kernels, dense) = (kernels.json(), dense.json());
    let isa = kernels["tool"]["isa"].as_str().unwrap();
    assert!(isa.ends_with("with 8-bit activations per token for Q6_K"), "{isa}");
    let mean = |result: &Value| result["perplexity"]["mean"].as_f64().unwrap();
    assert!((mean(&kernels) / mean(&dense)).ln().abs() < 0.01, "{} and {}", mean(&kernels), mean(&dense));
}
