//! A whole model in memory: prefill of a batch of windows, and incremental decoding of one sequence.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use quant_kernels_cpu::Rayon;
use quant_kernels_cpu::attention::KvType;
use quant_kernels_cpu::candle::Runner;

use super::per_layer::PerLayer;
use super::soft_cap::soft_capped;
use super::{
    AttentionShape, Block, CudaRunner, EmbeddingNorm, Head, KvCaching, KvScheme, Linear, LogitsTransform,
    Model, NoTap, NodeId, Norm, Op, PositionTable, SequenceCache, Tap, WeightBody,
};
use crate::{CancelToken, Error, Event, Observer, Result, allocate};

/// All blocks, the embedding and the head.
///
/// ```
/// use quant_core::checkpoint::ModelDirectory;
/// use quant_core::model::{Decoder, Model};
/// use quant_core::{CancelToken, Silent};
/// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/support/tiny.rs")); }
/// # let temporary = tempfile::tempdir().unwrap();
/// # let path = temporary.path();
/// # tiny::tiny_llama(path).unwrap();
///
/// let model = Model::open(&ModelDirectory::open(path)?)?; // float or quantized
/// let decoder = Decoder::load(&model, 16, &Silent, &CancelToken::new())?;
/// let hidden = decoder.hidden(&[&[1, 2, 3], &[4, 5, 6]])?; // two windows of three tokens
/// assert_eq!(decoder.logits(&hidden)?.dims(), [2, 3, 64]);
/// # Ok::<(), quant_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Decoder {
    hidden: usize,
    vocab: usize,
    embedding: Arc<WeightBody>,
    embedding_scale: f32,
    embedding_norm: Option<EmbeddingNorm>,
    position_table: Option<PositionTable>,
    per_layer_inputs: Option<PerLayer>,
    blocks: Vec<Block>,
    final_norm: Option<(Op, Norm)>,
    head: Linear,
    logits: LogitsTransform,
    positions: usize,
    attentions: Vec<AttentionShape>,
}

impl Decoder {
    /// Loads the model for windows of up to `positions` tokens.
    ///
    /// # Errors
    /// When a tensor cannot be read or is not finite, the model supports fewer positions, or the run is cancelled.
    pub fn load(
        model: &Model,
        positions: usize,
        observer: &dyn Observer,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let a = model.architecture();
        let rope = model.rope(positions)?;
        let position_table = model.position_table(positions)?;
        observer.event(&Event::StageStarted { stage: "load", unit: "block", units: a.layers as u64 });
        let embedding = model.embedding()?;
        let head = model.head(&embedding)?;
        let mut blocks = Vec::with_capacity(a.layers);
        for index in 0..a.layers {
            cancel.check()?;
            blocks.push(model.running_block(index, &rope)?);
            observer.event(&Event::UnitDone { detail: format!("block {index}") });
        }
        observer.event(&Event::StageDone);
        Ok(Self {
            hidden: a.hidden,
            vocab: a.vocab,
            embedding,
            embedding_scale: model.embedding_scale()?,
            embedding_norm: model.embedding_norm()?,
            position_table,
            per_layer_inputs: model.per_layer_inputs()?,
            blocks,
            final_norm: model.final_norm()?,
            head,
            logits: a.logits,
            positions,
            attentions: a.attentions(),
        }
        .with_kv(model.kv_scheme()))
    }

    /// Returns the decoder with a simulated cache: keys and values are rounded as the cache would round them, or stay
    /// float if `kv` is `None`. By default, a decoder uses the cache of the model's configuration.
    pub fn with_kv(self, kv: Option<KvScheme>) -> Self {
        self.with_caching(kv.map_or(KvCaching::Float, KvCaching::Simulated))
    }

    /// Returns the decoder with this cache of keys and values in all blocks.
    pub fn with_caching(mut self, caching: KvCaching) -> Self {
        self.blocks = self.blocks.into_iter().map(|block| block.with_caching(caching)).collect();
        self
    }

    /// Returns how the decoder caches keys and values.
    pub fn caching(&self) -> KvCaching {
        self.blocks.first().map_or(KvCaching::Float, Block::caching)
    }

    /// Replaces an `f32` cache with the kernels' cache of 16-bit floats, if the kernels support the attention shapes.
    /// Engines usually have 16-bit caches, so speed should be measured with one.
    pub fn with_half_cache(self) -> Self {
        match self.caching() {
            KvCaching::Float if KvCaching::refusal(Some(KvType::F16), &self.attentions).is_none() => {
                self.with_caching(KvCaching::Kernels(KvType::F16))
            }
            _ => self,
        }
    }

    /// Returns the decoder with its quantized linears packed for the kernels. Products of few tokens are much faster,
    /// and results differ slightly because of rounding. If keys and values are quantized, attention runs on the
    /// kernels' own cache, unless they do not support it ([`KvCaching::refusal`]).
    ///
    /// # Errors
    /// As [`WeightBody::packed`].
    pub fn packed(mut self) -> Result<Self> {
        let runner = Runner::new(Rayon);
        self.head = self.head.packed(&runner)?;
        self.blocks = self.blocks.into_iter().map(|block| block.packed(&runner)).collect::<Result<_>>()?;
        Ok(self.with_kernel_cache())
    }

    /// Returns the decoder with its quantized linears on a GPU. All other operations stay on the CPU, where attention
    /// uses the same cache as after [`packed`](Self::packed).
    ///
    /// # Errors
    /// As [`WeightBody::on_cuda`].
    pub fn on_cuda(mut self, runner: &CudaRunner) -> Result<Self> {
        self.head = self.head.on_cuda(runner)?;
        self.blocks = self.blocks.into_iter().map(|block| block.on_cuda(runner)).collect::<Result<_>>()?;
        Ok(self.with_kernel_cache())
    }

    fn with_kernel_cache(self) -> Self {
        match self.caching() {
            KvCaching::Simulated(kv) => match (kv.kind(), KvCaching::refusal(kv.kind(), &self.attentions)) {
                (Some(kind), None) => self.with_caching(KvCaching::Kernels(kind)),
                _ => self,
            },
            _ => self,
        }
    }

    /// Returns the vocabulary size: the rows of the embedding and the width of logits.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Returns the longest window the decoder was loaded for.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Returns the number of features of the hidden states.
    pub fn width(&self) -> usize {
        self.hidden
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the linears of block `index` with their names, in the order of the block's graph; empty if there is no
    /// such block.
    pub fn linears(&self, index: usize) -> impl Iterator<Item = (NodeId, &str)> {
        let block = self.blocks.get(index).into_iter();
        block.flat_map(|b| b.graph().linears().map(|(id, name, ..)| (id, name)))
    }

    /// Returns the input of the first block for windows of equal length, `[batch, positions, features]`. The first
    /// `hidden` features are the embeddings. Some families append further values, which blocks read.
    ///
    /// # Errors
    /// When the windows differ in length, a token is outside the vocabulary, or the model has learned positions and the
    /// windows are longer than [`positions`](Self::positions).
    pub fn embed(&self, windows: &[&[u32]]) -> Result<Tensor> {
        self.embed_from(windows, 0)
    }

    /// Like [`embed`](Self::embed), for windows whose first token is at position `start`.
    fn embed_from(&self, windows: &[&[u32]], start: usize) -> Result<Tensor> {
        let length = windows.first().map_or(0, |w| w.len());
        let mut values =
            allocate::room(windows.len() * length * self.hidden, "the embedded tokens of a batch")?;
        let (embedding, mut scratch) = (self.embedding.read()?, Vec::new());
        for window in windows {
            if window.len() != length {
                return Err(Error::Internal("windows of a batch differ in length".into()));
            }
            for &token in *window {
                let row = token as usize;
                if row >= self.vocab {
                    return Err(Error::Internal(format!("token {token} is outside the vocabulary")));
                }
                values.extend_from_slice(embedding.rows(row..row + 1, &mut scratch)?);
            }
        }
        if self.embedding_scale != 1.0 {
            values.iter_mut().for_each(|v| *v *= self.embedding_scale);
        }
        if let Some(norm) = &self.embedding_norm {
            values = norm.apply(values, self.hidden)?;
        }
        if let Some(table) = &self.position_table {
            table.add_to(&mut values, |token| start + token % length)?;
        }
        let mut width = self.hidden;
        if let Some(inputs) = &self.per_layer_inputs {
            let tokens: Vec<u32> = windows.iter().flat_map(|window| window.iter().copied()).collect();
            values = inputs.append_inputs(&tokens, &values)?;
            width = values.len().checked_div(tokens.len()).unwrap_or(width);
        }
        Ok(Tensor::from_vec(values, (windows.len(), length, width), &Device::Cpu)?)
    }

    /// Returns how many norms and gates of block `index` the kernels compute together with linears; 0 if there is no
    /// such block.
    pub fn fused_operations(&self, index: usize) -> usize {
        self.blocks.get(index).map_or(0, Block::fused_operations)
    }

    /// Returns how many experts of block `index` run in one kernel call; 0 if there is no such block.
    pub fn experts_in_one_call(&self, index: usize) -> usize {
        self.blocks.get(index).map_or(0, Block::experts_in_one_call)
    }

    /// Runs block `index` on hidden states that begin at position 0; `tap` observes the inputs of its linears.
    ///
    /// # Errors
    /// [`Error::Internal`] when there is no such block; otherwise as [`Block::forward`].
    pub fn advance(&self, index: usize, hidden: &Tensor, tap: &mut dyn Tap) -> Result<Tensor> {
        let block =
            self.blocks.get(index).ok_or_else(|| Error::Internal(format!("block {index} does not exist")))?;
        block.forward(hidden, 0, None, tap).map_err(|e| e.in_block(index))
    }

    fn finish(&self, hidden: &Tensor) -> Result<Tensor> {
        match &self.final_norm {
            Some((op, norm)) => norm.apply(op, hidden),
            None => Ok(hidden.clone()),
        }
    }

    /// Returns the normalized hidden states of windows of equal length, `[batch, positions, hidden]`.
    /// [`logits`](Self::logits) converts any part of them to logits.
    ///
    /// # Errors
    /// When the windows differ in length or are longer than the decoder supports, or a token is outside the vocabulary;
    /// otherwise as [`Block::forward`].
    pub fn hidden(&self, windows: &[&[u32]]) -> Result<Tensor> {
        self.hidden_through(windows, &mut |_, hidden| Ok(hidden))
    }

    /// Like [`hidden`](Self::hidden), but passes the index and the output of each block to `after`, which may inspect
    /// or change the output.
    ///
    /// # Errors
    /// As [`hidden`](Self::hidden), and errors of `after`.
    pub fn hidden_through(
        &self,
        windows: &[&[u32]],
        after: &mut dyn FnMut(usize, Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut hidden = self.embed(windows)?;
        for index in 0..self.blocks.len() {
            hidden = after(index, self.advance(index, &hidden, &mut NoTap)?)?;
        }
        self.finish(&hidden)
    }

    /// Returns the logits of normalized hidden states: `[…, hidden]` → `[…, vocab]`.
    ///
    /// # Errors
    /// When the width does not match.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let logits = self.head.forward(hidden)?;
        let LogitsTransform { scale, softcap } = self.logits;
        let logits = if scale == 1.0 { logits } else { (logits * f64::from(scale))? };
        match softcap {
            Some(cap) => soft_capped(&logits, cap),
            None => Ok(logits),
        }
    }

    /// Returns the head, for callers that compute part of the logits.
    ///
    /// # Errors
    /// When its weight cannot be read or is not finite.
    pub fn head(&self) -> Result<Head<'_>> {
        Head::new(&self.head, self.logits)
    }

    /// Returns an empty cache for this decoder.
    pub fn cache(&self) -> SequenceCache {
        SequenceCache::new(self.blocks.len(), self.positions)
    }

    /// Appends `tokens` of one sequence to the cache and returns the logits of the last one, `[vocab]`.
    ///
    /// # Errors
    /// When `tokens` is empty, a token is outside the vocabulary, or the sequence would exceed
    /// [`positions`](Self::positions); otherwise as [`Block::forward`].
    pub fn step(&self, tokens: &[u32], cache: &mut SequenceCache) -> Result<Tensor> {
        let start = cache.positions();
        if tokens.is_empty() || start + tokens.len() > self.positions {
            return Err(Error::Internal(format!(
                "{} tokens after {start} do not fit in {} positions",
                tokens.len(),
                self.positions
            )));
        }
        let mut hidden = self.embed_from(&[tokens], start)?;
        for (index, block) in self.blocks.iter().enumerate() {
            let layer = Some(cache.layer(index));
            hidden = block.forward(&hidden, start, layer, &mut NoTap).map_err(|e| e.in_block(index))?;
        }
        cache.advance(tokens.len());
        let last = hidden.narrow(1, tokens.len() - 1, 1)?;
        Ok(self.logits(&self.finish(&last)?)?.flatten_all()?)
    }
}
