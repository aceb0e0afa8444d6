//! Importance matrices: the mean square of each input channel of a linear over a text.
//!
//! They come from quant's own calibration or from a file. They can be written in both file formats that llama.cpp's
//! programs write and read: GGUF, with sums and counts, and the legacy format with means.

mod files;
mod latent;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use self::latent::LatentInputs;
use super::families::{self, GgufFamily};
use super::layout::{self, Placed};
use super::plan::PlannedTensor;
use super::saved;
use crate::calibrate::{HiddenStates, InputRows, Statistic, StatisticsPass, TokenWindows};
use crate::checkpoint::printable;
use crate::model::{Architecture, Model, NodeId, Op};
use crate::wording::counted;
use crate::{CancelToken, Error, Event, Observer, Result, TensorSink};

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

    /// Adds a matrix. `stored` returns the column of the checkpoint at a column of the file.
    fn push(&mut self, sum: &SquareSum, stored: impl Fn(usize) -> usize) {
        self.sums.extend((0..sum.sums.len()).map(|column| sum.sums[stored(column)] as f32));
        self.counts.push(sum.tokens as f32);
    }
}

#[derive(Clone)]
struct SquareSum {
    sums: Vec<f64>,
    tokens: u64,
}

impl SquareSum {
    fn new(channels: usize) -> Self {
        Self { sums: vec![0.0; channels], tokens: 0 }
    }

    fn add(&mut self, row: &[f32]) {
        for (sum, v) in self.sums.iter_mut().zip(row) {
            *sum += f64::from(*v) * f64::from(*v);
        }
        self.tokens += 1;
    }

    /// Fails if a sum is not finite in `f32`; `tensor` is the weight that reads the input.
    fn check(&self, tensor: &str) -> Result<()> {
        match self.sums.iter().position(|sum| !(*sum as f32).is_finite()) {
            Some(channel) => Err(Error::Calibration {
                tensor: tensor.to_owned(),
                what: format!("the sum of squares of input channel {channel}"),
            }),
            None => Ok(()),
        }
    }
}

impl Statistic for SquareSum {
    fn take(&mut self, rows: &InputRows<'_>) -> Result<()> {
        rows.counted().for_each(|(_, row)| self.add(row));
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
                for placed in placed(a, family, layer, &graph.nodes()[id].op)? {
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
                values.into_iter().map(|(id, k)| (id, SquareSum::new(k))).collect();
            let mut latent = LatentInputs::of(a, family, layer)?;
            let mut pass = StatisticsPass::new(&block, states.layout(), cancel);
            for (value, sum) in &mut sums {
                pass.gather(*value, sum)?;
            }
            if let Some(latent) = &mut latent {
                latent.watch(&mut pass)?;
            }
            pass.run(states, layer + 1 < a.layers)?;
            for (id, ..) in graph.linears() {
                let node = &graph.nodes()[id];
                self.add(a, family, layer, &node.op, &sums[&node.inputs[0]])?;
            }
            self.entries.extend(latent.map(LatentInputs::entries).transpose()?.into_iter().flatten());
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
        sum.check(&format!("{}.weight", a.in_block(layer, linear.name())))?;
        for placed in placed(a, family, layer, linear)?.into_iter().filter(|placed| !placed.is_per_head()) {
            let entry = self.entries.entry(placed.name(layer)).or_insert_with(ImportanceEntry::empty);
            let matrix = placed.expert.unwrap_or(0);
            if entry.counts.len() != matrix {
                return Err(Error::Internal(format!(
                    "expert {matrix} of `{}` is out of order",
                    placed.tensor
                )));
            }
            entry.push(sum, |column| placed.view.columns.stored(column));
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
            // Rows of the checkpoint are the columns of a transposed tensor.
            let sources = tensor.sources();
            let Some(last) = sources.len().checked_sub(1).filter(|_| !tensor.is_transposed()) else {
                continue;
            };
            let columns = tensor.shape.last().copied().unwrap_or_default().max(1);
            for (matrix, sums) in entry.sums.chunks_exact_mut(columns).enumerate() {
                // The matrices of all heads come from one weight.
                let Some(factors) = factors(sources[matrix.min(last)]) else { continue };
                for (column, sum) in sums.iter_mut().enumerate() {
                    let factor = f64::from(factors[tensor.stored_column(column)]);
                    *sum = (f64::from(*sum) / (factor * factor)).min(f64::from(f32::MAX)) as f32;
                }
            }
        }
        self
    }

    /// Checks that the matrix is one of this model, by its tensors and the number of its blocks. Returns a note if it has
    /// entries that are not used.
    ///
    /// # Errors
    /// [`Error::Usage`] if it lacks a tensor of a block whose rounding errors would be weighted, or has an entry for a
    /// tensor that the model does not have.
    pub fn check(&self, tensors: &[PlannedTensor], a: &Architecture) -> Result<Option<String>> {
        let fault = |fault: String| Error::usage(fault, "use an importance matrix of the same model");
        let such =
            |names: &[&str]| format!("{}, such as {}", counted(names.len(), "tensor"), printable(names[0]));
        let in_block = tensors.iter().filter(|t| t.name.starts_with("blk.") && t.shape.len() > 1);
        let used = in_block.filter(|t| t.kind.uses_importance && !t.keeps_codes());
        let names = used.map(|t| t.name.as_str());
        let missing: Vec<&str> = names.filter(|name| !self.entries.contains_key(*name)).collect();
        if !missing.is_empty() {
            return Err(fault(format!("the importance matrix has no entry for {}", such(&missing))));
        }
        let known: BTreeSet<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
        let unused = self.entries.keys().map(String::as_str).filter(|name| !known.contains(name));
        let (other, foreign): (Vec<&str>, Vec<&str>) = unused.partition(|name| is_of_llama_cpp(name, a));
        if !foreign.is_empty() {
            let such = such(&foreign);
            return Err(fault(format!(
                "the importance matrix has entries for {such}, which the model lacks"
            )));
        }
        Ok((!other.is_empty())
            .then(|| format!("the importance matrix has entries for {}, which are not used", such(&other))))
    }

    /// The importance of the columns of the weight of the checkpoint with this index, from that of all matrices of a
    /// tensor: the mean over the matrices that the weight becomes.
    pub(super) fn of_source(all: &[f32], index: usize, sources: usize, columns: usize) -> Vec<f32> {
        let matrices = (all.len() / columns.max(1) / sources.max(1)).max(1);
        let first = index * matrices;
        let mean = |column: usize| {
            let values =
                (first..first + matrices).map(|m| f64::from(Self::of_matrix(all, m, columns)[column]));
            (values.sum::<f64>() / matrices as f64) as f32
        };
        (0..columns).map(mean).collect()
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
}

/// Whether llama.cpp may gather an entry that is not used: for the head, for blocks for multi-token prediction, or for
/// the linear of latent attention that older files contain as a whole.
fn is_of_llama_cpp(name: &str, a: &Architecture) -> bool {
    let block = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let block = block.and_then(|(digits, within)| Some((digits.parse::<usize>().ok()?, within)));
    match block {
        Some((layer, "attn_kv_b.weight")) => layer < a.layers,
        Some((layer, _)) => (a.layers..a.layers + a.further_blocks).contains(&layer),
        None => name == "output.weight",
    }
}

fn family(a: &Architecture) -> Result<&'static GgufFamily> {
    families::of_model(a).ok_or_else(|| {
        Error::Internal(format!("models of the family {} cannot be written as GGUF", a.family))
    })
}

/// The matrices of the file that a linear becomes.
fn placed(a: &Architecture, family: &GgufFamily, layer: usize, linear: &Op) -> Result<Vec<Placed>> {
    let weight = linear.parameters().into_iter().find(|parameter| parameter.name == "weight");
    match weight {
        Some(weight) => layout::of_parameter(a, family, layer, linear, &weight),
        None => Ok(Vec::new()),
    }
}

/// The key of the record of an entry.
fn key(entry: &str) -> String {
    format!("importance of {entry}")
}
