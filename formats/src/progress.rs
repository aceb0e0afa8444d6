//! How a long run talks to whoever started it, and how it is stopped.

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
        /// What one unit is: `block`, `tensor`, `window` …
        unit: &'static str,
        /// How many there are.
        units: u64,
    },
    /// An earlier run has done some of the current stage's units. They come first, and cost no more than what the units
    /// after them need of them.
    Resumed {
        /// How many.
        units: u64,
    },
    /// One unit of the current stage is done.
    UnitDone {
        /// What it was, for the line beside the bar.
        detail: String,
    },
    /// The current stage is over.
    StageDone,
    /// A step of a unit begins: `read`, a transform, `gptq`, `write` …
    StepStarted {
        /// The step.
        step: &'static str,
    },
    /// Some of the run's time went into a step: `read`, a transform, `gptq`, `write` … Steps do not overlap, and come
    /// again with every block.
    StepDone {
        /// The step.
        step: &'static str,
        /// What it took this time.
        elapsed: Duration,
    },
    /// Something the user should know, though the run continues. Settings are marked as in [`Error`].
    Warning {
        /// What.
        message: String,
    },
    /// Something about the run or its result that is worth a line. Settings are marked as in [`Error`].
    Note {
        /// `note`, or `lost` for what a format has no place for.
        label: &'static str,
        /// What.
        message: String,
    },
    /// What a stage that is going to start is expected to take; only where the observer
    /// [wants it](Observer::wants_estimate).
    Expected {
        /// The stage.
        stage: &'static str,
        /// Seconds.
        seconds: f64,
    },
}

/// Receives the [`Event`]s of a run. Calls come from the thread that drives the run.
pub trait Observer: Send + Sync {
    /// Called at each event, in order.
    fn event(&self, event: &Event);

    /// Whether [`Event::Expected`] is of use: the estimate takes a measurement of a tenth of a second.
    fn wants_estimate(&self) -> bool {
        false
    }
}

/// Does some of the work of a step, and reports its start and what it took.
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

/// Asks a run to stop at the next point where nothing is lost.
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// A token that nobody has pulled.
    pub fn new() -> Self {
        Self::default()
    }

    /// A token that shares a flag, for example one that a signal handler sets.
    pub fn from_flag(flag: Arc<AtomicBool>) -> Self {
        Self(flag)
    }

    /// Asks for the stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Withdraws the request, for a host that continues with something else, such as the next turn of a chat.
    pub fn reset(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    /// Whether the stop was asked for.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// [`Error::Interrupted`] once the stop was asked for.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::Interrupted) } else { Ok(()) }
    }
}
