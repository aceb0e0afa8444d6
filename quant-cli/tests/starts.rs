//! The program starts.
//!
//! Cargo builds a package's binary for the package's own integration tests, and only for them. So
//! this file also sees to it that `cargo test --workspace` builds `quant` once, with everything
//! else, for the tests in `tests/` that run it.

use std::process::Command;

#[test]
fn it_says_its_version() {
    let output = Command::new(env!("CARGO_BIN_EXE_quant")).arg("--version").output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), concat!("quant ", env!("CARGO_PKG_VERSION")));
}
