//! The native part of the Python package `fewbits`: the command line, and jobs with JSON requests and results.
//!
//! A job runs on its own thread and does not hold the GIL. The caller's thread waits, passes events to the callback and
//! checks for signals. Jobs set no process-wide state.

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
    // Links the C interface, whose exported functions `fewbits.transformers` calls by name.
    use quant_kernels as _;

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name that Python modules use")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    /// Runs the command line with these arguments, the first of which is the program's name, and returns its exit code.
    #[pyfunction]
    fn cli(py: Python<'_>, arguments: Vec<OsString>, code: PathBuf, python: Option<PathBuf>) -> u8 {
        let embedding = Place { code, python }.embedding();
        py.detach(|| quant_cli::main(arguments, quant_cli::Caller::Embedding(embedding)))
    }

    /// Serves a tokenizer or a chat template to the process that started this one, and returns the exit code.
    #[pyfunction]
    fn text_worker(py: Python<'_>) -> u8 {
        py.detach(job::serve_text)
    }

    /// Runs a job: `kind` with its JSON request and, if given, the rows of a dataset, each as JSON. Events are passed
    /// to `on_event` as a kind and JSON, on the calling thread. Returns the result as JSON.
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
