//! Float weights become codes, scales and zeros; no packing yet.
//!
//! The grids, plain rounding and the error of it are in `quant-formats` and stand here under the same names;
//! [`gptq`] lets weights make up for each other's rounding.

pub mod gptq;

pub use quant_formats::quantize::*;
