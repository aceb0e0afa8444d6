//! Runs a job on its own thread while the caller's thread waits.

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use quant_cli::commands::Session;
use quant_cli::progress::Progress;
use quant_core::wording::CommandLine;
use quant_core::{CancelToken, Error, Event, Result};

use crate::error::exception;
use crate::events::{Channel, fields};
use crate::{gate, requests};

/// Interval at which the caller's thread checks for signals.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Stack size of the job's thread: that of the thread on which the command line runs the same code.
const STACK: usize = 8 << 20;

pub type Work = Box<dyn FnOnce(&Session) -> Result<String> + Send>;

/// The location of this code, and the interpreter that can load it again.
pub struct Place {
    /// The extension's file.
    pub code: PathBuf,
    /// The Python interpreter, or `None` if it is not an executable, as when Python is embedded.
    pub python: Option<PathBuf>,
}

/// Python code that loads only the extension, from its file, and runs a text worker.
const WORKER: &str = "import sys; from importlib.util import spec_from_file_location as s, module_from_spec as m; \
                      f = s('fewbits._native', sys.argv[1]); n = m(f); f.loader.exec_module(n); sys.exit(n.text_worker())";

impl Place {
    pub fn embedding(self) -> quant_cli::Embedding {
        let worker = self.worker();
        quant_cli::Embedding { code: self.code, worker }
    }

    /// Returns the command that starts a text worker, without anything from the user's environment.
    fn worker(&self) -> Option<(PathBuf, Vec<OsString>)> {
        let words = ["-I", "-S", "-c", WORKER].map(OsString::from);
        let arguments = words.into_iter().chain([self.code.clone().into_os_string()]).collect();
        Some((self.python.clone()?, arguments))
    }
}

pub fn work(kind: &str, request: String, rows: Option<Vec<String>>) -> PyResult<Work> {
    Ok(match kind {
        "plan" => Box::new(move |session| requests::plan(&request, session)),
        "quantize" => Box::new(move |session| requests::quantize(&request, rows, session)),
        "evaluate" => Box::new(move |session| requests::evaluate(&request, rows, session)),
        "inspect" => Box::new(move |session| requests::inspect(&request, session)),
        "page" => Box::new(move |session| requests::page(&request, session)),
        "recipe" => Box::new(move |_| requests::preset_recipe(&request)),
        "gate" => Box::new(move |session| gate::gate(&request, session)),
        "suggest" => Box::new(move |_| gate::suggested(&request)),
        "baseline" => Box::new(move |_| gate::update_baseline(&request)),
        other => return Err(PyValueError::new_err(format!("unknown job {other}"))),
    })
}

/// Serves a tokenizer or a chat template to another process, and returns the exit code.
#[cfg(target_os = "linux")]
pub fn serve_text() -> u8 {
    quant_cli::text_worker::run()
}

/// On other systems, no text workers are started.
#[cfg(not(target_os = "linux"))]
pub fn serve_text() -> u8 {
    Error::Internal("a text worker on this system".into()).category().exit_code()
}

/// Runs a job and waits for it. If a signal handler raises, as for Ctrl-C, or `on_event` raises, the job is asked to
/// stop without losing work, and the exception is raised when it has stopped.
pub fn run(
    py: Python<'_>,
    work: Work,
    on_event: Option<Py<PyAny>>,
    place: Place,
    threads: Option<usize>,
    estimate: bool,
) -> PyResult<String> {
    let cancel = CancelToken::new();
    let (sender, events) = channel();
    let observer = Arc::new(Channel { sender: Mutex::new(sender), wants_estimate: estimate });
    let token = cancel.clone();
    let thread = move || -> Result<String> {
        let threads = quant_cli::threads(threads)?;
        let pool = quant_cli::pool(threads)?;
        let text_workers = quant_cli::text_workers(threads, &token, Some(place.worker()));
        let progress = Progress::forwarded(observer);
        let code = Some(place.code);
        // The model card is worded for the command line, so that both write the same bytes.
        let session = Session { progress, cancel: token, text_workers, code, wording: &CommandLine };
        pool.install(|| work(&session))
    };
    // No state that a panic could leave inconsistent is used afterwards.
    let guarded = move || {
        catch_unwind(AssertUnwindSafe(thread))
            .unwrap_or_else(|_| Err(Error::Internal("the job panicked".into())))
    };
    let spawned = std::thread::Builder::new().name("fewbits".into()).stack_size(STACK).spawn(guarded);
    let thread = spawned.map_err(|e| {
        let (what, remedy) = ("a thread".into(), "raise the limits on processes and memory".into());
        exception(py, &Error::Unavailable { what, reason: e.to_string(), remedy })
    })?;
    let raised = attend(py, &Mutex::new(events), on_event.as_ref(), &cancel);
    let outcome = py.detach(|| join(thread));
    match (raised, outcome) {
        (Some(raised), _) => Err(raised),
        (None, Ok(result)) => Ok(result),
        (None, Err(error)) => Err(exception(py, &error)),
    }
}

fn join(thread: JoinHandle<Result<String>>) -> Result<String> {
    thread.join().unwrap_or_else(|_| Err(Error::Internal("the job panicked".into())))
}

/// Passes events to the callback until the job has ended. Returns the first exception raised by the callback or a
/// signal handler.
fn attend(
    py: Python<'_>,
    events: &Mutex<Receiver<Event>>,
    on_event: Option<&Py<PyAny>>,
    cancel: &CancelToken,
) -> Option<PyErr> {
    let mut raised = None;
    let mut looked = Instant::now();
    let next = || events.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(POLL_INTERVAL);
    loop {
        let event = match py.detach(next) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return raised,
        };
        let handed = match (&event, on_event) {
            (Some(event), Some(callback)) if raised.is_none() => report(py, event, callback),
            _ => Ok(()),
        };
        let handed = handed.and_then(|()| {
            if event.is_some() && looked.elapsed() < POLL_INTERVAL {
                return Ok(());
            }
            looked = Instant::now();
            py.check_signals()
        });
        // Only the first exception counts.
        if let Err(error) = handed {
            cancel.cancel();
            raised.get_or_insert(error);
        }
    }
}

fn report(py: Python<'_>, event: &Event, callback: &Py<PyAny>) -> PyResult<()> {
    let Some((kind, fields)) = fields(event) else { return Ok(()) };
    callback.call1(py, (kind, fields.to_string())).map(drop)
}
