//! The first interrupt asks the run to stop where nothing is lost; the second stops it at once.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use quant_core::{CancelToken, Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;

/// Installs the handlers and returns the token that they pull.
pub fn install() -> Result<CancelToken> {
    let pulled = Arc::new(AtomicBool::new(false));
    let failed = |e| Error::Io { action: "watch signals for", path: "the process".into(), source: e };
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // Order matters: at the first signal the flag is still down when this one looks at it.
        flag::register_conditional_shutdown(signal, 128 + signal, pulled.clone()).map_err(failed)?;
        flag::register(signal, pulled.clone()).map_err(failed)?;
    }
    // Left alone, it kills the process; watched, the write fails instead and its error is told.
    flag::register(SIGXFSZ, Arc::default()).map_err(failed)?;
    Ok(CancelToken::from_flag(pulled))
}
