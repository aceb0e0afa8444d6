//! Runs the documents' commands and compares their options with the program's, so that the two stay consistent.

use std::collections::BTreeSet;
use std::path::Path;

use quant_core::gguf::mixture;
use quant_tests::models::TinyLlama;
use quant_tests::program::{Running, command, quant};
use quant_tests::{args, workspace_root};

fn document(name: &str) -> String {
    std::fs::read_to_string(workspace_root().join(name)).unwrap()
}

/// The commands in a document's `console` blocks, without prompt and comment.
fn commands(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut in_block = false;
    for line in text.lines() {
        if line.starts_with("```") {
            in_block = line == "```console";
        } else if let Some(command) = line.strip_prefix("$ ").filter(|_| in_block) {
            found.push(command.split(" #").next().unwrap_or_default().trim().to_owned());
        }
    }
    found
}

fn substitute(word: &str, scratch: &Path) -> String {
    let name = match word {
        "MODEL" => "model",
        "OUT" => "out",
        "FILE" => "text.txt",
        name @ ("gate.toml" | "baseline.json" | "held-out.json") => name,
        other => match other.split_once('=') {
            Some((option, name)) => return format!("{option}={}", substitute(name, scratch)),
            None => return other.to_owned(),
        },
    };
    scratch.join(name).to_string_lossy().into_owned()
}

/// A model that fits the default scheme, and a text that fills the default window.
fn prepare(scratch: &Path) {
    let model = TinyLlama { hidden: 128, intermediate: 256, heads: 4, kv_heads: 2, ..TinyLlama::default() };
    model.write(&scratch.join("model"));
    std::fs::write(scratch.join("text.txt"), "Rain in the morning. ".repeat(200)).unwrap();
    let policy = "schema = \"quant-gate-policy/1\"\n[[non_inferiority]]\nmetric = \"perplexity\"\n\
                  against = \"baseline\"\nmargin = 0.005\n";
    std::fs::write(scratch.join("gate.toml"), policy).unwrap();
}

#[test]
fn the_readme_s_commands_run() {
    let scratch = tempfile::tempdir().unwrap();
    prepare(scratch.path());
    let all = commands(&document("README.md"));
    assert_eq!(all[..2], ["cargo run --release -- demo", "cargo test --workspace"], "the first screen");
    let mut subcommands = BTreeSet::new();
    for command in &all {
        let words: Vec<String> = command.split(' ').map(|w| substitute(w, scratch.path())).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words[..] {
            // Runs the program that `cargo run` would run, on fewer windows.
            ["cargo", "run", "--release", "--", "demo"] => {
                let run = quant(args!["demo", "--quick"]).succeeded();
                for row in ["float (f16)", "rtn ", "awq "] {
                    assert!(run.stdout.contains(row), "no row `{row}`: {run}");
                }
                subcommands.insert("demo".to_owned());
            }
            ["cargo", "test", "--workspace"] => {}
            ["quant", subcommand, ..] => {
                let run = quant(&words[1..]).succeeded();
                assert!(!run.stdout.is_empty(), "{run}");
                subcommands.insert(subcommand.to_owned());
            }
            _ => panic!("README.md: this test does not support `{command}`"),
        }
    }
    assert_eq!(
        subcommands,
        BTreeSet::from(["demo", "eval", "gate", "generate", "plan", "quantize"].map(str::to_owned))
    );
    assert!(scratch.path().join("out/quant_manifest.json").is_file());
}

/// All `--flags` in a text.
fn flags(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
    let is_flag = |w: &&str| w.len() > 3 && w.starts_with("--") && !w[2..].starts_with('-');
    words.filter(is_flag).map(str::to_owned).collect()
}

/// The flags at the start of lines in `quant COMMAND --help`.
fn flags_of(subcommand: &str) -> BTreeSet<String> {
    let help = quant(subcommand.split(' ').chain(["--help"])).succeeded().stdout;
    let own = help.lines().filter(|l| l.trim_start().starts_with('-'));
    let names = own.flat_map(|l| l.split_whitespace().take_while(|w| w.starts_with('-')).map(str::to_owned));
    let long = names.flat_map(|n| flags(&n)).filter(|f| f != "--help");
    long.collect()
}

/// The options that most people need fit a screen; `--help` lists all of them.
#[test]
fn the_short_help_fits_a_screen() {
    let lines = |verb: &str, option: &str, columns: u32| {
        let mut help = command(args![verb, option]);
        help.env("COLUMNS", columns.to_string());
        let help = Running::start(help).wait().succeeded().stdout;
        assert!(help.lines().all(|line| line.chars().count() <= columns as usize), "{help}");
        help.lines().count()
    };
    for verb in ["quantize", "plan"] {
        let [wide, narrow] = [100, 80].map(|columns| lines(verb, "-h", columns));
        assert!(wide <= 40 && narrow <= 55, "{verb} -h: {wide} lines at 100 columns, {narrow} at 80");
        assert!(lines(verb, "--help", 100) > 3 * wide, "{verb} --help lists every option");
        let all = flags_of(verb);
        for rare in ["--imatrix", "--save-imatrix", "--split-max-size", "--pre", "--requantize"] {
            assert!(all.contains(rare), "{verb} --help does not list {rare}");
        }
    }
}

/// The flags that every command takes have their own section.
#[test]
fn the_options_of_every_command_are_documented() {
    let text = document("docs/cli.md");
    let section = |title: &str| {
        let start = text.find(&format!("\n## {title}\n")).unwrap_or_else(|| panic!("no section `{title}`"));
        let body = &text[start + 4 + title.len()..];
        body[..body.find("\n## ").unwrap_or(body.len())].to_owned()
    };
    let common = flags(&section("For every command"));
    assert_eq!(common, BTreeSet::from(["--quiet", "--threads"].map(str::to_owned)));
    for subcommand in [
        "demo",
        "plan",
        "quantize",
        "job init",
        "job units",
        "job run",
        "job status",
        "merge",
        "eval",
        "compare",
        "gate",
        "inspect",
        "generate",
        "chat",
        "bench",
        "completions",
    ] {
        let body = section(subcommand);
        let usage = body.split("```").nth(1).unwrap_or_else(|| panic!("no usage of `{subcommand}`"));
        let documented: BTreeSet<String> = flags(usage).union(&common).cloned().collect();
        assert_eq!(documented, flags_of(subcommand), "docs/cli.md and `quant {subcommand} --help` differ");
        let unknown: Vec<_> = flags(&body).difference(&documented).cloned().collect();
        assert!(unknown.is_empty(), "docs/cli.md, {subcommand}: {unknown:?}");
    }
}

#[test]
fn the_options_in_the_readme_exist() {
    let all = flags_of("quantize");
    let text = document("README.md");
    let table: String = text.lines().filter(|l| l.starts_with("| `--")).collect();
    let named = flags(&table);
    assert!(named.len() >= 6 && named.is_subset(&all), "{named:?}");
    // The values that the text gives for the flags exist too.
    let model = tempfile::tempdir().unwrap();
    TinyLlama { hidden: 128, intermediate: 256, heads: 4, ..TinyLlama::default() }.write(model.path());
    for line in text.lines().filter(|l| l.starts_with("| `--") && !l.contains("`--ignore`")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let option = cells[1].trim_matches('`');
        for value in cells[2].split('`').skip(1).step_by(2) {
            let value = if value.starts_with('-') { format!("w4a16{value}") } else { value.to_owned() };
            if value == "safetensors" {
                // There is nothing to plan.
                let out = tempfile::tempdir().unwrap();
                let out = out.path().join("out");
                quant(args!["quantize", model.path(), "-o", out, option, value, "--scheme", "bf16"])
                    .succeeded();
                continue;
            }
            let is_of_gguf = option == "--scheme" && mixture(&value).is_some();
            let scheme: &[&str] = match &value[..] {
                _ if is_of_gguf => &["--format", "gguf", "--pre", "gpt-2", "--allow-fallback"],
                "qserve" => &["--scheme", "w4a8-g128-progressive"],
                "modelopt" => &["--scheme", "nvfp4a16"],
                "gguf" => &["--scheme", "q8_0", "--pre", "gpt-2"],
                _ => &[],
            };
            let scheme = scheme.iter().map(Into::into);
            quant(args!["plan", model.path(), option, &value].into_iter().chain(scheme)).succeeded();
        }
    }
}

/// Exit codes are documented in two places.
#[test]
fn the_exit_codes_agree() {
    let first_number = |cell: &str| cell.trim().parse::<u8>().ok();
    let text = document("docs/cli.md");
    let documented: BTreeSet<u8> =
        text.lines().filter_map(|l| first_number(l.strip_prefix('|')?.split('|').next()?)).collect();
    let help = quant(args!["--help"]).succeeded().stdout;
    let (_, codes) = help.split_once("Exit codes:").unwrap();
    let printed: BTreeSet<u8> =
        codes.lines().filter_map(|l| first_number(l.split_whitespace().next()?)).collect();
    assert_eq!(printed, BTreeSet::from([0, 1, 2, 3, 4, 5, 6, 70, 75]));
    assert_eq!(documented, printed);
}

/// The schema in the documentation matches the one that the program prints.
#[test]
fn the_schema_of_recipes_is_the_programs() {
    let printed = quant(args!["plan", "--print-recipe-schema"]).succeeded().stdout;
    let path = workspace_root().join("docs/recipe.schema.json");
    if std::env::var_os("QUANT_BLESS").is_some() {
        std::fs::write(&path, &printed).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(printed == committed, "run this test with QUANT_BLESS=1, and review the difference");
}
