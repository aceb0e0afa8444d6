//! Development commands behind `cargo xtask`: one module per command or group of related commands, with shared parts in
//! [`support`].
//!
//! This is a separate library, so that tests can call [`synth`] and [`plant`] directly.
#![forbid(unsafe_code)]

pub mod ablation;
pub mod bench_awq_memory;
pub mod bench_cpu_time;
pub mod bench_eval;
pub mod bench_gguf;
pub mod bench_gptq;
pub mod bench_kernels;
pub mod bench_qoq;
pub mod bench_rtn;
pub mod book;
pub mod charts;
pub mod ci;
pub mod cuda;
pub mod dist;
pub mod fuzz;
pub mod gate_trials;
pub mod gpu;
pub mod interop;
pub mod kill_cycles;
pub mod nightly;
pub mod outside;
pub mod peers_experts;
pub mod peers_kernels;
pub mod peers_models;
pub mod peers_quantizers;
pub mod plant;
pub mod publish;
pub mod python;
pub mod quality;
pub mod quality_floats;
pub mod quality_gguf;
pub mod quality_qoq;
pub mod quality_w8a8;
pub mod same_bytes;
pub mod sanitize;
pub mod sbom;
pub mod search_agreement;
pub mod support;
pub mod synth;
