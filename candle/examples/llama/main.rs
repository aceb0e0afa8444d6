//! Continues a prompt with a quantized Llama on candle's `QMatMul`, always with the most likely token.
//!
//! ```text
//! cargo run --release -p quant-candle --example llama -- OUT "The miller opened the door" 32
//! ```
mod model;

use std::io::Write;

use model::{Cache, Llama, greedy};
use quant_candle::{Checkpoint, Rayon, Runner};
use tokenizers::Tokenizer;

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let [path, prompt, count] = [1, 2, 3].map(|i| std::env::args().nth(i).expect("CHECKPOINT PROMPT TOKENS"));
    let checkpoint = Checkpoint::open(path.as_ref(), &Runner::new(Rayon))?;
    let tokenizer = Tokenizer::from_file(format!("{path}/tokenizer.json"))?;
    let llama = Llama::load(&checkpoint)?;
    let mut next = tokenizer.encode(prompt.as_str(), true)?.get_ids().to_vec();
    let (mut cache, mut decoder) = (Cache::default(), tokenizer.decode_stream(true));
    print!("{prompt}");
    for _ in 0..count.parse()? {
        let token = greedy(&llama.forward(&next, &mut cache)?);
        if let Some(text) = decoder.step(token)? {
            print!("{text}");
            std::io::stdout().flush()?;
        }
        next = vec![token];
    }
    println!();
    Ok(())
}
