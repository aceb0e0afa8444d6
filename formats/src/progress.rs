//! Progress events of a long run, and cancellation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::{Error, Result};

/// Something that happened during a run.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// A stage of the run begins; `units` is how many [`Event::UnitDone`] follow.
    StageStarted {
        /// `calibrate`, `quantize`, `verify`, `evaluate` …
        stage: &'static str,
        /// The kind of unit: `block`, `tensor`, `window` …
        unit: &'static str,
        /// The number of units.
        units: u64,
    },
    /// An earlier run has completed some of the current stage's units, which come first.
    Resumed {
        /// Number of units that the earlier run completed.
        units: u64,
    },
    /// One unit of the current stage is done.
    UnitDone {
        /// A description of the unit, for the line next to the progress bar.
        detail: String,
    },
    /// The current stage is over.
    StageDone,
    /// A step of a unit begins.
    StepStarted {
        /// The step: `read`, `gptq`, `write` …
        step: &'static str,
    },
    /// A step of a unit is done. Steps do not overlap.
    StepDone {
        /// The step.
        step: &'static str,
        /// How long it took.
        elapsed: Duration,
    },
    /// A warning; the run continues. Settings are marked as in [`Error`].
    Warning {
        /// The text of the warning.
        message: String,
    },
    /// A note on the run or its result. Settings are marked as in [`Error`].
    Note {
        /// `note`, or `lost` for something that a format cannot represent.
        label: &'static str,
        /// The text of the note.
        message: String,
    },
    /// The expected cost of the next stage, for observers that [want it](Observer::wants_estimate).
    Expected {
        /// The stage.
        stage: &'static str,
        /// The expected duration in seconds.
        seconds: f64,
    },
}

/// Receives the [`Event`]s of a run. Calls come from the thread that drives the run.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use quant_formats::{Event, Observer};
///
/// /// Counts the units that are done.
/// #[derive(Default)]
/// struct Counter(AtomicU64);
///
/// impl Observer for Counter {
///     fn event(&self, event: &Event) {
///         match event {
///             Event::UnitDone { .. } => {
///                 self.0.fetch_add(1, Ordering::Relaxed);
///             }
///             Event::Warning { message } => eprintln!("warning: {message}"),
///             _ => {}
///         }
///     }
/// }
///
/// let counter = Counter::default();
/// counter.event(&Event::UnitDone { detail: "block 0".into() });
/// assert_eq!(counter.0.into_inner(), 1);
/// ```
pub trait Observer: Send + Sync {
    /// Called at each event, in order.
    fn event(&self, event: &Event);

    /// Whether [`Event::Expected`] is wanted. The estimate needs a short measurement.
    fn wants_estimate(&self) -> bool {
        false
    }
}

/// Runs `work`, and reports it as a step: its start, then its duration.
pub fn timed<T>(observer: &dyn Observer, step: &'static str, work: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    observer.event(&Event::StepStarted { step });
    let done = work();
    observer.event(&Event::StepDone { step, elapsed: started.elapsed() });
    done
}

/// An [`Observer`] that ignores everything.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {
    fn event(&self, _event: &Event) {}
}

/// Asks a run to stop at the next point at which no work is lost. Clones share the request, so another thread can keep
/// one.
///
/// ```
/// use quant_formats::{CancelToken, Category};
///
/// let cancel = CancelToken::new();
/// let of_another_thread = cancel.clone();
/// assert!(cancel.check().is_ok());
/// of_another_thread.cancel();
/// assert_eq!(cancel.check().unwrap_err().category(), Category::Interrupted);
/// ```
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Returns a token that is not cancelled.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a token that shares a flag, for example one that a signal handler sets.
    pub fn from_flag(flag: Arc<AtomicBool>) -> Self {
        Self(flag)
    }

    /// Requests the stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Withdraws the request.
    pub fn reset(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    /// Whether a stop was requested.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// Returns [`Error::Interrupted`] if a stop was requested.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::Interrupted) } else { Ok(()) }
    }
}
