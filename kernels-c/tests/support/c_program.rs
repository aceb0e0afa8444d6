//! Compiles C programs against the static library that cargo built next to the test.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub fn built(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let directory = test.parent().unwrap();
    let places = [directory.join("libquant_kernels.a"), directory.join("../libquant_kernels.a")];
    places.into_iter().find(|p| p.is_file()).expect("cargo builds the static library with the tests")
}

/// Whether a C compiler is available; if not, prints that the check is skipped.
pub fn has(compiler: &str) -> bool {
    let there = Command::new(compiler).arg("--version").output().is_ok_and(|o| o.status.success());
    if !there {
        let line = format!("SKIPPED: no {compiler} (kernels-c/tests/support/c_program.rs)\n");
        eprint!("{line}");
        if let Some(log) = std::env::var_os("QUANT_SKIP_LOG") {
            let file = std::fs::OpenOptions::new().append(true).create(true).open(log);
            file.and_then(|mut file| file.write_all(line.as_bytes())).expect("a skip must not go unseen");
        }
    }
    there
}

pub fn succeeds(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].map(|o| String::from_utf8_lossy(&o).into_owned()).concat();
    assert!(output.status.success(), "{command:?}: {text}");
    text
}

/// Extra linker arguments. In an AddressSanitizer build they include the ASan runtime of rustc, so the heap of the C
/// program is checked too.
fn extra_link_arguments() -> Vec<String> {
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

/// Compiles a program of `examples` or `tests/programs`; `None` if there is no compiler.
pub fn compile(name: &str) -> Option<PathBuf> {
    if !has("cc") {
        return None;
    }
    let places = ["examples", "tests/programs"].map(|folder| root().join(folder).join(format!("{name}.c")));
    let source = places.iter().find(|path| path.is_file()).unwrap();
    let program = built(name);
    succeeds(
        Command::new("cc")
            .args(["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"])
            .arg(root().join("include"))
            .arg(source)
            .arg(library())
            .args(extra_link_arguments())
            .arg("-o")
            .arg(&program),
    );
    Some(program)
}
