//! `cargo xtask cuda`: tests the CUDA kernels without a GPU. They are compiled for every architecture and checked
//! against their budgets of registers and instructions.
//!
//! The run-time compiler and the disassembler come from PyPI and are installed into their own environment under
//! `target/`. They are under NVIDIA's license and are not part of any release. With them installed, the workspace's
//! tests of these kernels run once more, and a skipped test is now a failure. So do the tests of the C interface.
//! `cargo xtask nightly` compiles all variants and the candle adapter.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::ci::TEST_COMMAND;
use crate::support::shell::{cargo, output, remove_dir, root, run as execute, run_both, target_dir};

/// The compiler with its parts, and disassemblers that can read its code.
const PACKAGES: [&str; 3] =
    ["cuda-toolkit[nvrtc]==13.0.2", "nvidia-cuda-cuobjdump==13.2.78", "nvidia-cuda-nvdisasm==13.2.78"];
/// nvcc with its parts.
const NVCC_PACKAGES: [&str; 1] = ["cuda-toolkit[nvcc,nvvm,crt,cudart,cccl,nvrtc]==13.0.2"];
/// The environment variables that give candle's build the location of CUDA.
const NVCC_PLACES: [&str; 3] = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"];
/// The environment variable that gives tests the location of the disassembler.
const PROGRAMS: &str = "QUANT_CUDA_BIN";
/// The environment variable that gives tests the location of a stand-in for the driver's library.
const STAND_IN: &str = "QUANT_CUDA_STAND_IN";
/// If this variable is set, tests fail when the compiler is missing.
const REQUIRED: &str = "QUANT_REQUIRE_NVRTC";
/// The variable that names the directory of the run-time compiler.
const COMPILER: &str = "QUANT_NVRTC";
/// If this variable is set, tests use all variants.
const EVERY: &str = "QUANT_EVERY_VARIANT";
const TESTS: &str = "kernels-cuda/tests";
/// The test of the program with `--device cuda`.
const PROGRAM_TEST: &str = "cuda";
/// The slowest tests, which take as long as all others together. They run in a process of their own.
const LINEAR_TESTS: &str = "linear";
/// Tests that need candle with its feature `cuda`.
const CANDLE_TESTS: &str = "candle";
/// The feature of the C library that enables these kernels and their tests.
pub const C_FEATURE: &str = "quant-kernels-c/cuda";
const C_TESTS: &str = "cuda_interface";
/// The files that the C library is built into, with and without the feature.
const C_LIBRARY: [&str; 3] = ["libquant_kernels.a", "libquant_kernels.so", "libquant_kernels.rlib"];

/// Downloads the compiler.
///
/// # Errors
/// When the download fails.
pub fn fetch() -> Result<()> {
    toolkit().map(drop)
}

/// Runs the tests.
///
/// # Errors
/// When the compiler is not available, or a test fails.
pub fn run() -> Result<()> {
    // The command names the whole workspace so that the artifacts of the earlier tests are reused.
    let suites = |chosen: &[&str], arguments: &[&str]| {
        let mut command = cargo(&TEST_COMMAND);
        for name in chosen {
            command.args(["--test", name]);
        }
        command.args(arguments);
        command
    };
    let names = test_names(&root().join(TESTS))?;
    let names = names.iter().map(String::as_str).filter(|name| *name != CANDLE_TESTS);
    let names: Vec<&str> = names.chain([PROGRAM_TEST]).collect();
    let stand_in = stand_in()?;
    execute(&mut suites(&names, &["--no-run"]))?;
    // The compiler handles one program at a time per process, so two processes are needed to use two cores.
    let (long, others): (Vec<&str>, Vec<&str>) = names.into_iter().partition(|name| *name == LINEAR_TESTS);
    let (mut long, mut others) = (suites(&long, &[]), suites(&others, &[]));
    for command in [&mut long, &mut others] {
        with_toolkit(command)?.env(STAND_IN, &stand_in);
    }
    run_both(&mut others, &mut long)?;

    // Cargo would assume that an existing library was built with these features, so the library is removed.
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

/// Compiles all listed variants for all architectures; the variants are divided among the tests. Also checks that every
/// instruction of every variant is tested.
///
/// # Errors
/// When a variant does not compile as required, or an instruction has no test.
pub fn every_variant() -> Result<()> {
    let mut command = cargo(&TEST_COMMAND);
    command.args(["--test", "compile", "--test", "calibration"]);
    with_toolkit(&mut command)?.env(EVERY, "1");
    execute(&mut command)
}

/// Compiles the candle adapter with candle's own CUDA code, in its own target directory, so that candle's feature does
/// not affect other builds.
///
/// # Errors
/// When nvcc is not available, or the adapter does not compile without warnings.
pub fn candle() -> Result<()> {
    let toolkit = installed("cuda-nvcc-venv", &NVCC_PACKAGES, &["bin/nvcc", "include", "lib"])?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths([toolkit.join("bin")].into_iter().chain(std::env::split_paths(&path)))
        .context("a directory cannot be added to PATH")?;
    let mut command = cargo(&["clippy", "-p", "quant-kernels-cuda", "--features", "candle", "--all-targets"]);
    command.arg("--target-dir").arg(target_dir().join("xtask/candle-cuda")).args(["--", "-D", "warnings"]);
    // Without this variable, candle's build queries a device for the architecture of its kernels.
    command.env("PATH", path).env("CUDA_COMPUTE_CAP", "80");
    for place in NVCC_PLACES {
        command.env(place, &toolkit);
    }
    execute(&mut command)
}

fn stand_in() -> Result<PathBuf> {
    execute(&mut cargo(&["build", "-p", "quant-cuda-stand-in"]))?;
    let directory = target_dir().join("xtask/cuda-stand-in");
    std::fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let made = target_dir().join("debug/libquant_cuda_stand_in.so");
    std::fs::copy(&made, directory.join("libcuda.so"))
        .with_context(|| format!("cannot copy {}", made.display()))?;
    Ok(std::path::absolute(directory)?)
}

/// Lets a command find the compiler and the disassembler, and makes its tests require them.
///
/// # Errors
/// When they are not available.
pub fn with_toolkit(command: &mut Command) -> Result<&mut Command> {
    let toolkit = toolkit()?;
    Ok(command.env(COMPILER, toolkit.join("lib")).env(PROGRAMS, toolkit.join("bin")).env(REQUIRED, "1"))
}

/// The cargo names of the integration tests in a directory.
pub(crate) fn test_names(directory: &Path) -> Result<Vec<String>> {
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
            let name = path.file_stem().context("a test has a file name")?;
            names.push(name.to_string_lossy().into_owned());
        }
    }
    ensure!(!names.is_empty(), "no tests in {}", directory.display());
    names.sort();
    Ok(names)
}

fn toolkit() -> Result<PathBuf> {
    installed("cuda-venv", &PACKAGES, &["lib", "bin/nvdisasm"])
}

/// The directory of CUDA's packages in the environment of this name, installed if it is missing. The directory must
/// contain these parts.
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
        ensure!(toolkit.join(part).exists(), "the CUDA packages have no {part}");
    }
    // The stamp is written last, so that an incomplete installation is repeated.
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
