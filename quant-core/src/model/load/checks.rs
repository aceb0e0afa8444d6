//! Checks of the tensors against the configuration.

use crate::checkpoint::require_weight_float;
use crate::model::arch::LearnedPositions;
use crate::model::{CachedValue, KvScheme, Model, cached_values};
use crate::{Error, Result};

impl Model {
    /// Returns the tensors that the configuration requires outside the blocks, with their shapes. The tensors of
    /// quantized weights depend on the checkpoint format and are not included.
    fn expected_outside(&self) -> Vec<(String, Vec<usize>)> {
        let a = &self.architecture;
        let mut expected = Vec::new();
        if let Some(norm) = &a.final_norm {
            let parameters = norm.parameters().into_iter();
            expected.extend(parameters.map(|p| (format!("{}.{}", norm.name(), p.name), p.shape)));
        }
        if let Some(norm) = &a.embedding_norm {
            let parameters = norm.parameters().into_iter();
            expected.extend(parameters.map(|p| (format!("{}.{}", norm.name(), p.name), p.shape)));
        }
        if let Some(LearnedPositions { table, offset }) = &a.learned_positions {
            expected.push((table.clone(), vec![a.max_positions + offset, a.hidden]));
        }
        if let Some(inputs) = &a.per_layer_inputs {
            let features = a.layers * inputs.width;
            expected.push((format!("{}.weight", inputs.table), vec![inputs.vocab, features]));
            if self.module_scheme(&inputs.projection).is_none() {
                expected.push((format!("{}.weight", inputs.projection), vec![features, a.hidden]));
            }
            let norm = inputs.norm.parameters().into_iter();
            expected.extend(norm.map(|p| (format!("{}.{}", inputs.norm.name(), p.name), p.shape)));
        }
        if self.module_scheme(&a.embedding_module()).is_none() {
            expected.push((self.embedding_name(), vec![a.vocab, a.hidden]));
        }
        if !a.tied && self.module_scheme(&a.head).is_none() {
            expected.push((self.head_weight(), vec![a.vocab, a.hidden]));
        }
        if a.head_bias {
            expected.push((format!("{}.bias", a.head), vec![a.vocab]));
        }
        expected
    }

    fn check_float(&self, name: &str, shape: &[usize]) -> Result<()> {
        let info = self.source.require(name)?;
        if info.shape != shape {
            return Err(Error::TensorShape {
                path: self.source.location(name),
                tensor: name.to_owned(),
                expected: shape.to_vec(),
                got: info.shape.clone(),
            });
        }
        require_weight_float(self.source.location(name), name, info.dtype)
    }

    /// Stops at the first missing tensor, because a configuration may require far more than the checkpoint holds.
    fn check_block(&self, layer: usize) -> Result<()> {
        for op in self.architecture.graph(layer).nodes().iter().map(|node| &node.op) {
            let parameters = op.parameters();
            if parameters.is_empty() {
                continue;
            }
            let module = self.architecture.in_block(layer, op.name());
            let packed = op.linear_shape().filter(|_| self.module_scheme(&module).is_some());
            if let Some(shape) = packed {
                self.packed_tensors(&module, shape)?;
            }
            for parameter in parameters.iter().filter(|p| packed.is_none() || p.name != "weight") {
                let name = self.architecture.in_block(layer, &op.tensor_name(parameter));
                self.check_float(&name, &parameter.shape)?;
            }
        }
        self.kv_scale_tensors(layer).map(|_| ())
    }

    /// Returns the static scales of a block's keys and values, and the tensors that hold them; empty if the checkpoint
    /// needs none. Without a scale, some engines would use 1 and others would read uninitialized memory.
    pub(crate) fn kv_scale_tensors(&self, layer: usize) -> Result<Vec<(CachedValue, String)>> {
        if self.kv != Some(KvScheme::Kvf8) {
            return Ok(Vec::new());
        }
        let graph = self.architecture.graph(layer);
        let values = cached_values(graph).map_err(|reason| Error::UnsupportedQuantization {
            path: self.path.clone(),
            reason: format!("an FP8 cache cannot hold keys and values of block {layer}: {reason}"),
        })?;
        let tensor = |value: CachedValue| {
            let linear = self.architecture.in_block(layer, graph.name(value.linear));
            let known = value.part.known_names(&linear);
            let name =
                known.iter().find(|name| self.source.info(name).is_some()).unwrap_or(&known[0]).clone();
            let info = self.source.require(&name)?;
            require_weight_float(self.source.location(&name), &name, info.dtype)?;
            match info.elements() {
                1 => Ok((value, name)),
                _ => Err(Error::TensorShape {
                    path: self.source.location(&name),
                    tensor: name,
                    expected: vec![1],
                    got: info.shape.clone(),
                }),
            }
        };
        values.into_iter().map(tensor).collect()
    }

    pub(super) fn check(&self) -> Result<()> {
        // Rejects a configuration with more blocks than the checkpoint has tensors, before the blocks are expanded.
        let tensors = self.source.names().len();
        if self.architecture.layers > tensors {
            return Err(Error::Config {
                path: self.path.clone(),
                field: "num_hidden_layers".into(),
                reason: format!(
                    "is {}, but the checkpoint has only {tensors} tensors",
                    self.architecture.layers
                ),
            });
        }
        for (name, shape) in self.expected_outside() {
            self.check_float(&name, &shape)?;
        }
        (0..self.architecture.layers).try_for_each(|layer| self.check_block(layer))?;
        for (_, module, shape) in self.weight_modules().into_iter().filter(|(layer, ..)| layer.is_none()) {
            if self.module_scheme(&module).is_some() {
                self.packed_tensors(&module, shape)?;
            }
        }
        Ok(())
    }
}
