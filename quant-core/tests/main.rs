//! The tests of the pipeline in one binary, except `allocation.rs`, which has its own allocator: it is linked once, and long
//! tests run next to others.
//!
//! `cargo test --workspace --test pipeline families::` runs those of one file.

mod awq;
mod candle_oracle;
mod common;
mod composition;
#[path = "families/configs.rs"]
mod configs;
mod containers;
mod decoder_definition;
mod determinism;
mod expert_units;
mod experts;
mod extensions;
mod families;
mod folding;
mod gguf_extensions;
mod gptq;
mod grouped_experts;
mod input_order;
mod kv_cache;
mod multimodal;
mod mxfp4_source;
mod opt;
mod packing;
mod parts;
mod qoq;
mod reads;
mod real_models;
mod residence;
mod resume_in_block;
mod roundings;
mod side_values;
#[path = "common/sink.rs"]
mod sink;
mod smoothquant;
mod stages;
#[path = "../examples/support/tiny.rs"]
mod tiny;
#[cfg(feature = "store")]
mod unit_objects;
mod units;

/// Cargo compiles only the files that are listed above, and `allocation.rs`, which is a target of its own.
#[test]
fn every_file_is_listed() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests");
    let mut files: Vec<String> = std::fs::read_dir(directory)
        .unwrap()
        .filter_map(|entry| Some(entry.unwrap().file_name().to_str()?.strip_suffix(".rs")?.to_owned()))
        .filter(|name| !["main", "allocation"].contains(&name.as_str()))
        .collect();
    files.sort();
    let listed: Vec<&str> = include_str!("main.rs")
        .lines()
        .filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'))
        .filter(|name| !["common", "configs", "sink", "tiny"].contains(name))
        .collect();
    assert_eq!(files, listed);
}
