//! The hidden states between two jobs over parts of a model: written where one job ends, read where the next begins.
//!
//! A safetensors file with `float` and `quantized`, each `[windows, length, hidden]` in F32 where the run follows such
//! states, and two U8 vectors: `about`, what the states depend on as JSON, and `sha256`, the hash of all that comes
//! before it in the file. What does not belong to the run, or was damaged, is refused.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::report::calibration;
use super::{Job, Program};
use crate::calibrate::{BatchLayout, HiddenStates};
use crate::checkpoint::{Dtype, ShardedCheckpoint, TensorSource, differences};
use crate::digest::hex;
use crate::recipe::PassPlan;
use crate::{Error, Result};

/// Values that are written at a time.
const PIECE: usize = 1 << 16;
/// The streams that a file may hold, in order.
const STREAMS: [&str; 2] = ["float", "quantized"];
const ABOUT: &str = "about";
const SHA256: &str = "sha256";

/// Where the hidden states of a job over some blocks come from and go to.
#[derive(Debug, Clone, Default)]
pub struct StateFiles {
    /// The states before the first block of the job; without them it has to begin with the model's first.
    pub before: Option<PathBuf>,
    /// Where those after its last block are written, if they are wanted.
    pub after: Option<PathBuf>,
    /// What else they depend on, such as a hash of the model: a file is refused where another job had another.
    pub depends_on: Value,
}

/// The streams of a run: of the float model, and of the one that is being written.
pub(super) type Streams<T> = [Option<T>; 2];

/// What the states before block `layer` depend on.
fn about(job: &Job<'_>, layer: usize, depends_on: &Value) -> Result<Value> {
    let plan = job.plan;
    let architecture = job.model.architecture();
    // What was written of a block decides what the quantized model makes of it; the float model's states know nothing
    // of it.
    let quantized = PassPlan::new(plan, false).follow_quantized().then(|| {
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
        // Other instructions or another build round differently: parts of one run must agree on both.
        "program": Program::current(job.cancel)?,
        "family": architecture.family,
        "layers": architecture.layers,
        "method": plan.method.name,
        "steps": plan.steps(),
        "gptq": plan.gptq,
        "format": plan.container.name(),
        "quantized": quantized,
        "calibration": job.windows.map(|windows| calibration(job, windows)),
        "depends_on": depends_on,
    });
    // Through text and back, so that equal numbers compare equal.
    Ok(serde_json::from_str(&about.to_string()).unwrap_or(about))
}

/// Writes the states before block `layer` to a file, which appears complete or not at all.
///
/// # Errors
/// [`Error::Io`] when it cannot be written.
pub(super) fn save(
    path: &Path,
    job: &Job<'_>,
    layer: usize,
    depends_on: &Value,
    streams: Streams<&HiddenStates>,
) -> Result<()> {
    let about = about(job, layer, depends_on)?.to_string();
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    let fail = |action| {
        let new = new.clone();
        move |e| Error::io(action, new, e)
    };
    let file = File::create(&new).map_err(fail("create"))?;
    write(BufWriter::new(&file), &about, streams).map_err(fail("write"))?;
    file.sync_all().map_err(fail("sync"))?;
    drop(file);
    std::fs::rename(&new, path).map_err(|e| Error::io("create", path, e))
}

fn write(mut file: impl Write, about: &str, streams: Streams<&HiddenStates>) -> std::io::Result<()> {
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
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let mut hash = Sha256::new();
    let mut bytes = Vec::new();
    for (_, states) in named {
        for piece in states.values().chunks(PIECE) {
            bytes.clear();
            bytes.extend(piece.iter().flat_map(|v| v.to_le_bytes()));
            hash.update(&bytes);
            file.write_all(&bytes)?;
        }
    }
    hash.update(about.as_bytes());
    file.write_all(about.as_bytes())?;
    file.write_all(&hash.finalize())?;
    file.flush()
}

/// Reads the states before block `layer`; of each stream, whether it is `wanted`.
///
/// # Errors
/// [`Error::InputFile`] when the file is damaged, or holds the states of another run or block; those of reading.
pub(super) fn load(
    path: &Path,
    job: &Job<'_>,
    layer: usize,
    depends_on: &Value,
    wanted: [bool; 2],
) -> Result<Streams<HiddenStates>> {
    let broken = |reason: String| Error::InputFile {
        path: path.to_owned(),
        line: None,
        reason,
        remedy: "give the states that the job over the blocks before it wrote".into(),
    };
    let source = ShardedCheckpoint::open_file(path)?;
    let Some(windows) = job.windows else {
        return Err(broken("is of no use without a calibration batch".into()));
    };
    let layout = windows.layout();
    let found = source.read(ABOUT).map_err(|_| broken("holds no hidden states".into()))?;
    let found: Value = serde_json::from_slice(&found).map_err(|e| broken(format!("is damaged: {e}")))?;
    if let Some(first) = differences(&found, &about(job, layer, depends_on)?).first() {
        return Err(broken(format!("holds the hidden states of another run: {first}")));
    }
    let mut hash = Sha256::new();
    let mut streams: Streams<HiddenStates> = [None, None];
    for ((name, stream), wanted) in STREAMS.iter().zip(&mut streams).zip(wanted) {
        match (source.info(name), wanted) {
            (None, false) => {}
            (None, true) => return Err(broken(format!("lacks the states `{name}`"))),
            (Some(_), _) => {
                let states = read(
                    &source,
                    name,
                    &layout,
                    job.model.architecture().state_width(layer),
                    &mut hash,
                    &broken,
                )?;
                *stream = wanted.then_some(states);
            }
        }
    }
    hash.update(source.read(ABOUT)?);
    let sum = source.read(SHA256).map_err(|_| broken("is damaged: it has no hash".into()))?;
    if hex(&sum) != hex(&hash.finalize()) {
        return Err(broken("is damaged: its contents do not have the hash that it names".into()));
    }
    Ok(streams)
}

fn read(
    source: &ShardedCheckpoint,
    name: &str,
    layout: &BatchLayout,
    hidden: usize,
    hash: &mut Sha256,
    broken: &dyn Fn(String) -> Error,
) -> Result<HiddenStates> {
    let info = source.require(name)?;
    let shape = [layout.windows(), layout.length(), hidden];
    if info.dtype != Dtype::F32 || info.shape != shape {
        return Err(broken(format!("holds states {} {:?}, not F32 {shape:?}", info.dtype, info.shape)));
    }
    let mut values = Vec::new();
    // The header was held against the file's length, so no more is reserved than there is.
    values
        .try_reserve_exact(layout.tokens() * hidden)
        .map_err(|_| Error::Memory { what: format!("the states of {name}"), bytes: Some(info.byte_len()) })?;
    let (len, piece) = (info.byte_len(), 4 * PIECE as u64);
    let mut bytes = Vec::new();
    let mut at = 0;
    while at < len {
        bytes.resize(piece.min(len - at) as usize, 0);
        source.read_range(name, at, &mut bytes)?;
        hash.update(&bytes);
        values.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        at += bytes.len() as u64;
    }
    HiddenStates::new(layout.clone(), hidden, values)
}
