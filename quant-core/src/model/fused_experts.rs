//! A view of fused expert tensors as single experts. Later stages see each expert's gate, up and down under separate
//! names, as most families store them, and the output uses these names.
//!
//! Contiguous rows are read from the file by range. For other layouts, the part of the tensor that holds one expert
//! (its slab) is read whole and kept until another slab is needed. An expert's gate and up are read consecutively from
//! the same slab.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::Architecture;
use super::arch::FusedExperts;
use crate::checkpoint::{Dtype, TensorInfo, TensorSource, require_weight_float};
use crate::format::mxfp4;
use crate::{Error, Result, allocate};

pub(super) fn split(
    source: Arc<dyn TensorSource>,
    architecture: &Architecture,
) -> Result<Arc<dyn TensorSource>> {
    let Some(fused) = architecture.fused_experts else { return Ok(source) };
    let mut view =
        Split { source, parts: BTreeMap::new(), others: BTreeSet::new(), last: Default::default() };
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

/// How a tensor lays out the matrix `[n, k]` of each expert, or the fused matrix of two linears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Rows are outputs.
    Rows,
    /// Columns are outputs.
    Columns,
    /// Rows are outputs, with codes and scales in separate tensors.
    Mxfp4,
}

/// A weight or a bias as a part of a fused tensor.
#[derive(Debug, Clone)]
struct Part {
    info: TensorInfo,
    /// The name of the fused tensor; for MXFP4 without the suffix of codes or scales.
    tensor: String,
    form: Form,
    expert: usize,
    /// Number of outputs per expert in the fused tensor. This part consists of every `step`th output, starting with
    /// `first`.
    all: usize,
    first: usize,
    step: usize,
    /// Inputs; 1 for a bias.
    k: usize,
}

struct Split {
    source: Arc<dyn TensorSource>,
    parts: BTreeMap<String, Part>,
    others: BTreeSet<String>,
    /// The last slab read for a weight, and the last one for a bias.
    last: [Mutex<Option<Arc<Slab>>>; 2],
}

/// The stored part of a tensor that holds one expert.
struct Slab {
    tensor: String,
    expert: usize,
    /// Values, or MXFP4 codes.
    bytes: Vec<u8>,
    /// Scales of MXFP4 codes.
    scales: Vec<u8>,
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
        // At most one of the two matrices can be square, so the other one determines the layout of both.
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

    fn add_parts(&mut self, fused: FusedExperts, block: &str, name: &str, part: &Part) {
        for expert in 0..fused.experts {
            let name = format!("{block}{}.{expert}.{name}", fused.prefix);
            self.parts.insert(name, Part { expert, ..part.clone() });
        }
    }

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

    fn bytes(&self, tensor: &str, range: Range<usize>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; range.len()];
        self.source.read_range(tensor, range.start as u64, &mut bytes)?;
        Ok(bytes)
    }

    fn slab(&self, part: &Part) -> Result<Arc<Slab>> {
        let last = &self.last[usize::from(part.info.shape.len() == 1)];
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slab) = &*last
            && (slab.tensor.as_str(), slab.expert) == (&part.tensor, part.expert)
        {
            return Ok(slab.clone());
        }
        // Drop the previous slab first, so that only one is in memory.
        *last = None;
        let &Part { form, expert, all, k, .. } = part;
        let read = |tensor: &str, size: usize| self.bytes(tensor, expert * size..(expert + 1) * size);
        let [bytes, scales] = match form {
            Form::Rows | Form::Columns => [read(&part.tensor, all * k * part.info.dtype.size())?, Vec::new()],
            Form::Mxfp4 => {
                let [codes, scales] = mxfp4::SUFFIXES.map(|suffix| format!("{}{suffix}", part.tensor));
                [read(&codes, all * k / 2)?, read(&scales, all * (k / mxfp4::BLOCK))?]
            }
        };
        let slab = Arc::new(Slab { tensor: part.tensor.clone(), expert, bytes, scales });
        *last = Some(slab.clone());
        Ok(slab)
    }
}

impl Part {
    /// Appends the `k` weights of one output, as bytes.
    fn append_row(&self, slab: &Slab, output: usize, out: &mut Vec<u8>) {
        let &Self { form, all, first, step, k, .. } = self;
        let (row, size) = (first + output * step, self.info.dtype.size());
        match form {
            Form::Rows => out.extend_from_slice(&slab.bytes[row * k * size..(row + 1) * k * size]),
            Form::Columns => {
                for input in 0..k {
                    let at = (input * all + row) * size;
                    out.extend_from_slice(&slab.bytes[at..at + size]);
                }
            }
            Form::Mxfp4 => {
                let (blocks, width) = (k / mxfp4::BLOCK, k / 2);
                let codes = &slab.bytes[row * width..(row + 1) * width];
                mxfp4::decode_row(codes, &slab.scales[row * blocks..(row + 1) * blocks], out);
            }
        }
    }

    fn gather(&self, slab: &Slab, range: Range<usize>) -> Result<Vec<u8>> {
        let row_bytes = self.k * self.info.dtype.size();
        let rows = range.start / row_bytes..range.end.div_ceil(row_bytes);
        let start = rows.start * row_bytes;
        let mut out = allocate::room(rows.len() * row_bytes, "the rows of an expert")?;
        rows.for_each(|output| self.append_row(slab, output, &mut out));
        out.truncate(range.end - start);
        out.drain(..range.start - start);
        Ok(out)
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
        let leaves = || Error::Internal(format!("a range exceeds tensor `{name}`"));
        let end = offset.checked_add(buffer.len() as u64).filter(|end| *end <= part.info.byte_len());
        end.ok_or_else(leaves)?;
        if part.form == Form::Rows && part.step == 1 {
            let row = (part.k * part.info.dtype.size()) as u64;
            let begin = (part.expert * part.all + part.first) as u64 * row;
            return self.source.read_range(&part.tensor, begin + offset, buffer);
        }
        if buffer.is_empty() {
            return Ok(());
        }
        let start = usize::try_from(offset).map_err(|_| leaves())?;
        let slab = self.slab(part)?;
        buffer.copy_from_slice(&part.gather(&slab, start..start + buffer.len())?);
        Ok(())
    }

    fn is_mxfp4(&self, name: &str) -> bool {
        self.parts.get(name).is_some_and(|part| part.form == Form::Mxfp4)
    }

    fn read_mxfp4(&self, name: &str) -> Result<Option<[Vec<u8>; 2]>> {
        let Some(part) = self.parts.get(name).filter(|part| part.form == Form::Mxfp4) else {
            return Ok(None);
        };
        let slab = self.slab(part)?;
        let outputs = part.info.shape.first().copied().unwrap_or_default();
        let rows = |slab: &[u8], width: usize| -> Vec<u8> {
            let rows = (0..outputs).map(|output| part.first + output * part.step);
            rows.flat_map(|row| slab[row * width..(row + 1) * width].iter().copied()).collect()
        };
        Ok(Some([rows(&slab.bytes, part.k / 2), rows(&slab.scales, part.k / mxfp4::BLOCK)]))
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
