//! `cargo xtask same-bytes`: checks that no tensor, configuration, index or plan of an existing recipe has changed.
//!
//! Two programs, one from an earlier revision, quantize and plan tiny random checkpoints. Their outputs are compared as
//! described in `compare.rs`; exit codes must be equal. Cases are built from the features of the base, so features that
//! only the new program has are not covered.

mod cases;
mod compare;
mod lists;
mod models;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::support::base::{Pair, Programs};
use crate::support::shell::{remove_dir, root, target_dir};
use cases::{Case, Known, Workspace};

/// The programs and the cases.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    /// The two programs
    pub programs: Pair,
    /// Run only the cases whose names contain one of these strings
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Compare tensors, indexes and config.json only: not plans, reports and manifests, whose sentences may have changed
    #[arg(long)]
    pub weights: bool,
    /// Concurrent cases [default: two per CPU, because runs wait for the disk]
    #[arg(long)]
    pub jobs: Option<usize>,
}

/// The result of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    /// Both succeeded, and nothing differs.
    Equal,
    /// Both refused it with this exit code.
    Refused(i32),
    /// The first difference.
    Different(String),
}

/// Compares the programs and prints a table of all cases.
///
/// # Errors
/// When a program cannot be built, or an output differs.
pub fn run(args: &Args) -> Result<()> {
    let programs = args.programs.programs()?;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = args.jobs.unwrap_or(2 * cpus).max(1);

    let start = Instant::now();
    let scratch = std::path::absolute(target_dir())?.join("same-bytes");
    remove_dir(&scratch)?;
    let demo = std::path::absolute(root().join("calibration-data/demo-model"))?;
    let workspace = Workspace::create(&scratch, &demo)?;
    let help = execute(&programs.base, &scratch, &["quantize", "--help"])?;
    let known = Known::from_help(&String::from_utf8_lossy(&help.stdout))?;
    prepare(&workspace, &programs)?;
    let mut cases = workspace.cases(&known);
    cases.retain(|case| args.only.is_empty() || args.only.iter().any(|text| case.name.contains(&**text)));
    ensure!(!cases.is_empty(), "no case has {} in its name", args.only.join(" or "));
    let outcomes = run_all(&cases, &programs, &scratch.join("cases"), jobs, args.weights);
    summarize(&cases, &outcomes, start.elapsed().as_secs_f64())
}

fn execute(program: &Path, directory: &Path, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(program);
    command.current_dir(directory).args(arguments).stdin(Stdio::null());
    command.output().with_context(|| format!("cannot start {}", program.display()))
}

fn prepare(workspace: &Workspace, programs: &Programs) -> Result<()> {
    for (case, directory) in workspace.preparations() {
        std::fs::create_dir_all(&directory)?;
        let output = execute(&programs.base, &directory, &quantize(&case))?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the base cannot create {}:\n{stderr}", case.name);
        let maxima = directory.join(cases::MAXIMA);
        if maxima.is_file() {
            std::fs::copy(&maxima, workspace.kept_maxima())?;
        }
    }
    Ok(())
}

/// Runs the cases, several at a time, and prints one row for each in their order.
fn run_all(cases: &[Case], programs: &Programs, scratch: &Path, jobs: usize, weights: bool) -> Vec<Outcome> {
    let width = cases.iter().map(|case| case.name.len()).max().unwrap_or(0);
    println!("{:width$}  result", "case");
    let (next, (sender, receiver)) = (AtomicUsize::new(0), mpsc::channel());
    let mut outcomes = Vec::new();
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                while let Some((index, case)) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, cases.get(i)?)))
                {
                    let outcome = run_case(case, programs, &scratch.join(index.to_string()), weights)
                        .unwrap_or_else(|error| Outcome::Different(format!("{error:#}")));
                    let _ = sender.send((index, outcome));
                }
            });
        }
        drop(sender);
        let mut waiting = BTreeMap::new();
        for (index, outcome) in receiver {
            waiting.insert(index, outcome);
            while let Some(outcome) = waiting.remove(&outcomes.len()) {
                println!("{:width$}  {}", cases[outcomes.len()].name, outcome.text());
                outcomes.push(outcome);
            }
        }
    });
    outcomes
}

/// Runs a case with both programs below a directory, which is removed unless something differs.
fn run_case(case: &Case, programs: &Programs, scratch: &Path, weights: bool) -> Result<Outcome> {
    let [base, ours] = ["base", "ours"].map(|side| scratch.join(side));
    for side in [&base, &ours] {
        std::fs::create_dir_all(side).with_context(|| format!("cannot create {}", side.display()))?;
    }
    let outcome = compare_both(case, programs, [&base, &ours], weights)?;
    match outcome {
        Outcome::Different(text) => Ok(Outcome::Different(format!("{text} [{}]", scratch.display()))),
        same => remove_dir(scratch).map(|()| same),
    }
}

fn compare_both(
    case: &Case,
    programs: &Programs,
    [base, ours]: [&Path; 2],
    weights: bool,
) -> Result<Outcome> {
    let both = |arguments: &[&str]| -> Result<_> {
        Ok((execute(&programs.base, base, arguments)?, execute(&programs.ours, ours, arguments)?))
    };
    let model = case.model.to_string_lossy();
    let options: Vec<&str> = case.options.iter().map(String::as_str).collect();
    let mut codes = Vec::new();
    for (subcommand, arguments) in [
        ("plan", [&["plan", &*model, "--json", "--quiet"], &*options].concat()),
        ("quantize", quantize(case)),
    ] {
        let (of_base, of_ours) = both(&arguments)?;
        let (was, is) = (of_base.status.code(), of_ours.status.code());
        if was != is {
            let stderr = String::from_utf8_lossy(&of_ours.stderr);
            let last = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
            return Ok(Outcome::Different(format!("{subcommand} exits with {is:?}, was {was:?}: {last}")));
        }
        if subcommand == "plan"
            && !weights
            && let Some(difference) = compare::plans(&of_base.stdout, &of_ours.stdout)
        {
            return Ok(Outcome::Different(format!("{subcommand}: {difference}")));
        }
        codes.push(was.context("a program was ended by a signal")?);
    }
    if let Some(difference) = compare::directories(base, ours, weights)? {
        return Ok(Outcome::Different(difference));
    }
    Ok(codes.into_iter().find(|code| *code != 0).map_or(Outcome::Equal, Outcome::Refused))
}

fn quantize(case: &Case) -> Vec<&str> {
    let mut arguments = vec!["quantize", case.model.to_str().unwrap_or_default(), "-o", "out", "--quiet"];
    arguments.extend(case.options.iter().chain(&case.writing).map(String::as_str));
    if !case.options.iter().any(|option| option == "--threads") {
        arguments.extend(["--threads", "1"]);
    }
    arguments
}

impl Outcome {
    fn text(&self) -> String {
        match self {
            Self::Equal => "equal".to_owned(),
            Self::Refused(code) => format!("refused by both ({code})"),
            Self::Different(difference) => format!("DIFFERENT: {difference}"),
        }
    }
}

fn summarize(cases: &[Case], outcomes: &[Outcome], seconds: f64) -> Result<()> {
    let count = |is: fn(&Outcome) -> bool| outcomes.iter().filter(|outcome| is(outcome)).count();
    let equal = count(|outcome| *outcome == Outcome::Equal);
    let refused = count(|outcome| matches!(outcome, Outcome::Refused(_)));
    let different = outcomes.len() - equal - refused;
    println!(
        "\n{} cases in {seconds:.0} s: {equal} equal, {refused} refused by both, {different} different",
        cases.len()
    );
    for (case, outcome) in cases.iter().zip(outcomes) {
        if matches!(outcome, Outcome::Different(_)) {
            println!("{}: {}\n  quant {}", case.name, outcome.text(), quantize(case).join(" "));
        }
    }
    ensure!(outcomes.len() == cases.len(), "{} cases did not run", cases.len() - outcomes.len());
    ensure!(different == 0, "{different} of {} cases differ", cases.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Writes an executable script, by another process: while this process has it open for writing, it cannot be
    /// executed.
    fn script(path: &Path, text: &str) {
        let mut command = Command::new("sh");
        command.args(["-c", "cat > \"$0\" && chmod +x \"$0\""]).arg(path).stdin(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
    }

    /// A program that prints this plan, then writes these contents, then exits with these codes.
    fn program(plan: &str, contents: &str, codes: [i32; 2]) -> String {
        let [plan_code, code] = codes;
        format!(
            "#!/bin/sh\nif [ \"$1\" = plan ]; then echo '{plan}'; exit {plan_code}; fi\n\
             mkdir out && printf '%s' '{contents}' > out/config.json\nexit {code}\n"
        )
    }

    fn outcome_of(base: &str, ours: &str) -> (Outcome, bool) {
        outcome_with(base, ours, false)
    }

    fn outcome_with(base: &str, ours: &str, weights: bool) -> (Outcome, bool) {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        script(&at("b"), base);
        script(&at("o"), ours);
        let programs = Programs { base: at("b"), ours: at("o") };
        let case =
            Case { name: "a".into(), model: at("model"), options: vec!["--x".into()], writing: Vec::new() };
        let outcomes = run_all(&[case.clone(), case], &programs, &at("cases"), 2, weights);
        let [first, second] = <[Outcome; 2]>::try_from(outcomes).unwrap();
        let kept = [at("cases/0"), at("cases/1")].map(|kept| kept.exists());
        assert_eq!(kept[0], kept[1]);
        assert_eq!(std::mem::discriminant(&first), std::mem::discriminant(&second));
        (first, kept[0])
    }

    #[test]
    fn a_planted_difference_of_any_kind_is_found() {
        let base = program("{\"a\": 1}", "{\"b\": 1}", [0, 0]);
        assert_eq!(outcome_of(&base, &base), (Outcome::Equal, false));
        let refusing = program("", "", [2, 4]);
        assert_eq!(outcome_of(&refusing, &refusing), (Outcome::Refused(2), false));
        for (ours, expected) in [
            (program("{\"a\": 2}", "{\"b\": 1}", [0, 0]), "plan: /a is 2, was 1"),
            (program("{\"a\": 1, \"formats\": []}", "{\"b\": 1}", [0, 0]), "plan: /formats is new"),
            (program("{\"a\": 1}", "{\"b\": 2}", [0, 0]), "out/config.json: /b is 2, was 1"),
            (program("{\"a\": 1}", "{\"b\": 1}", [2, 0]), "plan exits with Some(2), was Some(0)"),
            (program("{\"a\": 1}", "{\"b\": 1}", [0, 4]), "quantize exits with Some(4), was Some(0)"),
            ("#!/bin/sh\nkill -9 $$\n".into(), "plan exits with None, was Some(0)"),
        ] {
            let (outcome, kept) = outcome_of(&base, &ours);
            assert!(kept, "different outputs are kept for inspection");
            assert!(matches!(&outcome, Outcome::Different(text) if text.contains(expected)), "{outcome:?}");
        }
        let other_plan = program("{\"a\": 2}", "{\"b\": 1}", [0, 0]);
        assert_eq!(outcome_with(&base, &other_plan, true), (Outcome::Equal, false));
        let other_file = program("{\"a\": 1}", "{\"b\": 2}", [0, 0]);
        assert!(matches!(outcome_with(&base, &other_file, true).0, Outcome::Different(_)));
        let crash = "#!/bin/sh\nkill -9 $$\n";
        assert!(matches!(outcome_of(crash, crash).0, Outcome::Different(text) if text.contains("signal")));
    }

    #[test]
    fn the_summary_fails_where_something_differs() {
        let case = |name: &str| Case {
            name: name.into(),
            model: "m".into(),
            options: Vec::new(),
            writing: vec!["--y".into()],
        };
        let cases = [case("a"), case("b")];
        let equal = [Outcome::Equal, Outcome::Refused(2)];
        assert!(summarize(&cases, &equal, 1.0).is_ok());
        assert!(summarize(&cases, &equal[..1], 1.0).is_err());
        assert!(summarize(&cases, &[Outcome::Equal, Outcome::Different("x".into())], 1.0).is_err());
        assert_eq!(quantize(&cases[0])[1..], ["m", "-o", "out", "--quiet", "--y", "--threads", "1"]);
    }
}
