//! Scores a custom model with the evaluator. The model counts which token follows which in its training text.

use std::path::Path;

use quant_core::calibrate::{TextTokenizer, TokenizerSettings, read_documents};
use quant_core::checkpoint::ModelDirectory;
use quant_core::digest::sha256_hex;
use quant_core::{CancelToken, Result, Silent};
use quant_evaluator::{EvaluationText, Journal, LogitsModel, Profile, Tokenization, perplexity};

/// Logarithms of the counts of token pairs, with one added to each count.
struct Bigrams {
    vocab: usize,
    logits: Vec<f32>,
}

impl Bigrams {
    fn of(vocab: usize, tokens: &[u32]) -> Self {
        let mut counts = vec![1.0_f32; vocab * vocab];
        for pair in tokens.windows(2) {
            counts[pair[0] as usize * vocab + pair[1] as usize] += 1.0;
        }
        Self { vocab, logits: counts.into_iter().map(f32::ln).collect() }
    }
}

impl LogitsModel for Bigrams {
    fn vocab(&self) -> usize {
        self.vocab
    }

    fn logits(
        &self,
        tokens: &[u32],
        first: usize,
        out: &mut Vec<f32>,
    ) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
        for &token in &tokens[first..] {
            out.extend_from_slice(&self.logits[token as usize * self.vocab..][..self.vocab]);
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    let [model, text] = [1, 2].map(|i| std::env::args_os().nth(i).expect("score MODEL TEXT"));
    let (directory, file) = (ModelDirectory::open(Path::new(&model))?, Path::new(&text));
    let path = directory.tokenizer_path().expect("the model has a tokenizer");
    let tokenizer = TextTokenizer::open(&path)?;
    let settings = TokenizerSettings::open(&directory)?;
    let sha256 = sha256_hex(std::fs::read(&path).expect("the file was just read"));
    let tokenization = Tokenization { tokenizer: &tokenizer, settings: &settings, sha256 };
    let profile = Profile::gptq(128)?.into();
    let text = EvaluationText::new(&tokenization, &read_documents(file)?, profile, Some(16), file)?;

    let tokens: Vec<u32> = text.windows.iter().flat_map(|window| window.tokens.iter().copied()).collect();
    let vocab = directory.fields().require_usize("vocab_size")?;
    let bigrams = Bigrams::of(vocab, &tokens);
    let scores =
        perplexity(&bigrams as &dyn LogitsModel, &text, &mut Journal::none(), &Silent, &CancelToken::new())?;
    println!("{:.6}", scores.perplexity.mean);
    Ok(())
}
