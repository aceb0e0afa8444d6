//! Code that several commands share.

pub mod base;
pub mod energy;
pub mod excerpt;
pub mod host;
pub mod llama;
pub mod measure;
pub mod noise;
pub mod random;
pub mod record;
pub mod shards;
pub mod shell;
pub mod steps;
