//! Fuzz targets: functions that take arbitrary bytes and panic if a property does not hold.
//!
//! `cargo test -p quant-fuzz` calls them with random bytes and with the saved inputs of `corpus/`, on stable Rust.
//! `cargo xtask fuzz` runs them under libFuzzer, guided by coverage and with AddressSanitizer, from the crate in
//! `libfuzzer/`, which is outside the workspace.
//!
//! To add a target, add a function here, a line in [`TARGETS`], a file in `libfuzzer/fuzz_targets`, and a program in
//! `libfuzzer/Cargo.toml`.
#![deny(unsafe_code)]

mod attention;
#[allow(unsafe_code, reason = "a C caller's side of the interface")]
mod c;
#[allow(unsafe_code, reason = "a C caller's side of the interface")]
mod c_abi;
#[allow(unsafe_code, reason = "a C caller's side of the interface")]
mod c_attention;
mod checkpoint_files;
mod float_files;
mod gguf;
mod gguf_files;
mod input;
mod job_files;
#[cfg(feature = "store")]
mod job_objects;
mod kernels;
mod kernels_floats;
mod names;
mod parsers;
mod shards;
mod texts;
mod written;

pub use attention::attention;
pub use c_abi::{c_abi, c_hadamard};
pub use c_attention::c_attention;
pub use checkpoint_files::checkpoint_files;
pub use float_files::float_files;
pub use gguf::gguf;
pub use gguf_files::{generation_settings, gguf_model, sentencepiece_model};
pub use job_files::{job_record, job_tokens, unit_files};
#[cfg(feature = "store")]
pub use job_objects::unit_objects;
pub use kernels::{pack, packed, round_trip};
pub use kernels_floats::floating_point;
pub use names::names;
pub use parsers::{
    channel_maxima, eval_journal, gate_policy, imatrix, model_config, recipe, results, safetensors,
    shard_index, stored_reference, text_lines, write_journal,
};
pub use shards::eval_shard;
pub use written::{manifest, quant_report, tokenizer_settings};

/// A target.
pub type Target = fn(&[u8]);

/// All targets by name. Those that need a feature are missing without it.
pub const TARGETS: &[(&str, Target)] = &[
    ("attention", attention),
    ("c_abi", c_abi),
    ("c_attention", c_attention),
    ("c_hadamard", c_hadamard),
    ("channel_maxima", channel_maxima),
    ("checkpoint_files", checkpoint_files),
    ("eval_journal", eval_journal),
    ("eval_shard", eval_shard),
    ("float_files", float_files),
    ("floating_point", floating_point),
    ("gate_policy", gate_policy),
    ("generation_settings", generation_settings),
    ("gguf", gguf),
    ("gguf_model", gguf_model),
    ("imatrix", imatrix),
    ("job_record", job_record),
    ("job_tokens", job_tokens),
    ("manifest", manifest),
    ("model_config", model_config),
    ("names", names),
    ("pack", pack),
    ("packed", packed),
    ("quant_report", quant_report),
    ("recipe", recipe),
    ("results", results),
    ("round_trip", round_trip),
    ("safetensors", safetensors),
    ("sentencepiece_model", sentencepiece_model),
    ("shard_index", shard_index),
    ("stored_reference", stored_reference),
    ("text_lines", text_lines),
    ("tokenizer_settings", tokenizer_settings),
    ("unit_files", unit_files),
    #[cfg(feature = "store")]
    ("unit_objects", unit_objects),
    ("write_journal", write_journal),
];

fn bits(values: &[f32]) -> Vec<u32> {
    // All NaN count as equal, because processors return different ones.
    values.iter().map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() }).collect()
}
