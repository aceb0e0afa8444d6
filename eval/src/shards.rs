//! Evaluations in shards: processes, on one machine or on many, each measure a part of a text's windows. Their
//! measurements are merged afterwards, and the result is bit-identical to that of one process.
//!
//! Each shard has a [`Journal`] in a directory that all processes see, so an interrupted shard resumes.

use std::ops::Range;
use std::path::{Path, PathBuf};

use quant_formats::wording::counted;
use quant_formats::{CancelToken, Error, Observer, Result};
use serde_json::{Value, json};

use crate::divergence::{measure_positions, summarize};
use crate::journal::read_whole;
use crate::perplexity::measure_likelihoods;
use crate::score::consecutive;
use crate::{Divergence, EvaluationText, Journal, Measured, NoiseFloor, Position, Reference, Scored, Scores};

/// Maximum number of shards.
pub const MAX_SHARDS: usize = 1 << 16;
const MAX_LISTED: usize = 8;

/// A share of an evaluation's windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    index: usize,
    count: usize,
}

impl Shard {
    /// The shard `index` of `count`, from 0.
    ///
    /// # Errors
    /// [`Error::Usage`] if there is no such shard, or there are more than [`MAX_SHARDS`].
    pub fn new(index: usize, count: usize) -> Result<Self> {
        if index < count && count <= MAX_SHARDS {
            return Ok(Self { index, count });
        }
        Err(Error::usage(
            format!("‹shard› {index} of {count} does not exist"),
            format!("shards are numbered from 0; there are at most {MAX_SHARDS}"),
        ))
    }

    /// The windows of this shard, which are consecutive. Windows that go through a decoder together are in the same
    /// shard, so a text may have fewer shards with windows than were requested.
    pub fn windows(self, text: &EvaluationText) -> Range<usize> {
        let starts = consecutive(&text.windows);
        let batches = starts.len() - 1;
        let at = |index: usize| starts[batches * index / self.count];
        at(self.index)..at(self.index + 1)
    }

    fn file(self, directory: &Path) -> PathBuf {
        directory.join(format!("{}-of-{}.journal", self.index, self.count))
    }

    /// Reads the name of a shard's file.
    fn of_file(name: &str) -> Option<Self> {
        let (index, count) = name.strip_suffix(".journal")?.split_once("-of-")?;
        Self::new(index.parse().ok()?, count.parse().ok()?).ok()
    }

    fn identity(self, identity: &Value, windows: &Range<usize>) -> Value {
        json!({ "evaluation": identity, "first_window": windows.start, "end_window": windows.end })
    }
}

fn scored(text: &EvaluationText, windows: Range<usize>) -> Vec<usize> {
    text.windows[windows].iter().map(crate::Window::scored).collect()
}

/// Opens the journal of a shard in a directory, which is created. `identity` identifies the evaluation.
///
/// # Errors
/// As [`Journal::open`].
pub fn shard_journal<T: Measured>(
    directory: &Path,
    shard: Shard,
    identity: &Value,
    text: &EvaluationText,
) -> Result<Journal<T>> {
    std::fs::create_dir_all(directory).map_err(|e| Error::io("create", directory, e))?;
    let windows = shard.windows(text);
    let identity = shard.identity(identity, &windows);
    Journal::open(&shard.file(directory), &identity, &scored(text, windows))
}

/// Scores the windows of a shard, and records them in its journal.
///
/// # Errors
/// As [`perplexity`](crate::perplexity()).
pub fn perplexity_shard<'a>(
    model: impl Into<Scored<'a>>,
    text: &EvaluationText,
    shard: Shard,
    journal: &mut Journal<f64>,
    observer: &dyn Observer,
    cancel: &CancelToken,
) -> Result<()> {
    measure_likelihoods(model.into(), text, shard.windows(text), journal, (observer, cancel)).map(drop)
}

/// Runs a model and its reference over the windows of a shard, and records the measurements in its journal.
///
/// # Errors
/// As [`compare`](crate::compare()).
pub fn compare_shard<'a>(
    reference: Reference<'a>,
    model: impl Into<Scored<'a>>,
    text: &EvaluationText,
    shard: Shard,
    journal: &mut Journal<Position>,
    observer: &dyn Observer,
    cancel: &CancelToken,
) -> Result<()> {
    let windows = shard.windows(text);
    measure_positions(reference, model.into(), text, windows, journal, (observer, cancel)).map(drop)
}

/// Reads the measurements of all shards in a directory, in the order of the windows.
///
/// # Errors
/// [`Error::Unavailable`] if a shard is missing or incomplete; [`Error::Usage`] if the directory has no shards or those
/// of different numbers of shards, or a journal is damaged or belongs to a different evaluation; [`Error::Io`].
pub fn merged_shards<T: Measured>(
    directory: &Path,
    identity: &Value,
    text: &EvaluationText,
) -> Result<Vec<Vec<T>>> {
    let entries = std::fs::read_dir(directory).map_err(|e| Error::io("list", directory, e))?;
    let mut counts = Vec::new();
    for entry in entries {
        let name = entry.map_err(|e| Error::io("list", directory, e))?.file_name();
        counts.extend(name.to_str().and_then(Shard::of_file).map(|shard| shard.count));
    }
    counts.sort_unstable();
    counts.dedup();
    let count = match counts[..] {
        [count] => count,
        [] => {
            return Err(Error::usage(
                format!("{} has no shards of an evaluation", directory.display()),
                "measure them with ‹shard=I/N›",
            ));
        }
        _ => {
            let counts: Vec<String> = counts.iter().map(usize::to_string).collect();
            return Err(Error::usage(
                format!(
                    "{} has shards of different evaluations: of {} shards",
                    directory.display(),
                    counts.join(" and ")
                ),
                "use a directory for each number of shards",
            ));
        }
    };
    let (mut all, mut missing) = (Vec::with_capacity(text.windows.len()), Vec::new());
    for index in 0..count {
        let shard = Shard { index, count };
        let windows = shard.windows(text);
        if windows.is_empty() {
            continue;
        }
        let identity = shard.identity(identity, &windows);
        match read_whole(&shard.file(directory), &identity, &scored(text, windows))? {
            Some(measured) => all.extend(measured),
            None => missing.push(format!("{index}/{count}")),
        }
    }
    if missing.is_empty() {
        return Ok(all);
    }
    let more = if missing.len() > MAX_LISTED { ", …" } else { "" };
    Err(Error::Unavailable {
        what: "the result of the evaluation".into(),
        reason: format!(
            "{} not finished: {}{more}",
            counted(missing.len(), "shard"),
            missing[..missing.len().min(MAX_LISTED)].join(", ")
        ),
        remedy: "measure them with ‹shard=I/N›, then merge again".into(),
    })
}

/// Computes the scores from the measurements of all windows.
///
/// # Errors
/// [`Error::Usage`] if they are not those of this text; when a value is not finite.
pub fn scores_of_shards(text: &EvaluationText, measured: &[Vec<f64>]) -> Result<Scores> {
    check_windows(text, measured)?;
    Scores::new(text, measured)
}

/// Computes the scores and the divergence from the measurements of all windows. `floor` is the noise floor of a stored
/// reference; without it, the floor is computed from the measurements.
///
/// # Errors
/// As [`scores_of_shards`].
pub fn divergence_of_shards(
    text: &EvaluationText,
    measured: &[Vec<Position>],
    floor: Option<NoiseFloor>,
) -> Result<(Scores, Divergence)> {
    check_windows(text, measured)?;
    summarize(text, measured, floor.or_else(|| NoiseFloor::of(measured, |p| p.floor)))
}

fn check_windows<T>(text: &EvaluationText, measured: &[Vec<T>]) -> Result<()> {
    match measured.iter().map(Vec::len).eq(text.windows.iter().map(crate::Window::scored)) {
        true => Ok(()),
        false => Err(Error::usage(
            "the measurements are not those of this text",
            "merge the shards with the text with which they were measured",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Profile, Window};

    fn text(lengths: &[usize]) -> EvaluationText {
        let window = |&length: &usize| Window { tokens: vec![0; length + 1], first: 1 };
        let profile = Profile::gptq(64).unwrap();
        EvaluationText::of_windows(lengths.iter().map(window).collect(), profile).unwrap()
    }

    fn shards(text: &EvaluationText, count: usize) -> Vec<Range<usize>> {
        (0..count).map(|index| Shard::new(index, count).unwrap().windows(text)).collect()
    }

    #[test]
    fn shards_hold_whole_batches() {
        // Two windows of 1000 tokens run together, and windows of different lengths do not.
        let text = text(&[1000, 1000, 1000, 1000, 1000, 600, 600, 600, 600]);
        let whole = shards(&text, 1);
        assert_eq!((whole.len(), &whole[0]), (1, &(0..9)));
        assert_eq!(shards(&text, 2), [0..4, 4..9]);
        assert_eq!(shards(&text, 5), [0..2, 2..4, 4..5, 5..8, 8..9]);
        for count in 1..20 {
            let shards = shards(&text, count);
            assert_eq!((shards[0].start, shards[count - 1].end), (0, 9));
            assert!(shards.windows(2).all(|pair| pair[0].end == pair[1].start));
        }
        assert!(Shard::new(2, 2).is_err() && Shard::new(0, 0).is_err());
        assert!(Shard::new(0, MAX_SHARDS + 1).is_err());
    }

    #[test]
    fn measurements_are_merged_in_order() {
        let directory = tempfile::tempdir().unwrap();
        let text = text(&[1000, 1000, 1000, 600]);
        let identity = json!({ "model": "a" });
        let values = |window: usize| vec![window as f64; text.windows[window].scored()];
        let record = |index: usize, windows: Range<usize>| {
            let shard = Shard::new(index, 2).unwrap();
            let mut journal = shard_journal::<f64>(directory.path(), shard, &identity, &text).unwrap();
            journal.keep(&windows.map(values).collect::<Vec<_>>()).unwrap();
        };
        let merged = |identity: &Value| merged_shards::<f64>(directory.path(), identity, &text);
        assert!(matches!(merged(&identity), Err(Error::Usage { .. })), "no shards");
        record(1, 2..3);
        let error = merged(&identity).unwrap_err();
        assert!(error.to_string().contains("2 shards not finished: 0/2, 1/2"), "{error}");
        record(0, 0..2);
        let error = merged(&identity).unwrap_err();
        assert!(error.to_string().contains("1 shard not finished: 1/2"), "{error}");
        record(1, 3..4);
        let all = merged(&identity).unwrap();
        assert_eq!(all, (0..4).map(values).collect::<Vec<_>>());
        assert!(matches!(merged(&json!({ "model": "b" })), Err(Error::Usage { .. })));
        let nll = scores_of_shards(&text, &all).unwrap().window_nll;
        assert_eq!(nll, [0.0, 1.0, 2.0, 3.0]);
        assert!(scores_of_shards(&text, &all[..3]).is_err());

        std::fs::write(directory.path().join("notes.txt"), "").unwrap();
        assert!(merged(&identity).is_ok(), "other files are ignored");
        std::fs::write(directory.path().join("0-of-3.journal"), "").unwrap();
        let error = merged(&identity).unwrap_err();
        assert!(error.to_string().contains("of 2 and 3 shards"), "{error}");
    }

    /// A shard that is measured again after a change of its file is an error, not a different result.
    #[test]
    fn a_damaged_shard_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (text, identity) = (text(&[600]), json!({ "model": "a" }));
        let shard = Shard::new(0, 1).unwrap();
        let mut journal = shard_journal::<f64>(directory.path(), shard, &identity, &text).unwrap();
        journal.keep(&[vec![0.5; 600]]).unwrap();
        drop(journal);
        let path = shard.file(directory.path());
        let changed = std::fs::read_to_string(&path).unwrap().replacen("0.5", "0.6", 1);
        std::fs::write(&path, changed).unwrap();
        let error = merged_shards::<f64>(directory.path(), &identity, &text).unwrap_err();
        assert!(error.to_string().contains("damaged"), "{error}");
    }
}
