//! Transposed views of float weights that a family stores as `[in, out]`, so that all weights appear as `[out, in]`.
//!
//! Codes, scales and zero points have one row per output in every format, because engines load them into ordinary
//! linear modules. Weights that stay float are transposed back on writing.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::Architecture;
use crate::checkpoint::{Dtype, TensorInfo, TensorSource};
use crate::{Error, Result, allocate};

pub(super) fn by_rows(source: Arc<dyn TensorSource>, architecture: &Architecture) -> Arc<dyn TensorSource> {
    if architecture.stored_by_columns.is_empty() {
        return source;
    }
    let is_transposed = |name: &&str| {
        let info = source.info(name).filter(|info| info.dtype.is_weight_float() && info.shape.len() == 2);
        info.is_some() && architecture.is_stored_by_columns(name)
    };
    let other = source.names().into_iter().filter(is_transposed).map(|name| {
        let mut info =
            source.info(name).cloned().unwrap_or_else(|| TensorInfo { dtype: Dtype::F32, shape: vec![] });
        info.shape.reverse();
        (name.to_owned(), info)
    });
    let other = other.collect();
    Arc::new(ByRows { source, other, last: Mutex::default() })
}

/// Transposes a `[rows, columns]` matrix of values of `size` bytes each.
///
/// # Errors
/// [`Error::Memory`].
pub(crate) fn transposed(bytes: &[u8], [rows, columns]: [usize; 2], size: usize) -> Result<Vec<u8>> {
    let mut out = allocate::room(bytes.len(), "a transposed tensor")?;
    for column in 0..columns {
        for row in 0..rows {
            let at = (row * columns + column) * size;
            out.extend_from_slice(&bytes[at..at + size]);
        }
    }
    Ok(out)
}

struct ByRows {
    source: Arc<dyn TensorSource>,
    other: std::collections::BTreeMap<String, TensorInfo>,
    /// The last tensor read, which is kept because tensors are read in pieces.
    last: Mutex<Option<(String, Arc<Vec<u8>>)>>,
}

impl ByRows {
    fn whole(&self, name: &str, info: &TensorInfo) -> Result<Arc<Vec<u8>>> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, bytes)) = &*last
            && known == name
        {
            return Ok(bytes.clone());
        }
        *last = None;
        let bytes = self.source.read(name)?;
        let &[rows, columns] = &info.shape[..] else {
            return Err(Error::Internal(format!("`{name}` is not a matrix")));
        };
        let bytes = Arc::new(transposed(&bytes, [columns, rows], info.dtype.size())?);
        *last = Some((name.to_owned(), bytes.clone()));
        Ok(bytes)
    }
}

impl TensorSource for ByRows {
    fn names(&self) -> Vec<&str> {
        self.source.names()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.other.get(name).or_else(|| self.source.info(name))
    }

    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let Some(info) = self.other.get(name) else { return self.source.read_range(name, offset, buffer) };
        let bytes = self.whole(name, info)?;
        let start = usize::try_from(offset).ok();
        let part = start.and_then(|start| bytes.get(start..start.checked_add(buffer.len())?));
        buffer.copy_from_slice(part.ok_or_else(|| {
            Error::Internal(format!("a range exceeds the {} bytes of tensor `{name}`", bytes.len()))
        })?);
        Ok(())
    }

    fn location(&self, name: &str) -> PathBuf {
        self.source.location(name)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::checkpoint::{ConfigFields, MemorySource};
    use crate::model::arch;

    #[test]
    fn float_weights_of_the_named_linears_are_seen_by_rows() {
        let config = json!({ "architectures": ["GPT2LMHeadModel"], "n_embd": 4, "n_head": 2, "n_layer": 1,
                             "vocab_size": 3 });
        let config = ConfigFields::new(Path::new("config.json"), config.as_object().unwrap());
        let architecture = arch::describe(&config, &MemorySource::new()).unwrap();
        let mut source = MemorySource::new();
        let values: Vec<f32> = (0..6).map(|i| i as f32).collect();
        let (fc, wte) = ("transformer.h.0.mlp.c_fc.weight", "transformer.wte.weight");
        for name in [fc, wte, "transformer.h.0.mlp.c_fc.other"] {
            source.insert_f32(name, Dtype::F32, vec![2, 3], &values).unwrap();
        }
        source.insert("transformer.h.0.attn.c_proj.weight", Dtype::I8, vec![2, 3], vec![0; 6]).unwrap();
        let seen = by_rows(Arc::new(source), &architecture);
        assert_eq!(seen.require(fc).unwrap().shape, [3, 2]);
        assert_eq!(seen.read_f32(fc).unwrap(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        let mut piece = [0; 8];
        seen.read_range(fc, 8, &mut piece).unwrap();
        assert_eq!([&piece[..4], &piece[4..]], [&1.0_f32.to_le_bytes()[..], &4.0_f32.to_le_bytes()]);
        assert!(seen.read_range(fc, 20, &mut piece).is_err());
        assert_eq!(seen.read_f32(wte).unwrap(), values);
        for name in ["transformer.h.0.mlp.c_fc.other", "transformer.h.0.attn.c_proj.weight"] {
            assert_eq!(seen.require(name).unwrap().shape, [2, 3], "{name}");
        }
        let back = transposed(&seen.read(fc).unwrap(), [3, 2], 4).unwrap();
        assert_eq!(back, Dtype::F32.narrow(&values));
    }
}
