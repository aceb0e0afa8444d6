//! The worker side: a process that holds one file of a model and answers questions about it.

use std::io::{Read, Write};

use super::frame::read_frame;
use super::wire::{read_load, read_question, write_answer};
use super::{Answer, Fault, TextWorkers};
use crate::{Error, Result};

/// The stack size for processing the file. Deeper recursion ends the process.
pub(super) const STACK: usize = 16 << 20;
/// The byte that signals that the worker is ready.
pub(super) const READY: u8 = b'r';

/// Reads the file to load and then questions from `input`, and writes answers to `output`, until the input ends.
///
/// A program calls this in the process that [`ProcessWorkers`](super::ProcessWorkers) starts. `workers` run tokenizers
/// and templates there, for example [`calibrate::InProcess`](crate::calibrate::InProcess).
///
/// # Errors
/// [`Error::Io`] when input or output fail; [`Error::Unavailable`] when no thread can be started.
pub fn serve(
    input: &mut (dyn Read + Send),
    output: &mut (dyn Write + Send),
    workers: &dyn TextWorkers,
) -> Result<()> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("text".into()).stack_size(STACK);
        let running = thread.spawn_scoped(scope, || answer_all(input, output, workers)).map_err(no_thread)?;
        running.join().unwrap_or_else(|_| Err(Error::Internal("the worker panicked".into())))
    })
}

fn no_thread(error: impl std::fmt::Display) -> Error {
    Error::Unavailable {
        what: "a thread of the text worker".into(),
        reason: error.to_string(),
        remedy: "raise the limits on processes and memory (ulimit -u and -v)".into(),
    }
}

fn answer_all(input: &mut dyn Read, output: &mut dyn Write, workers: &dyn TextWorkers) -> Result<()> {
    let failed = |e| Error::io("read or write", "the pipe of the text worker", e);
    // From here on, the parent process attributes a crash to the file.
    output.write_all(&[READY]).map_err(failed)?;
    let Some(first) = read_frame(input, u64::MAX).map_err(failed)? else { return Ok(()) };
    let loaded = match read_load(&first) {
        Some((loadable, threads)) => {
            drop(first);
            workers.load(loadable).map(|worker| (worker, threads)).map_err(Fault::from)
        }
        None => {
            Err(Fault { reason: "was sent to a different version of the worker".into(), ..Fault::default() })
        }
    };
    let (worker, threads) = match loaded {
        Ok(loaded) => loaded,
        Err(fault) => return write_answer(&Err(fault)).write_to(output).map_err(failed),
    };
    write_answer(&Ok(Answer::LargestToken(None))).write_to(output).map_err(failed)?;
    let mut pool = None;
    while let Some(bytes) = read_frame(input, u64::MAX).map_err(failed)? {
        let answer = match read_question(&bytes) {
            None => Err(Fault { reason: "received an unknown request".into(), ..Fault::default() }),
            Some(question) if question.items() > 1 && threads > 1 => {
                let pool = match &mut pool {
                    Some(pool) => pool,
                    none => none.insert(
                        rayon::ThreadPoolBuilder::new()
                            .num_threads(threads)
                            .stack_size(STACK)
                            .build()
                            .map_err(no_thread)?,
                    ),
                };
                pool.install(|| worker.ask(&question)).map_err(Fault::from)
            }
            Some(question) => worker.ask(&question).map_err(Fault::from),
        };
        write_answer(&answer).write_to(output).map_err(failed)?;
    }
    Ok(())
}
