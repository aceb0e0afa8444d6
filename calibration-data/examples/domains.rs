//! Lists the domains of the default calibration set, and the first words of its first documents.
//!
//! ```text
//! cargo run -p quant-calibration-data --example domains
//! ```
use quant_calibration_data::{CORPUS, documents};

fn main() {
    for domain in CORPUS {
        println!("{}: {} bytes", domain.name, domain.text.len());
    }
    for document in documents(CORPUS).take(CORPUS.len()) {
        let words: Vec<&str> = document.text.split_whitespace().take(8).collect();
        println!("{}: {} …", document.domain, words.join(" "));
    }
}
