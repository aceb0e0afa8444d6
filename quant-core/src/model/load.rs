//! A checkpoint seen as a model: its family and sizes, checked against its tensors, and its
//! weights, one block at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Preparation;
use super::arch::{self, Architecture, EmbeddingScale, LearnedPositions, Op};
use super::dequantized::Dequantized;
use super::{
    Block, CachedValue, KvCaching, KvScheme, Linear, Norm, OpParameters, PositionTable, RopeTables,
    StoredWeight, WeightBody, cached_values,
};
use super::{fused_experts, names};
use crate::checkpoint::{
    ConfigFields, Dtype, ModelDirectory, TensorSource, TensorSpec, non_finite_in_whole, require_finite_bytes,
    require_weight_float,
};
use crate::format::{self, PackedReader, PackedWeight, read_positive};
use crate::quantize::QuantizedTensor;
use crate::scheme::KV_CONFIG_KEY;
use crate::{Error, Result};

/// A checkpoint whose configuration and tensors agree.
pub struct Model {
    architecture: Architecture,
    source: Arc<dyn TensorSource>,
    path: PathBuf,
    quantization: Option<Quantization>,
    /// What was done to all of it, and the tensors that are therefore other ones than in the checkpoint.
    prepared: Option<(Preparation, BTreeSet<String>)>,
    parts_head: bool,
    kv: Option<KvScheme>,
    /// The `quant_method` of the checkpoint whose codes are seen as floats.
    source_method: Option<String>,
}

/// The `quantization_config`: of the model, or of its text tower, which some exporters write it into.
fn quantization_settings<'a>(config: &ConfigFields<'a>) -> Result<Option<&'a Value>> {
    const KEY: &str = "quantization_config";
    let nested = config.get(arch::TEXT_CONFIG).and_then(Value::as_object);
    let nested = nested.and_then(|text| text.get(KEY)).filter(|settings| !settings.is_null());
    match (config.get(KEY), nested) {
        (Some(outer), Some(inner)) if outer != inner => {
            Err(config.error(KEY, format!("differs from the one in `{}`", arch::TEXT_CONFIG)))
        }
        (outer, inner) => Ok(outer.or(inner)),
    }
}

/// What of a vision-language model is no part of its text tower: vision tower, projector and the like.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carried {
    /// The class of the model, as `architectures` has it.
    pub class: String,
    /// Tensors, each written byte for byte as it was read.
    pub tensors: u64,
    /// Their bytes.
    pub bytes: u64,
}

struct Quantization {
    method: String,
    reader: Box<dyn PackedReader>,
}

impl Model {
    /// The model in a directory, float or quantized.
    ///
    /// # Errors
    /// When the configuration is malformed, of an unknown family or container, or disagrees with
    /// the tensors.
    pub fn open(directory: &ModelDirectory) -> Result<Self> {
        Self::new(directory.source().clone(), directory.config_path(), directory.config())
    }

    /// A model from its tensors and the fields of its `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn new(source: Arc<dyn TensorSource>, path: &Path, config: &Map<String, Value>) -> Result<Self> {
        let fields = ConfigFields::new(path, config);
        let architecture = arch::describe(&fields, source.as_ref())?;
        let kv = KvScheme::from_config(&fields)?;
        let source = fused_experts::split(names::with_base(source, &architecture), &architecture)?;
        let mut kv = kv;
        let quantization = match quantization_settings(&fields)? {
            None => None,
            Some(settings) => {
                let mut reader = format::reader(settings)
                    .map_err(|reason| Error::UnsupportedQuantization { path: path.to_owned(), reason })?;
                reader.survey(source.as_ref())?;
                if reader.has_fp8_cache() {
                    if kv.is_some() {
                        let reason = "contradicts the cache of FP8 in `quantization_config`";
                        return Err(fields.error(KV_CONFIG_KEY, reason));
                    }
                    kv = Some(KvScheme::Kvf8);
                }
                let method = settings.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
                Some(Quantization { method: method.to_owned(), reader })
            }
        };
        let path = path.to_owned();
        let (prepared, parts_head, source_method) = (None, false, None);
        let mut model =
            Self { architecture, source, path, quantization, prepared, parts_head, kv, source_method };
        model.architecture.tied = model.shares_head()?;
        model.check()?;
        Ok(model)
    }

    /// This float model with other tensors in the place of its own: those of its prepared equal. A head that they hold
    /// beside the embedding is tied to it only where the two are the same.
    /// `turned` are the names of those that are not as in the checkpoint.
    pub(crate) fn prepared(
        &self,
        by: Preparation,
        source: Arc<dyn TensorSource>,
        turned: BTreeSet<String>,
    ) -> Result<Self> {
        let (architecture, path) = (self.architecture.clone(), self.path.clone());
        let (prepared, parts_head, kv) = (Some((by, turned)), false, self.kv);
        let (quantization, source_method) = (None, self.source_method.clone());
        let mut model =
            Self { architecture, source, path, quantization, prepared, parts_head, kv, source_method };
        model.architecture.tied = model.shares_head()?;
        model.parts_head = self.architecture.tied && !model.architecture.tied;
        model.check()?;
        Ok(model)
    }

    /// A quantized model as a float one: its weights are what its codes stand for, in F32. A float model stays as it is.
    ///
    /// # Errors
    /// When a tensor that should hold a quantized weight is missing.
    pub fn dequantized(self) -> Result<Self> {
        let Some(method) = self.quantization.as_ref().map(|q| q.method.clone()) else { return Ok(self) };
        // Scales of FP8 are left behind with those of the weights.
        let kv = self.kv.filter(|kv| *kv != KvScheme::Kvf8);
        let (architecture, path) = (self.architecture.clone(), self.path.clone());
        let source: Arc<dyn TensorSource> = Arc::new(Dequantized::new(self)?);
        let (quantization, prepared, parts_head, source_method) = (None, None, false, Some(method));
        let mut model =
            Self { architecture, source, path, quantization, prepared, parts_head, kv, source_method };
        model.architecture.tied = model.shares_head()?;
        model.check()?;
        Ok(model)
    }

    /// The `quant_method` of the checkpoint, where its codes are seen as floats.
    pub fn dequantized_from(&self) -> Option<&str> {
        self.source_method.as_deref()
    }

    /// Whether a tensor is another one than in the checkpoint.
    pub fn is_turned(&self, name: &str) -> bool {
        self.prepared.as_ref().is_some_and(|(_, turned)| turned.contains(name))
    }

    /// Whether its preparation has parted the head from the embedding that it is in the checkpoint.
    pub fn parts_head(&self) -> bool {
        self.parts_head
    }

    /// What was done to all of it.
    pub fn preparation(&self) -> Option<Preparation> {
        self.prepared.as_ref().map(|(by, _)| *by)
    }

    /// Whether its hidden states are those of the checkpoint, rotated.
    pub fn is_rotated(&self) -> bool {
        self.preparation() == Some(Preparation::Rotate)
    }

    /// The configuration file, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Family and sizes.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// The tensors, by the names that the architecture has for them.
    pub fn source(&self) -> &Arc<dyn TensorSource> {
        &self.source
    }

    /// The `quant_method`, if the checkpoint is quantized.
    pub fn quant_method(&self) -> Option<&str> {
        self.quantization.as_ref().map(|q| q.method.as_str())
    }

    /// How the model is meant to cache keys and values, where not as floats.
    pub fn kv_scheme(&self) -> Option<KvScheme> {
        self.kv
    }

    /// Why the kernels' cache does not hold the model's keys and values here, if it does not: then it is simulated.
    pub fn kernels_refuse(&self, kv: KvScheme) -> Option<String> {
        KvCaching::refusal(kv.kind(), &self.architecture.attentions())
    }

    /// How a linear or the embedding is quantized, if it is.
    pub fn module_scheme(&self, module: &str) -> Option<crate::scheme::LinearScheme> {
        let reader = &self.quantization.as_ref()?.reader;
        match self.architecture.embedding.strip_suffix(".weight") {
            Some(embedding) if embedding == module => reader.embedding_scheme(module),
            _ => reader.scheme(module),
        }
    }

    /// [`Error::AlreadyQuantized`] unless the checkpoint is float.
    ///
    /// # Errors
    /// When it is not.
    pub fn require_float(&self) -> Result<()> {
        match &self.quantization {
            None => Ok(()),
            Some(q) => Err(Error::AlreadyQuantized { path: self.path.clone(), method: q.method.clone() }),
        }
    }

    /// The name of the embedding tensor. Tied checkpoints may store it under the head's name only.
    pub fn embedding_name(&self) -> String {
        let head = self.head_weight();
        let a = &self.architecture;
        let only_head =
            a.tied && self.source.info(&a.embedding).is_none() && self.source.info(&head).is_some();
        if only_head { head } else { a.embedding.clone() }
    }

    /// Whether the head is the embedding: the configuration says so, and no other head is stored.
    /// Readers do not tie two tensors that differ.
    fn shares_head(&self) -> Result<bool> {
        let a = &self.architecture;
        let head = self.head_weight();
        if !a.tied || self.source.info(&head).is_none() || self.source.info(&a.embedding).is_none() {
            return Ok(a.tied);
        }
        let len = self.source.require(&head)?.byte_len();
        if self.source.info(&head) != self.source.info(&a.embedding) {
            return Ok(false);
        }
        let piece = len.min(8 << 20);
        let (mut one, mut other) = (vec![0; piece as usize], vec![0; piece as usize]);
        let mut at = 0;
        while at < len {
            let part = piece.min(len - at) as usize;
            self.source.read_range(&head, at, &mut one[..part])?;
            self.source.read_range(&a.embedding, at, &mut other[..part])?;
            if one[..part] != other[..part] {
                return Ok(false);
            }
            at += part as u64;
        }
        Ok(true)
    }

    fn head_weight(&self) -> String {
        format!("{}.weight", self.architecture.head)
    }

    /// Every tensor outside the blocks that the configuration promises, with its shape; quantized weights, which are
    /// packed, excluded.
    fn expected_outside(&self) -> Vec<(String, Vec<usize>)> {
        let a = &self.architecture;
        let mut expected = Vec::new();
        if let Some(norm) = &a.final_norm {
            let parameters = norm.parameters().into_iter();
            expected.extend(parameters.map(|p| (format!("{}.{}", norm.name(), p.name), p.shape)));
        }
        if let Some(LearnedPositions { table, offset }) = &a.learned_positions {
            expected.push((table.clone(), vec![a.max_positions + offset, a.hidden]));
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

    /// Checks the tensors of a block one by one and stops at the first that is missing: a configuration may promise
    /// far more than the checkpoint holds.
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

    /// The static scales of a block's keys and values, and the tensors that hold them; none where the checkpoint has none
    /// to have.
    ///
    /// # Errors
    /// When one is missing, which engines take for 1 and others for garbage, or is not one number.
    pub(crate) fn kv_scale_tensors(&self, layer: usize) -> Result<Vec<(CachedValue, String)>> {
        if self.kv != Some(KvScheme::Kvf8) {
            return Ok(Vec::new());
        }
        let graph = self.architecture.graph(layer);
        let values = cached_values(graph).ok_or_else(|| Error::UnsupportedQuantization {
            path: self.path.clone(),
            reason: format!(
                "a cache of FP8 of keys and values that come from several linears, in block {layer}"
            ),
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

    fn check(&self) -> Result<()> {
        // A configuration that promises more blocks than there are tensors must not be expanded.
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

    /// Everything that may be quantized, in model order, each with its block, its name and its shape
    /// `[n, k]`: the linears, the head among them unless it is tied, then the embedding.
    pub(crate) fn weight_modules(&self) -> Vec<(Option<usize>, String, [usize; 2])> {
        let a = &self.architecture;
        let head = (!a.tied).then(|| (None, a.head.clone(), [a.vocab, a.hidden]));
        let in_blocks = (0..a.layers).flat_map(|layer| {
            let linears = a.graph(layer).linears();
            linears.map(move |(_, name, shape, _)| (Some(layer), a.in_block(layer, name), shape))
        });
        let embedding = (None, a.embedding_module(), [a.vocab, a.hidden]);
        in_blocks.chain(head).chain([embedding]).collect()
    }

    /// What of the checkpoint lies outside the decoder and is carried along, where a larger model wraps it.
    pub fn carried(&self) -> Option<Carried> {
        let wrapper = self.architecture.wrapper.as_ref()?;
        let names = self.source.names().into_iter().filter(|name| self.architecture.is_carried(name));
        let bytes: Vec<u64> = names.filter_map(|name| Some(self.source.info(name)?.byte_len())).collect();
        let (tensors, bytes) = (bytes.len() as u64, bytes.iter().sum());
        Some(Carried { class: wrapper.class.to_owned(), tensors, bytes })
    }

    /// A quantized weight and who reads it.
    fn packed_weight<'a>(
        &self,
        module: &'a str,
        shape: [usize; 2],
    ) -> Result<(&dyn PackedReader, PackedWeight<'a>)> {
        let scheme = self.module_scheme(module);
        match (self.quantization.as_ref(), scheme) {
            (Some(q), Some(scheme)) => Ok((&*q.reader, PackedWeight { module, shape, scheme })),
            _ => Err(Error::Internal(format!("module `{module}` is not quantized"))),
        }
    }

    /// The tensors that hold a quantized weight of shape `[n, k]`.
    pub(crate) fn packed_tensors(&self, module: &str, shape: [usize; 2]) -> Result<Vec<TensorSpec>> {
        let (reader, weight) = self.packed_weight(module, shape)?;
        reader.tensors(self.source.as_ref(), weight)
    }

    /// The type that the scales of a quantized linear, or of the embedding, are stored in.
    ///
    /// # Errors
    /// When the module is not quantized, or its scales are missing.
    pub fn packed_scale_dtype(&self, module: &str) -> Result<Dtype> {
        self.packed_weight(module, [0, 0])?.0.scale_dtype(self.source.as_ref(), module)
    }

    /// The zeros of a quantized weight, `[n, groups]`, where it has any.
    pub(crate) fn packed_zeros(&self, module: &str, shape: [usize; 2]) -> Result<Option<Vec<u8>>> {
        let (reader, weight) = self.packed_weight(module, shape)?;
        reader.zeros(self.source.as_ref(), weight)
    }

    /// A quantized weight.
    pub(crate) fn packed(&self, module: &str, shape: [usize; 2]) -> Result<QuantizedTensor> {
        let (reader, weight) = self.packed_weight(module, shape)?;
        reader.read(self.source.as_ref(), weight)
    }

    /// A float matrix in its file's dtype, of which nothing is read yet.
    fn stored_weight(&self, name: String, shape: [usize; 2]) -> Result<WeightBody> {
        Ok(WeightBody::Stored(StoredWeight::new(self.source.clone(), name, shape)?))
    }

    fn vector(&self, name: &str) -> Result<Tensor> {
        let values = self.source.read_f32(name)?;
        let len = values.len();
        Ok(Tensor::from_vec(values, len, &Device::Cpu)?)
    }

    /// The embedding table `[vocab, hidden]`.
    ///
    /// # Errors
    /// When it cannot be read or is not finite.
    pub fn embedding(&self) -> Result<Arc<WeightBody>> {
        let a = &self.architecture;
        let (module, shape) = (a.embedding_module(), [a.vocab, a.hidden]);
        let body = match self.module_scheme(&module) {
            Some(_) => WeightBody::Quantized(self.packed(&module, shape)?),
            None => self.stored_weight(self.embedding_name(), shape)?,
        };
        body.load()?;
        Ok(Arc::new(body))
    }

    /// What embeddings are multiplied by; 1 where the family does not scale them.
    ///
    /// # Errors
    /// When the embedding is missing.
    pub fn embedding_scale(&self) -> Result<f32> {
        let a = &self.architecture;
        Ok(match a.embedding_scale {
            None => 1.0,
            Some(EmbeddingScale::Exact(scale)) => scale as f32,
            Some(EmbeddingScale::Rounded(scale)) => {
                let module = a.embedding_module();
                let dtype = match self.module_scheme(&module) {
                    Some(_) => self.packed_scale_dtype(&module)?,
                    None => self.source.require(&self.embedding_name())?.dtype,
                };
                dtype.round(scale as f32)
            }
        })
    }

    /// The output head; for tied models it shares `embedding`.
    ///
    /// # Errors
    /// When it cannot be read or is not finite.
    pub fn head(&self, embedding: &Arc<WeightBody>) -> Result<Linear> {
        let a = &self.architecture;
        let bias = if a.head_bias { Some(self.vector(&format!("{}.bias", a.head))?) } else { None };
        if a.tied {
            return Ok(Linear::new(embedding.clone(), bias));
        }
        let weight = self.linear_weight(&a.head, [a.vocab, a.hidden])?;
        weight.load()?;
        Ok(Linear::new(Arc::new(weight), bias))
    }

    /// The norm before the head and its parameters, if there is one.
    ///
    /// # Errors
    /// When they cannot be read or are not finite.
    pub fn final_norm(&self) -> Result<Option<(Op, Norm)>> {
        let Some(op) = &self.architecture.final_norm else { return Ok(None) };
        let norm = match op.stored_norm() {
            Some((name, _, bias)) => self.norm(name, bias)?,
            None => Norm::plain(self.architecture.hidden)?,
        };
        Ok(Some((op.clone(), norm)))
    }

    fn norm(&self, name: &str, bias: bool) -> Result<Norm> {
        let weight = self.vector(&format!("{name}.weight"))?;
        let bias = if bias { Some(self.vector(&format!("{name}.bias"))?) } else { None };
        Ok(Norm { weight, bias })
    }

    fn linear_weight(&self, module: &str, shape: [usize; 2]) -> Result<WeightBody> {
        match self.module_scheme(module) {
            Some(_) => Ok(WeightBody::Quantized(self.packed(module, shape)?)),
            None => self.stored_weight(format!("{module}.weight"), shape),
        }
    }

    /// The tables of all rotations, for positions `0..positions`.
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn rope(&self, positions: usize) -> Result<RopeTables> {
        RopeTables::new(self.architecture.ropes(), positions)
    }

    /// Fails when there are fewer positions than a window has tokens. Where positions are turned there
    /// are always enough.
    ///
    /// # Errors
    /// [`Error::Usage`] with the number that there is.
    pub fn check_positions(&self, window: usize) -> Result<()> {
        let a = &self.architecture;
        match a.learned_positions {
            Some(_) if window > a.max_positions => Err(Error::usage(
                format!(
                    "windows of {window} tokens are longer than the {} positions that the model has learned",
                    a.max_positions
                ),
                format!(
                    "ask for {} at most: with --seq-len, --window, or --prefill and --decode together",
                    a.max_positions
                ),
            )),
            _ => Ok(()),
        }
    }

    /// The rows that are added to the embeddings at positions `0..positions`, where the family has such.
    ///
    /// # Errors
    /// As [`check_positions`](Self::check_positions), and when they cannot be read or are not finite.
    pub fn position_table(&self, positions: usize) -> Result<Option<PositionTable>> {
        self.check_positions(positions)?;
        let Some(LearnedPositions { table, offset }) = &self.architecture.learned_positions else {
            return Ok(None);
        };
        let dtype = self.source.require(table)?.dtype;
        let row = self.architecture.hidden * dtype.size();
        let mut bytes = vec![0; positions * row];
        self.source.read_range(table, (offset * row) as u64, &mut bytes)?;
        require_finite_bytes(self.source.location(table), table, dtype, &bytes)
            .map_err(|e| non_finite_in_whole(self.source.as_ref(), dtype, e))?;
        let mut values = vec![0.0; positions * self.architecture.hidden];
        dtype.widen(&bytes, &mut values);
        Ok(Some(PositionTable::new(self.architecture.hidden, values)))
    }

    /// Block `index` with its weights in the file's dtypes, all in memory.
    ///
    /// # Errors
    /// When a tensor cannot be read or is not finite.
    pub fn block(&self, index: usize, ropes: &RopeTables) -> Result<Block> {
        let block = self.stored_block(index, ropes)?;
        block.load()?;
        Ok(block)
    }

    /// Block `index` with float weights that are read when they are [first used](StoredWeight).
    ///
    /// # Errors
    /// When a norm, a bias or a quantized weight cannot be read, or a norm or a bias is not finite.
    pub fn stored_block(&self, index: usize, ropes: &RopeTables) -> Result<Block> {
        let a = &self.architecture;
        let graph = a.blocks.graph(index);
        let mut norms = BTreeMap::new();
        for (id, name, _) in graph.norms() {
            norms.insert(id, self.norm(&a.in_block(index, name), graph.has_bias(id))?);
        }
        let mut linears = BTreeMap::new();
        for (id, name, shape, bias) in graph.linears() {
            let module = a.in_block(index, name);
            let bias = if bias { Some(self.vector(&format!("{module}.bias"))?) } else { None };
            linears.insert(id, Linear::new(Arc::new(self.linear_weight(&module, shape)?), bias));
        }
        let mut parameters = BTreeMap::new();
        for (id, op) in graph.parametrized() {
            let tensors = op.parameters().into_iter().map(|p| a.in_block(index, &op.tensor_name(&p)));
            let values = tensors.map(|name| self.source.read_f32(&name)).collect::<Result<_>>()?;
            parameters.insert(id, OpParameters(values));
        }
        let scale = |(value, name): (CachedValue, String)| {
            Ok(((value.attention, value.part), read_positive(self.source.as_ref(), &name)?))
        };
        let scales = self.kv_scale_tensors(index)?.into_iter().map(scale).collect::<Result<_>>()?;
        Ok(Block::new(graph.clone(), norms, linears, parameters, ropes)?.with_kv_scales(scales))
    }

    /// Embeddings of a batch of equally long token windows, `[batch, positions, hidden]`, read row
    /// by row from the checkpoint and [scaled](Self::embedding_scale): the table itself is never in memory. What
    /// [`position_table`](Self::position_table) has is not added yet.
    ///
    /// # Errors
    /// When a token is outside the vocabulary or a row cannot be read or is not finite.
    pub fn embed_streamed(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        // Only float models are calibrated, but nothing else keeps a caller from asking.
        self.require_float()?;
        let (name, hidden) = (self.embedding_name(), self.architecture.hidden);
        let dtype = self.source.require(&name)?.dtype;
        let row_bytes = hidden * dtype.size();
        let scale = self.embedding_scale()?;
        // Each distinct row is read once, in the order it stands in the file.
        let mut places: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (place, &token) in tokens.iter().enumerate() {
            self.check_token(token)?;
            places.entry(token).or_default().push(place);
        }
        let mut out = vec![0.0; tokens.len() * hidden];
        let (mut bytes, mut row) = (vec![0; row_bytes], vec![0.0; hidden]);
        for (token, places) in places {
            self.source.read_range(&name, u64::from(token) * row_bytes as u64, &mut bytes)?;
            require_finite_bytes(self.source.location(&name), &name, dtype, &bytes)
                .map_err(|e| non_finite_in_whole(self.source.as_ref(), dtype, e))?;
            dtype.widen(&bytes, &mut row);
            if scale != 1.0 {
                row.iter_mut().for_each(|v| *v *= scale);
            }
            for place in places {
                out[place * hidden..(place + 1) * hidden].copy_from_slice(&row);
            }
        }
        Ok(out)
    }

    /// Fails when a token is outside the embedding.
    ///
    /// # Errors
    /// [`Error::Tokenizer`]: the tokenizer belongs to another model.
    pub fn check_token(&self, token: u32) -> Result<()> {
        let vocab = self.architecture.vocab;
        if (token as usize) < vocab {
            return Ok(());
        }
        Err(Error::Tokenizer {
            path: self.path.with_file_name("tokenizer.json"),
            reason: format!("gives token {token}, but the embedding has {vocab} rows"),
        })
    }
}
