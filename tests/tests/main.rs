//! All tests of the program in one binary, except those with a GPU: it is linked once, and long tests run next to
//! others.
//!
//! `cargo test --workspace --test suite gguf::` runs those of one file.

mod bad_input;
mod bad_requests;
mod book;
mod candle;
mod chat;
mod ci_action;
mod containers;
mod end_to_end;
mod eval_shards;
mod evaluation;
mod faults;
mod float_sources;
mod foreign_engine;
mod fp8_cache;
mod full_disk;
mod gate;
mod generate;
mod gguf;
mod gguf_awq;
mod gguf_code_books;
mod gguf_description;
mod gguf_directories;
mod gguf_experts;
mod gguf_floats;
mod gguf_plan;
mod gguf_requests;
mod gguf_resume;
mod goldens;
mod gptq;
mod guide;
mod hostile_text;
mod interrupt;
mod jobs;
mod kv_cache;
mod library;
mod limits;
mod memory_budget;
mod memory_per_tensor;
mod mistakes;
mod multimodal;
mod not_finite;
mod odd_inputs;
mod opt;
mod qoq;
mod qserve;
mod quantized_checkpoint;
mod readme_commands;
mod schemes;
mod smoothquant;
mod sources;
mod stored_reference;
mod style;
mod surroundings;
mod verify;

/// Cargo compiles only the files that are listed above, and `cuda.rs`, which is a target of its own.
#[test]
fn every_file_is_listed() {
    let directory = quant_tests::workspace_root().join("tests/tests");
    let mut files: Vec<String> = std::fs::read_dir(directory)
        .unwrap()
        .filter_map(|entry| Some(entry.unwrap().file_name().to_str()?.strip_suffix(".rs")?.to_owned()))
        .filter(|name| !["main", "cuda"].contains(&name.as_str()))
        .collect();
    files.sort();
    let listed: Vec<&str> = include_str!("main.rs")
        .lines()
        .filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'))
        .collect();
    assert_eq!(files, listed);
}
