//! Code that several studies share; `xtask` has what they share with its commands.

pub mod gguf;
pub mod llama_cpp;
pub mod rows;
pub mod venv;
