//! The host side of kernels that multiply activations with quantized weights on NVIDIA GPUs.
//!
//! The module of a kernel family, such as [`activation`], plans launches. A kernel is compiled by NVRTC when first used
//! ([`compile`]), cached on disk ([`image_cache`]), loaded ([`device`]) and launched on the caller's stream
//! ([`launch`]). CUDA's libraries are loaded when first used; without them, calls return errors.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use quant_kernels_cpu::WeightView;
//! use quant_kernels_cuda::standalone::{Activations, CudaLinear, Launcher};
//!
//! # let (codes, scales) = (vec![9; 256 * 512], vec![0.5; 256 * 4]);
//! quant_kernels_cuda::require_device()?; // says what is missing
//! let view = WeightView::new([256, 512], 4, 128, &codes, &scales, None)?;
//! let linear = CudaLinear::new(&view, Activations::Float, &Arc::new(Launcher::new()?))?;
//! let mut out = vec![0.0; 2 * 256];
//! linear.multiply(&vec![1.0; 2 * 512], &mut out)?; // two rows, from and to main memory
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_op_in_unsafe_fn)]

pub mod activation;
pub mod attention;
#[cfg(feature = "candle")]
pub mod candle;
pub mod compile;
pub mod device;
mod error;
pub mod experts;
mod float;
pub mod image_cache;
pub mod launch;
pub mod layout;
mod libraries;
pub mod linear;
pub mod measure;
pub mod registry;
pub mod standalone;
#[cfg(any(feature = "candle", test))]
mod tensor;

pub use error::{Error, Result};
pub use float::Float;
pub use libraries::{device_count, driver_available, nvrtc_available, require_device, require_nvrtc};

/// The examples of the pages are compiled.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../docs/kernels/cuda-activation.md")]
    struct Activations;
    #[doc = include_str!("../../docs/kernels/cuda-attention.md")]
    struct Attention;
    #[doc = include_str!("../../docs/kernels/cuda-host.md")]
    struct Host;
    #[doc = include_str!("../../docs/kernels/cuda-linear.md")]
    struct Linear;
}
