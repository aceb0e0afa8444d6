//! Attention on every kind of cache and every instruction set, against the definition: random, extreme and ragged.

mod cache;
mod case;
#[path = "../common/mod.rs"]
mod common;
mod definition;
mod foreign;
mod misuse;
