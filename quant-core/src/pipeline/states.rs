//! The hidden states passed between two jobs over parts of a model: written at the end of one job, read at the start of
//! the next.
//!
//! The file is a safetensors file. It holds `float`, `quantized` or both, as the run needs them, each `[windows,
//! length, width]` in F32 with the width of the states before the block, and two U8 vectors: `about`, the JSON
//! description of what the states depend on, and `sha256`, the hash of the values of all other tensors, in file order.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::report::calibration;
use super::{Job, Program};
use crate::calibrate::{BatchValues, HiddenStates, Spill};
use crate::checkpoint::{Dtype, ShardedCheckpoint, TensorSource, differences};
use crate::digest::hex;
use crate::{CancelToken, Error, Event, Result};

const CHUNK_VALUES: usize = 1 << 16;
/// The time for saving between blocks is limited to about `1 / SHARE_OF_RUN` of the run time.
const SHARE_OF_RUN: u32 = 20;
/// A save may take this long even if that is a larger share of the run time.
const MIN_ALLOWED: Duration = Duration::from_secs(5);
const STREAMS: [&str; 2] = ["float", "quantized"];
const ABOUT: &str = "about";
/// In `about`: the SHA-256 of the weights through which the states passed, if the job wrote nothing else.
const SOURCES: &str = "sources";
const SHA256: &str = "sha256";
/// The maximum size of `about`.
const MAX_ABOUT_BYTES: u64 = 64 << 20;

/// Where the hidden states of a job are read, kept and written.
#[derive(Debug, Clone, Default)]
pub struct StateFiles {
    /// The states before the first block of the job; without them the job must begin with the model's first block. If
    /// there are several files, each holds the states of some consecutive windows, in order.
    pub before: Vec<PathBuf>,
    /// The file for the states after the job's last block, if they are written.
    pub after: Option<PathBuf>,
    /// A value on which the states depend in addition, such as a hash of the model. A file with a different value is
    /// rejected.
    pub depends_on: Value,
    /// Where states and samples are kept while the job runs; `None` keeps them in memory.
    pub spill: Option<Spill>,
    /// Where the states are saved between blocks, so that a resumed job need not recompute them.
    pub saved: Option<SavedStates>,
}

/// A file in which a job saves its hidden states between blocks.
#[derive(Debug, Clone)]
pub struct SavedStates {
    /// The file. It appears complete or not at all.
    pub path: PathBuf,
    /// The minimum time between two saves. Saving also takes only a small fraction of the run time, or a few seconds
    /// early in a run: a save on a slow disk is abandoned and tried again later. [`Duration::ZERO`] saves before every
    /// block, however long it takes.
    pub every: Duration,
}

pub(super) struct Saver<'a> {
    /// The program is recorded in the file.
    saved: Option<(&'a SavedStates, Program)>,
    depends_on: &'a Value,
    started: Instant,
    last: Instant,
    cost: Duration,
}

impl<'a> Saver<'a> {
    pub(super) fn new(files: &'a StateFiles, cancel: &CancelToken) -> Result<Self> {
        let saved = match &files.saved {
            Some(saved) => Some((saved, Program::current(cancel)?)),
            None => None,
        };
        let now = Instant::now();
        Ok(Self { saved, depends_on: &files.depends_on, started: now, last: now, cost: Duration::ZERO })
    }

    /// Saves the states before block `layer` if a save is due. All tensors of earlier blocks must be committed. If the
    /// file cannot be written, the observer gets a warning and later saves are skipped, because the run can complete
    /// without them.
    pub(super) fn save(&mut self, job: &Job<'_>, layer: usize, streams: Streams<&HiddenStates>) {
        let Some((SavedStates { path, every }, program)) = &self.saved else { return };
        let pause = if every.is_zero() { Duration::ZERO } else { (SHARE_OF_RUN * self.cost).max(*every) };
        if streams.iter().all(Option::is_none) || self.last.elapsed() < pause {
            return;
        }
        let started = Instant::now();
        let allowed = (self.started.elapsed() / SHARE_OF_RUN).max(MIN_ALLOWED);
        // A cancelled job still saves, which spares the resumed one a block, but not for long.
        let go_on = || {
            let taken = started.elapsed();
            let in_time = if job.cancel.is_cancelled() { taken < MIN_ALLOWED } else { taken < allowed };
            Ok(in_time || (every.is_zero() && !job.cancel.is_cancelled()))
        };
        match save(path, job, layer, (self.depends_on, program, &BTreeMap::new()), streams, &go_on) {
            Ok(_) => {}
            Err(error) => {
                let message = format!(
                    "the hidden states cannot be saved, so a resumed run will recompute them: {error}"
                );
                job.observer.event(&Event::Warning { message });
                self.saved = None;
            }
        }
        (self.cost, self.last) = (started.elapsed(), Instant::now());
    }
}

/// The states of the float model, and of the quantized model that is being written.
pub(super) type Streams<T> = [Option<T>; 2];

/// Describes what the states before a block depend on. `has_quantized` says whether they include those of the quantized
/// model.
fn about(
    job: &Job<'_>,
    layer: usize,
    (depends_on, program): (&Value, &Program),
    has_quantized: bool,
) -> Value {
    let plan = job.plan;
    let architecture = job.model.architecture();
    // The quantized model's states depend on what was written of the earlier blocks; the float model's states do not.
    let quantized = has_quantized.then(|| {
        json!({
            "grids_sha256": plan.grids_sha256(),
            "transforms": plan.method.fingerprint(&plan.settings),
            "kv": plan.settings.kv,
            "scale_search": plan.searches_scales().then_some(plan.settings.scale_search),
        })
    });
    let about = json!({
        "schema": "quant-states/1",
        "version": env!("CARGO_PKG_VERSION"),
        "before_block": layer,
        // Other instructions or another build round differently, so all parts of a run must use the same.
        "program": program,
        "family": architecture.family,
        "layers": architecture.layers,
        "method": plan.method.name,
        "steps": plan.steps(),
        "rounding": plan.method.rounding_fingerprint(&plan.settings),
        "format": plan.container.name(),
        "quantized": quantized,
        "calibration": job.windows.map(|windows| calibration(job, windows)),
        "depends_on": depends_on,
    });
    // A round trip through text makes equal numbers compare equal.
    serde_json::from_str(&about.to_string()).unwrap_or(about)
}

/// Writes the states before block `layer` to a file, which appears complete or not at all. `sources` are the hashes of
/// the weights that were read, if no report has them. If `go_on` returns `false` first, returns `false` and leaves an
/// existing file unchanged.
pub(super) fn save(
    path: &Path,
    job: &Job<'_>,
    layer: usize,
    (depends_on, program, sources): (&Value, &Program, &BTreeMap<String, String>),
    streams: Streams<&HiddenStates>,
    go_on: &dyn Fn() -> Result<bool>,
) -> Result<bool> {
    let mut about = about(job, layer, (depends_on, program), streams[1].is_some());
    if !sources.is_empty() {
        about[SOURCES] = json!(sources);
    }
    let about = about.to_string();
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    let fail = |action| {
        let new = &new;
        move |e| Error::io(action, new, e)
    };
    // A file or link of this name is removed: writing through a link could overwrite its target.
    let removed = match std::fs::remove_file(&new) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", &new, e)),
        _ => Ok(()),
    };
    removed?;
    let create = || File::options().write(true).create_new(true).open(&new);
    let written = create().map_err(fail("create")).and_then(|file| {
        let complete = write(BufWriter::new(&file), &about, streams, go_on, &fail("write"))?;
        if complete {
            file.sync_all().map_err(fail("sync"))?;
        }
        Ok(complete)
    });
    let moved = written.and_then(|complete| match complete {
        true => std::fs::rename(&new, path).map(|()| true).map_err(|e| Error::io("create", path, e)),
        false => Ok(false),
    });
    if !matches!(moved, Ok(true)) {
        // An incomplete file could fill the disk.
        let _ = std::fs::remove_file(&new);
    }
    moved
}

/// Writes the contents of the file. Stops and returns `false` as soon as `go_on` returns `false`.
fn write(
    mut file: impl Write,
    about: &str,
    streams: Streams<&HiddenStates>,
    go_on: &dyn Fn() -> Result<bool>,
    fail: &dyn Fn(std::io::Error) -> Error,
) -> Result<bool> {
    let mut header = Map::new();
    let mut end = 0_usize;
    let mut tensor = |name: &str, dtype: Dtype, shape: Vec<usize>| {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let entry = json!({ "dtype": dtype.name(), "shape": shape, "data_offsets": [end, end + bytes] });
        end += bytes;
        header.insert(name.to_owned(), entry);
    };
    let named = STREAMS.iter().zip(streams).filter_map(|(name, states)| Some((*name, states?)));
    for (name, states) in named.clone() {
        let [windows, length] = states.shape();
        tensor(name, Dtype::F32, vec![windows, length, states.width()]);
    }
    tensor(ABOUT, Dtype::U8, vec![about.len()]);
    tensor(SHA256, Dtype::U8, vec![32]);
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(fail);
    put(&(header.len() as u64).to_le_bytes())?;
    put(&header)?;
    let mut hash = Sha256::new();
    let mut bytes = Vec::new();
    for (_, states) in named {
        let values = states.values();
        for at in (0..values.len()).step_by(CHUNK_VALUES) {
            if !go_on()? {
                return Ok(false);
            }
            bytes.clear();
            let piece = values.read(at..(at + CHUNK_VALUES).min(values.len()))?;
            bytes.extend(piece.iter().flat_map(|v| v.to_le_bytes()));
            hash.update(&bytes);
            put(&bytes)?;
        }
    }
    hash.update(about.as_bytes());
    put(about.as_bytes())?;
    put(&hash.finalize())?;
    file.flush().map_err(fail)?;
    Ok(true)
}

/// Returns the block whose input states a file holds, if it is one of `blocks`. The file may still be damaged or belong
/// to a different run.
pub(super) fn saved_before(path: &Path, blocks: Range<usize>) -> Option<usize> {
    let source = ShardedCheckpoint::open_file(path).ok()?;
    source.info(ABOUT).filter(|info| info.byte_len() <= MAX_ABOUT_BYTES)?;
    let about: Value = serde_json::from_slice(&source.read(ABOUT).ok()?).ok()?;
    let layer = usize::try_from(about["before_block"].as_u64()?).ok()?;
    blocks.contains(&layer).then_some(layer)
}

/// Reads the states before block `layer`: each stream that is `wanted`. If there are several files, each holds the
/// states of some consecutive windows.
pub(super) fn load(
    paths: &[PathBuf],
    job: &Job<'_>,
    layer: usize,
    depends_on: &Value,
    wanted: [bool; 2],
    spill: Option<&Spill>,
) -> Result<Streams<HiddenStates>> {
    let program = Program::current(job.cancel)?;
    let width = job.model.architecture().state_width(layer);
    let mut streams: Streams<BatchValues> = [None, None];
    let mut loaded = 0;
    for path in paths {
        let broken = |reason: String| broken(path, reason);
        let source = ShardedCheckpoint::open_file(path)?;
        let Some(windows) = job.windows else {
            return Err(broken("can only be used together with a calibration batch".into()));
        };
        let found = source.read(ABOUT).map_err(|_| broken("contains no hidden states".into()))?;
        let mut found: Value =
            serde_json::from_slice(&found).map_err(|e| broken(format!("is damaged: {e}")))?;
        if let Some(fields) = found.as_object_mut() {
            fields.shift_remove(SOURCES);
        }
        let count = match paths {
            [_] => windows.len(),
            _ => windows_in(&source),
        };
        if count == 0 || count > windows.len() - loaded {
            return Err(broken(format!("contains {count} windows, but {} remain", windows.len() - loaded)));
        }
        let part = (count < windows.len()).then(|| windows.slice(loaded..loaded + count));
        let job = Job { windows: part.as_ref().or(Some(windows)), ..*job };
        let has_quantized = source.info(STREAMS[1]).is_some();
        let expected = about(&job, layer, (depends_on, &program), has_quantized);
        if let Some(first) = differences(&found, &expected).first() {
            return Err(broken(format!("contains the hidden states of a different run: {first}")));
        }
        let mut hash = Sha256::new();
        for ((name, stream), wanted) in STREAMS.iter().zip(&mut streams).zip(wanted) {
            match (source.info(name), wanted) {
                (None, false) => {}
                (None, true) => return Err(broken(format!("has no hidden states `{name}`"))),
                (Some(_), _) => {
                    let shape = [count, windows.length(), width];
                    check_shape(&source, name, shape, &broken)?;
                    let mut put = |at: usize, values: &[f32]| {
                        if !wanted {
                            return Ok(());
                        }
                        let all = match stream {
                            Some(all) => all,
                            // The headers are checked against the lengths of the files, which bound this allocation.
                            None => stream.insert(BatchValues::zeros(spill, windows.tokens().len() * width)?),
                        };
                        all.write(loaded * windows.length() * width + at, values)
                    };
                    each_piece(&source, name, &mut hash, &mut put)?;
                }
            }
        }
        hash.update(source.read(ABOUT)?);
        let sum = source.read(SHA256).map_err(|_| broken("is damaged: the hash is missing".into()))?;
        if hex(&sum) != hex(&hash.finalize()) {
            return Err(broken("is damaged: the contents do not match the stored hash".into()));
        }
        loaded += count;
    }
    if let (Some(path), Some(windows)) = (paths.last(), job.windows.filter(|w| w.len() != loaded)) {
        return Err(broken(path, format!("ends after {loaded} of {} windows", windows.len())));
    }
    let states = |values: Option<BatchValues>| match (values, job.windows) {
        (Some(values), Some(windows)) => HiddenStates::new(windows.layout(), width, values).map(Some),
        _ => Ok(None),
    };
    let [float, quantized] = streams;
    Ok([states(float)?, states(quantized)?])
}

pub(crate) fn check_states(path: &Path, job: &Job<'_>, layer: usize, depends_on: &Value) -> Result<()> {
    let paths = [path.to_owned()];
    load(&paths, job, layer, depends_on, [false; 2], None).map(drop)
}

/// Returns the hashes of the weights through which the states in a file passed, by tensor name.
pub(crate) fn sources_of(path: &Path) -> Result<BTreeMap<String, String>> {
    let source = ShardedCheckpoint::open_file(path)?;
    if source.info(ABOUT).is_none_or(|info| info.byte_len() > MAX_ABOUT_BYTES) {
        return Err(broken(path, "contains no hidden states".into()));
    }
    let about = serde_json::from_slice::<Value>(&source.read(ABOUT)?);
    let sources = about.and_then(|about| match about.get(SOURCES) {
        Some(sources) => serde_json::from_value(sources.clone()),
        None => Ok(BTreeMap::new()),
    });
    sources.map_err(|e| broken(path, format!("is damaged: {e}")))
}

fn broken(path: &Path, reason: String) -> Error {
    Error::InputFile {
        path: path.to_owned(),
        line: None,
        reason,
        remedy: "pass the states that the job on the preceding blocks wrote".into(),
    }
}

/// The number of windows in a file, which may hold a part of the batch.
fn windows_in(source: &ShardedCheckpoint) -> usize {
    let info = STREAMS.iter().find_map(|name| source.info(name));
    info.and_then(|info| info.shape.first().copied()).unwrap_or(0)
}

fn check_shape(
    source: &ShardedCheckpoint,
    name: &str,
    shape: [usize; 3],
    broken: &dyn Fn(String) -> Error,
) -> Result<()> {
    let info = source.require(name)?;
    if info.dtype != Dtype::F32 || info.shape != shape {
        return Err(broken(format!(
            "contains hidden states {} {:?}, expected F32 {shape:?}",
            info.dtype, info.shape
        )));
    }
    Ok(())
}

/// Passes the values of a tensor on in pieces, each with the index of its first value, and hashes them.
fn each_piece(
    source: &ShardedCheckpoint,
    name: &str,
    hash: &mut Sha256,
    put: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
) -> Result<()> {
    let len = source.require(name)?.byte_len();
    let piece = 4 * CHUNK_VALUES as u64;
    let (mut bytes, mut floats) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < len {
        bytes.resize(piece.min(len - at) as usize, 0);
        source.read_range(name, at, &mut bytes)?;
        hash.update(&bytes);
        floats.clear();
        floats.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        put((at / 4) as usize, &floats)?;
        at += bytes.len() as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::BatchLayout;

    #[test]
    fn a_save_can_be_abandoned() {
        let width = 2 * CHUNK_VALUES;
        let states =
            HiddenStates::new(BatchLayout::plain(1, 2), width, BatchValues::from(vec![0.5; 2 * width]))
                .unwrap();
        let written = |go_on: &dyn Fn() -> Result<bool>| -> Result<(bool, usize)> {
            let mut bytes = Vec::new();
            let fail = |e| Error::io("write", "states", e);
            write(&mut bytes, "{}", [Some(&states), None], go_on, &fail)
                .map(|complete| (complete, bytes.len()))
        };
        let (complete, all) = written(&|| Ok(true)).unwrap();
        assert!(complete && all > 4 * 2 * width);
        let pieces = std::cell::Cell::new(0);
        let (complete, some) = written(&|| {
            pieces.set(pieces.get() + 1);
            Ok(pieces.get() < 3)
        })
        .unwrap();
        assert!(!complete && some < 4 * 3 * CHUNK_VALUES, "{some} of {all} bytes");
        let cancel = CancelToken::new();
        cancel.cancel();
        assert!(matches!(written(&|| cancel.check().map(|()| true)), Err(Error::Interrupted)));
    }
}
