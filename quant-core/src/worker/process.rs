//! Workers in processes of their own: one per file, limited in memory, stack and time.
//!
//! The file's contents are sent through a socket after the limits are set. If the process crashes or exceeds a limit,
//! the error names the file. The process ends when its standard input closes, so it never outlives this program.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::frame::{Frame, read_frame};
use super::limits::{Granted, Limits};
use super::serve::{READY, STACK};
use super::wire::{longest_answer, read_answer, write_load, write_question};
use super::{Answer, Content, Fault, Loadable, Question, TextWorker, TextWorkers};
use crate::system::{Ending, Socket, WorkerProcess, ending, is_shortage, running_program};
use crate::{CancelToken, Category, Error, Result};

/// The first argument of a worker process.
pub const WORKER_ARGUMENT: &str = "__text-worker";
/// How often a wait checks whether the run was cancelled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// More threads gain little on batches.
const MAX_THREADS: usize = 16;

/// Starts a process per file: a program with the argument [`WORKER_ARGUMENT`], which calls [`serve`](super::serve) on
/// its standard output, a socket.
#[derive(Debug, Clone)]
pub struct ProcessWorkers {
    program: PathBuf,
    arguments: Vec<OsString>,
    threads: usize,
    limits: Limits,
    cancel: CancelToken,
    instead: Option<Arc<dyn TextWorkers>>,
}

impl ProcessWorkers {
    /// Workers that run this executable on `threads` threads; cancelling `cancel` ends them.
    pub fn of_this_program(threads: usize, cancel: CancelToken) -> Self {
        // If the path is unknown, workers cannot start, which is reported when the first one is needed.
        let program = running_program().unwrap_or_default();
        Self::of(&program, threads, cancel)
    }

    /// Workers that run the given executable instead of this one.
    pub fn of(program: &Path, threads: usize, cancel: CancelToken) -> Self {
        let threads = threads.clamp(1, MAX_THREADS);
        Self {
            program: program.to_owned(),
            arguments: Vec::new(),
            threads,
            limits: Limits::default(),
            cancel,
            instead: None,
        }
    }

    /// Adds arguments before [`WORKER_ARGUMENT`], for a program that needs them to act as a worker.
    pub fn with_arguments(self, arguments: Vec<OsString>) -> Self {
        Self { arguments, ..self }
    }

    /// Sets a fallback for systems on which no process can be started. Using it logs a warning. A temporary lack of
    /// memory, processes or open files is still an error.
    pub fn or_else(self, instead: Arc<dyn TextWorkers>) -> Self {
        Self { instead: Some(instead), ..self }
    }

    fn spawn(&self) -> io::Result<Running> {
        let mut command = Command::new(&self.program);
        // Programs with arguments keep their name: these may be interpreters, which find their installation by it.
        let name = self.arguments.is_empty().then_some("quant-text-worker");
        if name.is_none() {
            // An interpreter's allocator reserves address space for each thread, which counts against the limit.
            command.env("MALLOC_ARENA_MAX", "2");
        }
        command.args(&self.arguments).arg(WORKER_ARGUMENT).env("RUST_BACKTRACE", "0");
        let process = WorkerProcess::start(&mut command, name, POLL_INTERVAL)?;
        Ok(Running { process, granted: None })
    }
}

impl TextWorkers for ProcessWorkers {
    fn load(&self, loadable: Loadable) -> Result<Box<dyn TextWorker>> {
        let worker = ProcessWorker { workers: self.clone(), loadable, running: Mutex::default() };
        let running = match self.spawn() {
            Ok(running) => running,
            Err(error) => match &self.instead {
                Some(instead) if !is_shortage(&error) => {
                    tracing::warn!(
                        "cannot start a worker process ({error}): the model's tokenizer and chat template \
                        run in this process instead, and hostile ones can crash it"
                    );
                    return instead.load(worker.loadable);
                }
                _ => return Err(worker.unavailable(&error.to_string())),
            },
        };
        let running = worker.start(running)?;
        *worker.running.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
        Ok(Box::new(worker))
    }
}

/// A worker whose process is restarted after it was killed.
#[derive(Debug)]
struct ProcessWorker {
    workers: ProcessWorkers,
    loadable: Loadable,
    running: Mutex<Option<Running>>,
}

/// A running process and its limits; dropping this kills it.
#[derive(Debug)]
struct Running {
    process: WorkerProcess,
    granted: Option<Granted>,
}

enum Failure {
    Cancelled,
    /// The process has closed its socket.
    Ended,
    TooLong,
    Malformed,
}

impl ProcessWorker {
    /// Waits until a process is ready, sets its limits, and makes it load the file.
    fn start(&self, mut running: Running) -> Result<Running> {
        let mut ready = [0];
        let mut socket = CancellableSocket::new(running.process.socket(), &self.workers.cancel);
        if socket.read_exact(&mut ready).is_err() || ready != [READY] {
            if socket.is_cancelled {
                return Err(Error::Interrupted);
            }
            let status = running.process.end();
            return Err(self.unavailable(&format!("the process ended before it was ready ({status})")));
        }
        let stacks = (self.workers.threads as u64 + 1) * STACK as u64;
        let mut granted = Granted::for_loading(self.workers.limits, &self.loadable, stacks);
        granted.set(&running.process);
        running.granted = Some(granted);
        let load = write_load(&self.loadable, self.workers.threads);
        match self.exchange(&running, &load, longest_answer(&Question::LargestToken)) {
            Ok(Ok(_)) => Ok(running),
            Ok(Err(fault)) => Err(self.loadable.error(fault)),
            Err(failure) => Err(self.failed(running, &failure)),
        }
    }

    fn exchange(
        &self,
        running: &Running,
        frame: &Frame<'_>,
        max: u64,
    ) -> Result<Result<Answer, Fault>, Failure> {
        let mut socket = CancellableSocket::new(running.process.socket(), &self.workers.cancel);
        let answer = frame.write_to(&mut socket).and_then(|()| read_frame(&mut socket, max));
        match answer {
            Ok(Some(bytes)) => read_answer(&bytes).ok_or(Failure::Malformed),
            _ if socket.is_cancelled => Err(Failure::Cancelled),
            Err(e) if e.kind() == ErrorKind::InvalidData => Err(Failure::TooLong),
            _ => Err(Failure::Ended),
        }
    }

    fn failed(&self, mut running: Running, failure: &Failure) -> Error {
        if matches!(failure, Failure::Cancelled) {
            return Error::Interrupted;
        }
        let status = running.process.end();
        let ending = ending(status);
        if ending == Ending::Stopped {
            // This process was meant to stop too.
            return Error::Interrupted;
        }
        let what = match self.loadable.content {
            Content::Tokenizer(_) => "tokenizing",
            Content::Template { .. } => "the chat template",
        };
        let Some(granted) = running.granted else { return self.unavailable(&status.to_string()) };
        let (memory, is_ours) = granted.memory();
        let out_of_memory = status.code() == Some(i32::from(Category::Environment.exit_code()));
        // Under a lower limit than that of the worker, allocations of the runtime fail too, and it crashes.
        let is_short = out_of_memory || ending == Ending::Crashed;
        if ending == Ending::Killed || is_short && !is_ours {
            return Error::Memory {
                what: format!("{what} with {}", self.loadable.path.display()),
                bytes: None,
            };
        }
        let reason = if matches!(failure, Failure::TooLong) {
            "produces implausibly large output for the text".to_owned()
        } else if out_of_memory {
            format!("needs more than {} MiB of memory", memory >> 20)
        } else if ending == Ending::OutOfTime {
            format!("needs more than {} seconds of processor time", granted.seconds())
        } else if ending == Ending::Crashed {
            "overflows the stack or crashes the library that parses it".to_owned()
        } else {
            format!("makes the worker process fail ({status})")
        };
        let remedy = match self.loadable.content {
            Content::Tokenizer(_) => {
                "use the original tokenizer.json of the model; if it is the original, give a shorter text, \
                or split the text into several documents (.jsonl)"
            }
            Content::Template { .. } => {
                "correct the model's chat template, or put a different one next to it as \
                chat_template.jinja, which takes precedence"
            }
        };
        Error::InputFile { path: self.loadable.path.clone(), line: None, reason, remedy: remedy.into() }
    }

    fn unavailable(&self, reason: &str) -> Error {
        Error::Unavailable {
            what: format!("a worker process for {}", self.loadable.path.display()),
            reason: reason.to_owned(),
            remedy:
                "free some memory, or raise the limits on memory, processes and open files (ulimit -v, -u \
                and -n)"
                    .into(),
        }
    }
}

impl TextWorker for ProcessWorker {
    fn ask(&self, question: &Question<'_>) -> Result<Answer> {
        let mut held = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut running = match held.take() {
            Some(running) => running,
            None => self.start(self.workers.spawn().map_err(|e| self.unavailable(&e.to_string()))?)?,
        };
        if let Some(granted) = &mut running.granted {
            granted.add(question);
            granted.set(&running.process);
        }
        match self.exchange(&running, &write_question(question), longest_answer(question)) {
            Ok(Ok(answer)) if question.fits(&answer) => {
                *held = Some(running);
                Ok(answer)
            }
            Ok(Ok(_)) => Err(self.failed(running, &Failure::Malformed)),
            Ok(Err(fault)) => {
                *held = Some(running);
                Err(self.loadable.error(fault))
            }
            Err(failure) => Err(self.failed(running, &failure)),
        }
    }
}

/// A socket whose reads and writes end when the run is cancelled.
struct CancellableSocket<'a> {
    socket: &'a Socket,
    cancel: &'a CancelToken,
    since: Option<Instant>,
    is_cancelled: bool,
}

impl<'a> CancellableSocket<'a> {
    fn new(socket: &'a Socket, cancel: &'a CancelToken) -> Self {
        Self { socket, cancel, since: None, is_cancelled: false }
    }

    /// Retries an operation until it makes progress. After cancellation, it gets a short time to finish, so that
    /// cancelling a chat answer does not require a new process.
    fn wait<T>(&mut self, mut operation: impl FnMut(&Socket) -> io::Result<T>) -> io::Result<T> {
        loop {
            if self.cancel.is_cancelled() {
                let since = *self.since.get_or_insert_with(Instant::now);
                self.is_cancelled = since.elapsed() >= POLL_INTERVAL;
            }
            if self.is_cancelled {
                return Err(io::Error::other("cancelled"));
            }
            match operation(self.socket) {
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                done => return done,
            }
        }
    }
}

impl Read for CancellableSocket<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.wait(|mut socket| socket.read(bytes))
    }
}

impl Write for CancellableSocket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait(|mut socket| socket.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
