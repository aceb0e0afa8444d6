//! Scores a custom model with the evaluator alone. The model counts which byte follows which in its training text.

use std::ops::Range;
use std::path::Path;

use quant_evaluator::{
    CancelToken, EncodedText, EngineError, EvaluationText, Journal, LogitsBatch, LogitsModel, Profile, Result,
    Silent, Tokenizer, UnscoredWindow, perplexity,
};

const VOCAB: usize = 256;

/// Bytes as tokens.
#[derive(Debug)]
struct Bytes;

impl Tokenizer for Bytes {
    fn encode(&self, texts: &[&str]) -> Result<Vec<EncodedText>> {
        let one = |text: &&str| text.bytes().enumerate().map(|(i, byte)| (byte.into(), i..i + 1)).collect();
        Ok(texts.iter().map(one).collect())
    }
}

/// Logarithms of the counts of token pairs, with one added to each count: `[previous, next]`.
struct Bigrams(Vec<f32>);

impl Bigrams {
    fn of(tokens: &[u8]) -> Self {
        let mut counts = vec![1.0_f32; VOCAB * VOCAB];
        for pair in tokens.windows(2) {
            counts[usize::from(pair[0]) * VOCAB + usize::from(pair[1])] += 1.0;
        }
        Self(counts.into_iter().map(f32::ln).collect())
    }
}

impl LogitsModel for Bigrams {
    fn vocab(&self) -> usize {
        VOCAB
    }

    fn logits(&self, tokens: &[u32], first: usize, out: &mut Vec<f32>) -> Result<(), EngineError> {
        self.start(&[UnscoredWindow::new(tokens, first)])?.logits(0, 0..tokens.len() - first, out)
    }

    fn max_windows(&self) -> usize {
        4
    }

    fn start<'a>(&'a self, windows: &[UnscoredWindow<'_>]) -> Result<Box<dyn LogitsBatch + 'a>, EngineError> {
        let last = windows.iter().map(|window| window.tokens[window.first..].to_vec()).collect();
        Ok(Box::new(Running { model: self, last }))
    }
}

/// Windows that have been run: the tokens before those that are predicted.
struct Running<'a> {
    model: &'a Bigrams,
    last: Vec<Vec<u32>>,
}

impl LogitsBatch for Running<'_> {
    fn logits(
        &mut self,
        window: usize,
        positions: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), EngineError> {
        for &token in &self.last[window][positions] {
            out.extend_from_slice(&self.model.0[token as usize * VOCAB..][..VOCAB]);
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    let path = std::env::args_os().nth(1).expect("score TEXT");
    let document = std::fs::read_to_string(&path).expect("the text is UTF-8");
    let bigrams = Bigrams::of(document.as_bytes());
    let profile = Profile::gptq(512)?.into();
    let text = EvaluationText::new(&Bytes, &[document], profile, Some(16), Path::new(&path))?;
    let model: &dyn LogitsModel = &bigrams;
    let scores = perplexity(model, &text, &mut Journal::none(), &Silent, &CancelToken::new())?;
    println!("{:.6}", scores.perplexity.mean);
    Ok(())
}
