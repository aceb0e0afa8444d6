//! Checks of the tensors against the configuration.

use std::collections::{BTreeMap, HashSet};

use crate::checkpoint::{Dtype, printable, require_weight_float};
use crate::model::arch::LearnedPositions;
use crate::model::{CachedValue, KvScheme, Model, cached_values};
use crate::wording::counted;
use crate::{Error, Result};

/// The number of names in a message.
const MAX_LISTED: usize = 6;
/// Parts of the names of experts' tensors.
const EXPERTS: &[&str] = &["experts", "shared_expert", "shared_expert_gate", "shared_experts", "shared_mlp"];

impl Model {
    /// Returns a warning if linears for which engines keep one scale have different global scales of NVFP4.
    ///
    /// # Errors
    /// When a scale cannot be read.
    pub(crate) fn differing_scales(&self) -> Result<Option<String>> {
        let has_one = |module: &str| self.module_scheme(module).is_some_and(|s| s.has_global_scale());
        let modules = self.weight_modules().into_iter().filter(|(_, module, _)| has_one(module));
        let shapes: BTreeMap<String, [usize; 2]> =
            modules.map(|(_, module, shape)| (module, shape)).collect();
        if shapes.is_empty() {
            return Ok(None);
        }
        let scale_of = |module: &String| -> Result<Option<f32>> {
            let Some(shape) = shapes.get(module) else { return Ok(None) };
            for spec in self.packed_tensors(module, *shape)? {
                let is_input =
                    spec.name.strip_prefix(module.as_str()).is_none_or(|n| n.starts_with(".input"));
                if spec.info.dtype == Dtype::F32 && spec.info.elements() == 1 && !is_input {
                    return Ok(self.source.read_f32(&spec.name)?.first().copied());
                }
            }
            Ok(None)
        };
        let (mut first, mut others) = (None, 0);
        for group in self.architecture.scale_groups() {
            let mut scales = Vec::new();
            for module in group {
                scales.extend(scale_of(&module)?.map(|scale| (module, scale)));
            }
            let differing = scales.iter().position(|(_, scale)| *scale != scales[0].1);
            match differing {
                Some(at) if first.is_none() => first = Some((scales.remove(at).0, scales.remove(0).0)),
                Some(_) => others += 1,
                None => {}
            }
        }
        Ok(first.map(|(b, a)| {
            let more = match others {
                0 => String::new(),
                n => format!(", as do linears in {}", counted(n, "more group")),
            };
            format!(
                "`{a}` and `{b}` have different global scales{more}: engines that run them as one matrix keep one \
                scale, so they reject this checkpoint or compute wrong outputs"
            )
        }))
    }

    /// Returns a warning if blocks have tensors that are not computed. Biases that are 0 do not count: programs that
    /// write GPTQ files add them.
    ///
    /// # Errors
    /// When a bias cannot be read; [`Error::UnknownExperts`] if such a tensor belongs to an expert.
    pub(crate) fn uncomputed_tensors(&self) -> Result<Option<String>> {
        let (mut count, mut found) = (0, Vec::new());
        let mut of_experts = Vec::new();
        for name in self.architecture.uncomputed(self.source.names()) {
            if name.ends_with(".bias") && self.is_zero(name)? {
                continue;
            }
            count += 1;
            if name.split('.').any(|part| EXPERTS.contains(&part)) {
                of_experts.push(name);
            }
            let shown = format!("`{}`", printable(&self.architecture.for_all_blocks(name)));
            if !found.contains(&shown) {
                found.push(shown);
            }
        }
        if found.is_empty() {
            return Ok(None);
        }
        if let Some(first) = of_experts.first() {
            let (path, tensor) = (self.path.clone(), (*first).to_owned());
            return Err(Error::UnknownExperts { path, tensor, count: of_experts.len() });
        }
        let more = found.len().saturating_sub(MAX_LISTED);
        found.truncate(MAX_LISTED);
        let more = if more > 0 { format!(" and {more} more names") } else { String::new() };
        Ok(Some(format!(
            "{}: the blocks have {} that the family `{}` does not compute: {}{more}; so the model probably belongs to a \
            different family or version, and results would be wrong",
            self.path.display(),
            counted(count, "tensor"),
            self.architecture.family,
            found.join(", "),
        )))
    }

    fn is_zero(&self, name: &str) -> Result<bool> {
        let is_float = self.source.require(name)?.dtype.is_weight_float();
        Ok(is_float && self.source.read_f32(name)?.iter().all(|value| *value == 0.0))
    }

    /// Returns the tensors that the configuration requires outside the blocks, with their shapes. Quantized weights are
    /// not included, because their tensors depend on the checkpoint format.
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
                self.check_static_input(&module)?;
            }
            for parameter in parameters.iter().filter(|p| packed.is_none() || p.name != "weight") {
                let name = self.architecture.in_block(layer, &op.tensor_name(parameter));
                self.check_float(&name, &parameter.shape)?;
            }
        }
        self.kv_scale_tensors(layer).map(|_| ())
    }

    /// Checks that the static scale of a linear's input, if it has one, is that of the input that the linear reads here.
    fn check_static_input(&self, module: &str) -> Result<()> {
        let is_static = self.module_scheme(module).is_some_and(|scheme| scheme.has_static_activations());
        match is_static && self.architecture.has_multiplied_input(module) {
            false => Ok(()),
            true => Err(Error::UnsupportedQuantization {
                path: self.path.clone(),
                reason: format!(
                    "`{module}` has a static activation scale, which is not supported if the configuration \
                    multiplies its input by a factor"
                ),
            }),
        }
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

    /// Fails if a block after the last is an ordinary block, so that `num_hidden_layers` is too small. Blocks that
    /// predict further tokens have tensors of their own, such as `eh_proj.weight`.
    fn check_further_blocks(&self) -> Result<()> {
        let a = &self.architecture;
        if a.further_blocks == 0 {
            return Ok(());
        }
        let (mut ordinary, mut further) = (HashSet::new(), BTreeMap::<usize, Vec<&str>>::new());
        for name in self.source.names() {
            match a.inside_block(name) {
                Some((block, inside)) if block < a.layers => _ = ordinary.insert(inside),
                Some((block, inside)) if a.is_in_further_block(name) => {
                    further.entry(block).or_default().push(inside);
                }
                _ => {}
            }
        }
        let found = further.iter().find(|(_, tensors)| tensors.iter().all(|t| ordinary.contains(t)));
        let Some((block, _)) = found else { return Ok(()) };
        Err(Error::Config {
            path: self.path.clone(),
            field: "num_hidden_layers".into(),
            reason: format!(
                "is {}, but block {block} has the tensors of an ordinary block, and none that predict further tokens",
                a.layers
            ),
            remedy: None,
        })
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
                remedy: None,
            });
        }
        self.check_further_blocks()?;
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
