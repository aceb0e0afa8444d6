//! `cargo xtask`: the single entry point for checks, test models and benchmarks, on a laptop and in CI.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::{
    ablation, bench_awq_memory, bench_cpu_time, bench_eval, bench_gguf, bench_gptq, bench_kernels, bench_qoq,
    bench_rtn, book, charts, ci, cuda, dist, fuzz, gate_trials, gpu, interop, kill_cycles, nightly, outside,
    peers_experts, peers_kernels, peers_models, peers_quantizers, plant, python, quality, quality_floats,
    quality_gguf, quality_qoq, quality_w8a8, same_bytes, sanitize, search_agreement, synth,
};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Checks, test models and benchmarks of this workspace")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run everything CI checks, with the time of each step
    Ci(ci::Args),
    /// Run what takes too long for CI, such as long property tests, fuzzing and benchmarks
    Nightly(nightly::Args),
    /// Load quant's output with independent implementations
    Interop,
    /// Run the kernels' tests under AddressSanitizer
    Sanitize,
    /// Compile the CUDA kernels for every architecture and test them without a GPU
    Cuda,
    /// Make a directory that tests and benchmarks the CUDA kernels on a machine with a GPU
    Gpu(gpu::Args),
    /// Build the Python package and test it in a fresh virtual environment
    Python,
    /// Build and run programs outside the workspace that link the crates, and count their dependencies
    Outside,
    /// Build the documentation site and check its links
    Book,
    /// Draw the documentation's charts from records
    Charts,
    /// Run the fuzz targets under libFuzzer
    Fuzz(fuzz::Args),
    /// Kill runs, workers of jobs and merges at random points, and compare what they write in the end
    KillCycles(kill_cycles::Args),
    /// Build the static release binary and run it in an empty root
    Dist(dist::Args),
    /// Check that existing recipes give the same bytes as an earlier revision
    SameBytes(same_bytes::Args),
    /// Write a random Llama checkpoint of any size
    Synth(synth::Args),
    /// Plant outlier channels in a real Llama checkpoint without changing its logits
    Plant(plant::Args),
    /// Measure the accuracy loss of each method on the real models, plain and with planted outliers
    Quality(quality::Args),
    /// Check the claims of QoQ on the real models, as they are and with planted outliers
    #[command(name = "quality-qoq")]
    QualityQoq(quality::Args),
    /// Measure what each step of QoQ contributes on the real models
    Ablation(ablation::Args),
    /// Measure the accuracy loss of 8-bit activations on the real models, with and without SmoothQuant
    #[command(name = "quality-w8a8")]
    QualityW8a8(quality::Args),
    /// Measure the accuracy loss of floating-point weights on the real models, compared with integers of the same width
    #[command(name = "quality-floats")]
    QualityFloats(quality::Args),
    /// Compare quant's floating-point weights with those of llm-compressor and Model Optimizer on the same tokens
    PeersFloats(quality::Args),
    /// Measure the accuracy loss of GGUF types on a real model: by llama-quantize, by quant's search and by GPTQ
    #[command(name = "quality-gguf")]
    QualityGguf(quality_gguf::Args),
    /// Measure the speed of GGUF's searches against llama-quantize, and peak memory
    #[command(name = "bench-gguf")]
    BenchGguf(bench_gguf::Args),
    /// Measure the error rates of the accuracy gate on a real model
    GateTrials(gate_trials::Args),
    /// Measure the kernels against the limits of the machine, and write a record
    BenchKernels(bench_kernels::Args),
    /// Compare AWQ's fast search with the reference: choices, regret, time
    SearchAgreement(search_agreement::Args),
    /// Compare quant's AWQ with llm-compressor's, on the same calibration tokens
    PeersAwq(peers_quantizers::Args),
    /// Compare quant's GPTQ with llm-compressor's and gptqmodel's, on the same calibration tokens
    PeersGptq(peers_quantizers::Args),
    /// Compare quant's SmoothQuant with llm-compressor's, on the same calibration tokens
    #[command(name = "peers-smoothquant")]
    PeersSmoothQuant(peers_quantizers::QualityArgs),
    /// Compare quant's kernels with those of other engines, interleaved within one run
    PeersKernels(peers_kernels::Args),
    /// Compare the experts of a layer in one call with single products and with llama.cpp's experts, interleaved within one run
    PeersExperts(peers_experts::Args),
    /// Compare whole models with llama.cpp: tokens per second of prefill and decode
    PeersModels(peers_models::Args),
    /// Time one solve and one Hessian of GPTQ against the products in them
    BenchGptq(bench_gptq::Args),
    /// Time the steps of QoQ on a whole synthetic model, and measure its memory
    BenchQoq(bench_qoq::Args),
    /// Time RTN of a synthetic checkpoint against reading, hashing and writing its bytes
    BenchRtn(bench_rtn::Args),
    /// Compare the CPU time of RTN, AWQ and GPTQ with that of an earlier revision, in pairs
    BenchCpuTime(bench_cpu_time::Args),
    /// Time the evaluator on a model in 1B shape against transformers, in alternating runs
    BenchEval(bench_eval::Args),
    /// Compare the peak memory of AWQ on a model and on one twice as deep
    BenchAwqMemory(bench_awq_memory::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Ci(args) => ci::run(&args),
        Command::Nightly(args) => nightly::run(&args),
        Command::Interop => interop::run(&[]),
        Command::Sanitize => sanitize::run(),
        Command::Cuda => cuda::run(),
        Command::Gpu(args) => gpu::run(&args),
        Command::Python => python::run(),
        Command::Outside => outside::run(),
        Command::Book => book::run(),
        Command::Charts => charts::run(),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::KillCycles(args) => kill_cycles::run(&args),
        Command::Dist(args) => dist::run(&args),
        Command::SameBytes(args) => same_bytes::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Plant(args) => plant::run(&args),
        Command::Quality(args) => quality::run(&args),
        Command::QualityQoq(args) => quality_qoq::run(&args),
        Command::QualityFloats(args) => quality_floats::run(&args),
        Command::PeersFloats(args) => quality_floats::peers::run(&args),
        Command::QualityGguf(args) => quality_gguf::run(&args),
        Command::BenchGguf(args) => bench_gguf::run(&args),
        Command::QualityW8a8(args) => quality_w8a8::run(&args),
        Command::GateTrials(args) => gate_trials::run(&args),
        Command::BenchKernels(args) => bench_kernels::run(&args),
        Command::SearchAgreement(args) => search_agreement::run(&args),
        Command::PeersAwq(args) => peers_quantizers::run(&args, &peers_quantizers::AWQ),
        Command::PeersGptq(args) => peers_quantizers::run(&args, &peers_quantizers::GPTQ),
        Command::PeersSmoothQuant(args) => peers_quantizers::smoothquant(&args),
        Command::PeersKernels(args) => peers_kernels::run(&args),
        Command::PeersExperts(args) => peers_experts::run(&args),
        Command::PeersModels(args) => peers_models::run(&args),
        Command::BenchGptq(args) => bench_gptq::run(&args),
        Command::Ablation(args) => ablation::run(&args),
        Command::BenchQoq(args) => bench_qoq::run(&args),
        Command::BenchRtn(args) => bench_rtn::run(&args),
        Command::BenchCpuTime(args) => bench_cpu_time::run(&args),
        Command::BenchEval(args) => bench_eval::run(&args),
        Command::BenchAwqMemory(args) => bench_awq_memory::run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
