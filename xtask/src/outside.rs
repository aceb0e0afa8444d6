//! `cargo xtask outside`: builds and runs programs outside the workspace, as an engine's author would write them.
//!
//! `read` links only the leaf crates, `score` the evaluator without the pipeline and candle, and `drive` the pipeline.
//! The dependencies of all three are counted, and so are those of the library for C programs. `mistralrs`, which runs
//! every night, implements a layer of mistral.rs. The programs use the workspace's lock file and target directory.

mod decode;
mod scatter;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use self::decode::Outputs;
use self::scatter::scatter;
use crate::support::shell::{cargo, root, run as execute, target_dir};

/// Maximum number of crates that an engine depends on with `quant-formats` and `quant-kernels-cpu`, including these
/// two, and maximum number of crates that `quant-kernels-c` depends on.
const MAX_DEPENDENCIES: usize = 40;
/// Maximum number of crates that a program depends on with the evaluator, without its feature `decoders`.
const MAX_EVALUATOR_CRATES: usize = 78;
/// Maximum number of crates that a program depends on with the pipeline, without the features `cuda` and
/// `chat-templates`.
const MAX_PIPELINE_CRATES: usize = 168;
/// Crates of these two features, which must not be among the dependencies.
const LEFT_OUT: [&str; 4] = ["cudarc", "libloading", "quant-kernels-cuda", "minijinja"];

/// The formats and schemes of the checkpoints that `read` reads, and whether it also reads one whose groups of inputs are
/// not adjacent.
const CHECKPOINTS: [(&str, &str, bool); 6] = [
    ("awq", "w4a16-g32-asym", false),
    ("gptq", "w4a16-g32-sym", true),
    ("compressed-tensors", "w4a16-g32-sym", true),
    ("compressed-tensors", "w8a8-channel-sym", false),
    ("qserve", "w4a8-g128-asym-progressive", false),
    ("modelopt", "wf4a16-g16-nv", false),
];

/// Builds and runs the programs.
///
/// # Errors
/// When a program does not build, prints unexpected output, or has too many dependencies.
pub fn run() -> Result<()> {
    let scratch = scratch("outside-run")?;
    count("read", MAX_DEPENDENCIES, &["candle", "token"])?;
    count("score", MAX_EVALUATOR_CRATES, &["candle", "token", "quant-core"])?;
    count("pipeline", MAX_PIPELINE_CRATES, &LEFT_OUT)?;
    count_c()?;
    build("read", &[])?;
    build("score", &[])?;
    build("pipeline", &["--features", "as-workspace"])?;
    execute(&mut cargo(&["build", "--workspace", "--bin", "quant"]))?;
    let programs = target_dir().join("debug");
    let (quant, read) = (programs.join("quant"), programs.join("read"));
    let model = demo(&scratch)?;
    for (format, out) in checkpoints(&quant, &model, &scratch)? {
        check_outputs(&read, &out, format).with_context(|| out.display().to_string())?;
    }
    let refused = Command::new(&read).arg(&model).output()?;
    ensure!(refused.status.code() == Some(4), "the run on a float model exited with {}", refused.status);

    drive_and_score(&programs, &model, &scratch.join("driven"))
}

/// Builds and runs a program with layers of mistral.rs, whose dependencies take minutes to compile.
///
/// # Errors
/// When it does not build, or its results differ from those of mistral.rs on the dequantized weights.
pub fn mistralrs() -> Result<()> {
    let scratch = scratch("outside-mistralrs")?;
    build("mistralrs", &[])?;
    execute(&mut cargo(&["build", "--workspace", "--bin", "quant"]))?;
    let programs = target_dir().join("debug");
    let model = demo(&scratch)?;
    for (_, out) in checkpoints(&programs.join("quant"), &model, &scratch)? {
        execute(Command::new(programs.join("mistralrs")).arg(out))?;
    }
    Ok(())
}

/// Quantizes the model in all formats, and returns the format and the directory of each checkpoint.
fn checkpoints(quant: &Path, model: &Path, scratch: &Path) -> Result<Vec<(&'static str, PathBuf)>> {
    let mut all = Vec::new();
    for (format, scheme, scatters) in CHECKPOINTS {
        let out = scratch.join(format!("{format}-{scheme}"));
        let mut quantize = Command::new(quant);
        quantize.arg("quantize").arg(model).args(["--method", "rtn", "--format", format, "--scheme", scheme]);
        execute(quantize.arg("-o").arg(&out))?;
        if scatters {
            let scattered = scratch.join(format!("{format}-{scheme}-scattered"));
            scatter(&out, &scattered, format)?;
            all.push((format, scattered));
        }
        all.push((format, out));
    }
    Ok(all)
}

/// Checks that the pipeline and the evaluator compile without their default features.
///
/// # Errors
/// When they do not.
pub fn without_features() -> Result<()> {
    let target = target_dir().join("xtask/no-default-features");
    let mut check = cargo(&["clippy", "-p", "quant-core", "-p", "quant-evaluator", "--no-default-features"]);
    check.arg("--target-dir").arg(&target).args(["--", "-D", "warnings"]);
    execute(&mut check)?;
    // The configuration that engines use: unit tests and the examples of the documentation.
    let mut test = cargo(&["test", "-p", "quant-evaluator", "--no-default-features"]);
    execute(test.arg("--target-dir").arg(target))
}

fn scratch(name: &str) -> Result<PathBuf> {
    let scratch = target_dir().join(name);
    if scratch.exists() {
        std::fs::remove_dir_all(&scratch).with_context(|| format!("cannot remove {}", scratch.display()))?;
    }
    std::fs::create_dir_all(&scratch)?;
    Ok(scratch)
}

fn demo(scratch: &Path) -> Result<PathBuf> {
    let model = scratch.join("model");
    let quant = target_dir().join("debug/quant");
    execute(Command::new(quant).args(["demo", "--save-model"]).arg(&model))?;
    Ok(model)
}

fn drive_and_score(programs: &Path, model: &Path, out: &Path) -> Result<()> {
    let printed = output(Command::new(programs.join("drive")).arg(model).arg(out))?;
    ensure!(printed.ends_with("units\n") && out.join("config.json").is_file(), "{printed}");
    let text = root().join("calibration-data/heldout/narrative.txt");
    let printed = output(Command::new(programs.join("score")).arg(&text))?;
    let perplexity: f64 = printed.trim().parse().with_context(|| printed.clone())?;
    let expected = perplexity_of_pairs(&std::fs::read(text)?);
    // The program's logits are `f32`, and it prints six decimals.
    ensure!((perplexity - expected).abs() <= 1e-5 * expected, "perplexity {perplexity}, expected {expected}");
    println!("outside: perplexity of the counted pairs {perplexity}, expected {expected:.6}");
    Ok(())
}

/// The perplexity that the program `score` must report: that of the first 16 windows of 512 bytes, with probabilities
/// from the counts of all pairs of bytes in the text, plus one.
fn perplexity_of_pairs(text: &[u8]) -> f64 {
    let (mut pairs, mut firsts) = (BTreeMap::<[u8; 2], f64>::new(), [256.0; 256]);
    for pair in text.windows(2) {
        *pairs.entry([pair[0], pair[1]]).or_insert(1.0) += 1.0;
        firsts[usize::from(pair[0])] += 1.0;
    }
    let scored = text.chunks_exact(512).take(16).flat_map(|window| window.windows(2));
    let nll: Vec<f64> =
        scored.map(|pair| (firsts[usize::from(pair[0])] / pairs[&[pair[0], pair[1]]]).ln()).collect();
    (nll.iter().sum::<f64>() / nll.len() as f64).exp()
}

fn directory(package: &str) -> PathBuf {
    root().join("tests/outside").join(package)
}

/// Cargo in this package, with the workspace's versions.
fn cargo_in(package: &str, args: &[&str]) -> Result<Command> {
    let directory = directory(package);
    std::fs::copy(root().join("Cargo.lock"), directory.join("Cargo.lock"))?;
    let mut command = cargo(args);
    command.current_dir(directory).env("CARGO_TARGET_DIR", target_dir());
    Ok(command)
}

/// Builds a package, and prints how many crates were compiled.
fn build(package: &str, options: &[&str]) -> Result<()> {
    let started = Instant::now();
    let mut command = cargo_in(package, &["build", "--message-format", "json-render-diagnostics"])?;
    let messages = output(command.args(options))?;
    let (compiled, reused) = artifacts(&messages)?;
    println!(
        "outside: {package} built in {:.1} s: compiled {} ({}), reused {reused}",
        started.elapsed().as_secs_f64(),
        compiled.len(),
        compiled.join(" ")
    );
    Ok(())
}

/// Returns the names of the crates that cargo compiled, according to its messages, and the number of those that it
/// reused.
fn artifacts(messages: &str) -> Result<(Vec<String>, usize)> {
    let (mut compiled, mut reused) = (Vec::new(), 0);
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        match (message["reason"].as_str(), message["fresh"].as_bool()) {
            (Some("compiler-artifact"), Some(true)) => reused += 1,
            (Some("compiler-artifact"), _) => {
                compiled.push(message["target"]["name"].as_str().unwrap_or_default().to_owned());
            }
            _ => {}
        }
    }
    Ok((compiled, reused))
}

/// Counts the crates that a program links. Fails if there are more than `max`, or if a name contains an entry of
/// `without`.
fn count(package: &str, max: usize, without: &[&str]) -> Result<()> {
    count_in(package, cargo_in(package, &TREE)?, max, without)
}

fn count_c() -> Result<()> {
    let mut tree = cargo(&TREE);
    tree.args(["-p", "quant-kernels-c"]);
    count_in("quant-kernels-c", tree, MAX_DEPENDENCIES, &["candle", "token"])
}

/// Arguments of cargo for the crates that a package links, one per line.
const TREE: [&str; 7] = ["tree", "--edges", "normal", "--prefix", "none", "--format", "{p}"];

fn count_in(package: &str, mut tree: Command, max: usize, without: &[&str]) -> Result<()> {
    let tree = output(&mut tree)?;
    let crates: BTreeSet<&str> =
        tree.lines().filter_map(|line| line.split(' ').next()).filter(|name| *name != package).collect();
    println!("outside: {package} depends on {} crates", crates.len());
    ensure!(crates.len() <= max, "more than {max}: {crates:?}");
    let unwanted = crates.iter().find(|name| without.iter().any(|part| name.contains(part)));
    ensure!(unwanted.is_none(), "{unwanted:?} among {crates:?}");
    Ok(())
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "{command:?} ended with {}\n{text}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(text)
}

/// Compares what `read` prints with the outputs computed from the bytes.
fn check_outputs(read: &Path, checkpoint: &Path, format: &str) -> Result<()> {
    let printed = output(Command::new(read).arg(checkpoint))?;
    let expected = decode::outputs(checkpoint, format)?;
    ensure!(expected.len() >= 28, "{} linears", expected.len());
    agree(&expected, &printed_outputs(&printed)?)
}

/// Name, shape and outputs of a linear.
type Printed = (String, String, Vec<f64>);

/// The linears that `read` prints, in the order of their names.
fn printed_outputs(printed: &str) -> Result<Vec<Printed>> {
    let linear = |line: &str| -> Result<Printed> {
        let (head, values) = line.split_once(": ").context("no outputs")?;
        let mut words = head.splitn(3, ' ').map(str::to_owned);
        let (name, _, shape) = (words.next(), words.next(), words.next());
        let values = values.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        Ok((name.unwrap_or_default(), shape.context("no shape")?, values))
    };
    let mut all: Vec<_> =
        printed.lines().map(|line| linear(line).with_context(|| line.to_owned())).collect::<Result<_>>()?;
    all.sort_by(|(a, ..), (b, ..)| a.cmp(b));
    Ok(all)
}

/// Fails unless all outputs are within their bounds.
fn agree(expected: &[Outputs], printed: &[Printed]) -> Result<()> {
    ensure!(printed.len() == expected.len(), "{} linears, not {}", printed.len(), expected.len());
    for (expected, (name, shape, values)) in expected.iter().zip(printed) {
        let Outputs { name: expected_name, shape: expected_shape, values: exact, bounds } = expected;
        ensure!(name == expected_name, "found {name} instead of {expected_name}");
        ensure!(*shape == format!("{expected_shape:?}"), "{name} has shape {shape}, not {expected_shape:?}");
        ensure!(values.len() == exact.len(), "{name} has {} outputs, not {}", values.len(), exact.len());
        for (o, ((value, exact), bound)) in values.iter().zip(exact).zip(bounds).enumerate() {
            ensure!(
                (value - exact).abs() <= *bound,
                "{name}: output {o} is {value}, but must be within {bound:e} of {exact}"
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_are_short_and_outside() {
        let workspace = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
        assert!(workspace.contains("\"tests/outside\""));
        for (package, file, max) in [
            ("read", "src/main.rs", 50),
            ("pipeline", "src/bin/drive.rs", 60),
            ("score", "src/main.rs", 90),
            ("mistralrs", "src/layer.rs", 240),
        ] {
            let text = std::fs::read_to_string(directory(package).join(file)).unwrap();
            assert!(text.lines().count() <= max, "{file}");
            assert!(
                std::fs::read_to_string(directory(package).join("Cargo.toml"))
                    .unwrap()
                    .contains("[workspace]")
            );
        }
    }

    /// The members of the workspace.
    fn members() -> Vec<String> {
        let workspace = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
        let (_, members) = workspace.split_once("members = [").unwrap();
        let (members, _) = members.split_once(']').unwrap();
        members.split('"').skip(1).step_by(2).map(str::to_owned).collect()
    }

    /// The files and folders in a folder.
    fn entries(folder: &Path) -> Vec<PathBuf> {
        std::fs::read_dir(folder).map_or(Vec::new(), |all| all.map(|entry| entry.unwrap().path()).collect())
    }

    /// The lines of an example: a file, or all files of a folder with a `main.rs`, as cargo finds them. A file must not
    /// include another one, which would make it longer than it looks. `None` if it is no example.
    fn lines_of_example(path: &Path) -> Option<usize> {
        let text = |path: &Path| std::fs::read_to_string(path).unwrap();
        if path.join("main.rs").is_file() {
            return Some(entries(path).iter().map(|file| text(file).lines().count()).sum());
        }
        let is_program = path.extension().is_some_and(|e| e == "rs" || e == "c");
        is_program.then(|| {
            let text = text(path);
            let is_part =
                |line: &str| line.starts_with("mod ") && line.ends_with(';') || line.contains("include!");
            assert!(!text.lines().any(is_part), "{} has parts in other files", path.display());
            text.lines().count()
        })
    }

    #[test]
    fn every_library_has_short_examples() {
        let libraries = [
            "formats",
            "quant-core",
            "eval",
            "kernels-cpu",
            "kernels-cuda",
            "kernels-c",
            "candle",
            "calibration-data",
        ];
        let members = members();
        assert!(libraries.iter().all(|library| members.iter().any(|member| member == library)));
        for member in members {
            let files = entries(&root().join(&member).join("examples"));
            let examples = files.iter().filter_map(|path| Some((path, lines_of_example(path)?)));
            let examples: Vec<_> = examples.collect();
            assert!(!examples.is_empty() || !libraries.contains(&&*member), "{member} has no example");
            for (path, lines) in examples {
                let is_c = path.extension().is_some_and(|e| e == "c");
                assert!(lines < 40 && (lines <= 30 || !is_c), "{}: {lines} lines", path.display());
            }
        }
    }

    #[test]
    fn every_published_crate_is_documented() {
        let page = std::fs::read_to_string(root().join("docs/crates.md")).unwrap();
        let section = |heading: &str| {
            let (_, section) = page.split_once(heading).unwrap();
            section.split("\n#").next().unwrap()
        };
        let sections = ["# Crates for engine authors", "\n## Examples", "\n## Stability"].map(section);
        let mut published = 0;
        for member in members() {
            let manifest = std::fs::read_to_string(root().join(member).join("Cargo.toml")).unwrap();
            let (_, name) = manifest.split_once("name = \"").unwrap();
            let (name, _) = name.split_once('"').unwrap();
            if manifest.lines().any(|line| line.starts_with("publish")) {
                continue;
            }
            published += 1;
            for section in sections {
                let cells = section.lines().filter_map(|line| line.split('|').nth(1));
                let found = cells.filter(|cell| cell.contains(&format!("`{name}`"))).count();
                let heading = section.lines().find(|line| !line.is_empty());
                assert!(found == 1, "docs/crates.md: {found} rows for {name} under {heading:?}");
            }
        }
        assert!(published > 5, "{published} published crates");
    }

    /// With other settings, `cargo xtask ci` would compile these crates a third time.
    #[test]
    fn crates_of_the_registry_have_the_settings_of_the_workspace() {
        let settings = |path: PathBuf| {
            let text = std::fs::read_to_string(path).unwrap();
            let sections = text.split("\n[profile.dev.package.").skip(1);
            let sections = sections.map(|section| section.split("\n\n").next().unwrap_or(section).trim());
            sections.map(str::to_owned).collect::<BTreeSet<_>>()
        };
        let others = ["quant-", "xtask]", "candle-transformers]"];
        let registry = |section: &String| !others.iter().any(|name| section.starts_with(name));
        let here = settings(directory("pipeline").join("Cargo.toml"));
        let there = settings(root().join("Cargo.toml"));
        let [here, there] = [here, there].map(|all| all.into_iter().filter(registry).collect::<Vec<_>>());
        assert!(here.len() > 10, "{here:?}");
        assert_eq!(here, there);
    }

    #[test]
    fn messages_of_cargo_are_read() {
        let messages = "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"a\"},\"fresh\":true}\n\
             {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"b\"},\"fresh\":false}\n\
             {\"reason\":\"build-finished\",\"success\":true}\n";
        assert_eq!(artifacts(messages).unwrap(), (vec!["b".to_owned()], 1));
        assert!(artifacts("Compiling a").is_err());
    }

    #[test]
    fn outputs_are_read_and_compared() {
        let printed = "c w4a16-g32-sym [2, 64]: 2.0e0 3e0\na.b w4a16-g32-sym [2, 64]: -1.5e0 0e0\n";
        let all = printed_outputs(printed).unwrap();
        let of = |name: &str, values: [f64; 2]| (name.to_owned(), "[2, 64]".to_owned(), values.to_vec());
        assert_eq!(all, [of("a.b", [-1.5, 0.0]), of("c", [2.0, 3.0])]);
        let exact = |name: &str, values: [f64; 2]| Outputs {
            name: name.into(),
            shape: [2, 64],
            values: values.to_vec(),
            bounds: vec![1e-3; 2],
        };
        let expected = [exact("a.b", [-1.5005, 0.0]), exact("c", [2.0, 3.0])];
        assert!(agree(&expected, &all).is_ok());
        assert!(agree(&expected, &all[..1]).is_err());
        let change = |change: fn(&mut Outputs)| {
            let mut changed = expected.clone();
            change(&mut changed[1]);
            agree(&changed, &all).unwrap_err().to_string()
        };
        assert!(change(|c| c.values.swap(0, 1)).contains("c: output 0 is 2"));
        assert!(change(|c| c.values[1] = 3.002).contains("c: output 1 is 3"));
        assert!(change(|c| c.values[1] = f64::NAN).contains("c: output 1 is 3"));
        assert!(change(|c| c.name = "d".into()).contains("found c instead of d"));
        assert!(change(|c| c.shape = [64, 2]).contains("has shape [2, 64]"));
        assert!(change(|c| c.values.truncate(1)).contains("has 2 outputs"));
        for text in ["a.b", "a.b x [2, 64]: one", "a.b x: 1"] {
            assert!(printed_outputs(text).is_err(), "{text}");
        }
    }
}
