//! Rotation: spreads outliers in a few channels of the residual stream over all channels (QuaRot, §4; QServe, §4.3.1).
//!
//! The residual stream `h` is only added to, normalized and multiplied. With `H` orthonormal, `|H h| = |h|`, so an RMS
//! norm without a weight commutes with `H`, and the weights that read the stream can undo the rotation:
//!
//! ```text
//! embedding   E  → E Hᵀ                 rows of the table
//! norm        γ  → 1                    folded into the linears that read the norm
//! reads       W  → W diag(γ) Hᵀ         queries, keys, values, gate, up; the head, with the γ of the last norm
//! writes      W  → H W,  b → H b        output projections of attention and MLP
//! ```
//!
//! The checkpoint is rotated, not the blocks: [`rotate`] returns a [`Model`] whose tensors are the rotated ones. Later
//! stages process it like any other model. A tied head is untied, unless the weight of the last norm, which is folded
//! into it, is 1.
//!
//! A norm that subtracts the mean does not commute with `H`, and a norm after an output projection prevents rotating
//! its output. Families with such blocks are rejected.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use quant_kernels_cpu::{Hadamard, IsaToken, KernelError, Rayon};

use crate::checkpoint::{Dtype, TensorInfo, TensorSource, require_finite_bytes};
use crate::model::{Architecture, BlockGraph, Model, NodeId, Op, Preparation};
use crate::{Error, Result, allocate};

/// Columns of a matrix that are rotated at a time.
const COLUMNS: usize = 64;

/// The model with its residual stream rotated: equal to the original in real arithmetic, with tensors rounded to the
/// dtypes in which they are stored.
///
/// # Errors
/// [`Error::Usage`] with the reason, when the family's blocks or the hidden size do not allow it;
/// [`Error::AlreadyQuantized`]; errors of the checkpoint.
pub fn rotate(model: &Model) -> Result<Model> {
    let (architecture, hidden) = (model.architecture(), model.architecture().hidden);
    let hadamard = Hadamard::new(hidden).map_err(|_| {
        let reason = format!("Hadamard matrices of order {hidden}, its hidden size, are not supported");
        refused(architecture, Preparation::Rotate, &reason)
    });
    prepared(model, Preparation::Rotate, Some(hadamard))
}

/// The model with the weights of its norms moved into the linears that read them: equal to the original in real
/// arithmetic. It needs no Hadamard matrix of the hidden size.
///
/// # Errors
/// As [`rotate`], except for the size.
pub fn fold_norms(model: &Model) -> Result<Model> {
    prepared(model, Preparation::FoldNorms, None)
}

fn prepared(model: &Model, by: Preparation, hadamard: Option<Result<Hadamard>>) -> Result<Model> {
    model.require_float()?;
    let architecture = model.architecture();
    let tensors = tensors(model, by)?;
    let source = Rotated {
        source: model.source().clone(),
        tensors,
        hadamard: hadamard.transpose()?,
        hidden: architecture.hidden,
        isa: IsaToken::detect(),
        last: Mutex::default(),
    };
    let modified =
        source.tensors.iter().filter(|(_, t)| t.change.is_some()).map(|(name, _)| name.clone()).collect();
    model.prepared(by, Arc::new(source), modified)
}

fn refused(architecture: &Architecture, by: Preparation, reason: &str) -> Error {
    let family = architecture.family;
    let (what, step) = match by {
        Preparation::Rotate => (format!("models of the family `{family}` cannot be rotated"), "the rotation"),
        Preparation::FoldNorms => (format!("norms of the family `{family}` cannot be folded"), "the folding"),
    };
    Error::usage(format!("{what}: {reason}"), format!("skip {step}: ‹skip={}›", by.name()))
}

/// The nodes of a block that touch the residual stream.
struct Stream {
    norms: Vec<NodeId>,
    /// Linears that read the stream, each with the norm in between.
    reads: Vec<(NodeId, NodeId)>,
    /// Linears whose outputs are added to the stream.
    writes: Vec<NodeId>,
}

fn check_outside(architecture: &Architecture, by: Preparation) -> Result<()> {
    let refuse = |reason: &str| Err(refused(architecture, by, reason));
    if let Some(wrapper) = architecture.wrapper.as_ref().filter(|_| by == Preparation::Rotate) {
        let class = wrapper.class;
        return refuse(&format!(
            "the projector of {class} writes to the hidden states, but cannot be rotated"
        ));
    }
    if architecture.learned_positions.is_some() {
        return refuse("it adds learned positions to the embeddings");
    }
    if architecture.embedding_norm.is_some() {
        return refuse("it normalizes the embeddings before the first block");
    }
    match &architecture.final_norm {
        Some(Op::RmsNorm { .. }) => Ok(()),
        Some(_) => refuse(SUBTRACTS),
        None => refuse("the head reads hidden states that are not normalized"),
    }
}

impl Stream {
    fn of(architecture: &Architecture, graph: &BlockGraph, by: Preparation) -> Result<Self> {
        let refuse = |reason: &str| refused(architecture, by, reason);
        let mut stream = Self { norms: Vec::new(), reads: Vec::new(), writes: Vec::new() };
        let mut values = vec![graph.input()];
        while let Some(value) = values.pop() {
            for (user, node) in graph.users(value).map(|(user, _)| (user, &graph.nodes()[user])) {
                match &node.op {
                    Op::Add => {
                        let other = node.inputs.iter().find(|i| **i != value);
                        let Some(&added) = other else { return Err(refuse("a value is added to itself")) };
                        // A constant factor commutes with the rotation.
                        let added = match graph.nodes()[added].op {
                            Op::Scale(_) if graph.users(added).count() == 1 => graph.nodes()[added].inputs[0],
                            _ => added,
                        };
                        if graph.nodes()[added].op.is_norm() {
                            return Err(refuse(NORMED));
                        }
                        if graph.nodes()[added].op.linear_shape().is_none() || graph.users(added).count() != 1
                        {
                            return Err(refuse(
                                "it adds values to the hidden states that are not outputs of linears",
                            ));
                        }
                        stream.writes.push(added);
                        values.push(user);
                    }
                    Op::RmsNorm { width, .. } if *width == architecture.hidden => {
                        stream.norms.push(user);
                        for (reader, _) in graph.users(user) {
                            match graph.nodes()[reader].op {
                                Op::Linear { .. } => stream.reads.push((reader, user)),
                                _ => {
                                    return Err(refuse(
                                        "operations other than linears read the normalized hidden states",
                                    ));
                                }
                            }
                        }
                    }
                    Op::LayerNorm { .. } => return Err(refuse(SUBTRACTS)),
                    _ => return Err(refuse("an operation reads the hidden states without a norm")),
                }
            }
        }
        Ok(stream)
    }
}

const NORMED: &str =
    "norms with weights, which do not commute with a rotation, lie between linears and the residual stream";
const SUBTRACTS: &str = "its norms subtract the mean, which does not commute with a rotation, or may add a \
    bias that linears cannot absorb";

#[derive(Debug, Clone)]
enum Change {
    /// A norm's weight is folded into its readers and replaced by this value: 1, or 0 if it is stored as an offset from
    /// 1.
    Norm(f32),
    /// Rows are multiplied by a norm's weight, if there is one, and rotated.
    Rows(Option<Arc<Vec<f32>>>),
    /// Columns, or a vector, are rotated.
    Columns,
}

struct PreparedTensor {
    /// The name in the checkpoint.
    stored: String,
    info: TensorInfo,
    change: Option<Change>,
}

fn tensors(model: &Model, by: Preparation) -> Result<BTreeMap<String, PreparedTensor>> {
    let (architecture, source) = (model.architecture(), model.source());
    check_outside(architecture, by)?;
    let rotates = by == Preparation::Rotate;
    let mut tensors = BTreeMap::new();
    let mut add = |name: String, stored: String, change: Option<Change>| -> Result<()> {
        let info = source.require(&stored)?.clone();
        tensors.insert(name, PreparedTensor { stored, info, change });
        Ok(())
    };
    for name in source.names() {
        add(name.to_owned(), name.to_owned(), None)?;
    }
    let gamma = |name: &str, op: &Op| -> Result<Arc<Vec<f32>>> {
        let mut weight = source.read_f32(&format!("{name}.weight"))?;
        if op.weight_offset() != 0.0 {
            weight.iter_mut().for_each(|w| *w += op.weight_offset());
        }
        Ok(Arc::new(weight))
    };
    let head = format!("{}.weight", architecture.head);
    let embedding = model.embedding_name();
    let Some(last_norm) = &architecture.final_norm else {
        return Err(Error::Internal("a model without a last norm passed the check".into()));
    };
    let last = last_norm.name();
    let last_gamma = gamma(last, last_norm)?;
    let unties_head = architecture.tied && last_gamma.iter().any(|&g| g != 1.0);
    if rotates || unties_head {
        add(architecture.embedding.clone(), embedding.clone(), rotates.then_some(Change::Rows(None)))?;
    }
    if !architecture.tied || unties_head {
        let stored = if architecture.tied { embedding } else { head.clone() };
        add(head.clone(), stored, Some(Change::Rows(Some(last_gamma))))?;
    }
    add(
        format!("{last}.weight"),
        format!("{last}.weight"),
        Some(Change::Norm(1.0 - last_norm.weight_offset())),
    )?;
    for layer in 0..architecture.layers {
        let graph = architecture.graph(layer);
        let stream = Stream::of(architecture, graph, by)?;
        let name = |node: NodeId| architecture.in_block(layer, graph.name(node));
        let gammas =
            stream.norms.iter().map(|&norm| Ok((norm, gamma(&name(norm), &graph.nodes()[norm].op)?)));
        let gammas: BTreeMap<NodeId, Arc<Vec<f32>>> = gammas.collect::<Result<_>>()?;
        for &norm in &stream.norms {
            let stored = 1.0 - graph.nodes()[norm].op.weight_offset();
            let name = format!("{}.weight", name(norm));
            add(name.clone(), name, Some(Change::Norm(stored)))?;
        }
        for &(linear, norm) in &stream.reads {
            let gamma = gammas[&norm].clone();
            let name = format!("{}.weight", name(linear));
            add(name.clone(), name, Some(Change::Rows(Some(gamma))))?;
        }
        for &linear in stream.writes.iter().filter(|_| rotates) {
            let biased = graph.has_bias(linear).then_some("bias");
            for parameter in std::iter::once("weight").chain(biased) {
                let name = format!("{}.{parameter}", name(linear));
                add(name.clone(), name, Some(Change::Columns))?;
            }
        }
    }
    // The checkpoint may contain a copy of the tied head, which would no longer match the rotated embedding.
    if architecture.tied && !unties_head && rotates {
        tensors.remove(&head);
    }
    Ok(tensors)
}

struct Rotated {
    source: Arc<dyn TensorSource>,
    tensors: BTreeMap<String, PreparedTensor>,
    /// `None` if norms are only folded.
    hadamard: Option<Hadamard>,
    hidden: usize,
    isa: IsaToken,
    /// The most recent tensor with rotated columns: any part of it requires the whole tensor.
    last: Mutex<Option<(String, Arc<Vec<u8>>)>>,
}

impl Rotated {
    fn tensor(&self, name: &str) -> Result<&PreparedTensor> {
        let missing = || Error::MissingTensor { path: self.location(name), tensor: name.to_owned() };
        self.tensors.get(name).ok_or_else(missing)
    }

    fn transform(&self, rows: &mut [f32]) -> Result<()> {
        match &self.hadamard {
            Some(hadamard) => hadamard.transform(self.isa, rows, &Rayon).map_err(internal),
            None => Ok(()),
        }
    }

    fn rotate_rows(&self, gamma: Option<&[f32]>, dtype: Dtype, bytes: &[u8]) -> Result<Vec<u8>> {
        let mut values = allocate::zeros(bytes.len() / dtype.size(), "the rows to rotate")?;
        dtype.widen(bytes, &mut values);
        if let Some(gamma) = gamma {
            for row in values.chunks_exact_mut(gamma.len()) {
                row.iter_mut().zip(gamma).for_each(|(w, g)| *w *= g);
            }
        }
        self.transform(&mut values)?;
        Ok(dtype.narrow(&values))
    }

    /// Rotates the columns of a matrix `[n, k]`, or a vector of `n` values.
    fn rotate_columns(&self, info: &TensorInfo, bytes: &[u8]) -> Result<Vec<u8>> {
        let (n, size) = (self.hidden, info.dtype.size());
        let k = info.elements() / n.max(1);
        let mut out = allocate::zeros(bytes.len(), "a rotated tensor")?;
        let (mut tile, mut row) = (vec![0.0; COLUMNS.min(k) * n], vec![0.0; COLUMNS.min(k)]);
        for first in (0..k).step_by(COLUMNS) {
            let count = COLUMNS.min(k - first);
            let place = |i: usize| (i * k + first) * size..(i * k + first + count) * size;
            for i in 0..n {
                info.dtype.widen(&bytes[place(i)], &mut row[..count]);
                for (c, value) in row[..count].iter().enumerate() {
                    tile[c * n + i] = *value;
                }
            }
            self.transform(&mut tile[..count * n])?;
            for i in 0..n {
                for (c, value) in row[..count].iter_mut().enumerate() {
                    *value = tile[c * n + i];
                }
                out[place(i)].copy_from_slice(&info.dtype.narrow(&row[..count]));
            }
        }
        Ok(out)
    }

    /// A whole tensor with rotated columns, cached until another one is requested.
    fn whole(&self, name: &str, tensor: &PreparedTensor) -> Result<Arc<Vec<u8>>> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, bytes)) = &*last
            && known == name
        {
            return Ok(bytes.clone());
        }
        *last = None;
        let bytes = self.source.read(&tensor.stored)?;
        let bytes = Arc::new(self.rotate_columns(&tensor.info, &self.finite(tensor, bytes)?)?);
        *last = Some((name.to_owned(), bytes.clone()));
        Ok(bytes)
    }

    /// A value that is not finite would spread over a whole row, so it is reported at its original position.
    fn finite(&self, tensor: &PreparedTensor, bytes: Vec<u8>) -> Result<Vec<u8>> {
        let path = self.source.location(&tensor.stored);
        require_finite_bytes(path, &tensor.stored, tensor.info.dtype, &bytes).map_err(|e| {
            crate::checkpoint::non_finite_in_whole(self.source.as_ref(), tensor.info.dtype, e)
        })?;
        Ok(bytes)
    }
}

fn internal(error: KernelError) -> Error {
    Error::Internal(format!("a rotation fails: {error}"))
}

impl TensorSource for Rotated {
    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|t| &t.info)
    }

    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let tensor = self.tensor(name)?;
        let Some(change) = &tensor.change else {
            return self.source.read_range(&tensor.stored, offset, buffer);
        };
        let len = tensor.info.byte_len();
        if offset.checked_add(buffer.len() as u64).is_none_or(|end| end > len) {
            return Err(Error::Internal(format!(
                "{} bytes at {offset} are beyond the end of `{name}`",
                buffer.len()
            )));
        }
        let dtype = tensor.info.dtype;
        match change {
            Change::Norm(stored) => {
                let one = dtype.narrow(&[*stored]);
                let from = (offset % one.len() as u64) as usize;
                buffer.iter_mut().zip(one.iter().cycle().skip(from)).for_each(|(b, o)| *b = *o);
            }
            Change::Rows(gamma) => {
                let row = (self.hidden * dtype.size()) as u64;
                let (first, end) = (offset / row, (offset + buffer.len() as u64).div_ceil(row));
                let mut bytes = vec![0; ((end - first) * row) as usize];
                self.source.read_range(&tensor.stored, first * row, &mut bytes)?;
                let bytes =
                    self.rotate_rows(gamma.as_ref().map(|g| &g[..]), dtype, &self.finite(tensor, bytes)?)?;
                let at = (offset - first * row) as usize;
                buffer.copy_from_slice(&bytes[at..][..buffer.len()]);
            }
            Change::Columns => {
                let bytes = self.whole(name, tensor)?;
                buffer.copy_from_slice(&bytes[offset as usize..][..buffer.len()]);
            }
        }
        Ok(())
    }

    fn location(&self, name: &str) -> PathBuf {
        self.source.location(self.tensors.get(name).map_or(name, |t| &t.stored))
    }
}
