//! Importance matrices: the mean square of each input channel of a linear over a text.
//!
//! They come from quant's own calibration or from a file. They can be written in both file formats that llama.cpp's
//! programs write and read: GGUF, with sums and counts, and the legacy format with means.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::families::{self, GgufFamily};
use super::file::{GgufFile, MAGIC, Value, write_file};
use super::layout::{self, Placed};
use super::metadata::strings;
use super::plan::PlannedTensor;
use super::saved;
use crate::calibrate::{HiddenStates, InputRows, Statistic, StatisticsPass, TokenWindows};
use crate::checkpoint::{printable, read_capped};
use crate::model::{Architecture, Model, NodeId, Op};
use crate::{CancelToken, Error, Event, Observer, Result, TensorSink};

const MAX_FILE_BYTES: u64 = 4 << 30;
const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";
const MAX_VALUES: usize = 1 << 26;

/// The statistics of one tensor of the file. For each of its matrices (one, or one per expert): the sums of squares of
/// all channels, and the number of tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct ImportanceEntry {
    /// `[matrices, columns]`.
    pub sums: Vec<f32>,
    /// `[matrices]`.
    pub counts: Vec<f32>,
}

/// An importance matrix.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Importance {
    /// Entries by tensor name, including `.weight`.
    pub entries: BTreeMap<String, ImportanceEntry>,
    /// The texts on which it was gathered.
    pub datasets: Vec<String>,
    /// The number of windows.
    pub chunks: u32,
    /// Tokens per window.
    pub chunk_size: u32,
    /// The file it was read from, for messages.
    origin: String,
}

impl ImportanceEntry {
    fn empty() -> Self {
        Self { sums: Vec::new(), counts: Vec::new() }
    }
}

struct SquareSum {
    sums: Vec<f64>,
    tokens: u64,
}

impl Statistic for SquareSum {
    fn take(&mut self, rows: &InputRows<'_>) -> Result<()> {
        for (_, row) in rows.counted() {
            for (sum, v) in self.sums.iter_mut().zip(row) {
                *sum += f64::from(*v) * f64::from(*v);
            }
            self.tokens += 1;
        }
        Ok(())
    }
}

impl Importance {
    /// The matrix that a run will [gather](Self::gather) on these windows, without its values.
    ///
    /// # Errors
    /// [`Error::Internal`] if the family cannot be written as GGUF.
    pub fn outline(model: &Model, windows: &TokenWindows, dataset: &str) -> Result<Self> {
        let a = model.architecture();
        let family = family(a)?;
        let mut outline = Self {
            datasets: vec![dataset.to_owned()],
            chunks: u32::try_from(windows.len()).unwrap_or(u32::MAX),
            chunk_size: u32::try_from(windows.length()).unwrap_or(u32::MAX),
            ..Self::default()
        };
        for layer in 0..a.layers {
            let graph = a.graph(layer);
            for (id, ..) in graph.linears() {
                for (placed, _) in matrices(a, family, layer, &graph.nodes()[id].op)? {
                    outline.entries.entry(placed.name(layer)).or_insert_with(ImportanceEntry::empty);
                }
            }
        }
        Ok(outline)
    }

    /// Gathers the values of an [outline](Self::outline) on a batch, block by block, beginning with the batch's
    /// embeddings. Records them in `sink`, so that a resumed run can [recall](Self::recall) them.
    ///
    /// # Errors
    /// [`Error::Internal`] if the family cannot be written as GGUF; [`Error::Calibration`] if a channel's sum is not
    /// finite in `f32`; [`Error::InputChanged`] if a weight has changed since the interrupted run;
    /// [`Error::Interrupted`]; errors of reading and running blocks, and of `sink`.
    pub fn gather(
        mut self,
        model: &Model,
        states: &mut HiddenStates,
        sink: &mut dyn TensorSink,
        observer: &dyn Observer,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let a = model.architecture();
        let family = family(a)?;
        observer.event(&Event::StageStarted { stage: "importance", unit: "block", units: a.layers as u64 });
        let ropes = model.rope(states.shape()[1])?;
        for layer in 0..a.layers {
            let block = model.block(layer, &ropes)?;
            saved::check_block(sink, model, layer, &block)?;
            let graph = block.graph().clone();
            let values: BTreeSet<(NodeId, usize)> =
                graph.linears().map(|(id, _, [_, k], _)| (graph.nodes()[id].inputs[0], k)).collect();
            let mut sums: BTreeMap<NodeId, SquareSum> =
                values.into_iter().map(|(id, k)| (id, SquareSum { sums: vec![0.0; k], tokens: 0 })).collect();
            let mut pass = StatisticsPass::new(&block, states.layout(), cancel);
            for (value, sum) in &mut sums {
                pass.gather(*value, sum)?;
            }
            pass.run(states, layer + 1 < a.layers)?;
            for (id, ..) in graph.linears() {
                let node = &graph.nodes()[id];
                self.add(a, family, layer, &node.op, &sums[&node.inputs[0]])?;
            }
            observer.event(&Event::UnitDone { detail: format!("block {layer}") });
        }
        observer.event(&Event::StageDone);
        for (name, ImportanceEntry { sums, counts }) in &self.entries {
            let vectors = [("sums".to_owned(), &sums[..]), ("counts".to_owned(), &counts[..])];
            sink.remember(&key(name), &saved::record(vectors.into_iter()))?;
        }
        sink.commit()?;
        Ok(self)
    }

    /// Returns the values of an [outline](Self::outline) that an interrupted run gathered; `None` if it did not gather
    /// all of them.
    ///
    /// # Errors
    /// [`Error::InputChanged`] if a weight has changed since; [`Error::Interrupted`]; errors of reading blocks.
    pub fn recall(
        &self,
        model: &Model,
        sink: &mut dyn TensorSink,
        cancel: &CancelToken,
    ) -> Result<Option<Self>> {
        let entry = |name: &str| {
            let vectors = saved::vectors(&sink.recall(&key(name))?)?;
            let [(_, sums), (_, counts)] = <[_; 2]>::try_from(vectors).ok()?;
            Some(ImportanceEntry { sums, counts })
        };
        let entries = self.entries.keys().map(|name| Some((name.clone(), entry(name)?)));
        let Some(entries) = entries.collect::<Option<BTreeMap<_, _>>>() else { return Ok(None) };
        saved::check_blocks(sink, model, cancel)?;
        Ok(Some(Self { entries, ..self.clone() }))
    }

    fn add(
        &mut self,
        a: &Architecture,
        family: &GgufFamily,
        layer: usize,
        linear: &Op,
        sum: &SquareSum,
    ) -> Result<()> {
        if let Some(channel) = sum.sums.iter().position(|s| !(*s as f32).is_finite()) {
            return Err(Error::Calibration {
                tensor: format!("{}.weight", a.in_block(layer, linear.name())),
                what: format!("the sum of squares of input channel {channel}"),
            });
        }
        for (placed, matrix) in matrices(a, family, layer, linear)? {
            let entry = self.entries.entry(placed.name(layer)).or_insert_with(ImportanceEntry::empty);
            if entry.counts.len() != matrix {
                return Err(Error::Internal(format!(
                    "expert {matrix} of `{}` is out of order",
                    placed.tensor
                )));
            }
            let columns = 0..sum.sums.len();
            entry.sums.extend(columns.map(|column| sum.sums[placed.view.columns.stored(column)] as f32));
            entry.counts.push(sum.tokens as f32);
        }
        Ok(())
    }

    /// The importance of a tensor's channels, `[matrices, columns]`; `None` if there is no entry for the tensor, or it
    /// is not rounded by importance. If no token reached a matrix, all its channels have the same importance.
    pub(super) fn of(&self, tensor: &PlannedTensor) -> Result<Option<Vec<f32>>> {
        let Some(entry) = self.entries.get(&tensor.name) else { return Ok(None) };
        if !tensor.kind.uses_importance || tensor.keeps_codes() {
            return Ok(None);
        }
        let columns = tensor.shape.last().copied().unwrap_or_default();
        let matrices = if tensor.shape.len() > 2 { tensor.shape[0] } else { 1 };
        if entry.sums.len() != columns * matrices || entry.counts.len() != matrices {
            let reason = format!(
                "has {} values and {} counts for `{}`, which consists of {matrices} matrices with {columns} \
                columns",
                entry.sums.len(),
                entry.counts.len(),
                tensor.name
            );
            return Err(self.broken(reason));
        }
        let mut importance = Vec::with_capacity(entry.sums.len());
        for (matrix, (sums, count)) in entry.sums.chunks_exact(columns).zip(&entry.counts).enumerate() {
            let start = importance.len();
            match *count > 0.0 {
                true => importance.extend(sums.iter().map(|sum| sum / count)),
                false => importance.extend(std::iter::repeat_n(1.0, columns)),
            }
            // In a matrix that quant gathered, all weights may be zero: the inputs were then 0 for all tokens.
            let means = &importance[start..];
            let fault = match means.iter().find(|mean| !mean.is_finite()) {
                Some(bad) => Some(format!("a mean square of {bad}")),
                None if means.iter().all(|mean| *mean == 0.0) => Some("only zeros".into()),
                None => None,
            };
            if let Some(fault) = fault.filter(|_| !self.origin.is_empty()) {
                return Err(self.broken(format!("has {fault} for matrix {matrix} of `{}`", tensor.name)));
            }
        }
        Ok(Some(importance))
    }

    /// The importance after columns of weights are multiplied by factors and their inputs divided by them. `factors` are
    /// those of a tensor of the checkpoint.
    pub(super) fn divided<'f>(
        mut self,
        tensors: &[PlannedTensor],
        factors: impl Fn(&str) -> Option<&'f [f32]>,
    ) -> Self {
        for tensor in tensors {
            let Some(entry) = self.entries.get_mut(&tensor.name) else { continue };
            let columns = tensor.shape.last().copied().unwrap_or_default().max(1);
            for (sums, source) in entry.sums.chunks_exact_mut(columns).zip(tensor.sources()) {
                let Some(factors) = factors(source) else { continue };
                for (column, sum) in sums.iter_mut().enumerate() {
                    let factor = f64::from(factors[tensor.stored_column(column)]);
                    *sum = (f64::from(*sum) / (factor * factor)).min(f64::from(f32::MAX)) as f32;
                }
            }
        }
        self
    }

    /// The names of planned tensors of blocks whose rounding errors would be weighted, but that have no entry. Matrices
    /// of latent attention never have one, so they are left out.
    pub fn missing<'p>(&self, tensors: &'p [PlannedTensor]) -> Vec<&'p str> {
        let in_block = |t: &&PlannedTensor| {
            t.name.starts_with("blk.") && t.shape.len() > 1 && !(t.shape.len() > 2 && t.sources().len() < 2)
        };
        let used = tensors.iter().filter(in_block).filter(|t| t.kind.uses_importance && !t.keeps_codes());
        used.map(|t| t.name.as_str()).filter(|name| !self.entries.contains_key(*name)).collect()
    }

    /// The importance of the columns of one matrix, from that of all matrices: one vector for each, or one for all.
    pub(super) fn of_matrix(all: &[f32], index: usize, columns: usize) -> &[f32] {
        let matrices = all.len() / columns.max(1);
        &all[index.min(matrices.saturating_sub(1)) * columns..][..columns]
    }

    fn broken(&self, reason: String) -> Error {
        Self::fault(Path::new(&self.origin), reason)
    }

    fn fault(path: &Path, reason: String) -> Error {
        Error::InputFile {
            path: path.to_owned(),
            line: None,
            reason,
            remedy: "give an importance matrix of the same model, or omit ‹imatrix› to compute one".into(),
        }
    }

    /// Reads a file of either format.
    ///
    /// # Errors
    /// [`Error::InputFile`] if it is too large, has neither format, is damaged, or contains negative or non-finite
    /// values; [`Error::Io`] if it cannot be read.
    pub fn read(path: &Path) -> Result<Self> {
        let fault = |reason| Self::fault(path, reason);
        let bytes = read_capped(path, path, MAX_FILE_BYTES)?.map_err(fault)?;
        let mut found = match bytes.starts_with(&MAGIC) {
            true => Self::from_gguf(path)?,
            false => Self::from_dat(&bytes).map_err(fault)?,
        };
        found.origin = path.display().to_string();
        for (name, entry) in &found.entries {
            let bad = entry.sums.iter().chain(&entry.counts).find(|v| !v.is_finite() || **v < 0.0);
            if let Some(bad) = bad {
                return Err(fault(format!(
                    "contains {bad} for `{}`; values must be finite and not negative",
                    printable(name)
                )));
            }
        }
        Ok(found)
    }

    fn from_gguf(path: &Path) -> Result<Self> {
        let fault = |reason: String| Self::fault(path, reason);
        let file = GgufFile::open(path).map_err(|error| match error {
            // The file's own remedies are those for a model.
            Error::InputFile { reason, .. } => fault(reason),
            other => other,
        })?;
        let key = |key: &str| file.header().get(&format!("imatrix.{key}"));
        let number = |name: &str| {
            let value = key(name).and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
            value.ok_or_else(|| {
                fault(format!("`imatrix.{name}` is missing or not an unsigned 32-bit integer"))
            })
        };
        let datasets = key("datasets").and_then(Value::as_strings);
        let mut found = Self {
            datasets: datasets
                .ok_or_else(|| fault("`imatrix.datasets` is missing or not a list of strings".into()))?
                .to_vec(),
            chunks: number("chunk_count")?,
            chunk_size: number("chunk_size")?,
            ..Self::default()
        };
        let floats = |name: &str| -> Result<Vec<f32>> {
            let tensor = file.tensor(name).filter(|t| *t.kind == crate::blocks::F32);
            let tensor = tensor.ok_or_else(|| fault(format!("tensor `{name}` is missing or not F32")))?;
            let mut bytes = vec![0; tensor.bytes as usize];
            file.read(tensor, 0, &mut bytes)?;
            Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        };
        for tensor in &file.header().tensors {
            let Some(name) = tensor.name.strip_suffix(SUMS) else { continue };
            let (sums, counts) = (floats(&tensor.name)?, floats(&format!("{name}{COUNTS}"))?);
            found.entries.insert(name.to_owned(), ImportanceEntry { sums, counts });
        }
        Ok(found)
    }

    fn from_dat(bytes: &[u8]) -> Result<Self, String> {
        let mut cursor = Dat { bytes, at: 0 };
        let entries = cursor.count("number of entries", 1 << 20)?;
        let mut found = Self::default();
        for i in 0..entries {
            let name = cursor.text(&format!("name of entry {i}"))?;
            let calls = cursor.count(&format!("calls of `{}`", printable(&name)), i32::MAX as usize)?;
            let values = cursor.count(&format!("number of values for `{}`", printable(&name)), MAX_VALUES)?;
            let stored = cursor.take("values", 4 * values)?;
            let values = stored.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            // Values are means times the number of calls. The file does not specify the number of matrices.
            let calls = calls.max(1) as f32;
            let sums: Vec<f32> = values.collect();
            if found.entries.insert(name.clone(), ImportanceEntry { sums, counts: vec![calls] }).is_some() {
                return Err(format!("`{}` appears twice", printable(&name)));
            }
        }
        if cursor.at < bytes.len() {
            found.chunks = cursor.count("number of chunks", i32::MAX as usize)? as u32;
            found.datasets.push(cursor.text("name of the text")?);
        }
        match cursor.at == bytes.len() {
            true => Ok(found),
            false => Err(format!("has extra data after byte {}", cursor.at)),
        }
    }

    /// Sets the number of matrices per entry from the tensors. Legacy files do not contain it.
    pub fn fit(&mut self, tensors: &[PlannedTensor]) {
        for tensor in tensors.iter().filter(|t| t.shape.len() > 2) {
            if let Some(entry) = self.entries.get_mut(&tensor.name)
                && let [count] = entry.counts[..]
            {
                entry.counts = vec![count; tensor.shape[0]];
            }
        }
    }

    /// The matrix as a GGUF file.
    ///
    /// # Errors
    /// [`Error::Internal`] when a name is too long for GGUF.
    pub fn to_gguf(&self) -> Result<Vec<u8>> {
        let datasets: Vec<&str> = self.datasets.iter().map(String::as_str).collect();
        let metadata = [
            ("general.type", Value::string("imatrix")),
            ("imatrix.datasets", strings(&datasets)),
            ("imatrix.chunk_count", Value::U32(self.chunks)),
            ("imatrix.chunk_size", Value::U32(self.chunk_size)),
        ];
        let metadata: Vec<(String, Value)> = metadata.into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        let mut tensors = Vec::new();
        for (name, ImportanceEntry { sums, counts }) in &self.entries {
            let matrices = counts.len();
            tensors.push((
                format!("{name}{SUMS}"),
                vec![matrices, sums.len() / matrices.max(1)],
                sums.clone(),
            ));
            tensors.push((format!("{name}{COUNTS}"), vec![matrices, 1], counts.clone()));
        }
        write_file(&metadata, &tensors)
    }

    /// The matrix as a legacy file.
    pub fn to_dat(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut put = |n: usize| bytes.extend(i32::try_from(n).unwrap_or(i32::MAX).to_le_bytes());
        put(self.entries.len());
        let calls = self.chunks.max(1);
        for (name, ImportanceEntry { sums, counts }) in &self.entries {
            bytes.extend((name.len() as i32).to_le_bytes());
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend((calls as i32).to_le_bytes());
            bytes.extend((sums.len() as i32).to_le_bytes());
            let columns = sums.len() / counts.len().max(1);
            for (sums, count) in sums.chunks_exact(columns.max(1)).zip(counts) {
                for sum in sums {
                    let mean = if *count > 0.0 { sum / count } else { 1.0 };
                    bytes.extend((mean * calls as f32).to_le_bytes());
                }
            }
        }
        bytes.extend((self.chunks as i32).to_le_bytes());
        let dataset = self.datasets.join(", ");
        bytes.extend((dataset.len() as i32).to_le_bytes());
        bytes.extend_from_slice(dataset.as_bytes());
        bytes
    }
}

fn family(a: &Architecture) -> Result<&'static GgufFamily> {
    families::of_model(a).ok_or_else(|| {
        Error::Internal(format!("models of the family {} cannot be written as GGUF", a.family))
    })
}

/// The matrices of the file that a linear becomes, each with its index in its tensor.
fn matrices(
    a: &Architecture,
    family: &GgufFamily,
    layer: usize,
    linear: &Op,
) -> Result<Vec<(Placed, usize)>> {
    let weight = linear.parameters().into_iter().find(|parameter| parameter.name == "weight");
    let Some(weight) = weight else { return Ok(Vec::new()) };
    let placed = layout::of_parameter(a, family, layer, linear, &weight)?.into_iter();
    let indexed = placed.filter_map(|placed| match (placed.expert, placed.stored_shape.len()) {
        (Some(expert), _) => Some((placed, expert)),
        (None, 2) => Some((placed, 0)),
        // llama.cpp multiplies by these matrices of latent attention per head. Their inputs do not occur in quant's
        // graph.
        (None, _) => None,
    });
    Ok(indexed.collect())
}

/// The key of the record of an entry.
fn key(entry: &str) -> String {
    format!("importance of {entry}")
}

struct Dat<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Dat<'a> {
    fn take(&mut self, what: &str, len: usize) -> Result<&'a [u8], String> {
        let part = self.at.checked_add(len).and_then(|end| self.bytes.get(self.at..end));
        let part =
            part.ok_or_else(|| format!("{what} at byte {} extends beyond the end of the file", self.at))?;
        self.at += len;
        Ok(part)
    }

    fn count(&mut self, what: &str, max: usize) -> Result<usize, String> {
        let at = self.at;
        let b = self.take(what, 4)?;
        let n = i32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        let fits = usize::try_from(n).ok().filter(|n| *n <= max);
        fits.ok_or_else(|| format!("{what} at byte {at} is {n}; it must be from 0 to {max}"))
    }

    fn text(&mut self, what: &str) -> Result<String, String> {
        let len = self.count(what, 1 << 16)?;
        let bytes = self.take(what, len)?;
        String::from_utf8(bytes.to_vec())
            .map_err(|_| format!("{what} before byte {} is not valid UTF-8", self.at))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn some() -> Importance {
        let mut importance =
            Importance { chunks: 3, chunk_size: 8, datasets: vec!["a text".into()], ..Default::default() };
        let entry = ImportanceEntry { sums: vec![1.0, 2.0, 4.0, 0.5], counts: vec![2.0] };
        importance.entries.insert("blk.0.attn_q.weight".into(), entry);
        let experts = ImportanceEntry { sums: vec![3.0, 6.0, 0.0, 0.0], counts: vec![3.0, 0.0] };
        importance.entries.insert("blk.0.ffn_up_exps.weight".into(), experts);
        importance
    }

    #[test]
    fn both_kinds_of_files_are_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("imatrix.gguf");
        std::fs::write(&path, some().to_gguf().unwrap()).unwrap();
        let back = Importance::read(&path).unwrap();
        assert_eq!(Importance { origin: String::new(), ..back }, some());
        std::fs::write(&path, some().to_dat()).unwrap();
        let back = Importance::read(&path).unwrap();
        assert_eq!((back.chunks, back.datasets), (3, some().datasets));
        assert_eq!(back.entries["blk.0.attn_q.weight"].sums, [1.5, 3.0, 6.0, 0.75]);
        assert_eq!(back.entries["blk.0.ffn_up_exps.weight"].sums, [3.0, 6.0, 3.0, 3.0]);
    }

    #[test]
    fn zeros_alone_and_what_is_not_finite_are_refused() {
        let of = |name: &str, shape: &[usize], sums: &[f32], counts: &[f32]| {
            let mut importance = Importance { origin: "some.imatrix".into(), ..Default::default() };
            let entry = ImportanceEntry { sums: sums.to_vec(), counts: counts.to_vec() };
            importance.entries.insert(name.into(), entry);
            let source = crate::gguf::rows::Source::Values(Vec::new());
            let kind = &crate::blocks::Q4_K;
            importance.of(&PlannedTensor {
                name: name.into(),
                shape: shape.to_vec(),
                kind,
                replaces: None,
                source,
            })
        };
        let found = of("up", &[2, 3, 2], &[4.0, 0.0, 0.0, 0.0], &[2.0, 0.0]).unwrap();
        assert_eq!(found.unwrap(), [2.0, 0.0, 1.0, 1.0]);
        for (shape, sums, counts, expected) in [
            (&[3, 2][..], &[0.0, 0.0][..], &[1.0][..], "has only zeros for matrix 0 of `up`"),
            (&[2, 3, 2], &[4.0, 0.0, 0.0, 0.0], &[2.0, 1.0], "has only zeros for matrix 1 of `up`"),
            (&[3, 2], &[1e30, 1.0], &[1e-30], "has a mean square of inf for matrix 0 of `up`"),
        ] {
            let error = of("up", shape, sums, counts).unwrap_err();
            assert_eq!(error.category(), crate::Category::Input, "{error}");
            assert_eq!(error.to_string(), format!("some.imatrix {expected}"));
        }
    }

    proptest! {
        #[test]
        fn damaged_files_are_refused_or_read(cut in 0_usize..500, at in 0_usize..500, with: u8, old: bool) {
            let mut bytes = if old { some().to_dat() } else { some().to_gguf().unwrap() };
            let place = at % bytes.len();
            bytes[place] = with;
            bytes.truncate(bytes.len() - cut % bytes.len());
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("imatrix");
            std::fs::write(&path, bytes).unwrap();
            if let Err(error) = Importance::read(&path) {
                let Error::InputFile { remedy, .. } = error else { panic!("{error}") };
                prop_assert!(remedy.marked().contains("importance matrix"), "{remedy}");
            }
        }
    }
}
