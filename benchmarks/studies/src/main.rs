//! `cargo study`: the studies behind the records under `benchmarks/record/`, each run once or seldom. Checks and the
//! benchmarks that guard against regressions are commands of `cargo xtask`.
#![forbid(unsafe_code)]

mod ablation;
mod bench_eval;
mod bench_gguf;
mod bench_gptq;
mod bench_qoq;
mod gate_trials;
mod peers_experts;
mod peers_kernels;
mod peers_models;
mod peers_quantizers;
mod quality;
mod quality_floats;
mod quality_gguf;
mod quality_qoq;
mod quality_w8a8;
mod search_agreement;
mod support;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo study", about = "Studies of accuracy, speed and memory that write records")]
struct Cli {
    #[command(subcommand)]
    study: Study,
}

#[derive(Subcommand)]
enum Study {
    /// Measure the accuracy loss of each method on the real models, plain and with planted outliers
    Quality(quality::Args),
    /// Check the claims of QoQ on the real models, as they are and with planted outliers
    #[command(name = "quality-qoq")]
    QualityQoq(quality::Args),
    /// Measure the accuracy loss of 8-bit activations on the real models, with and without SmoothQuant
    #[command(name = "quality-w8a8")]
    QualityW8a8(quality::Args),
    /// Measure the accuracy loss of floating-point weights on the real models, compared with integers of the same width
    #[command(name = "quality-floats")]
    QualityFloats(quality::Args),
    /// Measure the accuracy loss of GGUF types on a real model: by llama-quantize, by quant's search and by GPTQ
    #[command(name = "quality-gguf")]
    QualityGguf(quality_gguf::Args),
    /// Measure what each step of QoQ contributes on the real models
    Ablation(ablation::Args),
    /// Compare AWQ's fast search with the reference: choices, regret, time
    SearchAgreement(search_agreement::Args),
    /// Measure the error rates of the accuracy gate on a real model
    GateTrials(gate_trials::Args),
    /// Compare quant's AWQ with llm-compressor's, on the same calibration tokens
    PeersAwq(peers_quantizers::Args),
    /// Compare quant's GPTQ with llm-compressor's and gptqmodel's, on the same calibration tokens
    PeersGptq(peers_quantizers::Args),
    /// Compare quant's SmoothQuant with llm-compressor's, on the same calibration tokens
    #[command(name = "peers-smoothquant")]
    PeersSmoothQuant(peers_quantizers::QualityArgs),
    /// Compare quant's floating-point weights with those of llm-compressor and Model Optimizer on the same tokens
    PeersFloats(quality::Args),
    /// Compare quant's kernels with those of other engines, interleaved within one run
    PeersKernels(peers_kernels::Args),
    /// Compare the experts of a layer in one call with single products and with llama.cpp's experts, interleaved within one run
    PeersExperts(peers_experts::Args),
    /// Compare whole models with llama.cpp: tokens per second of prefill and decode
    PeersModels(peers_models::Args),
    /// Time the evaluator on a model in 1B shape against transformers, in alternating runs
    BenchEval(bench_eval::Args),
    /// Measure the speed of GGUF's searches against llama-quantize
    #[command(name = "bench-gguf")]
    BenchGguf(bench_gguf::Args),
    /// Time one solve and one Hessian of GPTQ against the products in them
    BenchGptq(bench_gptq::Args),
    /// Time the steps of QoQ on a whole synthetic model, and measure its memory
    BenchQoq(bench_qoq::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().study {
        Study::Quality(args) => quality::run(&args),
        Study::QualityQoq(args) => quality_qoq::run(&args),
        Study::QualityW8a8(args) => quality_w8a8::run(&args),
        Study::QualityFloats(args) => quality_floats::run(&args),
        Study::QualityGguf(args) => quality_gguf::run(&args),
        Study::Ablation(args) => ablation::run(&args),
        Study::SearchAgreement(args) => search_agreement::run(&args),
        Study::GateTrials(args) => gate_trials::run(&args),
        Study::PeersAwq(args) => peers_quantizers::run(&args, &peers_quantizers::AWQ),
        Study::PeersGptq(args) => peers_quantizers::run(&args, &peers_quantizers::GPTQ),
        Study::PeersSmoothQuant(args) => peers_quantizers::smoothquant(&args),
        Study::PeersFloats(args) => quality_floats::peers::run(&args),
        Study::PeersKernels(args) => peers_kernels::run(&args),
        Study::PeersExperts(args) => peers_experts::run(&args),
        Study::PeersModels(args) => peers_models::run(&args),
        Study::BenchEval(args) => bench_eval::run(&args),
        Study::BenchGguf(args) => bench_gguf::run(&args),
        Study::BenchGptq(args) => bench_gptq::run(&args),
        Study::BenchQoq(args) => bench_qoq::run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Print the chain of causes. A backtrace would add no information.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// Every study has a row with its record in the README of the benchmarks, and every row names a study.
    #[test]
    fn studies_are_those_of_the_readme() {
        let command = Cli::command();
        let known: std::collections::BTreeSet<&str> =
            command.get_subcommands().map(|c| c.get_name()).collect();
        let readme = include_str!("../../README.md");
        let rows = readme.lines().filter_map(|line| line.strip_prefix("| `cargo study "));
        let listed = rows.filter_map(|row| row.split([' ', '`']).next()).collect();
        assert_eq!(known, listed);
        assert!(known.len() > 15, "{known:?}");
    }

    #[test]
    fn options_are_consistent() {
        Cli::command().debug_assert();
    }
}
