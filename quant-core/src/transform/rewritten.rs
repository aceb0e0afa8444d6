//! A model whose blocks are rewritten: its tensors are rewritten as they are read, so any writer can use it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::Rewrite;
use crate::blocks::BlockType;
use crate::checkpoint::{Dtype, TensorInfo, TensorSource};
use crate::model::Model;
use crate::{Error, Result};

/// Values that are converted at a time.
const CHUNK_VALUES: usize = 1 << 16;

/// The model with one rewrite per block applied: equal to the original in real arithmetic. Rewritten tensors are F32.
///
/// # Errors
/// [`Error::Internal`] when a rewrite clips ranges or reorders rows or columns; [`Error::MissingTensor`].
pub fn rewritten(model: &Model, rewrites: &[Rewrite]) -> Result<Model> {
    let (a, source) = (model.architecture(), model.source());
    let mut tensors = BTreeMap::new();
    for (layer, rewrite) in rewrites.iter().enumerate().take(a.layers) {
        if !rewrite.only_rescales() {
            return Err(Error::Internal("a model cannot be read with clipped or reordered weights".into()));
        }
        let graph = a.graph(layer);
        let mut add = |name: &str, parameter: &str, change: Change| -> Result<()> {
            let name = format!("{}.{parameter}", a.in_block(layer, name));
            let info = TensorInfo { dtype: Dtype::F32, shape: source.require(&name)?.shape.clone() };
            tensors.insert(name, RewrittenTensor { info, change });
            Ok(())
        };
        for (node, name, _) in graph.norms() {
            for (parameter, values) in [("weight", &rewrite.norms), ("bias", &rewrite.norm_biases)] {
                if let Some(values) = values.get(&node) {
                    add(name, parameter, Change::Values(values.clone()))?;
                }
            }
        }
        for (node, name, [_, k], has_bias) in graph.linears().filter(|(node, ..)| rewrite.changes(*node)) {
            let columns = rewrite.columns.get(&node).map(|factors| Arc::from(&factors[..]));
            let rows: Option<Arc<[f32]>> = rewrite.rows.get(&node).map(|divisors| Arc::from(&divisors[..]));
            if let (true, Some(rows)) = (has_bias, &rows) {
                add(name, "bias", Change::Scaled { width: 1, columns: None, rows: Some(rows.clone()) })?;
            }
            add(name, "weight", Change::Scaled { width: k, columns, rows })?;
        }
    }
    Ok(model.with_tensors(Arc::new(RewrittenSource { source: source.clone(), tensors })))
}

struct RewrittenSource {
    source: Arc<dyn TensorSource>,
    tensors: BTreeMap<String, RewrittenTensor>,
}

struct RewrittenTensor {
    info: TensorInfo,
    change: Change,
}

enum Change {
    Values(Vec<f32>),
    /// Columns are multiplied by factors, and rows of `width` values are divided by divisors.
    Scaled {
        width: usize,
        columns: Option<Arc<[f32]>>,
        rows: Option<Arc<[f32]>>,
    },
}

impl Change {
    /// Changes the stored values from index `first` on.
    fn apply(&self, first: usize, values: &mut [f32]) {
        match self {
            Self::Values(new) => values.copy_from_slice(&new[first..][..values.len()]),
            Self::Scaled { width, columns, rows } => {
                let (mut at, mut rest) = (first, values);
                while !rest.is_empty() {
                    let (row, column) = (at / width, at % width);
                    let (part, later) = rest.split_at_mut((width - column).min(rest.len()));
                    at += part.len();
                    if let Some(factors) = columns {
                        part.iter_mut().zip(&factors[column..]).for_each(|(w, f)| *w *= f);
                    }
                    if let Some(divisors) = rows {
                        part.iter_mut().for_each(|w| *w /= divisors[row]);
                    }
                    rest = later;
                }
            }
        }
    }
}

impl TensorSource for RewrittenSource {
    fn names(&self) -> Vec<&str> {
        self.source.names()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|tensor| &tensor.info).or_else(|| self.source.info(name))
    }

    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let Some(tensor) = self.tensors.get(name) else {
            return self.source.read_range(name, offset, buffer);
        };
        let past =
            || Error::Internal(format!("{} bytes at {offset} are beyond the end of `{name}`", buffer.len()));
        let size = Dtype::F32.size();
        let end = offset.checked_add(buffer.len() as u64).filter(|end| *end <= tensor.info.byte_len());
        let (start, end) = (offset as usize, end.ok_or_else(past)? as usize);
        let stored = self.source.require(name)?.dtype;
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        let mut written = start;
        for first in (start / size..end.div_ceil(size)).step_by(CHUNK_VALUES) {
            let last = (first + CHUNK_VALUES).min(end.div_ceil(size));
            values.resize(last - first, 0.0);
            bytes.resize((last - first) * stored.size(), 0);
            if let Change::Scaled { .. } = tensor.change {
                self.source.read_range(name, (first * stored.size()) as u64, &mut bytes)?;
                stored.widen(&bytes, &mut values);
            }
            tensor.change.apply(first, &mut values);
            let narrowed = Dtype::F32.narrow(&values);
            let part = &narrowed[written - first * size..(end - first * size).min(narrowed.len())];
            buffer[written - start..][..part.len()].copy_from_slice(part);
            written += part.len();
        }
        Ok(())
    }

    fn location(&self, name: &str) -> PathBuf {
        self.source.location(name)
    }

    fn block_type(&self, name: &str) -> Option<&'static BlockType> {
        self.source.block_type(name).filter(|_| !self.tensors.contains_key(name))
    }

    fn read_blocks(&self, name: &str) -> Result<Option<Vec<u8>>> {
        if self.tensors.contains_key(name) { Ok(None) } else { self.source.read_blocks(name) }
    }

    fn is_mxfp4(&self, name: &str) -> bool {
        !self.tensors.contains_key(name) && self.source.is_mxfp4(name)
    }

    fn read_mxfp4(&self, name: &str) -> Result<Option<[Vec<u8>; 2]>> {
        if self.tensors.contains_key(name) { Ok(None) } else { self.source.read_mxfp4(name) }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    const NAMES: [&str; 2] = ["w.weight", "norm.weight"];

    /// A matrix of F16 and a vector.
    struct Stored(TensorInfo);

    impl TensorSource for Stored {
        fn names(&self) -> Vec<&str> {
            NAMES.to_vec()
        }

        fn info(&self, name: &str) -> Option<&TensorInfo> {
            NAMES.contains(&name).then_some(&self.0)
        }

        fn read_range(&self, _: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
            let all: Vec<u8> =
                (0..self.0.elements()).flat_map(|i| f16::from_f32((i % 97) as f32).to_le_bytes()).collect();
            buffer.copy_from_slice(&all[offset as usize..][..buffer.len()]);
            Ok(())
        }

        fn location(&self, _: &str) -> PathBuf {
            PathBuf::new()
        }
    }

    #[test]
    fn any_range_of_a_rewritten_tensor_can_be_read() {
        let [n, k] = [400, 333];
        let factors: Vec<f32> = (0..k).map(|c| 0.5 + c as f32).collect();
        let divisors: Vec<f32> = (0..n).map(|r| 1.0 + r as f32 * 0.25).collect();
        let shape = vec![n, k];
        let info = TensorInfo { dtype: Dtype::F32, shape: shape.clone() };
        let change = Change::Scaled {
            width: k,
            columns: Some(Arc::from(&factors[..])),
            rows: Some(Arc::from(&divisors[..])),
        };
        let tensors = [("w.weight".to_owned(), RewrittenTensor { info, change })].into();
        let source =
            RewrittenSource { source: Arc::new(Stored(TensorInfo { dtype: Dtype::F16, shape })), tensors };
        let expected: Vec<u8> = (0..n * k)
            .flat_map(|i| ((i % 97) as f32 * factors[i % k] / divisors[i / k]).to_le_bytes())
            .collect();
        assert_eq!(source.read("w.weight").unwrap(), expected);
        for range in [0..4, 3..9, 4 * k - 1..4 * k + 5, 4 * CHUNK_VALUES - 3..4 * CHUNK_VALUES + 2, 7..7] {
            let mut bytes = vec![0; range.len()];
            source.read_range("w.weight", range.start as u64, &mut bytes).unwrap();
            assert_eq!(bytes, expected[range.clone()], "{range:?}");
        }
        let mut bytes = [0; 8];
        assert!(source.read_range("w.weight", expected.len() as u64 - 4, &mut bytes).is_err());
        assert_eq!(source.info("norm.weight").unwrap().dtype, Dtype::F16);
        assert_eq!(source.read("norm.weight").unwrap().len(), 2 * n * k);
    }
}
