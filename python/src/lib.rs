//! The native half of the Python package `fewbits`: the command line, and jobs that take and give JSON. The Python half
//! (`fewbits/`) makes keyword arguments and typed results of it.
//!
//! A job runs on a thread of its own, without the interpreter's lock; the caller's thread waits, hands events on and
//! looks for signals. Nothing global is set: no allocator, no thread pool, no signal handler.

mod error;
mod events;
mod gate;
mod job;
mod models;
mod requests;
mod wording;

/// The extension module `fewbits._native`.
#[pyo3::pymodule]
mod _native {
    use std::ffi::OsString;
    use std::path::PathBuf;

    use pyo3::prelude::*;

    use crate::job::{self, Place};
    #[pymodule_export]
    use crate::models::Model;
    // What it exports, `fewbits.transformers` calls by name.
    use quant_kernels as _;

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name that Python has for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    /// Runs the command line with these arguments, of which the first is its name, and gives its exit code.
    #[pyfunction]
    fn cli(py: Python<'_>, arguments: Vec<OsString>, code: PathBuf, python: Option<PathBuf>) -> u8 {
        let embedding = Place { code, python }.embedding();
        py.detach(|| quant_cli::main(arguments, Some(embedding)))
    }

    /// Serves a tokenizer or a chat template to the process that started this one, and gives the exit code.
    #[pyfunction]
    fn text_worker(py: Python<'_>) -> u8 {
        py.detach(job::serve_text)
    }

    /// Runs a job: `kind` with its request (JSON) and the rows of a dataset (each JSON), if one is given. Events go to
    /// `on_event` as a kind and JSON, on this thread. Returns the result as JSON.
    #[pyfunction]
    #[pyo3(signature = (kind, request, rows, on_event, code, python, threads=None, estimate=false))]
    #[expect(clippy::too_many_arguments, reason = "called from one place, by position")]
    fn run(
        py: Python<'_>,
        kind: &str,
        request: String,
        rows: Option<Vec<String>>,
        on_event: Option<Py<PyAny>>,
        code: PathBuf,
        python: Option<PathBuf>,
        threads: Option<usize>,
        estimate: bool,
    ) -> PyResult<String> {
        let work = job::work(kind, request, rows)?;
        job::run(py, work, on_event, Place { code, python }, threads, estimate)
    }
}
