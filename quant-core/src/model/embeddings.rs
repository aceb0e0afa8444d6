//! The input of a model's first block: embeddings, positions, and per-layer inputs.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::arch::{EmbeddingScale, LearnedPositions, Op};
use super::per_layer::PerLayer;
use super::{Linear, Model, Norm, PositionTable};
use crate::checkpoint::{Dtype, TensorSource, non_finite_in_whole, require_finite_bytes};
use crate::wording::counted;
use crate::{Error, Result};

pub(super) struct Rows {
    source: Arc<dyn TensorSource>,
    name: String,
    dtype: Dtype,
    /// Number of rows, and values per row.
    shape: [usize; 2],
}

impl std::fmt::Debug for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rows").field("name", &self.name).field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl Rows {
    fn of(model: &Model, name: String, shape: [usize; 2]) -> Result<Self> {
        let dtype = model.source().require(&name)?.dtype;
        Ok(Self { source: model.source().clone(), name, dtype, shape })
    }

    pub(super) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Passes the row of every token to the callback, with the token's index in `tokens`. Each distinct row is read
    /// once, in file order.
    pub(super) fn each(&self, tokens: &[u32], mut take: impl FnMut(usize, &[f32])) -> Result<()> {
        let [rows, width] = self.shape;
        let mut places: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (place, &token) in tokens.iter().enumerate() {
            if token as usize >= rows {
                return Err(Error::Internal(format!("`{}` has no row for token {token}", self.name)));
            }
            places.entry(token).or_default().push(place);
        }
        let (mut bytes, mut row) = (vec![0; width * self.dtype.size()], vec![0.0; width]);
        for (token, places) in places {
            self.source.read_range(&self.name, u64::from(token) * bytes.len() as u64, &mut bytes)?;
            require_finite_bytes(self.source.location(&self.name), &self.name, self.dtype, &bytes)
                .map_err(|e| non_finite_in_whole(self.source.as_ref(), self.dtype, e))?;
            self.dtype.widen(&bytes, &mut row);
            places.into_iter().for_each(|place| take(place, &row));
        }
        Ok(())
    }
}

#[derive(Debug)]
pub(crate) struct EmbeddingNorm {
    pub(super) op: Op,
    pub(super) norm: Norm,
}

impl EmbeddingNorm {
    pub(crate) fn apply(&self, values: Vec<f32>, width: usize) -> Result<Vec<f32>> {
        let tokens = values.len() / width.max(1);
        let x = Tensor::from_vec(values, (1, tokens, width), &Device::Cpu)?;
        Ok(self.norm.apply(&self.op, &x)?.flatten_all()?.to_vec1()?)
    }
}

impl Model {
    /// Returns the factor that embeddings are multiplied by; 1 if the family does not scale them.
    ///
    /// # Errors
    /// When the embedding is missing.
    pub fn embedding_scale(&self) -> Result<f32> {
        let a = self.architecture();
        Ok(match a.embedding_scale {
            None => 1.0,
            Some(EmbeddingScale::Exact(scale)) => scale as f32,
            Some(EmbeddingScale::Rounded(scale)) => {
                let module = a.embedding_module();
                let dtype = match self.module_scheme(&module) {
                    Some(_) => self.packed_scale_dtype(&module)?,
                    None => self.source().require(&self.embedding_name())?.dtype,
                };
                dtype.round(scale as f32)
            }
        })
    }

    /// Checks that a window is not longer than the model supports: the number of learned positions, or of the keys that
    /// an indexer selects.
    ///
    /// # Errors
    /// [`Error::Usage`] with that number.
    pub fn check_positions(&self, window: usize) -> Result<()> {
        let a = self.architecture();
        let limits = [
            (a.learned_positions.as_ref().map(|_| a.max_positions), "learned position", "of the model"),
            (
                a.selected_keys,
                "key",
                "that the model's indexer selects for each query, which is not supported",
            ),
        ];
        for (limit, noun, of) in limits {
            if let Some(limit) = limit.filter(|limit| window > *limit) {
                let noun = counted(limit, noun);
                let most = counted(limit, "token");
                return Err(Error::usage(
                    format!("windows of {window} tokens exceed the {noun} {of}"),
                    format!(
                        "request at most {most} with ‹seq_len›, ‹window›, or ‹prefill› and ‹decode› together"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Returns the rows that are added to the embeddings at positions `0..positions`, if the family has learned
    /// positions.
    ///
    /// # Errors
    /// As [`check_positions`](Self::check_positions), and when the rows cannot be read or are not finite.
    pub fn position_table(&self, positions: usize) -> Result<Option<PositionTable>> {
        self.check_positions(positions)?;
        let Some(LearnedPositions { table, offset }) = &self.architecture().learned_positions else {
            return Ok(None);
        };
        let dtype = self.source().require(table)?.dtype;
        let row = self.architecture().hidden * dtype.size();
        let mut bytes = vec![0; positions * row];
        self.source().read_range(table, (offset * row) as u64, &mut bytes)?;
        require_finite_bytes(self.source().location(table), table, dtype, &bytes)
            .map_err(|e| non_finite_in_whole(self.source().as_ref(), dtype, e))?;
        let mut values = vec![0.0; positions * self.architecture().hidden];
        dtype.widen(&bytes, &mut values);
        Ok(Some(PositionTable::new(self.architecture().hidden, values)))
    }

    /// Returns the embeddings of `tokens`, `[tokens, hidden]`, [scaled](Self::embedding_scale) and normalized if the
    /// family does so. Only the rows that are needed are read. The caller adds
    /// [`position_table`](Self::position_table).
    ///
    /// # Errors
    /// When the model is quantized, a token is outside the vocabulary, or a row cannot be read or is not finite.
    pub fn embed_streamed(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        self.require_float()?;
        tokens.iter().try_for_each(|&token| self.check_token(token))?;
        let (hidden, scale) = (self.architecture().hidden, self.embedding_scale()?);
        let rows = Rows::of(self, self.embedding_name(), [self.architecture().vocab, hidden])?;
        let mut out = vec![0.0; tokens.len() * hidden];
        rows.each(tokens, |place, row| {
            let values = out[place * hidden..(place + 1) * hidden].iter_mut().zip(row);
            values.for_each(|(out, value)| *out = if scale == 1.0 { *value } else { value * scale });
        })?;
        match self.embedding_norm()? {
            Some(norm) => norm.apply(out, hidden),
            None => Ok(out),
        }
    }

    pub(crate) fn per_layer_inputs(&self) -> Result<Option<PerLayer>> {
        let a = self.architecture();
        let Some(inputs) = &a.per_layer_inputs else { return Ok(None) };
        let features = a.layers * inputs.width;
        let rows = Rows::of(self, format!("{}.weight", inputs.table), [inputs.vocab, features])?;
        let scale = rows.dtype().round((inputs.width as f64).sqrt() as f32);
        let projection = self.linear_weight(&inputs.projection, [features, a.hidden])?;
        projection.load()?;
        let projection = Linear::new(Arc::new(projection), None);
        let norm = (inputs.norm.clone(), self.norm(inputs.norm.name(), false)?);
        Ok(Some(PerLayer { rows, scale, projection, norm }))
    }

    /// Checks that the vocabulary contains the token.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when it does not.
    pub fn check_token(&self, token: u32) -> Result<()> {
        let vocab = self.architecture().vocab;
        if (token as usize) < vocab {
            return Ok(());
        }
        Err(Error::Tokenizer {
            path: self.path().with_file_name("tokenizer.json"),
            reason: format!("produces token {token}, but the embedding has only {vocab} rows"),
        })
    }
}
