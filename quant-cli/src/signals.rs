//! Handles signals: the first one asks the run to stop without losing work, and the second one ends it at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use quant_core::{CancelToken, Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::{flag, low_level};

/// Watches for signals and returns the token that the first one cancels.
pub fn install() -> Result<CancelToken> {
    let cancelled = Arc::new(AtomicBool::new(false));
    let failed = |e| Error::Io { action: "watch signals for", path: "the process".into(), source: e };
    // If hangups are ignored at the start, as under nohup, they stay ignored.
    let watched: &[i32] = if is_ignored(SIGHUP) { &[SIGINT, SIGTERM] } else { &[SIGINT, SIGTERM, SIGHUP] };
    let mut signals = Signals::new(watched).map_err(failed)?;
    let seen = cancelled.clone();
    let watch = move || {
        let mut received = 0;
        loop {
            // Signals that arrived together count before the first one lets the run end.
            let arrived: Vec<i32> = signals.wait().collect();
            received += arrived.len();
            match arrived.last() {
                Some(last) if received > 1 => low_level::exit(128 + last),
                Some(_) => seen.store(true, Ordering::Relaxed),
                None => {}
            }
        }
    };
    let thread = std::thread::Builder::new().name("signals".into()).stack_size(crate::THREAD_STACK);
    thread.spawn(watch).map_err(|e| crate::no_threads(&e))?;
    // By default, exceeding the limit on file sizes kills the process; with a handler, the write fails with an error
    // instead.
    flag::register(SIGXFSZ, Arc::default()).map_err(failed)?;
    Ok(CancelToken::from_flag(cancelled))
}

/// Returns whether the process was started with this signal ignored; false if the system does not report it.
fn is_ignored(signal: i32) -> bool {
    crate::system::ignored_signals() & 1 << (signal - 1) != 0
}
