//! A whole model in memory, for evaluation: prefill of a batch of windows, and decoding one
//! position after another.

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
use crate::{CancelToken, Error, Event, Observer, Result};

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
    /// When a tensor cannot be read or is not finite, the model has fewer positions, or the token pulls.
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
            blocks.push(model.block(index, &rope)?);
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

    /// The same decoder with another cache of keys and values, simulated: they are rounded to what it gives back.
    /// A decoder is loaded with what the model's configuration says; without a scheme they stay floats.
    pub fn with_kv(self, kv: Option<KvScheme>) -> Self {
        self.with_caching(kv.map_or(KvCaching::Float, KvCaching::Simulated))
    }

    /// The same with keys and values cached in this way in all blocks.
    pub fn with_caching(mut self, caching: KvCaching) -> Self {
        self.blocks = self.blocks.into_iter().map(|block| block.with_caching(caching)).collect();
        self
    }

    /// What becomes of keys and values before a query sees them.
    pub fn caching(&self) -> KvCaching {
        self.blocks.first().map_or(KvCaching::Float, Block::caching)
    }

    /// The same with floats of 16 bits in the kernels' pages where keys and values were cached as `f32`, if the
    /// kernels hold such heads: what engines do, for those who measure their speed.
    pub fn with_half_cache(self) -> Self {
        match self.caching() {
            KvCaching::Float if KvCaching::refusal(Some(KvType::F16), &self.attentions).is_none() => {
                self.with_caching(KvCaching::Kernels(KvType::F16))
            }
            _ => self,
        }
    }

    /// The same decoder with its quantized linears packed for the kernels: few tokens at once are multiplied
    /// several times faster, and numbers differ in the last bits of an `f32`. A quantized cache of keys and values
    /// becomes the kernels' own, and attention runs on it; where they do not hold such heads
    /// ([`KvCaching::refusal`]), it stays simulated.
    ///
    /// # Errors
    /// As [`WeightBody::packed`].
    pub fn packed(mut self) -> Result<Self> {
        let runner = Runner::new(Rayon);
        self.head = self.head.packed(&runner)?;
        self.blocks = self.blocks.into_iter().map(|block| block.packed(&runner)).collect::<Result<_>>()?;
        Ok(self.with_kernel_cache())
    }

    /// The same decoder with its quantized linears on a GPU, multiplied by the kernels there. All else stays on the
    /// processor: norms, rotations, attention, which runs as [`packed`](Self::packed) has it, and what is not quantized.
    ///
    /// # Errors
    /// As [`WeightBody::on_cuda`].
    pub fn on_cuda(mut self, runner: &CudaRunner) -> Result<Self> {
        self.head = self.head.on_cuda(runner)?;
        self.blocks = self.blocks.into_iter().map(|block| block.on_cuda(runner)).collect::<Result<_>>()?;
        Ok(self.with_kernel_cache())
    }

    /// A simulated cache becomes the kernels' own where they hold such heads.
    fn with_kernel_cache(self) -> Self {
        match self.caching() {
            KvCaching::Simulated(kv) => match (kv.kind(), KvCaching::refusal(kv.kind(), &self.attentions)) {
                (Some(kind), None) => self.with_caching(KvCaching::Kernels(kind)),
                _ => self,
            },
            _ => self,
        }
    }

    /// Rows of the embedding, the width of logits.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The longest window the decoder was loaded for.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Features of the hidden states.
    pub fn width(&self) -> usize {
        self.hidden
    }

    /// How many blocks there are.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// The linears of block `index` with their names, in order of the block's graph; none where there is no such
    /// block.
    pub fn linears(&self, index: usize) -> impl Iterator<Item = (NodeId, &str)> {
        let block = self.blocks.get(index).into_iter();
        block.flat_map(|b| b.graph().linears().map(|(id, name, ..)| (id, name)))
    }

    /// The hidden states of equally long windows before the first block, `[batch, positions, hidden]`. Where blocks have
    /// inputs of their own, or read another's keys and values, these stand behind the hidden states, here and between
    /// the blocks.
    ///
    /// # Errors
    /// When the windows differ in length or are longer than the decoder allows, or a token is outside the
    /// vocabulary.
    pub fn embed(&self, windows: &[&[u32]]) -> Result<Tensor> {
        self.embed_from(windows, 0)
    }

    /// The same for windows whose first token stands at position `start`.
    fn embed_from(&self, windows: &[&[u32]], start: usize) -> Result<Tensor> {
        let length = windows.first().map_or(0, |w| w.len());
        let mut values = Vec::with_capacity(windows.len() * length * self.hidden);
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
            values = inputs.beside(&tokens, &values)?;
            width = values.len().checked_div(tokens.len()).unwrap_or(width);
        }
        Ok(Tensor::from_vec(values, (windows.len(), length, width), &Device::Cpu)?)
    }

    /// How many norms and gates of block `index` the kernels compute with the products that read them; none where there is
    /// no such block.
    pub fn fused_operations(&self, index: usize) -> usize {
        self.blocks.get(index).map_or(0, Block::fused_operations)
    }

    /// How many experts of block `index` run in one call of the kernels; none where there is no such block.
    pub fn experts_in_one_call(&self, index: usize) -> usize {
        self.blocks.get(index).map_or(0, Block::experts_in_one_call)
    }

    /// What block `index` makes of hidden states that begin at position 0; `tap` sees what its linears
    /// read.
    ///
    /// # Errors
    /// When there is no such block, the states are longer than the decoder allows, or `tap` fails.
    pub fn advance(&self, index: usize, hidden: &Tensor, tap: &mut dyn Tap) -> Result<Tensor> {
        let block =
            self.blocks.get(index).ok_or_else(|| Error::Internal(format!("there is no block {index}")))?;
        block.forward(hidden, 0, None, tap).map_err(|e| e.in_block(index))
    }

    fn finish(&self, hidden: &Tensor) -> Result<Tensor> {
        match &self.final_norm {
            Some((op, norm)) => norm.apply(op, hidden),
            None => Ok(hidden.clone()),
        }
    }

    /// Prefill: the normed hidden states of equally long windows, `[batch, positions, hidden]`.
    /// [`logits`](Self::logits) turns any part of them into logits.
    ///
    /// # Errors
    /// When a token is outside the vocabulary or the windows are longer than the decoder allows.
    pub fn hidden(&self, windows: &[&[u32]]) -> Result<Tensor> {
        self.hidden_through(windows, &mut |_, hidden| Ok(hidden))
    }

    /// As [`hidden`](Self::hidden); what leaves each block, `[batch, positions, hidden]`, passes
    /// through `after` with the block's index, which may look at it or change it.
    ///
    /// # Errors
    /// As [`hidden`](Self::hidden), and those of `after`.
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

    /// Logits of normed hidden states: `[…, hidden]` → `[…, vocab]`.
    ///
    /// # Errors
    /// When the width is another.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let logits = self.head.forward(hidden)?;
        let LogitsTransform { scale, softcap } = self.logits;
        let logits = if scale == 1.0 { logits } else { (logits * f64::from(scale))? };
        match softcap {
            Some(cap) => soft_capped(&logits, cap),
            None => Ok(logits),
        }
    }

    /// The head by itself, for who takes logits a range of the vocabulary at a time.
    ///
    /// # Errors
    /// When its weight cannot be read or is not finite.
    pub fn head(&self) -> Result<Head<'_>> {
        Head::new(&self.head, self.logits)
    }

    /// An empty cache that fits this decoder.
    pub fn cache(&self) -> SequenceCache {
        SequenceCache::new(self.blocks.len(), self.positions)
    }

    /// Appends `tokens` of one sequence to the cache and returns the last one's logits `[vocab]`.
    ///
    /// # Errors
    /// When a token is outside the vocabulary, or the cache is full.
    pub fn step(&self, tokens: &[u32], cache: &mut SequenceCache) -> Result<Tensor> {
        let start = cache.positions();
        if tokens.is_empty() || start + tokens.len() > self.positions {
            return Err(Error::Internal(format!(
                "{} tokens after {start} do not fit {} positions",
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
