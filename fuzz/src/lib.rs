//! Fuzz targets: functions that take any bytes, and panic where something is wrong with what was made of them.
//!
//! The same functions run twice. `cargo test -p quant-fuzz` gives them random bytes and the kept ones of
//! `corpus/`, on stable Rust, with a fixed budget. `cargo xtask fuzz` runs them under libFuzzer, guided by
//! coverage and with AddressSanitizer, from the crate in `libfuzzer/`, which stands outside the workspace.
//!
//! A new target is a function here, a line in [`TARGETS`], and a file in `libfuzzer/fuzz_targets`.
#![forbid(unsafe_code)]

mod input;
mod kernels;

pub use kernels::{pack, packed, round_trip};

/// A target.
pub type Target = fn(&[u8]);

/// All targets by name. The C ABI of the kernels will be one.
pub const TARGETS: [(&str, Target); 3] = [("pack", pack), ("packed", packed), ("round_trip", round_trip)];
