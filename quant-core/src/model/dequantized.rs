//! A float view of a quantized checkpoint: the dequantized values, under the names of float weights.
//!
//! Quantized linears appear as F32 weights with exactly their dequantized values. Tensors that are meaningless without
//! the quantized ones are hidden. A weight is dequantized when it is read. The last one is kept, because weights are
//! read in pieces.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::Model;
use crate::checkpoint::{Dtype, TensorInfo, TensorSource};
use crate::{Error, Result};

/// Names, within a module, of auxiliary tensors of quantized weights, inputs, keys and values.
const QUANTIZATION_SUFFIXES: [&str; 12] = [
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "qscale_act",
    "k_scale",
    "v_scale",
    "q_scale",
    "k_zero_point",
    "v_zero_point",
    "weight_zero_point",
];

pub(super) struct Dequantized {
    model: Model,
    tensors: BTreeMap<String, TensorInfo>,
    /// The modules of dequantized weights, by weight name.
    modules: BTreeMap<String, (String, [usize; 2])>,
    last: Mutex<Option<(String, Arc<Vec<u8>>)>>,
}

impl Dequantized {
    pub(super) fn new(model: Model) -> Result<Self> {
        let (mut modules, mut hidden) = (BTreeMap::new(), std::collections::BTreeSet::new());
        for (_, module, shape) in model.weight_modules() {
            if model.module_scheme(&module).is_none() {
                continue;
            }
            hidden.extend(model.packed_tensors(&module, shape)?.into_iter().map(|spec| spec.name));
            modules.insert(format!("{module}.weight"), (module, shape));
        }
        let is_quantization =
            |name: &str| name.rsplit_once('.').is_some_and(|(_, last)| QUANTIZATION_SUFFIXES.contains(&last));
        let source = model.source();
        let mut tensors = BTreeMap::new();
        for name in source.names() {
            if !hidden.contains(name) && !is_quantization(name) {
                tensors.insert(name.to_owned(), source.require(name)?.clone());
            }
        }
        for (name, (_, shape)) in &modules {
            tensors.insert(name.clone(), TensorInfo { dtype: Dtype::F32, shape: shape.to_vec() });
        }
        Ok(Self { model, tensors, modules, last: Mutex::new(None) })
    }

    fn weight(&self, name: &str, module: &str, shape: [usize; 2]) -> Result<Arc<Vec<u8>>> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, bytes)) = &*last
            && known == name
        {
            return Ok(bytes.clone());
        }
        *last = None;
        let values = self.model.packed(module, shape)?.dequantize()?;
        let bytes = Arc::new(Dtype::F32.narrow(&values));
        *last = Some((name.to_owned(), bytes.clone()));
        Ok(bytes)
    }
}

impl TensorSource for Dequantized {
    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let Some((module, shape)) = self.modules.get(name) else {
            return match self.tensors.contains_key(name) {
                true => self.model.source().read_range(name, offset, buffer),
                false => Err(Error::MissingTensor { path: self.location(name), tensor: name.to_owned() }),
            };
        };
        let bytes = self.weight(name, module, *shape)?;
        let start = usize::try_from(offset).ok();
        let part = start.and_then(|start| bytes.get(start..start.checked_add(buffer.len())?));
        buffer.copy_from_slice(part.ok_or_else(|| {
            Error::Internal(format!("a range exceeds the {} bytes of tensor `{name}`", bytes.len()))
        })?);
        Ok(())
    }

    fn location(&self, name: &str) -> PathBuf {
        self.model.source().location(name)
    }
}
