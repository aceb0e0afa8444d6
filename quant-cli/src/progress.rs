//! Progress on stderr: a bar with ETA on a terminal, a line now and then elsewhere.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use quant_core::checkpoint::printable_lines;
use quant_core::{Event, Observer};
use serde::Serialize;

use crate::output::{duration, tell};

/// Without a terminal, a line is printed at most this often.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Shows the events of a run.
pub struct Progress {
    mode: Mode,
    state: Mutex<Option<Stage>>,
    steps: Mutex<Vec<StepTime>>,
}

/// What a step took in all.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepTime {
    /// Its name.
    pub step: &'static str,
    /// Seconds.
    pub seconds: f64,
}

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Quiet,
    Lines,
    Bar,
}

struct Stage {
    name: &'static str,
    unit: &'static str,
    units: u64,
    done: u64,
    started: Instant,
    told: Instant,
    bar: Option<ProgressBar>,
    rate: Option<u64>,
}

impl Progress {
    /// Progress for this process: silent when asked for.
    pub fn new(quiet: bool) -> Self {
        let dumb = std::env::var_os("TERM").is_some_and(|t| t.is_empty() || t == "dumb");
        let mode = match (quiet, std::io::stderr().is_terminal() && !dumb) {
            (true, _) => Mode::Quiet,
            (false, true) => Mode::Bar,
            (false, false) => Mode::Lines,
        };
        Self { mode, state: Mutex::new(None), steps: Mutex::default() }
    }

    /// A note to the user.
    pub fn note(&self, text: &str) {
        if self.mode == Mode::Quiet {
            return;
        }
        let state = self.lock();
        match state.as_ref().and_then(|s| s.bar.as_ref()) {
            Some(bar) => bar.suspend(|| tell(text)),
            None => tell(text),
        }
    }

    /// What each step took so far, in the order in which they first came.
    pub fn step_times(&self) -> Vec<StepTime> {
        self.steps.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    fn add_time(&self, step: &'static str, elapsed: Duration) {
        let mut steps = self.steps.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let seconds = elapsed.as_secs_f64();
        match steps.iter_mut().find(|s| s.step == step) {
            Some(known) => known.seconds += seconds,
            None => steps.push(StepTime { step, seconds }),
        }
    }

    /// From now on, a unit stands for this many tokens, and the rate is shown in them.
    pub fn tokens_per_unit(&self, tokens: Option<u64>) -> Rated<'_> {
        Rated { progress: self, tokens }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Stage>> {
        // A poisoned lock only means that another thread panicked while it drew.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn show(&self, event: &Event, tokens: Option<u64>) {
        match event {
            Event::StageStarted { stage, unit, units } => {
                let now = Instant::now();
                let bar = (self.mode == Mode::Bar).then(|| bar(stage, *units));
                *self.lock() = Some(Stage {
                    name: stage,
                    unit,
                    units: *units,
                    done: 0,
                    started: now,
                    told: now,
                    bar,
                    rate: tokens,
                });
            }
            Event::UnitDone { detail } => {
                if let Some(stage) = self.lock().as_mut() {
                    stage.advance(detail, self.mode);
                }
            }
            Event::StageDone => {
                if let Some(Stage { bar: Some(bar), .. }) = self.lock().take() {
                    bar.finish_and_clear();
                }
            }
            Event::StepDone { step, elapsed } => self.add_time(step, *elapsed),
            Event::Warning { message } => self.note(&format!("warning: {message}")),
            _ => {}
        }
    }
}

impl Observer for Progress {
    fn event(&self, event: &Event) {
        self.show(event, None);
    }
}

/// A [`Progress`] whose units are so many tokens each.
pub struct Rated<'a> {
    progress: &'a Progress,
    tokens: Option<u64>,
}

impl Observer for Rated<'_> {
    fn event(&self, event: &Event) {
        self.progress.show(event, self.tokens);
    }
}

impl Stage {
    fn advance(&mut self, detail: &str, mode: Mode) {
        self.done += 1;
        let elapsed = self.started.elapsed().as_secs_f64();
        let rate = self
            .rate
            .filter(|_| elapsed > 0.0)
            .map(|tokens| format!("{:.0} tokens/s ", (self.done * tokens) as f64 / elapsed));
        let rate = rate.unwrap_or_default();
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{rate}{}", printable_lines(detail)));
            bar.inc(1);
        }
        if mode == Mode::Lines && self.told.elapsed() >= LINE_INTERVAL && self.done < self.units {
            self.told = Instant::now();
            let left = elapsed / self.done as f64 * (self.units - self.done) as f64;
            tell(&format!(
                "{}: {} {} of {}, {rate}{} left",
                self.name,
                self.unit,
                self.done,
                self.units,
                duration(left)
            ));
        }
    }
}

fn bar(stage: &'static str, units: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(units), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{prefix:>9} [{bar:30}] {pos}/{len} {eta} left {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ");
    bar.set_style(style);
    bar.set_prefix(stage);
    // It takes a thread, without which the bar moves with the units.
    if std::thread::Builder::new().spawn(|| ()).is_ok() {
        bar.enable_steady_tick(Duration::from_millis(500));
    }
    bar
}
