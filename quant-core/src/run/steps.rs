//! The duration of a run's steps.

use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use crate::{Event, Observer};

/// The total duration of a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StepTime {
    /// The name of the step.
    pub step: &'static str,
    /// The duration in seconds.
    pub seconds: f64,
}

/// An observer that sums up the durations of steps and forwards every event.
pub struct StepTimes<'a> {
    next: &'a dyn Observer,
    times: Mutex<Vec<StepTime>>,
}

impl<'a> StepTimes<'a> {
    /// Wraps another observer.
    pub fn new(next: &'a dyn Observer) -> Self {
        Self { next, times: Mutex::default() }
    }

    /// Returns the duration of each step so far, in order of first occurrence.
    pub fn times(&self) -> Vec<StepTime> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Observer for StepTimes<'_> {
    fn event(&self, event: &Event) {
        if let Event::StepDone { step, elapsed } = event {
            let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
            let seconds = elapsed.as_secs_f64();
            match times.iter_mut().find(|known| known.step == *step) {
                Some(known) => known.seconds += seconds,
                None => times.push(StepTime { step, seconds }),
            }
        }
        self.next.event(event);
    }

    fn wants_estimate(&self) -> bool {
        self.next.wants_estimate()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Silent;

    #[test]
    fn times_of_a_step_are_added_up() {
        let steps = StepTimes::new(&Silent);
        for (step, seconds) in [("read", 1), ("gptq", 2), ("read", 3)] {
            steps.event(&Event::StepDone { step, elapsed: Duration::from_secs(seconds) });
        }
        let times = [StepTime { step: "read", seconds: 4.0 }, StepTime { step: "gptq", seconds: 2.0 }];
        assert_eq!(steps.times(), times);
        assert!(!steps.wants_estimate());
    }
}
