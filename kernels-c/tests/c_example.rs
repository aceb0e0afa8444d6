//! Compiles the C examples and programs against the static library and runs them, and compiles the header as C++.

use std::process::Command;

#[path = "support/c_program.rs"]
mod c_program;

use c_program::{compile, has, root, succeeds};

#[cfg(unix)]
fn runs(name: &str) {
    let Some(program) = compile(name) else { return };
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
fn the_readme_shows_the_shortest_example() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
    let readme = read("README.md");
    let (_, program) = readme.split_once("```c\n").unwrap();
    assert_eq!(program.split_once("```").unwrap().0, read("examples/hello.c"));
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

#[test]
#[cfg(unix)]
fn threads_and_processes_share_weights() {
    runs("processes");
}

#[test]
#[cfg(unix)]
fn the_code_of_the_pages_compiles() {
    if !has("cc") {
        return;
    }
    for (page, expected) in [("c.md", 6), ("cuda-c.md", 2)] {
        let text = std::fs::read_to_string(root().join("../docs/kernels").join(page)).unwrap();
        let blocks = text.split("```c\n").skip(1).map(|block| block.split("```").next().unwrap());
        let mut count = 0;
        for block in blocks {
            let file = c_program::built(&format!("{page}-{count}.c"));
            std::fs::write(&file, block).unwrap();
            let strict =
                ["-std=c11", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fopenmp", "-I"];
            succeeds(Command::new("cc").args(strict).arg(root().join("include")).arg(&file));
            count += 1;
        }
        assert_eq!(count, expected, "{page}");
    }
}

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
