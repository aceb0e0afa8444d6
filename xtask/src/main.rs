//! `cargo xtask`: the single entry point for checks, test models and benchmarks, on a laptop and in CI. Studies that
//! are run seldom are in `benchmarks/studies`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use xtask::{
    bench_awq_memory, bench_cpu_time, bench_kernels, bench_rtn, bench_workers, book, charts, ci,
    crash_points, cuda, dist, fuzz, gpu, interop, kill_cycles, nightly, outside, plant, python, same_bytes,
    sanitize, simulate_scale, synth,
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
    /// Make every operation on the disk fail once, or be the last before a loss of power
    CrashPoints(crash_points::Args),
    /// Build the static release binary and run it in an empty root
    Dist(dist::Args),
    /// Check that existing recipes give the same bytes as an earlier revision
    SameBytes(same_bytes::Args),
    /// Write a random Llama checkpoint of any size
    Synth(synth::Args),
    /// Plant outlier channels in a real Llama checkpoint without changing its logits
    Plant(plant::Args),
    /// Predict how long a job takes on many machines
    SimulateScale(simulate_scale::Args),
    /// Measure the kernels against the limits of the machine, and write a record
    BenchKernels(bench_kernels::Args),
    /// Time RTN of a synthetic checkpoint against reading, hashing and writing its bytes
    BenchRtn(bench_rtn::Args),
    /// Compare the CPU time of RTN, AWQ and GPTQ with that of an earlier revision, in pairs
    BenchCpuTime(bench_cpu_time::Args),
    /// Compare the peak memory of AWQ on a model and on one twice as deep
    BenchAwqMemory(bench_awq_memory::Args),
    /// Compare a job that two workers compute with one process, on one thread each
    BenchWorkers(bench_workers::Args),
}

/// The commands by purpose, as the help lists them.
const GROUPS: [(&str, &[&str]); 4] = [
    (
        "For every change",
        &[
            "ci",
            "interop",
            "cuda",
            "python",
            "outside",
            "sanitize",
            "kill-cycles",
            "crash-points",
            "same-bytes",
        ],
    ),
    ("Every night", &["nightly", "book", "fuzz", "dist"]),
    ("Tools", &["synth", "plant", "charts", "gpu", "simulate-scale"]),
    ("Benchmarks", &["bench-kernels", "bench-rtn", "bench-cpu-time", "bench-awq-memory", "bench-workers"]),
];

/// The help, with the commands in groups, which clap does not support.
fn help(cli: &clap::Command) -> String {
    let mut text =
        format!("{}\n\nUsage: cargo xtask <COMMAND>\n", cli.get_about().cloned().unwrap_or_default());
    for (title, names) in GROUPS {
        text += &format!("\n{title}:\n");
        for command in names.iter().filter_map(|name| cli.find_subcommand(name)) {
            let about = command.get_about().cloned().unwrap_or_default();
            text += &format!("  {:17} {about}\n", command.get_name());
        }
    }
    text + "\n`cargo xtask COMMAND --help` lists the options of a command. `cargo study --help` lists the studies behind \
            the other records of benchmarks/record.\n"
}

fn main() -> ExitCode {
    let cli = Cli::command();
    let help = help(&cli);
    let matches = cli.override_help(help).get_matches();
    let parsed = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let outcome = match parsed.command {
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
        Command::CrashPoints(args) => crash_points::run(&args),
        Command::Dist(args) => dist::run(&args),
        Command::SameBytes(args) => same_bytes::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Plant(args) => plant::run(&args),
        Command::SimulateScale(args) => simulate_scale::run(&args),
        Command::BenchKernels(args) => bench_kernels::run(&args),
        Command::BenchRtn(args) => bench_rtn::run(&args),
        Command::BenchCpuTime(args) => bench_cpu_time::run(&args),
        Command::BenchAwqMemory(args) => bench_awq_memory::run(&args),
        Command::BenchWorkers(args) => bench_workers::run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_lists_every_command_once() {
        let cli = Cli::command();
        let mut all: Vec<&str> = cli.get_subcommands().map(|command| command.get_name()).collect();
        let mut grouped = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect::<Vec<_>>();
        all.sort_unstable();
        grouped.sort_unstable();
        assert_eq!(all, grouped);
        let help = help(&cli);
        assert!(help.contains("  fuzz              Run the fuzz targets under libFuzzer\n"), "{help}");
        Cli::command().debug_assert();
    }
}
