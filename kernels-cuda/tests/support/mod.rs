//! What the tests of kernels share: how one says that it leaves something out.

use std::io::Write;
use std::panic::Location;

/// Where skipped tests are noted, one a line; the checks of a change read it.
const SKIP_LOG: &str = "QUANT_SKIP_LOG";
/// Set where NVRTC and the disassembler must be there: what is left out then is a failure.
pub const REQUIRED: &str = "QUANT_REQUIRE_NVRTC";

/// Whether what a test needs is there; says aloud that it is not.
///
/// # Panics
/// When it is required, or the skip cannot be noted.
#[track_caller]
pub fn is_there<E: std::fmt::Display>(needed: Result<(), E>) -> bool {
    let Err(why) = needed else { return true };
    assert!(
        std::env::var_os(REQUIRED).is_none_or(|v| v.is_empty() || v == "0"),
        "{REQUIRED} is set, but: {why}"
    );
    let at = Location::caller();
    let line = format!("SKIPPED: {why} ({}:{})\n", at.file(), at.line());
    eprint!("{line}");
    // The log is for what a complete machine should not leave out. The compiler belongs to a step of its own, which requires it.
    if let Some(log) = std::env::var_os(SKIP_LOG).filter(|_| std::env::var_os(REQUIRED).is_some()) {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(&log);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the log of skips can be written");
    }
    false
}

/// Whether kernels can be compiled.
#[track_caller]
pub fn has_nvrtc() -> bool {
    is_there(quant_kernels_cuda::require_nvrtc())
}
