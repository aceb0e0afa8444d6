//! `quant eval`: refused requests, edge cases of windows, HTML reports, and execution on the kernels.

use quant_tests::files::copy_files;
use quant_tests::program::{Running, command, isa_values, quant};
use quant_tests::refusal::check_message;
use quant_tests::{args, demo_model};

#[test]
fn rules_that_score_nothing_are_refused() {
    let text = ["--text", "builtin-heldout"];
    for (options, code, expected) in [
        (vec!["--profile", "gptq-1"], 2, "would score no token"),
        (vec!["--profile", "perplexity"], 2, "unknown profile `perplexity`"),
        (vec!["--profile", "hf-stride-64-65"], 2, "the stride is 65"),
        (vec!["--windows", "0", "--window", "64"], 2, "--windows"),
        (vec!["--profile", "wt2-gptq-2048"], 2, "test split of WikiText-2"),
        (vec!["--window", "99999"], 4, "fewer than one window of 99999"),
        (vec!["--profile", "llamacpp-99999"], 4, "fewer than the 2 windows of 99999 that llama.cpp"),
    ] {
        let mut arguments = args!["eval", demo_model()];
        arguments.extend(text.map(Into::into));
        arguments.extend(options.iter().map(Into::into));
        let run = quant(arguments);
        assert_eq!(run.code(), Some(code), "{run}");
        assert!(run.stderr.contains(expected), "{run}");
    }
}

/// A limit on the number of windows is not a requirement.
#[test]
fn a_text_with_fewer_windows_than_the_limit_is_scored_whole() {
    let scratch = tempfile::tempdir().unwrap();
    let text = scratch.path().join("text.txt");
    std::fs::write(&text, "rain ".repeat(200)).unwrap();
    let measure = |limit: &[&str]| {
        let fixed = args!["eval", demo_model(), "--text", &text, "--window", "64", "--json"];
        quant(fixed.into_iter().chain(limit.iter().map(Into::into)))
    };
    let (whole, limited) = (measure(&[]), measure(&["--windows", "1000"]));
    assert!(limited.stderr.contains("text.txt has only "), "{limited}");
    assert!(limited.stderr.contains(" of 64; all are scored"), "{limited}");
    let (whole, limited) = (whole.json(), limited.json());
    assert_eq!(limited["tokens_sha256"], whole["tokens_sha256"]);
    assert_eq!(limited["nll"], whole["nll"]);
}

/// A last window of one token would score nothing, so it is dropped.
#[test]
fn strides_as_long_as_windows_end_well() {
    let scratch = tempfile::tempdir().unwrap();
    let text = scratch.path().join("text.txt");
    for words in 10..30 {
        std::fs::write(&text, "rain ".repeat(words)).unwrap();
        let run = quant(args!["eval", demo_model(), "--text", &text, "--profile", "hf-stride-4-4", "--json"]);
        let result = run.json();
        let tokens = result["window_tokens"].as_array().unwrap();
        assert!(tokens.iter().all(|n| *n != 0), "{result}");
    }
}

#[test]
fn reports_show_what_was_measured() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let rtn = ["--method", "rtn", "--scheme", "w3a16-g64-sym"].map(Into::into);
    let rounded = args!["quantize", demo_model(), "-o", at("w3"), "--report", at("rounded.html")];
    quant(rounded.into_iter().chain(rtn)).succeeded();
    let text = scratch.path().join("<script>alert(1)<br>.txt");
    std::fs::write(&text, "<b>Rain</b> in the morning & no sun at noon. ".repeat(60)).unwrap();
    let pages = ["a", "b"].map(|name| {
        let page = scratch.path().join(format!("{name}.html"));
        quant(args![
            "eval",
            at("w3"),
            "--reference",
            demo_model(),
            "--text",
            &text,
            "--window",
            "64",
            "--report",
            &page
        ])
        .succeeded();
        std::fs::read_to_string(page).unwrap().replace("<wbr>", "")
    });
    assert_eq!(pages[0], pages[1], "the same numbers make the same page");
    let page = &pages[0];
    for part in [
        "&lt;script&gt;",
        "&lt;b&gt;Rain",
        "Relative error of hidden states by block",
        "rtn as compressed-tensors, w3a16-g64-sym, ",
        "of the reference's weight files",
        "p class=\"verdict\"",
        "w3a16-g64-sym, 42 linears",
        "noise floor",
        "Error of every quantized tensor",
        "Worst windows",
        "Provenance",
    ] {
        assert!(page.contains(part), "no {part}");
    }
    let stray = at("w3").join("quant_report.json");
    let report = std::fs::read_to_string(&stray).unwrap();
    for (broken, expected) in [
        (report.replace("w3a16", "w4a16"), "does not match the stored scheme of"),
        (report.replace("quant-report/1", "quant-report/9"), "does not have the schema"),
        (report[..report.len() / 2].to_owned(), "quant_report.json"),
    ] {
        let copy = scratch.path().join("stray");
        copy_files(&at("w3"), &copy);
        std::fs::write(copy.join("quant_report.json"), broken).unwrap();
        let page = scratch.path().join("stray.html");
        let run =
            quant(args!["eval", &copy, "--text", &text, "--window", "64", "--report", &page]).succeeded();
        assert!(run.stderr.contains(expected), "{run}");
        assert!(!std::fs::read_to_string(page).unwrap().contains("Error of every quantized tensor"));
        std::fs::remove_dir_all(copy).unwrap();
    }
    assert!(!page.contains("<script") && !page.contains("http://") && !page.contains("https://"));

    let page = std::fs::read_to_string(at("rounded.html")).unwrap();
    assert!(page.contains("model.<wbr>layers.<wbr>0.<wbr>self_<wbr>attn.<wbr>q_<wbr>proj.<wbr>weight"));
    let page = page.replace("<wbr>", "");
    assert!(page.contains("rtn, w3a16-g64-sym, as compressed-tensors"), "the scheme is on top");
    assert!(!page.contains("exponent of scales") && !page.contains("after the search"));
    assert!(
        page.contains("model.layers.0.self_attn.q_proj.weight") && page.contains("Precision of every linear")
    );

    let result = at("result.json");
    let json = format!("--json={}", result.display());
    let eval = args!["eval", at("w3"), "--reference", demo_model(), "--text", &text, "--window", "64", json];
    quant(eval).succeeded();
    std::fs::write(
        at("gate.toml"),
        "schema = \"quant-gate-policy/1\"\n[[cap]]\nmetric = \"kl_p99\"\nat_most = 1e-9\n",
    )
    .unwrap();
    let page = at("compared.html");
    let eval = args!["eval", at("w3"), "--reference", demo_model(), "--text", &text, "--window", "64"];
    quant(eval.into_iter().chain(args!["--compare", &result, "--report", &page])).succeeded();
    let page = std::fs::read_to_string(page).unwrap();
    let (_, compared) = page.split_once("Compared runs").unwrap();
    assert_eq!(compared.matches("data-label=\"method\">rtn<").count(), 2, "{compared}");
    // In a narrow window, a row becomes a card, in which every value has its label.
    assert!(compared.contains("<table class=\"cards labelled compared\">"), "{compared}");
    let hint = "add --reference FLOAT, the model before quantization";
    for (model, hinted) in [(at("w3"), true), (demo_model(), false)] {
        let run = quant(args!["eval", model, "--text", &text, "--window", "64"]).succeeded();
        assert_eq!(run.stdout.contains(hint), hinted, "{run}");
    }

    quant(args!["gate", &result, "--baseline", at("baseline.json"), "--update"]).succeeded();
    let (policy, baseline, html) = (at("gate.toml"), at("baseline.json"), at("gate.html"));
    let run = quant(args!["gate", &result, "--policy", policy, "--baseline", baseline, "--report", &html]);
    assert_eq!(run.code(), Some(1), "{run}");
    let page = std::fs::read_to_string(html).unwrap().replace("<wbr>", "");
    assert!(page.contains("kl_p99") && page.contains("class=\"tile verdict fail\""));
    assert!(page.contains("What has changed") && page.contains("same weights"));
    assert!(!page.contains("<svg"), "a chart of a single point");
}

#[test]
fn outputs_and_comparisons_that_make_no_sense() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    copy_files(&demo_model(), &at("model"));
    let weights = at("model/model.safetensors");
    let before = std::fs::read(&weights).unwrap();
    let short = ["--text", "builtin-heldout", "--window", "64", "--windows", "2"].map(Into::into);
    let eval = |more: Vec<std::ffi::OsString>| {
        quant(args!["eval", at("model")].into_iter().chain(short.clone()).chain(more))
    };
    let json = |path: &std::path::Path| format!("--json={}", path.display());
    for more in [args!["--report", &weights], args![json(&weights)], args!["--journal", at("model/new.html")]]
    {
        let run = eval(more);
        assert_eq!(run.code(), Some(2), "{run}");
        assert!(run.stderr.contains("into the model"), "{run}");
    }
    let run = eval(args!["--reference", demo_model(), "--report", demo_model().join("page.html")]);
    assert!(run.code() == Some(2) && run.stderr.contains("into the model"), "{run}");
    let rtn = args!["quantize", at("model"), "-o", at("out"), "--method", "rtn", "--report", &weights];
    assert_eq!(quant(rtn).code(), Some(2));
    assert_eq!(std::fs::read(&weights).unwrap(), before);

    let made = std::process::Command::new("mkfifo").arg(at("pipe")).status().unwrap();
    assert!(made.success());
    let run = eval(args!["--report", at("pipe")]);
    assert!(run.code() == Some(2) && run.stderr.contains("named pipe"), "{run}");

    // A quantized reference of a float model is probably a mistake.
    let rtn = args!["quantize", demo_model(), "-o", at("w4"), "--method", "rtn", "--scheme", "w4a16-g64-sym"];
    quant(rtn).succeeded();
    let swapped = eval(args!["--reference", at("w4")]).succeeded();
    assert!(swapped.stderr.contains("warning: the reference is quantized"), "{swapped}");

    eval(args![json(&at("alone.json"))]).succeeded();
    let run =
        eval(args!["--reference", demo_model(), "--report", at("page.html"), "--compare", at("alone.json")]);
    assert!(run.code() == Some(2) && run.stderr.contains("without a reference, others with one"), "{run}");
}

/// A tokenizer with more tokens than the embedding has rows belongs to a different model.
#[test]
fn a_larger_tokenizer_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    copy_files(&demo_model(), &model);
    let path = model.join("tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let more = serde_json::json!({ "id": 4096, "content": "<more>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true });
    tokenizer["added_tokens"].as_array_mut().unwrap().push(more);
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let run = quant(args!["eval", &model, "--text", "builtin-heldout", "--window", "64", "--windows", "2"]);
    check_message("a larger tokenizer", &run, 4, &["token 4096, but the embedding has only 4096 rows"]);
}

/// A stride of one makes every token a window: only the requested windows are built, and too many are refused.
#[test]
fn small_strides_do_not_take_the_memory() {
    let scratch = tempfile::tempdir().unwrap();
    let text = scratch.path().join("text.txt");
    std::fs::write(&text, "rain ".repeat(60_000)).unwrap();
    let eval = |profile: &str, more: &[&str]| {
        let mut arguments = args!["eval", demo_model(), "--text", &text, "--profile", profile];
        arguments.extend(more.iter().map(Into::into));
        quant(arguments)
    };
    eval("hf-stride-64-1", &["--windows", "2"]).succeeded();
    let run = eval("hf-stride-8192-1", &[]);
    assert_eq!(run.code(), Some(4), "{run}");
    assert!(run.stderr.contains("in total; the limit is"), "{run}");
}

/// Kernels on packed codes give the perplexity of dequantized weights: on the default path, and on those for AVX2 and
/// AVX-512 VNNI if the processor has them.
#[test]
fn kernels_agree_with_dequantized_weights() {
    let scratch = tempfile::tempdir().unwrap();
    for (scheme, format) in [
        ("w4a16-g64-sym", "compressed-tensors"),
        ("w3a16-g32-asym", "compressed-tensors"),
        ("w8a16-channel-sym", "compressed-tensors"),
        ("w4a16-g32-asym", "awq"),
    ] {
        let model = scratch.path().join(scheme);
        let rtn = ["--method", "rtn", "--scheme", scheme, "--format", format].map(Into::into);
        quant(args!["quantize", demo_model(), "-o", &model].into_iter().chain(rtn)).succeeded();
        let eval = |execution: &str, isa: &str| {
            let text = ["--text", "builtin-heldout", "--window", "64", "--windows", "6", "--json"];
            let mut arguments = args!["eval", &model, "--execution", execution];
            arguments.extend(text.map(Into::into));
            let output = command(arguments).env("QUANT_ISA", isa).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            let message = result["tool"]["isa"].as_str().unwrap().to_owned();
            (result["perplexity"]["mean"].as_f64().unwrap(), message)
        };
        let (fake, _) = eval("fake", "");
        for isa in isa_values() {
            let (kernels, message) = eval("kernels", isa);
            assert!(message.contains(", kernels "), "{message}");
            let distance = (kernels / fake - 1.0).abs();
            assert!(distance < 1e-5, "{scheme} on {message}: {kernels}, not {fake}");
        }
    }
}

/// Float products in parts of bf16, here on the emulated tile unit, agree with those in `f32`. Results name them, and
/// neither a gate nor a stored reference mixes them.
#[test]
fn floats_in_parts_agree_and_are_not_mixed() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let eval = |products: &str, more: Vec<std::ffi::OsString>| {
        let text = ["--text", "builtin-heldout", "--window", "24", "--windows", "2"].map(Into::into);
        let mut arguments = args!["eval", demo_model()];
        arguments.extend(text.into_iter().chain(more));
        let mut command = command(arguments);
        command.env("QUANT_ISA", "amxemulated").env("QUANT_FLOAT_PRODUCTS", products);
        Running::start(command).wait()
    };
    let json = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(at(name)).unwrap()).unwrap()
    };
    let output = |name: &str| std::ffi::OsString::from(format!("--json={}", at(name).display()));
    // A baseline knows results by the names of their files.
    for folder in ["f32", "parts"] {
        std::fs::create_dir(at(folder)).unwrap();
    }
    eval("f32", vec![output("f32/held.json"), "--save-reference".into(), at("f32.ref").into()]).succeeded();
    // Parts are the default on this path.
    eval("", vec![output("parts/held.json")]).succeeded();
    let [plain, parts] = ["f32/held.json", "parts/held.json"].map(json);
    let nll = |result: &serde_json::Value| result["perplexity"]["mean"].as_f64().unwrap().ln();
    assert!((nll(&parts) / nll(&plain) - 1.0).abs() < 1e-6, "{} {}", nll(&parts), nll(&plain));
    let isa = |result: &serde_json::Value| result["tool"]["isa"].as_str().unwrap().to_owned();
    assert!(isa(&parts).ends_with(", floats in bf16 parts"), "{}", isa(&parts));
    assert!(!isa(&plain).contains("parts"), "{}", isa(&plain));

    let refused = eval("", vec!["--reference".into(), at("f32.ref").into()]);
    check_message(
        "f32",
        &refused,
        2,
        &["was created with products of floats in f32", "QUANT_FLOAT_PRODUCTS=f32"],
    );
    let [baseline, policy] = ["baseline.json", "policy.toml"].map(at);
    std::fs::write(
        &policy,
        "schema = \"quant-gate-policy/1\"\n[[non_inferiority]]\nmetric = \"perplexity\"\nagainst = \"baseline\"\nmargin = 0.01\n",
    )
    .unwrap();
    quant(args!["gate", at("f32/held.json"), "--baseline", &baseline, "--update"]).succeeded();
    let mixed = quant(args!["gate", at("parts/held.json"), "--policy", policy, "--baseline", baseline]);
    check_message(
        "f32",
        &mixed,
        4,
        &["different products of floats", "f32 in the baseline", "bf16 parts now"],
    );
}

/// The same on the tile unit, here its emulation, which is slow: with activations in parts of bf16, and in integers.
#[test]
fn kernels_agree_on_emulated_tiles() {
    let scratch = tempfile::tempdir().unwrap();
    for scheme in ["w4a16-g128-sym", "w8a8-channel-sym"] {
        let model = scratch.path().join(scheme);
        let rtn = ["--method", "rtn", "--scheme", scheme].map(Into::into);
        quant(args!["quantize", demo_model(), "-o", &model].into_iter().chain(rtn)).succeeded();
        let eval = |execution: &str, isa: &str| {
            let text = ["--text", "builtin-heldout", "--window", "48", "--windows", "1", "--json"];
            let mut arguments = args!["eval", &model, "--execution", execution];
            arguments.extend(text.map(Into::into));
            let mut command = command(arguments);
            if scheme.contains("a8") {
                command.env("QUANT_FLOAT_PRODUCTS", "f32");
            }
            let output = command.env("QUANT_ISA", isa).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            (
                result["perplexity"]["mean"].as_f64().unwrap(),
                result["tool"]["isa"].as_str().unwrap().to_owned(),
            )
        };
        let (kernels, message) = eval("kernels", "amxemulated");
        assert!(message.ends_with(", kernels amxemulated"), "{message}");
        if scheme.contains("a8") {
            // Integers are exact on every path.
            assert_eq!(kernels, eval("kernels", "").0);
        } else {
            let (fake, _) = eval("fake", "");
            assert!((kernels / fake - 1.0).abs() < 1e-5, "{kernels}, not {fake}");
        }
    }
}
