//! Continues a text with a quantized Llama, always by the most likely token.
//!
//! ```text
//! cargo run --release -p quant-candle --example llama -- OUT "Once upon a time" 40
//! ```
use candle_core::D;
use quant_candle::llama::{Cache, Llama};
use quant_candle::{Checkpoint, Rayon, Runner};
use tokenizers::Tokenizer;

/// Returns `count` tokens that follow `tokens`.
pub fn continued(llama: &Llama, tokens: &[u32], count: usize) -> candle_core::Result<Vec<u32>> {
    let (mut cache, mut next, mut found) = (Cache::default(), tokens.to_vec(), Vec::new());
    while found.len() < count {
        let logits = llama.forward(&next, &mut cache)?;
        next = vec![logits.argmax(D::Minus1)?.to_scalar()?];
        found.extend(&next);
    }
    Ok(found)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [path, text, count] = [1, 2, 3].map(|i| std::env::args().nth(i).expect("CHECKPOINT TEXT TOKENS"));
    let checkpoint = Checkpoint::open(path.as_ref(), &Runner::new(Rayon))?;
    let tokenizer = Tokenizer::from_file(format!("{path}/tokenizer.json")).map_err(|e| e.to_string())?;
    let tokens = tokenizer.encode(text.as_str(), true).map_err(|e| e.to_string())?;
    let found = continued(&Llama::load(&checkpoint)?, tokens.get_ids(), count.parse()?)?;
    println!("{text}{}", tokenizer.decode(&found, true).map_err(|e| e.to_string())?);
    Ok(())
}
