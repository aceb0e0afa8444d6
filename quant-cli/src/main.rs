//! The `quant` command line: arguments, progress and exit codes; the work is done by the crates it
//! drives.
#![forbid(unsafe_code)]

mod cli;
mod commands;
mod device;
mod generation;
mod gguf;
mod hub;
mod inputs;
mod kv;
mod output;
mod progress;
mod provenance;
mod recipe;
mod signals;

use std::process::ExitCode;

use clap::Parser;
use quant_core::Error;

/// Blocks are evaluated in tensors of some megabytes that come and go. The system's allocator gives
/// such pages back each time and faults them in again, which takes longer than small products.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    // What hf-hub would log, we tell ourselves, with a remedy.
    let filter = tracing_subscriber::EnvFilter::try_from_env("QUANT_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn,hf_hub=off"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    // A panic of the tokenizer library on a crafted file is caught and told as an error.
    let usual_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !quant_core::calibrate::panic_is_handled() {
            usual_hook(panic);
        }
    }));
    // Any other panic is a bug of ours; it must end in its own exit code, with a line that says so.
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&cli)));
    let error = match outcome {
        Ok(Ok(code)) => return code,
        Ok(Err(error)) => error,
        Err(_) => Error::Internal("the program panicked".into()),
    };
    if output::is_closed_pipe(&error) {
        return ExitCode::SUCCESS;
    }
    let resuming =
        Some(cli.command).filter(|_| matches!(error, Error::Interrupted)).and_then(|c| c.resuming());
    let remedy = resuming.map_or_else(|| error.remedy(), |command| format!("resume with: {command}"));
    output::tell(&format!("error: {error}\n  {remedy}"));
    ExitCode::from(error.category().exit_code())
}

fn run(cli: &cli::Cli) -> quant_core::Result<ExitCode> {
    // A path that cannot be had is told before anything is computed on another.
    quant_kernels_cpu::Isa::detect_checked().map_err(|error| Error::Usage {
        message: error.to_string(),
        remedy: "set QUANT_ISA to one of these names, or to none for the widest".into(),
    })?;
    let cancel = signals::install()?;
    let threads = match cli.threads {
        Some(threads) => threads,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|e| Error::Internal(format!("threads cannot be started: {e}")))?;
    let session = commands::Session { progress: progress::Progress::new(cli.quiet), cancel };
    pool.install(|| commands::run(&cli.command, &session))
}
