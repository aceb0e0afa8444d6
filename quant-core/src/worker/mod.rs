//! Isolates the processing of a model's files that are programs or can expand without bound.
//!
//! A chat template is a program, and a crafted `tokenizer.json` can expand a text without bound, recurse, or run a
//! regular expression that never ends. No check can predict this. So the rest of the crate runs neither itself; it asks
//! a [`TextWorker`] that a [`TextWorkers`] has loaded.
//!
//! ```text
//! TextTokenizer ─┐            ┌─► calibrate::InProcess        in this process: only template steps are limited
//! ChatTemplate ──┴─► TextWorker                                                     ▲
//!                             └─► ProcessWorkers ── frames ──► serve (a child) ─────┘
//! ```
//!
//! Programs that embed this crate choose where it runs: in their own process (the default), in a child process of
//! [`ProcessWorkers`], whose program calls [`serve`], or in a worker of their own. The answers are the same.

mod frame;
#[cfg(target_os = "linux")]
mod limits;
#[cfg(target_os = "linux")]
mod process;
mod serve;
mod wire;
#[cfg(test)]
mod wire_tests;

pub use quant_formats::worker::*;

#[cfg(target_os = "linux")]
pub use self::limits::Limits;
#[cfg(target_os = "linux")]
pub use self::process::{ProcessWorkers, WORKER_ARGUMENT};
pub use self::serve::serve;
