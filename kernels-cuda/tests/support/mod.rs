//! Shared by the tests of kernels: how a test reports that it is skipped.
//!
//! Only `cargo xtask cuda` requires NVRTC and the disassembler. Otherwise, a test that lacks them prints a message and
//! passes.

// Each test program uses only a part of this module.
#![allow(dead_code)]

pub mod gpu;
pub mod machine;

use std::io::Write;
use std::panic::Location;

/// If this environment variable is set, NVRTC and the disassembler are required: skipped tests fail.
pub const REQUIRED: &str = "QUANT_REQUIRE_NVRTC";

/// If this environment variable is set, tests use all variants instead of some of each kernel.
const EVERY: &str = "QUANT_EVERY_VARIANT";

/// Whether tests use all variants.
pub fn every_variant() -> bool {
    std::env::var_os(EVERY).is_some_and(|value| !value.is_empty() && value != "0")
}

/// Whether something that a test needs is available. If not, prints that the test is skipped.
///
/// # Panics
/// If it is not, although `QUANT_REQUIRE_NVRTC` is set.
#[track_caller]
pub fn is_there<E: std::fmt::Display>(needed: Result<(), E>) -> bool {
    let Err(why) = needed else { return true };
    assert!(
        std::env::var_os(REQUIRED).is_none_or(|v| v.is_empty() || v == "0"),
        "{REQUIRED} is set, but: {why}"
    );
    let at = Location::caller();
    // The test harness would capture the output of `eprintln!` in tests that pass.
    let line = format!("SKIPPED: {why} ({}:{})\n", at.file(), at.line());
    std::io::stderr().write_all(line.as_bytes()).expect("stderr can be written");
    false
}

/// Whether kernels can be compiled or, on a GPU, come precompiled.
#[track_caller]
pub fn has_nvrtc() -> bool {
    machine::on_gpu() || is_there(quant_kernels_cuda::require_nvrtc())
}
