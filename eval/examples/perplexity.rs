//! Measures the perplexity of a float or quantized checkpoint on a text, with its standard error.
//!
//! ```text
//! cargo run --release -p quant-evaluator --example perplexity -- MODEL TEXT
//! ```
use std::path::Path;

use quant_core::calibrate::{TextTokenizer, TokenizerSettings, read_documents};
use quant_core::checkpoint::ModelDirectory;
use quant_core::digest::sha256_hex;
use quant_core::model::{Decoder, Model};
use quant_core::{CancelToken, Result, Silent};
use quant_evaluator::{EvaluationText, Journal, Profile, Tokenization, perplexity};

fn main() -> Result<()> {
    let [model, text] = [1, 2].map(|i| std::env::args().nth(i).expect("MODEL TEXT"));
    let (directory, file) = (ModelDirectory::open(Path::new(&model))?, Path::new(&text));
    let path = directory.tokenizer_path().expect("the model has a tokenizer");
    let (tokenizer, settings) = (TextTokenizer::open(&path)?, TokenizerSettings::open(&directory)?);
    let sha256 = sha256_hex(std::fs::read(&path).expect("it was just read"));
    let tokenization = Tokenization { tokenizer: &tokenizer, settings: &settings, sha256 };
    // The evaluation of the GPTQ paper, with windows of 512 tokens.
    let profile = Profile::gptq(512)?;
    let text = EvaluationText::new(&tokenization, &read_documents(file)?, profile.into(), None, file)?;

    let cancel = CancelToken::new();
    let decoder = Decoder::load(&Model::open(&directory)?, profile.window(), &Silent, &cancel)?;
    let scores = perplexity(&decoder, &text, &mut Journal::none(), &Silent, &cancel)?;
    let error = scores.perplexity.standard_error.unwrap_or_default();
    println!("{:.4} ± {error:.4}", scores.perplexity.mean);
    Ok(())
}
