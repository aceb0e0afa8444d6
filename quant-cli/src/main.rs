//! The `quant` command line: arguments, progress and exit codes; the work is done by the crates it
//! drives.
#![deny(unsafe_code)]

mod allocator;
mod cli;
mod colors;
mod commands;
mod device;
mod generation;
mod gguf;
mod hub;
mod inputs;
mod kv;
mod model_card;
mod output;
mod progress;
mod provenance;
mod recipe;
mod signals;
#[cfg(target_os = "linux")]
mod text_worker;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use quant_core::calibrate::InProcess;
use quant_core::worker::TextWorkers;
use quant_core::{CancelToken, Error};

#[global_allocator]
static ALLOCATOR: allocator::Allocator = allocator::Allocator;

/// Stack of the thread that reads arguments and files, whatever the system's limit is.
const STACK: usize = 8 << 20;

fn main() -> ExitCode {
    #[cfg(target_os = "linux")]
    if text_worker::is_asked_for() {
        return text_worker::run();
    }
    // Its stack is that of four.
    if let Err(error) = allocator::check_room_for_threads(4) {
        return ended(&error, None);
    }
    let program = std::thread::Builder::new().name("main".into()).stack_size(STACK).spawn(begin);
    match program.map(std::thread::JoinHandle::join) {
        Ok(Ok(code)) => code,
        Ok(Err(_)) => ended(&Error::Internal("the program panicked".into()), None),
        Err(error) => ended(&no_threads(&error), None),
    }
}

fn begin() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return output::refused_arguments(&error),
    };
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
    match outcome {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => ended(&error, cli.command.resuming()),
        Err(_) => ended(&Error::Internal("the program panicked".into()), None),
    }
}

/// Prints an error with its remedy, or after an interruption with the command that resumes the run; the exit code that it
/// means.
fn ended(error: &Error, resuming: Option<String>) -> ExitCode {
    if output::is_closed_pipe(error) {
        return ExitCode::SUCCESS;
    }
    let resuming = resuming.filter(|_| matches!(error, Error::Interrupted));
    let remedy = resuming.map_or_else(|| error.remedy(), |command| format!("resume with: {command}"));
    output::tell(&format!("error: {error}\n  {remedy}"));
    ExitCode::from(error.category().exit_code())
}

fn no_threads(error: &dyn std::error::Error) -> Error {
    Error::Unavailable {
        what: "a thread".into(),
        reason: error.to_string(),
        remedy: "ask for fewer (--threads), or raise the limits on processes and memory (ulimit -u and -v)"
            .into(),
    }
}

fn run(cli: &cli::Cli) -> quant_core::Result<ExitCode> {
    // A path that cannot be had is told before anything is computed on another.
    quant_kernels_cpu::Isa::detect_checked().map_err(|error| Error::Usage {
        message: error.to_string(),
        remedy: "set QUANT_ISA to one of these names, or to none for the widest".into(),
    })?;
    let threads = match cli.threads {
        Some(threads) => threads,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    allocator::check_room_for_threads(threads + 2)?;
    let cancel = signals::install()?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(|e| no_threads(&e))?;
    let text_workers = text_workers(threads, &cancel);
    let session = commands::Session { progress: progress::Progress::new(cli.quiet), cancel, text_workers };
    pool.install(|| commands::run(&cli.command, &session))
}

/// What runs tokenizers and templates: processes of their own where the system can limit them.
#[cfg(target_os = "linux")]
fn text_workers(threads: usize, cancel: &CancelToken) -> Arc<dyn TextWorkers> {
    let workers = quant_core::worker::ProcessWorkers::of_this_program(threads, cancel.clone());
    Arc::new(workers.or_else(Arc::new(InProcess)))
}

#[cfg(not(target_os = "linux"))]
fn text_workers(_threads: usize, _cancel: &CancelToken) -> Arc<dyn TextWorkers> {
    Arc::new(InProcess)
}
