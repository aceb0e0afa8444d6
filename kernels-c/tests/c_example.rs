//! The C examples, compiled against the static library and run; and the header as C++.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where this test keeps what it builds.
fn built(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// The static library that cargo built beside this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let directory = test.parent().unwrap();
    let places = [directory.join("libquant_kernels.a"), directory.join("../libquant_kernels.a")];
    places.into_iter().find(|p| p.is_file()).expect("cargo builds the static library with the tests")
}

/// Whether a compiler is there; if not, that is noted where skipped checks are.
fn has(compiler: &str) -> bool {
    let there = Command::new(compiler).arg("--version").output().is_ok_and(|o| o.status.success());
    if !there {
        let line = format!("SKIPPED: no {compiler} (kernels-c/tests/c_example.rs)\n");
        eprint!("{line}");
        if let Some(log) = std::env::var_os("QUANT_SKIP_LOG") {
            let file = std::fs::OpenOptions::new().append(true).create(true).open(log);
            file.and_then(|mut file| file.write_all(line.as_bytes())).expect("a skip must not go unseen");
        }
    }
    there
}

fn succeeds(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].map(|o| String::from_utf8_lossy(&o).into_owned()).concat();
    assert!(output.status.success(), "{command:?}: {text}");
    text
}

/// What the library needs beside it: where it is built with AddressSanitizer, the runtime of its compiler, which then
/// watches the heap of the C program, too.
fn beside() -> Vec<String> {
    let mut needed: Vec<String> = ["-lpthread", "-ldl", "-lm"].map(str::to_owned).into();
    if std::env::var("QUANT_SANITIZER").as_deref() == Ok("address") {
        let libraries = succeeds(Command::new("rustc").args(["--print", "target-libdir"]));
        let mut files = std::fs::read_dir(libraries.trim()).unwrap().map(|file| file.unwrap().path());
        let runtime = files.find(|path| path.to_string_lossy().ends_with("_rt.asan.a")).unwrap();
        needed.splice(
            0..0,
            [format!("-Wl,--whole-archive,{},--no-whole-archive", runtime.display()), "-rdynamic".to_owned()],
        );
        needed.extend(["-lrt", "-lresolv"].map(str::to_owned));
    }
    needed
}

/// Compiles an example and runs it on some instruction sets.
#[cfg(unix)]
fn runs(name: &str) {
    if !has("cc") {
        return;
    }
    let program = built(name);
    succeeds(
        Command::new("cc")
            .args(["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"])
            .arg(root().join("include"))
            .arg(root().join(format!("examples/{name}.c")))
            .arg(library())
            .args(beside())
            .arg("-o")
            .arg(&program),
    );
    for isa in ["", "scalar", "avx2"] {
        let text = succeeds(Command::new(&program).env("QUANT_ISA", isa));
        assert!(text.ends_with("done\n"), "{text}");
    }
}

#[test]
#[cfg(unix)]
fn the_shortest_example_runs() {
    runs("hello");
}

#[test]
#[cfg(unix)]
fn the_linear_example_runs() {
    runs("linear");
}

#[test]
#[cfg(unix)]
fn the_attention_example_runs() {
    runs("attention");
}

/// Each alone, without anything before it.
#[test]
#[cfg(unix)]
fn the_header_is_c_and_cpp() {
    for (compiler, language, standard) in
        [("cc", "c", "c99"), ("cc", "c", "c11"), ("g++", "c++", "c++11"), ("g++", "c++", "c++17")]
    {
        if has(compiler) {
            succeeds(
                Command::new(compiler)
                    .args(["-x", language, "-fsyntax-only", "-Wall", "-Wextra", "-Werror"])
                    .arg(format!("-std={standard}"))
                    .arg(root().join("include/quant_kernels.h")),
            );
        }
    }
}
