//! What the tests of kernels share: how one says that it leaves something out.
//!
//! NVRTC and the disassembler belong to a step of CI of their own, `cargo xtask cuda`, which requires them. Elsewhere
//! a test without them says so and passes; it is not noted among what a machine with all models should not leave out.

use std::io::Write;
use std::panic::Location;

/// Set where NVRTC and the disassembler must be there: what is left out then is a failure.
pub const REQUIRED: &str = "QUANT_REQUIRE_NVRTC";

/// Whether what a test needs is there; says aloud that it is not.
///
/// # Panics
/// When it is required.
#[track_caller]
pub fn is_there<E: std::fmt::Display>(needed: Result<(), E>) -> bool {
    let Err(why) = needed else { return true };
    assert!(
        std::env::var_os(REQUIRED).is_none_or(|v| v.is_empty() || v == "0"),
        "{REQUIRED} is set, but: {why}"
    );
    let at = Location::caller();
    // Not by the macro, whose lines are held back where a test passes.
    let line = format!("SKIPPED: {why} ({}:{})\n", at.file(), at.line());
    std::io::stderr().write_all(line.as_bytes()).expect("stderr can be written");
    false
}

/// Whether kernels can be compiled.
#[track_caller]
pub fn has_nvrtc() -> bool {
    is_there(quant_kernels_cuda::require_nvrtc())
}
