//! The process that runs a model's tokenizer or chat template on behalf of another process of this program, within
//! limits.

use std::ffi::OsString;
use std::io::{ErrorKind, Read};

use quant_core::calibrate::InProcess;
use quant_core::worker::{WORKER_ARGUMENT, serve};
use quant_core::{Error, Result};
use signal_hook::low_level;

/// Returns whether this process was started as a worker.
pub fn is_asked_for(arguments: &[OsString]) -> bool {
    arguments.get(1).is_some_and(|argument| argument == WORKER_ARGUMENT)
}

/// Serves requests until the requesting process closes the connection or ends. Returns the exit code.
pub fn run() -> u8 {
    // The output of this process is not shown, so a panic is reported as a response.
    std::panic::set_hook(Box::new(|_| ()));
    match answer() {
        Ok(()) => 0,
        Err(error) => error.category().exit_code(),
    }
}

fn answer() -> Result<()> {
    let failed = |e| Error::io("use", "the socket of the text worker", e);
    // Standard input is closed when the requesting process ends, even while this process is busy.
    let lifeline = || {
        let mut byte = [0];
        while std::io::stdin().read(&mut byte).is_err_and(|e| e.kind() == ErrorKind::Interrupted) {}
        low_level::exit(0);
    };
    std::thread::Builder::new()
        .name("lifeline".into())
        .stack_size(64 << 10)
        .spawn(lifeline)
        .map_err(failed)?;
    let socket = crate::system::standard_output().map_err(failed)?;
    serve(&mut &socket, &mut &socket, &InProcess)
}
