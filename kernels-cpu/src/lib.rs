//! Kernels that multiply activations by quantized weights on a CPU.
//!
//! Weights are passed as a [`WeightView`], packed once ([`PackedLinear`], or [`Layout`] for callers that own the
//! bytes), and multiplied by int8 or float rows ([`Int8Rows`], [`FloatRows`]). Callers provide threads ([`Parallel`]).
//!
//! ```
//! use quant_kernels_cpu::{Int8Rows, PackedLinear, RowLayout, Serial, WeightView};
//!
//! // Two output features, eight input features: 4-bit codes with the zero point 8, one scale per row.
//! let codes = [9, 9, 9, 9, 9, 9, 9, 9, 7, 7, 7, 7, 7, 7, 7, 7];
//! let view = WeightView::new([2, 8], 4, 8, &codes, &[0.5, 0.25], None)?;
//! let weight = PackedLinear::pack(&view, None, false, &Serial)?;
//!
//! // Three rows of activations, quantized to int8 and multiplied.
//! let mut rows = Int8Rows::default();
//! rows.quantize(&[1.0f32; 3 * 8], RowLayout::of(weight.layout()), &Serial)?;
//! let mut out = [0.0; 3 * 2];
//! weight.multiply(&rows, &mut out, &Serial)?;
//! assert_eq!(out, [4.0, -2.0, 4.0, -2.0, 4.0, -2.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

pub mod activation;
#[allow(unsafe_code, reason = "kernels read and write through pointers, whose bounds callers check")]
pub mod attention;
pub mod bf16;
#[cfg(feature = "candle")]
pub mod candle;
mod dequantize;
mod error;
#[allow(unsafe_code, reason = "threads that write parts of one matrix")]
pub mod experts;
mod float_format;
#[allow(unsafe_code, reason = "vector instructions, and threads that write rows of one matrix")]
mod hadamard;
mod isa;
mod layout;
pub mod limits;
#[allow(unsafe_code, reason = "tiles read and write through pointers, whose bounds callers check")]
mod linear;
mod packed_check;
mod parallel;
pub mod reference;
#[allow(unsafe_code, reason = "vector instructions, loads and stores")]
mod simd;
mod weight_view;

pub use activation::{
    Activations, Bf16Parts, Element, FloatRows, GateUp, Int8Rows, RmsNorm, RowLayout, StaticScale, narrow,
    rms_norm, silu_mul,
};
pub use dequantize::dequantize_rows;
pub use error::KernelError;
pub use float_format::{FloatFormat, e5m2_value, e8m0_value};
pub use hadamard::{Construction, Hadamard};
pub use isa::{Isa, IsaToken};
pub use layout::{LINE, Layout, PANEL_ROWS, STEP, SUPER_BLOCK, ScaleType, Unpacked};
pub use linear::{PackedLinear, PackedView, Product, multiply_each, multiply_float_each};
#[cfg(feature = "rayon")]
pub use parallel::Rayon;
pub use parallel::{Parallel, Serial};
pub use weight_view::{Scales, SuperMins, SuperScales, ViewError, WeightView};

/// The examples of the pages are compiled, and run if they have a `main`.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../docs/kernels.md")]
    struct Kernels;
    #[doc = include_str!("../../docs/kernels/activations.md")]
    struct ActivationsPage;
    #[doc = include_str!("../../docs/kernels/attention.md")]
    struct Attention;
    #[doc = include_str!("../../docs/kernels/experts.md")]
    struct Experts;
}
