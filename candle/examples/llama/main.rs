//! Generates text with a quantized Llama checkpoint, in a decoder that is written with candle's `QMatMul`.
//!
//! ```text
//! cargo run --release -p quant-candle --example llama -- OUT "Once upon a time" 40
//! ```

mod model;

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Error, Result};
use model::{Cache, Llama, greedy};
use quant_candle::{Checkpoint, Rayon, Runner};
use tokenizers::Tokenizer;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().context("usage: llama CHECKPOINT PROMPT [TOKENS]")?;
    let prompt = arguments.next().context("usage: llama CHECKPOINT PROMPT [TOKENS]")?;
    let count: usize = arguments.next().map_or(Ok(40), |count| count.parse())?;

    let checkpoint = Checkpoint::open(Path::new(&path), &Runner::new(Rayon))?;
    let llama = Llama::load(&checkpoint)?;
    let tokenizer = Tokenizer::from_file(Path::new(&path).join("tokenizer.json")).map_err(Error::msg)?;
    let mut tokens = tokenizer.encode(prompt, true).map_err(Error::msg)?.get_ids().to_vec();

    let (mut cache, mut next) = (Cache::default(), tokens.clone());
    let mut started = Instant::now();
    for i in 0..count {
        next = vec![greedy(&llama.forward(&next, &mut cache)?)];
        if i == 0 {
            started = Instant::now();
        }
        tokens.extend(&next);
    }
    println!("{}", tokenizer.decode(&tokens, true).map_err(Error::msg)?);
    let rate = count.saturating_sub(1) as f64 / started.elapsed().as_secs_f64();
    eprintln!("{rate:.1} tokens/s after the prompt");
    Ok(())
}
