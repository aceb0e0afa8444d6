//! `cargo xtask peers-awq`: our AWQ against llm-compressor's, on the same calibration tokens.
//!
//! The peer runs as published, in a virtual environment that is made here from its package index
//! (`benchmarks/peers/`). Its windows are sampled a second time in Python; that they are ours is
//! proved by the digest that our report holds.

mod peer;
mod quality;
mod speed;

use anyhow::Result;

/// What to compare.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum What {
    /// Divergence from the float model on the rows of every table of quality
    Quality(quality::Args),
    /// Time and peak memory on a few layers in the shape of a 1B Llama; wants a quiet machine
    Speed(speed::Args),
}

/// Measures and writes the record.
///
/// # Errors
/// When something cannot be run, or a claim that was to be checked does not hold.
pub fn run(args: &Args) -> Result<()> {
    match &args.what {
        What::Quality(args) => quality::run(args),
        What::Speed(args) => speed::run(args),
    }
}
