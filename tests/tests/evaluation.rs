//! `quant eval`: what it refuses, and what its pages show. Verdicts on its results are in `gate.rs`.

use quant_tests::files::copy_files;
use quant_tests::program::quant;
use quant_tests::{args, demo_model};

#[test]
fn rules_that_score_nothing_are_refused() {
    let text = ["--text", "builtin-heldout"];
    for (options, code, says) in [
        (vec!["--profile", "gptq-1"], 2, "score nothing"),
        (vec!["--profile", "perplexity"], 2, "unknown profile `perplexity`"),
        (vec!["--profile", "hf-stride-64-65"], 2, "stride of 65"),
        (vec!["--windows", "0", "--window", "64"], 2, "--windows"),
        (vec!["--profile", "wt2-gptq-2048"], 2, "is not WikiText-2"),
        (vec!["--window", "64", "--windows", "999999999"], 4, "999999999 are needed"),
        (vec!["--profile", "llamacpp-99999"], 4, "llama.cpp scores none of a text of less than 2"),
    ] {
        let mut arguments = args!["eval", demo_model()];
        arguments.extend(text.map(Into::into));
        arguments.extend(options.iter().map(Into::into));
        let run = quant(arguments);
        assert_eq!(run.code(), Some(code), "{run}");
        assert!(run.stderr.contains(says), "{run}");
    }
}

/// A last window of one token scores nothing, and is none.
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

/// Pages hold the numbers, and names that are markup stay names.
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
        std::fs::read_to_string(page).unwrap()
    });
    assert_eq!(pages[0], pages[1], "the same numbers make the same page");
    let page = &pages[0];
    for part in [
        "&lt;script&gt;",
        "&lt;b&gt;Rain",
        "Hidden-state error by depth",
        "w3a16-g64-sym, 42 linears",
        "noise floor",
        "Error of every quantized tensor",
        "Worst windows",
        "Provenance",
    ] {
        assert!(page.contains(part), "no {part}");
    }
    // A report of other weights is none of these.
    let stray = at("w3").join("quant_report.json");
    let report = std::fs::read_to_string(&stray).unwrap();
    for (broken, says) in [
        (report.replace("w3a16", "w4a16"), "what these weights are not"),
        (report.replace("quant-report/1", "quant-report/9"), "not of the schema"),
        (report[..report.len() / 2].to_owned(), "quant_report.json"),
    ] {
        let copy = scratch.path().join("stray");
        copy_files(&at("w3"), &copy);
        std::fs::write(copy.join("quant_report.json"), broken).unwrap();
        let page = scratch.path().join("stray.html");
        let run =
            quant(args!["eval", &copy, "--text", &text, "--window", "64", "--report", &page]).succeeded();
        assert!(run.stderr.contains(says), "{run}");
        assert!(!std::fs::read_to_string(page).unwrap().contains("Error of every quantized tensor"));
        std::fs::remove_dir_all(copy).unwrap();
    }
    assert!(!page.contains("<script") && !page.contains("http://") && !page.contains("https://"));

    let page = std::fs::read_to_string(at("rounded.html")).unwrap();
    assert!(page.contains("model.layers.0.self_attn.q_proj.weight") && page.contains("Bit map"));

    // The gate's page has the checks, and says which failed.
    let result = at("result.json");
    let json = format!("--json={}", result.display());
    let eval = args!["eval", at("w3"), "--reference", demo_model(), "--text", &text, "--window", "64", json];
    quant(eval).succeeded();
    std::fs::write(
        at("gate.toml"),
        "schema = \"quant-gate-policy/1\"\n[[cap]]\nmetric = \"kl_p99\"\nat_most = 1e-9\n",
    )
    .unwrap();
    quant(args!["gate", &result, "--baseline", at("baseline.json"), "--update"]).succeeded();
    let (policy, baseline, html) = (at("gate.toml"), at("baseline.json"), at("gate.html"));
    let run = quant(args!["gate", &result, "--policy", policy, "--baseline", baseline, "--report", &html]);
    assert_eq!(run.code(), Some(1), "{run}");
    let page = std::fs::read_to_string(html).unwrap();
    assert!(page.contains("kl_p99") && page.contains("class=\"fail\""));
}
