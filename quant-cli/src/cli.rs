//! The commands, and the options that all of them share.

use std::ffi::OsString;

use clap::{Parser, Subcommand};

use crate::commands::{
    bench, chat, compare, completions, demo, eval, gate, generate, inspect, job, plan, quantize,
};

const EXIT_CODES: &str = "Exit codes:
  0   done and verified; the gate passes
  1   the gate fails
  2   usage: the request is invalid or cannot be carried out
  3   the gate is inconclusive: too few windows to decide
  4   bad input: an input file is broken, malicious or unsupported
  5   environment: disk, memory, permissions or network
  6   numeric: NaN, infinity or degenerate statistics
  70  a bug in quant
  75  interrupted; the message says how to resume the run, if that is possible";

/// Quantize Hugging Face language models into checkpoints that other engines load, and measure the
/// accuracy loss.
#[derive(Debug, Parser)]
#[command(name = "quant", version, after_help = EXIT_CODES, max_term_width = 100)]
pub struct Cli {
    /// Number of threads [default: all cores]; results do not depend on it
    #[arg(long, global = true, value_parser = threads)]
    pub threads: Option<usize>,
    /// Suppress progress and notes
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Quantize the built-in model with each method and compare the results
    Demo(demo::Args),
    /// Show what quantization would do to each tensor, without computing anything
    Plan(plan::Args),
    /// Quantize a model
    Quantize(quantize::Args),
    /// Quantize a model in units that several processes or machines compute
    Job(job::Args),
    /// Write the checkpoint of a job whose units are finished
    Merge(job::MergeArgs),
    /// Measure perplexity, and the divergence from a reference model
    Eval(eval::Args),
    /// Show results of eval next to each other, and which model is closest to the reference
    Compare(compare::Args),
    /// Check with a policy whether a model has become worse
    Gate(gate::Args),
    /// Show the contents of a checkpoint
    Inspect(inspect::Args),
    /// Generate text from a prompt
    Generate(generate::Args),
    /// Chat with a model
    Chat(chat::Args),
    /// Measure the tokens per second of prefill and generation
    Bench(bench::Args),
    /// Print a completion script for a shell
    Completions(completions::Args),
}

impl Command {
    /// Returns the command line that resumes this run after an interruption, if the run can be resumed.
    pub fn resuming(&self, words: &[OsString]) -> Option<String> {
        let adds = match self {
            Self::Quantize(args) => !args.resume,
            Self::Merge(args) => !args.resume,
            Self::Job(args) if args.continues() => false,
            Self::Eval(args) if args.journal.is_some() => false,
            _ => return None,
        };
        let mut words: Vec<String> =
            words.iter().map(|word| word.to_str().map(str::to_owned)).collect::<Option<_>>()?;
        if adds {
            words.push("--resume".into());
        }
        shlex::try_join(words.iter().map(String::as_str)).ok()
    }
}

fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=1024).contains(&n) => Ok(n),
        _ => Err("expected a number from 1 to 1024".into()),
    }
}
