//! `cargo xtask gpu`: makes a directory with tests and benchmarks of the CUDA kernels, for a machine that has a GPU but
//! no Rust toolchain.
//!
//! The tests run here first, in the interpreter, which fills a directory with the PTX that it executed; machine code
//! for the benchmarked kernels is compiled next to it. On the other machine, call `benchmarks/gpu/run.sh`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::cuda;
use crate::support::shell::{
    cargo, directory_bytes, output, remove_dir, root, run as execute, succeeds, target_dir,
};

/// Where to make the directory, and for which architectures.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The directory, which must be new, empty, or made by this command [default: target/gpu]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Architectures to compile the benchmarked kernels for
    #[arg(long, value_delimiter = ',', default_value = "sm_80,sm_86,sm_89,sm_90,sm_120")]
    pub architectures: Vec<String>,
}

/// A test program, and the tests in it that need the interpreter.
struct Test {
    name: &'static str,
    skips: &'static [&'static str],
    /// The tests to run under compute-sanitizer, which is slow.
    sanitized: &'static [&'static str],
}

const TESTS: [Test; 6] = [
    Test { name: "calibration", skips: &["coverage::"], sanitized: &[] },
    Test {
        name: "activation_kernels",
        skips: &["bytes_are_the_floor", "planted_bugs_are_caught"],
        sanitized: &["ragged_rows_are_what_the_cpu_makes"],
    },
    Test {
        name: "linear",
        skips: &[
            "budgets::",
            "planted::",
            "what_they_cost",
            "activations_are_read_once_for_both_matrices",
            "mixed_up_matrices",
            "wrong_functions",
        ],
        sanitized: &["results::w4a16_f16", "results::w4a8", "packing::bytes_are_those_of_the_cpu"],
    },
    Test {
        name: "experts",
        skips: &["planted::", "bytes_of_memory_are_those_of_the_rows"],
        sanitized: &["layer::integer_layers_are_bit_identical_to_the_cpu"],
    },
    Test {
        name: "attention_run",
        skips: &[
            "budgets_are_kept",
            "bytes_are_the_floor",
            "bytes_of_a_workspace_are_kept",
            "planted_bugs_are_found",
        ],
        sanitized: &["what_was_appended_is_attended_to", "splits_join_to_the_whole"],
    },
    Test { name: "device", skips: &["on_a_stand_in"], sanitized: &["calls_of_linears_are_launched"] },
];
/// The package and the program of the benchmark.
const BENCH: [&str; 2] = ["quant-cli", "quant"];
/// The example that compiles the benchmark's kernels in advance.
const IMAGES: &str = "measure_images";
const PACKAGE: &str = "quant-kernels-cuda";
/// A file next to the images, which makes the program use them without asking for a compiler
/// (`quant_kernels_cuda::image_cache::ANY_COMPILER`).
const ANY_COMPILER: &str = "any-compiler";
const SCRIPTS: &str = "benchmarks/gpu";
/// The file that marks a directory as made by this command.
const MARK: &str = "run.sh";

/// Makes the directory.
///
/// # Errors
/// When something cannot be built, a test fails here, or the directory contains something else.
pub fn run(args: &Args) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| target_dir().join("gpu"));
    let is_ours = out.join(MARK).is_file();
    ensure!(
        is_ours || !out.exists() || fs::read_dir(&out)?.next().is_none(),
        "{} contains something else: choose a new directory",
        out.display()
    );
    remove_dir(&out)?;
    fs::create_dir_all(out.join("tests"))?;
    let out = fs::canonicalize(&out)?;
    let images = out.join("images");

    let names: Vec<&str> = TESTS.iter().flat_map(|test| ["--test", test.name]).collect();
    let built = executables(cargo(&["test", "-p", PACKAGE, "--no-run"]).args(names))?;
    for test in &TESTS {
        let program = place(&built, test.name, &out.join("tests").join(test.name))?;
        let listed = output(Command::new(&program).args(["--list"]))?;
        for skip in test.skips.iter().chain(test.sanitized) {
            ensure!(listed.contains(skip), "{} has no test {skip}", test.name);
        }
        let mut command = Command::new(&program);
        command.args(test.skips.iter().flat_map(|skip| ["--skip", skip]));
        cuda::with_toolkit(&mut command)?.env("QUANT_CUDA_CACHE", &images);
        execute(&mut command)?;
    }
    let [package, program] = BENCH;
    let built = executables(&mut cargo(&["build", "--release", "-p", package, "--bin", program]))?;
    place(&built, program, &out.join(program))?;
    let built = executables(&mut cargo(&["build", "-p", PACKAGE, "--example", IMAGES]))?;
    let compiler = tempfile::tempdir().context("cannot create a directory")?;
    let mut compile = Command::new(place(&built, IMAGES, &compiler.path().join(IMAGES))?);
    compile.arg(&images).args(&args.architectures);
    execute(cuda::with_toolkit(&mut compile)?)?;

    let line = |test: &Test| format!("{} {}\n", test.name, test.skips.join(" "));
    fs::write(out.join("tests/list.txt"), TESTS.iter().map(line).collect::<String>())?;
    let lines = |test: &Test| -> String {
        test.sanitized.iter().map(|one| format!("{} {one}\n", test.name)).collect()
    };
    fs::write(out.join("tests/sanitized.txt"), TESTS.iter().map(lines).collect::<String>())?;
    // The other machine uses the kernels compiled here, whichever compiler is installed there.
    fs::write(images.join(ANY_COMPILER), "")?;
    for file in ["README.md", "bench_torch.py", MARK] {
        let from = root().join(SCRIPTS).join(file);
        fs::copy(&from, out.join(file)).with_context(|| format!("cannot copy {}", from.display()))?;
    }
    let parts = [&out, &images, &out.join("tests")];
    let bytes: u64 = parts.into_iter().map(|dir| directory_bytes(dir)).sum::<Result<u64>>()?;
    println!(
        "{}: {:.1} MB; copy it to a machine with a GPU, and run run.sh there",
        out.display(),
        bytes as f64 / 1e6
    );
    Ok(())
}

fn executables(command: &mut Command) -> Result<Vec<Value>> {
    let built = output(command.args(["--message-format", "json-render-diagnostics", "--quiet"]))?;
    let messages = built.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    Ok(messages.filter(|message| message["executable"].is_string()).collect())
}

/// Copies a built program, stripped of debug information if possible.
fn place(built: &[Value], name: &str, to: &Path) -> Result<PathBuf> {
    let found = built.iter().find(|message| message["target"]["name"] == name);
    let from = found.and_then(|message| message["executable"].as_str());
    let from = from.with_context(|| format!("no program {name} was built"))?;
    fs::copy(from, to).with_context(|| format!("cannot copy {from}"))?;
    let _ = succeeds(Command::new("strip").arg(to));
    Ok(to.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_is_carried_is_there() {
        for file in ["README.md", "bench_torch.py", MARK] {
            assert!(root().join(SCRIPTS).join(file).is_file(), "{file}");
        }
        let tests = root().join("kernels-cuda/tests");
        for test in TESTS {
            let (file, directory) = (tests.join(test.name).with_extension("rs"), tests.join(test.name));
            assert!(file.is_file() || directory.join("main.rs").is_file(), "{}", test.name);
        }
    }

    #[test]
    fn programs_are_found_in_what_cargo_says() {
        let artifact: Value = serde_json::json!({"target": {"name": "a"}, "executable": "/nowhere"});
        let directory = tempfile::tempdir().unwrap();
        let to = directory.path().join("a");
        assert!(
            place(std::slice::from_ref(&artifact), "b", &to)
                .unwrap_err()
                .to_string()
                .contains("no program b")
        );
        assert!(place(&[artifact], "a", &to).unwrap_err().to_string().contains("/nowhere"));
    }

    #[test]
    fn a_directory_with_other_things_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("letter"), "dear").unwrap();
        let args = Args { out: Some(directory.path().into()), architectures: Vec::new() };
        assert!(run(&args).unwrap_err().to_string().contains("contains something else"));
        assert!(directory.path().join("letter").is_file());
    }
}
