//! What a model's files make us execute or expand, and where that happens.
//!
//! A chat template is a program, and a `tokenizer.json` can be made to grow a text without bound, to
//! recurse, or to run an expression that never ends. No check beforehand tells which will. So the rest of the crate
//! never runs either: it asks a [`TextWorker`], which a [`TextWorkers`] has loaded.
//!
//! ```text
//! TextTokenizer ─┐            ┌─► calibrate::InProcess        here: nothing to start, nothing bounded but steps
//! ChatTemplate ──┴─► TextWorker                                                     ▲
//!                             └─► ProcessWorkers ── frames ──► serve (a child) ─────┘
//! ```
//!
//! Who embeds this crate chooses: in this process (the default), in a child of [`ProcessWorkers`], whose program
//! calls [`serve`], or in a worker of their own. The answers are the same.

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
