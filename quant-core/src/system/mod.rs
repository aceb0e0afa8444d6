//! Operating system calls that Rust's standard library does not cover. No other module of this crate makes any. For
//! what other systems would need, see `docs/crates.md`.

#[cfg(target_os = "linux")]
mod child;
mod memory;
mod mount;

pub use quant_formats::system::*;

#[cfg(target_os = "linux")]
pub(crate) use child::{Ending, ProcessLimits, Socket, WorkerProcess, ending, is_shortage};
pub use memory::available_memory;
pub(crate) use mount::is_mount_point;
