//! The weights of a model, read on request.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::blocks::BlockType;
use crate::checkpoint::{Dtype, TensorSpec};
use crate::format::{PackedReader, PackedWeight, mxfp4, read_positive};
use crate::model::arch::Op;
use crate::model::{
    Block, BlockWeight, CachedValue, EmbeddingNorm, Linear, Model, Norm, OpParameters, RopeTables,
    StoredWeight, WeightBody,
};
use crate::quantize::QuantizedTensor;
use crate::scheme::LinearScheme;
use crate::{Error, Result};

impl Model {
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

    /// Returns the scheme in which a linear or the embedding is stored, also if the source presents its codes as
    /// floats.
    pub(crate) fn stored_scheme(&self, module: &str) -> Option<LinearScheme> {
        let coded = || self.source.is_mxfp4(&format!("{module}.weight")).then_some(mxfp4::SCHEME);
        self.module_scheme(module).or_else(coded)
    }

    /// Returns the tensors that hold a quantized weight of shape `[n, k]`.
    pub(crate) fn packed_tensors(&self, module: &str, shape: [usize; 2]) -> Result<Vec<TensorSpec>> {
        if let Some(name) = self.shown_as_float(module) {
            let info = self.source.require(&name)?.clone();
            return Ok(vec![TensorSpec { name, info }]);
        }
        let (reader, weight) = self.packed_weight(module, shape)?;
        reader.tensors(self.source.as_ref(), weight)
    }

    /// Returns the dtype of the stored scales of a quantized linear or embedding.
    ///
    /// # Errors
    /// When the module is not quantized, or its scales are missing.
    pub fn packed_scale_dtype(&self, module: &str) -> Result<Dtype> {
        if self.shown_as_float(module).is_some() {
            return Ok(Dtype::F8E8M0);
        }
        self.packed_weight(module, [0, 0])?.0.scale_dtype(self.source.as_ref(), module)
    }

    /// Returns the zero points of a quantized weight, `[n, groups]`, if it has any.
    pub(crate) fn packed_zeros(&self, module: &str, shape: [usize; 2]) -> Result<Option<Vec<u8>>> {
        let (reader, weight) = self.packed_weight(module, shape)?;
        reader.zeros(self.source.as_ref(), weight)
    }

    /// Whether a quantized weight has groups of inputs that are not adjacent.
    pub(crate) fn has_input_order(&self, module: &str, shape: [usize; 2]) -> Result<bool> {
        if self.shown_as_float(module).is_some() {
            return Ok(false);
        }
        let (reader, weight) = self.packed_weight(module, shape)?;
        Ok(reader.input_order(self.source.as_ref(), weight)?.is_some())
    }

    /// Reads a quantized weight of shape `[n, k]`.
    pub(crate) fn packed(&self, module: &str, shape: [usize; 2]) -> Result<QuantizedTensor> {
        if let Some(name) = self.shown_as_float(module) {
            let stored = self.source.read_mxfp4(&name)?;
            let [codes, scales] = stored.ok_or_else(|| Error::Internal(format!("`{name}` is not MXFP4")))?;
            let tensor = mxfp4::unpacked(shape, [&codes, &scales], (self.source.location(&name), &name))?;
            tensor.require_finite(self.source.location(&name), &name)?;
            return Ok(tensor);
        }
        let (reader, weight) = self.packed_weight(module, shape)?;
        let tensor = reader.read(self.source.as_ref(), weight)?;
        let name =
            self.packed_tensors(module, shape)?.into_iter().next().map(|spec| spec.name).unwrap_or_default();
        tensor.require_finite(self.source.location(&name), &name)?;
        Ok(tensor)
    }

    fn shown_as_float(&self, module: &str) -> Option<String> {
        let name = format!("{module}.weight");
        (self.module_scheme(module).is_none() && self.source.is_mxfp4(&name)).then_some(name)
    }

    fn stored_weight(&self, name: String, shape: [usize; 2]) -> Result<WeightBody> {
        Ok(WeightBody::Stored(StoredWeight::new(self.source.clone(), name, shape)?))
    }

    fn vector(&self, name: &str) -> Result<Tensor> {
        let values = self.source.read_f32(name)?;
        let len = values.len();
        Ok(Tensor::from_vec(values, len, &Device::Cpu)?)
    }

    /// Returns the embedding table `[vocab, hidden]`.
    ///
    /// # Errors
    /// When it cannot be read or is not finite.
    pub fn embedding(&self) -> Result<Arc<WeightBody>> {
        let a = &self.architecture;
        let (module, shape) = (a.embedding_module(), [a.vocab, a.hidden]);
        let body = match self.module_scheme(&module) {
            Some(_) => WeightBody::Quantized(self.packed(&module, shape)?),
            None => self.float_or_blocks(self.embedding_name(), shape)?,
        };
        body.load()?;
        Ok(Arc::new(body))
    }

    /// Returns the output head; tied models share `embedding`.
    ///
    /// # Errors
    /// When it cannot be read or is not finite.
    pub fn head(&self, embedding: &Arc<WeightBody>) -> Result<Linear> {
        let a = &self.architecture;
        let bias = if a.head_bias { Some(self.vector(&format!("{}.bias", a.head))?) } else { None };
        if a.tied {
            return Ok(Linear::new(embedding.clone(), bias));
        }
        let weight = self.running_weight(&a.head, [a.vocab, a.hidden])?;
        weight.load()?;
        Ok(Linear::new(Arc::new(weight), bias))
    }

    /// Returns the norm before the head and its parameters, if there is one.
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

    pub(crate) fn embedding_norm(&self) -> Result<Option<EmbeddingNorm>> {
        let Some(op) = &self.architecture.embedding_norm else { return Ok(None) };
        let (name, _, bias) = op
            .stored_norm()
            .ok_or_else(|| Error::Internal("a norm of embeddings without parameters".into()))?;
        Ok(Some(EmbeddingNorm { op: op.clone(), norm: self.norm(name, bias)? }))
    }

    pub(in crate::model) fn norm(&self, name: &str, bias: bool) -> Result<Norm> {
        let weight = self.vector(&format!("{name}.weight"))?;
        let bias = if bias { Some(self.vector(&format!("{name}.bias"))?) } else { None };
        Ok(Norm { weight, bias })
    }

    pub(in crate::model) fn linear_weight(&self, module: &str, shape: [usize; 2]) -> Result<WeightBody> {
        match self.module_scheme(module) {
            Some(_) => Ok(WeightBody::Quantized(self.packed(module, shape)?)),
            None => self.stored_weight(format!("{module}.weight"), shape),
        }
    }

    /// Returns a linear's weight for running it: in [blocks](BlockWeight), if it is stored in blocks that kernels
    /// multiply.
    fn running_weight(&self, module: &str, shape: [usize; 2]) -> Result<WeightBody> {
        match self.module_scheme(module) {
            Some(_) => self.linear_weight(module, shape),
            None => self.float_or_blocks(format!("{module}.weight"), shape),
        }
    }

    fn float_or_blocks(&self, name: String, shape: [usize; 2]) -> Result<WeightBody> {
        match BlockWeight::read(self.source.as_ref(), &name, shape)? {
            Some(blocks) => Ok(WeightBody::Blocks(blocks)),
            None => self.stored_weight(name, shape),
        }
    }

    /// Returns the GGUF type in which a linear is stored; `None` in other files.
    pub fn block_type(&self, module: &str) -> Option<&'static BlockType> {
        self.source.block_type(&format!("{module}.weight"))
    }

    /// Returns the names of the GGUF block types of the model's linears, in the order in which they occur: those that
    /// the CPU kernels multiply, and those that are multiplied as floats.
    pub fn block_types(&self) -> [Vec<&'static str>; 2] {
        let a = &self.architecture;
        let in_blocks = (0..a.layers).flat_map(|layer| {
            let names = a.blocks.graph(layer).linears().map(move |(_, name, ..)| a.in_block(layer, name));
            names.collect::<Vec<_>>()
        });
        let head = if a.tied { self.embedding_name() } else { format!("{}.weight", a.head) };
        let mut types = [Vec::new(), Vec::new()];
        for name in in_blocks.map(|module| format!("{module}.weight")).chain([head]) {
            let Some(kind) = self.source.block_type(&name) else { continue };
            let of = &mut types[usize::from(!kind.has_kernel())];
            if !of.contains(&kind.name) {
                of.push(kind.name);
            }
        }
        types
    }

    /// Returns the tables of all rotary embeddings, for positions `0..positions`.
    ///
    /// # Errors
    /// When they cannot be created.
    pub fn rope(&self, positions: usize) -> Result<RopeTables> {
        RopeTables::new(self.architecture.ropes(), positions)
    }

    /// Returns block `index` with its weights in the file's dtypes, all in memory.
    ///
    /// # Errors
    /// When a tensor cannot be read or is not finite.
    pub fn block(&self, index: usize, ropes: &RopeTables) -> Result<Block> {
        let block = self.stored_block(index, ropes)?;
        block.load()?;
        Ok(block)
    }

    /// Returns block `index` for running it: as [`block`](Self::block), but weights in [blocks](BlockWeight) that
    /// kernels multiply are kept as such.
    ///
    /// # Errors
    /// As [`block`](Self::block).
    pub fn running_block(&self, index: usize, ropes: &RopeTables) -> Result<Block> {
        let block = self.block_of(index, ropes, |module, shape| self.running_weight(module, shape))?;
        block.load()?;
        Ok(block)
    }

    /// Returns block `index` with float weights that are read on [first use](StoredWeight).
    ///
    /// # Errors
    /// When a norm, a bias or a quantized weight cannot be read, or a norm or a bias is not finite.
    pub fn stored_block(&self, index: usize, ropes: &RopeTables) -> Result<Block> {
        self.block_of(index, ropes, |module, shape| self.linear_weight(module, shape))
    }

    fn block_of(
        &self,
        index: usize,
        ropes: &RopeTables,
        weight: impl Fn(&str, [usize; 2]) -> Result<WeightBody>,
    ) -> Result<Block> {
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
            linears.insert(id, Linear::new(Arc::new(weight(&module, shape)?), bias));
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
}
