//! Rounds float weights to codes, scales and zero points, which are packed later.
//!
//! `quant-formats` implements the grids and rounding to nearest with its error. With [`gptq`], weights compensate each
//! other's rounding errors.

pub mod gptq;
pub(crate) mod layer_inputs;

pub use quant_formats::quantize::*;
