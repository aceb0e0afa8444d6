//! Kernels that multiply activations with quantized weights on a CPU.
//!
//! This crate is a leaf: it takes slices and shapes, and knows no checkpoint, model, file or
//! thread pool. Weights reach it as a [`WeightView`].
#![deny(unsafe_code)]

pub mod bf16;
mod dequantize;
pub mod reference;
mod weight_view;

pub use dequantize::dequantize_rows;
pub use weight_view::{ViewError, WeightView};
