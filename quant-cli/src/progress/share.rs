//! How much of a unit is done. A bar that moved only when units are done would stand still for hours in large blocks.

use std::time::{Duration, Instant};

/// The share at which the bar waits for the first unit, whose duration is only estimated.
const FIRST: f64 = 0.95;

/// The share of the current unit that is done. It grows with time between two shares.
#[derive(Debug, Clone, Copy)]
pub(super) struct Share {
    from: f64,
    to: f64,
    /// The time from one to the other.
    seconds: f64,
    since: Instant,
}

impl Share {
    /// Nothing is done, and nothing is known about the steps.
    pub(super) fn none() -> Self {
        Self { from: 0.0, to: 0.0, seconds: 0.0, since: Instant::now() }
    }

    /// Returns the share at this time, from 0 to 1.
    pub(super) fn now(&self) -> f64 {
        let passed = match self.seconds > 0.0 {
            true => (self.since.elapsed().as_secs_f64() / self.seconds).min(1.0),
            false => 0.0,
        };
        self.from + (self.to - self.from) * passed
    }
}

/// The steps of the current unit, and those of the last one, which predict how long the current ones take.
#[derive(Debug, Default)]
pub(super) struct Steps {
    /// The seconds of each step of the last unit that this run computed, in order.
    last: Vec<(&'static str, f64)>,
    current: Vec<(&'static str, f64)>,
    /// The step that runs, and when it began.
    open: Option<(&'static str, Instant)>,
    /// The number of steps of the last unit to which those of the current one correspond so far.
    place: usize,
}

impl Steps {
    /// A step begins. `share` is the share before it, and `unit_seconds` the estimated duration of the first unit. The
    /// new share never is less than that before it.
    pub(super) fn begin(&mut self, step: &'static str, share: Share, unit_seconds: Option<f64>) -> Share {
        let (reached, since) = (share.now(), Instant::now());
        self.open = Some((step, since));
        if self.last.is_empty() {
            return match unit_seconds {
                // The estimate is of the whole unit, so it continues across steps.
                Some(seconds) if share.to == 0.0 => Share { from: 0.0, to: FIRST, seconds, since },
                _ => share,
            };
        }
        let seconds_of = |steps: &[(&str, f64)]| steps.iter().map(|(_, seconds)| seconds).sum::<f64>();
        let total = seconds_of(&self.last);
        let found = self.last[self.place..].iter().position(|(name, _)| *name == step);
        let Some(at) = found.map(|at| self.place + at).filter(|_| total > 0.0) else {
            return Share { from: reached, to: reached, seconds: 0.0, since };
        };
        self.place = at + 1;
        let from = reached.max(seconds_of(&self.last[..at]) / total);
        let to = from.max(seconds_of(&self.last[..=at]) / total).min(1.0);
        Share { from, to, seconds: self.last[at].1, since }
    }

    /// A step has ended. The rest of one that began in an earlier unit does not count.
    pub(super) fn end(&mut self, elapsed: Duration) {
        if let Some((step, _)) = self.open.take() {
            self.current.push((step, elapsed.as_secs_f64()));
        }
    }

    /// A unit has ended. Units of an earlier run pass quickly and predict nothing.
    pub(super) fn unit_done(&mut self, is_own: bool) -> Share {
        // The step that writes a unit ends after it.
        if let Some((_, since)) = self.open {
            self.end(since.elapsed());
        }
        let steps = std::mem::take(&mut self.current);
        self.place = 0;
        if is_own && !steps.is_empty() {
            self.last = steps;
        }
        Share::none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn later(share: Share, seconds: f64) -> Share {
        let since = share.since.checked_sub(Duration::from_secs_f64(seconds));
        Share { since: since.expect("an uptime longer than this"), ..share }
    }

    #[track_caller]
    fn assert_near(share: Share, expected: f64) {
        assert!((share.now() - expected).abs() < 0.01, "{} instead of {expected}", share.now());
    }

    #[test]
    fn steps_take_the_share_that_they_had_in_the_last_unit() {
        let mut steps = Steps::default();
        for (step, seconds) in [("read", 1), ("awq", 7), ("gptq", 8), ("write", 4)] {
            steps.begin(step, Share::none(), None);
            steps.end(Duration::from_secs(seconds));
        }
        let mut share = steps.unit_done(true);
        // This is the end of the unit's last step.
        steps.end(Duration::from_secs(100));
        assert_near(share, 0.0);
        share = steps.begin("read", share, None);
        assert_near(later(share, 0.5), 0.025);
        // A step that takes longer waits for its end, and one that takes less is followed by the next one's start.
        assert_near(later(share, 9.0), 0.05);
        share = steps.begin("awq", share, None);
        assert_near(share, 0.05);
        assert_near(later(share, 3.5), 0.05 + 0.175);
        share = steps.begin("gptq", later(share, 2.0), None);
        assert_near(share, 0.4);
        // The last unit did not have this step at this place.
        share = steps.begin("awq", later(share, 4.0), None);
        assert_near(share, 0.6);
        assert_near(later(share, 50.0), 0.6);
        share = steps.begin("write", share, None);
        assert_near(share, 0.8);
        assert_near(later(share, 4.0), 1.0);
        assert_near(steps.unit_done(true), 0.0);
    }

    #[test]
    fn the_first_unit_follows_the_estimate() {
        let mut steps = Steps::default();
        assert_near(later(steps.begin("read", Share::none(), None), 5.0), 0.0);
        let mut share = steps.begin("read", Share::none(), Some(20.0));
        assert_near(later(share, 10.0), 0.5 * FIRST);
        share = steps.begin("awq", later(share, 10.0), Some(20.0));
        assert_near(share, 0.5 * FIRST);
        assert_near(later(share, 100.0), FIRST);
        assert_near(steps.unit_done(true), 0.0);
        // The unit took no time, which predicts nothing.
        share = steps.begin("read", Share::none(), Some(20.0));
        assert!((0.0..=1.0).contains(&later(share, 10.0).now()));
    }

    #[test]
    fn units_of_an_earlier_run_predict_nothing() {
        let mut steps = Steps::default();
        steps.begin("read", Share::none(), None);
        steps.end(Duration::from_millis(1));
        let share = steps.unit_done(false);
        let share = steps.begin("awq", share, Some(10.0));
        assert_near(later(share, 5.0), 0.5 * FIRST);
    }
}
