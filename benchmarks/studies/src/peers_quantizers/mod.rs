//! `cargo study peers-awq`, `peers-gptq`, `peers-smoothquant`: compare quant's methods with public quantizers on the
//! same calibration tokens.
//!
//! Peers run as published, in virtual environments (`benchmarks/peers/`). The digest in quant's report proves that the
//! calibration tokens are the same. `contests.rs` lists the comparisons and the claims.

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
    /// Divergence from the float model on the rows of every quality table
    Quality(quality::Args),
    /// Time and peak memory on a few layers in the shape of a 1B Llama; needs a quiet machine
    Speed(speed::Args),
}

/// What to compare, for a method without a speed comparison.
#[derive(Debug, Clone, clap::Args)]
pub struct QualityArgs {
    #[command(subcommand)]
    what: QualityAlone,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum QualityAlone {
    /// Divergence from the float model on the rows of every quality table
    Quality(quality::Args),
}

/// Measures and writes the record.
///
/// # Errors
/// When a run fails, or when `--check` is given and a claim does not hold.
pub fn run(args: &Args, contest: &Contest) -> Result<()> {
    match &args.what {
        What::Quality(args) => quality::run(args, &contest.quality),
        What::Speed(args) => speed::run(args, &contest.speed),
    }
}

/// Like [`run`], for SmoothQuant.
///
/// # Errors
/// Same as [`run`].
pub fn smoothquant(args: &QualityArgs) -> Result<()> {
    let QualityAlone::Quality(args) = &args.what;
    quality::run(args, &contests::SMOOTHQUANT)
}
