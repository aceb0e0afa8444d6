//! Evaluations in shards: processes, on one machine or on many, each measure a part of a text's windows. Their
//! measurements are merged afterwards, and the result is bit-identical to that of one process.
//!
//! Each shard has a [`Journal`] in [files](ShardFiles) that all processes see, so an interrupted shard resumes. Processes
//! may measure the same shard; their measurements must be equal.

use std::ops::Range;
use std::sync::Arc;

use quant_formats::wording::counted;
use quant_formats::{CancelToken, Error, Observer, Result};
use serde_json::Value;

use crate::divergence::{measure_positions, summarize};
use crate::perplexity::measure_likelihoods;
use crate::score::consecutive;
use crate::shared::{Batches, ShardFiles};
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

    /// The beginning of the names of its files.
    pub(crate) fn name(self) -> String {
        format!("{}-of-{}", self.index, self.count)
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        let (index, count) = name.split_once("-of-")?;
        Self::new(index.parse().ok()?, count.parse().ok()?).ok()
    }
}

/// Opens the journal of a shard. `identity` identifies the evaluation.
///
/// # Errors
/// [`Error::Usage`] if a file of the shard is damaged or belongs to a different evaluation; errors of the files.
pub fn shard_journal<T: Measured>(
    files: &Arc<dyn ShardFiles>,
    shard: Shard,
    identity: &Value,
    text: &EvaluationText,
) -> Result<Journal<T>> {
    Journal::shared(Batches::new(files.clone(), shard, identity, text))
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

/// Reads the measurements of all shards, in the order of the windows.
///
/// # Errors
/// [`Error::Unavailable`] if there are no shards, or one is missing or incomplete; [`Error::Usage`] if there are shards
/// of different numbers of shards, or a file is damaged or belongs to a different evaluation; errors of the files.
pub fn merged_shards<T: Measured>(
    files: &Arc<dyn ShardFiles>,
    identity: &Value,
    text: &EvaluationText,
) -> Result<Vec<Vec<T>>> {
    let names = files.names()?;
    let mut counts: Vec<usize> =
        names.iter().filter_map(|name| Batches::shard_of(name)).map(|shard| shard.count).collect();
    counts.sort_unstable();
    counts.dedup();
    let count = match counts[..] {
        [count] => count,
        [] => {
            return Err(Error::Unavailable {
                what: "the result of the evaluation".into(),
                reason: format!("{} has no shards yet", files.shown("").display()),
                remedy: "measure them with ‹shard=I/N›, then merge".into(),
            });
        }
        _ => {
            let counts: Vec<String> = counts.iter().map(usize::to_string).collect();
            return Err(Error::usage(
                format!(
                    "{} has shards of different evaluations: of {} shards",
                    files.shown("").display(),
                    counts.join(" and ")
                ),
                "set ‹shards› to a different place for each number of shards",
            ));
        }
    };
    let (mut all, mut missing) = (Vec::with_capacity(text.windows.len()), Vec::new());
    for index in 0..count {
        let shard = Shard { index, count };
        let batches = Batches::new(files.clone(), shard, identity, text);
        let known = batches.read()?;
        match batches.is_whole(&known) {
            true => all.extend(known),
            false => missing.push(format!("{index}/{count}")),
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
    use std::collections::BTreeMap;
    use std::path::{Path, PathBuf};
    use std::sync::Mutex;

    use serde_json::json;

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

    /// Files in memory.
    #[derive(Debug, Default)]
    struct Memory(Mutex<BTreeMap<String, Vec<u8>>>);

    impl ShardFiles for Memory {
        fn shown(&self, name: &str) -> PathBuf {
            Path::new("memory").join(name)
        }

        fn names(&self) -> Result<Vec<String>> {
            Ok(self.0.lock().unwrap().keys().cloned().collect())
        }

        fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
            Ok(self.0.lock().unwrap().get(name).cloned())
        }

        fn publish(&self, name: &str, bytes: &[u8]) -> Result<bool> {
            Ok(*self.0.lock().unwrap().entry(name.into()).or_insert(bytes.into()) == bytes)
        }
    }

    impl Memory {
        fn with(files: &[(&str, Vec<u8>)]) -> Arc<dyn ShardFiles> {
            Arc::new(Self(Mutex::new(files.iter().cloned().map(|(n, b)| (n.to_owned(), b)).collect())))
        }
    }

    /// Runs a test on files in memory, and on those of a directory.
    fn on_each(test: impl Fn(Arc<dyn ShardFiles>)) {
        test(Arc::new(Memory::default()));
        #[cfg(feature = "decoders")]
        {
            let directory = tempfile::tempdir().unwrap();
            let cancel = CancelToken::new();
            let host = quant_core::run::Host::new(&quant_formats::Silent, &cancel, &quant_core::run::Nothing);
            let place = directory.path().join("a/shards");
            test(Arc::new(quant_core::units::SharedFiles::create(&place, &host).unwrap()));
        }
    }

    fn values(text: &EvaluationText, windows: Range<usize>) -> Vec<Vec<f64>> {
        windows.map(|window| vec![window as f64; text.windows[window].scored()]).collect()
    }

    #[test]
    fn measurements_are_merged_in_order() {
        on_each(|files| {
            let text = text(&[1000, 1000, 1000, 600]);
            let identity = json!({ "model": "a" });
            let journal = |index: usize| {
                shard_journal::<f64>(&files, Shard::new(index, 2).unwrap(), &identity, &text).unwrap()
            };
            let merged = |identity: &Value| merged_shards::<f64>(&files, identity, &text);
            assert!(matches!(merged(&identity), Err(Error::Unavailable { .. })), "no shards");
            journal(1).keep(&values(&text, 2..3)).unwrap();
            let error = merged(&identity).unwrap_err();
            assert!(error.to_string().contains("2 shards not finished: 0/2, 1/2"), "{error}");
            journal(0).keep(&values(&text, 0..2)).unwrap();
            let error = merged(&identity).unwrap_err();
            assert!(error.to_string().contains("1 shard not finished: 1/2"), "{error}");
            let mut resumed = journal(1);
            assert_eq!(resumed.take(), values(&text, 2..3));
            resumed.keep(&values(&text, 3..4)).unwrap();
            assert_eq!(journal(1).windows(), 2);
            let all = merged(&identity).unwrap();
            assert_eq!(all, values(&text, 0..4));
            assert!(matches!(merged(&json!({ "model": "b" })), Err(Error::Usage { .. })));
            let nll = scores_of_shards(&text, &all).unwrap().window_nll;
            assert_eq!(nll, [0.0, 1.0, 2.0, 3.0]);
            assert!(scores_of_shards(&text, &all[..3]).is_err());

            for other in ["notes.txt", "1-of-2.journal", "2-of-2.0.journal", "1-of-2.x.journal"] {
                files.publish(other, b"").unwrap();
            }
            assert!(merged(&identity).is_ok(), "other files are ignored");
            files.publish("0-of-3.0.journal", b"").unwrap();
            let error = merged(&identity).unwrap_err();
            assert!(error.to_string().contains("of 2 and 3 shards"), "{error}");
        });
    }

    #[test]
    fn two_processes_may_measure_a_shard() {
        on_each(|files| {
            let (text, identity) = (text(&[1000, 1000, 1000]), json!({ "model": "a" }));
            let open = |identity: &Value| {
                shard_journal::<f64>(&files, Shard::new(0, 1).unwrap(), identity, &text).unwrap()
            };
            let others = json!({ "model": "b" });
            let [mut one, mut two, mut wrong, mut other] =
                [&identity, &identity, &identity, &others].map(open);
            one.keep(&values(&text, 0..2)).unwrap();
            two.keep(&values(&text, 0..2)).unwrap();
            two.keep(&values(&text, 2..3)).unwrap();
            one.keep(&values(&text, 2..3)).unwrap();
            let error = wrong.keep(&values(&text, 1..3)).unwrap_err();
            assert!(matches!(error, Error::InputFile { .. }), "{error}");
            assert!(error.to_string().contains("one of the two computes wrong results"), "{error}");
            let error = other.keep(&values(&text, 0..2)).unwrap_err();
            assert!(error.to_string().contains("the journal of a different evaluation"), "{error}");
            assert_eq!(merged_shards::<f64>(&files, &identity, &text).unwrap(), values(&text, 0..3));
        });
    }

    /// A shard that is measured again after a change of its file is an error, not a different result.
    #[test]
    fn a_damaged_shard_is_refused() {
        let (text, identity) = (text(&[1000, 1000, 1000]), json!({ "model": "a" }));
        let intact: Arc<dyn ShardFiles> = Arc::new(Memory::default());
        let shard = Shard::new(0, 1).unwrap();
        let mut journal = shard_journal::<f64>(&intact, shard, &identity, &text).unwrap();
        journal.keep(&values(&text, 0..2)).unwrap();
        journal.keep(&values(&text, 2..3)).unwrap();
        let [first, second] = ["0-of-1.0.journal", "0-of-1.2.journal"];
        let bytes = |name: &str| intact.read(name).unwrap().unwrap();
        let lines = |name: &str| String::from_utf8(bytes(name)).unwrap();
        let changed = lines(first).replacen("1.0", "1.5", 1).into_bytes();
        let without_last = lines(first).lines().take(2).map(|line| format!("{line}\n")).collect::<String>();
        let head = format!("{}\n", lines(first).lines().next().unwrap());
        for (what, replaced) in [
            ("changed", changed),
            ("cut", bytes(first)[..bytes(first).len() - 1].to_vec()),
            ("without its last line", without_last.into_bytes()),
            ("without windows", head.into_bytes()),
            ("empty", Vec::new()),
            ("followed by zeros", [bytes(first), vec![0; 4]].concat()),
            ("that of other windows", bytes(second)),
        ] {
            let files = Memory::with(&[(first, replaced), (second, bytes(second))]);
            let errors = [
                merged_shards::<f64>(&files, &identity, &text).map(drop).unwrap_err(),
                shard_journal::<f64>(&files, shard, &identity, &text).map(drop).unwrap_err(),
            ];
            for error in errors {
                assert!(matches!(error, Error::Usage { .. }), "{what}: {error}");
                assert!(error.to_string().contains(first), "{what}: {error}");
            }
        }
    }
}
