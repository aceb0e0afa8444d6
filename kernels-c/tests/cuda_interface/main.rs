//! The C interface of the CUDA kernels: invalid calls, results, and the C example.
//!
//! Tests that need a device run on the first one if `QUANT_GPU=1`. Otherwise `QUANT_CUDA_STAND_IN` names a directory
//! with a stand-in for the driver, which runs PTX on the interpreter; these tests then run again in a process that
//! loads it. Without the stand-in or without NVRTC they are skipped, or fail if `QUANT_REQUIRE_NVRTC` is set.

mod attention;
mod common;
mod driver;
mod example;
mod experts;
mod launches;
mod linear;
mod misuse;
mod random;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{is_there, on_gpu};

/// The directory of the driver's stand-in, if kernels can be compiled for it.
#[track_caller]
fn stand_in() -> Option<PathBuf> {
    const STAND_IN: &str = "QUANT_CUDA_STAND_IN";
    let directory = std::env::var_os(STAND_IN).filter(|path| !path.is_empty());
    let named = directory.ok_or_else(|| format!("{STAND_IN} names no library in the driver's place"));
    let compiler = quant_kernels_cuda::require_nvrtc().map_err(|e| e.to_string());
    let found = compiler.and(named.clone());
    is_there(found.as_ref().map(|_| ())).then(|| PathBuf::from(named.unwrap_or_default()))
}

/// The directory of compiled kernels, which is kept between runs.
fn images() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-images")
}

/// Without a GPU, runs the tests of this program with the stand-in for the driver.
#[test]
fn on_a_stand_in() {
    if on_gpu() {
        return;
    }
    let Some(directory) = stand_in() else { return };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--test-threads", "2"]).env("LD_LIBRARY_PATH", directory).env("QUANT_GPU", "1");
    let output = command.env("QUANT_CUDA_CACHE", images()).output().unwrap();
    let message =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{message}");
    assert!(message.contains("quantized_rows_are_multiplied ... ok"), "{message}");
}

#[test]
fn all_functions_are_called() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = std::fs::read_to_string(root.join("include/quant_kernels_cuda.h")).unwrap();
    let mut names: Vec<&str> = header
        .lines()
        .filter(|line| !line.trim_start().starts_with("//") && !line.starts_with(" *"))
        .filter_map(|line| {
            let name = &line[line.find("qz1_cuda_")?..line.find('(')?];
            name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_').then_some(name)
        })
        .collect();
    names.sort_unstable();
    assert_eq!(names.len(), 26, "{names:?}");
    let files = std::fs::read_dir(root.join("tests/cuda_interface")).unwrap();
    let tests: String = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap()).collect();
    let tests = tests.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<String>();
    let ends = |rest: &str| !rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    let is_called = |name: &str| tests.match_indices(name).any(|(at, _)| ends(&tests[at + name.len()..]));
    names.retain(|name| !is_called(name));
    assert!(names.is_empty(), "no test calls {names:?}");
}
