//! Development commands behind `cargo xtask`: one module per command or group of related commands, with shared parts in
//! [`support`].
//!
//! This is a separate library, so that tests can call [`synth`] and [`plant`] directly.
#![forbid(unsafe_code)]

pub mod bench_awq_memory;
pub mod bench_cpu_time;
pub mod bench_kernels;
pub mod bench_rtn;
pub mod bench_workers;
pub mod book;
pub mod charts;
pub mod ci;
pub mod crash_points;
pub mod cuda;
pub mod dist;
pub mod fuzz;
pub mod gpu;
pub mod interop;
pub mod kill_cycles;
pub mod nightly;
pub mod outside;
pub mod plant;
pub mod publish;
pub mod python;
pub mod same_bytes;
pub mod sanitize;
pub mod sbom;
pub mod simulate_scale;
pub mod support;
pub mod synth;
