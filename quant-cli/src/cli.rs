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
    /// Compare results of `quant eval`, and show which model is closest to the reference
    Compare(compare::Args),
    /// Fail if a model is worse than a policy allows
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
    /// Whether `plan` predicts the memory of this command.
    pub fn has_predicted_memory(&self) -> bool {
        matches!(self, Self::Quantize(_) | Self::Job(_))
    }

    /// Returns what to do after this run, started with these words, was interrupted.
    pub fn after_interruption(&self, words: &[OsString]) -> String {
        const AGAIN: &str = "run the same command again";
        match self {
            Self::Quantize(args) if !args.has_job() => return format!("nothing was saved yet: {AGAIN}"),
            Self::Quantize(_) | Self::Merge(_) => {}
            Self::Job(args) if args.continues() => {}
            Self::Eval(args) if args.journal.is_some() => {}
            Self::Eval(_) => {
                return format!(
                    "nothing was saved: {AGAIN}; with ‹journal=FILE›, an interrupted evaluation can be continued"
                );
            }
            _ => return AGAIN.to_owned(),
        }
        let words: Option<Vec<String>> = words.iter().map(|word| quoted(word.to_str()?)).collect();
        match words {
            Some(words) => format!("continue with: {}", words.join(" ")),
            None => format!("{AGAIN} to continue"),
        }
    }
}

/// Quotes a word for a shell, if that is necessary.
fn quoted(word: &str) -> Option<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,:+@".contains(c);
    match word.starts_with("--") && word.chars().all(plain) {
        true => Some(word.to_owned()),
        false => shlex::try_quote(word).ok().map(std::borrow::Cow::into_owned),
    }
}

fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=1024).contains(&n) => Ok(n),
        _ => Err("expected a number from 1 to 1024".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(words: &[&str]) -> String {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        Cli::try_parse_from(&words).expect("a command line").command.after_interruption(&words)
    }

    #[test]
    fn only_what_was_saved_is_continued() {
        let folder = tempfile::tempdir().expect("a directory");
        let out = folder.path().join("out");
        let quantize = ["quant", "quantize", "m", "-o", out.to_str().expect("UTF-8"), "--scheme=w4a16"];
        assert_eq!(after(&quantize), "nothing was saved yet: run the same command again");
        std::fs::create_dir(folder.path().join("out.job")).expect("a directory");
        let resumes = after(&quantize);
        assert!(resumes.starts_with("continue with: quant quantize m -o "), "{resumes}");
        assert!(resumes.ends_with(" --scheme=w4a16"), "{resumes}");
        let eval = ["quant", "eval", "m", "--text", "a text"];
        assert!(after(&eval).contains("with ‹journal=FILE›"));
        assert_eq!(
            after(&[&eval[..], &["--journal", "j"]].concat()),
            "continue with: quant eval m --text 'a text' --journal j"
        );
        assert_eq!(after(&["quant", "inspect", "m"]), "run the same command again");
    }
}
