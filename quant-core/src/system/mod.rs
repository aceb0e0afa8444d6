//! Operating system calls that Rust's standard library does not cover: those on files, from
//! [`quant_formats::system`], the available memory, and child processes with limits. No other module of this crate
//! makes any. `docs/crates.md` lists what other systems would need.

#[cfg(target_os = "linux")]
mod child;
mod memory;

pub use quant_formats::system::*;

#[cfg(target_os = "linux")]
pub(crate) use child::{Ending, ProcessLimits, RUNNING_PROGRAM, Socket, WorkerProcess, ending, is_shortage};
pub use memory::available_memory;
