//! `cargo xtask peers-awq`, `peers-gptq`, `peers-smoothquant`: our methods against those of public
//! quantizers, on the same calibration tokens.
//!
//! Peers run as published, in virtual environments that are made here from their package index
//! (`benchmarks/peers/`). Their windows are sampled a second time in Python; that they are ours is
//! proved by the digest that our report holds. What is compared with what, and what is claimed of it,
//! stands in `contests.rs`.

pub(crate) mod contestant;
mod contests;
mod log;
mod quality;
mod scores;
mod speed;

use anyhow::Result;

pub use contests::{AWQ, Contest, GPTQ};

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

/// What to compare where speed is of no interest.
#[derive(Debug, Clone, clap::Args)]
pub struct QualityArgs {
    #[command(subcommand)]
    what: QualityAlone,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum QualityAlone {
    /// Divergence from the float model on the rows of every table of quality
    Quality(quality::Args),
}

/// Measures and writes the record.
///
/// # Errors
/// When something cannot be run, or a claim that was to be checked does not hold.
pub fn run(args: &Args, contest: &Contest) -> Result<()> {
    match &args.what {
        What::Quality(args) => quality::run(args, &contest.quality),
        What::Speed(args) => speed::run(args, &contest.speed),
    }
}

/// The same of SmoothQuant.
///
/// # Errors
/// As [`run`].
pub fn smoothquant(args: &QualityArgs) -> Result<()> {
    let QualityAlone::Quality(args) = &args.what;
    quality::run(args, &contests::SMOOTHQUANT)
}
