//! The `quant` command line: arguments, progress and exit codes. The Python package embeds this library, which gives it
//! the same command line.
#![deny(unsafe_code)]

pub mod allocator;
mod cli;
mod colors;
pub mod commands;
pub mod device;
mod foreign;
pub mod generation;
mod gguf;
mod hub;
mod inputs;
pub mod kv;
pub mod output;
pub mod progress;
pub mod provenance;
mod recipe;
mod signals;
mod snapshot;
pub mod system;
#[cfg(target_os = "linux")]
pub mod text_worker;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Parser;
use quant_core::calibrate::InProcess;
#[cfg(target_os = "linux")]
use quant_core::worker::ProcessWorkers;
use quant_core::worker::TextWorkers;
use quant_core::{CancelToken, Error};

/// Stack size of the thread that runs the program, which does not depend on the system's limit.
const STACK: usize = 8 << 20;
/// Stack size of the other threads: Rust's default, which `RUST_MIN_STACK` would change.
const THREAD_STACK: usize = 2 << 20;

/// A program that embeds this library.
#[derive(Debug, Clone)]
pub struct Embedding {
    /// The file that contains this code. A run can only be resumed with the file that started it.
    pub code: PathBuf,
    /// The command that starts a process which calls [`text_worker`], or `None` if tokenizers and templates run in this
    /// process.
    pub worker: Option<(PathBuf, Vec<OsString>)>,
}

/// What runs this library.
pub enum Caller {
    /// The executable.
    Executable {
        /// Makes the allocator return freed memory to the system early. Commands whose memory use is predicted call it.
        return_memory_early: fn(),
    },
    /// A program that embeds this library, and that has an allocator of its own.
    Embedding(Embedding),
}

/// Runs the program with these arguments, the first of which is its name, and returns its exit code.
pub fn main(arguments: Vec<OsString>, caller: Caller) -> u8 {
    #[cfg(target_os = "linux")]
    if text_worker::is_asked_for(&arguments) {
        return text_worker::run();
    }
    // The thread that runs the program needs as much memory as four ordinary threads.
    if let Err(error) = allocator::check_room_for_threads(4) {
        return ended(&error, None);
    }
    let program = std::thread::Builder::new()
        .name("main".into())
        .stack_size(STACK)
        .spawn(move || begin(&arguments, caller));
    match program.map(std::thread::JoinHandle::join) {
        Ok(Ok(code)) => code,
        Ok(Err(_)) => ended(&Error::Internal("the program panicked".into()), None),
        Err(error) => ended(&no_threads(&error), None),
    }
}

fn begin(arguments: &[OsString], caller: Caller) -> u8 {
    let cli = match cli::Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => return output::refused_arguments(&foreign::explained(error, arguments)),
    };
    // hf-hub's log is disabled: the program reports those errors itself.
    let filter = tracing_subscriber::EnvFilter::try_from_env("QUANT_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn,hf_hub=off"));
    // A log in a file has no colors.
    let colors = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colors).with_writer(std::io::stderr).init();
    // A panic of the tokenizer library on a crafted file is caught and reported as an error.
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !quant_core::calibrate::panic_is_handled() {
            default_hook(panic);
        }
    }));
    // Any other panic is a bug in this program.
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&cli, caller)));
    match outcome {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => {
            let interrupted = matches!(error, Error::Interrupted);
            ended(&error, interrupted.then(|| cli.command.after_interruption(arguments)))
        }
        Err(_) => ended(&Error::Internal("the program panicked".into()), None),
    }
}

/// Prints an error with its remedy, or with `remedy` if there is a more specific one. Returns the exit code.
fn ended(error: &Error, remedy: Option<String>) -> u8 {
    if output::is_closed_pipe(error) {
        return 0;
    }
    let remedy = remedy.unwrap_or_else(|| error.remedy().to_string());
    output::print_message(&format!("error: {error}\n  {remedy}"));
    error.category().exit_code()
}

fn no_threads(error: &dyn std::error::Error) -> Error {
    Error::Unavailable {
        what: "a thread".into(),
        reason: error.to_string(),
        remedy: "request fewer threads (‹threads›), or raise the limits on processes and memory (ulimit -u \
            and -v)"
            .into(),
    }
}

fn run(cli: &cli::Cli, caller: Caller) -> quant_core::Result<u8> {
    let embedding = match caller {
        Caller::Embedding(embedding) => Some(embedding),
        Caller::Executable { return_memory_early } => {
            if cli.command.has_predicted_memory() {
                return_memory_early();
            }
            None
        }
    };
    let threads = threads(cli.threads)?;
    let cancel = signals::install()?;
    let pool = pool(threads)?;
    let session = commands::Session {
        progress: progress::Progress::new(cli.quiet),
        text_workers: text_workers(threads, &cancel, embedding.as_ref().map(|e| e.worker.clone())),
        cancel,
        code: embedding.map(|embedding| embedding.code),
        wording: &quant_core::wording::CommandLine,
    };
    pool.install(|| commands::run(&cli.command, &session))
}

/// Returns the number of threads to run on: `asked`, or by default the available parallelism.
///
/// # Errors
/// [`Error::Memory`] if there is not enough memory for the threads' stacks; [`Error::Usage`] if `QUANT_ISA` is an
/// unknown name or an instruction set that the processor does not have, or if `QUANT_FLOAT_PRODUCTS` is.
pub fn threads(asked: Option<usize>) -> quant_core::Result<usize> {
    quant_kernels_cpu::Isa::detect_checked().map_err(|error| Error::Usage {
        message: error.to_string(),
        remedy: "set QUANT_ISA to one of these names, or unset it to use the fastest instruction set \
                 of this processor"
            .into(),
    })?;
    quant_core::model::FloatProducts::detect_checked()?;
    let all = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = asked.unwrap_or_else(all);
    allocator::check_room_for_threads(threads + 2)?;
    Ok(threads)
}

/// Creates a pool of `threads` threads.
///
/// # Errors
/// [`Error::Unavailable`] if the threads cannot be started.
pub fn pool(threads: usize) -> quant_core::Result<rayon::ThreadPool> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).stack_size(THREAD_STACK);
    pool.build().map_err(|e| no_threads(&e))
}

/// Returns the workers that run tokenizers and templates: separate processes if the system can limit them. A program
/// that embeds this one passes the command that starts a worker, or `Some(None)` if it has none.
#[cfg(target_os = "linux")]
pub fn text_workers(
    threads: usize,
    cancel: &CancelToken,
    worker: Option<Option<(PathBuf, Vec<OsString>)>>,
) -> Arc<dyn TextWorkers> {
    let workers = match worker {
        None => ProcessWorkers::of_this_program(threads, cancel.clone()),
        Some(Some((program, arguments))) => {
            ProcessWorkers::of(&program, threads, cancel.clone()).with_arguments(arguments)
        }
        Some(None) => return Arc::new(InProcess),
    };
    Arc::new(workers.or_else(Arc::new(InProcess)))
}

/// Returns the worker that runs tokenizers and templates within this process.
#[cfg(not(target_os = "linux"))]
pub fn text_workers(
    _threads: usize,
    _cancel: &CancelToken,
    _worker: Option<Option<(PathBuf, Vec<OsString>)>>,
) -> Arc<dyn TextWorkers> {
    Arc::new(InProcess)
}
