//! Checks that the program starts.
//!
//! Cargo builds a package's binary only for that package's own integration tests. So this file also makes `cargo test
//! --workspace` build `quant` once, with everything else, for the tests in `tests/` that run it.

use std::process::Command;

#[test]
fn it_reports_its_version() {
    let output = Command::new(env!("CARGO_BIN_EXE_quant")).arg("--version").output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), concat!("quant ", env!("CARGO_PKG_VERSION")));
}

#[test]
fn an_unavailable_path_is_reported() {
    let run = |isa: &str| {
        let mut quant = Command::new(env!("CARGO_BIN_EXE_quant"));
        let output = quant.args(["plan", "/no/such/model"]).env("QUANT_ISA", isa).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for isa in ["avx512", "neno"] {
        let (code, text) = run(isa);
        assert_eq!(code, Some(2), "{text}");
        assert!(["QUANT_ISA", isa, "scalar", "f32"].iter().all(|part| text.contains(part)), "{text}");
    }
    // Whitespace and capitals do not matter; the error is that the model does not exist.
    for isa in ["", " Scalar ", "F32"] {
        let (code, text) = run(isa);
        assert!(code != Some(0) && !text.contains("QUANT_ISA"), "{text}");
    }
}
