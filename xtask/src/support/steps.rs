//! Named steps in order, each timed, with a summary table at the end.

use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Result, bail};

use super::measure::children_cpu_time;
use super::shell::Held;

/// What a step does.
type Action = fn() -> Result<()>;

/// Runs steps in sequence. If one fails, the others still run.
#[derive(Debug, Default)]
pub struct Steps {
    rows: Vec<Row>,
    only: Vec<String>,
    /// The names of all steps so far, whether they ran or not.
    known: Vec<String>,
}

#[derive(Debug)]
struct Row {
    name: String,
    took: Duration,
    /// CPU time of the programs that the step ran.
    cpu: Option<Duration>,
    failure: Option<String>,
}

/// The number of the day, for checks that take turns.
pub fn day() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs() / (24 * 60 * 60)
}

impl Steps {
    /// All steps, or only those named in `only` if it is not empty.
    pub fn new(only: &[String]) -> Self {
        Self { only: only.to_vec(), ..Self::default() }
    }

    fn is_chosen(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|o| o == name)
    }

    /// Runs a command as a step in parallel with other steps, and prints its output after they have ended. Of its wall
    /// time, only the part after the other steps have ended is counted.
    pub fn alongside(&mut self, name: &str, command: &mut Command, others: impl FnOnce(&mut Self)) {
        let started = self.is_chosen(name).then(|| Held::start(command));
        others(self);
        if let Some(started) = started {
            self.step(name, || started?.finish());
        } else {
            self.known.push(name.to_owned());
        }
    }

    /// Runs a step if it is selected.
    pub fn step(&mut self, name: &str, action: impl FnOnce() -> Result<()>) {
        self.known.push(name.to_owned());
        if !self.is_chosen(name) {
            return;
        }
        println!("\n==> {name}");
        let (start, cpu_before) = (Instant::now(), children_cpu_time());
        let failure = action().err().map(|e| format!("{e:#}"));
        if failure.is_some() {
            println!("==> {name} FAILED");
        }
        let cpu = children_cpu_time().zip(cpu_before).map(|(after, before)| after.saturating_sub(before));
        self.rows.push(Row { name: name.to_owned(), took: start.elapsed(), cpu, failure });
    }

    /// Runs one of these steps, by turns: one a day. Any of them runs if it is chosen by name.
    pub fn by_turns(&mut self, steps: &[(&str, Action)]) {
        let turn = day() as usize % steps.len();
        for (at, (name, action)) in steps.iter().enumerate() {
            if at == turn || !self.only.is_empty() {
                self.step(name, action);
            } else {
                self.known.push((*name).to_owned());
                println!("\n{name} is not run today: {} is", steps[turn].0);
            }
        }
    }

    /// Prints the table.
    ///
    /// # Errors
    /// When a step failed, or a chosen name is not that of a step.
    pub fn finish(self) -> Result<()> {
        // Failures are repeated at the end.
        for row in &self.rows {
            if let Some(reason) = &row.failure {
                println!("\n==> {} FAILED: {reason}", row.name);
            }
        }
        println!("\n{}", self.table());
        if let Some(name) = self.only.iter().find(|name| !self.known.contains(name)) {
            let distances =
                self.known.iter().map(|known| (strsim::osa_distance(known, &name.to_lowercase()), known));
            let near = distances.min().filter(|(distance, _)| 2 * distance <= name.len());
            let meant = near.map_or_else(String::new, |(_, near)| format!("did you mean {near}? "));
            bail!("no step is named {name}; {meant}the steps are {}", self.known.join(", "));
        }
        let failed: Vec<_> = self.rows.iter().filter(|r| r.failure.is_some()).map(|r| &*r.name).collect();
        if !failed.is_empty() {
            bail!("{} of {} steps failed: {}", failed.len(), self.rows.len(), failed.join(", "));
        }
        Ok(())
    }

    fn table(&self) -> String {
        let width = self.rows.iter().map(|r| r.name.len()).max().unwrap_or(0).max("total".len());
        let line = |name: &str, took: Duration, cpu: Option<Duration>, result: &str| {
            let cpu = cpu.map_or_else(String::new, minutes);
            format!("{name:width$}  {:>8}  {cpu:>8}  {result}", minutes(took)).trim_end().to_owned() + "\n"
        };
        let mut table = format!("{:width$}  {:>8}  {:>8}  result\n", "step", "time", "CPU time");
        for row in &self.rows {
            let result = if row.failure.is_some() { "FAILED" } else { "ok" };
            table += &line(&row.name, row.took, row.cpu, result);
        }
        let total = self.rows.iter().map(|r| r.took).sum();
        table += &line("total", total, self.rows.iter().map(|r| r.cpu).sum(), "");
        table
    }
}

fn minutes(duration: Duration) -> String {
    let tenths = duration.as_millis() / 100;
    format!("{}:{:02}.{}", tenths / 600, tenths / 10 % 60, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_several_steps_runs_unless_some_are_chosen() {
        fn fine() -> Result<()> {
            Ok(())
        }
        let turns: [(&str, Action); 2] = [("a", fine), ("b", fine)];
        let run = |only: &[String]| {
            let mut steps = Steps::new(only);
            steps.by_turns(&turns);
            let names: Vec<String> = steps.rows.iter().map(|row| row.name.clone()).collect();
            (names, steps.finish())
        };
        let (names, outcome) = run(&[]);
        assert!(names == ["a"] || names == ["b"], "{names:?}");
        assert!(outcome.is_ok());
        for name in ["a", "b"] {
            let (names, outcome) = run(&[name.to_owned()]);
            assert_eq!(names, [name]);
            assert!(outcome.is_ok());
        }
    }

    #[test]
    fn a_failure_is_reported_after_the_other_steps_ran() {
        let mut steps = Steps::new(&[]);
        let mut ran = Vec::new();
        steps.step("first", || bail!("broken"));
        steps.step("second", || {
            ran.push("second");
            Ok(())
        });
        let table = steps.table();
        assert!(table.contains("first") && table.contains("FAILED"), "{table}");
        assert!(steps.finish().unwrap_err().to_string().contains("first"));
        assert_eq!(ran, ["second"]);
    }

    #[test]
    fn a_parallel_step_ends_after_the_others_and_fails_alone() {
        let mut steps = Steps::new(&[]);
        steps.alongside("background", Command::new("false").arg("1"), |steps| steps.step("other", || Ok(())));
        let names: Vec<_> = steps.rows.iter().map(|row| (&*row.name, row.failure.is_some())).collect();
        assert_eq!(names, [("other", false), ("background", true)]);
        let mut steps = Steps::new(&["other".into()]);
        steps.alongside("background", &mut Command::new("false"), |steps| steps.step("other", || Ok(())));
        steps.finish().unwrap();
    }

    #[test]
    fn only_the_chosen_steps_run() {
        let mut steps = Steps::new(&["second".into()]);
        steps.step("first", || bail!("must not run"));
        steps.step("second", || Ok(()));
        steps.finish().unwrap();
        let mut steps = Steps::new(&["first".into(), "Secnod".into()]);
        steps.step("first", || Ok(()));
        steps.step("second", || bail!("must not run"));
        let message = steps.finish().unwrap_err().to_string();
        assert_eq!(message, "no step is named Secnod; did you mean second? the steps are first, second");
    }

    #[test]
    fn times_are_minutes_and_seconds() {
        assert_eq!(minutes(Duration::from_millis(187_450)), "3:07.4");
    }
}
