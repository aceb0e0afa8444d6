//! Experts that are stored together, seen one by one: what follows reads each expert's gate, up and down under names of
//! their own, as most families store them, and what is written has these names.
//!
//! Rows that stand together in the file are read from there by ranges. Others are taken from the expert's part of the
//! tensor, which is read as a whole, and the last weight is kept, since weights are read in pieces.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::Architecture;
use super::arch::FusedExperts;
use crate::checkpoint::{Dtype, TensorInfo, TensorSource, require_weight_float};
use crate::format::mxfp4;
use crate::{Error, Result};

/// The same tensors with each expert's by themselves, where some block's experts are stored together.
///
/// # Errors
/// When a tensor is missing or has another shape or type than the configuration implies, or an expert stands twice.
pub(super) fn split(
    source: Arc<dyn TensorSource>,
    architecture: &Architecture,
) -> Result<Arc<dyn TensorSource>> {
    let Some(fused) = architecture.fused_experts else { return Ok(source) };
    let mut view = Split { source, parts: BTreeMap::new(), others: BTreeSet::new(), last: Mutex::default() };
    let mut hidden = BTreeSet::new();
    for layer in 0..architecture.layers {
        view.add_block(fused, &architecture.in_block(layer, ""), &mut hidden)?;
    }
    if view.parts.is_empty() {
        return Ok(view.source);
    }
    let mut others = BTreeSet::new();
    for name in view.source.names().into_iter().filter(|name| !hidden.contains(*name)) {
        if view.parts.contains_key(name) {
            let one = hidden.iter().next().cloned().unwrap_or_default();
            return Err(Error::AmbiguousNames { path: view.source.location(name), one, other: name.into() });
        }
        others.insert(name.to_owned());
    }
    view.others = others;
    Ok(Arc::new(view))
}

/// How an expert's matrix `[n, k]`, or that of two of its linears, lies in the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Rows are outputs.
    Rows,
    /// Columns are outputs.
    Columns,
    /// Rows are outputs, in codes and scales of tensors of their own.
    Mxfp4,
}

/// A weight or a bias, as a part of a tensor.
#[derive(Debug, Clone)]
struct Part {
    /// Type and shape that it is seen with.
    info: TensorInfo,
    /// The name of the tensor; in MXFP4 without what tells codes from scales.
    tensor: String,
    form: Form,
    expert: usize,
    /// Outputs of an expert in the tensor, of which these are the part's.
    all: usize,
    first: usize,
    step: usize,
    /// Outputs and inputs of the part; a bias has one input.
    n: usize,
    k: usize,
}

struct Split {
    source: Arc<dyn TensorSource>,
    parts: BTreeMap<String, Part>,
    /// The tensors that are as they were.
    others: BTreeSet<String>,
    last: Mutex<Option<(String, Arc<Vec<u8>>)>>,
}

impl Split {
    fn add_block(&mut self, fused: FusedExperts, block: &str, hidden: &mut BTreeSet<String>) -> Result<()> {
        let FusedExperts { experts, hidden: width, intermediate, .. } = fused;
        let [gate_up, down] = [fused.gate_up, fused.down].map(|name| format!("{block}{name}"));
        let codes = mxfp4::SUFFIXES[0];
        if self.source.info(&gate_up).is_none() && self.source.info(&format!("{gate_up}{codes}")).is_none() {
            return Ok(());
        }
        let sizes = [[2 * intermediate, width], [width, intermediate]];
        let [first, second] = [
            self.dtype_and_form(&gate_up, experts, sizes[0])?,
            self.dtype_and_form(&down, experts, sizes[1])?,
        ];
        // A matrix may be square, but not both: where one tells, the other is alike.
        let forms = match (first.1, second.1) {
            (Some(one), Some(other)) if one == other || [one, other].contains(&Form::Mxfp4) => [one, other],
            (Some(one), None) | (None, Some(one)) => [one; 2],
            _ => return Err(self.wrong_shape(&down, &[experts, sizes[1][0], sizes[1][1]])?),
        };
        let [gate, up, down_linear] = fused.linears;
        let (step, of_up) = if fused.alternate { (2, 1) } else { (1, intermediate) };
        let rows = [
            (0, gate, 0, step, intermediate, width),
            (0, up, of_up, step, intermediate, width),
            (1, down_linear, 0, 1, width, intermediate),
        ];
        let tensors = [(&gate_up, first.0), (&down, second.0)];
        for (tensor, form) in [(&gate_up, forms[0]), (&down, forms[1])] {
            match form {
                Form::Mxfp4 => hidden.extend(mxfp4::SUFFIXES.map(|suffix| format!("{tensor}{suffix}"))),
                Form::Rows | Form::Columns => _ = hidden.insert(tensor.clone()),
            }
        }
        for (which, linear, first, step, n, k) in rows {
            let (tensor, dtype) = tensors[which];
            let all = sizes[which][0];
            let part = Part {
                info: TensorInfo { dtype, shape: vec![n, k] },
                tensor: tensor.clone(),
                form: forms[which],
                expert: 0,
                all,
                first,
                step,
                n,
                k,
            };
            self.add_parts(fused, block, &format!("{linear}.weight"), &part);
            if let Some(suffix) = fused.bias {
                let tensor = format!("{tensor}{suffix}");
                let info = self.source.require(&tensor)?;
                require_weight_float(self.source.location(&tensor), &tensor, info.dtype)?;
                if info.shape != [experts, all] {
                    return Err(self.wrong_shape(&tensor, &[experts, all])?);
                }
                let info = TensorInfo { dtype: info.dtype, shape: vec![n] };
                hidden.insert(tensor.clone());
                let part = Part { info, tensor, form: Form::Rows, k: 1, ..part };
                self.add_parts(fused, block, &format!("{linear}.bias"), &part);
            }
        }
        Ok(())
    }

    /// A part of each expert.
    fn add_parts(&mut self, fused: FusedExperts, block: &str, name: &str, part: &Part) {
        for expert in 0..fused.experts {
            let name = format!("{block}{}.{expert}.{name}", fused.prefix);
            self.parts.insert(name, Part { expert, ..part.clone() });
        }
    }

    /// The type that a tensor of matrices `[n, k]` is seen with, and how these lie in it, where the shape tells.
    fn dtype_and_form(
        &self,
        tensor: &str,
        experts: usize,
        [n, k]: [usize; 2],
    ) -> Result<(Dtype, Option<Form>)> {
        let [codes, scales] = mxfp4::SUFFIXES.map(|suffix| format!("{tensor}{suffix}"));
        if self.source.info(&codes).is_some() {
            let blocks = k.div_ceil(mxfp4::BLOCK);
            for (name, shape) in
                [(codes, vec![experts, n, blocks, mxfp4::BLOCK / 2]), (scales, vec![experts, n, blocks])]
            {
                let info = self.source.require(&name)?;
                if info.shape != shape || blocks * mxfp4::BLOCK != k {
                    return Err(self.wrong_shape(&name, &shape)?);
                }
                if info.dtype != Dtype::U8 {
                    return Err(Error::TensorDtype {
                        path: self.source.location(&name),
                        tensor: name,
                        expected: "U8".into(),
                        got: info.dtype.to_string(),
                    });
                }
            }
            return Ok((Dtype::Bf16, Some(Form::Mxfp4)));
        }
        let info = self.source.require(tensor)?;
        require_weight_float(self.source.location(tensor), tensor, info.dtype)?;
        let form = match (info.shape == [experts, n, k], info.shape == [experts, k, n]) {
            (true, true) => None,
            (true, false) => Some(Form::Rows),
            (false, true) => Some(Form::Columns),
            (false, false) => return Err(self.wrong_shape(tensor, &[experts, n, k])?),
        };
        Ok((info.dtype, form))
    }

    fn wrong_shape(&self, tensor: &str, expected: &[usize]) -> Result<Error> {
        Ok(Error::TensorShape {
            path: self.source.location(tensor),
            tensor: tensor.to_owned(),
            expected: expected.to_vec(),
            got: self.source.require(tensor)?.shape.clone(),
        })
    }

    /// Some bytes of a tensor.
    fn bytes(&self, tensor: &str, range: Range<usize>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; range.len()];
        self.source.read_range(tensor, range.start as u64, &mut bytes)?;
        Ok(bytes)
    }

    /// Codes and scales of all rows of an expert in MXFP4.
    fn slabs(&self, part: &Part) -> Result<[Vec<u8>; 2]> {
        let slab = |suffix: &str, row: usize| {
            let tensor = format!("{}{suffix}", part.tensor);
            self.bytes(&tensor, part.expert * part.all * row..(part.expert + 1) * part.all * row)
        };
        let [codes, scales] = mxfp4::SUFFIXES;
        Ok([slab(codes, part.k / 2)?, slab(scales, part.k / mxfp4::BLOCK)?])
    }

    /// The bytes of a part.
    fn part(&self, name: &str, part: &Part) -> Result<Arc<Vec<u8>>> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, bytes)) = &*last
            && known == name
        {
            return Ok(bytes.clone());
        }
        *last = None;
        let &Part { form, expert, all, first, step, n, k, .. } = part;
        let outputs = (0..n).map(|i| first + i * step);
        let size = part.info.dtype.size();
        let mut out = Vec::with_capacity(n * k * size);
        match form {
            Form::Rows => {
                let row = k * size;
                let slab = self.bytes(&part.tensor, expert * all * row..(expert + 1) * all * row)?;
                outputs.for_each(|i| out.extend_from_slice(&slab[i * row..(i + 1) * row]));
            }
            Form::Columns => {
                let column = all * size;
                let slab = self.bytes(&part.tensor, expert * k * column..(expert + 1) * k * column)?;
                for i in outputs {
                    for input in 0..k {
                        let at = input * column + i * size;
                        out.extend_from_slice(&slab[at..at + size]);
                    }
                }
            }
            Form::Mxfp4 => {
                let (blocks, width) = (k / mxfp4::BLOCK, k / 2);
                let [codes, scales] = self.slabs(part)?;
                for i in outputs {
                    let codes = &codes[i * width..(i + 1) * width];
                    mxfp4::decode_row(codes, &scales[i * blocks..(i + 1) * blocks], &mut out);
                }
            }
        }
        let bytes = Arc::new(out);
        *last = Some((name.to_owned(), bytes.clone()));
        Ok(bytes)
    }
}

impl TensorSource for Split {
    fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.parts.keys().chain(&self.others).map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        match self.parts.get(name) {
            Some(part) => Some(&part.info),
            None => self.others.get(name).and_then(|name| self.source.info(name)),
        }
    }

    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let Some(part) = self.parts.get(name) else {
            return match self.others.contains(name) {
                true => self.source.read_range(name, offset, buffer),
                false => Err(Error::MissingTensor { path: self.location(name), tensor: name.to_owned() }),
            };
        };
        let leaves = || Error::Internal(format!("a range of tensor `{name}` that leaves it"));
        let end = offset.checked_add(buffer.len() as u64).filter(|end| *end <= part.info.byte_len());
        end.ok_or_else(leaves)?;
        if part.form == Form::Rows && part.step == 1 {
            let row = (part.k * part.info.dtype.size()) as u64;
            let begin = (part.expert * part.all + part.first) as u64 * row;
            return self.source.read_range(&part.tensor, begin + offset, buffer);
        }
        let bytes = self.part(name, part)?;
        let start = usize::try_from(offset).map_err(|_| leaves())?;
        let range = bytes.get(start..start + buffer.len()).ok_or_else(leaves)?;
        buffer.copy_from_slice(range);
        Ok(())
    }

    fn is_mxfp4(&self, name: &str) -> bool {
        self.parts.get(name).is_some_and(|part| part.form == Form::Mxfp4)
    }

    fn read_mxfp4(&self, name: &str) -> Result<Option<[Vec<u8>; 2]>> {
        let Some(part) = self.parts.get(name).filter(|part| part.form == Form::Mxfp4) else {
            return Ok(None);
        };
        let widths = [part.k / 2, part.k / mxfp4::BLOCK];
        let [codes, scales] = self.slabs(part)?;
        let rows = |slab: Vec<u8>, width: usize| -> Vec<u8> {
            let outputs = (0..part.n).map(|i| part.first + i * part.step);
            outputs.flat_map(|i| slab[i * width..(i + 1) * width].iter().copied()).collect()
        };
        Ok(Some([rows(codes, widths[0]), rows(scales, widths[1])]))
    }

    fn location(&self, name: &str) -> PathBuf {
        match self.parts.get(name) {
            Some(part) if part.form == Form::Mxfp4 => {
                self.source.location(&format!("{}{}", part.tensor, mxfp4::SUFFIXES[0]))
            }
            Some(part) => self.source.location(&part.tensor),
            None => self.source.location(name),
        }
    }
}

#[cfg(test)]
#[path = "fused_experts_tests.rs"]
mod tests;
