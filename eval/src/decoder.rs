//! Runs decoders of `quant-core` and stored references for a panel; adapts the tokenizers of models.

use std::ops::Range;

use quant_core::calibrate::{TextTokenizer, TokenizerSettings};
use quant_core::model::{Decoder, HEAD_TILE, Head, HeadInputs};
use quant_formats::{Error, Result};

use crate::noise::disturb;
use crate::score::{InMemory, Origin, Runner, StageInputs};
use crate::vocabulary::{Buffers, Output, Positions, TILE};
use crate::{EncodedText, StoredReference, Tokenizer, Window};

const _: () = assert!(TILE == HEAD_TILE, "a column must always be computed by the same product");

impl Output for Head<'_> {
    fn vocab(&self) -> usize {
        self.vocab()
    }

    fn width(&self) -> usize {
        self.width()
    }

    fn inputs(&self, hidden: Vec<f32>) -> Result<Vec<f32>> {
        self.inputs(hidden)
    }

    fn is_whole(&self) -> bool {
        self.is_whole()
    }

    fn at<'s>(&'s self, inputs: &'s [f32]) -> Result<Box<dyn Positions + 's>> {
        Ok(Box::new(self.at(inputs)?))
    }

    fn all_logits(&self, inputs: &[f32], out: &mut Vec<f32>) -> Result<()> {
        self.all_logits(inputs, out)
    }
}

impl Positions for HeadInputs<'_> {
    fn tile(&self, columns: Range<usize>, buffers: &mut Buffers, out: &mut Vec<f32>) -> Result<()> {
        self.logits(columns, &mut buffers.head, out)
    }
}

/// A decoder, and the seed of the noise on its blocks' outputs, if there is noise.
pub(crate) struct Blocks<'a>(pub(crate) &'a Decoder, pub(crate) Option<u64>);

impl<'a> Runner<'a> for Blocks<'a> {
    fn output(&self) -> Result<Box<dyn Output + 'a>> {
        Ok(Box::new(self.0.head()?))
    }

    fn run(
        &self,
        output: &dyn Output,
        windows: &[Window],
        batch: &[usize],
    ) -> Result<Box<dyn StageInputs + 'a>> {
        let tokens: Vec<&[u32]> = batch.iter().map(|&n| windows[n].input()).collect();
        let Self(decoder, noise) = *self;
        let hidden = match noise {
            None => decoder.hidden(&tokens)?,
            Some(seed) => decoder
                .hidden_through(&tokens, &mut |block, hidden| disturb(&hidden, seed, block, batch[0]))?,
        };
        let (_, length, width) = hidden.dims3()?;
        let all = hidden.flatten_all()?.to_vec1::<f32>()?;
        let mut scored = Vec::with_capacity(all.len());
        for (row, &number) in batch.iter().enumerate() {
            let start = row * length + windows[number].first - 1;
            scored.extend_from_slice(&all[start * width..(row + 1) * length * width]);
        }
        Ok(Box::new(InMemory(output.inputs(scored)?, output.width())))
    }

    fn disturbed(&self, seed: u64) -> Option<Origin<'a>> {
        Some(Box::new(Self(self.0, Some(seed))))
    }
}

impl<'a> Runner<'a> for &'a StoredReference {
    fn output(&self) -> Result<Box<dyn Output + 'a>> {
        Ok(Box::new(self.head()?))
    }

    fn run(&self, output: &dyn Output, _: &[Window], batch: &[usize]) -> Result<Box<dyn StageInputs + 'a>> {
        Ok(Box::new(InMemory(self.inputs(batch)?, output.width())))
    }
}

/// A model's tokenizer and its configuration.
#[derive(Debug)]
pub struct Tokenization<'a> {
    /// `tokenizer.json`.
    pub tokenizer: &'a TextTokenizer,
    /// `tokenizer_config.json`.
    pub settings: &'a TokenizerSettings,
    /// SHA-256 of `tokenizer.json`.
    pub sha256: String,
}

impl Tokenizer for Tokenization<'_> {
    fn encode(&self, texts: &[&str]) -> Result<Vec<EncodedText>> {
        self.tokenizer.encode_all_with_places(texts)
    }

    fn document_prefix(&self) -> Result<u32> {
        prefix(self)
    }

    fn adds_bos(&self) -> Option<bool> {
        self.settings.adds_bos()
    }

    fn sha256(&self) -> &str {
        &self.sha256
    }
}

/// Tokenizes conversations that a chat template has rendered. The template has written all special tokens, so none are
/// added. Conversations follow each other without a separator: pass them to
/// [`EvaluationText::new`](crate::EvaluationText::new) as one document.
#[derive(Debug)]
pub struct RenderedTokenization<'a>(pub Tokenization<'a>);

impl Tokenizer for RenderedTokenization<'_> {
    fn encode(&self, texts: &[&str]) -> Result<Vec<EncodedText>> {
        self.0.tokenizer.encode_all_rendered(texts)
    }

    fn document_prefix(&self) -> Result<u32> {
        Err(Error::usage(
            "lmeval-rolling scores documents of plain text, but the text consists of conversations",
            "choose a different ‹profile›, such as gptq-2048",
        ))
    }

    fn sha256(&self) -> &str {
        &self.0.sha256
    }
}

fn prefix(tokenization: &Tokenization<'_>) -> Result<u32> {
    let special = tokenization.settings.special_tokens()?;
    let named = ["bos_token", "eos_token"].iter().find_map(|n| special.iter().find(|(name, _)| name == n));
    let fault = |reason: String| Error::InputFile {
        path: tokenization.settings.path().to_owned(),
        line: None,
        reason,
        remedy: "add a tokenizer_config.json with a `bos_token` or `eos_token` of the vocabulary to the \
            model directory, or choose a different ‹profile›"
            .into(),
    };
    if tokenization.settings.fields().is_empty() {
        return Err(fault(
            "is missing, but lmeval-rolling needs the `bos_token` or `eos_token` in it".into(),
        ));
    }
    let (name, token) = named.ok_or_else(|| {
        fault(
            "has neither `bos_token` nor `eos_token`, one of which lmeval-rolling puts before documents"
                .into(),
        )
    })?;
    tokenization
        .tokenizer
        .token_id(token)?
        .ok_or_else(|| fault(format!("has a `{name}` that is not in the vocabulary of tokenizer.json")))
}
