//! `quant eval --shards PLACE`: an evaluation whose windows are measured by several processes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use quant_core::Result;
use quant_core::run::Text;
use quant_core::units::{SharedFiles, check_location, is_url};
use quant_core::wording::counted;
use quant_evaluator::{
    Divergence, Measured, Scores, Shard, ShardFiles, compare_shard, divergence_of_shards, merged_shards,
    perplexity_shard, scores_of_shards, shard_journal,
};
use serde::Serialize;

use super::eval::{Args, Setup};
use super::reference::OpenedReference;
use super::{Session, job};

/// How an evaluation is split.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ShardOptions {
    /// Directory for the measurements of shards, which all machines can read and write, or s3://BUCKET/PREFIX, gs:// or
    /// az:// in a build with object stores. With --shard, measure one; without it, merge all shards into the result
    #[arg(long, value_name = "STORE", conflicts_with_all = ["journal", "save_reference", "ablation"])]
    pub shards: Option<PathBuf>,
    /// Measure only shard I of N, from 0; the shards may run at the same time, on different machines
    #[arg(long, value_name = "I/N", value_parser = job::shard, requires = "shards",
        conflicts_with_all = ["report", "compare"])]
    pub shard: Option<(usize, usize)>,
}

impl ShardOptions {
    /// The shard to measure, if only one is measured.
    pub fn selected(&self) -> Result<Option<Shard>> {
        self.shard.map(|(index, count)| Shard::new(index, count)).transpose()
    }

    /// The directory, unless it is the URL of an object store.
    ///
    /// # Errors
    /// When such a URL is invalid, or this program cannot open it.
    pub fn directory(&self) -> Result<Option<&Path>> {
        let Some(place) = &self.shards else { return Ok(None) };
        check_location(place)?;
        Ok(Some(place.as_path()).filter(|place| !is_url(place)))
    }
}

#[derive(Serialize)]
struct ShardJson {
    schema: &'static str,
    first_window: usize,
    end_window: usize,
    of_windows: usize,
    /// Windows that an earlier run of the shard had measured.
    known: usize,
}

/// Measures a shard, and prints which windows it has.
pub fn run(args: &Args, source: &Text, shard: Shard, session: &Session) -> Result<()> {
    let Some(place) = &args.shards.shards else { return Ok(()) };
    let mut setup = Setup::new(args, source, session)?;
    let files: Arc<dyn ShardFiles> = Arc::new(SharedFiles::create(place, &session.host())?);
    let windows = shard.windows(setup.text());
    let known = match setup.reference() {
        Some(_) => measure(&mut setup, args, (&files, shard), session)?,
        None => {
            let mut journal = shard_journal(&files, shard, &setup.identity(), setup.text())?;
            let known = noted(&journal, windows.len(), session);
            if known < windows.len() {
                let (decoder, text) = (setup.decoder(args.execution, session)?, setup.text());
                let observer = session.progress.tokens_per_unit(Some(text.longest_input() as u64));
                perplexity_shard(&decoder, text, shard, &mut journal, &observer, &session.cancel)?;
            }
            known
        }
    };
    let json = ShardJson {
        schema: "quant-eval-shard/1",
        first_window: windows.start,
        end_window: windows.end,
        of_windows: setup.text().windows.len(),
        known,
    };
    args.json.emit(&json, || match windows.len() {
        0 => "the text has fewer shards: no windows belong to this one\n".to_owned(),
        some => format!(
            "{} of {} measured, from window {}\n",
            counted(some, "window"),
            json.of_windows,
            windows.start
        ),
    })
}

fn measure(
    setup: &mut Setup,
    args: &Args,
    (files, shard): (&Arc<dyn ShardFiles>, Shard),
    session: &Session,
) -> Result<usize> {
    let mut journal = shard_journal(files, shard, &setup.identity(), setup.text())?;
    let windows = shard.windows(setup.text()).len();
    let known = noted(&journal, windows, session);
    if known == windows {
        return Ok(known);
    }
    let decoder = setup.decoder(args.execution, session)?;
    if let Some(reference) = setup.take_reference(session)? {
        let text = setup.text();
        let observer = session.progress.tokens_per_unit(Some(text.longest_input() as u64));
        let reference = reference.compared();
        compare_shard(reference, &decoder, text, shard, &mut journal, &observer, &session.cancel)?;
    }
    Ok(known)
}

/// Returns the number of windows that an earlier run has measured.
fn noted<T: Measured>(journal: &quant_evaluator::Journal<T>, windows: usize, session: &Session) -> usize {
    let known = journal.windows();
    if known > 0 {
        session.progress.note(&format!("{known} of {windows} windows have already been measured"));
    }
    known
}

/// Merges the measurements of all shards. No weights are read.
pub fn merged(setup: &Setup, place: &Path, session: &Session) -> Result<(Scores, Option<Divergence>)> {
    let (identity, text) = (setup.identity(), setup.text());
    let files: Arc<dyn ShardFiles> = Arc::new(SharedFiles::open(place, &session.host())?);
    let floor = match setup.reference() {
        None => {
            let measured = merged_shards(&files, &identity, text)?;
            return Ok((scores_of_shards(text, &measured)?, None));
        }
        Some(OpenedReference::Stored(stored)) => Some(stored.noise_floor().clone()),
        Some(OpenedReference::Model(_)) => None,
    };
    let measured = merged_shards(&files, &identity, text)?;
    let (scores, divergence) = divergence_of_shards(text, &measured, floor)?;
    Ok((scores, Some(divergence)))
}
