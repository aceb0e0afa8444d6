//! The experts of gpt-oss as linears of their own, for engines: a view of the stored tensors, which hold all experts of
//! a layer.
//!
//! | stored | in the view |
//! |---|---|
//! | `P.gate_up_proj`, whose outputs alternate between gate and up | `P.E.gate_proj` and `P.E.up_proj` for each expert `E` |
//! | any other `P.NAME`, such as `P.down_proj` | `P.E.NAME` |
//!
//! Codes and scales keep their suffixes, `_blocks` and `_scales`. A stored `P.NAME_bias` `[experts, n]` becomes the bias
//! of each linear, `P.E.NAME.bias`.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use super::{BLOCK, SCHEME, SUFFIXES, unpacked};
use crate::checkpoint::{Dtype, TensorInfo, TensorSource, TensorSpec};
use crate::format::{PackedReader, PackedWeight};
use crate::quantize::QuantizedTensor;
use crate::scheme::LinearScheme;
use crate::{Error, Result, allocate};

/// Bytes of codes per block.
const WIDTH: usize = BLOCK / 2;
/// A limit on the experts of a layer, since each takes several entries of the view.
const MAX_EXPERTS: usize = 4096;

/// Some rows of a stored tensor.
#[derive(Debug)]
struct Part {
    info: TensorInfo,
    tensor: String,
    /// The first row, counted over all experts, and the distance between rows.
    first: usize,
    step: usize,
    row_bytes: usize,
}

/// The view.
pub(in crate::format) struct Experts {
    source: Arc<dyn TensorSource>,
    parts: BTreeMap<String, Part>,
    /// Tensors of the source that are shown as they are.
    others: BTreeSet<String>,
}

impl Experts {
    /// Checks dtypes and shapes.
    ///
    /// # Errors
    /// [`Error::UnsupportedQuantization`] for codes that are not of several experts; otherwise when tensors are missing,
    /// or their dtypes or shapes do not match.
    pub(in crate::format) fn new(source: Arc<dyn TensorSource>) -> Result<Self> {
        let others: BTreeSet<String> = source.names().into_iter().map(str::to_owned).collect();
        let fused: Vec<String> =
            others.iter().filter_map(|name| name.strip_suffix(SUFFIXES[0])).map(str::to_owned).collect();
        let mut view = Self { source, parts: BTreeMap::new(), others };
        fused.iter().try_for_each(|tensor| view.split(tensor))?;
        match view.parts.keys().find(|name| view.others.contains(*name)) {
            Some(name) => Err(Error::AmbiguousNames {
                path: view.source.location(name),
                one: view.parts[name].tensor.clone(),
                other: name.clone(),
            }),
            None => Ok(view),
        }
    }

    fn split(&mut self, tensor: &str) -> Result<()> {
        let [codes, scales] = SUFFIXES.map(|suffix| format!("{tensor}{suffix}"));
        let shape = self.source.require(&codes)?.shape.clone();
        let unsupported =
            |reason: String| Error::UnsupportedQuantization { path: self.source.location(&codes), reason };
        let [experts, n, blocks, WIDTH] = shape[..] else {
            return Err(unsupported(format!(
                "tensor `{codes}` has the shape {shape:?}; MXFP4 codes of experts have [experts, outputs, inputs / \
                 {BLOCK}, {WIDTH}]"
            )));
        };
        // A tensor without elements can have any number of experts.
        if n == 0 || blocks == 0 || !(1..=MAX_EXPERTS).contains(&experts) {
            return Err(unsupported(format!(
                "tensor `{codes}` has the shape {shape:?}; 1 to {MAX_EXPERTS} experts are supported, of at least one \
                 output and one block"
            )));
        }
        self.require(&codes, &[experts, n, blocks, WIDTH], Some(Dtype::U8))?;
        self.require(&scales, &[experts, n, blocks], Some(Dtype::U8))?;
        let bias = format!("{tensor}_bias");
        let bias = self.others.contains(&bias).then_some(bias);
        let bias_dtype = bias.as_deref().map(|bias| self.require(bias, &[experts, n], None)).transpose()?;

        let (prefix, name) = tensor.split_at(tensor.rfind('.').map_or(0, |dot| dot + 1));
        let linears: &[&str] = match name {
            "gate_up_proj" if n % 2 == 0 => &["gate_proj", "up_proj"],
            _ => &[name],
        };
        let step = linears.len();
        for (expert, (i, linear)) in
            (0..experts).flat_map(|expert| linears.iter().enumerate().map(move |l| (expert, l)))
        {
            let module = format!("{prefix}{expert}.{linear}");
            let mut add = |name: String, tensor: &str, dtype: Dtype, shape: Vec<usize>| {
                let row_bytes = shape.get(1).copied().unwrap_or(1) * dtype.size();
                let (info, tensor) = (TensorInfo { dtype, shape }, tensor.to_owned());
                let part = Part { info, tensor, first: expert * n + i, step, row_bytes };
                match self.parts.entry(name) {
                    Entry::Vacant(free) => {
                        free.insert(part);
                        Ok(())
                    }
                    Entry::Occupied(taken) => Err(Error::AmbiguousNames {
                        path: self.source.location(&part.tensor),
                        one: taken.get().tensor.clone(),
                        other: part.tensor,
                    }),
                }
            };
            add(format!("{module}{}", SUFFIXES[0]), &codes, Dtype::U8, vec![n / step, blocks * WIDTH])?;
            add(format!("{module}{}", SUFFIXES[1]), &scales, Dtype::U8, vec![n / step, blocks])?;
            if let (Some(bias), Some(dtype)) = (&bias, bias_dtype) {
                add(format!("{module}.bias"), bias, dtype, vec![n / step])?;
            }
        }
        for hidden in [Some(codes), Some(scales), bias].into_iter().flatten() {
            self.others.remove(&hidden);
        }
        Ok(())
    }

    fn require(&self, tensor: &str, expected: &[usize], dtype: Option<Dtype>) -> Result<Dtype> {
        let (info, path) = (self.source.require(tensor)?, self.source.location(tensor));
        if info.shape != expected {
            let (expected, got) = (expected.to_vec(), info.shape.clone());
            return Err(Error::TensorShape { path, tensor: tensor.to_owned(), expected, got });
        }
        if let Some(expected) = dtype.filter(|dtype| *dtype != info.dtype) {
            let (expected, got) = (expected.to_string(), info.dtype.to_string());
            return Err(Error::TensorDtype { path, tensor: tensor.to_owned(), expected, got });
        }
        Ok(info.dtype)
    }
}

impl TensorSource for Experts {
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
        let end = end.and_then(|end| usize::try_from(end).ok()).ok_or_else(leaves)?;
        let start = end - buffer.len();
        let &Part { first, step, row_bytes, .. } = part;
        if step == 1 {
            return self.source.read_range(&part.tensor, (first * row_bytes + start) as u64, buffer);
        }
        if buffer.is_empty() {
            return Ok(());
        }
        let rows = start / row_bytes..end.div_ceil(row_bytes);
        let between = step * row_bytes;
        let mut stored = allocate::zeros((rows.len() - 1) * between + row_bytes, "the rows of an expert")?;
        self.source.read_range(
            &part.tensor,
            ((first + rows.start * step) * row_bytes) as u64,
            &mut stored,
        )?;
        for (i, row) in stored.chunks(between).enumerate() {
            // The part of this row that was asked for, in the view.
            let at = (rows.start + i) * row_bytes;
            let wanted = start.max(at)..end.min(at + row_bytes);
            buffer[wanted.start - start..wanted.end - start]
                .copy_from_slice(&row[wanted.start - at..wanted.end - at]);
        }
        Ok(())
    }

    fn location(&self, name: &str) -> PathBuf {
        self.source.location(self.parts.get(name).map_or(name, |part| &part.tensor))
    }
}

/// Reads the linears of the view.
#[derive(Debug, Clone, Copy)]
pub(in crate::format) struct ExpertReader;

impl PackedReader for ExpertReader {
    fn code_suffixes(&self) -> &'static [&'static str] {
        const { &[SUFFIXES[0]] }
    }

    fn parameter_suffixes(&self) -> &'static [&'static str] {
        const { &[SUFFIXES[1]] }
    }

    fn scheme(&self, _module: &str) -> Option<LinearScheme> {
        Some(SCHEME)
    }

    fn scale_dtype(&self, _source: &dyn TensorSource, _module: &str) -> Result<Dtype> {
        Ok(Dtype::F8E8M0)
    }

    fn shape(&self, source: &dyn TensorSource, module: &str) -> Result<Option<[usize; 2]>> {
        let info = source.info(&format!("{module}{}", SUFFIXES[0]));
        Ok(info
            .and_then(|info| <[usize; 2]>::try_from(&info.shape[..]).ok())
            .map(|[n, bytes]| [n, 2 * bytes]))
    }

    fn tensors(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Vec<TensorSpec>> {
        let names = SUFFIXES.map(|suffix| format!("{}{suffix}", weight.module));
        names.into_iter().map(|name| Ok(TensorSpec { info: source.require(&name)?.clone(), name })).collect()
    }

    fn zeros(&self, _source: &dyn TensorSource, _weight: PackedWeight<'_>) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn read(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<QuantizedTensor> {
        let [codes, scales] = SUFFIXES.map(|suffix| format!("{}{suffix}", weight.module));
        let stored = [source.read(&codes)?, source.read(&scales)?];
        unpacked(weight.shape, [&stored[0], &stored[1]], (source.location(&scales), &scales))
    }
}

#[cfg(test)]
mod tests {
    use quant_kernels_cpu::e8m0_value;
    use serde_json::json;

    use super::*;
    use crate::checkpoint::MemorySource;
    use crate::format::QuantizedCheckpoint;
    use crate::scheme::FloatFormat;

    const LAYER: &str = "model.layers.0.mlp.experts.";
    const EXPERTS: usize = 3;
    const HIDDEN: usize = 64;
    const INNER: usize = 32;

    fn bytes(count: usize, seed: usize, range: usize) -> Vec<u8> {
        (0..count).map(|i| ((i * 7 + seed) * 31 % range) as u8).collect()
    }

    fn add(source: &mut MemorySource, name: &str, [n, k]: [usize; 2]) {
        let blocks = k / BLOCK;
        let name = format!("{LAYER}{name}");
        let codes = bytes(EXPERTS * n * k / 2, n, 251);
        source.insert(format!("{name}_blocks"), Dtype::U8, vec![EXPERTS, n, blocks, WIDTH], codes).unwrap();
        let scales = bytes(EXPERTS * n * blocks, k, 11).into_iter().map(|scale| 120 + scale).collect();
        source.insert(format!("{name}_scales"), Dtype::U8, vec![EXPERTS, n, blocks], scales).unwrap();
        let bias = (0..EXPERTS * n).flat_map(|i| (i as f32).to_le_bytes()).collect();
        source.insert(format!("{name}_bias"), Dtype::F32, vec![EXPERTS, n], bias).unwrap();
    }

    fn source() -> MemorySource {
        let mut source = MemorySource::new();
        add(&mut source, "gate_up_proj", [2 * INNER, HIDDEN]);
        add(&mut source, "down_proj", [HIDDEN, INNER]);
        source.insert("model.norm.weight", Dtype::F32, vec![1], 2.0_f32.to_le_bytes().to_vec()).unwrap();
        source
    }

    fn opened(source: MemorySource) -> Result<QuantizedCheckpoint> {
        QuantizedCheckpoint::new(
            Arc::new(source),
            "config.json".as_ref(),
            &json!({ "quant_method": "mxfp4" }),
        )
    }

    /// The row of a stored tensor, decoded by hand.
    fn row(source: &MemorySource, name: &str, row: usize, k: usize) -> Vec<f32> {
        let [codes, scales] = SUFFIXES.map(|suffix| source.read(&format!("{LAYER}{name}{suffix}")).unwrap());
        let value = |i: usize| {
            let (at, shift) = ((row * k + i) / 2, 4 * (i % 2));
            let scale = e8m0_value(scales[(row * k + i) / BLOCK]);
            FloatFormat::E2m1.value((codes[at] >> shift) & 15) * scale
        };
        (0..k).map(value).collect()
    }

    #[test]
    fn experts_are_linears() {
        let (checkpoint, stored) = (opened(source()).unwrap(), source());
        assert_eq!(checkpoint.warnings(), [""; 0]);
        assert_eq!(checkpoint.linears().len(), 3 * EXPERTS);
        for expert in 0..EXPERTS {
            for (linear, tensor, [n, k], [all, first, step]) in [
                ("gate_proj", "gate_up_proj", [INNER, HIDDEN], [2 * INNER, 0, 2]),
                ("up_proj", "gate_up_proj", [INNER, HIDDEN], [2 * INNER, 1, 2]),
                ("down_proj", "down_proj", [HIDDEN, INNER], [HIDDEN, 0, 1]),
            ] {
                let name = format!("{LAYER}{expert}.{linear}");
                assert_eq!(checkpoint.linear(&name).unwrap().shape, [n, k]);
                let values = checkpoint.read(&name).unwrap().dequantize().unwrap();
                let bias = checkpoint.bias(&name).unwrap().unwrap();
                for (output, values) in values.chunks_exact(k).enumerate() {
                    let at = expert * all + first + step * output;
                    assert_eq!(values, row(&stored, tensor, at, k), "{name}, output {output}");
                    assert_eq!(bias[output], at as f32);
                }
                let some = checkpoint.read_rows(&name, 8..16).unwrap().dequantize().unwrap();
                assert_eq!(some, values[8 * k..16 * k]);
            }
        }
        // Any range of bytes, also within a row.
        let name = format!("{LAYER}1.up_proj_blocks");
        let whole = checkpoint.source().read(&name).unwrap();
        for range in [0..1, 5..70, 31..32, 100..whole.len(), 3..3] {
            let mut part = vec![0; range.len()];
            checkpoint.source().read_range(&name, range.start as u64, &mut part).unwrap();
            assert_eq!(part, whole[range]);
        }
        assert_eq!(checkpoint.source().read_f32("model.norm.weight").unwrap(), [2.0]);
        assert!(checkpoint.source().info(&format!("{LAYER}gate_up_proj_blocks")).is_none());
        let missing = checkpoint.read(&format!("{LAYER}0.gate_up_proj")).unwrap_err();
        assert!(
            missing.remedy().to_string().contains(&format!("{LAYER}0.gate_proj")),
            "{}",
            missing.remedy()
        );
    }

    #[test]
    fn damaged_experts_are_refused() {
        let refused = |name: &str, shape: &[usize], expected: &str| {
            let mut changed = MemorySource::new();
            let all = source();
            for tensor in all.names().into_iter().filter(|tensor| !tensor.ends_with(name)) {
                let info = all.info(tensor).unwrap();
                changed.insert(tensor, info.dtype, info.shape.clone(), all.read(tensor).unwrap()).unwrap();
            }
            if !shape.is_empty() {
                let name = format!("{LAYER}{name}");
                changed.insert(&name, Dtype::U8, shape.to_vec(), vec![255; shape.iter().product()]).unwrap();
            }
            let error =
                opened(changed).and_then(|opened| opened.read(&format!("{LAYER}2.down_proj"))).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        };
        refused("down_proj_scales", &[], "down_proj_scales");
        refused("down_proj_blocks", &[], "down_proj_blocks");
        refused("down_proj_scales", &[EXPERTS, HIDDEN, 2], "down_proj_scales");
        refused("down_proj_blocks", &[HIDDEN, 1, 16], "[experts, outputs, inputs / 32, 16]");
        refused("down_proj_blocks", &[1 << 40, 0, 1, 16], "1 to 4096 experts");
        refused("down_proj_blocks", &[EXPERTS, HIDDEN, 0, 16], "1 to 4096 experts");
        refused("down_proj_blocks", &[4097, 1, 1, 16], "1 to 4096 experts");
        // A scale of NaN.
        refused("down_proj_scales", &[EXPERTS, HIDDEN, 1], "down_proj_scales");
    }

    #[test]
    fn a_gate_that_is_stored_twice_is_refused() {
        let mut twice = source();
        for (suffix, shape) in SUFFIXES.into_iter().zip([vec![EXPERTS, 1, 1, WIDTH], vec![EXPERTS, 1, 1]]) {
            let bytes = vec![0; shape.iter().product()];
            twice.insert(format!("{LAYER}gate_proj{suffix}"), Dtype::U8, shape, bytes).unwrap();
        }
        let Err(Error::AmbiguousNames { one, other, .. }) = opened(twice) else { panic!("accepted") };
        assert!(one.contains("gate_") && other.contains("gate_") && one != other, "{one} {other}");
    }
}
