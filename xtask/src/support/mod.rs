//! Code that several commands share.

pub mod base;
pub mod excerpt;
pub mod gguf;
pub mod host;
pub mod llama;
pub mod llama_cpp;
pub mod measure;
pub mod noise;
pub mod record;
pub mod rows;
pub mod shards;
pub mod shell;
pub mod steps;
pub mod venv;
