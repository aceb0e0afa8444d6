//! What the program says to people who know other tools, or give a name or a file to the wrong option.

use std::ffi::OsString;
use std::path::Path;

use quant_tests::models::{TinyLlama, write_cut_demo_model};
use quant_tests::program::{Run, Running, command, quant};
use quant_tests::refusal::check_message;
use quant_tests::{args, demo_model};
use tempfile::TempDir;

fn model() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    TinyLlama::default().write(directory.path());
    directory
}

/// Runs `plan` and, if it is refused, `quantize`, which must say the same.
fn plan(model: &Path, options: &[&str]) -> Run {
    let with = |start: Vec<OsString>| quant(start.into_iter().chain(options.iter().map(Into::into)));
    let run = with(args!["plan", model]);
    if run.code() != Some(0) {
        let out = model.join("../never-written");
        let again = with(args!["quantize", model, "-o", &out]);
        assert_eq!((again.code(), &again.stderr), (run.code(), &run.stderr));
        assert!(!out.exists());
    }
    run
}

#[test]
fn names_given_to_the_wrong_option() {
    let scratch = model();
    let m = scratch.path();
    for (options, expected) in [
        (
            &["--method", "fp8"][..],
            "unknown method `fp8`\n  `fp8` is a scheme: set --scheme fp8\n  known methods",
        ),
        (&["--preset", "fp8"], "unknown preset `fp8`\n  `fp8` is a scheme: set --scheme fp8\n"),
        (&["--format", "fp8"], "unknown format `fp8`\n  `fp8` is a scheme: set --scheme fp8\n"),
        (
            &["--method", "q4_k_m"],
            "\n  Q4_K_M is a GGUF quantization type: set --format gguf and --scheme q4_k_m\n  known methods",
        ),
        (
            &["--format", "q4_k_m"],
            "Q4_K_M is a GGUF quantization type: set --format gguf and --scheme q4_k_m",
        ),
        (&["--format", "gguf", "--method", "q4_k_m"], "set --format gguf and --scheme q4_k_m"),
        (&["--format", "rtn"], "`rtn` is a method: set --method rtn\n"),
        (
            &["--preset", "gptq"],
            "`gptq` is a method and a format: set --method gptq or --format gptq\n  did you mean",
        ),
        (&["--scheme", "awq-w4a16"], "`awq-w4a16` is a preset: set --preset awq-w4a16\n"),
        (&["--scheme", "gguf"], "`gguf` is a format: set --format gguf\n"),
        (&["--method", "w4a16-g64kv4"], "unknown method `w4a16-g64kv4`\n  known methods"),
        (&["--method", "w4a16kv4-g64"], "`w4a16kv4-g64` is a scheme: set --scheme w4a16kv4-g64\n"),
        (
            &["--format", "awq,compressed-tensors"],
            "set --format once for each format: --format awq --format compressed-tensors\n",
        ),
        (&["--format", "gguf", "--scheme", "q4km"], "did you mean Q4_K_M?"),
    ] {
        check_message(&options.join(" "), &plan(m, options), 2, &[expected]);
    }
    for (options, parts) in [
        (&["rtn-w8a16"][..], ["# How weights are rounded\n", "scheme = \"w8a16"]),
        (&[], ["# Tokens per window\n", "kind = \"awq\""]),
        (&["gptq", "--damping", "0.05"], ["[quantize.gptq]\n", "damping = 0.05\n"]),
        (
            &["--method", "gptq", "--ignore", "down_proj"],
            ["method = \"gptq\"\n", "ignore = [\"down_proj\"]\n"],
        ),
    ] {
        let printed = quant([&["plan", "--print-recipe"], options].concat()).succeeded();
        assert!(parts.iter().all(|part| printed.stdout.contains(part)), "{printed}");
    }
    let twice = quant(args!["plan", "--print-recipe", "gptq", "--method", "awq"]);
    check_message("two methods", &twice, 2, &["`gptq` and `awq` cannot be combined"]);
    let gguf = quant(args!["plan", "--print-recipe", "--format", "gguf"]);
    check_message("a recipe of GGUF", &gguf, 2, &["there are no recipe files for --format gguf"]);
}

#[test]
fn options_of_other_tools() {
    let scratch = model();
    let m = scratch.path();
    for (arguments, expected) in [
        (
            args!["quantize", "--model", m, "-o", "x"],
            "the model is an argument, not an option: quant quantize MODEL",
        ),
        (args!["eval", "-m", m], "the model is an argument, not an option: quant eval MODEL"),
        (args!["quantize", m, "-o", "x", "--device", "cuda"], "quantization runs on the processor"),
        (args!["generate", m, "-n", "10"], "--max-new-tokens sets the number of tokens"),
        (args!["bench", m, "-n", "10"], "--prefill and --decode set the number of tokens"),
        (args!["eval", m, "--ppl"], "eval always measures the perplexity"),
        (
            args!["eval", m, "--baseline", "b"],
            "--reference compares with another model; a baseline is an option of `quant gate`",
        ),
        (args!["quantize", m, "x1"], "the output follows -o: quant quantize MODEL -o OUT"),
        (
            args!["generate", m, "Once upon"],
            "the prompt follows --prompt: quant generate MODEL --prompt TEXT",
        ),
        (args!["eval", m, "b"], "the text follows --text, and a model to compare with --reference"),
    ] {
        let run = quant(arguments);
        assert_eq!(run.code(), Some(2), "{run}");
        assert!(run.stderr.contains(&format!("tip: {expected}")), "`{expected}`: {run}");
        assert!(!run.stderr.contains("as a value, use '-- "), "{run}");
    }
    let unknown = quant(args!["eval", m, "--nonsense"]);
    assert!(unknown.code() == Some(2) && !unknown.stderr.contains("tip: "), "{unknown}");
    // GPTQModel's spelling of one scale per row.
    let channel = ["--method", "rtn", "--group-size", "-1", "--json"];
    assert!(plan(m, &channel).succeeded().stdout.contains("w4a16-channel-sym"));
}

#[test]
fn the_default_method_suits_the_scheme() {
    let method = |options: &[&str]| {
        let plan =
            quant(args!["plan", demo_model(), "--json"].into_iter().chain(options.iter().map(Into::into)));
        plan.succeeded().json()["method"].as_str().unwrap().to_owned()
    };
    for scheme in ["fp8", "fp8-static", "fp8-block", "wf8a16", "mxfp8"] {
        assert_eq!(method(&["--scheme", scheme]), "rtn", "{scheme}");
        assert_eq!(method(&["--scheme", scheme, "--method", "awq"]), "awq", "{scheme}");
    }
    for options in [&[][..], &["--scheme", "w8a16"], &["--scheme", "nvfp4a16"], &["--override", "o_proj=fp8"]]
    {
        assert_eq!(method(options), "awq", "{options:?}");
    }
    assert_eq!(method(&["--preset", "awq-w4a16", "--scheme", "fp8"]), "awq");
    let run = quant(args!["plan", demo_model(), "--scheme", "fp8", "--samples", "4"]);
    check_message("samples", &run, 2, &["--samples has no effect: method `rtn` does not use"]);
}

/// If a format fits no linear, leaving one linear float would not help.
#[test]
fn formats_that_no_linear_fits() {
    let scratch = model();
    let m = scratch.path();
    for (options, expected) in [
        (&["--format", "awq", "--scheme", "fp8"][..], "only, not FP8\n  write --format compressed-tensors\n"),
        (&["--format", "gptq", "--scheme", "w5a16-g32"], "not 5\n  write --format compressed-tensors\n"),
        (
            &["--format", "qserve", "--scheme", "w4a16-g32"],
            "w4a8-channel-asym or w8a8-channel-sym, or write --format compressed-tensors\n",
        ),
        (
            &["--format", "awq", "--group-size", "32", "--override", "down_proj=w8a16-g32"],
            "leave it float with --ignore, or write --format compressed-tensors\n",
        ),
    ] {
        let options = [&["--method", "rtn"], options].concat();
        check_message(&options.join(" "), &plan(m, &options), 2, &[expected]);
    }
}

/// Dynamic 8-bit activations that a format cannot describe become float, with a note; the weights are those of the
/// weight-only scheme.
#[test]
fn dropped_activations() {
    let scratch = tempfile::tempdir().unwrap();
    let m = demo_model();
    let hash = |options: &[&str], name: &str| {
        let out = scratch.path().join(name);
        let run = quant(args!["quantize", &m, "-o", &out].into_iter().chain(options.iter().map(Into::into)));
        let lost = run.stderr.contains("lost: the ");
        run.succeeded();
        let config = std::fs::read(out.join("config.json")).unwrap();
        (quant_tests::files::sha256(&std::fs::read(out.join("model.safetensors")).unwrap()), config, lost)
    };
    for (format, with, without) in [
        ("gptq", "w8a8-channel-sym", "w8a16-channel-sym"),
        ("gptq", "w4a8-g128-sym", "w4a16-g128-sym"),
        ("awq", "w4a8-g64-asym", "w4a16-g64-asym"),
    ] {
        let options = |scheme| ["--method", "rtn", "--format", format, "--scheme", scheme];
        let planned = quant(args!["plan", &m].into_iter().chain(options(with).iter().map(Into::into)));
        assert!(planned.succeeded().stdout.contains("engines will use float activations"));
        let (one, other) = (hash(&options(with), with), hash(&options(without), without));
        assert_eq!((&one.0, &one.1), (&other.0, &other.1), "{format} {with}");
        assert!(one.2 && !other.2, "{format} {with}");
    }
    let short = ["--preset", "smoothquant-w8a8", "--format", "gptq", "--samples", "2", "--seq-len", "128"];
    assert!(hash(&short, "smooth").2);
}

#[test]
fn files_that_are_no_results() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    write_cut_demo_model(&at("model"), 1);
    let json = |name: &str| format!("--json={}", at(name).display());
    let rtn = ["--method", "rtn", "--group-size", "32"];
    let quantize = args!["quantize", at("model"), "-o", at("out"), json("summary.json")];
    quant(quantize.into_iter().chain(rtn.iter().map(Into::into))).succeeded();
    let result_of = "`quant eval MODEL --text TEXT --json=FILE` writes results";
    let models = quant(args!["compare", at("model"), at("out")]);
    let expected = ["model is a directory, not an evaluation", "give a file, not a model", result_of];
    check_message("models", &models, 4, &expected);
    let absent = quant(args!["compare", at("one.json"), at("two.json")]);
    check_message("no file", &absent, 4, &["one.json does not exist", "check the path", result_of]);
    let kind = ["has the schema `quant-summary/2`, not `quant-eval/4`", result_of];
    check_message("a summary", &quant(args!["gate", at("summary.json"), "--suggest"]), 4, &kind);

    // Nothing but a file of the same kind is replaced.
    std::fs::write(at("diary"), "dear diary").unwrap();
    let eval = |option: &str, name: &str| {
        let text = ["--text", "builtin-heldout", "--window", "32", "--windows", "2"];
        let option = format!("--{option}={}", at(name).display());
        quant(args!["eval", at("model"), option].into_iter().chain(text.iter().map(Into::into)))
    };
    for option in ["json", "report", "save-reference"] {
        let refused = eval(option, "diary");
        let expected =
            [&*format!("--{option} would replace "), "a different kind of file", "or remove this one"];
        check_message(option, &refused, 2, &expected);
        eval(option, option).succeeded();
        eval(option, option).succeeded();
    }
    let baseline = ["--update", "--baseline"].map(OsString::from);
    quant(args!["gate", at("json")].into_iter().chain(baseline).chain([at("base").into()])).succeeded();
    check_message("a baseline", &eval("json", "base"), 2, &["base, which is a different kind of file"]);
    let policy = "schema = \"quant-gate-policy/1\"\n[[cap]]\nmetric = \"size_bytes\"\nat_most = 1\n";
    std::fs::write(at("policy"), policy).unwrap();
    let junit = format!("--junit={}", at("diary").display());
    let gate = quant(args!["gate", at("json"), "--policy", at("policy"), junit]);
    check_message("JUnit", &gate, 2, &["--junit would replace "]);
    assert_eq!(std::fs::read(at("diary")).unwrap(), b"dear diary");
}

/// The last line of `quantize` is a command that measures the accuracy loss.
#[test]
fn next_steps() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    write_cut_demo_model(&at("model"), 1);
    let run = |model: &str, out: &str, options: &[&str]| {
        let quantize = args!["quantize", at(model), "-o", at(out)];
        quant(quantize.into_iter().chain(options.iter().map(Into::into))).succeeded().stdout
    };
    let next = |model: &str, out: &str| {
        let [model, out] = [at(model), at(out)].map(|path| path.display().to_string());
        format!(
            "next, measure the accuracy loss: quant eval {out} --reference {model} --text builtin-heldout\n"
        )
    };
    let again = |model: &str, out: &str| {
        let [model, out] = [at(model), at(out)].map(|path| path.display().to_string());
        format!(
            "next, measure the accuracy loss against the model that {model} was quantized from: quant eval {out} \
             --reference ORIGINAL --text builtin-heldout\n"
        )
    };
    let rtn = run("model", "out", &["--method", "rtn", "--scheme", "w4a16-g32"]);
    assert!(rtn.ends_with(&next("model", "out")), "{rtn}");
    for (out, options) in [
        ("awq", &["--format", "awq"][..]),
        ("again", &["--method", "rtn", "--scheme", "w3a16", "--requantize"]),
        ("codes.gguf", &["--format", "gguf"]),
    ] {
        let text = run("out", out, options);
        assert!(text.ends_with(&again("out", out)), "{text}");
    }
    let gguf = run("model", "q.gguf", &["--scheme", "q4_k_m", "--allow-fallback"]);
    assert!(gguf.ends_with(&next("model", "q.gguf")), "{gguf}");
    assert!(gguf.contains(&format!("\nwritten to {}\nin ", at("q.gguf").display())), "{gguf}");
    let plain = run("model", "plain.gguf", &["--scheme", "q8_0", "--pre", "none"]);
    assert!(!plain.contains("next, "), "without a vocabulary, no text can be measured: {plain}");

    // A file is named after the codes that it has.
    let kept = run("out", "kept.gguf", &["--format", "gguf"]);
    assert!(kept.lines().next().unwrap().contains(" as Q4_0 ("), "{kept}");
    let inspected = quant(args!["inspect", at("kept.gguf")]).succeeded();
    assert!(inspected.stdout.contains("GGUF, Q4_0, "), "{inspected}");
    let planned = quant(args!["plan", at("out"), "--format", "gguf"]).succeeded();
    assert!(planned.stdout.contains("GGUF, Q4_0: "), "{planned}");

    // A comparison shows the types of a GGUF file.
    let evaluated = ["q.gguf", "out"].map(|model| {
        let result = at(&format!("{model}.json"));
        let json = format!("--json={}", result.display());
        let text = ["--text", "builtin-heldout", "--window", "32", "--windows", "2"];
        let eval = args!["eval", at(model), "--reference", at("model"), json];
        quant(eval.into_iter().chain(text.iter().map(Into::into))).succeeded();
        result
    });
    let compared = quant(args!["compare", &evaluated[0], &evaluated[1]]).succeeded();
    let row = compared.stdout.lines().find(|line| line.starts_with("q.gguf ")).unwrap();
    assert!(row.contains("Q4_K (") && row.contains("Q6_K (") && row.contains(" 4 to 6 "), "{row}");
    assert!(compared.stdout.contains("(code bits: bits per quantized weight without scales"), "{compared}");
}

/// A path with a typo gives the path that exists.
#[test]
fn misspelled_paths() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    TinyLlama::default().write(&at("models/tiny"));
    std::fs::write(at("stories.txt"), "once upon a time ".repeat(100)).unwrap();
    std::fs::write(at("mine.toml"), "[quantize]\nscheme = \"w4a16\"\n").unwrap();
    std::fs::create_dir(at("bad\u{1b}[31m\u{202e}")).unwrap();
    let model = at("models/tiny");
    let meant = |name: &str| format!("\n  did you mean {}? ", at(name).display());
    let out = at("out");
    for (case, arguments, code, name) in [
        ("a model", args!["plan", at("models/tyni")], 4, "models/tiny"),
        ("its folder", args!["inspect", at("model/tiny")], 4, "models/tiny"),
        ("a GGUF file", args!["quantize", at("storis.txt/x.gguf"), "-o", &out], 4, ""),
        ("a text", args!["eval", &model, "--text", at("story.txt")], 4, "stories.txt"),
        ("a recipe", args!["plan", &model, "--recipe", at("mine.tml")], 2, "mine.toml"),
        ("a result", args!["compare", at("stories.tx"), at("stories.txt")], 4, "stories.txt"),
        ("an unprintable name", args!["plan", at("bad[31m")], 4, "bad\\u{1b}[31m\\u{202e}"),
    ] {
        let run = quant(arguments);
        let expected = if name.is_empty() { String::new() } else { meant(name) };
        check_message(case, &run, code, &[&expected]);
        assert_eq!(run.stderr.contains("did you mean"), !name.is_empty(), "{case}: {run}");
        assert!(!run.stderr.contains(['\u{1b}', '\u{202e}']), "{case}: {run}");
    }
    // A relative path with one directory could also be the name of a model of a hub, unless that directory exists.
    for (given, code, text) in [("models/tyni", 4, ""), ("model/tiny", 2, "no such directory")] {
        let mut relative = command(args!["plan", given]);
        relative.current_dir(scratch.path());
        let run = Running::start(relative).wait();
        check_message(given, &run, code, &[text, "did you mean models/tiny? "]);
    }
    assert!(!out.exists());
}
