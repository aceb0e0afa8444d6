//! Compiles the C example against the library and runs it with the stand-in for the driver; compiles the header as C++.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{is_there, on_gpu};
use crate::{images, stand_in};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[track_caller]
fn has(compiler: &str) -> bool {
    let there = Command::new(compiler).arg("--version").output().is_ok_and(|o| o.status.success());
    is_there(if there { Ok(()) } else { Err(format!("no {compiler}")) })
}

fn succeeds(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].map(|o| String::from_utf8_lossy(&o).into_owned()).concat();
    assert!(output.status.success(), "{command:?}: {text}");
    text
}

fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap().join("libquant_kernels.a");
    let bytes = std::fs::read(&library).unwrap();
    let name = b"qz1_cuda_linear_launch";
    // Builds with and without the feature give the library the same name, so a later build without it may have replaced
    // this one.
    assert!(
        bytes.windows(name.len()).any(|window| window == name),
        "{} comes from a different build: remove it and run the test again",
        library.display()
    );
    library
}

#[test]
fn the_example_runs() {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda_linear");
    // `on_a_stand_in` compiles and runs this test in a second process.
    let stand_in = if on_gpu() { return } else { stand_in() };
    if !has("cc") {
        return;
    }
    succeeds(
        Command::new("cc")
            .args(["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"])
            .arg(root().join("include"))
            .arg(root().join("tests/programs/cuda_linear.c"))
            .arg(library())
            .args(["-lpthread", "-ldl", "-lm", "-o"])
            .arg(&program),
    );
    if !quant_kernels_cuda::driver_available() {
        let output = Command::new(&program).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.starts_with("CUDA driver library not found"), "{text}");
    }
    let Some(directory) = stand_in else { return };
    let text = succeeds(Command::new(&program).arg(images()).env("LD_LIBRARY_PATH", directory));
    assert!(text.ends_with("done\n"), "{text}");
}

#[test]
fn the_header_is_c_and_cpp() {
    for (compiler, language, standard) in
        [("cc", "c", "c99"), ("cc", "c", "c11"), ("g++", "c++", "c++11"), ("g++", "c++", "c++17")]
    {
        if has(compiler) {
            succeeds(
                Command::new(compiler)
                    .args(["-x", language, "-fsyntax-only", "-Wall", "-Wextra", "-Werror"])
                    .arg(format!("-std={standard}"))
                    .arg(root().join("include/quant_kernels_cuda.h")),
            );
        }
    }
}
