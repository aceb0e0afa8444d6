//! Tensors of a file under the names, and in the order of rows, that checkpoints have.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::super::families::{EMBEDDING, FINAL_NORM, GgufFamily, HEAD, ROPE_FACTORS, ROPE_LONG, ROPE_SHORT};
use super::super::file::{GgufFile, GgufTensor};
use super::super::rows::RowOrder;
use super::About;
use crate::blocks::{BF16, F16};
use crate::checkpoint::{Checkpoint, Dtype, TensorInfo, TensorSource, printable};
use crate::{Error, Result};

/// More experts are refused, before there is an entry for each.
const MAX_EXPERTS: u64 = 4096;

/// The tensors of a GGUF file as a checkpoint's.
#[derive(Debug)]
pub struct GgufSource {
    file: Arc<GgufFile>,
    tensors: BTreeMap<String, Place>,
}

/// A matrix, or a vector, of a tensor of the file.
#[derive(Debug)]
struct Place {
    info: TensorInfo,
    tensor: GgufTensor,
    /// The first of its rows.
    first_row: usize,
    order: RowOrder,
    shift: f32,
}

impl GgufSource {
    /// The tensors of a file.
    ///
    /// # Errors
    /// [`Error::InputFile`] when a tensor is none that the family has, is there twice, or its shape makes no sense.
    pub(super) fn new(file: Arc<GgufFile>, about: &About<'_>) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        let experts = about.integer("expert_count")?.unwrap_or(0);
        if experts > MAX_EXPERTS {
            return Err(
                about.broken("expert_count", &format!("is {experts}; at most {MAX_EXPERTS} are read"))
            );
        }
        let counts = Counts { head: about.head_width()? as usize, experts: experts as usize };
        let family = about.family;
        for tensor in &file.header().tensors {
            if [ROPE_FACTORS, ROPE_SHORT, ROPE_LONG].contains(&tensor.name.as_str()) {
                continue;
            }
            for (name, place) in
                places(tensor, family, counts).map_err(|reason| GgufFile::broken(file.path(), reason))?
            {
                if tensors.contains_key(&name) {
                    let reason = format!("tensor `{}` holds `{name}`, which another one holds", tensor.name);
                    return Err(GgufFile::broken(file.path(), reason));
                }
                tensors.insert(name, place);
            }
        }
        Ok(Self { file, tensors })
    }

    /// Types of blocks that are read as floats, each once.
    pub(super) fn kinds(&self) -> Vec<&'static str> {
        let mut kinds = Vec::new();
        for place in self.tensors.values().filter(|p| !p.tensor.kind.is_float()) {
            if !kinds.contains(&place.tensor.kind.name) {
                kinds.push(place.tensor.kind.name);
            }
        }
        kinds
    }
}

/// What the metadata says of the tensors' shapes.
#[derive(Debug, Clone, Copy)]
struct Counts {
    /// Rows of one head of queries or keys.
    head: usize,
    experts: usize,
}

/// The number of a block: digits without sign and leading zeros, so that each has one name.
fn block_number(digits: &str) -> Option<usize> {
    digits.parse().ok().filter(|number: &usize| number.to_string() == digits)
}

/// The checkpoint's tensors that a tensor of the file holds.
fn places(
    tensor: &GgufTensor,
    family: &GgufFamily,
    Counts { head, experts: due }: Counts,
) -> Result<Vec<(String, Place)>, String> {
    let unknown =
        || format!("tensor `{}` is none of those of {} that are read", printable(&tensor.name), family.arch);
    let place = |shape: &[usize], first_row, order, shift| {
        // Floats stay what they are, unless something is taken from them.
        let dtype = match tensor.kind {
            kind if shift == 0.0 && *kind == F16 => Dtype::F16,
            kind if shift == 0.0 && *kind == BF16 => Dtype::Bf16,
            _ => Dtype::F32,
        };
        let info = TensorInfo { dtype, shape: shape.to_vec() };
        Place { info, tensor: tensor.clone(), first_row, order, shift }
    };
    let (stem, parameter) = tensor.name.rsplit_once('.').ok_or_else(unknown)?;
    if !matches!(parameter, "weight" | "bias") {
        return Err(unknown());
    }
    let plain = |name: String, shift| Ok(vec![(name, place(&tensor.shape, 0, RowOrder::AsStored, shift))]);
    if tensor.name == EMBEDDING {
        return plain("model.embed_tokens.weight".into(), 0.0);
    }
    if stem == FINAL_NORM {
        return plain(format!("model.norm.{parameter}"), -family.norm_shift);
    }
    if stem == HEAD {
        return plain(format!("lm_head.{parameter}"), 0.0);
    }
    let (layer, stored) = stem.strip_prefix("blk.").and_then(|s| s.split_once('.')).ok_or_else(unknown)?;
    let layer = block_number(layer).ok_or_else(unknown)?;
    if let Some((prefix, linears)) = family.experts
        && let Some((linear, _)) = linears.iter().find(|(_, name)| *name == stored)
    {
        let [experts, rows, columns] = tensor.shape[..] else {
            return Err(format!("tensor `{}` has {} dimensions, 3 are due", tensor.name, tensor.shape.len()));
        };
        if experts != due {
            return Err(format!(
                "tensor `{}` has {experts} experts, `{}.expert_count` is {due}",
                tensor.name, family.arch
            ));
        }
        let one = |expert: usize| {
            let name = format!("model.layers.{layer}.{prefix}.{expert}.{linear}.{parameter}");
            (name, place(&[rows, columns], expert * rows, RowOrder::AsStored, 0.0))
        };
        return Ok((0..experts).map(one).collect());
    }
    let modules = family.modules.iter().copied().flatten();
    let (module, _) = modules.into_iter().find(|(_, name)| *name == stored).ok_or_else(unknown)?;
    let turns = family.pairs_neighbours && matches!(stored, "attn_q" | "attn_k");
    let rows = if parameter == "bias" { tensor.columns() } else { tensor.shape[0] };
    let order = match turns {
        true if head == 0 || head % 2 == 1 || !rows.is_multiple_of(head) => {
            return Err(format!(
                "tensor `{}` has {rows} rows, no whole number of heads of {head}",
                tensor.name
            ));
        }
        true => RowOrder::Paired { head },
        false => RowOrder::AsStored,
    };
    let shift = if stored.ends_with("norm") { -family.norm_shift } else { 0.0 };
    Ok(vec![(format!("model.layers.{layer}.{module}.{parameter}"), place(&tensor.shape, 0, order, shift))])
}

impl Place {
    /// Rows of this many elements; of a vector whose rows are reordered, of one.
    fn columns(&self) -> usize {
        match (self.order, self.info.shape.as_slice()) {
            (RowOrder::Paired { .. }, [_]) => 1,
            (_, shape) => shape.last().copied().unwrap_or(1),
        }
    }

    /// The bytes of one row, as the checkpoint has them.
    fn row(&self, file: &GgufFile, row: usize, out: &mut Vec<u8>) -> Result<()> {
        let columns = self.columns();
        let kind = self.tensor.kind;
        let row_bytes = kind.row_bytes(columns).ok_or_else(|| {
            Error::Internal(format!("rows of `{}` that are no whole blocks", self.tensor.name))
        })?;
        let place = self.first_row + self.order.place(row);
        let mut bytes = vec![0; row_bytes];
        file.read(&self.tensor, (place * row_bytes) as u64, &mut bytes)?;
        if self.info.dtype != Dtype::F32 {
            out.extend(bytes);
            return Ok(());
        }
        let mut values = vec![0.0; columns];
        kind.decode(&bytes, &mut values);
        out.extend(values.iter().flat_map(|v| (v + self.shift).to_le_bytes()));
        Ok(())
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
            return Err(Error::Internal(format!("a range that leaves tensor `{name}`")));
        };
        if buffer.is_empty() {
            return Ok(());
        }
        // Both lie within the tensor, which lies within the address space.
        let (start, end) = (offset as usize, end as usize);
        let row_bytes = place.columns() * place.info.dtype.size();
        let mut row = Vec::with_capacity(row_bytes);
        for r in start / row_bytes..end.div_ceil(row_bytes) {
            row.clear();
            place.row(&self.file, r, &mut row)?;
            let (from, to) = ((r * row_bytes).max(start), ((r + 1) * row_bytes).min(end));
            buffer[from - start..to - start].copy_from_slice(&row[from - r * row_bytes..to - r * row_bytes]);
        }
        Ok(())
    }

    fn location(&self, _name: &str) -> PathBuf {
        self.file.path().to_owned()
    }
}

impl Checkpoint for GgufSource {
    fn file_bytes(&self) -> u64 {
        std::fs::metadata(self.file.path()).map_or(0, |m| m.len())
    }

    fn tensor_bytes(&self) -> u64 {
        self.file.header().tensors.iter().map(|t| t.bytes).sum()
    }

    fn files(&self) -> Vec<PathBuf> {
        vec![self.file.path().to_owned()]
    }
}
