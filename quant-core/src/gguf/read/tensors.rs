//! The tensors of a file, with the names and the row order of a checkpoint. The table of tensors (`layout`) is the
//! writer's, used in reverse.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::super::families::{
    EMBEDDING, EMBEDDING_NORM, HEAD, INPUT_NORM, INPUT_PROJECTION, INPUT_TABLE, POSITIONS, ROPE_FACTORS,
    ROPE_LONG, ROPE_SHORT,
};
use super::super::file::{GgufFile, GgufTensor};
use super::super::layout::{self, Placed};
use super::super::rows::{Change, RowOrder, View, matrix};
use super::About;
use crate::blocks::{BF16, BlockType, F16};
use crate::checkpoint::{Dtype, TensorInfo, TensorSource, WeightFiles, printable};
use crate::model::Architecture;
use crate::{Error, Result, allocate};

/// Files with more experts are rejected before any memory is allocated for experts.
const MAX_EXPERTS: u64 = 4096;

/// Presents the tensors of a GGUF file as those of a checkpoint.
#[derive(Debug)]
pub struct GgufSource {
    file: Arc<GgufFile>,
    tensors: BTreeMap<String, CheckpointTensor>,
    last: Mutex<Option<Transposed>>,
}

/// The name of a tensor, the index of one of its matrices, and the values of that matrix.
type Transposed = (String, usize, Arc<Vec<f32>>);

#[derive(Debug)]
struct CheckpointTensor {
    info: TensorInfo,
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone)]
struct Piece {
    tensor: GgufTensor,
    first_row: usize,
    view: View,
    /// Columns per row in the file.
    columns: usize,
}

impl GgufSource {
    pub(super) fn check_experts(about: &About<'_>) -> Result<()> {
        match about.integer("expert_count")?.unwrap_or(0) {
            experts if experts > MAX_EXPERTS => {
                Err(about.unread("expert_count", &format!("is {experts}; the limit is {MAX_EXPERTS}")))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn new(file: Arc<GgufFile>, about: &About<'_>, a: &Architecture) -> Result<Self> {
        let mut source = Self { file, tensors: BTreeMap::new(), last: Mutex::default() };
        let mut seen: BTreeSet<String> =
            [ROPE_FACTORS, ROPE_SHORT, ROPE_LONG].into_iter().map(str::to_owned).collect();
        let mut outer =
            |name: &str, stored: &str, view: View| source.add_whole(name, stored, view, &mut seen);
        outer(&a.embedding, EMBEDDING, View::AS_STORED)?;
        outer(&format!("{}.weight", a.head), &format!("{HEAD}.weight"), View::AS_STORED)?;
        if let Some(positions) = &a.learned_positions {
            outer(&positions.table, POSITIONS, View::AS_STORED)?;
        }
        if a.head_bias {
            outer(&format!("{}.bias", a.head), &format!("{HEAD}.bias"), View::AS_STORED)?;
        }
        let norms = [(&a.embedding_norm, EMBEDDING_NORM), (&a.final_norm, about.family.final_norm)];
        for (norm, in_file) in norms.into_iter().filter_map(|(norm, in_file)| Some((norm.as_ref()?, in_file)))
        {
            for parameter in norm.parameters() {
                let name = format!("{}.{}", norm.name(), parameter.name);
                let stored = format!("{in_file}.{}", parameter.name);
                outer(&name, &stored, View::AS_STORED.plus(norm.weight_offset()))?;
            }
        }
        if let Some(inputs) = &a.per_layer_inputs {
            outer(&format!("{}.weight", inputs.table), INPUT_TABLE, View::AS_STORED)?;
            outer(&format!("{}.weight", inputs.projection), INPUT_PROJECTION, View::AS_STORED)?;
            outer(&format!("{}.weight", inputs.norm.name()), INPUT_NORM, View::AS_STORED)?;
        }
        for layer in 0..a.layers {
            let block = layout::of_block(a, about.family, layer)?;
            let names: BTreeSet<String> = block.iter().map(|placed| placed.name(layer)).collect();
            if names.iter().any(|name| source.file.tensor(name).is_none()) {
                // Reporting an unexpected tensor gives a better message than reporting a missing one.
                let prefix = format!("blk.{layer}.");
                let mut of_block =
                    source.file.header().tensors.iter().filter(|t| t.name.starts_with(&prefix));
                if let Some(other) = of_block.find(|t| !names.contains(&t.name)) {
                    return Err(source.unknown(&other.name, about));
                }
            }
            for placed in block.into_iter().map(|placed| as_in_checkpoint(a, placed)) {
                source.add(&placed, &placed.name(layer), about)?;
            }
            seen.extend(names);
        }
        let further = about.further_blocks()?;
        let is_further = |name: &str| {
            let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
            let layer = layer.and_then(|(digits, _)| digits.parse::<usize>().ok());
            layer.is_some_and(|layer| (a.layers..a.layers + further).contains(&layer))
        };
        let mut others = source.file.header().tensors.iter().filter(|t| !seen.contains(&t.name));
        match others.find(|other| !is_further(&other.name)) {
            Some(other) => Err(source.unknown(&other.name, about)),
            None => Ok(source),
        }
    }

    fn unknown(&self, name: &str, about: &About<'_>) -> Error {
        let (name, arch) = (printable(name), about.family.arch);
        let reason = format!("tensor `{name}` is not supported for {arch}");
        GgufFile::unread(self.file.path(), reason)
    }

    /// Adds a tensor outside the blocks, if the file has it.
    fn add_whole(&mut self, name: &str, stored: &str, view: View, seen: &mut BTreeSet<String>) -> Result<()> {
        seen.insert(stored.to_owned());
        let Some(tensor) = self.file.tensor(stored).cloned() else { return Ok(()) };
        let columns = tensor.columns();
        let (shape, first_row) = (tensor.shape.clone(), 0);
        let piece = Piece { tensor, first_row, view, columns };
        self.insert(name, shape, piece);
        Ok(())
    }

    /// Adds a tensor of a block, or a part of one.
    fn add(&mut self, placed: &Placed, stored: &str, about: &About<'_>) -> Result<()> {
        let broken = |reason: String| GgufFile::broken(self.file.path(), reason);
        let Some(tensor) = self.file.tensor(stored).cloned() else {
            return Err(broken(format!("tensor `{stored}` is missing")));
        };
        let mut expected = placed.stored_shape.clone();
        if placed.expert.is_some() {
            let experts = about.require("expert_count")?;
            if tensor.shape.len() != expected.len() + 1 {
                let (found, expected) = (tensor.shape.len(), expected.len() + 1);
                return Err(broken(format!("tensor `{stored}` has {found} dimensions, expected {expected}")));
            }
            if tensor.shape[0] as u64 != experts {
                let found = tensor.shape[0];
                let key = format!("{}.expert_count", about.family.arch);
                return Err(broken(format!(
                    "tensor `{stored}` contains {found} experts, but `{key}` is {experts}"
                )));
            }
            expected.insert(0, tensor.shape[0]);
        }
        // Leading dimensions of size 1 may be omitted.
        let plain = |shape: &[usize]| shape.iter().copied().skip_while(|n| *n == 1).collect::<Vec<_>>();
        if plain(&tensor.shape) != plain(&expected) {
            return Err(broken(format!(
                "tensor `{stored}` has shape {:?}, expected {expected:?}",
                tensor.shape
            )));
        }
        let [rows, columns] = matrix(&placed.shape, placed.view)?;
        if tensor.kind.row_bytes(columns).is_none() {
            let reason = format!("tensor `{stored}` has type {}, expected a float type", tensor.kind.name);
            return Err(broken(reason));
        }
        let first_row = placed.expert.unwrap_or(0) * rows;
        let piece = Piece { tensor, first_row, view: placed.view, columns };
        self.insert(&placed.tensor, placed.shape.clone(), piece);
        Ok(())
    }

    fn insert(&mut self, name: &str, shape: Vec<usize>, piece: Piece) {
        // Floats keep their type, unless their values change.
        let dtype = match piece.tensor.kind {
            kind if piece.view.change == Change::None && *kind == F16 => Dtype::F16,
            kind if piece.view.change == Change::None && *kind == BF16 => Dtype::Bf16,
            _ => Dtype::F32,
        };
        match self.tensors.get_mut(name) {
            Some(place) => {
                if place.info.dtype != dtype {
                    place.info.dtype = Dtype::F32;
                }
                place.pieces.push(piece);
            }
            None => {
                let place = CheckpointTensor { info: TensorInfo { dtype, shape }, pieces: vec![piece] };
                self.tensors.insert(name.to_owned(), place);
            }
        }
    }

    pub(super) fn kinds(&self) -> Vec<&'static str> {
        let mut kinds = Vec::new();
        let pieces = self.tensors.values().flat_map(|place| &place.pieces);
        for kind in pieces.map(|piece| piece.tensor.kind).filter(|kind| !kind.is_float()) {
            if !kinds.contains(&kind.name) {
                kinds.push(kind.name);
            }
        }
        kinds
    }

    fn file_row(&self, piece: &Piece, row: usize) -> Result<Vec<f32>> {
        let bytes = self.stored_bytes(piece, row)?;
        let mut values = vec![0.0; piece.columns];
        piece.tensor.kind.decode(&bytes, &mut values);
        Ok(values)
    }

    fn stored_bytes(&self, piece: &Piece, row: usize) -> Result<Vec<u8>> {
        let row_bytes = piece.tensor.kind.row_bytes(piece.columns).ok_or_else(|| {
            Error::Internal(format!("rows of `{}` are not whole blocks", piece.tensor.name))
        })?;
        let mut bytes = vec![0; row_bytes];
        self.file.read(&piece.tensor, ((piece.first_row + row) * row_bytes) as u64, &mut bytes)?;
        Ok(bytes)
    }

    /// A row of the checkpoint that is a column of a transposed matrix; `None` if the matrix is not transposed, or does
    /// not contain the row.
    fn column(&self, piece: &Piece, row: usize) -> Result<Option<Vec<f32>>> {
        let RowOrder::Transposed { period, width, depth } = piece.view.order else { return Ok(None) };
        let (which, column) = (row / period, row % period);
        if column >= width {
            return Ok(None);
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let known = last.as_ref().filter(|(name, of, _)| *name == piece.tensor.name && *of == which);
        let values = match known {
            Some((.., values)) => values.clone(),
            None => {
                let mut values = allocate::room(width * depth, "a transposed tensor")?;
                for row in 0..depth {
                    values.extend(self.file_row(piece, which * depth + row)?);
                }
                let values = Arc::new(values);
                *last = Some((piece.tensor.name.clone(), which, values.clone()));
                values
            }
        };
        Ok(Some((0..depth).map(|row| values[row * width + column]).collect()))
    }

    fn row(&self, place: &CheckpointTensor, row: usize, out: &mut Vec<u8>) -> Result<()> {
        for piece in &place.pieces {
            let values = match self.column(piece, row)? {
                Some(values) => values,
                None => match piece.view.order.place(row) {
                    None => continue,
                    Some(at)
                        if place.info.dtype != Dtype::F32 && piece.view.columns == RowOrder::AsStored =>
                    {
                        out.extend(self.stored_bytes(piece, at)?);
                        return Ok(());
                    }
                    Some(at) => self.file_row(piece, at)?,
                },
            };
            let mut values = match piece.view.columns {
                RowOrder::AsStored => values,
                order => (0..values.len()).map(|c| values[order.place(c).unwrap_or(c)]).collect(),
            };
            piece.view.change.undo(row, &mut values);
            out.extend(place.info.dtype.narrow(&values));
            return Ok(());
        }
        Err(Error::Internal(format!("row {row} is not in any tensor of the file")))
    }
}

/// Transposes a weight that the checkpoint stores as `[in, out]`.
fn as_in_checkpoint(a: &Architecture, placed: Placed) -> Placed {
    match *placed.shape.as_slice() {
        [rows, columns] if a.is_stored_by_columns(&placed.tensor) => {
            let order = RowOrder::Transposed { period: columns, width: columns, depth: rows };
            Placed { shape: vec![columns, rows], view: View::of(order), ..placed }
        }
        _ => placed,
    }
}

impl CheckpointTensor {
    /// The number of elements per row; 1 for a vector whose elements are reordered.
    fn columns(&self) -> usize {
        let ordered = self.pieces.iter().any(|piece| piece.view.order != RowOrder::AsStored);
        let folded = self.pieces.first().map(|piece| piece.view.order);
        match (ordered, self.info.shape.as_slice()) {
            (true, [_]) => match folded {
                Some(RowOrder::Folded { width }) => width,
                _ => 1,
            },
            (_, shape) => shape.last().copied().unwrap_or(1),
        }
    }

    /// The type of the blocks, if the rows of a matrix are all stored unchanged in blocks of one quantized type.
    fn block_type(&self) -> Option<&'static BlockType> {
        let kind = self.pieces.first()?.tensor.kind;
        let stored_by_rows = |piece: &Piece| {
            let View { order, columns, change } = piece.view;
            let transposed = matches!(order, RowOrder::Transposed { .. });
            *piece.tensor.kind == *kind
                && !transposed
                && columns == RowOrder::AsStored
                && change == Change::None
        };
        let fits = !kind.is_float() && self.info.shape.len() == 2 && self.pieces.iter().all(stored_by_rows);
        fits.then_some(kind)
    }
}

impl TensorSource for GgufSource {
    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|place| &place.info)
    }

    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let place = self
            .tensors
            .get(name)
            .ok_or_else(|| Error::MissingTensor { path: self.location(name), tensor: name.to_owned() })?;
        let end = offset.checked_add(buffer.len() as u64).filter(|end| *end <= place.info.byte_len());
        let Some(end) = end else {
            return Err(Error::Internal(format!("a range exceeds tensor `{name}`")));
        };
        if buffer.is_empty() {
            return Ok(());
        }
        // The casts are lossless: the range lies within the tensor, which lies within the address space.
        let (start, end) = (offset as usize, end as usize);
        let row_bytes = place.columns() * place.info.dtype.size();
        let mut row = Vec::with_capacity(row_bytes);
        for r in start / row_bytes..end.div_ceil(row_bytes) {
            row.clear();
            self.row(place, r, &mut row)?;
            let (from, to) = ((r * row_bytes).max(start), ((r + 1) * row_bytes).min(end));
            buffer[from - start..to - start].copy_from_slice(&row[from - r * row_bytes..to - r * row_bytes]);
        }
        Ok(())
    }

    fn block_type(&self, name: &str) -> Option<&'static BlockType> {
        self.tensors.get(name)?.block_type()
    }

    fn read_blocks(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some((place, kind)) = self.tensors.get(name).and_then(|place| Some((place, place.block_type()?)))
        else {
            return Ok(None);
        };
        let (rows, columns) = (place.info.shape[0], place.columns());
        let row_bytes = kind.row_bytes(columns);
        let bytes = row_bytes
            .and_then(|bytes| bytes.checked_mul(rows))
            .ok_or_else(|| Error::Internal(format!("rows of `{name}` are not whole blocks")))?;
        let mut blocks = Vec::new();
        if let [piece] = place.pieces.as_slice()
            && piece.view.order == RowOrder::AsStored
        {
            blocks.resize(bytes, 0);
            let first = piece.first_row as u64 * (bytes / rows.max(1)) as u64;
            self.file.read(&piece.tensor, first, &mut blocks)?;
            return Ok(Some(blocks));
        }
        blocks.reserve_exact(bytes);
        for row in 0..rows {
            let stored = place.pieces.iter().find_map(|piece| Some((piece, piece.view.order.place(row)?)));
            let Some((piece, at)) = stored else {
                return Err(Error::Internal(format!("row {row} is not stored in any tensor of the file")));
            };
            blocks.extend(self.stored_bytes(piece, at)?);
        }
        Ok(Some(blocks))
    }

    fn location(&self, _name: &str) -> PathBuf {
        self.file.path().to_owned()
    }
}

impl WeightFiles for GgufSource {
    fn file_bytes(&self) -> u64 {
        self.file.bytes()
    }

    fn tensor_bytes(&self) -> u64 {
        self.file.header().tensors.iter().map(|t| t.bytes).sum()
    }

    fn files(&self) -> Vec<PathBuf> {
        self.file.paths().map(Path::to_owned).collect()
    }
}
