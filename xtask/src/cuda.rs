//! `cargo xtask cuda`: the CUDA kernels without a GPU, compiled for every architecture and held to registers and instructions.
//!
//! The run-time compiler and the disassembler come from PyPI, into an environment of their own under `target/`; they are
//! under NVIDIA's licence and no part of what is shipped. The workspace's tests of these kernels run once more with
//! them, and what they leave out then is a failure; then those of their C interface, with the feature that it is.
//! `cargo xtask nightly` compiles all variants, and the adapter of candle, for which nvcc is installed beside them.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::ci::TEST_COMMAND;
use crate::support::shell::{cargo, output, remove_dir, root, run as execute, run_both, target_dir};

/// What is installed: the compiler with its own parts, the newest disassemblers that read its code.
const PACKAGES: [&str; 3] =
    ["cuda-toolkit[nvrtc]==13.0.2", "nvidia-cuda-cuobjdump==13.2.78", "nvidia-cuda-nvdisasm==13.2.78"];
/// nvcc with its own parts, and the headers that candle's kernels are built with.
const NVCC_PACKAGES: [&str; 1] = ["cuda-toolkit[nvcc,nvvm,crt,cudart,cccl,nvrtc]==13.0.2"];
/// What candle's build is told about where CUDA is.
const NVCC_PLACES: [&str; 3] = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"];
/// Where tests find the disassembler.
const PROGRAMS: &str = "QUANT_CUDA_BIN";
/// Where tests find a library in the place of the driver's.
const STAND_IN: &str = "QUANT_CUDA_STAND_IN";
/// With this set, tests fail where the compiler is missing.
const REQUIRED: &str = "QUANT_REQUIRE_NVRTC";
/// Where the run-time compiler is looked for.
const COMPILER: &str = "QUANT_NVRTC";
/// With this set, all variants are compiled for all architectures.
const EVERY: &str = "QUANT_EVERY_VARIANT";
const TESTS: &str = "kernels-cuda/tests";
/// The test of the program with `--device cuda`.
const PROGRAM_TEST: &str = "cuda";
/// Those among them that take as long as all others together.
const LINEAR_TESTS: &str = "linear";
/// Those among them that need candle's CUDA.
const CANDLE_TESTS: &str = "candle";
/// The feature of the C library by which it has these kernels, and its tests.
pub const C_FEATURE: &str = "quant-kernels-c/cuda";
const C_TESTS: &str = "cuda_interface";
/// What the C library is built to, with the feature and without.
const C_LIBRARY: [&str; 3] = ["libquant_kernels.a", "libquant_kernels.so", "libquant_kernels.rlib"];

/// Downloads the compiler.
///
/// # Errors
/// When it cannot be had.
pub fn fetch() -> Result<()> {
    toolkit().map(drop)
}

/// Runs the tests.
///
/// # Errors
/// When the compiler cannot be had, or a test fails.
pub fn run() -> Result<()> {
    // The whole workspace is named so that what the tests before have built is taken.
    let suites = |chosen: &[&str], arguments: &[&str]| {
        let mut command = cargo(&TEST_COMMAND);
        for name in chosen {
            command.args(["--test", name]);
        }
        command.args(arguments);
        command
    };
    let names = test_names(&root().join(TESTS))?;
    // Cargo refuses to be asked for tests whose feature is off.
    let names = names.iter().map(String::as_str).filter(|name| *name != CANDLE_TESTS);
    let names: Vec<&str> = names.chain([PROGRAM_TEST]).collect();
    let stand_in = stand_in()?;
    execute(&mut suites(&names, &["--no-run"]))?;
    // The compiler takes one program at a time within a process, so two processes use two cores.
    let (long, others): (Vec<&str>, Vec<&str>) = names.into_iter().partition(|name| *name == LINEAR_TESTS);
    let (mut long, mut others) = (suites(&long, &[]), suites(&others, &[]));
    for command in [&mut long, &mut others] {
        with_toolkit(command)?.env(STAND_IN, &stand_in);
    }
    run_both(&mut others, &mut long)?;

    // Cargo takes the library as it finds it for the one that it built last with these features.
    for name in C_LIBRARY {
        let built = target_dir().join("debug/deps").join(name);
        if built.exists() {
            std::fs::remove_file(&built).with_context(|| format!("cannot remove {}", built.display()))?;
        }
    }
    let mut command = cargo(&TEST_COMMAND);
    command.args(["--features", C_FEATURE, "--test", C_TESTS]);
    execute(with_toolkit(&mut command)?.env(STAND_IN, &stand_in))
}

/// Compiles all listed variants for all architectures, which the tests deal out.
///
/// # Errors
/// When one does not compile as it must.
pub fn every_variant() -> Result<()> {
    let mut command = cargo(&TEST_COMMAND);
    command.args(["--test", "compile"]);
    with_toolkit(&mut command)?.env(EVERY, "1");
    execute(&mut command)
}

/// Compiles the adapter of candle, and candle's own CUDA with it, as far as that goes without a driver: nothing is linked.
/// It has a target directory of its own, so that no other build meets candle's feature.
///
/// # Errors
/// When nvcc cannot be had, or the adapter does not compile without a warning.
pub fn candle() -> Result<()> {
    let toolkit = installed("cuda-nvcc-venv", &NVCC_PACKAGES, &["bin/nvcc", "include", "lib"])?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths([toolkit.join("bin")].into_iter().chain(std::env::split_paths(&path)))
        .context("a path cannot be put in PATH")?;
    let mut command = cargo(&["clippy", "-p", "quant-kernels-cuda", "--features", "candle", "--all-targets"]);
    command.arg("--target-dir").arg(target_dir().join("xtask/candle-cuda")).args(["--", "-D", "warnings"]);
    // For which device candle's kernels are made is asked of one where this does not say.
    command.env("PATH", path).env("CUDA_COMPUTE_CAP", "80");
    for place in NVCC_PLACES {
        command.env(place, &toolkit);
    }
    execute(&mut command)
}

/// A directory with a library in the place of the driver's.
fn stand_in() -> Result<PathBuf> {
    execute(&mut cargo(&["build", "-p", "quant-cuda-stand-in"]))?;
    let directory = target_dir().join("xtask/cuda-stand-in");
    std::fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let made = target_dir().join("debug/libquant_cuda_stand_in.so");
    std::fs::copy(&made, directory.join("libcuda.so"))
        .with_context(|| format!("cannot copy {}", made.display()))?;
    Ok(std::path::absolute(directory)?)
}

/// A command that finds the compiler and the disassembler, and whose tests do not do without.
///
/// # Errors
/// When they cannot be had.
pub fn with_toolkit(command: &mut Command) -> Result<&mut Command> {
    let toolkit = toolkit()?;
    Ok(command.env(COMPILER, toolkit.join("lib")).env(PROGRAMS, toolkit.join("bin")).env(REQUIRED, "1"))
}

/// Cargo's names of the integration tests in a directory.
fn test_names(directory: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let list =
        std::fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    for entry in list {
        let path = entry?.path();
        let is_test = match path.extension() {
            Some(extension) => extension == "rs",
            None => path.join("main.rs").is_file(),
        };
        if is_test {
            let name = path.file_stem().context("a test has a name")?;
            names.push(name.to_string_lossy().into_owned());
        }
    }
    ensure!(!names.is_empty(), "no tests in {}", directory.display());
    names.sort();
    Ok(names)
}

/// The directory with `lib` and `bin`, installed unless it is there.
fn toolkit() -> Result<PathBuf> {
    installed("cuda-venv", &PACKAGES, &["lib", "bin/nvdisasm"])
}

/// The directory of CUDA's packages in an environment of that name, installed unless they are there; it must have these parts.
fn installed(name: &str, packages: &[&str], parts: &[&str]) -> Result<PathBuf> {
    let directory = target_dir().join(name);
    let python = directory.join("bin/python");
    let (stamp, wanted) = (directory.join("cuda-stamp"), packages.join("\n"));
    let is_ready = std::fs::read_to_string(&stamp).is_ok_and(|found| found == wanted);
    if !is_ready {
        remove_dir(&directory)?;
        let base = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
        execute(Command::new(base).args(["-m", "venv"]).arg(&directory))?;
        let mut install = Command::new(&python);
        install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]);
        execute(install.args(packages))?;
    }
    let places =
        output(Command::new(&python).args(["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]))?;
    let toolkit = Path::new(&places).join("nvidia/cu13");
    for part in parts {
        ensure!(toolkit.join(part).exists(), "the packages of CUDA have no {part}");
    }
    // Only now is it finished.
    std::fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))?;
    Ok(std::path::absolute(toolkit)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_named_as_cargo_does() {
        let dir = tempfile::tempdir().unwrap();
        for directory in ["support", "linear"] {
            std::fs::create_dir(dir.path().join(directory)).unwrap();
        }
        for file in ["compile.rs", "linear/main.rs", "support/mod.rs", "notes.txt"] {
            std::fs::write(dir.path().join(file), "").unwrap();
        }
        assert_eq!(test_names(dir.path()).unwrap(), ["compile", "linear"]);
        assert!(test_names(&dir.path().join("support/mod.rs")).is_err());
        let ours = test_names(&root().join(TESTS)).unwrap();
        assert!(["compile", CANDLE_TESTS].iter().all(|name| ours.iter().any(|own| own == name)), "{ours:?}");
        assert!(test_names(&root().join("kernels-c/tests")).unwrap().contains(&C_TESTS.to_owned()));
    }
}
