//! Progress on stderr: on a terminal a bar with elapsed and remaining time, elsewhere a line at intervals.

mod share;

use std::fmt::Write;
use std::io::IsTerminal;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use quant_core::checkpoint::printable_lines;
use quant_core::{Event, Observer};

use self::share::{Share, Steps};
use crate::output::{duration, print_message};

/// Without a terminal, a line is printed at most this often.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// The width of the bar in characters.
const WIDTH: usize = 30;

/// Shows the events of a run.
pub struct Progress {
    mode: Mode,
    state: Mutex<Option<Stage>>,
    expected: Mutex<Option<(&'static str, f64)>>,
}

#[derive(Clone)]
enum Mode {
    /// Forwards events to another observer and prints nothing.
    Forward(Arc<dyn Observer>),
    Quiet,
    Lines,
    Bar,
}

struct Stage {
    name: &'static str,
    unit: &'static str,
    timing: Timing,
    steps: Steps,
    /// The share of the current unit.
    share: Share,
    last_line: Instant,
    bar: Option<ProgressBar>,
    /// A copy of `timing` and `share`, from which the bar's thread draws the bar and the remaining time.
    shown: Arc<Mutex<(Timing, Share)>>,
    rate: Option<u64>,
    step: &'static str,
    detail: String,
}

#[derive(Debug, Clone, Copy)]
struct Timing {
    units: u64,
    done: u64,
    /// The number of units that an earlier run finished, which pass quickly, and the time at which this run passed the
    /// last one.
    resumed: (u64, Instant),
    last: Instant,
    expected: Option<f64>,
}

impl Timing {
    fn new(units: u64, expected: Option<f64>) -> Self {
        let started = Instant::now();
        Self { units, done: 0, resumed: (0, started), last: started, expected }
    }

    fn advance(&mut self) {
        self.done += 1;
        self.last = Instant::now();
        if self.done <= self.resumed.0 {
            self.resumed.1 = self.last;
        }
    }

    /// Returns the mean number of seconds that this run took per finished unit; `None` before the first one.
    fn pace(&self) -> Option<f64> {
        let (resumed, since) = self.resumed;
        let own = self.done.checked_sub(resumed).filter(|own| *own > 0)?;
        Some(self.last.saturating_duration_since(since).as_secs_f64() / own as f64)
    }

    /// Returns the number of units that the bar shows as done.
    fn shown(&self) -> u64 {
        self.done.max(self.resumed.0).min(self.units)
    }

    /// Returns the filled fraction of the bar; `share` is the share of the current unit.
    fn fraction(&self, share: &Share) -> f64 {
        let within = if self.done < self.resumed.0 { 0.0 } else { share.now() };
        ((self.shown() as f64 + within) / self.units.max(1) as f64).min(1.0)
    }

    /// Returns the estimated seconds of a unit.
    fn unit_seconds(&self) -> Option<f64> {
        self.expected.map(|all| all / self.units.max(1) as f64)
    }

    /// Returns the remaining seconds: before this run's first unit from the expected time, then from the units that
    /// this run has finished.
    ///
    /// If a unit takes longer than those before it, the result stays at what the others need.
    fn left(&self) -> Option<f64> {
        let spent = self.last.elapsed().as_secs_f64();
        match self.pace() {
            None => {
                let share = self.units.saturating_sub(self.resumed.0) as f64 / self.units.max(1) as f64;
                self.expected.map(|all| all * share - spent).filter(|left| *left > 0.0)
            }
            Some(pace) => {
                let units = self.units.saturating_sub(self.done) as f64;
                Some((pace * units - spent).max(pace * (units - 1.0)).max(0.0))
            }
        }
    }
}

impl Progress {
    /// Creates a progress display for this process; `quiet` disables it, except for warnings.
    pub fn new(quiet: bool) -> Self {
        let dumb = std::env::var_os("TERM").is_some_and(|t| t.is_empty() || t == "dumb");
        let mode = match (quiet, std::io::stderr().is_terminal() && !dumb) {
            (true, _) => Mode::Quiet,
            (false, true) => Mode::Bar,
            (false, false) => Mode::Lines,
        };
        Self { mode, state: Mutex::new(None), expected: Mutex::default() }
    }

    /// Whether notes and hints are suppressed, but not warnings.
    pub fn is_quiet(&self) -> bool {
        matches!(self.mode, Mode::Quiet)
    }

    /// Forwards all events and notes to another observer, and prints nothing.
    pub fn forwarded(to: Arc<dyn Observer>) -> Self {
        Self { mode: Mode::Forward(to), state: Mutex::default(), expected: Mutex::default() }
    }

    /// Prints a note or a warning to the user.
    pub fn note(&self, text: &str) {
        match &self.mode {
            // A warning says that the result may be wrong.
            Mode::Quiet if !text.starts_with("warning: ") => return,
            Mode::Forward(to) => return to.event(&event_of(text)),
            Mode::Quiet | Mode::Lines | Mode::Bar => {}
        }
        let state = self.lock();
        match state.as_ref().and_then(|s| s.bar.as_ref()) {
            Some(bar) => bar.suspend(|| print_message(text)),
            None => print_message(text),
        }
    }

    /// Returns an observer for which a unit is this many tokens, so that rates are shown in tokens.
    pub fn tokens_per_unit(&self, tokens: Option<u64>) -> Rated<'_> {
        Rated { progress: self, tokens, name: None }
    }

    /// Returns an observer that shows stages under this name.
    pub fn named(&self, name: &'static str) -> Rated<'_> {
        Rated { progress: self, tokens: None, name: Some(name) }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Stage>> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn show(&self, event: &Event, tokens: Option<u64>) {
        if let Mode::Forward(to) = &self.mode {
            return to.event(event);
        }
        match event {
            Event::StageStarted { stage, unit, units } => {
                let mut expected = self.expected.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                let seconds = expected.take_if(|(name, _)| name == stage).map(|(_, seconds)| seconds);
                *self.lock() =
                    Some(Stage::new(stage, unit, Timing::new(*units, seconds), &self.mode, tokens));
            }
            Event::Resumed { units } => {
                if let Some(stage) = self.lock().as_mut() {
                    stage.timing.resumed = (*units, Instant::now());
                    stage.draw();
                }
            }
            Event::UnitDone { detail } => {
                if let Some(stage) = self.lock().as_mut() {
                    stage.advance(detail, &self.mode);
                }
            }
            Event::StepStarted { step } => {
                if let Some(stage) = self.lock().as_mut() {
                    stage.begin(step);
                }
            }
            Event::StepDone { elapsed, .. } => {
                if let Some(stage) = self.lock().as_mut() {
                    stage.steps.end(*elapsed);
                }
            }
            Event::StageDone => {
                if let Some(Stage { bar: Some(bar), .. }) = self.lock().take() {
                    bar.finish_and_clear();
                }
            }
            Event::Warning { message } => self.note(&format!("warning: {message}")),
            Event::Note { label, message } => self.note(&format!("{label}: {message}")),
            Event::Expected { stage, seconds } => {
                let mut expected = self.expected.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                *expected = Some((stage, *seconds));
            }
            _ => {}
        }
    }
}

impl Observer for Progress {
    fn event(&self, event: &Event) {
        self.show(event, None);
    }

    /// Only a bar shows an estimate; the other modes print nothing before the first unit is done.
    fn wants_estimate(&self) -> bool {
        match &self.mode {
            Mode::Bar => true,
            Mode::Forward(to) => to.wants_estimate(),
            Mode::Quiet | Mode::Lines => false,
        }
    }
}

/// Converts a note to an event; the note's prefix selects the kind.
fn event_of(text: &str) -> Event {
    match (text.strip_prefix("warning: "), text.strip_prefix("note: ")) {
        (Some(message), _) => Event::Warning { message: message.to_owned() },
        (_, note) => Event::Note { label: "note", message: note.unwrap_or(text).to_owned() },
    }
}

/// A [`Progress`] with a fixed number of tokens per unit, or with another name for its stages.
pub struct Rated<'a> {
    progress: &'a Progress,
    tokens: Option<u64>,
    name: Option<&'static str>,
}

impl Observer for Rated<'_> {
    fn event(&self, event: &Event) {
        match (event, self.name, &self.progress.mode) {
            (Event::StageStarted { unit, units, .. }, Some(stage), Mode::Lines | Mode::Bar) => {
                let (unit, units) = (*unit, *units);
                self.progress.show(&Event::StageStarted { stage, unit, units }, self.tokens);
            }
            _ => self.progress.show(event, self.tokens),
        }
    }
}

impl Stage {
    fn new(name: &'static str, unit: &'static str, timing: Timing, mode: &Mode, rate: Option<u64>) -> Self {
        let share = Share::none();
        let shown = Arc::new(Mutex::new((timing, share)));
        let bar = matches!(mode, Mode::Bar).then(|| bar(name, timing.units, shown.clone()));
        let (steps, last_line, detail) = (Steps::default(), timing.last, String::new());
        Self { name, unit, timing, steps, share, last_line, bar, shown, rate, step: "", detail }
    }

    fn begin(&mut self, step: &'static str) {
        if self.timing.done >= self.timing.resumed.0 {
            self.share = self.steps.begin(step, self.share, self.timing.unit_seconds());
        }
        self.step = step;
        self.draw();
    }

    fn advance(&mut self, detail: &str, mode: &Mode) {
        self.timing.advance();
        self.share = self.steps.unit_done(self.timing.done > self.timing.resumed.0);
        // The number of a block is shown already.
        let detail = if detail.starts_with(self.unit) { "" } else { detail };
        self.detail = printable_lines(detail).to_string();
        self.step = "";
        self.draw();
        let Timing { units, .. } = self.timing;
        let done = self.timing.shown();
        if matches!(mode, Mode::Lines) && self.last_line.elapsed() >= LINE_INTERVAL && done < units {
            self.last_line = Instant::now();
            let left = self.timing.left().map(|left| format!("{} left", duration(left)));
            let parts = [self.tokens_per_second(), left].into_iter().flatten().collect::<Vec<_>>().join(" ");
            print_message(&format!("{}: {} {done} of {units}, {parts}", self.name, self.unit));
        }
    }

    fn tokens_per_second(&self) -> Option<String> {
        let pace = self.timing.pace().filter(|pace| *pace > 0.0)?;
        Some(format!("{:.0} tokens/s", self.rate? as f64 / pace))
    }

    /// Updates the bar and the text next to it.
    fn draw(&self) {
        let Some(bar) = &self.bar else { return };
        *self.shown.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = (self.timing, self.share);
        bar.set_position(self.timing.shown());
        bar.set_message(self.message());
    }

    /// Returns the rate, and the step of the current unit or, before its first step, the last unit that was finished.
    fn message(&self) -> String {
        let Timing { units, done, resumed, .. } = self.timing;
        if done < resumed.0 {
            return "resumed".to_owned();
        }
        let current = match self.step {
            "" => self.detail.clone(),
            step => format!("{} {} of {units}: {step}", self.unit, (done + 1).min(units)),
        };
        let parts = [self.tokens_per_second(), Some(current).filter(|text| !text.is_empty())];
        parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
    }
}

/// Draws a bar of which a fraction is filled.
fn drawn(fraction: f64) -> String {
    let full = ((fraction * WIDTH as f64) as usize).min(WIDTH);
    let head = if fraction > 0.0 && full < WIDTH { ">" } else { "" };
    format!("{:WIDTH$}", "=".repeat(full) + head)
}

fn bar(stage: &'static str, units: u64, shown: Arc<Mutex<(Timing, Share)>>) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(units), ProgressDrawTarget::stderr());
    let read = move || *shown.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let filled = {
        let read = read.clone();
        move |_: &ProgressState, text: &mut dyn Write| {
            let (timing, share) = read();
            let _ = text.write_str(&drawn(timing.fraction(&share)));
        }
    };
    let left = move |_: &ProgressState, text: &mut dyn Write| {
        let (timing, _) = read();
        // A last unit that takes longer than the others would be said to need no time.
        let _ = match timing.left().filter(|left| *left >= 1.0) {
            Some(left) => {
                write!(text, ", about {} left", indicatif::HumanDuration(Duration::from_secs_f64(left)))
            }
            None => Ok(()),
        };
    };
    let style = ProgressStyle::with_template("{prefix:>9} [{filled}] {pos}/{len} {elapsed}{left}  {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .with_key("filled", filled)
        .with_key("left", left);
    bar.set_style(style);
    bar.set_prefix(stage);
    // A steady tick needs a thread. Without one, the bar moves only when units are done.
    if std::thread::Builder::new().spawn(|| ()).is_ok() {
        bar.enable_steady_tick(Duration::from_millis(500));
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ago(seconds: u64) -> Instant {
        Instant::now().checked_sub(Duration::from_secs(seconds)).expect("an uptime longer than this")
    }

    #[test]
    fn time_left_comes_from_the_expectation_then_from_the_pace() {
        let mut timing = Timing::new(10, None);
        assert_eq!(timing.left(), None);
        timing.expected = Some(100.0);
        (timing.last, timing.resumed.1) = (ago(10), ago(10));
        assert!((timing.left().unwrap() - 90.0).abs() < 1.0);
        // The first unit took 10 s, and nine remain.
        timing.advance();
        assert!((timing.left().unwrap() - 90.0).abs() < 1.0);
        timing.expected = Some(1.0);
        assert!((timing.left().unwrap() - 90.0).abs() < 1.0);
    }

    #[test]
    fn nothing_is_said_once_the_expectation_has_passed() {
        let mut timing = Timing::new(10, Some(5.0));
        (timing.last, timing.resumed.1) = (ago(10), ago(10));
        assert_eq!(timing.left(), None);
    }

    #[test]
    fn time_left_decreases_while_a_unit_runs_but_not_below_what_the_others_need() {
        let mut timing = Timing::new(10, None);
        timing.resumed.1 = ago(30);
        timing.advance();
        // The first unit took 20 s, and the second has run for 10 s.
        timing.last = ago(10);
        assert!((timing.left().unwrap() - 170.0).abs() < 1.0);
        // The second unit has run for 100 s; the eight after it need 160 s.
        (timing.last, timing.resumed.1) = (ago(100), ago(120));
        assert!((timing.left().unwrap() - 160.0).abs() < 1.0);
    }

    #[test]
    fn the_message_names_the_current_unit_and_its_step() {
        let stage = |unit| Stage::new("quantize", unit, Timing::new(6, None), &Mode::Quiet, None);
        let mut blocks = stage("block");
        blocks.step = "awq";
        assert_eq!(blocks.message(), "block 1 of 6: awq");
        blocks.advance("block 0", &Mode::Quiet);
        assert_eq!(blocks.message(), "");
        blocks.step = "read";
        assert_eq!(blocks.message(), "block 2 of 6: read");
        blocks.timing.resumed.0 = 3;
        assert_eq!(blocks.message(), "resumed");
        let mut tensors = stage("tensor");
        tensors.advance("blk.0.ffn_up.weight", &Mode::Quiet);
        assert_eq!(tensors.message(), "blk.0.ffn_up.weight");
    }

    #[test]
    fn the_bar_moves_within_units_and_never_back() {
        let mut stage = Stage::new("quantize", "block", Timing::new(4, Some(40.0)), &Mode::Quiet, None);
        let fraction = |stage: &Stage| stage.timing.fraction(&stage.share);
        // The first two blocks are those of an earlier run.
        stage.timing.resumed.0 = 2;
        for _ in 0..2 {
            stage.begin("read");
            stage.steps.end(Duration::from_millis(1));
            assert_eq!(fraction(&stage), 0.5);
            stage.advance("block", &Mode::Quiet);
        }
        let mut last = 0.5;
        let mut moved = 0;
        for _ in 0..2 {
            for step in ["read", "awq", "write"] {
                stage.begin(step);
                for _ in 0..5 {
                    std::thread::sleep(Duration::from_millis(2));
                    let now = fraction(&stage);
                    assert!(now >= last && now <= 1.0, "{now} after {last}");
                    moved += usize::from(now > last);
                    last = now;
                }
                stage.steps.end(Duration::from_millis(20));
            }
            stage.advance("block", &Mode::Quiet);
        }
        assert!(moved >= 12, "{moved}");
        assert_eq!(fraction(&stage), 1.0);
    }

    #[test]
    fn bars_are_filled_in_proportion() {
        for (fraction, full, head) in
            [(0.0, 0, ""), (0.01, 0, ">"), (0.5, 15, ">"), (0.999, 29, ">"), (1.0, 30, "")]
        {
            assert_eq!(drawn(fraction), format!("{:30}", "=".repeat(full) + head), "{fraction}");
        }
    }

    #[test]
    fn resumed_units_do_not_count_for_the_pace() {
        let mut timing = Timing::new(10, Some(100.0));
        timing.resumed.0 = 4;
        for done in 0..4 {
            assert_eq!((timing.done, timing.shown()), (done, 4), "the bar begins at the resumed units");
            timing.advance();
        }
        // Four of ten units are resumed, and all ten are expected to take 100 s, so six remain.
        assert!((timing.left().unwrap() - 60.0).abs() < 1.0);
        assert_eq!(timing.pace(), None);
        (timing.last, timing.resumed.1) = (ago(20), ago(20));
        timing.advance();
        assert_eq!(timing.shown(), 5);
        // This run's first unit took 20 s.
        assert!((timing.pace().unwrap() - 20.0).abs() < 1.0);
        assert!((timing.left().unwrap() - 100.0).abs() < 1.0);
    }
}
