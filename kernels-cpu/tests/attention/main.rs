//! Attention on every kind of cache and every instruction set is compared with the definition.

mod cache;
mod case;
#[path = "../common/mod.rs"]
mod common;
mod definition;
mod foreign;
mod misuse;
