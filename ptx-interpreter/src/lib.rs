//! Runs PTX on the CPU.
mod access;
mod atomic;
mod convert;
mod counters;
mod decode;
mod decode_memory;
mod decode_warp;
mod error;
mod exchange;
mod execute;
mod float;
mod integer;
mod launch;
mod machine;
mod matrix;
mod memory;
mod operation;
mod resolve;
mod rounding;
mod shared;
mod syntax;
mod token;
mod types;
mod warp;

pub use counters::{BufferTraffic, Counters, Traffic, Wavefronts};
pub use error::{Error, Fault, FaultKind, Result};
pub use launch::{
    Argument, BlockOrder, Launch, MOST_SHARED, MOST_THREADS, Module, Options, Report, WarpOrder,
};
pub use memory::Memory;
