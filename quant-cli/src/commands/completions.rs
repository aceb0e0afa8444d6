//! `quant completions SHELL`: prints a completion script.

use clap::CommandFactory;
use clap_complete::Shell;
use quant_core::Result;

use crate::cli::Cli;
use crate::output;

/// The shell for which a script is printed.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell
    pub shell: Shell,
}

/// Prints the script.
pub fn run(args: &Args) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "quant", &mut script);
    output::print_raw(&String::from_utf8_lossy(&script))
}
